"""Encoded pieces -> two splits -> rows of one length -> a folder that `datasets` opens, in this
process alone.

Whether a document is drawn for validation is a function of the seed and its text alone: equal
documents are drawn together, and more text doesn't draw the others anew. Two flat files hold the
tokens of the splits, which are then packed into rows:

`concat`: one document behind the other, cut into rows, so that many documents begin in one row and
end in the next. `best_fit`: only documents longer than a row are cut, and the rest of a row is
filled with EOS. Ding et al. 2024, "Fewer Truncations Improve Language Modeling", arXiv 2404.10830:
from the longest on, each goes into the fullest row that has room.

Exactly one EOS ends each document, so that EOS after EOS is padding. Where the text of a document
fills whole rows exactly, its EOS would come into another row, where no token predicts it, and where
it would pass for padding. It is dropped.
"""

import hashlib
import itertools
import json
import mmap
from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np
import pyarrow as pa
from tqdm import tqdm

from fabric_llm.base.failpoints import failpoint
from fabric_llm.base.names import counted
from fabric_llm.data.order import splitmix64
from fabric_llm.prepare.documents import CONTAMINATED, DRAWN, TO_TRAIN, TO_VALIDATION
from fabric_llm.prepare.encoding import DOCUMENT

COPY_TOKENS = 4 * 2**20  # at once
WINDOW_DOCUMENTS = 2**20  # packed together
WINDOW_TOKENS = 2**26  # likewise: their rows are in memory
SHARD_BYTES = 10**9


class Documents(NamedTuple):
    """The documents of pieces, in order."""

    pieces: list[Path]  # their files, without a suffix
    # the first document of each piece, and how many there are, int64 [pieces + 1]
    edges: np.ndarray
    lengths: np.ndarray  # tokens, int64 [documents]
    # the documents of each split, bool [documents]; those that are left out are in none
    splits: dict[str, np.ndarray]
    # those that are left out, each for one reason: contaminated, short or repeated
    left_out: dict[str, np.ndarray]
    in_both: int  # documents of a validation split that was kept whose text is trained on, too


def document_hashes(seed: int, texts: np.ndarray) -> np.ndarray:
    """A number in [0, 1) for each document, uniform: a function of (seed, text). float64

    texts: hashes of the texts, uint64.
    """
    # Hashed, so that seeds side by side draw independently.
    key = int.from_bytes(hashlib.blake2b(str(seed).encode(), digest_size=8).digest(), "big")
    # Sums are meant to wrap at 2**64, and 53 bits are what a float64 below 1 holds exactly.
    with np.errstate(over="ignore"):
        return (splitmix64(texts + np.uint64(key)) >> np.uint64(11)) / 2.0**53


