"""Inspect a run: the bytes of its checkpoints, their tensors and the rows they have read, its logs, and an export. Nothing is changed.

The checks have the form that is described in inspect_log.py.
"""

from __future__ import annotations

import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any, Optional

import torch

from fabric_llm.base import files
from fabric_llm.base.faults import DONE, NO_CHECKPOINT, REFUSED, STOPPED, Fault
from fabric_llm.checkpoint import keep
from fabric_llm.checkpoint.reading import Tensors, stored_parts
from fabric_llm.checkpoint.state_dicts import PREFIX, saved_shapes
from fabric_llm.checkpoint.whole import layout_of_files
from fabric_llm.data.mixture import mixture_of
from fabric_llm.data.order import ROW_ORDER, RowsRead, claimed_by, claimed_rows
from fabric_llm.model import freezing
from fabric_llm.model.loading import DTYPES, checked_skeleton, disable_progress_bar, load_config
from fabric_llm.plan import run_directory
from fabric_llm.verify.export import VerificationError, export, read_proof
from fabric_llm.verify.inspect_log import Report, check_metrics, check_status, listed, say

MOST_ROWS = 2**28  # that are compared: a minute


def verify_run(run: Path, exports: bool) -> Report:
    """Inspect the run directory `run`. exports: also export the newest checkpoint, to compare logits."""
    disable_progress_bar()
    report = Report(str(run))
    status = run_directory.read_status(run)  # first, because a run that is still going saves more
    documents: dict[int, dict[str, Any]] = {}  # step -> what `verify_checkpoint` returns
    for path in files.step_directories(run):
        before, code = len(report.findings), report.code
        document = verify_checkpoint(path, report)
        if not path.exists():  # pruned by a run that is still going, so that its files seemed to be missing
            del report.findings[before:]
            report.code = code
            report.note(f"{path.name} was pruned meanwhile.")
        elif document is not None:
            documents[files.step_of(path)] = document
    for left in sorted(p.name for p in run.iterdir() if p.name.startswith((".tmp-step-", ".trash-step-", "aside-"))):
        report.note(f"{left} isn't a checkpoint of the run and wasn't looked at.")
    newest = files.latest(run)
    durable = 0 if newest is None else files.step_of(newest)
    if newest is None:
        report.find(f"{str(run)!r} holds no complete checkpoint (step-N).")
    else:
        hashed = files.sha256(newest / files.MANIFEST)
        report.newest = {"name": newest.name, "step": durable, "manifest_sha256": hashed}
    saved_at_the_end = status.get("step") == status.get("last_durable_step")  # which a second signal prevents
    over = status.get("code") in (DONE, STOPPED) and saved_at_the_end
    report.look(check_status, run / run_directory.STATUS, status, durable)
    report.look(check_metrics, run / "metrics.jsonl", over, durable, documents)
    if exports and durable in documents:
        stored = [*newest.glob("*.safetensors"), *newest.glob("weights/*.safetensors")]
        advice = "set TMPDIR to a larger disk, or leave it out with --no_export"
        try:
            files.room(Path(tempfile.gettempdir()), sum(file.stat().st_size for file in stored), "The export", advice)
        except Fault as fault:
            raise Fault(str(fault)) from fault  # an argument of this command, not a save that failed
        report.look(check_export, newest)
    elif exports and newest is not None:
        report.note(f"{newest.name} wasn't exported, as something is wrong with it.")
    return report


def verify_checkpoint(path: Path, report: Report) -> Optional[dict[str, Any]]:
    """Inspect the checkpoint `path`. Returns "tokens", "sources" and "logged" of its progress.json, or None if damaged."""
    say(f"{path}: hashing")
    before = len(report.findings)
    try:
        progress = keep.verified(path, hashes=True)
        manifest = files.read(path)
    except (Fault, OSError) as first:
        for fault in all_faults(path, first):
            report.find(str(fault), fault.code)
        say("  What is in it wasn't looked at.")
        return None
    sizes = [entry["bytes"] for entry in manifest["files"].values()]
    report.count("checkpoints", 1)
    report.count("files", len(sizes) + 1)
    report.count("bytes", sum(sizes) + (path / files.MANIFEST).stat().st_size)
    say(f"  {len(sizes)} files, {sum(sizes):,} bytes as in {files.MANIFEST}; world size {manifest.get('world_size')}")
    step, reached = files.step_of(path), progress["progress"]
    for name, written in ((files.MANIFEST, manifest.get("step")), ("trainer/progress.json", reached["step"])):
        if written != step:
            report.find(f"{str(path / name)!r} is that of step {written}, not of step {step}.")
    report.look(check_shapes, path, progress)
    report.look(check_finite, path)
    report.look(check_rows, path / "trainer" / "progress.json", progress)
    if len(report.findings) > before:
        return None
    read = mixture_of(progress).read_before(reached["position"]) if "mixture" in progress else None
    return {"tokens": reached["tokens"], "sources": read, "logged": progress["logged"]}


