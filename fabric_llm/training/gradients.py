"""Gradients of a step: their sum over micro-batches in float32, their norm over all shards, and clipping."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Optional

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from fabric_llm.model.gradient_equality import square


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float, group: Optional[ProcessGroup]) -> float:
    """Scale all gradients so that their common L2 norm is at most `max_norm` (0: only measure).

    `group` is the process group that the parameters are split over, None where each rank holds them whole.
    Squares are summed in float64: the norm of n shards then equals that of the whole, and bf16 gradients don't
    round it. Returns the norm before clipping, which the host waits for: most steps then need no scaling.
    """
    gradients = [_local(p.grad) for p in parameters if p.grad is not None]
    gradients = [g for g in gradients if g.numel()]
    device = next((g.device for g in gradients), _communication_device(group))
    squares = [square(g) for g in gradients]
    total = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64, device=device)
    if group is not None:
        total = total.to(_communication_device(group))  # offloaded gradients are on the CPU, NCCL is not
        torch.distributed.all_reduce(total, group=group)
        total = total.to(device)
    norm = total.sqrt().item()
    if max_norm > 0 and gradients and not norm + 1e-6 <= max_norm:  # NaN as well
        # In float32, so that another order of the sums above, 1e-16 apart, can't change a gradient's last bit.
        coefficient = torch.tensor(max_norm / (norm + 1e-6), dtype=torch.float32).item()
        torch._foreach_mul_(gradients, coefficient)
    return norm


class GradientSums:
    """Sums of low-precision gradients over the micro-batches of a step, in float32: 4 bytes for each parameter held.

    A bfloat16 sum rounds at each addition: over 64 micro-batches that is more error than rounding once
    (docs/numerics.md has the numbers). float32 gradients are left to autograd.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = [p for p in parameters if p.dtype != torch.float32]
        self.sums: list[Optional[Tensor]] = [None] * len(self.parameters)

    @torch.no_grad()
    def add(self, last: bool) -> None:
        """Take the gradients of one micro-batch; after the last, leave the rounded sums in their place."""
        for index, parameter in enumerate(self.parameters):
            if parameter.grad is None:
                continue
            gradient, total = _local(parameter.grad), self.sums[index]
            if last:
                if total is not None:
                    gradient.copy_(total.add_(gradient))
                continue
            self.sums[index] = gradient.float() if total is None else total.add_(gradient)
            parameter.grad = None


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _communication_device(group: Optional[ProcessGroup]) -> torch.device:
    if group is None or torch.distributed.get_backend(group) != "nccl":
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
