"""Toy models and data, made once: real transformers models, real dataset folders, no network."""

from __future__ import annotations

import json
import logging
import os
import re

for name in ("torchao", "torch.utils._pytree"):  # as each program does, see plain_output
    logging.getLogger(name).setLevel(logging.ERROR)
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["WANDB_MODE"] = "offline"
os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # as train.py does

import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tqdm import tqdm
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MixtralConfig
from transformers.utils.logging import disable_progress_bar

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import torch.distributed.fsdp  # noqa: E402, F401  ranks are forked from this process: what it has imported they need not

from fabric_llm.run import supervision, verdicts  # noqa: E402, F401

# A shell starts what runs in the background with SIGINT ignored, and so would be every process that
# the tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
torch.set_num_threads(1)  # ranks are forked from this process: no thread pool may be there
# its own is shared by forked processes: killed with it, a rank would keep it for ever
tqdm.set_lock(threading.RLock())
disable_progress_bar()
datasets.disable_progress_bars()

VOCABULARY = 131  # odd, so that shards are uneven
CONTEXT = 24
ROWS = 44  # not a multiple of the global batch

SIZES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": VOCABULARY, "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 0,
}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
TOY_CONFIGS = {
    "llama": LlamaConfig(**SIZES, intermediate_size=56, tie_word_embeddings=False),
    "gpt2": GPT2Config(  # tied embeddings, biases, learned positions, dropout
        n_embd=32, n_layer=2, n_head=4, n_positions=64, vocab_size=VOCABULARY, bos_token_id=0,
        eos_token_id=0, **dict.fromkeys(NO_DROPOUT, 0.1),
    ),
}
MIXTRAL_CONFIG = MixtralConfig(  # experts, and an auxiliary loss that is worth something
    **SIZES, intermediate_size=24, num_local_experts=4, num_experts_per_tok=2,
    output_router_logits=True, router_aux_loss_coef=0.3, initializer_range=0.2,
)


def pytest_configure(config: pytest.Config) -> None:
    """The tests are of processes on CPUs, also on a machine with a GPU: `--accelerator auto` would
    take it."""
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # Asked otherwise, a GPU can't be used in processes that are forked later.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    cases: Counter[str] = Counter()
    quick_of: dict[str, bool] = {}  # test -> whether any case is quick, as its pattern asks
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(
                pytest.mark.skip(reason="needs a GPU, and to be asked for with -m gpu alone")
            )
        quick = item.get_closest_marker("quick_cases")
        if quick:
            test, is_quick = item.nodeid.partition("[")[0], bool(re.search(quick.args[0], item.name))
            quick_of[test] = quick_of.get(test, False) or is_quick
            if not is_quick:
                item.add_marker("longer")
        spread = item.get_closest_marker("every_eighth")
        if spread and any(map(item.get_closest_marker, ("longer", "families"))):
            name = item.name.partition("[")[0]
            cases[name] += 1
            if (cases[name] + spread.args[0]) % 8:
                item.add_marker("slow")
    # Of a test that is named with one case, the others aren't there.
    if not any("[" in given for given in config.args):
        without = [test for test, is_quick in quick_of.items() if not is_quick]
        assert not without, f"quick_cases that match no case: {without}"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--families_table", type=Path, help="with -m families: the file to write what they gave to"
    )


