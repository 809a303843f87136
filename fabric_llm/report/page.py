"""What is said about runs in words and numbers, and the page around it: page.html, filled in by Jinja.

Text that comes from runs is escaped by Jinja, and the data is JSON in which no tag can end. A Content-Security-Policy keeps the
page from asking the network for anything.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime, timezone
from itertools import groupby
from pathlib import Path
from typing import Any, Optional

import jinja2
import numpy as np
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from fabric_llm.base.faults import DONE, Fault
from fabric_llm.base.files import write_atomically
from fabric_llm.data import mixture_text
from fabric_llm.data.mixture import mixture_of
from fabric_llm.report import figures, reading
from fabric_llm.report.reading import Event, Run, Series
from fabric_llm.verify import __main__ as verify

NONE = "\N{EN DASH}"
MOST_CHARACTERS = 500  # of a flag's value
NOT_COMPARED = ("run_name", "output_dir")  # flags
SECTIONS = ("setup", "curves", "events", "samples", "certificate", "flags")
Table = tuple[Sequence[Any], Sequence[Sequence[Any]]]  # head, rows


def write(folders: Sequence[str], output: Path, verifies: bool) -> int:
    """Write the report of the runs in `folders`. Returns the worst code of verify, where it is asked. Raises Fault (2)."""
    given: dict[Path, Path] = {}
    for folder in folders:
        given.setdefault(Path(folder).resolve(), Path(folder))
    runs, code = [reading.read_run(folder) for folder in given.values()], DONE
    names, above = Counter(run.name for run in runs), os.path.commonpath(given)
    for run, path in zip(runs, given):
        if verifies:
            code = max(code, verify.main([str(run.folder), "--output", str(run.folder / reading.CERTIFICATE)]))
        reading.read_certificate(run)
        if names[run.name] > 1:
            run.name = str(path.relative_to(above))
    is_one, events = len(runs) == 1, [reading.timeline(run) for run in runs]
    write_page(
        output,
        "Training report",
        runs[0].name if is_one else f"{len(runs)} runs compared",
        in_a_sentence(runs[0]) if is_one else ", ".join(run.name for run in runs),
        {name: name.capitalize() for name in SECTIONS},
        made_of=f"from {', '.join(folders)}",
        charts=figures.charts(figures.figures(runs), runs),
        strip=figures.strip(runs, events),
        runs=[
            {
                **vars(run),
                "label": named(runs, i),
                "facts": facts(run),
                "data": sources(run),
                "flags": {name: shown(value) for name, value in run.flags.items()},
            }
            for i, run in enumerate(runs)
        ],
        headline=headline(runs[0]) if is_one else None,
        compared=compared(runs),
        problems=[note if is_one else f"{run.name}: {note}" for run in runs for note in run.notes],
        events=events_table(runs, events),
        differing=None if is_one else differing_flags(runs),
    )
    return code


def environment() -> jinja2.Environment:
    """What renders page.html: text is escaped, a missing name is an error, and JSON has no NaN, which is none."""
    loader, undefined = jinja2.FileSystemLoader(Path(__file__).parent), jinja2.StrictUndefined
    made = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=undefined)
    made.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    return made


def write_page(
    output: Path, kind: str, title: str, lead: str, sections: dict[str, str], made_of: str, **inside: Any
) -> None:
    """Write a page as a whole, and say so. sections: {id: title}. inside: what page.html needs besides. Raises Fault (2)."""
    bars = [inside["bars"]] if "bars" in inside else []
    templates = {"light": figures.template(is_dark=False), "dark": figures.template(is_dark=True)}
    page = environment().get_template("page.html")
    content = page.render(
        kind=kind,
        title=title,
        lead=lead,
        sections=sections,
        made=f"{kind} made by fabric_llm on {datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC {made_of}.",
        data={"templates": templates, "charts": [*inside["charts"], *bars, inside["strip"]]},
        colors=figures.COLORS,
        font=figures.FONT,
        plotly=get_plotlyjs(),
        **inside,
    )
    whole = content.encode("utf-8", "replace")  # half a surrogate isn't text
    try:
        write_atomically(output, whole)
    except OSError as error:
        raise Fault(f"{str(output)!r} can't be written: {error.strerror}.") from error
    print(f"Written: {output}, {len(whole) / 1e6:.1f} MB", flush=True)


def named(runs: Sequence[Run], i: int) -> Markup:
    """A run's name in its colour."""
    swatch = '<i class="swatch" style="--swatch: var(--c{})" aria-hidden="true"></i> {}'
    return Markup(swatch).format(i % 8, runs[i].name)


# ------------------------------------------------------------------------------- numbers in words


