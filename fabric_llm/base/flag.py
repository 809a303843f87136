"""A flag: its declaration in a dataclass, and the values that it takes.

arguments.py has the flags. Functions of this package that need many of them take `Flags`, and read
them by group and name.
"""

import ast
import inspect
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, Optional, Union, get_args, get_origin, get_type_hints

from fabric_llm.base.names import at_home, shown
from fabric_llm.base.plain_yaml import LONGEST_NUMBER, scalar

# arguments.Arguments, which this package doesn't import. A group's flags are its fields:
# `flags.training.lr`.
Flags = Any


@dataclass(frozen=True)
class Flag:
    """The declaration of a flag, from which --help, checks, warnings, suggestions and resuming are
    derived.

    A flag belongs to the run: checkpoints hold its value, and a run that resumes with another value
    is refused unless --resume_override names the flag. `resume` and `kept=False` are exceptions.
    """

    default: Any
    help: str
    type: Any = None
    # a table whose keys it takes as well, such as those that --code registers
    names: Mapping[str, Any] = field(default_factory=dict)
    takes: str = ""  # its values in words, if the type doesn't say them
    above: Optional[float] = None  # the range of a number
    at_least: Optional[float] = None
    below: Optional[float] = None
    how: Optional[bool] = None  # of train.py: whether it says how is trained, or what
    # Of a resumed run: whether it may have another value never, by --resume_override, or freely.
    resume: Literal["never", "override", "free"] = "override"
    # in arguments.yaml; False if it names the run, or concerns a single start of it
    kept: bool = True
    # "flag, flag VALUE VALUE": it has no effect unless each is on, or has one of the values
    needs: str = ""
    # its names in other trainers, without those that are recognised as typos anyway
    aliases: str = ""
    basic: bool = False  # a first run needs it: it is in the short --help
    # it names a file or a folder, or several with commas, in which `~` is the home folder
    path: bool = False

    @property
    def belongs_to_run(self) -> bool:
        """Whether a resumed run changes it only by --resume_override."""
        return self.kept and self.resume == "override"

    @property
    def kinds(self) -> list[Any]:
        """The types and words that it takes, without None."""
        kinds, words = [], []
        alternatives = get_args(self.type) if get_origin(self.type) is Union else [self.type]
        for kind in alternatives:
            if get_origin(kind) is Literal:
                words += get_args(kind)
            elif kind is not type(None):
                kinds.append(kind)
        return kinds + words

    @property
    def values(self) -> str:
        """What it takes, in words."""
        names = {
            int: "an integer",
            float: "a number",
            bool: "true or false",
            str: "text",
            list[str]: "a list",
        }
        # Types in the table become words; the words of a Literal are shown as they are.
        *most, last = (str(names.get(kind, kind)) for kind in self.kinds)
        registered = f" ({', '.join(self.names)})" if self.takes and self.names else ""
        return self.takes + registered or ", ".join(most) + " or " * bool(most) + last

    @property
    def is_required(self) -> bool:
        """Whether it has no default, and its type doesn't take None."""
        return self.default is None and type(None) not in get_args(self.type)

    def value_of(self, given: Any, written: Optional[str] = None) -> Any:
        """The text of a command line, or the value of a YAML file, in the flag's type; None for a
        flag that isn't given. Raises ValueError with the end of a sentence.

        written: how the file has it, which the sentence quotes.
        """
        written = str(given) if written is None else written
        value = self._typed(given, written)
        if wrong := self.out_of_range(value):
            raise ValueError(f"must be {wrong}, not {shown(written)}.")
        # Such as that of a variable that the shell doesn't have. It would be the current folder.
        if self.path and (given == "" or isinstance(given, list) and "" in given):
            raise ValueError(f"takes {self.values}, and nothing is given.")
        # Python reads bytes that aren't UTF-8 as halves of surrogate pairs. Libraries don't open
        # such names of files either, but `input`, a list, is opened here.
        if isinstance(value, str) and re.search("[\ud800-\udfff]", value):
            raise ValueError(f"{ascii(value[:60])} isn't UTF-8 text.")
        # In quotes, or after an equals sign, the shell leaves `~` as it is.
        return at_home(value) if self.path and value is not None else value

    def _typed(self, given: Any, written: str) -> Any:
        """As `value_of`, whatever its range."""
        # In a file a text with commas may be a list, and one item of a list may stand alone.
        if self.kinds == [str] and _is_texts(given):
            given = ",".join(given)
        elif self.kinds == [list[str]] and isinstance(given, str):
            given = [given]
        # No number or word is so long.
        text = str(given) if isinstance(given, (str, int)) else ""
        if len(text) > LONGEST_NUMBER and self.kinds not in ([str], [list[str]]):
            many = f"a text of {len(text):,} characters: {text[:60]!r} ..."
            raise ValueError(f"takes {self.values}, not {many}")
        # On a command line a number is text as well.
        read = scalar(given) if isinstance(given, str) else given
        if read is None and type(None) in get_args(self.type):
            return None
        for kind in self.kinds:
            if kind == list[str]:
                fits, value = _is_texts(given), given
            elif kind is str:
                fits, value = isinstance(given, str), given
            elif kind is float:
                fits, value = type(read) in (int, float), read
            elif isinstance(kind, type):
                fits, value = type(read) is kind, read
            else:  # a word of a Literal
                fits, value = str(kind) == str(given), kind
            if fits:
                return float(value) if kind is float else value
        # In a file 12 is a number.
        is_unquoted = str in self.kinds and re.fullmatch(r"[\w.+-]+", written)
        advice = ": write it in quotes" if is_unquoted else ""
        if int in self.kinds and (meant := _whole_number(written)) is not None:
            advice = f": write {meant}"
        raise ValueError(f"takes {self.values}, not {shown(written)!r}{advice}.")

    def out_of_range(self, value: Any) -> str:
        """What a number must be and isn't, in words; "" if it is within its range, and for other
        values."""
        if not isinstance(value, (int, float)):
            return ""
        # `not value > limit` instead of `value <= limit`: NaN then counts as out of range.
        if self.above is not None and not value > self.above:
            words = "positive" if self.above == 0 else f"more than {self.above}"
        elif self.at_least is not None and not value >= self.at_least:
            words = f"at least {self.at_least}"
        elif self.below is not None and not value < self.below:
            words = f"less than {self.below}"
            # People mean percent, of which a decay has more than half.
            if self.below == 1 and (50 if "decay" in self.help else 0) <= value < 100:
                words += f", such as {value / 100:g}"
        elif not math.isfinite(value):
            words = "a finite number"
        else:
            return ""
        return words


