"""Tokens per second and memory as context, depth, width, vocabulary, ranks and accumulation grow, each alone.

    python benchmarks/scaling.py --output scaling.json

Around one small shape each axis is followed by itself, with the steps of training outside of a run (one_step.py).
The points of an axis take turns (turns.py). Beside each measured exponent, the slope of log(seconds of a step) over
log(size), stands what theory says: the slope of the operations that a step needs, so that what is quadratic in the
context or the width counts with the part that it has at this size. Memory is the peak of a step above parameters
and optimizer state, and its theory is activations and gradients as this model keeps them. A last line names the
axes where growth isn't what theory says.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple, Optional

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import inputs, page, turns  # noqa: E402

SECONDS_TOLERANCE, MEMORY_TOLERANCE = 0.2, 0.25  # between the exponents
COLUMNS = {
    "size": lambda row: str(row["size"]),
    **{"tokens/s": page.number("tokens_per_second", ",.0f"), "step, ms": page.step, "quartiles": page.spread},
    **{"times the first": page.number("times_first"), "operations": page.number("operations")},
    "additional peak, MiB": page.mebibytes("additional_bytes"),
    "in theory": page.mebibytes("additional_bytes_in_theory"),
}
EXPONENTS = ["", "seconds: theory", "measured", "memory: theory", "measured", ""]


class Point(NamedTuple):
    """What one run of an axis has; sizes in tokens, layers, numbers, tokens, processes and micro-batches."""

    context: int = 256
    layers: int = 4
    hidden: int = 256
    vocabulary: int = 4096
    ranks: int = 1
    accumulation: int = 1
    micro_batch: int = 4

    @property
    def intermediate(self) -> int:
        return -(-self.hidden * 8 // 3 // 32) * 32

    @property
    def tokens(self) -> int:
        """Of a step, on all ranks."""
        return self.context * self.micro_batch * self.accumulation * self.ranks

    @property
    def layer_parameters(self) -> int:
        return self.layers * (4 * self.hidden**2 + 3 * self.hidden * self.intermediate)

    @property
    def parameters(self) -> int:
        return self.layer_parameters + 2 * self.vocabulary * self.hidden

    def operations(self) -> float:
        """Of a step on one rank: 6 for each parameter and token, and half of 12 x layers x width x context, causal."""
        of_token = 6 * (self.layer_parameters + self.vocabulary * self.hidden)
        return self.tokens / self.ranks * (of_token + 6 * self.layers * self.hidden * self.context)

    def additional_bytes(self) -> float:
        """Of a rank's step in float32, either where the forward pass ends or where the backward pass does.

        A layer keeps 11 x width + 4 x the MLP's width numbers a token: the inputs of norms, matrix products and
        attention. The loss in chunks (fabric_llm/model/fast_paths.py) takes three copies of 2^21 logits, and makes
        the gradient of the head in the forward pass, which needs a second one of its chunk.
        """
        tokens = self.context * self.micro_batch
        activations = tokens * self.layers * (11 * self.hidden + 4 * self.intermediate)
        head, gradients = self.vocabulary * self.hidden, self.parameters / self.ranks
        chunk = 3 * min(2**21, tokens * self.vocabulary) + head
        before = gradients if self.accumulation > 1 else 0
        return 4 * max(activations + head + chunk + before, gradients + head)


BASE = Point()
AXES = {
    "context": (128, 256, 512, 1024),
    "layers": (2, 4, 8, 16),
    "hidden": (128, 256, 512),
    "vocabulary": (2048, 4096, 8192, 16384),
    "ranks": (1, 2),
    "accumulation": (1, 2, 4),
}
TOY_BASE = Point(context=16, layers=1, hidden=64, vocabulary=64, micro_batch=2)
TOY_AXES = {
    **{"context": (16, 32), "layers": (1, 2), "hidden": (64, 128), "vocabulary": (64, 128)},
    **{"ranks": (1, 2), "accumulation": (1, 2)},
}


def main(argv: Optional[list[str]] = None) -> int:
    parser = turns.parser(__doc__)
    parser.set_defaults(threads=1, dtypes="float32")
    parser.add_argument("--axes", nargs="+", default=list(AXES), choices=AXES, help="what to grow")
    options = turns.resolve(parser, argv)
    base, axes = (TOY_BASE, TOY_AXES) if options.smoke else (BASE, AXES)
    rows: list[page.Row] = []
    lines = []
    with tempfile.TemporaryDirectory() as name:
        for dtype, axis in itertools.product(options.dtypes, options.axes):
            points = [base._replace(**{axis: size}) for size in axes[axis]]
            found = measure(Path(name) / f"{axis}-{dtype}", axis, points, dtype, options)
            lines.append(exponents(f"{axis}, {dtype}", points, found))
            rows += found
    notes = [
        f"Around: {dict(base._asdict())}; one axis grows at a time; ranks under --strategy fsdp",
        f"As theory says: exponents of seconds to {SECONDS_TOLERANCE}, of memory to {MEMORY_TOLERANCE}",
    ]
    unlike = [line[0] for line in lines if line[-1] != "as theory says"]
    body = [page.compare(rows, COLUMNS), page.table(EXPONENTS, lines)]
    body.append(f"Growth isn't what theory says: {'; '.join(unlike) if unlike else 'nowhere'}.")
    page.write("scaling.py", "Scaling", notes, options, "\n\n".join(body), rows)
    return 0


def measure(folder: Path, axis: str, points: list[Point], dtype: str, options: argparse.Namespace) -> list[page.Row]:
    contenders = []
    for number, point in enumerate(points):
        inside = folder / str(number)
        shape = {"hidden_size": point.hidden, "intermediate_size": point.intermediate}
        shape |= {"num_hidden_layers": point.layers, "num_attention_heads": max(1, point.hidden // 64)}
        inputs.write_llama(inside / "llama", vocab_size=point.vocabulary, **shape)
        inputs.write_rows(inside / "data", point.vocabulary, point.context, 64)
        more = {"devices": point.ranks, "micro_batch_size": point.micro_batch, "compile": "false"}
        more |= {"gradient_accumulation_steps": point.accumulation} | ({"strategy": "fsdp"} if axis == "ranks" else {})
        flags = inputs.training(inside, "llama", "data", options.kind, turns.DTYPES[dtype], **more)
        row = {"name": axis, "axis": axis, "size": getattr(point, axis), "dtype": dtype}
        row |= {"ranks": point.ranks, "store": inside / "store"}
        contenders.append(turns.Contender(options, row, turns.training, flags))
    rows = turns.in_turns(contenders, options)
    for point, row in zip(points, rows):
        row["additional_bytes_in_theory"] = point.additional_bytes()
        row["operations"] = point.operations() / points[0].operations()
        row["tokens_per_second"] = None if row["error"] else point.tokens / page.median(row)
        row["times_first"] = page.over(row, rows[0])
    return rows


def exponents(name: str, points: list[Point], rows: list[page.Row]) -> list[str]:
    """The line that compares an axis with theory."""
    whole = [(point, row) for point, row in zip(points, rows) if page.median(row) is not None]
    measured = [row["additional_bytes"] for _, row in whole]
    if len(whole) < 2 or any(not count or count <= 0 for count in measured):
        return [name, *[""] * (len(EXPONENTS) - 2), "not measured"]
    seconds = [page.median(row) for _, row in whole]
    operations, memory = ([getattr(point, name)() for point, _ in whole] for name in ("operations", "additional_bytes"))
    sizes = [row["size"] for _, row in whole]
    slopes = [slope(sizes, column) for column in (operations, seconds, memory, measured)]
    apart = {"seconds": (slopes[1] - slopes[0], SECONDS_TOLERANCE), "memory": (slopes[3] - slopes[2], MEMORY_TOLERANCE)}
    found = [f"{what} {difference:+.2f}" for what, (difference, most) in apart.items() if abs(difference) > most]
    return [name, *(f"{value:.2f}" for value in slopes), ", ".join(found) or "as theory says"]


def slope(sizes: list[float], values: list[float]) -> float:
    """Of log(value) over log(size), by least squares: the exponent with which values grow."""
    return statistics.linear_regression([math.log(size) for size in sizes], [math.log(one) for one in values]).slope


if __name__ == "__main__":
    sys.exit(main())
