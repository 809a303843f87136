"""Which checkpoints a run keeps, and how the others are removed or moved aside."""

import json
import math
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from fabric_llm.base.failpoints import failpoint
from fabric_llm.base.files import checkpoints, fsync, remove, step_directories, step_of
from fabric_llm.checkpoint.keep import progress_or_nothing
from fabric_llm.data.mixture import mixture_of
from fabric_llm.data.periods import ONE_SET


def move_aside(run_directory: Path, after_step: int) -> list[str]:
    """Rename the checkpoints of later steps, whole or not, which a run that resumes at `after_step`
    will write anew."""
    later = [path for path in step_directories(run_directory) if step_of(path) > after_step]
    names = put_aside(later)
    failpoint("resume.moved_aside")
    return names


def put_aside(paths: Iterable[Path]) -> list[str]:
    """Rename checkpoints of a run so that it doesn't resume from them. Returns their new names."""
    names = []
    for path in paths:
        # The random suffix lets one step be moved aside more than once.
        aside = path.with_name(f"aside-{path.name}-{secrets.token_hex(4)}")
        pin = path.with_name(f"{path.name}.pinned")
        # Pinned before it is renamed, and the former pin removed after: a kill leaves one too many,
        # which `sweep` removes.
        if is_pinned(path):
            aside.with_name(f"{aside.name}.pinned").touch()
        names.append(path.rename(aside).name)
        pin.unlink(missing_ok=True)
        # Also after a crash of the machine.
        fsync(path.parent)
    return names


@dataclass(frozen=True)
class Kept:
    """Which checkpoints a run keeps.

    What stays depends only on the folder's content, so that a run that was killed can go back to
    the same checkpoints as one that wasn't.
    """

    last: int  # the newest ones
    every: Optional[int] = None  # and those of multiples of so many steps
    best: int = 0  # and those with the lowest validation loss
    best_of: Optional[str] = None  # the set whose loss that is, None: of the training data
    interval: Optional[int] = None  # --save_step_interval, see `is_due`
    # And the newest that is due for which this is true, of its progress.json.
    to_go_back_to: Optional[Callable[[dict[str, Any]], bool]] = None
    named: Optional[Path] = None  # and the one that --checkpoint names


def is_due(step: int, interval: Optional[int]) -> bool:
    """Whether a run saves after this step by itself.

    Other checkpoints exist because somebody asked for them. Rewinds avoid these, so that a run goes
    back to the same checkpoint whether or not it was stopped in between.
    """
    return step == 0 or interval is not None and step % interval == 0


def prune(run_directory: Path, kept: Kept) -> list[Path]:
    """Remove the checkpoints that are neither `kept` nor pinned. Returns those that were
    removed."""
    return discard(not_kept(run_directory, kept))


def discard(paths: Iterable[Path]) -> list[Path]:
    """Remove checkpoints, and return those that were removed. Each is renamed first, so that a kill
    leaves none that is half there."""
    removed = []
    for path in paths:
        failpoint("prune.begin")
        if _discard(path, renamed=True):
            removed.append(path)
    failpoint("prune.done")
    return removed


def not_kept(
    run_directory: Path, kept: Kept, elsewhere: Mapping[str, dict[str, Any]] = {}
) -> list[Path]:
    """The checkpoints that are neither `kept` nor pinned.

    elsewhere: progress.json by name of checkpoints that are at --mirror, and may not be here.
    """
    documents = {run_directory / name: document for name, document in elsewhere.items()}
    documents |= {path: progress_or_nothing(path) for path in checkpoints(run_directory)}
    there = sorted(documents, key=step_of)
    # Rewinds prefer checkpoints that were due to those that a user asked for.
    due = [path for path in there if is_due(step_of(path), kept.interval)]
    aside = sorted(path for path in run_directory.glob("aside-step-*") if path.is_dir())
    # The last ones in this order stay: those that were moved aside are removed first, then those
    # that a user asked for.
    asked_for = [path for path in there if path not in due]
    ordered = [*aside, *asked_for, *due]
    # The newest checkpoint always stays, because the run resumes from it.
    stays = {*ordered[-kept.last :], *there[-1:]}
    # Of equal losses the older checkpoint stays. Without a loss, one is never among the best.
    # Losses of other rows don't compare, so those of the same rows have their best.
    shares = _newest_shares([documents[path] for path in there])
    of_rows: dict[str, list[tuple[float, Path]]] = {}
    for path in there:
        loss = _eval_loss(documents[path], kept.best_of, shares)
        of_rows.setdefault(_rows_of(documents[path], kept.best_of), []).append((loss, path))
    for losses in of_rows.values():
        best = sorted(losses)[: kept.best]
        stays.update(path for loss, path in best if math.isfinite(loss))
    if kept.every is not None:
        stays.update(path for path in there if step_of(path) % kept.every == 0)
    # The newest suitable one stays, however old it is, so that a rewind has somewhere to go.
    if kept.to_go_back_to is not None:
        suitable = [path for path in due if kept.to_go_back_to(documents[path])]
        stays.update(suitable[-1:])
    # The user may name it through a link or another folder, so real paths are compared.
    named = kept.named and kept.named.resolve()
    return [
        path
        for path in ordered
        if not (path in stays or is_pinned(path) or path.resolve() == named)
    ]