def drawn(
    lengths: np.ndarray,
    texts: np.ndarray,
    goes: np.ndarray,
    left_out: np.ndarray,
    seed: int,
    fraction: float,
    row: int = 0,
) -> np.ndarray:
    """The documents of the validation split, bool [documents].

    lengths: tokens of each document, int64. texts: hashes of their texts, uint64; equal ones come
    into one split. goes: documents.DRAWN or where it is kept. left_out: bool, those of no split.

    Validation may hold twice its fraction of the tokens, so that one huge document doesn't fill it.
    Where that is less than two documents of average length, it may hold these, but not more than
    half of all tokens. Neither split is left empty, and validation is filled up to `row` tokens,
    but not to more than half of all tokens.
    """
    # Documents of a dataset with splits of its own stay where they are. All others may move.
    numbers = document_hashes(seed, texts)
    in_validation = goes == TO_VALIDATION
    may_move = (goes == DRAWN) & ~left_out
    # Copies of a text that a dataset keeps in a split go into that split. Train comes first: it
    # gets the copies of a text that both keep.
    for kept in (TO_TRAIN, TO_VALIDATION):
        copies = may_move & np.isin(texts, texts[(goes == kept) & ~left_out])
        may_move &= ~copies
        if kept == TO_VALIDATION:
            in_validation |= copies
    tokens, count = int(lengths[may_move].sum()), int(may_move.sum())

    def draw(below: float, max_tokens: int, enough: int) -> None:
        """Add the texts whose numbers are below this, the smallest first, with which validation has
        at most `max_tokens`, until it has `enough`."""
        drawn = np.flatnonzero(may_move & ~in_validation & (numbers < below))
        # The last key counts most: by number, and texts whose numbers are equal stay together.
        order = drawn[np.lexsort((texts[drawn], numbers[drawn]))]
        # What a dataset keeps for validation isn't among `tokens`, and isn't counted here.
        held = int(lengths[in_validation & may_move].sum())
        for documents in np.split(order, np.flatnonzero(np.diff(texts[order])) + 1):
            if held >= enough:
                return
            size = int(lengths[documents].sum())
            # A text that is too large is passed over, and a later one may fit.
            if held + size <= max_tokens:
                in_validation[documents] = True
                held += size

    # Less than all, so that train isn't empty.
    max_tokens = min(int(tokens * max(2 * fraction, min(2 / max(1, count), 0.5))), tokens - 1)
    # A text is drawn by its hash, so that more texts draw none of the others anew.
    draw(fraction, max_tokens, enough=tokens)
    # Without a fraction, validation holds only what a dataset keeps for it.
    if fraction and not (goes == TO_VALIDATION).any():
        # Where none is drawn, the one that is nearest to the fraction.
        draw(1, max_tokens, enough=1)
        # A validation split that fills no row can't be evaluated.
        draw(1, tokens // 2, enough=max(row, 1))
    return in_validation


def repeated(hashes: np.ndarray) -> np.ndarray:
    """True for each document that an earlier one equals, bool [documents]. hashes: uint64
    [documents, 2]."""
    order = np.lexsort(hashes.T)  # which leaves equal ones in their order
    equals_earlier = np.zeros(len(hashes), bool)
    equals_earlier[order[1:]] = (hashes[order[1:]] == hashes[order[:-1]]).all(axis=1)
    return equals_earlier


def split_documents(
    pieces: list[Path],
    seed: int,
    fraction: float,
    deduplicate: bool,
    shortest: int = 0,
    row: int = 0,
) -> Documents:
    """Divide the documents of pieces into the splits `train` and `validation`.

    shortest: tokens; documents of fewer are in none. row: tokens that validation should fill. Takes
    about 50 bytes of memory a document, and 70 where they are compared with each other.

    Contaminated documents are drawn like the others, and then left out, so that these come into the
    same split as with them. Only where a split would then be too small, all are drawn without them.
    """
    of_pieces = [np.fromfile(piece.with_suffix(".documents"), DOCUMENT) for piece in pieces]
    # Document i of all is document i - edges[p] of piece p.
    edges = np.cumsum([0, *map(len, of_pieces)])
    documents = np.concatenate(of_pieces)
    again = np.zeros(len(documents), bool)
    if deduplicate:
        again = repeated(documents["hash"])
    # Copies, as a view would keep all of `documents` in memory.
    lengths, goes = documents["tokens"].copy(), documents["goes"].copy()
    # Half of a hash is enough to draw by; only `repeated` compares all of it.
    texts = documents["hash"][:, 0].copy()
    del of_pieces, documents  # most of the memory
    contaminated = goes >= CONTAMINATED
    # Without the mark, `goes` says again where each document would go.
    goes %= CONTAMINATED
    short = lengths < shortest
    left_out = again | short
    in_validation = drawn(lengths, texts, goes, left_out, seed, fraction, row)
    left_out |= contaminated
    held = lengths[in_validation & ~left_out].sum()
    if contaminated.any() and (held < max(row, 1) or not (~in_validation & ~left_out).any()):
        in_validation = drawn(lengths, texts, goes, left_out, seed, fraction, row)
    in_validation &= ~left_out
    in_train = ~in_validation & ~left_out
    # One reason for each document, the first of these three, or `require_all_counted` would
    # count it twice.
    short &= ~contaminated
    again &= ~contaminated & ~short
    in_both = 0  # what is drawn never is
    if (goes == TO_VALIDATION).any():
        in_both = int(np.isin(texts[in_validation], texts[in_train]).sum())
    return Documents(
        pieces,
        edges,
        lengths,
        {"train": in_train, "validation": in_validation},
        {"contaminated": contaminated, "short": short, "repeated": again},
        in_both,
    )


def _copy(documents: Documents, mine: np.ndarray, dtype: np.dtype, path: Path) -> int:
    """Write the tokens of the documents that are `mine`, one behind the other. Returns the largest
    token id.

    At most COPY_TOKENS are in memory, however long a document is.
    """
    largest = -1
    with open(path, "wb") as out:
        for number, (first, after) in enumerate(itertools.pairwise(documents.edges)):
            # In tokens: where each document of the piece begins, and where the last one ends.
            starts = np.concatenate([[0], np.cumsum(documents.lengths[first:after])])
            # Documents that stand side by side are copied together: where each run of them begins,
            # and where it ends.
            runs = np.flatnonzero(np.diff(np.concatenate([[False], mine[first:after], [False]])))
            with open(documents.pieces[number].with_suffix(".tokens"), "rb") as piece:
                for begin, end in starts[runs].reshape(-1, 2).tolist():
                    piece.seek(begin * dtype.itemsize)
                    for at in range(begin, end, COPY_TOKENS):
                        tokens = np.fromfile(piece, dtype, min(COPY_TOKENS, end - at))
                        out.write(tokens.data)
                        largest = max(largest, int(tokens.max()))
    return largest


def best_fit(lengths: np.ndarray, room: int) -> tuple[np.ndarray, np.ndarray, int]:
    """(row of each item, its place in that row, number of rows) for items of `lengths` tokens, each
    at most `room`.

    `rooms` are in order: the first one of `length` tokens or more is that of the fullest row with
    enough room.
    """
    rows_with: defaultdict[int, list[int]] = defaultdict(list)  # by tokens that are left
    rooms: list[int] = []  # that some row has
    count = 0
    row, place = np.empty(len(lengths), np.int64), np.empty(len(lengths), np.int64)
    # Stable, so that items of one length are packed alike on every machine.
    for item in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[item])
        # The fullest row that has room for it, or else a new one.
        fitting = bisect_left(rooms, length)
        if fitting < len(rooms):
            left = rooms[fitting]
            into = rows_with[left].pop()
            if not rows_with[left]:
                del rooms[fitting]
        else:
            left, into, count = room, count, count + 1
        row[item], place[item] = into, room - left
        # The row goes back among those with as much room as is left now.
        left -= length
        if left:
            if not rows_with[left]:
                insort(rooms, left)
            rows_with[left].append(into)
    return row, place, count


