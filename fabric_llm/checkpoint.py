"""Save, load, latest, prune.

    checkpoints/RUN/step-00000100/
        MANIFEST.json            bytes and sha256 of every other file, written last
        config.json, model.safetensors, tokenizer...   state_dict_type full: opens with from_pretrained
        weights/                 state_dict_type sharded: each rank's part of the weights
        trainer/progress.json    step, position and what must be the same on resume
        trainer/optimizer/       optimizer state, each rank's part
        trainer/probe.safetensors  logits of the model in training on a fixed batch, for export_hf.py

Everything is JSON or safetensors: reading it runs no code. Parts are written by torch.distributed.checkpoint with
the offsets of each part in its file, so that any number of ranks, and one process without any, can read them.
A checkpoint is written into `.tmp-*` beside its place and renamed when it is complete and on disk.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Optional

import torch
import torch.distributed.checkpoint as dcp
from lightning.fabric import Fabric
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from transformers import PreTrainedModel

from fabric_llm.strategy import reshard

MANIFEST = "MANIFEST.json"
PREFIX = "causal_lm."  # of parameter names in model.LanguageModel


@dataclass(frozen=True)
class Progress:
    """Where a run is. All that a resumed run needs besides weights and optimizer state."""

    step: int = 0  # finished optimizer steps
    position: int = 0  # sequences consumed by all ranks together
    tokens: int = 0  # tokens of those sequences

    def advance(self, sequences: int, context_length: int) -> Progress:
        """One step further."""
        return replace(
            self,
            step=self.step + 1,
            position=self.position + sequences,
            tokens=self.tokens + sequences * context_length,
        )


def step_directory(run_directory: Path, step: int) -> Path:
    """checkpoints/RUN/step-00000100"""
    return run_directory / f"step-{step:08d}"


# ------------------------------------------------------------------------------- save


def save(
    target: Path,
    fabric: Fabric,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    template: PreTrainedModel,
    tokenizer: Optional[Any],
    progress: Progress,
    facts: dict[str, Any],
    probe: dict[str, Tensor],
    state_dict_type: str,
) -> None:
    """Write the checkpoint `target` (step-N). All ranks call it.

    model: the wrapped model without Fabric's own wrapper. template: the unwrapped model on the meta device, for its
    config and names. facts: what a resumed run must have in common with this one. probe: see `record_probe`.
    Raises FileExistsError if `target` exists: nothing is ever overwritten.
    """
    if target.exists():
        raise FileExistsError(f"{target} exists already.")
    reshard(model)
    temporary = Path(fabric.broadcast(str(target.with_name(f".tmp-{target.name}-{secrets.token_hex(4)}"))))
    rank_zero = fabric.global_rank == 0
    if rank_zero:
        (temporary / "trainer").mkdir(parents=True)
    fabric.barrier()
    if state_dict_type == "full":
        weights = _full_weights(model, offload=fabric.device.type != "cpu")
        if rank_zero:
            template.save_pretrained(temporary, state_dict=weights, max_shard_size="5GB")
    else:
        again = tied_names(template)
        with _quiet():
            weights = {k: v for k, v in get_model_state_dict(model).items() if k.removeprefix(PREFIX) not in again}
        _save_parts(weights, temporary / "weights")
        if rank_zero:
            template.config.save_pretrained(temporary)
            if template.generation_config is not None:
                template.generation_config.save_pretrained(temporary)
    _save_parts(_optimizer_tensors(model, optimizer)[1], temporary / "trainer" / "optimizer")
    if rank_zero:
        if tokenizer is not None:
            tokenizer.save_pretrained(temporary)
        save_file(probe, temporary / "trainer" / "probe.safetensors")
        document = {"progress": asdict(progress), "state_dict_type": state_dict_type, **facts}
        (temporary / "trainer" / "progress.json").write_text(json.dumps(document, indent=2) + "\n")
    fabric.barrier()  # all parts are written
    if rank_zero:
        publish(temporary, target)
    fabric.barrier()


def tied_names(model: nn.Module) -> set[str]:
    """Second names of parameters that have two, such as lm_head.weight where it is the embedding."""
    once = {name for name, _ in model.named_parameters()}
    return {name for name, _ in model.named_parameters(remove_duplicate=False)} - once


def _full_weights(model: nn.Module, offload: bool) -> dict[str, Tensor]:
    """HF name -> whole tensor, on rank 0 (on a CPU on all ranks: offload_to_cpu crashes there)."""
    with _quiet():
        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=offload))
    return {name.removeprefix(PREFIX): tensor for name, tensor in state.items()}


def _optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], dict[str, Any]]:
    """The optimizer's flat state dict, and its tensors: `state.NAME.exp_avg` and the like.

    What isn't a tensor (learning rate, betas) comes from the arguments of the run, not from a checkpoint.
    """
    optimizer = getattr(optimizer, "optimizer", optimizer)  # without Fabric's wrapper
    flat = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    return flat, {key: value for key, value in flat.items() if key.startswith("state.")}


def _save_parts(tensors: dict[str, Any], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    writer = HuggingFaceStorageWriter(path=str(folder), save_distributed=True)
    with _quiet():
        dcp.save(tensors, storage_writer=writer)


def record_probe(model: nn.Module, input_ids: Tensor, device: torch.device) -> dict[str, Tensor]:
    """What the model in training makes of a fixed batch, for export_hf.py to compare with.

    input_ids: int64 [1, context]. Returns input_ids, positions int64 [up to 16] and logits float32
    [positions, vocabulary]. All ranks call it.
    """
    positions = torch.linspace(0, input_ids.shape[1] - 1, min(16, input_ids.shape[1])).long()
    model.eval()
    with torch.no_grad():
        logits = model(input_ids.to(device))
    model.train()
    return {"input_ids": input_ids, "positions": positions, "logits": logits[0, positions].float().cpu().contiguous()}


def publish(temporary: Path, target: Path) -> None:
    """Make a complete directory durable, then give it its name: the one commit point."""
    files = sorted(path for path in temporary.rglob("*") if path.is_file())
    manifest = {
        "files": {str(f.relative_to(temporary)): {"bytes": f.stat().st_size, "sha256": sha256(f)} for f in files}
    }
    (temporary / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    for path in [*files, temporary / MANIFEST, *(d for d in temporary.rglob("*") if d.is_dir()), temporary]:
        _fsync(path)
    temporary.rename(target)
    _fsync(target.parent)


def sha256(path: Path) -> str:
    """Hash of a file's content, hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def prune(run_directory: Path, keep_last: int) -> None:
    """Remove all but the newest `keep_last` checkpoints; renamed first, so that a kill leaves none half there."""
    for path in checkpoints(run_directory)[:-keep_last]:
        trash = path.with_name(f".trash-{path.name}-{secrets.token_hex(4)}")
        path.rename(trash)
        shutil.rmtree(trash)


