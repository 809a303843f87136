"""Contenders of a benchmark take turns, so that what else the machine does meets all of them alike.

A contender is a function (turns, ...) in processes of its own that takes steps for as long as
`turns.go_on(loss)` returns True. The benchmark asks one contender after the other for some steps;
the others wait meanwhile and take no processor time. Memory is that of one more step, after the
timed ones: the most that tensors take in it, above those that are there between steps. What needs
no process of its own takes turns in `seconds_in_turns`.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Optional, TypeVar

from benchmarks import page
from benchmarks.page import Row, progress

DTYPES = {"float32": "32-true", "bfloat16": "bf16-true"}  # and what --precision calls them
PRELOADED = [
    "fabric_llm.base.fabric",
    "transformers.models.llama.modeling_llama",
    "datasets",
    "benchmarks.one_step",
]
REST = ("rest", 0)
FORGET = "the peak so far is forgotten"
Each = TypeVar("Each")


def parser(document: Optional[str], rounds: int = 7) -> argparse.ArgumentParser:
    """The options of benchmarks whose contenders are processes of their own."""
    options = page.parser(document, rounds)
    options.add_argument("--steps", type=int, default=1, help="steps in a turn")
    options.add_argument(
        "--warm_up", type=int, default=2, help="steps of each contender before the first timed one"
    )
    options.add_argument(
        "--threads", type=int, default=os.cpu_count() or 1, help="threads of each process on a CPU"
    )
    options.add_argument(
        "--accelerator", default="auto", choices=("auto", "cpu", "cuda"), help="where to run"
    )
    options.add_argument(
        "--dtypes", nargs="+", choices=DTYPES, help="of parameters (default: on a GPU both)"
    )
    options.add_argument(
        "--smoke", action="store_true", help="toy sizes: whether it runs, not how fast it is"
    )
    return options


def resolve(options: argparse.ArgumentParser, argv: Optional[list[str]]) -> argparse.Namespace:
    """Parse `argv`, and settle what depends on the machine. Sets the environment of the contenders'
    processes."""
    given = page.parse(options, argv)
    if min(given.steps, given.threads) < 1 or given.warm_up < 0:
        options.error("--steps and --threads must be at least 1.")
    os.environ.update(
        OMP_NUM_THREADS=str(given.threads), HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false"
    )
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    import torch  # after the environment is set: it makes its threads from it

    if given.accelerator == "cuda" and not torch.cuda.is_available():
        options.error("--accelerator cuda: this machine shows no GPU to PyTorch.")
    given.kind = "cuda" if given.accelerator != "cpu" and torch.cuda.is_available() else "cpu"
    given.dtypes = given.dtypes or (list(DTYPES) if given.kind == "cuda" else ["float32"])
    if given.kind == "cuda":  # another process asks: a context takes memory of the GPU
        ask = [
            sys.executable,
            "-c",
            "import torch; p = torch.cuda.get_device_properties(0); print(p.total_memory, p.name)",
        ]
        answer = subprocess.run(ask, capture_output=True, text=True, check=True).stdout
        memory, given.device["name"] = answer.strip().split(maxsplit=1)
        given.device["memory_bytes"] = int(memory)
    return given


def alternate(contenders: Sequence[Each], rounds: int) -> Iterator[Each]:
    """Each contender once a round, forwards in one round and backwards in the next."""
    for number in range(rounds):
        yield from contenders if number % 2 == 0 else reversed(contenders)
        progress(f"round {number + 1}/{rounds}")


def seconds_in_turns(
    steps: dict[str, Callable[[], Any]], rounds: int, kind: str = "cpu"
) -> dict[str, list[float]]:
    """Seconds of each step in each round, in this process. A step of each before them isn't
    counted."""
    for step in steps.values():
        step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for name in alternate(list(steps), rounds):
        synchronize(kind)
        began = time.perf_counter()
        steps[name]()
        synchronize(kind)
        times[name].append(time.perf_counter() - began)
    return times


def _give_memory_back() -> None:
    import torch

    gc.collect()
    torch.cuda.empty_cache()


def synchronize(kind: str) -> None:
    import torch

    if kind == "cuda":
        torch.cuda.synchronize()


class Turns:
    """What a contender hears of the others: when it is its turn."""

    def __init__(self, pipe: Connection, kind: str) -> None:
        self.pipe, self.kind = pipe, kind
        self.said: dict[str, Any] = {}  # by the contender, goes with each report
        self.what, self.asked, self.left, self.began, self.peak = "time", 0, 0, 0.0, Peak(kind)
        self.losses: list[Any] = []

    def go_on(self, loss: Any = None) -> bool:
        """Call it before the first step, and after each with its loss. Returns when the next is
        due; False: no more."""
        if self.left:
            self.losses.append(loss)
            self.left -= 1
            if self.left:
                return True
            self.pipe.send(("done", self._report()))
        while (request := self.pipe.recv()) == REST:
            _give_memory_back()
            self.pipe.send(("done", {}))
        if request is None:
            return False
        self.what, self.asked = request
        self.left, self.losses = self.asked, []
        if self.what == "memory":
            self.peak.begin()
        synchronize(self.kind)
        self.began = time.perf_counter()
        return True

    def _report(self) -> dict[str, Any]:
        synchronize(self.kind)
        report = {"seconds": (time.perf_counter() - self.began) / self.asked}
        if self.what == "memory":
            report["peak_bytes"], report["additional_bytes"] = self.peak.end()
        losses = [float(loss) for loss in self.losses if loss is not None]
        return {**report, "losses": losses, **self.said}


def training(turns: Turns, flags: list[str]) -> None:
    """A contender that takes steps of training with these flags of train.py."""
    from benchmarks import one_step

    one_step.train(turns, one_step.set_up(flags))


class Peak:
    """The most memory that tensors take in some steps, as the allocator of a GPU or torch.profiler
    on a CPU counts it.

    Not the process's resident memory: what malloc keeps for later after the steps before would be
    counted as well.
    """

    def __init__(self, kind: str) -> None:
        self.kind, self.held, self.profiler = kind, 0, None

    def begin(self) -> None:
        import torch

        gc.collect()
        if self.kind == "cuda":
            torch.cuda.reset_peak_memory_stats()
            self.held = torch.cuda.memory_allocated()
        else:
            activities = [torch.profiler.ProfilerActivity.CPU]
            self.profiler = torch.profiler.profile(activities=activities, profile_memory=True)
            self.profiler.__enter__()

    def forget(self) -> None:
        """The highest count so far doesn't matter any more; what is there still counts."""
        import torch

        gc.collect()
        if self.kind == "cuda":
            torch.cuda.reset_peak_memory_stats()
        else:
            with torch.profiler.record_function(FORGET):
                pass

    def end(self) -> tuple[Optional[int], int]:
        """(bytes at the peak, None on a CPU; how many more they are than at the beginning)"""
        import torch

        if self.kind == "cuda":
            peak = torch.cuda.max_memory_allocated()
            return peak, peak - self.held
        self.profiler.__exit__(None, None, None)
        held = peak = 0
        for event in sorted(
            self.profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns()
        ):
            held += event.nbytes() if event.name() == "[memory]" else 0
            peak = held if event.name() == FORGET else max(peak, held)
        return None, peak


