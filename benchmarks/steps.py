"""Steps of training side by side: step time, memory and loss of FSDP's choices, of ways to attend,
or of a model that grows.

    python benchmarks/steps.py sharding --markdown docs/results/sharding.md
    python benchmarks/steps.py attention
    python benchmarks/steps.py scaling --output scaling.json

Each row is a shape and a set of flags of train.py; rows take turns (turns.py). Memory is counted in
the second step of each rank, before the timed ones: what tensors hold for parameters and optimizer,
and the most that they take in the step beyond that, since before there was a model. Buffers of DDP
that are never freed count; what gloo allocates itself does not.

sharding: all rows start from the same weights, see the same tokens and must give the same losses:
the exit code is 1 if they don't, or if a row fails.

attention: over packed documents. `unmasked` lets them see each other, `masked` is SDPA with the
mask of context x context that transformers makes, `packed` is this template's.

scaling: around one small shape context, depth, width, vocabulary, ranks and accumulation grow, each
alone. Beside each measured exponent, the slope of log(seconds of a step) over log(size), stands
what plan.py says: the slope of the operations that a step needs, so that what is quadratic in the
context or the width counts with the part that it has at this size, and that of the memory. A last
line names the axes where growth is another.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any, Optional

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import inputs, page, turns

KINDS_OF_TOKENS = 64  # in the data: that can be learnt
LOSS_TOLERANCE = 1e-4  # nats, between any two rows of sharding at any step
SECONDS_TOLERANCE, MEMORY_TOLERANCE = 0.2, 0.25  # between the exponents of scaling
# In tokens, layers, numbers, tokens, sequences, processes and micro-batches.
AROUND = {"context": 256, "layers": 4, "hidden": 256, "vocabulary": 4096, "micro_batch": 4}
AROUND |= {"ranks": 1, "accumulation": 1}
SHARDED = {**AROUND, "layers": 8, "hidden": 512, "vocabulary": 8192, "micro_batch": 1}
TOY = {"context": 16, "layers": 2, "hidden": 64, "vocabulary": 128, "micro_batch": 2}
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
AXES = {  # of scaling
    "context": (128, 256, 512, 1024),
    "layers": (2, 4, 8, 16),
    "hidden": (128, 256, 512),
    "vocabulary": (2048, 4096, 8192, 16384),
    "ranks": (1, 2),
    "accumulation": (1, 2, 4),
}
COLUMNS = {
    **{
        "tokens/s": page.number("tokens_per_second", ",.0f"),
        "step, ms": page.step,
        "quartiles": page.spread,
    },
    **{"x first": page.number("times_first"), "times as fast as masked": page.number("times")},
    "operations": page.number("times_operations"),
    **{
        "parameters": page.mebibytes("parameter_bytes"),
        "optimizer": page.mebibytes("optimizer_bytes"),
    },
    "additional peak in a step": page.mebibytes("additional_bytes"),
    "in theory": page.mebibytes("additional_bytes_in_theory"),
    "loss": lambda row: f"{row['losses'][-1]:.6f}",
}
EXPONENTS = ["", "seconds: theory", "measured", "memory: theory", "measured", ""]
NOTES = [
    "Memory: MiB on the rank that has most; additional: above parameters and optimizer, so with "
    "gradients, gathered parameters, activations, buffers of communication",
    (
        "Step: median and quartiles of steps of the slowest rank, rows in turns; loss: after the "
        "compared steps, in nats"
    ),
]


def main(argv: Optional[list[str]] = None) -> int:
    parser = turns.parser(__doc__)
    parser.add_argument("question", choices=QUESTIONS)
    parser.add_argument(
        "--only", nargs="+", choices=[*VARIANTS, *AXES], help="rows of sharding, axes of scaling"
    )
    parser.add_argument(
        "--devices", type=int, default=2, help="processes of sharding, one device each"
    )
    parser.set_defaults(threads=1, dtypes=["float32"], warm_up=3)
    options = turns.resolve(parser, argv)
    with tempfile.TemporaryDirectory() as name:
        return QUESTIONS[options.question](Path(name), options)


def sharding(folder: Path, options: argparse.Namespace) -> int:
    point = SHARDED | (TOY if options.smoke else {}) | {"ranks": options.devices}
    points = [{"name": name, "flags": VARIANTS[name], **point} for name in options.only or VARIANTS]
    rows = measure(folder, points, options.dtypes[0], options)
    notes = [
        f"Model: {point}; processes over {'NCCL' if options.kind == 'cuda' else 'gloo'}",
        *NOTES,
        f"All rows agree to {LOSS_TOLERANCE:.0e} nats at each compared step, or the exit code is 1",
        *(
            ["On a CPU cpu_offload has nothing to move: its rows say only that it works"]
            * (options.kind == "cpu")
        ),
    ]
    page.write(
        "steps.py",
        "Sharding: FSDP's choices and DDP",
        notes,
        options,
        page.compare(rows, COLUMNS),
        rows,
    )
    if problem := problem_of(rows):
        print(f"steps.py: error: {problem}", file=sys.stderr)
    return int(problem is not None)


def attention(folder: Path, options: argparse.Namespace) -> int:
    rows: list[page.Row] = []
    tables = []
    for context, dtype in itertools.product(
        (32,) if options.smoke else (1024, 4096), options.dtypes
    ):
        point = (
            SHARDED | (TOY if options.smoke else {}) | {"context": context, "document_tokens": 300}
        )
        point |= (
            {"document_tokens": 8, "micro_batch": 2}
            if options.smoke
            else {"micro_batch": 4096 // context}
        )
        points = [{"name": name, "flags": flags, **point} for name, flags in ATTENTION.items()]
        found = measure(folder / f"{context}-{dtype}", points, dtype, options)
        tables.append(
            f"Context {context}, {dtype}\n\n{page.compare(found, COLUMNS, beside='masked')}"
        )
        rows += found
    notes = [f"Model: {point}", *NOTES]
    page.write(
        "steps.py", "Attention over packed documents", notes, options, "\n\n".join(tables), rows
    )
    return 0


def scaling(folder: Path, options: argparse.Namespace) -> int:
    around = AROUND | (TOY if options.smoke else {})
    rows: list[page.Row] = []
    lines = []
    for dtype, axis in itertools.product(options.dtypes, options.only or AXES):
        sizes = (around[axis], 2 * around[axis]) if options.smoke else AXES[axis]
        flags = "--strategy fsdp" if axis == "ranks" else ""
        points = [
            {"name": f"{axis} {size}", "flags": flags, **around, axis: size} for size in sizes
        ]
        found = measure(folder / f"{axis}-{dtype}", points, dtype, options, plans=True)
        lines.append(exponents(f"{axis}, {dtype}", sizes, found))
        rows += found
    notes = [
        f"Around: {around}; one axis grows at a time; ranks under --strategy fsdp",
        *NOTES,
        (
            f"As theory says: exponents of seconds to {SECONDS_TOLERANCE}, of memory to "
            f"{MEMORY_TOLERANCE}"
        ),
    ]
    unlike = [line[0] for line in lines if line[-1] != "as theory says"]
    body = [page.compare(rows, COLUMNS), page.table(EXPONENTS, lines)]
    body.append(f"Growth isn't what theory says: {'; '.join(unlike) if unlike else 'nowhere'}.")
    page.write("steps.py", "Scaling", notes, options, "\n\n".join(body), rows)
    return 0


QUESTIONS = {"sharding": sharding, "attention": attention, "scaling": scaling}


def measure(
    folder: Path,
    points: list[dict[str, Any]],
    dtype: str,
    options: argparse.Namespace,
    plans: bool = False,
) -> list[page.Row]:
    """plans: whether plan.py is asked what it says of each point."""
    contenders = []
    for number, point in enumerate(points):
        inside, hidden, context = folder / str(number), point["hidden"], point["context"]
        shape = {"hidden_size": hidden, "intermediate_size": -(-hidden * 8 // 3 // 32) * 32}
        shape |= {"num_hidden_layers": point["layers"], "num_attention_heads": max(1, hidden // 64)}
        inputs.write_llama(inside / "llama", vocab_size=point["vocabulary"], **shape)
        kinds, documents = (
            min(KINDS_OF_TOKENS, point["vocabulary"]),
            point.get("document_tokens", 0),
        )
        inputs.write_rows(inside / "data", kinds, context, 64, documents)
        more = {
            "devices": point["ranks"],
            "micro_batch_size": point["micro_batch"],
            "compile": "false",
            "lr": 1e-3,
        }
        more |= {"gradient_accumulation_steps": point["accumulation"]}
        flags = inputs.training(inside, "llama", "data", options.kind, turns.DTYPES[dtype], **more)
        flags += point["flags"].replace("SIZE", str(4 * hidden**2)).split()
        row = {**point, "dtype": dtype, "store": inside / "store"}
        row |= {"tokens": context * point["micro_batch"] * point["accumulation"] * point["ranks"]}
        row |= in_theory(flags, context) if plans else {}
        contenders.append(turns.Contender(options, row, train, flags, options.kind))
    rows = turns.in_turns(contenders, options)
    for row in rows:
        row["tokens_per_second"] = None if row["error"] else row["tokens"] / page.median(row)
        row["times_first"] = page.over(row, rows[0])
        row["times_operations"] = row["operations"] / rows[0]["operations"] if plans else None
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
    _, most = peak.end()
    parameters, state = list(run.model.parameters()), one_step.state_of(run.optimizer)
    contender.said = {
        "parameter_bytes": one_step.storage_bytes(parameters),
        "optimizer_bytes": one_step.storage_bytes(state),
        "additional_bytes": most - one_step.storage_bytes([*parameters, *state], kind),
    }
    one_step.train(contender, run)


def in_theory(flags: list[str], context: int) -> page.Row:
    """Of a rank's step its operations and its memory above parameters and optimizer, as plan.py
    says them."""
    from arguments import parse_plan
    from fabric_llm.forecast import prediction, trace

    own, planned = parse_plan([*flags, "--context_length", str(context)])
    found, held = prediction.predict(own, planned), (trace.PARAMETERS, trace.OPTIMIZER)
    parts = {
        name: size
        for name, size in found.memory.parts.items()
        if name not in held and "(assumed)" not in name
    }
    operations = found.flops_a_step / planned.devices.devices
    return {"operations": operations, "additional_bytes_in_theory": sum(parts.values())}


def problem_of(rows: list[page.Row]) -> Optional[str]:
    """A sentence where a row failed or computed something else than the first, None where all is
    well."""
    if failed := [f"{row['name']} ({row['error']})" for row in rows if row["error"]]:
        return f"failed: {'; '.join(failed)}."
    for row in rows:
        pairs = list(zip(row["losses"], rows[0]["losses"], strict=True))
        # also where one is NaN
        if not all(abs(loss - expected) <= LOSS_TOLERANCE for loss, expected in pairs):
            return (
                f"{row['name']}: losses {row['losses']}, but {rows[0]['losses']} with "
                f"{rows[0]['name']}."
            )
    return None


def exponents(name: str, sizes: tuple[int, ...], rows: list[page.Row]) -> list[str]:
    """The line that compares an axis with theory."""
    whole = [(size, row) for size, row in zip(sizes, rows) if page.median(row) is not None]
    if len(whole) < 2:
        return [name, *[""] * (len(EXPONENTS) - 2), "not measured"]

    def grows(of: Any) -> float:
        return slope([size for size, _ in whole], [of(row) for _, row in whole])

    operations, seconds = grows(lambda row: row["operations"]), grows(page.median)
    theory, measured = (
        grows(lambda row: row[f"additional_bytes{what}"]) for what in ("_in_theory", "")
    )
    apart = {
        "seconds": (seconds - operations, SECONDS_TOLERANCE),
        "memory": (measured - theory, MEMORY_TOLERANCE),
    }
    found = [
        f"{what} {difference:+.2f}"
        for what, (difference, most) in apart.items()
        if abs(difference) > most
    ]
    slopes = [f"{value:.2f}" for value in (operations, seconds, theory, measured)]
    return [name, *slopes, ", ".join(found) or "as theory says"]


def slope(sizes: list[float], values: list[float]) -> float:
    """Of log(value) over log(size), by least squares: the exponent with which values grow."""
    return statistics.linear_regression(
        [math.log(size) for size in sizes], [math.log(one) for one in values]
    ).slope


if __name__ == "__main__":
    sys.exit(main())
