"""The flags of export_hf.py, and folders that models are written to, without torch or
transformers."""

import json
from pathlib import Path

from fabric_llm.base import files
from fabric_llm.base.files import MANIFEST
from fabric_llm.base.flag import Flags
from fabric_llm.checkpoint import keep


def check(flags: Flags) -> Path:
    """The checkpoint that the flags of export_hf.py name, once all are right. Raises ValueError,
    Fault (73)."""
    if flags.push_to_hub is not None:
        # A wrong name must not be found only after the export, which may take many minutes.
        from huggingface_hub.utils import validate_repo_id

        validate_repo_id(flags.push_to_hub)
        if "/" not in flags.push_to_hub:
            raise ValueError(
                f"--push_to_hub takes org/name, such as NAME_OF_YOURS/{flags.push_to_hub}."
            )
    checkpoint = keep.checkpoint_at(flags.checkpoint)
    # One that is there may be pushed again.
    exported_output(Path(flags.output), flags.overwrite or flags.push_to_hub is not None)
    return checkpoint


def exported_output(output: Path, overwrite: bool) -> None:
    """Raises ValueError if the folder of an exported model exists and mustn't be replaced, or lies
    in a checkpoint, Fault (73) if it can't be written."""
    files.writable(output)
    # A checkpoint with a file that its manifest doesn't list counts as damaged.
    if inside := [str(place) for place in output.resolve().parents if (place / MANIFEST).is_file()]:
        raise ValueError(
            f"{str(output)!r} lies in the checkpoint {inside[0]!r}, which it would damage; take "
            "another --output."
        )
    # The rename would replace the link, and leave what it leads to.
    if output.is_symlink():
        raise ValueError(
            f"{str(output)!r} is a link, which isn't replaced: name the folder itself."
        )
    # such as a run, or the base model
    if output.exists() and (not _is_exported(output) or (output / MANIFEST).exists()):
        raise ValueError(
            f"{str(output)!r} isn't an exported model, so it isn't replaced; take another --output."
        )
    if output.exists() and not overwrite:
        raise ValueError(f"{str(output)!r} exists; take another --output, or --overwrite true.")


def _is_exported(folder: Path) -> bool:
    """Whether this package has written the model in `folder`."""
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as content:
            # The metadata comes first in such a file.
            if json.dumps(files.OF_WEIGHTS, separators=(",", ":")).encode() in content.read(1024):
                return True
    return False
