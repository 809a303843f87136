"""A model's folder as `save_pretrained` writes it, for old and new programs: its configuration,
what stands beside it, and its weights, unit by unit.

`save_pretrained` would take all weights at once, and safetensors two copies of each file.
"""

import json
import warnings
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import Any, Optional

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from fabric_llm.base.files import OF_WEIGHTS, WEIGHT_INDEX
from fabric_llm.model.tensor_files import TensorFile
from fabric_llm.model.tokenizer import save_tokenizer
from fabric_llm.model.weights import saved

# Of one file. Larger models are split into several, with an index.
LARGEST_FILE = "5GB"


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
    write_config(folder, skeleton)
    if (generation_config := getattr(skeleton, "generation_config", None)) is not None:
        generation_config.save_pretrained(folder)
    if tokenizer is not None:
        save_tokenizer(tokenizer, folder)


def write_config(folder: Path, skeleton: PreTrainedModel) -> None:
    config = deepcopy(skeleton.config)
    # `save_pretrained` of a model sets these two. That of a configuration doesn't.
    config.dtype = str(skeleton.dtype).removeprefix("torch.")
    config.architectures = [type(skeleton).__name__]
    config.save_pretrained(folder)
    # Programs that know the older names alone would otherwise compute other positions.
    document = with_older_names(config, json.loads((folder / "config.json").read_bytes()))
    (folder / "config.json").write_text(json.dumps(document, indent=2, sort_keys=True) + "\n")


def with_older_names(config: Any, document: dict[str, Any]) -> dict[str, Any]:
    """`document`, config.json of `config`, with rotary positions also by the names that
    transformers 4 and other programs read, and the number of experts.

    Without these names, such programs silently compute with a base of 10000 and no scaling. The
    names are added only where transformers 5 reads the same positions with them.
    """
    document = dict(document)
    # A model of text and images has a configuration for each, with its own positions.
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if isinstance(document.get(name), dict) and hasattr(part, "sub_configs"):
            document[name] = with_older_names(part, document[name])
    # Where the class stores it under another name, programs that know num_experts find none.
    if (experts := config.attribute_map.get("num_experts")) in document:
        document["num_experts"] = document[experts]
    rope = getattr(config, "rope_parameters", None) or {}
    # Each kind of layer may have positions of its own. The older names are those of whole rows.
    full = rope.get("full_attention", rope) or {}
    if "rope_theta" not in full:
        return document
    base, part = "rope_theta", "partial_rotary_factor"
    if config.model_type.startswith("gpt_neox"):
        base, part = "rotary_emb_base", "rotary_pct"
    older: dict[str, Any] = {"rope_parameters": rope, base: full["rope_theta"]}
    # Only positions that are scaled have rope_scaling. Base and rotary fraction are apart from it.
    names = full.keys() - {"rope_theta", "partial_rotary_factor"}
    if names != {"rope_type"} or full["rope_type"] != "default":
        older["rope_scaling"] = {name: full[name] for name in sorted(names)}
    if "partial_rotary_factor" in full:
        older[part] = full["partial_rotary_factor"]
    # Gemma 3 calls the base of its layers with a window so.
    if "sliding_attention" in rope:
        older["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
    read = None
    # A family that no older version has may warn of these names, or raise whatever its class does.
    with suppress(Exception), warnings.catch_warnings(category=FutureWarning, action="ignore"):
        read = type(config).from_dict(deepcopy({**config.to_dict(), **older})).rope_parameters
    # Otherwise the older names would change what transformers 5 reads.
    return {**document, **older} if read == rope else document


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
