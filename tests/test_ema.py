"""--ema_decay: a moving average of the weights, sharded, saved, resumed and exported like the
weights."""

import json
import math

import pytest
import torch
from conftest import ended, same_tensors, stored
from ranks import metrics, run_ranks, toy_run, train_ranks
from test_guard import train_with_faults
from torch import nn
from transformers import AutoModelForCausalLM

import export_hf
from fabric_llm.checkpoint import reading
from fabric_llm.model.weights import PREFIX
from fabric_llm.training.adamw import AdamW, checkpoint_bytes
from fabric_llm.training.ema import Average
from fabric_llm.verify.__main__ import main as verify

DECAY = 0.6


SIZES = (
    "--run_name run --lr 1e-2 --max_step 4 --global_batch_size 4 --micro_batch_size 1 "
    "--eval_iters 0 --verify_start false --save_step_interval 1"
)


def flags(toys, output, *more, model="gpt2-no-dropout", precision="32-true", strategy="auto"):
    how = ("--strategy", strategy, "--precision", precision)
    return (*toy_run(toys, output, model=model), *SIZES.split(), *how, *more)


def average_of(checkpoint):
    """Name -> moving average, as it is in the checkpoint."""
    return {
        name.removeprefix(f"state.{PREFIX}").removesuffix(".ema"): tensor
        for name, tensor in reading.optimizer_state(checkpoint).items()
        if name.endswith(".ema")
    }


def step(folder, number):
    return folder / "run" / f"step-{number:08d}"


def plain(folder, base, decay, steps):
    """The average in float64 over the weights of checkpoints, from those of `base` on."""
    average = {name: tensor.double() for name, tensor in base.items()}
    for number in steps:
        for name, tensor in stored(step(folder, number)).items():
            average[name] = decay * average[name] + (1 - decay) * tensor.double()
    return average


def assert_average(checkpoint, wanted):
    """The average in the checkpoint is `wanted`, but for rounding in float32."""
    average = average_of(checkpoint)
    assert average.keys() == wanted.keys()
    for name, tensor in average.items():
        assert tensor.dtype == torch.float32
        torch.testing.assert_close(tensor.double(), wanted[name], rtol=1e-6, atol=1e-7, msg=name)


# --------------------------------------------------------------------------------- what it is


@pytest.mark.longer
@pytest.mark.every_eighth(5)
@pytest.mark.parametrize(
    ("ranks", "strategy", "model", "precision", "how"),
    [
        (1, "auto", "gpt2-no-dropout", "32-true", "FULL_SHARD"),
        (2, "fsdp", "gpt2-no-dropout", "bf16-true", "FULL_SHARD"),
        (2, "fsdp2", "llama", "bf16-true", "FULL_SHARD"),
        (2, "fsdp", "llama", "32-true", "FULL_SHARD"),
        (2, "fsdp", "llama", "32-true", "SHARD_GRAD_OP"),
        (2, "fsdp", "llama", "32-true", "NO_SHARD"),
        (2, "fsdp2", "llama", "32-true", "SHARD_GRAD_OP"),
        (2, "fsdp", "llama", "bf16-mixed", "FULL_SHARD"),
        (2, "ddp", "llama", "32-true", "FULL_SHARD"),
    ],
)
def test_is_the_plain_average_over_the_steps(
    toys, tmp_path, ranks, strategy, model, precision, how
):
    """In float32 on the host, also of bfloat16 weights; eval_loss_ema is that of the exported
    average."""
    more = ("--ema_decay", DECAY, "--eval_iters", 2, "--eval_batch_size", 4)
    more += ("--sharding_strategy", how) if strategy.startswith("fsdp") else ()
    of = {"model": model, "precision": precision, "strategy": strategy}
    train_ranks(ranks, *flags(toys, tmp_path, *more, **of))
    dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32
    base = {name: tensor.to(dtype) for name, tensor in stored(toys / model).items()}
    assert_average(step(tmp_path, 4), plain(tmp_path, base, DECAY, range(1, 5)))
    losses = metrics(tmp_path / "run", "eval_loss")
    of_average = metrics(tmp_path / "run", "eval_loss_ema")
    assert of_average[0] == losses[0] and len(losses) == len(of_average)
    assert of_average[-1] != losses[-1]
    close = 2e-2 if "16" in precision else 1e-5
    assert of_average[-1] == pytest.approx(loss_of_export(tmp_path, "float32"), abs=close)


