"""The run directory checkpoints/RUN: its name and its lock. Nothing here imports torch."""

import errno
import fcntl
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Optional

from fabric_llm.base import files
from fabric_llm.base.faults import (
    BAD_INPUT,
    DONE,
    NO_CHECKPOINT,
    OUTPUTS,
    UNWRITABLE,
    Fault,
    unwritten,
)
from fabric_llm.base.files import no_link
from fabric_llm.base.flag import Flags
from fabric_llm.base.names import command, listed, nearest_of
from fabric_llm.checkpoint import retention
from fabric_llm.data import mixture_text
from fabric_llm.plan.resumption import given_checkpoint, is_restarted, require_checkpoint
from fabric_llm.plan.run_status import read_status, record_fault

LOCK = ".lock"
NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)  # of network file systems without locks
MAX_CHARACTERS = 80  # of a mixture's sources in the name of a run
LONGEST_NAME = 200  # characters in the name of a run; file systems take 255 bytes
_locks: dict[Path, int] = {}  # descriptors of locks, held until this process ends in any way
# Locked directories that this process has created, each with itself and the parents it has created.
_made: dict[Path, list[Path]] = {}


def directory(flags: Flags) -> Path:
    """The run directory that the flags name; nothing is created.

    Without --run_name, a new run takes the first of DEFAULT, DEFAULT-2, ... that doesn't exist, a
    resumed run the last that exists, and a run with --checkpoint the directory of that checkpoint.
    --checkpoint with --run_name begins a branch. Raises Fault for a name that leads out of
    --output_dir (2) or is a link (77), for a folder that can't be searched (73), for a new run in a
    directory that holds checkpoints (2), for a resume without a checkpoint, and for a --checkpoint
    that isn't one (66).
    """
    resume, given = flags.checkpoint.resume, given_checkpoint(flags)
    if given is not None:
        # A new run from the weights of a checkpoint names it by --model_name.
        if not resume:
            raise ValueError("--checkpoint says where to resume, so it goes with --resume true.")
        # A run that was restarted may have pruned the checkpoint since, and `choose` may fetch it.
        if not is_restarted(flags) and (flags.save.mirror is None or given.exists()):
            require_checkpoint(given)
        if flags.checkpoint.run_name is None:
            return no_link(given.parent)
    folder = Path(flags.checkpoint.output_dir) / _name(flags)
    _names_in(folder)
    no_link(folder)
    if flags.save.mirror is None:
        require_any(flags, folder)
    # A new run would mix its checkpoints with those of another one.
    if not resume and (newest := files.latest(folder)) is not None:
        raise ValueError(
            f"{str(folder)!r} holds checkpoints up to {newest.name}: go on with --resume true, or "
            "take another --run_name."
        )
    return folder


def require_any(flags: Flags, folder: Path) -> None:
    """Raises Fault (66) where there is no checkpoint for --resume true. With `auto` that means a
    new run."""
    given = flags.checkpoint.checkpoint
    if flags.checkpoint.resume is True and given is None and not files.step_directories(folder):
        where, others, meant = "", beside(folder), ""
        # Most often the command is run in another directory than before.
        if not folder.is_dir():
            where = f", which isn't there (from {os.getcwd()!r})"
            meant = "" if others else nearest_of(folder)
        # Such as by a crash before the first save.
        elif (folder / "arguments.yaml").is_file():
            where = ": --resume auto begins it anew"
        raise Fault(
            f"--resume true: no complete checkpoint (step-N) in {str(folder)!r}{where}{others}."
            f"{meant}",
            NO_CHECKPOINT,
        )


def beside(folder: Path) -> str:
    """The end of a sentence about a run that isn't in `folder`: the runs beside it."""
    others = [
        path.name
        for path in folder.parent.glob("*")
        if path.name != folder.name and files.latest(path) is not None
    ]
    return f"; other runs there are {listed(map(repr, sorted(others)))}" if others else ""


