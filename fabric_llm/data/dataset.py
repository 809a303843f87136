"""(seed, position, rank) -> micro-batches: a function, no hidden state.

`position` counts the sequences that all ranks together have consumed since the run began. The order of
an epoch depends on (seed, epoch) alone, so that a run can stop anywhere and go on with another number of
devices, micro-batch size or length, and every step still sees the same sequences.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Optional

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fabric_llm.base import files
from fabric_llm.base.faults import BAD_INPUT, Fault
from fabric_llm.data.folders import check_dataset_folder

IGNORED = -100  # label of a token that isn't a target, as in transformers and torch.nn.functional.cross_entropy
VALIDATION_NAMES = ("validation", "valid")
SMALL_BYTES = 2**30  # hashed at each start
COLUMNS = ("input_ids", "attention_mask", "labels")
PACKED_NUMBERS = ("context_length", "max_token_id", "eos_token_id")  # of the manifest of a packed dataset


@dataclass(frozen=True)
class TokenDataset:
    """A checked dataset folder."""

    folder: Path
    train: datasets.Dataset
    validation: datasets.Dataset
    context_length: int  # tokens per sequence
    max_token_id: int
    manifest: dict[str, Any]  # what prepare_data.py wrote, {} for a dataset made elsewhere

    @cached_property
    def fingerprint(self) -> str:
        """Of the training split: its length and 64 evenly spaced rows, so that a resumed run finds the same data."""
        count = len(self.train)
        rows = self.train[sorted({index * (count - 1) // 63 for index in range(64)})]["input_ids"]
        return hashlib.sha256(json.dumps([count, [list(map(int, row)) for row in rows]]).encode()).hexdigest()


def open_dataset(folder: str | Path, verify: str = "auto") -> TokenDataset:
    """Open and check a dataset folder that `datasets.load_from_disk` reads.

    verify: size, full (with hashes) or auto (hashes up to 1 GiB) of the files, where prepare_data.py has listed them.

    Raises ValueError, with the offending value, for a missing folder or split, an empty split, missing or
    wrongly typed columns, and rows of different length. A dataset of prepare_data.py whose hashes aren't compared is
    taken at the word of its manifest; any other is read through once.
    """
    folder = Path(folder)
    check_dataset_folder(folder)
    names = split_names(folder)
    validation_name = next((name for name in VALIDATION_NAMES if name in names), "validation")
    manifest_file = folder / "manifest.json"
    manifest = _read_manifest(manifest_file) if manifest_file.is_file() else {}
    hashes = False
    if "written" in manifest:
        total = sum(entry["bytes"] for entry in manifest["written"].values())
        hashes = verify == "full" or verify == "auto" and total <= SMALL_BYTES
        files.check_files(folder, manifest["written"], hashes, f"Dataset {str(folder)!r} is damaged", BAD_INPUT)
    splits, lengths, max_token_ids = {}, set(), []
    for name in ("train", validation_name):
        if name not in names:
            raise ValueError(f"{str(folder)!r} has no split {name!r}, only {', '.join(map(repr, names))}.")
        splits[name] = _load_split(folder / name)
        where = f"split {name!r} of {str(folder)!r}"
        _check_columns(splits[name], where)
        said = (manifest["context_length"], manifest["max_token_id"]) if manifest.get("packed") else None
        trusted = said is not None and not hashes and _fixed_length(splits[name]) == said[0]
        length, max_token_id = said if trusted else _scan(splits[name], where)
        if said and (length != said[0] or max_token_id > said[1]):
            raise ValueError(
                f"The {where} holds rows of {length} tokens with ids up to {max_token_id}, but manifest.json says "
                f"{said[0]} and {said[1]}."
            )
        lengths.add(length)
        max_token_ids.append(max_token_id)
    if len(lengths) > 1:
        raise ValueError(f"The splits of {str(folder)!r} have rows of different length: {sorted(lengths)} tokens.")
    context_length = lengths.pop()
    if context_length < 2:
        raise ValueError(f"Rows of {str(folder)!r} hold {context_length} token; at least 2 are needed to predict one.")
    columns, others = ([c for c in COLUMNS if c in split.column_names] for split in splits.values())
    if columns != others:
        raise ValueError(
            f"The splits of {str(folder)!r} have different columns: 'train' has {', '.join(columns)}, "
            f"{validation_name!r} has {', '.join(others)}."
        )
    train, validation = (split.select_columns(columns) for split in splits.values())
    return TokenDataset(folder, train, validation, context_length, max(max_token_ids), manifest)


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_bytes())
        sealed = "written" not in document or files.is_sealed(document)
    except (ValueError, TypeError, AttributeError, RecursionError):
        sealed = False
    damaged = Fault(f"Dataset {str(path.parent)!r} is damaged: {path.name} isn't what was written.")
    if not sealed:
        raise damaged
    if document.get("packed") and any(type(document.get(name)) is not int for name in PACKED_NUMBERS):
        raise damaged
    files.check_entries(document.get("written", {}), path, damaged)
    return document


def split_names(folder: Path) -> list[str]:
    """Names of the splits of a dataset folder. Raises Fault for a list that can't be read (2) or leads elsewhere (77)."""
    path = folder / "dataset_dict.json"
    try:
        names = [str(name) for name in json.loads(path.read_bytes())["splits"]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise Fault(f"{str(path)!r} can't be read as a list of splits.") from error
    for name in names:
        files.check_name(name, path)
    return names


def has_rows(folder: Path) -> bool:
    """False for a split without a file. Raises Fault for one that can't be opened (2) or names files elsewhere (77)."""
    path = folder / "state.json"
    try:
        for file in (path, folder / "dataset_info.json"):
            if not file.is_file():  # a pipe blocks whoever opens it
                raise ValueError(f"there is no file {file.name}")
        names = [str(entry["filename"]) for entry in json.loads(path.read_bytes())["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise Fault(f"{str(folder)!r} can't be read: {' '.join(str(error).split()).rstrip('.')}.") from error
    for name in names:
        files.check_name(name, path)
        if not (folder / name).is_file():
            raise Fault(f"{str(folder)!r} can't be read: there is no file {name}.")
    return bool(names)


def _load_split(folder: Path) -> datasets.Dataset:
    if not has_rows(folder):  # load_from_disk fails on it
        return datasets.Dataset.from_dict({})
    try:
        split = datasets.load_from_disk(str(folder))
        split.data.validate()  # what it costs nothing to see: buffers that are shorter than the rows that are declared
        return split
    except Exception as error:  # of datasets, pyarrow and what they are made of
        raise ValueError(f"{str(folder)!r} can't be read: {' '.join(str(error).split()).rstrip('.')}.") from error


def _check_columns(split: datasets.Dataset, where: str) -> None:
    if len(split) == 0:
        raise ValueError(f"The {where} is empty.")
    if "input_ids" not in split.column_names:
        raise ValueError(f"The {where} has no column 'input_ids', only {', '.join(map(repr, split.column_names))}.")
    for column in COLUMNS:
        if column not in split.column_names:
            continue
        value_type = getattr(split.features[column], "feature", None)
        if not str(getattr(value_type, "dtype", "")).startswith(("int", "uint", "bool")):
            raise ValueError(f"Column {column!r} of the {where} must hold lists of integers: {split.features[column]}.")


def _fixed_length(split: datasets.Dataset) -> Optional[int]:
    """Tokens in a row where the type of the column says so, as prepare_data.py writes it: then no offsets are read."""
    kind = split.data.schema.field("input_ids").type
    return kind.list_size if pa.types.is_fixed_size_list(kind) else None


def _scan(split: datasets.Dataset, where: str) -> tuple[int, int]:
    """(row length in tokens, largest token id) of all rows, read once in Arrow."""
    lengths: set[int] = set()
    low, high, targets = 0, 0, 0
    for batch in split.with_format("arrow").iter(batch_size=1000):
        try:
            batch.validate(full=True)  # offsets that lead out of the file would be followed
        except pa.ArrowException as error:
            raise ValueError(f"The {where} can't be read: {' '.join(str(error).split()).rstrip('.')}.") from error
        for column in (name for name in COLUMNS if name in batch.column_names):
            rows = batch.column(column).combine_chunks()
            if rows.null_count or pc.list_flatten(rows).null_count:
                raise ValueError(f"Column {column!r} of the {where} has empty values.")
            lengths.update(pc.list_value_length(rows).unique().to_pylist())
        columns = {
            name: pc.list_flatten(batch[name].combine_chunks()) for name in COLUMNS if name in batch.column_names
        }
        if "labels" in columns:
            columns["labels"] = columns["labels"].filter(pc.not_equal(columns["labels"], IGNORED))
        for tokens in (columns[name] for name in ("input_ids", "labels") if name in columns):
            if len(tokens):
                extremes = pc.min_max(tokens).as_py()
                low, high = min(low, extremes["min"]), max(high, extremes["max"])
        targets += _target_count(batch, lengths)
    if len(lengths) > 1:
        raise ValueError(
            f"The {where} has rows of different length, from {min(lengths)} to {max(lengths)} tokens; pack or pad them."
        )
    if low < 0:
        raise ValueError(f"The {where} has a negative token id: {low}.")
    if targets == 0 and max(lengths) > 1:
        raise ValueError(f"The {where} has nothing to learn: all its labels are masked ({IGNORED}).")
    return lengths.pop(), high


def _target_count(table: pa.Table, lengths: set[int]) -> int:
    """Tokens of rows of one length that are to be predicted: all but the first, and what labels and masks leave out."""
    if len(lengths) != 1:
        return 0
    shape = (len(table), *lengths)
    columns = {
        name: np.asarray(pc.list_flatten(table.column(name).combine_chunks())).reshape(shape)[:, 1:]
        for name in ("labels", "attention_mask")
        if name in table.column_names
    }
    wanted = np.ones((len(table), shape[1] - 1), dtype=bool)
    if "labels" in columns:
        wanted &= columns["labels"] != IGNORED
    if "attention_mask" in columns:
        wanted &= columns["attention_mask"] != 0
    return int(wanted.sum())
