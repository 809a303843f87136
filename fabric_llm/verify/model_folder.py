"""A Hugging Face directory: written beside its place, opened with plain transformers, and given its name once it is proven."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from fabric_llm.base import files
from fabric_llm.base.ending import on_disk, uninterrupted
from fabric_llm.base.faults import UNEXPECTED, Fault, one_line
from fabric_llm.checkpoint.keep import remove
from fabric_llm.checkpoint.state_dicts import tied_names
from fabric_llm.model.loading import build_skeleton, load_config, set_generation_config, tokenizer_beside


class VerificationError(Fault):
    """The directory doesn't hold the model that it should. Ends a command with exit code 1."""

    def __init__(self, sentence: str) -> None:
        super().__init__(f"verification failed: {sentence}", UNEXPECTED)


@contextmanager
def replacing(output: Path, needed_bytes: int, what: str) -> Iterator[Path]:
    """The path of a temporary folder for the body to make, beside `output`, whose name it gets at the end.

    Where the body raises, nothing is left behind, and an older `output` is unchanged. what: is written, in words.
    Raises Fault where the disk has no room (74), or can't be written (73).
    """
    temporary = output.with_name(f".tmp-{output.name}")
    output.parent.mkdir(parents=True, exist_ok=True)
    files.room(output.parent, needed_bytes, what, "make room, or take an --output on another disk")
    if os.path.lexists(temporary):  # left by one that was killed, or a link, which must not be followed
        remove(temporary)
    try:
        with on_disk(output, temporary, f"the weights need {needed_bytes / 2**30:,.2f} GiB"):
            yield temporary
        with uninterrupted():
            if output.exists():
                shutil.rmtree(output)
            temporary.rename(output)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def bytes_of(model: PreTrainedModel) -> int:
    """What the parameters take on a disk."""
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def write_model(
    folder: Path,
    source: Path | str,
    config: PretrainedConfig,
    dtype: torch.dtype,
    weights: dict[str, Tensor],
    max_shard_size: str,
    named_as_stored: bool = False,
) -> None:
    """Write a Hugging Face directory, with the generation config and the tokenizer of `source`.

    weights: by their names in memory, or those that the files get (named_as_stored), which differ where transformers fuses experts.
    They are taken out of the dictionary as they are written.
    """
    # A skeleton saves the tensors, as in checkpoint/writing.py: a model that was loaded from a state dict would keep the names that
    # its tensors have in memory, and wouldn't use those of the hub.
    skeleton = build_skeleton(config, dtype)
    set_generation_config(skeleton, str(source))
    skeleton.save_pretrained(
        folder, state_dict=weights, max_shard_size=max_shard_size, save_original_format=not named_as_stored
    )
    tokenizer = tokenizer_beside(str(source))
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def opened(folder: Path, dtype: torch.dtype | str = "auto") -> PreTrainedModel:
    """The model in `folder` as plain transformers opens it.

    Raises VerificationError unless the files hold exactly the weights of the model of its config.json, tied as they are there.
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
    ties, wanted = tied_names(loaded), tied_names(build_skeleton(load_config(str(folder)), loaded.dtype))
    if ties != wanted:
        raise VerificationError(f"tied weights {sorted(wanted)} came out as {sorted(ties)}.")
    return loaded


@torch.no_grad()
def logits_of(model: PreTrainedModel, input_ids: Tensor) -> Tensor:
    """float32 [tokens, vocabulary]. input_ids: int64 [1, tokens]. Raises VerificationError where the model can't compute them."""
    try:
        return model.eval()(input_ids).logits[0].float()
    except (IndexError, RuntimeError) as error:
        raise VerificationError(f"it can't compute logits: {one_line(error)[:400]}.") from error
