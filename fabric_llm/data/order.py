"""The order in which rows are read: a function of (seed, epoch), so that a run can resume anywhere,
on any devices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

ROW_ORDER = "feistel"  # the name of this order in progress.json
STREAM_ORDER = "stream"  # that of a stream, whose rows come as they are
POSITIONS_AT_ONCE = 2**18
# Of the text from which probes draw their tokens, at most.
ROWS_DRAWN_FROM, TOKENS_DRAWN_FROM = 256, 2**22
ROUNDS, MIN_BITS = 8, 6  # with fewer, small permutations aren't uniform


def permuted(offsets: np.ndarray, row_count: int, seed: int, epoch: int) -> np.ndarray:
    """The rows at the places `offsets` of an epoch, int64, same shape: a keyed permutation of
    range(row_count).

    Each place is computed by itself, and there is no table of all rows, which would take 8 GB a
    rank for a billion. It is a Feistel network over the next power of two, walked until it comes to
    a row: Black and Rogaway (2002), Ciphers with Arbitrary Finite Domains,
    https://web.cs.ucdavis.edu/~rogaway/papers/subset.pdf. Each round mixes with splitmix64 (Steele
    et al. 2014), and not with a library's generator, so that no release of a library can change the
    order of a run.
    """
    bits = max((row_count - 1).bit_length(), MIN_BITS)
    half = np.uint64(bits // 2)
    # The halves have different widths if `bits` is odd.
    masks = [np.uint64(2**width - 1) for width in (bits - bits // 2, bits // 2)]
    rows, outside = offsets.astype(np.uint64), np.ones(offsets.shape, dtype=bool)
    with np.errstate(over="ignore"):
        keys = splitmix64(random_key(seed, epoch) + np.arange(ROUNDS, dtype=np.uint64))
        # A result that is no row is permuted again until it is one. No two places meet in one row.
        while outside.any():
            left, right = rows[outside] >> half, rows[outside] & masks[1]
            for number, key in enumerate(keys):
                left, right = right, (left ^ splitmix64(right + key)) & masks[number % 2]
            rows[outside] = (left << half) | right
            outside = rows >= row_count
    return rows.astype(np.int64)


def rows_at(positions: np.ndarray, row_count: int, seed: int) -> np.ndarray:
    """The rows that are read at `positions`, sequences since the run began, one epoch after the
    other. int64, same shape."""
    epochs, offsets = np.divmod(positions, row_count)
    rows = np.empty_like(offsets)
    # A batch may reach into the next epoch, which has another permutation.
    for epoch in np.unique(epochs):
        there = epochs == epoch
        rows[there] = permuted(offsets[there], row_count, seed, int(epoch))
    return rows


def spread(count: int, row_count: int) -> np.ndarray:
    """`count` of `row_count` rows, evenly spread: one of each of `count` equal stretches. int64,
    ascending.

    So the files of a split, which lie one behind the other, have their shares. Where in its stretch
    a row lies says a hash: a fixed stride would meet one kind alone of rows that alternate. Nothing
    but the two numbers says which rows they are.
    """
    edges = np.arange(count + 1) * row_count // max(count, 1)
    # No stretch is empty, because `count` is at most `row_count`.
    within = splitmix64(np.arange(count, dtype=np.uint64)) % np.diff(edges).astype(np.uint64)
    return edges[:-1] + within.astype(np.int64)


def sample(rows: Any, count: int) -> np.ndarray:
    """The numbers of at most `count` rows that are evaluated of a split, or of a probe. int64,
    ascending.

    They are those that its own method `sample` says, or are evenly spread.
    """
    count = min(count, len(rows))
    return rows.sample(count) if hasattr(rows, "sample") else spread(count, len(rows))


def drawn_from(split: Any) -> np.ndarray:
    """The rows of a split from which probes take their tokens."""
    # A row may hold a million tokens: then fewer are read.
    most = max(1, TOKENS_DRAWN_FROM // len(split[0]["input_ids"]))
    return spread(min(ROWS_DRAWN_FROM, most, len(split)), len(split))


def random_key(*parts: int) -> np.uint64:
    """A hash of several integers, such as (seed, step, rank), to seed what depends on these
    alone."""
    # Arithmetic of uint64 wraps around, which is meant.
    key = np.zeros(1, dtype=np.uint64)
    with np.errstate(over="ignore"):
        for part in parts:
            # Modulo 2**64, because numpy takes no negative number for an unsigned one.
            key = splitmix64(key + np.uint64(part % 2**64))
    return key[0]


def splitmix64(x: np.ndarray) -> np.ndarray:
    """uint64 -> uint64, elementwise, wrapping around."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@dataclass(frozen=True)
class RowsRead:
    """A record of the rows that were read: their number, and the sum of a hash of each row with its
    position.

    The sum doesn't depend on the order, so that the records of all ranks add up to one, which is
    compared with `claimed_by`.
    """

    count: int = 0
    hash_sum: int = 0  # modulo 2**64

    def __add__(self, other: RowsRead) -> RowsRead:
        return RowsRead(self.count + other.count, (self.hash_sum + other.hash_sum) % 2**64)

    @staticmethod
    def of(positions: np.ndarray, rows: np.ndarray) -> RowsRead:
        """The record of `rows`, which were read at `positions`: int64, of the same shape."""
        with np.errstate(over="ignore"):
            # The hash depends on the position as well, so rows that changed places are noticed.
            hashes = splitmix64(splitmix64(positions.astype(np.uint64)) + rows.astype(np.uint64))
            return RowsRead(positions.size, int(hashes.sum(dtype=np.uint64)))


def claimed_by(rows_of: Callable[[np.ndarray], np.ndarray], first: int, end: int) -> RowsRead:
    """The record of all ranks together for the positions `first` to `end` - 1.

    rows_of: the order, a function of positions.
    """
    read = RowsRead()
    # In blocks, because all positions of a run at once might not fit into memory.
    for start in range(first, end, POSITIONS_AT_ONCE):
        positions = np.arange(start, min(start + POSITIONS_AT_ONCE, end))
        read += RowsRead.of(positions, rows_of(positions))
    return read
