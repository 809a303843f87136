#!/usr/bin/env python
"""What FSDP's choices cost: memory per rank, step time and loss of each, side by side with DDP.

    python benchmarks/sharding.py --markdown docs/results/sharding.md

Each row is a set of flags of train.py, trained in its own processes with one_step.py. All rows start from the same weights, see the same tokens and must give the same losses: the exit code is 1 if they don't,
or if a row fails.

Time: the processes of all rows stay, and the rows take turns, a step of each and again, so that whatever else the
machine does meets all of them alike. Memory is counted before that, in processes of its own. On CUDA it is the
allocator's high-water mark (`torch.cuda.max_memory_allocated`). On a CPU it is the kernel's high-water mark of resident
memory (VmHWM in /proc/self/status, reset through /proc/self/clear_refs, see proc(5)) above what the process held before
it had a model, with glibc told to map every block of 64 KiB and more by itself, and so to give it back at once when it
is freed. That catches what FSDP frees by resizing storages and what gloo allocates, and it misses no short peak.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import multiprocessing
import os
import platform
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from benchmarks.one_step import Trainer

VOCABULARY, CONTEXT_TOKENS, MICRO_BATCH = 8192, 256, 1
LOSS_TOLERANCE = 1e-4  # nats, between any two rows at any step
MIB = 2**20
NOT_MEASURED = "not measured"

VARIANTS = {  # row -> flags of train.py; SIZE becomes the parameters of one attention block
    "ddp": "--strategy ddp",
    "fsdp, no wrapping": "--strategy fsdp --auto_wrap_policy none",
    "fsdp, by size": "--strategy fsdp --auto_wrap_policy size:SIZE",
    "fsdp, by layer": "--strategy fsdp --auto_wrap_policy LlamaDecoderLayer",
    "fsdp, by layer, SHARD_GRAD_OP": "--strategy fsdp --sharding_strategy SHARD_GRAD_OP",
    "fsdp, by layer, NO_SHARD": "--strategy fsdp --sharding_strategy NO_SHARD",
    "fsdp, by layer, activation_checkpointing": "--strategy fsdp --activation_checkpointing true",
    "fsdp, by layer, cpu_offload": "--strategy fsdp --cpu_offload true",
    "fsdp2, no wrapping": "--strategy fsdp2 --auto_wrap_policy none",
    "fsdp2, by layer": "--strategy fsdp2 --auto_wrap_policy LlamaDecoderLayer",
    "fsdp2, by layer, SHARD_GRAD_OP": "--strategy fsdp2 --sharding_strategy SHARD_GRAD_OP",
    "fsdp2, by layer, cpu_offload": "--strategy fsdp2 --cpu_offload true",
}


def main(argv: Optional[list[str]] = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    options = parse(argv)
    threads = max(1, (os.cpu_count() or 1) // options.devices)
    os.environ.update(OMP_NUM_THREADS=str(threads), HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as name:
        write_inputs(Path(name), options)
        rows = measure(Path(name), options)
    page = header(argv, options, threads, load) + table(rows)
    print(page)
    if options.markdown:
        options.markdown.write_text(page + "\n")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    if problem := problem_of(rows):
        print(f"sharding.py: error: {problem}", file=sys.stderr)
        return 1
    return 0


def problem_of(rows: list[dict[str, Any]]) -> Optional[str]:
    """A sentence where a row failed or computed something else than the first, None where all is well."""
    if failed := [row["name"] for row in rows if row["failed"]]:
        return f"failed: {'; '.join(failed)}."
    for row in rows:
        pairs = list(zip(row["losses"], rows[0]["losses"], strict=True))
        if not all(abs(loss - expected) <= LOSS_TOLERANCE for loss, expected in pairs):  # also where one is NaN
            return f"{row['name']}: losses {row['losses']}, but {rows[0]['losses']} with {rows[0]['name']}."
    return None


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="FSDP's choices side by side with DDP: memory, step time, loss.")
    parser.add_argument("--devices", type=int, default=2, help="processes, one device each (default: 2)")
    parser.add_argument("--accelerator", default="auto", choices=("auto", "cpu", "cuda"), help="(default: auto)")
    parser.add_argument("--hidden_size", type=int, default=512, help="width, a multiple of 64 (default: 512)")
    parser.add_argument("--layers", type=int, default=8, help="decoder layers (default: 8)")
    parser.add_argument("--steps", type=int, default=3, help="steps whose losses are compared (default: 3)")
    parser.add_argument(
        "--rounds", type=int, default=7, help="timed steps of each row, one a turn; 0: none (default: 7)"
    )
    parser.add_argument(
        "--only", nargs="+", default=list(VARIANTS), choices=VARIANTS, metavar="ROW", help="rows to run"
    )
    parser.add_argument("--markdown", type=Path, help="file to write the table to")
    parser.add_argument("--json", type=Path, help="file to write the numbers to: bytes, seconds, nats")
    options = parser.parse_args(argv)
    if options.hidden_size % 64 or min(options.hidden_size, options.layers, options.steps, options.devices) < 1:
        parser.error("--hidden_size must be a multiple of 64, and sizes, steps and devices at least 1.")
    if options.rounds < 0 or options.rounds == 1:
        parser.error(f"--rounds {options.rounds}: quartiles need at least 2.")
    return options


def write_inputs(folder: Path, options: argparse.Namespace) -> None:
    """A Llama without weights, a tiny one, and a dataset of random tokens, some of them frequent: that can be learnt."""
    import datasets
    import numpy as np
    from transformers import LlamaConfig

    for name, hidden_size, layers in (("llama", options.hidden_size, options.layers), ("tiny", 32, 1)):
        LlamaConfig(
            hidden_size=hidden_size,
            intermediate_size=-(-hidden_size * 8 // 3 // 32) * 32,
            num_hidden_layers=layers,
            num_attention_heads=max(1, hidden_size // 64),
            vocab_size=VOCABULARY,
            max_position_embeddings=CONTEXT_TOKENS,
            tie_word_embeddings=False,
        ).save_pretrained(folder / name)
    tokens = np.random.default_rng(0).zipf(1.3, (64, CONTEXT_TOKENS)) % VOCABULARY
    split = datasets.Dataset.from_dict({"input_ids": tokens.tolist()})
    datasets.disable_progress_bars()
    datasets.DatasetDict({"train": split, "validation": split}).save_to_disk(str(folder / "data"))


# ------------------------------------------------------------------- the rows take turns


def measure(folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Start all rows, time them in turns, and count their memory."""
    start_method = multiprocessing.get_context("forkserver")  # imports once; unlike fork it goes with CUDA
    start_method.set_forkserver_preload(
        ["fabric_llm.base.fabric", "transformers.models.llama.modeling_llama", "datasets"]
    )
    rows = [{"name": name, "flags": flags(name, options), "failed": False} for name in options.only]
    for index, row in enumerate(rows):
        ranks = start(start_method, folder / f"memory-{index}", row, folder, options, counts_memory=True)
        losses = ask(ranks, "train", 0, options.steps)
        memory = losses and ask(ranks, "memory", options.steps)
        row["failed"] = memory is None
        if memory is not None:
            stop(ranks)
            row["losses"] = [loss for _, loss in losses[0]]
            row.update({key: largest(result[key] for result in memory) for key in memory[0]})
        outcome = "failed" if row["failed"] else f"loss {row['losses'][-1]:.6f} at step {options.steps}"
        progress(f"memory {index + 1}/{len(rows)}  {row['name']}: {outcome}")
    if options.rounds:
        time_in_turns(start_method, folder, [row for row in rows if not row["failed"]], options)
    return rows


