"""Warnings: valid flags that are probably a mistake, such as those without an effect. A table of conditions and sentences.

A flag counts as given where it differs from its default: arguments.yaml of a run that is resumed holds them all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Optional

from fabric_llm.base.command_line import Flags, groups
from fabric_llm.plan.flag_rules import profiled_steps
from fabric_llm.plan.trackers import named

# AdamW moves a weight by about the learning rate a step, and weights of language models begin, and mostly stay, around
# 0.02 (initializer_range in transformers): above that one step replaces what they hold.
LARGEST_LR = 0.02
SCHEDULE_TAKES = {"wsd": ("decay_steps", "decay_shape")}
SCHEDULE_TAKES["infinite"] = (*SCHEDULE_TAKES["wsd"], "cooldown_steps", "constant_lr")
LARGEST_DECAY = 0.01  # of a weight in one step: a third is left after a hundred
# A step of so few sequences is mostly noise, unless they are long ones.
FEW_SEQUENCES, FEW_TOKENS = 2, 65_536
# Nearly as good as new text: Muennighoff et al. 2023, Scaling Data-Constrained Language Models, arXiv 2305.16264.
MOST_EPOCHS = 4
FSDP_FLAGS = ("auto_wrap_policy", "sharding_strategy", "limit_all_gathers", "backward_prefetch", "reduce_dtype")
IGNORED = {  # by strategy; --cpu_offload without FSDP is refused
    "fsdp": (),
    "fsdp2": ("limit_all_gathers", "backward_prefetch"),
    "ddp": FSDP_FLAGS,
    "single": FSDP_FLAGS,
    "xla": (*FSDP_FLAGS, "strategy", "cpu_offload"),
}


@dataclass(frozen=True)
class Facts:
    """What the flags came to on this machine, with this dataset and model."""

    strategy: str  # a name of strategy.py's table
    kind: str  # "cpu" or "cuda"
    devices: int  # per node
    num_nodes: int
    cores: int  # of this machine
    max_step: int
    context_length: int  # tokens
    positions: Optional[int]  # that the model was made for, None where it has no such number
    start_step: int = 0  # steps that are done already
    sequences: Optional[int] = None  # of a step that starts from trained weights, None from random ones
    epochs: Mapping[str, float] = field(default_factory=dict)  # how often each source of a mixture will be read


def doubts(flags: Flags, facts: Facts) -> list[str]:
    """Sentences, in the order of --help."""
    defaults = {f.name: f.default for group in groups(type(flags)).values() for f in fields(group)}
    flat = flags.flat()
    given = {name: value for name, value in flat.items() if value != defaults[name]}
    table = (*_of_devices(flat, given, facts), *_of_training(flat, given, facts), *_of_the_rest(flat, given, facts))
    return [sentence for is_so, sentence in table if is_so]


def _of_devices(flat: Mapping[str, Any], given: Mapping[str, Any], facts: Facts) -> list[tuple[bool, str]]:
    strategy, precision = facts.strategy, flat["precision"]
    ignored = [name for name in IGNORED[strategy] if name in given]
    if flat["sharding_strategy"] == "NO_SHARD" and strategy in ("ddp", "single"):
        ignored = [name for name in ignored if name != "sharding_strategy"]  # which is what they do
    where = "one device" if strategy == "single" else f"--strategy {strategy}"
    return [
        (
            facts.kind == "cpu" and facts.devices > facts.cores,
            f"{facts.devices} processes share {facts.cores} CPU cores and wait for each other: take "
            f"--devices {facts.cores} at most.",
        ),
        (
            facts.positions is not None and facts.context_length > facts.positions,
            f"rows hold {facts.context_length} tokens, but the model was made for {facts.positions} positions: beyond "
            "them it has to learn what it has never seen.",
        ),
        (
            "bf16_updates" in given and precision != "bf16-true",
            f"--bf16_updates {flat['bf16_updates']} has no effect: --precision {precision} keeps its weights in float32.",
        ),
        (bool(ignored), f"{_listed(ignored)} no effect with {where}."),
        (
            "reduce_dtype" in given and precision == "32-true" and "reduce_dtype" not in ignored,
            "--reduce_dtype has no effect with --precision 32-true.",
        ),
        (
            bool(flat["cpu_offload"]) and facts.kind == "cpu",
            "--cpu_offload has no effect on a CPU, whose memory is the host's.",
        ),
        (
            flat["sharding_strategy"] == "HYBRID_SHARD" and strategy in ("fsdp", "fsdp2") and facts.num_nodes == 1,
            "--sharding_strategy HYBRID_SHARD on one machine is FULL_SHARD.",
        ),
    ]


def _of_training(flat: Mapping[str, Any], given: Mapping[str, Any], facts: Facts) -> list[tuple[bool, str]]:
    lr, warmup, last = flat["lr"], flat["warmup_steps"], facts.max_step
    without_decay = [name for name in ("min_lr", "lr_schedule") if name in given and not flat["lr_decay"]]
    takes = SCHEDULE_TAKES.get(flat["lr_schedule"], ())
    not_of_schedule = [name for name in SCHEDULE_TAKES["infinite"] if name in given and name not in takes]
    often = [f"{name} {count:.1f} times" for name, count in facts.epochs.items() if count > MOST_EPOCHS]
    without_threshold = [name for name in ("spike_window", "spike_action") if name in given]
    without_average = [name for name in ("ema_device", "ema_every") if name in given]
    return [
        (
            "resume_override" in given and not flat["resume"],
            "--resume_override has no effect without --resume.",
        ),
        (
            "number_epochs" in given and flat["max_step"] is not None,
            f"--number_epochs has no effect beside --max_step {flat['max_step']}.",
        ),
        (
            lr > LARGEST_LR,
            f"--lr {lr:g} is far above what language models are trained with: AdamW moves each weight by about that much "
            f"a step, and most weights are around {LARGEST_LR}.",
        ),
        (
            lr <= LARGEST_LR and lr * flat["weight_decay"] > LARGEST_DECAY,
            f"--weight_decay {flat['weight_decay']:g} with --lr {lr:g} takes {lr * flat['weight_decay']:.0%} off every "
            "weight in a step.",
        ),
        (
            facts.sequences is not None
            and not facts.start_step
            and facts.sequences <= FEW_SEQUENCES
            and facts.sequences * facts.context_length < FEW_TOKENS,
            f"a step of {facts.sequences} x {facts.context_length} tokens is mostly noise to a trained model: give "
            "--global_batch_size, such as 64, and --micro_batch_size for what fits at once (docs/continued_pretraining.md).",
        ),
        (
            warmup > 0 and warmup >= last,
            f"--warmup_steps {warmup} isn't less than the run's {last} steps: the learning rate only rises, to "
            f"{lr * min(1, last / max(warmup, 1)):g}.",
        ),
        (
            bool(often),
            f"the run reads {', '.join(often)}: beyond {MOST_EPOCHS} epochs, repeated text has been seen to teach less and less "
            "(arXiv 2305.16264).",
        ),
        (bool(without_decay), f"{_listed(without_decay)} no effect with --lr_decay false."),
        (bool(not_of_schedule), f"{_listed(not_of_schedule)} no effect with --lr_schedule {flat['lr_schedule']}."),
        (
            bool(without_threshold) and flat["spike_threshold"] is None,
            f"{_listed(without_threshold)} no effect without --spike_threshold.",
        ),
        (
            bool(without_average) and flat["ema_decay"] is None,
            f"{_listed(without_average)} no effect without --ema_decay.",
        ),
    ]


def _of_the_rest(flat: Mapping[str, Any], given: Mapping[str, Any], facts: Facts) -> list[tuple[bool, str]]:
    evaluation = [name for name in ("eval_step_interval", "eval_batch_size") if name in given]
    without_keep_last = [name for name in ("keep_every", "keep_best") if name in given]
    of_wandb = [name for name in ("entity", "project", "log_model") if name in given]
    return [
        (bool(evaluation) and flat["eval_iters"] == 0, f"{_listed(evaluation)} no effect with --eval_iters 0."),
        (
            bool(flat["save_step_interval"]) and flat["save_step_interval"] >= facts.max_step,
            f"--save_step_interval {flat['save_step_interval']} isn't less than the run's {facts.max_step} steps: the only "
            "checkpoint comes at the end.",
        ),
        (
            bool(without_keep_last) and flat["keep_last"] is None,
            f"{_listed(without_keep_last)} no effect without --keep_last: every checkpoint is kept.",
        ),
        (
            "keep_best" in given and bool(flat["keep_best"]) and bool(flat["keep_last"]) and flat["eval_iters"] == 0,
            "--keep_best has no effect with --eval_iters 0: no checkpoint has a validation loss.",
        ),
        (
            bool(flat["async_save"]) and flat["save_step_interval"] is None,
            "--async_save has no effect without --save_step_interval: the last checkpoint isn't written in the background.",
        ),
        (
            "profile" in given and profiled_steps(flat["profile"])[1] <= facts.start_step,
            f"--profile {flat['profile']} has no effect: the run goes on after step {facts.start_step}.",
        ),
        (
            bool(of_wandb) and "wandb" not in named(flat["logger"]),
            f"{_listed(of_wandb)} no effect without --logger wandb.",
        ),
        (
            bool(flat["sample_tokens"]) and flat["state_dict_type"] == "sharded" and flat["sample_prompts"] is None,
            "--sample_tokens has no effect with --state_dict_type sharded, which plain transformers doesn't open.",
        ),
    ]


def _listed(names: list[str]) -> str:
    """--a, --b and --c have"""
    flags = [f"--{name}" for name in names]
    joined = " and ".join([", ".join(flags[:-1]), flags[-1]] if len(flags) > 1 else flags)
    return f"{joined} {'have' if len(flags) > 1 else 'has'}"


def positions(config: Any) -> Optional[int]:
    """Tokens that a transformers configuration with rotary positions was made for; None where it has no such number."""
    longest, rope = getattr(config, "max_position_embeddings", None), getattr(config, "rope_parameters", None)
    if not isinstance(longest, int) or not isinstance(rope, dict):
        return None
    for scaling in (rope, *rope.values()):  # of the model, or of each kind of layer
        if isinstance(scaling, dict) and scaling.get("rope_type") in ("linear", "dynamic", "yarn", "longrope"):
            before, factor = scaling.get("original_max_position_embeddings"), scaling.get("factor")
            if isinstance(factor, (int, float)):
                longest = max(longest, int((before or longest) * factor))
    return longest
