"""Requests to stop or to save: signals to any rank, or files in the run directory for people without signals."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Optional

from fabric_llm.faults import STOPPED

if TYPE_CHECKING:
    from lightning.fabric import Fabric

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


def requests(
    fabric: Fabric, signals: StopSignal, run_directory: Path, written: bool = False
) -> tuple[bool, bool, bool]:
    """(stop, save, written) as all ranks agree: asked for on any rank, or by a file that rank 0 sees and removes.

    written: what this rank says of the checkpoint that is being written in the background; True if all say so.
    """
    import torch

    asked = [signals.received is not None, False, written]
    if fabric.global_rank == 0:
        for index, name in enumerate((STOP_FILE, SAVE_FILE)):
            if (run_directory / name).is_file():
                (run_directory / name).unlink()
                asked[index] = True
    counts = fabric.all_reduce(torch.tensor(asked, dtype=torch.int32, device=fabric.device), reduce_op="sum")
    stop, save, writers = counts.tolist()
    return stop > 0, save > 0, writers == fabric.world_size
