"""Every family starts, trains, resumes and exports on a GPU: `pytest -m gpu tests/test_gpu_families.py`.

By itself: its ranks are forked from the process of the tests, in which nothing may have asked the
GPU before.
"""

import pytest
import torch
from families import FAMILIES, try_family, write_data
from test_families import REFUSED

pytestmark = pytest.mark.gpu
CASES = [(family, "--compile", "false") for family in FAMILIES]
# Those that stand for others: in the precision of GPUs without bfloat16, and compiled.
CASES += [(family, "--precision", "16-mixed") for family in ("gemma2", "gpt2", "llama", "mixtral")]
CASES += [
    (family, "--compile", "true")
    for family in ("deepseek_v3", "gemma3_text", "gpt2", "llama", "mamba2", "mixtral", "qwen3_next")
]


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_a_family_trains_resumes_and_exports(tmp_path, case):
    assert not torch.cuda.is_initialized(), "to be run by itself"
    family, *more = case
    data = write_data(tmp_path / "data")
    try:
        tried = try_family(family, tmp_path, data, (1,), ("--accelerator", "cuda", *more))
    except ValueError as error:
        pytest.skip(f"this version of transformers has none: {error}")
    assert tried.devices[1].startswith(REFUSED.get((family, 1), "yes"))
