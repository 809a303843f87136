"""Encode pieces: their documents become tokens in files, in this process, or by one for each core.

In the work folder a piece is, by its name, a hash of all that it is made of:

    NAME.tokens     the documents' tokens, one behind the other
    NAME.documents  a record of each document (DOCUMENT)
    NAME.json       the mark: both are on the disk, and what was read for them

A piece without a mark is made again from its beginning. Worker processes take one piece after the
other, and end with the process that has started them. This module imports neither torch nor
transformers, so that they start quickly.
"""

import hashlib
import json
import multiprocessing
import os
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Optional

import numpy as np
from tokenizers import Tokenizer

from fabric_llm.base import files
from fabric_llm.base.ending import blocked
from fabric_llm.base.failpoints import failpoint
from fabric_llm.base.faults import PEER_LOST, Fault, one_line
from fabric_llm.base.machine import die_with
from fabric_llm.base.names import command, counted, shown
from fabric_llm.base.work_folder import lock
from fabric_llm.prepare import contamination
from fabric_llm.prepare.corpus import Piece
from fabric_llm.prepare.documents import (
    CONTAMINATED,
    BadRecord,
    Record,
    read_part,
    sections,
    where,
)

# Many documents in a batch keep all threads of the tokenizer busy. Its working memory is about 120
# bytes a character.
BATCH_DOCUMENTS = 1024
BATCH_CHARACTERS = 1_000_000
CHARACTERS_BEFORE = 1000  # of the section before, with which one is encoded
MAX_NAMED = 20  # bad records
MAX_MESSAGE = 2000  # characters
TOKEN_BYTES = "token_bytes.npy"  # in the work folder: bytes_of_tokens of the tokenizer
MANY_RECORDS = 100  # in a range of a large file, which end the preparation if all of them are bad
# How many tokens it has, where it goes (documents.DRAWN ...), and the hash of its text.
DOCUMENT = np.dtype([("tokens", "<i8"), ("goes", "u1"), ("hash", "<u8", 2)])


class Job(NamedTuple):
    """What all pieces are encoded with."""

    folder: str  # the work folder
    text_field: str
    stop_on_error: bool
    evaluation: list[str]  # hashes of what documents mustn't share, see contamination.py
    # The tokenizer's convention:
    before: list[int]  # tokens that stand before a document
    after: list[int]  # and behind it, the last of them EOS
    forbidden: dict[int, str]  # {id: name} of the special tokens that text mustn't become
    unknown: int  # the token of text that the tokenizer has no other for; -1 without one
    dtype: str  # of token ids: uint16 if the whole vocabulary fits into it, else int32


@dataclass
class Mark:
    """What was read for a piece, and what was made of it: records = documents + empty + bad."""

    records: int = 0
    documents: int = 0
    tokens: int = 0
    empty: int = 0
    bad: int = 0  # records
    unknown: int = 0  # tokens
    bytes: int = 0  # of the documents' text
    bytes_of_tokens: int = 0  # that the tokens stand for, see data/token_bytes.py
    # (number of the part, one of the first of them)
    named: list[tuple[int, BadRecord]] = field(default_factory=list)
    # (number of the part, that of the document, that of an evaluation set, the words of both)
    contaminated: list[tuple[int, int, int, str]] = field(default_factory=list)


def read_mark(path: Path) -> Optional[Mark]:
    """The mark of a piece, None without one.

    path: of its files, without a suffix. A damaged piece counts as none.
    """
    try:
        mark = Mark(**json.loads(path.with_suffix(".json").read_bytes()))
        tokens = path.with_suffix(".tokens").stat().st_size
        documents = path.with_suffix(".documents").stat().st_size
    except (OSError, ValueError, TypeError):
        return None
    # The dtype of token ids has 2 bytes or 4.
    has_tokens = tokens in (2 * mark.tokens, 4 * mark.tokens)
    if not has_tokens or documents != mark.documents * DOCUMENT.itemsize:
        return None
    return mark


