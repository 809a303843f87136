"""Where a run is, and what a checkpoint says of it: progress.json, and the versions of what wrote it."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fabric_llm.base.faults import NO_CHECKPOINT, Fault

MOST_COUNTED = 2**53  # steps, sequences, tokens: far beyond any run


@dataclass(frozen=True)
class Progress:
    """Where a run is. All that a resumed run needs besides weights and optimizer state."""

    step: int = 0  # finished optimizer steps
    position: int = 0  # sequences consumed by all ranks together
    tokens: int = 0  # tokens of those sequences

    def advance(self, sequences: int, context_length: int) -> Progress:
        """One step further."""
        return replace(
            self,
            step=self.step + 1,
            position=self.position + sequences,
            tokens=self.tokens + sequences * context_length,
        )


def step_directory(run_directory: Path, step: int) -> Path:
    """checkpoints/RUN/step-00000100"""
    return run_directory / f"step-{step:08d}"


def read_progress(path: Path) -> dict[str, Any]:
    """progress.json of a checkpoint. Raises Fault (66) where it isn't one."""
    try:
        document = json.loads((path / "trainer" / "progress.json").read_bytes())
        numbers = [document["progress"][field.name] for field in fields(Progress)]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise damaged(path, "trainer/progress.json can't be read.") from error
    fits = all(type(number) is int and 0 <= number < MOST_COUNTED for number in numbers)
    if not fits or len(document["progress"]) != len(numbers):
        raise damaged(path, f"trainer/progress.json says {document['progress']}.")
    return document


def versions() -> dict[str, str]:
    """Of the packages that write and read checkpoints."""
    return {name: version(name) for name in ("torch", "lightning", "transformers", "safetensors")}


def damaged(path: Path, how: str) -> Fault:
    return Fault(f"{str(path)!r} is damaged: {how}", NO_CHECKPOINT)
