"""Throughput, memory, metrics.jsonl, and the trackers that --logger names. Used on rank 0."""

from __future__ import annotations

import csv
import hashlib
import inspect
import json
import math
import os
import resource
import sys
import time
import warnings
from pathlib import Path
from typing import Any, Callable, Optional

import torch
from tqdm import tqdm

from fabric_llm.failpoints import failpoint
from fabric_llm.manifest import fsync

Record = dict[str, float]
Tracker = Callable[[int, Record], None]


class MetricsFile:
    """metrics.jsonl: one JSON object a line, each with `step`. Open only while a line is written."""

    def __init__(self, path: Path, resumed_step: int = 0, rewinds: Optional[int] = None) -> None:
        """Lines of steps after `resumed_step` belong to work that is being redone: they go.

        At 0 all go: they are those of a run that was killed before its first checkpoint. rewinds: how often the run had
        gone back when its checkpoint was written; later times, whose lines bear the step gone back to, are undone as well.
        """
        if path.exists():
            lines = path.read_text(errors="replace").splitlines(keepends=True) if resumed_step else []
            kept = [line for line in lines if _step_of(line) <= resumed_step]
            if rewinds is not None:
                undone = [number for number, line in enumerate(kept) if _is_rewind(line)][rewinds:]
                kept = [line for number, line in enumerate(kept) if number not in undone]
            temporary = path.with_name(f".{path.name}.tmp")
            temporary.write_text("".join(kept))
            fsync(temporary)
            failpoint("metrics.replace")
            temporary.replace(path)
        self.path = path

    def write(self, step: int, record: Record) -> None:
        """Append one line."""
        finite = {
            k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()
        }  # JSON has no NaN
        with self.path.open("a") as file:
            file.write(json.dumps({"step": step, **finite}) + "\n")

    def make_durable(self) -> None:
        """On the disk, before a checkpoint says that these steps are done."""
        if self.path.exists():
            fsync(self.path)


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError, RecursionError):  # a line that a kill cut off, or nobody of ours wrote
        return float("inf")


def _is_rewind(line: str) -> bool:
    return json.loads(line).get("verdict") == "rewind"


class Throughput:
    """Tokens per second of training proper: time between `pause` and `resume` (evaluation, saving) doesn't count."""

    def __init__(self, tokens: int = 0) -> None:
        """tokens: those of a resumed run so far."""
        self.seconds, self.tokens = 0.0, tokens
        self.last_seconds, self.last_tokens = 0.0, tokens
        self.started: Optional[float] = time.monotonic()

    def pause(self) -> None:
        """Stop the clock."""
        if self.started is not None:
            self.seconds += time.monotonic() - self.started
            self.started = None

    def resume(self) -> None:
        """Start the clock."""
        self.started = time.monotonic()

    def lap(self) -> float:
        """Tokens per second since the last lap."""
        self.pause()
        rate = (self.tokens - self.last_tokens) / max(self.seconds - self.last_seconds, 1e-9)
        self.last_seconds, self.last_tokens = self.seconds, self.tokens
        self.resume()
        return rate

    def seconds_left(self, steps_done: int, steps_left: int) -> float:
        """Time that `steps_left` steps will take at the speed so far."""
        return self.seconds / max(steps_done, 1) * steps_left


def peak_memory_gib(device: torch.device) -> float:
    """Largest memory so far, GiB: allocated on a GPU, resident in this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts KiB


def duration(seconds: float) -> str:
    """3725 -> '1:02:05'"""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"


class Console:
    """A progress bar where there is a terminal, and lines that don't break it."""

    def __init__(self, total_steps: int, done_steps: int) -> None:
        off = not sys.stderr.isatty()
        self.bar = tqdm(total=total_steps, initial=done_steps, unit="step", disable=off, leave=False)

    def line(self, text: str) -> None:
        """Print one line."""
        print(text, flush=True) if self.bar.disable else self.bar.write(text)

    def advance(self) -> None:
        """One step done."""
        self.bar.update()

    def close(self) -> None:
        """Remove the bar."""
        self.bar.close()


# ------------------------------------------------------------------------------- trackers


def open_tracker(
    name: str, folder: Path, config: dict[str, Any], entity: Optional[str], project: Optional[str]
) -> tuple[Tracker, Callable[[], None]]:
    """(log, close) for --logger none, csv, tensorboard or wandb. `folder` holds metrics.jsonl, up to date.

    A tracker never stops a run: its first failure is a warning, and its end.
    """
    openers: dict[str, Callable[[], tuple[Tracker, Callable[[], None]]]] = {
        "csv": lambda: _csv(folder),
        "tensorboard": lambda: _tensorboard(folder),
        "wandb": lambda: _wandb(folder, config, entity, project),
    }
    off = (lambda step, record: None), (lambda: None)
    if name not in openers:
        return off
    try:
        return _harmless(name, *openers[name]())
    except Exception as error:
        warnings.warn(f"--logger {name} failed and is off, metrics.jsonl goes on: {error!r}.", stacklevel=2)
        return off


