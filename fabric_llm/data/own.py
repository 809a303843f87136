"""Data sources that --code registers, of rows by their number or of a stream of rows.

A source is f(folder, flags), which returns a dictionary:

train         rows, or a stream
validation    rows
max_token_id  the largest token id in them; without it every row is read once, which a stream can't
document_end  the token that ends each document, if rows are packed documents to be kept apart; may
              be left out

Rows are an array [rows, context], or any object with a length whose [number] is one row. A row is
an array of token ids, or {"input_ids": ..., "labels": ...} with -100 in labels where there is no
target. Threads may ask for rows at the same time.

A stream is a function of a state, None for its beginning. It returns an iterator over rows that has
a method `state()`: plain data, as JSON has it, from which the function goes on with the row that
comes next. Every rank passes over all rows and takes its own, so that a run goes on with other
devices.
"""

import hashlib
import json
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import RLock
from typing import Any, Optional

import numpy as np

from fabric_llm.base import register
from fabric_llm.base.faults import Fault
from fabric_llm.data.columns import Rows, StreamEnd
from fabric_llm.data.dataset import TokenDataset
from fabric_llm.data.folders import IGNORED
from fabric_llm.data.periods import ENDLESS

COLUMNS = ("input_ids", "labels")
HEAD = 8  # rows of a stream that say which one it is, and that it resumes exactly
MAX_STATES = 16  # of a stream, at the beginning of steps, that are kept
ROWS_AT_ONCE = 256
Columns = dict[str, np.ndarray]


def open_own(folder: Path, source: Callable[..., Any], flags: Any) -> TokenDataset:
    """The dataset in `folder`, by a source that --code registers. Raises ValueError."""
    name = f"the source of {str(folder)!r}"
    of_train, of_validation = Row(f"train of {name}"), Row(f"validation of {name}")
    with register.of_user(name):
        made = source(folder, flags)
        train, validation = made["train"], _rows(made["validation"], of_validation)
        if callable(train):
            # A stream doesn't say how long its rows are, so a validation row does.
            of_train = Row(name, of_validation.context)
            train = Stream(train, of_train)
            # Now, because otherwise a run of days would find it out when it resumes.
            train.require_exact_resume()
        else:
            train = _rows(train, of_train)
        largest = made.get("max_token_id")
        if largest is not None:
            largest = int(largest)  # such as one of numpy
        if (end := made.get("document_end")) is not None:
            end = operator.index(end)  # a text would equal no token, and end no document
    if largest is None:
        # A stream is too long to be read for its largest id.
        if isinstance(train, Stream):
            raise Fault(f"--code: {name} gives a stream, which needs max_token_id beside it.")
        largest = max(_largest(train), _largest(validation))
    # The model is trained and evaluated with the same columns and length.
    if (of_train.names, of_train.context) != (of_validation.names, of_validation.context):
        raise Fault(f"--code: rows of train and validation of {name} must be alike.")
    # Rows aren't read before they are trained on, so each is compared with what is said of all.
    of_train.largest = of_validation.largest = largest
    if isinstance(train, Stream):
        of_train.require_ids(train.head)
    # With document_end, documents are kept apart as in a dataset that prepare_data.py has packed.
    manifest = {} if end is None else {"packed": True, "eos_token_id": end}
    return TokenDataset(folder, train, validation, of_train.context, largest, manifest)


