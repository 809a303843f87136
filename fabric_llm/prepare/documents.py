"""Read the documents of one part of the inputs, in order: a file or a range of it, rows of a dataset, a stream of the hub.

A reader yields, for each document, (number, text, True), or, where it is longer than SECTION_CHARACTERS, its sections with
False for all but the last; and `Bad` in place of a record that can't be read. A `Bad` after sections takes these back.
What it holds in memory is at most a block, or one record of at most RECORD_BYTES.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Optional, Union

import ijson
import pyarrow as pa
import pyarrow.parquet as pq

from fabric_llm.base import hub
from fabric_llm.base.faults import REFUSED, Fault, one_line
from fabric_llm.base.names import shown
from fabric_llm.prepare.formats import damaged, is_damage, suffix
from fabric_llm.prepare.formats import opened as _open
from fabric_llm.prepare.inputs import NOWHERE

SECTION_CHARACTERS = 1_000_000  # of a document that are encoded at once
RECORD_BYTES = 64 * 2**20  # longest line or record
BLOCK_BYTES = 2**20  # of plain text, read at once
SEPARATOR_BYTES = 1000  # longest separator of documents, see inputs.separator
PARQUET_ROWS = 256  # read at once
MAX_FIELDS = 20  # named
BLANK_LINES = r"\r?\n(?:[ \t\r]*\n)+"  # where a text is split into documents by default

# Kinds of bad records, as the manifest counts them.
NOT_UTF8 = "not valid UTF-8"
NO_FIELD = "without the field"
NOT_STRING = "not a string"
BROKEN = "broken"
TOO_LONG = "too long"
SPECIAL = "with a special token"


class Part(NamedTuple):
    """What is read in one go. JSON writes it as a list."""

    path: str  # or name on the hub
    kind: str  # of READERS
    start: int = 0  # byte, row group or row
    end: Optional[int] = None  # None: the end of the file
    split: str = ""  # of a dataset
    own_validation: bool = False  # the dataset itself has put it there
    draws: bool = True  # False: its validation split is its own
    separator: Optional[str] = None  # regular expression between documents of a text; None: the file is one document

    @property
    def is_one_document(self) -> bool:
        return self.kind == "html" or self.kind == "text" and self.separator is None


class Bad(NamedTuple):
    """A record that can't be read."""

    kind: str
    number: Optional[int]
    message: str  # after the words of `where`


Record = Union[tuple[int, str, bool], Bad]
Reader = Callable[[Part, str, list], Iterator[Record]]


def read_part(part: Part, text_field: str, handles: Optional[list] = None) -> Iterator[Record]:
    """The documents of a part, in order. handles: gets the files that are opened.

    Raises ValueError for a whole file that isn't what its name says, or has no `text_field`.
    """
    try:
        yield from READERS[part.kind](part, text_field, [] if handles is None else handles)
    except Exception as error:
        if not is_damage(error):
            raise
        yield Bad(BROKEN, None, damaged(part.path, error))


def where(part: Part, number: Optional[int], lines_before: int = 0) -> str:
    """The place of a record, for messages. lines_before: lines of the file before this part."""
    path = shown(part.path)
    if number is None or part.is_one_document:
        return path
    if part.kind == "json_lines":
        return f"{path}:{number + lines_before}"
    if part.kind == "csv":
        return f"{path}:{number}"
    if part.kind in ("dataset", "hub"):
        return f"{path} [{shown(part.split)}] row {number}"
    return f"{path} {dict(text='byte', parquet='row').get(part.kind, 'record')} {number}"


def texts(parts: Iterable[Part], text_field: str) -> Iterator[str]:
    """All text that can be read, in sections, for training a tokenizer."""
    for part in parts:
        for record in read_part(part, text_field):
            if not isinstance(record, Bad) and record[1].strip():
                yield record[1]


def sections(number: int, text: str) -> Iterator[Record]:
    """A document, in sections that end with a line where they can."""
    begin = 0
    while len(text) - begin > SECTION_CHARACTERS:
        cut = _section_end(text, begin)
        yield number, text[begin:cut], False
        begin = cut
    yield number, text[begin:] if begin else text, True


def _section_end(text: str, begin: int) -> int:
    end = begin + SECTION_CHARACTERS
    return text.rfind("\n", begin, end) + 1 or end


# --------------------------------------------------------------------------- plain text


