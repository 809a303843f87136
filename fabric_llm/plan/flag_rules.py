"""Numbers among the flags: their signs and ranges, and how batches divide. Raises ValueError with the offending value."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Optional, Union

from fabric_llm.training.schedule import WITH_DECAY_STEPS

POSITIVE = (
    *("number_epochs", "max_step", "micro_batch_size", "gradient_accumulation_steps", "global_batch_size", "lr"),
    *("eval_batch_size", "eval_step_interval", "save_step_interval", "keep_last", "keep_every", "log_step_interval"),
    *("context_length", "spike_threshold", "spike_window", "hang_timeout", "join_timeout", "num_nodes", "max_hours"),
    *("decay_steps", "constant_lr", "branch_decay", "ema_every"),
)
LEFT_OUT = {
    "max_step": "as many as --number_epochs needs",
    "eval_step_interval": "none between",
    "save_step_interval": "none between",
    "keep_last": "all",
}
NOT_NEGATIVE = (
    *("grad_clip", "min_lr", "warmup_steps", "weight_decay", "num_workers", "eval_iters", "sample_tokens", "seed"),
    *("max_skipped_steps", "keep_best", "router_aux_loss_coef", "cooldown_steps"),
)


def numbers(flat: dict[str, Any]) -> None:
    """Signs and ranges of all numbers among the flags of train.py."""
    if flat["devices"] != "auto" and flat["devices"] < 1:
        every = "; --devices auto takes all GPUs" if flat["devices"] == -1 else ""
        raise ValueError(f"--devices must be positive, not {flat['devices']}{every}.")
    for names, fits, words in (
        (POSITIVE, lambda value: value > 0, "positive"),
        (NOT_NEGATIVE, lambda value: value >= 0, "0 or more"),
    ):
        for name in names:
            if flat[name] is not None and not fits(flat[name]):
                instead = f"; leave it out for {LEFT_OUT[name]}" if name in LEFT_OUT else ""
                raise ValueError(f"--{name} must be {words}, not {flat[name]}{instead}.")
    for name in ("lr", "min_lr", "weight_decay", "grad_clip", "hang_timeout", "spike_threshold"):
        if flat[name] is not None and flat[name] == float("inf"):
            raise ValueError(f"--{name} must be a finite number, not {flat[name]}.")
    for name in ("beta1", "beta2", "ema_decay"):
        if flat[name] is not None and not 0 <= flat[name] < 1:
            raise ValueError(f"--{name} must be at least 0 and less than 1, not {flat[name]}.")
    checkpointing(flat["activation_checkpointing"])
    profiled_steps(flat["profile"], flat["max_step"])
    if flat["min_lr"] > flat["lr"]:
        raise ValueError(f"--min_lr {flat['min_lr']} is larger than --lr {flat['lr']}.")
    constant_lr = flat["constant_lr"]
    if constant_lr is not None and not flat["min_lr"] <= constant_lr <= flat["lr"]:
        raise ValueError(f"--constant_lr {constant_lr} isn't between --min_lr {flat['min_lr']} and --lr {flat['lr']}.")
    decays(flat, flat["max_step"])


def decays(flat: Mapping[str, Any], max_step: Optional[int]) -> None:
    """The phases of --lr_schedule against a run of `max_step` steps, None where that isn't known yet."""
    if max_step is None or flat["lr_schedule"] not in WITH_DECAY_STEPS:
        return
    phases = {"warmup_steps": flat["warmup_steps"], "decay_steps": flat["decay_steps"]}
    phases |= {"cooldown_steps": flat["cooldown_steps"]} if flat["lr_schedule"] == "infinite" else {}
    given = {name: steps for name, steps in phases.items() if steps}
    if flat["decay_steps"] and sum(given.values()) > max_step:
        words = " and ".join(f"--{name} {steps}" for name, steps in given.items())
        raise ValueError(f"{words} don't fit into a run of {max_step} steps.")


def checkpointing(asked: Union[bool, str]) -> str:
    """--activation_checkpointing as one word: none, full, every:N or selective. Raises ValueError for another."""
    word = {True: "full", False: "none"}.get(asked, asked)
    if word in ("none", "full", "selective") or re.fullmatch(r"every:[1-9]\d*", word):
        return word
    raise ValueError(
        f"--activation_checkpointing takes none, full, every:N (such as every:2) or selective, not {asked!r}."
    )


def profiled_steps(given: Optional[str], max_step: Optional[int] = None) -> Optional[tuple[int, int]]:
    """The first and the last step of --profile START:STOP. max_step: of the run, where it is known. Raises ValueError."""
    if given is None:
        return None
    found = re.fullmatch(r"([0-9]{1,9}):([0-9]{1,9})", given)
    first, last = map(int, found.groups()) if found else (0, 0)
    if not 1 <= first <= last:
        raise ValueError(
            f"--profile takes START:STOP, the first and the last step to record, counted from 1, such as 3:5, not {given!r}."
        )
    if max_step is not None and first > max_step:
        raise ValueError(f"--profile {given}: the run ends at step {max_step}.")
    return first, last


def batch_sizes(
    micro_batch_size: Optional[int],
    accumulation: Optional[int],
    global_batch_size: Optional[int],
    devices: int,
    num_nodes: int,
) -> tuple[int, int, int]:
    """(sequences per micro-batch, micro-batches per step and device, sequences per step).

    What isn't given follows from the rest. Raises ValueError, with all numbers, if they don't divide or disagree.
    """
    world_size = devices * num_nodes
    if global_batch_size is None:
        micro_batch_size, accumulation = micro_batch_size or 1, accumulation or 1
        return micro_batch_size, accumulation, micro_batch_size * accumulation * world_size
    if micro_batch_size is None:
        micro_batch_size = max(1, global_batch_size // (accumulation * world_size)) if accumulation else 1
    per_micro_batch = micro_batch_size * world_size
    spelled = f"--micro_batch_size {micro_batch_size} x {devices} devices x {num_nodes} nodes = {per_micro_batch}"
    if global_batch_size % per_micro_batch:
        raise ValueError(f"--global_batch_size {global_batch_size} doesn't divide by {spelled}.")
    needed = global_batch_size // per_micro_batch
    if accumulation not in (None, needed):
        raise ValueError(
            f"--global_batch_size {global_batch_size} needs --gradient_accumulation_steps {needed}, "
            f"not {accumulation}: {spelled}."
        )
    return micro_batch_size, needed, global_batch_size


def row_length(folder: str, context_length: int, asked: Optional[int]) -> None:
    """--context_length, `asked`, against what the rows of a dataset hold."""
    if asked not in (None, context_length):
        raise ValueError(
            f"--context_length {asked}: the rows of {folder!r} hold {context_length} tokens; "
            f"run prepare_data.py again with --context_length {asked}."
        )


def sizes(
    folder: str, rows: int, context_length: int, asked: Optional[int], micro_batch_size: int, global_batch_size: int
) -> None:
    """Batches against the training split: `rows` sequences of `context_length` tokens. asked: --context_length."""
    row_length(folder, context_length, asked)
    if micro_batch_size > rows:
        raise ValueError(
            f"--micro_batch_size {micro_batch_size} is larger than the training split of {folder!r}: {rows} sequences."
        )
    if global_batch_size > rows:
        raise ValueError(
            f"A step takes {global_batch_size} sequences, but the training split of {folder!r} has {rows}."
        )
