"""The line from a base model to a run that began with it: which of its points learned most inside
budgets, and where its knee is.

A point is (1 - share) x base + share x run (WiSE-FT, arXiv 2109.01903). It is evaluated as the run
was, on the weights that its export has, with one model in memory. Losses are smooth along the line,
so polynomials through points that were evaluated say which to evaluate next; what is chosen was
evaluated itself.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.polynomial import Polynomial

from fabric_llm.base.faults import NON_FINITE, Fault, one_line
from fabric_llm.data.sources import PROBES
from fabric_llm.model import loading
from fabric_llm.plan.checks import require_set
from fabric_llm.training.evaluation import rows_in_words
from fabric_llm.training.forgetting import Forgetting
from fabric_llm.weights import average
from fabric_llm.weights.average import Part

MAX_POINTS = 8  # that are evaluated
FIRST, FIRST_OF_KNEE = (0.0, 0.5, 1.0), (0.0, 0.25, 0.5, 0.75, 1.0)  # whatever their losses
SHARES = [thousandth / 1000 for thousandth in range(1001)]
NEAREST = 4  # points that a polynomial goes through
# Part of a budget to aim at, so much less for each point in a row that was above one all the same.
ROOM, CAUTION = 0.99, 0.9
# part of what the best point is worth: the search ends where no other promises more on top
ENOUGH = 0.005

Losses = Mapping[str, Any]  # {set: its loss, nats, or that of several points, float64 [points]}
Worth = Callable[..., Any]  # see `worth_of`


def worth_of(guard: Forgetting, of_run: Losses, of_training: Sequence[str]) -> Worth:
    """What points are worth, by their losses: the nats learned, -inf where more than `room` of a
    budget is used.

    Sets of the training data without a budget are learned, on average. Without budgets the share of
    what the run forgot is set against the share of what it learned. That is largest at the knee,
    the point of this curve that is farthest from its chord (Satopaa et al. 2011, "Finding a Kneedle
    in a Haystack"). guard: it knows the base model's losses and the budgets.
    """
    rises, budgets = guard.rises(of_run), guard.budgets
    if not (free := [name for name in of_training if name not in budgets]):
        words = ", ".join(map(repr, of_training))
        raise ValueError(
            f"--forgetting_budget: all sets of the training data have one ({words}), none is to "
            "be learned."
        )
    new = [
        name for name in free if rises[name] < 0
    ] or free  # what was only replayed may have risen
    old = [name for name, rise in rises.items() if rise > 0 and not budgets]

    def mean(rises: Losses, names: Sequence[str]) -> Any:
        return sum(rises[name] for name in names) / max(len(names), 1)

    price = max(-mean(rises, new) / mean(rises, old), 0.0) if old else 0.0

    def worth(losses: Losses, room: float = 1.0) -> Any:
        rises = guard.rises(losses)
        kept = np.all([rises[name] <= room * most for name, most in budgets.items()], axis=0)
        return np.where(kept, -mean(rises, new) - price * mean(rises, old), -np.inf)

    return worth


def search(
    evaluate: Callable[[float], Losses], guard: Forgetting, of_training: Sequence[str]
) -> dict[float, Losses]:
    """{share: losses} of the points that were evaluated, the best one first. `evaluate` tells the
    guard the first."""
    points = {share: evaluate(share) for share in (FIRST if guard.budgets else FIRST_OF_KNEE)}
    worth, room = worth_of(guard, points[1.0], of_training), ROOM
    while True:
        best = max(points, key=lambda share: (worth(points[share]), share))
        following = best if len(points) == MAX_POINTS else next_share(points, best, worth, room)
        if following in points:
            return {best: points.pop(best), **points}
        points[following] = evaluate(following)
        room = room * CAUTION if np.isinf(worth(points[following])) else ROOM


def next_share(points: Mapping[float, Losses], best: float, worth: Worth, room: float) -> float:
    """Between the neighbours of the best point one that promises more, that one itself for the end.
    room: of budgets."""
    left = max((share for share in points if share < best), default=best)
    right = min((share for share in points if share > best), default=best)
    between = [share for share in SHARES if left < share < right and share != best]
    near, curves = sorted(points, key=lambda share: abs(share - best))[:NEAREST], {}
    for name in points[best]:
        curve = Polynomial.fit(near, [points[share][name] for share in near], len(near) - 1)
        curves[name] = curve(np.array(between))
    promised, there = worth(curves, room), worth(points[best])
    if between and promised.max() - there > ENOUGH * there:
        return between[int(promised.argmax())]
    return round(right / 2, 3) if best == 0 else best  # nothing was found: closer to the base


def choose(
    parts: Sequence[Part], budgets: Mapping[str, float], dtype: str
) -> tuple[list[float], dict[str, Any]]:
    """(the weights of a base model and a run, what an average's note says of the line). Points are
    printed as they are evaluated.

    Raises ValueError where the run can't be evaluated as it was, and Fault (76) where no point is
    better than the base model.
    """
    base, run = parts
    if run.progress is None:
        raise ValueError(
            f"{str(run.path)!r} isn't a checkpoint of a run, whose flags say how points are "
            "evaluated."
        )
    try:
        plan, flags, sets = average.as_in_run([run], budgets)
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"Points of a line are evaluated as the run was: {one_line(error)}"
        ) from error
    for name in budgets:
        require_set("--forgetting_budget", name, [*plan.data.validation_splits(), *PROBES])
    computing, guard = average.computing_as(flags["precision"]), Forgetting(budgets=budgets)
    print(
        (
            f"From {base.name} (0) to {run.name} (1), evaluated as in {plan.run_directory}, on "
            f"{rows_in_words(sets)}:"
        ),
        flush=True,
    )

    def evaluate(share: float) -> Losses:
        weights, config = (
            average.average_of(parts, weights_at(share), dtype),
            loading.load_config(str(run.path)),
        )
        losses = average.losses_of(computing, config, weights, weights.skeleton.dtype, sets)
        guard.accept_evaluation(math.ceil(share), losses)  # those of step 0 are the base's
        words = [f"{name} {loss:.4f}" for name, loss in losses.items()] + [guard.forgotten] * bool(
            guard.over
        )
        print(f"  {share:.3f}", *words, sep="  ", flush=True)
        if bad := [name for name, loss in losses.items() if not math.isfinite(loss)]:
            raise Fault(
                f"The loss of {bad[0]!r} is {losses[bad[0]]} at {share:.3f} of the line.",
                NON_FINITE,
            )
        return losses

    points = search(evaluate, guard, list(plan.data.sources))
    share, losses = next(iter(points.items()))
    if share == 0:
        inside = "inside the budget" if budgets else "better"
        raise Fault(
            f"Of {len(points)} points none has learned and is {inside} but the base model itself.",
            NON_FINITE,
        )
    rises = ", ".join(f"{name} {rise:+.4f}" for name, rise in guard.rises(losses).items())
    end = " This is the run itself: no point before it is better." if share == 1 else ""
    print(
        f"Chosen of {len(points)} points: {share:.3f}. Nats above the base model: {rises}.{end}",
        flush=True,
    )
    line = [{"weight_of_run": share, "eval_loss": points[share]} for share in sorted(points)]
    note = {"eval_loss": losses, "forgetting_budget": dict(budgets), "line": line}
    note |= {"evaluated_as_in": str(plan.run_directory), "rows": rows_in_words(sets)}
    return weights_at(share), note


def weights_at(share: float) -> list[float]:
    return [round(1 - share, 3), share]
