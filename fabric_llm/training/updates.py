"""How much a step changes the weights, measured on a sample of them: whether training in bfloat16 has any effect."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple, Optional

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from fabric_llm.model.strategy import shard_group
from fabric_llm.training.gradients import _communication_device, _local

NEIGHBOURS = 8  # weights that are sampled side by side


class UpdateSize(NamedTuple):
    """What a step did to the weights, from a sample of them."""

    fraction: float  # of weights whose value has changed
    ratio: float  # L2 norm of the update, as a part of that of the weights


def sample_weights(parameters: Iterable[nn.Parameter], per_parameter: int = 4096) -> Tensor:
    """Copies of evenly spaced weights of each parameter that trains, of this rank's part, one-dimensional, in their dtype.

    Eight neighbours are taken at a time: reading one costs as much, since memory is read in lines.
    """
    samples = []
    for parameter in parameters:
        if not parameter.requires_grad:
            continue
        weights = _local(parameter.detach()).flatten()
        if weights.numel() > per_parameter:
            step = NEIGHBOURS * -(-weights.numel() // per_parameter)
            weights = weights[: weights.numel() // step * step].view(-1, step)[:, :NEIGHBOURS].flatten()
        samples.append(weights)
    return torch.cat(samples)


def size(before: Tensor, model: nn.Module) -> UpdateSize:
    """What has happened to the weights of a wrapped model since `before`, their sample, over all ranks."""
    return update_size(before, sample_weights(model.parameters()), shard_group(model))


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
