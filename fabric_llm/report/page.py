"""The page around sections and figures: one HTML file with its style, its script, its data and plotly inside.

Text that comes from runs is escaped where it is put in (`text`, `table`), and the data is JSON in which no tag can end. A
Content-Security-Policy keeps the page from asking the network for anything.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fabric_llm.base.faults import Fault
from fabric_llm.report.figures import Figure, extremes, rounded

POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:; "
    "base-uri 'none'; form-action 'none'"
)
DASHES = ("none", "8 5", "2 4", "8 4 2 4", "14 6", "14 5 2 5")  # page.js has the same by plotly's names


def plotly_source() -> str:
    """The text of plotly.js. Raises Fault (2) where plotly isn't installed."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise Fault("The report needs plotly: pip install plotly (or pip install -e '.[report]').") from error
    return get_plotlyjs()


def document(title: str, body: str, data: Mapping[str, Any]) -> str:
    """A whole page. body: HTML, in which what comes from runs is escaped. data: for page.js."""
    folder = Path(__file__).parent
    style, script = ((folder / name).read_text() for name in ("page.css", "page.js"))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<link rel="icon" href="data:,">
<title>{text(title)}</title>
<style>
{style}</style>
</head>
<body>
{body}
<script type="application/json" id="page-data">{as_json(data)}</script>
<script>{plotly_source()}</script>
<script>
{script}</script>
</body>
</html>
"""


def as_json(data: Any) -> str:
    """JSON that can stand in a script element: no tag, comment or line separator of its text is one there."""
    said = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return said.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


class Html(str):
    """A text that is HTML already."""


def text(value: Any) -> str:
    """Text as HTML."""
    if isinstance(value, Html):
        return value
    return html.escape(str(value).encode("utf-8", "replace").decode(), quote=True)  # half a surrogate isn't text


def table(head: Sequence[str], rows: Iterable[Sequence[Any]], label: str, numeric: Sequence[int] = ()) -> str:
    """A table that scrolls by itself where it is too wide. numeric: columns that are set to the right."""

    def cell(tag: str, column: int, value: Any) -> str:
        scope = ' scope="col"' if tag == "th" else ""
        css = ' class="number"' if column in numeric else ""
        name = f' data-name="{text(head[column])}"' if tag == "td" else ""  # where a phone shows a row as a list
        return f"<{tag}{scope}{css}{name}>{text(value)}</{tag}>"

    top = "".join(cell("th", i, name) for i, name in enumerate(head))
    lines = ("<tr>" + "".join(cell("td", i, value) for i, value in enumerate(row)) + "</tr>" for row in rows)
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{text(label)}"><table><thead><tr>{top}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def terms(pairs: Iterable[tuple[str, str]], css: str = "facts") -> str:
    """Names and what they are."""
    return (
        f'<dl class="{css}">' + "".join(f"<div><dt>{text(n)}</dt><dd>{text(v)}</dd></div>" for n, v in pairs) + "</dl>"
    )


def section(name: str, title: str, inside: str) -> str:
    """A section that the navigation leads to."""
    return f'<section id="{name}" aria-labelledby="{name}-title"><h2 id="{name}-title">{text(title)}</h2>{inside}</section>'


def navigation(names: Mapping[str, str]) -> str:
    """{id of a section: its title}"""
    links = "".join(f'<a href="#{name}">{text(title)}</a>' for name, title in names.items())
    return f'<nav aria-label="Sections">{links}</nav>'


def header(eyebrow: str, title: str, lead: str) -> str:
    """The top of a page, with the switch between light and dark."""
    return f"""<a class="skip" href="#main">Skip to content</a>
