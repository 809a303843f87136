"""checkpoints/RUN: which one the flags name, its lock, STATUS.json and events.jsonl, and the checkpoint that a run goes on from.

same_run.py compares the run with that checkpoint. Nothing here imports torch.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import socket
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Optional

from fabric_llm.base import files
from fabric_llm.base.command_line import Flags
from fabric_llm.base.faults import DONE, NO_CHECKPOINT, NON_FINITE, REFUSED, UNWRITABLE, Fault
from fabric_llm.base.files import MANIFEST, write_atomically
from fabric_llm.checkpoint import keep
from fabric_llm.checkpoint.keep import read_progress
from fabric_llm.data import mixture_text
from fabric_llm.training.schedule import arguments_of, lr_at

ENDED = (DONE, NON_FINITE)  # what a command that began nothing doesn't replace
LOCK, STATUS, EVENTS = ".lock", "STATUS.json", "events.jsonl"
NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)  # some network file systems
SECONDS_OF_NFS = 70.0  # it keeps what it knows of a directory for a minute
MOST_DIFFERENCES = 10  # named in an error
MOST_CHARACTERS = 80  # of a mixture's sources in a run's name
LONGEST_NAME = 200  # characters of a run's name; file systems take 255 bytes
_locks: dict[Path, int] = {}  # descriptors, held until this process ends, however that is
_made: set[Path] = set()  # locked directories that weren't there before


def directory(flags: Flags) -> Path:
    """The run directory that the flags name; nothing is created.

    Without --run_name, a new run takes the first free of DEFAULT, DEFAULT-2, ..., a resumed run the newest of those that is
    there, and --checkpoint its own. With both, a branch begins there.
    Raises Fault for a name that leaves --output_dir (2) or is a link (77), a new run in a directory that holds checkpoints
    (2), and a resume without a run, or a --checkpoint that is none (66).
    """
    resume, name, parent = flags.checkpoint.resume, flags.checkpoint.run_name, Path(flags.checkpoint.output_dir)
    given = given_checkpoint(flags)
    if given is not None and not resume:
        raise ValueError("--checkpoint says where to resume, so it goes with --resume true.")
    own = no_link(given.parent) if given is not None and name is None else None
    if given is not None and not _restarted(flags):  # a command that may be the first has to begin there
        require_checkpoint(given)
    if own is not None:
        return own
    if name is None:
        default = default_name(flags.model.model_name, flags.data.train_data_dir, flags.data.data_mix)
        if flags.demo and resume is True:  # which may mean other runs than the demo's
            runs = sorted(path.name for path in parent.glob("*") if files.latest(path) is not None)
            if others := [run for run in runs if not re.fullmatch(rf"{re.escape(default)}(-\d+)?", run)]:
                raise ValueError(
                    f"--resume true doesn't say which run of {str(parent)!r} goes on, "
                    f"{', '.join(map(repr, runs[:MOST_DIFFERENCES]))}: name it, such as --run_name {others[0]}."
                )
        numbered = [default, *(f"{default}-{k}" for k in range(2, 10_000))]
        there = set(os.listdir(parent)) if parent.is_dir() else set()
        taken = [run for run in numbered if run in there]
        name = (taken or [default])[-1] if resume else next(run for run in numbered if run not in there)
    elif not (0 < len(name) <= LONGEST_NAME and name.isprintable() and name == Path(name).name and name != ".."):
        start = name[:LONGEST_NAME]
        raise ValueError(
            f"--run_name {start!r} must be a plain name of {LONGEST_NAME} characters at most, not '/' or '..'."
        )
    folder = no_link(parent / name)
    if resume is True and given is None and not files.step_directories(folder):
        raise Fault(f"--resume true: no complete checkpoint (step-N) in {str(folder)!r}.", NO_CHECKPOINT)
    if not resume and (newest := files.latest(folder)) is not None:
        said = f"{str(folder)!r} holds checkpoints up to {newest.name}"
        raise ValueError(f"{said}: go on with --resume true, or take another --run_name.")
    return folder


def default_name(model_name: str, data: Optional[str], data_mix: Optional[str] = None) -> str:
    """MODEL-DATA from the last parts of both names; a run that starts from a checkpoint of RUN: RUN-DATA, or RUN.

    A run is called after its dataset, also where it replays another one, or after the sources of its mixture.
    """
    if data_mix:
        mix = mixture_text.parse(data_mix)
        replays = mix.names == (mixture_text.NEW, mixture_text.REPLAY)
        data = mix.sources[0].path if replays else "-".join(mix.names)[:MOST_CHARACTERS]
    model, data = Path(model_name), Path(data).name
    name = model.parent.name if model.name.startswith("step-") else model.name
    return re.sub(rf"-{re.escape(data)}(-\d+)?$", "", name) + f"-{data}"


def no_link(path: Path) -> Path:
    """`path`. Raises Fault (77) where it is a link."""
    if path.is_symlink():
        raise Fault(f"{str(path)!r} is a link, which may lead anywhere: refused.", REFUSED)
    return path


# ------------------------------------------------------------------------------- who writes there


def require_writable(folder: Path) -> None:
    """Raises Fault (73) if files can't be made in `folder`. Leaves nothing behind but the parents of `folder`."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder if folder.exists() else folder.parent):
            pass
    except OSError as error:
        raise Fault(f"The output directory {str(folder)!r} can't be written: {error.strerror}.", UNWRITABLE) from error


