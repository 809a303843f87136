"""Law 15: what is written opens, elsewhere and later: as a causal LM, by older and newer
transformers, by another user.

FABRIC_LLM_OTHER_TRANSFORMERS names interpreters of other environments, with a colon between two
(docs/testing.md). What they read is compared with the logits and tokens of this one.
"""

import json
import os
import subprocess

import pytest
import torch
from conftest import TOY_CONFIGS, make_dataset
from families import COMMON, CONTEXT, FAMILIES, toy_config, write_model
from numpy.random import default_rng
from ranks import Job, toy_run, train_ranks
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GemmaTokenizer,
    LlamaConfig,
)

from fabric_llm.checkpoint import keep, whole
from fabric_llm.model import saving
from fabric_llm.model.loading import build_skeleton, load_config, open_weights
from fabric_llm.model.tokenizer import load_tokenizer, save_tokenizer
from fabric_llm.prepare.tokenizer import train_byte_level_bpe
from fabric_llm.weights import export as exporting

LONGER = pytest.mark.longer
QUICK = ("llama", "gemma3_text", "gpt_neox", "mixtral")
ALL = [family if family in QUICK else pytest.param(family, marks=LONGER) for family in FAMILIES]
TEXT, VOCABULARY = "to be or not to be that is the <question>", 300
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"rope_theta": 500000.0, "original_max_position_embeddings": 32}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(its newest checkpoint, the export) of a run of a Llama with scaled positions and a tokenizer
    with a SentencePiece model."""
    folder = tmp_path_factory.mktemp("run")
    config = {**TOY_CONFIGS["llama"].to_dict(), "vocab_size": VOCABULARY, "rope_parameters": LLAMA3}
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(LlamaConfig(**config)).save_pretrained(folder / "base")
    tokenizer = train_byte_level_bpe([TEXT.replace("<", "")] * 20, vocab_size=280)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<question>"]})
    tokenizer.save_pretrained(folder / "base")
    (folder / "base" / "tokenizer.model").write_bytes(b"of SentencePiece")
    make_dataset(folder / "data", default_rng(0))
    folders = ("--model_name", folder / "base", "--train_data_dir", folder / "data")
    words = "--run_name run --max_step 1 --precision 32-true --eval_iters 0".split()
    train_ranks(1, *folders, "--output_dir", folder, *words)
    checkpoint = keep.checkpoint_at(folder / "run")
    exporting.export(checkpoint, folder / "hf")
    return checkpoint, folder / "hf"


# ------------------------------------------------------------------------------- here


@pytest.mark.parametrize("family", ALL)
def test_the_configuration_that_is_saved_makes_the_same_model(tmp_path, family):
    skeleton = build_skeleton(toy_config(family), torch.float32)
    whole.require_opens(skeleton)
    saving.write_configuration(tmp_path, skeleton, None)
    again = AutoConfig.from_pretrained(tmp_path)
    assert type(again) is type(skeleton.config)
    positions = [getattr(one, "rope_parameters", None) for one in (again, skeleton.config)]
    assert positions[0] == positions[1]


VISION = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "attention_heads": 2}
VISION |= {"image_size": 8, "patch_size": 4}
SIZES = {**COMMON, "pad_token_id": 0}
NOT_AGAIN = {
    "mllama": {"text_config": {**SIZES, "cross_attention_layers": []}, "vision_config": VISION},
    "emu3": {"text_config": SIZES, "vocabulary_map": {"<image>": 5}},
}


@pytest.mark.parametrize("model_type", NOT_AGAIN)
def test_what_could_not_be_opened_again_is_refused_before_step_1(toys, tmp_path, model_type):
    AutoConfig.for_model(model_type, **NOT_AGAIN[model_type]).save_pretrained(tmp_path / "model")
    words = ("--model_name", tmp_path / "model", *"--max_step 1 --eval_iters 0".split())
    job = Job(1, *toy_run(toys, tmp_path / "out"), *words)
    assert job.wait(120) == [2], job.output
    assert "could be trained and saved, but not resumed or exported" in job.output[0]
    assert not list((tmp_path / "out").rglob("step-*"))


def test_the_tokenizer_says_nothing_of_this_machine_and_keeps_its_files(run):
    for folder in run:
        said = json.loads((folder / "tokenizer_config.json").read_text())
        assert not {"is_local", "local_files_only", "name_or_path"} & said.keys()
        assert said["tokenizer_class"] == "PreTrainedTokenizerFast"
        assert (folder / "tokenizer.model").read_bytes() == b"of SentencePiece"
        ours, theirs = (AutoTokenizer.from_pretrained(one) for one in (folder, run[0]))
        assert ours(TEXT)["input_ids"] == theirs(TEXT)["input_ids"]
        assert ours.all_special_tokens == ["<|endoftext|>", "<question>"]


def test_a_sentencepiece_model_stays_where_the_tokenizers_class_does_not_read_it(tmp_path):
    words = ["<pad>", "<eos>", "<bos>", "<unk>", "a"]
    vocabulary = {word: number for number, word in enumerate(words)}
    GemmaTokenizer(vocab=vocabulary, merges=[]).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"of SentencePiece")
    save_tokenizer(load_tokenizer(str(tmp_path)), tmp_path / "again")
    assert (tmp_path / "again" / "tokenizer.model").read_bytes() == b"of SentencePiece"
    assert str(tmp_path) not in (tmp_path / "again" / "tokenizer_config.json").read_text()


def test_older_names_of_positions_are_written_beside_the_new_ones(run):
    scaling = {name: value for name, value in LLAMA3.items() if name != "rope_theta"}
    for folder in run:
        said = json.loads((folder / "config.json").read_text())
        assert said["rope_parameters"] == LLAMA3 and said["rope_theta"] == 500000.0
        assert said["rope_scaling"] == scaling


# ------------------------------------------------------------------------------- another user


def test_files_and_folders_have_the_modes_of_new_ones(run, tmp_path):
    """So whoever may read what else this user writes may read these."""
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    for path in [*run, *run[0].rglob("*"), *run[1].rglob("*")]:
        new = tmp_path / ("folder" if path.is_dir() else "file")
        assert path.stat().st_mode == new.stat().st_mode, path


# ------------------------------------------------------------------- other versions of transformers

OTHERS = [path for path in os.environ.get("FABRIC_LLM_OTHER_TRANSFORMERS", "").split(":") if path]
READ = """
import json, sys
import torch, transformers
from transformers import AutoModelForCausalLM, AutoTokenizer
found, (ids, text, *folders) = {}, json.loads(sys.argv[1])
for folder in folders:
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        with torch.no_grad():
            found[folder] = model(torch.tensor([ids])).logits[0].tolist()
        if "/hf" in folder:
            tokenizer = AutoTokenizer.from_pretrained(folder)
            found["tokens"] = tokenizer(text)["input_ids"], tokenizer.all_special_tokens
    except Exception as error:
        found[folder] = f"{type(error).__name__}: {error}"
