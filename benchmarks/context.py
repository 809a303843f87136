"""The memory of a step against the tokens of a row, measured and by plan.py, for ranks that share
rows and what saves memory.

On a GPU it is what its allocator counts, on a CPU the storages of all tensors. The slope is that
between the first and the last length that was measured; what plan.py says doesn't fit is left
empty. On a CPU the host is the device: `offload` is for GPUs.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks import inputs, memory, page, turns

MORE = {"vocab_size": 4096, "max_position_embeddings": 2**20}
SHAPES = {
    "cpu": inputs.llama(256, 1024, 8, 8, 4, **MORE),
    "cuda": inputs.llama(2048, 8192, 16, 32, 4, **MORE),
}
CONTEXTS = {"cpu": (4096, 8192, 16384), "cuda": (16384, 32768, 65536)}
FULL = "--activation_checkpointing full"
WAYS = ["", FULL, f"{FULL} --tiled_mlp true", "--activation_checkpointing offload --tiled_mlp true"]
FILLED = 0.9  # of a device's memory: what plan.py says needs more isn't tried
DOCUMENT_TOKENS = 512  # so that attention takes no time


def main() -> None:
    parser = turns.parser(__doc__, rounds=0)
    parser.add_argument("--sharing", nargs="*", type=int, default=[1, 2, 4], help="ranks a row")
    parser.set_defaults(threads=1)
    options = turns.resolve(parser)
    contexts = (256, 512) if options.smoke else CONTEXTS[options.kind]
    shape = SHAPES["cpu" if options.smoke else options.kind]
    note = f"A Llama of {shape}, in bf16-true; documents of {DOCUMENT_TOKENS} tokens on average"
    rows: list[page.Row] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        inputs.write_llama(folder / "model", **shape)
        for context in contexts:
            rows_of = folder / str(context)
            inputs.write_rows(rows_of, MORE["vocab_size"], context, 8, DOCUMENT_TOKENS)
        ways = WAYS[: 3 if options.kind == "cpu" else None]
        for way, ranks in itertools.product(ways, options.sharing):
            rows.append({"flags": way or "none", "ranks": ranks, "errors": []})
            rows[-1] |= {"measured": [], "planned": []}
            for context in contexts:
                measure(folder, way, context, rows[-1], options)
            page.progress(f"{rows[-1]}")
            tables = body(rows, contexts)
            text = page.keep("Memory of longer rows", [note], options, tables, rows)
    print(text)


def measure(
    folder: Path, way: str, context: int, row: page.Row, options: argparse.Namespace
) -> None:
    """Add to a row what a step takes, by plan.py and, where it fits, in truth."""
    ranks = row["ranks"]
    sizes = f"--devices {ranks} --context_parallel {ranks} --micro_batch_size 1 --lr 1e-5"
    usual = folder, "model", str(context), options.kind, "bf16-true"
    flags = inputs.training(*usual, sizes, way)
    row["planned"].append(planned(flags, context))
    report = None
    if row["planned"][-1] < FILLED * options.device.get("memory_bytes", math.inf):
        contender = turns.Contender(options, {"ranks": ranks}, train, flags, options.kind)
        report = contender.ask("time", 1, within_seconds=540)
        contender.close()
        row["errors"] += [contender.row["error"]] if "error" in contender.row else []
    row["measured"].append(report and report["bytes"])


def train(contender: Any, flags: list[str], kind: str) -> None:
    """The most bytes of this rank in a step after the first."""
    from benchmarks import one_step

    run = one_step.set_up(flags)
    held = [*run.model.parameters(), *one_step.state_of(run.optimizer)]
    peaks = []
    for _ in range(3):
        if kind == "cuda":
            torch.cuda.reset_peak_memory_stats()
            one_step.take_step(run)
            peaks.append(torch.cuda.max_memory_allocated())
        else:
            with memory.Counted(held) as counted:
                one_step.take_step(run)
            peaks.append(counted.peak)
            held += one_step.state_of(run.optimizer)
    contender.extra = {"bytes": min(peaks[1:])}
    one_step.train(contender, run)


def planned(flags: list[str], context: int) -> int:
    """By plan.py's prediction, without what is assumed of a GPU."""
    from fabric_llm.forecast.prediction import predict
    from parse_arguments import parse_plan

    parts = predict(*parse_plan([*flags, "--context_length", str(context)])).memory.parts
    return sum(size for name, size in parts.items() if not name.endswith("(assumed)"))


def body(rows: list[page.Row], contexts: tuple[int, ...]) -> list[str]:
    titles = ["flags", "ranks that share", *(f"{context:,} tokens, MiB" for context in contexts)]
    titles += ["slope, bytes a token", "by plan.py", "measured / planned"]
    lines, errors = [], []
    for row in rows:
        sizes = ["" if one is None else f"{one / page.MIB:.1f}" for one in row["measured"]]
        line = [f"`{row['flags']}`", row["ranks"], *sizes]
        places = [place for place, one in enumerate(row["measured"]) if one is not None]
        if len(places) > 1:
            first, last = places[0], places[-1]
            tokens = contexts[last] - contexts[first]
            measured = (row["measured"][last] - row["measured"][first]) / tokens
            planned = (row["planned"][last] - row["planned"][first]) / tokens
            line += [f"{measured:,.0f}", f"{planned:,.0f}", f"{measured / planned:.3f}"]
        lines.append(line)
        errors += [f"{row['flags']}: {error}" for error in row["errors"]]
    return [page.table(titles, lines), *errors]


if __name__ == "__main__":
    main()
