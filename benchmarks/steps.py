"""Steps of training side by side: step time, memory and loss of FSDP's choices, of ways to attend
and of ways to compute the loss.

    python benchmarks/steps.py sharding --markdown docs/results/sharding.md
    python benchmarks/steps.py attention
    python benchmarks/steps.py loss

Each row is a set of flags of train.py; rows take turns (turns.py). Memory is counted in the second
step of each rank, before the timed ones. Buffers of DDP that are never freed count; what gloo
allocates itself does not.

All rows of sharding start from the same weights, see the same tokens and must give the same losses:
the exit code is 1 if they don't, or if a row fails.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import inputs, page, turns

KINDS_OF_TOKENS = 64  # in the data: that can be learnt
DOCUMENT_TOKENS = 300  # of packed rows, on average
LOSS_TOLERANCE = 1e-4  # nats, between any two rows of sharding at any step
# row of sharding -> flags of train.py; SIZE becomes the parameters of one attention block
VARIANTS = {
    "ddp": "--strategy ddp",
    "fsdp, no wrapping": "--strategy fsdp --auto_wrap_policy none",
    "fsdp, by size": "--strategy fsdp --auto_wrap_policy size:SIZE",
    "fsdp, by layer": "--strategy fsdp --auto_wrap_policy LlamaDecoderLayer",
    "fsdp, by layer, SHARD_GRAD_OP": "--strategy fsdp --sharding_strategy SHARD_GRAD_OP",
    "fsdp, by layer, NO_SHARD": "--strategy fsdp --sharding_strategy NO_SHARD",
    "fsdp, by layer, activation_checkpointing": "--strategy fsdp --activation_checkpointing true",
    "fsdp, by layer, cpu_offload": "--strategy fsdp --cpu_offload true",
    "fsdp2, no wrapping": "--strategy fsdp2 --auto_wrap_policy none",
    "fsdp2, by layer": "--strategy fsdp2 --auto_wrap_policy LlamaDecoderLayer",
    "fsdp2, by layer, SHARD_GRAD_OP": "--strategy fsdp2 --sharding_strategy SHARD_GRAD_OP",
    "fsdp2, by layer, cpu_offload": "--strategy fsdp2 --cpu_offload true",
}
ATTENTION = {  # row of attention -> flags of train.py
    "unmasked": "--attention sdpa --document_masking false",
    "masked": "--attention sdpa --document_masking true",
    "packed": "--attention packed --document_masking true",
}
LOSSES = {"full": "--loss full", "chunked": "--loss chunked"}  # row of loss -> flags of train.py
# In tokens, layers, numbers, tokens and sequences.
SIZES = {"context": 256, "layers": 8, "hidden": 512, "vocabulary": 8192, "micro_batch": 1}
LONG, SHORT = {**SIZES, "context": 4096}, {**SIZES, "context": 1024, "micro_batch": 4}
MANY_LOGITS = {"layers": 2, "hidden": 576, "vocabulary": 49152}
TOY = {"context": 32, "layers": 2, "hidden": 64, "vocabulary": 128, "micro_batch": 2}
# title, rows, the one that the others are beside, sizes
QUESTIONS = {
    "sharding": ("Sharding: FSDP's choices and DDP", VARIANTS, "ddp", [SIZES]),
    "attention": ("Attention over packed documents", ATTENTION, "masked", [SHORT, LONG]),
    "loss": ("The loss head", LOSSES, "full", [{**SHORT, **MANY_LOGITS}, {**LONG, **MANY_LOGITS}]),
}
COLUMNS = {
    "step, ms": page.step,
    "quartiles": page.spread,
    "x first": page.number("times_first"),
    "parameters": page.mebibytes("parameter_bytes"),
    "optimizer": page.mebibytes("optimizer_bytes"),
    "additional peak in a step": page.mebibytes("additional_bytes"),
    "loss": lambda row: f"{row['losses'][-1]:.6f}",
}
NOTES = [
    f"All rows of sharding agree to {LOSS_TOLERANCE:.0e} nats at each compared step, or the exit "
    f"code is 1; other rows are packed with documents of {DOCUMENT_TOKENS} tokens on average",
    "Memory: MiB on the rank that has most; additional: above parameters and optimizer, so with "
    "gradients, gathered parameters, activations, buffers of communication",
    "Step: median and quartiles of steps of the slowest rank, rows in turns; loss: after the "
    "compared steps, in nats",
]


def main() -> int:
    parser = turns.parser(__doc__)
    parser.add_argument("question", choices=QUESTIONS)
    parser.set_defaults(threads=1)
    options = turns.resolve(parser)
    title, variants, beside, sizes = QUESTIONS[options.question]
    columns = {**COLUMNS, f"times as fast as {beside}": page.number("times")}
    rows, tables = [], []
    with tempfile.TemporaryDirectory() as name:
        for each in [TOY] if options.smoke else sizes:
            measured = measure(Path(name, str(each["context"])), variants, each, options)
            tables += [f"{each}, {options.dtype}", page.compare(measured, columns, beside)]
            rows += measured
    page.write(title, NOTES, options, tables, rows)
    if options.question != "sharding":
        return 0
    others = [row["name"] for row in rows if "error" in row]
    if others := others or [row["name"] for row in rows if not is_alike(row, rows[0])]:
        page.progress(f"error: failed, or with other losses: {others}")
    return int(bool(others))


def is_alike(row: page.Row, first: page.Row) -> bool:
    """False also where a loss is NaN."""
    pairs = zip(row["losses"], first["losses"], strict=True)
    return all(abs(loss - expected) <= LOSS_TOLERANCE for loss, expected in pairs)


def measure(
    folder: Path, variants: dict[str, str], sizes: dict[str, int], options: argparse.Namespace
) -> list[page.Row]:
    """Of sharding: two ranks, and rows of one document. Of the others: one, and packed rows."""
    ranks, documents = (2, 0) if variants is VARIANTS else (1, DOCUMENT_TOKENS)
    hidden, vocabulary = sizes["hidden"], sizes["vocabulary"]
    mlp = -(-hidden * 8 // 3 // 32) * 32
    shape = inputs.llama(hidden, mlp, sizes["layers"], max(1, hidden // 64))
    inputs.write_llama(folder / "llama", vocab_size=vocabulary, **shape)
    kinds = min(KINDS_OF_TOKENS, vocabulary)
    inputs.write_rows(folder / "data", kinds, sizes["context"], 64, documents)
    more = f"--devices {ranks} --micro_batch_size {sizes['micro_batch']} --lr 1e-3 --compile false"
    usual = folder, "llama", "data", options.kind, turns.DTYPES[options.dtype], more
    contenders = []
    for name, text in variants.items():
        row = {"name": name, "flags": text, "ranks": ranks, **sizes}
        flags = inputs.training(*usual, text.replace("SIZE", str(4 * hidden**2)))
        contenders.append(turns.Contender(options, row, train, flags, options.kind))
    rows = turns.in_turns(contenders, options)
    for row in rows:
        row["times_first"] = page.times(row, rows[0])
    return rows


def train(contender: Any, flags: list[str], kind: str) -> None:
    """Count memory in the second of two steps: the first allocates the optimizer's state."""
    from benchmarks import one_step

    peak = turns.Peak(kind)
    peak.begin()
    run = one_step.set_up(flags)
    one_step.take_step(run)
    peak.forget()
    one_step.take_step(run)
    most = peak.end()
    parameters, state = list(run.model.parameters()), one_step.state_of(run.optimizer)
    contender.extra = {
        "parameter_bytes": one_step.storage_bytes(parameters),
        "optimizer_bytes": one_step.storage_bytes(state),
        "additional_bytes": most - one_step.storage_bytes([*parameters, *state], kind),
    }
    one_step.train(contender, run)


if __name__ == "__main__":
    sys.exit(main())
