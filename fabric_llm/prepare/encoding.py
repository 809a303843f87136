"""Encode a piece: its documents become tokens in a file, so that a killed process goes on where its last mark is.

In the work folder a piece with number 7 is:

    000007.tokens   the documents' tokens, one behind the other
    000007.lengths  uint64 for each document: its tokens, and what is known of its split, see `Lengths`
    000007.hashes   16 bytes for each document, the hash of its text, where duplicates are to be found
    000007.json     the mark: how much of them is on the disk, and what was read for it

Imports neither torch nor transformers: a process for each core does nothing else.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Optional

import numpy as np
from tokenizers import Tokenizer

from fabric_llm.base import files
from fabric_llm.base.failpoints import failpoint
from fabric_llm.base.faults import UNWRITABLE, Fault, one_line
from fabric_llm.base.names import shown
from fabric_llm.prepare.documents import SPECIAL, Bad, Part, read_part, where
from fabric_llm.prepare.pieces import Piece

# Many documents in a batch keep all cores of the tokenizer busy, few characters keep its working memory small: it takes
# about 120 bytes a character.
BATCH_DOCUMENTS = 1024
BATCH_CHARACTERS = 1_000_000
BATCH_CHARACTERS_A_THREAD = 500_000
MARK_CHARACTERS = 64_000_000  # encoded between two marks
MAX_NAMED = 20  # bad records
MAX_MESSAGE = 2000  # characters
MUCH_BYTES = 2**24  # of a large file, in so many records
MANY_RECORDS = 1000
HASH_BYTES = 16


class Convention(NamedTuple):
    """What a tokenizer makes of a document. JSON writes it as a list."""

    before: list[int]  # tokens that stand before a document
    after: list[int]  # and behind it, the last of them EOS
    forbidden: list[tuple[int, str]]  # special tokens, by id and name, that text mustn't become
    dtype: str  # of token ids: uint16 where all of the vocabulary fit into it, else int32


class Job(NamedTuple):
    """What all pieces are encoded with."""

    folder: str  # the work folder
    convention: Convention
    text_field: str
    stop_on_error: bool
    hashes: bool
    threads: int  # of the tokenizer in a process


@dataclass
class Mark:
    """What of a piece is on the disk."""

    done: bool = False
    items: int = 0  # of its readers: documents, sections of long ones, and bad records
    documents: int = 0  # written
    tokens: int = 0
    characters: int = 0
    empty: int = 0
    long: int = 0  # documents that were encoded in sections
    bad: dict[str, int] = field(default_factory=dict)  # by kind
    named: list[tuple[int, Optional[int], str]] = field(default_factory=list)  # (part, number, message) of bad records


def read_mark(folder: Path, number: int) -> Mark:
    """The mark of a piece, or an empty one. A damaged one counts as none."""
    try:
        return Mark(**json.loads((folder / f"{number:06d}.json").read_bytes()))
    except (OSError, ValueError, TypeError):
        return Mark()


def load_backend(folder: str) -> Tokenizer:
    """The tokenizer in the work folder. The saved file encodes, so that its hash in the manifest vouches for the rows."""
    backend = Tokenizer.from_file(os.path.join(folder, "tokenizer", "tokenizer.json"))
    backend.no_truncation()  # which tokenizer.json may ask for
    backend.no_padding()
    backend.encode_special_tokens = True  # transformers' split_special_tokens
    return backend


def encode_piece(piece: Piece, job: Job, backend: Tokenizer, report: Callable[[int], Any]) -> None:
    """Encode what isn't yet encoded of a piece. report: is told how many more bytes of the inputs were read.

    Raises ValueError for a bad record if the job stops on errors, and for a file of which every record is bad; Fault (73)
    where another process has the piece.
    """
    with piece_files(Path(job.folder), piece.number, job) as out:
        if out.mark.done:
            report(piece.bytes)
            return
        reading = Reading(piece, job, out.mark)
        told = 0
        for batch, encodings in _encoded(_batches(reading, job.threads), backend, job.threads):
            _write(batch, encodings, out, job, piece)
            told += (ahead := max(0, min(piece.bytes, reading.bytes_read()) - told))
            report(ahead)
            if out.characters_since_mark >= MARK_CHARACTERS and not out.open_tokens:
                out.set_mark(done=False)
        out.mark.items = max(out.mark.items, reading.items)
        out.set_mark(done=True)
        report(piece.bytes - told)


# --------------------------------------------------------------------------- reading


class Item(NamedTuple):
    """A section of a document, or in place of a text why there is none."""

    part: int
    number: Optional[int]
    text: Any  # str or Bad
    is_last: bool
    items: int  # read so far, this one included


class Reading:
    """The items of a piece that its mark doesn't count yet."""

    def __init__(self, piece: Piece, job: Job, mark: Mark) -> None:
        self.piece, self.job, self.skip, self.items = piece, job, mark.items, 0
        self.handles: list[BinaryIO] = []
        self.parts_bytes = 0

    def __iter__(self) -> Iterator[Item]:
        for number, part in enumerate(self.piece.parts):
            self.handles.clear()
            yield from self._items_of(number, part)
            if self.handles and len(self.piece.parts) > 1:
                self.parts_bytes += self.bytes_of_part(part)

    def _items_of(self, number: int, part: Part) -> Iterator[Item]:
        read, bad, first = 0, 0, None
        for record in read_part(part, self.job.text_field, self.handles):
            self.items += 1
            failpoint("prepare.documents")
            if isinstance(record, Bad):
                record = record._replace(message=shown(record.message, MAX_MESSAGE))  # it may quote what the file holds
                bad, first = bad + 1, first or record
                item = Item(number, record.number, record, True, self.items)
            else:
                item = Item(number, *record, self.items)
            read += item.is_last
            if self.items > self.skip:
                yield item
        if first is not None and bad == read and not part.is_one_document and _is_much(part, read):
            raise ValueError(
                f"none of the {read} records of {part.path} can be read: {where(part, first.number, lines_before(part))}"
                f" {first.message}"
            )

    def bytes_of_part(self, part: Part) -> int:
        try:
            return self.handles[-1].tell() - part.start if self.handles else 0
        except ValueError:  # closed
            return os.path.getsize(part.path)

    def bytes_read(self) -> int:
        """About how many bytes of the piece were read."""
        return self.parts_bytes + (self.bytes_of_part(self.piece.parts[-1]) if len(self.piece.parts) == 1 else 0)


