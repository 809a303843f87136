"""Read YAML that somebody else may have written: plain mappings, lists and values.

An alias or a merge key makes a few hundred bytes stand for more than any memory holds, so both are refused while the text is
parsed, before anything is built from it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

MOST_BYTES = 64 * 2**10  # hundreds of sources with their stages; a run's arguments.yaml has 4,000
MOST_DEPTH = 8
MOST_DIGITS = 1000
FLOAT = (
    r"[-+]?(\d[\d_]*\.[\d_]*|\.\d[\d_]*)([eE][-+]?\d+)?|[-+]?\d[\d_]*[eE][-+]?\d+|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
)


class NotPlain(ValueError):
    """It may be YAML, but such as none of these programs writes or needs, and as may be meant to do harm."""


class Loader(yaml.SafeLoader):
    """Refuses aliases, merges, tags, duplicate keys, and what is too deep or too long."""

    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        anchor, tag, line = event.anchor, getattr(event, "tag", None), event.start_mark.line + 1
        if anchor is not None:
            sign = "*" if isinstance(event, yaml.AliasEvent) else "&"
            raise NotPlain(f"has {sign + anchor[:60]!r} in line {line}: write the value itself, aliases aren't read")
        if tag not in (None, "!"):
            raise NotPlain(f"has the YAML tag {tag[:60]!r} in line {line}: plain values have none")
        self.depth += 1
        if self.depth > MOST_DEPTH:
            raise NotPlain(f"is more than {MOST_DEPTH} levels deep in line {line}")
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def flatten_mapping(self, node: Any) -> None:
        seen = set()
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if key.tag == "tag:yaml.org,2002:merge":
                raise NotPlain(f"has '<<' in line {line}: write the values themselves, merges aren't read")
            if isinstance(key.value, str) and key.value in seen:
                raise NotPlain(f"has {key.value[:60]!r} twice, in line {line} again")
            seen.add(str(key.value))

    def construct_yaml_int(self, node: Any) -> Any:
        if len(node.value) > MOST_DIGITS:
            raise NotPlain(f"has a number of {len(node.value):,} characters in line {node.start_mark.line + 1}")
        return super().construct_yaml_int(node)


Loader.add_constructor("tag:yaml.org,2002:int", Loader.construct_yaml_int)
# 2e-5 is a number, which YAML 1.1 takes for text, and a date is text.
NOT_TAKEN = {"tag:yaml.org,2002:float", "tag:yaml.org,2002:timestamp"}
Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in NOT_TAKEN]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(f"^(?:{FLOAT})$"), list("-+0123456789."))


def read(path: Path) -> Any:
    """What a file holds. Raises OSError, and ValueError as `load`."""
    if path.exists() and not path.is_file():  # a pipe would block, a device has no end
        raise NotPlain(f"{str(path)!r} isn't a file")
    with path.open("rb") as file:
        content = file.read(MOST_BYTES + 1)
    try:
        return load(content.decode(), repr(str(path)))
    except UnicodeDecodeError as error:
        raise ValueError(f"{str(path)!r} isn't text") from error


def load(text: str, subject: str = "it") -> Any:
    """What a text says. Raises ValueError in a sentence about `subject` that has no full stop, NotPlain for what is refused."""
    if len(text) > MOST_BYTES:
        raise NotPlain(f"{subject} has more than {MOST_BYTES // 2**10} KiB, the most that is read as YAML")
    try:
        return yaml.load(text, Loader=Loader)
    except yaml.YAMLError as error:
        said = " ".join(str(error).split())[:300].rstrip(".")
        raise ValueError(f"{subject} isn't valid YAML: {said}") from error
    except NotPlain as error:
        raise NotPlain(f"{subject} {error}") from error
