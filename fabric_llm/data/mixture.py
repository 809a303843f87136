"""(mixture, seed, position) -> rows: a function without hidden state. periods.py says which
source stands at which position.

The n-th row that is read of a source, over all stages of a run, is at place n of that source's own
order, one epoch after the other. So nothing of a source is read twice before all of it was read
once, whatever its weights were meanwhile.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from fabric_llm.data import periods
from fabric_llm.data.order import random_key, rows_at
from fabric_llm.data.periods import ONE_SET, Stage


@dataclass(frozen=True)
class Mixture:
    """The rows of a run over several sources, which are numbered one source behind the other."""

    names: tuple[str, ...]
    rows: tuple[int, ...]  # of each source's training split
    contexts: tuple[int, ...]  # tokens of a row of each
    stages: tuple[Stage, ...]
    seed: int
    # False for the one dataset of a run without --data_mix. Logs and checkpoints name no source.
    is_named: bool = True

    @property
    def bases(self) -> np.ndarray:
        """The number of each source's first row, int64."""
        return np.cumsum([0, *self.rows[:-1]])

    def places_at(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(source, how many rows of it were read before) at each position, int64, same shape."""
        # Stages are few, so each of them computes all of its positions at once.
        sources, numbers = np.empty_like(positions), np.empty_like(positions)
        # The stage of a position is the last one that begins at or before it.
        stage_of = (
            np.searchsorted([stage.begins for stage in self.stages], positions, side="right") - 1
        )
        for index in np.unique(stage_of):
            there, stage = stage_of == index, self.stages[index]
            source_of, occurrence, weights = _tables(stage.weights)
            # How many rows of each source the stages before this one have read.
            before = np.array(periods.read_before(self.stages, stage.begins))
            # Whole periods since the stage began, and the slot in the period that is running.
            repeats, slots = np.divmod(positions[there] - stage.begins, len(source_of))
            sources[there] = source = source_of[slots]
            # Rows of the source in earlier stages, in whole periods, and in the running period.
            numbers[there] = before[source] + repeats * weights[source] + occurrence[slots]
        return sources, numbers

    def rows_at(self, positions: np.ndarray) -> np.ndarray:
        """The rows that are read at `positions`, int64, same shape."""
        (sources, numbers), rows = self.places_at(positions), np.empty_like(positions)
        for source in np.unique(sources):
            there = sources == source
            # By its name, so that a source's order stays when other sources come or go.
            seed = seed_of(self.seed, self.names[source]) if self.is_named else self.seed
            rows[there] = self.bases[source] + rows_at(numbers[there], self.rows[source], seed)
        return rows

    def context_at(self, position: int) -> int:
        """Tokens of the row at `position`, and of all rows of its stage."""
        weights = periods.stage_at(self.stages, position).weights
        # All sources that a stage reads have rows of one length.
        return next(context for context, weight in zip(self.contexts, weights) if weight)

    def shares_at(self, position: int) -> dict[str, float]:
        """The share of each source that is read at `position`."""
        weights = periods.stage_at(self.stages, position).weights
        return {name: weight / sum(weights) for name, weight in zip(self.names, weights) if weight}

    def fitting(self, position: int) -> dict[str, float]:
        """The same of all sources whose rows are as long as those at `position`."""
        shares, length = self.shares_at(position), self.context_at(position)
        contexts = zip(self.names, self.contexts)
        return {name: shares.get(name, 0.0) for name, context in contexts if context == length}

    def read_before(self, position: int) -> dict[str, dict[str, Any]]:
        """{name: {"tokens", "epochs"}} of each source that was read before `position`, including
        what a rewind has undone. {} if the mixture isn't `is_named`."""
        if not self.is_named:
            return {}
        counts = periods.read_before(self.stages, position)
        return {
            name: {"tokens": count * context, "epochs": count / rows}
            for name, count, context, rows in zip(self.names, counts, self.contexts, self.rows)
        }

    def as_json(self) -> list[dict[str, Any]]:
        """The stages, for progress.json."""
        return [
            {"begins": stage.begins, "weights": dict(zip(self.names, stage.weights))}
            for stage in self.stages
        ]


def mixture_of(document: Mapping[str, Any]) -> Mixture:
    """The mixture of a run, of which `document` is the progress.json. Raises ValueError for one
    that can't be read."""
    try:
        fixed = document["fixed"]
        rows, contexts, seed = (fixed[key] for key in ("train_rows", "context_length", "seed"))
        if "mixture" not in document:
            # A run of one dataset.
            whole = (Stage(0, (1,)),)
            return Mixture((ONE_SET,), (rows,), (contexts,), whole, seed, is_named=False)
        names = tuple(document["mixture"]["sources"])
        stages = []
        for segment in document["mixture"]["segments"]:
            # A source that a stage doesn't name isn't read in it.
            weights = tuple(segment["weights"].get(name, 0) for name in names)
            stages.append(Stage(segment["begins"], weights))
        return Mixture(
            names,
            tuple(rows[name] for name in names),
            tuple(contexts[name] for name in names),
            tuple(stages),
            seed,
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError("its mixture can't be read") from error


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
