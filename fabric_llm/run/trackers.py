"""The trackers that --logger names: they have what metrics.jsonl has, and are never in the way of a run. Used on rank 0."""

from __future__ import annotations

import csv
import hashlib
import inspect
import json
import os
import time
import warnings
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any, Callable, Optional

from fabric_llm.base.spelling import nearest

Record = dict[str, float]
MANY_LINES = 100  # that wait for a tracker
Log, Close = Callable[[int, Record], None], Callable[[], None]
NOWHERE: tuple[Log, Close] = (lambda step, record: None), (lambda: None)


class Tracker:
    """Where --logger sends the numbers: in a thread of its own, so that one that fails or is slow never delays a run.

    A failure is one warning, and its end; falling behind is one warning.
    """

    def __init__(self, name: str, log: Log, close: Close) -> None:
        self.name, self._log, self._close = name, log, close
        self.waiting: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self.failure: Optional[Exception] = None
        self.not_uploaded = ""  # the first checkpoint, and why
        self.warned: set[str] = set()
        self.thread = Thread(target=self._work, name="tracker", daemon=True)
        self.thread.start()

    def log(self, step: int, record: Record) -> None:
        """Returns at once."""
        if self.failure is None:
            self.waiting.put(partial(self._log, step, dict(record)))
        self._warn()

    def upload(self, checkpoint: Path) -> None:
        """--log_model: returns at once."""
        if self.failure is None and self._log is not NOWHERE[0]:
            self.waiting.put(partial(self._upload, checkpoint))

    def _upload(self, checkpoint: Path) -> None:
        try:
            upload_to_wandb(checkpoint)
        except Exception as error:
            self.not_uploaded = self.not_uploaded or f"{checkpoint}: {error!r}"

    def end(self) -> None:
        """What is waiting is the last."""
        self.waiting.put(self._close)

    def close(self, patience_seconds: float) -> None:
        """Give it so long for what is waiting."""
        self.end()
        self.thread.join(patience_seconds)
        self._warn()
        if self.thread.is_alive():
            self._warn_once("hadn't taken everything when the run ended; metrics.jsonl has every line")

    def _work(self) -> None:
        action = None
        while action is not self._close and self.failure is None:
            action = self.waiting.get()
            try:
                action()
            except Exception as error:
                self.failure = error

    def _warn(self) -> None:
        """In the main thread."""
        if self.not_uploaded:
            self._warn_once(f"can't take a checkpoint, nor perhaps later ones, by --log_model: {self.not_uploaded}")
        if self.failure is not None:
            self._warn_once(f"failed and is off, metrics.jsonl goes on: {self.failure!r}")
        elif self.waiting.qsize() > MANY_LINES:
            self._warn_once("falls behind; the run goes on, and metrics.jsonl has every line")

    def _warn_once(self, what: str) -> None:
        if what not in self.warned:
            self.warned.add(what)
            warnings.warn(f"--logger {self.name} {what}.", stacklevel=4)


def named(given: str) -> list[str]:
    """The names in --logger. Raises ValueError."""
    names = list(dict.fromkeys(name.strip() for name in given.split(",")))
    for name in names:
        if name not in TRACKERS:
            instead = "".join(f": take {close}" for close in nearest(name.lower(), TRACKERS))
            raise ValueError(
                f"--logger takes {', '.join(TRACKERS)}, or several of them with commas, not {name[:60]!r}{instead}."
            )
    if "none" in names and len(names) > 1:
        raise ValueError(f"--logger {given[:60]}: none goes by itself.")
    return names


def close_all(trackers: Iterable[Tracker], patience_seconds: float) -> None:
    """Give all of them together so long for what is waiting."""
    until = time.monotonic() + patience_seconds
    for tracker in trackers:
        tracker.end()
    for tracker in trackers:
        tracker.close(max(0.0, until - time.monotonic()))


def open_tracker(
    name: str, folder: Path, config: dict[str, Any], entity: Optional[str], project: Optional[str]
) -> Tracker:
    """For one name of --logger. `folder` holds metrics.jsonl, up to date.

    One that fails at once is a warning, and none.
    """
    try:
        return Tracker(name, *TRACKERS[name](folder, config, entity, project))
    except Exception as error:
        warnings.warn(f"--logger {name} failed and is off, metrics.jsonl goes on: {error!r}.", stacklevel=2)
        return Tracker(name, *NOWHERE)


def _lines_so_far(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl that a resumed run keeps."""
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def flat(record: Mapping[str, Any]) -> dict[str, Any]:
    """{"sources": {"new": {"tokens": 8}}} -> {"sources/new/tokens": 8}, as trackers name what belongs together."""
    found: dict[str, Any] = {}
    for name, value in record.items():
        inner = flat(value) if isinstance(value, Mapping) else None
        found |= {name: value} if inner is None else {f"{name}/{key}": one for key, one in inner.items()}
    return found


def _csv(folder: Path, *_: Any) -> tuple[Log, Close]:
    """metrics.csv: the numbers of metrics.jsonl as a table, empty where a line doesn't have one. New columns come at the end."""
    file = (folder / "metrics.csv").open("w+", newline="")
    columns = ["step"]
    table = csv.DictWriter(file, columns)

    def log(step: int, record: Record) -> None:
        if new := [name for name in record if name not in columns]:
            file.seek(0)
            rows = list(csv.DictReader(file))
            columns.extend(new)
            file.seek(0)
            file.truncate()
            table.writeheader()
            table.writerows(rows)
        table.writerow({"step": step, **record})
        file.flush()

    for line in _lines_so_far(folder):
        if "verdict" not in line:
            log(line.pop("step"), flat(line))
    return log, file.close


def _tensorboard(folder: Path, *_: Any) -> tuple[Log, Close]:
    from torch.utils.tensorboard import SummaryWriter

    steps = [line["step"] for line in _lines_so_far(folder)]
    writer = SummaryWriter(str(folder / "tensorboard"), purge_step=max(steps) + 1 if steps else None)

    def log(step: int, record: Record) -> None:
        for key, value in record.items():
            writer.add_scalar(key, value, step)

    return log, writer.close


def _wandb(folder: Path, config: dict[str, Any], entity: Optional[str], project: Optional[str]) -> tuple[Log, Close]:
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
            if _logged_in(wandb):
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
    run.define_metric("*", step_metric="step")  # its own count can't go back, as a run does that rolls back or rewinds
    return (lambda step, record: run.log({"step": step, **record})), run.finish


# --logger NAME -> what opens it: (run directory, flags, entity, project) -> (log(step, numbers), close()).
TRACKERS: dict[str, Callable[[Path, dict[str, Any], Optional[str], Optional[str]], tuple[Log, Close]]] = {
    "none": lambda *_: NOWHERE,
    "csv": _csv,
    "tensorboard": _tensorboard,
    "wandb": _wandb,
}


def _logged_in(wandb: Any) -> bool:
    """Whether there is an API key. Never asks for one."""
    if "prompt" in inspect.signature(wandb.login).parameters:
        return wandb.login(prompt=False, verify=False)
    return wandb.api.api_key is not None  # before there was `prompt`


def upload_to_wandb(checkpoint: Path) -> None:
    """The checkpoint as an artifact of the current Weights & Biases run: a version of the model, with its name as an alias."""
    import wandb

    artifact = wandb.Artifact(checkpoint.parent.name, type="model", metadata={"checkpoint": checkpoint.name})
    artifact.add_dir(str(checkpoint))
    wandb.log_artifact(artifact, aliases=["latest", checkpoint.name])
