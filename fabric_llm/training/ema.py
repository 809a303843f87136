"""An exponential moving average (EMA) of the weights: --ema_decay.

After each step `ema += (1 - decay) * (weights - ema)`. It begins as a copy of the weights, so it needs no correction of a bias
towards zero. --ema_every N updates it every N steps, with decay**N, so that it reaches as far back.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Optional

import torch
from torch import Tensor

from fabric_llm.model.strategy import local_part
from fabric_llm.training.adamw_rounded import bfloat16_bits, noise, pieces_of

NAME = "ema"  # of the state in checkpoints
BLOCK_ELEMENTS = 2**22  # that are updated at a time: 16 MiB in float32


class Average(torch.optim.Optimizer):
    """The EMA of all parameters that an optimizer trains, with their shapes, and split over ranks as they are.

    It is an Optimizer in form, with a state `ema` for each parameter, so that checkpoints name, shard and restore it as they do
    moments; one of its own since FSDP wants all state of an optimizer in one dtype.

    device: host, float32 in the memory of the CPU; same, in dtype and on the device of the parameter, where bfloat16 is rounded
    stochastically, as by the optimizer and independent of it: to nearest, no average with a decay above 0.998 could move.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, decay: float, device: str, every: int, seed: int) -> None:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        # A group without any number would lose its tied parameters when it is loaded.
        super().__init__(params, {"decay": decay})
        self.decay, self.every, self.seed = decay, every, seed
        origins = getattr(optimizer, "origins", {})
        self.origins = [origins.get(param, (str(number), 0)) for number, param in enumerate(params)]
        for param in params:
            where, dtype = ("cpu", torch.float32) if device == "host" else (param.device, param.dtype)
            self.state[param][NAME] = param.detach().to(where, dtype, copy=True, memory_format=torch.contiguous_format)

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take the weights after the run's step `step` in. Does nothing where that isn't a multiple of `every`."""
        if step % self.every:
            return
        weight = 1 - self.decay**self.every
        for (name, offset), (param, ema) in zip(self.origins, self._tensors()):
            if weight == 1:  # the difference and the sum below would be rounded
                ema.copy_(param)
                continue
            origin = f"{NAME} of {name}", offset
            for (old, new), first, key in pieces_of([ema, param], origin, BLOCK_ELEMENTS, self.seed, step):
                # Each operation is rounded by itself: a fused one would give other bits at the end of a vector, so with other shards.
                wide = old.float()
                moved = new.to(old.device, torch.float32).sub(wide).mul_(weight).add_(wide)
                if ema.dtype == torch.bfloat16:
                    bits = bfloat16_bits(moved, noise(first, moved.numel(), key, moved.device)[0])
                    old.view(torch.int16).copy_(bits)
                else:
                    old.copy_(moved)

    @contextmanager
    @torch.no_grad()
    def in_place(self) -> Iterator[None]:
        """In the body the model has the average, rounded to nearest, as its weights; a copy of them comes back."""
        kept = [(param, param.clone()) for param, _ in self._tensors()]
        for param, ema in self._tensors():
            param.copy_(ema)
        try:
            yield
        finally:
            for param, weights in kept:
                param.copy_(weights)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the averages, which stay on their device and in their dtype. torch's would give them those of the parameters."""
        numbers = (number for group in state_dict["param_groups"] for number in group["params"])
        for number, (_, ema) in zip(numbers, self._tensors(), strict=True):
            if ema.numel():  # a rank may hold nothing of a sharded parameter
                ema.copy_(local_part(state_dict["state"][number][NAME]).view(-1))

    def _tensors(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(parameter, average) of this rank, one-dimensional."""
        for param in self.param_groups[0]["params"]:
            yield tuple(local_part(tensor).detach().view(-1) for tensor in (param, self.state[param][NAME]))


def begin(optimizer: torch.optim.Optimizer, decay: Optional[float], device: str, every: int, seed: int) -> None:
    """Give the optimizer of a run, as its attribute `average`, an `Average` of the weights as they are; without decay none."""
    if decay is not None:
        optimizer.average = Average(optimizer, decay=decay, device=device, every=every, seed=seed)


def update(optimizer: torch.optim.Optimizer, step: int) -> None:
    """Update the average of an optimizer, if it has one, after the run's step `step`."""
    if (average := getattr(optimizer, "average", None)) is not None:
        average.update(step)
