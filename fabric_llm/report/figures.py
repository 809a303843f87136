"""Runs -> the figures of the report, as plotly's traces and layouts.

A line keeps few enough points for a page to stay small, its extremes among them. Traces have steps as x and tokens as
customdata, and say in `meta` what page.html needs: their run, and the number of their colour, which is another in the dark.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from plotly import graph_objects as go

from fabric_llm.report.reading import KINDS, UNMARKED, Event, Run, Series

MOST_POINTS, FEWEST_POINTS = 2000, 60  # of a line
MOST_POINTS_OF_ALL = 90_000  # of all lines: 2.5 MB
TREND_FROM_POINTS = 100  # shorter lines have no trend
MOST_CHARACTERS = 300  # of the words of an event on the time line
MOST_MARKED = 40  # events of a run, by upright lines


class Figure(NamedTuple):
    """A number of a run, drawn over steps or tokens: a line for each set or source."""

    name: str
    title: str
    unit: str = ""
    note: str = ""
    style: str = "line"  # of STYLES
    has_trend: bool = False
    yaxis: Mapping[str, Any] = {}  # plotly's layout of it


COPYING = "The loss on the second occurrence of a repeated random passage: low where the model copies from its context."
FORGETTING = "Forgetting: loss minus its value before step 1"
FIGURES = (
    Figure("eval_loss", "Validation loss", "nats a token", style="points"),
    Figure("loss", "Training loss", "nats a token", has_trend=True),
    Figure(
        "eval_forgotten", FORGETTING, "nats a token", "Below 0 a set was learned.", "points", yaxis={"zeroline": True}
    ),
    Figure("eval_bits_per_byte", "Bits per byte of validation text", "bits", style="points"),
    Figure("copy", "Copying from context", "nats a token", COPYING, style="points"),
    Figure("drift", "Distance of the weights from the base", "of their norm", style="points"),
    Figure("sources_epochs", "How often each source is read", "epochs"),
    Figure("lr", "Learning rate"),
    Figure("grad_norm", "Gradient norm, before clipping", has_trend=True, yaxis={"type": "log"}),
    Figure(
        "tokens_per_second", "Tokens per second, all devices", "tokens/s", has_trend=True, yaxis={"tickformat": ","}
    ),
    Figure("mfu", "Model FLOPs utilisation", "of the device's peak", has_trend=True),
    Figure("peak_memory_gib", "Peak memory of rank 0", "GiB"),
    Figure("updated_fraction", "Share of weights that a step changes", "of the weights", has_trend=True),
    Figure("waiting", "Waiting of rank 0 in a step", "seconds", has_trend=True),
    Figure("aux_loss", "Auxiliary loss of the routers"),
)
NOT_DRAWN = {"tokens", "tokens_per_second_per_device", "eval_loss_ema"}


def figures(runs: Sequence[Run]) -> list[Figure]:
    """The figures of the page in their order; a number that they don't know has one of its own behind them."""
    known = NOT_DRAWN.union(figure.name for figure in FIGURES)
    others = sorted({name for run in runs for name, named in run.numbers.items() if "" in named} - known)
    return [*FIGURES, *(Figure(name, name.replace("_", " ")) for name in others)]


# ------------------------------------------------------------------------------- as plotly has them

COLORS_IN_THE_LIGHT = ("#1457a8", "#c2500a", "#1b7a4b", "#8a3ea8", "#b3275f", "#0f7f8c", "#7a5c00", "#545a66")
COLORS_IN_THE_DARK = ("#7db3f7", "#f79a5c", "#66cf98", "#cf9aec", "#f58bb0", "#5fcbd8", "#dcbf5a", "#b3b9c4")
GREY = 7  # of them: events of a single run
COLORS = {  # name of a CSS variable: (in the light, in the dark); c0 to c7 are those of runs and sets
    "page": ("#fbfaf8", "#15171b"),
    "surface": ("#ffffff", "#1c1f24"),
    "ink": ("#1d1f23", "#e9e7e2"),
    "muted": ("#5b616b", "#a3a8b2"),
    "line": ("#e3e1dc", "#31353c"),
    "good": ("#1a6b3c", "#7fd3a0"),
    "bad": ("#a8231f", "#ff9d94"),
    "wait": ("#805500", "#f0c268"),
    **{f"c{i}": both for i, both in enumerate(zip(COLORS_IN_THE_LIGHT, COLORS_IN_THE_DARK))},
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
    },
}
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")


