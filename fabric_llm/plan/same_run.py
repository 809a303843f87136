"""What a run must have in common with the checkpoint that it goes on from, and what it changes on purpose."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Optional, Union

from fabric_llm.base import step_names
from fabric_llm.base.command_line import Flags
from fabric_llm.base.faults import DONE, NO_CHECKPOINT, Fault
from fabric_llm.data import mixture_text
from fabric_llm.model import freezing
from fabric_llm.plan.plan import Plan
from fabric_llm.plan.resume import MOST_DIFFERENCES, given_checkpoint, lr_of_run, overrides


@contextmanager
def written_by_a_run(checkpoint: Optional[Path]) -> Iterator[None]:
    """Around what reads its progress.json: Fault (66) where somebody else wrote that, with hashes that are right."""
    try:
        yield
    except (LookupError, TypeError, AttributeError) as error:
        if checkpoint is None:
            raise
        raise Fault(
            f"{str(checkpoint)!r} is damaged: trainer/progress.json isn't a run's ({type(error).__name__}: {error}).",
            NO_CHECKPOINT,
        ) from error


def document_masking(flags: Flags, resumed: dict[str, Any]) -> Union[bool, str]:
    """--document_masking, where `auto` means for a run that goes on what it had: all its steps are alike.

    resumed: progress.json of the checkpoint, {} for a run that starts.
    """
    given = flags.data.document_masking
    if given == "auto" and resumed and "document_masking" not in overrides(flags):
        return resumed["schedule"]["document_masking"]
    return given


def facts(plan: Plan, flags: Flags) -> dict[str, Any]:
    """What a checkpoint says of its run, for those that resume from it."""
    flat, declared, given = flags.flat(), flags.declared(), given_checkpoint(flags)
    packed = bool(plan.data.dataset.manifest.get("packed"))
    masking = plan.data.document_end is not None if packed else bool(plan.data.document_masking)
    schedule = {name: flat[name] for name, one in declared.items() if one.belongs_to_run}
    schedule |= {"global_batch_size": plan.schedule.global_batch_size, "document_masking": masking}
    if schedule["ema_decay"] is None:
        schedule = {name: value for name, value in schedule.items() if name not in ("ema_device", "ema_every")}
    schedule |= {name: ",".join(freezing.words(flat[name])) or None for name in freezing.FLAGS}
    if plan.data.mix is None:
        schedule.pop("data_mix")
    else:
        schedule["data_mix"] = mixture_text.described(plan.data.mix)
    fixed = {name: flat[name] for name, one in declared.items() if one.fixed}
    if plan.model.precision != "bf16-true":
        fixed["bf16_updates"] = None
    return {
        "fixed": {**plan.data_facts(), **fixed},
        "schedule": schedule,
        **plan.mixture_facts(),
        "measured_on": plan.resumed["measured_on"] if plan.start.step > 0 else plan.measured_on(),
        "end_step": plan.schedule.max_step,
        "logged": {"every": flags.logging.log_step_interval, "after": plan.start.step},
        "model_name": plan.model.name,
        "rolled_back_to": None if given is None else given.name,
    }


def require_same_run(plan: Plan, flags: Flags) -> list[str]:
    """The run as it would go on, against what its checkpoint says. Returns what it changes on purpose, a line each.

    Raises ValueError with the first differences that aren't allowed, and Fault (0) where nothing is left to do.
    """
    allowed, then, now = overrides(flags), _with_all_flags(plan.resumed, flags), facts(plan, flags)
    sum([*then["guard"]["losses"], then["guard"]["skipped"], then["guard"]["rewinds"]])  # the guard counts on from them
    fixed, schedule = (_differences(_flat(then[kind]), _flat(now[kind])) for kind in ("fixed", "schedule"))
    if ("mixture" in then) != ("mixture" in now):
        words = [f"--{'data_mix' if 'mixture' in one else 'train_data_dir'}" for one in (then, now)]
        fixed = {"data": words, **fixed}
    if now["schedule"]["max_step"] is not None and "max_step" not in schedule:
        schedule.pop("number_epochs", None)  # isn't used
    if fixed:
        raise ValueError(
            f"{str(plan.resume_from)!r} was written with {_listed(fixed)}. That can't change within a run; for a new "
            f"one from its weights: --model_name {plan.resume_from}, without --resume."
        )
    if silent := {name: values for name, values in schedule.items() if name not in allowed}:
        raise ValueError(
            f"{str(plan.resume_from)!r} was written with {_listed(silent)}. To change that on purpose: "
            f"--resume_override {','.join(silent)}."
        )
    if plan.start.step > 0:  # else it is about to be measured
        _require_base(plan)
    if plan.start.step >= plan.schedule.max_step:
        sentence = (
            f"{str(plan.resume_from)!r} is where this run ends (step {plan.start.step} of {plan.schedule.max_step})"
        )
        if flags.checkpoint.resume == "auto" and not schedule:
            raise Fault(f"{sentence}: nothing is left to do.", DONE)
        raise ValueError(
            f"{sentence}: to train on, give a larger --max_step or --number_epochs, and --resume_override with its name."
        )
    return _changes(plan, schedule, now)


def _with_all_flags(document: Mapping[str, Any], flags: Flags) -> dict[str, Any]:
    """progress.json, with the defaults of flags that have been added since it was written: the run had nothing else."""
    defaults = {name: one.default for name, one in flags.declared().items() if one.belongs_to_run and not one.needs}
    return {**document, "schedule": {**defaults, **document["schedule"]}}


def _require_base(plan: Plan) -> None:
    """Raises ValueError where a set with a budget has no loss before step 1, or one of other rows."""
    before, then, now = plan.resumed["guard"]["before"], plan.resumed["measured_on"], plan.measured_on()
    for name in plan.data.budgets:
        if name in before and then.get(name, now[name]) == now[name]:
            continue
        why, instead = "wasn't evaluated", "Leave it out, by --resume_override forgetting_budget"
        if name in before:
            why = "was evaluated on other rows"
            instead = "Give the --eval_data, --eval_iters and --eval_batch_size of then"
        raise ValueError(
            f"--forgetting_budget: {name!r} {why} before step 1 of this run, so what it forgets of it isn't known. {instead}; "
            f"or begin a run whose budgets count from this checkpoint: --model_name {plan.resume_from}, without --resume."
        )


def _flat(facts: dict[str, Any]) -> dict[str, Any]:
    """Numbers of a mixture's sources each by itself: one that is new differs from nothing."""
    found: dict[str, Any] = {}
    for name, value in facts.items():
        found |= {f"{name} of {key}": one for key, one in value.items()} if isinstance(value, dict) else {name: value}
    return found


