"""Which checkpoints a run has, which is the newest whole one, and which are kept.

step-00000100/           a checkpoint: only complete ones bear such a name
step-00000100.pinned     beside it, made with `touch`: never pruned
.tmp-* .trash-*          what a killed save or prune left; swept at the next start
aside-step-*             later than a step that the run was resumed from; kept, never used
"""

from __future__ import annotations

import math
import re
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional

from fabric_llm.base import files, step_names
from fabric_llm.base.failpoints import failpoint
from fabric_llm.base.faults import NO_CHECKPOINT, REFUSED, Fault
from fabric_llm.base.files import MANIFEST, fsync
from fabric_llm.base.names import nearest_of
from fabric_llm.base.step_names import checkpoints, step_directories, step_of
from fabric_llm.checkpoint.progress import damaged, read_progress


def verified(path: Path, hashes: bool = False) -> dict[str, Any]:
    """A checkpoint's progress.json, once exactly its files are there with the right sizes (and hashes).

    Raises Fault that names the first file that isn't (66), or that is refused for security (77).
    """
    if path.is_symlink():
        raise Fault(f"{str(path)!r} is a link, which may lead out of the run directory: refused.", REFUSED)
    if not (path / MANIFEST).is_file():
        raise Fault(f"{str(path)!r} isn't a checkpoint: it has no {MANIFEST}.", NO_CHECKPOINT)
    listed = files.check_folder(path, hashes)["files"]
    for index in path.glob("*.index.json"):
        _check_index(index, listed)
    return read_progress(path)


def _check_index(index: Path, listed: dict[str, Any]) -> None:
    """Weight files that an index names are the checkpoint's own."""
    try:
        named = files.weight_map(index).values()
    except Fault:
        raise
    except ValueError as error:
        raise damaged(index.parent, f"{index.name} can't be read.") from error
    if foreign := sorted(set(named) - listed.keys()):
        raise damaged(index.parent, f"{index.name} names {foreign[0]}, which isn't there.")


def newest_valid(
    run_directory: Path, hashes: bool, suits: Callable[[dict[str, Any]], bool] = lambda document: True
) -> tuple[Optional[Path], list[str]]:
    """(the newest checkpoint of a run that passes `verified`, what is wrong with those that are newer).

    suits(document): whether the checkpoint with this progress.json may be taken. One that is refused for security isn't passed
    over: that is raised.
    """
    problems = []
    for path in reversed(step_directories(run_directory)):
        try:
            if suits(verified(path, hashes)):
                return path, problems
        except Fault as fault:
            if fault.code != NO_CHECKPOINT:
                raise
            problems.append(str(fault))
    return None, problems


def sweep(run_directory: Path) -> list[str]:
    """Remove what a killed save or prune left, and return its names."""
    leftovers = [p for p in run_directory.glob(".*") if re.match(r"\.((tmp|trash)-step|STATUS\.json)-", p.name)]
    for path in leftovers:
        _discard(path)
    return sorted(path.name for path in leftovers)


def remove(path: Path) -> None:
    """A folder with all that is in it, or a link itself."""
    if path.is_symlink() or not path.is_dir():
        path.unlink()
    else:
        shutil.rmtree(path)


def _discard(path: Path) -> None:
    """`remove`; what can't go now, as on NFS while somebody reads it, goes at the next start."""
    try:
        remove(path)
    except OSError as error:
        _warn(path, error)


def _warn(path: Path, error: OSError) -> None:
    print(f"Warning: {path} couldn't be removed: {error.strerror}.", flush=True)


def move_aside(run_directory: Path, after_step: int) -> list[str]:
    """Rename the checkpoints of later steps, whole or not, which a run that resumes at `after_step` will write anew."""
    names = []
    for path in step_directories(run_directory):
        if step_of(path) > after_step:
            names.append(path.rename(path.with_name(f"aside-{path.name}-{secrets.token_hex(4)}")).name)
    if names:
        fsync(run_directory)
    failpoint("resume.moved_aside")
    return names


def prune(
    run_directory: Path, keep_last: int, keep_every: Optional[int], keep_best: int, resumed_from: Optional[Path]
) -> list[Path]:
    """Remove what is neither among the newest `keep_last`, nor a multiple of `keep_every` steps, nor among the
    `keep_best` with the lowest validation loss, nor pinned, nor the one that the run was resumed from.

    Renamed first, so that a kill leaves none half there. Returns what was removed.
    """
    there = checkpoints(run_directory)
    losses = sorted((_eval_loss(path), step_of(path)) for path in there)
    best = {step for loss, step in losses[:keep_best] if math.isfinite(loss)}
    removed = []
    resumed_from = resumed_from and resumed_from.resolve()
    for path in there[: -max(1, keep_last)]:
        every = keep_every is not None and step_of(path) % keep_every == 0
        if every or is_pinned(path) or step_of(path) in best or path.resolve() == resumed_from:
            continue
        failpoint("prune.begin")
        trash = _trash_of(path)
        try:
            path.rename(trash)
        except OSError as error:  # the new checkpoint is there, which is what counts
            _warn(path, error)
            continue
        failpoint("prune.renamed")
        _discard(trash)
        removed.append(path)
    failpoint("prune.done")
    return removed


def is_pinned(path: Path) -> bool:
    """True for a checkpoint that a user wants to keep."""
    return path.with_name(f"{path.name}.pinned").exists()


def _trash_of(path: Path) -> Path:
    """The name of a checkpoint that is being removed, which no reader takes for a checkpoint's."""
    return path.with_name(f".trash-{path.name}-{secrets.token_hex(4)}")


def _eval_loss(path: Path) -> float:
    try:
        loss = read_progress(path).get("eval_loss")
    except Fault:  # damaged, so never the best
        loss = None
    return loss if isinstance(loss, float) else math.inf


def checkpoint_at(path: str | Path) -> Path:
    """The checkpoint at `path`, or the latest of the run at `path`. Raises ValueError where there is none."""
    path = Path(path)
    if not path.is_dir():
        raise ValueError(f"No checkpoint at {str(path)!r}.{nearest_of(path)}")
    found = path if (path / MANIFEST).is_file() else step_names.latest(path)
    if found is None:
        raise ValueError(f"{str(path)!r} is neither a checkpoint nor a run with one: no {MANIFEST}, no step-N.")
    return found
