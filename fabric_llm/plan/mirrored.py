"""What --mirror means for a run: what it brings back before it begins, and what it says of it."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Optional

from fabric_llm.base import files
from fabric_llm.base.faults import NO_CHECKPOINT, Fault
from fabric_llm.base.files import MANIFEST
from fabric_llm.base.flag import Flags
from fabric_llm.checkpoint import retention
from fabric_llm.plan import run_directory, run_status

PROGRESS = "trainer/progress.json"

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
    from fabric_llm.mirror.client import LEFT, Mirror
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
    for path in here[-2:]:  # before the mirror's process is given them, see below
        if problem := _mend_manifest(store, path):
            say(f"Warning: {problem} {_mended(mirror, path)}")
    # A disk that was mirrored last knows of rewinds of which the mirror may not have heard. Where
    # another one was, the run may have gone on there.
    went_on = bool(here) and not mirror.is_own and _put_aside_what_was_left(store, mirror, here)
    if mirror.names and (went_on or not here):
        before = files.checkpoints(directory)
        # Logs that are here are older than those there if another directory was mirrored since.
        found = fetch.restore(
            store, directory.name, directory, say=say, replaces_logs=not mirror.is_own
        )
        if found is None:
            sentence = f"No checkpoint at {address}/{directory.name} is whole, see above."
            raise Fault(sentence, NO_CHECKPOINT)
        if found not in before:
            say(f"Fetched {found.name} from {address}/{directory.name}.")
    (directory / LEFT).unlink(missing_ok=True)
    run_directory.require_any(flags, directory)
    # What a run that was killed has left here without a copy, or with another one of its name.
    # The two newest, which is as many as its process lets wait (mirror/commands.py).
    for path in files.checkpoints(directory)[-2:]:
        if path.name not in mirror.names or not _is_same(store, path):
            mirror.upload(path.name)
    mirror.documents = fetch.documents(store, directory.name, mirror.names)
    return mirror


def _put_aside_what_was_left(store: "Store", mirror: "Mirror", here: Sequence[Path]) -> bool:
    """Give other names to checkpoints that the run has left for those of another disk: what came
    after the last one that both hold. Returns whether it has gone on there."""
    same = {path.name for path in here if path.name in mirror.names and _is_same(store, path)}
    last = max(same, default="")
    # The mirror has nothing later, and under no name something else: all of it came from here.
    if all(name <= last for name in mirror.names) and mirror.names & {p.name for p in here} == same:
        return False
    left = [path for path in here if path.name not in same]
    left = [path for path in left if path.name > last or path.name in mirror.names]
    for name in retention.put_aside(left):
        say(f"Moved to {name}: the run went on without it on another machine.")
    return True


def _is_same(store: "Store", path: Path) -> bool:
    """Whether the mirror holds the checkpoint at `path`, rather than another one of its name."""
    from fabric_llm.mirror.download import patiently

    place, own = f"{path.parent.name}/{path.name}/{MANIFEST}", path / MANIFEST
    return own.is_file() and patiently(store, lambda: store.content(place)) == own.read_bytes()


def mend(mirror: Optional["Mirror"], path: Path, problem: str) -> bool:
    """Replace the files of a checkpoint here that are damaged, as `problem` says, by their copies,
    or fetch one of the run that isn't here. Returns whether it is whole then. Raises Fault (74)."""
    if mirror is None:
        return False
    from fabric_llm.mirror import fetch
    from fabric_llm.mirror.store import Store

    store, run = Store(mirror.address, in_run=True), mirror.directory
    if not path.exists():
        if path.name not in mirror.names or path.parent.resolve() != run.resolve():
            return False
        fetch.one(store, run.name, path.name, run)
        say(f"Fetched {path.name} from {mirror.address}/{run.name}.")
        return True
    # Another one of the same name may be of steps that were undone.
    if not _is_same(store, path) and _mend_manifest(store, path) is None:
        return False
    try:
        fetch.mend(store, path)
    except Fault as fault:
        if fault.code != NO_CHECKPOINT:
            raise
        say(f"Warning: {fault}")
        return False
    say(f"Warning: {problem} {_mended(mirror, path)}")
    return True


def _mended(mirror: "Mirror", path: Path) -> str:
    return f"It was mended from its copy at {mirror.address}/{path.parent.name}."


def _mend_manifest(store: "Store", path: Path) -> Optional[Fault]:
    """Replace the manifest of a checkpoint here, if it is damaged, by that of its copy, where both
    say the same of their progress. Returns what was wrong with it, None if it wasn't replaced."""
    from fabric_llm.mirror.download import patiently

    problem = _problem_of_manifest(path)
    if problem is None:
        return None
    place = f"{path.parent.name}/{path.name}/{MANIFEST}"
    content = patiently(store, lambda: store.content(place)) or b""
    # A name that is swept where a kill leaves it.
    with TemporaryDirectory(prefix=".tmp-step-", dir=path.parent) as folder:
        copy = Path(folder) / MANIFEST
        copy.write_bytes(content)
        if _problem_of_manifest(copy.parent):
            return None
        with suppress(KeyError, Fault):
            of_progress = {PROGRESS: files.read(copy.parent)["files"][PROGRESS]}
            files.check_files(path, of_progress, True, "", NO_CHECKPOINT)
            files.fsync(copy)
            copy.replace(path / MANIFEST)
            files.fsync(path)
            return problem
    return None


def _problem_of_manifest(folder: Path) -> Optional[Fault]:
    """How it is damaged. Raises Fault (77)."""
    try:
        files.read(folder)
    except Fault as fault:
        if fault.code != NO_CHECKPOINT:
            raise
        return fault
    return None


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
        # Those that are here were looked at by whoever has found `here`.
        if not path.exists() and suits(mirror.documents[path.name]):
            store = Store(mirror.address, in_run=True)
            return fetch.one(store, directory.name, path.name, directory)
    return here


def say(text: str) -> None:
    print(text, flush=True)


def tell(
    report: "Report", directory: Path, step: Optional[int], line: Callable[[str], None]
) -> None:
    """Write what the mirror's process has reported into events.jsonl and, with `line`, the log."""
    if "mirrored" in report:
        name, seconds, size = report["mirrored"], report["seconds"], report["bytes"] / 2**30
        event, text = "mirrored", f"mirrored {name}: {size:.2f} GiB in {seconds:.0f} s"
    elif "given_up" in report:
        text = f"Warning: --mirror: {report['given_up']} is passed over for newer ones."
        event = "not_mirrored"
    elif "warning" in report:
        event, text = "mirror_fails", f"Warning: --mirror: {report['warning']}"
    elif "recovered" in report:
        event, text = "mirror_recovers", "--mirror: checkpoints are copied again."
    else:
        return
    run_status.record_event(directory, event, step, report=report)
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
