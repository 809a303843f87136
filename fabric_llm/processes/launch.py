"""Start the other ranks of this machine, so that none of them outlives the others.

Fabric could start them, but when a rank fails it kills all, before one can say why. Here they are
started with the environment variables that torchrun sets, and Fabric takes them as it takes
torchrun's.
"""

import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn, Optional

from fabric_llm.base.command_line import AGAIN, is_rank_zero
from fabric_llm.base.faults import CODES, DONE, PEER_LOST, STOPPED, Fault
from fabric_llm.base.machine import die_with
from fabric_llm.processes.stop import SIGNALS, STARTED

AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"  # "True": torchrun's agent holds the store
RESTARTS = ("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS")
# The environment variable of a started rank with the id of the process that it must not outlive.
PARENT = "FABRIC_LLM_PARENT"
SECONDS_TO_AGREE = 60.0  # on a port, for a rank 0 that first ends what it does
SECONDS_TO_END = 10.0  # for a rank to end by itself once it knows another rank's fault


@dataclass
class Children:
    """The ranks 1, 2, ... of this machine, started by this process; none under torchrun and the
    like."""

    processes: dict[int, subprocess.Popen[bytes]]
    # Listens at the port where the ranks will meet, so that no other program takes it before rank
    # 0's store does.
    door: Optional[socket.socket] = None

    def dead(self) -> Optional[tuple[int, str, int]]:
        """(rank, how, code) of one that has failed. code: the exit code for the run, which is its
        own if docs/faults.md has it."""
        for rank, process in self.processes.items():
            # None while it runs, 0 if it has ended well, negative if a signal killed it.
            if code := process.poll():
                how = f"ended with code {code}"
                if code < 0:
                    how = f"was killed by {_signal_name(-code)}"
                if -code in SIGNALS:
                    return rank, how, STOPPED
                return rank, how, code if code in CODES else PEER_LOST
        return None

    def end(self, seconds: float) -> None:
        """Wait so long for them to end, then kill those that are left."""
        # One deadline for all of them together.
        deadline = time.monotonic() + seconds
        for process in self.processes.values():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                # After the kill, so that no zombie is left and its exit code is known.
                process.wait()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # such as a real-time signal
        return f"signal {number}"


# The environment of this process before it changed it, and its cores before libraries bound them.
_given: dict[str, str] = {}
_cores: set[int] = set()


def adopt_launcher() -> None:
    """Make the environment of a rank that srun or nobody started look as torchrun's. Raises
    ValueError for a wrong number."""
    _given.update(os.environ)
    # A run that starts again by itself counts --max_hours from here.
    _given.setdefault(STARTED, repr(time.monotonic()))
    if hasattr(os, "sched_getaffinity"):
        _cores.update(os.sched_getaffinity(0))
    # The watch reports broken connections, without C++ stacks.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # If the package kernels is installed, transformers would download kernels, which are code, from
    # the hub.
    os.environ.setdefault("USE_HUB_KERNELS", "NO")
    if has_parent():
        die_with(int(os.environ[PARENT]))
    # A batch script without srun has variables of the job, but none of a step: it starts its ranks
    # itself.
    tasks = 0 if started_by_other() else number_of("SLURM_STEP_NUM_TASKS", 0)
    if tasks > 1:
        # SLURM says how many tasks there are in all. Unequal numbers on nodes are refused later.
        per_node = math.ceil(tasks / number_of("SLURM_STEP_NUM_NODES", 1, default="1"))
        node, local_rank = number_of("SLURM_NODEID", 0), number_of("SLURM_LOCALID", 0)
        os.environ.update(
            LOCAL_RANK=str(local_rank), LOCAL_WORLD_SIZE=str(per_node), WORLD_SIZE=str(tasks)
        )
        os.environ.update(NODE_RANK=str(node), RANK=str(node * per_node + local_rank))
        # Two jobs on one machine get different ports, as far as numbers allow.
        port = 15_000 + (31 * number_of("SLURM_JOB_ID", 0) + number_of("SLURM_STEP_ID", 0)) % 10_000
        os.environ.setdefault("MASTER_PORT", str(port))  # the same for all tasks of a step
    # No launcher has set these. In a pod, for example, RANK may mean something else.
    if not started_by_other():
        for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK"):
            os.environ.pop(name, None)
    _, most_restarts = (number_of(name, 0) for name in RESTARTS)
    # Restarted ranks would find the former attempt's keys in the agent's store, and fail.
    if os.environ.get(AGENT_STORE) == "True" and most_restarts > 0 and is_rank_zero():
        advice = (
            "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 before it, on every machine "
            "(docs/clusters.md)"
        )
        print(f"Warning: torchrun can't start lost ranks again reliably: {advice}.", flush=True)


