"""What to change in flags, as data: `until_it_fits`, the cheapest first, and `fastest`, of those
that fit."""

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from functools import partial
from math import gcd
from typing import Any, Optional

from fabric_llm.base.flag import Flags
from fabric_llm.forecast.accelerators import devices_of_node
from fabric_llm.forecast.prediction import CLOSE, Prediction, predict
from fabric_llm.plan.checks import activation_checkpointing
from fabric_llm.plan.start import batch_sizes

WORTH_IT = 0.98  # of the memory before: what saves less isn't worth its time
Change = dict[str, Any]  # flag name -> its new value
Found = tuple[Change, Prediction]  # with the change
# Kinds of --activation_checkpointing: each keeps less in memory than the one before, and takes more
# time.
LESS_AND_LESS = ("none", "selective", "every:2", "full", "offload")
MAX_TRIES = 32  # of `fastest`, each of which takes seconds


def changed(flags: Flags, change: Change) -> Flags:
    """The flags with other values."""
    # Flags are dataclasses of groups, and a change doesn't say in which group a flag is.
    groups = {}
    for field in fields(flags):
        group = getattr(flags, field.name)
        if is_dataclass(group) and not isinstance(group, type):
            names = vars(group).keys() & change.keys()
            groups[field.name] = replace(group, **{name: change[name] for name in names})
    return replace(flags, **groups)


def words_of(change: Change) -> list[str]:
    """A change as the command line has it."""
    words = []
    for name, value in change.items():
        words += [f"--{name}", str(value)]
    return words


def until_it_fits(
    own: Flags, flags: Flags, prediction: Prediction
) -> list[tuple[list[str], Prediction]]:
    """[(a change in words, the prediction with it and those before)], the cheapest first, each with
    less memory than the one before.

    The last one is the first that takes less than `CLOSE` of a device or, if none does, the first
    that fits, and [] where the flags fit already. None may fit.
    """
    changes: list[tuple[list[str], Prediction]] = []
    fits_already = prediction.fits
    # As long as the model and its optimizer alone don't fit, fewer activations can't help.
    for number, remedies in enumerate([*OF_THE_STATE, _of_activations, *OF_THE_STATE]):
        for change in remedies(flags):
            if number < len(OF_THE_STATE) and prediction.state_fits:
                break
            # A change that hardly helps by itself isn't kept, since it costs time.
            tried = _attempt(own, changed(flags, change))
            if tried is None or tried.memory.peak > WORTH_IT * prediction.memory.peak:
                continue
            flags, prediction = changed(flags, change), tried
            changes.append((words_of(change), prediction))
            if prediction.used <= CLOSE:
                return changes
    # No change was enough for `CLOSE`, so the first that fits at all ends the list.
    if fits_already:
        return []
    for number, (_, one) in enumerate(changes, 1):
        if one.fits:
            return changes[:number]
    return changes


def fastest(
    own: Flags, flags: Flags, tell: Callable[[Change, Prediction], None]
) -> Optional[Found]:
    """(change, the prediction with it) of the shortest step that takes less than `CLOSE` of a
    device; None if none does.

    Checkpointing that recomputes more comes later, and of each kind micro-batches are doubled while
    they fit, up to the whole batch of a device. Of equally fast steps the first kind wins, with its
    largest micro-batch. At most `MAX_TRIES` are looked at, of each of which `tell` is told.
    """
    found: list[Found] = []
    best, tries = None, 0
    for checkpointing in LESS_AND_LESS:
        for sharding in _shardings(flags):
            fits: list[Found] = []  # the largest micro-batch first
            for batch in _double_batches(flags):
                change = {"activation_checkpointing": checkpointing, **sharding, **batch}
                if tries == MAX_TRIES or (tried := _attempt(own, changed(flags, change))) is None:
                    break
                tries += 1
                tell(change, tried)
                # Larger micro-batches need still more memory.
                if tried.used > CLOSE:
                    break
                fits.insert(0, (change, tried))
            found += fits
        # Of equally fast ones the first.
        best = min(found, key=lambda one: one[1].seconds.step, default=None)
        if best is not None and best[1].seconds.step == best[1].seconds.busy:
            # No message is waited for, and the kinds that follow only compute more.
            break
    return best


def _shardings(flags: Flags) -> list[Change]:
    """Ways to shard over the devices, that of the flags first."""
    _, _, devices, nodes = _sizes(flags)
    asked = flags.fsdp.sharding_strategy
    if devices * nodes == 1:
        # One device has nothing to shard.
        return [{}]
    # dict.fromkeys below drops the second of two equal names and keeps the order.
    names = [asked, "FULL_SHARD", "SHARD_GRAD_OP", *["HYBRID_SHARD"] * (nodes > 1)]
    shardings: list[Change] = [{"sharding_strategy": name} for name in dict.fromkeys(names)]
    if flags.fsdp.strategy != "ddp":
        return shardings
    return [{"strategy": "ddp"}, *({"strategy": "fsdp", **one} for one in shardings)]


