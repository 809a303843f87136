"""A run directory -> `Run`, plain data, and what happened to it. Nothing is changed, and nothing
here imports torch.

What is missing or damaged is left out: a run that is still going, or was killed, has a report.
"""

import math
import re
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Optional

import numpy as np

from fabric_llm.base import files, plain_yaml
from fabric_llm.base.faults import DONE, STOPPED, Fault
from fabric_llm.base.names import counted, listed, no_folder
from fabric_llm.checkpoint.keep import METRICS_UNDONE
from fabric_llm.data.periods import PROBES
from fabric_llm.plan import run_status

# Names of an evaluation's curves: the only set, all sets together, and these with averaged weights.
ONE_SET, MEAN, AVERAGE = "validation", "all sets, weighted", "moving average of the weights"


Record = dict[str, Any]  # a line of a log, or a file of a run directory


class Series(NamedTuple):
    """A number over steps: int64 [points] and float64 [points], NaN where the log has none."""

    steps: np.ndarray
    values: np.ndarray


Numbers = dict[str, dict[str, Series]]  # name -> set or source, "" of neither -> its line


@dataclass
class Run:
    """What a run directory says."""

    name: str
    folder: Path
    flags: Record = field(default_factory=dict)  # arguments.yaml
    status: Record = field(default_factory=dict)  # STATUS.json
    numbers: Numbers = field(default_factory=dict)
    # Numbers of the steps that rewinds have undone: one `Run` for each rewind.
    undone: list["Run"] = field(default_factory=list)
    # The step at which the shares of the sets in the mean loss last changed, 0 if they never did.
    shares_since: int = 0
    verdicts: list[Record] = field(default_factory=list)  # lines of metrics.jsonl
    events: list[Record] = field(default_factory=list)  # events.jsonl
    samples: list[Record] = field(default_factory=list)  # samples.jsonl
    timeline: list["Event"] = field(default_factory=list)  # of events and verdicts
    checkpoints: list[int] = field(default_factory=list)  # their steps
    notes: list[str] = field(default_factory=list)  # what couldn't be read
    wrong: list[str] = field(default_factory=list)  # sets that are above their budget

    @property
    def begun(self) -> Record:
        """The last start of the run, {} where none was recorded."""
        return next((e for e in reversed(self.events) if e["event"] in ("started", "resumed")), {})

    def number(self, name: str) -> Optional[Series]:
        """A number that is of no set or source."""
        return self.numbers.get(name, {}).get("")

    def tokens_at(self, steps: np.ndarray) -> list[int]:
        """The tokens that were read after `steps`, between logged lines as if each step had as
        many."""
        known = self.number("tokens") or Series(np.array([]), np.array([]))
        # A run begins with 0 tokens at step 0.
        xs, ys = np.append(0, known.steps), np.append(0, known.values)
        return np.interp(steps, xs, ys).astype(np.int64).tolist()

    def ending(self) -> tuple[str, str, str]:
        """(kind, words, sentence): how the run ended, and why. kind: good, going, stopped or bad.
        The sentence may be ""."""
        code, reason = self.status.get("code"), self.status.get("reason") or ""
        if not self.status:
            return "going", "Not known: no STATUS.json", ""
        # A run writes its code when it ends, which a kill prevents.
        if code is None:
            return "going", "Running, or killed", ""
        if code == DONE and self.wrong:
            return "stopped", "Done, with warnings", " ".join(self.wrong)
        if code == DONE:
            return "good", "Done", ""
        sentence = f"{reason[:1].upper()}{reason[1:]} (exit code {code})"
        if code == STOPPED:
            return "stopped", "Stopped", sentence
        return "bad", "Failed", sentence


