"""The parts of an optimizer step, from which train.py composes the step: seed, targets, backward,
clip, share, update."""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Optional

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from fabric_llm.base import register
from fabric_llm.base.fabric import Fabric
from fabric_llm.base.failpoints import failpoint
from fabric_llm.base.ranks import sum_over_ranks, waits_for_others
from fabric_llm.data.batches import MicroBatch, target_count
from fabric_llm.data.order import random_key
from fabric_llm.model.gate import path_of, square
from fabric_llm.model.sharded import (
    local_part,
    reshard,
    shard_group,
    sum_over_shards,
)
from fabric_llm.training.adamw import AdamW


def take(optimizer: torch.optim.Optimizer) -> None:
    """Update the weights. Raises Fault for an error in an optimizer of --code."""
    is_own = "optimizer" in register.ONLY
    with register.of_user("step of the optimizer") if is_own else nullcontext():
        optimizer.step()


def seed_step(seed: int, step: int, rank: int) -> None:
    """Make the randomness inside a step (dropout) a function of (seed, step, rank), so that nothing
    has to be saved."""
    torch.manual_seed(int(random_key(seed, step, rank) >> 1))


def count_targets(fabric: Fabric, micro_batches: list[MicroBatch]) -> Tensor:
    """Target tokens of the global batch, int64 scalar, at least 1, so that the loss of a batch
    without targets isn't 0/0."""
    # Ranks and micro-batches have different numbers of targets, so all are counted.
    counts = torch.stack([target_count(batch) for batch in micro_batches])
    return sum_over_ranks(fabric, counts.sum()).clamp(min=1)


def accumulate(
    fabric: Fabric,
    model: nn.Module,
    micro_batches: list[MicroBatch],
    syncs_every_micro_batch: bool,
    sums_in_float32: bool,
) -> Iterator[MicroBatch]:
    """Yield the micro-batches of a step. The caller makes one backward pass for each.

    syncs_every_micro_batch: reduce gradients over ranks after each micro-batch, instead of after
    the last. sums_in_float32: see `GradientSums`.
    """
    # With one micro-batch there is nothing to add up.
    sums = GradientSums(model.parameters()) if sums_in_float32 and len(micro_batches) > 1 else None
    for index, batch in enumerate(micro_batches):
        is_last = index == len(micro_batches) - 1
        # Without a synchronisation gradients stay on this rank until the last micro-batch.
        with fabric.no_backward_sync(model, enabled=not (is_last or syncs_every_micro_batch)):
            yield batch
        # After a backward pass fsdp forgets units that don't train, see sharded.reshard.
        reshard(model)
        if sums is not None:
            sums.add(last=is_last)
        failpoint("between_micro_batches")


