"""Rows per second of the loader, for one dataset and for a mixture of five, against `datasets` and torch's DataLoader.

    python benchmarks/loader.py --gib 10 --markdown docs/results/loader.md

Random tokens are written as Arrow folders that `datasets.load_from_disk` opens, and removed in the end. Each contender reads
rows in random order and gives micro-batches of int64 on the CPU, which is all that a step needs of it. All files were read
once before, so that they are in the page cache where they fit. Contenders take turns.
"""

from __future__ import annotations

import functools
import itertools
import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Optional

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import datasets  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402

from benchmarks import inputs, page  # noqa: E402
from benchmarks.turns import alternate  # noqa: E402
from fabric_llm.data.batches import Batches, Prefetch  # noqa: E402
from fabric_llm.data.dataset import open_dataset, together  # noqa: E402
from fabric_llm.data.mixture import Mixture  # noqa: E402
from fabric_llm.data.mixture_text import Stage  # noqa: E402

NOTES = """
Workers are threads that read ahead while the step computes. Here nothing computes, so they only show that they don't hold the
loader back; where the disk is slow they wait for it in place of the step. Five sources cost no more than one.
"""
VOCABULARY, SEED, SOURCES = 50_000, 7, 5
MICRO_BATCH, MICRO_BATCHES = 8, 4  # rows, and of a step
WEIGHTS = (15, 2, 1, 1, 1)
NEEDED = 3000.0  # tokens a second that a step here takes, for the ratio
TITLES = ["", "sources", "workers", "rows/s", "million tokens/s", "x what a step needs"]


def main(argv: Optional[list[str]] = None) -> int:
    parser = page.parser(__doc__, rounds=5)
    parser.add_argument("--gib", type=float, default=10.0, help="size of all datasets together")
    parser.add_argument("--context_length", type=int, default=2048, help="tokens of a row")
    parser.add_argument("--steps", type=int, default=200, help="of each contender in a round")
    parser.add_argument("--folder", type=Path, help="where to write the datasets (default: the system's)")
    options = page.parse(parser, argv)
    torch.set_num_threads(1)
    context, written = options.context_length, int(options.gib * 2**30)
    with tempfile.TemporaryDirectory(prefix="fabric_llm-loader-", dir=options.folder) as name:
        folder = Path(name)
        if (free := shutil.disk_usage(folder).free) < 1.1 * written:
            print(f"{folder} has {free / 2**30:.1f} GiB free, {options.gib} are to be written.", file=sys.stderr)
            return 2
        for number in range(SOURCES):
            rows = written // (2 * context * SOURCES)
            inputs.write_rows(folder / str(number), VOCABULARY, context, rows, inputs.DOCUMENT_TOKENS, "uint16")
        rows = contenders(folder, context, options.steps)
        warm_up(folder)
        for row in alternate(rows, options.rounds):
            row["rates"].append(rate(row["read"]))
        memory = resident_gib()
    lines = []
    for row in rows:
        rows_a_second = statistics.median(row["rates"])
        cells = [
            f"{rows_a_second:,.0f}",
            f"{rows_a_second * context / 1e6:,.1f}",
            f"{rows_a_second * context / NEEDED:,.0f}",
        ]
        lines.append([row["name"], row["sources"], row["workers"], *cells])
    notes = [
        f"Data: {options.gib:.2f} GiB of random uint16 tokens in {SOURCES} datasets, rows of {context} tokens",
        f"A step is {MICRO_BATCHES} micro-batches of {MICRO_BATCH} rows; {options.steps} steps a round; "
        f"medians of {options.rounds} rounds, in turns",
        f"A step needs: {NEEDED:,.0f} tokens/s, {NEEDED / context:,.1f} rows/s",
        f"Memory of the process at the end, without the page cache: {memory:.2f} GiB",
    ]
    body = page.table(TITLES, lines) + "\n" + NOTES.rstrip()
    page.write("loader.py", "What the loader gives", notes, options, body, rows)
    return 0


def contenders(folder: Path, context: int, steps: int) -> list[page.Row]:
    """The rows of the table; "read" yields micro-batches, each once it is there."""
    names = tuple(str(number) for number in range(SOURCES))
    opened = [open_dataset(folder / name, "size") for name in names]
    plain = [datasets.load_from_disk(str(folder / name / "train")).with_format("numpy") for name in names]
    ours, whole = together(opened).train, datasets.concatenate_datasets(plain)
    counts, stages = tuple(len(one.train) for one in opened), (Stage(0, WEIGHTS),)
    mixture = Mixture(names, counts, (context,) * SOURCES, stages, SEED)
    found: list[page.Row] = []

    def add(name: str, sources: int, workers: int, read: Callable[..., Iterator[Any]], rows: Any) -> None:
        row = {"name": name, "sources": sources, "workers": workers, "rates": []}
        found.append({**row, "read": functools.partial(read, rows, workers, steps)})

    for workers in (0, 4):
        for sources, order in ((1, None), (SOURCES, mixture)):
            batches = Batches(ours, SEED, MICRO_BATCH, MICRO_BATCHES, mixture=order)
            add("fabric_llm", sources, workers, prefetched, batches)
    indexing = Batches(whole, SEED, MICRO_BATCH, MICRO_BATCHES, mixture=mixture)
    add("the same, rows by `datasets` indexing", SOURCES, 0, prefetched, indexing)
    for workers in (0, 4):
        add("torch DataLoader on `datasets`", SOURCES, workers, loaded, whole.with_format("torch"))
    return found


def prefetched(batches: Batches, workers: int, steps: int) -> Iterator[Any]:
    start = int.from_bytes(os.urandom(4), "big") * batches.global_batch_size  # other rows in each round
    prefetch = Prefetch(batches, workers)
    for step in range(steps):
        yield from prefetch.at(start + step * batches.global_batch_size)
    prefetch.close()


def loaded(rows: Any, workers: int, steps: int) -> Iterator[Any]:
    """As trainers do: a sampler of random rows, the dataset's own formatting, default collation."""
    chosen = np.random.default_rng().integers(0, len(rows), steps * MICRO_BATCHES * MICRO_BATCH).tolist()
    warnings.filterwarnings("ignore", "This DataLoader will create")  # more workers than cores
    for batch in torch.utils.data.DataLoader(rows, MICRO_BATCH, sampler=chosen, num_workers=workers):
        yield {"input_ids": batch["input_ids"].long(), "labels": batch["input_ids"].long().clone()}


def rate(read: Callable[[], Iterator[Any]]) -> float:
    """Rows per second, the start of workers left out: from the second step on."""
    micro_batches = read()
    for _ in itertools.islice(micro_batches, MICRO_BATCHES):
        pass
    began = time.perf_counter()
    return sum(MICRO_BATCH for _ in micro_batches) / (time.perf_counter() - began)


def warm_up(folder: Path) -> None:
    for file in folder.rglob("*.arrow"):
        with file.open("rb", buffering=0) as stream:
            while stream.read(2**24):
                pass


def resident_gib() -> float:
    """Memory of this process that isn't the files' page cache."""
    said = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return int(said["RssAnon"].split()[0]) / 2**20


if __name__ == "__main__":
    sys.exit(main())
