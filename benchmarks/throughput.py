#!/usr/bin/env python
"""Tokens per second of this template, a bare PyTorch loop, HF Trainer and litgpt, on the same model and tokens.

    python benchmarks/throughput.py --output throughput.json
    python benchmarks/throughput.py --packed        rows of packed documents, which don't see each other
    python benchmarks/throughput.py --compile       each with its own use of torch.compile

A Llama of 33 million parameters, rows of random tokens, AdamW at one learning rate, gradients clipped to 1.0. Each
contender is a process of its own, and they take turns (turns.py). What is timed is the whole step: reading the
batch, forward, backward, clipping, update. All start from the same weights and read the same rows, so that their
first losses must be equal: the exit code is 1 if they aren't. Contenders whose package is missing are rows that say
so.

`fabric_llm` runs as train.py does by default (one_step.py), `plain` with all fast paths off. The bare loop is
transformers' Llama with its own loss, torch.optim.AdamW and clip_grad_norm_, each with its defaults. HF Trainer
logs, evaluates and saves nothing. litgpt's contender makes the calls of its pretraining loop; it can't keep packed
documents apart.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import tempfile
from pathlib import Path
from typing import Any, Optional

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import inputs, turns  # noqa: E402
from benchmarks.turns import NotHere  # noqa: E402

SHAPE = {"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 8, "num_attention_heads": 8}
SIZES = {"vocabulary": 8192, "context": 512, "micro_batch": 4}
TOY_SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
TOY_SIZES = {"vocabulary": 128, "context": 32, "micro_batch": 2}
ROWS, SEED = 256, 1234
ADAMW = {"lr": 2e-5, "betas": (0.9, 0.95), "weight_decay": 0.1}  # as train.py has them
PLAIN = ("--loss", "full", "--attention", "sdpa", "--compile", "false")
LOSS_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.05}  # nats, at the first step
TITLES = [
    "",
    "tokens/s",
    "times as fast as the bare loop",
    "step, ms",
    "quartiles",
    "additional peak, MiB",
    "loss of step 1",
]


def main(argv: Optional[list[str]] = None) -> int:
    parser = turns.parser(__doc__.splitlines()[0])
    parser.add_argument("--packed", action="store_true", help="rows are packed documents, which don't see each other")
    parser.add_argument("--compile", action="store_true", help="each contender with its own use of torch.compile")
    parser.add_argument("--only", nargs="+", default=list(CONTENDERS), choices=CONTENDERS, help="contenders to run")
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")  # HF Trainer would take all GPUs
    options = turns.resolve(parser, argv)
    shape, sizes = (TOY_SHAPE, TOY_SIZES) if options.smoke else (SHAPE, SIZES)
    rows: list[turns.Row] = []
    with tempfile.TemporaryDirectory() as name:
        folder, document_tokens = Path(name), (12 if options.smoke else inputs.DOCUMENT_TOKENS) * options.packed
        inputs.write_llama(folder / "llama", with_weights=True, vocab_size=sizes["vocabulary"], **shape)
        inputs.write_rows(folder / "data", sizes["vocabulary"], sizes["context"], ROWS, document_tokens)
        for dtype in options.dtypes:
            contenders = [
                turns.Contender(options, {"name": name, "dtype": dtype}, CONTENDERS[name], folder, dtype, options)
                for name in options.only
            ]
            rows += turns.in_turns(contenders, options)
    notes = [
        f"Model: Llama {shape}, {sizes}; {'packed documents' if options.packed else 'a document a row'}; "
        f"{'compiled' if options.compile else 'not compiled'}",
        "Each contender in a process of its own, in turns; times as fast: median over rounds of the ratio in one",
    ]
    tokens = sizes["context"] * sizes["micro_batch"]
    body = "\n\n".join(f"{dtype}\n\n{table(rows, dtype, tokens)}" for dtype in options.dtypes)
    print(turns.page("throughput.py", "Throughput", notes, options, body))
    turns.write("throughput.py", options, rows)
    if problem := other_losses(rows):
        print(f"throughput.py: error: {problem}", file=sys.stderr)
    return int(problem is not None)


def table(rows: list[turns.Row], dtype: str, tokens: int) -> str:
    of_dtype = [row for row in rows if row["dtype"] == dtype]
    bare = next((row for row in of_dtype if row["name"] == "bare loop"), None)
    lines = []
    for row in of_dtype:
        seconds = turns.median(row)
        if seconds is None:
            lines.append(turns.failed(row["name"], row, TITLES))
            continue
        row["tokens_per_second"] = tokens / seconds
        row["times_bare"] = None if bare is None else turns.times_faster(row, bare)
        cells = [
            f"{tokens / seconds:,.0f}",
            turns.number(row["times_bare"]),
            turns.milliseconds(seconds),
            turns.spread(row),
        ]
        lines.append([row["name"], *cells, turns.mebibytes(row["additional_bytes"]), f"{row['losses'][0]:.4f}"])
    return turns.table(TITLES, lines)


def other_losses(rows: list[turns.Row]) -> Optional[str]:
    """A sentence where contenders didn't compute the same."""
    for dtype, group in itertools.groupby(rows, lambda row: row["dtype"]):
        losses = {row["name"]: row["losses"][0] for row in group if not row["error"]}
        if losses and max(losses.values()) - min(losses.values()) > LOSS_TOLERANCE[dtype]:
            return f"the contenders' first losses in {dtype} differ: {losses}."
    return None


