"""plan.py for any family: no traceback, and from a few layers of each kind what all layers would
give."""

from contextlib import nullcontext
from unittest.mock import patch

import families
import pytest
import transformers
from ranks import run_ranks

HOW = {
    "eager": ("--compile", "false"),
    "full": ("--compile", "false", "--activation_checkpointing", "full"),
    "selective": ("--compile", "false", "--activation_checkpointing", "selective"),
    "compiled": ("--compile", "true"),
}
# What transformers' own code can't, and is told in one sentence.
REFUSED = {
    "ctrl": "does not support activation checkpointing",
    "gpt_neox_japanese": "does not support activation checkpointing",
    "openai-gpt": "does not support activation checkpointing",
    "jetmoe": (
        "can't be planned: its code depends on the tokens|does not support activation checkpointing"
    ),
    "dbrx": "can't be planned: its code depends on the tokens",
    "longcat_flash": "can't be planned: its code depends on the tokens",
    # as a run of it can't, see docs/results/families.md
    "xlstm": "can't be planned: its code can't run here",
}
# Whose layers return several values, have an attention of their own, or name what they take
# otherwise.
QUICK = ["bamba", "bloom", "falcon", "gpt_neo", "openai-gpt", "xlstm"]
OF_TOYS = dict(
    hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=131,
)


def looked(folder, *words, whole=False):
    """The prediction for the model in `folder`, or the sentence that refuses it. whole: all layers
    are traced."""
    from fabric_llm.forecast import trace
    from fabric_llm.forecast.prediction import predict
    from plan_arguments import parse_plan

    given = ["--model_name", str(folder), "--context_length", "24", *map(str, words)]
    with patch.object(trace, "longest_cut", lambda kinds: None) if whole else nullcontext():
        try:
            return predict(*parse_plan(given))
        except ValueError as error:
            return str(error)


def planned(family, folder):
    families.warn_only()
    families.toy_config(family).save_pretrained(folder)
    return {how: looked(folder, *words) for how, words in HOW.items()}


def assert_planned(family, folder):
    import re

    [found] = run_ranks(1, planned, family, folder)
    for how, one in found.items():
        if isinstance(one, str):
            assert re.search(REFUSED.get(family, "nothing"), one), (how, one)
        else:
            assert one.memory.parts["parameters"] > 0 and one.seconds.step > 0, how


@pytest.mark.longer
@pytest.mark.parametrize("family", QUICK)
def test_a_family_that_was_a_traceback(family, tmp_path):
    assert_planned(family, tmp_path)


def in_both_precisions(folder):
    families.warn_only()
    deep("mixtral").save_pretrained(folder)
    return [looked(folder, *HOW["eager"], "--precision", one) for one in ("32-true", "bf16-true")]


@pytest.mark.longer
def test_experts_are_planned_in_float32(tmp_path):
    [(found, half)] = run_ranks(1, in_both_precisions, tmp_path)
    assert not isinstance(found, str), found
    assert found.memory.parts["parameters"] == pytest.approx(
        2 * half.memory.parts["parameters"], rel=1e-3
    )


@pytest.mark.every_eighth(0)
@pytest.mark.families
@pytest.mark.parametrize("family", sorted(families.FAMILIES.keys() - set(QUICK)))
def test_any_family_is_planned(family, tmp_path):
    assert_planned(family, tmp_path)


def deep(name):
    """A configuration with more layers of each kind than are traced."""
    if name == "llama":
        return transformers.LlamaConfig(**OF_TOYS, num_hidden_layers=12)
    if name == "mixtral":
        return transformers.MixtralConfig(**OF_TOYS, num_hidden_layers=12, num_local_experts=4)
    if name == "gemma3":  # five of six layers have a window
        return transformers.Gemma3TextConfig(
            **OF_TOYS, num_hidden_layers=44, head_dim=16, sliding_window=8
        )
    if name == "pictures":  # with layers that aren't run, before the others
        text = dict(OF_TOYS, num_hidden_layers=44, head_dim=16, sliding_window=8)
        seeing = dict(
            hidden_size=32, intermediate_size=64, num_hidden_layers=12, num_attention_heads=2
        )
        return transformers.Gemma3Config(text_config=text, vision_config=seeing)
    family = {**families.COMMON, **families.FAMILIES[name], "num_hidden_layers": 14}
    if name == "jamba":  # attention in each second layer, experts in each third
        family |= {"num_hidden_layers": 44, "expert_layer_period": 3, "expert_layer_offset": 1}
    if name == "deepseek_v3":
        family |= {"first_k_dense_replace": 3, "num_hidden_layers": 20}
    return transformers.AutoConfig.for_model(name, **family)


