"""The reference: the model as transformers has it, on the CPU of one process, in no more memory than it is given.

A model that is larger than that has a layer's weights only while the layer computes: they are read when its forward begins,
and again when its backward pass does, which recomputes it. What is outside of the layers stays.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Callable

import torch
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from fabric_llm.model.strategy import repeated_layers, replacing
from fabric_llm.model.weights import Source, compute_buffers, first_names, units

WRITE_INTO_WEIGHTS = ("rwkv",)  # types of models whose layers do, before they compute


def load_reference(model: PreTrainedModel, source: Source, limit_bytes: float = float("inf")) -> PreTrainedModel:
    """`model`, which is on the meta device, with the weights of `source`. One process calls it.

    limit_bytes: of weights that may be in memory at once, or a layer more, beside those outside of layers.
    """
    compute_buffers(model)
    model.apply(replacing(_nothing))
    names = units(model)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    whole = sum(parameter.nbytes for parameter in model.parameters())
    streamed = _layers_by_themselves(model) if whole > limit_bytes else set()
    if whole > limit_bytes and not streamed:
        print(
            f"The layers of {type(model).__name__} can't be computed one by one: the reference takes {whole / 2**30:.1f} GiB of "
            "rank 0's memory, for all weights at once."
        )
    for unit in names.keys() - streamed:
        _give(tensors, source.read(unit))
    layers = _Layers(source, tensors, names, limit_bytes)
    for unit in streamed:
        layer = model.get_submodule(unit)
        layer.forward = partial(_compute, partial(layers.hold, unit), layer.forward)
    return model


class _Layers:
    """The layers that have their weights now, the one that was used last at the end."""

    def __init__(
        self, source: Source, tensors: dict[str, torch.Tensor], names: dict[str, list[str]], limit_bytes: float
    ) -> None:
        self.source, self.tensors, self.names, self.limit_bytes = source, tensors, names, limit_bytes
        self.held: dict[str, int] = {}  # layer -> bytes

    def hold(self, unit: str) -> None:
        """Give a layer its weights. The layers that were used longest ago lose theirs, if there are too many."""
        if unit not in self.held:
            size = sum(self.tensors[name].nbytes for name in self.names[unit])
            while self.held and sum(self.held.values()) + size > self.limit_bytes:
                oldest = next(iter(self.held))
                del self.held[oldest]
                _give(self.tensors, {name: _nothing(self.tensors[name]) for name in self.names[oldest]})
            _give(self.tensors, self.source.read(unit))
            self.held[unit] = size
        self.held[unit] = self.held.pop(unit)


def _compute(hold: Callable[[], None], forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The forward of a layer that gets its weights first, and is computed again for its backward pass."""

    def computed(*args: Any, **kwargs: Any) -> Any:
        hold()
        return forward(*args, **kwargs)

    if not torch.is_grad_enabled():
        return computed(*args, **kwargs)
    return checkpoint(computed, *args, use_reentrant=False, **kwargs)


def _layers_by_themselves(model: PreTrainedModel) -> set[str]:
    """The layers whose weights no other module has, and that don't write into them."""
    if model.config.model_type in WRITE_INTO_WEIGHTS:
        return set()
    layers = repeated_layers(model)
    holders = {
        name: next((layer for layer in layers if name.startswith(f"{layer}.")), "") for name in first_names(model)
    }
    tied = [(holders[name], holders[first]) for name, first in first_names(model).items()]
    return layers.keys() - {layer for pair in tied if pair[0] != pair[1] for layer in pair}


def _nothing(like: torch.Tensor) -> torch.Tensor:
    """Of the shape of `like`, in the memory of one element."""
    return torch.empty((), dtype=like.dtype).expand(like.shape)


def _give(tensors: dict[str, torch.Tensor], values: dict[str, torch.Tensor]) -> None:
    for name, value in values.items():
        tensors[name].data = value
