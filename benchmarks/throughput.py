"""Tokens per second of this template, a bare PyTorch loop and HF Trainer, on the same model and
tokens.

    python benchmarks/throughput.py --output throughput.json python benchmarks/throughput.py
    --packed rows of packed documents, which don't see each other python benchmarks/throughput.py
    --compile each with its own use of torch.compile

What is timed is the whole step: reading the batch, forward, backward, clipping, update. All
contenders start from the same weights and read the same rows, so that their first losses must be
equal: the exit code is 1 if they aren't. Contenders whose package is missing are rows that say so.

`fabric_llm` runs as train.py does by default (one_step.py), `plain` with all fast paths off. The
bare loop is transformers' Llama with its own loss, torch.optim.AdamW and clip_grad_norm_, each with
its defaults. HF Trainer logs, evaluates and saves nothing.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import sys
import tempfile
from pathlib import Path
from typing import Any, Optional

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import inputs, page, turns
from benchmarks.gpu import SHAPES, VOCABULARY
from benchmarks.turns import training

SIZES = {"vocabulary": 8192, "context": 512, "micro_batch": 4}
TOY_SIZES = {"vocabulary": 128, "context": 32, "micro_batch": 2}
# Of a Llama of one billion parameters: with four rows, all logits of one contender don't fit beside
# the others' weights.
GPU_SIZES = {"vocabulary": VOCABULARY, "context": 4096, "micro_batch": 2}
ROWS, SEED = 256, 1234  # of the order, as train.py has it
ADAMW = {"lr": 2e-5, "betas": (0.9, 0.95), "weight_decay": 0.1}  # as train.py has them
PRECISION = turns.DTYPES  # the contenders call their turns by that name
LOSS_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.05}  # nats, at the first step
COLUMNS = {
    "tokens/s": page.number("tokens_per_second", ",.0f"),
    "times as fast as the bare loop": page.number("times"),
    **{
        "step, ms": page.step,
        "quartiles": page.spread,
        "additional peak, MiB": page.mebibytes("additional_bytes"),
    },
    "loss of step 1": lambda row: f"{row['losses'][0]:.4f}",
}


def main(argv: Optional[list[str]] = None) -> int:
    parser = turns.parser(__doc__)
    parser.add_argument(
        "--packed",
        action="store_true",
        help="rows are packed documents, which don't see each other",
    )
    parser.add_argument(
        "--compile", action="store_true", help="each contender with its own use of torch.compile"
    )
    parser.add_argument(
        "--only", nargs="+", default=list(CONTENDERS), choices=CONTENDERS, help="contenders to run"
    )
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")  # HF Trainer would take all GPUs
    options = turns.resolve(parser, argv)
    shape, options.sizes = (inputs.TOY_LLAMA, TOY_SIZES) if options.smoke else (inputs.LLAMA, SIZES)
    if options.kind == "cuda" and not options.smoke:
        shape, options.sizes = (
            {name: size for name, size in SHAPES["1B"].items() if name != "vocab_size"},
            GPU_SIZES,
        )
    vocabulary, context, micro_batch = options.sizes.values()
    rows: list[page.Row] = []
    with tempfile.TemporaryDirectory() as name:
        folder, document_tokens = (
            Path(name),
            (12 if options.smoke else inputs.DOCUMENT_TOKENS) * options.packed,
        )
        stored = options.dtypes[0] if len(options.dtypes) == 1 else "float32"
        inputs.write_llama(
            folder / "llama", with_weights=True, dtype=stored, vocab_size=vocabulary, **shape
        )
        inputs.write_rows(folder / "data", vocabulary, context, ROWS, document_tokens)
        for dtype in options.dtypes:
            given = folder, dtype, options
            contenders = [
                turns.Contender(options, {"name": name, "dtype": dtype}, CONTENDERS[name], *given)
                for name in options.only
            ]
            rows += turns.in_turns(contenders, options)
    rows_are = "packed documents" if options.packed else "a document a row"
    notes = [
        (
            f"Model: Llama {shape}, {options.sizes}; {rows_are}; "
            f"{'compiled' if options.compile else 'not compiled'}"
        ),
        (
            "Each contender in a process of its own, in turns; times as fast: median over rounds "
            "of the ratio in one"
        ),
    ]
    body = "\n\n".join(
        f"{dtype}\n\n{table(rows, dtype, context * micro_batch)}" for dtype in options.dtypes
    )
    page.write("throughput.py", "Throughput", notes, options, body, rows)
    if problem := other_losses(rows):
        print(f"throughput.py: error: {problem}", file=sys.stderr)
    return int(problem is not None or all(row["error"] for row in rows))


def table(rows: list[page.Row], dtype: str, tokens: int) -> str:
    of_dtype = [row for row in rows if row["dtype"] == dtype]
    for row in of_dtype:
        row["tokens_per_second"] = None if row["error"] else tokens / page.median(row)
    return page.compare(of_dtype, COLUMNS, beside="bare loop")


def other_losses(rows: list[page.Row]) -> Optional[str]:
    """A sentence where contenders didn't compute the same."""
    for dtype, group in itertools.groupby(rows, lambda row: row["dtype"]):
        losses = {row["name"]: row["losses"][0] for row in group if not row["error"]}
        if losses and max(losses.values()) - min(losses.values()) > LOSS_TOLERANCE[dtype]:
            return f"the contenders' first losses in {dtype} differ: {losses}."
    return None


