"""Record what training computes, to the last bit, and compare two versions of the code.

    python docs/results/same_numbers.py record OLD_CHECKOUT before/ # trains, and keeps the runs
    python docs/results/same_numbers.py record NEW_CHECKOUT after/ before/ # on the datasets of the
    old code python docs/results/same_numbers.py resume NEW_CHECKOUT before/ resumed/ # goes on from
    the old code's checkpoints python docs/results/same_numbers.py compare before/ after/ resumed/ #
    prints the table

Recorded are the loss and gradient norm of every step in hexadecimal, and the SHA-256 of every
tensor of the last checkpoint, weights and optimizer state alike. `resume` copies each run without
its last checkpoint and resumes it, so it must come to the same last checkpoint.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Optional

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

from fabric_llm.model.tensor_files import Tensors  # noqa: E402

STEPS, DEMO_STEPS = 12, 60
TOYS = {
    "llama": {
        **{
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": 512,
            "hidden_size": 64,
        },
        **{
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        },
        **{
            "max_position_embeddings": 64,
            "tie_word_embeddings": False,
            "bos_token_id": 0,
            "eos_token_id": 0,
        },
    },
    "gpt2": {
        **{
            "model_type": "gpt2",
            "architectures": ["GPT2LMHeadModel"],
            "vocab_size": 512,
            "n_embd": 64,
            "n_layer": 2,
        },
        **{
            "n_head": 4,
            "n_positions": 64,
            "bos_token_id": 0,
            "eos_token_id": 0,
        },  # with dropout 0.1
    },
    "mixtral": {
        **{
            "model_type": "mixtral",
            "architectures": ["MixtralForCausalLM"],
            "vocab_size": 512,
            "hidden_size": 64,
        },
        **{
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        },
        **{
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "output_router_logits": True,
            "router_aux_loss_coef": 0.1,
        },
        **{"max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 0},
    },
}
MORE = {  # flags of a run on two fsdp processes, besides those of the other cases
    "mixture": "--replay old --replay_fraction 0.3 --async_save true",
    "rewind": (
        "--max_step 24 --lr 1e-5 --spike_threshold 1 --spike_window 10 --spike_action "
        "rewind --save_step_interval 4"
    ),
    "ema": "--ema_decay 0.9 --ema_every 2 --lr_schedule wsd",
}
STRATEGIES = {"single": (1, "auto"), "fsdp": (2, "fsdp"), "fsdp2": (2, "fsdp2"), "ddp": (2, "ddp")}
PRECISIONS = ("32-true", "bf16-true")
CASES = [
    "demo",
    *(
        f"{toy} {name} {precision}"
        for toy in TOYS
        for name in STRATEGIES
        for precision in PRECISIONS
    ),
]
CASES += [f"llama fsdp bf16-true {name}" for name in MORE]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=["record", "resume", "compare"])
    parser.add_argument("paths", nargs="+", type=Path)
    parser.add_argument("--only", default="", help="cases whose names hold this (default: all)")
    given = parser.parse_args()
    CASES[:] = [case for case in CASES if given.only in case]
    paths = [path.resolve() for path in given.paths]
    {"record": record, "resume": resume, "compare": compare}[given.action](*paths)


def record(checkout: Path, folder: Path, other: Optional[Path] = None) -> None:
    """Train every case with the code of `checkout`; runs, models and datasets stay in `folder`.

    other: a folder of a record, whose models and datasets are taken.
    """
    if other is None:
        prepare(checkout, folder)
    else:
        shutil.copytree(
            other, folder, ignore=shutil.ignore_patterns("runs", "first", "numbers.json")
        )
    for case in CASES:
        train(checkout, folder, case)
    (folder / "numbers.json").write_text(
        json.dumps({case: numbers(folder, case) for case in CASES}, indent=1)
    )


def prepare(checkout: Path, folder: Path) -> None:
    """Models and datasets."""
    folder.mkdir(parents=True)
    demo = json.loads((checkout / "configs" / "demo_llama" / "config.json").read_text())
    for toy, config in {
        "demo": demo,
        **TOYS,
    }.items():  # with weights: how they are drawn may change
        (folder / toy).mkdir(exist_ok=True)
        (folder / toy / "config.json").write_text(json.dumps(config))
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder / toy)).save_pretrained(
            folder / toy
        )
    library, common = (
        Path(os.__file__).parent,
        ["--context_length", 64, "--validation_fraction", 0.1, "--pattern", "*.py"],
    )
    text = [library / name for name in ("json", "email", "logging")]
    run(
        checkout,
        folder,
        "prepare_data.py",
        "--input",
        *text,
        *common,
        "--train_tokenizer",
        512,
        "--output",
        "data",
    )
    tokenizer = ["--tokenizer", "data/tokenizer"]
    run(
        checkout,
        folder,
        "prepare_data.py",
        "--input",
        library / "asyncio",
        *common,
        *tokenizer,
        "--output",
        "old",
    )
    # makes the demo's dataset
    run(checkout, folder, "train.py", "--max_step", 1, "--output_dir", folder / "first")
    shutil.copytree(checkout / "data" / "demo", folder / "demo_data")


def resume(checkout: Path, before: Path, folder: Path) -> None:
    """Go on with every run in `before` from its last but one checkpoint, with the code of
    `checkout`."""
    shutil.copytree(before, folder)
    for case in CASES:
        last = max((folder / "runs" / name(case)).glob("step-*"))
        shutil.rmtree(last)
        train(checkout, folder, case, "--resume", "true")
    (folder / "numbers.json").write_text(
        json.dumps({case: numbers(folder, case) for case in CASES}, indent=1)
    )


def train(checkout: Path, folder: Path, case: str, *more: str) -> None:
    """One run, saved half-way and at the end."""
    steps = DEMO_STEPS if case == "demo" else STEPS
    flags = [
        "--output_dir",
        folder / "runs",
        "--run_name",
        name(case),
        "--log_step_interval",
        1,
        *more,
    ]
    flags += ["--max_step", steps, "--save_step_interval", steps // 2]
    if case != "demo":
        toy, strategy, precision, *kind = case.split()
        devices, strategy = STRATEGIES[strategy]
        flags += [
            "--model_name",
            folder / toy,
            "--train_data_dir",
            folder / "data",
            "--devices",
            devices,
        ]
        flags += [
            "--strategy",
            strategy,
            "--precision",
            precision,
            "--global_batch_size",
            8,
            "--micro_batch_size",
            2,
        ]
        flags += ["--lr", 1e-3, "--warmup_steps", 2, "--eval_iters", 4, "--eval_step_interval", 6]
        flags += ["--state_dict_type", "sharded" if strategy == "fsdp2" else "full"]
        flags += MORE[kind[0]].split() if kind else []
    else:
        flags += ["--config", checkout / "configs" / "demo.yaml", "--model_name", folder / "demo"]
        flags += ["--train_data_dir", folder / "demo_data"]
    print(case, *more, flush=True)
    run(checkout, folder, "train.py", *flags)


def run(checkout: Path, folder: Path, script: str, *flags: object) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(checkout)}
    command = [sys.executable, str(checkout / script), *map(str, flags)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(
            f"{' '.join(command)}: exit code "
            f"{done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )


def name(case: str) -> str:
    return case.replace(" ", "-")


def numbers(folder: Path, case: str) -> dict[str, object]:
    """{"steps": [[step, loss, gradient norm], ...], "evaluations": ..., "tensors": {folder: name:
    sha256}}, floats in hexadecimal."""
    run_directory = folder / "runs" / name(case)
    lines = [
        json.loads(line) for line in (run_directory / "metrics.jsonl").read_text().splitlines()
    ]
    steps = [[r["step"], r["loss"].hex(), r["grad_norm"].hex()] for r in lines if "loss" in r]
    evaluations = [[r["step"], r["eval_loss"].hex()] for r in lines if "eval_loss" in r]
    tensors, last = {}, max(run_directory.glob("step-*"))
    for files in sorted({file.parent for file in last.rglob("*.safetensors")}):
        for key, tensor in Tensors(
            files.glob("*.safetensors")
        ).items():  # whole, however ranks have cut it
            bits = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
            tensors[f"{files.relative_to(last)}: {key}"] = hashlib.sha256(bits).hexdigest()
    return {"steps": steps, "evaluations": evaluations, "tensors": tensors}


def compare(before: Path, *others: Path) -> None:
    """The table, in Markdown."""
    first, *rest = (
        json.loads((folder / "numbers.json").read_text()) for folder in (before, *others)
    )
    titles = [folder.name for folder in others]
    print("| case | last loss before | in hexadecimal | " + " | ".join(titles) + " |")
    print("|---|---|---|" + "---|" * len(titles))
    for case in CASES:
        loss = first[case]["steps"][-1][1]
        cells = [verdict(first[case], other[case]) for other in rest]
        print(f"| {case} | {float.fromhex(loss):.4f} | `{loss}` | " + " | ".join(cells) + " |")


def verdict(ours: dict, theirs: dict) -> str:
    counts = f"{len(ours['steps'])} steps, {len(ours['tensors'])} tensors"
    differing = [kind for kind in ours if ours[kind] != theirs[kind]]
    return f"**differs** in {' and '.join(differing)}" if differing else f"equal: {counts}"


if __name__ == "__main__":
    main()
