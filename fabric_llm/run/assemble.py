"""All ranks of a run with the same plan: those that torchrun or SLURM started, or that this process starts."""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, Optional

from lightning.fabric import Fabric

from arguments import Arguments, fail, is_rank_zero
from fabric_llm.base.failpoints import failpoint
from fabric_llm.base.faults import DONE, PEER_LOST, UNEXPECTED, Fault, as_fault
from fabric_llm.base.ranks import gather
from fabric_llm.model.strategy import make_fabric
from fabric_llm.processes.launch import Children, for_launcher, kill_parent, start_ranks, started_by_other
from fabric_llm.processes.meeting import SECONDS_TO_HEAR, Meeting
from fabric_llm.run import resume, run_directory
from fabric_llm.run.doubts import Facts, cores, doubts, positions
from fabric_llm.run.plan import Placement, Plan, make_plan, placement

DIRECTORY = "FABRIC_LLM_RUN_DIRECTORY"  # environment variable of a started rank: rank 0's run directory
SECONDS_FOR_CHILDREN = 2.0  # to end by themselves
SECONDS_TO_NAME = 1.25  # who is lost, after a connection broke


def assemble(arguments: Arguments) -> tuple[Fabric, Plan, Children]:
    """What is wrong with the arguments ends the run here, with one sentence, before a process or a model exists.

    Of a run that resumes, rank 0 alone chooses and hashes the checkpoint. Ranks that it hasn't started itself, and those on
    other machines, wait for its choice, or for the reason why there is none.
    """
    try:
        place = placement(arguments)
    except ValueError as error:
        _end(Fault(str(error)))
    starts = place.world_size > 1 and not arguments.devices.tpu and not started_by_other()
    if place.num_nodes == 1 and not started_by_other():
        os.environ.pop("NODE_RANK", None)  # of something else: this process is the first of its run
    if starts and place.num_nodes > 1 and not {"MASTER_ADDR", "MASTER_PORT", "NODE_RANK"} <= os.environ.keys():
        _end(
            Fault(
                f"--num_nodes {place.num_nodes}: start the command on each machine with torchrun and --devices auto, "
                "or set MASTER_ADDR, MASTER_PORT and NODE_RANK."
            )
        )
    meeting = _meeting(arguments, place)
    if meeting is not None and "MASTER_PORT" in os.environ:
        meeting.begin()
    waits = bool(arguments.checkpoint.resume) and resume.CHOSEN not in os.environ
    waits = waits and (started_by_other() or starts and place.num_nodes > 1)
    plan, fault = (None, None) if waits and not is_rank_zero() else _planned(arguments)
    if fault is not None and not (waits and place.world_size > 1):
        _end(fault, meeting)
    if plan is not None and is_rank_zero():
        _warn(arguments, plan)
    children = Children({})
    if starts:
        if not waits:
            os.environ[resume.CHOSEN] = resume.chosen(plan)
        if plan is not None and is_rank_zero():
            os.environ[DIRECTORY] = str(plan.run_directory)
        children = start_ranks(place.devices, place.num_nodes)
    os.environ.pop(resume.CHOSEN, None)
    directory = os.environ.pop(DIRECTORY, str(plan.run_directory) if plan is not None and is_rank_zero() else None)
    fabric = make_fabric(
        place.strategy,
        devices=place.devices,
        num_nodes=place.num_nodes,
        kind=place.kind,
        precision=arguments.model.precision,
        timeout_seconds=arguments.devices.hang_timeout,
    )
    said = (fault, resume.chosen(plan), plan and plan.run_directory)
    fault, choice, directory = _join(fabric, arguments, meeting, children, directory, said)
    assert fabric.world_size == place.world_size, (fabric.world_size, place.world_size)
    if fault is None and plan is None:
        os.environ[resume.CHOSEN] = choice
        plan, fault = _planned(arguments)
        del os.environ[resume.CHOSEN]
    if fault is not None or plan is None:
        _end(fault or Fault("there is no plan."))
    return fabric, replace(plan, run_directory=directory), children


