"""All ranks of a run with the same plan: those that torchrun or SLURM started, or that this process starts."""

from __future__ import annotations

import json
import os
import sys
import threading
from dataclasses import replace
from typing import Any, NoReturn, Optional

from lightning.fabric import Fabric

import resume
from arguments import Arguments, fail, is_rank_zero
from doubts import Facts, cores, doubts, positions
from fabric_llm import run_directory
from fabric_llm.faults import DONE, PEER_LOST, UNEXPECTED, Fault, as_fault
from fabric_llm.launch import Children, start_ranks, started_by_other
from fabric_llm.ranks import gather
from fabric_llm.strategy import make_fabric
from preflight import Placement, Plan, make_plan, placement


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
    waits = bool(arguments.checkpoint.resume) and resume.CHOSEN not in os.environ
    waits = waits and (started_by_other() or starts and place.num_nodes > 1)
    plan, fault = (None, None) if waits and not is_rank_zero() else _planned(arguments)
    if fault is not None and not (waits and place.world_size > 1):
        _end(fault)
    if plan is not None and is_rank_zero():
        _warn(arguments, plan)
    children = Children({})
    if starts:
        if not waits:
            os.environ[resume.CHOSEN] = resume.chosen(plan)
        children = start_ranks(place.devices, place.num_nodes)
    os.environ.pop(resume.CHOSEN, None)
    fabric = make_fabric(
        place.strategy,
        devices=place.devices,
        num_nodes=place.num_nodes,
        kind=place.kind,
        precision=arguments.model.precision,
        timeout_seconds=arguments.devices.hang_timeout,
    )
    fault, choice, directory = _join(
        fabric, arguments, place, children, (fault, resume.chosen(plan), plan and plan.run_directory)
    )
    if fault is None and plan is None:
        os.environ[resume.CHOSEN] = choice
        plan, fault = _planned(arguments)
        del os.environ[resume.CHOSEN]
    if fault is not None or plan is None:
        _end(fault or Fault("there is no plan."))
    return fabric, replace(plan, run_directory=directory), children


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


def _end(fault: Fault) -> NoReturn:
    run_directory.leave(fault)
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


def _join(fabric: Fabric, arguments: Arguments, place: Placement, children: Children, said: tuple) -> tuple:
    """`fabric.launch()`, and what rank 0 has `said`. If a rank dies before it has joined, so does this one."""
    joined = threading.Event()

    def look() -> None:
        while not joined.wait(0.2):
            if (dead := children.dead()) is not None:
                fault = Fault(f"rank {dead[0]} {dead[1]} before training began.", children.code_of(dead[0]))
                run_directory.leave(fault)
                print(f"train.py: error: {fault}", file=sys.stderr, flush=True)
                children.end(0)
                os._exit(fault.code)

    threading.Thread(target=look, name="join", daemon=True).start()
    try:
        fabric.launch()
        assert fabric.world_size == place.world_size, (fabric.world_size, place.world_size)
        _require_one_command(gather(arguments.flat()))
        return fabric.broadcast(said)
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
        _end(Fault(f"another rank was lost before training began: {fault}", fault.code))
    finally:
        joined.set()
