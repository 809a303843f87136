"""The parts of an average: which directories they are, and that they are whole and of one model."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from fabric_llm.base import files, plain_yaml, step_names
from fabric_llm.base.faults import NO_CHECKPOINT, Fault
from fabric_llm.base.files import MANIFEST
from fabric_llm.base.names import nearest_of

if TYPE_CHECKING:  # mistakes in names are told before torch is imported
    import torch
    from torch import Tensor

# Of a configuration: what doesn't decide what the weights mean.
NO_MATTER = re.compile(
    r"^_|dtype$|_version$|_token_id$|drop|^use_cache$|^output_|^return_|^architectures$|2id$|^id2|^init"
)


# ----------------------------------------------------------------------------- names


def named(given: Sequence[str], last: Optional[int]) -> list[Path]:
    """The directories that are averaged, in the order given, and those of a run by step. Raises ValueError."""
    if last is not None and last < 1:
        raise ValueError(f"--last must be positive, not {last}.")
    folders, runs = [], 0
    for name in given:
        path = Path(name)
        if not path.is_dir():
            raise ValueError(f"No checkpoint, run or model at {name!r}.{nearest_of(path) or _of_hub(name)}")
        if (path / MANIFEST).is_file() or (path / "config.json").is_file():
            folders.append(path)
            continue
        there = step_names.checkpoints(path)
        if not there:
            raise ValueError(f"{name!r} is neither a checkpoint nor a run with one, nor a model with a config.json.")
        if last is not None and last > len(there):
            raise ValueError(f"--last {last}: {name!r} has {len(there)} checkpoint{'s' * (len(there) > 1)}.")
        folders, runs = [*folders, *there[-(last or 1) :]], runs + 1
    if last is not None and not runs:
        raise ValueError(f"--last {last} counts the checkpoints of a run, and {given[0]!r} is none.")
    for run in dict.fromkeys(folder.resolve().parent for folder in folders):
        try:
            plain_yaml.read(run / "arguments.yaml")
        except plain_yaml.NotPlain as error:
            raise ValueError(f"{error}.") from error
        except (OSError, ValueError):
            continue  # there is none, or evaluating.py says what is wrong with it
    return folders


def _of_hub(name: str) -> str:
    """What to give for what may be a name on the hub, as the end of a sentence."""
    is_name = re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not Path(name).parent.exists()
    return " A model of the hub is given by the folder that it was downloaded to." if is_name else ""


def require_apart(folders: Sequence[Path], output: Path) -> None:
    """Raises ValueError where a directory comes twice, or would be overwritten."""
    seen = set()
    for folder in folders:
        place = folder.resolve()
        if place in seen:
            raise ValueError(f"{str(folder)!r} is given twice; what counts more gets a larger number in --weights.")
        if place == output.resolve():
            raise ValueError(f"--output {str(output)!r} is one of the parts; take another.")
        seen.add(place)


# ----------------------------------------------------------------------------- content


@dataclass(frozen=True)
class Part:
    """A model on disk that passed all checks, for sums that take one tensor at a time."""

    path: Path
    config: Any
    tokenizer: Optional[Any]
    dtype: torch.dtype  # of its weights, but for what transformers keeps in float32
    progress: Optional[dict[str, Any]]  # progress.json of a checkpoint
    sha256: str  # of a checkpoint's manifest, else of all its weight files together
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


def opened(folders: Sequence[Path]) -> list[Part]:
    """The parts, once they are verified and of one model. Raises Fault: 66 damaged, 77 refused, 2 of different models."""
    found = [_opened(folder) for folder in folders]
    _require_one_model(found)
    return found


def _opened(folder: Path) -> Part:
    from fabric_llm.average.tensors import Layout, of_files, of_parts, weight_files
    from fabric_llm.checkpoint import reading
    from fabric_llm.model.folders import check_model_folder
    from fabric_llm.model.loading import DTYPES, checked_skeleton, load_config, tokenizer_beside

    progress = None
    if (folder / MANIFEST).is_file():
        progress = reading.verified(folder, hashes=True)
        sha256 = files.sha256(folder / MANIFEST)
    elif (folder / "trainer" / "progress.json").is_file():
        raise Fault(f"{str(folder)!r} isn't a checkpoint: it has no {MANIFEST}.", NO_CHECKPOINT)
    else:
        check_model_folder(str(folder), "The part")
        sha256 = _of_all(weight_files(folder))
    config = load_config(str(folder))
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(f"{str(folder)!r} is quantized, and quantized weights can't be averaged.")
    skeleton = checked_skeleton(str(folder), config, _dtype(folder, config, progress, DTYPES))
    read = (of_parts if (folder / "weights").is_dir() else of_files)(folder, Layout(skeleton))
    return Part(folder, config, tokenizer_beside(str(folder)), skeleton.dtype, progress, sha256, read)


def _dtype(folder: Path, config: Any, progress: Optional[dict[str, Any]], of_precision: Mapping[str, Any]) -> Any:
    import torch

    if progress is None:
        return getattr(torch, str(getattr(config, "dtype", None) or "float32").removeprefix("torch."))
    try:
        return of_precision[progress["fixed"]["precision"]]
    except (KeyError, TypeError) as error:
        raise Fault(f"{str(folder)!r} is damaged: trainer/progress.json has no precision.", NO_CHECKPOINT) from error


def _of_all(paths: Sequence[Path]) -> str:
    """One hash of several files."""
    import hashlib

    return hashlib.sha256("".join(f"{path.name} {files.sha256(path)}\n" for path in paths).encode()).hexdigest()


# ----------------------------------------------------------------------------- one model


def _require_one_model(found: Sequence[Part]) -> None:
    """Raises ValueError where the parts have other configurations or vocabularies: their average would be no model."""
    first = found[0]
    for other in found[1:]:
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
