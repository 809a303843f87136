"""What pure bfloat16 loses, and what each --bf16_updates gives back: loss, weights that move, memory, time.

    python benchmarks/bf16_updates.py --markdown docs/results/bf16_updates.md --plot docs/results/bf16_updates.png
    python benchmarks/bf16_updates.py --accumulation      error of gradients summed over micro-batches in bfloat16

The first trains each row with train.py itself, one after the other, from the same weights on the same data, and reads
the runs' metrics.jsonl. Row `torch` is `nearest` with torch.optim.AdamW(fused=True) in the place of our AdamW.

Without --model_name it makes its own pretrained model, and continues on another kind of text: configs/demo.yaml in
float32 on the source of the Python standard library, then the documentation that every Python installation carries,
which is the language reference of pydoc's topics and the descriptions of the installed packages.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import math
import multiprocessing
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Optional

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from benchmarks import inputs, page, turns  # noqa: E402

ROWS = {  # row -> flags of train.py
    "fp32": {"precision": "32-true"},
    "master": {"bf16_updates": "master"},
    "stochastic": {"bf16_updates": "stochastic"},
    "nearest": {"bf16_updates": "nearest"},
    "torch": {"bf16_updates": "nearest"},
}
LOOKS = {"#000000": "o", "#56B4E9": "s", "#009E73": "^", "#D55E00": "D", "#CC79A7": "x"}  # of Okabe and Ito
MOVED = ("updated_fraction", "update_ratio")
MICRO_BATCHES = 64  # of --accumulation
DEMO = ROOT / "data" / "demo"
LARGER = {  # with the demo's vocabulary 33 M parameters
    **{"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 9, "num_attention_heads": 8},
    **{"vocab_size": 8192, "tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 0},
}
TITLES = ["", "before", "after", "minus fp32", "gain", "changed", "update/weight"]
TITLES += ["bytes a parameter: weights + state", "step, ms", "x nearest"]
ERRORS = ["", "--accumulation_dtype", "error of the sum", "largest of a tensor", "against float32's gradient", "bytes"]
Result = tuple[str, list[str], list[page.Row], str]  # title, notes, numbers of each row, table


def main(argv: Optional[list[str]] = None) -> int:
    options = parse(argv)
    benchmark = accumulation if options.accumulation else updates
    with tempfile.TemporaryDirectory() as name:  # not used with --output_dir
        folder = Path(name) if options.output_dir is None else options.output_dir
        folder.mkdir(parents=True, exist_ok=True)
        title, notes, rows, table = benchmark(folder.resolve(), options)
    notes = [*([] if options.device else ["GPU: not measured"]), *notes]
    page.write("bf16_updates.py", title, notes, options, table, rows)
    if options.plot and not options.accumulation:
        plot(rows, options.plot)
    return 0


def parse(argv: Optional[list[str]]) -> argparse.Namespace:
    parser = page.parser(__doc__)
    parser.add_argument("--accumulation", action="store_true", help=accumulation.__doc__)
    parser.add_argument("--model_name", help="pretrained model, hub name or directory (default: train one, see above)")
    parser.add_argument("--train_data_dir", help="dataset in that model's tokens, of prepare_data.py")
    parser.add_argument("--steps", type=int, default=200, help="steps of each row")
    parser.add_argument("--lr", type=float, default=2e-5, help="peak learning rate of each row")
    parser.add_argument("--global_batch_size", type=int, default=8, help="sequences a step")
    parser.add_argument("--eval_iters", type=int, default=25, help="batches of 8 sequences an evaluation")
    parser.add_argument("--base_steps", type=int, default=400, help="steps of the model's own pretraining")
    parser.add_argument("--accelerator", default="auto", choices=("auto", "cpu", "cuda"), help="where to run")
    parser.add_argument("--plot", type=Path, help="picture to draw: validation loss by step (needs matplotlib)")
    parser.add_argument("--output_dir", type=Path, help="folder to keep the runs in")
    options = page.parse(parser, argv)
    if (options.model_name is None) != (options.train_data_dir is None):
        parser.error("--model_name and --train_data_dir go together: the data must be in the model's tokens.")
    on_gpu = options.accelerator != "cpu" and torch.cuda.is_available()
    options.device = turns.device_of("cuda" if on_gpu else "cpu")
    os.environ.update(TOKENIZERS_PARALLELISM="false", **({} if options.model_name else {"HF_HUB_OFFLINE": "1"}))
    return options


def updates(folder: Path, options: argparse.Namespace) -> Result:
    """Continued pretraining in float32 and bfloat16: validation loss, weights that change, memory, time."""
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
    return "bfloat16 updates: what is lost and what each setting gives back", notes, rows, updates_table(rows)


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


def plot(rows: list[page.Row], file: Path) -> None:
    """Validation loss by step of each row, and what part of float32's gain is left at the end."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), width_ratios=(3, 2), layout="constrained")
    gains = {row["name"]: gain(row, rows[0]) for row in rows}
    bars = right.barh(list(gains), gains.values(), color=LOOKS.keys())
    for row, (colour, mark) in zip(rows, LOOKS.items()):  # marks, where lines coincide
        look = {"color": colour, "marker": mark, "fillstyle": "none", "label": row["name"]}
        left.plot(row["eval_steps"], row["eval_losses"], **look)
    left.set(xlabel="step", ylabel="validation loss, nats a token")
    left.legend(frameon=False)
    right.bar_label(bars, [f"{part:.0%}" for part in gains.values()], padding=3)
    right.set(xlabel="part of float32's gain", xlim=(0, 1.18 * max(gains.values())))
    right.invert_yaxis()
    figure.savefig(file, dpi=120)


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
    from fabric_llm.training import optim

    made, make = [], torch_adamw if torch_optimizer else optim.AdamW
    optim.AdamW = lambda *given, **named: made.append(make(*given, **named)) or made[-1]
    train.main(argv)
    weights = [parameter for group in made[-1].param_groups for parameter in group["params"]]
    sizes = {"parameters": sum(p.numel() for p in weights), "weight_bytes": storage_bytes(weights)}
    sizes["optimizer_bytes"] = storage_bytes(state_of(made[-1]))
    numbers.write_text(json.dumps({"optimizer": type(made[-1]).__module__, **sizes}))


