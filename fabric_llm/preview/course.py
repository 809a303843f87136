"""The course of a planned run, step by step, by the functions that the run itself goes by."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fabric_llm.base.command_line import Flags
from fabric_llm.checkpoint.progress import Progress
from fabric_llm.plan.plan import Plan
from fabric_llm.report.reading import Columns, Series
from fabric_llm.run import due
from fabric_llm.training.schedule import lr_at

MOST_POINTS = 4000  # of shares and epochs, which change slowly


@dataclass
class Course:
    """A planned run over its steps."""

    last: Progress
    tokens: Series
    lr: Series
    shares: dict[str, Series] = field(default_factory=dict)  # of the sequences, 0 where a source isn't read
    epochs: dict[str, Series] = field(default_factory=dict)
    stages: list[tuple[int, dict[str, float]]] = field(default_factory=list)  # (finished steps, shares)
    saves: list[int] = field(default_factory=list)
    evaluations: list[int] = field(default_factory=list)


def course(plan: Plan, flags: Flags) -> Course:
    """What the run of `plan` will do. The learning rate at step N is that of the update that leads to it."""
    columns, schedule = Columns(), due.schedule(flags.training)
    saves, evaluations, stages = [], [], []
    if due.evaluation_first(plan.start, plan.resumed):
        evaluations.append(plan.start.step)
    every = max(1, (plan.max_step - plan.start.step) // MOST_POINTS)
    progress = plan.start
    while not plan.is_over(progress):
        before, progress = progress, plan.after(progress)
        follows = due.at(before, progress, plan, flags)
        saves += [progress.step] * follows.saves
        evaluations += [progress.step] * follows.evaluates
        columns.add("lr", progress.step, lr_at(before.step, max_step=plan.max_step, **schedule))
        columns.add("tokens", progress.step, progress.tokens)
        if plan.mixture is None:
            continue
        shares = plan.mixture.shares_at(before.position)
        changes = not stages or stages[-1][1] != shares
        stages += [(before.step, shares)] * changes
        if changes or progress.step % every == 0 or plan.is_over(progress):
            _add_sources(columns, plan, before, progress, shares)
    found = columns.series()
    return Course(
        progress,
        found["tokens"],
        found["lr"],
        *({name: series for (key, name), series in _pairs(found) if key == kind} for kind in ("share", "epochs")),
        stages=stages,
        saves=saves,
        evaluations=evaluations if flags.evaluation.eval_iters else [],
    )


def _add_sources(columns: Columns, plan: Plan, before: Progress, progress: Progress, shares: dict[str, float]) -> None:
    """Shares of the step from `before` to `progress`, and what was read of each source by then."""
    for name, read in plan.mixture.read_before(progress.position).items():
        columns.add(("share", name), before.step, shares.get(name, 0.0))
        if plan.is_over(progress):
            columns.add(("share", name), progress.step, shares.get(name, 0.0))
        columns.add(("epochs", name), progress.step, read["epochs"])


def _pairs(found: dict[Any, Series]) -> list[tuple[tuple[str, str], Series]]:
    return [(key, series) for key, series in found.items() if isinstance(key, tuple)]


def at_most(steps: list[int], most: int) -> list[int]:
    """`steps`, or so many of them, the first and the last included."""
    if len(steps) <= most:
        return steps
    return [steps[i] for i in np.linspace(0, len(steps) - 1, most).astype(int)]
