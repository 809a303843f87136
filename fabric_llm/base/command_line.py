"""Command lines: dataclasses of flags -> a parser, one sentence for each mistake, and YAML files of
flags.

arguments.py has the flags. Functions of this package that need many of them take `Flags`, and read
them by group and name.
"""

import argparse
import ast
import inspect
import math
import os
import re
import sys
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NoReturn, Optional, Union, get_args, get_origin, get_type_hints

from fabric_llm.base.faults import BAD_INPUT, missing_package, printable
from fabric_llm.base.files import write_atomically
from fabric_llm.base.help import answer_help
from fabric_llm.base.names import DASH, ROOT, at_home, nearest_of, shown, unknown, with_dash

try:
    import yaml
except ModuleNotFoundError as error:  # here, since no command has begun that could say it
    print(f"error: {missing_package(error)}", file=sys.stderr)
    raise SystemExit(BAD_INPUT) from None

# arguments.Arguments, which this package doesn't import. A group's flags are its fields:
# `flags.training.lr`.
Flags = Any
LONGEST_NUMBER = 100  # characters
SECONDS_FOR_THE_FIRST = 20.0  # for the first process of a machine to print a mistake
# The environment variable of a run that has started again by itself: the flags with which it did.
AGAIN = "FABRIC_LLM_AGAIN"
MAX_YAML_BYTES = 64 * 2**10  # enough for hundreds of sources with stages
MAX_DIGITS = 1000
MAX_DEPTH = 50
# What argparse takes for a flag, as of negative numbers it only knows those such as -1 and -0.5.
NEGATIVE = re.compile(r"-\.?(\d|(inf|infinity|nan)$)", re.I)


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
        read = _scalar(given) if isinstance(given, str) else given
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
        quotes = ": write it in quotes" if is_unquoted else ""
        raise ValueError(f"takes {self.values}, not {shown(written)!r}{quotes}.")

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


CONFIG = Flag(
    None,
    "YAML file of flags; the command line wins over it",
    Optional[str],
    takes="the name of a YAML file",
    kept=False,
    basic=True,
    path=True,
)


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


def is_rank_zero() -> bool:
    """True in the process that speaks to the user, also before there is a process group."""
    node = os.environ.get("NODE_RANK", os.environ.get("GROUP_RANK", "0"))
    # Without RANK, local rank 0 of the first machine is rank 0.
    of_machine = os.environ.get("LOCAL_RANK", "0") if node == "0" else "other"
    return os.environ.get("RANK", of_machine) == "0"


