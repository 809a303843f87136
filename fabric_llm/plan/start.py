"""Start a run: find its devices, lock its directory, and start the other ranks, before any rank
imports torch.

Importing torch takes seconds, which all ranks then spend at the same time. Here only a machine with
GPUs imports it, because nothing else can count them.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NoReturn, Optional

from fabric_llm.base.command_line import fail, is_rank_zero
from fabric_llm.base.faults import DONE, UNEXPECTED, Fault, as_mistake, one_line
from fabric_llm.base.flag import Flags
from fabric_llm.base.machine import cores, return_freed_memory
from fabric_llm.base.names import counted
from fabric_llm.mirror.address import require_obstore
from fabric_llm.model import strategy_rules
from fabric_llm.model.strategy_rules import Placement, Sharding
from fabric_llm.plan import mirrored, run_directory
from fabric_llm.plan.demo import prepare_demo
from fabric_llm.processes import launch

# Host memory that a rank takes besides what it holds of the model: Python, torch and, on a GPU,
# CUDA's libraries. On CPUs measured: 0.54 to 0.60 GiB more than tensors at the peak of toy runs on
# one and two ranks with PyTorch without CUDA, 0.16 of them shared libraries; 0.66 with --compile.
GIB_OF_A_RANK = {"cpu": 0.6, "cuda": 2.4}
MAX_RANKS_A_CORE = 4  # with more, a run on CPUs takes minutes to start
# Names in /dev of the GPUs of NVIDIA, Jetson, AMD, and Windows under WSL.
GPU_FILES = ("nvidia*", "nvhost*", "nvmap", "kfd", "dxg")


@dataclass
class ThisRank:
    """One rank of a run, in its own process. Fields are None until they are known."""

    placement: Placement
    children: launch.Children  # the ranks that this process has started
    # The run directory, which rank 0 has locked. Other ranks know it once they have joined.
    directory: Optional[Path]
    problem: Optional[Fault]  # with that directory, to be raised on all ranks once they have joined
    mirror: Any = None  # with --mirror, of rank 0: a Mirror
    ranks_apart: Any = None  # with --mirror, where ranks don't see rank 0's disk: an Apart
    is_program: bool = True  # False in a process that isn't train.py's own, as in tests
    log: Any = None  # a Log
    rank: int = 0
    fabric: Any = None  # a Fabric, which needs torch, like what follows
    watch: Any = None  # a Watch
    plan: Any = None  # a Plan


def batch_sizes(flags: Flags, devices: int, num_nodes: int) -> tuple[int, int, int]:
    """(sequences per micro-batch, micro-batches per step and device, sequences per step).

    Flags that aren't given follow from the others. The demo takes a smaller micro-batch if its own
    doesn't divide. Raises ValueError, with all numbers, if they don't divide or disagree.
    """
    training, sharing = flags.training, flags.devices.context_parallel
    # The ranks, or groups of ranks that share rows: each one reads other rows.
    world_size, rest = divmod(devices * num_nodes, sharing)
    if rest:
        raise ValueError(
            f"--context_parallel {sharing}: {counted(devices, 'device')} x "
            f"{counted(num_nodes, 'node')} don't divide by it: give --devices."
        )
    micro_batch_size, global_batch_size = training.micro_batch_size, training.global_batch_size
    accumulation = training.gradient_accumulation_steps
    # The size of a step follows from the micro-batches and the number of ranks.
    if global_batch_size is None:
        micro_batch_size, accumulation = micro_batch_size or 1, accumulation or 1
        return micro_batch_size, accumulation, micro_batch_size * accumulation * world_size
    # It follows from a number of micro-batches that was asked for; without one it is 1.
    if micro_batch_size is None:
        micro_batch_size = 1
        if accumulation:
            micro_batch_size = max(1, global_batch_size // (accumulation * world_size))
    if flags.demo:
        micro_batch_size = min(micro_batch_size, max(1, global_batch_size // world_size))
    # Micro-batches per step and device.
    needed, rest = divmod(global_batch_size, micro_batch_size * world_size)
    spelled = f"--micro_batch_size {micro_batch_size} x {counted(devices, 'device')} x "
    spelled += counted(num_nodes, "node")
    if sharing > 1:
        spelled += f" / {sharing} that share rows"
    spelled += f" = {micro_batch_size * world_size}"
    if rest:
        advice, of_rank = "", global_batch_size // world_size
        if global_batch_size % world_size == 0:
            most = min(micro_batch_size, of_rank)
            fits = next(n for n in range(most, 0, -1) if of_rank % n == 0)
            advice = f": take --micro_batch_size {fits}"
        else:
            of_all = micro_batch_size * world_size
            nearest = of_all * max(1, round(global_batch_size / of_all))
            advice = f": take --global_batch_size {nearest}"
            if flags.checkpoint.resume:
                advice += " (named in --resume_override)"
            # The most devices of a node that fit; there may be none on several nodes. Multiplied
            # by `sharing`, both sides are whole numbers.
            fitting = (
                fewer
                for fewer in range(devices - 1, 0, -1)
                if fewer * num_nodes % sharing == 0
                and global_batch_size * sharing % (micro_batch_size * fewer * num_nodes) == 0
            )
            if fewer := next(fitting, 0):
                advice += f", or {counted(fewer, 'device')}{' a node' * (num_nodes > 1)}"
        raise ValueError(
            f"--global_batch_size {global_batch_size} doesn't divide by {spelled}{advice}."
        )
    # All three flags are given, and they contradict each other.
    if accumulation not in (None, needed):
        raise ValueError(
            f"--global_batch_size {global_batch_size} needs --gradient_accumulation_steps "
            f"{needed}, not {accumulation}: {spelled}."
        )
    return micro_batch_size, needed, global_batch_size


def may_have_gpu() -> bool:
    """False where torch needn't be asked for the GPUs of this machine."""
    return sys.platform != "linux" or any(any(Path("/dev").glob(name)) for name in GPU_FILES)


