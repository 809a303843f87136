"""Is it the model that transformers loads, and does it train as that would?

Before step 1, rank 0 runs the reference (see reference.py) on a few tokens, then all ranks run the
wrapped model on them, twice. The first pass is eager, without gradients, and keeps what each leaf
module makes, so that a difference can be named. The second is the one that trains: fast paths, such
as a loss without logits, attention without a mask or compiled layers, must give the loss and the
gradients of plain transformers, eager attention and all logits. Of each module's output the last
positions are kept, of each parameter's gradient its norm and a sample, so that no second gradient
takes up memory.
"""

import math
import re
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fabric_llm.base import ranks
from fabric_llm.base.fabric import Fabric
from fabric_llm.data.batches import part_of
from fabric_llm.model.sharded import local_part, original_name, reshard, shard_ranks, shards
from fabric_llm.model.weights import PREFIX

PROBE_TOKENS = 64
KEPT_POSITIONS = 8  # of each module's output, the last ones
SAMPLED_ELEMENTS = 4096  # of each parameter's gradient, evenly spaced
SQUARED_AT_ONCE = 2**22  # elements of a gradient, of which float64 copies are made
# A layer with less than this fraction of the whole gradient's norm isn't compared: it may be
# nothing but rounding.
SMALL = 1e-3
Inputs = dict[str, Tensor]


class Limits(NamedTuple):
    """Differences that rounding explains: two ranks of a CPU differ from one by 1e-6 in float32, a
    GPU in bfloat16 sums in another order and rounds after each of dozens of layers."""

    loss: float  # nats
    logits: float  # mean, as a fraction of their standard deviation
    module: float  # root mean square of a module's output, as a fraction of its own
    gradient_norm: float = math.inf  # of a layer, as a fraction of it
    gradient_cosine: float = math.inf  # 1 - cosine


# Float16 needs a scale of the loss, which is found in training: its gradients aren't compared.
LIMITS = {
    "32-true": Limits(1e-3, 5e-3, 1e-2, 2e-3, 2e-6),
    "bf16-true": Limits(5e-2, 1e-1, 1.5e-1, 0.15, 0.03),
    "bf16-mixed": Limits(5e-2, 1e-1, 1.5e-1, 0.15, 0.03),
    "16-mixed": Limits(1e-2, 5e-2, 5e-2),
    # With --float8 only gradients are compared by these, since all else is computed as without it.
    # Random models of 2 to 32 layers have 0.02 to 0.22 of the norm and cosines from 0.99 down to
    # 0.75 (docs/results/float8.md).
    "float8": Limits(0.15, 1e-1, 1.5e-1, 0.5, 0.4),
}


class Outputs(NamedTuple):
    """What a model makes of the probe."""

    loss: float  # nats per target
    logits: Tensor  # float32 [positions, vocabulary], the last KEPT_POSITIONS
    # By the leaf module's name its output at those positions, in the order of calls.
    modules: dict[str, Tensor]
    buffers: dict[str, Tensor]  # after the pass: FSDP casts them in its first


class Gradients(NamedTuple):
    """What is kept of the probe's gradients, by parameter."""

    loss: float  # nats per target
    squares: dict[str, float]  # sum of the gradient's squares
    samples: dict[str, Tensor]  # float32 [up to SAMPLED_ELEMENTS]


@torch.no_grad()
def outputs_of(model: nn.Module, input_ids: Tensor, forward: Callable[[Tensor], Tensor]) -> Outputs:
    """Run `forward(input_ids)`, which gives the logits of `model`, int64 [1, tokens] -> [1, tokens,
    vocabulary].

    Names are those in the unwrapped causal LM. The model is in evaluation afterwards.
    """
    modules: dict[str, Tensor] = {}
    names = {
        module: path_of(name)
        for name, module in model.named_modules()
        if not any(module.children())
    }

    def last_positions(output: Tensor) -> Tensor:  # a copy: a view would keep all of them
        return output[-KEPT_POSITIONS:].to("cpu", torch.float32, copy=True)

    def keep(module: nn.Module, inputs: object, output: Any) -> None:
        output = output[0] if isinstance(output, tuple) else output  # RoPE gives cosines and sines
        if isinstance(output, Tensor) and output.ndim == 3 and output.is_floating_point():
            modules[names[module]] = last_positions(output[0])

    # Dropout and the like would make two passes differ.
    model.eval()
    handles = [module.register_forward_hook(keep) for module in names]
    # Compiled layers would keep the hooks in their graphs.
    with torch.compiler.set_stance("force_eager"):
        logits = forward(input_ids)[0].float()
    for handle in handles:
        handle.remove()
    loss = F.cross_entropy(logits[:-1], input_ids[0, 1:].to(logits.device)).item()
    buffers = {path_of(name): buffer.cpu().clone() for name, buffer in model.named_buffers()}
    return Outputs(loss, last_positions(logits), modules, buffers)