def number(value: Optional[float]) -> str:
    """2.3105, 1,234, 1.23 M, 3.10e-05; NONE where there is none."""
    if value is None or not np.isfinite(value):
        return NONE
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if abs(value) >= size:
            return f"{value / size:,.2f} {letter}"
    if value == int(value) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4f}" if abs(value) >= 0.01 else f"{value:.2e}"


def duration(seconds: float) -> str:
    """3725 -> 1 h 2 min"""
    minutes, rest = divmod(round(min(seconds, 1e15)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


def shown(value: Any) -> str:
    """A flag's value as a YAML file and the command line have it."""
    words = json.dumps(value) if value is None or isinstance(value, bool) else str(value)
    return words[:MOST_CHARACTERS] + "..." * (len(words) > MOST_CHARACTERS)


# ------------------------------------------------------------------------------- the figures that decide


def headline(run: Run) -> list[tuple[str, str, str]]:
    """(label, figure, what is said below it) of the five figures that decide."""
    loss = next(iter(run.numbers["eval_loss"].values()), None)  # of all sets together, or of the first
    tokens, rates = run.number("tokens"), run.number("tokens_per_second")
    read = None if tokens is None else tokens.values[-1]
    rate = None if rates is None else np.round(np.nanmedian(rates.values))
    seconds = 0.0  # of training proper: tokens over tokens per second of each logged line
    if tokens is not None and rates is not None:
        rate_at = dict(zip(rates.steps.tolist(), rates.values.tolist()))
        for step, part in zip(tokens.steps.tolist(), np.diff(tokens.values, prepend=0).tolist()):
            seconds += part / rate_at[step] if part > 0 and rate_at.get(step, 0) > 0 else 0
    times = []
    for event in run.events:
        with suppress(TypeError, ValueError, KeyError, OverflowError):
            times.append(datetime.fromisoformat(event["time"]).timestamp())
    whole = f"{duration(times[-1] - times[0])} from start to end, with pauses" if len(times) > 1 else ""
    last = max((int(series.steps[-1]) for named in run.numbers.values() for series in named.values()), default=0)
    planned = run.begun.get("max_step") or reading.as_written(run.flags).get("max_step")
    kind, ended, why = run.ending()
    saved = f"Newest checkpoint: step {run.checkpoints[-1]:,}." if run.checkpoints else "No checkpoint."
    return [
        ("Validation loss", *((NONE, "no validation") if loss is None else last_and_best(run, loss))),
        ("Tokens", number(read), f"step {last:,} of {planned:,}" if planned else f"step {last:,}"),
        ("Tokens per second", number(rate), reading.devices(run.begun) or "median of logged lines"),
        ("Time in training", duration(seconds) if seconds else NONE, whole or "without evaluations and saves"),
        ("How it ended", Markup('<span class="{}">{}</span>').format(kind, ended), f"{why} {saved}".strip()),
    ]


def last_and_best(run: Run, loss: Series) -> tuple[str, str]:
    """The last loss, and the best in words; of a mean, since the shares of its sets last changed: others are other means."""
    steps, values = (part[np.isfinite(loss.values)] for part in loss)
    if not len(values):
        return NONE, ""
    since = run.shares[-1][0] if len(run.shares) > 1 and loss is run.numbers["eval_loss"].get(reading.MEAN) else 0
    words, latest = [f"before step {since:,} it had other shares"] * bool(since), steps >= since
    if latest.any():
        lowest = values[latest].argmin()
        words.insert(0, f"best {number(values[latest][lowest])} at step {steps[latest][lowest]:,}")
    return number(values[-1]), "; ".join(words)


def compared(runs: Sequence[Run]) -> Table:
    """The final numbers, a column each run: the figures that decide, the last training loss, and the losses of each set."""
    lines = [(of_all[0][0], [one[1:] for one in of_all]) for of_all in zip(*map(headline, runs))]
    losses = [{"Training loss": run.number("loss"), **run.numbers["eval_loss"], **run.numbers["copy"]} for run in runs]
    for name in dict.fromkeys(
        name for of_run in losses for name in of_run if name not in (reading.MEAN, reading.AVERAGE)
    ):
        found = [of_run.get(name) for of_run in losses]
        lines.append((name, [(NONE, "") if one is None else last_and_best(run, one) for run, one in zip(runs, found)]))
    cell = Markup('{}<br><span class="below">{}</span>')
    head = ["", *(named(runs, i) for i in range(len(runs)))]
    return head, [[label, *(cell.format(*one) for one in cells)] for label, cells in lines]


# ------------------------------------------------------------------------------- what was trained on what


FACTS = {  # what is said of a run in words, as far as it is known
    "Model": "{model}, {parameters} parameters",
    "Weights from": "{weights}",
    "Precision": "{precision}{updates}",
    "Devices": "{on}, {strategy}",
    "Data": "{data}",
    "Read": "{epochs:.2f} epochs of {rows:,} sequences",
    "Batch": "{global_batch_size:,} sequences of {context_length:,} tokens; {micro_batch_size:,} in a forward pass",
    "Learning rate": "{lr}, {schedule}, warm-up of {warmup_steps} steps; weight decay {weight_decay}",
    "Seed": "{seed}",
    "PyTorch": "{torch}",
    "Directory": "{folder}",
}


def facts(run: Run) -> dict[str, str]:
    """{what: in words} about model, devices, data, batch and schedule; what isn't known is left out."""
    flags, begun = run.flags, run.begun
    known = {**flags, **begun, "folder": run.folder, "data": flags.get("train_data_dir") or "a mixture, see below"}
    known["updates"] = f", {flags.get('bf16_updates')} updates" if flags.get("precision") == "bf16-true" else ""
    known["schedule"] = flags.get("lr_schedule") if flags.get("lr_decay", True) else "constant"
    is_random = any(event.get("random") for event in run.events if event["event"] == "started")
    known["weights"] = f"none: random, {flags.get('model_name')}" if is_random else flags.get("model_name")
    if on := reading.devices(begun):
        known["on"] = on
    if begun.get("parameters"):
        known["parameters"] = number(begun["parameters"])
    if run.progress and "mixture" not in run.progress:
        known["rows"] = run.progress["fixed"]["train_rows"]
        known["epochs"] = run.progress["progress"]["position"] / known["rows"]
    found = {}
    for name, words in FACTS.items():
        with suppress(KeyError, ValueError, TypeError):
            found[name] = words.format_map(known)
    return found


def in_a_sentence(run: Run) -> str:
    """What was trained on what."""
    said, on = facts(run), ", ".join(run.numbers.get("sources_tokens", ())) or run.flags.get("train_data_dir")
    words = [said.get("Model"), on and f"trained on {on}", said.get("Precision"), said.get("Devices")]
    return "; ".join(filter(None, words))


def sources(run: Run) -> Optional[Table]:
    """What was read of each source of a mixture."""
    given, shares, rows = {}, {}, {}
    with suppress(ValueError, TypeError, AttributeError):
        given = {source.name: source for source in mixture_text.parse(run.flags.get("data_mix") or "").sources}
    if "mixture" in run.progress:
        shares = mixture_of(run.progress).shares_at(max(run.progress["progress"]["position"] - 1, 0))
        rows = run.progress["fixed"]["train_rows"]
    tokens, epochs = run.numbers.get("sources_tokens", {}), run.numbers.get("sources_epochs", {})
    found = []
    for name in dict.fromkeys([*tokens, *given]):
        source = given.get(name, mixture_text.Source(name, NONE))
        read = f"{epochs[name].values[-1]:.2f}" if name in epochs else NONE
        most = f" of at most {float(source.max_epochs):g}" if source.max_epochs else ""
        share = f"{100 * shares[name]:.3g} %" if name in shares else NONE
        tokens_read = number(tokens[name].values[-1] if name in tokens else None)
        found.append([name, share, tokens_read, read + most, number(rows.get(name)), source.path])
    return (["Source", "Share now", "Tokens read", "Epochs", "Sequences", "Folder"], found) if found else None


# ------------------------------------------------------------------------------- events and flags


def events_table(runs: Sequence[Run], events: Sequence[Sequence[Event]]) -> Table:
    """The events of all runs, saves in a row as one."""
    several, found = len(runs) > 1, []
    for run, of_run in zip(runs, events):
        for is_saved, group in groupby(of_run, key=lambda event: event.kind == "saved"):
            happened = list(group)
            for first, last in [(happened[0], happened[-1])] if is_saved else zip(happened, happened):
                step, words = f"{first.step:,}", first.words
                if first is not last:
                    step, words = f"{step} to {last.step:,}", f"{words} to {last.words}"
                time = first.time.replace("T", " ").removesuffix("+00:00")
                found.append([*[run.name] * several, step, time, reading.KINDS[first.kind], words])
    return [*["Run"] * several, "Step", "Time (UTC)", "Event", "What"], found


def differing_flags(runs: Sequence[Run]) -> Table:
    """The flags that aren't the same in all runs."""
    found = []
    for name in dict.fromkeys(name for run in runs for name in run.flags):
        values = [shown(run.flags[name]) if name in run.flags else NONE for run in runs]
        if name not in NOT_COMPARED and len(set(values)) > 1:
            found.append([name, *values])
    return ["Flag", *(run.name for run in runs)], found