def exported(folder, *more):
    words = (folder / "run", "--output", folder / "ema", "--ema", "true", *more)
    return ended(export_hf.main, *words)


def loss_of_export(folder, dtype):
    """The validation loss of the exported average, as fabric_llm.average computes it."""
    from fabric_llm.average import main

    assert exported(folder, "--dtype", dtype) == 0
    output = folder / "average"
    ended(main, folder / "ema", step(folder, 4), "--weights", "1,0", "--output", output)
    note = json.loads((output / "average.json").read_text())
    return note["parts"][0]["eval_loss"]["validation"]


@pytest.mark.quick_cases(r"same")
@pytest.mark.parametrize(
    ("device", "dtype"), [("host", torch.float32), ("same", torch.bfloat16)], ids=["host", "same"]
)
def test_decay_0_is_the_model_itself(toys, tmp_path, device, dtype):
    more = ("--ema_decay", 0, "--ema_device", device, "--eval_iters", 1)
    train_ranks(1, *flags(toys, tmp_path, *more, precision="bf16-true"))
    weights = stored(step(tmp_path, 4))
    wanted = {name: tensor.to(dtype) for name, tensor in weights.items()}
    assert same_tensors(average_of(step(tmp_path, 4)), wanted)
    assert metrics(tmp_path / "run", "eval_loss_ema") == metrics(tmp_path / "run", "eval_loss")


@pytest.mark.longer
def test_the_average_does_not_change_the_run(toys, tmp_path):
    """Neither its weights, nor, with evaluations of the average between steps, under FSDP."""
    sizes = "--max_step 3 --micro_batch_size 2 --global_batch_size 8 --eval_iters 1"
    run = flags(toys, tmp_path, *sizes.split(), "--eval_step_interval", 1, "--run_name",
                model="gpt2", precision="bf16-true", strategy="fsdp")  # fmt: skip
    train_ranks(2, *run, "with", "--ema_decay", DECAY, "--ema_device", "same")
    train_ranks(2, *run, "without")
    assert metrics(tmp_path / "with", "loss") == metrics(tmp_path / "without", "loss")
    ends = (stored(tmp_path / name / "step-00000003") for name in ("with", "without"))
    assert same_tensors(*ends)


def train_with_nan(argv, micro_batches):
    """Train on one rank; the losses of these micro-batches are NaN, so that their steps are left
    out."""
    argv = [*map(str, argv), "--devices", "1", "--log_step_interval", "1"]
    assert run_ranks(1, train_with_faults, argv, {0: micro_batches}, math.nan) == [0]


def test_a_step_that_is_left_out_does_not_update_it(toys, tmp_path):
    train_with_nan(flags(toys, tmp_path, "--ema_decay", DECAY), [4])
    assert metrics(tmp_path / "run", "verdict") == ["skip"]
    assert same_tensors(average_of(step(tmp_path, 1)), average_of(step(tmp_path, 2)))
    wanted = plain(tmp_path, stored(toys / "gpt2-no-dropout"), DECAY, (1, 3, 4))
    assert_average(step(tmp_path, 4), wanted)


def test_an_update_that_is_due_after_a_step_that_is_left_out_is_made(toys, tmp_path):
    """Or the steps before it would never count; one after nothing but steps that were left out
    isn't."""
    more = ("--ema_decay", DECAY, "--ema_every", 2, "--max_step", 6)
    train_with_nan(flags(toys, tmp_path, *more, model="llama"), [4, 16, 20])  # steps 2, 5 and 6
    wanted = plain(tmp_path, stored(toys / "llama"), DECAY**2, (2, 4))
    assert_average(step(tmp_path, 6), wanted)


