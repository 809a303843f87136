"""Single steps of training outside of a run, for benchmarks: the calls of `train` in train.py, in
its order."""

import weakref
from collections.abc import Iterable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from ranks import started
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

from fabric_llm.model import loading, weights
from fabric_llm.model.language_model import trained_loss
from fabric_llm.plan.plan import Plan
from fabric_llm.run import build, reference
from fabric_llm.run.run import Run
from fabric_llm.training import step

SMALL_LLAMA = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64}
SMALL_LLAMA |= {"num_attention_heads": 2, "num_key_value_heads": 1}
SMALL_LLAMA |= {"vocab_size": 256, "head_dim": 32}


def set_up(argv: list[Any]) -> Run:
    """`train.py ARGV` before its first step, without a run directory. All ranks call it."""
    run = started(argv)
    run.batches = build.make_batches(run)
    return run


def drawn_on(kind: str) -> Any:
    """In its context `set_up` draws a Llama's weights on a device of this kind, whatever files
    there are: a CPU takes minutes for billions of them. One device, without --verify_start.

    Which fast paths the model takes is measured on a small one of its class.
    """

    def draw(plan: Plan, source: str, seed: int, model_flags: Any) -> Any:
        dtype = loading.DTYPES[plan.model.precision]
        small = type(plan.model.config)(**{**plan.model.config.to_dict(), **SMALL_LLAMA})
        small._attn_implementation = plan.model.config._attn_implementation
        small_model = AutoModelForCausalLM.from_config(small, dtype=dtype)
        chosen = reference.choose(small_model, plan, model_flags)
        torch.manual_seed(seed)
        with torch.device(kind):
            drawn = AutoModelForCausalLM.from_config(plan.model.config, dtype=dtype).state_dict()
        names = weights.units(loading.build_skeleton(plan.model.config, dtype))
        opened = SimpleNamespace(read=lambda unit: {name: drawn[name] for name in names[unit]})
        return reference.Reference(opened, (None, None), chosen)

    return patch.object(reference, "load", draw)


def take_step(run: Run) -> float:
    """Loss of the global batch in the next step, at the learning rate --lr. All ranks call it.

    These are the calls of the loop in train.py between the batch and `zero_grad`, in its order.
    Change both together.
    """
    fabric, flags, plan = run.fabric, run.flags, run.plan
    before, run.progress = run.progress, run.schedule.after(run.progress)
    step.set_lr(run.optimizer, flags.training.lr)
    step.seed_step(flags.training.seed, before.step, fabric.global_rank)
    micro_batches = [fabric.to_device(batch) for batch in run.batches.at(before.position)]
    targets, total = step.count_targets(fabric, micro_batches), 0.0
    how = plan.syncs_every_micro_batch, plan.model.sums_in_float32
    for batch in step.accumulate(fabric, run.model, micro_batches, *how):
        losses = run.model(**batch) / targets
        step.backward(fabric, trained_loss(losses, plan.model.router_aux_loss_coef))
        total = total + losses.detach()
    step.clip(fabric, run.model, run.optimizer, flags.training.grad_clip)
    (loss, *_), _ = step.share(fabric, total, [])
    run.optimizer.step()
    run.optimizer.zero_grad()
    return loss


def train(turns: Any, run: Run) -> None:
    """Take steps for as long as it is this contender's turn (turns.py)."""
    loss = None
    while turns.go_on(loss):
        loss = take_step(run)
    run.batches.close()


def state_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The tensors of an optimizer's state, with or without Fabric's wrapper."""
    states = getattr(optimizer, "optimizer", optimizer).state.values()
    return [one for state in states for one in state.values() if isinstance(one, Tensor)]


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """What this rank holds for `tensors`: storage that several of them share counts once, whole."""
    sizes = {}
    for tensor in tensors:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        storage = local.detach().untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def peak(run: Run, kind: str, kept: Iterable[Tensor] = ()) -> int:
    """The most bytes of this rank in a step after the first, which makes the optimizer's state: by
    a GPU's allocator, or those of all tensors, with the `kept`."""
    peaks = []
    held = [*run.model.parameters(), *state_of(run.optimizer), *kept]
    with Counted(held) if kind == "cpu" else nullcontext() as counted:
        for _ in range(4):
            if counted is None:
                torch.cuda.reset_peak_memory_stats()
            else:
                counted.peak = 0
            take_step(run)
            peaks.append(counted.peak if counted else torch.cuda.max_memory_allocated())
    return min(peaks[1:])  # a thread of gloo may let go of a message a moment later than usual


class Counted(TorchDispatchMode):
    """Bytes of the storages that are alive, each once, and the most that they were."""

    def __init__(self, tensors):
        super().__init__()
        self.sizes, self.peak = {}, 0
        self.count(tensors)

    def count(self, tensors):
        for tensor in tensors:
            storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
            if storage._cdata not in self.sizes:
                weakref.finalize(storage, self.sizes.pop, storage._cdata, None)
            self.sizes[storage._cdata] = weakref.ref(storage)
        found = (reference() for reference in list(self.sizes.values()))  # other threads free, too
        alive = sum(storage.nbytes() for storage in found if storage is not None)
        self.peak = max(self.peak, alive)

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        self.count(one for one in tree_leaves(result) if isinstance(one, torch.Tensor))
        return result
