"""What pure bfloat16 loses, and what each --bf16_updates gives back: loss, weights that move, memory, time.

    python benchmarks/bf16_updates.py --markdown docs/results/bf16_updates.md --output_dir work
    python -m fabric_llm.report work/fp32 work/stochastic work/nearest      # draws the runs

Each row is a run of train.py, one after the other, from the same weights on the same data. Row `torch` is `nearest` with
torch.optim.AdamW(fused=True) in the place of our AdamW.

Without --model_name the benchmark makes its own pretrained model, configs/demo.yaml in float32 on the source of the Python
standard library, and continues on another kind of text: the documentation that every Python installation carries, which is
the language reference of pydoc's topics and the descriptions of the installed packages.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import multiprocessing
import os
import statistics
import sys
import sysconfig
import tempfile
from pathlib import Path
from pydoc_data import topics
from typing import Any, Optional

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import inputs, page, turns  # noqa: E402

ROWS = {  # row -> flags of train.py
    "fp32": {"precision": "32-true"},
    "master": {"bf16_updates": "master"},
    "stochastic": {"bf16_updates": "stochastic"},
    "nearest": {"bf16_updates": "nearest"},
    "torch": {"bf16_updates": "nearest"},
}
MOVED = ("updated_fraction", "update_ratio")
DEMO = ROOT / "data" / "demo"
TITLE = "bfloat16 updates: what is lost and what each setting gives back"
TITLES = ["", "before", "after", "minus fp32", "gain", "changed", "update/weight"]
TITLES += ["bytes a parameter: weights + state", "step, ms", "x nearest"]


def main(argv: Optional[list[str]] = None) -> int:
    options = parse(argv)
    with tempfile.TemporaryDirectory() as name:  # not used with --output_dir
        folder = Path(name) if options.output_dir is None else options.output_dir
        folder.mkdir(parents=True, exist_ok=True)
        notes, rows = train_rows(folder.resolve(), options)
    notes = [*([] if options.device else ["GPU: not measured"]), *notes]
    page.write("bf16_updates.py", TITLE, notes, options, updates_table(rows), rows)
    return 0


def parse(argv: Optional[list[str]]) -> argparse.Namespace:
    parser = page.parser(__doc__)
    parser.add_argument("--model_name", help="pretrained model, hub name or directory (default: train one, see above)")
    parser.add_argument("--train_data_dir", help="dataset in that model's tokens, of prepare_data.py")
    parser.add_argument("--steps", type=int, default=200, help="steps of each row")
    parser.add_argument("--lr", type=float, default=2e-5, help="peak learning rate of each row")
    parser.add_argument("--global_batch_size", type=int, default=8, help="sequences a step")
    parser.add_argument("--eval_iters", type=int, default=25, help="batches of 8 sequences an evaluation")
    parser.add_argument("--base_steps", type=int, default=400, help="steps of the model's own pretraining")
    parser.add_argument("--accelerator", default="auto", choices=("auto", "cpu", "cuda"), help="where to run")
    parser.add_argument("--output_dir", type=Path, help="folder to keep the runs in")
    options = page.parse(parser, argv)
    if (options.model_name is None) != (options.train_data_dir is None):
        parser.error("--model_name and --train_data_dir go together: the data must be in the model's tokens.")
    import torch

    on_gpu = options.accelerator != "cpu" and torch.cuda.is_available()
    options.device = turns.device_of("cuda" if on_gpu else "cpu")
    os.environ.update(TOKENIZERS_PARALLELISM="false", **({} if options.model_name else {"HF_HUB_OFFLINE": "1"}))
    return options


def train_rows(folder: Path, options: argparse.Namespace) -> tuple[list[str], list[page.Row]]:
    """(what was trained and what is counted, the numbers of each row)"""
    model_name, data, notes = model_and_data(folder, options)
    rows = []
    for name, row_flags in ROWS.items():
        run = {"model_name": model_name, "train_data_dir": data, "max_step": options.steps, "keep_last": 1}
        run |= {"lr": options.lr, "min_lr": options.lr / 10, "accelerator": options.accelerator, "devices": 1}
        run |= {"global_batch_size": options.global_batch_size, "micro_batch_size": options.global_batch_size}
        run |= {"eval_iters": options.eval_iters, "eval_step_interval": max(1, options.steps // 5)}
        run |= {"log_step_interval": max(1, min(10, options.steps // 5))}
        sizes = run_train(folder, name, torch_optimizer=name == "torch", **run, **row_flags)
        rows.append({"name": name, **sizes, **read_metrics(folder / name / "metrics.jsonl")})
        page.progress(f"{name}: validation loss {rows[-1]['eval_losses']}")
    notes += [
        f"Recipe: {options.steps} steps of {options.global_batch_size} sequences, lr {options.lr:g} falling to a tenth "
        "along a cosine, otherwise the defaults of train.py; the same start, data and order in each row",
        "Gain: how far the validation loss falls, as a part of how far it falls in float32",
        "Changed: weights whose value a step changes, mean of the logged steps; update/weight: L2 norms of both",
        "Bytes a parameter: the tensors of parameters and optimizer state at the end of the run, divided by the number "
        "of parameters; gradients (2, in float32 4) and activations come on top",
        "Step: median over stretches of a few steps. The rows ran one after the other, and other work on the machine "
        "meets them unequally: benchmarks/optimizer.py compares optimizers in turns",
        "Row torch: torch.optim.AdamW(fused=True) in the place of our AdamW; it must agree with nearest in all but time",
    ]
    return notes, rows


def updates_table(rows: list[page.Row]) -> str:
    of = {row["name"]: row for row in rows}
    fp32, nearest = of["fp32"]["eval_losses"], statistics.median(of["nearest"]["step_seconds"])
    lines = []
    for row in rows:
        before, after = row["eval_losses"][0], row["eval_losses"][-1]
        weights, state = (row[key] / row["parameters"] for key in ("weight_bytes", "optimizer_bytes"))
        seconds = statistics.median(row["step_seconds"])
        losses = [f"{before:.4f}", f"{after:.4f}", f"{after - fp32[-1]:+.4f}", f"{gain(row, of['fp32']):.1%}"]
        moved = [f"{row['updated_fraction']:.1%}", f"{row['update_ratio']:.1e}"]
        times = [f"{1000 * seconds:.0f}", f"{seconds / nearest:.2f}"]
        lines.append([row["name"], *losses, *moved, f"{weights:.1f} + {state:.1f} = {weights + state:.1f}", *times])
    return page.table(TITLES, lines)


def gain(row: page.Row, fp32: page.Row) -> float:
    """How far the loss falls, as a part of how far it falls in float32."""
    ours, exact = row["eval_losses"], fp32["eval_losses"]
    return (ours[0] - ours[-1]) / (exact[0] - exact[-1])


def run_train(folder: Path, name: str, torch_optimizer: bool = False, **given: Any) -> dict[str, Any]:
    """`train.py` as run `name` in `folder`, in a process of its own. Returns what it held at the end."""
    context = multiprocessing.get_context("forkserver")  # imports once; unlike fork it goes with CUDA
    context.set_forkserver_preload(turns.PRELOADED)
    argv, numbers = inputs.flags(**given, output_dir=folder, run_name=name), folder / f"{name}.json"
    process = context.Process(target=train_and_measure, args=(argv, torch_optimizer, numbers))
    process.start()
    process.join()
    if process.exitcode or not numbers.is_file():
        sys.exit(f"{numbers.with_suffix('.log').read_text()[-4000:]}\nbf16_updates.py: error: {name} failed.")
    return json.loads(numbers.read_text())


def train_and_measure(argv: list[str], torch_optimizer: bool, numbers: Path) -> None:
    """train.py's main; then its optimizer's module and the sizes of what that held go to `numbers`."""
    output = os.open(numbers.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    import train
    from benchmarks.one_step import state_of, storage_bytes
    from fabric_llm.training import adamw

    made, make = [], torch_adamw if torch_optimizer else adamw.AdamW
    adamw.AdamW = lambda *given, **named: made.append(make(*given, **named)) or made[-1]
    train.main(argv)
    weights = [parameter for group in made[-1].param_groups for parameter in group["params"]]
    sizes = {"parameters": sum(p.numel() for p in weights), "weight_bytes": storage_bytes(weights)}
    sizes["optimizer_bytes"] = storage_bytes(state_of(made[-1]))
    numbers.write_text(json.dumps({"optimizer": type(made[-1]).__module__, **sizes}))


def torch_adamw(groups: list[dict[str, Any]], *, lr: float, betas: tuple[float, float], **ours: Any) -> Any:
    """PyTorch's AdamW, called like ours."""
    import torch

    return torch.optim.AdamW(
        groups, lr=lr, betas=betas, fused=True
    )  # its state is made by its first step, before a save