def twice(name, folder, *words):
    families.warn_only()
    deep(name).save_pretrained(folder)
    return looked(folder, *words), looked(folder, *words, whole=True)


FSDP, FSDP2 = (
    ("--devices", 2),
    ("--devices", 4, "--strategy", "fsdp2", "--gradient_accumulation_steps", 2),
)
DDP = ("--devices", 2, "--strategy", "ddp", "--ema_decay", 0.9, "--ema_device", "same")


@pytest.mark.quick_cases(r"llama-words1")
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("llama", (*HOW["full"], *FSDP)),
        ("llama", (*HOW["compiled"], *DDP)),
        ("falcon_h1", HOW["compiled"]),
        *(
            pytest.param(name, (*how, *strategy), marks=pytest.mark.slow)
            for name in (
                "llama", "mixtral", "gemma3", "pictures", "falcon_h1", "jamba", "deepseek_v3",
            )
            for how in HOW.values()
            for strategy in ((), FSDP, FSDP2)
        ),
        pytest.param(
            "llama", ("--activation_checkpointing", "every:3", *FSDP2), marks=pytest.mark.longer
        ),
    ],
)
def test_a_few_layers_say_what_all_say(tmp_path, name, words):
    [(few, every)] = run_ranks(1, twice, name, tmp_path, *words, timeout_seconds=600)
    assert few == every


def test_which_layers_are_left_out():
    from fabric_llm.forecast.trace import Cut, longest_cut

    assert longest_cut("a" * 80) == Cut(2, 1, 76) and longest_cut("a" * 9) is None
    assert longest_cut("ddd" + "m" * 58) == Cut(5, 1, 54)
    assert longest_cut("sssssf" * 10 + "ss") == Cut(6, 6, 8)
    assert longest_cut("v" * 27 + "sssssf" * 10 + "ss") == Cut(33, 6, 8)
    assert longest_cut("abcdefghij") is None and longest_cut("") is None
    assert Cut(6, 6, 8).numbers() == range(6, 54)


ODD = {
    "bert": lambda: transformers.BertConfig(**OF_TOYS, num_hidden_layers=2, is_decoder=True),
    "alibi": lambda: transformers.FalconConfig(**OF_TOYS, num_hidden_layers=2, alibi=True),
    "longrope": lambda: transformers.Phi3Config(
        **OF_TOYS,
        num_hidden_layers=2,
        pad_token_id=0,
        original_max_position_embeddings=16,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0] * 8,
            "long_factor": [2.0] * 8,
        },
    ),
    "pictures": lambda: deep("pictures"),
}


def planned_as_it_is(name, folder):
    families.warn_only()
    ODD[name]().save_pretrained(folder)
    return {how: looked(folder, *HOW[how]) for how in ("eager", "compiled")}


@pytest.mark.quick_cases(r"bert|alibi|longrope")
@pytest.mark.every_eighth(3)
@pytest.mark.parametrize("name", ODD)
def test_what_no_family_has(tmp_path, name):
    """Embeddings among the layers, positions in the scores, positions by length, and layers that
    see pictures."""
    [found] = run_ranks(1, planned_as_it_is, name, tmp_path)
    assert all(one.memory.peak > 2**30 for one in found.values()), found


def rows(length, folder):
    families.warn_only()
    transformers.LlamaConfig(**OF_TOYS, num_hidden_layers=2).save_pretrained(folder)
    return looked(folder, "--context_length", length)


@pytest.mark.longer
def test_rows_of_any_length_are_planned(tmp_path):
    """In the time of short ones; each token more takes as much."""
    from fabric_llm.forecast import memory

    with patch.object(memory, "LONG", 2**12):
        [said] = run_ranks(1, rows, 3 * 2**12, tmp_path)
    [traced] = run_ranks(1, rows, 3 * 2**12, tmp_path)
    assert said.memory.peak == pytest.approx(traced.memory.peak, rel=1e-6)
    assert said.memory.parts.keys() == traced.memory.parts.keys()
    with patch.object(memory, "LONG", 2**12):
        [longest] = run_ranks(1, rows, 10**8, tmp_path)
    assert longest.memory.peak > 10**8 * 64 * 2
