"""(seed, position, rank) -> micro-batches: a function without hidden state.

`position` counts the sequences that all ranks together have consumed since the run began. A run can
stop anywhere and resume with another number of devices or another micro-batch size, and every step
still sees the same sequences.
"""

import math
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Optional

import numpy as np
import torch
from torch import Tensor

from fabric_llm.base.failpoints import failpoint
from fabric_llm.data.columns import is_stream, is_target, masked_labels, padded_rows
from fabric_llm.data.folders import IGNORED
from fabric_llm.data.mixed_rows import mixed_rows_at
from fabric_llm.data.mixture import Mixture
from fabric_llm.data.order import RowsRead, rows_at

# input_ids and labels, and attention_mask if the dataset has one, each int64 [rows, context]. If
# packed documents are kept apart, also position_ids of that shape, and document_ends (see the
# function). If rows are `Batches.questions`, also their numbers, int64 [rows].
MicroBatch = dict[str, Tensor]


@dataclass(frozen=True)
class Batches:
    """The micro-batches of one rank, for any position.

    Rows at positions from `end` on have no targets, so that they add nothing to loss and gradient.
    All ranks therefore do the same number of passes even if the last global batch of a run is
    incomplete.
    """

    rows: Any  # a split, see dataset.TokenDataset
    seed: int
    micro_batch_size: int  # sequences
    micro_batches: int  # per step and rank
    rank: int = 0
    world_size: int = 1
    picked: Optional[np.ndarray] = None  # rows to read in this order, and not by `seed`
    end: Optional[int] = None  # sequences; None: one epoch after the other, without end
    # id of the token that ends each document, if packed documents are kept apart
    document_end: Optional[int] = None
    mixture: Optional[Mixture] = None  # which says instead of `seed` which rows are read
    part: int = 0  # of each row, which several ranks may share, see `part_of`
    parts: int = 1

    @property
    def global_batch_size(self) -> int:
        return self.micro_batch_size * self.micro_batches * self.world_size

    @property
    def questions(self) -> Any:
        """The rows, if they ask something and judge the answers (probes.Questions, tasks.Tasks);
        None of a text."""
        return self.rows if hasattr(self.rows, "answered") else None

    def indices(self, positions: np.ndarray) -> np.ndarray:
        """Row numbers in the dataset of the sequences at `positions`, int64, same shape."""
        if is_stream(self.rows):
            return positions
        if self.mixture is not None:
            return mixed_rows_at(self.mixture, positions)
        # Positions behind the last row read rows again, which have no targets then, see `end`.
        if self.picked is not None:
            return self.picked[positions % len(self.picked)]
        return rows_at(positions, len(self.rows), self.seed)

    def positions(self, position: int) -> np.ndarray:
        """The positions that this rank reads for the step that starts at `position`, int64
        [micro_batches, rows]."""
        # Within a micro-batch ranks read one behind the other, so a step has the same sequences
        # whatever their number is.
        micro_batch, row = np.indices((self.micro_batches, self.micro_batch_size))
        return position + (micro_batch * self.world_size + self.rank) * self.micro_batch_size + row

    def at(self, position: int) -> list[MicroBatch]:
        """The micro-batches of this rank for the step that starts at `position`, on the CPU."""
        return self.read(position)[0]

    def read(self, position: int) -> tuple[list[MicroBatch], RowsRead]:
        """The micro-batches of `at`, and a record of the rows in them."""
        positions = self.positions(position)
        if is_stream(self.rows):
            self.rows.mark(position)
        rows = self.indices(positions)  # of all at once: the order costs most for a few rows
        end = math.inf if self.end is None else self.end
        counted, read = positions < end, RowsRead()
        # Of ranks that share rows, only the first one counts them.
        if self.part == 0:
            read = RowsRead.of(positions[counted], rows[counted])
        micro_batches = list(map(self._micro_batch, positions, rows))
        # All ranks meet the end of a stream in one step, whichever of its rows they take.
        if is_stream(self.rows):
            self.rows.require(position + self.global_batch_size)
        return micro_batches, read

    def stream(self, position: int) -> Iterator[MicroBatch]:
        """The micro-batches of `at`, read one at a time."""
        return (
            self._micro_batch(positions, self.indices(positions))
            for positions in self.positions(position)
        )

    def _micro_batch(self, positions: np.ndarray, rows: np.ndarray) -> MicroBatch:
        failpoint("read_data")
        table = self.rows[rows]
        columns = {name: np.asarray(table[name], dtype=np.int64) for name in table}
        batch = {name: torch.from_numpy(values) for name, values in columns.items()}
        labels = torch.from_numpy(masked_labels(columns))
        if self.document_end is not None:
            begins = document_begins(batch["input_ids"], self.document_end)
            # An end token behind another one is padding, which belongs to the document before it.
            padded = padded_rows(self.rows, rows)
            begins[padded] &= batch["input_ids"][padded] != self.document_end
            batch["position_ids"] = restarting_positions(begins)
            batch["document_ends"] = document_ends(batch["position_ids"])
            labels[begins] = IGNORED  # the document before doesn't predict it
        if self.end is not None:
            labels[torch.from_numpy(positions >= self.end)] = IGNORED
        batch["labels"] = labels
        if self.questions is not None:
            batch["questions"] = torch.from_numpy(rows)
        return batch if self.parts == 1 else part_of(batch, self.part, self.parts)


