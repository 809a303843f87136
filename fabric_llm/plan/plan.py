"""`Plan`: what a run will do, step by step. make_plan.py makes it from the flags."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, Optional, Union

import torch
from torch import Tensor

from fabric_llm.checkpoint.keep import Progress, is_evaluated
from fabric_llm.data.columns import pads_before_text, shifts_labels
from fabric_llm.data.dataset import TokenDataset, fingerprint
from fabric_llm.data.mixture import Mixture
from fabric_llm.data.mixture_text import MAX_SLOTS, DataMix, at_least
from fabric_llm.data.order import drawn_from, sample
from fabric_llm.data.sources import COPY, ONE_SET, RETRIEVAL
from fabric_llm.data.token_bytes import bytes_are_lost
from fabric_llm.model import strategy as strategies
from fabric_llm.model.strategy_rules import Placement
from fabric_llm.plan.mixture import Cursor, last_step, lay_out

# largest share after a rewind: for strong shifts, up to a half is advised
MAX_REPLAY = Fraction(1, 2)
PROBE_TOKENS = 128  # of the validation split, at most


@dataclass(frozen=True)
class ModelPlan:
    """The model, and how it trains."""

    name: str  # --model_name, as given
    # hub name or directory that the weights and their config come from; of a resumed run its
    # checkpoint
    source: str
    config: Any  # transformers' configuration
    tokenizer: Optional[Any]
    precision: str
    bf16_updates: str
    float8: str  # none, tensorwise or rowwise
    rope: str  # what --rope has changed in the configuration, in a sentence, or ""
    sums_in_float32: bool  # gradients of bfloat16 weights, over micro-batches
    router_aux_loss_coef: float  # 0 where no auxiliary loss of a mixture of experts is trained
    loss: str  # full or chunked; "auto" until the reference is loaded
    activation_checkpointing: str  # none, full, every:N, selective or offload
    tiled_mlp: bool  # MLPs and norms take a part of the tokens at once
    compiles: bool  # each layer
    frozen: frozenset[str]  # names of the parameters that don't train, without those that never do
    config_file: Optional[str] = (
        None  # which a run began with; in the hub's cache its path holds name and commit
    )


@dataclass(frozen=True)
class DataPlan:
    """The data to train and to evaluate on."""

    # of a mixture: all its training splits, and the validation split of its first source
    dataset: TokenDataset
    eval_data: Mapping[str, TokenDataset]  # --eval_data
    evaluated_rows: int  # of each validation set, at most
    budgets: Mapping[str, float]  # --forgetting_budget: {validation set: nats}
    probes: Sequence[str]  # that are evaluated
    # token id that ends each packed document of `dataset`, None where they aren't kept apart
    document_end: Optional[int]
    # as given, or as in the resumed run; "auto": if the model can
    document_masking: Union[bool, str]
    sources: Mapping[str, TokenDataset] = field(default_factory=dict)  # of a mixture
    mix: Optional[DataMix] = None  # --data_mix
    # shares of sources that rewinds have raised
    raised: Mapping[str, Fraction] = field(default_factory=dict)
    mixture: Optional[Mixture] = None  # `mix` laid out over this run

    def pads_before_text(self) -> bool:
        """Whether rows that are read have padding before their text, which packed attention would
        take for text."""
        opened = [*(self.sources.values() or [self.dataset]), *self.eval_data.values()]
        return any(
            pads_before_text(split) for one in opened for split in (one.train, one.validation)
        )

    def ends_of_eval_data(self) -> dict[str, Optional[int]]:
        """{set of --eval_data: token id that ends its documents, None where they aren't kept
        apart}."""
        return {
            name: one.document_end if self.document_masking else None
            for name, one in self.eval_data.items()
        }

    def keeps_documents_apart(self) -> bool:
        """Whether there are documents that the model has to keep apart, in what it trains on or is
        evaluated on."""
        return {self.document_end, *self.ends_of_eval_data().values()} != {None}

    def without_masking(self) -> DataPlan:
        """The same for a model that doesn't keep documents apart."""
        return replace(self, document_end=None, document_masking=False)

    def of_each(self, fact: Callable[[TokenDataset], Any]) -> Any:
        """`fact` of the dataset, or of a mixture {source: fact of it}."""
        named = {name: fact(dataset) for name, dataset in self.sources.items()}
        return named or fact(self.dataset)


