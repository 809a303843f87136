"""Where rows of tokens come from: dataset folders, and what is said of them before they are opened.

A kind of folder is one entry of SOURCES. Nothing here imports torch, datasets or numpy.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Optional

if TYPE_CHECKING:  # importing `datasets` takes seconds, and mistakes are told before that
    from fabric_llm.data.dataset import TokenDataset


NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}"  # of a source, and of a set that is evaluated
COPY = "copy"  # the name of the probe of in-context learning, see copy_probe.py


def open_saved(folder: Path, verify: str) -> TokenDataset:
    """A folder that `datasets.load_from_disk` opens, such as prepare_data.py writes."""
    from fabric_llm.data.dataset import open_dataset

    check_dataset_folder(folder)
    return open_dataset(folder, verify)


# A file that tells the source of a folder -> what opens it: (folder, --verify_data) -> TokenDataset.
SOURCES: dict[str, Callable[[Path, str], TokenDataset]] = {"dataset_dict.json": open_saved}


def source_of(folder: Path) -> str:
    """The file of SOURCES that is in `folder`, "" if there is none."""
    return next((name for name in SOURCES if (folder / name).is_file()), "")


def open_source(folder: Path, verify: str = "auto") -> TokenDataset:
    """Open and check the dataset in `folder`. Raises ValueError as its source does."""
    return SOURCES[source_of(folder) or "dataset_dict.json"](folder, verify)


def check_dataset_folder(name: str | Path, tokenizer: str = "NAME_OR_DIR") -> None:
    """Raises ValueError unless the names of its files, and of its columns, are those of a dataset of tokens.

    tokenizer: that of the model, for the command that makes one.
    """
    folder = Path(name)
    if (column := _text_column(folder)) is not None:
        field = "" if column == "text" else f" --text_field {shlex.quote(column)}"
        raise ValueError(f"{str(folder)!r} holds text, not tokens: {_preparing(folder, tokenizer)}{field}.")
    if not folder.is_dir():
        is_file = " It is a file." if folder.exists() else ""
        raise ValueError(
            f"No dataset at {str(folder)!r}.{is_file} Make one with prepare_data.py --input ... --output "
            f"{'data/mine' if is_file else folder}."
        )
    if (folder / "state.json").is_file():
        whole = f": take {folder.parent}" if (folder.parent / "dataset_dict.json").is_file() else ""
        raise ValueError(f"{str(folder)!r} holds one split without a name; it needs 'train' and 'validation'{whole}.")
    if not source_of(folder):
        inside = sorted(path.parent for path in folder.glob("*/dataset_dict.json"))[:3]
        there = f" There is one in {', '.join(repr(str(path)) for path in inside)}." if inside else ""
        if (folder / "config.json").is_file():
            there = " It is a model: that goes to --model_name."
        there = there or f" If it holds text, {_preparing(folder, tokenizer)}."
        raise ValueError(
            f"{str(folder)!r} isn't a dataset folder: it has no dataset_dict.json (see data/README.md).{there}"
        )


def _preparing(folder: Path, tokenizer: str) -> str:
    made = shlex.quote(f"{folder}-tokens")
    return f"make it with prepare_data.py --input {shlex.quote(str(folder))} --tokenizer {shlex.quote(tokenizer)} --output {made}"


def _text_column(folder: Path) -> Optional[str]:
    """The column of text in a dataset of `datasets` that has no tokens."""
    for info in (folder / "dataset_info.json", *sorted(folder.glob("*/dataset_info.json"))):
        try:
            columns = json.loads(info.read_bytes())["features"]
            texts = [str(name) for name, said in columns.items() if str(said.get("dtype")).endswith("string")]
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue
        if texts and "input_ids" not in columns:
            return "text" if "text" in texts else texts[0]
    return None


def check_splits(folder: Path) -> None:
    """Raises ValueError where the list of a folder's splits, or its manifest, says that one of them isn't there, or empty."""
    try:
        names = json.loads((folder / "dataset_dict.json").read_bytes())["splits"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return  # another source's, or one that `open_source` has more to say of
    if "train" not in names or not {"validation", "valid"} & set(map(str, names)):
        missing = "validation" if "train" in names else "train"
        raise ValueError(f"{str(folder)!r} has no split {missing!r}, only {', '.join(map(repr, names))}.")
    if (said := said_of_rows(folder)) is not None and said[0] <= 0:
        raise ValueError(f"The split 'train' of {str(folder)!r} is empty.")


def said_of_rows(folder: Path) -> Optional[tuple[int, int]]:
    """(training rows, tokens in each) as a manifest of prepare_data.py says, unchecked; None without a manifest."""
    try:
        said = json.loads((folder / "manifest.json").read_bytes())
        numbers = said["splits"]["train"]["rows"], said["context_length"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return numbers if said.get("packed") and all(type(number) is int for number in numbers) else None


def parse_eval_data(given: Optional[str]) -> dict[str, str]:
    """{name of the set: dataset folder} of --eval_data: validation sets besides those of the training data. Raises ValueError."""
    folders: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in (given or "").split(","))):
        name, _, folder = (word.strip() for word in part.partition("="))
        if not folder or not re.fullmatch(NAME, name):
            raise ValueError(
                f"--eval_data takes name=folder, comma-separated, such as general=data/general, not {part!r}."
            )
        if name in folders:
            raise ValueError(f"--eval_data: {name!r} is there twice.")
        if name == COPY:
            raise ValueError(f"--eval_data: {COPY!r} is the name of a probe, so no set can have it.")
        folders[name] = folder
    if given is not None and not folders:
        raise ValueError("--eval_data is empty; it takes name=folder, such as general=data/general.")
    return folders
