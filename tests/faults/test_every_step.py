"""Law 2 for every k: a run of 30 steps, resumed after any of them, is the undisturbed run in every
number, hexadecimal.

Dropout, bfloat16 with stochastic rounding, accumulation, three epochs and a part of a fourth,
read-ahead of 0 and 2.
"""

import json

import pytest
import torch
from ranks import Job, toy_run
from safetensors.torch import load_file

pytestmark = pytest.mark.faults

STEPS = 30
CASES = [("fsdp", 2, "sharded"), ("fsdp2", 2, "full"), ("ddp", 2, "full"), ("auto", 1, "full")]


def flags(toys, output, strategy, kind, *more):
    return (
        *(*toy_run(toys, output, model="gpt2", data="ragged"), "--lr", 1e-2),
        *(
            "--strategy", strategy, "--state_dict_type", kind, "--precision", "bf16-true",
            "--warmup_steps", 5,
        ),
        *(
            "--micro_batch_size", 1, "--global_batch_size", 5 if strategy == "auto" else 6,
            "--max_step", STEPS,
        ),
        *("--eval_iters", 2, "--eval_batch_size", 2, "--eval_step_interval", 7, *more),
    )


def log_samples(folder):
    """Each rank writes the sequences of each step that it trains on."""

    def install():
        from fabric_llm.training import step

        accumulate = step.accumulate

        def with_ids(fabric, model, micro_batches, *rest):
            ids = [batch["input_ids"].tolist() for batch in micro_batches]
            folder.mkdir(exist_ok=True)
            with (folder / f"rank-{fabric.global_rank}").open("a") as file:
                file.write(json.dumps(ids) + "\n")
            return accumulate(fabric, model, micro_batches, *rest)

        step.accumulate = with_ids

    return install


def samples(folder):
    return {path.name: path.read_text().splitlines() for path in sorted(folder.iterdir())}


def lines(run):
    """Every number of the log but times, floats in hexadecimal."""
    keys = (
        "step", "loss", "grad_norm", "lr", "tokens", "eval_loss", "updated_fraction",
        "update_ratio",
    )
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [
        {k: v.hex() if isinstance(v, float) else v for k, v in line.items() if k in keys}
        for line in found
    ]


def tensors(run):
    last = run / f"step-{STEPS:08d}"
    files = sorted(last.rglob("*.safetensors"))
    return {
        (str(f.relative_to(last)), name): value
        for f in files
        for name, value in load_file(f).items()
    }


def prove(toys, tmp_path, strategy, ranks, kind, cases):
    """cases: (step to resume after, --num_workers)."""
    whole = Job(
        ranks,
        *flags(toys, tmp_path, strategy, kind, "--run_name", "whole", "--save_step_interval", 1),
        before=log_samples(tmp_path / "whole-samples"),
    )
    assert whole.wait(120) == [0] * ranks, whole.output
    expected, weights = lines(tmp_path / "whole"), tensors(tmp_path / "whole")
    read = samples(tmp_path / "whole-samples")
    for k, workers in cases:
        name = f"from-{k}-{workers}"
        more = (
            "--resume",
            "true",
            "--checkpoint",
            tmp_path / "whole" / f"step-{k:08d}",
            "--run_name",
            name,
        )
        more += ("--num_workers", workers)
        job = Job(
            ranks,
            *flags(toys, tmp_path, strategy, kind, *more),
            before=log_samples(tmp_path / f"samples-{name}"),
        )
        assert job.wait() == [0] * ranks, job.output
        assert lines(tmp_path / name) == expected, name
        ours = tensors(tmp_path / name)
        assert ours.keys() == weights.keys() and all(
            torch.equal(ours[key], weights[key]) for key in weights
        ), name
        for rank, seen in samples(tmp_path / f"samples-{name}").items():
            assert seen == read[rank][-len(seen) :] and len(seen) == STEPS - k, (name, rank)


@pytest.mark.parametrize(("strategy", "ranks", "kind"), CASES)
def test_resume_after_steps_here_and_there(toys, tmp_path, strategy, ranks, kind):
    first = CASES.index((strategy, ranks, kind)) + 1
    prove(
        toys, tmp_path, strategy, ranks, kind, [(k, 2 * (k % 2)) for k in range(first, STEPS, 13)]
    )


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "ranks", "kind"), CASES)
def test_resume_after_every_step(toys, tmp_path, strategy, ranks, kind):
    prove(
        toys,
        tmp_path,
        strategy,
        ranks,
        kind,
        [(k, workers) for k in range(1, STEPS) for workers in (0, 2)],
    )
