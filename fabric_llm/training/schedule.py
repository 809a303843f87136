"""The learning rate as a function of the step. A schedule is one entry of SCHEDULES; `--lr_schedule` takes its name."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Optional

# Name -> shape of a decay: from the part of it that is done, 0 to 1, to the part of the rate that is left.
DECAYS: dict[str, Callable[[float], float]] = {
    "cosine": lambda done: 0.5 * (1 + math.cos(math.pi * done)),  # Loshchilov and Hutter (2017)
    "linear": lambda done: 1 - done,
    "sqrt": lambda done: 1 - math.sqrt(done),  # Haegele et al. (2024), arXiv 2405.18392
    "exponential": lambda done: (100 ** (1 - done) - 1) / 99,  # by a factor of 100, shifted to end at 0
}


@dataclass(frozen=True)
class AfterWarmup:
    """A place in a run behind its warm-up."""

    step: int  # finished steps since the warm-up
    steps: int  # of the run, without its warm-up
    warmup_steps: int
    decay_steps: int  # at the end
    decay_shape: str
    cooldown_steps: int
    constant: float  # what the constant phase has left of the peak rate, 0 to 1, both above min_lr

    @property
    def done(self) -> float:
        """The part of the steps that is done, 0 to 1."""
        return min(1.0, self.step / max(1, self.steps))

    @property
    def last_decay(self) -> float:
        """What the decay of the last steps has left: 1 before it, and 0 at its end."""
        done = (self.step - self.steps + self.decay_steps) / max(1, self.decay_steps)
        return DECAYS[self.decay_shape](min(1.0, max(0.0, done)))


def infinite(at: AfterWarmup) -> float:
    """Down to a constant rate, on which a run of any length stays until it decays: Singh et al. (2025), arXiv 2503.02844."""
    cooled = DECAYS["cosine"](min(1.0, at.step / max(1, at.cooldown_steps)))
    return (at.constant + (1 - at.constant) * cooled) * at.last_decay


# Name -> schedule: from the place behind the warm-up to what is left of the peak rate, 1 to 0, both above min_lr.
SCHEDULES: dict[str, Callable[[AfterWarmup], float]] = {
    "cosine": lambda at: DECAYS["cosine"](at.done),
    "linear": lambda at: DECAYS["linear"](at.done),
    "constant": lambda at: 1.0,
    "wsd": lambda at: at.last_decay,  # warm-up, stable, decay: Hu et al. (2024), arXiv 2404.06395
    "infinite": infinite,
    "inverse_sqrt": lambda at: math.sqrt(max(1, at.warmup_steps) / (max(1, at.warmup_steps) + at.step)),
}
WITH_DECAY_STEPS = ("wsd", "infinite")


def lr_at(
    step: int,
    *,
    max_step: int,
    lr: float,
    min_lr: float,
    warmup_steps: int,
    lr_decay: bool = True,
    lr_schedule: str = "cosine",
    decay_steps: Optional[int] = None,
    decay_shape: str = "sqrt",
    cooldown_steps: Optional[int] = None,
    constant_lr: Optional[float] = None,
) -> float:
    """Learning rate of the step that follows `step` finished ones.

    It rises linearly from lr/warmup_steps to lr over the warm-up and then follows SCHEDULES[lr_schedule] down to min_lr, which it
    would reach one step after the last, so that no step is wasted at 0. It stays there.

    decay_steps: last steps, in which wsd and infinite decay in the shape of DECAYS (default: a tenth of the run).
    cooldown_steps: after the warm-up, in which infinite comes down to constant_lr (defaults: a quarter of the run, and the
    mean of lr and min_lr, as in the paper).
    """
    if step < warmup_steps:
        return lr * (step + 1) / warmup_steps
    if not lr_decay:
        return lr
    steps, constant_lr = max_step - warmup_steps, (lr + min_lr) / 2 if constant_lr is None else constant_lr
    at = AfterWarmup(
        step=step - warmup_steps,
        steps=steps,
        warmup_steps=warmup_steps,
        decay_steps=min(steps, max(1, max_step // 10) if decay_steps is None else decay_steps),
        decay_shape=decay_shape,
        cooldown_steps=max_step // 4 if cooldown_steps is None else cooldown_steps,
        constant=(constant_lr - min_lr) / (lr - min_lr) if lr > min_lr else 1.0,
    )
    left = SCHEDULES[lr_schedule](at)
    return lr if left == 1 else min_lr + (lr - min_lr) * left


def arguments_of(flags: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `lr_at` among the flags of a run, whose names they have; without `max_step`, which a run may extend."""
    return {name: flags[name] for name in inspect.signature(lr_at).parameters if name not in ("step", "max_step")}
