"""The entries of a manifest, made while other files are still being written."""

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

from fabric_llm.base.files import THREADS, Entry, fsync, sha256


def describe(folder: Path, names: Iterable[str]) -> dict[str, Entry]:
    """A manifest's entries for files in `folder`, which are on the disk when this returns."""
    with Describing(folder) as describing:
        describing.start(names)
        return describing.entries()


class Describing:
    """Makes entries for complete files in a folder while others are still being written."""

    def __init__(self, folder: Path, mark: Callable[[], Any] = lambda: None) -> None:
        """mark: called as files are written and described, which may take long on a slow disk."""
        self.folder, self.mark = folder, mark
        self.pool = ThreadPoolExecutor(2 * THREADS)  # half of them may be waiting for the disk
        self.started: dict[str, tuple[Future[None], Future[str]]] = {}  # on the disk, and hashed

    def start(self, names: Iterable[str]) -> None:
        """Start to hash these complete files and to flush them, unless that was started before."""
        self.mark()
        # Sorted, so that the manifest has the same order each time.
        for name in sorted(set(names) - self.started.keys()):
            path = self.folder / name
            self.started[name] = self.pool.submit(fsync, path), self.pool.submit(sha256, path)

    def entries(self) -> dict[str, Entry]:
        """Wait for all files, and return their entries. Raises what hashing or flushing raised."""
        entries = {}
        for name, (flushed, hashed) in self.started.items():
            # A file is listed only once it is on the disk.
            flushed.result()
            entries[name] = {
                "bytes": (self.folder / name).stat().st_size,
                "sha256": hashed.result(),
            }
            self.mark()
        return entries

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        # After an error no thread may still read files that the caller removes.
        self.pool.shutdown(wait=True, cancel_futures=True)