def time_in_turns(start_method: Any, folder: Path, rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """Add `seconds` of `options.rounds` steps, each that of the slowest rank, to each of `rows`."""
    running = []
    for index, row in enumerate(rows):
        running.append(start(start_method, folder / f"time-{index}", row, folder, options, counts_memory=False))
        ask(running[-1], "train", 0, 1)  # the first step allocates the optimizer's state
        row["seconds"] = []
    for turn in range(options.rounds):
        for row, ranks in zip(rows, running):
            results = ask(ranks, "train", 1 + turn, 1)
            row["seconds"].append(max(seconds for [(seconds, _)] in results))
        progress(f"time {turn + 1}/{options.rounds}")
    for ranks in running:
        stop(ranks)


def flags(name: str, options: argparse.Namespace) -> str:
    return VARIANTS[name].replace("SIZE", str(4 * options.hidden_size**2))


def largest(numbers: Iterable[Optional[int]]) -> Optional[int]:
    numbers = list(numbers)
    return None if None in numbers else max(numbers)


def progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


Ranks = list[tuple[Any, Connection]]  # a process and our end of its pipe, for each rank of a row


def start(
    start_method: Any, store: Path, row: dict[str, Any], folder: Path, options: argparse.Namespace, counts_memory: bool
) -> Ranks:
    ranks = []
    for rank in range(options.devices):
        ours, theirs = start_method.Pipe()
        arguments = (rank, options.devices, options.accelerator, row["flags"], folder, store, counts_memory, theirs)
        process = start_method.Process(target=work, args=arguments, daemon=True)
        process.start()
        theirs.close()  # so that a process that dies closes the pipe
        ranks.append((process, ours))
    return ranks


def ask(ranks: Ranks, task: str, *arguments: Any) -> Optional[list[Any]]:
    """[the task's result on each rank]. None, and the row's processes are gone, where one of them has died."""
    pipes = [ours for _, ours in ranks]
    results = {}
    try:
        for pipe in pipes:
            pipe.send((task, *arguments))
        while len(results) < len(pipes):
            for pipe in wait([p for p in pipes if p not in results]):
                results[pipe] = pipe.recv()
    except (EOFError, ConnectionError):
        for process, _ in ranks:
            process.kill()
        return None
    return [results[pipe] for pipe in pipes]


def stop(ranks: Ranks) -> None:
    for _, ours in ranks:
        ours.send(None)
    for process, _ in ranks:
        process.join()


# ------------------------------------------------------------------- one rank of a row


def work(
    rank: int,
    devices: int,
    accelerator: str,
    row_flags: str,
    folder: Path,
    store: Path,
    counts_memory: bool,
    pipe: Connection,
) -> None:
    """Join the other ranks, set up, then do what the pipe asks for until it says None."""
    import torch

    kind = join(rank, devices, accelerator, store)
    before = None
    if counts_memory:
        give_back_freed_memory()
        train(set_up(devices, kind, row_flags, folder, "tiny"), 0, 2)  # imports and caches that belong to no row
        before = memory_in_use(kind)
    trainer = set_up(devices, kind, row_flags, folder, "llama")
    for task, *arguments in iter(pipe.recv, None):
        pipe.send(train(trainer, *arguments) if task == "train" else memory(trainer, before, *arguments))
    torch.distributed.destroy_process_group()


def join(rank: int, devices: int, accelerator: str, store: Path) -> str:
    """Form the process group as torchrun would, but meet in a file. Returns "cpu" or "cuda"."""
    import torch

    from fabric_llm.run.placement import resolve_devices

    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(devices),
        LOCAL_WORLD_SIZE=str(devices),
        GROUP_RANK="0",
        TORCHELASTIC_RUN_ID="sharding",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="0",
    )
    _, _, kind = resolve_devices(devices, 1, accelerator)
    if kind == "cuda":
        torch.cuda.set_device(rank)
    file_store = torch.distributed.FileStore(str(store), devices)
    backend = "nccl" if kind == "cuda" else "gloo"
    torch.distributed.init_process_group(backend, store=file_store, rank=rank, world_size=devices)
    return kind