def template(
    turns: Any, folder: Path, dtype: str, options: argparse.Namespace, **more: str
) -> None:
    more |= {"micro_batch_size": options.sizes["micro_batch"]} | (
        {"compile": "true"} if options.compile else {}
    )
    training(
        turns, inputs.training(folder, "llama", "data", options.kind, PRECISION[dtype], **more)
    )


def bare_loop(turns: Any, folder: Path, dtype: str, options: argparse.Namespace) -> None:
    import torch

    model, loss = causal_lm(folder, dtype).to(options.kind), None
    if options.compile:
        model.compile()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    for batch in itertools.cycle(hf_batches(folder, options)):
        if not turns.go_on(loss):
            return
        loss = model(
            **{name: tensor.to(options.kind) for name, tensor in batch.items()}, use_cache=False
        ).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach()


def hf_trainer(turns: Any, folder: Path, dtype: str, options: argparse.Namespace) -> None:
    import accelerate  # noqa: F401  HF Trainer needs it
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Counted(Trainer):
        def training_step(self, *given: Any, **named: Any) -> Any:
            self.last_loss = super().training_step(*given, **named)
            return self.last_loss

    class Asked(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            control.should_training_stop = not turns.go_on()

        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            control.should_training_stop = not turns.go_on(trainer.last_loss)

    batches = hf_batches(folder, options)
    rows = [dict(zip(batch, row)) for batch in batches for row in zip(*batch.values())]
    (beta1, beta2), size = ADAMW["betas"], options.sizes["micro_batch"]
    given = {
        "max_steps": 10**6,
        "learning_rate": ADAMW["lr"],
        "lr_scheduler_type": "constant",
        "max_grad_norm": 1.0,
    }
    given |= {
        "adam_beta1": beta1,
        "adam_beta2": beta2,
        "weight_decay": ADAMW["weight_decay"],
        "report_to": "none",
    }
    given |= {
        "per_device_train_batch_size": size,
        "train_sampling_strategy": "sequential",
        "disable_tqdm": True,
    }
    given |= {
        "logging_strategy": "no",
        "save_strategy": "no",
        "eval_strategy": "no",
        "remove_unused_columns": False,
    }
    given |= {"use_cpu": options.kind == "cpu", "torch_compile": options.compile}
    arguments = TrainingArguments(output_dir=str(folder / "hf_trainer"), **given)
    model = causal_lm(folder, dtype)
    model.config.use_cache = False
    trainer = Counted(model=model, args=arguments, train_dataset=rows, callbacks=[Asked()])
    trainer.train()


CONTENDERS = {
    "fabric_llm": template,
    "fabric_llm, plain": functools.partial(
        template, loss="full", attention="sdpa", compile="false"
    ),
    "bare loop": bare_loop,
    "HF Trainer": hf_trainer,
}


def causal_lm(folder: Path, dtype: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(
        folder / "llama", dtype=getattr(torch, dtype)
    ).train()


def hf_batches(folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The same rows in the same order, as transformers takes them: positions that restart keep
    documents apart."""
    from fabric_llm.data.batches import Batches
    from fabric_llm.data.sources import open_source

    document_end, size = (
        inputs.DOCUMENT_END if options.packed else None,
        options.sizes["micro_batch"],
    )
    batches = Batches(open_source(folder / "data").train, SEED, size, 1, document_end=document_end)
    at = (batches.at(position)[0] for position in range(0, ROWS - size + 1, size))
    names = ("input_ids", "labels", "position_ids")
    return [{name: batch[name] for name in names if name in batch} for batch in at]


if __name__ == "__main__":
    sys.exit(main())
