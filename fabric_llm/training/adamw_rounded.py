"""AdamW of bfloat16 numbers with stochastic rounding: in plain PyTorch, and by kernels that must
give the same bits.

Zamirai et al. (2020), Revisiting BFloat16 Training, arXiv:2010.06192. All arithmetic is float32 or
int32, one operation at a time, and each operation is rounded exactly as IEEE 754 says. So the same
inputs give the same bits on any device, and in any kernel that does the same operations in the same
order: adamw.cpp on CPUs, adamw_triton.py on GPUs.
"""

import ctypes
import hashlib
import math
import os
import shlex
import struct
import subprocess
import tempfile
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Callable

import torch
from torch import Tensor

Key = tuple[int, int, int]  # three int32
# Contiguous tensors, the first index modulo 2**32, and the key of the noise.
Piece = tuple[Sequence[Tensor], int, Key]
Update = Callable[[Sequence[Piece], list[float]], None]  # as `plain_update`
# Of a rank's piece of a parameter: its name, and the index of its first element in the whole.
Origin = tuple[str, int]
PIECE_ELEMENTS = {"cpu": 2**20}  # what a CPU's thread does at a time
# Elements of a comparison in which all addresses are multiples of 16, as kernels like them.
ALIGNED_ELEMENTS = 3 * 2**13
# What plain PyTorch does at a time. It needs 8 MiB on a CPU, 512 MiB on a GPU.
PLAIN_ELEMENTS = {"cpu": 2**17, "cuda": 2**23}
# Contraction would round a * b + c once instead of twice. Roots are vectorised only without errno
# and traps.
COMPILER_FLAGS = ["-std=c++17", "-O3", "-funroll-loops", "-march=native", "-shared", "-fPIC"]
COMPILER_FLAGS += ["-pthread", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]


def rounded_step(pieces: Sequence[Piece], group: dict[str, Any], step: int, update: Update) -> None:
    """A step of AdamW by an `update`, see `plain_update`. pieces: on one device."""
    numbers = numbers_of(group, step)
    if group["lr"] != 0:
        return update(pieces, numbers)
    # The moments are updated, and what the parameter would become is dropped.
    for (param, *others), first, key in pieces:  # not even a -0.0 may change
        update([([param.clone(), *others], first, key)], numbers)


def pieces_of_all(
    parameters: Sequence[tuple[list[Tensor], Origin]], seed: int, step: int
) -> list[Piece]:
    """parameters: (tensors that an update takes, their origin), on one device."""
    # On a GPU one piece takes a whole parameter, as far as its indices have 32 bits.
    limit = PIECE_ELEMENTS.get(parameters[0][0][0].device.type, 2**32)
    pieces: list[Piece] = []
    for tensors, origin in parameters:
        pieces += pieces_of(tensors, origin, limit, seed, step)
    return pieces


def pieces_of(
    tensors: Sequence[Tensor], origin: Origin, limit: int, seed: int, step: int
) -> Iterator[Piece]:
    """Cut contiguous tensors into pieces of at most `limit` elements: (a piece of each, first index
    modulo 2**32, key of the noise).

    No piece crosses a multiple of 2**32, because kernels count indices in 32 bits; the higher bits
    go into the key.
    """
    (name, offset), start, count = origin, 0, tensors[0].numel()
    while start < count:
        # The place in the whole parameter, so that another sharding gives the same noise.
        high, first = divmod(offset + start, 2**32)
        end = min(start + limit, start + 2**32 - first, count)
        # Most pieces are whole parameters. Cutting them would take longer than a small update.
        whole = end - start == count
        cut = tensors if whole else [tensor.view(-1)[start:end] for tensor in tensors]
        yield cut, first, key_of(seed, step, name, high)
        start = end


def key_of(seed: int, step: int, name: str, high: int) -> Key:
    """The key of the noise for the elements of a parameter with index // 2**32 == high."""
    # Such a hash is slow, but a piece needs only one key in a step.
    digest = hashlib.blake2b(repr((seed, step, name, high)).encode(), digest_size=12).digest()
    return struct.unpack("<3i", digest)


