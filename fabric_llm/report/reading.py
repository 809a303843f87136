"""A run directory -> `Run`, plain data, and what happened to it. Nothing is changed, and nothing here imports torch.

What is missing or damaged is left out: a run that is still going, or was killed, has a report.
"""

from __future__ import annotations

import json
import math
import os
import socket
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Optional

import numpy as np

from fabric_llm.base import command_line, files
from fabric_llm.base.faults import DONE, STOPPED, Fault
from fabric_llm.base.names import nearest_of
from fabric_llm.checkpoint.keep import read_progress
from fabric_llm.plan import run_directory
from fabric_llm.verify.inspect_log import records

# Sets of an evaluation: the only one, all together, the same with other weights, the copying probe.
ONE_SET, MEAN, AVERAGE, COPY = "validation", "all sets, weighted", "moving average of the weights", "copy"
CERTIFICATE = "certificate.json"
MOST_SAMPLES = 4000  # lines of samples.jsonl
LARGEST_NUMBER = 1e300
LARGEST_COUNT = 2**53  # of steps, tokens and the like: far beyond any run, and what JSON holds
WRITTEN = {  # the type that a run writes, by name, of what is shown
    **dict.fromkeys("step tokens code devices nodes parameters max_step pid position discarded_tokens".split(), int),
    **dict.fromkeys("time kind strategy from model verdict reason host prompt text date_utc".split(), str),
    **dict.fromkeys("shares sources eval counts export newest".split(), dict),
    **dict.fromkeys("findings notes checked".split(), list),
}
EVALUATED = ("eval_loss", "eval_loss_ema", "drift", "eval")  # of a line of an evaluation


class Series(NamedTuple):
    """A number over steps: int64 [points] and float64 [points], NaN where the log has none."""

    steps: np.ndarray
    values: np.ndarray


@dataclass
class Run:
    """What a run directory says."""

    name: str
    folder: Path
    flags: dict[str, Any] = field(default_factory=dict)  # arguments.yaml
    status: dict[str, Any] = field(default_factory=dict)  # STATUS.json
    progress: dict[str, Any] = field(default_factory=dict)  # progress.json of the newest checkpoint
    # name -> set or source, "" of neither -> Series
    numbers: dict[str, dict[str, Series]] = field(default_factory=dict)
    shares: list[tuple[int, dict[str, Any]]] = field(default_factory=list)  # in the mean: (step, new shares)
    verdicts: list[dict[str, Any]] = field(default_factory=list)  # lines of metrics.jsonl
    events: list[dict[str, Any]] = field(default_factory=list)  # events.jsonl
    samples: list[dict[str, Any]] = field(default_factory=list)  # samples.jsonl
    certificate: dict[str, Any] = field(default_factory=dict)  # certificate.json, and whether it `is_of_newest`
    notes: list[str] = field(default_factory=list)  # what couldn't be read
    wrong: list[str] = field(default_factory=list)  # what isn't as it should be, even if the run is done

    @property
    def begun(self) -> dict[str, Any]:
        """The last start of the run, {} where none was recorded."""
        return next((e for e in reversed(self.events) if e["event"] in ("started", "resumed")), {})

    def number(self, name: str) -> Optional[Series]:
        """A number that is of no set or source."""
        return self.numbers.get(name, {}).get("")

    def tokens_at(self, steps: np.ndarray) -> list[int]:
        """The tokens that were read after `steps`, between logged lines as if each step had as many."""
        known = self.number("tokens") or Series(np.array([0]), np.array([0.0]))
        xs, ys = np.append(0, known.steps), np.append(0.0, known.values)
        keep = np.append(True, np.diff(xs) > 0)
        return np.interp(steps, xs[keep], ys[keep]).astype(np.int64).tolist()

    def ending(self) -> tuple[str, str, str]:
        """(kind, words, sentence): how the run ended, and why. kind: good, going, stopped or bad. The sentence may be ""."""
        code, reason = self.status.get("code"), self.status.get("reason") or ""
        if not self.status:
            return "going", "Not known: no STATUS.json", ""
        if code is None:
            is_here = self.status.get("host") == socket.gethostname()
            is_alive = is_here and os.path.exists(f"/proc/{self.status.get('pid')}")
            return "going", "Running" if is_alive else "Running elsewhere, or killed", ""
        if code == DONE:
            return ("stopped", "Done, with warnings", " ".join(self.wrong)) if self.wrong else ("good", "Done", "")
        sentence = f"{reason[:1].upper()}{reason[1:]} (exit code {code})"
        return ("stopped", "Stopped", sentence) if code == STOPPED else ("bad", "Failed", sentence)


