"""What a run writes down and prints: metrics.jsonl, the trackers, the progress bar and lines. Only rank 0 writes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Optional

import torch

from fabric_llm.base.console import Console
from fabric_llm.base.failpoints import failpoint
from fabric_llm.checkpoint.progress import Progress
from fabric_llm.data.batches import Prefetch
from fabric_llm.model.flops import Flops
from fabric_llm.plan import run_directory
from fabric_llm.plan.plan import Plan
from fabric_llm.run import trackers
from fabric_llm.run.metrics import MetricsFile, Speed, duration, peak_memory_gib
from fabric_llm.run.profiling import Profile
from fabric_llm.run.trackers import Record, flat
from fabric_llm.training.evaluation import Evaluated, Found
from fabric_llm.training.guard import Forgetting, Guard
from fabric_llm.training.updates import UpdateSize

FEW_UPDATES, FEW_UPDATES_LOGS = 0.1, 3  # part of the weights that changes in a step; logged steps in a row


class Log:
    """The log of a run. Other ranks than 0 have one as well, which keeps the losses and writes nothing."""

    def __init__(
        self,
        plan: Plan,
        device: torch.device,
        flops: Flops,
        batches: Prefetch,
        metrics: Optional[MetricsFile] = None,
        tracked: Sequence[trackers.Tracker] = (),
        profiled: Optional[tuple[int, int]] = None,
    ) -> None:
        """flops: of the model. profiled: the first and the last step that a profile is made of."""
        self.plan, self.device, self.metrics, self.tracked = plan, device, metrics, tracked
        self.speed = Speed(flops, device, plan.placement.world_size, batches, plan.start.tokens)
        self.waits, self.untimed = self.speed.waits, self.speed.other  # what is done in `untimed` isn't training
        self.console = Console(plan.schedule.max_step, plan.start.step) if metrics is not None else None
        self.profile = Profile(profiled, plan.run_directory / "profile", device, self.line)
        self.first_loss = self.last_loss = self.eval_loss = math.nan
        self.eval_losses: Mapping[str, float] = {}  # of the last evaluation
        self.few_updates = 0  # logged steps in a row

    def step(
        self,
        progress: Progress,
        *,
        loss: float,
        lr: float,
        grad_norm: float,
        aux_loss: Sequence[float] = (),
        update: Optional[UpdateSize] = None,
    ) -> None:
        """One line of numbers for the step that leads to `progress`."""
        self.first_loss = loss if math.isnan(self.first_loss) else self.first_loss
        self.last_loss = loss
        if self.metrics is None:
            return
        record = {"loss": loss, "lr": lr, "grad_norm": grad_norm, "tokens": progress.tokens}
        record |= (speed := self.speed.lap())
        record["peak_memory_gib"] = memory = peak_memory_gib(self.device)
        words = ""
        if aux_loss:  # of a mixture of experts, where it is trained
            record["aux_loss"] = aux_loss[0]
            words = f"aux loss {aux_loss[0]:.4f}  "
        if update is not None:
            record["updated_fraction"], record["update_ratio"] = update
            words += f"{update.fraction:.1%} of weights changed  "
            self._warn_of_few_updates(update.fraction)
        read, more = self._read_of_sources(progress)
        self._write(progress.step, {**record, **read, **more_numbers(record)})
        left = self.speed.seconds_left(self.plan.schedule.max_step - progress.step)
        self.line(
            f"{self._of(progress)}  loss {loss:.4f}  lr {lr:.2e}  grad norm {grad_norm:.3f}  {words}"
            f"{speed['tokens_per_second']:,.0f} tokens/s{self._of_each_device(speed)}  {memory:.2f} GiB  {duration(left)} left{more}"
        )

    def evaluation(self, progress: Progress, found: Found, forgetting: Forgetting) -> None:
        """What an evaluation after the step that leads to `progress` has found; sources count together as they are read."""
        self.eval_losses, forgotten = found.losses, forgetting.forgotten(found.losses)
        self.eval_loss = self._together(progress, found.losses)
        record, words = {"eval_loss": self.eval_loss, "eval": {}}, f"validation loss {self.eval_loss:.4f}"
        if self.plan.data.mixture is not None:  # a mean of other shares is another number
            record["shares"] = self.plan.shares_at(progress.position)
        said = []
        for name, one in found.sets.items():
            rise, most = forgotten.get(name), forgetting.budgets.get(name)
            known = {} if rise is None else {"forgotten": rise}
            record["eval"][name] = {**one.as_json(), **known, **({} if most is None else {"budget": most})}
            said.append(_of_set(name if len(found.sets) > 1 else "", one, rise, most))
        words += f" ({', '.join(said)})" if any(said) else ""
        if found.of_average is not None:
            record["eval_loss_ema"] = self._together(progress, found.of_average)
            words += f"  of the moving average {record['eval_loss_ema']:.4f}"
        if found.drift is not None:
            record["drift"] = found.drift
            words += f"  drift {found.drift:.2e}"
        self._write(progress.step, record)
        self.line(f"{self._of(progress)}  {words}")
        if forgetting.over:
            self._write(
                progress.step, {"verdict": "forgetting", "action": forgetting.action, "reason": forgetting.reason}
            )
            self.line(f"{self._of(progress)}  Warning: {forgetting.reason}")

    def verdict(self, before: Progress, progress: Progress, guard: Guard) -> None:
        """A step that was left out, or looked odd, and where its data is."""
        record = {"verdict": guard.verdict, "position": before.position, "reason": guard.reason}
        self._write(progress.step, record)
        where = f"sequences {before.position} to {progress.position - 1}"
        self.line(f"{self._of(progress)}  {guard.verdict}: {guard.reason}; {where}")

    def rewound(self, back: Progress, plan: Plan, words: str, record: dict[str, Any]) -> None:
        """The run is back at the step of `back`: the lines after it go, and later steps are counted by `plan`."""
        self.plan, discarded = plan, self.speed.tokens - back.tokens
        self.speed.go_back(back.tokens)
        if self.metrics is not None:
            self.metrics = MetricsFile(self.metrics.path, back.step, keeps_discarded=True)  # each step once
            self._write(back.step, {**record, "discarded_tokens": discarded})
            self.line(f"{self._of(back)}  {words}; {discarded:,} tokens discarded")

    def saved(self, step: int, checkpoint: Path) -> None:
        """A checkpoint is published. Called on rank 0."""
        run_directory.record_event(self.plan.run_directory, "saved", step)
        self.line(f"step {step}/{self.plan.schedule.max_step}  saved {checkpoint}")

    def upload(self, checkpoint: Path) -> None:
        """--log_model."""
        for tracker in self.tracked:
            if tracker.name == "wandb":
                tracker.upload(checkpoint)

    def advance(self, progress: Progress) -> None:
        """A step is done, that to `progress`."""
        failpoint("between_steps")
        self.speed.tokens = progress.tokens
        self.speed.steps += 1
        if self.profile.ends(progress.step):
            with self.untimed:
                self.profile.write()
        if self.console is not None:
            self.console.advance()
            self._tell_stage(progress)

    def _tell_stage(self, progress: Progress) -> None:
        """Say where another stage of a mixture begins."""
        if self.plan.data.mixture is None or self.plan.is_over(progress):
            return
        shares = self.plan.data.mixture.shares_at(progress.position)
        if shares != self.plan.shares_at(progress.position):
            run_directory.record_event(self.plan.run_directory, "stage", progress.step, shares=shares)
            words = ", ".join(f"{name} {share:.4g}" for name, share in shares.items())
            self.line(f"{self._of(progress)}  from here on {words}")

    def line(self, text: str) -> None:
        """Print one line."""
        if self.console is not None:
            self.console.line(text)

    def close(self, seconds: float) -> None:
        """Give the trackers `seconds` for what they haven't sent yet."""
        if self.console is not None:
            self.profile.write()
            self.console.close()
            trackers.close_all(self.tracked, seconds)

    def _of(self, progress: Progress) -> str:
        return f"step {progress.step}/{self.plan.schedule.max_step}"

    def _together(self, progress: Progress, losses: Mapping[str, float]) -> float:
        shares = self.plan.shares_at(progress.position)
        return sum(share * losses[name] for name, share in shares.items()) / sum(shares.values())

    def _read_of_sources(self, progress: Progress) -> tuple[Record, str]:
        """Of a mixture: what was read of each source, for metrics.jsonl and for a line."""
        if self.plan.data.mixture is None:
            return {}, ""
        read = self.plan.data.mixture.read_before(progress.position)
        words = (f"{name} {one['epochs']:.2f} epochs ({one['tokens']:,} tokens)" for name, one in read.items())
        return {"sources": read}, f"  {', '.join(words)}"

    def _of_each_device(self, speed: Record) -> str:
        """What a line adds to the tokens per second of all devices."""
        words = []
        if self.plan.placement.world_size > 1:
            words.append(f"{speed['tokens_per_second_per_device']:,.0f} a device")
        if speed.get("mfu", 0.0) >= 0.001:  # a toy's says nothing
            words.append(f"MFU {speed['mfu']:.1%}")
        return f" ({', '.join(words)})" if words else ""

    def _write(self, step: int, record: dict[str, Any]) -> None:
        """To metrics.jsonl and, except for verdicts, which are words, to the trackers."""
        if self.metrics is not None and "verdict" in record:
            self.metrics.write(step, {**record, "time": run_directory.now()})
        elif self.metrics is not None:
            self.metrics.write(step, record)
            for tracker in self.tracked:
                tracker.log(step, flat(record))

    def _warn_of_few_updates(self, fraction: float) -> None:
        """Warn once where the number stays low that says whether training in bfloat16 has any effect."""
        self.few_updates = self.few_updates + 1 if fraction < FEW_UPDATES else 0
        if self.few_updates == FEW_UPDATES_LOGS:
            advice = (
                "the rest was too small for bfloat16 and is lost: take --bf16_updates stochastic"
                if self.plan.model.bf16_updates == "nearest"
                else "on average nothing is lost, but if the loss stalls, try a larger --lr"
            )
            self.line(f"Warning: only {fraction:.1%} of the weights change in a step; {advice} (docs/numerics.md).")


def _of_set(name: str, found: Evaluated, forgotten: Optional[float], budget: Optional[float]) -> str:
    """A validation set in a line; the only one, which has no name there, without its loss, which the line begins with."""
    words = [name, f"{found.loss:.4f}"] if name else []
    words += [] if found.bits_per_byte is None else [f"{found.bits_per_byte:.3f} bits/byte"]
    words += [] if budget is None or forgotten is None else [f"{forgotten:+.4f} of {budget:g}"]
    return " ".join(words)


def more_numbers(record: dict[str, float]) -> dict[str, float]:
    """Metrics that are computed from the others of a step, for metrics.jsonl and the trackers. Yours go here."""
    return {}
