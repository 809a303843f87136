"""Checks that need neither torch nor transformers, whose import takes seconds: paths, names, flags
against each other.

The range of a single number is checked when the command line is parsed, devices and batches by
start.py, and whatever needs the opened dataset or the model by make_plan.py. Each function raises
ValueError in one sentence with the offending value.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Optional, Union

from fabric_llm.base import register
from fabric_llm.base.command_line import is_rank_zero
from fabric_llm.base.flag import Flags
from fabric_llm.base.names import comma_separated, command, flag_meant, nearest
from fabric_llm.base.plain_yaml import read_yaml
from fabric_llm.data import mixture_text
from fabric_llm.data.periods import ONE_SET, PROBES
from fabric_llm.data.sources import (
    check_dataset_folder,
    parse_eval_data,
    parse_probes,
    read_prompts,
)
from fabric_llm.mirror import address
from fabric_llm.model import freezing, positions
from fabric_llm.model.folders import check_model_folder
from fabric_llm.model.tokenizer_file import check_tokenizer_file
from fabric_llm.plan import fetched, resumption, run_directory
from fabric_llm.processes.launch import started_by_other
from fabric_llm.training.forgetting import hard_budgets, parse_bounds, parse_budgets
from fabric_llm.training.schedule import WITH_DECAY_STEPS

MIN_EVALUATIONS = 10  # to steer by
MANY_STEPS = 200  # too many to lose in a crash


def check_training(flags: Flags) -> None:
    """The flags of train.py, and the folders that they name.

    A resumed run under a launcher is checked further by rank 0 (run/supervision.py), since other
    machines may not see its directory yet, and what may take long follows once they have met. If
    the run directory exists, the model is checked later, so that a mistake is written into
    STATUS.json.
    """
    data, model_name = flags.data, flags.model.model_name
    # One of two flags gives the data.
    needed = {"model_name": model_name, "train_data_dir": data.train_data_dir or data.data_mix}
    for name, value in needed.items():
        if not value:
            raise ValueError(f"--{name} is missing: {_why_needed(flags)}.")
    check_flags(flags)
    # Rank 0 reads them for all ranks.
    if flags.logging.sample_prompts is not None and is_rank_zero():
        read_prompts(flags.logging.sample_prompts)
    meets_others = started_by_other() or flags.devices.num_nodes > 1
    # Folders are read now, unless another machine may not see them yet.
    if not flags.checkpoint.resume or not meets_others:
        # The demo's dataset may have to be made first.
        named = dict.fromkeys(evaluated_on(flags), "--eval_data: ")
        named |= dict.fromkeys([] if flags.demo else trained_on(flags), "")
        # What an address names is checked once it is here, see `fetch_data`.
        _check_folders(
            flags, {given: of for given, of in named.items() if not address.is_address(given)}
        )
    if not meets_others:
        fetch_data(flags)


def _why_needed(flags: Flags) -> str:
    """Why --model_name or --train_data_dir has to be given. Raises Fault, as
    `run_directory.directory`, for a run that isn't there."""
    why = "a run needs --model_name and --train_data_dir (or --data_mix)"
    if not flags.checkpoint.resume:
        return why
    # With one of these the run's own arguments.yaml isn't read.
    names = ("model_name", "train_data_dir", "config")
    if others := [f"--{name}" for name in names if name in flags.on_command_line]:
        file = Path(flags.checkpoint.output_dir, flags.checkpoint.run_name or "", "arguments.yaml")
        values, with_these = read_yaml(file) if file.is_file() else None, ""
        # Another dataset can't stand beside the mixture of the run's own file.
        if values and not (values.get("data_mix") and "--train_data_dir" in others):
            with_these = f", or give {command(config=file)} as well"
        return (
            f"{why}; a resumed one has them in its arguments.yaml: leave out "
            f"{' and '.join(others)}{with_these}"
        )
    folder, given = run_directory.directory(flags), resumption.given_checkpoint(flags)
    # A branch takes the flags of the run that it begins from.
    if given is not None:
        resumption.require_checkpoint(given)
        folder = given.parent
    return f"{why}, and {str(folder)!r} has no arguments.yaml{run_directory.beside(folder)}"


