"""How far the weights have gone from where a run began, measured on a sample of them that the run directory keeps.

The sample is drawn over the whole model, whatever holds it: the same weights on any devices and under any sharding. A relative
distance of 65,536 of them is that of all weights to about 1 %.
"""

from __future__ import annotations

import io
from contextlib import suppress
from pathlib import Path
from typing import Optional

import numpy as np
import torch
from torch import Tensor, nn

from fabric_llm.base.fabric import Fabric
from fabric_llm.base.files import write_atomically
from fabric_llm.base.ranks import from_rank_zero, sum_over_ranks
from fabric_llm.model import strategy
from fabric_llm.training.gradients import _local
from fabric_llm.training.optim import shard_offsets

SAMPLE = 2**16  # weights
FILE = "base_sample.npy"  # float32 [weights], beside the run's log


class Drift:
    """The distance of a wrapped model from the base of its run."""

    def __init__(self, fabric: Fabric, sizes: dict[str, int], base: Tensor) -> None:
        """sizes: elements of each parameter of the model. base: its `sample` before step 1."""
        self.fabric, self.sizes, self.base = fabric, sizes, base

    def of(self, model: nn.Module) -> float:
        """L2 norm of what has changed, as a part of that of the base's weights. All ranks call it."""
        changed = sample(self.fabric, model, self.sizes) - self.base
        return (changed.double().norm() / self.base.double().norm()).item()


def sample(fabric: Fabric, model: nn.Module, sizes: dict[str, int]) -> Tensor:
    """Weights of a wrapped model, the same ones on any devices: float32 [SAMPLE] on the CPU. All ranks call it."""
    named = {strategy.original_name(name): parameter for name, parameter in model.module.named_parameters()}
    offsets = shard_offsets(list(named.values()), strategy.shard_group(model))
    begins = dict(zip(sizes, np.cumsum([0, *sizes.values()]).tolist()))
    drawn = np.random.Generator(np.random.Philox(0)).integers(0, sum(sizes.values()), SAMPLE)
    found = torch.zeros(2, SAMPLE, device=fabric.device)  # weights, and how many ranks hold each
    for (name, parameter), offset in zip(named.items(), offsets):
        local, first = _local(parameter.detach()).flatten(), begins[name] + offset
        places = np.flatnonzero((drawn >= first) & (drawn < first + local.numel()))
        places, weights = torch.from_numpy(places).to(local.device), torch.from_numpy(drawn[places] - first)
        found[0, places] = local[weights.to(local.device)].float().to(fabric.device)
        found[1, places] = 1
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
