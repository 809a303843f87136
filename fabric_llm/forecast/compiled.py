"""What a compiled layer takes, without compiling it: estimated from the same layer, run eagerly.

A compiler fuses what lies between matrix products, such as the float32 copies of a norm, and
computes it again in the backward pass. So of what an eager layer keeps, a compiled one keeps what
matrix products and attention have read or made, and the sums of the residual stream, which norms
take. Its backward pass works with the gradients of what is kept, of which about a half is there at
once. A layer that is checkpointed as a whole keeps its input, and has all of that in its backward
pass.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fabric_llm.forecast.trace import LAYERS, MEASURED, Ledger, hidden_states
from fabric_llm.model.layers import is_product
from fabric_llm.model.sharded import local_part


class Keeps(NamedTuple):
    """What a compiled layer keeps for its backward pass."""

    bytes: int  # without its input
    its_input: bool
    backward_bytes: int  # that the backward pass takes beside the gradients of the parameters
    shape: torch.Size  # of the hidden states that it returns
    dtype: torch.dtype
    others: Any  # None for each value beside the hidden states; None where it returns these alone


class CompiledLayers:
    """Called in the place of each layer."""

    def __init__(self, ledger: Ledger, offloads: bool) -> None:
        """offloads: the inputs of layers wait in the host's memory."""
        self.ledger, self.offloads = ledger, offloads
        self.keeps: dict[Any, Keeps] = {}  # of each kind of layer

    def __call__(
        self,
        kind: Any,
        layer: nn.Module,
        forward: Callable[[], Any],
        hidden: Tensor,
        parameters: Sequence[Tensor],
    ) -> Any:
        """What the layer returns. forward: the layer, with what it is given."""
        # Layers of a kind keep the same, so the first one of them is measured.
        if kind not in self.keeps:
            self.keeps[kind] = self._measured(layer, forward, hidden)
        keeps = self.keeps[kind]
        output = _CompiledLayer.apply(keeps, hidden, *parameters)
        return output if keeps.others is None else type(keeps.others)([output, *keeps.others])

    def _measured(self, layer: nn.Module, forward: Callable[[], Any], hidden: Tensor) -> Keeps:
        ledger = self.ledger
        is_checkpointed = getattr(layer, "gradient_checkpointing", False)
        # Only selective checkpointing gives torch's checkpoint a `context_fn`.
        context = getattr(layer, "_gradient_checkpointing_func", None)
        is_selective = is_checkpointed and "context_fn" in getattr(context, "keywords", {})

        # Run the layer once as if it weren't compiled, and without a checkpoint around all of it:
        # what that would free is there again in the backward pass.
        peaks, ledger.label = ledger.peaks.copy(), MEASURED
        layer.gradient_checkpointing = is_selective
        with Products(None if is_selective else hidden.shape) as products:
            output = forward()
        layer.gradient_checkpointing = is_checkpointed

        # What is alive now is what autograd has saved, and the output, the next layer's input.
        tensor = hidden_states(output)
        of_output = tensor.untyped_storage()._cdata
        kept = 0
        for key, (size, label) in list(ledger.alive.items()):
            is_kept = is_selective or key in products.storages
            if label == MEASURED and is_kept and key != of_output:
                kept += size
        others = None
        if isinstance(output, (tuple, list)):
            others = type(output)([None] * (len(output) - 1))
        shape, dtype = tensor.shape, tensor.dtype

        # Nothing of the eager layer is there in a run.
        del output, tensor, products
        ledger.peaks, ledger.label = peaks, LAYERS
        works_with = kept // 2
        if is_checkpointed and not is_selective:
            kept, works_with = 0, kept + works_with
        return Keeps(kept, not self.offloads, works_with, shape, dtype, others)


class Products(TorchDispatchMode):
    """Storages that matrix products and attention have read or made, and sums of them in the shape
    of the residual stream."""

    def __init__(self, stream: Optional[torch.Size]) -> None:
        """stream: the shape of the residual stream, None where no sums are wanted."""
        super().__init__()
        self.stream = stream
        self.storages: set[int] = set()
        self.sums: list[Tensor] = []  # kept alive, since the norm that takes them is fused

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = operation(*args, **(kwargs or {}))
        is_sum = operation is torch.ops.aten.add.Tensor and result.shape == self.stream
        if not is_product(operation) and not is_sum:
            return result
        storages = {}
        for tensor in tree_leaves((args, result)):
            if isinstance(tensor, Tensor):
                storage = local_part(tensor).untyped_storage()
                storages[storage._cdata] = storage
        # A sum of the residual stream takes what a product has read or made. Others are fused.
        if is_sum and not storages.keys() & self.storages:
            return result
        if is_sum:
            self.sums.append(result)
        for key in storages.keys() - self.storages:
            self.storages.add(key)
            # The address may belong to another storage afterwards.
            weakref.finalize(storages[key], self.storages.discard, key)
        return result


class _CompiledLayer(torch.autograd.Function):
    """Tensors of the sizes that a compiled layer keeps, works with and returns."""

    @staticmethod
    def forward(ctx: Any, keeps: Keeps, hidden: Tensor, *parameters: Tensor) -> Tensor:
        # Allocated for the ledger to count, until the backward pass lets it go.
        ctx.kept = torch.empty(keeps.bytes, dtype=torch.uint8), hidden if keeps.its_input else None
        ctx.works_with_bytes = keeps.backward_bytes
        ctx.needs = []
        for one in (hidden, *parameters):
            ctx.needs.append((one.shape, one.dtype) if one.requires_grad else None)
        return torch.empty(keeps.shape, dtype=keeps.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Optional[Tensor], ...]:
        def zeros(needed: Any) -> Optional[Tensor]:
            return None if needed is None else torch.zeros(needed[0], dtype=needed[1])

        of_hidden, *of_parameters = ctx.needs
        made = [zeros(needed) for needed in of_parameters]
        # Freed at once, but the ledger has seen it at the peak.
        torch.zeros(ctx.works_with_bytes, dtype=torch.uint8)
        ctx.kept = None
        return None, zeros(of_hidden), *made
