"""How fast prepare_data.py tokenizes, beside the tokenizer itself and other builders of datasets.

    python benchmarks/prepare.py --megabytes 100 --rounds 3 --cores 1 2 --markdown prepare.md

Each contender is a process of its own, which measures after its imports.
"""

import functools
import json
import os
import shutil
import statistics
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

# Each contender imports what it needs, whose memory counts as its own.
from benchmarks import memory, page
from benchmarks.turns import alternate

SUFFIXES = (".py", ".md", ".rst", ".txt", ".pyi", ".html", ".h")
SAMPLE_SECONDS = 0.05
VOCABULARY, CONTEXT = 32_000, 2048
MAX_CHARACTERS = 2_000_000  # of a file
COLUMNS = {
    "seconds": lambda row: f"{page.median(row):.1f}",
    "MB/s of text": lambda row: f"{row['text_bytes'] / page.median(row) / 1e6:.2f}",
    "of the tokenizer": page.number("times", ".3f"),
    "bytes a token": page.number("bytes_a_token"),
    "padding": page.number("padding", ".2%"),
    "peak memory, MiB": lambda row: f"{statistics.median(row['peaks']) / page.MIB:,.0f}",
}


def main() -> None:
    if sys.argv[1:2] == ["--work"]:
        work(*sys.argv[2:])
        return
    parser = page.parser(__doc__, rounds=3)
    parser.add_argument("--megabytes", type=int, default=100, help="of text")
    parser.add_argument("--cores", type=int, nargs="+", default=[1, 2])
    options = page.parse(parser)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        documents, size = make_corpus(folder, options.megabytes * 10**6)
        rows = [
            {"name": name, "cores": cores, "text_bytes": size, "seconds": [], "peaks": []}
            for cores in options.cores
            for name in CONTENDERS
        ]
        for row in alternate(rows, options.rounds):
            take_turn(row, folder)
            page.progress(f"{row['cores']} cores, {row['name']}: {row['seconds'][-1]:.1f} s")
    notes = [
        f"Text: {size / 1e6:,.0f} MB in {documents:,} documents, sources and documentation of "
        f"installed packages; byte-level BPE of {VOCABULARY:,} tokens trained on it; rows of "
        f"{CONTEXT} tokens",
        f"Medians of {options.rounds} rounds, in turns; ratios are medians of the same round. "
        "Start-up (imports) of the contender's process is left out, that of the processes it "
        "starts is not",
    ]
    tables = []
    for cores in options.cores:
        of_cores = [row for row in rows if row["cores"] == cores]
        table = page.compare(of_cores, COLUMNS, beside="the tokenizer itself")
        tables += [f"## {cores} core{'s' * (cores > 1)}", table]
    page.write("Preparing data: how fast, beside what", notes, options, tables, rows)


