"""`Schedule`: which steps a run makes, and which rows they read. Nothing here imports torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NamedTuple, Optional

from fabric_llm.base.command_line import Flags
from fabric_llm.checkpoint.keep import Progress
from fabric_llm.data.mixture import Mixture, mixture_of
from fabric_llm.data.mixture_text import MAX_SLOTS, DataMix, at_least, described, require_one_length
from fabric_llm.data.periods import ENDLESS, Stage, position_of, read_before
from fabric_llm.training.forgetting import hard_budgets, parse_bounds, parse_budgets

if TYPE_CHECKING:
    from fabric_llm.data.dataset import TokenDataset

# The largest share of a source after rewinds. For strong shifts, up to a half is advised.
MAX_REPLAY = Fraction(1, 2)
# Steered shares are read as whole numbers of rows in so many, so that periods are short, and are
# kept as fractions of at most so many.
FINEST, MAX_DENOMINATOR = 200, 10**6


@dataclass(frozen=True)
class Schedule:
    """The steps of a run from `start` on. The run has one at a time; a rewind gives it the next."""

    start: Progress  # where this process begins
    micro_batch_size: int  # sequences per forward pass and device
    micro_batches: int  # per step and device
    global_batch_size: int  # sequences per step
    asked_steps: Optional[int]  # --max_step
    number_epochs: int  # how often the data may be read without --max_step
    mix: DataMix  # the sources and their shares, as the flags ask for them
    mixture: Mixture  # `mix` laid out over the run
    max_step: int
    # The position that the run may not pass. None with --max_step, unless a source has max_epochs.
    end: Optional[int]
    # Shares that rewinds have raised, or, if it `steers`, that evaluations have set, not rounded.
    raised: Mapping[str, Fraction] = field(default_factory=dict)
    steers: bool = False  # --forgetting_action steer
    # Where a rewind went back to or shares were set, None: nowhere since `start`.
    here: Optional[Progress] = None

    def is_over(self, progress: Progress) -> bool:
        """True once the last step is done."""
        return progress.step >= self.max_step or progress.position == self.end

    def after(self, progress: Progress) -> Progress:
        """Where the run is one step later: after a global batch, or the rest of the last epoch."""
        sequences = self.global_batch_size
        # The last step of the data may take less than a batch.
        if self.end is not None:
            sequences = min(sequences, self.end - progress.position)
        # Stages begin where steps do, so all rows of a step are equally long.
        return progress.advance(sequences, self.mixture.context_at(progress.position))

    def end_of_run(self) -> int:
        """The position after the last step."""
        # A rewind takes steps back, but not positions.
        here = self.here or self.start
        last = here.position + (self.max_step - here.step) * self.global_batch_size
        return last if self.end is None else min(last, self.end)

    def half_epochs(self, position: int) -> int:
        """Half epochs before `position`, of the source of which the run reads most rows."""
        stages = self.mixture.stages
        of_run = read_before(stages, self.end_of_run())
        source = of_run.index(max(of_run))
        return 2 * read_before(stages, position)[source] // self.mixture.rows[source]

    def shares_at(self, position: int) -> dict[str, float]:
        """{validation set: its weight in the common loss} after the step to `position`."""
        # The last sequence of that step stands one before `position`.
        return self.mixture.shares_at(max(position - 1, 0))

    def epochs(self) -> dict[str, float]:
        """{source: how often the run will have read it}, {} without --data_mix."""
        read = self.mixture.read_before(self.end_of_run())
        return {name: of_source["epochs"] for name, of_source in read.items()}

    def in_words(self) -> str:
        """A sentence with the shares of the sources from here on, and how often each is read."""
        parts, stages = [], self.mixture.stages
        # A stage lasts until the next one begins, the last one without end.
        for stage, after in zip(stages, [*(one.begins for one in stages[1:]), math.inf]):
            if after <= self.start.position:
                continue
            shares = self.mixture.shares_at(stage.begins)
            words = ", ".join(f"{name} {100 * share:.6g} %" for name, share in shares.items())
            steps = max(stage.begins - self.start.position, 0) // self.global_batch_size
            if steps:
                words += f" after step {self.start.step + steps}"
            parts.append(words)
        read = ", ".join(f"{name} {count:.2f} times" for name, count in self.epochs().items())
        return f"Mixture: {'; '.join(parts)}. At these shares the run reads {read}."

    def after_rewind(self, there: Progress) -> Schedule:
        """The schedule after a rewind to `there`."""
        # With --max_step the run keeps its steps, and stages begin at theirs. Without it the data
        # that the rewind skips leave fewer steps.
        if self.asked_steps is not None:
            return self._laid_out(there, self.raised, shortens=True)
        last = last_step(there.step, there.position, self.end, self.global_batch_size)
        return replace(self, max_step=min(self.max_step, last), here=there)

    def with_more_replay(self, names: Iterable[str], there: Progress) -> Schedule:
        """The schedule after a rewind to `there`, with twice the share of the sources `names`.

        All raised sources together have at most MAX_REPLAY. Raises ValueError if they have that
        much already, or would be read too often.
        """
        # A share is a fraction of at most MAX_SLOTS slots, which a float only approximates.
        now = self.shares_at(there.position)
        doubled = {
            name: 2 * Fraction(now.get(name, 0.0)).limit_denominator(MAX_SLOTS) for name in names
        }
        for name, share in doubled.items():
            if not share:
                raise ValueError(f"the stage that is running reads none of {name!r}")
        # What earlier rewinds have raised stays raised.
        kept = {name: share for name, share in self.raised.items() if name not in doubled}
        room = MAX_REPLAY - sum(kept.values())
        if sum(doubled.values()) >= 2 * room:
            words = ", ".join(f"{name!r} is {now.get(name, 0.0):.4g}" for name in [*doubled, *kept])
            raise ValueError(
                f"the share of {words} already, and more than {float(MAX_REPLAY):g} isn't tried"
            )
        # Sources that don't fit into the room together get equal fractions of what they ask for.
        scale = min(Fraction(1), room / sum(doubled.values()))
        scaled = {name: share * scale for name, share in doubled.items()}
        return self._laid_out(there, {**kept, **scaled})

    def steered(
        self, shares: Mapping[str, float], bounds: tuple[Fraction, Fraction], there: Progress
    ) -> Schedule:
        """The schedule from `there` on with these shares of some sources.

        bounds: the least of each of them, and the most of all together.
        """
        least, most = bounds
        above, room = {}, most - least * len(shares)
        for name, share in shares.items():
            asked = Fraction(share).limit_denominator(MAX_DENOMINATOR)
            above[name] = max(Fraction(0), min(room, asked - least))
        # What all ask for above the least is scaled to the room.
        # The divisor isn't 0 where none of them asks for more.
        scale = min(Fraction(1), room / max(sum(above.values()), Fraction(1, FINEST)))
        within = {name: least + share * scale for name, share in above.items()}
        # Sources of a later stage with rows of another length keep what they have.
        return self._laid_out(there, {**self.raised, **within})

    def shares_to_steer(self, position: int) -> dict[str, float]:
        """The shares at `position` that `steered` would change. What it has set before isn't
        rounded, so that small changes add up."""
        shares = self.mixture.fitting(position)
        for name, asked in self.raised.items():
            if abs(float(asked) - shares.get(name, math.inf)) < 1 / FINEST:
                shares[name] = float(asked)
        return shares

    def _laid_out(
        self, there: Progress, raised: Mapping[str, Fraction], shortens: bool = False
    ) -> Schedule:
        """The schedule from `there` on, with at least the shares `raised`. shortens: see
        `lay_out`."""
        mixture = self.mixture
        stages, end, max_step = lay_out(
            _with_shares(self.mix, raised, mixture.contexts, self.steers),
            mixture.rows,
            self.global_batch_size,
            self.asked_steps,
            self.number_epochs,
            Cursor(there.step, there.position, mixture.stages),
            shortens,
        )
        mixture = replace(mixture, stages=stages)
        return replace(self, mixture=mixture, end=end, max_step=max_step, raised=raised, here=there)


def _with_shares(
    mix: DataMix, raised: Mapping[str, Fraction], contexts: Sequence[int], steers: bool
) -> DataMix:
    """The mixture with at least the shares `raised`. One that steers has these, rounded down so
    that their sum is as well: it stays in its bounds."""
    if steers:
        total, below, rounded = Fraction(0), 0, {}
        for name, share in raised.items():
            total += share
            upto = math.floor(total * FINEST)
            rounded[name] = Fraction(upto - below, FINEST)
            below = upto
        raised = rounded
    return at_least(mix, raised, contexts, exactly=steers)


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


def plan_schedule(
    flags: Flags,
    batches: tuple[int, int, int],
    sources: Mapping[str, TokenDataset],
    mix: DataMix,
    resumed: dict[str, Any],
) -> Schedule:
    """The steps of a run. Raises ValueError. batches: see `batch_sizes`."""
    training, is_named, batch = flags.training, bool(flags.data.data_mix), batches[2]
    # Of each source, in the order of the mixture.
    rows = tuple(len(source.train) for source in sources.values())
    contexts = tuple(source.context_length for source in sources.values())
    # Without --data_mix there is one source.
    if not is_named and batch > rows[0]:
        [dataset] = sources.values()
        raise ValueError(
            f"A step takes {batch} sequences, but the training split of {dataset.given!r} "
            f"has {rows[0]}."
        )
    # A stream isn't mixed, so it is the first and only source.
    if training.max_step is None and rows[0] == ENDLESS:
        [dataset] = sources.values()
        raise ValueError(f"{dataset.given!r} is a stream, which has no end: give --max_step.")
    require_one_length(mix, contexts)
    # A new run starts at step 0.
    start = Progress(**resumed["progress"]) if resumed else Progress()
    length = training.max_step, training.number_epochs
    # None also for a run without --data_mix: then the one source is laid out anew.
    before = resumed.get("mixture") if is_named else None
    steers = flags.evaluation.forgetting_action == "steer"
    if before is None:
        raised = _shares_of_hard_budgets(flags, mix)
        begun = at_least(mix, raised, contexts, exactly=True)
        stages, end, _ = lay_out(begun, rows, batch, *length)
    else:
        # Fractions are stored as text, because a float would round them.
        raised = {name: Fraction(share) for name, share in before.get("raised", {}).items()}
        # Sources that are new have no weight in the stages so far.
        stages = tuple(
            stage._replace(weights=stage.weights + (0,) * (len(mix.names) - len(stage.weights)))
            for stage in mixture_of(resumed).stages
        )
        end = before["end"]
        # Other shares are asked for: those that a rewind or steering had chosen give way.
        if described(mix) != resumed["schedule"]["data_mix"]:
            raised = _shares_of_hard_budgets(flags, mix)
        if not _is_laid_out_as_before(flags, mix, batch, resumed["schedule"]):
            # Changed on purpose: the stages before this step stay.
            here = Cursor(start.step, start.position, stages)
            more = _with_shares(mix, raised, contexts, steers)
            stages, end, _ = lay_out(more, rows, batch, *length, here)
    # Rewinds have skipped data, so the steps that are left are counted from here.
    last = [] if end is None else [last_step(start.step, start.position, end, batch)]
    if training.max_step is not None:
        last.append(training.max_step)
    mixture = Mixture(mix.names, rows, contexts, stages, training.seed, is_named)
    # The run ends at the data's end or after --max_step, whichever comes first.
    return Schedule(start, *batches, *length, mix, mixture, min(last), end, raised, steers)


def _shares_of_hard_budgets(flags: Flags, mix: DataMix) -> dict[str, Fraction]:
    """The shares of all steered sources with which a run begins, if it has a budget that holds at
    every evaluation: those that answer for it have the largest that steering may reach, from which
    it lowers them. {} without such a budget."""
    given = flags.evaluation.forgetting_budget
    hard = hard_budgets(given)
    if not hard:
        return {}
    weights = mix.stages[0].weights
    first = {name: Fraction(weight, sum(weights)) for name, weight in zip(mix.names, weights)}
    shares = {name: first[name] for name in parse_budgets(given) if name in mix.names}
    # All of them answer for a set that is no source.
    answer = [name for name in shares if name in hard or not hard <= shares.keys()]
    of_others = sum(share for name, share in shares.items() if name not in answer)
    room = parse_bounds(flags.evaluation.steer_bounds)[1] - of_others
    for name in answer:
        shares[name] = max(shares[name], room / len(answer))
    return shares


def _is_laid_out_as_before(flags: Flags, mix: DataMix, batch: int, then: Mapping[str, Any]) -> bool:
    """Whether the flags ask for the stages that a resumed run had. then: its flags."""
    training = flags.training
    if (described(mix), batch) != (then.get("data_mix"), then["global_batch_size"]):
        return False
    # Stages begin at fractions of a run, so another length moves them.
    if training.max_step is not None:
        return training.max_step == then["max_step"]
    return then["max_step"] is None and training.number_epochs == then["number_epochs"]
