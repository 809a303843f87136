"""What --eval_data says: validation sets besides those of the training data. Nothing here imports numpy or torch."""

from __future__ import annotations

import re
from typing import Optional

from fabric_llm.data.blend import NAME

COPY = "copy"  # the name of the probe of in-context learning, see copy_probe.py


def parse(given: Optional[str]) -> dict[str, str]:
    """{name of the set: dataset folder}. Raises ValueError."""
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