def _name(flags: Flags) -> str:
    """--run_name, or else that of the first free directory of a new run, or of the last one of a
    resumed run. Raises ValueError."""
    name = flags.checkpoint.run_name
    if name is not None:
        # A path may lead out of --output_dir, and unprintable characters can't be typed.
        is_plain = name == Path(name).name and name != ".." and name.isprintable()
        if not is_plain or not 0 < len(name) <= LONGEST_NAME:
            instead = ""
            if os.path.isdir(name) and files.latest(Path(name)) is not None:
                instead = f" Did you mean {Path(name).name!r}?"
            raise ValueError(
                f"--run_name {name[:LONGEST_NAME]!r} must be a plain name of {LONGEST_NAME} "
                f"characters at most, not '/' or '..'.{instead}"
            )
        return name
    default = default_name(flags.model.model_name, flags.data.train_data_dir, flags.data.data_mix)
    parent = Path(flags.checkpoint.output_dir)
    # The demo has a default name, but the user may mean a run that has another one.
    if flags.demo and flags.checkpoint.resume is True:
        _require_demo_alone(parent, default)
    # The folder is read once, instead of asking for each of up to 10,000 names.
    last, there = None, _names_in(parent)
    for numbered in (default, *(f"{default}-{k}" for k in range(2, 10_000))):
        # Gaps are skipped, because the last of all runs is the one that goes on.
        if numbered in there:
            last = numbered
        elif not flags.checkpoint.resume:
            return numbered
    return last or default


def _names_in(folder: Path) -> set[str]:
    """What is in an output directory, nothing if it isn't there. Raises Fault (73) where one can't
    look into it."""
    try:
        os.stat(os.path.join(folder, "."))  # to look into it takes another right than to list it
        return set(os.listdir(folder))
    except PermissionError as error:
        raise unwritten(folder, error) from error
    except OSError:
        return set()


def _require_demo_alone(parent: Path, default: str) -> None:
    """Raises ValueError if --resume true, without a name, may mean another run than the demo's."""
    runs = sorted(path.name for path in parent.glob("*") if files.latest(path) is not None)
    for other in runs:
        if not re.fullmatch(rf"{re.escape(default)}(-\d+)?", other):
            raise ValueError(
                f"--resume true doesn't say which run of {str(parent)!r} goes on, "
                f"{listed(map(repr, runs))}: name it, such as "
                f"{command(run_name=other)}."
            )


def default_name(model_name: str, data: Optional[str], data_mix: Optional[str] = None) -> str:
    """MODEL-DATA from the last parts of both names. With a checkpoint of RUN as the model:
    RUN-DATA, or RUN on the same data.

    DATA is the name of the dataset, also with --replay, or the names of a mixture's sources.
    """
    if data_mix:
        mix = mixture_text.parse(data_mix)
        # With --replay the new data alone names the run.
        replays = mix.names == (mixture_text.NEW, mixture_text.REPLAY)
        data = mix.sources[0].path if replays else "-".join(mix.names)[:MAX_CHARACTERS]
    model, data = Path(model_name), Path(data).name
    # A checkpoint is called step-N in each run, so its run gives the name.
    name = model.parent.name if model.name.startswith("step-") else model.name
    # Without the name of the same data twice, and without the number of the run before.
    return re.sub(rf"-{re.escape(data)}(-\d+)?$", "", name) + f"-{data}"


def unfinished_before(flags: Flags, folder: Path) -> str:
    """A sentence about the run before a new one in `folder`, of the same default name, that can go
    on; "" where there is none."""
    if flags.checkpoint.resume or flags.checkpoint.run_name is not None:
        return ""
    name = default_name(flags.model.model_name, flags.data.train_data_dir, flags.data.data_mix)
    numbered = re.fullmatch(rf"{re.escape(name)}-(\d+)", folder.name)
    if numbered is None:
        return ""
    # The first one has no number.
    number = int(numbered[1]) - 1
    before = folder.with_name(name if number == 1 else f"{name}-{number}")
    status = read_status(before)
    if not status.get("retryable") or status.get("last_durable_step") is None:
        return ""
    following = command(run_name=before.name, resume="true")
    return (
        f"this is a new run, {folder.name!r}, and {before.name!r} isn't finished: {following} "
        "goes on with it."
    )


# ------------------------------------------------------------------------------- who writes there


def require_writable(folder: Path) -> None:
    """Raises Fault (73) if files can't be made in `folder`. Leaves nothing behind."""
    files.writable(folder / LOCK, f"The output directory {str(folder)!r} can't be written")


