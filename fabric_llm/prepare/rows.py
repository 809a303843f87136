"""Encoded pieces -> two splits, each a flat file of tokens -> rows of one length in a folder that `datasets` opens.

One pass over the pieces in order, in this process alone, at the speed of the disk: documents are handled by arrays.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Optional

import datasets
import numpy as np
import pyarrow as pa
from tqdm import tqdm

from fabric_llm.base.failpoints import failpoint
from fabric_llm.data.order import splitmix64
from fabric_llm.prepare.encoding import Lengths
from fabric_llm.prepare.packing import pack

COPY_TOKENS = 4 * 2**20
CHUNK_DOCUMENTS = 2**18
SHARD_BYTES = 10**9
SPLITS = ("train", "validation")
ONE_DOCUMENT = (
    "the inputs hold one document, which is never divided between train and validation: give more documents, or divide a"
    r" text file with --document_separator, where '\n' makes a document of each line"
)


class Documents(NamedTuple):
    """Documents that stand one behind the other in a piece."""

    piece: int
    first_token: int  # in the piece
    lengths: np.ndarray  # tokens, int64
    in_validation: np.ndarray  # bool
    held_back: np.ndarray  # bool: drawn for validation, which would hold too much with it, and so in train
    repeated: np.ndarray  # bool: an earlier one equals it


@dataclass(frozen=True)
class Choice:
    """Where documents go."""

    folder: Path  # of the pieces
    pieces: int
    seed: int
    validation_fraction: float
    repeated: Optional[np.ndarray] = None  # bool [documents]
    moved: int = -1  # index of a document that goes to the other split, so that this has one
    most_tokens: int = 0  # of the drawn documents that validation may hold, see `bounded`


@dataclass
class Split:
    """A split while it is written: flat files of its tokens, one document after the other, and of documents' lengths."""

    path: Path
    dtype: np.dtype
    documents: int = 0
    tokens: int = 0
    max_token_id: int = -1
    rows: int = 0
    more: dict[str, Any] = field(default_factory=dict)  # for the manifest

    @property
    def lengths(self) -> Path:
        return self.path.with_suffix(".lengths")


# --------------------------------------------------------------------------- which split


