"""Law 2: N steps = N/2, save, stop, resume, N/2: bit for bit, data order and randomness
included."""

import pytest
from ranks import assert_same_tensors, metrics, tensors, toy_run, train_ranks

STEPS, HALF = 12, 5  # an epoch ends within step 6: 44 sequences, 8 a step


def flags(toys, output, model, strategy, kind, precision):
    return (
        *toy_run(toys, output, model=model, data="ragged"),
        *("--strategy", strategy, "--state_dict_type", kind, "--precision", precision),
        *"--lr 1e-2 --micro_batch_size 2 --global_batch_size 8".split(),
        *"--eval_iters 4 --eval_batch_size 2".split(),
        *("--max_step", STEPS, "--save_step_interval", HALF),
    )


@pytest.mark.quick_cases(r"auto-1-gpt2-bf16-true-sharded")
@pytest.mark.every_eighth(4)
@pytest.mark.parametrize(
    ("strategy", "ranks", "model", "precision", "kind"),
    [
        ("auto", 1, "gpt2", "bf16-true", "full"),
        ("auto", 1, "gpt2", "bf16-true", "sharded"),
        ("ddp", 2, "gpt2", "32-true", "full"),
        ("ddp", 2, "llama", "bf16-mixed", "sharded"),
        ("fsdp", 2, "gpt2", "bf16-true", "full"),
        ("fsdp", 2, "gpt2", "bf16-true", "sharded"),
        ("fsdp", 2, "llama", "32-true", "sharded"),
        ("fsdp2", 2, "gpt2", "32-true", "full"),
        ("fsdp2", 2, "llama-tied", "bf16-true", "full"),
        ("fsdp2", 2, "llama-tied", "bf16-true", "sharded"),
    ],
)
def test_a_resumed_run_is_the_undisturbed_run(
    toys, tmp_path, strategy, ranks, model, precision, kind
):
    run = flags(toys, tmp_path, model, strategy, kind, precision)
    train_ranks(ranks, *run, "--run_name", "whole")
    # the same run again, stopped by resuming from its half: metrics and checkpoints after it are
    # written anew
    train_ranks(ranks, *run, "--run_name", "halves")
    half = tmp_path / "halves" / f"step-{HALF:08d}"
    train_ranks(ranks, *run, "--resume", "true", "--checkpoint", half, "--num_workers", 0)
    for key in ("step", "loss", "grad_norm", "eval_loss", "lr", "tokens"):
        assert metrics(tmp_path / "halves", key) == metrics(tmp_path / "whole", key), key
    whole, halves = (tensors(tmp_path / name / f"step-{STEPS:08d}") for name in ("whole", "halves"))
    assert_same_tensors(halves, whole)
    assert {value.item() for (_, name), value in whole.items() if name.endswith(".step")} == {STEPS}
    aside = list((tmp_path / "halves").glob("aside-step-*"))
    assert len(aside) == 2, "steps 10 and 12 of the first try are kept"


@pytest.mark.longer
def test_dropout_is_on_and_differs_between_steps(toys, tmp_path):
    """So that the test above does test randomness: the same batch at two steps gives two losses."""
    for model in ("gpt2", "gpt2-no-dropout"):
        words = flags(toys, tmp_path, model, "auto", "full", "32-true")
        train_ranks(1, *words, "--run_name", model, "--lr", 1e-30)
    assert metrics(tmp_path / "gpt2") != metrics(tmp_path / "gpt2-no-dropout")
