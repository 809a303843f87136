"""The presets in configs/: each is planned on the machine that it names, and trains."""

import json
import re
import shlex
import shutil
import warnings
from pathlib import Path

import pytest
import torch
import yaml
from families import COMMON, CONTEXT, FAMILIES, write_data
from ranks import metrics, train_ranks
from test_plan import said
from transformers import AutoConfig, AutoModelForCausalLM

from fabric_llm.data.mixture_text import parse
from parse_arguments import parse_train
from plan import sizes_of_preset

ROOT = Path(__file__).parent.parent
# In billions, as they are published.
PARAMETERS = {
    "gemma3_1b": 1.0,
    "gpt2": 0.124,
    "llama3.2_1b": 1.24,
    "llama3.2_3b": 3.21,
    "llama3.1_8b-balanced": 8.03,
    "llama3.1_8b-new_language": 8.03,
    "llama3.1_8b-wsd": 8.03,
    "llama3_70b": 70.6,
    "llama3_8b": 8.03,
    "mistral_7b": 7.25,
    "olmo2_7b": 7.30,
    "qwen3_8b": 8.19,
    "qwen3_8b-many_languages": 8.19,
    "smollm2_1.7b": 1.71,
    "smollm2_135m": 0.135,
}
# What docs/recipes.md says of the project that a preset follows: rate, share of the run that warms
# up, tokens a step, tokens in billions, shares.
RECIPES = {
    "llama3.1_8b-balanced": (3e-4, 0.05, 2**22, 165, [0.3, 0.3, 0.3, 0.1]),
    "llama3.1_8b-new_language": (1e-5, 0.1, 2**21, 3.8, [0.92, 0.08]),
    "llama3.1_8b-wsd": (1e-5, 0.1, 2**22, 200, [0.55, 0.25, 0.2]),
    "qwen3_8b-many_languages": (5e-5, 0.001, 2**22, 26, [0.91, 0.04, 0.04, 0.01]),
}
PLAIN = sorted(set(PARAMETERS) - set(RECIPES))


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


@pytest.mark.parametrize("name", PLAIN)
def test_a_preset_is_the_recipe(name, monkeypatch):
    """As docs/continued_pretraining.md has it."""
    monkeypatch.chdir(ROOT)
    flags = parse_train(command(name, "train"))
    plan = command(name, "plan")
    tokens = flags.training.global_batch_size * int(plan[plan.index("--context_length") + 1])
    assert tokens >= 2**18 and flags.training.lr == 2e-5 and flags.training.warmup_steps == 100
    assert flags.save.save_step_interval and flags.evaluation.eval_step_interval
    assert flags.save.keep_last
    assert "replay" in flags.data.data_mix
    head = file_of(name).read_text().partition("\nmodel_name")[0]
    assert flags.model.model_name in head, "whose sizes are planned"


