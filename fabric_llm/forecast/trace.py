"""A training step of one rank without memory: which bytes its tensors would take, and when.

The model is wrapped, run and differentiated by the functions that a run calls, on fake tensors,
which have shapes and no data, and over a process group that sends nothing. So what a strategy
gathers, copies and frees isn't described here a second time: `Ledger` counts each storage when it
is made, when FSDP resizes it, and when it is gone.

A model has many equal layers, or equal groups of layers. `cuts` says which of them a step can do
without: each one more adds the same bytes to each moment, so that a step with one more says what
all of them add. From one layer to the next the sum of what is held changes by the same number of
bytes each time, so that the peak isn't among those that are left out.
"""

from __future__ import annotations

import re
import weakref
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Callable, NamedTuple, Optional
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fabric_llm.model.layers import KEPT
from fabric_llm.model.strategy import local_part, repeated_layers

# What a storage is of.
PARAMETERS, GRADIENTS, ACTIVATIONS = "parameters", "gradients", "activations"
HEAD, BACKWARD, GATHERED = "loss head", "backward pass", "gathered units and messages"
OPTIMIZER, AVERAGE, BATCH, SUMS = (
    "optimizer state",
    "moving average",
    "batch",
    "float32 sums of gradients",
)
LAYERS, MEASURED = "activations of layers", "a layer that is looked at"
# layers of a kind that stay: two at each end, since nothing is gathered ahead of the outermost
ENDS = 4
# What modules call the number of their layer, which doesn't make it another kind.
NUMBERS = re.compile("idx|index|layer_(id|num)|block_id")


class Ledger(TorchDispatchMode):
    """Bytes of all storages that are alive, by what they are, and their composition at the peak of
    each moment."""

    def __init__(self, copies_messages: bool = False, elsewhere: Collection[str] = ()) -> None:
        """copies_messages: as gloo does with what it reduces and scatters, and NCCL doesn't.
        elsewhere: labels of what the host has."""
        super().__init__()
        self.copies_messages, self.elsewhere = copies_messages, elsewhere
        self.most: Counter[str] = Counter()  # that was held of each of these labels
        self.label = PARAMETERS  # of storages that are made now
        self.moment = "start"
        self.alive: dict[int, tuple[int, str]] = {}  # storage -> bytes, label
        self.held: Counter[str] = Counter()
        self.total = 0
        self.operations = 0
        self.peaks: dict[str, tuple[int, Counter[str]]] = {}  # moment -> the most in it, by label
        # storages that matrix products and attention have read or made
        self.multiplied: set[int] = set()
        self.stream: Optional[torch.Size] = (
            None  # the shape of the residual stream, while a compiled layer is looked at
        )
        self.sums: list[Tensor] = []  # what has been added to it

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if (
            self.copies_messages
            and operation.namespace == "c10d"
            and "reduce_scatter" in str(operation)
        ):
            sent = max(one.nbytes for one in tree_leaves(args) if isinstance(one, Tensor))
            self.put(-1, sent, GATHERED)
            self.put(-1, 0)
        result = operation(*args, **(kwargs or {}))
        self.operations += operation.namespace == "aten" and self.label != MEASURED
        made = operation.overloadpacket in (torch.ops.aten.empty, torch.ops.aten.empty_like)
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self.see(local_part(tensor).untyped_storage(), made)
        is_sum = operation is torch.ops.aten.add.Tensor and result.shape == self.stream
        if operation in KEPT or is_sum:
            tensors = (one for one in tree_leaves((args, result)) if isinstance(one, Tensor))
            storages = {local_part(tensor).untyped_storage()._cdata for tensor in tensors}
            if is_sum and storages & self.multiplied:
                self.sums.append(result)
            if operation in KEPT or storages & self.multiplied:
                self.multiplied |= storages
        return result

    def see(self, storage: Any, is_empty: bool = False) -> None:
        """Count a storage that is new. is_empty: made without a value, outside of layers that is to
        be sent or received."""
        key = storage._cdata
        if key not in self.alive:
            # of a storage that is gone, whose address is this one's now
            self.multiplied.discard(key)
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
        if self.moment not in self.peaks or self.total > self.peaks[self.moment][0]:
            self.peaks[self.moment] = self.total, self.held.copy()

    def resizes(self) -> AbstractContextManager[Any]:
        """In the body, count what FSDP does to storages: it gives them memory before a unit
        computes, and takes it afterwards."""
        resize = torch.UntypedStorage.resize_

        def counted(storage: Any, size: int) -> Any:
            result = resize(storage, size)
            self.see(storage)
            self.put(storage._cdata, storage.nbytes(), GATHERED)
            return result

        return patch.object(torch.UntypedStorage, "resize_", counted)


