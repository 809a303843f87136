"""`Run`, which holds the objects of a run, and how they are closed when it ends without a fault."""

from __future__ import annotations

import math
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

import torch
from torch import nn
from transformers import PreTrainedModel

from fabric_llm.base import files
from fabric_llm.base.fabric import Fabric
from fabric_llm.base.failpoints import failpoint
from fabric_llm.base.flag import Flags
from fabric_llm.base.names import command
from fabric_llm.checkpoint.keep import step_directory
from fabric_llm.checkpoint.writing import Background, Pending
from fabric_llm.data.batches import Prefetch
from fabric_llm.plan.plan import Plan
from fabric_llm.processes.stop import StopSignal
from fabric_llm.processes.watch import Watch
from fabric_llm.run.log import Log
from fabric_llm.training.evaluation import Evaluation
from fabric_llm.training.forgetting import Forgetting
from fabric_llm.training.guard import Guard

if TYPE_CHECKING:
    from fabric_llm.checkpoint.apart import Apart
    from fabric_llm.mirror.client import Mirror
    from fabric_llm.run.samples import Samples
    from fabric_llm.training.ema import Average

# Time for the trackers to send what is left. After a stop it is short, because the scheduler may
# soon kill the process.
SECONDS_AFTER_THE_END, SECONDS_AFTER_A_STOP = 660.0, 10.0

# Finished runs are kept as long as the process lives. The last reference to a model also frees the
# process group, and gloo's destructor, which runs while Python holds its lock, can wait for ever
# for a thread that needs this lock to free a tensor.
kept_alive: list[Any] = []


class Run:
    """The objects of a run on this rank, which build.py makes.

    Nothing else may keep the optimizer: a rewind frees it before it makes another, since memory may
    not hold two.
    """

    model: nn.Module  # wrapped
    optimizer: torch.optim.Optimizer
    skeleton: PreTrainedModel  # the unwrapped model on the meta device, without memory
    guard: Guard
    forgetting: Forgetting
    batches: Prefetch
    log: Log
    requests: StopSignal
    evaluation: Evaluation
    background: Optional[Background] = None  # with --async_save: writes while training goes on
    saving: Optional[Future[Pending]] = None  # the checkpoint that it writes
    samples: Optional[Samples] = None  # with --sample_prompts
    mirror: Optional[Mirror] = None  # with --mirror, on rank 0
    # Of the weights before step 1, see `sharded.fingerprint`; None: it doesn't go back to them.
    began_with: Optional[int] = None
    first_weights: Mapping[str, Any]  # see `reference.first_weights`, on rank 0; {}: not known
    ranks_apart: Optional[Apart] = None  # with --mirror, where ranks don't see rank 0's disk
    # of the validation sets where the run is, nats; None: they aren't evaluated there
    losses: Optional[Mapping[str, float]] = None

    def __init__(self, fabric: Fabric, flags: Flags, plan: Plan, watch: Watch) -> None:
        self.fabric, self.flags, self.plan, self.watch = fabric, flags, plan, watch
        # Where the run is, and the steps that it makes from there. A rewind changes both.
        self.progress, self.schedule = plan.start, plan.schedule
        self.closing = ExitStack()  # a run that fails doesn't close it

    @property
    def is_over(self) -> bool:
        """True once the last step is done, and evaluated; a run that ends before was stopped."""
        is_evaluated = self.losses is not None or not self.evaluation.is_on
        return self.schedule.is_over(self.progress) and is_evaluated

    @property
    def average(self) -> Optional[Average]:
        """The moving average of the weights, with --ema_decay."""
        return getattr(self.optimizer, "average", None)

    def close(self) -> None:
        """Close every part that build.py has registered, the last one first. All ranks call it."""
        failpoint("finish")
        self.closing.close()


