"""The trackers of --logger: csv, TensorBoard, Weights & Biases, MLflow. They get the numbers of
metrics.jsonl, and never delay or end a run. On rank 0."""

import csv
import hashlib
import inspect
import os
import re
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any, Optional

from fabric_llm.base import register
from fabric_llm.base.files import json_lines
from fabric_llm.base.names import command, nearest
from fabric_llm.checkpoint.keep import METRICS, Progress, is_before

Record = dict[str, Any]
MANY_LINES = 100  # waiting for the trackers
# log(step, numbers), close() and, if it can remove the numbers of steps that a rewind undoes,
# cut(the progress after it).
Tracker = Sequence[Callable[..., None]]


def flat(record: Mapping[str, Any]) -> Record:
    """{"sources": {"new": {"tokens": 8}}} -> {"sources/new/tokens": 8}, by which trackers group
    numbers."""
    numbers: Record = {}
    for name, value in record.items():
        if isinstance(value, Mapping):
            for key, one in flat(value).items():
                numbers[f"{name}/{key}"] = one
        else:
            numbers[name] = value
    return numbers


class Trackers:
    """The trackers of --logger, fed by a thread. One that fails or is slow doesn't delay the run,
    and causes one warning."""

    def __init__(
        self,
        names: str,
        folder: Path,
        config: Record,
        entity: Optional[str],
        project: Optional[str],
    ) -> None:
        """folder: the run directory, with metrics.jsonl. config: all flags."""
        self.opened: dict[str, Tracker] = {}
        self.waiting: SimpleQueue[Optional[tuple[str, Callable[[], None]]]] = SimpleQueue()
        self.warned: set[str] = set()
        known = TRACKERS | register.TRACKERS
        for name in named(names):
            opening = partial(_opened, known[name], folder, config, entity, project)
            # Before the first new line is written: a tracker may begin with what the file holds.
            tracker = self._try(f"--logger {name}", opening)
            if tracker is not None:
                self.opened[name] = tracker
        # A daemon, so that a tracker that hangs doesn't keep the process alive.
        self.thread = Thread(target=self._work, name="trackers", daemon=True)
        self.thread.start()

    def log(self, step: int, record: Record) -> None:
        """Returns at once. A tracker that has failed gets no more numbers."""
        for name, (log, *_) in self.opened.items():
            if f"--logger {name}" not in self.warned:
                # A copy, because the thread reads it later.
                self.waiting.put((f"--logger {name}", partial(log, step, dict(record))))
        # The queue has no limit, because training mustn't wait for a tracker.
        if self.waiting.qsize() > MANY_LINES:
            self._warn_once(
                "--logger", "falls behind; the run goes on, and metrics.jsonl has every line"
            )

    def cut(self, there: Progress) -> None:
        """The run went back: remove the numbers of undone steps, where a tracker can do it.

        Returns at once.
        """
        for name, (_, _, *cut) in self.opened.items():
            # None or one: a tracker needn't have this third function.
            for can_cut in cut:
                self.waiting.put((f"--logger {name}", partial(can_cut, there)))

    def upload(self, checkpoint: Path) -> None:
        """Upload a checkpoint, for --log_model. Returns at once."""
        if "wandb" in self.opened:
            self.waiting.put(("--log_model", partial(upload_to_wandb, checkpoint)))

    def close(self, patience_seconds: float) -> None:
        """Close all trackers. Together they have `patience_seconds` for what is waiting."""
        for name, (_, close, *_) in self.opened.items():
            self.waiting.put((f"--logger {name}", close))
        # Behind all that is waiting, this ends the thread.
        self.waiting.put(None)
        self.thread.join(patience_seconds)
        if self.thread.is_alive():
            self._warn_once(
                "The trackers",
                "hadn't taken everything when the run ended; metrics.jsonl has every line",
            )

    def _work(self) -> None:
        while (waiting := self.waiting.get()) is not None:
            self._try(*waiting)

    def _try(self, name: str, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except Exception as error:
            self._warn_once(name, f"failed, the run and metrics.jsonl go on: {error!r}")

    def _warn_once(self, name: str, what: str) -> None:
        # One warning is enough of a tracker that fails at each line.
        if name not in self.warned:
            self.warned.add(name)
            warnings.warn(f"{name} {what}.", stacklevel=2)


def _opened(opening: Callable[..., Tracker], *given: Any) -> Tracker:
    """A new tracker. Raises TypeError where one of --code isn't (log, close)."""
    tracker = opening(*given)
    if not (isinstance(tracker, Sequence) and len(tracker) > 1 and all(map(callable, tracker))):
        raise TypeError("it must return two functions, (log, close)")
    return tracker


def named(given: str) -> list[str]:
    """The names in --logger. Raises ValueError."""
    # Each name once, in the order that was given.
    names = list(dict.fromkeys(name.strip() for name in given.split(",")))
    known = TRACKERS | register.TRACKERS
    for name in names:
        if name not in known:
            instead = "".join(f": take {close}" for close in nearest(name.lower(), known))
            raise ValueError(
                f"--logger takes {', '.join(known)}, or several of them with commas, not "
                f"{name[:60]!r}{instead}."
            )
    if "none" in names and len(names) > 1:
        raise ValueError(f"--logger {given[:60]}: none goes by itself.")
    return names


def _csv(folder: Path, *more: Any) -> Tracker:
    """metrics.csv: the numbers of metrics.jsonl as a table. New columns are added at the end."""
    # Emptied: metrics.jsonl has what it held, and `cut` writes it anew below.
    file = (folder / "metrics.csv").open("w+", newline="")
    columns = ["step"]
    table = csv.DictWriter(file, columns)

    def cut(last: Optional[Progress]) -> None:
        """Write the table anew, from metrics.jsonl up to there: later lines come by `log`."""
        file.seek(0)
        file.truncate()
        # In place, because the DictWriter holds the same list.
        columns[1:] = []
        for _, record in json_lines(folder / METRICS):
            # Verdicts are words, which aren't in the table.
            if "verdict" not in record and (last is None or is_before(record, last)):
                log(record.pop("step"), flat(record))

    def log(step: int, record: Record) -> None:
        new = [name for name in record if name not in columns]
        if new:
            # The head of the table changes, so it is written anew.
            file.seek(0)
            rows = list(csv.DictReader(file))
            columns.extend(new)
            file.seek(0)
            file.truncate()
            table.writeheader()
            table.writerows(rows)
        table.writerow({"step": step, **record})
        file.flush()

    cut(None)  # what a resumed run keeps
    return log, file.close, cut


def _tensorboard(folder: Path, *more: Any) -> Tracker:
    from torch.utils.tensorboard import SummaryWriter

    opened = partial(SummaryWriter, str(folder / "tensorboard"))
    # What an earlier process has written beyond the log is hidden: all of it, where a run that was
    # killed before its first checkpoint begins anew.
    steps = [record["step"] for _, record in json_lines(folder / METRICS)]
    writer = opened(purge_step=max(steps, default=-1) + 1)

    def log(step: int, record: Record) -> None:
        for key, value in record.items():
            writer.add_scalar(key, value, step)

    def cut(there: Progress) -> None:
        nonlocal writer
        writer.close()
        # Nothing can be removed from an event file, but a new writer hides later steps.
        writer = opened(purge_step=there.step + 1)

    return log, lambda: writer.close(), cut


def _wandb(folder: Path, config: Record, entity: Optional[str], project: Optional[str]) -> Tracker:
    """A Weights & Biases run; without a key or network an offline one, with one warning. Never
    prompts."""
    os.environ.setdefault("WANDB_SILENT", "true")
    # Seconds. Without a network its default, 90, would be waited in vain.
    os.environ.setdefault("WANDB_INIT_TIMEOUT", "20")
    # Seconds. `wandb sync` can send the rest later.
    os.environ.setdefault("WANDB_FINISH_TIMEOUT", "600")
    import wandb

    settings: Record = {
        "project": project or "fabric_llm",
        "entity": entity,
        "name": folder.name,
        "dir": str(folder),
        "id": _name_there(folder),
        "resume": "allow",
        "config": config,
    }
    run, reason = None, "there is no API key (set WANDB_API_KEY, or run `wandb login`)"
    if os.environ.get("WANDB_MODE", "online") == "online":
        try:
            # An older version would ask on the terminal where there is no key.
            if "prompt" in inspect.signature(wandb.login).parameters:
                has_key = wandb.login(prompt=False, verify=False)
            else:
                has_key = wandb.api.api_key is not None
            if has_key:
                run = wandb.init(**settings)
        except wandb.errors.Error as error:
            reason = f"there is no connection ({str(error).splitlines()[0]})"
            wandb.teardown()  # or the id stays in use by the run that failed
        # Without a key or a connection, what is logged stays in the run directory.
        if run is None:
            warnings.warn(
                f"Weights & Biases logs offline into {folder / 'wandb'}: {reason}.", stacklevel=2
            )
            settings["mode"] = "offline"
    if run is None:
        run = wandb.init(**settings)
    # Plots are drawn over this column, because the step of wandb itself can't go back as a rewind
    # does.
    run.define_metric("*", step_metric="step")

    def close() -> None:
        run.finish()
        if run.offline:
            place = Path(run.dir).parent
            print(
                f"Weights & Biases has logged offline: {command('wandb', 'sync', place)} sends it.",
                flush=True,
            )

    return (lambda step, record: run.log({"step": step, **record})), close


def _name_there(folder: Path) -> str:
    """The name of this run for a tracker: from the folder, so that a resumed run goes on with the
    same run there."""
    return hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]


