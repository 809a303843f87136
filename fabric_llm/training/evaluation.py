"""Evaluation: the loss of each validation set, the same on any number of devices."""

import math
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
from fabric_llm.data.columns import IGNORED
from fabric_llm.model.language_model import PLACES
from fabric_llm.model.sharded import reshard

FIRST_PLACE = 256  # tokens
EDGES = FIRST_PLACE * 2 ** torch.arange(PLACES - 1)


class EvalResult(NamedTuple):
    """What an evaluation has found."""

    sets: dict[str, dict[str, float]]  # by name, see `evaluate`
    # losses of the moving average of the weights, if there is one, nats
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
    # of this rank; a request to one rank ends the evaluation on all
    is_asked_to_stop: Callable[[], bool]
    working: Callable[[], None]  # called before each batch, to mark that this rank makes progress
    token_bytes: Optional[Tensor] = None  # of each id, int64 [vocabulary], see data/token_bytes.py
    in_bytes: Collection[str] = ()  # sets that have a loss in bits per byte
    was_stopped: bool = False

    @property
    def is_on(self) -> bool:
        """False if there is nothing to evaluate."""
        return any(batches.micro_batches > 0 for batches in self.batches.values())

    def of(self, model: nn.Module, average: Optional[Any]) -> Optional[EvalResult]:
        """Evaluate the model and, if there is one, its moving average (`ema.Average`). None if
        asked to stop before the end. The loss of a set without batches is 0."""
        self.was_stopped, of_average = False, None
        sets = self._sets(model)
        if average is not None and not self.was_stopped:
            with average.in_place():
                of_average = {name: one["loss"] for name, one in self._sets(model).items()}
        return None if self.was_stopped else EvalResult(sets, of_average)

    def _sets(self, model: nn.Module) -> dict[str, dict[str, float]]:
        found: dict[str, dict[str, float]] = {}
        for name, batches in self.batches.items():
            read, token_bytes = self._until_stopped(batches, is_first=not found), self.token_bytes
            token_bytes = (
                token_bytes if name in self.in_bytes and batches.questions is None else None
            )
            found[name] = evaluate(self.fabric, model, read, token_bytes, batches.questions)
            if (count := len(batches.rows)) > batches.end:  # the loss is of a part of the set
                found[name] |= {"rows": batches.end, "of_rows": count}
            if self.was_stopped:
                break
        return found

    def _until_stopped(self, batches: Batches, is_first: bool) -> Iterator[MicroBatch]:
        for number, batch in enumerate(batches.stream(0)):
            if (number > 0 or not is_first) and any_rank(self.fabric, self.is_asked_to_stop()):
                self.was_stopped = True
                return
            self.working()
            yield batch


def rows_in_words(sets: Mapping[str, Batches]) -> str:
    """Which rows of each set are evaluated."""
    words = []
    for name, batches in sets.items():
        read, count = batches.end, len(batches.rows)
        words.append(
            f"all {count:,} rows of {name}"
            if read == count
            else f"{read:,} of {count:,} rows of {name}"
        )
    spread = ", evenly spread" * any(batches.end < len(batches.rows) for batches in sets.values())
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
    ranks have the same number of batches. questions: see `Batches`; what their `answered` says,
    which may be another loss, is added.
    """
    model.eval()
    # Of all targets, and by place, or three sums by question; targets, bytes of their text, targets
    # by place or question.
    asked = 0 if questions is None else len(questions)
    totals = torch.zeros(1 + (3 * asked or PLACES), dtype=torch.float64, device=fabric.device)
    counts = torch.zeros(2 + (asked or PLACES), dtype=torch.int64)
    for batch in batches:
        failpoint("evaluate")
        counts[0] += target_count(batch)
        labels = batch["labels"][:, 1:]
        if token_bytes is not None:
            counts[1] += token_bytes[labels[labels != IGNORED]].sum()
        places = (
            places_of(batch) if questions is None else batch["questions"][:, None].expand_as(labels)
        )
        counts[2:] += torch.bincount(
            places[:, : labels.shape[1]][labels != IGNORED], minlength=len(counts) - 2
        )
        if questions is None and places.any():
            batch = {**batch, "places": places}
        here = fabric.to_device(batch)
        found = model(**here)
        if questions is not None:
            totals[0] += found[0]
            totals[1:].view(-1, 3).index_add_(0, here["questions"], found[1:].view(-1, 3).double())
        else:
            totals[: max(2, found.numel())] += (
                found  # all are at the first place where none are told apart
            )
    model.train()
    reshard(
        model
        # otherwise the next step would find the outermost unit gathered, and not reduce its
        # gradients
    )
    total, *sums = sum_over_ranks(fabric, totals).tolist()
    targets, text, *of_places = sum_over_ranks(fabric, counts.to(fabric.device)).tolist()
    found = {"loss": total / max(targets, 1)}
    if questions is not None:
        found |= questions.answered(np.reshape(sums, (-1, 3)), np.array(of_places))
    found["perplexity"] = math.exp(found["loss"]) if found["loss"] < 700 else math.inf
    found |= {"bits_per_byte": total / text / math.log(2)} if text else {}
    if questions is not None:
        return found
    by_place = zip([0, *EDGES.tolist()], sums, of_places)
    return found | (
        {f"loss_from_{first}": part / n for first, part, n in by_place if n}
        if any(of_places[1:])
        else {}
    )


def places_of(batch: MicroBatch) -> Tensor:
    """Of each token, by how many are before it in its document: 0 below FIRST_PLACE, 1 below twice
    that, and so on. int64."""
    rows, context = batch["input_ids"].shape
    positions = batch.get("position_ids", torch.arange(context).expand(rows, context))
    return torch.bucketize(positions.contiguous(), EDGES, right=True)
