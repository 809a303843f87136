"""A run directory -> `Run`, plain data. Nothing is changed, and nothing here imports torch.

What is missing or damaged is left out: a run that is still going, was killed, or was written by an older version has a report.
"""

from __future__ import annotations

import json
import math
import os
import socket
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Optional

import numpy as np

from fabric_llm.base import plain_yaml, step_names
from fabric_llm.base.faults import DONE, STOPPED, Fault
from fabric_llm.base.names import nearest_of
from fabric_llm.plan import events as history
from fabric_llm.verify.inspect_log import records

ONE_SET, MEAN, COPY = (
    "validation",
    "mean",
    "copy",
)  # sets of an evaluation: the only one, all together, the copying probe
MOST_SAMPLES = 4000  # lines of samples.jsonl
LARGEST = 1e300  # of a number
MOST_STEPS = 2**53  # far beyond any run, and what JSON holds
MOST_NAMED = 5  # lines of metrics.jsonl that can't be read


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
    numbers: dict[str, Series] = field(default_factory=dict)  # of training lines, by name
    sets: dict[str, dict[str, Series]] = field(default_factory=dict)  # of evaluations: set -> loss, budget, ... by name
    drift: Optional[Series] = None  # distance of the weights from the base, of evaluations
    average: Optional[Series] = None  # loss of the moving average of the weights, of evaluations
    shares: list[tuple[int, dict[str, Any]]] = field(default_factory=list)  # in the mean: (step, new shares)
    sources: dict[str, dict[str, Series]] = field(default_factory=dict)  # of a mixture: source -> tokens, epochs
    verdicts: list[dict[str, Any]] = field(default_factory=list)  # lines of metrics.jsonl
    events: list[dict[str, Any]] = field(default_factory=list)  # events.jsonl
    samples: list[dict[str, Any]] = field(default_factory=list)  # samples.jsonl
    checkpoints: list[int] = field(default_factory=list)  # steps of those that are there
    notes: list[str] = field(default_factory=list)  # what couldn't be read
    wrong: list[str] = field(default_factory=list)  # what isn't as it should be, also if the run is done
    discarded: list[Run] = field(default_factory=list)  # numbers and evaluations of work that was undone, one each time
    tokens_before: int = 0  # of undone work: where it began

    @property
    def begun(self) -> dict[str, Any]:
        """The last start of the run, {} where none was recorded."""
        return next((e for e in reversed(self.events) if e["event"] in ("started", "resumed")), {})

    @property
    def last_step(self) -> int:
        """The last step that the log has a line of."""
        return max((int(series.steps[-1]) for series in self._all_series() if len(series.steps)), default=0)

    def tokens_at(self, steps: np.ndarray) -> np.ndarray:
        """The tokens that were read after `steps`, between logged lines as if each step had as many. float64, same shape."""
        known = self.numbers.get("tokens")
        if known is None:
            return np.full(len(steps), np.nan)
        xs, ys = np.append(0, known.steps), np.append(0.0, known.values)
        keep = np.append(True, np.diff(xs) > 0)
        return np.interp(steps, xs[keep], ys[keep])

    def training_seconds(self) -> float:
        """Seconds of training proper, without evaluations and saves: tokens over tokens per second of each logged line."""
        if not {"tokens", "tokens_per_second"} <= self.numbers.keys():
            return 0.0
        tokens, rates = self.numbers["tokens"], self.numbers["tokens_per_second"]
        rate_at = dict(zip(rates.steps.tolist(), rates.values.tolist()))
        parts = np.diff(tokens.values, prepend=self.tokens_before)
        each = [(part, rate_at.get(step, 0.0)) for step, part in zip(tokens.steps.tolist(), parts.tolist())]
        return sum(part / rate for part, rate in each if rate > 0 and part > 0)

    def discarded_tokens(self) -> int:
        """The tokens that were read in work that was undone."""
        ends = ((part.numbers["tokens"].values[-1], part) for part in self.discarded if "tokens" in part.numbers)
        return int(sum(max(end - part.tokens_before, 0) for end, part in ends))

    def is_alive(self) -> bool:
        """Whether the process that wrote STATUS.json is there, as far as this machine can say."""
        pid, host = self.status.get("pid"), self.status.get("host")
        return type(pid) is int and host == socket.gethostname() and os.path.exists(f"/proc/{pid}")

    def ending(self) -> tuple[str, str]:
        """(kind, words): how the run ended. kind: good, going, stopped or bad."""
        code = self.status.get("code")
        if not self.status:
            return "going", "Not known: no STATUS.json"
        if code is None:
            return ("going", "Running") if self.is_alive() else ("going", "Running elsewhere, or killed")
        if code == DONE:
            return ("stopped", "Done, with warnings") if self.wrong else ("good", "Done")
        return ("stopped", "Stopped") if code == STOPPED else ("bad", "Failed")

    def told(self) -> str:
        """More than `ending` says, in a sentence: what STATUS.json has for a reason, or what is wrong with a run that is done."""
        code, reason = self.status.get("code"), str(self.status.get("reason", ""))
        if code is None or code == DONE:
            return " ".join(self.wrong) if code == DONE else ""
        return f"{reason[:1].upper()}{reason[1:]} (exit code {code})"

    def _all_series(self) -> Iterable[Series]:
        yield from self.numbers.values()
        for named in self.sets.values():
            yield from named.values()


