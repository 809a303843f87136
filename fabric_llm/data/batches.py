"""TODO data.batches."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Optional

import datasets
import numpy as np
import torch
from torch import Tensor

from fabric_llm.base.failpoints import failpoint
from fabric_llm.data.dataset import IGNORED
from fabric_llm.data.order import RowsRead, _order

# input_ids, labels; attention_mask where the dataset has one, position_ids where documents are kept apart:
# int64 [rows, context]
MicroBatch = dict[str, Tensor]


@dataclass(frozen=True)
class Batches:
    """The micro-batches of one rank, for any position.

    Positions from `end` on give rows without targets: they count for nothing in loss and gradient, so that the
    last global batch of a run may be a part of one, and all ranks still do the same number of passes.
    """

    rows: datasets.Dataset
    seed: int
    micro_batch_size: int  # sequences
    micro_batches: int  # per step and rank
    rank: int = 0
    world_size: int = 1
    shuffle: bool = True
    end: Optional[int] = None  # sequences; None: epoch follows epoch
    document_end: Optional[int] = None  # token id that ends each document, to keep packed documents apart

    @property
    def global_batch_size(self) -> int:
        return self.micro_batch_size * self.micro_batches * self.world_size

    def indices(self, positions: np.ndarray) -> np.ndarray:
        """Row numbers in the dataset of the sequences at `positions`, int64, same shape."""
        epochs, offsets = np.divmod(positions, len(self.rows))
        if not self.shuffle:
            return offsets
        return np.array([_order(len(self.rows), self.seed, int(e))[o] for e, o in zip(epochs, offsets)], dtype=np.int64)

    def positions(self, position: int) -> np.ndarray:
        """Positions that this rank reads for the step that begins at `position`, int64 [micro_batches, rows]."""
        micro_batch, row = np.indices((self.micro_batches, self.micro_batch_size))
        return position + (micro_batch * self.world_size + self.rank) * self.micro_batch_size + row

    def at(self, position: int) -> list[MicroBatch]:
        """The micro-batches of this rank for the step that begins at `position`, on the CPU."""
        return self.read(position)[0]

    def read(self, position: int) -> tuple[list[MicroBatch], RowsRead]:
        """The same, and which rows they hold."""
        micro_batches, read = [], RowsRead()
        for positions in self.positions(position):
            rows = self.indices(positions)
            micro_batches.append(self._micro_batch(positions, rows))
            counts = slice(None) if self.end is None else positions < self.end
            read += RowsRead.of(positions[counts], rows[counts])
        return micro_batches, read

    def stream(self, position: int) -> Iterator[MicroBatch]:
        """The micro-batches of `at`, one after the other."""
        return (self._micro_batch(positions, self.indices(positions)) for positions in self.positions(position))

    def _micro_batch(self, positions: np.ndarray, rows: np.ndarray) -> MicroBatch:
        failpoint("read_data")
        table = self.rows.with_format("numpy")[rows]
        batch = {name: torch.from_numpy(np.asarray(table[name]).astype(np.int64)) for name in table}
        labels = batch.get("labels", batch["input_ids"]).clone()
        if "attention_mask" in batch:
            labels[batch["attention_mask"] == 0] = IGNORED
        if self.document_end is not None:
            begins = document_begins(batch["input_ids"], self.document_end)
            batch["position_ids"] = restarting_positions(begins)
            labels[begins] = IGNORED  # not a target of the document before
        if self.end is not None:
            labels[torch.from_numpy(positions >= self.end)] = IGNORED
        return {**batch, "labels": labels}


def document_begins(input_ids: Tensor, document_end: int) -> Tensor:
    """True where a document begins inside a row (the row's own beginning is none). bool [rows, context]"""
    begins = torch.zeros_like(input_ids, dtype=torch.bool)
    begins[:, 1:] = input_ids[:, :-1] == document_end
    return begins


def restarting_positions(begins: Tensor) -> Tensor:
    """Positions that count from 0 in each document, from which transformers makes its attention mask. int64."""
    index = torch.arange(begins.shape[1]).expand(begins.shape)
    return index - torch.where(begins, index, 0).cummax(dim=1).values


class Prefetch:
    """`batches.at`, read ahead by threads, and a record of the rows that were handed out."""

    def __init__(self, batches: Batches, num_workers: int) -> None:
        self.batches = batches
        self.rows_read = RowsRead()  # by this rank, for steps; what is only read ahead doesn't count
        self.ahead = num_workers
        self.pool = ThreadPoolExecutor(num_workers, "batches") if num_workers else None
        self.pending: dict[int, Future[tuple[list[MicroBatch], RowsRead]]] = {}

    def at(self, position: int) -> list[MicroBatch]:
        """Same as `batches.at(position)`; starts to read what follows."""
        micro_batches, read = self._read(position)
        self.rows_read += read
        return micro_batches

    def _read(self, position: int) -> tuple[list[MicroBatch], RowsRead]:
        if self.pool is None:
            return self.batches.read(position)
        now = self.pending.pop(position, None)
        step = self.batches.global_batch_size
        following = [position + k * step for k in range(1, self.ahead + 1)]
        for other in [p for p in self.pending if p not in following]:  # the run jumped
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
    """Number of tokens that are predicted: labels shifted by one, so never the first of a row. int64, scalar."""
    return (micro_batch["labels"][:, 1:] != IGNORED).sum()