def as_written(said: Any) -> dict[str, Any]:
    """A JSON object without the entries that a run can't have written: nobody has to ask again whether a count is one."""

    def fits(name: str, value: Any) -> bool:
        is_of_type = type(value) is WRITTEN.get(name, type(value))
        return value is None or is_of_type and (type(value) is not int or 0 <= value < LARGEST_COUNT)

    return {name: value for name, value in said.items() if fits(name, value)} if isinstance(said, dict) else {}


def read_run(folder: Path) -> Run:
    """What the run directory `folder` says. Raises Fault (2) if it isn't one."""
    if not folder.is_dir():
        raise Fault(f"No run at {str(folder)!r}.{nearest_of(folder)}")
    if (folder / "trainer").is_dir():
        raise Fault(f"{str(folder)!r} is a checkpoint; its run is {str(folder.parent)!r}.")
    if not any((folder / name).is_file() for name in ("metrics.jsonl", "arguments.yaml")):
        inside = ", ".join(sorted(path.parent.name for path in folder.glob("*/metrics.jsonl"))[:5])
        there = f" It holds the runs {inside}." if inside else ""
        raise Fault(f"{str(folder)!r} isn't a run: it has neither metrics.jsonl nor arguments.yaml.{there}")
    run = Run(folder.resolve().name, folder, status=as_written(run_directory.read_status(folder)))
    try:
        flags = command_line.read_yaml(folder / "arguments.yaml")
        run.flags = flags if isinstance(flags, dict) else {}
    except command_line.NotPlain as error:
        raise Fault(f"{error}.") from error
    except (OSError, ValueError):
        pass
    run.events = [as_written(event) for event in run_directory.read_events(folder)]
    run.checkpoints = [files.step_of(path) for path in files.checkpoints(folder)]
    if newest := files.latest(folder):
        with suppress(Fault):  # verify says what is damaged
            run.progress = read_progress(newest)
    fill(run, _lines(run))
    for name, budget in run.numbers["eval_budget"].items():
        forgotten = run.numbers["eval_forgotten"].get(name)
        if forgotten is not None and forgotten.steps[-1] == budget.steps[-1]:
            rise, most = forgotten.values[-1], budget.values[-1]
            if rise > most:
                run.wrong.append(f"{name} is {rise:.4f} nats above its loss before step 1, and its budget is {most:g}.")
    file, samples = folder / "samples.jsonl", {}
    for _, record, _ in records(file):
        record = as_written(record)
        if None not in (record.get(name) for name in ("step", "prompt", "text")):
            samples[record["step"], record["prompt"]] = record  # of a step that was made twice the later ones
    run.samples = sorted(samples.values(), key=lambda record: record["step"])[-MOST_SAMPLES:]
    if len(samples) > MOST_SAMPLES:
        run.notes.append(f"Of {len(samples):,} samples the last {MOST_SAMPLES:,} are shown.")
    return run


