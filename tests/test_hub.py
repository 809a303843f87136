"""What the hub says of a name, gated, private, unknown, offline, is what the user reads, with what to do about it."""

import json
import os
import subprocess
import sys

import pytest
from hub import hub
from ranks import toy_run

from arguments import ROOT

ASK = """
import json, sys
from fabric_llm import documents, model, tokenizer

said = []
for name in sys.argv[1:]:
    for ask in (model.load_config, tokenizer.load_tokenizer, documents._hub_reader):
        try:
            said.append(f"{ask(name)}")
        except ValueError as error:
            said.append(f"{error}")
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    with hub(tmp_path_factory.mktemp("hub")) as variables:
        yield {**variables, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def ask(environment, *names, folder=None):
    """{name: [what is said of it as a model, a tokenizer, a dataset]}"""
    command = [sys.executable, "-c", ASK, *names]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    return {name: said[3 * k : 3 * k + 3] for k, name in enumerate(names)}


LOG_IN = "log in with `hf auth login`, or set HF_TOKEN"
ANSWERS = {
    "org/gated": ["gated on the Hub: ask for access at http://127.0.0.1:", "org/gated, then", LOG_IN],
    "org/gated-anonymous": ["gated on the Hub: ask for access at", "org/gated-anonymous, then", LOG_IN],
    "org/nothing": [
        "no such folder here, and the Hub shows without a token no",
        "check the spelling",
        "private",
        LOG_IN,
    ],
    "org/private": [
        "no such folder here, and the Hub shows without a token no",
        "check the spelling",
        "private",
        LOG_IN,
    ],
    "org/token": ["the Hub doesn't take the token of this machine (HF_TOKEN, or ", LOG_IN],
    "org/disabled": ["the Hub has disabled it"],
    "org/forbidden": ["the Hub forbids it to the token of this machine", "permission to read"],
}


def test_the_hub_is_heard(environment, tmp_path):
    (tmp_path / "org").mkdir()
    found = ask(environment, *ANSWERS, folder=tmp_path)
    for name, words in ANSWERS.items():
        for kind, said in zip(("model", "tokenizer", "dataset"), found[name], strict=True):
            assert all(word in said for word in words), (kind, said)
            assert name in said and len(said.splitlines()) == 1 and len(said) < 400, said
    assert "there is a folder 'org' here, without 'nothing'" in found["org/nothing"][0]


def test_a_token_that_may_not(environment):
    found = ask({**environment, "HF_TOKEN": "hf_of_somebody"}, "org/gated", "org/nothing")
    assert all("use a token of the account that has it" in said for said in found["org/gated"])
    assert all("shows the account of this machine's token no" in said for said in found["org/nothing"])


def test_a_repository_without_a_model(environment):
    [said, _, _] = ask(environment, "org/empty")["org/empty"]
    assert "it has no config.json of a model that transformers knows" in said and len(said.splitlines()) == 1


def test_offline(environment):
    found = ask({**environment, "HF_HUB_OFFLINE": "1"}, "org/gated")["org/gated"]
    for said in found:
        assert "HF_HUB_OFFLINE is set" in said and environment["HF_HOME"] in said and "hf download" in said, said


@pytest.mark.slow
def test_a_hub_that_fails_or_cannot_be_reached(environment):
    """huggingface_hub tries for twenty seconds each."""
    found = ask(environment, "org/busy", "org/down")
    assert all("too many requests" in said for said in found["org/busy"])
    assert all("the Hub fails (503): try again later" in said for said in found["org/down"])
    for said in ask({**environment, "HF_ENDPOINT": "http://127.0.0.1:9"}, "org/name")["org/name"]:
        assert "the Hub at http://127.0.0.1:9 can't be reached, and it isn't in the cache" in said


def test_train_py_says_it(environment, toys, tmp_path):
    words = [str(word) for word in (*toy_run(toys, tmp_path), "--model_name", "org/gated")]
    command = [sys.executable, str(ROOT / "train.py"), *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("train.py: error: No model 'org/gated': it is gated on the Hub: ask for access at")
    assert len(done.stderr.splitlines()) == 1 and os.listdir(tmp_path) == []
