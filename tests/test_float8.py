"""--float8: products in 8 bits where a model is trained, and plain transformers' wherever its
numbers are shown or published."""

import sys

import pytest
import torch
from ranks import metrics, run_ranks, toy_run, train_ranks
from transformers import AutoModelForCausalLM

from fabric_llm.checkpoint.keep import checkpoint_at
from fabric_llm.checkpoint.reading import read_probe
from fabric_llm.model.float8 import float8_products

pytest.importorskip("torchao")
STRATEGIES = [("auto", 1), ("ddp", 2), ("fsdp", 2), ("fsdp2", 2)]
RECIPES = ["tensorwise", "rowwise"]


def in_float8(model, recipe="rowwise"):
    float8_products(model, recipe, is_emulated=True)
    return model


@pytest.mark.parametrize("recipe", RECIPES)
def test_only_gradients_see_8_bits(toys, recipe):
    plain, ours = (
        AutoModelForCausalLM.from_pretrained(toys / "llama", dtype=torch.bfloat16) for _ in range(2)
    )
    in_float8(ours, recipe)
    dtypes = {name: parameter.dtype for name, parameter in plain.named_parameters()}
    assert {name: parameter.dtype for name, parameter in ours.named_parameters()} == dtypes
    ids = torch.arange(24)[None]
    with torch.no_grad():
        assert torch.equal(ours(ids).logits, plain(ids).logits)
    trained, expected = ours(ids).logits, plain(ids).logits
    assert not torch.equal(trained, expected)
    assert (trained - expected).abs().mean() < 0.2 * expected.std()


def test_routers_and_what_is_outside_of_layers_stay(toys):
    model = in_float8(AutoModelForCausalLM.from_pretrained(toys / "mixtral", dtype=torch.bfloat16))
    changed = {
        name.split(".")[-1]
        for name, module in model.named_modules()
        if "Float8" in type(module).__name__
    }
    assert changed == {"q_proj", "k_proj", "v_proj", "o_proj"}


@pytest.mark.quick_cases(r"\[auto-1")
@pytest.mark.every_eighth(5)
@pytest.mark.parametrize(("strategy", "ranks"), STRATEGIES)
def test_a_run_goes_on_bit_for_bit_and_is_the_model_that_is_published(
    toys, tmp_path, strategy, ranks
):
    flags = (
        *toy_run(toys, tmp_path),
        "--strategy",
        strategy,
        "--float8",
        "tensorwise",
        "--global_batch_size",
        4,
    )
    flags += ("--run_name", "run", "--max_step", 4, "--save_step_interval", 2, "--lr", 1e-3)
    train_ranks(ranks, *flags)
    expected = metrics(tmp_path / "run"), metrics(tmp_path / "run", "eval_loss")
    go_on = ("--resume", "true", "--checkpoint", tmp_path / "run" / "step-00000002")
    train_ranks(ranks, *flags, *go_on)
    assert (metrics(tmp_path / "run"), metrics(tmp_path / "run", "eval_loss")) == expected
    trained = AutoModelForCausalLM.from_pretrained(checkpoint_at(tmp_path / "run")).eval()
    probe = read_probe(checkpoint_at(tmp_path / "run"))
    with torch.no_grad():
        logits = trained(probe["input_ids"]).logits[0, probe["positions"]].float()
    assert (logits - probe["logits"]).abs().mean() < 0.02 * logits.std()


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_it_learns_as_without(toys, tmp_path, recipe):
    found = {}
    for float8 in ("none", recipe):
        flags = (
            *toy_run(toys, tmp_path, data="many"),
            "--float8",
            float8,
            "--run_name",
            float8,
            "--lr",
            3e-3,
        )
        train_ranks(1, *flags, "--max_step", 60, "--micro_batch_size", 8)
        found[float8] = metrics(tmp_path / float8, "eval_loss")
    first, last = found["none"][0], found["none"][-1]
    assert first - last > 0.5
    assert abs(found[recipe][-1] - last) < 0.02 * (first - last)


def refused(argv, missing):
    import contextlib
    import io

    import train

    if missing:
        sys.modules["torchao"] = sys.modules["torchao.float8"] = None
    with contextlib.redirect_stderr(io.StringIO()) as said, pytest.raises(SystemExit) as stop:
        train.main(argv)
    return stop.value.code, said.getvalue()


@pytest.mark.parametrize(
    ("more", "missing", "sentence"),
    [
        (
            ("--precision", "32-true"),
            False,
            "--float8 rowwise goes with --precision bf16-true or bf16-mixed",
        ),
        ((), True, "--float8 rowwise: torchao isn't installed: pip install torchao."),
        (
            ("--model_name", "odd"),
            False,
            "--float8 rowwise: LlamaForCausalLM has no linear layer whose sizes divide by 16.",
        ),
    ],
)
def test_what_cannot_be_is_refused(toys, tmp_path, more, missing, sentence):
    from transformers import LlamaConfig

    sizes = {
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
    }
    LlamaConfig(**sizes, vocab_size=131, max_position_embeddings=64).save_pretrained(
        tmp_path / "odd"
    )
    more = [str(tmp_path / word) if word == "odd" else word for word in more]
    argv = [
        str(word)
        for word in (*toy_run(toys, tmp_path), "--float8", "rowwise", "--max_step", 1, *more)
    ]
    [(code, said)] = run_ranks(1, refused, argv, missing)
    assert code == 2 and sentence in said and said.count("error") == 1


def test_another_run_may_not_change_it(toys, tmp_path):
    flags = (
        *toy_run(toys, tmp_path),
        "--run_name",
        "run",
        "--max_step",
        2,
        "--save_step_interval",
        1,
    )
    train_ranks(1, *flags)
    go_on = (
        "--resume", "true", "--checkpoint", tmp_path / "run" / "step-00000001",
        "--float8", "rowwise",
    )
    [(code, said)] = run_ranks(1, refused, [str(word) for word in (*flags, *go_on)], False)
    assert code == 2 and "float8 none, not rowwise" in said
