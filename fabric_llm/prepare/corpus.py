"""A corpus in memory, for what is learned from text by one process, with a part of it held out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Optional

from fabric_llm.prepare import documents, inputs, pieces

MOST_BYTES = 2**26  # of text that are taken, evenly over the inputs
ONE_OF = 20  # texts is held out


class Corpus(NamedTuple):
    """Texts to learn from, and others to measure on."""

    learned: list[str]
    held_out: list[str]
    every: int  # one of so many texts of the inputs was taken


def read(
    given: Sequence[str],
    *,
    pattern: Sequence[str],
    exclude: Sequence[str],
    text_field: str,
    document_separator: Optional[str],
    output: Path,
) -> Corpus:
    """The documents of the inputs of prepare_data.py, long ones in sections. Raises ValueError where there are too few."""
    found = inputs.find_sources(given, pattern=pattern, exclude=exclude, output=output.resolve())
    parts = [part for piece in pieces.plan(found, inputs.separator(document_separator)) for part in piece.parts]
    every = max(1, -(-sum(source.bytes or 0 for source in found.sources) // MOST_BYTES))
    texts, size = [], 0
    for number, text in enumerate(documents.texts(parts, text_field)):
        if number % every == 0:
            texts.append(text)
            size += len(text.encode())
        if size >= MOST_BYTES:
            break
    return Corpus(*hold_out(texts), every)


def summary(corpus: Corpus) -> str:
    """One line that says what was read."""
    sizes = (sum(len(text.encode()) for text in texts) / 1e6 for texts in (corpus.learned, corpus.held_out))
    taken = f", one text of {corpus.every}" if corpus.every > 1 else ""
    learned, held_out = (f"{len(texts):,} texts ({size:,.1f} MB)" for texts, size in zip(corpus[:2], sizes))
    return f"Tokens are learned from {learned} and measured on {held_out} that are held out{taken}."


def hold_out(texts: list[str]) -> tuple[list[str], list[str]]:
    """(texts, those held out): one of ONE_OF, at least one; the last lines of a single text. None is in both."""
    if len(texts) == 1:
        cut = texts[0].rfind("\n", 0, len(texts[0]) * (ONE_OF - 1) // ONE_OF) + 1
        texts = [part for part in (texts[0][:cut], texts[0][cut:]) if part.strip()]
    every = min(ONE_OF, len(texts))
    held_out = [text for number, text in enumerate(texts, 1) if number % every == 0]
    apart = set(held_out)
    learned = [text for text in texts if text not in apart]
    if not learned:
        raise ValueError("The corpus has no two different texts: tokens are learned from some, and measured on others.")
    return learned, held_out
