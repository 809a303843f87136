"""How fast prepare_data.py tokenizes, beside the tokenizer itself and other builders of datasets, as a page of Markdown.

    python benchmarks/prepare.py --megabytes 100 --rounds 3 --cores 1 2 > docs/results/prepare.md

The text is that of this machine: sources and documentation of the standard library and of installed packages. A byte-level
BPE of 32,000 tokens is trained on it. Each contender is a process of its own, which measures after its imports; they take
turns, so that a slow minute of the machine meets all of them. Ratios are medians over rounds of the same round.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import json
import os
import platform
import resource
import shlex
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Optional

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
SUFFIXES = (".py", ".md", ".rst", ".txt", ".pyi", ".html", ".h")
SAMPLE_SECONDS = 0.05
VOCABULARY = 32_000


# --------------------------------------------------------------------------- the corpus


def library_texts(most_bytes: int) -> Iterator[str]:
    """Files of text on this machine, each once."""
    seen, total = set(), 0
    roots = [sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), "/usr/share/doc", "/usr/include"]
    for root in roots:
        for folder, folders, names in os.walk(root):
            folders.sort()
            for name in sorted(names):
                path = os.path.join(folder, name)
                if not name.endswith(SUFFIXES) or os.path.islink(path):
                    continue
                try:
                    text = Path(path).read_bytes().decode()
                except (OSError, UnicodeDecodeError):
                    continue
                if not text.strip() or hash(text) in seen or len(text) > 2_000_000:
                    continue
                seen.add(hash(text))
                total += len(text.encode())
                yield text
                if total >= most_bytes:
                    return


def make_corpus(folder: Path, most_bytes: int) -> None:
    """corpus.jsonl and a tokenizer trained on it."""
    from fabric_llm.data.tokenizer import train_byte_level_bpe

    texts = list(library_texts(most_bytes))
    with open(folder / "corpus.jsonl", "w") as file:
        file.writelines(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
    train_byte_level_bpe(texts, vocab_size=VOCABULARY).save_pretrained(folder / "tokenizer")
    facts = {"documents": len(texts), "bytes": sum(len(text.encode()) for text in texts)}
    (folder / "facts.json").write_text(json.dumps(facts))


def sample_of(folder: Path, most_bytes: int) -> Path:
    """A folder with every n-th document of the corpus, about `most_bytes` of them, and the tokenizer of the whole."""
    facts = json.loads((folder / "facts.json").read_text())
    every = max(1, round(facts["bytes"] / most_bytes))
    part = folder / "sample"
    shutil.rmtree(part, ignore_errors=True)
    shutil.copytree(folder / "tokenizer", part / "tokenizer")
    documents, size = 0, 0
    with open(folder / "corpus.jsonl") as lines, open(part / "corpus.jsonl", "w") as file:
        for number, line in enumerate(lines):
            if number % every == 0:
                file.write(line)
                documents, size = documents + 1, size + len(json.loads(line)["text"].encode())
    (part / "facts.json").write_text(json.dumps({"documents": documents, "bytes": size, "trained": facts["bytes"]}))
    return part


# ------------------------------------------------------------------------- the contenders


def processor_seconds() -> float:
    """Of this process and those of its children that have ended."""
    times = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in times)


def texts_of(folder: Path) -> list[str]:
    with open(folder / "corpus.jsonl") as file:
        return [json.loads(line)["text"] for line in file]


def tokenizer_itself(folder: Path, output: Path, cores: int, context: int) -> dict[str, Any]:
    """encode_batch_fast of the text in memory, in batches of 1000. Nothing is kept."""
    from tokenizers import Tokenizer

    texts, backend = texts_of(folder), Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json"))
    processor_began = processor_seconds()
    began, tokens = time.perf_counter(), 0
    for at in range(0, len(texts), 1000):
        tokens += sum(len(one) for one in backend.encode_batch_fast(texts[at : at + 1000], add_special_tokens=False))
    return {"seconds": time.perf_counter() - began, "tokens": tokens, "processor_began": processor_began}


def prepared(folder: Path, output: Path, cores: int, context: int, packing: str = "concat") -> dict[str, Any]:
    """prepare_data.py, from a .jsonl file to a published dataset."""
    from fabric_llm.data import prepare

    rows_seconds, make_rows = [], prepare._rows

    def timed(*args: Any) -> Any:
        began = time.perf_counter()
        result = make_rows(*args)
        rows_seconds.append(time.perf_counter() - began)
        return result

    prepare._rows = timed
    processor_began = processor_seconds()
    began = time.perf_counter()
    manifest = prepare.prepare(
        inputs=[folder / "corpus.jsonl"],
        output=output,
        tokenizer=str(folder / "tokenizer"),
        context_length=context,
        packing=packing,
        num_workers=cores,
    )
    splits = manifest["splits"].values()
    return {
        "seconds": time.perf_counter() - began,
        "rows_seconds": rows_seconds[0],
        "processor_began": processor_began,
        "tokens": sum(split["tokens"] for split in splits),
        "padding": sum(split.get("padding_tokens", 0) for split in splits) / sum(s["rows"] * context for s in splits),
    }


def prepared_best_fit(folder: Path, output: Path, cores: int, context: int) -> dict[str, Any]:
    return prepared(folder, output, cores, context, "best_fit")


def mapped(folder: Path, output: Path, cores: int, context: int) -> dict[str, Any]:
    """datasets.map with the tokenizer, each document padded to rows of the context, nothing truncated away."""
    import datasets
    from transformers import AutoTokenizer

    datasets.disable_progress_bars()
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")

    def rows(batch: dict) -> dict:
        given = {"truncation": True, "max_length": context, "padding": "max_length", "return_overflowing_tokens": True}
        made = tokenizer([text + tokenizer.eos_token for text in batch["text"]], **given)
        return {"input_ids": made["input_ids"], "attention_mask": made["attention_mask"]}

    processor_began = processor_seconds()
    began = time.perf_counter()
    loaded = datasets.load_dataset(
        "json", data_files=str(folder / "corpus.jsonl"), split="train", cache_dir=str(output / "cache")
    )
    done = loaded.map(rows, batched=True, num_proc=cores if cores > 1 else None, remove_columns=["text"])
    done.save_to_disk(output / "saved")
    seconds = time.perf_counter() - began
    shutil.rmtree(output / "cache")
    tokens = sum(int(sum(map(sum, batch["attention_mask"]))) for batch in done.iter(1000))
    padding = 1 - tokens / (len(done) * context)
    return {"seconds": seconds, "tokens": tokens, "padding": padding, "processor_began": processor_began}


@functools.cache
def backend_of(folder: Path) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json"))


def encode_lines(folder: Path, part: tuple[str, int, int]) -> Iterator[Any]:
    """The tokens of some lines of a file, for litdata."""
    import torch

    path, start, count = part
    with open(path, "rb") as file:
        file.seek(start)
        for _ in range(count):
            ids = backend_of(folder).encode(json.loads(file.readline())["text"]).ids
            yield torch.tensor([*ids, 0], dtype=torch.uint16)


def litdata_optimized(folder: Path, output: Path, cores: int, context: int) -> dict[str, Any]:
    """litdata.optimize, with its token format: one document after the other."""
    import litdata
    from litdata.streaming.item_loader import TokensLoader

    with open(folder / "corpus.jsonl", "rb") as file:
        lines = file.readlines()
    starts, at = [], 0
    for number, line in enumerate(lines):
        if number % 500 == 0:
            starts.append((str(folder / "corpus.jsonl"), at, len(lines[number : number + 500])))
        at += len(line)
    processor_began = processor_seconds()
    began = time.perf_counter()
    litdata.optimize(
        fn=functools.partial(encode_lines, folder),
        inputs=starts,
        output_dir=str(output),
        num_workers=cores,
        chunk_bytes="64MB",
        item_loader=TokensLoader(block_size=context),
        verbose=False,
    )
    seconds = time.perf_counter() - began
    index = json.loads((output / "index.json").read_text())
    tokens = sum(chunk["dim"] for chunk in index["chunks"])
    return {"seconds": seconds, "tokens": tokens, "processor_began": processor_began}


CONTENDERS: dict[str, Callable[[Path, Path, int, int], dict[str, Any]]] = {
    "the tokenizer itself": tokenizer_itself,
    "prepare_data.py": prepared,
    "prepare_data.py --packing best_fit": prepared_best_fit,
    "datasets.map, padded": mapped,
    "litdata.optimize": litdata_optimized,
}


# -------------------------------------------------------------------------------- turns


def turn(name: str, folder: Path, cores: int, context: int) -> dict[str, Any]:
    """One contender in a process on so many cores: its report, its peak memory and the bytes that it leaves."""
    output = folder / "output"
    output.mkdir()
    words = [sys.executable, __file__, "--work", name, str(folder), str(output), str(cores), str(context)]
    environment = {**os.environ, "RAYON_NUM_THREADS": str(cores), "TOKENIZERS_PARALLELISM": str(cores > 1).lower()}
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    peak = [0]
    sampling = threading.Thread(target=sample, args=(process, peak))
    sampling.start()
    out, error = process.communicate()
    sampling.join()
    if process.returncode:
        last = (error.strip().splitlines() or ["?"])[-1]
        report: dict[str, Any] = {"error": last[:120].replace("|", "/")}
    else:
        left = sum(
            file.stat().st_size for file in output.rglob("*") if file.is_file() and "tokenizer" not in file.parts
        )
        report = {**json.loads(out.splitlines()[-1]), "peak_bytes": peak[0], "left_bytes": left}
    shutil.rmtree(output)
    return report


def sample(process: subprocess.Popen, peak: list[int]) -> None:
    """The most resident memory that a process and its descendants have together."""
    while process.poll() is None:
        peak[0] = max(peak[0], resident_bytes(process.pid))
        time.sleep(SAMPLE_SECONDS)


def resident_bytes(pid: int) -> int:
    total, todo = 0, [pid]
    with contextlib.suppress(OSError, ValueError):
        while todo:
            one = todo.pop()
            with contextlib.suppress(OSError, ValueError):
                total += int(Path(f"/proc/{one}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
                for task in Path(f"/proc/{one}/task").iterdir():
                    todo += map(int, (task / "children").read_text().split())
    return total


def work(name: str, folder: str, output: str, cores: str, context: str) -> None:
    """The process of a contender."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: int(cores)])
    report = CONTENDERS[name](Path(folder), Path(output), int(cores), int(context))
    report["processor_seconds"] = processor_seconds() - report.pop("processor_began")
    print(json.dumps(report), flush=True)