def read_certificate(run: Run) -> None:
    """Add what verify has last written into the run directory, and whether it is about the newest checkpoint."""
    with suppress(OSError, ValueError, RecursionError):
        said = as_written(json.loads((run.folder / CERTIFICATE).read_text(errors="replace")))
        if said.get("verdict") is not None:
            newest, hashed = files.latest(run.folder), (said.get("newest") or {}).get("manifest_sha256")
            is_of_newest = newest is not None and files.sha256(newest / files.MANIFEST) == hashed
            run.certificate = {**said, "is_of_newest": is_of_newest}
            if said["verdict"] != "whole":
                run.wrong.append("The certificate below says what is damaged.")


# ------------------------------------------------------------------------------- metrics.jsonl


def _lines(run: Run) -> Iterator[dict[str, Any]]:
    """The lines of metrics.jsonl. A note of the run says how many can't be read."""
    file, damaged = run.folder / "metrics.jsonl", []
    for number, record, _ in records(file):
        if record is not None and all(0 <= record.get(name, 0) < LARGEST_COUNT for name in ("step", "tokens")):
            yield record
        else:
            damaged.append(number)
    if damaged:
        first = f"metrics.jsonl: {len(damaged):,} lines can't be read, the first is line {damaged[0]:,}"
        run.notes.append(f"{first}. A kill leaves the last line cut off.")


Columns = dict[tuple[str, str], tuple[array, array]]  # (name, set or source or ""): steps and values


def fill(run: Run, lines: Iterable[dict[str, Any]]) -> None:
    """Add the numbers of the lines to the run; sort its sets, and name what is of all of them.

    What is forgotten is computed of each set where the run has no budgets.
    """
    columns: Columns = defaultdict(lambda: (array("q"), array("d")))
    for record in lines:
        if "verdict" in record:
            run.verdicts.append(as_written(record))
        elif "eval_loss" in record:
            _collect(columns, record["step"], {name: record[name] for name in EVALUATED if name in record})
            shares = record.get("shares")
            if isinstance(shares, dict) and (not run.shares or run.shares[-1][1] != shares):
                run.shares.append((record["step"], shares))
        else:
            _collect(columns, record["step"], record)
    numbers: dict[str, dict[str, Series]] = defaultdict(dict, run.numbers)
    for (name, of_what), column in columns.items():
        series = Series(*map(np.array, column))
        if name != "step" and not np.isnan(series.values).all():
            numbers[name][of_what] = series
    losses, forgotten = dict(sorted(numbers["eval_loss"].items())), {}
    known, budgets = numbers["eval_forgotten"], numbers["eval_budget"]
    for name, loss in losses.items():
        if name in budgets if budgets else name not in ("", COPY):
            if name in known:
                forgotten[name] = known[name]
            elif len(loss.steps) > 1 and loss.steps[0] == 0 and math.isfinite(loss.values[0]):
                forgotten[name] = Series(loss.steps, loss.values - loss.values[0])
    mean, copy = losses.pop("", None), losses.pop(COPY, None)
    if mean is not None and list(losses) != [ONE_SET]:  # where it is the only set, the mean says the same again
        losses = {MEAN if losses or copy else ONE_SET: mean, **losses}
    if average := numbers["eval_loss_ema"].get(""):
        losses[AVERAGE] = average
    waits = {"for data": "data_seconds", "for the device and other ranks": "wait_seconds"}
    numbers["waiting"] = {words: numbers.pop(name)[""] for words, name in waits.items() if name in numbers}
    numbers |= {"eval_loss": losses, "eval_forgotten": forgotten, "copy": {} if copy is None else {COPY: copy}}
    run.numbers = numbers


def _collect(columns: Columns, step: int, said: Mapping[str, Any], prefix: str = "", of_what: str = "") -> None:
    """Add the numbers of a line, or of one set or source in it. What no number is stands for is a gap."""
    for name, value in said.items():
        if value is None or type(value) in (int, float):
            steps, values = columns[prefix + name, of_what]
            steps.append(step)
            values.append(float(value) if value is not None and abs(value) < LARGEST_NUMBER else math.nan)
        elif name in ("eval", "sources") and type(value) is dict and not prefix:
            for one, numbers in value.items():
                if isinstance(numbers, dict):
                    _collect(columns, step, numbers, f"{name}_", one)


