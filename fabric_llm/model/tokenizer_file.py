"""What a tokenizer.json may declare. Nothing here imports torch or transformers."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from fabric_llm.base import files

MAX_TOKENIZER_BYTES = 128 * 2**20  # Gemma's has 33 million
# The largest vocabularies have a million. tokenizers allocates as many tokens as the largest number
# says.
MAX_TOKENS = 2**24


def check_tokenizer_file(path: Path) -> None:
    """Raises ValueError where a tokenizer.json isn't one, or is larger than anybody could want,
    before it is loaded."""
    if not path.is_file():
        return
    if (instead := files.instead_of_content(path)) is not None:
        raise ValueError(f"{str(path)!r} is {instead}.")
    if (size := path.stat().st_size) > MAX_TOKENIZER_BYTES:
        limit = MAX_TOKENIZER_BYTES // 2**20
        raise ValueError(f"{str(path)!r} has {size / 2**20:.0f} MiB; at most {limit} MiB are read.")
    try:
        numbers = _token_numbers(json.loads(path.read_bytes()))
    except ValueError:
        # Not JSON: loading it will raise an error that says so.
        return
    except RecursionError:
        raise ValueError(f"{str(path)!r} is nested too deeply to be read.") from None
    largest = max(numbers, default=0)
    if largest >= MAX_TOKENS:
        raise ValueError(
            f"{str(path)!r} has a token with the number {largest}; at most {MAX_TOKENS:,} tokens "
            "are read."
        )


def _token_numbers(document: Any) -> list[int]:
    """The token ids of a tokenizer.json, as far as it has the form of one."""
    # A dictionary has ids as its values. The ids of a list, as of Unigram, are its places, which
    # the size of the file bounds already: that it has no `values` is suppressed.
    numbers: list[Any] = []
    with suppress(KeyError, TypeError, AttributeError):
        numbers += document["model"]["vocab"].values()
    with suppress(KeyError, TypeError):
        numbers += [token["id"] for token in document["added_tokens"]]
    return [number for number in numbers if isinstance(number, int)]