def set_up(devices: int, kind: str, row_flags: str, folder: Path, model_name: str) -> Trainer:
    from benchmarks import one_step

    argv = f"--devices {devices} --accelerator {kind} --precision 32-true --lr 1e-3 --max_step 1000 {row_flags}".split()
    argv += ["--verify_start", "false", "--micro_batch_size", MICRO_BATCH, "--output_dir", folder]
    return one_step.set_up([*argv, "--model_name", folder / model_name, "--train_data_dir", folder / "data"])


def train(trainer: Trainer, first_step: int, count: int) -> list[tuple[float, float]]:
    """(seconds on this rank, loss of the global batch) of the `count` steps from `first_step` on."""
    from benchmarks.one_step import take_step
    from fabric_llm.data.batches import Batches

    fabric, plan = trainer.fabric, trainer.plan
    ranks = {"rank": fabric.global_rank, "world_size": fabric.world_size}
    batches = Batches(plan.dataset.train, trainer.arguments.training.seed, MICRO_BATCH, plan.micro_batches, **ranks)
    results = []
    for step in range(first_step, first_step + count):
        micro_batches = batches.at(step * batches.global_batch_size)
        fabric.barrier()
        synchronize(fabric.device)
        begin = time.perf_counter()
        loss = take_step(trainer, step, micro_batches)
        synchronize(fabric.device)
        results.append((time.perf_counter() - begin, loss))
    return results


