"""Rows of the embedding and of the output head for new tokens: as many as are needed, and what they begin with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Optional

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

MULTIPLE = 128  # of rows: a vocabulary that is padded to a divisor of it, at least 8, stays so
LEAST_MULTIPLE = 8
NOISE = 0.1  # of the standard deviation of each dimension


def rows_for(tokens: int, rows: int) -> int:
    """How many rows a model with `rows` of them has for `tokens` tokens: unused ones are taken first, padding is kept."""
    if tokens <= rows:
        return rows
    multiple = math.gcd(rows, MULTIPLE)
    return tokens if multiple < LEAST_MULTIPLE else -(-tokens // multiple) * multiple


def require_resizable(causal_lm: PreTrainedModel) -> None:
    """Raises ValueError for a model that holds more for each token than input embeddings and an output head."""
    name, rows = type(causal_lm).__name__, causal_lm.config.get_text_config().vocab_size
    embeddings, head = causal_lm.get_input_embeddings(), causal_lm.get_output_embeddings()
    if not isinstance(embeddings, nn.Embedding) or not isinstance(head, nn.Linear):
        raise ValueError(f"{name} has no plain embedding and output head, whose rows could be extended.")
    if len(embeddings.weight) != rows or len(head.weight) != rows:
        raise ValueError(
            f"{name} has {len(embeddings.weight)} embeddings and {len(head.weight)} outputs for a vocabulary of {rows}: it "
            "can't be extended here."
        )
    per_layer = getattr(causal_lm.config.get_text_config(), "vocab_size_per_layer_input", None)
    for path, module in causal_lm.named_modules():
        if isinstance(module, nn.Embedding) and module is not embeddings and module.num_embeddings in (rows, per_layer):
            raise ValueError(f"{name} has more embeddings of tokens in {path}: it can't be extended here.")


@torch.no_grad()
def add_rows(causal_lm: PreTrainedModel, first: int, made_of: Sequence[Sequence[int]], seed: int = 0) -> None:
    """Rows `first` and following for tokens whose text was the old tokens `made_of` until now; the configuration follows.

    A row is the mean of the rows of those tokens; of none, the mean of all. The model then begins where it would have been: of
    what starts are compared for new languages, the mean of the parts is among the best, and random rows are the worst
    (arXiv:2407.05841). In the head the logit of a new token is the mean of the logits of its parts, so at most the largest of
    them: new tokens can't take the place of what the model knows, which rows drawn at random with another norm can (Hewitt 2021,
    https://nlp.stanford.edu/~johnhew/vocab-expansion.html). Two tokens of the same parts, "ab" and "ba", would come out equal,
    and, if they are always followed by the same, with equal gradients: the later of them gets noise with 0.1 of the standard
    deviation that the old rows have in each dimension. That is small enough to keep a row among its parts (a cosine of 0.99 and
    more) and large enough for bfloat16, which keeps 1/256. Unused rows behind the last token get the mean of all, without noise.
    """
    rows = causal_lm.config.get_text_config().vocab_size
    wanted = rows_for(first + len(made_of), rows)
    tied = causal_lm.get_input_embeddings().weight is causal_lm.get_output_embeddings().weight
    if wanted > rows:
        causal_lm.resize_token_embeddings(wanted, mean_resizing=False)
    head = causal_lm.get_output_embeddings()
    tables: list[Optional[Tensor]] = [causal_lm.get_input_embeddings().weight]
    tables += [] if tied else [head.weight]
    tables += [] if head.bias is None else [head.bias[:, None]]
    if tied and head.weight is not tables[0]:
        raise ValueError(f"{type(causal_lm).__name__} doesn't keep its tied weights tied when it is resized.")
    for table in tables:
        _fill(table, first, rows, made_of, torch.Generator().manual_seed(seed))


def _fill(
    table: Tensor, first: int, old_rows: int, made_of: Sequence[Sequence[int]], generator: torch.Generator
) -> None:
    """See `add_rows`. table: [rows, width], of which those before `first` are old tokens'."""
    mean, spread = table[:first].mean(dim=0), table[:first].std(dim=0)
    seen: set[tuple[int, ...]] = set()
    for number, parts in enumerate(made_of, first):
        row = table[list(parts)].mean(dim=0) if parts else mean
        # Drawn also where it isn't used: a row depends on its place.
        noise = torch.randn(row.shape, generator=generator, dtype=row.dtype)
        same = tuple(sorted(parts))
        table[number] = row + NOISE * spread * noise if same in seen else row
        seen.add(same)
    end = first + len(made_of)
    if len(table) > old_rows and end > old_rows:
        table[end:] = mean
