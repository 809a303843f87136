"""Evaluation: the loss of each validation set, and the drift, how far the weights are from those at the start of the run.

Both are the same on any number of devices.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Optional

import numpy as np
import torch
from torch import Tensor, nn

from fabric_llm.base.fabric import Fabric
from fabric_llm.base.failpoints import failpoint
from fabric_llm.base.files import write_atomically
from fabric_llm.base.ranks import any_rank, from_rank_zero, sum_over_ranks
from fabric_llm.data.batches import Batches, MicroBatch, target_count
from fabric_llm.data.columns import IGNORED
from fabric_llm.data.sources import COPY
from fabric_llm.model.strategy import local_part, reshard, shards

SAMPLE = 2**16  # weights, whose relative distance is that of all weights to about 1 %
FILE = "base_sample.npy"  # float32 [SAMPLE], beside the run's log
# Wrapped model -> L2 distance of its weights from the base of the run, divided by the base's norm. All ranks call it.
Drift = Callable[[nn.Module], float]


class Found(NamedTuple):
    """What an evaluation has found."""

    sets: dict[str, dict[str, float]]  # by name, see `evaluate`
    of_average: Optional[dict[str, float]]  # losses of the moving average of the weights, if there is one, nats
    drift: Optional[float]  # None: not measured

    @property
    def losses(self) -> dict[str, float]:
        """{set: its loss, nats}."""
        return {name: one["loss"] for name, one in self.sets.items()}


@dataclass
class Evaluation:
    """Evaluates a model on the first batches of validation sets."""

    fabric: Fabric
    batches: Mapping[str, Batches]  # {set: this rank's batches}, read from position 0
    is_asked_to_stop: Callable[[], bool]  # of this rank; a request to one rank ends the evaluation on all
    working: Callable[[], None]  # called before each batch, to mark that this rank makes progress
    token_bytes: Optional[Tensor] = None  # of each id, int64 [vocabulary], see data/token_bytes.py
    drift: Optional[Drift] = None
    was_stopped: bool = False

    @property
    def is_on(self) -> bool:
        """False if there is nothing to evaluate."""
        return any(batches.micro_batches > 0 for batches in self.batches.values())

    def of(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Optional[Found]:
        """Evaluate the model and its moving average; the loss of a set without batches is 0. None if asked to stop before the end."""
        self.was_stopped, of_average = False, None
        sets, average = self._sets(model), getattr(optimizer, "average", None)  # see ema.py
        if average is not None and not self.was_stopped:
            with average.in_place():
                of_average = {name: one["loss"] for name, one in self._sets(model).items()}
        if self.was_stopped:
            return None
        return Found(sets, of_average, None if self.drift is None else self.drift(model))

    def _sets(self, model: nn.Module) -> dict[str, dict[str, float]]:
        found: dict[str, dict[str, float]] = {}
        for name, batches in self.batches.items():
            batches = self._until_stopped(batches, is_first=not found)
            found[name] = evaluate(self.fabric, model, batches, None if name == COPY else self.token_bytes)
            if self.was_stopped:
                break
        return found

    def _until_stopped(self, batches: Batches, is_first: bool) -> Iterator[MicroBatch]:
        for number, batch in enumerate(batches.stream(0)):
            if (number > 0 or not is_first) and any_rank(self.fabric, self.is_asked_to_stop()):
                self.was_stopped = True
                return
            self.working()
            yield batch


@torch.no_grad()
def evaluate(
    fabric: Fabric, model: nn.Module, batches: Iterable[MicroBatch], token_bytes: Optional[Tensor] = None
) -> dict[str, float]:
    """Loss (mean over the targets of all ranks' batches, nats), perplexity and, with `token_bytes`, bits_per_byte of text.

    All ranks have the same number of batches.
    """
    model.eval()
    total = torch.zeros((), dtype=torch.float64, device=fabric.device)
    counts = torch.zeros(2, dtype=torch.int64)  # targets, and bytes of their text
    for batch in batches:
        failpoint("evaluate")
        counts[0] += target_count(batch)
        if token_bytes is not None:
            labels = batch["labels"][:, 1:]
            counts[1] += token_bytes[labels[labels != IGNORED]].sum()
        total += model(**fabric.to_device(batch))
    model.train()
    reshard(model)  # otherwise the next step would find the outermost unit gathered, and not reduce its gradients
    total = sum_over_ranks(fabric, total).item()
    targets, text = sum_over_ranks(fabric, counts.to(fabric.device)).tolist()
    loss = total / max(targets, 1)
    bits = {"bits_per_byte": total / text / math.log(2)} if text else {}
    return {"loss": loss, "perplexity": math.exp(loss) if loss < 700 else math.inf, **bits}


# ------------------------------------------------------------------------------- drift


def drift_of_run(
    fabric: Fabric, model: nn.Module, sizes: dict[str, int], directory: Path, resumed_from: Optional[Path]
) -> Optional[Drift]:
    """What measures the drift from the wrapped `model` or, in a resumed run, from the sample that was kept; None without one.

    sizes: elements of each parameter of the model. All ranks call it.
    """
    began = sample(fabric, model, sizes) if resumed_from is None else None

    def keep() -> Optional[Tensor]:
        base = began
        # The last that is there: a branch's own, once it has one, before that of the run that it left.
        for folder in [] if resumed_from is None else [resumed_from.parent, directory]:
            with suppress(OSError, ValueError):
                base = torch.from_numpy(np.load(folder / FILE))
        if base is not None:
            content = io.BytesIO()
            np.save(content, base.numpy())
            write_atomically(directory / FILE, content.getvalue())
        return base

    base = from_rank_zero(keep)

    def drift(model: nn.Module) -> float:
        changed = sample(fabric, model, sizes) - base
        return (changed.double().norm() / base.double().norm()).item()

    return None if base is None else drift


def sample(fabric: Fabric, model: nn.Module, sizes: dict[str, int]) -> Tensor:
    """Weights of a wrapped model, the same ones however it is sharded: float32 [SAMPLE] on the CPU. All ranks call it."""
    begins = dict(zip(sizes, np.cumsum([0, *sizes.values()]).tolist()))
    drawn = np.random.Generator(np.random.Philox(0)).integers(0, sum(sizes.values()), SAMPLE)
    found = torch.zeros(2, SAMPLE, device=fabric.device)  # weights, and how many ranks hold each
    for name, shard in shards(model).items():
        local, first = local_part(shard.parameter.detach()).flatten(), begins[name] + shard.first
        here = np.flatnonzero((drawn >= first) & (drawn < first + local.numel()))
        weights = local[torch.from_numpy(drawn[here] - first).to(local.device)]
        found[0, here] = weights.float().to(fabric.device)
        found[1, here] = 1
    weights, holders = sum_over_ranks(fabric, found)
    return (weights / holders).cpu()
