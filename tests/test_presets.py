"""The presets in configs/: each is planned on the machine that it names, and trains."""

import json
import re
import shlex
import warnings
from pathlib import Path

import pytest
import torch
import yaml
from families import COMMON, CONTEXT, FAMILIES, write_data
from ranks import metrics, train_ranks
from test_plan import said
from transformers import AutoConfig, AutoModelForCausalLM

from parse_arguments import parse_train

ROOT = Path(__file__).parent.parent
# In billions, as they are published.
PARAMETERS = {
    "gemma3_1b": 1.0,
    "gpt2": 0.124,
    "llama3.2_1b": 1.24,
    "llama3.2_3b": 3.21,
    "llama3_70b": 70.6,
    "llama3_8b": 8.03,
    "mistral_7b": 7.25,
    "olmo2_7b": 7.30,
    "qwen3_8b": 8.19,
    "smollm2_1.7b": 1.71,
    "smollm2_135m": 0.135,
}


def file_of(name):
    return ROOT / "configs" / f"{name}.yaml"


def command(name, script):
    """The words after `script` in the comment of a preset."""
    [line] = re.findall(rf"^#   .*{script}\.py (.*)$", file_of(name).read_text(), re.M)
    return shlex.split(line)


def test_each_preset_is_listed():
    assert {path.stem for path in (ROOT / "configs").glob("*.yaml")} == {*PARAMETERS, "demo"}
    page = (ROOT / "docs" / "presets.md").read_text()
    assert sorted(re.findall(r"^\| \[(\S+)\.yaml\]", page, re.M)) == sorted(PARAMETERS)


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_preset_is_the_recipe(name, monkeypatch):
    """As docs/continued_pretraining.md has it."""
    monkeypatch.chdir(ROOT)
    flags = parse_train(command(name, "train"))
    plan = command(name, "plan")
    tokens = flags.training.global_batch_size * int(plan[plan.index("--context_length") + 1])
    assert tokens >= 2**18 and flags.training.lr == 2e-5 and flags.training.warmup_steps == 100
    assert (
        flags.save.save_step_interval
        and flags.evaluation.eval_step_interval
        and flags.save.keep_last
    )
    assert "replay" in flags.data.data_mix
    assert flags.model.model_name in file_of(name).read_text().partition("\nmodel_name")[0], (
        "whose sizes are planned"
    )


@pytest.mark.quick_cases(r"gpt2")
@pytest.mark.parametrize("name", PARAMETERS)
def test_a_preset_fits_the_machine_that_it_names(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    plan = said(*command(name, "plan"))
    assert plan["parameters"] / 1e9 == pytest.approx(PARAMETERS[name], rel=0.005)
    assert plan["fits"] and plan["used"] < 0.8, "with room to spare"
    [line] = re.findall(
        rf"^\| \[{re.escape(name)}\.yaml\].*", (ROOT / "docs" / "presets.md").read_text(), re.M
    )
    peak, used, rate = (float(cell.strip(" %").replace(",", "")) for cell in line.split("|")[-4:-1])
    # What a compiled layer is planned to keep differs from start to start by a tensor or two a
    # layer.
    assert [peak, used] == pytest.approx(
        [plan["memory"]["peak"] / 2**30, 100 * plan["used"]], rel=0.1
    )
    assert rate == pytest.approx(plan["tokens_a_step"] / plan["seconds"]["step"], rel=0.001)


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("packed") / "data")


def write_toy(name, folder):
    """A model with the preset's architecture, but of toy size, and with random weights."""
    plan = command(name, "plan")
    given = json.loads((ROOT / plan[plan.index("--model_name") + 1] / "config.json").read_text())
    family = given.pop("model_type")
    toy = AutoConfig.for_model(family, **{**given, **COMMON, **FAMILIES[family]})
    torch.manual_seed(0)
    with warnings.catch_warnings():  # of what a toy size leaves unused
        warnings.simplefilter("ignore")
        AutoModelForCausalLM.from_config(toy).save_pretrained(folder)
    return folder


@pytest.mark.quick_cases(r"gemma3|llama3.2_1b")
@pytest.mark.every_eighth(2)
@pytest.mark.parametrize("name", PARAMETERS)
def test_a_preset_trains_at_toy_size(name, tmp_path, packed):
    given = yaml.safe_load(file_of(name).read_text())
    ranks = 2 if "strategy" in given else 1
    words = (
        "--config",
        file_of(name),
        "--model_name",
        write_toy(name, tmp_path / "model"),
        "--train_data_dir",
        packed,
    )
    words += (
        "--max_step",
        2,
        "--global_batch_size",
        2 * given["micro_batch_size"] * ranks,
        "--eval_iters",
        1,
    )
    train_ranks(ranks, *words, "--output_dir", tmp_path, "--run_name", "run")
    kept = yaml.safe_load((tmp_path / "run" / "arguments.yaml").read_text())
    given["lr"] = float(given["lr"])  # YAML reads 2e-5 as a word
    changed = {key for key, value in given.items() if kept[key] != value}
    assert changed == {"model_name", "global_batch_size"}
    assert len(metrics(tmp_path / "run")) == 2 and kept["context_length"] in (None, CONTEXT)
    assert (tmp_path / "run" / "step-00000002" / "MANIFEST.json").is_file()
