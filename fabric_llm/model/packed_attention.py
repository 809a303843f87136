"""Attention of rows of packed documents, at the cost of the sum of the documents' squares, without
a mask of context x context, to plain transformers' numbers.

transformers knows it as "packed", and a model's layers hear where documents end in the arguments
that are there for flash attention (`cu_seq_lens_q` and so on).
"""

import inspect
from functools import partial
from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo import maybe_mark_dynamic
from torch.distributed import ProcessGroup
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import repeat_kv
from transformers.masking_utils import AttentionMaskInterface

PACKED = "packed"
# What varlen_attn, PyTorch's kernel for packed documents on GPUs, takes: heads of one size, a
# multiple of the one number and up to the other, and GPUs of this compute capability. See
# pytorch/aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp.
HEAD_SIZES, MAX_HEAD_SIZE, MIN_CAPABILITY = 8, 256, (8, 0)
# Torch 2.11 has no such argument: its kernel takes fewer heads of keys and values without it.
ASKS_FOR_GROUPS = "enable_gqa" in inspect.signature(varlen_attn).parameters
# Arguments of some models' attention that aren't computed here.
NOT_HERE = ("softcap", "s_aux", "position_bias")


def of_documents(ends: Tensor, longest: int, group: Optional[ProcessGroup]) -> dict[str, Any]:
    """What transformers hands to the attention of each layer. ends: see batches.document_ends.
    longest: at least the tokens of the longest document. One such number for all batches, and a
    mark that batches differ in their documents, spare compiled layers from being compiled again.
    group: the ranks that share the rows, each of which has a part of them."""
    maybe_mark_dynamic(ends, 0)
    given = {
        "cu_seq_lens_q": ends,
        "cu_seq_lens_k": ends,
        "max_length_q": longest,
        "max_length_k": longest,
    }
    return given if group is None else {**given, "context_group": group}


def no_kernel(
    capability: tuple[int, int], precision: str, head_size: int, dropout: float
) -> Optional[str]:
    """Why a GPU of this compute capability has no kernel for packed documents, in words; None where
    it has one.

    head_size, dropout: the largest that the model's attention has in training.
    """
    if precision == "32-true":
        return "it takes 16 bits"
    if capability < MIN_CAPABILITY:
        needed, here = (".".join(map(str, one)) for one in (MIN_CAPABILITY, capability))
        return f"it needs a GPU of compute capability {needed}, and this one has {here}"
    if head_size > MAX_HEAD_SIZE:
        return f"it takes heads of up to {MAX_HEAD_SIZE} dimensions, not of {head_size}"
    return "it has no dropout, and the model has" if dropout else None


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Optional[Tensor] = None,
    context_group: Optional[ProcessGroup] = None,
    **given: Any,
) -> tuple[Tensor, None]:
    """Causal attention inside each document, as transformers calls it. Returns [rows, context,
    heads, head size].

    query: [rows, heads, context, head size], key and value: the same, with as many heads or a
    fraction of them. context_group: ranks that have a part of each row's positions, see
    context_parallel.py. given: see `_of_rows`, and what it raises.
    """
    # Each rank has whole rows.
    if context_group is None:
        return _of_rows(query, key, value, **given), None
    # A feature that is off isn't imported.
    from fabric_llm.model.context_parallel import share_rows

    return share_rows(partial(_of_rows, **given), context_group, query, key, value), None


