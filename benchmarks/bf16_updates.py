#!/usr/bin/env python
"""What pure bfloat16 loses, and what each --bf16_updates gives back: loss, weights that move, memory, time.

    python benchmarks/bf16_updates.py --markdown docs/results/bf16_updates.md --plot docs/results/bf16_updates.png
    python benchmarks/bf16_updates.py --accumulation      error of gradients summed over micro-batches in bfloat16
    python benchmarks/bf16_updates.py --masking           a training step with packed documents kept apart against not

The first trains each row with train.py itself, one after the other, from the same weights on the same data, and reads
the runs' metrics.jsonl. Row `torch` is `nearest` with torch.optim.AdamW(fused=True) in the place of our AdamW.
The others take single steps with one_step.py.

Without --model_name it makes its own pretrained model, and continues on another kind of text: configs/demo.yaml in
float32 on the source of the Python standard library, then the documentation that every Python installation carries,
which is the language reference of pydoc's topics and the descriptions of the installed packages.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import math
import multiprocessing
import os
import platform
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, NamedTuple, Optional

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from benchmarks.one_step import Trainer
    from fabric_llm.data.batches import MicroBatch

ROWS = {  # row -> flags of train.py
    "fp32": "--precision 32-true",
    "master": "--bf16_updates master",
    "stochastic": "--bf16_updates stochastic",
    "nearest": "--bf16_updates nearest",
    "torch": "--bf16_updates nearest",
}
MICRO_BATCHES = 64  # of --accumulation
MIB = 2**20
LARGER = {  # about 30 M parameters with the demo's vocabulary
    "hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 9, "num_attention_heads": 8,
    "vocab_size": 2048, "max_position_embeddings": 2048, "tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
MASKING_BATCH_TOKENS, MASKING_CONTEXTS, MASKING_CHARACTERS = 2048, (256, 1024), 1000


def main(argv: Optional[list[str]] = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    options = parse(argv)
    os.environ.update(TOKENIZERS_PARALLELISM="false")
    if not options.model_name:
        os.environ["HF_HUB_OFFLINE"] = "1"
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as name:  # not used with --output_dir
        folder = Path(name) if options.output_dir is None else options.output_dir
        folder.mkdir(parents=True, exist_ok=True)
        title, notes, rows, table = options.benchmark(folder.resolve(), options)
    page = header(argv, options, title, notes, load) + table
    print(page)
    if options.markdown:
        options.markdown.write_text(page + "\n")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    if options.plot:
        plot(rows, options.plot)
    return 0


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    what = parser.add_mutually_exclusive_group()
    for name, function in (("accumulation", accumulation), ("masking", masking)):
        what.add_argument(f"--{name}", dest="benchmark", action="store_const", const=function, default=updates,
                          help=function.__doc__.splitlines()[0])  # fmt: skip
    parser.add_argument("--model_name", help="pretrained model, hub name or directory (default: train one, see above)")
    parser.add_argument("--train_data_dir", help="dataset in that model's tokens, of prepare_data.py")
    parser.add_argument("--steps", type=int, default=200, help="steps of each row (default: 200)")
    parser.add_argument("--lr", type=float, default=2e-5, help="peak learning rate of each row (default: 2e-5)")
    parser.add_argument("--global_batch_size", type=int, default=8, help="sequences a step (default: 8)")
    parser.add_argument("--micro_batch_size", type=int, help="sequences in a forward pass (default: all of a step)")
    parser.add_argument("--eval_iters", type=int, default=25, help="batches of 8 sequences an evaluation (default: 25)")
    parser.add_argument("--seed", type=int, default=1234, help="of data order and rounding (default: 1234)")
    parser.add_argument(
        "--base_steps", type=int, default=400, help="steps of the model's own pretraining (default: 400)"
    )
    parser.add_argument("--rounds", type=int, default=9, help="timed steps of each row, one a turn (default: 9)")
    parser.add_argument("--accelerator", default="auto", choices=("auto", "cpu", "cuda"), help="(default: auto)")
    parser.add_argument("--markdown", type=Path, help="file to write the table to")
    parser.add_argument("--json", type=Path, help="file to write the numbers to")
    parser.add_argument("--plot", type=Path, help="picture to draw: validation loss by step (needs matplotlib)")
    parser.add_argument(
        "--output_dir", type=Path, help="folder to keep the runs in, and to take its own pretrained model from"
    )
    options = parser.parse_args(argv)
    if (options.model_name is None) != (options.train_data_dir is None):
        parser.error("--model_name and --train_data_dir go together: the data must be in the model's tokens.")
    if min(options.steps, options.base_steps, options.rounds, options.eval_iters, options.global_batch_size) < 1:
        parser.error("numbers of steps, rounds, batches and sequences must be at least 1.")
    if options.plot and options.benchmark is not updates:
        parser.error("--plot draws the main benchmark only.")
    return options


def progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


Result = tuple[str, list[str], list[dict[str, Any]], str]  # title, notes, numbers of each row, Markdown table


# ------------------------------------------------------------------- loss: real runs of train.py


def updates(folder: Path, options: argparse.Namespace) -> Result:
    """Continued pretraining in float32 and bfloat16: validation loss, weights that change, memory, time."""
    model_name, data, notes = model_and_data(folder, options)
    rows = []
    for name, row_flags in ROWS.items():
        argv = [*row_flags.split(), "--model_name", model_name, "--train_data_dir", data]
        argv += ["--max_step", options.steps, "--lr", options.lr, "--min_lr", options.lr / 10, "--seed", options.seed]
        argv += ["--global_batch_size", options.global_batch_size, "--accelerator", options.accelerator, "--devices", 1]
        argv += ["--micro_batch_size", options.micro_batch_size or options.global_batch_size]
        argv += ["--eval_iters", options.eval_iters, "--eval_step_interval", max(1, options.steps // 5)]
        argv += ["--log_step_interval", max(1, min(10, options.steps // 5)), "--keep_last", 1]
        sizes = run_train(folder, name, argv, torch_optimizer=name == "torch")
        rows.append({"name": name, **sizes, **read_metrics(folder / name / "metrics.jsonl")})
        progress(f"{name}: validation loss {rows[-1]['eval_losses'][0]:.4f} -> {rows[-1]['eval_losses'][-1]:.4f}")
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


def model_and_data(folder: Path, options: argparse.Namespace) -> tuple[str, str, list[str]]:
    """(pretrained model, dataset to continue on, lines that say what they are)."""
    if options.model_name:
        return (
            options.model_name,
            options.train_data_dir,
            [f"Model: {options.model_name}; data: {options.train_data_dir}"],
        )
    base = demo_model(folder, options)
    data, count = documentation(folder, 256)
    manifest = json.loads((data / "manifest.json").read_text())
    tokens = manifest["splits"]["train"]["tokens"]
    notes = [
        f"Model: no pretrained one was given, so the benchmark made its own: configs/demo.yaml, {base.parameters / 1e6:.1f} M "
        f"parameters, {options.base_steps} steps in float32 at lr 4e-3 on the source of the Python standard library "
        f"(validation loss there {base.eval_loss:.3f})",
        f"Data: another kind of text, {count} documents of documentation (pydoc's topics, descriptions of the installed "
        f"packages), {tokens:,} training tokens with the demo's tokenizer, in rows of 256",
    ]
    return str(base.checkpoint), str(data), notes


class Base(NamedTuple):
    """A model that this benchmark has trained."""

    checkpoint: Path
    parameters: int
    eval_loss: float


def demo_model(folder: Path, options: argparse.Namespace) -> Base:
    """The repository's demo, trained in float32."""
    from fabric_llm.data.demo import prepare_demo

    prepare_demo(ROOT / "data" / "demo", 256)
    return base_model(folder, "base", ROOT / "configs" / "demo_llama", options.base_steps, 4e-3, options)


