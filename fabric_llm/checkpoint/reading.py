"""Read a checkpoint: verify its files first, then load weights, optimizer state and probe. Nothing in it runs code."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Optional

import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    set_optimizer_state_dict,
)

from fabric_llm.base import files
from fabric_llm.base.faults import (
    NO_CHECKPOINT,
    OUT_OF_MEMORY,
    PEER_LOST,
    REFUSED,
    STOPPED,
    Fault,
    as_fault,
)
from fabric_llm.base.files import MANIFEST
from fabric_llm.checkpoint.progress import _damaged, read_progress
from fabric_llm.checkpoint.state_dicts import (
    EMA,
    PREFIX,
    _optimizer_tensors,
    _quiet,
    _with_average,
    persistent_buffers,
    shapes,
)


def verified(path: Path, hashes: bool = False) -> dict[str, Any]:
    """A checkpoint's progress.json, once exactly its files are there with the right sizes (and hashes).

    Raises Fault that names the first file that isn't (66), or that is refused for security (77).
    """
    if path.is_symlink():
        raise Fault(f"{str(path)!r} is a link, which may lead out of the run directory: refused.", REFUSED)
    if not (path / MANIFEST).is_file():
        raise Fault(f"{str(path)!r} isn't a checkpoint: it has no {MANIFEST}.", NO_CHECKPOINT)
    listed = files.check_folder(path, hashes)["files"]
    for index in path.glob("*.index.json"):
        _check_index(index, listed)
    return read_progress(path)


def _check_index(index: Path, listed: dict[str, Any]) -> None:
    """Weight files that an index names are the checkpoint's own."""
    try:
        named = files.weight_map(index).values()
    except Fault:
        raise
    except ValueError as error:
        raise _damaged(index.parent, f"{index.name} can't be read.") from error
    if foreign := sorted(set(named) - listed.keys()):
        raise _damaged(index.parent, f"{index.name} names {foreign[0]}, which isn't there.")


def load_optimizer(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, may_lack: Collection[str] = ()
) -> None:
    """Fill the optimizer of a wrapped model from a checkpoint, whatever ranks and strategy wrote it. All ranks call it.

    So is its moving average of the weights, unless the checkpoint has none: then it stays as it is. may_lack: Hugging Face
    names of parameters whose state stays as it is where the checkpoint has none.
    """
    optimizer, *averages = _with_average(optimizer)
    folder = path / "trainer" / "optimizer"
    stored = whole_shapes(folder).keys() if may_lack else ()
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    for one in [optimizer, *(averages if has_ema(read_progress(path)) else [])]:
        flat, tensors = _optimizer_tensors(model, one)
        lacked = {key for key in tensors if _parameter_of(key) in may_lack and key not in stored}
        _load_parts({key: tensor for key, tensor in tensors.items() if key not in lacked}, folder)
        set_optimizer_state_dict(model, one, {**flat, **tensors}, options=options)


def has_ema(progress: dict[str, Any]) -> bool:
    """Whether a checkpoint with this progress.json holds a moving average of the weights."""
    return EMA in progress.get("optimizer_state", ())


def ema_into(path: Path, model: nn.Module) -> None:
    """Give an unwrapped model the moving average that a checkpoint holds of its weights; what wasn't trained stays.

    Raises ValueError where the checkpoint has none.
    """
    parts = Parts(path / "trainer" / "optimizer")
    names = {f"state.{PREFIX}{name}.{EMA}": parameter for name, parameter in model.named_parameters()}
    if not names.keys() & parts.names():
        raise ValueError(
            f"{str(path)!r} holds no moving average of the weights: its run had no --ema_decay when it was saved."
        )
    with torch.no_grad():
        for name in names.keys() & parts.names():
            names[name].copy_(parts.tensor(name))


def _parameter_of(key: str) -> str:
    """The Hugging Face name in a key of the optimizer's state: `state.causal_lm.NAME.exp_avg`."""
    return key.removeprefix(f"state.{PREFIX}").rpartition(".")[0]


def _load_parts(tensors: dict[str, Any], folder: Path) -> None:
    """Fill `tensors`. Raises Fault (66) where the parts are others."""
    with _quiet(), readable(folder):
        dcp.load(tensors, storage_reader=HuggingFaceStorageReader(path=str(folder)))


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """What is wrong with the content of files, which hashes don't tell where somebody made them so, as Fault (66)."""
    try:
        yield
    except (Exception, dcp.CheckpointException) as error:
        failures = getattr(error, "failures", None)
        first = min(failures.items())[1][0] if failures else error
        if as_fault(first).code in (PEER_LOST, OUT_OF_MEMORY, STOPPED):
            raise as_fault(first) from error
        raise Fault(f"{str(path)!r} can't be read: {' '.join(str(first).split())[:400]}.", NO_CHECKPOINT) from error


