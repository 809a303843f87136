"""Law 6: memory per rank is what the plan said, within 2 %.

What is measured is a real step of training, on real ranks: the most bytes that storages of tensors
hold in its second step. They are counted here by other means than the plan's: those of each
operation's results, as often as an operation is made. For one device torch's profiler counts as
well, which sees what kernels allocate inside. (It sees one thread, and gloo frees in another.)
"""

import os
from dataclasses import replace

import pytest
from ranks import run_ranks
from transformers import GPT2Config, LlamaConfig, MixtralConfig

from benchmarks import inputs, one_step, turns

VOCABULARY, CONTEXT = 1024, 128
FIELDS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)
CONFIGS = {
    "small": LlamaConfig(**dict(zip(FIELDS, (128, 352, 4, 4, 2))), vocab_size=VOCABULARY),
    "deep": LlamaConfig(
        **dict(zip(FIELDS, (96, 256, 9, 4, 4))), vocab_size=VOCABULARY, tie_word_embeddings=True
    ),
    "wide": LlamaConfig(**dict(zip(FIELDS, (512, 1376, 3, 8, 8))), vocab_size=VOCABULARY),
    "gpt2": GPT2Config(n_embd=192, n_layer=4, n_head=4, vocab_size=VOCABULARY, n_positions=CONTEXT),
    "mixtral": MixtralConfig(
        **dict(zip(FIELDS, (128, 256, 4, 4, 2))), vocab_size=VOCABULARY, num_local_experts=4
    ),
}


def measure(flags, profiles):
    """(bytes at the peak of the second step, what the plan is to say of it) on this rank."""
    from fabric_llm.forecast import memory

    run = one_step.set_up(flags)
    if profiles:
        one_step.take_step(run)
        held = [*run.model.parameters(), *one_step.state_of(run.optimizer)]
        profiled = turns.Peak("cpu")
        profiled.begin()
        one_step.take_step(run)
        peak = one_step.storage_bytes(held) + profiled.end()
    else:
        average = getattr(run.optimizer, "average", None)
        kept = [] if average is None else one_step.state_of(average)
        peak = one_step.peak(run, "cpu", kept)
    run.batches.close()
    plan, training = run.plan, run.flags.training
    sizes = plan.schedule.micro_batch_size, plan.schedule.micro_batches, max(plan.data.contexts)
    average = training.ema_device if training.ema_decay is not None else None
    return peak, memory.Work(plan.placement, replace(plan.model, tokenizer=None), *sizes, average)


def predict_memory(work):
    from fabric_llm.forecast import memory

    assert "RANK" not in os.environ
    return memory.predict_memory(work)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("memory")
    for name, config in CONFIGS.items():
        config.save_pretrained(folder / name)
    inputs.write_rows(folder / "data", VOCABULARY, CONTEXT, 64)
    return folder


def assert_as_planned(folder, model, strategy, *flags, precision="bf16-true", profiles=False):
    ranks = 1 if strategy == "single" else 2
    given = {
        "strategy": "auto" if ranks == 1 else strategy,
        "devices": ranks,
        "micro_batch_size": 4,
    }
    argv = [*inputs.training(folder, model, "data", "cpu", precision, **given), *map(str, flags)]
    measured = run_ranks(ranks, measure, argv, profiles)
    [said] = run_ranks(1, predict_memory, measured[0][1])
    peak = max(peak for peak, _ in measured)
    assert said.peak == pytest.approx(peak, rel=0.02), said


STRATEGIES = ("single", "ddp", "fsdp", "fsdp2")
MODES = ("none", "full", "every:2", "selective")
CASES = [("small", strategy, mode) for strategy in STRATEGIES for mode in MODES[:2]]
CASES += [("small", strategy, mode) for strategy in STRATEGIES for mode in MODES[2:]]
CASES += [
    (model, strategy, mode)
    for model in ("deep", "wide")
    for strategy in STRATEGIES
    for mode in MODES
]


@pytest.mark.quick_cases(r"small-single-none")
@pytest.mark.every_eighth(7)
@pytest.mark.parametrize(("model", "strategy", "mode"), CASES)
def test_memory_of_a_rank_is_what_the_plan_said(folder, model, strategy, mode):
    assert_as_planned(folder, model, strategy, "--activation_checkpointing", mode)


@pytest.mark.longer
@pytest.mark.every_eighth(4)
@pytest.mark.parametrize(
    "flags", ["--loss full", "--gradient_accumulation_steps 2", "--ema_decay 0.9 --ema_device same"]
)
@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed", "32-true"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_other_flags_and_precisions(folder, strategy, precision, flags):
    assert_as_planned(folder, "small", strategy, *flags.split(), precision=precision)


@pytest.mark.longer
@pytest.mark.every_eighth(4)
@pytest.mark.parametrize(
    "flags",
    [
        "--bf16_updates master",
        "--freeze *.mlp.*",
        "--sharding_strategy SHARD_GRAD_OP",
        "--auto_wrap_policy none",
        "--auto_wrap_policy size:30000",
    ],
)
@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
def test_flags_of_sharding(folder, strategy, flags):
    assert_as_planned(folder, "small", strategy, *flags.split())


@pytest.mark.longer
@pytest.mark.every_eighth(3)
@pytest.mark.parametrize(
    ("model", "mode"), [("gpt2", "none"), ("mixtral", "none"), ("mixtral", "selective")]
)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_other_families(folder, strategy, model, mode):
    assert_as_planned(folder, model, strategy, "--activation_checkpointing", mode)


@pytest.mark.longer
@pytest.mark.every_eighth(0)
@pytest.mark.parametrize(("model", "mode"), [("small", "none"), ("wide", "none"), ("wide", "full")])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "fsdp2"])
def test_ranks_that_share_rows(folder, strategy, model, mode):
    flags = ("--context_parallel", 2, "--activation_checkpointing", mode)
    assert_as_planned(folder, model, strategy, *flags)


@pytest.mark.longer
@pytest.mark.every_eighth(1)
@pytest.mark.parametrize("model", ["wide", "mixtral"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_mlps_in_tiles(folder, strategy, model):
    assert_as_planned(folder, model, strategy, "--tiled_mlp", "true")


@pytest.mark.longer
@pytest.mark.parametrize("mode", ["none", "full"])
def test_the_profiler_counts_the_same(folder, mode):
    flags = ("--activation_checkpointing", mode)
    assert_as_planned(folder, "wide", "single", *flags, profiles=True)
