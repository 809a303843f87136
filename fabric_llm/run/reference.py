"""The model as transformers loads it, on rank 0: which fast paths it takes, and what the wrapped
model must equal."""

import math
import re
import time
from collections import Counter
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple, Optional

import torch
import transformers
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from fabric_llm.base import ranks
from fabric_llm.base.fabric import Fabric
from fabric_llm.base.faults import UNEXPECTED, Fault, as_fault, one_line
from fabric_llm.base.files import MANIFEST
from fabric_llm.base.flag import Flags
from fabric_llm.base.machine import free_memory_bytes
from fabric_llm.model import (
    capabilities,
    folders,
    freezing,
    gate,
    language_model,
    loading,
    packed_attention,
    weights,
)
from fabric_llm.model.reference import load_reference
from fabric_llm.model.sharded import reshard
from fabric_llm.plan import run_status
from fabric_llm.plan.plan import Plan

TURN_OFF = (
    "To find out which part it is, turn them off: --loss full, --compile false, --attention {}, "
    "--activation_checkpointing none."
)


class Chosen(NamedTuple):
    """What is measured on the reference."""

    keeps_documents_apart: bool
    attention: str
    loss: str
    tiled: list[str]  # names of the modules that --tiled_mlp tiles
    idle: frozenset[str]  # names of parameters that its loss doesn't depend on


class Expected(NamedTuple):
    """What the reference makes of the probe, on rank 0."""

    outputs: Optional[gate.Outputs] = None
    gradients: Optional[gate.Gradients] = None
    attention: str = "eager"  # that transformers takes by default


class Reference(NamedTuple):
    """What a run takes from its reference. The model itself is freed before others are made."""

    opened: Optional[weights.Source]  # the weights, on rank 0
    expected: Expected
    chosen: Chosen


def load(plan: Plan, source: str, seed: int, model_flags: Flags) -> Reference:
    """Rank 0 opens the weights, and finds out on its CPU which fast paths the model takes. All
    ranks call it.

    What is wrong with the weights, or with the model as transformers has it, ends the run on all
    ranks, with one sentence.
    """
    expected = Expected()
    opened, config = None, plan.model.config  # the former and `expected` stay on rank 0

    # Run on rank 0 alone: whatever it raises ends the run on all ranks.
    def measure() -> Chosen:
        nonlocal opened, expected
        flash = config._attn_implementation == "flash_attention_2"  # has no CPU kernel
        # A copy, since the devices get `config` with the attention that was asked for.
        on_cpu, dtype = deepcopy(config), loading.DTYPES[plan.model.precision]
        if flash:
            on_cpu._attn_implementation = "sdpa"
        opened = loading.open_weights(source, config, dtype, seed)
        # Both messages name what won't be in the model, before anything is measured.
        if left_out := first_weights(opened)["left_out"]:
            _say_left_out(plan, left_out)
        if unread := unread_weights(source, config):
            print(
                f"Not read, since others in {source!r} are its weights: {', '.join(unread)}.",
                flush=True,
            )
        skeleton = loading.build_skeleton(on_cpu, dtype)
        # so that the probe makes no gradients of what doesn't train
        freezing.freeze(skeleton, plan.model.frozen)
        # Memory that nothing else will need before the reference is gone: the weights come to the
        # devices after it.
        model = load_reference(skeleton, opened, (free_memory_bytes() or math.inf) / 2)
        name = type(model).__name__
        # What fails in here is the model's own code, so the sentence names transformers.
        try:
            # First, because it may refuse the attention that was asked for.
            plain = capabilities.plain_attention(model)
            chosen = choose(model, plan, model_flags)
            # The fast paths are chosen in any case. Without the comparison nothing is expected.
            if not model_flags.verify_start:
                return chosen
            if capabilities.sees_ahead(model):
                raise ValueError(
                    f"{name}, as {source!r} configures it, isn't causal: what it says of a token "
                    "depends on the tokens after it, so there is nothing to predict."
                )
            expected = _expected_of(model, plan, chosen.keeps_documents_apart, plain)
            return chosen
        except (
            RuntimeError,
            TypeError,
            LookupError,
            AttributeError,
            NotImplementedError,
            AssertionError,
        ) as error:
            if as_fault(error).code != UNEXPECTED:  # such as memory
                raise
            reason = one_line(error)[:300].rstrip(".") or type(error).__name__
            raise ValueError(
                f"{name} as transformers {transformers.__version__} has it can't compute a probe "
                f"on the CPU in {str(model.dtype).removeprefix('torch.')}: {reason}."
            ) from error

    # The other ranks need what was chosen, since all ranks build the same model.
    chosen = ranks.from_rank_zero(measure)
    loading.disable_progress_bar()  # from here on there is our own
    return Reference(opened, expected, chosen)


