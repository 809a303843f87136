"""The loss without the logits of a whole batch: hidden states -> loss, in chunks of tokens.

Each chunk goes through the model's own code between its last layer and its logits, so that a bias, tied weights, soft-capping or
a scale of the logits count as they do in the model. The gradients of the hidden states and of the head are made in the same
pass: nothing is computed again in the backward pass, and the peak memory doesn't grow with vocabulary x tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Optional

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

# A CPU's chunk stays in its cache, a GPU's keeps the matrix products large.
LOGITS_AT_ONCE = {"cpu": 2**21, "cuda": 2**28}
Loss = Callable[[Tensor, Tensor], Tensor]  # logits [tokens, vocabulary], targets int64 [tokens] -> sum, scalar


class Head:
    """What a causal LM does after its last layer: hidden states [tokens, hidden size] -> logits [tokens, vocabulary]."""

    def __init__(self, causal_lm: PreTrainedModel) -> None:
        self.causal_lm, self.base = causal_lm, _layers_of(causal_lm)
        inside = set(self.base.modules())
        outside = [module for module in causal_lm.modules() if module not in inside and module is not causal_lm]
        # Not to be sharded each by itself: they are called once for each chunk.
        self.together = {causal_lm, self.base, *outside}
        # By name: FSDP puts other tensors in the place of a module's parameters while it runs.
        # Those that train: FSDP's tensors would all have gradients where one parameter of their unit has.
        self.places = [
            (module, name)
            for module in outside
            for name, parameter in module._parameters.items()
            if parameter is not None and parameter.requires_grad
        ]
        self.returns: type[Any] = type(None)  # the class of the base model's outputs

    def hidden_states(self, **inputs: Any) -> tuple[Tensor, Any]:
        """(hidden states [rows, context, hidden size], all outputs) of the model's layers."""
        outputs = self.base(**inputs)
        self.returns = type(outputs)
        return outputs.last_hidden_state, outputs

    def tensors(self) -> list[Tensor]:
        """The parameters that it uses, as they are now."""
        tensors = {id(tensor): tensor for module, name in self.places if (tensor := getattr(module, name)) is not None}
        # By id, so that each is there once where several modules share it.
        return [tensor for tensor in tensors.values() if tensor.requires_grad]

    def __call__(self, hidden: Tensor) -> Tensor:
        """The model's own `forward`, whose layers give `hidden`."""
        outputs = self.returns(last_hidden_state=hidden[None])
        with _computing(self.base, lambda *args, **inputs: outputs):
            return self.causal_lm(input_ids=hidden.new_zeros(1, len(hidden), dtype=torch.long)).logits[0]


@contextmanager
def _computing(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """`forward` in place of the module's own."""
    before = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if before is not None:
            module.forward = before


def _layers_of(causal_lm: nn.Module) -> Any:
    """The part of a causal LM that gives its head the hidden states; the model itself where there is no such part."""
    get_decoder = getattr(causal_lm, "get_decoder", None)
    return causal_lm if get_decoder is None else get_decoder()


def has_head(causal_lm: nn.Module) -> bool:
    """False where layers and head of a model can't be told apart."""
    return isinstance(base := _layers_of(causal_lm), nn.Module) and base is not causal_lm


def chunked_loss(head: Head, token_loss: Loss, hidden: Tensor, targets: Tensor) -> Tensor:
    """`token_loss(head(hidden), targets)`, the sum over chunks of tokens; float32 scalar.

    hidden: [tokens, hidden size]. targets: int64 [tokens].
    """
    return _ChunkedLoss.apply(head, token_loss, targets, hidden, *head.tensors())


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, head: Head, token_loss: Loss, targets: Tensor, hidden: Tensor, *tensors: Tensor) -> Tensor:
        size = _tokens_at_once(head.causal_lm, hidden)
        needs_grad, needs_hidden = any(ctx.needs_input_grad), ctx.needs_input_grad[3]
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        of_hidden, sums = [], [None] * len(tensors)
        for chunk, chunk_targets in zip(hidden.split(size), targets.split(size)):
            with torch.set_grad_enabled(needs_grad):
                chunk = chunk.detach().requires_grad_(needs_hidden)
                loss, gradients = _of_chunk(head, token_loss, chunk, chunk_targets, tensors)
            total += loss
            if needs_grad:
                of_hidden += [gradients.pop(0)] if needs_hidden else []
                sums = [_add(before, gradient) for before, gradient in zip(sums, gradients)]
        ctx.gradients = (torch.cat(of_hidden) if needs_hidden else None, *sums) if needs_grad else ()
        ctx.dtypes = [hidden.dtype, *(tensor.dtype for tensor in tensors)]
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor: Tensor) -> tuple[Optional[Tensor], ...]:
        gradients, ctx.gradients = ctx.gradients, ()
        scaled = [None if g is None else g.mul_(factor).to(dtype) for g, dtype in zip(gradients, ctx.dtypes)]
        return None, None, None, *scaled


def _of_chunk(
    head: Head, token_loss: Loss, chunk: Tensor, targets: Tensor, tensors: tuple[Tensor, ...]
) -> tuple[Tensor, list[Optional[Tensor]]]:
    """(loss without a graph, its gradients with respect to the chunk, if that needs one, and to the tensors)"""
    logits = head(chunk)
    leaf = logits.detach().requires_grad_(logits.requires_grad)  # PyTorch's compiler warns of any other tensor
    loss = token_loss(leaf, targets)
    if not loss.requires_grad:
        return loss, []
    wanted = [chunk, *tensors] if chunk.requires_grad else list(tensors)
    loss.backward()
    return loss.detach(), list(torch.autograd.grad(logits, wanted, leaf.grad, allow_unused=True))


def _add(before: Optional[Tensor], gradient: Optional[Tensor]) -> Optional[Tensor]:
    """Their sum in float32, whatever the weights: a bfloat16 sum would round at each chunk."""
    if gradient is None:
        return before
    return gradient.float() if before is None else before.add_(gradient)


def _tokens_at_once(causal_lm: PreTrainedModel, hidden: Tensor) -> int:
    vocabulary = causal_lm.config.get_text_config().vocab_size
    if hidden.device.type != "cpu":
        return max(1, LOGITS_AT_ONCE["cuda"] // vocabulary)
    # Each chunk makes a gradient of the whole head. With fewer tokens than a hidden state has elements, that gradient would be
    # larger than the logits, and moving it would take most of the time: 2.2 times that of all logits at 42 tokens of 576.
    return max(hidden.shape[-1], LOGITS_AT_ONCE["cpu"] // vocabulary)
