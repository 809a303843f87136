"""What a run may forget: how far the loss of a validation set may rise above its value before step 1."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Optional

NUMBER = r"\d+(\.\d*)?([eE][+-]?\d+)?|\.\d+([eE][+-]?\d+)?"
ACTIONS = ("warn", "stop", "rewind")
ROOM = 0.5  # part of a budget that may be used where a rewind begins again


@dataclass
class Forgetting:
    """Judges each evaluation. `before` is in checkpoints."""

    budgets: Mapping[str, float] = field(default_factory=dict)  # of some sets, nats
    action: str = "warn"  # where a set is above its budget: one of ACTIONS
    before: dict[str, float] = field(default_factory=dict)  # loss of each set before step 1, nats
    verdict: str = "keep"  # on the last evaluation: keep, or the action
    reason: str = ""
    over: tuple[str, ...] = ()  # sets above their budget

    def judge(self, step: int, losses: Mapping[str, float]) -> None:
        """`verdict`, `reason` and `over` say what the losses after `step` steps, nats, come to. At step 0 they are kept."""
        if step == 0:
            self.before = dict(losses)
        forgotten = self.forgotten(losses)
        self.over = tuple(name for name, most in self.budgets.items() if not forgotten.get(name, 0.0) <= most)
        words = (
            f"{name} {self.before[name]:.4f} -> {losses[name]:.4f}, {forgotten[name]:+.4f} of {self.budgets[name]:g} nats"
            for name in self.over
        )
        self.verdict, self.reason = self.action if self.over else "keep", f"forgotten: {'; '.join(words)}"

    def forgotten(self, losses: Mapping[str, float]) -> dict[str, float]:
        """How far each loss is above its value before step 1, nats, where that is known."""
        return {name: loss - self.before[name] for name, loss in losses.items() if name in self.before}

    def has_room(self, losses: Optional[Mapping[str, float]]) -> bool:
        """True for the losses of a checkpoint that has used at most ROOM of each budget; None: it wasn't evaluated.

        From one that has used nearly all, a run would pass it again before more replay could tell.
        """
        if losses is None or not self.budgets.keys() <= losses.keys():
            return False
        forgotten = self.forgotten(losses)
        return all(forgotten.get(name, 0.0) <= ROOM * most for name, most in self.budgets.items())

    def restore(self, before: Mapping[str, float]) -> None:
        """Go on from the losses before step 1."""
        self.before, self.verdict, self.over = dict(before), "keep", ()


def parse_budgets(given: Optional[str]) -> dict[str, float]:
    """--forgetting_budget as {name of a validation set: nats}. Raises ValueError."""
    budgets: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in (given or "").split(","))):
        name, _, number = part.rpartition(":")
        if not name or not re.fullmatch(NUMBER, number):
            raise ValueError(
                f"--forgetting_budget takes name:nats, comma-separated, such as general:0.05, not {part!r}."
            )
        if name in budgets:
            raise ValueError(f"--forgetting_budget: {name!r} is there twice.")
        budgets[name] = float(number)
    if given is not None and not budgets:
        raise ValueError("--forgetting_budget is empty; it takes name:nats, such as general:0.05.")
    return budgets