def lock(folder: Path) -> None:
    """Make `folder` and keep other runs out of it until this process ends; the kernel lets go even after a SIGKILL.

    Raises Fault (73) where another run is in it.
    """
    if folder in _locks:
        return
    if not folder.exists():
        folder.mkdir(parents=True)
        _made.add(folder)
    for path in folder.iterdir():
        if not no_link(path).is_dir() and not path.is_file():  # a pipe blocks whoever opens it
            raise Fault(f"{str(path)!r} is neither a file nor a folder: remove it.", UNWRITABLE)
    descriptor = -1
    try:
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        said = read_status(folder)
        who = f" (process {said['pid']} on {said['host']})" if {"pid", "host"} <= said.keys() else ""
        raise Fault(
            f"Another run{who} is using {str(folder)!r}: wait for it, or take another --run_name.", UNWRITABLE
        ) from None
    except OSError as error:
        if descriptor < 0 or error.errno not in NO_LOCKS:
            raise Fault(f"{str(folder / LOCK)!r} can't be written: {error.strerror}.", UNWRITABLE) from error
        print(f"Warning: the file system of {str(folder)!r} has no locks; nothing keeps a second run out of it.")
    _locks[folder] = descriptor


def unlock(folder: Path) -> None:
    """Let other runs in: at the end of a run in a process that goes on."""
    if folder in _locks:
        os.close(_locks.pop(folder))


def leave(fault: Fault, has_plan: bool = True) -> None:
    """Write into the run directory that this process has locked, if any, why its run didn't begin; unlock it.

    has_plan: False where the flags, the data or the model are wrong. Then a directory that was made for the run goes.
    """
    for folder in list(_locks):
        if not has_plan and folder in _made and not fault.retryable:
            unlock(folder)
            (folder / LOCK).unlink(missing_ok=True)
            folder.rmdir()
            continue
        if fault.code == DONE:  # and no other start comes
            sweep(folder)
        if fault.retryable or read_status(folder).get("code") not in ENDED:  # a mistake isn't how the run ended
            write_status(folder, fault.code, str(fault), None, fault.retryable)
        unlock(folder)


def sweep(folder: Path) -> None:
    """Remove what a killed save or prune left in the run directory `folder`, which this process has locked, and say so."""
    for name in keep.sweep(folder):
        print(f"Removed {name}, left by a save that was cut off.", flush=True)


