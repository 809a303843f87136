"""Law 10: a bf16-true run reaches the fp32 run's loss.

At this learning rate most updates are smaller than half a unit in the last place of a bf16 weight,
so plain rounding visibly stalls: the test can fail.
"""

import pytest
from ranks import metrics, toy_run, train_ranks

STEPS, LR = 300, 1e-4


def final_loss(toys, folder, name, ranks, *flags):
    words = f"--run_name {name} --global_batch_size 16 --micro_batch_size {16 // ranks} --max_step "
    words += f"{STEPS} --lr {LR} --min_lr {LR / 10} --warmup_steps 5 --beta2 0.95 --weight_decay 0 "
    words += "--eval_batch_size 32 --eval_iters 8"
    toy = toy_run(toys, folder, model="llama-tied", data="many")
    train_ranks(ranks, *toy, *words.split(), *flags, timeout_seconds=400)
    return metrics(folder / name, "eval_loss")[-1], metrics(folder / name, "updated_fraction")[5:]


@pytest.mark.longer
@pytest.mark.parametrize(
    ("strategy", "ranks", "kept"),
    [
        ("auto", 1, ["stochastic"]),
        pytest.param("auto", 1, ["master"], marks=pytest.mark.slow),
        pytest.param("fsdp", 2, ["stochastic"], marks=pytest.mark.slow),
    ],
)
def test_a_bf16_run_reaches_the_fp32_loss(toys, tmp_path, strategy, ranks, kept):
    own = ("--strategy", strategy)
    fp32, moved = final_loss(toys, tmp_path, "fp32", ranks, *own, "--precision", "32-true")
    assert min(moved) > 0.9
    gaps = {}
    for updates in [*kept, "nearest"]:
        more = (*own, "--bf16_updates", updates)
        loss, _ = final_loss(toys, tmp_path, updates, ranks, *more)
        gaps[updates] = abs(loss - fp32)
    assert all(gaps[updates] < 0.01 for updates in kept), gaps
    assert gaps["nearest"] > 5 * max(0.01, *(gaps[updates] for updates in kept))
