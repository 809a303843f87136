"""How a run ends: whatever happens becomes one sentence for the user, an exit code, and STATUS.json."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

import torch

from fabric_llm.base.command_line import is_rank_zero
from fabric_llm.base.failpoints import failpoint
from fabric_llm.base.faults import DONE, OUT_OF_MEMORY, PEER_LOST, STOPPED, UNEXPECTED, Fault, as_fault, tell_torchrun
from fabric_llm.plan import run_directory
from fabric_llm.plan.joining import Joined
from fabric_llm.processes.launch import Children, for_launcher, kill_parent
from fabric_llm.processes.watch import SECONDS_TO_END, Watch
from fabric_llm.run.metrics import peak_memory_gib

SECONDS_FOR_OTHERS = 5.0  # to read why rank 0, which holds the store, goes


def supervise(joined: Joined, hang_timeout: float, body: Callable[[Watch], bool]) -> None:
    """Run `body(watch)`, which returns whether the run was asked to stop. All ranks call it.

    Raises SystemExit with the code of the table in docs/faults.md, unless the run is done, or has stopped under a
    torchrun that would start it again. The rank that failed first ends with its own code, and so does the process that
    started it, the others with 71. Rank 0 prints the first fault and writes it to STATUS.json.
    """
    rank, children = joined.fabric.global_rank, joined.children

    def stuck(first: Fault) -> NoReturn:
        """In the watching thread: the main thread won't come back."""
        try:
            _tell(rank, first, first)
            if rank == 0:
                _write(joined, watch, first)
                watch.wait_for_others(SECONDS_FOR_OTHERS)
            elif not watch.wait_for(0, SECONDS_TO_END + SECONDS_FOR_OTHERS):  # its main thread may need all of them
                _tell_for_rank_0(joined, watch, first)
                kill_parent()
            children.end(SECONDS_FOR_OTHERS)
        finally:
            os._exit(for_launcher(_code_of_others(first, children)))

    failpoint("assembled")
    watch = Watch(rank, joined.fabric.world_size, hang_timeout, stuck, children.dead)
    try:
        stopped = body(watch)
    except BaseException as error:
        code = _end(joined, watch, error)
    else:
        code = STOPPED if stopped else DONE
        if rank == 0:
            reason = "stopped on request" if stopped else "done"
            run_directory.write_status(joined.directory, code, reason, watch.step, stopped)
        children.end(60)
        if stopped:
            tell_torchrun("stopped on request")
    run_directory.unlock(joined.directory)
    if code != DONE:
        raise SystemExit(for_launcher(code)) from None


def _end(joined: Joined, watch: Watch, error: BaseException) -> int:
    """Tell the others and the user why this rank ends. Returns its exit code."""
    rank, children = joined.fabric.global_rank, joined.children
    fault = _with_advice(as_fault(error), joined, watch)
    if fault.code == UNEXPECTED:
        traceback.print_exc()
    if fault.code != PEER_LOST:  # before the others hear of it: torchrun names whoever failed first
        tell_torchrun(_with_stack(fault))
    first_rank, first = watch.report(fault)
    own = first_rank == rank or str(first) == str(fault)
    if not own and first.code != PEER_LOST:
        first = Fault(f"rank {first_rank}: {first}", first.code, first.retryable)
    _tell(rank, first, fault)
    if rank == 0:
        _write(joined, watch, first)
        watch.wait_for_others(SECONDS_FOR_OTHERS)
    elif watch.store.is_frozen:  # and rank 0 with it
        _tell_for_rank_0(joined, watch, first)
        kill_parent()
    elif first.code == PEER_LOST and not watch.wait_for(0, SECONDS_FOR_OTHERS):
        _tell_for_rank_0(joined, watch, first)
    children.end(SECONDS_FOR_OTHERS)
    return fault.code if own else _code_of_others(first, children)


def _tell(rank: int, first: Fault, own: Fault) -> None:
    """One sentence: from rank 0, and from a rank whose own error nobody else has seen; to torchrun from each."""
    if own is first or own.code == PEER_LOST:
        tell_torchrun(str(first), is_consequence=True)
    if first.code == DONE:
        if is_rank_zero():
            print(first, flush=True)
    elif rank == 0:
        print(f"train.py: error: {first}", file=sys.stderr, flush=True)
    elif own.code in (UNEXPECTED, OUT_OF_MEMORY) or first.code == PEER_LOST:
        print(f"train.py: rank {rank}: {first if own.code == PEER_LOST else own}", file=sys.stderr, flush=True)


def _with_stack(fault: Fault) -> str:
    return f"{traceback.format_exc()}{fault}" if fault.code == UNEXPECTED else str(fault)


def _code_of_others(first: Fault, children: Children) -> int:
    """Exit code of ranks that didn't fail first. The process that started the others ends with the code of the run."""
    return first.code if first.code == STOPPED or children.processes else PEER_LOST


def _write(joined: Joined, watch: Watch, fault: Fault) -> None:
    """STATUS.json; where there is no plan yet, nothing was done in the run directory."""
    if joined.plan is None and fault.code != PEER_LOST:
        run_directory.leave(fault, has_plan=False)
    else:
        run_directory.write_status(joined.directory, fault.code, str(fault), watch.step, fault.retryable)


def _tell_for_rank_0(joined: Joined, watch: Watch, first: Fault) -> None:
    """STATUS.json in place of rank 0, which is lost or frozen, unless it has said why the run ends."""
    if run_directory.read_status(joined.directory).get("code") is None:
        run_directory.write_status(joined.directory, first.code, str(first), watch.step, first.retryable)


def _with_advice(fault: Fault, joined: Joined, watch: Watch) -> Fault:
    """Out of memory: the peak, what the run holds, and what to change."""
    plan, device = joined.plan, joined.fabric.device
    if fault.code != OUT_OF_MEMORY or plan is None:
        return fault
    where = f"rank {watch.rank}, step {watch.step + 1}, {watch.doing}"
    total = ""
    if device.type == "cuda":
        total = f" of {torch.cuda.get_device_properties(device).total_memory / 2**30:.1f} GiB"
    return Fault(
        f"out of memory ({where}): peak {peak_memory_gib(device):.1f} GiB{total}; a micro-batch is "
        f"{plan.schedule.micro_batch_size} x {plan.data.dataset.context_length} tokens, the model {plan.placement.strategy} over "
        f"{plan.placement.world_size} devices. Smaller: --micro_batch_size (with the same --global_batch_size), "
        f"--activation_checkpointing true, more --devices, --cpu_offload true. {str(fault)[:200].rstrip('.')}.",
        OUT_OF_MEMORY,
    )
