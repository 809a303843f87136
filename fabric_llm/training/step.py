"""The parts of an optimizer step that train.py puts together: seed, targets, micro-batches, backward, clip, share, update."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from fabric_llm.base.fabric import Fabric
from fabric_llm.base.failpoints import failpoint
from fabric_llm.base.ranks import sum_over_ranks, waits_for_others
from fabric_llm.data.batches import MicroBatch, target_count
from fabric_llm.data.order import random_key
from fabric_llm.model.strategy import shard_group
from fabric_llm.training.gradients import GradientSums, clip_gradients


def seed_step(seed: int, step: int, rank: int) -> None:
    """Make the randomness inside a step (dropout) a function of (seed, step, rank), so that nothing has to be saved."""
    torch.manual_seed(int(random_key(seed, step, rank) >> 1))


def count_targets(fabric: Fabric, micro_batches: list[MicroBatch]) -> Tensor:
    """Target tokens of the global batch, int64 scalar, at least 1: a batch without any target contributes 0, never 0/0."""
    counts = torch.stack([target_count(batch) for batch in micro_batches])
    return _at_least_one(sum_over_ranks(fabric, counts.sum()))


def _at_least_one(count: Tensor) -> Tensor:
    return count.clamp(min=1)


def accumulate(
    fabric: Fabric,
    model: nn.Module,
    micro_batches: list[MicroBatch],
    syncs_every_micro_batch: bool,
    sums_in_float32: bool,
) -> Iterator[MicroBatch]:
    """The micro-batches of a step, one after the other. The caller makes one backward pass for each.

    syncs_every_micro_batch: reduce gradients over ranks after each one, and not only after the last. sums_in_float32: sum the
    gradients of low-precision weights over the micro-batches in float32 and round once.
    """
    sums = GradientSums(model.parameters()) if sums_in_float32 and len(micro_batches) > 1 else None
    for index, batch in enumerate(micro_batches):
        is_last = index == len(micro_batches) - 1
        with fabric.no_backward_sync(model, enabled=not (is_last or syncs_every_micro_batch)):
            yield batch
        if sums is not None:
            sums.add(last=is_last)
        failpoint("between_micro_batches")


def backward(fabric: Fabric, loss: Tensor) -> None:
    """Add the gradients of `loss`, float32 scalar. Strategies average gradients over ranks, while ours is a sum over them."""
    failpoint("forward")
    with waits_for_others("backward"):
        fabric.backward(loss * fabric.world_size)


def clip(fabric: Fabric, model: nn.Module, optimizer: torch.optim.Optimizer, max_norm: float) -> float:
    """L2 norm of the gradient of the global batch, which is then scaled down to at most `max_norm` (0: it isn't)."""
    unwrapped = getattr(optimizer, "optimizer", optimizer)
    fabric.strategy.precision.unscale_gradients(unwrapped)  # Fabric's scaler of 16-mixed
    return clip_gradients(model.parameters(), max_norm, shard_group(model))


def share(fabric: Fabric, total: Tensor, asked: Sequence[int]) -> tuple[list[float], list[int]]:
    """The sums over all ranks of `total`, float32 scalar or vector, and of the small numbers that each rank asks.

    Both take one collective. Reading its result, and the norm in `clip` just before, is all that the host waits for in a step.
    """
    numbers = torch.cat([total.flatten(), torch.tensor(asked, dtype=total.dtype, device=total.device)])
    summed = sum_over_ranks(fabric, numbers).tolist()
    return summed[: total.numel()], [int(number) for number in summed[total.numel() :]]


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> float:
    """Make `lr` the learning rate of the next step, for all parameters. Returns it."""
    for group in optimizer.param_groups:
        group["lr"] = lr
    return lr


def leave_out(fabric: Fabric) -> None:
    """After a step that isn't taken: 16-mixed lowers the factor that it scales the loss with, which may have overflowed."""
    scaler = getattr(fabric.strategy.precision, "scaler", None)
    if scaler is not None:
        scaler.update()
