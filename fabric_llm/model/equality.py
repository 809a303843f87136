"""The gate before step 1: is the wrapped, sharded model the one that transformers loads?

Rank 0 runs the reference (see materialize.py) on a few tokens on the CPU, then all ranks run the wrapped model on the same
tokens. Besides the logits every leaf module's output is kept, so that a difference can be named. gradient_equality.py compares
what a step is made of: the loss and its gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Callable, Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fabric_llm.base.fabric import Fabric
from fabric_llm.base.faults import Fault
from fabric_llm.model.strategy import original_name, reshard

PROBE_TOKENS = 64
KEPT_POSITIONS = 8  # of each module's output, the last ones
# Differences that rounding explains, by precision: (loss, nats; logits, mean as a part of their standard deviation;
# a module's output, root mean square as a part of its own). Two ranks of a CPU differ from one by 1e-6 in float32; a
# GPU in bfloat16 sums in another order and rounds after each of dozens of layers.
LIMITS = {
    "32-true": (1e-3, 5e-3, 1e-2),
    "bf16-true": (5e-2, 1e-1, 1.5e-1),
    "bf16-mixed": (5e-2, 1e-1, 1.5e-1),
    "16-mixed": (1e-2, 5e-2, 5e-2),
}


@dataclass(frozen=True)
class Outputs:
    """What a model makes of the probe."""

    loss: float  # nats per target
    logits: Tensor  # float32 [positions, vocabulary], the last KEPT_POSITIONS
    modules: dict[str, Tensor]  # leaf module's name -> its output at those positions, in the order of their calls
    buffers: dict[str, Tensor]  # after the pass: FSDP casts them in its first


@torch.no_grad()
def outputs(
    model: nn.Module, input_ids: Tensor, forward: Callable[[Tensor], Tensor], name_of: Callable[[str], str] = str
) -> Outputs:
    """Run `forward(input_ids)`, which gives the logits of `model`, int64 [1, tokens] -> [1, tokens, vocabulary].

    name_of: module name -> name in the unwrapped model.
    """
    training = model.training
    model.eval()
    # Compiled layers would keep the hooks in their graphs.
    with _recording(model, name_of) as modules, torch.compiler.set_stance("force_eager"):
        logits = forward(input_ids)[0].float()
    model.train(training)
    loss = F.cross_entropy(logits[:-1], input_ids[0, 1:].to(logits.device)).item()
    buffers = {name_of(name): buffer.cpu().clone() for name, buffer in model.named_buffers()}
    return Outputs(loss, _kept(logits), modules, buffers)


def _kept(output: Tensor) -> Tensor:
    """The last positions of an output. A copy: a view would keep all of them."""
    return output[-KEPT_POSITIONS:].to("cpu", torch.float32, copy=True)


@contextmanager
def _recording(model: nn.Module, name_of: Callable[[str], str]) -> Iterator[dict[str, Tensor]]:
    kept: dict[str, Tensor] = {}

    def hook_for(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: object, output: object) -> None:
            output = output[0] if isinstance(output, tuple) else output  # RoPE gives cosines and sines
            if isinstance(output, Tensor) and output.ndim == 3 and output.is_floating_point():
                kept[name] = _kept(output[0])

        return hook

    leaves = [(name, module) for name, module in model.named_modules() if not any(module.children())]
    handles = [module.register_forward_hook(hook_for(name_of(name))) for name, module in leaves]
    try:
        yield kept
    finally:
        for handle in handles:
            handle.remove()


def difference(ours: Outputs, reference: Outputs, precision: str) -> Optional[str]:
    """None if only rounding differs, else a sentence that names the first module that does."""
    for name, expected in reference.buffers.items():
        found = ours.buffers.get(name)
        if found is None or found.dtype != expected.dtype or not torch.equal(found, expected):
            dtype = "missing" if found is None else found.dtype
            return f"the buffer {name} isn't the one that transformers makes ({dtype}, there {expected.dtype})."
    loss_limit, logits_limit, module_limit = LIMITS[precision]
    loss_difference = abs(ours.loss - reference.loss)
    logits_difference = ((ours.logits - reference.logits).abs().mean() / reference.logits.std()).item()
    first = next(
        (name for name in reference.modules if not module_difference(name, ours, reference) <= module_limit), None
    )
    if first is None and loss_difference <= loss_limit and logits_difference <= logits_limit:  # False for NaN
        return None
    named = (
        "no module alone"
        if first is None
        else f"{first} ({module_difference(first, ours, reference):.1%} of its output)"
    )
    return (
        f"the model on the devices isn't the one that transformers loads: loss {ours.loss:.4f} instead of "
        f"{reference.loss:.4f}, logits differ by {logits_difference:.1%}; the first module that differs: {named}."
    )


def module_difference(name: str, ours: Outputs, reference: Outputs) -> float:
    """Root mean square of the difference of a module's outputs, as a part of that of the output; 0 if there is no pair."""
    expected, found = reference.modules[name], ours.modules.get(name)
    if found is None or found.shape != expected.shape:
        return 0.0
    return ((found - expected).square().mean() / expected.square().mean().clamp(min=1e-12)).sqrt().item()


def verify_start(
    fabric: Fabric, wrapped: nn.Module, reference: Optional[Outputs], input_ids: Tensor, precision: str
) -> Outputs:
    """Compare the wrapped model with the reference's outputs (rank 0). All ranks call it.

    Returns rank 0's outputs of the wrapped model. Raises ValueError, on all ranks alike, if they differ.
    """
    ours = outputs(
        wrapped.module,
        input_ids,
        lambda ids: wrapped(ids.to(fabric.device)),
        lambda name: original_name(name).removeprefix("causal_lm."),
    )
    reshard(wrapped)
    problem = None if reference is None else difference(ours, reference, precision)
    problem = fabric.broadcast(problem)
    if problem is not None:
        raise Fault(problem)
    return ours