def upload_to_wandb(checkpoint: Path) -> None:
    """The checkpoint as an artifact of the current Weights & Biases run: a version of the model,
    with its name as an alias."""
    import wandb

    artifact = wandb.Artifact(
        checkpoint.parent.name, type="model", metadata={"checkpoint": checkpoint.name}
    )
    artifact.add_dir(str(checkpoint))
    wandb.log_artifact(artifact, aliases=["latest", checkpoint.name])


def _mlflow(folder: Path, config: Record, *more: Any) -> Tracker:
    """An MLflow run, which the first number opens, in the thread of the trackers: the import and a
    server may take their time. Raises ModuleNotFoundError without MLflow."""
    if find_spec("mlflow") is None:
        raise ModuleNotFoundError("it needs MLflow: pip install -e '.[mlflow]'")
    opened = cache(partial(_open_mlflow, folder, config))

    def log(step: int, record: Record) -> None:
        client, run_id = opened()
        from mlflow.entities import Metric

        milliseconds, numbers = int(time.time() * 1000), []
        for key, value in record.items():
            # Names of data sets may hold other characters than MLflow takes.
            name = re.sub(r"[^\w./: -]", "_", key)
            numbers.append(Metric(name, float(value), milliseconds, step))
        client.log_batch(run_id, metrics=numbers)

    def close() -> None:
        # A run that couldn't be opened, or logged nothing, isn't opened only to be closed.
        if opened.cache_info().currsize == 1:
            client, run_id = opened()
            client.set_terminated(run_id)

    return log, close


