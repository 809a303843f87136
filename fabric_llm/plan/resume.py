"""Which run directory and checkpoint a run goes on from. same_run.py compares the run with that checkpoint."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any, Optional, Union

from fabric_llm.base import step_names
from fabric_llm.base.command_line import Flags
from fabric_llm.base.faults import NO_CHECKPOINT, Fault
from fabric_llm.base.files import MANIFEST
from fabric_llm.checkpoint import keep
from fabric_llm.data import mixture_text
from fabric_llm.plan import run_directory

MOST_DIFFERENCES = 10  # named in an error
MOST_CHARACTERS = 80  # of a mixture's sources in a run's name


def directory(flags: Flags) -> Path:
    """The run directory that the flags name; nothing is created. Raises as `run_directory.choose` does."""
    checkpoint, given = flags.checkpoint, given_checkpoint(flags)
    if given is not None and not checkpoint.resume:
        raise ValueError("--checkpoint says where to resume, so it goes with --resume true.")
    data = flags.data
    default = run_directory.default_name(flags.model.model_name, _data_name(data.train_data_dir, data.data_mix))
    if flags.demo and checkpoint.resume is True and checkpoint.run_name is None and given is None:
        _require_demo_meant(Path(checkpoint.output_dir), default)
    return run_directory.choose(checkpoint.output_dir, checkpoint.run_name, default, checkpoint.resume, given)


def _require_demo_meant(folder: Path, demo: str) -> None:
    """Raises ValueError where --resume true without any name could mean other runs in `folder` than the demo's."""
    runs = sorted(path.name for path in folder.glob("*") if step_names.latest(path) is not None)
    if others := [name for name in runs if not re.fullmatch(rf"{re.escape(demo)}(-\d+)?", name)]:
        raise ValueError(
            f"--resume true doesn't say which run of {str(folder)!r} goes on, {', '.join(map(repr, runs[:MOST_DIFFERENCES]))}: "
            f"name it, such as --run_name {others[0]}."
        )


def _data_name(folder: Optional[str], data_mix: Optional[str]) -> str:
    """What a run is called after: its dataset, also where it replays another one, or the sources of its mixture."""
    if not data_mix:
        return folder
    mix = mixture_text.parse(data_mix)
    return (
        mix.sources[0].path
        if mix.names == (mixture_text.NEW, mixture_text.REPLAY)
        else "-".join(mix.names)[:MOST_CHARACTERS]
    )


def choose(flags: Flags, directory: Path) -> Optional[Path]:
    """The checkpoint to resume from, None for a run that starts. Damaged ones are passed over, with a warning.

    Called on rank 0, which has locked the run directory. Raises Fault.
    """
    checkpoint, given = flags.checkpoint, given_checkpoint(flags)
    from fabric_llm.checkpoint import reading

    own = step_names.latest(directory)
    goes_on = given is not None and _restarted(flags) and _goes_on_from(directory, given)
    if given is not None and not goes_on:
        require_checkpoint(given)
    if not checkpoint.resume:
        return None
    hashes = checkpoint.verify_checkpoints == "full"
    if given is not None and not goes_on:
        run_directory.no_link(given.parent / "metrics.jsonl")  # a branch begins with a copy
        if own is not None and given.parent.resolve() != directory.resolve():
            raise ValueError(
                f"--checkpoint {checkpoint.checkpoint} would begin a branch in {str(directory)!r}, which holds checkpoints up "
                f"to {own.name}: go on there without --checkpoint, or take another --run_name."
            )
        reading.verified(given, hashes)
        return given
    valid, problems = keep.newest_valid(directory, hashes)
    if valid is None and problems:
        raise Fault(f"No checkpoint in {str(directory)!r} is whole: {' '.join(problems)}", NO_CHECKPOINT)
    for problem in problems:
        print(f"Warning: {problem} Resuming from {valid} instead.", flush=True)
    return valid


def require_given(flags: Flags) -> None:
    """--checkpoint is there, as far as names of files say, where this command can only begin from it. Raises Fault (66)."""
    given = given_checkpoint(flags)
    if given is not None and not _restarted(flags):
        require_checkpoint(given)


def require_checkpoint(given: Path) -> None:
    """Raises Fault (66), with what there is instead, where `given` isn't a checkpoint."""
    if (given / MANIFEST).is_file():
        return
    newest = step_names.latest(given)
    instead = f" It is a run: its newest is --checkpoint {newest}." if newest is not None else nearest_step(given)
    raise Fault(f"{str(given)!r} isn't a checkpoint: it has no {MANIFEST}.{instead}", NO_CHECKPOINT)


def nearest_step(given: Path) -> str:
    """The checkpoints of the run that `given`, which isn't there, would belong to, as the end of a sentence."""
    names = [] if given.is_dir() else [path.name for path in step_names.checkpoints(given.parent)]
    return f" {str(given.parent)!r} has {', '.join(names[-5:])}." if names else ""


def given_checkpoint(flags: Flags) -> Optional[Path]:
    """What --checkpoint names."""
    return None if flags.checkpoint.checkpoint is None else Path(flags.checkpoint.checkpoint)


def _restarted(flags: Flags) -> bool:
    """True if the command may not be the first of its kind: a restart loop's, or torchrun's or SLURM's again."""
    counts = (os.environ.get(name, "0") for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"))
    return flags.checkpoint.resume == "auto" or any(count != "0" for count in counts)


def _goes_on_from(directory: Path, given: Path) -> bool:
    """True if the run in `directory` has gone back to, or branched off, `given` already, and saved since."""
    from fabric_llm.checkpoint.progress import read_progress

    for path in reversed(step_names.checkpoints(directory)):
        with suppress(Fault):  # damaged: the one before it says it
            begun = read_progress(path).get("rolled_back_to") == given.name
            return begun and path.resolve() != given.resolve()
    return False


def document_masking(flags: Flags, document: dict[str, Any]) -> Union[bool, str]:
    """--document_masking, where `auto` means for a run that goes on what it had: all its steps are alike.

    document: progress.json of the checkpoint that is resumed, {} for a run that starts.
    """
    given = flags.data.document_masking
    schedule = document.get("schedule")
    had = schedule.get("document_masking") if isinstance(schedule, dict) else None
    if given == "auto" and isinstance(had, bool) and "document_masking" not in overrides(flags):
        return had
    return given


def overrides(flags: Flags) -> tuple[str, ...]:
    """The flags that --resume_override names. Raises ValueError for one that it can't change."""
    given = flags.checkpoint.resume_override
    names = tuple(name.strip().removeprefix("--") for name in given.split(",") if name.strip()) if given else ()
    known = [name for name, one in flags.declared().items() if one.belongs_to_run]
    for name in names:
        if name not in known:
            raise ValueError(f"--resume_override {name}: what can change is {', '.join(known)}.")
    return names