def is_first_of_machine() -> bool:
    """True in one process of each machine."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def fail(program: str, sentence: str, code: int = BAD_INPUT) -> NoReturn:
    """End with an exit code, after the first process of each machine has printed a sentence on
    stderr."""
    if is_first_of_machine():
        print(f"{program}: error: {printable(sentence)}", file=sys.stderr, flush=True)
    elif "TORCHELASTIC_RUN_ID" in os.environ and "torch" not in sys.modules and code == BAD_INPUT:
        # Every rank finds this mistake. When the first one exits, torchrun ends the others, maybe
        # before it is printed.
        time.sleep(SECONDS_FOR_THE_FIRST)
    raise SystemExit(code)


def parse(
    program: str,
    about: str,
    flag_groups: Iterable[type],
    argv: Optional[list[str]] = None,
    first: str = "",
    of_run: bool = False,
    elsewhere: Mapping[str, str] = {},
    removed: Iterable[str] = (),
    only_typed: Collection[str] = (),
) -> dict[str, Any]:
    """Flag name -> value. Exits with code 2 and one sentence on anything unknown or out of range.

    A value of `None` or `null` is a flag that isn't given. about: what --help begins with. first:
    the flag whose name may be left out where it comes before all others. of_run: --config is the
    arguments.yaml of a run, which only has flags that are kept. elsewhere: names that are no flags
    here, and what is said of each. removed: flags of earlier versions, which an arguments.yaml may
    still hold. only_typed: flags that no file may hold; `elsewhere` says why.
    """
    # A copy, because flags may be put before it below.
    argv = list(sys.argv[1:] if argv is None else argv)
    sections = {
        "": {"config": CONFIG},
        **{" ".join((group.__doc__ or "").split()): declared(group) for group in flag_groups},
    }
    try:
        # --help ends the program here, before anything is checked.
        answer_help(about, sections, argv)
    except ValueError as error:
        fail(program, str(error))
    # Without the first section: --config is no flag that a program gets.
    flags = {name: one for group in [*sections.values()][1:] for name, one in group.items()}
    if first and argv and not argv[0].startswith("-"):
        argv = [f"--{first}", *argv]
    # Unknown flags are answered here, with the flags that may be meant. What is a flag is decided
    # as argparse does.
    names = [
        word.partition("=")[0]
        for word in argv
        if re.match(r"-+[A-Za-z][^ ]*(=|$)", word) and not NEGATIVE.match(word)
    ]
    if others := [name for name in names if name.removeprefix("--") not in {"config", *flags}]:
        fail(
            program, unknown("flag", {name.lstrip("-"): name for name in others}, flags, elsewhere)
        )
    given = _given(program, argv, {"config": CONFIG, **flags}, first)
    named, written = {name: f"--{name}" for name in given}, dict[str, str]()
    config = _value_of(program, CONFIG, given.pop("config", None), "--config")
    if config is not None:
        in_config = {name: one for name, one in flags.items() if one.kept or not of_run}
        for name in only_typed:
            del in_config[name]
        # They are read, so that an old run can be resumed, and then dropped.
        if Path(config).name == "arguments.yaml":
            in_config |= dict.fromkeys(removed, Flag(None, "", str))
        in_file, lines, written = _read_config(program, config, in_config, elsewhere)
        written = {name: text for name, text in written.items() if name not in given}
        # The command line wins, wherever --config stands.
        given = in_file | given
        named = {name: f"line {line} of {config}: {name}" for name, line in lines.items()} | named
    values = {}
    for name, one in flags.items():
        value = None
        # A key of the file without a value is a flag that isn't given.
        if given.get(name) is not None:
            value = _value_of(program, one, given[name], named[name], written.get(name))
        values[name] = one.default if value is None else value
    required = [name for name, one in flags.items() if one.is_required]
    if missing := [f"--{name}" for name in required if values[name] is None]:
        usage = about.partition("\n")[0].removeprefix("usage: ")
        fail(program, f"missing: {', '.join(missing)}. It is called like this: {usage}")
    return values


def _value_of(
    program: str, one: Flag, given: Any, named: str, written: Optional[str] = None
) -> Any:
    """`one.value_of`. Exit with code 2 for what it doesn't take. named: the flag in a sentence."""
    try:
        return one.value_of(given, written)
    except ValueError as error:
        fail(program, with_dash(f"{named} {error}"))


def _given(program: str, argv: list[str], flags: Mapping[str, Flag], first: str) -> dict[str, Any]:
    """{flag: its text on the command line, or texts}. Exit with code 2 for one without a value, and
    for a value without a flag, unless it is that of `first`."""
    # Without abbreviations: a new flag would change what an old abbreviation means.
    parser = argparse.ArgumentParser(
        add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS
    )
    for name, one in flags.items():
        nargs = "*" if one.kinds == [list[str]] else "?"
        parser.add_argument(f"--{name}", nargs=nargs, action="append")
    namespace, unexpected = parser.parse_known_args(_joined(argv, flags))
    given = {}
    for name, texts in vars(namespace).items():
        if None in texts or [] in texts:
            dash = ""
            if str in flags[name].kinds:
                dash = f" A value that begins with a dash is written --{name}=VALUE."
            fail(program, f"--{name} takes {flags[name].values}, and nothing is given.{dash}")
        *before, given[name] = texts
        # A list takes all words up to the next flag.
        for word in given[name] if flags[name].kinds == [list[str]] else ():
            if re.fullmatch(rf"-?{DASH}+-?\w+(=.*)?", word):
                fail(program, with_dash(f"{word!r} is among the values of --{name}."))
        if before:
            _tell_of_repeated(program, name, flags[name], texts)
    # The flag whose name may be left out may also come last.
    if first and first not in given and unexpected:
        if flags[first].kinds == [list[str]]:
            given[first], unexpected = unexpected, []
        else:
            given[first] = unexpected.pop(0)
    # Such as the second word of a text without quotes.
    if unexpected:
        sentence = (
            f"unexpected {unexpected[0]!r}: every flag is written --name value, and a value with "
            "spaces in quotes."
        )
        if unexpected[0].endswith((".yaml", ".yml")):
            sentence = f"unexpected {unexpected[0]!r}. Did you mean --config {unexpected[0]}?"
        fail(program, with_dash(sentence))
    return given