# --------------------------------------------------------------------------------- page


def table(reports: dict[str, list[dict[str, Any]]], text_bytes: int) -> str:
    first = reports["the tokenizer itself"]
    lines = [
        "| | seconds | MB/s of text | tokens/s | of the tokenizer | processor seconds | of the tokenizer | bytes a token | padding | peak memory, MiB |"
    ]
    lines.append("|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|")
    for name, rounds in reports.items():
        pairs = [(a, b) for a, b in zip(first, rounds) if "error" not in a and "error" not in b]
        if not pairs:
            lines.append(f"| {name} | {rounds[0].get('error', '')} | | | | | | | | |")
            continue
        seconds = statistics.median(one["seconds"] for one in rounds)
        rounds = [b for _, b in pairs]
        seconds = statistics.median(one["seconds"] for one in rounds)
        ratio = statistics.median(a["seconds"] / b["seconds"] for a, b in pairs)
        work = statistics.median(one["processor_seconds"] for one in rounds)
        of_work = statistics.median(a["processor_seconds"] / b["processor_seconds"] for a, b in pairs)
        last = rounds[-1]
        per_token = f"{last['left_bytes'] / last['tokens']:.2f}" if last["left_bytes"] else ""
        padding = f"{100 * last['padding']:.2f} %" if "padding" in last else ""
        peak = statistics.median(one["peak_bytes"] for one in rounds) / 2**20
        lines.append(
            f"| {name} | {seconds:.1f} | {text_bytes / seconds / 1e6:.2f} | {last['tokens'] / seconds:,.0f} | {ratio:.3f} |"
            f" {work:.1f} | {of_work:.3f} |"
            f" {per_token} | {padding} | {peak:,.0f} |"
        )
    return "\n".join(lines)


