"""The model as transformers loads it, on rank 0: which fast paths it takes, and what the wrapped model must equal."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Callable, NamedTuple, Optional

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

from fabric_llm.base import ranks
from fabric_llm.base.command_line import Flags
from fabric_llm.base.fabric import Fabric
from fabric_llm.base.faults import UNEXPECTED, as_fault
from fabric_llm.checkpoint import reading
from fabric_llm.model import capabilities, freezing, gate, language_model, loading, packed_attention
from fabric_llm.plan.plan import Plan


class Reference(NamedTuple):
    """The model as transformers loads it, on the CPU of rank 0, and what it makes of the probe. None on the other ranks."""

    model: Optional[PreTrainedModel] = None
    outputs: Optional[gate.Outputs] = None
    gradients: Optional[gate.Gradients] = None


class Chosen(NamedTuple):
    """What was measured on the reference, the same on all ranks."""

    document_end: Optional[int]
    attention: str
    loss: str


def load(plan: Plan, source: str, seed: int, model_flags: Flags) -> tuple[Reference, Chosen]:
    """Rank 0 loads the weights, and finds out which fast paths the model takes. All ranks call it.

    What is wrong with the weights, or with the model as transformers has it, ends the run on all ranks, with one sentence.
    """
    loaded = [Reference()]  # stays on rank 0

    def load() -> Chosen:
        flash = plan.model.config._attn_implementation == "flash_attention_2"  # has no CPU kernel
        model = loading.load_reference(
            source,
            loading.load_config(source) if flash else plan.model.config,
            loading.DTYPES[plan.model.precision],
            seed,
            reading.sharded_weights(Path(source), loading.build_skeleton(plan.model.config, torch.float32)),
        )
        freezing.freeze(model, plan.model.frozen)  # so that the probe makes no gradients of what doesn't train
        chosen = choose(model, plan, model_flags)
        expected: tuple[Any, Any] = (None, None)
        if model_flags.verify_start:
            expected = computed(model, lambda: expected_of(model, source, plan, chosen.document_end))
        loaded[0] = Reference(model, *expected)
        return chosen

    chosen = ranks.from_rank_zero(load)
    loading.disable_progress_bar()  # from here on there is our own
    return loaded[0], chosen


def choose(reference: PreTrainedModel, plan: Plan, model_flags: Flags) -> Chosen:
    """What the flags leave open, and this model can. Raises ValueError where it can't do what they ask for."""
    attention, loss = plan.model.config._attn_implementation, plan.model.loss
    chunks = loss != "full" and capabilities.chunks_its_loss(reference, plan.model.precision)
    if loss == "chunked" and not chunks:
        raise ValueError(
            f"--loss chunked: {type(reference).__name__} in {plan.model.precision} can't; take --loss auto."
        )
    if model_flags.attention == "auto" and attention == "sdpa" and plan.data.document_end is not None:
        # torch's kernel for GPUs takes 16 bits.
        kernel = plan.placement.kind == "cpu" or plan.model.precision != "32-true"
        if kernel and capabilities.takes_packed_attention(reference):
            attention = packed_attention.NAME
    elif attention == packed_attention.NAME and not capabilities.takes_packed_attention(reference):
        raise ValueError(f"--attention packed: {type(reference).__name__} can't; take --attention auto.")
    tried = "sdpa" if attention == "flash_attention_2" else attention
    with capabilities.attention(reference, tried):
        document_end = plan.data.document_end if keeps_documents_apart(reference, plan) else None
    if document_end is None and model_flags.attention == "auto":
        attention = plan.model.config._attn_implementation
    return Chosen(document_end, attention, "chunked" if chunks else "full")


def compares_gradients(plan: Plan) -> bool:
    """False where the probe's gradients would say nothing."""
    return plan.model.precision != "16-mixed" and plan.placement.strategy != "xla"


def expected_of(
    reference: PreTrainedModel, source: str, plan: Plan, document_end: Optional[int]
) -> tuple[gate.Outputs, Optional[gate.Gradients]]:
    """What the reference makes of the probe, and its gradients in plain eager transformers.

    Raises ValueError where the model is nothing to train.
    """
    if capabilities.sees_ahead(reference):
        raise ValueError(
            f"{type(reference).__name__}, as {source!r} configures it, isn't causal: what it says of a token depends on the "
            "tokens after it, so there is nothing to predict."
        )
    inputs = probe_of(plan, document_end)
    outputs = gate.outputs_of(reference, inputs["input_ids"], lambda ids: reference(ids).logits)
    if not compares_gradients(plan):
        return outputs, None
    with capabilities.attention(reference, "eager"):
        return outputs, gate.gradients_of_reference(language_model.LanguageModel(reference), inputs)


def probe_of(plan: Plan, document_end: Optional[int]) -> dict[str, Tensor]:
    """The first tokens of the validation split, as two packed documents where those are kept apart."""
    ids = plan.probe_input()[:, : gate.PROBE_TOKENS]
    inputs = {"input_ids": ids, "labels": ids}
    if document_end is not None:
        places, second = torch.arange(ids.shape[1]), ids.shape[1] // 3
        inputs["position_ids"] = torch.where(places < second, places, places - second)[None]
    return inputs


def keeps_documents_apart(reference: PreTrainedModel, plan: Plan) -> bool:
    """False, and a warning, if packed documents see each other. Raises ValueError where they mustn't."""
    if plan.data.document_end is None:
        return True
    leak = computed(reference, lambda: capabilities.find_leak(reference))
    if not leak.found:
        return True
    attention = plan.model.config._attn_implementation
    if plan.data.document_masking is True:
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
    inputs = probe_of(plan, plan.data.document_end)
    expected = reference.outputs, reference.gradients
    with_gradients = compares_gradients(plan)
    ours = gate.verify(fabric, wrapped, expected, inputs, with_gradients, plan.model.precision, slow_paths(plan))
    if reference.outputs is not None:
        words = ", and the gradients are equal to rounding" if with_gradients else ""
        print(
            f"Start verified: loss {ours.loss:.4f} on {inputs['input_ids'].numel()} tokens, {reference.outputs.loss:.4f} in "
            f"plain transformers{words} ({time.monotonic() - began:.1f} s).",
            flush=True,
        )


def slow_paths(plan: Plan) -> str:
    """The flags that turn off the fast paths of a run, as the end of a sentence."""
    flags = {"--loss full": plan.model.loss == "chunked", "--compile false": plan.model.compiles}
    flags["--attention sdpa"] = plan.model.config._attn_implementation == packed_attention.NAME
    flags["--activation_checkpointing none"] = plan.model.activation_checkpointing != "none"
    taken = [flag for flag, is_on in flags.items() if is_on]
    return f"; to find out which part it is, turn it off: {', '.join(taken)}" if taken else ""
