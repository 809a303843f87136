"""The log of a run, on rank 0: metrics.jsonl, trackers, printed lines and a progress bar; speed and
--profile."""

import math
import resource
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Optional

import numpy as np
import torch
from torch.profiler import profile
from tqdm import tqdm

from fabric_llm.base.failpoints import failpoint
from fabric_llm.checkpoint.keep import Progress
from fabric_llm.data.batches import Prefetch, added
from fabric_llm.model.flops import Flops, peak_tflops
from fabric_llm.plan import run_directory
from fabric_llm.plan.plan import Plan
from fabric_llm.plan.schedule import Schedule
from fabric_llm.run.metrics import METRICS_UNDONE, MetricsFile, Record, Trackers, flat
from fabric_llm.training.evaluation import EvalResult
from fabric_llm.training.guard import Guard

# part of the weights that changes in a step; logged steps in a row
FEW_UPDATES, FEW_UPDATES_LOGS = (
    0.1,
    3,
)
LARGEST_COSTS = 5  # of a profile, that are printed


class Log:
    """The log of a run. On other ranks than 0 it only keeps the losses."""

    def __init__(self, plan: Plan, device: torch.device, flops: Flops, batches: Prefetch) -> None:
        """flops: of the model. `metrics`, `trackers`, `console` and `profiled` are for rank 0 to
        set."""
        self.plan, self.device = plan, device
        self.progress, self.schedule = plan.start, plan.schedule
        self.metrics: Optional[MetricsFile] = None
        self.trackers: Optional[Trackers] = None
        self.console: Optional[tqdm[Any]] = None  # a progress bar where stderr is a terminal
        # --profile: the first and the last step, and the recorder
        self.profiled, self.profile = (
            (1, 0),
            None,
        )
        self.speed = Speed(flops, device, plan.placement.world_size, batches)
        # time in `untimed` doesn't count as training
        self.waits, self.untimed = (
            self.speed.waits,
            self.speed.other,
        )
        self.first_loss = self.last_loss = self.eval_loss = math.nan
        self.few_updates = 0  # logged steps in a row
        self.kept_updates: Optional[float] = None  # see adamw.kept_updates

    def begin(self, step: int) -> None:
        """`step` begins. Starts the profile at the first step of --profile."""
        if self.profile is not None or not self.profiled[0] <= step <= self.profiled[1]:
            return
        # acc_events: without it torch 2.11 warns of events of other cycles, of which there are
        # none.
        self.profile = profile(acc_events=True)
        self.profiled, self.profile_began = (step, self.profiled[1]), time.monotonic()
        self.profile.start()

    def advance(self, progress: Progress) -> None:
        """The step to `progress` is done."""
        failpoint("between_steps")
        self.speed.tokens += progress.tokens - self.progress.tokens
        self.speed.steps += 1
        self.progress = progress
        if progress.step >= self.profiled[1]:
            with self.untimed:
                self._write_profile()
        if self.console is None:
            return
        self.console.update()
        if not self.schedule.is_over(progress):
            shares = self.schedule.mixture.shares_at(progress.position)
            if shares != self.schedule.shares_at(progress.position):  # another stage begins
                run_directory.record_event(
                    self.plan.run_directory, "stage", progress.step, shares=shares
                )
                self.said(
                    "from here on "
                    f"{', '.join(f'{name} {share:.4g}' for name, share in shares.items())}"
                )

    def step(
        self,
        loss: float,
        lr: float,
        grad_norm: float,
        aux: list[float],
        update: Optional[tuple[float, float]],
    ) -> None:
        """Write and print a line about the step that is done. aux: the auxiliary loss of a mixture
        of experts, if it is trained.

        update: see `training.step.update_size`; None if it wasn't measured.
        """
        self.first_loss = loss if math.isnan(self.first_loss) else self.first_loss
        self.last_loss = loss
        if self.metrics is None:
            return
        record: Record = {
            "loss": loss,
            "lr": lr,
            "grad_norm": grad_norm,
            "tokens": self.progress.tokens,
        }
        record |= self.speed.lap()
        record["peak_memory_gib"] = peak_memory_gib(self.device)
        words = [f"loss {loss:.4f}", f"lr {lr:.2e}", f"grad norm {grad_norm:.3f}"]
        if aux:
            record["aux_loss"] = aux[0]
            words.append(f"aux loss {aux[0]:.4f}")
        if update is not None:
            record["updated_fraction"], record["update_ratio"] = update
            words.append(f"{update[0]:.1%} of weights changed")
        more = [f"{record['tokens_per_second_per_device']:,.0f} a device"] * (
            self.plan.placement.world_size > 1
        )
        if record.get("mfu", 0.0) >= 0.001:  # that of a toy model says nothing
            more.append(f"MFU {record['mfu']:.1%}")
        words.append(
            f"{record['tokens_per_second']:,.0f} tokens/s"
            + (f" ({', '.join(more)})" if more else "")
        )
        left = self.speed.seconds_left(self.schedule.max_step - self.progress.step)
        words += [f"{record['peak_memory_gib']:.2f} GiB", f"{timedelta(seconds=int(left))} left"]
        if read := self.schedule.mixture.read_before(self.progress.position):
            record["sources"] = read
            sources = (
                f"{name} {one['epochs']:.2f} epochs ({one['tokens']:,} tokens)"
                for name, one in read.items()
            )
            words.append(", ".join(sources))
        self._write({**record, **more_numbers(record)})
        self.said("  ".join(words))
        # Whether training in bfloat16 has any effect.
        if update is not None:
            self.few_updates = self.few_updates + 1 if update[0] < FEW_UPDATES else 0
            if self.few_updates == FEW_UPDATES_LOGS:
                advice = "on average nothing is lost, but if the loss stalls, try a larger --lr"
                if self.kept_updates is None:
                    advice = "how much of smaller updates this optimizer loses can't be measured"
                elif self.kept_updates < 0.9:
                    advice = (
                        "the rest was too small for bfloat16, and this optimizer keeps "
                        f"{self.kept_updates:.0%} of such updates: take --bf16_updates stochastic, "
                        "and in an optimizer of your own `adamw.rounding`"
                    )
                few = f"Warning: only {update[0]:.1%} of the weights change in a step"
                self.line(f"{few}; {advice} (docs/numerics.md).")

    def evaluation(self, found: EvalResult, guard: Guard) -> None:
        """Write and print what an evaluation after the last step has found. The losses of sources
        are averaged by their shares."""
        rises, self.eval_loss = guard.rises(found.losses), self.overall(found.losses)
        record: Record = {"eval_loss": self.eval_loss, "eval": {}}
        if self.schedule.mixture.is_named:  # without the shares, the average can't be compared
            record["shares"] = self.schedule.shares_at(self.progress.position)
        said = []
        for name, one in found.sets.items():
            record["eval"][name] = of_set = dict(one)
            # The line begins with the loss of the only set, which needs no name.
            words = [name, f"{one['loss']:.4f}"] if len(found.sets) > 1 else []
            words += [f"{one['bits_per_byte']:.3f} bits/byte"] if "bits_per_byte" in one else []
            words += [f"{one['accuracy']:.0%} right"] if "accuracy" in one else []
            words += [f"on {one['rows']:,} of {one['of_rows']:,} rows"] if "rows" in one else []
            if name in rises:
                of_set["forgotten"] = rises[name]
            if name in guard.budgets:
                of_set["budget"] = most = guard.budgets[name]
                words += [f"{rises[name]:+.4f} of {most:g}"] if name in rises else []
            said += [" ".join(words)] if words else []
        line = f"validation loss {self.eval_loss:.4f}" + (f" ({', '.join(said)})" if said else "")
        if found.of_average is not None:
            record["eval_loss_ema"] = self.overall(found.of_average)
            line += f"  of the moving average {record['eval_loss_ema']:.4f}"
        self._write(record)
        self.said(line)
        if guard.over:
            self._write(
                {"verdict": "forgetting", "action": guard.forgetting, "reason": guard.forgotten}
            )
            self.said(f"Warning: {guard.forgotten}")

    def overall(self, losses: Mapping[str, float]) -> float:
        """The losses of sources, averaged by their shares here."""
        shares = self.schedule.shares_at(self.progress.position)
        return sum(share * losses[name] for name, share in shares.items()) / sum(shares.values())

    def verdict(self, before: Progress, guard: Guard) -> None:
        """Write and print that the last step, from `before`, was left out, or is a spike."""
        said = {"from_position": before.position, "reason": guard.reason}
        self._write({"verdict": guard.verdict, **said})
        self.said(
            f"{guard.verdict}: {guard.reason}; sequences {before.position} to "
            f"{self.progress.position - 1}"
        )

    def rewound(self, there: Progress, schedule: Schedule, words: str, record: Record) -> None:
        """The run went back to `there` and goes on by `schedule`. Lines of later steps are
        removed."""
        discarded = self.progress.tokens - there.tokens
        self.progress, self.schedule = there, schedule
        if self.metrics is not None:
            undone = self.metrics.path.with_name(METRICS_UNDONE)
            self.metrics.cut(there, undone)  # each step once
            self.trackers.cut(there)
            self._write({**record, "discarded_tokens": discarded})
            self.said(f"{words}; {discarded:,} tokens discarded")

    def said(self, text: str) -> None:
        """Print a line about the last step."""
        self.line(f"step {self.progress.step}/{self.schedule.max_step}  {text}")

    def line(self, text: str) -> None:
        """Print a line."""
        if self.console is not None:
            self.console.write(text)

    def close(self, seconds: float) -> None:
        """Close trackers and bar. The trackers have `seconds` for what they haven't sent yet."""
        if self.console is not None:
            self._write_profile()
            self.console.close()
            self.trackers.close(seconds)

    def _write_profile(self) -> None:
        """Write the profile, if one is being recorded, and print the largest costs. A failure is a
        warning."""
        if self.profile is None:
            return
        seconds, recorder, first = (
            time.monotonic() - self.profile_began,
            self.profile,
            self.profiled[0],
        )
        recorder.stop()
        self.profile, self.profiled = None, (1, 0)  # once
        folder, steps = (
            self.plan.run_directory / "profile",
            f"steps {first} to {self.progress.step}",
        )
        trace = folder / f"steps-{first}-{self.progress.step}.json"
        try:
            run_directory.no_link(folder).mkdir(exist_ok=True)
            recorder.export_chrome_trace(str(run_directory.no_link(trace)))
        except (OSError, RuntimeError, ValueError) as error:
            self.line(f"Warning: the profile of {steps} couldn't be written: {error}")
            return
        self.line(f"Profile of {steps}, {seconds:.2f} s: {trace}. Its largest costs:")
        # The time of an operation without those that it calls.
        # microseconds
        time_of = "self_device_time_total" if self.device.type == "cuda" else "self_cpu_time_total"
        costs = [
            (getattr(event, time_of), event.count, event.key) for event in recorder.key_averages()
        ]
        total = sum(cost for cost, *_ in costs) or 1.0
        for cost, count, name in sorted(costs, reverse=True)[:LARGEST_COSTS]:
            self.line(f"  {cost / total:6.1%} {cost / 1e6:9.3f} s {count:8d} x  {name}")

    def _write(self, record: Record) -> None:
        """Write to metrics.jsonl and, except for verdicts, which are words, to the trackers."""
        record = {"position": self.progress.position, **record}
        if self.metrics is not None and "verdict" in record:
            self.metrics.write(self.progress.step, {**record, "time": run_directory.now()})
        elif self.metrics is not None:
            self.metrics.write(self.progress.step, record)
            self.trackers.log(self.progress.step, flat(record))


