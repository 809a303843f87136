"""The rows of a split: their columns, as numpy sees them, and which of their tokens are targets."""

from collections.abc import Mapping, Sequence
from typing import Any, Optional

import numpy as np

from fabric_llm.base.faults import Fault
from fabric_llm.data.folders import IGNORED
from fabric_llm.data.periods import ENDLESS

COLUMNS = ("input_ids", "attention_mask", "labels")
NO_PADDING = -1  # in place of a token id


class StreamEnd(Fault):
    """A stream has no more rows."""


def masked_labels(columns: Mapping[str, np.ndarray]) -> np.ndarray:
    """`labels`, or else `input_ids`, with IGNORED where `attention_mask` is 0. A copy, int64 [rows,
    context]"""
    labels = np.array(columns["labels" if "labels" in columns else "input_ids"], dtype=np.int64)
    if "attention_mask" in columns:
        labels[columns["attention_mask"] == 0] = IGNORED
    return labels


def is_target(labels: Any) -> Any:
    """True where a token is predicted, which the first of a row never is. labels: array or tensor
    [rows, context]"""
    return labels[:, 1:] != IGNORED


class Rows:
    """The rows of a split, or of several one behind the other: the memory map itself, from which a
    batch copies its rows.

    It has a length, and `rows[numbers]` gives its columns, int64 [numbers, context]; `rows[number]`
    those of one row.

    Rows that end with padding, as best_fit packs them, have `labels`, which are IGNORED there.
    Exactly one EOS ends each document, so that EOS after EOS is padding.
    """

    def __init__(
        self, chunks: Sequence[Mapping[str, np.ndarray]], padding: Optional[Sequence[int]] = None
    ) -> None:
        """chunks: COLUMNS, each [rows, context], of parts one behind the other.

        padding: for each chunk the EOS that its rows are filled with, or NO_PADDING, as it is for
        all if None is given.
        """
        self.chunks = list(chunks)
        self.padding = np.array([NO_PADDING] * len(chunks) if padding is None else padding)
        # The number of the first row of each chunk, and behind them the number of all rows.
        self.starts = np.cumsum([0, *(len(chunk["input_ids"]) for chunk in chunks)])

    def __len__(self) -> int:
        return int(self.starts[-1])

    def chunks_of(self, numbers: np.ndarray) -> np.ndarray:
        """The number of the chunk that holds each row, int64 [numbers]."""
        return np.searchsorted(self.starts, numbers, side="right") - 1

    def __getitem__(self, numbers: Any) -> dict[str, np.ndarray]:
        if isinstance(numbers, slice):
            numbers = range(len(self))[numbers]
        wanted = np.asarray(numbers)
        # A negative number would silently read another row, from the end.
        if wanted.size and not (0 <= wanted.min() and wanted.max() < len(self)):
            raise IndexError(f"rows {wanted.min()} to {wanted.max()} of {len(self)}")
        # One row is read as a batch of one, and taken out of it in the end.
        places = np.atleast_1d(wanted)
        # The chunk that holds each row, and below the row's number in that chunk.
        inside = self.chunks_of(places)
        chunks = [self.chunks[chunk] for chunk in inside]
        rows = (places - self.starts[inside]).tolist()
        columns = {}
        # If no row is asked for, the first chunk still says which columns there are.
        for name, values in (chunks or self.chunks)[0].items():
            columns[name] = out = np.empty((len(rows), values.shape[1]), dtype=np.int64)
            for place, (chunk, row) in enumerate(zip(chunks, rows)):
                # Copied from the mapped file into the batch. Python's lock is free meanwhile.
                out[place] = chunk[name][row]
        if is_padded(self):
            eos, ids = self.padding[inside][:, None], columns["input_ids"]
            # The first EOS ends a document, and the model learns it. Those behind it are padding.
            is_padding = (ids[:, 1:] == eos) & (ids[:, :-1] == eos)
            columns["labels"] = ids.copy()
            columns["labels"][:, 1:][is_padding] = IGNORED
        if wanted.ndim:
            return columns
        return {name: values[0] for name, values in columns.items()}


def pads_before_text(rows: Any) -> bool:
    """Whether the `attention_mask` of a row has zeros before its ones. Reads all of them."""
    for chunk in getattr(rows, "chunks", ()):
        mask = chunk.get("attention_mask")
        # A zero right before a one is a row that is padded on the left.
        if mask is not None and (mask[:, :-1] < mask[:, 1:]).any():
            return True
    return False


def is_stream(rows: Any) -> bool:
    """Whether rows are those of a stream (own.Stream), which are read one after the other."""
    return len(rows) == ENDLESS


def some_of(rows: Any) -> dict[str, np.ndarray]:
    """64 evenly spaced rows, or the first ones of a stream."""
    if is_stream(rows):
        return rows.head
    # A set, because a split of fewer rows has some of these numbers twice.
    numbers = {index * (len(rows) - 1) // 63 for index in range(64)}
    return rows[sorted(numbers)]


def shifts_labels(rows: Any) -> bool:
    """Whether labels stand at the place before their tokens, in 64 rows: a model, which shifts them
    itself, would learn the token after next."""
    columns = some_of(rows)
    if "labels" not in columns:
        return False
    ids, labels = columns["input_ids"], columns["labels"][:, :-1]
    targets = labels != IGNORED
    # How many labels equal the token at their own place, and how many the token after it.
    here = int((labels == ids[:, :-1])[targets].sum())
    after = int((labels == ids[:, 1:])[targets].sum())
    # Repeated tokens count as both, so one of the two numbers isn't enough.
    return after > 0.9 * targets.sum() and here < 0.5 * targets.sum()


def is_padded(rows: Any) -> bool:
    """Whether rows, or some of them, end with padding."""
    return isinstance(rows, Rows) and bool((rows.padding != NO_PADDING).any())


def padded_rows(rows: Any, numbers: np.ndarray) -> np.ndarray:
    """Which of these rows are of a part whose rows end with padding, bool [numbers]."""
    if not isinstance(rows, Rows):
        return np.zeros(len(numbers), dtype=bool)
    return rows.padding[rows.chunks_of(numbers)] != NO_PADDING
