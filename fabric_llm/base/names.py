"""Check names of models and datasets, and suggest the right one for a name that doesn't exist."""

from __future__ import annotations

import os
import re
from pathlib import Path

from fabric_llm.base.spelling import nearest


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


def _near(name: str) -> str:
    """What exists instead of the path `name`, as the end of a message."""
    path = Path(name)
    if name.startswith("~") and path.expanduser().exists():  # --model_name=~/mine
        return f" The shell replaces ~ only at the start of a word: take {path.expanduser()}."
    while not path.parent.exists():
        path = path.parent
    return nearest_of(path) or (
        f" There is {str(path.parent)!r}, without {path.name!r}." if len(path.parts) > 1 else ""
    )


def nearest_of(path: Path) -> str:
    """A folder with a similar name beside `path`, which doesn't exist, as the end of a message."""
    try:
        beside = [other.name for other in path.absolute().parent.iterdir() if other.is_dir()]
    except OSError:
        beside = []
    close = nearest(path.name, sorted(beside))
    return f" Did you mean {str(path.with_name(close[0]))!r}?" if len(close) == 1 else ""
