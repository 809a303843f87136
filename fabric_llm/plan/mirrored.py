"""What --mirror means for a run: what it brings back before it begins, and what it says of it."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from fabric_llm.base import files
from fabric_llm.base.command_line import Flags
from fabric_llm.base.faults import NO_CHECKPOINT, Fault
from fabric_llm.base.files import MANIFEST
from fabric_llm.checkpoint import keep
from fabric_llm.plan import run_directory

if TYPE_CHECKING:
    from fabric_llm.mirror.client import Mirror, Report
    from fabric_llm.mirror.store import Store


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