def started_by_other() -> bool:
    """True in a process whose rank was given by torchrun, srun, the user, or the process that
    started it."""
    return "LOCAL_RANK" in os.environ


def has_parent() -> bool:
    """True in a rank that rank 0 of its machine has started."""
    return PARENT in os.environ


def kill_parent() -> None:
    """In a started rank: kill the process that started it, because it is frozen. This process then
    ends, too."""
    if has_parent():
        if os.environ["NODE_RANK"] != "0":  # that process isn't rank 0: it may be ending by itself
            time.sleep(SECONDS_TO_END)
        # If that process has ended, this one has another parent, which isn't to be killed.
        if os.getppid() == int(os.environ[PARENT]):
            os.kill(os.getppid(), signal.SIGKILL)


def launched_world(asked: dict[str, Any]) -> Optional[tuple[int, int]]:
    """(processes per node, nodes) that a launcher has started; None if this process starts its
    ranks itself.

    asked: `devices` and `num_nodes`, as far as the command line gives them. Raises ValueError if
    they differ from the launcher's: data for ranks that don't exist would never be read.
    """
    if not started_by_other():
        for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE"):
            if (count := number_of(name, 0)) > 1:  # each process would train a run of its own
                advice = "start them with torchrun or srun, or one process a machine with --devices"
                raise ValueError(
                    f"mpirun has started {count} processes, but LOCAL_RANK and RANK aren't set: "
                    f"{advice}."
                )
        return None
    world_size, per_node = (
        number_of("WORLD_SIZE", 1, default=""),
        number_of("LOCAL_WORLD_SIZE", 1, default=""),
    )
    # Fabric takes one number of devices for all machines.
    nodes, left = divmod(world_size, per_node)
    there = f"the launcher has started {world_size} processes, {per_node} of them on this machine"
    if left:
        raise ValueError(f"{there}: each machine must have the same number.")
    # Fabric calculates a rank from node and local rank, so those of a machine must be adjacent.
    node, place = divmod(number_of("RANK", 0, world_size - 1, default=""), per_node)
    if number_of("LOCAL_RANK", 0, per_node - 1) != place:
        raise ValueError(
            f"{there}: RANK {os.environ['RANK']} is process {place} of its machine, not "
            f"{os.environ['LOCAL_RANK']}."
        )
    # Fabric numbers ranks that torchrun hasn't started by it.
    os.environ["NODE_RANK"] = str(node)
    # A number that was given must be the launcher's.
    for name, number in (("devices", per_node), ("num_nodes", nodes)):
        if asked.get(name, "auto") not in ("auto", number):
            raise ValueError(
                f"--{name} {asked[name]}, but {there}: leave --{name} out, or start as many."
            )
    return per_node, nodes


def number_of(name: str, first: int, last: int = 2**32, default: str = "0") -> int:
    """The number in an environment variable, or in `default` if it isn't set. Raises ValueError
    unless first <= number <= last."""
    given = os.environ.get(name, default)
    # isdecimal() also refuses signs, spaces and "".
    if given.isdecimal() and first <= int(given) <= last:
        return int(given)
    advice = ""
    if started_by_other():
        advice = ": start the ranks with torchrun or srun, or unset LOCAL_RANK"
    os.environ["LOCAL_RANK"] = "0"  # only the first of a machine prints a mistake
    raise ValueError(
        f"{name} in the environment must be a number from {first} to {last}, not {given!r}{advice}."
    )


