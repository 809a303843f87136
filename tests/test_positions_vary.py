"""Positions that depend on more than the row: the loss never does, or the run is refused.

transformers keeps the longest row on a module (dynamic NTK), switches frequencies by the longest
document of a micro-batch (longrope), and counts chunks from the beginning of a row (Llama 4). What
is trained is compared with plain transformers, a row at a time in a model that has seen no other.
"""

import json

import datasets
import pytest
import torch
import torch.nn.functional as F
from conftest import CONTEXT, END, documents
from families import VOCABULARY, toy_config
from ranks import metrics, run_ranks, train_ranks
from test_law_13_fast_paths import nothing, train_with
from transformers import AutoModelForCausalLM

# 96 tokens: 4 rows, of which the longest documents differ
LENGTHS = [4, 20, 3, 9, 12, 2, 22, 5, 3, 16]
STEPS = 4


def config_of(kind):
    if kind == "chunks":
        config = toy_config("llama4_text")
        # longer than the usual probe
        config.attention_chunk_size = config.floor_scale = CONTEXT - 4
        return config
    config = toy_config("phi3" if kind == "longrope" else "llama")
    theta = config.rope_parameters["rope_theta"]
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    factors["original_max_position_embeddings"] = 10
    more = {"longrope": factors, "dynamic": {"factor": 8.0}}[kind]
    config.max_position_embeddings = 10 if kind == "dynamic" else 80
    config.original_max_position_embeddings = 10
    config.rope_parameters = {"rope_type": kind, "rope_theta": theta, **more}
    config.rope_parameters["partial_rotary_factor"] = 1.0
    return config


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with a model of each kind, packed rows, the same without their end of text, and
    shorter ones."""
    folder = tmp_path_factory.mktemp("positions")
    for kind in ("dynamic", "longrope", "chunks"):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config_of(kind)).save_pretrained(folder / kind)
    tokens = torch.tensor([token for one in documents(LENGTHS, 1) for token in one])
    for name, context in (("packed", CONTEXT), ("short", 8), ("middle", 12)):
        split = datasets.Dataset.from_dict({"input_ids": tokens.view(-1, context).tolist()})
        datasets.DatasetDict({"train": split, "validation": split}).save_to_disk(str(folder / name))
        manifest = {"packed": True, "context_length": context, "eos_token_id": END}
        manifest["max_token_id"] = VOCABULARY - 1
        (folder / name / "manifest.json").write_text(json.dumps(manifest))
    return folder


def flags(made, output, kind, data, *more):
    folders = ("--model_name", made / kind, "--train_data_dir", made / data, "--output_dir", output)
    words = f"--precision 32-true --max_step {STEPS} --global_batch_size 4 --lr 1e-2 --devices 1"
    return (*folders, *words.split(), *more)


def plain_loss(folder, data):
    """The mean over all targets of rows that a fresh model sees one by one."""
    rows = torch.tensor(datasets.load_from_disk(str(data))["train"]["input_ids"])
    models = (AutoModelForCausalLM.from_pretrained(folder) for _ in rows)
    logits = torch.cat([model(row[None]).logits for model, row in zip(models, rows)])
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten()).item()


@pytest.mark.quick_cases(r"longrope")
@pytest.mark.parametrize("kind", ["longrope", "dynamic", "chunks"])
def test_a_row_is_itself_whatever_it_is_read_with(made, tmp_path, kind):
    run = {}
    for micro_batch in (1, 4):
        more = ("--run_name", "run", "--micro_batch_size", micro_batch)
        train_ranks(1, *flags(made, tmp_path / str(micro_batch), kind, "packed", *more))
        run[micro_batch] = metrics(tmp_path / str(micro_batch) / "run")
    assert run[1] == pytest.approx(run[4], abs=1e-5)
    # what the run says it trains
    assert run[4][0] == pytest.approx(plain_loss(made / kind, made / "packed"), abs=1e-5)


@pytest.mark.longer
@pytest.mark.parametrize("kind", ["dynamic", "longrope", "chunks"])
def test_documents_that_cannot_be_kept_apart_are_refused(made, tmp_path, kind):
    words = flags(made, tmp_path, kind, "packed", "--document_masking", "true")
    [(code, said)] = run_ranks(1, train_with, nothing, words)
    assert code == 2 and "doesn't keep packed documents apart" in said, said


@pytest.mark.longer
def test_rows_of_several_lengths_are_refused_where_the_longest_is_remembered(made, tmp_path):
    other = ("--document_masking", "false", "--eval_data", f"other={made / 'middle'}")
    words = flags(made, tmp_path, "dynamic", "packed", *other)
    [(code, said)] = run_ranks(1, train_with, nothing, words)
    assert code == 2, said
    assert "depend on the longest one that it sees, which no checkpoint holds" in said


@pytest.mark.longer
@pytest.mark.parametrize("kind", ["dynamic", "longrope", "chunks"])
def test_documents_that_are_short_enough_are_kept_apart(made, tmp_path, kind):
    more = ("--run_name", "run", "--document_masking", "true")
    train_ranks(1, *flags(made, tmp_path, kind, "short", *more))
