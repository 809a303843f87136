"""Evaluation: the loss of each validation set, the same on any number of devices."""

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Optional

import numpy as np
import torch
from torch import Tensor, nn

from fabric_llm.base.fabric import Fabric
from fabric_llm.base.failpoints import failpoint
from fabric_llm.base.ranks import any_rank, sum_over_ranks
from fabric_llm.data.batches import Batches, MicroBatch, target_count
from fabric_llm.data.folders import IGNORED
from fabric_llm.model.language_model import PLACES
from fabric_llm.model.sharded import reshard

SECONDS_OF_SILENCE = 20.0  # until an evaluation says how far it is
FIRST_PLACE = 256  # tokens
# Where the second and each further range of positions begins, each twice as far as the one before.
EDGES = FIRST_PLACE * 2 ** torch.arange(PLACES - 1)


class EvalResult(NamedTuple):
    """The result of an evaluation."""

    sets: dict[str, dict[str, float]]  # by name, see `evaluate`
    # {set: its loss with the moving average of the weights, nats}, None without an average.
    of_average: Optional[dict[str, float]]

    @property
    def losses(self) -> dict[str, float]:
        """{set: its loss, nats}."""
        return {name: one["loss"] for name, one in self.sets.items()}


@dataclass
class Evaluation:
    """Evaluates a model on rows of validation sets."""

    fabric: Fabric
    batches: Mapping[str, Batches]  # {set: this rank's batches}, read from position 0
    # Whether this rank was asked. A request to one rank ends the evaluation on all of them.
    is_asked_to_stop: Callable[[], bool]
    working: Callable[[], None]  # called before each batch, to mark that this rank makes progress
    token_bytes: Optional[Tensor] = None  # of each id, int64 [vocabulary], see data/token_bytes.py
    in_bytes: Collection[str] = ()  # sets that have a loss in bits per byte
    was_stopped: bool = False
    said_at: float = 0.0  # when it last said how far it is, of time.monotonic()

    @property
    def is_on(self) -> bool:
        """False if there is nothing to evaluate."""
        return any(batches.micro_batches > 0 for batches in self.batches.values())

    def of(self, model: nn.Module, average: Optional[Any]) -> Optional[EvalResult]:
        """Evaluate the model and, if there is one, its moving average (`ema.Average`). None if
        asked to stop before the end. The loss of a set without batches is 0."""
        self.was_stopped, of_average = False, None
        self.said_at = time.monotonic()
        sets = self._sets(model)
        if average is not None and not self.was_stopped:
            with average.in_place():
                of_average = {name: one["loss"] for name, one in self._sets(model).items()}
        return None if self.was_stopped else EvalResult(sets, of_average)

    def _sets(self, model: nn.Module) -> dict[str, dict[str, float]]:
        sets: dict[str, dict[str, float]] = {}
        for name, batches in self.batches.items():
            # Bits per byte are of running text, which questions aren't.
            token_bytes = None
            if name in self.in_bytes and batches.questions is None:
                token_bytes = self.token_bytes
            read = self._until_stopped(name, batches, is_first=not sets)
            sets[name] = evaluate(self.fabric, model, read, token_bytes, batches.questions)
            # The report and the log say that the loss is of a part of the set.
            if len(batches.rows) > batches.end:
                sets[name] |= {"rows": batches.end, "of_rows": len(batches.rows)}
            if self.was_stopped:
                break
        return sets

    def _until_stopped(self, name: str, batches: Batches, is_first: bool) -> Iterator[MicroBatch]:
        for number, batch in enumerate(batches.stream(0)):
            # All ranks ask together before each batch but the very first, and stop at the same one.
            if (number > 0 or not is_first) and any_rank(self.fabric, self.is_asked_to_stop()):
                self.was_stopped = True
                return
            self.working()
            if time.monotonic() - self.said_at > SECONDS_OF_SILENCE:
                self.said_at = time.monotonic()
                done = f"{number} of {batches.micro_batches} batches of {name}"
                self.fabric.print(f"evaluating: {done}", flush=True)
            yield batch


