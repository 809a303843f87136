"""Checks that need neither torch nor transformers, whose import takes seconds: paths, names, flags against each other.

The range of a single number is checked when the command line is parsed, devices and batches by start.py, and whatever needs
the opened dataset or the model by make_plan.py. Each function raises ValueError in one sentence with the offending value.
"""

import os
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Optional, Union

from fabric_llm.base import files
from fabric_llm.base.command_line import Flags, is_rank_zero
from fabric_llm.base.files import MANIFEST
from fabric_llm.base.names import hub_name, nearest
from fabric_llm.checkpoint import keep
from fabric_llm.data import mixture_text
from fabric_llm.data.sources import ONE_SET, PROBES, check_dataset_folder, parse_eval_data, parse_probes, read_prompts
from fabric_llm.model import freezing, positions
from fabric_llm.model.folders import check_model_folder
from fabric_llm.plan import run_directory
from fabric_llm.prepare import tokenizer_bounds
from fabric_llm.prepare.inputs import DEFAULT_PATTERNS, find_sources, preparation, prepared_output, separator
from fabric_llm.processes.launch import started_by_other
from fabric_llm.training.guard import parse_budgets
from fabric_llm.training.schedule import WITH_DECAY_STEPS

# --------------------------------------------------------------------------- train.py


def check_training(flags: Flags) -> None:
    """The flags of train.py, and the folders that they name.

    A resumed run under a launcher is checked further by rank 0 (run/supervision.py), since other machines may not see its
    directory yet. If the run directory exists, the model is checked later, so that a mistake is written into STATUS.json.
    """
    data, training, model_name = flags.data, flags.training, flags.model.model_name
    for name, value in {"model_name": model_name, "train_data_dir": data.train_data_dir or data.data_mix}.items():
        if not value:
            raise ValueError(f"--{name} is missing: a run needs --model_name and --train_data_dir (or --data_mix).")
    if data.train_data_dir and data.data_mix:
        raise ValueError("--train_data_dir and --data_mix are both given: a run has one dataset, or a mixture.")
    mix = mixture_text.parse(data.data_mix) if data.data_mix else None
    activation_checkpointing(flags.fsdp.activation_checkpointing)
    if flags.fsdp.tiled_mlp and flags.model.compile is True:
        raise ValueError("--tiled_mlp true computes MLPs and norms without the compiler: take it, or --compile true.")
    if flags.model.rope is not None:
        positions.parse(flags.model.rope)
    if flags.model.float8 != "none" and (flags.model.precision not in ("bf16-true", "bf16-mixed") or flags.devices.tpu):
        raise ValueError(f"--float8 {flags.model.float8} goes with --precision bf16-true or bf16-mixed, on a CPU or on GPUs.")
    if training.min_lr > training.lr:
        raise ValueError(f"--min_lr {training.min_lr} is larger than --lr {training.lr}.")
    if (rate := training.constant_lr) is not None and not training.min_lr <= rate <= training.lr:
        raise ValueError(f"--constant_lr {rate} isn't between --min_lr {training.min_lr} and --lr {training.lr}.")
    check_length(flags, training.max_step)
    _check_evaluation(flags, [ONE_SET] if mix is None else mix.names, mix is not None)
    freezing.check(training.freeze, training.train_only)
    overrides(flags)
    if flags.logging.sample_prompts is not None and is_rank_zero():  # which reads them for all ranks
        read_prompts(flags.logging.sample_prompts)
    if flags.checkpoint.resume and (started_by_other() or flags.devices.num_nodes > 1):
        return

    folders = [data.train_data_dir] if mix is None else [source.path for source in mix.sources]
    read = [] if flags.demo else folders  # the demo's may have to be made first
    for folder in (*parse_eval_data(flags.evaluation.eval_data).values(), *read):
        check_dataset_folder(folder, model_name)
    directory = run_directory.directory(flags)
    if flags.checkpoint.checkpoint is None and not directory.is_dir():  # the run starts
        check_model_folder(model_name)
        for folder in (Path(model_name), *(Path(name, "tokenizer") for name in folders)):
            tokenizer_bounds.check_file(folder / "tokenizer.json")
    run_directory.require_writable(directory)


def check_length(flags: Flags, max_step: Optional[int]) -> None:
    """Whether --profile and the phases of --lr_schedule fit a run of `max_step` steps; None: not known yet."""
    steps, training = profiled_steps(flags.logging.profile), flags.training
    if max_step is None:
        return
    if steps is not None and steps[0] > max_step:
        raise ValueError(f"--profile {flags.logging.profile}: the run ends at step {max_step}.")
    if training.lr_schedule in WITH_DECAY_STEPS and training.decay_steps:
        names = ["warmup_steps", "decay_steps", *["cooldown_steps"] * (training.lr_schedule == "infinite")]
        given = {name: getattr(training, name) or 0 for name in names}
        if sum(given.values()) > max_step:
            words = " and ".join(f"--{name} {steps}" for name, steps in given.items() if steps)
            raise ValueError(f"{words} don't fit into a run of {max_step} steps.")


def activation_checkpointing(asked: Union[bool, str]) -> str:
    """--activation_checkpointing as one word: none, full, every:N, selective, offload or auto."""
    word = asked if isinstance(asked, str) else "full" if asked else "none"
    if word in ("none", "full", "selective", "offload", "auto") or re.fullmatch(r"every:[1-9]\d*", word):
        return word
    raise ValueError(
        f"--activation_checkpointing takes none, full, every:N (such as every:2), selective, offload or auto, not {asked!r}."
    )


