"""AdamW keeps small updates in bfloat16, is torch's AdamW in float32, and its state survives any
change of ranks."""

import copy
import math
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import CONTEXT, TOY_CONFIGS, VOCABULARY, same_tensors
from ranks import run_ranks
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader

from fabric_llm.base.fabric import Fabric
from fabric_llm.checkpoint import reading, writing
from fabric_llm.checkpoint.keep import Progress
from fabric_llm.model import language_model, loading, sharded, strategy, weights
from fabric_llm.model.strategy_rules import Placement, Sharding
from fabric_llm.training import adamw, adamw_rounded
from fabric_llm.training.adamw import UPDATES, AdamW
from fabric_llm.training.adamw_rounded import bfloat16_bits

SETTINGS = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
HALF_STEP = 2.0**-8  # half the distance from 1 to the next bfloat16


def parameters(dtype, *shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def train(params, optimizer, steps, seed=1):
    """Steps with random gradients, the same for every optimizer."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        optimizer.step()


def bits(tensor):
    return tensor.detach().view(torch.int16 if tensor.dtype == torch.bfloat16 else torch.int32)


def same_bits(first, second):
    return all(torch.equal(bits(a), bits(b)) for a, b in zip(first, second, strict=True))


# ------------------------------------------------------------------------------- the same as torch


@pytest.mark.parametrize("updates", UPDATES)
def test_float32_is_torch_adamw(updates):
    shapes = (7, 5), (3,), (), (0,)
    ours, theirs = (parameters(torch.float32, *shapes) for _ in range(2))
    optimizer = AdamW(ours, **SETTINGS, updates=updates)
    train(ours, optimizer, 50)
    train(theirs, torch.optim.AdamW(theirs, **SETTINGS, fused=True), 50)
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
    assert set(optimizer.state[ours[0]]) == {"step", "exp_avg", "exp_avg_sq"}


def test_nearest_is_torch_adamw_in_bfloat16():
    ours, theirs = (parameters(torch.bfloat16, (70, 50), (3,)) for _ in range(2))
    train(ours, AdamW(ours, **SETTINGS, updates="nearest"), 50)
    train(theirs, torch.optim.AdamW(theirs, **SETTINGS, fused=True), 50)
    assert same_bits(ours, theirs)


def test_master_is_float32_training_rounded_at_the_end():
    """With the same gradients the master is the float32 parameter, bit for bit."""
    ours = parameters(torch.bfloat16, (70, 50), (3,))
    theirs = [nn.Parameter(p.detach().float()) for p in ours]
    optimizer = AdamW(ours, **SETTINGS, updates="master")
    generator = torch.Generator().manual_seed(0)
    reference = torch.optim.AdamW(theirs, **SETTINGS, fused=True)
    for _ in range(50):
        for a, b in zip(ours, theirs):
            a.grad = torch.randn(a.shape, generator=generator).bfloat16()
            b.grad = a.grad.float()
        optimizer.step()
        reference.step()
    assert same_bits([optimizer.state[p]["master"] for p in ours], theirs)
    assert same_bits(ours, [p.bfloat16() for p in theirs])


@pytest.mark.parametrize("updates", UPDATES)
def test_blocks_do_not_show(updates, monkeypatch):
    """Parameters larger and smaller than a block: every element gets its own update, none two."""
    shapes = (150,), (3, 7), (1,), (64,), (40, 5), (0,)
    ours, whole = parameters(torch.bfloat16, *shapes), parameters(torch.bfloat16, *shapes)
    train(whole, AdamW(whole, **SETTINGS, updates=updates), 20)
    monkeypatch.setattr(adamw, "BLOCK_ELEMENTS", {"cpu": 64})
    monkeypatch.setattr(adamw_rounded, "PLAIN_ELEMENTS", {"cpu": 48})
    monkeypatch.setattr(adamw_rounded, "PIECE_ELEMENTS", {"cpu": 64})
    train(ours, AdamW(ours, **SETTINGS, updates=updates), 20)
    if updates == "stochastic":
        assert same_bits(ours, whole)
    for a, b in zip(ours, whole):
        torch.testing.assert_close(a, b, rtol=0.008, atol=0)


@pytest.mark.parametrize("updates", UPDATES)
def test_gradients_in_float32_and_parameters_without(updates):
    ours = parameters(torch.bfloat16, (4, 5), (6,))
    before = [p.detach().clone() for p in ours]
    optimizer = AdamW(ours, **{**SETTINGS, "lr": 0.1}, updates=updates)
    ours[0].grad_dtype = None
    ours[0].grad = torch.ones(5, 4).T  # float32 and transposed
    optimizer.step()
    assert (ours[0] < before[0]).all()
    assert same_bits(ours[1:], before[1:]) and optimizer.state[ours[1]]["step"] == 0


@pytest.mark.parametrize("updates", UPDATES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_step_prepared_before_its_gradients_are_scaled_is_the_same(updates, dtype):
    """As step.clip prepares it: also of gradients that aren't contiguous, and after a step that was
    prepared and left out."""
    shapes = (7, 5), (3,), (5, 7)
    ours, theirs = parameters(dtype, *shapes), parameters(dtype, *shapes)
    inner, late = (AdamW(params, **SETTINGS, updates=updates) for params in (ours, theirs))
    early = Fabric(accelerator="cpu", devices=1).setup_optimizers(inner)
    generator = torch.Generator().manual_seed(1)
    for is_left_out in (False, True, False, False):
        for param, other in zip(ours, theirs):
            gradient = torch.randn(param.shape[::-1], generator=generator).to(dtype)
            param.grad, other.grad = gradient.mT if gradient.ndim == 2 else gradient, None
            other.grad = param.grad.clone()
        inner.prepare()
        for param, other in zip(ours, theirs):
            param.grad.mul_(0.25), other.grad.mul_(0.25)
        if not is_left_out:
            early.step(), late.step()
        early.zero_grad(), late.zero_grad()
        assert same_bits(ours, theirs) and not inner.prepared, "which would keep the gradients"
    assert early.state[ours[0]]["step"] == late.state[theirs[0]]["step"] == 3


# ------------------------------------------------------------------------------- small updates


def test_stochastic_moves_by_the_right_amount_on_average():
    """Ones after 350 updates of a hundredth of half a step each, upwards."""
    param = nn.Parameter(torch.ones(2**12, dtype=torch.bfloat16))
    how = {"betas": (0.0, 0.0), "eps": 0.0, "weight_decay": 0.0}
    optimizer = AdamW([param], lr=HALF_STEP / 100, **how, updates="stochastic")
    for _ in range(350):
        param.grad = -torch.ones_like(param)  # Adam moves by lr
        optimizer.step()
    values, expected = param.detach().double(), 1 + 3.5 * HALF_STEP
    assert values.std() > 0  # each its own way
    assert abs(values.mean() - expected) < 3 * values.std() / math.sqrt(values.numel())


@pytest.mark.parametrize("updates", UPDATES)
def test_the_second_moment_does_not_stall(updates):
    """Large gradients, then small ones, at beta2 0.999: rounded to nearest, exp_avg_sq would never
    come down again."""
    param = nn.Parameter(torch.ones(2**12, dtype=torch.bfloat16))
    optimizer = AdamW([param], lr=1e-6, betas=(0.9, 0.999), updates=updates)
    large = 50
    for step in range(1000):
        param.grad = torch.full_like(param, 1.0 if step < large else 0.01)
        optimizer.step()
    exact = 0.999 ** (1000 - large) * (1 - 0.999**large) + 1e-4 * (1 - 0.999 ** (1000 - large))
    found = optimizer.state[param]["exp_avg_sq"].double().mean().item()
    if updates == "nearest":
        assert found > 2 * exact
    else:
        assert found == pytest.approx(exact, rel=0.01)


# ------------------------------------------------------------------------------- rounding


def rounded(values, seed=0):
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randint(0, 2**16, values.shape, dtype=torch.int32, generator=generator)
    return bfloat16_bits(values.clone(), noise).to(torch.int16).view(torch.bfloat16)


@pytest.mark.parametrize(
    "value", [1.001, -1.001, 3e-5, -7.77e4, 3.3e38, 1e-39, -3e-40, 1 + 2**-16, 1.9999]
)
def test_rounding_is_right_on_average(value):
    value = torch.tensor(value)
    count = 2**20
    found = rounded(value.expand(count)).double()
    low, high = found.min(), found.max()
    assert low <= value <= high
    assert bits(high.bfloat16()).sub(bits(low.bfloat16())).abs() <= 1  # neighbours
    # the variance of the two-point distribution
    spread = (high - value.double()) * (value.double() - low)
    assert abs(found.mean() - value.double()) <= 4 * (spread / count).sqrt()


def test_every_bfloat16_stays():
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    for noise in (0, 1, 2**15, 2**16 - 1):
        found = bfloat16_bits(every.float(), torch.full((2**16,), noise, dtype=torch.int32))
        found = found.to(torch.int16).view(torch.bfloat16)
        numbers = ~every.isnan()
        # infinities, denormals and -0.0 among them
        assert same_bits([found[numbers]], [every[numbers]])
        assert found[~numbers].isnan().all()


def test_nan_stays_nan_and_the_largest_number_becomes_infinite():
    nans = torch.tensor([0x7FFFFFFF, 0x7F800001, -1, -0x7FFFFF], dtype=torch.int32)
    nans = nans.view(torch.float32)
    assert nans.isnan().all()
    assert all(rounded(nans, seed).isnan().all() for seed in range(20))
    found = rounded(torch.full((1000,), torch.finfo(torch.float32).max))
    assert set(found.tolist()) <= {math.inf, torch.finfo(torch.bfloat16).max}


def test_rounding_errors_are_independent():
    """Between elements near and far, state tensors and steps: sums of errors grow like those of
    coin flips."""
    param = nn.Parameter(torch.zeros(2**14, dtype=torch.bfloat16))
    optimizer = AdamW([param], lr=1e-3, betas=(0.9, 0.9), weight_decay=0.0)
    ups = []
    for _ in range(64):
        param.grad = torch.ones_like(param)
        optimizer.step()
        for value in optimizer.state[param].values():
            if value.shape == param.shape and value.dtype == torch.bfloat16:
                value = value.double().view(64, 2**8)
                ups.append((value > value.mean()).double())
    ups = torch.stack([(up - up.mean()) / up.std() for up in ups if up.std() > 0])
    assert len(ups) > 64
    over_blocks = ups.sum(1) / 8  # every 2**8th element
    over_places = ups.sum(2) / 16  # 2**8 neighbours
    assert over_blocks.square().mean() == pytest.approx(1, abs=0.1)
    assert over_places.square().mean() == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("updates", UPDATES)
def test_lr_0_changes_nothing(updates):
    params = parameters(torch.bfloat16, (6,), (9, 9))
    params[0].data.copy_(torch.tensor([-0.0, 0.0, 1.0, -3e-39, 1e38, -2.5]))
    optimizer = AdamW(params, **{**SETTINGS, "lr": 1e-4}, updates=updates)
    train(params, optimizer, 3)
    with torch.no_grad():
        params[0][0] = -0.0
    before = [p.detach().clone() for p in params]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for param in params:
        param.grad = torch.zeros_like(param)
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(params, before))
    if updates == "stochastic":
        assert same_bits(params, before)


# ------------------------------------------------------------------------------- randomness


def pieces_after_a_step(*pieces, name="weight", seed=0):
    """Ones after a constant update, the pieces side by side: (offset, elements) of each. Only
    rounding tells them apart."""
    params = [nn.Parameter(torch.ones(count, dtype=torch.bfloat16)) for _, count in pieces]
    origins = {param: (name, offset) for param, (offset, _) in zip(params, pieces)}
    optimizer = AdamW(params, lr=1e-3, seed=seed, origins=origins)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    return torch.cat([param.detach() for param in params])


def test_rounding_is_that_of_the_seed_the_name_and_the_place_in_the_whole_parameter():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    whole = pieces_after_a_step((0, 1000))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(4)
    assert torch.equal(whole, pieces_after_a_step((0, 1), (1, 16), (17, 983)))
    assert torch.equal(whole[300:], pieces_after_a_step((300, 700)))
    assert not torch.equal(whole, pieces_after_a_step((0, 1000), name="bias"))
    assert not torch.equal(whole, pieces_after_a_step((0, 1000), seed=1))


def test_parameters_of_more_than_2_to_the_32_elements_keep_good_noise():
    start = 2**32 - 500
    whole = pieces_after_a_step((start, 1000))
    assert torch.equal(whole, pieces_after_a_step((start, 499), (start + 499, 3), (2**32 + 2, 498)))
    assert not torch.equal(whole[500:], pieces_after_a_step((0, 500)))  # it doesn't begin anew
    assert not torch.equal(whole, pieces_after_a_step((start + 2**32, 1000)))


def test_each_step_rounds_its_own_way():
    param = nn.Parameter(torch.ones(1000, dtype=torch.bfloat16))
    optimizer = AdamW([param], lr=1e-3, betas=(0.0, 0.0), eps=0.0)
    found = []
    for _ in range(2):
        param.data.fill_(1.0)
        param.grad = torch.ones_like(param)  # with these betas both steps make the same update
        optimizer.step()
        found.append(param.detach().clone())
    assert not torch.equal(*found)


# ------------------------------------------------------------------------------- state


@pytest.mark.parametrize("updates", UPDATES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_state_dict_round_trip(updates, dtype):
    """Through state_dict and load_state_dict, without a checkpoint: every bit and dtype, the same
    steps after."""
    first, second = (parameters(dtype, (50, 40), (7,)) for _ in range(2))
    one, two = (AdamW(params, **SETTINGS, updates=updates) for params in (first, second))
    train(first, one, 3)
    with torch.no_grad():
        for a, b in zip(first, second):
            b.copy_(a)
    two.load_state_dict(copy.deepcopy(one.state_dict()))
    for a, b in zip(first, second):
        assert same_tensors(one.state[a], two.state[b])
    train(first, one, 2, seed=9)
    train(second, two, 2, seed=9)
    assert same_bits(first, second)
    for a, b in zip(first, second):
        assert same_tensors(one.state[a], two.state[b])


def build(name, updates, source):
    """(fabric, wrapped model, optimizer) on this rank, as train.py makes them, in bf16-true."""
    config, dtype = TOY_CONFIGS["llama"], torch.bfloat16
    world_size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    fabric = strategy.make_fabric(Placement(name, Sharding(), world_size, 1, "cpu"), "bf16-true")
    fabric.launch()
    is_first = fabric.global_rank == 0
    stored = loading.open_weights(str(source), config, dtype, 0) if is_first else None
    empty, model = skeleton(), skeleton()
    weights.compute_buffers(model)
    model = language_model.LanguageModel(model)
    decayed = adamw.decayed_names(model)

    def fill(model):
        return sharded.fill(model, empty, stored)

    wrapped = strategy.wrap(fabric, name, model, fill, "bf16-true", Sharding())
    training = SimpleNamespace(lr=1e-3, beta1=0.9, beta2=0.95, weight_decay=0.1, seed=7)
    optimizer = fabric.setup_optimizers(adamw.make_optimizer(wrapped, decayed, training, updates))
    return fabric, wrapped, optimizer


def skeleton():
    return loading.build_skeleton(TOY_CONFIGS["llama"], torch.bfloat16)


def save(target, fabric, wrapped, optimizer):
    settings = {"skeleton": skeleton(), "tokenizer": None, "progress": Progress(), "facts": {}}
    settings |= {"origin": {}, "probe": {"logits": torch.zeros(1)}, "state_dict_type": "full"}
    pending = writing.begin(target, fabric, wrapped.module, optimizer, **settings)
    writing.write(pending)
    writing.commit(pending)


def state_on_disk(path):
    """Every tensor of the optimizer's state in a checkpoint, whole."""
    reader = HuggingFaceStorageReader(path=str(path / "trainer" / "optimizer"))
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
    }
    dcp.load(tensors, storage_reader=reader)
    return tensors


