"""Small objects from rank to rank, and faults that all ranks raise together. Without a process group there is one rank.

Every function is a collective: all ranks call it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Optional, TypeVar

import torch

from fabric_llm.base.faults import Fault, as_fault

T = TypeVar("T")


def alone() -> bool:
    """True where there is no process group."""
    return not torch.distributed.is_initialized()


def gather(value: Any) -> list[Any]:
    """`value` of every rank, in the order of ranks."""
    if alone():
        return [value]
    values = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values


def from_first(value: Any) -> Any:
    """Rank 0's `value`."""
    values = [value]
    if not alone():
        torch.distributed.broadcast_object_list(values, src=0)
    return values[0]


def first_fault(problem: Optional[Fault]) -> None:
    """Raise, on all ranks, the `problem` of the first rank that has one."""
    for found in gather(problem):
        if found is not None:
            raise found


def from_rank_zero(action: Callable[[], T]) -> T:
    """What `action`, called on rank 0, returns. Raises, on all ranks, a Fault where it raises.

    A ValueError is a mistake in the input (2), any other exception what `as_fault` makes of it.
    """
    value, problem = None, None
    if alone() or torch.distributed.get_rank() == 0:
        try:
            value = action()
        except Exception as error:
            is_plain = isinstance(error, ValueError) and not isinstance(error, Fault)
            problem = Fault(str(error)) if is_plain else as_fault(error)
            if problem is not error:
                problem.__cause__ = error  # for the traceback, on rank 0 alone
    value, fault = from_first((value, problem))
    if fault is not None:
        raise problem or fault
    return value
