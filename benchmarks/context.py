"""The memory of a step against the tokens of a row, measured and by plan.py, for ranks that share
rows and what saves memory.

A real step on real ranks: on a GPU what its allocator counts, on a CPU the storages of all tensors.
The slope is that between the first and the last length that was measured; what plan.py says doesn't
fit is left empty. On a CPU the host is the device: `offload` is for GPUs.
"""

from __future__ import annotations

import math
import sys
import tempfile
from pathlib import Path
from typing import Any, Optional

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import inputs, memory, page, turns

SHAPES = {
    "cpu": {
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
    },
    "cuda": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
    },
}
MORE = {"vocab_size": 4096, "num_key_value_heads": 4, "max_position_embeddings": 2**20}
CONTEXTS = {"cpu": (4096, 8192, 16384), "cuda": (16384, 32768, 65536)}
FULL = "--activation_checkpointing full"
WAYS = ["", FULL, f"{FULL} --tiled_mlp true", "--activation_checkpointing offload --tiled_mlp true"]
FILLED = 0.9  # of a device's memory: what plan.py says needs more isn't tried
DOCUMENT_TOKENS = 512  # so that attention takes no time


def main(argv: Optional[list[str]] = None) -> None:
    parser = turns.parser(__doc__, rounds=1)
    parser.add_argument(
        "--sharing", nargs="*", type=int, default=[1, 2, 4], help="ranks that share rows"
    )
    parser.set_defaults(threads=1, dtypes=["bfloat16"])
    options = turns.resolve(parser, argv)
    contexts = (256, 512) if options.smoke else CONTEXTS[options.kind]
    rows: list[page.Row] = []
    notes = [
        (
            f"A Llama of {SHAPES[options.kind]}, in bf16-true; packed documents of "
            f"{DOCUMENT_TOKENS} tokens on average"
        )
    ]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        inputs.write_llama(
            folder / "model", **SHAPES["cpu" if options.smoke else options.kind], **MORE
        )
        for context in contexts:
            inputs.write_rows(
                folder / str(context), MORE["vocab_size"], context, 8, DOCUMENT_TOKENS
            )
        for way in WAYS[: 3 if options.kind == "cpu" else None]:
            for sharing in options.sharing:
                row: page.Row = {
                    "flags": way or "none",
                    "ranks": sharing,
                    "measured": [],
                    "planned": [],
                    "errors": [],
                }
                for context in contexts:
                    sizes = {
                        "devices": sharing,
                        "context_parallel": sharing,
                        "micro_batch_size": 1,
                        "lr": 1e-5,
                    }
                    flags = (
                        inputs.training(
                            folder, "model", str(context), options.kind, "bf16-true", **sizes
                        )
                        + way.split()
                    )
                    store = {"ranks": sharing, "store": folder / f"store-{len(rows)}-{context}"}
                    contender = turns.Contender(options, store, measure, flags, options.kind)
                    row["planned"].append(planned(flags, context))
                    fits = row["planned"][-1] < FILLED * options.device.get(
                        "memory_bytes", math.inf
                    )
                    report = contender.ask("time", 1, within_seconds=540) if fits else None
                    contender.close()
                    row["measured"].append(report and report["bytes"])
                    row["errors"] += [contender.row["error"]] if contender.row["error"] else []
                page.progress(f"{row}")
                rows.append(row)
                text = page.keep(
                    "context.py",
                    "Memory of longer rows",
                    notes,
                    options,
                    body(rows, contexts),
                    rows,
                )
    print(text)


def measure(contender: Any, flags: list[str], kind: str) -> None:
    """The most bytes of this rank in a step after the first."""
    import torch

    from benchmarks import one_step

    run = one_step.set_up(flags)
    held = [*run.model.parameters(), *one_step.state_of(run.optimizer)]
    peaks = []
    for _ in range(3):
        if kind == "cuda":
            torch.cuda.reset_peak_memory_stats()
            one_step.take_step(run)
            peaks.append(torch.cuda.max_memory_allocated())
        else:
            with memory.Counted(held) as counted:
                one_step.take_step(run)
            peaks.append(counted.peak)
            held += one_step.state_of(run.optimizer)
    contender.said = {"bytes": min(peaks[1:])}
    one_step.train(contender, run)


def planned(flags: list[str], context: int) -> int:
    """By plan.py's prediction, without what is assumed of a GPU."""
    from arguments import parse_plan
    from fabric_llm.forecast.prediction import predict

    parts = predict(*parse_plan([*flags, "--context_length", str(context)])).memory.parts
    return sum(size for name, size in parts.items() if not name.endswith("(assumed)"))


def body(rows: list[page.Row], contexts: tuple[int, ...]) -> str:
    titles = ["flags", "ranks that share", *(f"{context:,} tokens, MiB" for context in contexts)]
    titles += ["slope, bytes a token", "by plan.py", "measured / planned"]
    lines = []
    for row in rows:
        sizes = ["" if one is None else f"{one / page.MIB:.1f}" for one in row["measured"]]
        sizes += [""] * (len(contexts) - len(sizes))
        there = [place for place, one in enumerate(row["measured"]) if one is not None]
        line, (first, last) = (
            [f"`{row['flags']}`", row["ranks"], *sizes],
            (there[0], there[-1]) if there else (0, 0),
        )
        if first < last:
            steps = contexts[last] - contexts[first]
            slopes = [(row[key][last] - row[key][first]) / steps for key in ("measured", "planned")]
            line += [*(f"{slope:,.0f}" for slope in slopes), f"{slopes[0] / slopes[1]:.3f}"]
        lines.append(line)
    errors = [f"{row['flags']}: {error}" for row in rows for error in row["errors"]]
    return "\n\n".join([page.table(titles, lines), *errors])


if __name__ == "__main__":
    main()