def synchronize(device: Any) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


# ------------------------------------------------------------------- memory


def memory(trainer: Trainer, before: Optional[int], step: int) -> dict[str, Optional[int]]:
    """Bytes that this rank holds between steps, and those that `step` needs on top of them (see this file's head).

    `before`: bytes in use without the model. On top come gradients, gathered parameters, activations and the buffers of
    communication, those that DDP never frees included. A count that can't be taken on this machine is None.
    """
    device = trainer.fabric.device
    parameters, state = parameters_held(trainer.model), optimizer_state_held(trainer.optimizer)
    sizes = {"parameter_bytes": storage_bytes(parameters), "optimizer_bytes": storage_bytes(state)}
    held_here = storage_bytes(t for t in [*parameters, *state] if t.device.type == device.type)
    del parameters, state
    forget_peak(device.type)
    train(trainer, step, 1)
    peak = peak_memory(device.type)
    return {**sizes, "additional_bytes": None if peak is None or before is None else peak - before - held_here}


def parameters_held(model: nn.Module) -> list[Tensor]:
    """All tensors that hold values of parameters on this rank: FSDP's shards, and what it has gathered, if anything."""
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    flat = [m._handle.flat_param for m in model.modules() if isinstance(m, FSDP) and m._handle is not None]
    names = ("_local_shard", "_full_param_padded")
    tensors = [*model.parameters(), *(getattr(p, name) for p in flat for name in names if hasattr(p, name))]
    return [local(tensor.detach()) for tensor in tensors]


