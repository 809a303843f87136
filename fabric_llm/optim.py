"""Parameter groups, the learning rate as a function of the step, gradients and updates by number. AdamW: adamw.py."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

NEIGHBOURS = 8  # weights that are sampled side by side


def decayed_names(model: nn.Module) -> set[str]:
    """Names of the parameters that weight decay applies to: matrices, not norms and biases.

    Ask the model before it is wrapped: FSDP shows each parameter as a one-dimensional piece.
    """
    return {name for name, parameter in model.named_parameters() if parameter.ndim >= 2}


def parameter_groups(
    named_parameters: Iterable[tuple[str, nn.Parameter]], decayed: set[str], weight_decay: float
) -> list[dict[str, Any]]:
    """Two groups for AdamW, with and without weight decay. Names are those of the unwrapped model."""
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, parameter in named_parameters:
        if parameter.requires_grad:
            groups[name in decayed].append(parameter)
    settings = ((groups[True], weight_decay), (groups[False], 0.0))
    return [{"params": parameters, "weight_decay": decay} for parameters, decay in settings if parameters]


def lr_at(
    step: int, *, max_step: int, lr: float, min_lr: float, warmup_steps: int, decay: bool = True, shape: str = "cosine"
) -> float:
    """Learning rate of the step that follows `step` finished ones.

    Linear from lr/warmup_steps to lr over the warm-up, then along half a cosine (Loshchilov and Hutter 2017) or a line
    to min_lr, which it would reach one step after the last, so that no step is wasted at 0; there it stays.
    """
    if step < warmup_steps:
        return lr * (step + 1) / warmup_steps
    if not decay:
        return lr
    done = min(1.0, (step - warmup_steps) / max(1, max_step - warmup_steps))
    falling = 0.5 * (1 + math.cos(math.pi * done)) if shape == "cosine" else 1 - done
    return min_lr + (lr - min_lr) * falling


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float, group: Optional[ProcessGroup]) -> Tensor:
    """Scale all gradients so that their common L2 norm is at most `max_norm` (0: only measure).

    `group` is the process group that the parameters are split over, None where each rank holds them whole.
    Squares are summed in float64: the norm of n shards then equals that of the whole, and bf16 gradients don't
    round it. Returns the norm before clipping, float64 scalar on the gradients' device.
    """
    gradients = [_local(p.grad) for p in parameters if p.grad is not None]
    gradients = [g for g in gradients if g.numel()]
    device = next((g.device for g in gradients), _communication_device(group))
    squares = [torch.linalg.vector_norm(g, dtype=torch.float64).square() for g in gradients]
    total = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64, device=device)
    if group is not None:
        total = total.to(_communication_device(group))  # offloaded gradients are on the CPU, NCCL is not
        torch.distributed.all_reduce(total, group=group)
        total = total.to(device)
    norm = total.sqrt()
    if max_norm > 0 and gradients:
        # In float32, so that another order of the sums above, 1e-16 apart, can't change a gradient's last bit.
        coefficient = (max_norm / (norm + 1e-6)).clamp(max=1.0).float()
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


class UpdateSize(NamedTuple):
    """What a step did to the weights, from a sample of them."""

    fraction: float  # of weights whose value has changed
    ratio: float  # L2 norm of the update, as a part of that of the weights


def sample_weights(parameters: Iterable[nn.Parameter], per_parameter: int = 4096) -> Tensor:
    """Copies of evenly spaced weights of each parameter that this rank holds a part of, one-dimensional, in their dtype.

    Eight neighbours are taken at a time: reading one costs as much, since memory is read in lines.
    """
    samples = []
    for parameter in parameters:
        weights = _local(parameter.detach()).flatten()
        if weights.numel() > per_parameter:
            step = NEIGHBOURS * -(-weights.numel() // per_parameter)
            weights = weights[: weights.numel() // step * step].view(-1, step)[:, :NEIGHBOURS].flatten()
        samples.append(weights)
    return torch.cat(samples)


def update_size(before: Tensor, after: Tensor, group: Optional[ProcessGroup]) -> UpdateSize:
    """Compare two samples; over all ranks of `group`, the process group that the parameters are split over."""
    before, after = before.float(), after.float()
    norms = [torch.linalg.vector_norm(x, dtype=torch.float64) for x in (after - before, before)]
    squares = [norm.square() for norm in norms]
    numbers = torch.stack([(before != after).sum().double(), squares[0].new_tensor(before.numel()), *squares])
    if group is not None:
        numbers = numbers.to(_communication_device(group))
        torch.distributed.all_reduce(numbers, group=group)
    changed, total, update, weights = numbers.tolist()
    return UpdateSize(changed / total, math.sqrt(update / weights) if weights else 0.0)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _communication_device(group: Optional[ProcessGroup]) -> torch.device:
    if group is None or torch.distributed.get_backend(group) != "nccl":
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
