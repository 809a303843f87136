"""Files: durable and atomic writes, and the manifest of a folder, which shows files that are truncated, changed or foreign.

A manifest, of a checkpoint or a prepared dataset, is JSON: {"files": {name: {"bytes", "sha256"}}, ..., "sha256": its own}.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

from fabric_llm.base.faults import NO_CHECKPOINT, REFUSED, SAVE_FAILED, UNWRITABLE, Fault

MANIFEST = "MANIFEST.json"
THREADS = 4  # hashing and reading both release the GIL
ROOM_BYTES = 16 * 2**20  # for tokenizer, configuration, probe and manifest
LARGEST_MANIFEST_BYTES = 256 * 2**20
CODE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".distcp", ".metadata", ".npy", ".joblib", ".py")
Entry = dict[str, Any]  # bytes: int, sha256: hexadecimal


def sha256(path: Path) -> str:
    """Hash of a file's content, hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fsync(path: Path) -> None:
    """Flush a file or directory to the disk. Not every file system can flush a directory, which is no error."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def write_atomically(path: Path, content: bytes | str, durable: bool = False) -> None:
    """Replace the file `path` as a whole: a reader, or a kill, finds either the old content or the new.

    durable: it is on the disk when this returns. Raises OSError, and then leaves the old content and no other file behind.
    """
    temporary = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    try:
        with temporary.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    if durable:
        fsync(path.parent)


def describe(folder: Path, names: Iterable[str]) -> dict[str, Entry]:
    """The manifest's entries of files in `folder`. The files are on the disk when this returns."""
    with Describing(folder) as describing:
        describing.start(names)
        return describing.entries()


class Describing:
    """Makes the entries of files in a folder while other files are still being written there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.hashing = ThreadPoolExecutor(THREADS)
        self.syncing = ThreadPoolExecutor(THREADS)  # its own pool, so that hashing doesn't wait for the disk
        self.hashes: dict[str, Future[str]] = {}
        self.written: list[Future[None]] = []

    def start(self, names: Iterable[str]) -> None:
        """Start to hash these complete files and to flush them, unless that was started before."""
        for name in sorted(set(names) - self.hashes.keys()):
            self.written.append(self.syncing.submit(fsync, self.folder / name))
            self.hashes[name] = self.hashing.submit(sha256, self.folder / name)

    def entries(self) -> dict[str, Entry]:
        """Wait for all files. Raises what hashing or flushing any of them raised."""
        for future in self.written:
            future.result()
        return {
            name: {"bytes": (self.folder / name).stat().st_size, "sha256": future.result()}
            for name, future in self.hashes.items()
        }

    def __enter__(self) -> Describing:
        return self

    def __exit__(self, *error: object) -> None:
        self.hashing.shutdown(wait=True, cancel_futures=True)
        self.syncing.shutdown(wait=True, cancel_futures=True)


def files_in(folder: Path) -> list[str]:
    """Names of all files below `folder`, relative to it. Raises Fault (77) for a link, which may lead anywhere."""
    names = []
    for parent, folders, files in os.walk(folder):
        for name in [*folders, *files]:
            path = Path(parent, name)
            if path.is_symlink():
                raise Fault(f"{str(path)!r} is a link, which may lead out of its folder: refused.", REFUSED)
        names += [str(Path(parent, name).relative_to(folder)) for name in files]
    return names


def encode(document: dict[str, Any]) -> bytes:
    """The content of a manifest's file, with the hash of the manifest itself."""
    return (json.dumps({**document, "sha256": _own_hash(document)}, indent=2) + "\n").encode()


def is_sealed(document: dict[str, Any]) -> bool:
    """Whether a decoded manifest holds the right hash of itself."""
    rest = dict(document)
    return rest.pop("sha256", None) == _own_hash(rest)