@pytest.mark.parametrize("name", RECIPES)
def test_a_preset_is_what_a_project_did(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    flags = parse_train(command(name, "train"))
    training, context = flags.training, flags.data.context_length
    batch = training.global_batch_size * context
    weights = parse(flags.data.data_mix).stages[0].weights
    shares = [weight / sum(weights) for weight in weights]
    rate, warmup, tokens_a_step, billions, mix = RECIPES[name]
    assert (training.lr, batch) == (rate, tokens_a_step) and shares == pytest.approx(mix)
    assert training.max_step * batch / 1e9 == pytest.approx(billions, rel=1e-3)
    assert training.warmup_steps == round(warmup * training.max_step)
    assert flags.save.save_step_interval and flags.save.keep_last
    assert flags.evaluation.eval_step_interval
    head = file_of(name).read_text().partition("\nmodel_name")[0]
    assert flags.model.model_name in head and "# Source: https://" in head
    assert f"{name}.yaml" in (ROOT / "docs" / "recipes.md").read_text()


@pytest.mark.longer
@pytest.mark.every_eighth(5)
@pytest.mark.parametrize("name", [*PLAIN, "demo"])
def test_a_plain_preset_alone_is_planned(name, monkeypatch):
    """Rows and steps that it doesn't hold are assumed, and said so, or left out."""
    monkeypatch.chdir(ROOT)
    given = yaml.safe_load(file_of(name).read_text())
    found = said("--config", f"configs/{name}.yaml")
    assert found["steps"] == given.get("max_step")
    assert ("rows of" in found["assumed"]) == ("context_length" not in given)


@pytest.mark.quick_cases(r"gpt2")
@pytest.mark.parametrize("name", PARAMETERS)
def test_a_preset_fits_the_machine_that_it_names(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    plan = said(*command(name, "plan"))
    assert plan["parameters"] / 1e9 == pytest.approx(PARAMETERS[name], rel=0.005)
    assert plan["fits"] and plan["used"] < 0.8, "with room to spare"
    if name in RECIPES:  # planned as it stands, without its datasets
        assert command(name, "plan") == ["--config", f"configs/{name}.yaml"]
        assert plan["assumed"] == "" and plan["steps"] and plan["hours"]
        assert plan["tokens_a_step"] == RECIPES[name][2]
    page = (ROOT / "docs" / "presets.md").read_text()
    [line] = re.findall(rf"^\| \[{re.escape(name)}\.yaml\].*", page, re.M)
    peak, used, rate = (float(cell.strip(" %").replace(",", "")) for cell in line.split("|")[-4:-1])
    # What a compiled layer is planned to keep differs from start to start by a tensor or two a
    # layer.
    planned = [plan["memory"]["peak"] / 2**30, 100 * plan["used"]]
    assert [peak, used] == pytest.approx(planned, rel=0.1)
    assert rate == pytest.approx(plan["tokens_a_step"] / plan["seconds"]["step"], rel=0.001)


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """A folder with the datasets that presets name, all of the same rows."""
    folder = tmp_path_factory.mktemp("packed")
    mine = write_data(folder / "data" / "mine")
    for name in ("general", "english", "code", "maths", "languages", "translated"):
        shutil.copytree(mine, mine.parent / name)
    return folder


def write_toy(name, folder):
    """A model with the preset's architecture, but of toy size, and with random weights."""
    sizes = sizes_of_preset(["--config", str(file_of(name))])
    given = json.loads((sizes / "config.json").read_text())
    family = given.pop("model_type")
    toy = AutoConfig.for_model(family, **{**given, **COMMON, **FAMILIES[family]})
    torch.manual_seed(0)
    with warnings.catch_warnings():  # of what a toy size leaves unused
        warnings.simplefilter("ignore")
        AutoModelForCausalLM.from_config(toy).save_pretrained(folder)
    return folder


def toy_flags(given):
    """Flags that a preset's run at toy size has instead of its own, besides the model and the
    batch."""
    flags = {"max_step": 2, "eval_iters": 1, "num_nodes": 1}
    if "data_mix" not in given and "replay" not in given:
        flags["train_data_dir"] = "data/mine"
    if "context_length" in given:
        flags["context_length"] = CONTEXT
    if "decay_steps" in given:
        flags |= {"warmup_steps": 1, "decay_steps": 1}
    return flags


@pytest.mark.quick_cases(r"gemma3|llama3.2_1b|new_language")
@pytest.mark.every_eighth(2)
@pytest.mark.parametrize("name", PARAMETERS)
def test_a_preset_trains_at_toy_size(name, tmp_path, packed, monkeypatch):
    monkeypatch.chdir(packed)
    given = yaml.safe_load(file_of(name).read_text())
    ranks = 2 if "strategy" in given else 1
    flags = toy_flags(given)
    flags["model_name"] = write_toy(name, tmp_path / "model")
    flags["global_batch_size"] = 2 * given["micro_batch_size"] * ranks
    words = [word for flag, value in flags.items() for word in (f"--{flag}", value)]
    words = ["--config", file_of(name), *words]
    train_ranks(ranks, *words, "--output_dir", tmp_path, "--run_name", "run")
    kept = yaml.safe_load((tmp_path / "run" / "arguments.yaml").read_text())
    for flag in ("lr", "min_lr"):  # YAML reads 2e-5 as a word
        given[flag] = float(given.get(flag, 0))
    changed = {key for key, value in given.items() if kept.get(key) != value}
    assert {"model_name", "global_batch_size"} <= changed
    # The sources of --replay are kept as the mixture that they stand for.
    assert changed <= {*flags, "devices", "train_data_dir", "replay", "replay_fraction"}
    assert len(metrics(tmp_path / "run")) == 2 and kept["context_length"] in (None, CONTEXT)
    assert (tmp_path / "run" / "step-00000002" / "MANIFEST.json").is_file()
