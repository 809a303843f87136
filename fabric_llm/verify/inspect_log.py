"""`Report`, what is found about a run, and the checks of what it has logged. Nothing here imports torch.

A check takes a path, facts about it, and a `Report`, to which it adds everything that it finds. It returns a line that is
shown if it has found nothing, see `Report.look`. Nothing is changed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

from safetensors import SafetensorError

from fabric_llm.base.faults import DONE, NO_CHECKPOINT, REFUSED, Fault, one_line
from fabric_llm.base.files import json_lines

MOST_NAMED = 10  # names of one kind in a sentence


@dataclass
class Report:
    """What was inspected, and what is wrong with it: the whole certificate but its versions and date."""

    run: str
    code: int = DONE  # 66 or 77 if something was found
    findings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # worth knowing, but no failure
    counts: dict[str, int] = field(default_factory=dict)
    newest: Optional[dict[str, Any]] = None  # name, step and manifest_sha256 of the newest checkpoint
    export: Optional[dict[str, Any]] = None  # export.Proof

    def find(self, sentence: str, code: int = NO_CHECKPOINT) -> None:
        """Something is wrong. A refusal for security, 77, decides the exit code."""
        self.findings.append(sentence)
        self.code = max(self.code, code)
        say(f"  WRONG: {sentence}")

    def note(self, sentence: str) -> None:
        self.notes.append(sentence)
        say(f"  Note: {sentence}")

    def count(self, what: str, number: int) -> None:
        self.counts[what] = self.counts.get(what, 0) + number

    def look(self, check: Callable[..., str], path: Path, *facts: Any) -> None:
        """Call `check(path, *facts, self)` and print its line if it finds nothing. Unreadable files are a finding."""
        before = len(self.findings)
        try:
            good = check(path, *facts, self)
        except Fault as fault:
            self.find(str(fault), fault.code if fault.code == REFUSED else NO_CHECKPOINT)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, SafetensorError) as error:
            self.find(f"{str(path)!r} can't be read: {one_line(error)[:400].rstrip('.')}.")
        if len(self.findings) == before:
            say(f"  {good}")


def say(line: str) -> None:
    print(line, flush=True)


def listed(names: Iterable[Any]) -> str:
    """The first of many names, and how many more there are."""
    words = [str(name) for name in names]
    more = len(words) - MOST_NAMED
    return ", ".join(words[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def check_status(file: Path, status: dict[str, Any], durable: int, report: Report) -> str:
    """Compare `status`, the content of STATUS.json, with `durable`, the step of the newest checkpoint."""
    if not file.is_file():
        report.note(f"there is no {file.name}.")
        return f"no {file.name}"
    if type(status.get("last_durable_step", "")) not in (int, type(None)):
        raise ValueError("it isn't the status of a run")
    said = status["last_durable_step"]
    if (said or 0) > durable and not any(file.parent.glob(f"aside-step-{said:08d}-*")):
        report.find(f"{str(file)!r} says that step {said} was saved, which isn't there.")
    running = status.get("code") is None
    ended = "still running, or killed" if running else f"code {status['code']}, {status['reason']}"
    return f"{file.name}: {ended}; step {status.get('step')}, last durable step {said}"


def check_metrics(file: Path, over: bool, durable: int, documents: dict[int, dict[str, Any]], report: Report) -> str:
    """Check that metrics.jsonl holds each step once, in order, and all steps up to `durable`, the newest checkpoint's.

    over: the run has ended and saved. documents: {step: what `verify_checkpoint` returns} of each undamaged checkpoint.
    """
    lines, name = [], repr(str(file))
    for number, record, is_whole in records(file):
        if record is not None:
            lines.append((number, record))
        elif not is_whole and not over:
            report.note(f"the last line of {name} was cut off by a kill; a resumed run removes it.")
        else:
            report.find(f"{name} line {number} isn't a JSON object with a step and, if any, whole tokens.")
    training = [(number, record) for number, record in lines if "loss" in record and "tokens" in record]
    evaluation = [(number, record) for number, record in lines if "eval_loss" in record]

    places: dict[int, int] = {}  # step -> its line
    before = {"step": 0, "tokens": 0}
    for number, record in training:
        step = record["step"]
        if step in places:
            report.find(f"{name} line {number} repeats step {step} of line {places[step]}.")
        elif step <= before["step"]:
            report.find(f"{name} line {number} goes back from step {before['step']} to step {step}.")
        elif record["tokens"] <= before["tokens"]:
            report.find(f"{name} line {number} has {record['tokens']} tokens, after {before['tokens']}.")
        places.setdefault(step, number)
        before = record

    guarded = {record["step"] for _, record in lines if "verdict" in record}  # skipped, or rolled back
    taken = [(number, record) for number, record in training if record["step"] not in guarded]
    for some, key in ((taken, "loss"), (taken, "grad_norm"), (evaluation, "eval_loss")):
        if bad := [number for number, record in some if not is_finite(record.get(key))]:
            report.find(f"{name} has no finite {key} in line {listed(bad)}.")
    evaluated = Counter(record["step"] for _, record in evaluation)
    if twice := sorted(step for step, count in evaluated.items() if count > 1):
        report.find(f"{name} has more than one evaluation of step {listed(twice)}.")
    if late := sorted({record["step"] for _, record in lines if record["step"] > durable}):
        sentence = f"{name} has lines of steps {late[0]} to {late[-1]}, after the last checkpoint"
        report.find(f"{sentence}.") if over else report.note(f"{sentence}: a resumed run writes them anew.")

    # Each checkpoint records the step at which its process has started, and how often it logs; a save logs as well. If all
    # checkpoints of an earlier process were pruned, this isn't known, and no line of it is required.
    said = {record["step"]: record for _, record in training}
    wanted = set(documents) - {0}
    for saved_at, document in documents.items():
        every, after = document["logged"]["every"], document["logged"]["after"]
        wanted |= {step for step in range(every, min(saved_at, durable) + 1, every) if step > after}
    if missing := sorted(wanted - said.keys()):
        report.find(f"{name} has no line of step {listed(missing)}.")
    for step in sorted(documents.keys() & said.keys()):
        here, there = ({key: one.get(key) for key in ("tokens", "sources")} for one in (said[step], documents[step]))
        for key in here:
            if here[key] != there[key]:
                report.find(f"{name} says {here[key]} {key} at step {step}, its checkpoint {there[key]}.")
    report.count("training_lines", len(training))
    return f"{file.name}: {len(training)} training lines and {len(evaluation)} evaluations, in order"


def is_finite(value: Any) -> bool:
    """Whether `value` is a number that a float can hold."""
    with suppress(OverflowError):
        return isinstance(value, (int, float)) and math.isfinite(value)
    return False


def records(file: Path) -> Iterator[tuple[int, Optional[dict[str, Any]], bool]]:
    """Each line of metrics.jsonl: its number, its record, and whether a line break ends it.

    The record is None where the line isn't a JSON object with a step and, if any, whole tokens.
    """
    for number, (line, record) in enumerate(json_lines(file), 1):
        fits = type(record.get("step")) is type(record.get("tokens", 0)) is int
        yield number, record if fits else None, line.endswith("\n")
