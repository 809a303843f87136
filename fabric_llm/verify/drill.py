"""Rehearse a crash: train the same run twice, once undisturbed, once killed and resumed, and compare them bit for bit.

One rank is killed with SIGKILL. The rank and the step are random. Both runs use the user's own flags, except those in OWN.
They are `undisturbed` and `killed` in the drill's folder, beside a log of each start.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Optional

import torch

from fabric_llm.base import failpoints, files, step_names
from fabric_llm.base.faults import DONE, NO_CHECKPOINT, Fault
from fabric_llm.checkpoint.tensors import stored_parts
from fabric_llm.plan import run_directory
from fabric_llm.processes.launch import PARENT, find_launcher
from fabric_llm.verify.report import say

TRAIN = Path(__file__).resolve().parents[2] / "train.py"
OWN = {  # flags of train.py
    "log_step_interval": 1,
    "keep_last": "null",
    "sample_tokens": 0,
    "logger": "none",
    "log_model": "false",
    "checkpoint": "null",
    "resume_override": "null",
}
MOST_RESUMES = 3  # a start may fail for reasons of the machine, such as a port in use
COMPARED = ("step", "loss", "grad_norm", "lr", "tokens", "sources", "eval_loss", "eval")  # the rest is speed and memory
SHOWN = ("step ", "train.py: ", "Warning: ")  # lines of train.py that are shown
SECONDS_FOR_LAUNCHER = 40.0  # torchrun gives its ranks 30 s to end
SECONDS_FOR_RANKS = 5.0  # to disappear after SIGKILL
Content = tuple[str, tuple[int, ...], int, str]  # of a tensor: dtype, shape, bytes, sha256 of its bits


def drill(flags: list[str], folder: Path, *, steps: int, seed: int, launcher: str) -> dict[str, Any]:
    """Train `steps` steps with train.py's `flags` twice in `folder`, the second time killed and resumed, and compare.

    Returns the certificate. Raises Fault (2) if the undisturbed run fails, (66) if the other can't be resumed.
    """
    interval = max(1, steps // 3)
    given = {**OWN, "max_step": steps, "save_step_interval": interval, "output_dir": folder}
    own = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    start = find_launcher(launcher) if launcher else [sys.executable]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("FABRIC_LLM_")}
    if not launcher:
        clean[PARENT] = str(os.getpid())  # the run ends with this process, even after SIGKILL

    def train(name: str, resume: str, log: str, **more: str) -> tuple[int, str]:
        command = [*start, str(TRAIN), *flags, *own, "--run_name", name, "--resume", resume]  # the last of a flag wins
        return run_training(command, {**clean, **more}, folder / log, patient=bool(launcher))

    say(f"Drill in {folder}, seed {seed}: {steps} steps undisturbed, a checkpoint every {interval}")
    whole, broken = folder / "undisturbed", folder / "killed"
    code, said = train(whole.name, "false", "undisturbed.log")
    if code != DONE or (last := step_names.latest(whole)) is None:
        raise Fault(f"the undisturbed run ended with code {code}{'' if code else ' and no checkpoint'}: {said}")
    world_size = files.read(last)["world_size"]

    chance = random.Random(seed)
    rank = chance.randrange(world_size)
    step = chance.randint(min(interval + 1, steps - 1), steps - 1)  # after the first checkpoint
    say(f"The same, killed with SIGKILL on rank {rank} at the end of step {step}")
    kill = {failpoints.VARIABLE: f"between_steps:rank={rank}:count={step}"}
    code, said = train(broken.name, "false", "killed.log", **kill)
    if code == DONE:
        raise Fault(f"the run ended with code 0, although rank {rank} was to be killed at step {step}.", NO_CHECKPOINT)

    newest = step_names.latest(broken)
    say(f"It ended with code {code}; resuming from {newest.name if newest else 'the start, as nothing was saved'}")
    for _ in range(MOST_RESUMES):
        code, said = train(broken.name, "auto", "resumed.log")
        if code == DONE or not run_directory.read_status(broken).get("retryable"):
            break
    if code != DONE:
        raise Fault(f"the killed run couldn't be resumed, code {code}: {said}", NO_CHECKPOINT)

    compared, differences = compare(whole, broken)
    same = "identical" if newest else "identical, but nothing was saved to resume"
    return {
        "what": "resume drill",
        "verdict": "different" if differences else same,
        "code": NO_CHECKPOINT if differences else DONE,
        "flags": shlex.join(flags),
        "launcher": launcher,
        "steps": steps,
        "seed": seed,
        "killed_rank": rank,
        "killed_at_step": step,
        "resumed_from": newest.name if newest else None,
        "world_size": world_size,
        "compared": compared,
        "differences": differences,
    }


@contextmanager
def workplace(parent: Optional[str], keep: bool) -> Iterator[Path]:
    """A folder for the runs of the drill, which is removed afterwards unless `keep`."""
    try:
        if parent is not None:
            Path(parent).mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix="fabric_llm-drill-", dir=parent)).resolve()
    except OSError as error:
        raise Fault(f"--output_dir {parent!r} can't be written: {error.strerror}.") from error
    try:
        yield folder
    finally:
        if keep:
            say(f"Kept: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)


def run_training(command: list[str], environment: dict[str, str], log: Path, patient: bool) -> tuple[int, str]:
    """Run train.py and print its steps and errors as they come. Returns (exit code, its last lines).

    patient: if this process is interrupted, end it with SIGTERM first, because a launcher must end its ranks.
    """
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,  # not a pipe, which a rank that doesn't end could hold open
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        with log.open(errors="replace") as lines:
            rest, over = "", False
            while not over:
                over = process.poll() is not None  # before reading, so that the last lines aren't missed
                *complete, rest = (rest + lines.read()).split("\n")
                for line in complete:
                    if line.startswith(SHOWN):
                        say(f"  {line}")
                time.sleep(0 if over else 0.1)
    finally:
        end_group(process, patient)
    said = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in said if line.startswith("train.py: error: ")]
    return process.returncode, " ".join((errors or said)[-5:]) or "it said nothing."


def end_group(process: subprocess.Popen[bytes], patient: bool) -> None:
    """End a process and its process group, and wait until they are gone, because the next run needs their memory."""
    if patient and process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(SECONDS_FOR_LAUNCHER)
    deadline = time.monotonic() + SECONDS_FOR_RANKS
    with suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.killpg(process.pid, signal.SIGKILL)
            process.poll()
            time.sleep(0.02)
    process.wait()


def compare(first: Path, second: Path) -> tuple[dict[str, int], list[str]]:
    """Compare the tensors of the newest checkpoints of two runs, and their logs. Returns (counts, every difference)."""
    ours, theirs = step_names.latest(first), step_names.latest(second)
    lines, more = (compared_lines(run / "metrics.jsonl") for run in (first, second))
    tensors, others, differences = {}, {}, []
    if ours is None or theirs is None or ours.name != theirs.name:
        differences.append(f"the newest checkpoints are {ours} and {theirs}.")
    else:
        tensors, others = contents(ours), contents(theirs)
    for name in sorted(tensors.keys() | others.keys()):
        if tensors.get(name) != others.get(name):
            how = "differs" if name in tensors and name in others else "is in one of them only"
            differences.append(f"{name} of {ours.name} {how}.")
    for one, other in zip(lines, more):
        if one != other:
            differences.append(f"metrics.jsonl differs: {json.dumps(one)} and {json.dumps(other)}.")
    if len(lines) != len(more):
        differences.append(f"metrics.jsonl has {len(lines)} and {len(more)} lines to compare.")
    counts = {
        "tensors": len(tensors.keys() | others.keys()),
        "bytes": sum(size for _, _, size, _ in tensors.values()),
        "lines": len(lines),
    }
    return counts, differences


def contents(folder: Path) -> dict[str, Content]:
    """{"FILE: NAME": content} of every tensor in a checkpoint. Bits are compared, so that -0 isn't 0 and a NaN equals itself."""
    found = {}
    for file, name, tensor in stored_parts(folder):
        bits = hashlib.sha256(tensor.reshape(-1).view(torch.uint8).numpy()).hexdigest()
        found[f"{file.relative_to(folder)}: {name}"] = str(tensor.dtype), tuple(tensor.shape), tensor.nbytes, bits
    return found


def compared_lines(file: Path) -> list[dict[str, Any]]:
    """The values of each line of metrics.jsonl that must be the same in two runs."""
    records = (json.loads(line) for line in file.read_text().splitlines())
    return [{key: record[key] for key in COMPARED if key in record} for record in records]
