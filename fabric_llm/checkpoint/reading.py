"""Read a checkpoint that keep.py has verified: weights, optimizer state and probe. Nothing in it runs code."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Optional

import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint._hf_utils import CUSTOM_METADATA_KEY, DTYPE_MAP, SAVED_OFFSETS_KEY
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict
from transformers import PretrainedConfig

from fabric_llm.base.faults import NO_CHECKPOINT, OUT_OF_MEMORY, PEER_LOST, STOPPED, Fault, as_fault, one_line
from fabric_llm.checkpoint.keep import damaged, read_progress
from fabric_llm.checkpoint.state_dicts import EMA, PREFIX, optimizer_tensors, saved_shapes, with_average
from fabric_llm.model import loading
from fabric_llm.model.weights import Source

Shape = tuple[int, ...]
DTYPE_NAMES = {dtype: name for name, dtype in DTYPE_MAP.items()}  # of safetensors


class Tensors(Mapping[str, Tensor]):
    """Name -> tensor, on the CPU, which is read from safetensors files when it is asked for.

    Files of Hugging Face hold whole tensors. Those of torch.distributed.checkpoint hold parts, and the offsets of each part in
    their headers; replicas of a part have the same offsets. Raises Fault (`code`) for a file that can't be read.
    """

    def __init__(self, files: Iterable[Path], code: int = NO_CHECKPOINT) -> None:
        self.code = code
        self.files: dict[str, dict[Shape, Path]] = {}  # name -> offsets of a part -> its file
        self.shapes: dict[str, Shape] = {}  # of whole tensors
        self.held: dict[str, int] = {}  # elements of all parts
        for path in sorted(files):
            with readable(path, code), safe_open(path, framework="pt") as file:
                places = json.loads((file.metadata() or {}).get(CUSTOM_METADATA_KEY, "{}"))
                for name in file.keys():
                    shape = file.get_slice(name).get_shape()
                    offsets = tuple(places[name][SAVED_OFFSETS_KEY] if places else [0] * len(shape))
                    end = tuple(first + length for first, length in zip(offsets, shape, strict=True))
                    self.shapes[name] = tuple(map(max, end, self.shapes.get(name, end)))
                    if offsets not in self.files.setdefault(name, {}):
                        self.held[name] = self.held.get(name, 0) + math.prod(shape)
                    self.files[name][offsets] = path

    def __iter__(self) -> Iterator[str]:
        return iter(self.files)

    def __len__(self) -> int:
        return len(self.files)

    def __contains__(self, name: object) -> bool:  # Mapping's own would read the tensor
        return name in self.files

    def __getitem__(self, name: str) -> Tensor:
        """The whole tensor. Raises Fault where a part of it is missing or can't be read."""
        whole = None
        for offsets, path in self.files[name].items():
            with readable(path.parent, self.code), safe_open(path, framework="pt") as file:
                if not self.is_whole(name):  # before memory is taken for it
                    raise ValueError(f"{name} has {self.held[name]} of {math.prod(self.shapes[name])} elements")
                part = file.get_tensor(name)
                whole = torch.empty(self.shapes[name], dtype=part.dtype) if whole is None else whole
                whole[tuple(slice(first, first + length) for first, length in zip(offsets, part.shape))] = part
        return whole

    def is_whole(self, name: str) -> bool:
        """False where a part of the tensor is missing."""
        return self.held[name] == math.prod(self.shapes[name])


