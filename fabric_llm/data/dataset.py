"""Open and check a dataset folder: the manifest of prepare_data.py, the splits, and the rows in
them."""

import hashlib
import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Optional

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fabric_llm.base import files
from fabric_llm.base.faults import BAD_INPUT, Fault, one_line
from fabric_llm.base.names import shown
from fabric_llm.data.columns import (
    COLUMNS,
    NO_PADDING,
    Rows,
    is_target,
    masked_labels,
    some_of,
)
from fabric_llm.data.folders import IGNORED, has_rows, split_names

VALIDATION_NAMES = ("validation", "valid")
SMALL_BYTES = 2**30  # datasets up to this size are hashed at each start
# Keys of a packed dataset's manifest whose values must be integers.
PACKED_NUMBERS = (
    "context_length",
    "max_token_id",
    "eos_token_id",
)
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
    unread: tuple[str, ...] = ()  # names of its other columns
    address: str = ""  # from which it was fetched

    @property
    def given(self) -> str:
        """What names it on any machine."""
        return self.address or str(self.folder)

    @property
    def document_end(self) -> Optional[int]:
        """The token that ends each document of a packed dataset, None of any other."""
        return self.manifest["eos_token_id"] if self.manifest.get("packed") else None

    @cached_property
    def fingerprint(self) -> str:
        """Of the training split: a resumed run requires the same."""
        return fingerprint(self.train)

    @cached_property
    def columns_fingerprint(self) -> Optional[str]:
        """Of what the same rows hold besides their tokens, such as labels; None for nothing."""
        columns = some_of(self.train)
        others = {name: np.asarray(columns[name]).tolist() for name in sorted(columns)}
        del others["input_ids"]
        return hashlib.sha256(json.dumps(others).encode()).hexdigest() if others else None

    @property
    def train_sha256(self) -> Optional[str]:
        """Of all rows, where prepare_data.py has counted them."""
        return self.manifest.get("splits", {}).get("train", {}).get("sha256")


def fingerprint(split: Any) -> str:
    """Hash of a split's length and of 64 evenly spaced rows."""
    rows = np.asarray(some_of(split)["input_ids"]).tolist()
    return hashlib.sha256(json.dumps([len(split), rows]).encode()).hexdigest()


def concatenate(sources: Sequence[TokenDataset]) -> TokenDataset:
    """Several datasets as one: their training splits one behind the other, and the validation split
    of the first."""
    splits = [source.train for source in sources]
    # Only the lists are joined. The rows stay in their files.
    chunks = [chunk for split in splits for chunk in split.chunks]
    return replace(
        sources[0],
        train=Rows(chunks, np.concatenate([split.padding for split in splits])),
        context_length=max(source.context_length for source in sources),
        max_token_id=max(source.max_token_id for source in sources),
    )