print("FOUND" + json.dumps([transformers.__version__, found]))
"""
# Families, and positions other than their own: of one kind for all layers, for each kind of layer,
# for a part of each head.
POSITIONS = {
    "llama": LLAMA3,
    "mistral": {"rope_type": "default", "rope_theta": 1e6},
    "qwen2": {
        **{"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0},
        "original_max_position_embeddings": 16,
    },
    "qwen3": {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0},
    "phi": {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.25},
    "gpt_neox": {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5},
    "gemma3_text": {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
    },
    "gpt2": None,
    "mixtral": {"rope_type": "default", "rope_theta": 1e6},
    "qwen3_moe": {"rope_type": "default", "rope_theta": 1e6},
}


def with_positions(family, folder):
    """A model of which positions change the logits by a lot, as an export writes it."""
    base = write_model(family, folder / "base" / family)
    model = AutoModelForCausalLM.from_pretrained(base)
    for parameter in model.parameters():
        parameter.data.mul_(8 if parameter.ndim > 1 else 1)
    if POSITIONS[family] is not None:
        model.config.rope_parameters = POSITIONS[family]
    model.save_pretrained(base)
    config = load_config(str(base))
    source = open_weights(str(base), config, torch.float32)
    exporting.write_model(folder / family, base, build_skeleton(config, torch.float32), source)
    return folder / family


@pytest.mark.longer
@pytest.mark.skipif(not OTHERS, reason="FABRIC_LLM_OTHER_TRANSFORMERS: see docs/testing.md")
@pytest.mark.parametrize("python", OTHERS)
def test_other_versions_of_transformers_read_the_same_model(run, tmp_path, python):
    ids = (torch.arange(CONTEXT) * 7 % 131).tolist()
    folders = [str(run[1]), *(str(with_positions(family, tmp_path)) for family in POSITIONS)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [python, "-c", READ, json.dumps([ids, TEXT, *folders])]
    said = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert "FOUND" in said.stdout, said.stderr[-3000:]
    version, found = json.loads(said.stdout.partition("FOUND")[2])
    for folder in folders:
        assert not isinstance(found[folder], str), (version, folder, found[folder])
        model = AutoModelForCausalLM.from_pretrained(folder).eval()
        with torch.no_grad():
            ours = model(torch.tensor([ids])).logits[0]
        difference = ((torch.tensor(found[folder]) - ours).abs().mean() / ours.std()).item()
        assert difference < 1e-5, (version, folder, difference)
    tokenizer = AutoTokenizer.from_pretrained(run[1])
    assert found["tokens"] == [tokenizer(TEXT)["input_ids"], tokenizer.all_special_tokens], version
