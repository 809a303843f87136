"""Whole weights for a checkpoint of state_dict_type full: they come to rank 0 one unit at a time,
and are written as they come.

The files are those of `save_pretrained`, which would take all weights at once, and safetensors two
copies of each file.
"""

import json
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, Optional

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from fabric_llm.base.faults import one_line
from fabric_llm.base.files import OF_WEIGHTS, WEIGHT_INDEX
from fabric_llm.base.ranks import waits_for_others
from fabric_llm.checkpoint.state_dicts import saved_shapes
from fabric_llm.model import loading, positions, sharded
from fabric_llm.model.sharded import original_name
from fabric_llm.model.tensor_files import TensorFile
from fabric_llm.model.tokenizer import save_tokenizer
from fabric_llm.model.weights import PREFIX, saved, units

# Of one file. Larger models are split into several, with an index.
LARGEST_FILE = "5GB"


class Piece(NamedTuple):
    """What this rank has of a weight."""

    tensor: Tensor  # flattened
    # Elements that each rank of its group has, in their order; None where each has all of it.
    counts: Optional[list[int]]


class Pieces:
    """What this rank has of each weight, to send it to rank 0, which writes the weights whole."""

    def __init__(self, model: nn.Module, skeleton: PreTrainedModel) -> None:
        """model: wrapped. All ranks call it."""
        self.skeleton, self.group = skeleton, sharded.shard_group(model)
        held = {
            name: (sharded.local_part(shard.parameter), shard.counts)
            for name, shard in sharded.shards(model).items()
        }
        # Buffers aren't sharded: each rank has all of them.
        held |= {original_name(name): (buffer, None) for name, buffer in model.named_buffers()}
        self.held: dict[str, Piece] = {}
        # Another group of ranks has the same weights: the one with rank 0 sends them.
        if 0 in sharded.shard_ranks(model):
            for name in saved(skeleton):
                tensor, counts = held[PREFIX + name]
                self.held[name] = Piece(tensor.detach().flatten(), counts)

    def of_units(self, group: Optional[ProcessGroup]) -> Iterator[dict[str, Tensor]]:
        """The whole weights of one unit after the other, on rank 0. All ranks call it.

        group: a process group of the same ranks to use in place of the model's own, as that of
        writing.Background; None: the model's own.
        """
        # Ranks of other replicas have nothing to send.
        if not self.held:
            return
        expected = self.skeleton.state_dict()
        # Rank 0 holds one whole unit at a time.
        for names in units(self.skeleton).values():
            weights = {}
            for name in names:
                weight = self._sent(name, group or self.group)
                if weight is not None:
                    weights[name] = weight.view(expected[name].shape)
            yield weights

    def _sent(self, name: str, group: Optional[ProcessGroup]) -> Optional[Tensor]:
        """The pieces of all ranks together, flattened, on rank 0, which is the first in its
        group."""
        piece, counts = self.held[name]
        # The rank has all of it. Other ranks than 0 return it as well, and their caller drops it.
        if self.group is None or counts is None:
            return piece
        # gloo sends from the CPU, NCCL from the GPU.
        piece = piece.to(sharded.communication_device(group))
        is_first = torch.distributed.get_rank(group) == 0
        # A gather of pieces of unequal size, which torch's own gather doesn't take: each rank sends
        # its piece to the first rank only, which alone receives.
        nothing = [0] * len(counts)
        to_first = [len(piece), *nothing[1:]]
        received = counts if is_first else nothing
        weight = piece.new_empty(sum(received))
        waits_for_others()
        torch.distributed.all_to_all_single(weight, piece, received, to_first, group=group)
        return weight if is_first else None