def _joined(argv: list[str], flags: Mapping[str, Flag]) -> list[str]:
    """`argv` with each negative number behind the equals sign of its flag."""
    joined = argv[:1]
    for word in argv[1:]:
        dashes, name = joined[-1][:2], joined[-1][2:]
        # Behind an equals sign argparse reads one word, and a list may have several.
        takes_one = dashes == "--" and name in flags and flags[name].kinds != [list[str]]
        if takes_one and NEGATIVE.match(word):
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def _tell_of_repeated(program: str, name: str, one: Flag, texts: list[Any]) -> None:
    """Exit with code 2 where a list is given again, or --config; warn where any other flag is, with
    another value. texts: what is given to the flag, each time.

    It isn't refused, since scripts put what differs behind flags that they have.
    """
    *before, last = texts
    many = f"--{name} is given {len(texts)} times"
    # The others would be dropped silently.
    if one.kinds == [list[str]]:
        fail(program, f"{many}: give all its values behind one --{name}.")
    # Only the last file would be read.
    if one is CONFIG:
        fail(program, f"{many}: take one file, and flags for what differs.")
    # A run that starts again, by itself or by torchrun, has the same words, and more of its own.
    is_restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    is_restarted |= AGAIN in os.environ
    if {*before} - {last} and is_rank_zero() and not is_restarted:
        has_commas = "comma-separated" in one.values + one.help
        all_of_them = ". It takes all of them in one, with commas" if has_commas else ""
        message = f"Warning: {many}: {last} counts, not {', '.join(before)}{all_of_them}."
        print(printable(message), file=sys.stderr, flush=True)


def _read_config(
    program: str, config: str, flags: dict[str, Flag], elsewhere: Mapping[str, str]
) -> tuple[dict[str, Any], dict[str, int], dict[str, str]]:
    """({key: value}, {key: line}, {key: the value as it is written}) of the file. Exit with code 2
    unless its keys are known."""
    try:
        text = yaml_text(Path(config))
        values = load_yaml(text, repr(config))
    except OSError as error:
        meant = ""
        if isinstance(error, FileNotFoundError):
            meant = nearest_of(Path(config), files=True) or _preset(config)
        fail(program, f"--config {config!r} can't be read: {error.strerror}.{meant}")
    except ValueError as error:
        fail(program, f"--config: {error}.")
    if not isinstance(values, dict):
        fail(
            program,
            f"--config {config!r} must hold `flag: value` lines, but holds "
            f"{'nothing' if values is None else 'no such lines'}.",
        )
    # Values have no line numbers, so the text is read once more as nodes.
    nodes = yaml.compose(text, Loader=_Loader).value
    # A key is text as well, also one that YAML reads as true, such as `on`.
    values = {key.value: value for (key, _), value in zip(nodes, values.values())}
    lines = {key.value: key.start_mark.line + 1 for key, _ in nodes}
    written = {key.value: _written(node, text) for key, node in nodes}
    others = [key for key in values if key not in flags]
    for name in others:
        if isinstance(values.get(name), dict):
            fail(
                program,
                f"line {lines.get(name)}: {name!r} in {config} is a section, but such a file has "
                "lines of `flag: value` alone.",
            )
    if len(others) == 1:
        [name] = others
        message = unknown("key", {name: f"{name!r} in {config}"}, flags, elsewhere)
        fail(program, with_dash(f"line {lines.get(name)}: {message}"))
    if others:
        shown = {name: f"{name!r} in line {lines.get(name)}" for name in others}
        fail(program, with_dash(f"{config}: {unknown('key', shown, flags, elsewhere)}"))
    return values, lines, written


def _written(node: Any, text: str) -> str:
    """The value of a node of YAML as `text` has it, without the quotes around it."""
    if isinstance(node, yaml.ScalarNode):
        return node.value
    return text[node.start_mark.index : node.end_mark.index].strip()


def _preset(config: str) -> str:
    """The end of a message about a file that doesn't exist: the preset that its name may mean."""
    # The checkout may not be the working directory.
    presets = Path(os.path.relpath(ROOT / "configs"))
    return nearest_of(presets / f"{Path(config).stem}.yaml", files=True)


def write_yaml(flat: dict[str, Any], path: Path) -> None:
    """Flag name -> value as a YAML file that `--config` takes."""
    write_atomically(path, yaml.safe_dump(flat, sort_keys=False))