@dataclass
class Row:
    """What the rows of a split have in common. The first one sets what isn't known before."""

    where: str  # words for the split
    context: int = 0  # tokens
    names: Sequence[str] = ()  # of the columns
    largest: float = math.inf  # token id

    def columns(self, row: Any) -> Columns:
        """The columns of a row, int64 [context]. Raises Fault for one that isn't as the others."""
        given = row if isinstance(row, Mapping) else {"input_ids": row}
        columns = {name: np.asarray(given[name]) for name in COLUMNS if name in given}
        for name, values in columns.items():
            if values.ndim != 1 or values.dtype.kind not in "iu":
                raise Fault(
                    f"--code: {name} of a row of {self.where} is {values.dtype} "
                    f"{list(values.shape)}, not integers [context]."
                )
            self.context = self.context or len(values)
            if len(values) != self.context:
                raise Fault(
                    f"--code: a row of {self.where} has {len(values)} tokens in {name}, the first "
                    f"{self.context}."
                )
        # Any other key is a mistake, such as "label", which would be passed over without a word.
        if columns.keys() != given.keys() or "input_ids" not in columns:
            raise Fault(
                f"--code: a row of {self.where} has {', '.join(given)}, not input_ids and labels."
            )
        self.names = self.names or list(columns)
        if list(columns) != self.names:
            raise Fault(
                f"--code: a row of {self.where} has {', '.join(columns)}, the first "
                f"{', '.join(self.names)}."
            )
        self.require_ids(columns)
        return {name: values.astype(np.int64) for name, values in columns.items()}

    def require_ids(self, columns: Columns) -> None:
        """Raises Fault for token ids that are negative or above `largest`."""
        for name, values in columns.items():
            # IGNORED is negative, and stands in labels for no token.
            ids = values if name == "input_ids" else values[values != IGNORED]
            if ids.size and not 0 <= ids.min() <= ids.max() <= self.largest:
                bad = ids[(ids < 0) | (ids > self.largest)][0]
                raise Fault(
                    f"--code: {name} of a row of {self.where} has {bad}, which isn't from 0 to "
                    f"max_token_id {self.largest}."
                )


@dataclass
class Column:
    """One column of a user's rows, as `Rows` takes it."""

    rows: Any
    name: str
    row: Row

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.rows), self.row.context

    def __getitem__(self, number: int) -> np.ndarray:
        with register.of_user(f"row {number} of {self.row.where}"):
            return self.row.columns(self.rows[number])[self.name]


def _rows(given: Any, row: Row) -> Rows:
    if len(given) == 0:
        raise Fault(f"--code: {row.where} has no rows.")
    names = list(row.columns(given[0]))
    if row.context < 2:
        raise Fault(f"--code: rows of {row.where} hold {row.context} token; at least 2 are needed.")
    # A row with labels is asked for twice, once for each column.
    return Rows([{name: Column(given, name, row) for name in names}])


def _largest(rows: Rows) -> int:
    """The largest token id. Reads every row."""
    largest = 0
    # A batch of rows at a time, because all of them may not fit into memory.
    for first in range(0, len(rows), ROWS_AT_ONCE):
        for values in rows[first : first + ROWS_AT_ONCE].values():
            # IGNORED is negative, and no token.
            largest = max(largest, int(values.max(initial=0)))
    return largest


