"""A run among its ranks: they join, plan, train and end. Whatever ends a rank becomes one sentence for the user, an exit code,
and STATUS.json. processes/watch.py says which rank failed first; here it is told.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, Optional

import torch

from fabric_llm.base import ranks
from fabric_llm.base.command_line import Flags, is_rank_zero
from fabric_llm.base.fabric import SLURMEnvironment
from fabric_llm.base.failpoints import failpoint
from fabric_llm.base.faults import (
    DONE,
    OUT_OF_MEMORY,
    PEER_LOST,
    STOPPED,
    UNEXPECTED,
    Fault,
    as_fault,
    as_mistake,
    tell_torchrun,
)
from fabric_llm.model.strategy import make_fabric
from fabric_llm.plan import resume, run_directory
from fabric_llm.plan.make_plan import make_plan
from fabric_llm.plan.placement import place
from fabric_llm.plan.plan import Plan
from fabric_llm.plan.start import ThisRank
from fabric_llm.plan.warnings import warnings_of
from fabric_llm.processes.launch import (
    SECONDS_TO_END,
    Children,
    for_launcher,
    has_parent,
    kill_parent,
    port_in_use,
    started_by_other,
)
from fabric_llm.processes.stop import StopSignal, interrupt
from fabric_llm.processes.watch import Watch
from fabric_llm.run.metrics import peak_memory_gib

SECONDS_FOR_OTHERS = 5.0  # to read why rank 0, which holds the store, goes; and for children to end by themselves
SECONDS_FOR_RANK_0 = SECONDS_TO_END + SECONDS_FOR_OTHERS  # its main thread may need all of the first
SECONDS_FOR_CHILDREN = 60.0  # to end after a run that went well


def supervise(this: ThisRank, flags: Flags, signals: StopSignal, body: Callable[[], bool]) -> None:
    """Join the other ranks, plan, and run `body()`, which returns whether the run was asked to stop. All ranks call it.

    Raises SystemExit with the code of the table in docs/faults.md, unless the run is done, or has stopped under a
    torchrun that would start it again. The rank that failed first ends with its own code, and so does the process that
    started it, the others with 71. Rank 0 prints the first fault and writes it to STATUS.json.
    """

    def stuck(fault: Fault) -> NoReturn:
        """In the watching thread: the main thread won't come back."""
        code = PEER_LOST
        try:
            code = _end(this, flags, fault, is_stuck=True)
        finally:
            os._exit(for_launcher(code))

    if place(flags) != this.placement:  # torch is imported now
        raise Fault("PyTorch sees GPUs that /dev doesn't show: say --accelerator cuda to use them, or cpu.")
    this.fabric = make_fabric(
        this.placement.strategy,
        devices=this.placement.devices,
        num_nodes=this.placement.num_nodes,
        kind=this.placement.kind,
        precision=flags.model.precision,
        timeout_seconds=flags.devices.hang_timeout,
    )
    is_alone = this.placement.world_size == 1 or flags.devices.tpu  # ranks of a TPU have no store
    this.rank = 0 if is_alone else int(os.environ["RANK"])
    world_size = 1 if is_alone else this.placement.world_size
    this.watch = Watch(this.rank, world_size, stuck, this.children, signals.is_asked)
    try:
        _join(this, flags, signals)
        failpoint("assembled")
        this.plan = _plan_together(this, flags)
        stopped = body()
    except BaseException as error:
        this.watch.claim_end()
        fault = _with_advice(as_fault(error), this)
        if fault.code == UNEXPECTED:
            traceback.print_exc()
        if fault.code != PEER_LOST:  # before the others hear of it: torchrun names whoever failed first
            tell_torchrun(f"{traceback.format_exc()}{fault}" if fault.code == UNEXPECTED else str(fault))
        code = _end(this, flags, fault)
    else:
        code = STOPPED if stopped else DONE
        if this.rank == 0:
            reason = "stopped on request" if stopped else "done"
            run_directory.write_status(this.directory, code, reason, this.watch.step, stopped)
        this.children.end(SECONDS_FOR_CHILDREN)
        if stopped:
            tell_torchrun("stopped on request")
    this.watch.store.close()  # its thread would go on in a process that does
    if this.directory is not None:
        run_directory.unlock(this.directory)
    if code != DONE:
        raise SystemExit(for_launcher(code)) from None


# ------------------------------------------------------------------------------- before the first step


def _join(this: ThisRank, flags: Flags, signals: StopSignal) -> None:
    """Wait for all ranks. `this.directory` is rank 0's from then on. Raises Fault, rank 0's problem on all ranks."""
    fabric, watch = this.fabric, this.watch
    adopt_slurm_host()
    if watch.world_size > 1:
        signals.end_by(None)  # the watch hears them
        watch.join(flags.devices.join_timeout, this.directory)
    try:
        failpoint("joining")
        fabric.launch()
        failpoint("joined")
        this.rank = fabric.global_rank
        this.directory, problem = fabric.broadcast((this.directory, this.problem))
        if problem is not None:
            raise problem
        _require_one_command(ranks.gather(flags.flat()))  # nobody leaves before all are there
    except ValueError as error:
        raise as_mistake(error) from None
    except RuntimeError as error:
        if "EADDRINUSE" in str(error):
            raise port_in_use() from error
        fault = as_fault(error)
        if fault.code == UNEXPECTED:
            raise
        raise Fault(f"another rank was lost before training began: {fault}", fault.code) from error
    assert fabric.world_size == this.placement.world_size, (fabric.world_size, this.placement.world_size)
    watch.begin(flags.devices.hang_timeout)
    signals.end_by(interrupt)  # the others hear of it when this rank ends


