"""Inspect a run: the bytes of its checkpoints, their tensors and the rows they have read, its logs,
and an export.

A check takes a path, facts about it, and a `Report`, to which it adds everything that it finds. It
returns a line that is shown if it has found nothing, see `Report.look`. Nothing is changed.
"""

import math
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Optional

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from fabric_llm.base import files, register
from fabric_llm.base.faults import DONE, NO_CHECKPOINT, REFUSED, STOPPED, Fault, one_line
from fabric_llm.base.names import listed
from fabric_llm.checkpoint import keep
from fabric_llm.checkpoint.state_dicts import saved_shapes
from fabric_llm.checkpoint.trainer_state import EMA, optimizer_state
from fabric_llm.data.mixed_rows import mixed_rows_at
from fabric_llm.data.mixture import mixture_of
from fabric_llm.data.order import ROW_ORDER, STREAM_ORDER, RowsRead, claimed_by
from fabric_llm.model import freezing
from fabric_llm.model.loading import (
    DTYPES,
    checked_skeleton,
    disable_progress_bar,
    load_config,
    open_weights,
)
from fabric_llm.model.weights import PREFIX
from fabric_llm.plan import run_status
from fabric_llm.weights.export import VerificationError, export, read_proof

MAX_ROWS = 2**28  # that are compared: a minute
# What reading a file raises that isn't what it should be.
WRONG_KIND = (KeyError, TypeError, AttributeError)
UNREADABLE = (OSError, ValueError, RuntimeError, SafetensorError, *WRONG_KIND)
say = partial(print, flush=True)


@dataclass
class Report:
    """What was inspected, and what is wrong with it: the whole certificate but its versions and
    date."""

    run: str
    code: int = DONE  # 66 or 77 if something was found
    findings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # worth knowing, but no failure
    counts: dict[str, int] = field(default_factory=dict)
    # Name, step and manifest_sha256 of the newest checkpoint.
    newest: Optional[dict[str, Any]] = None
    export: Optional[dict[str, Any]] = None  # export.Proof

    def find(self, sentence: str, code: int = NO_CHECKPOINT) -> None:
        """Something is wrong. A refusal for security, 77, decides the exit code."""
        self.findings.append(sentence)
        # 77 is larger than 66.
        self.code = max(self.code, code)
        say(f"  WRONG: {sentence}")

    def note(self, sentence: str) -> None:
        self.notes.append(sentence)
        say(f"  Note: {sentence}")

    def count(self, what: str, number: int) -> None:
        self.counts[what] = self.counts.get(what, 0) + number

    def look(self, check: Callable[..., str], path: Path, *facts: Any) -> None:
        """Call `check(path, *facts, self)` and print its line if it finds nothing. Unreadable files
        are a finding."""
        # A check that adds a finding prints it itself, and its good line is then left out.
        before = len(self.findings)
        try:
            good = check(path, *facts, self)
        # Other codes, such as of bad input, would say here that the command was wrong.
        except Fault as fault:
            code = REFUSED if fault.code == REFUSED else NO_CHECKPOINT
            self.find(str(fault), code)
        except UNREADABLE as error:
            self.find(f"{str(path)!r} can't be read: {one_line(error)[:400].rstrip('.')}.")
        if len(self.findings) == before:
            say(f"  {good}")


