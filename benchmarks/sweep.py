"""What plan.py --sweep predicts for runs on 1 to 512 GPUs whose speed others have published.

    python benchmarks/sweep.py

Each series is swept with the flags of this template that come nearest to it. Nothing is measured
here, and no number of the sweep was chosen by these runs. It needs no GPU. docs/results/sweep.md
has the tables, and where the sweep is wrong.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple, Optional

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from arguments import parse_plan
from benchmarks import gpu, inputs, page
from fabric_llm.forecast import sweep

GITHUB = "https://github.com"
TITAN = f"[torchtitan]({GITHUB}/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md)"
MPT = f"[llm-foundry]({GITHUB}/mosaicml/llm-foundry/blob/main/scripts/train/benchmarking/README.md)"
KEMPNER = f"[KempnerForge]({GITHUB}/KempnerInstitute/KempnerForge/blob/main/benchmarks/mfu_scaling/mfu_scaling.md)"
IBM = f"[fms-fsdp]({GITHUB}/foundation-model-stack/fms-fsdp#training-throughput-benchmarks)"
AUTOMODEL = f"[Automodel]({GITHUB}/NVIDIA-NeMo/Automodel/blob/main/docs/performance-summary.mdx)"

LLAMAS = {
    "8B": gpu.SHAPES["8B"],
    "7B": gpu.llama(4096, 11008, 32, 32, 32, False, 32000),
    "13B": gpu.llama(5120, 13824, 40, 40, 40, False, 32000),
    "34B": gpu.llama(8192, 22016, 48, 64, 8, False, 32000),
    "70B": gpu.llama(8192, 28672, 80, 64, 8, False, 32000),
    "3.1 70B": gpu.llama(8192, 28672, 80, 64, 8, False, gpu.VOCABULARY),
}
MPTS = {
    "760M": (1536, 24),
    "1B": (2048, 24),
    "3B": (2560, 32),
    "7B": (4096, 32),
    "13B": (5120, 40),
    "30B": (7168, 48),
}
MPTS |= {"70B": (8192, 80)}  # width and layers
FULL, SELECTIVE = "--activation_checkpointing full", "--activation_checkpointing selective"
MIXED, GRADIENTS = "--precision bf16-mixed", "--sharding_strategy SHARD_GRAD_OP"


class Series(NamedTuple):
    """Runs that differ in their devices alone, by devices: tokens per second and GPU."""

    source: str
    run: str
    shape: str
    published: dict[int, float]
    flags: str
    other: Optional[str] = None  # what of it these flags don't express


def titan(run: str, flags: str, *rates: float) -> Series:
    flags = (
        f"{MIXED} --strategy fsdp2 --context_length 8192 --micro_batch_size 2 {SELECTIVE} {flags}"
    )
    return Series(
        TITAN, f"Llama 8B, {run}", "8B", dict(zip((8, 128), rates)), f"{flags} --network 3200"
    )


def mpt(shape: str, size: int, published: dict[int, float], flags: str = "") -> Series:
    flags = (
        f"{MIXED} --context_length 2048 --micro_batch_size {size} --network 3200 {flags}".strip()
    )
    return Series(MPT, f"MPT {shape}", f"MPT {shape}", published, flags, "network not published")


def ibm(shape: str, sharding: str, checkpointing: str, *rates: float) -> list[Series]:
    flags = (
        f"--context_length 4096 --micro_batch_size 2 {checkpointing} --sharding_strategy {sharding}"
    )
    other = "checkpoints some layers as a whole" if checkpointing else None
    name = f"Llama {shape}, {sharding}"
    return [
        Series(
            IBM,
            name,
            shape,
            {128: rates[0]},
            f"{flags} --accelerator_name A100-80GB --network 400",
            other,
        ),
        Series(IBM, name, shape, {96: rates[1]}, f"{flags} --network 800", other),
    ]


LARGE = (128, 256, 512)
PUBLISHED = [
    titan("eager", "--compile false", 5762, 5605),
    titan("compiled", "--compile true", 6667, 6514),
    mpt("7B", 6, dict(zip(LARGE, (10475, 10119, 9670)))),
    mpt("13B", 16, dict(zip(LARGE, (5080, 4989, 4952))), FULL),
    mpt("30B", 8, dict(zip(LARGE, (2199, 2148, 2115))), FULL),
    mpt("70B", 8, dict(zip(LARGE, (1058, 1035, 1007))), FULL),
    mpt("3B", 8, dict(zip(LARGE, (23422, 22772, 21664))), GRADIENTS),
    mpt("1B", 12, dict(zip(LARGE, (44123, 42555, 39837))), GRADIENTS),
    mpt("3B", 6, {32: 23021, 64: 22525}, "--gradient_accumulation_steps 3"),
    mpt("1B", 20, {16: 46037, 32: 45130, 64: 44402}),
    mpt("760M", 24, {16: 68551, 32: 67971}),
    Series(
        KEMPNER,
        "Llama 8B, within a node",
        "8B",
        {1: 10471, 2: 18728 / 2, 4: 38983 / 4},
        (
            f"{MIXED} --context_length 4096 --micro_batch_size 4 --gradient_accumulation_steps 2 "
            f"{FULL} --devices 4 --accelerator_name H200"
        ),
    ),
    *ibm("7B", "HYBRID_SHARD", "", 4550, 9600),
    *ibm("13B", "FULL_SHARD", SELECTIVE, 2150, 4850),
    *ibm("34B", "FULL_SHARD", SELECTIVE, 820, 1830),
    *ibm("70B", "FULL_SHARD", SELECTIVE, 410, 890),
    Series(
        AUTOMODEL,
        "Llama 70B",
        "3.1 70B",
        {64: 866.77},
        (
            f"--strategy fsdp2 --context_length 4096 --gradient_accumulation_steps 4 {FULL} "
            "--network 3200"
        ),
        "rows of 8,192 tokens, split over two GPUs (context parallelism)",
    ),
]


def main(argv: Optional[list[str]] = None) -> int:
    options = page.parse(page.parser(__doc__, rounds=1), argv)
    with tempfile.TemporaryDirectory() as name:
        rows = [row for one in PUBLISHED for row in predicted(one, Path(name))]
    page.write(
        "sweep.py",
        "Published scaling, and what plan.py --sweep says",
        [],
        options,
        body(rows),
        rows,
    )
    return 0


def predicted(one: Series, folder: Path) -> list[page.Row]:
    """A row for each number of devices. Efficiency is that among the rows: 1 with the fewest
    devices."""
    page.progress(f"{one.source} {one.run}")
    write_shape(folder / one.shape, one.shape)
    words = [
        "--model_name",
        str(folder / one.shape),
        "--sweep",
        f"devices={min(one.published)}..{max(one.published)}",
    ]
    own, flags = parse_plan([*words, *one.flags.split()])
    asked = flags.fsdp.sharding_strategy
    swept = {row.devices: row for row in sweep.sweep(own, flags) if row.sharding == asked}
    first = swept[min(swept)]
    rows = []
    for devices, rate in one.published.items():
        row, prediction = swept[devices], swept[devices].prediction
        found = {
            **one._asdict(),
            "devices": devices,
            "is_series": len(one.published) > 1,
            "published": rate,
        }
        found |= {
            "parameters": prediction.parameters,
            "messages": prediction.seconds.messages / prediction.seconds.compute,
        }
        found |= {"plan": prediction.tokens_a_step / prediction.seconds.step / devices}
        found |= {
            "efficiency": rate / one.published[min(swept)],
            "all_hidden": row.efficiency / first.efficiency,
        }
        rows.append({**found, "none_hidden": row.none_hidden / first.none_hidden})
    return rows


def write_shape(folder: Path, shape: str) -> None:
    """MPT's sizes are those of a GPT-2, with another encoding of positions."""
    if shape in LLAMAS:
        inputs.write_llama(folder, **LLAMAS[shape])
        return
    width, layers = MPTS[shape.removeprefix("MPT ")]
    config = {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": width,
        "n_layer": layers,
    }
    config |= {"n_head": width // 128, "n_positions": 2048, "vocab_size": 50368}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))


def body(rows: list[page.Row]) -> str:
    series = [row for row in rows if row["is_series"]]
    later = [row for row in series if row["efficiency"] != 1]
    titles = [
        "run",
        "source",
        "not the same",
        "GPUs",
        "published, tokens/s a GPU",
        "plan",
        "error",
        "messages",
    ]
    more = ["published efficiency", "all hidden", "none hidden"]
    between = [row for row in later if row["none_hidden"] <= row["efficiency"] <= row["all_hidden"]]
    return "\n\n".join(
        [
            "## From few GPUs to many",
            page.table(
                [*titles, *more], ([*cells(row), *efficiencies(row)] for row in series), words=3
            ),
            f"Of the {len(later)} efficiencies below 1, {len(between)} lie between the last two "
            f"columns. The median of the errors' sizes is {middle(later, 'all_hidden')} where all "
            f"messages are hidden, as the plan says, and {middle(later, 'none_hidden')} where none "
            "are.",
            "## At one number of GPUs",
            page.table(titles, (cells(row) for row in rows if not row["is_series"]), words=3),
            page.flags(rows),
        ]
    )


def cells(row: page.Row) -> list[str]:
    numbers = [f"{row['devices']}", f"{row['published']:,.0f}", f"{row['plan']:,.0f}"]
    return [
        row["run"],
        row["source"],
        row["other"] or "",
        *numbers,
        f"{error(row):+.1%}",
        f"{row['messages']:.0%}",
    ]


def error(row: page.Row) -> float:
    """Of the plan's speed, as a part of what was published."""
    return row["plan"] / row["published"] - 1


def efficiencies(row: page.Row) -> list[str]:
    return [f"{row[key]:.1%}" for key in ("efficiency", "all_hidden", "none_hidden")]


def middle(rows: list[page.Row], key: str) -> str:
    return (
        f"{100 * statistics.median(abs(row[key] - row['efficiency']) for row in rows):.1f} points"
    )


if __name__ == "__main__":
    sys.exit(main())