# ------------------------------------------------------------------------------- STATUS.json and events.jsonl


def write_status(folder: Path, code: Optional[int], reason: str, step: Optional[int], retryable: bool) -> None:
    """STATUS.json, replaced as a whole: how the run ended, or that it is running (code null).

    step: finished steps, None before there is a model. retryable: the same command with --resume auto may do better.
    """
    try:
        last = files.latest(folder)
        status = {
            "code": code,
            "reason": reason,
            "step": step,
            "last_durable_step": None if last is None else files.step_of(last),
            "retryable": retryable,
            "pid": os.getpid(),
            "host": socket.gethostname(),
        }
        write_atomically(folder / STATUS, json.dumps(status, indent=2) + "\n", durable=True)
        if code is not None:
            record_event(folder, "ended", step, code=code, reason=reason)
    except OSError as error:  # a disk that is full or gone must not hide why the run ended
        print(f"Warning: {STATUS} couldn't be written: {error}.", flush=True)


def read_status(folder: Path) -> dict[str, Any]:
    """STATUS.json, {} where there is none."""
    with suppress(OSError, ValueError, RecursionError):
        said = json.loads((folder / STATUS).read_text())
        return said if isinstance(said, dict) else {}
    return {}


def wait_for_status(folder: Path, written: dict[str, Any], seconds: float) -> bool:
    """Whether STATUS.json comes to say what another machine has `written` there: NFS may show what was, for a minute."""
    deadline = time.monotonic() + min(seconds, SECONDS_OF_NFS)
    while read_status(folder) != written:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


def record_event(folder: Path, event: str, step: Optional[int], **facts: Any) -> None:
    """Add a line to events.jsonl: when the run started, resumed, saved and ended, and on which devices. Called on rank 0.

    Lines are only added, also those of work that a resumed run makes anew, while metrics.jsonl is one curve. Times come from
    the clock of rank 0's machine and are there to be read: nothing is decided by them.

    event: started, resumed, saved or ended. step: finished steps, None where that isn't known.
    """
    line = json.dumps({"time": now(), "event": event, "step": step, **facts}) + "\n"
    # A disk that is full or gone doesn't end a run because of its history; what ends it is said elsewhere.
    with suppress(OSError), (folder / EVENTS).open("ab+") as file:
        if file.tell() > 0:
            file.seek(-1, os.SEEK_END)
            line = line if file.read(1) == b"\n" else "\n" + line  # a kill has cut off the line before
        file.write(line.encode())


def now() -> str:
    """The time, UTC, as ISO 8601."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def read_events(folder: Path) -> list[dict[str, Any]]:
    """The events of a run directory, in order; lines that a kill has cut off are left out. [] where there are none."""
    found = []
    if (folder / EVENTS).is_file():  # a pipe blocks whoever opens it
        with suppress(OSError), (folder / EVENTS).open(errors="replace") as lines:
            for line in lines:
                with suppress(ValueError, RecursionError):
                    event = json.loads(line)
                    if isinstance(event, dict) and isinstance(event.get("event"), str):
                        found.append(event)
    return found


# ------------------------------------------------------------------------------- the checkpoint that a run goes on from


def choose(flags: Flags, directory: Path) -> Optional[Path]:
    """The checkpoint to resume from, None for a run that starts. Damaged ones are passed over, with a warning.

    Called on rank 0, which has locked the run directory. Raises Fault.
    """
    given, hashes = given_checkpoint(flags), flags.checkpoint.verify_checkpoints == "full"
    if not flags.checkpoint.resume:
        return None
    if given is not None and not (_restarted(flags) and _goes_on_from(directory, given)):
        require_checkpoint(given)
        no_link(given.parent / "metrics.jsonl")  # a branch begins with a copy
        own = files.latest(directory)
        if own is not None and given.parent.resolve() != directory.resolve():
            said = f"--checkpoint {given} would begin a branch in {str(directory)!r}, which holds checkpoints up to {own.name}"
            raise ValueError(f"{said}: go on there without --checkpoint, or take another --run_name.")
        keep.verified(given, hashes)
        return given
    valid, problems = keep.newest_valid(directory, hashes)
    if valid is None and problems:
        raise Fault(f"No checkpoint in {str(directory)!r} is whole: {' '.join(problems)}", NO_CHECKPOINT)
    for problem in problems:
        print(f"Warning: {problem} Resuming from {valid} instead.", flush=True)
    return valid


def require_checkpoint(given: Path) -> None:
    """Raises Fault (66), with what there is instead, where `given` isn't a checkpoint."""
    if (given / MANIFEST).is_file():
        return
    instead, beside = "", [] if given.is_dir() else files.checkpoints(given.parent)
    if (newest := files.latest(given)) is not None:
        instead = f" It is a run: its newest is --checkpoint {newest}."
    elif beside:
        instead = f" {str(given.parent)!r} has {', '.join(path.name for path in beside[-5:])}."
    raise Fault(f"{str(given)!r} isn't a checkpoint: it has no {MANIFEST}.{instead}", NO_CHECKPOINT)


