"""What `--input` names -> pieces of 4 to 32 MB, in a fixed order, which processes share; or texts
in memory.

A piece is one or more parts: ranges of large files, cut after a line or between documents, ranges
of row groups or rows, and many small files. The plan depends on the inputs alone, never on the
number of processes.
"""

import hashlib
import json
import os
import re
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Optional

from fabric_llm.base.names import shown
from fabric_llm.prepare import documents, inputs
from fabric_llm.prepare.compression import compression_of
from fabric_llm.prepare.documents import BLANK_LINES, Part

PIECE_BYTES = 32 * 2**20  # of a large corpus
# Of a small one. Many pieces keep all cores busy to the end, but flushing each takes 50 ms.
SMALL_PIECE_BYTES = 4 * 2**20
PIECES = 256
EDGES = 16  # the name of one of so many files begins a piece
# a text file from this size on is split at blank lines unless told otherwise
LONG_TEXT_BYTES = 16 * 2**20
# Names of splits. A word of the others in a name, such as `test_sft`, says that it isn't meant to
# be trained on.
OWN_VALIDATION = ("validation", "valid", "val", "dev")
NOT_TRAINING = {
    *OWN_VALIDATION,
    *"test tests testset testing testmini devtest devset eval evals evaluation".split(),
    *"heldout holdout held validate".split(),
}
MAX_BYTES = 2**26  # of text in memory; of more, texts are taken evenly over the inputs
ONE_OF = 20  # one of so many texts is held out


class Piece(NamedTuple):
    """What one process reads and encodes, in order."""

    bytes: int  # on disk
    parts: list[Part]

    def name(self, sources: Mapping[str, inputs.Source], encoded_with: Any) -> str:
        """Of its files: a hash of its parts, of sizes and times, and of what it is encoded with."""
        # A source has the size and time of its file: a piece of a changed file gets another name.
        made_of = [(part, sources[part.path]) for part in self.parts]
        return hashlib.sha256(
            json.dumps([made_of, encoded_with], sort_keys=True).encode()
        ).hexdigest()[:32]