def open_dataset(
    folder: str | Path, verify: str = "auto", parts: Sequence[str] = ("train", "validation")
) -> TokenDataset:
    """Open and check a dataset folder that `datasets.load_from_disk` reads.

    verify: how the files that prepare_data.py has listed are checked: `size`, `full` (with hashes),
    or `auto` (with hashes up to 1 GiB). parts: the splits that are needed. The row length and the
    largest token id are taken from the manifest. Without one, or where rows aren't lists of one
    size, every row is read once.

    Raises ValueError, with the offending value, for a missing folder or split, an empty split,
    missing or wrongly typed columns, and rows of different length.
    """
    folder = Path(folder)
    names = split_names(folder)
    # Some datasets call this split `valid`.
    validation_name = next((name for name in VALIDATION_NAMES if name in names), "validation")
    manifest = _read_manifest(folder / "manifest.json")
    entries = manifest.get("written", {})
    # Hashes notice every change, but for a large dataset they take minutes.
    listed_bytes = sum(entry["bytes"] for entry in entries.values())
    hashed = verify == "full" or verify == "auto" and listed_bytes <= SMALL_BYTES
    files.check_files(folder, entries, hashed, f"Dataset {str(folder)!r} is damaged", BAD_INPUT)
    declared = None  # tokens in a row, and the largest id
    # With such a manifest no row is read to learn the length and the largest id.
    if manifest.get("packed"):
        declared = manifest["context_length"], manifest["max_token_id"]
    padding = manifest["eos_token_id"] if manifest.get("packing") == "best_fit" else NO_PADDING
    splits, kinds, largest, unread = [], [], 0, dict[str, None]()
    # The last split is the one for validation, by the name that it has here.
    for name in (*parts[:-1], validation_name):
        if name not in names:
            missing = f"{str(folder)!r} has no split {name!r}, only {', '.join(map(repr, names))}."
            if "test" in names:
                missing += _with_splits(folder, names)
            raise ValueError(missing)
        where = f"split {name!r} of {str(folder)!r}"
        split, columns = _load_split(folder / name, where)
        kind = split.data.schema.field("input_ids").type  # prepare_data.py writes lists of one size
        # What the manifest says can be relied on only where Arrow keeps lists of that one size.
        is_declared = (
            declared is not None
            and pa.types.is_fixed_size_list(kind)
            and kind.list_size == declared[0]
        )
        table = split.data.table.select(columns)
        length, max_token_id = declared if is_declared else _scan(table, where)
        # The rows were changed after prepare_data.py had written them.
        if declared and (length != declared[0] or max_token_id > declared[1]):
            there = f"rows of {length} tokens with ids up to {max_token_id}"
            raise ValueError(
                f"The {where} holds {there}, but manifest.json says {declared[0]} and "
                f"{declared[1]}."
            )
        # A record batch becomes arrays that are views of the file, so no row is read yet.
        chunks = []
        for batch in table.to_batches():
            chunk = {}
            for column in columns:
                # A column of bools isn't made of whole bytes, so it alone is copied.
                values = batch.column(column).flatten().to_numpy(zero_copy_only=False)
                chunk[column] = values.reshape(len(batch), length)
            chunks.append(chunk)
        splits.append(Rows(chunks, [padding] * len(chunks)))
        unread |= dict.fromkeys(name for name in split.column_names if name not in columns)
        kinds.append(f"{', '.join(columns)} in rows of {length} tokens")
        largest = max(largest, max_token_id)
    # The model is trained and evaluated with the same columns and length.
    if kinds[0] != kinds[-1]:
        raise ValueError(
            f"The splits of {str(folder)!r} must be alike: 'train' has {kinds[0]}, the other "
            f"{kinds[-1]}."
        )
    if length < 2:
        raise ValueError(
            f"Rows of {str(folder)!r} hold {length} token; at least 2 are needed to predict one."
        )
    return TokenDataset(folder, splits[0], splits[-1], length, largest, manifest, tuple(unread))


# ------------------------------------------------------------------------------- files


def _read_manifest(path: Path) -> dict[str, Any]:
    """What manifest.json says, {} where there is none. Raises Fault (2) for one that isn't as
    prepare_data.py wrote it."""
    # The dataset was made elsewhere.
    if not path.is_file():
        return {}
    damaged = Fault(f"Dataset {str(path.parent)!r} is damaged: {path.name} isn't what was written.")
    try:
        document = json.loads(path.read_bytes())
        # Either key says that it is ours: one bit could take the other away.
        sealed = not {"written", "sha256"} & document.keys() or files.is_sealed(document)
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise damaged from None
    # Sizes that training takes from the manifest must be numbers.
    if (
        not sealed
        or document.get("packed")
        and any(type(document.get(name)) is not int for name in PACKED_NUMBERS)
    ):
        raise damaged
    files.check_entries(document.get("written", {}), path, damaged)
    return document


def _with_splits(folder: Path, names: Sequence[str]) -> str:
    """How to make a dataset that can be trained on, of one with a split `test`."""
    loaded, saved = f"datasets.load_from_disk({str(folder)!r})", f"{folder}-splits"
    data = loaded if "train" in names else f"{loaded}['test'].train_test_split(0.01)"
    code = (
        f"import datasets; d = {data}; d['validation'] = d.pop('test'); d.save_to_disk({saved!r})"
    )
    return f" To have one that is evaluated on it, python -c {_quoted(code)} makes {saved!r}."


