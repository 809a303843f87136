"""A small model that was trained on rows of 256 tokens goes on with rows of 2,048: with and without
--rope, on one and two ranks.

The text is the source of Python's standard library. Each run evaluates before its first step and at
its end.
"""

from __future__ import annotations

import sys
import sysconfig
import time
from pathlib import Path
from typing import Any, Optional

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import inputs, page
from fabric_llm.base import files

SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
SHORT, LONG, VOCABULARY = 256, 2048, 2048
STEPS, MORE_STEPS = 1200, 100
ROPE = "theta:80000"  # eight times as long, eight times the base
RUNS: dict[str, dict[str, Any]] = {  # name -> flags of the run that goes on
    "positions as they were": {},
    f"`--rope {ROPE}`": {"rope": ROPE},
    f"`--rope {ROPE} --context_parallel 2`": {"rope": ROPE, "devices": 2, "context_parallel": 2},
    "`--rope yarn:8`": {"rope": "yarn:8"},
}
TEXT = ["--input", sysconfig.get_path("stdlib"), "--exclude", "site-packages", "test", "idlelib"]


def main(argv: Optional[list[str]] = None) -> None:
    parser = page.parser(__doc__, rounds=1)
    parser.add_argument(
        "--folder",
        type=Path,
        required=True,
        help="for data and runs; what is done isn't done again",
    )
    parser.add_argument("--smoke", action="store_true", help="a few steps: whether it runs")
    options = page.parse(parser, argv)
    began, folder = time.monotonic(), options.folder.resolve()
    steps, more = (4, 2) if options.smoke else (STEPS, MORE_STEPS)
    of_data = {"short": {"context_length": SHORT, "train_tokenizer": VOCABULARY}}
    of_data["long"] = {
        "context_length": LONG,
        "tokenizer": folder / "short" / "tokenizer",
        "min_document_tokens": LONG,
    }
    for name, flags in of_data.items():
        if not (folder / name).is_dir():
            fraction = {"validation_fraction": 0.05} if name == "long" else {}
            inputs.call(
                "prepare_data.py", *TEXT, pattern="*.py", output=folder / name, **flags, **fraction
            )
    shape = {
        **SHAPE,
        "num_key_value_heads": 2,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": SHORT,
    }
    inputs.write_llama(
        folder / "model", **shape, rope_parameters={"rope_type": "default", "rope_theta": 10000.0}
    )
    common = {"precision": "bf16-true", "lr_schedule": "wsd", "eval_iters": 8, "eval_batch_size": 4}
    common |= {"log_step_interval": 20, "accelerator": "cpu"}
    base = {
        "model_name": folder / "model",
        "train_data_dir": folder / "short",
        "max_step": steps,
        "lr": 2e-3,
    }
    base |= {"global_batch_size": 16, "micro_batch_size": 16, "warmup_steps": steps // 10}
    inputs.train(folder / "base", **common, **base)
    goes_on = {
        "model_name": files.latest(folder / "base"),
        "train_data_dir": folder / "long",
        "max_step": more,
    }
    goes_on |= {
        "lr": 1e-3,
        "global_batch_size": 4,
        "micro_batch_size": 2,
        "probes": "copy,retrieval",
    }
    rows = []
    for number, (name, flags) in enumerate(RUNS.items()):
        inputs.train(folder / f"more-{number}", **common, **goes_on, **flags)
        found = inputs.evaluations(folder / f"more-{number}")
        rows += [
            {"name": name, "when": when, **one}
            for when, one in (("before", found[0]), ("after", found[-1]))
        ]
    notes = [
        (
            f"A Llama of {shape}, in bf16-true; {steps:,} steps of 16 x {SHORT} tokens, then "
            f"{more} of 4 x {LONG:,}"
        )
    ]
    notes.append(f"All of it took {(time.monotonic() - began) / 60:.0f} minutes")
    page.write(
        "long_context.py", f"From {SHORT} tokens to {LONG:,}", notes, options, body(rows), rows
    )


def body(rows: list[page.Row]) -> str:
    firsts = [key for key in rows[-1]["validation"] if key.startswith("loss_from_")]
    titles = [
        "",
        "",
        "all",
        *(f"from {int(key.rpartition('_')[2]):,}" for key in firsts),
        "copy",
        "retrieval",
        "found",
    ]
    lines = []
    for row in rows:
        losses = [row["validation"]["loss"], *(row["validation"][key] for key in firsts)]
        losses += [row["copy"]["loss"], row["retrieval"]["loss"]]
        found = f"{row['retrieval']['accuracy']:.0%}"
        lines.append([row["name"], row["when"], *(f"{loss:.3f}" for loss in losses), found])
    return page.table(titles, lines, words=2)


if __name__ == "__main__":
    main()
