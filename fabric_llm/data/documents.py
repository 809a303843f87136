"""Read documents, one after the other, from files, folders, dataset folders and datasets on the hub."""

from __future__ import annotations

import gzip
import json
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import datasets
import pyarrow as pa
import pyarrow.parquet as pq

from fabric_llm.base import hub
from fabric_llm.base.faults import REFUSED, Fault, one_line
from fabric_llm.data.dataset import has_rows, split_names
from fabric_llm.data.inputs import files_of, hub_dataset, is_dataset_folder

PARQUET_ROWS = 1024  # read at once
# (where a document comes from, for messages; its text, or None if it isn't valid UTF-8)
Document = tuple[str, str | None]


@dataclass(frozen=True)
class Source:
    """A file, dataset folder or hub dataset. `read(name, text_field)` yields its documents."""

    name: str
    bytes: int | None  # None for a hub dataset
    read: Callable[[str, str], Iterator[Document]]

    @property
    def is_one_document(self) -> bool:
        """Whether this is a plain-text file."""
        return self.read is _read_text


def find_sources(
    inputs: Sequence[str | Path], *, pattern: Sequence[str], exclude: Sequence[str] = (), output: Path
) -> list[Source]:
    """The sources that `inputs` of `prepare` name, in order. No text is read yet.

    output: a resolved path, which is left out where it lies inside an input folder.

    Raises ValueError for an input that doesn't exist, a folder without a matching file, a file that two inputs name, and
    where there is only one document, which can't be split into train and validation.
    """
    sources, origin = [], {}
    for given in map(str, inputs):
        if not os.path.exists(given):
            found = [Source(given, None, _hub_reader(given))]
        elif os.path.isfile(given):
            found = [_file_source(given)]
        elif is_dataset_folder(given):
            size = sum(file.stat().st_size for file in Path(given).rglob("*.arrow"))
            found = [Source(given, size, _read_dataset_folder)]
        else:
            found = [_file_source(path) for path in files_of(given, pattern, exclude, output)]
            if not found:
                raise ValueError(f"no file in {given} matches {' '.join(pattern)}: choose others with --pattern")
        for source in found:
            # A text in both train and validation would make the validation loss meaningless.
            path = os.path.abspath(source.name)
            if path in origin:
                raise ValueError(
                    f"{source.name} comes in twice, by the inputs {origin[path]} and {given}: name it once"
                )
            origin[path] = given
        sources += found
    if len(sources) == 1 and sources[0].is_one_document:
        raise ValueError(
            f"the only input, {sources[0].name}, is one document, which leaves none for validation: put one"
            f" document on each line of a .jsonl file, or give several files"
        )
    return sources


def _file_source(path: str) -> Source:
    name = path.lower().removesuffix(".gz")
    if name.endswith((".jsonl", ".ndjson")):
        read = _read_json_lines
    else:
        read = _read_parquet if name.endswith(".parquet") else _read_text
    return Source(path, os.path.getsize(path), read)


def read_documents(sources: Iterable[Source], text_field: str) -> Iterator[Document]:
    """The documents of all sources, in order.

    Raises ValueError for a line that isn't a JSON object, a missing `text_field`, a field that isn't text, and a damaged file.
    """
    for source in sources:
        yield from source.read(source.name, text_field)


def _open(path: str) -> BinaryIO:
    return gzip.open(path, "rb") if path.lower().endswith(".gz") else open(path, "rb")


def _decode(data: bytes) -> str | None:
    try:
        return data.decode("utf-8-sig")  # a byte order mark isn't part of the text
    except UnicodeDecodeError:
        return None


def _read_text(path: str, text_field: str) -> Iterator[Document]:
    # Text mode would translate line ends.
    try:
        with _open(path) as file:
            data = file.read()
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is not a complete gzip file: {error}") from error
    yield path, _decode(data)


def _read_json_lines(path: str, text_field: str) -> Iterator[Document]:
    try:
        with _open(path) as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    where = f"{path}:{number}"
                    line = _decode(line)
                    yield where, None if line is None else _json_text(where, line, text_field)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is not a complete gzip file: {error}") from error


