"""Encoded pieces -> two splits -> rows of one length -> a folder that `datasets` opens, in this process alone.

Whether a document is drawn for validation is a function of the seed and its index alone. Two flat files hold the tokens of the
splits, which are then packed into rows:

`concat`: one document behind the other, cut into rows, so that many documents begin in one row and end in the next.
`best_fit`: only documents longer than a row are cut, and the rest of a row is filled with EOS. Ding et al. 2024, "Fewer
Truncations Improve Language Modeling", arXiv 2404.10830: from the longest on, each goes into the fullest row that has room.

Exactly one EOS ends each document, so that EOS after EOS is padding. Where the text of a document fills whole rows exactly, its
EOS would come into another row, where no token predicts it, and where it would pass for padding. It is dropped.
"""

from __future__ import annotations

import hashlib
import json
import mmap
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Optional

import datasets
import numpy as np
import pyarrow as pa
from tqdm import tqdm

from fabric_llm.base.failpoints import failpoint
from fabric_llm.data.order import splitmix64
from fabric_llm.prepare.documents import DRAWN, TO_VALIDATION

COPY_TOKENS = 4 * 2**20  # at once
WINDOW_DOCUMENTS = 2**20  # packed together
WINDOW_TOKENS = 2**26  # likewise: their rows are in memory
SHARD_BYTES = 10**9


@dataclass(frozen=True)
class Draw:
    """How documents are divided between the splits."""

    folder: Path  # of the pieces
    pieces: int
    seed: int
    validation_fraction: float
    repeated: Optional[np.ndarray] = None  # bool [documents], see `repeated`
    moved: int = -1  # index of a document that changes its split, because all others are in it; -1: none
    most_tokens: int = 0  # that validation may hold of the drawn documents, see `settled`


class Documents(NamedTuple):
    """The documents of a piece. Arrays [documents], of bool unless they say otherwise."""

    piece: int
    first: int  # index of the first document over all pieces
    lengths: np.ndarray  # tokens, int64
    draws: np.ndarray  # may be drawn for validation: its dataset has no validation split of its own
    repeated: np.ndarray  # an earlier document equals it
    in_validation: np.ndarray


@dataclass
class Split:
    """A split as flat files: its tokens, one document after the other, and the lengths of the documents, int64 each."""

    tokens_path: Path
    lengths_path: Path
    dtype: np.dtype
    documents: int = 0
    tokens: int = 0
    max_token_id: int = -1


