"""--activation_checkpointing offload: what recomputed layers keep, their inputs, waits in the
host's memory.

So a device holds no more activations than those of one layer, however many there are. Rajbhandari
et al. (2020), ZeRO, https://arxiv.org/abs/1910.02054, section 6.1, and ALST,
https://arxiv.org/abs/2506.13996, section 3.3.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Optional

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class Waiting:
    """A tensor in pinned memory of the host, on its way there or back, and the one that was put
    there before it. host: that memory."""

    def __init__(
        self, tensor: Tensor, stream: torch.cuda.Stream, host: Tensor, before: Optional[Waiting]
    ) -> None:
        self.stream, self.before, self.back = stream, before, None
        self.place = place_after(before)
        self.host = host.view(tensor.dtype).view(tensor.shape)
        # The copy begins after the kernels that write the tensor.
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.host.copy_(tensor, non_blocking=True)
        tensor.record_stream(stream)  # its memory isn't used again before the copy is made

    def fetch(self) -> None:
        """Begin to copy it to the device, unless that has begun."""
        # `get` may have asked for it before, while the layer after this one was recomputed.
        if self.back is None:
            with torch.cuda.stream(self.stream):
                self.back = self.host.to(self.stream.device, non_blocking=True)


def place_after(before: Optional[Waiting]) -> int:
    """How many inputs wait in front of one that follows `before`."""
    return 0 if before is None else before.place + 1


def pinned(size: int) -> Tensor:
    """uint8 [size] in memory of the host that a device copies from and to by itself.

    torch's own pinned memory is rounded up to a power of two. Raises RuntimeError where the driver
    can't pin it.
    """
    # Pages are pinned whole, so no other tensor may have a part of them.
    page = mmap.PAGESIZE
    room = torch.empty(size + 2 * page, dtype=torch.uint8)
    host = room[-room.data_ptr() % page :][:size]
    address, cudart = host.data_ptr(), torch.cuda.cudart()
    torch.cuda.check_error(cudart.cudaHostRegister(address, size + -size % page, 0))
    # Otherwise the device would copy the freed pages, whatever is at this address by then.
    weakref.finalize(host, cudart.cudaHostUnregister, address).atexit = False
    return host


class Inputs:
    """Takes the inputs of layers in a forward pass, and gives them back in the backward pass, where
    the last one comes first."""

    def __init__(self) -> None:
        self.stream: Optional[torch.cuda.Stream] = None
        self.last: Optional[Waiting] = None
        # By place in the forward pass and size. It stays: pinning takes longer than a step. The
        # copies of one stream come one after the other, so that none meets that of a step before.
        self.hosts: dict[tuple[int, int], Tensor] = {}

    def put(self, hidden: weakref.ref[Tensor], tensor: Tensor) -> Any:
        """What is kept in place of `tensor`. All but `hidden`, the input of a layer, stay where
        they are, and all do on a CPU.

        Autograd keeps this hook as long as what it returns, so it mustn't hold the input.
        """
        # By address: the hook may see another object with the same memory.
        if not tensor.is_cuda or tensor.data_ptr() != hidden().data_ptr():
            return tensor
        # Copies have a stream of their own, so that they run while the device computes.
        self.stream = self.stream or torch.cuda.Stream(tensor.device)
        key = place_after(self.last), tensor.nbytes
        if key not in self.hosts:
            self.hosts[key] = pinned(tensor.nbytes)
        self.last = Waiting(tensor, self.stream, self.hosts[key], self.last)
        return self.last

    def get(self, kept: Any) -> Tensor:
        """The tensor, for the model's stream. The one that is needed next is on its way then."""
        if isinstance(kept, Tensor):
            return kept
        kept.fetch()
        current = torch.cuda.current_stream()
        # The model's kernels wait for the copy, the host doesn't.
        current.wait_stream(self.stream)
        if kept.before is not None:
            kept.before.fetch()
        # Made on the other stream: its memory isn't used again before these kernels are done.
        kept.back.record_stream(current)
        self.last = kept.before = None  # nothing is kept for a pass that is over
        return kept.back


def offloading(checkpoint: Callable[..., Any], compiles: bool) -> Callable[..., Any]:
    """A function that checkpoints a layer, as transformers calls it, whose input waits in the
    host's memory.

    compiles: the layer is compiled. The compiler doesn't follow hooks, and nothing that is called
    under them.
    """
    inputs = Inputs()
    run = torch.compile(_called, dynamic=False) if compiles else _called

    def call(layer: Callable[..., Any], hidden: Tensor, *others: Any) -> Any:
        # What the layer keeps goes to the hooks of `checkpoint`, which are inside of these.
        with saved_tensors_hooks(partial(inputs.put, weakref.ref(hidden)), inputs.get):
            return checkpoint(partial(run, layer), hidden, *others)

    return call


def _called(layer: Callable[..., Any], *args: Any) -> Any:
    return layer(*args)