@pytest.mark.longer
def test_a_rewind_restores_it(toys, tmp_path):
    """The run goes back to step 2, and on with other data: as one that went back without a
    spike."""
    more = ("--ema_decay", DECAY, "--max_step", 16, "--save_step_interval", 4, "--lr", 1e-4)
    more += ("--spike_threshold", 6, "--spike_action", "rewind", "--log_step_interval", 1)
    argv = [*map(str, flags(toys, tmp_path, *more)), "--devices", "1"]
    assert run_ranks(1, train_with_faults, argv, {0: range(4 * 13, 4 * 14)}, 100.0) == [0]
    assert metrics(tmp_path / "run", "verdict") == ["rewind"]
    at_12, now = average_of(step(tmp_path, 12)), stored(step(tmp_path, 16))
    for name, tensor in average_of(step(tmp_path, 16)).items():
        assert torch.isfinite(tensor).all()
        for other in (at_12, now):
            assert (tensor - other[name]).abs().max() < 4 * 1.1e-4


# -------------------------------------------------------------------------------- saved and resumed


@pytest.mark.longer
@pytest.mark.every_eighth(3)
@pytest.mark.parametrize(
    ("ranks", "strategy", "kind", "device", "more"),
    [
        (2, "fsdp", "sharded", "host", ()),
        (1, "auto", "full", "same", ()),
        (2, "fsdp2", "full", "host", ("--async_save", "true")),
        (2, "fsdp2", "sharded", "same", ("--cpu_offload", "true")),
        (2, "fsdp", "full", "same", ("--sharding_strategy", "SHARD_GRAD_OP")),
        (2, "ddp", "full", "host", ("--bf16_updates", "master")),
    ],
)
def test_a_resumed_average_is_the_undisturbed_one(
    toys, tmp_path, ranks, strategy, kind, device, more
):
    more += ("--ema_decay", 0.9, "--ema_device", device, "--state_dict_type", kind)
    more += ("--keep_last", 9)
    run = flags(toys, tmp_path, *more, precision="bf16-true", strategy=strategy)
    train_ranks(ranks, *run)
    train_ranks(ranks, *run, "--resume", "true", "--checkpoint", step(tmp_path, 2))
    [aside] = (tmp_path / "run").glob("aside-step-00000004-*")
    assert same_tensors(average_of(step(tmp_path, 4)), average_of(aside))


@pytest.mark.parametrize(("ranks", "strategy"), [(1, "auto"), (2, "fsdp2")])
@pytest.mark.parametrize("device", ["host", "same"])
@pytest.mark.longer
def test_it_goes_on_with_other_ranks(toys, tmp_path, ranks, strategy, device):
    """The average that is read is the one that was written, and rounding doesn't depend on
    shards."""
    more = ("--ema_decay", 0.9, "--ema_device", device)
    train_ranks(2, *flags(toys, tmp_path, *more, precision="bf16-true", strategy="fsdp"))
    run = flags(toys, tmp_path, *more, "--resume", "true", precision="bf16-true", strategy=strategy)
    train_ranks(ranks, *run, "--checkpoint", step(tmp_path, 2))
    [aside] = (tmp_path / "run").glob("aside-step-00000004-*")
    there, here = average_of(aside), average_of(step(tmp_path, 4))
    if same_tensors(stored(step(tmp_path, 4)), stored(aside)):
        assert same_tensors(here, there)
    for name, tensor in here.items():
        torch.testing.assert_close(tensor.float(), there[name].float(), rtol=2e-2, atol=2e-3)


@pytest.mark.longer
def test_it_is_turned_on_and_off_on_purpose(toys, tmp_path):
    run = flags(toys, tmp_path, model="llama")
    train_ranks(1, *run, "--max_step", 2)
    more = (*run, "--resume", "true", "--ema_decay", DECAY, "--max_step", 3)
    with pytest.raises(AssertionError, match="ema_decay None, not 0.6.*--resume_override"):
        train_ranks(1, *more, "--resume_override", "max_step")
    train_ranks(1, *more, "--resume_override", "max_step,ema_decay")
    wanted = plain(tmp_path, stored(step(tmp_path, 2)), DECAY, (3,))
    assert_average(step(tmp_path, 3), wanted)
    off = (*run, "--resume", "true", "--max_step", 4)
    train_ranks(1, *off, "--resume_override", "max_step,ema_decay")
    assert average_of(step(tmp_path, 4)) == {}
    assert verify([str(tmp_path / "run"), "--no_export"]) == 0


