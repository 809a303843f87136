#!/usr/bin/env python
"""One GPU in eight minutes: first whether it computes the right thing, then how fast, and with how much memory.

    pip install . && python benchmarks/gpu.py --output gpu_results

It needs this repository, its dependencies and one GPU; no network, no files. First the laws that one GPU can show,
for each strategy at toy size in bf16-true, with train.py itself: the start is verified against plain transformers,
gradients included; a killed run goes on bit for bit (`python -m fabric_llm.verify --drill`); the export holds the
weights and logits of training. The strategies run side by side.

Then Llamas of 1, 3 and 8 billion parameters in bf16-true, with weights drawn on the GPU, over compilation, loss,
attention, activation checkpointing and micro-batch. A step is train.py's (one_step.py) on rows of packed random
documents that don't see each other. Each case is a process of its own and has a limit of time; whatever goes wrong
in it is what its row says. What is left when the minutes are over isn't run. gpu.json and gpu.md under --output are
written after each case.

MFU is counted as in a run's log, see fabric_llm/model/flops.py.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Optional

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import inputs, turns  # noqa: E402

VOCABULARY = 128256
SHAPES = {  # of Llama 3.2 1B, 3.2 3B and 3 8B
    "1B": {
        **{"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32},
        **{"num_key_value_heads": 8, "tie_word_embeddings": True, "vocab_size": VOCABULARY},
    },
    "3B": {
        **{"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24},
        **{"num_key_value_heads": 8, "tie_word_embeddings": True, "vocab_size": VOCABULARY},
    },
    "8B": {
        **{"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
        **{"num_key_value_heads": 8, "tie_word_embeddings": False, "vocab_size": VOCABULARY},
    },
    "toy": {
        **{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
        **{"num_key_value_heads": 2, "tie_word_embeddings": True, "vocab_size": 256},
    },
}
CONTEXT, DOCUMENT_TOKENS, ROWS = 4096, 1000, 64
TOY_CONTEXT, TOY_DOCUMENT_TOKENS = 64, 16
BYTES_PER_PARAMETER = {"bfloat16": 8, "float32": 16}  # weights, gradients and two moments
TIMED_SECONDS, CASE_SECONDS, LAW_SECONDS, LEAST_SECONDS = 4.0, 75.0, 180.0, 15.0


class Case(NamedTuple):
    """A row: a shape of SHAPES, sequences in a micro-batch, and flags of train.py."""

    shape: str
    micro_batch: int
    compile: bool = True
    loss: str = "chunked"
    attention: str = "packed"
    checkpointing: str = "none"

    def flags(self) -> list[str]:
        words = ["--micro_batch_size", self.micro_batch, "--compile", str(self.compile).lower(), "--loss", self.loss]
        return [
            str(w) for w in [*words, "--attention", self.attention, "--activation_checkpointing", self.checkpointing]
        ]


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
STRATEGIES = {"single": "auto", "fsdp": "fsdp", "fsdp2": "fsdp2"}  # row -> --strategy
LAWS = ["", "start verified", "killed and resumed", "exported"]
TITLES = ["", "dtype", "micro-batch", "compile", "loss", "attention", "checkpointing"]
TITLES += ["tokens/s", "MFU", "peak, GiB", "step, ms", ""]


def main(argv: Optional[list[str]] = None) -> int:
    began = time.monotonic()
    parser = turns.parser(__doc__.splitlines()[0], rounds=3, output="folder for gpu.json and gpu.md")
    parser.set_defaults(dtypes="bfloat16", warm_up=3, output=Path("gpu_results"))
    parser.add_argument("--minutes", type=float, default=7.5, help="after which nothing new is started")
    parser.add_argument("--strategies", nargs="*", default=list(STRATEGIES), choices=STRATEGIES, help="of the laws")
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), choices=SHAPES, help="of the cases")
    options = turns.resolve(parser, argv)
    if options.kind == "cpu" and not options.smoke:
        parser.error("this machine shows no GPU to PyTorch; --smoke runs toy sizes on the CPU.")
    # 8B fills a GPU: less must be lost between blocks
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    options.output.mkdir(parents=True, exist_ok=True)
    deadline = began + 60 * options.minutes
    with tempfile.TemporaryDirectory() as name:
        write_inputs(Path(name), options)
        laws = try_laws(Path(name), options)
        rows: list[turns.Row] = []
        write(options, laws, rows, began)
        for case, dtype in itertools.product(TOY_CASES if options.smoke else CASES, options.dtypes):
            if case.shape in options.shapes:
                rows.append(try_case(case, dtype, Path(name), options, deadline))
                turns.progress(" ".join(line_of(rows[-1])))
                write(options, laws, rows, began)
    print((options.output / "gpu.md").read_text())
    return int(any(law["error"] for law in laws))


def write_inputs(folder: Path, options: argparse.Namespace) -> None:
    """The toy of the laws, with weights, and the shapes of the cases, without."""
    toy = SHAPES["toy"]
    inputs.write_llama(folder / "laws", with_weights=True, **toy)
    inputs.write_rows(folder / "laws-data", toy["vocab_size"], TOY_CONTEXT, 64, TOY_DOCUMENT_TOKENS)
    for name in {"toy"} if options.smoke else set(SHAPES) - {"toy"}:
        inputs.write_llama(folder / name, **SHAPES[name])
    vocabulary = toy["vocab_size"] if options.smoke else VOCABULARY
    sizes = (TOY_CONTEXT, ROWS, TOY_DOCUMENT_TOKENS) if options.smoke else (CONTEXT, ROWS, DOCUMENT_TOKENS)
    inputs.write_rows(folder / "data", vocabulary, *sizes)


# ------------------------------------------------------------------- the laws


def try_laws(folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each strategy, side by side: they are small."""
    with ThreadPoolExecutor(max(1, len(options.strategies))) as pool:
        return list(pool.map(lambda name: try_strategy(name, folder, options), options.strategies))


