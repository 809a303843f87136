"""A training step of one rank without memory: which bytes its tensors would take, and when.

The model is wrapped, run and differentiated by the functions that a run calls, on fake tensors, which have shapes and no data, and
over a process group that sends nothing. So what a strategy gathers, copies and frees isn't described here a second time: `Ledger`
counts each storage when it is made, when FSDP resizes it, and when it is gone.

A model has many equal layers. Of each kind the first two and the last two compute; those between them hold what the first one kept
for its backward pass, and pass on gradients of their parameters (`_StandIn`). From one of these to the next the sum of what is held
changes by the same number of bytes each time, so that the peak isn't among them. It may be at the second layer: in the backward
pass of the first one nothing is left to be gathered ahead.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Callable, Optional
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fabric_llm.model.layers import KEPT
from fabric_llm.model.strategy import local_part, repeated_layers

# What a storage is of; of a layer's activations: (ACTIVATIONS, number of the layer).
PARAMETERS, GRADIENTS, ACTIVATIONS = "parameters", "gradients", "activations"
HEAD, BACKWARD, GATHERED = "loss head", "backward pass", "gathered units and messages"
OPTIMIZER, AVERAGE, BATCH, SUMS = "optimizer state", "moving average", "batch", "float32 sums of gradients"


class Ledger(TorchDispatchMode):
    """Bytes of all storages that are alive, by what they are, and their composition at the peak."""

    def __init__(self, copies_messages: bool = False, elsewhere: Collection[str] = ()) -> None:
        """copies_messages: as gloo does with what it reduces and scatters, and NCCL doesn't. elsewhere: labels of what the host has."""
        super().__init__()
        self.copies_messages, self.elsewhere = copies_messages, elsewhere
        self.most: Counter[Any] = Counter()  # that was held of each of these labels
        self.label: Any = PARAMETERS  # of storages that are made now; of a layer's: (ACTIVATIONS, number of the layer)
        self.moment = "start"
        self.alive: dict[int, tuple[int, Any]] = {}  # storage -> bytes, label
        self.held: Counter[Any] = Counter()
        self.total = self.peak = 0
        self.at_peak: Counter[Any] = Counter()
        self.multiplied: set[int] = set()  # storages that matrix products and attention have read or made
        self.stream: Optional[torch.Size] = None  # the shape of the residual stream, while a compiled layer is looked at
        self.sums: list[Tensor] = []  # what has been added to it
        self.peak_moment = self.moment

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.copies_messages and operation.namespace == "c10d" and "reduce_scatter" in str(operation):
            sent = max(one.nbytes for one in tree_leaves(args) if isinstance(one, Tensor))
            self.put(-1, sent, GATHERED)
            self.put(-1, 0)
        result = operation(*args, **(kwargs or {}))
        made = operation.overloadpacket in (torch.ops.aten.empty, torch.ops.aten.empty_like)
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self.see(local_part(tensor).untyped_storage(), made)
        tensors = [one for one in tree_leaves((args, result)) if isinstance(one, Tensor)]
        storages = {local_part(tensor).untyped_storage()._cdata for tensor in tensors}
        is_sum = operation is torch.ops.aten.add.Tensor and result.shape == self.stream
        if is_sum and storages & self.multiplied:
            self.sums.append(result)
        if operation in KEPT or is_sum and storages & self.multiplied:
            self.multiplied |= storages
        return result

    def see(self, storage: Any, is_empty: bool = False) -> None:
        """Count a storage that is new. is_empty: made without a value, outside of layers that is to be sent or received."""
        key = storage._cdata
        if key not in self.alive:
            self.multiplied.discard(key)  # of a storage that is gone, whose address is this one's now
            outside = self.label in (ACTIVATIONS, BACKWARD)
            self.put(key, storage.nbytes(), GATHERED if is_empty and outside else self.label)
            weakref.finalize(storage, self.put, key, 0)

    def put(self, key: int, size: int, label: Any = None) -> None:
        """A storage has `size` bytes from now on."""
        before, was = self.alive.pop(key, (0, label))
        label = label or was
        self.held[was] -= before
        self.held[label] += size
        self.total += size * (label not in self.elsewhere) - before * (was not in self.elsewhere)
        if size:
            self.alive[key] = size, label
        if label in self.elsewhere:
            self.most[label] = max(self.most[label], self.held[label])
        if self.total > self.peak:
            self.peak, self.at_peak, self.peak_moment = self.total, self.held.copy(), self.moment

    def resizes(self) -> AbstractContextManager[Any]:
        """In the body, count what FSDP does to storages: it gives them memory before a unit computes, and takes it afterwards."""
        resize = torch.UntypedStorage.resize_

        def counted(storage: Any, size: int) -> Any:
            result = resize(storage, size)
            self.see(storage)
            self.put(storage._cdata, storage.nbytes(), GATHERED)
            return result

        return patch.object(torch.UntypedStorage, "resize_", counted)