def _read_text(part: Part, text_field: str, handles: list) -> Iterator[Record]:
    decode, text, broken = None, "", False
    with _open(part.path, handles) as file:
        for number, data, is_last in _cut(file, part):
            if decode is None:
                decode, text, broken = codecs.getincrementaldecoder("utf-8")().decode, "", False
                if number == 0:  # a byte order mark isn't part of the text
                    data = data.removeprefix(codecs.BOM_UTF8)
            try:
                text += decode(data, is_last)
            except UnicodeDecodeError:
                broken = True
            while len(text) > SECTION_CHARACTERS and not broken:
                cut = _section_end(text, 0)
                yield number, text[:cut], False
                text = text[cut:]
            if is_last:
                yield Bad(NOT_UTF8, number, "is not valid UTF-8") if broken else (number, text, True)
                decode = None


def _cut(file: BinaryIO, part: Part) -> Iterator[tuple[int, bytes, bool]]:
    """(first byte of a document, the next bytes of it, whether they are its last)"""
    separator = None if part.separator is None else re.compile(part.separator.encode())
    if part.start:
        file.seek(part.start)
    # `buffer` begins at `place`, in the document that begins at `begin`.
    begin, place, buffer = part.start, part.start, b""
    while True:
        room = BLOCK_BYTES if part.end is None else min(BLOCK_BYTES, part.end - place - len(buffer))
        block = file.read(room)
        buffer, at = buffer + block, 0
        for match in separator.finditer(buffer) if separator else ():
            if match.end() == len(buffer) and block:  # it may be longer
                break
            yield begin, buffer[at : match.start()], True
            at = match.end()
            begin = place + at
        buffer, place = buffer[at:], place + at
        if not block:
            if buffer or begin < place or begin == part.start:
                yield begin, buffer, True
            return
        ready = len(buffer) - (SEPARATOR_BYTES if separator else 0)
        if ready > BLOCK_BYTES // 2:
            yield begin, buffer[:ready], False
            buffer, place = buffer[ready:], place + ready


# --------------------------------------------------------------------------- records


def _text_of(record: Any, text_field: str, number: int, place: str = "field") -> Iterator[Record]:
    if not isinstance(record, dict):
        yield Bad(BROKEN, number, f"is not a JSON object but {type(record).__name__}")
    elif text_field not in record:
        yield Bad(NO_FIELD, number, no_field(text_field, record))
    elif not isinstance(text := record[text_field], str):
        kind = type(text).__name__
        yield Bad(NOT_STRING, number, f'holds {kind}, not a string, in its {place} "{text_field}"')
    else:
        yield from _checked(number, text)


def _checked(number: int, text: str) -> Iterator[Record]:
    # JSON can hold half of a surrogate pair ("\ud800"), which UTF-8 can't; and csv gets bytes that aren't UTF-8 as such.
    if not text.isascii() and re.search("[\ud800-\udfff]", text):
        yield Bad(NOT_UTF8, number, "is not valid UTF-8")
    else:
        yield from sections(number, text)


def no_field(text_field: str, present: Iterable[str]) -> str:
    names = list(present)
    some = ", ".join(shown(name, 60) for name in names[:MAX_FIELDS]) or "none"
    more = f" and {len(names) - MAX_FIELDS:,} more" if len(names) > MAX_FIELDS else ""
    return f'has no field "{text_field}" (fields: {some}{more}): name the right one with --text_field'


def _read_json_lines(part: Part, text_field: str, handles: list) -> Iterator[Record]:
    with _open(part.path, handles) as file:
        if part.start:
            file.seek(part.start)
        place = part.start
        for number, line in enumerate(iter(lambda: file.readline(RECORD_BYTES), b""), 1):
            place += len(line)
            if len(line) == RECORD_BYTES and not line.endswith(b"\n"):
                while line and not line.endswith(b"\n"):
                    line = file.readline(BLOCK_BYTES)
                    place += len(line)
                yield Bad(TOO_LONG, number, f"is longer than {RECORD_BYTES >> 20} MiB")
            elif line.strip():
                yield from _json_line(line, number, text_field)
            if part.end is not None and place >= part.end:
                return


def _json_line(line: bytes, number: int, text_field: str) -> Iterator[Record]:
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError:
        yield Bad(NOT_UTF8, number, "is not valid UTF-8")
    except (ValueError, RecursionError) as error:
        yield Bad(BROKEN, number, f"is not valid JSON: {one_line(error)}")
    else:
        yield from _text_of(record, text_field, number)


