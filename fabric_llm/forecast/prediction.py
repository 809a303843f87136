"""Flags and a config.json -> what a run needs: memory of device and host, disk, time and money.
Nothing is loaded or started."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from math import lcm
from pathlib import Path
from statistics import median
from typing import Any, Optional

import numpy as np

from fabric_llm.base import register
from fabric_llm.base.faults import Fault
from fabric_llm.base.flag import Flags
from fabric_llm.forecast import accelerators, reads, trace
from fabric_llm.forecast.accelerators import devices_of_node
from fabric_llm.forecast.memory import Memory, Work, predict_memory
from fabric_llm.mirror.fetch import local
from fabric_llm.model import (
    flops,
    freezing,
    language_model,
    loading,
    positions,
    strategy_rules,
    weights,
)
from fabric_llm.model import strategy as strategies
from fabric_llm.model.attention import resolve_attention
from fabric_llm.model.strategy_rules import Placement, Sharding
from fabric_llm.plan import checks
from fabric_llm.plan.model_plan import model_plan, require_shares
from fabric_llm.plan.plan import ModelPlan
from fabric_llm.plan.start import GIB_OF_A_RANK, batch_sizes
from fabric_llm.report import reading
from fabric_llm.training import adamw

GIB = 2**30
# Fractions of a device's memory above which a run doesn't fit, and may not fit (Fujii et al.,
# https://arxiv.org/abs/2411.06465).
NO, CLOSE = 0.95, 0.80
# The fraction of a step's operations that is computed a second time: a forward pass is a third.
RECOMPUTED = {"none": 0.0, "selective": 0.0, "full": 1 / 3, "offload": 1 / 3}
# What --cpu_offload keeps in the host's memory.
OFFLOADED = frozenset({trace.PARAMETERS, trace.GRADIENTS, trace.OPTIMIZER, trace.AVERAGE})


@dataclass(frozen=True)
class Prediction:
    """What a run needs. Bytes are of one device, of one node or of the disk, as their names say."""

    model: str
    parameters: int
    trained: int
    on: str  # strategy and devices, in words
    activation_checkpointing: str
    memory: Memory
    device_bytes: Optional[int]  # that a device has, None where that isn't known
    host_bytes: dict[str, int]  # of a node
    checkpoint_bytes: int
    kept_checkpoints: Optional[int]  # None: all, of a run of unknown length
    tokens_a_step: int  # of the longest rows, of which memory and `seconds` are as well
    done: int  # steps that a resumed run has behind it
    steps: Optional[int]  # the last one; None where neither flags nor a dataset say how many
    tokens: Optional[int]  # of the steps that are left, likewise
    hours: Optional[float]  # that these take
    flops_a_step: float
    mfu: float
    seconds: accelerators.Seconds
    link_bytes: float  # of a device, in a step
    network_bytes: float  # of a node, in a step
    price: Optional[float]
    assumed: str  # of the data and the optimizer, "" where all is known
    positions: Optional[int]  # that the model was made for, None where it doesn't say
    row_tokens: int  # of the longest rows

    @property
    def used(self) -> float:
        """The fraction of a device's memory that the peak needs; 0 where that isn't known."""
        return self.memory.peak / self.device_bytes if self.device_bytes else 0.0

    @property
    def unit(self) -> tuple[str, int]:
        """(name, bytes) of one unit for all sizes, so that they can be compared."""
        return ("GiB", GIB) if self.memory.peak >= 2 * GIB else ("MiB", 2**20)

    @property
    def left(self) -> Optional[int]:
        """Steps that are left, None where it isn't known how many."""
        return None if self.steps is None else max(self.steps - self.done, 0)

    @property
    def fits(self) -> bool:
        return self.used <= NO

    @property
    def state_fits(self) -> bool:
        """Whether the model and its optimizer leave room for activations."""
        # Below CLOSE, since some activations have to fit as well.
        return not self.device_bytes or self.memory.least <= CLOSE * self.device_bytes

    @property
    def verdict(self) -> str:
        if not self.fits:
            return "does not fit"
        return "fits" if self.used <= CLOSE else f"may not fit: above {100 * CLOSE:.0f} %"

    @property
    def up_to(self) -> str:
        """ "up to " before what a step takes, where stages have rows of other lengths."""
        whole_steps = self.tokens_a_step * ((self.left or 1) - 1)
        return "up to " if (self.tokens or whole_steps) < whole_steps else ""


