"""Inspect what a run has logged: STATUS.json and metrics.jsonl, against its checkpoints.

The checks have the form that is described in inspect_checkpoint.py.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Optional

from fabric_llm.verify.report import Report, listed

Lines = list[tuple[int, dict[str, Any]]]  # of metrics.jsonl: (number of the line, its record)


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
    lines = read_lines(file, over, report)
    training = [(number, record) for number, record in lines if "loss" in record and "tokens" in record]
    evaluation = [(number, record) for number, record in lines if "eval_loss" in record]
    check_order(file, training, report)
    # Steps that the guard skipped or rolled back.
    guarded = {record["step"] for _, record in lines if "verdict" in record}
    taken = [(number, record) for number, record in training if record["step"] not in guarded]
    for some, key in ((taken, "loss"), (taken, "grad_norm"), (evaluation, "eval_loss")):
        if bad := [number for number, record in some if not is_finite(record.get(key))]:
            report.find(f"{str(file)!r} has no finite {key} in line {listed(bad)}.")
    evaluated = Counter(record["step"] for _, record in evaluation)
    if twice := sorted(step for step, count in evaluated.items() if count > 1):
        report.find(f"{str(file)!r} has more than one evaluation of step {listed(twice)}.")
    if late := sorted({record["step"] for _, record in lines if record["step"] > durable}):
        sentence = f"{str(file)!r} has lines of steps {late[0]} to {late[-1]}, after the last checkpoint"
        report.find(f"{sentence}.") if over else report.note(f"{sentence}: a resumed run writes them anew.")
    check_against(file, {record["step"]: record for _, record in training}, durable, documents, report)
    report.count("training_lines", len(training))
    return f"{file.name}: {len(training)} training lines and {len(evaluation)} evaluations, in order"


def is_finite(value: Any) -> bool:
    """Whether `value` is a number that a float can hold."""
    with suppress(OverflowError):
        return isinstance(value, (int, float)) and math.isfinite(value)
    return False


def read_lines(file: Path, over: bool, report: Report) -> Lines:
    """The lines that are JSON objects with a step. Others are reported."""
    lines = []
    for number, record, is_whole in records(file):
        if record is not None:
            lines.append((number, record))
        elif not is_whole and not over:
            report.note(f"the last line of {str(file)!r} was cut off by a kill; a resumed run removes it.")
        else:
            report.find(f"{str(file)!r} line {number} isn't a JSON object with a step and, if any, whole tokens.")
    return lines


def records(file: Path) -> Iterator[tuple[int, Optional[dict[str, Any]], bool]]:
    """Each line of metrics.jsonl: its number, its record, and whether a line break ends it.

    The record is None where the line isn't a JSON object with a step and, if any, whole tokens.
    """
    with file.open(errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            record = None
            with suppress(ValueError, RecursionError):
                record = json.loads(line)
            fits = isinstance(record, dict) and type(record.get("step")) is type(record.get("tokens", 0)) is int
            yield number, record if fits else None, line.endswith("\n")


def check_order(file: Path, training: Lines, report: Report) -> None:
    """Check that steps and tokens only grow."""
    seen: dict[int, int] = {}  # step -> its line
    for (_, before), (number, record) in zip([(0, {"step": 0, "tokens": 0}), *training], training):
        step, where = record["step"], f"{str(file)!r} line {number}"
        if step in seen:
            report.find(f"{where} repeats step {step} of line {seen[step]}.")
        elif step <= before["step"]:
            report.find(f"{where} goes back from step {before['step']} to step {step}.")
        elif record["tokens"] <= before["tokens"]:
            report.find(f"{where} has {record['tokens']} tokens, not more than the {before['tokens']} before.")
        seen.setdefault(step, number)


def check_against(
    file: Path,
    training: dict[int, dict[str, Any]],
    durable: int,
    documents: dict[int, dict[str, Any]],
    report: Report,
) -> None:
    """Check that no step is missing, and that each checkpoint says the same of its step. training: {step: its training line}.

    Each checkpoint records the step at which its process has started, and how often it logs. If all checkpoints of an
    earlier process were pruned, this isn't known, and no line of it is required.
    """
    wanted = set(documents) - {0}  # a save after a step logs
    for saved_at, document in documents.items():
        every, after = document["logged"]["every"], document["logged"]["after"]
        wanted |= {step for step in range(every, min(saved_at, durable) + 1, every) if step > after}
    if missing := sorted(wanted - training.keys()):
        report.find(f"{str(file)!r} has no line of step {listed(missing)}.")
    for step in sorted(documents.keys() & training.keys()):
        said, saved = training[step], documents[step]
        if said["tokens"] != saved["tokens"]:
            report.find(f"{str(file)!r} says {said['tokens']} tokens at step {step}, its checkpoint {saved['tokens']}.")
        if said.get("sources") != saved["sources"]:  # tokens and epochs of each source of a mixture
            report.find(
                f"{str(file)!r} says that {said.get('sources')} was read at step {step}, its checkpoint {saved['sources']}."
            )