def sweep(run_directory: Path) -> list[str]:
    """Remove what a killed save or prune left, and return its names."""
    leftovers = [p for p in run_directory.glob(".t*") if re.match(r"\.(tmp|trash)-step-", p.name)]
    for path in leftovers:
        shutil.rmtree(path)
    return [path.name for path in leftovers]


def move_aside(run_directory: Path, after_step: int) -> list[str]:
    """Rename the checkpoints of later steps, whole or not, which a run that resumes at `after_step` will write anew."""
    names = []
    for path in step_directories(run_directory):
        if int(path.name.removeprefix("step-")) > after_step:
            names.append(path.rename(path.with_name(f"aside-{path.name}-{secrets.token_hex(4)}")).name)
    return names


# ------------------------------------------------------------------------------- find


def step_directories(run_directory: Path) -> list[Path]:
    """Everything that bears a checkpoint's name, oldest first."""
    found = [p for p in run_directory.glob("step-*") if re.fullmatch(r"step-\d{8,}", p.name) and p.is_dir()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def checkpoints(run_directory: Path) -> list[Path]:
    """Complete checkpoints of a run, oldest first."""
    return [path for path in step_directories(run_directory) if (path / MANIFEST).is_file()]


def latest(run_directory: Path) -> Optional[Path]:
    """The newest complete checkpoint of a run, None if there is none."""
    return next(reversed(checkpoints(run_directory)), None)


def newest_valid(run_directory: Path, hashes: bool) -> tuple[Optional[Path], list[str]]:
    """(the newest checkpoint of a run that passes `check`, what is wrong with those that are newer)."""
    problems = []
    for path in reversed(checkpoints(run_directory)):
        try:
            check(path, hashes)
            return path, problems
        except ValueError as error:
            problems.append(str(error))
    return None, problems


def check(path: Path, hashes: bool = False) -> dict[str, Any]:
    """A checkpoint's progress.json, once its files are there with the right sizes (and hashes).

    Raises ValueError that names the first file that isn't.
    """
    if not (path / MANIFEST).is_file():
        raise ValueError(f"{str(path)!r} isn't a checkpoint: it has no {MANIFEST}.")
    try:
        entries = json.loads((path / MANIFEST).read_bytes())["files"].items()
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"Checkpoint {str(path)!r} is damaged: {MANIFEST} can't be read.") from error
    for name, entry in entries:
        file = path / name
        if not file.is_file():
            raise ValueError(f"Checkpoint {str(path)!r} is damaged: {name} is missing.")
        if file.stat().st_size != entry["bytes"]:
            raise ValueError(
                f"Checkpoint {str(path)!r} is damaged: {name} has {file.stat().st_size} bytes, not {entry['bytes']}."
            )
        if hashes and sha256(file) != entry["sha256"]:
            raise ValueError(f"Checkpoint {str(path)!r} is damaged: the content of {name} has changed.")
    return json.loads((path / "trainer" / "progress.json").read_text())