def in_files(skeleton: PreTrainedModel, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights of whole units by the names, and in the layout, that files have."""
    # transformers may rename or fuse what it reads from files. This undoes it.
    ignored = skeleton._keys_to_ignore_on_save or ()
    kept = {name: tensor for name, tensor in weights.items() if name not in ignored}
    return revert_weight_conversion(skeleton, kept)


def layout_of_files(skeleton: PreTrainedModel) -> dict[str, Tensor]:
    """Name in the files -> a tensor without memory, of all weights of a model on the meta device,
    each tied one once."""
    # The parts of a fused tensor are views of it here, and each would count as large as the whole.
    return {
        name: torch.empty_like(tensor)
        for name, tensor in in_files(skeleton, saved(skeleton)).items()
    }


def write_configuration(folder: Path, skeleton: PreTrainedModel, tokenizer: Optional[Any]) -> None:
    """Write what stands beside the weights: the configuration, and how to generate and to tokenize
    where that is known."""
    _write_config(folder, skeleton)
    if (generation_config := getattr(skeleton, "generation_config", None)) is not None:
        generation_config.save_pretrained(folder)
    if tokenizer is not None:
        save_tokenizer(tokenizer, folder)


def _write_config(folder: Path, skeleton: PreTrainedModel) -> None:
    config = deepcopy(skeleton.config)
    # `save_pretrained` of a model sets these two. That of a configuration doesn't.
    config.dtype = str(skeleton.dtype).removeprefix("torch.")
    config.architectures = [type(skeleton).__name__]
    config.save_pretrained(folder)
    # Programs that know the older names alone would otherwise compute other positions.
    document = positions.with_older_names(config, json.loads((folder / "config.json").read_bytes()))
    (folder / "config.json").write_text(json.dumps(document, indent=2, sort_keys=True) + "\n")


def require_opens(skeleton: PreTrainedModel) -> None:
    """Raises ValueError unless the configuration that would be saved makes this model again."""
    problem = None
    with TemporaryDirectory() as folder:
        _write_config(Path(folder), skeleton)
        # Open it as a resumed run or an export would.
        try:
            again = loading.build_skeleton(loading.load_config(folder), skeleton.dtype)
            if saved_shapes(again) != saved_shapes(skeleton):
                problem = f"makes another model, {type(again).__name__}"
        except Exception as error:  # whatever transformers makes of it
            # The user can't look into the temporary folder, so its name isn't shown.
            problem = f"makes no model ({one_line(error).replace(folder, 'it')[:200].rstrip('.')})"
    if problem is not None:
        raise ValueError(
            f"{type(skeleton).__name__} could be trained and saved, but not resumed or exported: "
            f"of the configuration that is saved with it ({skeleton.config.model_type!r}), "
            f"AutoModelForCausalLM {problem}. Take a model of text alone."
        )


class WeightFiles:
    """The files of whole weights in a folder, as `save_pretrained` makes them."""

    def __init__(
        self, folder: Path, skeleton: PreTrainedModel, largest: str = LARGEST_FILE
    ) -> None:
        """skeleton: the model on the meta device. One that weights were read into would keep the
        names of their files.

        largest: such as "5GB", of a file that holds more than one tensor.
        """
        # Shapes alone decide which file has which weight, so weights can come in any order.
        layout = layout_of_files(skeleton)
        pattern = "model{suffix}.safetensors"
        split = split_torch_state_dict_into_shards(
            layout, filename_pattern=pattern, max_shard_size=largest
        )
        self.skeleton, self.file_of = skeleton, split.tensor_to_filename
        self.files = {}
        for file, names in split.filename_to_tensors.items():
            of_file = {name: layout[name] for name in names}
            self.files[file] = TensorFile(folder / file, of_file, OF_WEIGHTS)
        self.index: list[str] = []  # the names of files that no weights are written to
        # With several files, from_pretrained looks up in the index which one holds a tensor.
        if split.is_sharded:
            self.index.append(WEIGHT_INDEX)
            index = {"metadata": {"total_parameters": skeleton.num_parameters(), **split.metadata}}
            index["weight_map"] = split.tensor_to_filename
            content = json.dumps(index, indent=2, sort_keys=True) + "\n"
            (folder / WEIGHT_INDEX).write_text(content)

    def write(self, weights: dict[str, Tensor]) -> list[str]:
        """Write the weights of a unit. Returns the names of files that are complete now."""
        complete = []
        # A unit's weights may end up in several files, and a file may hold those of several units.
        for name, tensor in in_files(self.skeleton, weights).items():
            file = self.file_of[name]
            if self.files[file].write(name, tensor):
                complete.append(file)
        return complete
