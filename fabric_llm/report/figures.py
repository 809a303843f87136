"""Runs -> the figures of the report, as plotly's traces and layouts.

A line keeps few enough points for a page to stay small, its extremes among them. One run is drawn
over its steps, and several over tokens, because their steps may be of other sizes.
"""

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from plotly import graph_objects as go

from fabric_llm.report.reading import UNMARKED, Run, Series

MAX_POINTS = 1000  # of a line
FEW_POINTS = 60  # are shown each
TREND_FROM_POINTS = 100  # shorter lines have no trend
MAX_MARKED = 40  # events of a run, by upright lines, and parts of it that were undone


class Figure(NamedTuple):
    """A number of a run: a line for each set or source."""

    name: str
    title: str
    unit: str = ""
    note: str = ""
    style: str = "line"  # of STYLES
    has_trend: bool = False
    yaxis: Mapping[str, Any] = {}  # plotly's layout of it


BY_POSITION = (
    "Of tokens with so many and more before them, up to twice as many: lower where the "
    "model uses what it sees."
)
PROBES = (
    "The loss on the second occurrence of a random passage, or of the value behind a key: "
    "low where a model uses its context."
)
RETRIEVAL = (
    "Tokens of a value that are the most likely ones behind its key, which stood before "
    "in a text of so many tokens."
)
FORGETTING = "Forgetting: loss minus its value before step 1"
FIGURES = (
    Figure("eval_loss", "Validation loss", "nats a token"),
    Figure("loss", "Training loss", "nats a token", has_trend=True),
    Figure(
        "forgetting",
        FORGETTING,
        "nats a token",
        "Below 0 a set was learned.",
        yaxis={"zeroline": True},
    ),
    Figure("share", "Shares of the sources", "fraction of the tokens"),
    Figure("eval_bits_per_byte", "Bits per byte of validation text", "bits"),
    Figure(
        "by_position", "Validation loss by position in the document", "nats a token", BY_POSITION
    ),
    Figure("copy", "Copying and finding what is in the context", "nats a token", PROBES),
    Figure("retrieval", "Finding what stood far before", "of the tokens", RETRIEVAL),
    Figure(
        "tasks",
        "Accuracy in tasks",
        "of the documents",
        "The choice of the largest likelihood is a right one.",
    ),
    Figure("sources_share", "Share of each source", "of the sequences", style="steps"),  # of a plan
    Figure("sources_epochs", "How often each source is read", "epochs"),
    Figure("lr", "Learning rate"),
    Figure("grad_norm", "Gradient norm, before clipping", has_trend=True, yaxis={"type": "log"}),
    Figure("tokens_per_second", "Tokens per second, all devices", "tokens/s", has_trend=True),
    Figure("mfu", "Model FLOPs utilisation", "of the device's peak", has_trend=True),
    Figure(
        "model_tflops_per_device", "Operations of the model, of a device", "TFLOP/s", has_trend=True
    ),
    Figure("peak_memory_gib", "Peak memory of rank 0", "GiB"),
    Figure(
        "updated_fraction", "Share of weights that a step changes", "of the weights", has_trend=True
    ),
    Figure("update_ratio", "Size of a step's change", "of the weights' norm", has_trend=True),
    Figure("data_seconds", "Waiting of rank 0 for data", "seconds a step", has_trend=True),
    Figure(
        "wait_seconds",
        "Waiting of rank 0 for the device and other ranks",
        "seconds a step",
        has_trend=True,
    ),
    Figure("aux_loss", "Auxiliary loss of the routers"),
)
# Numbers of the log without a figure of their own: axes, or what another figure shows.
NOT_DRAWN = {"tokens", "position", "tokens_per_second_per_device", "eval_loss_ema"}


def figures(runs: Sequence[Run]) -> list[Figure]:
    """The figures of the page in their order; a number that they don't know has one of its own
    behind them."""
    known = NOT_DRAWN.union(figure.name for figure in FIGURES)
    others: set[str] = set()
    for run in runs:
        for name, named in run.numbers.items():
            if "" in named and name not in known:
                others.add(name)
    return [*FIGURES, *(Figure(name, name.replace("_", " ")) for name in sorted(others))]


# ------------------------------------------------------------------------------- as plotly has them