def lock(folder: Path) -> None:
    """Create `folder` and lock it until this process ends. The kernel releases the lock even after
    a SIGKILL.

    Raises Fault (73) where another run is in it.
    """
    # This process has the lock already, and a second descriptor would be refused.
    if folder in _locks:
        return
    if missing := [path for path in (folder, *folder.parents) if not path.exists()]:
        folder.mkdir(parents=True, exist_ok=True)
        _made[folder] = missing
    descriptor = -1
    try:
        for path in folder.iterdir():
            # A pipe would block whoever opens it. What no longer exists was a temporary file of
            # another run.
            is_known = no_link(path).is_dir() or path.is_file()
            if not is_known and path.exists():
                raise Fault(f"{str(path)!r} is neither a file nor a folder: remove it.", UNWRITABLE)
        # O_NOFOLLOW: a link put there would have another file locked, or created.
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The file that is locked must still be the one in the directory.
        if not os.path.samestat(os.fstat(descriptor), os.stat(folder / LOCK)):
            raise FileNotFoundError
    except FileNotFoundError:
        # Another run, which didn't begin, has removed the directory that it had created.
        if descriptor >= 0:
            os.close(descriptor)
        return lock(folder)
    except BlockingIOError:
        os.close(descriptor)
        # STATUS.json of the other run says which process it is.
        status, who = read_status(folder), ""
        if {"pid", "host"} <= status.keys():
            who = f" (process {status['pid']} on {status['host']})"
        raise Fault(
            f"Another run{who} is using {str(folder)!r}: wait for it, or take another --run_name.",
            UNWRITABLE,
        ) from None
    except OSError as error:
        if descriptor < 0 or error.errno not in NO_LOCKS:
            raise Fault(
                f"{str(folder / LOCK)!r} can't be written: {error.strerror}.", UNWRITABLE
            ) from error
        print(
            f"Warning: the file system of {str(folder)!r} has no locks; nothing keeps a second "
            "run out of it."
        )
    # It stays open, because closing it would release the lock.
    _locks[folder] = descriptor
    OUTPUTS.add(os.path.abspath(folder))


def created_parent(folder: Path) -> Optional[Path]:
    """The parent of --output_dir if `lock` had to create it: a disk may not be mounted."""
    parent = folder.parent.parent
    return parent if parent in _made.get(folder, ()) else None


def unlock(folder: Path) -> None:
    """Release the lock, for a process that goes on after its run has ended."""
    if folder in _locks:
        os.close(_locks.pop(folder))
        OUTPUTS.discard(os.path.abspath(folder))


def leave(fault: Fault, has_plan: bool = True) -> None:
    """Write why the run didn't begin into the run directory that this process has locked, if any,
    and unlock it.

    has_plan: False if the flags, the data or the model are wrong. A directory that was created for
    the run is then removed, with the parents that were, as after any mistake, unless it holds what
    was fetched.
    """
    has_plan = has_plan and fault.code not in (BAD_INPUT, NO_CHECKPOINT)
    for folder in list(_locks):
        is_new = folder in _made and not _has_content(folder)
        if not has_plan and is_new and not fault.retryable:
            # It is removed while it is locked, so that no other run begins in it.
            for path in (folder / LOCK, *folder.glob(".mirror*")):
                path.unlink(missing_ok=True)
            with suppress(OSError):  # another run has begun there since
                # The run directory first, then its parents: each is empty once the one in it is
                # gone.
                for path in _made[folder]:
                    path.rmdir()
            unlock(folder)
            continue
        if fault.code == DONE:  # there will be no later start, which would sweep
            sweep(folder)
        record_fault(folder, fault)
        unlock(folder)


def _has_content(folder: Path) -> bool:
    """Whether there is more than what a start makes: what --mirror has fetched is left, and scripts
    read in its STATUS.json how this start ended."""
    names = [path.name for path in folder.glob("*")]
    return any(name != LOCK and not name.startswith(".mirror") for name in names)


def sweep(folder: Path) -> None:
    """Remove what a killed save or prune has left in `folder`, which this process has locked, and
    print what was removed."""
    for name in retention.sweep(folder):
        print(f"Removed {name}, left by a save that was cut off.", flush=True)
