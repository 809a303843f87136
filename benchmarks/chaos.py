"""Kill training at random, again and again: is the latest checkpoint ever unreadable, is anything ever lost?

    python benchmarks/chaos.py --kills 500 --output chaos.json

Two FSDP ranks train a small GPT-2 with dropout and stochastic rounding. Each attempt is killed with SIGKILL after a random
time: rank 0, rank 1 or both. After each kill everything that bears a checkpoint's name is read and hashed, and the steps
that are gone are counted. `--resume auto` goes on until the run is done, which must then have the weights and the log of
an undisturbed run, bit for bit; then the next run begins. Ranks are forked, as in the tests, so that 500 kills take minutes.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import conftest  # noqa: E402  the tests' toy models and data
import numpy as np  # noqa: E402
import torch  # noqa: E402
from ranks import Job, metrics  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from fabric_llm.base import step_names
from fabric_llm.base.faults import PEER_LOST, Fault  # noqa: E402
from fabric_llm.checkpoint import reading  # noqa: E402

STEPS, INTERVAL = 15, 3
KINDS = [  # strategy, --state_dict_type, --async_save
    ("fsdp", "full", "false"),
    ("fsdp", "sharded", "false"),
    ("fsdp2", "full", "false"),
    ("fsdp2", "sharded", "true"),
    ("fsdp", "full", "true"),
]
KEYS = ("step", "loss", "grad_norm", "lr", "tokens", "eval_loss")


@dataclass
class Result:
    """What happened to one kind of run."""

    strategy: str
    state_dict_type: str
    async_save: str
    kills: int = 0
    runs: int = 0  # that came to their end in spite of the kills
    unreadable: int = 0  # checkpoints that bear a checkpoint's name and don't verify
    most_lost_steps: int = 0  # logged and gone, after any kill
    different_runs: int = 0  # whose final weights or log aren't the undisturbed run's
    orphans: int = 0  # ranks that did not end by themselves after the other was killed
    leftovers: int = 0  # kills that left a half-written or half-removed folder behind, swept at the next start
    exit_codes: dict[str, int] = field(default_factory=dict)  # of ranks that weren't killed, in attempts that were
    seconds: float = 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--early", type=float, default=0.0, help="part of the kills that come while ranks still set up")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=None, help="JSON file for the results")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    try:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(conftest.TOY_CONFIGS["gpt2"]).save_pretrained(folder / "gpt2")
        conftest.make_dataset(folder / "data", np.random.default_rng(0))
        each = -(-options.kills // len(KINDS))
        results: list[Result] = []
        for number, kind in enumerate(KINDS):
            results.append(chaos(folder, Result(*kind), each, options.early, options.seed + number))
            write(options, results)
    finally:
        shutil.rmtree(folder)
    print(table(results))
    raise SystemExit(any(r.unreadable or r.different_runs or r.orphans for r in results))


def write(options: argparse.Namespace, results: list[Result]) -> None:
    """What there is so far."""
    document = {"steps": STEPS, "save_step_interval": INTERVAL, "torch": torch.__version__, "seed": options.seed}
    document["results"] = [asdict(result) for result in results]
    if options.output is not None:
        options.output.write_text(json.dumps(document, indent=2) + "\n")


def chaos(folder: Path, result: Result, kills: int, early: float, seed: int) -> Result:
    """Run after run until there were so many kills."""
    generator, began = random.Random(seed), time.monotonic()
    output = folder / "-".join([result.strategy, result.state_dict_type, result.async_save])
    reference = output / "undisturbed"
    start = time.monotonic()
    job = train(folder, output, reference.name, result)
    assert job.wait() == [0, 0], job.output
    longest, codes = time.monotonic() - start, Counter[str]()
    while result.kills < kills:
        run = output / f"run-{result.runs}"
        while not attempt(folder, run, result, codes, generator, moment(generator, longest, early)):
            if result.kills % 20 == 0:
                print(f"{output.name}: {result.kills} kills, {result.runs} runs ended", flush=True)
        result.runs += 1
        result.different_runs += not same(run, reference)
        shutil.rmtree(run)
    result.exit_codes, result.seconds = dict(codes), round(time.monotonic() - began, 1)
    return result


def moment(generator: random.Random, longest: float, early: float) -> float:
    """Seconds after a start at which to kill; an undisturbed run takes `longest`."""
    return generator.uniform(0.0, longest * (0.3 if generator.random() < early else 1.1))


def train(folder: Path, output: Path, run_name: str, kind: Result) -> Job:
    return Job(
        2,
        *("--model_name", folder / "gpt2", "--train_data_dir", folder / "data", "--output_dir", output),
        *("--strategy", kind.strategy, "--state_dict_type", kind.state_dict_type, "--async_save", kind.async_save),
        *("--lr", 1e-2, "--micro_batch_size", 1, "--global_batch_size", 4, "--max_step", STEPS),
        *("--save_step_interval", INTERVAL, "--eval_iters", 2, "--eval_batch_size", 2, "--eval_step_interval", 5),
        *("--keep_last", 2, "--keep_best", 0, "--hang_timeout", 60, "--resume", "auto", "--run_name", run_name),
    )


def attempt(
    folder: Path, run: Path, result: Result, codes: Counter[str], generator: random.Random, seconds: float
) -> bool:
    """One start of `run`, and the kill after `seconds`. True if it came to its end, False if it was killed, which is counted."""
    job = train(folder, run.parent, run.name, result)
    time.sleep(seconds)
    victims = generator.choice([[0], [1], [0, 1], [0, 1]])
    job.kill(victims)
    try:
        ended = job.wait(90)
    except AssertionError as error:
        print(f"ORPHAN after {victims} of {run.name} were killed: {error}", flush=True)
        result.orphans += 1
        ended = []
    if ended == [0, 0]:
        return True
    result.kills += 1
    codes.update(str(code) for code in ended if code != -9)
    result.leftovers += any(path.name.startswith((".tmp-", ".trash-")) for path in run.glob(".t*"))
    for path in step_names.step_directories(run):
        try:
            reading.verified(path, hashes=True)
        except Fault as fault:
            print(f"UNREADABLE: {fault}", flush=True)
            result.unreadable += 1
    last = step_names.latest(run)
    durable = 0 if last is None else step_names.step_of(last)
    result.most_lost_steps = max(result.most_lost_steps, logged(run) - durable)
    return False


def logged(run: Path) -> int:
    """The last step that metrics.jsonl knows."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.is_file() else []
    return max((json.loads(line)["step"] for line in lines if line.endswith("}")), default=0)


def same(run: Path, reference: Path) -> bool:
    """Whether final weights, optimizer state and log are equal bit for bit."""
    ours, theirs = tensors(run), tensors(reference)
    equal = ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    return equal and all(metrics(run, key) == metrics(reference, key) for key in KEYS)


def tensors(run: Path) -> dict[tuple[str, str], torch.Tensor]:
    last = run / f"step-{STEPS:08d}"
    files = sorted(last.rglob("*.safetensors"))
    return {(str(f.relative_to(last)), name): value for f in files for name, value in load_file(f).items()}


def table(results: list[Result]) -> str:
    head = "| strategy | checkpoint | async | kills | runs ended | unreadable | most steps lost | runs that differ | orphans | leftovers swept | seconds |"
    lines = [head, "|" + "---|" * 11]
    for r in results:
        cells = (r.strategy, r.state_dict_type, r.async_save, r.kills, r.runs, r.unreadable, r.most_lost_steps)
        lines.append("| " + " | ".join(map(str, (*cells, r.different_runs, r.orphans, r.leftovers, r.seconds))) + " |")
    lines.append(f"\nRanks that weren't killed themselves ended with {PEER_LOST}, or were done: see exit_codes.")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
