"""What pure bfloat16 loses, and what each --bf16_updates gives back: loss, weights that move,
memory, time.

    python train.py --output_dir work --run_name base
    python prepare_data.py --input PYDOC_DATA SITE_PACKAGES --pattern METADATA topics.py \\
        --tokenizer data/demo/tokenizer --context_length 256 --validation_fraction 0.1 \\
        --deduplicate exact --output work/documentation
    python benchmarks/bf16_updates.py work/base/step-00000400 work/documentation --output_dir work
    python -m fabric_llm.report work/fp32 work/stochastic work/nearest      # draws the runs

The second command prepares the documentation that every Python installation carries: the language
reference of pydoc's topics and the descriptions of the installed packages. Each row is a run of
train.py; one that --output_dir has already isn't run again. docs/results/bf16_updates.md says what
the columns are; bytes are those of a checkpoint.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import inputs, page

ROWS = {  # row -> flags of train.py
    "fp32": {"precision": "32-true"},
    "master": {"bf16_updates": "master"},
    "stochastic": {"bf16_updates": "stochastic"},
    "nearest": {"bf16_updates": "nearest"},
}
LR, SEQUENCES = 2e-5, 8  # of a step
MOVED = ("updated_fraction", "update_ratio")
COLUMNS = {
    "before": page.number("before", ".4f"),
    "after": page.number("after", ".4f"),
    "minus fp32": page.number("minus_fp32", "+.4f"),
    "gain": page.number("gain", ".1%"),
    "changed": page.number("updated_fraction", ".1%"),
    "update/weight": page.number("update_ratio", ".1e"),
    "bytes a parameter: weights": page.number("weight_bytes", ".1f"),
    "state": page.number("optimizer_bytes", ".1f"),
    "step, ms": page.step,
    "x nearest": page.number("times_nearest"),
}


def main() -> None:
    parser = page.parser(__doc__)
    add = parser.add_argument
    add("model_name", help="pretrained model, hub name or directory")
    add("train_data_dir", type=Path, help="dataset of prepare_data.py in that model's tokens")
    add("--steps", type=int, default=200, help="steps of each row")
    add("--output_dir", type=Path, help="folder to keep the runs in")
    options = page.parse(parser)
    steps, model = options.steps, Path(options.model_name)
    common = {
        "model_name": model.resolve() if model.is_dir() else model,
        "train_data_dir": options.train_data_dir.resolve(),
        "keep_last": 1,
        "max_step": steps,
        "lr": LR,
        "min_lr": LR / 10,
        "global_batch_size": SEQUENCES,
        "micro_batch_size": SEQUENCES,
        "eval_iters": 25,
        "eval_step_interval": max(1, steps // 5),
        "log_step_interval": max(1, min(10, steps // 5)),
        "devices": 1,
    }
    rows = {}
    with tempfile.TemporaryDirectory() as temporary:  # not used with --output_dir
        folder = (options.output_dir or Path(temporary)).resolve()
        for name, flags in ROWS.items():
            inputs.train(folder / name, **common, **flags)
            rows[name] = measured(folder / name, steps)
    fp32 = rows["fp32"]
    for row in rows.values():
        row["minus_fp32"] = row["after"] - fp32["after"]
        row["gain"] = (row["before"] - row["after"]) / (fp32["before"] - fp32["after"])
        row["times_nearest"] = page.over(row, rows["nearest"])
    note = (
        f"Recipe: {steps} steps of {SEQUENCES} sequences, lr {LR:g} falling to a tenth along a "
        "cosine, otherwise the defaults of train.py; the same start, data and order in each row"
    )
    lines = list(rows.values())
    page.write("bfloat16 updates", [note], options, page.compare(lines, COLUMNS), lines)


def measured(run: Path, steps: int) -> page.Row:
    """What a run logged and saved. The first stretch of steps, with its warming up, isn't timed."""
    from safetensors.torch import load_file

    evaluated, trained = inputs.log(run, "eval_loss"), inputs.log(run, "loss")
    tokens_a_step = trained[-1]["tokens"] / trained[-1]["step"]
    checkpoint = run / f"step-{steps:08d}"
    weights, state = [], []
    for file in checkpoint.glob("*.safetensors"):
        weights += load_file(file).values()
    for file in checkpoint.glob("trainer/optimizer/*.safetensors"):
        state += load_file(file).values()
    count = sum(one.numel() for one in weights)
    row = {
        "name": run.name,
        "error": None,
        "before": evaluated[0]["eval_loss"],
        "after": evaluated[-1]["eval_loss"],
        "weight_bytes": sum(one.nbytes for one in weights) / count,
        "optimizer_bytes": sum(one.nbytes for one in state) / count,
        "seconds": [tokens_a_step / line["tokens_per_second"] for line in trained[1:]],
    }
    for key in MOVED:
        row[key] = statistics.fmean(line[key] for line in trained if key in line)
    return row


if __name__ == "__main__":
    main()
