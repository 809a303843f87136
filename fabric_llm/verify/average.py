"""The average of models on disk: summed in float64 tensor by tensor, written to a Hugging Face directory, and verified there."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any, Optional

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from fabric_llm.base import files
from fabric_llm.base.faults import BAD_INPUT, NO_CHECKPOINT, NON_FINITE, Fault
from fabric_llm.base.files import MANIFEST
from fabric_llm.checkpoint import keep, reading
from fabric_llm.checkpoint.progress import versions
from fabric_llm.checkpoint.state_dicts import PREFIX, tied_names
from fabric_llm.checkpoint.tensors import Tensors
from fabric_llm.model.folders import check_model_folder
from fabric_llm.model.loading import (
    DTYPES,
    build_skeleton,
    checked_skeleton,
    load_config,
    load_reference,
    tokenizer_beside,
)
from fabric_llm.verify.model_folder import VerificationError, logits_of, opened, replacing, write_model

BLOCK_ELEMENTS = 2**22  # of a tensor in float64 at a time: 32 MiB
PROBE_TOKENS = 64  # where no part has a probe
NOTE = "average.json"
# Fields of a configuration that don't change what the weights mean.
NO_MATTER = re.compile(
    r"^_|dtype$|_version$|_token_id$|drop|^use_cache$|^output_|^return_|^architectures$|2id$|^id2|^init"
)


class Layout:
    """Which tensors the files of a model hold for those in memory, where transformers fuses the experts of some families."""

    def __init__(self, skeleton: PreTrainedModel) -> None:
        """skeleton: the model on the meta device. Raises ValueError if a tensor in a file belongs to several tensors in memory.

        No family in tests/families.py has such files.
        """
        self.skeleton = skeleton
        self.left_out = tied_names(skeleton) | set(skeleton._keys_to_ignore_on_save or ())
        state = {name: tensor for name, tensor in skeleton.state_dict().items() if name not in self.left_out}
        apart = {name: revert_weight_conversion(skeleton, {name: tensor}) for name, tensor in state.items()}
        self.stored = {key: tensor for tensors in apart.values() for key, tensor in tensors.items()}
        self.memory_names = {key: name for name, tensors in apart.items() for key in tensors}
        whole = revert_weight_conversion(skeleton, state)
        if {key: t.shape for key, t in self.stored.items()} != {key: t.shape for key, t in whole.items()}:
            raise ValueError(f"{type(skeleton).__name__} can't be averaged: its files can't be read tensor by tensor.")

    def convert(self, state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """(name in files, tensor) for tensors by their names in memory, each tied one once."""
        for name, tensor in state.items():
            if name not in self.left_out:
                yield from revert_weight_conversion(self.skeleton, {name: tensor}).items()


@dataclass(frozen=True)
class Part:
    """A model on disk that passed all checks."""

    path: Path
    config: Any
    tokenizer: Optional[Any]
    dtype: torch.dtype  # of its weights, but for what transformers keeps in float32
    progress: Optional[dict[str, Any]]  # progress.json of a checkpoint
    sha256: str  # of a checkpoint's manifest, which has those of all files, else of all its weight files together
    read: Callable[[str], Tensor]  # the tensor with a name that Hugging Face files have

    @property
    def run(self) -> Optional[Path]:
        """The run directory of a checkpoint."""
        return None if self.progress is None else self.path.resolve().parent

    @property
    def name(self) -> str:
        """Short, for a table."""
        whole = self.path.resolve()
        return str(Path(whole.parent.name, whole.name)) if self.run else str(self.path)


# ----------------------------------------------------------------------------- the parts


def open_parts(folders: Sequence[Path]) -> list[Part]:
    """The parts, once they are verified and of one model. Raises Fault: 66 damaged, 77 refused, 2 of different models."""
    parts = [_open(folder) for folder in folders]
    for other in parts[1:]:
        _require_same_model(parts[0], other)
    return parts


def _open(folder: Path) -> Part:
    progress = None
    if (folder / MANIFEST).is_file():
        progress = keep.verified(folder, hashes=True)
        sha256 = files.sha256(folder / MANIFEST)
    elif (folder / "trainer" / "progress.json").is_file():
        raise Fault(f"{str(folder)!r} isn't a checkpoint: it has no {MANIFEST}.", NO_CHECKPOINT)
    else:
        check_model_folder(str(folder), "The part")
        hashes = "".join(f"{path.name} {files.sha256(path)}\n" for path in _weight_files(folder))
        sha256 = hashlib.sha256(hashes.encode()).hexdigest()
    config = load_config(str(folder))
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(f"{str(folder)!r} is quantized, and quantized weights can't be averaged.")
    if progress is None:
        dtype = getattr(torch, str(getattr(config, "dtype", None) or "float32").removeprefix("torch."))
    else:
        dtype = DTYPES[progress["fixed"]["precision"]]
    skeleton = checked_skeleton(str(folder), config, dtype)
    read = (_of_parts if (folder / "weights").is_dir() else _of_files)(folder, Layout(skeleton))
    return Part(folder, config, tokenizer_beside(str(folder)), skeleton.dtype, progress, sha256, read)


def _weight_files(folder: Path) -> list[Path]:
    """The files that hold a model's weights. Raises ValueError where there are none."""
    index = folder / "model.safetensors.index.json"
    names = sorted(set(files.weight_map(index).values())) if index.is_file() else ["model.safetensors"]
    for name in names:
        if not (folder / name).is_file():
            raise ValueError(f"{str(folder)!r} has no weights that can be averaged: {name} is missing.")
    return [folder / name for name in names]


