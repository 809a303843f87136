"""`python -m fabric_llm.preview FLAGS` draws the run that `train.py FLAGS` would make: one HTML file, without training.

No weights are loaded. Flags, data and model are checked as train.py checks them, with its sentences.
Exit codes: 0 written, 2 bad arguments, or those of docs/faults.md that a start of the run would end with.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any, Optional

from fabric_llm.base.console import plain_output
from fabric_llm.base.ending import in_one_sentence
from fabric_llm.base.faults import Fault
from fabric_llm.checkpoint.progress import Progress
from fabric_llm.plan import checks
from fabric_llm.prepare.demo import prepare_demo
from fabric_llm.report.__main__ import page_module, require_output
from fabric_llm.run import due
from fabric_llm.training.schedule import lr_at

# What takes time to import is imported in the functions below: --help and mistakes in flags are answered at once.

HELP = """usage: python -m fabric_llm.preview [--output preview.html] FLAGS OF train.py

Draw the run that train.py would make with these flags (`python train.py --help` lists them): learning rate, the share of each
source and its epochs, checkpoints and evaluations over steps or tokens, as one HTML file (default: preview.html). The data
and the model's configuration are read and checked as train.py does it; no weights are loaded and nothing is trained."""
MOST_POINTS = 4000  # of shares and epochs, which change slowly
MOST_STEPS = 12  # named one by one in the table of what is due