def verify_run(run: Path, exports: bool) -> Report:
    """Inspect the run directory `run`. exports: also export the newest checkpoint, to compare
    logits."""
    disable_progress_bar()
    report = Report(str(run))
    status = run_status.read_status(run)  # first, because a run that is still going saves more
    documents: dict[int, dict[str, Any]] = {}  # step -> what `verify_checkpoint` returns
    for path in files.step_directories(run):
        before, code = len(report.findings), report.code
        document = verify_checkpoint(path, report)
        # A run that is still going has pruned it, so that its files seemed to be missing.
        if not path.exists():
            # Its findings came of files that vanished while they were read.
            del report.findings[before:]
            report.code = code
            report.note(f"{path.name} was pruned meanwhile.")
        elif document is not None:
            documents[files.step_of(path)] = document
    # What a killed save or a rewind has left, see checkpoint/retention.py.
    for left in sorted(path.name for path in run.iterdir()):
        if left.startswith((".tmp-step-", ".trash-step-", "aside-")):
            report.note(f"{left} isn't a checkpoint of the run and wasn't verified.")
    newest = files.latest(run)
    # The newest step that a restart could go on from.
    durable = 0 if newest is None else files.step_of(newest)
    if newest is None:
        report.find(f"{str(run)!r} holds no complete checkpoint (step-N).")
    else:
        hashed = files.sha256(newest / files.MANIFEST)
        report.newest = {"name": newest.name, "step": durable, "manifest_sha256": hashed}
    # A second signal prevents the save at the end.
    saved_at_the_end = status.get("step") == status.get("last_durable_step")
    # Only then is every line of the log one of a saved step.
    over = status.get("code") in (DONE, STOPPED) and saved_at_the_end
    report.look(check_status, run / run_status.STATUS, status, durable)
    report.look(check_metrics, run / "metrics.jsonl", over, durable, documents)
    # Only an undamaged checkpoint is in `documents`, and an export of another proves nothing.
    if exports and durable in documents:
        stored = [*newest.glob("*.safetensors"), *newest.glob("weights/*.safetensors")]
        size = sum(file.stat().st_size for file in stored)
        advice = "set TMPDIR to a larger disk, or leave it out with --no_export"
        try:
            # The export is as large as the weights that it is made from.
            files.room(Path(tempfile.gettempdir()), size, "The export", advice)
        except Fault as fault:
            # With the exit code of a bad argument: no save has failed.
            raise Fault(str(fault)) from fault
        report.look(check_export, newest)
    elif exports and newest is not None:
        report.note(f"{newest.name} wasn't exported, as something is wrong with it.")
    return report


def verify_checkpoint(path: Path, report: Report) -> Optional[dict[str, Any]]:
    """Inspect the checkpoint `path`. Returns what the log must say as well, None if it is damaged.

    These are the "tokens" and the "position" that it has reached, what was read of each of its
    "sources", how its process has "logged", and what was "evaluated": {"eval_loss" or the name of a
    set: nats}, {} where nothing was.
    """
    say(f"{path}: hashing")
    before = len(report.findings)
    try:
        progress, manifest = keep.verified(path, hashes=True), files.read(path)
    except (Fault, OSError) as first:
        report.find(str(first), getattr(first, "code", NO_CHECKPOINT))
        # The first fault ended `verified`; this names all files.
        for sentence in damaged_files(path):
            if sentence != str(first):
                report.find(sentence)
        say("  What is in it wasn't verified.")
        return None
    # The counts of the certificate are of checkpoints whose bytes are all right.
    sizes = [entry["bytes"] for entry in manifest["files"].values()]
    report.count("checkpoints", 1)
    report.count("files", len(sizes) + 1)
    report.count("bytes", sum(sizes) + (path / files.MANIFEST).stat().st_size)
    say(
        f"  {len(sizes)} files, {sum(sizes):,} bytes as in {files.MANIFEST}; world size "
        f"{manifest.get('world_size')}"
    )
    step, reached = files.step_of(path), progress["progress"]
    # A whole checkpoint under the name of another step would be resumed as that step.
    for name, written in (
        (files.MANIFEST, manifest.get("step")),
        ("trainer/progress.json", reached["step"]),
    ):
        if written != step:
            report.find(f"{str(path / name)!r} is that of step {written}, not of step {step}.")
    report.look(check_shapes, path, progress)
    report.look(check_finite, path)
    report.look(check_rows, path / "trainer" / "progress.json", progress)
    # The log isn't compared with numbers of a damaged checkpoint.
    if len(report.findings) > before:
        return None
    mixture, position = mixture_of(progress), reached["position"]
    # Of one dataset, the log names no sources.
    # The evaluation has taken the shares of the last row that was read.
    read, shares = mixture.read_before(position) or None, mixture.shares_at(max(position - 1, 0))
    evaluated = dict(progress.get("eval_losses") or {})
    if shares.keys() <= evaluated.keys():
        # As the log has it: the mean over the sources by their shares.
        together = sum(share * evaluated[name] for name, share in shares.items())
        evaluated["eval_loss"] = together / sum(shares.values())
    return {
        "tokens": reached["tokens"],
        "sources": read,
        "logged": progress["logged"],
        "position": position,
        "evaluated": evaluated,
    }


