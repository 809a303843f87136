"""The names of checkpoints in a run directory: step-00000100 and so on."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Optional

from fabric_llm.base.files import MANIFEST


def step_directories(run_directory: Path) -> list[Path]:
    """All directories with a checkpoint's name, in the order of steps, which no clock can change."""
    found = [p for p in run_directory.glob("step-*") if re.fullmatch(r"step-\d{8,}", p.name) and p.is_dir()]
    return sorted(found, key=step_of)


def step_of(path: Path) -> int:
    """checkpoints/RUN/step-00000100 -> 100"""
    return int(path.name.removeprefix("step-"))


def checkpoints(run_directory: Path) -> list[Path]:
    """The complete checkpoints of a run, in the order of steps."""
    return [path for path in step_directories(run_directory) if (path / MANIFEST).is_file()]


def latest(run_directory: Path) -> Optional[Path]:
    """The complete checkpoint with the highest step, None if there is none."""
    return next(reversed(checkpoints(run_directory)), None)