def plan(input_files: inputs.InputFiles, separator: Optional[str]) -> list[Piece]:
    """The pieces of all sources. separator: see `inputs.separator`. What the summary should tell is
    added to `input_files.notes`.

    Raises ValueError for a dataset or table that can't be opened.
    """
    # The pieces depend on the inputs alone: a resumed preparation must find the same ones.
    _note_files_named_as_splits(input_files)
    total = sum(source.bytes or 0 for source in input_files.sources)
    # The size grows in steps, so that pieces stay as they are when a file is added or taken away.
    piece_bytes = SMALL_PIECE_BYTES
    while 2 * piece_bytes <= min(PIECE_BYTES, total // PIECES):
        piece_bytes *= 2
    pieces: list[Piece] = []
    parts: list[Part] = []
    size = 0
    for source in input_files.sources:
        for part, part_bytes in _parts_of(source, input_files, separator, piece_bytes):
            # Some names begin a piece, so that those behind a file that was taken away are soon cut
            # as before.
            is_edge = size > piece_bytes // 2 and zlib.crc32(os.fsencode(part.path)) % EDGES == 0
            if parts and (size + part_bytes > piece_bytes or is_edge):
                pieces.append(Piece(size, parts))
                parts, size = [], 0
            parts.append(part)
            size += part_bytes
    if parts:
        pieces.append(Piece(size, parts))
    return pieces


def _note_files_named_as_splits(input_files: inputs.InputFiles) -> None:
    """As of a dataset that was downloaded as files. They are read as any other: a name alone
    doesn't say what a file is for."""
    trains, apart = False, []
    for source in input_files.sources:
        # A text may be named test.txt for any reason.
        if inputs.KINDS.get(inputs.suffix(source.name), "text") == "text":
            continue
        # The file is named so, such as train-00000-of-00001, or else its folder.
        *_, folder, file = (os.sep + source.name.lower()).split(os.sep)
        names = {re.sub(r"-\d+(-of-\d+)?$", "", name) for name in (file.split(".")[0], folder)}
        trains = trains or "train" in names
        if names & NOT_TRAINING:
            apart.append(source.name)
    # Only beside a file named `train` is such a name likely to be that of a split.
    if apart and trains:
        more = f" and {len(apart) - 1} more" if apart[1:] else ""
        input_files.notes.append(
            f"{shown(apart[0])}{more} is named as a split to measure with, and read as the others "
            "are: leave it out by --exclude"
        )


def _parts_of(
    source: inputs.Source,
    input_files: inputs.InputFiles,
    separator: Optional[str],
    piece_bytes: int,
) -> Iterator[tuple[Part, int]]:
    """(part, its bytes on disk)"""
    part, size = Part(source.name, source.kind), source.bytes or 0
    # "" is --document_separator none: the file stays one document.
    if part.kind == "text":
        part = part._replace(separator=separator or None)
        # Many short files are documents each; a single or a long one is more likely a collection.
        is_long = len(input_files.sources) == 1 or size >= LONG_TEXT_BYTES
        if separator is None and is_long and _has_blank_lines(part):
            input_files.notes.append(
                f"{shown(part.path)} is split at blank lines; choose with --document_separator"
            )
            part = part._replace(separator=BLANK_LINES)
    has_lines = part.kind == "json_lines" or part.separator is not None
    if part.kind in ("dataset", "hub"):
        yield from _parts_of_dataset(part, size, input_files, piece_bytes)
    # Only whole row groups can be read by themselves.
    elif size > piece_bytes and part.kind == "parquet":
        with documents.parquet_file(part.path) as file:
            groups = file.num_row_groups
        yield from _ranges(part, groups, size, piece_bytes)
    # A compressed file can't be entered in the middle.
    elif size > piece_bytes and has_lines and not compression_of(part.path):
        yield from _ranges_of_bytes(part, size, piece_bytes)
    else:
        yield part, size


def _has_blank_lines(part: Part) -> bool:
    records = documents.read_part(part._replace(separator=BLANK_LINES), "")
    # A record that begins at another byte than 0 stands behind a separator. One is enough.
    return any(number for number, _ in records)


def _ranges_of_bytes(part: Part, size: int, piece_bytes: int) -> Iterator[tuple[Part, int]]:
    """Ranges of a file, each of which ends behind a line or a separator."""
    start = 0
    with open(part.path, "rb") as file:
        while start < size:
            # A range ends where the first document behind `place` begins: none is cut.
            end, place = size, start + piece_bytes
            if size - start >= 1.5 * piece_bytes:  # so that the last isn't small
                file.seek(place)
                rest = part._replace(start=place, separator=part.separator or "\n")
                begins = (begin for begin, _ in documents.cut_text(file, rest) if begin > place)
                end = next(begins, size)
            yield part._replace(start=start, end=end), end - start
            start = end


def _ranges(part: Part, count: int, size: int, piece_bytes: int) -> Iterator[tuple[Part, int]]:
    """Ranges of `count` row groups or rows, which have `size` bytes together."""
    # At least one at a time, however large a row group is.
    step = max(1, count * piece_bytes // max(1, size))
    for start in range(0, count, step):
        end = min(count, start + step)
        yield part._replace(start=start, end=end), size * (end - start) // count


def _parts_of_dataset(
    part: Part, size: int, input_files: inputs.InputFiles, piece_bytes: int
) -> Iterator[tuple[Part, int]]:
    """The splits to train on, and those of validation. The others are left out, with a note."""
    if part.kind == "hub":
        # Whoever reads a part reads this commit, and a start that finds another reads all anew.
        part = part._replace(revision=documents.revision_of(part.path))
    # Asks the hub, or opens the folder, so an input that can't be opened fails before any work.
    splits = documents.load_splits(part.kind, part.path, part.revision)
    own = [name for name in splits if name in OWN_VALIDATION]
    read = [name for name in splits if name in own or not is_no_training_text(name)]
    # Validation alone leaves nothing for the split `train`.
    if read == own:
        named = ", ".join(repr(shown(name, 60)) for name in list(splits)[:20])
        raise ValueError(
            f"{part.path} has no split to train on, only {named}: if that is what you mean, name "
            "the folder of this split alone, as save_to_disk writes it"
        )
    for name in own:
        input_files.notes.append(
            f"{part.path} [{name}] is kept for validation, and nothing else of the dataset is drawn"
        )
    has_lengths = part.kind != "hub"  # a stream has none
    rows = sum(len(splits[name]) for name in read) if has_lengths else 0
    for name, split in splits.items():
        # Rows that are left out are counted, so that the summary accounts for all of a dataset.
        if name not in read:
            left_out, count = f"{part.path} [{name}]", ""
            input_files.splits_left_out[left_out] = None
            if has_lengths:
                input_files.splits_left_out[left_out] = len(split)
                count = f": {len(split):,} rows"
            input_files.notes.append(f"{left_out} is left out{count}")
            continue
        part = part._replace(split=name)
        # A dataset that has a validation split keeps it, and no other rows of it are drawn.
        if own:
            goes = documents.TO_VALIDATION if name in own else documents.TO_TRAIN
            part = part._replace(goes=goes)
        # A folder's bytes are known as a whole; each split gets its part by its number of rows.
        if has_lengths:
            yield from _ranges(part, len(split), size * len(split) // max(1, rows), piece_bytes)
        else:
            yield part, 0


def is_no_training_text(split: str) -> bool:
    """Whether a split is named as one to measure with."""
    return bool(NOT_TRAINING & {*re.findall("[a-z]+", split.lower())})


class Corpus(NamedTuple):
    """Texts in memory to learn from, and others to measure on."""

    learned: list[str]
    held_out: list[str]
    every: int  # one of so many texts of the inputs was taken


def read(input_files: inputs.InputFiles, text_field: str, separator: Optional[str]) -> Corpus:
    """The documents of all sources, long ones in sections; of too many every second, fourth, and so
    on.

    Raises ValueError where there are too few. How much text there is isn't known before it is read:
    files may be compressed.
    """
    # One process reads all of it in order, so that the same inputs give the same texts.
    parts = [part for piece in plan(input_files, separator) for part in piece.parts]
    # of the hub, which may have no end
    is_stream = any(source.bytes is None for source in input_files.sources)
    taken, every, size = [], 1, 0
    for number, text in enumerate(documents.texts(parts, text_field)):
        # Every `every`-th text, so that what is taken is spread over all inputs.
        if number % every == 0:
            taken.append(text)
            size += len(text.encode())
        # Of a stream only the first texts are taken.
        if is_stream and size >= MAX_BYTES:
            break
        # Every second text is dropped and the distance doubled, so that they stay evenly spread.
        while size > MAX_BYTES and len(taken) > 1:
            taken, every = taken[::2], 2 * every
            size = sum(len(text.encode()) for text in taken)
    return Corpus(*hold_out(taken), every)


def summary(corpus: Corpus) -> str:
    """One line that says what was read."""
    counts = []
    for texts in (corpus.learned, corpus.held_out):
        megabytes = sum(len(text.encode()) for text in texts) / 1e6
        counts.append(f"{len(texts):,} texts ({megabytes:,.1f} MB)")
    learned, held_out = counts
    taken = f", one text of {corpus.every}" if corpus.every > 1 else ""
    return f"Tokens are learned from {learned} and measured on {held_out} that are held out{taken}."


def hold_out(texts: list[str]) -> tuple[list[str], list[str]]:
    """(texts, those held out): one of ONE_OF, at least one; the last lines of a single text. None
    is in both."""
    # A single text is divided at a line.
    if len(texts) == 1:
        cut = texts[0].rfind("\n", 0, len(texts[0]) * (ONE_OF - 1) // ONE_OF) + 1
        texts = [part for part in (texts[0][:cut], texts[0][cut:]) if part.strip()]
    # Of fewer than ONE_OF texts the last one is held out.
    every = max(1, min(ONE_OF, len(texts)))
    held_out = texts[every - 1 :: every]
    # A copy of a text that is held out isn't learned from either.
    apart = set(held_out)
    learned = [text for text in texts if text not in apart]
    if not learned:
        raise ValueError(
            "The corpus has no two different texts: tokens are learned from some, and measured on "
            "others."
        )
    return learned, held_out
