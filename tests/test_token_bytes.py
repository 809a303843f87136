"""Bytes of text that tokens stand for: those of a text's tokens add up to the text, in tokenizers of each kind."""

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from fabric_llm.data.token_bytes import bytes_of_tokens
from fabric_llm.prepare.tokenizer import train_byte_level_bpe

TEXTS = ["Grüße, 日本語 and 🎉!\n\tdef f(x):\n    return x ** 2\n", "one two  three   four", "ünïcödé çà et là"] * 20


def byte_level():
    return train_byte_level_bpe(TEXTS, vocab_size=400)


def sentencepiece_bpe():
    """As Llama 2's: spaces are part of words, and what isn't known becomes bytes."""
    backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    some = [text.replace("🎉", "").replace("日", "") for text in TEXTS]
    backend.train_from_iterator(some, trainers.BpeTrainer(vocab_size=500, special_tokens=special, show_progress=False))
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def unigram():
    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    backend.decoder = decoders.Metaspace(prepend_scheme="never")
    trainer = trainers.UnigramTrainer(vocab_size=120, special_tokens=["<unk>", "</s>"], unk_token="<unk>")
    backend.train_from_iterator(TEXTS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="</s>")


@pytest.mark.parametrize("make", [byte_level, sentencepiece_bpe, unigram])
def test_the_tokens_of_a_text_have_its_bytes(make):
    tokenizer = make()
    counts = bytes_of_tokens(tokenizer, len(tokenizer) + 3)
    assert counts.shape == (len(tokenizer) + 3,) and (counts[-3:] == 0).all(), "rows beyond the tokenizer's"
    assert (counts[tokenizer.all_special_ids] == 0).all()
    for text in set(TEXTS):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        if tokenizer.unk_token_id not in ids:
            assert counts[ids].sum() == len(text.encode()), text


def test_added_words_count_as_they_are_written():
    tokenizer = byte_level()
    tokenizer.add_tokens(["Donaudampfschiff", "ß!"])
    counts = bytes_of_tokens(tokenizer, len(tokenizer))
    text = "das Donaudampfschiff ß! fährt"
    assert counts[tokenizer(text)["input_ids"]].sum() == len(text.encode())


def test_tokens_beyond_a_models_vocabulary_are_left_out():
    assert len(bytes_of_tokens(byte_level(), 300)) == 300
