"""Print lines and a progress bar, in such a way that output which can't be written never ends or delays a run."""

from __future__ import annotations

import os
import select
import sys
import warnings
from contextlib import suppress
from typing import Any

from fabric_llm.base.faults import one_line

SECONDS_FOR_A_READER = 5.0
SAFE_CHARACTERS = 1000  # a pipe that is writable has room for 4096 bytes


class Lasting:
    """A stream whose reader may be gone (Ctrl-C ends `tee` too) or may not read (Ctrl-S), or whose disk may be full.

    Output is then lost. Nothing is raised, and a write waits for at most five seconds.
    """

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.patience_seconds = SECONDS_FOR_A_READER

    def write(self, text: str) -> int:
        """Write as much as is read."""
        for start in range(0, len(text), SAFE_CHARACTERS):
            if self._is_read():
                with suppress(OSError):
                    self.stream.write(text[start : start + SAFE_CHARACTERS])
                    if len(text) > SAFE_CHARACTERS:
                        self.stream.flush()
        return len(text)

    def flush(self) -> None:
        """Flush if there is a reader."""
        if self._is_read():
            with suppress(OSError):
                self.stream.flush()

    def _is_read(self) -> bool:
        try:
            is_read = bool(select.select([], [self.stream], [], self.patience_seconds)[1])
        except (OSError, ValueError):  # closed
            return False
        # Wait once, then not again until somebody reads.
        self.patience_seconds = SECONDS_FOR_A_READER if is_read else 0.0
        return is_read

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def outlast_readers() -> None:
    """Wrap stdout and stderr of this process in `Lasting`."""
    for name in ("stdout", "stderr"):
        if (stream := getattr(sys, name)) is not None:
            stream.reconfigure(line_buffering=True)  # so that little is lost when nobody reads
            setattr(sys, name, Lasting(stream))


def plain_output() -> None:
    """What programs call first: warnings are a sentence without file and source, and only a terminal gets libraries' bars."""

    def show(message: Any, *_: Any, **__: Any) -> None:
        print(f"Warning: {one_line(message)}", file=sys.stderr, flush=True)

    warnings.showwarning = show  # Lightning replaces formatwarning when it is imported
    if sys.stderr is None or not sys.stderr.isatty():
        for library in ("TQDM_DISABLE", "HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS"):
            os.environ.setdefault(library, "1")  # read when they are imported


class Console:
    """A progress bar where stderr is a terminal, and lines that are printed above it."""

    def __init__(self, total_steps: int, done_steps: int) -> None:
        from tqdm import tqdm

        off = not sys.stderr.isatty()
        self.bar = tqdm(total=total_steps, initial=done_steps, unit="step", disable=off, leave=False)

    def line(self, text: str) -> None:
        """Print one line."""
        print(text, flush=True) if self.bar.disable else self.bar.write(text)

    def advance(self) -> None:
        """Advance the bar by one step."""
        self.bar.update()

    def close(self) -> None:
        """Remove the bar."""
        self.bar.close()
