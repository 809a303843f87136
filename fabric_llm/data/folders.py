"""The files of a dataset folder, as `datasets.save_to_disk` and prepare_data.py write them.

Nothing here imports datasets, which takes seconds.
"""

import json
from pathlib import Path

from fabric_llm.base import files
from fabric_llm.base.faults import Fault, one_line

TASKS = "tasks.json"  # in a folder of tasks of lm-evaluation-harness: what each of them holds
# Label of a token that isn't a target, as in transformers and torch.nn.functional.cross_entropy.
IGNORED = -100


def split_names(folder: Path) -> list[str]:
    """Names of the splits of a dataset folder. Raises Fault for a list that can't be read (2) or
    leads elsewhere (77)."""
    path = folder / "dataset_dict.json"
    try:
        names = [str(name) for name in json.loads(path.read_bytes())["splits"]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise Fault(f"{str(path)!r} can't be read as a list of splits.") from error
    for name in names:
        # A name like ../x would lead out of the folder.
        files.check_name(name, path)
    return names


def has_rows(folder: Path) -> bool:
    """False for a split without a file. Raises Fault for one that can't be opened (2) or names
    files elsewhere (77)."""
    path = folder / "state.json"
    try:
        for file in (path, folder / "dataset_info.json"):
            if not file.is_file():  # a pipe blocks whoever opens it
                raise ValueError(f"there is no file {file.name}")
        names = [str(entry["filename"]) for entry in json.loads(path.read_bytes())["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise Fault(f"{str(folder)!r} can't be read: {one_line(error).rstrip('.')}.") from error
    # Each file must be there, and inside the folder, before `datasets` opens it.
    for name in names:
        files.check_name(name, path)
        if not (folder / name).is_file():
            raise Fault(f"{str(folder)!r} can't be read: there is no file {name}.")
    return bool(names)
