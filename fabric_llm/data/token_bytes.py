"""How many bytes of text each token stands for, so that losses of different tokenizers compare: in
bits per byte."""

import json
import re
from collections.abc import Mapping
from functools import partial
from typing import Any, Optional

import numpy as np
from tokenizers import Tokenizer

# The fraction of a text's bytes, or of its tokens, that may be lost. With more, a loss in bits per
# byte would be that of another text.
MAX_LOST = 0.01
COUNTED = ("tokens", "unknown", "bytes", "bytes_of_tokens")  # `text` of a manifest
NUMBERED_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")  # SentencePiece's byte fallback


def bytes_of_tokens(tokenizer: Any, size: int) -> np.ndarray:
    """UTF-8 bytes of text that each id from 0 to `size` - 1 stands for, int64 [size]; 0 for special
    tokens.

    tokenizer: a fast one of transformers. The bytes of a text's tokens add up to those of the text,
    but for what the tokenizer itself changes: SentencePiece puts a space before a text, others
    normalise it.
    """
    counts = np.zeros(size, dtype=np.int64)
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    special, of_bytes = set(tokenizer.all_special_ids), is_byte_level(state)
    added, words = tokenizer.added_tokens_decoder, []
    for token, number in tokenizer.get_vocab().items():
        # Special tokens stand for no text.
        if number >= size or number in special:
            continue
        if NUMBERED_BYTE.fullmatch(token):
            counts[number] = 1
        elif number in added:
            counts[number] = len(added[number].content.encode())
        elif of_bytes:  # a character for each byte
            counts[number] = len(token)
        else:
            words.append(number)
    names = [tokenizer.backend_tokenizer.id_to_token(number) for number in words]
    if not state.get("decoder"):
        # Decoding would put a space behind each. The words of a vocabulary of letters are its text.
        counts[words] = [_bytes_of_word(name, state) for name in names]
        return counts
    # The bytes that each of the others adds behind itself. Alone it wouldn't do: at the beginning
    # of a text decoders drop a space.
    decode = partial(tokenizer.backend_tokenizer.decode_batch, skip_special_tokens=False)
    once = decode([[number] for number in words])
    twice = decode([[number, number] for number in words])
    counts[words] = [len(two.encode()) - len(one.encode()) for one, two in zip(once, twice)]
    return counts


def _bytes_of_word(name: str, state: dict[str, Any]) -> int:
    """Bytes that a token stands for by its name, in a tokenizer.json without a decoder."""
    # The prefix or suffix says how words are joined, and stands for no text.
    for affix, remove in (
        ("continuing_subword_prefix", name.removeprefix),
        ("end_of_word_suffix", name.removesuffix),
    ):
        name = remove(state["model"].get(affix) or "")
    return len(name.encode())


def bytes_are_lost(manifest: Mapping[str, Any]) -> bool:
    """Whether the tokens of a dataset stand for less than the text that they were made of.

    False where its manifest doesn't say. What isn't in the vocabulary becomes <unk>, or nothing,
    and some normalizers drop white space.
    """
    # A manifest of an earlier version has no such counts.
    text = manifest.get("text")
    if not isinstance(text, dict) or any(type(text.get(name)) is not int for name in COUNTED):
        return False
    tokens, unknown, all_bytes, of_tokens = (text[name] for name in COUNTED)
    return of_tokens < (1 - MAX_LOST) * all_bytes or unknown > MAX_LOST * tokens


def is_byte_level(state: dict[str, Any]) -> bool:
    """Whether each character of a token's name stands for a byte, as in GPT-2's. state: what
    tokenizer.json holds."""
    kinds = []
    for step in (state.get("decoder") or {}, state.get("pre_tokenizer") or {}):
        # A decoder or pre-tokenizer may be a sequence of several.
        for one in (step, *step.get("decoders", []), *step.get("pretokenizers", [])):
            kinds.append(one.get("type"))
    return "ByteLevel" in kinds


def unknown_id(backend: Tokenizer) -> Optional[int]:
    """The id of characters that no token has, None where there is no such token."""
    model = json.loads(backend.to_str())["model"]
    # This kind of model names it by its id, the others by its text.
    if model["type"] == "Unigram":
        return model.get("unk_id")
    return backend.token_to_id(model.get("unk_token") or "")