def template(is_dark: bool) -> dict[str, Any]:
    """The look of all figures, in the light or in the dark."""
    color = {name: both[is_dark] for name, both in COLORS.items()}
    small = {"color": color["muted"], "size": 12}
    axis = {"gridcolor": color["line"], "zeroline": False, "zerolinecolor": color["muted"], "zerolinewidth": 1}
    axis |= {"automargin": True, "tickfont": small, "separatethousands": True}
    layout = {
        "colorway": COLORS_IN_THE_DARK if is_dark else COLORS_IN_THE_LIGHT,
        "font": {"family": FONT, "color": color["ink"], "size": 12},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "margin": {"l": 48, "r": 10, "t": 6, "b": 40},
        "hovermode": "x unified",
        "hoverlabel": {"bgcolor": color["surface"], "bordercolor": color["line"], "namelength": -1},
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "font": small, "traceorder": "normal"},
        "xaxis": {**axis, "nticks": 7, "exponentformat": "SI", "title": {"font": small, "standoff": 8}},
        "yaxis": {**axis, "nticks": 6, "exponentformat": "power"},
    }
    trace = go.Scatter(hovertemplate="%{y:.5~g}<extra>%{meta.name}</extra>")
    return go.layout.Template(layout=layout, data={"scatter": [trace]}).to_plotly_json()


Chart = dict[str, Any]  # "name", "title", "unit" and "note" of a figure, and its "traces" and "layout"


