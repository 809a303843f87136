"""What a checkpoint says of its run, whether it is whole, and which checkpoints a run keeps.
Nothing here imports torch.

step-00000100/           a checkpoint: only complete ones bear such a name
step-00000100.pinned     beside it, made with `touch`: never pruned
.tmp-* .trash-*          what a killed save or prune left; swept at the next start
aside-step-*             later than a step that the run went back to; never used, removed first
"""

import json
import math
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Optional

from fabric_llm.base import files
from fabric_llm.base.failpoints import failpoint
from fabric_llm.base.faults import NO_CHECKPOINT, REFUSED, Fault
from fabric_llm.base.files import MANIFEST, STEP_NAME, checkpoints, fsync, step_directories, step_of
from fabric_llm.base.names import listed, nearest_of
from fabric_llm.data.periods import ONE_SET, PROBES

METRICS, SAMPLES = "metrics.jsonl", "samples.jsonl"
METRICS_UNDONE = "metrics.undone.jsonl"  # lines of steps that a rewind has undone, for the report
MAX_COUNTED = 2**53  # steps, sequences, tokens: far beyond any run


@dataclass(frozen=True)
class Progress:
    """Where a run is. All that a resumed run needs besides weights and optimizer state."""

    step: int = 0  # finished optimizer steps
    position: int = 0  # sequences consumed by all ranks together
    tokens: int = 0  # tokens of those sequences

    def advance(self, sequences: int, context_length: int) -> "Progress":
        """One step further."""
        return Progress(
            self.step + 1, self.position + sequences, self.tokens + sequences * context_length
        )


def step_directory(run_directory: Path, step: int) -> Path:
    """checkpoints/RUN/step-00000100"""
    return run_directory / f"step-{step:08d}"


def versions() -> dict[str, str]:
    """Of the packages that write and read checkpoints."""
    return {name: version(name) for name in ("torch", "lightning", "transformers", "safetensors")}


def damaged(path: Path, how: str) -> Fault:
    return Fault(f"{str(path)!r} is damaged: {how}", NO_CHECKPOINT)


