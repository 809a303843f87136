"""Limits of what a tokenizer.json may declare: tokenizers allocates what its numbers say and takes every step that it lists.

Nothing here imports transformers.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fabric_llm.base.faults import one_line
from fabric_llm.base.files import instead_of_content

MOST_BYTES = 128 * 2**20  # of the file; Gemma's has 33 million
MOST_TOKENS = 2**24  # the largest vocabularies have a million
MOST_PADDING = 2**20
MOST_LEVELS = 16  # of objects and lists in a step
MOST_STEPS = 500
MOST_GROWTH = 1000  # of a text, by what its normalizers replace one after the other


def check_file(path: Path) -> None:
    """Raises ValueError where a tokenizer.json declares more than anybody could want, before it is loaded."""
    if not path.is_file():
        return
    if (instead := instead_of_content(path)) is not None:
        raise ValueError(f"{str(path)!r} is {instead}.")
    if (size := path.stat().st_size) > MOST_BYTES:
        raise ValueError(f"{str(path)!r} has {size / 2**20:.0f} MiB; at most {MOST_BYTES // 2**20} MiB are read.")
    try:
        _check(_object(json.loads(path.read_bytes())))
    except (json.JSONDecodeError, UnicodeDecodeError):
        return  # whoever loads it says so
    except (ValueError, RecursionError) as error:
        said = "is nested too deeply to be read" if isinstance(error, RecursionError) else error
        raise ValueError(f"{str(path)!r} {said}.") from error


@contextmanager
def without_panic() -> Iterator[None]:
    """Raises ValueError where tokenizers panics, such as for a regular expression that takes too long, and hides its report."""
    said, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # which isn't an Exception, and isn't exported
            raise
        raise ValueError(f"the tokenizer fails on a text: {one_line(error)[:300]}") from None
    finally:
        os.dup2(said, 2)
        os.close(said)
        os.close(nowhere)


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _check(document: dict[str, Any]) -> None:
    added = document.get("added_tokens")
    ids = [*_object(_object(document.get("model")).get("vocab")).values()]
    ids += [_object(token).get("id") for token in added] if isinstance(added, list) else []
    if (largest := max((number for number in ids if isinstance(number, int)), default=0)) >= MOST_TOKENS:
        raise ValueError(f"has a token with the number {largest}; at most {MOST_TOKENS:,} tokens are read")
    padding = _object(document.get("padding"))
    for number in (_object(padding.get("strategy")).get("Fixed"), padding.get("pad_to_multiple_of")):
        if isinstance(number, int) and number > MOST_PADDING:
            raise ValueError(f"pads each text to {number} tokens; at most {MOST_PADDING:,} are read")
    for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        steps = list(_objects(document.get(name), name, MOST_LEVELS))
        if len(steps) > MOST_STEPS:
            raise ValueError(f"has {len(steps)} parts in its {name}; at most {MOST_STEPS} are read")
        growth = 1.0  # how many times longer the steps may make a text, one after the other
        for step in steps:
            replaced, content = _object(step.get("pattern")).get("String"), step.get("content")
            if step.get("type") == "Replace" and isinstance(content, str):
                growth *= max(1.0, len(content) / max(1, len(replaced) if isinstance(replaced, str) else 1))
        if name == "normalizer" and growth > MOST_GROWTH:
            raise ValueError("has a normalizer that makes texts more than a thousand times longer")


def _objects(value: Any, name: str, levels: int) -> Iterator[dict[str, Any]]:
    """All objects in `value`, from the outermost on. Raises ValueError for more levels."""
    if not isinstance(value, (dict, list)):
        return
    if levels == 0:
        raise ValueError(f"has a {name} that is more than {MOST_LEVELS} levels deep")
    if isinstance(value, dict):
        yield value
    for part in value.values() if isinstance(value, dict) else value:
        yield from _objects(part, name, levels - 1)


def encode_all_alike(backend: Any) -> None:
    """Switch off what tokenizer.json may ask for: truncation, padding, and the dropout of merges, which is random."""
    backend.no_truncation()
    backend.no_padding()
    if getattr(backend.model, "dropout", None) is not None:
        backend.model.dropout = None
