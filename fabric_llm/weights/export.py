"""A Hugging Face directory: written beside its place, opened with plain transformers, and named
once it is proven.

Weights are read, written and compared one unit at a time (model/weights.py). `export` makes a
directory of a checkpoint, and proves that it equals the trained model; averages and extended models
are written here as well. One process, no GPU.
"""

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from fabric_llm.base import files, work_folder
from fabric_llm.base.ending import on_disk
from fabric_llm.base.faults import UNEXPECTED, Fault, one_line
from fabric_llm.checkpoint import keep, trainer_state
from fabric_llm.checkpoint.trainer_state import EMA
from fabric_llm.model import loading, saving
from fabric_llm.model.reference import load_reference
from fabric_llm.model.tensor_files import Tensors
from fabric_llm.model.weights import PREFIX, Source, first_names, units
from fabric_llm.weights.checks import exported_output

# The largest mean difference of logits that rounding explains, as a fraction of their standard
# deviation, by the coarser of the dtypes that the two sides compute in. On a CPU the same float32
# weights give 0, and their bfloat16 export 4e-3 (toy Llama). The margin is for GPU kernels, which
# sum in another order. Logits of another model differ by about 1.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}


class VerificationError(Fault):
    """The directory doesn't hold the model that it should. Ends a command with exit code 1."""

    def __init__(self, sentence: str) -> None:
        super().__init__(f"verification failed: {sentence}", UNEXPECTED)


@dataclass(frozen=True)
class Proof:
    """What `verify` has measured."""

    tensors: int
    parameters: int
    tied: int  # parameters that have a second name
    # Mean absolute difference, as a fraction of the logits' standard deviation.
    logits_difference: float
    tolerance: float
    same_next_token: float  # fraction of the probe's positions with the same most likely next token
    of_ema: bool  # the logits are compared with those of the average before it was written


def export(
    source: Path,
    output: Path,
    *,
    dtype: str = "auto",
    max_shard_size: str = "5GB",
    ema: bool = False,
    is_there: bool = False,
    describe: Callable[[Path, Proof], None] = lambda *made: None,
) -> Proof:
    """Write `output` from the checkpoint `source` and verify it. ema: export the moving average of
    the weights.

    is_there: `output` was written before, and is only verified. describe: adds files to a verified
    folder before it gets its name. Raises Fault for a damaged checkpoint, and VerificationError if
    the export isn't the model that was trained. An older `output` is then unchanged, and else
    replaced.
    """
    loading.disable_progress_bar()
    # Every byte is compared: an export must not spread a damaged weight.
    precision = keep.whole(source)["fixed"]["precision"]
    config = loading.load_config(str(source))
    # transformers keeps some parameters in float32 all the same.
    wanted = loading.DTYPES[precision] if dtype == "auto" else getattr(torch, dtype)
    skeleton = loading.checked_skeleton(str(source), config, wanted)
    # Nothing is read yet, and reading fills a skeleton of its own.
    weights = loading.open_weights(str(source), config, wanted)
    # Tokens, and the logits that the run itself computed for them when it saved.
    probe = trainer_state.read_probe(source)
    if ema:
        weights = MovingAverage(source, weights)
        model = load_reference(loading.build_skeleton(config, wanted), weights)
        # The checkpoint has recorded the logits of the weights themselves.
        probe["logits"] = logits_of(model, probe["input_ids"])[probe["positions"]]
        # `verify` opens another whole model.
        del model
    if is_there:
        try:
            # It is pushed as it is, so it must be this export to the bit.
            return verify(output, weights, probe, precision)
        except VerificationError as error:
            advice = f"take another --output, or --overwrite true ({error})"
            raise ValueError(f"{str(output)!r} exists and isn't this export: {advice}") from error
    with replacing(output, skeleton, "The export") as temporary:
        write_model(temporary, source, skeleton, weights, max_shard_size)
        proof = verify(temporary, weights, probe, precision)
        describe(temporary, proof)
    return proof