def given_checkpoint(flags: Flags) -> Optional[Path]:
    """What --checkpoint names."""
    return None if flags.checkpoint.checkpoint is None else Path(flags.checkpoint.checkpoint)


def _restarted(flags: Flags) -> bool:
    """True if the command may not be the first of its kind: a restart loop's, or torchrun's or SLURM's again."""
    counts = (os.environ.get(name, "0") for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"))
    return flags.checkpoint.resume == "auto" or any(count != "0" for count in counts)


def _goes_on_from(directory: Path, given: Path) -> bool:
    """True if the run in `directory` has gone back to, or branched off, `given` already, and saved since."""
    for path in reversed(files.checkpoints(directory)):
        with suppress(Fault):  # damaged: the one before it says it
            return read_progress(path).get("rolled_back_to") == given.name and path.resolve() != given.resolve()
    return False


def branch_flags(flat: Mapping[str, Any]) -> dict[str, Any]:
    """What --branch_decay and --checkpoint come to among the flags of train.py: `wsd` whose decay begins at the checkpoint.

    So a branch that was stopped resumes like any other run. Raises ValueError where the rate isn't constant at the checkpoint,
    and Fault (66) where there is none.
    """
    steps, given, name = flat["branch_decay"], flat["checkpoint"], flat["run_name"]
    if given is None or not name or Path(given).resolve().parent == Path(flat["output_dir"], name).resolve():
        both = "--checkpoint, from which the rate decays, and --run_name, the name of a new run"
        raise ValueError(f"--branch_decay goes with {both}, not {name!r}.")
    require_checkpoint(Path(given))
    document = read_progress(Path(given))
    step, then = document["progress"]["step"], {**document["schedule"], "max_step": document["end_step"]}
    rate_before, rate = lr_of_run(max(0, step - 1), then), lr_of_run(step, then)
    if rate != rate_before:
        raise ValueError(
            f"--branch_decay: the learning rate isn't constant at {given!r}, but goes from {rate_before:.3e} to {rate:.3e} "
            f"({then['lr_schedule']}); take a checkpoint of the stable phase of constant, wsd or infinite."
        )
    kept = {name: then[name] for name in ("min_lr", "warmup_steps")}
    changed = {"lr": rate, "lr_decay": True, "lr_schedule": "wsd", "decay_steps": steps, "max_step": step + steps}
    overrides = [flat["resume_override"], *changed] if flat["resume_override"] else changed
    return {**kept, **changed, "resume": flat["resume"] or True, "resume_override": ",".join(overrides)}


def lr_of_run(step: int, schedule: dict[str, Any]) -> float:
    """Learning rate of the step after `step` finished ones. schedule: flags of a run, with its last step as max_step."""
    return lr_at(step, max_step=schedule["max_step"], **arguments_of(schedule))