class Columns:
    """Numbers of the lines of a log, collected by name."""

    def __init__(self) -> None:
        self.columns: dict[Any, tuple[array, array]] = {}

    def add(self, name: Any, step: int, value: Any) -> None:
        """Add a point. What isn't a number is a gap if it is null, and otherwise left out."""
        kind = type(value)
        if kind is int and abs(value) < LARGEST or value is None:
            value = math.nan if value is None else float(value)
        elif kind is not float:
            return
        column = self.columns.get(name)
        if column is None:
            column = self.columns[name] = array("q"), array("d")
        column[0].append(step)
        column[1].append(value)

    def series(self) -> dict[Any, Series]:
        """All columns; one without any number is left out."""
        found = {name: Series(*map(np.array, column)) for name, column in self.columns.items()}
        return {name: series for name, series in found.items() if not np.isnan(series.values).all()}


def read_run(folder: Path) -> Run:
    """What the run directory `folder` says. Raises Fault (2) if it isn't one."""
    require_run(folder)
    run = Run(folder.resolve().name, folder)
    run.flags = _yaml(folder / "arguments.yaml")
    run.status = _json(folder / "STATUS.json")
    run.events = history.read(folder)
    run.checkpoints = [step_names.step_of(path) for path in step_names.checkpoints(folder)]
    newest = step_names.latest(folder)
    run.progress = {} if newest is None else _json(newest / "trainer" / "progress.json")
    _read_metrics(run)
    _read_samples(run)
    run.wrong = _over_budget(run)
    return run


def _over_budget(run: Run) -> list[str]:
    """What is forgotten in the last evaluation beyond its budget, a sentence for each set."""
    found = []
    for name, named in run.sets.items():
        if {"forgotten", "budget"} <= named.keys():
            rise, most = (named[key].values[-1] for key in ("forgotten", "budget"))
            if rise > most and named["forgotten"].steps[-1] == named["budget"].steps[-1]:
                found.append(f"{name} is {rise:.4f} nats above its loss before step 1, and its budget is {most:g}.")
    return found


def require_run(folder: Path) -> None:
    """Raises Fault (2) if `folder` isn't a run directory."""
    if not folder.is_dir():
        raise Fault(f"No run at {str(folder)!r}.{nearest_of(folder)}")
    if (folder / "trainer").is_dir():
        raise Fault(f"{str(folder)!r} is a checkpoint; its run is {str(folder.parent)!r}.")
    if not any((folder / name).is_file() for name in ("metrics.jsonl", "arguments.yaml")):
        inside = sorted(path.parent.name for path in folder.glob("*/metrics.jsonl"))
        runs = f" It holds the runs {', '.join(inside[:5])}{' ...' if len(inside) > 5 else ''}." if inside else ""
        raise Fault(f"{str(folder)!r} isn't a run: it has neither metrics.jsonl nor arguments.yaml.{runs}")


def _read_metrics(run: Run) -> None:
    """metrics.jsonl, and metrics.discarded.jsonl, in which a line with `discarded` says to which step the run went back."""
    _fill(run, _lines(run, "metrics.jsonl"))
    undone: list[tuple[int, list[dict[str, Any]]]] = []
    for record in _lines(run, "metrics.discarded.jsonl"):
        if "discarded" in record:
            undone.append((record["step"], []))
        elif undone:
            undone[-1][1].append(record)
    for step, lines in undone:
        [tokens] = np.nan_to_num(run.tokens_at(np.array([step])))
        run.discarded.append(Run(run.name, run.folder, tokens_before=int(tokens)))
        _fill(run.discarded[-1], lines)


