"""What plan.py --sweep predicts for runs on 1 to 512 GPUs whose speed others have published.

    python benchmarks/sweep.py

The runs, what their sources say of them, and their flags are those of sweep_flags.csv.
"""

from __future__ import annotations

import csv
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import gpu, inputs, page
from benchmarks.inputs import llama
from fabric_llm.forecast import sweep
from parse_arguments import parse_plan

FILE = ROOT / "benchmarks/sweep_flags.csv"
LLAMAS = {
    "Llama 8B": gpu.SHAPES["8B"],
    "Llama 7B": llama(4096, 11008, 32, 32, vocab_size=32000),
    "Llama 13B": llama(5120, 13824, 40, 40, vocab_size=32000),
    "Llama 34B": llama(8192, 22016, 48, 64, 8, vocab_size=32000),
    "Llama 70B": llama(8192, 28672, 80, 64, 8, vocab_size=32000),
    "Llama 3.1 70B": llama(8192, 28672, 80, 64, 8, vocab_size=gpu.VOCABULARY),
}
MPTS = {  # width and layers
    "MPT 760M": (1536, 24),
    "MPT 1B": (2048, 24),
    "MPT 3B": (2560, 32),
    "MPT 7B": (4096, 32),
    "MPT 13B": (5120, 40),
    "MPT 30B": (7168, 48),
    "MPT 70B": (8192, 80),
}


class Series(NamedTuple):
    """Runs that differ in their devices alone."""

    run: str
    source: str
    other: str  # what of it these flags don't express
    published: dict[int, float]  # devices -> tokens per second and GPU
    flags: str  # of plan.py besides --sweep, and --model_name with a folder of that shape


def main() -> None:
    options = page.parse(page.parser(__doc__))
    rows = []
    with tempfile.TemporaryDirectory() as name:
        for one in published():
            page.progress(f"{one.source} {one.run}")
            rows += predicted(one, Path(name))
    page.write("Published scaling, and what plan.py --sweep says", [], options, body(rows), rows)


def published() -> list[Series]:
    series = []
    with FILE.open(newline="") as lines:
        for line in csv.DictReader(lines):
            rates = [pair.split(":") for pair in line["published"].split()]
            line["published"] = {int(devices): float(rate) for devices, rate in rates}
            series.append(Series(**line))
    return series


def predicted(one: Series, folder: Path) -> list[page.Row]:
    """A row for each number of devices. Efficiency is that among the rows: 1 with the fewest
    devices."""
    write_shape(folder / "model", one.run.partition(",")[0])
    fewest, most = min(one.published), max(one.published)
    words = ["--model_name", str(folder / "model"), "--sweep", f"devices={fewest}..{most}"]
    own, flags = parse_plan([*words, *one.flags.split()])
    asked = flags.fsdp.sharding_strategy
    swept = {row.devices: row for row in sweep.sweep(own, flags) if row.sharding == asked}
    rows = []
    for devices, rate in one.published.items():
        prediction, seconds = swept[devices].prediction, swept[devices].prediction.seconds
        row = {**one._asdict(), "devices": devices, "is_series": len(one.published) > 1}
        row["published"] = rate
        row["messages"] = seconds.messages / seconds.compute
        row["plan"] = prediction.tokens_a_step / seconds.step / devices
        row["efficiency"] = rate / one.published[fewest]
        row["all_hidden"] = swept[devices].efficiency / swept[fewest].efficiency
        row["none_hidden"] = swept[devices].none_hidden / swept[fewest].none_hidden
        rows.append(row)
    return rows


def write_shape(folder: Path, shape: str) -> None:
    """MPT's sizes are those of a GPT-2, with another encoding of positions."""
    if shape in LLAMAS:
        inputs.write_llama(folder, **LLAMAS[shape])
        return
    width, layers = MPTS[shape]
    config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 50368}
    config |= {"n_embd": width, "n_layer": layers, "n_head": width // 128, "n_positions": 2048}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))


def body(rows: list[page.Row]) -> list[str]:
    series = [row for row in rows if row["is_series"]]
    single = [cells(row) for row in rows if not row["is_series"]]
    later = [row for row in series if row["efficiency"] != 1]
    between = [row for row in later if row["none_hidden"] <= row["efficiency"] <= row["all_hidden"]]
    titles = ["run", "source", "not the same", "GPUs", "published, tokens/s a GPU", "plan"]
    titles.append("messages")
    many = []
    for row in series:
        many.append([*cells(row), f"{row['efficiency']:.1%}", f"{row['none_hidden']:.1%}"])
    return [
        "## From few GPUs to many",
        page.table([*titles, "published efficiency", "none hidden"], many, words=3),
        f"Of the {len(later)} efficiencies below 1, {len(between)} lie between those where all "
        "and none of the messages are hidden. The median of the errors' sizes is "
        f"{middle(later, 'all_hidden')} where all are, as the plan says, and "
        f"{middle(later, 'none_hidden')} where none are.",
        "## At one number of GPUs",
        page.table(titles, single, words=3),
    ]


def cells(row: page.Row) -> list[str]:
    numbers = [f"{row['devices']}", f"{row['published']:,.0f}", f"{row['plan']:,.0f}"]
    return [row["run"], row["source"], row["other"], *numbers, f"{row['messages']:.0%}"]


def middle(rows: list[page.Row], key: str) -> str:
    errors = [abs(row[key] - row["efficiency"]) for row in rows]
    return f"{100 * statistics.median(errors):.1f} points"


if __name__ == "__main__":
    main()
