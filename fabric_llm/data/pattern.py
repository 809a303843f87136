"""Which source of a mixture stands at which position, from numbers alone. Nothing here imports numpy or torch.

A mixture is a list of segments. In a segment the sources stand in a pattern that repeats, so that the source of a position,
and how many rows of it came before, are computed without going through the positions before it.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, Optional

MOST_SLOTS = 10_000  # of a pattern: finer shares are rounded


class Segment(NamedTuple):
    """Positions from `begins` to the next segment, in which the sources stand with these weights."""

    begins: int  # position
    weights: tuple[int, ...]  # of each source: slots of the pattern


@lru_cache(maxsize=64)
def pattern(weights: tuple[int, ...]) -> tuple[int, ...]:
    """The source of each slot of a period: after any number of slots each source has its share, less than one row off.

    The j-th row of a source of weight w comes between j/w and (j+1)/w of the period, widened to whole slots, and the row
    that is due first comes first: earliest deadlines on these windows, Baruah, Cohen, Plaxton and Varvel (1996),
    Proportionate Progress, Algorithmica 15. It solves Tijdeman's chairman assignment problem (1980).
    """
    period, taken = sum(weights), [0] * len(weights)
    waiting = [(0, source) for source, weight in enumerate(weights) if weight]  # (slot from which it may come, source)
    ready: list[tuple[int, int]] = []  # (slot before which it must come, source)
    slots = []
    for slot in range(period):
        while waiting and waiting[0][0] <= slot:
            source = heapq.heappop(waiting)[1]
            heapq.heappush(ready, (-(-(taken[source] + 1) * period // weights[source]), source))
        source = heapq.heappop(ready)[1]
        slots.append(source)
        taken[source] += 1
        if taken[source] < weights[source]:
            heapq.heappush(waiting, (taken[source] * period // weights[source], source))
    return tuple(slots)


@lru_cache(maxsize=64)
def places(weights: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """The slots of each source in the pattern, in order."""
    found: list[list[int]] = [[] for _ in weights]
    for slot, source in enumerate(pattern(weights)):
        found[source].append(slot)
    return tuple(map(tuple, found))


def read_before(segments: Sequence[Segment], position: int) -> tuple[int, ...]:
    """How many rows of each source stand before `position`."""
    counts = [0] * len(segments[0].weights)
    ends = [segment.begins for segment in segments[1:]] + [position]
    for segment, end in zip(segments, ends):
        length = min(end, position) - segment.begins
        if length > 0:
            periods, rest = divmod(length, sum(segment.weights))
            for source, (weight, slots) in enumerate(zip(segment.weights, places(segment.weights))):
                counts[source] += periods * weight + bisect_left(slots, rest)
    return tuple(counts)


def position_of(segments: Sequence[Segment], source: int, number: int) -> Optional[int]:
    """The position at which the row `number` of a source is read, counted from 0; None if that never comes."""
    for index, segment in enumerate(segments):
        weight = segment.weights[source]
        left = number - read_before(segments, segment.begins)[source]
        if weight and left >= 0:
            position = (
                segment.begins + left // weight * sum(segment.weights) + places(segment.weights)[source][left % weight]
            )
            if index + 1 == len(segments) or position < segments[index + 1].begins:
                return position
    return None


def segment_at(segments: Sequence[Segment], position: int) -> Segment:
    """The segment that holds `position`."""
    return segments[max(i for i, segment in enumerate(segments) if segment.begins <= position or i == 0)]
