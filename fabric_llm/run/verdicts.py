"""What follows a step that the guard didn't simply take: a line, the end of the run, or a rewind."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Optional

import torch
from torch import nn

from fabric_llm.base import ranks, step_names
from fabric_llm.base.command_line import Flags
from fabric_llm.base.fabric import Fabric
from fabric_llm.base.faults import NON_FINITE, Fault
from fabric_llm.checkpoint import keep, reading
from fabric_llm.checkpoint.progress import Progress
from fabric_llm.data.batches import Prefetch
from fabric_llm.plan import mixing
from fabric_llm.plan.plan import Plan, last_step
from fabric_llm.run.build import build_model, restore
from fabric_llm.run.log import Log
from fabric_llm.run.saver import Saver
from fabric_llm.training.guard import Guard

Suits = Callable[[dict[str, Any]], bool]  # whether a checkpoint is taken, of which this is the progress.json


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
        f"{step_names.latest(plan.run_directory) or 'none'}. {how_to_go_on(saver.flags, plan)}",
        NON_FINITE,
    )


def how_to_go_on(flags: Flags, plan: Plan, suits: Suits = lambda document: True) -> str:
    """A sentence with the command that goes on from the newest checkpoint that suits, or starts again, at half the rate."""
    last, _ = keep.newest_valid(plan.run_directory, False, suits)
    lr, name = f"--lr {flags.training.lr / 2:g}", plan.run_directory.name
    if last is None:
        return f"Start again: the same command with --run_name {name}-2 {lr}"
    return f"Go on more gently: the same command with --resume true --checkpoint {last} {lr} --resume_override lr"


def require_budget(flags: Flags, plan: Plan, guard: Guard, progress: Progress) -> None:
    """Raises Fault (76) where a run ends with more forgotten than it may."""
    if guard.forgetting.verdict in ("stop", "rewind"):
        raise Fault(
            f"{guard.forgetting.reason} (--forgetting_budget) at step {progress.step}; the last checkpoint is "
            f"{step_names.latest(plan.run_directory) or 'none'}. More replay or a larger budget may help. "
            f"{how_to_go_on(flags, plan, with_room(guard))}",
            NON_FINITE,
        )


def rewind(
    fabric: Fabric,
    flags: Flags,
    plan: Plan,
    guard: Guard,
    batches: Prefetch,
    saver: Saver,
    progress: Progress,
) -> tuple[Plan, nn.Module, torch.optim.Optimizer, Progress]:
    """(plan, model, optimizer, where the run is): the state of the last checkpoint, at the data after `progress`.

    Where too much was forgotten: of the last checkpoint that had used at most half of each budget, or of the beginning, and
    from there on with more of what was forgotten. All ranks call it, after they have dropped model and optimizer.
    Raises Fault (76) where there is no checkpoint, or no more to be had of a source.
    """
    saver.publish()
    gc.collect()  # their memory: they are full of cycles
    if fabric.device.type == "cuda":
        torch.cuda.empty_cache()
    reason, forgetting, log = guard.reason, guard.forgetting, saver.log
    forgot = forgetting.verdict == "rewind"
    suits = with_room(guard) if forgot else None
    last, document = ranks.from_rank_zero(lambda: choose(flags, plan, reason, suits, log, progress))
    back = Progress(**document["progress"])
    there = replace(back, position=progress.position)
    record = {"verdict": "rewind", "position": progress.position, "reason": reason}
    words = f"went back to {last or 'the beginning'}, past position {progress.position}"
    if forgot:
        plan = replay_more(flags, plan, guard, there, progress.step)
        batches.go_on_with(plan.mixture, plan.end)
        record["shares"] = shares = plan.mixture.shares_at(there.position)
        words += f"; from here on {', '.join(f'{name} {share:.4g}' for name, share in shares.items())}"
    elif plan.end is not None:  # there are fewer steps to the end of the data than there were
        plan = replace(plan, max_step=min(plan.max_step, last_step(there, plan.end, plan.global_batch_size)))
    _, model, optimizer, _ = build_model(fabric, flags, plan, str(last or flags.model.model_name), last)
    state = {**document["guard"], "rewinds": guard.rewinds + 1, "before": forgetting.before}
    restore(fabric, guard, {**document, "guard": state})
    saver.plan = plan
    if fabric.global_rank == 0:
        keep.move_aside(plan.run_directory, back.step)  # those that are damaged, or have forgotten
    log.rewound(back, plan, words, record)
    return plan, model, optimizer, there


def with_room(guard: Guard) -> Suits:
    """Whether a checkpoint had used at most half of each budget."""
    return lambda document: guard.forgetting.has_room(document.get("eval_losses"))


def replay_more(flags: Flags, plan: Plan, guard: Guard, there: Progress, step: int) -> Plan:
    """The plan with more of the sources that were forgotten, from `there` on. Raises Fault (76) where no more is to be had."""
    try:
        return mixing.with_more_replay(plan, flags, guard.forgetting.over, there)
    except ValueError as error:
        raise Fault(
            f"{guard.reason} (--forgetting_budget) at step {step}, and {str(error).rstrip('.')}. "
            f"{how_to_go_on(flags, plan, with_room(guard))}",
            NON_FINITE,
        ) from error


def choose(
    flags: Flags, plan: Plan, reason: str, suits: Optional[Suits], log: Log, progress: Progress
) -> tuple[Optional[Path], dict[str, Any]]:
    """(the newest whole checkpoint that suits, its progress.json). Called on rank 0.

    With `suits` the beginning of the run is one as well: (None, what would be its progress.json).
    """
    hashes = flags.checkpoint.verify_checkpoints == "full"
    last, problems = keep.newest_valid(plan.run_directory, hashes, *([] if suits is None else [suits]))
    for problem in problems:
        log.line(f"Warning: {problem}")
    if last is None and plan.resume_from is not None and not plan.has_checkpoint:  # a branch that hasn't saved yet
        document = reading.verified(plan.resume_from, hashes)
        last = plan.resume_from if suits is None or suits(document) else None
    if last is None and suits is None:
        raise Fault(
            f"{reason} at step {progress.step}, and no checkpoint to go back to. Start again: the same command with "
            f"--save_step_interval {max(1, progress.step // 4)}",
            NON_FINITE,
        )
    if last is None:
        return None, {"progress": asdict(Progress()), "guard": Guard().state()}
    return last, reading.verified(last)
