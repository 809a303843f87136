"""What the names of the files in a model folder say. Nothing here imports torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fabric_llm.base import step_names
from fabric_llm.base.faults import REFUSED, Fault
from fabric_llm.base.files import check_name, weight_map
from fabric_llm.base.names import hub_name
from fabric_llm.model import bounds

WEIGHT_FILES = ("model.safetensors", "model.safetensors.index.json")
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")


def check_model_folder(name: str, flag: str = "--model_name") -> None:
    """A model's folder, or what may be a name on the hub. Raises ValueError, Fault (77) for code."""
    folder = Path(name)
    if not folder.is_dir():
        return hub_name(flag, name)
    adapter = folder / "adapter_config.json"
    if adapter.is_file():  # names a base model, which peft would fetch
        raise ValueError(f"{name!r} holds an adapter{_base_of(adapter)}: merge it into its model first.")
    if not (folder / "config.json").is_file():
        raise ValueError(f"{name!r} isn't a model directory: it has no config.json.{_instead(folder, flag)}")
    _check_declared(folder / "config.json")
    pickled = sorted(path.name for path in folder.iterdir() if path.name.endswith(PICKLES))
    if pickled and not any((folder / name).is_file() for name in WEIGHT_FILES):
        raise Fault(
            f"{str(folder / pickled[0])!r} is a pickle, which can run code when opened, and there are no safetensors "
            "beside it: refused.",
            REFUSED,
        )
    for index in folder.glob("*.index.json"):
        for file in sorted(set(weight_map(index).values())):
            if index.name in WEIGHT_FILES:
                weights_name(file, index)


def _check_declared(config: Path) -> None:
    """Raises ValueError where a config.json declares too much of something."""
    try:
        bounds.check_file(config)
        bounds.check_document(json.loads(config.read_bytes()))
    except bounds.TooMuch as error:
        raise ValueError(f"The configuration of {str(config.parent)!r} can't be read: {error}.") from error
    except (OSError, ValueError, RecursionError):
        return  # loading.py says so


def weights_name(name: Any, where: Path) -> None:
    """Raises Fault (77) unless `name`, read from the file `where`, is a safetensors file, or their index, beside it."""
    check_name(str(name), where)
    if not str(name).endswith((".safetensors", ".safetensors.index.json")):
        raise Fault(f"{str(where)!r} names the weights {name!r}, which aren't safetensors: refused.", REFUSED)


def _base_of(adapter: Path) -> str:
    try:
        base = json.loads(adapter.read_bytes()).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError, RecursionError):
        base = None
    return f" for {base[:200]!r}" if isinstance(base, str) and base.isprintable() else ""


def _instead(folder: Path, flag: str) -> str:
    """What a folder without a config.json is, and what to name in its place."""
    if (newest := step_names.latest(folder)) is not None:
        return f" It is a run: take its newest checkpoint, {flag} {newest}."
    if (folder / "arguments.yaml").is_file():
        return " It is a run without a complete checkpoint."
    if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
        return f" It is a dataset: that goes to --train_data_dir, and a model to {flag}."
    inside = sorted(path.parent for path in folder.glob("*/config.json"))[:3]
    snapshots = sorted(path.parent for path in folder.glob("snapshots/*/config.json"))  # the hub's cache
    if inside or snapshots:
        return f" There is one in {', '.join(repr(str(path)) for path in inside or snapshots)}."
    runs = sorted(path for path in folder.glob("*/step-*") if step_names.latest(path.parent) == path)
    if runs:
        return f" It is a folder of runs: take a checkpoint, such as {flag} {runs[0]}."
    if any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        return " It holds a tokenizer alone."
    if any(folder.glob("*.gguf")):
        return " It holds GGUF files, which are for inference: take the model that they were made from."
    if (folder / "params.json").is_file():
        return " It holds Meta's own format: take the folder, or the name on the hub, in Hugging Face's."
    return ""