def _of_files(folder: Path, layout: Layout) -> Callable[[str], Tensor]:
    """Reads from a Hugging Face directory, or a full checkpoint.

    If the files have names that transformers no longer writes, such as names without the prefix of the base model, transformers
    loads the whole model, which then stays in memory. Raises ValueError if they hold another model.
    """
    stored = Tensors(_weight_files(folder), BAD_INPUT)
    if any(stored.shapes.get(name) != tuple(tensor.shape) for name, tensor in layout.stored.items()):
        model = load_reference(str(folder), layout.skeleton.config, layout.skeleton.dtype, seed=0)
        return dict(layout.convert(model.state_dict())).__getitem__
    return stored.__getitem__


def _of_parts(folder: Path, layout: Layout) -> Callable[[str], Tensor]:
    """Reads from a sharded checkpoint, whose names are those in memory. Raises Fault (66) where it holds another model."""
    stored = reading.weights(folder, layout.skeleton)
    last: dict[str, dict[str, Tensor]] = {}  # name in memory -> its tensors by their names in files

    def read(name: str) -> Tensor:
        source = layout.memory_names[name]
        if source not in last:  # the experts of a layer are asked for one after the other
            last.clear()
            last[source] = dict(layout.convert({source: stored[PREFIX + source]}))
        return last[source][name]

    return read


def _require_same_model(first: Part, other: Part) -> None:
    """Raises ValueError where two parts have other configurations or vocabularies: their average would be no model."""
    both = f"{str(first.path)!r} and {str(other.path)!r}"
    if type(first.config) is not type(other.config):
        kinds = f"{first.config.model_type} and {other.config.model_type}"
        raise ValueError(f"{both} are different models: {kinds}.")
    here, there = ({k: v for k, v in p.config.to_dict().items() if not NO_MATTER.search(k)} for p in (first, other))
    differing = sorted(key for key in here.keys() | there.keys() if here.get(key) != there.get(key))
    if differing:
        words = (f"{key} {here.get(key)}, and {there.get(key)}" for key in differing[:10])
        raise ValueError(f"{both} are different models: {'; '.join(words)}.")
    if first.tokenizer is not None and other.tokenizer is not None:
        if first.tokenizer.get_vocab() != other.tokenizer.get_vocab():
            raise ValueError(f"{both} have different tokenizers: their embeddings don't mean the same tokens.")


# ----------------------------------------------------------------------------- the average


