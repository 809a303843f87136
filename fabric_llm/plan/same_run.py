"""What a resumed run must have in common with its checkpoint, and what it changes on purpose."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Optional

from fabric_llm.base import files, register
from fabric_llm.base.faults import DONE, NO_CHECKPOINT, Fault
from fabric_llm.base.flag import Flags
from fabric_llm.base.names import command, listed
from fabric_llm.checkpoint.keep import comparable_losses, is_evaluated
from fabric_llm.data import mixture_text
from fabric_llm.data.columns import is_stream
from fabric_llm.data.order import ROW_ORDER, STREAM_ORDER
from fabric_llm.model import freezing
from fabric_llm.plan.checks import overrides
from fabric_llm.plan.plan import Plan
from fabric_llm.plan.resumption import given_checkpoint
from fabric_llm.plan.schedule import Schedule
from fabric_llm.training.forgetting import Forgetting, hard_budgets
from fabric_llm.training.schedule import SCHEDULES, arguments_of, lr_at


@contextmanager
def written_by_a_run(checkpoint: Optional[Path]) -> Iterator[None]:
    """Around code that reads its progress.json: raise Fault (66) if no run wrote that file,
    although its hash is right."""
    try:
        yield
    # Whatever a foreign file lacks or has in another type ends here.
    except (LookupError, TypeError, AttributeError) as error:
        # Nothing was read from a file, so it is an error of this package.
        if checkpoint is None:
            raise
        raise Fault(
            f"{str(checkpoint)!r} is damaged: trainer/progress.json isn't a run's "
            f"({type(error).__name__}: {error}).",
            NO_CHECKPOINT,
        ) from error


def facts(plan: Plan, schedule: Schedule, flags: Flags) -> dict[str, Any]:
    """What a checkpoint says of its run, to be compared by runs that resume from it. schedule: that
    of the run where it is."""
    flat, declared, given = flags.flat(), flags.declared(), given_checkpoint(flags)
    # Of data that isn't packed `document_end` is always None, so there the flag itself is
    # compared.
    packed = bool(plan.data.dataset.manifest.get("packed"))
    masking = plan.data.document_end is not None if packed else bool(plan.data.document_masking)
    # What may change by --resume_override.
    of_run = {name: flat[name] for name, one in declared.items() if one.belongs_to_run}
    # The values that the run has, where the flags leave them open.
    of_run |= {"global_batch_size": schedule.global_batch_size, "document_masking": masking}
    of_run["code"] = register.fact()  # its file may be moved
    # The same words in another form, such as with spaces, are no change.
    of_run |= {name: ",".join(freezing.words(flat[name])) or None for name in freezing.FLAGS}
    # What can't change within a run.
    fixed = {name: flat[name] for name, one in declared.items() if one.resume == "never"}
    of_data = {
        "context_length": plan.of_each_source(lambda dataset: dataset.context_length),
        "train_rows": plan.of_each_source(lambda dataset: len(dataset.train)),
        "train_fingerprint": plan.of_each_source(lambda dataset: dataset.fingerprint),
        # Whether documents are kept apart, and what their targets are.
        "document_end": plan.of_each_source(lambda dataset: dataset.document_end),
        "train_columns": plan.of_each_source(lambda dataset: dataset.columns_fingerprint),
    }
    # Rows between the 64, where a manifest tells them. What isn't known can't be compared.
    hashes = plan.of_each_source(lambda dataset: dataset.train_sha256)
    if isinstance(hashes, dict):
        hashes = {name: digest for name, digest in hashes.items() if digest is not None}
    if hashes:
        of_data["train_sha256"] = hashes
    # Empty without --data_mix: then progress.json has no `mixture`, which tells the two apart.
    of_mixture: dict[str, Any] = {}
    if schedule.mixture.is_named:
        of_run["data_mix"] = mixture_text.described(schedule.mix)
        of_mixture["mixture"] = {
            "sources": schedule.mixture.names,
            "segments": schedule.mixture.as_json(),
            "end": schedule.end,
            "raised": {name: str(share) for name, share in schedule.raised.items()},
        }
    else:
        # A run of one dataset has no shares to compare.
        del of_run["data_mix"]
    # Without an average, its other flags change nothing.
    if of_run["ema_decay"] is None:
        del of_run["ema_device"], of_run["ema_every"]
    if plan.model.precision != "bf16-true":
        fixed["bf16_updates"] = None
    # The losses before step 1 stay what others are compared with.
    evaluated_on = plan.data.measured_on()
    base = plan.resumed["measured_on"] if plan.is_base_known else evaluated_on
    # Another order of rows would read some twice and others never.
    order = STREAM_ORDER if is_stream(plan.data.dataset.train) else ROW_ORDER
    return {
        "fixed": {**of_data, "row_order": order, **fixed},
        "schedule": of_run,
        **of_mixture,
        "measured_on": base,
        "evaluated_on": evaluated_on,
        "end_step": schedule.max_step,
        "logged": {"every": flags.logging.log_step_interval, "after": plan.start.step},
        "code": register.LOADED.get("code"),
        "model_name": plan.model.name,
        "config_file": plan.model.config_file,
        # Also once it was resumed without --checkpoint: a repeated command must not go back again.
        "rolled_back_to": plan.resumed.get("rolled_back_to") if given is None else given.name,
        "branch_of": None if plan.branch_point is None else str(plan.branch_point.resolve()),
    }


def require_same_run(plan: Plan, flags: Flags) -> list[str]:
    """Compare the run with its checkpoint. Returns what it changes on purpose, one line each.

    Raises ValueError with the first differences that aren't allowed, and Fault (0) if nothing is
    left to do.
    """
    # A flag that was declared after the checkpoint was written had its default.
    added = {
        name: one.default
        for name, one in flags.declared().items()
        if one.belongs_to_run and not one.needs
    }
    then = {**plan.resumed, "schedule": {**added, **plan.resumed["schedule"]}}
    now = facts(plan, plan.schedule, flags)
    # The guard counts on from these numbers. What can't be added is no number, and raises
    # TypeError, which `written_by_a_run` expects of a foreign file.
    sum([*then["guard"]["losses"], then["guard"]["skipped"], then["guard"]["rewinds"]])
    fixed, changed = (_differences(then[kind], now[kind]) for kind in ("fixed", "schedule"))
    # A run can't turn from one dataset into a mixture, or back.
    if ("mixture" in then) != ("mixture" in now):
        before, after = "--train_data_dir", "--data_mix"
        if "mixture" in then:
            before, after = after, before
        fixed = {"data": (before, after), **fixed}
    if now["schedule"]["max_step"] is not None and "max_step" not in changed:
        changed.pop("number_epochs", None)  # isn't used
    # What isn't named by --resume_override may have changed by mistake.
    allowed = overrides(flags)
    silent = {name: values for name, values in changed.items() if name not in allowed}
    refuse(plan.resume_from, fixed, False, _other_data(plan, fixed))
    refuse(plan.resume_from, silent, may_change=True)
    # After the flags: a difference among them may be the reason.
    _require_known_base(plan)
    _require_work(plan, flags, is_changed=bool(changed))
    return _changes(plan, flags, changed, now)


def _new_run_from(checkpoint: Optional[Path]) -> str:
    """The flags of a new run that begins with the weights of the checkpoint."""
    return f"{command(model_name=checkpoint)}, without --resume"


def _other_data(plan: Plan, differing: Iterable[str]) -> str:
    """A sentence about the datasets whose rows, of which hashes are compared, differ; "" without
    one."""
    given = plan.of_each_source(lambda dataset: dataset.given)
    folders = []
    for name in differing:
        fact, _, source = name.partition(" of ")
        if fact in ("train_rows", "train_fingerprint", "train_sha256"):
            folders.append(repr(given[source] if source else given))
    if not folders:
        return ""
    listing = " and ".join(dict.fromkeys(folders))
    return f"{listing} holds other rows than then: bring those back. "


def refuse(
    checkpoint: Optional[Path],
    differing: dict[str, tuple[Any, Any]],
    may_change: bool,
    about_data: str = "",
) -> None:
    """Raises ValueError if anything differs from the checkpoint. differing: {name: (then, now)}.
    may_change: by --resume_override."""
    if not differing:
        return
    advice = (
        f"{about_data}That can't change within a run; for a new one from its weights: "
        f"{_new_run_from(checkpoint)}."
    )
    if may_change:
        advice = f"To change that on purpose: --resume_override {','.join(differing)}."
        then = {name: before for name, (before, _) in differing.items()}
        # What isn't typed is that of the last start, by arguments.yaml. Others are only described.
        if not then.keys() & {"code", "data", "data_mix"}:
            advice = f"To go on as it was: {command(**then)}. {advice}"
    # A foreign checkpoint may differ in everything, so only the first differences are listed.
    words = [f"{name} {before}, not {value}" for name, (before, value) in differing.items()]
    first = listed(words, separator="; ")
    raise ValueError(f"{str(checkpoint)!r} was written with {first}. {advice}")


def _require_known_base(plan: Plan) -> None:
    """Raises ValueError unless each set that has a budget was evaluated before step 1, on the rows
    that are evaluated now."""
    if not plan.is_base_known:  # it will be measured
        return
    base, measured_on = plan.resumed["guard"]["before"], plan.data.measured_on()
    # A stop had cut off the first evaluation, and a process that was killed has made it since.
    if plan.start.step == 0 and not base:
        base = plan.resumed["eval_losses"]
    # A budget limits how far a loss may rise above its value before step 1, on the same rows.
    for name in plan.data.budgets:
        before = plan.resumed["measured_on"].get(name, measured_on[name])
        if name in base and before == measured_on[name]:
            continue
        advice = (
            "Give the --eval_data, --eval_iters, --eval_batch_size and --document_masking of then, "
            "or leave"
        )
        if before == measured_on[name][: len(before)]:
            advice = (
                "An older version read the first rows of sets, and saw packed ones beside others "
                "as one text. Leave"
            )
        raise ValueError(
            f"--forgetting_budget: {name!r} wasn't evaluated on these rows before step 1 of this "
            f"run, so what it forgets of it isn't known. {advice} it out by --resume_override "
            "forgetting_budget; or begin a run whose budgets count from this checkpoint: "
            f"{_new_run_from(plan.resume_from)}."
        )


def _require_work(plan: Plan, flags: Flags, is_changed: bool) -> None:
    """Raises Fault (0), or ValueError where the command asks for more, if nothing is left to do."""
    # There are steps left to train.
    if plan.start.step < plan.schedule.max_step:
        return
    if plan.start.step > plan.schedule.max_step:
        raise ValueError(
            f"{str(plan.resume_from)!r} is after step {plan.start.step}, and the run would end "
            f"after step {plan.schedule.max_step}: take a larger --max_step or --number_epochs, or "
            "go back with --checkpoint."
        )
    # A request to stop may have cut off the last evaluation.
    if flags.evaluation.eval_iters > 0 and not is_evaluated(plan.resumed):
        return
    # Or the run was killed before it went back, or ended, as that evaluation asks for.
    if forgetting_at_start(plan, flags).verdict in ("stop", "rewind", "steer"):
        return
    sentence = (
        f"{str(plan.resume_from)!r} is where this run ends (step {plan.start.step} of "
        f"{plan.schedule.max_step})"
    )
    # For a scheduler that repeats the command with `auto`, this is the end and no error.
    if flags.checkpoint.resume == "auto" and not is_changed:
        raise Fault(f"{sentence}: nothing is left to do.", DONE)
    raise ValueError(
        f"{sentence}: to train on, give a larger --max_step or --number_epochs, and "
        "--resume_override with its name."
    )


def forgetting_at_start(plan: Plan, flags: Flags) -> Forgetting:
    """The budgets, and what the losses at the checkpoint of a resumed run say of them."""
    evaluation = flags.evaluation
    hard = hard_budgets(evaluation.forgetting_budget)
    forgetting = Forgetting(plan.data.budgets, evaluation.forgetting_action, hard)
    if plan.resumed:
        forgetting.before = dict(plan.resumed["guard"]["before"])
        forgetting.changed = plan.changed_eval_sets()
        losses = comparable_losses(plan.resumed)
        if losses is not None:
            forgetting.accept_evaluation(plan.start.step, losses)
    return forgetting


def _differences(then: dict[str, Any], now: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """{name: (then, now)} of what differs. Facts of sources are compared one by one; a new source
    is no difference."""
    differing: dict[str, tuple[Any, Any]] = {}
    for name, value in now.items():
        # What the checkpoint doesn't hold, such as one of an older version, is no difference.
        before = then.get(name, value)
        if isinstance(before, dict) and isinstance(value, dict):
            for source, fact in value.items():
                if before.get(source, fact) != fact:
                    differing[f"{name} of {source}"] = before[source], fact
        # One dictionary and one other value mean a mixture and one dataset, of which
        # `require_same_run` has a sentence.
        elif before != value and dict not in (type(before), type(value)):
            differing[name] = before, value
    return differing


def _changes(
    plan: Plan, flags: Flags, schedule: dict[str, tuple[Any, Any]], now: dict[str, Any]
) -> list[str]:
    """Lines about what the run changes on purpose, and the learning rate from here on. Without
    changes there are none."""
    lines, then = [], plan.resumed
    # A branch begins beside the run of its checkpoint, and leaves that as it is.
    if not plan.has_checkpoint:
        lines.append(f"A branch of {plan.resume_from} in {plan.run_directory}.")
    elif (newest := files.latest(plan.run_directory)) and newest.name != plan.resume_from.name:
        lines.append(
            f"Back from {newest.name} to {plan.resume_from.name}: later checkpoints are moved "
            "aside."
        )
    for name, (before, value) in schedule.items():
        lines.append(f"{name}: {value} from here on, {before} before.")
    if plan.schedule.max_step != then["end_step"]:
        word = "Extended" if plan.schedule.max_step > then["end_step"] else "Shortened"
        lines.append(f"{word}: {plan.schedule.max_step} steps instead of {then['end_step']}.")
    if lines:
        # Flags that a checkpoint doesn't hold have their values of now.
        after = {**flags.flat(), **now["schedule"]}
        before = {**after, **then["schedule"], "max_step": then["end_step"]}
        lines += _curves(plan, before, after)
    if other := sorted(plan.changed_eval_sets() & then["guard"]["before"].keys()):
        names = " and ".join(map(repr, other))
        lines.append(
            f"Evaluations read other rows of {names} than before step 1: their losses from here "
            "on aren't compared."
        )
    if then["model_name"] != now["model_name"]:
        began = f"The run began with --model_name {then['model_name']}"
        lines.append(f"{began}; it goes on with its own weights and configuration.")
    return lines


def _curves(plan: Plan, then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """A table of the learning rate from here on and as it would have been, at a few steps; of a run
    that was finished, its last rate instead."""
    # Steps count from 0 here, and from 1 in the table.
    first, last = plan.start.step, plan.schedule.max_step - 1
    # A set, since a short run has the same step several times.
    steps = sorted({first + round(quarter * (last - first) / 4) for quarter in range(5)})
    rows = {
        "step": [str(step + 1) for step in steps],
        "lr": [_rate({**now, "max_step": plan.schedule.max_step}, step) for step in steps],
    }
    lines = []
    if first < then["max_step"]:
        rows["lr before"] = [_rate(then, step) for step in steps]
    else:
        lines = [f"The learning rate of step {first}, the last one, was {_rate(then, first - 1)}."]
    for name, row in rows.items():
        lines.append(f"{name:>10}" + "".join(f"{one:>11}" for one in row))
    return lines


def _rate(schedule: dict[str, Any], step: int) -> str:
    """The learning rate of a step, counted from 0; "-" where the schedule has none."""
    end, shape = schedule["max_step"], arguments_of(schedule)
    # Another module of --code may not know the schedule of before.
    is_known = shape["lr_schedule"] in SCHEDULES | register.SCHEDULES
    return f"{lr_at(step, max_step=end, **shape):.3e}" if is_known and step < end else "-"
