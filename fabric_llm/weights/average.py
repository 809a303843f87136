"""The average of models on disk, summed in float64 tensor by tensor, verified, and evaluated beside
its parts. One process."""

import gc
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor
from transformers import PreTrainedModel

from fabric_llm.base import files, plain_yaml
from fabric_llm.base.fabric import Fabric
from fabric_llm.base.faults import NON_FINITE, Fault, one_line
from fabric_llm.base.names import listed
from fabric_llm.checkpoint import keep
from fabric_llm.data import mixture_text
from fabric_llm.data.batches import Batches
from fabric_llm.model import capabilities, loading, packed_attention
from fabric_llm.model.attention import resolve_attention
from fabric_llm.model.language_model import LanguageModel
from fabric_llm.model.reference import load_reference
from fabric_llm.model.saving import layout_of_files, with_older_names
from fabric_llm.model.strategy import make_fabric
from fabric_llm.model.strategy_rules import Placement, Sharding
from fabric_llm.model.weights import Source, is_finite
from fabric_llm.plan.data_plan import (
    differing_tokens,
    evaluated_probes,
    open_eval_data,
    open_sources,
)
from fabric_llm.plan.model_plan import require_rows_for
from fabric_llm.plan.plan import DataPlan
from fabric_llm.run.build import evaluated_sets
from fabric_llm.run.reference import no_kernel
from fabric_llm.training.evaluation import Evaluation, rows_in_words
from fabric_llm.weights.export import (
    VerificationError,
    logits_of,
    opened,
    replacing,
    require_weights,
    write_model,
)

BLOCK_ELEMENTS = 2**22  # of a tensor in float64 at a time: 32 MiB
PROBE_TOKENS = 64
NOTE = "average.json"
# Fields of a configuration that don't change what the weights mean.
NO_MATTER = re.compile(
    r"^_|dtype$|_version$|_token_id$|drop|^use_cache$|"
    r"^output_(attentions|hidden_states|router_logits|scores)$|^return_dict|"
    r"^architectures$|2id$|^id2|^init"
)


@dataclass(frozen=True)
class Part:
    """A model on disk that passed all checks."""

    path: Path
    config: Any
    tokenizer: Optional[Any]
    dtype: torch.dtype  # of its weights, but for what transformers keeps in float32
    progress: Optional[dict[str, Any]]  # progress.json of a checkpoint
    weights: Source

    @property
    def name(self) -> str:
        """Short, for a table."""
        if self.progress is None:
            return str(self.path)
        return "/".join(self.path.resolve().parts[-2:])


def open_parts(folders: Sequence[Path]) -> list[Part]:
    """The parts, once they are verified and of one model. Raises Fault: 66 damaged, 77 refused, 2
    of different models."""
    loading.disable_progress_bar()
    first, *others = parts = [open_part(folder) for folder in folders]
    for other in others:
        require_same_model(first, other)
    return parts


def require_same_model(first: Part, other: Part) -> None:
    """Raises ValueError unless weights of both mean the same."""
    both = f"{str(first.path)!r} and {str(other.path)!r}"
    # Two families may have tensors of the same names and shapes.
    if type(first.config) is not type(other.config):
        kinds = f"{first.config.model_type} and {other.config.model_type}"
        raise ValueError(f"{both} are different models: {kinds}.")
    # Checkpoints have older names besides, which their base may lack.
    one, two = (with_older_names(part.config, part.config.to_dict()) for part in (first, other))
    differing = []
    for key in sorted(one.keys() | two.keys()):
        # Versions of transformers write different sets of fields; a missing one counts as None.
        if one.get(key) != two.get(key) and not NO_MATTER.search(key):
            differing.append(f"{key} {one.get(key)}, and {two.get(key)}")
    if differing:
        raise ValueError(f"{both} are different models: {listed(differing, separator='; ')}.")
    # A folder without a tokenizer is taken at its word.
    if first.tokenizer is None or other.tokenizer is None:
        return
    words = differing_tokens(first.tokenizer, other.tokenizer)
    # Few texts show which of two merges comes first.
    merges = [merges_of(part.tokenizer) for part in (first, other)]
    if not words and None not in merges and merges[0] != merges[1]:
        words = ": the same tokens, and other merges"
    if words:
        raise ValueError(f"{both} have different tokenizers{words}.")


