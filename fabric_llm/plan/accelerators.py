"""Accelerators, and how long a step takes on them at most: a roofline. Nothing here imports torch.

Memory, its bandwidth and links are those of the makers' data sheets; the peaks in bfloat16 are flops.PEAK_TFLOPS.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Optional


@dataclass(frozen=True)
class Accelerator:
    """What is known of one device, or assumed."""

    name: str
    memory_gib: Optional[float]  # that PyTorch sees; None: as much as the machine has
    tflops: float  # dense, bfloat16
    link_gb: (
        float  # GB/s that it sends to others of its node, in one direction: NVLink, Infinity Fabric, PCIe or memory
    )
    mfu: float  # assumed part of the peak that the operations of a model reach where nothing else limits


# MFU, assumed: 0.40 of what trains in data centres (docs/results/gpu.md: 0.31 to 0.45 on an H100 with attention counted as it is),
# 0.45 of a smaller peak that is easier to reach. The CPU: 2 cores with AMX of docs/results/speed.md.
KNOWN = [
    Accelerator("A100-40GB", 39.4, 312, 300, 0.45),
    Accelerator("A100-80GB", 79.2, 312, 300, 0.45),
    Accelerator("H100", 79.1, 989, 450, 0.40),
    Accelerator("H200", 139.8, 989, 450, 0.40),
    Accelerator("B200", 178.4, 2250, 900, 0.35),
    Accelerator("L40S", 44.4, 362, 32, 0.40),
    Accelerator("RTX 4090", 23.5, 165, 32, 0.50),
    Accelerator("RTX 5090", 31.4, 210, 64, 0.50),
    Accelerator("MI300X", 191.5, 1307, 448, 0.30),
    Accelerator("CPU", None, 1.0, 10, 0.40),
]


def accelerator(name: str) -> Accelerator:
    """Of a name as people write it, such as h100 or rtx4090. Raises ValueError with those that are known."""

    def plain(text: str) -> str:
        return re.sub(r"[^a-z0-9]", "", text.lower()).removeprefix("nvidia").removeprefix("amd")

    found = [one for one in KNOWN if plain(one.name) == plain(name)]
    if not found:
        known = ", ".join(one.name for one in KNOWN)
        raise ValueError(f"--accelerator_name {name!r} isn't known; known are {known}.")
    return found[0]


@dataclass(frozen=True)
class Seconds:
    """Of one step."""

    compute: float
    messages: float
    hidden: bool  # that messages are sent while devices compute

    @property
    def step(self) -> float:
        return max(self.compute, self.messages) if self.hidden else self.compute + self.messages


def message_bytes(
    placement: Any, gathered_bytes: int, reduced_bytes: int, syncs: int, micro_batches: int
) -> tuple[float, float]:
    """(bytes that a device sends to others of its node in a step, bytes that a node sends over the network).

    gathered_bytes: of all weights. reduced_bytes: of their gradients, as they are sent. syncs: backward passes that reduce them.
    To gather, or to reduce and scatter, each of n parties must send (n - 1) / n of the whole; for an all-reduce, both.
    """
    how, nodes = placement.sharding.sharding_strategy, placement.num_nodes
    inside, between = (placement.devices - 1) / placement.devices, (nodes - 1) / nodes
    if placement.strategy in ("single", "ddp") or how == "NO_SHARD":
        return 2 * reduced_bytes * inside * syncs, 2 * reduced_bytes * between * syncs
    gathers = 1 if how == "SHARD_GRAD_OP" else 2
    sent = (gathers * gathered_bytes + reduced_bytes) * micro_batches
    over_network = 2 * reduced_bytes * micro_batches if how == "HYBRID_SHARD" else sent
    return sent * inside, over_network * between