def torch_adamw(groups: list[dict[str, Any]], *, lr: float, betas: tuple[float, float], **ours: Any) -> Any:
    """PyTorch's AdamW, called like ours."""
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=betas, fused=True)
    optimizer.initialise = lambda: None  # its first step does that, which comes before the first save
    return optimizer


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
    """(pretrained model, dataset to continue on, lines that say what they are)."""
    if options.model_name:
        said = [f"Model: {options.model_name}; data: {options.train_data_dir}"]
        return options.model_name, options.train_data_dir, said
    name, model = base_model("demo", folder, options)
    data, count = documentation(folder)
    tokens = json.loads((data / "manifest.json").read_text())["splits"]["train"]["tokens"]
    loss = read_metrics(folder / "demo" / "metrics.jsonl")["eval_losses"][-1]
    notes = [
        f"Model: no pretrained one was given, so the benchmark made its own: configs/demo.yaml ({name}), {options.base_steps} "
        f"steps in float32 at lr 4e-3 on the source of the Python standard library (validation loss there {loss:.3f})",
        f"Data: another kind of text, {count} documents of documentation (pydoc's topics, descriptions of the installed "
        f"packages), {tokens:,} training tokens with the demo's tokenizer, in rows of 256",
    ]
    return model, data, notes


def base_model(name: str, folder: Path, options: argparse.Namespace) -> tuple[str, Path]:
    """(name with size, checkpoint) of a model that is trained in float32 on the demo's data.

    demo: the repository's. llama: a larger one, after its first steps: past the alike gradients of the very first.
    """
    from fabric_llm.prepare.demo import prepare_demo

    prepare_demo(DEMO, 256)
    inputs.write_llama(folder / "llama-config", **LARGER)
    config, steps, lr = folder / "llama-config", max(1, options.base_steps // 20), 1e-3
    if name == "demo":
        config, steps, lr = ROOT / "configs" / "demo_llama", options.base_steps, 4e-3
    page.progress(f"Pretraining {name}: {steps} steps in float32.")
    run = {"model_name": config, "train_data_dir": DEMO, "precision": "32-true", "max_step": steps, "devices": 1}
    run |= {"global_batch_size": 8, "micro_batch_size": 8, "lr": lr, "min_lr": lr / 10, "warmup_steps": min(20, steps)}
    sizes = run_train(folder, name, **run, eval_iters=20, log_step_interval=20, accelerator=options.accelerator)
    return f"{name}, {sizes['parameters'] / 1e6:.1f} M", folder / name / f"step-{steps:08d}"


def documentation(folder: Path) -> tuple[Path, int]:
    """(dataset of documentation in the demo's tokens, number of its documents), by prepare_data.py."""
    import prepare_data

    texts, lines, target = list(documents()), folder / "documentation.jsonl", folder / "documentation"
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    given = {"input": lines, "output": target, "tokenizer": DEMO / "tokenizer", "context_length": 256}
    with contextlib.redirect_stdout(sys.stderr):
        prepare_data.main(inputs.flags(**given, validation_fraction=0.1, overwrite="true"))
    return target, len(texts)


def documents() -> Iterator[str]:
    """Documentation on this machine, each text once: Python's language reference, descriptions of packages."""
    from pydoc_data.topics import topics

    descriptions = (dist.metadata.get_payload() for dist in importlib.metadata.distributions())
    texts = [*topics.values(), *sorted(d for d in descriptions if isinstance(d, str))]
    beginnings = {text[:500]: text for text in texts if len(text) > 500}  # shorter ones say next to nothing
    yield from beginnings.values()


def make_trainer(options: argparse.Namespace, model_name: Any, data: Any, **more: Any) -> Any:
    from benchmarks import one_step

    one = {"global_batch_size": MICRO_BATCHES, "micro_batch_size": 1, "output_dir": tempfile.gettempdir()}
    flags = inputs.training(Path(), model_name, data, options.accelerator, "bf16-true", lr=options.lr, **one)
    return one_step.set_up(flags + inputs.flags(**more))


def accumulation(folder: Path, options: argparse.Namespace) -> Result:
    """Error of gradients summed over 64 micro-batches in bfloat16, and rounded once from a float32 sum."""
    if options.model_name:
        models, data = [(options.model_name, options.model_name)], options.train_data_dir
    else:
        models = [base_model(name, folder, options) for name in ("demo", "llama")]
        data, _ = documentation(folder)
    rows, lines = [], []
    for name, model in models:
        page.progress(f"{name}: {MICRO_BATCHES} micro-batches in bfloat16, then in float32.")
        rows.append({"name": name, **accumulation_errors(options, model, data)})
        for kind in ("same", "float32"):
            found = rows[-1][kind]
            lines.append([name, kind, *(f"{found[key]:.3%}" for key in ("sum", "worst", "fp32")), found["bytes"]])
    notes = [
        f"Gradient of {MICRO_BATCHES} micro-batches of one sequence of 256 tokens, bfloat16 weights; relative errors are "
        "L2 norm of the difference / L2 norm of the right value",
        "Error of the sum: against the float64 sum of the same bfloat16 gradients of micro-batches; largest of a tensor: "
        "the same for the parameter where it is worst. float32's remaining error is that of rounding the sum once",
        "Against float32's gradient: forward and backward in float32 too, from the same (bfloat16) weights. What both rows "
        "have in common there is the error of computing in bfloat16",
        "Bytes: a parameter held, of gradients and sums, while micro-batches are added up",
    ]
    return "Gradient accumulation in bfloat16", notes, rows, page.table(ERRORS, lines)


def accumulation_errors(options: argparse.Namespace, model_name: Any, data: Any) -> dict[str, Any]:
    """ "same" and "float32" -> relative errors, as in `accumulation`'s table."""
    from benchmarks.one_step import storage_bytes
    from fabric_llm.training.gradients import GradientSums

    trainer = make_trainer(options, model_name, data)
    parameters = list(trainer.model.parameters())
    sums, same, right = GradientSums(parameters), None, None
    for index, gradients in enumerate(micro_gradients(trainer)):
        if same is None:
            same, right = [g.clone() for g in gradients], [g.double() for g in gradients]
        else:
            torch._foreach_add_(same, gradients)  # as autograd adds to .grad
            right = [total.add_(gradient) for total, gradient in zip(right, gradients)]
        sums.add(last=index == MICRO_BATCHES - 1)
    rounded_once = [p.grad for p in parameters]
    sum_bytes = storage_bytes(t for t in sums.sums if t is not None) / sum(p.numel() for p in parameters)
    exact = make_trainer(options, model_name, data, precision="32-true")
    for ours, theirs in zip(exact.model.parameters(), parameters, strict=True):
        ours.data.copy_(theirs.data)
    fp32 = None
    for gradients in micro_gradients(exact):
        fp32 = [g.double() for g in gradients] if fp32 is None else [a.add_(g) for a, g in zip(fp32, gradients)]
        exact.optimizer.zero_grad()
    return {
        kind: {
            "sum": relative_error(found, right),
            "worst": max(relative_error([f], [r]) for f, r in zip(found, right)),
            "fp32": relative_error(found, fp32),
            "bytes": round(size, 1),
        }
        for kind, found, size in (("same", same, 2), ("float32", rounded_once, 2 + sum_bytes))
    }


def micro_gradients(trainer: Any) -> Iterator[list[Tensor]]:
    """The gradients of each micro-batch's part of the loss; they are in .grad of the parameters as well."""
    from benchmarks.one_step import batches_of
    from fabric_llm.data.batches import target_count

    micro_batches = [trainer.fabric.to_device(batch) for batch in batches_of(trainer).at(0)]
    targets = sum(target_count(batch) for batch in micro_batches)
    for batch in micro_batches:
        trainer.fabric.backward(trainer.model(**batch) / targets)
        yield [p.grad for p in trainer.model.parameters()]


def relative_error(found: list[Tensor], right: list[Tensor]) -> float:
    error = sum((f.double() - r).square().sum().item() for f, r in zip(found, right))
    return math.sqrt(error / sum(r.square().sum().item() for r in right))


if __name__ == "__main__":
    sys.exit(main())