class PieceFiles:
    """The files of a piece, while documents are added to them."""

    def __init__(self, job: Job, tokens: BinaryIO, documents: BinaryIO) -> None:
        self.job, self.mark, self.tokens, self.documents = job, Mark(), tokens, documents
        self.token_bytes = np.load(Path(job.folder, TOKEN_BYTES))
        self.evaluation = contamination.load(job.folder, job.evaluation)

    def add(self, ids: np.ndarray, text: str, goes: int) -> None:
        """Append a document, unless no character of it is visible. ids: the tokens of `text`,
        uint32 [tokens]."""
        if not text.strip():
            self.mark.empty += 1
            return
        content = text.encode()
        # The ids are uint32 here, and the dtype of the job holds all of the vocabulary.
        tokens = np.concatenate(
            [self.job.before, ids, self.job.after], dtype=self.job.dtype, casting="unsafe"
        )
        self.tokens.write(tokens.data)
        # Of the text and not of its tokens: a split must not depend on the tokenizer.
        digest = np.frombuffer(hashlib.blake2b(content, digest_size=16).digest(), "<u8")
        self.documents.write(np.array((len(tokens), goes, digest), DOCUMENT).tobytes())
        self.mark.documents += 1
        self.mark.tokens += len(tokens)
        self.mark.unknown += int((ids == self.job.unknown).sum())
        self.mark.bytes += len(content)
        self.mark.bytes_of_tokens += int(self.token_bytes[ids].sum())

    def contaminated(self, part: int, number: int, text: str) -> int:
        """CONTAMINATED for a document that shares words with an evaluation set, else 0."""
        if not self.evaluation:
            return 0
        shared = contamination.shared(text, self.evaluation)
        self.mark.contaminated += [(part, number, of, words) for of, words in shared.items()]
        return CONTAMINATED * bool(shared)


@contextmanager
def without_panic() -> Iterator[None]:
    """Raises ValueError where tokenizers panics, such as for a regular expression that takes too
    long, and hides its report."""
    # Rust reports a panic to the descriptor itself, which replacing sys.stderr wouldn't hide.
    stderr, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # which isn't an Exception, and isn't exported
            raise
        raise ValueError(f"the tokenizer fails on a text: {one_line(error)[:300]}") from None
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(nowhere)


def encode_all_alike(backend: Any) -> None:
    """Switch off what tokenizer.json may ask for: truncation, padding, and the dropout of merges,
    which is random."""
    backend.no_truncation()
    backend.no_padding()
    if getattr(backend.model, "dropout", None) is not None:
        backend.model.dropout = None


@lru_cache(1)
def _load_backend(path: str, modified_ns: int) -> Tokenizer:
    """The tokenizer as it is saved in the work folder, and so in the dataset, with its hash in the
    manifest."""
    backend = Tokenizer.from_file(path)
    encode_all_alike(backend)
    backend.encode_special_tokens = True  # transformers' split_special_tokens
    return backend


def encode_piece(piece: Piece, name: str, job: Job) -> None:
    """Encode a piece, unless that is done. Its files, of this name, are then on the disk.

    Raises ValueError for a bad record if the job stops on errors, and for a file of which every
    record is bad; Fault (73) where another process has the piece.
    """
    path = Path(job.folder, name)
    # Nothing is truncated before it is locked: another process may be writing it.
    with (
        open(path.with_suffix(".tokens"), "ab") as tokens,
        open(path.with_suffix(".documents"), "ab") as documents,
    ):
        lock(tokens.fileno(), f"piece {name} in {job.folder!r}")
        if read_mark(path) is not None:
            return
        for file in (tokens, documents):
            file.truncate(0)
        out = PieceFiles(job, tokens, documents)
        _encode_documents(piece, job, out)
        # The mark says that both files are on the disk, so they are flushed before it.
        for file in (tokens, documents):
            file.flush()
            os.fsync(file.fileno())
        failpoint("prepare.mark")
        files.write_atomically(
            path.with_suffix(".json"), json.dumps(asdict(out.mark)), durable=True
        )
        failpoint("prepare.marked")


