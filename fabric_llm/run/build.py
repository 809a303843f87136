"""Plan -> the objects of a run: model and optimizer on the devices, data, log, and what saves and evaluates."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable, NamedTuple, Optional

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

from fabric_llm.base import ranks
from fabric_llm.base.command_line import Flags
from fabric_llm.base.fabric import Fabric
from fabric_llm.base.failpoints import failpoint
from fabric_llm.base.faults import UNEXPECTED, UNWRITABLE, Fault, as_fault
from fabric_llm.checkpoint import reading, writing
from fabric_llm.data.batches import Batches, PinnedCopies, Prefetch
from fabric_llm.model import (
    causality,
    equality,
    fast_paths,
    gradient_equality,
    language_model,
    layers,
    loading,
    packed_attention,
    strategy,
)
from fabric_llm.model.materialize import Materializer
from fabric_llm.processes.stop import Requests, StopSignal
from fabric_llm.processes.watch import Watch
from fabric_llm.run import run_directory
from fabric_llm.run.log import Log, open_log
from fabric_llm.run.plan import Plan
from fabric_llm.run.saver import Saver
from fabric_llm.training import adamw, optim
from fabric_llm.training.evaluation import Evaluation
from fabric_llm.training.guard import Guard


class Parts(NamedTuple):
    """The objects of a run, in the order in which they are made."""

    plan: Plan  # with document_end None where the model turns out not to keep documents apart
    model: nn.Module  # wrapped
    optimizer: torch.optim.Optimizer
    guard: Guard
    batches: Prefetch
    log: Log
    evaluation: Evaluation
    saver: Saver
    requests: Requests


def build(fabric: Fabric, flags: Flags, plan: Plan, signals: StopSignal, watch: Watch) -> Parts:
    """All parts of a run. All ranks call it. Raises Fault on all of them where the disk isn't shared or has no room."""
    require_shared_directory(plan.run_directory, flags.devices.hang_timeout)
    require_room(plan)
    failpoint("set_up")
    plan, model, optimizer, template = build_model(fabric, flags, plan, plan.source, plan.resume_from)
    guard = Guard(
        *(getattr(flags.guard, n) for n in ("max_skipped_steps", "spike_threshold", "spike_window", "spike_action"))
    )
    if plan.resumed:
        restore(fabric, guard, plan.resumed)
    common = {"rank": fabric.global_rank, "world_size": fabric.world_size, "document_end": plan.document_end}
    sizes = plan.micro_batch_size, plan.micro_batches
    training = Batches(plan.dataset.train, flags.training.seed, *sizes, end=plan.end, order=plan.row_order, **common)
    copies = PinnedCopies(fabric.device) if fabric.device.type == "cuda" else None
    batches = Prefetch(training, flags.data.num_workers, copies)
    looks = fabric.global_rank == 0  # for all ranks
    max_hours = flags.training.max_hours
    requests = Requests(signals, plan.run_directory if looks else None, max_hours if looks else None)
    log = open_log(fabric, flags, plan, template, batches)
    evaluation = Evaluation(
        fabric,
        evaluation_batches(plan, flags, **common),
        requests.is_to_stop,
        lambda: watch.mark(watch.step, "evaluating"),
    )
    saver = Saver(fabric, flags, plan, log, template, watch.mark)
    return Parts(plan, model, optimizer, guard, batches, log, evaluation, saver, requests)


