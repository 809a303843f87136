"""What a step of each optimizer costs: AdamW of this template against torch.optim's.

    python benchmarks/optimizer.py --markdown docs/results/optimizer.md

Parameters have the shapes of Llamas, gradients are random.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import nn

from benchmarks import page
from benchmarks.turns import seconds_in_turns
from fabric_llm.training import adamw, adamw_rounded
from fabric_llm.training.adamw import AdamW

SHAPES = {  # hidden size, of the MLP, of keys and values, layers, vocabulary; embeddings tied
    "toy": (32, 64, 16, 2, 128),
    "30M": (384, 1024, 128, 9, 32000),
    "135M": (576, 1536, 192, 30, 49152),  # SmolLM2-135M
    "1B": (2048, 8192, 512, 16, 128256),  # Llama 3.2 1B, for a GPU
}
COLUMNS = {
    "step, ms": page.step,
    "x torch fused": page.number("times_fused"),
    "bytes a parameter, at least": lambda row: str(row["bytes"]),
    "of a copy's": page.number("of_copy", ".0%"),
}
MAX_COPIED = 2**28  # float32 numbers, far more than a cache holds
SETTINGS = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
TORCH, OURS = partial(torch.optim.AdamW, **SETTINGS), partial(AdamW, **SETTINGS)
# name -> dtype of parameters, how it is made, bytes a parameter that a step must read and write
OPTIMIZERS = {
    "torch fused": (torch.bfloat16, partial(TORCH, fused=True), 14),
    "torch foreach": (torch.bfloat16, partial(TORCH, foreach=True), 14),
    "nearest": (torch.bfloat16, partial(OURS, updates="nearest"), 14),
    "stochastic, plain PyTorch": (torch.bfloat16, OURS, 14),
    "stochastic, kernel": (torch.bfloat16, OURS, 14),
    "master": (torch.bfloat16, partial(OURS, updates="master"), 28),
    "torch fused, float32": (torch.float32, partial(TORCH, fused=True), 28),
}
NOTES = [
    "Times: medians over rounds, in turns. x torch fused: median of the ratios within a round to "
    "torch.optim.AdamW(fused=True) on bfloat16 parameters",
    "Bytes a parameter: reading and writing each tensor once; of a copy's: these bytes in the time",
]


def main() -> None:
    parser = page.parser(__doc__, rounds=9)
    parser.add_argument("--sizes", nargs="+", default=["30M", "135M"], choices=SHAPES)
    parser.add_argument("--threads", type=int, default=1, help="of a CPU")
    parser.add_argument("--accelerator", default="cpu", choices=("cpu", "cuda"))
    options = page.parse(parser)
    device = torch.device(options.accelerator)
    if device.type == "cuda":
        options.device["name"] = torch.cuda.get_device_name()
    torch.set_num_threads(options.threads)
    pieces = ["## Compiling", compiling(device)]
    for size in options.sizes:
        pieces += [f"## {size}", timing(size, device, options.rounds)]
    page.write("What a step of the optimizer costs", NOTES, options, pieces, pieces)


def compiling(device: torch.device) -> str:
    """Seconds until the kernel can be used, and whether it can."""
    began = time.perf_counter()
    if device.type == "cpu":
        adamw_rounded.compiled()
    built = time.perf_counter() - began
    used = adamw.fastest(device) is not adamw_rounded.plain_update
    whole = time.perf_counter() - began - built
    outcome = "The bits are the same, and it is used." if used else "It isn't used here."
    return (
        f"The compiler takes {built:.2f} s in each process. Compiling the kernel and comparing it "
        f"with plain PyTorch take {whole:.2f} s. {outcome}"
    )


def timing(size: str, device: torch.device, rounds: int) -> str:
    """A table of times, ratios to torch's fused kernel in bfloat16, and bytes a second."""
    dtypes = (torch.bfloat16, torch.float32)
    params = {dtype: random_parameters(size, dtype, device) for dtype in dtypes}
    count = sum(param.numel() for param in params[torch.float32])
    steps = {}
    for name, (dtype, make, _) in OPTIMIZERS.items():
        optimizer = make(params[dtype])
        if name == "stochastic, kernel":
            optimizer.elements = max(optimizer.elements, adamw.MIN_ELEMENTS)
        elif name == "stochastic, plain PyTorch":
            optimizer.elements = 0
        steps[name] = optimizer.step
    source = torch.randn(min(count, MAX_COPIED), device=device)
    steps["copy"] = partial(torch.empty_like(source).copy_, source)
    times = seconds_in_turns(steps, rounds, device.type)
    copied = 2 * source.numel() * 4 / statistics.median(times["copy"])
    rows = []
    for name, (_, _, size_of_step) in OPTIMIZERS.items():
        row = {"name": name, "seconds": times[name], "bytes": size_of_step}
        rows.append(row)
        row["times_fused"] = page.times(row, rows[0])
        row["of_copy"] = size_of_step * count / page.median(row) / copied
    return (
        f"{count / 1e6:.1f} M parameters; copying memory moves {copied / 1e9:.1f} GB/s (read and "
        f"written).\n\n{page.compare(rows, COLUMNS)}"
    )


def shapes(
    hidden: int, wide: int, key_values: int, layers: int, vocabulary: int
) -> Iterator[tuple[int, ...]]:
    yield vocabulary, hidden
    for _ in range(layers):
        yield from ((hidden, hidden), (key_values, hidden), (key_values, hidden), (hidden, hidden))
        yield from ((wide, hidden), (wide, hidden), (hidden, wide), (1, hidden), (1, hidden))
    yield 1, hidden


def random_parameters(size: str, dtype: torch.dtype, device: torch.device) -> list[nn.Parameter]:
    given = {"generator": torch.Generator(device).manual_seed(0), "device": device}
    params = []
    for shape in shapes(*SHAPES[size]):
        params.append(nn.Parameter((0.02 * torch.randn(shape, **given)).to(dtype)))
        params[-1].grad = torch.randn(shape, **given).to(dtype)
    return params


if __name__ == "__main__":
    main()
