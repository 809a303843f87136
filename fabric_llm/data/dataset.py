"""Open and check a dataset folder: the manifest of prepare_data.py, the splits, and the rows in them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fabric_llm.base import files
from fabric_llm.base.faults import BAD_INPUT, Fault, one_line
from fabric_llm.base.names import shown
from fabric_llm.data.columns import COLUMNS, IGNORED, NO_PADDING, Rows, is_target, masked_labels, one_behind_the_other

VALIDATION_NAMES = ("validation", "valid")
SMALL_BYTES = 2**30  # datasets up to this size are hashed at each start
PACKED_NUMBERS = ("context_length", "max_token_id", "eos_token_id")  # of the manifest of a packed dataset
ROWS_AT_ONCE = 1000  # checked


@dataclass(frozen=True)
class TokenDataset:
    """A checked dataset folder."""

    folder: Path
    train: Rows
    validation: Rows
    context_length: int  # tokens per sequence
    max_token_id: int
    manifest: dict[str, Any]  # what prepare_data.py wrote, {} for a dataset made elsewhere

    @cached_property
    def fingerprint(self) -> str:
        """Of the training split: a resumed run requires the same."""
        return fingerprint(self.train)


def fingerprint(split: Any) -> str:
    """Hash of a split's length and of 64 evenly spaced rows."""
    count = len(split)
    rows = split[sorted({index * (count - 1) // 63 for index in range(64)})]["input_ids"]
    return hashlib.sha256(json.dumps([count, [list(map(int, row)) for row in rows]]).encode()).hexdigest()


def together(sources: Sequence[TokenDataset]) -> TokenDataset:
    """Several datasets as one: their training splits one behind the other, and the validation split of the first."""
    return replace(
        sources[0],
        train=one_behind_the_other([source.train for source in sources]),
        context_length=max(source.context_length for source in sources),
        max_token_id=max(source.max_token_id for source in sources),
    )


def open_dataset(folder: str | Path, verify: str = "auto") -> TokenDataset:
    """Open and check a dataset folder that `datasets.load_from_disk` reads.

    verify: how the files that prepare_data.py has listed are checked: `size`, `full` (with hashes), or `auto` (with hashes
    up to 1 GiB). If their hashes are compared, or there is no manifest, every row is read once; otherwise the row length and
    the largest token id are taken from the manifest.

    Raises ValueError, with the offending value, for a missing folder or split, an empty split, missing or
    wrongly typed columns, and rows of different length.
    """
    folder = Path(folder)
    names = split_names(folder)
    validation_name = next((name for name in VALIDATION_NAMES if name in names), "validation")
    manifest = _read_manifest(folder / "manifest.json")
    hashed = _check_files(folder, manifest, verify)
    said = (manifest["context_length"], manifest["max_token_id"]) if manifest.get("packed") else None
    padding = manifest["eos_token_id"] if manifest.get("packing") == "best_fit" else NO_PADDING
    splits, columns, lengths, max_token_ids = [], [], set(), []
    for name in ("train", validation_name):
        if name not in names:
            raise ValueError(f"{str(folder)!r} has no split {name!r}, only {', '.join(map(repr, names))}.")
        split, where = _load_split(folder / name), f"split {name!r} of {str(folder)!r}"
        columns.append(_columns_of(split, where))
        trusted = said is not None and not hashed and _fixed_length(split) == said[0]
        length, max_token_id = said if trusted else _scan(split, where)
        if said and (length != said[0] or max_token_id > said[1]):
            raise ValueError(
                f"The {where} holds rows of {length} tokens with ids up to {max_token_id}, but manifest.json says "
                f"{said[0]} and {said[1]}."
            )
        splits.append(_rows_of(split, columns[-1], length, padding))
        lengths.add(length)
        max_token_ids.append(max_token_id)
    if len(lengths) > 1:
        raise ValueError(f"The splits of {str(folder)!r} have rows of different length: {sorted(lengths)} tokens.")
    if length < 2:
        raise ValueError(f"Rows of {str(folder)!r} hold {length} token; at least 2 are needed to predict one.")
    if columns[0] != columns[1]:
        raise ValueError(
            f"The splits of {str(folder)!r} have different columns: 'train' has {', '.join(columns[0])}, "
            f"{validation_name!r} has {', '.join(columns[1])}."
        )
    return TokenDataset(folder, *splits, length, max(max_token_ids), manifest)


# ------------------------------------------------------------------------------- files


def _check_files(folder: Path, manifest: dict[str, Any], verify: str) -> bool:
    """Compare the files that a manifest lists with it; returns whether their hashes were compared. Raises Fault (2)."""
    entries = manifest.get("written")
    if entries is None:
        return False
    hashes = verify == "full" or verify == "auto" and sum(entry["bytes"] for entry in entries.values()) <= SMALL_BYTES
    files.check_files(folder, entries, hashes, f"Dataset {str(folder)!r} is damaged", BAD_INPUT)
    return hashes


def _read_manifest(path: Path) -> dict[str, Any]:
    """What manifest.json says, {} where there is none. Raises Fault (2) for one that isn't as prepare_data.py wrote it."""
    if not path.is_file():
        return {}
    damaged = Fault(f"Dataset {str(path.parent)!r} is damaged: {path.name} isn't what was written.")
    try:
        document = json.loads(path.read_bytes())
        # Either key says that it is ours: one bit could take the other away.
        sealed = not {"written", "sha256"} & document.keys() or files.is_sealed(document)
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise damaged from None
    if not sealed or document.get("packed") and any(type(document.get(name)) is not int for name in PACKED_NUMBERS):
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
        raise Fault(f"{str(folder)!r} can't be read: {one_line(error).rstrip('.')}.") from error
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
        split.data.validate()  # cheap: finds buffers that are shorter than the declared rows
        return split
    except Exception as error:  # datasets, pyarrow and their dependencies raise their own
        raise ValueError(f"{str(folder)!r} can't be read: {one_line(error).rstrip('.')}.") from error


# ------------------------------------------------------------------------------- rows


def _columns_of(split: datasets.Dataset, where: str) -> list[str]:
    """The columns of COLUMNS that `split` has.

    Raises ValueError for an empty split, where `input_ids` is missing, and where one doesn't hold lists of integers.
    """
    if len(split) == 0:
        raise ValueError(f"The {where} is empty.")
    if "input_ids" not in split.column_names:
        raise ValueError(
            f"The {where} has no column 'input_ids', only {', '.join(repr(shown(name, 60)) for name in split.column_names[:20])}."
        )
    names = [name for name in COLUMNS if name in split.column_names]
    for name in names:
        value_type = getattr(split.features[name], "feature", None)
        if not str(getattr(value_type, "dtype", "")).startswith(("int", "uint", "bool")):
            raise ValueError(
                f"Column {name!r} of the {where} must hold lists of integers: {shown(split.features[name])}."
            )
    return names


def _fixed_length(split: datasets.Dataset) -> int | None:
    """Tokens in a row where the column's type says so, as prepare_data.py writes it; otherwise None."""
    kind = split.data.schema.field("input_ids").type
    return kind.list_size if pa.types.is_fixed_size_list(kind) else None


def _scan(split: datasets.Dataset, where: str) -> tuple[int, int]:
    """(tokens in a row, largest token id) of a split whose columns were checked. Reads every row once.

    Raises ValueError for damaged rows, rows of different length, empty values, negative ids, and a split without targets.
    """
    lengths: set[int] = set()
    low, high, targets = 0, 0, 0
    for table in split.with_format("arrow").iter(batch_size=ROWS_AT_ONCE):
        try:
            table.validate(full=True)  # Arrow follows offsets that lead out of the file
        except pa.ArrowException as error:
            raise ValueError(f"The {where} can't be read: {one_line(error).rstrip('.')}.") from error
        flat = {}
        for name in (name for name in COLUMNS if name in table.column_names):
            rows = table.column(name).combine_chunks()
            values = pc.list_flatten(rows)
            if rows.null_count or values.null_count:
                raise ValueError(f"Column {name!r} of the {where} has empty values.")
            lengths.update(pc.list_value_length(rows).unique().to_pylist())
            flat[name] = np.asarray(values)
        ids = [flat["input_ids"], *([flat["labels"][flat["labels"] != IGNORED]] if "labels" in flat else [])]
        low = min(low, *(int(some.min(initial=0)) for some in ids))
        high = max(high, *(int(some.max(initial=0)) for some in ids))
        if len(lengths) == 1:
            columns = {name: values.reshape(len(table), *lengths) for name, values in flat.items()}
            targets += int(is_target(masked_labels(columns)).sum())
    if len(lengths) > 1:
        raise ValueError(
            f"The {where} has rows of different length, from {min(lengths)} to {max(lengths)} tokens; pack or pad them."
        )
    if low < 0:
        raise ValueError(f"The {where} has a negative token id: {low}.")
    if targets == 0 and max(lengths) > 1:
        raise ValueError(f"The {where} has nothing to learn: all its labels are masked ({IGNORED}).")
    return lengths.pop(), high


def _rows_of(split: datasets.Dataset, names: Sequence[str], context_length: int, padding: int) -> Rows:
    """The rows of a split whose columns were checked. Only values that aren't numbers of whole bytes (bool) are copied."""
    chunks = []
    for batch in split.data.table.select(list(names)).to_batches():
        flat = {name: batch.column(name).flatten().to_numpy(zero_copy_only=False) for name in names}
        chunks.append({name: values.reshape(len(batch), context_length) for name, values in flat.items()})
    return Rows(chunks, [padding] * len(chunks))
