"""Start the other ranks of this machine, and don't outlive each other.

Fabric can start them as well, but it ends a failed run by killing all ranks, itself included, before anyone could say
why. It takes ranks that are already there, as under torchrun, by the same environment variables that are set here.
"""

from __future__ import annotations

import math
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Optional

from fabric_llm.base.command_line import is_rank_zero
from fabric_llm.base.faults import CODES, DONE, PEER_LOST, STOPPED, Fault
from fabric_llm.base.program import die_with
from fabric_llm.processes.stop import SIGNALS

RESTARTS = ("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS")  # so far, and at most
PARENT = "FABRIC_LLM_PARENT"  # environment variable of a started rank: the process that it must not outlive
SECONDS_TO_END = 10.0  # for a rank's own way out, once another rank's fault is known


class Children:
    """The ranks 1, 2, ... of this machine, started by this process; none under torchrun and the like."""

    def __init__(self, processes: dict[int, subprocess.Popen[bytes]], door: Optional[socket.socket] = None) -> None:
        """door: listens where the ranks meet, so that no other program takes the port before rank 0's store does."""
        self.processes, self.door = processes, door

    def dead(self) -> Optional[tuple[int, str, int]]:
        """(rank, how, code) of one that has ended otherwise than well. code: the run's, its own if it is one of the table."""
        for rank, process in self.processes.items():
            if code := process.poll():
                how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
                return rank, how, STOPPED if -code in SIGNALS else code if code in CODES else PEER_LOST
        return None

    def end(self, seconds: float) -> None:
        """Wait for them, then kill those that are left."""
        deadline = time.monotonic() + seconds
        for process in self.processes.values():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def adopt_launcher() -> None:
    """Say what its launcher says in the environment as torchrun would. Raises ValueError for what should be a number."""
    os.environ.setdefault(
        "TORCH_CPP_LOG_LEVEL", "ERROR"
    )  # broken connections are told in a sentence, not in C++ stacks
    # transformers fetches kernels, which are code, from the hub where the package kernels is installed.
    os.environ.setdefault("USE_HUB_KERNELS", "NO")
    if has_parent():
        die_with(int(os.environ[PARENT]))
    # The variables of SLURM's job alone, as in a batch script that doesn't use srun, say nothing of processes.
    tasks = 0 if started_by_other() else _number("SLURM_STEP_NUM_TASKS", 0)
    if tasks > 1:
        per_node = math.ceil(tasks / _number("SLURM_STEP_NUM_NODES", 1, default="1"))
        node, local_rank = _number("SLURM_NODEID", 0), _number("SLURM_LOCALID", 0)
        os.environ.update(LOCAL_RANK=str(local_rank), LOCAL_WORLD_SIZE=str(per_node), WORLD_SIZE=str(tasks))
        os.environ.update(NODE_RANK=str(node), RANK=str(node * per_node + local_rank))
        port = 15_000 + (31 * _number("SLURM_JOB_ID", 0) + _number("SLURM_STEP_ID", 0)) % 10_000
        os.environ.setdefault("MASTER_PORT", str(port))  # the same for all tasks of a step
    if not started_by_other():  # such as a pod's RANK: no launcher has made this process a rank
        for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK"):
            os.environ.pop(name, None)
    _, most_restarts = (_number(name, 0) for name in RESTARTS)
    # Ranks that torchrun starts again would find the keys of the start before, and end with it.
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and most_restarts > 0 and is_rank_zero():
        advice = "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 before it, on every machine (docs/clusters.md)"
        print(f"Warning: torchrun can't start lost ranks again reliably: {advice}.", flush=True)


def started_by_other() -> bool:
    """True in a process that torchrun, srun, a started rank's parent or a user gave its rank."""
    return "LOCAL_RANK" in os.environ


def has_parent() -> bool:
    """True in a rank that rank 0 of its machine has started."""
    return PARENT in os.environ


def kill_parent() -> None:
    """In a started rank: end the process that started it, which is frozen; this one ends with it."""
    if has_parent():
        if os.environ["NODE_RANK"] != "0":  # that process isn't rank 0, and may have heard why the run ends
            time.sleep(SECONDS_TO_END)
        if os.getppid() == int(os.environ[PARENT]):
            os.kill(os.getppid(), signal.SIGKILL)


