"""The learning rate as a function of the step. A schedule is one entry of SCHEDULES; `--lr_schedule` takes its name."""

from __future__ import annotations

import math
from collections.abc import Callable

# Name -> shape of the decay: from the part of it that is done, 0 to 1, to the part of the peak rate that is left.
SCHEDULES: dict[str, Callable[[float], float]] = {
    "cosine": lambda done: 0.5 * (1 + math.cos(math.pi * done)),  # Loshchilov and Hutter (2017)
    "linear": lambda done: 1 - done,
}


def lr_at(
    step: int, *, max_step: int, lr: float, min_lr: float, warmup_steps: int, decay: bool = True, shape: str = "cosine"
) -> float:
    """Learning rate of the step that follows `step` finished ones.

    It rises linearly from lr/warmup_steps to lr over the warm-up and then falls along SCHEDULES[shape] to min_lr, which it
    would reach one step after the last, so that no step is wasted at 0. It stays there.
    """
    if step < warmup_steps:
        return lr * (step + 1) / warmup_steps
    if not decay:
        return lr
    done = min(1.0, (step - warmup_steps) / max(1, max_step - warmup_steps))
    return min_lr + (lr - min_lr) * SCHEDULES[shape](done)