def read_progress(path: Path) -> dict[str, Any]:
    """progress.json of a checkpoint, with its losses. Raises Fault (66) where it isn't one.

    If a request to stop came before the evaluation that was due, the file has no losses. They are
    then taken from the log, where the resumed run has written them.
    """
    try:
        document = json.loads((path / "trainer" / "progress.json").read_bytes())
        numbers = document["progress"]
        # A person or a broken disk may have changed the file, so each value is checked.
        fits = numbers.keys() == asdict(Progress()).keys()
        # `type` instead of isinstance, which takes JSON's true for an int.
        fits = fits and all(
            type(number) is int and 0 <= number < MAX_COUNTED for number in numbers.values()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise damaged(path, "trainer/progress.json can't be read.") from error
    if not fits:
        raise damaged(path, f"trainer/progress.json says {numbers}.")
    # The log beside a folder with a checkpoint's name is that of the checkpoint's own run.
    if not is_evaluated(document) and re.fullmatch(STEP_NAME, path.name):
        rows = document.get("evaluated_on")
        document |= _logged_losses(path.parent / METRICS, Progress(**numbers), rows)
    return document


def is_evaluated(document: Mapping[str, Any]) -> bool:
    """Whether the losses of validation sets are known at the checkpoint of a progress.json."""
    return any(document.get(name) is not None for name in ("eval_loss", "eval_losses"))


def comparable_losses(document: Mapping[str, Any]) -> Optional[dict[str, float]]:
    """The losses at a checkpoint of those sets that were evaluated there on the same rows as before
    step 1; None if it wasn't evaluated."""
    losses, then, here = map(document.get, ("eval_losses", "measured_on", "evaluated_on"))
    # At step 0 they are those before step 1.
    if losses is None or then is None or here is None or not document["progress"]["step"]:
        return losses
    return {name: loss for name, loss in losses.items() if then.get(name) == here.get(name)}


def _logged_losses(log: Path, progress: Progress, measured: Any) -> dict[str, Any]:
    """What metrics.jsonl says of an evaluation there, as progress.json says it, and `from_log`; {}
    without one. measured: see DataPlan.measured_on; an evaluation of other rows is passed over."""
    # Lines of earlier versions have no position: then the step alone decides.
    for _, line in files.json_lines(log, having='"eval_loss"'):
        at, sets = (line.get("step"), line.get("position", progress.position)), line.get("eval")
        if at == (progress.step, progress.position) and isinstance(sets, dict):
            if not _is_of(sets, measured):
                continue
            losses = {}
            for name, numbers in sets.items():
                if isinstance(numbers, dict):
                    loss = numbers.get("loss")
                    # JSON has no NaN, so the log has null in its place.
                    losses[name] = loss if isinstance(loss, float) else math.nan
            found = {"eval_loss": line.get("eval_loss"), "eval_losses": losses}
            return {**found, "from_log": True}
    return {}


def part_read(measured: Any) -> dict[str, int]:
    """How many rows of how many a loss is of, as metrics.jsonl has it, from the entry of
    DataPlan.measured_on for its set; {} if it is of all."""
    # What older versions wrote has no numbers of rows here.
    match measured:
        case [_, int(rows), int(of_rows), *_] if rows < of_rows:
            return {"rows": rows, "of_rows": of_rows}
    return {}


def _is_of(sets: dict[str, Any], measured: Any) -> bool:
    """Whether an evaluation in a log is of as many rows of each set as a checkpoint says: a run
    that was resumed with another --eval_iters may have made it."""
    if not isinstance(measured, dict):  # an older version's
        return True
    for name, numbers in sets.items():
        # A probe's rows aren't those of the set that it is made of.
        if name in PROBES or name not in measured or not isinstance(numbers, dict):
            continue
        read = {key: numbers[key] for key in ("rows", "of_rows") if key in numbers}
        if read != part_read(measured[name]):
            return False
    return True


def is_before(line: Mapping[str, Any], progress: Progress) -> bool:
    """Whether a line of a log tells of what a run that is at `progress` has done, and not undone.

    A rewind goes back to an earlier step, at a later position. Older lines may have no position.
    """
    step, position = line.get("step"), line.get("position", 0)
    are_numbers = type(step) is type(position) is int
    return are_numbers and step <= progress.step and position <= progress.position


def verified(path: Path, hashes: bool = False) -> dict[str, Any]:
    """A checkpoint's progress.json, once exactly its files are there with the right sizes (and
    hashes).

    Raises Fault that names the first file that is damaged (66), or refused for security (77).
    """
    if path.is_symlink():
        raise Fault(
            f"{str(path)!r} is a link, which may lead out of the run directory: refused.", REFUSED
        )
    if not (path / MANIFEST).is_file():
        raise Fault(f"{str(path)!r} isn't a checkpoint: it has no {MANIFEST}.", NO_CHECKPOINT)
    files.check_folder(path, hashes)
    return read_progress(path)


def newest_valid(
    run_directory: Path,
    hashes: bool,
    suits: Callable[[dict[str, Any]], bool] = lambda document: True,
) -> tuple[Optional[Path], list[str]]:
    """(the newest checkpoint of a run that passes `verified`, what is wrong with those that are
    newer).

    suits(document): whether the one with this progress.json may be taken. Raises Fault (77) for one
    that is refused for security.
    """
    problems = []
    # The newest comes first. If it is damaged, the one before it is tried.
    for path in reversed(step_directories(run_directory)):
        try:
            if suits(verified(path, hashes)):
                return path, problems
        except Fault as fault:
            # Somebody may have tampered with it, so no other one is taken silently.
            if fault.code != NO_CHECKPOINT:
                raise
            problems.append(str(fault))
    return None, problems


def checkpoint_at(path: str | Path) -> Path:
    """The checkpoint at `path`, or the latest of the run at `path`. Raises ValueError where there
    is none."""
    path = Path(path)
    if not path.is_dir():
        raise ValueError(f"No checkpoint at {str(path)!r}.{nearest_of(path)}")
    checkpoint = path if (path / MANIFEST).is_file() else files.latest(path)
    if checkpoint is None:
        # One that lost its manifest, as by a copy in part.
        steps = [path] if re.fullmatch(STEP_NAME, path.name) else step_directories(path)
        if steps:
            raise ValueError(
                f"{str(steps[-1])!r} isn't a whole checkpoint: it has no {MANIFEST}. Copy it "
                "again, or take another one."
            )
        raise ValueError(
            f"{str(path)!r} is neither a checkpoint nor a run with one: no {MANIFEST}, no step-N."
            + runs_in(path)
        )
    return checkpoint


def runs_in(folder: Path) -> str:
    """The end of a message about a folder that isn't a run: those with a checkpoint in it."""
    names = sorted(path.name for path in folder.glob("*") if files.latest(path) is not None)
    return f" It holds the runs {listed(names)}." if names else ""


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
        if is_pinned(path):
            path.with_name(f"{path.name}.pinned").rename(aside.with_name(f"{aside.name}.pinned"))
        names.append(path.rename(aside).name)
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


def progress_or_nothing(path: Path) -> dict[str, Any]:
    """progress.json of a checkpoint, {} if it is damaged."""
    try:
        return read_progress(path)
    except Fault:  # damaged, so never the best
        return {}


def _newest_shares(documents: Sequence[dict[str, Any]]) -> dict[str, float]:
    """{source: its share} of the newest that was evaluated on several, {} without one."""
    # It imports numpy, for which --help and mistakes don't wait.
    from fabric_llm.data.mixture import mixture_of

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
    """Remove what a killed save or prune left, and return its names."""
    names = []
    for path in list(run_directory.glob(".*")):
        # .tmp-step-* of saves, .trash-* of removals, .STATUS.json-* of `files.write_atomically`.
        if re.match(r"\.((tmp|trash)-(aside-)?step|STATUS\.json)-", path.name):
            _discard(path)
            names.append(path.name)
    return sorted(names)


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


def remove(path: Path) -> None:
    """A folder with all that is in it, or a link itself."""
    if path.is_symlink() or not path.is_dir():
        path.unlink()
    else:
        shutil.rmtree(path)
