"""What FSDP's choices cost: memory per rank, step time and loss of each, side by side with DDP.

    python benchmarks/sharding.py --markdown docs/results/sharding.md

Each row is a set of flags of train.py. All rows start from the same weights, see the same tokens and must give the same
losses: the exit code is 1 if they don't, or if a row fails. Memory is counted in the second step of each rank, before
the timed ones: what tensors hold for parameters and optimizer, and the most that they take in the step beyond that,
since before there was a model. Buffers of DDP that are never freed count; what gloo allocates itself does not.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any, Optional

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import inputs, page, turns  # noqa: E402

VOCABULARY, CONTEXT_TOKENS = 8192, 256
KINDS_OF_TOKENS = 64  # in the data: that can be learnt
LOSS_TOLERANCE = 1e-4  # nats, between any two rows at any step
VARIANTS = {  # row -> flags of train.py; SIZE becomes the parameters of one attention block
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
COLUMNS = {
    "parameters": page.mebibytes("parameter_bytes"),
    "optimizer": page.mebibytes("optimizer_bytes"),
    "additional peak in a step": page.mebibytes("additional_bytes"),
    **{"step, ms": page.step, "quartiles": page.spread, "x first": page.number("times_first")},
    "loss": lambda row: f"{row['losses'][-1]:.6f}",
}


def main(argv: Optional[list[str]] = None) -> int:
    parser = turns.parser(__doc__)
    parser.add_argument("--devices", type=int, default=2, help="processes, one device each")
    parser.add_argument("--only", nargs="+", default=list(VARIANTS), choices=VARIANTS, help="rows to run")
    parser.set_defaults(dtypes="float32", warm_up=3, threads=max(1, (os.cpu_count() or 1) // 2))
    options = turns.resolve(parser, argv)
    shape = inputs.TOY_LLAMA if options.smoke else inputs.LLAMA
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        inputs.write_llama(folder / "llama", vocab_size=VOCABULARY, **shape)
        inputs.write_rows(folder / "data", KINDS_OF_TOKENS, CONTEXT_TOKENS, 64)
        contenders = []
        for index, row in enumerate(options.only):
            flags = inputs.training(folder, "llama", "data", options.kind, "32-true", devices=options.devices, lr=1e-3)
            flags += VARIANTS[row].replace("SIZE", str(4 * shape["hidden_size"] ** 2)).split()
            known = {"name": row, "ranks": options.devices, "store": folder / f"store-{index}"}
            contenders.append(turns.Contender(options, known, train, flags, options.kind))
        rows = turns.in_turns(contenders, options)
    notes = [
        f"Processes: {options.devices}, over {'NCCL' if options.kind == 'cuda' else 'gloo'}",
        f"Model: Llama {shape}, vocabulary {VOCABULARY}, context {CONTEXT_TOKENS} tokens, micro-batch 1, float32, AdamW",
        "Memory: MiB on the rank that has most; additional: above parameters and optimizer, so with gradients, "
        "gathered parameters, activations, buffers of communication",
        f"Step: median and quartiles of {options.rounds} steps of the slowest rank, rows in turns; "
        "x first: over the first row's",
        f"Loss: after {options.warm_up} compared steps, in nats; all rows agree to {LOSS_TOLERANCE:.0e} at each of them, "
        "or the exit code is 1",
        *(["On a CPU cpu_offload has nothing to move: its rows say only that it works"] * (options.kind == "cpu")),
    ]
    page.write("sharding.py", "Sharding: FSDP's choices and DDP", notes, options, table(rows), rows)
    if problem := problem_of(rows):
        print(f"sharding.py: error: {problem}", file=sys.stderr)
    return int(problem is not None)


def problem_of(rows: list[page.Row]) -> Optional[str]:
    """A sentence where a row failed or computed something else than the first, None where all is well."""
    if failed := [f"{row['name']} ({row['error']})" for row in rows if row["error"]]:
        return f"failed: {'; '.join(failed)}."
    for row in rows:
        pairs = list(zip(row["losses"], rows[0]["losses"], strict=True))
        if not all(abs(loss - expected) <= LOSS_TOLERANCE for loss, expected in pairs):  # also where one is NaN
            return f"{row['name']}: losses {row['losses']}, but {rows[0]['losses']} with {rows[0]['name']}."
    return None


def table(rows: list[page.Row]) -> str:
    for row in rows:
        row["times_first"] = page.over(row, rows[0])
    return page.compare(rows, COLUMNS)


def train(contender: Any, flags: list[str], kind: str) -> None:
    """Count memory in the second of two steps: the first allocates the optimizer's state."""
    from benchmarks import one_step

    peak = turns.Peak(kind)
    peak.begin()
    run = one_step.set_up(flags)
    one_step.take_step(run)
    peak.forget()
    one_step.take_step(run)
    _, most = peak.end()
    parameters, state = list(run.model.parameters()), one_step.state_of(run.optimizer)
    contender.said = {
        "parameter_bytes": one_step.storage_bytes(parameters),
        "optimizer_bytes": one_step.storage_bytes(state),
        "additional_bytes": most - one_step.storage_bytes([*parameters, *state], kind),
    }
    one_step.train(contender, run)


if __name__ == "__main__":
    sys.exit(main())
