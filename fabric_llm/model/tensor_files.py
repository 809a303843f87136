"""Safetensors files, read and written one tensor at a time. A file is open only meanwhile, and
nothing in it runs code."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint._hf_utils import CUSTOM_METADATA_KEY, DTYPE_MAP, SAVED_OFFSETS_KEY

from fabric_llm.base.faults import (
    BAD_INPUT,
    NO_CHECKPOINT,
    OUT_OF_MEMORY,
    STOPPED,
    Fault,
    as_fault,
    one_line,
)

Shape = tuple[int, ...]
DTYPE_NAMES = {dtype: name for name, dtype in DTYPE_MAP.items()}  # of safetensors


class Tensors(Mapping[str, Tensor]):
    """Name -> tensor, on the CPU, which is read from safetensors files when it is asked for.

    Files of Hugging Face hold whole tensors. Those of torch.distributed.checkpoint hold parts, and
    the offsets of each part in their headers; replicas of a part have the same offsets.
    """

    def __init__(self, files: Iterable[Path], code: int = NO_CHECKPOINT, of: str = "") -> None:
        """of: what they hold, in words. Raises Fault (`code`) for a file that can't be read, here
        and where a tensor is asked for."""
        self.code, self.of = code, of
        # Name -> offsets of a part -> its file and its shape.
        self.parts: dict[str, dict[Shape, tuple[Path, Shape]]] = {}
        self.shapes: dict[str, Shape] = {}  # of whole tensors
        self.dtypes: dict[str, str] = {}  # as safetensors names them, such as BF16
        # Headers alone are read here, and tensors when they are asked for.
        for path in sorted(files):
            with readable(of or repr(str(path)), code), safe_open(path, framework="pt") as file:
                places = json.loads((file.metadata() or {}).get(CUSTOM_METADATA_KEY, "{}"))
                for name in file.keys():
                    stored = file.get_slice(name)
                    shape, self.dtypes[name] = tuple(stored.get_shape()), stored.get_dtype()
                    # A file of Hugging Face has no offsets: it holds whole tensors.
                    offsets: Shape = (0,) * len(shape)
                    if places:
                        offsets = tuple(places[name][SAVED_OFFSETS_KEY])
                    end = tuple(
                        first + length for first, length in zip(offsets, shape, strict=True)
                    )
                    # The whole tensor reaches as far as any of its parts.
                    self.shapes[name] = tuple(map(max, end, self.shapes.get(name, end)))
                    parts = self.parts.setdefault(name, {})
                    # Two files hold the same whole tensor. Parts may be replicas of each other.
                    if offsets in parts and not places:
                        self._require_equal(name, parts[offsets][0], path)
                    parts[offsets] = path, shape

    def _require_equal(self, name: str, *paths: Path) -> None:
        """Raises ValueError where two files hold a tensor with other values: nothing says which is
        meant."""
        tensors = []
        for path in paths:
            with safe_open(path, framework="pt") as file:
                tensors.append(file.get_tensor(name))
        if not torch.equal(*tensors):
            raise ValueError(
                f"{paths[0].name} and {paths[1].name} hold {name} with different values"
            )

    def __iter__(self) -> Iterator[str]:
        return iter(self.parts)

    def __len__(self) -> int:
        return len(self.parts)

    # Mapping's own would read the tensor.
    def __contains__(self, name: object) -> bool:
        return name in self.parts

    def __getitem__(self, name: str) -> Tensor:
        """The whole tensor. Raises Fault where a part of it is missing or can't be read."""
        return self.elements(name, 0, math.prod(self.shapes[name])).view(self.shapes[name])

    def elements(self, name: str, first: int, count: int) -> Tensor:
        """Elements of the flattened tensor, one-dimensional, of which only the rows that hold them
        are read. Raises Fault as above."""
        # A scalar is read as one row of one element.
        shape = self.shapes[name] or (1,)
        of_row = math.prod(shape[1:])
        # The rows that hold the elements: from `begin` up to, and without, `end`.
        begin, end = first // max(of_row, 1), -(-(first + count) // max(of_row, 1))
        rows = None
        # Asked before memory is taken for the tensor, and where no part holds any of these
        # elements.
        if missing := self.missing(name):
            with readable(self.of or repr(name), self.code):
                raise ValueError(f"{name} lacks {missing} of {math.prod(shape)} elements")
        for offsets, (path, lengths) in self.parts[name].items():
            offsets, lengths = offsets or (0,), lengths or (1,)
            low, high = max(begin, offsets[0]), min(end, offsets[0] + lengths[0])
            if low >= high:
                continue
            with (
                readable(self.of or repr(str(path)), self.code),
                safe_open(path, framework="pt") as file,
            ):
                part = file.get_tensor(name).view(lengths)[low - offsets[0] : high - offsets[0]]
                # One part holds all that is wanted, and needn't be copied.
                if part.numel() == (end - begin) * of_row:
                    rows = part
                    break
                if rows is None:
                    rows = torch.empty((end - begin, *shape[1:]), dtype=part.dtype)
                # A part may also begin and end within a row.
                across = (slice(at, at + length) for at, length in zip(offsets[1:], lengths[1:]))
                rows[(slice(low - begin, high - begin), *across)] = part
        whole = torch.empty(0) if rows is None else rows.view(-1)
        # Without the elements of the first and the last row that weren't asked for.
        return whole[first - begin * of_row :][:count]

    def missing(self, name: str) -> int:
        """How many elements of the tensor are in no file: 0 unless a part of it is missing."""
        held = sum(math.prod(shape) for _, shape in self.parts[name].values())
        return math.prod(self.shapes[name]) - held


