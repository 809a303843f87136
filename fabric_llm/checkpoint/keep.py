"""What a checkpoint says of its run, whether it is whole, and which checkpoints a run keeps. Nothing here imports torch.

step-00000100/           a checkpoint: only complete ones bear such a name
step-00000100.pinned     beside it, made with `touch`: never pruned
.tmp-* .trash-*          what a killed save or prune left; swept at the next start
aside-step-*             later than a step that the run was resumed from; kept, never used
"""

import json
import math
import re
import secrets
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Optional

from fabric_llm.base import files
from fabric_llm.base.failpoints import failpoint
from fabric_llm.base.faults import NO_CHECKPOINT, REFUSED, Fault
from fabric_llm.base.files import MANIFEST, checkpoints, fsync, step_directories, step_of
from fabric_llm.base.names import nearest_of

MOST_COUNTED = 2**53  # steps, sequences, tokens: far beyond any run


@dataclass(frozen=True)
class Progress:
    """Where a run is. All that a resumed run needs besides weights and optimizer state."""

    step: int = 0  # finished optimizer steps
    position: int = 0  # sequences consumed by all ranks together
    tokens: int = 0  # tokens of those sequences

    def advance(self, sequences: int, context_length: int) -> "Progress":
        """One step further."""
        return Progress(self.step + 1, self.position + sequences, self.tokens + sequences * context_length)


def step_directory(run_directory: Path, step: int) -> Path:
    """checkpoints/RUN/step-00000100"""
    return run_directory / f"step-{step:08d}"


def versions() -> dict[str, str]:
    """Of the packages that write and read checkpoints."""
    return {name: version(name) for name in ("torch", "lightning", "transformers", "safetensors")}


def damaged(path: Path, how: str) -> Fault:
    return Fault(f"{str(path)!r} is damaged: {how}", NO_CHECKPOINT)


def read_progress(path: Path) -> dict[str, Any]:
    """progress.json of a checkpoint. Raises Fault (66) where it isn't one."""
    try:
        document = json.loads((path / "trainer" / "progress.json").read_bytes())
        numbers = document["progress"]
        fits = numbers.keys() == asdict(Progress()).keys()
        fits = fits and all(type(number) is int and 0 <= number < MOST_COUNTED for number in numbers.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise damaged(path, "trainer/progress.json can't be read.") from error
    if not fits:
        raise damaged(path, f"trainer/progress.json says {numbers}.")
    return document


def verified(path: Path, hashes: bool = False) -> dict[str, Any]:
    """A checkpoint's progress.json, once exactly its files are there with the right sizes (and hashes).

    Raises Fault that names the first file that is damaged (66), or refused for security (77).
    """
    if path.is_symlink():
        raise Fault(f"{str(path)!r} is a link, which may lead out of the run directory: refused.", REFUSED)
    if not (path / MANIFEST).is_file():
        raise Fault(f"{str(path)!r} isn't a checkpoint: it has no {MANIFEST}.", NO_CHECKPOINT)
    files.check_folder(path, hashes)
    return read_progress(path)


def newest_valid(
    run_directory: Path, hashes: bool, suits: Callable[[dict[str, Any]], bool] = lambda document: True
) -> tuple[Optional[Path], list[str]]:
    """(the newest checkpoint of a run that passes `verified`, what is wrong with those that are newer).

    suits(document): whether the one with this progress.json may be taken. That one is refused for security is raised.
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


def checkpoint_at(path: str | Path) -> Path:
    """The checkpoint at `path`, or the latest of the run at `path`. Raises ValueError where there is none."""
    path = Path(path)
    if not path.is_dir():
        raise ValueError(f"No checkpoint at {str(path)!r}.{nearest_of(path)}")
    found = path if (path / MANIFEST).is_file() else files.latest(path)
    if found is None:
        raise ValueError(f"{str(path)!r} is neither a checkpoint nor a run with one: no {MANIFEST}, no step-N.")
    return found


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
    there, removed = checkpoints(run_directory), []
    losses = sorted((_eval_loss(path), step_of(path)) for path in there)
    best = {step for loss, step in losses[:keep_best] if math.isfinite(loss)}
    resumed_from = resumed_from and resumed_from.resolve()
    for path in there[: -max(1, keep_last)]:
        every = keep_every is not None and step_of(path) % keep_every == 0
        if every or is_pinned(path) or step_of(path) in best or path.resolve() == resumed_from:
            continue
        failpoint("prune.begin")
        if _discard(path, renamed=True):
            removed.append(path)
    failpoint("prune.done")
    return removed


def is_pinned(path: Path) -> bool:
    """True for a checkpoint that a user wants to keep."""
    return path.with_name(f"{path.name}.pinned").exists()


def _eval_loss(path: Path) -> float:
    try:
        loss = read_progress(path).get("eval_loss")
    except Fault:  # damaged, so never the best
        loss = None
    return loss if isinstance(loss, float) else math.inf


def sweep(run_directory: Path) -> list[str]:
    """Remove what a killed save or prune left, and return its names."""
    leftovers = [p for p in run_directory.glob(".*") if re.match(r"\.((tmp|trash)-step|STATUS\.json)-", p.name)]
    for path in leftovers:
        _discard(path)
    return sorted(path.name for path in leftovers)


def _discard(path: Path, renamed: bool = False) -> bool:
    """Remove, `renamed` before to what no reader takes for a checkpoint. What can't go now, as on NFS while somebody reads it,
    goes at the next start."""
    try:
        if renamed:
            path = path.rename(path.with_name(f".trash-{path.name}-{secrets.token_hex(4)}"))
            failpoint("prune.renamed")
        remove(path)
    except OSError as error:
        print(f"Warning: {path} couldn't be removed: {error.strerror}.", flush=True)
        return False
    return True


def remove(path: Path) -> None:
    """A folder with all that is in it, or a link itself."""
    if path.is_symlink() or not path.is_dir():
        path.unlink()
    else:
        shutil.rmtree(path)