class _Loader(yaml.SafeLoader):
    """Without aliases, of which a few hundred bytes can fill any memory, merges, and keys that come
    twice."""

    def fetch_flow_collection_start(self, TokenClass: Any) -> None:
        """Called for each `[` and `{`. Far below the end of Python's stack, reading them takes
        seconds."""
        if self.flow_level == MAX_DEPTH:
            raise yaml.YAMLError(
                f"it is nested more than {MAX_DEPTH} deep, in line {self.line + 1}"
            )
        super().fetch_flow_collection_start(TokenClass)

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        value, line = getattr(event, "value", ""), event.start_mark.line + 1
        # Both `&name` and `*name` have an anchor.
        if event.anchor is not None:
            raise yaml.YAMLError(
                f"{event.anchor[:60]!r} in line {line} is an alias, or what one stands for"
            )
        # Python takes long to convert such a number, or refuses it with an error of its own.
        if len(value) > MAX_DIGITS and re.fullmatch("[-+0-9a-fA-Fxo_:]*", value):
            raise yaml.YAMLError(f"line {line} has a number of {len(value):,} characters")
        return super().compose_node(parent, index)

    def flatten_mapping(self, node: Any) -> None:
        """Called for each mapping, to apply merges, which aren't read."""
        seen = set()
        for key, _ in node.value:
            if (name := str(key.value)) in seen:
                raise yaml.YAMLError(
                    f"{name[:60]!r} comes twice, in line {key.start_mark.line + 1}"
                )
            seen.add(name)


# How yaml says that lines aren't `key: value`.
_LAYOUT = (
    r"mapping values|could not find expected ':'|expected '<document|expected <block end>|"
    r"found character '\\t'"
)
# Unlike in YAML 1.1, 2e-5 is a number; a date, 1:30, 010 and 0x10 are text.
_OTHERWISE = {f"tag:yaml.org,2002:{kind}" for kind in ("float", "int", "timestamp")}
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in _OTHERWISE]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_FLOAT = (
    r"(?i:[-+]?(\d[\d_]*\.[\d_]*|\.\d[\d_]*)(e[-+]?\d+)?|[-+]?\d[\d_]*e[-+]?\d+|[-+]?\.inf|\.nan)$"
)
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(_FLOAT), list("-+0123456789."))
# Python's word, which people copy from tutorials. `none` stays text: it is a value of some flags.
_Loader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile("None$"), ["N"])
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:int", re.compile(r"[-+]?(0|[1-9][\d_]*)$"), list("-+0123456789")
)


def read_yaml(path: Path) -> Any:
    """The content of a YAML file that may come from anybody. Raises OSError, and ValueError as
    `load_yaml`."""
    return load_yaml(yaml_text(path), repr(str(path)))


def yaml_text(path: Path) -> str:
    """The text of a YAML file, not much more than is read of it. Raises OSError, ValueError."""
    if path.exists() and not path.is_file():  # a pipe would block, a device has no end
        raise ValueError(f"{str(path)!r} isn't a file")
    with path.open("rb") as file:
        # One byte more than is allowed tells whether there is more.
        content = file.read(MAX_YAML_BYTES + 1)
    if len(content) > MAX_YAML_BYTES:
        return content.decode("latin-1")  # as many characters as bytes, which are too many
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{str(path)!r} isn't UTF-8 text, in line {line}") from error


def _scalar(text: str) -> Any:
    """What YAML reads in the text of one value. Other text, such as `# Title`, stays text."""
    if len(text) > LONGEST_NUMBER:  # reading it as YAML takes time
        return text
    # Of YAML's numbers, none begins with a 0.
    if re.fullmatch(r"[-+]?\d+", text):
        return int(text)
    try:
        value = load_yaml(text)
    except ValueError:
        return text
    return text if value is None and text.strip().lower() not in ("null", "none", "~") else value


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def load_yaml(text: str, subject: str = "it") -> Any:
    """The content of a YAML text. Raises ValueError, in a sentence about `subject` without a full
    stop."""
    # Checked before it is parsed, because parsing is slow.
    if len(text) > MAX_YAML_BYTES:
        raise ValueError(
            f"{subject} has more than {MAX_YAML_BYTES // 2**10} KiB, the most that is read as YAML"
        )
    try:
        return yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"{subject} can't be read as YAML: {_reason(error, text)}") from error


def _reason(error: BaseException, text: str) -> str:
    """Why a YAML text can't be read, with the line that is wrong."""
    problem, lines = str(getattr(error, "problem", None)), text.splitlines()
    # An error of `_Loader` has no mark. At the end of the text, the mark before says where.
    marks = (getattr(error, "problem_mark", None), getattr(error, "context_mark", None))
    at = [mark.line for mark in marks if mark is not None and "".join(lines[mark.line :]).strip()]
    if not at:
        # Messages of yaml have several lines and quote the text.
        return " ".join(str(error).split())[:300].rstrip(".")
    if problem == "but found another document":
        problem = "a file has one document, without `---` in the middle"
    if re.match(_LAYOUT, problem):
        problem = (
            "keys of one level begin in the same column, without tabs, a colon and a space follow "
            "each, and a value with a colon is written in quotes"
        )
    return f"line {at[0] + 1} is {lines[at[0]][:60]!r}, and {problem}"
