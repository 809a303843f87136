"""The gate before step 1, second half: does the model as it will run give the loss and the gradients of plain transformers?

Fast paths, such as a loss without logits, attention without a mask or compiled layers, compute the same in another way. Rank 0
makes the gradients of the probe with the reference, eager attention and all logits, on the CPU. All ranks make them with the
wrapped model. Of each parameter's gradient its norm and a sample are kept, so that no second gradient takes up memory.
"""

from __future__ import annotations

import math
import re
import warnings
from dataclasses import dataclass
from typing import Optional

import torch
from torch import Tensor, nn

from fabric_llm.base import ranks
from fabric_llm.base.fabric import Fabric
from fabric_llm.base.faults import Fault
from fabric_llm.model.strategy import original_name, shard_group

SAMPLED_ELEMENTS = 4096  # of each parameter, evenly spaced
# Differences that rounding explains, by precision: (the norm of a layer's gradient, as a part of it; 1 - cosine; loss, nats).
# Float16 needs a scale of the loss, which is found in training: its gradients aren't compared.
LIMITS = {"32-true": (2e-3, 2e-6, 1e-3), "bf16-true": (0.15, 0.03, 0.05), "bf16-mixed": (0.15, 0.03, 0.05)}
SMALL = 1e-3  # a layer with so little of the whole gradient's norm isn't compared: it may be nothing but rounding
Inputs = dict[str, Tensor]


@dataclass(frozen=True)
class Gradients:
    """What is kept of the probe's gradients, by parameter."""

    loss: float  # nats per target
    squares: dict[str, float]  # sum of the gradient's squares
    samples: dict[str, Tensor]  # float32 [up to SAMPLED_ELEMENTS]


