"""Read the documents of one part of the inputs, in order: a file or a range of it, rows of a
dataset, a stream of the hub.

A reader yields (number, text) for each document, and `BadRecord` in place of a record that can't be
read. It holds at most a block in memory, or one document of at most RECORD_BYTES.
"""

import codecs
import csv
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Optional, Union, cast

import pyarrow as pa
import pyarrow.parquet as pq

from fabric_llm.base.faults import REFUSED, Fault, one_line
from fabric_llm.base.names import reach_hub, shown
from fabric_llm.prepare.compression import compression_of, is_damage, opened
from fabric_llm.prepare.inputs import LONGEST_SEPARATOR, NOWHERE, suffix
from fabric_llm.prepare.table_rows import Lines, rows_of_csv, rows_of_tsv

SECTION_CHARACTERS = 1_000_000  # of a document that are encoded at once
RECORD_BYTES = 64 * 2**20  # longest document
BLOCK_BYTES = 2**20  # of plain text, read at once
PARQUET_ROWS = 256  # read at once
MAX_FIELDS = 20  # named
NOT_UTF8 = "is not valid UTF-8: convert it, such as by iconv -f LATIN1 -t UTF-8"
OTHER_TEXT = "is {0}, not UTF-8: convert it, such as by iconv -f {0} -t UTF-8"
BINARY = "is binary, as its NUL bytes say: take it out, or convert it to text in UTF-8"
# Bytes that tell which of 2 or 4 a character takes, in what order: its mark, or which of the first
# characters' bytes are NUL, as they are mostly ASCII. UTF-32 comes first: its mark begins as the
# other's.
MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
NULS = {"0111": "UTF-32LE", "1110": "UTF-32BE", "0101": "UTF-16LE", "1010": "UTF-16BE"}
FIRST_BYTES = 16  # that are looked at
CHATS = ("messages", "conversations")  # fields of data for chats
OF_CHATS = (
    "write each chat as one text, such as by tokenizer.apply_chat_template(chat, tokenize=False)"
)
OF_SEVERAL_LINES = (
    "is a JSON object of several lines: write an array of such objects, or each in a line, such as "
    "by `jq -c . FILE`"
)
BLANK_LINES = r"\r?\n(?:[ \t\r]*\n)+"  # where a text is split into documents by default
WHITE = codecs.BOM_UTF8 + b" \t\r\n"  # before the first record of a JSON file
# Numbers aren't needed, and int() refuses those of more than 4,300 digits. The second one finds the
# end of what the first one refuses, such as a string with a line feed in it.
JSON, LENIENT_JSON = (json.JSONDecoder(parse_int=len, strict=strict) for strict in (True, False))
SPACE = re.compile(r"[ \t\r\n]*")  # of JSON

# Where a document goes: it is drawn into a split, or its dataset has a validation split, which is
# kept.
DRAWN, TO_TRAIN, TO_VALIDATION = 0, 1, 2
CONTAMINATED = 4  # is added to these for a document that is left out, see contamination.py


class Part(NamedTuple):
    """A file, or a range of it, that is read in one go."""

    path: str  # or name on the hub
    kind: str  # of READERS
    start: int = 0  # byte, row group or row
    end: Optional[int] = None  # None: the end of the file
    split: str = ""  # of a dataset
    goes: int = DRAWN
    # A regular expression between documents of a text; None: the file is one document.
    separator: Optional[str] = None
    revision: Optional[str] = None  # of a dataset on the hub: the commit that is read

    @property
    def is_one_document(self) -> bool:
        return self.kind == "text" and self.separator is None


class BadRecord(NamedTuple):
    """A record that can't be read."""

    number: Optional[int]
    message: str  # after the words of `where`


Record = Union[tuple[int, str], BadRecord]


