"""Machines that don't see rank 0's disk, with --mirror: their ranks read checkpoints in copies that
they fetch. What they save is in checkpoint/apart.py."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from socket import gethostname
from typing import TYPE_CHECKING, Any, Callable, Optional

from fabric_llm.base.faults import SAVE_FAILED, Fault, as_fault
from fabric_llm.base.ranks import gather, together
from fabric_llm.checkpoint.apart import Apart
from fabric_llm.plan import mirrored

if TYPE_CHECKING:
    from fabric_llm.mirror.client import Mirror
    from fabric_llm.processes.watch import Watch

COPIES = f".copies-{gethostname()}"  # in the run directory of such a machine


def readable(
    address: Optional[str],
    mirror: Optional[Mirror],
    ranks_apart: Optional[Apart],
    watch: Watch,
    checkpoint: Optional[Path],
) -> Optional[Path]:
    """Where this rank reads a checkpoint of rank 0's disk: on a machine that doesn't see that, in a
    copy from the mirror, see `forget`. All ranks call it, which raises Fault on all of them.

    mirror: on rank 0. ranks_apart: None where all see the disk. checkpoint: or None.
    """
    if ranks_apart is None or checkpoint is None:
        return checkpoint
    # A feature that is off isn't imported.
    from fabric_llm.mirror import fetch

    def wait() -> None:
        if mirror is not None:
            _wait_for(mirror, checkpoint)

    def bring() -> Path:
        if not ranks_apart.is_here:
            return checkpoint
        there = f"{str(address).rstrip('/')}/{checkpoint.parent.name}/{checkpoint.name}"
        try:
            cache = checkpoint.parent / COPIES
            return fetch.folder_of(there, cache, wanted=_is_read_by_all, in_run=True)
        except Exception as error:
            raise _on_this_machine(error) from error

    def mark() -> None:
        watch.mark(watch.step, "fetching a copy")

    remove(ranks_apart, checkpoint.parent)  # what a kill left would take room
    # One after the other: no rank looks for the copy before rank 0 knows that it is there.
    together(wait, mark)
    return together(bring, mark)


def require_seen(address: str, ranks_apart: Apart, mark: Callable[[], Any]) -> None:
    """Raises Fault on all ranks where a machine that doesn't see rank 0's disk doesn't see the
    mirror, either: it would be found only where it is read. All ranks call it. mark: see
    `together`."""
    from fabric_llm.mirror.download import patiently
    from fabric_llm.mirror.store import FOLDER, Store

    def look() -> None:
        if not ranks_apart.is_here:
            return
        try:
            store = Store(address)
            # Rank 0's lease is there.
            if not patiently(store, lambda: store.below(FOLDER)):
                raise Fault(f"{address} isn't what rank 0 sees there.")
        except Exception as error:
            raise _on_this_machine(error) from error

    together(look, mark)


def _on_this_machine(error: Exception) -> Fault:
    fault = as_fault(error)
    return Fault(f"on {gethostname()}: {fault}", fault.code, fault.retryable)


def _is_read_by_all(name: str) -> bool:
    """Whether more ranks than rank 0 read a file of a checkpoint: not where it holds weights."""
    return name.startswith("trainer/") or not name.endswith(".safetensors")


def _wait_for(mirror: Mirror, checkpoint: Path) -> None:
    """Wait until a checkpoint is at the mirror. Raises Fault where it won't be."""
    if checkpoint.parent.resolve() != mirror.directory.resolve():
        raise Fault(
            f"Machines that don't see {str(checkpoint)!r} can't begin a branch there: that needs a "
            "disk that they share."
        )
    mirrored.say(f"Machines that don't see {checkpoint} read it from {mirror.address}.")
    end = time.monotonic() + mirror.seconds
    # Another one of its name may be there, which the process of the mirror then replaces.
    mirror.names.discard(checkpoint.name)
    if checkpoint.name not in mirror.waiting:
        mirror.upload(checkpoint.name)
    while time.monotonic() < end:
        mirror.look()
        for report in mirror.reports():
            mirrored.tell(report, mirror.directory, None, mirrored.say)
        if checkpoint.name in mirror.names:
            return
        # Given up, or another run has the prefix, as was said.
        if checkpoint.name not in mirror.waiting or mirror.deadline is not None:
            break
        time.sleep(0.1)
    raise Fault(
        f"{checkpoint.name} isn't at {mirror.address}, where machines that don't see "
        f"{str(checkpoint.parent)!r} would read it (--mirror_timeout {mirror.seconds:g}).",
        SAVE_FAILED,
    )


def forget(ranks_apart: Optional[Apart], directory: Path) -> None:
    """Remove the copies of `readable` once all ranks have read them. All ranks call it."""
    if ranks_apart is not None:
        gather(None)
    remove(ranks_apart, directory)


def remove(ranks_apart: Optional[Apart], directory: Path) -> None:
    """As `forget`, where this process ends."""
    if ranks_apart is not None and ranks_apart.is_here:
        shutil.rmtree(directory / COPIES, ignore_errors=True)