def more_numbers(record: dict[str, float]) -> dict[str, float]:
    """Metrics of a step that are computed from its others, for metrics.jsonl and the trackers.
    Yours go here."""
    return {}


class Stopwatch:
    """The seconds spent inside its `with` blocks."""

    def __init__(self) -> None:
        self.seconds, self._began = 0.0, 0.0

    def __enter__(self) -> None:
        self._began = time.monotonic()

    def __exit__(self, *error: object) -> None:
        self.seconds += time.monotonic() - self._began


class Speed:
    """Tokens and FLOPs per second, and how long a step waits. Each lap is an average since the one
    before.

    The log counts `tokens` and `steps`. Time in `other`, of evaluations and saves, doesn't count.
    """

    def __init__(
        self, flops: Flops, device: torch.device, world_size: int, batches: Prefetch
    ) -> None:
        """flops: of the model. batches: of this rank, whose wait for data stands for all ranks'."""
        self.flops, self.world_size, self.batches = flops, world_size, batches
        self.peak = (
            peak_tflops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
        )
        self.tokens = self.steps = 0  # of this process, also those that a rewind has undone
        self.waits, self.other, self.began = Stopwatch(), Stopwatch(), time.monotonic()
        self.before, self.tokens_at = (0.0, 0, 0, 0.0, 0.0), np.zeros(1, dtype=np.int64)

    @property
    def seconds(self) -> float:
        """Seconds of training so far, without `other`."""
        return time.monotonic() - self.began - self.other.seconds

    def lap(self) -> Record:
        """Metrics of the steps since the last lap, with `mfu` if the device's peak is known."""
        now = self.seconds, self.tokens, self.steps, self.batches.seconds_waited, self.waits.seconds
        seconds, tokens, steps, read, waited = (
            after - before for after, before in zip(now, self.before)
        )
        tokens_at = added(self.batches.tokens_at, -self.tokens_at)
        self.before, self.tokens_at = now, self.batches.tokens_at
        total = tokens / max(seconds, 1e-9)
        rate = total / self.world_size
        tflops = rate * self.flops.of(tokens_at) / max(int(tokens_at.sum()), 1) / 1e12
        record = {
            "tokens_per_second": total,
            "tokens_per_second_per_device": rate,
            "model_tflops_per_device": tflops,
        }
        record |= {} if self.peak is None else {"mfu": tflops / self.peak}
        return {
            **record,
            "data_seconds": read / max(steps, 1),
            "wait_seconds": waited / max(steps, 1),
        }

    def seconds_left(self, steps_left: int) -> float:
        """Seconds that `steps_left` steps will take at the average speed so far."""
        return self.seconds / max(self.steps, 1) * steps_left


def peak_memory_gib(device: torch.device) -> float:
    """Largest memory so far, GiB: allocated on a GPU, resident in this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts KiB
