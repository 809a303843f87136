"""What plan.py --sweep predicts for runs on 1 to 512 GPUs whose speed others have published.

    python benchmarks/sweep.py --markdown docs/results/sweep.md

Each series is swept with the flags of this template that come nearest to it. Nothing is measured here, and no number of the
sweep was chosen by these runs. It needs no GPU.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple, Optional

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from arguments import parse_plan  # noqa: E402
from benchmarks import gpu, inputs, page  # noqa: E402
from fabric_llm.plan import sweep  # noqa: E402

GITHUB = "https://github.com"
TITAN = f"[torchtitan]({GITHUB}/pytorch/torchtitan/blob/main/benchmarks/llama3_h100_202412_torchtitan.md)"
MPT = f"[llm-foundry]({GITHUB}/mosaicml/llm-foundry/blob/main/scripts/train/benchmarking/README.md)"
KEMPNER = f"[KempnerForge]({GITHUB}/KempnerInstitute/KempnerForge/blob/main/benchmarks/mfu_scaling/mfu_scaling.md)"
IBM = f"[fms-fsdp]({GITHUB}/foundation-model-stack/fms-fsdp#training-throughput-benchmarks)"
AUTOMODEL = f"[Automodel]({GITHUB}/NVIDIA-NeMo/Automodel/blob/main/docs/performance-summary.mdx)"

LLAMAS = {
    "8B": gpu.SHAPES["8B"],
    "7B": dict(zip(gpu.FIELDS, (4096, 11008, 32, 32, 32, False, 32000))),
    "13B": dict(zip(gpu.FIELDS, (5120, 13824, 40, 40, 40, False, 32000))),
    "34B": dict(zip(gpu.FIELDS, (8192, 22016, 48, 64, 8, False, 32000))),
    "70B": dict(zip(gpu.FIELDS, (8192, 28672, 80, 64, 8, False, 32000))),
    "3.1 70B": dict(zip(gpu.FIELDS, (8192, 28672, 80, 64, 8, False, gpu.VOCABULARY))),
}
MPTS = {"760M": (1536, 24), "1B": (2048, 24), "3B": (2560, 32), "7B": (4096, 32), "13B": (5120, 40), "30B": (7168, 48)}
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
    flags = f"{MIXED} --strategy fsdp2 --context_length 8192 --micro_batch_size 2 {SELECTIVE} {flags}"
    return Series(TITAN, f"Llama 8B, {run}", "8B", dict(zip((8, 128), rates)), f"{flags} --network 3200")


def mpt(shape: str, size: int, published: dict[int, float], flags: str = "") -> Series:
    flags = f"{MIXED} --context_length 2048 --micro_batch_size {size} --network 3200 {flags}".strip()
    return Series(MPT, f"MPT {shape}", f"MPT {shape}", published, flags, "network not published")


def ibm(shape: str, sharding: str, checkpointing: str, *rates: float) -> list[Series]:
    flags = f"--context_length 4096 --micro_batch_size 2 {checkpointing} --sharding_strategy {sharding}"
    other = "checkpoints some layers as a whole" if checkpointing else None
    name = f"Llama {shape}, {sharding}"
    return [
        Series(IBM, name, shape, {128: rates[0]}, f"{flags} --accelerator_name A100-80GB --network 400", other),
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
        f"{MIXED} --context_length 4096 --micro_batch_size 4 --gradient_accumulation_steps 2 {FULL} --devices 4 --accelerator_name H200",
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
        f"--strategy fsdp2 --context_length 4096 --gradient_accumulation_steps 4 {FULL} --network 3200",
        "rows of 8,192 tokens, split over two GPUs (context parallelism)",
    ),
]


def main(argv: Optional[list[str]] = None) -> int:
    options = page.parse(page.parser(__doc__, rounds=1), argv)
    with tempfile.TemporaryDirectory() as name:
        rows = [row for one in PUBLISHED for row in predicted(one, Path(name))]
    page.write("sweep.py", "Published scaling, and what plan.py --sweep says", NOTES, options, body(rows), rows)
    return 0


def predicted(one: Series, folder: Path) -> list[page.Row]:
    """A row for each number of devices. Efficiency is that among the rows: 1 with the fewest devices."""
    page.progress(f"{one.source} {one.run}")
    write_shape(folder / one.shape, one.shape)
    words = ["--model_name", str(folder / one.shape), "--sweep", f"devices={min(one.published)}..{max(one.published)}"]
    own, flags = parse_plan([*words, *one.flags.split()])
    asked = flags.fsdp.sharding_strategy
    swept = {row.devices: row for row in sweep.sweep(own, flags) if row.sharding == asked}
    first = swept[min(swept)]
    rows = []
    for devices, rate in one.published.items():
        row, outlook = swept[devices], swept[devices].outlook
        found = {**one._asdict(), "devices": devices, "is_series": len(one.published) > 1, "published": rate}
        found |= {"parameters": outlook.parameters, "messages": outlook.seconds.messages / outlook.seconds.compute}
        found |= {"plan": outlook.tokens_a_step / outlook.seconds.step / devices}
        found |= {"efficiency": rate / one.published[min(swept)], "all_hidden": row.efficiency / first.efficiency}
        rows.append({**found, "none_hidden": row.none_hidden / first.none_hidden})
    return rows


def write_shape(folder: Path, shape: str) -> None:
    """MPT's sizes are those of a GPT-2, with another encoding of positions."""
    if shape in LLAMAS:
        inputs.write_llama(folder, **LLAMAS[shape])
        return
    width, layers = MPTS[shape.removeprefix("MPT ")]
    config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": width, "n_layer": layers}
    config |= {"n_head": width // 128, "n_positions": 2048, "vocab_size": 50368}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))


def body(rows: list[page.Row]) -> str:
    series = [row for row in rows if row["is_series"]]
    later = [row for row in series if row["efficiency"] != 1]
    titles = ["run", "source", "not the same", "GPUs", "published, tokens/s a GPU", "plan", "error", "messages"]
    more = ["published efficiency", "all hidden", "none hidden"]
    between = [row for row in later if row["none_hidden"] <= row["efficiency"] <= row["all_hidden"]]
    flags = {(row["run"], row["source"], f"`{row['flags']}`") for row in rows}
    return "\n\n".join(
        [
            "## From few GPUs to many",
            page.table([*titles, *more], ([*cells(row), *efficiencies(row)] for row in series), words=3),
            f"Of the {len(later)} efficiencies below 1, {len(between)} lie between the last two columns. The median of the errors' "
            f"sizes is {middle(later, 'all_hidden')} where all messages are hidden, as the plan says, and "
            f"{middle(later, 'none_hidden')} where none are.",
            EXPLAINED.strip(),
            "## At one number of GPUs",
            page.table(titles, (cells(row) for row in rows if not row["is_series"]), words=3),
            AT_ONE.strip(),
            "## Left out",
            LEFT_OUT.strip(),
            "## Flags",
            "Besides `--sweep`, and `--model_name` with a folder of that shape's `config.json`.",
            page.table(["run", "source", "flags of plan.py"], sorted(flags), words=3),
        ]
    )


def cells(row: page.Row) -> list[str]:
    numbers = [f"{row['devices']}", f"{row['published']:,.0f}", f"{row['plan']:,.0f}"]
    return [row["run"], row["source"], row["other"] or "", *numbers, f"{error(row):+.1%}", f"{row['messages']:.0%}"]


def error(row: page.Row) -> float:
    """Of the plan's speed, as a part of what was published."""
    return row["plan"] / row["published"] - 1


def efficiencies(row: page.Row) -> list[str]:
    return [f"{row[key]:.1%}" for key in ("efficiency", "all_hidden", "none_hidden")]


def middle(rows: list[page.Row], key: str) -> str:
    return f"{100 * statistics.median(abs(row[key] - row['efficiency']) for row in rows):.1f} points"


NOTES = [
    "Published: tokens per second and GPU, as the sources print them; KempnerForge prints them for all GPUs together. Efficiency: of the "
    "same run, as a part of that with the fewest GPUs, on the same sequences for each GPU",
    "Plan: what plan.py --sweep says, with the MFU that it assumes on any number of GPUs. Messages: their seconds, as a part of computing's",
    "MPT is planned as a GPT-2 of its sizes, whose parameters are as many as the source says, to the last one; its network isn't "
    "published for H100, and taken to be 3,200 Gbit/s a node, as torchtitan's is",
]
EXPLAINED = """
Where the sweep is wrong:

- **Efficiency.** All messages here take less time than computing, so that the plan hides them and says 100 %. The runs lose 1 to
  11 points all the same. MPT 1B and 3B on 512 GPUs, whose messages take 27 % and 28 % of computing's time, have lost 9.7 and 7.5
  points since 128; 13B, at 6 %, has lost 2.5. In the sweep, what grows from 16 nodes to 64 is the time from device to device, as
  a node sends nearly as many bytes. It is NCCL's own estimate, wasn't fitted to these runs, and is of the right size: the last column,
  where no message is hidden, is nearer to them. That it is the cause isn't shown.
- **Below both columns** are MPT 13B, 30B and 70B, 1B from 16 to 64 GPUs, and KempnerForge, which loses 11 points from one GPU to two.
  The sweep has no contention in the network, no slow device that all others wait for, and no compute units and memory bandwidth
  that NCCL takes from a GPU while it computes. Which of them it is isn't known.
- **Speed.** The errors are those of an assumed MFU, which is one number for each accelerator. It is too low for wide models: MPT
  13B to 70B reach 54 % to 58 % of the peak with what they compute again, which the plan takes to be 40 %. It is too high for
  torchtitan's H100, which had less power. KempnerForge's single GPU would reach 77 % with the checkpointing that the source names;
  whether it was made isn't known. Give the `--mfu` of a run of yours.
- **Above 512 GPUs** no figure is here. What the sweep says of 1,024 and more hasn't been held against anything.
"""
AT_ONE = """
These say nothing of efficiency, but that messages of 41 % to 59 % of computing's time, on 400 and 800 Gbit/s (taken to be of a
node), leave H100 as fast as planned, and A100 faster: fms-fsdp counts an MFU of 55 % to 68 % on A100 and of 38 % to 46 % on H100,
where 45 % and 40 % are assumed. Automodel's 389 TFLOP/s are 39 % of the peak, and 52 % with what is computed again.
"""
LEFT_OUT = """
- Rows in float8, such as [Trainy's](https://github.com/pytorch/torchtitan/blob/main/benchmarks/llama3-8b_h200_202506_trainy-whitefiber.md)
  Llama 8B, 10,938 tokens/s a GPU on 32 H200 and 10,753 on 64; with tensor or pipeline parallelism, of torchtitan and KempnerForge.
- Rows of llm-foundry in which the micro-batch changes with the GPUs, and KempnerForge's 13B, which has one number of GPUs.
- [Apertus](https://arxiv.org/abs/2604.12973) (Megatron), [FSDP's paper](https://arxiv.org/abs/2304.11277) and a
  [study of up to 2,048 H100](https://arxiv.org/abs/2411.13055): their figures weren't at hand as numbers. The last one's abstract says
  that scaling out with FSDP alone costs so much communication that other strategies become preferable.
"""

if __name__ == "__main__":
    sys.exit(main())
