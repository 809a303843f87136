"""Export a checkpoint to a Hugging Face directory, and verify the directory. Needs one process and no GPU."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from fabric_llm.base import files
from fabric_llm.base.ending import on_disk, uninterrupted
from fabric_llm.base.faults import NO_CHECKPOINT, Fault, one_line
from fabric_llm.checkpoint import keep, reading, state_dicts
from fabric_llm.checkpoint.keep import checkpoint_at as find  # noqa: F401
from fabric_llm.model.loading import (
    DTYPES,
    build_skeleton,
    checked_skeleton,
    load_config,
    load_reference,
    set_generation_config,
    tokenizer_beside,
)
from fabric_llm.plan.checks import exported_output

# The largest mean difference of logits that rounding explains, as a fraction of their standard deviation, by the coarser
# of the dtypes that the two sides compute in. On a CPU the same float32 weights give 0, and their bfloat16 export 4e-3 (toy
# Llama). The margin is for GPU kernels, which sum in another order. Logits of another model differ by about 1.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}


class VerificationError(RuntimeError):
    """The exported model isn't the model that was trained."""


@dataclass(frozen=True)
class Proof:
    """What `verify` has measured."""

    tensors: int
    parameters: int
    tied: int  # parameters that have a second name
    logits_difference: float  # mean absolute difference as a fraction of the logits' standard deviation
    tolerance: float
    same_next_token: float  # fraction of the probe's positions with the same most likely next token
    of_ema: bool = False  # the logits are compared with those of the average before it was written


def export(
    source: Path,
    output: Path,
    *,
    dtype: str = "auto",
    max_shard_size: str = "5GB",
    overwrite: bool = False,
    ema: bool = False,
) -> Proof:
    """Write `output` from the checkpoint `source` and verify it. ema: the moving average of the weights instead of them.

    Raises ValueError for a damaged checkpoint or an existing `output`, and VerificationError if the export isn't the model
    that was trained. Nothing is then left behind, and an older `output` is unchanged.
    """
    exported_output(output, overwrite)
    try:
        precision = reading.verified(source, hashes=True)["fixed"]["precision"]
        trained_dtype = DTYPES[precision]
    except (KeyError, TypeError) as error:
        raise Fault(f"{str(source)!r} is damaged: trainer/progress.json has no precision.", NO_CHECKPOINT) from error
    config = load_config(str(source))
    weights = reading.sharded_weights(source, checked_skeleton(str(source), config, trained_dtype))
    # Except for what transformers keeps in float32.
    wanted = trained_dtype if dtype == "auto" else getattr(torch, dtype)
    model = load_reference(str(source), config, wanted, seed=0, state_dict=weights)
    probe = reading.read_probe(source)
    if ema:
        reading.ema_into(source, model)
        probe["logits"] = _logits(model, probe)  # the recorded ones are those of the weights
    needed = sum(weight.numel() * weight.element_size() for weight in model.parameters())
    with replacing(output, needed, "The export") as temporary:
        with on_disk(output, temporary, f"the weights need {needed / 2**30:,.2f} GiB"):
            write_model(temporary, source, model, max_shard_size)
        return replace(verify(temporary, model, probe, precision), of_ema=ema)


