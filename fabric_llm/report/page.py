"""What is said about runs in words and numbers, and the page around it: page.html, filled in by
Jinja.

Text that comes from runs is escaped by Jinja, and the data is JSON in which no tag can end. A
Content-Security-Policy keeps the page from asking the network for anything.
"""

import json
import os
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, Optional

import jinja2
import numpy as np
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from fabric_llm.base.faults import unwritten
from fabric_llm.base.files import write_atomically
from fabric_llm.report import figures, reading
from fabric_llm.report.reading import Run, Series

NONE = "\N{EN DASH}"
NOT_COMPARED = ("run_name", "output_dir")  # flags
SECTIONS = ("curves", "events", "samples", "flags")
# Sections of several runs: each has a page of its own for its samples.
COMPARED = ("curves", "events", "flags")
Table = tuple[Sequence[Any], Sequence[Sequence[Any]]]  # (head, rows)


def write(folders: Sequence[str], output: Path) -> None:
    """Write the report of the runs in `folders`. Raises Fault (2, 73, 74)."""
    # A run that is given twice is shown once.
    paths = list(dict.fromkeys(Path(folder).resolve() for folder in folders))
    runs = [reading.read_run(path) for path in paths]
    # Runs in different directories may have the same name, so the path below their common one tells
    # them apart.
    above = os.path.commonpath(path.parent for path in paths)
    for run in runs:
        run.name = os.path.relpath(run.folder, above)
    title, lead, differences = runs[0].name, in_a_sentence(runs[0]), None
    sections: Sequence[str] = SECTIONS
    if len(runs) > 1:
        title, lead = f"{len(runs)} runs compared", ", ".join(run.name for run in runs)
        sections, differences = COMPARED, differing(runs)
    write_page(
        output,
        "Training report",
        f"from {', '.join(folders)}",
        {name: name.capitalize() for name in sections},
        title=title,
        lead=lead,
        charts=figures.charts(figures.figures(runs), runs),
        marks=figures.marks(runs),
        runs=[{**vars(run), "flags": known(run), "headline": headline(run)} for run in runs],
        problems=[f"{run.name}: {note}" for run in runs for note in run.notes],
        events=events_table(runs),
        differing=differences,
    )


def environment() -> jinja2.Environment:
    """What renders page.html: text is escaped, a missing name is an error, and JSON has no NaN,
    which is none."""
    loader, undefined = jinja2.FileSystemLoader(Path(__file__).parent), jinja2.StrictUndefined
    made = jinja2.Environment(
        loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=undefined
    )
    made.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    return made


def write_page(
    output: Path, kind: str, made_of: str, sections: Mapping[str, str], **inside: Any
) -> None:
    """Write a page as a whole, and say so. sections: {id: title}. inside: what page.html needs
    besides. Raises Fault (73, 74)."""
    # page.html asks for all of these, and a name that is missing is an error there.
    inside = {"charts": [], "bars": [], "marks": [], "problems": [], "differing": None, **inside}
    page, now = environment().get_template("page.html"), datetime.now(timezone.utc)
    content = page.render(
        kind=kind,
        sections=sections,
        made=f"{kind} made by fabric_llm on {now:%Y-%m-%d %H:%M} UTC {made_of}.",
        data={
            "template": figures.template(),
            # The bar of memory is one more figure for the script of page.html.
            "charts": [*inside["charts"], *inside["bars"]],
            "marks": inside["marks"],
        },
        plotly=get_plotlyjs(),
        **inside,
    )
    whole = content.encode("utf-8", "replace")  # half a surrogate isn't text
    # As a whole, so that a browser never shows half a page.
    try:
        write_atomically(output, whole)
    except OSError as error:
        raise unwritten(output, error) from error
    print(f"Written: {output}, {len(whole) / 1e6:.1f} MB", flush=True)


def number(value: Optional[float]) -> str:
    """2.3105, 1,234, 1.23 M, 3.10e-05; NONE where there is none."""
    if value is None or not np.isfinite(value):
        return NONE
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if abs(value) >= size:
            return f"{value / size:,.2f} {letter}"
    # Counts have no decimals, and large numbers don't need them.
    if value == int(value) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4f}" if abs(value) >= 0.01 else f"{value:.2e}"


def duration(seconds: float) -> str:
    """3725 -> 1:02:05"""
    # timedelta holds little more than this.
    return str(timedelta(seconds=round(min(seconds, 1e13))))


