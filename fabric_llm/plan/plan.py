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

from fabric_llm.base.files import MANIFEST, sha256
from fabric_llm.checkpoint.keep import Progress, is_evaluated
from fabric_llm.data.columns import pads_before_text, shifts_labels
from fabric_llm.data.dataset import TokenDataset, concatenate, fingerprint
from fabric_llm.data.order import drawn_from, sample
from fabric_llm.data.periods import COPY, LONGEST_PASSAGE, RETRIEVAL
from fabric_llm.data.token_bytes import bytes_are_lost
from fabric_llm.model import strategy as strategies
from fabric_llm.model.strategy_rules import Placement
from fabric_llm.model.tokenizer import identity
from fabric_llm.plan.schedule import Schedule

PROBE_TOKENS = 128  # of the validation split, at most


@dataclass(frozen=True)
class ModelPlan:
    """The model, and how it trains."""

    name: str  # --model_name, as given
    # Hub name or directory with the weights and their configuration; a resumed run's checkpoint.
    source: str
    config: Any  # transformers' configuration
    tokenizer: Optional[Any]
    precision: str
    bf16_updates: str
    float8: str  # none, tensorwise or rowwise
    rope: str  # what --rope has changed in the configuration, in a sentence, or ""
    sums_in_float32: bool  # gradients of bfloat16 weights, over micro-batches
    router_aux_loss_coef: float  # 0 where no auxiliary loss of a mixture of experts is trained
    loss: str  # full or chunked; "auto" until it is measured which one the model can have
    activation_checkpointing: str  # none, full, every:N, selective or offload
    tiled_mlp: bool  # MLPs and norms are computed for some of the tokens at a time
    compiles: bool  # each layer
    frozen: frozenset[str]  # names of the parameters that don't train, without those that never do
    # The file with which the run began. In the hub's cache its path holds name and commit.
    config_file: Optional[str] = None


