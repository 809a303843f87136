"""Encode pieces: their documents become tokens in files, in this process, by one for each core, or by a Ray cluster.

In the work folder a piece with number 7 is:

    000007.tokens   the documents' tokens, one behind the other
    000007.lengths  uint64 for each document: 4 times its tokens, and where it goes (documents.DRAWN ...)
    000007.hashes   16 bytes for each document, the hash of its text
    000007.json     the mark: all of them are on the disk, and what was read for them

A piece without a mark is made again from its beginning. Worker processes take one piece after the other from a pipe, and end
with the process that has started them. This module imports neither torch nor transformers, so that they start quickly.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import signal
import subprocess
import sys
import traceback
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Optional

import numpy as np
from tokenizers import Tokenizer

from fabric_llm.base import files
from fabric_llm.base.failpoints import failpoint
from fabric_llm.base.faults import PEER_LOST, UNWRITABLE, Fault
from fabric_llm.base.names import shown
from fabric_llm.base.program import die_with
from fabric_llm.prepare.corpus import Piece
from fabric_llm.prepare.documents import DRAWN, SPECIAL, Bad, Record, read_part, where
from fabric_llm.prepare.tokenizer_bounds import without_panic

# Many documents in a batch keep all threads of the tokenizer busy. Its working memory is about 120 bytes a character.
BATCH_DOCUMENTS = 1024
BATCH_CHARACTERS = 1_000_000
BATCH_CHARACTERS_A_THREAD = 500_000
MAX_NAMED = 20  # bad records
MAX_MESSAGE = 2000  # characters
# A range of a large file with so many bytes and records, all of them bad, ends the preparation at once.
MUCH_BYTES, MANY_RECORDS = 2**24, 1000
HASH_BYTES = 16
SERVE = "from fabric_llm.prepare.encoding import serve; serve()"
PACKAGE = Path(__file__).parents[2]  # what PYTHONPATH needs
Report = Callable[[int], Any]


class Job(NamedTuple):
    """What all pieces are encoded with."""

    folder: str  # the work folder
    text_field: str
    stop_on_error: bool
    # The tokenizer's convention:
    before: list[int]  # tokens that stand before a document
    after: list[int]  # and behind it, the last of them EOS
    forbidden: dict[int, str]  # {id: name} of the special tokens that text mustn't become
    dtype: str  # of token ids: uint16 if the whole vocabulary fits into it, else int32
    threads: int = 1  # of the tokenizer in a process


@dataclass
class Mark:
    """What was made of a piece."""

    documents: int = 0
    tokens: int = 0
    characters: int = 0
    empty: int = 0
    long: int = 0  # documents that were encoded in sections
    bad: dict[str, int] = field(default_factory=dict)  # records, by kind
    named: list[tuple[int, Bad]] = field(default_factory=list)  # (number of the part, one of the first of them)
    # Parts of which every record is bad: (number of the part, how many, the first of them).
    unreadable: list[tuple[int, int, Bad]] = field(default_factory=list)


def read_mark(folder: Path, number: int) -> Optional[Mark]:
    """The mark of a piece, None without one. A damaged one counts as none."""
    try:
        return Mark(**json.loads((folder / f"{number:06d}.json").read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


class PieceFiles:
    """The files of a piece, while documents are added to them."""

    names = ("tokens", "lengths", "hashes")

    def __init__(self, job: Job, tokens: BinaryIO, lengths: BinaryIO, hashes: BinaryIO) -> None:
        self.tokens, self.lengths, self.hashes, self.mark = tokens, lengths, hashes, Mark()
        self.dtype = np.dtype(job.dtype)
        self.before, self.after = np.array(job.before, dtype=self.dtype), np.array(job.after, dtype=self.dtype)
        self._begin()

    def _begin(self) -> None:  # a document
        self.open_tokens, self.body_tokens, self.sections, self.is_visible = 0, 0, 0, False
        self.digest = hashlib.blake2b(digest_size=HASH_BYTES)

    def add(self, ids: np.ndarray, text: str, is_last: bool = True, goes: int = DRAWN) -> None:
        """Append a section of a document. The last one ends the document, which is left out if no character is visible."""
        self.mark.characters += len(text)
        self.digest.update(text.encode())
        self.is_visible = self.is_visible or bool(text.strip())
        self.body_tokens += len(ids)
        if is_last and not (self.is_visible and self.body_tokens):
            self.mark.empty += 1
            self.take_back()
            return
        for some in ([] if self.sections else [self.before]) + [ids] + ([self.after] if is_last else []):
            self.tokens.write(some.astype(self.dtype, copy=False).data)
            self.open_tokens += len(some)
        self.sections += 1
        if is_last:
            self.lengths.write((4 * self.open_tokens + goes).to_bytes(8, "little"))
            self.hashes.write(self.digest.digest())
            self.mark.documents += 1
            self.mark.tokens += self.open_tokens
            self.mark.long += self.sections > 1
            self._begin()

    def take_back(self) -> None:
        """Remove the sections of a document that turns out to be bad or empty."""
        if self.open_tokens:
            self.tokens.truncate(self.mark.tokens * self.dtype.itemsize)
        self._begin()


def make_piece(number: int, job: Job, fill: Callable[[PieceFiles], Any]) -> Mark:
    """Make the files of a piece with `fill`, unless that is done. They are on the disk when this returns.

    Raises Fault (73) where another process has the piece.
    """
    path = Path(job.folder, f"{number:06d}")
    with ExitStack() as stack:
        opened = [stack.enter_context(open(path.with_suffix(f".{name}"), "ab")) for name in PieceFiles.names]
        lock(opened[0].fileno(), f"piece {number} in {job.folder!r} is being made by another process")
        if (mark := read_mark(path.parent, number)) is not None:
            return mark
        for file in opened:
            file.truncate(0)
        fill(out := PieceFiles(job, *opened))
        for file in opened:
            file.flush()
            os.fsync(file.fileno())
        failpoint("prepare.mark")
        files.write_atomically(path.with_suffix(".json"), json.dumps(asdict(out.mark)), durable=True)
        failpoint("prepare.marked")
        return out.mark


def lock(descriptor: int, taken: str, shared: bool = False) -> None:
    """Lock an open file until it is closed. Raises Fault (73) where another process has it. Some file systems have no locks."""
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        raise Fault(f"{taken}: wait for it, or end it.", UNWRITABLE) from None
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise


def load_backend(folder: str) -> Tokenizer:
    """The tokenizer as it is saved in the work folder, and so in the dataset, with its hash in the manifest."""
    backend = Tokenizer.from_file(os.path.join(folder, "tokenizer", "tokenizer.json"))
    backend.no_truncation()  # which tokenizer.json may ask for
    backend.no_padding()
    backend.encode_special_tokens = True  # transformers' split_special_tokens
    return backend


def encode_piece(piece: Piece, job: Job, backend: Tokenizer) -> None:
    """Encode a piece, unless that is done.

    Raises ValueError for a bad record if the job stops on errors, and for a file of which every record is bad; Fault (73)
    where another process has the piece.
    """
    make_piece(piece.number, job, partial(_encode_documents, piece, job, backend))


def _encode_documents(piece: Piece, job: Job, backend: Tokenizer, out: PieceFiles) -> None:
    special: Optional[str] = None  # a special token that the text of this document became
    readable: set[int] = set()  # parts, by their number
    unreadable: dict[int, list] = {}  # likewise: how many bad records, the first

    def leave_out(number: int, record: Bad) -> None:
        nonlocal special
        if job.stop_on_error:
            raise ValueError(_sentence(piece, number, record))
        out.mark.bad[record.kind] = out.mark.bad.get(record.kind, 0) + 1
        if len(out.mark.named) < MAX_NAMED:
            out.mark.named.append((number, record))
        out.take_back()
        special = None

    for batch, encoded in _encoded(_batches(piece, job), backend):
        is_special = np.isin(np.concatenate(encoded), list(job.forbidden)).any()
        for (number, record), ids in zip(batch, encoded):
            if isinstance(record, Bad):
                record = record._replace(message=shown(record.message, MAX_MESSAGE))  # it may quote what the file holds
                unreadable.setdefault(number, [0, record])[0] += 1
                leave_out(number, record)
                continue
            first, text, is_last = record
            if is_special and special is None:
                special = next((name for token, name in job.forbidden.items() if token in ids), None)
            if special is None:
                out.add(ids, text, is_last, piece.parts[number].goes)
            elif is_last:
                said = f"holds text that this tokenizer turns into its special token {shown(special)}: take it out"
                leave_out(number, Bad(SPECIAL, first, f"{said}, or choose a byte-level tokenizer"))
            if is_last:
                readable.add(number)
    for number, (count, record) in unreadable.items():
        part = piece.parts[number]
        if number in readable or part.is_one_document:
            continue
        # The other ranges of a file may be good, such as beside a line that is too long: see `bad_records`.
        if part.end is None or count >= MANY_RECORDS and part.end - part.start >= MUCH_BYTES:
            raise ValueError(_none_of(count, piece, number, record))
        out.mark.unreadable.append((number, count, record))


def _encoded(batches: Iterator[list], backend: Tokenizer) -> Iterator[tuple[list, list[np.ndarray]]]:
    """Each batch with the tokens of its records. A thread encodes one while the next is read, so that a stop ends the reading."""

    def encode(batch: list[tuple[int, Record]]) -> list[np.ndarray]:
        texts = ["" if isinstance(record, Bad) else record[1] for _, record in batch]
        # The backend makes no attention masks and offsets, and doesn't warn of long documents. numpy takes an array.array
        # three times as fast as a list of int.
        with without_panic():
            encodings = backend.encode_batch_fast(texts, add_special_tokens=False)
        return [np.frombuffer(array("I", encoding.ids), dtype=np.uint32) for encoding in encodings]

    with ThreadPoolExecutor(1) as pool:
        started = ((batch, pool.submit(encode, batch)) for batch in batches)
        earlier = next(started, None)
        while earlier is not None:
            (batch, tokens), earlier = earlier, next(started, None)
            yield batch, tokens.result()


def _batches(piece: Piece, job: Job) -> Iterator[list[tuple[int, Record]]]:
    """Records, with the numbers of their parts."""
    most = max(BATCH_CHARACTERS, job.threads * BATCH_CHARACTERS_A_THREAD)
    batch, characters = [], 0
    for number, part in enumerate(piece.parts):
        for record in read_part(part, job.text_field):
            failpoint("prepare.documents")
            size = 0 if isinstance(record, Bad) else len(record[1])
            if batch and (len(batch) == BATCH_DOCUMENTS or characters + size > most):
                yield batch
                batch, characters = [], 0
            batch.append((number, record))
            characters += size
    if batch:
        yield batch


def _sentence(piece: Piece, number: int, record: Bad) -> str:
    return f"{where(piece.parts[number], record.number)} {record.message}"


def _none_of(count: int, piece: Piece, number: int, first: Bad) -> str:
    return f"none of the {count} records of {piece.parts[number].path} can be read: {_sentence(piece, number, first)}"


def bad_records(pieces: Sequence[Piece], marks: Sequence[Mark]) -> tuple[dict[str, int], list[str]]:
    """(how many of each kind there are in all pieces, sentences on the first ones)

    Raises ValueError for a file in several pieces of which every record is bad.
    """
    bad, named = Counter(), []
    parts = Counter(part.path for piece in pieces for part in piece.parts)
    unreadable: defaultdict[str, list] = defaultdict(list)  # by file
    for piece, mark in zip(pieces, marks):  # no pieces where a program makes the documents: none of these is bad
        bad.update(mark.bad)
        named += [(piece, number, Bad(*record)) for number, record in mark.named]
        for number, count, record in mark.unreadable:
            unreadable[piece.parts[number].path].append((count, piece, number, Bad(*record)))
    for path, found in unreadable.items():
        if len(found) == parts[path]:
            raise ValueError(_none_of(sum(one[0] for one in found), *found[0][1:]))
    return dict(sorted(bad.items())), [_sentence(*record) for record in named[:MAX_NAMED]]


class Generated(NamedTuple):
    """Documents that a program makes, in place of those that `--input` names: a function of `settings` alone."""

    settings: dict[str, Any]  # goes into the manifest; a later start with the same settings goes on
    tokens: int  # at least
    # Fills the files of a piece, of `number`, behind pieces with `before` tokens in `documents`.
    fill: Callable[[PieceFiles, int, int, int], None]


def generate(generated: Generated, job: Job, report: Report) -> list[Mark]:
    """Make pieces until there are enough tokens, after those that are there. report: takes the tokens of each."""
    marks: list[Mark] = []
    while (mark := read_mark(Path(job.folder), len(marks))) is not None:
        marks.append(mark)
    tokens, documents = sum(mark.tokens for mark in marks), sum(mark.documents + mark.empty for mark in marks)
    if 0 < tokens < generated.tokens:
        print(f"Going on: {tokens:,} of {generated.tokens:,} tokens are there.", file=sys.stderr)
    report(tokens)
    while tokens < generated.tokens:
        fill = partial(generated.fill, number=len(marks), before=tokens, documents=documents)
        marks.append(mark := make_piece(len(marks), job, fill))
        tokens, documents = tokens + mark.tokens, documents + mark.documents + mark.empty
        report(mark.tokens)
        failpoint("prepare.sampled")
    return marks


def encode_locally(pieces: Sequence[Piece], job: Job, num_workers: int, report: Report) -> None:
    """Encode by processes on this machine. What one of them raises is raised here, and the others end.

    report: takes the bytes of the inputs of each piece that is done.
    """
    waiting, count = list(reversed(pieces)), min(num_workers, len(pieces))
    processes: dict[Connection, subprocess.Popen] = {}
    at_work: dict[Connection, Piece] = {}

    def hand_out(pipe: Connection) -> None:
        if waiting:
            at_work[pipe] = waiting.pop()
            pipe.send(at_work[pipe])

    try:
        for _ in range(count):
            pipe, process = _start(job._replace(threads=max(1, num_workers // count)))
            processes[pipe] = process
            hand_out(pipe)
        while at_work:
            for pipe in wait(list(at_work)):
                try:
                    said = pipe.recv()  # an error, or None
                except (EOFError, OSError):
                    code = processes[pipe].wait()
                    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
                    memory = " (for want of memory?)" if code == -signal.SIGKILL else ""
                    said = Fault(f"a process that tokenizes {how}{memory}; the same command goes on.", PEER_LOST)
                if said is not None:
                    raise said
                report(at_work.pop(pipe).bytes)
                hand_out(pipe)
    finally:
        for process in processes.values():
            process.kill()
            process.wait()


def _start(job: Job) -> tuple[Connection, subprocess.Popen]:
    ours, theirs = Pipe()
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(PACKAGE), os.environ.get("PYTHONPATH")])),
        "TOKENIZERS_PARALLELISM": "true" if job.threads > 1 else "false",
        "RAYON_NUM_THREADS": str(job.threads),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-P", "-c", SERVE, str(theirs.fileno()), str(os.getpid())]
    process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL)
    theirs.close()  # so that a process that dies closes the pipe
    ours.send(job)
    return ours, process


def serve() -> None:
    """A process: encodes what comes out of the pipe."""
    die_with(int(sys.argv[2]))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # of the terminal's group; the other process ends this one
    pipe = Connection(int(sys.argv[1]))
    with suppress(EOFError, BrokenPipeError):
        job = pipe.recv()
        backend = load_backend(job.folder)
        while True:
            pipe.send(_error_of(pipe.recv(), job, backend))


def _error_of(piece: Piece, job: Job, backend: Tokenizer) -> Optional[Exception]:
    """Encode a piece. Returns its error; prints the traceback of an unexpected one, which a pipe may not be able to send."""
    try:
        encode_piece(piece, job, backend)
    except OSError as error:
        return OSError(error.errno, error.strerror, error.filename) if error.errno else OSError(str(error))
    except Exception as error:
        if type(error) in (ValueError, Fault):
            return error
        traceback.print_exception(error)
        return RuntimeError(f"{type(error).__name__}: {error}")
    return None


def encode_on_ray(pieces: Sequence[Piece], job: Job, report: Report) -> None:
    """Encode each piece as a task of a Ray cluster whose machines share the inputs and the output with this one.

    It is the cluster of the environment (`RAY_ADDRESS`, `ray start`), or else a new one on this machine alone.
    """
    try:
        import ray
    except ImportError:
        raise ValueError("--engine ray needs the package ray: pip install 'fabric_llm[ray]'") from None
    if starts := not ray.is_initialized():
        environment = {"PYTHONPATH": str(PACKAGE), "TOKENIZERS_PARALLELISM": "false"}
        ray.init(log_to_driver=False, runtime_env={"env_vars": environment})
    try:
        task = ray.remote(num_cpus=1, max_retries=3)(_on_ray)
        running = {task.remote(piece, job): piece for piece in pieces}
        while running:
            [ready], _ = ray.wait(list(running), num_returns=1)
            if (error := ray.get(ready)) is not None:  # raised there, Ray would wrap it into one of its own
                raise error
            report(running.pop(ready).bytes)
    finally:
        if starts:
            ray.shutdown()


def _on_ray(piece: Piece, job: Job) -> Optional[Exception]:
    return _error_of(piece, job, load_backend(job.folder))
