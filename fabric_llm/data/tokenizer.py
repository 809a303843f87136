"""A tokenizer: found or trained, and documents -> token ids."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from fabric_llm.base import hub
from fabric_llm.base.faults import REFUSED, Fault
from fabric_llm.data.documents import one_line

END_OF_TEXT = "<|endoftext|>"
# A batch is bounded both ways: many short documents keep every core of the tokenizer
# busy, few long ones keep its working memory (some 120 bytes a character) small.
BATCH_DOCUMENTS = 1024
BATCH_CHARACTERS = 4_000_000


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The fast tokenizer of a local folder or a hub name.

    Raises:
        ValueError: it cannot be loaded, is not a fast one, or has no EOS token.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # the hub, its client and each tokenizer class raise their own
        if "custom code" in str(error):
            raise Fault(f"tokenizer {name} needs Python code of its own, which is never run.", REFUSED) from error
        said = None if os.path.exists(name) else hub.answer(name, error, "tokenizer")
        raise ValueError(
            f"tokenizer {name} is neither a folder here nor one that can be read from the hub: {said or one_line(error)}"
        ) from error
    if not tokenizer.is_fast:
        raise ValueError(f"tokenizer {name} has no fast version (tokenizer.json), which preparing data needs")
    if tokenizer.eos_token_id is None:
        raise ValueError(f"tokenizer {name} has no EOS token to end documents with: set eos_token in its folder")
    return tokenizer


def train_byte_level_bpe(texts: Iterable[str], *, vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE of at most `vocab_size` tokens.

    All 256 bytes are in it, so any text comes back from its tokens; `<|endoftext|>`,
    id 0, is its BOS, EOS and padding. The same texts give the same tokenizer.
    """
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT
    )


def encoder(backend: Tokenizer, hf_tokenizer: PreTrainedTokenizerBase) -> Callable:
    """A function from an iterator of (where, text) to one of int32 token arrays."""
    eos = hf_tokenizer.eos_token_id
    backend.no_truncation()  # a tokenizer.json may say otherwise
    backend.no_padding()
    backend.encode_special_tokens = True  # transformers' split_special_tokens
    before, after = _special_tokens_around(backend)
    before = np.array([token for token in before if token != eos], dtype=np.int32)
    after = np.array([token for token in after if token != eos] + [eos], dtype=np.int32)
    # A model whose vocabulary spells its special tokens whole (Unigram, WordLevel) finds
    # them in text all the same. The unknown token alone may come from text.
    forbidden = np.array(sorted({*hf_tokenizer.all_special_ids} - {hf_tokenizer.unk_token_id} | {eos}))

    def encode(documents: Iterable[tuple[str, str]], skipped: dict) -> Iterator[np.ndarray]:
        for batch in _batches(documents):
            # Straight from the backend: no attention masks, no offsets, and no warning
            # that a document is longer than the model.
            encodings = backend.encode_batch_fast([text for _, text in batch], add_special_tokens=False)
            for (where, _), encoding in zip(batch, encodings, strict=True):
                body = np.array(encoding.ids, dtype=np.int32)
                if not len(body):  # a normaliser may leave nothing of a text
                    skipped["empty"] += 1
                    continue
                found = forbidden[np.isin(forbidden, body)]
                if len(found):
                    raise ValueError(
                        f"{where} holds text that this tokenizer turns into its special token"
                        f" {hf_tokenizer.convert_ids_to_tokens(int(found[0]))}:"
                        f" take it out of the text, or choose a byte-level tokenizer"
                    )
                yield np.concatenate([before, body, after])

    return encode


def _special_tokens_around(backend: Tokenizer) -> tuple[list[int], list[int]]:
    """The special tokens that the tokenizer itself puts before and after a text."""
    probe = backend.encode("a", add_special_tokens=True)
    text = [position for position, special in enumerate(probe.special_tokens_mask) if not special]
    return probe.ids[: text[0]], probe.ids[text[-1] + 1 :]


def _batches(documents: Iterable[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
    batch, characters = [], 0
    for document in documents:
        if batch and (len(batch) == BATCH_DOCUMENTS or characters + len(document[1]) > BATCH_CHARACTERS):
            yield batch
            batch, characters = [], 0
        batch.append(document)
        characters += len(document[1])
    if batch:
        yield batch