def numbers_of(group: dict[str, Any], step: int) -> list[float]:
    """The numbers of an update, computed in float64 on the host and rounded to float32: the same
    for every device."""
    (beta1, beta2), lr = group["betas"], group["lr"]
    decay, step_size = 1 - lr * group["weight_decay"], lr / (1 - beta1**step)
    bias = 1 / math.sqrt(1 - beta2**step)
    # They are in the order of `plain_update`.
    exact = (decay, 1 - beta1, beta2, 1 - beta2, bias, group["eps"], step_size)
    return torch.tensor(exact, dtype=torch.float64).float().tolist()


def plain_update(pieces: Sequence[Piece], numbers: list[float]) -> None:
    """Update pieces of (param, grad, exp_avg, exp_avg_sq) in place: bfloat16, the gradients of any
    one dtype."""
    decay, grad_weight, beta2, square_weight, bias, eps, step_size = numbers
    for tensors, first, key in pieces:
        block = PLAIN_ELEMENTS["cpu" if tensors[0].device.type == "cpu" else "cuda"]
        for start in range(0, tensors[0].numel(), block):
            param, grad, exp_avg, exp_avg_sq = (
                tensor.view(-1)[start : start + block] for tensor in tensors
            )
            p, g, m, v = (tensor.float() for tensor in (param, grad, exp_avg, exp_avg_sq))
            m.add_((g - m).mul_(grad_weight))
            v.mul_(beta2).add_((g * g).mul_(square_weight))
            # torch's float32 root, from MKL, misses the nearest number in 20 % of cases.
            root = v.double().sqrt_().float()
            p.mul_(decay).sub_(m.div(root.mul_(bias).add_(eps)).mul_(step_size))
            noises = noise(first + start, p.numel(), key, p.device)
            for target, value, bits in zip((param, exp_avg, exp_avg_sq), (p, m, v), noises):
                # Bits, not values: copied to bfloat16 they would be converted as integers.
                target.view(torch.int16).copy_(bfloat16_bits(value, bits))


@torch.no_grad()
def round_stochastically(
    target: Tensor, values: Tensor, origin: Origin, seed: int, step: int
) -> None:
    """Write float32 `values` into a contiguous bfloat16 `target` of their shape, on average
    exactly.

    The same on any devices: a function of the values, seed, step, and of where `target` lies in its
    parameter.
    """
    limit = PLAIN_ELEMENTS["cpu" if target.device.type == "cpu" else "cuda"]
    for (part, exact), first, key in pieces_of(
        [target, values.contiguous()], origin, limit, seed, step
    ):
        bits = noise(first, part.numel(), key, part.device)[0]
        rounded = bfloat16_bits(exact.to(torch.float32, copy=True).view(-1), bits)
        part.view(-1).view(torch.int16).copy_(rounded)


def rows_of(pieces: Sequence[Piece]) -> array:
    """What a kernel needs to know of each piece, ROW numbers of 64 bits: four addresses, the count
    of elements, the first index, and three words of the key."""
    rows = array("q")
    for tensors, first, key in pieces:
        rows.extend((*(tensor.data_ptr() for tensor in tensors), tensors[0].numel(), first, *key))
    return rows


def bfloat16_bits(values: Tensor, noise: Tensor) -> Tensor:
    """float32 -> the bits of bfloat16s as int32 in -2**15..2**15-1, rounded stochastically, in the
    memory of `values`.

    bfloat16 is the upper half of float32's bits. Adding noise, int32 in 0..2**16-1, carries into it
    with probability lower half / 2**16, so the mean is exact, and bfloat16 numbers stay. NaNs are
    made canonical so that none carries into the sign.
    """
    torch.nan_to_num_(values, nan=math.nan, posinf=math.inf, neginf=-math.inf)
    return values.view(torch.int32).add_(noise).bitwise_right_shift_(16)