def read_metrics(file: Path) -> dict[str, Any]:
    """What a run's metrics.jsonl says. The first stretch of steps, with its warming up, isn't timed."""
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    of = {key: [line[key] for line in lines if key in line] for key in ("loss", "eval_loss", *MOVED)}
    trained = [line for line in lines if "loss" in line]
    tokens_a_step = trained[-1]["tokens"] / trained[-1]["step"]
    return {
        "eval_steps": [line["step"] for line in lines if "eval_loss" in line],
        "eval_losses": of["eval_loss"],
        "losses": of["loss"],
        **{key: statistics.fmean(of[key]) if of[key] else math.nan for key in MOVED},
        "step_seconds": [tokens_a_step / line["tokens_per_second"] for line in trained[1:]],
    }


def model_and_data(folder: Path, options: argparse.Namespace) -> tuple[Any, Any, list[str]]:
    """(pretrained model, dataset to continue on, lines that say what they are).

    The model is the demo's, trained in float32; the data is documentation in the demo's tokens, by prepare_data.py.
    """
    if options.model_name:
        said = [f"Model: {options.model_name}; data: {options.train_data_dir}"]
        return options.model_name, options.train_data_dir, said
    from fabric_llm.prepare.demo import prepare_demo

    prepare_demo(DEMO, 256)
    page.progress(f"Pretraining the demo's model: {options.base_steps} steps in float32.")
    run = {"model_name": ROOT / "configs" / "demo_llama", "train_data_dir": DEMO, "precision": "32-true", "lr": 4e-3}
    run |= {"min_lr": 4e-4, "warmup_steps": min(20, options.base_steps), "max_step": options.base_steps, "devices": 1}
    run |= {"global_batch_size": 8, "micro_batch_size": 8, "eval_iters": 20, "log_step_interval": 20}
    sizes = run_train(folder, "demo", **run, accelerator=options.accelerator)
    loss = read_metrics(folder / "demo" / "metrics.jsonl")["eval_losses"][-1]
    documentation = prepare_documentation(folder)
    train = json.loads((documentation / "manifest.json").read_text())["splits"]["train"]
    notes = [
        "Model: no pretrained one was given, so the benchmark made its own: configs/demo.yaml "
        f"({sizes['parameters'] / 1e6:.1f} M), {options.base_steps} steps in float32 at lr 4e-3 on the source of the Python "
        f"standard library (validation loss there {loss:.3f})",
        f"Data: another kind of text, {train['documents']} documents of documentation (pydoc's topics, descriptions of the "
        f"installed packages), {train['tokens']:,} training tokens with the demo's tokenizer, in rows of 256",
    ]
    return folder / "demo" / f"step-{options.base_steps:08d}", documentation, notes


def prepare_documentation(folder: Path) -> Path:
    import prepare_data

    words = ["--input", topics.__file__, sysconfig.get_path("purelib"), "--pattern", "METADATA", "topics.py"]
    given = {"output": folder / "documentation", "tokenizer": DEMO / "tokenizer", "context_length": 256}
    given |= {"validation_fraction": 0.1, "deduplicate": "exact", "overwrite": "true"}
    with contextlib.redirect_stdout(sys.stderr):
        prepare_data.main([str(word) for word in words] + inputs.flags(**given))
    return folder / "documentation"


if __name__ == "__main__":
    sys.exit(main())
