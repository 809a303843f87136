"""--precision 16-mixed: its gradient scaler is felt by nothing but the backward pass, and resumes
with the run.

GPUs only, says preflight; here that check is taken out, and float16 computed on the CPU.
"""

import json

import pytest
import torch
from conftest import ended, same_tensors, step, stored
from ranks import metrics, run_ranks, toy_run


def half(argv, scale_loss_of_step=None):
    """train.py on a CPU in 16-mixed; the loss of one step is 10,000 times too large."""
    import fabric_llm.training.step
    import train
    from fabric_llm.model import strategy_rules
    from fabric_llm.model.language_model import LanguageModel

    strategy_rules.strategy = lambda *_: "single"
    forward, seed_step, now = LanguageModel.forward, fabric_llm.training.step.seed_step, [0]

    def seeded(seed, step, rank):
        now[0] = step + 1
        seed_step(seed, step, rank)

    def scaled(self, *args, **kwargs):
        loss = forward(self, *args, **kwargs)
        return loss * 1e4 if now[0] == scale_loss_of_step and torch.is_grad_enabled() else loss

    fabric_llm.training.step.seed_step, LanguageModel.forward = seeded, scaled
    return ended(train.main, *argv)


SIZES = (
    "--global_batch_size 4 --micro_batch_size 2 --eval_iters 0 --log_step_interval 1 --lr 1e-3 "
    "--max_step 6 --weight_decay 0 --precision 16-mixed --save_step_interval 1 --run_name"
)


def flags(toys, output, name, *more):
    return (*toy_run(toys, output), *SIZES.split(), name, *more)


def scale_at(checkpoint):
    progress = json.loads((checkpoint / "trainer" / "progress.json").read_text())
    return progress["scaler"]["scale"]


def moments(checkpoint):
    tensors = stored(checkpoint / "trainer" / "optimizer")
    return {name: value for name, value in tensors.items() if name.endswith("exp_avg")}


@pytest.mark.longer
def test_the_optimizer_sees_gradients_of_their_own_size(toys, tmp_path):
    one, other = tmp_path / "half", tmp_path / "whole"
    assert run_ranks(1, half, flags(toys, tmp_path, "half")) == [0]
    assert run_ranks(1, half, flags(toys, tmp_path, "whole", "--precision", "32-true")) == [0]
    assert metrics(one) == pytest.approx(metrics(other), rel=1e-3)
    ours, theirs = moments(step(one, 1)), moments(step(other, 1))
    for name, value in theirs.items():
        assert ours[name].norm().item() == pytest.approx(value.norm().item(), rel=0.02), name


def test_a_step_that_is_left_out_changes_nothing(toys, tmp_path):
    """An infinity, which makes the scale smaller, and which a resumed run must know of."""
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    assert run_ranks(1, half, flags(toys, tmp_path, "whole"), 3) == [0]
    assert metrics(whole, "verdict") == ["skip"]
    assert same_tensors(stored(step(whole, 2)), stored(step(whole, 3)))
    assert [scale_at(step(whole, k)) for k in (2, 3, 6)] == [65536.0, 32768.0, 32768.0]
    go_on = ("--resume", "true", "--checkpoint", step(whole, 3))
    assert run_ranks(1, half, flags(toys, tmp_path, "resumed", *go_on)) == [0]
    assert same_tensors(stored(step(resumed, 6)), stored(step(whole, 6)))
    assert scale_at(step(resumed, 6)) == 32768.0


def test_a_finite_spike_is_left_out_as_well(toys, tmp_path):
    more = "--spike_threshold 6 --spike_window 2 --spike_action skip --lr 1e-6".split()
    assert run_ranks(1, half_with_small_spike, flags(toys, tmp_path, "run", *more)) == [0]
    run = tmp_path / "run"
    assert metrics(run, "verdict")[0] == "skip"
    assert same_tensors(stored(step(run, 2)), stored(step(run, 3)))


def half_with_small_spike(argv):
    """The loss of step 3 is twice as large: finite in float16, scale and all."""
    from fabric_llm.model.language_model import LanguageModel

    forward, calls = LanguageModel.forward, [0]

    def doubled(self, *args, **kwargs):
        loss = forward(self, *args, **kwargs)
        calls[0] += self.training and torch.is_grad_enabled() and kwargs.get("labels") is not None
        return loss * 2 if calls[0] in (5, 6) and torch.is_grad_enabled() else loss

    LanguageModel.forward = doubled
    return half(argv)
