"""The devices of a run are known, rank 0 locks its directory and starts the other ranks, before any of them imports torch.

Importing takes seconds, which all ranks spend side by side. So nothing here imports what a run needs later, but where there are
GPUs, which only torch can count.
"""

from __future__ import annotations

import gc
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Optional

from fabric_llm.base import program
from fabric_llm.base.command_line import Flags, fail, is_rank_zero
from fabric_llm.base.faults import DONE, UNEXPECTED, Fault, as_mistake, tell_torchrun
from fabric_llm.data import mixture_text
from fabric_llm.data.sources import said_of_rows
from fabric_llm.model import strategy_rules
from fabric_llm.model.strategy_rules import Sharding
from fabric_llm.plan import run_directory
from fabric_llm.plan.mixture import lay_out
from fabric_llm.prepare.demo import prepare_demo
from fabric_llm.processes import launch

if TYPE_CHECKING:  # what needs torch is imported by then
    from fabric_llm.base.fabric import Fabric
    from fabric_llm.processes.watch import Watch

MOST_RANKS_A_CORE = 4  # beyond that a run on CPUs spends minutes on its start alone
GIB_OF_A_RANK = 0.4  # of host memory, for torch and what else a rank imports, before it holds anything of the model
# In /dev: NVIDIA's, Jetson's, AMD's, those of Windows under WSL.
GPU_FILES = ("nvidia*", "nvhost*", "nvmap", "kfd", "dxg")


@dataclass(frozen=True)
class Placement:
    """Which devices a run uses, and how the model is spread over them."""

    strategy: str  # a name of the table in model/strategy.py
    sharding: Sharding
    devices: int  # per node
    num_nodes: int
    kind: str  # "cpu" or "cuda"

    @property
    def world_size(self) -> int:
        return self.devices * self.num_nodes


@dataclass
class ThisRank:
    """One rank of a run, in its own process; what comes later is None until then."""

    placement: Placement
    children: launch.Children  # the ranks that this process has started
    directory: Optional[Path]  # of the run, locked by rank 0; on other ranks once they have joined
    problem: Optional[Fault]  # with the directory, which others, started by somebody else, have to hear of
    rank: int = 0
    fabric: Optional[Fabric] = None
    watch: Optional[Watch] = None
    plan: Any = None  # a Plan, which needs torch


