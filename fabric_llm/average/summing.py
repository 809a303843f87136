"""The average: summed in float64 tensor by tensor, written to a Hugging Face directory, and verified there."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from fabric_llm.average.parts import Part
from fabric_llm.average.tensors import Layout
from fabric_llm.base.ending import on_disk
from fabric_llm.base.faults import NON_FINITE, Fault, one_line
from fabric_llm.checkpoint import reading
from fabric_llm.checkpoint.writing import versions
from fabric_llm.model.loading import build_skeleton, set_generation_config
from fabric_llm.verify.export import VerificationError, opened, replacing

BLOCK_ELEMENTS = 2**22  # of a tensor in float64 at a time: 32 MiB
PROBE_TOKENS = 64  # where no part has a probe
NOTE = "average.json"


def show(parts: Sequence[Part], weights: Sequence[float], output: Path) -> None:
    """Say what is averaged."""
    print(f"Averaging {len(parts)} model{'s' * (len(parts) > 1)} into {output}", flush=True)
    for part, weight in zip(parts, weights):
        print(f"  {weight:.4f}  {part.path}", flush=True)
    if len(parts) == 1:
        print("  The average of one model is that model.", flush=True)


def average(
    parts: Sequence[Part], weights: Sequence[float], how: str, output: Path, dtype: str, max_shard_size: str
) -> str:
    """Write `output`, verify it, and return what was verified, in words.

    weights: one for each part; they add up to 1. how: they were given, for the note. dtype: auto or a name of torch's.
    Raises Fault (76) for NaN in a part, and VerificationError. Nothing is then left behind.
    """
    promoted = reduce(torch.promote_types, (part.dtype for part in parts))
    newest = parts[-1]  # of a run; its generation config and tokenizer are taken
    template = build_skeleton(newest.config, promoted if dtype == "auto" else getattr(torch, dtype))
    set_generation_config(template, str(newest.path))
    layout = Layout(template)
    needed = sum(tensor.numel() * tensor.element_size() for tensor in layout.stored.values())
    with replacing(output, needed, "The average") as temporary:
        with on_disk(output, temporary, f"the weights need {needed / 2**30:,.2f} GiB"):
            temporary.mkdir()
            _write_weights(temporary, layout, parts, weights, max_shard_size)
            _write_rest(temporary, template, newest)
            write_note(temporary, note_of(parts, weights, how, template.dtype))
        _verify(temporary, layout, parts, weights)
    parameters = sum(parameter.numel() for parameter in template.parameters())
    return (
        f"Verified with plain transformers: {len(layout.stored)} tensors, {parameters:,} parameters, each the float64 "
        f"average rounded to {str(template.dtype).removeprefix('torch.')}; logits are finite."
    )


def averaged(name: str, like: Tensor, parts: Sequence[Part], weights: Sequence[float]) -> Tensor:
    """The sum of weight x tensor over the parts, float64, rounded to the dtype of `like`, whose shape it has.

    What isn't floating point is taken as it is. Raises ValueError where it differs between parts, Fault (76) for NaN or
    infinity, in a part or because float16 is too narrow.
    """
    if not like.is_floating_point():
        return _equal(name, parts)
    total = torch.empty(like.numel(), dtype=torch.float64)
    used = [(part, weight) for part, weight in zip(parts, weights) if weight > 0]
    for number, (part, weight) in enumerate(used):
        flat = part.read(name).reshape(-1)
        for start in range(0, flat.numel(), BLOCK_ELEMENTS):
            block = slice(start, start + BLOCK_ELEMENTS)
            term = flat[block].double()
            if not torch.isfinite(term).all():
                raise Fault(f"{str(part.path)!r} holds NaN or infinity in {name}.", NON_FINITE)
            term.mul_(weight)
            if number == 0:  # not added to zeros: the sign of -0.0 stays
                total[block] = term
            else:
                total[block].add_(term)
    rounded = total.to(like.dtype).view(like.shape)
    if not torch.isfinite(rounded).all():
        raise Fault(f"{name} has numbers that {like.dtype} can't hold: take another --dtype.", NON_FINITE)
    return rounded


def _equal(name: str, parts: Sequence[Part]) -> Tensor:
    first = parts[0].read(name)
    for part in parts[1:]:
        if not torch.equal(first, part.read(name)):
            both = f"{str(parts[0].path)!r} and {str(part.path)!r}"
            raise ValueError(f"{both} differ in {name}, which holds {first.dtype} and can't be averaged.")
    return first


def _write_weights(
    folder: Path, layout: Layout, parts: Sequence[Part], weights: Sequence[float], max_shard_size: str
) -> None:
    """One file after the other, so that memory holds no more than one file and one tensor."""
    split = split_torch_state_dict_into_shards(layout.stored, max_shard_size=max_shard_size)
    for file, names in split.filename_to_tensors.items():
        tensors = {name: averaged(name, layout.stored[name], parts, weights) for name in names}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        del tensors
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _write_rest(folder: Path, template: PreTrainedModel, source: Part) -> None:
    """As `save_pretrained` writes what isn't weights."""
    template.config.dtype = str(template.dtype).removeprefix("torch.")
    template.config.architectures = [type(template).__name__]
    template.config.save_pretrained(folder)
    if template.can_generate():
        template.generation_config.save_pretrained(folder)
    if source.tokenizer is not None:
        source.tokenizer.save_pretrained(folder)