# --------------------------------------------------------------------------------- exported


@pytest.mark.quick_cases(r"sharded")
@pytest.mark.parametrize(("kind", "dtype"), [("sharded", "auto"), ("full", "float32")])
def test_export_of_the_average(toys, tmp_path, capsys, kind, dtype):
    more = ("--ema_decay", DECAY, "--state_dict_type", kind)
    train_ranks(1, *flags(toys, tmp_path, *more, precision="bf16-true"))
    assert exported(tmp_path, "--dtype", dtype) == 0
    said = capsys.readouterr().out
    assert "Exporting the moving average of" in said
    assert "differ from those of the moving average before it was" in said
    wanted = average_of(step(tmp_path, 4))
    if dtype == "auto":
        wanted = {name: tensor.bfloat16() for name, tensor in wanted.items()}
    assert same_tensors(stored(tmp_path / "ema"), wanted)
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "ema")
    assert opened.get_output_embeddings().weight is opened.get_input_embeddings().weight


def test_without_an_average_there_is_a_sentence(toys, tmp_path, capsys):
    train_ranks(1, *flags(toys, tmp_path, "--max_step", 1))
    assert exported(tmp_path) == 2 and not (tmp_path / "ema").exists()
    assert "holds no moving average of the weights" in capsys.readouterr().err


# --------------------------------------------------------------------------------- rounding


def rounded(param, ema, seed, *, decay=0.999, steps=(1,), origin=("w", 0)):
    """A bfloat16 average after updates with the same weights, from `ema`."""
    held = nn.Parameter(ema.clone())
    optimizer = AdamW([held], lr=1e-3, origins={held: origin})
    average = Average(optimizer, decay=decay, device="same", every=1, seed=seed)
    held.data.copy_(param)
    for number in steps:
        average.update(number)
    return average.state[held]["ema"]


def test_stochastic_rounding_is_right_on_average():
    """The mean over seeds is the float64 average, where rounding to nearest would never move."""
    generator = torch.Generator().manual_seed(0)
    ema = torch.randn(4096, generator=generator).bfloat16()
    param = (ema.float() * 1.01).bfloat16()
    exact = ema.double() + 0.001 * (param.double() - ema.double())
    seeds = 400
    mean = sum(rounded(param, ema, seed).double() for seed in range(seeds)) / seeds
    gap = ema.abs().double() * 2**-7  # at most, between neighbours
    error = (mean - exact) / gap
    assert error.abs().max() < 0.15 and abs(error.mean()) < 5 * 0.5 / math.sqrt(seeds * 4096)
    assert not torch.equal(mean, ema.double())
    assert torch.equal((ema + 0.001 * (param - ema)).bfloat16(), ema)


def test_rounding_depends_on_seed_step_and_place_alone():
    generator = torch.Generator().manual_seed(0)
    ema, param = torch.randn(2, 3000, generator=generator).bfloat16()
    whole = rounded(param, ema, 7)
    pieces = [slice(0, 1000), slice(1000, 3000)]
    shards = [rounded(param[piece], ema[piece], 7, origin=("w", piece.start)) for piece in pieces]
    assert torch.equal(torch.cat(shards), whole)
    for other in ({"seed": 8}, {"seed": 7, "steps": (2,)}, {"seed": 7, "origin": ("v", 0)}):
        assert not torch.equal(rounded(param, ema, **other), whole)


def test_an_average_of_what_stands_still_stands_still():
    ema = torch.randn(1000, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert torch.equal(rounded(ema, ema, 0, steps=range(1, 50)), ema)


def test_room_for_it_is_counted():
    parameters = [nn.Parameter(torch.empty(10).bfloat16()), nn.Parameter(torch.empty(5))]
    without = checkpoint_bytes(parameters, "stochastic")
    assert checkpoint_bytes(parameters, "stochastic", "host") - without == 60
    assert checkpoint_bytes(parameters, "stochastic", "same") - without == 40
