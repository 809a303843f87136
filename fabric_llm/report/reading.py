"""A run directory -> `Run`, plain data. Nothing is changed, and nothing here imports torch.

What is missing or damaged is left out: a run that is still going, or was killed, has a report.
"""

from __future__ import annotations

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

from fabric_llm.base import plain_yaml, step_names
from fabric_llm.base.faults import DONE, STOPPED, Fault
from fabric_llm.base.names import nearest_of
from fabric_llm.checkpoint.progress import read_progress
from fabric_llm.plan import run_directory
from fabric_llm.verify.inspect_log import records

# Sets of an evaluation: the only one, all together, the same with other weights, the copying probe.
ONE_SET, MEAN, AVERAGE, COPY = "validation", "all sets, weighted", "moving average of the weights", "copy"
MOST_SAMPLES = 4000  # lines of samples.jsonl
LARGEST_NUMBER = 1e300
LARGEST_COUNT = 2**53  # of steps, tokens and the like: far beyond any run, and what JSON holds
MOST_NAMED = 5  # lines of metrics.jsonl that can't be read
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
    checkpoints: list[int] = field(default_factory=list)  # steps of those that are there
    notes: list[str] = field(default_factory=list)  # what couldn't be read
    wrong: list[str] = field(default_factory=list)  # what isn't as it should be, even if the run is done
    discarded: list[Run] = field(default_factory=list)  # numbers and evaluations of work that was undone, one each time
    tokens_before: int = 0  # of undone work: where it began

    @property
    def begun(self) -> dict[str, Any]:
        """The last start of the run, {} where none was recorded."""
        return next((e for e in reversed(self.events) if e["event"] in ("started", "resumed")), {})

    @property
    def last_step(self) -> int:
        """The last step that the log has a line of."""
        found = [series for named in self.numbers.values() for series in named.values()]
        return max((int(series.steps[-1]) for series in found), default=0)

    def number(self, name: str) -> Optional[Series]:
        """A number that is of no set or source."""
        return self.numbers.get(name, {}).get("")

    def tokens_at(self, steps: np.ndarray) -> np.ndarray:
        """The tokens that were read after `steps`, between logged lines as if each step had as many. float64, same shape."""
        known = self.number("tokens")
        if known is None:
            return np.full(len(steps), np.nan)
        xs, ys = np.append(0, known.steps), np.append(0.0, known.values)
        keep = np.append(True, np.diff(xs) > 0)
        return np.interp(steps, xs[keep], ys[keep])

    def training_seconds(self) -> float:
        """Seconds of training proper, without evaluations and saves: tokens over tokens per second of each logged line."""
        tokens, rates = self.number("tokens"), self.number("tokens_per_second")
        if tokens is None or rates is None:
            return 0.0
        rate_at = dict(zip(rates.steps.tolist(), rates.values.tolist()))
        parts = np.diff(tokens.values, prepend=self.tokens_before)
        each = [(part, rate_at.get(step, 0.0)) for step, part in zip(tokens.steps.tolist(), parts.tolist())]
        return sum(part / rate for part, rate in each if rate > 0 and part > 0)

    def discarded_tokens(self) -> int:
        """The tokens that were read in work that was undone."""
        read = ((part.number("tokens"), part.tokens_before) for part in self.discarded)
        return int(sum(max(tokens.values[-1] - before, 0) for tokens, before in read if tokens is not None))

    def ending(self) -> tuple[str, str]:
        """(kind, words): how the run ended. kind: good, going, stopped or bad."""
        code = self.status.get("code")
        if not self.status:
            return "going", "Not known: no STATUS.json"
        if code is None:
            is_here = self.status.get("host") == socket.gethostname()
            is_alive = is_here and os.path.exists(f"/proc/{self.status.get('pid')}")
            return "going", "Running" if is_alive else "Running elsewhere, or killed"
        if code == DONE:
            return ("stopped", "Done, with warnings") if self.wrong else ("good", "Done")
        return ("stopped", "Stopped") if code == STOPPED else ("bad", "Failed")

    def told(self) -> str:
        """More than `ending` says, in a sentence: what STATUS.json has for a reason, or what is wrong with a run that is done."""
        code, reason = self.status.get("code"), self.status.get("reason") or ""
        if code is None or code == DONE:
            return " ".join(self.wrong) if code == DONE else ""
        return f"{reason[:1].upper()}{reason[1:]} (exit code {code})"


def as_written(said: Any) -> dict[str, Any]:
    """A JSON object without the entries that a run can't have written: nobody has to ask again whether a count is one."""

    def fits(name: str, value: Any) -> bool:
        is_of_type = type(value) is WRITTEN.get(name, type(value))
        return value is None or is_of_type and (type(value) is not int or 0 <= value < LARGEST_COUNT)

    return {name: value for name, value in said.items() if fits(name, value)} if isinstance(said, dict) else {}


def read_run(folder: Path) -> Run:
    """What the run directory `folder` says. Raises Fault (2) if it isn't one."""
    require_run(folder)
    run = Run(folder.resolve().name, folder, status=as_written(run_directory.read_status(folder)))
    try:
        flags = plain_yaml.read(folder / "arguments.yaml")
        run.flags = flags if isinstance(flags, dict) else {}
    except plain_yaml.NotPlain as error:
        raise Fault(f"{error}.") from error
    except (OSError, ValueError):
        pass
    run.events = [as_written(event) for event in run_directory.read_events(folder)]
    run.checkpoints = [step_names.step_of(path) for path in step_names.checkpoints(folder)]
    if newest := step_names.latest(folder):
        with suppress(Fault):  # the certificate says what is damaged
            run.progress = read_progress(newest)
    _read_metrics(run)
    _read_samples(run)
    run.wrong = _over_budget(run)
    return run


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