def _expected_of(
    model: PreTrainedModel, plan: Plan, keeps_documents_apart: bool, plain: str
) -> Expected:
    """What the reference makes of the probe. plain: the attention of its gradients."""
    # The probe has two documents only where the model that trains keeps them apart.
    document_end, gradients = None, None
    if keeps_documents_apart:
        document_end = plan.data.document_end
    inputs = probe_of(plan, document_end)
    outputs = gate.outputs_of(model, inputs["input_ids"], lambda ids: model(ids).logits)
    if compares_gradients(plan):
        with capabilities.attention(model, plain):
            gradients = gate.gradients_of_reference(language_model.LanguageModel(model), inputs)
    # For the advice in an error: the attention that plain transformers would take.
    default = model.get_correct_attn_implementation(None, is_init_check=True)
    return Expected(outputs, gradients, default)


def first_weights(opened: Optional[weights.Source]) -> dict[str, Any]:
    """What the card of an export says of the weights with which its run began."""
    names = opened.left_out if isinstance(opened, weights.Stored) else []
    # Tensors that differ in the number of their layer alone are counted under one name.
    alike = Counter(re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in names)
    left_out = [f"{name} ({count})" if count > 1 else name for name, count in alike.items()]
    return {"random": isinstance(opened, weights.Drawn), "left_out": left_out}


def _say_left_out(plan: Plan, names: list[str]) -> None:
    """Print what the files hold beside the weights of the model, and keep it for the history."""
    where = f"the files of {plan.model.source} beside the weights of this model"
    print(
        f"Tensors in {where}, which transformers leaves out by their names: {', '.join(names)}.",
        flush=True,
    )
    run_status.record_event(plan.run_directory, "left_out", plan.start.step, tensors=names)


def choose(reference: PreTrainedModel, plan: Plan, model_flags: Flags) -> Chosen:
    """What the flags leave open, and this model can. Raises ValueError where it can't do what they
    ask for."""
    name, asked = type(reference).__name__, plan.model.config._attn_implementation
    loss, sharing = plan.model.loss, plan.placement.context_parallel
    lengths = plan.data.row_lengths()
    # Whether the data has documents to keep apart. Below it becomes whether the model can.
    masks = plan.data.keeps_documents_apart()
    of_documents = (
        capabilities.beyond_the_row(reference, lengths, documents=True) if masks else None
    )
    if (depends := capabilities.beyond_the_row(reference, lengths)) is not None:
        raise ValueError(
            f"{name} can't read rows of {' and '.join(map(str, lengths))} tokens in one run: "
            f"{depends}, which no checkpoint holds. Take rows of one length, also for validation."
        )
    # Ranks that share rows exchange keys and values inside of packed attention alone.
    if sharing > 1 and not capabilities.takes_packed_attention(reference):
        raise ValueError(
            f"--context_parallel {sharing}: {name} can't, since it doesn't take packed attention."
        )
    # Measured also for `auto`, where a model that can't takes all logits without an error.
    chunks = loss != "full" and capabilities.chunks_its_loss(reference, plan.model.precision)
    if loss == "chunked" and not chunks:
        raise ValueError(
            f"--loss chunked: {name} in {plan.model.precision} can't; take --loss auto."
        )
    attention = _choose_attention(reference, plan, asked, is_open=model_flags.attention == "auto")
    # With shared rows also without documents: tokens may only meet in the attention.
    if masks or sharing > 1:
        masks = _keeps_documents_apart(reference, plan, attention, of_documents) and masks
    # Packed attention was chosen for documents, which aren't kept apart then.
    if not masks and model_flags.attention == "auto" and sharing == 1:
        attention = asked
    tiled = _choose_tiles(reference) if plan.model.tiled_mlp else []
    loss = "chunked" if chunks else "full"
    return Chosen(masks, attention, loss, tiled, capabilities.idle_parameters(reference))


