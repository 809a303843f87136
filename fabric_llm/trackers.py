"""The trackers that --logger names: they have what metrics.jsonl has, and are never in the way of a run. Used on rank 0."""

from __future__ import annotations

import csv
import hashlib
import inspect
import json
import os
import warnings
from pathlib import Path
from typing import Any, Callable, Optional

from fabric_llm.metrics import Record

Tracker = Callable[[int, Record], None]


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
