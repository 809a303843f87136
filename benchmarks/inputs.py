"""What benchmarks train on: Llamas and rows of random tokens; and commands of this repository."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Optional

from benchmarks.page import ROOT

DOCUMENT_END = 0  # the token that ends each document of packed rows


def llama(
    hidden: int, mlp: int, layers: int, heads: int, key_values: Optional[int] = None, **more: Any
) -> dict[str, Any]:
    """Fields of LlamaConfig."""
    return {
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_values or heads,
        "tie_word_embeddings": False,
        **more,
    }


def write_llama(
    folder: Path, with_weights: bool = False, dtype: str = "float32", **shape: Any
) -> None:
    """A Llama of this shape (fields of LlamaConfig). with_weights: random ones in `dtype`, for all
    contenders."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    usual = {"model_type": "llama", "max_position_embeddings": 8192}
    config = AutoConfig.for_model(**{**usual, **shape})
    config.save_pretrained(folder)
    if with_weights:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
        model.save_pretrained(folder)


def write_rows(
    folder: Path, vocabulary: int, context: int, rows: int, document_tokens: int = 0
) -> None:
    """A dataset folder for train.py with rows of uniformly random tokens.

    document_tokens: the rows are packed with documents of so many tokens on average (each token
    ends its document with the same probability), as prepare_data.py packs them. 0: each row is one
    document.
    """
    import datasets
    import numpy as np

    datasets.disable_progress_bars()
    generator = np.random.default_rng(0)
    row = datasets.List(datasets.Value("int32"), length=context)
    features = datasets.Features({"input_ids": row})
    splits = datasets.DatasetDict()
    for split, count in (("train", rows), ("validation", min(rows, 8))):
        tokens = generator.integers(1, vocabulary, (count, context), dtype="int32")
        if document_tokens:
            tokens[generator.random(tokens.shape) < 1 / document_tokens] = DOCUMENT_END
        splits[split] = datasets.Dataset.from_dict({"input_ids": tokens}, features)
    splits.save_to_disk(str(folder))
    if document_tokens:
        manifest = {"packed": True, "context_length": context, "max_token_id": vocabulary - 1}
        manifest["eos_token_id"] = DOCUMENT_END
        (folder / "manifest.json").write_text(json.dumps(manifest))


def write_toy(folder: Path) -> None:
    """The GPT-2 and the data of the tests, whose folder is on sys.path."""
    import conftest
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(conftest.TOY_CONFIGS["gpt2"])
    model.save_pretrained(folder / "gpt2")
    conftest.make_dataset(folder / "data", np.random.default_rng(0))


def flags(*words: Any, **given: Any) -> list[str]:
    """Words of a command: those of texts, paths, and flags by name."""
    found = []
    for word in words:
        found += [str(word)] if isinstance(word, Path) else word.split()
    for name, value in given.items():
        found += [f"--{name}", str(value)]
    return found


def training(
    folder: Path, model: str, data: str, kind: str, precision: str, *words: str, **more: Any
) -> list[str]:
    """The flags of train.py that every benchmark gives, for one device unless more is said."""
    usual = f"--devices 1 --verify_start false --max_step {10**6} --accelerator {kind}"
    folders = {"model_name": folder / model, "train_data_dir": folder / data}
    folders["output_dir"] = folder / "runs"
    return flags(usual, *words, **folders, precision=precision, **more)


def call(script: str, *words: Any, codes: tuple[int, ...] = (0,), **given: Any) -> None:
    """A script or module, printed as one would type it. codes: with which it may end."""
    command = [script, *flags(*words, **given)]
    if not script.endswith(".py"):
        command.insert(0, "-m")
    print("$ python", *command, file=sys.stderr, flush=True)
    done = subprocess.run([sys.executable, *command], cwd=ROOT, stdout=sys.stderr)
    if done.returncode not in codes:
        raise SystemExit(f"{script} has failed.")


def once(script: str, *words: Any, output: Path, **given: Any) -> None:
    """A command with --output, unless that is there."""
    if not output.exists():
        call(script, *words, output=output, **given)


def train(run: Path, *words: Any, **given: Any) -> None:
    """train.py into the directory `run`, unless it has come to its end there, also that of a
    guard."""
    status, ends = run / "STATUS.json", (0, 76)
    if not status.exists() or json.loads(status.read_text())["code"] not in ends:
        named = {"output_dir": run.parent, "run_name": run.name}
        call("train.py", *words, codes=ends, **named, **given)


def log(run: Path, key: str) -> list[dict[str, Any]]:
    """The lines of a run's log that have this key."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if key in line]