# ------------------------------------------------------------------------------- events


KINDS = {  # with their titles, in the order of the time line
    "started": "Start",
    "resumed": "Resume",
    "evaluated": "Evaluation",
    "saved": "Checkpoint",
    "spike": "Spike",
    "skipped": "Skipped step",
    "rewound": "Rewind",
    "forgetting": "Forgetting",
    "stage": "Stage",
    "stopped": "Stop",
    "killed": "Killed",
    "failed": "Failed",
    "done": "Done",
}
UNMARKED = ("started", "evaluated", "saved", "done")  # the others have an upright line in all figures
VERDICTS = {"skip": "skipped", "warn": "spike", "rewind": "rewound", "forgetting": "forgetting"}


class Event(NamedTuple):
    """Something that happened after `step` finished steps."""

    step: int
    kind: str  # of KINDS
    words: str = ""
    time: str = ""  # UTC, as ISO 8601


def timeline(run: Run) -> list[Event]:
    """All events, by step; those of one step in the order in which they happened."""
    found: list[Event] = []
    before: dict[str, Any] = {}  # the start of the process that is going
    for event in run.events:
        kind, time, known = event["event"], event.get("time") or "", found[-1].step if found else 0
        step = known if event.get("step") is None else event["step"]
        if kind in ("started", "resumed"):
            if before and found[-1].kind not in ("stopped", "failed", "done"):
                no_end = "no end was recorded before the next start; this is the last step that was"
                found.append(Event(known, "killed", no_end))
            words = [f"on {devices(event)}"] * bool(devices(event)) + [event.get("strategy") or ""]
            source = event.get("from") or ""
            if source and kind == "started":
                words.append(f"random weights, {source}" if event.get("random") else f"from {source}")
            elif source:
                words.append(f"from {source.rpartition('/')[2]}")
            if before and devices(before) != devices(event):
                words.append(f"before: on {devices(before)}")
            found.append(Event(step, kind, "; ".join(filter(None, words)), time))
            before = event
        elif kind == "saved":
            found.append(Event(step, kind, f"step-{step:08d}", time))
        elif kind == "stage":
            found.append(Event(step, kind, _shares(event), time))
        elif kind == "ended":
            code, reason = event.get("code"), event.get("reason") or ""
            ending = {DONE: "done", STOPPED: "stopped"}.get(code, "failed")
            found.append(Event(step, ending, f"{reason} (exit code {code})" if ending == "failed" else reason, time))
    for said in run.verdicts:
        name, position, tokens = said.get("verdict") or "", said.get("position"), said.get("discarded_tokens")
        words = [said.get("reason") or name, "" if position is None else f"at sequence {position:,}"]
        words += ["" if tokens is None else f"{tokens:,} tokens discarded", _shares(said)]
        kind, time = VERDICTS.get(name, "spike"), said.get("time") or ""
        found.append(Event(said["step"], kind, "; ".join(filter(None, words)), time))
    return sorted(found, key=lambda event: event.step)


def _shares(said: dict[str, Any]) -> str:
    """The shares of the sources from there on, in words, "" where none are said."""
    known = said.get("shares") or {}
    words = (f"{name} {100 * share:.3g} %" for name, share in known.items() if type(share) is float)
    return f"from here on {', '.join(words)}" if known else ""


def devices(beginning: dict[str, Any]) -> str:
    """The devices that a start was on, in words, "" where it doesn't say."""
    count, nodes = beginning.get("devices"), beginning.get("nodes")
    if count is None:
        return ""
    on = f"{count} {beginning.get('kind')} device{'s' * (count != 1)}"
    return f"{on} of {nodes} machines" if nodes is not None and nodes > 1 else on
