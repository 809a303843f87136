"""The line from a base model to a run that began with it: which of its points learned most inside budgets, and where its knee is.

A point is (1 - share) x base + share x run (WiSE-FT, arXiv 2109.01903). It is evaluated as the run was, on the weights that its
export has, and only one model is in memory. Losses are smooth along the line: polynomials through points that were evaluated say
which to evaluate next, and never what is chosen, which was evaluated itself.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any, Optional

import numpy as np
from numpy.polynomial import Polynomial

from fabric_llm.base import files
from fabric_llm.base.faults import NON_FINITE, Fault, one_line
from fabric_llm.data.sources import ONE_SET, PROBES
from fabric_llm.model import loading
from fabric_llm.plan.checks import require_set
from fabric_llm.training.guard import Guard
from fabric_llm.verify import average
from fabric_llm.verify.average import NOTE, Part

FIRST, LEAST_POINTS, MOST_POINTS = (0.0, 0.5, 1.0), 6, 8  # that are evaluated
SHARES = [thousandth / 1000 for thousandth in range(1001)]
NEAREST = 4  # points that a polynomial goes through
ROOM = 0.99  # part of a budget that the next point is to use, so that it isn't above it by a hair
CAUTION = 0.9  # ROOM is so much less for each point in a row that was above a budget all the same
ENOUGH = 0.005  # part of what the best point is worth: the search ends where no other promises more on top

Losses = Mapping[str, Any]  # {set: its loss, nats, or that of several points, float64 [points]}


@dataclass(frozen=True)
class Goal:
    """What a point of the line is worth."""

    guard: Guard  # which knows the base model's losses and the budgets
    new: Sequence[str]  # sets to learn
    old: Sequence[str]  # sets not to forget; () with budgets, which say that
    price: float  # nats of `new` for one of `old`

    def worth(self, losses: Losses, room: float = 1.0) -> Any:
        """Mean of the nats learned, less the price of those forgotten; -inf where more than `room` of a budget is used."""
        rises = self.guard.rises(losses)
        kept = np.all([rises[name] <= room * most for name, most in self.guard.budgets.items()], axis=0)
        return np.where(kept, -mean(rises, self.new) - self.price * mean(rises, self.old), -np.inf)


def mean(numbers: Losses, names: Sequence[str]) -> Any:
    """0 without names."""
    return sum(numbers[name] for name in names) / max(len(names), 1)


def goal_of(guard: Guard, of_run: Losses, of_training: Sequence[str]) -> Goal:
    """With budgets, to learn most of the training data's sets that have none. Without, the knee. guard: knows the base's losses.

    The knee is where what was learned, as a part of what the run learned, exceeds the part that was forgotten the most: the point of
    this curve that is farthest from its chord (Satopaa et al. 2011, "Finding a Kneedle in a Haystack").
    """
    rises = guard.rises(of_run)
    if not (free := [name for name in of_training if name not in guard.budgets]):
        words = ", ".join(map(repr, of_training))
        raise ValueError(
            f"--forgetting_budget: all sets of the training data have one ({words}): which is to be learned?"
        )
    new = [name for name in free if rises[name] < 0] or free  # what was only replayed may have risen
    old = [name for name, rise in rises.items() if rise > 0 and not guard.budgets]
    price = -mean(rises, new) / mean(rises, old) if old else 0.0
    return Goal(guard, new, old, max(price, 0.0))


def search(
    evaluate: Callable[[float], Losses], guard: Guard, of_training: Sequence[str]
) -> tuple[float, dict[float, Losses]]:
    """(the share that is worth most, {share: losses} of the points evaluated). `evaluate` tells `guard` the losses."""
    points = {share: evaluate(share) for share in FIRST}
    goal = goal_of(guard, points[1.0], of_training)
    while True:
        best = max(points, key=lambda share: (goal.worth(points[share]), share))
        if len(points) == MOST_POINTS or (following := next_share(points, best, goal)) is None:
            break
        points[following] = evaluate(following)
    return best, dict(sorted(points.items()))


def next_share(points: Mapping[float, Losses], best: float, goal: Goal) -> Optional[float]:
    """Between the neighbours of the best point, one that promises more; else the middle of a gap; None for the end."""
    left = max((share for share in points if share < best), default=best)
    right = min((share for share in points if share > best), default=best)
    between = [share for share in SHARES if left < share < right and share != best]
    if between:
        near, places = sorted(points, key=lambda share: abs(share - best))[:NEAREST], np.array(between)
        curves = {}
        for name in points[best]:
            curves[name] = Polynomial.fit(near, [points[share][name] for share in near], len(near) - 1)(places)
        later = list(points)[: len(FIRST) - 1 : -1]  # the last first
        over = list(takewhile(lambda share: np.isinf(goal.worth(points[share])), later))
        worth, promised = goal.worth(points[best]), goal.worth(curves, ROOM * CAUTION ** len(over))
        if promised.max() - worth > ENOUGH * worth:
            return between[int(promised.argmax())]
        if best > 0 and len(points) >= LEAST_POINTS:
            return None
    gaps = pairwise([best, right] if best == 0 and goal.guard.budgets else sorted(points))
    middle = round(sum(max(gaps, key=lambda gap: gap[1] - gap[0])) / 2, 3)
    return None if middle in points else middle


@dataclass(frozen=True)
class Found:
    """A point that was chosen, and the curve."""

    share: float  # of the run
    points: Mapping[float, Losses]  # {share: losses}, in order
    guard: Guard
    run: Path  # as in which points were evaluated

    @property
    def weights(self) -> list[float]:
        return weights_at(self.share)

    def __str__(self) -> str:
        budgets = {name: f" of {most:g}" for name, most in self.guard.budgets.items()}
        rises = self.guard.rises(self.points[self.share])
        words = ", ".join(f"{name} {rise:+.4f}{budgets.get(name, '')}" for name, rise in rises.items())
        end = " This is the run itself: no point before it is better." if self.share == 1 else ""
        return f"Chosen of {len(self.points)} points: {self.share:.3f}. Nats above the base model: {words}.{end}"


def weights_at(share: float) -> list[float]:
    """Of base and run."""
    return [round(1 - share, 3), share]


def choose(parts: Sequence[Part], budgets: Mapping[str, float], dtype: str) -> Found:
    """Evaluate points of the line from the first part to the second, and print them.

    Raises ValueError where the run can't be evaluated as it was, and Fault (76) where no point is better than the base model.
    """
    base, run = parts
    if run.progress is None:
        raise ValueError(f"{str(run.path)!r} isn't a checkpoint of a run, whose flags say how points are evaluated.")
    try:
        plan, flags, sets = average.as_in_run([run], budgets)
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"Points of a line are evaluated as the run was: {one_line(error)}") from error
    for name in budgets:
        require_set("--forgetting_budget", name, [*plan.validation_splits(), *PROBES])
    computing, guard = average.computing_as(flags["precision"]), Guard(budgets=budgets)
    print(f"Points from {base.name} (0) to {run.name} (1), loss of {average.in_words(flags)}:", flush=True)

    def evaluate(share: float) -> Losses:
        weights = average.average_of(parts, weights_at(share), dtype)
        config = loading.load_config(str(run.path))
        losses = average.losses_of(computing, config, weights, weights.skeleton.dtype, sets)
        guard.accept_evaluation(math.ceil(share), losses)  # those of step 0 are the base's
        words = [f"{name} {loss:.4f}" for name, loss in losses.items()] + [guard.forgotten] * bool(guard.over)
        print(f"  {share:.3f}", *words, sep="  ", flush=True)
        if bad := [name for name, loss in losses.items() if not math.isfinite(loss)]:
            raise Fault(f"The loss of {bad[0]!r} is {losses[bad[0]]} at {share:.3f} of the line.", NON_FINITE)
        return losses

    share, points = search(evaluate, guard, list(plan.data.sources) or [ONE_SET])
    if share == 0:
        inside = "inside the budget" if budgets else "better"
        raise Fault(f"Of {len(points)} points none has learned and is {inside} but the base model itself.", NON_FINITE)
    return Found(share, points, guard, plan.run_directory)


def record(output: Path, found: Found) -> None:
    """Add the curve to the note of an average."""
    note = json.loads((output / NOTE).read_text())
    for part, share in zip(note["parts"], (0.0, 1.0)):
        part["eval_loss"] = found.points[share]
    note |= {"eval_loss": found.points[found.share], "forgetting_budget": dict(found.guard.budgets)}
    note["line"] = [{"weight_of_run": share, "eval_loss": losses} for share, losses in found.points.items()]
    files.write_atomically(output / NOTE, json.dumps({**note, "evaluated_as_in": str(found.run)}, indent=2) + "\n")
