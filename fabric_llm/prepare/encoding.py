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
import sys
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Optional, Union

import numpy as np
from tokenizers import Tokenizer

from fabric_llm.base import files
from fabric_llm.base.failpoints import failpoint
from fabric_llm.base.faults import UNWRITABLE, Fault
from fabric_llm.base.names import shown
from fabric_llm.prepare.documents import SPECIAL, Bad, Part, read_part, where
from fabric_llm.prepare.pieces import Piece
from fabric_llm.prepare.tokenizer_bounds import without_panic

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
    items: int = 0  # read: documents, sections of long ones, and bad records
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
        handles: list[BinaryIO] = []
        told = 0
        items = _items(piece, job, out.mark.items, handles) if not out.mark.done else ()
        for batch, encodings in _encoded(_batches(items, job.threads), backend, job.threads):
            _write(batch, encodings, out, job, piece)
            told += (ahead := max(0, min(piece.bytes, _bytes_read(piece, handles)) - told))
            report(ahead)
            if out.characters_since_mark >= MARK_CHARACTERS and not out.open_tokens:
                out.set_mark(done=False)
        if not out.mark.done:
            out.set_mark(done=True)
        report(piece.bytes - told)


# --------------------------------------------------------------------------- reading


class Item(NamedTuple):
    """A section of a document, or in place of a text why there is none."""

    part: int
    number: Optional[int]
    text: Union[str, Bad]
    is_last: bool


def _items(piece: Piece, job: Job, skip: int, handles: list[BinaryIO]) -> Iterator[Item]:
    """The items of a piece but for the first `skip`. handles: gets the files that are opened.

    Raises ValueError for a file of which every record is bad.
    """
    count = 0
    for number, part in enumerate(piece.parts):
        read, bad, first = 0, 0, None
        for record in read_part(part, job.text_field, handles):
            failpoint("prepare.documents")
            if isinstance(record, Bad):
                record = record._replace(message=shown(record.message, MAX_MESSAGE))  # it may quote what the file holds
                bad, first = bad + 1, first or record
                item = Item(number, record.number, record, True)
            else:
                item = Item(number, *record)
            read, count = read + item.is_last, count + 1
            if count > skip:
                yield item
        if bad and bad == read and not part.is_one_document and _is_much(part, read):
            raise ValueError(f"none of the {read} records of {part.path} can be read: {_sentence(part, first)}")


def _sentence(part: Part, record: Bad) -> str:
    return f"{where(part, record.number, lines_before(part))} {record.message}"


def _bytes_read(piece: Piece, handles: list[BinaryIO]) -> int:
    """About how many bytes of the piece were read; 0 for one of several parts, which are small."""
    if len(piece.parts) > 1 or not handles or handles[-1].closed:
        return 0
    return handles[-1].tell() - piece.parts[0].start


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
    names = dict(job.convention.forbidden)
    is_special = np.isin(np.concatenate(sections), list(names)).any() if sections else False
    following = iter(sections)
    for item in batch:
        part = piece.parts[item.part]
        if isinstance(item.text, Bad):
            out.take_back()
            _count_bad(item, item.text, part, out.mark, job)
        else:
            ids = next(following)
            if is_special and (found := [token for token in names if token in ids]) and out.special is None:
                out.special = names[found[0]]
            if (special := out.add(ids, item.text, item.is_last, part.own_validation, part.draws)) is not None:
                message = (
                    f"holds text that this tokenizer turns into its special token {shown(special)}: take it out of the text, "
                    "or choose a byte-level tokenizer"
                )
                _count_bad(item, Bad(SPECIAL, item.number, message), part, out.mark, job)
        out.mark.items += 1


def _count_bad(item: Item, record: Bad, part: Part, mark: Mark, job: Job) -> None:
    if job.stop_on_error:
        raise ValueError(_sentence(part, record))
    mark.bad[record.kind] = mark.bad.get(record.kind, 0) + 1
    if len(mark.named) < MAX_NAMED:
        mark.named.append((item.part, *record[1:]))