def read_part(part: Part, text_field: str) -> Iterator[Record]:
    """The documents of a part, in order.

    Raises ValueError for a whole file that isn't what its name says, or has no `text_field`.
    """
    # These aren't streams of bytes: their libraries open them by name.
    opens_it_itself = part.kind in ("parquet", "dataset", "hub")
    try:
        with nullcontext() if opens_it_itself else opened(part.path) as file:
            # Only text and JSON lines are read from the middle, and neither is then compressed.
            if file is not None:
                # A line of such a file is no whole text, so the whole file is refused.
                first = cast(io.BufferedReader, file).peek(FIRST_BYTES)[:FIRST_BYTES]
                if not part.is_one_document and (name := wide_text(first)):
                    raise ValueError(f"{part.path} {OTHER_TEXT.format(name)}")
                if part.start:
                    file.seek(part.start)
            yield from READERS[part.kind](part, text_field, file)
    # What could be read before a damage is used. The rest counts as one bad record.
    except Exception as error:
        if not is_damage(error):
            raise
        kind = compression_of(part.path) or "compressed"
        yield BadRecord(None, f"is not a complete {kind} file: {error or 'it ends too early'}")


def where(part: Part, number: Optional[int]) -> str:
    """The place of a record, for messages. For one in a range of a file, all lines before the range
    are counted, which is slow."""
    path = shown(part.path)
    if number is None or part.is_one_document:
        return path
    if part.kind in ("dataset", "hub"):
        return f"{path} [{shown(part.split)}] row {number}"
    # The other kinds have no lines that an editor would show by their number.
    if part.kind not in ("json_lines", "csv"):
        return f"{path} {dict(text='byte', parquet='row').get(part.kind, 'record')} {number}"
    # Lines before the range are counted only where a message needs the number.
    if part.start:
        number += lines_in(part.path, 0, part.start)
    return f"{path}:{number}"


def lines_in(path: str, start: int, end: int) -> int:
    """How many lines end in a range of a file. start, end: bytes."""
    lines = 0
    with open(path, "rb") as file:
        file.seek(start)
        while block := file.read(min(end - file.tell(), BLOCK_BYTES)):
            lines += block.count(b"\n")
    return lines


def texts(parts: Iterable[Part], text_field: str) -> Iterator[str]:
    """All text that can be read, in sections, for training a tokenizer."""
    for part in parts:
        for record in read_part(part, text_field):
            if not isinstance(record, BadRecord):
                # White space alone counts as an empty document, and is used nowhere.
                yield from filter(str.strip, sections(record[1]))


def sections(text: str) -> Iterator[str]:
    """A text in parts of at most SECTION_CHARACTERS, which end with a line where they can."""
    begin = 0
    while len(text) - begin > SECTION_CHARACTERS:
        end = begin + SECTION_CHARACTERS
        # Behind the end of a line a cut seldom divides a word.
        cut = text.rfind("\n", begin, end) + 1 or end
        yield text[begin:cut]
        begin = cut
    yield text[begin:]


def _read_text(part: Part, text_field: str, file: BinaryIO) -> Iterator[Record]:
    for number, content in cut_text(file, part):
        # Its end may come with the block that makes it too long, so its length is checked, too.
        if content is None or len(content) > RECORD_BYTES:
            yield BadRecord(
                number,
                f"is longer than {RECORD_BYTES >> 20} MiB: divide it with --document_separator",
            )
        elif number:
            yield _document(number, content)
        else:  # a byte order mark at the beginning isn't part of the text
            yield _document(number, content.removeprefix(codecs.BOM_UTF8))


def cut_text(file: BinaryIO, part: Part) -> Iterator[tuple[int, Optional[bytes]]]:
    """(place of a document's first byte, the document, None if it is too long). `file` is at the
    start of `part`."""
    separator = None if part.separator is None else re.compile(part.separator.encode())
    begin = part.start  # the place of the document that is being read
    # What was read of it, but for the first `dropped` bytes of one that is too long to be held.
    buffer, dropped = b"", 0
    while True:
        # As much again as there is, so that a long document isn't searched anew for each block.
        room = max(BLOCK_BYTES, len(buffer))
        # Not a byte behind the range, which belongs to the next part.
        if part.end is not None:
            room = min(room, part.end - begin - dropped - len(buffer))
        block, damage = read_block(file, room)
        buffer += block
        at = 0  # the first byte of `buffer` that belongs to the document at `begin`
        # Each separator ends the document at `begin`; `begin` then moves behind it.
        matches = separator.finditer(buffer) if separator else ()
        for match in matches:
            if match.end() == len(buffer) and block:  # it may go on in the next block
                break
            yield begin, (None if dropped else buffer[at : match.start()])
            begin += dropped + match.end() - at
            at, dropped = match.end(), 0
        buffer = buffer[at:]
        # All documents before the damage have been handed out.
        if damage is not None:
            raise damage
        if not block:
            # Nothing behind the last separator is no document, but an empty file is one.
            if buffer or dropped or begin == part.start:
                yield begin, (None if dropped else buffer)
            return
        if len(buffer) > RECORD_BYTES:
            # The end stays, where a separator may have begun. Each of its \n may match \r\n.
            kept = 2 * LONGEST_SEPARATOR
            dropped += len(buffer) - kept
            buffer = buffer[-kept:]


