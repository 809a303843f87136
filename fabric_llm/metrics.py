"""Throughput, memory, metrics.jsonl, and the trackers that --logger names. Used on rank 0."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import sys
import time
import warnings
from pathlib import Path
from typing import Any, Callable, Optional

import torch
from tqdm import tqdm

Record = dict[str, float]
Tracker = Callable[[int, Record], None]


class MetricsFile:
    """metrics.jsonl: one JSON object a line, each with `step`; flushed line by line."""

    def __init__(self, path: Path, resumed_step: int = 0) -> None:
        """Opens `path` to append. Lines of steps after `resumed_step` belong to work that is being redone: they go."""
        if path.exists():
            kept = [line for line in path.read_text().splitlines(keepends=True) if _step_of(line) <= resumed_step]
            temporary = path.with_name(f".{path.name}.tmp")
            temporary.write_text("".join(kept))
            temporary.replace(path)
        self.file = path.open("a")

    def write(self, step: int, record: Record) -> None:
        """Append one line."""
        self.file.write(json.dumps({"step": step, **record}) + "\n")
        self.file.flush()

    def close(self) -> None:
        """Close the file."""
        self.file.close()


def _step_of(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except (json.JSONDecodeError, KeyError):  # a line that a kill cut off
        return float("inf")


class Throughput:
    """Tokens per second of training proper: time between `pause` and `resume` (evaluation, saving) doesn't count."""

    def __init__(self) -> None:
        self.seconds, self.tokens = 0.0, 0
        self.last_seconds, self.last_tokens = 0.0, 0
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
    """(log, close) for --logger none, csv, tensorboard or wandb."""
    if name == "csv":
        return _csv(folder)
    if name == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(str(folder / "tensorboard"))

        def log(step: int, record: Record) -> None:
            for key, value in record.items():
                writer.add_scalar(key, value, step)

        return log, writer.close
    if name == "wandb":
        return _wandb(folder, config, entity, project)
    return (lambda step, record: None), (lambda: None)


def _csv(folder: Path) -> tuple[Tracker, Callable[[], None]]:
    from lightning.fabric.loggers import CSVLogger

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*log dir.*exists.*")  # a resumed run
        logger = CSVLogger(str(folder), name="", version="csv", flush_logs_every_n_steps=1)
        logger.experiment  # makes the folder
    return (lambda step, record: logger.log_metrics(record, step)), logger.save


def _wandb(
    folder: Path, config: dict[str, Any], entity: Optional[str], project: Optional[str]
) -> tuple[Tracker, Callable[[], None]]:
    """A Weights & Biases run; offline, with one warning, where there is no key or no network. Never asks."""
    import wandb

    os.environ.setdefault("WANDB_SILENT", "true")
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
        if wandb.api.api_key is None:
            reason = "there is no API key (set WANDB_API_KEY, or run `wandb login`)"
        else:
            try:
                run = wandb.init(**settings, settings=wandb.Settings(init_timeout=30))
            except (wandb.errors.CommError, wandb.errors.UsageError) as error:
                reason = f"the server can't be reached ({str(error).splitlines()[0]})"
        if run is None:
            warnings.warn(f"Weights & Biases logs offline into {folder / 'wandb'}: {reason}.", stacklevel=2)
            run = wandb.init(**settings, mode="offline")
    else:
        run = wandb.init(**settings)
    return (lambda step, record: run.log(record, step=step)), run.finish


def upload_to_wandb(checkpoint: Path) -> None:
    """--log_model: the checkpoint as an artifact of the current Weights & Biases run."""
    import wandb

    artifact = wandb.Artifact(f"{checkpoint.parent.name}", type="model", metadata={"checkpoint": checkpoint.name})
    artifact.add_dir(str(checkpoint))
    wandb.log_artifact(artifact)
