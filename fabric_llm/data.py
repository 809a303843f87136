"""(seed, position, rank) -> micro-batches: a function, no hidden state.

`position` counts the sequences that all ranks together have consumed since the run began. The order of
an epoch depends on (seed, epoch) alone, so that a run can stop anywhere and go on with another number of
devices, micro-batch size or length, and every step still sees the same sequences.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Optional

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from fabric_llm import check
from fabric_llm import manifest as files
from fabric_llm.failpoints import failpoint
from fabric_llm.faults import BAD_INPUT, Fault

IGNORED = -100  # label of a token that isn't a target, as in transformers and torch.nn.functional.cross_entropy
VALIDATION_NAMES = ("validation", "valid")
SMALL_BYTES = 2**30  # hashed at each start
COLUMNS = ("input_ids", "attention_mask", "labels")
POSITIONS_AT_ONCE = 2**20
PACKED_NUMBERS = ("context_length", "max_token_id", "eos_token_id")  # of the manifest of a packed dataset

# input_ids, labels; attention_mask where the dataset has one, position_ids where documents are kept apart:
# int64 [rows, context]
MicroBatch = dict[str, Tensor]


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
    check.check_dataset_folder(folder)
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


def shuffled(index_count: int, seed: int, epoch: int) -> np.ndarray:
    """The order of an epoch: a permutation of range(index_count), int64 [index_count].

    Sorting by a hash (splitmix64, Steele et al. 2014) instead of a library's generator: no release of any
    library can change the order of a run that is under way.
    """
    with np.errstate(over="ignore"):
        return np.argsort(_splitmix64(np.arange(index_count, dtype=np.uint64) + random_key(seed, epoch)), kind="stable")


def random_key(*parts: int) -> np.uint64:
    """One hash of several integers, such as (seed, step, rank): the seed of whatever depends on just those."""
    key = np.zeros(1, dtype=np.uint64)
    with np.errstate(over="ignore"):
        for part in parts:
            key = _splitmix64(key + np.uint64(part % 2**64))
    return key[0]


def _splitmix64(x: np.ndarray) -> np.ndarray:
    """uint64 -> uint64, elementwise, wrapping around."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@dataclass(frozen=True)
class RowsRead:
    """Which rows were read: how many, and the sum of a hash of each with its position, which knows no order.

    Ranks add theirs up. What a run claims to have read can be compared with it: see `claimed_rows`.
    """

    count: int = 0
    hash_sum: int = 0  # modulo 2**64

    def __add__(self, other: RowsRead) -> RowsRead:
        return RowsRead(self.count + other.count, (self.hash_sum + other.hash_sum) % 2**64)

    @staticmethod
    def of(positions: np.ndarray, rows: np.ndarray) -> RowsRead:
        """positions, rows: int64, of the same shape."""
        with np.errstate(over="ignore"):
            hashes = _splitmix64(_splitmix64(positions.astype(np.uint64)) + rows.astype(np.uint64))
            return RowsRead(positions.size, int(hashes.sum(dtype=np.uint64)))


def claimed_rows(row_count: int, seed: int, first: int, end: int) -> RowsRead:
    """What all ranks together have read of a dataset of `row_count` rows at the positions from `first` to `end` - 1."""
    read = RowsRead()
    while first < end:
        epoch, offset = divmod(first, row_count)
        count = min(end - first, row_count - offset, POSITIONS_AT_ONCE)
        rows = _order(row_count, seed, epoch)[offset : offset + count]
        read += RowsRead.of(np.arange(first, first + count), rows)
        first += count
    return read