def read_run(folder: Path) -> Run:
    """What the run directory `folder` says. Raises Fault (2) if it isn't one."""
    if not folder.is_dir():
        raise Fault(no_folder("run", folder))
    # A common mistake: the checkpoint inside of the run is given instead.
    if (folder / "trainer").is_dir():
        raise Fault(f"{str(folder)!r} is a checkpoint; its run is {str(folder.parent)!r}.")
    if not any((folder / name).is_file() for name in ("metrics.jsonl", "arguments.yaml")):
        # The directory above runs is given easily, so the message names those in it.
        inside = sorted(path.parent.name for path in folder.glob("*/metrics.jsonl"))
        held = ""
        if inside:
            held = f" It holds the runs {listed(inside)}."
        raise Fault(
            f"{str(folder)!r} isn't a run: it has neither metrics.jsonl nor arguments.yaml.{held}"
        )
    run = Run(folder.resolve().name, folder, status=run_status.read_status(folder))
    with suppress(OSError, ValueError):
        # A damaged file leaves the flags out, and the rest is shown.
        flags = plain_yaml.read_yaml(folder / "arguments.yaml")
        run.flags = flags if isinstance(flags, dict) else {}
    run.events = run_status.read_events(folder)
    run.checkpoints = [files.step_of(path) for path in files.checkpoints(folder)]
    fill(run, _lines(run))
    _fill_undone(run)
    # The last evaluation decides, as in the run itself: a resumed run may have left a budget out.
    forgotten, last = run.numbers["eval_forgotten"], last_step(run, "eval_")
    for name, budget in run.numbers["eval_budget"].items():
        if name not in forgotten or {budget.steps[-1], forgotten[name].steps[-1]} != {last}:
            continue
        rise, most = forgotten[name].values[-1], budget.values[-1]
        if not rise <= most:  # a loss that is NaN is above any budget
            run.wrong.append(
                f"{name} is {rise:.4f} nats above its loss before step 1, and its budget is "
                f"{most:g}."
            )
    samples = {}
    for _, record in files.json_lines(folder / "samples.jsonl"):
        if {"step", "prompt", "text"} <= record.keys():
            # Of a step that was made twice, after a rewind, the later sample counts.
            samples[record["step"], record["prompt"]] = record
    run.samples = sorted(samples.values(), key=lambda record: record["step"])
    run.timeline = timeline(run)
    return run


def last_step(run: Run, prefix: str = "") -> int:
    """The last step of any number whose name begins so, 0 without one."""
    steps = [0]
    for name, of_sets in run.numbers.items():
        if name.startswith(prefix):
            steps += [int(series.steps[-1]) for series in of_sets.values()]
    return max(steps)


# ------------------------------------------------------------------------------- metrics.jsonl


def _lines(run: Run, name: str = "metrics.jsonl") -> Iterator[Record]:
    """The lines of a log. A note of the run names the first that can't be read."""
    for number, (_, record) in enumerate(files.json_lines(run.folder / name), 1):
        # True and False are ints as well for isinstance, and no step.
        if type(record.get("step")) is type(record.get("tokens", 0)) is int:
            yield record
        elif not run.notes:
            run.notes.append(
                f"{name}: line {number:,} can't be read. A kill leaves the last line cut off."
            )


def _fill_undone(run: Run) -> None:
    """Add the numbers of undone steps. In their log, each rewind begins with a line that has
    `undone`."""
    parts: list[list[Record]] = []
    for record in _lines(run, METRICS_UNDONE):
        if "undone" in record:
            parts.append([])
        elif parts:
            parts[-1].append(record)
    for lines in parts:
        run.undone.append(Run(run.name, run.folder))
        fill(run.undone[-1], lines)


# (name, set or source or ""): steps and values
Columns = dict[tuple[str, str], tuple[array, array]]


def fill(run: Run, lines: Iterable[Record]) -> None:
    """Add the numbers of the lines to the run; sort its sets, and name what is of all of them."""
    # array holds plain numbers: a long run has millions, which lists would make objects of.
    columns: Columns = defaultdict(lambda: (array("q"), array("d")))
    sources: dict[str, None] = {}  # in the order of the log
    last = None  # shares
    for record in lines:
        if "verdict" in record:
            run.verdicts.append(record)
            continue
        _collect(columns, record["step"], record)
        shares = record.get("shares")
        if not isinstance(shares, dict):
            continue
        sources.update(dict.fromkeys(shares))
        for name in sources:  # one that isn't named is not read
            _collect(columns, record["step"], {"share": shares.get(name, 0.0)}, of_what=name)
        if last not in (None, shares):
            run.shares_since = record["step"]
        last = shares
    # A number that is never there, such as the loss of a set without targets, has no curve.
    numbers: Numbers = defaultdict(dict)
    for (name, of_what), column in columns.items():
        series = Series(*map(np.array, column))
        if name != "step" and not np.isnan(series.values).all():
            numbers[name][of_what] = series
    # Shares that never change are no curves.
    if not run.shares_since:
        numbers.pop("share", None)
    losses = dict(sorted(numbers["eval_loss"].items()))
    # Probes aren't text, so their losses have a figure of their own.
    numbers["copy"] = {name: losses.pop(name) for name in PROBES if name in losses}
    numbers["eval_loss"] = _named_losses(losses, numbers)
    numbers["forgetting"] = _forgetting(numbers)
    for figure, (pattern, words) in IN_NAMES.items():
        numbers[figure] = _of_names(numbers, pattern, words)
    run.numbers = numbers