def batch_sizes(flags: Flags, devices: int, num_nodes: int) -> tuple[int, int, int]:
    """(sequences per micro-batch, micro-batches per step and device, sequences per step).

    What isn't given follows from the rest. The demo takes a smaller micro-batch where its own doesn't divide. Raises
    ValueError, with all numbers, if they don't divide or disagree.
    """
    training, world_size = flags.training, devices * num_nodes
    micro_batch_size, global_batch_size = training.micro_batch_size, training.global_batch_size
    accumulation = training.gradient_accumulation_steps
    if global_batch_size is None:
        micro_batch_size, accumulation = micro_batch_size or 1, accumulation or 1
        return micro_batch_size, accumulation, micro_batch_size * accumulation * world_size
    if micro_batch_size is None:
        micro_batch_size = max(1, global_batch_size // (accumulation * world_size)) if accumulation else 1
    if flags.demo:
        micro_batch_size = min(micro_batch_size, max(1, global_batch_size // world_size))
    needed, rest = divmod(global_batch_size, micro_batch_size * world_size)
    spelled = f"--micro_batch_size {micro_batch_size} x {devices} devices x {num_nodes} nodes = {micro_batch_size * world_size}"
    if rest:
        raise ValueError(f"--global_batch_size {global_batch_size} doesn't divide by {spelled}.")
    if accumulation not in (None, needed):
        raise ValueError(
            f"--global_batch_size {global_batch_size} needs --gradient_accumulation_steps {needed}, "
            f"not {accumulation}: {spelled}."
        )
    return micro_batch_size, needed, global_batch_size


def batch_fits(folder: str, rows: int, batch: int) -> None:
    """Raises ValueError where the training split of a dataset has fewer rows than a step takes."""
    if batch > rows:
        raise ValueError(f"A step takes {batch} sequences, but the training split of {folder!r} has {rows}.")


def place(flags: Flags) -> Placement:
    """What the flags and the launcher say of devices, without a look at model or data. Raises ValueError."""
    fsdp, tpu, precision = flags.fsdp, flags.devices.tpu, flags.model.precision
    world = {"devices": flags.devices.devices, "num_nodes": flags.devices.num_nodes}
    # The launcher's, where one has started the ranks. A file such as flags.yaml yields to it, the command line must agree.
    given = {name: value for name, value in world.items() if name in flags.on_command_line}
    launched = None if tpu else launch.launched_world(given)
    asked, num_nodes = launched or world.values()
    sharding = Sharding(**{one.name: getattr(fsdp, one.name) for one in fields(Sharding)})
    strategy_rules.strategy(fsdp.strategy, None, tpu, precision, None, sharding)  # needs no torch, which counts GPUs
    gpus, accelerator = 0, flags.devices.accelerator
    # Where the kernel shows none, PyTorch is asked only when it is imported in any case, by run/supervision.py.
    shown = "torch" in sys.modules or sys.platform != "linux" or any(any(Path("/dev").glob(name)) for name in GPU_FILES)
    if accelerator in ("cuda", "gpu") or accelerator == "auto" and shown:
        import torch

        gpus = torch.cuda.device_count()
        if accelerator != "auto" and gpus == 0:
            raise ValueError(f"--accelerator {accelerator}: this machine shows no GPU to PyTorch {torch.__version__}.")
    devices, kind = max(gpus, 1) if asked == "auto" else int(asked), "cuda" if gpus else "cpu"
    if gpus and devices > gpus:
        of_srun = {"SLURM_LOCALID", "LOCAL_WORLD_SIZE"} <= os.environ.keys()  # the first alone: a batch script
        advice = "; a task of srun must see all GPUs of its machine (--gpu-bind=none)" * of_srun
        raise ValueError(f"--devices {devices}: this machine has {gpus} GPU{'s' * (gpus != 1)}{advice}.")
    strategy = strategy_rules.strategy(fsdp.strategy, devices * num_nodes, tpu, precision, kind, sharding)
    if gpus and "bf16" in precision and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise ValueError(f"--precision {precision}: this GPU has no bfloat16; take 16-mixed or 32-true.")
    strategy_rules.offload(strategy, fsdp.cpu_offload, batch_sizes(flags, devices, num_nodes)[1])
    return Placement(strategy, sharding, devices, num_nodes, kind)


def require_fit(flags: Flags, placement: Placement) -> None:
    """Raises ValueError where this machine hasn't the cores or the memory for its ranks, unless --oversubscribe insists.

    A launcher may give each rank cores of its own, and has started them: there all cores of the machine count, and memory,
    of which each rank would see another part used, doesn't.
    """
    if flags.devices.oversubscribe or flags.devices.tpu:
        return
    count, free = placement.devices, program.free_memory_bytes()
    here = (os.cpu_count() or 1) if launch.started_by_other() else program.cores()
    if placement.kind == "cpu" and count > MOST_RANKS_A_CORE * here:
        why = f"so many processes on {here} CPU core{'s' * (here > 1)} would only wait for each other"
        fits = f"{here}, at most {MOST_RANKS_A_CORE * here}"
    elif free is not None and count > 1 and not launch.started_by_other() and count * GIB_OF_A_RANK * 2**30 > free:
        needed, there = count * GIB_OF_A_RANK, free / 2**30
        why = f"{count} processes take {needed:.1f} GiB of memory before they hold any of the model, and {there:.1f} GiB are free"
        fits = f"{max(int(there / GIB_OF_A_RANK), 1)} at most"
    else:
        return
    raise ValueError(f"--devices {count}: {why}; take --devices {fits}, or insist with --oversubscribe true.")


def start(flags: Flags) -> ThisRank:
    """Start the other ranks of this machine, unless others did. Raises Fault.

    What is wrong with the run directory ends the run before a rank is started.
    """
    placement = place(flags)
    require_fit(flags, placement)
    _require_rows(flags, placement)
    by_other, has_ranks = launch.started_by_other(), placement.world_size > 1 and not flags.devices.tpu
    starts = has_ranks and not by_other
    if has_ranks and by_other:
        launch.require_port()
    if placement.num_nodes == 1 and not by_other:
        os.environ.pop("NODE_RANK", None)  # of something else: this process is the first of its run
    if starts and placement.num_nodes > 1 and not {"MASTER_ADDR", "MASTER_PORT", "NODE_RANK"} <= os.environ.keys():
        raise Fault(
            f"--num_nodes {placement.num_nodes}: start the command on each machine with torchrun and --devices auto, "
            "or set MASTER_ADDR, MASTER_PORT and NODE_RANK."
        )
    if flags.demo:
        prepare_demo(Path(flags.data.train_data_dir), flags.data.context_length)
    directory, problem = None, None
    if is_rank_zero():
        try:
            named = run_directory.directory(flags)
            run_directory.require_writable(named)
            run_directory.lock(named)
            directory = named
        except ValueError as error:
            problem = as_mistake(error)
            if placement.world_size == 1 or starts:
                raise problem from None
    children = launch.start_ranks(placement.devices, placement.num_nodes) if starts else launch.Children({})
    return ThisRank(placement, children, directory, problem)


def _require_rows(flags: Flags, placement: Placement) -> None:
    """Batches, and the length of a mixture, against the rows that manifests name, where a run starts. Raises ValueError."""
    data, training = flags.data, flags.training
    batch = batch_sizes(flags, placement.devices, placement.num_nodes)[2]
    mix = mixture_text.parse(data.data_mix) if data.data_mix else None
    said = [
        said_of_rows(Path(folder)) for folder in ([one.path for one in mix.sources] if mix else [data.train_data_dir])
    ]
    if flags.demo or flags.checkpoint.resume or None in said:
        return
    if mix:
        lay_out(mix, [rows for rows, _ in said], batch, training.max_step, training.number_epochs)
    else:
        batch_fits(data.train_data_dir, said[0][0], batch)


@contextmanager
def told_in_one_sentence() -> Iterator[None]:
    """Around all that train.py does: what no rank has told yet, since there were no ranks, is told here."""
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        fault = as_mistake(error)
        run_directory.leave(fault)
        if fault.code == UNEXPECTED:
            tell_torchrun(traceback.format_exc())
            raise
        if fault.code == DONE:
            raise SystemExit(DONE) from None
        fail("train.py", str(fault), launch.for_launcher(fault.code))


def leave_at_once(fault: Fault) -> NoReturn:
    """In a signal's handler, before this rank meets the others: end, and the ranks that this process has started with it."""
    try:
        run_directory.leave(fault)
        fail("train.py", str(fault), fault.code)
    finally:
        os._exit(launch.for_launcher(fault.code))


@contextmanager
def without_collection() -> Iterator[None]:
    """Around imports: of the million objects that they make none is garbage, so Python needn't look through them."""
    if not gc.isenabled() or "torch" in sys.modules:  # of a process that has imported it all: there is nothing to gain
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()  # nor later
        gc.enable()
