"""What a mistyped flag, model, dataset or folder may mean, how names are shown in messages, and
whether the hub knows them."""

import os
import re
import shlex
import socket
import unicodedata
from collections.abc import Iterable, Mapping
from contextlib import suppress
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from threading import Event, Thread
from typing import Any, Optional
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from fabric_llm.base.faults import printable

ROOT = Path(__file__).resolve().parents[2]  # the checkout
DASH = "[\u2010-\u2015\u2212\ufe58\ufe63\uff0d]"  # of typesetters
MAX_CHARACTERS = 300  # of a path
MOST_NAMED = 10  # of one kind in a sentence
NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}"  # of a data source, and of a set that is evaluated
SECONDS_FOR_THE_HUB = 2.0
SHORT = 5  # letters: in such a name two swapped letters, as in `lod` for `old`, are a large part
# Ratios of difflib. A wrong suggestion is worse than none.
MIN_LIKENESS_OF_SHORT, MIN_LIKENESS = 0.65, 0.8


def shown(name: object, most: int = MAX_CHARACTERS) -> str:
    """A name from outside, such as that of a file or a field, for a message: in one line, and cut
    in the middle if it is long."""
    text = str(name)
    if len(text) > most:
        text = f"{text[: most // 2]} ... {text[-most // 2 :]}"
    return printable(text)


def listed(names: Iterable[object], separator: str = ", ") -> str:
    """The first of many names, and how many more there are."""
    words = [str(name) for name in names]
    first, more = separator.join(words[:MOST_NAMED]), len(words) - MOST_NAMED
    return f"{first} and {more} more" if more > 0 else first


def counted(number: int, noun: str) -> str:
    """Such as "1 row" and "1,024 rows"."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def nearest(name: str, known: Iterable[str]) -> list[str]:
    """[the known name that `name` is most likely a typo of], [] if none is near."""
    cutoff = MIN_LIKENESS_OF_SHORT if len(name) <= SHORT else MIN_LIKENESS
    return get_close_matches(name, list(known), n=1, cutoff=cutoff)


def flag_meant(name: str, flags: Mapping[str, Any], elsewhere: Mapping[str, str]) -> str:
    """What is said of an unknown flag, "" for nothing: which of `flags` may be meant, also by its
    name in another trainer, some of which have a section before it, as in optimizer.lr.

    elsewhere: what is said of names that are no flags here.
    """
    # Each name that a flag has here or elsewhere -> its name here.
    flag_of = {}
    for known, one in flags.items():
        for word in (known, *one.aliases.split()):
            flag_of[word] = known
    name = name.lstrip("-").replace("-", "_").lower()
    # Of `optimizer.lr` the whole comes first, then the last part.
    exact = [name, *reversed(name.split("."))]
    # A name with a known answer isn't guessed at.
    if name in elsewhere and name not in flag_of:
        return elsewhere[name]
    # As argparse, and others, switch a flag off.
    if (off := name.removeprefix("no_")) != name and bool in getattr(flags.get(off), "kinds", ()):
        return f"did you mean --{off} false?"
    # The first letter is hardly ever mistyped.
    same_letter = [word for word in flag_of if word[0] == name[:1]]
    meant = [flag_of[word] for word in (*exact, *nearest(name, same_letter)) if word in flag_of]
    if not meant:
        return ""
    # Such as bf16, which is part of two values of --precision.
    values = [kind for kind in flags[meant[0]].kinds if isinstance(kind, str) and name in kind]
    return f"did you mean --{' '.join([meant[0], ' or '.join(values)]).strip()}?"


def unknown(
    what: str, names: Mapping[str, str], flags: Mapping[str, Any], elsewhere: Mapping[str, str] = {}
) -> str:
    """A sentence about names that aren't among `flags`: {name: how it is shown}. what: flag or
    key."""
    meant = {name: flag_meant(name, flags, elsewhere) for name in names}
    if len(names) > 1:
        each = []
        for name, shown in names.items():
            each.append(f"{shown} ({meant[name]})" if meant[name] else shown)
        # All of them: each start that finds a few more costs patience.
        return f"unknown {what}s: {', '.join(each)}. See --help."
    # A single name gets a sentence of its own.
    [(name, shown)] = names.items()
    words = meant[name] or "see --help"
    if not words.endswith("?"):
        words += "."
    return f"unknown {what} {shown}. {words[0].upper()}{words[1:]}"


def with_dash(sentence: str) -> str:
    """A sentence about words of a command, with advice where they have a dash of typesetters, such
    as a PDF's."""
    dash = re.search(DASH, sentence)
    if dash is None:
        return sentence
    character = f"{dash[0]!r} (U+{ord(dash[0]):04X}, {unicodedata.name(dash[0])})"
    return f"{sentence} {character} isn't the '-' of a keyboard: type that."


def at_home(given: Any) -> Any:
    """A path, several with commas, or a list of them, with the home folder in place of `~`.

    A shell puts it there, but not in quotes and after an equals sign.
    """
    if isinstance(given, list):
        return [at_home(one) for one in given]
    # A blank may follow a comma.
    return re.sub(r"((?:^|,)\s*)(~[^/,]*)", lambda at: at[1] + os.path.expanduser(at[2]), given)


def comma_separated(given: Optional[str]) -> list[str]:
    """The words of a flag that takes several, without the white space around them; [] for None."""
    return [word.strip() for word in (given or "").split(",") if word.strip()]


