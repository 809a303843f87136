"""A base model of English and code goes on with Basque: what it learns and what it forgets, with
and without replay.

    apt-get download libreoffice-help-en-us libreoffice-help-eu python3.11-doc
    for package in *.deb; do dpkg -x $package packages; done
    python benchmarks/continued_pretraining.py base packages WORK  # prepares, and trains for hours
    python benchmarks/continued_pretraining.py runs WORK  # each run of the table, one by one
    python benchmarks/continued_pretraining.py page WORK  # that of docs/continued_pretraining.md

Each stage goes on where it was. All texts are of packages of Debian 12: LibreOffice's help in
English and Basque, Python's documentation, and the standard library's code. The help pages are
translations of each other, so what differs is the language. `python -m fabric_llm.report
WORK/replay-*` draws the runs.
"""

from __future__ import annotations

import argparse
import contextlib
import html
import json
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import inputs, page

VOCABULARY, CONTEXT = 8192, 256
# folders of the standard library
NO_CODE = ("test", "tests", "idle_test", "site-packages", "dist-packages")
MODEL = {
    **inputs.llama(256, 704, 6, 4, tie_word_embeddings=True, vocab_size=VOCABULARY),
    **{"max_position_embeddings": CONTEXT, "bos_token_id": 0, "eos_token_id": 0},
}
COMMON = {"global_batch_size": 32, "micro_batch_size": 32, "eval_iters": 4, "eval_batch_size": 64}
BASE = {"lr": 3e-3, "warmup_steps": 100, "max_step": 1800, "lr_schedule": "wsd", "decay_steps": 360}
LAST = 5  # checkpoints of a constant rate that are averaged
CONTINUED = {
    **{"max_step": 160, "lr": 1e-3, "min_lr": 1e-4, "warmup_steps": 10},
    **{"eval_step_interval": 20, "save_step_interval": 20},
}
OLD = {"english": 0.6, "code": 0.4}  # what is replayed, in the shares of the base model's own data
NOTHING = "english:9,code:9"  # a budget that is never reached: for the probe
SETS = ("basque", "english", "code")
TITLES = {
    "replay-0": "no replay",
    "replay-5": "5 % replay",
    "replay-20": "20 % replay",
    "replay-50": "50 % replay",
    "constant-20": "20 % replay, constant rate",
}


def main() -> None:
    stages = {"base": train_base, "runs": continue_from_base, "page": print_page}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("stage", choices=stages)
    parser.add_argument("folders", type=Path, nargs="+", help="WORK; of base: PACKAGES WORK")
    parser.add_argument("--precision", default="32-true", help="bf16-true is faster on a GPU")
    given = parser.parse_args()
    names = "PACKAGES WORK" if given.stage == "base" else "WORK"
    if len(given.folders) != len(names.split()):
        parser.error(f"{given.stage} takes {names}.")
    COMMON["precision"] = given.precision
    stages[given.stage](*(folder.resolve() for folder in given.folders))


def text_of(page: str) -> str:
    """The text of a page of HTML, without menus, scripts and styles."""
    body = re.sub(r"(?is)<(head|script|style|nav|aside|footer)\b.*?</\1>", " ", page)
    pieces = (" ".join(html.unescape(piece).split()) for piece in re.split(r"<[^>]*>", body))
    return "\n".join(filter(None, pieces))


def text_of_pages(folder: Path, file: Path) -> Path:
    """Write the text of all pages below a folder as JSON lines."""
    file.parent.mkdir(parents=True, exist_ok=True)
    pages = (text_of(path.read_text(errors="replace")) for path in sorted(folder.rglob("*.html")))
    file.write_text("".join(json.dumps({"text": page}) + "\n" for page in pages))
    return file


