"""The line from a base model to a run (verify/line.py), as a page: how far the losses of its points are above the base model's."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fabric_llm.report import figures, page
from fabric_llm.report.reading import Run, Series
from fabric_llm.verify.line import Found

FILE = "average.html"  # beside average.json


def write(folder: Path, found: Found, base: str, run: str) -> None:
    """Write FILE. Raises Fault (2) where it can't be written."""
    shares, rises = np.array(list(found.points)), [found.guard.rises(losses) for losses in found.points.values()]
    lines = {name: Series(shares, np.array([rise[name] for rise in rises])) for name in rises[0]}
    figure = figures.Figure("line", "Loss minus the base model's", "nats a token", "Dotted: the choice, and budgets.")
    [chart] = figures.charts([figure], [Run("", folder, numbers={"line": lines})])
    budgets = [
        {**figures.upright(0, figures.MUTED), "x1": 1, "y0": most, "y1": most, "yref": "y"}
        for most in found.guard.budgets.values()
    ]
    chart["layout"]["xaxis"] = {"title": {"text": "Part of the way from the base model to the run"}}
    chart["layout"]["shapes"] = [figures.upright(found.share, figures.INK), *budgets]
    headline = [("Chosen", f"{found.share:.3f}", str(found))]
    page.write_page(
        folder / FILE,
        "Line between two models",
        f"{base} to {run}",
        f"evaluated as in {found.run}",
        {"curves": "Along the line"},
        f"of {len(found.points)} evaluations",
        charts=[chart],
        runs=[{"headline": headline, "flags": {}}],
    )