def merges_of(tokenizer: Any) -> Any:
    """Those of a tokenizer of byte pair encoding, in their order; None where they aren't known."""
    if not tokenizer.is_fast:
        return None
    return json.loads(tokenizer.backend_tokenizer.to_str())["model"].get("merges")


def open_part(folder: Path) -> Part:
    # A damaged checkpoint may lack one of them, and must not pass for a plain model.
    is_of_run = any((folder / name).is_file() for name in (files.MANIFEST, "trainer/progress.json"))
    progress = keep.whole(folder) if is_of_run else None
    config = loading.load_config(str(folder))
    # Refuses a config.json that makes no possible model, before any weight is read.
    loading.checked_skeleton(str(folder), config, torch.float32)
    dtype = loading.stored_dtype(str(folder), config)
    # Weights of 16 bits are exact in float32, so that reading rounds nothing.
    exact = torch.promote_types(dtype, torch.float32)
    weights = loading.open_weights(str(folder), config, exact)
    return Part(folder, config, loading.tokenizer_beside(str(folder)), dtype, progress, weights)


def average(
    parts: Sequence[Part],
    weights: Sequence[float],
    how: dict[str, Any],
    output: Path,
    dtype: str,
    max_shard_size: str,
) -> str:
    """Write `output`, verify it, and return what was verified, in words.

    weights: they add up to 1. how: what the note says of them. Raises Fault (76) for NaN in a part,
    and VerificationError; nothing is then left behind.
    """
    # Nothing is summed yet: tensors are read and averaged when they are written.
    averaged = average_of(parts, weights, dtype)
    skeleton = averaged.skeleton
    # Its generation config and tokenizer are taken: those of the newest part that has any.
    newest = next((part for part in reversed(parts) if part.tokenizer is not None), parts[-1])
    written = str(skeleton.dtype).removeprefix("torch.")
    note = {"what": "weighted average of models, summed in float64", **how}
    note |= {"dtype": written, "parts": []}
    for part, weight in zip(parts, weights):
        # None tells a plain model from a checkpoint: the card of the average asks.
        step = None if part.progress is None else part.progress["progress"]["step"]
        note["parts"].append({"path": str(part.path), "weight": weight, "step": step})
    with replacing(output, skeleton, "The average") as folder:
        write_model(folder, newest.path, skeleton, averaged, max_shard_size)
        (folder / NOTE).write_text(
            json.dumps({**note, "versions": keep.versions()}, indent=2) + "\n"
        )
        # The folder gets its name only if plain transformers opens it to these very weights.
        loaded = opened(folder)
        require_weights(loaded, averaged, "{} isn't the average of the parts")
        # Any tokens do: only whether logits are finite is asked.
        input_ids = torch.arange(PROBE_TOKENS)[None] % loaded.config.get_text_config().vocab_size
        if not torch.isfinite(logits_of(loaded, input_ids)).all():
            raise VerificationError("it gives NaN or infinity.")
    tensors = len(layout_of_files(skeleton))
    parameters = sum(parameter.numel() for parameter in skeleton.parameters())
    return (
        f"Verified with plain transformers: {tensors} tensors, {parameters:,} parameters, each the "
        f"float64 average rounded to {written}; logits are finite."
    )


@dataclass(frozen=True)
class Average:
    """The sum of weight x tensor over the parts, float64, rounded to the dtypes of a model on the
    meta device. A `Source`."""

    parts: Sequence[Part]
    weights: Sequence[float]
    skeleton: PreTrainedModel

    def read(self, unit: str) -> dict[str, Tensor]:
        """Raises Fault (76) for NaN or infinity, in a part or because float16 is too narrow."""
        sums: dict[str, Tensor] = {}
        for part, weight in zip(self.parts, self.weights):
            for name, tensor in part.weights.read(unit).items():
                if tensor.is_floating_point():
                    if name not in sums:  # with 0.0, a -0.0 would lose its sign
                        sums[name] = torch.full(tensor.shape, -0.0, dtype=torch.float64)
                    add(sums[name], tensor, weight)
                # Integers, such as positions, are the same in all parts or can't be averaged.
                elif not torch.equal(sums.setdefault(name, tensor), tensor):
                    kind = f"which holds {tensor.dtype} and can't be averaged"
                    raise ValueError(f"The parts differ in {name}, {kind}.")
        # Rounded once, after all parts are added.
        wanted = self.skeleton.state_dict()
        for name in sums:
            sums[name] = sums[name].to(wanted[name].dtype)
            if not is_finite(sums[name]):
                raise Fault(
                    f"{wanted[name].dtype} can't hold the numbers of {name}: take another --dtype.",
                    NON_FINITE,
                )
        return sums


