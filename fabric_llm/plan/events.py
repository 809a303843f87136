"""events.jsonl in a run directory: when the run started, resumed, saved and ended, and on which devices.

Lines are only added, also those of work that a resumed run makes anew, while metrics.jsonl is one curve. Times come from the
clock of rank 0's machine and are there to be read: nothing is decided by them.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Optional

EVENTS = "events.jsonl"


def record(folder: Path, event: str, step: Optional[int], **facts: Any) -> None:
    """Add a line to the events of the run directory `folder`. Called on rank 0.

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


def read(folder: Path) -> list[dict[str, Any]]:
    """The events of a run directory, in order; lines that a kill has cut off are left out. [] where there are none."""
    found = []
    if not (folder / EVENTS).is_file():
        return found
    with suppress(OSError), (folder / EVENTS).open(errors="replace") as lines:
        for line in lines:
            with suppress(ValueError, RecursionError):
                event = json.loads(line)
                if isinstance(event, dict) and isinstance(event.get("event"), str):
                    found.append(event)
    return found
