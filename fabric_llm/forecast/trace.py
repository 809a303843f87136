"""A training step of one rank without memory: which bytes its tensors would take, and when.

The model is wrapped, run and differentiated by the functions that a run calls, on fake tensors,
which have shapes and no data, and over a process group that sends nothing. So what a strategy
gathers, copies and frees isn't described here a second time: `Ledger` counts each storage when it
is made, when FSDP resizes it, and when it is gone.

A model has many equal layers, or equal groups of layers, of which a step traces four, and then one
group more. Each group adds the same bytes to each moment, so the second step says what all of them
add, and the peak isn't among those that were left out.
"""

from __future__ import annotations

import re
import weakref
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple, Optional
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fabric_llm.model.sharded import local_part
from fabric_llm.model.weights import repeated_layers

# What a storage is of.
PARAMETERS, GRADIENTS, ACTIVATIONS = "parameters", "gradients", "activations"
HEAD, BACKWARD, GATHERED = "loss head", "backward pass", "gathered units and messages"
OPTIMIZER, AVERAGE, BATCH = "optimizer state", "moving average", "batch"
SUMS = "float32 sums of gradients"
LAYERS, MEASURED = "activations of layers", "a layer that is measured"
# How many layers of a kind stay: two at each end, since the outermost have no neighbour that is
# gathered ahead.
ENDS = 4
# Names of attributes for a layer's number, by which layers of one kind differ.
NUMBERS = re.compile("idx|index|layer_(id|num)|block_id")


class Ledger(TorchDispatchMode):
    """Bytes of all storages that are alive, by what they are, and their composition at the peak of
    each moment."""

    def __init__(self, copies_messages: bool, elsewhere: Collection[str]) -> None:
        """copies_messages: gloo copies what it reduces and scatters, NCCL doesn't. elsewhere:
        labels of what is in the memory of the host."""
        super().__init__()
        self.copies_messages, self.elsewhere = copies_messages, elsewhere
        # Label in `elsewhere` -> the most bytes that it had at any time.
        self.most: Counter[str] = Counter()
        self.label = PARAMETERS  # of storages that are made now
        self.moment = "start"
        self.alive: dict[int, tuple[int, str]] = {}  # storage -> bytes, label
        self.held: Counter[str] = Counter()
        self.operations = 0
        self.peaks: dict[str, tuple[int, Counter[str]]] = {}  # moment -> the most in it, by label

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        is_message = operation.namespace == "c10d" and "reduce_scatter" in str(operation)
        if is_message and self.copies_messages:
            # The copy is there while the message is sent, which is over at once here.
            sent = max(one.nbytes for one in tree_leaves(args) if isinstance(one, Tensor))
            self.put(-1, sent, GATHERED)
            self.put(-1, 0)
        result = operation(*args, **(kwargs or {}))
        # A layer that is measured runs once more than in a step, so it isn't counted.
        self.operations += operation.namespace == "aten" and self.label != MEASURED
        is_empty = operation.overloadpacket in (torch.ops.aten.empty, torch.ops.aten.empty_like)
        # Views share a storage, which is counted once.
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self.see(local_part(tensor).untyped_storage(), is_empty)
        return result

    def see(self, storage: Any, is_empty: bool = False) -> None:
        """Count a storage that is new. is_empty: it was made without values, which outside of
        layers is what messages are received in."""
        key = storage._cdata
        if key in self.alive:
            return
        label = self.label
        if is_empty and label in (ACTIVATIONS, BACKWARD):
            label = GATHERED
        self.put(key, storage.nbytes(), label)
        # Called when the last tensor of the storage is gone.
        weakref.finalize(storage, self.put, key, 0)

    def put(self, key: int, size: int, label: Any = None) -> None:
        """A storage has `size` bytes from now on."""
        before, was = self.alive.pop(key, (0, label))
        label = label or was
        self.held[was] -= before
        self.held[label] += size
        if size:
            self.alive[key] = size, label
        if label in self.elsewhere:
            self.most[label] = max(self.most[label], self.held[label])
        # The total is that of the device.
        total = sum(size for label, size in self.held.items() if label not in self.elsewhere)
        if self.moment not in self.peaks or total > self.peaks[self.moment][0]:
            self.peaks[self.moment] = total, self.held.copy()

    def resizes(self) -> AbstractContextManager[Any]:
        """In the body, count what FSDP does to storages: it gives them memory before a unit
        computes, and takes it afterwards."""
        resize = torch.UntypedStorage.resize_

        def counted(storage: Any, size: int) -> Any:
            result = resize(storage, size)
            # A storage whose memory was taken isn't in `alive` any more, and is counted anew.
            self.see(storage)
            self.put(storage._cdata, storage.nbytes(), GATHERED)
            return result

        return patch.object(torch.UntypedStorage, "resize_", counted)


class Cut(NamedTuple):
    """Equal groups of consecutive layers, which a step can be traced without."""

    first: int  # number of the first layer that is left out
    period: int  # layers of a group
    times: int  # groups

    def numbers(self) -> range:
        """The layers that are left out."""
        return range(self.first, self.first + self.period * self.times)


