"""Which source of a mixture stands at which position, from numbers alone.

In a stage of a mixture its sources stand in a period that repeats. So the source of a position, and
how many rows of it came before, are computed without going through the positions before it.
Nothing here imports numpy or torch.
"""

import heapq
from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Optional

# Weights whose periods are kept. Each step asks for those of all stages, and a steered run has a
# stage for each evaluation.
KEPT = 1024
ENDLESS = 2**62  # rows of a stream, see own.py
ONE_SET = "validation"  # the name of the only source, and of its validation set
# The probes of what a model does with its context, see probes.py.
COPY, RETRIEVAL = PROBES = ("copy", "retrieval")
LONGEST_PASSAGE = 256  # tokens of a passage of the probe of copying


class Stage(NamedTuple):
    """Weights that hold from `begins` to the next stage."""

    # Of what --data_mix says, a share of the run, Fraction; of a run's plan, a position, int.
    begins: Any
    weights: tuple[int, ...]  # of each source: slots of a period


@lru_cache(maxsize=KEPT)
def period_of(weights: tuple[int, ...]) -> tuple[int, ...]:
    """The source of each slot of a period: after any number of slots each source has its share,
    less than one row off.

    The j-th row of a source of weight w comes between j/w and (j+1)/w of the period, widened to
    whole slots, and the row that is due first comes first: earliest deadlines on these windows,
    Baruah, Cohen, Plaxton and Varvel (1996), Proportionate Progress, Algorithmica 15. It solves
    Tijdeman's chairman assignment problem (1980).
    """
    length, taken = sum(weights), [0] * len(weights)
    # (slot from which it may come, source)
    waiting = [(0, source) for source, weight in enumerate(weights) if weight]
    ready: list[tuple[int, int]] = []  # (slot before which it must come, source)
    slots = []
    for slot in range(length):
        # The next row of these sources may come from this slot on.
        while waiting and waiting[0][0] <= slot:
            source = heapq.heappop(waiting)[1]
            # It must come before the end of its window, rounded up to a whole slot.
            heapq.heappush(ready, (-(-(taken[source] + 1) * length // weights[source]), source))
        source = heapq.heappop(ready)[1]
        slots.append(source)
        taken[source] += 1
        # The window of its next row begins at this slot, rounded down.
        if taken[source] < weights[source]:
            heapq.heappush(waiting, (taken[source] * length // weights[source], source))
    return tuple(slots)


@lru_cache(maxsize=KEPT)
def places(weights: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """The slots of each source in the period, in order."""
    slots: list[list[int]] = [[] for _ in weights]
    for slot, source in enumerate(period_of(weights)):
        slots[source].append(slot)
    return tuple(map(tuple, slots))


def read_before(stages: Sequence[Stage], position: int) -> tuple[int, ...]:
    """How many rows of each source stand before `position`."""
    counts = [0] * len(stages[0].weights)
    ends = [stage.begins for stage in stages[1:]] + [position]
    for stage, end in zip(stages, ends):
        length = min(end, position) - stage.begins
        if length > 0:
            # Whole periods, and of the last one the slots that come before the end.
            periods, rest = divmod(length, sum(stage.weights))
            for source, (weight, slots) in enumerate(zip(stage.weights, places(stage.weights))):
                counts[source] += periods * weight + bisect_left(slots, rest)
    return tuple(counts)


def position_of(stages: Sequence[Stage], source: int, number: int) -> Optional[int]:
    """The position at which the row `number` of a source is read, counted from 0; None if that
    never comes."""
    for index, stage in enumerate(stages):
        weight = stage.weights[source]
        left = number - read_before(stages, stage.begins)[source]
        if weight and left >= 0:
            # Where the row would come if this stage went on. A later stage may begin before.
            slot = places(stage.weights)[source][left % weight]
            position = stage.begins + left // weight * sum(stage.weights) + slot
            if index + 1 == len(stages) or position < stages[index + 1].begins:
                return position
    return None


def stage_at(stages: Sequence[Stage], position: int) -> Stage:
    """The stage that holds `position`."""
    return next((stage for stage in reversed(stages) if stage.begins <= position), stages[0])
