"""--branch_decay: a run that only decays, from any checkpoint of a phase of constant rate. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fabric_llm.checkpoint.progress import read_progress
from fabric_llm.plan.resume import require_checkpoint
from fabric_llm.training.schedule import arguments_of, lr_at

CHANGED = ("lr", "lr_decay", "lr_schedule", "decay_steps", "max_step")


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
    rate = _constant_rate(step, then, given)
    kept = {name: then[name] for name in ("min_lr", "warmup_steps") if name in then}
    changed = {"lr": rate, "lr_decay": True, "lr_schedule": "wsd", "decay_steps": steps, "max_step": step + steps}
    overrides = [flat["resume_override"], *CHANGED] if flat["resume_override"] else CHANGED
    return {**kept, **changed, "resume": flat["resume"] or True, "resume_override": ",".join(overrides)}


def _constant_rate(step: int, then: Mapping[str, Any], given: str) -> float:
    """The rate around a step of a run. Raises ValueError where it changes."""
    arguments = arguments_of(dict(then))
    around = [lr_at(max(0, step - before), max_step=then["max_step"], **arguments) for before in (1, 0)]
    if around[0] != around[1]:
        raise ValueError(
            f"--branch_decay: the learning rate isn't constant at {given!r}, but goes from {around[0]:.3e} to {around[1]:.3e} "
            f"({then['lr_schedule']}); take a checkpoint of the stable phase of constant, wsd or infinite."
        )
    return around[1]
