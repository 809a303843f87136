"""What is checked before torch, lightning and transformers are imported, which takes seconds: paths, names, several flags at once.

A single number's range is checked as the command line is parsed. Each function raises ValueError in one sentence with the
offending value. What the dataset or the model has to be opened for is checked by plan.py.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Optional, Union

from fabric_llm.base import files
from fabric_llm.base.command_line import Flags, is_rank_zero
from fabric_llm.base.files import MANIFEST
from fabric_llm.base.names import hub_name
from fabric_llm.checkpoint import keep
from fabric_llm.data import mixture_text, prompts
from fabric_llm.data.sources import check_dataset_folder, check_splits, parse_eval_data, said_of_rows
from fabric_llm.model import freezing, strategy_rules
from fabric_llm.model.folders import check_model_folder
from fabric_llm.plan import evaluation_sets, resume, run_directory
from fabric_llm.plan.mixture import lay_out
from fabric_llm.prepare import tokenizer_bounds
from fabric_llm.prepare.formats import DEFAULT_PATTERNS
from fabric_llm.prepare.inputs import find_sources, preparation, prepared_output, separator, shard
from fabric_llm.processes.launch import launched_world, started_by_other
from fabric_llm.training.schedule import WITH_DECAY_STEPS

# --------------------------------------------------------------------------- train.py


def check_training(flags: Flags) -> None:
    """A command of train.py, by itself and with the folders that it names.

    Rank 0 checks the rest of a resumed run under a launcher later (run/supervision.py): other machines may not see its directory yet.
    The model of a run whose directory is there is checked later too, so that what is wrong with it is written there.
    """
    _check_flags(flags)
    if flags.checkpoint.resume and (started_by_other() or flags.devices.num_nodes > 1):
        return
    _check_datasets(flags)
    directory = resume.directory(flags)
    if flags.checkpoint.resume:
        resume.require_given(flags)
    if flags.checkpoint.checkpoint is None and not directory.is_dir():  # the run starts
        check_model_folder(flags.model.model_name)
        check_reachable(flags.model.model_name)
        for folder in (Path(flags.model.model_name), *(Path(name, "tokenizer") for name in _training_folders(flags))):
            tokenizer_bounds.check_file(folder / "tokenizer.json")
    run_directory.require_writable(directory)


def _check_flags(flags: Flags) -> None:
    """The flags of train.py by themselves."""
    data = flags.data
    for name, value in (
        ("model_name", flags.model.model_name),
        ("train_data_dir", data.train_data_dir or data.data_mix),
    ):
        if not value:
            raise ValueError(f"--{name} is missing: a run needs --model_name and --train_data_dir (or --data_mix).")
    if data.train_data_dir and data.data_mix:
        raise ValueError(
            "--train_data_dir and --data_mix are both given: a run has one dataset, or a mixture of several."
        )
    names = mixture_text.parse(data.data_mix).names if data.data_mix else [evaluation_sets.ONE_SET]
    activation_checkpointing(flags.fsdp.activation_checkpointing)
    profiled_steps(flags.logging.profile, flags.training.max_step)
    check_rates(flags)
    if flags.training.max_step is not None:
        check_phases(vars(flags.training), flags.training.max_step)
    evaluation_sets.require_names(flags, names, bool(data.data_mix))
    freezing.check(flags.training.freeze, flags.training.train_only)
    _check_strategy(flags)
    resume.overrides(flags)
    if flags.logging.sample_prompts is not None and is_rank_zero():  # rank 0 reads them for all
        prompts.read(flags.logging.sample_prompts)


def _check_strategy(flags: Flags) -> None:
    """What strategy, precision and sharding have in common, and how batches divide, as far as the devices are known."""
    fsdp, (devices, num_nodes) = flags.fsdp, _known_devices(flags)
    strategy = strategy_rules.strategy(
        fsdp.strategy,
        None if devices is None else devices * num_nodes,
        flags.devices.tpu,
        flags.model.precision,
        "cpu" if flags.devices.accelerator == "cpu" else None,
        strategy_rules.Sharding(fsdp.auto_wrap_policy, fsdp.sharding_strategy, cpu_offload=fsdp.cpu_offload),
    )
    if devices is not None:
        strategy_rules.offload(strategy, fsdp.cpu_offload, batch_sizes(flags, devices, num_nodes)[1])


def check_rates(flags: Flags) -> None:
    """The learning rates against each other."""
    lr, min_lr, constant_lr = flags.training.lr, flags.training.min_lr, flags.training.constant_lr
    if min_lr > lr:
        raise ValueError(f"--min_lr {min_lr} is larger than --lr {lr}.")
    if constant_lr is not None and not min_lr <= constant_lr <= lr:
        raise ValueError(f"--constant_lr {constant_lr} isn't between --min_lr {min_lr} and --lr {lr}.")


def check_phases(flat: Mapping[str, Any], max_step: int) -> None:
    """The phases of --lr_schedule against a run of `max_step` steps."""
    if flat["lr_schedule"] not in WITH_DECAY_STEPS or not flat["decay_steps"]:
        return
    names = ["warmup_steps", "decay_steps", *(["cooldown_steps"] if flat["lr_schedule"] == "infinite" else [])]
    given = {name: flat[name] for name in names if flat[name]}
    if sum(given.values()) > max_step:
        words = " and ".join(f"--{name} {steps}" for name, steps in given.items())
        raise ValueError(f"{words} don't fit into a run of {max_step} steps.")


def activation_checkpointing(asked: Union[bool, str]) -> str:
    """--activation_checkpointing as one word: none, full, every:N or selective."""
    word = {True: "full", False: "none"}.get(asked, asked)
    if word in ("none", "full", "selective") or re.fullmatch(r"every:[1-9]\d*", word):
        return word
    raise ValueError(
        f"--activation_checkpointing takes none, full, every:N (such as every:2) or selective, not {asked!r}."
    )


def profiled_steps(given: Optional[str], max_step: Optional[int] = None) -> Optional[tuple[int, int]]:
    """The first and the last step of --profile START:STOP. max_step: of the run, where it is known."""
    if given is None:
        return None
    found = re.fullmatch(r"([0-9]{1,9}):([0-9]{1,9})", given)
    first, last = map(int, found.groups()) if found else (0, 0)
    if not 1 <= first <= last:
        raise ValueError(
            f"--profile takes START:STOP, the first and the last step to record, counted from 1, such as 3:5, not {given!r}."
        )
    if max_step is not None and first > max_step:
        raise ValueError(f"--profile {given}: the run ends at step {max_step}.")
    return first, last


def asked_world(flags: Flags) -> tuple[Union[int, str], int]:
    """(devices per node or "auto", nodes): the launcher's, where one has started the ranks, else the flags'.

    Raises ValueError where the command line says otherwise than the launcher; a file, such as flags.yaml, yields.
    """
    asked = (flags.devices.devices, flags.devices.num_nodes)
    given = {name: value for name, value in zip(("devices", "num_nodes"), asked) if name in flags.on_command_line}
    launched = None if flags.devices.tpu else launched_world(given)
    return launched or asked


def _known_devices(flags: Flags) -> tuple[Optional[int], int]:
    """(devices per node, nodes); the first is None where only torch can say."""
    devices, num_nodes = asked_world(flags)
    if devices == "auto":
        devices = 1 if flags.devices.accelerator == "cpu" else None
    return None if flags.devices.tpu else devices, num_nodes


def batch_sizes(flags: Flags, devices: int, num_nodes: int) -> tuple[int, int, int]:
    """(sequences per micro-batch, micro-batches per step and device, sequences per step).

    What isn't given follows from the rest. The demo takes a smaller micro-batch where its own doesn't divide. Raises
    ValueError, with all numbers, if they don't divide or disagree.
    """
    training, world_size = flags.training, devices * num_nodes
    micro_batch_size, global_batch_size = training.micro_batch_size, training.global_batch_size
    accumulation = training.gradient_accumulation_steps
    if global_batch_size is None:
        micro_batch_size, accumulation = micro_batch_size or 1, accumulation or 1
        return micro_batch_size, accumulation, micro_batch_size * accumulation * world_size
    if micro_batch_size is None:
        micro_batch_size = max(1, global_batch_size // (accumulation * world_size)) if accumulation else 1
    if flags.demo:
        micro_batch_size = min(micro_batch_size, max(1, global_batch_size // world_size))
    per_micro_batch = micro_batch_size * world_size
    spelled = f"--micro_batch_size {micro_batch_size} x {devices} devices x {num_nodes} nodes = {per_micro_batch}"
    if global_batch_size % per_micro_batch:
        raise ValueError(f"--global_batch_size {global_batch_size} doesn't divide by {spelled}.")
    needed = global_batch_size // per_micro_batch
    if accumulation not in (None, needed):
        raise ValueError(
            f"--global_batch_size {global_batch_size} needs --gradient_accumulation_steps {needed}, "
            f"not {accumulation}: {spelled}."
        )
    return micro_batch_size, needed, global_batch_size


def _training_folders(flags: Flags) -> list[str]:
    """The folders that --train_data_dir or --data_mix names."""
    if flags.data.data_mix:
        return [source.path for source in mixture_text.parse(flags.data.data_mix).sources]
    return [flags.data.train_data_dir]


def _check_datasets(flags: Flags) -> None:
    """The folders of data, and batches against what manifests say of the rows."""
    folders = [] if flags.demo else _training_folders(flags)  # the demo's may have to be prepared first
    for folder in (*parse_eval_data(flags.evaluation.eval_data).values(), *folders):
        check_dataset_folder(folder, flags.model.model_name)
        check_splits(Path(folder))
    said = [said_of_rows(Path(folder)) for folder in folders]
    for folder, rows in zip(folders, said):
        if rows is not None:
            row_length(folder, rows[1], flags.data.context_length)
    devices, num_nodes = _known_devices(flags)
    if flags.data.data_mix:
        mixture_text.require_one_length(
            mixture_text.parse(flags.data.data_mix), [None if rows is None else rows[1] for rows in said]
        )
    elif said and said[0] is not None and devices is not None:
        micro_batch_size, _, global_batch_size = batch_sizes(flags, devices, num_nodes)
        batches_fit(folders[0], said[0][0], micro_batch_size, global_batch_size)


def check_mixture_length(flags: Flags, global_batch_size: int) -> None:
    """--data_mix over a run that starts, as far as manifests say how many rows there are."""
    if not flags.data.data_mix or flags.checkpoint.resume:
        return
    mix, training = mixture_text.parse(flags.data.data_mix), flags.training
    said = [said_of_rows(Path(source.path)) for source in mix.sources]
    if None not in said:
        lay_out(mix, [rows for rows, _ in said], global_batch_size, training.max_step, training.number_epochs)


def row_length(folder: str, context_length: int, asked: Optional[int]) -> None:
    """--context_length, `asked`, against what the rows of a dataset hold."""
    if asked not in (None, context_length):
        raise ValueError(
            f"--context_length {asked}: the rows of {folder!r} hold {context_length} tokens; "
            f"run prepare_data.py again with --context_length {asked}."
        )


def batches_fit(folder: str, rows: int, micro_batch_size: int, global_batch_size: int) -> None:
    """Batches against the `rows` sequences of a training split."""
    if micro_batch_size > rows:
        raise ValueError(
            f"--micro_batch_size {micro_batch_size} is larger than the training split of {folder!r}: {rows} sequences."
        )
    if global_batch_size > rows:
        raise ValueError(
            f"A step takes {global_batch_size} sequences, but the training split of {folder!r} has {rows}."
        )


# ---------------------------------------------------------- prepare_data.py, export_hf.py


def check_preparation(flags: Flags) -> None:
    """Of prepare_data.py. Raises ValueError."""
    pattern, output = flags.pattern or DEFAULT_PATTERNS, Path(flags.output).resolve()
    if flags.self_replay is not None or flags.tokens is not None:
        _check_self_replay(flags)
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
            check_reachable(given, "dataset")
    if flags.tokenizer is not None and not os.path.isdir(flags.tokenizer):
        hub_name("--tokenizer", flags.tokenizer, "tokenizer")
        check_reachable(flags.tokenizer, "tokenizer")
    elif flags.tokenizer is not None:
        tokenizer_bounds.check_file(Path(flags.tokenizer, "tokenizer.json"))
        tokenizer_bounds.try_out(Path(flags.tokenizer, "tokenizer.json"))


def _check_self_replay(flags: Flags) -> None:
    """--self_replay and --tokens of prepare_data.py. Raises ValueError."""
    if flags.self_replay is None or flags.tokens is None:
        raise ValueError("--self_replay MODEL and --tokens N go together: how many tokens to sample from which model")
    others = {"input": flags.input, "tokenizer": flags.tokenizer, "train_tokenizer": flags.train_tokenizer}
    others |= {"shard": flags.shard, "engine ray": flags.engine == "ray"}
    if given := [name for name, value in others.items() if value]:
        raise ValueError(f"--{given[0]} doesn't go with --self_replay, which samples its documents on this machine")
    check_model_folder(flags.self_replay)
    check_reachable(flags.self_replay)
    if flags.packing == "concat" and flags.tokens < (least := 2 * flags.context_length):
        raise ValueError(
            f"--tokens {flags.tokens} don't fill a row of {flags.context_length} tokens to train on and one to validate: "
            f"ask for {least} at least, or take a smaller --context_length"
        )


def check_reachable(name: str, kind: str = "model") -> None:
    """What isn't here, and so a name on the hub: can it be had? Raises ValueError."""
    if not os.path.exists(name):
        from fabric_llm.base import hub  # whose import takes time

        hub.require_reachable(name, kind)


def check_export(flags: Flags) -> None:
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
