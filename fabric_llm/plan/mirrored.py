"""What --mirror means for a run: what it brings back before it begins, and what it says of it."""

import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from socket import gethostname
from typing import TYPE_CHECKING, Any, Optional

from fabric_llm.base import files
from fabric_llm.base.command_line import Flags
from fabric_llm.base.faults import NO_CHECKPOINT, SAVE_FAILED, Fault, as_fault
from fabric_llm.base.files import MANIFEST
from fabric_llm.checkpoint import keep
from fabric_llm.plan import run_directory

if TYPE_CHECKING:
    from fabric_llm.checkpoint.apart import Apart
    from fabric_llm.mirror.client import Mirror, Report
    from fabric_llm.mirror.store import Store

COPIES = ".tmp-step-copies"  # in the run directory of a machine that doesn't see rank 0's disk


def open_mirror(flags: Flags, directory: Path) -> "Mirror":
    """Begin to mirror the run directory, which this process has locked. On an empty disk, a run
    that resumes gets its newest checkpoint from there. Called on rank 0.

    Raises Fault: see `Mirror`; for a new run where checkpoints are there (2), and for --resume true
    where there are none (66).
    """
    # A feature that is off isn't imported.
    from fabric_llm.mirror import fetch
    from fabric_llm.mirror.client import Mirror
    from fabric_llm.mirror.store import Store

    address = flags.save.mirror
    mirror = Mirror(address, directory, flags.save.mirror_timeout)
    store = Store(address)
    if mirror.names and not flags.checkpoint.resume:
        raise ValueError(
            f"{address}/{directory.name} holds checkpoints up to {max(mirror.names)}: go on with "
            "--resume true, or take another --run_name."
        )
    here = files.step_directories(directory)
    # A disk that was mirrored last knows of rewinds of which the mirror may not have heard. Where
    # another disk was, what only this one holds was given up by the run.
    is_left = bool(mirror.names and here and not mirror.is_own)
    if is_left and run_directory.given_checkpoint(flags) is None:
        _put_aside_what_differs(store, here)
    if mirror.names and (is_left or not here):
        before = files.latest(directory)
        found = fetch.restore(store, directory.name, directory, say=say, replaces_logs=is_left)
        if found is None:
            sentence = f"No checkpoint at {address}/{directory.name} is whole, see above."
            raise Fault(sentence, NO_CHECKPOINT)
        if found != before:
            say(f"Fetched {found.name} from {address}/{directory.name}.")
    run_directory.require_any(flags, directory)
    # What a run that was killed has left here without a copy.
    for path in files.checkpoints(directory)[-2:]:
        if path.name not in mirror.names:
            mirror.upload(path.name)
    mirror.documents = fetch.documents(store, directory.name, mirror.names)
    return mirror


def _put_aside_what_differs(store: "Store", here: Iterable[Path]) -> None:
    """Give the checkpoints that the mirror doesn't hold, or holds with another content, another
    name."""
    from fabric_llm.mirror.fetch import patiently

    differing = []
    for path in here:
        place = f"{path.parent.name}/{path.name}/{MANIFEST}"
        own = path / MANIFEST
        if not own.is_file() or patiently(store, lambda: store.content(place)) != own.read_bytes():
            differing.append(path)
    for name in keep.put_aside(differing):
        say(f"Kept as {name}: the run went on without it on another machine.")


def newest(
    mirror: "Mirror",
    directory: Path,
    suits: Callable[[dict[str, Any]], bool],
    here: Optional[Path],
) -> Optional[Path]:
    """The newest checkpoint that `suits`, by its progress.json: the one `here`, or a later one that
    a lost disk has held, which is fetched. Raises Fault."""
    from fabric_llm.mirror import fetch
    from fabric_llm.mirror.store import Store

    there = [directory / name for name, document in mirror.documents.items() if document]
    for path in sorted(there, key=files.step_of, reverse=True):
        if here is not None and files.step_of(path) <= files.step_of(here):
            break
        if not path.exists() and suits(mirror.documents[path.name]):
            return fetch.one(Store(mirror.address), directory.name, path.name, directory)
    return here


def readable(
    address: str, mirror: Optional["Mirror"], ranks_apart: "Apart", checkpoint: Path
) -> Path:
    """Where this rank reads a checkpoint of rank 0's disk: on a machine that doesn't see that, in a
    copy from the mirror, see `forget_copies`. All ranks call it, which raises Fault on all of them.

    mirror: on rank 0.
    """
    from fabric_llm.base.ranks import first_fault
    from fabric_llm.mirror import fetch

    problem, place = None, checkpoint
    if mirror is not None:
        problem = _wait_for(mirror, checkpoint)
    first_fault(problem)
    if ranks_apart.is_here:
        there = f"{address}/{checkpoint.parent.name}/{checkpoint.name}"
        copies = checkpoint.parent / COPIES
        try:
            place = fetch.folder_of(there, copies, wanted=_is_read_by_all)
        except Exception as error:
            problem = _on_this_machine(error)
    first_fault(problem)
    return place


