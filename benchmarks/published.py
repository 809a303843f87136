"""What plan.py predicts for runs whose peak memory or speed others or this project have published.

    python benchmarks/published.py memory
    python benchmarks/published.py speed

The runs, what their sources say of them, and their flags are those of published.csv.
"""

import csv
import statistics
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from benchmarks import gpu, inputs, page
from benchmarks.inputs import llama
from fabric_llm.forecast import sweep
from fabric_llm.forecast.memory import Memory
from fabric_llm.forecast.prediction import predict
from fabric_llm.model import gate, layers
from plan_arguments import parse_plan

CONTEXT, SLACK = "CUDA context (assumed)", "allocator's slack (assumed)"
# of the plan's parts
NOT_COUNTED = {"allocated": (CONTEXT, SLACK), "active": (CONTEXT, SLACK), "reserved": (CONTEXT,)}
LLAMA_2_7B = llama(4096, 11008, 32, 32, vocab_size=32000)
MPT = {"model_type": "gpt2", "vocab_size": 50368, "max_position_embeddings": 2048}
MPT |= {"tie_word_embeddings": True}  # a GPT-2, but for its encoding of positions
SHAPES = {
    **gpu.SHAPES,
    "7B": LLAMA_2_7B,
    "Llama 8B": gpu.SHAPES["8B"],
    "Llama 7B": LLAMA_2_7B,
    "Llama 13B": llama(5120, 13824, 40, 40, vocab_size=32000),
    "Llama 34B": llama(8192, 22016, 48, 64, 8, vocab_size=32000),
    "Llama 70B": llama(8192, 28672, 80, 64, 8, vocab_size=32000),
    "Llama 3.1 70B": llama(8192, 28672, 80, 64, 8, vocab_size=gpu.VOCABULARY),
    "MPT 760M": llama(1536, 6144, 24, 12, **MPT),
    "MPT 1B": llama(2048, 8192, 24, 16, **MPT),
    "MPT 3B": llama(2560, 10240, 32, 20, **MPT),
    "MPT 7B": llama(4096, 16384, 32, 32, **MPT),
    "MPT 13B": llama(5120, 20480, 40, 40, **MPT),
    "MPT 30B": llama(7168, 28672, 48, 56, **MPT),
    "MPT 70B": llama(8192, 32768, 80, 64, **MPT),
}
OWN = "[gpu.md](gpu.md)"
HALF = "keeps every second matrix product"
SPEEDS = ["run", "source", "not the same", "GPUs", "published, tokens/s a GPU", "plan", "messages"]


class Published(NamedTuple):
    """A run, and the flags of plan.py besides --model_name with a folder of that shape's
    config.json."""

    run: str  # it begins with a key of SHAPES
    source: str
    counted: str  # a key of NOT_COUNTED, or "speed"
    other: str  # what of it these flags don't express
    # its peak in GiB; or tokens per second and GPU, "DEVICES:RATE", of runs that differ in these
    published: str
    flags: str


def main() -> None:
    parser = page.parser(__doc__)
    parser.add_argument("question", choices=("memory", "speed"))
    options = page.parse(parser)
    is_speed, rows = options.question == "speed", []
    predicted, body = (speeds, of_speed) if is_speed else (peak, of_memory)
    with tempfile.TemporaryDirectory() as name:
        for one in published():
            if (one.counted == "speed") == is_speed:
                page.progress(f"{one.source} {one.run}")
                rows += predicted(one, Path(name))
    page.write(
        f"Published {options.question}, and what plan.py says", [], options, body(rows), rows
    )


def published() -> list[Published]:
    with (ROOT / "benchmarks/published.csv").open(newline="") as lines:
        return [Published(**line) for line in csv.DictReader(lines)]


def parsed(one: Published, folder: Path, *words: str) -> Any:
    inputs.write_llama(folder / "model", **SHAPES[one.run.partition(",")[0]])
    return parse_plan(["--model_name", str(folder / "model"), *words, *one.flags.split()])


def peak(one: Published, folder: Path) -> list[page.Row]:
    """A row of the page."""
    memory = planned(one, folder)
    row = {**one._asdict(), "gib": float(one.published), "plan": counted(memory, one)}
    row["parts"] = memory.parts
    if one.other == HALF:  # as torchtitan checkpoints
        with every_second_product():
            row["as_theirs"] = counted(planned(one, folder), one)
    return [row]


def planned(one: Published, folder: Path) -> Memory:
    # When this project's rows were measured, the gradient norm took a float64 copy of a whole
    # parameter.
    with patch.object(gate, "SQUARED_AT_ONCE", sys.maxsize) if one.source == OWN else nullcontext():
        return predict(*parsed(one, folder, "--max_step", "1")).memory


def counted(memory: Memory, one: Published) -> float:
    """GiB of what the source counts."""
    without = NOT_COUNTED[one.counted]
    return sum(size for name, size in memory.parts.items() if name not in without) / page.GIB


