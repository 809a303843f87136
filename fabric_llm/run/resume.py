"""Which checkpoint a run goes on from, what it must have in common with it, and what it may change on purpose."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional, Union

from arguments import Arguments, is_rank_zero
from fabric_llm.base import step_names
from fabric_llm.base.faults import DONE, NO_CHECKPOINT, Fault
from fabric_llm.base.files import MANIFEST
from fabric_llm.checkpoint import keep
from fabric_llm.run import run_directory

if TYPE_CHECKING:
    from fabric_llm.run.plan import Plan

CHOSEN = "FABRIC_LLM_RESUME_FROM"  # environment variable, for other ranks than 0: what rank 0 has chosen, see `chosen`
ROWS_READ = ("from_position", "count", "hash_sum")  # in progress.json; not in that of older versions
MOST_DIFFERENCES = 10  # named in an error
# Flags that a resumed run may change if --resume_override names them; all are saved in checkpoints.
OVERRIDABLE = (
    *("max_step", "number_epochs", "lr", "min_lr", "lr_decay", "lr_schedule", "warmup_steps"),
    *("weight_decay", "beta1", "beta2", "grad_clip", "global_batch_size", "document_masking"),
    "router_aux_loss_coef",
)


def directory(arguments: Arguments) -> Path:
    """The run directory that the flags name; nothing is created. Raises as `run_directory.choose` does."""
    flags, given = arguments.checkpoint, _given(arguments)
    if given is not None and not flags.resume:
        raise ValueError("--checkpoint says where to resume, so it goes with --resume true.")
    default = run_directory.default_name(arguments.model.model_name, arguments.data.train_data_dir)
    return run_directory.choose(flags.output_dir, flags.run_name, default, flags.resume, given)


def choose(arguments: Arguments, directory: Path) -> Optional[Path]:
    """The checkpoint to resume from, None for a run that starts. Damaged ones are passed over, loudly.

    Rank 0 holds the run directory's lock from here on, if the directory is there. Raises Fault.
    """
    flags, given = arguments.checkpoint, _given(arguments)
    if CHOSEN in os.environ:
        return Path(os.environ[CHOSEN]) if os.environ[CHOSEN] else None
    from fabric_llm.checkpoint import reading

    own = step_names.latest(directory)
    goes_on = given is not None and _restarted(arguments) and _goes_on_from(directory, given)
    if given is not None and not goes_on:
        _require_checkpoint(given)
    run_directory.require_writable(directory)
    if directory.is_dir() and is_rank_zero():
        run_directory.lock(directory)
    if not flags.resume:
        return None
    hashes = flags.verify_checkpoints == "full" and is_rank_zero()
    if given is not None and not goes_on:
        run_directory.no_link(given.parent / "metrics.jsonl")  # a branch begins with a copy
        if own is not None and given.parent.resolve() != directory.resolve():
            raise ValueError(
                f"--checkpoint {flags.checkpoint} would begin a branch in {str(directory)!r}, which holds checkpoints up "
                f"to {own.name}: go on there without --checkpoint, or take another --run_name."
            )
        reading.verified(given, hashes)
        return given
    valid, problems = keep.newest_valid(directory, hashes)
    if valid is None and problems:
        raise Fault(f"No checkpoint in {str(directory)!r} is whole: {' '.join(problems)}", NO_CHECKPOINT)
    if is_rank_zero():
        for problem in problems:
            print(f"Warning: {problem} Resuming from {valid} instead.", flush=True)
    return valid


def require_given(arguments: Arguments) -> None:
    """--checkpoint is there, as far as names of files say, where this command can only begin from it. Raises Fault (66)."""
    given = _given(arguments)
    if given is not None and not _restarted(arguments) and CHOSEN not in os.environ:
        _require_checkpoint(given)


def _require_checkpoint(given: Path) -> None:
    if (given / MANIFEST).is_file():
        return
    newest = step_names.latest(given)
    instead = f" It is a run: its newest is --checkpoint {newest}." if newest is not None else nearest_step(given)
    raise Fault(f"{str(given)!r} isn't a checkpoint: it has no {MANIFEST}.{instead}", NO_CHECKPOINT)


def nearest_step(given: Path) -> str:
    """The checkpoints of the run that `given`, which isn't there, would belong to, as the end of a sentence."""
    names = [] if given.is_dir() else [path.name for path in step_names.checkpoints(given.parent)]
    return f" {str(given.parent)!r} has {', '.join(names[-5:])}." if names else ""


