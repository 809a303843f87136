"""An exponential moving average (EMA) of the weights: --ema_decay.

After each step `ema += (1 - decay) * (weights - ema)`. It begins as a copy of the weights, so it needs no bias correction.
--ema_every N updates it every N steps with decay**N, so that it reaches as far back.
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
    """The EMA of all parameters that an optimizer trains, in their shapes, and sharded as they are.

    It has the form of an Optimizer, with a state `ema` for each parameter, so that checkpoints name, shard and restore it like
    moments. It isn't part of the other optimizer's state, since FSDP wants all state of an optimizer in one dtype.

    device: host, float32 in host memory; same, in the dtype and on the device of the parameter. There bfloat16 is rounded
    stochastically, by other noise than the optimizer's: to nearest, an average with a decay above 0.998 couldn't move.
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
        """Update the average by the weights after the run's step `step`, if that is a multiple of `every`."""
        if step % self.every:
            return
        weight = 1 - self.decay**self.every
        for (name, offset), (param, ema) in zip(self.origins, self._tensors()):
            if weight == 1:  # the arithmetic below would round
                ema.copy_(param)
                continue
            origin = f"{NAME} of {name}", offset
            for (old, new), first, key in pieces_of([ema, param], origin, BLOCK_ELEMENTS, self.seed, step):
                # No fused operations: they give other bits at the end of a vector, and so with other shards.
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
        """In the body, the model has the average, rounded to nearest, as its weights. They are restored from a copy."""
        kept = [(param, param.clone()) for param, _ in self._tensors()]
        for param, ema in self._tensors():
            param.copy_(ema)
        try:
            yield
        finally:
            for param, weights in kept:
                param.copy_(weights)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the averages into their device and dtype. torch's own would move them to those of the parameters."""
        numbers = (number for group in state_dict["param_groups"] for number in group["params"])
        for number, (_, ema) in zip(numbers, self._tensors(), strict=True):
            if ema.numel():  # else this rank holds nothing of a sharded parameter
                ema.copy_(local_part(state_dict["state"][number][NAME]).view(-1))

    def _tensors(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(parameter, average) of this rank, one-dimensional."""
        for param in self.param_groups[0]["params"]:
            yield tuple(local_part(tensor).detach().view(-1) for tensor in (param, self.state[param][NAME]))


def begin(optimizer: torch.optim.Optimizer, decay: Optional[float], device: str, every: int, seed: int) -> None:
    """Give an optimizer an `Average` of its weights, as its attribute `average`, unless decay is None."""
    if decay is not None:
        optimizer.average = Average(optimizer, decay=decay, device=device, every=every, seed=seed)


def update(optimizer: torch.optim.Optimizer, step: int) -> None:
    """Update the average of an optimizer, if it has one, after the run's step `step`."""
    if (average := getattr(optimizer, "average", None)) is not None:
        average.update(step)
