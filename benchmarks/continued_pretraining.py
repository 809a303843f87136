"""A base model of English and code goes on with Basque: what it learns and what it forgets, with and without replay.

    apt-get download libreoffice-help-en-us libreoffice-help-eu python3.11-doc
    for package in *.deb; do dpkg -x $package packages; done
    python benchmarks/continued_pretraining.py texts packages WORK     # HTML and sources -> documents
    python benchmarks/continued_pretraining.py base WORK               # prepare, and train the base model (hours)
    python benchmarks/continued_pretraining.py runs WORK               # each run of the table, one after the other
    python benchmarks/continued_pretraining.py page WORK               # the table and the picture of docs/continued_pretraining.md

Each stage goes on where it was. All texts are of packages of Debian 12: LibreOffice's help in English and Basque, Python's
documentation, and the standard library's code. The help pages are translations of each other, so what differs is the language.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Optional

ROOT = Path(__file__).resolve().parent.parent
BLOCKS = {"p", "div", "h1", "h2", "h3", "h4", "h5", "h6", "li", "tr", "table", "br", "pre", "dt", "dd"}
SKIPPED = {"script", "style", "head"}
MENU_LINES = 4  # with which each page of the help begins
VOCABULARY, CONTEXT = 8192, 256
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
COMMON = {
    "global_batch_size": 32,
    "micro_batch_size": 32,
    "eval_iters": 4,
    "eval_batch_size": 64,
}
BASE = {"lr": 3e-3, "warmup_steps": 100, "max_step": 1800, "lr_schedule": "wsd", "decay_steps": 360}


# ------------------------------------------------------------------------------- texts


class Page(HTMLParser):
    """The text of an HTML page, a line for each block."""

    def __init__(self) -> None:
        super().__init__()
        self.words: list[str] = []
        self.skipped = 0

    def handle_starttag(self, tag: str, attributes: list) -> None:
        self.skipped += tag in SKIPPED
        self.words += ["\n"] * (tag in BLOCKS)

    def handle_endtag(self, tag: str) -> None:
        self.skipped -= tag in SKIPPED and self.skipped > 0
        self.words += ["\n"] * (tag in BLOCKS)

    def handle_data(self, data: str) -> None:
        self.words += [] if self.skipped else [data]


def text_of(html: str) -> str:
    page = Page()
    page.feed(html)
    lines = (re.sub(r"\s+", " ", line).strip() for line in "".join(page.words).split("\n"))
    return "\n".join([line for line in lines if line][MENU_LINES:])


def documents(packages: Path) -> Iterator[tuple[str, str]]:
    """(corpus, document): english and code, which are old, and basque, which is new."""
    help_pages = packages / "usr/share/libreoffice/help"
    for corpus, language in (("english", "en-US"), ("basque", "eu")):
        for path in sorted((help_pages / language / "text").rglob("*.html")):
            yield corpus, text_of(path.read_text(errors="replace"))
    sources = (packages / "usr/share/doc").glob("python3*/html/_sources/**/*.txt")
    for path in sorted({path.resolve() for path in sources}):  # of links once
        yield "english", path.read_text(errors="replace")
    for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        if not {"test", "tests", "idle_test", "site-packages", "dist-packages"} & set(path.parts):
            yield "code", path.read_text(errors="replace")


def write_texts(packages: Path, work: Path) -> None:
    files: dict[str, list[str]] = {}
    for corpus, text in documents(packages):
        files.setdefault(corpus, []).append(json.dumps({"text": text}))
    work.mkdir(parents=True, exist_ok=True)
    for corpus, lines in files.items():
        (work / f"{corpus}.jsonl").write_text("\n".join(lines) + "\n")
        print(f"{corpus}: {len(lines):,} documents, {sum(map(len, lines)):,} characters")


# ------------------------------------------------------------------------------- commands


def call(script: str, *words: object, **flags: object) -> None:
    """A command of this repository, printed as one would type it."""
    given = [str(word) for word in [*words, *(part for name, value in flags.items() for part in (f"--{name}", value))]]
    command = ["-m", script] if "." in script and not script.endswith(".py") else [script]
    print("$ python", *command, *given, flush=True)
    subprocess.run([sys.executable, *command, *given], cwd=ROOT, check=True)


def prepare(work: Path) -> None:
    common = {"context_length": CONTEXT, "packing": "best_fit", "validation_fraction": 0.05}
    both = [work / "english.jsonl", work / "code.jsonl"]
    if not (work / "data" / "old").exists():  # only for its tokenizer
        call("prepare_data.py", "--input", *both, output=work / "data" / "old", train_tokenizer=VOCABULARY, **common)
    for corpus in ("english", "code", "basque"):
        if not (work / "data" / corpus).exists():
            tokenizer = work / "data" / "old" / "tokenizer"
            call(
                "prepare_data.py",
                input=work / f"{corpus}.jsonl",
                output=work / "data" / corpus,
                tokenizer=tokenizer,
                **common,
            )


def train_base(work: Path) -> None:
    prepare(work)
    model = work / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(MODEL, indent=2))
    mix = f"english={work}/data/english:0.6,code={work}/data/code:0.4"
    evaluated = {
        "eval_data": f"basque={work}/data/basque",
        "eval_step_interval": 200,
        "save_step_interval": 100,
        "keep_last": 1,
    }
    run = {"output_dir": work, "run_name": "base", "resume": "auto"}
    call("train.py", model_name=model, data_mix=mix, **COMMON, **BASE, **evaluated, **run)


# ------------------------------------------------------------------------------- the runs of the table


STEPS, SELF_TOKENS = 160, 600_000
LAST = 5  # checkpoints of a constant rate that are averaged
CONTINUED = {
    "max_step": STEPS,
    "lr": 1e-3,
    "min_lr": 1e-4,
    "warmup_steps": 10,
    "eval_step_interval": 20,
    "save_step_interval": 20,
}
OLD = {"english": 0.6, "code": 0.4}  # what is replayed, in the shares of the base model's own data
NOTHING = "english:9,code:9"  # a budget that is never reached: for the probe and the drift


def mix_of(work: Path, replay: float, of_itself: bool = False) -> str:
    shares = {
        "basque": 1 - replay,
        **({"self": replay} if of_itself else {name: replay * part for name, part in OLD.items()}),
    }
    return ",".join(f"{name}={work}/data/{name}:{share:.6g}" for name, share in shares.items())


def runs_of(work: Path) -> dict[str, dict[str, object]]:
    """Name of a run -> its flags, but for those that all have."""
    old = ",".join(f"{name}={work}/data/{name}" for name in OLD)
    runs: dict[str, dict[str, object]] = {
        f"replay-{share:g}": {"data_mix": mix_of(work, share / 100), "forgetting_budget": NOTHING}
        for share in (0, 5, 20, 50)
    }
    runs["self-20"] = {"data_mix": mix_of(work, 0.2, True), "eval_data": old, "forgetting_budget": NOTHING}
    runs["constant-20"] = {**runs["replay-20"], "lr_schedule": "constant"}
    runs["stopped"] = {**runs["replay-0"], "forgetting_budget": "english:0.25", "forgetting_action": "stop"}
    runs["rewound"] = {
        "train_data_dir": work / "data" / "basque",
        "replay": work / "data" / "english",
        "replay_fraction": 0.1,
        "forgetting_budget": "replay:0.25",
        "forgetting_action": "rewind",
    }
    return runs


def continue_from_base(work: Path, only: Optional[list[str]] = None) -> None:
    base = work / "base" / f"step-{BASE['max_step']:08d}"
    for name, flags in runs_of(work).items():
        if only and name not in only:
            continue
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


# ------------------------------------------------------------------------------- the page


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


def evaluations(run: Path) -> list[dict]:
    """The evaluation lines of a run."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "eval" in line]