def verify(folder: Path, trained: Source, probe: dict[str, Tensor], precision: str) -> Proof:
    """Open `folder` with plain transformers, and compare it with the trained weights and the
    recorded logits."""
    loaded = opened(folder)
    require_weights(loaded, trained, "{} isn't what the checkpoint holds")
    logits = logits_of(loaded, probe["input_ids"])[probe["positions"]]
    recorded = probe["logits"]
    # Such as of another vocabulary, whose difference couldn't be computed.
    if logits.shape != recorded.shape:
        raise VerificationError(
            f"logits have shape {list(logits.shape)}, in training {list(recorded.shape)}."
        )
    # Relative to their spread, since models have logits of different sizes.
    difference = ((logits - recorded).abs().mean() / recorded.std()).item()
    # Training computed in another dtype than its weights have where its precision is mixed.
    computed_in = torch.float32
    if "bf16" in precision:
        computed_in = torch.bfloat16
    elif "16" in precision:
        computed_in = torch.float16
    # The coarser of the two decides what rounding explains.
    tolerance = max(TOLERANCE[computed_in], TOLERANCE[loaded.dtype])
    if not difference <= tolerance:  # also where it is NaN
        raise VerificationError(
            f"logits differ from those in training by {difference:.2g} of their standard "
            f"deviation, more than rounding explains ({tolerance:g})."
        )
    return Proof(
        tensors=len(Tensors(folder.glob("*.safetensors"))),
        parameters=sum(p.numel() for p in loaded.parameters()),
        tied=len(tied_names(loaded)),
        logits_difference=difference,
        tolerance=tolerance,
        same_next_token=(logits.argmax(-1) == recorded.argmax(-1)).float().mean().item(),
        of_ema=isinstance(trained, MovingAverage),
    )


def read_proof(proof: Proof) -> str:
    compared = "of the moving average before it was written" if proof.of_ema else "in training"
    return (
        f"Verified with plain transformers: {proof.tensors} tensors, {proof.parameters:,} "
        f"parameters, {proof.tied} tied; logits differ from those {compared} by "
        f"{proof.logits_difference:.1e} of their standard deviation (limit {proof.tolerance:g}), "
        f"{proof.same_next_token:.0%} of next tokens the same."
    )