def _lines(run: Run, name: str) -> Iterator[dict[str, Any]]:
    """The lines of a log of the run; those that can't be read are named in `run.notes`."""
    file, damaged = run.folder / name, []
    try:
        for number, record, is_whole in records(file) if file.is_file() else ():
            if record is not None and 0 <= record["step"] < MOST_STEPS and 0 <= record.get("tokens", 0) < MOST_STEPS:
                yield record
            elif is_whole or record is not None:
                damaged.append(number)
            else:
                run.notes.append(f"The last line of {name} is cut off, as a kill leaves it; it isn't shown.")
    except OSError as error:
        run.notes.append(f"{name} can't be read: {error.strerror}.")
    if damaged:
        more = f" and {len(damaged) - MOST_NAMED} more" if len(damaged) > MOST_NAMED else ""
        run.notes.append(f"{name}: line {', '.join(map(str, damaged[:MOST_NAMED]))}{more} can't be read.")


def _fill(run: Run, lines: Iterable[dict[str, Any]]) -> None:
    """Add the numbers of the lines to the run."""
    training, others = Columns(), Columns()
    for record in lines:
        _add(run, training, others, record)
    run.numbers = training.series()
    for (kind, *names), series in others.series().items():
        if kind == "set":
            run.sets.setdefault(names[0], {})[names[1]] = series
        elif kind == "source":
            run.sources.setdefault(names[0], {})[names[1]] = series
        elif kind == "average":
            run.average = series
        else:
            run.drift = series
    run.sets = {name: named for name, named in run.sets.items() if "loss" in named}
    if len(run.sets) == 1 and MEAN in run.sets:
        run.sets = {ONE_SET: run.sets[MEAN]}
    elif MEAN in run.sets and [name for name in run.sets if name not in (MEAN, COPY)] == [ONE_SET]:
        del run.sets[MEAN]  # it says the same again


def _add(run: Run, training: Columns, others: Columns, record: Mapping[str, Any]) -> None:
    """One line of metrics.jsonl: of a training step, or of a verdict or an evaluation, whose numbers go to `others`."""
    step = record["step"]
    if "verdict" in record:
        run.verdicts.append(dict(record))
    elif "eval_loss" in record:
        others.add(("set", MEAN, "loss"), step, record["eval_loss"])
        others.add(("drift",), step, record.get("drift"))
        others.add(("average",), step, record.get("eval_loss_ema"))
        if isinstance(shares := record.get("shares"), dict) and (not run.shares or run.shares[-1][1] != shares):
            run.shares.append((step, shares))
        for name, said in _sets_of(record).items():
            for key, value in said.items():
                others.add(("set", str(name), str(key)), step, value)
    else:
        for key, value in record.items():
            if key != "step":
                training.add(key, step, value)
        sources = record.get("sources")
        for name, said in sources.items() if isinstance(sources, dict) else ():
            for key, value in said.items() if isinstance(said, dict) else ():
                others.add(("source", name, key), step, value)


def _sets_of(record: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """{set: its numbers} of an evaluation, as it is logged now, or as mixtures logged it before."""
    said = record.get("eval")
    if isinstance(said, dict):
        return {name: one for name, one in said.items() if isinstance(one, dict)}
    before = record.get("eval_loss_by_source")
    return {name: {"loss": loss} for name, loss in before.items()} if isinstance(before, dict) else {}


def _read_samples(run: Run) -> None:
    """The samples by prompt and step; of a step that was made twice the later ones."""
    found: dict[tuple[str, int], dict[str, Any]] = {}
    file = run.folder / "samples.jsonl"
    if not file.is_file():
        return
    for _, record, _ in records(file):
        if (
            record is not None
            and 0 <= record["step"] < MOST_STEPS
            and isinstance(record.get("prompt"), str)
            and isinstance(record.get("text"), str)
        ):
            key = (record["prompt"], record["step"])
            found.pop(key, None)
            found[key] = record
    run.samples = sorted(found.values(), key=lambda record: record["step"])
    if len(run.samples) > MOST_SAMPLES:
        run.notes.append(f"Of {len(run.samples):,} samples the last {MOST_SAMPLES:,} are shown.")
        run.samples = run.samples[-MOST_SAMPLES:]


def _yaml(file: Path) -> dict[str, Any]:
    try:
        said = plain_yaml.read(file)
    except plain_yaml.NotPlain as error:
        raise Fault(f"{error}.") from error
    except (OSError, ValueError):
        return {}
    return said if isinstance(said, dict) else {}


def _json(file: Path) -> dict[str, Any]:
    try:
        said = json.loads(file.read_text(errors="replace")) if file.is_file() else {}
    except (OSError, ValueError, RecursionError):
        return {}
    return said if isinstance(said, dict) else {}
