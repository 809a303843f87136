"""The line from a base model to a run that began with it: which of its points learned most inside
budgets, and where its knee is.

A point is (1 - share) x base + share x run (WiSE-FT, arXiv 2109.01903). It is evaluated as the run
was, on the weights that its export has, with one model in memory. Bisection between the best point
and its neighbours says which to evaluate next.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from fabric_llm.base.faults import NON_FINITE, Fault, one_line
from fabric_llm.data.periods import PROBES
from fabric_llm.plan.checks import require_set
from fabric_llm.training.evaluation import rows_in_words
from fabric_llm.training.forgetting import Forgetting
from fabric_llm.weights import average
from fabric_llm.weights.average import Part

MAX_POINTS = 10  # that are evaluated
FIRST, FIRST_OF_KNEE = (0.0, 0.5, 1.0), (0.0, 0.25, 0.5, 0.75, 1.0)  # whatever their losses
CLOSE = 0.02  # distance to the next point, as a fraction of the best share: the search ends there

Losses = Mapping[str, float]  # {set: its loss, nats}


class Goal(NamedTuple):
    """What makes a point of the line a good one."""

    learned: list[str]  # sets whose losses should fall
    forgotten: list[str]  # sets whose losses shouldn't rise, and have no budget
    price: float  # of a nat that is forgotten, in nats that are learned


def goal_of(guard: Forgetting, of_run: Losses, of_training: Sequence[str]) -> Goal:
    """guard: it knows the base model's losses and the budgets. of_run: losses of the run.
    of_training: the sets of its training data.

    Without budgets, a point is as good as its share of what the run learned exceeds its share of
    what the run forgot. That is largest at the knee, the point of this curve that is farthest from
    its chord (Satopaa et al. 2011, "Finding a Kneedle in a Haystack"). Raises ValueError where
    nothing is to be learned.
    """
    rises = guard.rises(of_run)
    free = [name for name in of_training if name not in guard.budgets]
    # A set with a budget is to be kept, and can't be what is learned.
    if not free:
        words = ", ".join(map(repr, of_training))
        raise ValueError(
            f"--forgetting_budget: all sets of the training data have one ({words}), none is to "
            "be learned."
        )
    # What was only replayed may have risen.
    learned = [name for name in free if rises[name] < 0] or free
    if guard.budgets:
        return Goal(learned, [], 0.0)
    forgotten = [name for name, rise in rises.items() if rise > 0]
    price = 0.0
    if forgotten:
        # At this price the base and the run are both worth 0, and the chord between them is level.
        price = max(-_mean(rises, learned) / _mean(rises, forgotten), 0.0)
    return Goal(learned, forgotten, price)


def worth_of(losses: Losses, guard: Forgetting, goal: Goal) -> float:
    """Nats that a point has learned, less what it has forgotten; -inf where it is above a
    budget."""
    rises = guard.rises(losses)
    for name, budget in guard.budgets.items():
        # No learning outweighs a budget that is exceeded.
        if rises[name] > budget:
            return -math.inf
    return -_mean(rises, goal.learned) - goal.price * _mean(rises, goal.forgotten)


def _mean(rises: Losses, names: Sequence[str]) -> float:
    return sum(rises[name] for name in names) / max(len(names), 1)


def search(
    evaluate: Callable[[float], Losses], guard: Forgetting, of_training: Sequence[str]
) -> dict[float, Losses]:
    """{share: losses} of the points that were evaluated, the best one first. `evaluate` tells the
    guard the first."""
    points = {}
    # The first of them is the base, share 0, against whose losses all others are judged.
    for share in FIRST if guard.budgets else FIRST_OF_KNEE:
        points[share] = evaluate(share)
    goal = goal_of(guard, points[1.0], of_training)
    while True:
        worth = {share: worth_of(losses, guard, goal) for share, losses in points.items()}
        # Of equally good points the one that learned more.
        best = max(points, key=lambda share: (worth[share], share))
        share = next_share(worth, best)
        # `next_share` gives the best point itself once its neighbours are close.
        if share in points or len(points) == MAX_POINTS:
            return {best: points.pop(best), **points}
        points[share] = evaluate(share)


def next_share(worth: Mapping[float, float], best: float) -> float:
    """Halfway from the best point to a neighbour; the best point itself where they are close."""
    # At an end of the line the best point is its own neighbour.
    left = max((share for share in worth if share < best), default=best)
    right = min((share for share in worth if share > best), default=best)
    # The edge of a budget lies between, where the most is learned; else the wider gap is halved.
    is_edge = right > best and worth[right] == -math.inf
    neighbour = left
    if is_edge or right - best >= best - left:
        neighbour = right
    if abs(neighbour - best) <= CLOSE * best:
        return best
    return round((best + neighbour) / 2, 3)


def choose(
    parts: Sequence[Part], budgets: Mapping[str, float], dtype: str
) -> tuple[list[float], dict[str, Any]]:
    """(the weights of a base model and a run, what average.json says of the line). Prints each
    point that is evaluated.

    Raises ValueError where the run can't be evaluated as it was, and Fault (76) where no point is
    better than the base model.
    """
    base, run = parts
    try:
        as_run = average.as_in_run([run], budgets)
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"Points of a line are evaluated as the run was: {one_line(error)}"
        ) from error
    # A mistyped set would silently have no budget.
    for name in budgets:
        known = [*as_run.data.validation_splits(), *PROBES]
        require_set("--forgetting_budget", name, known, may_add=False)
    guard = Forgetting(budgets=budgets)
    in_dtype = average.average_of(parts, weights_at(0.0), dtype).skeleton.dtype
    print(
        f"From {base.name} (0) to {run.name} (1), in {str(in_dtype).removeprefix('torch.')}, "
        f"evaluated as in {as_run.directory}, on {rows_in_words(as_run.sets)}:",
        flush=True,
    )

    def evaluate(share: float) -> Losses:
        weights = average.average_of(parts, weights_at(share), dtype)
        losses = average.losses_of(as_run, run.config, weights, weights.skeleton.dtype)
        guard.accept_evaluation(math.ceil(share), losses)  # those of step 0 are the base's
        words = [f"{name} {loss:.4f}" for name, loss in losses.items()]
        if guard.over:
            words.append(guard.forgotten)
        print(f"  {share:.3f}", *words, sep="  ", flush=True)
        for name, loss in losses.items():
            if not math.isfinite(loss):
                raise Fault(
                    f"The loss of {name!r} is {loss} at {share:.3f} of the line.", NON_FINITE
                )
        return losses

    points = search(evaluate, guard, list(as_run.data.sources))
    share, losses = next(iter(points.items()))
    # The base model alone is no average, and it is there already.
    if share == 0:
        inside = "inside the budget" if budgets else "better"
        raise Fault(
            f"Of {len(points)} points none has learned and is {inside} but the base model itself.",
            NON_FINITE,
        )
    rises = ", ".join(f"{name} {rise:+.4f}" for name, rise in guard.rises(losses).items())
    message = f"Chosen of {len(points)} points: {share:.3f}. Nats above the base model: {rises}."
    if share == 1:
        message += " This is the run itself: no point before it is better."
    print(message, flush=True)
    # For the drawing of the line, from the base to the run.
    line = [{"weight_of_run": share, "eval_loss": points[share]} for share in sorted(points)]
    note = {"eval_loss": losses, "forgetting_budget": dict(budgets), "line": line}
    note |= {"evaluated_as_in": str(as_run.directory), "rows": rows_in_words(as_run.sets)}
    return weights_at(share), note


def weights_at(share: float) -> list[float]:
    return [round(1 - share, 3), share]