def trained_on(flags: Flags) -> list[str]:
    """The datasets to train on, as --train_data_dir or --data_mix names them."""
    mix = mixture_text.mix_of(flags.data.data_mix, flags.data.train_data_dir)
    return [source.path for source in mix.sources]


def evaluated_on(flags: Flags) -> list[str]:
    """The datasets of --eval_data."""
    return list(parse_eval_data(flags.evaluation.eval_data).values())


def check_flags(flags: Flags) -> None:
    """The flags of a run that names its data, of which nothing is read."""
    data, training = flags.data, flags.training
    if data.train_data_dir and data.data_mix:
        raise ValueError(
            "--train_data_dir and --data_mix are both given: a run has one dataset, or a mixture. "
            "What a file of --config gives is left out by null, such as --data_mix null."
        )
    # Parsed for its errors; the names of its sources are validation sets as well.
    mix = mixture_text.parse(data.data_mix) if data.data_mix else None
    flag = "--train_data_dir" if mix is None else "--data_mix or --replay"
    _check_addresses(flags, {flag: trained_on(flags), "--eval_data": evaluated_on(flags)})
    # Called for its error: the word itself is used once there is a model.
    activation_checkpointing(flags.fsdp.activation_checkpointing)
    # --compile auto switches compiling off instead.
    if flags.fsdp.tiled_mlp and flags.model.compile is True:
        raise ValueError(
            "--tiled_mlp true computes MLPs and norms without the compiler: take it, or --compile "
            "true."
        )
    if register.METRICS and flags.devices.context_parallel > 1:
        raise ValueError(
            f"--code registers the metric {next(iter(register.METRICS))!r}, whose batch would be "
            "parts of rows with --context_parallel: leave one of them out."
        )
    # Called for its error. What it changes depends on the model's configuration.
    if flags.model.rope is not None:
        positions.parse(flags.model.rope)
    if flags.model.float8 != "none" and (
        flags.model.precision not in ("bf16-true", "bf16-mixed") or flags.devices.tpu
    ):
        raise ValueError(
            f"--float8 {flags.model.float8} goes with --precision bf16-true or bf16-mixed, on a "
            "CPU or on GPUs."
        )
    if training.min_lr > training.lr:
        raise ValueError(f"--min_lr {training.min_lr} is larger than --lr {training.lr}.")
    # The infinite schedule goes from lr to constant_lr, and later from there to min_lr.
    if (rate := training.constant_lr) is not None and not training.min_lr <= rate <= training.lr:
        raise ValueError(
            f"--constant_lr {rate} isn't between --min_lr {training.min_lr} and --lr {training.lr}."
        )
    _check_evaluation(flags, [ONE_SET] if mix is None else mix.names, mix is not None)
    _check_steering(flags, mix)
    # Without --max_step the length follows from the data, and make_plan.py checks again.
    check_length(flags, training.max_step)
    freezing.check(training.freeze, training.train_only)
    # Called for its error, before anything is read.
    overrides(flags)


def fetch_data(flags: Flags) -> None:
    """Bring the datasets that flags name by addresses to this machine. Raises Fault."""
    for given in (*trained_on(flags), *evaluated_on(flags)):
        if address.is_address(given):
            check_tokenizer_file(fetched.folder(given) / "tokenizer" / "tokenizer.json")


def _check_folders(flags: Flags, datasets: Mapping[str, str]) -> None:
    """The dataset folders, the model's, and that of the run.

    datasets: {folder: the words before what is said of it}.
    """
    model_name = flags.model.model_name
    for name, before in datasets.items():
        try:
            check_dataset_folder(name, model_name)
        except ValueError as error:
            raise ValueError(f"{before}{error}") from error
    # A name that leads elsewhere is refused here, before any time is spent.
    directory = run_directory.directory(flags)
    if flags.checkpoint.checkpoint is None and not directory.is_dir():  # the run starts
        check_model_folder(model_name)
        # A tokenizer's file comes from outside, so it is checked before a library opens it.
        for folder in (Path(model_name), *(Path(name, "tokenizer") for name in datasets)):
            check_tokenizer_file(folder / "tokenizer.json")
    run_directory.require_writable(directory)


