"""Requests to stop or to save: signals to any rank, or files in the run directory for people without signals."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import FrameType
from typing import Optional

from fabric_llm.faults import STOPPED

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
STOP_FILE, SAVE_FILE = "stop", "save_now"


class StopSignal:
    """Remembers the first signal; a second one ends the process at once, without a save."""

    def __init__(self) -> None:
        self.received: Optional[int] = None
        self.former = {number: signal.signal(number, self._handle) for number in SIGNALS}

    def _handle(self, number: int, frame: Optional[FrameType]) -> None:
        if self.received is not None:
            os.write(2, b"A second signal: ending without a save.\n")
            os._exit(STOPPED)
        self.received = number

    def restore(self) -> None:
        """Give the signals back to whoever had them."""
        for number, handler in self.former.items():
            signal.signal(number, handler)


def asked_for(signals: StopSignal, run_directory: Optional[Path]) -> tuple[bool, bool]:
    """(stop, save), as a signal to this rank asks, or a file in `run_directory`, which is then removed."""
    stop, save = (run_directory is not None and _take(run_directory / name) for name in (STOP_FILE, SAVE_FILE))
    return stop or signals.received is not None, save


def _take(file: Path) -> bool:
    """Remove `file`; True if it was there."""
    there = file.is_file()
    if there:
        file.unlink()
    return there
