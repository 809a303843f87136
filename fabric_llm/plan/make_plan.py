"""Flags -> Plan: what they mean on this machine, with this dataset and model. Every mistake in them is found here.

Each check raises ValueError in one sentence with the offending value. What all ranks would find alike, rank 0 checks alone.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Optional, Union

from fabric_llm.base import files
from fabric_llm.base.command_line import Flags, is_rank_zero
from fabric_llm.base.faults import NO_CHECKPOINT, Fault
from fabric_llm.base.files import MANIFEST
from fabric_llm.checkpoint import keep, state_dicts
from fabric_llm.checkpoint.progress import Progress
from fabric_llm.data.dataset import TokenDataset
from fabric_llm.model import freezing, layers, router
from fabric_llm.model import strategy as strategies
from fabric_llm.model.loading import (
    DTYPES,
    checked_skeleton,
    load_config,
    resolve_attention,
    takes_positions,
    tokenizer_beside,
)
from fabric_llm.plan import checks, same_run
from fabric_llm.plan.data import differing_tokens, plan_data
from fabric_llm.plan.placement import Placement, batch_sizes
from fabric_llm.plan.plan import DataPlan, ModelPlan, Plan
from fabric_llm.plan.resume import MOST_DIFFERENCES


def make_plan(flags: Flags, placement: Placement, directory: Path, resume_from: Optional[Path]) -> Plan:
    """The plan of a run in `directory`, from its first step or from the checkpoint `resume_from`. Raises ValueError."""
    resumed = {} if resume_from is None else keep.verified(resume_from)
    start = Progress(**resumed["progress"]) if resumed else Progress()
    with same_run.written_by_a_run(resume_from):
        data, schedule = plan_data(flags, batch_sizes(flags, placement), start, resumed)
    source = flags.model.model_name if resume_from is None else str(resume_from)
    if resume_from is None and is_rank_zero():
        _require_whole(Path(source), flags.checkpoint.verify_checkpoints == "full")
    model, skeleton = _plan_model(flags, source, data, placement.kind)
    plan = Plan(placement, model, data, schedule, start, directory, resume_from, resumed)
    if is_rank_zero():
        _require_model_can(plan, skeleton)
        checks.profiled_steps(flags.logging.profile, schedule.max_step)
        checks.check_phases(vars(flags.training), schedule.max_step)
        if resume_from is not None:
            with same_run.written_by_a_run(resume_from):
                plan = replace(plan, changes=same_run.require_same_run(plan, flags))
    return plan


def _plan_model(flags: Flags, source: str, data: DataPlan, kind: str) -> tuple[ModelPlan, Any]:
    """(the model and how it trains, the model on the meta device). kind: "cpu" or "cuda". Raises ValueError."""
    asked, training = flags.model, flags.training
    config = load_config(source)
    config._attn_implementation = resolve_attention(config, asked.attention, kind)
    datasets = [*(data.sources or {"": data.dataset}).values(), *data.eval_data.values()]
    if is_rank_zero():
        _require_rows_for(config.get_text_config(), datasets, source)
    skeleton = checked_skeleton(source, config, DTYPES[asked.precision])
    model = ModelPlan(
        name=asked.model_name,
        source=source,
        config=config,
        tokenizer=_tokenizer(source, datasets),
        precision=asked.precision,
        bf16_updates=asked.bf16_updates,
        sums_in_float32=training.accumulation_dtype == "float32",
        router_aux_loss_coef=router.coefficient(skeleton, training.router_aux_loss_coef),
        loss=asked.loss,
        activation_checkpointing=checks.activation_checkpointing(flags.fsdp.activation_checkpointing),
        compiles=_compiles(asked.compile, skeleton, kind),
        frozen=freezing.frozen_names(skeleton, training.freeze, training.train_only),
    )
    return model, skeleton


def _require_whole(source: Path, hashes: bool) -> None:
    """What a checkpoint lists must be there, when a new run starts from it; a model card beside it is fine. Raises Fault."""
    if (source / MANIFEST).is_file():
        listed = files.read(source)["files"]
        files.check_files(source, listed, hashes, f"{str(source)!r} is damaged", NO_CHECKPOINT)
    elif (source / "trainer" / "progress.json").is_file():
        raise Fault(f"{str(source)!r} isn't a checkpoint: it has no {MANIFEST}.", NO_CHECKPOINT)


def _require_rows_for(text_config: Any, datasets: Sequence[TokenDataset], source: str) -> None:
    """Raises ValueError where the model has no embedding for a token, or no position."""
    longest = getattr(text_config, "max_position_embeddings", None)
    rotary = getattr(text_config, "rope_parameters", None) is not None
    for dataset in datasets:
        if dataset.max_token_id >= text_config.vocab_size:
            raise ValueError(
                f"{str(dataset.folder)!r} holds token id {dataset.max_token_id}, but the vocabulary of {source!r} "
                f"has {text_config.vocab_size} tokens: the dataset was made with another tokenizer; "
                f"{_made_with(dataset, source)}."
            )
        if longest is not None and dataset.context_length > longest and not rotary:
            raise ValueError(
                f"Rows of {str(dataset.folder)!r} hold {dataset.context_length} tokens, "
                f"but {source!r} has positions for {longest}."
            )


def _made_with(dataset: TokenDataset, tokenizer: str) -> str:
    """The command that makes a dataset anew with a tokenizer, as the end of a sentence."""
    given = " ".join(shlex.quote(str(name)) for name in (dataset.manifest.get("inputs") or ["TEXT"])[:10])
    length = f" --context_length {dataset.context_length}" if dataset.manifest else ""
    output = shlex.quote(f"{dataset.folder}-anew")
    return (
        f"make it with prepare_data.py --input {given} --tokenizer {shlex.quote(tokenizer)}{length} --output {output}"
    )


def _tokenizer(source: str, datasets: Sequence[TokenDataset]) -> Optional[Any]:
    """The tokenizer that goes with checkpoints, if any. Raises ValueError where that of a dataset is another."""
    found = of_model = tokenizer_beside(source)
    for dataset in datasets:
        of_data = tokenizer_beside(str(dataset.folder / "tokenizer"))
        if of_model is not None and of_data is not None and (differing := differing_tokens(of_model, of_data)):
            raise ValueError(
                f"{str(dataset.folder)!r} was made with another tokenizer than that of {source!r}"
                f"{differing}; {_made_with(dataset, source)}."
            )
        found = found or of_data
    return found


def _compiles(asked: Union[bool, str], skeleton: Any, kind: str) -> bool:
    """Whether layers are compiled. Raises ValueError where they are to be and can't."""
    if asked is False or asked == "auto" and (kind == "cpu" or not layers.is_worth_compiling(skeleton)):
        return False
    missing = layers.no_compiler(kind)
    if missing is not None and asked is True:
        raise ValueError(f"--compile true: {missing}.")
    if missing is not None and is_rank_zero():
        print(f"Layers aren't compiled: {missing}.", flush=True)
    return missing is None


