"""What follows a step that the guard didn't simply take: a line, the end of the run, or a rewind."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Optional

import torch

from fabric_llm.base import ranks, step_names
from fabric_llm.base.faults import NON_FINITE, Fault
from fabric_llm.checkpoint import keep
from fabric_llm.checkpoint.progress import Progress
from fabric_llm.plan.plan import Plan
from fabric_llm.run import save
from fabric_llm.run.build import build_model, restore
from fabric_llm.run.run import Run
from fabric_llm.training.guard import Guard

Suits = Callable[[dict[str, Any]], bool]  # whether a checkpoint is taken, of which this is the progress.json


def report(run: Run, before: Progress) -> None:
    """Say that the step from `before` was left out or looked odd, and where its data is.

    Raises Fault (76) once there were too many.
    """
    guard = run.guard
    if guard.verdict == "take":
        return
    run.log.verdict(before, run.progress, guard)
    if not guard.gives_up():
        return
    save.publish(run)  # the pending checkpoint: it predates the bad steps
    many = f"{guard.skipped} steps in a row were left out"
    if guard.verdict == "rewind":
        many = f"the run would go back for the {guard.rewinds + 1}. time"
    raise Fault(
        f"{many} (--max_skipped_steps {guard.max_skipped_steps}), the last because of {guard.reason}, sequences "
        f"{before.position} to {run.progress.position - 1}; the last checkpoint is {_latest(run)}. {how_to_go_on(run)}",
        NON_FINITE,
    )


def require_budget(run: Run) -> None:
    """Raises Fault (76) where a run ends with more forgotten than it may."""
    forgetting = run.guard.forgetting
    if forgetting.verdict in ("stop", "rewind"):
        raise Fault(
            f"{forgetting.reason} (--forgetting_budget) at step {run.progress.step}; the last checkpoint is "
            f"{_latest(run)}. More replay or a larger budget may help. {how_to_go_on(run, has_room(run.guard))}",
            NON_FINITE,
        )


def rewind(run: Run) -> None:
    """Go back to the state of the last checkpoint, and on with the data after that of the step just made.

    Where too much was forgotten: to the last checkpoint that had used at most half of each budget, or to the beginning, and
    on with more of what was forgotten. All ranks call it. Raises Fault (76) where there is no checkpoint, or no more to be
    had of a source.
    """
    save.publish(run)
    run.drop_model()
    gc.collect()  # their memory: they are full of cycles
    if run.fabric.device.type == "cuda":
        torch.cuda.empty_cache()
    guard, position = run.guard, run.progress.position
    forgot = guard.forgetting.verdict == "rewind"
    last, document = ranks.from_rank_zero(lambda: choose_checkpoint(run, has_room(guard) if forgot else None))
    back = Progress(**document["progress"])
    there = replace(back, position=position)
    record = {"verdict": "rewind", "position": position, "reason": guard.reason}
    words = f"went back to {last or 'the beginning'}, past position {position}"
    if forgot:
        run.plan = replay_more(run, there)
        run.batches.go_on_with(run.plan.data.mixture, run.plan.schedule.end)
        record["shares"] = shares = run.plan.data.mixture.shares_at(position)
        words += f"; from here on {', '.join(f'{name} {share:.4g}' for name, share in shares.items())}"
    else:
        run.plan = run.plan.going_on_from(there)
    run.progress = there
    build_model(run, str(last or run.flags.model.model_name), last)
    state = {**document["guard"], "rewinds": guard.rewinds + 1, "before": guard.forgetting.before}
    restore(run, {**document, "guard": state})
    if run.fabric.global_rank == 0:
        keep.move_aside(run.plan.run_directory, back.step)  # those that are damaged, or have forgotten
    run.log.rewound(back, run.plan, words, record)


def how_to_go_on(run: Run, suits: Suits = lambda document: True) -> str:
    """A sentence with the command that goes on from the newest checkpoint that suits, or starts again, at half the rate."""
    last, _ = keep.newest_valid(run.plan.run_directory, False, suits)
    lr, name = f"--lr {run.flags.training.lr / 2:g}", run.plan.run_directory.name
    if last is None:
        return f"Start again: the same command with --run_name {name}-2 {lr}"
    return f"Go on more gently: the same command with --resume true --checkpoint {last} {lr} --resume_override lr"


def has_room(guard: Guard) -> Suits:
    """Whether a checkpoint had used at most half of each budget."""
    return lambda document: guard.forgetting.has_room(document.get("eval_losses"))


def replay_more(run: Run, there: Progress) -> Plan:
    """The plan with more of the sources that were forgotten, from `there` on. Raises Fault (76) where no more is to be had."""
    guard = run.guard
    try:
        return run.plan.with_more_replay(guard.forgetting.over, there)
    except ValueError as error:
        raise Fault(
            f"{guard.reason} (--forgetting_budget) at step {run.progress.step}, and {str(error).rstrip('.')}. "
            f"{how_to_go_on(run, has_room(guard))}",
            NON_FINITE,
        ) from error


def choose_checkpoint(run: Run, suits: Optional[Suits]) -> tuple[Optional[Path], dict[str, Any]]:
    """(the newest whole checkpoint that suits, its progress.json). Called on rank 0.

    With `suits` the beginning of the run is one as well: (None, what would be its progress.json).
    """
    plan, step = run.plan, run.progress.step
    hashes = run.flags.checkpoint.verify_checkpoints == "full"
    last, problems = keep.newest_valid(plan.run_directory, hashes, *([] if suits is None else [suits]))
    for problem in problems:
        run.log.line(f"Warning: {problem}")
    if last is None and plan.resume_from is not None and not plan.has_checkpoint:  # a branch that hasn't saved yet
        document = keep.verified(plan.resume_from, hashes)
        last = plan.resume_from if suits is None or suits(document) else None
    if last is None and suits is None:
        raise Fault(
            f"{run.guard.reason} at step {step}, and no checkpoint to go back to. Start again: the same command with "
            f"--save_step_interval {max(1, step // 4)}",
            NON_FINITE,
        )
    if last is None:
        return None, {"progress": asdict(Progress()), "guard": Guard().state()}
    return last, keep.verified(last)


def _latest(run: Run) -> str:
    return str(step_names.latest(run.plan.run_directory) or "none")
