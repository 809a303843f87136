"""Law 11: rounding doesn't depend on devices or sharding: the same gradients give the same bits on
any.

Stochastic rounding, with gradients that are given, so that no other order of sums comes in between.
That GPUs give the bits of CPUs is in tests/test_adamw_kernels.py, as far as a machine without one
can tell.
"""

import zlib

import pytest
import torch
from ranks import run_ranks
from test_adamw import build, save, skeleton, state_on_disk
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.tensor import DTensor, distribute_tensor

from fabric_llm.checkpoint import reading
from fabric_llm.model import sharded

STEPS, SAVED_AFTER = 5, 2


def take_given_steps(fabric, wrapped, optimizer, first, last):
    """Each rank's part of whole gradients that are a function of (step, name)."""
    shapes = {f"causal_lm.{name}": one.shape for name, one in skeleton().named_parameters()}
    starts = {}
    for unit in FSDP.fsdp_modules(wrapped):
        flat = unit._handle.flat_param
        infos = getattr(flat, "_shard_param_infos", ()) if flat._params else ()
        for parameter, info in zip(flat._params, infos):
            starts[parameter] = info.intra_param_start_idx or 0
    for step in range(first, last):
        for name, parameter in wrapped.module.named_parameters():
            name = sharded.original_name(name)
            generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {step}".encode()))
            whole = torch.randn(shapes[name], generator=generator).bfloat16()
            if isinstance(parameter, DTensor):
                where = (parameter.device_mesh, parameter.placements)
                parameter.grad = distribute_tensor(whole, *where)
            elif parameter in starts:
                piece = whole.flatten()[starts[parameter] :][: parameter.numel()]
                parameter.grad = piece.view(parameter.shape)
            else:
                parameter.grad = whole
        optimizer.step()


def train_and_save(name, source, folder):
    pieces = build(name, "stochastic", source)
    take_given_steps(*pieces, 0, SAVED_AFTER)
    save(folder / f"step-{SAVED_AFTER:08d}", *pieces)
    take_given_steps(*pieces, SAVED_AFTER, STEPS)
    save(folder / f"step-{STEPS:08d}", *pieces)


def load_and_go_on(name, source, folder):
    fabric, wrapped, optimizer = build(name, "stochastic", source)
    reading.load_optimizer(source, wrapped.module, optimizer, skeleton())
    take_given_steps(fabric, wrapped, optimizer, SAVED_AFTER, STEPS)
    save(folder / f"step-{STEPS:08d}", fabric, wrapped, optimizer)


def differences(first, second):
    """Names of the tensors, weights and moments, that differ between two checkpoints."""
    files = [(folder / "model.safetensors").read_bytes() for folder in (first, second)]
    found = [] if files[0] == files[1] else ["weights"]
    states = state_on_disk(first), state_on_disk(second)
    assert states[0].keys() == states[1].keys()
    return found + [
        key for key, value in states[0].items() if not torch.equal(value, states[1][key])
    ]


@pytest.fixture(scope="module")
def single(toys, tmp_path_factory):
    """Checkpoints of one device."""
    folder = tmp_path_factory.mktemp("single")
    run_ranks(1, train_and_save, "single", toys / "llama", folder)
    return folder


@pytest.mark.quick_cases(r"fsdp2-4")
@pytest.mark.parametrize(
    ("name", "ranks"), [("ddp", 2), ("fsdp", 2), ("fsdp2", 2), ("fsdp", 3), ("fsdp2", 4)]
)
def test_rounding_is_the_same_on_any_ranks(toys, tmp_path, single, name, ranks):
    """Vocabulary and layers don't divide evenly: FSDP's pieces begin in the middle of rows, FSDP2's
    have uneven rows."""
    run_ranks(ranks, train_and_save, name, toys / "llama", tmp_path)
    last = f"step-{STEPS:08d}"
    assert differences(single / last, tmp_path / last) == []


@pytest.mark.quick_cases(r"fsdp-single")
@pytest.mark.parametrize(("before", "name", "ranks"), [("fsdp", "single", 1), ("fsdp2", "fsdp", 3)])
def test_rounding_goes_on_on_other_ranks(toys, tmp_path, single, before, name, ranks):
    run_ranks(2, train_and_save, before, toys / "llama", tmp_path)
    source = tmp_path / f"step-{SAVED_AFTER:08d}"
    run_ranks(ranks, load_and_go_on, name, source, tmp_path / "after")
    last = f"step-{STEPS:08d}"
    assert differences(single / last, tmp_path / "after" / last) == []
