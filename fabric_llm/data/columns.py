"""The columns of a dataset of tokens: how they are checked, and which of their tokens are targets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Optional

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fabric_llm.base.faults import one_line
from fabric_llm.base.names import shown

COLUMNS = ("input_ids", "attention_mask", "labels")
IGNORED = -100  # label of a token that isn't a target, as in transformers and torch.nn.functional.cross_entropy
ROWS_AT_ONCE = 1000


def masked_labels(columns: Mapping[str, np.ndarray]) -> np.ndarray:
    """`labels`, or else `input_ids`, with IGNORED where `attention_mask` is 0. A copy, int64 [rows, context]"""
    labels = np.array(columns["labels" if "labels" in columns else "input_ids"], dtype=np.int64)
    if "attention_mask" in columns:
        labels[columns["attention_mask"] == 0] = IGNORED
    return labels


def is_target(labels: Any) -> Any:
    """True where a token is predicted, which the first of a row never is. labels: array or tensor [rows, context]"""
    return labels[:, 1:] != IGNORED


def columns_of(split: datasets.Dataset, where: str) -> list[str]:
    """The columns of COLUMNS that `split` has.

    Raises ValueError for an empty split, where `input_ids` is missing, and where one doesn't hold lists of integers.
    """
    if len(split) == 0:
        raise ValueError(f"The {where} is empty.")
    if "input_ids" not in split.column_names:
        raise ValueError(
            f"The {where} has no column 'input_ids', only {', '.join(repr(shown(name, 60)) for name in split.column_names[:20])}."
        )
    names = [name for name in COLUMNS if name in split.column_names]
    for name in names:
        value_type = getattr(split.features[name], "feature", None)
        if not str(getattr(value_type, "dtype", "")).startswith(("int", "uint", "bool")):
            raise ValueError(
                f"Column {name!r} of the {where} must hold lists of integers: {shown(split.features[name])}."
            )
    return names


def fixed_length(split: datasets.Dataset) -> Optional[int]:
    """Tokens in a row where the column's type says so, as prepare_data.py writes it; otherwise None."""
    kind = split.data.schema.field("input_ids").type
    return kind.list_size if pa.types.is_fixed_size_list(kind) else None


def scan(split: datasets.Dataset, where: str) -> tuple[int, int]:
    """(tokens in a row, largest token id) of a split whose columns were checked. Reads every row once.

    Raises ValueError for damaged rows, rows of different length, empty values, negative ids, and a split without targets.
    """
    lengths: set[int] = set()
    low, high, targets = 0, 0, 0
    for table in split.with_format("arrow").iter(batch_size=ROWS_AT_ONCE):
        try:
            table.validate(full=True)  # Arrow follows offsets that lead out of the file
        except pa.ArrowException as error:
            raise ValueError(f"The {where} can't be read: {one_line(error).rstrip('.')}.") from error
        flat = {}
        for name in (name for name in COLUMNS if name in table.column_names):
            rows = table.column(name).combine_chunks()
            values = pc.list_flatten(rows)
            if rows.null_count or values.null_count:
                raise ValueError(f"Column {name!r} of the {where} has empty values.")
            lengths.update(pc.list_value_length(rows).unique().to_pylist())
            flat[name] = np.asarray(values)
        ids = [flat["input_ids"], *([flat["labels"][flat["labels"] != IGNORED]] if "labels" in flat else [])]
        low = min(low, *(int(some.min(initial=0)) for some in ids))
        high = max(high, *(int(some.max(initial=0)) for some in ids))
        if len(lengths) == 1:
            columns = {name: values.reshape(len(table), *lengths) for name, values in flat.items()}
            targets += int(is_target(masked_labels(columns)).sum())
    if len(lengths) > 1:
        raise ValueError(
            f"The {where} has rows of different length, from {min(lengths)} to {max(lengths)} tokens; pack or pad them."
        )
    if low < 0:
        raise ValueError(f"The {where} has a negative token id: {low}.")
    if targets == 0 and max(lengths) > 1:
        raise ValueError(f"The {where} has nothing to learn: all its labels are masked ({IGNORED}).")
    return lengths.pop(), high