def require_seen(address: str, ranks_apart: "Apart") -> None:
    """Raises Fault on all ranks where a machine that doesn't see rank 0's disk doesn't see the
    mirror, either: it would be found only where it is read. All ranks call it."""
    from fabric_llm.base.ranks import first_fault
    from fabric_llm.mirror.fetch import patiently
    from fabric_llm.mirror.store import FOLDER, Store

    problem = None
    if ranks_apart.is_here:
        try:
            store = Store(address)
            # Rank 0's lease is there.
            if not patiently(store, lambda: store.below(FOLDER)):
                raise Fault(f"{address} isn't what rank 0 sees there.")
        except Exception as error:
            problem = _on_this_machine(error)
    first_fault(problem)


def _on_this_machine(error: Exception) -> Fault:
    fault = as_fault(error)
    return Fault(f"on {gethostname()}: {fault}", fault.code, fault.retryable)


def _is_read_by_all(name: str) -> bool:
    """Whether more ranks than rank 0 read a file of a checkpoint: not where it holds weights."""
    return name.startswith("trainer/") or not name.endswith(".safetensors")


def _wait_for(mirror: "Mirror", checkpoint: Path) -> Optional[Fault]:
    """Wait until a checkpoint is at the mirror. Returns why it won't be, None if it is."""
    if checkpoint.parent.resolve() != mirror.directory.resolve():
        return Fault(
            f"Machines that don't see {str(checkpoint)!r} can't begin a branch there: that needs a "
            "disk that they share."
        )
    say(f"Machines that don't see {checkpoint} read it from {mirror.address}.")
    end = time.monotonic() + mirror.seconds
    while checkpoint.name not in mirror.names:
        for report in mirror.reports():
            tell(report, mirror.directory, None, say)
        if checkpoint.name not in mirror.waiting and checkpoint.name not in mirror.names:
            mirror.upload(checkpoint.name)  # it was passed over, or is older
        if time.monotonic() > end:
            return Fault(
                f"{checkpoint.name} isn't at {mirror.address}, where machines that don't see "
                f"{str(checkpoint.parent)!r} would read it, after {mirror.seconds:.0f} s "
                "(--mirror_timeout).",
                SAVE_FAILED,
            )
        time.sleep(0.1)
    return None


def forget_copies(ranks_apart: "Apart", directory: Path) -> None:
    """Remove the copies of `readable` once all ranks have read them. All ranks call it."""
    from fabric_llm.base.ranks import gather

    gather(None)
    remove_copies(ranks_apart, directory)


def remove_copies(ranks_apart: Optional["Apart"], directory: Path) -> None:
    """As `forget_copies`, where this process ends."""
    if ranks_apart is not None and ranks_apart.is_here:
        shutil.rmtree(directory / COPIES, ignore_errors=True)


def say(text: str) -> None:
    print(text, flush=True)


def tell(
    report: "Report", directory: Path, step: Optional[int], line: Callable[[str], None]
) -> None:
    """Write what the mirror's process has reported into events.jsonl and, with `line`, the log."""
    name = report.get("mirrored") or report.get("given_up")
    if "mirrored" in report:
        seconds, size = report["seconds"], report["bytes"] / 2**30
        event, text = "mirrored", f"mirrored {name}: {size:.2f} GiB in {seconds:.0f} s"
    elif "given_up" in report:
        event, text = "not_mirrored", f"Warning: --mirror: {name} is passed over for newer ones."
    elif "warning" in report:
        event, text = "mirror_fails", f"Warning: --mirror: {report['warning']}"
    elif "recovered" in report:
        event, text = "mirror_recovers", "--mirror: checkpoints are copied again."
    else:
        return
    run_directory.record_event(directory, event, step, report=report)
    line(text)


def close(mirror: "Mirror", step: int) -> Optional[str]:
    """End the mirror of a run that is over: why its last checkpoint isn't there, None if it is."""
    mirror.close()
    for report in mirror.reports():
        tell(report, mirror.directory, step, say)
    if not mirror.waiting:
        return None
    missing = (
        f"{mirror.waiting[-1]} isn't at {mirror.address} yet: it is in {str(mirror.directory)!r}, "
        "and the same command with --resume auto copies it."
    )
    say(f"Warning: --mirror: {missing}")
    return missing
