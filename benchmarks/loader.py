#!/usr/bin/env python
"""Rows per second of the loader, for one dataset and for a mixture of five, against `datasets` and torch's DataLoader.

    python benchmarks/loader.py --gib 10 --markdown docs/results/loader.md

Random tokens are written as Arrow folders that `datasets.load_from_disk` opens, and removed in the end. Each contender reads
rows in random order and gives micro-batches of int64 on the CPU, which is all that a step needs of it. Cold: the files were
put out of the page cache before (the kernel is asked to, per file). Warm: they were read once. Contenders take turns.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shlex
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Optional

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import datasets  # noqa: E402
import numpy as np  # noqa: E402
import pyarrow as pa  # noqa: E402
import torch  # noqa: E402

from benchmarks.bf16_updates import cpu_name, markdown, progress  # noqa: E402
from fabric_llm.data.batches import Batches, Prefetch  # noqa: E402
from fabric_llm.data.dataset import TokenDataset, open_dataset, together  # noqa: E402
from fabric_llm.data.mixture import Mixture  # noqa: E402
from fabric_llm.data.pattern import Segment  # noqa: E402

NOTES = """
Workers are threads that read ahead while the step computes. Here nothing computes, so they only show that they don't hold the
loader back; where the disk is slow they wait for it in place of the step. Five sources cost no more than one. Cold rows per
second are those of the disk: a row of 2,048 tokens is 4 KiB somewhere in the file. A cold figure is one round, in the
order of the table.
"""
VOCABULARY, SEED, SOURCES = 50_000, 7, 5
ROWS_AT_ONCE = 1000  # of a record batch, as `datasets` writes them
WEIGHTS = (15, 2, 1, 1, 1)
DTYPES = {"uint16": (np.uint16, pa.uint16()), "int32": (np.int32, pa.int32())}


class Contender(NamedTuple):
    """steps(): yields micro-batches, each once it is there."""

    name: str
    sources: int
    workers: int
    steps: Callable[[], Iterator[Any]]


def main(argv: Optional[list[str]] = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    options = parse(argv)
    torch.set_num_threads(1)
    datasets.disable_progress_bars()
    load = os.getloadavg()[0]
    folder = Path(tempfile.mkdtemp(prefix="fabric_llm-loader-", dir=options.folder))
    try:
        if (free := shutil.disk_usage(folder).free) < options.gib * 1.1 * 2**30:
            print(f"{folder} has {free / 2**30:.1f} GiB free, {options.gib} are to be written.", file=sys.stderr)
            return 2
        began = time.monotonic()
        written = write(folder, options)
        progress(f"{written / 2**30:.2f} GiB written in {time.monotonic() - began:.0f} s")
        opened = [open_dataset(folder / str(number), "size") for number in range(SOURCES)]
        table = measure(contenders(opened, folder, options), folder, options)
        memory = resident_gib()
    finally:
        shutil.rmtree(folder)
    page = header(argv, options, written, load, memory) + table + "\n" + NOTES.rstrip()
    print(page)
    if options.markdown:
        options.markdown.write_text(page + "\n")
    return 0


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=10.0, help="size of all datasets together")
    parser.add_argument("--context_length", type=int, default=2048, help="tokens of a row")
    parser.add_argument("--micro_batch_size", type=int, default=8, help="rows of a micro-batch")
    parser.add_argument("--micro_batches", type=int, default=4, help="of a step")
    parser.add_argument("--dtype", choices=DTYPES, default="uint16", help="of a token in the files")
    parser.add_argument("--steps", type=int, default=200, help="of each contender in a round")
    parser.add_argument("--rounds", type=int, default=5, help="warm ones; a table has medians")
    parser.add_argument(
        "--step_tokens_per_second", type=float, default=3000.0, help="what a run here needs, for the ratio"
    )
    parser.add_argument("--folder", type=Path, help="where to write the datasets (default: the system's)")
    parser.add_argument("--markdown", type=Path, help="file to write the tables to")
    return parser.parse_args(argv)


def write(folder: Path, options: argparse.Namespace) -> int:
    """SOURCES datasets of random tokens, of equal size. Returns the bytes of all tokens."""
    numpy_type, arrow_type = DTYPES[options.dtype]
    context, generator = options.context_length, np.random.default_rng(0)
    rows = int(options.gib * 2**30) // (np.dtype(numpy_type).itemsize * context * SOURCES)
    features = datasets.Features({"input_ids": datasets.List(datasets.Value(options.dtype), length=context)})
    for number in range(SOURCES):
        for name, count in (("train", rows), ("validation", 8)):
            target = folder / str(number) / name
            target.mkdir(parents=True)
            write_split(target, count, context, generator, numpy_type, arrow_type, features)
        said = {"packed": True, "context_length": context, "max_token_id": VOCABULARY - 1, "eos_token_id": 0}
        (folder / str(number) / "manifest.json").write_text(json.dumps(said))
        (folder / str(number) / "dataset_dict.json").write_text('{"splits": ["train", "validation"]}')
    return rows * SOURCES * context * np.dtype(numpy_type).itemsize


def write_split(
    folder: Path, rows: int, context: int, generator: Any, numpy_type: Any, arrow_type: Any, features: Any
) -> None:
    """An Arrow file as `save_to_disk` writes it, one record batch after the other, at constant memory."""
    one = datasets.Dataset.from_dict({"input_ids": [[0] * context]}, features=features)
    one.save_to_disk(str(folder))
    [file] = folder.glob("*.arrow")
    schema = one.data.table.schema
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, schema) as stream:
        for start in range(0, rows, ROWS_AT_ONCE):
            tokens = generator.integers(1, VOCABULARY, (min(ROWS_AT_ONCE, rows - start), context), dtype=numpy_type)
            column = pa.FixedSizeListArray.from_arrays(pa.array(tokens.ravel(), arrow_type), context)
            stream.write_batch(pa.record_batch([column.cast(schema.field(0).type)], schema=schema))
    info = json.loads((folder / "dataset_info.json").read_text())
    (folder / "dataset_info.json").write_text(json.dumps({**info, "splits": None}))


def contenders(opened: list[TokenDataset], folder: Path, options: argparse.Namespace) -> list[Contender]:
    rows, batch = tuple(len(one.train) for one in opened), options.micro_batch_size
    names = tuple(str(number) for number in range(SOURCES))
    mixture = Mixture(names, rows, (options.context_length,) * SOURCES, (Segment(0, WEIGHTS),), SEED)
    plain = [datasets.load_from_disk(str(folder / str(n) / "train")).with_format("numpy") for n in range(SOURCES)]
    whole = datasets.concatenate_datasets(plain)
    mixed = together(opened).train
    torched = datasets.concatenate_datasets([one.with_format("torch") for one in plain])
    of_one = Batches(mixed, SEED, batch, options.micro_batches)
    of_five = Batches(mixed, SEED, batch, options.micro_batches, mixture=mixture)
    found = []
    for workers in (0, 4):
        found.append(Contender("fabric_llm", 1, workers, lambda w=workers: prefetched(of_one, w, options.steps)))
        found.append(Contender("fabric_llm", SOURCES, workers, lambda w=workers: prefetched(of_five, w, options.steps)))
    fallback = Batches(whole, SEED, batch, options.micro_batches, mixture=mixture)
    found.append(
        Contender("the same, rows by `datasets` indexing", SOURCES, 0, lambda: prefetched(fallback, 0, options.steps))
    )
    for workers in (0, 4):
        found.append(
            Contender("torch DataLoader on `datasets`", SOURCES, workers, lambda w=workers: loaded(torched, w, options))
        )
    return found


def prefetched(batches: Batches, workers: int, steps: int) -> Iterator[Any]:
    start = int.from_bytes(os.urandom(4), "big") * batches.global_batch_size  # other rows in each round
    prefetch = Prefetch(batches, workers)
    for step in range(steps):
        yield from prefetch.at(start + step * batches.global_batch_size)
    prefetch.close()


def loaded(rows: Any, workers: int, options: argparse.Namespace) -> Iterator[Any]:
    """As trainers do: a sampler of random rows, the dataset's own formatting, default collation."""
    count = options.steps * options.micro_batch_size * options.micro_batches
    chosen = np.random.default_rng().integers(0, len(rows), count).tolist()
    warnings.filterwarnings("ignore", "This DataLoader will create")  # more workers than cores
    loader = torch.utils.data.DataLoader(rows, options.micro_batch_size, sampler=chosen, num_workers=workers)
    for batch in loader:
        yield {"input_ids": batch["input_ids"].long(), "labels": batch["input_ids"].long().clone()}


