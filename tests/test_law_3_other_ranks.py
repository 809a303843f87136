"""Law 3: save on 2 ranks, go on with 1 or 4: the same curve."""

import pytest
from ranks import metrics, toy_run, train_ranks

from fabric_llm.checkpoint.keep import read_progress

STEPS, HALF = 10, 4


@pytest.mark.quick_cases(r"4-fsdp2-full")
@pytest.mark.every_eighth(4)
@pytest.mark.parametrize(
    ("strategy", "kind", "model"),
    [
        ("ddp", "full", "llama-tied"),
        ("fsdp", "full", "llama-tied"),
        ("fsdp", "sharded", "gpt2-no-dropout"),
        ("fsdp2", "full", "gpt2-no-dropout"),
        ("fsdp2", "sharded", "llama-tied"),
    ],
)
@pytest.mark.parametrize("ranks_after", [1, 4])
def test_the_curve_goes_on_with_another_number_of_ranks(
    toys, tmp_path, model, strategy, kind, ranks_after
):
    flags = (
        *toy_run(toys, tmp_path, model=model, data="ragged"),
        *"--precision 32-true --lr 1e-3 --global_batch_size 8".split(),
        *"--eval_iters 4 --eval_batch_size 2".split(),
        *("--state_dict_type", kind, "--max_step", STEPS, "--save_step_interval", HALF),
    )
    train_ranks(2, *flags, "--run_name", "run", "--strategy", strategy, "--micro_batch_size", 2)
    keys = ("step", "loss", "grad_norm", "eval_loss")
    expected = {key: metrics(tmp_path / "run", key) for key in keys}
    checkpoint = tmp_path / "run" / f"step-{HALF:08d}"
    sharded_after = strategy if ranks_after > 1 else "auto"
    again = ("--resume", "true", "--checkpoint", checkpoint, "--micro_batch_size", 1)
    train_ranks(ranks_after, *flags, *again, "--strategy", sharded_after)
    assert metrics(tmp_path / "run", "step") == expected["step"]
    for key in keys[1:]:
        assert metrics(tmp_path / "run", key) == pytest.approx(expected[key], rel=2e-6, abs=0), key
    progress = read_progress(tmp_path / "run" / f"step-{STEPS:08d}")["progress"]
    assert progress == {"step": STEPS, "position": STEPS * 8, "tokens": STEPS * 8 * 24}