def predict(
    own: Flags, flags: Flags, memory_of: Callable[[Work], Memory] = predict_memory
) -> Prediction:
    """own: the flags that plan.py alone has. memory_of: a sweep takes one that traces less. Raises
    ValueError and Fault in one sentence for what can't be planned."""
    here = reads.beginning(flags)
    # Devices, batches and model, as train.py would have them.
    device = accelerators.named(own, flags)
    placement = _place(flags, "cpu" if device.name == "CPU" else "cuda")
    is_cuda = placement.kind == "cuda"
    devices, nodes = placement.devices, placement.num_nodes
    micro_batch_size, micro_batches, batch = batch_sizes(flags, devices, nodes)
    # Called for its error, as a run would raise it.
    strategy_rules.offload(placement.strategy, flags.fsdp.cpu_offload, micro_batches)
    model, skeleton = _model(flags, placement.kind)
    datasets = reads.sizes(flags)
    context, assumed = reads.context_length(flags, datasets, model.config.get_text_config())
    steps, read = reads.rows_read(own, flags, datasets, context, batch, here)
    require_shares(placement.context_parallel, model, flags.model.attention, "rows", context)

    # Memory of a device, and of the host.
    average = None
    if flags.training.ema_decay is not None:
        average = flags.training.ema_device
    elsewhere = OFFLOADED if flags.fsdp.cpu_offload and is_cuda else frozenset()
    work = Work(placement, model, micro_batch_size, micro_batches, context, average, elsewhere)
    memory, parameters = memory_of(work), list(skeleton.parameters())

    # Time: what is computed, sent, and asked of the device.
    counted, tflops = flops.of_model(skeleton), device.tflops(devices)
    mfu = _mfu(own, device, tflops)
    link_bytes, network_bytes, latency = _sent(flags, work, skeleton)
    again, world = _recomputed(model.activation_checkpointing), placement.world_size
    # Links inside of a node and the network work at the same time, so the slower one counts.
    # Networks are in Gbit/s.
    messages = max(link_bytes / (device.link_gb * 1e9), network_bytes / (own.network * 1e9 / 8))
    operations = batch * counted.of_row(context)
    seconds = accelerators.Seconds(
        compute=operations * (1 + again) / (world * tflops * 1e12 * mfu),
        messages=messages + latency,
        hidden=flags.fsdp.backward_prefetch != "none",
        exchange=_exchange(own, device, work),
        launch=_launch(own, work, memory, parameters),
        is_host=not is_cuda,
    )

    # What isn't known stays None.
    device_gib = device.memory_gib if own.device_memory is None else own.device_memory
    hours = tokens = price = None
    if steps is not None:
        hours = _hours(seconds, counted, context, batch, read)
        tokens = sum(rows * length for length, rows in read.items())
        price = own.price_per_hour and own.price_per_hour * world * hours
    return Prediction(
        model=type(skeleton).__name__,
        parameters=sum(p.numel() for p in parameters),
        trained=sum(p.numel() for p in parameters if p.requires_grad),
        on=f"{placement.strategy} on {nodes} x {devices} {device.name}",
        activation_checkpointing=model.activation_checkpointing,
        memory=memory,
        device_bytes=None if device_gib is None else int(device_gib * GIB),
        host_bytes=_host(flags, work, skeleton, memory),
        checkpoint_bytes=adamw.checkpoint_bytes(parameters, model.bf16_updates, average),
        kept_checkpoints=_kept_checkpoints(flags, steps),
        tokens_a_step=batch * context,
        done=here.step,
        steps=steps,
        tokens=tokens,
        hours=hours,
        flops_a_step=operations,
        mfu=mfu,
        seconds=seconds,
        link_bytes=link_bytes,
        network_bytes=network_bytes,
        price=price,
        assumed=_with_optimizer(reads.with_mirror(flags, here, assumed)),
        positions=positions.length(model.config.get_text_config()),
        row_tokens=context,
    )