def noise(first: int, count: int, key: Key, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Uniform int32 [count] in 0..2**16-1 for parameter, exp_avg and exp_avg_sq: a function of
    (key, index) alone.

    Shifts and factors are those of Wellons' hash-prospector (github.com/skeeto/hash-prospector):
    lowbias32, whose 32 bits serve two tensors, then the last round of triple32. A key goes in
    before each multiplication, so that no step's noise is another's, shifted.
    tests/test_adamw_kernels.py tests all of this.
    """

    def upper(x: Tensor, shift: int) -> Tensor:  # x >> shift of unsigned numbers
        return (x >> shift).bitwise_and_(2 ** (32 - shift) - 1)

    signed = (first + 2**31) % 2**32 - 2**31  # int32, which wraps around
    x = torch.arange(count, dtype=torch.int32, device=device).add_(signed).bitwise_xor_(key[0])
    x.bitwise_xor_(upper(x, 16)).mul_(0x7FEB352D).bitwise_xor_(key[1])
    x.bitwise_xor_(upper(x, 15)).mul_(0x846CA68B - 2**32)
    x.bitwise_xor_(upper(x, 16))
    y = x ^ key[2]
    y.bitwise_xor_(upper(y, 15)).mul_(0x31848BAB)
    return upper(x, 16), x & 0xFFFF, upper(y, 16)


def compiled() -> Update:
    """`plain_update` in one pass over memory, for a CPU: adamw.cpp, compiled by c++ or by what CXX
    names.

    Compiling takes half a second and leaves no files. ctypes passes addresses, so no header of
    Python or torch is needed.
    """
    with tempfile.TemporaryDirectory() as folder:
        source, library = str(Path(__file__).with_name("adamw.cpp")), f"{folder}/adamw.so"
        command = [
            *shlex.split(os.environ.get("CXX", "c++")),
            *COMPILER_FLAGS,
            source,
            "-o",
            library,
        ]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
        function = ctypes.CDLL(library).update  # it stays in memory without its file
    function.restype = None
    function.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int] + [ctypes.c_float] * 7

    def update(pieces: Sequence[Piece], numbers: list[float]) -> None:
        if pieces[0][0][1].dtype != torch.bfloat16:  # a gradient of another dtype is rare
            return plain_update(pieces, numbers)
        # The array must live as long as the call, which reads its address.
        rows = rows_of(pieces)
        function(rows.buffer_info()[0], len(pieces), torch.get_num_threads(), *numbers)

    return update


def equals_plain(update: Update, device: torch.device, count: int = 2**14 + 13) -> bool:
    """Whether an update gives the bits of plain PyTorch on a CPU, for numbers of all sizes,
    infinities and NaNs."""
    generator = torch.Generator().manual_seed(0)
    # The bits of any bfloat16, NaNs among them.
    every = torch.randint(-(2**15), 2**15, (4, count), generator=generator).to(torch.int16)
    usual = torch.randn(4, count, generator=generator).bfloat16().view(torch.int16)
    group = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    for expected in (every, usual):
        expected[3].bitwise_and_(2**15 - 1)  # exp_avg_sq has no sign
        result = expected.to(device, copy=True)
        # The moments that one step leaves are the input of the next.
        for step in (1, 2, 1000):
            numbers, key = numbers_of(group, step), key_of(0, step, "name", 1)
            for one, tensors in ((update, result), (plain_update, expected)):
                cut = count // 3  # into two pieces of different lengths
                flat = tensors.view(torch.bfloat16)
                # The second piece ends with the last index that fits into 32 bits.
                parts = [
                    (list(flat[:, :cut]), 2**32 - count, key),
                    (list(flat[:, cut:]), 2**32 - count + cut, key),
                ]
                one(parts, numbers)
        if not torch.equal(result.cpu(), expected):
            return False
    return True
