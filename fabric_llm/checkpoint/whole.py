"""Whole weights for a checkpoint of state_dict_type full: they come to rank 0 one unit at a time, and are written as they come.

The files are those of `save_pretrained`, which would take all weights at once, and safetensors two copies of each file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from fabric_llm.base.ranks import waits_for_others
from fabric_llm.checkpoint.reading import DTYPE_NAMES
from fabric_llm.checkpoint.state_dicts import PREFIX
from fabric_llm.model.strategy import communication_device, local_part, original_name, shard_counts, shard_group
from fabric_llm.model.weights import first_names, units

LARGEST_FILE = "5GB"


@dataclass
class Pieces:
    """What this rank holds of each weight, flattened, and how many elements each rank of its group holds."""

    skeleton: PreTrainedModel
    held: dict[str, Tensor]
    counts: dict[str, list[int]]
    group: Optional[ProcessGroup]  # None where every rank holds all

    def own(self) -> list[tuple[str, Tensor]]:
        """The pieces that are this rank's to save, where all hold the same those of rank 0."""
        first = self.group is not None or shard_ranks(None) == [0]
        return list(self.held.items()) if first else []

    def of_units(self, group: Optional[ProcessGroup] = None) -> Iterator[Callable[[], dict[str, Tensor]]]:
        """For one unit after the other what makes its whole weights, on rank 0. All ranks of the group call it.

        group: of the same ranks, to use instead of the model's own, whose device the pieces are on.
        """
        shapes = {name: tensor.shape for name, tensor in self.skeleton.state_dict().items()}
        for names in units(self.skeleton).values() if self.held else ():
            parts = self._sent(names, group or self.group)

            def whole(names: list[str] = names, parts: list[list[Tensor]] = parts) -> dict[str, Tensor]:
                flat = (torch.cat(of_ranks).view(self.held[name].dtype) for name, of_ranks in zip(names, parts))
                return {name: one.view(shapes[name]) for name, one in zip(names, flat)}

            yield whole

    def _sent(self, names: list[str], group: Optional[ProcessGroup]) -> list[list[Tensor]]:
        """The pieces of each weight, uint8, by rank, on the rank that is first in the group."""
        own = [self.held[name].contiguous().view(-1).view(torch.uint8) for name in names]
        if self.group is None:
            return [[piece] for piece in own]
        widths = [self.held[name].element_size() for name in names]
        counts = zip(*(self.counts[name] for name in names))
        sizes = [[count * width for count, width in zip(of_rank, widths)] for of_rank in counts]
        together = torch.cat(own).to(communication_device(group))
        together = torch.nn.functional.pad(together, (0, max(map(sum, sizes)) - len(together)))
        first = torch.distributed.get_rank(group) == 0
        parts = [torch.empty_like(together) for _ in sizes] if first else None
        waits_for_others()
        torch.distributed.gather(together, parts, group=group, group_dst=0)
        return [list(each) for each in zip(*(part[: sum(size)].split(size) for part, size in zip(parts or (), sizes)))]


def take(model: nn.Module, skeleton: PreTrainedModel, copy: bool) -> Pieces:
    """The pieces of a wrapped model. copy: on the CPU, so that training can go on. All ranks call it."""
    group = shard_group(model)
    held = {original_name(name).removeprefix(PREFIX): local_part(p).detach() for name, p in model.named_parameters()}
    counts = dict(zip(held, shard_counts(list(model.parameters()), group).T.tolist()))
    ranks = 1 if group is None else torch.distributed.get_world_size(group)
    first = group is None or torch.distributed.get_rank(group) == 0
    saved = skeleton.state_dict()
    for name, buffer in model.named_buffers():
        if (name := original_name(name).removeprefix(PREFIX)) in saved:  # every rank has it
            held[name] = buffer if first else buffer.flatten()[:0]
            counts[name] = [buffer.numel()] + [0] * (ranks - 1)
    if 0 not in shard_ranks(group):
        held = {}  # another group has the same
    if copy:
        held = {name: tensor.to("cpu", copy=True) for name, tensor in held.items()}
    return Pieces(skeleton, held, counts, group)


def shard_ranks(group: Optional[ProcessGroup]) -> list[int]:
    """The ranks of a `shard_group`; this rank alone where there is none."""
    if group is not None:
        return torch.distributed.get_process_group_ranks(group)
    return [torch.distributed.get_rank() if torch.distributed.is_initialized() else 0]


class TensorFile:
    """A safetensors file that is written one tensor at a time, in any order: safetensors itself takes all at once, and copies them."""

    def __init__(self, path: Path, layout: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
        """layout: name -> a tensor of its dtype and shape, on any device, also without memory."""
        header: dict[str, Any] = {"__metadata__": metadata}
        end, begins = 0, {}
        for name in sorted(layout, key=lambda name: (-layout[name].element_size(), name)):  # so that each is aligned
            tensor = layout[name]
            begins[name], end = end, end + tensor.nbytes
            header[name] = {
                "dtype": DTYPE_NAMES[tensor.dtype],
                "shape": [*tensor.shape],
                "data_offsets": [begins[name], end],
            }
        encoded = json.dumps(header, separators=(",", ":")).encode()
        encoded += b" " * (-len(encoded) % 8)
        self.begins = {name: 8 + len(encoded) + begin for name, begin in begins.items()}  # of what isn't written yet
        self.file = path.open("wb")
        self.file.write(len(encoded).to_bytes(8, "little") + encoded)

    def write(self, name: str, tensor: Tensor) -> bool:
        """True once the file is complete, and closed."""
        self.file.seek(self.begins.pop(name))
        self.file.write(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
        if not self.begins:
            self.file.close()
        return not self.begins


class WeightFiles:
    """The files of whole weights in a folder, with the configuration beside them, as `save_pretrained` makes them."""

    def __init__(self, folder: Path, skeleton: PreTrainedModel) -> None:
        first = first_names(skeleton)
        layout = {name: tensor for name, tensor in skeleton.state_dict().items() if first.get(name, name) == name}
        # A fused tensor's parts are views of it here, which would each count as the whole.
        layout = {name: torch.empty_like(tensor) for name, tensor in self.converted(skeleton, layout).items()}
        pattern = "model{suffix}.safetensors"
        split = split_torch_state_dict_into_shards(layout, filename_pattern=pattern, max_shard_size=LARGEST_FILE)
        self.skeleton, self.file_of = skeleton, split.tensor_to_filename
        self.files = {
            file: TensorFile(folder / file, {name: layout[name] for name in names}, {"format": "pt"})
            for file, names in split.filename_to_tensors.items()
        }
        if split.is_sharded:
            index = {"metadata": {"total_parameters": skeleton.num_parameters(), **split.metadata}}
            index["weight_map"] = split.tensor_to_filename
            content = json.dumps(index, indent=2, sort_keys=True) + "\n"
            (folder / "model.safetensors.index.json").write_text(content)

    @staticmethod
    def converted(skeleton: PreTrainedModel, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """Weights of whole units by the names that files have."""
        ignored = skeleton._keys_to_ignore_on_save or ()
        return revert_weight_conversion(skeleton, {n: tensor for n, tensor in weights.items() if n not in ignored})

    def write(self, weights: dict[str, Tensor]) -> list[str]:
        """Write the weights of a unit. Returns the names of files that are complete now."""
        tensors = self.converted(self.skeleton, weights)
        return [self.file_of[name] for name in tensors if self.files[self.file_of[name]].write(name, tensors[name])]