def read_block(file: BinaryIO, size: int) -> tuple[bytes, Optional[Exception]]:
    """(`size` bytes, or those before the end or a damage; the damage, to be raised after use)"""
    # read1 reads once at a time. If a damage follows, read would lose the bytes before it.
    blocks = []
    while size > 0:
        try:
            block = cast(io.BufferedReader, file).read1(size)
        except Exception as error:
            if not is_damage(error):
                raise
            return b"".join(blocks), error
        if not block:
            break
        blocks.append(block)
        size -= len(block)
    return b"".join(blocks), None


def _text_of(record: Any, text_field: str, number: int, place: str = "field") -> Record:
    if not isinstance(record, dict):
        return BadRecord(number, f"is not a JSON object but {type(record).__name__}")
    if text_field not in record:
        return BadRecord(number, _no_field(text_field, record))
    if not isinstance(text := record[text_field], str):
        advice = f": {OF_CHATS}" if text_field in CHATS else ""
        return BadRecord(
            number,
            f'holds {type(text).__name__}, not a string, in its {place} "{text_field}"{advice}',
        )
    return _document(number, text)


def _document(number: int, content: str | bytes) -> Record:
    """A document, if it is valid UTF-8. A str isn't where JSON has half of a surrogate pair, such
    as "\\ud800"."""
    if isinstance(content, bytes):
        # English in UTF-16 has a NUL in every second byte, and may pass for valid UTF-8.
        if name := wide_text(content[:FIRST_BYTES]):
            return BadRecord(number, OTHER_TEXT.format(name))
        if 3 * content.count(0) > len(content):
            return BadRecord(number, BINARY)
        content = content.decode(errors="surrogateescape")
    if not _is_utf8(content):
        return BadRecord(number, NOT_UTF8)
    return number, content


def wide_text(first: bytes) -> str:
    """UTF-16 or UTF-32, as iconv calls it, for the first bytes of a text; "" for UTF-8 and what
    isn't known."""
    for mark, name in MARKS.items():
        if first.startswith(mark):
            return name
    # Of each fourth byte, whether most are NUL.
    each = [first[place::4] for place in range(4)]
    return NULS.get("".join(str(int(2 * some.count(0) > len(some))) for some in each), "")


def _is_utf8(text: str) -> bool:
    """False for half of a surrogate pair, and for bytes decoded with `surrogateescape`."""
    # Encoding fails on surrogates alone. A str knows whether it is ASCII, which saves that.
    if not text.isascii():
        try:
            text.encode()
        except UnicodeError:
            return False
    return True


def _no_field(text_field: str, present: Iterable[str]) -> str:
    # Only the first MAX_FIELDS are named: a table may have thousands of columns.
    names = list(present)
    if "input_ids" in names:
        return "holds tokens, not text: it is a dataset for --train_data_dir"
    # The names of the columns of a whole file.
    if any("\0" in name or not _is_utf8(name) for name in names):
        return NOT_UTF8
    if chats := [name for name in names if name in CHATS]:
        return f'has no field "{text_field}", but a chat in "{chats[0]}": {OF_CHATS}'
    # What should be several columns was read as one.
    if len(names) == 1 and (found := [mark for mark in ";|\t," if mark in names[0]]):
        return (
            f"has one column, {shown(names[0], 60)!r}: its columns seem to be separated by "
            f"{found[0]!r}, where .csv has commas and .tsv tabs: convert it"
        )
    some = ", ".join(shown(name, 60) for name in names[:MAX_FIELDS]) or "none"
    more = f" and {len(names) - MAX_FIELDS:,} more" if len(names) > MAX_FIELDS else ""
    return (
        f'has no field "{text_field}" (fields: {some}{more}): name the one with the text by '
        "--text_field; of several, write a column that joins them first"
    )


