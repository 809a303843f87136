"""A causal language model that returns its loss. Another loss goes into `token_loss`."""

from __future__ import annotations

import inspect
from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from fabric_llm.data.columns import IGNORED
from fabric_llm.model.router import load_balancing_loss


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum of the cross-entropies of all targets, float32 scalar, in nats.

    logits: [rows, context, vocabulary]. labels: int64 [rows, context], unshifted, -100 where there is no target.
    """
    predictions, targets = logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten()
    return F.cross_entropy(predictions, targets, ignore_index=IGNORED, reduction="sum")


class LanguageModel(nn.Module):
    """A causal LM that returns its loss, so that no logits leave the wrapped module (Fabric would copy them)."""

    def __init__(self, causal_lm: PreTrainedModel, with_router_loss: bool = False) -> None:
        super().__init__()
        self.causal_lm, self.with_router_loss = causal_lm, with_router_loss
        known = inspect.signature(causal_lm.forward).parameters.values()
        takes_use_cache = any(p.name == "use_cache" or p.kind == p.VAR_KEYWORD for p in known)
        self.without_cache = {"use_cache": False} if takes_use_cache else {}

    def forward(
        self,
        input_ids: Tensor,
        labels: Optional[Tensor] = None,
        attention_mask: Optional[Tensor] = None,
        position_ids: Optional[Tensor] = None,
    ) -> Tensor:
        """`token_loss`; without `labels` the logits.

        with_router_loss, in training: float32 [2], the second the rows' auxiliary losses, each times the row's targets.

        input_ids, labels, attention_mask, position_ids: int64 [rows, context]. Labels are unshifted: position t is predicted from
        the positions before it, -100 is no target. Logits: [rows, context, vocabulary]. position_ids that restart keep
        documents apart: transformers reads the attention mask from them if no other is given and nothing is cached.
        """
        given = {"attention_mask": attention_mask, "position_ids": position_ids}
        given = {name: value for name, value in given.items() if value is not None}
        balances = self.with_router_loss and self.training and labels is not None
        if balances:
            given["output_router_logits"] = True
        outputs = self.causal_lm(input_ids=input_ids, **self.without_cache, **given)
        if labels is None:
            return outputs.logits
        loss = token_loss(outputs.logits, labels)
        if not balances:
            return loss
        rows, of_rows = len(input_ids), loss.new_zeros(len(input_ids))
        if outputs.router_logits:  # not where the configuration leaves no layer with experts
            of_rows = load_balancing_loss(
                outputs.router_logits, rows, self.causal_lm.num_experts_per_tok, attention_mask
            )
        return torch.stack([loss, (of_rows * (labels[:, 1:] != IGNORED).sum(dim=1)).sum()])


def checkpoint_activations(model: PreTrainedModel) -> None:
    """Recompute each layer in the backward pass. transformers does it inside the layer, so names stay as they are."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def trained_loss(losses: Tensor, router_aux_loss_coef: float) -> Tensor:
    """What is trained, scalar: of the two losses of a model with `with_router_loss` the weighted sum."""
    return losses if losses.ndim == 0 else losses[0] + router_aux_loss_coef * losses[1]
