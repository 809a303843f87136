"""Warnings: valid flags that are probably a mistake, such as those without an effect.

A flag counts as given if it differs from its default, since arguments.yaml of a resumed run holds
all flags.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any, Optional

import torch

from fabric_llm.base.flag import Flag, Flags
from fabric_llm.base.machine import cores, shows_gpus
from fabric_llm.model import positions
from fabric_llm.model.loading import has_weights
from fabric_llm.plan.checks import MANY_STEPS, profiled_steps
from fabric_llm.plan.plan import DataPlan, Plan

# AdamW moves a weight by about the learning rate in a step. Weights of language models begin, and
# mostly stay, around 0.02 (initializer_range in transformers): a larger rate replaces them in one
# step.
LARGEST_LR = 0.02
# The gradient of so few sequences is mostly noise, unless they have that many tokens.
FEW_SEQUENCES, FEW_TOKENS = 2, 65_536
# A rise of r nats, measured on n tokens, has a standard error of about RISE_ERROR sqrt(r / n):
# tokens on which two models differ by a KL divergence r have differences with a variance of 2 r,
# and tokens of one document differ alike. Measured: 1.9 to 2.2 for rises of 0.14 to 0.58.
RISE_ERROR = 2.0
# The largest one, as a fraction of a budget, that is taken without a word.
MAX_RISE_ERROR = 0.2
# Up to here, text that is read again is nearly as good as new text: Muennighoff et al. 2023,
# Scaling Data-Constrained Language Models, arXiv 2305.16264.
MAX_EPOCHS = 4


def warnings_of(flags: Flags, plan: Plan) -> Iterator[str]:
    """One sentence for each flag, or group of flags, that is probably a mistake."""
    flat, placement = flags.flat(), plan.placement
    # The demo's model has none on purpose.
    if not flags.demo and not has_weights(plan.model.source):
        yield without_weights(plan.model.source)
    # Steps of the whole run, and those that were done before this start.
    last, done = plan.schedule.max_step, plan.start.step
    context_length = plan.data.dataset.context_length
    # None where the configuration names no number of positions.
    made_for = positions.length(plan.model.config.get_text_config())
    sequences, lr = plan.schedule.global_batch_size, flat["lr"]
    if placement.kind == "cpu":
        yield from _of_cpus(flat, placement.devices)
    yield from beyond_positions(context_length, made_for)
    yield from _of_columns(plan.data)
    yield from _of_budgets(plan.data)
    sharded = placement.strategy in ("fsdp", "fsdp2")
    if flat["sharding_strategy"] == "HYBRID_SHARD" and sharded and placement.num_nodes == 1:
        yield "--sharding_strategy HYBRID_SHARD on one machine is FULL_SHARD."
    yield from _without_effect(flags, placement.strategy)
    if flat["lr_schedule"] == "constant" and flat["lr_decay"] and flat["min_lr"]:
        yield "--min_lr has no effect with --lr_schedule constant."
    if lr > LARGEST_LR:
        yield (
            f"--lr {lr:g} is far above what language models are trained with: AdamW moves each "
            f"weight by about that much a step, and most weights are around {LARGEST_LR} (with "
            "--lr 2, one step takes a toy's loss from 4.9 to 59)."
        )
    is_small = sequences <= FEW_SEQUENCES and sequences * context_length < FEW_TOKENS
    if is_small and done == 0 and has_weights(plan.model.source):
        yield (
            f"a step of {sequences} x {context_length} tokens is mostly noise to a trained model: "
            "give --global_batch_size, such as 64, and --micro_batch_size for what fits at once "
            "(docs/continued_pretraining.md)."
        )
    short = f"isn't less than the run's {last} steps"
    yield from long_warmup(flags.training, last)
    if often := [
        f"{name} {count:.1f} times"
        for name, count in plan.schedule.epochs().items()
        if count > MAX_EPOCHS
    ]:
        yield (
            f"the run reads {', '.join(often)}: beyond {MAX_EPOCHS} epochs, text teaches less "
            "and less (arXiv 2305.16264)."
        )
    interval = flat["save_step_interval"]
    if interval is not None and interval >= last:
        yield f"--save_step_interval {interval} {short}: the only checkpoint comes at the end."
    # Whoever keeps the last few expects several checkpoints.
    elif interval is None and (last - done >= MANY_STEPS or (flat["keep_last"] or 1) > 1):
        yield (
            "no --save_step_interval: the only checkpoint comes at the end, a crash loses all "
            "before it."
        )
    if (every := flat["eval_step_interval"]) is not None and every >= last and flat["eval_iters"]:
        yield f"--eval_step_interval {every} {short}: it adds no evaluation."
    # A rewind goes back to a checkpoint, and none is written on the way.
    if interval is None and plan.data.budgets and flat["forgetting_action"] == "rewind":
        yield (
            "--forgetting_action rewind without --save_step_interval goes back to the beginning "
            "each time."
        )
    if (steps := profiled_steps(flat["profile"])) is not None and steps[1] <= done:
        yield f"--profile {flat['profile']} has no effect: the run goes on after step {done}."


def _of_cpus(flat: Mapping[str, Any], devices: int) -> Iterator[str]:
    """Of a run on CPUs."""
    # Such as PyTorch's build for CPUs.
    if flat["accelerator"] == "auto" and shows_gpus():
        yield (
            f"this machine has NVIDIA GPUs, and PyTorch {torch.__version__} sees none of them: the "
            "run takes the CPU (--accelerator cpu says so on purpose)."
        )
    if devices > cores():
        yield (
            f"{devices} processes share {cores()} CPU cores and wait for each other: "
            f"take --devices {cores()} at most."
        )
    if flat["cpu_offload"]:
        yield "--cpu_offload has no effect on a CPU, whose memory is the host's."


def beyond_positions(context_length: int, made_for: Optional[int]) -> Iterator[str]:
    """Of rows that are longer than the model's positions."""
    if made_for is not None and context_length > made_for:
        yield (
            f"rows hold {context_length} tokens, but the model was made for {made_for} "
            "positions, and has seen none beyond: prepare shorter rows (--context_length), or see "
            "docs/long_context.md."
        )


