"""Numbers that a run rests on: summed gradients, the part of weights that changes, what is
counted."""

import contextlib
import io
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import VOCABULARY
from datasets import Dataset, DatasetDict
from ranks import metrics, run_ranks, toy_run, train_ranks
from torch import nn
from transformers import AutoModelForCausalLM

import train
from fabric_llm.data.batches import Batches
from fabric_llm.data.dataset import open_dataset
from fabric_llm.model.weights import is_finite
from fabric_llm.training.step import GradientSums, clip_gradients, sample_weights, update_size

STRATEGIES = [("auto", 1), ("ddp", 2), ("fsdp", 2), ("fsdp2", 2)]


def accumulated(toys, kind, micro_batches=64):
    """(relative error of the accumulated gradient of a bf16 model against the float32 sum of the
    same gradients)."""
    model = AutoModelForCausalLM.from_pretrained(toys / "llama", dtype=torch.bfloat16).train()
    rows = Batches(open_dataset(toys / "many").train, 0, 1, micro_batches).at(0)
    exact = [torch.zeros(p.shape) for p in model.parameters()]
    sums = GradientSums(model.parameters()) if kind == "float32" else None
    for index, batch in enumerate(rows):
        alone = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        logits = model(batch["input_ids"]).logits.float()
        F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()).backward()
        for total, parameter, before in zip(exact, model.parameters(), alone):
            total += parameter.grad.float()
            if sums is None and before is not None:
                parameter.grad.copy_(before + parameter.grad)  # what autograd does in bfloat16
        if sums is not None:
            sums.add(last=index == micro_batches - 1)
    found = torch.cat([p.grad.float().flatten() for p in model.parameters()])
    wanted = torch.cat([total.flatten() for total in exact])
    return ((found - wanted).norm() / wanted.norm()).item()


def test_gradients_of_64_micro_batches_lose_no_more_than_one_rounding(toys):
    assert accumulated(toys, "same") > 0.005
    assert accumulated(toys, "float32") < 0.0025


def test_what_the_last_micro_batch_does_not_use_keeps_its_gradient():
    """Such as an expert that no token of it was sent to."""
    weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    sums = GradientSums([weight])
    for gradient in (1.0, 2.0, None):
        weight.grad = None if gradient is None else torch.full_like(weight, gradient)
        sums.add(last=gradient is None)
    assert torch.equal(weight.grad, torch.full_like(weight, 3.0))