def _harmless(name: str, log: Tracker, close: Callable[[], None]) -> tuple[Tracker, Callable[[], None]]:
    failed = False

    def guarded(action: Callable[..., None], *values: Any) -> None:
        nonlocal failed
        if failed:
            return
        try:
            action(*values)
        except Exception as error:
            failed = True
            warnings.warn(f"--logger {name} failed and is off, metrics.jsonl goes on: {error!r}.", stacklevel=3)

    return (lambda step, record: guarded(log, step, record)), (lambda: guarded(close))


def _lines_so_far(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl that a resumed run keeps."""
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


CSV_COLUMNS = (
    *("step", "loss", "lr", "grad_norm", "tokens", "tokens_per_second", "peak_memory_gib"),
    *("updated_fraction", "update_ratio", "eval_loss"),
)


def _csv(folder: Path) -> tuple[Tracker, Callable[[], None]]:
    """metrics.csv: the lines of metrics.jsonl as a table, empty where a line doesn't have a number."""
    so_far = _lines_so_far(folder)
    file = (folder / "metrics.csv").open("w", newline="")
    table = csv.DictWriter(file, CSV_COLUMNS, extrasaction="ignore")
    table.writeheader()
    table.writerows(so_far)

    def log(step: int, record: Record) -> None:
        table.writerow({"step": step, **record})
        file.flush()

    return log, file.close


def _tensorboard(folder: Path) -> tuple[Tracker, Callable[[], None]]:
    from torch.utils.tensorboard import SummaryWriter

    steps = [line["step"] for line in _lines_so_far(folder)]
    writer = SummaryWriter(str(folder / "tensorboard"), purge_step=max(steps) + 1 if steps else None)

    def log(step: int, record: Record) -> None:
        for key, value in record.items():
            writer.add_scalar(key, value, step)

    return log, writer.close


def _wandb(
    folder: Path, config: dict[str, Any], entity: Optional[str], project: Optional[str]
) -> tuple[Tracker, Callable[[], None]]:
    """A Weights & Biases run; offline, with one warning, where there is no key or no network. Never asks."""
    os.environ.setdefault("WANDB_SILENT", "true")
    os.environ.setdefault("WANDB_INIT_TIMEOUT", "20")  # seconds; 90 by default, and in vain where there is no network
    os.environ.setdefault("WANDB_FINISH_TIMEOUT", "600")  # seconds; after them the rest is for `wandb sync`
    import wandb

    settings = {
        "project": project or "fabric_llm",
        "entity": entity,
        "name": folder.name,
        "id": hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16],
        "resume": "allow",
        "dir": str(folder),
        "config": config,
    }
    run = None
    if os.environ.get("WANDB_MODE", "online") == "online":
        try:
            if _logged_in_to_wandb():
                run = wandb.init(**settings)
            else:
                reason = "there is no API key (set WANDB_API_KEY, or run `wandb login`)"
        except wandb.errors.Error as error:
            reason = f"there is no connection ({str(error).splitlines()[0]})"
            wandb.teardown()  # or the id stays in use by the run that failed
        if run is None:
            warnings.warn(f"Weights & Biases logs offline into {folder / 'wandb'}: {reason}.", stacklevel=2)
            settings["mode"] = "offline"
    run = run or wandb.init(**settings)
    return (lambda step, record: run.log(record, step=step)), run.finish


def _logged_in_to_wandb() -> bool:
    """Whether there is an API key. Never asks for one."""
    import wandb

    if "prompt" in inspect.signature(wandb.login).parameters:
        return wandb.login(prompt=False, verify=False)
    return wandb.api.api_key is not None  # before there was `prompt`


def upload_to_wandb(checkpoint: Path) -> None:
    """--log_model: the checkpoint as an artifact of the current Weights & Biases run. A failure is a warning."""
    import wandb

    try:
        artifact = wandb.Artifact(f"{checkpoint.parent.name}", type="model", metadata={"checkpoint": checkpoint.name})
        artifact.add_dir(str(checkpoint))
        wandb.log_artifact(artifact)
    except Exception as error:
        warnings.warn(f"--log_model: {checkpoint} wasn't uploaded: {error!r}.", stacklevel=2)