def _choose_attention(reference: PreTrainedModel, plan: Plan, asked: str, is_open: bool) -> str:
    """The attention of a run. is_open: --attention auto leaves it open."""
    sharing, device = plan.placement.context_parallel, (plan.placement.kind, plan.model.precision)
    if sharing > 1:
        if (why := no_kernel(reference, *device)) is not None:
            if packed_attention.MIN_CAPABILITY > torch.cuda.get_device_capability():
                raise ValueError(
                    f"--context_parallel {sharing}: attention has no kernel here: {why}."
                )
            print(
                "Warning: attention has no kernel for packed documents, and takes one after the "
                f"other: {why}."
            )
        return packed_attention.PACKED
    # The user has asked for it, so what is missing is an error and not another choice.
    if asked == packed_attention.PACKED:
        _require_packed_attention(reference, plan)
    # Packed attention would see padding that stands before the text.
    is_packed = plan.data.document_end is not None and not plan.data.pads_before_text()
    if is_open and asked == "sdpa" and is_packed and capabilities.takes_packed_attention(reference):
        if (why := no_kernel(reference, *device)) is None:
            return packed_attention.PACKED
        print(f"Attention has a mask in place of PyTorch's kernel for packed documents: {why}.")
    return asked


def _require_packed_attention(reference: PreTrainedModel, plan: Plan) -> None:
    """Raises ValueError where --attention packed was asked for and can't be had."""
    if not capabilities.takes_packed_attention(reference):
        name = type(reference).__name__
        raise ValueError(f"--attention packed: {name} can't; take --attention auto.")
    why = no_kernel(reference, plan.placement.kind, plan.model.precision)
    if why is not None:
        raise ValueError(
            f"--attention packed: PyTorch's kernel for it can't be used: {why}. Take --attention "
            "auto."
        )
    if plan.data.pads_before_text():
        raise ValueError(
            "--attention packed: rows have padding before their text, which it would see; take "
            "--attention auto."
        )


def _keeps_documents_apart(
    reference: PreTrainedModel, plan: Plan, attention: str, of_documents: Optional[str]
) -> bool:
    """Whether packed documents don't see each other, measured; prints a warning where they do.

    of_documents: why their positions depend on the row (capabilities.beyond_the_row). Raises
    ValueError where the flags ask for what the model can't.
    """
    name, sharing = type(reference).__name__, plan.placement.context_parallel
    # Flash attention has no CPU kernel, so SDPA is measured in its place.
    measured = "sdpa" if attention == "flash_attention_2" else attention
    with capabilities.attention(reference, measured):
        leak = capabilities.find_leak(reference)
    # What flows outside of the attention would end where a rank's part of the row ends.
    if leak is not None and sharing > 1:
        raise ValueError(
            f"--context_parallel {sharing}: {name} can't, since tokens meet outside of its "
            "attention."
        )
    if leak is None and of_documents is None:
        return True
    result = f"{name} doesn't keep packed documents apart"
    # An explicit true is refused; `auto` is turned off with a warning.
    if plan.data.document_masking is True and plan.data.document_end is not None:
        if leak is None:
            raise ValueError(
                f"{result}: {of_documents}. Take shorter rows, or --document_masking false."
            )
        asked = plan.model.config._attn_implementation
        raise ValueError(
            f"{result} with --attention {asked}: take another, or --document_masking false."
        )
    why = of_documents or (
        f"with another document before it, a document's logits change by up to {leak:.2g} of their "
        "standard deviation"
    )
    print(f"Warning: {result} ({why}): --document_masking is off.")
    return False


def _choose_tiles(reference: PreTrainedModel) -> list[str]:
    """The modules that --tiled_mlp tiles, by name. Raises ValueError where no MLP is one."""
    # A feature that is off isn't imported.
    from fabric_llm.model.tiles import found_in

    measured = found_in(reference)
    tiled = [one for one, is_tiled in measured.items() if is_tiled]
    whole = [one for one in measured if one not in tiled]
    # Norms may be tiled as well. At least one module with matrices, an MLP, must be.
    parameters = [p for one in tiled for p in reference.get_submodule(one).parameters()]
    if not any(p.ndim > 1 for p in parameters):
        raise ValueError(
            f"--tiled_mlp true: {type(reference).__name__} can't: its MLPs have dropout, or don't "
            "take each token by itself."
        )
    if whole:
        print(
            f"Warning: --tiled_mlp: {len(whole)} of {len(measured)} modules aren't tiled, such as "
            f"{whole[0]}."
        )
    return tiled