def option(default: Any, help: str = "", **declaration: Any) -> Any:
    """A field that declares a flag. help: default is the string below the field. declaration:
    fields of `Flag`."""
    return field(default=default, metadata={"flag": Flag(default, help, **declaration)})


def groups(arguments_class: type) -> dict[str, type]:
    """Field name -> dataclass of every flag group of `arguments_class`."""
    hints = get_type_hints(arguments_class)
    # A class of arguments may also have fields that aren't groups.
    return {f.name: hints[f.name] for f in fields(arguments_class) if is_dataclass(hints[f.name])}


@cache
def declared(group: type) -> dict[str, Flag]:
    """Flag name -> its declaration, in the order of --help."""
    types, flags = get_type_hints(group), {}
    for f in fields(group):
        flag, kind = f.metadata["flag"], types[f.name]
        help = flag.help or strings_below(inspect.getfile(group))[group.__name__, f.name]
        # What --code has registered is allowed beside the built-in words.
        if flag.names:
            kind = Literal[(*get_args(kind), *flag.names)]
        flags[f.name] = replace(flag, help=help, type=kind)
    return flags


@cache
def strings_below(file: str) -> dict[tuple[str, str], str]:
    """(class name, field name) -> the string below the field. Python drops it, so the source is
    read, as Sphinx does."""
    texts = {}
    # Bytes, of which Python knows the encoding.
    for group in ast.parse(Path(file).read_bytes()).body:
        if not isinstance(group, ast.ClassDef):
            continue
        # A field and its text are two statements, one after the other.
        for above, below in pairwise(group.body):
            if isinstance(above, ast.AnnAssign) and isinstance(below, ast.Expr):
                text = ast.literal_eval(below.value)
                texts[group.name, ast.unparse(above.target)] = " ".join(text.split())
    return texts


def _whole_number(written: str) -> Optional[int]:
    """The integer that people mean by 1e3, 1,000, 10k or 1B; None for other texts."""
    digits = r"\d{1,3}(?:[,_]\d{3})+|\d+(?:\.\d+)?(?:e\+?\d\d?)?"
    found = re.fullmatch(rf"({digits}) ?([kmbt]?)", written.lower())
    if found is None:
        return None
    value = float(re.sub("[,_]", "", found[1])) * 1000 ** " kmbt".index(found[2] or " ")
    return int(value) if value.is_integer() else None


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)
