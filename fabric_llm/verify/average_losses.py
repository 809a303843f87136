"""The validation loss of each part and of their average, on the data that their run was evaluated on. One process."""

from __future__ import annotations

import gc
import json
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, Optional

import torch

from fabric_llm.base import plain_yaml
from fabric_llm.base.fabric import Fabric
from fabric_llm.base.faults import one_line
from fabric_llm.base.files import write_atomically
from fabric_llm.checkpoint import reading
from fabric_llm.data import mixture_text
from fabric_llm.data.dataset import together
from fabric_llm.data.sources import open_source
from fabric_llm.model import capabilities, packed_attention
from fabric_llm.model.language_model import LanguageModel
from fabric_llm.model.loading import checked_skeleton, load_config, load_reference, resolve_attention
from fabric_llm.model.strategy import make_fabric
from fabric_llm.plan.data import document_ends, find_document_end, open_eval_data, open_sources
from fabric_llm.plan.evaluation_sets import ONE_SET
from fabric_llm.run.build import evaluation_batches
from fabric_llm.training.evaluation import evaluate
from fabric_llm.verify.average import NOTE, Part

Losses = dict[str, float]  # of each validation set, nats


class Evaluation(NamedTuple):
    """How a run was evaluated."""

    run: Path
    precision: str
    sets: dict[str, Any]  # validation splits by name
    flags: Any  # with the groups that `evaluation_batches` reads
    document_ends: dict[str, Optional[int]]  # of the sets


def compare(parts: Sequence[Part], weights: Sequence[float], output: Path) -> Optional[Part]:
    """Print a table of losses, and write them into the note beside the average, or say in a line why there are none.

    Where a part is no worse on any set and better on one, say so, and return the best of those.
    """
    try:
        how = as_in_run(parts)
    except (OSError, ValueError, KeyError, TypeError) as error:
        print(f"Not evaluated: {one_line(error)}", flush=True)
        return None
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    fabric = make_fabric("single", devices=1, num_nodes=1, kind=kind, precision=how.precision)
    flags = how.flags.evaluation
    width = max(len("average"), *(len(part.name) for part in parts))
    columns = {name: max(12, len(name) + 2) for name in how.sets}
    print(
        f"Validation loss, up to {flags.eval_iters} batches of {flags.eval_batch_size}, as in {how.run}:\n"
        f"{'':<{width}}  weight" + "".join(f"{name:>{column}}" for name, column in columns.items()),
        flush=True,
    )

    def row(name: str, weight: str, losses: Losses) -> None:
        numbers = "".join(f"{loss:>{columns[of]}.4f}" for of, loss in losses.items())
        print(f"{name:<{width}}  {weight:>6}{numbers}", flush=True)

    found: list[Losses] = []
    for part, weight in zip(parts, weights):
        found.append(losses_of(fabric, part.path, part.dtype, how))
        row(part.name, f"{weight:.4f}", found[-1])
    dtype = getattr(torch, str(load_config(str(output)).dtype).removeprefix("torch."))
    average = losses_of(fabric, output, dtype, how)
    row("average", "", average)
    note = json.loads((output / NOTE).read_text())
    for part, losses in zip(note["parts"], found):
        part["eval_loss"] = losses
    note |= {"eval_loss": average, "evaluated_as_in": str(how.run)}
    write_atomically(output / NOTE, json.dumps(note, indent=2) + "\n")
    return _better(parts, found, average)


def _better(parts: Sequence[Part], found: Sequence[Losses], average: Losses) -> Optional[Part]:
    """Say on which sets a part has less than the average, to the digits of the table. The best part with less throughout."""
    average, *found = ({name: round(loss, 4) for name, loss in losses.items()} for losses in (average, *found))
    worse = []
    for name, loss in average.items():
        least, best = min((losses[name], part.name) for losses, part in zip(found, parts))
        if least < loss:
            worse.append(f"than {best} on {name} ({loss:.4f}, and {least:.4f})")
    if not worse:
        return None
    print(f"The average is worse {', '.join(worse)}.", flush=True)
    better = [
        (sum(losses.values()), number)
        for number, losses in enumerate(found)
        if losses != average and all(losses[name] <= average[name] for name in average)
    ]
    return parts[min(better)[1]] if better else None


def as_in_run(parts: Sequence[Part]) -> Evaluation:
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
    every = SimpleNamespace(**{**flat, "verify_data": "size", "context_length": None})
    flags = SimpleNamespace(data=every, training=every, evaluation=every)
    eval_data = open_eval_data(flags)
    if flat["data_mix"]:
        sources = open_sources(flags, mixture_text.parse(flat["data_mix"]))
        dataset = together(list(sources.values()))
    else:
        dataset = open_source(Path(flat["train_data_dir"]), "size")
        sources = {ONE_SET: dataset}
    sets = {name: one.validation for name, one in {**sources, **eval_data}.items()}
    precision = flat["precision"]
    if precision == "16-mixed" and not torch.cuda.is_available():
        precision = "32-true"  # float16 is for GPUs
    masks = bool(newest.progress["schedule"]["document_masking"])
    ends = document_ends(sets, eval_data, find_document_end(masks, dataset))
    return Evaluation(newest.run, precision, sets, flags, ends)


def losses_of(fabric: Fabric, folder: Path, dtype: torch.dtype, how: Evaluation) -> Losses:
    """Mean loss of the model in `folder` over each validation set. Its memory is free again afterwards."""
    config = load_config(str(folder))
    config._attn_implementation = resolve_attention(config, "auto", fabric.device.type)
    weights = reading.sharded_weights(folder, checked_skeleton(str(folder), config, dtype))
    model = load_reference(str(folder), config, dtype, seed=0, state_dict=weights)
    del weights
    packs = any(end is not None for end in how.document_ends.values()) and capabilities.takes_packed_attention(model)
    with capabilities.attention(model, packed_attention.NAME) if packs else nullcontext():
        # As runs have it, with the loss in chunks where it can.
        wrapped = LanguageModel(model, chunked=capabilities.chunks_its_loss(model, how.precision)).to(fabric.device)
        wrapped = fabric.setup_module(wrapped, move_to_device=False)
        losses = {}
        for name, split in how.sets.items():
            batches = evaluation_batches(split, how.flags, rank=0, world_size=1, document_end=how.document_ends[name])
            losses[name] = evaluate(fabric, wrapped, batches.stream(0)).loss
    del model, wrapped
    gc.collect()
    return losses