def adopt_slurm_host() -> None:
    """In a task of srun: set where the ranks meet. Lightning knows how SLURM writes the names of hosts."""
    if "SLURM_STEP_NODELIST" in os.environ and started_by_other() and "MASTER_ADDR" not in os.environ:
        hosts = os.environ["SLURM_STEP_NODELIST"]
        os.environ["MASTER_ADDR"] = SLURMEnvironment.resolve_root_node_address(hosts)


def _require_one_command(flags: list[dict[str, Any]]) -> None:
    """Raises Fault unless all ranks have the same: two jobs at one address would train in each other's runs."""
    for rank, own in enumerate(flags):
        for name, value in flags[0].items():
            if own[name] != value:
                ours, others = (f"--{name} {json.dumps(v, default=str)}" for v in (own[name], value))
                raise Fault(f"rank {rank} was started with {ours}, rank 0 with {others}: start all with one command.")


def _plan_together(this: ThisRank, flags: Flags) -> Plan:
    """The plan of the run, on all ranks. Rank 0 alone chooses the checkpoint. Raises Fault on all ranks alike."""
    resume_from = _chosen_by_rank_zero(flags, this.directory)
    problem = None
    try:
        plan = make_plan(flags, this.placement, this.directory, resume_from)
    except ValueError as error:
        problem = as_mistake(error)
    ranks.first_fault(problem)
    if this.rank == 0:
        for sentence in warnings_of(flags, plan):
            print(f"Warning: {sentence}", flush=True)
        run_directory.write_status(plan.run_directory, None, "running", plan.start.step, True)
    return plan


def _chosen_by_rank_zero(flags: Flags, directory: Path) -> Optional[Path]:
    """The checkpoint to resume from, on all ranks: other machines may see fewer of them, or not have compared hashes."""
    return ranks.from_rank_zero(lambda: resume.choose(flags, directory))


# ------------------------------------------------------------------------------- the end


def _end(this: ThisRank, flags: Flags, fault: Fault, is_stuck: bool = False) -> int:
    """Tell the others and the user why this rank ends. Returns its exit code.

    fault: this rank's own. is_stuck: the watching thread ends it, for a fault that it has seen or heard of.
    """
    first_rank, first = this.watch.report(fault)
    if is_stuck:
        fault = first
    is_own = first_rank == this.rank or str(first) == str(fault)
    if not is_own and first.code != PEER_LOST:
        first = Fault(f"rank {first_rank}: {first}", first.code, first.retryable)
    _tell(this.rank, first, fault)
    if this.rank == 0:
        _write(this, first)
        this.watch.wait_for_others(SECONDS_FOR_OTHERS)
    elif this.watch.store.is_lost or first.code == PEER_LOST and not this.watch.wait_for(0, SECONDS_FOR_RANK_0):
        _write_for_rank_0(this, flags, first)
        if first.code != STOPPED:
            kill_parent()
    this.children.end(SECONDS_FOR_OTHERS)
    return fault.code if is_own and not is_stuck else _code_of_others(first, this.children)


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


def _code_of_others(first: Fault, children: Children) -> int:
    """Exit code of ranks that didn't fail first. The process that started the others ends with the code of the run."""
    return first.code if first.code == STOPPED or children.processes else PEER_LOST


def _write(this: ThisRank, fault: Fault) -> None:
    """STATUS.json; where there is no plan yet, nothing was done in the run directory."""
    if this.plan is None:  # flags, data and model are looked at once all have joined
        run_directory.leave(fault, has_plan=this.watch.is_joining)
    else:
        run_directory.write_status(this.directory, fault.code, str(fault), this.watch.step, fault.retryable)


def _write_for_rank_0(this: ThisRank, flags: Flags, first: Fault) -> None:
    """STATUS.json in place of rank 0, which is lost, frozen or never came, unless it has said why this run ends."""
    of_rank_0 = this.watch.store.heard[0].beat if 0 in this.watch.store.heard else {}
    with suppress(ValueError, OSError):
        directory = Path(this.directory or of_rank_0.get("directory") or resume.directory(flags))
        if not of_rank_0 and not has_parent():  # rank 0 holds no lock, or that of another run
            run_directory.lock(directory)
        said = run_directory.read_status(directory)
        if directory.is_dir() and (said.get("code") is None or said.get("pid") != of_rank_0.get("pid")):
            run_directory.write_status(directory, first.code, str(first), this.watch.step, first.retryable)


def _with_advice(fault: Fault, this: ThisRank) -> Fault:
    """Out of memory: the peak, what the run holds, and what to change."""
    plan, watch, device = this.plan, this.watch, this.fabric.device
    if fault.code != OUT_OF_MEMORY or plan is None:
        return fault
    where = f"rank {this.rank}, step {watch.step + 1}, {watch.doing}"
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
