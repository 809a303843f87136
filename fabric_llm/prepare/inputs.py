"""What --input names, and checks of all arguments of prepare_data.py.

Nothing here imports torch, datasets or numpy, which take seconds, so that mistakes are told at once. Every check raises
ValueError.
"""

from __future__ import annotations

import fnmatch
import glob
import os
import re
import stat
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

from fabric_llm.base.names import is_path, nearest_of
from fabric_llm.prepare import formats
from fabric_llm.prepare.formats import DEFAULT_PATTERNS

LONGEST_SEPARATOR = 1000  # bytes
SMALLEST_VOCABULARY = 257  # 256 bytes and the end of a text
NOWHERE = "input {} is neither a file or folder here nor a dataset that can be read from the hub"


def preparation(
    inputs: Sequence[str | Path],
    tokenizer: Optional[str],
    train_tokenizer: Optional[int],
    context_length: int,
    validation_fraction: float,
    pattern: Sequence[str],
    num_workers: Optional[int] = None,
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
    if num_workers is not None and num_workers < 1:
        raise ValueError(f"num_workers must be at least 1, got {num_workers}")
    if not 0 <= validation_fraction < 1:
        raise ValueError(f"validation_fraction must be at least 0 and less than 1, got {validation_fraction}")


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
        raise ValueError(
            f"output {output} exists and is not empty: pass --overwrite true to replace it, or name another"
        )
    # A typo such as `--output ~ --overwrite` must not delete anyone's files.
    if not (output / "manifest.json").is_file() or not (output / "dataset_dict.json").is_file():
        raise ValueError(f"output {output} holds no prepared dataset, so it is not overwritten: remove it yourself")


@dataclass(frozen=True)
class Source:
    """A file, dataset folder or hub dataset."""

    name: str
    kind: str  # one of documents.READERS
    bytes: Optional[int]  # None for a hub dataset
    modified_ns: int = 0


@dataclass
class Found:
    """Everything that is read, and what is said of it."""

    sources: list[Source] = field(default_factory=list)
    not_read: Counter = field(default_factory=Counter)  # files of folders, by suffix
    hidden: list[str] = field(default_factory=list)  # files and folders that are left out for their names
    # What pieces.plan notes:
    own_validation: list[str] = field(default_factory=list)  # datasets whose validation split stays theirs
    left_out: list[str] = field(default_factory=list)  # splits
    split_texts: list[str] = field(default_factory=list)  # files that are split at blank lines without being told to
    whole_texts: list[str] = field(default_factory=list)  # files that would be, and have no blank line


def find_sources(
    inputs: Sequence[str | Path], *, pattern: Sequence[str], exclude: Sequence[str] = (), output: Path
) -> Found:
    """The sources that `inputs` name, in order. No text is read yet.

    output: a resolved path, which is left out where it lies inside an input folder.

    Raises ValueError for an input that doesn't exist, one that can't hold text, a folder without a matching file, and a file
    that two inputs name.
    """
    found, origin = Found(), {}
    for given in (path for name in inputs for path in _expanded(str(name))):
        for source in _sources_of(given, pattern, exclude, output, found):
            # A text in both train and validation would make the validation loss meaningless.
            path = os.path.abspath(source.name)
            if path in origin:
                raise ValueError(
                    f"{source.name} comes in twice, by the inputs {origin[path]} and {given}: name it once"
                )
            origin[path] = given
            found.sources.append(source)
    if list(pattern) != DEFAULT_PATTERNS:
        found.not_read.clear()  # they were not wanted
    return found


def _sources_of(given: str, pattern: Sequence[str], exclude: Sequence[str], output: Path, found: Found) -> list[Source]:
    if not os.path.exists(given):
        require_hub_name(given)
        return [Source(given, "hub", None)]  # pieces.plan asks the hub
    if os.path.isfile(given):
        formats.named_file(given)
        return [_file_source(given)]
    if any(os.path.isfile(os.path.join(given, name)) for name in ("dataset_dict.json", "state.json")):
        files = [file.stat() for file in Path(given).rglob("*.arrow")]  # which `datasets.save_to_disk` wrote
        newest = max((file.st_mtime_ns for file in files), default=0)
        return [Source(given, "dataset", sum(file.st_size for file in files), newest)]
    before = len(found.hidden)
    sources = [_file_source(path) for path in _files_of(given, pattern, exclude, output, found)]
    if not sources:
        hidden = len(found.hidden) - before
        left_out = f" ({hidden:,} hidden files and folders were left out: name them with --input)" if hidden else ""
        raise ValueError(
            f"no file in {given} matches {formats.in_words(list(pattern))}: choose others with --pattern{left_out}"
        )
    return sources


def _file_source(path: str) -> Source:
    formats.require_package(path)
    status = os.stat(path)
    return Source(path, formats.kind_of(path), status.st_size, status.st_mtime_ns)


def _expanded(given: str) -> list[str]:
    """The paths that a glob stands for, such as 'corpus/*.jsonl', which the shell hasn't expanded; else `given` itself."""
    found = [given]
    if not os.path.lexists(given) and glob.has_magic(given):
        found = sorted(glob.glob(given, recursive=True))
    if not found:
        raise ValueError(f"input {given}: no file or folder here has such a name")
    for path in found:
        if kind := _what_cannot_be_read(path):
            raise ValueError(f"input {path} is {kind}: name a file, a folder or a dataset on the hub")
    return found


def _what_cannot_be_read(path: str) -> Optional[str]:
    """What a path is that is neither a file nor a folder: opening a pipe would wait for whoever writes into it."""
    if os.path.islink(path) and not os.path.exists(path):
        return f"a link to {os.readlink(path)}, which leads nowhere"
    if not os.path.exists(path) or os.path.isfile(path) or os.path.isdir(path):
        return None
    mode = os.stat(path).st_mode
    return "a pipe" if stat.S_ISFIFO(mode) else "a socket" if stat.S_ISSOCK(mode) else "a device"


def separator(given: Optional[str]) -> Optional[str]:
    """--document_separator as a regular expression: None if it wasn't given, "" for `none`. Raises ValueError."""
    if given is None or given == "none":
        return None if given is None else ""
    escapes = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\"}
    text = re.sub(r"\\([ntr\\])", lambda found: escapes[found[1]], given)
    if not 0 < len(text.encode()) <= LONGEST_SEPARATOR:
        raise ValueError(f"document_separator must have 1 to {LONGEST_SEPARATOR} bytes, or be none, got {given!r}")
    return re.escape(text)


def shard(given: Optional[str]) -> Optional[tuple[int, int]]:
    """--shard K/N as (K - 1, N). Raises ValueError."""
    if given is None:
        return None
    found = re.fullmatch(r"(\d+)/(\d+)", given)
    if not found or not 1 <= int(found[1]) <= int(found[2]):
        raise ValueError(f"shard must be K/N, such as 1/8 to 8/8 for eight machines, got {given}")
    return int(found[1]) - 1, int(found[2])


def require_hub_name(name: str) -> None:
    """Raises ValueError for what can't be the name of a dataset on the hub, such as a mistyped path, without asking it."""
    if found := re.match(r"(?:https?://)?(?:huggingface\.co|hf\.co)/datasets/([\w.-]+/[\w.-]+)", name):
        raise ValueError(f"{NOWHERE.format(name)}: it is an address; take --input {found[1]}")
    near = nearest_of(Path(name), files=True)
    is_of_hub = re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?(:[^/:]+)?", name) and not _matcher(DEFAULT_PATTERNS)(
        name.lower()
    )
    if not is_of_hub or is_path(name) or "/" not in name and near:
        raise ValueError(f"{NOWHERE.format(name)}.{near}" if near else NOWHERE.format(name))