def path_of(name: str) -> str:
    """A parameter's name in transformers' model, of its name in a wrapped one."""
    return original_name(name).removeprefix(PREFIX)


def output_difference(ours: Outputs, reference: Outputs, precision: str) -> Optional[str]:
    """None if only rounding differs, else a sentence that names the first module that does."""
    # Buffers hold no weights, so that no file can correct them: RoPE's frequencies must be exact.
    for name, expected in reference.buffers.items():
        own = ours.buffers.get(name)
        if own is None or own.dtype != expected.dtype or not torch.equal(own, expected):
            dtype = "missing" if own is None else own.dtype
            return (
                f"the buffer {name} isn't the one that transformers makes ({dtype}, there "
                f"{expected.dtype})."
            )
    limits, named = LIMITS[precision], "no module alone"
    logits = ((ours.logits - reference.logits).abs().mean() / reference.logits.std()).item()
    for name, expected in reference.modules.items():
        own = ours.modules.get(name)
        if own is not None and own.shape == expected.shape:
            square = (own - expected).square().mean()
            relative = (square / expected.square().mean().clamp(min=1e-12)).sqrt().item()
            if not relative <= limits.module:  # NaN as well
                named = f"{name} ({relative:.1%} of its output)"
                break
    else:
        # No module differs, so that loss and logits alone decide.
        if abs(ours.loss - reference.loss) <= limits.loss and logits <= limits.logits:
            return None
    return (
        f"the model on the devices isn't the one that transformers loads: loss {ours.loss:.4f} "
        f"instead of {reference.loss:.4f}, logits differ by {logits:.1%}; the first module that "
        f"differs: {named}."
    )


def gradients_of_reference(model: nn.Module, inputs: Inputs) -> Gradients:
    """Those of a LanguageModel that one process holds. Each gradient is dropped as soon as it is
    sampled."""
    names = {
        parameter: name for name, parameter in model.named_parameters() if parameter.requires_grad
    }
    squares: dict[str, float] = {}
    samples: dict[str, Tensor] = {}

    def keep(parameter: Tensor) -> None:
        flat, name = parameter.grad.flatten(), names[parameter]
        squares[name], samples[name] = square(flat).item(), _sampled(flat, 0, flat.numel())
        parameter.grad = None

    # A hook samples each gradient as it is made: all at once would take a second model's memory.
    handles = [parameter.register_post_accumulate_grad_hook(keep) for parameter in names]
    with torch.enable_grad():
        # The first token of each row has no prediction, so it is no target.
        loss = model.eval()(**inputs) / (inputs["labels"].numel() - len(inputs["labels"]))
        loss.backward()
    for handle in handles:
        handle.remove()
    return Gradients(loss.item(), squares, samples)