def shown(value: Any) -> str:
    """A flag's value as a YAML file and the command line have it."""
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def headline(run: Run) -> list[tuple[str, str, str]]:
    """(label, figure, what is said below it) of the five figures that decide."""
    # The first loss is that of all sets together, if there are several.
    loss = next(iter(run.numbers["eval_loss"].values()), None)
    tokens, rates = run.number("tokens"), run.number("tokens_per_second")
    times = [datetime.fromisoformat(event["time"]) for event in run.events if "time" in event]
    last = reading.last_step(run)
    # What the last start recorded counts more than the flag, which may be missing.
    planned = run.begun.get("max_step") or run.flags.get("max_step")
    reached = f"step {last:,} of {planned:,}" if planned else f"step {last:,}"
    kind, ended, why = run.ending()
    saved = "No checkpoint."
    if run.checkpoints:
        saved = f"Newest checkpoint: step {run.checkpoints[-1]:,}."
    validation, best, lasted = NONE, "no validation", NONE
    if loss is not None:
        validation, best = last_and_best(run, loss)
    if times:
        lasted = duration((times[-1] - times[0]).total_seconds())
    # The median, so that pauses and the first steps don't count, of the last start: one
    # before may have had other devices.
    begun, speeds = run.begun.get("step"), rates and rates.values
    if rates is not None and isinstance(begun, int) and rates.steps[-1] > begun:
        speeds = rates.values[rates.steps > begun]
    rate = number(None if speeds is None else np.round(np.nanmedian(speeds)))
    # Escapes what is filled in, and marks the rest as HTML.
    ending = Markup('<span class="{}">{}</span>').format(kind, ended)
    return [
        ("Validation loss", validation, best),
        ("Tokens", number(tokens and tokens.values[-1]), reached),
        ("Tokens per second", rate, reading.devices(run.begun)),
        ("Time", lasted, "from start to end, with pauses"),
        ("How it ended", ending, f"{why} {saved}".strip()),
    ]


def last_and_best(run: Run, loss: Series) -> tuple[str, str]:
    """The last loss, and in words the best one. It is followed back only to where its rows last
    changed, and a mean over sets to where their shares did: what is before doesn't compare."""
    # A loss of NaN or infinity is neither the last nor the best one.
    steps, values = (part[np.isfinite(loss.values)] for part in loss)
    if not len(values):
        return NONE, ""
    since, other = reading.rows_changed_at(run, loss), "was of other rows"
    is_mean = loss is run.numbers["eval_loss"].get(reading.MEAN)
    if is_mean and run.shares_since and run.shares_since >= since:
        since, other = run.shares_since, "had other shares"
    words, latest = [], steps >= since
    if since:
        words.append(f"before step {since:,} it {other}")
    if latest.any():
        lowest = values[latest].argmin()
        words.insert(0, f"best {number(values[latest][lowest])} at step {steps[latest][lowest]:,}")
    return number(values[-1]), "; ".join([*words, *reading.parts_read(run)])


def known(run: Run) -> dict[str, str]:
    """{name: value} of the flags, and of what the last start has recorded."""
    return {name: shown(value) for name, value in {**run.flags, **run.begun}.items()}


def in_a_sentence(run: Run) -> str:
    """What was trained on what."""
    begun = run.begun
    on = ", ".join(run.numbers.get("sources_tokens", ())) or run.flags.get("train_data_dir")
    words = [begun.get("model")]
    if "parameters" in begun:
        words.append(f"{number(begun['parameters'])} parameters")
    if on:
        words.append(f"trained on {on}")
    words += [run.flags.get("precision"), reading.devices(begun), begun.get("strategy")]
    # What the run directory doesn't say is None or "".
    return "; ".join(str(word) for word in words if word)


def events_table(runs: Sequence[Run]) -> Table:
    """The events of all runs."""
    several, rows = len(runs) > 1, []
    for run in runs:
        for event in run.timeline:
            time = event.time.replace("T", " ").removesuffix("+00:00")
            row = [f"{event.step:,}", time, event.kind.capitalize(), event.words]
            rows.append([run.name, *row] if several else row)
    return [*["Run"] * several, "Step", "Time (UTC)", "Event", "What"], rows


def differing(runs: Sequence[Run]) -> Table:
    """The flags that aren't the same in all runs."""
    # In the order of the first run that has them.
    names = dict.fromkeys(name for run in runs for name in run.flags)
    rows = []
    for name in names:
        values = [shown(run.flags[name]) if name in run.flags else NONE for run in runs]
        if name not in NOT_COMPARED and len(set(values)) > 1:
            rows.append([name, *values])
    return ["Flag", *(run.name for run in runs)], rows