def charts(found: Sequence[Figure], runs: Sequence[Run]) -> list[Chart]:
    """The figures that have a line, drawn. A set, or a source, has one dash in all of them, and of a single run one colour."""
    lines = [(figure, i, line) for figure in found for i, run in enumerate(runs) for line in _lines(figure, run)]
    sets = list(dict.fromkeys(name for _, _, (name, _, _) in lines if name))
    most = min(MOST_POINTS, max(FEWEST_POINTS, MOST_POINTS_OF_ALL // max(len(lines), 1)))
    drawn = []
    for figure in found:
        traces, named = [], set()
        for i, (name, style, series) in [(i, line) for each, i, line in lines if each is figure]:
            number = sets.index(name) if name else 0
            steps, values = thinned(series, most)
            words = [runs[i].name if len(runs) > 1 else "", name, "budget" if style == "budget" else ""]
            trace = go.Scatter(
                STYLES[style],
                x=steps.tolist(),
                customdata=runs[i].tokens_at(steps),
                # Six digits keep the page small. What is no number, a gap, is none in JSON.
                y=[float(f"{value:.6g}") if math.isfinite(value) else None for value in values.tolist()],
                name=html.escape(name),  # plotly reads some tags in names
                legendgroup=html.escape(name),
                showlegend=style not in ("raw", "budget") and name not in named,
                line_dash="dot" if style == "budget" else DASHES[number % len(DASHES)],
                meta={
                    "run": i,
                    "style": style,
                    "name": html.escape(" · ".join(filter(None, words))),
                    "color": i if len(runs) > 1 else number,
                },
            )
            if style == "budget":
                trace.text = [*[""] * (len(steps) - 1), f"budget {trace.y[-1]}"]
            elif len(steps) == 1:
                trace.mode = "lines+markers"
            if trace.showlegend:
                named.add(name)
            traces.append(trace.to_plotly_json())
        if traces:
            layout = {"yaxis": figure.yaxis, "showlegend": len(named) > 1}
            drawn.append({**figure._asdict(), "traces": traces, "layout": layout})
    return drawn


def _lines(figure: Figure, run: Run) -> Iterable[tuple[str, str, Series]]:
    """(set or source or "", style, series) of each line of a run, with their trends and budgets."""
    budgets = run.numbers.get("eval_budget", {}) if figure.name == "eval_forgotten" else {}
    for name, series in run.numbers.get(figure.name, {}).items():
        has_trend = figure.has_trend and len(series.steps) >= TREND_FROM_POINTS
        yield name, "raw" if has_trend else figure.style, series
        if has_trend:
            yield name, "trend", trend(series)
        if name in budgets:
            yield name, "budget", budgets[name]


def trend(series: Series) -> Series:
    """Exponentially weighted mean of the points so far; a weight halves within 1 % of the points. Gaps are passed over."""
    means = pd.Series(series.values).ewm(halflife=len(series.steps) / 100, ignore_na=True).mean()
    return Series(series.steps, means.to_numpy())


def thinned(series: Series, most: int) -> Series:
    """At most `most` points: the first, the last, and the lowest and highest of each of equally many points between.

    A number that is missing, such as the loss of a step that was skipped, stays as a gap.
    """
    count = len(series.steps)
    if count <= most:
        return series
    keep = {0, count - 1, *np.flatnonzero(np.isnan(series.values))[: most // 10].tolist()}
    for part in np.array_split(np.arange(count), max(1, (most - len(keep)) // 2)):
        values = series.values[part]
        if not np.isnan(values).all():
            keep |= {int(part[np.nanargmin(values)]), int(part[np.nanargmax(values)])}
    index = sorted(keep)
    return Series(series.steps[index], series.values[index])


def strip(runs: Sequence[Run], events: Sequence[Sequence[Event]]) -> Chart:
    """The time line: the events of each run, by kind."""
    traces = []
    for i, (run, of_run) in enumerate(zip(runs, events)):
        steps = np.array([event.step for event in of_run], dtype=np.int64)
        trace = go.Scatter(
            mode="markers",
            x=steps.tolist(),
            customdata=run.tokens_at(steps),
            y=[KINDS[event.kind] for event in of_run],
            text=[html.escape(event.words[:MOST_CHARACTERS]) for event in of_run],
            hovertemplate="%{y}, %{xaxis.title.text} %{x:,}<br>%{text}<extra>%{meta.name}</extra>",
            marker={"size": 11},
            opacity=0.8,  # events of several runs may lie on each other
            cliponaxis=False,
            meta={
                "run": i,
                "name": html.escape(run.name) if len(runs) > 1 else "",
                "color": i if len(runs) > 1 else GREY,
                "marked": [j for j, event in enumerate(of_run) if event.kind not in UNMARKED][:MOST_MARKED],
            },
        )
        traces.append(trace.to_plotly_json())
    seen = {event.kind for of_run in events for event in of_run}
    titles = [title for name, title in KINDS.items() if name in seen][::-1]
    axis = {"type": "category", "categoryarray": titles, "range": [-0.6, len(titles) - 0.4], "nticks": 0}
    layout = {"hovermode": "closest", "yaxis": axis, "showlegend": False}
    return {"name": "events", "traces": traces, "layout": layout}


def bars(parts: dict[str, int], device_bytes: int | None, limits: Sequence[float]) -> Chart:
    """One bar of a device's memory by its parts, and upright lines at what the device has, and at parts of that."""
    traces = [
        go.Bar(
            x=[size / 2**30],
            y=["At the peak"],
            orientation="h",
            name=name,
            hovertemplate="%{x:,.2f} GiB<extra>%{fullData.name}</extra>",
            meta={"run": 0, "color": number},
        ).to_plotly_json()
        for number, (name, size) in enumerate(parts.items())
    ]
    whole = (device_bytes or 0) / 2**30
    upright = {"type": "line", "y0": 0, "y1": 1, "yref": "paper", "line": {"color": "#888888", "dash": "dot"}}
    label = {"textangle": 0, "textposition": "end", "xanchor": "right"}
    lines = [
        {**upright, "x0": part * whole, "x1": part * whole, "label": {**label, "text": f"{100 * part:.0f} % "}}
        for part in (*limits, 1.0)
        if whole
    ]
    layout = {"barmode": "stack", "hovermode": "closest", "showlegend": True, "shapes": lines}
    layout |= {"xaxis": {"title": {"text": "GiB"}, "rangemode": "tozero"}}
    return {"name": "memory", "traces": traces, "layout": layout}
