"""The validation loss of each validation set: the same number on any number of devices."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor, nn

from fabric_llm.base.fabric import Fabric
from fabric_llm.base.failpoints import failpoint
from fabric_llm.base.ranks import any_rank, sum_over_ranks
from fabric_llm.data.batches import Batches, MicroBatch, target_count
from fabric_llm.data.columns import IGNORED
from fabric_llm.data.sources import COPY
from fabric_llm.model.strategy import reshard
from fabric_llm.training.ema import average_of
from fabric_llm.training.updates import Drift


@dataclass(frozen=True)
class Evaluated:
    """What a model makes of a validation set."""

    loss: float  # mean over the targets, nats
    bits_per_byte: Optional[float] = None  # of text; None where no tokenizer says how many bytes a token stands for

    def as_json(self) -> dict[str, Any]:
        """For metrics.jsonl."""
        perplexity = math.exp(self.loss) if self.loss < 700 else math.inf
        record = {"loss": self.loss, "perplexity": perplexity}
        return record if self.bits_per_byte is None else {**record, "bits_per_byte": self.bits_per_byte}


class Found(NamedTuple):
    """What an evaluation has found."""

    sets: dict[str, Evaluated]  # by name
    of_average: Optional[dict[str, float]]  # losses of a moving average of the weights, if there is one, nats
    drift: Optional[float]  # L2 distance of the weights from the base, as a part of the base's norm; None: not measured

    @property
    def losses(self) -> dict[str, float]:
        """Of each set, nats."""
        return {name: one.loss for name, one in self.sets.items()}


@dataclass
class Evaluation:
    """Evaluates a model on the first batches of validation sets."""

    fabric: Fabric
    batches: Mapping[str, Batches]  # of this rank, read from position 0, of each set by name
    is_asked_to_stop: Callable[[], bool]  # this rank; the request of one ends the evaluation on all
    working: Callable[[], None]  # called before each batch, to say that this rank goes on
    token_bytes: Optional[Tensor] = None  # of each id, int64 [vocabulary], see data/token_bytes.py
    drift: Optional[Drift] = None
    was_stopped: bool = field(default=False, init=False)

    @property
    def is_on(self) -> bool:
        """False where there is nothing to evaluate."""
        return any(batches.micro_batches > 0 for batches in self.batches.values())

    def of(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Optional[Found]:
        """What the model makes of each set, and the moving average that the optimizer keeps of it, if it does.

        A loss is 0 where there are no batches. None where a request to stop came before the end.
        """
        self.was_stopped, of_average = False, None
        sets, average = self._sets(model), average_of(optimizer)
        if average is not None and not self.was_stopped:
            with average.in_place():
                of_average = {name: one.loss for name, one in self._sets(model).items()}
        if self.was_stopped:
            return None
        return Found(sets, of_average, None if self.drift is None else self.drift.of(model))

    def _sets(self, model: nn.Module) -> dict[str, Evaluated]:
        found: dict[str, Evaluated] = {}
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
) -> Evaluated:
    """Over all target tokens of all ranks' batches. Every rank gives the same number of batches."""
    model.eval()
    total = torch.zeros((), dtype=torch.float64, device=fabric.device)
    counts = torch.zeros(2, dtype=torch.int64, device=fabric.device)  # targets, and their bytes
    for batch in batches:
        failpoint("evaluate")
        counts += torch.stack([target_count(batch), target_bytes(batch, token_bytes)]).to(fabric.device)
        total += model(**fabric.to_device(batch))
    model.train()
    reshard(model)  # or the next step would see the outermost unit's parameters whole, and not sum their gradients
    total, (targets, text) = sum_over_ranks(fabric, total).item(), sum_over_ranks(fabric, counts).tolist()
    return Evaluated(total / max(targets, 1), total / text / math.log(2) if text else None)


def target_bytes(batch: MicroBatch, token_bytes: Optional[Tensor]) -> Tensor:
    """Bytes of the text that a batch's targets stand for, int64, scalar; 0 where that isn't known. On the CPU."""
    labels = batch["labels"][:, 1:]
    return torch.zeros((), dtype=torch.int64) if token_bytes is None else token_bytes[labels[labels != IGNORED]].sum()
