"""The tensors in a checkpoint's folder `trainer`, which keep.py has verified: the state of the
optimizer, with the moving average, and the probe."""

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from fabric_llm.model.tensor_files import Tensors, readable

EMA = "ema"  # the state of a parameter that is its moving average


def optimizer_state(path: Path) -> Tensors:
    """What a checkpoint holds of its optimizer: `state.causal_lm.NAME.exp_avg` and the like."""
    return Tensors((path / "trainer" / "optimizer").glob("*.safetensors"))


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