def document_hashes(seed: int, indices: np.ndarray) -> np.ndarray:
    """A number in [0, 1) for each index of a document, uniform: a function of (seed, index). float64

    The generator splitmix64, whose state goes on by a constant from one index to the next.
    """
    key = int.from_bytes(hashlib.blake2b(str(seed).encode(), digest_size=8).digest(), "big")
    with np.errstate(over="ignore"):
        steps = (np.asarray(indices).astype(np.uint64) - np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        return (splitmix64(steps + np.uint64(key)) >> np.uint64(11)) / 2.0**53


def documents(draw: Draw) -> Iterator[Documents]:
    """All documents, piece by piece, in order."""
    first, room = 0, draw.most_tokens
    for piece in range(draw.pieces):
        words = np.fromfile(draw.folder / f"{piece:06d}.lengths", "<u8")
        if not len(words):
            continue
        lengths, goes, indices = (words >> 2).astype(np.int64), words & 3, np.arange(first, first + len(words))
        draws = goes == DRAWN
        repeated = np.zeros(len(words), bool) if draw.repeated is None else draw.repeated[indices]
        drawn = draws & ((document_hashes(draw.seed, indices) < draw.validation_fraction) ^ (indices == draw.moved))
        for index in np.flatnonzero(drawn & ~repeated).tolist():
            drawn[index] = lengths[index] <= room  # else it stays in train: validation would hold too much with it
            room -= int(lengths[index]) if drawn[index] else 0
        yield Documents(piece, first, lengths, draws, repeated, np.where(draws, drawn, goes == TO_VALIDATION))
        first += len(words)


def settled(draw: Draw) -> Draw:
    """The draw with the most tokens that validation may hold, and with a document in each split.

    Validation may hold twice its fraction of the tokens, so that one huge document doesn't fill it. Where that is less than two
    documents of average length, it may hold these, but not more than half of all tokens. If all documents fall into one split,
    the one whose hash is nearest to the fraction, of those that may move, moves to the other.
    """
    tokens, count = 0, 0
    for some in documents(draw):
        mine = some.draws & ~some.repeated
        tokens, count = tokens + int(some.lengths[mine].sum()), count + int(mine.sum())
    share = max(2 * draw.validation_fraction, min(2 / max(1, count), 0.5))
    draw = replace(draw, most_tokens=int(tokens * share))
    counts, nearest = np.zeros(2, np.int64), (2.0, -1)
    for some in documents(draw):
        counts += [(~some.repeated & ~some.in_validation).sum(), (~some.repeated & some.in_validation).sum()]
        if counts.all():
            return draw
        hashes = document_hashes(draw.seed, some.first + np.arange(len(some.lengths)))
        distance = np.abs(hashes - draw.validation_fraction)
        distance[some.repeated | ~some.draws | (some.lengths > draw.most_tokens)] = 3.0
        at = int(distance.argmin())
        nearest = min(nearest, (float(distance[at]), some.first + at))
    can_move = counts.sum() >= 2 and nearest[0] < 2 and draw.validation_fraction
    return replace(draw, moved=nearest[1]) if can_move else draw


def repeated(hashes: Sequence[Path]) -> np.ndarray:
    """True for each document that an earlier one equals, bool [documents]. Takes about 60 bytes a document.

    hashes: files of 16 bytes a document, one behind the other in the order of documents.
    """
    words = np.concatenate([np.fromfile(path, "<u8").reshape(-1, 2) for path in hashes])
    order = np.lexsort(words.T)  # which leaves equal ones in their order
    found = np.zeros(len(words), bool)
    found[order[1:]] = (words[order[1:]] == words[order[:-1]]).all(axis=1)
    return found


def split_documents(draw: Draw, dtype: str) -> tuple[dict[str, Split], dict[str, int]]:
    """Write each document, whole and in order, to the flat files of its split.

    Returns also how many documents and tokens were left out, because they repeat others.
    """
    left_out = {"documents": 0, "tokens": 0}
    splits = {}
    for name in ("train", "validation"):
        paths = [draw.folder / f"{name}.{what}" for what in ("tokens", "lengths")]
        for path in paths:
            path.write_bytes(b"")
        splits[name] = Split(*paths, np.dtype(dtype))
    for some in documents(settled(draw)):
        left_out["documents"] += int(some.repeated.sum())
        left_out["tokens"] += int(some.lengths[some.repeated].sum())
        _append(splits["train"], draw.folder, some, ~some.in_validation & ~some.repeated)
        _append(splits["validation"], draw.folder, some, some.in_validation & ~some.repeated)
    return splits, left_out


def _append(split: Split, folder: Path, some: Documents, mine: np.ndarray) -> None:
    """Copy the documents that are `mine` from a piece to the files of a split, COPY_TOKENS at a time, however long one is."""
    split.documents += int(mine.sum())
    split.tokens += int(some.lengths[mine].sum())
    with open(split.lengths_path, "ab") as lengths:
        lengths.write(some.lengths[mine].astype("<i8").tobytes())
    ends = np.cumsum(some.lengths)
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mine, [False]])))  # of runs of documents
    with open(folder / f"{some.piece:06d}.tokens", "rb") as piece, open(split.tokens_path, "ab") as out:
        for first, after in zip(edges[::2].tolist(), edges[1::2].tolist()):
            begin, end = int(ends[first] - some.lengths[first]), int(ends[after - 1])
            piece.seek(begin * split.dtype.itemsize)
            for at in range(begin, end, COPY_TOKENS):
                tokens = np.fromfile(piece, split.dtype, min(COPY_TOKENS, end - at))
                out.write(tokens.data)
                split.max_token_id = max(split.max_token_id, int(tokens.max()))


