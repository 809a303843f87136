"""--float8: products in 8 bits where a model is trained, and plain transformers' wherever its
numbers are shown or published."""

import sys

import pytest
import torch
from conftest import changed_config, ended
from ranks import Job, metrics, toy_run, train_ranks
from transformers import AutoModelForCausalLM

import train
from fabric_llm.checkpoint.keep import checkpoint_at
from fabric_llm.checkpoint.trainer_state import read_probe
from fabric_llm.model.float8 import float8_products

pytest.importorskip("torchao")
STRATEGIES = [("auto", 1), ("ddp", 2), ("fsdp", 2), ("fsdp2", 2)]
RECIPES = ["tensorwise", "rowwise"]


def in_float8(model, recipe="rowwise"):
    float8_products(model, recipe, is_emulated=True)
    return model


def opened(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)


@pytest.mark.parametrize("recipe", RECIPES)
def test_only_gradients_see_8_bits(toys, recipe):
    plain, ours = opened(toys / "llama"), in_float8(opened(toys / "llama"), recipe)
    dtypes = [(name, parameter.dtype) for name, parameter in plain.named_parameters()]
    assert [(name, parameter.dtype) for name, parameter in ours.named_parameters()] == dtypes
    ids = torch.arange(24)[None]
    with torch.no_grad():
        assert torch.equal(ours(ids).logits, plain(ids).logits)
    trained, expected = ours(ids).logits, plain(ids).logits
    assert not torch.equal(trained, expected)
    assert (trained - expected).abs().mean() < 0.2 * expected.std()


def test_routers_and_what_is_outside_of_layers_stay(toys):
    modules = in_float8(opened(toys / "mixtral")).named_modules()
    changed = [name for name, module in modules if "Float8" in type(module).__name__]
    assert {name.split(".")[-1] for name in changed} == {"q_proj", "k_proj", "v_proj", "o_proj"}


@pytest.mark.quick_cases(r"\[auto-1")
@pytest.mark.every_eighth(5)
@pytest.mark.parametrize(("strategy", "ranks"), STRATEGIES)
def test_a_run_goes_on_bit_for_bit_and_is_the_model_that_is_published(
    toys, tmp_path, strategy, ranks
):
    sizes = "--global_batch_size 4 --run_name run --max_step 4 --save_step_interval 2 --lr 1e-3"
    how = ("--strategy", strategy, "--float8", "tensorwise")
    flags, run = (*toy_run(toys, tmp_path), *sizes.split(), *how), tmp_path / "run"
    train_ranks(ranks, *flags)
    expected = metrics(run), metrics(run, "eval_loss")
    train_ranks(ranks, *flags, "--resume", "true", "--checkpoint", run / "step-00000002")
    assert (metrics(run), metrics(run, "eval_loss")) == expected
    trained = AutoModelForCausalLM.from_pretrained(checkpoint_at(run)).eval()
    probe = read_probe(checkpoint_at(run))
    with torch.no_grad():
        logits = trained(probe["input_ids"]).logits[0, probe["positions"]].float()
    assert (logits - probe["logits"]).abs().mean() < 0.02 * logits.std()


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_it_learns_as_without(toys, tmp_path, recipe):
    flags = (*toy_run(toys, tmp_path, data="many"), "--lr", 3e-3, "--max_step", 60)
    found = {}
    for name in ("none", recipe):
        how = ("--float8", name, "--run_name", name)
        train_ranks(1, *flags, "--micro_batch_size", 8, *how)
        found[name] = metrics(tmp_path / name, "eval_loss")
    first, last = found["none"][0], found["none"][-1]
    assert first - last > 0.5
    assert abs(found[recipe][-1] - last) < 0.02 * (first - last)


@pytest.mark.parametrize(
    ("more", "missing", "sentence"),
    [
        ("--precision 32-true", False, " goes with --precision bf16-true or bf16-mixed"),
        ("", True, ": torchao isn't installed: pip install torchao."),
        (
            "--model_name {odd}",
            False,
            ": LlamaForCausalLM has no linear layer whose sizes divide by 16.",
        ),
    ],
)
def test_what_cannot_be_is_refused(toys, tmp_path, monkeypatch, capsys, more, missing, sentence):
    odd, sizes = tmp_path / "odd", {"hidden_size": 24, "intermediate_size": 40, "head_dim": 6}
    changed_config("llama", **sizes).save_pretrained(odd)
    words = ("--float8", "rowwise", "--max_step", 1, *more.format(odd=odd).split())
    for name in ("torchao", "torchao.float8") if missing else ():
        monkeypatch.setitem(sys.modules, name, None)
    code = ended(train.main, *toy_run(toys, tmp_path), *words)
    said = capsys.readouterr().err
    assert code == 2 and f"--float8 rowwise{sentence}" in said and said.count("error") == 1


def test_another_run_may_not_change_it(toys, tmp_path):
    sizes = "--run_name run --max_step 2 --save_step_interval 1".split()
    flags = (*toy_run(toys, tmp_path), *sizes)
    train_ranks(1, *flags)
    go_on = ("--resume", "true", "--checkpoint", tmp_path / "run" / "step-00000001")
    job = Job(1, *flags, *go_on, "--float8", "rowwise")
    assert job.wait() == [2] and "float8 none, not rowwise" in job.output[0]