def _json_text(where: str, line: str, text_field: str) -> str | None:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not valid JSON: {error}") from error
    if not isinstance(record, dict):
        raise ValueError(f"{where} is not a JSON object but {type(record).__name__}")
    if text_field not in record:
        raise _no_field(where, text_field, record)
    text = record[text_field]
    if not isinstance(text, str):
        raise ValueError(f'{where} holds {type(text).__name__}, not a string, in its field "{text_field}"')
    # JSON can hold half of a surrogate pair ("\ud800"), which UTF-8 can't.
    return None if re.search("[\ud800-\udfff]", text) else text


def _read_parquet(path: str, text_field: str) -> Iterator[Document]:
    try:
        file = pq.ParquetFile(path)
    except pa.ArrowInvalid as error:
        raise ValueError(f"{path} is not a parquet file: {error}") from error
    with file:
        schema = file.schema_arrow
        if text_field not in schema.names:
            raise _no_field(path, text_field, schema.names)
        kind = schema.field(text_field).type
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        text_kinds = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
        if not any(is_kind(kind) for is_kind in text_kinds):
            raise ValueError(f'{path} holds {kind}, not strings, in its column "{text_field}"')
        row = 0
        for batch in file.iter_batches(batch_size=PARQUET_ROWS, columns=[text_field]):
            # As bytes: pyarrow doesn't check that strings are valid, and an invalid one must not end the others. A null
            # is an empty document.
            for value in batch.column(0).cast(pa.large_string()).cast(pa.large_binary()):
                yield f"{path} row {row}", _decode(value.as_py() or b"")
                row += 1


def _read_dataset_folder(path: str, text_field: str) -> Iterator[Document]:
    folder = Path(path)
    try:
        for split in split_names(folder) if (folder / "dataset_dict.json").is_file() else [""]:
            has_rows(folder / split)
        loaded = datasets.load_from_disk(path)
    except Exception as error:  # OSError, KeyError, JSON or Arrow errors, depending on what is missing
        if isinstance(error, Fault) and error.code == REFUSED:
            raise
        raise ValueError(f"{path} is not a complete dataset folder: {one_line(error)}") from error
    yield from _read_rows(path, loaded if isinstance(loaded, dict) else {"rows": loaded}, text_field)


def _hub_reader(name: str) -> Callable[[str, str], Iterator[Document]]:
    """Open the hub dataset `name` or `name:config`. Returns a function that streams it, see `Source.read`."""
    nowhere = hub_dataset(name)
    repository, _, config = name.partition(":")
    try:
        loaded = datasets.load_dataset(repository, config or None, streaming=True)
    except Exception as error:  # the hub, its client and its file formats raise some twenty types
        raise ValueError(f"{nowhere}: {hub.answer(repository, error, 'dataset') or one_line(error)}") from error
    return lambda _, text_field: _read_rows(name, loaded, text_field)


def _read_rows(name: str, splits: dict, text_field: str) -> Iterator[Document]:
    for split, rows in splits.items():
        columns = rows.column_names  # None if a streamed dataset doesn't declare them
        if columns is not None and text_field not in columns:
            raise _no_field(f"{name} [{split}]", text_field, columns)
        if columns is not None:
            rows = rows.select_columns([text_field])  # so that no image is decoded
        for number, row in enumerate(rows):
            where = f"{name} [{split}] row {number}"
            if text_field not in row:
                raise _no_field(where, text_field, row)
            text = row[text_field]
            if text is not None and not isinstance(text, str):
                raise ValueError(f'{where} holds {type(text).__name__}, not a string, in its column "{text_field}"')
            yield where, text or ""


def _no_field(where: str, text_field: str, present: Iterable[str]) -> ValueError:
    names = ", ".join(map(str, present)) or "none"
    return ValueError(f'{where} has no field "{text_field}" (fields: {names}): name the right one with --text_field')
