"""The gate before step 1: is the wrapped, sharded model the one that transformers loads, and does it train as that would?

Rank 0 runs the reference (see loading.py) on a few tokens on the CPU, then all ranks run the wrapped model on the same
tokens, twice. The first pass is eager, without gradients, and keeps what each leaf module makes, so that a difference can be
named. The second is the one that trains: fast paths, such as a loss without logits, attention without a mask or compiled
layers, must give the loss and the gradients of plain transformers, eager attention and all logits. Of each module's output the
last positions are kept, of each parameter's gradient its norm and a sample, so that no second gradient takes up memory.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Callable, NamedTuple, Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fabric_llm.base import ranks
from fabric_llm.base.fabric import Fabric
from fabric_llm.base.faults import Fault
from fabric_llm.model.strategy import local_part, original_name, reshard, shard_group, shard_places

PROBE_TOKENS = 64
KEPT_POSITIONS = 8  # of each module's output, the last ones
SAMPLED_ELEMENTS = 4096  # of each parameter's gradient, evenly spaced
SMALL = 1e-3  # a layer with so little of the whole gradient's norm isn't compared: it may be nothing but rounding
Inputs = dict[str, Tensor]


class Limits(NamedTuple):
    """Differences that rounding explains.

    Two ranks of a CPU differ from one by 1e-6 in float32; a GPU in bfloat16 sums in another order and rounds after each of
    dozens of layers.
    """

    loss: float  # nats
    logits: float  # mean, as a part of their standard deviation
    module: float  # root mean square of a module's output, as a part of its own
    gradient_norm: float = math.inf  # of a layer, as a part of it
    gradient_cosine: float = math.inf  # 1 - cosine


# Float16 needs a scale of the loss, which is found in training: its gradients aren't compared.
LIMITS = {
    "32-true": Limits(1e-3, 5e-3, 1e-2, 2e-3, 2e-6),
    "bf16-true": Limits(5e-2, 1e-1, 1.5e-1, 0.15, 0.03),
    "bf16-mixed": Limits(5e-2, 1e-1, 1.5e-1, 0.15, 0.03),
    "16-mixed": Limits(1e-2, 5e-2, 5e-2),
}


@dataclass(frozen=True)
class Outputs:
    """What a model makes of the probe."""

    loss: float  # nats per target
    logits: Tensor  # float32 [positions, vocabulary], the last KEPT_POSITIONS
    modules: dict[str, Tensor]  # leaf module's name -> its output at those positions, in the order of their calls
    buffers: dict[str, Tensor]  # after the pass: FSDP casts them in its first


@dataclass(frozen=True)
class Gradients:
    """What is kept of the probe's gradients, by parameter."""

    loss: float  # nats per target
    squares: dict[str, float]  # sum of the gradient's squares
    samples: dict[str, Tensor]  # float32 [up to SAMPLED_ELEMENTS]


def verify(
    fabric: Fabric,
    wrapped: nn.Module,
    expected: tuple[Optional[Outputs], Optional[Gradients]],
    inputs: Inputs,
    with_gradients: bool,
    precision: str,
    advice: str,
) -> Outputs:
    """Compare the wrapped model with what is `expected`, of the reference, on rank 0. All ranks call it.

    inputs: of `gradients_of_wrapped`. advice: what to change, as the end of the sentence, where only gradients differ. Returns
    rank 0's outputs of the wrapped model. Raises Fault, on all ranks alike, if they differ.
    """
    outputs, gradients = expected
    ours = outputs_of(
        wrapped.module,
        inputs["input_ids"],
        lambda ids: wrapped(ids.to(fabric.device)),
        lambda name: original_name(name).removeprefix("causal_lm."),
    )
    reshard(wrapped)
    _stop_if(None if outputs is None else output_difference(ours, outputs, precision))
    if with_gradients:
        found = gradients_of_wrapped(fabric, wrapped, inputs)
        words = None if gradients is None else gradient_difference(found, gradients, precision)
        _stop_if(words and f"the model as it would be trained isn't plain transformers': {words}{advice}.")
    return ours