@dataclass(frozen=True)
class Batches:
    """The micro-batches of one rank, for any position.

    Positions from `end` on give rows without targets: they count for nothing in loss and gradient, so that the
    last global batch of a run may be a part of one, and all ranks still do the same number of passes.
    """

    rows: datasets.Dataset
    seed: int
    micro_batch_size: int  # sequences
    micro_batches: int  # per step and rank
    rank: int = 0
    world_size: int = 1
    shuffle: bool = True
    end: Optional[int] = None  # sequences; None: epoch follows epoch
    document_end: Optional[int] = None  # token id that ends each document, to keep packed documents apart

    @property
    def global_batch_size(self) -> int:
        return self.micro_batch_size * self.micro_batches * self.world_size

    def indices(self, positions: np.ndarray) -> np.ndarray:
        """Row numbers in the dataset of the sequences at `positions`, int64, same shape."""
        epochs, offsets = np.divmod(positions, len(self.rows))
        if not self.shuffle:
            return offsets
        return np.array([_order(len(self.rows), self.seed, int(e))[o] for e, o in zip(epochs, offsets)], dtype=np.int64)

    def positions(self, position: int) -> np.ndarray:
        """Positions that this rank reads for the step that begins at `position`, int64 [micro_batches, rows]."""
        micro_batch, row = np.indices((self.micro_batches, self.micro_batch_size))
        return position + (micro_batch * self.world_size + self.rank) * self.micro_batch_size + row

    def at(self, position: int) -> list[MicroBatch]:
        """The micro-batches of this rank for the step that begins at `position`, on the CPU."""
        return self.read(position)[0]

    def read(self, position: int) -> tuple[list[MicroBatch], RowsRead]:
        """The same, and which rows they hold."""
        micro_batches, read = [], RowsRead()
        for positions in self.positions(position):
            rows = self.indices(positions)
            micro_batches.append(self._micro_batch(positions, rows))
            counts = slice(None) if self.end is None else positions < self.end
            read += RowsRead.of(positions[counts], rows[counts])
        return micro_batches, read

    def stream(self, position: int) -> Iterator[MicroBatch]:
        """The micro-batches of `at`, one after the other."""
        return (self._micro_batch(positions, self.indices(positions)) for positions in self.positions(position))

    def _micro_batch(self, positions: np.ndarray, rows: np.ndarray) -> MicroBatch:
        failpoint("read_data")
        table = self.rows.with_format("numpy")[rows]
        batch = {name: torch.from_numpy(np.asarray(table[name]).astype(np.int64)) for name in table}
        labels = batch.get("labels", batch["input_ids"]).clone()
        if "attention_mask" in batch:
            labels[batch["attention_mask"] == 0] = IGNORED
        if self.document_end is not None:
            begins = document_begins(batch["input_ids"], self.document_end)
            batch["position_ids"] = restarting_positions(begins)
            labels[begins] = IGNORED  # not a target of the document before
        if self.end is not None:
            labels[torch.from_numpy(positions >= self.end)] = IGNORED
        return {**batch, "labels": labels}


def document_begins(input_ids: Tensor, document_end: int) -> Tensor:
    """True where a document begins inside a row (the row's own beginning is none). bool [rows, context]"""
    begins = torch.zeros_like(input_ids, dtype=torch.bool)
    begins[:, 1:] = input_ids[:, :-1] == document_end
    return begins


def restarting_positions(begins: Tensor) -> Tensor:
    """Positions that count from 0 in each document, from which transformers makes its attention mask. int64."""
    index = torch.arange(begins.shape[1]).expand(begins.shape)
    return index - torch.where(begins, index, 0).cummax(dim=1).values


@lru_cache(maxsize=2)  # a step can touch two epochs
def _order(index_count: int, seed: int, epoch: int) -> np.ndarray:
    return shuffled(index_count, seed, epoch)


class Prefetch:
    """`batches.at`, read ahead by threads, and a record of the rows that were handed out."""

    def __init__(self, batches: Batches, num_workers: int) -> None:
        self.batches = batches
        self.rows_read = RowsRead()  # by this rank, for steps; what is only read ahead doesn't count
        self.ahead = num_workers
        self.pool = ThreadPoolExecutor(num_workers, "batches") if num_workers else None
        self.pending: dict[int, Future[tuple[list[MicroBatch], RowsRead]]] = {}

    def at(self, position: int) -> list[MicroBatch]:
        """Same as `batches.at(position)`; starts to read what follows."""
        micro_batches, read = self._read(position)
        self.rows_read += read
        return micro_batches

    def _read(self, position: int) -> tuple[list[MicroBatch], RowsRead]:
        if self.pool is None:
            return self.batches.read(position)
        now = self.pending.pop(position, None)
        step = self.batches.global_batch_size
        following = [position + k * step for k in range(1, self.ahead + 1)]
        for other in [p for p in self.pending if p not in following]:  # the run jumped
            self.pending.pop(other).cancel()
        for other in following:
            if other not in self.pending:
                self.pending[other] = self.pool.submit(self.batches.read, other)
        return self.batches.read(position) if now is None else now.result()

    def close(self) -> None:
        """Stop the threads."""
        if self.pool is not None:
            self.pool.shutdown(wait=True, cancel_futures=True)


def target_count(micro_batch: MicroBatch) -> Tensor:
    """Number of tokens that are predicted: labels shifted by one, so never the first of a row. int64, scalar."""
    return (micro_batch["labels"][:, 1:] != IGNORED).sum()
