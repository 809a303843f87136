"""Rows of Arrow files as numpy sees them: the memory map itself, from which a batch copies its rows and nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Optional

import datasets
import numpy as np
import pyarrow as pa

from fabric_llm.data.columns import COLUMNS, IGNORED

Arrays = Mapping[str, np.ndarray]  # of columns.COLUMNS, each [rows, context]


class Rows:
    """The rows of a split, or of several one behind the other, without a copy of them.

    It has a length, and `rows[numbers]` gives its columns, int64 [numbers, context]; `rows[number]` those of one row.
    """

    def __init__(self, chunks: Sequence[Arrays]) -> None:
        self.chunks = [chunk for chunk in chunks if len(chunk["input_ids"])]
        self.starts = np.cumsum([0, *(len(chunk["input_ids"]) for chunk in self.chunks)])

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __getitem__(self, numbers: Any) -> dict[str, np.ndarray]:
        if isinstance(numbers, slice):
            numbers = np.arange(len(self))[numbers]
        wanted = np.asarray(numbers)
        if wanted.size and not (0 <= wanted.min() and wanted.max() < len(self)):
            raise IndexError(f"rows {wanted.min()} to {wanted.max()} of {len(self)}")
        places = np.atleast_1d(wanted)
        inside = np.searchsorted(self.starts, places, side="right") - 1
        found = self._copied([self.chunks[chunk] for chunk in inside], (places - self.starts[inside]).tolist())
        return found if wanted.ndim else {name: values[0] for name, values in found.items()}

    def _copied(self, chunks: list[Arrays], rows: list[int]) -> dict[str, np.ndarray]:
        first = chunks[0] if chunks else self.chunks[0]
        columns = {}
        for name, values in first.items():
            columns[name] = out = np.empty((len(rows), values.shape[1]), dtype=np.int64)
            for place, (chunk, row) in enumerate(zip(chunks, rows)):
                out[place] = chunk[name][row]  # from the file into the batch; Python's lock is free meanwhile
        return columns


class Padded:
    """Rows that end with padding, as best_fit packs them: they have `labels`, which are IGNORED there.

    Exactly one EOS ends each document, so that EOS after EOS is padding.
    """

    def __init__(self, rows: Any, eos: int) -> None:
        self.rows, self.eos = rows, eos

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, numbers: Any) -> dict[str, np.ndarray]:
        ids = np.asarray(self.rows[numbers]["input_ids"])
        labels = ids.astype(np.int64)
        labels[..., 1:][(ids[..., 1:] == self.eos) & (ids[..., :-1] == self.eos)] = IGNORED
        return {"input_ids": ids, "labels": labels}


def is_padded(rows: Any) -> bool:
    """Whether rows, or some of them, end with padding."""
    return isinstance(rows, Padded) or isinstance(rows, Behind) and any(map(is_padded, rows.parts))


class Behind:
    """Splits that aren't views, one behind the other, as `Rows` would have them."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self.parts = list(parts)
        self.starts = np.cumsum([0, *map(len, parts)])

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __getitem__(self, numbers: Any) -> dict[str, np.ndarray]:
        wanted = np.asarray(numbers)
        places = np.atleast_1d(wanted)
        inside = np.searchsorted(self.starts, places, side="right") - 1
        columns: dict[str, np.ndarray] = {}
        for part in np.unique(inside):
            there = inside == part
            table = dict(self.parts[part][places[there] - self.starts[part]])
            if is_padded(self):  # also those that aren't padded then have labels
                table.setdefault("labels", table["input_ids"])
            for name, values in table.items():
                values = np.asarray(values)
                out = columns.setdefault(name, np.empty((len(places), *values.shape[1:]), dtype=np.int64))
                out[there] = values
        return columns if wanted.ndim else {name: values[0] for name, values in columns.items()}


def one_behind_the_other(splits: Sequence[Any]) -> Any:
    """The rows of several splits, numbered from the first of the first to the last of the last."""
    if all(isinstance(split, Rows) for split in splits):
        return Rows([chunk for split in splits for chunk in split.chunks])
    return Behind(splits)


def views(split: datasets.Dataset, context_length: int) -> Optional[Rows]:
    """The rows of a split whose columns were checked; None where numpy can't see them without a copy."""
    if getattr(split, "_indices", None) is not None:  # rows in another order than the file's
        return None
    table = split.data.table
    names = [name for name in COLUMNS if name in table.column_names]
    columns = [[_view(chunk, context_length) for chunk in table.column(name).chunks] for name in names]
    if any(view is None for chunks in columns for view in chunks):
        return None
    if len({tuple(map(len, chunks)) for chunks in columns}) != 1:
        return None
    return Rows([dict(zip(names, arrays)) for arrays in zip(*columns)])


def _view(rows: pa.Array, context_length: int) -> Optional[np.ndarray]:
    """[rows, context] of an Arrow array of lists."""
    kind = rows.type
    if not (pa.types.is_fixed_size_list(kind) or pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        return None
    if rows.null_count or not pa.types.is_integer(kind.value_type):
        return None
    values = rows.flatten()
    if values.null_count or len(values) != len(rows) * context_length:
        return None
    return values.to_numpy(zero_copy_only=True).reshape(len(rows), context_length)