def place(flags: Flags) -> Placement:
    """Devices and strategy, from flags and launcher, without model or data. Raises ValueError."""
    fsdp, tpu, precision = flags.fsdp, flags.devices.tpu, flags.model.precision
    world = {"devices": flags.devices.devices, "num_nodes": flags.devices.num_nodes}
    # A launcher's numbers win over those of a --config file. Those on the command line must agree
    # with it.
    given = {name: value for name, value in world.items() if name in flags.on_command_line}
    launched = None if tpu else launch.launched_world(given)
    asked, num_nodes = launched or world.values()
    sharding = Sharding(**{one.name: getattr(fsdp, one.name) for one in fields(Sharding)})
    # These mistakes are told before torch is imported, which counts GPUs.
    strategy_rules.strategy(fsdp.strategy, None, tpu, precision, None, sharding)
    gpus, accelerator = 0, flags.devices.accelerator
    # Without files of GPUs, torch is asked only once it is imported: run/supervision.py calls
    # this function again.
    shown = "torch" in sys.modules or may_have_gpu()
    if accelerator in ("cuda", "gpu") or accelerator == "auto" and shown:
        import torch

        gpus = torch.cuda.device_count()
        if accelerator != "auto" and gpus == 0:
            raise ValueError(
                f"--accelerator {accelerator}: this machine shows no GPU to PyTorch "
                f"{torch.__version__}."
            )
    # `auto`: all GPUs of the machine, or one process on its CPU.
    devices = max(gpus, 1) if asked == "auto" else int(asked)
    kind = "cuda" if gpus else "cpu"
    if gpus and devices > gpus:
        advice = ""
        # A batch script has the first of these alone.
        if {"SLURM_LOCALID", "LOCAL_WORLD_SIZE"} <= os.environ.keys():
            advice = "; a task of srun must see all GPUs of its machine (--gpu-bind=none)"
        raise ValueError(f"--devices {devices}: this machine has {counted(gpus, 'GPU')}{advice}.")
    if gpus:
        _require_driver()
    # Once more, since the rules for the devices and their kind can be checked only now.
    strategy = strategy_rules.strategy(
        fsdp.strategy, devices * num_nodes, tpu, precision, kind, sharding
    )
    # PyTorch would emulate it, which is slow.
    if gpus and "bf16" in precision and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise ValueError(
            f"--precision {precision}: this GPU has no bfloat16; take 16-mixed or 32-true."
        )
    strategy_rules.offload(strategy, fsdp.cpu_offload, batch_sizes(flags, devices, num_nodes)[1])
    return Placement(strategy, sharding, devices, num_nodes, kind, flags.devices.context_parallel)


