"""Contenders of a benchmark take turns, so that what else the machine does meets all of them alike.

A contender is a function (turns, ...) in processes of its own that takes steps for as long as
`turns.go_on(loss)` returns True. The benchmark asks one contender after the other for some steps;
the others wait meanwhile and take no processor time. Memory is that of one more step, after the
timed ones: the most that tensors take in it, above those that are there between steps.
"""

import argparse
import gc
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Optional, Union

from benchmarks import page
from benchmarks.page import Row, progress

DTYPES = {"float32": "32-true", "bfloat16": "bf16-true"}  # and what --precision calls them
PRELOADED = ["transformers.models.llama.modeling_llama", "benchmarks.one_step"]
WARM_UP = 3  # steps before the first timed one
REST = ("rest", 0)
ASK_GPU = "import torch; print(torch.cuda.get_device_name())"


def parser(document: Optional[str], rounds: int = 7) -> argparse.ArgumentParser:
    """The options of benchmarks whose contenders are processes of their own."""
    options = page.parser(document, rounds)
    add, cores = options.add_argument, os.cpu_count() or 1
    add("--steps", type=int, default=1, help="steps in a turn")
    add("--threads", type=int, default=cores, help="threads of each process on a CPU")
    add("--accelerator", default="auto", choices=("auto", "cpu", "cuda"), help="where to run")
    add("--dtypes", dest="dtype", default="float32", choices=DTYPES, help="of parameters")
    add("--smoke", action="store_true", help="toy sizes: whether it runs, not how fast it is")
    return options


