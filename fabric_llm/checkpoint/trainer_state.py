"""The tensors in a checkpoint's folder `trainer`, which keep.py has verified: the state of the
optimizer, with the moving average, and the probe."""

import math
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from fabric_llm.model.tensor_files import Tensors, readable

EMA = "ema"  # the state of a parameter that is its moving average
# A model is spoilt if its loss is above so many times that of a uniform guess. One that learns is
# below once that loss.
SPOILT = 3


def optimizer_state(path: Path) -> Tensors:
    """What a checkpoint holds of its optimizer: `state.causal_lm.NAME.exp_avg` and the like."""
    return Tensors((path / "trainer" / "optimizer").glob("*.safetensors"))


def is_spoilt(path: Path) -> bool:
    """Whether the model of a checkpoint predicts its probe far worse than a guess, or tells no
    token from another.

    It does after steps that were much too large: the norms of its layers overflow, to NaN or to
    zero as the processor rounds.
    """
    probe = read_probe(path)
    tokens, positions = probe["input_ids"][0], probe["positions"]
    # What comes after the last token isn't known.
    known = positions + 1 < len(tokens)
    if not known.any():
        return False
    logits = probe["logits"][known]
    if (logits == logits[:, :1]).all():
        return True
    loss = F.cross_entropy(logits, tokens[positions[known] + 1])
    return not loss <= SPOILT * math.log(logits.shape[1])  # NaN as well


def read_probe(path: Path) -> dict[str, Tensor]:
    """The recorded probe of a checkpoint, see `record_probe`. Raises Fault (66) where it isn't
    one."""
    file = path / "trainer" / "probe.safetensors"
    with readable(repr(str(file))):
        probe = load_file(file)
        (_, context), (count, vocabulary) = probe["input_ids"].shape, probe["logits"].shape
        # Hashes don't tell who made the file, so the numbers that index tensors are checked.
        for key, shape, limit in (
            ("input_ids", (1, context), vocabulary),
            ("positions", (count,), context),
        ):
            values = probe[key]
            of_kind = tuple(values.shape) == shape and values.dtype == torch.int64
            if not of_kind or not 0 <= values.min() <= values.max() < limit:
                raise ValueError(f"{key} isn't int64 {list(shape)} of 0 to {limit - 1}")
    return probe
