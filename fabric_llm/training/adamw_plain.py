"""One AdamW update of bfloat16 numbers with stochastic rounding, in plain PyTorch: what every kernel must equal.

Zamirai et al. (2020), Revisiting BFloat16 Training, arXiv:2010.06192. All arithmetic is float32 or int32, one operation
at a time, and each operation is rounded exactly as IEEE 754 says. So the same inputs give the same bits on any device,
and in any kernel that does the same operations in the same order: adamw.cpp and adamw_triton.py.
"""

from __future__ import annotations

import hashlib
import math
import struct
from typing import Any, NamedTuple

import torch
from torch import Tensor

BLOCK_ELEMENTS = {"cpu": 2**17, "cuda": 2**23}  # what a step needs besides: 8 MiB on a CPU, 512 MiB on a GPU
Key = tuple[int, int, int]  # three int32


class Numbers(NamedTuple):
    """The numbers of an update, each one exactly a float32. With t steps taken, this one included:"""

    decay: float  # 1 - lr * weight_decay
    grad_weight: float  # 1 - beta1
    beta2: float
    square_weight: float  # 1 - beta2
    bias: float  # 1 / sqrt(1 - beta2**t)
    eps: float
    step_size: float  # lr / (1 - beta1**t)


def numbers_of(group: dict[str, Any], step: int) -> Numbers:
    """From an optimizer's group, computed in float64 and rounded once, on the host: the same for every device."""
    (beta1, beta2), lr = group["betas"], group["lr"]
    decay, step_size = 1 - lr * group["weight_decay"], lr / (1 - beta1**step)
    bias = 1 / math.sqrt(1 - beta2**step)
    exact = decay, 1 - beta1, beta2, 1 - beta2, bias, group["eps"], step_size
    return Numbers(*torch.tensor(exact, dtype=torch.float64).float().tolist())


def key_of(seed: int, step: int, name: str, high: int) -> Key:
    """The key of the noise of 2**32 elements of a parameter: those whose index divided by 2**32 is `high`."""
    digest = hashlib.blake2b(repr((seed, step, name, high)).encode(), digest_size=12).digest()
    return struct.unpack("<3i", digest)


def update(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, first: int, key: Key, numbers: Numbers
) -> None:
    """Update a piece of a parameter and its moments in place: one-dimensional, bfloat16, `grad` of any dtype.

    first: index of the piece's first element in the whole parameter, modulo 2**32. No index of the piece may pass 2**32.
    """
    tensors = param, grad, exp_avg, exp_avg_sq
    block = BLOCK_ELEMENTS["cpu" if param.device.type == "cpu" else "cuda"]
    for start in range(0, param.numel(), block):
        _update_block(*(tensor[start : start + block] for tensor in tensors), first + start, key, numbers)


def _update_block(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, first: int, key: Key, numbers: Numbers
) -> None:
    p, g, m, v = param.float(), grad.float(), exp_avg.float(), exp_avg_sq.float()
    m.add_((g - m).mul_(numbers.grad_weight))
    v.mul_(numbers.beta2).add_((g * g).mul_(numbers.square_weight))
    root = v.double().sqrt_().float()  # torch's own float32 root, from MKL, misses the nearest number in 20 % of cases
    p.mul_(numbers.decay).sub_(m.div(root.mul_(numbers.bias).add_(numbers.eps)).mul_(numbers.step_size))
    for target, value, bits in zip((param, exp_avg, exp_avg_sq), (p, m, v), noise(first, p.numel(), key, p.device)):
        target.view(torch.int16).copy_(bfloat16_bits(value, bits))


def bfloat16_bits(values: Tensor, noise: Tensor) -> Tensor:
    """float32 -> the bits of bfloat16s as int32 in -2**15..2**15-1, rounded stochastically, in the memory of `values`.

    `noise`: int32, each one uniform in 0..2**16-1. bfloat16 is the upper half of float32's bits; the noise carries into
    it with the probability of the lower half / 2**16. So the mean is exact, and what fits in bfloat16 stays.
    A carry out of the largest number gives infinity; NaNs are made canonical so that none carries into the sign.
    """
    infinity = float("inf")
    torch.nan_to_num_(values, nan=float("nan"), posinf=infinity, neginf=-infinity)
    return values.view(torch.int32).add_(noise).bitwise_right_shift_(16)


def noise(first: int, count: int, key: Key, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Uniform int32 [count] in 0..2**16-1 for parameter, exp_avg and exp_avg_sq: a function of (key, index) alone.

    Shifts and factors are those of Wellons' hash-prospector (github.com/skeeto/hash-prospector): lowbias32, then the last
    round of triple32. 32 bits of the first serve two tensors: each index has others, so the two halves are as independent
    as two numbers; the round makes the rest. A key goes in before each multiplication, so that no step's noise is another's,
    shifted. tests/test_adamw_kernels.py tests all of this.
    """
    x = torch.arange(count, dtype=torch.int32, device=device)
    x.add_(_int32(first)).bitwise_xor_(key[0])  # int32 wraps around
    _mix_(x, 16, 0x7FEB352D).bitwise_xor_(key[1])
    _mix_(x, 15, 0x846CA68B)
    high = _upper(x, 16)
    x.bitwise_xor_(high)
    y = _mix_(x ^ key[2], 15, 0x31848BAB)
    return high, x.bitwise_and_(0xFFFF), _upper(y, 16)


def _mix_(x: Tensor, shift: int, factor: int) -> Tensor:
    return x.bitwise_xor_(_upper(x, shift)).mul_(_int32(factor))


def _upper(x: Tensor, shift: int) -> Tensor:
    """x >> shift of unsigned numbers."""
    return (x >> shift).bitwise_and_(2 ** (32 - shift) - 1)


def _int32(number: int) -> int:
    """The int32 with the bits of a number modulo 2**32."""
    return (number + 2**31) % 2**32 - 2**31