def check_length(flags: Flags, max_step: Optional[int]) -> None:
    """Whether --profile and the phases of --lr_schedule fit a run of `max_step` steps; None: not
    known yet."""
    # Read before the length is known, so that a wrong value is always told.
    steps, training = profiled_steps(flags.logging.profile), flags.training
    if max_step is None:
        return
    interval, action = flags.evaluation.eval_step_interval, flags.evaluation.forgetting_action
    if action == "steer" and interval is not None and max_step // interval < MIN_EVALUATIONS:
        advice = f"--eval_step_interval {max_step // MIN_EVALUATIONS} or less"
        if max_step < MIN_EVALUATIONS:
            advice = f"--max_step {MIN_EVALUATIONS} or more, and --eval_step_interval 1"
        raise ValueError(
            f"--forgetting_action steer needs {MIN_EVALUATIONS} evaluations, not "
            f"{max_step // interval} in {max_step} steps: take {advice}."
        )
    if steps is not None and steps[0] > max_step:
        raise ValueError(f"--profile {flags.logging.profile}: the run ends at step {max_step}.")
    # The phases follow each other, so their sum must fit.
    if training.lr_schedule in WITH_DECAY_STEPS and training.decay_steps:
        names = ["warmup_steps", "decay_steps"]
        if training.lr_schedule == "infinite":
            names.append("cooldown_steps")
        given = {name: getattr(training, name) or 0 for name in names}
        if sum(given.values()) > max_step:
            words = " and ".join(f"--{name} {steps}" for name, steps in given.items() if steps)
            raise ValueError(f"{words} don't fit into a run of {max_step} steps.")


def activation_checkpointing(asked: Union[bool, str]) -> str:
    """--activation_checkpointing as one word: none, full, every:N, selective or offload."""
    # A boolean is allowed as well: true means full, false means none.
    if not isinstance(asked, str):
        return "full" if asked else "none"
    if asked in ("none", "full", "selective", "offload") or re.fullmatch(r"every:[1-9]\d*", asked):
        return asked
    known = "none, full, every:N (such as every:2), selective or offload"
    advice = "; plan.py --auto says which one fits" if asked == "auto" else ""
    raise ValueError(f"--activation_checkpointing takes {known}, not {asked!r}{advice}.")


def profiled_steps(given: Optional[str]) -> Optional[tuple[int, int]]:
    """The first and the last step of --profile START:STOP."""
    if given is None:
        return None
    # (0, 0) fails the comparison, so text of another form gets the same message.
    match = re.fullmatch(r"([0-9]{1,9}):([0-9]{1,9})", given)
    first, last = 0, 0
    if match is not None:
        first, last = map(int, match.groups())
    if not 1 <= first <= last:
        raise ValueError(
            "--profile takes START:STOP, first and last step, counted from 1, such as 3:5, not "
            f"{given!r}."
        )
    return first, last


def overrides(flags: Flags) -> tuple[str, ...]:
    """The flags that --resume_override names. Raises ValueError for one that it can't change."""
    # All other flags may change freely, or never.
    known = {name: one for name, one in flags.declared().items() if one.belongs_to_run}
    given = comma_separated(flags.checkpoint.resume_override)
    # The names may be given with dashes, as on the command line.
    names = tuple(name.removeprefix("--") for name in given)
    for name in names:
        if name not in known:
            words = flag_meant(name, known, {}) or f"what can change is {', '.join(known)}."
            raise ValueError(f"--resume_override {name}: {words}")
    return names


def _check_addresses(flags: Flags, datasets: Mapping[str, Collection[str]]) -> None:
    """Raises ValueError for one that can't be read. datasets: {flag: what it names}."""
    if flags.save.mirror is not None:
        address.require(flags.save.mirror, "--mirror")
        place = address.local_folder(flags.save.mirror)
        if place and place.resolve() == Path(flags.checkpoint.output_dir).resolve():
            raise ValueError(f"--mirror {flags.save.mirror} is --output_dir: name another disk.")
    for flag, name in (
        ("model_name", flags.model.model_name),
        ("checkpoint", flags.checkpoint.checkpoint or ""),
    ):
        if address.is_address(name):
            raise ValueError(f"--{flag} {name} is read from a disk: copy it there first.")
    for flag, folders in datasets.items():
        for given in filter(address.is_address, folders):
            address.require(given, flag, is_folder=True)