def _of_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scaling: Optional[float] = None,
    dropout: float = 0.0,
    sliding_window: Optional[int] = None,
    cu_seq_lens_q: Optional[Tensor] = None,
    max_length_q: Optional[int] = None,
    **more: Any,
) -> Tensor:
    """`packed_attention` of whole rows. Without boundaries each row is one document.

    Raises NotImplementedError for what some models add to the scores.
    """
    # Without this check the model would silently compute another function.
    for name in NOT_HERE:
        if more.get(name) is not None:
            raise NotImplementedError(f"packed attention has no {name}")
    rows, heads, context, _ = query.shape
    # How many heads of queries share one head of keys and values.
    groups = heads // key.shape[1]
    # As transformers does for SDPA: rotary positions leave query and key in float32.
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    # One document in each row: ends at multiples of the context.
    if cu_seq_lens_q is None:
        cu_seq_lens_q = torch.arange(
            0, rows * context + 1, context, dtype=torch.int32, device=query.device
        )
        max_length_q = context
    # They differ in models with latent attention.
    size, size_of_value = query.shape[-1], value.shape[-1]
    # varlen_attn has no dropout.
    is_flash = _has_kernel(query, max(size, size_of_value)) and not dropout
    # Only the kernel takes fewer heads of keys and values than of queries.
    if groups > 1 and not is_flash:
        key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    # [tokens, heads, head size]
    flat = [tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value)]
    if not is_flash:
        out = _one_by_one(flat, cu_seq_lens_q, scaling, dropout, sliding_window)
        return out.unflatten(0, (rows, context))
    ends, longest = cu_seq_lens_q.to(query.device), max_length_q or context
    # (-1, 0): all tokens before, none after. A window counts the token itself, hence - 1.
    options: dict[str, Any] = {"window_size": (-1, 0)}
    if sliding_window is not None:
        options["window_size"] = (sliding_window - 1, 0)
    if groups > 1 and ASKS_FOR_GROUPS:
        options["enable_gqa"] = True
    if scaling is None:  # not by the size to which heads are filled up
        scaling = size**-0.5
    out = varlen_attn(*_of_one_size(flat), ends, ends, longest, longest, scale=scaling, **options)
    return out[..., :size_of_value].unflatten(0, (rows, context))


def _has_kernel(query: Tensor, head_size: int) -> bool:
    """GPUs that are too old for it never get here, see run/reference.py."""
    return (
        query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and head_size <= MAX_HEAD_SIZE
    )


def _of_one_size(flat: list[Tensor]) -> list[Tensor]:
    """[tokens, heads, head size], filled up with zeros to the one head size that varlen_attn takes:
    they add nothing to a score."""
    largest = max(tensor.shape[-1] for tensor in flat)
    wanted = -(-largest // HEAD_SIZES) * HEAD_SIZES
    filled = []
    for tensor in flat:
        if tensor.shape[-1] < wanted:
            tensor = F.pad(tensor, (0, wanted - tensor.shape[-1]))
        filled.append(tensor)
    return filled


@torch.compiler.disable  # the number and lengths of documents differ from batch to batch
def _one_by_one(
    flat: list[Tensor],
    ends: Tensor,
    scaling: Optional[float],
    dropout: float,
    window: Optional[int],
) -> Tensor:
    # On a GPU the host waits for the device here.
    lengths = ends.diff().tolist()
    queries, keys, values = (tensor.split(lengths) for tensor in flat)
    return torch.cat(
        [_of_document(*one, scaling, dropout, window) for one in zip(queries, keys, values)]
    )


def _of_document(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: Optional[float],
    dropout: float,
    window: Optional[int],
) -> Tensor:
    """query, key, value: [tokens, heads, head size]. Of a window as many queries at once: a mask of
    all would be tokens x tokens."""
    length = len(query)
    # Without a window, or with one as long as the document, all queries at once.
    size = length if window is None or window >= length else window
    outputs = []
    for begin in range(0, length, size):
        end, first, mask = min(begin + size, length), max(0, begin - size + 1), None
        if size < length:
            # Row: a query. Column: a key. A query sees the `window` keys that end with its own.
            places = torch.arange(first, end, device=query.device)
            apart = places[begin - first :, None] - places
            mask = (apart >= 0) & (apart < window)
        # [1, heads, tokens, head size]
        some = (
            tensor.transpose(0, 1)[None]
            for tensor in (query[begin:end], key[first:end], value[first:end])
        )
        out = F.scaled_dot_product_attention(
            *some, attn_mask=mask, dropout_p=dropout, is_causal=mask is None, scale=scaling
        )
        outputs.append(out[0].transpose(0, 1))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


AttentionInterface.register(PACKED, packed_attention)
# Documents and windows are arguments of the attention function instead of a mask.
AttentionMaskInterface.register(PACKED, lambda *args, **more: None)
