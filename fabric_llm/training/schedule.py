"""The learning rate as a function of the step. A schedule is one entry of SCHEDULES, or one that
--code registers; `--lr_schedule` takes its name."""

import inspect
import math
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple, Optional

from fabric_llm.base import register
from fabric_llm.base.faults import Fault
from fabric_llm.base.flag import declared

# Name -> shape of a decay: a function from the fraction of it that is done to the fraction of the
# rate that is left.
DECAYS: dict[str, Callable[[float], float]] = {
    "cosine": lambda done: 0.5 * (1 + math.cos(math.pi * done)),  # Loshchilov and Hutter (2017)
    "linear": lambda done: 1 - done,
    "sqrt": lambda done: 1 - math.sqrt(done),  # Haegele et al. (2024), arXiv 2405.18392
    "exponential": lambda done: (
        (100 ** (1 - done) - 1) / 99
    ),  # by a factor of 100, shifted to end at 0
}


class AfterWarmup(NamedTuple):
    """A place in a run after its warm-up."""

    step: int  # finished steps since the warm-up
    done: float  # the fraction of the steps after the warm-up that is done
    last_decay: float  # the factor of --decay_steps: 1 before them, falling to 0
    # The factor of --cooldown_steps: 1 at their beginning, falling to that of the constant rate.
    cooldown: float
    warmup_steps: int
    max_step: int  # of the run
    own: SimpleNamespace  # the flags that --code registers


# Name -> schedule: a function from the place after the warm-up to x in lr(x) = min_lr + x (lr -
# min_lr).
SCHEDULES: dict[str, Callable[[AfterWarmup], float]] = {
    "cosine": lambda at: DECAYS["cosine"](at.done),
    "linear": lambda at: DECAYS["linear"](at.done),
    "constant": lambda at: 1.0,
    "wsd": lambda at: at.last_decay,  # warm-up, stable, decay: Hu et al. (2024), arXiv 2404.06395
    # Falls to a constant rate, at which a run of any length stays until its last decay: Singh et
    # al. (2025), arXiv 2503.02844.
    "infinite": lambda at: at.cooldown * at.last_decay,
    "inverse_sqrt": lambda at: math.sqrt(
        max(1, at.warmup_steps) / (max(1, at.warmup_steps) + at.step)
    ),
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
    own: Mapping[str, Any] = {},
) -> float:
    """Learning rate of the step that follows `step` finished ones.

    It rises linearly from lr/warmup_steps to lr over the warm-up. Then it follows
    SCHEDULES[lr_schedule] down to min_lr, which it would reach one step after the last.
    decay_steps: the last steps, over which wsd and infinite decay in a shape of DECAYS (default: a
    tenth of the run). cooldown_steps: steps after the warm-up over which infinite falls to
    constant_lr (defaults: a quarter of the run, and the mean of lr and min_lr, as in the paper).
    own: the flags that --code registers, for its schedules.
    """
    if step < warmup_steps:
        return lr * (step + 1) / warmup_steps
    if not lr_decay:
        return lr
    step, steps = step - warmup_steps, max_step - warmup_steps
    if decay_steps is None:
        decay_steps = max(1, max_step // 10)
    # A short run may be shorter than its warm-up and its last decay together.
    decay_steps = min(steps, decay_steps)
    # Below 0 until the last decay begins, then the fraction of it that is done.
    decayed = (step - steps + decay_steps) / max(1, decay_steps)
    if cooldown_steps is None:
        cooldown_steps = max_step // 4
    if constant_lr is None:
        constant_lr = (lr + min_lr) / 2
    # As a fraction of the way from min_lr to lr, as schedules give every rate.
    constant = (constant_lr - min_lr) / (lr - min_lr) if lr > min_lr else 1.0
    at = AfterWarmup(
        step,
        done=min(1.0, step / max(1, steps)),
        last_decay=DECAYS[decay_shape](min(1.0, max(0.0, decayed))),
        cooldown=constant
        + (1 - constant) * DECAYS["cosine"](min(1.0, step / max(1, cooldown_steps))),
        warmup_steps=warmup_steps,
        max_step=max_step,
        own=SimpleNamespace(**own),
    )
    if lr_schedule in SCHEDULES:
        left = SCHEDULES[lr_schedule](at)
    else:
        with register.of_user(f"the schedule {lr_schedule!r}"):
            left = float(register.SCHEDULES[lr_schedule](at))
        if not math.isfinite(left):
            raise Fault(f"--code: the schedule {lr_schedule!r} must return finite numbers: {left}.")
    # The sum may differ from lr in its last bit.
    rate = lr if left == 1 else min_lr + (lr - min_lr) * left
    # It would raise the loss on purpose.
    if rate < 0:
        raise Fault(f"--code: the schedule {lr_schedule!r} must return no negative rate: {rate:g}.")
    return rate


def arguments_of(flags: dict[str, Any]) -> dict[str, Any]:
    """The flags of a run that are arguments of `lr_at`, except `max_step`, since a run may be
    extended."""
    shape = {}
    for name in inspect.signature(lr_at).parameters:
        if name not in ("step", "max_step", "own"):
            shape[name] = flags[name]
    own = {}
    for group in register.FLAGS.values():
        for name, one in declared(group).items():
            own[name] = flags.get(name, one.default)
    return {**shape, "own": own}
