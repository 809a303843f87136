"""Accelerators, and how long a step takes on them at most: a roofline."""

import re
from dataclasses import dataclass
from math import ceil, log2
from typing import Any, Optional

from fabric_llm.base.flag import Flags
from fabric_llm.base.machine import cores
from fabric_llm.base.names import listed
from fabric_llm.model.flops import of_layers, peak_tflops


@dataclass(frozen=True)
class Accelerator:
    """What is known of one device, or assumed: docs/planning.md, "Numbers of devices", has the
    source of each number."""

    name: str
    memory_gib: Optional[float]  # that PyTorch sees; None: as much as the machine has
    # GB/s to others of its node, in one direction: NVLink, Infinity Fabric, PCIe, or memory of CPUs
    link_gb: float
    mfu: float  # fraction of the peak that a model's operations reach where nothing else limits

    def tflops(self, devices: int) -> float:
        """Dense, bfloat16, of each of `devices` of a node: processes on a CPU share the cores of
        this machine."""
        return peak_tflops(self.name) or CPU_TFLOPS * cores() / devices


# A guess, for one core with AVX2 in float32: two reach 0.1 in docs/results/speed.md.
CPU_TFLOPS = 0.125
MAX_DEVICES = 1024  # of a node
KNOWN = [
    Accelerator("A100-40GB", 39.4, 300, 0.45),
    Accelerator("A100-80GB", 79.2, 300, 0.45),
    Accelerator("H100", 79.1, 450, 0.40),
    Accelerator("H200", 139.8, 450, 0.40),
    Accelerator("B200", 178.3, 900, 0.35),
    Accelerator("L40S", 44.4, 32, 0.40),
    Accelerator("RTX 4090", 23.5, 32, 0.50),
    Accelerator("RTX 5090", 31.3, 64, 0.50),
    Accelerator("MI300X", 191.7, 448, 0.30),
    Accelerator("CPU", None, 10, 0.40),
]


def accelerator(name: str) -> Accelerator:
    """The accelerator of a name as people write it, such as h100 or rtx4090. Raises ValueError,
    with the names that are known."""

    def plain(text: str) -> str:
        return re.sub(r"[^a-z0-9]", "", text.lower()).removeprefix("nvidia").removeprefix("amd")

    for one in KNOWN:
        if plain(one.name) == plain(name):
            return one

    def words(text: str) -> set[str]:
        return set(re.findall("[a-z0-9]+", text.lower()))

    names, own = [one.name for one in KNOWN], words(name)
    # Such as 4090, or H100 SXM. A name with other letters, such as V100 or H20, is another card's.
    close = [one for one in names if own and (own <= words(one) or words(one) <= own)]
    # Or with two digits swapped.
    close = close or [one for one in names if sorted(plain(one)) == sorted(plain(name))]
    instead = f". Did you mean {' or '.join(close)}?"
    if not close:
        instead = (
            f"; known are {listed(names)}. For another, take one of them, with your "
            "--device_memory and --mfu."
        )
    raise ValueError(f"--accelerator_name {name!r} isn't known{instead}")


def named(own: Flags, flags: Flags) -> Accelerator:
    """The accelerator that the flags name; own: those that plan.py alone has. Raises ValueError
    where they name two, and for one that isn't known."""
    name, asked = own.accelerator_name, flags.devices.accelerator
    is_named = asked != "auto" and "accelerator_name" in flags.on_command_line
    if is_named and (asked == "cpu") != (name.upper() == "CPU"):
        raise ValueError(
            f"--accelerator {asked} and --accelerator_name {name} name two devices: leave out one."
        )
    return accelerator("CPU" if asked == "cpu" else name)


def devices_of_node(flags: Flags) -> int:
    """Of a node, as the flags name them. Raises ValueError for more than a node can have."""
    devices = 1 if flags.devices.devices == "auto" else flags.devices.devices
    # To trace a step takes the longer the more there are: of a mistyped number it wouldn't end.
    if devices > MAX_DEVICES:
        raise ValueError(
            f"--devices {devices}: these are the devices of one machine, at most {MAX_DEVICES:,} "
            "here. Give --num_nodes as well, or --sweep devices=8..4096 for more and more nodes."
        )
    return devices


# Seconds that a message takes to begin, to be passed on over NVLink, and to be passed on to another
# node. NCCL chooses among its algorithms by these numbers: baseLatencies and hwLatencies of its
# protocol for large messages (Ring, Simple) in
# https://github.com/NVIDIA/nccl/blob/5067397c2676d5aed50042fc39e5c8ee96eb0027/src/graph/tuning.cc
BEGIN, INSIDE, BETWEEN = 8.4e-6, 3.4e-6, 14e-6