def damaged_files(path: Path) -> Iterator[str]:
    """What is wrong with each file of a checkpoint; nothing where its manifest can't be read."""
    with suppress(Fault):
        wrong, entries = f"{str(path)!r} is damaged", files.read(path)["files"]
        # Files that were added to it, then those that are missing or changed.
        for name in sorted(files.unlisted(path, entries)):
            yield f"{wrong}: {name} isn't listed in its {files.MANIFEST}."
        for name, entry in entries.items():
            try:
                files.check_files(path, {name: entry}, True, wrong, NO_CHECKPOINT)
            except Fault as fault:
                yield str(fault)


def check_shapes(path: Path, progress: dict[str, Any], report: Report) -> str:
    """Compare weights and optimizer state with the model of config.json. progress: the content of
    progress.json."""
    config, dtype = load_config(str(path)), DTYPES[progress["fixed"]["precision"]]
    skeleton = checked_skeleton(str(path), config, dtype)
    # Raises Fault, which names what is missing or has another shape.
    open_weights(str(path), config, dtype)
    # A frozen parameter has no optimizer state.
    given = [progress["schedule"].get(flag) for flag in freezing.FLAGS]
    frozen = freezing.frozen_names(skeleton, *given)
    # Every trained parameter has a tensor of its own shape for each moment of the optimizer. One of
    # --code may keep another number of elements, or nothing before a parameter's first gradient.
    moments, kept = {}, progress["optimizer_state"]
    if "optimizer" in register.ONLY:
        kept = [name for name in kept if name == EMA]
    for name, parameter in skeleton.named_parameters():
        if parameter.requires_grad and name not in frozen:
            for moment in kept:
                moments[f"state.{PREFIX}{name}.{moment}"] = tuple(parameter.shape)
    stored, wrong = optimizer_state(path), []
    for name, shape in sorted(moments.items()):
        there = stored.shapes.get(name, "missing")
        if there != shape:
            wrong.append(f"{name} is {there}, in the model {shape}")
    # What a sharded save holds in parts must add up to the whole tensor.
    for name in stored:
        if missing := stored.missing(name):
            wrong.append(f"{name} lacks {missing} elements")
    if wrong:
        report.find(
            f"{str(path / 'trainer' / 'optimizer')!r} isn't that of the model: {listed(wrong)}."
        )
    report.counts["parameters"] = sum(parameter.numel() for parameter in skeleton.parameters())
    count = len(saved_shapes(skeleton))
    return (
        f"{count} weights and {len(moments)} moments have the names and shapes of "
        f"{type(skeleton).__name__}"
    )


def check_finite(path: Path, report: Report) -> str:
    """Read every tensor of every safetensors file, one at a time."""
    say("  reading every tensor")
    count = 0
    for file in sorted(path.rglob("*.safetensors")):
        # One tensor in memory at a time, however large the file is.
        with safe_open(file, framework="pt") as stored:
            names = list(stored.keys())
            bad = [name for name in names if not torch.isfinite(stored.get_tensor(name)).all()]
        count += len(names)
        if bad:
            report.find(f"{str(file)!r} holds NaN or infinity in {listed(bad)}.")
    report.count("tensors", count)
    return f"{count} tensors are finite"


def check_rows(file: Path, progress: dict[str, Any], report: Report) -> str:
    """Compare the rows that all ranks have read, as `progress` of the `file` progress.json records,
    with those of its position."""
    rows, fixed, end = progress["rows_read"], progress["fixed"], progress["progress"]["position"]
    # A count and a sum of hashes over all ranks: the same rows give the same, in any order.
    first, read = rows["from_position"], RowsRead(rows["count"], rows["hash_sum"])
    span = f"{end - first:,} sequences at positions {first:,} to {end - 1:,}"
    mixture, order = mixture_of(progress), fixed.get("row_order")
    # the rows of a stream are their positions
    rows_at = np.asarray if order == STREAM_ORDER else partial(mixed_rows_at, mixture)
    # The checks that need no hashing come first.
    if read.count != end - first:
        report.find(
            f"{str(file)!r} claims {span}, but all ranks together have read {read.count:,}."
        )
    elif read.count == 0:
        return "no row was read yet"
    elif order not in (ROW_ORDER, STREAM_ORDER):
        report.find(
            f"{str(file)!r}: rows are read in the order {order!r}; this version knows {ROW_ORDER}."
        )
    elif sum(mixture.rows) <= 0 or end - first > MAX_ROWS:
        report.note(f"{str(file)!r}: too many rows to compare each.")
        return f"{span} are as many as all ranks together have read"
    elif read != claimed_by(rows_at, first, end):
        report.find(
            f"{str(file)!r} claims {span}, but other rows were read: some twice or out of turn, "
            "others never."
        )
    return f"{span} were each read by one rank"


