"""The rows of a split: their columns, as numpy sees them, which of their tokens are targets, and rows that probe copying."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Optional

import numpy as np

COLUMNS = ("input_ids", "attention_mask", "labels")
IGNORED = -100  # label of a token that isn't a target, as in transformers and torch.nn.functional.cross_entropy
NO_PADDING = -1  # in place of a token id
PASSAGES, LONGEST_PASSAGE = 64, 256  # of the probe of copying: passages, and tokens of one
ROWS_DRAWN_FROM = 256  # of the text that its tokens are drawn from


def masked_labels(columns: Mapping[str, np.ndarray]) -> np.ndarray:
    """`labels`, or else `input_ids`, with IGNORED where `attention_mask` is 0. A copy, int64 [rows, context]"""
    labels = np.array(columns["labels" if "labels" in columns else "input_ids"], dtype=np.int64)
    if "attention_mask" in columns:
        labels[columns["attention_mask"] == 0] = IGNORED
    return labels


def is_target(labels: Any) -> Any:
    """True where a token is predicted, which the first of a row never is. labels: array or tensor [rows, context]"""
    return labels[:, 1:] != IGNORED


class Rows:
    """The rows of a split, or of several one behind the other: the memory map itself, from which a batch copies its rows.

    It has a length, and `rows[numbers]` gives its columns, int64 [numbers, context]; `rows[number]` those of one row.

    Rows that end with padding, as best_fit packs them, have `labels`, which are IGNORED there. Exactly one EOS ends each
    document, so that EOS after EOS is padding.
    """

    def __init__(self, chunks: Sequence[Mapping[str, np.ndarray]], padding: Optional[Sequence[int]] = None) -> None:
        """chunks: COLUMNS, each [rows, context], of parts one behind the other.

        padding: for each chunk the EOS that its rows are filled with, or NO_PADDING, as it is for all if None is given.
        """
        self.chunks = list(chunks)
        self.padding = np.array([NO_PADDING] * len(chunks) if padding is None else padding)
        self.starts = np.cumsum([0, *(len(chunk["input_ids"]) for chunk in chunks)])

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __getitem__(self, numbers: Any) -> dict[str, np.ndarray]:
        wanted = np.arange(len(self))[numbers] if isinstance(numbers, slice) else np.asarray(numbers)
        if wanted.size and not (0 <= wanted.min() and wanted.max() < len(self)):
            raise IndexError(f"rows {wanted.min()} to {wanted.max()} of {len(self)}")
        places = np.atleast_1d(wanted)
        inside = np.searchsorted(self.starts, places, side="right") - 1
        chunks = [self.chunks[chunk] for chunk in inside]
        rows = (places - self.starts[inside]).tolist()
        found = {}
        for name, values in (chunks or self.chunks)[0].items():
            found[name] = out = np.empty((len(rows), values.shape[1]), dtype=np.int64)
            for place, (chunk, row) in enumerate(zip(chunks, rows)):
                out[place] = chunk[name][row]  # from the file into the batch; Python's lock is free meanwhile
        if is_padded(self):
            eos, ids = self.padding[inside][:, None], found["input_ids"]
            found["labels"] = ids.copy()
            found["labels"][:, 1:][(ids[:, 1:] == eos) & (ids[:, :-1] == eos)] = IGNORED
        return found if wanted.ndim else {name: values[0] for name, values in found.items()}


def is_padded(rows: Any) -> bool:
    """Whether rows, or some of them, end with padding."""
    return isinstance(rows, Rows) and bool((rows.padding != NO_PADDING).any())


def copy_probe(split: Any, context_length: int, left_out: Sequence[int], seed: int) -> Rows:
    """Rows of a passage and the same passage again, of which only the second one is a target.

    The passages are random tokens of a split's first rows, without those of `left_out`, such as a document's end.

    A probe of in-context learning that needs no labels: how well a model copies a passage that it has just read. Its tokens
    are drawn one by one, as often as they are in a text, so nothing but the first time tells the second, of which the loss is
    measured. A model that has lost the use of its context shows it here, and may not in its perplexity (arXiv 2506.00288).
    Repeated random tokens are how Olsson et al. (2022), "In-context Learning and Induction Heads", tell copying from knowledge.
    """
    ids = np.asarray(split[np.arange(min(ROWS_DRAWN_FROM, len(split)))]["input_ids"]).ravel()
    ids = ids[~np.isin(ids, left_out)]
    length = max(1, min(LONGEST_PASSAGE, context_length // 2))
    generator = np.random.Generator(np.random.Philox(seed))
    passages = generator.choice(ids, (PASSAGES, length)).astype(np.int64)
    labels = np.concatenate([np.full_like(passages, IGNORED), passages], axis=1)
    labels[:, length] = IGNORED  # nothing has said yet that the passage comes again
    return Rows([{"input_ids": np.concatenate([passages, passages], axis=1), "labels": labels}])
