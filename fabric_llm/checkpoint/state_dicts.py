"""The tensors of a wrapped model and its optimizer under the names that files have, and which part a rank holds."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, Replicate
from transformers import PreTrainedModel

PREFIX = "causal_lm."  # of parameter names in model.LanguageModel
EMA = "ema"  # the state of a parameter that is its moving average


def is_finite(tensor: Any) -> bool:
    """False if this rank's part of a tensor holds NaN or infinity: no checkpoint may."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if not isinstance(local, Tensor) or not local.numel():
        return True
    return bool(torch.isfinite(torch.stack(local.aminmax())).all())  # isfinite of it all makes copies of it all


def own_bytes(tensor: Any, rank: int) -> int:
    """Bytes of a tensor that this rank will write: its part of a DTensor, on rank 0 anything else."""
    if isinstance(tensor, DTensor):
        coordinate = tensor.device_mesh.get_coordinate()
        replica = any(isinstance(p, Replicate) and c for p, c in zip(tensor.placements, coordinate))
        local = tensor.to_local()
        return 0 if replica else local.numel() * local.element_size()
    return tensor.numel() * tensor.element_size() if rank == 0 and isinstance(tensor, Tensor) else 0


def tied_names(model: nn.Module) -> set[str]:
    """Second names of parameters that have two, such as lm_head.weight where it is the embedding."""
    once = {name for name, _ in model.named_parameters()}
    return {name for name, _ in model.named_parameters(remove_duplicate=False)} - once


def full_weights(model: nn.Module, skeleton: PreTrainedModel, offload: bool) -> dict[str, Tensor]:
    """HF name -> whole tensor, each tied one once, on rank 0 (on a CPU on all ranks: offload_to_cpu crashes there)."""
    with quiet():
        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=offload))
    again = tied_names(skeleton)
    return {hf: tensor for name, tensor in state.items() if (hf := name.removeprefix(PREFIX)) not in again}


def weight_parts(model: nn.Module, skeleton: PreTrainedModel) -> dict[str, Any]:
    """Parameter name -> this rank's part, as DTensor; each tied parameter once."""
    again = tied_names(skeleton)
    with quiet():
        tensors = get_model_state_dict(model)
    return {name: tensor for name, tensor in tensors.items() if name.removeprefix(PREFIX) not in again}


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
        on_host = any(p.is_cuda and not t.is_cuda for p, state in one.state.items() for t in _dimensional(state))
        tensors |= optimizer_tensors(model, one, offload=on_host)[1]
    return tensors


def _dimensional(state: dict[str, Any]) -> list[Tensor]:
    """What an optimizer keeps for each element of a parameter; its counter of steps is on the CPU everywhere."""
    return [value for value in state.values() if isinstance(value, Tensor) and value.ndim]


@contextmanager
def quiet() -> Iterator[None]:
    """Silence torch's warnings about what is intended here: one device has no process group, and NO_SHARD shards nothing."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        warnings.filterwarnings("ignore", message="When using ``NO_SHARD``")
        yield


def shapes(model: nn.Module) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name, shape) of every parameter."""
    return ((name, tuple(parameter.shape)) for name, parameter in model.named_parameters())


def saved_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Name -> shape of what is saved: each tied parameter once, and buffers such as an expert router's correction."""
    again = tied_names(model)
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if name not in again}
