"""The auxiliary loss of mixture-of-experts models, which asks that tokens are spread evenly over the experts.

transformers adds it only where it computes the cross-entropy itself, and over whatever happens to be in one forward pass:
it is a product of means over tokens, so that the mean over micro-batches isn't that of the whole batch. Here it is that of
each row (sequence) by itself, and rows are averaged by their number of targets, as the cross-entropy is. A sum over rows is
the same however they are spread over micro-batches and ranks.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from typing import Optional

import torch
from torch import Tensor
from transformers import PreTrainedModel

COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef", "moe_loss_weight")  # what causal LMs call it


def coefficient(causal_lm: PreTrainedModel, given: Optional[float]) -> float:
    """What the auxiliary loss is multiplied by in what is trained; 0 where there is none.

    given: --router_aux_loss_coef; None: as the model's configuration says, where that asks for the routers' logits.
    Raises ValueError for one that is given to a model without such a loss.
    """
    asked = bool(getattr(causal_lm.config.get_text_config(), "output_router_logits", False))
    if given == 0 or given is None and not asked:
        return 0.0
    if not has_loss(causal_lm):
        if given is not None:
            name = type(causal_lm).__name__
            raise ValueError(f"--router_aux_loss_coef {given}: transformers knows no auxiliary loss of {name}.")
        return 0.0
    own = (getattr(causal_lm, name, None) for name in COEFFICIENTS)
    return float(given if given is not None else next((value for value in own if value is not None), 0.0))


def warning(causal_lm: PreTrainedModel) -> Optional[str]:
    """What to say where the configuration asks for what the model can't give."""
    asked = getattr(causal_lm.config.get_text_config(), "output_router_logits", False)
    if not asked or has_loss(causal_lm):
        return None
    return (
        f"Warning: the configuration says output_router_logits, but transformers knows no auxiliary loss of "
        f"{type(causal_lm).__name__}: none is trained."
    )


def has_loss(causal_lm: PreTrainedModel) -> bool:
    """True for models whose own loss would hold that of the Switch Transformer, which `load_balancing_loss` is."""
    function = getattr(sys.modules[type(causal_lm).__module__], "load_balancing_loss_func", None)
    if function is None or not isinstance(getattr(causal_lm, "num_experts_per_tok", None), int):
        return False
    return list(inspect.signature(function).parameters) == ["gate_logits", "num_experts", "top_k", "attention_mask"]


def load_balancing_loss(
    router_logits: Sequence[Tensor], rows: int, top_k: int, attention_mask: Optional[Tensor] = None
) -> Tensor:
    """float32 [rows]: for each row by itself what transformers' load_balancing_loss_func gives.

    router_logits: of each layer with experts, [rows x context, experts]. attention_mask: [rows, context], 0 for padding.
    Fedus et al. (2021), Switch Transformers (https://arxiv.org/abs/2101.03961), equations 4 to 6, over all layers together:
    experts x the sum over experts of (part of the tokens that it is chosen for) x (mean of its probability). 1 x top_k where
    all is even. Only the probabilities have a gradient.
    """
    experts = router_logits[0].shape[-1]
    chosen, probable = (torch.zeros(rows, experts, device=router_logits[0].device) for _ in range(2))
    context = router_logits[0].numel() // (rows * experts)
    is_token = torch.ones(rows, context, device=chosen.device) if attention_mask is None else attention_mask.float()
    for logits in router_logits:
        probabilities = logits.float().softmax(dim=-1).view(rows, context, experts)
        places = torch.zeros_like(probabilities).scatter_(-1, probabilities.topk(top_k, dim=-1).indices, 1.0)
        chosen = chosen + (places * is_token[..., None]).sum(dim=1)
        probable = probable + (probabilities * is_token[..., None]).sum(dim=1)
    tokens = (len(router_logits) * is_token.sum(dim=1, keepdim=True)).clamp(min=1)
    return experts * (chosen / tokens * (probable / tokens)).sum(dim=1)
