"""Steps of training side by side: step time, memory and loss of FSDP's choices, of ways to attend
and of ways to compute the loss; and the memory of longer rows, beside plan.py's.

    python benchmarks/steps.py sharding --markdown docs/results/sharding.md
    python benchmarks/steps.py attention
    python benchmarks/steps.py loss
    python benchmarks/steps.py context --markdown docs/results/context.md

Each row is a set of flags of train.py. Memory is what a GPU's allocator counts, on a CPU the
storages of all tensors, before the timed steps. Buffers of DDP that are never freed count; what
gloo allocates itself does not.

All rows of sharding start from the same weights, see the same tokens and must give the same losses:
the exit code is 1 if they don't, or if a row fails. Rows take turns (turns.py), but for those of
context, where the slope is that between the first and the last length that fits. On a CPU the host
is the device: `offload` is for GPUs.
"""

import argparse
import itertools
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import inputs, page, turns
from benchmarks.inputs import llama

KINDS_OF_TOKENS = 64  # in the data: that can be learnt
DOCUMENT_TOKENS, OF_CONTEXT = 300, 512  # of packed rows, on average
LOSS_TOLERANCE = 1e-4  # nats, between any two rows of sharding at any step
# row of sharding -> flags of train.py
VARIANTS = {
    "ddp": "--strategy ddp",
    "fsdp, no wrapping": "--strategy fsdp --auto_wrap_policy none",
    # the parameters of one attention block
    "fsdp, by size": f"--strategy fsdp --auto_wrap_policy size:{4 * 512**2}",
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
FULL = "--activation_checkpointing full"
WAYS = ["", FULL, f"{FULL} --tiled_mlp true", "--activation_checkpointing offload --tiled_mlp true"]
SMALL = llama(512, 1376, 8, 8, vocab_size=8192)
MANY_LOGITS = llama(576, 1536, 2, 9, vocab_size=49152)
TOY = llama(64, 192, 2, 1, vocab_size=128), 32, 2
# title, rows, the one that the others are beside, sizes: a shape, context and micro-batch
QUESTIONS = {
    "sharding": ("Sharding: FSDP's choices and DDP", VARIANTS, "ddp", [(SMALL, 256, 1)]),
    "attention": (
        *("Attention over packed documents", ATTENTION, "masked"),
        [(SMALL, 1024, 4), (SMALL, 4096, 1)],
    ),
    "loss": ("The loss head", LOSSES, "full", [(MANY_LOGITS, 1024, 4), (MANY_LOGITS, 4096, 1)]),
}
LONG = {"vocab_size": 4096, "max_position_embeddings": 2**20}
# of context: a shape, contexts, ranks that share a row, and how many of the ways
LONGER = {
    "cpu": (llama(256, 1024, 8, 8, 4, **LONG), (4096, 8192, 16384), (1, 2, 4), 3),
    "cuda": (llama(2048, 8192, 16, 32, 4, **LONG), (16384, 32768, 65536), (1,), 4),
    "smoke": (llama(256, 1024, 8, 8, 4, **LONG), (256, 512), (1,), 3),
}
COLUMNS = {
    "step, ms": page.step,
    "quartiles": page.spread,
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
    parser.add_argument("question", choices=[*QUESTIONS, "context"])
    parser.set_defaults(threads=1)
    options = turns.resolve(parser)
    with tempfile.TemporaryDirectory() as name:
        if options.question == "context":
            return longer_rows(Path(name), options)
        return side_by_side(Path(name), options)


def side_by_side(folder: Path, options: argparse.Namespace) -> int:
    """Of sharding: two ranks, and rows of one document. Of the others: one, and packed rows."""
    title, variants, beside, sizes = QUESTIONS[options.question]
    ranks, documents = (2, 0) if variants is VARIANTS else (1, DOCUMENT_TOKENS)
    columns = {**COLUMNS, f"times as fast as {beside}": page.number("times")}
    rows, tables = [], []
    for shape, context, micro_batch in [TOY] if options.smoke else sizes:
        place = folder / str(context)
        inputs.write_llama(place / "llama", **shape)
        inputs.write_rows(place / "data", KINDS_OF_TOKENS, context, 64, documents)
        more = f"--devices {ranks} --micro_batch_size {micro_batch} --lr 1e-3 --compile false"
        usual = place, "llama", "data", options.kind, turns.DTYPES[options.dtype], more
        contenders = []
        for name, text in variants.items():
            row = {"name": name, "flags": text, "ranks": ranks, "context": context}
            given = inputs.training(*usual, text), options.kind
            contenders.append(turns.Contender(options, row, train, *given))
        rows += turns.in_turns(contenders, options)
        table = page.compare(rows[-len(contenders) :], columns, beside)
        tables += [f"{shape}, context {context}, {micro_batch} rows, {options.dtype}", table]
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


def train(contender: Any, flags: list[str], kind: str) -> None:
    from benchmarks import one_step

    run = one_step.set_up(flags)
    most = one_step.peak(run, kind)
    parameters, state = list(run.model.parameters()), one_step.state_of(run.optimizer)
    contender.extra = {
        "bytes": most,
        "parameter_bytes": one_step.storage_bytes(parameters),
        "optimizer_bytes": one_step.storage_bytes(state),
        "additional_bytes": most - one_step.storage_bytes([*parameters, *state]),
    }
    one_step.train(contender, run)


def longer_rows(folder: Path, options: argparse.Namespace) -> int:
    shape, contexts, sharing, ways = LONGER["smoke" if options.smoke else options.kind]
    inputs.write_llama(folder / "model", **shape)
    for context in contexts:
        inputs.write_rows(folder / str(context), LONG["vocab_size"], context, 8, OF_CONTEXT)
    note = f"A Llama of {shape}, in bf16-true; documents of {OF_CONTEXT} tokens on average"
    titles = ["flags", "ranks that share", *(f"{context:,} tokens, MiB" for context in contexts)]
    titles += ["slope, bytes a token", "by plan.py", "measured / planned"]
    lines, text = [], ""
    for way, ranks in itertools.product(WAYS[:ways], sharing):
        sizes = f"--devices {ranks} --context_parallel {ranks} --micro_batch_size 1 --lr 1e-5"
        found = {}
        for context in contexts:
            usual = folder, "model", str(context), options.kind, "bf16-true"
            flags = inputs.training(*usual, sizes, way)
            contender = turns.Contender(options, {"ranks": ranks}, train, flags, options.kind)
            if report := contender.ask("time", 1):
                found[context] = report["bytes"], planned(flags, context)
            contender.close()
        lines.append([f"`{way or 'none'}`", ranks])
        lines[-1] += [f"{found[one][0] / page.MIB:.1f}" if one in found else "" for one in contexts]
        if len(found) > 1:
            tokens = max(found) - min(found)
            slopes = [(b - a) / tokens for a, b in zip(found[min(found)], found[max(found)])]
            lines[-1] += [*(f"{slope:,.0f}" for slope in slopes), f"{slopes[0] / slopes[1]:.3f}"]
        table = page.table(titles, lines)
        text = page.keep("Memory of longer rows", [note], options, [table], lines)
    print(text)
    return 0


def planned(flags: list[str], context: int) -> int:
    """By plan.py's prediction, without what is assumed of a GPU."""
    from fabric_llm.forecast.prediction import predict
    from plan_arguments import parse_plan

    parts = predict(*parse_plan([*flags, "--context_length", str(context)])).memory.parts
    return sum(size for name, size in parts.items() if not name.endswith("(assumed)"))


if __name__ == "__main__":
    sys.exit(main())
