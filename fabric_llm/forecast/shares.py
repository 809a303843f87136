"""Three short runs at three shares of replay -> what other shares would do in as many steps.

loss = c + k exp(t r), where r is the share of replay. The law holds between the shares of runs of
one length: it says nothing of more steps. `python -m fabric_llm.choose` makes the runs.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Optional

import numpy as np

SHARES = (0.0, 0.5, 1.0)  # of the runs, which are as far apart as they can be
FINEST = 200  # shares are advised in steps of 1 / FINEST, as steering changes them
MARKERS = {"law": "o", "rate": "s", "check": "X"}  # of branches, by what they are for
STRAIGHT = 1e-6  # below this t the law is a line, within a millionth of its rise


class Law(NamedTuple):
    """How the loss of a set depends on the share of replay, through its losses at SHARES."""

    losses: tuple[float, float, float]  # nats
    t: Optional[float]  # None: they rise and fall, and no such law goes through them

    def at(self, share: float) -> float:
        """The loss in nats at a share from 0 to 1: without a law, on straight lines."""
        if self.t is None:
            return float(np.interp(share, SHARES, self.losses))
        first, _, last = self.losses
        return first + (last - first) * math.expm1(self.t * share) / math.expm1(self.t)


def through(first: float, middle: float, last: float) -> Law:
    """The law through the losses at SHARES."""
    t: Optional[float] = None
    # The second half of the way rises exp(t / 2) times as much as the first.
    if middle != first and (ratio := (last - middle) / (middle - first)) > 0:
        t = 2 * math.log(ratio)
        # At t = 0 the formula divides by 0.
        if abs(t) < STRAIGHT:
            t = STRAIGHT
    return Law((first, middle, last), t)


def within(
    laws: Mapping[str, Law],
    before: Mapping[str, float],
    budgets: Mapping[str, float],
    new: str,
    bounds: tuple[float, float],
) -> Optional[float]:
    """The share at which `new` is learned best while no set with a budget rises further above its
    loss `before` than that; None where there is no such share.

    bounds: the least and the most share. Those of the runs are left out: the law goes through them,
    so that another run there would check nothing.
    """
    inside = []
    for number in range(FINEST + 1):
        share = number / FINEST
        if share in SHARES or not bounds[0] <= share <= bounds[1]:
            continue
        if all(laws[name].at(share) - before[name] <= most for name, most in budgets.items()):
            inside.append(share)
    # Of equally good shares the first, which replays least.
    return min(inside, key=laws[new].at, default=None)


def as_learned(law: Law, loss: float) -> Optional[float]:
    """The share at which the law has this loss; None where no share from 0 to 1 has it."""
    shares = np.linspace(0, 1, 10 * FINEST + 1)
    losses = np.array([law.at(share) for share in shares])
    if not losses.min() <= loss <= losses.max():
        return None
    return float(shares[np.abs(losses - loss).argmin()])


def draw(choice: Mapping[str, Any], laws: Mapping[str, Law], file: Path) -> bool:
    """Draw what choose.json holds: on the left what was learned against what was forgotten, on the
    right each set over shares. False where matplotlib is missing, which is printed."""
    try:
        # Unlike pyplot, a Figure of its own needs no display.
        from matplotlib.figure import Figure
    except ImportError:
        print("Not drawn: this needs matplotlib: pip install -e '.[report]'", flush=True)
        return False
    new, before, budgets = choice["new"], choice["before"], choice["budgets"]
    left, right = Figure((12, 5), 120, layout="constrained").subplots(1, 2)
    shares = np.linspace(0, 1, 101)
    learned = [before[new] - laws[new].at(share) for share in shares]
    for number, (name, law) in enumerate(laws.items()):
        color, has_budget = f"C{number}", name in budgets
        rises = [law.at(share) - before[name] for share in shares]
        right.plot(shares, rises, color=color, label=name)
        if has_budget:
            left.plot(learned, rises, color=color, label=name)
            for axes in (left, right):
                axes.axhline(budgets[name], color=color, linestyle=":")
        for branch in choice["branches"]:
            losses, marker = branch["losses"], MARKERS[branch["of"]]
            rise = losses[name] - before[name]
            right.plot(branch["share"], rise, marker, color=color)
            if has_budget:
                place = (before[new] - losses[new], rise)
                left.plot(*place, marker, color=color)
                left.annotate(f" {branch['share']:g}", place)
    left.set(xlabel=f"Learned of {new}, nats a token", ylabel="Forgotten, nats a token")
    right.set(xlabel="Share of replay", ylabel="Nats a token above the loss before step 1")
    marks = f"squares: at a rate of {choice['second_lr']:g}; cross: the check; dotted: budgets"
    left.figure.suptitle(f"After {choice['steps']} steps at a rate of {choice['lr']:g}; {marks}")
    for axes in (left, right):
        axes.legend()
    left.figure.savefig(file)
    return True
