"""--tiled_mlp: MLPs and norms of layers take a row's tokens a part at a time, so that their memory
doesn't grow with the row.

What a tile needs for its backward pass is computed again there. Bekman et al. (2025), Arctic Long
Sequence Training, https://arxiv.org/abs/2506.13996, section 3.2. Which modules take each token by
itself is measured, see `found_in`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Optional

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from fabric_llm.model.weights import repeated_layers

PROBE_TOKENS = 16
# How much the outputs of two tiles may differ from those of one, as a fraction of their norm. The
# products are rounded in another order.
LIMIT = 1e-3


@torch.no_grad()
def found_in(model: PreTrainedModel, measures: bool = True) -> dict[str, bool]:
    """{name: whether tiles give the same as the whole} of modules directly inside of layers that
    take one tensor of hidden states and return one, unlike attention.

    It is false for a module that mixes tokens, or that has dropout.

    model: its weights are on the CPU, and each is given the same tokens at once and in two tiles.
    measures: False where the weights are fake, so that outputs say nothing. Then it is true for
    each module that takes one tensor and returns one.
    """
    # Modules directly inside of a layer, so that what is tiled is as large as it can be.
    names, tiled = {}, {}
    for of_layer, layer in repeated_layers(model).items():
        for name, child in layer.named_children():
            if next(child.parameters(), None) is not None:
                names[child] = f"{of_layer}.{name}"

    def see(module: nn.Module, inputs: tuple[Any, ...], more: dict[str, Any], output: Any) -> None:
        # Attention takes more arguments, such as positions, or returns several values.
        if (
            len(inputs) == 1
            and not more
            and isinstance(output, Tensor)
            and output.shape == inputs[0].shape
        ):
            # Its weights are there now: a large reference has those of one layer at a time.
            tiled[names[module]] = not measures or _is_alike(module.forward, inputs[0], output)

    handles = [module.register_forward_hook(see, with_kwargs=True) for module in names]
    # In training, so that dropout shows: two runs of a module that drops don't agree.
    was_training, vocabulary = model.training, model.config.get_text_config().vocab_size
    model.train()
    try:
        model(input_ids=torch.arange(PROBE_TOKENS, device=model.device)[None] % vocabulary)
        return tiled
    finally:
        for handle in handles:
            handle.remove()
        model.train(was_training)


def _is_alike(forward: Callable[[Tensor], Tensor], inputs: Tensor, output: Tensor) -> bool:
    tiles = torch.cat([forward(part) for part in inputs.split(PROBE_TOKENS // 2, dim=1)], dim=1)
    return bool((tiles - output).float().norm() <= LIMIT * output.float().norm())


def tile(model: PreTrainedModel, names: list[str]) -> None:
    """Make the modules `names` take their tokens in tiles. A tile has at most as many tokens as a
    hidden state has elements, and at most half of all tokens, so that a probe has tiles as well."""
    tokens = model.config.get_text_config().hidden_size
    for name in names:
        module = model.get_submodule(name)
        places = []
        for inside in module.modules():
            for key, parameter in inside._parameters.items():
                if parameter is not None:
                    places.append((inside, key))
        # An attribute of the module, so that its class and the names of its parameters stay.
        module.forward = partial(_in_tiles, module.forward, tokens, places)


# Parameters by module and name, since FSDP puts other tensors there while a layer computes.
Places = list[tuple[nn.Module, str]]


def _in_tiles(
    forward: Callable[[Tensor], Tensor], tokens: int, places: Places, hidden: Tensor
) -> Tensor:
    if not torch.is_grad_enabled():
        return _joined(forward, hidden, tokens)
    # Parameters are arguments, because autograd gives gradients to nothing else.
    return _Tiled.apply(forward, tokens, places, hidden, *_tensors(places))


def _tensors(places: Places) -> list[Tensor]:
    tensors = [getattr(module, key) for module, key in places]
    return [tensor for tensor in tensors if tensor.requires_grad]


def _split(hidden: Tensor, tokens: int) -> tuple[Tensor, ...]:
    """[rows, context, hidden size] -> tiles [1, tokens, hidden size] of all rows, one behind the
    other."""
    # At least two tiles, so that a short probe takes the same way as a long row.
    flat = hidden.reshape(1, -1, hidden.shape[-1])
    return flat.split(min(tokens, -(-flat.shape[1] // 2)), dim=1)


def _joined(forward: Callable[[Tensor], Tensor], hidden: Tensor, tokens: int) -> Tensor:
    out, begin = None, 0
    for tile in _split(hidden, tokens):
        # Written to its place at once: torch.cat would hold all tiles twice.
        # A tile is one row, and its graph is dropped before the next one is made.
        [part] = forward(tile).detach()
        out = part.new_empty(hidden.shape) if out is None else out
        out.view(-1, hidden.shape[-1])[begin : begin + len(part)] = part
        begin += len(part)
    return out


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, forward: Any, tokens: int, places: Places, hidden: Tensor, *tensors: Tensor
    ) -> Tensor:
        ctx.save_for_backward(hidden)
        # The backward pass runs the module again, outside of the forward pass's autocast.
        kind = hidden.device.type
        ctx.autocast = {"device_type": kind, "dtype": torch.get_autocast_dtype(kind)}
        ctx.autocast["enabled"] = torch.is_autocast_enabled(kind)
        ctx.of, ctx.dtypes = (forward, tokens, places), [tensor.dtype for tensor in tensors]
        # With gradients, which are thrown away: without, products in 8 bits are computed otherwise.
        with torch.enable_grad():
            return _joined(forward, hidden.detach().requires_grad_(), tokens)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Optional[Tensor], ...]:
        (forward, tokens, places), (hidden,) = ctx.of, ctx.saved_tensors
        # Looked up again: with FSDP these are other tensors now than in the forward pass.
        wanted, of_hidden = _tensors(places), []
        sums: list[Optional[Tensor]] = [None] * len(wanted)
        for tile, of_tile in zip(_split(hidden, tokens), _split(gradient, tokens)):
            with torch.enable_grad(), torch.autocast(**ctx.autocast):
                tile = tile.detach().requires_grad_()
                out = forward(tile)
            # autograd.grad, not backward: the gradients of parameters belong to the caller, who
            # adds them up.
            of_input, *gradients = torch.autograd.grad(
                out, [tile, *wanted], of_tile, allow_unused=True
            )
            of_hidden.append(of_input)
            # In float32, whatever the weights: bfloat16 would round at each tile.
            for place, of_parameter in enumerate(gradients):
                # None for a parameter that a tile doesn't use, such as an expert without tokens.
                if of_parameter is None:
                    continue
                total = sums[place]
                if total is None:
                    sums[place] = of_parameter.float()
                else:
                    total.add_(of_parameter)
        of_tensors = [
            None if total is None else total.to(dtype) for total, dtype in zip(sums, ctx.dtypes)
        ]
        return None, None, None, torch.cat(of_hidden, dim=1).view_as(hidden), *of_tensors
