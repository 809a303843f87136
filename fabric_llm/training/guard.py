"""Losing well: which steps are taken, skipped or undone, from numbers that all ranks share."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Optional

from fabric_llm.training.forgetting import Forgetting

ENOUGH_LOSSES = 10  # to speak of a deviation


@dataclass
class Guard:
    """Judges each step by its loss and gradient norm, and each evaluation by what was forgotten.

    Its state, `losses`, `skipped`, `rewinds` and that of `forgetting`, is in checkpoints.
    """

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

    def accept_evaluation(self, step: int, losses: Mapping[str, float]) -> None:
        """Judge the losses of the validation sets after `step` steps, nats. `verdict` and `reason` may be `forgetting`'s then."""
        self.forgetting.judge(step, losses)
        if self.forgetting.verdict in ("stop", "rewind"):
            self.verdict, self.reason = self.forgetting.verdict, self.forgetting.reason

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

    def gives_up(self) -> bool:
        """True once there were more skips in a row, or with this one more rewinds, than allowed."""
        if self.verdict == "rewind":
            return self.rewinds + 1 > self.max_skipped_steps
        return self.skipped > self.max_skipped_steps

    def state(self) -> dict[str, Any]:
        """What a resumed run needs, for JSON."""
        state = {name: asdict(self)[name] for name in ("losses", "skipped", "rewinds")}
        return {**state, "before": self.forgetting.before}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from `state()`."""
        self.losses, self.skipped, self.rewinds = list(state["losses"]), state["skipped"], state["rewinds"]
        self.forgetting.restore(state.get("before", {}))  # older checkpoints have none
