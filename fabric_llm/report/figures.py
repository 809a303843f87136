"""Runs -> the figures of the report, as plotly's traces and layouts.

A line keeps few enough points for a page to stay small, its extremes among them. Traces have steps as x and tokens as
customdata, and say in `meta` what page.html needs: their run, and their colours by number, which are others in the dark.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Optional

import numpy as np
from plotly import graph_objects as go

from fabric_llm.report.reading import Run, Series
from fabric_llm.report.timeline import Event, Kind

MOST_POINTS, FEWEST_POINTS = 2000, 60  # of a line
MOST_POINTS_OF_ALL = 90_000  # of all lines: 2.5 MB
TREND_FROM_POINTS = 100  # shorter lines have no trend
DIGITS = 6
MOST_CHARACTERS = 300  # of the words of an event on the time line
MOST_UPRIGHT = 40  # lines that mark events, of a run


class Line(NamedTuple):
    """A line of a figure. name: the set, source or the like that it is of, "" where the figure has one line a run."""

    name: str
    series: Series
    style: str  # of STYLES


class Figure(NamedTuple):
    """A number of a run, drawn over steps or tokens: a line for each set or source."""

    name: str
    title: str
    unit: str = ""
    note: str = ""
    style: str = "line"  # of STYLES
    has_trend: bool = False
    is_log: bool = False  # where all values are positive
    is_minor: bool = False  # goes below the others


COPYING = "The loss on the second occurrence of a repeated random passage: low where the model copies from its context."
FORGETTING = "Above 0 a set was forgotten, below 0 it was learned."
FIGURES = (
    Figure("eval_loss", "Validation loss", "nats a token", style="points"),
    Figure("loss", "Training loss", "nats a token", has_trend=True),
    Figure("eval_forgotten", "Forgetting: loss minus its value before step 1", "nats a token", FORGETTING, "points"),
    Figure("eval_bits_per_byte", "Bits per byte of validation text", "bits", style="points"),
    Figure("copy", "Copying from context", "nats a token", COPYING, "points"),
    Figure("drift", "Distance of the weights from the base", "of their norm", style="points"),
    Figure("sources_epochs", "How often each source is read", "epochs"),
    Figure("lr", "Learning rate"),
    Figure("grad_norm", "Gradient norm, before clipping", has_trend=True, is_log=True),
    Figure("tokens_per_second", "Tokens per second, all devices", "tokens/s", has_trend=True),
    Figure("mfu", "Model FLOPs utilisation", "of the device's peak", has_trend=True),
    Figure("peak_memory_gib", "Peak memory of rank 0", "GiB"),
    Figure("updated_fraction", "Share of weights that a step changes", "of the weights", has_trend=True),
    Figure("waiting", "Waiting of rank 0 in a step", "seconds", has_trend=True),
    Figure("aux_loss", "Auxiliary loss of the routers"),
)
NOT_DRAWN = {"tokens", "tokens_per_second_per_device", "eval_loss_ema"}


def figures(runs: Sequence[Run]) -> list[Figure]:
    """The figures of the page in their order; a number that they don't know has one of its own below them."""
    known = NOT_DRAWN.union(figure.name for figure in FIGURES)
    others = sorted({name for run in runs for name, named in run.numbers.items() if "" in named} - known)
    return [*FIGURES, *(Figure(name, name.replace("_", " "), is_minor=True) for name in others)]


# ------------------------------------------------------------------------------- as plotly has them

COLORS = {  # name of a CSS variable: (in the light, in the dark)
    "page": ("#fbfaf8", "#15171b"),
    "surface": ("#ffffff", "#1c1f24"),
    "ink": ("#1d1f23", "#e9e7e2"),
    "muted": ("#5b616b", "#a3a8b2"),
    "line": ("#e3e1dc", "#31353c"),
    "grid": ("#ebe9e4", "#2a2e35"),
    "accent": ("#1457a8", "#8ab8f5"),
    "good": ("#1a6b3c", "#7fd3a0"),
    "good-page": ("#e6f3ea", "#1c3227"),
    "bad": ("#a8231f", "#ff9d94"),
    "bad-page": ("#fbeae8", "#3d2221"),
    "wait": ("#805500", "#f0c268"),
    "wait-page": ("#fbf1dc", "#3a301a"),
    "c0": ("#1457a8", "#7db3f7"),  # c0 to c7 are those of runs, sets and events
    "c1": ("#c2500a", "#f79a5c"),
    "c2": ("#1b7a4b", "#66cf98"),
    "c3": ("#8a3ea8", "#cf9aec"),
    "c4": ("#b3275f", "#f58bb0"),
    "c5": ("#0f7f8c", "#5fcbd8"),
    "c6": ("#7a5c00", "#dcbf5a"),
    "c7": ("#545a66", "#b3b9c4"),
}
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif"
STYLES: dict[str, dict[str, Any]] = {
    "line": {"mode": "lines", "line": {"width": 2}},
    "points": {"mode": "lines+markers", "line": {"width": 2}, "marker": {"size": 5}},  # measured now and then
    "steps": {"mode": "lines", "line": {"width": 2, "shape": "vh"}},  # what held up to a step
    "raw": {"mode": "lines", "line": {"width": 1}, "opacity": 0.38},  # with a trend over it
    "trend": {"mode": "lines", "line": {"width": 2.2}, "hoverinfo": "skip"},
    "budget": {
        "mode": "lines+text",
        "textposition": "top left",
        "cliponaxis": False,
        "line": {"width": 1, "shape": "hv"},
        "opacity": 0.85,
    },
    "discarded": {"mode": "lines+markers", "line": {"width": 1}, "marker": {"size": 3}, "opacity": 0.55},
}
OTHER_KINDS = 7  # the colour of events without an upright line
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")


