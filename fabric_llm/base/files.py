"""Files: durable and atomic writes, manifests of folders, by which changes are noticed, and names
of checkpoints.

A manifest, of a checkpoint or a prepared dataset, is JSON: {"files": {name: {"bytes", "sha256"}},
..., "sha256": its own}.
"""

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any, Optional

from fabric_llm.base.faults import NO_CHECKPOINT, REFUSED, SAVE_FAILED, UNWRITABLE, Fault

MANIFEST = "MANIFEST.json"
WEIGHT_INDEX = "model.safetensors.index.json"  # which of several files has a tensor
# Metadata of safetensors files. The second tells what this package wrote from other models.
OF_WEIGHTS = {"format": "pt", "written_by": "fabric_llm"}
STEP_NAME = r"step-\d{8,}"  # of a checkpoint
THREADS = 4  # hashing and reading both release the GIL
ROOM_BYTES = 16 * 2**20  # for tokenizer, configuration, probe and manifest
LARGEST_MANIFEST_BYTES = 256 * 2**20
# Files that may run code when they are opened. Names are compared in lower case.
CODE_SUFFIXES = (
    ".bin",
    ".pt",
    ".pth",
    ".pkl",
    ".pickle",
    ".ckpt",
    ".distcp",
    ".metadata",
    ".npy",
    ".joblib",
    ".py",
)
Entry = dict[str, Any]  # bytes: int, sha256: hexadecimal


