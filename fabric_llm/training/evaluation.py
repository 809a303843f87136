"""The validation loss of each validation split: the same number on any number of devices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Optional

import torch
from torch import nn

from fabric_llm.base.fabric import Fabric
from fabric_llm.base.failpoints import failpoint
from fabric_llm.base.ranks import any_rank, sum_over_ranks
from fabric_llm.data.batches import Batches, MicroBatch, target_count
from fabric_llm.model.strategy import reshard


class Evaluation:
    """Evaluates a model on the first batches of validation splits.

    batches: of one rank, read from position 0, of each split by name. is_asked_to_stop(): of this rank; one rank's request ends it on all ranks.
    working(): called before each batch, to say that this rank goes on.
    """

    def __init__(
        self,
        fabric: Fabric,
        batches: Mapping[str, Batches],
        is_asked_to_stop: Callable[[], bool],
        working: Callable[[], None],
    ) -> None:
        self.fabric, self.batches = fabric, batches
        self.is_asked_to_stop, self.working = is_asked_to_stop, working
        self.was_stopped = False
        self.is_on = any(one.micro_batches > 0 for one in batches.values())

    def losses(self, model: nn.Module) -> Optional[dict[str, float]]:
        """Mean loss over the targets of each split's batches, nats; None where a request to stop came before their end.

        0 where there are no batches.
        """
        self.was_stopped, losses = False, {}
        for name, batches in self.batches.items():
            losses[name] = mean_loss(self.fabric, model, self._until_stopped(batches, is_first=not losses))
            if self.was_stopped:
                return None
        return losses

    def _until_stopped(self, batches: Batches, is_first: bool) -> Iterator[MicroBatch]:
        for number, batch in enumerate(batches.stream(0)):
            if (number > 0 or not is_first) and any_rank(self.fabric, self.is_asked_to_stop()):
                self.was_stopped = True
                return
            self.working()
            yield batch


@torch.no_grad()
def mean_loss(fabric: Fabric, model: nn.Module, batches: Iterable[MicroBatch]) -> float:
    """Mean loss over all target tokens of all ranks' batches, nats. Every rank gives the same number of batches."""
    model.eval()
    total = torch.zeros((), dtype=torch.float64, device=fabric.device)
    targets = torch.zeros((), dtype=torch.int64, device=fabric.device)
    for batch in batches:
        failpoint("evaluate")
        batch = fabric.to_device(batch)
        total += model(**batch)
        targets += target_count(batch)
    model.train()
    reshard(model)  # or the next step would see the outermost unit's parameters whole, and not sum their gradients
    total, targets = sum_over_ranks(fabric, total), sum_over_ranks(fabric, targets)
    return (total / targets.clamp(min=1)).item()