def average_of(parts: Sequence[Part], weights: Sequence[float], dtype: str) -> Average:
    """dtype: of its weights; auto: the widest of the parts."""
    promoted = reduce(torch.promote_types, (part.dtype for part in parts))
    wanted = promoted if dtype == "auto" else getattr(torch, dtype)
    return Average(parts, weights, loading.build_skeleton(parts[-1].config, wanted))


def add(total: Tensor, tensor: Tensor, weight: float) -> None:
    """Add weight x tensor to a float64 total, in blocks."""
    # A float64 copy of a whole tensor would take four times the memory of its bfloat16.
    for sums, block in zip(
        total.view(-1).split(BLOCK_ELEMENTS), tensor.reshape(-1).split(BLOCK_ELEMENTS)
    ):
        sums += block.double() * weight


def compare(parts: Sequence[Part], output: Path) -> Optional[Part]:
    """Print the validation loss of each part and of the average, and write them into the note, or
    say why there are none.

    Returns the best part, if it is better than the average, of which a line then warns. What counts
    is the loss of the run's training data, of a mixture the mean over its sources.
    """
    # The average is complete without an evaluation, so what it lacks is only printed.
    try:
        run = as_in_run(parts)
    except (OSError, ValueError, KeyError, TypeError) as error:
        print(f"Not evaluated: {one_line(error)}", flush=True)
        return None
    note = {
        **json.loads((output / NOTE).read_text()),
        "evaluated_as_in": str(run.directory),
        "rows": rows_in_words(run.sets),
    }
    models = []  # name, folder, dtype, and where its losses are noted
    for part, entry in zip(parts, note["parts"]):
        models.append((part.name, part.path, part.dtype, entry))
    # The average is read from its folder: the loss is that of what was written.
    models.append(("average", output, loading.load_config(str(output)).dtype, note))
    # Losses of --eval_data don't count: they may be of text that nobody trains on.
    of_training, means = list(run.data.sources), []
    mean = f"mean of {' and '.join(of_training)}" if len(of_training) > 1 else ""
    print(
        f"Validation loss, as in {run.directory}, of {note['rows']}{mean and f'; {mean}'}:",
        flush=True,
    )
    for name, folder, dtype, entry in models:
        config = loading.load_config(str(folder))
        weights = loading.open_weights(str(folder), config, dtype)
        # Nats, by the names of the sets.
        entry["eval_loss"] = losses_of(run, config, weights, dtype)
        means.append(sum(entry["eval_loss"][of] for of in of_training) / len(of_training))
        words = [f"{of} {loss:.4f}" for of, loss in entry["eval_loss"].items()]
        words += [f"mean {means[-1]:.4f}"] * bool(mean)
        print(f"  {name}", *words, sep="  ", flush=True)
    # The losses were put into `note` and its parts above.
    files.write_atomically(output / NOTE, json.dumps(note, indent=2) + "\n")
    *of_parts, whole = means
    best = min(range(len(parts)), key=of_parts.__getitem__)
    # Written so that a loss that is NaN returns, too.
    if not of_parts[best] < whole:
        return None
    by_mean = mean and f" in the {mean}"
    print(
        f"Warning: the average, {whole:.4f}, is worse{by_mean} than {parts[best].name}, "
        f"{of_parts[best]:.4f}.",
        flush=True,
    )
    return parts[best]


class InRun(NamedTuple):
    """A run, as whose checkpoints other models are evaluated on this machine."""

    directory: Path
    data: DataPlan
    sets: Mapping[str, Batches]
    fabric: Fabric
    precision: str


