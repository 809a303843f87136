"""The tensors in safetensors files, whole or in parts, read one at a time, on the CPU. One process."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint._hf_utils import CUSTOM_METADATA_KEY, SAVED_OFFSETS_KEY

from fabric_llm.base.faults import NO_CHECKPOINT, OUT_OF_MEMORY, PEER_LOST, STOPPED, Fault, as_fault, one_line

Shape = tuple[int, ...]


class Tensors(Mapping[str, Tensor]):
    """Name -> tensor, which is read from its files when it is asked for.

    Files of Hugging Face hold whole tensors. Those of torch.distributed.checkpoint hold parts, and the offsets of each part in
    their headers; replicas of a part have the same offsets.
    """

    def __init__(self, files: Iterable[Path], code: int = NO_CHECKPOINT) -> None:
        """Reads the headers. Raises Fault (`code`) for a file that can't be read."""
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
    except (Exception, dcp.CheckpointException) as error:
        first = first_failure(error)
        if as_fault(first).code in (PEER_LOST, OUT_OF_MEMORY, STOPPED):
            raise as_fault(first) from error
        raise Fault(f"{str(path)!r} can't be read: {one_line(first)[:400]}.", code) from error


def first_failure(error: BaseException) -> BaseException:
    """The error of the first rank that failed, where torch.distributed.checkpoint has collected them."""
    failures = getattr(error, "failures", None)  # rank -> (exception, traceback)
    return min(failures.items())[1][0] if failures else error