def _differences(then: dict[str, Any], now: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {name: (then[name], value) for name, value in now.items() if name in then and then[name] != value}


def _listed(differences: dict[str, tuple[Any, Any]]) -> str:
    first = [f"{name} {then}, not {now}" for name, (then, now) in list(differences.items())[:MOST_DIFFERENCES]]
    more = len(differences) - len(first)
    return "; ".join(first) + (f"; and {more} more" if more > 0 else "")


def _changes(plan: Plan, schedule: dict[str, tuple[Any, Any]], now: dict[str, Any]) -> list[str]:
    """What the run does differently from simply going on, with the learning rate from here; nothing if nothing."""
    lines, then = [], plan.resumed
    if not plan.has_checkpoint:
        lines.append(f"A branch of {plan.resume_from} in {plan.run_directory}.")
    elif (newest := step_names.latest(plan.run_directory)) is not None and newest != plan.resume_from:
        lines.append(f"Back from {newest.name} to {plan.resume_from.name}: later checkpoints are moved aside.")
    for name, (before, value) in schedule.items():
        lines.append(f"{name}: {value} from here on, {before} before.")
    if plan.schedule.max_step != then["end_step"]:
        word = "Extended" if plan.schedule.max_step > then["end_step"] else "Shortened"
        lines.append(f"{word}: {plan.schedule.max_step} steps instead of {then['end_step']}.")
    if lines:
        lines += _curves(plan, {**then["schedule"], "max_step": then["end_step"]}, now["schedule"])
    if then["model_name"] != now["model_name"]:
        began = f"The run began with --model_name {then['model_name']}"
        lines.append(f"{began}; it goes on with its own weights and configuration.")
    return lines


def _curves(plan: Plan, then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """The learning rate from here on and as it was to be, as a table of a few steps."""
    first, last = plan.start.step, plan.schedule.max_step - 1
    steps = sorted({first + round(part * (last - first) / 4) for part in range(5)})
    curves = {"lr": {**now, "max_step": plan.schedule.max_step}, "lr before": then}
    rows = [f"{'step':>10}" + "".join(f"{step + 1:>11}" for step in steps)]
    for name, schedule in curves.items():
        rates = [lr_of_run(step, schedule) if step < schedule["max_step"] else None for step in steps]
        rows.append(f"{name:>10}" + "".join(f"{'-' if rate is None else f'{rate:.3e}':>11}" for rate in rates))
    return rows
