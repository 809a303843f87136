"""What is said about runs in words and numbers, and the page around it: page.html, filled in by Jinja.

Text that comes from runs is escaped by Jinja, and the data is JSON in which no tag can end. A Content-Security-Policy keeps the
page from asking the network for anything.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime, timezone
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
from fabric_llm.report import certificate, figures
from fabric_llm.report.reading import AVERAGE, MEAN, Run, Series, as_written, read_run
from fabric_llm.report.timeline import KINDS, Event, devices, rows, timeline
from fabric_llm.verify.inspect_log import is_finite

NONE = "\N{EN DASH}"
MOST_CHARACTERS = 500  # of a flag's value
NOT_COMPARED = ("run_name", "output_dir")  # flags
SECTIONS = ("setup", "curves", "events", "samples", "certificate", "flags")
Table = tuple[Sequence[str], Sequence[Sequence[Any]]]  # head, rows


def write(folders: Sequence[str], output: Path, verifies: bool) -> int:
    """Write the report of the runs in `folders`. Returns the worst code of the certificates. Raises Fault (2)."""
    given: dict[Path, Path] = {}
    for folder in folders:
        given.setdefault(Path(folder).resolve(), Path(folder))
    runs = [read_run(folder) for folder in given.values()]
    names, above = Counter(run.name for run in runs), os.path.commonpath(given)
    for run, path in zip(runs, given):
        if names[run.name] > 1:
            run.name = str(path.relative_to(above))
    whole = [certificate.whole(run) if verifies else certificate.last_whole(run) for run in runs]
    quick = [certificate.quick(run) for run in runs]
    for run, *found in zip(runs, quick, whole):
        if any(one and one["verdict"] != "whole" for one in found):
            run.wrong.append("The certificate below says what is damaged.")
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs compared"
    events, is_one = [timeline(run) for run in runs], len(runs) == 1
    content = document(
        "Training report",
        title,
        in_a_sentence(runs[0]) if is_one else ", ".join(run.name for run in runs),
        {name: name.capitalize() for name in SECTIONS},
        made_of=f"from {', '.join(folders)}",
        charts=figures.charts(figures.figures(runs), runs),
        strip=figures.strip(runs, events, KINDS),
        runs=[
            {
                "name": run.name,
                "label": named(runs, i),
                "folder": run.folder,
                "facts": facts(run),
                "data": sources(run),
                "quick": quick[i],
                "whole": whole[i],
                "flags": {name: shown(value) for name, value in run.flags.items()},
            }
            for i, run in enumerate(runs)
        ],
        headline=headline(runs[0]) if is_one else None,
        ending=runs[0].ending()[0],
        compared=compared(runs),
        losses=losses(runs),
        problems=[
            note if is_one else f"{run.name}: {note}"
            for run in runs
            for note in [*([run.told()] if run.told() and not is_one else []), *run.notes]
        ],
        events=events_table(runs, events),
        samples=samples(runs),
        differing=None if is_one else differing_flags(runs),
    )
    save(content, output)
    return max((one.get("code", DONE) for one in whole if one), default=DONE) if verifies else DONE


def environment() -> jinja2.Environment:
    """What renders page.html: text is escaped, a missing name is an error, and JSON has no NaN, which is none."""
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    made.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    return made


def document(kind: str, title: str, lead: str, sections: dict[str, str], made_of: str, **inside: Any) -> str:
    """A whole page. sections: {id: title}. inside: what page.html needs besides."""
    drawn = [
        {"name": chart.figure.name, "traces": chart.traces, "layout": chart.layout}
        for chart in [*inside["charts"], inside["strip"]]
    ]
    templates = {"light": figures.template(is_dark=False), "dark": figures.template(is_dark=True)}
    page = environment().get_template("page.html")
    content = page.render(
        kind=kind,
        title=title,
        lead=lead,
        sections=sections,
        made=f"{kind} made by fabric_llm on {datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC {made_of}.",
        data={"templates": templates, "charts": drawn},
        colors=figures.COLORS,
        font=figures.FONT,
        plotly=get_plotlyjs(),
        **inside,
    )
    return content.encode("utf-8", "replace").decode()  # half a surrogate isn't text


def save(content: str, output: Path) -> None:
    """Write the page as a whole, and say so. Raises Fault (2) where it can't be written."""
    try:
        write_atomically(output, content)
    except OSError as error:
        raise Fault(f"{str(output)!r} can't be written: {error.strerror}.") from error
    print(f"Written: {output}, {len(content.encode()) / 1e6:.1f} MB", flush=True)