def no_kernel(reference: PreTrainedModel, kind: str, precision: str) -> Optional[str]:
    """Why the kernel of GPUs for packed documents can't be used, in words; None where it can, and
    on CPUs, which have none."""
    if kind != "cuda":
        return None
    heads = capabilities.heads_in_training(reference)
    return packed_attention.no_kernel(torch.cuda.get_device_capability(), precision, *heads)


def compares_gradients(plan: Plan) -> bool:
    """False where the probe's gradients would say nothing."""
    return plan.model.precision != "16-mixed" and plan.placement.strategy != "xla"


def probe_of(plan: Plan, document_end: Optional[int]) -> dict[str, Tensor]:
    """The first tokens of the validation split, as two packed documents where those are kept
    apart."""
    # Ranks that share rows have equal parts of the probe.
    length = gate.PROBE_TOKENS - gate.PROBE_TOKENS % plan.placement.context_parallel
    ids = plan.data.probe_input()[:, :length]
    # LanguageModel takes labels unshifted.
    inputs = {"input_ids": ids, "labels": ids}
    if document_end is not None:
        # The second document begins after a third. Its positions restart at 0.
        places, second = torch.arange(ids.shape[1]), ids.shape[1] // 3
        inputs["position_ids"] = torch.where(places < second, places, places - second)[None]
    return inputs


def verify_start(fabric: Fabric, plan: Plan, wrapped: nn.Module, expected: Expected) -> None:
    """Stop on all ranks if the wrapped model isn't the one that transformers loads, or trains
    otherwise. All ranks call it."""
    began, with_gradients = time.monotonic(), compares_gradients(plan)
    inputs = probe_of(plan, plan.data.document_end)
    # Of plain transformers; None on other ranks than 0.
    outputs, gradients, default_attention = expected
    # For gradients alone: a pass without them makes no products in 8 bits, see float8.py.
    limits = plan.model.precision if plan.model.float8 == "none" else "float8"
    ours = gate.outputs_of(
        wrapped.module, inputs["input_ids"], lambda ids: wrapped(ids.to(fabric.device))
    )
    # A pass without a backward pass leaves a unit whole, see sharded.reshard.
    reshard(wrapped)
    # Rank 0 alone has `outputs`. Its answer is then the answer of all ranks.
    problem = outputs and gate.output_difference(ours, outputs, plan.model.precision)
    problem = ranks.from_first(problem)
    # A model with other outputs has other gradients as well: the first difference says more.
    if problem is None and with_gradients:
        rows = plan.placement.rows_of(fabric.global_rank)
        wrapped_gradients = gate.gradients_of_wrapped(fabric, wrapped, inputs, rows)
        words = gradients and gate.gradient_difference(wrapped_gradients, gradients, limits)
        if words:
            words = (
                f"the model as it would be trained isn't plain transformers': {words}. "
                f"{TURN_OFF.format(default_attention)}"
            )
        problem = ranks.from_first(words)
    if problem is not None:
        raise Fault(problem)
    # The comparison has left it in evaluation.
    wrapped.train()
    if outputs is not None:
        words = ""
        if with_gradients:
            words = ", and the gradients are equal to rounding" + " in 8 bits" * (
                limits == "float8"
            )
        print(
            f"Start verified: loss {ours.loss:.4f} on {inputs['input_ids'].numel()} tokens, "
            f"{outputs.loss:.4f} in plain transformers{words} ({time.monotonic() - began:.1f} s)."
        )


def unread_weights(model_name: str, config: PretrainedConfig) -> list[str]:
    """Names of the files in a model's folder that hold weights, and which `open_weights` doesn't
    read."""
    folder = Path(model_name)
    is_checkpoint = (folder / MANIFEST).is_file()
    if not folder.is_dir() or is_checkpoint or not loading.has_weights(model_name):
        return []
    # A second copy in the folder may hold other values, so the user hears which one counts.
    read = [path.name for path in loading.weight_files(model_name, config)]
    files = (*folder.glob("*.safetensors"), folder / folders.WEIGHT_FILES[1])
    unread = {path.name for path in files if path.is_file()} - set(read)
    # An index that leads to what was read isn't among `read` itself, and is no second copy.
    single, index = folders.WEIGHT_FILES
    if getattr(config, "transformers_weights", None) in (None, index) and single not in read:
        unread.discard(index)
    return sorted(unread)
