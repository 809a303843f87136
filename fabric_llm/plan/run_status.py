"""What a run says of itself to scripts and readers: STATUS.json, how it is or how it ended, and
events.jsonl, what has happened. Nothing here imports torch."""

import json
import os
import socket
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Optional

from fabric_llm.base import files
from fabric_llm.base.faults import DONE, NON_FINITE, Fault
from fabric_llm.base.files import write_atomically
from fabric_llm.base.program import wait_until

STATUS, EVENTS = "STATUS.json", "events.jsonl"
ENDED = (DONE, NON_FINITE)  # codes in STATUS.json that a command that trains nothing leaves there
SECONDS_OF_NFS = 70.0  # NFS caches a directory for a minute


def write_status(
    folder: Path, code: Optional[int], reason: str, step: Optional[int], retryable: bool
) -> None:
    """Replace STATUS.json: how the run ended, or that it is running (code None).

    step: finished steps, None before there is a model. retryable: whether the same command with
    --resume auto may succeed.
    """
    try:
        # Only a complete checkpoint counts as durable.
        last = files.latest(folder)
        status = {
            "code": code,
            "reason": reason,
            "step": step,
            "last_durable_step": None if last is None else files.step_of(last),
            "retryable": retryable,
            "pid": os.getpid(),
            "host": socket.gethostname(),
        }
        try:
            write_atomically(folder / STATUS, json.dumps(status, indent=2) + "\n", durable=True)
        except OSError:
            # A full disk has no room for another file, but for this one in its own place: it is
            # short, and covers the one before. JSON may end with spaces.
            status["reason"] = reason[:300]
            with (folder / STATUS).open("r+") as file:
                before = len(file.read())
                file.seek(0)
                file.write(json.dumps(status, indent=2).ljust(before - 1) + "\n")
        if code is not None:
            record_event(folder, "ended", step, code=code, reason=reason)
    except OSError as error:  # a disk that is full or gone must not hide why the run ended
        print(f"Warning: {STATUS} couldn't be written: {error}.", flush=True)


def write_fault(folder: Path, fault: Fault, step: Optional[int]) -> None:
    """`write_status` of a run that ends with `fault`."""
    write_status(folder, fault.code, str(fault), step, fault.retryable)


def record_fault(folder: Path, fault: Fault) -> None:
    """Write into STATUS.json why a run didn't begin. How a run ended stays there if a later command
    is a mistake."""
    if fault.retryable or read_status(folder).get("code") not in ENDED:
        write_fault(folder, fault, None)


def read_status(folder: Path) -> dict[str, Any]:
    """STATUS.json, {} where there is none."""
    # A file that is missing, cut off or foreign says nothing of a run.
    with suppress(OSError, ValueError, RecursionError):
        status = json.loads((folder / STATUS).read_text())
        if isinstance(status, dict):
            return status
    return {}


def wait_for_status(folder: Path, written: dict[str, Any], seconds: float) -> bool:
    """Whether STATUS.json reads as another machine has `written` it, within `seconds`: NFS may show
    old content for a minute."""
    return wait_until(lambda: read_status(folder) == written, min(seconds, SECONDS_OF_NFS), 0.2)


def record_event(folder: Path, event: str, step: Optional[int], **facts: Any) -> None:
    """Add a line to events.jsonl: when the run started, resumed, saved and ended, and on which
    devices. Called on rank 0.

    Unlike metrics.jsonl it is never cut back. Its times, of the clock of rank 0's machine, are for
    readers: no code uses them.

    event: started, resumed, saved, stage, left_out, fell_back, ended, or what mirrored.tell says of
    --mirror. step: finished steps, None if unknown.
    """
    line = json.dumps({"time": now(), "event": event, "step": step, **facts}) + "\n"
    # A disk that is full or gone doesn't end a run here: a save will.
    with suppress(OSError), (folder / EVENTS).open("ab+") as file:
        # The last line must be complete before another one follows it.
        if file.tell() > 0:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":  # a kill cut off the last line
                line = "\n" + line
        file.write(line.encode())


def now() -> str:
    """The time, UTC, as ISO 8601."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def read_events(folder: Path) -> list[dict[str, Any]]:
    """The events of a run directory, in order, without lines that a kill cut off."""
    return [
        event
        for _, event in files.json_lines(folder / EVENTS)
        if isinstance(event.get("event"), str)
    ]