def named(runs: Sequence[Run], i: int) -> Markup:
    """A run's name in its colour."""
    swatch = '<i class="swatch" style="--swatch: var(--c{})" aria-hidden="true"></i> {}'
    return Markup(swatch).format(i % 8, runs[i].name)


# ------------------------------------------------------------------------------- numbers in words


def number(value: Optional[float]) -> str:
    """2.3105, 1,234, 1.23 M, 3.10e-05; NONE where there is none."""
    if value is None or not is_finite(value):
        return NONE
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if abs(value) >= size:
            return f"{value / size:,.2f} {letter}"
    if value == int(value) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4f}" if abs(value) >= 0.01 else f"{value:.2e}"


def duration(seconds: float) -> str:
    """3725 -> 1 h 2 min"""
    if not seconds < math.inf:
        return NONE
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def shown(value: Any) -> str:
    """A flag's value as a YAML file and the command line have it."""
    words = json.dumps(value) if value is None or isinstance(value, bool) else str(value)
    return words[:MOST_CHARACTERS] + "..." * (len(words) > MOST_CHARACTERS)


# ------------------------------------------------------------------------------- the figures that decide


def headline(run: Run) -> list[tuple[str, str, str]]:
    """(label, figure, what is said below it) of the five figures that decide."""
    loss = next(iter(run.numbers.get("eval_loss", {}).values()), None)  # of all sets together, or of the first
    tokens, rates = run.number("tokens"), run.number("tokens_per_second")
    seconds, clock = run.training_seconds(), wall_clock(run)
    planned = run.begun.get("max_step") or as_written(run.flags).get("max_step")
    steps = f"step {run.last_step:,} of {planned:,}" if planned else f"step {run.last_step:,}"
    if run.discarded:
        steps += f"; {number(run.discarded_tokens())} more discarded"
        clock += f"; {duration(sum(part.training_seconds() for part in run.discarded))} more discarded"
    saved = f"Newest checkpoint: step {run.checkpoints[-1]:,}." if run.checkpoints else "No checkpoint."
    return [
        ("Validation loss", last(loss), "no validation" if loss is None else f"best {best_of(run, loss)}"),
        ("Tokens", NONE if tokens is None else number(tokens.values[-1]), steps),
        (
            "Tokens per second",
            NONE if rates is None else number(float(np.round(np.nanmedian(rates.values)))),
            devices(run.begun) or "median of logged lines",
        ),
        ("Time in training", duration(seconds) if seconds > 0 else NONE, clock),
        ("How it ended", run.ending()[1], " ".join(filter(None, [run.told(), saved]))),
    ]


def best_of(run: Run, loss: Series) -> str:
    """The best validation loss and its step; of a mean, since the shares of its sets last changed: others are other means."""
    since = run.shares[-1][0] if len(run.shares) > 1 and loss is run.numbers["eval_loss"].get(MEAN) else 0
    steps, values = of_numbers(Series(*(part[loss.steps >= since] for part in loss)))
    if not len(values):
        return NONE
    best = f"{number(values.min())} at step {steps[values.argmin()]:,}"
    return f"{best}; before step {since:,} it had other shares" if since else best


def last(series: Optional[Series]) -> str:
    """The last point of a line that is a number."""
    values = [] if series is None else of_numbers(series).values
    return number(values[-1]) if len(values) else NONE


def of_numbers(series: Series) -> Series:
    """The points that are numbers."""
    return Series(*(part[np.isfinite(series.values)] for part in series))


def wall_clock(run: Run) -> str:
    """From the first event to the last, in words."""
    times = []
    for event in run.events:
        with suppress(TypeError, ValueError):
            time = datetime.fromisoformat(event.get("time"))
            times.append(time if time.tzinfo else time.replace(tzinfo=timezone.utc))
    if len(times) < 2:
        return "without evaluations and saves"
    return f"{duration((times[-1] - times[0]).total_seconds())} from start to end, with pauses"


