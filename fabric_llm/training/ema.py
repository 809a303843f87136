"""An exponential moving average (EMA) of the weights: --ema_decay.

After each step `ema += (1 - decay) * (weights - ema)`. It begins as a copy of the weights, so it
needs no bias correction. --ema_every N updates it every N steps with decay**N, so that it reaches
as far back.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from fabric_llm.model.sharded import local_part
from fabric_llm.training.adamw_rounded import bfloat16_bits, noise, pieces_of

NAME = "ema"  # of the state in checkpoints
BLOCK_ELEMENTS = 2**22  # how many are updated at a time: 16 MiB in float32


class Average:
    """The EMA of all parameters that an optimizer trains, in their shapes, and sharded as they are.

    An optimizer has it as its attribute `average`, if there is one.

    `state`, as of an optimizer: parameter -> {"ema": tensor}. So checkpoints name, shard and
    restore it like moments.

    device: host, float32 in host memory; same, in the dtype and on the device of the parameter.
    There bfloat16 is rounded stochastically, by other noise than the optimizer's: to nearest, an
    average with a decay above 0.998 couldn't move.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, *, decay: float, device: str, every: int, seed: int
    ) -> None:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        self.decay, self.every, self.seed = decay, every, seed
        # Names and offsets of whole tensors give the same noise with any sharding.
        origins = getattr(optimizer, "origins", {})
        self.origins = [origins.get(param, (str(number), 0)) for number, param in enumerate(params)]
        self.state: dict[Tensor, dict[str, Tensor]] = {}
        for param in params:
            where, dtype = param.device, param.dtype
            # In host memory it costs the device nothing, and float32 needs no stochastic rounding.
            if device == "host":
                where, dtype = torch.device("cpu"), torch.float32
            average = param.detach().to(
                where, dtype, copy=True, memory_format=torch.contiguous_format
            )
            self.state[param] = {NAME: average}

    @torch.no_grad()
    def update(self, step: int, left_out: int = 0) -> None:
        """Update the average by the weights after `step`, if that is a multiple of `every`.

        left_out: how many steps in a row up to this one were. If none was taken since the last
        update, there is nothing to add.
        """
        if step % self.every or left_out >= self.every:
            return
        weight = 1 - self.decay**self.every
        for (name, offset), (param, ema) in zip(self.origins, self._tensors()):
            if weight == 1:  # the arithmetic below would round
                ema.copy_(param)
                continue
            # Other noise than that of the optimizer's update of the same parameter.
            origin = f"{NAME} of {name}", offset
            pieces = pieces_of([ema, param], origin, BLOCK_ELEMENTS, self.seed, step)
            for (old, new), first, key in pieces:
                # No fused operations: they give other bits at the end of a vector, and so with
                # other shards.
                wide = old.float()
                moved = new.to(old.device, torch.float32).sub(wide).mul_(weight).add_(wide)
                if ema.dtype == torch.bfloat16:
                    random = noise(first, moved.numel(), key, moved.device)[0]
                    old.view(torch.int16).copy_(bfloat16_bits(moved, random))
                else:
                    old.copy_(moved)

    @contextmanager
    @torch.no_grad()
    def in_place(self) -> Iterator[None]:
        """In the body, the model has the average, rounded to nearest, as its weights. They are
        restored from a copy."""
        # Copied, not swapped: the parameter's dtype may be one that would round the average.
        kept = [(param, param.clone()) for param, _ in self._tensors()]
        for param, ema in self._tensors():
            param.copy_(ema)
        try:
            yield
        finally:
            for param, weights in kept:
                param.copy_(weights)

    def _tensors(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(parameter, average) of this rank, one-dimensional."""
        for param, state in self.state.items():
            average = state[NAME]
            yield local_part(param).detach().view(-1), local_part(average).detach().view(-1)
