"""The line from a base model to a run (weights/line.py) as a page: how far the losses of its points
are above the base model's."""

import json
from pathlib import Path

import numpy as np

from fabric_llm.report import figures, page
from fabric_llm.report.reading import Run, Series

FILE = "average.html"  # beside the note that the average has written
LINE = figures.Figure(
    "line", "Loss minus the base model's", "nats a token", "Dotted: what was chosen, and budgets."
)


def write(note: Path) -> None:
    """Draw the line in the note of an average, beside it. Raises Fault (2)."""
    average = json.loads(note.read_text())
    shares = np.array([point["weight_of_run"] for point in average["line"]])
    losses = [point["eval_loss"] for point in average["line"]]
    # The first point of the line is the base model, from which the others are measured.
    lines = {}
    for name, start in losses[0].items():
        lines[name] = Series(shares, np.array([one[name] - start for one in losses]))
    # A run whose steps are shares of the run's weights, so that the report's own drawing does for
    # it.
    [chart] = figures.charts([LINE], [Run("", note.parent, numbers={LINE.name: lines})])
    of_base, of_run = average["parts"]
    base, run, chosen = of_base["path"], of_run["path"], of_run["weight"]
    # The upright line of `figures`, laid flat at a height of the y axis.
    flat = {**figures.upright(0, figures.MUTED), "x1": 1, "yref": "y"}
    budgets = []
    for budget in average["forgetting_budget"].values():
        budgets.append({**flat, "y0": budget, "y1": budget})
    chart["layout"]["shapes"] = [figures.upright(chosen, figures.INK), *budgets]
    chart["layout"]["xaxis"] = {"title": {"text": "Share of the run"}}
    page.write_page(
        note.with_name(FILE),
        "Line between two models",
        f"from {note}",
        {"curves": "Along the line"},
        title=run,
        lead="",
        charts=[chart],
        runs=[{"headline": [("Share of the run", f"{chosen:.3f}", f"the rest is {base}")]}],
    )