@contextmanager
def replacing(output: Path, needed_bytes: int, what: str) -> Iterator[Path]:
    """The path of a temporary folder for the body to make, beside `output`, whose name it gets at the end.

    Where the body raises, nothing is left behind, and an older `output` is unchanged. what: is written, in words.
    Raises Fault (74) where the disk has no room.
    """
    temporary = output.with_name(f".tmp-{output.name}")
    output.parent.mkdir(parents=True, exist_ok=True)
    files.room(output.parent, needed_bytes, what, "make room, or take an --output on another disk")
    if os.path.lexists(temporary):  # left by one that was killed, or a link, which must not be followed
        keep.remove(temporary)
    try:
        yield temporary
        with uninterrupted():
            if output.exists():
                shutil.rmtree(output)
            temporary.rename(output)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_model(folder: Path, source: Path, model: PreTrainedModel, max_shard_size: str) -> None:
    """Write a model as a Hugging Face directory, with the generation config and the tokenizer of `source`."""
    # A new skeleton saves the tensors, as in checkpoint/writing.py: a model that was loaded from a state dict would keep the
    # names that its tensors have in memory, where experts are fused, and wouldn't use those of the hub.
    template = build_skeleton(model.config, model.dtype)
    set_generation_config(template, str(source))
    template.save_pretrained(folder, state_dict=model.state_dict(), max_shard_size=max_shard_size)
    tokenizer = tokenizer_beside(str(source))
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def verify(folder: Path, trained: PreTrainedModel, probe: dict[str, Tensor], precision: str) -> Proof:
    """Open `folder` with plain transformers, and compare it with the trained weights and the recorded logits.

    trained: the model with the checkpoint's weights, in the dtype of the export. Raises VerificationError.
    """
    loaded, ties = opened(folder, trained.dtype)
    there = dict(loaded.named_parameters())
    for name, parameter in trained.named_parameters():
        if not torch.equal(there[name], parameter):
            raise VerificationError(f"{name} isn't what the checkpoint holds.")
    try:
        logits = _logits(loaded, probe)
    except (IndexError, RuntimeError) as error:
        raise VerificationError(f"it can't compute the probe: {one_line(error)[:400]}.") from error
    recorded = probe["logits"]
    if logits.shape != recorded.shape:
        raise VerificationError(f"logits have shape {list(logits.shape)}, in training {list(recorded.shape)}.")
    difference = ((logits - recorded).abs().mean() / recorded.std()).item()
    computed_in = torch.bfloat16 if "bf16" in precision else torch.float16 if "16" in precision else torch.float32
    tolerance = max(TOLERANCE[computed_in], TOLERANCE[trained.dtype])
    if not difference <= tolerance:  # also where it is NaN
        raise VerificationError(
            f"logits differ from those in training by {difference:.2g} of their standard deviation, "
            f"more than rounding explains ({tolerance:g})."
        )
    return Proof(
        tensors=len(stored_names(folder)),
        parameters=sum(p.numel() for p in loaded.parameters()),
        tied=len(ties),
        logits_difference=difference,
        tolerance=tolerance,
        same_next_token=(logits.argmax(-1) == recorded.argmax(-1)).float().mean().item(),
    )


@torch.no_grad()
def _logits(model: PreTrainedModel, probe: dict[str, Tensor]) -> Tensor:
    """What plain transformers makes of a probe, float32 [positions, vocabulary]."""
    return model.eval()(probe["input_ids"]).logits[0, probe["positions"]].float()


def opened(folder: Path, dtype: torch.dtype) -> tuple[PreTrainedModel, set[str]]:
    """(the model in `folder` as plain transformers opens it, second names of its tied weights).

    Raises VerificationError unless it has exactly the parameters, shapes and ties of the model of its config.json.
    """
    try:
        loaded, info = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below
            trust_remote_code=False,
        )
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:
        raise VerificationError(f"transformers can't open the export: {one_line(error)[:400]}") from error
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info[kind]:
            raise VerificationError(f"{kind.replace('_', ' ')} in the export: {sorted(map(str, info[kind]))[:10]}.")
    skeleton = build_skeleton(load_config(str(folder)), dtype)
    expected = dict(state_dicts.shapes(skeleton))
    there = dict(state_dicts.shapes(loaded))
    if set(expected) != set(there):
        raise VerificationError(f"parameters differ from the model's: {sorted(set(expected) ^ set(there))[:10]}.")
    for name, shape in there.items():
        if shape != expected[name]:
            raise VerificationError(f"{name} has shape {list(shape)}, not {list(expected[name])}.")
    ties = state_dicts.tied_names(skeleton)
    if ties != state_dicts.tied_names(loaded):
        raise VerificationError(f"tied weights {sorted(ties)} came out as {sorted(state_dicts.tied_names(loaded))}.")
    return loaded, ties


def stored_names(folder: Path) -> set[str]:
    """Names of the tensors in the safetensors files of a Hugging Face directory."""
    names: set[str] = set()
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            names.update(opened.keys())
    return names


def push(folder: Path, repository: str, private: bool = True) -> str:
    """Upload a verified directory to the Hugging Face hub, and return its address. Can be repeated."""
    from huggingface_hub import HfApi

    api = HfApi()
    api.create_repo(repository, private=private, exist_ok=True)
    return str(api.upload_folder(folder_path=str(folder), repo_id=repository, commit_message="Upload by fabric_llm"))


def read_proof(proof: Proof) -> str:
    """Describe a proof in one line."""
    compared = "of the moving average before it was written" if proof.of_ema else "in training"
    return (
        f"Verified with plain transformers: {proof.tensors} tensors, {proof.parameters:,} parameters, {proof.tied} tied; "
        f"logits differ from those {compared} by {proof.logits_difference:.1e} of their standard deviation "
        f"(limit {proof.tolerance:g}), {proof.same_next_token:.0%} of next tokens the same."
    )
