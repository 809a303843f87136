"""Mistakes in a command that need no model: told before torch, lightning and transformers are imported, which takes seconds.

The checks themselves are in fabric_llm/check.py, and preflight.py, prepare.py and export.py make them again: here they
stand in the order in which a command is read. Each function raises ValueError in one sentence with the offending value.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Optional, Union

from arguments import Arguments, ExportArguments, PrepareArguments
from fabric_llm.base import files
from fabric_llm.base.names import hub_name
from fabric_llm.checkpoint import keep
from fabric_llm.data.folders import check_dataset_folder, said_of_rows
from fabric_llm.data.inputs import DEFAULT_PATTERNS, preparation, prepared_output, text_input
from fabric_llm.model import strategy_rules
from fabric_llm.model.folders import check_model_folder
from fabric_llm.processes.launch import launched_world, started_by_other
from fabric_llm.run import flags, resume, run_directory


def in_training(arguments: Arguments) -> None:
    """Of train.py. Raises ValueError.

    Of a run that resumes on ranks that others started, rank 0 alone looks at the run's files, see assemble.py; and what
    is wrong with a run whose directory is there is written into it, so that a model is looked at later there.
    """
    in_flags(arguments)
    if arguments.checkpoint.resume and (started_by_other() or arguments.devices.num_nodes > 1):
        return
    folder = arguments.data.train_data_dir
    if not arguments.demo:
        check_dataset_folder(folder)
        in_dataset(arguments)
    directory = resume.directory(arguments)
    if arguments.checkpoint.resume:
        resume.require_given(arguments)
    if arguments.checkpoint.checkpoint is None and not directory.is_dir():  # the run starts
        check_model_folder(arguments.model.model_name)
    run_directory.require_writable(directory)


def in_flags(arguments: Arguments) -> None:
    """The flags of train.py by themselves. Raises ValueError."""
    for name, value in (
        ("model_name", arguments.model.model_name),
        ("train_data_dir", arguments.data.train_data_dir),
    ):
        if not value:
            raise ValueError(f"--{name} is missing: a run needs --model_name and --train_data_dir.")
    flags.numbers(arguments.flat())
    devices, num_nodes = known_devices(arguments)
    world_size = None if devices is None else devices * num_nodes
    fsdp = arguments.fsdp
    strategy = strategy_rules.strategy(
        fsdp.strategy,
        world_size,
        arguments.devices.tpu,
        arguments.model.precision,
        "cpu" if arguments.devices.accelerator == "cpu" else None,
        strategy_rules.Sharding(fsdp.auto_wrap_policy, fsdp.sharding_strategy, cpu_offload=fsdp.cpu_offload),
    )
    if (batches := known_batch_sizes(arguments)) is not None:
        strategy_rules.offload(strategy, fsdp.cpu_offload, batches[1])
    resume.overrides(arguments)


def in_dataset(arguments: Arguments) -> None:
    """Batches against what a dataset's manifest says of it, where both are known. Raises ValueError."""
    folder, batches = Path(arguments.data.train_data_dir), known_batch_sizes(arguments)
    said = said_of_rows(folder)
    if said is not None:
        micro_batch_size, _, global_batch_size = batches or (1, 1, 1)
        flags.sizes(str(folder), *said, arguments.data.context_length, micro_batch_size, global_batch_size)


def asked_world(arguments: Arguments) -> tuple[Union[int, str], int]:
    """(devices per node or "auto", nodes): the launcher's, where one has started the ranks, else the flags'.

    Raises ValueError where the command line says otherwise than the launcher; a file, such as arguments.yaml, yields.
    """
    asked = (arguments.devices.devices, arguments.devices.num_nodes)
    given = {name: value for name, value in zip(("devices", "num_nodes"), asked) if name in arguments.on_command_line}
    launched = None if arguments.devices.tpu else launched_world(given)
    return launched or asked


def known_devices(arguments: Arguments) -> tuple[Optional[int], int]:
    """(devices per node, nodes); the first is None where only torch can say."""
    devices, num_nodes = asked_world(arguments)
    if devices == "auto":
        devices = 1 if arguments.devices.accelerator == "cpu" else None
    return None if arguments.devices.tpu else devices, num_nodes


def known_batch_sizes(arguments: Arguments) -> Optional[tuple[int, int, int]]:
    """`check.batch_sizes` of the flags, None where the devices aren't known, and in the demo, which takes what it can."""
    training, (devices, num_nodes) = arguments.training, known_devices(arguments)
    if devices is None or arguments.demo:
        return None
    return flags.batch_sizes(
        training.micro_batch_size,
        training.gradient_accumulation_steps,
        training.global_batch_size,
        devices,
        num_nodes,
    )


def in_preparation(arguments: PrepareArguments) -> None:
    """Of prepare_data.py. Raises ValueError."""
    pattern, output = arguments.pattern or DEFAULT_PATTERNS, Path(arguments.output).resolve()
    preparation(
        arguments.input,
        arguments.tokenizer,
        arguments.train_tokenizer,
        arguments.context_length,
        arguments.validation_fraction,
        pattern,
    )
    prepared_output(output, arguments.overwrite)
    files.writable(output)
    for given in arguments.input:
        text_input(given, pattern, arguments.exclude or [], output)
    if arguments.tokenizer is not None and not os.path.isdir(arguments.tokenizer):
        hub_name("--tokenizer", arguments.tokenizer, "tokenizer")


def in_export(arguments: ExportArguments) -> None:
    """Of export_hf.py. Raises ValueError."""
    if arguments.push_to_hub is not None:
        from huggingface_hub.utils import validate_repo_id

        validate_repo_id(arguments.push_to_hub)
    keep.checkpoint_at(arguments.checkpoint)
    flags.exported_output(Path(arguments.output), arguments.overwrite)
    files.writable(Path(arguments.output))
