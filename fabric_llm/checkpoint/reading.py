"""What a run takes from a checkpoint beside its weights, which model/loading.py opens: the state of
its optimizer, and whether it is any good."""

import math
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from fabric_llm.base import register
from fabric_llm.base.command_line import is_rank_zero
from fabric_llm.base.faults import Fault
from fabric_llm.checkpoint.keep import damaged, read_progress
from fabric_llm.checkpoint.state_dicts import class_of, optimizer_held
from fabric_llm.checkpoint.trainer_state import EMA, optimizer_state, read_probe
from fabric_llm.model.sharded import local_part, shard_group, shards
from fabric_llm.model.tensor_files import Tensors
from fabric_llm.model.weights import PREFIX

# A model is spoilt if its loss is above so many times that of a uniform guess. One that learns is
# below once that loss.
SPOILT = 3


def load_optimizer(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    skeleton: PreTrainedModel,
    may_lack: Collection[str] = (),
    mark: Callable[[], Any] = lambda: None,
) -> None:
    """Fill the optimizer of a wrapped model from a checkpoint, whatever ranks and strategy wrote
    it. All ranks call it.

    Each rank reads the rows that it holds a part of, one tensor at a time. skeleton: the unwrapped
    model on the meta device. may_lack: names of parameters, such as those that were frozen before,
    whose state may be missing in the checkpoint. It then stays as it is, and so does a moving
    average. mark: called before each tensor. An optimizer of another class begins with no state.
    Raises Fault (66, of --code 2) where other state is missing or has another shape.
    """
    stored, document, now = optimizer_state(path), read_progress(path), class_of(optimizer)
    # Without --ema_decay a run saves no average. One that begins now is a copy of the weights.
    has_average = EMA in document["optimizer_state"]
    # Older versions didn't save it.
    is_other = (before := document.get("optimizer", now)) != now
    if not is_other:
        # Most optimizers make their state in the first step: before it there is nothing to fill.
        _begin_state(stored, model, optimizer)
    elif is_rank_zero():
        print(f"The optimizer is {now} from here on, {before} before: its state begins anew.")
    for key, (tensor, first, shape) in optimizer_held(model, skeleton, optimizer).items():
        mark()
        is_average = key.endswith(f".{EMA}")
        if is_other and not is_average:
            continue
        may_be_missing = is_average and not has_average
        may_be_missing = may_be_missing or parameter_of(key) in may_lack
        if key in stored or not may_be_missing:
            # A key that is missing, and mustn't be, is reported with the shape "nothing".
            if (there := stored.shapes.get(key, "nothing")) != shape:
                words = f"the optimizer's state holds {there} as {key}, the model {shape}"
                if "optimizer" in register.ONLY:
                    raise Fault(
                        f"{str(path)!r}: {words}. If --code changes what its optimizer keeps, "
                        f"its class needs another name than {now}, and begins with no state."
                    )
                raise damaged(path, f"{words}.")
            # None where it isn't split. Of a number, which isn't either, `first` says only on which
            # ranks it is valid.
            begin = first if first is not None and shape else 0
            part = local_part(tensor).view(-1)
            part.copy_(stored.elements(key, begin, len(part)))


def _begin_state(stored: Tensors, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Make the stored state that an optimizer would begin in its first step, as most do."""
    optimizer = getattr(optimizer, "optimizer", optimizer)  # without Fabric's wrapper
    trained = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    known = shards(model)
    for key, shape in stored.shapes.items():
        # A key is state.NAME.ITEM, and NAME has dots of its own.
        name, _, item = key.removeprefix("state.").rpartition(".")
        shard = known.get(name)
        # Left out: parameters that aren't trained, the average, and what is there already.
        if (
            shard is None
            or shard.parameter not in trained
            or item == EMA
            or item in optimizer.state[shard.parameter]
        ):
            continue
        # One element tells the dtype, which may be another than the parameter's.
        like, dtype = shard.parameter.detach(), stored.elements(key, 0, 1).dtype
        # State with as many elements as its parameter, such as a moment, is sharded with it. Of a
        # parameter that is whole it may have another shape all the same, such as a flat one.
        is_alike = math.prod(shape) == sum(shard.counts) and shape
        if is_alike and (shape == like.shape or shard_group(model) is not None):
            begun = torch.zeros_like(like, dtype=dtype)
        else:
            # A counter, which optimizers keep on the CPU, or state of another shape.
            begun = torch.zeros(shape, dtype=dtype, device=like.device if shape else "cpu")
        optimizer.state[shard.parameter][item] = begun


def parameter_of(key: str) -> str:
    """The Hugging Face name in a key of the optimizer's state: `state.causal_lm.NAME.exp_avg`."""
    return key.removeprefix(f"state.{PREFIX}").rpartition(".")[0]


def is_spoilt(path: Path) -> bool:
    """Whether the model of a checkpoint predicts its probe far worse than a guess, or tells no
    token from another.

    It does after steps that were much too large: the norms of its layers overflow, to NaN or to
    zero as the processor rounds.
    """
    probe = read_probe(path)
    tokens, positions = probe["input_ids"][0], probe["positions"]
    # What comes after the last token isn't known.
    known = positions + 1 < len(tokens)
    if not known.any():
        return False
    logits = probe["logits"][known]
    if (logits == logits[:, :1]).all():
        return True
    loss = F.cross_entropy(logits, tokens[positions[known] + 1])
    return not loss <= SPOILT * math.log(logits.shape[1])  # NaN as well
