#!/usr/bin/env python
"""A small model that was trained on rows of 256 tokens goes on with rows of 2,048: with and without --rope, on one and two ranks.

The text is the source of Python's standard library. Each run evaluates before its first step and at its end.
"""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any, Optional

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import inputs, page

ROOT = Path(__file__).resolve().parent.parent
SHAPE = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "num_attention_heads": 4}
SHORT, LONG, VOCABULARY = 256, 2048, 2048
STEPS, MORE_STEPS = 1200, 100
ROPE = "theta:80000"  # eight times as long, eight times the base
RUNS = {  # name -> flags of the run that goes on
    "positions as they were": [],
    f"`--rope {ROPE}`": ["--rope", ROPE],
    f"`--rope {ROPE} --context_parallel 2`": ["--rope", ROPE, "--devices", "2", "--context_parallel", "2"],
    "`--rope yarn:8`": ["--rope", "yarn:8"],
}


def main(argv: Optional[list[str]] = None) -> int:
    parser = page.parser(__doc__, rounds=1)
    parser.add_argument("--folder", type=Path, required=True, help="for data and runs; a run that is done isn't done again")
    parser.add_argument("--smoke", action="store_true", help="a few steps: whether it runs")
    options = page.parse(parser, argv)
    began, folder = time.monotonic(), options.folder
    steps, more = (4, 2) if options.smoke else (STEPS, MORE_STEPS)
    prepare(folder)
    shape = {**SHAPE, "num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": SHORT}
    inputs.write_llama(folder / "model", **shape, rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    common = ["--precision", "bf16-true", "--output_dir", folder, "--lr_schedule", "wsd", "--eval_batch_size", "4"]
    common += ["--log_step_interval", 20]
    words = [
        "--model_name",
        folder / "model",
        "--train_data_dir",
        folder / "short",
        "--max_step",
        steps,
        "--lr",
        "2e-3",
    ]
    words += ["--global_batch_size", 16, "--micro_batch_size", 16, "--warmup_steps", steps // 10, "--eval_iters", 8]
    train("base", [*common, *words], folder)
    rows = []
    for number, (name, flags) in enumerate(RUNS.items()):
        words = ["--model_name", newest(folder / "base"), "--train_data_dir", folder / "long", "--max_step", more]
        words += ["--lr", "1e-3", "--global_batch_size", 4, "--probes", "copy,retrieval", "--eval_iters", 8]
        train(f"more-{number}", [*common, *words, "--micro_batch_size", 2, *flags], folder)
        rows += read(name, folder / f"more-{number}")
    notes = [f"A Llama of {shape}, in bf16-true; {steps:,} steps of 16 x {SHORT} tokens, then {more} of 4 x {LONG:,}"]
    notes.append(f"All of it took {(time.monotonic() - began) / 60:.0f} minutes")
    page.write("long_context.py", f"From {SHORT} tokens to {LONG:,}", notes, options, body(rows), rows)
    return 0


def prepare(folder: Path) -> None:
    text = [
        "--input",
        sysconfig.get_path("stdlib"),
        "--pattern",
        "*.py",
        "--exclude",
        "site-packages",
        "test",
        "idlelib",
    ]
    long = ["--tokenizer", folder / "short" / "tokenizer", "--min_document_tokens", LONG, "--validation_fraction", 0.05]
    for name, context, more in (("short", SHORT, ["--train_tokenizer", VOCABULARY]), ("long", LONG, long)):
        if not (folder / name).is_dir():
            command("prepare_data.py", [*text, "--context_length", context, "--output", folder / name, *more])


def train(name: str, words: list[Any], folder: Path) -> None:
    """To its end, unless it has come there."""
    if not (folder / name / "STATUS.json").is_file() or json.loads((folder / name / "STATUS.json").read_text())["code"] != 0:
        command("train.py", [*words, "--run_name", name, "--accelerator", "cpu"])


def command(script: str, words: list[Any]) -> None:
    page.progress(f"{script} {' '.join(map(str, words))}")
    subprocess.run([sys.executable, ROOT / script, *map(str, words)], check=True, stdout=sys.stderr)


def newest(run: Path) -> Path:
    return sorted(run.glob("step-*"))[-1]


def read(name: str, run: Path) -> list[page.Row]:
    """What was measured before the first step, and after the last."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = [line["eval"] for line in lines if "eval" in line]
    return [{"name": name, "when": when, **one} for when, one in zip(("before", "after"), (found[0], found[-1]))]


def body(rows: list[page.Row]) -> str:
    firsts = [key for key in rows[-1]["validation"] if key.startswith("loss_from_")]
    titles = ["", "", "all", *(f"from {int(key.rpartition('_')[2]):,}" for key in firsts), "copy", "retrieval", "found"]
    lines = []
    for row in rows:
        losses = [row["validation"]["loss"], *(row["validation"][key] for key in firsts)]
        losses += [row["copy"]["loss"], row["retrieval"]["loss"]]
        lines.append([row["name"], row["when"], *(f"{loss:.3f}" for loss in losses), f"{row['retrieval']['accuracy']:.0%}"])
    return page.table(titles, lines, words=2)


if __name__ == "__main__":
    sys.exit(main())