class _StandIn(torch.autograd.Function):
    """A layer without its computation: what it keeps for its backward pass, what that works with, the gradients that it makes."""

    @staticmethod
    def forward(ctx: Any, keeps: Keeps, hidden: Tensor, *parameters: Tensor) -> Tensor:
        ctx.kept = torch.empty(keeps.bytes, dtype=torch.uint8), hidden if keeps.its_input else None
        ctx.works_with_bytes = keeps.backward_bytes
        ctx.parameters = [(p.shape, p.dtype) if p.requires_grad else None for p in parameters]
        return torch.empty_like(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Optional[Tensor], ...]:
        made = [None if one is None else torch.zeros(one[0], dtype=one[1]) for one in ctx.parameters]
        torch.zeros(ctx.works_with_bytes, dtype=torch.uint8)
        ctx.kept = None
        return None, torch.zeros_like(gradient), *made


@dataclass
class Keeps:
    """What a layer of a kind keeps for its backward pass."""

    bytes: int = 0  # without its input, and without its output where that isn't kept
    its_input: bool = False
    backward_bytes: int = 0  # that the backward pass takes beside the gradients of the parameters, where it isn't traced
    values: int = 0  # that the layer returns, 0 for one tensor


class Layers:
    """The layers of a model, of which those that are like others don't compute; labels and moments follow them."""

    def __init__(self, model: nn.Module, ledger: Ledger, compiles: bool = False, offloads: bool = False) -> None:
        """Call it before the model is wrapped. compiles: see `_of_compiled`. offloads: the inputs of layers are on no device."""
        self.ledger, self.layers, self.compiles = ledger, [*repeated_layers(model).values()], compiles
        self.offloads = offloads
        self.is_forward = True
        self.wrapped = model
        kinds: dict[Any, list[int]] = {}
        for number, layer in enumerate(self.layers):
            kinds.setdefault(_kind(model, number, layer), []).append(number)
        self.first = {number: some[0] for some in kinds.values() for number in some}
        computes = {number for some in kinds.values() for number in (*some[:2], *some[-2:])}
        self.stands_in = set(self.first) - (set() if compiles else computes)
        self.keeps: dict[int, Keeps] = {}  # by the first layer of a kind
        self.output: dict[int, Any] = {}  # of that: a reference to its storage
        for number, layer in enumerate(self.layers):
            layer.forward = partial(self._forward, number, list(_places(layer)))

    def _forward(self, number: int, places: Any, *args: Any, **more: Any) -> Any:
        ledger, layer, first = self.ledger, self.layers[number], self.first[number]
        forward = partial(type(layer).forward, layer, *args, **more)  # FSDP2 has given it another class since
        if not self.is_forward:  # computed again for the backward pass
            return forward()
        ledger.label, ledger.moment = (ACTIVATIONS, number), f"the forward pass of layer {number + 1}"
        hidden = args[0] if args else more["hidden_states"]
        if self.compiles and number == first:
            self._of_compiled(number, hidden, forward)
        if number in self.stands_in:
            keeps = self.keeps[first]
            if first in self.output:  # what the first of its kind keeps is known once its output has gone where it goes
                output = self.output.pop(first)()
                keeps.bytes = ledger.held[ACTIVATIONS, first] - (0 if output is None else output.nbytes())
            output = _StandIn.apply(keeps, hidden, *(getattr(module, name) for module, name in places))
            output = (output, *[None] * (keeps.values - 1)) if keeps.values else output
        else:
            with self._sees_input(number, hidden) as keeps:
                output = forward()
            keeps.values = len(output) if isinstance(output, tuple) else 0
        tensor = output[0] if isinstance(output, tuple) else output
        if number == first and number not in self.stands_in:
            self.keeps[number], self.output[number] = keeps, weakref.ref(tensor.untyped_storage())
        if tensor.requires_grad:
            tensor.register_hook(partial(self._backward, number))
        is_last = number == len(self.layers) - 1
        ledger.label, ledger.moment = (HEAD, "the loss head") if is_last else (ACTIVATIONS, ledger.moment)
        return output

    def _of_compiled(self, number: int, hidden: Tensor, forward: Callable[[], Any]) -> None:
        """What a compiled layer keeps: of what an eager one does, what matrix products and attention have read or made, and the sums of
        the residual stream, which norms take.

        What lies between them, such as the float32 copies of a norm, the compiler fuses, and computes again in the backward pass.
        That works with the gradients of what is kept, of which about a half is there at once. A layer that is checkpointed as a
        whole keeps its input, and has all of that in its backward pass.
        """
        ledger, layer = self.ledger, self.layers[number]
        is_checkpointed = getattr(layer, "gradient_checkpointing", False)
        context = getattr(layer, "_gradient_checkpointing_func", None)
        is_selective = is_checkpointed and "context_fn" in getattr(context, "keywords", {})
        layer.gradient_checkpointing, ledger.multiplied = is_selective, set()
        ledger.stream = None if is_selective else hidden.shape
        before = ledger.total, ledger.peak, ledger.at_peak, ledger.peak_moment
        output = forward()
        made = {key for key, (_, label) in list(ledger.alive.items()) if label == (ACTIVATIONS, number)}
        made.discard((output[0] if isinstance(output, tuple) else output).untyped_storage()._cdata)  # the next's input
        kept = sum(ledger.alive[key][0] for key in made if key in ledger.multiplied or is_selective)
        del output
        ledger.stream = None
        ledger.sums.clear()
        ledger.peak, ledger.at_peak, ledger.peak_moment = before[1:]  # nothing of it is there in a run
        layer.gradient_checkpointing = is_checkpointed
        whole = is_checkpointed and not is_selective
        self.keeps[number] = Keeps(0 if whole else kept, not self.offloads, (kept if whole else 0) + kept // 2)

    @contextmanager
    def _sees_input(self, number: int, hidden: Tensor) -> Iterator[Keeps]:
        """Find out in the body, the forward pass of a layer, whether it keeps its input for its backward pass."""
        is_checkpointed = getattr(self.layers[number], "gradient_checkpointing", False)
        keeps = Keeps(its_input=is_checkpointed and not self.offloads)
        if is_checkpointed:
            yield keeps
            return

        def pack(tensor: Tensor) -> Tensor:
            keeps.its_input |= tensor.untyped_storage()._cdata == key
            return tensor.detach()  # a tensor that keeps itself would never go

        key = hidden.untyped_storage()._cdata
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield keeps

    def _backward(self, number: int, gradient: Tensor) -> None:
        """Called with the gradient of what a layer has returned: its backward pass begins."""
        self.is_forward = False
        self.ledger.label, self.ledger.moment = BACKWARD, f"the backward pass of layer {number + 1}"
        self.mark_gradients()

    def mark_gradients(self) -> None:
        """Say which storages are gradients, which were made as something else."""
        for gradient in (p.grad for p in self.wrapped.parameters() if p.is_leaf and p.grad is not None):
            key = local_part(gradient).untyped_storage()._cdata
            if key in self.ledger.alive:
                self.ledger.put(key, self.ledger.alive[key][0], GRADIENTS)


def _kind(model: nn.Module, number: int, layer: nn.Module) -> Any:
    """What two layers have in common that take the same memory."""
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or [None] * (number + 1)
    shapes = tuple((name, p.shape, p.dtype, p.requires_grad) for name, p in layer.named_parameters())
    return type(layer), shapes, getattr(layer, "gradient_checkpointing", None), kinds[number]


def _places(layer: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Where the parameters of a layer are. FSDP puts other tensors there while the layer computes."""
    for module in layer.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield module, name
