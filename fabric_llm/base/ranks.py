"""Communication between all ranks. Without a process group there is one rank."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from types import SimpleNamespace
from typing import Any, Optional, TypeVar

import torch
from torch import Tensor

from fabric_llm.base.faults import Fault, as_mistake

T = TypeVar("T")
SECONDS_TO_WAIT = 1.0  # between questions whether all ranks are done

# The number of collectives that this rank has entered. Heartbeats report it: a rank that hangs has
# entered fewer than the ranks that wait for it.
waiting = SimpleNamespace(collectives=0)


def waits_for_others() -> None:
    """Called before each collective."""
    waiting.collectives += 1


def alone() -> bool:
    """True where there is no process group."""
    return not torch.distributed.is_initialized()


def gather(value: Any) -> list[Any]:
    """`value` of every rank, by rank, on all ranks. All ranks call it."""
    if alone():
        return [value]
    values = [None] * torch.distributed.get_world_size()
    waits_for_others()
    torch.distributed.all_gather_object(values, value)
    return values


def from_first(value: Any) -> Any:
    """Rank 0's `value`, on all ranks. All ranks call it."""
    if alone():
        return value
    # The list is overwritten with rank 0's on all other ranks.
    values = [value]
    waits_for_others()
    torch.distributed.broadcast_object_list(values, src=0)
    return values[0]


def first_fault(problem: Optional[Fault]) -> None:
    """Raise, on all ranks, the `problem` of the first rank that has one."""
    # All ranks raise the same fault, so none goes on to wait for one that has ended.
    for fault in gather(problem):
        if fault is not None:
            raise fault


def from_rank_zero(action: Callable[[], T]) -> T:
    """Call `action` on rank 0, and return its result on all ranks. If it raises, all ranks raise a
    Fault.

    A ValueError is a mistake of the user (2), any other exception becomes what `as_fault` makes of
    it.
    """
    # An exception on rank 0 alone would leave the others waiting for its value.
    value, problem = None, None
    if alone() or torch.distributed.get_rank() == 0:
        try:
            value = action()
        except Exception as error:
            problem = _problem_of(error)
    value, fault = from_first((value, problem))
    if fault is not None:
        # Rank 0 raises its own object, which has the cause; the others raise a copy.
        raise problem or fault
    return value


def together(action: Callable[[], T], mark: Callable[[], Any]) -> T:
    """What `action` returns on this rank, in a thread, however long it takes. All ranks call it,
    and ask each other until all are done, so that no collective times out; `mark` is called
    meanwhile.

    If any raises, all ranks raise a Fault, as `from_rank_zero` does, also those that aren't done:
    their actions go on until the process ends.
    """
    pool = ThreadPoolExecutor(1)
    future = pool.submit(action)
    pool.shutdown(wait=False)  # after this action
    while True:
        is_done = not wait([future], SECONDS_TO_WAIT).not_done
        problem = None
        if is_done:
            problem = _problem_of(future.exception())
        found = gather((is_done, problem))
        for _, fault in found:
            if fault is not None:
                raise problem or fault
        if all(done for done, _ in found):
            return future.result()
        mark()


def _problem_of(error: Optional[BaseException]) -> Optional[Fault]:
    """What an action has raised, as the Fault that all ranks raise; None where it raised
    nothing."""
    if error is None:
        return None
    problem = as_mistake(error)
    if problem is not error:
        problem.__cause__ = error  # for the traceback on this rank
    return problem


def sum_over_ranks(fabric: Any, tensor: Tensor) -> Tensor:
    """The sum of all ranks' tensors, on each rank; all have one shape and dtype. `tensor` may be
    overwritten with it.

    Fabric's all_reduce makes a barrier first, for which the host waits, also on GPUs.
    """
    waits_for_others()
    if alone():  # one process, or a TPU's
        return fabric.all_reduce(tensor, reduce_op="sum")
    torch.distributed.all_reduce(tensor)
    return tensor


def any_rank(fabric: Any, flag: bool) -> bool:
    """True on all ranks if `flag` is true on any. All ranks call it, and wait for each other."""
    return sum_over_ranks(fabric, torch.tensor(int(flag), device=fabric.device)).item() > 0