def check_export(newest: Path, report: Report) -> str:
    """Export the newest checkpoint to a temporary directory, which compares it with plain
    transformers."""
    say(f"{newest}: exporting to compare with plain transformers")
    # The run itself isn't written to.
    with tempfile.TemporaryDirectory(prefix="fabric_llm-verify-") as folder:
        try:
            proof = export(newest, Path(folder) / "export")
        except VerificationError as error:
            report.find(f"{str(newest)!r}, exported, isn't the model that was trained: {error}")
            return ""
    report.export = asdict(proof)
    return read_proof(proof)


def check_status(file: Path, status: dict[str, Any], durable: int, report: Report) -> str:
    """Compare `status`, the content of STATUS.json, with `durable`, the step of the newest
    checkpoint."""
    if not file.is_file():
        report.note(f"there is no {file.name}.")
        return f"no {file.name}"
    # A file without the field isn't the status of a run either.
    if type(status.get("last_durable_step", "")) not in (int, type(None)):
        raise ValueError("it isn't the status of a run")
    saved = status["last_durable_step"]
    # A checkpoint that a rewind has set aside isn't missing.
    if (saved or 0) > durable and not any(file.parent.glob(f"aside-step-{saved:08d}-*")):
        report.find(f"{str(file)!r} says that step {saved} was saved, which isn't there.")
    running = status.get("code") is None
    ended = "still running, or killed" if running else f"code {status['code']}, {status['reason']}"
    return f"{file.name}: {ended}; step {status.get('step')}, last durable step {saved}"


NumberedLine = tuple[int, dict[str, Any]]  # its number in metrics.jsonl, and what it holds


def check_metrics(
    file: Path, over: bool, durable: int, documents: dict[int, dict[str, Any]], report: Report
) -> str:
    """Check that metrics.jsonl holds each step once, in order, and all steps up to `durable`, the
    newest checkpoint's.

    over: the run has ended and saved. documents: {step: what `verify_checkpoint` returns} of each
    undamaged checkpoint.
    """
    name = repr(str(file))
    lines = _numbered_lines(file, over, report)
    training, evaluation, guarded = [], [], set()
    for number, record in lines:
        # One line may be a training line and an evaluation.
        if "loss" in record and "tokens" in record:
            training.append((number, record))
        if "eval_loss" in record:
            evaluation.append((number, record))
        if "verdict" in record:
            guarded.add(record["step"])  # skipped, or rolled back
    _check_order(name, training, report)
    # A step that the guard skipped or undid may have a loss that isn't finite.
    taken = [(number, record) for number, record in training if record["step"] not in guarded]
    for some, key in ((taken, "loss"), (taken, "grad_norm"), (evaluation, "eval_loss")):
        if bad := [number for number, record in some if not is_finite(record.get(key))]:
            report.find(f"{name} has no finite {key} in line {listed(bad)}.")
    evaluated = Counter(record["step"] for _, record in evaluation)
    if twice := sorted(step for step, count in evaluated.items() if count > 1):
        report.find(f"{name} has more than one evaluation of step {listed(twice)}.")
    # A run that ended well has saved after its last line.
    if late := sorted({record["step"] for _, record in lines if record["step"] > durable}):
        sentence = f"{name} has lines of steps {late[0]} to {late[-1]}, after the last checkpoint"
        if over:
            report.find(f"{sentence}.")
        else:
            report.note(f"{sentence}: a resumed run writes them anew.")
    # A rewind may have cut the first line of a process, and the step isn't its first any more.
    begins = [] if guarded else [document["logged"]["after"] + 1 for document in documents.values()]
    _compare_training(
        name, {record["step"]: record for _, record in training}, durable, documents, begins, report
    )
    _compare_evaluations(name, evaluation, documents, report)
    report.count("training_lines", len(training))
    return (
        f"{file.name}: {len(training)} training lines and {len(evaluation)} evaluations, in order"
    )