# DISPATCH: seconds that the host takes to launch one operation, however small its tensors are.
# Measured: 1,765 operations in 13.8 ms, in the fastest of 200 forward and backward passes of a
# Llama of 8 layers of 64 elements, on one core of a Xeon. UPDATE: seconds that it takes to update
# one tensor. Measured: 272 tensors in 11.2 ms, with an H100 (docs/results/gpu.md, "The optimizer").
DISPATCH, UPDATE = 7.8e-6, 41e-6


@dataclass(frozen=True)
class Seconds:
    """The seconds of one step."""

    compute: float
    messages: float
    hidden: bool  # whether messages are sent while devices compute
    exchange: float = 0.0  # of heads, between ranks that share rows: layers wait for it
    launch: float = 0.0  # that the host takes to launch operations
    is_host: bool = False  # whether host and device are one CPU, which launches, then computes

    @property
    def busy(self) -> float:
        """Seconds without messages: the slower one of device and host counts."""
        return self.compute + self.launch if self.is_host else max(self.compute, self.launch)

    @property
    def step(self) -> float:
        others = max(self.busy, self.messages) if self.hidden else self.busy + self.messages
        return others + self.exchange


def exchanged_bytes(config: Any, sharing: int, tokens: int, passes: float) -> float:
    """Bytes that a device sends to exchange heads, see context_parallel.share_rows. tokens: of the
    device, in a step.

    passes: forward and backward, and those that are made a second time.
    """
    elements = 0
    for layer in of_layers(config):
        heads = layer.num_attention_heads
        size = getattr(layer, "head_dim", None) or layer.hidden_size // heads
        key_values = getattr(layer, "num_key_value_heads", None) or heads
        # Heads that can't be divided are copied first, see share_rows.
        if key_values % sharing:
            key_values = heads
        # Queries and the output have all heads, keys and values their own.
        elements += 2 * (heads + key_values) * size
    return passes * tokens * elements * 2 * (sharing - 1) / sharing


def message_bytes(
    placement: Any, gathered_bytes: int, reduced_bytes: int, syncs: int, micro_batches: int
) -> tuple[float, float]:
    """(bytes that a device sends to others of its node in a step, bytes that a node sends over the
    network).

    gathered_bytes: of all weights. reduced_bytes: of their gradients, as they are sent. syncs:
    backward passes that reduce them. To gather, or to reduce and scatter, each of n parties must
    send (n - 1) / n of the whole; for an all-reduce, both.
    """
    how, nodes = placement.sharding.sharding_strategy, placement.num_nodes
    inside, between = (placement.devices - 1) / placement.devices, (nodes - 1) / nodes
    if placement.strategy in ("single", "ddp") or how == "NO_SHARD":
        # Nothing is gathered where devices have the whole model: an all-reduce sums gradients.
        return 2 * reduced_bytes * inside * syncs, 2 * reduced_bytes * between * syncs
    # For the forward pass and again for the backward pass, unless weights stay whole between
    # the two.
    gathers = 1 if how == "SHARD_GRAD_OP" else 2
    sent = (gathers * gathered_bytes + reduced_bytes) * micro_batches
    # A hybrid gathers inside of its node, and sends others an all-reduce of its gradients.
    over_network = 2 * reduced_bytes * micro_batches if how == "HYBRID_SHARD" else sent
    return sent * inside, over_network * between


def latency(placement: Any, units: int, syncs: int, micro_batches: int) -> float:
    """Seconds of a step that messages take to be passed on from device to device, however few bytes
    they have: NCCL's estimate.

    n devices gather, or reduce and scatter, in a ring of n - 1 turns, and reduce for all in a tree
    of nodes. units: layers and the rest, of which one after the other is sent.
    """
    how = placement.sharding.sharding_strategy
    devices, nodes = placement.devices, placement.num_nodes
    tree = BEGIN + 2 * ceil(log2(nodes)) * BETWEEN if nodes > 1 else 0.0
    if placement.strategy in ("single", "ddp") or how == "NO_SHARD":
        return units * syncs * (tree + 2 * (devices - 1) * INSIDE)
    # A hybrid has a ring in each node, and reduces over nodes afterwards.
    nodes_in_ring, after = nodes, 0.0
    if how == "HYBRID_SHARD":
        nodes_in_ring, after = 1, tree
    ring = BEGIN + nodes_in_ring * (devices - 1) * INSIDE + (nodes_in_ring - 1) * BETWEEN
    # As many as gathers of the weights, and one for the gradients.
    rings = 2 if how == "SHARD_GRAD_OP" else 3
    return units * micro_batches * (rings * ring + after)