def template(is_dark: bool) -> dict[str, Any]:
    """The look of all figures, in the light or in the dark."""
    color = {name: both[is_dark] for name, both in COLORS.items()}
    small = {"color": color["muted"], "size": 12}
    axis = {
        "gridcolor": color["grid"],
        "linecolor": color["line"],
        "zeroline": False,
        "zerolinecolor": color["muted"],
        "zerolinewidth": 1,
        "automargin": True,
        "tickfont": small,
        "separatethousands": True,
    }
    layout = {
        "colorway": [color[f"c{i}"] for i in range(8)],
        "font": {"family": FONT, "color": color["ink"], "size": 12},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "margin": {"l": 48, "r": 10, "t": 6, "b": 40},
        "hovermode": "x unified",
        "hoverlabel": {"bgcolor": color["surface"], "bordercolor": color["line"], "namelength": -1},
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "font": small},
        "xaxis": {**axis, "nticks": 7, "exponentformat": "SI", "title": {"font": small, "standoff": 8}},
        "yaxis": {**axis, "nticks": 6, "exponentformat": "power"},
    }
    trace = go.Scatter(hovertemplate="%{y:.5~g}<extra>%{meta.name}</extra>")
    return go.layout.Template(layout=layout, data={"scatter": [trace]}).to_plotly_json()


class Chart(NamedTuple):
    """A figure of some runs, drawn."""

    figure: Figure
    traces: list[dict[str, Any]]
    layout: dict[str, Any]