# Figures of numbers that have something in their names: the pattern of these names, and what the
# figure calls one, by the set and what is in its name.
IN_NAMES = {
    # of the tokens of a document with so many before them
    "by_position": (r"eval_loss_from_(\d+)", "{} from {:,}"),
    "retrieval": (r"eval_accuracy_of_(\d+)", "{} from {:,} tokens"),
    "tasks": (r"eval_accuracy_of_(?!\d+(?:_at_\d+)?$)(.+)", "{}: {}"),
}


def _of_names(numbers: Numbers, pattern: str, words: str) -> dict[str, Series]:
    """{words: Series} of all numbers whose names match the pattern."""
    series = {}
    for name, of_sets in numbers.items():
        match = re.fullmatch(pattern, name)
        if match is None:
            continue
        inside: Any = match[1]
        # So that the words have separators of thousands.
        if inside.isdecimal():
            inside = int(inside)
        for of_what, one in of_sets.items():
            series[words.format(of_what, inside)] = one
    return series


def _named_losses(losses: dict[str, Series], numbers: Numbers) -> dict[str, Series]:
    """The losses of sets: first the mean of all sets, last that of the averaged weights. Without
    the mean where there is a single set, whose loss is the same number."""
    mean = losses.pop("", None)
    named = dict(losses)
    if mean is not None and list(losses) != [ONE_SET]:
        name = MEAN if losses or numbers["copy"] else ONE_SET
        named = {name: mean, **losses}
    if average := numbers["eval_loss_ema"].get(""):
        named[AVERAGE] = average
    return named


def _forgetting(numbers: Numbers) -> dict[str, Series]:
    """What was forgotten, and the budgets. With budgets only of sets that have one: the others may
    rise, and what is learned falls far."""
    forgotten, budgets = numbers["eval_forgotten"], numbers["eval_budget"]
    if not budgets:
        return dict(forgotten)
    shown = {name: series for name, series in forgotten.items() if name in budgets}
    return shown | {f"budget of {name}": budget for name, budget in budgets.items()}


def parts_read(run: Run) -> list[str]:
    """Of each set that the last evaluation hasn't read to its end, how many rows of how many it
    has, in words."""
    rows, of_rows = run.numbers["eval_rows"], run.numbers["eval_of_rows"]
    words, last = [], last_step(run, "eval_")
    for name in rows:
        # A resumed run may read all rows, which a line doesn't say.
        if name in of_rows and rows[name].steps[-1] == last:
            read, count = rows[name].values[-1], of_rows[name].values[-1]
            words.append(f"{name} on {read:,.0f} of {count:,.0f} rows")
    return words


def rows_changed_at(run: Run, loss: Series) -> int:
    """The step of the first evaluation that read as many rows of the sets behind a loss as the last
    one did, and all since: a run may resume with another --eval_iters. 0 if all did."""
    losses, since = run.numbers["eval_loss"], 0
    sets = [name for name, one in losses.items() if one is loss and name not in (MEAN, AVERAGE)]
    for name in sets or losses:
        # Step -> rows, and of how many. Without these numbers in a line, the loss is of all rows.
        read = defaultdict(list)
        for number in ("eval_rows", "eval_of_rows"):
            for step, count in zip(*run.numbers[number].get(name, ((), ()))):
                read[step].append(count)
        for before, step in pairwise(losses[name].steps):
            if read[before] != read[step]:
                since = max(since, int(step))
    return since


