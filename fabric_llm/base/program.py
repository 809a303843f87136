"""What each program of this package does around its work: print, import and wait."""

import atexit
import gc
import logging
import os
import select
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from fabric_llm.base.faults import one_line

T = TypeVar("T")
SECONDS_FOR_A_READER = 5.0
SAFE_CHARACTERS = 1000  # a pipe that is writable has room for 4096 bytes


class Lasting:
    """A stream whose reader may be gone (Ctrl-C also ends `tee`) or may not read (Ctrl-S), or whose
    disk may be full.

    Then its output is lost and nothing is raised. Only the first write that nobody reads waits, for
    at most five seconds.
    """

    def __init__(self, stream: Any) -> None:
        self.stream, self.patience_seconds = stream, SECONDS_FOR_A_READER

    def write(self, text: str) -> int:
        # A longer write may block even if the pipe is writable, so text is written in pieces.
        for start in range(0, len(text), SAFE_CHARACTERS):
            self._if_read(self.stream.write, text[start : start + SAFE_CHARACTERS])
            if len(text) > SAFE_CHARACTERS:
                self.flush()
        return len(text)

    def flush(self) -> None:
        self._if_read(self.stream.flush)

    def _if_read(self, action: Callable[..., Any], *args: str) -> None:
        with suppress(OSError, ValueError):  # closed, or the disk is full
            is_read = bool(select.select([], [self.stream], [], self.patience_seconds)[1])
            # Once nobody has read for so long, later writes don't wait, until one is read again.
            self.patience_seconds = SECONDS_FOR_A_READER if is_read else 0.0
            if is_read:
                action(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def outlast_readers() -> None:
    """Wrap stdout and stderr of this process in `Lasting`."""
    for name in ("stdout", "stderr"):
        if (stream := getattr(sys, name)) is not None:
            stream.reconfigure(line_buffering=True)  # so that little is lost when nobody reads
            setattr(sys, name, Lasting(stream))


def plain_output() -> None:
    """Called first by each program. Warnings become a sentence without file and source; only a
    terminal gets progress bars."""
    # transformers imports torchao where it is installed, which warns of its libraries for
    # inference, and torch of it.
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # Of the compiler, about a kernel that it chooses: nothing that a user could change.
    warnings.filterwarnings("ignore", message="\\s*Online softmax is disabled")
    # Lightning replaces formatwarning when it is imported, so showwarning is set.
    warnings.showwarning = lambda message, *_, **__: print(
        f"Warning: {one_line(message)}", file=sys.stderr, flush=True
    )
    if sys.stderr is None or not sys.stderr.isatty():
        for library in (
            "TQDM_DISABLE",
            "HF_HUB_DISABLE_PROGRESS_BARS",
            "HF_DATASETS_DISABLE_PROGRESS_BARS",
        ):
            os.environ.setdefault(library, "1")  # read when they are imported


def no_more_output() -> None:
    """The reader of stdout, such as `head`, has seen enough. Python, which flushes once more at its
    end, isn't to complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def wait_until(ask: Callable[[], T], seconds: float, pause_seconds: float = 0.05) -> T:
    """Call `ask` until its answer is true, but not for longer than `seconds`. Returns the last
    answer."""
    deadline = time.monotonic() + seconds
    # `ask` is called at least once, also with no time left.
    while not (answer := ask()) and time.monotonic() < deadline:
        time.sleep(pause_seconds)
    return answer


def _collect_for_triton() -> None:
    """At the end of a process: let Triton's objects be collected, which it reports as leaked
    otherwise. Without Triton, the second or two that this takes are saved."""
    if "triton" in sys.modules:
        gc.unfreeze()


@contextmanager
def without_collection() -> Iterator[None]:
    """Around imports: switch the garbage collector off, because none of the million objects that
    they make is garbage."""
    if not gc.isenabled() or "torch" in sys.modules:  # imported already: nothing to gain
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()  # later collections leave these objects out, too
        atexit.register(_collect_for_triton)
        gc.enable()
