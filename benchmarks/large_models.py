"""What a model that is large for its host takes of the host's memory: to start, resume, rewind,
save and export, beside its goals.

    python benchmarks/large_models.py --markdown docs/results/large_models.md

A random Llama of 2 GiB in bfloat16, on ranks that share one host. Each case is a run that starts,
saves, goes back once and saves again, then another that resumes it on another number of ranks and
saves shards, and an export of either checkpoint. Memory is what the operating system says of all
processes together, 20 times a second. It is compared with what was there just before: for a start
what the processes have imported, for a save the memory of training. start.py --gib 2 has the
seconds of such a start. docs/results/large_models.md says what the columns are, and the goals.
"""

from __future__ import annotations

import itertools
import os
import shutil
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

from benchmarks import inputs, memory, page
from fabric_llm.base.program import plain_output

GIB = 2**30
CONTEXT_TOKENS = 16
# before a phase, so that what was there before it is sampled without what the last one has freed
SETTLING_SECONDS = 2
EVERY_SECONDS = 0.05
REWINDS_AT = 2  # the step that a run goes back after, once


# a run's ranks, and those that resume it
CASES = (
    ("fsdp2", 1, 2),
    ("fsdp2", 2, 4),
    ("fsdp2", 4, 1),
    ("fsdp", 2, 1),
)
EXPORTED = CASES[1]
COLUMNS = {
    "ranks": lambda row: str(row["ranks"]),
    **{"before": page.number("before", of=GIB), "peak": page.number("peak", of=GIB)},
    **{"beyond": page.number("beyond", of=GIB), "goal": page.number("goal", of=GIB)},
    "met": lambda row: (
        "" if row["goal"] is None else "yes" if row["beyond"] <= row["goal"] else "**no**"
    ),
    "with pages of files": page.number("beyond_with_files", of=GIB),
    "largest rank": page.number("largest", of=GIB),
}


class Phase(NamedTuple):
    """What a command did from one moment to another."""

    name: str
    began: float  # of time.monotonic
    ended: float


Watched = tuple[list[Phase], list[memory.Held]]  # what a command did, and what it held


def main(argv: Optional[list[str]] = None) -> int:
    parser = page.parser(__doc__, rounds=1)
    parser.add_argument(
        "--gib", type=float, default=2, choices=inputs.LARGE_LLAMAS, help="size of the model"
    )
    parser.add_argument(
        "--cases",
        type=int,
        nargs="*",
        default=range(len(CASES)),
        help="which of the cases, by number",
    )
    options = page.parse(parser, argv)
    with tempfile.TemporaryDirectory() as temporary:
        folder, shape = Path(temporary), inputs.LARGE_LLAMAS[options.gib]
        inputs.write_llama(folder / "model", with_weights=True, dtype="bfloat16", **shape)
        inputs.write_rows(folder / "data", shape["vocab_size"], CONTEXT_TOKENS, 256)
        size = sum(file.stat().st_size for file in (folder / "model").glob("*.safetensors"))
        rows = [row for case in options.cases for row in rows_of(folder, CASES[case], size)]
    notes = [
        f"Model: Llama, {size / 2:,.0f} parameters, {size / GIB:.2f} GiB in bfloat16, "
        f"{shape['num_hidden_layers']} layers; "
        f"bf16-true, AdamW, context {CONTEXT_TOKENS}, micro-batch 1",
    ]
    title = "Models that are large for their host"
    page.write("large_models.py", title, notes, options, page.compare(rows, COLUMNS), rows)
    return 0


def rows_of(folder: Path, case: tuple[str, int, int], model_bytes: int) -> Iterator[page.Row]:
    """The measurements of a case. Bytes: "before", "peak" and so on of anonymous memory, "goal" of
    what comes to "before"."""
    strategy, ranks, resumed_on = case
    run = folder / "runs" / "run"
    resumes = {"resume": "true", "resume_override": "max_step"}
    for kind, of_ranks, max_step, begins, more in (
        ("full", ranks, REWINDS_AT, "start", {}),
        ("sharded", resumed_on, REWINDS_AT + 1, f"resume of what {ranks} have saved", resumes),
    ):
        flags = {
            "devices": of_ranks,
            "strategy": strategy,
            "max_step": max_step,
            "state_dict_type": kind,
            **more,
        }
        marks, trace = train(folder, run.name, **flags)
        for name, *given in phases(begins, kind, marks, trace, model_bytes):
            yield row(f"{strategy}: {name}", of_ranks, trace, *given)
        if case == EXPORTED:
            yield export_row(folder, kind, run, model_bytes)
    shutil.rmtree(run)