def document_hashes(seed: int, indices: np.ndarray) -> np.ndarray:
    """A number in [0, 1) for each index of a document, uniform: a function of (seed, index). float64

    The generator splitmix64, whose state goes on by a constant from one index to the next.
    """
    key = int.from_bytes(hashlib.blake2b(str(seed).encode(), digest_size=8).digest(), "big")
    with np.errstate(over="ignore"):
        x = splitmix64(
            (np.asarray(indices).astype(np.uint64) - np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
        )
    return (x >> np.uint64(11)) / 2.0**53


def document_hash(seed: int, index: int) -> float:
    """`document_hashes` of one document."""
    return float(document_hashes(seed, np.array([index]))[0])


def documents(choice: Choice) -> Iterator[Documents]:
    """All documents of the pieces, in order."""
    room = choice.most_tokens
    for first, piece, first_token, lengths, own, draws, repeated in _lengths(choice):
        indices = np.arange(first, first + len(lengths))
        drawn = document_hashes(choice.seed, indices) < choice.validation_fraction
        drawn = draws & (drawn ^ (indices == choice.moved))
        held_back = np.zeros(len(lengths), bool)
        asking = np.flatnonzero(drawn & ~repeated)
        held_back[asking], room = _beyond(lengths[asking], room)
        yield Documents(piece, first_token, lengths, np.where(draws, drawn & ~held_back, own), held_back, repeated)


def _beyond(lengths: np.ndarray, room: int) -> tuple[np.ndarray, int]:
    """(which of the documents don't fit, one after the other, into what is left of `room` tokens, what is left then)"""
    if (total := int(lengths.sum())) <= room:
        return np.zeros(len(lengths), bool), room - total
    beyond = []
    for length in lengths.tolist():
        beyond.append(length > room)
        room -= 0 if beyond[-1] else length
    return np.array(beyond), room


def _lengths(choice: Choice) -> Iterator[tuple[int, int, int, np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
    first = 0
    for piece in range(choice.pieces):
        first_token = 0
        with open(choice.folder / f"{piece:06d}.lengths", "rb") as file:
            while data := file.read(8 * CHUNK_DOCUMENTS):
                lengths, own, draws = Lengths.decode(np.frombuffer(data, dtype="<u8"))
                repeated = np.zeros(len(lengths), bool)
                if choice.repeated is not None:
                    repeated = np.array(choice.repeated[first : first + len(lengths)])
                yield first, piece, first_token, lengths, own, draws, repeated
                first, first_token = first + len(lengths), first_token + int(lengths.sum())


def bounded(choice: Choice) -> Choice:
    """With the most tokens that validation may hold: twice its fraction, so that one huge document doesn't fill it.

    Of a few documents, each of which may be more than that, it may hold two of average length, but not more than half of all.
    """
    tokens, count = 0, 0
    for _, _, _, lengths, _, draws, repeated in _lengths(choice):
        mine = draws & ~repeated
        tokens, count = tokens + int(lengths[mine].sum()), count + int(mine.sum())
    share = max(2 * choice.validation_fraction, min(2 / max(1, count), 0.5))
    return replace(choice, most_tokens=int(tokens * share))


def with_both_splits(choice: Choice) -> Choice:
    """All of a few documents can fall into one split. Then the one nearest to the other split that may go there moves there."""
    counts, nearest = np.zeros(2, np.int64), (2.0, -1)
    all_documents = documents(choice)
    for (first, _, _, lengths, _, draws, _), some in zip(_lengths(choice), all_documents, strict=True):
        counts += [(~some.repeated & ~some.in_validation).sum(), (~some.repeated & some.in_validation).sum()]
        if counts.all():
            return choice
        distance = np.abs(
            document_hashes(choice.seed, np.arange(first, first + len(lengths))) - choice.validation_fraction
        )
        distance[some.repeated | ~draws | (lengths > choice.most_tokens)] = 3.0
        at = int(distance.argmin())
        nearest = min(nearest, (float(distance[at]), first + at))
    if counts.sum() < 2 or nearest[0] >= 2 or not choice.validation_fraction:
        return choice
    return replace(choice, moved=nearest[1])


# --------------------------------------------------------------------------- flat files


def split_documents(choice: Choice, folder: Path, dtype: str) -> tuple[dict[str, Split], dict[str, dict]]:
    """Write each document, whole and in order, to the flat files of its split.

    Returns also the documents and tokens of what was `duplicates`, and of what was `held_back` from validation.
    """
    splits = {name: Split(folder / f"{name}.tokens", np.dtype(dtype)) for name in SPLITS}
    apart = {name: {"documents": 0, "tokens": 0} for name in ("duplicates", "held_back")}
    choice = with_both_splits(bounded(choice))
    with contextlib.ExitStack() as stack:
        out = {name: stack.enter_context(open(split.path, "wb")) for name, split in splits.items()}
        lengths = {name: stack.enter_context(open(split.lengths, "wb")) for name, split in splits.items()}
        for some in documents(choice):
            for count, mine in zip(apart.values(), (some.repeated, some.held_back)):
                count["documents"] += int(mine.sum())
                count["tokens"] += int(some.lengths[mine].sum())
            chosen = {"train": ~some.in_validation & ~some.repeated, "validation": some.in_validation & ~some.repeated}
            for name, split in splits.items():
                split.documents += int(chosen[name].sum())
                split.tokens += int(some.lengths[chosen[name]].sum())
                lengths[name].write(some.lengths[chosen[name]].astype("<i8").tobytes())
            _copy(choice, some, chosen, splits, out)
    return splits, apart


def _copy(
    choice: Choice, some: Documents, chosen: dict[str, np.ndarray], splits: dict[str, Split], out: dict[str, BinaryIO]
) -> None:
    """Copy tokens to the files of their splits, COPY_TOKENS at a time, however long a document is."""
    dtype = splits["train"].dtype
    ends = np.cumsum(some.lengths)
    with open(choice.folder / f"{some.piece:06d}.tokens", "rb") as file:
        file.seek(some.first_token * dtype.itemsize)
        for begin in range(0, int(ends[-1]), COPY_TOKENS):
            tokens = np.frombuffer(file.read(COPY_TOKENS * dtype.itemsize), dtype=dtype)[: int(ends[-1]) - begin]
            end = begin + len(tokens)
            first, last = np.searchsorted(ends, begin, side="right"), np.searchsorted(ends, end, side="left") + 1
            inside = np.minimum(ends[first:last], end) - np.maximum((ends - some.lengths)[first:last], begin)
            places = np.concatenate([[0], np.cumsum(inside)])
            largest = int(tokens.max())
            for name, split in splits.items():
                for one, other in _runs(chosen[name][first:last]):
                    out[name].write(tokens[places[one] : places[other]].data)
                    split.max_token_id = max(split.max_token_id, largest)


def _runs(mine: np.ndarray) -> Iterator[tuple[int, int]]:
    """(first, behind the last) of each run of True."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mine, [False]])))
    return zip(edges[::2].tolist(), edges[1::2].tolist())


# --------------------------------------------------------------------------- rows


def save_rows(
    splits: dict[str, Split], folder: Path, context_length: int, packing: str, eos: int, progress: bool
) -> dict[str, dict]:
    """Write the rows of each split as a DatasetDict into the new `folder`. Returns `splits` of the manifest.

    Raises ValueError for a split without a row.
    """
    failpoint("prepare.rows")
    for name, split in splits.items():
        if split.tokens < (1 if packing == "best_fit" else context_length):
            raise ValueError(_no_row(name, splits, context_length))
    described = {}
    for name, split in splits.items():
        if packing == "best_fit":
            _pack(split, context_length, eos)
        else:
            split.rows = split.tokens // context_length
            split.more = {"dropped_tokens": split.tokens - split.rows * context_length}
        digest = _save_split(split, folder / name, context_length, progress)
        described[name] = {
            "documents": split.documents,
            "tokens": split.tokens,
            "rows": split.rows,
            **split.more,
            "sha256": digest,
        }
        split.path.unlink()
        split.lengths.unlink()
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": list(splits)}))
    return described


def _no_row(name: str, splits: dict[str, Split], context_length: int) -> str:
    larger = "a larger --validation_fraction" if name == "validation" else "a smaller --validation_fraction"
    total = sum(one.documents for one in splits.values())
    if total == 1:
        return ONE_DOCUMENT
    return (
        f"the {name} split has {splits[name].tokens} tokens in {splits[name].documents} of {total} documents, which do not"
        f" fill one row of context_length {context_length}: choose a smaller --context_length or {larger},"
        f" or give more text (a plain-text file is one document unless --document_separator says otherwise, and"
        f" documents are never divided between splits)"
    )


def _pack(split: Split, context_length: int, eos: int) -> None:
    """Replace the flat file of a split by that of its packed rows."""
    packed_path = split.path.with_suffix(".packed")
    with open(split.path, "rb") as flat, open(split.lengths, "rb") as of_documents, open(packed_path, "wb") as file:
        tokens = mmap.mmap(flat.fileno(), 0, access=mmap.ACCESS_READ)
        lengths = mmap.mmap(of_documents.fileno(), 0, access=mmap.ACCESS_READ)

        def write(rows: np.ndarray) -> None:
            file.write(np.ascontiguousarray(rows).data)
            tokens.madvise(mmap.MADV_DONTNEED)  # else all that was read would count as memory of this process

        arrays = np.frombuffer(tokens, split.dtype), np.frombuffer(lengths, "<i8")
        done = pack(*arrays, context_length, eos, write)
    packed_path.replace(split.path)
    split.rows = done.rows
    split.more = {
        "dropped_tokens": done.dropped_tokens,
        "padding_tokens": done.padding_tokens,
        "documents_cut": done.documents_cut,
        "row_use_percent": round(100 * (1 - done.padding_tokens / (done.rows * context_length)), 3),
    }


def _save_split(split: Split, folder: Path, context_length: int, progress: bool) -> str:
    """Write the rows of a flat file as `datasets.save_to_disk` would; returns the sha256 of their tokens.

    `datasets` itself writes the first row, and with it all that it says of a split. The other rows are appended here, since
    it would map the whole file into memory.
    """
    with open(split.path, "rb") as file:
        first = np.fromfile(file, split.dtype, context_length)
    with _without_bars_of_datasets():
        _fixed_size_dataset(first, context_length, folder.name).save_to_disk(folder)
    state = json.loads((folder / "state.json").read_text())
    [only] = state["_data_files"]
    with pa.ipc.open_stream(str(folder / only["filename"])) as stream:
        schema = stream.schema
    (folder / only["filename"]).unlink()
    shards = -(-split.rows * context_length * split.dtype.itemsize // SHARD_BYTES)
    names = [f"data-{number:05d}-of-{shards:05d}.arrow" for number in range(shards)]
    digest = hashlib.sha256()
    show = progress and sys.stderr.isatty()
    with open(split.path, "rb") as file, tqdm(desc=f"writing {folder.name}", total=split.rows, disable=not show) as bar:
        for number, name in enumerate(names):
            rows = split.rows * (number + 1) // shards - split.rows * number // shards
            _write_shard(file, folder / name, schema, rows, split.dtype, digest, bar)
    state.update(_data_files=[{"filename": name} for name in names], _fingerprint=digest.hexdigest()[:16])
    (folder / "state.json").write_text(json.dumps(state, indent=2, sort_keys=True))
    return digest.hexdigest()


def _write_shard(
    file: BinaryIO, path: Path, schema: pa.Schema, rows: int, dtype: np.dtype, digest: Any, bar: tqdm
) -> None:
    """Append the next `rows` of a flat file to an Arrow file, some at a time."""
    context_length = schema.field("input_ids").type.list_size
    at_once = max(1, COPY_TOKENS // context_length)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
        for begin in range(0, rows, at_once):
            count = min(at_once, rows - begin)
            tokens = np.fromfile(file, dtype, count * context_length)
            digest.update(tokens.data)
            column = pa.FixedSizeListArray.from_arrays(pa.array(tokens), context_length)
            writer.write_batch(pa.record_batch([column.cast(schema.field("input_ids").type)], schema=schema))
            bar.update(count)


def _fixed_size_dataset(tokens: np.ndarray, context_length: int, name: str) -> datasets.Dataset:
    features = datasets.Features({"input_ids": datasets.List(datasets.Value(str(tokens.dtype)), length=context_length)})
    column = pa.FixedSizeListArray.from_arrays(pa.array(tokens), context_length)
    return datasets.Dataset(
        pa.table({"input_ids": column}),
        info=datasets.DatasetInfo(features=features),
        split=datasets.NamedSplit(name),
        fingerprint="0",
    )


@contextlib.contextmanager
def _without_bars_of_datasets() -> Iterator[None]:
    """Hide the progress bars of `datasets`. Its switch is global, so it is set back."""
    switch = not datasets.utils.are_progress_bars_disabled()
    if switch:
        datasets.utils.disable_progress_bars()
    try:
        yield
    finally:
        if switch:
            datasets.utils.enable_progress_bars()