class GradientSums:
    """Sums of low-precision gradients over the micro-batches of a step, in float32: 4 bytes for
    each parameter of this rank.

    A bfloat16 sum would be rounded at each addition (docs/numerics.md has the numbers).
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        # Float32 gradients are summed by autograd itself.
        self.parameters = [p for p in parameters if p.dtype != torch.float32]
        self.sums: list[Optional[Tensor]] = [None] * len(self.parameters)

    @torch.no_grad()
    def add(self, last: bool) -> None:
        """Add the gradients of one micro-batch and free them. After the last one, the rounded sums
        take their place."""
        for index, parameter in enumerate(self.parameters):
            total = self.sums[index]
            # The optimizer reads `grad`, so the last sum goes there, in the parameter's dtype.
            if last and total is not None:
                # as of an expert that got no token of the last micro-batch
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                gradient = local_part(parameter.grad)
                gradient.copy_(total.add_(gradient))
            elif not last and parameter.grad is not None:
                gradient = local_part(parameter.grad)
                self.sums[index] = gradient.float() if total is None else total.add_(gradient)
                parameter.grad = None


def backward(fabric: Fabric, loss: Tensor) -> None:
    """Add the gradients of `loss`, float32 scalar. Strategies average gradients over ranks, but
    here they are to be summed."""
    failpoint("forward")
    # The backward pass sums gradients over ranks, so a heartbeat counts it as a collective.
    waits_for_others()
    # Undoes the average: the loss is divided by the targets of all ranks already.
    fabric.backward(loss * fabric.world_size)


def clip(
    fabric: Fabric, model: nn.Module, optimizer: torch.optim.Optimizer, max_norm: float
) -> float:
    """Scale the gradient of the global batch down to an L2 norm of `max_norm` (0: don't). Returns
    the norm before."""
    fabric.strategy.precision.unscale_gradients(optimizer.optimizer)  # only 16-mixed has a scaler
    # Parameters that no loss depends on are known since the start, see
    # capabilities.idle_parameters.
    group, idle = shard_group(model), model.module.idle
    if idle:
        drop_zeros([p for name, p in model.named_parameters() if path_of(name) in idle], group)
    # Before the host waits for the norm. An optimizer of --code has no such method.
    if isinstance(optimizer.optimizer, AdamW):
        optimizer.optimizer.prepare()
    return clip_gradients(model.parameters(), max_norm, group)


@torch.no_grad()
def drop_zeros(parameters: list[nn.Parameter], group: Optional[ProcessGroup]) -> None:
    """Take the gradients of `parameters` away that are zero on all ranks. All ranks call it.

    Where the loss doesn't depend on a parameter, one device and FSDP2 leave it without a gradient,
    and the optimizer leaves it alone. FSDP1 and DDP give it zeros, by which it would decay.
    """
    # One message for all parameters. A part of zeros here may be other than zero on another rank.
    none = torch.zeros((), dtype=torch.bool, device=parameters[0].device)
    here = torch.stack([none if p.grad is None else local_part(p.grad).any() for p in parameters])
    for parameter, count in zip(parameters, sum_over_shards(here.float(), group).tolist()):
        if not count:
            parameter.grad = None


@torch.no_grad()
def clip_gradients(
    parameters: Iterable[nn.Parameter], max_norm: float, group: Optional[ProcessGroup]
) -> float:
    """Scale all gradients down to a common L2 norm of `max_norm` (0: only measure). Returns the
    norm before.

    group: see `shard_group`. Squares are summed in float64, so that the norm doesn't depend on the
    number of shards, or on rounding to bfloat16. The host waits for the norm, because most steps
    need no scaling.
    """
    gradients = [local_part(p.grad) for p in parameters if p.grad is not None]
    # A rank may hold nothing of a small parameter.
    gradients = [g for g in gradients if g.numel()]
    norm = sum_over_shards(sum_of_squares(gradients), group).sqrt().item()
    # 1e-6 as in torch.nn.utils.clip_grad_norm_.
    if max_norm > 0 and gradients and not norm + 1e-6 <= max_norm:  # NaN as well
        # Rounded to float32, so that another order of the sums, 1e-16 apart, doesn't change a
        # gradient's last bit.
        coefficient = torch.tensor(max_norm / (norm + 1e-6), dtype=torch.float32).item()
        torch._foreach_mul_(gradients, coefficient)
    return norm


def sum_of_squares(gradients: list[Tensor]) -> Tensor:
    """Of all elements of the gradients, float64 scalar on their device."""
    if not gradients:
        return torch.zeros((), dtype=torch.float64)
    # `square` takes a large gradient in parts, so that its float64 copies stay small.
    if not gradients[0].is_cuda:
        return torch.stack([square(gradient) for gradient in gradients]).sum()
    # One launch for each dtype, which reads the gradients once. A launch for several dtypes copies
    # them, and so does `square`.
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for gradient in gradients:
        by_dtype.setdefault(gradient.dtype, []).append(gradient)
    norms: list[Tensor] = []
    for same in by_dtype.values():
        norms += torch._foreach_norm(same, 2, dtype=torch.float64)
    return torch.stack(norms).square().sum()


def share(fabric: Fabric, total: Tensor, asked: Sequence[int]) -> tuple[list[float], list[int]]:
    """The sums over all ranks of `total`, float32 scalar or vector, and of the small integers
    `asked`.

    In a step the host waits only for these sums, and for the norm in `clip` just before.
    """
    # One tensor, so that there is one collective. Float32 holds small integers exactly.
    numbers = torch.cat(
        [total.flatten(), torch.tensor(asked, dtype=total.dtype, device=total.device)]
    )
    summed = sum_over_ranks(fabric, numbers).tolist()
    return summed[: total.numel()], [int(number) for number in summed[total.numel() :]]


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Make `lr` the learning rate of the next step, for all parameters."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def leave_out(fabric: Fabric) -> None:
    """After a step that isn't taken: 16-mixed lowers the scale of its loss, which may have caused
    an overflow."""
    # Only 16-mixed has a scaler.
    scaler = getattr(fabric.strategy.precision, "scaler", None)
    if scaler is not None:
        scaler.update()


def sample_weights(parameters: Iterable[nn.Parameter], per_parameter: int = 4096) -> Tensor:
    """Copies of evenly spaced weights of this rank's part of each parameter that trains,
    one-dimensional, in their dtype."""
    samples = []
    for parameter in parameters:
        if not parameter.requires_grad:
            continue
        weights = local_part(parameter.detach()).flatten()
        if weights.numel() > per_parameter:
            # Eight neighbours at a time: reading them costs as much as reading one.
            apart = 8 * -(-weights.numel() // per_parameter)
            # The first eight of each `apart` weights. What is left over at the end isn't sampled.
            whole = weights.numel() // apart * apart
            weights = weights[:whole].view(-1, apart)[:, :8].flatten()
        samples.append(weights)
    return torch.cat(samples)


def update_size(before: Tensor, model: nn.Module) -> tuple[float, float]:
    """(fraction of weights that a step changed, L2 norm of the change divided by theirs), over all
    ranks.

    before: `sample_weights` before the step. model: wrapped. Both show whether training in bfloat16
    has an effect.
    """
    before, after = before.float(), sample_weights(model.parameters()).float()
    squares = [
        torch.linalg.vector_norm(x, dtype=torch.float64).square() for x in (after - before, before)
    ]
    # Summed over ranks at once: how many have changed, how many there are, and two squares.
    numbers = torch.stack(
        [(before != after).sum().double(), squares[0].new_tensor(before.numel()), *squares]
    )
    changed, total, update, weights = sum_over_shards(numbers, shard_group(model)).tolist()
    return changed / total, math.sqrt(update / weights) if weights else 0.0
