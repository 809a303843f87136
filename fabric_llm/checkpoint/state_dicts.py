"""The tensors of a wrapped model and its optimizer under the names that files have, and which part a rank holds."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel

from fabric_llm.base.ranks import alone
from fabric_llm.model.strategy import PREFIX, local_part
from fabric_llm.model.weights import saved

EMA = "ema"  # the state of a parameter that is its moving average
# What torch warns of here is intended: one device has no process group, and NO_SHARD shards nothing.
for words in ("torch.distributed is disabled, unavailable or uninitialized", "When using ``NO_SHARD``"):
    warnings.filterwarnings("ignore", message=words)


def is_finite(tensor: Tensor) -> bool:
    """False if this rank's part of a tensor holds NaN or infinity: no checkpoint may."""
    local = local_part(tensor)
    if not local.numel():
        return True
    return bool(torch.isfinite(torch.stack(local.aminmax())).all())  # isfinite of it all makes copies of it all


class Part(NamedTuple):
    """What this rank writes of a tensor: a block of it that begins at `offsets`."""

    tensor: Tensor
    offsets: tuple[int, ...]


def own_parts(tensors: dict[str, Any]) -> dict[str, Part]:
    """What this rank writes of all ranks' tensors: its part of each DTensor, and of those that all hold alike every n-th."""
    rank, ranks = (0, 1) if alone() else (torch.distributed.get_rank(), torch.distributed.get_world_size())
    found = {}
    for number, (name, tensor) in enumerate(sorted(tensors.items())):
        offsets = (0,) * tensor.ndim
        if isinstance(tensor, DTensor):
            _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
            coordinate = tensor.device_mesh.get_coordinate()
            own = not any(isinstance(p, Replicate) and c for p, c in zip(tensor.placements, coordinate))
            tensor = tensor.to_local()
        else:
            own = number % ranks == rank
        if own and tensor.numel():
            found[name] = Part(tensor.detach(), tuple(offsets))
    return found


def tied_names(model: nn.Module) -> set[str]:
    """Second names of parameters that have two, such as lm_head.weight where it is the embedding."""
    once = {name for name, _ in model.named_parameters()}
    return {name for name, _ in model.named_parameters(remove_duplicate=False)} - once


def saved_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Name -> shape of what is saved: each tied parameter once, and buffers such as an expert router's correction."""
    return {name: tuple(tensor.shape) for name, tensor in saved(model).items()}


def model_tensors(model: nn.Module, skeleton: PreTrainedModel) -> dict[str, Any]:
    """Name in files, behind PREFIX -> this rank's part as DTensor; each tied one once."""
    tensors = get_model_state_dict(model)
    return {PREFIX + name: tensors[PREFIX + name] for name in saved(skeleton)}


def optimizer_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer, offload: bool = False
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The optimizer's flat state dict, and its tensors: `state.NAME.exp_avg` and the like. offload: they come to the CPU.

    What isn't a tensor (learning rate, betas) comes from the arguments of the run, not from a checkpoint.
    """
    optimizer = getattr(optimizer, "optimizer", optimizer)  # without Fabric's wrapper
    options = StateDictOptions(flatten_optimizer_state_dict=True, cpu_offload=offload)
    flat = get_optimizer_state_dict(model, optimizer, options=options)
    return flat, {key: value for key, value in flat.items() if key.startswith("state.")}


def with_average(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """An optimizer without Fabric's wrapper, and the moving average of the weights beside it, if there is one."""
    optimizer = getattr(optimizer, "optimizer", optimizer)
    average = getattr(optimizer, "average", None)  # training/ema.py
    return [optimizer] if average is None else [optimizer, average]


def optimizer_parts(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """`optimizer_tensors` of an optimizer and of its average. What is kept on the host for a GPU doesn't fill its memory."""
    tensors: dict[str, Any] = {}
    for one in with_average(optimizer):
        # The counter of steps, which has no dimensions, is on the CPU everywhere.
        kept = ((p, t) for p, state in one.state.items() for t in state.values() if isinstance(t, Tensor) and t.ndim)
        on_host = any(p.is_cuda and not t.is_cuda for p, t in kept)
        tensors |= optimizer_tensors(model, one, offload=on_host)[1]
    return tensors
