"""The tensors of a wrapped model and its optimizer under the names that files have, and which part
a rank holds."""

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple, Optional

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fabric_llm.base.ranks import alone
from fabric_llm.model.sharded import (
    local_part,
    original_name,
    shard_group,
    shard_ranks,
    shards,
)
from fabric_llm.model.weights import PREFIX, saved


class Held(NamedTuple):
    """What this rank holds of a tensor."""

    tensor: Tensor  # of any shape
    # Index of its first element in the flattened whole; None where all ranks hold the whole. Of a
    # number, 0 on ranks whose value is valid.
    first: Optional[int]
    shape: tuple[int, ...]  # of the whole


class Part(NamedTuple):
    """What this rank writes of a tensor: a block of it that begins at `offsets`."""

    tensor: Tensor
    offsets: tuple[int, ...]


def own_parts(model: nn.Module, held: Mapping[str, Held]) -> list[tuple[str, Part]]:
    """What this rank writes of what all ranks hold, by name. They are views, which take no memory.

    model: wrapped. A shard that begins and ends within rows, such as FSDP1's, has several parts.
    """
    rank, ranks = 0, 1
    if not alone():
        rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    # With HSDP several groups of ranks hold the same shards. Only the group of rank 0 writes them.
    is_sharded, is_first_replica = shard_group(model) is not None, 0 in shard_ranks(model)
    parts: list[tuple[str, Part]] = []
    # Sorted, so that each tensor has the same number, and so the same writer, on all ranks.
    for number, (name, (tensor, first, shape)) in enumerate(sorted(held.items())):
        if is_sharded and first is not None:
            is_own = is_first_replica
        else:  # all ranks hold it alike, and each writes every n-th
            is_own = number % ranks == rank
        if not shape and first:
            is_own = False  # its value is valid on another rank
        if is_own:
            flat = local_part(tensor).detach().flatten()
            parts += [(name, block) for block in _blocks(flat, first or 0, shape)]
    return parts


def _blocks(flat: Tensor, first: int, shape: tuple[int, ...]) -> Iterator[Part]:
    """The elements from `first` on of a flattened tensor of that shape, as blocks of it: whole
    rows, and parts of the rows around."""
    if not flat.numel():
        return
    if len(shape) < 2:  # a number, or a single row
        yield Part(flat.view([-1] * len(shape)), (first,) * len(shape))
        return
    # A row that begins before, whole rows, and a row that ends behind. Rows are blocks of one
    # dimension less.
    inner, of_row = shape[1:], math.prod(shape[1:])
    row, inside = divmod(first, of_row)
    before = min(-first % of_row, len(flat))  # elements of a row that begins before
    for block in _blocks(flat[:before], inside, inner):
        yield Part(block.tensor[None], (row, *block.offsets))
    row, rows = row + (inside > 0), (len(flat) - before) // of_row
    whole, after = flat[before : before + rows * of_row], flat[before + rows * of_row :]
    if rows:
        yield Part(whole.view(rows, *inner), (row, *[0] * len(inner)))
    for block in _blocks(after, 0, inner):
        yield Part(block.tensor[None], (row + rows, *block.offsets))


def saved_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Name -> shape of what is saved: each tied parameter once, and buffers such as an expert
    router's correction."""
    return {name: tuple(tensor.shape) for name, tensor in saved(model).items()}


def weights_held(model: nn.Module, skeleton: PreTrainedModel) -> dict[str, Held]:
    """Name in files, behind PREFIX -> what this rank holds of it; each tied one once. All ranks
    call it.

    model: wrapped. skeleton: unwrapped, on the meta device.
    """
    tensors = {name: (shard.parameter, shard.first) for name, shard in shards(model).items()}
    tensors |= {original_name(name): (buffer, None) for name, buffer in model.named_buffers()}
    return {
        PREFIX + name: Held(*tensors[PREFIX + name], shape)
        for name, shape in saved_shapes(skeleton).items()
    }


def class_of(optimizer: torch.optim.Optimizer) -> str:
    """The name of an optimizer's class, without Fabric's wrapper."""
    return type(getattr(optimizer, "optimizer", optimizer)).__name__


def optimizer_held(
    model: nn.Module, skeleton: PreTrainedModel, optimizer: torch.optim.Optimizer
) -> dict[str, Held]:
    """`state.NAME.exp_avg` and the like -> what this rank holds of it, of an optimizer and of its
    average. All ranks call it.

    Learning rate, betas and the like come from the arguments of the run, not from a checkpoint.
    """
    optimizer = getattr(optimizer, "optimizer", optimizer)  # without Fabric's wrapper
    average = getattr(optimizer, "average", None)  # training/ema.py
    shapes, held = saved_shapes(skeleton), {}
    for name, shard in shards(model).items():
        state = dict(optimizer.state.get(shard.parameter, {}))
        if average is not None:
            state |= average.state.get(shard.parameter, {})
        for key, tensor in state.items():
            first: Optional[int] = shard.first
            shape = shapes[name.removeprefix(PREFIX)]
            if not tensor.ndim:
                shape = ()
                # A counter of steps stays 0 on a rank that holds nothing of the parameter.
                if not local_part(shard.parameter).numel():
                    first = 1
            # Such as a factored moment: FSDP doesn't say how that would be split.
            elif tensor.shape != shard.parameter.shape:
                if shard_group(model) is not None:
                    raise ValueError(
                        f"The optimizer's {key} of {name} hasn't its shape: take --strategy ddp."
                    )
                first, shape = None, tuple(tensor.shape)
            held[f"state.{name}.{key}"] = Held(tensor, first, shape)
    return held
