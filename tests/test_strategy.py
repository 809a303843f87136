"""Every FSDP flag changes where things are, never what is computed."""

from types import SimpleNamespace

import pytest
import torch
from conftest import TOY_CONFIGS
from ranks import built, metrics, run_ranks, toy_run, train_ranks
from torch import nn
from transformers import AutoModelForCausalLM

from fabric_llm.model import sharded, strategy, weights
from fabric_llm.model.language_model import LanguageModel
from fabric_llm.model.loading import build_skeleton
from fabric_llm.model.sharded import original_name
from fabric_llm.model.strategy import modules_to_wrap
from fabric_llm.model.strategy_rules import Sharding

FLAGS = [
    ("fsdp", 2, "--sharding_strategy SHARD_GRAD_OP"),
    ("fsdp", 2, "--sharding_strategy NO_SHARD"),
    ("fsdp", 2, "--sharding_strategy HYBRID_SHARD"),
    ("fsdp", 2, "--auto_wrap_policy none"),
    ("fsdp", 2, "--auto_wrap_policy size:5000"),
    ("fsdp", 2, "--auto_wrap_policy LlamaMLP,LlamaAttention"),
    ("fsdp", 2, "--activation_checkpointing true"),
    ("fsdp", 2, "--cpu_offload true --micro_batch_size 6"),
    ("fsdp", 2, "--backward_prefetch BACKWARD_POST --limit_all_gathers false"),
    ("fsdp", 2, "--backward_prefetch none --state_dict_type sharded"),
    ("fsdp", 1, ""),
    ("fsdp", 3, ""),
    ("fsdp2", 2, "--sharding_strategy SHARD_GRAD_OP"),
    ("fsdp2", 2, "--sharding_strategy HYBRID_SHARD"),
    ("fsdp2", 2, "--auto_wrap_policy none"),
    ("fsdp2", 2, "--auto_wrap_policy size:5000"),
    ("fsdp2", 2, "--activation_checkpointing true"),
    ("fsdp2", 2, "--cpu_offload true --state_dict_type sharded"),
    ("fsdp2", 1, ""),
    ("ddp", 2, "--activation_checkpointing true"),
    ("auto", 1, "--activation_checkpointing true"),
]


def run(toys, folder, ranks, *flags, precision="32-true"):
    words = f"--run_name run --precision {precision} --lr 1e-3 --max_step 4 --global_batch_size 12 "
    words += "--micro_batch_size 2 --eval_iters 3"
    train_ranks(ranks, *toy_run(toys, folder, model="llama-tied"), *words.split(), *flags)
    return [metrics(folder / "run", key) for key in ("loss", "grad_norm", "eval_loss")]


def saved_weights(folder):
    return AutoModelForCausalLM.from_pretrained(folder / "run" / "step-00000004").state_dict()


@pytest.fixture(scope="module")
def plain(toys, tmp_path_factory):
    """One device: (losses, gradient norms, evaluation losses, final weights) in 32-true and
    bf16-mixed."""

    def of(precision):
        folder = tmp_path_factory.mktemp("plain")
        curves = run(toys, folder, 1, precision=precision)
        return *curves, saved_weights(folder)

    return {precision: of(precision) for precision in ("32-true", "bf16-mixed")}


def gradients_of_a_node_each(name):
    """The gradients of this rank's tokens, which are all ranks' where strategies synchronise
    them."""
    how = Sharding(sharding_strategy="HYBRID_SHARD")
    one_device = SimpleNamespace(num_processes=1)
    fabric = SimpleNamespace(device=torch.device("cpu"), world_size=2, strategy=one_device)
    fabric.setup_module = lambda model, move_to_device: model
    skeleton, model, drawn = (build_skeleton(TOY_CONFIGS["llama"], torch.float32) for _ in range(3))
    weights.compute_buffers(model)

    def fill(model):
        sharded.fill(model, skeleton, weights.Drawn(drawn, 1))

    model = strategy.wrap(fabric, name, LanguageModel(model), fill, "32-true", how)
    ids = torch.arange(16)[None] + torch.distributed.get_rank()
    model(input_ids=ids, labels=ids).backward()
    shards = sharded.shards(model).items()
    return {key: shard.parameter.grad.float().sum().item() for key, shard in shards}


@pytest.mark.parametrize("name", ["fsdp", "fsdp2"])
def test_machines_of_one_device_synchronise_a_hybrid(name):
    first, second = run_ranks(2, gradients_of_a_node_each, name)
    assert first == second


