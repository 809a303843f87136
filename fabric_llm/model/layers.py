"""What is done to each of a model's repeated layers: recompute it in the backward pass, compile
it."""

import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Optional

import torch
from torch import nn
from torch._subclasses import meta_utils
from torch.utils._triton import has_triton
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from fabric_llm.model.language_model import LanguageModel
from fabric_llm.model.weights import repeated_layers

# Parameters of a layer. A smaller one spends less time than its compilation takes.
WORTH_COMPILING = 10**6
# The most shapes of batches that layers are compiled for: one for each context that is trained or
# evaluated on, and one for its last batch.
MAX_SHAPES = 64
KEPT = (  # by selective checkpointing: what costs most to compute again
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._grouped_mm.default,  # of experts
    torch.ops.aten._scaled_mm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
)


# torch's own function: `compiling` puts `_gradient_like` in its place, which calls this one.
_gradient = meta_utils.safe_grad


def checkpoint_activations(model: PreTrainedModel, which: str, compiles: bool = False) -> None:
    """Recompute layers in the backward pass instead of keeping their activations. Names of
    parameters stay as they are.

    which: `full`, every layer; `every:N`, one of N; `selective`, every layer but for matrix
    products and attention; `offload`, every layer, whose input waits in the host's memory; `none`.
    compiles: layers are compiled as well, see `compile_layers`. Raises ValueError where the model's
    layers can't do it.
    """
    if which == "none":
        return
    # Only this kind of checkpointing takes a `context_fn`.
    options: dict[str, Any] = {"use_reentrant": False}
    if which == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _keep)
    # Versions of transformers that have the first name deprecate the second one.
    enable = (
        getattr(model, "activation_checkpointing_enable", None)
        or model.gradient_checkpointing_enable
    )
    enable(options)
    if which == "offload":
        # `enable` has set one function on all modules that recompute.
        there = [
            module for module in model.modules() if hasattr(module, "_gradient_checkpointing_func")
        ]
        # A feature that is off isn't imported.
        from fabric_llm.model.offload import offloading

        with compiling():
            call = offloading(there[0]._gradient_checkpointing_func, compiles)
        # One function for all layers: each begins to fetch the input that the next one needs.
        for module in there:
            module._gradient_checkpointing_func = call
    # All layers are turned on by now, so the others are turned off again.
    if which.startswith("every:"):
        layers = [
            module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)
        ]
        if not layers:
            raise ValueError(
                f"--activation_checkpointing {which}: {type(model).__name__} has all layers or "
                "none."
            )
        # Counted from the first layer, which is recomputed for any N.
        for number, layer in enumerate(layers):
            layer.gradient_checkpointing = number % int(which.removeprefix("every:")) == 0


def is_product(operation: Any) -> bool:
    """Whether an operation is a matrix product or attention."""
    # Packed attention on a GPU, and products of experts where torch has none for them.
    return operation in KEPT or operation.namespace in ("torch_attn", "transformers")


def _keep(context: Any, operation: Any, *args: Any, **more: Any) -> CheckpointPolicy:
    if is_product(operation):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def compile_layers(model: nn.Module, recomputed: str = "none") -> None:
    """Compile each layer in place, so that names stay as they are. Equal layers share one
    compilation.

    recomputed: as `which` of `checkpoint_activations`, which has compiled what it offloads the
    inputs of, unseen by the compiler.

    Each shape is compiled by itself: what torch would make of several depends on which came first,
    and a resumed run, which doesn't begin with an evaluation, would train other kernels than the
    run that it goes on with.
    """
    layers = repeated_layers(model)
    with compiling(len(layers)):
        for layer in layers.values() if recomputed != "offload" else ():
            layer.compile(dynamic=False)


@contextmanager
def compiling(layers: int = 1) -> Iterator[None]:
    """Around each torch.compile of something that the model has so often."""
    config = torch._dynamo.config
    # Beyond these limits torch would run a layer uncompiled. Some families have a number in each
    # layer that differs, such as DiffLlama, so that none shares the graphs of another.
    limit = max(config.recompile_limit, MAX_SHAPES * layers)
    config.recompile_limit = limit
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, limit)
    # Never put back: a layer is compiled later, when it is first called with a shape.
    meta_utils.safe_grad = _gradient_like
    with warnings.catch_warnings():
        # The compiler imports deprecated parts of torch.
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def _gradient_like(tensor: Any) -> Any:
    """The gradient that the compiler copies with a tensor, None where the two aren't alike.

    FSDP1 keeps the gradients of earlier micro-batches split beside a unit that is whole, and
    torch's own function ends in a RuntimeError there (pytorch issue 111317): whenever a later
    micro-batch is the first of its kind, as with another mask.
    """
    gradient = _gradient(tensor)
    alike = gradient is not None and (gradient.shape, gradient.dtype) == (
        tensor.shape,
        tensor.dtype,
    )
    return gradient if alike else None


def compile_loss(model: LanguageModel) -> None:
    """Of a chunk: one pass over its logits and one over their gradients. Without it both are copied
    to float32."""
    with compiling():
        # Two functions: training may have a loss of --code, evaluations the cross-entropy.
        model.token_loss = torch.compile(model.token_loss, dynamic=False)
        model.cross_entropy = torch.compile(model.cross_entropy, dynamic=False)


def no_compiler(kind: str) -> Optional[str]:
    """Why layers can't be compiled for devices of `kind` "cpu" or "cuda" on this machine; None
    where they can."""
    # Kernels for GPUs are written in Triton, those for CPUs in C++.
    if kind == "cuda":
        return None if has_triton() else "Triton isn't installed, or this GPU is too old for it"
    return (
        None
        if any(map(shutil.which, ("c++", "g++", "clang++")))
        else "this machine has no C++ compiler (g++)"
    )


def is_worth_compiling(model: nn.Module) -> bool:
    """Whether the layers are large enough that compiling them pays."""
    sizes = [
        sum(parameter.numel() for parameter in layer.parameters())
        for layer in repeated_layers(model).values()
    ]
    return max(sizes, default=0) >= WORTH_COMPILING