def _over_budget(run: Run) -> list[str]:
    """What is forgotten in the last evaluation beyond its budget, a sentence for each set."""
    found = []
    for name, budget in run.numbers.get("eval_budget", {}).items():
        forgotten = run.numbers["eval_forgotten"].get(name)
        if forgotten is not None and forgotten.steps[-1] == budget.steps[-1]:
            rise, most = forgotten.values[-1], budget.values[-1]
            if rise > most:
                found.append(f"{name} is {rise:.4f} nats above its loss before step 1, and its budget is {most:g}.")
    return found


# ------------------------------------------------------------------------------- the logs


def _read_metrics(run: Run) -> None:
    """metrics.jsonl, and metrics.discarded.jsonl, in which a line with `discarded` says to which step the run went back."""
    fill(run, _lines(run, "metrics.jsonl"))
    undone: list[tuple[int, list[dict[str, Any]]]] = []
    for record in _lines(run, "metrics.discarded.jsonl"):
        if "discarded" in record:
            undone.append((record["step"], []))
        elif undone:
            undone[-1][1].append(record)
    for step, lines in undone:
        [tokens] = np.nan_to_num(run.tokens_at(np.array([step])))
        run.discarded.append(Run(run.name, run.folder, tokens_before=int(tokens)))
        fill(run.discarded[-1], lines)


def _lines(run: Run, name: str) -> Iterator[dict[str, Any]]:
    """The lines of a log of the run; those that can't be read are named in `run.notes`."""
    file, damaged = run.folder / name, []
    try:
        for number, record, is_whole in records(file) if file.is_file() else ():
            if record is not None and all(0 <= record.get(name, 0) < LARGEST_COUNT for name in ("step", "tokens")):
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


def fill(run: Run, lines: Iterable[dict[str, Any]]) -> None:
    """Add the numbers of the lines to the run."""
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
    for (name, of_what), column in columns.items():
        series = Series(*map(np.array, column))
        if name != "step" and not np.isnan(series.values).all():
            run.numbers.setdefault(name, {})[of_what] = series
    _name_sets(run.numbers)


Columns = dict[tuple[str, str], tuple[array, array]]  # (name, set or source or ""): steps and values


def _collect(columns: Columns, step: int, said: Mapping[str, Any], prefix: str = "", of_what: str = "") -> None:
    """Add the numbers of a line, or of one set or source in it. null is a gap; what isn't a number is left out."""
    for name, value in said.items():
        kind = type(value)
        if kind is int and abs(value) < LARGEST_NUMBER or value is None:
            value = math.nan if value is None else float(value)
        elif name in ("eval", "sources") and kind is dict and not prefix:
            for one, numbers in value.items():
                if isinstance(numbers, dict):
                    _collect(columns, step, numbers, f"{name}_", one)
        if type(value) is float:
            steps, values = columns[prefix + name, of_what]
            steps.append(step)
            values.append(value)


def _name_sets(numbers: dict[str, dict[str, Series]]) -> None:
    """Sort the sets, name what is of all of them, and compute what is forgotten where no budget asks for it."""
    losses = dict(sorted(numbers.get("eval_loss", {}).items()))
    known, budgets = numbers.get("eval_forgotten", {}), numbers.get("eval_budget", {})
    forgotten = {}
    for name, loss in losses.items():
        if name in budgets if budgets else name not in ("", COPY):
            if name in known:
                forgotten[name] = known[name]
            elif len(loss.steps) > 1 and loss.steps[0] == 0 and math.isfinite(loss.values[0]):
                forgotten[name] = Series(loss.steps, loss.values - loss.values[0])
    mean, copy = losses.pop("", None), losses.pop(COPY, None)
    if mean is not None and list(losses) != [ONE_SET]:  # where it is the only set, the mean says the same again
        losses = {MEAN if losses or copy else ONE_SET: mean, **losses}
    if average := numbers.get("eval_loss_ema", {}).get(""):
        losses[AVERAGE] = average
    waits = {"for data": "data_seconds", "for the device and other ranks": "wait_seconds"}
    waiting = {words: numbers.pop(name)[""] for words, name in waits.items() if name in numbers}
    numbers |= {"eval_loss": losses, "eval_forgotten": forgotten, "waiting": waiting}
    numbers["copy"] = {} if copy is None else {COPY: copy}


def _read_samples(run: Run) -> None:
    """The samples by prompt and step; of a step that was made twice the later ones."""
    found: dict[tuple[str, int], dict[str, Any]] = {}
    if not (run.folder / "samples.jsonl").is_file():
        return
    for _, record, _ in records(run.folder / "samples.jsonl"):
        record = as_written(record)
        if None not in (record.get(name) for name in ("step", "prompt", "text")):
            key = (record["prompt"], record["step"])
            found.pop(key, None)
            found[key] = record
    run.samples = sorted(found.values(), key=lambda record: record["step"])
    if len(run.samples) > MOST_SAMPLES:
        run.notes.append(f"Of {len(run.samples):,} samples the last {MOST_SAMPLES:,} are shown.")
        run.samples = run.samples[-MOST_SAMPLES:]
