"""Plan -> model and optimizer on the devices, with the weights and state to start from, verified."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Callable, Optional

import torch
import transformers
from lightning.fabric import Fabric
from torch import Tensor, nn
from transformers import PreTrainedModel

from arguments import Arguments
from fabric_llm.base.faults import UNEXPECTED, Fault, as_fault
from fabric_llm.checkpoint import reading
from fabric_llm.model import causality, equality, language_model, loading, materialize, router, strategy
from fabric_llm.run.plan import Plan
from fabric_llm.training import optim
from fabric_llm.training.adamw import AdamW


def probe_input(plan: Plan) -> Tensor:
    """The first tokens of the validation split, int64 [1, up to 128]."""
    return torch.tensor(plan.dataset.validation[0]["input_ids"])[None, :128]


def set_up(
    fabric: Fabric, arguments: Arguments, plan: Plan, source: str, resume_from: Optional[Path]
) -> tuple[nn.Module, torch.optim.Optimizer, PreTrainedModel, Optional[int]]:
    """(wrapped model, optimizer, unwrapped model without memory, document_end), with the weights of `source`.

    resume_from: checkpoint whose optimizer state to load. document_end: that of the plan, None where the model turns out
    not to keep documents apart and needn't.
    """
    dtype = loading.DTYPES[arguments.model.precision]
    template = loading.build_skeleton(plan.config, dtype)
    template.generation_config = loading.load_generation_config(source) or template.generation_config
    skeleton = language_model.LanguageModel(
        loading.build_skeleton(plan.config, dtype),
        with_router_loss=router.coefficient(template, arguments.training.router_aux_loss_coef) > 0,
    )
    if arguments.fsdp.activation_checkpointing:
        language_model.checkpoint_activations(skeleton.causal_lm)
    decayed = optim.decayed_names(skeleton)
    reference, expected, document_end = load_reference(fabric, arguments, source, plan)
    materializer = materialize.Materializer(skeleton, reference, fabric.device)
    wrapped = strategy.wrap(fabric, plan.strategy, skeleton, materializer, arguments.model.precision, plan.sharding)
    named = ((strategy.original_name(name), parameter) for name, parameter in wrapped.module.named_parameters())
    training = arguments.training
    optimizer = AdamW(
        optim.parameter_groups(named, decayed, training.weight_decay),
        lr=training.lr,
        betas=(training.beta1, training.beta2),
        updates=arguments.model.bf16_updates,
        seed=training.seed,
        shard_rank=strategy.shard_rank(wrapped),
    )
    optimizer.initialise()
    optimizer = fabric.setup_optimizers(optimizer)
    if resume_from is not None:
        reading.load_optimizer(resume_from, wrapped.module, optimizer)
    if arguments.model.verify_start:
        verify_start(fabric, arguments, plan, wrapped, expected)
    return wrapped, optimizer, template, document_end


def load_reference(
    fabric: Fabric, arguments: Arguments, source: str, plan: Plan
) -> tuple[Optional[PreTrainedModel], Optional[equality.Outputs], Optional[int]]:
    """On rank 0 the model with its weights on the CPU, and what it makes of the probe, None on the others; document_end.

    What is wrong with the weights, or with the model as transformers has it, ends the run on all ranks, with one sentence.
    """
    reference, expected, problem, document_end = None, None, None, plan.document_end
    if fabric.global_rank == 0:
        try:
            flash = plan.config._attn_implementation == "flash_attention_2"  # has no CPU kernel
            reference = loading.load_reference(
                source,
                loading.load_config(source) if flash else plan.config,
                loading.DTYPES[arguments.model.precision],
                arguments.training.seed,
                reading.sharded_weights(Path(source), loading.build_skeleton(plan.config, torch.float32)),
            )
            if not keeps_documents_apart(reference, plan):
                document_end = None
            if arguments.model.verify_start:
                expected = computed(reference, lambda: expected_outputs(reference, source, plan))
        except ValueError as error:
            problem = error if isinstance(error, Fault) else Fault(str(error))
    problem, document_end = fabric.broadcast((problem, document_end))
    if problem is not None:
        raise problem
    loading.disable_progress_bar()  # from here on there is our own
    return reference, expected, document_end


def expected_outputs(reference: PreTrainedModel, source: str, plan: Plan) -> equality.Outputs:
    """What the reference makes of the probe. Raises ValueError where that is nothing to train on."""
    if causality.sees_ahead(reference):
        raise ValueError(
            f"{type(reference).__name__}, as {source!r} configures it, isn't causal: what it says of a token depends on the "
            "tokens after it, so there is nothing to predict."
        )
    return equality.outputs(reference, probe_input(plan)[:, : equality.PROBE_TOKENS], lambda ids: reference(ids).logits)


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


def verify_start(
    fabric: Fabric, arguments: Arguments, plan: Plan, wrapped: nn.Module, expected: Optional[equality.Outputs]
) -> None:
    """Stop on all ranks if the wrapped model isn't the one that transformers loads."""
    began = time.monotonic()
    ours = equality.verify_start(
        fabric, wrapped, expected, probe_input(plan)[:, : equality.PROBE_TOKENS], arguments.model.precision
    )
    if expected is not None:
        print(
            f"Start verified: loss {ours.loss:.4f} on {equality.PROBE_TOKENS} tokens, {expected.loss:.4f} in plain "
            f"transformers ({time.monotonic() - began:.1f} s).",
            flush=True,
        )