def is_pinned(path: Path) -> bool:
    """True for a checkpoint that a user wants to keep."""
    return path.with_name(f"{path.name}.pinned").exists()


def _newest_shares(documents: Sequence[dict[str, Any]]) -> dict[str, float]:
    """{source: its share} of the newest that was evaluated on several, {} without one."""
    for document in reversed(documents):
        if document.get("mixture") and document.get("eval_losses"):
            with suppress(ValueError):
                last = max(document["progress"]["position"] - 1, 0)
                return mixture_of(document).shares_at(last)
    return {}


def _eval_loss(
    document: dict[str, Any], of_set: Optional[str], shares: Mapping[str, float]
) -> float:
    """The loss by which checkpoints are compared, inf without one. shares: of the sources of a
    mixture, by which the losses of all checkpoints are averaged."""
    loss, losses = document.get("eval_loss"), document.get("eval_losses")
    if of_set and losses:
        loss = losses.get(of_set)
    # What the checkpoint has itself is averaged by the shares at its step, which may have changed.
    elif losses and shares and shares.keys() <= losses.keys():
        loss = sum(share * losses[name] for name, share in shares.items())
    # A checkpoint without an evaluation counts as worse than all others.
    return loss if isinstance(loss, float) else math.inf


def _rows_of(document: dict[str, Any], of_set: Optional[str]) -> str:
    """What the loss by which checkpoints are compared is of, see DataPlan.measured_on."""
    measured, mixture = document.get("evaluated_on"), document.get("mixture")
    if not isinstance(measured, dict):  # an older version's
        return ""
    names = [of_set] if of_set else mixture["sources"] if mixture else [ONE_SET]
    return json.dumps([measured.get(name) for name in names])


def sweep(run_directory: Path) -> list[str]:
    """Remove what a killed save, prune or `put_aside` left, and return its names."""
    # .tmp-step-* of saves, .trash-* of removals, .STATUS.json-* and the like of
    # `files.write_atomically`.
    left = r"\.((tmp|trash)-(aside-)?step-|(STATUS|arguments|metrics|samples)\.\w+-[0-9a-f]{8}$)"
    there = [path for path in run_directory.glob(".*") if re.match(left, path.name)]
    for pin in run_directory.glob("aside-step-*.pinned"):
        former = pin.with_name(re.sub(r"aside-(step-\d+)-.*", r"\1.pinned", pin.name))
        # It was to be pinned, or its former pin wasn't removed, which would pin the next one.
        if not pin.with_suffix("").is_dir():
            there.append(pin)
        elif former.exists() and not former.with_suffix("").is_dir():
            there.append(former)
    return sorted(path.name for path in there if _discard(path))


def _discard(path: Path, renamed: bool = False) -> bool:
    """Remove a folder or link. Returns whether that succeeded.

    renamed: first give it a name that no reader takes for a checkpoint's. What can't be removed
    now, as on NFS while somebody reads it, is removed at the next start.
    """
    try:
        if renamed:
            # From the rename on no reader sees the checkpoint, however long its removal takes.
            path = path.rename(path.with_name(f".trash-{path.name}-{secrets.token_hex(4)}"))
            failpoint("prune.renamed")
        remove(path)
    except OSError as error:
        print(f"Warning: {path} couldn't be removed: {error.strerror}.", flush=True)
        return False
    return True
