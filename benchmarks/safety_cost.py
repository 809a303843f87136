"""What safety costs: the part of a save that goes into manifest and hashes, and of a step that goes into guards.

    python benchmarks/safety_cost.py --output safety.json

Saves: a Llama of some 60 million parameters in float32 with AdamW's state, on one process (full) and on two FSDP ranks
(full, sharded), saved in turns with and without hashing (fsync stays). Single saves scatter by a third: forty of each
are needed for a median to 2 %. Steps: two ranks, a Llama of 1.3 million parameters, in turns with and without the
requests, marks and judgement that each step makes. Medians and ratios; a quarter of an hour in which nothing else should
run.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Optional

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import conftest  # noqa: E402, F401  one thread, no network
from ranks import run_ranks  # noqa: E402

from benchmarks import inputs, page  # noqa: E402

SAVED = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 12, "num_attention_heads": 8}
SAVES = ((1, "full"), (2, "full"), (2, "sharded"))  # ranks, --state_dict_type
STEPPED = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4}
KINDS = ("with", "without")
Times = dict[str, list[float]]  # by kind


def main(argv: Optional[list[str]] = None) -> int:
    parser = page.parser(__doc__, rounds=40)
    parser.add_argument("--steps", type=int, default=400, help="steps of both kinds together")
    options = page.parse(parser, argv)
    (ROOT / "checkpoints").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ROOT / "checkpoints") as name:  # on the disk that runs go to
        folder = Path(name)
        inputs.write_rows(folder / "data", 2000, 256, 2048)
        inputs.write_llama(folder / "saved", vocab_size=16_000, **SAVED)
        inputs.write_llama(folder / "stepped", vocab_size=2048, **STEPPED)
        saves = {}
        for ranks, what in SAVES:
            [found, *_] = run_ranks(ranks, time_saves, folder, options.rounds, ranks, what, timeout_seconds=900)
            saves[f"{ranks} ranks, {what}"] = found
        steps = run_ranks(2, time_steps, folder, options.steps, timeout_seconds=1800)[0]
    lines = []
    for name, (times, size) in saves.items():
        middle = {kind: statistics.median(times[kind][1:]) for kind in KINDS}
        means = statistics.fmean(times["with"][1:]) / statistics.fmean(times["without"][1:])
        ratios = [f"{ratio:.2f}" for ratio in (middle["with"] / middle["without"], means)]
        lines.append([f"{name}, {size / page.MIB:.0f} MiB", *(f"{middle[kind]:.2f} s" for kind in KINDS), *ratios])
    of_saves = page.table(["a save", "with manifest's hashes", "without", "ratio", "ratio of means"], lines)
    times, watching = steps
    ms = {kind: 1000 * statistics.median(values) for kind, values in times.items()}
    lines = [["with requests, marks and judgement", f"{ms['with']:.1f} ms"], ["without", f"{ms['without']:.1f} ms"]]
    lines += [["spent in them", f"{ms['inside']:.2f} ms, {ms['inside'] / ms['without']:.2%}"]]
    lines += [["processor time of the watching thread", f"{watching:.2%}"]]
    body = f"{of_saves}\n\n{page.table(['a step of two ranks', ''], lines)}"
    page.write("safety_cost.py", "What safety costs", [], options, body, {"saves": saves, "step": steps})
    return 0


def flags(folder: Path, model: str, ranks: int, **more: Any) -> list[str]:
    quiet = {"eval_iters": 0, "log_step_interval": 10**6, "devices": ranks}
    return inputs.training(folder, model, "data", "auto", "32-true", **quiet, **more)


def time_saves(folder: Path, rounds: int, ranks: int, what: str) -> tuple[Times, int]:
    """(seconds of whole saves on this rank with and without hashing, bytes of a checkpoint)"""
    import train
    from fabric_llm.base import files
    from fabric_llm.run import save as saves

    times: Times = {kind: [] for kind in KINDS}
    save, hashed = saves.save, files.sha256

    def timed(training: Any, **named: Any) -> None:
        count = len(times["with"]) + len(times["without"])
        kind = "with" if count % 4 in (0, 3) else "without"  # ABBA: whatever comes every second time falls on both
        files.sha256 = hashed if kind == "with" else lambda path: "0" * 64
        training.fabric.barrier()
        began = time.perf_counter()
        save(training, **named)
        training.fabric.barrier()
        times[kind].append(time.perf_counter() - began)
        files.sha256 = hashed

    saves.save = timed
    run, last = f"{ranks}-{what}", 2 * rounds + 2
    saving = {"max_step": last, "save_step_interval": 1, "keep_last": 1, "state_dict_type": what}
    train.main(flags(folder, "saved", ranks, run_name=run, global_batch_size=ranks, **saving))
    written = (folder / "runs" / run / f"step-{last:08d}").rglob("*")
    return times, sum(path.stat().st_size for path in written if path.is_file())


def time_steps(folder: Path, steps: int) -> tuple[Times, float]:
    """(seconds of steps with and without what watches over them, and inside of it; the watching thread's part of a core)

    The scatter of whole steps is larger than 1 % on a shared machine, so what the step calls is timed by itself as well,
    and the processor time of the watching thread.
    """
    import train
    from fabric_llm.processes.stop import Requests
    from fabric_llm.processes.watch import Watch
    from fabric_llm.run import save as saves
    from fabric_llm.training import step as parts
    from fabric_llm.training.guard import Guard

    inside, watching, began = [0.0], [0.0], time.perf_counter()
    share = parts.share  # the loss goes over the ranks in any case; what they ask goes with it
    nothing = {
        (Requests, "ask"): lambda self: (False, False),
        (saves, "has_written"): lambda run: False,
        (Watch, "mark"): lambda self, step, doing: None,
        (Guard, "accept"): lambda self, loss, grad_norm: True,
    }
    watched = {place: clocked(getattr(*place), inside, time.perf_counter) for place in nothing}
    alone = {(parts, "share"): lambda fabric, total, asked: (share(fabric, total, [])[0], [0] * len(asked))}
    kinds = {"with": {**watched, (parts, "share"): share}, "without": {**nothing, **alone}}
    for name in ("_beat", "_listen", "_hangs"):
        setattr(Watch, name, clocked(getattr(Watch, name), watching, time.thread_time))
    times: Times = {"with": [], "without": [], "inside": []}
    seed_step, state = parts.seed_step, {"kind": "", "began": 0.0}

    def next_step(seed: int, step: int, rank: int) -> None:
        now = time.perf_counter()
        if state["kind"] and step > 5:
            times[state["kind"]].append(now - state["began"])
            times["inside"] += [inside[0]] if state["kind"] == "with" else []
        kind = "with" if (step // 2) % 2 else "without"
        for place, function in kinds[kind].items():
            setattr(*place, function)
        inside[0] = 0.0
        state.update(kind=kind, began=time.perf_counter())
        seed_step(seed, step, rank)

    parts.seed_step = next_step
    more = {"max_step": steps, "strategy": "fsdp", "global_batch_size": 8, "micro_batch_size": 4}
    train.main(flags(folder, "stepped", 2, run_name="steps", **more))
    return times, watching[0] / (time.perf_counter() - began)


def clocked(function: Any, total: list[float], clock: Any) -> Any:
    """`function`, whose time is added to `total`."""

    def timed(*given: Any) -> Any:
        began = clock()
        try:
            return function(*given)
        finally:
            total[0] += clock() - began

    return timed


if __name__ == "__main__":
    sys.exit(main())