def of_sets(line: dict, key: str = "bits_per_byte") -> dict[str, float]:
    return {name: one[key] for name, one in line["eval"].items() if key in one}


def of_average(work: Path) -> dict[str, float]:
    """Bits per byte of the average, whose note has nats a token: a set's tokens and bytes are those of the run."""
    last = evaluations(work / "constant-20")[-1]
    note = json.loads((work / "averaged" / "average.json").read_text())
    return {name: note["eval_loss"][name] * bits / of_sets(last, "loss")[name] for name, bits in of_sets(last).items()}


def write_page(work: Path) -> None:
    first = evaluations(work / "replay-20")[0]
    print("| run | " + " | ".join(SETS) + " | copy, nats | drift |\n|---|" + "--:|" * 5)
    print(_row("base model", of_sets(first), first))
    for name, said in SAID.items():
        if name == "averaged":
            print(_row(said, of_average(work), None))
        else:
            last = evaluations(work / name)[-1]
            print(_row(said, of_sets(last), last))
    for name in ("stopped", "rewound"):
        status = json.loads((work / name / "STATUS.json").read_text())
        print(f"\n{name}: exit code {status['code']}, step {status['step']}: {status['reason']}")
    for line in map(json.loads, (work / "rewound" / "metrics.jsonl").read_text().splitlines()):
        if line.get("verdict") == "rewind":
            print(f"- back to step {line['step']}: {line['reason']}; shares {line['shares']}")
    print(f"- rewound, at the end: {evaluations(work / 'rewound')[-1]['eval']}")
    draw(work, ROOT / "docs" / "results" / "continued_pretraining.png")


