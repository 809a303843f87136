"""What the hub says of a name, gated, private, unknown, offline, is what the user reads, in one
sentence."""

import json
import re
import subprocess
import sys
import time

import datasets
import pytest
from hub import Revisions, hub
from transformers import AutoTokenizer

from arguments import ROOT

pytestmark = pytest.mark.longer

ASK = """
import json, sys
import datasets, huggingface_hub
from fabric_llm.prepare import documents, tokenizer
from fabric_llm.model import loading

def load_dataset(name):
    return documents.load_splits("hub", name)


said = []
for name in sys.argv[1:]:
    if name == "offline":  # as HF_HUB_OFFLINE=1, which both libraries read when they are imported
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


def run(environment, *words, folder=None):
    """The process that Python becomes with these words."""
    how = {"cwd": folder, "capture_output": True, "text": True, "timeout": 500}
    return subprocess.run([sys.executable, *map(str, words)], env=environment, **how)


ANSWERS = {  # name on the hub -> a word of each library that asks for it
    "org/gated": "gated",
    "org/gated-anonymous": "gated",
    "org/nothing": "org/nothing",
    "org/private": "org/private",
    "org/token": "Invalid credentials",
}


@pytest.fixture(scope="module")
def heard(environment, tmp_path_factory):
    """[what is said of it as a model, a tokenizer, a dataset] of each name, see ASK; without a
    token, then offline."""
    words = (*ANSWERS, "org/empty", "offline", "org/gated")
    done = run(environment, "-c", ASK, *words, folder=tmp_path_factory.mktemp("folder"))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_hub_is_heard(heard):
    for (name, word), answers in zip(ANSWERS.items(), heard, strict=False):
        for said in answers:
            assert name in said and word in said, said
            assert len(said.splitlines()) == 1 and len(said) < 500, said


def test_a_repository_without_a_model(heard):
    said = heard[len(ANSWERS)][0]
    assert "Unrecognized model in org/empty" in said and len(said.splitlines()) == 1


def test_offline(heard):
    for said in heard[-1]:
        words = ("couldn't find them in the cached files", "HF_HUB_OFFLINE is set")
        assert any(word in said for word in words), said


def test_a_hub_that_cannot_be_reached_is_given_up_at_once(environment):
    """Tried again and again it takes half a minute for each of the three, and a line for each
    trial."""
    nowhere = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_DOWNLOAD_TIMEOUT": "60"}
    began = time.monotonic()
    done = run({**environment, **nowhere}, "-c", ASK, "org/name")
    assert time.monotonic() - began < 100
    assert "etry" not in done.stderr, done.stderr
    [found] = json.loads(done.stdout)
    for said in found:
        assert "couldn't find them in the cached files" in said or "Couldn't" in said, said


def test_all_of_a_dataset_is_read_at_the_commit_of_the_start(environment, tmp_path):
    """It is opened for the tokenizer and for the tokens, and anew for each split, which may be
    hours apart. A start after a kill takes the commit of then, also for what was done before."""
    hub, output = Revisions(), tmp_path / "out"
    there = {**environment, "HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path / "cache")}
    command = [sys.executable, str(ROOT / "prepare_data.py"), "--input", "org/name"]
    command += ["--train_tokenizer", "300", "--context_length", "16", "--output", str(output)]
    for failpoint in ("prepare.rows", ""):
        newest = str(len(hub.commits) - 1)
        done = subprocess.run(
            command,
            env={**there, "FABRIC_LLM_FAILPOINT": failpoint},
            capture_output=True,
            text=True,
            timeout=500,
        )
        assert done.returncode == (-9 if failpoint else 0), done.stderr
    tokenizer = AutoTokenizer.from_pretrained(output / "tokenizer")
    for name, split in datasets.load_from_disk(str(output)).items():
        text = tokenizer.decode([token for row in split["input_ids"] for token in row])
        assert {*re.findall(r"commit(\d+) document", text)} == {newest}, name
