"""`python -m fabric_llm.preview FLAGS` draws the run that `train.py FLAGS` would make: one HTML file, without training.

No weights are loaded. Flags, data and model are checked as train.py checks them, with its sentences.
Exit codes: 0 written, 2 bad arguments, or those of docs/faults.md that a start of the run would end with.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from typing import Any, Optional

from fabric_llm.base.faults import Fault
from fabric_llm.base.program import in_one_sentence, plain_output
from fabric_llm.checkpoint.keep import Progress
from fabric_llm.plan import checks
from fabric_llm.prepare.demo import prepare_demo
from fabric_llm.report.__main__ import page_module, require_output
from fabric_llm.training.schedule import arguments_of, lr_at

# What takes time to import is imported in the functions below: --help and mistakes in flags are answered at once.

USAGE = "python -m fabric_llm.preview [--output preview.html] FLAGS OF train.py"
DESCRIPTION = """Draw the run that train.py would make with these flags: learning rate, the share of each source and its epochs,
checkpoints and evaluations over steps or tokens. Nothing is trained, and no weights are loaded."""


def main(argv: Optional[list[str]] = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(usage=USAGE, description=DESCRIPTION, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--output", default="preview.html", help="the file to write (default: preview.html)")
    with in_one_sentence("fabric_llm.preview"):
        try:
            given, words = parser.parse_known_args(argv)
        except argparse.ArgumentError:
            raise Fault("--output takes the file to write, and nothing is given.") from None
        require_output(Path(given.output))
        root = Path(__file__).resolve().parents[1]  # arguments.py, which declares the flags, is beside the package
        if not (root / "arguments.py").is_file():
            raise Fault(
                f"There is no arguments.py in {str(root)!r}: the command runs from a checkout, as train.py does."
            )
        sys.path.insert(0, str(root))
        flags = importlib.import_module("arguments").parse_train(words)
        checks.check_training(flags)
        page_module()
        from fabric_llm.plan import make_plan, run_directory, start, warnings

        if flags.demo:
            prepare_demo(Path(flags.data.train_data_dir), flags.data.context_length)
        directory = run_directory.directory(flags)
        # As rank 0 of the run makes it.
        plan = make_plan.make_plan(flags, start.place(flags), directory, run_directory.choose(flags, directory))
        draw(flags, plan, list(warnings.warnings_of(flags, plan)), Path(given.output))
    return 0


def course(plan: Any, flags: Any) -> tuple[list[dict[str, Any]], list[tuple[int, str, str]], Progress]:
    """(the lines that the run will log, (step, kind, words) of what happens, where it ends), by the run's own functions."""
    from fabric_llm.run import save

    lines, happens, progress, shares = [], [], plan.start, None
    has_sets = flags.evaluation.eval_iters > 0
    if has_sets and save.evaluates_first(plan):
        happens.append((progress.step, "evaluated", ""))
    while not plan.is_over(progress):
        before, progress = progress, plan.after(progress)
        lr = lr_at(before.step, max_step=plan.schedule.max_step, **arguments_of(vars(flags.training)))
        lines.append({"step": progress.step, "tokens": progress.tokens, "lr": lr})
        if plan.data.mixture is not None:
            last_shares, shares = shares, plan.data.mixture.shares_at(before.position)
            if last_shares not in (None, shares):
                words = ", ".join(f"{name} {100 * share:.3g} %" for name, share in shares.items())
                happens.append((before.step, "stage", words))
            read = plan.data.mixture.read_before(progress.position)
            lines[-1]["sources"] = {name: {**one, "share": shares.get(name, 0.0)} for name, one in read.items()}
        _, evaluates, saves = save.due_after(before, progress, plan, flags)
        if has_sets and evaluates:
            happens.append((progress.step, "evaluated", ""))
        if saves:
            happens.append((progress.step, "saved", ""))
    return lines, happens, progress


def draw(flags: Any, plan: Any, warnings: list[str], output: Path) -> None:
    """Write the page. Raises Fault (2) where it can't be written."""
    from fabric_llm.report import figures, page, reading

    lines, happens, last = course(plan, flags)
    run = reading.Run(plan.run_directory.name, plan.run_directory)
    reading.fill(run, lines)
    lr, start = run.number("lr").values, plan.start
    contexts = " or ".join(f"{context:,}" for context in plan.contexts)
    batch = f"{plan.schedule.global_batch_size:,} sequences of {contexts} a step"
    names = {"stage": "Stage", "evaluated": "Evaluation", "saved": "Checkpoint"}
    counts = {kind: [event[1] for event in happens].count(kind) for kind in names}
    shares = figures.Figure("sources_share", "Share of each source", "of the sequences", style="steps")
    known = {figure.name: figure for figure in figures.FIGURES}
    # What is read of each dataset by the end of the run.
    epochs = last.position / len(plan.data.dataset.train) if plan.data.mixture is None else None
    read = lines[-1].get("sources") or {"training": {"tokens": last.tokens, "epochs": epochs}}
    datasets = plan.data.sources or {"training": plan.data.dataset}
    whole, rows = sum(one["tokens"] for one in read.values()), []
    for name, one in read.items():
        share, sequences = f"{100 * one['tokens'] / whole:.3g} %", page.number(len(datasets[name].train))
        epochs, folder = f"{one['epochs']:.2f}", str(datasets[name].folder)
        rows.append([name, share, page.number(one["tokens"]), epochs, sequences, folder])
    begins = f"resumed from {plan.resume_from}" if plan.resume_from else plan.model.source
    data = ", ".join(plan.data.sources) or flags.data.train_data_dir
    on = f"{plan.placement.strategy} on {plan.placement.world_size} {plan.placement.kind}"
    shown = {
        "name": run.name,
        "facts": {},
        "data": (["Dataset", "Share of the tokens", "Tokens read", "Epochs", "Sequences", "Folder"], rows),
        "flags": {name: page.shown(value) for name, value in flags.flat().items()},
    }
    page.write_page(
        output,
        "Preview of a run",
        run.name,
        f"{begins} on {data}; {plan.model.precision}; {on}",
        {"setup": "Data", "curves": "Curves", "events": "What is due", "flags": "Flags"},
        "Nothing was trained.",
        charts=figures.charts([known["lr"], shares, known["sources_epochs"]], [run]),
        strip=figures.strip([run], [[reading.Event(*event) for event in sorted(happens)]]),
        runs=[shown],
        headline=[
            ("Steps", f"{last.step - start.step:,}", f"from {start.step:,} to {last.step:,}"),
            ("Tokens", page.number(last.tokens - start.tokens), batch),
            ("Peak learning rate", f"{lr.max():.3g}", f"{lr[-1]:.3g} at the last step"),
        ],
        problems=warnings,
        events=(["What", "How often"], [[names[kind], f"{count:,}"] for kind, count in counts.items() if count]),
        differing=None,
    )


if __name__ == "__main__":
    plain_output()
    sys.exit(main())