def _given(arguments: Arguments) -> Optional[Path]:
    return None if arguments.checkpoint.checkpoint is None else Path(arguments.checkpoint.checkpoint)


def _restarted(arguments: Arguments) -> bool:
    """True if the command may not be the first of its kind: a restart loop's, or torchrun's or SLURM's again."""
    counts = (os.environ.get(name, "0") for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"))
    return arguments.checkpoint.resume == "auto" or any(count != "0" for count in counts)


def _goes_on_from(directory: Path, given: Path) -> bool:
    """True if the run in `directory` has gone back to, or branched off, `given` already, and saved since."""
    from fabric_llm.checkpoint.progress import read_progress

    for path in reversed(step_names.checkpoints(directory)):
        with suppress(Fault):  # damaged: the one before it says it
            begun = read_progress(path).get("rolled_back_to") == given.name
            return begun and path.resolve() != given.resolve()
    return False


def chosen(plan: Optional[Plan]) -> str:
    """The value of CHOSEN: a checkpoint, or nothing for a run that starts."""
    return "" if plan is None or plan.resume_from is None else str(plan.resume_from)


def document_masking(arguments: Arguments, document: Optional[dict[str, Any]]) -> Union[bool, str]:
    """--document_masking, where `auto` means for a run that goes on what it had: all its steps are alike.

    document: progress.json of the checkpoint that is resumed.
    """
    given = arguments.data.document_masking
    schedule = (document or {}).get("schedule")
    had = schedule.get("document_masking") if isinstance(schedule, dict) else None
    if given == "auto" and isinstance(had, bool) and "document_masking" not in overrides(arguments):
        return had
    return given


def facts(plan: Plan, arguments: Arguments) -> dict[str, Any]:
    """What a checkpoint says of its run, for those that resume from it."""
    flat = arguments.flat()
    packed = bool(plan.dataset.manifest.get("packed"))
    masking = plan.document_end is not None if packed else bool(plan.document_masking)
    schedule = {name: flat[name] for name in OVERRIDABLE}
    schedule |= {"global_batch_size": plan.global_batch_size, "document_masking": masking}
    return {
        "fixed": {
            "context_length": plan.dataset.context_length,
            "train_rows": len(plan.dataset.train),
            "train_fingerprint": plan.dataset.fingerprint,
            "seed": arguments.training.seed,
            "precision": arguments.model.precision,
            "bf16_updates": arguments.model.bf16_updates if arguments.model.precision == "bf16-true" else None,
        },
        "schedule": schedule,
        "end_step": plan.max_step,
        "logged": {"every": arguments.logging.log_step_interval, "after": plan.start.step},
        "model_name": arguments.model.model_name,
        "rolled_back_to": given.name if (given := _given(arguments)) is not None else None,
    }


def require_same_run(plan: Plan, arguments: Arguments, document: dict[str, Any]) -> None:
    """The run as it would go on, against what its checkpoint says. Raises ValueError with the first differences."""
    allowed = overrides(arguments)
    if not _is_whole(document):
        raise Fault(f"{str(plan.resume_from)!r} is damaged: trainer/progress.json isn't a run's.", NO_CHECKPOINT)
    now = facts(plan, arguments)
    fixed, schedule = (_differences(document[kind], now[kind]) for kind in ("fixed", "schedule"))
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
    if plan.start.step >= plan.max_step:
        sentence = f"{str(plan.resume_from)!r} is where this run ends (step {plan.start.step} of {plan.max_step})"
        if arguments.checkpoint.resume == "auto" and not schedule:
            raise Fault(f"{sentence}: nothing is left to do.", DONE)
        raise ValueError(
            f"{sentence}: to train on, give a larger --max_step or --number_epochs, and --resume_override with its name."
        )


def _is_whole(document: dict[str, Any]) -> bool:
    """True if what `facts` and the guard wrote is there, with numbers where they are needed."""
    try:
        guard, schedule = document["guard"], dict(document["schedule"])
        known = schedule.pop("lr_schedule") in ("cosine", "linear") and isinstance(document["fixed"], dict)
        steps = [schedule.pop(name) or 0 for name in ("max_step", "number_epochs")]
        numbers = [schedule[name] for name in ("lr", "min_lr", "warmup_steps", "lr_decay")]
        numbers += [document["end_step"], guard["skipped"], guard["rewinds"], *guard["losses"], *steps]
        numbers += [*document["scaler"].values(), document["logged"]["every"], document["logged"]["after"]]
        numbers += [document["rows_read"][name] for name in ROWS_READ] if "rows_read" in document else []
    except (KeyError, TypeError, ValueError, AttributeError):
        return False
    return known and all(isinstance(number, (int, float)) for number in numbers)


def overrides(arguments: Arguments) -> tuple[str, ...]:
    """The flags that --resume_override names. Raises ValueError for one that can't be."""
    given = arguments.checkpoint.resume_override
    names = tuple(name.strip().removeprefix("--") for name in given.split(",") if name.strip()) if given else ()
    for name in names:
        if name not in OVERRIDABLE:
            raise ValueError(f"--resume_override {name}: what can change is {', '.join(OVERRIDABLE)}.")
    return names


def _differences(then: dict[str, Any], now: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {name: (then[name], value) for name, value in now.items() if name in then and then[name] != value}


def _listed(differences: dict[str, tuple[Any, Any]]) -> str:
    first = [f"{name} {then}, not {now}" for name, (then, now) in list(differences.items())[:MOST_DIFFERENCES]]
    more = len(differences) - len(first)
    return "; ".join(first) + (f"; and {more} more" if more > 0 else "")


def announcement(plan: Plan, arguments: Arguments, document: dict[str, Any]) -> list[str]:
    """What a resumed run does differently from simply going on, with the schedule from here; nothing if nothing."""
    assert plan.resume_from is not None
    lines = []
    if plan.resume_from.parent.resolve() != plan.run_directory.resolve():
        lines.append(f"A branch of {plan.resume_from} in {plan.run_directory}.")
    elif (newest := step_names.latest(plan.run_directory)) is not None and newest != plan.resume_from:
        lines.append(f"Back from {newest.name} to {plan.resume_from.name}: later checkpoints are moved aside.")
    now = facts(plan, arguments)
    schedule = _differences(document["schedule"], now["schedule"])
    for name, (then, value) in schedule.items():
        lines.append(f"{name}: {value} from here on, {then} before.")
    if plan.max_step != document["end_step"]:
        word = "Extended" if plan.max_step > document["end_step"] else "Shortened"
        lines.append(f"{word}: {plan.max_step} steps instead of {document['end_step']}.")
    if lines:
        lines += _curves(plan, {**document["schedule"], "max_step": document["end_step"]}, now["schedule"])
    if (model := document.get("model_name")) not in (None, arguments.model.model_name):
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
    from fabric_llm.training.schedule import lr_at

    return lr_at(
        step,
        max_step=schedule["max_step"],
        lr=schedule["lr"],
        min_lr=schedule["min_lr"],
        warmup_steps=schedule["warmup_steps"],
        decay=schedule["lr_decay"],
        shape=schedule["lr_schedule"],
    )