def _stop_if(problem: Optional[str]) -> None:
    if (problem := ranks.from_first(problem)) is not None:
        raise Fault(problem)


@torch.no_grad()
def outputs_of(
    model: nn.Module, input_ids: Tensor, forward: Callable[[Tensor], Tensor], name_of: Callable[[str], str] = str
) -> Outputs:
    """Run `forward(input_ids)`, which gives the logits of `model`, int64 [1, tokens] -> [1, tokens, vocabulary].

    name_of: module name -> name in the unwrapped model.
    """
    # Compiled layers would keep the hooks in their graphs.
    with _evaluating(model), _recording(model, name_of) as modules, torch.compiler.set_stance("force_eager"):
        logits = forward(input_ids)[0].float()
    loss = F.cross_entropy(logits[:-1], input_ids[0, 1:].to(logits.device)).item()
    buffers = {name_of(name): buffer.cpu().clone() for name, buffer in model.named_buffers()}
    return Outputs(loss, _kept(logits), modules, buffers)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """No dropout in the body."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def _kept(output: Tensor) -> Tensor:
    """The last positions of an output. A copy: a view would keep all of them."""
    return output[-KEPT_POSITIONS:].to("cpu", torch.float32, copy=True)


@contextmanager
def _recording(model: nn.Module, name_of: Callable[[str], str]) -> Iterator[dict[str, Tensor]]:
    """The outputs of the leaf modules that run in the body, by name."""
    kept: dict[str, Tensor] = {}
    names = {module: name_of(name) for name, module in model.named_modules() if not any(module.children())}

    def keep(module: nn.Module, inputs: object, output: Any) -> None:
        output = output[0] if isinstance(output, tuple) else output  # RoPE gives cosines and sines
        if isinstance(output, Tensor) and output.ndim == 3 and output.is_floating_point():
            kept[names[module]] = _kept(output[0])

    handles = [module.register_forward_hook(keep) for module in names]
    try:
        yield kept
    finally:
        for handle in handles:
            handle.remove()


def output_difference(ours: Outputs, reference: Outputs, precision: str) -> Optional[str]:
    """None if only rounding differs, else a sentence that names the first module that does."""
    for name, expected in reference.buffers.items():
        found = ours.buffers.get(name)
        if found is None or found.dtype != expected.dtype or not torch.equal(found, expected):
            dtype = "missing" if found is None else found.dtype
            return f"the buffer {name} isn't the one that transformers makes ({dtype}, there {expected.dtype})."
    limits = LIMITS[precision]
    logits = ((ours.logits - reference.logits).abs().mean() / reference.logits.std()).item()
    differences = ((name, _module_difference(name, ours, reference)) for name in reference.modules)
    first = next(((name, part) for name, part in differences if not part <= limits.module), None)  # NaN as well
    if first is None and abs(ours.loss - reference.loss) <= limits.loss and logits <= limits.logits:
        return None
    named = "no module alone" if first is None else f"{first[0]} ({first[1]:.1%} of its output)"
    return (
        f"the model on the devices isn't the one that transformers loads: loss {ours.loss:.4f} instead of "
        f"{reference.loss:.4f}, logits differ by {logits:.1%}; the first module that differs: {named}."
    )


def _module_difference(name: str, ours: Outputs, reference: Outputs) -> float:
    """Root mean square of the difference of a module's outputs, as a part of that of the output; 0 if there is no pair."""
    expected, found = reference.modules[name], ours.modules.get(name)
    if found is None or found.shape != expected.shape:
        return 0.0
    return ((found - expected).square().mean() / expected.square().mean().clamp(min=1e-12)).sqrt().item()