def compared(runs: Sequence[Run]) -> Table:
    """The figures that decide, a line a run."""
    found = []
    for i, run in enumerate(runs):
        (_, loss, best), (_, tokens, step), (_, rate, _), (_, time, _), (_, ended, _) = headline(run)
        ended = Markup('<span class="badge {}">{}</span>').format(run.ending()[0], ended)
        found.append([named(runs, i), loss, best.removeprefix("best "), tokens, step, rate, time, ended])
    return ["Run", "Validation loss", "Best", "Tokens", "Step", "Tokens/s", "Time in training", "How it ended"], found


def losses(runs: Sequence[Run]) -> Table:
    """Of each run the last training loss, and of each set the last and the best validation loss."""
    of_runs = [run.numbers.get("eval_loss", {}) | run.numbers.get("copy", {}) for run in runs]
    sets = list(dict.fromkeys(name for of_run in of_runs for name in of_run if name not in (MEAN, AVERAGE)))
    found = []
    for i, (run, of_run) in enumerate(zip(runs, of_runs)):
        cells = [_last_and_best(run, of_run[name]) if name in of_run else NONE for name in sets]
        found.append([named(runs, i), last(run.number("loss")), *cells])
    return ["Run", "Training loss", *sets], found


def _last_and_best(run: Run, loss: Series) -> Markup:
    return Markup("{}<br>best {}").format(last(loss), best_of(run, loss))


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
    if on := devices(begun):
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
    paths, most, shares, count = {}, {}, {}, {}
    with suppress(ValueError, TypeError, AttributeError):
        said = mixture_text.parse(run.flags["data_mix"]) if run.flags.get("data_mix") else mixture_text.DataMix((), ())
        paths = {source.name: source.path for source in said.sources}
        most = {
            source.name: f" of at most {float(source.max_epochs):g}" for source in said.sources if source.max_epochs
        }
    if "mixture" in run.progress:
        shares = mixture_of(run.progress).shares_at(max(run.progress["progress"]["position"] - 1, 0))
        count = run.progress["fixed"]["train_rows"]
    found = []
    tokens, epochs = run.numbers.get("sources_tokens", {}), run.numbers.get("sources_epochs", {})
    for name in dict.fromkeys([*tokens, *paths]):
        found.append(
            [
                name,
                f"{100 * shares[name]:.3g} %" if name in shares else NONE,
                number(tokens[name].values[-1]) if name in tokens else NONE,
                f"{epochs[name].values[-1]:.2f}{most.get(name, '')}" if name in epochs else NONE,
                number(count.get(name)),
                paths.get(name, NONE),
            ]
        )
    return (["Source", "Share now", "Tokens read", "Epochs", "Sequences", "Folder"], found) if found else None


# ------------------------------------------------------------------------------- events, samples, flags


def events_table(runs: Sequence[Run], events: Sequence[Sequence[Event]]) -> Table:
    """The events of all runs, saves in a row as one."""
    several = len(runs) > 1
    found = [
        [
            *[run.name] * several,
            f"{event.step:,}" + (f" to {event.last_step:,}" if event.last_step is not None else ""),
            event.time.replace("T", " ").removesuffix("+00:00"),
            KINDS[event.kind].title,
            event.words,
        ]
        for run, of_run in zip(runs, events)
        for event in rows(of_run)
    ]
    return [*["Run"] * several, "Step", "Time (UTC)", "Event", "What"], found


def samples(runs: Sequence[Run]) -> dict[str, list[tuple[str, Markup | str, str]]]:
    """{prompt: [(step, run, text)]}: what the models made of it, by steps."""
    found: dict[str, list[tuple[str, Markup | str, str]]] = {}
    every = [(sample["step"], i, sample) for i, run in enumerate(runs) for sample in run.samples]
    for step, i, sample in sorted(every, key=lambda item: item[:2]):
        # A small model likes to write long runs of empty lines.
        text = re.sub(r"\n\s*\n\s*\n", lambda found: f"\n[{found[0].count(chr(10))} line breaks]\n", sample["text"])
        label = named(runs, i) if len(runs) > 1 else ""
        found.setdefault(sample["prompt"], []).append((f"{step:,}", label, text or "[nothing]"))
    return found


def differing_flags(runs: Sequence[Run]) -> Table:
    """The flags that aren't the same in all runs."""
    found = []
    for name in dict.fromkeys(name for run in runs for name in run.flags):
        values = [shown(run.flags[name]) if name in run.flags else NONE for run in runs]
        if name not in NOT_COMPARED and len(set(values)) > 1:
            found.append([name, *values])
    return ["Flag", *(run.name for run in runs)], found
