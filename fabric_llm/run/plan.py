"""Arguments -> Plan: every mistake that can be found before a process or a model exists is found here.

Each check raises ValueError in one sentence with the offending value; assemble.py turns that into an exit code.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional, Union

from arguments import Arguments, is_first_of_machine, is_rank_zero
from fabric_llm.base import files
from fabric_llm.base.faults import NO_CHECKPOINT, Fault
from fabric_llm.base.files import MANIFEST
from fabric_llm.checkpoint import reading, state_dicts
from fabric_llm.checkpoint.progress import Progress
from fabric_llm.data.dataset import TokenDataset, open_dataset
from fabric_llm.data.demo import prepare_demo
from fabric_llm.model import router, strategy_rules
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
from fabric_llm.model.strategy import modules_to_wrap, of_one_dtype, resolve_devices, resolve_strategy
from fabric_llm.model.strategy_rules import Sharding
from fabric_llm.run import flags, mistakes, resume


@dataclass(frozen=True)
class Placement:
    """Which devices, and how the model is spread over them."""

    strategy: str  # a name of strategy.py's table
    sharding: Sharding
    devices: int  # per node
    num_nodes: int
    kind: str  # "cpu" or "cuda"

    @property
    def world_size(self) -> int:
        return self.devices * self.num_nodes


@dataclass(frozen=True)
class Plan(Placement):
    """What the arguments mean on this machine, with this dataset and model: nothing is left to decide."""

    dataset: TokenDataset
    source: str  # hub name or directory that the weights and their config come from
    config: Any  # the model's transformers configuration
    tokenizer: Optional[Any]
    micro_batch_size: int  # sequences per forward pass and device
    micro_batches: int  # per step and device
    global_batch_size: int  # sequences
    start: Progress
    max_step: int
    end: Optional[int]  # position at which number_epochs are over; None with max_step
    run_directory: Path
    resume_from: Optional[Path]
    document_end: Optional[int]  # token id that ends each packed document, None where documents aren't kept apart
    document_masking: Union[bool, str]  # as given, or as the run had it; "auto": off if the model turns out not to

    def sequences_at(self, position: int) -> int:
        """Sequences that the step at `position` consumes: a global batch, or what is left of the last epoch."""
        return self.global_batch_size if self.end is None else min(self.global_batch_size, self.end - position)


def placement(arguments: Arguments) -> Placement:
    """What the arguments and the launcher say of devices, without a look at model or data. Raises ValueError."""
    fsdp = arguments.fsdp
    devices, num_nodes, kind = resolve_devices(*mistakes.asked_world(arguments), arguments.devices.accelerator)
    sharding = Sharding(
        fsdp.auto_wrap_policy,
        fsdp.sharding_strategy,
        fsdp.limit_all_gathers,
        fsdp.cpu_offload,
        fsdp.backward_prefetch,
        fsdp.reduce_dtype,
    )
    tpu, precision = arguments.devices.tpu, arguments.model.precision
    strategy = resolve_strategy(fsdp.strategy, devices * num_nodes, tpu, precision, kind, sharding)
    return Placement(strategy, sharding, devices, num_nodes, kind)


def make_plan(arguments: Arguments) -> Plan:
    """Resolve and check everything. Raises ValueError."""
    data, model, training = arguments.data, arguments.model, arguments.training
    mistakes.in_flags(arguments)
    place = placement(arguments)
    given_micro_batch = training.micro_batch_size
    if arguments.demo and given_micro_batch and training.global_batch_size:  # runs on any number of devices
        given_micro_batch = min(given_micro_batch, max(1, training.global_batch_size // place.world_size))
    micro_batch_size, micro_batches, global_batch_size = flags.batch_sizes(
        given_micro_batch,
        training.gradient_accumulation_steps,
        training.global_batch_size,
        place.devices,
        place.num_nodes,
    )
    strategy_rules.offload(place.strategy, place.sharding.cpu_offload, micro_batches)
    directory = resume.directory(arguments)
    if arguments.demo:
        prepare_demo(Path(data.train_data_dir), data.context_length)
    dataset = open_dataset(data.train_data_dir, data.verify_data if is_first_of_machine() else "size")
    flags.sizes(
        str(dataset.folder),
        len(dataset.train),
        dataset.context_length,
        data.context_length,
        micro_batch_size,
        global_batch_size,
    )
    resume_from = resume.choose(arguments, directory)
    source = model.model_name if resume_from is None else str(resume_from)
    if resume_from is None:
        check_start(arguments, Path(source))
    config = load_config(source)
    config._attn_implementation = resolve_attention(causal_lm_class(config), model.attention, place.kind)
    document = None if resume_from is None else reading.verified(resume_from)
    begun_with = document.get("model_name") if document is not None else None
    sharded = place.strategy in ("fsdp", "fsdp2")
    tokenizer = check_model(arguments, config, dataset, source, resume_from, begun_with, sharded)
    end = None if training.max_step is not None else training.number_epochs * len(dataset.train)
    masking = resume.document_masking(arguments, document)
    start = Progress() if document is None else Progress(**document["progress"])
    max_step = training.max_step if end is None else last_step(start, end, global_batch_size)
    plan = Plan(
        **vars(place),
        dataset=dataset,
        source=source,
        config=config,
        tokenizer=tokenizer,
        micro_batch_size=micro_batch_size,
        micro_batches=micro_batches,
        global_batch_size=global_batch_size,
        start=start,
        max_step=max_step,
        end=end,
        run_directory=directory,
        resume_from=resume_from,
        document_end=find_document_end(masking, dataset, config),
        document_masking=masking,
    )
    if document is not None:
        resume.require_same_run(plan, arguments, document)
    return plan


def last_step(progress: Progress, end: int, global_batch_size: int) -> int:
    """The step that comes to the position `end`, the last one with what is left of a batch."""
    return progress.step - (progress.position - end) // global_batch_size


def check_start(arguments: Arguments, source: Path) -> None:
    """What a checkpoint lists must be there, when a new run starts from it; a model card beside it is fine. Raises Fault."""
    if (source / MANIFEST).is_file():
        hashes = arguments.checkpoint.verify_checkpoints == "full" and is_rank_zero()
        listed = files.read(source)["files"]
        files.check_files(source, listed, hashes, f"{str(source)!r} is damaged", NO_CHECKPOINT)
    elif (source / "trainer" / "progress.json").is_file():
        raise Fault(f"{str(source)!r} isn't a checkpoint: it has no {MANIFEST}.", NO_CHECKPOINT)


def check_model(
    arguments: Arguments,
    config: Any,
    dataset: TokenDataset,
    source: str,
    resume_from: Optional[Path],
    begun_with: Optional[str],
    sharded: bool,
) -> Optional[Any]:
    """The model against the flags and the dataset. Returns the tokenizer that goes with checkpoints, if any.

    begun_with: --model_name of the run that is resumed; it may be gone meanwhile.
    """
    text_config = config.get_text_config()
    if dataset.max_token_id >= text_config.vocab_size:
        raise ValueError(
            f"{str(dataset.folder)!r} holds token id {dataset.max_token_id}, but the vocabulary of {source!r} "
            f"has {text_config.vocab_size} tokens: the dataset was made with another tokenizer."
        )
    longest = getattr(text_config, "max_position_embeddings", None)
    rotary = getattr(text_config, "rope_parameters", None) is not None
    if longest is not None and dataset.context_length > longest and not rotary:
        raise ValueError(
            f"Rows of {str(dataset.folder)!r} hold {dataset.context_length} tokens, "
            f"but {source!r} has positions for {longest}."
        )
    skeleton = checked_skeleton(source, config, DTYPES[arguments.model.precision])
    units = modules_to_wrap(skeleton, arguments.fsdp.auto_wrap_policy)
    if sharded:
        of_one_dtype(skeleton, units)
    router.coefficient(skeleton, arguments.training.router_aux_loss_coef)
    if arguments.fsdp.activation_checkpointing and not skeleton.supports_gradient_checkpointing:
        raise ValueError(f"--activation_checkpointing true: {type(skeleton).__name__} doesn't support it.")
    if resume_from is not None and arguments.model.model_name not in (source, begun_with):
        started_from = build_skeleton(load_config(arguments.model.model_name), skeleton.dtype)
        here, there = dict(state_dicts.shapes(started_from)), dict(state_dicts.shapes(skeleton))
        differing = sorted(name for name in here.keys() | there.keys() if here.get(name) != there.get(name))
        if differing:
            words = (
                f"{name} {list(there.get(name, ())) or 'missing'}, not {list(here.get(name, ())) or 'there'}"
                for name in differing[: resume.MOST_DIFFERENCES]
            )
            raise ValueError(
                f"{str(resume_from)!r} belongs to another model than --model_name {arguments.model.model_name!r}: "
                f"{len(differing)} parameters differ: {'; '.join(words)}."
            )
    of_model, of_data = tokenizer_beside(source), tokenizer_beside(str(dataset.folder / "tokenizer"))
    if of_model is not None and of_data is not None and of_model.get_vocab() != of_data.get_vocab():
        ids, others = of_model.get_vocab(), of_data.get_vocab()
        differing = sorted(token for token in ids.keys() | others.keys() if ids.get(token) != others.get(token))
        words = ", ".join(
            f"{token!r} is {others.get(token, 'none')}, not {ids.get(token, 'none')}"
            for token in differing[: resume.MOST_DIFFERENCES]
        )
        raise ValueError(
            f"{str(dataset.folder)!r} was made with another tokenizer than that of {source!r}: {len(differing)} tokens "
            f"differ: {words}; run prepare_data.py with --tokenizer {source}."
        )
    return of_model or of_data


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