def _files_of(folder: str, pattern: Sequence[str], exclude: Sequence[str], output: Path, found: Found) -> Iterator[str]:
    """The matching files below `folder`, in order. `output`, a resolved path, and its work folder are left out.

    Left out, too, are files and folders whose names begin with a dot, such as .git and .ipynb_checkpoints, which holds copies
    of what is beside it. A pattern that begins with a dot takes such files, and an input that names such a folder takes it.
    """
    left_out = {str(output), str(work_folder_of(output))}
    matches = _matcher(pattern)
    for root, walked, names in os.walk(folder, onerror=_refuse):
        directories = [
            name
            for name in walked
            if name not in exclude and os.path.realpath(os.path.join(root, name)) not in left_out
        ]
        found.hidden += [os.path.join(root, name) for name in sorted(directories) if name.startswith(".")]
        walked[:] = sorted(name for name in directories if not name.startswith("."))
        for name in sorted(names):
            path = os.path.join(root, name)
            if matches(name.lower()) and os.path.isfile(path):
                yield path
            elif name.startswith("."):
                found.hidden.append(path)
            elif matches(name.lower()):
                found.not_read["pipe, socket, device or dead link"] += 1
            else:
                found.not_read[os.path.splitext(name)[1].lower() or "without a suffix"] += 1


def work_folder_of(output: Path) -> Path:
    """The folder beside `output`, a resolved path, in which it is made: on the same file system."""
    return output.with_name(f".{output.name}.preparing")


def _matcher(pattern: Sequence[str]) -> Callable[[str], Any]:
    """Whether a name in lower case matches one of the patterns, as a shell has it: a dot at its beginning only by a dot."""
    one_by_one = (("" if one.startswith(".") else r"(?!\.)") + fnmatch.translate(one.lower()) for one in pattern)
    return re.compile("|".join(one_by_one)).match


def _refuse(error: OSError) -> None:
    # Without this function os.walk silently skips folders that it can't list.
    raise ValueError(f"folder {error.filename} cannot be read: {error.strerror}") from error
