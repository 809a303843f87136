"""The ranks of a run come together: started by starting.py, or by torchrun or srun. Rank 0 has locked the run directory."""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Optional

from fabric_llm.base import ranks
from fabric_llm.base.command_line import Flags
from fabric_llm.base.fabric import Fabric
from fabric_llm.base.failpoints import failpoint
from fabric_llm.base.faults import PEER_LOST, STOPPED, UNEXPECTED, Fault, as_fault
from fabric_llm.base.machine import cores
from fabric_llm.model.loading import has_weights
from fabric_llm.model.strategy import make_fabric
from fabric_llm.plan import resume, run_directory
from fabric_llm.plan.make_plan import make_plan
from fabric_llm.plan.placement import Placement, place
from fabric_llm.plan.plan import Plan
from fabric_llm.plan.starting import Started
from fabric_llm.plan.warnings import Facts, positions, warnings
from fabric_llm.processes.launch import Children, for_launcher, has_parent, kill_parent, port_in_use
from fabric_llm.processes.meeting import SECONDS_TO_HEAR, Meeting
from fabric_llm.processes.stop import StopSignal, interrupt

SECONDS_FOR_CHILDREN = 2.0  # to end by themselves
SECONDS_TO_NAME = 1.25  # who is lost, after a connection broke


@dataclass
class Joined:
    """This rank among the others, once all are there."""

    fabric: Fabric
    placement: Placement
    directory: Path  # of the run
    children: Children
    plan: Optional[Plan] = None  # once it is made


def join(flags: Flags, started: Started, signals: StopSignal) -> Joined:
    """Wait for all ranks. Raises Fault."""
    placement, children = started.placement, started.children
    if place(flags) != placement:  # torch is imported now
        raise Fault("PyTorch sees GPUs that /dev doesn't show: say --accelerator cuda to use them, or cpu.")
    fabric = make_fabric(
        placement.strategy,
        devices=placement.devices,
        num_nodes=placement.num_nodes,
        kind=placement.kind,
        precision=flags.model.precision,
        timeout_seconds=flags.devices.hang_timeout,
    )
    meeting = _meeting(flags, placement, children, signals)
    directory = _launch(fabric, flags, meeting, started.directory, started.problem)
    assert fabric.world_size == placement.world_size, (fabric.world_size, placement.world_size)
    return Joined(fabric, placement, directory, children)


def plan_together(joined: Joined, flags: Flags, signals: StopSignal) -> Plan:
    """The plan of the run, on all ranks. Rank 0 alone chooses the checkpoint. Raises Fault on all ranks alike."""
    signals.end_by(interrupt)  # the others watch this rank now
    resume_from = _chosen_by_rank_zero(flags, joined.directory)
    problem = None
    try:
        plan = make_plan(flags, joined.placement, joined.directory, resume_from)
    except ValueError as error:
        problem = error if isinstance(error, Fault) else Fault(str(error))
    ranks.first_fault(problem)
    joined.plan = plan
    if joined.fabric.global_rank == 0:
        for sentence in warnings_of(flags, plan):
            print(f"Warning: {sentence}", flush=True)
        run_directory.write_status(plan.run_directory, None, "running", plan.start.step, True)
    return plan


def _chosen_by_rank_zero(flags: Flags, directory: Path) -> Optional[Path]:
    """The checkpoint to resume from, on all ranks: other machines may see fewer of them, or not have compared hashes."""
    return ranks.from_rank_zero(lambda: resume.choose(flags, directory))


def warnings_of(flags: Flags, plan: Plan) -> list[str]:
    """Warnings, a sentence each: valid flags that are probably a mistake."""
    facts = Facts(
        **{name: getattr(plan.placement, name) for name in ("strategy", "kind", "devices", "num_nodes")},
        max_step=plan.schedule.max_step,
        cores=cores(),
        context_length=plan.data.dataset.context_length,
        positions=positions(plan.model.config.get_text_config()),
        start_step=plan.start.step,
        sequences=plan.schedule.global_batch_size if has_weights(plan.model.source) else None,
        epochs=plan.epochs(),
    )
    return warnings(flags, facts)


def _launch(
    fabric: Fabric, flags: Flags, meeting: Optional[Meeting], directory: Optional[Path], problem: Optional[Fault]
) -> Path:
    """`fabric.launch()`. Returns rank 0's run directory, or raises its problem, on all ranks."""
    if meeting is not None:
        meeting.begin(directory)
    try:
        failpoint("joining")
        fabric.launch()
        failpoint("joined")
        directory, problem = fabric.broadcast((directory, problem))
        if problem is not None:
            raise problem
        _require_one_command(ranks.gather(flags.flat()))  # nobody leaves before all are there
        return directory
    except RuntimeError as error:
        if "EADDRINUSE" in str(error):
            raise port_in_use() from error
        fault = as_fault(error)
        if fault.code == UNEXPECTED:
            raise
        if meeting is not None:  # it may know which
            time.sleep(SECONDS_TO_NAME)
            meeting.close()
        raise Fault(f"another rank was lost before training began: {fault}", fault.code) from error
    finally:
        if meeting is not None:
            meeting.close()


def _require_one_command(flags: list[dict[str, Any]]) -> None:
    """Raises Fault unless all ranks have the same: two jobs at one address would train in each other's runs."""
    for rank, own in enumerate(flags):
        for name, value in flags[0].items():
            if own[name] != value:
                ours, others = (f"--{name} {json.dumps(v, default=str)}" for v in (own[name], value))
                raise Fault(f"rank {rank} was started with {ours}, rank 0 with {others}: start all with one command.")


def _meeting(flags: Flags, placement: Placement, children: Children, signals: StopSignal) -> Optional[Meeting]:
    """Of the ranks that are to join, None where there is only one. It hears the signals from here on."""
    node = int(os.environ.get("NODE_RANK", "0"))
    if placement.world_size == 1 or flags.devices.tpu:
        return None
    rank = int(os.environ["RANK"])

    def lost(fault: Fault) -> NoReturn:
        """In the meeting's thread, as the main thread waits in the process group."""
        try:
            if rank == 0 or fault.code != STOPPED:
                print(f"train.py: {f'rank {rank}' if rank else 'error'}: {fault}", file=sys.stderr, flush=True)
            said_by_rank_0 = meeting.has_ended(0)
            if rank == 0:
                run_directory.leave(fault)
            elif not said_by_rank_0:
                _leave_for_rank_0(fault, meeting, flags)
            meeting.leave(fault)
            children.end(SECONDS_FOR_CHILDREN)
            if rank != 0 and not (said_by_rank_0 and node == 0) and fault.code != STOPPED:
                kill_parent(0 if node == 0 else SECONDS_TO_HEAR + SECONDS_FOR_CHILDREN)
        finally:
            code = fault.code if fault.code == STOPPED or (rank == 0 and children.processes) else PEER_LOST
            os._exit(for_launcher(code))

    meeting = Meeting(rank, placement.world_size, flags.devices.join_timeout, lost, children, signals.is_asked)
    signals.end_by(None)
    return meeting


def _leave_for_rank_0(fault: Fault, meeting: Meeting, flags: Flags) -> None:
    """STATUS.json in place of rank 0, which is lost or frozen: where its run is, or would be if it never came."""
    with suppress(ValueError, OSError):
        directory = Path(meeting.directory() or resume.directory(flags))
        if 0 not in meeting.heard and not has_parent():  # so it holds no lock, or another run does
            run_directory.lock(directory)
        if directory.is_dir():
            run_directory.write_status(directory, fault.code, str(fault), None, fault.retryable)