def page(options: argparse.Namespace, facts: dict, results: dict[int, dict[str, list]]) -> str:
    import datasets
    import tokenizers
    import transformers

    model = next((line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), "?")
    versions = {"tokenizers": tokenizers, "datasets": datasets, "transformers": transformers}
    lines = [
        "# Preparing data: how fast, beside what",
        "",
        f"- Command: `{shlex.join(['python', 'benchmarks/prepare.py', *sys.argv[1:]])}`",
        f"- Date: {datetime.date.today()}",
        f"- Hardware: {model}, {os.cpu_count()} cores; load average {options.load:.1f} at the start,"
        f" {os.getloadavg()[0]:.1f} at the end",
        f"- Versions: Python {platform.python_version()}, "
        + ", ".join(f"{name} {module.__version__}" for name, module in versions.items()),
        f"- Text: {facts['bytes'] / 1e6:,.0f} MB in {facts['documents']:,} documents, sources and documentation of installed"
        f" packages; byte-level BPE of {VOCABULARY:,} tokens trained on {facts.get('trained', facts['bytes']) / 1e6:,.0f} MB; rows of {options.context} tokens",
        f"- Rounds: {options.rounds}, in turns. Seconds and memory are medians, ratios medians of the same round. Start-up of the"
        " contender's process (imports) is left out, that of the processes it starts is not. Processor seconds are those of all"
        " processes, and say more than seconds where others use the machine",
        "",
    ]
    for cores, reports in results.items():
        rows = [one["rows_seconds"] for one in reports["prepare_data.py"] if "rows_seconds" in one]
        lines += [f"## {cores} core{'s' * (cores > 1)}", "", table(reports, facts["bytes"]), ""]
        if rows:
            seconds = statistics.median(rows)
            lines += [
                f"The serial part of prepare_data.py, from encoded pieces to a dataset, takes {seconds:.2f} s:"
                f" {facts['bytes'] / 1e6 / seconds:,.0f} MB of text a second.",
                "",
            ]
    return "\n".join(lines)


