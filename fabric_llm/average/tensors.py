"""The tensors of a model on disk, one at a time, by the names that Hugging Face files have today."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from fabric_llm.base import files
from fabric_llm.base.faults import one_line
from fabric_llm.checkpoint import reading
from fabric_llm.checkpoint.state_dicts import PREFIX, tied_names
from fabric_llm.model.loading import load_reference


class Layout:
    """Which tensors the files of a model hold for those in memory, where transformers fuses the experts of some families."""

    def __init__(self, template: PreTrainedModel) -> None:
        """template: the model on the meta device. Raises ValueError where files hold parts of several tensors in memory.

        None of the families in tests/families.py is such.
        """
        self.template = template
        self.left_out = tied_names(template) | set(template._keys_to_ignore_on_save or ())
        state = {name: tensor for name, tensor in template.state_dict().items() if name not in self.left_out}
        whole = revert_weight_conversion(template, dict(state))
        apart = {name: revert_weight_conversion(template, {name: tensor}) for name, tensor in state.items()}
        shapes = {key: tensor.shape for tensors in apart.values() for key, tensor in tensors.items()}
        if shapes != {key: tensor.shape for key, tensor in whole.items()}:
            raise ValueError(f"{type(template).__name__} can't be averaged: its files can't be read tensor by tensor.")
        self.stored = {key: tensor for tensors in apart.values() for key, tensor in tensors.items()}
        self.memory_names = {key: name for name, tensors in apart.items() for key in tensors}

    def convert(self, state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """(name in files, tensor) for tensors by their names in memory, each tied one once."""
        for name, tensor in state.items():
            if name not in self.left_out:
                yield from revert_weight_conversion(self.template, {name: tensor}).items()


def weight_files(folder: Path) -> list[Path]:
    """The files that hold a model's weights. Raises ValueError where there are none."""
    index = folder / "model.safetensors.index.json"
    names = sorted(set(files.weight_map(index).values())) if index.is_file() else ["model.safetensors"]
    for name in names:
        if not (folder / name).is_file():
            raise ValueError(f"{str(folder)!r} has no weights that can be averaged: {name} is missing.")
    return [folder / name for name in names]


def of_files(folder: Path, layout: Layout) -> Callable[[str], Tensor]:
    """Reads from a Hugging Face directory, or a full checkpoint.

    Where the files have other names than the model's have today, such as those without the prefix of the base model, transformers
    loads the whole model, which then stays in memory. Raises ValueError where they hold another model.
    """
    places: dict[str, Path] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for path in weight_files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                places |= dict.fromkeys(file.keys(), path)
                shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{str(path)!r} can't be read: {one_line(error)[:400].rstrip('.')}.") from error
    if any(shapes.get(name) != tuple(tensor.shape) for name, tensor in layout.stored.items()):
        model = load_reference(str(folder), layout.template.config, layout.template.dtype, seed=0)
        return dict(layout.convert(model.state_dict())).__getitem__

    def read(name: str) -> Tensor:
        with safe_open(places[name], framework="pt") as file:
            return file.get_tensor(name)

    return read


def of_parts(folder: Path, layout: Layout) -> Callable[[str], Tensor]:
    """Reads from a sharded checkpoint, whose names are those in memory. Raises Fault (66) where it holds another model."""
    reading.require_shapes(folder, layout.template)
    parts = reading.Parts(folder / "weights")
    last: dict[str, Any] = {"name": None, "tensors": {}}

    def read(name: str) -> Tensor:
        source = layout.memory_names[name]
        if last["name"] != source:  # the experts of a layer are asked for one after the other
            last.update(name=None, tensors={})
            last.update(name=source, tensors=dict(layout.convert({source: parts.tensor(PREFIX + source)})))
        return last["tensors"][name]

    return read
