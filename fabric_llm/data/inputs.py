"""Check the arguments and paths of prepare_data.py without torch, datasets or numpy, which take seconds to import.

Every check raises ValueError.
"""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Optional

DEFAULT_PATTERNS = ["*.txt", "*.txt.gz", "*.md", "*.rst", "*.jsonl", "*.jsonl.gz", "*.parquet"]  # of prepare_data.py
SMALLEST_VOCABULARY = 257  # 256 bytes and the end of a text


def preparation(
    inputs: Sequence[str | Path],
    tokenizer: Optional[str],
    train_tokenizer: Optional[int],
    context_length: int,
    validation_fraction: float,
    pattern: Sequence[str],
) -> None:
    """Check the arguments of `prepare` on their own, without looking at any file."""
    if not inputs:
        raise ValueError("no input: name at least one file, folder or hub dataset with --input")
    if not pattern:
        raise ValueError("no pattern: with none, no file of a folder would be read")
    if (tokenizer is None) == (train_tokenizer is None):
        raise ValueError(
            f"give exactly one of --tokenizer (got {tokenizer}) and --train_tokenizer (got {train_tokenizer})"
        )
    if train_tokenizer is not None and train_tokenizer < SMALLEST_VOCABULARY:
        raise ValueError(
            f"train_tokenizer must be at least {SMALLEST_VOCABULARY} (every byte and <|endoftext|>), got {train_tokenizer}"
        )
    if context_length < 2:
        raise ValueError(f"context_length must be at least 2 tokens, got {context_length}")
    if not 0 < validation_fraction < 1:
        raise ValueError(f"validation_fraction must lie between 0 and 1, both excluded, got {validation_fraction}")


def prepared_output(output: Path, overwrite: bool) -> None:
    """Check that a prepared dataset can be written to `output`, a resolved path, or may replace what is there."""
    if not os.path.exists(output):  # also False without permission to look, which is reported later
        return
    if not output.is_dir():
        raise ValueError(f"output {output} is a file: name a folder")
    # Without this check, renaming the finished dataset to it would fail.
    if os.path.ismount(output):
        raise ValueError(f"output {output} is a mount point, which cannot be replaced: name a folder inside it")
    if not any(output.iterdir()):
        return
    if not overwrite:
        raise ValueError(f"output {output} exists and is not empty: pass --overwrite to replace it, or name another")
    # A typo such as `--output ~ --overwrite` must not delete anyone's files.
    if not (output / "manifest.json").is_file() or not (output / "dataset_dict.json").is_file():
        raise ValueError(f"output {output} holds no prepared dataset, so it is not overwritten: remove it yourself")


def text_input(given: str, pattern: Sequence[str], exclude: Sequence[str], output: Path) -> None:
    """Check that `given` is a file, a folder with a matching file, or possibly the name of a dataset on the hub."""
    if not os.path.exists(given):
        hub_dataset(given)
    elif os.path.isdir(given) and not is_dataset_folder(given):
        if next(files_of(given, pattern, exclude, output), None) is None:
            raise ValueError(f"no file in {given} matches {' '.join(pattern)}: choose others with --pattern")


def hub_dataset(name: str) -> str:
    """The start of the message for a name that the hub doesn't have. Raises ValueError if it can't be one."""
    nowhere = f"input {name} is neither a file or folder here nor a dataset that can be read from the hub"
    if found := re.match(r"(?:https?://)?(?:huggingface\.co|hf\.co)/datasets/([\w.-]+/[\w.-]+)", name):
        raise ValueError(f"{nowhere}: it is an address; take --input {found[1]}")
    # Anything that can't be a name on the hub is a mistyped path, for which the network isn't asked.
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?(:[^/:]+)?", name) or name.startswith("."):
        raise ValueError(nowhere)
    if any(fnmatch.fnmatchcase(name.lower(), one) for one in DEFAULT_PATTERNS):
        raise ValueError(nowhere)
    return nowhere


def is_dataset_folder(folder: str) -> bool:
    """Whether `datasets.save_to_disk` wrote this folder."""
    return any(os.path.isfile(os.path.join(folder, name)) for name in ("dataset_dict.json", "state.json"))


def files_of(folder: str, pattern: Sequence[str], exclude: Sequence[str], output: Path) -> Iterator[str]:
    """The matching files below `folder`, in order. `output`, a resolved path, is left out."""
    for root, directories, names in os.walk(folder, onerror=_refuse):
        directories[:] = sorted(
            name
            for name in directories
            if name not in exclude and os.path.realpath(os.path.join(root, name)) != str(output)
        )
        for name in sorted(names):
            path = os.path.join(root, name)
            if any(fnmatch.fnmatchcase(name.lower(), one.lower()) for one in pattern) and os.path.isfile(path):
                yield path


def _refuse(error: OSError) -> None:
    # Without this function os.walk silently skips folders that it can't list.
    raise ValueError(f"folder {error.filename} cannot be read: {error.strerror}") from error
