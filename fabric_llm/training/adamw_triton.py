"""`plain_update` of adamw_rounded.py on a GPU, in one pass over memory, as a Triton kernel. Only
GPUs import this.

One launch updates all pieces. A table on the device says where each is: a program finds the piece
that its tile belongs to, and makes pointers of the addresses.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from fabric_llm.training.adamw_rounded import Piece, rows_of

BLOCK_ELEMENTS = 1024  # 8 for each of 128 threads: 16 bytes, the most that one instruction loads
TILE_ELEMENTS = 16 * BLOCK_ELEMENTS  # of a program
TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def update(pieces: Sequence[Piece], numbers: list[float]) -> None:
    """As `plain_update`."""
    rows, first_tiles, tiles = rows_of(pieces), array("q"), 0
    for (param, *_), _, _ in pieces:
        # The number of the tile at which the piece begins, counted over all pieces.
        first_tiles.append(tiles)
        tiles += triton.cdiv(param.numel(), TILE_ELEMENTS)
    (param, grad, *_), _, _ = pieces[0]
    size = len(rows) // len(pieces)
    # Only for aligned addresses may the kernel load 16 bytes at a time.
    is_aligned = all(address % 16 == 0 for column in range(4) for address in rows[column::size])
    # The rows, and behind them the first tile of each piece.
    table = torch.frombuffer(rows + first_tiles, dtype=torch.int64)
    # From pinned memory the copy doesn't make the host wait.
    table = table.pin_memory() if param.is_cuda else table
    _kernel[(tiles,)](
        *(table.to(param.device, non_blocking=True), len(pieces), *numbers),
        ROW=size,
        GRAD=TYPES[grad.dtype],
        ALIGNED=is_aligned,
        BLOCK=BLOCK_ELEMENTS,
        TILE=TILE_ELEMENTS,
        enable_fp_fusion=False,  # a * b + c is rounded twice, as in plain PyTorch
    )


# By default Triton compiles a kernel of its own for an integer that is 1, or a multiple of 16.
@triton.jit(do_not_specialize=["pieces"])
def _kernel(
    table, pieces, decay, grad_weight, beta2, square_weight, bias, eps, step_size,
    ROW: tl.constexpr, GRAD: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    # A binary search in the table for the piece that this program's tile belongs to.
    tile, first_tiles = tl.program_id(0), table + pieces * ROW
    piece, end = 0, pieces  # the last piece whose first tile isn't after this one
    while end - piece > 1:
        middle = (piece + end) // 2
        is_after = tl.load(first_tiles + middle) > tile
        piece, end = tl.where(is_after, piece, middle), tl.where(is_after, middle, end)

    row = table + piece * ROW
    param, grad = _pointer(row, tl.bfloat16, ALIGNED), _pointer(row + 1, GRAD, ALIGNED)
    exp_avg, exp_avg_sq = (
        _pointer(row + 2, tl.bfloat16, ALIGNED),
        _pointer(row + 3, tl.bfloat16, ALIGNED),
    )
    count, first = tl.load(row + 4), tl.load(row + 5).to(tl.uint32)
    key0, key1, key2 = (
        tl.load(row + 6).to(tl.uint32),
        tl.load(row + 7).to(tl.uint32),
        tl.load(row + 8).to(tl.uint32),
    )
    # In elements, from the beginning of the piece.
    begin = (tile - tl.load(first_tiles + piece)) * TILE
    for block in range(TILE // BLOCK):
        start = begin + block * BLOCK
        if start + BLOCK <= count:
            _block(
                param, grad, exp_avg, exp_avg_sq, start, count, first, key0, key1, key2,
                decay, grad_weight, beta2, square_weight, bias, eps, step_size, BLOCK, True
            )  # fmt: skip
        elif start < count:
            _block(
                param, grad, exp_avg, exp_avg_sq, start, count, first, key0, key1, key2,
                decay, grad_weight, beta2, square_weight, bias, eps, step_size, BLOCK, False
            )  # fmt: skip


@triton.jit
def _pointer(field, dtype: tl.constexpr, ALIGNED: tl.constexpr):
    """The address in a field of the table, as a pointer."""
    pointer = tl.load(field).to(tl.pointer_type(dtype))
    return tl.multiple_of(pointer, 16) if ALIGNED else pointer


@triton.jit
def _block(
    param, grad, exp_avg, exp_avg_sq, start, count, first, key0, key1, key2,
    decay, grad_weight, beta2, square_weight, bias, eps, step_size,
    BLOCK: tl.constexpr, WHOLE: tl.constexpr
):  # fmt: skip
    """Update BLOCK elements, or as many as there are. Only whole blocks are loaded and stored 16
    bytes at a time."""
    lane = tl.arange(0, BLOCK)
    at = start + lane
    inside = None if WHOLE else at < count

    # The noise, as `noise` in adamw_rounded.py makes it, in unsigned arithmetic.
    x = (first + start.to(tl.uint32) + lane.to(tl.uint32)) ^ key0
    x = ((x ^ (x >> 16)) * 0x7FEB352D) ^ key1
    x = (x ^ (x >> 15)) * 0x846CA68B
    x = x ^ (x >> 16)
    y = x ^ key2
    y = (y ^ (y >> 15)) * 0x31848BAB

    g = tl.load(grad + at, mask=inside)
    g = _widen(g) if g.dtype == tl.bfloat16 else g.to(tl.float32)
    p = _widen(tl.load(param + at, mask=inside))
    m = _widen(tl.load(exp_avg + at, mask=inside))
    v = _widen(tl.load(exp_avg_sq + at, mask=inside))
    # The operations of `plain_update`, in its order.
    m = m + (g - m) * grad_weight
    v = v * beta2 + g * g * square_weight
    p = p * decay - tl.div_rn(m, tl.sqrt_rn(v) * bias + eps) * step_size

    # Of 16 bits each: two halves of x, and the upper half of y.
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
    # NaNs become one canonical NaN, as in `bfloat16_bits`.
    bits = (value.to(tl.uint32, bitcast=True) + noise) >> 16
    return tl.where(value == value, bits, 0x7FC0).to(tl.int16).to(tl.bfloat16, bitcast=True)
