"""`plain_update` of adamw_rounded.py on a GPU, in one pass over memory, as a Triton kernel. Only GPUs import this."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

BLOCK_ELEMENTS = 1024


def update(tensors: Sequence[Tensor], first: int, key: tuple[int, int, int], numbers: list[float]) -> None:
    """As `plain_update`."""
    count, first = tensors[0].numel(), (first + 2**31) % 2**32 - 2**31  # the int32 with the same bits
    _kernel[(triton.cdiv(count, BLOCK_ELEMENTS),)](
        *(*tensors, count, first, *key, *numbers),
        BLOCK=BLOCK_ELEMENTS,
        enable_fp_fusion=False,  # a * b + c is rounded twice, as in plain PyTorch
    )


@triton.jit(do_not_specialize=["count", "first", "key0", "key1", "key2"])
def _kernel(
    param, grad, exp_avg, exp_avg_sq, count, first, key0, key1, key2,
    decay, grad_weight, beta2, square_weight, bias, eps, step_size, BLOCK: tl.constexpr
):  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * BLOCK
    lane = tl.arange(0, BLOCK)
    at = start + lane
    inside = at < count

    x = (first + start.to(tl.int32) + lane).to(tl.uint32, bitcast=True) ^ key0.to(tl.uint32, bitcast=True)
    x = ((x ^ (x >> 16)) * 0x7FEB352D) ^ key1.to(tl.uint32, bitcast=True)
    x = (x ^ (x >> 15)) * 0x846CA68B
    x = x ^ (x >> 16)
    y = x ^ key2.to(tl.uint32, bitcast=True)
    y = (y ^ (y >> 15)) * 0x31848BAB

    g = tl.load(grad + at, mask=inside, other=0).to(tl.float32)
    p = _widen(tl.load(param + at, mask=inside, other=0))
    m = _widen(tl.load(exp_avg + at, mask=inside, other=0))
    v = _widen(tl.load(exp_avg_sq + at, mask=inside, other=0))
    m = m + (g - m) * grad_weight
    v = v * beta2 + g * g * square_weight
    p = p * decay - tl.div_rn(m, tl.sqrt_rn(v) * bias + eps) * step_size

    tl.store(param + at, _round_up_or_down(p, x >> 16), mask=inside)
    tl.store(exp_avg + at, _round_up_or_down(m, x & 0xFFFF), mask=inside)
    tl.store(exp_avg_sq + at, _round_up_or_down(v, y >> 16), mask=inside)


@triton.jit
def _widen(value):
    """bfloat16 -> float32, also of NaNs and denormals."""
    return (value.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _round_up_or_down(value, noise):
    """float32 -> bfloat16."""
    bits = (value.to(tl.uint32, bitcast=True) + noise) >> 16
    return tl.where(value == value, bits, 0x7FC0).to(tl.int16).to(tl.bfloat16, bitcast=True)