def _check_evaluation(flags: Flags, of_training: Sequence[str], is_mixture: bool) -> None:
    """Names in --eval_data, --forgetting_budget and --keep_best_of. of_training: validation sets of
    the training data."""
    evaluation = flags.evaluation
    added = list(parse_eval_data(evaluation.eval_data))
    budgets = parse_budgets(evaluation.forgetting_budget)
    # Names of sets are keys in metrics.jsonl, so none may come twice.
    if twice := [name for name in added if name in of_training]:
        raise ValueError(
            f"--eval_data: {twice[0]!r} is evaluated already, with the training data; take "
            "another name."
        )
    # Called for its error.
    parse_probes(evaluation.probes)
    if taken := [name for name in PROBES if name in of_training]:
        raise ValueError(
            f"--data_mix: {taken[0]!r} is the name of a probe, so no source can have it."
        )
    # A budget may be for a probe as well; the best checkpoint is chosen by a validation set.
    known, best = [*of_training, *added], flags.save.keep_best_of
    for name in budgets:
        require_set("--forgetting_budget", name, [*known, *PROBES])
    if best is not None:
        require_set("--keep_best_of", best, known)
    if budgets and evaluation.eval_iters == 0:
        raise ValueError(
            "--forgetting_budget is measured by evaluations, which --eval_iters 0 turns off."
        )
    # Without an interval the run evaluates only at its ends, when nothing can be done any more.
    action = evaluation.forgetting_action
    if budgets and action != "warn" and evaluation.eval_step_interval is None:
        raise ValueError(
            f"--forgetting_action {action} acts when the run evaluates: give --eval_step_interval."
        )
    # Both change the share of a source. A steered one answers for other sets as well.
    others = [name for name in budgets if not is_mixture or name not in of_training]
    has_source = action == "steer" and len(others) < len(budgets)
    if action in ("rewind", "steer") and others and not has_source:
        instead = ""
        if action == "steer" and is_mixture:
            instead = f" One that has a budget, too, answers for {others[0]!r}."
        raise ValueError(
            f"--forgetting_action {action} reads more of a source: {others[0]!r} is no source of "
            f"--data_mix.{instead}"
        )


def _check_steering(flags: Flags, mix: Optional[mixture_text.DataMix]) -> None:
    """Raises ValueError where shares can't follow the budgets."""
    evaluation, steer = flags.evaluation, "--forgetting_action steer"
    budgets = parse_budgets(evaluation.forgetting_budget)
    least, most = parse_bounds(evaluation.steer_bounds)
    if evaluation.forgetting_action != "steer":
        if hard_budgets(evaluation.forgetting_budget):
            raise ValueError(
                f"--forgetting_budget: `:max` belongs to {steer}; with the others a budget holds "
                "at every evaluation."
            )
        return
    if not budgets or 0 in budgets.values():
        raise ValueError(f"{steer} keeps budgets: give --forgetting_budget, each above 0.")
    steered = budgets.keys() & set(mix.names)
    for stage in mix.stages:
        read = {name for name, weight in zip(mix.names, stage.weights) if weight}
        if read <= steered:
            where = f" of the stage from {float(stage.begins):g} on" if stage.begins else ""
            raise ValueError(
                f"{steer}: all sources{where} have a budget, so none is left whose share could "
                "fall."
            )
    if least * len(steered) > most:
        raise ValueError(
            f"--steer_bounds {evaluation.steer_bounds}: {len(steered)} sources with so much each "
            "have more than that together."
        )
    # How often a source is read follows from shares that aren't known yet.
    if flags.training.max_step is None:
        raise ValueError(f"{steer} needs --max_step: how long an epoch takes isn't known before.")
    if capped := [source.name for source in mix.sources if source.max_epochs]:
        raise ValueError(f"{steer} reads {capped[0]!r} as often as it must: leave its max_epochs.")


def require_set(flag: str, name: str, names: Collection[str], may_add: bool = True) -> None:
    """Raises ValueError unless `name`, of `flag`, is that of a validation set. may_add: the command
    has --eval_data."""
    if name not in names:
        close = nearest(name, names)
        meant = f"There are {', '.join(map(repr, names))}"
        meant += f"; --eval_data {name}=FOLDER adds it." if may_add else "."
        if close:
            meant = f"Did you mean {close[0]!r}?"
        raise ValueError(f"{flag}: no validation set is named {name!r}. {meant}")