def _hours(
    seconds: accelerators.Seconds,
    counted: flops.Flops,
    context: int,
    batch: int,
    read: dict[int, int],
) -> float:
    """Of a run that reads so many rows of each length. seconds: of a step with rows of `context`
    tokens."""
    total = 0.0
    for length, rows in read.items():
        # Stages with shorter rows have shorter steps, and the last step may have fewer rows.
        less = counted.of_row(length) / counted.of_row(context)
        exchange = seconds.exchange * length / context
        of_step = replace(seconds, compute=seconds.compute * less, exchange=exchange)
        total += rows / batch * of_step.step
    return total / 3600


def _launch(own: Flags, work: Work, memory: Memory, parameters: list[Any]) -> float:
    """Seconds that the host takes in a step to ask the device for its operations."""
    # The speed of a run that --like names includes what the host takes.
    if own.like:
        return 0.0
    launch = accelerators.DISPATCH * memory.operations * work.micro_batches
    if work.placement.kind == "cuda":
        launch += accelerators.UPDATE * sum(p.requires_grad for p in parameters)
    return launch


def _sent(flags: Flags, work: Work, skeleton: Any) -> tuple[float, float, float]:
    """What is sent in a step: (bytes of a device inside a node, bytes of a node over the network,
    seconds that it takes whatever is sent)."""
    placement, model, micro_batches = work.placement, work.model, work.micro_batches
    parameters = list(skeleton.parameters())
    # Weights are gathered in the dtype that they compute in.
    is_wide = model.precision == "32-true"
    gathered = sum(p.numel() for p in parameters) * (4 if is_wide else 2)
    element_bytes = parameters[0].element_size()
    is_sharded = placement.strategy in ("fsdp", "fsdp2")
    # FSDP reduces gradients in --reduce_dtype, and DDP in the dtype of the weights.
    if is_wide or (is_sharded and flags.fsdp.reduce_dtype == "float32"):
        element_bytes = 4
    reduced = element_bytes * sum(p.numel() for p in parameters if p.requires_grad)
    # Backward passes of a step that reduce gradients.
    syncs = 1
    if strategies.syncs_every_micro_batch(placement.strategy, model.sums_in_float32):
        syncs = micro_batches
    # Each layer is a message of its own, and what is outside of layers is one more.
    units = len(weights.repeated_layers(skeleton)) + 1
    sent = accelerators.message_bytes(placement, gathered, reduced, syncs, micro_batches)
    return *sent, accelerators.latency(placement, units, syncs, micro_batches)


def _exchange(own: Flags, device: Any, work: Work) -> float:
    """Seconds of a step in which ranks that share rows exchange them."""
    placement, sharing = work.placement, work.placement.context_parallel
    if sharing == 1:
        return 0.0
    # A forward pass is a third of the operations.
    passes = 2 + 3 * _recomputed(work.model.activation_checkpointing)
    text_config = work.model.config.get_text_config()
    tokens = work.micro_batch_size * work.micro_batches * work.context_length // sharing
    exchanged = accelerators.exchanged_bytes(text_config, sharing, tokens, passes)
    if sharing <= placement.devices:
        return exchanged / (device.link_gb * 1e9)
    # The devices of a node share its network.
    return exchanged / (own.network * 1e9 / 8 / placement.devices)


