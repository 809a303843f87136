"""What benchmarks train on: Llamas with random weights or none, and rows of random tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

DOCUMENT_END = 0  # the token that ends each document of packed rows
DOCUMENT_TOKENS = 300  # of a document, on average


def write_llama(folder: Path, with_weights: bool = False, **shape: Any) -> None:
    """A Llama of this shape (fields of LlamaConfig). with_weights: random ones in float32, for all contenders."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    config = LlamaConfig(**{"tie_word_embeddings": False, "max_position_embeddings": 8192, **shape})
    config.save_pretrained(folder)
    if with_weights:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


def write_rows(folder: Path, vocabulary: int, context: int, rows: int, document_tokens: int = 0, seed: int = 0) -> None:
    """A dataset folder for train.py with rows of uniformly random tokens.

    document_tokens: the rows are packed with documents of so many tokens on average (each token ends its document
    with the same probability), as prepare_data.py packs them. 0: each row is one document.
    """
    import datasets
    import numpy as np

    generator = np.random.default_rng(seed)
    tokens = generator.integers(1, vocabulary, (rows, context), dtype=np.int32)
    if document_tokens:
        tokens[generator.random(tokens.shape) < 1 / document_tokens] = DOCUMENT_END
    features = datasets.Features({"input_ids": datasets.List(datasets.Value("int32"), length=context)})
    split = datasets.Dataset.from_dict({"input_ids": list(tokens)}, features=features)
    datasets.disable_progress_bars()
    datasets.DatasetDict({"train": split, "validation": split.select(range(min(rows, 8)))}).save_to_disk(str(folder))
    if document_tokens:
        manifest = {"packed": True, "context_length": context, "max_token_id": vocabulary - 1}
        (folder / "manifest.json").write_text(json.dumps({**manifest, "eos_token_id": DOCUMENT_END}))


def flags(folder: Path, model: str, data: str, kind: str, precision: str, *more: Any) -> list[str]:
    """The flags of train.py that every benchmark gives, for one device. The last of a flag wins."""
    words = ["--model_name", folder / model, "--train_data_dir", folder / data, "--output_dir", folder / "runs"]
    words += [
        "--accelerator",
        kind,
        "--devices",
        1,
        "--precision",
        precision,
        "--max_step",
        10**6,
        "--verify_start",
        "false",
        *more,
    ]
    return [str(word) for word in words]
