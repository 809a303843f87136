"""A base model of English and code goes on with Basque: what it learns and what it forgets, with and without replay.

    apt-get download libreoffice-help-en-us libreoffice-help-eu python3.11-doc
    for package in *.deb; do dpkg -x $package packages; done
    python benchmarks/continued_pretraining.py base packages WORK    # prepare the data and train the base model (hours)
    python benchmarks/continued_pretraining.py runs WORK             # each run of the table, one after the other
    python benchmarks/continued_pretraining.py page WORK             # the table of docs/continued_pretraining.md

Each stage goes on where it was. All texts are of packages of Debian 12: LibreOffice's help in English and Basque, Python's
documentation, and the standard library's code. The help pages are translations of each other, so what differs is the
language. `python -m fabric_llm.report WORK/replay-*` draws the runs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import sysconfig
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import inputs, page  # noqa: E402

VOCABULARY, CONTEXT = 8192, 256
NO_CODE = ("test", "tests", "idle_test", "site-packages", "dist-packages")  # folders of the standard library
MODEL = {
    **{"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 6, "num_attention_heads": 4},
    **{"vocab_size": VOCABULARY, "max_position_embeddings": CONTEXT, "tie_word_embeddings": True},
    **{"bos_token_id": 0, "eos_token_id": 0},
}
COMMON = {"global_batch_size": 32, "micro_batch_size": 32, "eval_iters": 4, "eval_batch_size": 64}
BASE = {"lr": 3e-3, "warmup_steps": 100, "max_step": 1800, "lr_schedule": "wsd", "decay_steps": 360}
SELF_TOKENS = 600_000
LAST = 5  # checkpoints of a constant rate that are averaged
CONTINUED = {
    **{"max_step": 160, "lr": 1e-3, "min_lr": 1e-4, "warmup_steps": 10},
    **{"eval_step_interval": 20, "save_step_interval": 20},
}
OLD = {"english": 0.6, "code": 0.4}  # what is replayed, in the shares of the base model's own data
NOTHING = "english:9,code:9"  # a budget that is never reached: for the probe
SETS = ("basque", "english", "code")
SAID = {
    "replay-0": "no replay",
    "replay-5": "5 % replay",
    "replay-20": "20 % replay",
    "replay-50": "50 % replay",
    "self-20": "20 % of the model's own samples",
    "constant-20": "20 % replay, constant rate",
    "averaged": f"the same, last {LAST} checkpoints averaged",
}


def main() -> None:
    stages = {"base": train_base, "runs": continue_from_base, "page": print_page}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("stage", choices=stages)
    parser.add_argument("folders", type=Path, nargs="+", help="WORK; of base: PACKAGES WORK")
    parser.add_argument("--precision", default="32-true", help="of train.py; bf16-true is faster on a GPU")
    given = parser.parse_args()
    if len(given.folders) != 1 + (given.stage == "base"):
        parser.error(f"{given.stage} takes {'PACKAGES WORK' if given.stage == 'base' else 'WORK'}.")
    COMMON["precision"] = given.precision
    stages[given.stage](*(folder.resolve() for folder in given.folders))


def call(script: str, *words: object, **flags: object) -> None:
    """A command of this repository, printed as one would type it."""
    command = [*(["-m"] if script.startswith("fabric_llm.") else []), script, *map(str, words), *inputs.flags(**flags)]
    print("$ python", *command, flush=True)
    subprocess.run([sys.executable, *command], cwd=ROOT, check=True)


class Page(HTMLParser):
    """The text of a page, without menus, scripts and styles."""

    left_out = {"head", "script", "style", "nav", "aside", "footer"}

    def __init__(self, page: str) -> None:
        super().__init__()
        self.parts, self.depth = [], 0
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list) -> None:
        self.depth += tag in self.left_out

    def handle_endtag(self, tag: str) -> None:
        self.depth -= tag in self.left_out

    def handle_data(self, data: str) -> None:
        if not self.depth and data.strip():
            self.parts.append(" ".join(data.split()))


def text_of_pages(folder: Path, file: Path) -> Path:
    """Write the text of all pages below a folder as JSON lines."""
    file.parent.mkdir(parents=True, exist_ok=True)
    pages = (Page(path.read_text(errors="replace")) for path in sorted(folder.rglob("*.html")))
    file.write_text("".join(json.dumps({"text": "\n".join(page.parts)}) + "\n" for page in pages))
    return file


def prepare(packages: Path, work: Path) -> None:
    """Datasets of each text; that of `old`, English and code, is only there for its tokenizer, which all have."""
    help_pages = packages / "usr/share/libreoffice/help"
    [sources, *_] = sorted((packages / "usr/share/doc").glob("python3*/html/_sources"))
    basque = [text_of_pages(help_pages / "eu/text", work / "text" / "basque.jsonl")]
    english = [text_of_pages(help_pages / "en-US/text", work / "text" / "english.jsonl"), sources]
    code = [sysconfig.get_path("stdlib")]
    inputs_of = {"old": english + code, "english": english, "code": code, "basque": basque}
    patterns = {"old": ["*.txt", "*.py"], "english": ["*.txt"], "code": ["*.py"], "basque": ["*.jsonl"]}
    common = {
        "context_length": CONTEXT,
        "packing": "best_fit",
        "validation_fraction": 0.05,
        "train_tokenizer": VOCABULARY,
    }
    for corpus, folders in inputs_of.items():
        if not (work / "data" / corpus).exists():
            words = ["--input", *folders, "--pattern", *patterns[corpus], "--exclude", *NO_CODE]
            call("prepare_data.py", *words, output=work / "data" / corpus, **common)
        common.pop("train_tokenizer", None)
        common["tokenizer"] = work / "data" / "old" / "tokenizer"


def train_base(packages: Path, work: Path) -> None:
    prepare(packages, work)
    inputs.write_llama(work / "model", **MODEL)
    evaluated = {"eval_data": f"basque={work}/data/basque", "eval_step_interval": 200, "save_step_interval": 100}
    run = {"model_name": work / "model", "data_mix": mix_of(work, OLD), "keep_last": 1}
    run |= {"output_dir": work, "run_name": "base", "resume": "auto"}
    call("train.py", **COMMON, **BASE, **evaluated, **run)


def mix_of(work: Path, shares: dict[str, float]) -> str:
    return ",".join(f"{name}={work}/data/{name}:{share:.6g}" for name, share in shares.items())


def runs_of(work: Path) -> dict[str, dict[str, object]]:
    """Name of a run -> its flags, but for those that all have."""
    runs: dict[str, dict[str, object]] = {}
    for percent in (0, 5, 20, 50):
        shares = {"basque": 1 - percent / 100, **{name: part * percent / 100 for name, part in OLD.items()}}
        runs[f"replay-{percent}"] = {"data_mix": mix_of(work, shares), "forgetting_budget": NOTHING}
    old = ",".join(f"{name}={work}/data/{name}" for name in OLD)
    runs["self-20"] = {"data_mix": mix_of(work, {"basque": 0.8, "self": 0.2}), "eval_data": old}
    runs["self-20"]["forgetting_budget"] = NOTHING
    runs["constant-20"] = {**runs["replay-20"], "lr_schedule": "constant"}
    runs["stopped"] = {**runs["replay-0"], "forgetting_budget": "english:0.25", "forgetting_action": "stop"}
    replay = {"train_data_dir": work / "data" / "basque", "replay": work / "data" / "english", "replay_fraction": 0.1}
    runs["rewound"] = {**replay, "forgetting_budget": "replay:0.25", "forgetting_action": "rewind"}
    return runs


def continue_from_base(work: Path) -> None:
    base = work / "base" / f"step-{BASE['max_step']:08d}"
    for name, flags in runs_of(work).items():
        if name == "self-20" and not (work / "data" / "self").exists():
            given = {"tokens": SELF_TOKENS, "context_length": CONTEXT, "output": work / "data" / "self"}
            call("prepare_data.py", self_replay=base, packing="best_fit", validation_fraction=0.05, **given)
        status = work / name / "STATUS.json"
        if not status.exists() or json.loads(status.read_text())["code"] not in (0, 76):
            run = {"output_dir": work, "run_name": name, "resume": "auto"}
            with contextlib.suppress(subprocess.CalledProcessError):  # one of them is to end with exit code 76
                call("train.py", model_name=base, **COMMON, **CONTINUED, **flags, **run)
        if name == "constant-20" and not (work / "averaged").exists():
            call("fabric_llm.average", work / name, last=LAST, output=work / "averaged")


def evaluations(run: Path) -> list[dict[str, Any]]:
    """The evaluation lines of a run."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "eval" in line]


