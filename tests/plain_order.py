"""The order in which rows are read, computed from docs/data.md, without code of the package."""

import hashlib
import itertools
import math
from collections.abc import Iterator
from fractions import Fraction

WORD = 2**64


def mixed(x: int) -> int:
    """splitmix64"""
    x = (x + 0x9E3779B97F4A7C15) % WORD
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % WORD
    return x ^ (x >> 31)


def key(*parts: int) -> int:
    found = 0
    for part in parts:
        found = mixed((found + part) % WORD)
    return found


def row_at(place: int, rows: int, seed: int) -> int:
    """The row at a place of a dataset's order: a Feistel network, walked until there is a row."""
    epoch, row = divmod(place, rows)
    bits = max((rows - 1).bit_length(), 6)
    low, high = bits // 2, bits - bits // 2
    while True:
        left, right = row >> low, row & (2**low - 1)
        for number in range(8):
            of_round = mixed((key(seed, epoch) + number) % WORD)
            width = low if number % 2 else high
            left, right = right, (left ^ mixed((right + of_round) % WORD)) & (2**width - 1)
        row = left << low | right
        if row < rows:
            return row


def pattern(weights: list[int]) -> list[int]:
    """The source of each slot of a period: of windows that have begun, that which ends first."""
    length, taken, slots = sum(weights), [0] * len(weights), []
    for slot in range(length):
        begun = [i for i, w in enumerate(weights) if w and taken[i] * length // w <= slot]
        due = min(begun, key=lambda i: (-(-(taken[i] + 1) * length // weights[i]), i))
        slots.append(due)
        taken[due] += 1
    return slots


def whole(shares: dict[str, str], names: list[str]) -> list[int]:
    """The smallest integers in the proportion of decimals."""
    parts = [Fraction(str(shares.get(name, 0))) for name in names]
    parts = [part / sum(parts) for part in parts]
    return [int(part * math.lcm(*(one.denominator for one in parts))) for part in parts]


def order(
    seed: int, rows: dict[str, int], stages: list[tuple[int, list[int]]]
) -> Iterator[tuple[str, int, list[int]]]:
    """(source, row, weights of the stage) at each position."""
    names, count, seeds = list(rows), dict.fromkeys(rows, 0), {}
    for name in names:
        number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
        seeds[name] = key(seed, number) if len(names) > 1 else seed
    for position in itertools.count():
        begins, weights = [stage for stage in stages if stage[0] <= position][-1]
        slots = pattern(weights)
        name = names[slots[(position - begins) % len(slots)]]
        yield name, row_at(count[name], rows[name], seeds[name]), weights
        count[name] += 1
