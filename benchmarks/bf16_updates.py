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

import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from safetensors.torch import load_file

from benchmarks import inputs, page

ROWS = {  # row -> flags of train.py
    "fp32": "--precision 32-true",
    "master": "--bf16_updates master",
    "stochastic": "--bf16_updates stochastic",
    "nearest": "--bf16_updates nearest",
}
STEPS = 200
FLAGS = f"--max_step {STEPS} --lr 2e-5 --min_lr 2e-6 --global_batch_size 8 --micro_batch_size 8 "
FLAGS += "--eval_iters 25 --eval_step_interval 40 --log_step_interval 10 --devices 1 --keep_last 1"
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
    add("model_name", type=Path, help="directory of the pretrained model")
    add("train_data_dir", type=Path, help="dataset of prepare_data.py in that model's tokens")
    add("--output_dir", type=Path, default=Path("checkpoints/bf16_updates"), help="of the runs")
    options = page.parse(parser)
    rows = {}
    for name, flags in ROWS.items():
        folders = {key: getattr(options, key).resolve() for key in ("model_name", "train_data_dir")}
        run = options.output_dir.resolve() / name
        inputs.train(run, FLAGS, flags, **folders)
        rows[name] = measured(run)
    fp32 = rows["fp32"]
    for row in rows.values():
        row["minus_fp32"] = row["after"] - fp32["after"]
        row["gain"] = (row["before"] - row["after"]) / (fp32["before"] - fp32["after"])
        row["times_nearest"] = page.median(row) / page.median(rows["nearest"])
    note = f"The same start, data and order in each row, trained with {FLAGS}"
    lines = list(rows.values())
    page.write("bfloat16 updates", [note], options, [page.compare(lines, COLUMNS)], lines)


def measured(run: Path) -> page.Row:
    """What a run logged and saved. The first stretch of steps, with its warming up, isn't timed."""
    evaluated, trained = inputs.log(run, "eval_loss"), inputs.log(run, "loss")
    tokens_a_step = trained[-1]["tokens"] / STEPS
    row = {
        "name": run.name,
        "before": evaluated[0]["eval_loss"],
        "after": evaluated[-1]["eval_loss"],
        "seconds": [tokens_a_step / line["tokens_per_second"] for line in trained[1:]],
    }
    for key in ("updated_fraction", "update_ratio"):
        row[key] = statistics.fmean(line[key] for line in trained if key in line)
    for key, files in (("weight", "*"), ("optimizer", "trainer/optimizer/*")):
        saved = (run / f"step-{STEPS:08d}").glob(f"{files}.safetensors")
        tensors = [tensor for file in saved for tensor in load_file(file).values()]
        if key == "weight":
            count = sum(tensor.numel() for tensor in tensors)
        row[f"{key}_bytes"] = sum(tensor.nbytes for tensor in tensors) / count
    return row


if __name__ == "__main__":
    main()