def try_strategy(name: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """What the laws say of a strategy; "error" is the first that is broken."""
    row: dict[str, Any] = {"strategy": name, "start": "", "resume": "", "export": "", "error": None}
    drills = folder / f"drill-{name}"
    flags = ["--model_name", folder / "laws", "--train_data_dir", folder / "laws-data", "--accelerator", options.kind]
    flags += ["--devices", 1, "--strategy", STRATEGIES[name], "--precision", "bf16-true", "--lr", "1e-3"]
    flags += ["--micro_batch_size", 2, "--gradient_accumulation_steps", 2, "--eval_iters", 2]
    certificate = folder / f"certificate-{name}.json"
    drill = ["-m", "fabric_llm.verify", "--drill", "--steps", 6, "--seed", 1, "--output", certificate]
    try:
        run(*drill, "--output_dir", drills, "--keep", "--", *flags)
        [whole] = drills.glob("*/undisturbed")
        started = [
            line for line in whole.with_suffix(".log").read_text().splitlines() if line.startswith("Start verified")
        ]
        row["start"] = started[0] if started and "gradients" in started[0] else ""
        drilled = json.loads(certificate.read_text())
        row["resume"] = f"{drilled['verdict']} after a kill at step {drilled['killed_at_step']}"
        said = run("export_hf.py", whole, "--output", folder / f"hf-{name}")
        row["export"] = next((line for line in said.splitlines() if line.startswith("Verified")), "")
        if not (row["start"] and drilled["verdict"] == "identical" and row["export"]):
            row["error"] = "a law wasn't shown"
    except (OSError, ValueError, RuntimeError, subprocess.SubprocessError) as error:
        row["error"] = turns.sentence_of(error)
    turns.progress(f"{name}: {row['error'] or 'all laws hold'}")
    return row


def run(*words: Any) -> str:
    """The output of a command of this repository. Raises RuntimeError with its last line if it fails."""
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=LAW_SECONDS, stdin=subprocess.DEVNULL
    )
    if done.returncode:
        raise RuntimeError((done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1])
    return done.stdout


# ------------------------------------------------------------------- the cases


def try_case(case: Case, dtype: str, folder: Path, options: argparse.Namespace, deadline: float) -> turns.Row:
    row: turns.Row = {**case._asdict(), "dtype": dtype, "error": None, "seconds": []}
    needed, there = parameters(SHAPES[case.shape]) * BYTES_PER_PARAMETER[dtype], options.device.get("bytes")
    if there is not None and needed > there:
        gib = f"{needed / 2**30:.0f} GiB, and this GPU has {there / 2**30:.0f}"
        return {**row, "error": f"doesn't fit: weights, gradients and moments alone take {gib}"}
    if deadline - time.monotonic() < LEAST_SECONDS:
        return {**row, "error": "not run: the minutes are over"}
    limit = min(CASE_SECONDS, deadline - time.monotonic())
    ends = time.monotonic() + limit
    flags = [*inputs.flags(folder, case.shape, "data", options.kind, turns.DTYPES[dtype]), *case.flags()]
    contender = turns.Contender(options, row, training, flags)
    begun = contender.ask("time", max(1, options.warm_up), limit)
    probe = begun and contender.ask("time", 1, ends - time.monotonic())
    for _ in range(options.rounds if probe else 0):
        count = max(options.steps, min(10, int(TIMED_SECONDS / options.rounds / probe["seconds"])))
        report = contender.ask("time", count, ends - time.monotonic())
        contender.row["seconds"] += [report["seconds"]] if report else []
    report = contender.ask("memory", 1, ends - time.monotonic()) or {}
    if not contender.row["error"]:
        contender.close()
        contender.row.update(
            {key: report[key] for key in ("peak_bytes", "tokens", "operations_per_token", "loss", "attention")}
        )
    return contender.row


