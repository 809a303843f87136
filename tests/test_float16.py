"""--precision 16-mixed: its gradient scaler is felt by nothing but the backward pass, and resumes
with the run.

GPUs only, says preflight; here that check is taken out, and float16 computed on the CPU.
"""

import json

import pytest
import torch
from ranks import metrics, run_ranks, toy_run
from safetensors.torch import load_file


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
    try:
        train.main([str(word) for word in argv])
    except SystemExit as stop:
        return stop.code
    return 0


def flags(toys, output, name, *more):
    words = (*toy_run(toys, output), "--run_name", name)
    words += (
        "--global_batch_size", 4, "--micro_batch_size", 2, "--eval_iters", 0,
        "--log_step_interval", 1,
    )
    return [
        *words, "--lr", 1e-3, "--max_step", 6, "--weight_decay", 0, "--precision", "16-mixed",
        *more,
    ]


def moments(run, step):
    tensors = load_file(
        next((run / f"step-{step:08d}" / "trainer" / "optimizer").glob("*.safetensors"))
    )
    return {name: value for name, value in tensors.items() if name.endswith("exp_avg")}


@pytest.mark.longer
def test_the_optimizer_sees_gradients_of_their_own_size(toys, tmp_path):
    one = ("--save_step_interval", 1)
    assert run_ranks(1, half, flags(toys, tmp_path, "half", *one)) == [0]
    assert run_ranks(1, half, flags(toys, tmp_path, "whole", *one, "--precision", "32-true")) == [0]
    assert metrics(tmp_path / "half") == pytest.approx(metrics(tmp_path / "whole"), rel=1e-3)
    ours, theirs = moments(tmp_path / "half", 1), moments(tmp_path / "whole", 1)
    for name, value in theirs.items():
        assert ours[name].norm().item() == pytest.approx(value.norm().item(), rel=0.02), name


def test_a_step_that_is_left_out_changes_nothing(toys, tmp_path):
    """An infinity, which makes the scale smaller, and which a resumed run must know of."""
    more = ("--save_step_interval", 1)
    assert run_ranks(1, half, flags(toys, tmp_path, "whole", *more), 3) == [0]
    verdicts = metrics(tmp_path / "whole", "verdict")
    assert verdicts == ["skip"]
    before, after = (
        load_file(tmp_path / "whole" / f"step-0000000{k}" / "model.safetensors") for k in (2, 3)
    )
    assert all(torch.equal(before[name], after[name]) for name in before)
    scales = [
        json.loads(
            (tmp_path / "whole" / f"step-0000000{k}" / "trainer" / "progress.json").read_text()
        )["scaler"]["scale"]
        for k in (2, 3, 6)
    ]
    assert scales == [65536.0, 32768.0, 32768.0]
    resumed = flags(
        toys, tmp_path, "resumed", "--resume", "true",
        "--checkpoint", tmp_path / "whole" / "step-00000003",
    )
    assert run_ranks(1, half, [*resumed, *more]) == [0]
    ours, theirs = (
        load_file(tmp_path / run / "step-00000006" / "model.safetensors")
        for run in ("resumed", "whole")
    )
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    document = json.loads(
        (tmp_path / "resumed" / "step-00000006" / "trainer" / "progress.json").read_text()
    )
    assert document["scaler"]["scale"] == 32768.0


def test_a_finite_spike_is_left_out_as_well(toys, tmp_path):
    more = (
        "--save_step_interval", 1, "--spike_threshold", 6, "--spike_window", 2,
        "--spike_action", "skip",
    )
    small = ("--lr", 1e-6)
    argv = flags(toys, tmp_path, "run", *more, *small)
    assert run_ranks(1, half_with_small_spike, argv) == [0]
    assert metrics(tmp_path / "run", "verdict")[0] == "skip"
    before, after = (
        load_file(tmp_path / "run" / f"step-0000000{k}" / "model.safetensors") for k in (2, 3)
    )
    assert all(torch.equal(before[name], after[name]) for name in before)


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
