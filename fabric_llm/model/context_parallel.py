"""--context_parallel: ranks side by side share rows, each with a part of the positions.

For each attention the ranks exchange parts, after which each rank has all positions of a part of
the heads. After the attention they exchange them back: DeepSpeed-Ulysses,
https://arxiv.org/abs/2309.14509.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed._functional_collectives import all_to_all_single, wait_tensor
from transformers.integrations.sdpa_attention import repeat_kv


def context_group(ranks: int) -> ProcessGroup:
    """The group of `ranks` consecutive ranks that this one shares its rows with. All ranks call
    it."""
    # The groups are of consecutive ranks, as `Placement.rows_of` counts them.
    return torch.distributed.new_subgroups(group_size=ranks)[0]


def share_rows(
    attention: Callable[..., Tensor], group: ProcessGroup, query: Tensor, key: Tensor, value: Tensor
) -> Tensor:
    """`attention(query, key, value)`, called with all positions of a part of the heads, while this
    rank has a part of the positions of all heads.

    query, key, value: [rows, heads, this rank's positions, head size]. Returns [rows, this rank's
    positions, heads, head size].
    """
    # Heads of keys and values that can't be divided among the ranks are copied for each query head.
    if key.shape[1] % group.size():
        key, value = (repeat_kv(tensor, query.shape[1] // key.shape[1]) for tensor in (key, value))
    whole = (_Exchange.apply(tensor, group) for tensor in (query, key, value))
    # The output has positions before heads, so the same exchange gives each rank its positions
    # back, with all heads.
    return _Exchange.apply(attention(*whole), group)


class _Exchange(torch.autograd.Function):
    """Exchange dimension 1, of which this rank keeps a part, for all of dimension 2. tensor:
    [rows, heads, positions, head size], or with heads and positions swapped, for the way back."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _exchange(tensor, group, 1, 2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        # The gradient goes the way back: what was joined is given away.
        return _exchange(gradient, ctx.group, 2, 1), None


def _exchange(tensor: Tensor, group: ProcessGroup, given: int, joined: int) -> Tensor:
    """Each rank sends every other rank a part of the dimension `given`, and concatenates the parts
    that it receives along the dimension `joined`.

    A functional collective: unlike others it can be compiled, and a checkpointed layer must be
    compiled as a whole.
    """
    # One part for each rank, along the first dimension, which all_to_all_single divides evenly.
    parts = torch.stack(tensor.chunk(group.size(), dim=given))
    received = wait_tensor(all_to_all_single(parts.flatten(0, 1), None, None, group)).view(
        parts.shape
    )
    # Received parts are in the order of ranks, which is that of their positions or heads.
    return torch.cat(received.unbind(), dim=joined)


class Summed(torch.autograd.Function):
    """The sum over the ranks of a group. Gradients are summed as well, since each rank's loss
    depends on the part of every rank."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup) -> Tensor:
        # all_reduce works in place, and autograd may still need the tensor that it was given.
        ctx.group, total = group, tensor.clone()
        torch.distributed.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return Summed.forward(ctx, gradient, ctx.group), None
