"""Flags -> Plan: what they mean on this machine, with this dataset and model. Every mistake in them is found here.

Each check raises ValueError in one sentence with the offending value.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any, Optional, Union

import torch
from torch import Tensor

from fabric_llm.base import files
from fabric_llm.base.command_line import Flags, is_first_of_machine, is_rank_zero
from fabric_llm.base.faults import NO_CHECKPOINT, Fault
from fabric_llm.base.files import MANIFEST
from fabric_llm.checkpoint import reading, state_dicts
from fabric_llm.checkpoint.progress import Progress
from fabric_llm.data.dataset import TokenDataset
from fabric_llm.data.mixture import Mixture
from fabric_llm.data.mixture_text import DataMix
from fabric_llm.data.sources import open_source
from fabric_llm.model import freezing, layers, router
from fabric_llm.model import strategy as strategies
from fabric_llm.model.loading import (
    DTYPES,
    build_skeleton,
    causal_lm_class,
    checked_skeleton,
    load_config,
    resolve_attention,
    takes_positions,
    tokenizer_beside,
)
from fabric_llm.plan import checks, measuring, mixing, resume
from fabric_llm.plan.measuring import ONE_SET
from fabric_llm.plan.placement import Placement, batch_sizes

PROBE_TOKENS = 128  # of the validation split, at most


@dataclass(frozen=True)
class Plan(Placement):
    """What the flags come to: nothing is left to decide."""

    dataset: TokenDataset  # of a mixture: all its training splits, and the validation split of its first source
    source: str  # hub name or directory that the weights and their config come from
    config: Any  # the model's transformers configuration
    tokenizer: Optional[Any]
    precision: str
    bf16_updates: str
    micro_batch_size: int  # sequences per forward pass and device
    micro_batches: int  # per step and device
    global_batch_size: int  # sequences
    start: Progress
    max_step: int
    end: Optional[int]  # position at which number_epochs are over; None with max_step
    run_directory: Path
    resume_from: Optional[Path]
    has_checkpoint: bool  # that it can be resumed from where it starts: False for a new run, and for a branch
    document_end: Optional[int]  # token id that ends each packed document, None where documents aren't kept apart
    document_masking: Union[bool, str]  # as given, or as the run had it; "auto": off if the model turns out not to
    sums_in_float32: bool  # gradients of low-precision weights, over micro-batches
    router_aux_loss_coef: float  # 0 where no auxiliary loss of a mixture of experts is trained
    loss: str  # full or chunked; "auto" until the reference is loaded
    activation_checkpointing: str  # none, full, every:N or selective
    compiles: bool  # each layer
    frozen: frozenset[str]  # names of the parameters that don't train, without those that never do
    resumed: dict[str, Any] = field(default_factory=dict)  # progress.json of `resume_from`
    sources: dict[str, TokenDataset] = field(default_factory=dict)  # of a mixture
    mix: Optional[DataMix] = None  # --data_mix
    raised: Mapping[str, Fraction] = field(default_factory=dict)  # shares of its sources, by rewinds
    mixture: Optional[Mixture] = None  # that over this run
    eval_data: dict[str, TokenDataset] = field(default_factory=dict)  # --eval_data

    @property
    def syncs_every_micro_batch(self) -> bool:
        """False where the gradients of a step can wait for each other unreduced."""
        return strategies.syncs_every_micro_batch(self.strategy, self.sums_in_float32 and self.precision == "bf16-true")

    def is_over(self, progress: Progress) -> bool:
        """True once the last step is done."""
        return progress.step >= self.max_step or progress.position == self.end

    def after(self, progress: Progress) -> Progress:
        """Where the run is one step later: a global batch, or what is left of the last epoch, is consumed."""
        left = self.global_batch_size if self.end is None else self.end - progress.position
        return progress.advance(min(self.global_batch_size, left), self.context_at(progress.position))

    def context_at(self, position: int) -> int:
        """Tokens of the sequences of the step that starts at `position`."""
        return self.dataset.context_length if self.mixture is None else self.mixture.context_at(position)

    @property
    def contexts(self) -> list[int]:
        """All tokens per sequence that the run has."""
        return sorted({source.context_length for source in self.sources.values()} or {self.dataset.context_length})

    def end_of_run(self) -> int:
        """The position after the last step."""
        last = self.start.position + (self.max_step - self.start.step) * self.global_batch_size
        return last if self.end is None else min(last, self.end)

    def validation_splits(self) -> dict[str, Any]:
        """What is evaluated, by name."""
        of_training = {name: source.validation for name, source in self.sources.items()}
        added = {name: dataset.validation for name, dataset in self.eval_data.items()}
        return {**(of_training or {ONE_SET: self.dataset.validation}), **added}

    def shares_at(self, position: int) -> dict[str, float]:
        """What each of the `validation_splits` counts after the step that leads to `position`."""
        return {ONE_SET: 1.0} if self.mixture is None else self.mixture.shares_at(max(position - 1, 0))

    def resolved(self) -> dict[str, Any]:
        """What arguments.yaml holds instead of what was given: the same step on any devices that its batch divides by."""
        return {
            "context_length": self.contexts[0] if len(self.contexts) == 1 else None,
            "global_batch_size": self.global_batch_size,
            "micro_batch_size": self.micro_batch_size,
            "gradient_accumulation_steps": None,
        }

    def probe_input(self) -> Tensor:
        """The first tokens of the validation split, int64 [1, up to PROBE_TOKENS]."""
        return torch.tensor(self.dataset.validation[0]["input_ids"]).long()[None, :PROBE_TOKENS]


def make_plan(flags: Flags, placement: Placement, directory: Path, resume_from: Optional[Path]) -> Plan:
    """Resolve and check everything. Raises ValueError."""
    model, training = flags.model, flags.training
    micro_batch_size, micro_batches, global_batch_size = batch_sizes(flags, placement)
    resumed = {} if resume_from is None else reading.verified(resume_from)
    start = Progress(**resumed["progress"]) if resumed else Progress()
    data = plan_data(flags, micro_batch_size, global_batch_size, start, resumed)
    dataset, sources = data["dataset"], list(data.get("sources", {}).values()) or [data["dataset"]]
    eval_data = measuring.open_eval_data(flags)
    datasets = [*sources, *eval_data.values()]
    source = model.model_name if resume_from is None else str(resume_from)
    if resume_from is None:
        check_start(flags, Path(source))
    config = load_config(source)
    config._attn_implementation = resolve_attention(config, model.attention, placement.kind)
    sharded = placement.strategy in ("fsdp", "fsdp2")
    skeleton = check_model(flags, config, datasets, source, sharded)
    if resume_from is not None and model.model_name not in (source, resumed.get("model_name")):
        check_same_model(flags, skeleton, resume_from)
    masking = resume.document_masking(flags, resumed)
    checks.profiled_steps(flags.logging.profile, data["max_step"])
    checks.check_phases(vars(training), data["max_step"])
    return Plan(
        **vars(placement),
        **data,
        source=source,
        config=config,
        eval_data=eval_data,
        tokenizer=check_tokenizer(source, datasets),
        precision=model.precision,
        bf16_updates=model.bf16_updates,
        micro_batch_size=micro_batch_size,
        micro_batches=micro_batches,
        global_batch_size=global_batch_size,
        start=start,
        run_directory=directory,
        resume_from=resume_from,
        has_checkpoint=resume_from is not None and resume_from.parent.resolve() == directory.resolve(),
        document_end=find_document_end(masking, dataset, config),
        document_masking=masking,
        sums_in_float32=training.accumulation_dtype == "float32",
        router_aux_loss_coef=router.coefficient(skeleton, training.router_aux_loss_coef),
        loss=model.loss,
        activation_checkpointing=checks.activation_checkpointing(flags.fsdp.activation_checkpointing),
        compiles=find_compiles(model.compile, skeleton, placement.kind),
        frozen=freezing.frozen_names(skeleton, training.freeze, training.train_only),
        resumed=resumed,
    )


def plan_data(
    flags: Flags, micro_batch_size: int, global_batch_size: int, start: Progress, resumed: dict[str, Any]
) -> dict[str, Any]:
    """The fields of a Plan that the data decides: what is read, and when that ends. Raises ValueError."""
    training = flags.training
    if flags.data.data_mix:
        return mixing.plan_mixture(flags, global_batch_size, start, resumed)
    dataset = open_checked(flags, micro_batch_size, global_batch_size)
    if training.max_step is not None:
        return {"dataset": dataset, "end": None, "max_step": training.max_step}
    end = training.number_epochs * len(dataset.train)
    return {"dataset": dataset, "end": end, "max_step": last_step(start, end, global_batch_size)}


def open_checked(flags: Flags, micro_batch_size: int, global_batch_size: int) -> TokenDataset:
    """The dataset, checked against the batches. One rank of each machine compares hashes. Raises ValueError."""
    data = flags.data
    dataset = open_source(Path(data.train_data_dir), data.verify_data if is_first_of_machine() else "size")
    checks.row_length(str(dataset.folder), dataset.context_length, data.context_length)
    checks.batches_fit(str(dataset.folder), len(dataset.train), micro_batch_size, global_batch_size)
    return dataset


def last_step(progress: Progress, end: int, global_batch_size: int) -> int:
    """The step that comes to the position `end`, the last one with what is left of a batch."""
    return progress.step - (progress.position - end) // global_batch_size


def check_start(flags: Flags, source: Path) -> None:
    """What a checkpoint lists must be there, when a new run starts from it; a model card beside it is fine. Raises Fault."""
    if (source / MANIFEST).is_file():
        hashes = flags.checkpoint.verify_checkpoints == "full" and is_rank_zero()
        listed = files.read(source)["files"]
        files.check_files(source, listed, hashes, f"{str(source)!r} is damaged", NO_CHECKPOINT)
    elif (source / "trainer" / "progress.json").is_file():
        raise Fault(f"{str(source)!r} isn't a checkpoint: it has no {MANIFEST}.", NO_CHECKPOINT)


def check_rows(text_config: Any, dataset: TokenDataset, source: str) -> None:
    """The rows of a dataset against the model. Raises ValueError."""
    if dataset.max_token_id >= text_config.vocab_size:
        raise ValueError(
            f"{str(dataset.folder)!r} holds token id {dataset.max_token_id}, but the vocabulary of {source!r} "
            f"has {text_config.vocab_size} tokens: the dataset was made with another tokenizer; {made_with(dataset, source)}."
        )
    longest = getattr(text_config, "max_position_embeddings", None)
    rotary = getattr(text_config, "rope_parameters", None) is not None
    if longest is not None and dataset.context_length > longest and not rotary:
        raise ValueError(
            f"Rows of {str(dataset.folder)!r} hold {dataset.context_length} tokens, "
            f"but {source!r} has positions for {longest}."
        )


def check_model(flags: Flags, config: Any, datasets: Sequence[TokenDataset], source: str, sharded: bool) -> Any:
    """The model against the flags and the data. Returns it on the meta device. Raises ValueError."""
    for dataset in datasets:
        check_rows(config.get_text_config(), dataset, source)
    skeleton = checked_skeleton(source, config, DTYPES[flags.model.precision])
    units = strategies.modules_to_wrap(skeleton, flags.fsdp.auto_wrap_policy)
    if sharded:
        strategies.of_one_dtype(skeleton, units)
    router.coefficient(skeleton, flags.training.router_aux_loss_coef)
    checkpointing = checks.activation_checkpointing(flags.fsdp.activation_checkpointing)
    if checkpointing != "none" and not skeleton.supports_gradient_checkpointing:
        raise ValueError(f"--activation_checkpointing {checkpointing}: {type(skeleton).__name__} doesn't support it.")
    layers.checkpoint_activations(skeleton, checkpointing)
    return skeleton


def find_compiles(asked: Union[bool, str], skeleton: Any, kind: str) -> bool:
    """Whether layers are compiled. Raises ValueError where they are to be and can't."""
    if asked is False or asked == "auto" and (kind == "cpu" or not layers.is_worth_compiling(skeleton)):
        return False
    missing = layers.no_compiler(kind)
    if missing is not None and asked is True:
        raise ValueError(f"--compile true: {missing}.")
    if missing is not None and is_rank_zero():
        print(f"Layers aren't compiled: {missing}.", flush=True)
    return missing is None