def _collect(
    columns: Columns, step: int, numbers: Mapping[str, Any], prefix: str = "", of_what: str = ""
) -> None:
    """Add the numbers of a line, or of one set or source in it. Null, which stands for NaN, is a
    gap."""
    for name, value in numbers.items():
        if value is None or type(value) in (int, float):
            steps, values = columns[prefix + name, of_what]
            steps.append(step)
            values.append(math.nan if value is None else value)
        elif name in ("eval", "sources") and type(value) is dict and not prefix:
            # A dictionary of sets or sources: their names tell the series of a number apart.
            for one, of_one in value.items():
                if isinstance(of_one, dict):
                    _collect(columns, step, of_one, f"{name}_", one)


# ------------------------------------------------------------------------------- events


# Kinds of events without an upright line in the figures, since all runs have them.
UNMARKED = ("started", "saved", "done")
VERDICTS = {"skip": "skipped", "warn": "spike", "rewind": "rewound", "forgetting": "forgetting"}


class Event(NamedTuple):
    """Something that happened after `step` finished steps."""

    step: int
    # started, resumed, saved, stage, stopped, killed, failed, fell_back, done, or of VERDICTS
    kind: str
    words: str = ""
    time: str = ""  # UTC, as ISO 8601
    position: int = 0  # sequences read by then


def timeline(run: Run) -> list[Event]:
    """All events, ordered by how many sequences had been read, since a rewind takes steps back but
    not these."""
    events: list[Event] = []
    for record in run.events:
        last = events[-1] if events else Event(0, "")
        event = _of_record(record, last)
        if event is None:
            continue
        # A run that was killed can't record it.
        if event.kind in ("started", "resumed") and last.kind not in ("", *ENDS):
            words = "no end was recorded before the next start; this is the last step that was"
            events.append(Event(last.step, "killed", words, position=last.position))
        events.append(event)
    # The last end has no position of its own, and verdicts may have come since the last save.
    end = [events.pop()] if events and events[-1].kind in ENDS else []
    events += map(_of_verdict, run.verdicts)
    return [*sorted(events, key=lambda event: event.position), *end]


ENDS = ("stopped", "failed", "done", "fell_back")  # kinds of events


def _of_record(record: Record, last: Event) -> Optional[Event]:
    """The event of a line of events.jsonl, with step and position of the `last` event where it has
    none. None for kinds that the timeline doesn't show."""
    kind, words = record["event"], ""
    if kind in ("started", "resumed"):
        source = ""
        if record.get("from"):
            random = "random weights, " if record.get("random") else ""
            source = f"from {random}{record['from']}"
        words = "; ".join(filter(None, [devices(record), record.get("strategy"), source]))
    elif kind in ("saved", "stage"):
        words = _shares(record)
    elif kind in ("fell_back", "ended"):
        code, words = record.get("code"), record.get("reason") or ""
        if kind == "ended":
            kind = {DONE: "done", STOPPED: "stopped"}.get(code, "failed")
        if kind == "failed":
            words += f" (exit code {code})"
    else:
        return None
    place = {"step": last.step, "position": last.position}
    for name in place:
        if type(record.get(name)) is int:
            place[name] = record[name]
    return Event(kind=kind, words=words, time=record.get("time") or "", **place)


def _of_verdict(record: Record) -> Event:
    """The event of a line of metrics.jsonl about a step that wasn't taken, or about forgetting."""
    verdict, tokens = record.get("verdict") or "", record.get("discarded_tokens")
    # A verdict on a step names the first sequence of its batch.
    begins = record.get("from_position", record.get("position"))
    words = [record.get("reason") or verdict]
    if begins is not None:
        words.append(f"at sequence {begins:,}")
    if tokens is not None:
        words.append(f"{tokens:,} tokens discarded")
    words.append(_shares(record))
    kind, time = VERDICTS.get(verdict, "spike"), record.get("time") or ""
    return Event(
        record["step"], kind, "; ".join(filter(None, words)), time, record.get("position", 0)
    )


def _shares(record: Record) -> str:
    """The shares of the sources from there on, in words, "" where the record has none."""
    known = record.get("shares") or {}
    if not known:
        return ""
    words = [f"{name} {100 * share:.3g} %" for name, share in known.items() if type(share) is float]
    return f"from here on {', '.join(words)}"


def devices(beginning: Record) -> str:
    """The devices that a start was on, in words, "" where it doesn't say."""
    count, nodes = beginning.get("devices"), beginning.get("nodes")
    if count is None:
        return ""
    words = counted(count, f"{beginning.get('kind')} device")
    if nodes is not None and nodes > 1:
        words += f" of {nodes} machines"
    return words