def _read_json_lines(part: Part, text_field: str, file: BinaryIO) -> Iterator[Record]:
    # readline stops at RECORD_BYTES: a file without line feeds must not fill the memory.
    for number, line in enumerate(iter(lambda: file.readline(RECORD_BYTES), b""), 1):
        if len(line) == RECORD_BYTES and not line.endswith(b"\n"):
            # What is left of the line is read away, so that a record begins with the next one.
            while line and not line.endswith(b"\n"):
                line = file.readline(BLOCK_BYTES)
            yield BadRecord(number, f"is longer than {RECORD_BYTES >> 20} MiB")
        # An empty line isn't a record, such as the one at the end of many files.
        elif line.strip():
            try:
                record = JSON.decode(line.decode("utf-8-sig"))
            except UnicodeDecodeError:
                yield BadRecord(number, NOT_UTF8)
            except (ValueError, RecursionError) as error:
                yield BadRecord(number, f"is not valid JSON: {one_line(error)}")
            else:
                yield _text_of(record, text_field, number)
        # The range ends behind a line, so this is exactly its end.
        if part.end is not None and file.tell() >= part.end:
            return


def _read_json(part: Part, text_field: str, file: BinaryIO) -> Iterator[Record]:
    """An array of objects, or JSON lines under another name."""
    # Many files of this name hold JSON lines.
    begin = cast(io.BufferedReader, file).peek(BLOCK_BYTES)  # at least one byte
    if not begin.lstrip(WHITE).startswith(b"["):
        # No record is a line of this kind: it begins an object of several lines.
        if begin.lstrip(WHITE).splitlines()[:1] == [b"{"]:
            yield BadRecord(1, OF_SEVERAL_LINES)
            return
        yield from _read_json_lines(part, text_field, file)
        return
    for number, element in enumerate(_array(file), 1):
        if isinstance(element, str):
            yield BadRecord(number, element)
        else:
            yield _text_of(*element, text_field, number)


def _array(file: BinaryIO) -> Iterator[Union[tuple[Any], str]]:
    """The elements of an array of JSON, each in a tuple, or what is wrong with one.

    At most a block is in memory, or an element of RECORD_BYTES.
    """
    while file.read(1) != b"[":  # behind a byte order mark and white space
        pass
    # A block may end inside a character, and an invalid byte must only spoil its own element.
    decode = codecs.getincrementaldecoder("utf-8")("surrogateescape").decode
    buffer, at = "", 0  # the next element begins at buffer[at]
    is_first, is_all, damage = True, False, None
    while True:
        try:
            end = SPACE.match(buffer, at).end()
            # `[]` has no element, and `_element` would wait for one.
            if is_first and buffer.startswith("]", end):
                break
            element, end = _element(buffer, at)
        except (ValueError, RecursionError) as error:
            # Either the element goes on behind the buffer, or it is no JSON.
            if damage is not None:
                raise damage from None
            # No more text is read for it, and where the next element begins can't be known.
            if is_all or len(buffer) - at > RECORD_BYTES:
                yield f"is not valid JSON: {one_line(error)}; what comes after it is not read"
                return
            # As much again as there is: a long element isn't parsed anew for each block.
            block, damage = read_block(file, max(BLOCK_BYTES, len(buffer) - at))
            is_all = not block
            buffer, at = buffer[at:] + decode(block, is_all), 0
            continue
        yield element
        if buffer[end] == "]":
            break
        at, is_first = end + 1, False
    # What follows is reported and not read, such as the second of two files joined with `cat`.
    rest = buffer[end + 1 :].strip()
    while not rest and not is_all:
        block, damage = read_block(file, BLOCK_BYTES)
        rest, is_all = block.strip().decode(errors="replace"), not block
        if damage is not None:
            raise damage
    if rest:
        yield f"comes after the end of an array, and is not read: {shown(rest, 60)}"