# ------------------------------------------------------------------------------- load


def load_optimizer(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Fill the optimizer of a wrapped model from a checkpoint, whatever ranks and strategy wrote it. All ranks call it."""
    optimizer = getattr(optimizer, "optimizer", optimizer)
    flat, tensors = _optimizer_tensors(model, optimizer)
    _load_parts(tensors, path / "trainer" / "optimizer")
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    set_optimizer_state_dict(model, optimizer, {**flat, **tensors}, options=options)


def _load_parts(tensors: dict[str, Any], folder: Path) -> None:
    with _quiet():
        dcp.load(tensors, storage_reader=HuggingFaceStorageReader(path=str(folder)))


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's warnings of what is meant: one device has no process group, NO_SHARD holds everything."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        warnings.filterwarnings("ignore", message="When using ``NO_SHARD``")
        yield


def sharded_weights(path: Path) -> Optional[dict[str, Tensor]]:
    """The whole weights of a sharded checkpoint by HF name, on the CPU; None if `path` isn't one. One process."""
    folder = path / "weights"
    if not folder.is_dir():
        return None
    metadata = HuggingFaceStorageReader(path=str(folder)).read_metadata().state_dict_metadata
    weights = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in metadata.items()}
    with _quiet():
        dcp.load(weights, storage_reader=HuggingFaceStorageReader(path=str(folder)), no_dist=True)
    return {name.removeprefix(PREFIX): tensor for name, tensor in weights.items()}


def read_probe(path: Path) -> dict[str, Tensor]:
    """The recorded probe of a checkpoint, see `record_probe`."""
    with safe_open(path / "trainer" / "probe.safetensors", framework="pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}


def shapes(model: nn.Module) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name, shape) of every parameter."""
    return ((name, tuple(parameter.shape)) for name, parameter in model.named_parameters())
