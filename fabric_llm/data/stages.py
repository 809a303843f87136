"""Where the stages of a mixture begin in a run of so many steps or epochs, and where it ends.
Nothing here imports torch."""

import math
from collections.abc import Sequence
from typing import NamedTuple, Optional

from fabric_llm.data.mixture_text import DataMix
from fabric_llm.data.periods import Stage, position_of, read_before


class Cursor(NamedTuple):
    """Where a run is, and its stages so far."""

    step: int = 0
    position: int = 0
    stages: tuple[Stage, ...] = ()


# The stages of a run, the position that it may not pass or None, and its last step.
LaidOut = tuple[tuple[Stage, ...], Optional[int], int]


def last_step(step: int, position: int, end: int, batch: int) -> int:
    """The step that ends at the position `end`, counted from where a run is. It may take less than
    a batch."""
    # Rounded down from below 0, which is up: what is left of a batch is a step as well.
    return step - (position - end) // batch


def lay_out(
    mix: DataMix,
    rows: Sequence[int],
    batch: int,
    max_step: Optional[int],
    number_epochs: int,
    here: Cursor = Cursor(),
    shortens: bool = False,
) -> LaidOut:
    """Where the stages of a mixture begin in a run, and where the run ends.

    The run has `max_step` steps or, if that is None, ends before a source would be read more than
    `number_epochs` times. A source with max_epochs may be read that often. rows: of each source's
    training split. Raises ValueError if in `max_step` steps a source would be read more often than
    its max_epochs, or if a stage has no step. shortens: the run ends before that instead.
    """
    # How many rows of each source the run may read, None for any number.
    limits: list[Optional[int]] = []
    # A limit of the source itself wins over --number_epochs, which --max_step replaces.
    for source, count in zip(mix.sources, rows):
        if source.max_epochs:
            limits.append(math.floor(source.max_epochs * count))
        else:
            limits.append(None if max_step else number_epochs * count)
    if max_step is None:
        laid_out = _until_read(mix, limits, batch, here)
    else:
        laid_out = _in_steps(mix, rows, limits, batch, max_step, here, shortens)
    # A run that was shortened on the way may well lose its later stages.
    if not shortens:
        _require_steps(mix, laid_out[2], here.step)
    return laid_out


def _require_steps(mix: DataMix, last: int, step: int) -> None:
    """Raises ValueError if a stage has no step in a run of `last` steps, of which `step` are
    done."""
    # Stages begin at fractions of the run, so a short run may round two to one step.
    begins = [round(stage.begins * last) for stage in mix.stages] + [last]
    for stage, first, after in zip(mix.stages, begins, begins[1:]):
        # A stage that is over needs no step any more.
        if first >= after and after > step:
            raise ValueError(
                f"--data_mix: the stage from {float(stage.begins):g} on has no step: it begins "
                f"after step {first} of {last}, and ends there."
            )


def _stages(mix: DataMix, max_step: int, batch: int, here: Cursor) -> tuple[Stage, ...]:
    """The stages so far, and those from here on."""
    # A stage that would begin here has read nothing yet, and is laid out anew below.
    stages = [old for old in here.stages if old.begins < here.position]
    begins = [round(stage.begins * max_step) for stage in mix.stages]
    for stage, first, after in zip(mix.stages, begins, [*begins[1:], math.inf]):
        if first >= after or after <= here.step:  # has no step, or is over
            continue
        # With the weights of the stage before it, it only continues that one.
        if not stages or stages[-1].weights != stage.weights:
            steps = max(first - here.step, 0)
            stages.append(Stage(here.position + steps * batch, stage.weights))
    return tuple(stages)


def _first_passed(
    stages: Sequence[Stage], limits: Sequence[Optional[int]]
) -> Optional[tuple[int, int]]:
    """(the first position at which a source would be read more often than it may, that source)."""
    passed = []
    for source, limit in enumerate(limits):
        # A source without a limit may be read for ever.
        if limit is not None:
            position = position_of(stages, source, limit)
            if position is not None:
                passed.append((position, source))
    return min(passed, default=None)


def _in_steps(
    mix: DataMix,
    rows: Sequence[int],
    limits: Sequence[Optional[int]],
    batch: int,
    max_step: int,
    here: Cursor,
    shortens: bool,
) -> LaidOut:
    """As `lay_out`, in `max_step` steps."""
    stages = _stages(mix, max_step, batch, here)
    passed = _first_passed(stages, limits)
    if passed is None:
        return stages, None, max_step
    end, source = passed
    # The position after --max_step steps.
    asked = here.position + (max_step - here.step) * batch
    if end >= asked:
        return stages, end, max_step
    if shortens:
        return stages, end, last_step(here.step, here.position, end, batch)
    would = read_before(stages, asked)[source]
    most = here.step + _steps_that_fit(mix, limits, batch, here, max_step - here.step)
    raise ValueError(
        f"Source {mix.names[source]!r} would be read {would / rows[source]:.2f} times in "
        f"{max_step} steps ({would:,} of {rows[source]:,} rows), more than its max_epochs, "
        f"{float(mix.sources[source].max_epochs):g}: take at most --max_step {most}, a smaller "
        "weight, or more data."
    )


def _steps_that_fit(
    mix: DataMix, limits: Sequence[Optional[int]], batch: int, here: Cursor, too_many: int
) -> int:
    """The most steps from here on, fewer than `too_many`, in which no source is read more often
    than it may.

    Stages begin at fractions of the run, so what is read depends on its length. Bisection finds
    the length.
    """
    fits = 0
    while too_many - fits > 1:
        steps = (fits + too_many) // 2
        passed = _first_passed(_stages(mix, here.step + steps, batch, here), limits)
        if passed is None or passed[0] >= here.position + steps * batch:
            fits = steps
        else:
            too_many = steps
    return fits


def _until_read(mix: DataMix, limits: Sequence[int], batch: int, here: Cursor) -> LaidOut:
    """As `lay_out`, with as many steps as fit, and one more with the rest of a batch."""
    # Without --max_step each source has a limit, and one of them is reached.
    too_many = (sum(limits) - here.position) // batch + 2
    fits = _steps_that_fit(mix, limits, batch, here, too_many)
    # One more step with a part of a batch, if rows are left for it.
    for steps in (fits + 1, fits):
        stages = _stages(mix, here.step + steps, batch, here)
        first, source = _first_passed(stages, limits)
        end = min(first, here.position + steps * batch)
        if end > here.position + (steps - 1) * batch:
            break
    if end <= here.position or here.step == 0 and fits == 0:
        raise ValueError(
            f"A step takes {batch} sequences, of which source {mix.names[source]!r} would give "
            f"more than the {limits[source]} that --number_epochs and max_epochs let it: take "
            "smaller batches, a smaller weight, or more data."
        )
    return stages, end, here.step + steps
