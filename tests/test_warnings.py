"""Flags that are allowed but hardly meant: one warning each, from rank 0, once a start."""

import json
from types import SimpleNamespace as Has
from unittest import mock

import datasets
import numpy as np
import pytest
from ranks import Job, toy_run
from transformers import AutoConfig, LlamaConfig

from fabric_llm.data.columns import shifts_labels
from fabric_llm.data.dataset import open_dataset
from fabric_llm.model.positions import length
from fabric_llm.plan.warnings import _of_columns, warnings_of
from parse_arguments import parse_train

FACTS = {
    **{"strategy": "single", "kind": "cpu", "devices": 1, "num_nodes": 1, "cores": 8},
    **{"max_step": 100, "context_length": 64, "positions": 64, "start_step": 0},
    "shifted": [],  # datasets
    "unread": (),  # columns
    **{"budgets": {}, "evaluated": {"a": 400, "b": 10**6}},
    "sequences": 64,  # of a step
    **{"weights": True, "gpus": False},
}


def warned(flags, **facts):
    """What is said where the flags came to `facts`, which differ from FACTS, on this machine, with
    this data and model."""
    known = Has(**{**FACTS, **facts})
    config = Has(max_position_embeddings=known.positions, rope_parameters={})
    names = ("strategy", "kind", "devices", "num_nodes")
    plan = Has(
        placement=Has(**{name: vars(known)[name] for name in names}),
        schedule=Has(max_step=known.max_step, global_batch_size=known.sequences, epochs=dict),
        start=Has(step=known.start_step),
        data=Has(
            dataset=Has(context_length=known.context_length),
            shifted_labels=lambda: known.shifted,
            opened=[Has(given="d", unread=known.unread)],
            budgets=known.budgets,
            evaluated_tokens=lambda: known.evaluated,
        ),
        model=Has(source="m", config=Has(get_text_config=lambda: config)),
    )
    module = "fabric_llm.plan.warnings"
    with (
        mock.patch(f"{module}.cores", lambda: known.cores),
        mock.patch(f"{module}.shows_gpus", lambda: known.gpus),
        mock.patch(f"{module}.has_weights", lambda source: known.weights),
    ):
        return list(warnings_of(flags, plan))


def said_of(flags, **facts):
    words = ["--model_name", "m", "--train_data_dir", "d", *flags.split()]
    return warned(parse_train(words), **facts)