def _element(buffer: str, at: int) -> tuple[Union[tuple[Any], str], int]:
    """(an element of an array, or what is wrong with it; where the comma or bracket behind it is)

    Raises ValueError where there is no end of it in `buffer`.
    """
    begin = SPACE.match(buffer, at).end()
    message = ""
    try:
        value, end = JSON.raw_decode(buffer, begin)
    except json.JSONDecodeError as error:
        # Raises again for text that neither reads, which may go on in the next block.
        value, end = LENIENT_JSON.raw_decode(buffer, begin)
        message = f"is not valid JSON: {error.msg}"
    behind = SPACE.match(buffer, end).end()
    # Such as 12 of 123, of which the buffer doesn't hold the 3 yet.
    if not buffer.startswith((",", "]"), behind):
        raise ValueError("there is no comma or bracket behind it")
    # An invalid byte shows here as a surrogate. `_document` finds those of escapes, as "\ud800".
    if not _is_utf8(buffer[begin:end]):
        message = NOT_UTF8
    return message or (value,), behind


def _read_csv(part: Part, text_field: str, file: BinaryIO) -> Iterator[Record]:
    # The default of 128 KiB is less than many a document.
    csv.field_size_limit(RECORD_BYTES)
    has_tabs = suffix(part.path) == ".tsv"
    with io.TextIOWrapper(file, "utf-8-sig", errors="surrogateescape", newline="") as text:
        # A quotation mark that nothing ends takes all lines before a damage. In .tsv, where it is
        # text, they are read again.
        lines = Lines(text, waits=has_tabs)
        reader = csv.reader(lines, "excel-tab" if has_tabs else "excel", strict=True)
        try:
            names = next(reader, [])
        except csv.Error as error:
            raise ValueError(
                f"{part.path} has no first line that names the columns: {error}"
            ) from None
        # index() would silently take the first of them.
        if (count := names.count(text_field)) > 1:
            raise ValueError(
                f'{part.path} has {count} columns named "{text_field}": give each its own name'
            )
        if not count:
            raise ValueError(f"{part.path} {_no_field(text_field, names)}")
        # The other columns are read as well: a quotation mark in one may begin several lines.
        column = names.index(text_field)
        rows = rows_of_csv(reader, lines, partial(where, part))
        if has_tabs:
            rows = rows_of_tsv(reader, lines, part.path, len(names))
        for number, row in rows:
            # A str is what is wrong with the row.
            if isinstance(row, str):
                yield BadRecord(number, row)
            elif len(row) != len(names):
                yield BadRecord(number, f"has {len(row)} fields, and the first line {len(names)}")
            else:
                yield _document(number, row[column])


def parquet_file(path: str) -> pq.ParquetFile:
    """A table, which the caller closes. Raises ValueError for what is none."""
    try:
        # A buffer instead of whole column chunks, which may be as large as a row group.
        return pq.ParquetFile(path, buffer_size=BLOCK_BYTES, pre_buffer=False)
    except pa.ArrowInvalid as error:
        raise ValueError(f"{path} is not a parquet file: {one_line(error)}") from error


