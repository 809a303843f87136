"""TODO training.schedule."""

from __future__ import annotations

import math


def lr_at(
    step: int, *, max_step: int, lr: float, min_lr: float, warmup_steps: int, decay: bool = True, shape: str = "cosine"
) -> float:
    """Learning rate of the step that follows `step` finished ones.

    Linear from lr/warmup_steps to lr over the warm-up, then along half a cosine (Loshchilov and Hutter 2017) or a line
    to min_lr, which it would reach one step after the last, so that no step is wasted at 0; there it stays.
    """
    if step < warmup_steps:
        return lr * (step + 1) / warmup_steps
    if not decay:
        return lr
    done = min(1.0, (step - warmup_steps) / max(1, max_step - warmup_steps))
    falling = 0.5 * (1 + math.cos(math.pi * done)) if shape == "cosine" else 1 - done
    return min_lr + (lr - min_lr) * falling