def optimizer_state_held(optimizer: Optimizer) -> list[Tensor]:
    states = optimizer.optimizer.state.values()  # the one inside Fabric's wrapper
    return [local(value) for state in states for value in state.values() if hasattr(value, "untyped_storage")]


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """What is allocated for `tensors`: a storage that several of them share counts once, and whole."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def memory_in_use(kind: str) -> Optional[int]:
    """Bytes in use by this process on its device now, None where there is no way to tell."""
    import torch

    gc.collect()
    if kind == "cuda":
        return torch.cuda.memory_allocated()
    give_back_freed_memory()
    return status_bytes("VmRSS")


def forget_peak(kind: str) -> None:
    import torch

    gc.collect()
    if kind == "cuda":
        torch.cuda.reset_peak_memory_stats()
    elif Path("/proc/self/clear_refs").exists():
        give_back_freed_memory()
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again at VmRSS


def peak_memory(kind: str) -> Optional[int]:
    import torch

    return torch.cuda.max_memory_allocated() if kind == "cuda" else status_bytes("VmHWM")


def status_bytes(key: str) -> Optional[int]:
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:")), None)


def give_back_freed_memory() -> None:
    """Have glibc return freed memory to the kernel, now and from now on. That takes time: not where steps are timed."""
    import ctypes

    if platform.libc_ver()[0] != "glibc":
        return
    libc = ctypes.CDLL(None)
    trim_threshold, mmap_threshold = -1, -3  # names M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h
    libc.mallopt(trim_threshold, 64 * 1024)
    libc.mallopt(mmap_threshold, 64 * 1024)
    libc.malloc_trim(0)


# ------------------------------------------------------------------- the page


def header(argv: list[str], options: argparse.Namespace, threads: int, load: float) -> str:
    import lightning
    import torch
    import transformers

    command = shlex.join(["python", "benchmarks/sharding.py", *argv])
    kind = "cuda" if options.accelerator != "cpu" and torch.cuda.is_available() else "cpu"
    backend = "NCCL" if kind == "cuda" else f"gloo, {threads} thread each"
    hardware = torch.cuda.get_device_name() if kind == "cuda" else f"{cpu_name()}, {os.cpu_count()} cores"
    return "\n".join(
        (
            "# Sharding: FSDP's choices and DDP",
            "",
            f"- Command: `{command}`",
            f"- Date: {datetime.date.today()}",
            f"- Hardware: {options.devices} processes ({backend}) on {hardware}",
            f"- Load: average {load:.1f} before the start, {os.getloadavg()[0]:.1f} at the end",
            f"- Versions: Python {platform.python_version()}, torch {torch.__version__}, "
            f"lightning {lightning.__version__}, transformers {transformers.__version__}",
            f"- Model: Llama, hidden size {options.hidden_size}, {options.layers} layers, vocabulary {VOCABULARY}, "
            f"context {CONTEXT_TOKENS} tokens, micro-batch {MICRO_BATCH}, float32, AdamW",
            "- Memory: MiB on the rank that has most; additional: above parameters and optimizer, so with gradients, "
            "gathered parameters, activations, buffers of communication",
            f"- Step: median and quartiles of {options.rounds} steps of the slowest rank, rows in turns; "
            "x first: over the first row's",
            f"- Loss: at step {options.steps}, in nats; all rows agree to {LOSS_TOLERANCE:.0e} at each step up to it, "
            "or the exit code is 1",
            *(["- On a CPU cpu_offload has nothing to move: its rows say only that it works"] if kind == "cpu" else []),
            "",
            "",
        )
    )


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown, a line for each row."""
    titles = ("", "parameters", "optimizer", "additional peak in a step", "step, ms", "quartiles", "x first", "loss")
    lines = ["| " + " | ".join(titles) + " |", "|---" + "|--:" * (len(titles) - 1) + "|"]
    first = next((statistics.median(row["seconds"]) for row in rows if "seconds" in row), None)
    for row in rows:
        if row["failed"]:
            cells = ["failed"] * (len(titles) - 1)
        else:
            memory = (mebibytes(row[key]) for key in ("parameter_bytes", "optimizer_bytes", "additional_bytes"))
            cells = [*memory, *times(row.get("seconds"), first), f"{row['losses'][-1]:.6f}"]
        lines.append("| " + " | ".join([row["name"], *cells]) + " |")
    return "\n".join(lines)


def times(seconds: Optional[list[float]], first: Optional[float]) -> tuple[str, str, str]:
    """(median in ms, quartiles in ms, median / `first`)."""
    if seconds is None or first is None:
        return (NOT_MEASURED,) * 3
    low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return f"{1000 * middle:.0f}", f"{1000 * low:.0f}-{1000 * high:.0f}", f"{middle / first:.2f}"


def mebibytes(count: Optional[int]) -> str:
    return NOT_MEASURED if count is None else f"{count / MIB:.1f}"


if __name__ == "__main__":
    sys.exit(main())
