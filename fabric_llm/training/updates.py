"""How far the weights go, measured on samples of them: in a step, and since the run began.

In a step: whether training in bfloat16 has any effect. Since the run began: on a sample that the run directory keeps, drawn over
the whole model, whatever holds it, so that it is the same on any devices and under any sharding. A relative distance of 65,536
weights is that of all weights to about 1 %.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Optional

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from fabric_llm.base.fabric import Fabric
from fabric_llm.base.files import write_atomically
from fabric_llm.base.ranks import from_rank_zero, sum_over_ranks
from fabric_llm.model.strategy import local_part, original_name, shard_group, shard_places, sum_over_shards

NEIGHBOURS = 8  # weights that are sampled side by side
SAMPLE = 2**16  # weights of the whole model
FILE = "base_sample.npy"  # float32 [weights], beside the run's log


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
        weights = local_part(parameter.detach()).flatten()
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
    changed, total, update, weights = sum_over_shards(numbers, group).tolist()
    return UpdateSize(changed / total, math.sqrt(update / weights) if weights else 0.0)


class Drift(NamedTuple):
    """The distance of a wrapped model from the base of its run."""

    fabric: Fabric
    sizes: dict[str, int]  # elements of each parameter of the model
    base: Tensor  # its `sample` before step 1

    def of(self, model: nn.Module) -> float:
        """L2 norm of what has changed, as a part of that of the base's weights. All ranks call it."""
        changed = sample(self.fabric, model, self.sizes) - self.base
        return (changed.double().norm() / self.base.double().norm()).item()


def sample(fabric: Fabric, model: nn.Module, sizes: dict[str, int]) -> Tensor:
    """Weights of a wrapped model, the same ones on any devices: float32 [SAMPLE] on the CPU. All ranks call it."""
    named = {original_name(name): parameter for name, parameter in model.module.named_parameters()}
    places = shard_places(list(named.values()), shard_group(model))
    begins = dict(zip(sizes, np.cumsum([0, *sizes.values()]).tolist()))
    drawn = np.random.Generator(np.random.Philox(0)).integers(0, sum(sizes.values()), SAMPLE)
    found = torch.zeros(2, SAMPLE, device=fabric.device)  # weights, and how many ranks hold each
    for (name, parameter), (offset, _) in zip(named.items(), places):
        local, first = local_part(parameter.detach()).flatten(), begins[name] + offset
        here = np.flatnonzero((drawn >= first) & (drawn < first + local.numel()))
        weights = local[torch.from_numpy(drawn[here] - first).to(local.device)]
        found[0, here] = weights.float().to(fabric.device)
        found[1, here] = 1
    weights, holders = sum_over_ranks(fabric, found)
    return (weights / holders).cpu()


def drift_of_run(
    fabric: Fabric, model: nn.Module, sizes: dict[str, int], directory: Path, resumed_from: Optional[Path]
) -> Optional[Drift]:
    """The distance from a run's base: the wrapped `model`, where the run starts, else from what the run has kept of it.

    sizes: elements of each parameter of the model. None where nothing was kept. All ranks call it.
    """
    if resumed_from is None:
        base = sample(fabric, model, sizes)
    else:
        base = from_rank_zero(lambda: _read([directory / FILE, resumed_from.parent / FILE]))
    if base is None:
        return None
    from_rank_zero(lambda: _write(directory / FILE, base))
    return Drift(fabric, sizes, base)


def _write(path: Path, base: Tensor) -> None:
    content = io.BytesIO()
    np.save(content, base.numpy(), allow_pickle=False)
    write_atomically(path, content.getvalue())


def _read(paths: list[Path]) -> Optional[Tensor]:
    for path in paths:
        with suppress(OSError, ValueError):
            base = torch.from_numpy(np.load(path, allow_pickle=False))
            if base.shape == (SAMPLE,) and base.dtype == torch.float32:
                return base
    return None