class Stream:
    """The rows of a stream, each by its position in the run. An earlier one than the last is read
    again, from the nearest state before it.

    So its rows are a function of the position, and states only save time. `head`: its first rows.
    """

    def __init__(self, begin: Callable[[Any], Iterator[Any]], row: Row) -> None:
        # The thread that reads ahead and the one that saves use the same iterator.
        self.begin, self.row, self.name, self.lock = begin, row, row.where, RLock()
        # position -> (state there as JSON, hash of the row that comes next)
        self.states: dict[int, tuple[str, Optional[str]]] = {0: ("null", None)}
        # A row that was read for its hash, behind its position.
        self.peeked: tuple[int, Columns] = (-1, {})
        self.iterator, self.place = self._begun("null"), 0  # of the row that comes next
        # The stream now stands behind its first rows, and begins again if one of them is asked for.
        self.head = _stacked([self._next() for _ in range(HEAD)])

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, positions: Any) -> Columns:
        """Columns [positions, context] of rows at ascending positions; those of one of the first
        rows are [context]."""
        # A single number is asked for only to see what rows look like: the first ones show it.
        if np.ndim(positions) == 0:
            return {name: values[positions] for name, values in self.head.items()}
        with self.lock:
            return _stacked([self._row(int(position)) for position in positions])

    def require_exact_resume(self) -> None:
        """Raises Fault unless the stream begins anew with the same rows, and goes on from a state
        with those that come next."""
        # One more stream from the beginning, and one that goes on from a state of it.
        again, resumed = Stream(self.begin, self.row), Stream(self.begin, self.row)
        later = np.arange(HEAD, 2 * HEAD)
        resumed.restore(HEAD, again.state_at(HEAD))
        for ours, theirs in ((self.head, again.head), (again[later], resumed[later])):
            if any(not np.array_equal(ours[name], theirs[name]) for name in ours):
                raise self._not_exact("it gives other rows when it begins again")

    def mark(self, position: int) -> None:
        """A step begins at `position`: keep the state there, for a save."""
        with self.lock:
            self._mark(position)
            # The first state stays, from which every row can be read.
            for old in list(self.states)[1:-MAX_STATES]:
                del self.states[old]

    def require(self, position: int) -> None:
        """Raises StreamEnd unless there are so many rows."""
        with self.lock:
            self._go_to(position)

    def state_at(self, position: int) -> dict[str, Any]:
        """What a checkpoint keeps, for `restore`."""
        with self.lock:
            if position not in self.states:
                # The end of the stream has a state, but no row comes next.
                with suppress(StreamEnd):
                    self._mark(position)
            state, following = self.states[position]
            return {"state": json.loads(state), "next": following}

    def restore(self, position: int, kept: Mapping[str, Any]) -> None:
        """Go on from what `state_at` has said, in a resumed run. Raises Fault if another row comes
        next."""
        state = json.dumps(kept["state"])
        self.states[position] = state, kept["next"]
        self.iterator, self.place = self._begun(state), position
        # The row that comes next must be the one that came next when the run was saved.
        if kept["next"] is not None:
            self.peeked = position, self._next()
            if _hash(self.peeked[1]) != kept["next"]:
                raise self._not_exact(f"row {position}, after a state, is another one")

    def _mark(self, position: int) -> None:
        self._go_to(position)
        with register.of_user(f"state of {self.name}"):
            state = json.dumps(self.iterator.state(), allow_nan=False)
        # Without a hash at first, because there may be no next row, which raises StreamEnd.
        self.states[position] = state, None
        self.peeked = position, self._next()
        self.states[position] = state, _hash(self.peeked[1])

    def _begun(self, state: str) -> Any:
        with register.of_user(f"stream of {self.name}"):
            iterator = self.begin(json.loads(state))
        # Without state(), a resumed run would have to pass over all rows that were read.
        if not (hasattr(iterator, "__next__") and hasattr(iterator, "state")):
            raise self._not_exact("it isn't an iterator with a method state()")
        return iterator

    def _not_exact(self, why: str) -> Fault:
        return Fault(f"--code: the stream of {self.name} can't be resumed exactly: {why}.")

    def _row(self, position: int) -> Columns:
        # A row that was read for its hash isn't read again.
        if position != self.peeked[0]:
            self._go_to(position)
            self.peeked = position, self._next()
        return self.peeked[1]

    def _go_to(self, position: int) -> None:
        # A stream can't go back: begin again at the nearest state before the position.
        if position < self.place:
            self.place = max(place for place in self.states if place <= position)
            self.iterator = self._begun(self.states[self.place][0])
        while self.place < position:
            self._next()

    def _next(self) -> Columns:
        with register.of_user(f"row {self.place} of {self.name}"):
            row = next(self.iterator, None)
        if row is None:
            raise StreamEnd(
                f"--code: the stream of {self.name} ends after {self.place} rows: give a smaller "
                "--max_step."
            )
        # Counted even if the row is refused below, since it was read.
        self.place += 1
        return self.row.columns(row)


def _stacked(rows: list[Columns]) -> Columns:
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def _hash(row: Columns) -> str:
    # Sorted, so that the hash in a checkpoint doesn't depend on the order of columns.
    return hashlib.sha256(b"".join(row[name].tobytes() for name in sorted(row))).hexdigest()
