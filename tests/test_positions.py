"""--rope: rotary positions for longer rows, in the run and in all that it saves, or one
sentence."""

import json

import pytest
import torch
from families import toy_config
from ranks import metrics, run_ranks, toy_run, train_ranks
from test_law_13_fast_paths import nothing, train_with
from transformers import AutoConfig, AutoModelForCausalLM

from fabric_llm.model import loading, positions, saving, weights
from fabric_llm.weights.export import export

GIVEN = ("theta:8e6", "yarn:4", "linear:4", "llama3:8")
FAMILIES = (
    "llama", "qwen3", "mistral", "mixtral", "gemma2", "gemma3_text", "phi", "granite", "olmo2",
    "smollm3", "falcon",
)


def frequencies(model):
    return {name: buffer for name, buffer in model.named_buffers() if "inv_freq" in name}


@pytest.mark.quick_cases(r"llama|gemma3|deepseek|phi3|gpt2")
@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_has_the_positions_that_transformers_gives_it(tmp_path, family, given):
    """What is saved makes the same frequencies in plain transformers, other ones than before, and
    states the new length."""
    before = toy_config(family)
    config, said = positions.scaled(before, given, 100)
    config.save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    skeleton = loading.build_skeleton(config, torch.float32)
    weights.compute_buffers(skeleton)
    expected, found = frequencies(model), frequencies(skeleton)
    assert expected and expected.keys() == found.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    plain = frequencies(AutoModelForCausalLM.from_config(before))
    assert not all(torch.equal(plain[name], expected[name]) for name in expected)
    trained, (kind, factor) = before.max_position_embeddings, positions.parse(given)
    made_for = max(trained, 100) if kind == "theta" else trained * factor
    assert config.max_position_embeddings == made_for and f"for {trained:,} tokens" in said
    assert f"positions from {trained:,} on were never trained" in said


def test_layers_that_see_a_window_keep_their_positions():
    config, _ = positions.scaled(toy_config("gemma3_text"), "yarn:4", 100)
    kinds = {name: rope["rope_type"] for name, rope in config.rope_parameters.items()}
    assert kinds == {"sliding_attention": "default", "full_attention": "yarn"}


@pytest.mark.parametrize(
    ("family", "given", "sentence"),
    [
        ("gpt2", "yarn:4", "has no rotary positions that its configuration sets"),
        ("gptj", "theta:8e6", "has no rotary positions that its configuration sets"),
        ("llama", "theta:10000", "has the same positions with it as before"),
    ],
)
def test_what_a_family_cannot_do_is_refused(family, given, sentence):
    with pytest.raises(ValueError, match=sentence):
        positions.scaled(toy_config(family), given, 100)


def test_a_model_without_positions_has_none_to_scale():
    falcon, beam = toy_config("falcon"), toy_config("gemma3_text")
    falcon.alibi, beam.rope_parameters["full_attention"] = True, None  # as Beam's own
    for config in (falcon, beam):
        with pytest.raises(ValueError, match="has no rotary positions that its configuration sets"):
            positions.scaled(config, "theta:8e6", 100)
    assert saving.with_older_names(beam, {"name": 1}) == {"name": 1}


@pytest.mark.parametrize("given", ["linear:4", "yarn:4", "llama3:4", "theta:1e6"])
def test_the_length_that_it_was_made_for_is_the_one_that_is_saved(given):
    config, _ = positions.scaled(toy_config("llama"), given, 100)
    assert positions.length(config) == config.max_position_embeddings


def test_what_is_scaled_already_is_not_scaled_again():
    config, _ = positions.scaled(toy_config("llama"), "llama3:8", 100)
    with pytest.raises(ValueError, match=r"are scaled already \(llama3\); take theta:THETA"):
        positions.scaled(config, "yarn:2", 100)
    again, said = positions.scaled(config, "theta:1e6", 100)
    assert again.rope_parameters["rope_theta"] == 1e6
    assert "llama3, factor 8, theta 1,000,000" in said


WRONG = ("yarn", "yarn:1", "yarn:many", "ntk:4", "theta:-1", "linear:1e99")


@pytest.mark.parametrize("given", WRONG)
def test_other_words_are_refused(given):
    sentence = "--rope takes theta:THETA, such as theta:8e6, or yarn, linear, llama3 with a factor"
    with pytest.raises(ValueError, match=sentence):
        positions.parse(given)


@pytest.mark.longer
@pytest.mark.parametrize(("strategy", "ranks"), [("auto", 1), ("fsdp2", 2)])
def test_checkpoint_resume_and_export_carry_them(toys, tmp_path, strategy, ranks):
    words = f"--max_step 4 --save_step_interval 2 --strategy {strategy} --global_batch_size 4"
    flags = (*toy_run(toys, tmp_path), "--run_name", "run", *words.split())
    train_ranks(ranks, *flags, "--rope", "yarn:4")
    expected = metrics(tmp_path / "run")
    train_ranks(ranks, *flags, "--run_name", "plain")
    assert metrics(tmp_path / "plain") != expected
    go_on = ("--resume", "true", "--checkpoint", tmp_path / "run" / "step-00000002")
    train_ranks(ranks, *flags, "--rope", "yarn:4", *go_on)
    assert metrics(tmp_path / "run") == expected
    assert export(tmp_path / "run" / "step-00000004", tmp_path / "hf") is not None
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["max_position_embeddings"] == 256
    assert config["rope_parameters"]["rope_type"] == "yarn"
    assert config["rope_parameters"]["factor"] == 4
    other = (*flags, "--rope", "theta:1e6")
    [(code, said)] = run_ranks(1, train_with, nothing, (*other, *go_on))
    assert code == 2 and "rope yarn:4, not theta:1e6" in said
    train_ranks(1, *other, "--model_name", tmp_path / "hf", "--max_step", 1, "--run_name", "again")
