"""Which devices a run uses, and how its batches divide over them: known before torch is imported, where there is no GPU."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Union

from fabric_llm.base import machine
from fabric_llm.base.command_line import Flags
from fabric_llm.model import strategy_rules
from fabric_llm.model.strategy_rules import Sharding
from fabric_llm.plan import checks
from fabric_llm.processes.launch import started_by_other

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


def place(flags: Flags) -> Placement:
    """What the flags and the launcher say of devices, without a look at model or data. Raises ValueError."""
    fsdp, tpu, precision = flags.fsdp, flags.devices.tpu, flags.model.precision
    asked, num_nodes = checks.asked_world(flags)
    devices, kind = resolve_devices(asked, flags.devices.accelerator)
    sharding = Sharding(
        fsdp.auto_wrap_policy,
        fsdp.sharding_strategy,
        fsdp.limit_all_gathers,
        fsdp.cpu_offload,
        fsdp.backward_prefetch,
        fsdp.reduce_dtype,
    )
    strategy = resolve_strategy(fsdp.strategy, devices * num_nodes, tpu, precision, kind, sharding)
    return Placement(strategy, sharding, devices, num_nodes, kind)


def resolve_devices(devices: Union[int, str], accelerator: str) -> tuple[int, str]:
    """(devices of this machine, "cpu" or "cuda"). Raises ValueError where it hasn't that many."""
    gpus = _count_gpus(accelerator)
    count = max(gpus, 1) if devices == "auto" else int(devices)
    if gpus and count > gpus:
        of_srun = {"SLURM_LOCALID", "LOCAL_WORLD_SIZE"} <= os.environ.keys()  # the first alone: a batch script
        advice = "; a task of srun must see all GPUs of its machine (--gpu-bind=none)" * of_srun
        raise ValueError(f"--devices {count}: this machine has {gpus} GPU{'s' * (gpus != 1)}{advice}.")
    return count, "cuda" if gpus else "cpu"


def require_fit(flags: Flags, placement: Placement) -> None:
    """Raises ValueError where this machine hasn't the cores or the memory for its ranks, unless --oversubscribe insists.

    A launcher may give each rank cores of its own, and has started them: there all cores of the machine count, and memory,
    of which each rank would see another part used, doesn't.
    """
    count, free = placement.devices, machine.free_memory_bytes()
    here = (os.cpu_count() or 1) if started_by_other() else machine.cores()
    insist = "or insist with --oversubscribe true"
    if flags.devices.oversubscribe or flags.devices.tpu:
        return
    if placement.kind == "cpu" and count > MOST_RANKS_A_CORE * here:
        raise ValueError(
            f"--devices {count}: so many processes on {here} CPU core{'s' * (here > 1)} would only wait for each other; take "
            f"--devices {here}, at most {MOST_RANKS_A_CORE * here}, {insist}."
        )
    if free is not None and count > 1 and not started_by_other() and count * GIB_OF_A_RANK * 2**30 > free:
        fits = max(int(free / 2**30 / GIB_OF_A_RANK), 1)
        raise ValueError(
            f"--devices {count}: {count} processes take {count * GIB_OF_A_RANK:.1f} GiB of memory before they hold any of "
            f"the model, and {free / 2**30:.1f} GiB are free; take --devices {fits} at most, {insist}."
        )


def _count_gpus(accelerator: str) -> int:
    """How many GPUs of this machine an --accelerator may use. Raises ValueError where it needs one and there is none."""
    if accelerator == "cpu" or (accelerator == "auto" and "torch" not in sys.modules and _has_no_gpu()):
        return 0
    import torch

    gpus = torch.cuda.device_count()
    if accelerator in ("cuda", "gpu") and gpus == 0:
        raise ValueError(f"--accelerator {accelerator}: this machine shows no GPU to PyTorch {torch.__version__}.")
    return gpus


def _has_no_gpu() -> bool:
    """True where the kernel shows none; PyTorch is asked otherwise, and in any case later, see run/supervision.py."""
    return sys.platform == "linux" and not any(any(Path("/dev").glob(name)) for name in GPU_FILES)


def resolve_strategy(name: str, world_size: int, tpu: bool, precision: str, kind: str, sharding: Sharding) -> str:
    """`strategy_rules.strategy`, and whether this GPU can do it. Raises ValueError where they don't go together."""
    name = strategy_rules.strategy(name, world_size, tpu, precision, kind, sharding)
    if kind == "cuda" and "bf16" in precision:
        import torch

        if not torch.cuda.is_bf16_supported(including_emulation=False):
            raise ValueError(f"--precision {precision}: this GPU has no bfloat16; take 16-mixed or 32-true.")
    return name


def batch_sizes(flags: Flags, placement: Placement) -> tuple[int, int, int]:
    """`checks.batch_sizes` of the devices that there are. Raises ValueError."""
    sizes = checks.batch_sizes(flags, placement.devices, placement.num_nodes)
    strategy_rules.offload(placement.strategy, placement.sharding.cpu_offload, sizes[1])
    return sizes