# One for each run, or for each set of a single run.
COLORS = ("#1457a8", "#c2500a", "#1b7a4b", "#8a3ea8", "#b3275f", "#0f7f8c", "#7a5c00", "#545a66")
GREY = 7  # the index of the colour for events of a single run
INK, MUTED, PALE = "#1d1f23", "#5b616b", "#e3e1dc"  # as in page.html
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
STYLES: dict[str, dict[str, Any]] = {
    "line": {"line": {"width": 2}, "marker": {"size": 5}},
    "steps": {"line": {"width": 2, "shape": "vh"}},  # what held up to a step
    "raw": {"line": {"width": 1}, "opacity": 0.38, "showlegend": False},  # with a trend over it
    "trend": {"line": {"width": 2.2}, "hoverinfo": "skip"},
    "undone": {"line": {"width": 1.4}, "opacity": 0.55, "showlegend": False, "hoverinfo": "skip"},
}


def template() -> dict[str, Any]:
    """The look of all figures."""
    small = {"color": MUTED, "size": 12}
    axis = {
        "gridcolor": PALE,
        "zeroline": False,
        "zerolinecolor": MUTED,
        "zerolinewidth": 1,
        "tickfont": small,
        "automargin": True,
        "separatethousands": True,
        "title": {"font": small, "standoff": 8},
    }
    layout = {
        "colorway": COLORS,
        "font": {"family": "inherit", "color": INK, "size": 12},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "margin": {"l": 48, "r": 10, "t": 6, "b": 40},
        "hovermode": "x unified",
        "hoverlabel": {"bgcolor": "white", "bordercolor": PALE, "namelength": -1},
        "legend": {
            "orientation": "h",
            "x": 0,
            "y": 1.02,
            "yanchor": "bottom",
            "font": small,
            "traceorder": "normal",
        },
        "xaxis": {**axis, "nticks": 7, "exponentformat": "SI", "rangemode": "tozero"},
        "yaxis": {**axis, "nticks": 6, "exponentformat": "power", "hoverformat": ".5~g"},
    }
    return go.layout.Template(layout=layout).to_plotly_json()


# "name", "title", "unit" and "note" of a figure, its "traces", "undone" ones below, and "layout"
Chart = dict[str, Any]
Shape = dict[str, Any]  # of plotly


def charts(figures: Sequence[Figure], runs: Sequence[Run]) -> list[Chart]:
    """The figures that have a line, drawn. A set or source has the same dash in all of them, and
    the same colour if there is only one run."""
    sets: dict[str, int] = {}  # numbered as they come
    over = "Tokens" if len(runs) > 1 else "Step"
    drawn = []
    for figure in figures:
        traces, undone = [], []
        for i, run in enumerate(runs):
            for name, style, series in _lines(figure, run):
                number = sets.setdefault(name, len(sets)) if name else 0
                trace = _trace(runs, i, number, name, style, series)
                if style == "undone":
                    undone.append(trace)
                else:
                    traces.append(trace)
        if traces:
            drawn.append(_chart(figure, traces, undone, over))
    return drawn


def _trace(
    runs: Sequence[Run], i: int, number: int, name: str, style: str, series: Series
) -> dict[str, Any]:
    """A line of run `i`, of the set or source `name`, which is the one of that number."""
    is_one, is_undone = len(runs) == 1, style == "undone"
    # A single run needs no name in the legend.
    words = [] if is_one else [runs[i].name]
    if name:
        words.append(name)
    label = html.escape(" · ".join(words))  # plotly reads some tags in names
    steps, values = thinned(series)
    # Six digits keep the page small. What is no number, a gap, is none in JSON.
    y = [float(f"{value:.6g}") if math.isfinite(value) else None for value in values.tolist()]
    # A point alone has no line, and few points are shown each.
    has_markers = len(steps) <= (1 if is_undone else FEW_POINTS)
    # Colours tell sets of a single run apart, and else the runs, whose sets have dashes.
    color = number if is_one else i
    trace = go.Scatter(
        STYLES[style],
        x=_places(runs, i, steps),
        y=y,
        mode="lines+markers" if has_markers else "lines",
        name=label,
        legendgroup=label,
        line_color=COLORS[color % len(COLORS)],
        line_dash="dot" if is_undone else DASHES[number % len(DASHES)],
    )
    return trace.to_plotly_json()


def _chart(figure: Figure, traces: list[Any], undone: list[Any], over: str) -> Chart:
    yaxis = {**figure.yaxis}
    values = {y for trace in (*undone, *traces) for y in trace["y"]} - {None}
    if len(values) == 1:
        # plotly would draw a constant between itself -1 and +1.
        yaxis.setdefault("rangemode", "tozero")
    # A legend with one name says nothing.
    is_named = len({trace["name"] for trace in traces}) > 1
    layout = {"xaxis": {"title": {"text": over}}, "yaxis": yaxis, "showlegend": is_named}
    return {**figure._asdict(), "traces": traces, "undone": undone, "layout": layout}