@contextmanager
def readable(of: str, code: int = NO_CHECKPOINT) -> Iterator[None]:
    """Raise any error of the body as Fault (`code`): `of` can't be read. Files may have the right
    hashes and still be wrong, because they were made so."""
    try:
        yield
    except Fault:
        raise
    except Exception as error:
        # A lack of memory, or a request to stop, isn't the file's fault.
        if as_fault(error).code in (OUT_OF_MEMORY, STOPPED):
            raise as_fault(error) from error
        why = one_line(error)[:2000].rstrip(".")
        # A checkpoint is damaged, but a model has mostly been copied in part.
        if isinstance(error, SafetensorError) and code == BAD_INPUT:
            why += ": a file isn't whole, or isn't of safetensors; copy or download it again"
        raise Fault(f"{of} can't be read: {why}.", code) from error


class Slice(NamedTuple):
    """A tensor of `Tensors` that is read when it is indexed."""

    tensors: Tensors
    name: str

    def get_shape(self) -> list[int]:
        return list(self.tensors.shapes[self.name])

    def get_dtype(self) -> str:
        return self.tensors.dtypes[self.name]

    def __getitem__(self, index: Any) -> Tensor:
        return self.tensors[self.name][index]


class TensorFile:
    """A safetensors file that is written one tensor at a time, in any order: safetensors itself
    takes all at once, and copies them."""

    def __init__(self, path: Path, layout: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
        """layout: name -> a tensor of its dtype and shape, on any device, also without memory."""
        header: dict[str, Any] = {"__metadata__": metadata}
        end, begins = 0, {}
        # The widest dtypes come first, so that each tensor is aligned.
        for name in sorted(layout, key=lambda name: (-layout[name].element_size(), name)):
            tensor = layout[name]
            begins[name], end = end, end + tensor.nbytes
            offsets = [begins[name], end]
            header[name] = {
                "dtype": DTYPE_NAMES[tensor.dtype],
                "shape": [*tensor.shape],
                "data_offsets": offsets,
            }
        encoded = json.dumps(header, separators=(",", ":")).encode()
        # The format asks for a header of a multiple of 8 bytes, so that tensors are aligned.
        encoded += b" " * (-len(encoded) % 8)
        # Where the tensors begin that aren't written yet.
        self.begins = {name: 8 + len(encoded) + begin for name, begin in begins.items()}
        self.path, self.header = path, len(encoded).to_bytes(8, "little") + encoded

    def write(self, name: str, tensor: Tensor) -> bool:
        """Whether the file is complete now. It is open only meanwhile: a model may have more files
        than a process may open."""
        # The first tensor that is written brings the header along and makes the file.
        header, self.header = self.header, b""
        with self.path.open("wb" if header else "r+b") as file:
            file.write(header)
            file.seek(self.begins.pop(name))
            # As bytes, since numpy has no bfloat16.
            file.write(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
        return not self.begins
