"""What a run reads of which sources, from numbers alone. periods.py says which source stands at
which position, and mixed_rows.py which row.

Nothing here imports numpy or torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fabric_llm.data import periods
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