def _kept_checkpoints(flags: Flags, steps: Optional[int]) -> Optional[int]:
    """How many there are at most. None where that grows with steps of which nobody knows how
    many."""
    save = flags.save
    interval, kept = save.save_step_interval, save.keep_last
    if interval is None:
        return 1
    if steps is None and save.keep_every:
        return None
    if kept is not None:
        kept += save.keep_best
        kept += flags.evaluation.forgetting_action == "rewind"  # one to go back to
    if steps is None:
        return kept
    # A run also saves after its last step.
    saves = 1 + (steps - 1) // interval
    if kept is None:
        return saves
    # --keep_last counts those that were due, and the newest of all stays as well.
    kept += steps % interval > 0
    if save.keep_every:
        # Only a step at which the run saves can be kept for good.
        kept += steps // lcm(interval, save.keep_every)
    return min(saves, kept)


def _place(flags: Flags, kind: str) -> Placement:
    """The devices that the flags name, which needn't be here."""
    fsdp, devices = flags.fsdp, devices_of_node(flags)
    sharding = Sharding(**{f.name: getattr(fsdp, f.name) for f in fields(Sharding)})
    world = devices * flags.devices.num_nodes
    if flags.devices.tpu:
        raise Fault("--tpu true can't be planned: what XLA keeps isn't known.")
    name = strategy_rules.strategy(
        fsdp.strategy, world, False, flags.model.precision, kind, sharding
    )
    return Placement(
        name, sharding, devices, flags.devices.num_nodes, kind, flags.devices.context_parallel
    )


def _recomputed(activation_checkpointing: str) -> float:
    """The fraction of a step's operations that is computed a second time."""
    every = activation_checkpointing.removeprefix("every:")
    return RECOMPUTED[every] if every in RECOMPUTED else 1 / 3 / int(every)


def _mfu(own: Flags, device: accelerators.Accelerator, tflops: float) -> float:
    """The fraction of the device's peak, `tflops`, that is reached: given, of a run, or assumed.
    Raises Fault."""
    if own.like is None:
        return own.mfu or device.mfu
    mfu = tflops_of(Path(local(own.like, only_logs=True))) / tflops
    if own.mfu is not None:
        raise Fault("--mfu and --like both say how fast a device is: take one of them.")
    # The peak of a CPU is a guess, which a run may exceed.
    if mfu > 1 and device.name != "CPU":
        raise Fault(
            f"--like {own.like!r} was {mfu:.2f} times as fast as the peak of {device.name}: see "
            "--accelerator_name."
        )
    return mfu


def tflops_of(run: Path) -> float:
    """10^12 operations a second and device that a run has reached, with those that it recomputed.
    Raises Fault.

    The median of the logged steps since its last start but the first, during which it compiled.
    """
    read, reached = reading.read_run(run), []
    speeds, asked = (
        read.number("model_tflops_per_device"),
        read.flags.get("activation_checkpointing"),
    )
    starts = [0] + [e.get("step", 0) for e in read.events if e["event"] in ("started", "resumed")]
    # Earlier starts may have had other devices, and count only if the last one was too short.
    while speeds is not None and starts and not reached:
        own = speeds.values[speeds.steps > starts.pop()]
        reached = own[np.isfinite(own)][1:].tolist()
    if not reached or asked is None:
        raise Fault(
            f"--like {str(run)!r}: its metrics.jsonl has no speed of two logged steps, or its "
            "arguments.yaml no activation_checkpointing."
        )
    # The log counts the operations of the model alone, and `Seconds` also those that are repeated.
    return median(reached) * (1 + _recomputed(checks.activation_checkpointing(asked)))


def _with_optimizer(assumed: str) -> str:
    """What was assumed of the data, and of an optimizer of --code, whose state isn't known."""
    words = "the state of AdamW for the optimizer of --code"
    return "; ".join(filter(None, [assumed, words * ("optimizer" in register.ONLY)]))