# ------------------------------------------------------------------- the contenders


def template(turns: Any, folder: Path, dtype: str, options: argparse.Namespace, *more: str) -> None:
    from benchmarks import one_step
    from fabric_llm.data.batches import Prefetch

    micro_batch = (TOY_SIZES if options.smoke else SIZES)["micro_batch"]
    flags = ["--micro_batch_size", micro_batch, *(["--compile", "true"] if options.compile else []), *more]
    trainer = one_step.set_up(inputs.flags(folder, "llama", "data", options.kind, precision(dtype), *flags))
    batches = batches_of(trainer.plan.dataset, options, trainer.plan.document_end)
    reader, loss = Prefetch(batches, trainer.arguments.data.num_workers), None
    for step in itertools.count():
        if not turns.go_on(loss):
            return reader.close()
        loss = one_step.take_step(trainer, step, reader.at(step * batches.global_batch_size))


def plain(turns: Any, folder: Path, dtype: str, options: argparse.Namespace) -> None:
    template(turns, folder, dtype, options, *(PLAIN if not options.compile else PLAIN[:4]))


def bare_loop(turns: Any, folder: Path, dtype: str, options: argparse.Namespace) -> None:
    import torch

    model, batches = causal_lm(folder, dtype).to(options.kind), hf_batches(folder, options)
    if options.compile:
        model.compile()
    optimizer, loss = torch.optim.AdamW(model.parameters(), **ADAMW), None
    for step in itertools.count():
        if not turns.go_on(loss):
            return
        batch = {name: tensor.to(options.kind) for name, tensor in batches[step % len(batches)].items()}
        loss = model(**batch, use_cache=False).loss
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
    rows = [
        {name: tensor[row] for name, tensor in batch.items()}
        for batch in batches
        for row in range(len(batch["labels"]))
    ]
    arguments = TrainingArguments(
        output_dir=str(folder / "hf_trainer"),
        per_device_train_batch_size=len(batches[0]["labels"]),
        max_steps=10**6,
        learning_rate=ADAMW["lr"],
        lr_scheduler_type="constant",
        adam_beta1=ADAMW["betas"][0],
        adam_beta2=ADAMW["betas"][1],
        weight_decay=ADAMW["weight_decay"],
        max_grad_norm=1.0,
        use_cpu=options.kind == "cpu",
        train_sampling_strategy="sequential",
        remove_unused_columns=False,
        torch_compile=options.compile,
        logging_strategy="no",
        save_strategy="no",
        eval_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    model = causal_lm(folder, dtype)
    model.config.use_cache = False
    trainer = Counted(model=model, args=arguments, train_dataset=rows, callbacks=[Asked()])
    trainer.train()


def litgpt(turns: Any, folder: Path, dtype: str, options: argparse.Namespace) -> None:
    """The calls of litgpt's pretrain.py: main and fit, in their order, without the log."""
    if options.packed:
        raise NotHere("litgpt has no attention that keeps packed documents apart")
    import torch
    from litgpt.utils import chunked_cross_entropy, instantiate_torch_optimizer

    from fabric_llm.base.fabric import Fabric

    fabric = Fabric(devices=1, accelerator=options.kind, precision=precision(dtype))
    with fabric.init_module(empty_init=True):
        model = litgpt_model(folder)
    model.load_state_dict(litgpt_weights(folder, model.config))
    model = fabric.setup(torch.compile(model) if options.compile else model)
    given = {"class_path": "torch.optim.AdamW", "init_args": dict(ADAMW)}
    optimizer = instantiate_torch_optimizer(given, model.parameters(), fused=options.kind == "cuda")
    optimizer, batches, loss = fabric.setup_optimizers(optimizer), hf_batches(folder, options), None
    for step in itertools.count():
        if not turns.go_on(loss):
            return
        input_ids = batches[step % len(batches)]["input_ids"].to(fabric.device)
        targets = torch.nn.functional.pad(input_ids[:, 1:], (0, 1), value=-100)
        loss = chunked_cross_entropy(model(input_ids), targets)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach()


def litgpt_model(folder: Path) -> Any:
    from litgpt import GPT, Config
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder / "llama")
    return GPT(
        Config(
            name="Llama",
            block_size=max(SIZES["context"], TOY_SIZES["context"]),
            n_layer=config.num_hidden_layers,
            n_embd=config.hidden_size,
            n_head=config.num_attention_heads,
            intermediate_size=config.intermediate_size,
            vocab_size=config.vocab_size,
            padded_vocab_size=config.vocab_size,
            rotary_percentage=1.0,
            parallel_residual=False,
            bias=False,
            norm_class_name="RMSNorm",
            norm_eps=config.rms_norm_eps,
            mlp_class_name="LLaMAMLP",
        )
    )


