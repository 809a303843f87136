"""Bytes of text that tokens stand for: those of a text's tokens add up to the text, in tokenizers
of each kind."""

import json

import pytest
from conftest import prepare
from ranks import metrics, train_ranks
from test_context_parallel import run_of
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from fabric_llm.data.token_bytes import bytes_are_lost, bytes_of_tokens
from fabric_llm.prepare.summary import summary
from fabric_llm.prepare.tokenizer import train_byte_level_bpe

TEXTS = [
    "Grüße, 日本語 and 🎉!\n\tdef f(x):\n    return x ** 2\n",
    "one two  three   four",
    "ünïcödé çà et là",
] * 20


def byte_level():
    return train_byte_level_bpe(TEXTS, vocab_size=400)


def sentencepiece_bpe():
    """As Llama 2's: spaces are part of words, and what isn't known becomes bytes."""
    backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Replace(" ", "▁")
    fallback = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(fallback)
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    some = [text.replace("🎉", "").replace("日", "") for text in TEXTS]
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=special, show_progress=False)
    backend.train_from_iterator(some, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


def unigram():
    backend = Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    backend.decoder = decoders.Metaspace(prepend_scheme="never")
    special = ["<unk>", "</s>"]
    trainer = trainers.UnigramTrainer(vocab_size=120, special_tokens=special, unk_token="<unk>")
    backend.train_from_iterator(TEXTS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="</s>")


@pytest.mark.parametrize("make", [byte_level, sentencepiece_bpe, unigram])
def test_the_tokens_of_a_text_have_its_bytes(make):
    tokenizer = make()
    counts = bytes_of_tokens(tokenizer, len(tokenizer) + 3)
    assert counts.shape == (len(tokenizer) + 3,)
    assert (counts[-3:] == 0).all(), "rows beyond the tokenizer's"
    assert (counts[tokenizer.all_special_ids] == 0).all()
    for text in set(TEXTS):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        if tokenizer.unk_token_id not in ids:
            assert counts[ids].sum() == len(text.encode()), text


def bytes_of(tokenizer, text):
    return bytes_of_tokens(tokenizer, len(tokenizer))[tokenizer(text)["input_ids"]].sum()


def test_added_words_count_as_they_are_written():
    tokenizer = byte_level()
    tokenizer.add_tokens(["Donaudampfschiff", "ß!"])
    text = "das Donaudampfschiff ß! fährt"
    assert bytes_of(tokenizer, text) == len(text.encode())


def test_tokens_beyond_a_models_vocabulary_are_left_out():
    assert len(bytes_of_tokens(byte_level(), 300)) == 300


def letters():
    """A vocabulary of letters without a decoder, as those of DNA: what else a text holds is dropped
    without a word."""
    vocabulary = {letter: number for number, letter in enumerate(["A", "C", "G", "T", "CG"])}
    backend = Tokenizer(models.BPE(vocabulary, [("C", "G")]))
    backend.add_special_tokens(["<end>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")


def test_letters_without_a_decoder_stand_for_themselves():
    tokenizer = letters()
    assert bytes_of_tokens(tokenizer, len(tokenizer)).tolist() == [1, 1, 1, 1, 2, 0]


def test_bytes_without_a_decoder_are_bytes():
    tokenizer = byte_level()
    tokenizer.backend_tokenizer.decoder = None
    assert bytes_of(tokenizer, TEXTS[0]) == len(TEXTS[0].encode())


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """prepared(tokenizer, texts): the folder of a dataset, and its manifest."""

    def make(tokenizer, texts):
        folder = tmp_path_factory.mktemp("prepared")
        tokenizer.save_pretrained(folder / "tokenizer")
        lines = [json.dumps({"text": text}) + "\n" for text in texts]
        (folder / "a.jsonl").write_text("".join(lines))
        manifest = prepare(
            input=[folder / "a.jsonl"], output=folder / "data", context_length=24,
            tokenizer=str(folder / "tokenizer"), validation_fraction=0.3,
        )
        return folder / "data", manifest

    return make


KNOWN = [f"{'one two ' * (3 + number)}three" for number in range(40)]
UNKNOWN = [f"one two {'မြန်မာ ' * (3 + number)}three" for number in range(40)]


def test_unknown_tokens_are_counted_and_said(prepared):
    folder, manifest = prepared(unigram(), UNKNOWN)
    tokenizer = unigram()
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in UNKNOWN]
    text, unknown = manifest["text"], sum(some.count(tokenizer.unk_token_id) for some in ids)
    assert unknown > 500 and text["unknown"] == unknown
    assert text["tokens"] == sum(map(len, ids)) + len(UNKNOWN)
    assert text["bytes"] == sum(len(text.encode()) for text in UNKNOWN)
    assert text["bytes"] > 2 * text["bytes_of_tokens"]
    assert bytes_are_lost(manifest)
    said = summary(manifest)
    assert f"warning    {unknown:,} tokens (" in said and " %) are <unk>: " in said
    assert "% of the bytes of the text, so evaluations give no bits per byte" in said
    assert "warning" not in summary(prepared(unigram(), KNOWN)[1])


def test_letters_that_become_no_token_are_lost_too(prepared):
    some = [f"{'ACGT' * (9 + number)} {'NNN' * number}" for number in range(40)]
    _, manifest = prepared(letters(), some)
    assert manifest["text"]["unknown"] == 0 and bytes_are_lost(manifest)
    assert "so evaluations give no bits per byte" in summary(manifest)
    all_but_one = ["ACGT" * (9 + number) for number in range(40)] + ["nothing of it"]
    _, manifest = prepared(letters(), all_but_one)
    assert not bytes_are_lost(manifest)
    assert manifest["text"]["bytes_of_tokens"] == manifest["text"]["bytes"]
    assert manifest["skipped"]["bad"] == 1
    assert "of which this tokenizer makes no token" in summary(manifest)


def test_a_set_that_has_lost_bytes_has_no_loss_in_bits_per_byte(toys, prepared, tmp_path):
    tokenizer = unigram()
    known, unknown = (prepared(tokenizer, texts)[0] for texts in (KNOWN, UNKNOWN))
    beside = ("--eval_data", f"other={unknown}")
    train_ranks(1, *run_of(toys / "llama", known, tmp_path, "run", *beside))
    found = metrics(tmp_path / "run", "eval")[0]
    assert found["validation"]["bits_per_byte"] > 0 and found["other"]["loss"] > 0
    assert "bits_per_byte" not in found["other"]


def test_a_manifest_that_does_not_say_it_is_believed():
    for said in ({}, {"text": None}, {"text": {"tokens": "many"}}, {"text": []}):
        assert not bytes_are_lost(said)