def of_sets(line: dict[str, Any], key: str = "bits_per_byte") -> dict[str, float]:
    return {name: one[key] for name, one in line["eval"].items() if key in one}


def of_average(work: Path) -> dict[str, float]:
    """Bits per byte of the average, whose note has nats a token: a set's tokens and bytes are those of the run."""
    last = evaluations(work / "constant-20")[-1]
    note = json.loads((work / "averaged" / "average.json").read_text())
    return {name: note["eval_loss"][name] * bits / of_sets(last, "loss")[name] for name, bits in of_sets(last).items()}


def print_page(work: Path) -> None:
    ends = {said: evaluations(work / name)[-1] for name, said in SAID.items() if name != "averaged"}
    shown = {"base model": evaluations(work / "replay-20")[0], **ends}
    lines = [[said, *bits_of(of_sets(line)), f"{line['eval']['copy']['loss']:.3f}"] for said, line in shown.items()]
    lines.append([SAID["averaged"], *bits_of(of_average(work))])
    print(page.table(["run", *SETS, "copy, nats"], lines))
    for name in ("stopped", "rewound"):
        status = json.loads((work / name / "STATUS.json").read_text())
        print(f"\n{name}: exit code {status['code']}, step {status['step']}: {status['reason']}")
    for line in map(json.loads, (work / "rewound" / "metrics.jsonl").read_text().splitlines()):
        if line.get("verdict") == "rewind":
            print(f"- back to step {line['step']}: {line['reason']}; shares {line['shares']}")
    print(f"- rewound, at the end: {evaluations(work / 'rewound')[-1]['eval']}")


def bits_of(bits: dict[str, float]) -> list[str]:
    return [f"{bits[name]:.3f}" for name in SETS]


if __name__ == "__main__":
    main()
