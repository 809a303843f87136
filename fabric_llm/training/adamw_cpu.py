"""adamw_plain.update on a CPU in one pass over memory: adamw.cpp, compiled when it is first needed.

That takes half a second and leaves no files. ctypes passes addresses, so no header of Python or torch is needed.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import subprocess
import tempfile
from pathlib import Path
from typing import Callable

import torch
from torch import Tensor

from fabric_llm.training import adamw_plain
from fabric_llm.training.adamw_plain import Key, Numbers

SOURCE = Path(__file__).with_name("adamw.cpp")
# Contraction would round a * b + c once instead of twice. Without errno, and traps that nobody catches, roots vectorise.
FLAGS = ("-std=c++17", "-O3", "-funroll-loops", "-march=native")
FLAGS += ("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
SECONDS = 120


def build() -> Callable[..., None]:
    """`update` of adamw_plain.py, for tensors on a CPU.

    Raises OSError where there is no compiler (CXX names another one than c++) or its library doesn't load, and
    subprocess.SubprocessError where it fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "adamw.so"
        command = [*shlex.split(os.environ.get("CXX", "c++")), *FLAGS, "-shared", "-fPIC", str(SOURCE), "-o", library]
        subprocess.run(command, check=True, capture_output=True, timeout=SECONDS)
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
