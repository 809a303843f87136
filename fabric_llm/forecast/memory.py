"""How many bytes a rank needs, of what, and at which moment of a step it needs most.

`predict_memory` makes a step without memory (trace.py). What a GPU needs besides is assumed:
`CONTEXT_BYTES` and `SLACK`.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, Optional
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.distributed.fsdp import _flat_param
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AttentionInterface
from transformers.integrations import moe
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface

from fabric_llm.base.faults import one_line
from fabric_llm.forecast import trace
from fabric_llm.forecast.compiled import CompiledLayers
from fabric_llm.model import (
    chunked_loss,
    context_parallel,
    freezing,
    gate,
    language_model,
    layers,
    loading,
    offload,
    packed_attention,
    sharded,
    strategy,
    tiles,
    weights,
)
from fabric_llm.model.flops import windows
from fabric_llm.model.strategy_rules import Placement, wrap_size
from fabric_llm.plan.plan import ModelPlan
from fabric_llm.training import adamw, ema, step

AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
CONTEXT_BYTES = 2**30  # assumed: a CUDA context with NCCL's and cuBLAS's buffers
SLACK = 0.03  # assumed: fraction of the peak that the caching allocator loses in its blocks
LONG = 2**16  # tokens of a row, above which each further token adds the same bytes
MAX_MASKED = 2**20  # the longest row of a model whose attention makes a mask of the row
# Keys beside the moments of a step: ELSEWHERE has the most that the host holds at any of them, and
# in there OPERATIONS has the number of operations of a micro-batch.
OPERATIONS = "operations"
UPDATE = "the update"  # the last moment of a step
ELSEWHERE = "elsewhere"
# SDPA of causal rows without a mask, which transformers would make wherever it sees fake tensors.
UNMASKED = "unmasked"
AttentionInterface.register(UNMASKED, sdpa_attention_forward)
AttentionMaskInterface.register(UNMASKED, lambda *args, **more: None)


@dataclass(frozen=True)
class Work:
    """What the memory of a step depends on."""

    placement: Placement
    model: ModelPlan
    micro_batch_size: int  # sequences
    micro_batches: int  # of a step and device
    context_length: int  # tokens
    ema_device: Optional[str]  # host or same, None without an average
    elsewhere: frozenset[str] = frozenset()  # labels of trace.py: what is in the host's memory


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank on its device."""

    parts: dict[str, int]  # at the peak
    moment: str  # of the peak
    # Bytes at the update, when no activation is there: no way of recomputing makes a step smaller.
    least: int
    # {label: the most bytes that are in the host's memory instead}.
    elsewhere: dict[str, int]
    operations: int  # operations that the host launches for a micro-batch

    @property
    def peak(self) -> int:
        return sum(self.parts.values())


def predict_memory(work: Work) -> Memory:
    """The memory of the rank that needs most. It is computed without taking that memory, in a
    process that isn't a rank of a run.

    Raises ValueError where the model's code looks at the values of tensors, which aren't there.
    """
    moments = _moments(work)
    # Both are no moments of a step, so they mustn't count in the search for the peak.
    most = moments.pop(ELSEWHERE)
    operations = most.pop(OPERATIONS)
    for held in moments.values():
        # The peak is the device's, so what is offloaded to the host doesn't count.
        for label in [*held]:
            if not held[label] or label in work.elsewhere:
                del held[label]
    peak = max(moments, key=lambda name: moments[name].total())
    if work.placement.kind == "cuda":
        # A set, so that the slack is added once where the update is the peak.
        for moment in {peak, UPDATE}:
            held = moments[moment]
            held["allocator's slack (assumed)"] = int(SLACK * held.total())
            held["CUDA context (assumed)"] = CONTEXT_BYTES
    return Memory(dict(moments[peak]), peak, moments[UPDATE].total(), dict(most), operations)


Moments = dict[str, Counter[str]]  # moment of a step -> bytes at its peak, by label


