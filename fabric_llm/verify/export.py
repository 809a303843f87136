"""Export a checkpoint to a Hugging Face directory, and verify the directory. Needs one process and no GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import huggingface_hub
import torch
from torch import Tensor
from transformers import PreTrainedModel

from fabric_llm.checkpoint import keep, reading
from fabric_llm.checkpoint.state_dicts import tied_names
from fabric_llm.checkpoint.tensors import Tensors
from fabric_llm.model.loading import DTYPES, checked_skeleton, load_config, load_reference
from fabric_llm.verify.model_folder import VerificationError, bytes_of, logits_of, opened, replacing, write_model

# The largest mean difference of logits that rounding explains, as a fraction of their standard deviation, by the coarser
# of the dtypes that the two sides compute in. On a CPU the same float32 weights give 0, and their bfloat16 export 4e-3 (toy
# Llama). The margin is for GPU kernels, which sum in another order. Logits of another model differ by about 1.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}


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


def export(source: Path, output: Path, *, dtype: str = "auto", max_shard_size: str = "5GB", ema: bool = False) -> Proof:
    """Write `output` from the checkpoint `source` and verify it. ema: the moving average of the weights instead of them.

    Raises Fault for a damaged checkpoint, and VerificationError if the export isn't the model that was trained. Nothing is then
    left behind, and an older `output` is unchanged. Otherwise it is replaced: whether it may be is for the caller to check.
    """
    precision = keep.verified(source, hashes=True)["fixed"]["precision"]
    config = load_config(str(source))
    weights = reading.sharded_weights(source, checked_skeleton(str(source), config, DTYPES[precision]))
    # Except for what transformers keeps in float32.
    wanted = DTYPES[precision] if dtype == "auto" else getattr(torch, dtype)
    model = load_reference(str(source), config, wanted, seed=0, state_dict=weights)
    probe = reading.read_probe(source)
    if ema:
        reading.ema_into(source, model)
        probe["logits"] = logits_of(model, probe["input_ids"])[probe["positions"]]  # recorded are those of the weights
    with replacing(output, bytes_of(model), "The export") as temporary:
        write_model(temporary, source, model.config, model.dtype, model.state_dict(), max_shard_size)
        return replace(verify(temporary, model, probe, precision), of_ema=ema)


def verify(folder: Path, trained: PreTrainedModel, probe: dict[str, Tensor], precision: str) -> Proof:
    """Open `folder` with plain transformers, and compare it with the trained weights and the recorded logits.

    trained: the model with the checkpoint's weights, in the dtype of the export. Raises VerificationError.
    """
    loaded = opened(folder, trained.dtype)
    there = dict(loaded.named_parameters())
    for name, parameter in trained.named_parameters():
        if not torch.equal(there[name], parameter):
            raise VerificationError(f"{name} isn't what the checkpoint holds.")
    logits, recorded = logits_of(loaded, probe["input_ids"])[probe["positions"]], probe["logits"]
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
        tensors=len(Tensors(folder.glob("*.safetensors"))),
        parameters=sum(p.numel() for p in loaded.parameters()),
        tied=len(tied_names(loaded)),
        logits_difference=difference,
        tolerance=tolerance,
        same_next_token=(logits.argmax(-1) == recorded.argmax(-1)).float().mean().item(),
    )


def push(folder: Path, repository: str, private: bool = True) -> str:
    """Upload a verified directory to the Hugging Face hub, and return its address. Can be repeated."""
    api = huggingface_hub.HfApi()
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
