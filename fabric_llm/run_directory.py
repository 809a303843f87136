"""checkpoints/RUN: its name, and whether it can be written."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Optional, Union

from fabric_llm import checkpoint


def default_name(model_name: str, data_folder: str) -> str:
    """MODEL-DATA from the last parts of both names; a run that starts from a checkpoint of RUN: RUN-DATA, or RUN."""
    model, data = Path(model_name), Path(data_folder).name
    name = model.parent.name if model.name.startswith("step-") else model.name
    return re.sub(rf"-{re.escape(data)}(-\d+)?$", "", name) + f"-{data}"


def choose(
    output_dir: str, run_name: Optional[str], default: str, resume: Union[bool, str], given: Optional[Path]
) -> Path:
    """The run directory; nothing is created.

    run_name: as given by the user; without one a new run takes the first free of DEFAULT, DEFAULT-2, ... and a resumed
    run the newest of those that is there. resume: True, False, or "auto" for either. given: the checkpoint to resume from, whose run goes on.
    Raises ValueError for a name that leaves output_dir, a new run in a directory that holds checkpoints, and a resume
    without a run.
    """
    parent = Path(output_dir)
    if run_name is not None and (not run_name or Path(run_name).name != run_name or run_name in (".", "..")):
        raise ValueError(f"--run_name {run_name!r} must be a plain name, without '/' or '..'.")
    if resume and given is not None:
        return given.parent
    if run_name is None:
        names = [default] + [f"{default}-{k}" for k in range(2, 10_000)]
        there = {path.name for path in parent.iterdir()} if parent.is_dir() else set()
        taken = [name for name in names if name in there]
        run_name = (taken[-1] if taken else default) if resume else next(n for n in names if n not in taken)
    folder = parent / run_name
    if resume is True and checkpoint.latest(folder) is None:
        raise ValueError(f"--resume true: no complete checkpoint (step-N) in {str(folder)!r}.")
    if not resume and checkpoint.latest(folder) is not None:
        raise ValueError(
            f"{str(folder)!r} holds checkpoints up to {checkpoint.latest(folder).name}: "
            "go on with --resume true, or take another --run_name."
        )
    return folder


def require_writable(folder: Path) -> None:
    """Raises ValueError if files can't be made in `folder`. Leaves nothing behind but the parents of `folder`."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder if folder.is_dir() else folder.parent):
            pass
    except OSError as error:
        raise ValueError(f"The output directory {str(folder)!r} can't be written: {error.strerror}.") from error