FROM_FACTS = [  # flags, facts, the beginning of the one warning
    ("", {"weights": False}, "'m' holds no weights: training starts from random ones."),
    (
        "--profile 3:5", {"start_step": 5},
        "--profile 3:5 has no effect: the run goes on after step 5.",
    ),
    (
        "", {"sequences": 1, "context_length": 64},
        "a step of 1 x 64 tokens is mostly noise to a trained model: give --global",
    ),
    (
        "", {"sequences": 2, "context_length": 32767, "positions": None},
        "a step of 2 x 32767 tokens is mostly noise",
    ),
    ("", {"gpus": True}, "this machine has NVIDIA GPUs, and PyTorch "),
    ("", {"shifted": ["'d'"]}, "the labels of 'd' are already shifted"),
    ("", {"unread": ("loss_mask", "text")}, "columns of 'd' that aren't read: loss_mask, text."),
    ("", {"context_length": 65}, "rows hold 65 tokens, but the model was made for 64 positions"),
    (
        "", {"devices": 9, "strategy": "fsdp"},
        "9 processes share 8 CPU cores and wait for each other: take --devices 8 at most.",
    ),
    (
        "--limit_all_gathers false --backward_prefetch none", {"strategy": "fsdp2"},
        "--limit_all_gathers and --backward_prefetch have no effect with --strategy fsdp2.",
    ),
    (
        "--auto_wrap_policy none --sharding_strategy SHARD_GRAD_OP --reduce_dtype bfloat16",
        {"strategy": "ddp"},
        "--auto_wrap_policy, --sharding_strategy and --reduce_dtype have no effect with "
        "--strategy ddp.",
    ),
    (
        "--reduce_dtype bfloat16 --precision 32-true", {"strategy": "fsdp"},
        "--reduce_dtype has no effect with --precision 32",
    ),
    ("--cpu_offload true", {"strategy": "fsdp"}, "--cpu_offload has no effect on a CPU"),
    (
        "--sharding_strategy HYBRID_SHARD", {"strategy": "fsdp2"},
        "--sharding_strategy HYBRID_SHARD on one machine is FULL_SHARD.",
    ),
    (
        "--auto_wrap_policy none --tpu true", {"strategy": "xla"},
        "--auto_wrap_policy has no effect with --tpu true.",
    ),
    (
        "", {"budgets": {"a": 0.2, "b": 0.001, "copy": 0.1}},
        "the budget of a, 0.2 nats, is judged on 400 tokens, which tell it to about 0.045: ",
    ),
]
# Flags, and the beginning of the one warning.
FROM_FLAGS = """
--lr 2
    --lr 2 is far above what language models are trained with
--warmup_steps 100
    --warmup_steps 100 isn't less than the run's 100 steps: the learning rate only rises, to 2e-05.
--warmup_steps 400
    --warmup_steps 400 isn't less than the run's 100 steps: the learning rate only rises, to 5e-06.
--auto_wrap_policy none
    --auto_wrap_policy has no effect with one device.
--bf16_updates master --precision bf16-mixed
    --bf16_updates has no effect with --precision bf16-mixed.
--min_lr 1e-6 --lr_decay false
    --min_lr has no effect with --lr_decay false.
--number_epochs 3 --max_step 100 --min_lr 0 --lr_decay true
    --number_epochs has no effect with --max_step 100.
--lr_schedule constant --min_lr 1e-6
    --min_lr has no effect with --lr_schedule constant.
--lr_schedule infinite --lr_decay false --decay_steps 5 --constant_lr 1e-5
    --lr_schedule, --decay_steps and --constant_lr have no effect with --lr_decay false.
--eval_data a=b --eval_iters 0
    --eval_data has no effect with --eval_iters 0.
--eval_step_interval 100
    --eval_step_interval 100 isn't less than the run's 100 steps: it adds no evaluation.
--keep_best_of d
    --keep_best_of has no effect without --keep_last.
--resume_override lr
    --resume_override has no effect without --resume.
--decay_steps 5 --decay_shape linear
    --decay_steps and --decay_shape have no effect without --lr_schedule wsd or infinite.
--lr_schedule wsd --constant_lr 1e-6
    --constant_lr has no effect with --lr_schedule wsd.
--spike_action skip
    --spike_action has no effect without --spike_threshold.
--ema_device same --ema_every 2
    --ema_device and --ema_every have no effect without --ema_decay.
--eval_step_interval 5 --eval_iters 0
    --eval_step_interval has no effect with --eval_iters 0.
--save_step_interval 100
    --save_step_interval 100 isn't less than the run's 100 steps
--keep_every 5
    --keep_every has no effect without --keep_last.
--keep_best 2 --keep_last 1 --save_step_interval 5 --eval_iters 0
    --keep_best has no effect with --eval_iters 0
--forgetting_action stop
    --forgetting_action has no effect without --forgetting_budget.
--keep_last 2
    no --save_step_interval: the only checkpoint comes at the end
--async_save true
    --async_save has no effect without --save_step_interval
--entity a --project b --log_model true
    --entity, --project and --log_model have no effect without --logger wandb.
--log_model all --logger csv,tensorboard
    --log_model has no effect with --logger csv,tensorboard.
--sample_tokens 9
    --sample_tokens has no effect without --sample_prompts.
"""
LINES = FROM_FLAGS.strip().splitlines()
PAIRS = zip(LINES[::2], LINES[1::2], strict=True)
TABLE = [*FROM_FACTS, *((flags, {}, words.strip()) for flags, words in PAIRS)]


@pytest.mark.parametrize(
    ("flags", "facts", "words"), TABLE, ids=[flags or str(facts) for flags, facts, _ in TABLE]
)
def test_warnings(flags, facts, words):
    [said] = said_of(flags, **facts)
    assert said.startswith(words) and said.endswith(".") and "\n" not in said


@pytest.mark.parametrize(
    ("flags", "facts"),
    [
        ("", {}),
        ("", {"sequences": 3}),
        ("", {"sequences": 2, "context_length": 32_768, "positions": None}),
        ("", {"sequences": 1, "start_step": 1}),
        ("--lr 4e-3", {}),
        ("--accelerator cpu", {"gpus": True}),
        # the defaults, as written
        ("--limit_all_gathers true --backward_prefetch BACKWARD_PRE", {"strategy": "fsdp2"}),
        (
            "--limit_all_gathers false --backward_prefetch none --reduce_dtype bfloat16",
            {"strategy": "fsdp"},
        ),
        ("--sharding_strategy NO_SHARD", {"strategy": "ddp"}),
        ("--cpu_offload true", {"strategy": "fsdp2", "kind": "cuda"}),
        ("", {"devices": 9, "kind": "cuda", "strategy": "fsdp"}),
        ("--warmup_steps 99", {}),
        ("", {"positions": None, "context_length": 10**6}),
        ("--keep_every 5 --keep_last 1 --save_step_interval 5", {}),
        ("--project b --logger wandb", {}),
        ("--project b --logger csv,wandb --log_model all", {}),
        ("--state_dict_type sharded --activation_checkpointing true", {}),
        ("--bf16_updates master", {}),
        ("--profile 3:5", {"start_step": 4}),
        ("--sharding_strategy HYBRID_SHARD", {"strategy": "fsdp", "num_nodes": 2}),
        ("", {"budgets": {"a": 0.3, "b": 0.001}}),
        ("", {"budgets": {"a": 0, "b": 0.1}}),
        ("", {"budgets": {"a": 0.05}, "evaluated": {"a": 0}}),
    ],
)
def test_nothing_is_said_of_what_is_meant(flags, facts):
    assert said_of(flags, **facts) == []


