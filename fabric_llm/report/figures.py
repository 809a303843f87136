"""Runs -> the figures of the report, as plain data that page.js draws: lines of points, thinned out, and their table."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Optional

import numpy as np

from fabric_llm.report.reading import COPY, MEAN, Run, Series

MOST_POINTS, FEWEST_POINTS = 2000, 60  # of a line
MOST_POINTS_OF_ALL = 90_000  # of all lines: 2.5 MB
TREND_FROM_POINTS = 100  # shorter lines have no trend
DIGITS = 6
TREND = (
    "Of lines with many points the bold one is a running mean, in which a point counts half as much after 1 % of them."
)
AVERAGE = "moving average of the weights"
SHARES_CHANGED = "The shares by which the sets count have changed: only where they are the same, the mean compares."


@dataclass
class Line:
    """A line of a figure. set: what its dash stands for, "" where the figure has one line a run."""

    run: int
    set: str
    series: Series
    style: str = "line"  # line, points (measured now and then), raw (with a trend over it), trend, budget, discarded


@dataclass
class Figure:
    """A figure over steps or tokens."""

    name: str
    title: str
    unit: str
    lines: list[Line] = field(default_factory=list)
    is_log: bool = False
    note: str = ""
    is_minor: bool = False  # goes below the others
    is_apart: bool = False  # its sets are no sets of validation data


def figures(runs: Sequence[Run]) -> list[Figure]:
    """All figures that have a line, in the order of the page, with what was discarded as lines of their own."""
    made, discarded = _figures(runs), defaultdict(list)
    for number in range(max((len(run.discarded) for run in runs), default=0)):
        parts = [run.discarded[number] if number < len(run.discarded) else Run(run.name, run.folder) for run in runs]
        for figure in _figures(parts):
            for line in figure.lines:
                if line.style not in ("trend", "budget"):
                    discarded[figure.name, line.run, line.set].append(line.series)
    for figure in made:
        lines = [(key[1:], parts) for key, parts in discarded.items() if key[0] == figure.name]
        figure.lines += [Line(*where, _with_gaps(parts), "discarded") for where, parts in lines]
    return made


def _with_gaps(parts: Sequence[Series]) -> Series:
    """The parts one after the other, as one line with gaps."""
    steps = np.concatenate([np.append(part.steps, part.steps[-1]) for part in parts])
    return Series(steps, np.concatenate([np.append(part.values, math.nan) for part in parts]))


def _figures(runs: Sequence[Run]) -> list[Figure]:
    made = [
        _of_sets(runs, "eval_loss", "Validation loss", "nats a token", "loss", lambda name: name != COPY),
        _with_trends(_of_number(runs, "loss", "Training loss", "nats a token", note=TREND)),
        _forgetting(runs),
        _of_sets(runs, "bits_per_byte", "Bits per byte of validation text", "bits", "bits_per_byte"),
        _of_sets(runs, "copy", "Copying from context", "nats a token", "loss", lambda name: name == COPY),
        Figure("drift", "Distance of the weights from the base", "of their norm", _drift(runs)),
        _sources(runs),
        _of_number(runs, "lr", "Learning rate", ""),
        _with_trends(_of_number(runs, "grad_norm", "Gradient norm, before clipping", "", is_log=True)),
        _with_trends(_of_number(runs, "tokens_per_second", "Tokens per second, all devices", "tokens/s")),
        _with_trends(_of_number(runs, "mfu", "Model FLOPs utilisation", "of the device's peak")),
        _of_number(runs, "peak_memory_gib", "Peak memory of rank 0", "GiB"),
        _with_trends(_of_number(runs, "updated_fraction", "Share of weights that a step changes", "of the weights")),
        _with_trends(_waiting(runs)),
        _with_trends(_of_number(runs, "aux_loss", "Auxiliary loss of the routers", "")),
    ]
    made[0].lines += [Line(i, AVERAGE, run.average, "points") for i, run in enumerate(runs) if run.average is not None]
    made[0].note = SHARES_CHANGED * any(len(run.shares) > 1 for run in runs)
    made[
        4
    ].note = (
        "The loss on the second occurrence of a repeated random passage: low where the model copies from its context."
    )
    shown = {"loss", "lr", "grad_norm", "tokens", "tokens_per_second", "mfu", "peak_memory_gib", "updated_fraction"}
    shown |= {"data_seconds", "wait_seconds", "aux_loss", "tokens_per_second_per_device"}
    others = sorted({name for run in runs for name in run.numbers} - shown)
    for name in others:
        lines = [Line(i, "", run.numbers[name]) for i, run in enumerate(runs) if name in run.numbers]
        made.append(Figure(f"number-{name}", name.replace("_", " "), "", lines, is_minor=True))
    return [figure for figure in made if figure.lines]


def _of_number(runs: Sequence[Run], name: str, title: str, unit: str, **more: Any) -> Figure:
    lines = [Line(i, "", run.numbers[name]) for i, run in enumerate(runs) if name in run.numbers]
    return Figure(name, title, unit, lines, **more)


def _of_sets(
    runs: Sequence[Run],
    name: str,
    title: str,
    unit: str,
    key: str,
    takes: Callable[[str], bool] = lambda name: True,
) -> Figure:
    """key: of each set's numbers."""
    lines = [
        Line(i, set_name, named[key], "points")
        for i, run in enumerate(runs)
        for set_name, named in _ordered(run)
        if key in named and takes(set_name)
    ]
    return Figure(name, title, unit, lines)