def rows_in_words(sets: Mapping[str, Batches]) -> str:
    """Which rows of each set are evaluated."""
    words, spread = [], ""
    for name, batches in sets.items():
        if batches.end == len(batches.rows):
            rows = "the one row" if batches.end == 1 else f"all {batches.end:,} rows"
            words.append(f"{rows} of {name}")
        else:
            words.append(f"{batches.end:,} of {len(batches.rows):,} rows of {name}")
            spread = ", evenly spread"
    return ", ".join(words) + spread


@torch.no_grad()
def evaluate(
    fabric: Fabric,
    model: nn.Module,
    batches: Iterable[MicroBatch],
    token_bytes: Optional[Tensor] = None,
    questions: Optional[Any] = None,
) -> dict[str, float]:
    """Loss (mean over the targets of all ranks' batches, nats), perplexity and, with `token_bytes`,
    bits_per_byte of text.

    Of documents longer than FIRST_PLACE also `loss_from_N`, the mean over what is predicted from
    positions of a document from N on, and below 2 N: it falls where a model uses what it sees. All
    ranks have the same number of batches. questions: see `Batches`; the numbers of its `answered`,
    which may hold another loss, are added.
    """
    model.eval()
    # The loss of all targets comes first, then one sum of each place, or three of each question.
    kinds, width = PLACES, 1
    if questions is not None:
        kinds, width = len(questions), 3
    losses = torch.zeros(1 + kinds * width, dtype=torch.float64, device=fabric.device)
    # Targets, bytes of their text, and targets of each place or question.
    counts = torch.zeros(2 + kinds, dtype=torch.int64)
    for batch in batches:
        failpoint("evaluate")
        if questions is not None:
            of_tokens = batch["questions"][:, None]
        else:
            of_tokens = places_of(batch)
            # The model sums losses by place only where a batch has a long document.
            if of_tokens.any():
                batch = {**batch, "places": of_tokens}
        _count(counts, batch, of_tokens, token_bytes)
        here = fabric.to_device(batch)
        sums = model(**here)
        if questions is not None:
            losses[0] += sums[0]
            of_rows = sums[1:].view(-1, width).double()
            losses[1:].view(-1, width).index_add_(0, here["questions"], of_rows)
        else:
            # With one sum, all targets are at the first place.
            losses[: max(2, sums.numel())] += sums
    model.train()
    # Otherwise the next step would find the outermost unit gathered, and not reduce its gradients.
    reshard(model)
    # Sums over all ranks, so that the loss is the same on any number of them.
    total, *sums = sum_over_ranks(fabric, losses).tolist()
    targets, text, *of_each = sum_over_ranks(fabric, counts.to(fabric.device)).tolist()
    result = {"loss": total / max(targets, 1)}
    if questions is not None:
        result |= questions.answered(np.reshape(sums, (-1, width)), np.array(of_each))
    result["perplexity"] = math.inf
    # math.exp overflows above 709.
    if result["loss"] < 700:
        result["perplexity"] = math.exp(result["loss"])
    if text:
        result["bits_per_byte"] = total / text / math.log(2)
    if questions is None and any(of_each[1:]):
        for first, loss, count in zip([0, *EDGES.tolist()], sums, of_each):
            if count:
                result[f"loss_from_{first}"] = loss / count
    return result


def _count(
    counts: Tensor, batch: MicroBatch, of_tokens: Tensor, token_bytes: Optional[Tensor]
) -> None:
    """Add the targets of a batch to the `counts` of `evaluate`. of_tokens: the place or question of
    each token or row."""
    labels = batch["labels"][:, 1:]
    is_target = labels != IGNORED
    counts[0] += target_count(batch)
    if token_bytes is not None:
        counts[1] += token_bytes[labels[is_target]].sum()
    of_labels = of_tokens[:, : labels.shape[1]].expand_as(labels)
    counts[2:] += torch.bincount(of_labels[is_target], minlength=len(counts) - 2)


def places_of(batch: MicroBatch) -> Tensor:
    """Of each token, by how many are before it in its document: 0 below FIRST_PLACE, 1 below twice
    that, and so on. int64."""
    rows, context = batch["input_ids"].shape
    positions = batch.get("position_ids", torch.arange(context).expand(rows, context))
    return torch.bucketize(positions.contiguous(), EDGES, right=True)