def measure(found: list[Contender], folder: Path, options: argparse.Namespace) -> str:
    """The table: rows and tokens per second of each contender, cold and warm."""
    cold = {}
    for number, contender in enumerate(found):
        forget(folder)
        cold[number] = rate(contender, options)
        progress(
            f"cold: {contender.name}, {contender.sources} sources, {contender.workers} workers: {cold[number]:,.0f} rows/s"
        )
    warm_up(folder)
    warm: dict[int, list[float]] = {number: [] for number in range(len(found))}
    for _ in range(options.rounds):
        for number, contender in enumerate(found):
            warm[number].append(rate(contender, options))
    needed = options.step_tokens_per_second / options.context_length
    lines = []
    for number, contender in enumerate(found):
        rows = statistics.median(warm[number])
        lines.append(
            [contender.name, str(contender.sources), str(contender.workers), f"{cold[number]:,.0f}", f"{rows:,.0f}"]
            + [f"{rows * options.context_length / 1e6:,.1f}", f"{rows / needed:,.0f}"]
        )
    titles = ("", "sources", "workers", "rows/s, cold", "rows/s, warm", "million tokens/s, warm", "x what a step needs")
    return markdown(titles, lines)


def rate(contender: Contender, options: argparse.Namespace) -> float:
    """Rows per second, the start of workers left out: from the second step on."""
    micro_batches = contender.steps()
    for _ in range(options.micro_batches):
        next(micro_batches)
    began = time.perf_counter()
    count = sum(1 for _ in micro_batches)
    return count * options.micro_batch_size / (time.perf_counter() - began)


