"""One GPU in eight minutes: how fast it trains, and with how much memory.

    pip install . && python benchmarks/gpu.py --output gpu_results

It needs this repository, its dependencies and one GPU; no network, no files. `pytest -m gpu` shows first that the GPU computes
the right thing.

Llamas of 1, 3 and 8 billion parameters in bf16-true, with weights drawn on the GPU, over compilation, loss, attention,
activation checkpointing and micro-batch. A step is train.py's (one_step.py) on rows of packed random documents that don't see
each other. Each case is a process of its own and has a limit of time; whatever goes wrong in it is what its row says. What is
left when the minutes are over isn't run. gpu.json and gpu.md under --output are written after each case.

MFU is counted as in a run's log, see fabric_llm/model/flops.py.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple, Optional

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import inputs, page, turns  # noqa: E402

VOCABULARY = 128256
FIELDS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
FIELDS += ("tie_word_embeddings", "vocab_size")
SHAPES = {  # of Llama 3.2 1B, 3.2 3B and 3 8B
    "1B": dict(zip(FIELDS, (2048, 8192, 16, 32, 8, True, VOCABULARY))),
    "3B": dict(zip(FIELDS, (3072, 8192, 28, 24, 8, True, VOCABULARY))),
    "8B": dict(zip(FIELDS, (4096, 14336, 32, 32, 8, False, VOCABULARY))),
    "toy": dict(zip(FIELDS, (64, 128, 2, 4, 2, True, 256))),
}
DATA, TOY_DATA = (VOCABULARY, 4096, 64, 1000), (256, 64, 64, 16)  # vocabulary, context, rows, tokens of a document
BYTES_PER_PARAMETER = {"bfloat16": 8, "float32": 16}  # weights, gradients and two moments
TIMED_SECONDS, CASE_SECONDS, LEAST_SECONDS = 4.0, 75.0, 15.0


class Case(NamedTuple):
    """A row: a shape of SHAPES, sequences in a micro-batch, and flags of train.py."""

    shape: str
    micro_batch: int
    compile: bool = True
    loss: str = "chunked"
    attention: str = "packed"
    checkpointing: str = "none"

    def flags(self) -> dict[str, Any]:
        flags = {"micro_batch_size": self.micro_batch, "compile": str(self.compile).lower(), "loss": self.loss}
        return {**flags, "attention": self.attention, "activation_checkpointing": self.checkpointing}


CASES = [  # what matters most first: the last ones may not be reached
    Case("1B", 4),
    Case("1B", 4, compile=False),
    Case("8B", 1, checkpointing="full"),
    Case("8B", 4, checkpointing="full"),
    Case("3B", 2),
    Case("1B", 4, loss="full"),
    Case("1B", 4, attention="sdpa"),
    Case("1B", 4, compile=False, loss="full", attention="sdpa"),
    Case("8B", 2, checkpointing="selective"),
    Case("8B", 1, compile=False, loss="full", attention="sdpa", checkpointing="full"),
    Case("1B", 8),
    Case("1B", 8, checkpointing="full"),
    Case("1B", 8, checkpointing="selective"),
    Case("1B", 8, checkpointing="every:2"),
    Case("3B", 4, checkpointing="full"),
    Case("3B", 4, checkpointing="selective"),
    Case("3B", 2, compile=False),
    Case("1B", 1),
    Case("1B", 16, checkpointing="full"),
    Case("8B", 2, checkpointing="every:2"),
]
TOY_CASES = [
    Case("toy", 2, compile=False),
    Case("toy", 2, compile=False, loss="full", attention="sdpa"),
    Case("toy", 1, compile=False, checkpointing="selective"),
    Case("toy", 1, compile=False, attention="flash_attention_2"),  # not on a CPU: its error is its row
]
TITLES = ["", "dtype", "micro-batch", "compile", "loss", "attention", "checkpointing"]
TITLES += ["tokens/s", "MFU", "peak, GiB", "step, ms", ""]


def main(argv: Optional[list[str]] = None) -> int:
    began = time.monotonic()
    parser = turns.parser(__doc__, rounds=3)
    parser.set_defaults(dtypes="bfloat16", warm_up=3)
    parser.add_argument("--minutes", type=float, default=7.5, help="after which nothing new is started")
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), choices=SHAPES, help="of the cases")
    options = turns.resolve(parser, argv)
    if options.kind == "cpu" and not options.smoke:
        parser.error("this machine shows no GPU to PyTorch; --smoke runs toy sizes on the CPU.")
    # 8B fills a GPU: less must be lost between blocks
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    folder = options.output or Path("gpu_results")
    folder.mkdir(parents=True, exist_ok=True)
    options.output, options.markdown = folder / "gpu.json", folder / "gpu.md"
    deadline = began + 60 * options.minutes
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for shape in {"toy"} if options.smoke else set(SHAPES) - {"toy"}:
            inputs.write_llama(folder / shape, **SHAPES[shape])
        inputs.write_rows(folder / "data", *(TOY_DATA if options.smoke else DATA))
        rows: list[page.Row] = []
        for case, dtype in itertools.product(TOY_CASES if options.smoke else CASES, options.dtypes):
            if case.shape in options.shapes:
                rows.append(try_case(case, dtype, folder, options, deadline))
                page.progress(" ".join(line_of(rows[-1])))
                write(options, rows, began)
    print(options.markdown.read_text())
    return 0


def try_case(case: Case, dtype: str, folder: Path, options: argparse.Namespace, deadline: float) -> page.Row:
    row: page.Row = {**case._asdict(), "dtype": dtype, "error": None, "seconds": []}
    needed, there = parameters(SHAPES[case.shape]) * BYTES_PER_PARAMETER[dtype], options.device.get("bytes")
    if there is not None and needed > there:
        gib = f"{needed / 2**30:.0f} GiB, and this GPU has {there / 2**30:.0f}"
        return {**row, "error": f"doesn't fit: weights, gradients and moments alone take {gib}"}
    if deadline - time.monotonic() < LEAST_SECONDS:
        return {**row, "error": "not run: the minutes are over"}
    ends = min(deadline, time.monotonic() + CASE_SECONDS)
    flags = inputs.training(folder, case.shape, "data", options.kind, turns.DTYPES[dtype], **case.flags())
    contender = turns.Contender(options, row, training, flags)
    row = contender.row
    contender.ask("time", max(1, options.warm_up), ends - time.monotonic())
    probe = contender.ask("time", 1, ends - time.monotonic())
    for _ in range(options.rounds if probe else 0):
        count = max(options.steps, min(10, int(TIMED_SECONDS / options.rounds / probe["seconds"])))
        report = contender.ask("time", count, ends - time.monotonic())
        row["seconds"] += [report["seconds"]] if report else []
    report = contender.ask("memory", 1, ends - time.monotonic())
    if report:
        contender.close()
        row |= {key: report[key] for key in ("peak_bytes", "tokens", "operations_per_token", "loss", "attention")}
    return row


def training(turns: Any, flags: list[str]) -> None:
    from benchmarks import one_step
    from fabric_llm.data.batches import token_places
    from fabric_llm.model import flops

    run = one_step.set_up(flags, drawn_on_device=True)
    plan, tokens_at = run.plan, token_places(run.batches.batches.at(0))
    turns.said = {
        "tokens": plan.schedule.micro_batch_size * plan.data.dataset.context_length,
        "operations_per_token": flops.of_model(run.model.causal_lm).of(tokens_at) / int(tokens_at.sum()),
        "loss": plan.model.loss,
        "attention": plan.model.config._attn_implementation,
    }
    one_step.train(turns, run)


def parameters(shape: dict[str, Any]) -> int:
    """Of a Llama of this shape, before anything imports torch."""
    hidden, layers, heads = shape["hidden_size"], shape["num_hidden_layers"], shape["num_attention_heads"]
    attention = 2 * hidden**2 + 2 * hidden * shape["num_key_value_heads"] * hidden // heads
    embeddings = (1 if shape["tie_word_embeddings"] else 2) * shape["vocab_size"] * hidden
    return layers * (attention + 3 * hidden * shape["intermediate_size"]) + embeddings + (2 * layers + 1) * hidden


def write(options: argparse.Namespace, rows: list[page.Row], began: float) -> None:
    """Both files, with what there is so far."""
    from fabric_llm.model.flops import peak_tflops

    peak = peak_tflops(options.device.get("name", ""))
    _, context, _, documents = TOY_DATA if options.smoke else DATA
    for row in rows:
        if (seconds := page.median(row)) is not None:
            row["tokens_per_second"] = row["tokens"] / seconds
            row["tflops"] = row["tokens_per_second"] * row["operations_per_token"] / 1e12
            row["mfu"] = None if peak is None or row["dtype"] != "bfloat16" else row["tflops"] / peak
    notes = [
        f"Seconds so far: {time.monotonic() - began:.0f}",
        f"Peak of this device: {'unknown, so there is no MFU' if peak is None else f'{peak} TFLOP/s, bfloat16, dense'}",
        f"Cases: Llama, bfloat16 with stochastic rounding, packed documents of {documents} tokens on average, "
        f"context {context}; peak: the allocator's high-water mark in a step, with weights and moments",
    ]
    body = page.table(TITLES, [line_of(row) for row in rows])
    options.markdown.write_text(page.page("gpu.py", "One GPU", notes, options, body) + "\n")
    document = {"about": page.about("gpu.py", options), "cases": rows}
    options.output.write_text(json.dumps(document, indent=1) + "\n")


def line_of(row: page.Row) -> list[str]:
    asked = [row["shape"], row["dtype"], str(row["micro_batch"]), "yes" if row["compile"] else "no"]
    asked += [row["loss"], row["attention"], row["checkpointing"]]
    if (seconds := page.median(row)) is None:
        return [*asked, "", "", "", "", row["error"] or ""]
    measured = [f"{row['tokens'] / seconds:,.0f}", page.number("mfu", ".1%")(row)]
    return [*asked, *measured, page.number("peak_bytes", ".1f", 2**30)(row), page.milliseconds(seconds), ""]


if __name__ == "__main__":
    sys.exit(main())