def _read_json(part: Part, text_field: str, handles: list) -> Iterator[Record]:
    """An array of objects, objects one behind the other, one object, or JSON lines under another name."""
    with _open(part.path) as file:
        head = file.readline(RECORD_BYTES).lstrip(codecs.BOM_UTF8 + b" \t\r\n")
        while not head.strip() and (head := file.readline(RECORD_BYTES)):
            head = head.lstrip()
    if head.startswith(b"{") and _is_json(head):
        yield from _read_json_lines(part, text_field, handles)
        return
    with _open(part.path, handles) as file:
        if file.peek(3)[:3] == codecs.BOM_UTF8:
            file.read(3)
        number = 0
        try:
            for number, record in enumerate(
                ijson.items(file, "item" if head.startswith(b"[") else "", multiple_values=True), 1
            ):
                yield from _text_of(record, text_field, number)
        except (ijson.JSONError, UnicodeDecodeError, RecursionError) as error:
            message = f"is not valid JSON: {one_line(error)}; what comes after it is not read"
            yield Bad(BROKEN, number + 1, message)


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
        return True
    except (ValueError, RecursionError):
        return False


def _read_csv(part: Part, text_field: str, handles: list) -> Iterator[Record]:
    csv.field_size_limit(RECORD_BYTES)
    dialect = "excel-tab" if suffix(part.path) == ".tsv" else "excel"
    with _open(part.path, handles) as file:
        lines = io.TextIOWrapper(file, "utf-8-sig", errors="surrogateescape", newline="")
        rows = csv.reader(lines, dialect, strict=True)
        try:
            names = next(rows, [])
        except csv.Error as error:
            raise ValueError(f"{part.path} has no first line that names the columns: {error}") from None
        if names.count(text_field) != 1:
            raise ValueError(f"{part.path} {no_field(text_field, names)}")
        column = names.index(text_field)
        while True:
            number = rows.line_num + 1
            try:
                row = next(rows)
            except StopIteration:
                return
            except csv.Error as error:
                yield Bad(BROKEN, number, f"is not a valid row: {error}")
                continue
            if row and len(row) != len(names):
                yield Bad(BROKEN, number, f"has {len(row)} fields, and the first line {len(names)}")
            elif row:
                yield from _checked(number, row[column])


# --------------------------------------------------------------------------- tables


@contextmanager
def parquet_file(path: str) -> Iterator[pq.ParquetFile]:
    """A table; a compressed one is decompressed to a temporary file. Raises ValueError."""
    with _open(path) as file, tempfile.TemporaryFile() as unpacked:
        is_plain = path.lower().endswith(".parquet")
        if not is_plain:
            shutil.copyfileobj(file, unpacked, BLOCK_BYTES)
        try:
            table = pq.ParquetFile(path if is_plain else unpacked, buffer_size=BLOCK_BYTES, pre_buffer=False)
        except pa.ArrowInvalid as error:
            raise ValueError(f"{path} is not a parquet file: {one_line(error)}") from error
        with table:
            yield table


def _require_column(path: str, schema: pa.Schema, text_field: str) -> None:
    """Raises ValueError unless the table has a column of text of that name."""
    if text_field not in schema.names:
        raise ValueError(f"{path} {no_field(text_field, schema.names)}")
    kind = schema.field(text_field).type
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    if not any(is_kind(kind) for is_kind in (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)):
        raise ValueError(f'{path} holds {kind}, not strings, in its column "{text_field}"')


def _read_parquet(part: Part, text_field: str, handles: list) -> Iterator[Record]:
    with parquet_file(part.path) as file:
        _require_column(part.path, file.schema_arrow, text_field)
        groups = range(part.start, file.num_row_groups if part.end is None else part.end)
        number = sum(file.metadata.row_group(group).num_rows for group in range(part.start))
        try:
            for batch in file.iter_batches(PARQUET_ROWS, groups, [text_field], use_threads=False):
                # As bytes: pyarrow doesn't check that strings are valid, and an invalid one must not end the others. A
                # null is an empty document.
                for value in batch.column(0).cast(pa.large_string()).cast(pa.large_binary()):
                    try:
                        yield from sections(number, (value.as_py() or b"").decode("utf-8-sig"))
                    except UnicodeDecodeError:
                        yield Bad(NOT_UTF8, number, "is not valid UTF-8")
                    number += 1
        except (pa.ArrowException, OSError) as error:
            yield Bad(BROKEN, number, f"can't be read, and what comes after it: {one_line(error)}")


def load_splits(kind: str, name: str) -> dict[str, Any]:
    """The splits of a dataset, "rows" for one without a name: of a folder, or streamed from the hub. Raises ValueError."""
    return load_hub_dataset(name) if kind == "hub" else _load_dataset_folder(name)


