"""Each section of the report as HTML: `body` puts them together."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Optional

from fabric_llm.report import summary
from fabric_llm.report.figures import Figure, dashes_of
from fabric_llm.report.page import Html, chart, controls, header, navigation, section, swatch, table, terms, text
from fabric_llm.report.reading import MEAN, Run
from fabric_llm.report.timeline import KINDS, Event, rows

MOST_FINDINGS = 20
LONG_FIGURE = 12  # characters from which a figure of the headline is set smaller
TITLES = {
    "setup": "Setup",
    "curves": "Curves",
    "events": "Events",
    "samples": "Samples",
    "certificate": "Certificate",
    "flags": "Flags",
}
Certificates = list[
    tuple[dict[str, Any], Optional[dict[str, Any]]]
]  # of each run: the quick checks, a whole certificate


def body(
    runs: Sequence[Run],
    found: Sequence[Figure],
    events: Sequence[Sequence[Event]],
    certificates: Certificates,
    made: str,
) -> str:
    """Everything that is seen. events, certificates: of each run. made: when and with what."""
    names = [run.name for run in runs]
    title = names[0] if len(runs) == 1 else f"{len(runs)} runs compared"
    lead = in_a_sentence(runs[0]) if len(runs) == 1 else ", ".join(names)
    problems = "".join(f'<p class="problem">{text(note)}</p>' for note in _notes(runs))
    parts = {
        "setup": setup(runs),
        "curves": curves(found, names),
        "events": happened(runs, events),
        "samples": samples(runs),
        "certificate": certificate(runs, certificates),
        "flags": flags(runs),
    }
    return "\n".join(
        (
            header("Training report", title, lead),
            navigation(TITLES),
            f'<main id="main">{headline(runs)}{problems}',
            *(section(name, TITLES[name], inside) for name, inside in parts.items()),
            f"</main><footer>{text(made)}</footer>",
        )
    )


def in_a_sentence(run: Run) -> str:
    """What was trained on what."""
    said = dict(summary.facts(run))
    on = ", ".join(run.sources) if run.sources else str(run.flags.get("train_data_dir") or "")
    words = [
        said.get("Model", ""),
        f"trained on {on}" if on else "",
        said.get("Precision", ""),
        said.get("Devices", ""),
    ]
    return "; ".join(word for word in words if word)


def _notes(runs: Sequence[Run]) -> list[str]:
    if len(runs) == 1:
        return runs[0].notes
    return [f"{run.name}: {note}" for run in runs for note in filter(None, [run.told(), *run.notes])]


def headline(runs: Sequence[Run]) -> str:
    """The five figures that decide: as tiles, or of several runs as a table."""
    if len(runs) == 1:
        kind = runs[0].ending()[0]
        tiles = ""
        for label, figure, below in summary.headline(runs[0]):
            css = f" {kind}" * (label == "How it ended") + " long" * (len(figure) > LONG_FIGURE)
            tiles += f'<div><dt>{text(label)}</dt><dd class="figure{css}">{text(figure)}</dd>'
            tiles += f'<dd class="below">{text(below)}</dd></div>'
        return f'<dl class="headline">{tiles}</dl>'
    sets, losses = summary.losses(runs)
    columns = ["Run", "Training loss", *sets]
    rows_of_sets = [[Html("<br>".join(map(text, cell))) for cell in row] for row in losses]
    compared = [[_named(runs, i), *row] for i, row in enumerate(rows_of_sets)]
    note = '<p class="note">Weighted by other shares, the validation loss of all sets is another number: compare the sets.</p>'
    return (
        f'<div class="compared">{table(summary.COMPARED, _beside(runs), "Runs", (1, 2, 3, 4, 5))}'
        f"<h4>Losses</h4>{table(columns, compared, 'Losses', range(1, len(columns)))}"
        f"{note * any(MEAN in run.sets for run in runs)}</div>"
    )


def _beside(runs: Sequence[Run]) -> list[list[str]]:
    """The five figures that decide, a line a run."""
    found = []
    for i, run in enumerate(runs):
        (_, loss, best), (_, tokens, step), (_, rate, _), (_, time, _), (_, ended, _) = summary.headline(run)
        ended = Html(f'<span class="badge {run.ending()[0]}">{text(ended)}</span>')
        found.append([_named(runs, i), loss, best.removeprefix("best "), tokens, step, rate, time, ended])
    return found


def _named(runs: Sequence[Run], i: int) -> Html:
    """A run's name in its colour."""
    return Html(f"{swatch(i)} {text(runs[i].name)}")