def check_same_model(flags: Flags, skeleton: Any, resume_from: Path) -> None:
    """Raises ValueError where --model_name is another model than that of the checkpoint, with what differs."""
    model_name = flags.model.model_name
    started_from = build_skeleton(load_config(model_name), skeleton.dtype)
    here, there = dict(state_dicts.shapes(started_from)), dict(state_dicts.shapes(skeleton))
    differing = sorted(name for name in here.keys() | there.keys() if here.get(name) != there.get(name))
    if differing:
        words = (
            f"{name} {list(there.get(name, ())) or 'missing'}, not {list(here.get(name, ())) or 'there'}"
            for name in differing[: resume.MOST_DIFFERENCES]
        )
        raise ValueError(
            f"{str(resume_from)!r} belongs to another model than --model_name {model_name!r}: "
            f"{len(differing)} parameters differ: {'; '.join(words)}."
        )


def made_with(dataset: TokenDataset, tokenizer: str) -> str:
    """The command that makes a dataset anew with a tokenizer, as the end of a sentence."""
    inputs = dataset.manifest.get("inputs")
    words = [str(name) for name in inputs] if isinstance(inputs, list) and inputs else ["TEXT"]
    given = " ".join(map(shlex.quote, words[:10]))
    length = f" --context_length {dataset.context_length}" if dataset.manifest else ""
    output = shlex.quote(f"{dataset.folder}-anew")
    return (
        f"make it with prepare_data.py --input {given} --tokenizer {shlex.quote(tokenizer)}{length} --output {output}"
    )