def _row(said: str, bits: dict[str, float], line: Optional[dict]) -> str:
    cells = [f"{bits[name]:.3f}" for name in SETS]
    cells += ["", ""] if line is None else [f"{line['eval']['copy']['loss']:.3f}", f"{line['drift']:.4f}"]
    return f"| {said} | {' | '.join(cells)} |"


def draw(work: Path, target: Path) -> None:
    """Bits per byte of the new and of the old text over the steps, and one against the other at the end."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (new, old, both) = plt.subplots(1, 3, figsize=(14, 4.8), layout="constrained")
    for name, said in SAID.items():
        if name == "averaged":
            bits = of_average(work)
            both.plot(bits["basque"], _old(bits), "k*", markersize=11, linestyle="", label=said)
            continue
        lines = evaluations(work / name)
        steps, each = [line["step"] for line in lines], [of_sets(line) for line in lines]
        (curve,) = new.plot(steps, [bits["basque"] for bits in each])
        old.plot(steps, [_old(bits) for bits in each], color=curve.get_color())
        both.plot(each[-1]["basque"], _old(each[-1]), "o", color=curve.get_color(), label=said)
    for axes, title in ((new, "new: Basque"), (old, "old: 0.6 English + 0.4 code")):
        axes.set(title=title, xlabel="step", ylabel="bits per byte")
        axes.grid(alpha=0.3)
    both.set(title="at the end; lower left is better", xlabel="new, bits per byte", ylabel="old, bits per byte")
    both.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=4)
    figure.savefig(target, dpi=110)


def _old(bits: dict[str, float]) -> float:
    return sum(part * bits[name] for name, part in OLD.items())


STAGES = {"base": train_base, "runs": continue_from_base, "page": write_page}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    stages = parser.add_subparsers(dest="stage", required=True)
    texts = stages.add_parser("texts")
    texts.add_argument("packages", type=Path)
    texts.add_argument("work", type=Path)
    for name in STAGES:
        stage = stages.add_parser(name)
        stage.add_argument("work", type=Path)
        if name == "runs":
            stage.add_argument("--only", nargs="+", help="names of runs (default: all, one after the other)")
        stage.add_argument("--precision", default="32-true", help="of train.py; bf16-true is faster on a GPU")
    given = parser.parse_args()
    if given.stage == "texts":
        write_texts(given.packages, given.work.resolve())
    else:
        COMMON["precision"] = given.precision
        STAGES[given.stage](given.work.resolve(), *([given.only] if given.stage == "runs" else []))


if __name__ == "__main__":
    main()
