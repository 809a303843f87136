"""How fast prepare_data.py tokenizes, beside the tokenizer itself and other builders of datasets.

    python benchmarks/prepare.py --megabytes 100 --rounds 3 --cores 1 2 --markdown docs/results/prepare.md

The text is that of this machine: sources and documentation of the standard library and of installed packages. A byte-level
BPE of 32,000 tokens is trained on it. Each contender is a process of its own, which measures after its imports; they take
turns, so that a slow minute of the machine meets all of them. Ratios are medians over rounds of the same round.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import os
import resource
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

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import page  # noqa: E402
from benchmarks.turns import alternate  # noqa: E402

SUFFIXES = (".py", ".md", ".rst", ".txt", ".pyi", ".html", ".h")
SAMPLE_SECONDS = 0.05
VOCABULARY = 32_000
COLUMNS = {
    "seconds": lambda row: f"{page.median(row):.1f}",
    "MB/s of text": lambda row: f"{row['text_bytes'] / page.median(row) / 1e6:.2f}",
    "tokens/s": lambda row: f"{row['tokens'] / page.median(row):,.0f}",
    "of the tokenizer": page.number("times", ".3f"),
    "processor seconds": lambda row: f"{statistics.median(row['processor_seconds']):.1f}",
    "of its processor seconds": page.number("times_processor", ".3f"),
    "bytes a token": lambda row: f"{row['left_bytes'] / row['tokens']:.2f}" if row["left_bytes"] else "",
    "padding": page.number("padding", ".2%"),
    "peak memory, MiB": lambda row: f"{statistics.median(row['peak_bytes']) / page.MIB:,.0f}",
}
EACH_ROUND = ("seconds", "processor_seconds", "peak_bytes")  # what a row has a list of
Contender = tuple[Callable[[], Any], Callable[[Any], dict[str, Any]]]  # what is timed; what its result is reported as


def main(argv: Optional[list[str]] = None) -> int:
    if sys.argv[1:2] == ["--work"]:
        return work(*sys.argv[2:])
    parser = page.parser(__doc__, rounds=3)
    parser.add_argument("--megabytes", type=int, default=100, help="of text, on which the tokenizer is trained")
    parser.add_argument("--measure_megabytes", type=int, help="measure on every n-th document, so much of the text")
    parser.add_argument("--cores", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--context", type=int, default=2048, help="tokens in a row")
    options = page.parse(parser, argv)
    with tempfile.TemporaryDirectory() as temporary:
        folder, measured = Path(temporary), options.measure_megabytes or options.megabytes
        facts = make_corpus(folder, options.megabytes * 10**6, max(1, round(options.megabytes / measured)))
        known = {"error": None, "text_bytes": facts["bytes"], **{key: [] for key in EACH_ROUND}}
        rows = [{"name": name, "cores": n, **copy.deepcopy(known)} for n in options.cores for name in CONTENDERS]
        for row in alternate(rows, options.rounds):
            report = turn(row["name"], folder, row["cores"], options.context)
            page.progress(f"{row['cores']} cores, {row['name']}: {report}")
            for key, value in report.items():
                row[key] = [*row[key], value] if key in EACH_ROUND else value
    text = f"{facts['bytes'] / 1e6:,.0f} MB in {facts['documents']:,} documents, sources and documentation of installed packages"
    notes = [
        f"Text: {text}; byte-level BPE of {VOCABULARY:,} tokens trained on {facts['trained'] / 1e6:,.0f} MB;"
        f" rows of {options.context} tokens",
        f"Rounds: {options.rounds}, in turns. Seconds and memory are medians, ratios medians of the same round. Start-up of"
        " the contender's process (imports) is left out, that of the processes it starts is not. Processor seconds are those"
        " of all processes, and say more than seconds where others use the machine",
    ]
    body = "\n\n".join(section(cores, [row for row in rows if row["cores"] == cores]) for cores in options.cores)
    page.write("prepare.py", "Preparing data: how fast, beside what", notes, options, body, rows)
    return 0


def section(cores: int, rows: list[page.Row]) -> str:
    """The heading and table for so many cores."""
    first = rows[0]
    for row in rows:
        pairs = zip(first["processor_seconds"], row["processor_seconds"])
        row["times_processor"] = None if row["error"] else statistics.median(a / b for a, b in pairs)
    return f"## {cores} core{'s' * (cores > 1)}\n\n{page.compare(rows, COLUMNS, beside=first['name'])}"


def library_texts(most_bytes: int) -> Iterator[str]:
    """Files of text on this machine, each once."""
    seen, total = set(), 0
    for root in (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), "/usr/share/doc", "/usr/include"):
        for path in sorted(path for path in Path(root).rglob("*") if path.suffix in SUFFIXES):
            try:
                text = "" if path.is_symlink() else path.read_bytes().decode()
            except (OSError, UnicodeDecodeError):
                continue
            if not text.strip() or hash(text) in seen or len(text) > 2_000_000:
                continue
            seen.add(hash(text))
            total += len(text.encode())
            yield text
            if total >= most_bytes:
                return


def make_corpus(folder: Path, most_bytes: int, every: int) -> dict[str, int]:
    """A tokenizer trained on the text, and every n-th document of it in corpus.jsonl. Returns what there is."""
    from fabric_llm.prepare.tokenizer import train_byte_level_bpe

    texts = list(library_texts(most_bytes))
    train_byte_level_bpe(texts, vocab_size=VOCABULARY).save_pretrained(folder / "tokenizer")
    kept = texts[::every]
    with open(folder / "corpus.jsonl", "w") as file:
        file.writelines(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in kept)
    count = {"trained": sum(len(text.encode()) for text in texts), "documents": len(kept)}
    return {**count, "bytes": sum(len(text.encode()) for text in kept)}


def tokenizer_itself(folder: Path, output: Path, cores: int, context: int) -> Contender:
    """encode_batch_fast of the text in memory, in batches of 1000. Nothing is kept."""
    from tokenizers import Tokenizer

    backend = Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json"))
    with open(folder / "corpus.jsonl") as file:
        texts = [json.loads(line)["text"] for line in file]

    def encode() -> int:
        batches = (texts[at : at + 1000] for at in range(0, len(texts), 1000))
        return sum(len(one) for batch in batches for one in backend.encode_batch_fast(batch, add_special_tokens=False))

    return encode, lambda tokens: {"tokens": tokens}


def prepared(folder: Path, output: Path, cores: int, context: int, packing: str = "concat") -> Contender:
    """prepare_data.py, from a .jsonl file to a published dataset."""
    from fabric_llm.prepare import prepare

    def report(manifest: dict[str, Any]) -> dict[str, Any]:
        splits = manifest["splits"].values()
        padding = sum(split.get("padding_tokens", 0) for split in splits) / sum(s["rows"] * context for s in splits)
        return {"tokens": sum(split["tokens"] for split in splits), "padding": padding}

    given = {"inputs": [folder / "corpus.jsonl"], "output": output, "tokenizer": str(folder / "tokenizer")}
    given |= {"context_length": context, "packing": packing, "num_workers": cores}
    return functools.partial(prepare.prepare, **given), report


def mapped(folder: Path, output: Path, cores: int, context: int) -> Contender:
    """datasets.map with the tokenizer, each document padded to rows of the context, nothing truncated away."""
    import datasets
    from transformers import AutoTokenizer

    datasets.disable_progress_bars()
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    given = {"truncation": True, "max_length": context, "padding": "max_length", "return_overflowing_tokens": True}
    file, cache = str(folder / "corpus.jsonl"), str(output / "cache")

    def rows(batch: dict) -> dict:
        made = tokenizer([text + tokenizer.eos_token for text in batch["text"]], **given)
        return {"input_ids": made["input_ids"], "attention_mask": made["attention_mask"]}

    def build() -> Any:
        loaded = datasets.load_dataset("json", data_files=file, split="train", cache_dir=cache)
        done = loaded.map(rows, batched=True, num_proc=cores if cores > 1 else None, remove_columns=["text"])
        done.save_to_disk(output / "saved")
        return done

    def report(done: Any) -> dict[str, Any]:
        shutil.rmtree(cache)
        tokens = sum(int(sum(map(sum, batch["attention_mask"]))) for batch in done.iter(1000))
        return {"tokens": tokens, "padding": 1 - tokens / (len(done) * context)}

    return build, report


CONTENDERS: dict[str, Callable[[Path, Path, int, int], Contender]] = {
    "the tokenizer itself": tokenizer_itself,
    "prepare_data.py": prepared,
    "prepare_data.py --packing best_fit": functools.partial(prepared, packing="best_fit"),
    "datasets.map, padded": mapped,
}


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
    left = sum(file.stat().st_size for file in output.rglob("*") if file.is_file() and "tokenizer" not in file.parts)
    shutil.rmtree(output)
    if process.returncode:
        return {"error": (error.strip().splitlines() or ["?"])[-1][:120].replace("|", "/")}
    return {**json.loads(out.splitlines()[-1]), "peak_bytes": peak[0], "left_bytes": left}


def sample(process: subprocess.Popen, peak: list[int]) -> None:
    """The most resident memory that a process and its descendants have together."""
    while process.poll() is None:
        peak[0] = max(peak[0], resident_bytes(process.pid))
        time.sleep(SAMPLE_SECONDS)


def resident_bytes(pid: int) -> int:
    """Of a process and its descendants; one that has ended has none."""
    total = 0
    with contextlib.suppress(OSError, ValueError):
        total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        for task in Path(f"/proc/{pid}/task").iterdir():
            total += sum(map(resident_bytes, map(int, (task / "children").read_text().split())))
    return total


def work(name: str, folder: str, output: str, cores: str, context: str) -> int:
    """The process of a contender."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: int(cores)])
    run, report = CONTENDERS[name](Path(folder), Path(output), int(cores), int(context))
    processor_began, began = processor_seconds(), time.perf_counter()
    result = run()
    seconds = {"seconds": time.perf_counter() - began, "processor_seconds": processor_seconds() - processor_began}
    print(json.dumps({**seconds, **report(result)}), flush=True)
    return 0


def processor_seconds() -> float:
    """Of this process and those of its children that have ended."""
    times = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in times)


if __name__ == "__main__":
    sys.exit(main())
