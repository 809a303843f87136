"""What a model can do, measured on the reference before anything is built: fast paths, packed documents, prediction.

The gate (gate.py) proves later that the wrapped model, on the fast paths that were chosen, is the plain one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fabric_llm.model import gate, loss_head, packed_attention
from fabric_llm.model.language_model import LanguageModel
from fabric_llm.model.loading import takes_positions

# The mean difference of logits that rounding explains, as a part of their standard deviation: 25 to 1000 times what was seen
# over 70 families (docs/results/families.md), a fifth of what a model that packed attention would change shows.
LIMITS = {torch.float32: 1e-3, torch.bfloat16: 2e-2}


class Leak(NamedTuple):
    """What a packed document sees of the one before it."""

    found: bool
    change: float  # the largest of its logits, as a part of their standard deviation, when the one before it is another


def chunks_its_loss(reference: PreTrainedModel, precision: str) -> bool:
    """Whether the model's own code, given its hidden states alone, makes the logits that the whole model makes."""
    if precision == "16-mixed" or not loss_head.has_head(reference):
        return False  # gradients in float16 need their scale from the start
    rows = _rows(reference)

    def both() -> tuple[Tensor, Tensor]:
        head = loss_head.Head(reference)
        hidden, _ = head.hidden_states(input_ids=rows)
        return torch.stack([head(row) for row in hidden]), LanguageModel(reference)(rows)

    return _are_equal(reference, both)


def takes_packed_attention(reference: PreTrainedModel) -> bool:
    """Whether the model's layers make the same of packed documents with `packed_attention` as with SDPA's mask."""
    if not (packed_attention.fits(type(reference)) and takes_positions(type(reference))):
        return False
    rows = _rows(reference)
    positions = torch.arange(rows.shape[1]).expand_as(rows) % 7

    def both() -> tuple[Tensor, Tensor]:
        masked = LanguageModel(reference)(rows, position_ids=positions)
        with attention(reference, packed_attention.NAME):
            return LanguageModel(reference)(rows, position_ids=positions), masked

    return _are_equal(reference, both)


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


def find_leak(model: PreTrainedModel) -> Leak:
    """Whether restarting positions alone make a packed document blind to the one before it, on the path that trains.

    Autograd says it exactly: where attention is masked the gradient is zero, not small, whatever rounding does, and
    a way that is left, through a recurrent state or a convolution, isn't. What it can't see, positions that go on where
    they should restart, makes a document's logits differ from those that it has alone by more than rounding.
    """
    rows, places = _rows(model), torch.arange(16)[None]
    begins = torch.tensor([8, 5])  # of the second document in each row
    second = places >= begins[:, None]
    positions = torch.where(second, places - begins[:, None], places)
    others = torch.where(second, rows, (rows * 3 + 1) % model.config.get_text_config().vocab_size)
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
    limit = gate.LIMITS["32-true" if model.dtype == torch.float32 else "bf16-true"].logits
    found = found or any(not (some - alone).abs().mean() <= limit * deviation for some in (packed, changed))
    return Leak(found, ((packed - changed).abs().max() / deviation).item())


def sees_ahead(model: PreTrainedModel) -> bool:
    """True if what the model says at a position depends on tokens after it: then its loss means nothing."""
    early = torch.arange(16)[None] < 8
    return _depends(LanguageModel(model), _rows(model)[:1], {}, early, ~early)


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


def _rows(model: PreTrainedModel) -> Tensor:
    """Two rows of 16 tokens."""
    return torch.stack([torch.arange(16) * 7 + 3, torch.arange(16) * 5 + 2]) % model.config.get_text_config().vocab_size


def _are_equal(reference: PreTrainedModel, both: Callable[[], tuple[Tensor, Tensor]]) -> bool:
    """Whether the logits of a fast path and of the plain one, in this order, are equal to rounding; False for NaN."""
    reference.eval()
    try:
        with torch.no_grad():
            fast, plain = both()
    except (TypeError, AttributeError, RuntimeError, LookupError, ValueError):  # a model of another build
        return False
    return ((fast.float() - plain.float()).abs().mean() / plain.float().std()).item() <= LIMITS[reference.dtype]
