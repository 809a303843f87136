"""Does a model see what it must not: tokens that come later, or the packed document before?"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fabric_llm.model.equality import LIMITS
from fabric_llm.model.language_model import LanguageModel
from fabric_llm.model.loading import takes_positions


class Leak(NamedTuple):
    """What a packed document sees of the one before it."""

    found: bool
    change: float  # the largest of its logits, as a part of their standard deviation, when the one before it is another


def find_leak(model: PreTrainedModel) -> Leak:
    """Whether restarting positions alone make a packed document blind to the one before it, on the path that trains.

    Autograd says it exactly: where attention is masked the gradient is zero, not small, whatever rounding does, and
    a way that is left, through a recurrent state or a convolution, isn't. What it can't see, positions that go on where
    they should restart, makes a document's logits differ from those that it has alone by more than rounding.
    """
    vocabulary = model.config.get_text_config().vocab_size
    rows = torch.stack([torch.arange(16) * 7 + 3, torch.arange(16) * 5 + 2]) % vocabulary
    begins = torch.tensor([8, 5])  # of the second document in each row
    places = torch.arange(16)[None].expand(2, -1)
    second = places >= begins[:, None]
    positions = torch.where(second, places - begins[:, None], places)
    others = torch.where(second, rows, (rows * 3 + 1) % vocabulary)
    given = {"position_ids": positions} if takes_positions(type(model)) else {}
    language_model = LanguageModel(model)
    found = _depends(language_model, rows, given, second, ~second)
    model.eval()
    with torch.no_grad():
        packed, changed = (language_model(ids, **given)[second].float() for ids in (rows, others))
        each = [
            language_model(rows[row : row + 1, begin:], **{k: v[row : row + 1, begin:] for k, v in given.items()})[0]
            for row, begin in enumerate(begins.tolist())
        ]
        alone = torch.cat(each).float()
    deviation = alone.std()
    limit = LIMITS["32-true" if model.dtype == torch.float32 else "bf16-true"][1]
    found = found or any(not (some - alone).abs().mean() <= limit * deviation for some in (packed, changed))
    return Leak(found, ((packed - changed).abs().max() / deviation).item())


def sees_ahead(model: PreTrainedModel) -> bool:
    """True if what the model says at a position depends on tokens after it: then its loss means nothing."""
    rows = (torch.arange(16) * 7 + 3)[None] % model.config.get_text_config().vocab_size
    early = torch.arange(16)[None] < 8
    return _depends(LanguageModel(model), rows, {}, early, ~early)


def _depends(model: LanguageModel, rows: Tensor, given: dict[str, Tensor], here: Tensor, there: Tensor) -> bool:
    """True if logits at the places `here` depend on embeddings at the places `there`, in training, dropout and all."""
    if model.causal_lm.config._attn_implementation == "flex_attention":  # has no backward pass on CPUs
        return False
    embedded: list[Tensor] = []

    def cut(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
        embedded.append(output.detach().requires_grad_())
        return embedded[-1].clone()  # some models write into it

    handle = model.causal_lm.get_input_embeddings().register_forward_hook(cut)
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            logits = model.train()(rows, **given)[here].float()
            weights = torch.arange(logits.numel()).view_as(logits).cos()  # a plain sum could be blind to some change
            gradients = torch.autograd.grad((logits * weights).sum(), embedded, allow_unused=True)
    finally:
        handle.remove()
    return any(gradient is not None and bool((gradient[there] != 0).any()) for gradient in gradients)