def main() -> None:
    if sys.argv[1:2] == ["--work"]:
        work(*sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=100, help="of text (default: 100)")
    parser.add_argument("--measure_megabytes", type=int, help="measure on every n-th document, so much of the text")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cores", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--context", type=int, default=2048, help="tokens in a row (default: 2048)")
    parser.add_argument("--only", nargs="+", default=list(CONTENDERS), help="contenders (default: all)")
    parser.add_argument("--folder", help="keep the corpus here and take it from here (default: a temporary folder)")
    options = parser.parse_args()
    options.load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(options.folder or temporary)
        folder.mkdir(exist_ok=True)
        if not (folder / "facts.json").is_file():
            make_corpus(folder, options.megabytes * 10**6)
        if options.measure_megabytes:
            folder = sample_of(folder, options.measure_megabytes * 10**6)
        facts: dict = json.loads((folder / "facts.json").read_text())
        results: dict[int, dict[str, list]] = {cores: {name: [] for name in options.only} for cores in options.cores}
        for number in range(options.rounds):
            for cores in options.cores:
                for name in options.only if number % 2 == 0 else options.only[::-1]:
                    report: Optional[dict] = turn(name, folder, cores, options.context)
                    results[cores][name].append(report)
                    print(f"round {number + 1}, {cores} cores, {name}: {report}", file=sys.stderr, flush=True)
    print(page(options, facts, results))


if __name__ == "__main__":
    main()
