"""A folder beside an --output, in which one process at a time makes it until it is complete."""

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fabric_llm.base import files
from fabric_llm.base.ending import uninterrupted
from fabric_llm.base.failpoints import failpoint
from fabric_llm.base.faults import SAVE_FAILED, UNWRITABLE, Fault

LOCK, FORMER = "lock", "old"
KEY = "key.json"  # what other files in the folder were made of


def beside(output: Path) -> Path:
    """The work folder of `output`, a resolved path: on the same file system."""
    return output.with_name(f".{output.name}.preparing")


@contextmanager
def locked(output: Path) -> Iterator[Path]:
    """Make and lock the folder in which `output` is made.

    Raises Fault (73) where it can't be made, or another process works in it.
    """
    folder = files.no_link(beside(output))
    descriptor = _open_locked(folder, output)
    try:
        # Killed between the two renames, or after the second one.
        if has_former(output) and not output.exists():
            (folder / FORMER).rename(output)
        shutil.rmtree(folder / FORMER, ignore_errors=True)
        yield folder
    finally:
        # Closing the file releases the lock.
        os.close(descriptor)


def has_former(output: Path) -> bool:
    """Whether a kill between the two renames of `publish` has left the former `output` there."""
    return (beside(output) / FORMER).exists()


def _open_locked(folder: Path, output: Path) -> int:
    """The descriptor of the locked file in a work folder, which is made. The lock goes with the
    process that holds it, however that ends."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        code = SAVE_FAILED if error.errno in (errno.ENOSPC, errno.EDQUOT) else UNWRITABLE
        raise Fault(f"output {output} cannot be written: {error.strerror}.", code) from error
    try:
        lock(descriptor, f"output {output}")
        # Another process may have removed the folder between the two statements.
        is_there = os.path.samestat(os.fstat(descriptor), os.stat(folder / LOCK))
    except FileNotFoundError:
        is_there = False
    except BaseException:
        os.close(descriptor)
        raise
    if is_there:
        return descriptor
    os.close(descriptor)
    return _open_locked(folder, output)


def lock(descriptor: int, what: str) -> None:
    """Lock an open file until it is closed. Raises Fault (73) where another process has it, which
    makes `what`. Some file systems have no locks."""
    try:
        # The lock ends with the process, so that a killed one leaves none behind.
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sentence = f"{what} is being made by another process: wait for it, or end it."
        raise Fault(sentence, UNWRITABLE) from None
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise


def publish(complete: Path, output: Path) -> None:
    """Put what is `complete` in a work folder in the place of `output`, and remove the folder."""
    with uninterrupted():
        # A former output is removed with the folder, when the new one is in its place.
        if output.exists():
            output.rename(complete.parent / FORMER)
        # A kill between the two renames is mended by `locked` at the next start.
        failpoint("prepare.publish")
        complete.rename(output)
        files.fsync(output.parent)
        remove(complete.parent)


def remove(folder: Path) -> None:
    """Remove a work folder. Its lock goes last: then no other process has begun in it, whose files
    would be removed as well."""
    with suppress(OSError):
        remove_key(folder)
        for path in folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != LOCK:
                path.unlink()
        (folder / LOCK).unlink()
        folder.rmdir()


def remove_key(folder: Path) -> None:
    """First: after a kill in the middle, the next start doesn't take what is left in the folder for
    whole."""
    (folder / KEY).unlink(missing_ok=True)
    files.fsync(folder)
