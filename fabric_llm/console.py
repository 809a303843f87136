"""What a run prints: lines, a progress bar, and nothing that ends a run because it can't be printed."""

from __future__ import annotations

import sys
from typing import Any

from tqdm import tqdm


class Lasting:
    """A stream whose reader may be gone (Ctrl-C ends `tee` too), or its disk full: then what it gets is lost, no more."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        """Write what can be written. Never raises OSError."""
        try:
            return self.stream.write(text)
        except OSError:
            return len(text)

    def flush(self) -> None:
        """Likewise."""
        try:
            self.stream.flush()
        except OSError:
            pass

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def outlast_readers() -> None:
    """From here on this process prints without fear."""
    sys.stdout, sys.stderr = Lasting(sys.stdout), Lasting(sys.stderr)


class Console:
    """A progress bar where there is a terminal, and lines that don't break it."""

    def __init__(self, total_steps: int, done_steps: int) -> None:
        off = not sys.stderr.isatty()
        self.bar = tqdm(total=total_steps, initial=done_steps, unit="step", disable=off, leave=False)

    def line(self, text: str) -> None:
        """Print one line."""
        print(text, flush=True) if self.bar.disable else self.bar.write(text)

    def advance(self) -> None:
        """One step done."""
        self.bar.update()

    def close(self) -> None:
        """Remove the bar."""
        self.bar.close()