def start_ranks(devices: int, num_nodes: int) -> Children:
    """Make this process the first rank of its machine, and start the other ranks with the same
    command line.

    Raises Fault if they can't be started or if MASTER_PORT is in use on rank 0's machine,
    ValueError for a wrong number.
    """
    os.environ.setdefault("NODE_RANK", "0")
    node, door = number_of("NODE_RANK", 0, num_nodes - 1), None
    if num_nodes == 1:  # no other machine needs to know the port: take a free one
        door = socket.create_server(("127.0.0.1", 0))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(door.getsockname()[1]))
    elif (port := number_of("MASTER_PORT", 1, 2**16 - 1)) and node == 0:
        try:
            # Only tried, so that a port in use is told before the other ranks are started.
            socket.create_server(("", port)).close()
        except OSError as error:
            raise port_in_use() from error
    # The same variables that torchrun sets, since Fabric and torch read those.
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE=str(devices))
    os.environ.update(RANK=str(node * devices), WORLD_SIZE=str(devices * num_nodes))
    command = [sys.executable, os.path.abspath(sys.argv[0]), *sys.argv[1:]]
    processes = {}

    # Local rank 0 is this process.
    for local_rank in range(1, devices):
        rank = node * devices + local_rank
        own = {"LOCAL_RANK": str(local_rank), "RANK": str(rank), PARENT: str(os.getpid())}
        # The new process begins with them blocked, and hears Ctrl-C once it has handlers.
        former = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            processes[rank] = subprocess.Popen(command, env={**os.environ, **own})
        except OSError as error:
            raise Fault(
                f"--devices {devices}: no process for rank {rank} ({error.strerror}); see `ulimit "
                "-a`."
            ) from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, former)
    return Children(processes, door)


def port_in_use() -> Fault:
    """The fault of a MASTER_PORT in use. Rank 0 can't take another port, since the other ranks were
    told this one."""
    where = f"port {os.environ.get('MASTER_PORT')}, where the ranks meet,"
    return Fault(
        f"{where} is in use, or not allowed, on rank 0's machine: start all with another "
        "MASTER_PORT."
    )


def for_launcher(code: int) -> int:
    """`code`, but 0 for a requested stop under a torchrun with restarts left, which would restart
    after any other code."""
    # Another code may be that of a wrong number in these variables, which isn't read again then.
    if code == STOPPED and number_of(RESTARTS[0], 0) < number_of(RESTARTS[1], 0):
        return DONE
    return code


def is_own_command() -> bool:
    """Whether this process was started with the words that it reads as its flags: not by a notebook
    or a wrapper, whose command is another."""
    words = sys.argv[1:]
    return sys.orig_argv[len(sys.orig_argv) - len(words) :] == words


def _another_port() -> str:
    """One that is free on rank 0's machine, of which the others hear by the store of torchrun's
    agent."""
    from torch.distributed import TCPStore  # imported by now

    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(*address, is_master=False, timeout=timedelta(seconds=SECONDS_TO_AGREE))
    key = f"fabric_llm-port-{os.environ.get(RESTARTS[0])}"  # of this attempt of torchrun
    if os.environ["RANK"] == "0":
        with socket.create_server(("", 0)) as free:
            store.set(key, str(free.getsockname()[1]))
    return store.get(key).decode()  # waits for rank 0


def start_again(flags: Sequence[str]) -> NoReturn:
    """Replace this process by its own command with more flags. Ranks that it has started have
    ended."""
    given = {**_given, AGAIN: " ".join([os.environ.get(AGAIN, ""), *flags])}
    # The store of torchrun's agent keeps the addresses of the ranks that there were. Rank 0 holds
    # another.
    if given.get(AGENT_STORE) == "True":
        given |= {AGENT_STORE: "False", "MASTER_PORT": _another_port()}
    # execve() drops what Python still holds in its buffers.
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    # OpenMP may have bound this thread to a core.
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, _cores)
    # Sockets, locks and GPUs go with this program. Closing them here would break what other threads
    # are doing with them.
    for name in os.listdir("/dev/fd"):
        with suppress(OSError):
            os.set_inheritable(int(name), int(name) <= 2)
    os.execve(sys.executable, [*sys.orig_argv, *flags], given)
