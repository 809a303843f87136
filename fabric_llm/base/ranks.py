"""What all ranks tell each other, small things of any kind. Without a process group there is one rank."""

from __future__ import annotations

from typing import Any

import torch


def alone() -> bool:
    """True where there is no process group."""
    return not torch.distributed.is_initialized()


def gather(value: Any) -> list[Any]:
    """`value` of every rank, by rank, on all ranks. All call it."""
    if alone():
        return [value]
    values = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values


def from_first(value: Any) -> Any:
    """Rank 0's `value`, on all ranks. All call it."""
    values = [value]
    if not alone():
        torch.distributed.broadcast_object_list(values, src=0)
    return values[0]