def litgpt_weights(folder: Path, config: Any) -> dict[str, Any]:
    """The weights of the shared Llama under litgpt's names."""
    from litgpt.scripts.convert_hf_checkpoint import copy_weights_hf_llama
    from safetensors.torch import load_file

    weights: dict[str, Any] = {}
    copy_weights_hf_llama(config, {}, weights, load_file(folder / "llama" / "model.safetensors"))
    return weights


CONTENDERS = {
    "fabric_llm": template,
    "fabric_llm, plain": plain,
    "bare loop": bare_loop,
    "HF Trainer": hf_trainer,
    "litgpt": litgpt,
}


def precision(dtype: str) -> str:
    return turns.DTYPES[dtype]


def causal_lm(folder: Path, dtype: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(folder / "llama", dtype=getattr(torch, dtype)).train()


def batches_of(dataset: Any, options: argparse.Namespace, document_end: Optional[int]) -> Any:
    """The micro-batches of train.py: one a step."""
    from fabric_llm.data.batches import Batches

    micro_batch = (TOY_SIZES if options.smoke else SIZES)["micro_batch"]
    return Batches(dataset.train, SEED, micro_batch, 1, document_end=document_end)


def hf_batches(folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The same rows in the same order, as transformers takes them: positions that restart keep documents apart."""
    from fabric_llm.data.sources import open_source

    batches = batches_of(open_source(folder / "data"), options, inputs.DOCUMENT_END if options.packed else None)
    names = ("input_ids", "labels", "position_ids")
    count = ROWS // batches.global_batch_size
    at = (batches.at(step * batches.global_batch_size)[0] for step in range(count))
    return [{name: batch[name] for name in names if name in batch} for batch in at]


if __name__ == "__main__":
    sys.exit(main())