def _double_batches(flags: Flags) -> Iterator[Change]:
    """Micro-batches of the same batch, from the smallest on."""
    size, batch, devices, nodes = _sizes(flags)
    # From the odd number on, so that doubling it comes past the micro-batch that was asked for.
    while size % 2 == 0:
        size //= 2
    while change := _of_the_same_batch(flags, size, devices * nodes):
        yield change
        size *= 2


def _attempt(own: Flags, flags: Flags) -> Optional[Prediction]:
    """None for flags that don't go together."""
    try:
        return predict(own, flags)
    except ValueError:
        return None


def _sizes(flags: Flags) -> tuple[int, int, int, int]:
    """(sequences of a micro-batch, sequences of a step, devices of a node, nodes)."""
    devices, nodes = devices_of_node(flags), flags.devices.num_nodes
    size, _, batch = batch_sizes(flags, devices, nodes)
    return size, batch, devices, nodes


def _of_the_same_batch(
    flags: Flags, size: int, world_size: int, sharing: Optional[int] = None
) -> Change:
    """Micro-batches of `size` sequences, and as many of them as keep a step's; {} where these don't
    divide.

    sharing: ranks that share each row; None: as many as the flags say.
    """
    batch = _sizes(flags)[1]
    groups = world_size // (sharing or flags.devices.context_parallel)  # each reads other rows
    # The batch belongs to what is trained, which a change must leave as it is.
    count, rest = divmod(batch, size * groups)
    if rest:
        return {}
    return {
        "micro_batch_size": size,
        "gradient_accumulation_steps": count,
        "global_batch_size": batch,
    }


def _on_more(flags: Flags, world_size: int) -> Change:
    """The largest micro-batches, of those that the present ones can be divided into, that keep a
    step's batch on so many devices.

    {} where none do.
    """
    size, batch, _, _ = _sizes(flags)
    rows = batch // (world_size // flags.devices.context_parallel)  # that each group reads
    return _of_the_same_batch(flags, gcd(size, rows), world_size)


def _of_activations(flags: Flags) -> Iterator[Change]:
    fsdp = flags.fsdp
    if flags.model.loss == "full":
        yield {"loss": "chunked"}
    size, _, devices, nodes = _sizes(flags)
    # Smaller micro-batches mean more of them, which FSDP1 can't accumulate with offloading.
    while size > 1 and not fsdp.cpu_offload:
        # The largest divisor of at most a half, so that the batch stays the same.
        size = next(divisor for divisor in range(size // 2, 0, -1) if size % divisor == 0)
        yield _of_the_same_batch(flags, size, devices * nodes)
    # Recomputing takes time, so it comes after what costs next to nothing.
    checkpointing = activation_checkpointing(fsdp.activation_checkpointing)
    if checkpointing == "none":
        yield {"activation_checkpointing": "selective"}
    if checkpointing not in ("full", "offload"):
        yield {"activation_checkpointing": "full"}
    if checkpointing != "offload":
        yield {"activation_checkpointing": "offload"}
    # Proposed inside of a node only, since every layer waits for the exchange.
    for sharing in (2, 4, 8):
        if devices % sharing == 0 and sharing > flags.devices.context_parallel:
            yield {
                "context_parallel": sharing,
                **_of_the_same_batch(flags, size, devices * nodes, sharing),
            }


def _of_the_state(flags: Flags) -> Iterator[Change]:
    if flags.fsdp.strategy == "ddp":
        yield {"strategy": "fsdp"}
    if flags.fsdp.sharding_strategy != "FULL_SHARD":
        yield {"sharding_strategy": "FULL_SHARD"}
    # A resumed run keeps its precision.
    if flags.model.precision != "bf16-true" and not flags.checkpoint.resume:
        yield {"precision": "bf16-true"}


def _more_devices(flags: Flags, count: int) -> Iterator[Change]:
    _, _, devices, nodes = _sizes(flags)
    if count > devices:
        same = _on_more(flags, count * nodes)
        # 3 and 6 devices are unusual, and only proposed where the batch divides.
        if same or count % 3:
            yield {"devices": count, **same}


def _more_nodes(flags: Flags) -> Iterator[Change]:
    _, _, devices, nodes = _sizes(flags)
    for count in (2, 4, 8, 16):
        if count > nodes:
            yield {"num_nodes": count, **_on_more(flags, devices * count)}


# Each with the flags that it finds: micro-batches may be smaller after the one before.
DEVICES = [partial(_more_devices, count=count) for count in (2, 3, 4, 6, 8)]
OF_THE_STATE: list[Callable[[Flags], Any]] = [_of_the_state, *DEVICES, _more_nodes]