def work(
    function: Callable[..., None],
    pipe: Connection,
    place: tuple[int, int, Path],
    kind: str,
    threads: int,
    args: Any,
) -> None:
    """One process of a contender. place: (rank, ranks, the file that the ranks meet in)."""
    import torch

    torch.set_num_threads(threads)
    os.dup2(2, 1)  # standard output is the page's
    warnings.filterwarnings("ignore", message=".*`srun` command is available")
    try:
        if place[1] > 1:
            join(*place, kind)
        function(Turns(pipe, kind), *args)
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    except EOFError:  # the benchmark is gone
        pass
    except BaseException as error:
        if not isinstance(error, ImportError):
            traceback.print_exc()
        pipe.send(("failed", sentence_of(error)))


def join(rank: int, ranks: int, store: Path, kind: str) -> None:
    """Form the process group as torchrun would, but meet in a file."""
    import torch

    numbers = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": ranks,
        "GROUP_RANK": 0,
    }
    addresses = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0, "TORCHELASTIC_RUN_ID": "benchmark"}
    os.environ.update({name: str(value) for name, value in {**numbers, **addresses}.items()})
    if kind == "cuda":
        torch.cuda.set_device(rank)
    file_store = torch.distributed.FileStore(str(store), ranks)
    backend = "nccl" if kind == "cuda" else "gloo"
    torch.distributed.init_process_group(backend, store=file_store, rank=rank, world_size=ranks)


