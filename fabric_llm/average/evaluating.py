"""The validation loss of each part and of their average, on the data that their run was evaluated on. One process."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, Optional

import torch
from transformers import PreTrainedModel

from fabric_llm.average.parts import Part
from fabric_llm.average.summing import NOTE
from fabric_llm.base import plain_yaml
from fabric_llm.base.fabric import Fabric
from fabric_llm.base.faults import one_line
from fabric_llm.base.files import write_atomically
from fabric_llm.checkpoint import reading
from fabric_llm.data import mixture_text
from fabric_llm.data.batches import Batches
from fabric_llm.data.dataset import TokenDataset, together
from fabric_llm.data.sources import open_source
from fabric_llm.model import fast_paths, packed_attention
from fabric_llm.model.language_model import LanguageModel
from fabric_llm.model.loading import (
    checked_skeleton,
    load_config,
    load_reference,
    resolve_attention,
)
from fabric_llm.model.strategy import make_fabric
from fabric_llm.plan import mixing
from fabric_llm.plan.measuring import ONE_SET, document_ends, open_eval_data
from fabric_llm.plan.plan import find_document_end
from fabric_llm.run.build import evaluation_batches
from fabric_llm.training.evaluation import evaluate as evaluated

Losses = dict[str, float]  # of each validation set, nats


class Evaluated(NamedTuple):
    """How a run was evaluated."""

    run: Path
    precision: str
    sets: dict[str, Any]  # validation splits by name
    flags: Any  # with the groups that `evaluation_batches` reads
    document_ends: dict[str, Optional[int]]  # of the sets


def evaluate(parts: Sequence[Part], weights: Sequence[float], output: Path) -> Optional[Part]:
    """Print a table of losses, and write them into the note beside the average, or say in a line why there are none.

    Where a part is no worse on any set and better on one, say so, and return the best of those.
    """
    try:
        how = as_in_run(parts)
    except (OSError, ValueError, KeyError, TypeError) as error:
        print(f"Not evaluated: {one_line(error)}", flush=True)
        return None
    fabric = make_fabric(
        "single",
        devices=1,
        num_nodes=1,
        kind="cuda" if torch.cuda.is_available() else "cpu",
        precision=how.precision,
    )
    evaluation = how.flags.evaluation
    width = max(len("average"), *(len(part.name) for part in parts))
    print(
        f"Validation loss, up to {evaluation.eval_iters} batches of {evaluation.eval_batch_size}, as in {how.run}:\n"
        f"{'':<{width}}  weight" + "".join(f"{name:>{max(12, len(name) + 2)}}" for name in how.sets),
        flush=True,
    )
    found: list[Losses] = []
    for part, weight in zip(parts, weights):
        found.append(losses_of(fabric, part.path, part.dtype, how))
        print(_line(f"{part.name:<{width}}", f"{weight:.4f}", found[-1]), flush=True)
    dtype = getattr(torch, str(load_config(str(output)).dtype).removeprefix("torch."))
    average = losses_of(fabric, output, dtype, how)
    print(_line(f"{'average':<{width}}", "", average), flush=True)
    _note(output / NOTE, how, found, average)
    return _better(parts, found, average)


def _better(parts: Sequence[Part], found: Sequence[Losses], average: Losses) -> Optional[Part]:
    """Say on which sets a part has less than the average, to the digits of the table. The best part with less throughout."""
    average = _rounded(average)
    found = [_rounded(losses) for losses in found]
    worse = []
    for name, loss in average.items():
        least, best = min((losses[name], part.name) for losses, part in zip(found, parts))
        if least < loss:
            worse.append(f"than {best} on {name} ({loss:.4f}, and {least:.4f})")
    if not worse:
        return None
    print(f"The average is worse {', '.join(worse)}.", flush=True)
    better = [
        number
        for number, losses in enumerate(found)
        if losses != average and all(losses[name] <= average[name] for name in average)
    ]
    return parts[min(better, key=lambda number: sum(found[number].values()))] if better else None


def _rounded(losses: Losses) -> Losses:
    return {name: round(loss, 4) for name, loss in losses.items()}


def as_in_run(parts: Sequence[Part]) -> Evaluated:
    """How the run of the newest checkpoint was evaluated. Raises ValueError where that can't be repeated, OSError."""
    newest = next((part for part in reversed(parts) if part.run is not None), None)
    if newest is None:
        raise ValueError("none of the parts is a checkpoint, whose run would say on which data.")
    file = newest.run / "arguments.yaml"
    if not file.is_file():
        raise ValueError(f"{str(newest.run)!r} has no {file.name}, which would say on which data.")
    flat = plain_yaml.read(file)
    if flat["eval_iters"] == 0:
        raise ValueError(f"{str(newest.run)!r} was not, by --eval_iters 0.")
    flags = SimpleNamespace(
        data=SimpleNamespace(**{name: flat.get(name) for name in ("train_data_dir", "data_mix", "document_masking")}),
        training=SimpleNamespace(seed=flat["seed"]),
        evaluation=SimpleNamespace(**{name: flat.get(name) for name in ("eval_iters", "eval_batch_size", "eval_data")}),
    )
    dataset, sets, eval_data = validation_sets(flags)
    masks = bool(newest.progress["schedule"]["document_masking"])
    precision = flat["precision"]
    if precision == "16-mixed" and not torch.cuda.is_available():
        precision = "32-true"  # float16 is for GPUs
    ends = document_ends(sets, eval_data, find_document_end(masks, dataset, newest.config))
    return Evaluated(newest.run, precision, sets, flags, ends)


