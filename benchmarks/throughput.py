"""Tokens per second of this template, a bare PyTorch loop and HF Trainer, on the same model and
tokens.

What is timed is the whole step: reading the batch, forward, backward, clipping, update. All
contenders start from the same weights and read the same rows, so that their first losses must be
equal: the exit code is 1 if they aren't. The bare loop is transformers' Llama with its own loss,
torch.optim.AdamW and clip_grad_norm_, each with its defaults. HF Trainer logs, evaluates and saves
nothing.
"""

import argparse
import functools
import itertools
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import gpu, inputs, page, turns

# A shape, context and micro-batch. Of a Llama of one billion parameters, with four
# rows, all logits of one contender don't fit beside the others' weights.
SIZES = {
    "cpu": (inputs.llama(512, 1376, 8, 8, vocab_size=8192), 512, 4),
    "cuda": (gpu.SHAPES["1B"], 4096, 2),
    "smoke": (inputs.llama(32, 64, 2, 2, vocab_size=128), 32, 2),
}
ROWS, DOCUMENT_TOKENS = 256, 300  # on average
SEED = 1234  # of the order, as train.py has it
ADAMW = {"lr": 2e-5, "betas": (0.9, 0.95), "weight_decay": 0.1}  # as train.py has them
LOSS_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.05}  # nats, at the first step
COLUMNS = {
    "tokens/s": page.number("tokens_per_second", ",.0f"),
    "times as fast as the bare loop": page.number("times"),
    "step, ms": page.step,
    "quartiles": page.spread,
    "additional peak, MiB": page.mebibytes("additional_bytes"),
    "loss of step 1": lambda row: f"{row['losses'][0]:.4f}",
}


def main() -> int:
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")  # HF Trainer would take all GPUs
    parser = turns.parser(__doc__)
    parser.add_argument("--packed", action="store_true", help="rows are packed documents")
    parser.add_argument("--compile", action="store_true", help="each in its own way")
    parser.add_argument("--only", nargs="+", default=list(CONTENDERS), choices=CONTENDERS)
    options = turns.resolve(parser)
    sizes = SIZES["smoke" if options.smoke else options.kind]
    shape, context, options.micro_batch = sizes
    document_tokens = (12 if options.smoke else DOCUMENT_TOKENS) * options.packed
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        inputs.write_llama(folder / "llama", True, options.dtype, **shape)
        inputs.write_rows(folder / "data", shape["vocab_size"], context, ROWS, document_tokens)
        contenders = [
            turns.Contender(options, {"name": way}, CONTENDERS[way], folder, options)
            for way in options.only
        ]
        rows = turns.in_turns(contenders, options)
    for row in rows:
        if (seconds := page.median(row)) is not None:
            row["tokens_per_second"] = context * options.micro_batch / seconds
    rows_are = "packed documents" if options.packed else "a document a row"
    compiled = "compiled" if options.compile else "not compiled"
    notes = [
        f"Model: Llama {shape}; {options.dtype}, context {context}, micro-batch "
        f"{options.micro_batch}; {rows_are}; {compiled}",
        "Each contender in a process of its own, in turns; times as fast: median over rounds of "
        "the ratio in one",
    ]
    table = page.compare(rows, COLUMNS, beside="bare loop")
    page.write("Throughput", notes, options, [table], rows)
    losses = [row["losses"][0] for row in rows if "error" not in row]
    if differ := not losses or max(losses) - min(losses) > LOSS_TOLERANCE[options.dtype]:
        page.progress("error: no contender, or first losses that differ")
    return int(differ)


def template(turn: turns.Turns, folder: Path, options: argparse.Namespace, how: str = "") -> None:
    from benchmarks import one_step

    words = f"{how} --micro_batch_size {options.micro_batch} {'--compile true' * options.compile}"
    usual = folder, "llama", "data", options.kind, turns.DTYPES[options.dtype]
    one_step.train(turn, one_step.set_up(inputs.training(*usual, words)))


def bare_loop(turn: turns.Turns, folder: Path, options: argparse.Namespace) -> None:
    import torch

    model, loss = causal_lm(folder, options).to(options.kind), None
    if options.compile:
        model.compile()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    for batch in itertools.cycle(hf_batches(folder, options)):
        if not turn.go_on(loss):
            return
        on_device = {name: tensor.to(options.kind) for name, tensor in batch.items()}
        loss = model(**on_device, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach()


def hf_trainer(turn: turns.Turns, folder: Path, options: argparse.Namespace) -> None:
    import accelerate  # noqa: F401  HF Trainer needs it
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Counted(Trainer):
        def training_step(self, *given: Any, **named: Any) -> Any:
            self.last_loss = super().training_step(*given, **named)
            return self.last_loss

    class Asked(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            control.should_training_stop = not turn.go_on()

        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            control.should_training_stop = not turn.go_on(trainer.last_loss)

    rows = []
    for batch in hf_batches(folder, options):
        rows += [dict(zip(batch, row)) for row in zip(*batch.values())]
    arguments = TrainingArguments(
        output_dir=str(folder / "hf_trainer"),
        max_steps=10**6,
        per_device_train_batch_size=options.micro_batch,
        train_sampling_strategy="sequential",
        remove_unused_columns=False,
        learning_rate=ADAMW["lr"],
        adam_beta1=ADAMW["betas"][0],
        adam_beta2=ADAMW["betas"][1],
        weight_decay=ADAMW["weight_decay"],
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        torch_compile=options.compile,
        use_cpu=options.kind == "cpu",
        report_to="none",
        logging_strategy="no",
        save_strategy="no",
        eval_strategy="no",
        disable_tqdm=True,
    )
    model = causal_lm(folder, options)
    model.config.use_cache = False
    trainer = Counted(model=model, args=arguments, train_dataset=rows, callbacks=[Asked()])
    trainer.train()


plain = functools.partial(template, how="--loss full --attention sdpa --compile false")
CONTENDERS = {
    "fabric_llm": template,
    "fabric_llm, plain": plain,
    "bare loop": bare_loop,
    "HF Trainer": hf_trainer,
}


def causal_lm(folder: Path, options: argparse.Namespace) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(folder / "llama", dtype=options.dtype).train()


def hf_batches(folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The same rows in the same order, as transformers takes them: positions that restart keep
    documents apart."""
    from fabric_llm.data.batches import Batches
    from fabric_llm.data.sources import open_source

    document_end, size = inputs.DOCUMENT_END if options.packed else None, options.micro_batch
    batches = Batches(open_source(folder / "data").train, SEED, size, 1, document_end=document_end)
    taken = []
    for position in range(0, ROWS - size + 1, size):
        batch = batches.at(position)[0]
        names = [name for name in ("input_ids", "labels", "position_ids") if name in batch]
        taken.append({name: batch[name] for name in names})
    return taken


if __name__ == "__main__":
    sys.exit(main())
