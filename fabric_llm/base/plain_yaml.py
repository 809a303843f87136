"""Plain YAML, which may come from anybody: without aliases and tags, in bounded time and memory,
with one sentence for each mistake."""

import re
import sys
from pathlib import Path
from typing import Any

from fabric_llm.base.faults import BAD_INPUT, missing_package
from fabric_llm.base.files import write_atomically

try:
    import yaml
except ModuleNotFoundError as error:  # here, since no command has begun that could say it
    print(f"error: {missing_package(error)}", file=sys.stderr)
    raise SystemExit(BAD_INPUT) from None

LONGEST_NUMBER = 100  # characters
MAX_YAML_BYTES = 64 * 2**10  # enough for hundreds of sources with stages
MAX_DIGITS = 1000
MAX_DEPTH = 50


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


def scalar(text: str) -> Any:
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


def pairs(text: str) -> list[tuple[str, int, str]]:
    """[(key, its line, its value as it is written)] of a mapping, of which `load_yaml` has read the
    values."""
    nodes = yaml.compose(text, Loader=_Loader).value
    # A key is text as well, also one that YAML reads as true, such as `on`.
    return [(key.value, key.start_mark.line + 1, _written(node, text)) for key, node in nodes]


def _written(node: Any, text: str) -> str:
    """The value of a node of YAML as `text` has it, without the quotes around it."""
    if isinstance(node, yaml.ScalarNode):
        return node.value
    return text[node.start_mark.index : node.end_mark.index].strip()