@pytest.mark.quick_cases(r"fsdp2-2.*wrap_policy none")
@pytest.mark.every_eighth(3)
@pytest.mark.parametrize(("strategy", "ranks", "flags"), FLAGS)
def test_flags_do_not_change_the_result(toys, tmp_path, plain, strategy, ranks, flags):
    curves = run(toys, tmp_path, ranks, "--strategy", strategy, *flags.split())
    for found, expected in zip(curves, plain["32-true"]):
        assert found == pytest.approx(expected, rel=1e-6, abs=0)
    if "sharded" not in flags:
        found = saved_weights(tmp_path)
        for name, value in plain["32-true"][-1].items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=2e-6)


@pytest.mark.longer
@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2", "ddp"])
def test_bf16_mixed_keeps_float32_weights(toys, tmp_path, plain, strategy):
    losses, norms, _ = run(toys, tmp_path, 2, "--strategy", strategy, precision="bf16-mixed")
    assert losses == pytest.approx(plain["bf16-mixed"][0], rel=1e-3)
    assert norms == pytest.approx(plain["bf16-mixed"][1], rel=2e-2)
    assert {value.dtype for value in saved_weights(tmp_path).values()} == {torch.float32}
    assert losses != pytest.approx(plain["32-true"][0], rel=1e-7), "computed in bfloat16"


def wrapped_names(model, policy):
    names = {module: name for name, module in model.named_modules()}
    return [names[module] for module in modules_to_wrap(model, policy)]


@pytest.mark.parametrize(("name", "layers"), [("llama", "model.layers"), ("gpt2", "transformer.h")])
def test_auto_asks_the_model(name, layers):
    model = build_skeleton(TOY_CONFIGS[name], torch.float32)
    assert wrapped_names(model, "auto") == [f"{layers}.0", f"{layers}.1"]


def test_auto_of_a_model_that_says_nothing_takes_its_longest_list():
    class Block(nn.Linear):
        pass

    blocks = nn.ModuleList([Block(2, 2), Block(2, 2)])
    model = nn.Sequential(nn.ModuleList([nn.Linear(2, 2)]), blocks)
    assert wrapped_names(model, "auto") == ["1.0", "1.1"]


def test_size_wraps_from_below_and_never_splits_tied_weights():
    model = build_skeleton(TOY_CONFIGS["llama"], torch.float32)
    assert "lm_head" in wrapped_names(model, "size:4000")
    expected = ["model.layers.0.mlp", "model.layers.1.mlp", "model"]
    assert wrapped_names(model, "size:5000") == expected
    tied = build_skeleton(TOY_CONFIGS["gpt2"], torch.float32)
    names = wrapped_names(tied, "size:4000")
    assert not {"lm_head", "transformer.wte", "transformer"} & set(names)
    assert "transformer.h.0.mlp.c_fc" in names


def test_names_are_those_of_the_model():
    layer = "causal_lm.model.layers.0._fsdp_wrapped_module.mlp.up_proj.weight"
    name = f"_forward_module._fsdp_wrapped_module.{layer}"
    assert original_name(name) == "causal_lm.model.layers.0.mlp.up_proj.weight"
    assert original_name("module.causal_lm.lm_head.weight") == "causal_lm.lm_head.weight"
    # Of HrmText, for instance.
    assert original_name("module.model.L_module.norm.weight") == "model.L_module.norm.weight"


def held(argv, ranks):
    """(parameter bytes, gradient norm group size) that this rank holds after set-up."""
    from fabric_llm.model.sharded import shard_group

    _, _, model, _ = built(argv)
    local = [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]
    group = shard_group(model)
    return sum(p.numel() * p.element_size() for p in local), 1 if group is None else group.size()


@pytest.mark.parametrize(
    ("strategy", "flags", "part"),
    [
        ("ddp", "", 1),
        ("fsdp", "", 2),
        ("fsdp", "--sharding_strategy NO_SHARD", 1),
        ("fsdp2", "", 2),
    ],
)
def test_a_rank_holds_its_part(toys, tmp_path, strategy, flags, part):
    argv = [*toy_run(toys, tmp_path), *f"--devices 2 --strategy {strategy} {flags}".split()]
    skeleton = build_skeleton(TOY_CONFIGS["llama"], torch.float32)
    whole = 2 * sum(p.numel() for p in skeleton.parameters())
    for bytes_held, group in run_ranks(2, held, [str(word) for word in argv], 2):
        assert bytes_held == pytest.approx(whole / part, rel=0.02)
        assert group == part
