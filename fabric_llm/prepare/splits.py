"""Encoded pieces -> two splits, each a flat file of tokens, one document after the other.

One pass over the pieces in order, in this process alone, at the speed of the disk: documents are handled by arrays. Whether a
document goes to validation is a function of the seed and its index alone.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Optional

import numpy as np

from fabric_llm.data.order import splitmix64
from fabric_llm.prepare.encoding import Lengths

COPY_TOKENS = 4 * 2**20  # at once
BUCKET_DOCUMENTS = 2**22  # sorted at once; each takes about 100 bytes
HASHED = np.dtype([("index", "<u8"), ("high", "<u8"), ("low", "<u8")])  # a document and the hash of its text
SPLITS = ("train", "validation")


@dataclass(frozen=True)
class Draw:
    """How documents are divided between the splits."""

    folder: Path  # of the pieces
    pieces: int
    seed: int
    validation_fraction: float
    repeated: Optional[np.ndarray] = None  # bool [documents], see `repeated`
    moved: int = -1  # index of a document that goes to the other split, so that this has one
    most_tokens: int = 0  # of the drawn documents that validation may hold, see `bounded`


class Documents(NamedTuple):
    """The documents of a piece. Arrays [documents], of bool unless they say otherwise."""

    piece: int
    first: int  # index of the first document over all pieces
    lengths: np.ndarray  # tokens, int64
    draws: np.ndarray  # may be drawn for validation: its dataset has no validation split of its own
    repeated: np.ndarray  # an earlier document equals it
    in_validation: np.ndarray
    held_back: np.ndarray  # drawn for validation, which would hold too much with it, and so in train


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


def documents(draw: Draw) -> Iterator[Documents]:
    """All documents, piece by piece, in order."""
    first, room = 0, draw.most_tokens
    for piece in range(draw.pieces):
        words = np.fromfile(draw.folder / f"{piece:06d}.lengths", "<u8")
        if not len(words):
            continue
        lengths, own_validation, draws = Lengths.decode(words)
        after = first + len(words)
        repeated = np.zeros(len(words), bool) if draw.repeated is None else np.array(draw.repeated[first:after])
        indices = np.arange(first, after)
        drawn = draws & ((document_hashes(draw.seed, indices) < draw.validation_fraction) ^ (indices == draw.moved))
        held_back, asking = np.zeros(len(words), bool), np.flatnonzero(drawn & ~repeated)
        held_back[asking], room = _beyond(lengths[asking], room)
        in_validation = np.where(draws, drawn & ~held_back, own_validation)
        yield Documents(piece, first, lengths, draws, repeated, in_validation, held_back)
        first = after


def _beyond(lengths: np.ndarray, room: int) -> tuple[np.ndarray, int]:
    """(which of the documents don't fit, one after the other, into what is left of `room` tokens, what is left then)"""
    if (total := int(lengths.sum())) <= room:
        return np.zeros(len(lengths), bool), room - total
    beyond = []
    for length in lengths.tolist():
        beyond.append(length > room)
        room -= 0 if beyond[-1] else length
    return np.array(beyond), room


def bounded(draw: Draw) -> Draw:
    """With the most tokens that validation may hold: twice its fraction, so that one huge document doesn't fill it.

    Of a few documents, each of which may be more than that, it may hold two of average length, but not more than half of all.
    """
    tokens, count = 0, 0
    for some in documents(draw):
        mine = some.draws & ~some.repeated
        tokens, count = tokens + int(some.lengths[mine].sum()), count + int(mine.sum())
    share = max(2 * draw.validation_fraction, min(2 / max(1, count), 0.5))
    return replace(draw, most_tokens=int(tokens * share))


def with_both_splits(draw: Draw) -> Draw:
    """All of a few documents can fall into one split. Then the one nearest to the other split that may go there moves there."""
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
    if counts.sum() < 2 or nearest[0] >= 2 or not draw.validation_fraction:
        return draw
    return replace(draw, moved=nearest[1])


# --------------------------------------------------------------------------- duplicates


def repeated(hashes: Sequence[Path], count: int, folder: Path) -> np.ndarray:
    """True for each of `count` documents that an earlier one equals. A memory map, bool [count].

    hashes: files of 16 bytes a document, one behind the other in the order of documents. folder: for files on the way, 25
    bytes a document.

    The hashes are dealt out to buckets by their leading bits, and each bucket is sorted by itself, so that memory doesn't grow
    with the number of documents.
    """
    bits = max(0, (count // BUCKET_DOCUMENTS).bit_length())
    buckets = [folder / f"bucket-{number}" for number in range(2**bits)]
    index = 0
    with contextlib.ExitStack() as stack:
        out = [stack.enter_context(open(path, "wb")) for path in buckets]
        for path in hashes:
            words = np.fromfile(path, "<u8").reshape(-1, 2)
            some = np.empty(len(words), HASHED)
            some["index"] = np.arange(index, index + len(words))
            some["high"], some["low"] = words.T
            index += len(words)
            bucket_of = words[:, 0] >> np.uint64(64 - bits) if bits else np.zeros(len(words), np.uint64)
            for number in np.unique(bucket_of):
                out[int(number)].write(some[bucket_of == number].tobytes())
    found = np.memmap(folder / "repeated", dtype=bool, mode="w+", shape=max(1, count))
    for path in buckets:
        some = np.fromfile(path, HASHED)
        path.unlink()
        some = some[np.lexsort((some["index"], some["low"], some["high"]))]
        same = (some["high"][1:] == some["high"][:-1]) & (some["low"][1:] == some["low"][:-1])
        found[some["index"][1:][same]] = True
    return found


# --------------------------------------------------------------------------- flat files


def split_documents(draw: Draw, folder: Path, dtype: str) -> tuple[dict[str, Split], dict[str, dict]]:
    """Write each document, whole and in order, to the flat files of its split.

    Returns also the documents and tokens of what was `duplicates`, and of what was `held_back` from validation.
    """
    splits = {name: Split(folder / f"{name}.tokens", np.dtype(dtype)) for name in SPLITS}
    apart = {name: {"documents": 0, "tokens": 0} for name in ("duplicates", "held_back")}
    for split in splits.values():
        split.path.write_bytes(b"")
        split.lengths.write_bytes(b"")
    for some in documents(with_both_splits(bounded(draw))):
        for count, mine in zip(apart.values(), (some.repeated, some.held_back)):
            count["documents"] += int(mine.sum())
            count["tokens"] += int(some.lengths[mine].sum())
        _append(splits["train"], draw.folder, some, ~some.in_validation & ~some.repeated)
        _append(splits["validation"], draw.folder, some, some.in_validation & ~some.repeated)
    return splits, apart


def _append(split: Split, folder: Path, some: Documents, mine: np.ndarray) -> None:
    """Copy the documents that are `mine` from a piece to the files of a split, COPY_TOKENS at a time, however long one is."""
    split.documents += int(mine.sum())
    split.tokens += int(some.lengths[mine].sum())
    with open(split.lengths, "ab") as lengths:
        lengths.write(some.lengths[mine].astype("<i8").tobytes())
    ends = np.cumsum(some.lengths)
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mine, [False]])))  # of runs of documents
    with open(folder / f"{some.piece:06d}.tokens", "rb") as piece, open(split.path, "ab") as out:
        for first, after in zip(edges[::2].tolist(), edges[1::2].tolist()):
            begin, end = int(ends[first] - some.lengths[first]), int(ends[after - 1])
            piece.seek(begin * split.dtype.itemsize)
            for at in range(begin, end, COPY_TOKENS):
                tokens = np.fromfile(piece, split.dtype, min(COPY_TOKENS, end - at))
                out.write(tokens.data)
                split.max_token_id = max(split.max_token_id, int(tokens.max()))
