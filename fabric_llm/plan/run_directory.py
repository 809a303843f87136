"""checkpoints/RUN: whether it can be written, who is using it, STATUS.json and events.jsonl."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import tempfile
import time
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Optional

from fabric_llm.base import step_names
from fabric_llm.base.faults import DONE, NON_FINITE, REFUSED, UNWRITABLE, Fault
from fabric_llm.base.files import write_atomically
from fabric_llm.checkpoint import keep

ENDED = (DONE, NON_FINITE)  # what a command that began nothing doesn't replace
LOCK, STATUS, EVENTS = ".lock", "STATUS.json", "events.jsonl"
NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)  # some network file systems
SECONDS_OF_NFS = 70.0  # it keeps what it knows of a directory for a minute
_locks: dict[Path, int] = {}  # descriptors, held until this process ends, however that is
_made: set[Path] = set()  # locked directories that weren't there before


def no_link(path: Path) -> Path:
    """`path`. Raises Fault (77) where it is a link."""
    if path.is_symlink():
        raise Fault(f"{str(path)!r} is a link, which may lead anywhere: refused.", REFUSED)
    return path


def require_writable(folder: Path) -> None:
    """Raises Fault (73) if files can't be made in `folder`. Leaves nothing behind but the parents of `folder`."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder if folder.exists() else folder.parent):
            pass
    except OSError as error:
        raise Fault(f"The output directory {str(folder)!r} can't be written: {error.strerror}.", UNWRITABLE) from error


def lock(folder: Path) -> None:
    """Make `folder` and keep other runs out of it until this process ends; the kernel lets go even after a SIGKILL.

    Raises Fault (73) where another run is in it.
    """
    if folder in _locks:
        return
    if not folder.exists():
        folder.mkdir(parents=True)
        _made.add(folder)
    for path in folder.iterdir():
        if not no_link(path).is_dir() and not path.is_file():  # a pipe blocks whoever opens it
            raise Fault(f"{str(path)!r} is neither a file nor a folder: remove it.", UNWRITABLE)
    descriptor = -1
    try:
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        said = read_status(folder)
        who = f" (process {said['pid']} on {said['host']})" if {"pid", "host"} <= said.keys() else ""
        raise Fault(
            f"Another run{who} is using {str(folder)!r}: wait for it, or take another --run_name.", UNWRITABLE
        ) from None
    except OSError as error:
        if descriptor < 0 or error.errno not in NO_LOCKS:
            raise Fault(f"{str(folder / LOCK)!r} can't be written: {error.strerror}.", UNWRITABLE) from error
        print(f"Warning: the file system of {str(folder)!r} has no locks; nothing keeps a second run out of it.")
    _locks[folder] = descriptor


def unlock(folder: Path) -> None:
    """Let other runs in: at the end of a run in a process that goes on."""
    if folder in _locks:
        os.close(_locks.pop(folder))


def write_status(folder: Path, code: Optional[int], reason: str, step: Optional[int], retryable: bool) -> None:
    """STATUS.json, replaced as a whole: how the run ended, or that it is running (code null).

    step: finished steps, None before there is a model. retryable: the same command with --resume auto may do better.
    """
    try:
        last = step_names.latest(folder)
        status = {
            "code": code,
            "reason": reason,
            "step": step,
            "last_durable_step": None if last is None else step_names.step_of(last),
            "retryable": retryable,
            "pid": os.getpid(),
            "host": socket.gethostname(),
        }
        write_atomically(folder / STATUS, json.dumps(status, indent=2) + "\n", durable=True)
        if code is not None:
            record_event(folder, "ended", step, code=code, reason=reason)
    except OSError as error:  # a disk that is full or gone must not hide why the run ended
        print(f"Warning: {STATUS} couldn't be written: {error}.", flush=True)


def sweep(folder: Path) -> None:
    """Remove what a killed save or prune left in the run directory `folder`, which this process has locked, and say so."""
    for name in keep.sweep(folder):
        print(f"Removed {name}, left by a save that was cut off.", flush=True)


def leave(fault: Fault, has_plan: bool = True) -> None:
    """Write into the run directory that this process has locked, if any, why its run didn't begin; unlock it.

    has_plan: False where the flags, the data or the model are wrong. Then a directory that was made for the run goes.
    """
    for folder in list(_locks):
        if not has_plan and folder in _made and not fault.retryable:
            unlock(folder)
            (folder / LOCK).unlink(missing_ok=True)
            folder.rmdir()
            continue
        if fault.code == DONE:  # and no other start comes
            sweep(folder)
        if fault.retryable or read_status(folder).get("code") not in ENDED:  # a mistake isn't how the run ended
            write_status(folder, fault.code, str(fault), None, fault.retryable)
        unlock(folder)


def read_status(folder: Path) -> dict[str, Any]:
    """STATUS.json, {} where there is none."""
    try:
        said = json.loads((folder / STATUS).read_text())
        return said if isinstance(said, dict) else {}
    except (OSError, ValueError, RecursionError):
        return {}


def wait_for_status(folder: Path, written: dict[str, Any], seconds: float) -> bool:
    """Whether STATUS.json comes to say what another machine has `written` there: NFS may show what was, for a minute."""
    deadline = time.monotonic() + min(seconds, SECONDS_OF_NFS)
    while read_status(folder) != written:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


# ------------------------------------------------------------------------------- events.jsonl


def record_event(folder: Path, event: str, step: Optional[int], **facts: Any) -> None:
    """Add a line to events.jsonl: when the run started, resumed, saved and ended, and on which devices. Called on rank 0.

    Lines are only added, also those of work that a resumed run makes anew, while metrics.jsonl is one curve. Times come from
    the clock of rank 0's machine and are there to be read: nothing is decided by them.

    event: started, resumed, saved or ended. step: finished steps, None where that isn't known.
    """
    line = json.dumps({"time": now(), "event": event, "step": step, **facts}) + "\n"
    # A disk that is full or gone doesn't end a run because of its history; what ends it is said elsewhere.
    with suppress(OSError), (folder / EVENTS).open("ab+") as file:
        if file.tell() > 0:
            file.seek(-1, os.SEEK_END)
            line = line if file.read(1) == b"\n" else "\n" + line  # a kill has cut off the line before
        file.write(line.encode())


def now() -> str:
    """The time, UTC, as ISO 8601."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def read_events(folder: Path) -> list[dict[str, Any]]:
    """The events of a run directory, in order; lines that a kill has cut off are left out. [] where there are none."""
    found = []
    if not (folder / EVENTS).is_file():  # a pipe blocks whoever opens it
        return found
    with suppress(OSError), (folder / EVENTS).open(errors="replace") as lines:
        for line in lines:
            with suppress(ValueError, RecursionError):
                event = json.loads(line)
                if isinstance(event, dict) and isinstance(event.get("event"), str):
                    found.append(event)
    return found