<header>
<div><p class="eyebrow">{text(eyebrow)}</p><h1>{text(title)}</h1><p class="lead">{text(lead)}</p></div>
<button type="button" id="theme" aria-pressed="false">Dark</button>
</header>"""


def controls(runs: Sequence[str], note: str = "") -> str:
    """The switch between steps and tokens, one for each run where there are several, and a note."""
    choice = "".join(
        f'<label><input type="radio" name="axis" value="{value}"{" checked" * (value == "x")}><span>{words}</span></label>'
        for value, words in (("x", "Steps"), ("t", "Tokens"))
    )
    buttons = ""
    if len(runs) > 1:
        each = "".join(
            f'<button type="button" class="run" data-run="{i}" aria-pressed="true">{swatch(i)}{text(name)}</button>'
            for i, name in enumerate(runs)
        )
        buttons = f'<div class="runs" role="group" aria-label="Runs shown">{each}</div>'
    lines = f'<p class="note">{text(note)}</p>' if note else ""
    return (
        f'<div class="controls"><fieldset class="axis"><legend>Over</legend>{choice}</fieldset>{buttons}{lines}</div>'
        "<noscript><p>The curves are drawn with JavaScript; the numbers below them are there without.</p></noscript>"
    )


def swatch(color: int) -> Html:
    """A dot in the colour of a run or a set."""
    return Html(f'<i class="swatch" style="--swatch: var(--c{color % 8})" aria-hidden="true"></i>')


def chart(figure: Figure, runs: Sequence[str], dashes: Mapping[str, int]) -> str:
    """The place of a figure, with the meaning of its dashes, and its numbers as a table. dashes: {set: number of its dash}."""
    unit = f' <span class="unit">{text(figure.unit)}</span>' if figure.unit else ""
    note = f'<p class="note">{text(figure.note)}</p>' if figure.note else ""
    return (
        f'<figure class="chart" id="chart-{text(figure.name)}"><figcaption><h3>{text(figure.title)}{unit}</h3>'
        f'{legend(figure, len(runs), dashes)}</figcaption><div class="plot" role="img" aria-label="{text(spoken(figure, runs))}"></div>'
        f"{note}<details><summary>Numbers</summary>{numbers(figure, runs)}</details></figure>"
    )


def legend(figure: Figure, runs: int, dashes: Mapping[str, int]) -> str:
    """What the dashes, and with one run the colours, stand for."""
    sets = list(dict.fromkeys(line.set for line in figure.lines))
    if sets == [""] or runs == 1 and sets == ["validation"]:
        return ""
    return f'<ul class="sets">{"".join(_key(name, dashes[name], runs > 1) for name in sets)}</ul>'


def _key(name: str, dash: int, is_colored_by_run: bool) -> str:
    color = "currentColor" if is_colored_by_run else f"var(--c{dash % 8})"
    line = f'<line x1="1" x2="25" y1="4" y2="4" stroke-width="2.4" stroke-dasharray="{DASHES[dash % 6]}"/>'
    return f'<li><svg width="26" height="8" aria-hidden="true" style="stroke: {color}">{line}</svg>{text(name)}</li>'


def numbers(figure: Figure, runs: Sequence[str]) -> str:
    """First, last, lowest and highest point of each line."""
    rows = []
    for line in figure.lines:
        found = extremes(line.series)
        if line.style == "trend" or found is None:
            continue
        special = line.style if line.style in ("budget", "discarded") else ""
        name = " · ".join(filter(None, [runs[line.run] if len(runs) > 1 else "", line.set, special]))
        points = [f"{rounded(value):g} at {step:,}" for step, value in found.values()]
        rows.append([name or figure.title, *points, f"{len(line.series.steps):,}"])
    return table(
        ["Line", "First", "Last", "Lowest", "Highest", "Points"], rows, f"{figure.title}, numbers", range(1, 6)
    )


def spoken(figure: Figure, runs: Sequence[str]) -> str:
    """A figure in a sentence, for those who don't see it."""
    words = []
    for line in figure.lines[:8]:
        found = extremes(line.series)
        if line.style in ("line", "points", "raw") and found is not None:
            (first, begins), (last, ends) = found["first"], found["last"]
            name = " ".join(filter(None, [runs[line.run] if len(runs) > 1 else "", line.set]))
            words.append(
                f"{name + ' ' if name else ''}from {begins:.4g} at step {first:,} to {ends:.4g} at step {last:,}"
            )
    return f"{figure.title}: {'; '.join(words)}."
