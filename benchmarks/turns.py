"""Contenders of a benchmark, each in processes of its own, take turns: what else the machine does meets all alike.

A contender is a function (turns, ...) that takes steps for as long as `turns.go_on(loss)` returns True. The
benchmark asks one contender after the other for some steps, forwards in one round and backwards in the next; the
others wait meanwhile and take no processor time. Memory is that of one more step, after the timed ones: the most that
tensors take in it, above those that are there between steps.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import itertools
import json
import multiprocessing
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Optional

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import sharding  # noqa: E402

DTYPES = {"float32": "32-true", "bfloat16": "bf16-true"}  # and what --precision calls them
PRELOADED = ["fabric_llm.base.fabric", "transformers.models.llama.modeling_llama", "datasets", "benchmarks.one_step"]
Row = dict[str, Any]


# ------------------------------------------------------------------- options


def parser(
    description: str, rounds: int = 7, output: str = "JSON file to write the numbers to"
) -> argparse.ArgumentParser:
    """The options that all benchmarks of speed have."""
    cores = os.cpu_count() or 1
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    options.add_argument("--rounds", type=int, default=rounds, help="timed turns of each contender")
    options.add_argument("--steps", type=int, default=1, help="steps in a turn")
    options.add_argument("--warm_up", type=int, default=2, help="steps of each contender before the first timed one")
    options.add_argument("--threads", type=int, default=cores, help="threads of each process on a CPU")
    options.add_argument("--accelerator", default="auto", choices=("auto", "cpu", "cuda"), help="where to run")
    options.add_argument(
        "--dtypes",
        default="auto",
        help="float32, bfloat16, or both with a comma; auto: not bfloat16 on a CPU without instructions for it",
    )
    options.add_argument("--smoke", action="store_true", help="toy sizes: whether it runs, not how fast it is")
    options.add_argument("--output", type=Path, help=output)
    return options


def resolve(options: argparse.ArgumentParser, argv: Optional[list[str]]) -> argparse.Namespace:
    """Parse `argv`, and settle what depends on the machine. Sets the environment of the contenders' processes."""
    given = options.parse_args(argv)
    given.argv = list(sys.argv[1:] if argv is None else argv)
    if min(given.rounds, given.steps, given.threads) < 1 or given.warm_up < 0:
        options.error("--rounds, --steps and --threads must be at least 1.")
    os.environ.update(OMP_NUM_THREADS=str(given.threads), HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    import torch  # after the environment is set: it makes its threads from it

    if given.accelerator == "cuda" and not torch.cuda.is_available():
        options.error("--accelerator cuda: this machine shows no GPU to PyTorch.")
    on_gpu = given.accelerator != "cpu" and torch.cuda.is_available()
    given.kind = "cuda" if on_gpu else "cpu"
    if given.dtypes == "auto":
        given.dtypes = "float32,bfloat16" if on_gpu or has_bfloat16() else "float32"
    given.dtypes = [name.strip() for name in given.dtypes.split(",")]
    if unknown := [name for name in given.dtypes if name not in DTYPES]:
        options.error(f"--dtypes {unknown[0]!r} is none of {', '.join(DTYPES)}.")
    given.load, given.device = os.getloadavg()[0], device_of(given.kind)
    return given


def device_of(kind: str) -> dict[str, Any]:
    """Name and bytes of memory of the GPU, {} for a CPU. Another process asks: a context takes memory of the GPU."""
    if kind == "cpu":
        return {}
    ask = "import torch; found = torch.cuda.get_device_properties(0); print(found.name, found.total_memory, sep='\\n')"
    said = subprocess.run([sys.executable, "-c", ask], stdout=subprocess.PIPE, text=True, check=True).stdout
    name, count = said.splitlines()
    return {"name": name, "bytes": int(count)}


def has_bfloat16() -> bool:
    """Whether this processor multiplies bfloat16 matrices itself. Without that they take far longer than float32."""
    info = Path("/proc/cpuinfo")
    flags = set(info.read_text().split()) if info.exists() else set()
    return bool(flags & {"amx_bf16", "avx512_bf16"})


# ------------------------------------------------------------------- a contender's end


class Turns:
    """What a contender hears of the others: when it is its turn."""

    def __init__(self, pipe: Connection, kind: str) -> None:
        self.pipe, self.kind = pipe, kind
        self.said: dict[str, Any] = {}  # by the contender, goes with each report
        self.what, self.asked, self.left, self.began, self.peak = "time", 0, 0, 0.0, Peak(kind)
        self.losses: list[Any] = []

    def go_on(self, loss: Any = None) -> bool:
        """Call it before the first step, and after each with its loss. Returns when the next is due; False: no more."""
        if self.left:
            self.losses.append(loss)
            self.left -= 1
            if self.left:
                return True
            self.pipe.send(("done", self._report()))
        request = self.pipe.recv()
        if request is None:
            return False
        self.what, self.asked = request
        self.left, self.losses = self.asked, []
        if self.what == "memory":
            self.peak.begin()
        self._synchronize()
        self.began = time.perf_counter()
        return True

    def _report(self) -> dict[str, Any]:
        self._synchronize()
        report = {"seconds": (time.perf_counter() - self.began) / self.asked}
        if self.what == "memory":
            report["peak_bytes"], report["additional_bytes"] = self.peak.end()
        losses = [float(loss) for loss in self.losses if loss is not None]
        return {**report, "losses": losses, **self.said}

    def _synchronize(self) -> None:
        import torch

        if self.kind == "cuda":
            torch.cuda.synchronize()


class Peak:
    """The most memory that tensors take in some steps, as the allocator of a GPU or torch.profiler on a CPU counts it.

    Not the process's resident memory: what malloc keeps for later after the steps before would be counted as well.
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

    def end(self) -> tuple[Optional[int], int]:
        """(bytes at the peak, None on a CPU; how many more they are than at the beginning)"""
        import torch

        if self.kind == "cuda":
            peak = torch.cuda.max_memory_allocated()
            return peak, peak - self.held
        self.profiler.__exit__(None, None, None)
        events = [event for event in self.profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
        events.sort(key=lambda event: event.start_ns())
        return None, max(itertools.accumulate((event.nbytes() for event in events), initial=0))


def work(
    function: Callable[..., None], pipe: Connection, place: tuple[int, int, Path], kind: str, threads: int, args: Any
) -> None:
    """One process of a contender. place: (rank, ranks, the file that the ranks meet in)."""
    import torch

    torch.set_num_threads(threads)
    os.dup2(2, 1)  # standard output is the page's
    warnings.filterwarnings("ignore", message=".*`srun` command is available")
    rank, ranks, store = place
    try:
        if ranks > 1:
            sharding.join(rank, ranks, kind, store)
        function(Turns(pipe, kind), *args)
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    except EOFError:  # the benchmark is gone
        pass
    except BaseException as error:
        if not isinstance(error, (ImportError, NotHere)):
            traceback.print_exc()
        pipe.send(("failed", sentence_of(error)))


class NotHere(Exception):
    """What a contender needs and this machine hasn't; the row says so."""


def sentence_of(error: BaseException) -> str:
    """What a row says of an error."""
    if isinstance(error, NotHere):
        return str(error)
    if isinstance(error, ImportError):
        return f"not installed ({' '.join(str(error).split())[:80]})"
    return " ".join(f"{type(error).__name__}: {error}".split())[:160].replace("|", "/")


# ------------------------------------------------------------------- the benchmark's end


class Failed(Exception):
    """A contender didn't do what it was asked, and why."""


class Contender:
    """A row of a benchmark: a function in processes of its own."""

    def __init__(self, options: argparse.Namespace, row: Row, function: Callable[..., None], *args: Any) -> None:
        """row: what is known of it; "ranks" in it are so many processes, which meet in the file "store"."""
        self.row = {"error": None, "seconds": [], **row}
        context = multiprocessing.get_context("forkserver")  # imports once; unlike fork it goes with CUDA
        context.set_forkserver_preload(PRELOADED)
        ranks, self.pipes, self.processes = row.get("ranks", 1), [], []
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            place = (rank, ranks, row.get("store"))
            given = (function, theirs, place, options.kind, options.threads, args)
            process = context.Process(target=work, args=given, daemon=True)
            process.start()
            theirs.close()  # so that a process that dies closes the pipe
            self.pipes.append(ours)
            self.processes.append(process)

    def ask(self, what: str, steps: int, within_seconds: Optional[float] = None) -> Optional[dict[str, Any]]:
        """The report of the slowest rank on `steps` steps; None, and the row has an error, where there is none."""
        if self.row["error"]:
            return None
        try:
            for pipe in self.pipes:
                pipe.send((what, steps))
            return max(self._answers(within_seconds), key=lambda report: report["seconds"])
        except (Failed, OSError) as error:
            self.row["error"] = str(error) if isinstance(error, Failed) else self._last_words()
            self.close()
            return None

    def _answers(self, within_seconds: Optional[float]) -> list[dict[str, Any]]:
        deadline = None if within_seconds is None else time.monotonic() + within_seconds
        answers: dict[Connection, dict[str, Any]] = {}
        while len(answers) < len(self.pipes):
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready = wait([pipe for pipe in self.pipes if pipe not in answers], left)
            if not ready:
                raise Failed(f"stopped: it didn't answer within the {max(0.0, within_seconds):.0f} s that it had left")
            for pipe in ready:
                try:
                    kind, answers[pipe] = pipe.recv()
                except EOFError:
                    raise Failed(self._last_words()) from None
                if kind == "failed":
                    raise Failed(answers[pipe])
        return list(answers.values())

    def _last_words(self) -> str:
        """Why a process can't be reached: what it said, or how it ended."""
        for pipe, process in zip(self.pipes, self.processes):
            try:
                if pipe.poll() and (said := pipe.recv())[0] == "failed":
                    return said[1]
            except (EOFError, OSError):
                process.join(5)
        return f"its process ended with exit code {[process.exitcode for process in self.processes]}"

    def close(self) -> None:
        """End its processes."""
        for pipe in self.pipes:
            try:
                pipe.send(None)
            except OSError:  # it has ended
                pass
        for process in self.processes:
            process.join(1 if self.row["error"] else 20)
            if process.is_alive():
                process.kill()
                process.join()


def in_turns(contenders: list[Contender], options: argparse.Namespace) -> list[Row]:
    """The rows, with `seconds` of a step in each round, losses of the first turn and the memory of one more step."""
    for contender in contenders:
        report = contender.ask("time", max(1, options.warm_up))
        contender.row.update(report and {"losses": report["losses"]} or {})
    for number in range(options.rounds):
        for contender in contenders if number % 2 == 0 else reversed(contenders):
            if (report := contender.ask("time", options.steps)) is not None:
                contender.row["seconds"].append(report["seconds"])
        progress(f"round {number + 1}/{options.rounds}")
    for contender in contenders:
        report = contender.ask("memory", 1) or {}
        contender.row.update({key: value for key, value in report.items() if key not in ("seconds", "losses")})
        contender.close()
    return [contender.row for contender in contenders]


def progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


# ------------------------------------------------------------------- numbers -> a page


def median(row: Row) -> Optional[float]:
    """Seconds of a step."""
    return statistics.median(row["seconds"]) if row["seconds"] and not row["error"] else None


def times_faster(row: Row, other: Row) -> Optional[float]:
    """The median over rounds of how many times faster a row was than another in the same round."""
    if row["error"] or other["error"] or not row["seconds"]:
        return None
    return statistics.median(b / a for a, b in zip(row["seconds"], other["seconds"], strict=True))


def spread(row: Row) -> str:
    """The quartiles of the seconds of a step, in milliseconds."""
    if row["error"] or len(row["seconds"]) < 2:
        return ""
    low, _, high = statistics.quantiles(row["seconds"], n=4, method="inclusive")
    return f"{milliseconds(low)}-{milliseconds(high)}"


def milliseconds(seconds: float) -> str:
    """With three digits and more."""
    return f"{1000 * seconds:.{2 if seconds < 0.01 else 1 if seconds < 0.1 else 0}f}"


def number(value: Optional[float], form: str = ".2f") -> str:
    """A cell; empty where nothing was measured."""
    return "" if value is None else format(value, form)


def mebibytes(count: Optional[int]) -> str:
    return "" if count is None else f"{count / sharding.MIB:.1f}"


def table(titles: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    """Markdown. The first column is of words, the others are of numbers."""
    titles = list(titles)
    rows = [titles, ["---", *["--:"] * (len(titles) - 1)], *map(list, lines)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in rows)


def failed(name: str, row: Row, titles: list[str]) -> list[str]:
    """The cells of a row that has none but its error."""
    return [name, row["error"], *[""] * (len(titles) - 2)]


def page(script: str, title: str, notes: list[str], options: argparse.Namespace, body: str) -> str:
    """A heading, what was run where, and the tables."""
    facts = about(script, options)
    lines = [f"- {key[0].upper()}{key[1:]}: {value}" for key, value in facts.items()]
    return "\n".join([f"# {title}", "", *lines, *(f"- {note}" for note in notes), "", body])


def about(script: str, options: argparse.Namespace) -> dict[str, str]:
    """What was run, when, where and with which versions."""
    import lightning
    import torch
    import transformers

    cores = f"{os.cpu_count()} cores, {options.threads} thread{'s' * (options.threads > 1)} a process"
    hardware = options.device.get("name") or f"{sharding.cpu_name()}, {cores}"
    return {
        "command": f"`{shlex.join(['python', f'benchmarks/{script}', *options.argv])}`",
        "date": str(datetime.date.today()),
        "hardware": hardware,
        "load": f"average {options.load:.1f} before the start, {os.getloadavg()[0]:.1f} at the end",
        "versions": f"Python {platform.python_version()}, torch {torch.__version__}, "
        f"lightning {lightning.__version__}, transformers {transformers.__version__}",
        **({"smoke": "toy sizes, these figures mean nothing"} if options.smoke else {}),
    }


def write(script: str, options: argparse.Namespace, rows: Any) -> None:
    """The numbers as JSON, if asked for."""
    if options.output is not None:
        document = {"about": about(script, options), "rows": rows}
        options.output.write_text(json.dumps(document, indent=1, default=str) + "\n")
