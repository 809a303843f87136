"""The tokenizer of a dataset: loaded or trained, and what it puts around a document."""

import os
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PretrainedConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from fabric_llm.base.faults import Fault, one_line
from fabric_llm.data.token_bytes import unknown_id
from fabric_llm.model.tokenizer import load_tokenizer
from fabric_llm.prepare.encoding import encode_all_alike, without_panic

END_OF_TEXT = "<|endoftext|>"


def packing_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """A tokenizer that can prepare data. Raises ValueError for one that can't be loaded, isn't
    fast, or has no EOS token."""
    try:
        tokenizer = load_tokenizer(name)
    except Fault:
        raise
    except Exception as error:
        wrong = "is neither a folder here nor one that can be read from the hub"
        if os.path.isdir(name):
            wrong = (
                "is a folder without a tokenizer that can be read: put the tokenizer of its model "
                "there, or, for a model that begins untrained, make one by --train_tokenizer"
            )
        raise ValueError(f"tokenizer {name} {wrong}: {one_line(error)}") from error
    # `encoding` uses the library `tokenizers`, which reads nothing else.
    if not tokenizer.is_fast:
        raise ValueError(
            f"tokenizer {name} has no fast version (tokenizer.json), which preparing data needs"
        )
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"tokenizer {name} has no EOS token to end documents with: set eos_token in its folder"
        )
    return tokenizer


def longest_row(name: str, tokenizer: PreTrainedTokenizerBase) -> int:
    """Tokens that the model takes at once, as the tokenizer says, or the config.json beside it."""
    config = {}
    # A tokenizer may come without a model.
    with suppress(OSError):
        config, _ = PretrainedConfig.get_config_dict(name, local_files_only=True)
    given = (config.get(key) for key in ("max_position_embeddings", "n_positions"))
    known = [longest for longest in given if isinstance(longest, int)]
    return min([tokenizer.model_max_length, *known])


def train_byte_level_bpe(texts: Iterable[str], *, vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE of at most `vocab_size` tokens.

    It holds all 256 bytes, so that any text can be decoded again. `<|endoftext|>`, id 0, is BOS,
    EOS and padding. The same texts give the same tokenizer.
    """
    backend = Tokenizer(models.BPE())
    # A prefix space would come back as a character more when a text is decoded.
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    # All 256 bytes, whether the texts have them or not.
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    # One token for all three, as in GPT-2.
    special = dict.fromkeys(("bos_token", "eos_token", "pad_token"), END_OF_TEXT)
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


def convention(backend: Tokenizer, hf_tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """What stands around the tokens of a document, and what mustn't be among them: arguments of
    `encoding.Job`."""
    eos = hf_tokenizer.eos_token_id
    backend = Tokenizer.from_str(backend.to_str())  # `packing_tokenizer`'s stays as its file has it
    encode_all_alike(backend)
    before, after = _around(backend)
    # A Unigram or WordLevel model, whose vocabulary holds its special tokens as words, still finds
    # them in text. Only the unknown token may come from text.
    forbidden = sorted({*hf_tokenizer.all_special_ids} - {hf_tokenizer.unk_token_id} | {eos})
    unknown = unknown_id(backend)
    # The dtype must hold every id, also those of tokens that were added behind the vocabulary.
    largest = max([*backend.get_vocab(with_added_tokens=True).values(), *before, *after, eos])
    return {
        # Exactly one EOS ends a document, whatever the tokenizer itself puts around a text.
        "before": [token for token in before if token != eos],
        "after": [token for token in after if token != eos] + [eos],
        "forbidden": {token: hf_tokenizer.convert_ids_to_tokens(token) for token in forbidden},
        "unknown": -1 if unknown is None else unknown,
        "dtype": "uint16" if largest < 2**16 else "int32",
    }


def _around(backend: Tokenizer) -> tuple[list[int], list[int]]:
    """The tokens that a tokenizer puts before a text and behind it. Raises ValueError where it
    makes nothing of any word."""
    # Some vocabularies, such as those of DNA, have no "a".
    for word in ("a", *sorted(backend.get_vocab(with_added_tokens=False))):
        with without_panic():
            probe = backend.encode(word, add_special_tokens=True)
        text = np.flatnonzero(np.array(probe.special_tokens_mask) == 0)
        # What stands before and behind the word is the convention.
        if len(text):
            return probe.ids[: text[0]], probe.ids[text[-1] + 1 :]
    raise ValueError("The tokenizer makes nothing of any of its own tokens.")
