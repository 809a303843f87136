"""What is due after a step: pure functions of where the run is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Optional

from fabric_llm.base.command_line import Flags
from fabric_llm.data.stages import read_before
from fabric_llm.training.schedule import arguments_of

if TYPE_CHECKING:  # they need torch
    from fabric_llm.checkpoint.progress import Progress
    from fabric_llm.plan.plan import Plan


@dataclass(frozen=True)
class Due:
    """What follows a step."""

    logs: bool
    evaluates: bool
    saves: bool
    is_last: bool


FIRST = Due(logs=False, evaluates=True, saves=True, is_last=False)  # where an evaluation comes before the first step


def at(before: Progress, progress: Progress, plan: Plan, flags: Flags) -> Due:
    """What follows the step from `before` to `progress`: at its interval, and at the last step everything.

    An evaluation is due in the middle and at the end of each epoch as well. What is saved or evaluated is also logged.
    """
    is_last = plan.is_over(progress)
    half_done = half_epochs(plan, progress.position) > half_epochs(plan, before.position)
    evaluates = is_last or half_done or _at(progress.step, flags.evaluation.eval_step_interval)
    saves = is_last or _at(progress.step, flags.save.save_step_interval)
    logs = saves or evaluates or before == plan.start or _at(progress.step, flags.logging.log_step_interval)
    return Due(logs, evaluates, saves, is_last)


def half_epochs(plan: Plan, position: int) -> int:
    """How many halves of an epoch are read before `position`; of a mixture, of the source that the run reads most rows of."""
    if plan.data.mixture is None:
        return 2 * position // len(plan.data.dataset.train)
    last, now = (read_before(plan.data.mixture.stages, at) for at in (plan.end_of_run(), position))
    source = last.index(max(last))
    return 2 * now[source] // plan.data.mixture.rows[source]


def evaluation_first(start: Progress, resumed: dict[str, Any]) -> bool:
    """True if an evaluation comes before the first step: of a new run, or the one that a request to stop cut off.

    resumed: progress.json of the checkpoint that the run resumes from, {} for a new run.
    """
    return start.step == 0 or bool(resumed.get("owes_evaluation"))


def schedule(training: Flags) -> dict[str, Any]:
    """The flags of the learning rate, as `lr_at` takes them."""
    return arguments_of(vars(training))


def _at(step: int, interval: Optional[int]) -> bool:
    return interval is not None and step % interval == 0
