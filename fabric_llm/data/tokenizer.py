"""Load or train a tokenizer, and encode documents with it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from fabric_llm.base import hub
from fabric_llm.base.faults import REFUSED, Fault, one_line
from fabric_llm.base.files import check_name

END_OF_TEXT = "<|endoftext|>"
# Many documents in a batch keep all cores of the tokenizer busy, few characters keep its working memory small: it takes
# about 120 bytes a character.
BATCH_DOCUMENTS = 1024
BATCH_CHARACTERS = 4_000_000


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a local folder or a hub name.

    Raises Fault (77) for one that needs Python code of its own or would write files elsewhere when it is saved, and
    whatever transformers, huggingface_hub and the tokenizer's class raise where it can't be loaded.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except Exception as error:
        if "custom code" in str(error) or "trust_remote_code" in str(error):
            raise Fault(f"tokenizer {name} needs Python code of its own, which is never run.", REFUSED) from error
        raise
    for template in tokenizer.chat_template if isinstance(tokenizer.chat_template, dict) else ():
        check_name(template, Path(name) / "tokenizer_config.json")  # each is saved as a file
    return tokenizer


def packing_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """A tokenizer that can prepare data. Raises ValueError for one that can't be loaded, isn't fast, or has no EOS token."""
    try:
        tokenizer = load_tokenizer(name)
    except Fault:
        raise
    except Exception as error:
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

    It holds all 256 bytes, so that any text can be decoded again. `<|endoftext|>`, id 0, is BOS, EOS and padding. The
    same texts give the same tokenizer.
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
    """encode(documents, skipped): from (where, text) of each document to its tokens, int32 [tokens].

    A document of which the tokenizer's normalizer leaves nothing is counted in `skipped`. Raises ValueError for text that
    the tokenizer turns into a special token.
    """
    eos = hf_tokenizer.eos_token_id
    backend.no_truncation()  # which tokenizer.json may ask for
    backend.no_padding()
    backend.encode_special_tokens = True  # transformers' split_special_tokens
    before, after = _special_tokens_around(backend)
    before = np.array([token for token in before if token != eos], dtype=np.int32)
    after = np.array([token for token in after if token != eos] + [eos], dtype=np.int32)
    # A Unigram or WordLevel model, whose vocabulary holds its special tokens as words, still finds them in text. Only
    # the unknown token may come from text.
    forbidden = np.array(sorted({*hf_tokenizer.all_special_ids} - {hf_tokenizer.unk_token_id} | {eos}))

    def encode(documents: Iterable[tuple[str, str]], skipped: dict) -> Iterator[np.ndarray]:
        for batch in _batches(documents):
            # The backend itself makes no attention masks or offsets, and doesn't warn of documents longer than the model's
            # context.
            encodings = backend.encode_batch_fast([text for _, text in batch], add_special_tokens=False)
            for (where, _), encoding in zip(batch, encodings, strict=True):
                body = np.array(encoding.ids, dtype=np.int32)
                if not len(body):
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
