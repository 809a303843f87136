"""(mixture, seed, position) -> rows: a function without hidden state.

The n-th row that is read of a source, over all stages of a run, is at place n of that source's own
order, one epoch after the other. So nothing of a source is read twice before all of it was read
once, whatever its weights were meanwhile.
"""

import hashlib
from functools import lru_cache

import numpy as np

from fabric_llm.data import periods
from fabric_llm.data.mixture import Mixture
from fabric_llm.data.order import random_key, rows_at


def places_at(mixture: Mixture, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(source, how many rows of it were read before) at each position, int64, same shape."""
    # Stages are few, so each of them computes all of its positions at once.
    sources, numbers = np.empty_like(positions), np.empty_like(positions)
    # The stage of a position is the last one that begins at or before it.
    stage_of = (
        np.searchsorted([stage.begins for stage in mixture.stages], positions, side="right") - 1
    )
    for index in np.unique(stage_of):
        there, stage = stage_of == index, mixture.stages[index]
        source_of, occurrence, weights = _tables(stage.weights)
        # How many rows of each source the stages before this one have read.
        before = np.array(periods.read_before(mixture.stages, stage.begins))
        # Whole periods since the stage began, and the slot in the period that is running.
        repeats, slots = np.divmod(positions[there] - stage.begins, len(source_of))
        sources[there] = source = source_of[slots]
        # Rows of the source in earlier stages, in whole periods, and in the running period.
        numbers[there] = before[source] + repeats * weights[source] + occurrence[slots]
    return sources, numbers


def mixed_rows_at(mixture: Mixture, positions: np.ndarray) -> np.ndarray:
    """The rows that are read at `positions`, int64, same shape."""
    (sources, numbers), rows = places_at(mixture, positions), np.empty_like(positions)
    bases = np.cumsum([0, *mixture.rows[:-1]])  # the number of each source's first row
    for source in np.unique(sources):
        there = sources == source
        # By its name, so that a source's order stays when other sources come or go.
        seed = seed_of(mixture.seed, mixture.names[source]) if mixture.is_named else mixture.seed
        rows[there] = bases[source] + rows_at(numbers[there], mixture.rows[source], seed)
    return rows


@lru_cache(maxsize=256)
def seed_of(seed: int, name: str) -> int:
    """Of a source's own order: another for each name."""
    # sha256, because Python's hash() of a text differs from process to process.
    return int(random_key(seed, int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")))


@lru_cache(maxsize=periods.KEPT)
def _tables(weights: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(source of each slot, how many slots of that source come before it, weights), int64."""
    # Cached, because each batch asks for it and a period may have thousands of slots.
    sources = np.array(periods.period_of(weights))
    occurrence = np.empty_like(sources)
    for slots in periods.places(weights):
        # The n-th slot of a source has n slots of it before, counted from 0.
        occurrence[list(slots)] = np.arange(len(slots))
    return sources, occurrence, np.array(weights)
