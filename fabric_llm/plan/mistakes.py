"""Mistakes in a command that need no model: told before torch, lightning and transformers are imported, which takes seconds.

The checks themselves are in the rooms that they belong to, which make them again. Here they stand in the order in which a
command is read. Each function raises ValueError in one sentence with the offending value.
"""

from __future__ import annotations

import glob
import os
from pathlib import Path
from typing import Optional, Union

from fabric_llm.base import files
from fabric_llm.base.command_line import Flags, is_rank_zero
from fabric_llm.base.files import MANIFEST
from fabric_llm.base.names import hub_name
from fabric_llm.checkpoint import keep
from fabric_llm.data import blend, prompts
from fabric_llm.data.sources import check_dataset_folder, check_splits, parse_eval_data, said_of_rows
from fabric_llm.model import freezing, strategy_rules
from fabric_llm.model.folders import check_model_folder
from fabric_llm.plan import flag_rules, measuring, resume, run_directory, trackers
from fabric_llm.plan.stages import lay_out
from fabric_llm.prepare import tokenizer_bounds
from fabric_llm.prepare.formats import DEFAULT_PATTERNS
from fabric_llm.prepare.inputs import find_sources, preparation, prepared_output, separator, shard
from fabric_llm.processes.launch import launched_world, started_by_other


def in_training(flags: Flags) -> None:
    """Of train.py. Raises ValueError.

    A resumed run under a launcher is checked later, by rank 0 alone (joining.py). So is the model of a run whose directory is
    there: what is wrong with it is written into the directory.
    """
    in_flags(flags)
    if flags.checkpoint.resume and (started_by_other() or flags.devices.num_nodes > 1):
        return
    for folder in parse_eval_data(flags.evaluation.eval_data).values():
        check_dataset_folder(folder, flags.model.model_name)
        check_splits(Path(folder))
    if flags.data.data_mix:
        in_mixture(flags)
    elif not flags.demo:
        check_dataset_folder(flags.data.train_data_dir, flags.model.model_name)
        in_dataset(flags)
    directory = resume.directory(flags)
    if flags.checkpoint.resume:
        resume.require_given(flags)
    if flags.checkpoint.checkpoint is None and not directory.is_dir():  # the run starts
        check_model_folder(flags.model.model_name)
        in_reach(flags.model.model_name)
        for folder in (Path(flags.model.model_name), *(Path(name, "tokenizer") for name in datasets_of(flags))):
            tokenizer_bounds.check_file(folder / "tokenizer.json")
    run_directory.require_writable(directory)


def datasets_of(flags: Flags) -> list[str]:
    """The folders that --train_data_dir or --data_mix names."""
    if flags.data.data_mix:
        return [source.path for source in blend.parse(flags.data.data_mix).sources]
    return [flags.data.train_data_dir]


def in_flags(flags: Flags) -> None:
    """The flags of train.py by themselves. Raises ValueError."""
    for name, value in (
        ("model_name", flags.model.model_name),
        ("train_data_dir", flags.data.train_data_dir or flags.data.data_mix),
    ):
        if not value:
            raise ValueError(f"--{name} is missing: a run needs --model_name and --train_data_dir (or --data_mix).")
    if flags.data.train_data_dir and flags.data.data_mix:
        raise ValueError(
            "--train_data_dir and --data_mix are both given: a run has one dataset, or a mixture of several."
        )
    names = blend.parse(flags.data.data_mix).names if flags.data.data_mix else [measuring.ONE_SET]
    flag_rules.numbers(flags.flat())
    measuring.require_names(flags, names, bool(flags.data.data_mix))
    trackers.named(flags.logging.logger)
    freezing.check(flags.training.freeze, flags.training.train_only)
    devices, num_nodes = known_devices(flags)
    world_size = None if devices is None else devices * num_nodes
    fsdp = flags.fsdp
    strategy = strategy_rules.strategy(
        fsdp.strategy,
        world_size,
        flags.devices.tpu,
        flags.model.precision,
        "cpu" if flags.devices.accelerator == "cpu" else None,
        strategy_rules.Sharding(fsdp.auto_wrap_policy, fsdp.sharding_strategy, cpu_offload=fsdp.cpu_offload),
    )
    if (batches := known_batch_sizes(flags)) is not None:
        strategy_rules.offload(strategy, fsdp.cpu_offload, batches[1])
    resume.overrides(flags)
    if flags.logging.sample_prompts is not None and is_rank_zero():  # rank 0 reads them for all
        prompts.read(flags.logging.sample_prompts)


def in_dataset(flags: Flags) -> None:
    """Batches against what a dataset's manifest says of it, where both are known. Raises ValueError."""
    folder, batches = Path(flags.data.train_data_dir), known_batch_sizes(flags)
    said = said_of_rows(folder)
    if said is not None:
        micro_batch_size, _, global_batch_size = batches or (1, 1, 1)
        flag_rules.sizes(str(folder), *said, flags.data.context_length, micro_batch_size, global_batch_size)


def in_mixture(flags: Flags) -> None:
    """The folders of --data_mix, and what their manifests say of them. Raises ValueError."""
    mix = blend.parse(flags.data.data_mix)
    for source in mix.sources:
        check_dataset_folder(source.path, flags.model.model_name)
        check_splits(Path(source.path))
    said = [said_of_rows(Path(source.path)) for source in mix.sources]
    for source, numbers in zip(mix.sources, said):
        if numbers is not None:
            flag_rules.row_length(source.path, numbers[1], flags.data.context_length)
    blend.require_one_length(mix, [None if numbers is None else numbers[1] for numbers in said])