def _read_parquet(part: Part, text_field: str, file: None) -> Iterator[Record]:
    with parquet_file(part.path) as table:
        schema = table.schema_arrow
        if text_field not in schema.names:
            raise ValueError(f"{part.path} {_no_field(text_field, schema.names)}")
        # A repeated string is often stored once, as a dictionary.
        kind = schema.field(text_field).type
        if pa.types.is_dictionary(kind):
            kind = kind.value_type
        if kind not in (pa.string(), pa.large_string(), pa.string_view()):
            raise ValueError(f'{part.path} holds {kind}, not strings, in its column "{text_field}"')
        # Rows have the numbers of the whole file, also in a range of its row groups.
        groups_end = table.num_row_groups if part.end is None else part.end
        number = end = sum(table.metadata.row_group(group).num_rows for group in range(part.start))
        for group in range(part.start, groups_end):
            end += table.metadata.row_group(group).num_rows
            try:
                for batch in table.iter_batches(
                    PARQUET_ROWS, [group], [text_field], use_threads=False
                ):
                    # As bytes: pyarrow doesn't check that strings are valid, and an invalid one
                    # must not end the others. A null is an empty document.
                    for value in batch.column(0).cast(pa.large_string()).cast(pa.large_binary()):
                        yield _document(
                            number, (value.as_py() or b"").removeprefix(codecs.BOM_UTF8)
                        )
                        number += 1
            except (pa.ArrowException, OSError) as error:
                while number < end:  # the rest of its row group
                    yield BadRecord(number, f"can't be read: {one_line(error)}")
                    number += 1


def revision_of(name: str) -> Optional[str]:
    """The newest commit of a dataset on the hub, None where it can't be asked, which `load_splits`
    says."""
    from huggingface_hub import HfApi

    with suppress(Exception):  # its client raises some ten types
        if reach_hub():
            return HfApi().dataset_info(name.partition(":")[0]).sha
    return None


def load_splits(kind: str, name: str, revision: Optional[str] = None) -> dict[str, Any]:
    """The splits of a dataset, "rows" for one without a name: of a folder, or of `name` or
    `name:config` streamed from the hub, where `revision` is a commit, None the newest one.

    Raises ValueError for one that can't be opened.
    """
    # Its import takes longer than that of all else that a process which tokenizes needs.
    import datasets

    from fabric_llm.data.folders import has_rows, split_names

    try:
        if kind == "hub":
            repository, _, config = name.partition(":")
            # Offline, it takes its cache at once, and would else try for half a minute.
            if not reach_hub():
                datasets.config.HF_HUB_OFFLINE = True
            of_hub = {"revision": revision, "streaming": True}
            return dict(datasets.load_dataset(repository, config or None, **of_hub))
        folder = Path(name)
        splits = [""]
        if (folder / "dataset_dict.json").is_file():
            splits = split_names(folder)
        # `load_from_disk` would follow names of files that lead out of the folder.
        for split in splits:
            has_rows(folder / split)  # raises what is wrong with it
        loaded = datasets.load_from_disk(name)
        return dict(loaded) if isinstance(loaded, dict) else {"rows": loaded}
    except Exception as error:  # the hub, its client and file formats raise some twenty types
        # A refusal for security keeps its own code and sentence.
        if isinstance(error, Fault) and error.code == REFUSED:
            raise
        message = f"{name} is not a complete dataset folder"
        if kind == "hub":
            message = NOWHERE.format(name)
        # The mode of `reach_hub`, which nobody has asked for by that name.
        why = one_line(error).replace("OfflineModeIsEnabled", "no answer, or HF_HUB_OFFLINE is set")
        raise ValueError(f"{message}: {why}") from error


def _read_dataset(part: Part, text_field: str, file: None) -> Iterator[Record]:
    # Each process opens the dataset itself. Rows stay on the disk, or come from the hub.
    rows = load_splits(part.kind, part.path, part.revision)[part.split]
    if part.end is not None:
        rows = rows.select(range(part.start, part.end))
    columns = rows.column_names  # None if a streamed dataset doesn't declare them
    if columns is not None:
        if text_field not in columns:
            raise ValueError(f"{part.path} [{part.split}] {_no_field(text_field, columns)}")
        rows = rows.select_columns([text_field])  # so that no image is decoded
    for number, row in enumerate(rows, part.start):
        # A null is an empty document, as in parquet. A row without the field is a bad record.
        if row.get(text_field, "") is None:
            yield number, ""
        else:
            yield _text_of(row, text_field, number, "column")


READERS: dict[str, Callable[[Part, str, Any], Iterator[Record]]] = {
    "text": _read_text,
    "json_lines": _read_json_lines,
    "json": _read_json,
    "csv": _read_csv,
    "parquet": _read_parquet,
    "dataset": _read_dataset,
    "hub": _read_dataset,
}
