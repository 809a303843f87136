"""What `--input` names -> sources -> pieces of 2 to 32 MB, in a fixed order, which processes and machines share.

A piece is one or more parts: ranges of large files, cut after a line or between documents, ranges of row groups or rows,
and many small files. The plan depends on the inputs alone, never on the number of processes.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, Optional

from fabric_llm.prepare import formats
from fabric_llm.prepare.documents import (
    BLANK_LINES,
    BLOCK_BYTES,
    Bad,
    Part,
    load_splits,
    parquet_file,
    read_part,
)
from fabric_llm.prepare.inputs import Found, Source

PIECE_BYTES = 32 * 2**20  # of a large corpus
# Of a small one, at least. Many pieces keep all cores busy to the end, but each is flushed to the disk, which takes 50 ms.
SMALL_PIECE_BYTES = 4 * 2**20
PIECES = 256
LONG_TEXT_BYTES = 16 * 2**20  # a text file from this size on is split at blank lines unless told otherwise
OWN_VALIDATION = ("validation", "valid", "dev")  # names of splits


class Piece(NamedTuple):
    """What one process reads and encodes, in order. JSON writes it as a list."""

    number: int
    bytes: int  # on disk
    parts: list[Part]


def plan(found: Found, separator: Optional[str]) -> list[Piece]:
    """The pieces of all sources. separator: see `inputs.separator`. Notes in `found` what should be said.

    Raises ValueError for a dataset or table that can't be opened.
    """
    total = sum(source.bytes or 0 for source in found.sources)
    piece_bytes = min(PIECE_BYTES, max(SMALL_PIECE_BYTES, total // PIECES))
    pieces: list[Piece] = []
    parts: list[Part] = []
    size = 0
    for source in found.sources:
        for part, part_bytes in _parts_of(source, found, separator, piece_bytes):
            if parts and size + part_bytes > piece_bytes:
                pieces.append(Piece(len(pieces), size, parts))
                parts, size = [], 0
            parts.append(part)
            size += part_bytes
    return [*pieces, Piece(len(pieces), size, parts)] if parts else pieces


def fingerprint(found: Found, pieces: Iterable[Piece]) -> str:
    """A hash of the plan and of the sizes and times of what it reads."""
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(json.dumps(piece).encode())
    for source in found.sources:
        digest.update(json.dumps([source.name, source.bytes, source.modified_ns]).encode())
    return digest.hexdigest()


def _parts_of(source: Source, found: Found, separator: Optional[str], piece_bytes: int) -> Iterator[tuple[Part, int]]:
    """(part, its bytes on disk)"""
    part = Part(source.name, source.kind)
    if source.kind in ("dataset", "hub"):
        yield from _dataset_parts(source, found, piece_bytes)
        return
    if source.kind == "text":
        part = part._replace(separator=_separator_of(source, found, separator))
    if source.bytes > piece_bytes and source.kind == "parquet":
        yield from _parquet_parts(part, source.bytes, piece_bytes)
    elif source.bytes > piece_bytes and _can_be_cut(part):
        yield from _ranges(part, source.bytes, piece_bytes)
    else:
        yield part, source.bytes


def _can_be_cut(part: Part) -> bool:
    """Whether ranges of its bytes can be read by themselves."""
    of_lines = part.kind == "json_lines" or part.kind == "text" and not part.is_one_document
    return of_lines and formats.compression_of(part.path) is None


def _separator_of(source: Source, found: Found, separator: Optional[str]) -> Optional[str]:
    if separator is not None:
        return separator or None
    if len(found.sources) > 1 and source.bytes < LONG_TEXT_BYTES:
        return None
    records = read_part(Part(source.name, "text", separator=BLANK_LINES), "")
    is_divided = any((record.number if isinstance(record, Bad) else record[0]) for record in records)
    (found.split_texts if is_divided else found.whole_texts).append(source.name)
    return BLANK_LINES if is_divided else None


def _ranges(part: Part, size: int, piece_bytes: int) -> Iterator[tuple[Part, int]]:
    """Byte ranges that end with a line or a separator. The last isn't small, so that none of a process's time is lost to it."""
    pattern = re.compile((part.separator or "\n").encode())
    start = 0
    with open(part.path, "rb") as file:
        while start < size:
            end = size if size - start < 1.5 * piece_bytes else _next_cut(file, start + piece_bytes, size, pattern)
            yield part._replace(start=start, end=end), end - start
            start = end


def _next_cut(file: Any, place: int, size: int, pattern: re.Pattern) -> int:
    """The end of the first separator after `place`; `size` if there is none."""
    file.seek(place)
    buffer = b""
    while block := file.read(BLOCK_BYTES):
        buffer += block
        for match in pattern.finditer(buffer):
            if match.end() < len(buffer):  # else it may be longer
                return place + match.end()
        keep = min(len(buffer), BLOCK_BYTES)
        place, buffer = place + len(buffer) - keep, buffer[-keep:]
    return size


def _parquet_parts(part: Part, size: int, piece_bytes: int) -> Iterator[tuple[Part, int]]:
    with parquet_file(part.path) as file:
        groups = file.num_row_groups
    step = max(1, groups * piece_bytes // size)
    for start in range(0, groups, step):
        end = min(groups, start + step)
        yield part._replace(start=start, end=end), size * (end - start) // groups


def _dataset_parts(source: Source, found: Found, piece_bytes: int) -> Iterator[tuple[Part, int]]:
    splits = load_splits(source.kind, source.name)
    own = [name for name in splits if name in OWN_VALIDATION]
    if own:
        found.own_validation.append(f"{source.name} [{own[0]}]")
    rows = 0 if source.kind == "hub" else sum(map(len, splits.values()))
    for name, split in splits.items():
        if name == "test" and len(splits) > 1:
            found.left_out.append(f"{source.name} [test]")
            continue
        part = Part(source.name, source.kind, split=name, own_validation=name in OWN_VALIDATION, draws=not own)
        if source.kind == "hub":
            yield part, 0
            continue
        step = max(1, rows * piece_bytes // max(1, source.bytes))
        for start in range(0, len(split), step):
            end = min(len(split), start + step)
            yield part._replace(start=start, end=end), (source.bytes or 0) * (end - start) // rows