def in_length(flags: Flags, global_batch_size: int) -> None:
    """--data_mix over a run that starts, as far as manifests say how many rows there are. Raises ValueError."""
    if not flags.data.data_mix or flags.checkpoint.resume:
        return
    mix, training = blend.parse(flags.data.data_mix), flags.training
    said = [said_of_rows(Path(source.path)) for source in mix.sources]
    if None not in said:
        lay_out(mix, [rows for rows, _ in said], global_batch_size, training.max_step, training.number_epochs)


def asked_world(flags: Flags) -> tuple[Union[int, str], int]:
    """(devices per node or "auto", nodes): the launcher's, where one has started the ranks, else the flags'.

    Raises ValueError where the command line says otherwise than the launcher; a file, such as flags.yaml, yields.
    """
    asked = (flags.devices.devices, flags.devices.num_nodes)
    given = {name: value for name, value in zip(("devices", "num_nodes"), asked) if name in flags.on_command_line}
    launched = None if flags.devices.tpu else launched_world(given)
    return launched or asked


def known_devices(flags: Flags) -> tuple[Optional[int], int]:
    """(devices per node, nodes); the first is None where only torch can say."""
    devices, num_nodes = asked_world(flags)
    if devices == "auto":
        devices = 1 if flags.devices.accelerator == "cpu" else None
    return None if flags.devices.tpu else devices, num_nodes


def known_batch_sizes(flags: Flags) -> Optional[tuple[int, int, int]]:
    """`flag_rules.batch_sizes` of the flags, None where the devices aren't known, and in the demo, which takes what it can."""
    training, (devices, num_nodes) = flags.training, known_devices(flags)
    if devices is None or flags.demo:
        return None
    return flag_rules.batch_sizes(
        training.micro_batch_size,
        training.gradient_accumulation_steps,
        training.global_batch_size,
        devices,
        num_nodes,
    )


def in_preparation(flags: Flags) -> None:
    """Of prepare_data.py. Raises ValueError."""
    pattern, output = flags.pattern or DEFAULT_PATTERNS, Path(flags.output).resolve()
    if flags.self_replay is not None or flags.tokens is not None:
        in_self_replay(flags)
    preparation(
        flags.input or flags.self_replay,
        flags.tokenizer or flags.self_replay,
        flags.train_tokenizer,
        flags.context_length,
        flags.validation_fraction,
        pattern,
        flags.num_workers,
    )
    separator(flags.document_separator)
    shard(flags.shard)
    prepared_output(output, flags.overwrite)
    files.writable(output)
    find_sources(flags.input or (), pattern=pattern, exclude=flags.exclude or [], output=output)
    for given in flags.input or ():
        if not glob.has_magic(given):
            in_reach(given, "dataset")
    if flags.tokenizer is not None and not os.path.isdir(flags.tokenizer):
        hub_name("--tokenizer", flags.tokenizer, "tokenizer")
        in_reach(flags.tokenizer, "tokenizer")
    elif flags.tokenizer is not None:
        tokenizer_bounds.check_file(Path(flags.tokenizer, "tokenizer.json"))
        tokenizer_bounds.try_out(Path(flags.tokenizer, "tokenizer.json"))


def in_self_replay(flags: Flags) -> None:
    """--self_replay and --tokens of prepare_data.py. Raises ValueError."""
    if flags.self_replay is None or flags.tokens is None:
        raise ValueError("--self_replay MODEL and --tokens N go together: how many tokens to sample from which model")
    if flags.tokens < 1:
        raise ValueError(f"--tokens must be positive, not {flags.tokens}")
    others = {"input": flags.input, "tokenizer": flags.tokenizer, "train_tokenizer": flags.train_tokenizer}
    others |= {"shard": flags.shard, "engine ray": flags.engine == "ray"}
    if given := [name for name, value in others.items() if value]:
        raise ValueError(f"--{given[0]} doesn't go with --self_replay, which samples its documents on this machine")
    check_model_folder(flags.self_replay)
    in_reach(flags.self_replay)
    if flags.packing == "concat" and flags.tokens < (least := 2 * flags.context_length):
        raise ValueError(
            f"--tokens {flags.tokens} don't fill a row of {flags.context_length} tokens to train on and one to validate: "
            f"ask for {least} at least, or take a smaller --context_length"
        )


def in_reach(name: str, kind: str = "model") -> None:
    """What isn't here, and so a name on the hub: can it be had? Raises ValueError."""
    if not os.path.exists(name):
        from fabric_llm.base import hub  # whose import takes time

        hub.require_reachable(name, kind)


def in_export(flags: Flags) -> None:
    """Of export_hf.py. Raises ValueError."""
    if flags.push_to_hub is not None:
        from huggingface_hub.utils import validate_repo_id

        validate_repo_id(flags.push_to_hub)
    keep.checkpoint_at(flags.checkpoint)
    exported_output(Path(flags.output), flags.overwrite)
    files.writable(Path(flags.output))


def exported_output(output: Path, overwrite: bool) -> None:
    """The folder that an exported model is to be. Raises ValueError where it mustn't be replaced."""
    if not output.exists():
        return
    if not overwrite:
        raise ValueError(f"{str(output)!r} exists; take another --output, or --overwrite true.")
    if not (output / "config.json").is_file() or (output / MANIFEST).exists():  # such as the run itself
        raise ValueError(f"{str(output)!r} isn't an exported model, so it is not overwritten; take another --output.")
