"""What a step of each optimizer costs: AdamW of this template against torch.optim's.

    python benchmarks/optimizer.py --markdown docs/results/optimizer.md

Parameters have the shapes of Llamas, gradients are random.
"""

import statistics
import sys
import time
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import gpu, inputs, page
from benchmarks.turns import alternate, synchronize
from fabric_llm.training import adamw, adamw_rounded
from fabric_llm.training.adamw import AdamW

TIED = {"tie_word_embeddings": True}
SHAPES = {
    "toy": inputs.llama(32, 64, 2, 2, 1, vocab_size=128, **TIED),
    "30M": inputs.llama(384, 1024, 9, 6, 2, vocab_size=32000, **TIED),
    "135M": inputs.llama(576, 1536, 30, 9, 3, vocab_size=49152, **TIED),  # SmolLM2-135M
    "1B": gpu.SHAPES["1B"],
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
        options.device = torch.cuda.get_device_name()
    torch.set_num_threads(options.threads)
    pieces = ["## Compiling", compiling(device)]
    pieces += [f"## {size}\n\n{timing(size, device, options.rounds)}" for size in options.sizes]
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
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for name in alternate([*steps], rounds + 1):
        synchronize(device.type)
        began = time.perf_counter()
        steps[name]()
        synchronize(device.type)
        seconds[name].append(time.perf_counter() - began)
    copied = 2 * source.numel() * 4 / statistics.median(seconds["copy"][1:])
    rows = []
    for name, (_, _, size_of_step) in OPTIMIZERS.items():
        # The first one makes the state.
        rows.append({"name": name, "seconds": seconds[name][1:], "bytes": size_of_step})
        rows[-1]["times_fused"] = page.times(rows[-1], rows[0])
        rows[-1]["of_copy"] = size_of_step * count / page.median(rows[-1]) / copied
    return (
        f"{count / 1e6:.1f} M parameters; copying memory moves {copied / 1e9:.1f} GB/s (read and "
        f"written).\n\n{page.compare(rows, COLUMNS)}"
    )


def random_parameters(size: str, dtype: torch.dtype, device: torch.device) -> list[nn.Parameter]:
    given = {"generator": torch.Generator(device).manual_seed(0), "device": device}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**SHAPES[size]))
    params = []
    for param in model.parameters():
        params.append(nn.Parameter((0.02 * torch.randn(param.shape, **given)).to(dtype)))
        params[-1].grad = torch.randn(param.shape, **given).to(dtype)
    return params


if __name__ == "__main__":
    main()
