"""The folder beside an output in which it is made, and which a later start of the same preparation goes on with."""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fabric_llm.base import files
from fabric_llm.base.ending import uninterrupted
from fabric_llm.base.failpoints import failpoint
from fabric_llm.base.faults import BAD_INPUT, SAVE_FAILED, UNWRITABLE, Fault
from fabric_llm.prepare.encoding import lock
from fabric_llm.prepare.inputs import work_folder_of

KEY = "key.json"  # what the pieces in the folder were made of


@contextmanager
def work_folder(output: Path, shared: bool, is_encoded: Callable[[Path], bool]) -> Iterator[Path]:
    """The work folder, locked. It is kept after a failure if a later start can use it.

    shared: others may work in it, on other pieces. is_encoded: whether all pieces are done.

    Raises Fault (73) where it can't be made, or another process works in it.
    """
    folder = work_folder_of(output)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        code = SAVE_FAILED if error.errno in (errno.ENOSPC, errno.EDQUOT) else UNWRITABLE
        raise Fault(f"output {output} cannot be written: {error.strerror}.", code) from error
    try:
        lock(descriptor, f"output {output} is being prepared by another process, in {folder}", shared)
        if (folder / "old").exists() and not output.exists():  # killed between the two renames
            (folder / "old").rename(output)
        try:
            yield folder
        except BaseException as error:
            is_mistake = isinstance(error, ValueError) and getattr(error, "code", BAD_INPUT) == BAD_INPUT
            if not shared and (not has_work(folder) or is_mistake and is_encoded(folder)):
                _remove(folder)
            raise
    finally:
        os.close(descriptor)


def _remove(folder: Path) -> None:
    """Killed in the middle of it, what is left looks like the work of others, which the next start throws away."""
    with suppress(OSError):
        (folder / KEY).unlink(missing_ok=True)
        files.fsync(folder)
    shutil.rmtree(folder, ignore_errors=True)


def has_work(folder: Path) -> bool:
    """Whether a later start finds something done."""
    return next(folder.glob("[0-9]*.json"), None) is not None


def begin(folder: Path, key: dict[str, Any], shared: bool) -> bool:
    """Empty the folder unless it was begun with the same `key`; returns whether something was thrown away.

    Raises ValueError for another key where others may be working in it.
    """
    try:
        former = json.loads((folder / KEY).read_bytes())
    except (OSError, ValueError):
        former = None
    if former == json.loads(json.dumps(key)):
        return False
    if shared and former is not None:
        differing = " and ".join(name for name in key if former.get(name) != json.loads(json.dumps(key[name])))
        raise ValueError(
            f"the other shards in {folder} were begun with other inputs or flags ({differing}): start all of them alike,"
            f" or remove that folder"
        )
    thrown_away = has_work(folder)
    if not shared:
        (folder / KEY).unlink(missing_ok=True)  # first, see `_remove`
        files.fsync(folder)
        for path in folder.iterdir():
            if path.name != "lock":
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    files.write_atomically(folder / KEY, json.dumps(key), durable=True)
    return thrown_away


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder to fill, which becomes `folder` at the end unless another process has made that in the meantime."""
    filling = folder.with_name(f"{folder.name}-{secrets.token_hex(4)}")
    filling.mkdir()
    try:
        yield filling
        with suppress(FileExistsError, OSError):
            filling.rename(folder)
        if not folder.is_dir():
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(folder))
    finally:
        shutil.rmtree(filling, ignore_errors=True)


def publish(folder: Path, made: Path, output: Path) -> None:
    """Rename `made`, in the work folder, to `output`. What stood there is removed last, with the work folder."""
    with uninterrupted():
        if output.exists():
            output.rename(folder / "old")
        failpoint("prepare.publish")
        made.rename(output)
        files.fsync(output.parent)
        _remove(folder)
