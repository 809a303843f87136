"""TODO data.order."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

POSITIONS_AT_ONCE = 2**20


def shuffled(index_count: int, seed: int, epoch: int) -> np.ndarray:
    """The order of an epoch: a permutation of range(index_count), int64 [index_count].

    Sorting by a hash (splitmix64, Steele et al. 2014) instead of a library's generator: no release of any
    library can change the order of a run that is under way.
    """
    with np.errstate(over="ignore"):
        return np.argsort(_splitmix64(np.arange(index_count, dtype=np.uint64) + random_key(seed, epoch)), kind="stable")


def random_key(*parts: int) -> np.uint64:
    """One hash of several integers, such as (seed, step, rank): the seed of whatever depends on just those."""
    key = np.zeros(1, dtype=np.uint64)
    with np.errstate(over="ignore"):
        for part in parts:
            key = _splitmix64(key + np.uint64(part % 2**64))
    return key[0]


def _splitmix64(x: np.ndarray) -> np.ndarray:
    """uint64 -> uint64, elementwise, wrapping around."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@dataclass(frozen=True)
class RowsRead:
    """Which rows were read: how many, and the sum of a hash of each with its position, which knows no order.

    Ranks add theirs up. What a run claims to have read can be compared with it: see `claimed_rows`.
    """

    count: int = 0
    hash_sum: int = 0  # modulo 2**64

    def __add__(self, other: RowsRead) -> RowsRead:
        return RowsRead(self.count + other.count, (self.hash_sum + other.hash_sum) % 2**64)

    @staticmethod
    def of(positions: np.ndarray, rows: np.ndarray) -> RowsRead:
        """positions, rows: int64, of the same shape."""
        with np.errstate(over="ignore"):
            hashes = _splitmix64(_splitmix64(positions.astype(np.uint64)) + rows.astype(np.uint64))
            return RowsRead(positions.size, int(hashes.sum(dtype=np.uint64)))


def claimed_rows(row_count: int, seed: int, first: int, end: int) -> RowsRead:
    """What all ranks together have read of a dataset of `row_count` rows at the positions from `first` to `end` - 1."""
    read = RowsRead()
    while first < end:
        epoch, offset = divmod(first, row_count)
        count = min(end - first, row_count - offset, POSITIONS_AT_ONCE)
        rows = _order(row_count, seed, epoch)[offset : offset + count]
        read += RowsRead.of(np.arange(first, first + count), rows)
        first += count
    return read


@lru_cache(maxsize=2)  # a step can touch two epochs
def _order(index_count: int, seed: int, epoch: int) -> np.ndarray:
    return shuffled(index_count, seed, epoch)
