"""--context_parallel: ranks side by side share rows, each with a part of the positions.

In each attention they exchange positions for heads, of which each then has a part and all
positions, and exchange them back: DeepSpeed-Ulysses, https://arxiv.org/abs/2309.14509.
"""

from collections.abc import Callable
from typing import Any, Optional

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed._functional_collectives import all_to_all_single, wait_tensor
from transformers.integrations.sdpa_attention import repeat_kv


def context_group(ranks: int) -> ProcessGroup:
    """The ranks side by side that share the rows of this one, so many. All ranks call it."""
    # The groups are of consecutive ranks, as `Placement.rows_of` counts them.
    return torch.distributed.new_subgroups(group_size=ranks)[0]


def share_rows(
    attention: Callable[..., Tensor], group: ProcessGroup, query: Tensor, key: Tensor, value: Tensor
) -> Tensor:
    """`attention(query, key, value)` of ranks that have a part of each row's positions: [rows,
    context, heads, head size].

    They exchange positions for heads, of which each then has a part and all positions, and exchange
    them back: DeepSpeed-Ulysses, https://arxiv.org/abs/2309.14509.
    """
    # Heads of keys and values that can't be divided among the ranks are copied for each query head.
    if key.shape[1] % group.size():
        key, value = (repeat_kv(tensor, query.shape[1] // key.shape[1]) for tensor in (key, value))
    whole = (_positions_for_heads(tensor, group) for tensor in (query, key, value))
    # The output has positions before heads, so the same exchange gives each rank its positions
    # back, with all heads.
    return _positions_for_heads(attention(*whole), group)


def _positions_for_heads(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """Or heads for positions. tensor: [rows, what is given away, what is joined, head size]."""
    return _Exchange.apply(tensor, group, 1, 2)


class _Exchange(torch.autograd.Function):
    """Each rank gives every other one its part of a dimension, and lays the parts that it is given
    one behind the other in another."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup, given: int, joined: int) -> Tensor:
        # The gradient goes the way back: what was joined is given away.
        ctx.how = group, joined, given
        return _exchange(tensor, group, given, joined)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Optional[Tensor], ...]:
        return _exchange(gradient, *ctx.how), None, None, None


def _exchange(tensor: Tensor, group: ProcessGroup, given: int, joined: int) -> Tensor:
    """By a functional collective, which can be a part of a compiled graph, as a checkpointed layer
    must be as a whole."""
    # One part for each rank, along the first dimension, which all_to_all_single divides evenly.
    parts = torch.stack(tensor.chunk(group.size(), dim=given))
    received = wait_tensor(all_to_all_single(parts.flatten(0, 1), None, None, group)).view(
        parts.shape
    )
    # Received parts are in the order of ranks, which is that of their positions or heads.
    return torch.cat(received.unbind(), dim=joined)


class Summed(torch.autograd.Function):
    """The sum over the ranks of a group. Each rank's loss depends on every rank's part, so
    gradients are summed as well."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup) -> Tensor:
        # all_reduce works in place, and autograd may still need the tensor that it was given.
        ctx.group, total = group, tensor.clone()
        torch.distributed.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return Summed.forward(ctx, gradient, ctx.group), None
