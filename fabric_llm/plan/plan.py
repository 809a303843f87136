"""`Plan`: what a run will do. make_plan.py makes it from the flags."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Optional, Union

import torch
from torch import Tensor

from fabric_llm.checkpoint.keep import Progress, is_evaluated
from fabric_llm.data.columns import pads_before_text, shifts_labels
from fabric_llm.data.dataset import TokenDataset, concatenate, fingerprint
from fabric_llm.data.order import sample
from fabric_llm.data.probes import Questions, copy_probe, drawn_from
from fabric_llm.data.sources import COPY, RETRIEVAL
from fabric_llm.data.token_bytes import bytes_are_lost
from fabric_llm.model import strategy as strategies
from fabric_llm.model.strategy_rules import Placement
from fabric_llm.plan.schedule import Schedule

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

    # What is trained on, by name. Without --data_mix it is one dataset, by the name ONE_SET.
    sources: Mapping[str, TokenDataset]
    eval_data: Mapping[str, TokenDataset]  # --eval_data
    evaluated_rows: int  # of each validation set, at most
    budgets: Mapping[str, float]  # --forgetting_budget: {validation set: nats}
    probes: Sequence[str]  # that are evaluated
    # token id that ends each packed document of `dataset`, None where they aren't kept apart
    document_end: Optional[int]
    # as given, or as in the resumed run; "auto": if the model can
    document_masking: Union[bool, str]

    @cached_property
    def dataset(self) -> TokenDataset:
        """The training splits of all sources, and the validation split of the first."""
        return concatenate(list(self.sources.values()))

    @property
    def opened(self) -> list[TokenDataset]:
        """All datasets that are read, those of --eval_data last."""
        return [*self.sources.values(), *self.eval_data.values()]

    def pads_before_text(self) -> bool:
        """Whether rows that are read have padding before their text, which packed attention would
        take for text."""
        return any(
            pads_before_text(split) for one in self.opened for split in (one.train, one.validation)
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


@dataclass(frozen=True)
class Plan:
    """What a run will do."""

    placement: Placement
    model: ModelPlan
    data: DataPlan
    schedule: Schedule  # with which it begins; a rewind gives the run another one
    run_directory: Path
    resume_from: Optional[Path]
    resumed: Mapping[str, Any] = field(default_factory=dict)  # progress.json of `resume_from`
    changes: Sequence[str] = ()  # what a resumed run changes on purpose, in sentences, on rank 0

    def completed(self, attention: str, loss: str, keeps_documents_apart: bool) -> Plan:
        """The plan with what was measured on the model, which the flags leave open. It is completed
        before there is a run, which never has another one."""
        config = deepcopy(self.model.config)
        config._attn_implementation = attention
        data = self.data
        if not keeps_documents_apart:
            data = replace(data, document_end=None, document_masking=False)
        return replace(self, model=replace(self.model, config=config, loss=loss), data=data)

    @property
    def start(self) -> Progress:
        """Where it begins or resumes."""
        return self.schedule.start

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

    @property
    def contexts(self) -> list[int]:
        """The lengths of the run's sequences, in tokens."""
        return sorted({dataset.context_length for dataset in self.data.sources.values()})

    def row_lengths(self) -> list[int]:
        """The lengths of all rows that are trained on or evaluated, in tokens."""
        return sorted({dataset.context_length for dataset in self.data.opened})

    def shifted_labels(self) -> list[str]:
        """The folders of datasets whose labels stand at the place before their tokens."""
        return [
            repr(str(one.folder))
            for one in self.data.opened
            if any(map(shifts_labels, (one.train, one.validation)))
        ]

    def of_each_source(self, fact: Callable[[TokenDataset], Any]) -> Any:
        """{source: `fact` of it} with --data_mix, without it `fact` of the dataset."""
        facts = {name: fact(dataset) for name, dataset in self.data.sources.items()}
        if self.schedule.mixture.is_named:
            return facts
        [of_dataset] = facts.values()
        return of_dataset

    def validation_splits(self) -> dict[str, Any]:
        """What is evaluated, by name."""
        datasets = {**self.data.sources, **self.data.eval_data}
        return {name: dataset.validation for name, dataset in datasets.items()}

    def in_bytes(self) -> frozenset[str]:
        """Sets whose tokens stand for all of their text: others have no loss in bits per byte."""
        datasets = {**self.data.sources, **self.data.eval_data}
        return frozenset(
            name for name, dataset in datasets.items() if not bytes_are_lost(dataset.manifest)
        )

    def probes(self, left_out: Iterable[Optional[int]], seed: int) -> dict[str, Any]:
        """{probe: its rows} of those that are evaluated. left_out: ids of special tokens, which
        aren't drawn."""
        split, ids = (
            self.validation_splits()[self._copied()],
            [number for number in left_out if number is not None],
        )
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
