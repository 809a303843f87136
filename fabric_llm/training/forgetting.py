"""--forgetting_budget: how far the losses of validation sets may rise, and what follows if they
rise further, by numbers that all ranks share."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Optional

NUMBER = r"\d+(\.\d*)?([eE][+-]?\d+)?|\.\d+([eE][+-]?\d+)?"
ACTIONS = ("warn", "stop", "rewind", "steer")
# A checkpoint to rewind to may have used at most this fraction of a budget, since it takes time
# until more replay has an effect.
ROOM = 0.5
# Of --forgetting_action steer: the largest change of a share after one evaluation, and the fraction
# of a budget that is left free, since losses are measured on some rows only.
MAX_CHANGE, MARGIN = 0.2, 0.05
# The part of a run between evaluations from which on a share may change by MAX_CHANGE. It changes
# by less where they are closer: what it does to a loss takes steps, so shares would swing.
USUAL_INTERVAL = 1 / 24
HARD = ":max"  # after a budget that holds at every evaluation


@dataclass
class Forgetting:
    """Judges each evaluation by what was forgotten: how far the losses of validation sets rose
    above their values before step 1."""

    budgets: Mapping[str, float] = field(default_factory=dict)  # of some validation sets, nats
    action: str = "warn"  # one of ACTIONS, when a set is above its budget
    hard: frozenset[str] = frozenset()  # sets that a steered run keeps within theirs at all times
    before: dict[str, float] = field(default_factory=dict)  # loss of each set before step 1, nats
    changed: frozenset[str] = frozenset()  # sets that are evaluated on other rows than before
    over: tuple[str, ...] = ()  # sets above their budget in the last evaluation
    forgotten: str = ""  # how far these are above it, in words

    @property
    def verdict(self) -> str:
        """What the last evaluation asks for: one of ACTIONS, or "" if no set was above its
        budget."""
        return self.action if self.over else ""

    def accept_evaluation(self, step: int, losses: Mapping[str, float]) -> None:
        """Judge the losses of the validation sets after `step` steps, nats. Those at step 0 become
        `before`. Sets `over` and `forgotten`."""
        if step == 0:
            self.before = dict(losses)
        rises = self.rises(losses)
        over, words = [], []
        for name, budget in self.budgets.items():
            rise = rises.get(name, 0.0)
            if not rise <= budget:  # a loss that is NaN is above any budget
                over.append(name)
                words.append(
                    f"{name} {self.before[name]:.4f} -> {losses[name]:.4f}, {rise:+.4f} of "
                    f"{budget:g} nats"
                )
        self.over, self.forgotten = tuple(over), f"forgotten: {'; '.join(words)}"

    def rises(self, losses: Mapping[str, float]) -> dict[str, float]:
        """{set: nats that its loss is above its value before step 1}, of sets for which that is
        known."""
        known = self.before.keys() - self.changed
        return {name: loss - self.before[name] for name, loss in losses.items() if name in known}

    def steered(
        self,
        losses: Mapping[str, float],
        shares: Mapping[str, float],
        interval: float = USUAL_INTERVAL,
    ) -> dict[str, float]:
        """{source: its share from here on}, of the sources whose sets have a budget.

        A share moves in proportion to what is left of the budget: with nothing forgotten by
        MAX_CHANGE down, and with twice the budget or more by as much up. All of them answer for a
        set with a budget that is no source, such as a probe. shares: those of all sources so far.
        interval: the part of the run between two evaluations.
        """
        rises, left = self.rises(losses), {}
        most = MAX_CHANGE * min(1.0, interval / USUAL_INTERVAL)
        for name, budget in self.budgets.items():
            # Not 0: --forgetting_action steer takes only budgets above 0 (plan/checks.py).
            aim = (1 - MARGIN) * budget
            fraction = (aim - rises.get(name, 0.0)) / aim
            # A loss that is NaN has forgotten all.
            left[name] = max(-1.0, min(1.0, fraction)) if math.isfinite(fraction) else -1.0
        of_others = [fraction for name, fraction in left.items() if name not in shares]
        return {
            name: shares[name] - most * min(fraction, *of_others, 1.0)
            for name, fraction in left.items()
            if name in shares
        }

    def has_room(self, losses: Optional[Mapping[str, float]]) -> bool:
        """Whether a checkpoint with these losses has used at most ROOM of each budget. None: it
        wasn't evaluated."""
        if losses is None or not self.budgets.keys() <= losses.keys():
            return False
        rises = self.rises(losses)
        return all(rises.get(name, 0.0) <= ROOM * most for name, most in self.budgets.items())


def parse_bounds(given: str) -> tuple[Fraction, Fraction]:
    """--steer_bounds: the least share of each steered source, and the most of all together. Raises
    ValueError."""
    least, colon, most = given.partition(":")
    if colon and re.fullmatch(NUMBER, least) and re.fullmatch(NUMBER, most):
        if 0 <= Fraction(least) < Fraction(most) < 1:
            return Fraction(least), Fraction(most)
    raise ValueError(
        "--steer_bounds takes the least and the most share, from 0 to below 1, such as 0.05:0.5, "
        f"not {given!r}."
    )


def parse_budgets(given: Optional[str]) -> dict[str, float]:
    """--forgetting_budget as {name of a validation set: nats}. Raises ValueError."""
    budgets: dict[str, float] = {}
    if given is None:
        return budgets
    for part in given.split(","):
        name, _, number = part.strip().removesuffix(HARD).rpartition(":")
        # 1e400 is infinite, which no rise exceeds.
        if not name or not re.fullmatch(NUMBER, number) or math.isinf(float(number)):
            raise ValueError(
                "--forgetting_budget takes name:nats, comma-separated, such as replay:0.05, not "
                f"{part!r}."
            )
        if name in budgets:
            raise ValueError(f"--forgetting_budget: {name!r} is there twice.")
        budgets[name] = float(number)
    return budgets


def hard_budgets(given: Optional[str]) -> frozenset[str]:
    """The sets whose --forgetting_budget, which is in order, holds at every evaluation."""
    parts = (part.strip() for part in (given or "").split(","))
    return frozenset(part.rsplit(":", 2)[0] for part in parts if part.endswith(HARD))