def sharded_weights(path: Path, expected: nn.Module) -> Optional[dict[str, Tensor]]:
    """The whole weights of a sharded checkpoint by HF name, on the CPU; None if `path` isn't one. One process.

    expected: the model that they are for, on the meta device. Raises Fault (66) before memory is taken for a tensor
    that it doesn't have.
    """
    folder = path / "weights"
    if not folder.is_dir():
        return None
    require_shapes(path, expected)
    weights = whole_tensors(folder)
    return {name.removeprefix(PREFIX): tensor for name, tensor in weights.items()}


def require_shapes(path: Path, expected: nn.Module) -> None:
    """Raises Fault (66) unless the parts of a sharded checkpoint declare exactly the tensors of the model `expected`."""
    declared = whole_shapes(path / "weights")
    wanted = {PREFIX + name: shape for name, shape in (*shapes(expected), *persistent_buffers(expected))}
    for name in sorted(declared.keys() ^ wanted.keys()) or sorted(n for n in wanted if declared[n] != wanted[n]):
        here, there = (list(some[name]) if name in some else "nothing" for some in (declared, wanted))
        raise _damaged(path, f"weights hold {here} as {name}, the model {there}.")


def whole_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Name -> shape that the parts in a folder declare for the whole tensor."""
    with readable(folder):
        metadata = HuggingFaceStorageReader(path=str(folder)).read_metadata().state_dict_metadata
        return {name: tuple(entry.size) for name, entry in metadata.items()}


def whole_tensors(folder: Path) -> dict[str, Tensor]:
    """Name -> tensor put together from the parts in a folder, on the CPU. One process."""
    metadata = HuggingFaceStorageReader(path=str(folder)).read_metadata().state_dict_metadata
    tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in metadata.items()}
    with _quiet(), readable(folder):
        dcp.load(tensors, storage_reader=HuggingFaceStorageReader(path=str(folder)), no_dist=True)
    return tensors


class Parts:
    """The tensors whose parts are in a folder, put together one at a time, on the CPU. One process."""

    def __init__(self, folder: Path) -> None:
        """Raises Fault (66) where the folder can't be read."""
        self.folder = folder
        with readable(folder):
            metadata = HuggingFaceStorageReader(path=str(folder)).read_metadata()
        self.entries, self.places = metadata.state_dict_metadata, metadata.storage_data

    def names(self) -> set[str]:
        return set(self.entries)

    def tensor(self, name: str) -> Tensor:
        """The whole tensor. Raises Fault (66) where a part of it is missing."""
        entry = self.entries[name]
        whole = torch.empty(entry.size, dtype=entry.properties.dtype)
        read = 0
        with readable(self.folder):
            for chunk in {
                tuple(chunk.offsets): chunk for chunk in entry.chunks
            }.values():  # replicas have the same place
                place = self.places[MetadataIndex(name, chunk.offsets)]
                with safe_open(place.relative_path, framework="pt") as file:
                    part = file.get_tensor(name)
                whole[tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes))] = part
                read += part.numel()
            if read != whole.numel():
                raise ValueError(f"{name} has {read} of {whole.numel()} elements")
        return whole


def read_probe(path: Path) -> dict[str, Tensor]:
    """The recorded probe of a checkpoint, see `record_probe`. Raises Fault (66) where it isn't one."""
    with readable(path / "trainer" / "probe.safetensors"):
        with safe_open(path / "trainer" / "probe.safetensors", framework="pt") as file:
            probe = {key: file.get_tensor(key) for key in file.keys()}
        (_, context), (count, vocabulary) = probe["input_ids"].shape, probe["logits"].shape
        for key, shape, limit in (("input_ids", (1, context), vocabulary), ("positions", (count,), context)):
            values = probe[key]
            of_kind = tuple(values.shape) == shape and values.dtype == torch.int64
            if not of_kind or not 0 <= values.min() <= values.max() < limit:
                raise ValueError(f"{key} isn't int64 {list(shape)} of 0 to {limit - 1}")
    return probe
