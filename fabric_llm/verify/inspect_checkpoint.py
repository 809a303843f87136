"""Inspect one checkpoint: the bytes of its files, names, shapes and values of its tensors, and the rows it has read.

A check takes a path, facts about it, and a `Report`, to which it adds everything that it finds. It returns a line that is
shown if it has found nothing. Nothing is changed. See `Report.look`.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Optional

import torch
from safetensors import safe_open
from torch.distributed.checkpoint import HuggingFaceStorageReader
from transformers import AutoModelForCausalLM

from fabric_llm.base import files, step_names
from fabric_llm.base.faults import NO_CHECKPOINT, REFUSED, Fault
from fabric_llm.checkpoint import reading, state_dicts
from fabric_llm.data.mixture import mixture_of
from fabric_llm.data.order import ROW_ORDER, RowsRead, claimed_by, claimed_rows
from fabric_llm.model import freezing
from fabric_llm.model.loading import DTYPES, checked_skeleton, load_config
from fabric_llm.verify.report import Report, listed, say

MOST_ROWS = 2**28  # that are compared: a minute
Shapes = dict[str, tuple[int, ...]]


def verify_checkpoint(path: Path, report: Report) -> Optional[dict[str, Any]]:
    """Inspect the checkpoint `path`. Returns its manifest with "tokens", "sources" and "logged" of progress.json, or None if damaged."""
    say(f"{path}: hashing")
    before = len(report.findings)
    try:
        progress = reading.verified(path, hashes=True)
        document = files.read(path)
    except (Fault, OSError) as first:
        for fault in all_faults(path, first):
            report.find(str(fault), fault.code)
        say("  What is in it wasn't looked at.")
        return None
    sizes = [entry["bytes"] for entry in document["files"].values()]
    report.count("checkpoints", 1)
    report.count("files", len(sizes) + 1)
    report.count("bytes", sum(sizes) + (path / files.MANIFEST).stat().st_size)
    say(f"  {len(sizes)} files, {sum(sizes):,} bytes as in {files.MANIFEST}; world size {document.get('world_size')}")
    step = step_names.step_of(path)
    said = {files.MANIFEST: document.get("step"), "trainer/progress.json": progress["progress"]["step"]}
    for name, written in said.items():
        if written != step:
            report.find(f"{str(path / name)!r} is that of step {written}, not of step {step}.")
    report.look(check_shapes, path, progress)
    report.look(check_finite, path)
    report.look(check_rows, path / "trainer" / "progress.json", progress)
    whole = len(report.findings) == before
    if not whole:
        return None
    read = mixture_of(progress).read_before(progress["progress"]["position"]) if "mixture" in progress else None
    return {**document, "tokens": progress["progress"]["tokens"], "sources": read, "logged": progress["logged"]}


def all_faults(path: Path, first: Fault | OSError) -> list[Fault]:
    """Everything that is wrong with the files of a checkpoint, of which `reading.verified` has raised the first."""
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
    """Compare weights and optimizer state with the model of config.json, built on the meta device.

    progress: the content of progress.json.
    """
    skeleton = checked_skeleton(str(path), load_config(str(path)), DTYPES[progress["fixed"]["precision"]])
    schedule = progress.get("schedule", {})
    frozen = freezing.frozen_names(skeleton, *(schedule.get(flag) for flag in freezing.FLAGS))
    ties = state_dicts.tied_names(skeleton)
    # Includes saved buffers, such as a router's bias, and excludes the second names of tied weights.
    weights = {name: tuple(t.shape) for name, t in skeleton.state_dict().items() if name not in ties}
    if (path / "weights").is_dir():
        wanted = {state_dicts.PREFIX + name: shape for name, shape in weights.items()}
        compare_parts(path / "weights", wanted, report)
    else:
        compare_full(path, weights, ties, report)
    moments = {
        f"state.{state_dicts.PREFIX}{name}.{moment}": tuple(parameter.shape)
        for name, parameter in skeleton.named_parameters()
        for moment in progress.get("optimizer_state", ("exp_avg", "exp_avg_sq"))  # older versions had AdamW alone
        if parameter.requires_grad and name not in frozen
    }
    compare_parts(path / "trainer" / "optimizer", moments, report, others=True)
    report.counts["parameters"] = sum(parameter.numel() for parameter in skeleton.parameters())
    return f"{len(weights)} weights and {len(moments)} moments have the names and shapes of {type(skeleton).__name__}"


def compare_parts(folder: Path, wanted: Shapes, report: Report, others: bool = False) -> None:
    """Compare names and shapes of tensors that lie in parts, one for each rank. others: other names are allowed."""
    metadata = HuggingFaceStorageReader(path=str(folder)).read_metadata().state_dict_metadata
    stored = {name: tuple(entry.size) for name, entry in metadata.items() if not others or name in wanted}
    compare_shapes(folder, stored, wanted, report)
    held = {name: sum(math.prod(chunk.sizes) for chunk in entry.chunks) for name, entry in metadata.items()}
    if gaps := sorted(name for name, entry in metadata.items() if held[name] != math.prod(entry.size)):
        report.find(f"{str(folder)!r} holds only some parts of {listed(gaps)}.")


def compare_full(path: Path, wanted: Shapes, ties: set[str], report: Report) -> None:
    """Compare the Hugging Face weights of a full checkpoint, and check their index if there is one."""
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
    # Names in files can differ from those in memory, where experts are fused. Only loading the model can tell.
    _, info = AutoModelForCausalLM.from_pretrained(
        path, output_loading_info=True, ignore_mismatched_sizes=True, use_safetensors=True, trust_remote_code=False
    )
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info[kind]:
            names = listed(sorted(map(str, info[kind])))
            report.find(f"The weights of {str(path)!r} aren't those of its config.json, {kind}: {names}.")


def compare_shapes(where: Path, stored: Shapes, wanted: Shapes, report: Report) -> None:
    """Report every difference in one sentence."""
    words = [
        f"{name} is {list(stored[name]) if name in stored else 'missing'}, "
        f"in the model {list(wanted[name]) if name in wanted else 'nothing'}"
        for name in sorted(stored.keys() | wanted.keys())
        if stored.get(name) != wanted.get(name)
    ]
    if words:
        report.find(f"{str(where)!r} doesn't hold the model of its config.json: {listed(words)}.")


def check_finite(path: Path, report: Report) -> str:
    """Read every tensor of every safetensors file, one at a time."""
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
    """Compare the rows that all ranks have read, as the checkpoint records them, with those of its position.

    progress: the content of `file`, the checkpoint's progress.json.
    """
    if "rows_read" not in progress:
        report.note(f"{str(file)!r} doesn't record which rows were read: an older version wrote it.")
        return "no record of the rows that were read"
    said, fixed, end = progress["rows_read"], progress["fixed"], progress["progress"]["position"]
    first, read = said["from_position"], RowsRead(said["count"], said["hash_sum"])
    span = f"{end - first:,} sequences at positions {first:,} to {end - 1:,}"
    if read.count == end - first == 0:
        return "no row was read yet"
    if read.count != end - first:
        report.find(f"{str(file)!r} claims {span}, but all ranks together have read {read.count:,}.")
        return f"{read.count:,} rows were read, not {end - first:,}"
    rows, order = fixed["train_rows"], fixed.get("row_order")
    if order != ROW_ORDER:
        report.find(f"{str(file)!r}: rows are read in the order {order!r}; this version knows {ROW_ORDER}.")
        return "an unknown order of rows"
    mixture = mixture_of(progress) if "mixture" in progress else None
    rows = rows if mixture is None else sum(mixture.rows)
    if rows <= 0 or end - first > MOST_ROWS:
        report.note(f"{str(file)!r}: too many rows to compare each; their number is right.")
    elif read != (
        claimed_by(mixture.rows_at, first, end) if mixture else claimed_rows(rows, fixed["seed"], first, end)
    ):
        report.find(f"{str(file)!r} claims {span}, but other rows were read: some twice or out of turn, others never.")
        return "other rows were read than those of the run's position"
    return f"{span} were each read by one rank"
