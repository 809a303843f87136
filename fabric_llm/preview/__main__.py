"""`python -m fabric_llm.preview FLAGS` draws the run that `train.py FLAGS` would make: one HTML file, without training.

No weights are loaded. Flags, data and model are checked as train.py checks them, with its sentences.
Exit codes: 0 written, 2 bad arguments, or those of docs/faults.md that a start of the run would end with.
"""

from __future__ import annotations

import importlib
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Optional

from fabric_llm.base.console import plain_output
from fabric_llm.base.ending import in_one_sentence
from fabric_llm.base.faults import Fault
from fabric_llm.report.__main__ import require_output, save

# torch and plotly are imported in the functions below: --help and mistakes in flags are answered at once.

HELP = """usage: python -m fabric_llm.preview [--output preview.html] FLAGS OF train.py

Draw the run that train.py would make with these flags (`python train.py --help` lists them): learning rate, the share of each
source and its epochs, checkpoints and evaluations over steps or tokens, as one HTML file (default: preview.html). The data
and the model's configuration are read and checked as train.py does it; no weights are loaded and nothing is trained."""
OUTPUT = "preview.html"
KINDS = {"stage": "Stage", "evaluated": "Evaluation", "saved": "Checkpoint"}
MOST_MARKS = 400  # of a kind on the time line


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
        from fabric_llm.report import page

        page.plotly_source()  # before torch is imported
        plan, doubts = planned(flags)
        from fabric_llm.preview.course import course

        save(drawn(flags, plan, course(plan, flags), doubts), output)
    return 0


def split(words: list[str]) -> tuple[Path, list[str]]:
    """(--output, all other words). Raises Fault (2)."""
    output, rest, left = OUTPUT, [], iter(words)
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
    root = Path(__file__).resolve().parents[2]
    if not (root / "arguments.py").is_file():
        raise Fault(f"There is no arguments.py in {str(root)!r}: the command runs from a checkout, as train.py does.")
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    from fabric_llm.plan import mistakes

    flags = importlib.import_module("arguments").parse_train(words)
    mistakes.in_training(flags)
    return flags


def planned(flags: Any) -> tuple[Any, list[str]]:
    """(the plan, doubts about it), as rank 0 of the run makes them. Raises ValueError."""
    from fabric_llm.plan import joining, placement, resume
    from fabric_llm.plan.plan import make_plan
    from fabric_llm.plan.same_run import require_same_run
    from fabric_llm.prepare.demo import prepare_demo

    if flags.demo:
        prepare_demo(Path(flags.data.train_data_dir), flags.data.context_length)
    directory = resume.directory(flags)
    plan = make_plan(flags, placement.place(flags), directory, resume.choose(flags, directory))
    if plan.resume_from is not None:
        require_same_run(plan, flags)
    return plan, joining.doubts_about(flags, plan)


def drawn(flags: Any, plan: Any, course: Any, doubts: list[str]) -> str:
    """The page."""
    from fabric_llm.preview.course import at_most
    from fabric_llm.report import figures, page, reading

    run = reading.Run(plan.run_directory.name, plan.run_directory, numbers={"tokens": course.tokens})
    found = [
        figures.Figure("lr", "Learning rate", "", [figures.Line(0, "", course.lr)]),
        figures.Figure("share", "Share of each source", "of the sequences", _lines(course.shares, "steps")),
        figures.Figure("epochs", "How often each source is read", "epochs", _lines(course.epochs, "line")),
    ]
    found = [figure for figure in found if figure.lines]
    steps = {"stage": [step for step, _ in course.stages[1:]], "evaluated": course.evaluations, "saved": course.saves}
    marks = [(step, kind) for kind, many in steps.items() for step in at_most(many, MOST_MARKS)]
    data = {
        "runs": [run.name],
        "axes": {"x": "Step", "t": "Tokens"},
        "kinds": KINDS,
        "charts": figures.as_data([run], found),
        "events": [_mark(run, step, kind) for step, kind in marks],
    }
    made = f"Made by fabric_llm.preview on {datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC. Nothing was trained."
    return page.document(f"{run.name} · preview", body(flags, plan, course, doubts, found, made), data)


def _lines(of_sources: dict[str, Any], style: str) -> list[Any]:
    from fabric_llm.report.figures import Line

    return [Line(0, name, series, style) for name, series in of_sources.items()]


def _mark(run: Any, step: int, kind: str) -> dict[str, Any]:
    import numpy as np

    return {"run": 0, "x": step, "t": int(run.tokens_at(np.array([step]))[0]), "kind": kind, "words": ""}