def sha256(path: Path) -> str:
    """Hash of a file's content, hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fsync(path: Path) -> None:
    """Flush a file or directory to the disk. A file system that can't flush directories is no
    error."""
    # Read-only, as a directory can't be opened otherwise.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def write_atomically(path: Path, content: bytes | str, durable: bool = False) -> None:
    """Replace the file `path` as a whole: readers find the old content or the new, also after a
    kill.

    durable: it is on the disk when this returns. Raises OSError, and then keeps the old content and
    leaves no other file.
    """
    # In the same folder: a rename is atomic only within a file system.
    temporary = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    try:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)
        # The content must be on the disk before the name: a crash may else leave an empty file.
        if durable:
            fsync(temporary)
        temporary.replace(path)
    # Also on Ctrl-C, so that no temporary file stays.
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    # The rename itself is in the directory.
    if durable:
        fsync(path.parent)


def json_lines(file: Path, having: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """(line, the object in it) for each line of a file, if there is one.

    The object is {} if a kill cut the line off, or it isn't ours. having: only lines with this
    text, since it takes long to decode all.
    """
    if file.is_file():  # a pipe blocks whoever opens it
        with file.open(errors="replace") as lines:
            for line in (line for line in lines if having in line):
                # The line after a broken one is read as usual.
                record = None
                with suppress(ValueError, RecursionError):
                    record = json.loads(line)
                yield line, record if isinstance(record, dict) else {}


def instead_of_content(path: Path) -> Optional[str]:
    """What a downloaded file is instead of itself, and what to do, in words; None for all
    others."""
    start = b""
    if path.is_file():
        with path.open("rb") as file:
            # A pointer or a page is recognised by its first bytes.
            start = file.read(256).lstrip().lower()
    if start.startswith(b"version https://git-lfs"):
        return "a pointer of git-lfs, not the file itself: fetch that with git lfs pull"
    if start.startswith((b"<!doctype html", b"<html")):
        return (
            "a web page, such as one that asks for a login, not the file itself: download it anew"
        )
    return None


def files_in(folder: Path) -> list[str]:
    """Names of all files below `folder`, relative to it. Raises Fault (77) for a link, which may
    lead anywhere."""
    return [
        str(path.relative_to(folder)) for path in folder.rglob("*") if not no_link(path).is_dir()
    ]


def no_link(path: Path) -> Path:
    """`path`. Raises Fault (77) where it is a link."""
    if path.is_symlink():
        raise Fault(f"{str(path)!r} is a link, which may lead anywhere: refused.", REFUSED)
    return path


def encode(document: dict[str, Any]) -> bytes:
    """A manifest as the content of its file, with its own hash."""
    # Sorted keys, since the hash must not depend on the order in which entries were made.
    own_hash = hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
    return (json.dumps({**document, "sha256": own_hash}, indent=2) + "\n").encode()


def is_sealed(document: dict[str, Any]) -> bool:
    """Whether a decoded manifest has the right hash of itself."""
    return document == json.loads(
        encode({key: value for key, value in document.items() if key != "sha256"})
    )


def read(folder: Path) -> dict[str, Any]:
    """The manifest of `folder`. Raises Fault (66) if it was changed, (77) for names that lead
    outside."""
    damaged = Fault(
        f"{str(folder)!r} is damaged: {MANIFEST} isn't what was written.", NO_CHECKPOINT
    )
    path, document = no_link(folder / MANIFEST), None
    # Any kind of broken content ends as the one Fault, not as an error of the JSON reader.
    with suppress(OSError, ValueError, TypeError, AttributeError, RecursionError):
        content = path.read_bytes() if path.stat().st_size <= LARGEST_MANIFEST_BYTES else b""
        decoded = json.loads(content)
        decoded.pop("sha256", None)
        # Compared byte by byte, which covers the hash and leaves no second way to write it.
        document = decoded if content == encode(decoded) else None
    if document is None:
        raise damaged
    check_entries(document.get("files"), path, damaged)
    return document


def check_entries(entries: Any, where: Path, damaged: Fault) -> None:
    """Raises `damaged` if `entries` of the manifest `where` aren't entries, although sealed, and
    Fault (77) for their names."""
    # Whoever changes a manifest can also seal it again, so its entries are checked one by one.
    if not isinstance(entries, dict):
        raise damaged
    for name, entry in entries.items():
        if not isinstance(entry, dict):
            raise damaged
        # `type` instead of isinstance, which takes JSON's true for an int.
        if type(entry.get("bytes")) is not int or type(entry.get("sha256")) is not str:
            raise damaged
        check_name(name, where)


def check_name(name: str, where: Path) -> None:
    """Raises Fault (77) unless `name`, read from the file `where`, names a file below the folder of
    `where`."""
    # `str(plain) != name` refuses "./a", "a//b" and the like, which name one file in two ways.
    plain = PurePosixPath(name)
    if (
        plain.is_absolute()
        or ".." in plain.parts
        or str(plain) != name
        or "\\" in name
        or "\0" in name
        or name == "."
    ):
        raise Fault(f"{str(where)!r} names {name!r}, outside its folder: refused.", REFUSED)


def weight_map(index: Path) -> dict[str, str]:
    """{tensor: file beside `index`}, read from a `*.index.json` of Hugging Face weights.

    Raises ValueError if it can't be read, Fault (77) for a file outside its folder.
    """
    try:
        content = index.read_bytes() if index.is_file() else b""  # a pipe would block
        files = {str(name): str(file) for name, file in json.loads(content)["weight_map"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{str(index)!r} can't be read as an index of weights.") from error
    # An index is from outside: its names must not lead out of the folder, either.
    for file in sorted(set(files.values())):
        check_name(file, index)
    return files


def check_folder(folder: Path, hashes: bool) -> dict[str, Any]:
    """Check that `folder` holds exactly the files of its manifest, with their sizes (and hashes).
    Returns the manifest.

    Raises Fault for the first file that was changed, is missing or isn't listed (66), or that could
    run code (77).
    """
    document = read(folder)
    # Code is looked for first: such a file is refused even if its hash is right.
    listed, there = document["files"], files_in(folder)
    if code := sorted(name for name in {*there, *listed} if name.lower().endswith(CODE_SUFFIXES)):
        raise Fault(
            f"{str(folder / code[0])!r} could run code when opened (pickle or Python): refused.",
            REFUSED,
        )
    if foreign := sorted(unlisted(folder, listed)):
        raise Fault(
            f"{str(folder)!r} is damaged: {foreign[0]} isn't listed in its {MANIFEST}.",
            NO_CHECKPOINT,
        )
    check_files(folder, listed, hashes, f"{str(folder)!r} is damaged", NO_CHECKPOINT)
    return document


def unlisted(folder: Path, listed: Mapping[str, Any]) -> set[str]:
    """The names of files in `folder` that nothing vouches for, since its manifest has no hash of
    them."""
    # An index of weights holds no more than names of files that are listed. Older checkpoints
    # didn't list it.
    others = set(files_in(folder)) - listed.keys() - {MANIFEST, WEIGHT_INDEX}
    # Nothing opens hidden files, such as .DS_Store and .nfs*, which systems leave anywhere.
    return {name for name in others if not re.search(r"(^|/)\.", name)}


def check_files(
    folder: Path, entries: dict[str, Entry], hashes: bool, wrong: str, code: int
) -> None:
    """Compare files with their entries. Raises Fault("`wrong`: NAME ...", `code`) for the first
    that differs."""
    for name, entry in entries.items():
        file = folder / name
        if not file.is_file():
            raise Fault(f"{wrong}: {name} is missing.", code)
        if file.stat().st_size != entry["bytes"]:
            raise Fault(
                f"{wrong}: {name} has {file.stat().st_size} bytes, not {entry['bytes']}.", code
            )
    # Names and sizes take no time, and find most damage. Hashing reads everything.
    if not hashes:
        return
    pool = ThreadPoolExecutor(THREADS)
    try:
        # Files are hashed at the same time, but judged in the order of the manifest.
        hashed = {name: pool.submit(sha256, folder / name) for name in entries}
        for name, entry in entries.items():
            if hashed[name].result() != entry["sha256"]:
                raise Fault(f"{wrong}: the content of {name} has changed.", code)
    except OSError as error:  # such as a bad sector, or no permission
        raise Fault(f"{wrong}: {name} can't be read ({error.strerror}).", code) from error
    finally:
        # After the first difference the other files needn't be read.
        pool.shutdown(cancel_futures=True)


def size(count: float) -> str:
    """A number of bytes in words."""
    return f"{count / 2**30:,.2f} GiB" if count >= 2**30 else f"{count / 2**20:,.1f} MiB"


def room(folder: Path, needed_bytes: int, what: str, advice: str) -> None:
    """Raises Fault (74) unless the disk that holds `folder` has `needed_bytes`, 1 % and ROOM_BYTES
    free."""
    needed, free = int(needed_bytes * 1.01) + ROOM_BYTES, shutil.disk_usage(folder).free
    if free < needed:
        raise Fault(
            f"{what} needs {size(needed)}, of which {size(needed - needed_bytes)} are a margin, "
            f"but {str(folder)!r} has {size(free)} free: {advice}.",
            SAVE_FAILED,
            retryable=False,
        )


def writable(output: Path, wrong: str = "") -> None:
    """Raises Fault (73) if `output` can't be created. Leaves nothing behind. wrong: how its
    sentence begins."""
    # The nearest folder that exists is where the first new one would be made.
    place = output.absolute().parent
    try:
        while not _is_there(place):
            place = place.parent
        # Permission bits don't tell it, for example on a file system that is read-only.
        tempfile.TemporaryFile(dir=place).close()
    except OSError as error:
        wrong = wrong or f"output {output} cannot be written"
        raise Fault(f"{wrong}: {error.strerror}.", UNWRITABLE) from error


def _is_there(place: Path) -> bool:
    """Raises PermissionError in a folder that can't be searched, unlike os.path.lexists."""
    try:
        place.lstat()
    except PermissionError:
        raise
    except OSError:
        return False
    return True