def _own_hash(document: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def read(folder: Path) -> dict[str, Any]:
    """The manifest of `folder`. Raises Fault (66) for one that was changed, (77) for names that lead outside."""
    damaged = Fault(f"{str(folder)!r} is damaged: {MANIFEST} isn't what was written.", NO_CHECKPOINT)
    path = folder / MANIFEST
    try:
        if path.is_symlink():
            raise Fault(f"{str(path)!r} is a link, which may lead out of its folder: refused.", REFUSED)
        if path.stat().st_size > LARGEST_MANIFEST_BYTES:
            raise damaged
        content = path.read_bytes()
        document = json.loads(content)
        document.pop("sha256", None)
        if content != encode(document):
            raise damaged
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise (error if isinstance(error, Fault) else damaged) from error
    check_entries(document.get("files"), path, damaged)
    return document


def check_entries(entries: Any, where: Path, damaged: Fault) -> None:
    """Check the form of `entries`, read from the file `where`: whoever changes a manifest can seal it anew.

    Raises `damaged`, or Fault (77) from `check_name`.
    """
    try:
        whole = all(type(e["bytes"]) is int and isinstance(e["sha256"], str) for e in entries.values())
    except (KeyError, TypeError, AttributeError):
        whole = False
    if not whole:
        raise damaged
    for name in entries:
        check_name(name, where)


def check_name(name: str, where: Path) -> None:
    """Raises Fault (77) unless `name`, read from the file `where`, names a file below the folder of `where`."""
    plain = PurePosixPath(name)
    if plain.is_absolute() or ".." in plain.parts or str(plain) != name or "\\" in name or "\0" in name or name == ".":
        raise Fault(f"{str(where)!r} names {name!r}, outside its folder: refused.", REFUSED)


def weight_map(index: Path) -> dict[str, str]:
    """{tensor: file beside `index`}, read from a `*.index.json` of Hugging Face weights.

    Raises ValueError where it can't be read, Fault (77) for a file outside its folder.
    """
    try:
        if not index.is_file():  # a pipe would block
            raise ValueError("no file")
        files = {str(name): str(file) for name, file in json.loads(index.read_bytes())["weight_map"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{str(index)!r} can't be read as an index of weights.") from error
    for file in sorted(set(files.values())):
        check_name(file, index)
    return files


def check_folder(folder: Path, hashes: bool) -> dict[str, Any]:
    """Check that `folder` holds exactly the files of its manifest, with their sizes (and hashes). Returns the manifest.

    Raises Fault for the first file that was changed, is missing or isn't listed (66), or that could run code (77).
    """
    document = read(folder)
    listed, there = document["files"], files_in(folder)
    for name in sorted({*there, *listed}):
        if name.lower().endswith(CODE_SUFFIXES):
            raise Fault(f"{str(folder / name)!r} could run code when opened (pickle or Python): refused.", REFUSED)
    if foreign := sorted(set(there) - listed.keys() - {MANIFEST}):
        raise Fault(f"{str(folder)!r} is damaged: {foreign[0]} isn't listed in its {MANIFEST}.", NO_CHECKPOINT)
    check_files(folder, listed, hashes, f"{str(folder)!r} is damaged", NO_CHECKPOINT)
    return document


def check_files(folder: Path, entries: dict[str, Entry], hashes: bool, wrong: str, code: int) -> None:
    """Compare files with their entries. Raises Fault("`wrong`: NAME ...", `code`) for the first that differs."""

    def hashed(name: str) -> str:
        try:
            return sha256(folder / name)
        except OSError as error:  # such as a bad sector, or no permission
            raise Fault(f"{wrong}: {name} can't be read ({error.strerror}).", code) from error

    for name, entry in entries.items():
        file = folder / name
        if not file.is_file():
            raise Fault(f"{wrong}: {name} is missing.", code)
        if file.stat().st_size != entry["bytes"]:
            raise Fault(f"{wrong}: {name} has {file.stat().st_size} bytes, not {entry['bytes']}.", code)
    if not hashes:
        return
    with ThreadPoolExecutor(THREADS) as pool:
        for (name, entry), found in zip(entries.items(), pool.map(hashed, entries)):
            if found != entry["sha256"]:
                raise Fault(f"{wrong}: the content of {name} has changed.", code)


def room(folder: Path, needed_bytes: int, what: str, advice: str) -> None:
    """Raises Fault (74) unless the disk that holds `folder` has `needed_bytes`, 1 % and ROOM_BYTES free."""
    needed, free = int(needed_bytes * 1.01) + ROOM_BYTES, shutil.disk_usage(folder).free
    if free < needed:
        raise Fault(
            f"{what} needs {needed / 2**30:,.2f} GiB, but {str(folder)!r} has {free / 2**30:,.2f} GiB free: {advice}.",
            SAVE_FAILED,
            retryable=False,
        )


def writable(output: Path) -> None:
    """Raises Fault (73) where `output` can't be created. Leaves nothing behind."""
    place = output.absolute().parent
    while not os.path.lexists(place):
        place = place.parent
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        raise Fault(f"output {output} cannot be written: {error.strerror}.", UNWRITABLE) from error