def prepare(packages: Path, work: Path) -> None:
    """Datasets of each text; that of `old`, English and code, is only there for its tokenizer,
    which all have."""
    help_pages = packages / "usr/share/libreoffice/help"
    [sources, *_] = sorted((packages / "usr/share/doc").glob("python3*/html/_sources"))
    basque = [text_of_pages(help_pages / "eu/text", work / "text" / "basque.jsonl")]
    english = [text_of_pages(help_pages / "en-US/text", work / "text" / "english.jsonl"), sources]
    code = [sysconfig.get_path("stdlib")]
    texts = {
        "old": (english + code, ["*.txt", "*.py"]),
        "english": (english, ["*.txt"]),
        "code": (code, ["*.py"]),
        "basque": (basque, ["*.jsonl"]),
    }
    common = {"context_length": CONTEXT, "packing": "best_fit", "validation_fraction": 0.05}
    tokenizer: dict[str, object] = {"train_tokenizer": VOCABULARY}
    for name, (folders, patterns) in texts.items():
        output = work / "data" / name
        if not output.exists():
            words = ["--input", *folders, "--pattern", *patterns, "--exclude", *NO_CODE]
            inputs.call("prepare_data.py", *words, output=output, **common, **tokenizer)
        tokenizer = {"tokenizer": work / "data" / "old" / "tokenizer"}


def train_base(packages: Path, work: Path) -> None:
    prepare(packages, work)
    inputs.write_llama(work / "model", **MODEL)
    run = {"model_name": work / "model", "data_mix": mix_of(work, OLD), "keep_last": 1}
    run |= {"eval_data": f"basque={work}/data/basque"}
    run |= {"eval_step_interval": 200, "save_step_interval": 100}
    inputs.train(work / "base", resume="auto", **COMMON, **BASE, **run)


def mix_of(work: Path, shares: dict[str, float]) -> str:
    return ",".join(f"{name}={work}/data/{name}:{share:.6g}" for name, share in shares.items())


def runs_of(work: Path) -> dict[str, dict[str, object]]:
    """Name of a run -> its flags, but for those that all have."""
    runs: dict[str, dict[str, object]] = {}
    for percent in (0, 5, 20, 50):
        shares = {"basque": 1 - percent / 100}
        for name, share in OLD.items():
            shares[name] = share * percent / 100
        runs[f"replay-{percent}"] = {"data_mix": mix_of(work, shares), "forgetting_budget": NOTHING}
    runs["constant-20"] = {**runs["replay-20"], "lr_schedule": "constant"}
    stop = {"forgetting_budget": "english:0.25", "forgetting_action": "stop"}
    runs["stopped"] = {**runs["replay-0"], **stop}
    rewind = {"forgetting_budget": "replay:0.25", "forgetting_action": "rewind"}
    replay = {"replay": work / "data" / "english", "replay_fraction": 0.1}
    runs["rewound"] = {"train_data_dir": work / "data" / "basque", **replay, **rewind}
    return runs


def continue_from_base(work: Path) -> None:
    base = work / "base" / f"step-{BASE['max_step']:08d}"
    for name, flags in runs_of(work).items():
        # one of them is to end with exit code 76
        with contextlib.suppress(subprocess.CalledProcessError):
            given = {"model_name": base, "resume": "auto", **COMMON, **CONTINUED}
            inputs.train(work / name, **given, **flags)
        if name == "constant-20" and not (work / "averaged").exists():
            inputs.call("fabric_llm.average", work / name, last=LAST, output=work / "averaged")


def evaluations(run: Path) -> list[dict[str, dict[str, float]]]:
    """Of each evaluation of a run what every dataset gave."""
    return [line["eval"] for line in inputs.log(run, "eval")]


def print_page(work: Path) -> None:
    results = {"base model": evaluations(work / "replay-20")[0]}
    for name, title in TITLES.items():
        results[title] = evaluations(work / name)[-1]
    lines = []
    for title, of in results.items():
        bits = [f"{of[name]['bits_per_byte']:.3f}" for name in SETS]
        lines.append([title, *bits, f"{of['copy']['loss']:.3f}"])
    # The note of the average has nats a token: a set's tokens and bytes are those of the run.
    nats = json.loads((work / "averaged" / "average.json").read_text())["eval_loss"]
    last = results[TITLES["constant-20"]]
    bits = (nats[name] * last[name]["bits_per_byte"] / last[name]["loss"] for name in SETS)
    lines.append([f"the same, last {LAST} checkpoints averaged", *(f"{one:.3f}" for one in bits)])
    print(page.table(["run", *SETS, "copy, nats"], lines))
    for name in ("stopped", "rewound"):
        status = json.loads((work / name / "STATUS.json").read_text())
        print(f"\n{name}: exit code {status['code']}, step {status['step']}: {status['reason']}")
    print(f"- rewound, at the end: {evaluations(work / 'rewound')[-1]}")


if __name__ == "__main__":
    main()