def require_name(output: Path, flag: str) -> None:
    """Raises Fault (2) where `output`, which a flag gives, can't be a file, (73) where it can't be
    written."""
    writable(output)
    if output.is_dir() or not output.absolute().parent.is_dir():
        raise Fault(f"{flag} {str(output)!r} must name a file in a folder that is there.")


def step_of(path: Path) -> int:
    """checkpoints/RUN/step-00000100 -> 100"""
    return int(path.name.removeprefix("step-"))


def step_directories(run_directory: Path) -> list[Path]:
    """All directories with a checkpoint's name, in the order of steps, not of times."""
    # A save that isn't published, or was moved aside, has another name.
    directories = [
        p for p in run_directory.glob("step-*") if re.fullmatch(STEP_NAME, p.name) and p.is_dir()
    ]
    return sorted(directories, key=step_of)


def checkpoints(run_directory: Path) -> list[Path]:
    """The complete checkpoints of a run, in the order of steps."""
    return [path for path in step_directories(run_directory) if (path / MANIFEST).is_file()]


def latest(run_directory: Path) -> Optional[Path]:
    """The complete checkpoint with the highest step, None if there is none."""
    return next(reversed(checkpoints(run_directory)), None)


def remove(path: Path) -> None:
    """A folder with all that is in it, or a link itself."""
    if path.is_symlink() or not path.is_dir():
        path.unlink()
    else:
        shutil.rmtree(path)