def average(
    parts: Sequence[Part], weights: Sequence[float], how: str, output: Path, dtype: str, max_shard_size: str
) -> str:
    """Write `output`, verify it, and return what was verified, in words.

    weights: one for each part; they add up to 1. how: they were given, for the note. dtype: auto or a name of torch's.
    Raises Fault (76) for NaN in a part, and VerificationError. Nothing is then left behind.
    """
    promoted = reduce(torch.promote_types, (part.dtype for part in parts))
    newest = parts[-1]  # of a run; its generation config and tokenizer are taken
    skeleton = build_skeleton(newest.config, promoted if dtype == "auto" else getattr(torch, dtype))
    layout = Layout(skeleton)
    needed = sum(tensor.numel() * tensor.element_size() for tensor in layout.stored.values())
    with replacing(output, needed, "The average") as temporary:
        write_model(
            temporary,
            newest.path,
            newest.config,
            skeleton.dtype,
            {name: averaged(name, like, parts, weights) for name, like in layout.stored.items()},
            max_shard_size,
            named_as_stored=True,
        )
        _write_note(temporary, parts, weights, how, skeleton.dtype)
        _verify(temporary, layout, parts, weights)
    parameters = sum(parameter.numel() for parameter in skeleton.parameters())
    return (
        f"Verified with plain transformers: {len(layout.stored)} tensors, {parameters:,} parameters, each the float64 "
        f"average rounded to {str(skeleton.dtype).removeprefix('torch.')}; logits are finite."
    )


def averaged(name: str, like: Tensor, parts: Sequence[Part], weights: Sequence[float]) -> Tensor:
    """The sum of weight x tensor over the parts, float64, rounded to the dtype of `like`, whose shape it has.

    What isn't floating point is taken as it is. Raises ValueError where it differs between parts, Fault (76) for NaN or
    infinity, in a part or because float16 is too narrow.
    """
    if not like.is_floating_point():
        return _equal(name, parts)
    total = torch.empty(like.numel(), dtype=torch.float64)
    used = [(part, weight) for part, weight in zip(parts, weights) if weight > 0]
    for number, (part, weight) in enumerate(used):
        flat = part.read(name).reshape(-1)
        for start in range(0, flat.numel(), BLOCK_ELEMENTS):
            block = slice(start, start + BLOCK_ELEMENTS)
            term = flat[block].double()
            if not torch.isfinite(term).all():
                raise Fault(f"{str(part.path)!r} holds NaN or infinity in {name}.", NON_FINITE)
            term.mul_(weight)
            if number == 0:  # not added to zeros: the sign of -0.0 stays
                total[block] = term
            else:
                total[block].add_(term)
    rounded = total.to(like.dtype).view(like.shape)
    if not torch.isfinite(rounded).all():
        raise Fault(f"{name} has numbers that {like.dtype} can't hold: take another --dtype.", NON_FINITE)
    return rounded


def _equal(name: str, parts: Sequence[Part]) -> Tensor:
    first = parts[0].read(name)
    for part in parts[1:]:
        if not torch.equal(first, part.read(name)):
            both = f"{str(parts[0].path)!r} and {str(part.path)!r}"
            raise ValueError(f"{both} differ in {name}, which holds {first.dtype} and can't be averaged.")
    return first


def _write_note(folder: Path, parts: Sequence[Part], weights: Sequence[float], how: str, dtype: torch.dtype) -> None:
    """Say beside the average what it is made of."""
    note = {
        "what": "weighted average of models, summed in float64",
        "weights": how,
        "dtype": str(dtype).removeprefix("torch."),
        "parts": [
            {
                "path": str(part.path),
                "weight": weight,
                "step": None if part.progress is None else part.progress["progress"]["step"],
                "dtype": str(part.dtype).removeprefix("torch."),
                "sha256_of": "manifest" if part.progress is not None else "weights",
                "sha256": part.sha256,
            }
            for part, weight in zip(parts, weights)
        ],
        "versions": versions(),
    }
    (folder / NOTE).write_text(json.dumps(note, indent=2) + "\n")


def _verify(folder: Path, layout: Layout, parts: Sequence[Part], weights: Sequence[float]) -> None:
    """Raises VerificationError unless plain transformers finds every average in `folder`, and finite logits."""
    loaded = opened(folder, layout.skeleton.dtype)
    for name, tensor in layout.convert(loaded.state_dict()):
        if not torch.equal(tensor, averaged(name, layout.stored[name], parts, weights)):
            raise VerificationError(f"{name} isn't the average of the parts.")
    source = next((part for part in reversed(parts) if part.progress is not None), None)
    if source is not None:
        input_ids = reading.read_probe(source.path)["input_ids"]
    else:
        input_ids = torch.arange(PROBE_TOKENS)[None] % loaded.config.get_text_config().vocab_size
    if not torch.isfinite(logits_of(loaded, input_ids)).all():
        raise VerificationError("it gives NaN or infinity.")