def _open_mlflow(folder: Path, config: Record) -> tuple[Any, str]:
    """The client, and the id of this run on the server that MLFLOW_TRACKING_URI names, or in a
    database in the run directory."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
    # By its default, 7, it would wait for four minutes where no server answers.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    from mlflow.entities import Param
    from mlflow.tracking import MlflowClient

    # MLflow itself would take the working directory.
    local = f"sqlite:///{folder.resolve() / 'mlflow.db'}"
    client = MlflowClient(tracking_uri=os.environ.get("MLFLOW_TRACKING_URI", local))
    name, tag = os.environ.get("MLFLOW_EXPERIMENT_NAME", "fabric_llm"), _name_there(folder)
    experiment = client.get_experiment_by_name(name)
    if experiment is None:
        place = client.create_experiment(name)
    else:
        place = experiment.experiment_id
    # A run that this directory has there already is resumed, as wandb does by its id.
    for run in client.search_runs([place], f"tags.fabric_llm_run = '{tag}'"):
        client.update_run(run.info.run_id, status="RUNNING")
        return client, run.info.run_id
    run = client.create_run(place, run_name=folder.name, tags={"fabric_llm_run": tag})
    # The flags of the first start, because MLflow lets no parameter change.
    parameters = [Param(flag, str(value)) for flag, value in config.items()]
    # A hundred at a time are as many as it takes.
    for first in range(0, len(parameters), 100):
        client.log_batch(run.info.run_id, params=parameters[first : first + 100])
    return client, run.info.run_id


# --logger NAME -> what opens it: (run directory, flags, entity, project) -> Tracker.
TRACKERS: dict[str, Callable[[Path, Record, Optional[str], Optional[str]], Tracker]] = {
    "none": lambda *_: ((lambda step, record: None), (lambda: None)),
    "csv": _csv,
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "mlflow": _mlflow,
}