def set_name(name: str) -> str:
    """What a set is called on the page."""
    return "all sets, weighted" if name == MEAN else name


def setup(runs: Sequence[Run]) -> str:
    """What was trained on what."""
    found = ""
    for i, run in enumerate(runs):
        inside = terms(summary.facts(run))
        if mixture := summary.sources(run):
            head = ["Source", "Share now", "Tokens read", "Epochs", "Sequences", "Folder"]
            inside += f"<h4>Mixture</h4>{table(head, mixture, 'Mixture', (1, 2, 3, 4))}"
        found += _of_run(runs, i, inside, is_open=i == 0)
    return found


def _of_run(runs: Sequence[Run], i: int, inside: str, is_open: bool = True) -> str:
    """Of several runs each under its name."""
    if len(runs) == 1:
        return inside
    opened = " open" * is_open
    return f'<details{opened}><summary class="name">{swatch(i)} {text(runs[i].name)}</summary>{inside}</details>'


def curves(found: Sequence[Figure], names: Sequence[str]) -> str:
    """All figures; those of lesser interest are folded."""
    if not found:
        return '<p class="empty">metrics.jsonl has no line to draw yet.</p>'
    dashes = dashes_of(found)
    first, minor = (
        "".join(chart(figure, names, dashes[figure.name]) for figure in found if figure.is_minor == is_minor)
        for is_minor in (False, True)
    )
    note = "Dotted upright lines: what happened then, see Events."
    if any(line.style == "discarded" for figure in found for line in figure.lines):
        note += " Faint lines: what was discarded by a rewind or a kill."
    more = f'<details class="more"><summary>More numbers</summary><div class="charts">{minor}</div></details>'
    return f'{controls(names, note)}<div class="charts">{first}</div>{more if minor else ""}'


def happened(runs: Sequence[Run], events: Sequence[Sequence[Event]]) -> str:
    """The time line and its table."""
    if not any(events):
        return '<p class="empty">Nothing was recorded yet.</p>'
    strip = '<figure class="chart" id="chart-events"><div class="plot" role="img" aria-label="Events over steps"></div></figure>'
    lines = [
        [
            *([run.name] if len(runs) > 1 else []),
            f"{event.step:,}" + (f" to {event.last_step:,}" if event.last_step is not None else ""),
            event.time.replace("T", " ").removesuffix("+00:00"),
            KINDS[event.kind],
            event.words,
        ]
        for run, of_run in zip(runs, events)
        for event in rows(of_run)
    ]
    head = [*(["Run"] if len(runs) > 1 else []), "Step", "Time (UTC)", "Event", "What"]
    tall = " tall" if len(lines) > 14 else ""
    listed = table(head, lines, "Events").replace('class="scroll"', f'class="scroll events{tall}"', 1)
    missing = [run.name for run in runs if not run.events]
    note = '<p class="note">Starts, resumes and times weren\'t recorded by the version that ran this: saves are those still there.</p>'
    return strip + listed + (note if missing else "")


def samples(runs: Sequence[Run]) -> str:
    """What the model made of each prompt, by steps."""
    prompts = list(dict.fromkeys(sample["prompt"] for run in runs for sample in run.samples))
    if not prompts:
        return '<p class="empty">None: train.py --sample_prompts FILE takes them at the start and with each checkpoint.</p>'
    note = '<p class="note">Greedy: the most likely token each time, without chance.</p>'
    return note + "".join(
        f'<div class="sample"><p class="prompt">{text(prompt)}</p><ol>{_continuations(runs, prompt)}</ol></div>'
        for prompt in prompts
    )


