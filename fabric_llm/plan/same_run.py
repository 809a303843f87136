"""What a run must have in common with the checkpoint that it resumes, and what it changes on purpose."""

from __future__ import annotations

from typing import Any

from fabric_llm.base import step_names
from fabric_llm.base.command_line import Flags
from fabric_llm.base.faults import DONE, NO_CHECKPOINT, Fault
from fabric_llm.data.dataset import TokenDataset
from fabric_llm.data.mixture_text import described
from fabric_llm.data.order import ROW_ORDER
from fabric_llm.model import freezing
from fabric_llm.plan import measuring
from fabric_llm.plan.plan import Plan
from fabric_llm.plan.resume import MOST_DIFFERENCES, given_checkpoint, overrides
from fabric_llm.training.forgetting import parse_budgets
from fabric_llm.training.schedule import SCHEDULES, arguments_of, lr_at

DATA_FACTS = ("context_length", "train_rows", "train_fingerprint")
ROWS_READ = ("from_position", "count", "hash_sum")  # in progress.json; not in that of older versions


def facts(plan: Plan, flags: Flags) -> dict[str, Any]:
    """What a checkpoint says of its run, for those that resume from it."""
    flat, declared = flags.flat(), flags.declared()
    packed = bool(plan.dataset.manifest.get("packed"))
    masking = plan.document_end is not None if packed else bool(plan.document_masking)
    schedule = {name: flat[name] for name, one in declared.items() if one.belongs_to_run}
    schedule |= {"global_batch_size": plan.global_batch_size, "document_masking": masking}
    if schedule["ema_decay"] is None:
        schedule = {name: value for name, value in schedule.items() if name not in ("ema_device", "ema_every")}
    schedule |= {name: ",".join(freezing.words(flat[name])) or None for name in freezing.FLAGS}
    fixed = {name: flat[name] for name, one in declared.items() if one.fixed}
    if flags.model.precision != "bf16-true":
        fixed["bf16_updates"] = None
    if plan.mix is None:
        schedule.pop("data_mix")
    else:
        schedule["data_mix"] = described(plan.mix)
    return {
        "fixed": {
            **data_facts(plan),
            "row_order": ROW_ORDER,
            **fixed,
        },
        "schedule": schedule,
        **mixture_facts(plan),
        "measured_on": _measured_on(plan, flags),
        "end_step": plan.max_step,
        "logged": {"every": flags.logging.log_step_interval, "after": plan.start.step},
        "model_name": flags.model.model_name,
        "rolled_back_to": given.name if (given := given_checkpoint(flags)) is not None else None,
    }


def _measured_on(plan: Plan, flags: Flags) -> dict[str, Any]:
    """What the losses before step 1 are of."""
    if plan.start.step > 0:
        return plan.resumed.get("measured_on", {})
    return measuring.measured_on(flags, plan.validation_splits())


def data_facts(plan: Plan) -> dict[str, Any]:
    """What the data is; of a mixture that of each source by name."""
    if not plan.sources:
        return _of_dataset(plan.dataset)
    each = {name: _of_dataset(source) for name, source in plan.sources.items()}
    return {fact: {name: of_one[fact] for name, of_one in each.items()} for fact in DATA_FACTS}


def _of_dataset(dataset: TokenDataset) -> dict[str, Any]:
    return dict(zip(DATA_FACTS, (dataset.context_length, len(dataset.train), dataset.fingerprint)))


def mixture_facts(plan: Plan) -> dict[str, Any]:
    """Of a mixture: the order of its sources, its stages, and the position that it may not pass."""
    if plan.mixture is None:
        return {}
    raised = {name: str(share) for name, share in plan.raised.items()}
    stages = plan.mixture.as_json()
    return {"mixture": {"sources": plan.mixture.names, "segments": stages, "end": plan.end, "raised": raised}}


def require_same_run(plan: Plan, flags: Flags) -> None:
    """The run as it would go on, against what its checkpoint says. Raises ValueError with the first differences."""
    allowed, document = overrides(flags), plan.resumed
    if not _is_whole(document):
        raise Fault(f"{str(plan.resume_from)!r} is damaged: trainer/progress.json isn't a run's.", NO_CHECKPOINT)
    now, document = facts(plan, flags), _with_all_flags(document, flags)
    fixed, schedule = (_differences(_flat(document[kind]), _flat(now[kind])) for kind in ("fixed", "schedule"))
    if ("mixture" in document) != ("mixture" in now):
        words = [f"--{'data_mix' if 'mixture' in one else 'train_data_dir'}" for one in (document, now)]
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
        _require_base(plan, flags, document)
    if plan.start.step >= plan.max_step:
        sentence = f"{str(plan.resume_from)!r} is where this run ends (step {plan.start.step} of {plan.max_step})"
        if flags.checkpoint.resume == "auto" and not schedule:
            raise Fault(f"{sentence}: nothing is left to do.", DONE)
        raise ValueError(
            f"{sentence}: to train on, give a larger --max_step or --number_epochs, and --resume_override with its name."
        )


