"""Throughput, memory and metrics.jsonl. Used on rank 0."""

from __future__ import annotations

import json
import math
import resource
import time
from pathlib import Path
from typing import Any, Optional

import numpy as np
import torch

from fabric_llm.base.failpoints import failpoint
from fabric_llm.base.files import fsync, write_atomically
from fabric_llm.data.batches import Prefetch, added
from fabric_llm.model.flops import Flops, peak_tflops
from fabric_llm.run.trackers import Record


class MetricsFile:
    """metrics.jsonl: one JSON object a line, each with `step`. Open only while a line is written."""

    def __init__(
        self,
        path: Path,
        resumed_step: Optional[int] = None,
        rewinds: Optional[int] = None,
        evaluates_again: bool = False,
        keeps_discarded: bool = False,
    ) -> None:
        """Lines of steps after `resumed_step` belong to work that is being redone: they go.

        None: all go, which are those of a run that was killed before its first checkpoint. rewinds: how often the run had
        gone back when its checkpoint was written; later times, whose lines bear the step gone back to, are undone as well.
        evaluates_again: the evaluation of `resumed_step` is to be made, so a line that a killed run wrote of it goes.
        keeps_discarded: lines that go are added to metrics.discarded.jsonl, for the report.
        """
        if path.exists():
            lines = path.read_text(errors="replace").splitlines(keepends=True)
            kept = [line for line in lines if resumed_step is not None and _step_of(line) <= resumed_step]
            if evaluates_again:
                kept = [line for line in kept if _step_of(line) < resumed_step or "eval_loss" not in json.loads(line)]
            if rewinds is not None:
                undone = [number for number, line in enumerate(kept) if _is_rewind(line)][rewinds:]
                kept = [line for number, line in enumerate(kept) if number not in undone]
            if keeps_discarded:
                stays = set(kept)
                _keep_discarded(path, resumed_step or 0, [line for line in lines if line not in stays])
            failpoint("metrics.replace")
            write_atomically(path, "".join(kept), durable=True)
        self.path = path

    def write(self, step: int, record: Record) -> None:
        """Append one line."""
        with self.path.open("a") as file:
            file.write(json.dumps({"step": step, **_finite(record)}) + "\n")

    def make_durable(self) -> None:
        """On the disk, before a checkpoint says that these steps are done."""
        self.path.touch()  # before step 1 there may be no line
        fsync(self.path)


def _keep_discarded(path: Path, step: int, lines: list[str]) -> None:
    """Add `lines` to metrics.discarded.jsonl beside `path`, under a line that says to which step the run went back."""
    lines = [line.rstrip("\n") + "\n" for line in lines if _step_of(line) < math.inf]
    file = path.with_suffix(".discarded.jsonl")
    before, added = file.read_text(errors="replace") if file.exists() else "", "".join(lines)
    if lines and not before.endswith(added):  # it does where a kill came before they were taken from `path`
        header = json.dumps({"step": step, "discarded": len(lines)})
        write_atomically(file, f"{before}{header}\n{added}", durable=True)


def _finite(value: Any) -> Any:
    """JSON has no NaN."""
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError, RecursionError):  # a line that a kill cut off, or nobody of ours wrote
        return float("inf")


def _is_rewind(line: str) -> bool:
    return json.loads(line).get("verdict") == "rewind"


class Stopwatch:
    """The seconds spent inside its `with` blocks."""

    def __init__(self) -> None:
        self.seconds, self._began = 0.0, 0.0

    def __enter__(self) -> None:
        self._began = time.monotonic()

    def __exit__(self, *error: object) -> None:
        self.seconds += time.monotonic() - self._began


class Speed:
    """Tokens per second of training proper, what a device does in a second, and how long a step waits.

    Each lap is an average since the one before. `tokens` and `steps` are counted by whoever trains, and time that is spent in
    `other`, on evaluation and saving, doesn't count.
    """

    def __init__(self, flops: Flops, device: torch.device, world_size: int, batches: Prefetch, tokens: int = 0) -> None:
        """batches: of this rank, which stands for all. flops: of the model. tokens: those of a resumed run so far."""
        self.flops, self.world_size, self.batches = flops, world_size, batches
        self.peak = peak_tflops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
        self.tokens, self.steps = tokens, 0
        self.waits, self.other = Stopwatch(), Stopwatch()
        self.began = time.monotonic()
        self.before = self._totals()

    @property
    def seconds(self) -> float:
        """Of training proper, so far."""
        return time.monotonic() - self.began - self.other.seconds

    def lap(self) -> Record:
        """The metrics, with `mfu` where the device's peak is known."""
        totals = self._totals()
        seconds, tokens, steps, read, waited = (now - before for now, before in zip(totals[:5], self.before))
        tokens_at = added(totals[5], -self.before[5])
        self.before = totals
        total = tokens / max(seconds, 1e-9)
        rate = total / self.world_size
        tflops = rate * self.flops.of(tokens_at) / max(int(tokens_at.sum()), 1) / 1e12
        record = {"tokens_per_second": total, "tokens_per_second_per_device": rate, "model_tflops_per_device": tflops}
        record |= {} if self.peak is None else {"mfu": tflops / self.peak}
        return {**record, "data_seconds": read / max(steps, 1), "wait_seconds": waited / max(steps, 1)}

    def go_back(self, tokens: int) -> None:
        """After a rewind: to the tokens of the run so far."""
        self.before = (self.before[0], self.before[1] - self.tokens + tokens, *self.before[2:])
        self.tokens = tokens

    def _totals(self) -> tuple[float, int, int, float, float, np.ndarray]:
        read, waited = self.batches.seconds_waited, self.waits.seconds
        return self.seconds, self.tokens, self.steps, read, waited, self.batches.tokens_at

    def seconds_left(self, steps_left: int) -> float:
        """Time that `steps_left` steps will take at the speed so far."""
        return self.seconds / max(self.steps, 1) * steps_left


def peak_memory_gib(device: torch.device) -> float:
    """Largest memory so far, GiB: allocated on a GPU, resident in this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts KiB


def duration(seconds: float) -> str:
    """3725 -> '1:02:05'"""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"