def charts(found: Sequence[Figure], runs: Sequence[Run]) -> list[Chart]:
    """The figures that have a line, drawn. A set, or a source, has one dash in all of them, and of a single run one colour."""
    lines = [[(i, line) for i, run in enumerate(runs) for line in _lines(figure, run)] for figure in found]
    every = [line for of_figure in lines for _, line in of_figure]
    sets = list(dict.fromkeys(line.name for line in every if line.name))
    most = min(MOST_POINTS, max(FEWEST_POINTS, MOST_POINTS_OF_ALL // max(len(every), 1)))
    return [_chart(figure, of_figure, runs, sets, most) for figure, of_figure in zip(found, lines) if of_figure]


def _lines(figure: Figure, run: Run) -> Iterable[Line]:
    """The lines of a run with their trends, and those of work that was undone, each as one line with gaps."""
    budgets = run.numbers.get("eval_budget", {}) if figure.name == "eval_forgotten" else {}
    for name, series in run.numbers.get(figure.name, {}).items():
        has_trend = figure.has_trend and len(series.steps) >= TREND_FROM_POINTS
        yield Line(name, series, "raw" if has_trend else figure.style)
        if has_trend:
            yield Line(name, trend(series), "trend")
        if name in budgets:
            yield Line(name, budgets[name], "budget")
    undone: dict[str, list[Series]] = {}
    for part in run.discarded:
        for name, series in part.numbers.get(figure.name, {}).items():
            undone.setdefault(name, []).append(series)
    for name, parts in undone.items():
        steps = np.concatenate([np.append(part.steps, part.steps[-1]) for part in parts])
        yield Line(
            name, Series(steps, np.concatenate([np.append(part.values, math.nan) for part in parts])), "discarded"
        )


def trend(series: Series) -> Series:
    """Exponentially weighted mean of the points so far; a weight halves within 1 % of the points. Gaps are passed over."""
    decay = 0.5 ** (100 / len(series.steps))
    means, total, weight = [], 0.0, 0.0
    for value in series.values.tolist():
        if math.isfinite(value):
            total, weight = decay * total + value, decay * weight + 1
        means.append(total / weight if weight else math.nan)
    return Series(series.steps, np.array(means))


def _chart(
    figure: Figure, lines: Sequence[tuple[int, Line]], runs: Sequence[Run], sets: Sequence[str], most: int
) -> Chart:
    traces = [_trace(line, i, runs, sets, most) for i, line in lines]
    first = {trace.legendgroup: trace for trace in reversed(traces) if trace.meta["style"] != "raw"}
    for trace in first.values():
        trace.showlegend = len(first) > 1  # one entry for a set, of whatever run and style its lines are
    layout = go.Layout(yaxis=_yaxis(figure, lines))
    return Chart(figure, [trace.to_plotly_json() for trace in traces], layout.to_plotly_json())


def _yaxis(figure: Figure, lines: Sequence[tuple[int, Line]]) -> dict[str, Any]:
    """What was discarded, such as a spike, gets no more than half of the others' room."""
    values = np.concatenate([line.series.values for _, line in lines if line.style != "discarded"] or [[]])
    values = values[np.isfinite(values)]
    if not len(values):
        return {}
    low, high = float(values.min()), float(values.max())
    if figure.is_log and low > 0:
        return {"type": "log"}
    room = (high - low) / 2 or 1
    limits = {"clipmin": low - room, "clipmax": high + room}
    tickformat = "," if 1000 <= high < 1e7 else None
    return {"tickformat": tickformat, "autorangeoptions": limits, "zeroline": figure.name == "eval_forgotten"}


def _trace(line: Line, i: int, runs: Sequence[Run], sets: Sequence[str], most: int) -> go.Scatter:
    """A line of run number `i`. plotly reads some tags in names, so those of runs and sets are escaped."""
    steps, values = thinned(line.series, most)
    number = sets.index(line.name) if line.name else 0
    is_one_of_many = len(runs) > 1
    is_special = line.style in ("budget", "discarded")
    names = [runs[i].name * is_one_of_many, line.name, line.style * is_special]
    trace = go.Scatter(
        STYLES[line.style],
        x=steps.tolist(),
        customdata=_counts(runs[i].tokens_at(steps)),
        y=[rounded(value) for value in values.tolist()],
        name=html.escape(line.name),
        legendgroup=html.escape(line.name),
        showlegend=False,
        line_dash="dot" if line.style == "budget" else DASHES[number % len(DASHES)],
        meta={
            "run": i,
            "style": line.style,
            "name": html.escape(" · ".join(filter(None, names))),
            "colors": [i if is_one_of_many else number],
        },
    )
    if line.style == "budget":
        trace.text = [*[""] * (len(steps) - 1), f"budget {trace.y[-1]}"]
    elif len(steps) == 1:
        trace.mode = "lines+markers"
    return trace


def strip(runs: Sequence[Run], events: Sequence[Sequence[Event]], kinds: Mapping[str, Kind]) -> Chart:
    """The time line: the events of each run, by kind."""
    several, traces = len(runs) > 1, []
    for i, (run, of_run) in enumerate(zip(runs, events)):
        steps = np.array([event.step for event in of_run], dtype=np.int64)
        colors = [kinds[event.kind].color for event in of_run]
        trace = go.Scatter(
            mode="markers",
            x=steps.tolist(),
            customdata=_counts(run.tokens_at(steps)),
            y=[kinds[event.kind].title for event in of_run],
            text=[html.escape(event.words[:MOST_CHARACTERS]) for event in of_run],
            hovertemplate="%{y}, %{xaxis.title.text} %{x:,}<br>%{text}<extra>%{meta.name}</extra>",
            marker={"size": 11},
            opacity=0.8,  # events of several runs may lie on each other
            cliponaxis=False,
            showlegend=False,
            meta={
                "run": i,
                "name": html.escape(run.name) if several else "",
                "colors": [i if several else OTHER_KINDS if color is None else color for color in colors],
                "upright": [j for j, color in enumerate(colors) if color is not None][:MOST_UPRIGHT],
            },
        )
        traces.append(trace.to_plotly_json())
    seen = [
        kind.title for name, kind in kinds.items() if any(event.kind == name for of_run in events for event in of_run)
    ]
    axis = {"type": "category", "categoryarray": seen[::-1], "range": [-0.6, len(seen) - 0.4], "nticks": 0}
    return Chart(Figure("events", "Events"), traces, go.Layout(hovermode="closest", yaxis=axis).to_plotly_json())


# ------------------------------------------------------------------------------- points


def thinned(series: Series, most: int) -> Series:
    """At most `most` points: the first, the last, and the lowest and highest of each of equally many points between.

    A number that is missing, such as the loss of a step that was skipped, stays as a gap.
    """
    count = len(series.steps)
    if count <= most:
        return series
    finite = np.isfinite(series.values)
    keep = {0, count - 1, *np.flatnonzero(~finite)[: most // 10].tolist()}
    edges = np.linspace(0, count, max(1, (most - len(keep)) // 2) + 1).astype(np.int64)
    low, high = np.where(finite, series.values, np.inf), np.where(finite, series.values, -np.inf)
    for start, end in zip(edges[:-1].tolist(), edges[1:].tolist()):
        if finite[start:end].any():
            keep |= {start + int(low[start:end].argmin()), start + int(high[start:end].argmax())}
    index = np.array(sorted(keep))
    return Series(series.steps[index], series.values[index])


def rounded(value: float) -> Optional[float]:
    """To DIGITS significant digits; None, a gap, where there is no number."""
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None


def _counts(values: np.ndarray) -> list[Optional[int]]:
    return [int(value) if math.isfinite(value) else None for value in values.tolist()]