def _lines(figure: Figure, run: Run) -> Iterable[tuple[str, str, Series]]:
    """(set or source or "", style, series) of each line of a run, with their trends."""
    for name, series in run.numbers.get(figure.name, {}).items():
        has_trend = figure.has_trend and len(series.steps) >= TREND_FROM_POINTS
        # The trend is drawn over the points that it follows.
        yield name, "raw" if has_trend else figure.style, series
        if has_trend:
            yield name, "trend", trend(series)
    # The last ones, since a run may go back very often.
    for undone in run.undone[-MAX_MARKED:]:
        for name, series in undone.numbers.get(figure.name, {}).items():
            yield name, "undone", series


def _places(runs: Sequence[Run], i: int, steps: np.ndarray) -> list[int]:
    """Where steps of run `i` are on the axis of all runs."""
    return runs[i].tokens_at(steps) if len(runs) > 1 else steps.tolist()


def trend(series: Series) -> Series:
    """Exponentially weighted mean of the points so far; a weight halves within 1 % of the points.
    Gaps are passed over."""
    means = pd.Series(series.values).ewm(halflife=len(series.steps) / 100, ignore_na=True).mean()
    return Series(series.steps, means.to_numpy())


def thinned(series: Series) -> Series:
    """At most `MAX_POINTS`: the first, the last, and the lowest and highest of each of equally many
    points between.

    A number that is missing, such as the loss of a step that was skipped, stays as a gap.
    """
    count = len(series.steps)
    if count <= MAX_POINTS:
        return series
    # Gaps may take a tenth of the points, so that they don't displace the line.
    keep = {0, count - 1, *np.flatnonzero(np.isnan(series.values))[: MAX_POINTS // 10].tolist()}
    # Two points of each part: a plain sample would miss spikes.
    for part in np.array_split(np.arange(count), (MAX_POINTS - len(keep)) // 2):
        values = series.values[part]
        # A part that is all gap has no extremes.
        if not np.isnan(values).all():
            keep |= {int(part[np.nanargmin(values)]), int(part[np.nanargmax(values)])}
    index = sorted(keep)
    return Series(series.steps[index], series.values[index])


def marks(runs: Sequence[Run]) -> list[Shape]:
    """Upright lines in all figures over steps or tokens: where something happened that isn't of
    UNMARKED."""
    shapes = []
    for i, run in enumerate(runs):
        # Events have the colour of their run. Colours of a single run are those of its sets, hence
        # grey.
        color = COLORS[GREY]
        if len(runs) > 1:
            color = COLORS[i % len(COLORS)]
        steps = [event.step for event in run.timeline if event.kind not in UNMARKED][:MAX_MARKED]
        for place in _places(runs, i, np.array(steps, dtype=np.int64)):
            shapes.append(upright(place, color))
    return shapes


def upright(place: float, color: str, **more: Any) -> Shape:
    """A dotted line over the height of a figure, as a shape of plotly."""
    line = {"color": color, "width": 1, "dash": "dot"}
    return {
        "type": "line",
        "x0": place,
        "x1": place,
        "y0": 0,
        "y1": 1,
        "yref": "paper",
        "line": line,
        **more,
    }


def bars(
    parts: dict[str, int],
    device_bytes: int | None,
    limits: Sequence[float],
    unit: str,
    size: int,
) -> Chart:
    """One bar of a device's memory by its parts, and upright lines at what the device has, and at
    the fractions of that in `limits`. unit: of the axis, which has so many bytes."""
    bar = {"y": ["At the peak"], "orientation": "h", "hovertemplate": f"%{{x:,.2f}} {unit}"}
    # One trace for each part, which plotly stacks into one bar.
    traces, lines = [], []
    for name, held in parts.items():
        traces.append(go.Bar(bar, x=[held / size], name=name).to_plotly_json())
    if device_bytes:
        for fraction in (*limits, 1.0):
            label = {"text": f"{100 * fraction:.0f} % ", "textangle": 0}
            label |= {"textposition": "end", "xanchor": "right"}
            lines.append(upright(fraction * device_bytes / size, MUTED, label=label))
    layout = {
        "barmode": "stack",
        "hovermode": "closest",
        "showlegend": True,
        "shapes": lines,
        "xaxis": {"title": {"text": unit}, "rangemode": "tozero"},
    }
    return {"name": "memory", "traces": traces, "layout": layout}