def _is_much(part: Part, records: int) -> bool:
    """Whether a part of which every record is bad is a mistake: a whole file, or much of it. See also `counted`.

    A range can hold a single record, such as a line that is too long, beside good ones.
    """
    if part.kind not in ("text", "json_lines", "parquet") or part.end is None:
        return True
    return part.kind != "parquet" and part.end - part.start >= MUCH_BYTES and records >= MANY_RECORDS


def lines_before(part: Part) -> int:
    """Lines of a file before the range that `part` is."""
    if part.kind != "json_lines" or not part.start:
        return 0
    lines, left = 0, part.start
    with open(part.path, "rb") as file:
        while left and (block := file.read(min(left, 2**20))):
            lines, left = lines + block.count(b"\n"), left - len(block)
    return lines


def _batches(items: Iterable[Item], threads: int) -> Iterator[list[Item]]:
    most = max(BATCH_CHARACTERS, threads * BATCH_CHARACTERS_A_THREAD)
    batch, characters = [], 0
    for item in items:
        size = len(item.text) if isinstance(item.text, str) else 0
        if batch and (len(batch) == BATCH_DOCUMENTS or characters + size > most):
            yield batch
            batch, characters = [], 0
        batch.append(item)
        characters += size
    if batch:
        yield batch


@contextmanager
def without_panic() -> Iterator[None]:
    """Raises ValueError where tokenizers panics, as for a regular expression that takes too long, without its own report."""
    said, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # which isn't an Exception, and isn't exported
            raise
        raise ValueError(f"the tokenizer fails on a text: {one_line(error)[:300]}") from None
    finally:
        os.dup2(said, 2)
        os.close(said)
        os.close(nowhere)


def _encoded(batches: Iterable[list[Item]], backend: Tokenizer, threads: int) -> Iterator[tuple[list[Item], list]]:
    """Each batch with the encodings of its texts. With several threads, the next is read while one is encoded."""

    def encode(batch: list[Item]) -> list:
        # The backend itself makes no attention masks or offsets, and doesn't warn of documents longer than the model's
        # context.
        texts = [item.text for item in batch if isinstance(item.text, str)]
        with without_panic():
            return backend.encode_batch_fast(texts, add_special_tokens=False)

    if threads == 1:
        yield from ((batch, encode(batch)) for batch in batches)
        return
    with ThreadPoolExecutor(1) as pool:
        waiting: Optional[tuple] = None
        for batch in batches:
            started = (batch, pool.submit(encode, batch))
            if waiting is not None:
                yield waiting[0], waiting[1].result()
            waiting = started
        if waiting is not None:
            yield waiting[0], waiting[1].result()