def _require_model_can(plan: Plan, skeleton: Any) -> None:
    """Raises ValueError where the model can't do what the flags ask for. It is changed: nothing else uses it afterwards."""
    units = strategies.modules_to_wrap(skeleton, plan.placement.sharding.auto_wrap_policy)
    if plan.placement.strategy in ("fsdp", "fsdp2"):
        strategies.of_one_dtype(skeleton, units)
    name, checkpointing = type(skeleton).__name__, plan.model.activation_checkpointing
    if checkpointing != "none" and not skeleton.supports_gradient_checkpointing:
        raise ValueError(f"--activation_checkpointing {checkpointing}: {name} doesn't support it.")
    layers.checkpoint_activations(skeleton, checkpointing)
    if (
        plan.data.document_end is not None
        and plan.data.document_masking is True
        and not takes_positions(type(skeleton))
    ):
        raise ValueError(
            f"{name} takes no positions, so packed documents can't be kept apart: "
            "take --document_masking auto, which warns, or false."
        )
    if plan.resume_from is not None and plan.model.name not in (plan.model.source, plan.resumed["model_name"]):
        _require_same_model(plan.model.name, skeleton, plan.resume_from)


def _require_same_model(model_name: str, skeleton: Any, resume_from: Path) -> None:
    """Raises ValueError where --model_name is another model than that of the checkpoint, with what differs."""
    here = dict(state_dicts.shapes(checked_skeleton(model_name, load_config(model_name), skeleton.dtype)))
    there = dict(state_dicts.shapes(skeleton))
    differing = sorted(name for name in here.keys() | there.keys() if here.get(name) != there.get(name))
    if differing:
        words = (
            f"{name} {list(there.get(name, ())) or 'missing'}, not {list(here.get(name, ())) or 'there'}"
            for name in differing[:MOST_DIFFERENCES]
        )
        raise ValueError(
            f"{str(resume_from)!r} belongs to another model than --model_name {model_name!r}: "
            f"{len(differing)} parameters differ: {'; '.join(words)}."
        )
