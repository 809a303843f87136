"""What plan.py predicts for runs whose peak memory others, and this project, have published.

    python benchmarks/plan.py

Each run is planned with the flags of this template that come nearest to it. Nothing is measured
here, and no number of the plan was chosen by the runs of others. It needs no GPU.
docs/results/plan.md has the tables, and what explains the errors.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple, Optional
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from arguments import parse_plan
from benchmarks import gpu, inputs, page
from fabric_llm.forecast.memory import Memory
from fabric_llm.forecast.prediction import predict
from fabric_llm.model import gate, layers

GIB = 2**30
CONTEXT, SLACK = "CUDA context (assumed)", "allocator's slack (assumed)"
# of the plan's parts
NOT_COUNTED = {
    "allocated": (CONTEXT, SLACK),
    "active": (CONTEXT, SLACK),
    "reserved": (CONTEXT,),
}
# Llama 2 7B besides
SHAPES = {
    **gpu.SHAPES,
    "7B": gpu.llama(4096, 11008, 32, 32, 32, False, 32000),
}

TITAN = "https://github.com/pytorch/torchtitan"
PERFORMANCE = (
    f"[torchtitan, December 2024]({TITAN}/blob/main/benchmarks/llama3_h100_202412_torchtitan.md)"
)
PER_PARAMETER = f"[torchtitan 135]({TITAN}/pull/135)"
FUSED = f"[torchtitan 355]({TITAN}/pull/355)"
FLOAT8 = "[torchao](https://github.com/pytorch/ao/blob/8c81863ba/torchao/float8/README.md#training-benchmarks)"
TORCHTUNE = "[torchtune](https://github.com/pytorch/torchtune#optimization-flags)"
OWN = "[gpu.md](gpu.md)"

MIXED = "--precision bf16-mixed --loss full"
SINGLE = "--precision bf16-true --context_length 4096"


class Published(NamedTuple):
    """A run, its peak in GiB, and the flags that plan it."""

    source: str
    run: str
    shape: str  # of SHAPES
    gib: float
    counted: str  # a key of NOT_COUNTED
    flags: str
    other: Optional[str] = None  # what of it these flags don't express


HALF = "keeps every second matrix product"
LOGITS = "keeps the logits of all chunks"
SMALLER = "had smaller chunks of the loss, not compiled"


def titan(
    source: str, run: str, shape: str, gib: float, counted: str, size: int, context: int, flags: str
) -> Published:
    other = HALF if "selective" in flags else None
    flags = f"{MIXED} --micro_batch_size {size} --context_length {context} {flags}"
    return Published(source, run, shape, gib, counted, flags, other)


EAGER, COMPILED, CHUNKED = "--compile false", "--compile true", "--loss chunked --compile true"
SELECTIVE, FULL = "--activation_checkpointing selective", "--activation_checkpointing full"
EIGHT, NODES = "--strategy fsdp2 --devices 8", "--strategy fsdp2 --devices 8 --num_nodes 16"
PUBLISHED = [
    titan(
        PERFORMANCE,
        "8B, 8 H100, eager",
        "8B",
        82.4,
        "reserved",
        2,
        8192,
        f"{EIGHT} {SELECTIVE} {EAGER}",
    ),
    titan(
        PERFORMANCE,
        "8B, 8 H100, compiled",
        "8B",
        77.0,
        "reserved",
        2,
        8192,
        f"{EIGHT} {SELECTIVE} {COMPILED}",
    ),
    titan(
        PERFORMANCE,
        "8B, 128 H100, eager",
        "8B",
        67.0,
        "reserved",
        2,
        8192,
        f"{NODES} {SELECTIVE} {EAGER}",
    ),
    titan(
        PERFORMANCE,
        "8B, 128 H100, compiled",
        "8B",
        62.0,
        "reserved",
        2,
        8192,
        f"{NODES} {SELECTIVE} {COMPILED}",
    ),
    titan(
        FLOAT8,
        "8B, 8 H100, compiled",
        "8B",
        47.65,
        "reserved",
        1,
        8192,
        f"{EIGHT} {SELECTIVE} {COMPILED}",
    ),
    titan(
        FUSED, "8B, 8 A100, eager", "8B", 59.48, "reserved", 1, 8192, f"{EIGHT} {SELECTIVE} {EAGER}"
    ),
    *(
        titan(
            PER_PARAMETER,
            f"7B, 8 H100, {name}",
            "7B",
            gib,
            "active",
            8,
            2048,
            f"--devices 8 {flags} {EAGER}",
        )
        for name, gib, flags in (
            ("FSDP1, full", 23.6, f"--strategy fsdp {FULL}"),
            ("FSDP1, selective", 50.4, f"--strategy fsdp {SELECTIVE}"),
            ("FSDP2, full", 22.7, f"--strategy fsdp2 {FULL}"),
            ("FSDP2, selective", 49.5, f"--strategy fsdp2 {SELECTIVE}"),
        )
    ),
    *(
        Published(
            TORCHTUNE,
            f"3B, one A100, {name}",
            "3B",
            gib,
            "active",
            f"{SINGLE} --micro_batch_size 2 {flags}",
            other,
        )
        for name, gib, flags, other in (
            ("packed", 60.0, f"--loss full {EAGER}", None),
            ("compiled", 51.0, f"--loss full {COMPILED}", None),
            ("chunked loss", 42.9, CHUNKED, LOGITS),
            ("checkpointing", 24.9, f"{CHUNKED} {FULL}", LOGITS),
        )
    ),
    *(
        Published(
            OWN, f"{shape}, one H100, {name}", shape, gib, "allocated", f"{SINGLE} {flags}", other
        )
        for shape, name, gib, flags, other in (
            ("1B", "compiled", 30.8, f"--micro_batch_size 4 {CHUNKED}", None),
            ("1B", "eager", 40.3, f"--micro_batch_size 4 --loss chunked {EAGER}", None),
            ("1B", "full loss", 50.7, f"--micro_batch_size 4 --loss full {COMPILED}", None),
            ("1B", "micro-batch 8", 49.9, f"--micro_batch_size 8 {CHUNKED}", SMALLER),
            (
                "1B",
                "micro-batch 8, checkpointing",
                12.5,
                f"--micro_batch_size 8 {CHUNKED} {FULL}",
                SMALLER,
            ),
            ("3B", "compiled", 42.3, f"--micro_batch_size 2 {CHUNKED}", SMALLER),
            (
                "8B",
                "micro-batch 4, checkpointing",
                63.8,
                f"--micro_batch_size 4 {CHUNKED} {FULL}",
                None,
            ),
            (
                "8B",
                "micro-batch 1, checkpointing",
                63.8,
                f"--micro_batch_size 1 {CHUNKED} {FULL}",
                None,
            ),
        )
    ),
]


def main(argv: Optional[list[str]] = None) -> int:
    options = page.parse(page.parser(__doc__, rounds=1), argv)
    with tempfile.TemporaryDirectory() as name:
        rows = [predicted(one, Path(name)) for one in PUBLISHED]
    page.write(
        "plan.py", "Published peaks of memory, and what plan.py says", [], options, body(rows), rows
    )
    return 0


def predicted(one: Published, folder: Path) -> page.Row:
    """A row of the page."""
    page.progress(f"{one.source} {one.run}")
    memory = planned(one, folder)
    row = {
        **one._asdict(),
        "plan": counted(memory, one),
        "moment": memory.moment,
        "parts": memory.parts,
    }
    if one.other == HALF:  # as torchtitan checkpoints
        with every_second_product():
            row["as_theirs"] = counted(planned(one, folder), one)
    return row


def planned(one: Published, folder: Path) -> Memory:
    inputs.write_llama(folder / one.shape, **SHAPES[one.shape])
    words = ["--model_name", str(folder / one.shape), "--max_step", "1", *one.flags.split()]
    # When this project's rows were measured, the gradient norm took a float64 copy of a whole
    # parameter.
    with patch.object(gate, "SQUARED_AT_ONCE", sys.maxsize) if one.source == OWN else nullcontext():
        return predict(*parse_plan(words)).memory


def counted(memory: Memory, one: Published) -> float:
    """GiB of what the source counts."""
    return (
        sum(size for name, size in memory.parts.items() if name not in NOT_COUNTED[one.counted])
        / GIB
    )


@contextmanager
def every_second_product() -> Iterator[None]:
    """In the body selective checkpointing keeps what torchtitan's does: of the matrix products the
    first, third and so on."""

    def contexts(_: Any) -> Any:
        seen = {False: 0, True: 0}

        def keep(context: Any, operation: Any, *args: Any, **more: Any) -> CheckpointPolicy:
            is_product = operation == torch.ops.aten.mm.default
            seen[context.is_recompute] += is_product
            is_kept = operation in layers.KEPT and not (
                is_product and seen[context.is_recompute] % 2 == 0
            )
            return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(keep)

    with patch.object(layers, "create_selective_checkpoint_contexts", contexts):
        yield


def error(row: page.Row, key: str = "plan") -> float:
    """Of a prediction, as a part of what was published."""
    return row[key] / row["gib"] - 1


def body(rows: list[page.Row]) -> str:
    titles = ["run", "source", "counted", "not the same", "published, GiB", "plan, GiB", "error"]
    lines = (
        [row["run"], row["source"], row["counted"], row["other"] or "", *cells(row, "plan")]
        for row in rows
    )
    theirs = [row for row in rows if "as_theirs" in row]
    others = [row for row in rows if row["source"] != OWN]
    groups = {
        "all": (rows, "plan"),
        "this project's": ([row for row in rows if row["source"] == OWN], "plan"),
        "of others": (others, "plan"),
        "of others, which these flags express": (
            [row for row in others if row["other"] is None],
            "plan",
        ),
        "torchtitan's, with this template's choice of what is kept": (theirs, "plan"),
        "torchtitan's, with their choice": (theirs, "as_theirs"),
    }
    return "\n\n".join(
        [
            page.table(titles, lines, words=4),
            "## With torchtitan's choice of what is kept",
            page.table(
                ["run", "source", *titles[-3:]],
                ([row["run"], row["source"], *cells(row, "as_theirs")] for row in theirs),
                words=2,
            ),
            "## Sizes of the errors",
            page.table(
                ["runs", "number", "median", "largest"],
                ([name, *sizes(*of)] for name, of in groups.items()),
            ),
            page.flags(rows),
        ]
    )


def cells(row: page.Row, key: str) -> list[str]:
    return [str(row["gib"]), f"{row[key]:.1f}", f"{error(row, key):+.1%}"]


def sizes(rows: list[page.Row], key: str) -> list[str]:
    found = [abs(error(row, key)) for row in rows]
    return [str(len(rows)), f"{statistics.median(found):.1%}", f"{max(found):.1%}"]


if __name__ == "__main__":
    sys.exit(main())