def longest_cut(kinds: Sequence[Any]) -> Optional[Cut]:
    """The cut that leaves out most layers, given the kinds of all layers in their order. None where
    two steps with the layers that stay would have at least as many layers as one whole step."""
    best = None
    # A shorter period is found first, and wins where both leave out equally many layers.
    for period in range(1, len(kinds) // 3 + 1):
        at_each_end = max(1, ENDS // 2 // period)  # groups that stay
        start = 0
        for number in range(len(kinds)):
            is_over = number + period == len(kinds)
            if not is_over and kinds[number] == kinds[number + period]:
                continue
            # From `start` to here each layer is of the kind of the one a period before it.
            times = (number + period - start) // period - 2 * at_each_end
            if times > 0 and (best is None or times * period > best.times * best.period):
                best = Cut(start + at_each_end * period, period, times)
            if is_over:
                break
            start = number + 1
    if best is None:
        return None
    stay = len(kinds) - best.period * best.times
    # Two steps are traced: one with the layers that stay, one with a group more.
    return best if 2 * stay + best.period < len(kinds) else None


def remove_layers(model: nn.Module, numbers: Collection[int]) -> None:
    """Remove repeated layers of these numbers from the list that they are in."""
    names = list(repeated_layers(model))
    # From the last on, so that the numbers of those before stay right.
    for number in sorted(numbers, reverse=True):
        place, _, index = names[number].rpartition(".")
        del model.get_submodule(place)[int(index)]


def kind(layer: nn.Module) -> Any:
    """What layers have in common that take the same memory: classes, parameters and settings."""
    facts: list[Any] = []
    for name, module in layer.named_modules():
        facts.append((name, type(module)))
        for key, p in module.named_parameters(recurse=False):
            facts.append((key, p.shape, p.dtype, p.requires_grad))
        for key, value in vars(module).items():
            if isinstance(value, (int, float, str)) and not NUMBERS.search(key):
                facts.append((key, value))
    return tuple(facts)


class Layers:
    """The layers of a model, which set the ledger's label and moment when they run."""

    def __init__(
        self,
        model: nn.Module,
        ledger: Ledger,
        without: Collection[int],
        compiled: Optional[Any],
    ) -> None:
        """To be made before the model is wrapped. without: numbers of layers that were removed.
        compiled: a compiled.CompiledLayers, which imitates compiled layers; None for layers that
        run as they are."""
        self.ledger, self.layers = ledger, [*repeated_layers(model).values()]
        # Moments have the numbers of the whole model, so that steps without these and those can be
        # compared.
        every = range(len(self.layers) + len(without))
        self.numbers = [number for number in every if number not in without]
        self.kinds = [kind(layer) for layer in self.layers]
        self.compiled = compiled
        self.is_forward = True
        self.wrapped = model
        for index, layer in enumerate(self.layers):
            # FSDP puts other tensors in the place of parameters while the layer computes.
            places = []
            for module in layer.modules():
                places += [(module, name) for name, _ in module.named_parameters(recurse=False)]
            layer.forward = partial(self._forward, index, places)

    def _forward(self, index: int, places: Any, *args: Any, **more: Any) -> Any:
        ledger, layer, number = self.ledger, self.layers[index], self.numbers[index]
        # FSDP2 has given the layer another class since then, whose `forward` is the one to call.
        forward = partial(type(layer).forward, layer, *args, **more)
        if not self.is_forward:  # computed again for the backward pass
            return forward()
        ledger.label, ledger.moment = LAYERS, f"the forward pass of layer {number + 1}"
        if self.compiled is None:
            output = forward()
        else:
            hidden = next(one for one in (*args, *more.values()) if isinstance(one, Tensor))
            parameters = [getattr(module, name) for module, name in places]
            output = self.compiled(self.kinds[index], layer, forward, hidden, parameters)
        tensor = hidden_states(output)
        # With frozen layers below there is no backward pass to follow.
        if tensor.requires_grad:
            tensor.register_hook(partial(self._backward, number))
        # What comes after the last layer belongs to the loss.
        if layer is self.layers[-1]:
            ledger.label, ledger.moment = HEAD, "the loss head"
        return output

    def _backward(self, number: int, gradient: Tensor) -> None:
        """Called with the gradient of what a layer has returned: its backward pass begins."""
        self.is_forward = False
        self.ledger.label, self.ledger.moment = BACKWARD, f"the backward pass of layer {number + 1}"
        self.mark_gradients()

    def mark_gradients(self) -> None:
        """Label storages as gradients, which were something else when they were made."""
        for parameter in self.wrapped.parameters():
            # While a unit of FSDP1 computes, its parameters are views, which have no gradients of
            # their own.
            if not parameter.is_leaf or parameter.grad is None:
                continue
            key = local_part(parameter.grad).untyped_storage()._cdata
            if key in self.ledger.alive:
                self.ledger.put(key, self.ledger.alive[key][0], GRADIENTS)


def hidden_states(output: Any) -> Tensor:
    """Of what a layer returns, which are several values in some models."""
    return output[0] if isinstance(output, (tuple, list)) else output
