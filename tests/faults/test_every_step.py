"""Law 2 for every k: a run of 30 steps, resumed after any of them, is the undisturbed run in every
number, hexadecimal.

Dropout, bfloat16 with stochastic rounding, accumulation, three epochs and a part of a fourth,
read-ahead of 0 and 2.
"""

import json

import pytest
from ranks import Job, assert_same_tensors, tensors, toy_run
from ranks import lines as lines_of

pytestmark = pytest.mark.faults

STEPS = 30
CASES = [("fsdp", 2, "sharded"), ("fsdp2", 2, "full"), ("ddp", 2, "full"), ("auto", 1, "full")]


def flags(toys, output, strategy, kind, *more):
    return (
        *toy_run(toys, output, model="gpt2", data="ragged"),
        *"--lr 1e-2 --precision bf16-true --warmup_steps 5 --micro_batch_size 1".split(),
        *"--eval_iters 2 --eval_batch_size 2 --eval_step_interval 7".split(),
        *("--strategy", strategy, "--state_dict_type", kind, "--max_step", STEPS),
        *("--global_batch_size", 5 if strategy == "auto" else 6, *more),
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
    keys = "step loss grad_norm lr tokens eval_loss updated_fraction update_ratio".split()
    return [
        {k: v.hex() if isinstance(v, float) else v for k, v in line.items() if k in keys}
        for line in lines_of(run)
    ]


def prove(toys, tmp_path, strategy, ranks, kind, cases):
    """cases: (step to resume after, --num_workers)."""

    def run(name, *more):
        words = flags(toys, tmp_path, strategy, kind, "--run_name", name, *more)
        job = Job(ranks, *words, before=log_samples(tmp_path / f"samples-{name}"))
        assert job.wait(120) == [0] * ranks, job.output
        last = tmp_path / name / f"step-{STEPS:08d}"
        return lines(tmp_path / name), tensors(last), samples(tmp_path / f"samples-{name}")

    expected, weights, read = run("whole", "--save_step_interval", 1)
    for k, workers in cases:
        name, at = f"from-{k}-{workers}", tmp_path / "whole" / f"step-{k:08d}"
        again = ("--resume", "true", "--checkpoint", at, "--num_workers", workers)
        found, ours, of_ranks = run(name, *again)
        assert found == expected, name
        assert_same_tensors(ours, weights)
        for rank, seen in of_ranks.items():
            assert seen == read[rank][-len(seen) :] and len(seen) == STEPS - k, (name, rank)


@pytest.mark.parametrize(("strategy", "ranks", "kind"), CASES)
def test_resume_after_steps_here_and_there(toys, tmp_path, strategy, ranks, kind):
    first = CASES.index((strategy, ranks, kind)) + 1
    cases = [(k, 2 * (k % 2)) for k in range(first, STEPS, 13)]
    prove(toys, tmp_path, strategy, ranks, kind, cases)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "ranks", "kind"), CASES)
def test_resume_after_every_step(toys, tmp_path, strategy, ranks, kind):
    cases = [(k, workers) for k in range(1, STEPS) for workers in (0, 2)]
    prove(toys, tmp_path, strategy, ranks, kind, cases)