def make_corpus(folder: Path, most_bytes: int) -> tuple[int, int]:
    """Write files of text on this machine into corpus.jsonl, each once, and a tokenizer trained on
    them. Returns (documents, bytes)."""
    from fabric_llm.prepare.tokenizer import train_byte_level_bpe

    python = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"))
    texts: dict[str, int] = {}  # each with its bytes
    for root in (*python, "/usr/share/doc", "/usr/include"):
        for path in sorted(Path(root).rglob("*")):
            with suppress(OSError, UnicodeDecodeError):
                is_text = path.suffix in SUFFIXES and sum(texts.values()) < most_bytes
                text = path.read_bytes().decode() if is_text else ""
                if text.strip() and len(text) <= MAX_CHARACTERS:
                    texts[text] = len(text.encode())
    train_byte_level_bpe([*texts], vocab_size=VOCABULARY).save_pretrained(folder / "tokenizer")
    with open(folder / "corpus.jsonl", "w") as file:
        file.writelines(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
    return len(texts), sum(texts.values())


def tokenizer_itself(folder: Path, output: Path, cores: int) -> dict[str, Any]:
    """encode_batch_fast of the text in memory, in batches of 1000. Nothing is kept."""
    from tokenizers import Tokenizer

    backend = Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json"))
    with open(folder / "corpus.jsonl") as file:
        texts = [json.loads(line)["text"] for line in file]
    tokens, began = 0, time.perf_counter()
    for at in range(0, len(texts), 1000):
        batch = backend.encode_batch_fast(texts[at : at + 1000], add_special_tokens=False)
        tokens += sum(map(len, batch))
    return {"seconds": time.perf_counter() - began, "tokens": tokens}


def prepared(folder: Path, output: Path, cores: int, packing: str = "concat") -> dict[str, Any]:
    """prepare_data.py, from a .jsonl file to a published dataset."""
    from fabric_llm.prepare import checks, prepare
    from prepare_arguments import PrepareArguments

    given = {"input": [folder / "corpus.jsonl"], "tokenizer": str(folder / "tokenizer")}
    given |= {"context_length": CONTEXT, "packing": packing, "num_workers": cores}
    began = time.perf_counter()
    flags = PrepareArguments(output=str(output), **given)
    splits = prepare.prepare(flags, checks.check(flags))["splits"].values()
    seconds = time.perf_counter() - began
    padding = sum(split.get("padding_tokens", 0) for split in splits)
    places = CONTEXT * sum(split["rows"] for split in splits)
    tokens = sum(split["tokens"] for split in splits)
    return {"seconds": seconds, "tokens": tokens, "padding": padding / places}


def mapped(folder: Path, output: Path, cores: int) -> dict[str, Any]:
    """datasets.map with the tokenizer, each document padded to rows of the context, nothing
    truncated away."""
    import datasets
    from transformers import AutoTokenizer

    datasets.disable_progress_bars()
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    given = {"truncation": True, "max_length": CONTEXT, "padding": "max_length"}
    given["return_overflowing_tokens"] = True
    file, cache = str(folder / "corpus.jsonl"), str(output / "cache")
    processes = cores if cores > 1 else None

    def rows(batch: dict) -> dict:
        made = tokenizer([text + tokenizer.eos_token for text in batch["text"]], **given)
        return {key: made[key] for key in ("input_ids", "attention_mask")}

    began = time.perf_counter()
    loaded = datasets.load_dataset("json", data_files=file, split="train", cache_dir=cache)
    done = loaded.map(rows, batched=True, num_proc=processes, remove_columns=["text"])
    done.save_to_disk(output / "saved")
    seconds = time.perf_counter() - began
    shutil.rmtree(cache)
    tokens = sum(int(sum(map(sum, batch["attention_mask"]))) for batch in done.iter(1000))
    padding = 1 - tokens / (len(done) * CONTEXT)
    return {"seconds": seconds, "tokens": tokens, "padding": padding}


CONTENDERS: dict[str, Callable[[Path, Path, int], dict[str, Any]]] = {
    "the tokenizer itself": tokenizer_itself,
    "prepare_data.py": prepared,
    "prepare_data.py --packing best_fit": functools.partial(prepared, packing="best_fit"),
    "datasets.map, padded": mapped,
}


def take_turn(row: page.Row, folder: Path) -> None:
    """Of one contender, in a process on so many cores. Adds its report, its peak memory and the
    bytes that it leaves to the row."""
    output, report_file, cores = folder / "output", folder / "report", str(row["cores"])
    output.mkdir()
    held: list[int] = []
    command = [sys.executable, __file__, "--work", row["name"], str(folder), str(output), cores]
    threads = {"RAYON_NUM_THREADS": cores, "TOKENIZERS_PARALLELISM": str(cores != "1").lower()}
    with report_file.open("w") as file:
        settings = {"env": {**os.environ, **threads}, "stdout": file}
        code = memory.watched(command, SAMPLE_SECONDS, lambda now: held.append(now.pss), **settings)
    assert code == 0, row["name"]
    files = [path for path in output.rglob("*") if path.is_file() and "tokenizer" not in path.parts]
    left = sum(path.stat().st_size for path in files)
    shutil.rmtree(output)
    report = json.loads(report_file.read_text().splitlines()[-1])
    row["seconds"].append(report.pop("seconds"))
    row["peaks"].append(max(held))
    row |= {**report, "bytes_a_token": left / report["tokens"] if left else None}


def work(name: str, folder: str, output: str, cores: str) -> None:
    """The process of a contender."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: int(cores)])
    print(json.dumps(CONTENDERS[name](Path(folder), Path(output), int(cores))), flush=True)


if __name__ == "__main__":
    main()