def leave(run: Run) -> None:
    """Leave the process group. Then rank 0 may take its time to send the trackers what they haven't
    received."""
    log, has_ranks = run.log, torch.distributed.is_initialized()
    if has_ranks:
        run.fabric.barrier()
    # From here on a rank that ends is no fault, so it isn't watched.
    run.watch.close()
    if has_ranks:
        # The run must outlive its process group, see `kept_alive`.
        kept_alive.append(run)
        torch.distributed.destroy_process_group()
    if log.trackers is not None and run.is_over and run.flags.logging.log_model in (True, "last"):
        log.trackers.upload(step_directory(run.plan.run_directory, run.progress.step))
    log.close(SECONDS_AFTER_THE_END if run.is_over else SECONDS_AFTER_A_STOP)


def how_to_go_on(flags: Flags, directory: Path) -> str:
    """The next command of a stopped run."""
    # With --checkpoint, `true` would go back to that again, and `auto` goes on from the newest.
    resume = "true" if flags.checkpoint.checkpoint is None else "auto"
    return f"Next: the same command with {command(resume=resume, run_name=directory.name)}"


def say_what_is_left(flags: Flags, directory: Path) -> None:
    """Print what a run has that ended without a save."""
    last = files.latest(directory)
    if last is None:
        print("It has no checkpoint.", flush=True)
    else:
        print(f"Checkpoint: {last}\n{how_to_go_on(flags, directory)}", flush=True)


def say_what_comes_next(run: Run) -> None:
    """Print loss, checkpoint and the next command."""
    if run.fabric.global_rank != 0:
        return
    plan, log = run.plan, run.log
    last, directory = step_directory(plan.run_directory, run.progress.step), plan.run_directory
    if not run.is_over:
        why = "on request"
        if run.requests.is_out_of_time():
            why = f"after --max_hours {run.flags.training.max_hours:g}"
        print(f"\nStopped {why}. Checkpoint: {last}")
        print(how_to_go_on(run.flags, directory), flush=True)
        return
    result = "No step was left"
    if log.speed.steps and plan.schedule.mixture.is_named:
        # A step may have read of other sources than the first one, so their losses say nothing.
        result = "Finished"
    elif log.speed.steps:
        result = f"Loss {log.first_loss:.4f} -> {log.last_loss:.4f}"
        if plan.start.step > 0:
            result += f" since step {plan.start.step}"
    if run.losses is not None and len(run.losses) > 1:
        result += of_sets(run.losses, run.forgetting)
    elif not math.isnan(log.eval_loss):
        result += f", validation loss {log.eval_loss:.4f}"
    if run.losses is not None:
        result += how_it_compares(run)
    if run.guard.skipped:
        result += f"\nWarning: the last {run.guard.skipped:,} steps were left out, see above."
    print(f"\n{result}")
    print(f"Checkpoint: {last}")
    print(
        f"Next: {command('python', 'export_hf.py', directory, output=f'hf/{directory.name}')}",
        flush=True,
    )


def of_sets(losses: Mapping[str, float], forgetting: Forgetting) -> str:
    """A line about the last losses of several sets.

    Their mean isn't said: it is weighted by shares, which may have changed since step 1.
    """
    # A set that is evaluated on other rows than before step 1 can't be compared.
    comparable, words = forgetting.rises(losses), []
    for name, loss in losses.items():
        change = f"{loss:.4f}"
        if name in comparable:
            change = f"{forgetting.before[name]:.4f} -> {change}"
        words.append(f"{name} {change}")
    return f"\nValidation loss: {', '.join(words)}"


def how_it_compares(run: Run) -> str:
    """Lines about its last losses: what was forgotten of each budget, and whether the model is
    worse than before step 1."""
    rises, used, lines = run.forgetting.rises(run.losses), [], ""
    for name, budget in run.forgetting.budgets.items():
        if name in rises:
            used.append(f"{name} {rises[name]:+.4f} of {budget:g}")
    if used:
        lines = f"\nForgotten: {', '.join(used)} nats"
    # `overall` takes a rise of each source. A set that is evaluated on other rows now has none.
    is_known = rises.keys() >= run.schedule.shares_at(run.progress.position).keys()
    # A rise that these digits don't show is no news.
    if is_known and round(rise := run.log.overall(rises), 4) > 0:
        lines += f"\nWarning: the validation loss is {rise:.4f} above that before step 1."
    return lines
