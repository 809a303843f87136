"""Decides which steps are taken, skipped or undone, and what a run may forget, by numbers that all
ranks share."""

import math
import re
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Optional

NUMBER = r"\d+(\.\d*)?([eE][+-]?\d+)?|\.\d+([eE][+-]?\d+)?"
ACTIONS = ("warn", "stop", "rewind")
# part of a budget that may be used at a checkpoint to rewind to: more replay needs time to work
ROOM = 0.5
ENOUGH_LOSSES = 10  # for a standard deviation


@dataclass
class Guard:
    """Judges each step by its loss and gradient norm, and each evaluation by what was forgotten.

    Forgotten is how far the losses of validation sets rose above their values before step 1.
    """

    max_skipped_steps: int = 10
    spike_threshold: Optional[float] = None  # standard deviations; None: no step is a spike
    spike_window: int = 100  # steps
    spike_action: str = "warn"  # warn, skip or rewind
    budgets: Mapping[str, float] = field(default_factory=dict)  # of some validation sets, nats
    forgetting_action: str = "warn"  # one of ACTIONS, when a set is above its budget
    # of the last steps taken, at most spike_window
    losses: list[float] = field(default_factory=list)
    skipped: int = 0  # steps in a row
    rewinds: int = 0  # of the whole run
    before: dict[str, float] = field(default_factory=dict)  # loss of each set before step 1, nats
    changed: frozenset[str] = frozenset()  # sets that are evaluated on other rows than then
    over: tuple[str, ...] = ()  # sets above their budget in the last evaluation
    forgotten: str = ""  # how far these are above it, in words
    verdict: str = (
        "take"  # on the last step: take, warn, skip, rewind; by an evaluation: stop, rewind
    )
    reason: str = ""

    @property
    def forgetting(self) -> str:
        """What the last evaluation asks for: one of ACTIONS, or "" if no set was above its
        budget."""
        return self.forgetting_action if self.over else ""

    def accept(self, loss: float, grad_norm: float) -> bool:
        """Whether the step is to be taken. Sets `verdict` and `reason`."""
        self.verdict, self.reason = self._judge(loss, grad_norm)
        if self.verdict in ("take", "warn"):
            self.skipped = 0
            self.losses = [*self.losses, loss][-self.spike_window :]
            return True
        self.skipped += 1
        return False

    def _judge(self, loss: float, grad_norm: float) -> tuple[str, str]:
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            return "skip", f"loss {loss}, gradient norm {grad_norm}"
        if self.spike_threshold is not None and len(self.losses) >= min(
            ENOUGH_LOSSES, self.spike_window
        ):
            mean, deviation = statistics.fmean(self.losses), statistics.pstdev(self.losses)
            # Equal losses, which don't deviate, don't say how much they may.
            if loss - mean > self.spike_threshold * deviation > 0:
                score = (loss - mean) / deviation
                return (
                    self.spike_action,
                    f"loss {loss:.4f} is {score:.1f} deviations above {mean:.4f}",
                )
        return "take", ""

    def accept_evaluation(self, step: int, losses: Mapping[str, float]) -> None:
        """Judge the losses of the validation sets after `step` steps, nats. Those at step 0 become
        `before`.

        Sets `over` and `forgotten`, and may set `verdict` and `reason`.
        """
        if step == 0:
            self.before = dict(losses)
        rises = self.rises(losses)
        self.over = tuple(
            name for name, most in self.budgets.items() if not rises.get(name, 0.0) <= most
        )
        words = (
            (
                f"{name} {self.before[name]:.4f} -> {losses[name]:.4f}, {rises[name]:+.4f} of "
                f"{self.budgets[name]:g} nats"
            )
            for name in self.over
        )
        self.forgotten = f"forgotten: {'; '.join(words)}"
        if self.forgetting in ("stop", "rewind"):
            self.verdict, self.reason = self.forgetting, self.forgotten

    def rises(self, losses: Mapping[str, float]) -> dict[str, float]:
        """{set: nats that its loss is above its value before step 1}, of sets for which that is
        known."""
        known = self.before.keys() - self.changed
        return {name: loss - self.before[name] for name, loss in losses.items() if name in known}

    def has_room(self, losses: Optional[Mapping[str, float]]) -> bool:
        """Whether a checkpoint with these losses has used at most ROOM of each budget. None: it
        wasn't evaluated."""
        if losses is None or not self.budgets.keys() <= losses.keys():
            return False
        rises = self.rises(losses)
        return all(rises.get(name, 0.0) <= ROOM * most for name, most in self.budgets.items())

    def gives_up(self) -> bool:
        """Whether more steps in a row were skipped, or the run would rewind more often, than
        allowed."""
        count = self.rewinds + 1 if self.verdict == "rewind" else self.skipped
        return count > self.max_skipped_steps

    def state(self) -> dict[str, Any]:
        """What a resumed run needs, for JSON."""
        return {
            "losses": self.losses,
            "skipped": self.skipped,
            "rewinds": self.rewinds,
            "before": self.before,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from `state()`."""
        self.losses, self.skipped, self.rewinds = (
            list(state["losses"]),
            state["skipped"],
            state["rewinds"],
        )
        self.before, self.over = dict(state["before"]), ()


def parse_budgets(given: Optional[str]) -> dict[str, float]:
    """--forgetting_budget as {name of a validation set: nats}. Raises ValueError."""
    budgets: dict[str, float] = {}
    for part in [] if given is None else given.split(","):
        name, _, number = part.strip().rpartition(":")
        if not name or not re.fullmatch(NUMBER, number):
            raise ValueError(
                "--forgetting_budget takes name:nats, comma-separated, such as general:0.05, not "
                f"{part!r}."
            )
        if name in budgets:
            raise ValueError(f"--forgetting_budget: {name!r} is there twice.")
        budgets[name] = float(number)
    return budgets
