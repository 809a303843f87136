"""A probe of in-context learning that needs no labels: how well a model copies a random passage that it has just read.

Its tokens are drawn one by one, as often as they are in a text, so nothing but the first time tells the second. What is
measured is the loss of the second time. A model that has lost the use of its context shows it here, and may not in its
perplexity (arXiv 2506.00288). Repeated random tokens are how Olsson et al. (2022), "In-context Learning and Induction
Heads", tell copying from knowledge.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fabric_llm.data.columns import IGNORED

PASSAGES, LONGEST = 64, 256  # passages, and tokens of one
ROWS = 256  # of the text that tokens are drawn from


class Passages:
    """Rows of a passage and the same passage again, of which only the second one is a target."""

    def __init__(self, passages: np.ndarray) -> None:
        """passages: int64 [rows, tokens]"""
        self.passages = passages

    def __len__(self) -> int:
        return len(self.passages)

    def __getitem__(self, numbers: Any) -> dict[str, np.ndarray]:
        once = self.passages[numbers]
        labels = np.concatenate([np.full_like(once, IGNORED), once], axis=-1)
        labels[..., once.shape[-1]] = IGNORED  # nothing has said yet that the passage comes again
        return {"input_ids": np.concatenate([once, once], axis=-1), "labels": labels}


def passages(split: Any, context_length: int, left_out: Sequence[int], seed: int) -> Passages:
    """Random passages of the tokens of a split's first rows, without those of `left_out`, such as a document's end."""
    ids = np.asarray(split[np.arange(min(ROWS, len(split)))]["input_ids"]).ravel()
    ids = ids[~np.isin(ids, left_out)]
    length = max(1, min(LONGEST, context_length // 2))
    generator = np.random.Generator(np.random.Philox(seed))
    return Passages(generator.choice(ids, (PASSAGES, length)).astype(np.int64))