def resolve(options: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the command's flags, and settle what depends on the machine. Sets the environment of
    the contenders' processes."""
    given = page.parse(options)
    os.environ |= {"OMP_NUM_THREADS": str(given.threads), "TORCH_CPP_LOG_LEVEL": "ERROR"}
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    import torch  # after the environment is set: it makes its threads from it

    on_gpu = given.accelerator != "cpu" and torch.cuda.is_available()
    given.kind = "cuda" if on_gpu or given.accelerator == "cuda" else "cpu"
    if given.kind == "cuda":  # another process asks: a context takes memory of the GPU
        said = subprocess.check_output([sys.executable, "-c", ASK_GPU], text=True)
        given.device = said.strip()
    return given


def alternate(contenders: Sequence[Any], rounds: int) -> Iterator[Any]:
    """Each contender once a round, forwards in one round and backwards in the next."""
    for number in range(rounds):
        yield from contenders if number % 2 == 0 else reversed(contenders)
        progress(f"round {number + 1}/{rounds}")


def synchronize(kind: str) -> None:
    if kind == "cuda":
        import torch

        torch.cuda.synchronize()


class Turns:
    """What a contender hears of the others: when it is its turn."""

    def __init__(self, pipe: Connection, kind: str) -> None:
        self.pipe, self.kind, self.peak = pipe, kind, Peak(kind)
        self.extra: dict[str, Any] = {}  # what the contender adds to each report
        self.what: Any = "time"
        self.steps, self.began, self.profiler = 0, 0.0, None
        self.losses: list[Any] = []  # of the steps of this turn

    def go_on(self, loss: Any = None) -> bool:
        """Call it before the first step, and after each with its loss. Returns when the next is
        due; False: no more."""
        if self.steps:
            self.losses.append(loss)
            if len(self.losses) < self.steps:
                return True
            self.pipe.send(self._report())
        import torch

        while (request := self.pipe.recv()) == REST:
            gc.collect()
            torch.cuda.empty_cache()
            self.pipe.send({})
        if request is None:
            return False
        self.what, self.steps = request
        self.losses = []
        if self.what == "memory":
            self.peak.begin()
        synchronize(self.kind)
        if isinstance(self.what, Path):
            self.profiler = torch.profiler.profile(acc_events=True)
            self.profiler.start()
        self.began = time.perf_counter()
        return True

    def _report(self) -> dict[str, Any]:
        synchronize(self.kind)
        report = {"seconds": (time.perf_counter() - self.began) / self.steps}
        if self.what == "memory":
            report["additional_bytes"] = self.peak.end()
            report["peak_bytes"] = self.peak.held + report["additional_bytes"]
        elif isinstance(self.what, Path):
            self.profiler.stop()
            self.profiler.export_chrome_trace(str(self.what))
        losses = [float(loss) for loss in self.losses if loss is not None]
        return {**report, "losses": losses, **self.extra}


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

    def end(self) -> int:
        """How many more bytes there were at the peak than at the beginning."""
        if self.kind == "cuda":
            import torch

            return torch.cuda.max_memory_allocated() - self.held
        self.profiler.__exit__(None, None, None)
        held = peak = 0
        events = self.profiler.profiler.kineto_results.events()
        for event in sorted(events, key=lambda event: event.start_ns()):
            if event.name() == "[memory]":
                held += event.nbytes()
                peak = max(peak, held)
        return peak


def work(
    function: Callable[..., None],
    pipe: Connection,
    place: tuple[int, int, Path],
    options: argparse.Namespace,
    args: Any,
) -> None:
    """One process of a contender. place: (rank, ranks, the folder that the ranks meet in)."""
    import torch

    torch.set_num_threads(options.threads)
    os.dup2(2, 1)  # standard output is the page's
    warnings.filterwarnings("ignore", message=".*`srun` command is available")
    try:
        if place[1] > 1:
            from ranks import join

            join(*place)
        function(Turns(pipe, options.kind), *args)
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    except EOFError:  # the benchmark is gone
        pass
    except BaseException as error:
        traceback.print_exc()
        message = " ".join(f"{type(error).__name__}: {error}".split())[:160]
        pipe.send({"error": message.replace("|", "/")})


class Contender:
    """A row of a benchmark: a function in processes of its own."""

    def __init__(
        self, options: argparse.Namespace, row: Row, function: Callable[..., None], *args: Any
    ) -> None:
        """row: what is known of it; its "ranks" are so many processes, of a CPU if they are
        several."""
        self.row = {"seconds": [], **row}
        self.ends = time.monotonic() + 10**6
        # A server that is forked imports once, but some packages, such as torchao, ask for GPUs
        # when they are imported, and no process that is forked after that can have one.
        context = multiprocessing.get_context("spawn" if options.kind == "cuda" else "forkserver")
        if options.kind == "cpu":
            context.set_forkserver_preload(PRELOADED)
        ranks, self.processes = row.get("ranks", 1), {}
        folder = Path(tempfile.mkdtemp()) if ranks > 1 else Path()
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            given = (function, theirs, (rank, ranks, folder), options, args)
            self.processes[ours] = context.Process(target=work, args=given, daemon=True)
            self.processes[ours].start()
            theirs.close()  # so that a process that dies closes the pipe

    def ask(self, what: Union[str, Path], steps: int) -> Optional[Row]:
        """The report on `steps` steps, of all ranks the largest numbers; None, and the row has an
        "error", without one. what: "time", "memory", or the file of a profiler's trace."""
        if self.row.get("error"):
            return None
        self._send((what, steps))
        left, reports = list(self.processes), []
        while left:
            ready = wait(left, max(0.0, self.ends - time.monotonic()))
            if not ready:
                return self._failed("stopped: its time was over")
            for pipe in ready:
                try:
                    report = pipe.recv()
                except EOFError:
                    process = self.processes[pipe]
                    process.join(5)
                    return self._failed(f"its process ended with exit code {process.exitcode}")
                if "error" in report:
                    return self._failed(report["error"])
                reports.append(report)
                left.remove(pipe)
        return {key: max(report[key] for report in reports) for key in reports[0]}

    def _send(self, request: Optional[tuple[Any, int]]) -> None:
        """A process that has ended has said why, or is found at its end of the pipe."""
        for pipe in self.processes:
            with suppress(OSError):
                pipe.send(request)

    def _failed(self, message: str) -> None:
        self.row["error"] = message
        self.close()

    def close(self) -> None:
        """End its processes."""
        self._send(None)
        for process in self.processes.values():
            process.join(1 if "error" in self.row else 20)
            if process.is_alive():
                process.kill()
                process.join()


def in_turns(
    contenders: list[Contender], options: argparse.Namespace, trace: Optional[Path] = None
) -> list[Row]:
    """The rows, with `seconds` of a step in each round, losses of the first turn and the memory of
    one more step.

    On a GPU where several have their weights, whoever waits gives back what its allocator keeps for
    the next step, and takes it again in a step that isn't timed. trace: the file of a profile of
    two steps.
    """
    is_shared = options.kind == "cuda" and len(contenders) > 1
    for contender in contenders:
        if report := contender.ask("time", WARM_UP):
            contender.row["losses"] = report["losses"]
        if is_shared:
            contender.ask(*REST)
    for contender in alternate(contenders, options.rounds):
        if is_shared:
            contender.ask("time", 1)
        if report := contender.ask("time", options.steps):
            contender.row["seconds"].append(report["seconds"])
        if is_shared:
            contender.ask(*REST)
    for contender in contenders:
        if trace is not None:
            contender.ask(trace, 2)
        report = contender.ask("memory", 1) or {}
        contender.row |= {key: report[key] for key in report if key not in ("seconds", "losses")}
        contender.close()
    return [contender.row for contender in contenders]
