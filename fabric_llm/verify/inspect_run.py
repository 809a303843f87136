"""What is wrong with a run: the files of its checkpoints, the shapes and values in them, STATUS.json, metrics.jsonl.

A check takes a path, facts about it, and a Report, into which it puts all that it finds; it returns a line that is
shown if that was nothing. Nothing is changed. `Report.look` calls it; fabric_llm/verify.py has their order.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

import torch
from safetensors import SafetensorError, safe_open
from torch.distributed.checkpoint import HuggingFaceStorageReader
from transformers import AutoModelForCausalLM

from fabric_llm.base import files
from fabric_llm.base.faults import DONE, NO_CHECKPOINT, REFUSED, Fault
from fabric_llm.checkpoint import state_dicts
from fabric_llm.data.order import RowsRead, claimed_rows
from fabric_llm.model.loading import DTYPES, build_skeleton, load_config

MOST_NAMED = 10  # of the same kind, in one sentence
MOST_ROWS = 2**28  # whose order is computed anew: 2 GiB
Shapes = dict[str, tuple[int, ...]]
Lines = list[tuple[int, dict[str, Any]]]  # of metrics.jsonl: number of the line, what it says


@dataclass
class Report:
    """What was looked at and what is wrong with it. All that a certificate says, but for versions and date."""

    run: str
    code: int = DONE  # 66 or 77 once something was found
    findings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # worth knowing, and no failure
    counts: dict[str, int] = field(default_factory=dict)
    newest: Optional[dict[str, Any]] = None  # name, step and manifest_sha256 of the newest checkpoint
    export: Optional[dict[str, Any]] = None  # export.Proof

    def find(self, sentence: str, code: int = NO_CHECKPOINT) -> None:
        """Something is wrong. What is refused for security decides the exit code."""
        self.findings.append(sentence)
        self.code = max(self.code, code)
        say(f"  WRONG: {sentence}")

    def note(self, sentence: str) -> None:
        """Something that the user may want to know."""
        self.notes.append(sentence)
        say(f"  Note: {sentence}")

    def count(self, what: str, number: int) -> None:
        """Add to one of the certificate's counts."""
        self.counts[what] = self.counts.get(what, 0) + number

    def look(self, check: Callable[..., str], path: Path, *facts: Any) -> None:
        """`check(path, *facts, self)`; that it can't even read its files is a finding."""
        before = len(self.findings)
        try:
            good = check(path, *facts, self)
        except Fault as fault:
            self.find(str(fault), fault.code if fault.code == REFUSED else NO_CHECKPOINT)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, SafetensorError) as error:
            self.find(f"{str(path)!r} can't be read: {' '.join(str(error).split())[:400].rstrip('.')}.")
        if len(self.findings) == before:
            say(f"  {good}")


def say(line: str) -> None:
    """For the user, at once."""
    print(line, flush=True)


