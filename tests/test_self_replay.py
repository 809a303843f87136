"""prepare_data.py --self_replay: a dataset of documents that a model samples, in its own distribution and resumable."""

import contextlib
import io
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from ranks import train_ranks
from transformers import AutoModelForCausalLM, GenerationConfig, GPT2Config, LlamaConfig

from fabric_llm.base.failpoints import VARIABLE
from fabric_llm.model import sampling as module
from fabric_llm.model.sampling import Sampler, self_replay
from fabric_llm.prepare.encoding import Job, generate
from fabric_llm.prepare.prepare import prepare
from fabric_llm.prepare.tokenizer import train_byte_level_bpe

ROOT = Path(__file__).parent.parent
CONTEXT = 32


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A folder with models `llama` and `gpt2` with a tokenizer, whose generation settings are those of a chat model."""
    folder = tmp_path_factory.mktemp("models")
    tokenizer = train_byte_level_bpe(["some words of a text, and other words\n"] * 20, vocab_size=290)
    common = {"vocab_size": 304, "bos_token_id": 0, "eos_token_id": 0}  # padded: the tokenizer has fewer
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    llama = LlamaConfig(**sizes, max_position_embeddings=64, tie_word_embeddings=False, **common)
    gpt2 = GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=20, **common)
    for name, config in (("llama", llama), ("gpt2", gpt2)):
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            model.get_output_embeddings().weight.mul_(12)  # far from uniform, so that a temperature would show
        model.generation_config = GenerationConfig(
            do_sample=True, temperature=0.3, top_k=5, repetition_penalty=1.5, **{"bos_token_id": 0, "eos_token_id": 0}
        )
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder


def test_samples_are_of_the_models_own_distribution(models):
    """-log p of what was sampled is, on average, the entropy: neither a temperature nor a cut-off is at work."""
    sampler = Sampler(str(models / "llama"), longest=12)
    model, surprise, entropy = sampler.model, [], []
    for seed in range(30):
        for ids in sampler.documents(seed, 32):
            sampled = torch.tensor([*ids.tolist(), *([0] if len(ids) < 12 else [])])  # with the EOS that ended it
            with torch.no_grad():
                logits = model(torch.tensor([[0, *sampled[:-1].tolist()]])).logits[0].double()
            logits[:, len(sampler.tokenizer) :] = -torch.inf  # rows that no token uses
            some = torch.log_softmax(logits, -1)
            surprise += (-some[torch.arange(len(sampled)), sampled]).tolist()
            entropy += torch.special.entr(some.exp()).sum(-1).tolist()
    error = np.std(np.subtract(surprise, entropy)) / np.sqrt(len(surprise))
    assert len(surprise) > 5000 and abs(np.mean(surprise) - np.mean(entropy)) < 5 * error, (np.mean(surprise), error)
    assert np.mean(entropy) < 0.9 * np.log(290)


def test_a_dataset_of_samples_trains(models, tmp_path):
    words = [
        "--self_replay",
        models / "llama",
        "--tokens",
        6000,
        "--output",
        tmp_path / "data",
        "--context_length",
        CONTEXT,
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, ROOT / "prepare_data.py", *map(str, words)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "sampled    6,000 tokens or more of" in done.stdout
    manifest = json.loads((tmp_path / "data" / "manifest.json").read_text())
    assert manifest["self_replay"]["seed"] == 1234 and manifest["self_replay"]["temperature"] == 1.0
    splits = datasets.load_from_disk(str(tmp_path / "data"))
    ids = np.concatenate([np.asarray(split["input_ids"]).ravel() for split in splits.values()])
    assert 6000 - 2 * CONTEXT <= len(ids) < 8000 and ids.max() < 290 and (ids == 0).any()
    mix = f"new={tmp_path / 'data'}:1"
    train_ranks(1, "--model_name", models / "llama", "--data_mix", mix, "--output_dir", tmp_path, "--max_step", 2)


def filled(models, folder, tokens, seed):
    """(tokens, documents) of at least so many tokens of documents of up to 31."""
    folder.mkdir()
    job = Job(str(folder), "text", False, before=[], after=[0], forbidden={}, dtype="uint16")
    marks = generate(self_replay(str(models / "llama"), tokens, CONTEXT, seed), job, lambda tokens: None)
    return sum(mark.tokens for mark in marks), sum(mark.documents for mark in marks)


@pytest.mark.longer
def test_no_more_is_sampled_than_asked_for_and_short_documents_are_not_favoured(models, tmp_path, monkeypatch):
    """Whole documents until there are enough: their mean length is that of documents without an end to come to (Wald)."""
    sampler = cache(Sampler)
    monkeypatch.setattr(module, "Sampler", sampler)
    lengths = [len(ids) + 1 for seed in range(4) for ids in sampler(str(models / "llama"), 31).documents(seed, 256)]
    marks = [filled(models, tmp_path / str(seed), 60, seed) for seed in range(60)]
    tokens, documents = np.array(marks).T
    assert all(60 <= tokens) and all(tokens < 60 + 4 * 32), "before: 32 documents at once, about 700"
    mean = np.mean(lengths)
    error = np.std(tokens - mean * documents) / np.sqrt(len(marks)) / documents.mean()
    assert abs(tokens.sum() / documents.sum() - mean) < 4 * error, (mean, tokens.sum() / documents.sum(), error)
    assert np.std(lengths) > 5 and error < 0.1 * mean, (np.std(lengths), mean, error)


@pytest.mark.parametrize("action", ["term", pytest.param("kill", marks=pytest.mark.longer)])
def test_a_stop_keeps_what_was_sampled_and_goes_on_to_the_same_bytes(models, tmp_path, action):
    options = {"tokenizer": str(models / "gpt2"), "context_length": CONTEXT, "inputs": []}
    whole = prepare(self_replay(str(models / "gpt2"), 3000, CONTEXT, 1234), output=tmp_path / "whole", **options)
    words = ["--self_replay", models / "gpt2", "--tokens", 3000, "--context_length", CONTEXT]
    command = [sys.executable, ROOT / "prepare_data.py", *words, "--output", tmp_path / "again"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    environment[VARIABLE] = f"prepare.sampled:count=4:do={action}"
    done = subprocess.run([*map(str, command)], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == (-9 if action == "kill" else 75), done.stderr
    assert action == "kill" or "the same command goes on from there" in done.stderr
    marks = sorted((tmp_path / ".again.preparing").glob("0*.json"))
    tokens = sum(json.loads(mark.read_text())["tokens"] for mark in marks)
    assert [mark.name for mark in marks] == [f"{number:06d}.json" for number in range(4)] and 0 < tokens < 3000
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        again = prepare(self_replay(str(models / "gpt2"), 3000, CONTEXT, 1234), output=tmp_path / "again", **options)
    assert f"Going on: {tokens:,} of 3,000 tokens are there." in said.getvalue()
    assert whole["self_replay"]["longest_document"] == 19, "the model has positions for 20"
    assert whole["splits"] == again["splits"], "hashes of the rows as well"


def test_a_split_without_a_row_keeps_what_was_sampled(models, tmp_path):
    """No document of gpt2's fills a row, and a single one is drawn."""
    options = {"tokenizer": str(models / "gpt2"), "context_length": CONTEXT, "inputs": []}
    options |= {"output": tmp_path / "data"}
    generated = self_replay(str(models / "gpt2"), 300, CONTEXT, seed=3)
    with pytest.raises(ValueError, match="a larger --validation_fraction"):
        prepare(generated, validation_fraction=1e-9, **options)
    prepare(generated._replace(fill=None), validation_fraction=0.4, **options)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--self_replay MODEL", "go together"),
        ("--tokens 100", "go together"),
        ("--self_replay MODEL --tokens 0", "--tokens must be positive"),
        ("--self_replay MODEL --tokens 100 --input x.txt", "--input doesn't go with --self_replay"),
        ("--self_replay MODEL --tokens 100 --train_tokenizer 300", "--train_tokenizer doesn't go"),
        ("--self_replay MODEL --tokens 60", "ask for 64 at least"),
        ("--self_replay nowhere/at/all --tokens 100", "nowhere/at/all"),
        ("--tokenizer MODEL", "no input"),
    ],
)
def test_bad_input_gets_one_sentence(models, tmp_path, capsys, words, sentence):
    import prepare_data

    argv = [str(models / "llama") if word == "MODEL" else word for word in words.split()]
    with pytest.raises(SystemExit) as stopped:
        prepare_data.main([*argv, "--output", str(tmp_path / "data"), "--context_length", "32"])
    said = capsys.readouterr().err
    assert stopped.value.code == 2 and said.count("\n") == 1 and sentence in said
    assert not (tmp_path / "data").exists()


def test_random_weights_are_refused(models, tmp_path):
    (tmp_path / "random").mkdir()
    (tmp_path / "random" / "config.json").write_text((models / "llama" / "config.json").read_text())
    with pytest.raises(ValueError, match="random ones know nothing"):
        self_replay(str(tmp_path / "random"), 100, CONTEXT, 1)