def check_tokenizer(source: str, datasets: Sequence[TokenDataset]) -> Optional[Any]:
    """The tokenizer that goes with checkpoints, if any. Raises ValueError where that of a dataset is another."""
    found = of_model = tokenizer_beside(source)
    for dataset in datasets:
        of_data = tokenizer_beside(str(dataset.folder / "tokenizer"))
        if of_model is not None and of_data is not None and of_model.get_vocab() != of_data.get_vocab():
            raise ValueError(
                f"{str(dataset.folder)!r} was made with another tokenizer than that of {source!r}"
                f"{mixing.differing_tokens(of_model.get_vocab(), of_data.get_vocab())}; {made_with(dataset, source)}."
            )
        found = found or of_data
    return found


def find_document_end(masking: Union[bool, str], dataset: TokenDataset, config: Any) -> Optional[int]:
    """The token that ends each document of a dataset of prepare_data.py, if documents are to be kept apart."""
    if not (masking and dataset.manifest.get("packed")):
        return None
    model_class = causal_lm_class(config)
    if masking is True and not takes_positions(model_class):
        raise ValueError(
            f"{model_class.__name__} takes no positions, so packed documents can't be kept apart: "
            "take --document_masking auto, which warns, or false."
        )
    return dataset.manifest["eos_token_id"]