def larger_model(folder: Path, options: argparse.Namespace) -> Base:
    """A Llama of 30 M parameters after its first steps on the demo's data: past the alike gradients of the very first."""
    write_config(folder / "llama-30M", LARGER)
    return base_model(folder, "base-30M", folder / "llama-30M", max(1, options.base_steps // 20), 1e-3, options)


def base_model(folder: Path, name: str, config: Path, steps: int, lr: float, options: argparse.Namespace) -> Base:
    argv = ["--model_name", config, "--train_data_dir", ROOT / "data" / "demo", "--precision", "32-true"]
    argv += ["--global_batch_size", 8, "--micro_batch_size", 8, "--max_step", steps, "--lr", lr, "--min_lr", lr / 10]
    argv += ["--warmup_steps", min(20, steps), "--eval_iters", 20, "--log_step_interval", 20, "--devices", 1]
    checkpoint, sizes = folder / name / f"step-{steps:08d}", folder / f"{name}.json"
    if checkpoint.is_dir() and sizes.is_file():
        progress(f"Taking {checkpoint}, which is there already.")
    else:
        progress(f"Pretraining {config.name}: {steps} steps in float32.")
        run_train(folder, name, [*argv, "--accelerator", options.accelerator], torch_optimizer=False)
    eval_loss = read_metrics(folder / name / "metrics.jsonl")["eval_losses"][-1]
    return Base(checkpoint, json.loads(sizes.read_text())["parameters"], eval_loss)


def documentation(folder: Path, context_length: int, longest: int = 2**31) -> tuple[Path, int]:
    """(dataset of documentation in the demo's tokens, number of its documents), by prepare_data.py.

    Documents of more than `longest` characters are cut in pieces, each a document.
    """
    import contextlib

    import prepare_data

    target = folder / f"documentation-{context_length}"
    texts = [text[begin : begin + longest] for text in documents() for begin in range(0, len(text), longest)]
    lines = folder / "documentation.jsonl"
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    argv = ["--input", str(lines), "--output", str(target), "--tokenizer", str(ROOT / "data" / "demo" / "tokenizer")]
    argv += ["--context_length", str(context_length), "--validation_fraction", "0.1", "--overwrite", "true"]
    with contextlib.redirect_stdout(sys.stderr):
        prepare_data.main(argv)
    return target, len(texts)


def documents() -> Iterator[str]:
    """Documentation on this machine, each text once: Python's language reference, descriptions of packages."""
    from pydoc_data.topics import topics

    descriptions = (dist.metadata.get_payload() for dist in importlib.metadata.distributions())
    seen: set[str] = set()
    for text in [*topics.values(), *sorted(d for d in descriptions if isinstance(d, str))]:
        if len(text) > 500 and text[:500] not in seen:  # shorter ones say next to nothing
            seen.add(text[:500])
            yield text


def run_train(folder: Path, name: str, argv: list[Any], torch_optimizer: bool) -> dict[str, Any]:
    """`train.py ARGV --output_dir folder --run_name name` in a process of its own. Returns what it held at the end."""
    context = multiprocessing.get_context("forkserver")  # imports once; unlike fork it goes with CUDA
    context.set_forkserver_preload(["fabric_llm.base.fabric", "transformers.models.llama.modeling_llama", "datasets"])
    argv = [str(word) for word in [*argv, "--output_dir", folder, "--run_name", name]]
    process = context.Process(target=train_and_measure, args=(argv, torch_optimizer, folder / f"{name}.json"))
    process.start()
    process.join()
    sizes = folder / f"{name}.json"
    if process.exitcode or not sizes.is_file():
        log = sizes.with_suffix(".log")
        sys.exit(f"{log.read_text()[-4000:] if log.is_file() else ''}\nbf16_updates.py: error: {name} failed.")
    return json.loads(sizes.read_text())


def train_and_measure(argv: list[str], torch_optimizer: bool, numbers: Path) -> None:
    """train.py's main; at the end of the run its optimizer's module and the sizes of its tensors go to `numbers`."""
    output = os.open(numbers.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    import train
    from fabric_llm.run import ending
    from fabric_llm.training import optim

    close = ending.close

    def measure_and_close(*given: Any) -> None:
        model, optimizer = given[-1]
        weights = list(model.parameters())
        sizes = {
            "optimizer": type(unwrapped(optimizer)).__module__,
            "parameters": sum(p.numel() for p in weights),
            "weight_bytes": storage_bytes(weights),
            "optimizer_bytes": storage_bytes(state_tensors(optimizer)),
        }
        close(*given)
        numbers.write_text(json.dumps(sizes))

    ending.close = measure_and_close
    if torch_optimizer:
        optim.AdamW = torch_adamw
    train.main(argv)


def torch_adamw(groups: list[dict[str, Any]], *, lr: float, betas: tuple[float, float], **ours: Any) -> Optimizer:
    """PyTorch's AdamW, called like ours."""
    import torch

    optimizer = torch.optim.AdamW(groups, lr=lr, betas=betas, fused=True)
    optimizer.initialise = lambda: None  # its first step does that, which comes before the first save
    return optimizer


def unwrapped(optimizer: Optimizer) -> Optimizer:
    """Without Fabric's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)


def state_tensors(optimizer: Optimizer) -> list[Tensor]:
    states = unwrapped(optimizer).state.values()
    return [value for state in states for value in state.values() if hasattr(value, "untyped_storage")]


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """What is allocated for `tensors`; storage that several of them share counts once."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def read_metrics(file: Path) -> dict[str, Any]:
    """What a run's metrics.jsonl says. The first stretch of steps, with its warming up, isn't timed."""
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    trained = [line for line in lines if "loss" in line]
    pairs = list(zip(trained, trained[1:]))
    tokens_a_step = (trained[-1]["tokens"] / trained[-1]["step"]) if trained else math.nan
    return {
        "eval_steps": [line["step"] for line in lines if "eval_loss" in line],
        "eval_losses": [line["eval_loss"] for line in lines if "eval_loss" in line],
        "losses": [line["loss"] for line in trained],
        "updated_fraction": mean([line["updated_fraction"] for line in trained if "updated_fraction" in line]),
        "update_ratio": mean([line["update_ratio"] for line in trained if "update_ratio" in line]),
        "step_seconds": [tokens_a_step / after["tokens_per_second"] for _, after in pairs],
    }


def mean(numbers: list[float]) -> float:
    return statistics.fmean(numbers) if numbers else math.nan


def updates_table(rows: list[dict[str, Any]]) -> str:
    titles = "before", "after", "minus fp32", "gain", "changed", "update/weight"
    titles = ("", *titles, "bytes a parameter: weights + state", "step, ms", "x nearest")
    fp32 = next(row for row in rows if row["name"] == "fp32")["eval_losses"]
    nearest = statistics.median(next(row for row in rows if row["name"] == "nearest")["step_seconds"])
    lines = []
    for row in rows:
        before, after = row["eval_losses"][0], row["eval_losses"][-1]
        weights, state = (row[key] / row["parameters"] for key in ("weight_bytes", "optimizer_bytes"))
        seconds = statistics.median(row["step_seconds"])
        lines.append((
            row["name"], f"{before:.4f}", f"{after:.4f}", f"{after - fp32[-1]:+.4f}",
            f"{(before - after) / (fp32[0] - fp32[-1]):.1%}", f"{row['updated_fraction']:.1%}", f"{row['update_ratio']:.1e}",
            f"{weights:.1f} + {state:.1f} = {weights + state:.1f}", f"{1000 * seconds:.0f}", f"{seconds / nearest:.2f}",
        ))  # fmt: skip
    return markdown(titles, lines)


def markdown(titles: tuple[str, ...], lines: list[tuple[str, ...]]) -> str:
    head = ["| " + " | ".join(titles) + " |", "|---" + "|--:" * (len(titles) - 1) + "|"]
    return "\n".join([*head, *("| " + " | ".join(line) + " |" for line in lines)])


def plot(rows: list[dict[str, Any]], file: Path) -> None:
    """Validation loss by step of each row, and what part of float32's gain is left at the end."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    looks = {  # colours that stay apart for the colour-blind (Okabe and Ito), and marks where lines coincide
        "fp32": ("#000000", "o", "-"), "master": ("#56B4E9", "s", "--"), "stochastic": ("#009E73", "^", "-"),
        "nearest": ("#D55E00", "D", "-"), "torch": ("#CC79A7", "x", ":"),
    }  # fmt: skip
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), width_ratios=(3, 2), layout="constrained")
    for row in rows:
        colour, mark, line = looks[row["name"]]
        left.plot(
            row["eval_steps"], row["eval_losses"], line, color=colour, marker=mark, fillstyle="none", label=row["name"]
        )
    left.set(xlabel="step", ylabel="validation loss, nats a token")
    left.legend(frameon=False)
    fp32 = rows[0]["eval_losses"]
    gains = [(row["eval_losses"][0] - row["eval_losses"][-1]) / (fp32[0] - fp32[-1]) for row in rows]
    bars = right.barh([row["name"] for row in rows], gains, color=[looks[row["name"]][0] for row in rows])
    right.bar_label(bars, [f"{gain:.0%}" for gain in gains], padding=3)
    right.set(xlabel="part of float32's gain", xlim=(0, 1.18 * max(gains)))
    right.invert_yaxis()
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=120)


# ------------------------------------------------------------------- single steps: the others


def make_trainer(options: argparse.Namespace, model_name: Any, data: Any, *more_flags: Any) -> Trainer:
    from benchmarks import one_step

    argv = ["--model_name", model_name, "--train_data_dir", data, "--lr", options.lr, "--max_step", 1000]
    argv += ["--devices", 1, "--accelerator", options.accelerator, "--verify_start", "false", "--seed", options.seed]
    return one_step.set_up([*argv, "--output_dir", tempfile.gettempdir(), *more_flags])


def write_config(folder: Path, shape: dict[str, Any]) -> None:
    from transformers import LlamaConfig

    LlamaConfig(**shape).save_pretrained(folder)


def batches_of(trainer: Trainer, micro_batches: int, keep_apart: bool = True) -> Any:
    from fabric_llm.data.batches import Batches

    plan = trainer.plan
    end = plan.document_end if keep_apart else None
    return Batches(plan.dataset.train, 1234, plan.micro_batch_size, micro_batches, document_end=end)


def in_turns(steps: dict[str, Callable[[int], Any]], rounds: int) -> dict[str, list[Any]]:
    """name -> what `steps[name](turn)` gave in each of `rounds` turns. A turn before them isn't counted."""
    results: dict[str, list[Any]] = {name: [] for name in steps}
    for turn in range(1 + rounds):
        for name, step in steps.items():
            results[name].append(step(turn))
        progress(f"turn {turn}/{rounds}")
    return {name: values[1:] for name, values in results.items()}


def timed_step(trainer: Trainer, turn: int, micro_batches: list[MicroBatch]) -> float:
    """Seconds of one step."""
    from benchmarks.one_step import take_step

    synchronize(trainer.fabric.device)
    began = time.perf_counter()
    take_step(trainer, turn, micro_batches)
    synchronize(trainer.fabric.device)
    return time.perf_counter() - began


def synchronize(device: Any) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def accumulation(folder: Path, options: argparse.Namespace) -> Result:
    """Error of gradients summed over 64 micro-batches in bfloat16, and rounded once from a float32 sum."""
    if options.model_name:
        models = {options.model_name: (options.model_name, options.train_data_dir)}
    else:
        demo, larger = demo_model(folder, options), larger_model(folder, options)
        data, _ = documentation(folder, 256)
        models = {
            f"demo, {demo.parameters / 1e6:.1f} M": (demo.checkpoint, data),
            f"Llama, {larger.parameters / 1e6:.1f} M": (larger.checkpoint, data),
        }
    rows = []
    for name, (model_name, data) in models.items():
        progress(f"{name}: {MICRO_BATCHES} micro-batches in bfloat16, then in float32.")
        rows.append({"name": name, **accumulation_errors(options, model_name, data)})
    titles = (
        "",
        "--accumulation_dtype",
        "error of the sum",
        "largest of a tensor",
        "against float32's gradient",
        "bytes",
    )
    lines = [
        (row["name"], kind, f"{row[kind]['sum']:.3%}", f"{row[kind]['worst']:.3%}", f"{row[kind]['fp32']:.3%}",
         f"{row[kind]['bytes']}")
        for row in rows for kind in ("same", "float32")
    ]  # fmt: skip
    notes = [
        f"Gradient of {MICRO_BATCHES} micro-batches of one sequence of 256 tokens, bfloat16 weights; relative errors are "
        "L2 norm of the difference / L2 norm of the right value",
        "Error of the sum: against the float64 sum of the same bfloat16 gradients of micro-batches; largest of a tensor: "
        "the same for the parameter where it is worst. float32's remaining error is that of rounding the sum once",
        "Against float32's gradient: forward and backward in float32 too, from the same (bfloat16) weights. What both rows "
        "have in common there is the error of computing in bfloat16",
        "Bytes: a parameter held, of gradients and sums, while micro-batches are added up",
    ]
    return "Gradient accumulation in bfloat16", notes, rows, markdown(titles, lines)


def accumulation_errors(options: argparse.Namespace, model_name: Any, data: Any) -> dict[str, Any]:
    """ "same" and "float32" -> relative errors, as in `accumulation`'s table."""
    import torch

    from fabric_llm.training.gradients import GradientSums

    one = ("--global_batch_size", 1, "--micro_batch_size", 1)
    trainer = make_trainer(options, model_name, data, *one, "--precision", "bf16-true")
    parameters = list(trainer.model.parameters())
    sums, same, right = GradientSums(parameters), None, None
    for index, gradients in enumerate(micro_gradients(trainer)):
        if same is None:
            same = [g.clone() for g in gradients]
            right = [g.double() for g in gradients]
        else:
            torch._foreach_add_(same, gradients)  # as autograd adds to .grad
            for total, gradient in zip(right, gradients):
                total.add_(gradient)
        sums.add(last=index == MICRO_BATCHES - 1)
    rounded_once = [p.grad for p in parameters]
    sum_bytes = storage_bytes(t for t in sums.sums if t is not None) / sum(p.numel() for p in parameters)
    exact = make_trainer(options, model_name, data, *one, "--precision", "32-true")
    for ours, theirs in zip(exact.model.parameters(), parameters, strict=True):
        ours.data.copy_(theirs.data)
    fp32 = None
    for gradients in micro_gradients(exact):
        fp32 = [g.double() for g in gradients] if fp32 is None else [a.add_(g) for a, g in zip(fp32, gradients)]
        for parameter in exact.model.parameters():
            parameter.grad = None
    return {
        kind: {
            "sum": relative_error(found, right),
            "worst": max(relative_error([f], [r]) for f, r in zip(found, right)),
            "fp32": relative_error(found, fp32),
            "bytes": round(size, 1),
        }
        for kind, found, size in (("same", same, 2), ("float32", rounded_once, 2 + sum_bytes))
    }


def micro_gradients(trainer: Trainer) -> Iterator[list[Tensor]]:
    """The gradients of each micro-batch's part of the loss; they are in .grad of the parameters as well."""
    from fabric_llm.data.batches import target_count

    micro_batches = [trainer.fabric.to_device(b) for b in batches_of(trainer, MICRO_BATCHES).at(0)]
    targets = sum(target_count(batch) for batch in micro_batches)
    for batch in micro_batches:
        trainer.fabric.backward(trainer.model(**batch) / targets)
        yield [p.grad for p in trainer.model.parameters()]


def relative_error(found: list[Tensor], right: list[Tensor]) -> float:
    error = sum((f.double() - r).square().sum().item() for f, r in zip(found, right))
    return math.sqrt(error / sum(r.square().sum().item() for r in right))


def masking(folder: Path, options: argparse.Namespace) -> Result:
    """Time of a training step with packed documents kept apart (--document_masking) against not."""
    if options.model_name:
        cases = [(options.model_name, options.model_name, options.train_data_dir)]
    else:
        from fabric_llm.data.demo import prepare_demo

        prepare_demo(ROOT / "data" / "demo", 256)
        write_config(folder / "llama-30M", LARGER)
        data = {context: documentation(folder, context, MASKING_CHARACTERS)[0] for context in MASKING_CONTEXTS}
        models = {"demo, 1.1 M": ROOT / "configs" / "demo_llama", "Llama, 30 M": folder / "llama-30M"}
        cases = [(name, path, data[context]) for name, path in models.items() for context in MASKING_CONTEXTS]
    rows = []
    for name, model_name, data_folder in cases:
        manifest = json.loads((Path(data_folder) / "manifest.json").read_text())
        context, split = manifest["context_length"], manifest["splits"]["train"]
        size = max(1, MASKING_BATCH_TOKENS // context)
        trainer = make_trainer(
            options, model_name, data_folder, "--global_batch_size", size, "--micro_batch_size", size
        )
        steps = {
            key: masking_turn(trainer, batches_of(trainer, 1, keep_apart=key == "true")) for key in ("false", "true")
        }
        progress(f"{name}, context {context}")
        times = in_turns(steps, options.rounds)
        medians = {key: statistics.median(values) for key, values in times.items()}
        rows.append({"name": name, "context": context, "size": size, "documents": split["documents"] / split["rows"],
                     "medians": medians, "times": times})  # fmt: skip
    lines = [
        (row["name"], str(row["context"]), str(row["size"]), f"{row['documents']:.2f}", f"{1000 * row['medians']['false']:.0f}",
         f"{1000 * row['medians']['true']:.0f}", f"{row['medians']['true'] / row['medians']['false']:.2f}")
        for row in rows
    ]  # fmt: skip
    titles = ("", "context", "sequences", "documents a sequence", "false, ms", "true, ms", "true / false")
    notes = [
        "Documents that share a row kept apart (--document_masking true, the default) or not, --attention sdpa, bfloat16",
        f"Medians of {options.rounds} steps of the same sequences; the two take turns, a step each",
        "Rows with several documents take a mask of context x context instead of the causal kernel without one, so the cost "
        f"depends on the length of documents: here at most {MASKING_CHARACTERS} characters",
    ]
    return "What keeping packed documents apart costs", notes, rows, markdown(titles, lines)


def masking_turn(trainer: Trainer, batches: Any) -> Callable[[int], float]:
    return lambda turn: timed_step(trainer, turn, batches.at(turn * trainer.plan.micro_batch_size))


# ------------------------------------------------------------------- the page


def header(argv: list[str], options: argparse.Namespace, title: str, notes: list[str], load: float) -> str:
    import lightning
    import torch
    import transformers

    command = shlex.join(["python", "benchmarks/bf16_updates.py", *argv])
    cuda = options.accelerator != "cpu" and torch.cuda.is_available()
    hardware = (
        torch.cuda.get_device_name()
        if cuda
        else f"{cpu_name()}, torch on {torch.get_num_threads()} of {os.cpu_count()} cores"
    )
    lines = [
        f"Command: `{command}`",
        f"Date: {datetime.date.today()}",
        f"Hardware: {hardware}",
        f"Load: average {load:.1f} before the start, {os.getloadavg()[0]:.1f} at the end",
        f"Versions: Python {platform.python_version()}, torch {torch.__version__}, lightning {lightning.__version__}, "
        f"transformers {transformers.__version__}",
        *([] if cuda else ["GPU: not measured"]),
        *notes,
    ]
    return "\n".join([f"# {title}", "", *(f"- {line}" for line in lines), "", ""])


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


if __name__ == "__main__":
    sys.exit(main())
