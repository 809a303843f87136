"""Documents -> rows of one length.

`concat`: one document behind the other, cut into rows, so that many documents begin in one row and end in the next.
`best_fit`: only documents longer than a row are cut, and the rest of a row is filled with EOS. Ding et al. 2024, "Fewer
Truncations Improve Language Modeling", arXiv 2404.10830: from the longest on, each goes into the fullest row that has room.

Exactly one EOS ends each document, so that EOS after EOS is padding. Where the text of a document fills whole rows, its EOS
would be alone in another: no token before it predicts it, and behind another document it would pass for padding. It is dropped.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

WINDOW_DOCUMENTS = 2**20  # packed together
WINDOW_TOKENS = 2**26  # likewise: their rows are in memory


@dataclass
class Packed:
    """What packing has done."""

    rows: int = 0
    padding_tokens: int = 0
    documents_cut: int = 0
    dropped_tokens: int = 0  # EOS of documents whose text fills whole rows


def best_fit(lengths: np.ndarray, room: int) -> tuple[np.ndarray, np.ndarray, int]:
    """(row of each item, its place in that row, number of rows) for items of `lengths` tokens, each at most `room`.

    The rooms that rows have left are the bits of one integer: the lowest bit from `length` on is the fullest row with room.
    """
    rows_with: defaultdict[int, list[int]] = defaultdict(list)  # by tokens that are left
    bits, count = 0, 0
    row, place = np.empty(len(lengths), np.int64), np.empty(len(lengths), np.int64)
    for item in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[item])
        fitting = bits >> length
        if fitting:
            left = length + (fitting & -fitting).bit_length() - 1
            rows = rows_with[left]
            into = rows.pop()
            if not rows:
                bits ^= 1 << left
        else:
            left, into, count = room, count, count + 1
        row[item], place[item] = into, room - left
        left -= length
        if left:
            rows_with[left].append(into)
            bits |= 1 << left
    return row, place, count


def windows(lengths: np.ndarray, context: int) -> Iterator[slice]:
    """Ranges of documents that are packed together: so many that what is left of the long ones fills WINDOW_TOKENS."""
    begin = 0
    while begin < len(lengths):
        some = lengths[begin : begin + WINDOW_DOCUMENTS]
        full = np.searchsorted(np.cumsum(np.where(some > context, some % context, some)), WINDOW_TOKENS, side="right")
        end = begin + max(1, min(len(some), int(full)))
        yield slice(begin, end)
        begin = end


def pack(
    tokens: np.ndarray, lengths: np.ndarray, context: int, padding: int, write: Callable[[np.ndarray], None]
) -> Packed:
    """Pack documents, `tokens` one behind the other, and `write` rows [rows, context], a few at a time.

    In each window the whole rows of long documents come first, then what is left of them among the short ones.
    """
    done, begin = Packed(), 0
    for window in windows(lengths, context):
        some = lengths[window]
        starts = begin + np.cumsum(some) - some
        begin += int(some.sum())
        whole = np.where(some > context, some // context, 0)
        done.documents_cut += int((some > context).sum())
        for start, rows in zip(starts[whole > 0].tolist(), whole[whole > 0].tolist()):
            _write_whole(tokens[start : start + rows * context], context, write)
        rest = some - whole * context
        item_starts, item_lengths = (starts + whole * context)[rest > 1], rest[rest > 1]
        row, place, count = best_fit(item_lengths, context)
        packed = np.full(count * context, padding, dtype=tokens.dtype)
        _scatter(tokens, item_starts, item_lengths, row * context + place, packed)
        write(packed.reshape(count, context))
        done.rows += int(whole.sum()) + count
        done.padding_tokens += count * context - int(item_lengths.sum())
        done.dropped_tokens += int((rest == 1).sum())
    return done


def _write_whole(tokens: np.ndarray, context: int, write: Callable[[np.ndarray], None]) -> None:
    step = max(1, WINDOW_TOKENS // context) * context
    for at in range(0, len(tokens), step):
        write(tokens[at : at + step].reshape(-1, context))


def _scatter(tokens: np.ndarray, starts: np.ndarray, lengths: np.ndarray, to: np.ndarray, out: np.ndarray) -> None:
    """Copy items, from `starts` on in `tokens`, to their places in `out`."""
    for start, length, place in zip(starts.tolist(), lengths.tolist(), to.tolist()):
        out[place : place + length] = tokens[start : start + length]