def command(*words: object, **flags: object) -> str:
    """A command, or a part of one, as a shell takes it: words, then --name and its value, or the
    values of a list.

    What begins with a dash would be taken for a flag: a value follows an equals sign, and a path
    begins with ./ instead.
    """
    shown = []
    for word in words:
        looks_like_flag = isinstance(word, Path) and str(word).startswith("-")
        shown.append(f"./{word}" if looks_like_flag else str(word))
    for name, value in flags.items():
        given = value if isinstance(value, (list, tuple)) else [value]
        values = [str(one) for one in given]
        # argparse would take a value that begins with a dash for another flag.
        joined = len(values) == 1 and values[0].startswith("-")
        shown += [f"--{name}={values[0]}"] if joined else [f"--{name}", *values]
    return shlex.join(shown)


def by_flag(words: Iterable[str]) -> dict[str, list[str]]:
    """{flag: its values} of a command line, each flag as it is given last."""
    given: dict[str, list[str]] = {}
    name = ""
    for word in words:
        # A flag that comes again replaces its former value, as for the parser.
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            given[name] = [value] if equals else []
        elif name:
            given[name].append(word)
    return given


def hub_name(flag: str, name: str, what: str = "model") -> None:
    """Raises ValueError if `name`, which isn't a folder here, can't be a name on the hub either."""
    # The hub would only answer that it has no such name.
    if os.path.exists(name):
        raise ValueError(
            f"{flag} {name!r} is a file: it takes a folder, or a name on the hub such as org/name."
        )
    # The hub itself refuses names with `--` or `..`.
    is_name = re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", name) and "--" not in name and ".." not in name
    # It may be on the hub, which is asked later.
    if is_name and not is_path(name):
        return
    nor = "" if is_name else ", and it can't be a name on the hub"
    # People paste the address of its page.
    page = re.match(r"https?://(?:huggingface\.co|hf\.co)/([\w.-]+/[\w.-]+)", name)
    instead = nearest_of(Path(name)) if page is None else f" Did you mean {page[1]}?"
    raise ValueError(f"No {what} {name!r}: there is no such folder{nor}.{instead}")


@cache
def reach_hub() -> bool:
    """Whether the Hugging Face hub can be reached, tried once, for two seconds. If not, all
    libraries take their caches.

    Otherwise they would retry, with messages, for half a minute and more. True also if the hub
    isn't to be asked, and behind a proxy.
    """
    from huggingface_hub import constants

    address = urlsplit(constants.ENDPOINT)
    usual_port = 80 if address.scheme == "http" else 443
    host, port = address.hostname or "", address.port or usual_port
    # A proxy may reach the hub where this machine itself can't.
    if constants.is_offline_mode() or address.scheme in getproxies() and not proxy_bypass(host):
        return True
    answered = Event()

    def ask() -> None:
        with suppress(OSError), socket.create_connection((host, port), SECONDS_FOR_THE_HUB):
            answered.set()

    thread = Thread(target=ask, daemon=True)  # looking up an address has no time-out of its own
    thread.start()
    thread.join(SECONDS_FOR_THE_HUB)
    if not answered.is_set():
        # huggingface_hub reads this constant at each request, so it counts from now on.
        constants.HF_HUB_OFFLINE = True
    return answered.is_set()


def is_path(name: str) -> bool:
    """Whether a name that doesn't exist here means a folder rather than the hub: its parent exists
    here."""
    return "/" in name.rstrip("/") and os.path.isdir(os.path.dirname(name.rstrip("/")))


def no_folder(what: str, path: Path, instead: str = "") -> str:
    """The sentence about a folder that doesn't exist. instead: its end where no other is meant."""
    meant, where = nearest_of(path), ""
    # Most often the command is run in another directory than before.
    if not meant and not path.is_absolute():
        where = f" (from {os.getcwd()!r})"
    return f"No {what} at {str(path)!r}{where}.{meant or instead}"


def nearest_of(path: Path, files: bool = False) -> str:
    """The end of a message about `path`, which doesn't exist: a folder, or with `files` a file,
    with a similar name, the run that is called so, or what has the same name seen from a directory
    above, or from that of the programs."""
    if path.parent == Path() and Path("checkpoints", path).is_dir():
        return f" Did you mean {str(Path('checkpoints', path))!r}?"
    whole = path
    with suppress(OSError):  # of folders that can't be searched
        for place in (*Path.cwd().parents, ROOT) if not path.is_absolute() else ():
            if (there := place / path).is_dir() or files and there.is_file():
                return f" Did you mean {os.path.relpath(there)!r}?"
    while not path.parent.exists():  # then the first folder on the way to it that doesn't exist
        path = path.parent
    beside = []
    with suppress(OSError):
        beside = [
            other.name for other in path.absolute().parent.iterdir() if files or other.is_dir()
        ]
    # A checkpoint is often named without its zeros.
    padded = re.sub(r"^(step-)(\d+)$", lambda name: name[1] + name[2].zfill(8), path.name)
    close = [padded] if padded in beside else nearest(path.name, sorted(beside))
    # Or the beginning of a single name. Such a name of a file may be meant for the hub.
    longer = [name for name in beside if name.startswith(path.name) and not files]
    if not close and len(longer) == 1:
        close = longer
    if not close:
        return ""
    meant = path.with_name(close[0])
    # What comes behind it may be right.
    if (meant / whole.relative_to(path)).exists():
        meant /= whole.relative_to(path)
    return f" Did you mean {str(meant)!r}?"
