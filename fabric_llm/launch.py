"""Start the other ranks of this machine, and don't outlive each other.

Fabric can start them as well, but it ends a failed run by killing all ranks, itself included, before anyone could say
why. It takes ranks that are already there, as under torchrun, by the same environment variables that are set here.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from typing import Optional

from fabric_llm.faults import CODES, DONE, PEER_LOST, STOPPED

PARENT = "FABRIC_LLM_PARENT"  # environment variable of a started rank: the process that it must not outlive
PR_SET_PDEATHSIG = 1  # prctl(2)
_parent: Optional[int] = None


class Children:
    """The ranks 1, 2, ... of this machine, started by this process; none under torchrun and the like."""

    def __init__(self, processes: dict[int, subprocess.Popen[bytes]]) -> None:
        self.processes = processes

    def dead(self) -> Optional[tuple[int, str]]:
        """(rank, how) of one that has ended otherwise than well."""
        for rank, process in self.processes.items():
            if code := process.poll():
                return rank, f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        return None

    def code_of(self, rank: int) -> int:
        """With which code the run ends because this rank has: its own where it is one of ours."""
        code = self.processes[rank].returncode
        return STOPPED if code == -signal.SIGINT else code if code in CODES else PEER_LOST

    def end(self, seconds: float) -> None:
        """Wait for them, then kill those that are left."""
        deadline = time.monotonic() + seconds
        while any(p.poll() is None for p in self.processes.values()) and time.monotonic() < deadline:
            time.sleep(0.02)
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
                process.wait()


def adopt_slurm() -> None:
    """In a task that srun started beside others: set what torchrun would have set.

    The variables of the job alone, as in a batch script that doesn't use srun, say nothing of processes.
    """
    given = os.environ
    if "LOCAL_RANK" in given or int(given.get("SLURM_STEP_NUM_TASKS", "1")) < 2:
        return
    tasks, nodes = int(given["SLURM_STEP_NUM_TASKS"]), int(given.get("SLURM_STEP_NUM_NODES", "1"))
    node, local_rank, per_node = int(given.get("SLURM_NODEID", "0")), int(given["SLURM_LOCALID"]), tasks // nodes
    given.update(LOCAL_RANK=str(local_rank), LOCAL_WORLD_SIZE=str(per_node), WORLD_SIZE=str(tasks))
    given.update(NODE_RANK=str(node), RANK=str(node * per_node + local_rank))
    from lightning.fabric.plugins.environments import SLURMEnvironment

    hosts = given.get("SLURM_STEP_NODELIST", "127.0.0.1")
    given.setdefault("MASTER_ADDR", SLURMEnvironment.resolve_root_node_address(hosts))
    job, step = (int(given.get(name, "0")) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    given.setdefault("MASTER_PORT", str(15_000 + (31 * job + step) % 10_000))  # the same for all tasks of a step


def started_by_other() -> bool:
    """True in a process that torchrun, srun, a started rank's parent or a user gave its rank."""
    return "LOCAL_RANK" in os.environ


def for_launcher(code: int) -> int:
    """A torchrun with restarts left takes any code but 0 for a failure, and would start again what was asked to stop."""
    count, most = (int(os.environ.get(f"TORCHELASTIC_{name}", "0")) for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    return DONE if code == STOPPED and count < most else code


def start_ranks(devices: int, num_nodes: int) -> Children:
    """Make this process rank 0 of its machine and start the others with the same command line."""
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    if "MASTER_PORT" not in os.environ:
        os.environ["MASTER_PORT"] = str(_free_port())
    node = int(os.environ.setdefault("NODE_RANK", "0"))
    os.environ.update(LOCAL_RANK="0", RANK=str(node * devices), WORLD_SIZE=str(devices * num_nodes))
    processes = {}
    for local_rank in range(1, devices):
        rank = node * devices + local_rank
        own = {"LOCAL_RANK": str(local_rank), "RANK": str(rank), PARENT: str(os.getpid())}
        processes[rank] = subprocess.Popen([sys.executable, *_own_command()], env={**os.environ, **own})
    return Children(processes)


def _own_command() -> list[str]:
    return [os.path.abspath(sys.argv[0]), *sys.argv[1:]]


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("", 0))
        return int(sock.getsockname()[1])


def die_with_parent() -> None:
    """In a started rank: the kernel kills this process when its parent ends, however that ends (Linux)."""
    global _parent
    parent = os.environ.pop(PARENT, None)
    if parent is None or not sys.platform.startswith("linux"):
        return
    _parent = int(parent)
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != _parent:  # it ended before the kernel knew
        os._exit(1)


def kill_parent(seconds: float = 0.0) -> None:
    """In a started rank: end the process that started it, which is frozen; this one ends with it. It has `seconds` to go."""
    if _parent is None:
        return
    time.sleep(seconds)
    if os.getppid() == _parent:
        os.kill(_parent, signal.SIGKILL)