def _require_driver() -> None:
    """Raises ValueError where PyTorch can't use the GPUs that it has counted."""
    import torch

    # It counts them by the driver's own library, and would then say that they have no bfloat16.
    try:
        torch.cuda.init()
    except (RuntimeError, torch.cuda.DeferredCudaCallError) as error:
        raise ValueError(
            f"PyTorch {torch.__version__} can't use this machine's GPUs (--accelerator cpu leaves "
            f"them out): {one_line(error)[:500].rstrip('.')}."
        ) from error


def require_cores(flags: Flags, placement: Placement) -> None:
    """Raises ValueError for far more ranks on CPUs than this machine has cores, unless
    --oversubscribe insists."""
    count, here = placement.devices, cores()
    if (
        placement.kind == "cpu"
        and count > MAX_RANKS_A_CORE * here
        and not flags.devices.oversubscribe
    ):
        raise ValueError(
            f"--devices {count}: so many processes on {counted(here, 'CPU core')} would only "
            f"wait for each other: take --devices {here}, at most {MAX_RANKS_A_CORE * here}, or "
            "insist with --oversubscribe true."
        )


def start(flags: Flags) -> ThisRank:
    """Lock the run directory and start the other ranks of this machine, unless a launcher did.
    Raises Fault.

    A problem with the run directory ends the run before a rank is started.
    """
    placement = place(flags)
    if placement.kind == "cpu":  # tensors are in memory of malloc
        return_freed_memory()
    # Asked before start_ranks() sets the same variables in this process.
    by_other = launch.started_by_other()
    has_ranks = placement.world_size > 1 and not flags.devices.tpu
    starts = has_ranks and not by_other
    meets_others = has_ranks and (by_other or placement.num_nodes > 1)
    if starts:
        require_cores(flags, placement)
    if has_ranks and by_other:
        launch.number_of("MASTER_PORT", 0, 2**16 - 1, default="")  # where the ranks meet
    if placement.num_nodes == 1 and not by_other:
        os.environ.pop("NODE_RANK", None)  # of something else: this process is the run's first
    if (
        starts
        and placement.num_nodes > 1
        and not {"MASTER_ADDR", "MASTER_PORT", "NODE_RANK"} <= os.environ.keys()
    ):
        raise Fault(
            f"--num_nodes {placement.num_nodes}: start the command on each machine with torchrun "
            "and --devices auto, or set MASTER_ADDR, MASTER_PORT and NODE_RANK."
        )
    # Each rank calls it: one makes the dataset, and the others wait for its lock.
    if flags.demo:
        prepare_demo(Path(flags.data.train_data_dir), flags.data.context_length)
    directory, problem, mirror = None, None, None
    # Rank 0 alone writes there.
    if is_rank_zero():
        try:
            if flags.save.mirror is not None:
                require_obstore(flags.save.mirror)
            named = run_directory.directory(flags)
            run_directory.require_writable(named)
            run_directory.lock(named)
            directory = named
            # Other machines would wait meanwhile for this one to join: run/supervision.py.
            if flags.save.mirror is not None and not meets_others:
                mirror = mirrored.open_mirror(flags, named)
        except ValueError as error:
            problem = as_mistake(error)
            # Ranks that a launcher has started wait for this one already. They are told when they
            # join (run/supervision.py), and would else wait in vain.
            if placement.world_size == 1 or starts:
                raise problem from None
    # Last, since a problem that is found before then needs no ranks to be ended.
    children = launch.Children({})
    if starts:
        children = launch.start_ranks(placement.devices, placement.num_nodes)
    return ThisRank(placement, children, directory, problem, mirror)


@contextmanager
def report_errors() -> Iterator[None]:
    """Around all of train.py: print a fault in one sentence and exit. run/supervision.py does so
    once there are ranks."""
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        fault = as_mistake(error)
        run_directory.leave(fault)
        if fault.code == UNEXPECTED:
            raise
        if fault.code == DONE:
            raise SystemExit(DONE) from None
        fail("train.py", str(fault), launch.for_launcher(fault.code))


def leave_at_once(fault: Fault) -> NoReturn:
    """End this process, and with it the ranks that it has started. For a signal handler, before the
    ranks have joined."""
    try:
        run_directory.leave(fault)
        fail("train.py", str(fault), fault.code)
    finally:
        os._exit(launch.for_launcher(fault.code))
