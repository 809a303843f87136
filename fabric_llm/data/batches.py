"""(seed, position, rank) -> micro-batches: a function without hidden state.

`position` counts the sequences that all ranks together have consumed since the run began. A run can stop anywhere and
resume with another number of devices or another micro-batch size, and every step still sees the same sequences.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Optional

import numpy as np
import torch
from torch import Tensor

from fabric_llm.base.failpoints import failpoint
from fabric_llm.data.columns import IGNORED, is_target, masked_labels
from fabric_llm.data.order import NEW_ORDER, RowsRead, rows_at

# input_ids and labels, attention_mask if the dataset has one, position_ids if packed documents are kept apart:
# each int64 [rows, context]
MicroBatch = dict[str, Tensor]


@dataclass(frozen=True)
class Batches:
    """The micro-batches of one rank, for any position.

    Rows at positions from `end` on have no targets, so that they add nothing to loss and gradient. All ranks therefore
    do the same number of passes even if the last global batch of a run is incomplete.
    """

    rows: Any  # a split, see dataset.TokenDataset
    seed: int
    micro_batch_size: int  # sequences
    micro_batches: int  # per step and rank
    rank: int = 0
    world_size: int = 1
    shuffle: bool = True
    end: Optional[int] = None  # sequences; None: one epoch after the other, without end
    document_end: Optional[int] = None  # id of the token that ends each document, if packed documents are kept apart
    order: str = NEW_ORDER  # of the rows, a name of order.ORDERS

    @property
    def global_batch_size(self) -> int:
        return self.micro_batch_size * self.micro_batches * self.world_size

    def indices(self, positions: np.ndarray) -> np.ndarray:
        """Row numbers in the dataset of the sequences at `positions`, int64, same shape."""
        if not self.shuffle:
            return positions % len(self.rows)
        return rows_at(positions, len(self.rows), self.seed, self.order)

    def positions(self, position: int) -> np.ndarray:
        """The positions that this rank reads for the step that starts at `position`, int64 [micro_batches, rows]."""
        micro_batch, row = np.indices((self.micro_batches, self.micro_batch_size))
        return position + (micro_batch * self.world_size + self.rank) * self.micro_batch_size + row

    def at(self, position: int) -> list[MicroBatch]:
        """The micro-batches of this rank for the step that starts at `position`, on the CPU."""
        return self.read(position)[0]

    def read(self, position: int) -> tuple[list[MicroBatch], RowsRead]:
        """The micro-batches of `at`, and a record of the rows in them."""
        micro_batches, read = [], RowsRead()
        for positions in self.positions(position):
            rows = self.indices(positions)
            micro_batches.append(self._micro_batch(positions, rows))
            counted = slice(None) if self.end is None else positions < self.end
            read += RowsRead.of(positions[counted], rows[counted])
        return micro_batches, read

    def stream(self, position: int) -> Iterator[MicroBatch]:
        """The micro-batches of `at`, read one at a time."""
        return (self._micro_batch(positions, self.indices(positions)) for positions in self.positions(position))

    def _micro_batch(self, positions: np.ndarray, rows: np.ndarray) -> MicroBatch:
        failpoint("read_data")
        table = self.rows[rows]
        columns = {name: np.asarray(table[name]).astype(np.int64) for name in table}
        batch = {name: torch.from_numpy(values) for name, values in columns.items()}
        labels = torch.from_numpy(masked_labels(columns))
        if self.document_end is not None:
            begins = document_begins(batch["input_ids"], self.document_end)
            batch["position_ids"] = restarting_positions(begins)
            labels[begins] = IGNORED  # the document before doesn't predict it
        if self.end is not None:
            labels[torch.from_numpy(positions >= self.end)] = IGNORED
        return {**batch, "labels": labels}


def document_begins(input_ids: Tensor, document_end: int) -> Tensor:
    """True at the first token of each document but the first of a row. bool [rows, context]"""
    begins = torch.zeros_like(input_ids, dtype=torch.bool)
    begins[:, 1:] = input_ids[:, :-1] == document_end
    return begins


def restarting_positions(begins: Tensor) -> Tensor:
    """Positions that restart at 0 in each document: transformers builds its attention mask from them. int64"""
    index = torch.arange(begins.shape[1]).expand(begins.shape)
    return index - torch.where(begins, index, 0).cummax(dim=1).values


class Prefetch:
    """`batches.at`, with threads that read the following steps ahead, and a record of the rows that were handed out."""

    def __init__(self, batches: Batches, num_workers: int) -> None:
        self.batches = batches
        self.rows_read = RowsRead()  # by this rank; steps that were only read ahead don't count
        self.ahead = num_workers
        self.pool = ThreadPoolExecutor(num_workers, "batches") if num_workers else None
        self.pending: dict[int, Future[tuple[list[MicroBatch], RowsRead]]] = {}

    def at(self, position: int) -> list[MicroBatch]:
        """The same as `batches.at(position)`. Starts to read the following steps."""
        micro_batches, read = self._read(position)
        self.rows_read += read
        return micro_batches

    def _read(self, position: int) -> tuple[list[MicroBatch], RowsRead]:
        if self.pool is None:
            return self.batches.read(position)
        now = self.pending.pop(position, None)
        step = self.batches.global_batch_size
        following = [position + k * step for k in range(1, self.ahead + 1)]
        for other in [p for p in self.pending if p not in following]:  # after a jump, such as a rollback
            self.pending.pop(other).cancel()
        for other in following:
            if other not in self.pending:
                self.pending[other] = self.pool.submit(self.batches.read, other)
        return self.batches.read(position) if now is None else now.result()

    def close(self) -> None:
        """Stop the threads."""
        if self.pool is not None:
            self.pool.shutdown(wait=True, cancel_futures=True)


def target_count(micro_batch: MicroBatch) -> Tensor:
    """The number of tokens that are predicted. int64, scalar."""
    return is_target(micro_batch["labels"]).sum()