def _continuations(runs: Sequence[Run], prompt: str) -> str:
    found = sorted(
        (
            (sample["step"], i, sample)
            for i, run in enumerate(runs)
            for sample in run.samples
            if sample["prompt"] == prompt
        ),
        key=lambda item: item[:2],
    )
    return "".join(
        f'<li><span class="when">{swatch(i) + " " if len(runs) > 1 else ""}step {step:,}'
        f"{'<br>' + text(runs[i].name) if len(runs) > 1 else ''}</span><pre>{text(shortened(sample['text']))}</pre></li>"
        for step, i, sample in found
    )


def shortened(sample: str) -> str:
    """A sample without long runs of empty lines, which a small model likes to write."""
    return re.sub(r"\n\s*\n\s*\n", lambda found: f"\n[{found[0].count(chr(10))} line breaks]\n", sample) or "[nothing]"


# ------------------------------------------------------------------------------- certificate and flags


def certificate(runs: Sequence[Run], certificates: Certificates) -> str:
    """What `python -m fabric_llm.verify` finds."""
    found = ""
    for i, (run, (quick, whole)) in enumerate(zip(runs, certificates)):
        inside = f"<h4>Checked for this report {badge(quick['verdict'])}</h4>{checks(quick)}"
        command = f"python -m fabric_llm.report {run.folder} --verify true"
        if whole is None:
            inside += f'<p class="note">Hashes, tensors and the export were not checked: <code>{text(command)}</code> does.</p>'
        else:
            date = str(whole.get("date_utc", ""))[:19].replace("T", " ")
            inside += f"<h4>Whole certificate of {text(date)} UTC {badge(whole['verdict'])}</h4>{checks(whole)}"
            if not whole.get("is_of_newest", True):
                inside += '<p class="problem">The run has saved since: this certificate isn\'t about its newest checkpoint.</p>'
        found += _of_run(runs, i, inside)
    return found


def badge(verdict: Any) -> str:
    """A verdict in its colour."""
    css = {"whole": "good", "damaged": "bad", "refused": "bad"}.get(str(verdict), "going")
    return f'<span class="badge {css}">{text(verdict)}</span>'


def checks(document: dict[str, Any]) -> str:
    """What was checked, what was found, and what was counted, of a certificate."""
    findings, notes, checked = (_strings(document.get(name)) for name in ("findings", "notes", "checked"))
    css = "open" if findings else ""  # which of them failed is said by the findings
    items = [("wrong", sentence) for sentence in findings[:MOST_FINDINGS]]
    if len(findings) > MOST_FINDINGS:
        items.append(("wrong", f"and {len(findings) - MOST_FINDINGS} more"))
    items += [(css, sentence) for sentence in checked] + [("noted", sentence) for sentence in notes[:MOST_FINDINGS]]
    listed = "".join(f'<li class="{name}">{text(sentence)}</li>' for name, sentence in items)
    counts = {**_numbers(document.get("counts")), **_numbers(document.get("export"))}
    words = [
        f"{name.replace('_', ' ')} {value:,}" if type(value) is int else f"{name.replace('_', ' ')} {value:.4g}"
        for name, value in counts.items()
    ]
    return f'<ul class="checks">{listed}</ul><p class="note">{text(" · ".join(words))}</p>'


def _strings(value: Any) -> list[str]:
    return [str(one) for one in value] if isinstance(value, list) else []


def _numbers(value: Any) -> dict[str, float]:
    pairs = value.items() if isinstance(value, dict) else ()
    return {str(n): one for n, one in pairs if isinstance(one, (int, float)) and not isinstance(one, bool)}


def flags(runs: Sequence[Run]) -> str:
    """Where runs differ, and all flags of each."""
    names, found = [run.name for run in runs], ""
    if len(runs) > 1:
        differing = [[name, *values] for name, values in summary.differing_flags(runs)]
        found = (
            table(["Flag", *names], differing, "Flags that differ")
            if differing
            else '<p class="empty">All flags are equal.</p>'
        )
        found = found.replace('class="scroll"', 'class="scroll wrap"', 1)
    for i, run in enumerate(runs):
        every = terms([(str(name), summary.shown(value)) for name, value in run.flags.items()])
        inside = every if run.flags else '<p class="empty">There is no arguments.yaml.</p>'
        title = "All flags" + (f" of {run.name}" if len(runs) > 1 else "")
        found += f'<details class="more"><summary>{text(title)}</summary>{inside}</details>'
    return found
