"""What safety costs: the part of a save that goes into manifest and hashes, and of a step that goes into guards.

    python benchmarks/safety_cost.py --output safety.json

Saves: a Llama of some 60 million parameters in float32 with AdamW's state, on one process (full) and on two FSDP ranks
(full, sharded), saved in turns with and without hashing (fsync stays). Single saves scatter by a third: forty of each
are needed for a median to 2 %. Steps: two ranks, a Llama of 1.3 million parameters, in turns with and without the
requests, marks and judgement that each step makes. Medians and ratios; a quarter of an hour in which nothing else should
run.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import conftest  # noqa: E402, F401  one thread, no network
import datasets  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from ranks import run_ranks  # noqa: E402
from transformers import LlamaConfig  # noqa: E402

SAVED = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 12, "num_attention_heads": 8}
SAVES = ((1, "full"), (2, "full"), (2, "sharded"))  # ranks, --state_dict_type
STEPPED = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40, help="saves of each kind")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--output", type=Path, default=None, help="JSON file for the results")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=ROOT / "checkpoints"))  # on the disk that runs go to
    try:
        tokens = np.random.default_rng(0).integers(0, 2000, (2048, 256)).tolist()
        rows = datasets.Dataset.from_dict({"input_ids": tokens})
        datasets.DatasetDict({"train": rows, "validation": rows.select(range(16))}).save_to_disk(str(folder / "data"))
        for name, shape in (("saved", SAVED), ("stepped", STEPPED)):
            LlamaConfig(**shape, vocab_size=16_000 if name == "saved" else 2048).save_pretrained(folder / name)
        saves = [
            run_ranks(ranks, time_saves, folder, options.rounds, ranks, what, timeout_seconds=900)[0]
            for ranks, what in SAVES
        ]
        step = run_ranks(2, time_steps, folder, options.steps, timeout_seconds=1800)[0]
    finally:
        shutil.rmtree(folder)
    results = {"saves": saves, "step": step, "torch": torch.__version__}
    if options.output is not None:
        options.output.write_text(json.dumps(results, indent=2) + "\n")
    print(json.dumps(results, indent=2))


def flags(folder: Path, model: str, *more: Any) -> list[str]:
    words = ["--model_name", folder / model, "--train_data_dir", folder / "data", "--output_dir", folder / "runs"]
    words += ["--precision", "32-true", "--eval_iters", 0, "--verify_start", "false", "--log_step_interval", 10**6]
    return [str(word) for word in [*words, *more]]


def time_saves(folder: Path, rounds: int, ranks: int, what: str) -> dict[str, Any]:
    """Seconds of a whole save on this rank, with and without hashing."""
    import train
    from fabric_llm.base import files
    from fabric_llm.run.saver import Saver

    times: dict[str, list[float]] = {"with": [], "without": []}
    processor: dict[str, list[float]] = {"with": [], "without": []}
    save, hashed = Saver.save, files.sha256

    def timed(self: Any, *given: Any, **named: Any) -> None:
        count = len(times["with"]) + len(times["without"])
        kind = "with" if count % 4 in (0, 3) else "without"  # ABBA: whatever comes every second time falls on both
        files.sha256 = hashed if kind == "with" else lambda path: "0" * 64
        self.fabric.barrier()
        began, worked = time.perf_counter(), time.process_time()
        save(self, *given, **named)
        processor[kind].append(time.process_time() - worked)
        self.fabric.barrier()
        times[kind].append(time.perf_counter() - began)
        files.sha256 = hashed

    Saver.save = timed
    more = ("--max_step", 2 * rounds + 2, "--save_step_interval", 1, "--keep_last", 1, "--run_name", f"{ranks}-{what}")
    more += ("--devices", ranks, "--global_batch_size", ranks, "--state_dict_type", what)
    train.main(flags(folder, "saved", *more))
    last = folder / "runs" / f"{ranks}-{what}" / f"step-{2 * rounds + 2:08d}"
    size = sum(path.stat().st_size for path in last.rglob("*") if path.is_file())
    medians = {kind: statistics.median(values[1:]) for kind, values in times.items()}
    worked = {kind: statistics.median(values[1:]) for kind, values in processor.items()}
    pairs = [a / b for a, b in zip(times["with"][1:], times["without"][1:])]
    said = {"ranks": ranks, "state_dict_type": what, "bytes": size, "seconds": medians, "processor_seconds": worked}
    return {
        **said,
        "ratio": medians["with"] / medians["without"],
        "median_of_pairs": statistics.median(pairs),
        "all": times,
    }


def time_steps(folder: Path, steps: int) -> dict[str, Any]:
    """Milliseconds of a step, with and without what watches over it, and those spent in it.

    The scatter of whole steps is larger than 1 % on a shared machine, so what the step calls is timed by itself as well,
    and the processor time of the watching thread.
    """
    import train
    from fabric_llm.processes.stop import Requests
    from fabric_llm.processes.watch import Watch
    from fabric_llm.run.saver import Saver
    from fabric_llm.training import step as parts
    from fabric_llm.training.guard import Guard

    inside, watching, began = [0.0], [0.0], time.perf_counter()
    share = parts.share  # the loss goes over the ranks in any case; what they ask goes with it
    ours = {
        (Requests, "ask"): lambda self: (False, False),
        (Saver, "has_written"): lambda self: False,
        (Watch, "mark"): lambda self, step, doing: None,
        (Guard, "accept"): lambda self, loss, grad_norm: True,
    }
    kinds = {
        "with": {
            **{place: clocked(getattr(*place), inside, time.perf_counter) for place in ours},
            (parts, "share"): share,
        },
        "without": {
            **ours,
            (parts, "share"): lambda fabric, total, asked: (share(fabric, total, [])[0], [0] * len(asked)),
        },
    }
    for name in ("_beat", "_listen", "_hangs"):
        setattr(Watch, name, clocked(getattr(Watch, name), watching, time.thread_time))
    times: dict[str, list[float]] = {"with": [], "without": [], "inside": []}
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
    more = (
        "--max_step",
        steps,
        "--strategy",
        "fsdp",
        "--devices",
        2,
        "--global_batch_size",
        8,
        "--micro_batch_size",
        4,
    )
    train.main(flags(folder, "stepped", *more, "--run_name", "steps"))
    medians = {kind: 1000 * statistics.median(values) for kind, values in times.items()}
    return {
        "milliseconds": medians,
        "ratio": medians["with"] / medians["without"],
        "part_inside": medians["inside"] / medians["without"],
        "part_watching": watching[0] / (time.perf_counter() - began),
        "steps": len(times["with"]),
    }


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
    main()
