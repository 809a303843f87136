"""`Schedule`: which steps a run makes, and which rows they read. Nothing here imports torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Optional

from fabric_llm.base.flag import Flags
from fabric_llm.checkpoint.keep import Progress
from fabric_llm.data.mixture import Mixture, mixture_of
from fabric_llm.data.mixture_text import MAX_SLOTS, DataMix, at_least, described, require_one_length
from fabric_llm.data.periods import ENDLESS, read_before
from fabric_llm.data.stages import Cursor, last_step, lay_out
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
