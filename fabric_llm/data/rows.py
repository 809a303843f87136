"""Tokens of documents -> two splits, each a flat file -> rows of one length in a folder that `datasets` opens."""

from __future__ import annotations

import contextlib
import hashlib
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa

from fabric_llm.base import files
from fabric_llm.base.failpoints import failpoint

COPY_TOKENS = 16 * 2**20
MAX_SHARD_SIZE = "1GB"


@dataclass
class Split:
    """A split while it is written: a flat file of int32 tokens, one document after the other."""

    path: Path
    documents: int = 0
    tokens: int = 0
    max_token_id: int = -1
    nearest: tuple[float, int, int] = (
        2.0,
        0,
        0,
    )  # the document nearest to the other split: distance, first token, tokens

    def add(self, ids: np.ndarray, distance: float) -> None:
        """Count a document that was written to the file."""
        self.nearest = min(self.nearest, (distance, self.tokens, len(ids)))
        self.documents += 1
        self.tokens += len(ids)
        self.max_token_id = max(self.max_token_id, int(ids.max()))


def document_hash(seed: int, index: int) -> float:
    """A number in [0, 1), uniform over documents: a function of (seed, index)."""
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=6).digest()
    return int.from_bytes(digest, "big") / 2**48


def split_documents(
    encoded: Iterable[np.ndarray], folder: Path, seed: int, validation_fraction: float
) -> dict[str, Split]:
    """Write each document, whole and in order, to the flat file of its split: train or validation."""
    train, validation = Split(folder / "train.int32"), Split(folder / "validation.int32")
    with open(train.path, "wb") as train_file, open(validation.path, "wb") as validation_file:
        for index, ids in enumerate(encoded):
            number = document_hash(seed, index)
            split, file = (validation, validation_file) if number < validation_fraction else (train, train_file)
            failpoint("prepare.documents")
            file.write(ids.data)
            split.add(ids, abs(number - validation_fraction))
    # All of a few documents can fall into one split. Then the one nearest to the other split moves there.
    if train.documents + validation.documents >= 2:
        if not validation.documents:
            _move_nearest(train, validation)
        elif not train.documents:
            _move_nearest(validation, train)
    return {"train": train, "validation": validation}


def _move_nearest(source: Split, destination: Split) -> None:
    _, start, count = source.nearest
    tokens = np.memmap(source.path, dtype=np.int32, mode="r+")
    moved = np.array(tokens[start : start + count])
    moved.tofile(destination.path)
    destination.add(moved, 0.0)
    for position in range(start, len(tokens) - count, COPY_TOKENS):
        chunk = np.array(tokens[position + count : position + count + COPY_TOKENS])
        tokens[position : position + len(chunk)] = chunk
    source.documents -= 1
    source.tokens -= count  # the rest of the file isn't read again


def save_rows(splits: dict[str, Split], folder: Path, context_length: int, progress: bool) -> dict[str, dict]:
    """Write the whole rows of each split as a DatasetDict into `folder`. Returns `splits` of the manifest.

    Raises ValueError for a split that doesn't fill a row, Fault (74) where the disk hasn't the room.
    """
    tokens = sum(split.tokens // context_length for split in splits.values()) * context_length
    files.room(folder, 4 * tokens, "The dataset", "make room, or take an --output on another disk")
    failpoint("prepare.rows")
    for name, split in splits.items():
        if split.tokens < context_length:
            larger = "a larger --validation_fraction" if name == "validation" else "a smaller --validation_fraction"
            raise ValueError(
                f"the {name} split has {split.tokens} tokens in {split.documents} of"
                f" {sum(one.documents for one in splits.values())} documents, which do not fill one row of"
                f" context_length {context_length}: choose a smaller --context_length or {larger},"
                f" or give more text (a plain-text file is one document, and documents are never divided)"
            )
    described, prepared = {}, {}
    for name, split in splits.items():
        rows = split.tokens // context_length
        tokens = np.memmap(split.path, dtype=np.int32, mode="r", shape=rows * context_length)
        digest = hashlib.sha256()
        for position in range(0, len(tokens), COPY_TOKENS):
            digest.update(tokens[position : position + COPY_TOKENS].data)
        described[name] = {
            "documents": split.documents,
            "tokens": split.tokens,
            "rows": rows,
            "dropped_tokens": split.tokens - rows * context_length,
            "sha256": digest.hexdigest(),
        }
        prepared[name] = _fixed_size_dataset(tokens, context_length, name, fingerprint=digest.hexdigest()[:16])

    with _datasets_bars(shown=progress and sys.stderr.isatty()):
        datasets.DatasetDict(prepared).save_to_disk(folder, max_shard_size=MAX_SHARD_SIZE)
    for split in splits.values():
        split.path.unlink()
    return described


def _fixed_size_dataset(tokens: np.ndarray, context_length: int, name: str, fingerprint: str) -> datasets.Dataset:
    features = datasets.Features({"input_ids": datasets.List(datasets.Value("int32"), length=context_length)})
    # The memory map itself becomes the column, so that nothing is copied or read yet.
    flat = pa.Array.from_buffers(pa.int32(), len(tokens), [None, pa.py_buffer(tokens)])
    column = pa.FixedSizeListArray.from_arrays(flat, context_length)
    # Without a fingerprint, `datasets` would pickle the whole table to compute one.
    return datasets.Dataset(
        pa.table({"input_ids": column}),
        info=datasets.DatasetInfo(features=features),
        split=datasets.NamedSplit(name),
        fingerprint=fingerprint,
    )


@contextlib.contextmanager
def _datasets_bars(shown: bool) -> Iterator[None]:
    """Hide the progress bars of `datasets` unless `shown`. Its switch is global, so it is set back."""
    switch = not shown and not datasets.utils.are_progress_bars_disabled()
    if switch:
        datasets.utils.disable_progress_bars()
    try:
        yield
    finally:
        if switch:
            datasets.utils.enable_progress_bars()
