"""The loss of a batch without the logits of the whole batch, to plain transformers' numbers.

`chunked_loss` takes each chunk of tokens through the model's own code between its last layer and
its logits, so that a bias, tied weights, soft-capping or a scale of the logits count as they do in
the model. The gradients of the hidden states and of the head are made in the same pass: nothing is
computed again, and the peak memory doesn't grow with vocabulary x tokens.
"""

from collections.abc import Callable
from typing import Any, Optional

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

# A CPU's chunk stays in its cache. A GPU's keeps the matrix products large, and adds up the
# gradient of the head less often (docs/results/budget.md).
LOGITS_AT_ONCE = {"cpu": 2**21, "cuda": 2**29}
# Takes logits [tokens, vocabulary] and targets, int64 [tokens], and gives their sum, a scalar.
Loss = Callable[[Tensor, Tensor], Tensor]


class Head:
    """What a causal LM does after its last layer: hidden states [tokens, hidden size] -> logits
    [tokens, vocabulary]."""

    def __init__(self, causal_lm: PreTrainedModel) -> None:
        """Raises ValueError where layers and head of a model can't be told apart."""
        self.causal_lm, self.base = causal_lm, causal_lm.get_decoder()
        if not isinstance(self.base, nn.Module) or self.base is causal_lm:
            raise ValueError(f"{type(causal_lm).__name__} has no layers apart from its head")
        inside = set(self.base.modules())
        outside = [
            module
            for module in causal_lm.modules()
            if module not in inside and module is not causal_lm
        ]
        # Not to be sharded each by itself: they are called once for each chunk.
        self.keep_in_root = {causal_lm, self.base, *outside}
        # By name: FSDP puts other tensors in the place of a module's parameters while it runs.
        # Those that train: FSDP's tensors would all have gradients where one parameter of their
        # unit has.
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
        """The parameters that it uses, as they are now, each once where several modules share
        it."""
        tensors = {
            id(tensor): tensor
            for module, name in self.places
            if (tensor := getattr(module, name)) is not None
        }
        return [tensor for tensor in tensors.values() if tensor.requires_grad]

    def __call__(self, hidden: Tensor) -> Tensor:
        """The model's own `forward`, whose layers give `hidden`."""
        # The layers have run. In their place the model's forward gets this chunk's hidden states.
        outputs = self.returns(last_hidden_state=hidden[None])
        before = vars(self.base).get("forward")
        self.base.forward = lambda *args, **inputs: outputs
        try:
            # The ids stand for the number of tokens alone: the layers, which would look them up,
            # don't run.
            return self.causal_lm(
                input_ids=hidden.new_zeros(1, len(hidden), dtype=torch.long)
            ).logits[0]
        finally:
            del self.base.forward
            if before is not None:
                self.base.forward = before


def chunked_loss(head: Head, token_loss: Loss, hidden: Tensor, targets: Tensor) -> Tensor:
    """`token_loss(head(hidden), targets)`, float32 scalar. hidden: [tokens, hidden size]. targets:
    int64 [tokens].

    Where no gradient is wanted, targets may have more columns, and the loss may be a vector.
    """
    if torch.is_grad_enabled():
        return _ChunkedLoss.apply(head, token_loss, targets, hidden, *head.tensors())
    # Without gradients autograd must not see the parameters, or it would make theirs all the same.
    return _ChunkedLoss.apply(head, token_loss, targets, hidden.detach())


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, head: Head, token_loss: Loss, targets: Tensor, hidden: Tensor, *tensors: Tensor
    ) -> Tensor:
        size = _tokens_at_once(head.causal_lm, hidden)
        needs_grad, needs_hidden = any(ctx.needs_input_grad), ctx.needs_input_grad[3]
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        of_hidden: list[Tensor] = []
        sums: list[Optional[Tensor]] = [None] * len(tensors)
        for chunk, chunk_targets in zip(hidden.split(size), targets.split(size)):
            with torch.set_grad_enabled(needs_grad):
                chunk = chunk.detach().requires_grad_(needs_hidden)
                logits = head(chunk)
                # The backward pass of the loss stops at this leaf. A compiled loss takes nothing
                # but leaves without a warning.
                leaf = logits.detach().requires_grad_(logits.requires_grad)
                loss = token_loss(leaf, chunk_targets)
                # of a vector, only the first number is trained
                trained = loss if loss.ndim == 0 else loss[0]
            total = total + loss.detach()
            if loss.requires_grad:
                trained.backward()
                wanted = [chunk, *tensors] if needs_hidden else tensors
                # autograd.grad, not backward: `backward` below returns the gradients, so they must
                # not be in the `grad` of the parameters as well.
                gradients = list(torch.autograd.grad(logits, wanted, leaf.grad, allow_unused=True))
                of_hidden += [gradients.pop(0)] if needs_hidden else []
                # Summed in float32, whatever the weights: bfloat16 would round at each chunk.
                for place, (before, gradient) in enumerate(zip(sums, gradients)):
                    if gradient is not None:
                        sums[place] = gradient.float() if before is None else before.add_(gradient)
        ctx.gradients = (
            (torch.cat(of_hidden) if needs_hidden else None, *sums) if needs_grad else ()
        )
        ctx.dtypes = [hidden.dtype, *(tensor.dtype for tensor in tensors)]
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor: Tensor) -> tuple[Optional[Tensor], ...]:
        gradients, ctx.gradients = ctx.gradients, ()
        # Of a vector, only the first number was trained, see `forward`.
        factor = factor if factor.ndim == 0 else factor[0]
        scaled = [
            None if g is None else g.mul_(factor).to(dtype)
            for g, dtype in zip(gradients, ctx.dtypes)
        ]
        return None, None, None, *scaled


def _tokens_at_once(causal_lm: PreTrainedModel, hidden: Tensor) -> int:
    vocabulary = causal_lm.config.get_text_config().vocab_size
    if hidden.device.type != "cpu":
        return max(1, LOGITS_AT_ONCE["cuda"] // vocabulary)
    # Each chunk makes a gradient of the whole head. With fewer tokens than a hidden state has
    # elements, that gradient would be larger than the logits, and moving it would take most of the
    # time: 2.2 times that of all logits at 42 tokens of 576.
    return max(hidden.shape[-1], LOGITS_AT_ONCE["cpu"] // vocabulary)
