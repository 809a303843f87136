"""Read a checkpoint: verify its files first, then load weights, optimizer state and probe. Nothing in it runs code."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any, Optional

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

from fabric_llm.checkpoint.progress import damaged, read_progress
from fabric_llm.checkpoint.state_dicts import EMA, PREFIX, optimizer_tensors, quiet, saved_shapes, with_average
from fabric_llm.checkpoint.tensors import Tensors, readable


def load_optimizer(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, may_lack: Collection[str] = ()
) -> None:
    """Fill the optimizer of a wrapped model from a checkpoint, whatever ranks and strategy wrote it. All ranks call it.

    Its moving average of the weights is filled as well; it stays as it is if the checkpoint has none. may_lack: Hugging Face
    names of parameters whose state stays as it is if the checkpoint has none.
    """
    optimizer, *averages = with_average(optimizer)
    folder = path / "trainer" / "optimizer"
    stored = optimizer_state(path) if may_lack else {}
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    for one in [optimizer, *(averages if EMA in read_progress(path)["optimizer_state"] else [])]:
        flat, tensors = optimizer_tensors(model, one)
        lacked = {key for key in tensors if parameter_of(key) in may_lack and key not in stored}
        load_parts({key: tensor for key, tensor in tensors.items() if key not in lacked}, folder)
        set_optimizer_state_dict(model, one, {**flat, **tensors}, options=options)


def ema_into(path: Path, model: nn.Module) -> None:
    """Give an unwrapped model the moving average that a checkpoint holds of its weights; what wasn't trained stays.

    Raises ValueError where the checkpoint has none.
    """
    stored = optimizer_state(path)
    names = {f"state.{PREFIX}{name}.{EMA}": parameter for name, parameter in model.named_parameters()}
    averages = names.keys() & stored.keys()
    if not averages:
        raise ValueError(
            f"{str(path)!r} holds no moving average of the weights: its run had no --ema_decay when it was saved."
        )
    with torch.no_grad():
        for name in averages:
            names[name].copy_(stored[name])


def optimizer_state(path: Path) -> Tensors:
    """What a checkpoint holds of its optimizer: `state.causal_lm.NAME.exp_avg` and the like."""
    return Tensors((path / "trainer" / "optimizer").glob("*.safetensors"))


def parameter_of(key: str) -> str:
    """The Hugging Face name in a key of the optimizer's state: `state.causal_lm.NAME.exp_avg`."""
    return key.removeprefix(f"state.{PREFIX}").rpartition(".")[0]


def load_parts(tensors: dict[str, Any], folder: Path) -> None:
    """Fill `tensors`. Raises Fault (66) where the parts are others."""
    with quiet(), readable(folder):
        dcp.load(tensors, storage_reader=HuggingFaceStorageReader(path=str(folder)))


def sharded_weights(path: Path, expected: nn.Module) -> Optional[dict[str, Tensor]]:
    """The whole weights of a sharded checkpoint by HF name, on the CPU; None if `path` isn't one. One process.

    expected: the model that they are for, on the meta device. Raises Fault (66) before memory is taken for a tensor
    that it doesn't have.
    """
    if not (path / "weights").is_dir():
        return None
    return {name.removeprefix(PREFIX): tensor for name, tensor in weights(path, expected).items()}


def weights(path: Path, expected: nn.Module) -> Tensors:
    """What a sharded checkpoint holds, by names in memory behind PREFIX. Raises Fault (66) unless it is the model `expected`."""
    stored = Tensors((path / "weights").glob("*.safetensors"))
    declared = stored.shapes
    wanted = {PREFIX + name: shape for name, shape in saved_shapes(expected).items()}
    for name in sorted(declared.keys() ^ wanted.keys()) or sorted(n for n in wanted if declared[n] != wanted[n]):
        here, there = (list(some[name]) if name in some else "nothing" for some in (declared, wanted))
        raise damaged(path, f"weights hold {here} as {name}, the model {there}.")
    return stored


def read_probe(path: Path) -> dict[str, Tensor]:
    """The recorded probe of a checkpoint, see `record_probe`. Raises Fault (66) where it isn't one."""
    file = path / "trainer" / "probe.safetensors"
    with readable(file):
        probe = load_file(file)
        (_, context), (count, vocabulary) = probe["input_ids"].shape, probe["logits"].shape
        for key, shape, limit in (("input_ids", (1, context), vocabulary), ("positions", (count,), context)):
            values = probe[key]
            of_kind = tuple(values.shape) == shape and values.dtype == torch.int64
            if not of_kind or not 0 <= values.min() <= values.max() < limit:
                raise ValueError(f"{key} isn't int64 {list(shape)} of 0 to {limit - 1}")
    return probe