@dataclass(frozen=True)
class Schedule:
    """Which steps there are, of how many sequences."""

    micro_batch_size: int  # sequences per forward pass and device
    micro_batches: int  # per step and device
    global_batch_size: int  # sequences
    max_step: int
    # position that the run may not pass; None with --max_step, unless a source has max_epochs
    end: Optional[int]
    asked_steps: Optional[int]  # --max_step
    number_epochs: int  # times that the data may be read without --max_step


@dataclass(frozen=True)
class Plan:
    """What a run will do. A rewind and what is measured on the model make a new Plan."""

    placement: Placement
    model: ModelPlan
    data: DataPlan
    schedule: Schedule
    start: Progress
    run_directory: Path
    resume_from: Optional[Path]
    resumed: Mapping[str, Any] = field(default_factory=dict)  # progress.json of `resume_from`
    changes: Sequence[str] = ()  # what a resumed run changes on purpose, in sentences, on rank 0

    @property
    def has_checkpoint(self) -> bool:
        """Whether its own directory holds the checkpoint at which it starts: not of a new run, nor
        of a new branch."""
        return (
            self.resume_from is not None
            and self.resume_from.parent.resolve() == self.run_directory.resolve()
        )

    @property
    def begins_at(self) -> Optional[Progress]:
        """Where it resumes, None for a new run."""
        return None if self.resume_from is None else self.start

    @property
    def is_base_known(self) -> bool:
        """Whether it resumes with the losses before step 1.

        They are measured again at step 0, unless a rewind went back there.
        """
        return self.start.step > 0 or is_evaluated(self.resumed)

    @property
    def branch_point(self) -> Optional[Path]:
        """The checkpoint of another run at which this one began, or None: it began with a model."""
        if self.resume_from is not None and not self.has_checkpoint:
            return self.resume_from
        began = self.resumed.get("branch_of")
        return None if began is None else Path(began)

    @property
    def syncs_every_micro_batch(self) -> bool:
        """False if the gradients of a step are reduced over ranks only after its last
        micro-batch."""
        return strategies.syncs_every_micro_batch(
            self.placement.strategy, self.model.sums_in_float32
        )

    def is_over(self, progress: Progress) -> bool:
        """True once the last step is done."""
        return progress.step >= self.schedule.max_step or progress.position == self.schedule.end

    def after(self, progress: Progress) -> Progress:
        """Where the run is one step later: after a global batch, or the rest of the last epoch."""
        left = (
            self.schedule.global_batch_size
            if self.schedule.end is None
            else self.schedule.end - progress.position
        )
        return progress.advance(
            min(self.schedule.global_batch_size, left), self.context_at(progress.position)
        )

    def context_at(self, position: int) -> int:
        """Tokens of the sequences of the step that starts at `position`."""
        return (
            self.data.dataset.context_length
            if self.data.mixture is None
            else self.data.mixture.context_at(position)
        )

    @property
    def contexts(self) -> list[int]:
        """The lengths of the run's sequences, in tokens."""
        datasets = self.data.sources.values() or [self.data.dataset]
        return sorted({dataset.context_length for dataset in datasets})

    def row_lengths(self) -> list[int]:
        """The lengths of all rows that are trained on or evaluated, in tokens."""
        return sorted(
            {*self.contexts, *(dataset.context_length for dataset in self.data.eval_data.values())}
        )

    def end_of_run(self) -> int:
        """The position after the last step."""
        last = (
            self.start.position
            + (self.schedule.max_step - self.start.step) * self.schedule.global_batch_size
        )
        return last if self.schedule.end is None else min(last, self.schedule.end)

    def shifted_labels(self) -> list[str]:
        """The folders of datasets whose labels stand at the place before their tokens."""
        return [
            repr(str(one.folder))
            for one in self.datasets()
            if any(map(shifts_labels, (one.train, one.validation)))
        ]

    def datasets(self) -> list[Any]:
        """All that are read, those of --eval_data last."""
        return [*(self.data.sources.values() or [self.data.dataset]), *self.data.eval_data.values()]

    def validation_splits(self) -> dict[str, Any]:
        """What is evaluated, by name."""
        of_training = {name: source.validation for name, source in self.data.sources.items()}
        added = {name: dataset.validation for name, dataset in self.data.eval_data.items()}
        return {**(of_training or {ONE_SET: self.data.dataset.validation}), **added}

    def in_bytes(self) -> frozenset[str]:
        """Sets whose tokens stand for all of their text: others have no loss in bits per byte."""
        datasets = {**(self.data.sources or {ONE_SET: self.data.dataset}), **self.data.eval_data}
        return frozenset(
            name for name, dataset in datasets.items() if not bytes_are_lost(dataset.manifest)
        )

    def probes(self, left_out: Iterable[Optional[int]], seed: int) -> dict[str, Any]:
        """{probe: its rows} of those that are evaluated. left_out: ids of special tokens, which
        aren't drawn."""
        if not self.data.probes:
            return {}
        # A feature that is off isn't imported.
        from fabric_llm.data.probes import Questions, copy_probe

        split = self.validation_splits()[self._copied()]
        ids = [number for number in left_out if number is not None]
        made = {COPY: copy_probe, RETRIEVAL: Questions}
        return {name: made[name](split, self._longest(), ids, seed) for name in self.data.probes}

    def _longest(self) -> int:
        """Tokens of the longest row of text that is evaluated."""
        splits = self.validation_splits().values()
        return max(len(split[0]["input_ids"]) for split in splits if not hasattr(split, "answered"))

    def _copied(self) -> str:
        """The set from which probes take their tokens: the first that has a budget."""
        names = [
            name
            for name, split in self.validation_splits().items()
            if not hasattr(split, "answered")
        ]
        return next((name for name in self.data.budgets if name in names), names[0])

    def measured_on(self) -> dict[str, list[Any]]:
        """{set: what its loss is of}. Losses before and after a resume can be compared only if it
        is the same.

        That is its fingerprint and its evaluated rows; where these are a part, of how many; where
        it ends documents in its own way, how. So it differs from what older versions wrote, which
        read the first rows and saw such documents as one.
        """
        splits, end = self.validation_splits(), self.data.document_end
        found = {
            name: [fingerprint(split), *self._part_of(split)] for name, split in splits.items()
        }
        for name, own in self.data.ends_of_eval_data().items():
            found[name] += [f"documents end with {own}"] * (own not in (None, end))
        drawn, text = splits[self._copied()], found[self._copied()][:2]
        text += [f"tokens from all over {len(drawn)} rows"] * (len(drawn_from(drawn)) < len(drawn))
        return {
            **found,
            COPY: text,
            **({RETRIEVAL: [*text, self._longest()]} if RETRIEVAL in self.data.probes else {}),
        }

    def _part_of(self, split: Any) -> list[int]:
        """[rows that are evaluated], and behind it those of the whole split, if there are more."""
        count = len(sample(split, self.data.evaluated_rows))
        return [count] + [len(split)] * (count < len(split))

    def changed_eval_sets(self) -> frozenset[str]:
        """Sets whose losses before step 1 can't be compared, since they were of other rows."""
        then = self.resumed["measured_on"] if self.is_base_known else {}
        return frozenset(
            name for name, rows in self.measured_on().items() if then.get(name, rows) != rows
        )

    def shares_at(self, position: int) -> dict[str, float]:
        """{validation set: its weight in the common loss} after the step that leads to
        `position`."""
        return (
            {ONE_SET: 1.0}
            if self.data.mixture is None
            else self.data.mixture.shares_at(max(position - 1, 0))
        )

    def resolved(self) -> dict[str, Any]:
        """Flags that arguments.yaml holds in place of the given ones, so that other devices make
        the same steps."""
        return {
            "context_length": self.contexts[0] if len(self.contexts) == 1 else None,
            "global_batch_size": self.schedule.global_batch_size,
            "micro_batch_size": self.schedule.micro_batch_size,
            "gradient_accumulation_steps": None,
        }

    def probe_input(self) -> Tensor:
        """The first tokens of the validation split, int64 [1, up to PROBE_TOKENS]."""
        return torch.tensor(self.data.dataset.validation[0]["input_ids"]).long()[
            None, :PROBE_TOKENS
        ]

    def epochs(self) -> dict[str, float]:
        """{source: how often the run will have read it}, {} without a mixture."""
        if self.data.mixture is None:
            return {}
        return {
            name: read["epochs"]
            for name, read in self.data.mixture.read_before(self.end_of_run()).items()
        }

    def mixture_in_words(self) -> str:
        """The shares of the sources from here on, and how often each will be read, in a
        sentence."""
        said, stages = [], self.data.mixture.stages
        for stage, after in zip(stages, [*(one.begins for one in stages[1:]), math.inf]):
            if after <= self.start.position:
                continue
            shares = self.data.mixture.shares_at(stage.begins)
            words = ", ".join(f"{name} {100 * share:.6g} %" for name, share in shares.items())
            steps = max(stage.begins - self.start.position, 0) // self.schedule.global_batch_size
            said.append(f"{words} after step {self.start.step + steps}" if steps else words)
        read = ", ".join(f"{name} {count:.2f} times" for name, count in self.epochs().items())
        return f"Mixture: {'; '.join(said)}. At the end each source was read: {read}."

    def going_on_from(self, there: Progress) -> Plan:
        """The plan after a rewind to `there`. The rewind skips data, so fewer steps may be left.
        Stages begin at their steps."""
        if self.data.mixture is not None and self.schedule.asked_steps is not None:
            return self._laid_out(there, self.data.raised, shortens=True)
        if self.schedule.end is None:
            return self
        last = last_step(
            there.step, there.position, self.schedule.end, self.schedule.global_batch_size
        )
        return replace(
            self, schedule=replace(self.schedule, max_step=min(self.schedule.max_step, last))
        )

    def with_more_replay(self, names: Sequence[str], there: Progress) -> Plan:
        """The plan with twice the share of the sources `names` from `there` on; all that are raised
        have at most MAX_REPLAY.

        Raises ValueError if they have that share already, or would be read too often.
        """
        now = self.data.mixture.shares_at(max(there.position - 1, 0))
        shares = {
            name: 2 * Fraction(now.get(name, 0.0)).limit_denominator(MAX_SLOTS) for name in names
        }
        kept = {name: share for name, share in self.data.raised.items() if name not in names}
        room = MAX_REPLAY - sum(kept.values())
        if sum(shares.values()) >= 2 * room or not all(shares.values()):
            words = ", ".join(f"{name!r} is {now.get(name, 0.0):.4g}" for name in [*names, *kept])
            raise ValueError(
                f"the share of {words} already, and more than {float(MAX_REPLAY):g} isn't tried"
            )
        scale = min(Fraction(1), room / sum(shares.values()))
        return self._laid_out(
            there, {**kept, **{name: share * scale for name, share in shares.items()}}
        )

    def _laid_out(
        self, there: Progress, raised: Mapping[str, Fraction], shortens: bool = False
    ) -> Plan:
        """The plan from `there` on, with at least the shares `raised`. shortens: see `lay_out`."""
        schedule, mixture = self.schedule, self.data.mixture
        mix, here = (
            at_least(self.data.mix, raised, mixture.contexts),
            Cursor(there.step, there.position, mixture.stages),
        )
        steps = schedule.global_batch_size, schedule.asked_steps, schedule.number_epochs
        stages, end, last = lay_out(mix, mixture.rows, *steps, here, shortens)
        data = replace(self.data, raised=raised, mixture=replace(mixture, stages=stages))
        return replace(self, data=data, schedule=replace(schedule, end=end, max_step=last))
