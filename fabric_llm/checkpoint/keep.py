"""What a checkpoint says of its run, and whether it is whole. Nothing here imports torch.

step-00000100/           a checkpoint: only complete ones bear such a name
step-00000100.pinned     beside it, made with `touch`: never pruned
.tmp-* .trash-*          what a killed save or prune left; swept at the next start
aside-step-*             later than a step that the run went back to; never used, removed first
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Optional

from fabric_llm.base import files
from fabric_llm.base.faults import NO_CHECKPOINT, REFUSED, Fault
from fabric_llm.base.files import MANIFEST, STEP_NAME, step_directories
from fabric_llm.base.names import listed, no_folder
from fabric_llm.data.periods import PROBES

METRICS, SAMPLES = "metrics.jsonl", "samples.jsonl"
METRICS_UNDONE = "metrics.undone.jsonl"  # lines of steps that a rewind has undone, for the report
MAX_COUNTED = 2**53  # steps, sequences, tokens: far beyond any run
# (a damaged checkpoint, what is wrong with it) -> whether it is whole by now
Mend = Callable[[Path, str], bool]


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


def verified(path: Path, hashes: bool = False, mend: Optional[Mend] = None) -> dict[str, Any]:
    """A checkpoint's progress.json, once exactly its files are there with the right sizes (and
    hashes).

    Raises Fault that names the first file that is damaged (66), or refused for security (77).
    """
    if path.is_symlink():
        raise Fault(
            f"{str(path)!r} is a link, which may lead out of the run directory: refused.", REFUSED
        )
    try:
        if not (path / MANIFEST).is_file():
            raise Fault(f"{str(path)!r} isn't a checkpoint: it has no {MANIFEST}.", NO_CHECKPOINT)
        files.check_folder(path, hashes)
    except Fault as fault:
        if fault.code != NO_CHECKPOINT or mend is None or not mend(path, str(fault)):
            raise
    return read_progress(path)


def whole(path: Path) -> dict[str, Any]:
    """As `verified` with hashes, of a checkpoint that a user names: a Fault (66) also names the
    others of its run."""
    try:
        return verified(path, hashes=True)
    except Fault as fault:
        there = [one for one in step_directories(path.parent) if (one / MANIFEST).is_file()]
        others = [str(one) for one in reversed(there) if one.name != path.name]
        if fault.code != NO_CHECKPOINT or not others:
            raise
        raise Fault(f"{fault} Others of its run: {listed(others)}.", NO_CHECKPOINT) from fault


def newest_valid(
    run_directory: Path,
    hashes: bool,
    mend: Optional[Mend] = None,
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
            if suits(verified(path, hashes, mend)):
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
        raise ValueError(no_folder("checkpoint", path))
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


def progress_or_nothing(path: Path) -> dict[str, Any]:
    """progress.json of a checkpoint, {} if it is damaged."""
    try:
        return read_progress(path)
    except Fault:  # damaged, so never the best
        return {}
