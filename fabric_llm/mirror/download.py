"""Objects of a store onto the disk: patiently, and into the user's cache."""

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Optional, TypeVar

from fabric_llm.base import files
from fabric_llm.base.failpoints import failpoint
from fabric_llm.base.files import fsync
from fabric_llm.mirror.store import Store, as_fault, errors, pauses, reason

OF_DATA = "manifest.json"  # of a prepared dataset
PATIENCE_SECONDS = 120.0
T = TypeVar("T")


def patiently(
    store: Store,
    action: Callable[[], T],
    seconds: Optional[float] = None,
    trouble: Callable[[str], Any] = lambda why: None,
    sleep: Callable[[float], Any] = time.sleep,
) -> T:
    """Call `action` until it succeeds, and return its result. Tries end `seconds` (default:
    PATIENCE_SECONDS) after the first error, not after the first call, since an action may take long
    itself. Raises Fault (74, 2) then, and OSError of the local disk. trouble: called with what went
    wrong each time."""
    end, is_refused = None, False
    for pause in pauses():
        try:
            return action()
        except _Disk as error:
            raise error.__cause__ from None
        except errors() as error:
            fault, now = as_fault(error, store.address, store.in_run), time.monotonic()
            if end is None:
                end = now + (PATIENCE_SECONDS if seconds is None else seconds)
            # Keys that are wrong aren't right a minute later, unless a file has new ones.
            if is_refused and not fault.retryable or now + pause > end:
                raise fault from error
            is_refused = not fault.retryable
            if not is_refused:
                trouble(reason(error))
        if not is_refused:
            sleep(pause)
        store.reopen()
    raise AssertionError


def download(store: Store, place: str, path: Path, size: int) -> str:
    """Write an object of `size` bytes into a file, durably and patiently. Returns the sha256, see
    `Store.read`. Raises Fault (74, 2)."""
    with path.open("wb") as file:

        def take(piece: bytes) -> None:
            _write(file, piece)
            failpoint("mirror.fetching")

        sha256 = store.read(place, size, partial(patiently, store), take)
    fsync(path)
    return sha256


def _write(file: Any, piece: bytes) -> None:
    try:
        file.write(piece)
        file.flush()
    # Else it would pass for an error of the server, and be tried again.
    except OSError as error:
        raise _Disk from error


class _Disk(Exception):
    """Its cause is an error of the local disk."""


def user_cache() -> Path:
    """The user's folder in which what is fetched stays. Raises Fault (73)."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = home / "fabric_llm"
    # As in a container whose user has no home.
    files.writable(folder / "x", f"{str(home)!r} can't be written: set XDG_CACHE_HOME to another")
    return folder


def say_at_once(text: str) -> None:
    """On stdout, also where that is a file: what follows may take long."""
    print(text, flush=True)