def part_of(batch: MicroBatch, part: int, parts: int) -> MicroBatch:
    """The columns of one of the ranks that share the rows of a micro-batch, int64 [rows, context /
    parts].

    Labels have one column more, so that the last token of a part has its target. document_ends are
    those of the whole rows. Rows that don't divide, such as those of a probe, end with padding.
    """
    rest = -batch["input_ids"].shape[1] % parts
    padded = {}
    for name, tensor in batch.items():
        # The others have no columns: ends of documents are found anew below.
        if tensor.ndim == 2:
            value = IGNORED if name == "labels" else 0
            padded[name] = torch.nn.functional.pad(tensor, (0, rest), value=value)
    rows, context = padded["input_ids"].shape
    # A rank sees its columns only, so it is told at which places of the row they are.
    whole = {"position_ids": torch.arange(context).expand(rows, context), **padded}
    whole["labels"] = torch.nn.functional.pad(whole["labels"], (0, 1), value=IGNORED)
    here = slice(part * context // parts, (part + 1) * context // parts)
    cut = {name: whole[name][:, here].contiguous() for name in ("input_ids", "position_ids")}
    if "questions" in batch:
        cut["questions"] = batch["questions"]
    # One label more than tokens: the first of the next part is the last target of this one.
    cut["labels"] = whole["labels"][:, here.start : here.stop + 1].contiguous()
    return {**cut, "document_ends": document_ends(whole["position_ids"])}


def document_begins(input_ids: Tensor, document_end: int) -> Tensor:
    """True at the first token of each document but the first of a row. bool [rows, context]"""
    begins = torch.zeros_like(input_ids, dtype=torch.bool)
    begins[:, 1:] = input_ids[:, :-1] == document_end
    return begins


def restarting_positions(begins: Tensor) -> Tensor:
    """Positions that restart at 0 in each document: transformers builds its attention mask from
    them. int64"""
    # cummax carries the place where the current document begins along the row.
    index = torch.arange(begins.shape[1]).expand(begins.shape)
    return index - torch.where(begins, index, 0).cummax(dim=1).values


def document_ends(position_ids: Tensor) -> Tensor:
    """Where each document ends in the rows laid one behind the other, after a 0: int32 [documents +
    1].

    position_ids: int64 [rows, context], 0 where a document begins.
    """
    # A row may begin in the middle of a document. Its first token begins one all the same.
    begins = position_ids == 0
    begins[:, 0] = True
    starts = begins.flatten().nonzero().flatten().to(torch.int32)
    return torch.cat([starts, starts.new_tensor([position_ids.numel()])])


class PinnedCopies:
    """Copies micro-batches to a GPU from pinned memory, on a stream of its own, while the model's
    stream computes."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)

    def __call__(self, micro_batches: list[MicroBatch]) -> list[MicroBatch]:
        """The copies, once they are there. Called in a thread that reads ahead."""
        copies, device = [], self.stream.device
        with torch.cuda.stream(self.stream):  # and on its device: a thread begins on the first one
            for batch in micro_batches:
                copied = {}
                for name, tensor in batch.items():
                    copied[name] = tensor.pin_memory().to(device, non_blocking=True)
                copies.append(copied)
        self.stream.synchronize()  # only this thread waits
        return copies

    def hand_out(self, micro_batches: list[MicroBatch]) -> None:
        """Keep the memory of the copies until the model's stream has used them. Called in the
        step."""
        models_stream = torch.cuda.current_stream(self.stream.device)
        for batch in micro_batches:
            for tensor in batch.values():
                tensor.record_stream(models_stream)


class Prefetch:
    """`batches.at`, with threads that make the following steps ready, and a record of what was
    handed out."""

    def __init__(
        self, batches: Batches, num_workers: int, copies: Optional[PinnedCopies] = None
    ) -> None:
        """copies: to the device of the model; None: the micro-batches stay on the CPU."""
        self.batches, self.ahead, self.copies = batches, num_workers, copies
        self.rows_read = RowsRead()  # by this rank; steps that were only read ahead don't count
        self.tokens_at = np.zeros(1, dtype=np.int64)  # likewise; becomes as long as a row
        self.seconds_waited = 0.0  # by steps, for their micro-batches
        # It starts no thread before something is submitted, so with --num_workers 0 it never does.
        self.pool = ThreadPoolExecutor(max(num_workers, 1), "batches")
        self.pending: dict[int, Future[tuple[list[MicroBatch], RowsRead, np.ndarray]]] = {}

    def at(self, position: int) -> list[MicroBatch]:
        """The same as `batches.at(position)`. Starts to make the following steps ready."""
        began = time.monotonic()
        now = self.pending.pop(position, None)
        following = [
            position + k * self.batches.global_batch_size for k in range(1, self.ahead + 1)
        ]
        for other in self.pending.keys() - set(following):  # after a jump, such as a rollback
            self.pending.pop(other).cancel()
        # Asked for before this step's own are waited for, so that the threads go on meanwhile.
        for other in following:
            # Most were started by earlier steps.
            if other not in self.pending:
                self.pending[other] = self.pool.submit(self._ready, other)
        micro_batches, read, tokens_at = self._ready(position) if now is None else now.result()
        self.seconds_waited += time.monotonic() - began
        self.rows_read += read
        self.tokens_at = added(self.tokens_at, tokens_at)
        if self.copies is not None:
            self.copies.hand_out(micro_batches)
        return micro_batches

    def _ready(self, position: int) -> tuple[list[MicroBatch], RowsRead, np.ndarray]:
        """(the micro-batches of a position, on the device of `copies`, a record of their rows,
        their `token_places`)."""
        micro_batches, read = self.batches.read(position)
        tokens_at = token_places(micro_batches)
        if self.copies is not None:
            micro_batches = self.copies(micro_batches)
        return micro_batches, read, tokens_at

    def go_on_with(self, mixture: Optional[Mixture], end: Optional[int]) -> None:
        """Hand out the rows of another mixture, to another end, from the next step on."""
        for waiting in self.pending.values():
            waiting.cancel()
        # What is being made already can't be cancelled, but nobody will ask for it.
        self.pending.clear()
        self.batches = replace(self.batches, mixture=mixture, end=end)

    def close(self) -> None:
        """Stop the threads."""
        self.pool.shutdown(wait=True, cancel_futures=True)


def token_places(micro_batches: list[MicroBatch]) -> np.ndarray:
    """How many tokens see k tokens before them, those of their document or row: int64 [longest],
    for each k.

    Of rows that ranks share, all tokens count.
    """
    counts = np.zeros(1, dtype=np.int64)
    for batch in micro_batches:
        rows, context = batch["input_ids"].shape
        # Without documents each row counts as one.
        lengths = np.full(rows, context)
        if "document_ends" in batch:
            lengths = batch["document_ends"].diff().numpy()
        # At k: the number of documents that are longer than k, a sum from the longest one down.
        counts = added(counts, np.bincount(lengths)[::-1].cumsum()[::-1][1:])
    return counts


def added(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """The sum of two arrays, as long as the longer one: the rows of two stages needn't have one
    length."""
    length = max(len(one), len(other))
    return np.pad(one, (0, length - len(one))) + np.pad(other, (0, length - len(other)))


def target_count(micro_batch: MicroBatch) -> Tensor:
    """The number of tokens that are predicted. int64, scalar."""
    return is_target(micro_batch["labels"]).sum()