@pytest.mark.longer
@pytest.mark.parametrize(("strategy", "ranks"), STRATEGIES)
def test_float32_sums_give_the_same_run_at_any_number_of_micro_batches(
    toys, tmp_path, strategy, ranks
):
    words = "--max_step 3 --lr 1e-3 --global_batch_size 16 --eval_iters 0 --bf16_updates master"
    flags = (*toy_run(toys, tmp_path, data="ragged"), *words.split(), "--strategy", strategy)
    train_ranks(ranks, *flags, "--run_name", "few", "--micro_batch_size", 16 // ranks)
    train_ranks(ranks, *flags, "--run_name", "many", "--micro_batch_size", 1)
    for key, near in (("loss", 2e-3), ("grad_norm", 2e-2)):
        few, many = (metrics(tmp_path / name, key) for name in ("few", "many"))
        assert many == pytest.approx(few, rel=near), key


@pytest.mark.longer
@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
def test_reduce_dtype_is_used(toys, tmp_path, strategy):
    flags = (*toy_run(toys, tmp_path), "--max_step", 3, "--strategy", strategy, "--lr", 1e-3)
    flags += ("--precision", "bf16-mixed", "--global_batch_size", 4, "--eval_iters", 0)
    train_ranks(2, *flags, "--run_name", "float32")
    train_ranks(2, *flags, "--run_name", "bfloat16", "--reduce_dtype", "bfloat16")
    exact, rounded = (metrics(tmp_path / name, "grad_norm") for name in ("float32", "bfloat16"))
    assert exact != rounded and rounded == pytest.approx(exact, rel=1e-2)


@pytest.mark.longer
def test_the_part_of_weights_that_changes_is_the_same_on_any_ranks(toys, tmp_path):
    words = "--global_batch_size 4 --max_step 3 --lr 1e-5 --bf16_updates nearest --eval_iters 0"
    flags, found = (*toy_run(toys, tmp_path), *words.split()), {}
    for strategy, ranks in STRATEGIES:
        train_ranks(ranks, *flags, "--run_name", strategy, "--strategy", strategy)
        names = ("updated_fraction", "update_ratio")
        found[strategy] = [metrics(tmp_path / strategy, name) for name in names]
    for fractions, ratios in found.values():
        assert fractions == pytest.approx(found["auto"][0], rel=0.05)
        assert ratios == pytest.approx(found["auto"][1], rel=0.2), "other weights are in the sample"
        assert all(0 < fraction < 0.9 for fraction in fractions)


def test_update_size_counts_what_it_says():
    layer = nn.Linear(4, 4, bias=False)
    with torch.no_grad():
        layer.weight.fill_(1.0)
        before = sample_weights(layer.parameters())
        layer.weight[0] += 0.5
    fraction, ratio = update_size(before, layer)
    assert fraction == 0.25 and ratio == pytest.approx((4 * 0.25 / 16) ** 0.5)


@pytest.mark.longer
def test_few_changing_weights_are_warned_of_once(toys, tmp_path):
    def run(words):
        with contextlib.redirect_stdout(io.StringIO()) as output:
            train.main([str(word) for word in words])
        return output.getvalue()

    def said(*flags):
        words = "--global_batch_size 3 --max_step 8 --log_step_interval 1 --eval_iters 0 --lr 1e-7"
        return run_ranks(1, run, [*toy_run(toys, tmp_path), *words.split(), *flags])[0]

    text = said("--bf16_updates", "nearest")
    assert text.count("Warning: only") == 1 and "--bf16_updates stochastic" in text
    assert said("--bf16_updates", "stochastic").count("nothing is lost") == 1
    assert "Warning" not in said("--precision", "32-true")


@pytest.mark.parametrize(("strategy", "ranks"), [("auto", 1), ("fsdp", 2)])
def test_a_batch_without_any_target_contributes_nothing(toys, tmp_path, strategy, ranks):
    """Not 0/0: no step is left out because of it."""
    labels = [[-100] * 4] * 7 + [[1, 2, 3, 4]]
    rows = Dataset.from_dict({"input_ids": [[1, 2, 3, 4]] * 8, "labels": labels})
    DatasetDict({"train": rows, "validation": rows}).save_to_disk(tmp_path / "masked")
    words = f"--run_name run --strategy {strategy} --number_epochs 1 --precision 32-true"
    data = ("--train_data_dir", tmp_path / "masked")
    train_ranks(ranks, *toy_run(toys, tmp_path), *data, *words.split())
    losses = metrics(tmp_path / "run")
    assert len(losses) == 8 // ranks and losses.count(0.0) == len(losses) - 1
    assert metrics(tmp_path / "run", "verdict") == [], "no step was left out"


def test_the_loss_counts_tokens_not_rows(toys, tmp_path):
    """Validation too: the mean over target tokens of all ranks, with masks of any shape."""
    train_ranks(
        2,
        *(*toy_run(toys, tmp_path, data="ragged"), "--strategy", "fsdp"),
        *("--run_name", "run", "--precision", "32-true", "--max_step", 1),
        *("--global_batch_size", 2, "--eval_batch_size", 3),
    )
    dataset = open_dataset(toys / "ragged")
    model = AutoModelForCausalLM.from_pretrained(toys / "llama", dtype=torch.float32)
    rows = {name: torch.from_numpy(values) for name, values in dataset.validation[:].items()}
    with torch.no_grad():
        logits = model(rows["input_ids"]).logits[:, :-1].reshape(-1, VOCABULARY)
    expected = F.cross_entropy(logits, rows["labels"][:, 1:].flatten()).item()
    assert metrics(tmp_path / "run", "eval_loss")[0] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    "look", [lambda p: clip_gradients([p], 0, None), lambda p: is_finite(p.grad)]
)
def test_a_gradient_is_measured_without_a_copy_of_it(look):
    parameter = nn.Parameter(torch.ones(2**25))
    parameter.grad = torch.ones(2**25)
    look(parameter)
    Path("/proc/self/clear_refs").write_text("5")  # the kernel begins again with what is held now
    before = most_held()
    look(parameter)
    assert most_held() - before < 64 * 2**20, "of 128 MiB"


def most_held():
    """Bytes, at once, since the kernel began to count."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024