def gradients_of_wrapped(
    fabric: Fabric, wrapped: nn.Module, inputs: Inputs, place: dict[str, int]
) -> Gradients:
    """Those of the wrapped model, right on rank 0. All ranks call it with the same inputs. No
    gradient is left.

    place: see Placement.rows_of. Ranks that share rows each compute a part of the probe.
    """
    parts, targets = place["parts"], inputs["labels"].numel() - len(inputs["labels"])
    if parts > 1:
        inputs = part_of(inputs, place["part"], parts)
    with warnings.catch_warnings():
        # Without dropout a layer may return a view of its last product, which nobody writes into
        # here.
        warnings.filterwarnings("ignore", message=".*returned a view tensor")
        # In evaluation, as the reference: dropout would differ.
        loss = wrapped.eval()(**fabric.to_device(inputs)) / targets
        fabric.backward(loss * parts)  # strategies average over all ranks
    reshard(wrapped)
    loss = loss.detach()
    if parts > 1:
        loss = ranks.sum_over_ranks(fabric, loss.clone()) / place["world_size"]
    sampled = {}
    for name, (parameter, first, counts) in shards(wrapped).items():
        if parameter.requires_grad:
            # Zeros where there is none: rank 0 asks for each name in what every rank sends.
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            piece = local_part(gradient).detach().flatten()
            sampled[name] = square(piece).item(), _sampled(piece, first, sum(counts))
            parameter.grad = gradient = piece = None
    # Rank 0 puts together what the ranks of one replica have sampled of their shards.
    gathered = ranks.gather(sampled)
    held = [gathered[rank] for rank in shard_ranks(wrapped)]
    return Gradients(
        loss.item(),
        {name: sum(own[name][0] for own in held) for name in sampled},
        {name: torch.cat([own[name][1] for own in held]) for name in sampled},
    )


def gradient_difference(ours: Gradients, reference: Gradients, precision: str) -> Optional[str]:
    """None if only rounding differs, else words that name the layer that differs most."""
    limits = LIMITS[precision]
    # The loss is the cheapest to compare, and what differs in it differs everywhere.
    if not abs(ours.loss - reference.loss) <= limits.loss:
        return f"the loss is {ours.loss:.4f} instead of {reference.loss:.4f}"
    # By layer: causal_lm.model.layers.3.mlp.up_proj.weight belongs to model.layers.3.
    layers: dict[str, list[str]] = {}
    for name in ours.squares:
        if name in reference.squares:  # others have no part in the loss
            path = path_of(name)
            # A parameter outside of numbered layers, such as an embedding, is its own module's.
            numbered = re.match(r"(.*?\.\d+)\.", path)
            layer = numbered[1] if numbered else path.rpartition(".")[0]
            layers.setdefault(layer, []).append(name)
    # Layers are judged by norm and direction, each as a multiple of what rounding explains.
    whole = sum(reference.squares.values())
    worst, words = 1.0, None
    for layer, names in layers.items():
        expected = sum(reference.squares[name] for name in names)
        if not expected > SMALL**2 * whole:
            continue
        norm = math.sqrt(sum(ours.squares[name] for name in names) / expected)
        own, other = (
            torch.cat([of.samples[name] for name in names]).double() for of in (ours, reference)
        )
        cosine = 1.0  # an embedding's sample may hold none of the probe's tokens
        if own.any() or other.any():
            cosine = (own @ other / (own.norm() * other.norm())).item()
        excess = max(abs(norm - 1) / limits.gradient_norm, (1 - cosine) / limits.gradient_cosine)
        excess = excess if math.isfinite(norm + cosine) else math.inf
        if excess > worst:
            worst = excess
            words = (
                f"the gradient of {layer} has {norm:.3f} times the norm, and a cosine of "
                f"{cosine:.4f}"
            )
    return words


def _sampled(gradient: Tensor, offset: int, count: int) -> Tensor:
    """The elements at every n-th place of a gradient with `count` elements. gradient: its flat part
    that begins at `offset`.

    A copy: a view would keep the whole gradient, which would be sent to all ranks with it.
    """
    step = max(1, -(-count // SAMPLED_ELEMENTS))
    # The first place at or behind `offset` that is a multiple of n, so that shards take the places
    # that the whole would.
    return gradient[-offset % step :: step].to("cpu", torch.float32, copy=True)


def square(gradient: Tensor) -> Tensor:
    """The sum of its squares, float64 scalar, in parts: torch makes a float64 copy of what it is
    given."""
    parts = gradient.flatten().split(SQUARED_AT_ONCE)
    return torch.stack(
        [torch.linalg.vector_norm(part, dtype=torch.float64).square() for part in parts]
    ).sum()
