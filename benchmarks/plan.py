"""What plan.py predicts for runs whose peak memory others, and this project, have published.

    python benchmarks/plan.py

The runs, their peaks and their flags are those of plan_flags.csv.
"""

from __future__ import annotations

import csv
import statistics
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from benchmarks import gpu, inputs, page
from fabric_llm.forecast.memory import Memory
from fabric_llm.forecast.prediction import predict
from fabric_llm.model import gate, layers
from parse_arguments import parse_plan

FILE = ROOT / "benchmarks/plan_flags.csv"
CONTEXT, SLACK = "CUDA context (assumed)", "allocator's slack (assumed)"
# of the plan's parts
NOT_COUNTED = {"allocated": (CONTEXT, SLACK), "active": (CONTEXT, SLACK), "reserved": (CONTEXT,)}
# Llama 2 7B besides
SHAPES = {**gpu.SHAPES, "7B": inputs.llama(4096, 11008, 32, 32, vocab_size=32000)}
OWN = "[gpu.md](gpu.md)"
HALF = "keeps every second matrix product"
TITLES = ["run", "source", "counted", "not the same", "published, GiB", "plan, GiB", "error"]


class Published(NamedTuple):
    """A run, its peak in GiB, and the flags of plan.py besides --model_name with a folder of that
    shape's config.json."""

    run: str  # it begins with a key of SHAPES
    source: str
    counted: str  # a key of NOT_COUNTED
    other: str  # what of it these flags don't express
    gib: float
    flags: str


def main() -> None:
    options = page.parse(page.parser(__doc__))
    with tempfile.TemporaryDirectory() as name:
        rows = [predicted(one, Path(name)) for one in published()]
    page.write("Published peaks of memory, and what plan.py says", [], options, body(rows), rows)


def published() -> list[Published]:
    with FILE.open(newline="") as lines:
        return [Published(**{**line, "gib": float(line["gib"])}) for line in csv.DictReader(lines)]


def predicted(one: Published, folder: Path) -> page.Row:
    """A row of the page."""
    page.progress(f"{one.source} {one.run}")
    memory = planned(one, folder)
    row = {**one._asdict(), "plan": counted(memory, one)}
    row |= {"moment": memory.moment, "parts": memory.parts}
    if one.other == HALF:  # as torchtitan checkpoints
        with every_second_product():
            row["as_theirs"] = counted(planned(one, folder), one)
    return row


def planned(one: Published, folder: Path) -> Memory:
    inputs.write_llama(folder / "model", **SHAPES[one.run.partition(",")[0]])
    words = ["--model_name", str(folder / "model"), "--max_step", "1", *one.flags.split()]
    # When this project's rows were measured, the gradient norm took a float64 copy of a whole
    # parameter.
    with patch.object(gate, "SQUARED_AT_ONCE", sys.maxsize) if one.source == OWN else nullcontext():
        return predict(*parse_plan(words)).memory


def counted(memory: Memory, one: Published) -> float:
    """GiB of what the source counts."""
    without = NOT_COUNTED[one.counted]
    return sum(size for name, size in memory.parts.items() if name not in without) / page.GIB


def every_second_product() -> Any:
    """In its context selective checkpointing keeps what torchtitan's does: of the matrix products
    the first, third and so on."""

    def contexts(_: Any) -> Any:
        seen = {False: 0, True: 0}

        def keep(context: Any, operation: Any, *args: Any, **more: Any) -> CheckpointPolicy:
            is_product = operation == torch.ops.aten.mm.default
            seen[context.is_recompute] += is_product
            is_second = is_product and seen[context.is_recompute] % 2 == 0
            if operation in layers.KEPT and not is_second:
                return CheckpointPolicy.MUST_SAVE
            return CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(keep)

    return patch.object(layers, "create_selective_checkpoint_contexts", contexts)


def error(row: page.Row, key: str = "plan") -> float:
    """Of a prediction, as a fraction of what was published."""
    return row[key] / row["gib"] - 1


def body(rows: list[page.Row]) -> list[str]:
    theirs = [row for row in rows if "as_theirs" in row]
    others = [row for row in rows if row["source"] != OWN]
    own = [row for row in rows if row["source"] == OWN]
    expressed = [row for row in others if not row["other"]]
    lines = [[row["run"], row["source"], row["counted"], row["other"]] for row in rows]
    of_theirs = [[row["run"], row["source"]] for row in theirs]
    for places, of_table, key in ((lines, rows, "plan"), (of_theirs, theirs, "as_theirs")):
        for line, row in zip(places, of_table):
            line += [str(row["gib"]), f"{row[key]:.1f}", f"{error(row, key):+.1%}"]
    groups = []
    for name, group, key in (
        ("all", rows, "plan"),
        ("this project's", own, "plan"),
        ("of others", others, "plan"),
        ("of others, which these flags express", expressed, "plan"),
        ("torchtitan's, with this template's choice of what is kept", theirs, "plan"),
        ("torchtitan's, with their choice", theirs, "as_theirs"),
    ):
        errors = [abs(error(row, key)) for row in group]
        sizes = [f"{statistics.median(errors):.1%}", f"{max(errors):.1%}"]
        groups.append([name, len(errors), *sizes])
    return [
        page.table(TITLES, lines, words=4),
        "## With torchtitan's choice of what is kept",
        page.table([*TITLES[:2], *TITLES[4:]], of_theirs, words=2),
        "## Sizes of the errors",
        page.table(["runs", "number", "median", "largest"], groups),
    ]


if __name__ == "__main__":
    main()
