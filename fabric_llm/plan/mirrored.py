"""What --mirror means for a run: what it brings back before it begins, and what it says of it."""

from pathlib import Path
from typing import TYPE_CHECKING, Optional

from fabric_llm.base import files
from fabric_llm.base.command_line import Flags
from fabric_llm.plan import run_directory

if TYPE_CHECKING:
    from fabric_llm.mirror.client import Mirror, Report


def open_mirror(flags: Flags, directory: Path) -> "Mirror":
    """Begin to mirror the run directory, which this process has locked. On an empty disk, a run
    that resumes gets its newest checkpoint from there. Called on rank 0.

    Raises Fault: see `Mirror`; for a new run where checkpoints are there (2), and for --resume true
    where there are none (66).
    """
    # A feature that is off isn't imported.
    from fabric_llm.mirror import fetch
    from fabric_llm.mirror.client import Mirror

    address = flags.save.mirror
    mirror = Mirror(address, directory, flags.save.mirror_timeout)
    if mirror.names and not flags.checkpoint.resume:
        raise ValueError(
            f"{address}/{directory.name} holds checkpoints up to {max(mirror.names)}: go on with "
            "--resume true, or take another --run_name."
        )
    # The disk knows of rewinds of which the mirror may not have heard.
    if mirror.names and not files.step_directories(directory):
        fetch.restore(address, directory)
    run_directory.require_any(flags, directory)
    # What a run that was killed has left here without a copy.
    for path in files.checkpoints(directory)[-2:]:
        if path.name not in mirror.names:
            mirror.upload(path.name)
    mirror.documents = fetch.documents(address, directory.name, mirror.names)
    return mirror


def in_words(report: "Report") -> tuple[Optional[str], Optional[str]]:
    """(event, line of the log) for a report of the mirror's process, None for what isn't told."""
    if "mirrored" in report:
        seconds, size = report["seconds"], report["bytes"] / 2**30
        return "mirrored", f"mirrored {report['mirrored']}: {size:.2f} GiB in {seconds:.0f} s"
    if "given_up" in report:
        return "not_mirrored", f"Warning: --mirror: {report['given_up']} is passed over for newer ones."
    if "warning" in report:
        return "mirror_fails", f"Warning: --mirror: {report['warning']}"
    if "recovered" in report:
        return "mirror_recovers", "--mirror: checkpoints are copied again."
    return None, None


def close(mirror: "Mirror", seconds: float) -> Optional[str]:
    """Wait until the last checkpoint is there, or `seconds` have passed: then why it isn't."""
    if mirror.waiting:
        print(
            f"Waiting until {mirror.waiting[-1]} is at {mirror.address} (--mirror_timeout "
            f"{seconds:g}).",
            flush=True,
        )
    behind = mirror.close(seconds)
    if not behind:
        return None
    missing = (
        f"{behind[-1]} isn't at {mirror.address} yet: it is in {str(mirror.directory)!r}, and the "
        "same command with --resume auto copies it."
    )
    print(f"Warning: --mirror: {missing}", flush=True)
    return missing
