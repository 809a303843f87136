"""Which steps are taken, skipped or undone, and what a run may forget, from numbers that all ranks share. Without torch."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Optional

NUMBER = r"\d+(\.\d*)?([eE][+-]?\d+)?|\.\d+([eE][+-]?\d+)?"
ACTIONS = ("warn", "stop", "rewind")
ROOM = 0.5  # part of a budget that may be used where a rewind begins: more replay needs time to tell
ENOUGH_LOSSES = 10  # to speak of a deviation


@dataclass
class Forgetting:
    """Judges each evaluation: how far the loss of a validation set may rise above its value before step 1."""

    budgets: Mapping[str, float] = field(default_factory=dict)  # of some sets, nats
    action: str = "warn"  # where a set is above its budget: one of ACTIONS
    before: dict[str, float] = field(default_factory=dict)  # loss of each set before step 1, nats; in checkpoints
    verdict: str = "keep"  # on the last evaluation: keep, or the action
    reason: str = ""
    over: tuple[str, ...] = ()  # sets above their budget

    def judge(self, step: int, losses: Mapping[str, float]) -> None:
        """`verdict`, `reason` and `over` say what the losses after `step` steps, nats, come to. At step 0 they are kept."""
        if step == 0:
            self.before = dict(losses)
        rises = self.forgotten(losses)
        self.over = tuple(name for name, most in self.budgets.items() if not rises.get(name, 0.0) <= most)
        words = (
            f"{name} {self.before[name]:.4f} -> {losses[name]:.4f}, {rises[name]:+.4f} of {self.budgets[name]:g} nats"
            for name in self.over
        )
        self.verdict, self.reason = self.action if self.over else "keep", f"forgotten: {'; '.join(words)}"

    def forgotten(self, losses: Mapping[str, float]) -> dict[str, float]:
        """How far each loss is above its value before step 1, nats, where that is known."""
        return {name: loss - self.before[name] for name, loss in losses.items() if name in self.before}

    def has_room(self, losses: Optional[Mapping[str, float]]) -> bool:
        """True for the losses of a checkpoint that has used at most ROOM of each budget; None: it wasn't evaluated."""
        if losses is None or not self.budgets.keys() <= losses.keys():
            return False
        rises = self.forgotten(losses)
        return all(rises.get(name, 0.0) <= ROOM * most for name, most in self.budgets.items())


@dataclass
class Guard:
    """Judges each step by its loss and gradient norm, and each evaluation by what was forgotten."""

    max_skipped_steps: int = 10
    spike_threshold: Optional[float] = None  # standard deviations; None: no step is a spike
    spike_window: int = 100  # steps
    spike_action: str = "warn"  # warn, skip or rewind
    losses: list[float] = field(default_factory=list)  # of the last steps taken, at most spike_window
    skipped: int = 0  # steps in a row
    rewinds: int = 0  # of the whole run
    forgetting: Forgetting = field(default_factory=Forgetting)  # judges evaluations
    verdict: str = "take"  # on the last step: take, warn, skip or rewind; after its evaluation it may be stop as well
    reason: str = ""

    def accept(self, loss: float, grad_norm: float) -> bool:
        """True if the step is to be taken; `verdict` and `reason` say more."""
        self.verdict, self.reason = self._judge(loss, grad_norm)
        if self.verdict in ("take", "warn"):
            self.skipped = 0
            self.losses = [*self.losses, loss][-self.spike_window :]
            return True
        self.skipped += 1
        return False

    def _judge(self, loss: float, grad_norm: float) -> tuple[str, str]:
        if self.forgetting.verdict == "rewind":  # by the evaluation with which a resumed run began
            return "rewind", self.forgetting.reason
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            return "skip", f"loss {loss}, gradient norm {grad_norm}"
        if self.spike_threshold is not None and len(self.losses) >= min(ENOUGH_LOSSES, self.spike_window):
            mean, deviation = statistics.fmean(self.losses), statistics.pstdev(self.losses)
            if loss - mean > self.spike_threshold * deviation:
                score = (loss - mean) / deviation if deviation else math.inf
                return self.spike_action, f"loss {loss:.4f} is {score:.1f} deviations above {mean:.4f}"
        return "take", ""

    def accept_evaluation(self, step: int, losses: Mapping[str, float]) -> None:
        """Judge the losses of the validation sets after `step` steps, nats. `verdict` and `reason` may be `forgetting`'s then."""
        self.forgetting.judge(step, losses)
        if self.forgetting.verdict in ("stop", "rewind"):
            self.verdict, self.reason = self.forgetting.verdict, self.forgetting.reason

    def gives_up(self) -> bool:
        """True once there were more skips in a row, or with this one more rewinds, than allowed."""
        count = self.rewinds + 1 if self.verdict == "rewind" else self.skipped
        return count > self.max_skipped_steps

    def state(self) -> dict[str, Any]:
        """What a resumed run needs, for JSON."""
        state = {"losses": self.losses, "skipped": self.skipped, "rewinds": self.rewinds}
        return {**state, "before": self.forgetting.before}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from `state()`."""
        self.losses, self.skipped, self.rewinds = list(state["losses"]), state["skipped"], state["rewinds"]
        forgetting = self.forgetting
        forgetting.before, forgetting.verdict, forgetting.over = dict(state["before"]), "keep", ()


def parse_budgets(given: Optional[str]) -> dict[str, float]:
    """--forgetting_budget as {name of a validation set: nats}. Raises ValueError."""
    budgets: dict[str, float] = {}
    for part in [] if given is None else given.split(","):
        name, _, number = part.strip().rpartition(":")
        if not name or not re.fullmatch(NUMBER, number):
            raise ValueError(
                f"--forgetting_budget takes name:nats, comma-separated, such as general:0.05, not {part!r}."
            )
        if name in budgets:
            raise ValueError(f"--forgetting_budget: {name!r} is there twice.")
        budgets[name] = float(number)
    return budgets
