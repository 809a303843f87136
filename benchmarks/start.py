"""What starting and stopping costs: seconds from `python train.py` to its verified start, its first step, and its end.

    python benchmarks/start.py --rounds 7 --against ../before --output start.json

A random Llama of 0.02 million parameters and 44 rows of 24 tokens, so that nothing but starting takes time: alone, on two
ranks, and resumed. Each run is a `train.py` of its own, as a user starts it. --against: another checkout, whose runs come
in turns with this one's. Wall time needs a machine that does nothing else; processor time (user and system, of all ranks
together) says nearly the same on one that does.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
CASES = {  # name -> flags
    "1 device": ("--devices", "1"),
    "2 devices, fsdp": ("--devices", "2", "--strategy", "fsdp"),
    "2 devices, ddp": ("--devices", "2", "--strategy", "ddp"),
}
SIGNS = {"Start verified": "Start verified", "first step": "step "}  # how a line begins that says so
STEPS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="runs of each kind")
    parser.add_argument("--against", type=Path, default=None, help="another checkout, to compare with")
    parser.add_argument("--output", type=Path, default=None, help="JSON file for the results")
    options = parser.parse_args()
    checkouts = {"here": ROOT} | ({} if options.against is None else {"against": options.against.resolve()})
    folder = Path(tempfile.mkdtemp())
    times: dict[str, list[dict[str, float]]] = {}
    try:
        make_toys(folder)
        for number in range(options.rounds + 1):
            for case in CASES:
                for name, checkout in checkouts.items():
                    for resumes in (False, True):
                        took = time_run(checkout, folder, f"{name}-{case}".replace(" ", "-"), case, resumes)
                        if number > 0:  # the first round fills the disk cache
                            times.setdefault(f"{name}: {case}{', resumed' * resumes}", []).append(took)
                    shutil.rmtree(folder / "runs")
    finally:
        shutil.rmtree(folder)
    medians = {
        kind: {what: round(statistics.median(run[what] for run in runs), 2) for what in runs[0]}
        for kind, runs in times.items()
    }
    results = {"medians": medians, "rounds": options.rounds, "load": os.getloadavg(), **versions()}
    if options.output is not None:
        options.output.write_text(json.dumps({**results, "runs": times}, indent=2) + "\n")
    print(json.dumps(results, indent=2))


def versions() -> dict[str, Any]:
    names = ("torch", "lightning", "transformers", "datasets")
    return {"python": platform.python_version(), "cores": os.cpu_count(), **{name: version(name) for name in names}}


def make_toys(folder: Path) -> None:
    """`model` and `data`, as the tests have them."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    import conftest
    import numpy as np
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_config(conftest.TOY_CONFIGS["llama"]).save_pretrained(folder / "model")
    conftest.make_dataset(folder / "data", np.random.default_rng(0))


def time_run(checkout: Path, folder: Path, run: str, case: str, resumes: bool) -> dict[str, float]:
    """Seconds to each sign and to the exit of one run, and its seconds of processor time. Raises where it fails."""
    words = ["--model_name", folder / "model", "--train_data_dir", folder / "data", "--output_dir", folder / "runs"]
    words += ["--run_name", run, "--micro_batch_size", 2, "--global_batch_size", 4, "--precision", "32-true"]
    words += ["--max_step", STEPS * (1 + resumes), "--log_step_interval", 1, "--eval_iters", 0, *CASES[case]]
    words += ["--resume", "true", "--resume_override", "max_step"] if resumes else []
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, str(checkout / "train.py"), *map(str, words)],
        cwd=checkout,
        env={**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    found: dict[str, float] = {}
    said = []
    for line in process.stdout:
        said.append(line)
        for sign in (name for name, start in SIGNS.items() if line.startswith(start)):
            found.setdefault(sign, time.perf_counter() - began)
    _, status, usage = os.wait4(process.pid, 0)  # of the ranks that it started as well, which it has waited for
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0 and found.keys() == SIGNS.keys(), "".join(said)
    return {**found, "exit": time.perf_counter() - began, "processor time": usage.ru_utime + usage.ru_stime}


if __name__ == "__main__":
    main()
