"""The order in which rows are read: a function of (seed, epoch), so that a run can resume anywhere, on any devices."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

POSITIONS_AT_ONCE = 2**20


@lru_cache(maxsize=2)  # a step can touch two epochs
def shuffled(index_count: int, seed: int, epoch: int) -> np.ndarray:
    """The order of an epoch: a permutation of range(index_count), int64 [index_count].

    It sorts by a hash (splitmix64, Steele et al. 2014) and uses no library's generator, so that no release of a library
    can change the order of a run that resumes.
    """
    with np.errstate(over="ignore"):
        return np.argsort(_splitmix64(np.arange(index_count, dtype=np.uint64) + random_key(seed, epoch)), kind="stable")


def random_key(*parts: int) -> np.uint64:
    """A hash of several integers, such as (seed, step, rank), to seed what depends on these alone."""
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
    """A record of the rows that were read: their number, and the sum of a hash of each row with its position.

    The sum doesn't depend on the order, so that the records of all ranks add up to one, which is compared with
    `claimed_rows`.
    """

    count: int = 0
    hash_sum: int = 0  # modulo 2**64

    def __add__(self, other: RowsRead) -> RowsRead:
        return RowsRead(self.count + other.count, (self.hash_sum + other.hash_sum) % 2**64)

    @staticmethod
    def of(positions: np.ndarray, rows: np.ndarray) -> RowsRead:
        """The record of `rows`, which were read at `positions`: int64, of the same shape."""
        with np.errstate(over="ignore"):
            hashes = _splitmix64(_splitmix64(positions.astype(np.uint64)) + rows.astype(np.uint64))
            return RowsRead(positions.size, int(hashes.sum(dtype=np.uint64)))


def claimed_rows(row_count: int, seed: int, first: int, end: int) -> RowsRead:
    """The record of all ranks together for the positions `first` to `end` - 1 of a dataset of `row_count` rows."""
    read = RowsRead()
    while first < end:
        epoch, offset = divmod(first, row_count)
        count = min(end - first, row_count - offset, POSITIONS_AT_ONCE)
        rows = shuffled(row_count, seed, epoch)[offset : offset + count]
        read += RowsRead.of(np.arange(first, first + count), rows)
        first += count
    return read