def _numbered_lines(file: Path, over: bool, report: Report) -> list[NumberedLine]:
    """The lines of metrics.jsonl that have the form of one."""
    lines, name = [], repr(str(file))
    for number, (line, record) in enumerate(files.json_lines(file), 1):
        if type(record.get("step")) is type(record.get("tokens", 0)) is int:
            lines.append((number, record))
        # Only a kill leaves half a line, and only at the end.
        elif not line.endswith("\n") and not over:
            report.note(f"the last line of {name} was cut off by a kill; a resumed run removes it.")
        else:
            report.find(
                f"{name} line {number} isn't a JSON object with a step and, if any, whole tokens."
            )
    return lines


def _check_order(name: str, training: list[NumberedLine], report: Report) -> None:
    """Steps and tokens grow from line to line."""
    places: dict[int, int] = {}  # step -> its line
    before = {"step": 0, "tokens": 0}
    for number, record in training:
        step = record["step"]
        if step in places:
            report.find(f"{name} line {number} repeats step {step} of line {places[step]}.")
        elif step <= before["step"]:
            report.find(
                f"{name} line {number} goes back from step {before['step']} to step {step}."
            )
        elif record["tokens"] <= before["tokens"]:
            report.find(
                f"{name} line {number} has {record['tokens']} tokens, after {before['tokens']}."
            )
        places.setdefault(step, number)
        # Compared with the line before, whatever was wrong with that, so that a jump counts once.
        before = record


def _compare_training(
    name: str,
    logged: dict[int, dict[str, Any]],
    durable: int,
    documents: dict[int, dict[str, Any]],
    begins: list[int],
    report: Report,
) -> None:
    """Compare training lines with checkpoints. logged, documents: by step. begins: the first steps
    of processes, which are logged as well."""
    # Each checkpoint records the step at which its process has started, and how often it logs; a
    # save logs as well. If all checkpoints of an earlier process were pruned, this isn't known, and
    # no line of it is required.
    # Step 0 has no training line.
    wanted = set(documents) - {0} | {step for step in begins if step <= durable}
    for saved_at, document in documents.items():
        every, after = document["logged"]["every"], document["logged"]["after"]
        wanted |= {step for step in range(every, min(saved_at, durable) + 1, every) if step > after}
    if missing := sorted(wanted - logged.keys()):
        report.find(f"{name} has no line of step {listed(missing)}.")
    for step in sorted(documents.keys() & logged.keys()):
        line, document = logged[step], documents[step]
        if line.get("position", document["position"]) != document["position"]:
            continue  # the run has gone back there since
        for key in ("tokens", "sources"):
            if line.get(key) != document.get(key):
                report.find(
                    f"{name} says {line.get(key)} {key} at step {step}, its checkpoint "
                    f"{document.get(key)}."
                )


def _compare_evaluations(
    name: str,
    evaluation: list[NumberedLine],
    documents: dict[int, dict[str, Any]],
    report: Report,
) -> None:
    """Compare lines of evaluations with checkpoints. documents: by step."""
    for number, record in evaluation:
        document = documents.get(record["step"])
        if document is None or record.get("position", document["position"]) != document["position"]:
            continue
        losses = {key: one.get("loss") for key, one in record.get("eval", {}).items()}
        losses["eval_loss"] = record["eval_loss"]
        for key, there in document["evaluated"].items():
            # A log that doesn't name a set isn't wrong about it.
            here = losses.get(key, there)
            # `verify_checkpoint` has computed eval_loss anew, which may round otherwise.
            is_same = is_finite(here) and math.isclose(here, there, rel_tol=1e-9)
            if is_finite(there) and not is_same:
                what = "eval_loss" if key == "eval_loss" else f"loss of {key}"
                words = f"{name} line {number} says {here} as the {what}"
                report.find(f"{words}, the checkpoint of step {record['step']} {there}.")


def is_finite(value: Any) -> bool:
    """Whether `value` is a number that a float can hold."""
    return isinstance(value, (int, float)) and abs(value) <= sys.float_info.max