def _ordered(run: Run) -> list[tuple[str, dict[str, Series]]]:
    """The sets, all together first."""
    return sorted(run.sets.items(), key=lambda item: (item[0] != MEAN, item[0]))


def _with_trends(figure: Figure) -> Figure:
    """The figure with a running mean over each line that has enough points for one."""
    lines = []
    for line in figure.lines:
        has_trend = len(line.series.steps) >= TREND_FROM_POINTS
        lines.append(replace(line, style="raw" if has_trend else line.style))
        lines += [replace(line, style="trend", series=trend(line.series))] if has_trend else []
    return replace(figure, lines=lines)


def trend(series: Series) -> Series:
    """Exponentially weighted mean of the points so far; a weight halves within 1 % of the points. Gaps are passed over."""
    decay = 0.5 ** (100 / len(series.steps))
    means, total, weight = [], 0.0, 0.0
    for value in series.values.tolist():
        if math.isfinite(value):
            total, weight = decay * total + value, decay * weight + 1
        means.append(total / weight if weight else math.nan)
    return Series(series.steps, np.array(means))


def forgotten(named: dict[str, Series]) -> Optional[Series]:
    """How far a set's loss is above its value before step 1, as logged, or computed where step 0 was evaluated."""
    if "forgotten" in named:
        return named["forgotten"]
    loss = named["loss"]
    if len(loss.steps) < 2 or loss.steps[0] != 0 or not math.isfinite(loss.values[0]):
        return None
    return Series(loss.steps, loss.values - loss.values[0])


def _forgetting(runs: Sequence[Run]) -> Figure:
    """Of the sets with a budget, or where none has one of all but the copying probe."""
    lines = []
    has_budget = any("budget" in named for run in runs for named in run.sets.values())
    for i, run in enumerate(runs):
        for name, named in _ordered(run):
            if "budget" in named or not has_budget and name not in (MEAN, COPY):
                series = forgotten(named)
                lines += [] if series is None else [Line(i, name, series, "points")]
                lines += [Line(i, name, named["budget"], "budget")] if "budget" in named else []
    note = "Above 0 a set was forgotten, below 0 it was learned."
    return Figure("forgotten", "Forgetting: loss minus its value before step 1", "nats a token", lines, note=note)


def _drift(runs: Sequence[Run]) -> list[Line]:
    return [Line(i, "", run.drift, "points") for i, run in enumerate(runs) if run.drift is not None]


def _sources(runs: Sequence[Run]) -> Figure:
    lines = [
        Line(i, name, named["epochs"])
        for i, run in enumerate(runs)
        for name, named in run.sources.items()
        if "epochs" in named
    ]
    return Figure("epochs", "How often each source was read", "epochs", lines)


