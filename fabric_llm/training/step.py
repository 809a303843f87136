"""train_step and evaluate: the only numerics of the loop."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Callable, NamedTuple, Optional

import torch
from lightning.fabric import Fabric
from torch import nn

from fabric_llm.base.failpoints import failpoint
from fabric_llm.data.batches import MicroBatch, target_count
from fabric_llm.data.order import random_key
from fabric_llm.model.strategy import reshard, shard_group, sum_over_ranks
from fabric_llm.training.gradients import GradientSums, clip_gradients
from fabric_llm.training.updates import UpdateSize, sample_weights, update_size


class StepResult(NamedTuple):
    """Numbers that all ranks share."""

    loss: float  # mean over the targets of the global batch, nats
    grad_norm: float  # of the global batch, before clipping
    taken: bool  # False: no parameter and no optimizer state has changed
    update: Optional[UpdateSize]  # where `measure` asked for it
    asked: list[int]  # for each of the numbers that `ask` gives, the sum over ranks
    aux_loss: Optional[float] = None  # of a mixture of experts, where it is trained: mean over targets


def finite(loss: float, grad_norm: float) -> bool:
    """The least that a step must be to be taken."""
    return math.isfinite(loss) and math.isfinite(grad_norm)


def train_step(
    fabric: Fabric,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    micro_batches: list[MicroBatch],
    *,
    lr: float,
    grad_clip: float,
    sync_every_micro_batch: bool,
    sum_in_float32: bool = True,
    accept: Callable[[float, float], bool] = finite,
    ask: Callable[[], Sequence[int]] = tuple,
    measure: bool = False,
    router_aux_loss_coef: float = 0.0,
) -> StepResult:
    """One optimizer step over the micro-batches of this rank, together with all other ranks.

    The loss is the sum over target tokens divided by the target tokens of the whole global batch, so that it doesn't
    matter how sequences and masks are spread over micro-batches and ranks. `accept(loss, grad_norm)` decides whether the
    update is made; it sees numbers that all ranks share, so all decide alike. Reading them is the one wait a step has:
    without it a NaN would be in the weights before anyone looked. What a rank has to `ask` of all, in small numbers, goes
    the same way, so that it costs no wait of its own.

    router_aux_loss_coef: of the second loss that `model` gives, if it does (router.py): trained with it, and judged without.
    sum_in_float32: sum the gradients of low-precision weights over micro-batches in float32, and round once.
    """
    micro_batches = [fabric.to_device(batch) for batch in micro_batches]
    targets = sum_over_ranks(fabric, torch.stack([target_count(b) for b in micro_batches]).sum())
    targets = targets.clamp(min=1)  # a batch without any target contributes nothing, and never 0/0
    sums = GradientSums(model.parameters()) if sum_in_float32 and len(micro_batches) > 1 else None
    total = torch.zeros((), device=fabric.device)
    for index, batch in enumerate(micro_batches):
        waits = index < len(micro_batches) - 1 and not sync_every_micro_batch
        with fabric.no_backward_sync(model, enabled=waits):
            losses = model(**batch) / targets
            loss = losses if losses.ndim == 0 else losses[0] + router_aux_loss_coef * losses[1]
            failpoint("forward")
            fabric.backward(loss * fabric.world_size)  # strategies average gradients over ranks; ours is a sum
        total = total + losses.detach()
        if sums is not None:
            sums.add(last=index == len(micro_batches) - 1)
        failpoint("between_micro_batches")
    fabric.strategy.precision.unscale_gradients(getattr(optimizer, "optimizer", optimizer))  # it knows the one inside
    group = shard_group(model)
    grad_norm = clip_gradients(model.parameters(), grad_clip, group).item()
    requests = torch.tensor(ask(), dtype=total.dtype, device=total.device)
    loss, *asked = sum_over_ranks(fabric, torch.cat([total.flatten(), requests])).tolist()
    aux_loss = asked.pop(0) if total.ndim else None
    taken = accept(loss, grad_norm)
    size = None
    scaler = getattr(fabric.strategy.precision, "scaler", None)  # of 16-mixed
    if taken:
        before = sample_weights(model.parameters()) if measure else None
        for parameters in optimizer.param_groups:
            parameters["lr"] = lr
        optimizer.step()
        if before is not None:
            size = update_size(before, sample_weights(model.parameters()), group)
    elif scaler is not None:
        scaler.update()  # smaller after an infinity
    optimizer.zero_grad()
    return StepResult(loss, grad_norm, taken, size, [int(number) for number in asked], aux_loss)


@torch.no_grad()
def evaluate(fabric: Fabric, model: nn.Module, batches: Iterable[MicroBatch]) -> float:
    """Mean loss over all target tokens of all ranks' batches, nats. Every rank gives the same number of batches."""
    model.eval()
    total = torch.zeros((), dtype=torch.float64, device=fabric.device)
    targets = torch.zeros((), dtype=torch.int64, device=fabric.device)
    for batch in batches:
        failpoint("evaluate")
        batch = fabric.to_device(batch)
        total += model(**batch)
        targets += target_count(batch)
    model.train()
    reshard(model)  # or the next step would see the outermost unit's parameters whole, and not sum their gradients
    total, targets = sum_over_ranks(fabric, total), sum_over_ranks(fabric, targets)
    return (total / targets.clamp(min=1)).item()


def any_rank(fabric: Fabric, flag: bool) -> bool:
    """True on all ranks if `flag` is true on one. All call it, and wait for each other."""
    return sum_over_ranks(fabric, torch.tensor(int(flag), device=fabric.device)).item() > 0


def seed_step(seed: int, step: int, rank: int) -> None:
    """Make the randomness inside a step (dropout) a function of (seed, step, rank): nothing to save or restore."""
    torch.manual_seed(int(random_key(seed, step, rank) >> 1))
