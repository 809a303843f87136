"""The checkpoint that a run begins at. same_run.py compares the run with it. Nothing here imports
torch."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Optional

from fabric_llm.base import files
from fabric_llm.base.faults import NO_CHECKPOINT, Fault
from fabric_llm.base.files import MANIFEST, no_link
from fabric_llm.base.flag import Flags
from fabric_llm.base.names import command, no_folder
from fabric_llm.checkpoint import keep
from fabric_llm.checkpoint.keep import read_progress


def choose(flags: Flags, directory: Path, mend: Optional[keep.Mend] = None) -> Optional[Path]:
    """The checkpoint to resume from, None for a new run. Damaged ones that `mend` can't mend are
    passed over with a warning, unless one is given, which it may also fetch.

    Called on rank 0, which has locked the run directory. Raises Fault.
    """
    # Hashing reads all weights, so only `full` asks for it.
    given, hashes = given_checkpoint(flags), flags.checkpoint.verify_checkpoints == "full"
    if not flags.checkpoint.resume:
        return None
    # After a restart the run goes on from its own newest checkpoint, not from the given one again.
    if given is not None and not (is_restarted(flags) and _goes_on_from(directory, given)):
        # The mirror may have one that isn't here.
        if given.exists() or mend is None or not mend(given, ""):
            require_checkpoint(given)
        for name in (keep.METRICS, keep.SAMPLES):  # of which a branch begins with a copy
            no_link(given.parent / name)
        own = files.latest(directory)
        # A branch begins in an empty directory, or its checkpoints would be of two runs.
        if own is not None and given.parent.resolve() != directory.resolve():
            raise ValueError(
                f"--checkpoint {given} would begin a branch in {str(directory)!r}, which holds "
                f"checkpoints up to {own.name}: go on there without --checkpoint, or take another "
                "--run_name."
            )
        keep.verified(given, hashes, mend)
        return given
    valid, problems = keep.newest_valid(directory, hashes, mend)
    # Starting anew instead would hide that all checkpoints are damaged.
    if valid is None and problems:
        raise Fault(
            f"No checkpoint in {str(directory)!r} is whole: {' '.join(problems)}", NO_CHECKPOINT
        )
    for problem in problems:
        print(f"Warning: {problem} Resuming from {valid} instead.", flush=True)
    return valid


def require_checkpoint(given: Path) -> None:
    """Raises Fault (66), with what there is instead, where `given` isn't a checkpoint."""
    if (given / MANIFEST).is_file():
        return
    instead = ""
    beside = [] if given.is_dir() else files.checkpoints(given.parent)
    if not beside and not given.exists():
        raise Fault(no_folder("checkpoint", given), NO_CHECKPOINT)
    if (newest := files.latest(given)) is not None:
        instead = f" It is a run: its newest is {command(checkpoint=newest)}."
    elif beside:
        instead = f" {str(given.parent)!r} has {', '.join(path.name for path in beside[-5:])}."
    raise Fault(f"{str(given)!r} isn't a checkpoint: it has no {MANIFEST}.{instead}", NO_CHECKPOINT)


def given_checkpoint(flags: Flags) -> Optional[Path]:
    """What --checkpoint names."""
    return None if flags.checkpoint.checkpoint is None else Path(flags.checkpoint.checkpoint)


def is_restarted(flags: Flags) -> bool:
    """True if this command may have run before: with --resume auto, or restarted by torchrun or
    SLURM."""
    if flags.checkpoint.resume == "auto":
        return True
    # They count from 0, and aren't there without a launcher.
    counts = "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"
    return any(os.environ.get(name, "0") != "0" for name in counts)


def _goes_on_from(directory: Path, given: Path) -> bool:
    """True if the run in `directory` already began at `given`, by going back to it or as a branch,
    and has saved since, or a rewind has gone back further."""
    is_own, is_there = given.parent.resolve() == directory.resolve(), (given / MANIFEST).is_file()
    if is_own and not is_there and any(directory.glob(f"aside-{given.name}-*")):
        print(f"{given.name} was moved aside since: the run goes on from its newest checkpoint.")
        return True
    for path in reversed(files.checkpoints(directory)):
        # If a checkpoint is damaged, the one before it says the same.
        with suppress(Fault):
            document = read_progress(path)
            went_back = document.get("rolled_back_to") == given.name
            # A branch of another run may have begun at a step of the same number. Folders may have
            # moved since, so the names count; older checkpoints have none.
            begun, own = document.get("branch_of", str(given.resolve())), given.resolve().parent
            is_of_it = is_own or Path(str(begun)).parent.name == own.name
            goes_on = went_back and is_of_it and path.resolve() != given.resolve()
            if goes_on:
                print(f"The run began at {given} before, and goes on from its newest checkpoint.")
            return goes_on
    return False
