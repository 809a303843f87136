"""What a mistyped flag, value, model, dataset or folder may mean, and how names are shown in messages."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from fabric_llm.base.faults import printable

MOST_CHARACTERS = 300  # of a path
SHORT = 5  # letters: in such a name two swapped letters, as in `lod` for `old`, are a large part
LEAST_LIKENESS_OF_SHORT, LEAST_LIKENESS = 0.65, 0.8  # difflib's ratios: a wrong suggestion is worse than none


def shown(name: object, most: int = MOST_CHARACTERS) -> str:
    """A name from outside, such as that of a file or a field, for a message: in one line, and cut in the middle if it is long."""
    text = str(name)
    return printable(text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 2 :]}")


def nearest(name: str, known: Iterable[str]) -> list[str]:
    """[the known name that `name` is most likely a typo of], [] if none is near."""
    cutoff = LEAST_LIKENESS_OF_SHORT if len(name) <= SHORT else LEAST_LIKENESS
    return get_close_matches(name, list(known), n=1, cutoff=cutoff)


def flag_instead(name: str, meanings: Mapping[str, str]) -> str:
    """The end of a sentence about the unknown flag `name`. meanings: {word that a user may have meant: that end}."""
    name = name.replace("-", "_").lower()
    same_letter = [word for word in meanings if word[0] == name[:1]]  # the first is hardly ever mistyped
    words = [name, *nearest(name, same_letter)]
    return next((meanings[word] for word in words if word in meanings), "See --help.")


def value_instead(value: str, words: Iterable[Any], kinds: str, instead: Mapping[str, str]) -> str:
    """What to give instead of a value that a flag doesn't take; "" if that isn't known.

    words: those that it takes. kinds: the types that it takes, such as "an integer". instead: {regular expression for values
    in lower case: the advice, with {} for the value}.
    """
    low = value.lower().strip()
    if known := [advice for pattern, advice in instead.items() if re.fullmatch(pattern, low)]:
        return known[0].format(value)
    if low in ("none", "no", "off", "false") and "an integer" in kinds:
        return "leave it out"
    if kinds == "text":  # which 3:5 isn't: in YAML it is the number 185
        return "in a YAML file, write it in quotes"
    by_spelling = {str(word).lower().replace("-", "_"): word for word in words}
    if kinds == "true or false":
        by_spelling = {"0": "false", "1": "true"}
    if close := nearest(low.replace("-", "_"), by_spelling):
        return f"take {by_spelling[close[0]]}"
    # A number, without what isn't part of it, such as a comma or a printed minus sign.
    plain = low.rstrip(",;").replace(",", "").replace("−", "-").replace("–", "-").strip("'\" ")
    if not re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d{1,3})?", plain):
        return ""
    whole = float(plain).is_integer() and "an integer" in kinds
    return f"take {int(float(plain))}" if whole else f"take {plain}" if "a number" in kinds else ""


def hub_name(flag: str, name: str, what: str = "model") -> None:
    """Raises ValueError if `name`, which isn't a folder here, can't be a name on the hub either."""
    if os.path.exists(name):
        raise ValueError(f"{flag} {name!r} is a file: it takes a folder, or a name on the hub such as org/name.")
    if re.fullmatch(r"[\w.-]+/[\w.-]+[@:][\w.-]+", name):
        raise ValueError(f"{flag} {name!r}: a revision can't be given by name; download it and name its folder.")
    for pattern in (
        r"\s*(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/(?:datasets/)?([\w.-]+/[\w.-]+?)(?:\.git)?(?:[/?#].*)?\s*",
        r"models--([^/]+--[^/]+)/*",  # of the cache
        r"\s+(.*?)\s*|(.*?)\s+",
    ):
        if found := re.fullmatch(pattern, name):
            instead = next(filter(None, found.groups()), "org/name").replace("--", "/")
            raise ValueError(f"No {what} {name!r} here: take {flag} {instead}.")
    is_name = re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", name) and "--" not in name and ".." not in name
    if is_name and not is_path(name):
        return
    near = nearest_of(Path(name))
    if name.startswith("~") and Path(name).expanduser().exists():  # --model_name=~/mine
        near = f" The shell replaces ~ only at the start of a word: take {Path(name).expanduser()}."
    if not near and len((path := _missing(Path(name))).parts) > 1:
        near = f" There is {str(path.parent)!r}, without {path.name!r}."
    nor = "" if is_name else ", and it can't be a name on the hub"
    raise ValueError(f"No {what} {name!r}: there is no such folder{nor}.{near}")


def is_path(name: str) -> bool:
    """Whether a name that doesn't exist here means a folder rather than the hub: its parent exists here."""
    return "/" in name.rstrip("/") and os.path.isdir(os.path.dirname(name.rstrip("/")))


def nearest_of(path: Path, files: bool = False) -> str:
    """The end of a message about `path`, which doesn't exist: a folder, or with `files` a file, with a similar name."""
    path, beside = _missing(path), []
    with suppress(OSError):
        beside = [other.name for other in path.absolute().parent.iterdir() if files or other.is_dir()]
    close = nearest(path.name, sorted(beside))
    return f" Did you mean {str(path.with_name(close[0]))!r}?" if close else ""


def _missing(path: Path) -> Path:
    """`path`, which doesn't exist, or the first folder on the way to it that doesn't."""
    while not path.parent.exists():
        path = path.parent
    return path