def test_the_presets_are_meant(tmp_path):
    from arguments import ROOT

    for config in sorted((ROOT / "configs").glob("*.yaml")):
        arguments = parse_train(["--config", str(config)])
        steps = arguments.training.max_step or 10_000
        assert warned(arguments, strategy="fsdp", kind="cuda", max_step=steps) == [], config


def test_positions(toys):
    assert length(AutoConfig.from_pretrained(toys / "llama")) == 64
    assert length(AutoConfig.from_pretrained(toys / "gpt2")) is None, (
        "learned ones are an error, see preflight.py"
    )
    common = {"rope_theta": 1e4, "original_max_position_embeddings": 64}
    yarn = {**common, "rope_type": "yarn", "factor": 4.0}
    assert length(LlamaConfig(max_position_embeddings=64, rope_parameters=yarn)) == 256
    llama3 = {**common, "rope_type": "llama3", "factor": 8.0}
    llama3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    assert length(LlamaConfig(max_position_embeddings=512, rope_parameters=llama3)) == 512


def test_labels_that_are_shifted_are_found(toys, tmp_path):
    """By comparison with input_ids, also where most are masked; not where labels are as they should
    be."""
    tokens = np.random.default_rng(0).integers(1, 100, (12, 24))
    shifted = np.concatenate([tokens[:, 1:], np.full((12, 1), -100)], axis=1)
    masked = np.where(np.arange(24) < 20, -100, shifted)
    alike = np.ones_like(tokens)  # every token is the one after it
    cases = [(tokens, shifted, True), (tokens, masked, True), (tokens, tokens, False)]
    cases += [(alike, alike, False), (tokens, None, False)]
    cases += [(tokens, np.where(np.arange(24) < 20, -100, tokens), False)]
    for number, (ids, labels, expected) in enumerate(cases):
        columns = {"input_ids": ids.tolist()}
        if labels is not None:
            columns["labels"] = labels.tolist()
        split, folder = datasets.Dataset.from_dict(columns), tmp_path / f"data-{number}"
        datasets.DatasetDict({"train": split, "validation": split}).save_to_disk(str(folder))
        assert shifts_labels(open_dataset(folder).train) == expected, number
    words = ("--train_data_dir", tmp_path / "data-1", "--max_step", 1, "--eval_iters", 0)
    job = Job(1, *toy_run(toys, tmp_path), *words)
    assert job.wait() == [0], job.output
    assert job.output[0].count("data-1' are already shifted") == 1, job.output[0]


def test_rank_0_says_it_once(toys, tmp_path):
    """Of a real run of two ranks, in which the context is longer than the model's positions."""
    config = json.loads((toys / "llama" / "config.json").read_text())
    (tmp_path / "short").mkdir()
    config["max_position_embeddings"] = 16
    (tmp_path / "short" / "config.json").write_text(json.dumps(config))
    flags = "--max_step 1 --warmup_steps 1 --strategy ddp --sharding_strategy SHARD_GRAD_OP"
    flags = [*flags.split(), "--eval_iters", 0, "--model_name", tmp_path / "short"]
    job = Job(2, *toy_run(toys, tmp_path / "disk" / "runs"), *flags)
    assert job.wait() == [0, 0], job.output
    warnings = [line for line in job.output[0].splitlines() if line.startswith("Warning: ")]
    warnings = [line for line in warnings if "--model_name is given 2 times" not in line]
    made = f"Warning: {str(tmp_path / 'disk')!r} wasn't there and was made for --output_dir."
    assert len(warnings) == 5 and warnings[4] == made
    assert "short' holds no weights" in warnings[0]
    assert warnings[1].startswith("Warning: rows hold 24 tokens, but the model was made for 16")
    assert warnings[2] == "Warning: --sharding_strategy has no effect with --strategy ddp."
    assert "Warning: " not in job.output[1]


def test_a_copy_without_its_manifest_is_named(tmp_path):
    (tmp_path / "tokenizer").mkdir()
    copied = Has(manifest={}, folder=tmp_path, given="copy")
    data = Has(opened=[copied], shifted_labels=tuple)
    [said] = _of_columns(data)
    assert said.startswith("'copy' has a tokenizer of prepare_data.py and no manifest.json")
