"""Documents -> rows of one length -> a folder that `datasets` opens.

`concat`: one document behind the other, cut into rows, so that many documents begin in one row and end in the next.
`best_fit`: only documents longer than a row are cut, and the rest of a row is filled with EOS. Ding et al. 2024, "Fewer
Truncations Improve Language Modeling", arXiv 2404.10830: from the longest on, each goes into the fullest row that has room.

Exactly one EOS ends each document, so that EOS after EOS is padding. Where the text of a document fills whole rows, its EOS
would be alone in another: no token before it predicts it, and behind another document it would pass for padding. It is dropped.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import datasets
import numpy as np
import pyarrow as pa
from tqdm import tqdm

from fabric_llm.base.failpoints import failpoint
from fabric_llm.prepare.splits import COPY_TOKENS, Split

WINDOW_DOCUMENTS = 2**20  # packed together
WINDOW_TOKENS = 2**26  # likewise: their rows are in memory
SHARD_BYTES = 10**9
ONE_DOCUMENT = (
    "the inputs hold one document, which is never divided between train and validation: give more documents, or divide a"
    r" text file with --document_separator, where '\n' makes a document of each line"
)


# --------------------------------------------------------------------------- best fit


@dataclass
class Packed:
    """What packing has done."""

    rows: int = 0
    padding_tokens: int = 0
    documents_cut: int = 0
    dropped_tokens: int = 0  # EOS of documents whose text fills whole rows


def best_fit(lengths: np.ndarray, room: int) -> tuple[np.ndarray, np.ndarray, int]:
    """(row of each item, its place in that row, number of rows) for items of `lengths` tokens, each at most `room`.

    The rooms that rows have left are the bits of one integer: the lowest bit from `length` on is the fullest row with room.
    """
    rows_with: defaultdict[int, list[int]] = defaultdict(list)  # by tokens that are left
    bits, count = 0, 0
    row, place = np.empty(len(lengths), np.int64), np.empty(len(lengths), np.int64)
    for item in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[item])
        fitting = bits >> length
        if fitting:
            left = length + (fitting & -fitting).bit_length() - 1
            rows = rows_with[left]
            into = rows.pop()
            if not rows:
                bits ^= 1 << left
        else:
            left, into, count = room, count, count + 1
        row[item], place[item] = into, room - left
        left -= length
        if left:
            rows_with[left].append(into)
            bits |= 1 << left
    return row, place, count


def _windows(lengths: np.ndarray, context: int) -> Iterator[slice]:
    """Ranges of documents that are packed together: so many that what is left of the long ones fills WINDOW_TOKENS."""
    begin = 0
    while begin < len(lengths):
        some = lengths[begin : begin + WINDOW_DOCUMENTS]
        full = np.searchsorted(np.cumsum(np.where(some > context, some % context, some)), WINDOW_TOKENS, side="right")
        end = begin + max(1, min(len(some), int(full)))
        yield slice(begin, end)
        begin = end


def pack(
    tokens: np.ndarray, lengths: np.ndarray, context: int, padding: int, write: Callable[[np.ndarray], None]
) -> Packed:
    """Pack documents, `tokens` one behind the other, and `write` rows [rows, context], a few at a time.

    In each window the whole rows of long documents come first, then what is left of them among the short ones.
    """
    done, begin = Packed(), 0
    for window in _windows(lengths, context):
        some = lengths[window]
        starts = begin + np.cumsum(some) - some
        begin += int(some.sum())
        whole = np.where(some > context, some // context, 0)
        done.documents_cut += int((some > context).sum())
        at_once = max(1, WINDOW_TOKENS // context) * context
        for start, rows in zip(starts[whole > 0].tolist(), whole[whole > 0].tolist()):
            for at in range(start, start + rows * context, at_once):
                write(tokens[at : min(at + at_once, start + rows * context)].reshape(-1, context))
        rest = some - whole * context
        item_starts, item_lengths = (starts + whole * context)[rest > 1], rest[rest > 1]
        row, place, count = best_fit(item_lengths, context)
        packed = np.full(count * context, padding, dtype=tokens.dtype)
        for start, length, to in zip(item_starts.tolist(), item_lengths.tolist(), (row * context + place).tolist()):
            packed[to : to + length] = tokens[start : start + length]
        write(packed.reshape(count, context))
        done.rows += int(whole.sum()) + count
        done.padding_tokens += count * context - int(item_lengths.sum())
        done.dropped_tokens += int((rest == 1).sum())
    return done


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
    one_row = _fixed_size_dataset(first, context_length, folder.name)
    hides_bars = datasets.utils.are_progress_bars_disabled()
    datasets.utils.disable_progress_bars()
    one_row.save_to_disk(folder)
    if not hides_bars:
        datasets.utils.enable_progress_bars()
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
