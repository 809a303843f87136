"""The reference: the model as transformers has it, on the CPU of one process, in no more memory
than it is given.

A model that is larger than that has the weights of one layer at a time: they are read when its
forward begins, and again when its backward pass does, which recomputes it. What is outside of the
layers stays.
"""

from functools import partial
from typing import Any, Callable

import torch
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from fabric_llm.model.weights import (
    Source,
    compute_buffers,
    first_names,
    repeated_layers,
    replacing,
    units,
)


def load_reference(
    model: PreTrainedModel, source: Source, limit_bytes: float = float("inf")
) -> PreTrainedModel:
    """`model`, which is on the meta device, with the weights of `source`. One process calls it.

    limit_bytes: of weights that may be in memory at once; layers of a larger model are read one by
    one.
    """
    # Buffers come first: computing them would write into parameters that aren't on the meta device.
    compute_buffers(model)
    # Parameters on the meta device don't take tensors of a CPU as their `data`, see `_give`. These
    # do, and have no memory of their own.
    model.apply(replacing(_nothing))
    names = units(model)
    # Taken after the replacement, so that `_give` fills the parameters that the model has now.
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    whole = sum(parameter.nbytes for parameter in model.parameters())
    streamed = _layers_by_themselves(model) if whole > limit_bytes else set()
    # What isn't streamed is read once and stays.
    for unit in names.keys() - streamed:
        _give(tensors, source.read(unit))
    held: list[str] = []  # the layer that has its weights

    def holding(unit: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Give a layer its weights, and take those of the layer that had them before."""
        if held != [unit]:
            # Freed before the next is read, so that two layers are never in memory at once.
            for before in held:
                _give(tensors, {name: _nothing(tensors[name]) for name in names[before]})
            held[:] = [unit]
            _give(tensors, source.read(unit))
        return forward(*args, **kwargs)

    for unit in streamed:
        layer = model.get_submodule(unit)
        # The checkpoint is outermost, so that recomputing the layer reads its weights again.
        call = partial(holding, unit, layer.forward)
        layer.forward = partial(checkpoint, call, use_reentrant=False)
    return model


def _layers_by_themselves(model: PreTrainedModel) -> set[str]:
    """The layers whose weights no other module has."""
    layers = repeated_layers(model)

    def holder_of(name: str) -> str:
        """The layer that holds a parameter, "" for one outside of layers."""
        return next((layer for layer in layers if name.startswith(f"{layer}.")), "")

    # A weight that two modules share has to stay: one of them would lose it while it computes.
    sharing: set[str] = set()
    for name, first in first_names(model).items():
        if name != first and holder_of(name) != holder_of(first):
            sharing |= {holder_of(name), holder_of(first)}
    return layers.keys() - sharing


def _nothing(like: torch.Tensor) -> torch.Tensor:
    """Of the shape of `like`, in the memory of one element."""
    return torch.empty((), dtype=like.dtype).expand(like.shape)


def _give(tensors: dict[str, torch.Tensor], values: dict[str, torch.Tensor]) -> None:
    for name, value in values.items():
        # Through `data`, so that all modules that share the parameter have the values.
        tensors[name].data = value
