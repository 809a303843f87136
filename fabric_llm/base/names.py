"""Check names of models and datasets, suggest the right one for a name that doesn't exist, and show any name."""

from __future__ import annotations

import os
import re
from pathlib import Path

from fabric_llm.base.faults import printable
from fabric_llm.base.spelling import nearest

MOST_CHARACTERS = 300  # of a path


def shown(name: object, most: int = MOST_CHARACTERS) -> str:
    """A name that others chose, such as that of a file or a field, for a message: in one line, and cut in its middle."""
    text = str(name)
    return printable(text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 2 :]}")


def hub_name(flag: str, name: str, what: str = "model") -> None:
    """Raises ValueError if `name`, which isn't a local folder, can't be a name on the hub either."""
    if found := re.fullmatch(
        r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/(?:datasets/)?([\w.-]+/[\w.-]+?)(?:\.git)?(?:[/?#].*)?",
        name.strip(),
    ):
        raise ValueError(f"{flag} {name!r} is an address: take {flag} {found[1]}.")
    if os.path.exists(name):
        raise ValueError(f"{flag} {name!r} is a file: it takes a folder, or a name on the hub such as org/name.")
    if found := re.fullmatch(r"models--([^/]+)--([^/]+)", name.rstrip("/")):
        raise ValueError(f"No {what} {name!r} here: take {flag} {found[1]}/{found[2]}.")
    if found := re.fullmatch(r"([\w.-]+/[\w.-]+)[@:]([\w.-]+)", name):
        raise ValueError(f"{flag} {name!r}: a revision can't be given by name; download it and name its folder.")
    if name != name.strip() or not name:
        raise ValueError(f"{flag} {name!r} has spaces around the name: take {flag} {name.strip() or 'org/name'}.")
    if not re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", name) or "--" in name or ".." in name:
        raise ValueError(
            f"No {what} {name!r}: there is no such folder, and it can't be a name on the hub.{_near(name)}"
        )
    if is_path(name):
        raise ValueError(f"No {what} {name!r}: there is no such folder.{_near(name)}")


def is_path(name: str) -> bool:
    """Whether a name that isn't here is that of a folder, of which the parent is here, rather than one on the hub."""
    return "/" in name.rstrip("/") and os.path.isdir(os.path.dirname(name.rstrip("/")))


def _near(name: str) -> str:
    """What exists instead of the path `name`, as the end of a message."""
    path = Path(name)
    if name.startswith("~") and path.expanduser().exists():  # --model_name=~/mine
        return f" The shell replaces ~ only at the start of a word: take {path.expanduser()}."
    if near := nearest_of(path):
        return near
    while not path.parent.exists():
        path = path.parent
    return f" There is {str(path.parent)!r}, without {path.name!r}." if len(path.parts) > 1 else ""


def nearest_of(path: Path, files: bool = False) -> str:
    """A folder, or a file too, with a similar name beside `path`, which doesn't exist, as the end of a message."""
    while not path.parent.exists():
        path = path.parent
    try:
        beside = [other.name for other in path.absolute().parent.iterdir() if files or other.is_dir()]
    except OSError:
        beside = []
    close = nearest(path.name, sorted(beside))
    return f" Did you mean {str(path.with_name(close[0]))!r}?" if len(close) == 1 else ""