def _load_dataset_folder(path: str) -> dict[str, Any]:
    import datasets  # whose import takes longer than that of all else that a process which tokenizes needs

    from fabric_llm.data.dataset import has_rows, split_names

    folder = Path(path)
    try:
        for split in split_names(folder) if (folder / "dataset_dict.json").is_file() else [""]:
            has_rows(folder / split)
        loaded = datasets.load_from_disk(path)
    except Exception as error:  # OSError, KeyError, JSON or Arrow errors, depending on what is missing
        if isinstance(error, Fault) and error.code == REFUSED:
            raise
        raise ValueError(f"{path} is not a complete dataset folder: {one_line(error)}") from error
    return dict(loaded) if isinstance(loaded, dict) else {"rows": loaded}


def load_hub_dataset(name: str) -> dict[str, Any]:
    """The splits of the hub dataset `name` or `name:config`, to be streamed. Raises ValueError."""
    import datasets

    repository, _, config = name.partition(":")
    if not hub.reach():
        datasets.config.HF_HUB_OFFLINE = True
    try:
        return dict(datasets.load_dataset(repository, config or None, streaming=True))
    except Exception as error:  # the hub, its client and its file formats raise some twenty types
        said = hub.answer(repository, error, "dataset") or one_line(error)
        raise ValueError(f"{NOWHERE.format(name)}: {said}") from error


def _read_dataset(part: Part, text_field: str, handles: list) -> Iterator[Record]:
    rows = load_splits(part.kind, part.path)[part.split]
    if part.end is not None:
        rows = rows.select(range(part.start, part.end))
    yield from read_rows(f"{part.path} [{part.split}]", rows, text_field, part.start)


def read_rows(name: str, rows: Any, text_field: str, first: int = 0) -> Iterator[Record]:
    """The documents of a split of a dataset. Raises ValueError where it has no column of text of that name."""
    columns = rows.column_names  # None if a streamed dataset doesn't declare them
    if columns is not None and text_field not in columns:
        raise ValueError(f"{name} {no_field(text_field, columns)}")
    if columns is not None:
        rows = rows.select_columns([text_field])  # so that no image is decoded
    for number, row in enumerate(rows, first):
        if row.get(text_field, "") is None:
            yield number, "", True
        else:
            yield from _text_of(row, text_field, number, "column")


# --------------------------------------------------------------------------- crawls


def _read_warc(part: Part, text_field: str, handles: list) -> Iterator[Record]:
    """The text records of a WET or WARC file: extracted text (`conversion`), and responses of type text/plain."""
    from warcio.archiveiterator import ArchiveIterator, ArchiveLoadFailed

    number, of_text = 0, 0
    with _open(part.path, handles) as file:
        try:
            for number, record in enumerate(ArchiveIterator(file), 1):
                if not _is_text(record):
                    continue
                of_text += 1
                data = record.content_stream().read(RECORD_BYTES)
                try:
                    yield from sections(number, data.decode("utf-8-sig"))
                except UnicodeDecodeError:
                    yield Bad(NOT_UTF8, number, "is not valid UTF-8")
        except (ArchiveLoadFailed, AttributeError, ValueError) as error:  # warcio raises all three
            yield Bad(BROKEN, number + 1, f"can't be read, and what comes after it: {one_line(error)}")
    if number and not of_text:
        raise ValueError(f"{part.path} holds no text, only web pages: take the WET file of the same crawl")


def _is_text(record: Any) -> bool:
    headers = record.http_headers if record.rec_type == "response" else None
    kind = headers and headers.get_header("Content-Type")
    return record.rec_type == "conversion" or bool(kind) and kind.startswith("text/plain")


# --------------------------------------------------------------------------- pages

NO_TEXT = ["nav", "aside", "footer"]  # elements that hold menus and the like; scripts and styles are never text


def _read_html(part: Part, text_field: str, handles: list) -> Iterator[Record]:
    """The text of a page. (resiliparse's `main_content`, which also leaves menus of plain <div> out, takes hours for some.)"""
    from resiliparse.extract.html2text import extract_plain_text
    from resiliparse.parse.encoding import bytes_to_str, detect_encoding

    with _open(part.path, handles) as file:
        data = file.read(RECORD_BYTES + 1)
    if len(data) > RECORD_BYTES:
        yield Bad(TOO_LONG, None, f"is longer than {RECORD_BYTES >> 20} MiB")
    else:
        page = bytes_to_str(data, detect_encoding(data, from_html_meta=True))
        yield from _checked(0, extract_plain_text(page, skip_elements=NO_TEXT))


READERS: dict[str, Reader] = {
    "text": _read_text,
    "html": _read_html,
    "json_lines": _read_json_lines,
    "json": _read_json,
    "csv": _read_csv,
    "parquet": _read_parquet,
    "dataset": _read_dataset,
    "hub": _read_dataset,
    "warc": _read_warc,
}
