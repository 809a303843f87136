"""What `--input` names -> sources -> pieces of 2 to 32 MB, in a fixed order, which processes and machines share.

A piece is one or more parts: ranges of large files, cut after a line or between documents, ranges of row groups or rows,
and many small files. The plan depends on the inputs alone, never on the number of processes.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Optional

from fabric_llm.prepare import formats
from fabric_llm.prepare.documents import (
    BLANK_LINES,
    BLOCK_BYTES,
    Bad,
    Part,
    load_dataset_folder,
    load_hub_dataset,
    parquet_column,
    parquet_file,
    read_part,
)
from fabric_llm.prepare.inputs import expanded, files_of, is_dataset_folder, no_match

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


@dataclass(frozen=True)
class Source:
    """A file, dataset folder or hub dataset."""

    name: str
    kind: str
    bytes: Optional[int]  # None for a hub dataset
    modified_ns: int = 0


@dataclass
class Found:
    """Everything that is read, and what is said of it."""

    sources: list[Source]
    not_read: Counter = field(default_factory=Counter)  # files of folders, by suffix
    own_validation: list[str] = field(default_factory=list)  # datasets whose validation split stays theirs
    left_out: list[str] = field(default_factory=list)  # splits
    piece_bytes: int = PIECE_BYTES
    split_texts: list[str] = field(default_factory=list)  # files that are split at blank lines without being told to
    whole_texts: list[str] = field(default_factory=list)  # files that would be, and have no blank line
    hidden: list[str] = field(default_factory=list)  # files and folders that are left out for their names


def find_sources(
    inputs: Sequence[str | Path], *, pattern: Sequence[str], exclude: Sequence[str] = (), output: Path
) -> Found:
    """The sources that `inputs` of `prepare` name, in order. No text is read yet.

    output: a resolved path, which is left out where it lies inside an input folder.

    Raises ValueError for an input that doesn't exist, a folder without a matching file, and a file that two inputs name.
    """
    found, origin = Found([]), {}
    for given in (path for name in inputs for path in expanded(str(name))):
        not_read = found.not_read if list(pattern) == formats.DEFAULT_PATTERNS else None  # else they were not wanted
        for source in _sources_of(given, pattern, exclude, output, not_read, found.hidden):
            # A text in both train and validation would make the validation loss meaningless.
            path = os.path.abspath(source.name)
            if path in origin:
                raise ValueError(
                    f"{source.name} comes in twice, by the inputs {origin[path]} and {given}: name it once"
                )
            origin[path] = given
            found.sources.append(source)
    return found


def _sources_of(
    given: str,
    pattern: Sequence[str],
    exclude: Sequence[str],
    output: Path,
    not_read: Optional[Counter],
    hidden: list[str],
) -> list[Source]:
    if not os.path.exists(given):
        return [Source(given, "hub", None)]  # `plan` asks the hub
    if os.path.isfile(given):
        formats.named_file(given)
        return [_file_source(given)]
    if is_dataset_folder(given):
        files = [file.stat() for file in Path(given).rglob("*.arrow")]
        newest = max((file.st_mtime_ns for file in files), default=0)
        return [Source(given, "dataset", sum(file.st_size for file in files), newest)]
    sources = [_file_source(path) for path in files_of(given, pattern, exclude, output, not_read, hidden)]
    if not sources:
        raise ValueError(no_match(given, pattern, hidden))
    return sources


def _file_source(path: str) -> Source:
    formats.require_package(path)
    status = os.stat(path)
    return Source(path, formats.kind_of(path), status.st_size, status.st_mtime_ns)


# ------------------------------------------------------------------------------- the plan


def plan(found: Found, text_field: str, separator: Optional[str]) -> list[Piece]:
    """The pieces of all sources. separator: see `inputs.separator`. Notes in `found` what should be said.

    Raises ValueError for a dataset or table without `text_field`, and one that can't be opened.
    """
    total = sum(source.bytes or 0 for source in found.sources)
    found.piece_bytes = min(PIECE_BYTES, max(SMALL_PIECE_BYTES, total // PIECES))
    pieces: list[Piece] = []
    parts: list[Part] = []
    size = 0
    for source in found.sources:
        for part, part_bytes in _parts_of(source, found, text_field, separator):
            if parts and size + part_bytes > found.piece_bytes:
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


def _parts_of(source: Source, found: Found, text_field: str, separator: Optional[str]) -> Iterator[tuple[Part, int]]:
    if source.kind in ("dataset", "hub"):
        yield from _dataset_parts(source, found, text_field)
        return
    part = Part(source.name, source.kind)
    if source.kind == "text":
        part = part._replace(separator=_separator_of(source, found, separator))
    if source.bytes <= found.piece_bytes or source.kind in ("json", "csv", "warc", "html"):
        yield part, source.bytes
    elif source.kind == "parquet":
        yield from _parquet_parts(part, source.bytes, found.piece_bytes, text_field)
    elif formats.compression_of(source.name) or source.kind == "text" and part.separator is None:
        yield part, source.bytes
    else:
        yield from _ranges(part, source.bytes, found.piece_bytes)


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


def _parquet_parts(part: Part, size: int, piece_bytes: int, text_field: str) -> Iterator[tuple[Part, int]]:
    with parquet_file(part.path) as file:
        parquet_column(part.path, file.schema_arrow, text_field)
        groups = file.num_row_groups
    step = max(1, groups * piece_bytes // size)
    for start in range(0, groups, step):
        end = min(groups, start + step)
        yield part._replace(start=start, end=end), size * (end - start) // groups


def _dataset_parts(source: Source, found: Found, text_field: str) -> Iterator[tuple[Part, int]]:
    splits = (load_hub_dataset if source.kind == "hub" else load_dataset_folder)(source.name)
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
        step = max(1, rows * found.piece_bytes // max(1, source.bytes))
        for start in range(0, len(split), step):
            end = min(len(split), start + step)
            yield part._replace(start=start, end=end), (source.bytes or 0) * (end - start) // rows