def pack(
    tokens: np.ndarray,
    lengths: np.ndarray,
    context: int,
    padding: int,
    write: Callable[[np.ndarray], Any],
) -> dict[str, Any]:
    """Pack documents, `tokens` one behind the other, and `write` rows [rows, context], a few at a
    time. Returns what the manifest says of it.
    """
    packed: Counter[str] = Counter()
    begin = 0
    for some in _windows(lengths, context):
        # The first token of each document, in `tokens`.
        starts = begin + np.cumsum(some) - some
        begin += int(some.sum())
        packed += _pack_window(tokens, starts, some, context, padding, write)
    rows, padded = packed["rows"], packed["padding"]
    return {
        "rows": rows,
        "dropped_tokens": packed["dropped"],  # EOS of documents whose text fills whole rows
        "padding_tokens": padded,
        "documents_cut": packed["cut"],
        "row_use_percent": round(100 * (1 - padded / (rows * context)), 3),
    }


def _windows(lengths: np.ndarray, context: int) -> Iterator[np.ndarray]:
    """The lengths of documents that are packed together: at most WINDOW_DOCUMENTS, of which what is
    left behind their whole rows has at most WINDOW_TOKENS."""
    done = 0
    while done < len(lengths):
        some = lengths[done : done + WINDOW_DOCUMENTS]
        # Whole rows are written as they are, and only what is behind them has to be held.
        filled = np.cumsum(np.where(some > context, some % context, some))
        # At least one, however long it is.
        some = some[: max(1, int(np.searchsorted(filled, WINDOW_TOKENS, side="right")))]
        done += len(some)
        yield some


