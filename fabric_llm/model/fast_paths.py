"""Which fast paths a model can take, measured on the reference before anything is built. gradient_equality.py proves them later."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import PreTrainedModel

from fabric_llm.model import loss_head, packed_attention
from fabric_llm.model.language_model import LanguageModel
from fabric_llm.model.loading import takes_positions

# The mean difference of logits that rounding explains, as a part of their standard deviation: 25 to 1000 times what was seen
# over 70 families (docs/results/families.md), a fifth of what a model that packed attention would change shows.
LIMITS = {torch.float32: 1e-3, torch.bfloat16: 2e-2}


def chunks_its_loss(reference: PreTrainedModel, precision: str) -> bool:
    """Whether the model's own code, given its hidden states alone, makes the logits that the whole model makes."""
    if precision == "16-mixed" or not loss_head.has_head(reference):
        return False  # gradients in float16 need their scale from the start
    rows = _rows(reference)
    reference.eval()
    try:
        with torch.no_grad():
            head = loss_head.Head(reference)
            hidden, _ = head.hidden_states(input_ids=rows)
            chunked = torch.stack([head(row) for row in hidden])
            return _deviation(chunked, LanguageModel(reference)(rows)) <= LIMITS[reference.dtype]
    except (TypeError, AttributeError, RuntimeError, LookupError):  # a model of another build
        return False


def takes_packed_attention(reference: PreTrainedModel) -> bool:
    """Whether the model's layers make the same of packed documents with `packed_attention` as with SDPA's mask."""
    if not (packed_attention.fits(type(reference)) and takes_positions(type(reference))):
        return False
    rows = _rows(reference)
    positions = torch.arange(rows.shape[1]).expand_as(rows) % 7
    reference.eval()
    try:
        with torch.no_grad():
            masked = LanguageModel(reference)(rows, position_ids=positions)
            with attention(reference, packed_attention.NAME):
                packed = LanguageModel(reference)(rows, position_ids=positions)
        return _deviation(packed, masked) <= LIMITS[reference.dtype]
    except (TypeError, AttributeError, RuntimeError, LookupError, ValueError):  # NotImplementedError is a RuntimeError
        return False


@contextmanager
def attention(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Another attention implementation of transformers in the body."""
    configs = {id(c): c for module in model.modules() if (c := getattr(module, "config", None)) is not None}.values()
    before = [config._attn_implementation for config in configs]
    for config in configs:
        config._attn_implementation = name
    try:
        yield
    finally:
        for config, former in zip(configs, before):
            config._attn_implementation = former


def _rows(reference: PreTrainedModel) -> Tensor:
    vocabulary = reference.config.get_text_config().vocab_size
    return torch.stack([torch.arange(16) * 7 + 3, torch.arange(16) * 5 + 2]) % vocabulary


def _deviation(logits: Tensor, expected: Tensor) -> float:
    """The mean difference, as a part of the logits' standard deviation; NaN compares as too much."""
    return ((logits.float() - expected.float()).abs().mean() / expected.float().std()).item()