# --------------------------------------------------------------------------- writing


def _write(batch: list[Item], encodings: list, out: PieceFiles, job: Job, piece: Piece) -> None:
    """Append the documents of a batch, and count those that are left out."""
    # Through array.array: three times as fast as numpy with a list of int.
    ids = (np.frombuffer(array("I", encoding.ids), dtype=np.uint32) for encoding in encodings)
    sections = [one.astype(job.convention.dtype) for one in ids]
    forbidden = np.array([token for token, _ in job.convention.forbidden], dtype=job.convention.dtype)
    suspicious = bool(sections) and np.isin(np.concatenate(sections), forbidden).any()
    following = iter(sections)
    for item in batch:
        part = piece.parts[item.part]
        if isinstance(item.text, Bad):
            out.take_back()
            _bad(item.text, item.part, part, out.mark, job)
        else:
            ids = next(following)
            if suspicious and (found := forbidden[np.isin(forbidden, ids)]).size and out.special is None:
                out.special = dict(job.convention.forbidden)[int(found[0])]
            special = out.add(ids, item.text, item.is_last, part.own_validation, part.draws)
            if special is not None:
                message = (
                    f"holds text that this tokenizer turns into its special token {shown(special)}: take it out of"
                )
                message += " the text, or choose a byte-level tokenizer"
                _bad(Bad(SPECIAL, item.number, message), item.part, part, out.mark, job)
        out.mark.items = item.items


def _bad(record: Bad, number_of_part: int, part: Part, mark: Mark, job: Job) -> None:
    if job.stop_on_error:
        raise ValueError(f"{where(part, record.number, lines_before(part))} {record.message}")
    mark.bad[record.kind] = mark.bad.get(record.kind, 0) + 1
    if len(mark.named) < MAX_NAMED:
        mark.named.append((number_of_part, record.number, record.message))


class PieceFiles:
    """The files of a piece, open for appending."""

    def __init__(self, number: int, opened: dict[str, BinaryIO], mark: Mark, job: Job) -> None:
        self.tokens, self.lengths, self.hashes = opened["tokens"], opened["lengths"], opened.get("hashes")
        self.path, self.mark = Path(job.folder, f"{number:06d}.json"), mark
        dtype = np.dtype(job.convention.dtype)
        self.before = np.array(job.convention.before, dtype=dtype)
        self.after = np.array(job.convention.after, dtype=dtype)
        self.characters_since_mark = 0
        # Of the document being written.
        self.open_tokens, self.body_tokens, self.sections, self.visible = 0, 0, 0, False
        self.digest: Any = None
        self.special: Optional[str] = None  # a special token that its text became

    def add(self, ids: np.ndarray, text: str, is_last: bool, own_validation: bool, draws: bool) -> Optional[str]:
        """Append a section, and end the document with its last, unless it is empty or holds a special token, which is returned."""
        self.visible = self.visible or bool(text.strip())
        self.body_tokens += len(ids)
        self.characters_since_mark += len(text)
        self.mark.characters += len(text)
        if self.hashes is not None:
            self.digest = self.digest or hashlib.blake2b(digest_size=HASH_BYTES)
            self.digest.update(text.encode())
        is_kept = self.visible and self.body_tokens > 0 and self.special is None
        parts = [ids] if self.sections else [self.before, ids]
        self.sections += 1
        if not is_last:
            self._append(parts)
        elif is_kept:
            self._append([*parts, self.after])
            self._end(own_validation, draws)
        else:
            special = self.special
            self.mark.empty += special is None
            self.take_back()
            return special
        return None

    def _append(self, parts: list[np.ndarray]) -> None:
        for ids in parts:
            self.tokens.write(ids.data)
            self.open_tokens += len(ids)

    def _end(self, own_validation: bool, draws: bool) -> None:
        self.lengths.write(Lengths.encode(self.open_tokens, own_validation, draws))
        if self.hashes is not None:
            self.hashes.write(self.digest.digest())
        self.mark.documents += 1
        self.mark.tokens += self.open_tokens
        self.mark.long += self.sections > 1
        self._begin()

    def _begin(self) -> None:
        self.open_tokens, self.body_tokens, self.sections, self.visible = 0, 0, 0, False
        self.digest = self.special = None

    def take_back(self) -> None:
        """Remove the sections of a document that turns out to be bad or empty."""
        if self.open_tokens:
            self.tokens.flush()
            end = self.tokens.tell() - self.open_tokens * self.after.itemsize
            self.tokens.seek(end)
            self.tokens.truncate()
        self._begin()

    def set_mark(self, done: bool) -> None:
        """Everything so far is on the disk when this returns."""
        for file in (self.tokens, self.lengths, self.hashes):
            if file is not None:
                file.flush()
                os.fsync(file.fileno())
        failpoint("prepare.mark")
        self.mark.done = done
        files.write_atomically(self.path, json.dumps(asdict(self.mark)), durable=True)
        self.characters_since_mark = 0
        failpoint("prepare.marked")