@contextmanager
def replacing(output: Path, skeleton: PreTrainedModel, what: str) -> Iterator[Path]:
    """The path of a temporary folder for the body to make, beside `output`, whose name it gets at
    the end.

    skeleton: the model whose weights it gets. what: is written, in words. Where the body raises,
    nothing is left behind, and an older `output` is unchanged. Raises Fault (73, 74) where it can't
    be written, or another process makes it.
    """
    # A tied weight counts once, as it is stored.
    needed_bytes = sum(parameter.nbytes for parameter in skeleton.parameters())
    # A kill while an older one was being replaced has left it in the work folder.
    was_there = output.exists() or work_folder.has_former(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    files.room(output.parent, needed_bytes, what, "make room, or take an --output on another disk")
    # Of one process at a time.
    with work_folder.locked(output) as folder:
        try:
            temporary = folder / "model"
            # An export that was killed has left it.
            shutil.rmtree(temporary, ignore_errors=True)
            with on_disk(output, temporary, f"the weights need {files.size(needed_bytes)}"):
                yield temporary
            # Once more: what has appeared meanwhile isn't replaced.
            exported_output(output, was_there)
        except BaseException:
            work_folder.remove(folder)
            raise
        work_folder.publish(temporary, output)


def write_model(
    folder: Path,
    source: Path | str,
    skeleton: PreTrainedModel,
    weights: Source,
    max_shard_size: str = saving.LARGEST_FILE,
) -> None:
    """Write a Hugging Face directory unit by unit, with the generation config and the tokenizer of
    `source`.

    skeleton: the model on the meta device, which nothing was read into.
    """
    folder.mkdir()
    loading.set_generation_config(skeleton, str(source))
    saving.write_configuration(folder, skeleton, loading.tokenizer_beside(str(source)))
    # The memory holds one unit, however large the files are.
    files_of_weights = saving.WeightFiles(folder, skeleton, max_shard_size)
    for unit in units(skeleton):
        files_of_weights.write(weights.read(unit))


def opened(folder: Path) -> PreTrainedModel:
    """The model in `folder` as plain transformers opens it.

    Raises VerificationError unless the files hold exactly the weights of the model of its
    config.json, tied as they are there.
    """
    # Sizes that don't match are reported below.
    how = {"output_loading_info": True, "ignore_mismatched_sizes": True, "trust_remote_code": False}
    try:
        loaded, info = AutoModelForCausalLM.from_pretrained(folder, use_safetensors=True, **how)
    except (OSError, RuntimeError, ValueError, SafetensorError) as error:
        raise VerificationError(
            f"transformers can't open the export: {one_line(error)[:400]}"
        ) from error
    # transformers only warns of them, and draws what is missing at random.
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info[kind]:
            raise VerificationError(
                f"{kind.replace('_', ' ')} in the export: {sorted(map(str, info[kind]))[:10]}."
            )
    # A weight that lost its second name has the right values, but would train as two.
    wanted = tied_names(loading.build_skeleton(loading.load_config(str(folder)), loaded.dtype))
    if (ties := tied_names(loaded)) != wanted:
        raise VerificationError(f"tied weights {sorted(wanted)} came out as {sorted(ties)}.")
    return loaded


def require_weights(
    model: PreTrainedModel, weights: Source, otherwise: str, rows: Mapping[str, int] = {}
) -> None:
    """Raises VerificationError, which says `otherwise` with a tensor's name in it, unless a model
    has these weights to the bit.

    rows: of these tensors only so many rows, the first ones, are compared.
    """
    there = model.state_dict()
    for unit in units(model):
        for name, tensor in weights.read(unit).items():
            # `...` takes all of a tensor, also of one without dimensions.
            compared = slice(rows[name]) if name in rows else ...
            if not same_bits(there[name][compared], tensor[compared]):
                raise VerificationError(f"{otherwise.format(name)}.")


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same to the bit: -0 isn't 0, and a NaN equals itself."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return torch.equal(*(tensor.contiguous().view(-1).view(torch.uint8) for tensor in (one, other)))


@torch.no_grad()
def logits_of(model: PreTrainedModel, input_ids: Tensor) -> Tensor:
    """float32 [tokens, vocabulary]. input_ids: int64 [1, tokens]. Raises VerificationError where
    the model can't compute them."""
    try:
        return model.eval()(input_ids).logits[0].float()
    except (IndexError, RuntimeError) as error:
        raise VerificationError(f"it can't compute logits: {one_line(error)[:400]}.") from error


def tied_names(model: PreTrainedModel) -> set[str]:
    """Second names of parameters that have two, such as lm_head.weight where it is the
    embedding."""
    return {name for name, first in first_names(model).items() if name != first}


class MovingAverage:
    """The weights of a checkpoint, and in place of those that were trained their moving average. A
    `weights.Source`."""

    def __init__(self, path: Path, source: Source) -> None:
        """source: the weights. Raises ValueError where the checkpoint holds no average."""
        self.source, self.stored = source, trainer_state.optimizer_state(path)
        # One is enough: every trained parameter has an average, or none.
        if not any(key.endswith(f".{EMA}") for key in self.stored):
            raise ValueError(
                f"{str(path)!r} holds no moving average of the weights: its run had no "
                "--ema_decay when it was saved."
            )

    def read(self, unit: str) -> dict[str, Tensor]:
        tensors = self.source.read(unit)
        for name, tensor in tensors.items():
            # Frozen weights have no average: it would be what they are.
            if (key := f"state.{PREFIX}{name}.{EMA}") in self.stored:
                tensors[name] = torch.empty_like(tensor).copy_(self.stored[key])
        return tensors
