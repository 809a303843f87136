"""train_step and evaluate: the only numerics of the loop."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn

from fabric_llm.data import MicroBatch, random_key, target_count
from fabric_llm.optim import clip_gradients
from fabric_llm.strategy import shard_group


class StepResult(NamedTuple):
    """Scalars on the device, not yet read: reading one waits for the device."""

    loss: Tensor  # this rank's share of the mean over the targets of the global batch, nats; the ranks' sum is the loss
    grad_norm: Tensor  # of the global batch, before clipping
    targets: Tensor  # target tokens of the global batch


def train_step(
    fabric: Fabric,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    micro_batches: list[MicroBatch],
    *,
    lr: float,
    grad_clip: float,
    sync_every_micro_batch: bool,
) -> StepResult:
    """One optimizer step over the micro-batches of this rank, together with all other ranks.

    The loss is the sum over target tokens divided by the target tokens of the whole global batch, so that it doesn't
    matter how sequences and masks are spread over micro-batches and ranks.
    """
    micro_batches = [fabric.to_device(batch) for batch in micro_batches]
    targets = fabric.all_reduce(torch.stack([target_count(b) for b in micro_batches]).sum(), reduce_op="sum")
    targets = targets.clamp(min=1)  # a batch without any target contributes nothing, and never 0/0
    total = torch.zeros((), device=fabric.device)
    for index, batch in enumerate(micro_batches):
        waits = index < len(micro_batches) - 1 and not sync_every_micro_batch
        with fabric.no_backward_sync(model, enabled=waits):
            loss = model(**batch) / targets
            fabric.backward(loss * fabric.world_size)  # strategies average gradients over ranks; ours is a sum
        total += loss.detach()
    fabric.strategy.precision.unscale_gradients(optimizer)
    grad_norm = clip_gradients(model.parameters(), grad_clip, shard_group(model))
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad()
    return StepResult(total, grad_norm, targets)


@torch.no_grad()
def evaluate(fabric: Fabric, model: nn.Module, batches: Iterable[MicroBatch]) -> float:
    """Mean loss over all target tokens of all ranks' batches, nats. Every rank gives the same number of batches."""
    model.eval()
    total = torch.zeros((), dtype=torch.float64, device=fabric.device)
    targets = torch.zeros((), dtype=torch.int64, device=fabric.device)
    for batch in batches:
        batch = fabric.to_device(batch)
        total += model(**batch)
        targets += target_count(batch)
    model.train()
    total, targets = (fabric.all_reduce(x, reduce_op="sum") for x in (total, targets))
    return (total / targets.clamp(min=1)).item()


def seed_step(seed: int, step: int, rank: int) -> None:
    """Make the randomness inside a step (dropout) a function of (seed, step, rank): nothing to save or restore."""
    torch.manual_seed(int(random_key(seed, step, rank) >> 1))
