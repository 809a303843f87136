"""Rows without labels that ask whether a model uses its context: it copies a passage, it finds what
stood far before.

Their tokens are drawn from a text, as often as they are in it, so that nothing but the context
tells what comes. A model that has lost the use of its context shows it here, and may not in its
perplexity (arXiv 2506.00288).
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from fabric_llm.data.columns import Rows
from fabric_llm.data.folders import IGNORED
from fabric_llm.data.order import drawn_from
from fabric_llm.data.periods import LONGEST_PASSAGE

PASSAGES = 64  # of the probe of copying
# Of the probe of retrieval: places of a key in percent of the text; how many lengths of text, each
# half as long as the one before; questions of each place and length.
DEPTHS, LENGTHS, EACH = tuple(range(10, 100, 10)), 3, 2
SHORTEST = 8  # tokens of a text with a question


def _text_of(split: Any, left_out: Sequence[int]) -> np.ndarray:
    """The tokens of these rows without those of `left_out`, such as a document's end. int64
    [tokens]"""
    ids = np.asarray(split[drawn_from(split)]["input_ids"]).ravel()
    return ids[~np.isin(ids, left_out)]


def copy_probe(split: Any, context_length: int, left_out: Sequence[int], seed: int) -> Rows:
    """Rows of a passage of random tokens and the same passage again, of which only the second one
    is a target.

    Repeated random tokens are how Olsson et al. (2022), "In-context Learning and Induction Heads",
    tell copying from knowledge.
    """
    length = max(2, min(LONGEST_PASSAGE, context_length // 2))  # one token would be no target
    generator = np.random.Generator(np.random.Philox(seed))
    passages = generator.choice(_text_of(split, left_out), (PASSAGES, length)).astype(np.int64)
    labels = np.concatenate([np.full_like(passages, IGNORED), passages], axis=1)
    labels[:, length] = IGNORED  # nothing has said yet that the passage comes again
    return Rows([{"input_ids": np.concatenate([passages, passages], axis=1), "labels": labels}])


class Questions:
    """The probe of retrieval: rows of text in which a key and its value stand somewhere, and at the
    end the key again.

    The value behind it is the only target. Key and value are random tokens. Made when they are
    read: a row may hold a million tokens. Each row is as long as the context; what comes behind a
    question of a shorter text is more text, which it doesn't see.
    """

    def __init__(self, split: Any, context_length: int, left_out: Sequence[int], seed: int) -> None:
        """The text is repeated where a row is longer. Raises ValueError for rows that are too
        short."""
        if context_length < SHORTEST:
            raise ValueError(
                f"--probes retrieval asks in rows of {SHORTEST} tokens and more, not "
                f"{context_length}."
            )
        self.text, self.context_length, self.seed = _text_of(split, left_out), context_length, seed
        self.value = min(4, max(1, context_length // 64))  # tokens; a key has twice as many
        halved = [context_length >> times for times in range(LENGTHS)]
        self.lengths = [length for length in halved if length >= SHORTEST]

    def __len__(self) -> int:
        return len(DEPTHS) * len(self.lengths) * EACH

    def sample(self, count: int) -> np.ndarray:
        """The first questions, which are at all depths."""
        return np.arange(count)

    def about(self, number: int) -> tuple[int, int]:
        """(length of the text that holds the question, tokens; depth of the key in it, percent).
        All depths come first."""
        return self.lengths[number // len(DEPTHS) % len(self.lengths)], DEPTHS[number % len(DEPTHS)]

    def __getitem__(self, numbers: Any) -> dict[str, np.ndarray]:
        """input_ids and labels, each int64 [numbers, context]; of one number [context]."""
        rows = [self._row(int(number)) for number in np.atleast_1d(numbers)]
        if np.ndim(numbers) == 0:
            return rows[0]
        return {name: np.stack([row[name] for row in rows]) for name in rows[0]}

    def _row(self, number: int) -> dict[str, np.ndarray]:
        length, depth = self.about(number)
        # Seeded by its number as well, so that any rank can make any question by itself.
        generator = np.random.Generator(np.random.Philox([self.seed, number]))
        begin = generator.integers(len(self.text))
        # Indexing copies, so the pair below isn't written into the text.
        row = self.text[(begin + np.arange(self.context_length)) % len(self.text)]
        pair = generator.choice(self.text, 3 * self.value)  # the key, and behind it its value
        # The depth is measured so that the pair fits before the question at the end.
        at, end = (length - 2 * len(pair)) * depth // 100, length - len(pair)
        # The question is the pair again. Its value is what the model has to say.
        row[at : at + len(pair)] = row[end:length] = pair
        labels = np.full_like(row, IGNORED)
        labels[length - self.value : length] = pair[-self.value :]
        return {"input_ids": row, "labels": labels}

    def answered(self, sums: np.ndarray, targets: np.ndarray) -> dict[str, float]:
        """What evaluations say of the answers: `accuracy`, of their tokens; `exact`, of whole
        values; `margin`, of their logits.

        Also by the length of the text and the depth, in percent, such as accuracy_of_2048 and
        accuracy_of_2048_at_10. sums: as language_model.by_row has them, [questions, 3]. targets:
        evaluated tokens of each question, [questions].
        """
        groups: dict[str, list[int]] = defaultdict(list)
        # Questions that weren't evaluated have no targets.
        for number in np.flatnonzero(targets).tolist():
            length, depth = self.about(number)
            for name in ("", f"_of_{length}", f"_of_{length}_at_{depth}"):
                groups[name].append(number)
        # All tokens of the value are right.
        answers = {"exact": float((sums[groups[""], 1] == targets[groups[""]]).mean())}
        for name, numbers in groups.items():
            # The first sum is the loss, which `evaluate` computes itself.
            _, right, margin = sums[numbers].sum(axis=0) / targets[numbers].sum()
            answers |= {f"accuracy{name}": float(right), f"margin{name}": float(margin)}
        return answers
