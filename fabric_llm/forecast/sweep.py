"""`plan.py --sweep devices=8..4096`: one plan on more and more devices, each of which has the same
work, sharded in two ways."""

import re
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from fabric_llm.base.command_line import Flags
from fabric_llm.base.faults import Fault
from fabric_llm.forecast.changes import changed
from fabric_llm.forecast.memory import Memory, Work, predict_memory
from fabric_llm.forecast.prediction import GIB, Prediction, predict
from fabric_llm.plan.start import batch_sizes

OF_A_NODE = 8  # devices, where --devices doesn't say it
TRACED = (
    32  # devices: the more there are, the longer it takes to trace a step, half a minute for 4,096
)
TITLES = (
    "devices",
    "tokens a step",
    "sharding",
    "GiB",
    "used",
    "step, s",
    "messages, s",
    "efficiency",
    "none hidden",
)


class Row(NamedTuple):
    """A plan on so many devices."""

    devices: int
    sharding: str
    prediction: Prediction
    efficiency: float  # tokens per second and device, as a part of the most on the fewest devices
    none_hidden: float  # the same where messages are sent while nothing is computed

    def cells(self) -> list[str]:
        """As `TITLES` has them."""
        one = self.prediction
        words = [
            f"{self.devices:,}",
            f"{one.tokens_a_step:,}",
            self.sharding,
            f"{one.memory.peak / GIB:,.1f}",
        ]
        used = f"{100 * one.used:.0f} %" if one.device_bytes else "not known"
        words += [
            used if one.fits else f"{used}, no",
            f"{one.seconds.step:.3g}",
            f"{one.seconds.messages:.3g}",
        ]
        return [*words, f"{100 * self.efficiency:.0f} %", f"{100 * self.none_hidden:.0f} %"]


def sweep(own: Flags, flags: Flags) -> list[Row]:
    """On one node there is no hybrid. own: the flags that plan.py alone has. Raises ValueError and
    Fault as `predict` does."""
    if own.auto or flags.devices.num_nodes > 1 or flags.fsdp.strategy == "ddp":
        raise Fault(
            "--sweep chooses nodes and sharding itself: it takes no --num_nodes, --strategy ddp "
            "or --auto."
        )
    of_a_node = OF_A_NODE if flags.devices.devices == "auto" else flags.devices.devices
    counts = _counts(own.sweep, of_a_node)
    size, micro_batches, _ = batch_sizes(flags, counts[0], 1)
    same = {
        "micro_batch_size": size,
        "gradient_accumulation_steps": micro_batches,
        "global_batch_size": None,
    }
    same["max_step"] = flags.training.max_step or 1  # hours are those of --tokens
    asked, memory_of = flags.fsdp.sharding_strategy, partial(_memory, {})
    names = ("FULL_SHARD" if asked == "HYBRID_SHARD" else asked, "HYBRID_SHARD")
    found = []
    for count in counts:
        nodes = max(1, count // of_a_node)
        for how in names if nodes > 1 else names[:1]:
            change = {
                **same,
                "devices": count // nodes,
                "num_nodes": nodes,
                "sharding_strategy": how,
            }
            found.append((count, how, predict(own, changed(flags, change), memory_of)))
    fewest = [seconds_of(prediction) for count, _, prediction in found if count == counts[0]]
    best = [min(column) for column in zip(*fewest)]
    return [
        Row(*one, *(first / now for first, now in zip(best, seconds_of(one[2])))) for one in found
    ]


def seconds_of(prediction: Prediction) -> tuple[float, float]:
    """(of a step, of one that hides no messages)"""
    return prediction.seconds.step, prediction.seconds.busy + prediction.seconds.messages


def _counts(asked: str, of_a_node: int) -> list[int]:
    """Numbers of devices, each twice the one before."""
    given = re.fullmatch(r"devices=(\d{1,7})\.\.(\d{1,7})", asked)
    first, last = map(int, given.groups()) if given else (0, 0)
    if not 1 <= first <= last:
        raise Fault(
            f"--sweep {asked!r} must be devices=FIRST..LAST, with FIRST from 1 to LAST, such as "
            "devices=8..4096."
        )
    counts = [first << number for number in range(last.bit_length()) if first << number <= last]
    if broken := [count for count in counts if count > of_a_node and count % of_a_node]:
        raise Fault(
            f"--sweep {asked}: {broken[0]} devices aren't whole nodes of {of_a_node}, which "
            "--devices sets."
        )
    return counts


def _memory(traced: dict[Any, Memory], work: Work) -> Memory:
    """As `predict_memory` has it for up to `TRACED` devices. Of a hybrid, each node holds the model once,
    and two are as many.

    traced: what was predicted before. What is split over n devices takes a + b / n bytes, while the
    peak is at the same moment: two traces give the rest. Where the moment changes, the larger trace
    is a little too much for more devices.
    """
    place, how = work.placement, work.placement.sharding.sharding_strategy

    def on(nodes: int) -> Memory:
        key = how, place.devices, nodes
        if key not in traced:
            traced[key] = predict_memory(replace(work, placement=replace(place, num_nodes=nodes)))
        return traced[key]

    most = max(2, TRACED // place.devices)
    if how == "HYBRID_SHARD" or place.num_nodes <= most:
        return on(2 if how == "HYBRID_SHARD" else place.num_nodes)
    fewer, more = on(most // 2), on(most)
    if fewer.moment != more.moment:
        return more
    beyond = (1 / most - 1 / place.num_nodes) / (1 / (most // 2) - 1 / most)
    parts = {
        name: size - int(beyond * (fewer.parts[name] - size)) for name, size in more.parts.items()
    }
    return replace(more, parts=parts)


def hidden(rows: list[Row]) -> dict[str, str]:
    """Of each way to shard, in words: from how many devices on messages take longer than
    computing."""
    said = {row.sharding: "messages are hidden behind computing" for row in rows}
    for row in reversed(rows):
        if row.prediction.seconds.step > row.prediction.seconds.busy:
            said[row.sharding] = f"messages aren't hidden from {row.devices:,} devices on"
    return said


def assumptions(own: Flags, rows: list[Row]) -> list[str]:
    """In sentences."""
    return [
        (
            "Weak scaling: each device has the same sequences a step on any number of devices, and "
            "the batch grows with them."
        ),
        f"Computing reaches {100 * rows[0].prediction.mfu:.0f} % of the peak (--mfu), and hides "
        "messages that take less time. Where none is hidden, the last column holds, which "
        "published runs are nearer to (docs/results/sweep.md).",
        (
            f"Messages have all {own.network:,.0f} Gbit/s of a node (--network), and take NCCL's "
            "time from device to device."
        ),
        (
            "No contention in the network, no device slower than the others, no failures, no "
            "evaluations or saves."
        ),
        (
            f"Memory on more than {TRACED} devices is computed from that on {TRACED} and on half "
            "of them."
        ),
    ]