def phases(
    begins: str, kind: str, marks: list[Phase], trace: list[memory.Held], model_bytes: int
) -> Iterator[tuple[str, float, float, Optional[float]]]:
    """(name, when it began and ended, its goal) of each phase of a run, where it has one."""
    of = {phase.name: phase for phase in reversed(marks)}  # the first of each name
    step = of["verify"].ended, of["save"].began
    most = max(now.anonymous for now in trace if step[0] <= now.seconds <= step[1])
    # The weights are on this host, whose goal is three tenths of them and 1 GiB.
    yield (
        f"{begins}, until the weights are there",
        of["read"].began,
        of["optimizer"].began,
        1.3 * model_bytes + GIB,
    )
    # What comes then is training's own: two moments, and gradients, which are on this host as well.
    yield f"{begins}, optimizer", *of["optimizer"][1:], 2.3 * model_bytes
    yield f"{begins}, verified", *of["verify"][1:], most - at(trace, of["verify"].began).anonymous
    yield "first step", *step, None
    if "rewind" in of:
        yield "rewind", *of["rewind"][1:], 0.3 * model_bytes
    # A save begins with a forward pass on the probe, which gathers as a step does.
    yield "probe of a save", *of["probe"][1:], None
    yield f"{kind} save", of["probe"].ended, of["save"].ended, 0.3 * model_bytes


def export_row(folder: Path, kind: str, run: Path, model_bytes: int) -> page.Row:
    """Of an export into several files: it may hold as much as the largest of them and a fifth,
    besides what it imports."""
    output = folder / "exported"
    words = [
        "export_hf.py",
        str(run),
        "--output",
        str(output),
        "--max_shard_size",
        f"{model_bytes // 4 // 10**6}MB",
    ]
    marks, trace = watch(folder, words)
    exported = next(phase for phase in marks if phase.name == "export")
    largest = max(file.stat().st_size for file in output.glob("*.safetensors"))
    shutil.rmtree(output)
    return row(f"export of a {kind} checkpoint", 1, trace, *exported[1:], 1.2 * largest)


def row(
    name: str,
    ranks: int,
    trace: list[memory.Held],
    began: float,
    ended: float,
    room: Optional[float],
) -> page.Row:
    """room: what may come to the memory that was there before; None: as much as it takes."""
    before = at(trace, began)
    during = [now for now in trace if began <= now.seconds <= ended] or [before]
    found = {"name": name, "ranks": ranks, "error": None, "goal": room, "before": before.anonymous}
    found["peak"] = max(now.anonymous for now in during)
    found["beyond"] = found["peak"] - before.anonymous
    found["beyond_with_files"] = max(now.pss for now in during) - before.pss
    found |= {"largest": max(now.largest for now in during), "seconds": ended - began}
    page.progress(f"{name}: {found['beyond'] / GIB:.2f} GiB beyond {before.anonymous / GIB:.2f}")
    return found


def at(trace: list[memory.Held], moment: float) -> memory.Held:
    """What was held last before a moment."""
    return [now for now in trace if now.seconds <= moment][-1]


def train(folder: Path, name: str, **flags: Any) -> Watched:
    flags |= {
        "model_name": folder / "model",
        "train_data_dir": folder / "data",
        "output_dir": folder / "runs",
    }
    flags |= {
        "precision": "bf16-true",
        "accumulation_dtype": "same",
        "log_step_interval": 1,
        "eval_iters": 0,
    }
    flags |= {
        "global_batch_size": 4,
        "micro_batch_size": 1,
        "save_step_interval": 1,
        "keep_last": 1,
    }
    return watch(folder, ["train.py", *inputs.flags(**flags, run_name=name)])


def watch(folder: Path, words: list[str]) -> Watched:
    """Of a script of this repository, by what it marks. Raises where it fails."""
    marks, trace = folder / "marks", []
    marks.write_text("")
    with (folder / "output.txt").open("w+") as output:
        settings = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
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


def run_marked(file: Path, script: str, words: list[str]) -> None:
    """Run a script of this repository that writes into `file` when its phases began and ended."""
    plain_output()
    if script == "export_hf.py":
        import export_hf
        from fabric_llm.weights import export

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
        judge, steps = Guard._judge, itertools.count(1)

        def rewind_once(guard: Guard, *numbers: float) -> tuple[str, str]:
            return (
                ("rewind", "a spike, for once")
                if next(steps) == REWINDS_AT
                else judge(guard, *numbers)
            )

        Guard._judge = rewind_once
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


if __name__ == "__main__":
    if sys.argv[1:2] == ["--marks"]:
        run_marked(Path(sys.argv[2]), sys.argv[3], sys.argv[4:])
    sys.exit(main())