def sentence_of(error: BaseException) -> str:
    """What a row says of an error."""
    if isinstance(error, ImportError):
        return f"not installed ({' '.join(str(error).split())[:80]})"
    return " ".join(f"{type(error).__name__}: {error}".split())[:160].replace("|", "/")


class Contender:
    """A row of a benchmark: a function in processes of its own."""

    def __init__(
        self, options: argparse.Namespace, row: Row, function: Callable[..., None], *args: Any
    ) -> None:
        """row: what is known of it; "ranks" in it are so many processes, which meet in the file
        "store"."""
        self.row = {"error": None, "seconds": [], **row}
        # A server that is forked imports once, but some packages, such as torchao, ask for GPUs
        # when they are imported, and no process that is forked after that can have one.
        context = multiprocessing.get_context("spawn" if options.kind == "cuda" else "forkserver")
        if options.kind == "cpu":
            context.set_forkserver_preload(PRELOADED)
        ranks, self.processes = row.get("ranks", 1), {}
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            place = (rank, ranks, row.get("store"))
            given = (function, theirs, place, options.kind, options.threads, args)
            self.processes[ours] = context.Process(target=work, args=given, daemon=True)
            self.processes[ours].start()
            theirs.close()  # so that a process that dies closes the pipe

    def ask(
        self, what: str, steps: int, within_seconds: Optional[float] = None
    ) -> Optional[dict[str, Any]]:
        """The report on `steps` steps, of all ranks the largest numbers; None, and the row has an
        error, without one."""
        if self.row["error"]:
            return None
        deadline = None if within_seconds is None else time.monotonic() + within_seconds
        self._send((what, steps))
        left, reports = list(self.processes), []
        while left:
            ready = wait(left, None if deadline is None else max(0.0, deadline - time.monotonic()))
            if not ready:
                late = (
                    f"stopped: it didn't answer within the {max(0.0, within_seconds):.0f} s "
                    "that it had left"
                )
                return self._failed(late)
            for pipe in ready:
                try:
                    kind, report = pipe.recv()
                except EOFError:
                    self.processes[pipe].join(5)
                    return self._failed(
                        f"its process ended with exit code {self.processes[pipe].exitcode}"
                    )
                if kind == "failed":
                    return self._failed(report)
                reports.append(report)
                left.remove(pipe)
        return {
            key: max((r[key] for r in reports if r[key] is not None), default=None)
            for key in reports[0]
        }

    def _send(self, request: Optional[tuple[str, int]]) -> None:
        """A process that has ended has said why, or is found at its end of the pipe."""
        for pipe in self.processes:
            with suppress(OSError):
                pipe.send(request)

    def _failed(self, sentence: str) -> None:
        self.row["error"] = sentence
        self.close()

    def close(self) -> None:
        """End its processes."""
        self._send(None)
        for process in self.processes.values():
            process.join(1 if self.row["error"] else 20)
            if process.is_alive():
                process.kill()
                process.join()


def in_turns(contenders: list[Contender], options: argparse.Namespace) -> list[Row]:
    """The rows, with `seconds` of a step in each round, losses of the first turn and the memory of
    one more step.

    On a GPU, where all have their weights, whoever waits gives back what its allocator keeps for
    the next step, and takes it again in a step that isn't timed.
    """
    on_gpu = options.kind == "cuda"
    for contender in contenders:
        report = contender.ask("time", max(1, options.warm_up))
        contender.row.update(report and {"losses": report["losses"]} or {})
        if on_gpu:
            contender.ask(*REST)
    for contender in alternate(contenders, options.rounds):
        if on_gpu:
            contender.ask("time", 1)
        if (report := contender.ask("time", options.steps)) is not None:
            contender.row["seconds"].append(report["seconds"])
        if on_gpu:
            contender.ask(*REST)
    for contender in contenders:
        report = contender.ask("memory", 1) or {}
        contender.row.update(
            {key: value for key, value in report.items() if key not in ("seconds", "losses")}
        )
        contender.close()
    return [contender.row for contender in contenders]