def _model(flags: Flags, kind: str) -> tuple[ModelPlan, Any]:
    """(how the model trains, the model without memory), as make_plan.py has it where all that can
    be measured is well."""
    asked = flags.model
    if asked.rope is not None:
        positions.parse(asked.rope)
    if asked.model_name is None:
        raise Fault(
            "--model_name is missing: a plan needs the folder of a config.json, or a name on the "
            "hub."
        )
    config = loading.load_config(asked.model_name)
    if (quantized := loading.quantized(config)) is not None:
        raise Fault(f"The weights of {asked.model_name!r} are {quantized}.")
    # Packed attention is what a run chooses where its checks succeed, which is assumed here.
    packs = asked.attention in ("auto", "packed") and flags.data.document_masking is not False
    # The package of flash attention needn't be installed here. SDPA takes the same memory.
    attention = asked.attention.replace("flash_attention_2", "auto")
    names = [*["packed"] * packs, attention]
    dtype = loading.DTYPES[asked.precision]
    # Some classes take only an attention of their own, so a name that is refused isn't the end.
    for name in names:
        try:
            config._attn_implementation = resolve_attention(config, name, kind)
            skeleton = loading.checked_skeleton(asked.model_name, config, dtype)
            break
        except ValueError:
            if name == names[-1]:
                raise
    model = model_plan(flags, config, skeleton, kind)
    freezing.freeze(skeleton, model.frozen)
    # As a run does: chunked where the model's head can be told apart, unless flags say otherwise.
    loss = "full" if asked.loss == "full" else "chunked"
    try:
        language_model.LanguageModel(skeleton, chunked=loss == "chunked")
    except ValueError as error:
        if asked.loss == "chunked":
            raise Fault(f"--loss chunked: {error}; take --loss auto.") from None
        loss = "full"
    return replace(model, loss=loss), skeleton


def _host(flags: Flags, work: Work, skeleton: Any, memory: Memory) -> dict[str, int]:
    """Bytes of a node's memory, by what they are for (docs/fsdp.md, "Models larger than a
    host")."""
    placement, model, average = work.placement, work.model, work.ema_device
    ranks, parameters = placement.devices, dict(skeleton.named_parameters())
    is_cuda = placement.kind == "cuda"

    # Over how many ranks the model is split.
    world = placement.world_size
    shards = {"NO_SHARD": 1, "HYBRID_SHARD": ranks}.get(placement.sharding.sharding_strategy, world)
    if placement.strategy in ("ddp", "single"):
        shards = 1

    host = {"processes (assumed)": int(ranks * GIB_OF_A_RANK[placement.kind] * GIB)}
    # On a CPU the device's memory is the host's.
    if not is_cuda:
        host["what devices hold"] = ranks * memory.peak
    largest = 0
    for names in weights.units(skeleton).values():
        held = sum(parameters[name].nbytes for name in names if name in parameters)
        largest = max(largest, held)
    host["one layer, while it loads or saves"] = largest
    if memory.elsewhere:
        host["offloaded"] = ranks * sum(memory.elsewhere.values())
    if average == "host":
        trained = sum(p.numel() for p in parameters.values() if p.requires_grad)
        host["moving average"] = ranks * 4 * trained // shards
    if flags.save.async_save:
        whole = adamw.checkpoint_bytes(parameters.values(), model.bf16_updates, average)
        # Of replicas each rank copies a part.
        copied_by = world if shards == 1 else shards
        host["copies for --async_save"] = ranks * whole // copied_by
    # Rank 0 has the whole model on its CPU to compare with, if there is room.
    if flags.model.verify_start:
        whole = sum(p.nbytes for p in parameters.values())
        host["reference, before step 1 (less where less is free)"] = whole
    if model.activation_checkpointing == "offload" and is_cuda:
        element_bytes = 4 if model.precision == "32-true" else 2
        width = model.config.get_text_config().hidden_size
        tokens = ranks * work.micro_batch_size * work.context_length // placement.context_parallel
        layers = len(weights.repeated_layers(skeleton))
        host["inputs of layers"] = tokens * width * element_bytes * layers
    return host