def stored_parts(folder: Path) -> Iterator[tuple[Path, str, Tensor]]:
    """(file, name, tensor) of all that lies in the files of a folder and of those below: whole tensors, and parts as they are."""
    for path in sorted(folder.rglob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():
                yield path, name, file.get_tensor(name)


@contextmanager
def readable(path: Path, code: int = NO_CHECKPOINT) -> Iterator[None]:
    """Raise what is wrong with the content of files, which hashes don't tell where somebody made them so, as Fault (`code`)."""
    try:
        yield
    except (Exception, dcp.CheckpointException) as error:  # the latter is no Exception
        failures = getattr(error, "failures", None)  # of dcp: rank -> (exception, traceback)
        first = min(failures.items())[1][0] if failures else error
        if as_fault(first).code in (PEER_LOST, OUT_OF_MEMORY, STOPPED):
            raise as_fault(first) from error
        raise Fault(f"{str(path)!r} can't be read: {one_line(first)[:400]}.", code) from error


class Slice(NamedTuple):
    """A tensor of `Tensors` that is read when it is indexed."""

    tensors: Tensors
    name: str

    def get_shape(self) -> list[int]:
        return list(self.tensors.shapes[self.name])

    def __getitem__(self, index: Any) -> Tensor:
        return self.tensors[self.name][index]


def slices(path: Path, expected: nn.Module) -> Optional[dict[str, Slice]]:
    """The weights of a sharded checkpoint by HF name, not read yet; None if `path` isn't one. See `weights`."""
    if not (path / "weights").is_dir():
        return None
    stored = weights(path, expected)
    return {name.removeprefix(PREFIX): Slice(stored, name) for name in stored}


def open_weights(source: str, config: PretrainedConfig, dtype: torch.dtype, seed: int = 0) -> Source:
    """Where the weights of a checkpoint come from, full or sharded, or those of a model: see `loading.open_weights`."""
    return loading.open_weights(
        source, config, dtype, seed, slices(Path(source), loading.build_skeleton(config, dtype))
    )


def weights(path: Path, expected: nn.Module) -> Tensors:
    """What a sharded checkpoint holds, by names behind PREFIX. Raises Fault (66) first unless it is the model `expected`."""
    stored = Tensors((path / "weights").glob("*.safetensors"))
    wanted = {PREFIX + name: shape for name, shape in saved_shapes(expected).items()}
    for name in sorted(stored.keys() | wanted.keys()):
        here, there = stored.shapes.get(name, "nothing"), wanted.get(name, "nothing")
        if here != there:
            raise damaged(path, f"weights hold {here} as {name}, the model {there}.")
    return stored


def load_optimizer(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, may_lack: Collection[str] = ()
) -> None:
    """Fill the optimizer of a wrapped model from a checkpoint, whatever ranks and strategy wrote it. All ranks call it.

    Where the checkpoint has none, its moving average stays as it is, and the state of the parameters that it `may_lack`.
    """
    optimizer, *averages = with_average(optimizer)
    stored = optimizer_state(path) if may_lack else {}
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    for one in [optimizer, *(averages if EMA in read_progress(path)["optimizer_state"] else [])]:
        flat, tensors = optimizer_tensors(model, one)
        tensors = {key: t for key, t in tensors.items() if parameter_of(key) not in may_lack or key in stored}
        load_parts(tensors, path / "trainer" / "optimizer")
        set_optimizer_state_dict(model, one, {**flat, **tensors}, options=options)


def load_parts(tensors: dict[str, Any], folder: Path) -> None:
    """Fill `tensors`. Raises Fault (66) where the parts are others."""
    with readable(folder):
        dcp.load(tensors, storage_reader=HuggingFaceStorageReader(path=str(folder)))


def optimizer_state(path: Path) -> Tensors:
    """What a checkpoint holds of its optimizer: `state.causal_lm.NAME.exp_avg` and the like."""
    return Tensors((path / "trainer" / "optimizer").glob("*.safetensors"))


def parameter_of(key: str) -> str:
    """The Hugging Face name in a key of the optimizer's state: `state.causal_lm.NAME.exp_avg`."""
    return key.removeprefix(f"state.{PREFIX}").rpartition(".")[0]


class MovingAverage:
    """The weights of a checkpoint, and in place of those that were trained their moving average. A `weights.Source`."""

    def __init__(self, path: Path, source: Source) -> None:
        """source: the weights. Raises ValueError where the checkpoint holds no average."""
        self.source, self.stored = source, optimizer_state(path)
        if not any(key.endswith(f".{EMA}") for key in self.stored):
            raise ValueError(
                f"{str(path)!r} holds no moving average of the weights: its run had no --ema_decay when it was saved."
            )

    def read(self, unit: str) -> dict[str, Tensor]:
        found = self.source.read(unit)
        for name, tensor in found.items():
            if (key := f"state.{PREFIX}{name}.{EMA}") in self.stored:
                found[name] = torch.empty_like(tensor).copy_(self.stored[key])
        return found


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