def _encode_documents(piece: Piece, job: Job, out: PieceFiles) -> None:
    """Add the documents of a piece to its files, and its bad records to its mark."""
    path = os.path.join(job.folder, "tokenizer", "tokenizer.json")
    # A process keeps the tokenizer from one piece to the next.
    backend = _load_backend(path, os.stat(path).st_mtime_ns)
    readable: set[int] = set()  # numbers of parts with a record that can be read
    unreadable: Counter[int] = Counter()  # likewise: records that can't be read
    first_bad: dict[int, BadRecord] = {}
    for batch in _batches(piece, job):
        out.mark.records += len(batch)
        encoded = _encoded([_text_of(record) for _, record in batch], backend)
        # Of almost every batch this one look says that no document needs another.
        has_special = np.isin(np.concatenate(encoded), list(job.forbidden)).any()
        forbidden = job.forbidden if has_special else {}
        for (number, record), ids in zip(batch, encoded):
            if isinstance(record, BadRecord):
                # Its message may quote what the file holds.
                bad = record._replace(message=shown(record.message, MAX_MESSAGE))
                # Kept for the sentence that is due if no record of the file can be read.
                unreadable[number] += 1
                first_bad.setdefault(number, bad)
            else:
                readable.add(number)
                message = _unencodable(record[1], ids, forbidden)
                if not message:
                    goes = piece.parts[number].goes + out.contaminated(number, *record)
                    out.add(ids, record[1], goes)
                    continue
                bad = BadRecord(record[0], message)
            if job.stop_on_error:
                raise ValueError(_sentence(piece, number, bad))
            out.mark.bad += 1
            # A file of nothing but bad records must not fill the mark.
            if len(out.mark.named) < MAX_NAMED:
                out.mark.named.append((number, bad))
    # Only now, since a readable record of the same file may come after unreadable ones.
    none = {number: count for number, count in unreadable.items() if number not in readable}
    _require_none(piece, none, first_bad)


def _text_of(record: Record) -> str:
    # A bad record has no tokens, but keeps its place in the batch.
    return "" if isinstance(record, BadRecord) else record[1]


def _unencodable(text: str, ids: np.ndarray, forbidden: Mapping[int, str]) -> str:
    """Why a text can't be a document with this tokenizer; "" if it can. ids: its tokens."""
    for token, name in forbidden.items():
        if token in ids:
            return (
                f"holds text that this tokenizer turns into its special token {shown(name)}: take "
                "it out, or choose a byte-level one"
            )
    # Such a document would be nothing but its BOS and EOS.
    if text.strip() and not len(ids):
        return "holds text of which this tokenizer makes no token"
    return ""


def _require_none(
    piece: Piece, unreadable: Mapping[int, int], first_bad: Mapping[int, BadRecord]
) -> None:
    """Raises ValueError for whole files, or much of one, that hold nothing but bad records.

    unreadable: number of a part without a readable record -> its bad records. first_bad: number of
    a part -> the first of them.
    """
    parts = piece.parts
    # The other ranges of a file may be good, such as beside a line that is too long.
    refused = [
        number
        for number, count in unreadable.items()
        if (parts[number].end is None or count >= MANY_RECORDS)
        and not parts[number].is_one_document
    ]
    if not refused:
        return
    first, names = refused[0], dict.fromkeys(Path(parts[n].path).name for n in refused)
    others = f", nor any of {counted(len(refused) - 1, 'more file')}" * (len(refused) > 1)
    raise ValueError(
        f"none of {unreadable[first]} records of {parts[first].path} can be read"
        f"{others}, such as {_sentence(piece, first, first_bad[first])}. To leave them out: "
        f"{command(exclude=[*names])}"
    )


def _encoded(texts: list[str], backend: Tokenizer) -> list[np.ndarray]:
    """The tokens of each text of a batch, uint32. A long one stands alone, and is encoded in
    sections."""
    # The working memory of the backend grows with the text.
    if len(texts) == 1:
        parts = list(sections(texts[0]))
        if len(parts) > 1:
            return [_joined(parts, backend)]
    # The backend makes no attention masks and offsets, and doesn't warn of long documents. numpy
    # takes an array.array three times as fast as a list of int.
    return [np.frombuffer(ids, dtype=np.uint32) for ids in _ids(texts, backend)]