class Lengths:
    """How a document's tokens and its split are written in 8 bytes."""

    @staticmethod
    def encode(tokens: int, own_validation: bool, draws: bool) -> bytes:
        return (tokens * 4 + 2 * own_validation + (not draws)).to_bytes(8, "little")

    @staticmethod
    def decode(words: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(tokens, whether its dataset has put it into validation, whether its split is drawn) of each document"""
        return (words >> 2).astype(np.int64), (words & 2).astype(bool), (words & 1) == 0


@contextmanager
def piece_files(folder: Path, number: int, job: Job) -> Iterator[PieceFiles]:
    """The files of a piece, cut to its mark, which no other process has open."""
    opened: dict[str, BinaryIO] = {}
    try:
        for name in ("tokens", "lengths", *(("hashes",) if job.hashes else ())):
            descriptor = os.open(folder / f"{number:06d}.{name}", os.O_RDWR | os.O_CREAT, 0o644)
            opened[name] = os.fdopen(descriptor, "r+b")
        lock(opened["tokens"].fileno(), f"piece {number} in {str(folder)!r} is being made by another process")
        mark = read_mark(folder, number)
        sizes = {"tokens": np.dtype(job.convention.dtype).itemsize, "lengths": 8, "hashes": HASH_BYTES}
        for name, file in opened.items():
            end = (mark.tokens if name == "tokens" else mark.documents) * sizes[name]
            if os.fstat(file.fileno()).st_size < end:
                raise Fault(f"piece {number} in {str(folder)!r} is damaged: remove that folder and start again.")
            file.truncate(end)
            file.seek(end)
        yield PieceFiles(number, opened, mark, job)
    finally:
        for file in opened.values():
            file.close()


def lock(descriptor: int, taken: str, shared: bool = False) -> None:
    """Lock an open file until it is closed. Raises Fault (73) where another process has it. Some file systems have no locks."""
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        raise Fault(f"{taken}: wait for it, or end it.", UNWRITABLE) from None
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise


def counted(marks: Iterable[Mark], pieces: list[Piece]) -> dict[str, Any]:
    """What was left out, over all pieces. The names of bad records are those of the first ones.

    Raises ValueError for a file in several pieces of which every record is bad.
    """
    good: dict[str, Optional[str]] = {}  # None where something of a file was read, else a bad record
    bad: Counter = Counter()
    named: list[str] = []
    total = {"empty": 0, "long": 0, "characters": 0}
    for piece, mark in zip(pieces, marks, strict=True):
        bad.update(mark.bad)
        for name in total:
            total[name] += getattr(mark, name)
        for part_number, number, message in mark.named[: MAX_NAMED - len(named)]:
            part = piece.parts[part_number]
            named.append(f"{where(part, number, lines_before(part))} {message}")
        if len(piece.parts) == 1 and mark.named and not mark.documents + mark.empty:
            part, (_, number, message) = piece.parts[0], mark.named[0]
            good.setdefault(part.path, f"{where(part, number, lines_before(part))} {message}")
        else:
            good.update({part.path: None for part in piece.parts})
    for path, message in good.items():
        if message is not None and sum(part.path == path for piece in pieces for part in piece.parts) > 1:
            raise ValueError(f"none of the records of {path} can be read: {message}")
    return {**total, "bad": dict(sorted(bad.items())), "named": named}
