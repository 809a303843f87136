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
    """What asks this rank to stop or to save: signals, and once there is something to save files and --max_hours.

    The first signal is remembered; a second one, which isn't the same delivered twice, ends the run without a save.
    at_once(fault): ends this process at the first signal, as long as there is nothing to save; None: it is remembered.
    """

    def __init__(self, at_once: Optional[Callable[[Fault], NoReturn]] = None) -> None:
        self.at_once = at_once
        self.started = time.monotonic()  # seconds; `train.py` makes this object first of all
        self.requests = 0  # by signals
        self.run_directory: Optional[Path] = None  # where files may ask, and after how long the run stops by itself
        self.max_hours: Optional[float] = None
        self.asked: set[str] = set()  # by files
        self.until = 0.0  # monotonic seconds: what comes before is the same request
        self.pipe = os.pipe()  # into which Python's C code writes each signal as it comes
        for end in self.pipe:
            os.set_blocking(end, False)
        self.former_wakeup = signal.set_wakeup_fd(self.pipe[1], warn_on_full_buffer=False)
        self.former = {number: signal.signal(number, self._handle) for number in SIGNALS if not _under_nohup(number)}

    def _handle(self, number: int, frame: Optional[FrameType]) -> None:
        again = number == signal.SIGHUP and self.requests > 0  # the shell that goes with the terminal
        if again or time.monotonic() < self.until:
            return
        self.until = time.monotonic() + SECONDS_OF_ONE_REQUEST
        self.requests += 1
        if self.requests == 1:
            self.end_by(self.at_once)
            time.sleep(SECONDS_OF_ONE_REQUEST)  # else Python might hear of the same request after a long operation only
        elif self.requests == 2:
            raise KeyboardInterrupt("stopped at once by a second signal, without a save.")
        else:
            signal.signal(number, signal.SIG_DFL)  # whoever has to ask a third time wants it gone
            os.kill(os.getpid(), number)

    def end_by(self, at_once: Optional[Callable[[Fault], NoReturn]]) -> None:
        """From here on, `at_once` is what a signal leads to; also one that was only remembered so far."""
        self.at_once = at_once
        if at_once is not None and self.requests > 0:
            at_once(at_start())

    def is_asked(self) -> bool:
        """True once a signal has come, also in a thread while the main thread is in C code and hears of none."""
        heard = b""
        with suppress(BlockingIOError):
            heard = os.read(self.pipe[0], 4096)
        return self.requests > 0 or any(number in SIGNALS for number in heard)

    def watch_for(self, run_directory: Optional[Path], max_hours: Optional[float]) -> None:
        """From here on signals are remembered. run_directory, max_hours: None on other ranks than 0, which looks for all."""
        self.end_by(None)
        self.run_directory, self.max_hours = run_directory, max_hours

    def is_to_stop(self) -> bool:
        """A request to stop stays. A file is removed."""
        for name in (STOP_FILE, SAVE_FILE) if self.run_directory else ():
            if (self.run_directory / name).is_file():
                (self.run_directory / name).unlink(missing_ok=True)
                self.asked.add(name)
        return STOP_FILE in self.asked or self.requests > 0 or self.is_over()

    def ask(self) -> tuple[bool, bool]:
        """(to stop, to save). A request to save is taken by whoever asks."""
        stops, saves = self.is_to_stop(), SAVE_FILE in self.asked
        self.asked.discard(SAVE_FILE)
        return stops, saves

    def is_over(self) -> bool:
        """True once this process has run for --max_hours."""
        return self.max_hours is not None and time.monotonic() - self.started >= 3600 * self.max_hours

    def finish(self) -> None:
        """The run is over and saved: later requests are not for the next one, and only Ctrl-C still cuts the end short."""
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN if number != signal.SIGINT else signal.default_int_handler)
        self.is_to_stop()

    def restore(self) -> None:
        """Give the signals back to whoever had them."""
        for number, handler in self.former.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self.former_wakeup)
        for end in self.pipe:
            os.close(end)


def _under_nohup(number: int) -> bool:
    return number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN
