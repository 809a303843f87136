"""Rehearse a crash: train the same run twice, once undisturbed, once killed and resumed, and
compare them bit for bit.

A random rank is killed with SIGKILL at a random step. Both runs use the user's own flags, except
those in OWN and long PHASES.
"""

import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path
from typing import Any

from fabric_llm.base import failpoints, files
from fabric_llm.base.describing import describe
from fabric_llm.base.faults import DONE, NO_CHECKPOINT, Fault
from fabric_llm.base.names import at_home, by_flag
from fabric_llm.base.names import command as command_line
from fabric_llm.base.plain_yaml import read_yaml
from fabric_llm.processes.launch import PARENT

TRAIN = Path(__file__).resolve().parents[2] / "train.py"
OWN = "--log_step_interval 1 --keep_last null --logger none --log_model false"  # flags of train.py
OWN += " --checkpoint null --resume_override null --mirror null --profile null"
# What would have no effect in it, as default, so that it doesn't warn of what nobody can mend.
OWN += " --keep_every null --keep_best 1 --mirror_timeout 600 --entity null --project null"
OWN += " --steer_bounds 0:0.9 --keep_best_of null"
# A few steps say nothing about what a whole run forgets, nor can they be steered.
NO_BUDGET = "--forgetting_budget null --forgetting_action warn"
# A run of a few steps is a whole schedule, so the parts of one shrink with it.
PHASES = "warmup_steps decay_steps cooldown_steps".split()
# Fields of metrics.jsonl; the others are speed and memory.
COMPARED = ("step", "loss", "grad_norm", "lr", "tokens", "sources", "eval_loss", "eval")
SHOWN = ("step ", "train.py: ", "Warning: ")  # lines of train.py that are shown
# What is only said because the drill's flags stand behind the user's.
OF_DRILL = re.compile(r"is given \d+ times|with --max_step|isn't less than the run's")
SECONDS_FOR_LAUNCHER = 40.0  # torchrun gives its ranks 30 s to end
SECONDS_BETWEEN_LOOKS = 0.2  # at what a run has printed
SECONDS_FOR_RANKS = 5.0  # to disappear after SIGKILL


def drill(
    flags: list[str], folder: Path, *, steps: int, seed: int, launcher: str
) -> dict[str, Any]:
    """The certificate of two runs of `steps` steps with train.py's `flags` in `folder`, the second
    killed and resumed.

    Raises Fault (2) if the undisturbed run fails, (66) if the other can't be resumed.
    """
    # A checkpoint is due before the kill, and steps are left behind it to go on with.
    interval = max(1, steps // 3)
    own = own_flags(flags, steps, interval)
    start = find_launcher(launcher) if launcher else [sys.executable]
    clean = environment(launcher)

    def train(name: str, log: str, resume: str = "false", **more: str) -> tuple[int, str]:
        words = [*own, "--output_dir", str(folder), "--run_name", name, "--resume", resume]
        command = [*start, str(TRAIN), *flags, *words]  # the last of a flag wins
        return run_training(command, {**clean, **more}, folder / log, patient=bool(launcher))

    print(
        f"Drill in {folder}, seed {seed}: {steps} steps undisturbed, a checkpoint every {interval}",
        flush=True,
    )
    if "--forgetting_budget" in own:
        print("  without --forgetting_budget, of which so few steps say nothing", flush=True)
    whole, broken = folder / "undisturbed", folder / "killed"
    code, message = train(whole.name, "undisturbed.log")
    # The flags alone are to blame here, since nothing was killed yet.
    if code != DONE:
        raise Fault(f"the undisturbed run ended with code {code}: {message}")
    last = files.latest(whole)
    if last is None:
        raise Fault(f"the undisturbed run ended with code 0 and no checkpoint: {message}")
    # How many ranks a launcher starts is only known from a run of it.
    world_size = files.read(last)["world_size"]

    # The same seed kills the same rank at the same step.
    chance = random.Random(seed)
    rank = chance.randrange(world_size)
    step = chance.randint(min(interval + 1, steps - 1), steps - 1)  # after the first checkpoint
    print(f"The same, killed with SIGKILL on rank {rank} at the end of step {step}", flush=True)
    kill = f"between_steps:rank={rank}:count={step}"
    code, _ = train(broken.name, "killed.log", **{failpoints.VARIABLE: kill})
    # A drill in which nothing was killed proves nothing.
    if code == DONE:
        raise Fault(
            f"the run ended with code 0, although rank {rank} was to be killed at step {step}.",
            NO_CHECKPOINT,
        )

    newest = files.latest(broken)
    print(f"It ended with code {code}; resuming from {newest and newest.name}", flush=True)
    code, message = train(broken.name, "resumed.log", resume="auto")
    if code != DONE:
        raise Fault(f"the killed run couldn't be resumed, code {code}: {message}", NO_CHECKPOINT)

    # Only what must be equal: speed and memory never are.
    compared, differences = compare(whole, broken)
    # A kill before the first checkpoint has started the run again, which proves less.
    verdict = "identical" if newest else "identical, but nothing was saved to resume"
    code = DONE
    if differences:
        verdict, code = "different", NO_CHECKPOINT
    return {
        "what": "resume drill",
        "verdict": verdict,
        "code": code,
        "flags": shlex.join(flags),
        "drill_flags": shlex.join(own),
        "launcher": launcher,
        "steps": steps,
        "seed": seed,
        "killed_rank": rank,
        "killed_at_step": step,
        "resumed_from": newest and newest.name,
        "world_size": world_size,
        "compared": compared,
        "differences": differences,
    }


def own_flags(flags: list[str], steps: int, interval: int) -> list[str]:
    """The flags of a drill of `steps` steps, which stand behind the user's, so that they count."""
    own = f"{OWN} --max_step {steps} --save_step_interval {interval}".split()
    given = by_flag(flags)
    if not given.keys() & {"config", "model_name", "train_data_dir"}:
        given["config"] = [str(TRAIN.parent / "configs" / "demo.yaml")]
    # A mistake in a file or a number is told by the first run.
    with suppress(TypeError, ValueError):
        values = values_of(given)
        if values.get("forgetting_budget"):
            own += NO_BUDGET.split()
        # Those of PHASES that are too long for the run are made to fit.
        for phase in PHASES:
            if int(values.get(phase) or 0) > steps // 4:
                own += [f"--{phase}", str(max(1, steps // 4))]
    return own


def values_of(given: Mapping[str, list[str]]) -> dict[str, Any]:
    """{flag: its value} of the flags of a run, also of its --config. Raises ValueError."""
    values: dict[str, Any] = {}
    if given.get("config"):
        config = at_home(given["config"][-1])
        try:
            values = read_yaml(Path(config)) or {}
        except OSError as error:
            raise ValueError(f"--config {config!r} can't be read: {error.strerror}.") from error
        if not isinstance(values, dict):
            raise ValueError(f"--config {config!r} holds no flags: a line is `name: value`.")
    for name, words in given.items():
        # The last one wins, as on a command line.
        value = words[-1] if words else None
        values[name] = None if value in ("null", "None") else value
    return values


def environment(launcher: str) -> dict[str, str]:
    """The variables of both runs."""
    # A failpoint or a setting of the caller's would disturb both runs.
    clean = {
        name: value for name, value in os.environ.items() if not name.startswith("FABRIC_LLM_")
    }
    if not launcher:
        clean[PARENT] = str(os.getpid())  # the run ends with this process, even after SIGKILL
    return clean


def run_training(
    command: list[str], environment: dict[str, str], log: Path, patient: bool
) -> tuple[int, str]:
    """Run train.py, and print its steps and errors as they come. Returns (exit code, its last
    lines).

    patient: if this process is interrupted, end it with SIGTERM first, because a launcher must end
    its ranks.
    """
    # Not a pipe, which a rank that doesn't end could hold open.
    with log.open("w") as output:
        # A session of its own, so that all that it starts can be killed as one group.
        process = subprocess.Popen(
            command,
            env=environment,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    print(f"  {command_line('tail', '-f', log)}", flush=True)
    shown = 0
    try:
        while process.poll() is None:
            shown = show(log, shown)
            time.sleep(SECONDS_BETWEEN_LOOKS)
    finally:  # the next run needs the memory of all that it has started
        if patient and process.poll() is None:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(SECONDS_FOR_LAUNCHER)
        deadline = time.monotonic() + SECONDS_FOR_RANKS
        with suppress(ProcessLookupError):
            # killpg fails once nothing of the group is left, which ends the loop.
            while time.monotonic() < deadline:
                os.killpg(process.pid, signal.SIGKILL)
                process.poll()
                time.sleep(0.02)
        process.wait()
    show(log, shown)
    # The errors of train.py say more than whatever a launcher prints behind them.
    lines, errors = [], []
    for line in log.read_text(errors="replace").splitlines():
        if line.strip():
            lines.append(line)
        if line.startswith("train.py: error: "):
            errors.append(line)
    return process.returncode, " ".join((errors or lines)[-5:]) or "it printed nothing."


def show(log: Path, shown: int) -> int:
    """Print the lines of train.py that a log has got after its first `shown` bytes. Returns how
    many bytes are shown now: those of whole lines."""
    with log.open("rb") as file:
        file.seek(shown)
        whole, end, _ = file.read().rpartition(b"\n")
    for line in whole.decode(errors="replace").splitlines():
        if line.startswith(SHOWN) and not OF_DRILL.search(line):
            print(f"  {line}", flush=True)
    return shown + len(whole) + len(end)


def compare(first: Path, second: Path) -> tuple[dict[str, int], list[str]]:
    """Compare the tensors' files of the newest checkpoints of two runs, and their logs. Returns
    (counts, every difference)."""
    # Both runs made the same steps, so that their newest checkpoints have the same name.
    ours, theirs = files.latest(first), files.latest(second)
    written, others, differences = {}, {}, []
    if ours is None or theirs is None or ours.name != theirs.name:
        differences.append(f"the newest checkpoints are {ours} and {theirs}.")
    else:
        written = describe(ours, tensor_files(ours))
        others = describe(theirs, tensor_files(theirs))
    # A file that only one of them has is a difference as well.
    for name in sorted(written.keys() | others.keys()):
        if written.get(name) != others.get(name):
            differences.append(f"{name} of {ours.name} isn't the same in both.")
    lines, more = _compared_lines(first), _compared_lines(second)
    for one, other in zip_longest(lines, more):
        if one != other:
            differences.append(f"metrics.jsonl differs: {json.dumps(one)} and {json.dumps(other)}.")
    size = sum(entry["bytes"] for entry in written.values())
    return {"files": len(written), "bytes": size, "lines": len(lines)}, differences


def _compared_lines(run: Path) -> list[dict[str, Any]]:
    """The lines of a run's log, without speed and memory."""
    lines = []
    for _, line in files.json_lines(run / "metrics.jsonl"):
        lines.append({key: line[key] for key in COMPARED if key in line})
    return lines


def tensor_files(checkpoint: Path) -> list[str]:
    """Names of the files that hold its tensors. What else it has, such as its start, isn't the same
    in a resumed run."""
    return [name for name in files.files_in(checkpoint) if name.endswith(".safetensors")]


def find_launcher(launcher: str) -> list[str]:
    """The words of --launcher with the program's path, also looked for beside Python, for
    environments that aren't activated."""
    words = shlex.split(launcher)
    program = words and (
        shutil.which(words[0]) or shutil.which(Path(sys.executable).parent / words[0])
    )
    if not program:
        raise Fault(f"--launcher {launcher!r}: there is no such program.")
    return [program, *words[1:]]
