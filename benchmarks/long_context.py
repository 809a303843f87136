"""A small model that was trained on rows of 256 tokens goes on with rows of 2,048, with and without
--rope, on one and two ranks."""

from __future__ import annotations

import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import inputs, page
from fabric_llm.base import files

SHORT, LONG, VOCABULARY = 256, 2048, 2048
SHAPE = inputs.llama(128, 352, 4, 4, 2, vocab_size=VOCABULARY, max_position_embeddings=SHORT)
STEPS, MORE_STEPS = 1200, 100
ROPE = "theta:80000"  # eight times as long, eight times the base
RUNS: dict[str, dict[str, Any]] = {  # name -> flags of the run that goes on
    "positions as they were": {},
    f"`--rope {ROPE}`": {"rope": ROPE},
    f"`--rope {ROPE} --context_parallel 2`": {"rope": ROPE, "devices": 2, "context_parallel": 2},
    "`--rope yarn:8`": {"rope": "yarn:8"},
}
TEXT = ["--input", sysconfig.get_path("stdlib"), "--exclude", "site-packages", "test", "idlelib"]
TEXT += ["--pattern", "*.py"]
COMMON = {
    "precision": "bf16-true",
    "lr_schedule": "wsd",
    "eval_iters": 8,
    "eval_batch_size": 4,
    "log_step_interval": 20,
    "accelerator": "cpu",
}


def main() -> None:
    parser = page.parser(__doc__)
    parser.add_argument(
        "--folder", type=Path, required=True, help="of data and runs; what is done stays as it is"
    )
    parser.add_argument("--smoke", action="store_true", help="a few steps: whether it runs")
    options = page.parse(parser)
    began, folder = time.monotonic(), options.folder.resolve()
    steps, more = (4, 2) if options.smoke else (STEPS, MORE_STEPS)
    short, long = folder / "short", folder / "long"
    of_short = {"context_length": SHORT, "train_tokenizer": VOCABULARY}
    inputs.once("prepare_data.py", *TEXT, output=short, **of_short)
    of_long = {"context_length": LONG, "tokenizer": short / "tokenizer"}
    of_long |= {"min_document_tokens": LONG, "validation_fraction": 0.05}
    inputs.once("prepare_data.py", *TEXT, output=long, **of_long)
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    inputs.write_llama(folder / "model", **SHAPE, rope_parameters=rope)
    base = {"model_name": folder / "model", "train_data_dir": short}
    base |= {"max_step": steps, "lr": 2e-3, "warmup_steps": steps // 10}
    inputs.train(folder / "base", **COMMON, **base, global_batch_size=16, micro_batch_size=16)
    goes_on = {"model_name": files.latest(folder / "base"), "train_data_dir": long}
    goes_on |= {"max_step": more, "lr": 1e-3, "global_batch_size": 4, "micro_batch_size": 2}
    rows = []
    for number, (name, flags) in enumerate(RUNS.items()):
        run = folder / f"more-{number}"
        inputs.train(run, **COMMON, **goes_on, probes="copy,retrieval", **flags)
        evaluations = inputs.log(run, "eval")
        rows.append({"name": name, "when": "before", **evaluations[0]["eval"]})
        rows.append({"name": name, "when": "after", **evaluations[-1]["eval"]})
    notes = [
        f"A Llama of {SHAPE}, in bf16-true; {steps:,} steps of 16 x {SHORT} tokens, then {more} of "
        f"4 x {LONG:,}",
        f"All of it took {(time.monotonic() - began) / 60:.0f} minutes",
    ]
    page.write(f"From {SHORT} tokens to {LONG:,}", notes, options, body(rows), rows)


def body(rows: list[page.Row]) -> str:
    keys = [key for key in rows[-1]["validation"] if key.startswith("loss_from_")]
    places = [f"from {int(key.rpartition('_')[2]):,}" for key in keys]
    lines = []
    for row in rows:
        losses = [row["validation"][key] for key in ("loss", *keys)]
        losses += [row["copy"]["loss"], row["retrieval"]["loss"]]
        answers = f"{row['retrieval']['accuracy']:.0%}"
        lines.append([row["name"], row["when"], *(f"{loss:.3f}" for loss in losses), answers])
    return page.table(["", "", "all", *places, "copy", "retrieval", "found"], lines, words=2)


if __name__ == "__main__":
    main()
