"""What starting and stopping costs: seconds from `python train.py` to its verified start, its first
step, and its end.

    python benchmarks/start.py --rounds 7 --against ../before --output start.json

A random Llama of 0.02 million parameters and 44 rows of 24 tokens, so that nothing but starting
takes time: alone, on two ranks, and resumed. With --gib it is a large one in bfloat16, as in
large_models.py. Each run is a `train.py` of its own, as a user starts it. --against: another
checkout, whose runs come in turns with this one's. Wall time needs a machine that does nothing
else; processor time (user and system, of all ranks together) says nearly the same on one that does.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Optional

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import inputs, page
from benchmarks.turns import DTYPES, alternate

CASES = {  # name -> flags
    "1 device": {"devices": 1},
    "2 devices, fsdp": {"devices": 2, "strategy": "fsdp"},
    "2 devices, fsdp2": {"devices": 2, "strategy": "fsdp2"},
    "2 devices, ddp": {"devices": 2, "strategy": "ddp"},
}
# how a line begins that says so
SIGNS = {
    "start verified": "Start verified",
    "first step": "step ",
}
STEPS = 3
TITLES = ["seconds to", *SIGNS, "exit", "processor time"]


def main(argv: Optional[list[str]] = None) -> int:
    parser = page.parser(__doc__, rounds=5)
    parser.add_argument("--against", type=Path, help="another checkout, to compare with")
    parser.add_argument(
        "--gib", type=float, choices=inputs.LARGE_LLAMAS, help="size of the model in bfloat16"
    )
    parser.add_argument(
        "--cases", nargs="+", default=list(CASES), choices=CASES, help="devices and strategies"
    )
    options = page.parse(parser, argv)
    shape = (
        inputs.LARGE_LLAMAS[options.gib] if options.gib else {"vocab_size": 128, **inputs.TOY_LLAMA}
    )
    dtype = "bfloat16" if options.gib else "float32"
    checkouts = {"here": ROOT} | (
        {} if options.against is None else {"against": options.against.resolve()}
    )
    kinds = [(name, case) for case in options.cases for name in checkouts]
    times: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        inputs.write_llama(folder / "model", with_weights=True, dtype=dtype, **shape)
        inputs.write_rows(folder / "data", 128, 24, 44)
        for name, case in alternate(kinds, 1 + options.rounds):
            run = f"{name}-{len(times.get(f'{name}: {case}', []))}-{case}".replace(" ", "-")
            for resumed in (False, True):
                took = time_run(checkouts[name], folder, run, case, resumed, DTYPES[dtype])
                times.setdefault(f"{name}: {case}{', resumed' * resumed}", []).append(took)
            shutil.rmtree(folder / "runs" / run)
    lines = [
        [kind, *(f"{statistics.median(run[what] for run in runs[1:]):.2f}" for what in TITLES[1:])]
        for kind, runs in times.items()
    ]
    notes = [
        f"Medians of {options.rounds}; a first round, which fills the disk cache, isn't counted"
    ]
    page.write("start.py", "What starting costs", notes, options, page.table(TITLES, lines), times)
    return 0


def time_run(
    checkout: Path, folder: Path, run: str, case: str, resumes: bool, precision: str
) -> dict[str, float]:
    """Seconds to each sign and to the exit of one run, and its seconds of processor time. Raises
    where it fails."""
    words = inputs.flags(
        model_name=folder / "model", train_data_dir=folder / "data", output_dir=folder / "runs"
    )
    words += inputs.flags(
        run_name=run, micro_batch_size=2, global_batch_size=4, precision=precision, eval_iters=0
    )
    words += inputs.flags(max_step=STEPS * (1 + resumes), log_step_interval=1, **CASES[case])
    words += ["--resume", "true", "--resume_override", "max_step"] if resumes else []
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, str(checkout / "train.py"), *words],
        cwd=checkout,
        env={
            **os.environ,
            "PYTHONPATH": str(checkout),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        },
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
    # of the ranks that it started as well, which it has waited for
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0 and found.keys() == SIGNS.keys(), "".join(said)
    return {
        **found,
        "exit": time.perf_counter() - began,
        "processor time": usage.ru_utime + usage.ru_stime,
    }


if __name__ == "__main__":
    sys.exit(main())