def _require_base(plan: Plan, flags: Flags, document: dict[str, Any]) -> None:
    """Raises ValueError where a set with a budget has no loss before step 1, or one of other rows."""
    before, then = document["guard"].get("before", {}), document.get("measured_on", {})
    now = measuring.measured_on(flags, plan.validation_splits())
    for name in parse_budgets(flags.evaluation.forgetting_budget):
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


def _with_all_flags(document: dict[str, Any], flags: Flags) -> dict[str, Any]:
    """progress.json, with the defaults of flags that have been added since it was written: the run had nothing else."""
    defaults = {name: one.default for name, one in flags.declared().items() if one.belongs_to_run and not one.needs}
    return {**document, "schedule": {**defaults, **document["schedule"]}}


def _is_whole(document: dict[str, Any]) -> bool:
    """True if what `facts` and the guard wrote is there, with numbers where they are needed."""
    try:
        guard, schedule = document["guard"], dict(document["schedule"])
        known = schedule.pop("lr_schedule") in SCHEDULES and isinstance(document["fixed"], dict)
        known = known and isinstance(document.get("measured_on", {}), dict)
        known = known and all(isinstance(schedule.get(flag), (str, type(None))) for flag in freezing.FLAGS)
        steps = [schedule.pop(name) or 0 for name in ("max_step", "number_epochs")]
        numbers = [schedule[name] for name in ("lr", "min_lr", "warmup_steps", "lr_decay")]
        numbers += [document["end_step"], guard["skipped"], guard["rewinds"], *guard["losses"], *steps]
        numbers += [*guard.get("before", {}).values(), *document["scaler"].values()]
        numbers += [document["logged"]["every"], document["logged"]["after"]]
        numbers += [document["rows_read"][name] for name in ROWS_READ] if "rows_read" in document else []
    except (KeyError, TypeError, ValueError, AttributeError):
        return False
    return known and all(isinstance(number, (int, float)) for number in numbers)


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


def announcement(plan: Plan, flags: Flags) -> list[str]:
    """What a resumed run does differently from simply going on, with the schedule from here; nothing if nothing."""
    assert plan.resume_from is not None
    lines, document = [], plan.resumed
    if not plan.has_checkpoint:
        lines.append(f"A branch of {plan.resume_from} in {plan.run_directory}.")
    elif (newest := step_names.latest(plan.run_directory)) is not None and newest != plan.resume_from:
        lines.append(f"Back from {newest.name} to {plan.resume_from.name}: later checkpoints are moved aside.")
    now = facts(plan, flags)
    schedule = _differences(_with_all_flags(document, flags)["schedule"], now["schedule"])
    for name, (then, value) in schedule.items():
        lines.append(f"{name}: {value} from here on, {then} before.")
    if plan.max_step != document["end_step"]:
        word = "Extended" if plan.max_step > document["end_step"] else "Shortened"
        lines.append(f"{word}: {plan.max_step} steps instead of {document['end_step']}.")
    if lines:
        lines += _curves(plan, {**document["schedule"], "max_step": document["end_step"]}, now["schedule"])
    if (model := document.get("model_name")) not in (None, flags.model.model_name):
        lines.append(f"The run began with --model_name {model}; it goes on with its own weights and configuration.")
    return lines


def _curves(plan: Plan, then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """The learning rate from here on and as it was to be, as a table of a few steps."""
    first, last = plan.start.step, plan.max_step - 1
    steps = sorted({first + round(part * (last - first) / 4) for part in range(5)})
    curves = {"lr": {**now, "max_step": plan.max_step}, "lr before": then}
    rows = [f"{'step':>10}" + "".join(f"{step + 1:>11}" for step in steps)]
    for name, values in curves.items():
        rates = [schedule_lr(step, values) if step < values["max_step"] else None for step in steps]
        rows.append(f"{name:>10}" + "".join(f"{'-' if rate is None else f'{rate:.3e}':>11}" for rate in rates))
    return rows


def schedule_lr(step: int, schedule: dict[str, Any]) -> float:
    """Learning rate of the step after `step` finished ones, from flags of a run; max_step: its last step."""
    return lr_at(step, max_step=schedule["max_step"], **arguments_of(schedule))
