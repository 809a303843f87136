"""How many bytes of text each token stands for, so that losses of different tokenizers compare: in bits per byte."""

import json
import re
from typing import Any

import numpy as np
from tokenizers import Tokenizer

NUMBERED_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")  # SentencePiece's byte fallback


def bytes_of_tokens(tokenizer: Any, size: int) -> np.ndarray:
    """UTF-8 bytes of text that each id from 0 to `size` - 1 stands for, int64 [size]; 0 for special tokens.

    tokenizer: a fast one of transformers. The bytes of a text's tokens add up to those of the text, but for what the tokenizer
    itself changes: SentencePiece puts a space before a text, others normalise it.
    """
    counts = np.zeros(size, dtype=np.int64)
    special, of_bytes = set(tokenizer.all_special_ids), is_byte_level(tokenizer.backend_tokenizer)
    added, words = tokenizer.added_tokens_decoder, []
    for token, number in tokenizer.get_vocab().items():
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
    # What each of the others adds behind itself: at the beginning of a text decoders drop a space.
    once, twice = (
        tokenizer.backend_tokenizer.decode_batch([[number] * times for number in words], skip_special_tokens=False)
        for times in (1, 2)
    )
    counts[words] = [len(two.encode()) - len(one.encode()) for one, two in zip(once, twice)]
    return counts


def is_byte_level(backend: Tokenizer) -> bool:
    """Whether each character of a token's name stands for a byte, as in GPT-2's."""
    decoder = json.loads(backend.to_str()).get("decoder") or {}
    return "ByteLevel" in [decoder.get("type"), *(one.get("type") for one in decoder.get("decoders", []))]