def _pack_window(
    tokens: np.ndarray,
    starts: np.ndarray,
    lengths: np.ndarray,
    context: int,
    padding: int,
    write: Callable[[np.ndarray], Any],
) -> Counter[str]:
    """Write the rows of some documents, and count rows, tokens and documents.

    The whole rows of long documents come first, then what is left of them among the short ones.
    """
    whole = np.where(lengths > context, lengths // context, 0)
    for document in np.flatnonzero(whole).tolist():
        start, count = int(starts[document]), int(whole[document])
        write(tokens[start : start + count * context].reshape(count, context))
    rest = lengths - whole * context
    # An EOS alone isn't packed: behind other tokens it would pass for padding.
    item_starts, item_lengths = (starts + whole * context)[rest > 1], rest[rest > 1]
    row, place, count = best_fit(item_lengths, context)
    packed = np.full(count * context, padding, dtype=tokens.dtype)
    targets = (row * context + place).tolist()
    # Documents are copied over the padding, which is left behind the last one of each row.
    for start, length, to in zip(item_starts.tolist(), item_lengths.tolist(), targets):
        packed[to : to + length] = tokens[start : start + length]
    write(packed.reshape(count, context))
    return Counter(
        rows=int(whole.sum()) + count,
        cut=int((lengths > context).sum()),
        padding=count * context - int(item_lengths.sum()),
        dropped=int((rest == 1).sum()),
    )


def save_rows(
    documents: Documents, dtype: str, folder: Path, context_length: int, packing: str, eos: int
) -> tuple[dict[str, dict], int]:
    """Write the rows of each split as a DatasetDict into the new `folder`. Returns `splits` of the
    manifest, the largest token id.

    Raises ValueError for a split without a row.
    """
    failpoint("prepare.rows")
    total = sum(int(mine.sum()) for mine in documents.splits.values())
    # best_fit fills up even a row of one token.
    enough = 1 if packing == "best_fit" else context_length
    # Both splits are checked before one is written, which may take an hour.
    for name, mine in documents.splits.items():
        tokens = int(documents.lengths[mine].sum())
        if tokens >= enough:
            continue
        other = "larger" if name == "validation" else "smaller"
        advice = (
            f"choose a smaller --context_length or a {other} --validation_fraction, or give more "
            "text"
        )
        # Shorter rows and other fractions leave one split empty.
        if total == 1:
            advice = (
                "give at least two documents, since training and validation need one each; "
                r"--document_separator '\n' makes one of each line of a text"
            )
        raise ValueError(
            f"the {name} split has {tokens} tokens in {int(mine.sum())} of "
            f"{counted(total, 'document')}, which do not fill one row of context_length "
            f"{context_length}: {advice} (neither documents nor copies of one are ever divided "
            "between splits)"
        )
    # A flat file beside the dataset, which both splits use in turn.
    described, largest, path = {}, -1, folder.with_name("rows")
    for name, mine in documents.splits.items():
        largest = max(largest, _copy(documents, mine, np.dtype(dtype), path))
        lengths = documents.lengths[mine]
        tokens = int(lengths.sum())
        if packing == "best_fit":
            packed = _pack(path, np.dtype(dtype), lengths, context_length, eos)
        else:
            rows = tokens // context_length
            packed = {"rows": rows, "dropped_tokens": tokens - rows * context_length}
        digest = _save_split(path, np.dtype(dtype), packed["rows"], folder / name, context_length)
        described[name] = {"documents": len(lengths), "tokens": tokens, **packed, "sha256": digest}
    path.unlink()
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": list(described)}))
    return described, largest


def _pack(
    path: Path, dtype: np.dtype, lengths: np.ndarray, context_length: int, eos: int
) -> dict[str, Any]:
    """Replace the flat file of a split by that of its packed rows. lengths: tokens of its
    documents."""
    packed = path.with_suffix(".packed")
    with open(path, "rb") as flat, open(packed, "wb") as file:
        # Never empty here: `save_rows` refuses a split without a token.
        tokens = mmap.mmap(flat.fileno(), 0, access=mmap.ACCESS_READ)

        def write(rows: np.ndarray) -> None:
            file.write(np.ascontiguousarray(rows).data)
            # else all that was read would count as memory of this process
            tokens.madvise(mmap.MADV_DONTNEED)

        described = pack(np.frombuffer(tokens, dtype), lengths, context_length, eos, write)
    packed.replace(path)
    return described


def _save_split(path: Path, dtype: np.dtype, rows: int, folder: Path, context_length: int) -> str:
    """Write the rows of a flat file as `datasets.save_to_disk` would; returns the sha256 of their
    tokens.

    `datasets` itself would map the whole file into memory.
    """
    folder.mkdir(parents=True)
    features = datasets.Features(
        {"input_ids": datasets.List(datasets.Value(str(dtype)), length=context_length)}
    )
    schema = features.arrow_schema
    # Rows are divided evenly over files of at most SHARD_BYTES.
    shards = -(-rows * context_length * dtype.itemsize // SHARD_BYTES)
    names = [f"data-{number:05d}-of-{shards:05d}.arrow" for number in range(shards)]
    at_once, digest = max(1, COPY_TOKENS // context_length), hashlib.sha256()
    with (
        open(path, "rb") as file,
        tqdm(desc=f"writing {folder.name}", total=rows, disable=None) as bar,
    ):
        for number, name in enumerate(names):
            mine = rows * (number + 1) // shards - rows * number // shards
            with (
                pa.OSFile(str(folder / name), "wb") as sink,
                pa.ipc.new_stream(sink, schema) as writer,
            ):
                for begin in range(0, mine, at_once):
                    count = min(at_once, mine - begin)
                    tokens = np.fromfile(file, dtype, count * context_length)
                    digest.update(tokens.data)
                    column = pa.FixedSizeListArray.from_arrays(pa.array(tokens), context_length)
                    writer.write_batch(
                        pa.record_batch([column.cast(schema.field(0).type)], schema=schema)
                    )
                    bar.update(count)
    # What `save_to_disk` writes beside the rows, and `load_from_disk` asks for.
    datasets.DatasetInfo(features=features).write_to_directory(str(folder), pretty_print=True)
    state = {
        "_data_files": [{"filename": name} for name in names],
        # `datasets` would draw a random one, and the same inputs should give the same bytes.
        "_fingerprint": digest.hexdigest()[:16],
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": folder.name,
    }
    (folder / "state.json").write_text(json.dumps(state, indent=2))
    return digest.hexdigest()
