"""The log of a run: what goes to metrics.jsonl and the trackers, and what is printed, on rank 0."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Optional

import torch
from tqdm import tqdm

from fabric_llm.base.failpoints import failpoint
from fabric_llm.checkpoint.keep import METRICS_UNDONE, Progress
from fabric_llm.data.batches import Prefetch
from fabric_llm.model.flops import Flops
from fabric_llm.plan import run_status
from fabric_llm.plan.plan import Plan
from fabric_llm.plan.schedule import Schedule
from fabric_llm.run import lines
from fabric_llm.run.metrics import MetricsFile, Record
from fabric_llm.run.speed import Speed, peak_memory_gib
from fabric_llm.run.trackers import Trackers, flat
from fabric_llm.training.evaluation import EvalResult
from fabric_llm.training.forgetting import Forgetting
from fabric_llm.training.guard import Guard

if TYPE_CHECKING:
    from fabric_llm.run.profile import Profile


class Log:
    """The log of a run. On other ranks than 0 it only keeps the losses."""

    def __init__(self, plan: Plan, device: torch.device, flops: Flops, batches: Prefetch) -> None:
        """flops: of the model. `metrics`, `trackers`, `console`, `profile` and `few_updates` are
        for rank 0 to set."""
        self.plan, self.device = plan, device
        self.progress, self.schedule = plan.start, plan.schedule
        self.metrics: Optional[MetricsFile] = None
        self.trackers: Optional[Trackers] = None
        self.console: Optional[tqdm[Any]] = None  # a progress bar where stderr is a terminal
        self.profile: Optional[Profile] = None
        self.few_updates = lines.FewUpdates()
        self.speed = Speed(flops, device, plan.placement.world_size, batches)
        # Time in `untimed` doesn't count as training.
        self.waits, self.untimed = self.speed.waits, self.speed.other
        # NaN until there is one.
        self.first_loss = self.last_loss = self.eval_loss = math.nan

    def begin(self, step: int) -> None:
        """`step` begins."""
        self.speed.begin()
        if self.profile is not None:
            self.profile.begin(step)

    def advance(self, progress: Progress) -> None:
        """The step to `progress` is done."""
        failpoint("between_steps")
        # The speed counts what this process reads, so it isn't derived from progress: a rewind
        # takes tokens back, and a resumed run begins with those of the runs before.
        self.speed.tokens += progress.tokens - self.progress.tokens
        self.speed.steps += 1
        self.progress = progress
        if self.profile is not None and progress.step >= self.profile.last:
            self._end_profile()
        # Only rank 0 has a console, and it alone prints and records.
        if self.console is None:
            return
        self.console.update()
        if not self.schedule.is_over(progress):
            # `mixture.shares_at` is about the next row, `schedule.shares_at` about the last one.
            shares = self.schedule.mixture.shares_at(progress.position)
            if shares != self.schedule.shares_at(progress.position):
                self.stage_begins(shares)

    def stage_begins(self, shares: Mapping[str, float]) -> None:
        """Record and print the shares from here on."""
        if self.console is None:
            return
        folder, progress = self.plan.run_directory, self.progress
        run_status.record_event(
            folder, "stage", progress.step, position=progress.position, shares=shares
        )
        self.say(f"from here on {lines.shares(shares)}")

    def step(
        self,
        loss: float,
        lr: float,
        grad_norm: float,
        update: Optional[tuple[float, float]],
        more: Record,
    ) -> None:
        """Write and print a line about the step that is done.

        update: see `training.step.update_size`; None if it wasn't measured. more: numbers of
        certain runs alone, such as the auxiliary loss of a mixture of experts.
        """
        if math.isnan(self.first_loss):
            self.first_loss = loss
        self.last_loss = loss
        if self.metrics is None:
            return
        record: Record = {
            "loss": loss,
            "lr": lr,
            "grad_norm": grad_norm,
            "tokens": self.progress.tokens,
            **self.speed.lap(),
            "peak_memory_gib": peak_memory_gib(self.device),
        }
        record |= more
        if update is not None:
            record["updated_fraction"], record["update_ratio"] = update
        # Only a mixture with named sources says how much was read of each.
        if read := self.schedule.mixture.read_before(self.progress.position):
            record["sources"] = read
        self._write(record)
        # What is printed follows from the same numbers.
        left = self.speed.seconds_left(self.schedule.max_step - self.progress.step)
        self.say(lines.of_step(record, self.plan.placement.world_size, left))
        warning = None if update is None else self.few_updates.warning(update[0], record["lr"])
        if warning is not None:
            self.line(warning)

    def evaluation(self, result: EvalResult, forgetting: Forgetting) -> None:
        """Write and print the result of an evaluation after the last step. The losses of sources
        are averaged by their shares."""
        self.eval_loss, rises = self.overall(result.losses), forgetting.rises(result.losses)
        # Rises are logged of all sets whose loss before step 1 is known, and budgets if there are
        # any.
        # Copies, since `result` is the caller's.
        sets = {name: dict(numbers) for name, numbers in result.sets.items()}
        for name, rise in rises.items():
            sets[name]["forgotten"] = rise
        for name in sets.keys() & forgetting.budgets.keys():
            sets[name]["budget"] = forgetting.budgets[name]
        record: Record = {"eval_loss": self.eval_loss, "eval": sets}
        if self.schedule.mixture.is_named:  # without the shares, the average can't be compared
            record["shares"] = self.schedule.shares_at(self.progress.position)
        # Averaged by the same shares, so that it compares with `eval_loss`.
        if result.of_average is not None:
            record["eval_loss_ema"] = self.overall(result.of_average)
        self._write(record)
        self.say(lines.of_evaluation(record))
        # What the run does about it is a line of its own.
        if forgetting.over:
            action, reason = forgetting.verdict, forgetting.forgotten
            self._write_verdict({"verdict": "forgetting", "action": action, "reason": reason})
            self.say(f"Warning: {reason}")

    def overall(self, losses: Mapping[str, float]) -> float:
        """The losses of sources, averaged by their shares here."""
        shares = self.schedule.shares_at(self.progress.position)
        # Shares are rounded, so their sum may not be exactly 1.
        return sum(share * losses[name] for name, share in shares.items()) / sum(shares.values())

    def verdict(self, before: Progress, guard: Guard) -> None:
        """Write and print that the last step, from `before`, was left out, or is a spike."""
        # The sequences that the step has read.
        first, last = before.position, self.progress.position - 1
        self._write_verdict(
            {"verdict": guard.verdict, "from_position": first, "reason": guard.reason}
        )
        self.say(f"{guard.verdict}: {guard.reason}; sequences {first} to {last}")

    def rewound(self, there: Progress, schedule: Schedule, words: str, record: Record) -> None:
        """The run went back to `there` and goes on by `schedule`. Lines of later steps are
        removed."""
        discarded = self.progress.tokens - there.tokens
        self.progress, self.schedule = there, schedule
        if self.metrics is None:
            return
        # The removed lines go to another file, because the report shows them.
        self.metrics.cut(there, self.metrics.path.with_name(METRICS_UNDONE))
        # The file is cut before the trackers, because they may read it to write their own.
        self.trackers.cut(there)
        self._write_verdict({**record, "discarded_tokens": discarded})
        self.say(f"{words}; {discarded:,} tokens discarded")

    def say(self, text: str) -> None:
        """Print a line about the last step."""
        self.line(f"step {self.progress.step}/{self.schedule.max_step}  {text}")

    def line(self, text: str) -> None:
        """Print a line."""
        if self.console is not None:
            self.console.write(text)

    def close(self, seconds: float) -> None:
        """Close trackers and bar. The trackers have `seconds` for what they haven't sent yet."""
        self._end_profile()
        if self.console is not None:
            self.console.close()
            self.trackers.close(seconds)

    def _end_profile(self) -> None:
        if self.profile is not None:
            # Writing a trace takes seconds, in which nothing is trained.
            with self.untimed:
                for text in self.profile.end(self.progress.step):
                    self.line(text)

    def _write(self, record: Record) -> None:
        """Write numbers to metrics.jsonl and the trackers."""
        if self.metrics is not None:
            self.metrics.write(self.progress, record)
            # Trackers take no nested values, and have the step apart.
            numbers = {"position": self.progress.position, **record}
            self.trackers.log(self.progress.step, flat(numbers))

    def _write_verdict(self, record: Record) -> None:
        """Write what was decided, in words, which trackers don't take."""
        if self.metrics is not None:
            self.metrics.write(self.progress, {**record, "time": run_status.now()})