def _moments(work: Work) -> Moments:
    """What `_traced_step` would give for all layers and the whole row, extrapolated from steps with
    few layers and shorter rows."""
    shortest = LONG * work.placement.context_parallel
    if (context := work.context_length) > shortest:
        # Each token more takes as much as the one before, unless rows have masks.
        attention = _traced(work.model.config, context)._attn_implementation
        if attention != UNMASKED and context > MAX_MASKED:
            raise ValueError(
                f"{work.model.name!r} can't be planned with --context_length {context}: its "
                "attention here makes a mask of each row, which is planned up to "
                f"{MAX_MASKED:,} tokens."
            )
        # Two shorter rows give what each token adds.
        half = _moments(replace(work, context_length=shortest // 2))
        whole = _moments(replace(work, context_length=shortest))
        return _extrapolated(half, whole, (context - shortest // 2) / (shortest - shortest // 2))
    # Units of at least so many parameters are others where there are fewer layers.
    if wrap_size(work.placement.sharding.auto_wrap_policy) is not None:
        return _traced_step(work)
    kinds = []
    for name, layer in weights.repeated_layers(_skeleton(work)).items():
        # Only what is in a list can be removed, which its name says.
        is_listed = name.rpartition(".")[2].isdigit()
        kinds.append(trace.kind(layer) if is_listed else name)
    cut = trace.longest_cut(kinds)
    if cut is None:
        return _traced_step(work)
    # Both steps are cheap, since most layers are left out. Their difference is what a group adds.
    fewest = _traced_step(work, cut.numbers())
    one_group_more = _traced_step(work, cut.numbers()[cut.period :])
    return _extrapolated(fewest, one_group_more, cut.times)


def _extrapolated(moments: Moments, more: Moments, times: float) -> Moments:
    """`moments`, with the difference between `more` and them added `times` times."""
    result = {}
    for moment, held in moments.items():
        result[moment] = Counter(held)
        for label in held.keys() | more[moment].keys():
            result[moment][label] += int(times * (more[moment][label] - held[label]))
    return result


def _traced_step(work: Work, without: Collection[int] = ()) -> Moments:
    """{moment of a step: what is held at its peak, by label}, and the most that is elsewhere.
    without: numbers of layers."""
    placement = work.placement
    # What `strategy.wrap` asks of Fabric, without its process group and devices.
    fabric = SimpleNamespace(
        device=torch.device("cpu"),
        world_size=placement.world_size,
        strategy=SimpleNamespace(num_processes=placement.devices),
        setup_module=lambda model, move_to_device: model,
    )
    skeleton = _skeleton(work)
    trace.remove_layers(skeleton, without)
    if work.model.tiled_mlp:
        # Outside of the ledger, since no run has the model that is tried for it.
        with FakeTensorMode(allow_non_fake_inputs=True):
            tiles.tile(skeleton, tiled_modules(skeleton, without))
    ledger = trace.Ledger(placement.kind == "cpu", work.elsewhere)
    with (
        _ranks(placement.world_size),
        _as_on_devices(work, fabric),
        _sharing(placement.context_parallel),
    ):
        try:
            with FakeTensorMode(allow_non_fake_inputs=True), ledger.resizes(), ledger:
                _step(work, skeleton, without, fabric, ledger)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise ValueError(
                f"{work.model.name!r} can't be planned: its code depends on the tokens ({error})."
            ) from error
        except RuntimeError as error:
            message = one_line(error)[:200].rstrip(".")
            raise ValueError(
                f"{work.model.name!r} can't be planned: its code can't run here: {message}."
            ) from error
    moments = {ELSEWHERE: ledger.most}
    for moment, (_, held) in ledger.peaks.items():
        moments[moment] = held
        # Only where they are offloaded are activations of layers apart from others.
        if trace.LAYERS not in work.elsewhere:
            held[trace.ACTIVATIONS] += held.pop(trace.LAYERS, 0)
    ledger.most[OPERATIONS] = ledger.operations
    return moments


def _skeleton(work: Work) -> Any:
    """The model, without memory, as it trains."""
    model_plan = work.model
    dtype = loading.DTYPES[model_plan.precision]
    try:
        skeleton = loading.build_skeleton(_traced(model_plan.config, work.context_length), dtype)
    except KeyError:  # a class that knows its own kinds of attention alone, such as Falcon's
        skeleton = loading.build_skeleton(model_plan.config, dtype)
    freezing.freeze(skeleton, model_plan.frozen)
    layers.checkpoint_activations(skeleton, model_plan.activation_checkpointing)
    return skeleton


def _step(
    work: Work, skeleton: Any, without: Collection[int], fabric: Any, ledger: trace.Ledger
) -> None:
    """The calls of the loop in train.py that take memory, in its order."""
    name, model_plan = work.placement.strategy, work.model
    is_cuda = work.placement.kind == "cuda"

    # The model, wrapped.
    model = language_model.LanguageModel(skeleton, chunked=model_plan.loss == "chunked")
    # Only a GPU's loss is compiled, see run/build.py.
    if model_plan.compiles and is_cuda and model_plan.loss == "chunked":
        model.token_loss = _CompiledLoss.apply
    else:
        model.token_loss = model.cross_entropy  # a loss of --code may not take fake tensors
    _fill_buffers(model)
    offloads = is_cuda and model_plan.activation_checkpointing == "offload"
    compiled = CompiledLayers(ledger, offloads) if model_plan.compiles else None
    # Before the model is wrapped, which gives layers other classes and other parameters.
    followed = trace.Layers(skeleton, ledger, without, compiled)
    wrapped = strategy.wrap(
        fabric, name, model, lambda model: None, model_plan.precision, work.placement.sharding
    )
    followed.wrapped = wrapped
    trained = [parameter for parameter in wrapped.parameters() if parameter.requires_grad]

    # What is there in each step besides.
    ledger.label = trace.OPTIMIZER
    optimizer = adamw.AdamW([{"params": trained}], lr=1e-3, updates=model_plan.bf16_updates)
    if work.ema_device == "same":
        ledger.label = trace.AVERAGE
        optimizer.average = ema.Average(optimizer, decay=0.999, device="same", every=1, seed=0)
    ledger.label = trace.BATCH
    shape = work.micro_batch_size, work.context_length // work.placement.context_parallel
    batch = {key: torch.zeros(shape, dtype=torch.long) for key in ("input_ids", "labels")}
    count = min(work.micro_batches, 2)  # from the second on all are alike
    sums = None
    if model_plan.sums_in_float32 and count == 2:
        # The first micro-batch leaves nothing but these.
        ledger.label, count = trace.SUMS, 1
        sums = _zero_sums(wrapped)
    syncs = strategy.syncs_every_micro_batch(name, sums is not None)
    number = 0  # of the micro-batch
    if name == "ddp":
        ledger.label = trace.GRADIENTS
        _keep_in_buckets(trained, lambda: syncs or number == count - 1)

    # Forward and backward, and the update.
    # Building the model isn't a moment of the step.
    ledger.peaks.clear()
    forward: Any = nullcontext()
    if model_plan.precision in AUTOCAST:
        forward = torch.autocast("cpu", AUTOCAST[model_plan.precision])
    for number in range(count):
        ledger.label, followed.is_forward, ledger.operations = trace.ACTIVATIONS, True, 0
        with forward:
            loss = wrapped(**batch)
        loss.backward()
        followed.mark_gradients()
    if sums is not None:
        ledger.label, ledger.moment = trace.SUMS, "the last sum of gradients"
        sums.add(last=True)
    ledger.label, ledger.moment = trace.OPTIMIZER, UPDATE
    widest = max((sharded.local_part(parameter).numel() for parameter in trained), default=0)
    torch.empty(min(widest, gate.SQUARED_AT_ONCE), dtype=torch.float64)  # of the gradient norm


def _zero_sums(wrapped: nn.Module) -> step.GradientSums:
    """Sums of gradients as the first micro-batch leaves them."""
    sums = step.GradientSums(wrapped.parameters())
    for number, parameter in enumerate(sums.parameters):
        if parameter.requires_grad:
            zeros = torch.zeros_like(sharded.local_part(parameter), dtype=torch.float32)
            sums.sums[number] = zeros
    return sums


def tiled_modules(skeleton: Any, without: Collection[int] = ()) -> list[str]:
    """The names of the modules that --tiled_mlp tiles. On fake tensors nothing tells whether they
    have dropout, so it is assumed that they don't. without: layers that `skeleton` lacks."""
    # A model of its own: `skeleton` has to stay on the meta device until it is wrapped.
    probe = loading.build_skeleton(skeleton.config, skeleton.dtype)
    trace.remove_layers(probe, without)
    for module in probe.modules():
        weights.replacing(lambda meta: torch.empty_like(meta, device="cpu"))(module)
    _fill_buffers(probe)
    return list(tiles.found_in(probe, measures=False))


def _fill_buffers(model: nn.Module) -> None:
    for module in model.modules():
        for key, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[key] = torch.empty(buffer.shape, dtype=buffer.dtype)


def _traced(config: Any, context_length: int) -> Any:
    """The configuration with an attention that can be traced and takes the memory of the run's.

    A CPU's SDPA keeps what a GPU's flash kernels and packed attention keep: queries, keys, values,
    the output, a number a query.
    """
    seen = [window for window in windows(config.get_text_config()) if window is not None]
    sees_whole_rows = all(window >= context_length for window in seen)
    # The plan's own configuration still says which attention the run has.
    config = deepcopy(config)
    is_packed = config._attn_implementation in (packed_attention.PACKED, "flash_attention_2")
    # A window shorter than the row needs a mask in SDPA, and none in packed attention.
    if is_packed or (config._attn_implementation == "sdpa" and sees_whole_rows):
        config._attn_implementation = UNMASKED
    return config


def _keep_in_buckets(trained: list[nn.Parameter], syncs: Callable[[], bool]) -> None:
    """Imitate DistributedDataParallel, which has buckets for all gradients from its first step on,
    and moves gradients into them in a backward pass that syncs."""
    buckets = {parameter: torch.empty_like(parameter) for parameter in trained}

    def move(parameter: nn.Parameter) -> None:
        if syncs():
            parameter.grad = buckets[parameter]

    for parameter in trained:
        parameter.register_post_accumulate_grad_hook(move)


class _CompiledLoss(torch.autograd.Function):
    """Stands for a compiled loss of a chunk, which makes no tensor of the logits' size but their
    gradient."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        ctx.save_for_backward(logits)
        return logits.new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor, None]:
        return torch.empty_like(ctx.saved_tensors[0]), None


@contextmanager
def _ranks(world_size: int) -> Iterator[None]:
    """In the body a process group of all ranks is there, which sends nothing."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


@contextmanager
def _sharing(ranks: int) -> Iterator[None]:
    """In the body, attention exchanges heads among so many ranks, if they share rows."""
    group = context_parallel.context_group(ranks) if ranks > 1 else None

    def attention(module: nn.Module, *tensors: Tensor, **more: Any) -> tuple[Tensor, None]:
        mask = tensors[3:]
        return context_parallel.share_rows(
            lambda *whole: sdpa_attention_forward(module, *whole, *mask, **more)[0],
            group,
            *tensors[:3],
        ), None

    # Imitates packed attention, whose layers share rows in a run.
    if group is not None:
        AttentionInterface.register(UNMASKED, attention)
    try:
        yield
    finally:
        AttentionInterface.register(UNMASKED, sdpa_attention_forward)


@contextmanager
def _as_on_devices(work: Work, fabric: Any) -> Iterator[None]:
    """In the body, what a step asks of its device is as on the run's devices: the mesh of the
    ranks, the size of chunks, and whether tensors have memory."""
    is_sharded = work.placement.strategy in ("fsdp", "fsdp2")
    mesh = strategy._mesh(fabric, work.placement.sharding) if is_sharded else None
    patches: list[Any] = [
        # The mesh was made above, outside of fake tensors, since its rank numbers have to be real.
        patch.object(strategy, "_mesh", lambda *_: mesh),
        # FSDP1 sees by a tensor's address whether it has memory, and that of a fake tensor is 0.
        patch.object(
            _flat_param, "_data_ptr_allocated", lambda tensor: tensor.untyped_storage().nbytes() > 0
        ),
        # Without memory torch multiplies grouped matrices in bfloat16 alone; transformers' own way
        # makes the same tensors.
        patch.object(
            moe, "_can_use_grouped_mm", lambda hidden, weight, offs: weight.dtype == torch.bfloat16
        ),
    ]
    if work.placement.kind == "cuda":
        vocabulary = work.model.config.get_text_config().vocab_size
        most = max(1, chunked_loss.LOGITS_AT_ONCE["cuda"] // vocabulary)
        patches += [
            patch.object(chunked_loss, "_tokens_at_once", lambda *_: most),
            patch.multiple(  # what waits in the host's memory is a shape here
                offload.Inputs,
                put=lambda self, hidden, tensor: (
                    (tensor.shape, tensor.dtype) if tensor.shape == hidden().shape else tensor
                ),
                get=lambda self, kept: (
                    kept if isinstance(kept, Tensor) else torch.empty(kept[0], dtype=kept[1])
                ),
            ),
        ]
    with ExitStack() as stack, warnings.catch_warnings():
        for one in patches:
            stack.enter_context(one)
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        yield