def training(turns: Any, flags: list[str]) -> None:
    from benchmarks import one_step
    from fabric_llm.data.batches import Batches, token_places
    from fabric_llm.model import flops

    trainer, loss = one_step.set_up(flags, drawn_on_device=True), None
    plan = trainer.plan
    batches = Batches(plan.dataset.train, 1, plan.micro_batch_size, 1, document_end=plan.document_end)
    tokens_at = token_places(batches.at(0))
    turns.said = {
        "tokens": plan.micro_batch_size * plan.dataset.context_length,
        "operations_per_token": flops.of_model(trainer.model.causal_lm).of(tokens_at) / int(tokens_at.sum()),
        "loss": plan.loss,
        "attention": plan.config._attn_implementation,
    }
    for step in itertools.count():
        if not turns.go_on(loss):
            return
        loss = one_step.take_step(trainer, step, batches.at(step * batches.global_batch_size))


def parameters(shape: dict[str, Any]) -> int:
    """Of a Llama of this shape, before anything imports torch."""
    hidden, layers, heads = shape["hidden_size"], shape["num_hidden_layers"], shape["num_attention_heads"]
    attention = 2 * hidden**2 + 2 * hidden * shape["num_key_value_heads"] * hidden // heads
    embeddings = (1 if shape["tie_word_embeddings"] else 2) * shape["vocab_size"] * hidden
    return layers * (attention + 3 * hidden * shape["intermediate_size"]) + embeddings + (2 * layers + 1) * hidden


# ------------------------------------------------------------------- what is written


def write(options: argparse.Namespace, laws: list[dict[str, Any]], rows: list[turns.Row], began: float) -> None:
    """Both files, with what there is so far."""
    from fabric_llm.model.flops import peak_tflops

    peak = peak_tflops(options.device.get("name", ""))
    context, documents = (TOY_CONTEXT, TOY_DOCUMENT_TOKENS) if options.smoke else (CONTEXT, DOCUMENT_TOKENS)
    for row in rows:
        if not row["error"]:
            row["tokens_per_second"] = row["tokens"] / statistics.median(row["seconds"])
            row["tflops"] = row["tokens_per_second"] * row["operations_per_token"] / 1e12
            row["mfu"] = None if peak is None or row["dtype"] != "bfloat16" else row["tflops"] / peak
    notes = [
        f"Seconds so far: {time.monotonic() - began:.0f}",
        f"Peak of this device: {'unknown, so there is no MFU' if peak is None else f'{peak} TFLOP/s, bfloat16, dense'}",
        f"Cases: Llama, bfloat16 with stochastic rounding, packed documents of {documents} tokens on average, "
        f"context {context}; peak: the allocator's high-water mark in a step, with weights and moments",
    ]
    lines = [
        [law["strategy"], *([law["error"], "", ""] if law["error"] else [law["start"], law["resume"], law["export"]])]
        for law in laws
    ]
    body = f"{turns.table(LAWS, lines)}\n\n{turns.table(TITLES, [line_of(row) for row in rows])}"
    page = turns.page("gpu.py", "One GPU", notes, options, body)
    (options.output / "gpu.md").write_text(page + "\n")
    document = {"about": turns.about("gpu.py", options), "laws": laws, "cases": rows}
    (options.output / "gpu.json").write_text(json.dumps(document, indent=1) + "\n")


def line_of(row: turns.Row) -> list[str]:
    asked = [row["shape"], row["dtype"], str(row["micro_batch"]), "yes" if row["compile"] else "no"]
    asked += [row["loss"], row["attention"], row["checkpointing"]]
    if row["error"] or "tokens_per_second" not in row:
        return [*asked, "", "", "", "", row["error"] or ""]
    seconds, peak = statistics.median(row["seconds"]), row["peak_bytes"]
    measured = [f"{row['tokens_per_second']:,.0f}", turns.number(row["mfu"], ".1%")]
    return [*asked, *measured, turns.number(peak and peak / 2**30, ".1f"), turns.milliseconds(seconds), ""]


if __name__ == "__main__":
    sys.exit(main())
