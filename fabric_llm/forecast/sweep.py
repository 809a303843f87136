"""`plan.py --sweep devices=8..4096`: one plan on more and more devices, each of which has the same
work, sharded in two ways."""

import re
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from fabric_llm.base.faults import Fault
from fabric_llm.base.flag import Flags
from fabric_llm.forecast.changes import changed
from fabric_llm.forecast.memory import Memory, Work, predict_memory
from fabric_llm.forecast.prediction import Prediction, predict
from fabric_llm.plan.start import batch_sizes

OF_A_NODE = 8  # devices of a node, where --devices is "auto"
# Devices: the more there are, the longer it takes to trace a step, half a minute for 4,096.
TRACED = 32


class Row(NamedTuple):
    """A plan on so many devices."""

    devices: int
    sharding: str
    prediction: Prediction
    # Tokens per second and device, as a fraction of the best on the fewest devices.
    efficiency: float
    none_hidden: float  # the same, if messages were sent while nothing is computed

    def cells(self, unit: tuple[str, int]) -> dict[str, str]:
        """{title of a column: what the row has there}: hours and money only where the length of the
        run, and a price, are known. unit: `Prediction.unit`, the same for all rows."""
        one = self.prediction
        used = "not known"
        if one.device_bytes:
            used = f"{100 * one.used:.0f} %"
        if not one.fits:
            used += ", no"
        known = {"hours": one.hours, "price": one.price}
        return {
            "devices": f"{self.devices:,}",
            "tokens a step": f"{one.tokens_a_step:,}",
            "sharding": self.sharding,
            unit[0]: f"{one.memory.peak / unit[1]:,.1f}",
            "used": used,
            "step, s": f"{one.seconds.step:.3g}",
            "messages, s": f"{one.seconds.messages:.3g}",
            "efficiency": f"{100 * self.efficiency:.0f} %",
            "none hidden": f"{100 * self.none_hidden:.0f} %",
            **{name: f"{number:,.2f}" for name, number in known.items() if number is not None},
        }


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
    # The work of a device stays the same, and the batch of a step follows from the number of
    # devices.
    same = {
        "micro_batch_size": size,
        "gradient_accumulation_steps": micro_batches,
        "global_batch_size": None,
    }
    # The dictionary is shared by all predictions, so that each step is traced once.
    memory_of = partial(_memory, {})
    asked = flags.fsdp.sharding_strategy
    # Two ways are compared: over all devices, and over those of a node.
    over_all = "FULL_SHARD" if asked == "HYBRID_SHARD" else asked
    predictions = []
    for count in counts:
        nodes = max(1, count // of_a_node)
        # On one node the hybrid is no other strategy.
        for how in [over_all] if nodes == 1 else [over_all, "HYBRID_SHARD"]:
            change: dict[str, Any] = {**same, "devices": count // nodes, "num_nodes": nodes}
            change["sharding_strategy"] = how
            predictions.append((count, how, predict(own, changed(flags, change), memory_of)))

    # On the fewest devices, of which each has the same work.
    fewest = [seconds_of(one) for count, _, one in predictions if count == counts[0]]
    best, best_of_none_hidden = (min(column) for column in zip(*fewest))
    rows = []
    for count, how, prediction in predictions:
        seconds, none_hidden = seconds_of(prediction)
        rows.append(Row(count, how, prediction, best / seconds, best_of_none_hidden / none_hidden))
    return rows


def seconds_of(prediction: Prediction) -> tuple[float, float]:
    """(of a step, of one that hides no messages)"""
    return prediction.seconds.step, prediction.seconds.busy + prediction.seconds.messages


def _counts(asked: str, of_a_node: int) -> list[int]:
    """Numbers of devices, each twice the one before."""
    match = re.fullmatch(r"devices=(\d{1,7})\.\.(\d{1,7})", asked)
    # Without a match the numbers are refused below, in the same sentence.
    first, last = 0, 0
    if match:
        first, last = int(match[1]), int(match[2])
    if not 1 <= first <= last:
        raise Fault(
            f"--sweep {asked!r} must be devices=FIRST..LAST, with FIRST from 1 to LAST, such as "
            "devices=8..4096."
        )
    counts = [first << number for number in range(last.bit_length()) if first << number <= last]
    # Nodes have equally many devices, so more than one node's must be a multiple.
    if broken := [count for count in counts if count > of_a_node and count % of_a_node]:
        raise Fault(
            f"--sweep {asked}: {broken[0]} devices aren't whole nodes of {of_a_node}, which "
            "--devices sets."
        )
    return counts


def _memory(traced: dict[Any, Memory], work: Work) -> Memory:
    """As `predict_memory` has it, of which at most `TRACED` devices are traced.

    traced: what was predicted before, by sharding strategy, devices of a node and nodes.
    """
    place = work.placement
    strategy = place.sharding.sharding_strategy
    # Of a hybrid each node holds the model once: two nodes are like many.
    if strategy == "HYBRID_SHARD":
        return _traced_on(traced, work, 2)
    # Nodes that are traced. At least two, so that the half of them is at least one.
    most = max(2, TRACED // place.devices)
    if place.num_nodes <= most:
        return _traced_on(traced, work, place.num_nodes)

    # What is split over n nodes takes a + b / n bytes, as long as the peak is at the same moment:
    # two traces give a and b. Where the moment changes, the larger trace is a little too much.
    half, whole = _traced_on(traced, work, most // 2), _traced_on(traced, work, most)
    if half.moment != whole.moment:
        return whole
    parts = {}
    for name, size in whole.parts.items():
        b = (half.parts[name] - size) / (1 / (most // 2) - 1 / most)
        parts[name] = size - int(b * (1 / most - 1 / place.num_nodes))
    return replace(whole, parts=parts)


def _traced_on(traced: dict[Any, Memory], work: Work, nodes: int) -> Memory:
    place = work.placement
    # What differs among the plans of a sweep. All else is the same.
    key = place.sharding.sharding_strategy, place.devices, nodes
    if key not in traced:
        traced[key] = predict_memory(replace(work, placement=replace(place, num_nodes=nodes)))
    return traced[key]


def hidden(rows: list[Row]) -> dict[str, str]:
    """{sharding: from how many devices on messages take longer than computing, in words}."""
    words = {row.sharding: "messages are hidden behind computing" for row in rows}
    # From the most devices down, so that the fewest at which it is so remain.
    for row in reversed(rows):
        if row.prediction.seconds.step > row.prediction.seconds.busy:
            words[row.sharding] = f"messages aren't hidden from {row.devices:,} devices on"
    return words


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
