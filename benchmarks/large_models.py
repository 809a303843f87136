"""What a model that is large for its host takes of the host's memory: to start, resume, rewind, save and export, beside its goals.

    python benchmarks/large_models.py --markdown docs/results/large_models.md --against ../before

A random Llama of 2 GiB in bfloat16, on ranks that share one host. Each case is a run that starts, saves, goes back once and saves
again, then another that resumes it on another number of ranks and saves shards, and an export of either checkpoint. Memory is
what the operating system says of all processes together, 20 times a second. It is compared with what was there just before: for
a start what the processes have imported, for a save the memory of training. --against: another checkout, for seconds from the
command to the first step.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, Optional

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import inputs, memory, page, start  # noqa: E402
from benchmarks.turns import alternate  # noqa: E402
from fabric_llm.base.program import plain_output  # noqa: E402

GIB = 2**30
SHAPES = {  # GiB in bfloat16 -> fields of LlamaConfig
    2: {"hidden_size": 1664, "intermediate_size": 4576, "num_hidden_layers": 31, "num_attention_heads": 26},
    0.5: {"hidden_size": 832, "intermediate_size": 2288, "num_hidden_layers": 31, "num_attention_heads": 13},
    0.125: {"hidden_size": 416, "intermediate_size": 1144, "num_hidden_layers": 31, "num_attention_heads": 13},
}
CONTEXT_TOKENS, VOCABULARY = 16, 8192
SETTLING_SECONDS = 2  # before a phase, so that what was there before it is sampled without what the last one has freed
EVERY_SECONDS = 0.05
REWINDS_AT = 2  # the step that a run goes back after, once


class Case(NamedTuple):
    """A run, and the number of ranks that it is resumed on."""

    strategy: str
    ranks: int
    resumed_on: int


CASES = (Case("fsdp2", 1, 2), Case("fsdp2", 2, 4), Case("fsdp2", 4, 1), Case("fsdp", 2, 1))
EXPORTED, TIMED_RANKS = CASES[1], (1, 2)
TITLES = ["", "ranks", "before", "peak", "beyond", "goal", "met", "with pages of files", "largest rank"]


class Phase(NamedTuple):
    """What a command did from one moment to another."""

    name: str
    began: float  # of time.monotonic
    ended: float


def main(argv: Optional[list[str]] = None) -> int:
    parser = page.parser(__doc__, rounds=3)
    parser.add_argument("--against", type=Path, help="another checkout, to compare the seconds of a start with")
    parser.add_argument("--gib", type=float, default=2, choices=SHAPES, help="size of the model")
    parser.add_argument("--cases", type=int, nargs="*", default=range(len(CASES)), help="which of the cases, by number")
    options = page.parse(parser, argv)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        shape = {"vocab_size": VOCABULARY, "max_position_embeddings": CONTEXT_TOKENS, **SHAPES[options.gib]}
        inputs.write_llama(folder / "model", with_weights=True, dtype="bfloat16", **shape)
        inputs.write_rows(folder / "data", VOCABULARY, CONTEXT_TOKENS, 256)
        size = sum(file.stat().st_size for file in (folder / "model").glob("*.safetensors"))
        rows = [row for case in options.cases for row in rows_of(folder, CASES[case], size)]
        body = page.table(TITLES, map(cells, rows))
        if options.against is not None:
            seconds = seconds_to_first_step(folder, options.against.resolve(), options.rounds)
            titles = ["seconds to the first step", "before", "after", "processor time: before", "after"]
            body += f"\n\n{page.table(titles, seconds)}"
    notes = [
        f"Model: Llama, {size / 2:,.0f} parameters, {size / GIB:.2f} GiB in bfloat16, {shape['num_hidden_layers']} layers; "
        f"bf16-true, AdamW, context {CONTEXT_TOKENS}, micro-batch 1",
        "Memory: GiB of all processes together, anonymous and shared (PSS of /proc/PID/smaps_rollup), before the phase, at its "
        "peak, and beyond what was there before; then the same with pages of mapped files, which the kernel may drop; then "
        "of the rank that has most",
        "Goals, of what comes beyond: weights of a start 1.3 x the model and 1 GiB; verified no more than the first step; "
        "optimizer 2.3 x, two moments; rewind and saves 0.3 x; an export 1.2 x its largest file",
    ]
    page.write("large_models.py", "Models that are large for their host", notes, options, body, rows)
    return 0


# ------------------------------------------------------------------------------- memory


def rows_of(folder: Path, case: Case, model_bytes: int) -> Iterator[page.Row]:
    """The measurements of a case. Bytes: "before", "peak" and so on of anonymous memory, "goal" of what comes to "before"."""
    name = f"{case.strategy}-{case.ranks}"
    run = folder / "runs" / name
    marks, trace = train(folder, name, max_step=REWINDS_AT, devices=case.ranks, strategy=case.strategy)
    yield from rows_of_run(case, case.ranks, "start", marks, trace, model_bytes)
    if case == EXPORTED:
        yield export_row(folder, "full", run, model_bytes)
    more = {"max_step": REWINDS_AT + 1, "resume": "true", "resume_override": "max_step", "state_dict_type": "sharded"}
    marks, trace = train(folder, name, devices=case.resumed_on, strategy=case.strategy, **more)
    yield from rows_of_run(case, case.resumed_on, "resume", marks, trace, model_bytes)
    if case == EXPORTED:
        yield export_row(folder, "sharded", run, model_bytes)
    subprocess.run(["rm", "-r", run], check=True)


def rows_of_run(
    case: Case, ranks: int, kind: str, marks: list[Phase], trace: list[memory.Held], model_bytes: int
) -> Iterator[page.Row]:
    by_name: dict[str, Phase] = {}
    for phase in marks:
        by_name.setdefault(phase.name, phase)
    read, optimizer, verified, saved = (by_name[name] for name in ("read", "optimizer", "verify", "save"))
    first = f"{case.strategy}: {kind}" + f" of what {case.ranks} have saved" * (kind == "resume")
    # The weights are on this host, whose goal is three tenths of them and 1 GiB.
    room = 1.3 * model_bytes + GIB
    yield row(f"{first}, until the weights are there", ranks, trace, read.began, optimizer.began, room)
    # What comes then is training's own: two moments, and gradients, which are on this host as well.
    yield row(f"{first}, optimizer", ranks, trace, optimizer.began, optimizer.ended, 2.3 * model_bytes)
    step = row(f"{case.strategy}: first step", ranks, trace, verified.ended, saved.began, None)
    room = step["peak"] - at(trace, verified.began).anonymous
    yield row(f"{first}, verified", ranks, trace, verified.began, verified.ended, room)
    yield step
    for phase in marks:
        if phase.name == "rewind":
            yield row(f"{case.strategy}: rewind", ranks, trace, phase.began, phase.ended, 0.3 * model_bytes)
    words = "full save" if kind == "start" else "sharded save"
    # It begins with a forward pass on the probe, which gathers as a step does.
    probe = by_name["probe"]
    yield row(f"{case.strategy}: probe of a save", ranks, trace, probe.began, probe.ended, None)
    yield row(f"{case.strategy}: {words}", ranks, trace, probe.ended, saved.ended, 0.3 * model_bytes)


def export_row(folder: Path, kind: str, run: Path, model_bytes: int) -> page.Row:
    """Of an export into several files: it may hold as much as the largest of them and a fifth, besides what it imports."""
    output = folder / "exported"
    words = ["export_hf.py", str(run), "--output", str(output), "--max_shard_size", f"{model_bytes // 4 // 10**6}MB"]
    marks, trace = watch(folder, words)
    exported = next(phase for phase in marks if phase.name == "export")
    largest = max(file.stat().st_size for file in output.glob("*.safetensors"))
    subprocess.run(["rm", "-r", output], check=True)
    return row(f"export of a {kind} checkpoint", 1, trace, exported.began, exported.ended, 1.2 * largest)


def row(name: str, ranks: int, trace: list[memory.Held], began: float, ended: float, room: Optional[float]) -> page.Row:
    """room: what may come to the memory that was there before; None: as much as it takes."""
    before = at(trace, began)
    during = [now for now in trace if began <= now.seconds <= ended] or [before]
    found = {
        "name": name,
        "ranks": ranks,
        "before": before.anonymous,
        "peak": max(now.anonymous for now in during),
        "goal": room,
        "pss": max(now.pss for now in during),
        "pss_before": before.pss,
        "largest": max(now.largest for now in during),
        "seconds": ended - began,
    }
    page.progress(" ".join(map(str, cells(found))))
    return found


def at(trace: list[memory.Held], moment: float) -> memory.Held:
    """What was held last before a moment."""
    return [now for now in trace if now.seconds <= moment][-1]


def cells(row: page.Row) -> list[Any]:
    beyond, goal = row["peak"] - row["before"], row["goal"]
    judged = ["", ""] if goal is None else [gib(goal), "yes" if beyond <= goal else "**no**"]
    rest = [row["pss"] - row["pss_before"], row["largest"]]
    return [row["name"], row["ranks"], gib(row["before"]), gib(row["peak"]), gib(beyond), *judged, *map(gib, rest)]


def gib(count: float) -> str:
    return f"{count / GIB:.2f}"


def train(folder: Path, name: str, **flags: Any) -> tuple[list[Phase], list[memory.Held]]:
    flags |= {**training_flags(folder, folder / "runs"), "run_name": name, "save_step_interval": 1, "keep_last": 1}
    return watch(folder, ["train.py", *inputs.flags(**flags)])


def training_flags(folder: Path, runs: Path | str) -> dict[str, Any]:
    flags = {"model_name": folder / "model", "train_data_dir": folder / "data", "output_dir": runs}
    flags |= {"precision": "bf16-true", "accumulation_dtype": "same", "log_step_interval": 1}
    return flags | {"global_batch_size": 4, "micro_batch_size": 1, "eval_iters": 0}


def watch(folder: Path, words: list[str]) -> tuple[list[Phase], list[memory.Held]]:
    """What a script of this repository did, by what it marks, and the memory of it and its ranks. Raises where it fails."""
    marks, trace = folder / "marks", []
    marks.write_text("")
    with (folder / "output.txt").open("w+") as output:
        # Large models have no tensor that malloc keeps.
        settings = {**memory.returning(2**19), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
        code = memory.watched(
            [sys.executable, __file__, "--marks", str(marks), *words],
            EVERY_SECONDS,
            trace.append,
            cwd=ROOT,
            env={**os.environ, **settings},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        output.seek(0)
        assert code == 0, output.read()[-3000:]
    lines = (line.split() for line in marks.read_text().splitlines())
    return [Phase(name, float(began), float(ended)) for name, began, ended in lines], trace


# ------------------------------------------------------------------------------- what runs in the measured processes


def run_marked(file: Path, script: str, words: list[str]) -> None:
    """Run a script of this repository that writes into `file` when its phases began and ended."""
    plain_output()
    if script == "export_hf.py":
        import export_hf
        from fabric_llm.verify import export

        mark(file, export, "export", "export")
        sys.exit(export_hf.main(words))
    import train as script_of_training

    train = script_of_training.train

    def marking(*given: Any) -> bool:
        from fabric_llm.checkpoint import writing
        from fabric_llm.run import build, reference, save, verdicts
        from fabric_llm.training.guard import Guard

        mark(file, reference, "load", "read")
        mark(file, build, "make_optimizer", "optimizer")
        mark(file, reference, "verify_start", "verify")
        mark(file, save, "save", "save")
        mark(file, writing, "record_probe", "probe")
        mark(file, verdicts, "rewind", "rewind")
        judge, judged = Guard.accept, []

        def accept(guard: Guard, *numbers: float) -> bool:
            judged.append(judge(guard, *numbers))
            if len(judged) == REWINDS_AT and guard.rewinds == 0:
                guard.verdict, guard.reason = "rewind", "a spike, for once"
                return False
            return judged[-1]

        Guard.accept = accept
        return train(*given)

    script_of_training.train = marking
    script_of_training.main(words)
    os._exit(0)


def mark(file: Path, module: ModuleType, function: str, name: str) -> None:
    """Let a function of a module say, on rank 0, when it began and ended."""
    marked = getattr(module, function)

    def marking(*args: Any, **kwargs: Any) -> Any:
        time.sleep(SETTLING_SECONDS)
        began = time.monotonic()
        result = marked(*args, **kwargs)
        if os.environ.get("RANK", "0") == "0":
            with file.open("a") as out:
                out.write(f"{name} {began} {time.monotonic()}\n")
        return result

    setattr(module, function, marking)


# ------------------------------------------------------------------------------- seconds


def seconds_to_first_step(folder: Path, other: Path, rounds: int) -> Iterator[list[str]]:
    """Lines of the table: medians of the other checkout and of this one, which take turns."""
    checkouts = {"before": other, "after": ROOT}
    times: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for ranks, name in alternate([(ranks, name) for ranks in TIMED_RANKS for name in checkouts], rounds):
        times.setdefault((ranks, name), []).append(time_first_step(checkouts[name], folder, ranks))
    for ranks in TIMED_RANKS:
        of_ranks = [zip(*times[ranks, name]) for name in checkouts]
        passed, worked = zip(*([statistics.median(each) for each in both] for both in of_ranks))
        yield [f"fsdp2 on {ranks}", *(f"{seconds:.1f}" for seconds in (*passed, *worked))]


def time_first_step(checkout: Path, folder: Path, ranks: int) -> tuple[float, float]:
    """Seconds until the line of step 1, and of processor time of all ranks. The run is killed then."""
    with tempfile.TemporaryDirectory(dir=folder) as runs:
        flags = {**training_flags(folder, runs), "run_name": "timed", "max_step": 2}
        began = time.perf_counter()
        process = start.started(checkout, inputs.flags(**flags, devices=ranks, strategy="fsdp2"))
        line = next((line for line in process.stdout if line.startswith(start.SIGNS["first step"])), None)
        seconds = time.perf_counter() - began
        assert line is not None, f"{checkout} ended before its first step"
        pids = memory.held(process.pid).pids
        stats = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
        worked = sum(int(stat[11]) + int(stat[12]) for stat in stats) / os.sysconf("SC_CLK_TCK")
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        process.communicate()
    page.progress(f"{checkout.name}, {ranks} ranks: {seconds:.1f} s, {worked:.1f} s of processor time")
    return seconds, worked


if __name__ == "__main__":
    if sys.argv[1:2] == ["--marks"]:
        run_marked(Path(sys.argv[2]), sys.argv[3], sys.argv[4:])
    sys.exit(main())
