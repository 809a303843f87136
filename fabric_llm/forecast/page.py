"""A run before it begins: `python plan.py --html FILE` writes one HTML file, with its memory and,
where there is data, its steps."""

from collections import Counter
from pathlib import Path
from typing import Any, Optional

from fabric_llm.base.faults import Fault
from fabric_llm.base.flag import Flags
from fabric_llm.forecast.prediction import CLOSE, NO, Prediction
from fabric_llm.plan import checks, make_plan, resumption, run_directory, start
from fabric_llm.plan.demo import prepare_demo
from fabric_llm.plan.plan import Plan
from fabric_llm.plan.warnings import warnings_of
from fabric_llm.report import figures, page, reading
from fabric_llm.run import save
from fabric_llm.training.schedule import arguments_of, lr_at


def plan_of(own: Flags, flags: Flags) -> Optional[Plan]:
    """As rank 0 of the run makes it, with train.py's checks and sentences; None where the flags
    name no data."""
    # Without data the page has memory, time and costs, and no curves.
    if flags.data.train_data_dir is None and flags.data.data_mix is None:
        return None
    # A number of tokens changes nothing in the steps that train.py would make.
    if own.tokens is not None:
        raise Fault(
            "--html with a dataset draws the steps of --max_step, or of --number_epochs, and "
            "takes no --tokens."
        )
    # In the order of train.py, so that a plan and a run say the same of wrong flags.
    checks.check_training(flags)
    if flags.demo:
        prepare_demo(Path(flags.data.train_data_dir), flags.data.context_length)
    directory = run_directory.directory(flags)
    return make_plan.make_plan(
        flags, start.place(flags), directory, resumption.choose(flags, directory)
    )


def write(output: Path, flags: Flags, plan: Optional[Plan], prediction: Prediction) -> None:
    """Write the page. Raises Fault (2) where it can't be written."""
    # What the page has where no steps are drawn.
    drawn: dict[str, Any] = {"title": prediction.model, "lead": prediction.on}
    if plan is not None:
        drawn = _drawing(flags, plan, prediction.on)
    peak, (unit, size) = prediction.memory.peak, prediction.unit
    # Where the memory of the device isn't known, there is no fraction of it.
    below = "of a device"
    if prediction.used:
        below = f"{100 * prediction.used:.0f} % of the device, in {prediction.memory.moment}"
    costs = "" if prediction.price is None else f"{prediction.price:,.2f} for them"
    time = "A step", f"{prediction.seconds.step:.3g} s", "--max_step or --tokens says how many"
    # Without a number of steps, the time of one step is all that is known.
    if prediction.hours is not None:
        time = (
            "Time",
            page.duration(3600 * prediction.hours),
            f"{prediction.left:,} steps of {prediction.up_to}{time[1]}",
        )
    # A run of unknown length may keep as many as it writes, which then are of one size each.
    kept = prediction.kept_checkpoints
    disk = f"{prediction.checkpoint_bytes * (kept or 1) / size:,.2f} {unit}"
    if kept is None:
        disk += " a checkpoint"
    at_peak = "Memory at the peak", f"{peak / size:,.2f} {unit}", below
    headline = [*drawn.pop("headline", []), at_peak, time, ("Disk", disk, costs)]
    # The last row of the table is the sum.
    parts = {**prediction.memory.parts, "together": peak}
    rows = [
        [name, f"{held / size:,.2f}", f"{100 * held / peak:.1f} %"] for name, held in parts.items()
    ]
    shown = {name: page.shown(value) for name, value in flags.flat().items()}
    # `pop`, because what is left in `drawn` is passed on as keywords.
    page.write_page(
        output,
        "Plan of a run",
        "Nothing was trained.",
        {"memory": "Memory", **drawn.pop("sections", {}), "flags": "Flags"},
        memory=(["Part", unit, "Of the peak"], rows),
        bars=[
            figures.bars(prediction.memory.parts, prediction.device_bytes, (CLOSE, NO), unit, size)
        ],
        runs=[{"headline": headline, "flags": shown}],
        **drawn,
    )


def course(plan: Plan, flags: Flags) -> tuple[list[reading.Record], list[tuple[int, str]]]:
    """(the lines that the run will log, (step, kind) of what happens), by the run's own
    functions."""
    lines, happens, progress, shares = [], [], plan.start, None
    has_sets = flags.evaluation.eval_iters > 0
    # Evaluations need sets, even where their interval is due.
    if has_sets and save.evaluates_first(plan, flags):
        happens.append((progress.step, "evaluated"))
    schedule, shape = plan.schedule, arguments_of(flags.flat())
    # As the loop in train.py goes, without training.
    while not schedule.is_over(progress):
        before, progress = progress, schedule.after(progress)
        # The learning rate of a step follows from the steps that are finished before it.
        lr = lr_at(before.step, max_step=schedule.max_step, **shape)
        line: reading.Record = {"step": progress.step, "tokens": progress.tokens, "lr": lr}
        lines.append(line)
        last_shares, shares = shares, schedule.mixture.shares_at(before.position)
        # Where a stage of the mixture begins. The first one begins with the run.
        if last_shares not in (None, shares):
            happens.append((before.step, "stage"))
        if read := schedule.mixture.read_before(progress.position):
            line["sources"] = {}
            for name, numbers in read.items():
                line["sources"][name] = {**numbers, "share": shares.get(name, 0.0)}
        _, evaluates, saves = save.due_after(before, progress, schedule, flags)
        if has_sets and evaluates:
            happens.append((progress.step, "evaluated"))
        if saves:
            happens.append((progress.step, "saved"))
    return lines, happens


def _drawing(flags: Flags, plan: Plan, on: str) -> dict[str, Any]:
    """What `page.write_page` takes of the steps of a run."""
    lines, happens = course(plan, flags)
    # The lines go the same way as those of a finished run's metrics.jsonl.
    run = reading.Run(plan.run_directory.name, plan.run_directory)
    reading.fill(run, lines)
    lr, start, last = run.number("lr").values, plan.start, lines[-1]
    contexts = " or ".join(f"{context:,}" for context in plan.data.contexts)
    batch = f"{plan.schedule.global_batch_size:,} sequences of {contexts} a step"
    due = Counter(kind for _, kind in happens)
    # Stages alone: evaluations and saves are too many for upright lines.
    run.timeline = [reading.Event(step, kind) for step, kind in happens if kind == "stage"]
    begins = f"resumed from {plan.resume_from}" if plan.resume_from else plan.model.source
    data = flags.data.train_data_dir or ", ".join(plan.data.sources)
    return {
        "title": run.name,
        "lead": f"{begins} on {data}; {plan.model.precision}; {on}",
        "sections": {"curves": "Curves"},
        "charts": figures.charts(figures.FIGURES, [run]),
        "marks": figures.marks([run]),
        "headline": [
            ("Steps", f"{last['step'] - start.step:,}", f"from {start.step:,} to {last['step']:,}"),
            ("Tokens", page.number(last["tokens"] - start.tokens), batch),
            ("Checkpoints", f"{due['saved']:,}", f"and {due['evaluated']:,} evaluations"),
            ("Peak learning rate", f"{lr.max():.3g}", f"{lr[-1]:.3g} at the last step"),
        ],
        # What the run would warn of when it starts.
        "problems": list(warnings_of(flags, plan)),
    }
