"""A causal language model that returns its loss. Another loss to train with goes into `token_loss`.

Model classes that transformers doesn't have are registered at the end. docs/make_it_yours.md says what a class needs.
"""

from __future__ import annotations

import inspect
from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from fabric_llm.data import batches
from fabric_llm.data.columns import IGNORED
from fabric_llm.model import loss_head, packed_attention
from fabric_llm.model.router import load_balancing_loss


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """What is trained: a sum over all targets, float32 scalar. Arguments as of `cross_entropy`."""
    return cross_entropy(logits, targets)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum of the cross-entropies of all targets, float32 scalar, in nats. What is evaluated, whatever is trained.

    logits: [tokens, vocabulary]. targets: int64 [tokens], -100 where there is none. Tokens may be a part of a batch.
    """
    return F.cross_entropy(logits.float(), targets, ignore_index=IGNORED, reduction="sum")


class LanguageModel(nn.Module):
    """A causal LM that returns its loss, so that no logits leave the wrapped module (Fabric would copy them)."""

    def __init__(self, causal_lm: PreTrainedModel, with_router_loss: bool = False, chunked: bool = False) -> None:
        """with_router_loss: see `forward`. chunked: without the logits of the whole batch, see loss_head.py."""
        super().__init__()
        self.causal_lm, self.with_router_loss = causal_lm, with_router_loss
        self.head = loss_head.Head(causal_lm) if chunked else None
        self.token_loss, self.cross_entropy = token_loss, cross_entropy
        known = inspect.signature(causal_lm.forward).parameters.values()
        takes_use_cache = any(p.name == "use_cache" or p.kind == p.VAR_KEYWORD for p in known)
        self.without_cache = {"use_cache": False} if takes_use_cache else {}
        self.is_packed = causal_lm.config._attn_implementation == packed_attention.NAME

    def together(self) -> set[nn.Module]:
        """Modules that strategies mustn't shard by themselves, but with the outermost unit."""
        return set() if self.head is None else self.head.together

    def forward(
        self,
        input_ids: Tensor,
        labels: Optional[Tensor] = None,
        attention_mask: Optional[Tensor] = None,
        position_ids: Optional[Tensor] = None,
        document_ends: Optional[Tensor] = None,
    ) -> Tensor:
        """`token_loss`, or `cross_entropy` where no gradient is wanted; without `labels` the logits.

        with_router_loss, in training: float32 [2], the second the rows' auxiliary losses, each times the row's targets.

        input_ids, labels, attention_mask, position_ids: int64 [rows, context]. Labels are unshifted: position t is predicted from
        the positions before it, -100 is no target. Logits: [rows, context, vocabulary]. position_ids that restart keep
        documents apart: transformers reads the attention mask from them if no other is given and nothing is cached.
        document_ends: what packed attention takes in place of a mask, see batches.document_ends.
        """
        given = {"attention_mask": attention_mask, "position_ids": position_ids}
        given = {name: value for name, value in given.items() if value is not None}
        balances = self.with_router_loss and self.training and labels is not None
        if balances:
            given["output_router_logits"] = True
        if self.is_packed and position_ids is not None:
            ends = batches.document_ends(position_ids.cpu()) if document_ends is None else document_ends
            given |= packed_attention.arguments(ends, longest=input_ids.shape[1])
        inputs = {"input_ids": input_ids, **self.without_cache, **given}
        if labels is None:
            return self.causal_lm(**inputs).logits
        targets = F.pad(labels[:, 1:], (0, 1), value=IGNORED)  # position t is predicted from those before it
        loss_of = self.token_loss if torch.is_grad_enabled() else self.cross_entropy
        if self.head is None:
            outputs = self.causal_lm(**inputs)
            loss = loss_of(outputs.logits.flatten(0, 1), targets.flatten())
        else:
            hidden, outputs = self.head.hidden_states(**inputs)
            loss = loss_head.chunked_loss(self.head, loss_of, hidden.flatten(0, 1), targets.flatten())
        return torch.stack([loss, self._router_loss(outputs, targets, attention_mask)]) if balances else loss

    def _router_loss(self, outputs: Any, targets: Tensor, attention_mask: Optional[Tensor]) -> Tensor:
        """The sum over rows of a row's auxiliary loss times its targets, float32 scalar."""
        if not outputs.router_logits:  # where the configuration leaves no layer with experts
            return torch.zeros((), device=targets.device)
        top_k = self.causal_lm.num_experts_per_tok
        of_rows = load_balancing_loss(outputs.router_logits, len(targets), top_k, attention_mask)
        return (of_rows * (targets != IGNORED).sum(dim=1)).sum()


def trained_loss(losses: Tensor, router_aux_loss_coef: float) -> Tensor:
    """What is trained, scalar: of the two losses of a model with `with_router_loss` the weighted sum."""
    return losses if losses.ndim == 0 else losses[0] + router_aux_loss_coef * losses[1]
