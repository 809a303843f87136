"""Where each stage of a mixture begins in a run, and where the run ends. Nothing here imports
numpy."""

import math
from collections.abc import Sequence
from typing import NamedTuple, Optional

from fabric_llm.data.mixture_text import DataMix, Stage, position_of, read_before


class Cursor(NamedTuple):
    """Where a run is, and its stages so far."""

    step: int = 0
    position: int = 0
    stages: tuple[Stage, ...] = ()


def last_step(step: int, position: int, end: int, batch: int) -> int:
    """The step that ends at the position `end`, counted from where a run is. It may take less than
    a batch."""
    return step - (position - end) // batch


def lay_out(
    mix: DataMix,
    rows: Sequence[int],
    batch: int,
    max_step: Optional[int],
    number_epochs: int,
    here: Cursor = Cursor(),
    shortens: bool = False,
) -> tuple[tuple[Stage, ...], Optional[int], int]:
    """(the stages of a run, the position that it may not pass or None, its last step).

    The run has `max_step` steps or, if that is None, ends before a source would be read more than
    `number_epochs` times. A source with max_epochs may be read that often. rows: of each source's
    training split. Raises ValueError if in `max_step` steps a source would be read more often than
    its max_epochs, or if a stage has no step; shortens: the run ends before instead.
    """
    limits = [
        math.floor(source.max_epochs * count)
        if source.max_epochs
        else None
        if max_step
        else number_epochs * count
        for source, count in zip(mix.sources, rows)
    ]
    if max_step is None:
        stages, end, last = _until_read(mix, limits, batch, here)
    else:
        stages, end, last = _stages(mix, max_step, batch, here), None, max_step
        asked = here.position + (max_step - here.step) * batch
        if (passed := _first_passed(stages, limits)) is not None:
            end, source = passed
            if end < asked and shortens:
                last = last_step(here.step, here.position, end, batch)
            elif end < asked:
                would = read_before(stages, asked)[source]
                raise ValueError(
                    f"Source {mix.names[source]!r} would be read {would / rows[source]:.2f} times "
                    f"in {max_step} steps "
                    f"({would:,} of {rows[source]:,} rows), more than its max_epochs, "
                    f"{float(mix.sources[source].max_epochs):g}: take at most --max_step "
                    f"{here.step + (end - here.position) // batch}, a smaller weight, or more data."
                )
    begins = [round(stage.begins * last) for stage in mix.stages] + [last]
    for stage, first, after in zip(mix.stages, begins, begins[1:]) if not shortens else ():
        if first >= after and after > here.step:
            raise ValueError(
                f"--data_mix: the stage from {float(stage.begins):g} on has no step: it begins "
                f"after step {first} of {last}, and ends there."
            )
    return stages, end, last


def _stages(mix: DataMix, max_step: int, batch: int, here: Cursor) -> tuple[Stage, ...]:
    """The stages so far, and those from here on. A stage with the weights of the one before it only
    continues it."""
    added = (0,) * (len(mix.sources) - len(here.stages[0].weights)) if here.stages else ()
    found = [
        Stage(old.begins, old.weights + added) for old in here.stages if old.begins < here.position
    ]
    begins = [round(stage.begins * max_step) for stage in mix.stages]
    for stage, first, after in zip(mix.stages, begins, [*begins[1:], math.inf]):
        if (
            first < after
            and after > here.step
            and not (found and found[-1].weights == stage.weights)
        ):
            found.append(Stage(here.position + max(first - here.step, 0) * batch, stage.weights))
    return tuple(found)


def _first_passed(
    stages: Sequence[Stage], limits: Sequence[Optional[int]]
) -> Optional[tuple[int, int]]:
    """(the first position at which a source would be read more often than it may, that source)."""
    found = [
        (position_of(stages, i, limit), i) for i, limit in enumerate(limits) if limit is not None
    ]
    return min(((position, i) for position, i in found if position is not None), default=None)


def _until_read(
    mix: DataMix, limits: Sequence[int], batch: int, here: Cursor
) -> tuple[tuple[Stage, ...], Optional[int], int]:
    """As `lay_out`, with as many steps as fit, and one more with the rest of a batch.

    Stages begin at parts of the run, so what is read depends on its length, which is found by
    bisection.
    """
    fits, too_many = 0, (sum(limits) - here.position) // batch + 2  # steps from here on
    while too_many - fits > 1:
        steps = (fits + too_many) // 2
        end, _ = _first_passed(_stages(mix, here.step + steps, batch, here), limits)
        fits, too_many = (
            (steps, too_many) if end >= here.position + steps * batch else (fits, steps)
        )
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