def listed(names: Iterable[Any]) -> str:
    """The first of many names, and how many more there are."""
    words = [str(name) for name in names]
    more = len(words) - MOST_NAMED
    return ", ".join(words[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def all_faults(path: Path, first: Fault | OSError) -> list[Fault]:
    """Everything that is wrong with a checkpoint's files, of which `checkpoint.check` raised only the first."""
    if isinstance(first, Fault) and first.code == REFUSED:
        return [first]
    try:
        entries, there = files.read(path)["files"], files.files_in(path)
    except Fault as fault:
        return [fault]
    wrong, faults = f"{str(path)!r} is damaged", []
    for name in sorted({*there, *entries} - {files.MANIFEST}):
        if name.lower().endswith(files.CODE_SUFFIXES):
            return [Fault(f"{str(path / name)!r} could run code when opened (pickle or Python): refused.", REFUSED)]
        if name not in entries:
            faults.append(Fault(f"{wrong}: {name} isn't listed in its {files.MANIFEST}.", NO_CHECKPOINT))
    for name, entry in entries.items():
        try:
            files.check_files(path, {name: entry}, True, wrong, NO_CHECKPOINT)
        except Fault as fault:
            faults.append(fault)
        except OSError as error:  # such as a disk that fails
            faults.append(Fault(f"{wrong}: {name} can't be read: {error.strerror}.", NO_CHECKPOINT))
    return faults or [Fault(str(first), NO_CHECKPOINT)]  # such as an index


def check_shapes(path: Path, progress: dict[str, Any], report: Report) -> str:
    """Weights and optimizer state against the model that config.json describes, built without memory.

    progress: what progress.json says.
    """
    skeleton = build_skeleton(load_config(str(path)), DTYPES[progress["fixed"]["precision"]])
    ties = state_dicts.tied_names(skeleton)
    # with buffers that are saved, such as a router's bias, but without second names of tied weights
    weights = {name: tuple(t.shape) for name, t in skeleton.state_dict().items() if name not in ties}
    if (path / "weights").is_dir():
        wanted = {state_dicts.PREFIX + name: shape for name, shape in weights.items()}
        compare_parts(path / "weights", wanted, report)
    else:
        compare_full(path, weights, ties, report)
    moments = {
        f"state.{state_dicts.PREFIX}{name}.{moment}": tuple(parameter.shape)
        for name, parameter in skeleton.named_parameters()
        for moment in ("exp_avg", "exp_avg_sq")
        if parameter.requires_grad
    }
    compare_parts(path / "trainer" / "optimizer", moments, report, others=True)
    report.counts["parameters"] = sum(parameter.numel() for parameter in skeleton.parameters())
    return f"{len(weights)} weights and {len(moments)} moments have the names and shapes of {type(skeleton).__name__}"


def compare_parts(folder: Path, wanted: Shapes, report: Report, others: bool = False) -> None:
    """Names and shapes that each rank's parts make together, without gaps. others: more names may be there."""
    metadata = HuggingFaceStorageReader(path=str(folder)).read_metadata().state_dict_metadata
    stored = {name: tuple(entry.size) for name, entry in metadata.items() if not others or name in wanted}
    compare_shapes(folder, stored, wanted, report)
    held = {name: sum(math.prod(chunk.sizes) for chunk in entry.chunks) for name, entry in metadata.items()}
    if gaps := sorted(name for name, entry in metadata.items() if held[name] != math.prod(entry.size)):
        report.find(f"{str(folder)!r} holds only some parts of {listed(gaps)}.")


def compare_full(path: Path, wanted: Shapes, ties: set[str], report: Report) -> None:
    """The Hugging Face weights of a full checkpoint, with their index if there is one."""
    stored, places = {}, {}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            stored |= {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}
            places |= dict.fromkeys(opened.keys(), file.name)
    for index in path.glob("*.index.json"):
        said = files.weight_map(index)
        if names := sorted(name for name in said.keys() | places.keys() if said.get(name) != places.get(name)):
            report.find(f"{str(index)!r} doesn't say where these weights are: {listed(names)}.")
    stored = {name: shape for name, shape in stored.items() if name not in ties}
    if stored.keys() == wanted.keys():
        where = next((path / places[name] for name in stored if stored[name] != wanted[name]), path)
        return compare_shapes(where, stored, wanted, report)
    # Names on the hub aren't always those in memory, where experts are fused: transformers knows. It takes the memory.
    _, info = AutoModelForCausalLM.from_pretrained(
        path, output_loading_info=True, ignore_mismatched_sizes=True, use_safetensors=True, trust_remote_code=False
    )
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info[kind]:
            names = listed(sorted(map(str, info[kind])))
            report.find(f"The weights of {str(path)!r} aren't those of its config.json, {kind}: {names}.")


def compare_shapes(where: Path, stored: Shapes, wanted: Shapes, report: Report) -> None:
    """Everything that differs, in one sentence."""
    words = [
        f"{name} is {list(stored[name]) if name in stored else 'missing'}, "
        f"in the model {list(wanted[name]) if name in wanted else 'nothing'}"
        for name in sorted(stored.keys() | wanted.keys())
        if stored.get(name) != wanted.get(name)
    ]
    if words:
        report.find(f"{str(where)!r} doesn't hold the model of its config.json: {listed(words)}.")


def check_finite(path: Path, report: Report) -> str:
    """Every tensor of every safetensors file, one at a time."""
    tensors, files = 0, sorted(path.rglob("*.safetensors"))
    say(f"  reading every tensor of {len(files)} files")
    for file in files:
        with safe_open(file, framework="pt") as opened:
            names = opened.keys()
            bad = [name for name in names if not bool(torch.isfinite(opened.get_tensor(name)).all())]
        tensors += len(names)
        if bad:
            report.find(f"{str(file)!r} holds NaN or infinity in {listed(bad)}.")
    report.count("tensors", tensors)
    return f"{tensors} tensors are finite"


def check_rows(file: Path, progress: dict[str, Any], report: Report) -> str:
    """The rows that all ranks together have read, as a checkpoint recorded them, against those of its position.

    progress: what `file`, the checkpoint's progress.json, says.
    """
    if "rows_read" not in progress:
        report.note(f"{str(file)!r} doesn't record which rows were read: an older version wrote it.")
        return "no record of the rows that were read"
    said, fixed, end = progress["rows_read"], progress["fixed"], progress["progress"]["position"]
    first, read = said["from_position"], RowsRead(said["count"], said["hash_sum"])
    span = f"{end - first:,} sequences at positions {first:,} to {end - 1:,}"
    if read.count != end - first:
        report.find(f"{str(file)!r} claims {span}, but all ranks together have read {read.count:,}.")
        return f"{read.count:,} rows were read, not {end - first:,}"
    if not 0 < fixed["train_rows"] <= MOST_ROWS or end - first > MOST_ROWS:
        report.note(f"{str(file)!r}: too many rows to compare each; their number is right.")
    elif read != claimed_rows(fixed["train_rows"], fixed["seed"], first, end):
        report.find(f"{str(file)!r} claims {span}, but other rows were read: some twice or out of turn, others never.")
        return "other rows were read than those of the run's position"
    return f"{span} were each read by one rank"


def check_status(file: Path, status: dict[str, Any], durable: int, report: Report) -> str:
    """STATUS.json, which said `status`, against the newest checkpoint, whose step is `durable`."""
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
    """metrics.jsonl: each step once, in order, and none missing up to the newest checkpoint, whose step is `durable`.

    over: the run has ended well. documents: step -> manifest of each whole checkpoint, with "tokens" and "logged".
    """
    lines = read_lines(file, over, report)
    training = [(number, record) for number, record in lines if "loss" in record and "tokens" in record]
    evaluation = [(number, record) for number, record in lines if "eval_loss" in record]
    check_order(file, training, report)
    guarded = {record["step"] for _, record in lines if "verdict" in record}  # skipped, or gone back to
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
    check_complete(file, {record["step"]: record["tokens"] for _, record in training}, durable, documents, report)
    report.count("training_lines", len(training))
    return f"{file.name}: {len(training)} training lines and {len(evaluation)} evaluations, in order"


def is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def read_lines(file: Path, over: bool, report: Report) -> Lines:
    """Those that are JSON objects with a step."""
    content, lines = file.read_text(errors="replace"), []
    for number, line in enumerate(content.splitlines(), 1):
        with suppress(ValueError, RecursionError):
            record = json.loads(line)
            if isinstance(record, dict) and type(record.get("step")) is type(record.get("tokens", 0)) is int:
                lines.append((number, record))
                continue
        if number == content.count("\n") + 1 and not over:
            report.note(f"the last line of {str(file)!r} was cut off by a kill; a resumed run removes it.")
        else:
            report.find(f"{str(file)!r} line {number} isn't a JSON object with a step and, if any, whole tokens.")
    return lines


def check_order(file: Path, training: Lines, report: Report) -> None:
    """Steps and tokens only grow."""
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


def check_complete(
    file: Path, tokens: dict[int, int], durable: int, documents: dict[int, dict[str, Any]], report: Report
) -> None:
    """Every step that must have been logged is there. tokens: of the steps that are.

    Each checkpoint says since which step its process has trained, and how often it has logged. Where all checkpoints of an
    earlier process were pruned nobody knows that any more, and nothing is asked for.
    """
    wanted = set(documents)  # a save logs
    for saved_at, document in documents.items():
        every, after = document["logged"]["every"], document["logged"]["after"]
        wanted |= {step for step in range(every, min(saved_at, durable) + 1, every) if step > after}
    if missing := sorted(wanted - tokens.keys()):
        report.find(f"{str(file)!r} has no line of step {listed(missing)}.")
    for step in sorted(documents.keys() & tokens.keys()):
        saved = documents[step]["tokens"]
        if tokens[step] != saved:
            report.find(f"{str(file)!r} says {tokens[step]} tokens at step {step}, its checkpoint {saved}.")
