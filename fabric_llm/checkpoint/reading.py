"""Read a checkpoint that keep.py has verified: weights, optimizer state and probe. Nothing in it runs code."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Optional

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint._hf_utils import CUSTOM_METADATA_KEY, DTYPE_MAP, SAVED_OFFSETS_KEY
from transformers import PretrainedConfig, PreTrainedModel

from fabric_llm.base.faults import NO_CHECKPOINT, OUT_OF_MEMORY, STOPPED, Fault, as_fault, one_line
from fabric_llm.checkpoint.keep import damaged, read_progress
from fabric_llm.checkpoint.state_dicts import EMA, PREFIX, optimizer_held, saved_shapes
from fabric_llm.model import loading
from fabric_llm.model.strategy import local_part, shards
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
        # Name -> offsets of a part -> its file and its shape.
        self.parts: dict[str, dict[Shape, tuple[Path, Shape]]] = {}
        self.shapes: dict[str, Shape] = {}  # of whole tensors
        for path in sorted(files):
            with readable(path, code), safe_open(path, framework="pt") as file:
                places = json.loads((file.metadata() or {}).get(CUSTOM_METADATA_KEY, "{}"))
                for name in file.keys():
                    shape = tuple(file.get_slice(name).get_shape())
                    offsets = tuple(places[name][SAVED_OFFSETS_KEY] if places else [0] * len(shape))
                    end = tuple(first + length for first, length in zip(offsets, shape, strict=True))
                    self.shapes[name] = tuple(map(max, end, self.shapes.get(name, end)))
                    self.parts.setdefault(name, {})[offsets] = path, shape

    def __iter__(self) -> Iterator[str]:
        return iter(self.parts)

    def __len__(self) -> int:
        return len(self.parts)

    def __contains__(self, name: object) -> bool:  # Mapping's own would read the tensor
        return name in self.parts

    def __getitem__(self, name: str) -> Tensor:
        """The whole tensor. Raises Fault where a part of it is missing or can't be read."""
        return self.elements(name, 0, math.prod(self.shapes[name])).view(self.shapes[name])

    def elements(self, name: str, first: int, count: int) -> Tensor:
        """Elements of the flattened tensor, one-dimensional, of which only the rows that hold them are read. Raises Fault as above."""
        shape = self.shapes[name] or (1,)
        of_row = math.prod(shape[1:])
        begin, end = first // max(of_row, 1), -(-(first + count) // max(of_row, 1))
        rows = None
        for offsets, (path, lengths) in self.parts[name].items():
            offsets, lengths = offsets or (0,), lengths or (1,)
            low, high = max(begin, offsets[0]), min(end, offsets[0] + lengths[0])
            if low >= high:
                continue
            with readable(path.parent, self.code), safe_open(path, framework="pt") as file:
                if missing := self.missing(name):  # before memory is taken for it
                    raise ValueError(f"{name} lacks {missing} of {math.prod(shape)} elements")
                part = file.get_tensor(name).view(lengths)[low - offsets[0] : high - offsets[0]]
                rows = torch.empty((end - begin, *shape[1:]), dtype=part.dtype) if rows is None else rows
                across = (slice(at, at + length) for at, length in zip(offsets[1:], lengths[1:]))
                rows[(slice(low - begin, high - begin), *across)] = part
        whole = torch.empty(0) if rows is None else rows.view(-1)
        return whole[first - begin * of_row :][:count]

    def missing(self, name: str) -> int:
        """How many elements of the tensor are in no file: 0 unless a part of it is missing."""
        return math.prod(self.shapes[name]) - sum(math.prod(shape) for _, shape in self.parts[name].values())


@contextmanager
def readable(path: Path, code: int = NO_CHECKPOINT) -> Iterator[None]:
    """Raise what is wrong with the content of files, which hashes don't tell where somebody made them so, as Fault (`code`)."""
    try:
        yield
    except Exception as error:
        if as_fault(error).code in (OUT_OF_MEMORY, STOPPED):
            raise as_fault(error) from error
        raise Fault(f"{str(path)!r} can't be read: {one_line(error)[:400]}.", code) from error


class Slice(NamedTuple):
    """A tensor of `Tensors` that is read when it is indexed."""

    tensors: Tensors
    name: str

    def get_shape(self) -> list[int]:
        return list(self.tensors.shapes[self.name])

    def __getitem__(self, index: Any) -> Tensor:
        return self.tensors[self.name][index]


def slices(path: Path, expected: nn.Module) -> Optional[dict[str, Slice]]:
    """The weights of a sharded checkpoint by HF name, not read yet; None if `path` isn't one.

    Raises Fault (66) unless it is the model `expected`.
    """
    if not (path / "weights").is_dir():
        return None
    stored = Tensors((path / "weights").glob("*.safetensors"))
    wanted = {PREFIX + name: shape for name, shape in saved_shapes(expected).items()}
    for name in sorted(stored.keys() | wanted.keys()):
        here, there = stored.shapes.get(name, "nothing"), wanted.get(name, "nothing")
        if here != there:
            raise damaged(path, f"weights hold {here} as {name}, the model {there}.")
    return {name.removeprefix(PREFIX): Slice(stored, name) for name in stored}


def open_weights(source: str, config: PretrainedConfig, dtype: torch.dtype, seed: int = 0) -> Source:
    """Where the weights of a checkpoint come from, full or sharded, or those of a model: see `loading.open_weights`."""
    stored = slices(Path(source), loading.build_skeleton(config, dtype))
    return loading.open_weights(source, config, dtype, seed, stored)


def load_optimizer(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    skeleton: PreTrainedModel,
    may_lack: Collection[str] = (),
) -> None:
    """Fill the optimizer of a wrapped model from a checkpoint, whatever ranks and strategy wrote it. All ranks call it.

    Each rank reads the rows that it holds a part of, one tensor at a time. skeleton: the unwrapped model on the meta device.
    Where the checkpoint has none, its moving average stays as it is, and the state of the parameters that it `may_lack`.
    Raises Fault (66) where it lacks another, or has another shape.
    """
    stored = optimizer_state(path)
    has_average = EMA in read_progress(path)["optimizer_state"]
    _begin_state(stored, model, optimizer)
    for key, (tensor, first, shape) in optimizer_held(model, skeleton, optimizer).items():
        may = parameter_of(key) in may_lack or key.endswith(f".{EMA}") and not has_average
        if key in stored or not may:
            if (there := stored.shapes.get(key, "nothing")) != shape:
                raise damaged(path, f"the optimizer's state holds {there} as {key}, the model {shape}.")
            part = local_part(tensor).view(-1)
            part.copy_(stored.elements(key, first if shape else 0, len(part)))


def _begin_state(stored: Tensors, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Make the stored state that an optimizer would begin in its first step, as most do."""
    optimizer = getattr(optimizer, "optimizer", optimizer)  # without Fabric's wrapper
    trained = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    known = shards(model)
    for key, shape in stored.shapes.items():
        name, _, item = key.removeprefix("state.").rpartition(".")
        shard = known.get(name)
        if shard is None or shard.parameter not in trained or item == EMA or item in optimizer.state[shard.parameter]:
            continue
        like, dtype = shard.parameter.detach(), stored.elements(key, 0, 1).dtype
        if math.prod(shape) == sum(shard.counts) and shape:
            begun = torch.zeros_like(like, dtype=dtype)
        else:  # a counter, which optimizers keep on the CPU, or what is of another shape than its parameter
            begun = torch.zeros(shape, dtype=dtype, device=like.device if shape else "cpu")
        optimizer.state[shard.parameter][item] = begun


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