def sampled(gradient: Tensor, offset: int, count: int) -> Tensor:
    """The elements at every n-th place of a gradient with `count` elements. gradient: its flat part that begins at `offset`.

    A copy: a view would keep the whole gradient, which would be sent to all ranks with it.
    """
    step = max(1, -(-count // SAMPLED_ELEMENTS))
    return gradient[-offset % step :: step].to("cpu", torch.float32, copy=True)


def of_reference(model: nn.Module, inputs: Inputs) -> Gradients:
    """Those of a LanguageModel that one process holds. Each gradient is dropped as soon as it is sampled."""
    names = {parameter: name for name, parameter in model.named_parameters() if parameter.requires_grad}
    squares: dict[str, float] = {}
    samples: dict[str, Tensor] = {}

    def keep(parameter: Tensor) -> None:
        flat, name = parameter.grad.flatten(), names[parameter]
        squares[name], samples[name] = square(flat).item(), sampled(flat, 0, flat.numel())
        parameter.grad = None

    handles = [parameter.register_post_accumulate_grad_hook(keep) for parameter in names]
    training = model.training
    try:
        with torch.enable_grad():
            loss = model.eval()(**inputs) / _targets(inputs)
            loss.backward()
    finally:
        model.train(training)
        for handle in handles:
            handle.remove()
    # Under all their names: a wrapped model may name a tied parameter otherwise.
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if (first := names.get(parameter)) in squares:
            squares[name], samples[name] = squares[first], samples[first]
    return Gradients(loss.item(), squares, samples)


def of_wrapped(fabric: Fabric, wrapped: nn.Module, inputs: Inputs) -> Gradients:
    """Those of the wrapped model, right on rank 0. All ranks call it with the same inputs. No gradient is left."""
    training = wrapped.training
    with warnings.catch_warnings():
        # Without dropout a layer may return a view of its last product, which nobody writes into here.
        warnings.filterwarnings("ignore", message=".*returned a view tensor")
        loss = wrapped.eval()(**fabric.to_device(inputs)) / _targets(inputs)
        fabric.backward(loss)
    wrapped.train(training)
    trained = [(name, parameter) for name, parameter in wrapped.module.named_parameters() if parameter.requires_grad]
    group = shard_group(wrapped)
    holders = [fabric.global_rank] if group is None else torch.distributed.get_process_group_ranks(group)
    lengths = ranks.gather({original_name(name): _local(parameter).numel() for name, parameter in trained})
    found = {}
    for name, parameter in trained:
        piece, name = _piece(parameter), original_name(name)
        offset = sum(lengths[rank][name] for rank in holders if rank < fabric.global_rank)
        count = sum(lengths[rank][name] for rank in holders)
        found[name] = square(piece).item(), sampled(piece, offset, count)
        parameter.grad = piece = None
    gathered = ranks.gather(found)
    held = [gathered[rank] for rank in holders]
    return Gradients(
        loss.item(),
        {name: sum(own[name][0] for own in held) for name in found},
        {name: torch.cat([own[name][1] for own in held]) for name in found},
    )


def difference(ours: Gradients, reference: Gradients, precision: str) -> Optional[str]:
    """None if only rounding differs, else words that name the layer that differs most."""
    of_norm, of_cosine, of_loss = LIMITS[precision]
    if not abs(ours.loss - reference.loss) <= of_loss:
        return f"the loss is {ours.loss:.4f} instead of {reference.loss:.4f}"
    whole = sum(reference.squares.values())
    worst, words = 1.0, None
    for layer, names in _layers(ours).items():
        names = [name for name in names if name in reference.squares]  # others have no part in the loss
        expected = sum(reference.squares[name] for name in names)
        if not expected > SMALL**2 * whole:
            continue
        norm = math.sqrt(sum(ours.squares[name] for name in names) / expected)
        cosine = _cosine(*(torch.cat([g.samples[name] for name in names]) for g in (ours, reference)))
        excess = max(abs(norm - 1) / of_norm, (1 - cosine) / of_cosine) if math.isfinite(norm + cosine) else math.inf
        if excess > worst:
            worst, words = (
                excess,
                f"the gradient of {layer} has {norm:.3f} times the norm, and a cosine of {cosine:.4f}",
            )
    return words


def verify(
    fabric: Fabric, wrapped: nn.Module, reference: Optional[Gradients], inputs: Inputs, precision: str, advice: str
) -> None:
    """Compare the wrapped model's gradients with the reference's (rank 0). All ranks call it.

    Raises Fault, on all ranks alike, if they differ. advice: what to change, as the end of the sentence.
    """
    ours = of_wrapped(fabric, wrapped, inputs)
    words = None if reference is None else difference(ours, reference, precision)
    words = ranks.from_first(words)
    if words is not None:
        raise Fault(f"the model as it would be trained isn't plain transformers': {words}{advice}.")


def _layers(gradients: Gradients) -> dict[str, list[str]]:
    """Layer -> its parameters: causal_lm.model.layers.3.mlp.up_proj.weight belongs to model.layers.3."""
    layers: dict[str, list[str]] = {}
    for name in gradients.squares:
        path = name.removeprefix("causal_lm.")
        numbered = re.match(r"(.*?\.\d+)\.", path)
        layers.setdefault(numbered[1] if numbered else path.rpartition(".")[0], []).append(name)
    return layers


def _piece(parameter: Tensor) -> Tensor:
    """This rank's part of a gradient, flat; zeros where there is none."""
    return _local(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad).detach().flatten()


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def square(gradient: Tensor) -> Tensor:
    """The sum of its squares, float64 scalar, in parts: torch makes a float64 copy of what it is given."""
    parts = gradient.flatten().split(2**22)
    return torch.stack([torch.linalg.vector_norm(part, dtype=torch.float64).square() for part in parts]).sum()


def _cosine(one: Tensor, other: Tensor) -> float:
    if not (one.any() or other.any()):  # an embedding's sample may hold none of the probe's tokens
        return 1.0
    return (one.double() @ other.double() / (one.double().norm() * other.double().norm())).item()


def _targets(inputs: Inputs) -> int:
    return inputs["labels"].numel() - len(inputs["labels"])
