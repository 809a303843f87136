"""Attention over packed rows that costs the sum of its documents' squares: no mask of context x context anywhere.

It is registered with transformers as the attention implementation "packed". Where the documents are, a model's layers hear in
the arguments that transformers has for flash attention (`cu_seq_lens_q` and so on).
"""

from __future__ import annotations

import inspect
from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import repeat_kv
from transformers.masking_utils import AttentionMaskInterface

NAME = "packed"
KNOWS_GROUPS = "enable_gqa" in inspect.signature(varlen_attn).parameters  # not in torch 2.11
NOT_HERE = ("softcap", "s_aux", "position_bias")  # of some models' attention: what isn't computed here


def arguments(ends: Tensor, longest: int) -> dict[str, Any]:
    """What transformers hands to the attention of each layer.

    ends: see batches.document_ends. longest: at least the tokens of the longest document; one number for all batches spares
    compiled layers from being compiled again.
    """
    return {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}


def fits(model_class: type[PreTrainedModel]) -> bool:
    """Whether transformers says that the class takes these arguments. capabilities.find_leak measures whether it uses them."""
    return model_class._supports_flash_attn and model_class._supports_sdpa


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Optional[Tensor] = None,
    scaling: Optional[float] = None,
    dropout: float = 0.0,
    sliding_window: Optional[int] = None,
    cu_seq_lens_q: Optional[Tensor] = None,
    max_length_q: Optional[int] = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Causal attention inside each document, as transformers calls it. Returns [rows, context, heads, head size].

    query: [rows, heads, context, head size], key and value: the same, with as many heads or a part of them. Without
    boundaries each row is one document. Raises NotImplementedError for what some models add to the scores.
    """
    if added := [name for name in NOT_HERE if more.get(name) is not None]:
        raise NotImplementedError(f"packed attention has no {added[0]}")
    rows, heads, context, _ = query.shape
    if cu_seq_lens_q is None:
        cu_seq_lens_q = torch.arange(0, rows * context + 1, context, dtype=torch.int32, device=query.device)
        max_length_q = context
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and not dropout:
        flat = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))
        out = _flash(*flat, cu_seq_lens_q.to(query.device), max_length_q or context, scaling, sliding_window)
        return out.unflatten(0, (rows, context)), None
    groups = heads // key.shape[1]
    key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    out = _one_by_one(query, key, value, cu_seq_lens_q, scaling, dropout, sliding_window)
    return out.transpose(1, 2).contiguous(), None


def _flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends: Tensor,
    longest: int,
    scaling: Optional[float],
    window: Optional[int],
) -> Tensor:
    """torch's flash attention of documents of any length. query: [tokens, heads, head size], contiguous."""
    options: dict[str, Any] = {"scale": scaling, "window_size": (-1 if window is None else window - 1, 0)}
    if key.shape[1] != query.shape[1]:
        if KNOWS_GROUPS:
            options["enable_gqa"] = True
        else:
            groups = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    return varlen_attn(query, key, value, ends, ends, longest, longest, **options)


@torch.compiler.disable  # the number and lengths of documents differ from batch to batch
def _one_by_one(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends: Tensor,
    scaling: Optional[float],
    dropout: float,
    window: Optional[int],
) -> Tensor:
    """[rows, heads, context, head size]: SDPA of one document after the other; neighbouring rows of one document together."""
    runs = _runs(_lengths_of_rows(ends, len(query), query.shape[2]))
    sizes, outputs = [count for count, _ in runs], []
    for of_run, (_, lengths) in zip(zip(*(tensor.split(sizes) for tensor in (query, key, value))), runs):
        pieces = zip(*(tensor.split(lengths, dim=2) for tensor in of_run))
        outputs.append(torch.cat([_of_document(*piece, scaling, dropout, window) for piece in pieces], dim=2))
    return torch.cat(outputs)


def _runs(lengths: list[list[int]]) -> list[tuple[int, list[int]]]:
    """[[8], [8], [3, 5]] -> [(2, [8]), (1, [3, 5])]: rows that hold one document are computed side by side."""
    runs: list[tuple[int, list[int]]] = []
    for of_row in lengths:
        if runs and len(of_row) == 1 and runs[-1][1] == of_row:
            runs[-1] = runs[-1][0] + 1, of_row
        else:
            runs.append((1, of_row))
    return runs


def _of_document(
    query: Tensor, key: Tensor, value: Tensor, scaling: Optional[float], dropout: float, window: Optional[int]
) -> Tensor:
    length, mask = query.shape[2], None
    if window is not None and window < length:
        mask = torch.ones(length, length, dtype=torch.bool, device=query.device).tril().triu(1 - window)
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=mask is None, scale=scaling
    )


def _lengths_of_rows(ends: Tensor, rows: int, context: int) -> list[list[int]]:
    """[0, 3, 8, 12, 16], 2 rows of 8 -> [[3, 5], [4, 4]]"""
    lengths: list[list[int]] = [[] for _ in range(rows)]
    places = ends.tolist()
    for begin, end in zip(places, places[1:]):
        lengths[begin // context].append(end - begin)
    return lengths


def _no_mask(*args: Any, **more: Any) -> None:
    """Documents and windows are arguments of the attention function instead."""


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, _no_mask)