def _meeting(arguments: Arguments, place: Placement) -> Optional[Meeting]:
    """Of the ranks that are to join, None where there is but one."""
    devices, node = arguments.devices, int(os.environ.get("NODE_RANK", "0"))
    if place.world_size == 1 or devices.tpu:
        return None
    if started_by_other() and "MASTER_PORT" not in os.environ:
        _end(Fault("LOCAL_RANK says that others started this rank, but MASTER_PORT, where all meet, isn't set."))
    rank = node * place.devices + int(os.environ.get("LOCAL_RANK", "0"))
    rank = int(os.environ.get("RANK", rank)) if started_by_other() else rank

    def lost(fault: Fault) -> NoReturn:
        """In the meeting's thread, as the main one waits."""
        try:
            print(f"train.py: {f'rank {rank}' if rank else 'error'}: {fault}", file=sys.stderr, flush=True)
            said_by_rank_0 = meeting.has_ended(0)
            if rank == 0:
                run_directory.leave(fault)
            elif not said_by_rank_0:
                _leave_for_rank_0(fault, meeting, arguments)
            meeting.leave(fault)
            meeting.children.end(SECONDS_FOR_CHILDREN)
            if rank != 0 and not (said_by_rank_0 and node == 0):
                kill_parent(0 if node == 0 else SECONDS_TO_HEAR + SECONDS_FOR_CHILDREN)
        finally:
            os._exit(for_launcher(fault.code if rank == 0 and meeting.children.processes else PEER_LOST))

    meeting = Meeting(rank, place.world_size, devices.join_timeout, devices.hang_timeout, lost)
    return meeting


def _leave_for_rank_0(fault: Fault, meeting: Meeting, arguments: Arguments) -> None:
    """STATUS.json in place of rank 0, which is lost or frozen: where it is, or would be if nobody else is there."""
    with suppress(ValueError, OSError):
        directory = Path(meeting.directory() or resume.directory(arguments))
        if 0 not in meeting.heard and meeting.directory() is None:
            run_directory.lock(directory)
            run_directory.leave(fault)
        elif directory.is_dir():  # the lock is rank 0's
            run_directory.write_status(directory, fault.code, str(fault), None, fault.retryable)


def _planned(arguments: Arguments) -> tuple[Optional[Plan], Optional[Fault]]:
    """(plan, None) with its run directory locked by rank 0, or (None, what is wrong)."""
    try:
        plan = make_plan(arguments)
        if is_rank_zero():
            run_directory.lock(plan.run_directory)
        return plan, None
    except ValueError as error:
        return None, error if isinstance(error, Fault) else Fault(str(error))


def _warn(arguments: Arguments, plan: Plan) -> None:
    facts = Facts(
        **{name: getattr(plan, name) for name in ("strategy", "kind", "devices", "num_nodes", "max_step")},
        cores=cores(),
        context_length=plan.dataset.context_length,
        positions=positions(plan.config.get_text_config()),
    )
    for sentence in doubts(arguments, facts):
        print(f"Warning: {sentence}", flush=True)


def _end(fault: Fault, meeting: Optional[Meeting] = None) -> NoReturn:
    run_directory.leave(fault)
    if meeting is not None:
        meeting.leave(fault)
    if fault.code == DONE:
        if is_rank_zero():
            print(fault, flush=True)
        raise SystemExit(DONE)
    fail("train.py", str(fault), fault.code)


def _require_one_command(arguments: list[dict[str, Any]]) -> None:
    """Raises Fault unless all ranks have the same: two jobs at one address would train in each other's runs."""
    for rank, own in enumerate(arguments):
        for name, value in arguments[0].items():
            if own[name] != value:
                ours, others = (f"--{name} {json.dumps(v, default=str)}" for v in (own[name], value))
                raise Fault(f"rank {rank} was started with {ours}, rank 0 with {others}: start all with one command.")


def _join(
    fabric: Fabric,
    arguments: Arguments,
    meeting: Optional[Meeting],
    children: Children,
    directory: Optional[str],
    said: tuple,
) -> tuple:
    """`fabric.launch()`, and what rank 0 has `said`. If a rank is lost before it has joined, so is this one."""
    if meeting is not None:
        meeting.begin()
        meeting.wait(children, directory)
    try:
        failpoint("joining")
        fabric.launch()
        failpoint("joined")
        said = fabric.broadcast(said)
        _require_one_command(gather(arguments.flat()))  # the last word is everyone's: none leaves before all are there
        return said
    except Fault as fault:
        _end(fault)
    except RuntimeError as error:
        if "EADDRINUSE" in str(error):
            port = os.environ.get("MASTER_PORT")
            _end(
                Fault(
                    f"port {port}, where the ranks meet, is in use: try again, or with another MASTER_PORT.", PEER_LOST
                )
            )
        fault = as_fault(error)
        if fault.code == UNEXPECTED:
            raise
        if meeting is not None:  # it may know which
            time.sleep(SECONDS_TO_NAME)
            meeting.close()
        _end(Fault(f"another rank was lost before training began: {fault}", fault.code))
    finally:
        if meeting is not None:
            meeting.close()
