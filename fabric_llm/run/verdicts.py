"""What follows a step that the guard didn't simply take: a line, the end of the run, or a rewind."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fabric_llm.base import ranks, step_names
from fabric_llm.base.command_line import Flags
from fabric_llm.base.fabric import Fabric
from fabric_llm.base.faults import NON_FINITE, Fault
from fabric_llm.checkpoint import keep, reading
from fabric_llm.checkpoint.progress import Progress
from fabric_llm.run.build import build_model, restore
from fabric_llm.run.log import Log
from fabric_llm.run.plan import Plan, last_step
from fabric_llm.run.saver import Saver
from fabric_llm.training.guard import Guard


def report(plan: Plan, guard: Guard, log: Log, saver: Saver, before: Progress, progress: Progress) -> None:
    """Say which step was left out or looked odd, and where its data is. Raises Fault (76) once there were too many."""
    if guard.verdict == "take":
        return
    log.verdict(before, progress, guard)
    if not guard.gives_up():
        return
    saver.publish()  # the pending checkpoint: it predates the bad steps
    many = f"{guard.skipped} steps in a row were left out"
    if guard.verdict == "rewind":
        many = f"the run would go back for the {guard.rewinds + 1}. time"
    raise Fault(
        f"{many} (--max_skipped_steps {guard.max_skipped_steps}), the last because of {guard.reason}, sequences "
        f"{before.position} to {progress.position - 1}; the last checkpoint is "
        f"{step_names.latest(plan.run_directory) or 'none'}.",
        NON_FINITE,
    )


def rewind(
    fabric: Fabric, flags: Flags, plan: Plan, guard: Guard, log: Log, saver: Saver, progress: Progress
) -> tuple[Plan, nn.Module, torch.optim.Optimizer, Progress]:
    """(plan, model, optimizer, where the run is): the state of the last checkpoint, at the data after `progress`.

    All ranks call it, after they have dropped model and optimizer. Raises Fault (76) where there is no checkpoint.
    """
    saver.publish()
    gc.collect()  # their memory: they are full of cycles
    if fabric.device.type == "cuda":
        torch.cuda.empty_cache()
    last, document = ranks.from_rank_zero(lambda: choose(flags, plan, guard, log, progress))
    back, reason = Progress(**document["progress"]), guard.reason
    _, model, optimizer, _ = build_model(fabric, flags, plan, str(last), last)
    restore(fabric, guard, {**document, "guard": {**document["guard"], "rewinds": guard.rewinds + 1}})
    there = replace(back, position=progress.position)
    if plan.end is not None:  # there are fewer steps to the end of the data than there were
        plan = replace(plan, max_step=min(plan.max_step, last_step(there, plan.end, plan.global_batch_size)))
    saver.plan = plan
    if fabric.global_rank == 0:
        keep.move_aside(plan.run_directory, back.step)  # those that are damaged
    record = {"verdict": "rewind", "position": progress.position, "reason": reason}
    log.rewound(back, plan, f"went back to {last}, past position {progress.position}", record)
    return plan, model, optimizer, there


def choose(flags: Flags, plan: Plan, guard: Guard, log: Log, progress: Progress) -> tuple[Path, dict[str, Any]]:
    """(the newest whole checkpoint, its progress.json). Called on rank 0."""
    hashes = flags.checkpoint.verify_checkpoints == "full"
    last, problems = keep.newest_valid(plan.run_directory, hashes)
    for problem in problems:
        log.line(f"Warning: {problem}")
    if last is None and plan.resume_from is not None:  # a branch that hasn't saved yet
        last = plan.resume_from
        reading.verified(last, hashes)
    if last is None:
        raise Fault(f"{guard.reason} at step {progress.step}, and no checkpoint to go back to.", NON_FINITE)
    return last, reading.verified(last)