def every_second_product() -> Any:
    """In its context selective checkpointing keeps what torchtitan's does: of the matrix products
    the first, third and so on."""

    def contexts(_: Any) -> Any:
        seen = {False: 0, True: 0}

        def keep(context: Any, operation: Any, *args: Any, **more: Any) -> CheckpointPolicy:
            is_product = operation == torch.ops.aten.mm.default
            seen[context.is_recompute] += is_product
            is_second = is_product and seen[context.is_recompute] % 2 == 0
            if layers.is_product(operation) and not is_second:
                return CheckpointPolicy.MUST_SAVE
            return CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(keep)

    return patch.object(layers, "create_selective_checkpoint_contexts", contexts)


def error(row: page.Row, key: str = "plan") -> float:
    """Of a prediction, as a fraction of what was published."""
    return row[key] / row["gib"] - 1


def of_memory(rows: list[page.Row]) -> list[str]:
    def table(places: dict[str, str], of_table: list[page.Row], key: str) -> str:
        lines = []
        for row in of_table:
            cells = [row["published"], f"{row[key]:.1f}", f"{error(row, key):+.1%}"]
            lines.append([*(row[place] for place in places.values()), *cells])
        titles = [*places, "published, GiB", "plan, GiB", "error"]
        return page.table(titles, lines, words=len(places))

    theirs = [row for row in rows if "as_theirs" in row]
    others = [row for row in rows if row["source"] != OWN]
    own = [row for row in rows if row["source"] == OWN]
    expressed = [row for row in others if not row["other"]]
    groups = []
    for name, group, key in (
        ("all", rows, "plan"),
        ("this project's", own, "plan"),
        ("of others", others, "plan"),
        ("of others, which these flags express", expressed, "plan"),
        ("torchtitan's, with this template's choice of what is kept", theirs, "plan"),
        ("torchtitan's, with their choice", theirs, "as_theirs"),
    ):
        errors = [abs(error(row, key)) for row in group]
        sizes = [f"{statistics.median(errors):.1%}", f"{max(errors):.1%}"]
        groups.append([name, len(errors), *sizes])
    place = {"run": "run", "source": "source"}
    return [
        table({**place, "counted": "counted", "not the same": "other"}, rows, "plan"),
        "## With torchtitan's choice of what is kept",
        table(place, theirs, "as_theirs"),
        "## Sizes of the errors",
        page.table(["runs", "number", "median", "largest"], groups),
    ]


def speeds(one: Published, folder: Path) -> list[page.Row]:
    """A row for each number of devices. Efficiency is that among the rows: 1 with the fewest
    devices."""
    pairs = [pair.split(":") for pair in one.published.split()]
    rates = {int(devices): float(rate) for devices, rate in pairs}
    fewest, most = min(rates), max(rates)
    own, flags = parsed(one, folder, "--sweep", f"devices={fewest}..{most}")
    asked = flags.fsdp.sharding_strategy
    swept = {row.devices: row for row in sweep.sweep(own, flags) if row.sharding == asked}
    rows = []
    for devices, rate in rates.items():
        prediction, seconds = swept[devices].prediction, swept[devices].prediction.seconds
        row = {**one._asdict(), "devices": devices, "is_series": len(rates) > 1, "rate": rate}
        row["messages"] = seconds.messages / seconds.compute
        row["plan"] = prediction.tokens_a_step / seconds.step / devices
        row["efficiency"] = rate / rates[fewest]
        row["all_hidden"] = swept[devices].efficiency / swept[fewest].efficiency
        row["none_hidden"] = swept[devices].none_hidden / swept[fewest].none_hidden
        rows.append(row)
    return rows


def of_speed(rows: list[page.Row]) -> list[str]:
    single, many, later = [], [], []
    for row in rows:
        numbers = [row["devices"], f"{row['rate']:,.0f}", f"{row['plan']:,.0f}"]
        cells = [row["run"], row["source"], row["other"], *numbers, f"{row['messages']:.0%}"]
        if not row["is_series"]:
            single.append(cells)
            continue
        many.append([*cells, f"{row['efficiency']:.1%}", f"{row['none_hidden']:.1%}"])
        if row["efficiency"] != 1:
            later.append(row)
    between = [row for row in later if row["none_hidden"] <= row["efficiency"] <= row["all_hidden"]]
    return [
        "## From few GPUs to many",
        page.table([*SPEEDS, "published efficiency", "none hidden"], many, words=3),
        f"Of the {len(later)} efficiencies below 1, {len(between)} lie between those where all "
        "and none of the messages are hidden. The median of the errors' sizes is "
        f"{middle(later, 'all_hidden')} where all are, as the plan says, and "
        f"{middle(later, 'none_hidden')} where none are.",
        "## At one number of GPUs",
        page.table(SPEEDS, single, words=3),
    ]


def middle(rows: list[page.Row], key: str) -> str:
    errors = [abs(row[key] - row["efficiency"]) for row in rows]
    return f"{100 * statistics.median(errors):.1f} points"


if __name__ == "__main__":
    main()
