"""Start the other ranks of this machine, and don't outlive each other.

Fabric can start them as well, but it ends a failed run by killing all ranks, itself included, before anyone could say
why. It takes ranks that are already there, as under torchrun, by the same environment variables that are set here.
"""

from __future__ import annotations

import errno
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
from fabric_llm.base.ending import die_with
from fabric_llm.base.faults import CODES, DONE, PEER_LOST, STOPPED, Fault
from fabric_llm.processes.stop import SIGNALS

RESTARTS = ("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS")  # so far, and at most
PARENT = "FABRIC_LLM_PARENT"  # environment variable of a started rank: the process that it must not outlive
SECONDS_TO_END = 10.0  # for a rank's own way out, once another rank's fault is known
_parent: Optional[int] = None


class Children:
    """The ranks 1, 2, ... of this machine, started by this process; none under torchrun and the like."""

    def __init__(self, processes: dict[int, subprocess.Popen[bytes]], door: Optional[socket.socket] = None) -> None:
        """door: listens where the ranks meet, so that no other program takes the port before rank 0's store does."""
        self.processes, self.door = processes, door

    def dead(self) -> Optional[tuple[int, str]]:
        """(rank, how) of one that has ended otherwise than well."""
        for rank, process in self.processes.items():
            if code := process.poll():
                return rank, f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        return None

    def code_of(self, rank: int) -> int:
        """The run's exit code after this rank failed: the rank's own if it is one of the table."""
        code = self.processes[rank].returncode
        return STOPPED if -code in SIGNALS else code if code in CODES else PEER_LOST

    def end(self, seconds: float) -> None:
        """Wait for them, then kill those that are left."""
        deadline = time.monotonic() + seconds
        while any(p.poll() is None for p in self.processes.values()) and time.monotonic() < deadline:
            time.sleep(0.02)
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
                process.wait()


def adopt_launcher() -> None:
    """At the start of a process: what its launcher says in the environment, as torchrun would say it.

    Raises ValueError for a variable that must be a number and isn't.
    """
    # Broken connections are told in one sentence, not in C++ stacks.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # transformers fetches kernels, which are code, from the hub where the package kernels is installed.
    os.environ.setdefault("USE_HUB_KERNELS", "NO")
    die_with_parent()
    for name in RESTARTS:  # which are read again when the run ends
        _number(name, 0)
    adopt_slurm()
    if not started_by_other():  # such as a pod's RANK: no launcher has made this process a rank
        for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK"):
            os.environ.pop(name, None)
    if (warning := warning_of_torchrun()) and is_rank_zero():
        print(f"Warning: {warning}", flush=True)


def adopt_slurm() -> None:
    """In a task that srun started beside others: set what torchrun would have set, but for MASTER_ADDR.

    The variables of the job alone, as in a batch script that doesn't use srun, say nothing of processes.
    """
    if started_by_other() or (tasks := _number("SLURM_STEP_NUM_TASKS", 0)) < 2:
        return
    per_node = math.ceil(tasks / _number("SLURM_STEP_NUM_NODES", 1, default=1))
    node, local_rank = _number("SLURM_NODEID", 0), _number("SLURM_LOCALID", 0)
    os.environ.update(LOCAL_RANK=str(local_rank), LOCAL_WORLD_SIZE=str(per_node), WORLD_SIZE=str(tasks))
    os.environ.update(NODE_RANK=str(node), RANK=str(node * per_node + local_rank))
    port = 15_000 + (31 * _number("SLURM_JOB_ID", 0) + _number("SLURM_STEP_ID", 0)) % 10_000
    os.environ.setdefault("MASTER_PORT", str(port))  # the same for all tasks of a step


def require_port() -> None:
    """In a rank among others that a launcher started. Raises ValueError where it doesn't say at which port they meet."""
    if "MASTER_PORT" not in os.environ:
        raise ValueError("LOCAL_RANK says that others started this rank, but MASTER_PORT, where all meet, isn't set.")
    _number("MASTER_PORT", 0, 2**16 - 1)


def started_by_other() -> bool:
    """True in a process that torchrun, srun, a started rank's parent or a user gave its rank."""
    return "LOCAL_RANK" in os.environ