class Cut(NamedTuple):
    """Equal groups of layers that a step can do without."""

    first: int  # number of the first layer that is left out
    period: int  # layers of a group
    times: int  # groups


def cuts(kinds: Sequence[Any]) -> list[Cut]:
    """What to leave out of layers of these kinds. A step with all cuts, and one more for each cut,
    has fewer layers than all."""
    found: list[Cut] = []

    def layers_of(some: list[Cut]) -> int:
        left = len(kinds) - sum(cut.period * cut.times for cut in some)
        return left * (1 + len(some)) + sum(cut.period for cut in some)

    parts = [(0, len(kinds))]
    while parts:
        begin, end = parts.pop()
        cut = _longest(kinds, begin, end)
        if cut is not None and layers_of([*found, cut]) < layers_of(found):
            found.append(cut)
            parts += [(begin, cut.first), (cut.first + cut.period * cut.times, end)]
    return found


def _longest(kinds: Sequence[Any], begin: int, end: int) -> Optional[Cut]:
    """The cut of most layers among those from `begin` up to `end`, None where nothing repeats often
    enough."""
    best = None
    for period in range(1, (end - begin) // 3 + 1):
        at_each_end = max(1, ENDS // 2 // period)  # groups that stay
        start = begin
        for number in range(begin, end):
            if number + period < end and kinds[number] == kinds[number + period]:
                continue
            times = (number + period - start) // period - 2 * at_each_end
            if times > 0 and (best is None or times * period > best.times * best.period):
                best = Cut(start + at_each_end * period, period, times)
            start = number + 1
    return best


def left_out(found: Sequence[Cut]) -> Iterator[set[int]]:
    """Numbers of the layers that a step leaves out: of all cuts, then of each with a group less."""
    whole = [set(range(cut.first, cut.first + cut.period * cut.times)) for cut in found]
    every = set().union(*whole)
    yield every
    for cut in found:
        yield every - set(range(cut.first, cut.first + cut.period))


def kind(layer: nn.Module) -> Any:
    """What layers have in common that take the same memory: classes, parameters and settings."""
    return tuple(
        (
            name,
            type(module),
            tuple(
                (key, p.shape, p.dtype, p.requires_grad)
                for key, p in module._parameters.items()
                if p is not None
            ),
            tuple(
                (key, value)
                for key, value in vars(module).items()
                if isinstance(value, (int, float, str)) and not NUMBERS.search(key)
            ),
        )
        for name, module in layer.named_modules()
    )


class _CompiledLayer(torch.autograd.Function):
    """What a compiled layer keeps for its backward pass, what that works with, and the gradients
    that it makes."""

    @staticmethod
    def forward(ctx: Any, keeps: Keeps, hidden: Tensor, *parameters: Tensor) -> Tensor:
        ctx.kept = torch.empty(keeps.bytes, dtype=torch.uint8), hidden if keeps.its_input else None
        ctx.works_with_bytes = keeps.backward_bytes
        ctx.needs = [
            (one.shape, one.dtype) if one.requires_grad else None for one in (hidden, *parameters)
        ]
        return torch.empty(keeps.shape, dtype=keeps.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Optional[Tensor], ...]:
        of_hidden, *others = ctx.needs
        made = [None if one is None else torch.zeros(one[0], dtype=one[1]) for one in others]
        torch.zeros(ctx.works_with_bytes, dtype=torch.uint8)
        ctx.kept = None
        return (
            None,
            None if of_hidden is None else torch.zeros(of_hidden[0], dtype=of_hidden[1]),
            *made,
        )


class Keeps(NamedTuple):
    """What a compiled layer keeps for its backward pass."""

    bytes: int  # without its input
    its_input: bool
    backward_bytes: int  # that the backward pass takes beside the gradients of the parameters
    shape: torch.Size  # of what it returns
    dtype: torch.dtype


class LeftOut(nn.Module):
    """What is in the place of a layer that a step does without: the settings of the layer, which
    its model may ask."""


class Layers:
    """The layers of a model; labels and moments follow them."""

    def __init__(
        self,
        model: nn.Module,
        ledger: Ledger,
        left_out: Collection[int] = (),
        compiles: bool = False,
        offloads: bool = False,
    ) -> None:
        """Call it before the model is wrapped. left_out: layers that pass on what they are given.

        compiles: see `_measured`. offloads: the inputs of layers are on no device.
        """
        self.ledger, self.layers, self.compiles = (
            ledger,
            [*repeated_layers(model).values()],
            compiles,
        )
        self.kinds = [kind(layer) if compiles else None for layer in self.layers]
        self.keeps: dict[Any, Keeps] = {}  # of each kind
        self.offloads = offloads
        self.is_forward = True
        self.wrapped = model
        # in what layers return their hidden states
        self.wrap: Callable[[Tensor], Any] = lambda hidden: hidden
        for number, layer in enumerate(self.layers):
            layer.forward = partial(self._forward, number, list(_places(layer)))
            if number in left_out:
                layer.forward = lambda *args, **more: self.wrap(_hidden_states(args, more))
                for held in (layer._modules, layer._parameters, layer._buffers):
                    held.clear()
                layer.__class__ = LeftOut

    def _forward(self, number: int, places: Any, *args: Any, **more: Any) -> Any:
        ledger, layer = self.ledger, self.layers[number]
        # FSDP2 has given it another class since.
        forward = partial(type(layer).forward, layer, *args, **more)
        if not self.is_forward:  # computed again for the backward pass
            return forward()
        ledger.label, ledger.moment = LAYERS, f"the forward pass of layer {number + 1}"
        if self.compiles:
            # The first layer of each kind is measured, and stands for the others.
            kind, hidden = self.kinds[number], _hidden_states(args, more)
            if kind not in self.keeps:
                self.keeps[kind] = self._measured(layer, hidden, forward)
            parameters = (getattr(module, name) for module, name in places)
            output = self.wrap(_CompiledLayer.apply(self.keeps[kind], hidden, *parameters))
        else:
            output = forward()
            self.wrap = _wrapping(output)
        tensor = output[0] if isinstance(output, (tuple, list)) else output
        if tensor.requires_grad:
            tensor.register_hook(partial(self._backward, number))
        if number == len(self.layers) - 1:
            ledger.label, ledger.moment = HEAD, "the loss head"
        return output

    def _measured(self, layer: nn.Module, hidden: Tensor, forward: Callable[[], Any]) -> Keeps:
        """What a compiled layer keeps: of what an eager one does, what matrix products and
        attention have read or made, and the sums of the residual stream, which norms take.

        What lies between them, such as the float32 copies of a norm, the compiler fuses, and
        computes again in the backward pass. That works with the gradients of what is kept, of which
        about a half is there at once. A layer that is checkpointed as a whole keeps its input, and
        has all of that in its backward pass.
        """
        ledger = self.ledger
        is_checkpointed = getattr(layer, "gradient_checkpointing", False)
        context = getattr(layer, "_gradient_checkpointing_func", None)
        is_selective = is_checkpointed and "context_fn" in getattr(context, "keywords", {})
        layer.gradient_checkpointing, ledger.multiplied = is_selective, set()
        ledger.stream = None if is_selective else hidden.shape
        peaks, ledger.label = ledger.peaks.copy(), MEASURED
        output = forward()
        self.wrap = _wrapping(output)
        made = {key for key, (_, label) in list(ledger.alive.items()) if label == MEASURED}
        tensor = output[0] if isinstance(output, (tuple, list)) else output
        made.discard(tensor.untyped_storage()._cdata)  # the next's input
        kept = sum(ledger.alive[key][0] for key in made if key in ledger.multiplied or is_selective)
        shape, dtype = tensor.shape, tensor.dtype
        del output, tensor
        ledger.stream = None
        ledger.sums.clear()
        ledger.peaks, ledger.label = peaks, LAYERS  # nothing of it is there in a run
        layer.gradient_checkpointing = is_checkpointed
        whole = is_checkpointed and not is_selective
        backward = (kept if whole else 0) + kept // 2
        return Keeps(0 if whole else kept, not self.offloads, backward, shape, dtype)

    def _backward(self, number: int, gradient: Tensor) -> None:
        """Called with the gradient of what a layer has returned: its backward pass begins."""
        self.is_forward = False
        self.ledger.label, self.ledger.moment = BACKWARD, f"the backward pass of layer {number + 1}"
        self.mark_gradients()

    def mark_gradients(self) -> None:
        """Say which storages are gradients, which were made as something else."""
        for gradient in (
            p.grad for p in self.wrapped.parameters() if p.is_leaf and p.grad is not None
        ):
            key = local_part(gradient).untyped_storage()._cdata
            if key in self.ledger.alive:
                self.ledger.put(key, self.ledger.alive[key][0], GRADIENTS)


def _hidden_states(args: Sequence[Any], more: dict[str, Any]) -> Tensor:
    return next(one for one in (*args, *more.values()) if isinstance(one, Tensor))


def _wrapping(output: Any) -> Callable[[Tensor], Any]:
    """Other hidden states -> what a layer would return that has returned `output`."""
    if not isinstance(output, (tuple, list)):
        return lambda hidden: hidden
    form, others = type(output), [None] * (len(output) - 1)
    return lambda hidden: form([hidden, *others])


def _places(layer: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Where the parameters of a layer are. FSDP puts other tensors there while the layer
    computes."""
    for module in layer.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield module, name