@pytest.fixture(scope="session")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with models llama, gpt2, mixtral, llama-tied, gpt2-no-dropout and datasets `data`,
    `ragged` and `many`."""
    folder = tmp_path_factory.mktemp("toys")
    configs = {
        **TOY_CONFIGS,
        "llama-tied": changed_config("llama", tie_word_embeddings=True),
        "gpt2-no-dropout": changed_config("gpt2", **NO_DROPOUT),
        "mixtral": MIXTRAL_CONFIG,  # the last: each has the seed of its place
    }
    for seed, (name, config) in enumerate(configs.items()):
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)
    generator = np.random.default_rng(0)
    make_dataset(folder / "data", generator)
    make_dataset(folder / "ragged", generator, ragged=True)
    make_dataset(folder / "many", generator, rows=3200, validation_rows=256)
    return folder


def make_dataset(
    folder: Path,
    generator: np.random.Generator,
    ragged: bool = False,
    rows: int = ROWS,
    validation_rows: int = 10,
) -> None:
    """Token sequences with something to learn; `ragged`: with labels of which a different part is
    masked in each row."""

    def split(count: int) -> datasets.Dataset:
        tokens = generator.integers(0, VOCABULARY, (count, CONTEXT))
        tokens[:, 1::2] = (tokens[:, ::2] * 7 + 3) % VOCABULARY
        columns = {"input_ids": tokens.tolist()}
        if ragged:
            labels = tokens.copy()
            for row in labels:
                row[generator.random(CONTEXT) < generator.random()] = -100
            labels[0] = -100  # one row without any target
            columns["labels"] = labels.tolist()
        return datasets.Dataset.from_dict(columns)

    splits = datasets.DatasetDict({"train": split(rows), "validation": split(validation_rows)})
    splits.save_to_disk(str(folder))


END = 0  # the token that ends a document


def documents(lengths: list[int], seed: int) -> list[list[int]]:
    """Token lists of these lengths, each ending with END."""
    generator = torch.Generator().manual_seed(seed)
    draw = partial(torch.randint, 1, VOCABULARY, generator=generator)
    return [draw((n - 1,)).tolist() + [END] for n in lengths]


@pytest.fixture(scope="session")
def packed_data(tmp_path_factory) -> Path:
    return write_data(tmp_path_factory.mktemp("packed") / "data")


def write_data(folder: Path) -> Path:
    """Rows of packed documents of 7 tokens, with prepare_data.py's manifest."""

    def split(rows: int, seed: int) -> datasets.Dataset:
        tokens = [t for one in documents([7] * (rows * CONTEXT // 7 + 1), seed) for t in one]
        tokens = torch.tensor(tokens[: rows * CONTEXT]).view(rows, CONTEXT)
        return datasets.Dataset.from_dict({"input_ids": tokens.tolist()})

    splits = datasets.DatasetDict({"train": split(40, 1), "validation": split(8, 2)})
    splits.save_to_disk(str(folder))
    manifest = {"packed": True, "context_length": CONTEXT, "eos_token_id": END}
    manifest["max_token_id"] = VOCABULARY - 1
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor in the safetensors files of `folder`, by name."""
    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def step(run: Path, number: int) -> Path:
    """The checkpoint of a step."""
    return run / f"step-{number:08d}"


def parts(folder: Path) -> list[str]:
    """Names in the folder, hidden ones too."""
    return sorted(os.listdir(folder)) if folder.exists() else []


def flip(file: Path) -> None:
    """Change one bit of a file."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def ended(main: Callable[[list[str]], Any], *words: Any) -> Any:
    """The exit code of a command in this process."""
    try:
        main([str(word) for word in words])
    except SystemExit as stop:
        return stop.code
    return 0


def prepare(**flags: Any) -> dict[str, Any]:
    """The manifest of what prepare_data.py makes with these flags."""
    from fabric_llm.prepare import checks
    from fabric_llm.prepare.prepare import prepare
    from prepare_arguments import PrepareArguments

    given = PrepareArguments(**flags)
    return prepare(given, checks.check(given))


def same_tensors(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Whether they have the same names, dtypes and values."""
    return one.keys() == other.keys() and all(
        tensor.dtype == other[name].dtype and torch.equal(tensor, other[name])
        for name, tensor in one.items()
    )


def changed_config(family: str, **changes: Any) -> Any:
    """The toy configuration with these changes."""
    config = TOY_CONFIGS[family]
    return type(config)(**{**config.to_dict(), **changes})