def best_fit(lengths: np.ndarray, room: int) -> tuple[np.ndarray, np.ndarray, int]:
    """(row of each item, its place in that row, number of rows) for items of `lengths` tokens, each at most `room`.

    Bit n of `bits` says that a row has room for n more tokens: the lowest one at or above `length` is that of the fullest row
    with enough room.
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


def pack(
    tokens: np.ndarray, lengths: np.ndarray, context: int, padding: int, write: Callable[[np.ndarray], Any]
) -> dict[str, Any]:
    """Pack documents, `tokens` one behind the other, and `write` rows [rows, context], a few at a time.

    In each window the whole rows of long documents come first, then what is left of them among the short ones. Returns what
    the manifest says of it.
    """
    rows, cut, dropped, padded, done, begin = 0, 0, 0, 0, 0, 0
    while done < len(lengths):
        # So many documents that what is left of the long ones fills WINDOW_TOKENS.
        some = lengths[done : done + WINDOW_DOCUMENTS]
        filled = np.cumsum(np.where(some > context, some % context, some))
        some = some[: max(1, int(np.searchsorted(filled, WINDOW_TOKENS, side="right")))]
        done += len(some)
        starts = begin + np.cumsum(some) - some
        begin += int(some.sum())
        whole = np.where(some > context, some // context, 0)
        at_once = max(1, WINDOW_TOKENS // context) * context
        for start, count in zip(starts[whole > 0].tolist(), whole[whole > 0].tolist()):
            end = start + count * context
            for at in range(start, end, at_once):
                write(tokens[at : min(at + at_once, end)].reshape(-1, context))
        rest = some - whole * context
        item_starts, item_lengths = (starts + whole * context)[rest > 1], rest[rest > 1]
        row, place, count = best_fit(item_lengths, context)
        packed = np.full(count * context, padding, dtype=tokens.dtype)
        for start, length, to in zip(item_starts.tolist(), item_lengths.tolist(), (row * context + place).tolist()):
            packed[to : to + length] = tokens[start : start + length]
        write(packed.reshape(count, context))
        rows += int(whole.sum()) + count
        cut += int((some > context).sum())
        padded += count * context - int(item_lengths.sum())
        dropped += int((rest == 1).sum())
    return {
        "rows": rows,
        "dropped_tokens": dropped,  # EOS of documents whose text fills whole rows
        "padding_tokens": padded,
        "documents_cut": cut,
        "row_use_percent": round(100 * (1 - padded / (rows * context)), 3),
    }


def save_rows(splits: dict[str, Split], folder: Path, context_length: int, packing: str, eos: int) -> dict[str, dict]:
    """Write the rows of each split as a DatasetDict into the new `folder`. Returns `splits` of the manifest.

    Raises ValueError for a split without a row.
    """
    failpoint("prepare.rows")
    total = sum(split.documents for split in splits.values())
    for name, split in splits.items():
        if split.tokens >= (1 if packing == "best_fit" else context_length):
            continue
        raise ValueError(
            f"the {name} split has {split.tokens} tokens in {split.documents} of {total} documents, which do not"
            f" fill one row of context_length {context_length}: choose a smaller --context_length or a"
            f" {'larger' if name == 'validation' else 'smaller'} --validation_fraction, or give more text (a plain-text file"
            f" is one document unless --document_separator says otherwise, and documents are never divided between splits)"
        )
    described = {}
    for name, split in splits.items():
        if packing == "best_fit":
            said = _pack(split, context_length, eos)
        else:
            rows = split.tokens // context_length
            said = {"rows": rows, "dropped_tokens": split.tokens - rows * context_length}
        digest = _save_split(split, said["rows"], folder / name, context_length)
        described[name] = {"documents": split.documents, "tokens": split.tokens, **said, "sha256": digest}
        split.tokens_path.unlink()
        split.lengths_path.unlink()
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": list(splits)}))
    return described


def _pack(split: Split, context_length: int, eos: int) -> dict[str, Any]:
    """Replace the flat file of a split by that of its packed rows."""
    path = split.tokens_path.with_suffix(".packed")
    with open(split.tokens_path, "rb") as flat, open(path, "wb") as file:
        tokens = mmap.mmap(flat.fileno(), 0, access=mmap.ACCESS_READ)

        def write(rows: np.ndarray) -> None:
            file.write(np.ascontiguousarray(rows).data)
            tokens.madvise(mmap.MADV_DONTNEED)  # else all that was read would count as memory of this process

        lengths = np.memmap(split.lengths_path, "<i8", mode="r")
        said = pack(np.frombuffer(tokens, split.dtype), lengths, context_length, eos, write)
    path.replace(split.tokens_path)
    return said


def _save_split(split: Split, rows: int, folder: Path, context_length: int) -> str:
    """Write the rows of a flat file as `datasets.save_to_disk` would; returns the sha256 of their tokens.

    `datasets` itself would map the whole file into memory.
    """
    folder.mkdir(parents=True)
    features = datasets.Features({"input_ids": datasets.List(datasets.Value(str(split.dtype)), length=context_length)})
    schema = features.arrow_schema
    shards = -(-rows * context_length * split.dtype.itemsize // SHARD_BYTES)
    names = [f"data-{number:05d}-of-{shards:05d}.arrow" for number in range(shards)]
    at_once, digest = max(1, COPY_TOKENS // context_length), hashlib.sha256()
    with open(split.tokens_path, "rb") as file, tqdm(desc=f"writing {folder.name}", total=rows, disable=None) as bar:
        for number, name in enumerate(names):
            mine = rows * (number + 1) // shards - rows * number // shards
            with pa.OSFile(str(folder / name), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
                for begin in range(0, mine, at_once):
                    count = min(at_once, mine - begin)
                    tokens = np.fromfile(file, split.dtype, count * context_length)
                    digest.update(tokens.data)
                    column = pa.FixedSizeListArray.from_arrays(pa.array(tokens), context_length)
                    writer.write_batch(pa.record_batch([column.cast(schema.field(0).type)], schema=schema))
                    bar.update(count)
    info = {"citation": "", "description": "", "features": features.to_dict(), "homepage": "", "license": ""}
    state = {
        "_data_files": [{"filename": name} for name in names],
        "_fingerprint": digest.hexdigest()[:16],
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": folder.name,
    }
    (folder / "dataset_info.json").write_text(json.dumps(info, indent=2))
    (folder / "state.json").write_text(json.dumps(state, indent=2))
    return digest.hexdigest()
