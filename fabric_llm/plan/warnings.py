"""Warnings: valid flags that are probably a mistake, such as those without an effect.

A flag counts as given where it differs from its default: arguments.yaml of a run that is resumed holds them all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Optional

from fabric_llm.base.command_line import Flag, Flags
from fabric_llm.base.machine import cores
from fabric_llm.model.loading import has_weights
from fabric_llm.plan.checks import profiled_steps
from fabric_llm.plan.plan import Plan

# AdamW moves a weight by about the learning rate a step, and weights of language models begin, and mostly stay, around
# 0.02 (initializer_range in transformers): above that one step replaces what they hold.
LARGEST_LR = 0.02
LARGEST_DECAY = 0.01  # of a weight in one step: a third is left after a hundred
# A step of so few sequences is mostly noise, unless they are long ones.
FEW_SEQUENCES, FEW_TOKENS = 2, 65_536
# Nearly as good as new text: Muennighoff et al. 2023, Scaling Data-Constrained Language Models, arXiv 2305.16264.
MOST_EPOCHS = 4


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


def warnings_of(flags: Flags, plan: Plan) -> list[str]:
    """One sentence for each flag, or group of flags, that is probably a mistake."""
    facts = Facts(
        **{name: getattr(plan.placement, name) for name in ("strategy", "kind", "devices", "num_nodes")},
        max_step=plan.schedule.max_step,
        cores=cores(),
        context_length=plan.data.dataset.context_length,
        positions=positions(plan.model.config.get_text_config()),
        start_step=plan.start.step,
        sequences=plan.schedule.global_batch_size if has_weights(plan.model.source) else None,
        epochs=plan.epochs(),
    )
    return warnings(flags, facts)


def warnings(flags: Flags, facts: Facts) -> list[str]:
    """The same, by what the flags came to."""
    flat = flags.flat()
    return [*_of_devices(flat, facts), *_without_effect(flat, flags.declared(), facts), *_of_training(flat, facts)]


def _of_devices(flat: Mapping[str, Any], facts: Facts) -> Iterator[str]:
    if facts.kind == "cpu" and facts.devices > facts.cores:
        yield (
            f"{facts.devices} processes share {facts.cores} CPU cores and wait for each other: take "
            f"--devices {facts.cores} at most."
        )
    if facts.positions is not None and facts.context_length > facts.positions:
        yield (
            f"rows hold {facts.context_length} tokens, but the model was made for {facts.positions} positions: beyond "
            "them it has to learn what it has never seen."
        )
    if flat["cpu_offload"] and facts.kind == "cpu":
        yield "--cpu_offload has no effect on a CPU, whose memory is the host's."
    if flat["sharding_strategy"] == "HYBRID_SHARD" and facts.strategy in ("fsdp", "fsdp2") and facts.num_nodes == 1:
        yield "--sharding_strategy HYBRID_SHARD on one machine is FULL_SHARD."


def _without_effect(flat: Mapping[str, Any], flags: Mapping[str, Flag], facts: Facts) -> Iterator[str]:
    """Flags that are given without what they need: those that miss the same share a sentence."""
    known = {**flat, "strategy": facts.strategy}
    given = {name for name in flat if flat[name] != flags[name].default}
    if flat["sharding_strategy"] == "NO_SHARD" and facts.strategy in ("ddp", "single"):
        given.remove("sharding_strategy")  # it is what they do
    found: dict[str, list[str]] = {}
    for name in sorted(given, key=list(flat).index):
        needs = [need.split() for need in flags[name].needs.split(",") if need]
        for needed, *values in [need for need in needs if not _has(known, *need)][:1]:
            if known[needed] == flags[needed].default:
                missing = f"without --{needed}{' ' * bool(values)}{' or '.join(values)}"
            else:
                missing = f"with --{needed} {str(known[needed]).lower()}"
            found.setdefault(missing, []).append(f"--{name}")
    as_said = {"with --strategy single": "with one device", "with --strategy xla": "with --tpu true"}
    for missing, names in found.items():
        listed = f"{', '.join(names[:-1])} and {names[-1]} have" if len(names) > 1 else f"{names[0]} has"
        yield f"{listed} no effect {as_said.get(missing, missing)}."


def _has(flat: Mapping[str, Any], name: str, *values: str) -> bool:
    """Whether a flag is on, or has one of `values` where some are given. Of a flag with commas, one part is enough."""
    return bool(set(str(flat[name]).lower().split(",")) & set(values)) if values else bool(flat[name])


def _of_training(flat: Mapping[str, Any], facts: Facts) -> Iterator[str]:
    lr, weight_decay, warmup, last = flat["lr"], flat["weight_decay"], flat["warmup_steps"], facts.max_step
    if lr > LARGEST_LR:
        yield (
            f"--lr {lr:g} is far above what language models are trained with: AdamW moves each weight by about that much "
            f"a step, and most weights are around {LARGEST_LR}."
        )
    elif lr * weight_decay > LARGEST_DECAY:
        decay = f"{lr * weight_decay:.0%}"
        yield f"--weight_decay {weight_decay:g} with --lr {lr:g} takes {decay} off every weight in a step."
    if facts.sequences is not None and facts.sequences <= FEW_SEQUENCES and facts.start_step == 0:
        if facts.sequences * facts.context_length < FEW_TOKENS:
            yield (
                f"a step of {facts.sequences} x {facts.context_length} tokens is mostly noise to a trained model: give "
                "--global_batch_size, such as 64, and --micro_batch_size for what fits at once "
                "(docs/continued_pretraining.md)."
            )
    if warmup > 0 and warmup >= last:
        yield (
            f"--warmup_steps {warmup} isn't less than the run's {last} steps: the learning rate only rises, to "
            f"{lr * last / warmup:g}."
        )
    if often := [f"{name} {count:.1f} times" for name, count in facts.epochs.items() if count > MOST_EPOCHS]:
        yield (
            f"the run reads {', '.join(often)}: beyond {MOST_EPOCHS} epochs, repeated text has been seen to teach less and "
            "less (arXiv 2305.16264)."
        )
    if flat["save_step_interval"] is not None and flat["save_step_interval"] >= last:
        yield (
            f"--save_step_interval {flat['save_step_interval']} isn't less than the run's {last} steps: the only checkpoint "
            "comes at the end."
        )
    if (steps := profiled_steps(flat["profile"])) is not None and steps[1] <= facts.start_step:
        yield f"--profile {flat['profile']} has no effect: the run goes on after step {facts.start_step}."
    if flat["sample_tokens"] and flat["state_dict_type"] == "sharded" and flat["sample_prompts"] is None:
        yield "--sample_tokens has no effect with --state_dict_type sharded, which plain transformers doesn't open."


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