def _quoted(code: str) -> str:
    """For a shell, in double quotes where these do, since Python's are single ones."""
    return shlex.quote(code) if re.search(r'["$`\\!]', code) else f'"{code}"'


def _load_split(folder: Path, where: str) -> tuple[datasets.Dataset, list[str]]:
    """(a split, the columns of COLUMNS that it has). Raises ValueError unless it has rows, and
    these hold lists of integers."""
    try:
        # `datasets` can't open a split without files, which is only empty.
        if has_rows(folder):
            split = datasets.load_from_disk(str(folder))
        else:
            split = datasets.Dataset.from_dict({})
        split.data.validate()  # cheap: finds buffers that are shorter than the declared rows
    # has_rows has told what is wrong in words of its own.
    except Fault:
        raise
    except Exception as error:  # datasets, pyarrow and their dependencies raise their own
        raise ValueError(
            f"{str(folder)!r} can't be read: {one_line(error).rstrip('.')}."
        ) from error
    if len(split) == 0:
        raise ValueError(f"The {where} is empty.")
    if "input_ids" not in split.column_names:
        there = ", ".join(repr(shown(name, 60)) for name in split.column_names[:20])
        raise ValueError(f"The {where} has no column 'input_ids', only {there}.")
    columns = [name for name in COLUMNS if name in split.column_names]
    for name in columns:
        # The type of what is in the lists, None for a column that has no lists.
        value_type = getattr(split.features[name], "feature", None)
        if not str(getattr(value_type, "dtype", "")).startswith(("int", "uint", "bool")):
            kind = shown(split.features[name])
            raise ValueError(f"Column {name!r} of the {where} must hold lists of integers: {kind}.")
    return split, columns


def _scan(table: pa.Table, where: str) -> tuple[int, int]:
    """(tokens in a row, largest token id) of the columns of a split. Reads every row once.

    Raises ValueError for damaged rows, rows of different length, empty values, negative ids, and a
    split without targets.
    """
    lengths, low, high, targets = set(), 0, 0, 0
    for batch in table.to_batches(max_chunksize=ROWS_AT_ONCE):
        try:
            batch.validate(full=True)  # Arrow follows offsets that lead out of the file
        except pa.ArrowException as error:
            raise ValueError(
                f"The {where} can't be read: {one_line(error).rstrip('.')}."
            ) from error
        flat = {}
        for name, rows in zip(table.column_names, batch.columns):
            values = pc.list_flatten(rows)
            # A null would be read as an arbitrary number.
            if rows.null_count or values.null_count:
                raise ValueError(f"Column {name!r} of the {where} has empty values.")
            lengths.update(pc.list_value_length(rows).unique().to_pylist())
            flat[name] = np.asarray(values)
        # Labels that are targets are token ids as well.
        id_arrays = [flat["input_ids"]]
        if "labels" in flat:
            id_arrays.append(flat["labels"][flat["labels"] != IGNORED])
        for ids in id_arrays:
            low, high = min(low, int(ids.min(initial=0))), max(high, int(ids.max(initial=0)))
        # Rows of several lengths have no shape, and the error below names these.
        if len(lengths) == 1:
            columns = {name: values.reshape(len(batch), *lengths) for name, values in flat.items()}
            targets += int(is_target(masked_labels(columns)).sum())
    if len(lengths) > 1:
        many = f"The {where} has rows of different length: {min(lengths)} to {max(lengths)} tokens"
        raise ValueError(
            f"{many}. Make rows of one length from the text: prepare_data.py --input ... "
            "--context_length N."
        )
    if low < 0:
        raise ValueError(f"The {where} has a negative token id: {low}.")
    # Rows of one token never have targets, and `open_dataset` says so.
    if targets == 0 and max(lengths) > 1:
        raise ValueError(
            f"The {where} has nothing to learn: all its labels are masked ({IGNORED})."
        )
    return lengths.pop(), high