@dataclass(frozen=True)
class DataPlan:
    """The data to train and to evaluate on."""

    # What is trained on, by name. Without --data_mix it is one dataset, by the name ONE_SET.
    sources: Mapping[str, TokenDataset]
    eval_data: Mapping[str, TokenDataset]  # --eval_data
    evaluated_rows: int  # of each validation set, at most
    budgets: Mapping[str, float]  # --forgetting_budget: {validation set: nats}
    probes: Sequence[str]  # names of those that are evaluated
    # The token id that ends each packed document of `sources`. None: they aren't kept apart.
    document_end: Optional[int]
    # As given, or as in the resumed run. "auto", which is true, until it is measured whether the
    # model keeps documents apart.
    document_masking: Union[bool, str]

    @cached_property
    def dataset(self) -> TokenDataset:
        """The training splits of all sources, and the validation split of the first."""
        first, *others = self.sources.values()
        return concatenate([first, *others]) if others else first

    @property
    def datasets(self) -> dict[str, TokenDataset]:
        """All datasets that are read, by name, those of --eval_data last."""
        return {**self.sources, **self.eval_data}

    @property
    def opened(self) -> list[TokenDataset]:
        """All datasets that are read, those of --eval_data last."""
        return list(self.datasets.values())

    def pads_before_text(self) -> bool:
        """Whether some rows have padding before their text, which packed attention would take for
        text."""
        return any(
            pads_before_text(split) for one in self.opened for split in (one.train, one.validation)
        )

    def ends_of_eval_data(self) -> dict[str, Optional[int]]:
        """{set of --eval_data: the token id that ends its documents; None: they aren't kept
        apart}."""
        if not self.document_masking:
            return dict.fromkeys(self.eval_data)
        return {name: one.document_end for name, one in self.eval_data.items()}

    def keeps_documents_apart(self) -> bool:
        """Whether the model must keep documents apart in any of the data."""
        # One set that does is enough.
        return {self.document_end, *self.ends_of_eval_data().values()} != {None}

    @property
    def contexts(self) -> list[int]:
        """The lengths of the run's sequences, in tokens."""
        return sorted({dataset.context_length for dataset in self.sources.values()})

    def row_lengths(self) -> list[int]:
        """The lengths of all rows that are trained on or evaluated, in tokens."""
        return sorted({dataset.context_length for dataset in self.opened})

    def shifted_labels(self) -> list[str]:
        """The folders of datasets whose labels stand one place before their tokens."""
        return [
            repr(one.given)
            for one in self.opened
            if shifts_labels(one.train) or shifts_labels(one.validation)
        ]

    def validation_splits(self) -> dict[str, Any]:
        """What is evaluated, by name."""
        return {name: dataset.validation for name, dataset in self.datasets.items()}

    def in_bytes(self) -> frozenset[str]:
        """The sets with a loss in bits per byte: their tokens stand for all of their text."""
        return frozenset(
            name for name, one in self.datasets.items() if not bytes_are_lost(one.manifest)
        )

    def probe_rows(self, left_out: Iterable[Optional[int]], seed: int) -> dict[str, Any]:
        """{probe: its rows} of the probes that are evaluated. left_out: ids of special tokens,
        which aren't drawn."""
        if not self.probes:
            return {}
        # A feature that is off isn't imported.
        from fabric_llm.data.probes import Questions, copy_probe

        # Probes are made of tokens that are evaluated anyway, so they need no data of their own.
        split = self.validation_splits()[self._copied()]
        ids = [number for number in left_out if number is not None]
        made = {COPY: copy_probe, RETRIEVAL: Questions}
        return {name: made[name](split, self._longest(), ids, seed) for name in self.probes}

    def _texts(self) -> dict[str, Any]:
        """Those of the validation splits that are text and not questions, by name."""
        splits = self.validation_splits().items()
        return {name: split for name, split in splits if not hasattr(split, "answered")}

    def evaluated_tokens(self) -> dict[str, int]:
        """{set of text: how many tokens of it are evaluated}."""
        return {
            name: len(sample(split, self.evaluated_rows)) * len(split[0]["input_ids"])
            for name, split in self._texts().items()
        }

    def _longest(self) -> int:
        """Tokens of the longest row of text that is evaluated."""
        return max(len(split[0]["input_ids"]) for split in self._texts().values())

    def _copied(self) -> str:
        """The set from which probes take their tokens: the first one that has a budget, or else the
        first one."""
        names = list(self._texts())
        return next((name for name in self.budgets if name in names), names[0])

    def measured_on(self) -> dict[str, list[Any]]:
        """{set: what its loss is of}. Losses before and after a resume can be compared only where
        this is the same.

        It is the fingerprint of the set and its evaluated rows; of how many rows, if some aren't
        evaluated; and the token that ends its documents, if that is its own, or that they are seen
        as one text. Older versions, which read the first rows and didn't keep such documents apart,
        wrote something else.
        """
        facts: dict[str, list[Any]] = {}
        splits, ends = self.validation_splits(), self.ends_of_eval_data()
        # The number of evaluated rows and the fingerprint tell which rows these are.
        for name, split in splits.items():
            evaluated = len(sample(split, self.evaluated_rows))
            facts[name] = [fingerprint(split), evaluated]
            if self.datasets[name].document_end is not None and not self.document_masking:
                facts[name][0] += ", documents as one text"
            if evaluated < len(split):
                facts[name].append(len(split))
            if ends.get(name) not in (None, self.document_end):
                facts[name].append(f"documents end with {ends[name]}")
        if not self.probes:
            return facts
        # A probe is compared only if the set that it takes its tokens from is the same.
        copied = splits[self._copied()]
        tokens = [fingerprint(copied), len(sample(copied, self.evaluated_rows))]
        if len(drawn_from(copied)) < len(copied):
            tokens.append(f"tokens from all over {len(copied)} rows")
        facts |= {name: [*tokens] for name in self.probes}
        # A copied passage is half as long as a row, and longer with a set of longer rows.
        copied_tokens = min(self._longest(), 2 * LONGEST_PASSAGE)
        if COPY in facts and copied_tokens > self.contexts[-1]:
            facts[COPY].append(copied_tokens)
        if RETRIEVAL in facts:
            facts[RETRIEVAL].append(self._longest())
        return facts

    def probe_input(self) -> Tensor:
        """The first tokens of the validation split, int64 [1, up to PROBE_TOKENS]."""
        return torch.tensor(self.dataset.validation[0]["input_ids"]).long()[None, :PROBE_TOKENS]


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
    changes: Sequence[str] = ()  # sentences on what a resumed run changes on purpose, on rank 0

    def completed(self, attention: str, loss: str, keeps_documents_apart: bool) -> Plan:
        """The plan with what was measured on the model, which the flags leave open. It is completed
        before there is a run, which never has another one."""
        # A copy, because the plan before stays as it was.
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
        """Whether it starts at a checkpoint in its own directory. A new run doesn't, nor does a new
        branch."""
        if self.resume_from is None:
            return False
        return self.resume_from.parent.resolve() == self.run_directory.resolve()

    @property
    def begins_at(self) -> Optional[Progress]:
        """Where it resumes, None for a new run."""
        return None if self.resume_from is None else self.start

    @property
    def is_base_known(self) -> bool:
        """Whether it resumes with the losses before step 1. At step 0 they are measured again,
        unless a rewind went back there."""
        return self.start.step > 0 or is_evaluated(self.resumed)

    @property
    def branch_point(self) -> Optional[Path]:
        """The checkpoint of another run at which this one began, or None: it began with a model."""
        # A new branch. One that has saved before finds its beginning in its own checkpoint.
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

    def files_read(self) -> list[tuple[str, Any]]:
        """(what was read, a fact that tells its content), which all ranks have in common."""
        config = self.model.config.to_dict()
        # Names that begin so are of this process, such as that of the folder.
        public = {name: repr(value) for name, value in config.items() if name[0] != "_"}
        facts: list[tuple[str, Any]] = [("the model's config.json", public)]
        for dataset in self.data.opened:
            of_rows = dataset.fingerprint, dataset.columns_fingerprint
            facts.append((repr(dataset.given), (*of_rows, dataset.manifest.get("sha256"))))
        # Each rank counts the bytes of its own rows' text, and draws the rows of probes.
        facts.append(("the tokenizer", identity(self.model.tokenizer)))
        # Each rank reads its own part of the optimizer's state.
        if self.resume_from is not None:
            manifest = sha256(Path(self.model.source) / MANIFEST)
            facts.append((repr(str(self.resume_from)), manifest))
        return [*facts, ("validation sets", self.data.measured_on())]

    def of_each_source(self, fact: Callable[[TokenDataset], Any]) -> Any:
        """{source: `fact` of it} with --data_mix, without it `fact` of the dataset."""
        facts = {name: fact(dataset) for name, dataset in self.data.sources.items()}
        if self.schedule.mixture.is_named:
            return facts
        # Without --data_mix the one source has no name that a user gave.
        [of_dataset] = facts.values()
        return of_dataset

    def changed_eval_sets(self) -> frozenset[str]:
        """The sets whose losses before step 1 were of other rows, and can't be compared."""
        # A new run has nothing to compare with.
        then = self.resumed["measured_on"] if self.is_base_known else {}
        return frozenset(
            name for name, rows in self.data.measured_on().items() if then.get(name, rows) != rows
        )

    def resolved(self) -> dict[str, Any]:
        """Values in arguments.yaml in place of the given ones. With them, other devices make the
        same steps."""
        # Sources may have rows of different lengths, which no single flag says.
        contexts = self.data.contexts
        return {
            "context_length": contexts[0] if len(contexts) == 1 else None,
            "global_batch_size": self.schedule.global_batch_size,
            "micro_batch_size": self.schedule.micro_batch_size,
            "gradient_accumulation_steps": None,
        }