def long_warmup(training: Flags, last: Optional[int]) -> Iterator[str]:
    """Of a warm-up that doesn't end before the run. training: the group of flags. last: the last
    step, None where it isn't known."""
    warmup = training.warmup_steps
    if last is not None and warmup >= last > 0:
        yield (
            f"--warmup_steps {warmup} isn't less than the run's {last} steps: the learning rate "
            f"only rises, to {training.lr * last / warmup:g}."
        )


def without_weights(model_name: str) -> str:
    """Of a folder for which `has_weights` is False."""
    return f"{model_name!r} holds no weights: training starts from random ones."


def _of_columns(data: DataPlan) -> Iterator[str]:
    """Columns of the datasets that probably mean something else than what is read."""
    if shifted := data.shifted_labels():
        yield (
            f"the labels of {', '.join(shifted)} are already shifted, each the token after its own "
            "place. A model shifts them itself, so it learns the token after next: write labels "
            "that equal input_ids where there is a target, or leave the column out."
        )
    for dataset in data.opened:
        # As of a copy: the rows alone don't tell what is padding, and where documents end.
        if not getattr(dataset, "manifest", True) and (dataset.folder / "tokenizer").is_dir():
            yield (
                f"{dataset.given!r} has a tokenizer of prepare_data.py and no manifest.json: its "
                "documents aren't kept apart, and its padding is trained on. Copy it again."
            )
        # A column such as a mask with another name would be ignored silently.
        if unread := getattr(dataset, "unread", ()):
            yield (
                f"columns of {dataset.given!r} that aren't read: {', '.join(unread)}. What "
                "isn't a target has -100 in labels, or 0 in attention_mask (data/README.md)."
            )


def _of_budgets(data: DataPlan) -> Iterator[str]:
    """Budgets of texts of which too few tokens are evaluated."""
    for name, tokens in data.evaluated_tokens().items():
        # A budget of 0 is judged by the sign alone.
        budget = data.budgets.get(name, 0.0)
        if budget == 0 or tokens == 0:
            continue
        error = RISE_ERROR * math.sqrt(budget / tokens)
        if error > MAX_RISE_ERROR * budget:
            yield (
                f"the budget of {name}, {budget:g} nats, is judged on {tokens:,} tokens, which "
                f"tell it to about {error:.2g}: raise --eval_iters, or evaluate a longer text."
            )


def _without_effect(flags: Flags, strategy: str) -> Iterator[str]:
    """Flags that are given without what they need. Flags that miss the same share a sentence."""
    declared: Mapping[str, Flag] = flags.declared()
    known: Mapping[str, Any] = {**flags.flat(), "strategy": strategy}
    without: dict[str, list[str]] = {}  # what is missing -> flags that need it
    for name, value in flags.flat().items():
        # Neither ddp nor one device shards, so NO_SHARD describes them.
        is_true = value == "NO_SHARD" and strategy in ("ddp", "single")
        if value is None or value == declared[name].default or is_true:
            continue
        # Such as "strategy fsdp fsdp2": a flag, and the values that it may have; without values
        # any will do that counts as true.
        for need in filter(None, declared[name].needs.split(",")):
            needed, *values = need.split()
            # Of a value with commas, one of the parts is enough.
            given = set(str(known[needed]).lower().split(","))
            if given & set(values) or not values and known[needed]:
                continue
            missing = f"with --{needed} {str(known[needed]).lower()}"
            if known[needed] == declared[needed].default:
                missing = f"without --{' '.join([needed, ' or '.join(values)]).strip()}"
            without.setdefault(missing, []).append(f"--{name}")
            break
    usual = {
        "with --strategy single": "with one device",
        "with --strategy xla": "with --tpu true",
    }
    for missing, names in without.items():
        listed = f"{names[0]} has"
        if len(names) > 1:
            listed = f"{', '.join(names[:-1])} and {names[-1]} have"
        yield f"{listed} no effect {usual.get(missing, missing)}."
