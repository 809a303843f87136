#!/usr/bin/env python
"""The memory of a step against the tokens of a row, measured and by plan.py, for ranks that share rows and what saves memory.

A real step on real ranks: on a GPU what its allocator counts, on a CPU the storages of all tensors. The slope is that between
the first and the last length. On a CPU the host is the device: `offload` is for GPUs.
"""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, Optional

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import inputs, memory, page, turns

SHAPES = {
    "cpu": {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 8},
    "cuda": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32},
}
MORE = {"vocab_size": 4096, "num_key_value_heads": 4, "max_position_embeddings": 2**20}
CONTEXTS = {"cpu": (4096, 8192, 16384), "cuda": (16384, 32768, 65536)}
FULL = "--activation_checkpointing full"
WAYS = ["", FULL, f"{FULL} --tiled_mlp true", "--activation_checkpointing offload --tiled_mlp true"]
DOCUMENT_TOKENS = 512  # so that attention takes no time
Found = tuple[int, Any]  # bytes, what plan.memory.predict takes


def main(argv: Optional[list[str]] = None) -> int:
    parser = turns.parser(__doc__, rounds=1)
    parser.add_argument("--sharing", nargs="*", type=int, default=[1, 2, 4], help="ranks that share rows")
    parser.set_defaults(threads=1, dtypes=["bfloat16"])
    options = turns.resolve(parser, argv)
    contexts = (256, 512) if options.smoke else CONTEXTS[options.kind]
    rows: list[page.Row] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        inputs.write_llama(folder / "model", **SHAPES["cpu" if options.smoke else options.kind], **MORE)
        for context in contexts:
            inputs.write_rows(folder / str(context), MORE["vocab_size"], context, 8, DOCUMENT_TOKENS)
        for way in WAYS[: 3 if options.kind == "cpu" else None]:
            for sharing in options.sharing:
                row: page.Row = {"flags": way or "none", "ranks": sharing, "measured": [], "planned": []}
                for context in contexts:
                    sizes = {"devices": sharing, "context_parallel": sharing, "micro_batch_size": 1, "lr": 1e-5}
                    words = inputs.training(folder, "model", str(context), options.kind, "bf16-true", **sizes)
                    bytes_, work = on_ranks(sharing, [*words, *way.split()], options, folder)
                    row["measured"].append(bytes_)
                    row["planned"].append(planned(work))
                page.progress(f"{row}")
                rows.append(row)
    notes = [
        f"A Llama of {SHAPES[options.kind]}, in bf16-true; rows of packed documents of {DOCUMENT_TOKENS} tokens on average"
    ]
    page.write("context.py", "Memory of longer rows", notes, options, body(rows, contexts), rows)
    return 0


def on_ranks(ranks: int, argv: list[str], options: Any, folder: Path) -> Found:
    """The most bytes of any rank, and the work."""
    context = multiprocessing.get_context("spawn")
    queue, store = context.Queue(), folder / "store"
    store.unlink(missing_ok=True)
    given = [((rank, ranks, store), argv, options.kind, queue) for rank in range(ranks)]
    processes = [context.Process(target=measure, args=some, daemon=True) for some in given]
    for process in processes:
        process.start()
    found = [queue.get(timeout=540) for _ in processes]
    for process in processes:
        process.join()
    return max(bytes_ for bytes_, _ in found), found[0][1]


def measure(place: tuple[int, int, Path], argv: list[str], kind: str, queue: Any) -> None:
    import torch

    from benchmarks import one_step
    from fabric_llm.plan.memory import Work

    torch.set_num_threads(1)
    if place[1] > 1:
        turns.join(*place, kind)
    run = one_step.set_up(argv)
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
    run.batches.close()
    sizes = run.plan.schedule.micro_batch_size, run.plan.schedule.micro_batches, max(run.plan.contexts)
    queue.put((min(peaks[1:]), Work(run.plan.placement, replace(run.plan.model, tokenizer=None), *sizes, None)))
    if place[1] > 1:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


def planned(work: Any) -> int:
    """By plan.py's prediction, without what is assumed of a GPU: in a process that is no rank."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(predict, (work,))


def predict(work: Any) -> int:
    from fabric_llm.plan import memory as plan_memory

    return sum(size for name, size in plan_memory.predict(work).parts.items() if not name.endswith("(assumed)"))


def body(rows: list[page.Row], contexts: tuple[int, ...]) -> str:
    titles = ["flags", "ranks that share"]
    titles += [f"{context:,} tokens, MiB" for context in contexts] + [
        "slope, bytes a token",
        "by plan.py",
        "measured / planned",
    ]
    lines = []
    for row in rows:
        slopes = [(row[key][-1] - row[key][0]) / (contexts[-1] - contexts[0]) for key in ("measured", "planned")]
        sizes = [f"{one / page.MIB:.1f}" for one in row["measured"]]
        ratio = f"{slopes[0] / slopes[1]:.3f}"
        lines.append([f"`{row['flags']}`", row["ranks"], *sizes, *(f"{slope:,.0f}" for slope in slopes), ratio])
    return page.table(titles, lines)


if __name__ == "__main__":
    sys.exit(main())