def evaluation_batches(plan: Plan, flags: Flags, *, rank: int, world_size: int, document_end: Optional[int]) -> Batches:
    """The first --eval_iters batches of the validation split, not past its end; as many on each rank."""
    validation, size = plan.dataset.validation, flags.evaluation.eval_batch_size
    count = min(flags.evaluation.eval_iters, -(-len(validation) // size))
    return Batches(
        validation,
        flags.training.seed,
        size,
        -(-count // world_size),
        rank=rank,
        world_size=world_size,
        shuffle=False,
        end=min(count * size, len(validation)),
        document_end=document_end,
    )


def restore(fabric: Fabric, guard: Guard, document: dict[str, Any]) -> None:
    """What a checkpoint's progress.json holds of the run, except for its place."""
    guard.restore(document["guard"])
    if document.get("scaler"):
        fabric.strategy.precision.load_state_dict(document["scaler"])


def require_shared_directory(directory: Path, seconds: float) -> None:
    """End the run before its model is loaded where a rank would write to another disk than rank 0 reads from."""
    written = ranks.from_rank_zero(lambda: run_directory.read_status(directory))
    sees = run_directory.wait_for_status(directory, written, seconds / 2)
    if blind := [rank for rank, there in enumerate(ranks.gather(sees)) if not there]:
        raise Fault(
            f"rank {blind[0]} doesn't see what rank 0 writes into {str(directory)!r}: "
            "it must be on a disk that all machines share.",
            UNWRITABLE,
        )


def require_room(plan: Plan) -> None:
    """Sweep, and end the run before its model is loaded where not even one checkpoint would fit on the disk."""

    def look() -> None:
        run_directory.sweep(plan.run_directory)
        parameters = loading.build_skeleton(plan.config, loading.DTYPES[plan.precision]).parameters()
        needed = adamw.checkpoint_bytes(parameters, plan.bf16_updates)
        writing.require_room(plan.run_directory, needed, "One checkpoint of this run")

    ranks.from_rank_zero(look)


def build_model(
    fabric: Fabric, flags: Flags, plan: Plan, source: str, resume_from: Optional[Path]
) -> tuple[Plan, nn.Module, torch.optim.Optimizer, PreTrainedModel]:
    """(plan, wrapped model, optimizer, unwrapped model without memory), with the weights of `source`.

    resume_from: checkpoint whose optimizer state to load. The plan's document_end is None afterwards where the model turns
    out not to keep documents apart and needn't.
    """
    dtype, training = loading.DTYPES[plan.precision], flags.training
    template = loading.build_skeleton(plan.config, dtype)
    loading.set_generation_config(template, source)
    reference, chosen = load_reference(plan, source, training.seed, flags.model)
    plan = replace(plan, loss=chosen.loss, document_end=chosen.document_end)
    plan.config._attn_implementation = chosen.attention
    skeleton = language_model.LanguageModel(
        loading.build_skeleton(plan.config, dtype),
        with_router_loss=plan.router_aux_loss_coef > 0,
        chunked=plan.loss == "chunked",
    )
    layers.checkpoint_activations(skeleton.causal_lm, plan.activation_checkpointing)
    if plan.compiles:
        layers.compile_layers(skeleton)
    decayed = optim.decayed_names(skeleton)
    materializer = Materializer(skeleton, reference.model, fabric.device)
    wrapped = strategy.wrap(fabric, plan.strategy, skeleton, materializer, plan.precision, plan.sharding)
    optimizer = optim.make_optimizer(
        wrapped,
        decayed,
        lr=training.lr,
        betas=(training.beta1, training.beta2),
        weight_decay=training.weight_decay,
        updates=plan.bf16_updates,
        seed=training.seed,
    )
    optimizer = fabric.setup_optimizers(optimizer)
    if resume_from is not None:
        reading.load_optimizer(resume_from, wrapped.module, optimizer)
    if flags.model.verify_start:
        verify_start(fabric, plan, wrapped, reference)
    return plan, wrapped, optimizer, template


class Reference(NamedTuple):
    """The model as transformers loads it, on the CPU of rank 0, and what it makes of the probe. None on the other ranks."""

    model: Optional[PreTrainedModel] = None
    outputs: Optional[equality.Outputs] = None
    gradients: Optional[gradient_equality.Gradients] = None


class Chosen(NamedTuple):
    """What was measured on the reference, the same on all ranks."""

    document_end: Optional[int]
    attention: str
    loss: str


def load_reference(plan: Plan, source: str, seed: int, model_flags: Flags) -> tuple[Reference, Chosen]:
    """Rank 0 loads the weights, and finds out which fast paths the model takes. All ranks call it.

    What is wrong with the weights, or with the model as transformers has it, ends the run on all ranks, with one sentence.
    """
    loaded = [Reference()]  # stays on rank 0

    def load() -> Chosen:
        flash = plan.config._attn_implementation == "flash_attention_2"  # has no CPU kernel
        model = loading.load_reference(
            source,
            loading.load_config(source) if flash else plan.config,
            loading.DTYPES[plan.precision],
            seed,
            reading.sharded_weights(Path(source), loading.build_skeleton(plan.config, torch.float32)),
        )
        chosen = choose(model, plan, model_flags)
        outputs = gradients = None
        if model_flags.verify_start:
            outputs = computed(model, lambda: expected_outputs(model, source, plan))
        if model_flags.verify_start and compares_gradients(plan):
            gradients = computed(model, lambda: expected_gradients(model, plan, chosen.document_end))
        loaded[0] = Reference(model, outputs, gradients)
        return chosen

    chosen = ranks.from_rank_zero(load)
    loading.disable_progress_bar()  # from here on there is our own
    return loaded[0], chosen


def choose(reference: PreTrainedModel, plan: Plan, model_flags: Flags) -> Chosen:
    """What the flags leave open, and this model can. Raises ValueError where it can't do what they ask for."""
    attention, loss = plan.config._attn_implementation, plan.loss
    chunks = loss != "full" and fast_paths.chunks_its_loss(reference, plan.precision)
    if loss == "chunked" and not chunks:
        raise ValueError(f"--loss chunked: {type(reference).__name__} in {plan.precision} can't; take --loss auto.")
    if model_flags.attention == "auto" and attention == "sdpa" and plan.document_end is not None:
        half_on_gpu = plan.kind == "cpu" or plan.precision != "32-true"  # torch's kernel for GPUs takes 16 bits
        if half_on_gpu and fast_paths.takes_packed_attention(reference):
            attention = packed_attention.NAME
    elif attention == packed_attention.NAME and not fast_paths.takes_packed_attention(reference):
        raise ValueError(f"--attention packed: {type(reference).__name__} can't; take --attention auto.")
    tried = "sdpa" if attention == "flash_attention_2" else attention
    with fast_paths.attention(reference, tried):
        document_end = plan.document_end if keeps_documents_apart(reference, plan) else None
    if document_end is None and model_flags.attention == "auto":
        attention = plan.config._attn_implementation
    return Chosen(document_end, attention, "chunked" if chunks else "full")


def compares_gradients(plan: Plan) -> bool:
    """False where the probe's gradients would say nothing."""
    return plan.precision in gradient_equality.LIMITS and plan.strategy != "xla"


def expected_outputs(reference: PreTrainedModel, source: str, plan: Plan) -> equality.Outputs:
    """What the reference makes of the probe. Raises ValueError where that is nothing to train on."""
    if causality.sees_ahead(reference):
        raise ValueError(
            f"{type(reference).__name__}, as {source!r} configures it, isn't causal: what it says of a token depends on the "
            "tokens after it, so there is nothing to predict."
        )
    probe = plan.probe_input()[:, : equality.PROBE_TOKENS]
    return equality.outputs(reference, probe, lambda ids: reference(ids).logits)


def expected_gradients(
    reference: PreTrainedModel, plan: Plan, document_end: Optional[int]
) -> gradient_equality.Gradients:
    """The probe's loss and gradients in plain eager transformers."""
    with fast_paths.attention(reference, "eager"):
        return gradient_equality.of_reference(
            language_model.LanguageModel(reference), probe_of_gradients(plan, document_end)
        )


def probe_of_gradients(plan: Plan, document_end: Optional[int]) -> dict[str, Tensor]:
    """The first tokens of the validation split, as two packed documents where those are kept apart."""
    ids = plan.probe_input()[:, : equality.PROBE_TOKENS]
    inputs = {"input_ids": ids, "labels": ids}
    if document_end is not None:
        places, second = torch.arange(ids.shape[1]), ids.shape[1] // 3
        inputs["position_ids"] = torch.where(places < second, places, places - second)[None]
    return inputs


def keeps_documents_apart(reference: PreTrainedModel, plan: Plan) -> bool:
    """False, and a warning, if packed documents see each other. Raises ValueError where they mustn't."""
    if plan.document_end is None:
        return True
    leak = computed(reference, lambda: causality.find_leak(reference))
    if not leak.found:
        return True
    attention = plan.config._attn_implementation
    if plan.document_masking is True:
        raise ValueError(
            f"{type(reference).__name__} doesn't keep packed documents apart with --attention {attention}: take another, or "
            "--document_masking false."
        )
    print(
        f"Warning: {type(reference).__name__} doesn't keep packed documents apart (with another document before it, a "
        f"document's logits change by up to {leak.change:.2g} of their standard deviation): --document_masking is off.",
        flush=True,
    )
    return False


def computed(reference: PreTrainedModel, compute: Callable[[], Any]) -> Any:
    """What `compute()` returns. Raises ValueError where the model itself, as transformers has it, can't."""
    try:
        return compute()
    except (RuntimeError, TypeError, LookupError, AttributeError, NotImplementedError, AssertionError) as error:
        if as_fault(error).code != UNEXPECTED:  # such as memory
            raise
        said = " ".join(str(error).split())[:300].rstrip(".") or type(error).__name__
        raise ValueError(
            f"{type(reference).__name__} as transformers {transformers.__version__} has it can't compute a probe on the CPU "
            f"in {str(reference.dtype).removeprefix('torch.')}: {said}."
        ) from error


def verify_start(fabric: Fabric, plan: Plan, wrapped: nn.Module, reference: Reference) -> None:
    """Stop on all ranks if the wrapped model isn't the one that transformers loads, or trains otherwise. All ranks call it."""
    began = time.monotonic()
    probe = plan.probe_input()[:, : equality.PROBE_TOKENS]
    ours = equality.verify_start(fabric, wrapped, reference.outputs, probe, plan.precision)
    words = ""
    if compares_gradients(plan):
        inputs = probe_of_gradients(plan, plan.document_end)
        advice = slow_paths(plan)
        gradient_equality.verify(fabric, wrapped, reference.gradients, inputs, plan.precision, advice)
        words = ", and the gradients are equal to rounding"
    if reference.outputs is not None:
        print(
            f"Start verified: loss {ours.loss:.4f} on {probe.numel()} tokens, {reference.outputs.loss:.4f} in plain "
            f"transformers{words} ({time.monotonic() - began:.1f} s).",
            flush=True,
        )


def slow_paths(plan: Plan) -> str:
    """The flags that turn off the fast paths of a run, as the end of a sentence."""
    flags = {"--loss full": plan.loss == "chunked", "--compile false": plan.compiles}
    flags["--attention sdpa"] = plan.config._attn_implementation == packed_attention.NAME
    flags["--activation_checkpointing none"] = plan.activation_checkpointing != "none"
    taken = [flag for flag, is_on in flags.items() if is_on]
    return f"; to find out which part it is, turn it off: {', '.join(taken)}" if taken else ""