def as_in_run(parts: Sequence[Part], budgets: Mapping[str, float] = {}) -> InRun:
    """The run of the newest checkpoint. Raises ValueError, OSError, KeyError, TypeError.

    budgets: {set: nats}; probes that have one are sets as well.
    """
    # Of several runs the last one counts, as for the tokenizer and the generation config.
    newest = next((part for part in reversed(parts) if part.progress is not None), None)
    if newest is None:
        raise ValueError("none of the parts is a checkpoint, whose run would say on which data.")
    run = newest.path.resolve().parent
    if not (run / "arguments.yaml").is_file():
        raise ValueError(f"{str(run)!r} has no arguments.yaml, which would say on which data.")
    flat = plain_yaml.read_yaml(run / "arguments.yaml")
    # Both callers begin the sentence: such as "Not evaluated".
    if flat["eval_iters"] == 0:
        raise ValueError(f"{str(run)!r} was not, by --eval_iters 0.")
    # Hashing the data again would take longer than to evaluate on it.
    every = SimpleNamespace(**{**flat, "verify_data": "size"})
    # A source of --code may read any group of flags.
    names = "devices data model fsdp save logging checkpoint training guard evaluation own"
    flags = SimpleNamespace(**dict.fromkeys(names.split(), every))
    # The sets must be those of the run, so they are opened by its own flags.
    sources = open_sources(flags, mixture_text.mix_of(flat["data_mix"], flat["train_data_dir"]))
    first = next(iter(sources.values()))
    masks = bool(newest.progress["schedule"]["document_masking"])
    data = DataPlan(
        sources,
        eval_data=open_eval_data(flags),
        evaluated_rows=flat["eval_iters"] * flat["eval_batch_size"],
        budgets=budgets,
        probes=evaluated_probes(None, budgets),
        document_end=first.document_end if masks else None,
        document_masking=masks,
    )
    # Flags and data may have changed since the run compared them with its model.
    require_rows_for(newest.config.get_text_config(), data.opened, str(newest.path))
    # By a checkpoint of an older version, which says nothing, the sets are taken at their word.
    then, now = newest.progress.get("evaluated_on", {}), data.measured_on()
    sets = data.validation_splits()
    if changed := [name for name in sets if then.get(name, now[name]) != now[name]]:
        raise ValueError(f"{listed(changed)} in {str(run)!r} was evaluated on other rows.")
    kind, precision = "cuda" if torch.cuda.is_available() else "cpu", flat["precision"]
    if precision == "16-mixed" and kind == "cpu":
        precision = "32-true"  # float16 is for GPUs
    fabric = make_fabric(Placement("single", Sharding(), 1, 1, kind), precision)
    evaluated = evaluated_sets(data, newest.tokenizer, flags)
    return InRun(run, data, evaluated, fabric, precision)


def losses_of(run: InRun, config: Any, weights: Source, dtype: torch.dtype) -> dict[str, float]:
    """Mean loss of a model over each set. The model's memory is free again afterwards."""
    fabric, config = run.fabric, deepcopy(config)
    # As train.py chooses it on this device.
    config._attn_implementation = resolve_attention(config, "auto", fabric.device.type)
    model = load_reference(loading.build_skeleton(config, dtype), weights)
    # float32 holds float16 exactly, and isn't too narrow for what is computed.
    if dtype == torch.float16:
        model = model.float()
    # Where the run kept documents apart, they are kept apart here.
    masks = any(batches.document_end is not None for batches in run.sets.values())
    packs = masks and capabilities.takes_packed_attention(model)
    packs = packs and no_kernel(model, fabric.device.type, run.precision) is None
    attention = capabilities.attention(model, packed_attention.PACKED) if packs else nullcontext()
    with attention:
        # As runs have it, with the loss in chunks where it can.
        chunked = capabilities.chunks_its_loss(model, run.precision)
        wrapped = LanguageModel(model, chunked=chunked).to(fabric.device)
        wrapped = fabric.setup_module(wrapped, move_to_device=False)
        # Without requests to stop: this process ends at the first signal.
        losses = Evaluation(fabric, run.sets, lambda: False, lambda: None).of(wrapped, None).losses
    # Modules refer to each other in circles, which only the collector frees.
    del model, wrapped
    gc.collect()
    return losses