def gradients_of_reference(model: nn.Module, inputs: Inputs) -> Gradients:
    """Those of a LanguageModel that one process holds. Each gradient is dropped as soon as it is sampled."""
    names = {parameter: name for name, parameter in model.named_parameters() if parameter.requires_grad}
    squares: dict[str, float] = {}
    samples: dict[str, Tensor] = {}

    def keep(parameter: Tensor) -> None:
        flat, name = parameter.grad.flatten(), names[parameter]
        squares[name], samples[name] = square(flat).item(), _sampled(flat, 0, flat.numel())
        parameter.grad = None

    handles = [parameter.register_post_accumulate_grad_hook(keep) for parameter in names]
    try:
        with torch.enable_grad(), _evaluating(model):
            loss = model(**inputs) / _targets(inputs)
            loss.backward()
    finally:
        for handle in handles:
            handle.remove()
    # Under all their names: a wrapped model may name a tied parameter otherwise.
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if (first := names.get(parameter)) in squares:
            squares[name], samples[name] = squares[first], samples[first]
    return Gradients(loss.item(), squares, samples)


def gradients_of_wrapped(fabric: Fabric, wrapped: nn.Module, inputs: Inputs) -> Gradients:
    """Those of the wrapped model, right on rank 0. All ranks call it with the same inputs. No gradient is left."""
    with warnings.catch_warnings(), _evaluating(wrapped):
        # Without dropout a layer may return a view of its last product, which nobody writes into here.
        warnings.filterwarnings("ignore", message=".*returned a view tensor")
        loss = wrapped(**fabric.to_device(inputs)) / _targets(inputs)
        fabric.backward(loss)
    named = {original_name(n): p for n, p in wrapped.module.named_parameters() if p.requires_grad}
    group = shard_group(wrapped)
    found = {}
    for (name, parameter), (offset, count) in zip(named.items(), shard_places(list(named.values()), group)):
        # Zeros where there is none.
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        piece = local_part(gradient).detach().flatten()
        found[name] = square(piece).item(), _sampled(piece, offset, count)
        parameter.grad = gradient = piece = None
    holders = [fabric.global_rank] if group is None else torch.distributed.get_process_group_ranks(group)
    gathered = ranks.gather(found)
    held = [gathered[rank] for rank in holders]
    return Gradients(
        loss.item(),
        {name: sum(own[name][0] for own in held) for name in found},
        {name: torch.cat([own[name][1] for own in held]) for name in found},
    )


def gradient_difference(ours: Gradients, reference: Gradients, precision: str) -> Optional[str]:
    """None if only rounding differs, else words that name the layer that differs most."""
    limits = LIMITS[precision]
    if not abs(ours.loss - reference.loss) <= limits.loss:
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
        excess = max(abs(norm - 1) / limits.gradient_norm, (1 - cosine) / limits.gradient_cosine)
        excess = excess if math.isfinite(norm + cosine) else math.inf
        if excess > worst:
            worst = excess
            words = f"the gradient of {layer} has {norm:.3f} times the norm, and a cosine of {cosine:.4f}"
    return words


def _layers(gradients: Gradients) -> dict[str, list[str]]:
    """Layer -> its parameters: causal_lm.model.layers.3.mlp.up_proj.weight belongs to model.layers.3."""
    layers: dict[str, list[str]] = {}
    for name in gradients.squares:
        path = name.removeprefix("causal_lm.")
        numbered = re.match(r"(.*?\.\d+)\.", path)
        layers.setdefault(numbered[1] if numbered else path.rpartition(".")[0], []).append(name)
    return layers


def _sampled(gradient: Tensor, offset: int, count: int) -> Tensor:
    """The elements at every n-th place of a gradient with `count` elements. gradient: its flat part that begins at `offset`.

    A copy: a view would keep the whole gradient, which would be sent to all ranks with it.
    """
    step = max(1, -(-count // SAMPLED_ELEMENTS))
    return gradient[-offset % step :: step].to("cpu", torch.float32, copy=True)


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