def _waiting(runs: Sequence[Run]) -> Figure:
    names = {"data_seconds": "for data", "wait_seconds": "for the device and other ranks"}
    lines = [
        Line(i, words, run.numbers[name])
        for i, run in enumerate(runs)
        for name, words in names.items()
        if name in run.numbers
    ]
    return Figure("waiting", "Waiting of rank 0 in a step", "seconds", lines, is_apart=True)


# ------------------------------------------------------------------------------- as data


def as_data(runs: Sequence[Run], found: Sequence[Figure]) -> list[dict[str, Any]]:
    """The figures for page.js: of each line the points over steps (x) and tokens (t), and the number of its dash."""
    count = sum(len(figure.lines) for figure in found)
    most = min(MOST_POINTS, max(FEWEST_POINTS, MOST_POINTS_OF_ALL // max(count, 1)))
    documents, dashes = [], dashes_of(found)
    for figure in found:
        documents.append(
            {
                "name": figure.name,
                "title": figure.title,
                "unit": figure.unit,
                "log": figure.is_log and _is_positive(figure.lines),
                "lines": [_line(runs[line.run], line, dashes[figure.name][line.set], most) for line in figure.lines],
            }
        )
    return documents


def dashes_of(found: Sequence[Figure]) -> dict[str, dict[str, int]]:
    """{figure: {set: number of its dash}}: a set of validation data, or a source, has one in all figures."""
    names = list(
        dict.fromkeys(line.set for figure in found if not figure.is_apart for line in figure.lines if line.set)
    )
    numbers = {"": 0, **{name: i for i, name in enumerate(names)}}
    apart = {figure.name: dict.fromkeys(line.set for line in figure.lines) for figure in found if figure.is_apart}
    return {
        figure.name: {name: i for i, name in enumerate(apart[figure.name])} if figure.is_apart else numbers
        for figure in found
    }


def _is_positive(lines: Sequence[Line]) -> bool:
    return all(np.nanmin(line.series.values) > 0 for line in lines)


def _line(run: Run, line: Line, dash: int, most: int) -> dict[str, Any]:
    steps, values = thinned(line.series, most)
    return {
        "run": line.run,
        "set": line.set,
        "dash": dash,
        "style": line.style,
        "x": steps.tolist(),
        "t": [None if math.isnan(tokens) else int(tokens) for tokens in run.tokens_at(steps).tolist()],
        "y": [rounded(value) for value in values.tolist()],
    }


def thinned(series: Series, most: int) -> Series:
    """At most `most` points: the first, the last, and the lowest and highest of each of equally many points between."""
    count = len(series.steps)
    if count <= most:
        return series
    keep = {0, count - 1, *_gaps(series.values, most // 10)}
    edges = np.linspace(0, count, max(1, (most - len(keep)) // 2) + 1).astype(np.int64)
    finite = np.isfinite(series.values)
    low, high = np.where(finite, series.values, np.inf), np.where(finite, series.values, -np.inf)
    for start, end in zip(edges[:-1].tolist(), edges[1:].tolist()):
        if finite[start:end].any():
            keep |= {start + int(low[start:end].argmin()), start + int(high[start:end].argmax())}
    index = np.array(sorted(keep))
    return Series(series.steps[index], series.values[index])


def _gaps(values: np.ndarray, most: int) -> Iterator[int]:
    """Where a number is missing, such as the loss of a step that was skipped: the line has a gap there."""
    yield from np.flatnonzero(~np.isfinite(values))[:most].tolist()


def rounded(value: float) -> Optional[float]:
    """To DIGITS significant digits; null where there is no number."""
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None


def extremes(series: Series) -> Optional[dict[str, tuple[int, float]]]:
    """(step, value) of the first, last, lowest and highest point, None where there is none."""
    finite = np.isfinite(series.values)
    if not finite.any():
        return None
    steps, values = series.steps[finite], series.values[finite]
    places = {"first": 0, "last": -1, "lowest": int(values.argmin()), "highest": int(values.argmax())}
    return {name: (int(steps[i]), float(values[i])) for name, i in places.items()}