def validation_sets(flags: Any) -> tuple[TokenDataset, dict[str, Any], dict[str, TokenDataset]]:
    """(the dataset of a run, its validation splits by name as in Plan.validation_splits, the datasets of --eval_data).

    flags: with the group `data`. Raises ValueError where they aren't there any more.
    """
    flags.data.verify_data, flags.data.context_length = "size", None
    eval_data = open_eval_data(flags)
    if flags.data.data_mix:
        sources = mixing.open_sources(flags, mixture_text.parse(flags.data.data_mix))
        dataset = together(list(sources.values()))
    else:
        dataset = open_source(Path(flags.data.train_data_dir), flags.data.verify_data)
        sources = {ONE_SET: dataset}
    return dataset, {name: one.validation for name, one in {**sources, **eval_data}.items()}, eval_data


def losses_of(fabric: Fabric, folder: Path, dtype: torch.dtype, how: Evaluated) -> Losses:
    """Mean loss of the model in `folder` over each validation set. Its memory is free again afterwards."""
    config = load_config(str(folder))
    config._attn_implementation = resolve_attention(config, "auto", fabric.device.type)
    weights = reading.sharded_weights(folder, checked_skeleton(str(folder), config, dtype))
    model = load_reference(str(folder), config, dtype, seed=0, state_dict=weights)
    del weights
    packs = any(end is not None for end in how.document_ends.values()) and fast_paths.takes_packed_attention(model)
    with fast_paths.attention(model, packed_attention.NAME) if packs else nullcontext():
        wrapped = _on_device(fabric, model, how.precision)
        losses = {
            name: evaluated(fabric, wrapped, _batches(name, split, how).stream(0)).loss
            for name, split in how.sets.items()
        }
    del model, wrapped
    gc.collect()
    return losses


def _batches(name: str, split: Any, how: Evaluated) -> Batches:
    return evaluation_batches(split, how.flags, rank=0, world_size=1, document_end=how.document_ends[name])


def _on_device(fabric: Fabric, model: PreTrainedModel, precision: str) -> Any:
    """The model as runs have it, with the loss in chunks where it can."""
    chunked = fast_paths.chunks_its_loss(model, precision)
    return fabric.setup_module(LanguageModel(model, chunked=chunked).to(fabric.device), move_to_device=False)


def _line(name: str, weight: str, losses: Losses) -> str:
    numbers = "".join(f"{loss:>{max(12, len(of) + 2)}.4f}" for of, loss in losses.items())
    return f"{name}  {weight:>6}{numbers}"


def _note(file: Path, how: Evaluated, found: Sequence[Losses], average: Losses) -> None:
    """Add the losses to the note beside the average."""
    import json

    note = json.loads(file.read_text())
    for part, losses in zip(note["parts"], found):
        part["eval_loss"] = losses
    note |= {"eval_loss": average, "evaluated_as_in": str(how.run)}
    write_atomically(file, json.dumps(note, indent=2) + "\n")
