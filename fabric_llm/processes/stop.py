"""Requests to stop or to save: signals to any rank, files in the run directory or --max_hours for people without signals."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn, Optional

from fabric_llm.base.faults import STOPPED, Fault

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)  # the last: its terminal is gone
STOP_FILE, SAVE_FILE = "stop", "save_now"
SECONDS_OF_ONE_REQUEST = 1.0  # schedulers signal all processes, and launchers pass it on to their ranks again


def at_start() -> Fault:
    """Of a run that is asked to stop before there is anything to save."""
    return Fault("stopped on request before training began: nothing was lost.", STOPPED)


def interrupt(fault: Fault) -> NoReturn:
    """`StopSignal.at_once` of a rank among others, which hear of it when this exception ends it."""
    raise KeyboardInterrupt(str(fault))


class StopSignal:
    """Remembers the first signal; a second one, which isn't the same delivered twice, ends the run without a save.

    at_once(fault): ends this process at the first signal, as long as there is nothing to save; None: it is remembered.
    """

    def __init__(self, at_once: Optional[Callable[[Fault], NoReturn]] = None) -> None:
        self.at_once = at_once
        self.started = time.monotonic()  # seconds; `train.py` makes this object first of all
        self.received: Optional[int] = None
        self.second = False
        self.until = 0.0  # monotonic seconds: what comes before is the same request
        self.pipe = os.pipe()  # into which Python's C code writes each signal as it comes
        for end in self.pipe:
            os.set_blocking(end, False)
        self.former_wakeup = signal.set_wakeup_fd(self.pipe[1], warn_on_full_buffer=False)
        self.former = {number: signal.signal(number, self._handle) for number in SIGNALS if not _under_nohup(number)}

    def _handle(self, number: int, frame: Optional[FrameType]) -> None:
        again = number == signal.SIGHUP and self.received is not None  # the shell that goes with the terminal
        if again or time.monotonic() < self.until:
            return
        self.until = time.monotonic() + SECONDS_OF_ONE_REQUEST
        if self.received is None:
            self.received = number
            if self.at_once is not None:
                self.at_once(at_start())
            time.sleep(SECONDS_OF_ONE_REQUEST)  # else Python might hear of the same request after a long operation only
        elif not self.second:
            self.second = True
            raise KeyboardInterrupt("stopped at once by a second signal, without a save.")
        else:
            signal.signal(number, signal.SIG_DFL)  # whoever has to ask a third time wants it gone
            os.kill(os.getpid(), number)

    def end_by(self, at_once: Optional[Callable[[Fault], NoReturn]]) -> None:
        """From here on, `at_once` is what a signal leads to; also one that was only remembered so far."""
        self.at_once = at_once
        if at_once is not None and self.received is not None:
            at_once(at_start())

    def is_asked(self) -> bool:
        """True once a signal has come, also in a thread while the main thread is in C code and hears of none."""
        heard = b""
        with suppress(BlockingIOError):
            heard = os.read(self.pipe[0], 4096)
        return self.received is not None or any(number in SIGNALS for number in heard)

    def everything_is_saved(self) -> None:
        """From here on the run ends anyway: only Ctrl-C still cuts it short."""
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN if number != signal.SIGINT else _cut_short)

    def restore(self) -> None:
        """Give the signals back to whoever had them."""
        for number, handler in self.former.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self.former_wakeup)
        for end in self.pipe:
            os.close(end)


def _under_nohup(number: int) -> bool:
    return number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN


def _cut_short(number: int, frame: Optional[FrameType]) -> None:
    raise KeyboardInterrupt("interrupted after the last save.")


class Requests:
    """What asks this rank to stop or to save: signals, on rank 0 files in the run directory, and --max_hours."""

    def __init__(self, signals: StopSignal, run_directory: Optional[Path], max_hours: Optional[float]) -> None:
        """run_directory, max_hours: None on other ranks than 0, which looks for all. From here on signals are remembered."""
        signals.end_by(None)
        self.signals, self.run_directory, self.max_hours = signals, run_directory, max_hours
        self.stop_file = self.save_file = False  # what a file has asked for

    def is_to_stop(self) -> bool:
        """A request to stop stays."""
        if self.run_directory is not None:
            self.stop_file |= _take(self.run_directory / STOP_FILE)
            self.save_file |= _take(self.run_directory / SAVE_FILE)
        return self.stop_file or self.signals.received is not None or self.is_over()

    def ask(self) -> tuple[bool, bool]:
        """(to stop, to save). A request to save is taken by whoever asks."""
        stop = self.is_to_stop()
        save, self.save_file = self.save_file, False
        return stop, save

    def is_over(self) -> bool:
        """True once this process has run for --max_hours."""
        return self.max_hours is not None and time.monotonic() - self.signals.started >= 3600 * self.max_hours

    def finish(self) -> None:
        """The run is over and saved: later requests are not for the next one, and signals cut nothing short."""
        self.signals.everything_is_saved()
        self.is_to_stop()


def _take(file: Path) -> bool:
    """Remove `file`; True if it was there."""
    there = file.is_file()
    if there:
        file.unlink(missing_ok=True)
    return there
