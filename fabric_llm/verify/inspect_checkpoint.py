"""Inspect one checkpoint: the bytes of its files, names, shapes and values of its tensors, and the rows it has read.

A check takes a path, facts about it, and a `Report`, to which it adds everything that it finds. It returns a line that is
shown if it has found nothing. Nothing is changed. See `Report.look`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Optional

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from fabric_llm.base import files, step_names
from fabric_llm.base.faults import NO_CHECKPOINT, REFUSED, Fault
from fabric_llm.checkpoint import keep
from fabric_llm.checkpoint.state_dicts import PREFIX, saved_shapes, tied_names
from fabric_llm.checkpoint.tensors import Tensors, stored_parts
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
        progress = keep.verified(path, hashes=True)
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
    if len(report.findings) > before:
        return None
    read = mixture_of(progress).read_before(progress["progress"]["position"]) if "mixture" in progress else None
    return {**document, "tokens": progress["progress"]["tokens"], "sources": read, "logged": progress["logged"]}


def all_faults(path: Path, first: Fault | OSError) -> list[Fault]:
    """Everything that is wrong with the files of a checkpoint, of which `keep.verified` has raised the first."""
    if isinstance(first, Fault) and first.code == REFUSED:
        return [first]
    try:
        entries, there = files.read(path)["files"], files.files_in(path)
    except Fault as fault:
        return [fault]
    wrong, faults = f"{str(path)!r} is damaged", []
    for name in sorted(set(there) - entries.keys() - {files.MANIFEST}):
        faults.append(Fault(f"{wrong}: {name} isn't listed in its {files.MANIFEST}.", NO_CHECKPOINT))
    for name, entry in entries.items():
        try:
            files.check_files(path, {name: entry}, True, wrong, NO_CHECKPOINT)
        except Fault as fault:
            faults.append(fault)
    return faults or [Fault(str(first), NO_CHECKPOINT)]  # such as an index


def check_shapes(path: Path, progress: dict[str, Any], report: Report) -> str:
    """Compare weights and optimizer state with the model of config.json, built on the meta device.

    progress: the content of progress.json.
    """
    skeleton = checked_skeleton(str(path), load_config(str(path)), DTYPES[progress["fixed"]["precision"]])
    weights = saved_shapes(skeleton)
    if (path / "weights").is_dir():
        compare(path / "weights", {PREFIX + name: shape for name, shape in weights.items()}, report)
    else:
        stored = compare(path, shapes_in_files(skeleton), report)
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


def shapes_in_files(skeleton: PreTrainedModel) -> Shapes:
    """What the files of a full checkpoint hold: names can differ from those in memory, where transformers fuses experts."""
    again = {*tied_names(skeleton), *(skeleton._keys_to_ignore_on_save or ())}
    state = {name: tensor for name, tensor in skeleton.state_dict().items() if name not in again}
    return {name: tuple(tensor.shape) for name, tensor in revert_weight_conversion(skeleton, state).items()}


def compare(folder: Path, wanted: Shapes, report: Report, others: bool = False) -> Tensors:
    """Report in one sentence which tensors of a folder have other names or shapes. others: more names are allowed."""
    stored = Tensors(folder.glob("*.safetensors"))
    words = [
        f"{name} is {list(stored.shapes[name]) if name in stored else 'missing'}, "
        f"in the model {list(wanted[name]) if name in wanted else 'nothing'}"
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
    say(f"  reading every tensor of {len(list(path.rglob('*.safetensors')))} files")
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
    """Compare the rows that all ranks have read, as the checkpoint records them, with those of its position.

    progress: the content of `file`, the checkpoint's progress.json.
    """
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