def all_faults(path: Path, first: Fault | OSError) -> list[Fault]:
    """Everything that is wrong with the files of a checkpoint, of which `keep.verified` has raised the first."""
    if isinstance(first, Fault) and first.code == REFUSED:
        return [first]
    wrong, faults = f"{str(path)!r} is damaged", []
    try:
        entries = files.read(path)["files"]
        for name in sorted(set(files.files_in(path)) - entries.keys() - {files.MANIFEST}):
            faults.append(Fault(f"{wrong}: {name} isn't listed in its {files.MANIFEST}.", NO_CHECKPOINT))
    except Fault as fault:
        return [fault]
    for name, entry in entries.items():
        try:
            files.check_files(path, {name: entry}, True, wrong, NO_CHECKPOINT)
        except Fault as fault:
            faults.append(fault)
    return faults or [Fault(str(first), NO_CHECKPOINT)]  # such as an index


def check_shapes(path: Path, progress: dict[str, Any], report: Report) -> str:
    """Compare weights and optimizer state with the model of config.json. progress: the content of progress.json."""
    skeleton = checked_skeleton(str(path), load_config(str(path)), DTYPES[progress["fixed"]["precision"]])
    weights = saved_shapes(skeleton)
    if (path / "weights").is_dir():
        compare(path / "weights", {PREFIX + name: shape for name, shape in weights.items()}, report)
    else:
        of_files = {name: tuple(tensor.shape) for name, tensor in layout_of_files(skeleton).items()}
        stored = compare(path, of_files, report)
        for index in path.glob("*.index.json"):
            said = files.weight_map(index)
            places = {name: file.name for name, parts in stored.files.items() for file in parts.values()}
            if names := sorted(name for name in said.keys() | places.keys() if said.get(name) != places.get(name)):
                report.find(f"{str(index)!r} doesn't say where these weights are: {listed(names)}.")
    frozen = freezing.frozen_names(skeleton, *(progress["schedule"].get(flag) for flag in freezing.FLAGS))
    moments = {
        f"state.{PREFIX}{name}.{moment}": tuple(parameter.shape)
        for name, parameter in skeleton.named_parameters()
        for moment in progress["optimizer_state"]
        if parameter.requires_grad and name not in frozen
    }
    compare(path / "trainer" / "optimizer", moments, report, others=True)
    report.counts["parameters"] = sum(parameter.numel() for parameter in skeleton.parameters())
    return f"{len(weights)} weights and {len(moments)} moments have the names and shapes of {type(skeleton).__name__}"


def compare(folder: Path, wanted: dict[str, tuple[int, ...]], report: Report, others: bool = False) -> Tensors:
    """Report in one sentence which tensors of a folder have other names or shapes. others: more names are allowed."""
    stored = Tensors(folder.glob("*.safetensors"))
    words = [
        f"{name} is {stored.shapes.get(name, 'missing')}, in the model {wanted.get(name, 'nothing')}"
        for name in sorted(wanted.keys() if others else stored.keys() | wanted.keys())
        if stored.shapes.get(name) != wanted.get(name)
    ]
    if words:
        report.find(f"{str(folder)!r} doesn't hold the model of its config.json: {listed(words)}.")
    if gaps := sorted(name for name in stored if not stored.is_whole(name)):
        report.find(f"{str(folder)!r} holds only some parts of {listed(gaps)}.")
    return stored


def check_finite(path: Path, report: Report) -> str:
    """Read every tensor of every safetensors file, one at a time."""
    say("  reading every tensor")
    count, bad = 0, {}
    for file, name, tensor in stored_parts(path):
        count += 1
        if not torch.isfinite(tensor).all():
            bad.setdefault(file, []).append(name)
    for file, names in bad.items():
        report.find(f"{str(file)!r} holds NaN or infinity in {listed(names)}.")
    report.count("tensors", count)
    return f"{count} tensors are finite"


def check_rows(file: Path, progress: dict[str, Any], report: Report) -> str:
    """Compare the rows that all ranks have read, as `progress` of the `file` progress.json records, with those of its position."""
    said, fixed, end = progress["rows_read"], progress["fixed"], progress["progress"]["position"]
    first, read = said["from_position"], RowsRead(said["count"], said["hash_sum"])
    span = f"{end - first:,} sequences at positions {first:,} to {end - 1:,}"
    mixture = mixture_of(progress) if "mixture" in progress else None
    rows, order = fixed["train_rows"] if mixture is None else sum(mixture.rows), fixed.get("row_order")
    if read.count != end - first:
        report.find(f"{str(file)!r} claims {span}, but all ranks together have read {read.count:,}.")
    elif read.count == 0:
        return "no row was read yet"
    elif order != ROW_ORDER:
        report.find(f"{str(file)!r}: rows are read in the order {order!r}; this version knows {ROW_ORDER}.")
    elif rows <= 0 or end - first > MOST_ROWS:
        report.note(f"{str(file)!r}: too many rows to compare each; their number is right.")
    elif read != (
        claimed_by(mixture.rows_at, first, end) if mixture else claimed_rows(rows, fixed["seed"], first, end)
    ):
        report.find(f"{str(file)!r} claims {span}, but other rows were read: some twice or out of turn, others never.")
    return f"{span} were each read by one rank"


def check_export(newest: Path, report: Report) -> str:
    """Export the newest checkpoint to a temporary directory, which compares it with plain transformers."""
    say(f"{newest}: exporting to compare with plain transformers")
    with tempfile.TemporaryDirectory(prefix="fabric_llm-verify-") as folder:
        try:
            proof = export(newest, Path(folder) / "export")
        except VerificationError as error:
            report.find(f"{str(newest)!r}, exported, isn't the model that was trained: {error}")
            return ""
    report.export = asdict(proof)
    return read_proof(proof)