def launched_world(asked: dict[str, Any]) -> Optional[tuple[int, int]]:
    """(processes per node, nodes) that a launcher has started; None where this process starts its ranks itself.

    asked: `devices` and `num_nodes`, as far as the command line gives them. Raises ValueError where they aren't the
    launcher's: the ranks that are there are the only ones that can read data.
    """
    if not started_by_other():
        _refuse_mpi()
        return None
    if missing := [name for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE") if name not in os.environ]:
        raise ValueError(
            f"LOCAL_RANK is set in the environment, but {' and '.join(missing)} isn't: start the ranks with torchrun or "
            "srun, or unset LOCAL_RANK."
        )
    world_size, per_node = _number("WORLD_SIZE", 1), _number("LOCAL_WORLD_SIZE", 1)
    nodes = world_size // per_node
    if nodes * per_node != world_size:
        raise ValueError(
            f"The launcher has started {world_size} processes, {per_node} of them on this machine: each machine must "
            "have the same number."
        )
    _number("RANK", 0, world_size - 1)
    _number("LOCAL_RANK", 0, per_node - 1)
    for name, there in (("devices", per_node), ("num_nodes", nodes)):
        if asked.get(name, "auto") not in ("auto", there):
            raise ValueError(
                f"--{name} {asked[name]}, but the launcher has started {per_node} "
                f"{'processes' if per_node > 1 else 'process'} on each of {nodes} node{'s' * (nodes > 1)}: leave --{name} "
                "out, or start as many."
            )
    return per_node, nodes


def _number(name: str, first: int, last: int = 2**32, default: int = 0) -> int:
    """An environment variable, `default` where it isn't set. Raises ValueError unless it is from `first` to `last`."""
    given = os.environ.get(name, str(default))
    if given.isdecimal() and first <= int(given) <= last:
        return int(given)
    os.environ["LOCAL_RANK"] = "0"  # others than the first of a machine would be silent
    raise ValueError(f"{name} in the environment must be a number from {first} to {last}, not {given!r}.")


def _refuse_mpi() -> None:
    """Raises ValueError in one of several processes of mpirun, which would each train a run of its own."""
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE"):
        if (count := os.environ.get(name, "")).isdigit() and int(count) > 1:
            raise ValueError(
                f"mpirun has started {count} processes, but LOCAL_RANK, RANK and WORLD_SIZE aren't set: start them "
                "with torchrun or srun, or one process a machine with --devices."
            )


def for_launcher(code: int) -> int:
    """A torchrun with restarts left takes any code but 0 for a failure, and would start again what was asked to stop."""
    if code != STOPPED:
        return code
    count, most = (_number(name, 0) for name in RESTARTS)
    return DONE if count < most else STOPPED


def warning_of_torchrun() -> Optional[str]:
    """What to change where ranks that torchrun starts again would find the keys of the start before, and end with it."""
    shares = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if not shares or _number("TORCHELASTIC_MAX_RESTARTS", 0) == 0:
        return None
    return (
        "torchrun can't start lost ranks again reliably: export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 before it, on "
        "every machine (docs/clusters.md)."
    )


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
            raise port_in_use() if error.errno == errno.EADDRINUSE else Fault(f"MASTER_PORT {port}: {error.strerror}.")
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
                f"--devices {devices}: process {local_rank + 1} of them can't be started ({error.strerror}); take fewer, or "
                "raise the limits of `ulimit -a`."
            ) from error
    return Children(processes, door)


def port_in_use() -> Fault:
    """Of MASTER_PORT, which rank 0 of a launcher, or of several machines, can't change by itself: the others know it."""
    port = os.environ.get("MASTER_PORT")
    return Fault(
        f"port {port}, where the ranks meet, is in use on rank 0's machine: start all with another MASTER_PORT."
    )


def die_with_parent() -> None:
    """In a started rank: the kernel kills this process when its parent ends, however that ends (Linux)."""
    global _parent
    parent = os.environ.pop(PARENT, None)
    if parent is not None and sys.platform.startswith("linux"):
        _parent = int(parent)
        die_with(_parent)


def has_parent() -> bool:
    """True in a rank that rank 0 of its machine has started."""
    return _parent is not None


def kill_parent() -> None:
    """In a started rank: end the process that started it, which is frozen; this one ends with it.

    A process that isn't rank 0 itself has time to hear why the run ends, and to end by itself.
    """
    if _parent is None:
        return
    if os.environ["NODE_RANK"] != "0":
        time.sleep(SECONDS_TO_END)
    if os.getppid() == _parent:
        os.kill(_parent, signal.SIGKILL)


def find_launcher(launcher: str) -> list[str]:
    """Its words; a program without a folder may lie beside Python, where the environment isn't activated."""
    words = shlex.split(launcher)
    beside = Path(sys.executable).parent / words[0] if words else Path()
    found = shutil.which(words[0]) or shutil.which(str(beside)) if words else None
    if found is None:
        raise Fault(f"--launcher {launcher!r}: there is no such program.")
    return [found, *words[1:]]