def note_of(parts: Sequence[Part], weights: Sequence[float], how: str, dtype: torch.dtype) -> dict[str, Any]:
    """What the average is made of, for NOTE. The hash of a checkpoint is that of its manifest, which has those of all files."""
    return {
        "what": "weighted average of models, summed in float64",
        "weights": how,
        "dtype": str(dtype).removeprefix("torch."),
        "parts": [
            {
                "path": str(part.path),
                "weight": weight,
                "step": None if part.progress is None else part.progress["progress"]["step"],
                "dtype": str(part.dtype).removeprefix("torch."),
                "sha256_of": "manifest" if part.progress is not None else "weights",
                "sha256": part.sha256,
            }
            for part, weight in zip(parts, weights)
        ],
        "versions": versions(),
    }


def write_note(folder: Path, note: dict[str, Any]) -> None:
    (folder / NOTE).write_text(json.dumps(note, indent=2) + "\n")


def _verify(folder: Path, layout: Layout, parts: Sequence[Part], weights: Sequence[float]) -> None:
    """Raises VerificationError unless plain transformers finds every average in `folder`, and finite logits."""
    loaded, _ = opened(folder, layout.template.dtype)
    seen = set()
    for name, tensor in layout.convert(loaded.state_dict()):
        seen.add(name)
        if not torch.equal(tensor, averaged(name, layout.stored[name], parts, weights)):
            raise VerificationError(f"{name} isn't the average of the parts.")
    if missing := sorted(layout.stored.keys() - seen):
        raise VerificationError(f"the export lacks {', '.join(missing[:10])}.")
    try:
        with torch.no_grad():
            logits = loaded.eval()(_probe(parts, loaded)).logits
    except (IndexError, RuntimeError) as error:
        raise VerificationError(f"it can't compute logits: {one_line(error)[:400]}.") from error
    if not torch.isfinite(logits).all():
        raise VerificationError("it gives NaN or infinity.")


def _probe(parts: Sequence[Part], model: PreTrainedModel) -> Tensor:
    """Tokens to compute logits of, int64 [1, tokens]: those that a checkpoint was probed with."""
    source = next((part for part in reversed(parts) if part.progress is not None), None)
    if source is not None:
        return reading.read_probe(source.path)["input_ids"]
    return torch.arange(PROBE_TOKENS)[None] % model.config.get_text_config().vocab_size
