"""Which run directory and checkpoint a run goes on from. same_run.py compares the run with that checkpoint."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Optional

from fabric_llm.base import step_names
from fabric_llm.base.command_line import Flags
from fabric_llm.base.faults import NO_CHECKPOINT, Fault
from fabric_llm.base.files import MANIFEST
from fabric_llm.checkpoint import keep
from fabric_llm.checkpoint.progress import read_progress
from fabric_llm.data import mixture_text
from fabric_llm.plan import run_directory
from fabric_llm.training.schedule import arguments_of, lr_at

MOST_DIFFERENCES = 10  # named in an error
MOST_CHARACTERS = 80  # of a mixture's sources in a run's name
LONGEST_NAME = 200  # characters of a run's name; file systems take 255 bytes


# ------------------------------------------------------------------------------- the run directory and the checkpoint


def directory(flags: Flags) -> Path:
    """The run directory that the flags name; nothing is created.

    Without --run_name, a new run takes the first free of DEFAULT, DEFAULT-2, ..., a resumed run the newest of those that is
    there, and --checkpoint its own. With both, a branch begins there.
    Raises Fault for a name that leaves --output_dir (2) or is a link (77), a new run in a directory that holds checkpoints
    (2), and a resume without a run (66).
    """
    resume, name, parent = flags.checkpoint.resume, flags.checkpoint.run_name, Path(flags.checkpoint.output_dir)
    given = given_checkpoint(flags)
    if given is not None and not resume:
        raise ValueError("--checkpoint says where to resume, so it goes with --resume true.")
    if name is None and given is not None:
        return run_directory.no_link(given.parent)
    if name is None:
        default = default_name(flags.model.model_name, _data_name(flags.data.train_data_dir, flags.data.data_mix))
        if flags.demo and resume is True:
            _require_demo_meant(parent, default)
        names = [default] + [f"{default}-{k}" for k in range(2, 10_000)]
        there = {path.name for path in parent.iterdir()} if parent.is_dir() else set()
        taken = [name for name in names if name in there]
        name = (taken[-1] if taken else default) if resume else next(n for n in names if n not in taken)
    elif not (0 < len(name) <= LONGEST_NAME and name.isprintable() and name == Path(name).name and name != ".."):
        raise ValueError(
            f"--run_name {name[:LONGEST_NAME]!r} must be a plain name of at most {LONGEST_NAME} characters, "
            "without '/' or '..'."
        )
    folder = run_directory.no_link(parent / name)
    if resume is True and given is None and not step_names.step_directories(folder):
        raise Fault(f"--resume true: no complete checkpoint (step-N) in {str(folder)!r}.", NO_CHECKPOINT)
    if not resume and (newest := step_names.latest(folder)) is not None:
        raise ValueError(
            f"{str(folder)!r} holds checkpoints up to {newest.name}: "
            "go on with --resume true, or take another --run_name."
        )
    return folder


def default_name(model_name: str, data_folder: str) -> str:
    """MODEL-DATA from the last parts of both names; a run that starts from a checkpoint of RUN: RUN-DATA, or RUN."""
    model, data = Path(model_name), Path(data_folder).name
    name = model.parent.name if model.name.startswith("step-") else model.name
    return re.sub(rf"-{re.escape(data)}(-\d+)?$", "", name) + f"-{data}"


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
    if not checkpoint.resume:
        return None
    hashes = checkpoint.verify_checkpoints == "full"
    if given is not None and not (_restarted(flags) and _goes_on_from(directory, given)):
        require_checkpoint(given)
        run_directory.no_link(given.parent / "metrics.jsonl")  # a branch begins with a copy
        own = step_names.latest(directory)
        if own is not None and given.parent.resolve() != directory.resolve():
            raise ValueError(
                f"--checkpoint {checkpoint.checkpoint} would begin a branch in {str(directory)!r}, which holds checkpoints up "
                f"to {own.name}: go on there without --checkpoint, or take another --run_name."
            )
        keep.verified(given, hashes)
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
    beside = [] if given.is_dir() else [path.name for path in step_names.checkpoints(given.parent)]
    instead = f" {str(given.parent)!r} has {', '.join(beside[-5:])}." if beside else ""
    if newest is not None:
        instead = f" It is a run: its newest is --checkpoint {newest}."
    raise Fault(f"{str(given)!r} isn't a checkpoint: it has no {MANIFEST}.{instead}", NO_CHECKPOINT)


def given_checkpoint(flags: Flags) -> Optional[Path]:
    """What --checkpoint names."""
    return None if flags.checkpoint.checkpoint is None else Path(flags.checkpoint.checkpoint)


def _restarted(flags: Flags) -> bool:
    """True if the command may not be the first of its kind: a restart loop's, or torchrun's or SLURM's again."""
    counts = (os.environ.get(name, "0") for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"))
    return flags.checkpoint.resume == "auto" or any(count != "0" for count in counts)


def _goes_on_from(directory: Path, given: Path) -> bool:
    """True if the run in `directory` has gone back to, or branched off, `given` already, and saved since."""
    for path in reversed(step_names.checkpoints(directory)):
        with suppress(Fault):  # damaged: the one before it says it
            return read_progress(path).get("rolled_back_to") == given.name and path.resolve() != given.resolve()
    return False


def overrides(flags: Flags) -> tuple[str, ...]:
    """The flags that --resume_override names. Raises ValueError for one that it can't change."""
    known = [name for name, one in flags.declared().items() if one.belongs_to_run]
    given = flags.checkpoint.resume_override
    names = tuple(name.strip().removeprefix("--") for name in given.split(",") if name.strip()) if given else ()
    for name in names:
        if name not in known:
            raise ValueError(f"--resume_override {name}: what can change is {', '.join(known)}.")
    return names


# ------------------------------------------------------------------------------- --branch_decay

BRANCH_CHANGES = ("lr", "lr_decay", "lr_schedule", "decay_steps", "max_step")


def branch_flags(flat: Mapping[str, Any]) -> dict[str, Any]:
    """What --branch_decay and --checkpoint come to among the flags of train.py: `wsd` whose decay begins at the checkpoint.

    So a branch that was stopped resumes like any other run. Raises ValueError where the rate isn't constant at the checkpoint,
    and Fault (66) where there is none.
    """
    steps, given = flat["branch_decay"], flat["checkpoint"]
    if given is None or not flat["run_name"]:
        raise ValueError(
            "--branch_decay goes with --checkpoint, from which the rate decays, and with --run_name, the name of the new run."
        )
    if steps < 1:
        raise ValueError(f"--branch_decay must be positive, not {steps}.")
    if Path(given).resolve().parent == Path(flat["output_dir"], flat["run_name"]).resolve():
        raise ValueError(
            f"--branch_decay is a run of its own, so it needs another --run_name than {flat['run_name']!r}."
        )
    require_checkpoint(Path(given))
    document = read_progress(Path(given))
    step, then = document["progress"]["step"], {**document["schedule"], "max_step": document["end_step"]}
    rate_before, rate = lr_of_run(max(0, step - 1), then), lr_of_run(step, then)
    if rate != rate_before:
        raise ValueError(
            f"--branch_decay: the learning rate isn't constant at {given!r}, but goes from {rate_before:.3e} to {rate:.3e} "
            f"({then['lr_schedule']}); take a checkpoint of the stable phase of constant, wsd or infinite."
        )
    kept = {name: then[name] for name in ("min_lr", "warmup_steps")}
    changed = {"lr": rate, "lr_decay": True, "lr_schedule": "wsd", "decay_steps": steps, "max_step": step + steps}
    overrides = [flat["resume_override"], *BRANCH_CHANGES] if flat["resume_override"] else BRANCH_CHANGES
    return {**kept, **changed, "resume": flat["resume"] or True, "resume_override": ",".join(overrides)}


def lr_of_run(step: int, schedule: dict[str, Any]) -> float:
    """Learning rate of the step after `step` finished ones. schedule: flags of a run, with its last step as max_step."""
    return lr_at(step, max_step=schedule["max_step"], **arguments_of(schedule))