def profiled_steps(given: Optional[str]) -> Optional[tuple[int, int]]:
    """The first and the last step of --profile START:STOP."""
    if given is None:
        return None
    found = re.fullmatch(r"([0-9]{1,9}):([0-9]{1,9})", given)
    first, last = map(int, found.groups()) if found else (0, 0)
    if not 1 <= first <= last:
        raise ValueError(f"--profile takes START:STOP, first and last step, counted from 1, such as 3:5, not {given!r}.")
    return first, last


def overrides(flags: Flags) -> tuple[str, ...]:
    """The flags that --resume_override names. Raises ValueError for one that it can't change."""
    known = [name for name, one in flags.declared().items() if one.belongs_to_run]
    given = (flags.checkpoint.resume_override or "").split(",")
    names = tuple(name.strip().removeprefix("--") for name in given if name.strip())
    for name in names:
        if name not in known:
            raise ValueError(f"--resume_override {name}: what can change is {', '.join(known)}.")
    return names


def _check_evaluation(flags: Flags, of_training: Sequence[str], is_mixture: bool) -> None:
    """Names in --eval_data, --forgetting_budget and --keep_best_of. of_training: validation sets of the training data."""
    evaluation = flags.evaluation
    added, budgets = list(parse_eval_data(evaluation.eval_data)), parse_budgets(evaluation.forgetting_budget)
    if twice := [name for name in added if name in of_training]:
        raise ValueError(f"--eval_data: {twice[0]!r} is evaluated already, with the training data; take another name.")
    parse_probes(evaluation.probes)
    if taken := [name for name in PROBES if name in of_training]:
        raise ValueError(f"--data_mix: {taken[0]!r} is the name of a probe, so no source can have it.")
    known, best = [*of_training, *added], flags.save.keep_best_of
    asked = [("--forgetting_budget", name, [*known, *PROBES]) for name in budgets]
    for flag, name, names in asked + ([] if best is None else [("--keep_best_of", best, known)]):
        require_set(flag, name, names)
    if budgets and evaluation.eval_iters == 0:
        raise ValueError("--forgetting_budget is measured by evaluations, which --eval_iters 0 turns off.")
    action = evaluation.forgetting_action
    if budgets and action != "warn" and evaluation.eval_step_interval is None:
        raise ValueError(f"--forgetting_action {action} acts when the run evaluates: give --eval_step_interval.")
    if action == "rewind" and (others := [name for name in budgets if not is_mixture or name not in of_training]):
        raise ValueError(f"--forgetting_action rewind reads more of a source: {others[0]!r} is no source of --data_mix.")


def require_set(flag: str, name: str, names: Collection[str]) -> None:
    """Raises ValueError unless `name`, of `flag`, is that of a validation set."""
    if name not in names:
        close = nearest(name, names)
        meant = f"Did you mean {close[0]!r}?" if len(close) == 1 else f"There are {', '.join(map(repr, names))}."
        raise ValueError(f"{flag}: no validation set is named {name!r}. {meant}")


# ---------------------------------------------------------- prepare_data.py, export_hf.py


def check_preparation(flags: Flags) -> None:
    """The flags of prepare_data.py, and what they name. Raises ValueError."""
    pattern, output = flags.pattern or DEFAULT_PATTERNS, Path(flags.output).resolve()
    if flags.tasks is None:
        preparation(flags, flags.input)
        separator(flags.document_separator)
    else:
        known = ("tasks", "tokenizer", "context_length", "output", "overwrite")
        others = [name for name, value in vars(flags).items() if value != getattr(type(flags), name) and name not in known]
        if others or flags.tokenizer is None or not flags.tasks.strip(", "):
            words = f"not --{others[0]}" if others else "and needs the first"
            raise ValueError(f"--tasks takes names, comma-separated, and --tokenizer, --context_length, {words}.")
    prepared_output(output, flags.overwrite)
    files.writable(output)
    if flags.tasks is None:
        find_sources(flags.input, pattern=pattern, exclude=flags.exclude or [], output=output)
    if flags.tokenizer is not None and os.path.isdir(flags.tokenizer):
        tokenizer_bounds.check_file(Path(flags.tokenizer, "tokenizer.json"))
    elif flags.tokenizer is not None:
        hub_name("--tokenizer", flags.tokenizer, "tokenizer")


def check_export(flags: Flags) -> None:
    """The flags of export_hf.py, and what they name. Raises ValueError."""
    if flags.push_to_hub is not None:
        from huggingface_hub.utils import validate_repo_id

        validate_repo_id(flags.push_to_hub)
        if "/" not in flags.push_to_hub:
            raise ValueError(f"--push_to_hub takes org/name, such as NAME_OF_YOURS/{flags.push_to_hub}.")
    keep.checkpoint_at(flags.checkpoint)
    # One that is there may be pushed again.
    exported_output(Path(flags.output), flags.overwrite or flags.push_to_hub is not None)
    files.writable(Path(flags.output))


def exported_output(output: Path, overwrite: bool) -> None:
    """Raises ValueError if the folder of an exported model exists and mustn't be replaced, or lies in a checkpoint."""
    if inside := [str(place) for place in output.resolve().parents if (place / MANIFEST).is_file()]:
        raise ValueError(f"{str(output)!r} lies in the checkpoint {inside[0]!r}, which it would damage; take another --output.")
    if output.exists() and not overwrite:
        raise ValueError(f"{str(output)!r} exists; take another --output, or --overwrite true.")
    if output.exists() and (not (output / "config.json").is_file() or (output / MANIFEST).exists()):  # such as a run
        raise ValueError(f"{str(output)!r} isn't an exported model; take another --output.")
    if output.is_symlink():
        raise ValueError(f"{str(output)!r} is a link, which isn't replaced: name the folder itself.")