def forget(folder: Path) -> None:
    """Ask the kernel to drop the files from its page cache, which it does for pages that nobody has mapped."""
    for file in folder.rglob("*.arrow"):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def warm_up(folder: Path) -> None:
    for file in folder.rglob("*.arrow"):
        with file.open("rb", buffering=0) as stream:
            while stream.read(2**24):
                pass


def resident_gib() -> float:
    """Memory of this process that isn't the files' page cache."""
    said = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return int(said["RssAnon"].split()[0]) / 2**20


def header(argv: list[str], options: argparse.Namespace, written: int, load: float, memory: float) -> str:
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, datasets {datasets.__version__}, "
    versions += f"numpy {np.__version__}, pyarrow {pa.__version__}"
    return f"""# What the loader gives

- Command: `python benchmarks/loader.py {shlex.join(argv)}`
- Date: {datetime.date.today()}
- Hardware: {cpu_name()}, {os.cpu_count()} cores
- Load: average {load:.1f} before the start, {os.getloadavg()[0]:.1f} at the end
- Versions: {versions}
- Data: {written / 2**30:.2f} GiB of random {options.dtype} tokens in {SOURCES} datasets, rows of {options.context_length} tokens
- A step is {options.micro_batches} micro-batches of {options.micro_batch_size} rows; {options.steps} steps a round; warm: medians of {options.rounds} rounds, in turns
- A step needs: {options.step_tokens_per_second:,.0f} tokens/s, {options.step_tokens_per_second / options.context_length:,.1f} rows/s
- Memory of the process at the end, without the page cache: {memory:.2f} GiB

"""


if __name__ == "__main__":
    sys.exit(main())
