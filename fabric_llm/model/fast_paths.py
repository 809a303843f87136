"""What is computed otherwise than in plain transformers, to the same numbers: the loss of a batch,
attention of packed rows.

`chunked_loss` takes each chunk of tokens through the model's own code between its last layer and
its logits, so that a bias, tied weights, soft-capping or a scale of the logits count as they do in
the model. The gradients of the hidden states and of the head are made in the same pass: nothing is
computed again, and the peak memory doesn't grow with vocabulary x tokens.

`packed_attention` costs the sum of the documents' squares, without a mask of context x context.
transformers knows it as "packed", and a model's layers hear where documents end in the arguments
that are there for flash attention (`cu_seq_lens_q` and so on).
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo import maybe_mark_dynamic
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.distributed._functional_collectives import all_to_all_single, wait_tensor
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import repeat_kv
from transformers.masking_utils import AttentionMaskInterface

# A CPU's chunk stays in its cache, a GPU's keeps the matrix products large.
LOGITS_AT_ONCE = {"cpu": 2**21, "cuda": 2**28}
PACKED = "packed"
# What varlen_attn, PyTorch's kernel for packed documents on GPUs, takes: heads of one size, a
# multiple of the one number and up to the other, and GPUs of this compute capability. See
# pytorch/aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp.
HEAD_SIZES, MAX_HEAD_SIZE, MIN_CAPABILITY = 8, 256, (8, 0)
KNOWS_GROUPS = "enable_gqa" in inspect.signature(varlen_attn).parameters  # not in torch 2.11
# of some models' attention: what isn't computed here
NOT_HERE = (
    "softcap",
    "s_aux",
    "position_bias",
)
# logits [tokens, vocabulary], targets int64 [tokens] -> sum, scalar
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
        outputs = self.returns(last_hidden_state=hidden[None])
        before = vars(self.base).get("forward")
        self.base.forward = lambda *args, **inputs: outputs
        try:
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
    # else it would make gradients all the same
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
                # PyTorch's compiler warns of any other
                leaf = logits.detach().requires_grad_(logits.requires_grad)
                loss = token_loss(leaf, chunk_targets)
                trained = loss if loss.ndim == 0 else loss[0]
            total = total + loss.detach()
            if loss.requires_grad:
                trained.backward()
                wanted = [chunk, *tensors] if needs_hidden else tensors
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


def takes_documents(model_class: type[PreTrainedModel]) -> bool:
    """Whether transformers says that the class takes `of_documents`. gate.takes_packed_attention
    measures if it uses them."""
    return model_class._supports_flash_attn and model_class._supports_sdpa


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
    scaling: Optional[float] = None,
    dropout: float = 0.0,
    sliding_window: Optional[int] = None,
    cu_seq_lens_q: Optional[Tensor] = None,
    max_length_q: Optional[int] = None,
    context_group: Optional[ProcessGroup] = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Causal attention inside each document, as transformers calls it. Returns [rows, context,
    heads, head size].

    query: [rows, heads, context, head size], key and value: the same, with as many heads or a part
    of them. Without boundaries each row is one document. Raises NotImplementedError for what some
    models add to the scores.

    context_group: ranks that have a part of each row's positions, see `share_rows`.
    """
    if context_group is not None:
        more |= {"attention_mask": attention_mask, "scaling": scaling, "dropout": dropout}
        more |= {
            "sliding_window": sliding_window,
            "cu_seq_lens_q": cu_seq_lens_q,
            "max_length_q": max_length_q,
        }
        whole = partial(packed_attention, module, **more)
        return share_rows(
            lambda *tensors: whole(*tensors)[0], context_group, query, key, value
        ), None
    if added := [name for name in NOT_HERE if more.get(name) is not None]:
        raise NotImplementedError(f"packed attention has no {added[0]}")
    rows, heads, context, _ = query.shape
    groups = heads // key.shape[1]
    # As it does for SDPA: rotary positions leave query and key in float32.
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = (tensor.to(dtype) for tensor in (query, key, value))
    if cu_seq_lens_q is None:
        cu_seq_lens_q = torch.arange(
            0, rows * context + 1, context, dtype=torch.int32, device=query.device
        )
        max_length_q = context
    sizes = query.shape[-1], value.shape[-1]
    is_flash = _has_kernel(query, max(sizes)) and not dropout
    if groups > 1 and not (is_flash and KNOWS_GROUPS):
        key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    # [tokens, heads, head size]
    flat = [tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value)]
    if is_flash:
        ends, longest = cu_seq_lens_q.to(query.device), max_length_q or context
        options: dict[str, Any] = {"enable_gqa": True} if groups > 1 and KNOWS_GROUPS else {}
        options["window_size"] = (-1 if sliding_window is None else sliding_window - 1, 0)
        flat, scaling = _of_one_size(flat), sizes[0] ** -0.5 if scaling is None else scaling
        out = varlen_attn(*flat, ends, ends, longest, longest, scale=scaling, **options)[
            ..., : sizes[1]
        ]
    else:
        out = _one_by_one(flat, cu_seq_lens_q, scaling, dropout, sliding_window)
    return out.unflatten(0, (rows, context)), None


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
    wanted = -(-max(tensor.shape[-1] for tensor in flat) // HEAD_SIZES) * HEAD_SIZES
    return [
        tensor if tensor.shape[-1] == wanted else F.pad(tensor, (0, wanted - tensor.shape[-1]))
        for tensor in flat
    ]


def share_rows(
    attention: Callable[..., Tensor], group: ProcessGroup, query: Tensor, key: Tensor, value: Tensor
) -> Tensor:
    """`attention(query, key, value)` of ranks that have a part of each row's positions: [rows,
    context, heads, head size].

    They exchange positions for heads, of which each then has a part and all positions, and exchange
    them back: DeepSpeed-Ulysses, https://arxiv.org/abs/2309.14509.
    """
    if key.shape[1] % group.size():  # each rank needs those of its queries
        key, value = (repeat_kv(tensor, query.shape[1] // key.shape[1]) for tensor in (key, value))
    whole = (_positions_for_heads(tensor, group) for tensor in (query, key, value))
    return _positions_for_heads(attention(*whole), group)


def _positions_for_heads(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """Or heads for positions. tensor: [rows, what is given away, what is joined, head size]."""
    return _Exchange.apply(tensor, group, 1, 2)


class _Exchange(torch.autograd.Function):
    """Each rank gives every other one its part of a dimension, and lays the parts that it is given
    one behind the other in another."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: ProcessGroup, given: int, joined: int) -> Tensor:
        ctx.how = group, joined, given
        return _exchange(tensor, group, given, joined)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Optional[Tensor], ...]:
        return _exchange(gradient, *ctx.how), None, None, None


def _exchange(tensor: Tensor, group: ProcessGroup, given: int, joined: int) -> Tensor:
    """By a functional collective, which can be a part of a compiled graph, as a checkpointed layer
    must be as a whole."""
    parts = torch.stack(tensor.chunk(group.size(), dim=given))
    received = wait_tensor(all_to_all_single(parts.flatten(0, 1), None, None, group)).view(
        parts.shape
    )
    return torch.cat(received.unbind(), dim=joined)


@torch.compiler.disable  # the number and lengths of documents differ from batch to batch
def _one_by_one(
    flat: list[Tensor],
    ends: Tensor,
    scaling: Optional[float],
    dropout: float,
    window: Optional[int],
) -> Tensor:
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
    size = length if window is None or window >= length else window
    found = []
    for begin in range(0, length, size):
        end, first, mask = min(begin + size, length), max(0, begin - size + 1), None
        if size < length:
            places = torch.arange(first, end, device=query.device)
            apart = places[begin - first :, None] - places
            mask = (apart >= 0) & (apart < window)
        some = (
            tensor.transpose(0, 1)[None]
            for tensor in (query[begin:end], key[first:end], value[first:end])
        )
        out = F.scaled_dot_product_attention(
            *some, attn_mask=mask, dropout_p=dropout, is_causal=mask is None, scale=scaling
        )
        found.append(out[0].transpose(0, 1))
    return found[0] if len(found) == 1 else torch.cat(found)


AttentionInterface.register(PACKED, packed_attention)
# Documents and windows are arguments of the attention function instead of a mask.
AttentionMaskInterface.register(PACKED, lambda *args, **more: None)