def _joined(parts: Sequence[str], backend: Tokenizer) -> np.ndarray:
    """The tokens of a text in sections, as those of the whole: each section is encoded behind the
    end of the one before.

    A tokenizer may put a space before a text, take one away, or join what stands on both sides of a
    cut. Only in a word that is longer than a section do the two not meet: there each has its own
    tokens.
    """
    tokens, before = array("I"), ""
    for part in parts:
        before = before[-CHARACTERS_BEFORE:]
        alone, both = _ids([before, before + part], backend)
        same = 0  # tokens that the end of the section before has, whatever comes behind it
        while same < len(alone) and alone[same : same + 1] == both[same : same + 1]:
            same += 1
        # The last of its tokens are others in the whole. They are replaced, if they are these.
        replaced = len(tokens) - (len(alone) - same)
        if tokens[replaced:] == alone[same:]:
            del tokens[replaced:]
            tokens += both[same:]
        else:
            tokens += _ids([part], backend)[0]
        before = part
    return np.frombuffer(tokens, dtype=np.uint32)


def _ids(texts: list[str], backend: Tokenizer) -> list[array]:
    with without_panic():
        encodings = backend.encode_batch_fast(texts, add_special_tokens=False)
    return [array("I", encoding.ids) for encoding in encodings]


def _batches(piece: Piece, job: Job) -> Iterator[list[tuple[int, Record]]]:
    """Records, with the numbers of their parts."""
    batch, characters = [], 0
    for number, part in enumerate(piece.parts):
        for record in read_part(part, job.text_field):
            failpoint("prepare.documents")
            size = 0 if isinstance(record, BadRecord) else len(record[1])
            # A document that is larger than a batch stands alone.
            if batch and (len(batch) == BATCH_DOCUMENTS or characters + size > BATCH_CHARACTERS):
                yield batch
                batch, characters = [], 0
            batch.append((number, record))
            characters += size
    if batch:
        yield batch


def _sentence(piece: Piece, number: int, record: BadRecord) -> str:
    return f"{where(piece.parts[number], record.number)} {record.message}"


def bad_records(pieces: Iterable[Piece], marks: Sequence[Mark]) -> list[str]:
    """Sentences on the first ones of all pieces."""
    sentences: list[str] = []
    for piece, mark in zip(pieces, marks):
        for number, bad in mark.named[: MAX_NAMED - len(sentences)]:
            sentences.append(_sentence(piece, number, BadRecord(*bad)))
    return sentences


def encode_locally(
    pieces: Mapping[str, Piece], job: Job, num_workers: int, report: Callable[[int], Any]
) -> None:
    """Encode by processes on this machine. What one of them raises is raised here, and the others
    end.

    pieces: by name. report: takes the bytes of the inputs of each piece that is done.
    """
    count = min(num_workers, len(pieces))
    context = multiprocessing.get_context("spawn")  # threads of the tokenizer don't outlive a fork
    # Only the pool's processes are killed below, and none that the caller has started.
    others = multiprocessing.active_children()
    # Fewer pieces than workers leave some threads to each process.
    own = os.getpid(), num_workers // count
    # A terminal signals its whole group, but only this process is to hear it, and ends the others.
    # Python starts one here that cleans up, and unblocks the signals.
    with blocked():
        pool = ProcessPoolExecutor(count, context, _begin_process, own)
    try:
        with blocked():
            running = {
                pool.submit(_encode_in_process, piece, name, job): piece
                for name, piece in pieces.items()
            }
        for done in as_completed(running):
            done.result()
            report(running[done].bytes)
    except BrokenProcessPool:
        raise Fault(
            "a process that tokenizes was killed (for want of memory?); the same command goes on.",
            PEER_LOST,
        ) from None
    finally:
        # The pool waits for what runs, which a mistake or Ctrl-C should not.
        for process in multiprocessing.active_children():
            if process not in others:
                process.kill()  # a piece may take a minute
        pool.shutdown(cancel_futures=True)


def _begin_process(parent: int, threads: int) -> None:
    die_with(parent)
    # The threads of all processes together are as many as there are cores.
    os.environ |= {
        "TOKENIZERS_PARALLELISM": str(threads > 1).lower(),
        "RAYON_NUM_THREADS": str(threads),
    }


def _encode_in_process(piece: Piece, name: str, job: Job) -> None:
    """Encode a piece. Raises only errors that surely come through a pipe."""
    try:
        encode_piece(piece, name, job)
    except OSError as error:
        # Made anew, as a subclass of some library may not come through.
        if error.errno:
            raise OSError(error.errno, error.strerror, error.filename) from error
        raise OSError(str(error)) from error
    except Exception as error:
        if type(error) in (ValueError, Fault):
            raise
        raise RuntimeError(f"{type(error).__name__}: {error}") from error
