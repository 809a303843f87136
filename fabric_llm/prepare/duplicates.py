"""Find documents whose text has come before, by 128-bit hashes, in memory that doesn't grow with their number."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np

BUCKET_DOCUMENTS = 2**22  # sorted at once; each takes about 100 bytes
CHUNK_DOCUMENTS = 2**20
ENTRY = np.dtype([("index", "<u8"), ("high", "<u8"), ("low", "<u8")])


def repeated(hashes: Iterable[Path], documents: int, folder: Path) -> np.ndarray:
    """True for each document that an earlier one equals. A memory map, bool [documents].

    hashes: files of 16 bytes a document, one behind the other in the order of documents. folder: for files on the way, 25
    bytes a document.

    The hashes are dealt out to buckets by their leading bits, and each bucket is sorted by itself.
    """
    bits = max(0, (documents // BUCKET_DOCUMENTS).bit_length())
    buckets = _dealt_out(hashes, folder, bits)
    found = np.memmap(folder / "repeated", dtype=bool, mode="w+", shape=max(1, documents))
    for bucket in buckets:
        entries = np.fromfile(bucket, dtype=ENTRY)
        bucket.unlink()
        order = np.lexsort((entries["index"], entries["low"], entries["high"]))
        entries = entries[order]
        same = (entries["high"][1:] == entries["high"][:-1]) & (entries["low"][1:] == entries["low"][:-1])
        found[entries["index"][1:][same]] = True
    return found


def _dealt_out(hashes: Iterable[Path], folder: Path, bits: int) -> list[Path]:
    """Files of ENTRY, one for each value of the leading `bits` of a hash."""
    paths = [folder / f"bucket-{number}" for number in range(2**bits)]
    index = 0
    with contextlib.ExitStack() as stack:
        out = [stack.enter_context(open(path, "wb")) for path in paths]
        for path in hashes:
            for words in _chunks(path):
                entries = np.empty(len(words), dtype=ENTRY)
                entries["index"] = np.arange(index, index + len(words))
                entries["high"], entries["low"] = words[:, 0], words[:, 1]
                index += len(words)
                bucket = (words[:, 0] >> np.uint64(64 - bits)).astype(np.int64) if bits else np.zeros(len(words), int)
                order = np.argsort(bucket, kind="stable")
                begins = np.searchsorted(bucket[order], np.arange(2**bits + 1))
                for number in np.flatnonzero(np.diff(begins)):
                    out[number].write(entries[order[begins[number] : begins[number + 1]]].tobytes())
    return paths


def _chunks(path: Path) -> Iterable[np.ndarray]:
    with open(path, "rb") as file:
        while data := file.read(CHUNK_DOCUMENTS * 16):
            yield np.frombuffer(data, dtype="<u8").reshape(-1, 2)