def body(flags: Any, plan: Any, course: Any, doubts: list[str], found: Any, made: str) -> str:
    """Everything that is seen."""
    from fabric_llm.report import figures, page, summary

    dashes = figures.dashes_of(found)
    charts = "".join(page.chart(figure, [plan.run_directory.name], dashes[figure.name]) for figure in found)
    strip = '<figure class="chart" id="chart-events"><div class="plot" role="img" aria-label="What is due when"></div></figure>'
    every = page.terms((name, summary.shown(value)) for name, value in flags.flat().items())
    inside = {
        "curves": f'{page.controls([])}<div class="charts">{charts}</div>',
        "events": strip + page.table(["What", "How often", "After the steps"], due_rows(course), "What is due", (1,)),
        "data": page.table(*data_table(plan, course), "Data", (1, 2, 3, 4)),
        "flags": f'<details class="more"><summary>All flags</summary>{every}</details>',
    }
    titles = {"curves": "Curves", "events": "What is due", "data": "Data", "flags": "Flags"}
    warnings = "".join(f'<p class="problem">{page.text(sentence)}</p>' for sentence in doubts)
    sections = (page.section(name, titles[name], part) for name, part in inside.items())
    top = page.header("Preview of a run", plan.run_directory.name, lead(flags, plan))
    main = f'<main id="main">{headline(flags, plan, course)}{warnings}{"".join(sections)}</main>'
    return f"{top}{page.navigation(titles)}{main}<footer>{page.text(made)}</footer>"


def lead(flags: Any, plan: Any) -> str:
    """The run in a sentence."""
    on = ", ".join(plan.sources) if plan.sources else str(flags.data.train_data_dir)
    devices = f"{plan.strategy} on {plan.world_size} {plan.kind} device{'s' * (plan.world_size > 1)}"
    begins = f"resumed from {plan.resume_from}" if plan.resume_from else plan.source
    return f"{begins} on {on}; {plan.precision}; {devices}"


def headline(flags: Any, plan: Any, course: Any) -> str:
    """The five figures that decide."""
    from fabric_llm.report.page import text
    from fabric_llm.report.summary import large

    steps, batch = course.last.step - plan.start.step, plan.global_batch_size
    contexts = " or ".join(f"{context:,}" for context in plan.contexts)
    tiles = [
        (
            "Steps",
            f"{steps:,}",
            f"from {plan.start.step:,} to {course.last.step:,}" if plan.start.step else "from the start",
        ),
        ("Tokens", large(course.last.tokens - plan.start.tokens), f"{batch:,} sequences of {contexts} a step"),
        ("Peak learning rate", f"{course.lr.values.max():.3g}", f"{course.lr.values[-1]:.3g} at the last step"),
        ("Checkpoints", f"{len(course.saves):,}", kept(flags)),
        ("Evaluations", f"{len(course.evaluations):,}", f"of {', '.join(plan.validation_splits())}"),
    ]
    inside = (
        f'<div><dt>{text(a)}</dt><dd class="figure">{text(b)}</dd><dd class="below">{text(c)}</dd></div>'
        for a, b, c in tiles
    )
    return f'<dl class="headline">{"".join(inside)}</dl>'


def kept(flags: Any) -> str:
    """How many checkpoints stay."""
    return "all are kept" if flags.save.keep_last is None else f"the last {flags.save.keep_last} are kept, and the best"


def due_rows(course: Any) -> list[tuple[str, str, str]]:
    """(what, how often, after which steps) of what is due."""
    found = [("Evaluation", course.evaluations), ("Checkpoint", course.saves)]
    rows = []
    for name, steps in found:
        words = ", ".join(f"{step:,}" for step in (steps if len(steps) <= 12 else [*steps[:6], *steps[-3:]]))
        rows.append((name, f"{len(steps):,}", words + " (the first and the last)" * (len(steps) > 12)))
    for step, shares in course.stages[1:]:
        rows.append(("Stage", "1", f"{step:,}: {', '.join(f'{n} {100 * s:.3g} %' for n, s in shares.items())}"))
    return [row for row in rows if row[1] != "0"]


def data_table(plan: Any, course: Any) -> tuple[list[str], list[list[str]]]:
    """(head, rows): what is read of each dataset by the end."""
    from fabric_llm.report.summary import large, number

    head = ["Dataset", "Share of the tokens", "Tokens read", "Epochs", "Sequences", "Folder"]
    if plan.mixture is None:
        rows, epochs = len(plan.dataset.train), course.last.position / len(plan.dataset.train)
        return head, [
            ["training", "100 %", large(course.last.tokens), f"{epochs:.2f}", number(rows), str(plan.dataset.folder)]
        ]
    read = plan.mixture.read_before(course.last.position)
    whole = sum(one["tokens"] for one in read.values())
    found = []
    for name, one in read.items():
        source = plan.sources[name]
        share, tokens = f"{100 * one['tokens'] / whole:.3g} %", large(one["tokens"])
        found.append([name, share, tokens, f"{one['epochs']:.2f}", number(len(source.train)), str(source.folder)])
    return head, found


if __name__ == "__main__":
    plain_output()
    sys.exit(main())
