"""Requests to stop or to save: by a signal to any rank, by a file in the run directory, or by
--max_hours."""

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn, Optional

from fabric_llm.base.faults import STOPPED, Fault

# SIGHUP says that the terminal was closed.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
STARTED = "FABRIC_LLM_STARTED"
STOP_FILE, SAVE_FILE = "stop", "save_now"
# A scheduler signals all processes, and a launcher its ranks once more: what comes within this time
# counts as one request.
SECONDS_OF_ONE_REQUEST, SECONDS_PENDING = 1.0, 0.2


def at_start() -> Fault:
    """The fault of a run that is asked to stop before there is anything to save."""
    return Fault("stopped on request before training began: nothing was lost.", STOPPED)


def interrupt(fault: Fault) -> NoReturn:
    """A `StopSignal.at_once` for a rank among others: the exception ends it, and the watch tells
    the others."""
    raise KeyboardInterrupt(str(fault))


class StopSignal:
    """Collects requests to this rank: signals and, as soon as there is something to save, files and
    --max_hours.

    The first signal is remembered until the end of a step. A second one ends the run without a
    save; the same signal delivered twice counts as one. at_once(fault), unless None, ends the
    process at the first signal: nothing can be saved yet.
    """

    def __init__(self, at_once: Optional[Callable[[Fault], NoReturn]] = None) -> None:
        self.at_once = at_once
        # Monotonic seconds. train.py makes this object before anything else, but a run that starts
        # again by itself began before.
        self.started = float(os.environ.get(STARTED, time.monotonic()))
        self.requests = 0  # requests that came by signals
        self.run_directory: Optional[Path] = None  # where files may ask
        self.max_hours: Optional[float] = None
        # Whether a step was made. A start that makes none would be repeated for ever.
        self.in_steps = False
        self.files: set[str] = set()  # names of the files that have asked
        self.until = 0.0  # monotonic seconds: a signal before that belongs to the same request
        self.pipe = os.pipe()  # Python's C code writes each signal into it at once
        for end in self.pipe:
            # The handler must never wait for a full pipe, nor is_asked() for an empty one.
            os.set_blocking(end, False)
        self.former_wakeup = signal.set_wakeup_fd(self.pipe[1], warn_on_full_buffer=False)
        self.former = {
            number: signal.signal(number, self._handle)
            for number in SIGNALS
            if not _under_nohup(number)
        }
        # They may have been blocked until there were handlers: by train.py, or by the process that
        # has started this one. What came meanwhile is heard now.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    def _handle(self, number: int, frame: Optional[FrameType]) -> None:
        # The shell of a closed terminal sends it again.
        again = number == signal.SIGHUP and self.requests > 0
        if again or time.monotonic() < self.until:
            return
        self.until = time.monotonic() + SECONDS_OF_ONE_REQUEST
        # First, second and third request: stop at a step's end, stop now, be killed.
        self.requests += 1
        if self.requests == 1:
            self.end_by(self.at_once)
            if self.run_directory is not None:
                _say("stopping once this step is done and saved. A second signal ends the run now.")
            # The rest of this request comes now: in C code the main thread would hear of it much
            # later.
            time.sleep(SECONDS_OF_ONE_REQUEST)
            # If both came while the main thread was in C code, Python handles the other one only
            # now, right behind this.
            self.until = time.monotonic() + SECONDS_PENDING
        elif self.requests == 2:
            raise KeyboardInterrupt("stopped at once by a second signal, without a save.")
        else:
            signal.signal(number, signal.SIG_DFL)  # a third request kills the process
            os.kill(os.getpid(), number)

    def end_by(self, at_once: Optional[Callable[[Fault], NoReturn]]) -> None:
        """From now on call `at_once` at a signal, and call it now if a signal has come before."""
        self.at_once = at_once
        if at_once is not None and self.requests > 0:
            at_once(at_start())

    def is_asked(self) -> bool:
        """Whether a signal has come. A thread may ask while the main thread is in C code, where
        Python runs no handlers. It hears of the signal once, and again after the handler ran."""
        # An empty pipe is no error: no signal has come.
        heard = b""
        with suppress(BlockingIOError):
            heard = os.read(self.pipe[0], 4096)
        return self.requests > 0 or any(number in SIGNALS for number in heard)

    def watch_for(self, run_directory: Optional[Path], max_hours: Optional[float]) -> None:
        """From now on only remember signals. run_directory, max_hours: None except on rank 0, which
        looks for all ranks."""
        # There is something to save now, so a signal no longer ends the process at once.
        self.end_by(None)
        self.run_directory, self.max_hours = run_directory, max_hours

    def is_to_stop(self) -> bool:
        """Whether this rank is asked to stop. The answer stays True; a file that asks is
        removed."""
        # A file asks once: left there, it would stop the next run as well.
        for name in (STOP_FILE, SAVE_FILE):
            if self.run_directory and (self.run_directory / name).is_file():
                (self.run_directory / name).unlink(missing_ok=True)
                self.files.add(name)
        return STOP_FILE in self.files or self.requests > 0 or self.is_out_of_time()

    def ask(self) -> tuple[bool, bool]:
        """At the end of a step: (whether to stop, whether to save)."""
        self.in_steps = True
        return self.is_to_stop(), SAVE_FILE in self.files

    def answer_save(self) -> None:
        """The run saves, for whatever reason."""
        self.files.discard(SAVE_FILE)

    def is_out_of_time(self) -> bool:
        """True once this process has run for --max_hours and made a step."""
        if self.max_hours is None or not self.in_steps:
            return False
        return time.monotonic() - self.started >= 3600 * self.max_hours

    def finish(self) -> None:
        """The run is over and saved: ignore signals but a second Ctrl-C, and remove files, which
        aren't meant for the next run."""
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGINT, self._handle_at_the_end)
        self.is_to_stop()

    def _handle_at_the_end(self, number: int, frame: Optional[FrameType]) -> None:
        if self.run_directory is not None:
            _say("this run has made its last step, and is ending. Another Ctrl-C cuts that off.")
        signal.signal(number, _interrupt_the_end)

    def restore(self) -> None:
        """Put the former signal handlers back."""
        for number, handler in self.former.items():
            signal.signal(number, handler)
        # Before the pipe is closed, because signals are written into it.
        signal.set_wakeup_fd(self.former_wakeup)
        for end in self.pipe:
            os.close(end)


def _say(sentence: str) -> None:
    # print() would raise where the signal came in the middle of another one, and writing does where
    # the terminal is gone.
    with suppress(OSError):
        os.write(2, f"train.py: {sentence}\n".encode())


def _interrupt_the_end(number: int, frame: Optional[FrameType]) -> NoReturn:
    raise KeyboardInterrupt("interrupted after the last step, while the run was ending.")


def _under_nohup(number: int) -> bool:
    return number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN
