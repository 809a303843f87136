"""What the hub says of a name, gated, private, unknown, offline, is what the user reads, with what to do about it."""

import json
import os
import subprocess
import sys

import pytest
from hub import hub
from ranks import toy_run

from arguments import ROOT

pytestmark = pytest.mark.longer

ASK = """
import json, os, sys
import datasets, huggingface_hub
from fabric_llm.prepare import documents, tokenizer
from fabric_llm.model import loading

def load_dataset(name):
    return documents.load_splits("hub", name)


said = []
for name in sys.argv[1:]:
    if name.startswith("HF_TOKEN="):
        os.environ["HF_TOKEN"] = name.split("=")[1]
    elif name == "offline":  # as HF_HUB_OFFLINE=1, which both libraries read when they are imported
        huggingface_hub.constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    else:
        said.append([])
        for ask in (loading.load_config, tokenizer.packing_tokenizer, load_dataset):
            try:
                said[-1].append(f"{ask(name)}")
            except ValueError as error:
                said[-1].append(f"{error}")
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    with hub(tmp_path_factory.mktemp("hub")) as variables:
        yield {**variables, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def ask(environment, *words, folder=None):
    """[what is said of it as a model, a tokenizer, a dataset] of each name among `words`, see ASK."""
    command = [sys.executable, "-c", ASK, *words]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


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


@pytest.fixture(scope="module")
def heard(environment, tmp_path_factory):
    """What is said without a token, then with one, then offline."""
    folder = tmp_path_factory.mktemp("folder")
    words = (*ANSWERS, "org/empty", "HF_TOKEN=hf_of_somebody", "org/gated", "org/nothing", "offline", "org/gated")
    return ask(environment, *words, folder=folder)


def test_the_hub_is_heard(heard):
    for (name, words), answers in zip(ANSWERS.items(), heard, strict=False):
        for kind, said in zip(("model", "tokenizer", "dataset"), answers, strict=True):
            assert all(word in said for word in words), (kind, said)
            assert name in said and len(said.splitlines()) == 1 and len(said) < 400, said


def test_a_repository_without_a_model(heard):
    said = heard[len(ANSWERS)][0]
    assert (
        "it has no config.json of a model that transformers knows; it may be an adapter" in said
        and len(said.splitlines()) == 1
    )


def test_a_token_that_may_not(heard):
    gated, nothing = heard[len(ANSWERS) + 1 : len(ANSWERS) + 3]
    assert all("use a token of the account that has it" in said for said in gated)
    assert all("shows the account of this machine's token no" in said for said in nothing)


def test_offline(heard, environment):
    for said in heard[-1]:
        assert "HF_HUB_OFFLINE is set" in said and environment["HF_HOME"] in said and "hf download" in said, said


@pytest.mark.slow
def test_a_hub_that_fails(environment):
    """huggingface_hub tries for twenty seconds each."""
    busy, down = ask(environment, "org/busy", "org/down")
    assert all("too many requests" in said for said in busy)
    assert all("the Hub fails (503): try again later" in said for said in down)


def test_a_hub_that_cannot_be_reached_is_given_up_at_once(environment):
    """Tried again and again it takes half a minute for each of the three, and a line for each trial."""
    done = subprocess.run(
        [sys.executable, "-c", ASK, "org/name"],
        env={**environment, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_DOWNLOAD_TIMEOUT": "60"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert "etry" not in done.stderr, done.stderr
    [found] = json.loads(done.stdout)
    for said in found:
        assert "the Hub at http://127.0.0.1:9 can't be reached, and it isn't in the cache" in said


@pytest.mark.parametrize(
    "command",
    [
        "train.py --model_name org/name --train_data_dir DATA --output_dir runs",
        "prepare_data.py --input DATA --tokenizer org/name --output new",
        "prepare_data.py --input org/name --train_tokenizer 300 --output new",
        "prepare_data.py --self_replay org/name --tokens 9999 --output new",
    ],
)
def test_a_hub_that_cannot_be_reached_is_told_before_torch_is_imported(environment, toys, tmp_path, command):
    script, *words = command.replace("DATA", str(toys / "data")).split()
    refuse = "import runpy, sys; sys.modules.update(torch=None, datasets=None); runpy.run_path(sys.argv[0], run_name='__main__')"
    code = f"import sys; sys.argv[:1] = []; {refuse}"
    done = subprocess.run(
        [sys.executable, "-c", code, str(ROOT / script), *words],
        env={**environment, "HF_ENDPOINT": "http://127.0.0.1:9"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2 and "can't be reached, and it isn't in the cache" in done.stderr, done.stderr
    assert "org/name" in done.stderr and len(done.stderr.splitlines()) == 1 and os.listdir(tmp_path) == []


def test_train_py_says_it(environment, toys, tmp_path):
    words = [str(word) for word in (*toy_run(toys, tmp_path), "--model_name", "org/gated")]
    command = [sys.executable, str(ROOT / "train.py"), *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith(
        "train.py: error: The configuration of 'org/gated' can't be read: it is gated on the Hub: ask for access at"
    )
    assert len(done.stderr.splitlines()) == 1 and os.listdir(tmp_path) == []
