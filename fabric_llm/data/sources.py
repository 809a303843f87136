"""Where rows of tokens come from. A source is one entry of SOURCES."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # importing `datasets` takes seconds, and mistakes are told before that
    from fabric_llm.data.dataset import TokenDataset


def open_saved(folder: Path, verify: str) -> TokenDataset:
    """A folder that `datasets.load_from_disk` opens, such as prepare_data.py writes."""
    from fabric_llm.data.dataset import open_dataset

    return open_dataset(folder, verify)


# A file that tells the source of a folder -> what opens it: (folder, --verify_data) -> TokenDataset.
SOURCES: dict[str, Callable[[Path, str], TokenDataset]] = {"dataset_dict.json": open_saved}


def source_of(folder: Path) -> str:
    """The file of SOURCES that is in `folder`, "" if there is none."""
    return next((name for name in SOURCES if (folder / name).is_file()), "")


def open_source(folder: Path, verify: str = "auto") -> TokenDataset:
    """Open and check the dataset in `folder`. Raises ValueError as its source does."""
    return SOURCES[source_of(folder) or "dataset_dict.json"](folder, verify)