def main(argv: Optional[list[str]] = None) -> int:
    """Run the command and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if {"-h", "--help"} & set(words):
        print(HELP)
        return 0
    with in_one_sentence("fabric_llm.preview"):
        output, words = split(words)
        require_output(output)
        flags = parsed(words)
        page_module()
        plan, warnings = planned(flags)
        draw(flags, plan, warnings, output)
    return 0


def split(words: list[str]) -> tuple[Path, list[str]]:
    """(--output, all other words). Raises Fault (2)."""
    output, rest, left = "preview.html", [], iter(words)
    for word in left:
        if word == "--output":
            output = next(left, "")
        elif word.startswith("--output="):
            output = word.removeprefix("--output=")
        else:
            rest.append(word)
    if not output:
        raise Fault("--output takes the file to write, and nothing is given.")
    return Path(output), rest


def parsed(words: list[str]) -> Any:
    """The flags of train.py, which are declared in arguments.py beside the package. Raises Fault, SystemExit (2)."""
    root = Path(__file__).resolve().parents[1]
    if not (root / "arguments.py").is_file():
        raise Fault(f"There is no arguments.py in {str(root)!r}: the command runs from a checkout, as train.py does.")
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    flags = importlib.import_module("arguments").parse_train(words)
    checks.check_training(flags)
    return flags


def planned(flags: Any) -> tuple[Any, list[str]]:
    """(the plan, warnings about it), as rank 0 of the run makes them. Raises ValueError."""
    from fabric_llm.plan import make_plan, placement, resume, warnings

    if flags.demo:
        prepare_demo(Path(flags.data.train_data_dir), flags.data.context_length)
    directory = resume.directory(flags)
    plan = make_plan.make_plan(flags, placement.place(flags), directory, resume.choose(flags, directory))
    return plan, warnings.warnings_of(flags, plan)


# ------------------------------------------------------------------------------- the course of the run


def course(plan: Any, flags: Any) -> tuple[list[dict[str, Any]], list[tuple[int, str, str]], Progress]:
    """(the lines that the run will log, (step, kind, words) of what happens, where it ends), by the run's own functions."""
    lines, happens = [], []
    every = max(1, (plan.schedule.max_step - plan.start.step) // MOST_POINTS)
    progress, shares = plan.start, None
    if due.evaluation_first(plan.start, plan.resumed):
        happens.append((progress.step, "evaluated", ""))
    while not plan.is_over(progress):
        before, progress = progress, plan.after(progress)
        line = {"step": progress.step, "tokens": progress.tokens}
        line["lr"] = lr_at(before.step, max_step=plan.schedule.max_step, **due.schedule(flags.training))
        if plan.data.mixture is not None:
            last_shares, shares = shares, plan.data.mixture.shares_at(before.position)
            if last_shares not in (None, shares):
                words = ", ".join(f"{name} {100 * share:.3g} %" for name, share in shares.items())
                happens.append((before.step, "stage", words))
            if last_shares != shares or progress.step % every == 0 or plan.is_over(progress):
                read = plan.data.mixture.read_before(progress.position)
                line["sources"] = {name: {**one, "share": shares.get(name, 0.0)} for name, one in read.items()}
        lines.append(line)
        follows = due.at(before, progress, plan, flags)
        happens += [(progress.step, "evaluated", "")] * follows.evaluates + [
            (progress.step, "saved", "")
        ] * follows.saves
    if not flags.evaluation.eval_iters:
        happens = [event for event in happens if event[1] != "evaluated"]
    return lines, happens, progress


# ------------------------------------------------------------------------------- the page


def draw(flags: Any, plan: Any, warnings: list[str], output: Path) -> None:
    """Write the page. Raises Fault (2) where it can't be written."""
    from fabric_llm.report import figures, page, reading, timeline

    lines, happens, last = course(plan, flags)
    run = reading.Run(plan.run_directory.name, plan.run_directory)
    reading.fill(run, lines)
    kinds = {"stage": timeline.Kind("Stage", 2), "evaluated": timeline.Kind("Evaluation")}
    kinds["saved"] = timeline.Kind("Checkpoint")
    steps_of = {kind: [step for step, each, _ in happens if each == kind] for kind in kinds}
    shares = figures.Figure("sources_share", "Share of each source", "of the sequences", style="steps")
    known = {figure.name: figure for figure in figures.FIGURES}
    begins = f"resumed from {plan.resume_from}" if plan.resume_from else plan.model.source
    on = ", ".join(plan.data.sources) or flags.data.train_data_dir
    devices = f"{plan.placement.strategy} on {plan.placement.world_size} {plan.placement.kind} device{'s' * (plan.placement.world_size > 1)}"
    kept = "all are kept" if flags.save.keep_last is None else f"the last {flags.save.keep_last} are kept, and the best"
    contexts = " or ".join(f"{context:,}" for context in plan.contexts)
    from_to = f"from {plan.start.step:,} to {last.step:,}" if plan.start.step else "from the start"
    lr = run.number("lr").values
    content = page.document(
        "Preview of a run",
        run.name,
        f"{begins} on {on}; {plan.model.precision}; {devices}",
        {"setup": "Data", "curves": "Curves", "events": "What is due", "flags": "Flags"},
        "Nothing was trained.",
        charts=figures.charts([known["lr"], shares, known["sources_epochs"]], [run]),
        strip=figures.strip([run], [[timeline.Event(*event[:2]) for event in sorted(happens)]], kinds),
        runs=[
            {
                "name": run.name,
                "facts": {},
                "data": data_table(plan, last, page.number),
                "flags": {name: page.shown(value) for name, value in flags.flat().items()},
            }
        ],
        headline=[
            ("Steps", f"{last.step - plan.start.step:,}", from_to),
            (
                "Tokens",
                page.number(last.tokens - plan.start.tokens),
                f"{plan.schedule.global_batch_size:,} sequences of {contexts} a step",
            ),
            ("Peak learning rate", f"{lr.max():.3g}", f"{lr[-1]:.3g} at the last step"),
            ("Checkpoints", f"{len(steps_of['saved']):,}", kept),
            ("Evaluations", f"{len(steps_of['evaluated']):,}", f"of {', '.join(plan.validation_splits())}"),
        ],
        problems=warnings,
        events=(["What", "How often", "After the steps"], due_rows(happens, steps_of)),
        differing=None,
    )
    page.save(content, output)


def due_rows(happens: list[tuple[int, str, str]], steps_of: dict[str, list[int]]) -> list[list[str]]:
    """(what, how often, after which steps) of what is due."""
    found = []
    for title, steps in (("Evaluation", steps_of["evaluated"]), ("Checkpoint", steps_of["saved"])):
        is_long = len(steps) > MOST_STEPS
        words = ", ".join(f"{step:,}" for step in ([*steps[:6], *steps[-3:]] if is_long else steps))
        if steps:
            found.append([title, f"{len(steps):,}", words + " (the first and the last)" * is_long])
    return [*found, *(["Stage", "1", f"{step:,}: {words}"] for step, kind, words in happens if kind == "stage")]


def data_table(plan: Any, last: Progress, number: Any) -> tuple[list[str], list[list[str]]]:
    """(head, rows): what is read of each dataset by the end. number: writes one down."""
    if plan.data.mixture is None:
        read = {"training": {"tokens": last.tokens, "epochs": last.position / len(plan.data.dataset.train)}}
        datasets = {"training": plan.data.dataset}
    else:
        read, datasets = plan.data.mixture.read_before(last.position), plan.data.sources
    whole = sum(one["tokens"] for one in read.values())
    found = []
    for name, one in read.items():
        share, rows = f"{100 * one['tokens'] / whole:.3g} %", number(len(datasets[name].train))
        found.append([name, share, number(one["tokens"]), f"{one['epochs']:.2f}", rows, str(datasets[name].folder)])
    return ["Dataset", "Share of the tokens", "Tokens read", "Epochs", "Sequences", "Folder"], found


if __name__ == "__main__":
    plain_output()
    sys.exit(main())
