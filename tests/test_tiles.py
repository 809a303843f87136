"""--tiled_mlp: MLPs and norms in tiles of tokens give the numbers of whole rows, under any
strategy, and take less memory."""

import pytest
import torch
from families import write_data, write_model
from ranks import run_ranks, toy_run, train_ranks
from test_context_parallel import assert_same, numbers, run_of
from test_law_13_fast_paths import Largest, batch, causal_lm, gradients, nothing, train_with
from torch._subclasses.fake_tensor import FakeTensorMode

from fabric_llm.forecast.memory import UNMASKED, tiled_modules
from fabric_llm.model import loading, tiles
from fabric_llm.model.language_model import LanguageModel
from fabric_llm.model.reference import load_reference

FAMILIES = ["llama", "qwen3", "gemma3_text", "mixtral", "phi", "olmo2", "gpt_neox"]


def tiled(model):
    return [name for name, is_tiled in tiles.found_in(model).items() if is_tiled]


@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_are_those_of_whole_rows(name):
    found = []
    for with_tiles in (False, True):
        model = causal_lm(name, **({"hidden_dropout": 0.0} if name == "gpt_neox" else {})).train()
        names = tiled(model)
        assert len({one.rpartition(".")[2] for one in names}) >= 2 and len(names) % 2 == 0, names
        if with_tiles:
            tiles.tile(model, names)
        torch.manual_seed(0)
        found.append(gradients(LanguageModel(model), batch()))
    assert found[1][0] == pytest.approx(found[0][0].item(), rel=1e-6)
    for ours, plain in zip(found[1][1], found[0][1], strict=True):
        assert (ours - plain).norm() <= 2e-6 * plain.norm() + 1e-8


def test_modules_in_which_tokens_meet_or_dropout_draws_are_left_whole():
    with_dropout = tiled(causal_lm("gpt2", resid_pdrop=0.1))
    assert not any("mlp" in name for name in with_dropout), "its MLP has dropout"
    assert any("mlp" in name for name in tiled(causal_lm("gpt2", resid_pdrop=0.0)))
    found = tiled(causal_lm("llama"))
    norms = {"input_layernorm", "post_attention_layernorm"}
    assert {name.rpartition(".")[2] for name in found} == {"mlp", *norms}
    found = {name: tiled(causal_lm(name)) for name in ("llama", "mixtral", "gemma3_text")}
    for name in found:
        model = causal_lm(name)
        with FakeTensorMode(allow_non_fake_inputs=True):
            model.config._attn_implementation = UNMASKED
            skeleton = loading.build_skeleton(model.config, torch.bfloat16)
            assert tiled_modules(skeleton) == found[name], "plan.py asks without weights"


def test_modules_of_layers_whose_weights_are_there_one_after_the_other_are_found(tmp_path):
    causal_lm("llama").save_pretrained(tmp_path)
    config = loading.load_config(str(tmp_path))
    source = loading.open_weights(str(tmp_path), config, torch.float32)
    streamed = load_reference(loading.build_skeleton(config, torch.float32), source, limit_bytes=0)
    assert tiled(streamed) == tiled(causal_lm("llama"))


def test_nothing_is_as_large_as_an_mlp_of_the_whole_row():
    model = causal_lm("llama", intermediate_size=512).train()
    inputs = {name: torch.cat([tensor] * 40, dim=1) for name, tensor in batch(1).items()}
    tiles.tile(model, tiled(model))
    with Largest() as largest:
        gradients(LanguageModel(model, chunked=True), inputs)
    assert largest.elements < inputs["input_ids"].numel() * 512


@pytest.fixture(scope="module")
def alone(toys, packed_data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    train_ranks(1, *run_of(toys / "llama", packed_data, folder, "run"))
    return numbers(folder, "run")


RUNS = [
    (1, ()),
    (2, ("--strategy", "fsdp", "--activation_checkpointing", "offload")),
    (2, ("--strategy", "fsdp2", "--activation_checkpointing", "full", "--context_parallel", 2)),
    (2, ("--strategy", "ddp", "--micro_batch_size", 2)),
    (2, ("--strategy", "fsdp2", "--auto_wrap_policy", "LlamaMLP")),
]


@pytest.mark.quick_cases(r"2-more3")
@pytest.mark.parametrize(("ranks", "more"), RUNS)
def test_a_run_is_the_run_without(toys, packed_data, tmp_path, alone, ranks, more):
    words = run_of(toys / "llama", packed_data, tmp_path, "run", "--tiled_mlp", "true", *more)
    train_ranks(ranks, *words)
    assert_same(numbers(tmp_path, "run"), alone)


@pytest.mark.every_eighth(6)
@pytest.mark.longer
@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
@pytest.mark.parametrize(("ranks", "more"), RUNS)
def test_other_precisions_round_alike(toys, packed_data, tmp_path, ranks, more, precision):
    flags = ("--precision", precision, *more)
    for name, tiled in (("whole", "false"), ("tiles", "true")):
        words = run_of(toys / "llama", packed_data, tmp_path, name, "--tiled_mlp", tiled, *flags)
        train_ranks(ranks, *words)
    assert_same(numbers(tmp_path, "tiles"), numbers(tmp_path, "whole"), rel=2e-2)


@pytest.mark.longer
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3", "falcon_h1", "lfm2"])
def test_families_with_experts_and_mixers(tmp_path, family):
    data, model = write_data(tmp_path / "data"), write_model(family, tmp_path / family)
    more = ("--router_aux_loss_coef", 0) if family == "mixtral" else ()
    for name, tiled in (("whole", "false"), ("tiles", "true")):
        train_ranks(1, *run_of(model, data, tmp_path, name, "--tiled_mlp", tiled, *more))
    assert_same(numbers(tmp_path, "tiles"), numbers(tmp_path, "whole"), rel=2e-5)


@pytest.mark.parametrize(
    ("model", "more", "sentence"),
    [
        ("gpt2", "", "its MLPs have dropout, or don't take each token by itself"),
        ("llama", "--compile true", "take it, or --compile true"),
        ("mixtral", "--router_aux_loss_coef 0.1", "--router_aux_loss_coef"),
    ],
)
def test_what_cannot_be_tiled_is_refused(toys, tmp_path, model, more, sentence):
    words = f"--max_step 1 --tiled_mlp true --devices 1 {more}".split()
    words = [*toy_run(toys, tmp_path, model=model), *words]
    [(code, said)] = run_ranks(1, train_with, nothing, words)
    assert code == 2 and sentence in said, said
