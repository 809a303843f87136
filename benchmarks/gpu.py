"""One GPU in eight minutes: how fast it trains, and with how much memory.

    pip install . && python benchmarks/gpu.py --markdown gpu.md --output gpu.json

A step is train.py's (one_step.py) on rows of packed random documents that don't see each other.
Each case is a process of its own and has a limit of time; whatever goes wrong in it is what its row
says. What is left when the minutes are over isn't run. The files are written after each case, and a
case that --output has from a call before isn't run again.
"""

import argparse
import json
import os
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import inputs, page, turns
from benchmarks.inputs import llama

VOCABULARY = 128256
SHAPES = {  # of Llama 3.2 1B, 3.2 3B and 3 8B
    "1B": llama(2048, 8192, 16, 32, 8, tie_word_embeddings=True, vocab_size=VOCABULARY),
    "3B": llama(3072, 8192, 28, 24, 8, tie_word_embeddings=True, vocab_size=VOCABULARY),
    "8B": llama(4096, 14336, 32, 32, 8, vocab_size=VOCABULARY),
    "toy": llama(64, 128, 2, 4, 2, tie_word_embeddings=True, vocab_size=256),
}
# vocabulary, context, rows, tokens of a document
DATA, TOY_DATA = (VOCABULARY, 4096, 64, 1000), (256, 64, 64, 16)
CASE_SECONDS, MIN_SECONDS = 75.0, 15.0
# flags of all cases that don't say otherwise
USUAL = "--compile true --loss chunked --attention packed"
SIZE, FLOAT8 = "--micro_batch_size", "--float8 rowwise"
FULL, SELECTIVE, OFFLOAD = (
    f"--activation_checkpointing {mode}" for mode in ("full", "selective", "offload")
)
# a shape and flags of train.py; what matters most first: the last ones may not be reached
CASES = [
    f"1B {SIZE} 4",
    f"8B {SIZE} 4",  # needs more than 80 GB
    f"8B {SIZE} 4 {FULL}",
    f"1B {SIZE} 4 {FLOAT8}",
    f"8B {SIZE} 4 {FULL} {FLOAT8}",
    f"8B {SIZE} 4 {OFFLOAD}",
    f"1B {SIZE} 8 {SELECTIVE}",
    f"1B {SIZE} 4 --compile false",
    f"3B {SIZE} 2",
    f"8B {SIZE} 1 {FULL}",
    f"1B {SIZE} 4 --loss full",
    f"1B {SIZE} 4 --attention sdpa",
    f"8B {SIZE} 2 {SELECTIVE}",
    f"1B {SIZE} 8",
    f"1B {SIZE} 8 {FULL}",
]
TOY_CASES = [
    f"toy {SIZE} 2 --compile false",
    f"toy {SIZE} 1 --compile false {SELECTIVE}",
    # not on a CPU: its error is its row
    f"toy {SIZE} 1 --compile false --attention flash_attention_2",
]
COLUMNS = {
    "tokens/s": page.number("tokens_per_second", ",.0f"),
    "MFU": page.number("mfu", ".1%"),
    "peak, GiB": page.number("peak_bytes", ".1f", page.GIB),
    "step, ms": page.step,
}


def main() -> int:
    began = time.monotonic()
    parser = turns.parser(__doc__, rounds=3)
    parser.set_defaults(dtype="bfloat16", steps=2)
    parser.add_argument("--minutes", type=float, default=7.5, help="nothing starts after these")
    parser.add_argument("--trace", type=Path, help="folder for a profile of two steps of each case")
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), choices=SHAPES)
    options = turns.resolve(parser)
    if options.kind == "cpu" and not options.smoke:
        parser.error("this machine shows no GPU to PyTorch; --smoke runs toy sizes on the CPU.")
    # 8B fills a GPU: less must be lost between blocks
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    deadline = began + 60 * options.minutes
    rows: list[page.Row] = []
    if options.output is not None and options.output.exists():
        before = json.loads(options.output.read_text())["rows"]
        rows += [row for row in before if row["seconds"] and "error" not in row]
    measured = {row["name"] for row in rows}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        inputs.write_rows(folder / "data", *(TOY_DATA if options.smoke else DATA))
        for case in TOY_CASES if options.smoke else CASES:
            if case.split()[0] in options.shapes and case not in measured:
                rows.append(try_case(case, folder, options, deadline))
                text = written(options, rows)
                page.progress(text.splitlines()[-1])
    print(written(options, rows))
    return int(all("error" in row for row in rows))


def try_case(case: str, folder: Path, options: argparse.Namespace, deadline: float) -> page.Row:
    row: page.Row = {"name": case, "seconds": []}
    if time.monotonic() > deadline - MIN_SECONDS:
        return {**row, "error": "not run: the minutes are over"}
    shape, more = case.split(maxsplit=1)
    inputs.write_llama(folder / shape, **SHAPES[shape])
    usual = folder, shape, "data", options.kind, turns.DTYPES[options.dtype], USUAL
    contender = turns.Contender(options, row, training, inputs.training(*usual, more))
    contender.ends = min(deadline, time.monotonic() + CASE_SECONDS)
    trace = options.trace
    if trace is not None:
        trace.mkdir(parents=True, exist_ok=True)
        trace = trace.resolve() / f"{re.sub('[^A-Za-z0-9]+', '-', case)}.json"
    [row] = turns.in_turns([contender], options, trace)
    return row


def training(turns: Any, flags: list[str]) -> None:
    from benchmarks import one_step
    from fabric_llm.data.batches import token_places
    from fabric_llm.model import flops

    with one_step.drawn_on(turns.kind):
        run = one_step.set_up(flags)
    tokens_at = token_places(run.batches.batches.at(0))
    operations = flops.of_model(run.model.causal_lm).of(tokens_at)
    turns.extra = {"tokens": int(tokens_at.sum()), "operations": operations}
    one_step.train(turns, run)


def written(options: argparse.Namespace, rows: list[page.Row]) -> str:
    """The page with what there is so far."""
    from fabric_llm.model.flops import peak_tflops

    peak = peak_tflops(options.device)
    _, context, _, documents = TOY_DATA if options.smoke else DATA
    for row in rows:
        if (seconds := page.median(row)) is not None:
            row["tokens_per_second"] = row["tokens"] / seconds
            if peak is not None and options.dtype == "bfloat16":
                row["mfu"] = row["operations"] / seconds / 1e12 / peak
    notes = [
        f"Peak of this device, TFLOP/s in bfloat16: {peak or 'unknown, so there is no MFU'}",
        f"Cases: Llama, {options.dtype}, packed documents of {documents} tokens "
        f"on average, context {context}; {USUAL} where a case doesn't say otherwise; peak: the "
        "allocator's high-water mark in a step, with weights and moments",
    ]
    return page.keep("One GPU", notes, options, [page.compare(rows, COLUMNS)], rows)


if __name__ == "__main__":
    sys.exit(main())