class PieceFiles:
    """The files of a piece, open for appending."""

    def __init__(self, number: int, opened: dict[str, BinaryIO], mark: Mark, job: Job) -> None:
        self.tokens, self.lengths, self.hashes = opened["tokens"], opened["lengths"], opened.get("hashes")
        self.path, self.mark = Path(job.folder, f"{number:06d}.json"), mark
        dtype = np.dtype(job.convention.dtype)
        self.before = np.array(job.convention.before, dtype=dtype)
        self.after = np.array(job.convention.after, dtype=dtype)
        self.characters_since_mark = 0
        self._begin()

    def _begin(self) -> None:
        """Nothing is written yet of the next document."""
        self.open_tokens, self.body_tokens, self.sections, self.visible = 0, 0, 0, False
        self.digest = hashlib.blake2b(digest_size=HASH_BYTES)
        self.special: Optional[str] = None  # a special token that its text became

    def add(self, ids: np.ndarray, text: str, is_last: bool, own_validation: bool, draws: bool) -> Optional[str]:
        """Append a section, and end the document with its last, unless it is empty or holds a special token, which is returned."""
        self.characters_since_mark += len(text)
        self.mark.characters += len(text)
        if self.hashes is not None:
            self.digest.update(text.encode())
        self.visible = self.visible or bool(text.strip())
        self.body_tokens += len(ids)
        if is_last and (self.special is not None or not self.visible or not self.body_tokens):
            special = self.special
            self.mark.empty += special is None
            self.take_back()
            return special
        for some in ([] if self.sections else [self.before]) + [ids] + ([self.after] if is_last else []):
            self.tokens.write(some.data)
            self.open_tokens += len(some)
        self.sections += 1
        if is_last:
            self.lengths.write(Lengths.encode(self.open_tokens, own_validation, draws))
            if self.hashes is not None:
                self.hashes.write(self.digest.digest())
            self.mark.documents += 1
            self.mark.tokens += self.open_tokens
            self.mark.long += self.sections > 1
            self._begin()
        return None

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
    """What was left out of all pieces: {"empty": documents, "bad": records by kind, "bad_records": sentences on the first ones}

    Raises ValueError for a file in several pieces of which every record is bad.
    """
    empty, bad, sentences = 0, Counter(), []
    first_bad: dict[str, Optional[str]] = {}  # by file: its first bad record; None where something of it was read
    for piece, mark in zip(pieces, marks, strict=True):
        empty += mark.empty
        bad.update(mark.bad)
        records = [(piece.parts[part], Bad("", number, message)) for part, number, message in mark.named]
        sentences += [_sentence(*record) for record in records[: MAX_NAMED - len(sentences)]]
        if len(piece.parts) == 1 and records and not mark.documents + mark.empty:
            first_bad.setdefault(piece.parts[0].path, _sentence(*records[0]))
        else:
            first_bad.update({part.path: None for part in piece.parts})
    for path, sentence in first_bad.items():
        if sentence is not None and sum(part.path == path for piece in pieces for part in piece.parts) > 1:
            raise ValueError(f"none of the records of {path} can be read: {sentence}")
    return {"empty": empty, "bad": dict(sorted(bad.items())), "bad_records": sentences}


class Generated(NamedTuple):
    """Documents that a program makes, in place of those that `--input` names: a function of `settings` alone, in one piece."""

    settings: dict[str, Any]  # for the manifest, and what a later start has to have in common
    tokens: int  # at least
    fill: Callable[[PieceFiles, Callable[[int], Any]], None]  # (files, told of new tokens), goes on from their mark

    def make(self, piece: Piece, job: Job, report: Callable[[int], Any]) -> None:
        """Make the piece in the work folder. report: is told how many more tokens there are."""
        with piece_files(Path(job.folder), piece.number, job) as out:
            if out.mark.tokens:
                print(f"Going on: {out.mark.tokens:,} of {self.tokens:,} tokens are there.", file=sys.stderr)
            report(out.mark.tokens)
            self.fill(out, report)
            out.set_mark(done=True)