def launched_world(asked: dict[str, Any]) -> Optional[tuple[int, int]]:
    """(processes per node, nodes) that a launcher has started; None where this process starts its ranks itself.

    asked: `devices` and `num_nodes`, as far as the command line gives them. Raises ValueError where they aren't the
    launcher's: the ranks that are there are the only ones that can read data.
    """
    if not started_by_other():
        for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE"):
            if (count := _number(name, 0)) > 1:  # each would train a run of its own
                advice = "start them with torchrun or srun, or one process a machine with --devices"
                raise ValueError(f"mpirun has started {count} processes, but LOCAL_RANK and RANK aren't set: {advice}.")
        return None
    world_size, per_node = _number("WORLD_SIZE", 1, default=""), _number("LOCAL_WORLD_SIZE", 1, default="")
    nodes, left = divmod(world_size, per_node)
    there = f"the launcher has started {world_size} processes, {per_node} of them on this machine"
    if left:
        raise ValueError(f"{there}: each machine must have the same number.")
    _number("RANK", 0, world_size - 1, default="")
    _number("LOCAL_RANK", 0, per_node - 1)
    for name, number in (("devices", per_node), ("num_nodes", nodes)):
        if asked.get(name, "auto") not in ("auto", number):
            raise ValueError(f"--{name} {asked[name]}, but {there}: leave --{name} out, or start as many.")
    return per_node, nodes


def require_port() -> None:
    """In a rank among others that a launcher started. Raises ValueError where it doesn't say at which port they meet."""
    _number("MASTER_PORT", 0, 2**16 - 1, default="")


def _number(name: str, first: int, last: int = 2**32, default: str = "0") -> int:
    """An environment variable, `default` where it isn't set. Raises ValueError unless it is from `first` to `last`."""
    given = os.environ.get(name, default)
    if given.isdecimal() and first <= int(given) <= last:
        return int(given)
    advice = ": start the ranks with torchrun or srun, or unset LOCAL_RANK" if started_by_other() else ""
    os.environ["LOCAL_RANK"] = "0"  # others than the first of a machine would be silent
    raise ValueError(f"{name} in the environment must be a number from {first} to {last}, not {given!r}{advice}.")


def start_ranks(devices: int, num_nodes: int) -> Children:
    """Make this process the first of its machine and start the others with the same command line.

    Raises Fault where they can't be started, or MASTER_PORT is taken on rank 0's machine, ValueError for a wrong number.
    """
    os.environ.setdefault("NODE_RANK", "0")
    node, door = _number("NODE_RANK", 0, num_nodes - 1), None
    if num_nodes == 1:  # nobody else has to find them: whatever the environment says, a port that is free
        door = socket.create_server(("127.0.0.1", 0))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(door.getsockname()[1]))
    elif (port := _number("MASTER_PORT", 1, 2**16 - 1)) and node == 0:
        try:
            socket.create_server(("", port)).close()
        except OSError as error:
            raise port_in_use() from error
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE=str(devices))
    os.environ.update(RANK=str(node * devices), WORLD_SIZE=str(devices * num_nodes))
    command = [sys.executable, os.path.abspath(sys.argv[0]), *sys.argv[1:]]
    processes = {}
    for local_rank in range(1, devices):
        rank = node * devices + local_rank
        own = {"LOCAL_RANK": str(local_rank), "RANK": str(rank), PARENT: str(os.getpid())}
        try:
            processes[rank] = subprocess.Popen(command, env={**os.environ, **own})
        except OSError as error:
            raise Fault(
                f"--devices {devices}: no process for rank {rank} ({error.strerror}); see `ulimit -a`."
            ) from error
    return Children(processes, door)


def port_in_use() -> Fault:
    """Of MASTER_PORT, which rank 0 of a launcher, or of several machines, can't change by itself: the others know it."""
    where = f"port {os.environ.get('MASTER_PORT')}, where the ranks meet,"
    return Fault(f"{where} is in use, or not allowed, on rank 0's machine: start all with another MASTER_PORT.")


def for_launcher(code: int) -> int:
    """A torchrun with restarts left takes any code but 0 for a failure, and would start again what was asked to stop."""
    restarts_left = code == STOPPED and _number(RESTARTS[0], 0) < _number(RESTARTS[1], 0)
    return DONE if restarts_left else code


def find_launcher(launcher: str) -> list[str]:
    """Its words; a program without a folder may lie beside Python, where the environment isn't activated."""
    words = shlex.split(launcher)
    found = words and (shutil.which(words[0]) or shutil.which(Path(sys.executable).parent / words[0]))
    if not found:
        raise Fault(f"--launcher {launcher!r}: there is no such program.")
    return [found, *words[1:]]
