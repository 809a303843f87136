"""A step for bfloat16 parameters with stochastic rounding: in which pieces, and by which kernel.

That is the fastest kernel of this machine that gives the bits of plain PyTorch (adamw_plain.py): adamw.cpp or
adamw_triton.py.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import subprocess
import tempfile
import warnings
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, Callable, NamedTuple, Optional

import torch
from torch import Tensor

from fabric_llm.training import adamw_plain
from fabric_llm.training.adamw_plain import Key, Numbers

Update = Callable[..., None]
UPDATED = ("param", "grad", "exp_avg", "exp_avg_sq")
PIECE_ELEMENTS = {"cpu": 2**20, "cuda": 2**27}  # what a CPU's thread, or a launch on a GPU, does at a time
SOURCE = Path(__file__).with_name("adamw.cpp")
# Contraction would round a * b + c once instead of twice. Without errno, and traps that nobody catches, roots vectorise.
COMPILER_FLAGS = ("-std=c++17", "-O3", "-funroll-loops", "-march=native")
COMPILER_FLAGS += ("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
COMPILER_SECONDS = 120
LEAST_ELEMENTS = 2**20  # below this, plain PyTorch takes less time in ten steps than compiling would


class Origin(NamedTuple):
    """Which piece of the model a parameter on this rank is."""

    name: str  # of the whole parameter, in the unwrapped model
    offset: int = 0  # index of the piece's first element in the whole, flattened parameter


def rounded_step(
    tensors: list[dict[str, Tensor]], origins: list[Origin], group: dict[str, Any], step: int, seed: int, update: Update
) -> None:
    """AdamW for parameters of one device, each one's flat tensors named in UPDATED, by an `update`.

    group: lr, betas, eps and weight_decay. step: how many steps these parameters have taken, with this one.
    """
    numbers = adamw_plain.numbers_of(group, step)
    on_cpu = tensors[0]["param"].device.type == "cpu"
    limit = PIECE_ELEMENTS["cpu" if on_cpu else "cuda"]
    waiting = deque(
        (piece, origin.name, high, low)
        for flat, origin in zip(tensors, origins)
        for piece, high, low in pieces_of([flat[name] for name in UPDATED], origin, limit)
    )

    def update_some() -> None:  # a task for each piece would cost as much as a small update
        while True:
            try:
                (param, *others), name, high, low = waiting.popleft()
            except IndexError:
                return
            if group["lr"] == 0:  # not even a -0.0 may change
                param = param.clone()
            update(param, *others, low, adamw_plain.key_of(seed, step, name, high), numbers)

    threads = torch.get_num_threads() if on_cpu else 1
    if threads == 1 or update is adamw_plain.update:  # which has torch's threads
        return update_some()
    with ThreadPoolExecutor(threads) as pool:
        for task in [pool.submit(update_some) for _ in range(threads)]:
            task.result()


def pieces_of(tensors: list[Tensor], origin: Origin, limit: int) -> Iterator[tuple[list[Tensor], int, int]]:
    """Pieces of at most `limit` elements of flat tensors: (one of each tensor, high and low half of the first one's index).

    None crosses a multiple of 2**32: kernels count indices in 32 bits, the rest goes into the key.
    """
    start, count = 0, tensors[0].numel()
    while start < count:
        high, low = divmod(origin.offset + start, 2**32)
        end = min(start + limit, start + 2**32 - low)
        whole = start == 0 and end >= count  # the usual case, and cutting takes longer than a small update
        yield tensors if whole else [tensor[start:end] for tensor in tensors], high, low
        start = end


def kernel_for(device: torch.device, elements: int) -> Update:
    """An `update` as that of adamw_plain.py, for an optimizer that updates so many elements on a device."""
    return _fastest(device) if elements >= LEAST_ELEMENTS else adamw_plain.update


@cache
def _fastest(device: torch.device) -> Update:
    """Compile, compare, and else say once why plain PyTorch goes on: more slowly, with the same numbers."""
    try:
        update = _build(device)
        if update is None:
            return adamw_plain.update
        if equals_plain(update, device):
            return update
        reason = "its bits differ from those of plain PyTorch"
    except subprocess.CalledProcessError as error:
        reason = (error.stderr.decode(errors="replace").strip().splitlines() or [str(error)])[0]
    except Exception as error:  # whatever a compiler may do, there is another way with the same numbers
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        needs = "a C++ compiler" if device.type == "cpu" else "Triton and a C compiler"
        warnings.warn(
            f"The optimizer's kernel for {device.type}, which needs {needs}, isn't used ({reason}). "
            "Without it, plain PyTorch takes several times as long for the same numbers.",
            stacklevel=2,
        )
    return adamw_plain.update


def _build(device: torch.device) -> Optional[Update]:
    if device.type == "cpu":
        return compiled()
    if device.type == "cuda":
        from fabric_llm.training import adamw_triton  # where there are GPUs there is Triton

        return adamw_triton.update
    return None


def compiled() -> Update:
    """`update` of adamw_plain.py in one pass over memory: adamw.cpp, for tensors on a CPU.

    Compiling takes half a second and leaves no files. ctypes passes addresses, so no header of Python or torch is needed.

    Raises OSError where there is no compiler (CXX names another one than c++) or its library doesn't load, and
    subprocess.SubprocessError where it fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "adamw.so"
        command = [
            *shlex.split(os.environ.get("CXX", "c++")),
            *COMPILER_FLAGS,
            "-shared",
            "-fPIC",
            str(SOURCE),
            "-o",
            library,
        ]
        subprocess.run(command, check=True, capture_output=True, timeout=COMPILER_SECONDS)
        function = ctypes.CDLL(str(library)).update  # it stays in memory without its file
    function.restype = None
    function.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_int64] + [ctypes.c_uint32] * 4 + [ctypes.c_float] * 7

    def update(
        param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, first: int, key: Key, numbers: Numbers
    ) -> None:
        tensors = param, grad, exp_avg, exp_avg_sq
        if grad.dtype != torch.bfloat16:  # rare, and not worth a second function
            return adamw_plain.update(*tensors, first, key, numbers)
        assert all(t.dtype == torch.bfloat16 and t.is_contiguous() and t.device.type == "cpu" for t in tensors)
        function(*(t.data_ptr() for t in tensors), param.numel(), first, *key, *numbers)

    return update


def equals_plain(update: Update, device: torch.device, count: int = 2**14 + 13) -> bool:
    """Whether an update gives the bits of plain PyTorch on a CPU, for numbers of all sizes, infinities and NaNs."""
    generator = torch.Generator().manual_seed(0)
    every = torch.randint(-(2**15), 2**15, (4, count), generator=generator).to(torch.int16)  # bits of any bfloat16
    usual = torch.randn(4, count, generator=generator).bfloat16().view(torch.int16)
    group = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    for bits in (every, usual):
        bits[3].bitwise_and_(2**15 - 1)  # exp_avg_sq has no sign
        expected, found = bits, bits.to(device, copy=True)
        for step in (1, 2, 1000):
            numbers = adamw_plain.numbers_of(group, step)
            for tensors, function in ((found, update), (expected, adamw_plain.update)):
                key = adamw_plain.key_of(0, step, "name", 1)
                function(*tensors.view(torch.bfloat16), 2**32 - count, key, numbers)
        if not torch.equal(found.cpu(), expected):
            return False
    return True