def train_and_save(name, updates, source, target):
    fabric, wrapped, optimizer = build(name, updates, source)
    for step in range(2):
        generator = torch.Generator().manual_seed(1000 * step + fabric.global_rank)
        tokens = torch.randint(0, VOCABULARY, (2, CONTEXT), generator=generator)
        fabric.backward(wrapped(input_ids=tokens, labels=tokens))
        optimizer.step()
        optimizer.zero_grad()
    save(target, fabric, wrapped, optimizer)


def load_and_save(name, updates, source, target):
    """From a checkpoint into another. Returns dtypes and devices of the state in memory."""
    fabric, wrapped, optimizer = build(name, updates, source)
    reading.load_optimizer(source, wrapped.module, optimizer, skeleton())
    values = [item for state in optimizer.optimizer.state.values() for item in state.items()]
    save(target, fabric, wrapped, optimizer)
    return {(key, value.dtype, value.device.type) for key, value in values}


@pytest.mark.longer
@pytest.mark.parametrize("updates", UPDATES)
def test_checkpoints_keep_every_bit_on_other_ranks(toys, tmp_path, updates):
    """Written by one strategy, read and written again by the next: state and weights never
    change."""
    source = tmp_path / "step-00000002"
    run_ranks(2, train_and_save, "fsdp", updates, toys / "llama", source)
    original, weights = state_on_disk(source), (source / "model.safetensors").read_bytes()
    wide = torch.float32 if updates == "master" else torch.bfloat16
    expected = {"step": torch.float32, "exp_avg": wide, "exp_avg_sq": wide}
    expected |= {"master": wide} if updates == "master" else {}
    assert {name.rsplit(".", 1)[1]: t.dtype for name, t in original.items()} == expected
    for name, ranks in (("fsdp2", 3), ("single", 1), ("ddp", 2), ("fsdp2", 2), ("fsdp", 3)):
        target = tmp_path / f"{name}-{ranks}" / "step-00000002"
        kinds = set().union(*run_ranks(ranks, load_and_save, name, updates, source, target))
        assert kinds == {(key, dtype, "cpu") for key, dtype in expected.items()}
        assert same_tensors(state_on_disk(target), original), (name, ranks)
        assert (target / "model.safetensors").read_bytes() == weights
        source = target
