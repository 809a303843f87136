"""Decides which steps are taken, skipped or undone, by numbers that all ranks share."""

import math
import statistics
from dataclasses import dataclass, field
from typing import Any, Optional

ENOUGH_LOSSES = 10  # for a standard deviation


@dataclass
class Guard:
    """Judges each step by its loss and gradient norm."""

    max_skipped_steps: int = 10
    spike_threshold: Optional[float] = None  # standard deviations; None: no step is a spike
    spike_window: int = 100  # steps
    spike_action: str = "warn"  # warn, skip or rewind
    # Losses of the last steps that were taken, at most spike_window of them.
    losses: list[float] = field(default_factory=list)
    skipped: int = 0  # steps in a row
    rewinds: int = 0  # of the whole run
    verdict: str = "take"  # on the last step: take, warn, skip or rewind
    reason: str = ""

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
        """(verdict, reason) of a step."""
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            return "skip", f"loss {loss:.6g}, gradient norm {grad_norm:.6g}"
        enough = min(ENOUGH_LOSSES, self.spike_window)
        if self.spike_threshold is None or len(self.losses) < enough:
            return "take", ""
        mean, deviation = statistics.fmean(self.losses), statistics.pstdev(self.losses)
        rise, limit = loss - mean, self.spike_threshold * deviation
        # Equal losses have no deviation, so they don't tell what a spike is.
        if limit == 0 or rise <= limit:
            return "take", ""
        reason = f"loss {loss:.4f} is {rise / deviation:.1f} deviations above {mean:.4f}"
        return self.spike_action, reason

    def gives_up(self) -> bool:
        """Whether more steps in a row were skipped than allowed."""
        return self.skipped > self.max_skipped_steps

    def may_rewind(self) -> bool:
        """Whether the run has gone back fewer times than allowed, for whatever reason."""
        return self.rewinds < self.max_skipped_steps

    def state(self) -> dict[str, Any]:
        """What a resumed run needs, for JSON."""
        return {"losses": self.losses, "skipped": self.skipped, "rewinds": self.rewinds}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from `state()`."""
        self.losses = list(state["losses"])
        self.skipped, self.rewinds = state["skipped"], state["rewinds"]
