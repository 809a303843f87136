"""From the mirror into a folder: the checkpoints that are there, a run's newest one, and whatever
folder with a manifest an address names.

Nothing that comes from there is trusted: names must stay below their folder, files that could run
code are refused, and every content is compared with the manifest's hash while it streams.
"""

import hashlib
import json
import re
import secrets
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Optional

from fabric_llm.base import files
from fabric_llm.base.failpoints import failpoint
from fabric_llm.base.faults import BAD_INPUT, NO_CHECKPOINT, REFUSED, Fault
from fabric_llm.base.files import CODE_SUFFIXES, MANIFEST, STEP_NAME, fsync, remove
from fabric_llm.base.names import shown
from fabric_llm.checkpoint.keep import METRICS, METRICS_UNDONE, SAMPLES, progress_or_nothing
from fabric_llm.mirror.address import is_address, require, require_there, split
from fabric_llm.mirror.download import OF_DATA, download, patiently, say_at_once, user_cache
from fabric_llm.mirror.store import Store

# Of a run directory, beside its checkpoints.
LOGS = (
    *("arguments.yaml", METRICS, METRICS_UNDONE, "events.jsonl", SAMPLES),
    "STATUS.json",
)


def steps(store: Store, run: str) -> list[str]:
    """Names of the checkpoints of a run, whole or not, oldest first. Raises what the store does."""
    names = [name for name in store.folders(run) if re.fullmatch(STEP_NAME, name)]
    return sorted(names, key=lambda name: files.step_of(Path(name)))


def is_whole(store: Store, run: str, name: str) -> bool:
    """Whether its manifest is there. Raises what the store does."""
    return store.size(f"{run}/{name}/{MANIFEST}") is not None


def checkpoints(store: Store, run: str) -> list[str]:
    """Names of the checkpoints of a run that are whole, oldest first. Raises Fault (74, 2)."""
    return patiently(
        store, lambda: [name for name in steps(store, run) if is_whole(store, run, name)]
    )


def pins(store: Store, run: str) -> set[str]:
    """Names of files that pin checkpoints (retention.is_pinned). Raises what the store does."""
    return {name for name in store.files(run) if re.fullmatch(rf"{STEP_NAME}\.pinned", name)}


def documents(store: Store, run: str, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """progress.json of checkpoints by name, {} of one that is damaged. Raises Fault (74, 2)."""
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        place = f"{run}/{name}/trainer/progress.json"
        content = patiently(store, lambda: store.content(place))
        # Read as a local one is, with the same checks.
        with TemporaryDirectory() as folder:
            (Path(folder) / "trainer").mkdir()
            (Path(folder) / "trainer" / "progress.json").write_bytes(content or b"")
            found[name] = progress_or_nothing(Path(folder))
    return found


def restore(
    store: Store,
    run: str,
    directory: Path,
    say: Callable[[str], Any] = print,
    only_logs: bool = False,
    replaces_logs: bool = False,
) -> Optional[Path]:
    """Fetch the newest whole checkpoint of `run` into the run directory `directory`, and the logs
    that it doesn't have. Returns the checkpoint there, None without one.

    only_logs: no checkpoint; returns None. replaces_logs: also those that are there, which are
    older. A checkpoint that is damaged is named with `say`, and the one before it is taken. Raises
    Fault: without room (74) or an answer (74, 2), or for what is refused for security (77).
    """
    if only_logs:
        _logs(store, run, directory)
        return None
    tried: set[str] = set()
    # Listed each time: a run that goes on meanwhile removes its oldest.
    while there := [name for name in checkpoints(store, run) if name not in tried]:
        tried.add(name := there[-1])
        target = directory / name
        if (target / MANIFEST).is_file():
            _logs(store, run, directory, replaces_logs)
            return target
        try:
            place = f"{run}/{name}"
            # Before the checkpoint has its name: a start that finds one here fetches nothing more.
            logs = partial(_logs, store, run, directory, replaces_logs)
            _folder(store, place, target, MANIFEST, before=logs)
            return target
        except Fault as fault:
            # Somebody may have tampered with it, so no other one is taken silently.
            if fault.code != NO_CHECKPOINT:
                raise
            say(f"Warning: {fault} The checkpoint before it is taken.")
    return None


def one(store: Store, run: str, name: str, directory: Path) -> Path:
    """Fetch the checkpoint `name` into the run directory. Raises Fault, as `restore` does."""
    _folder(store, f"{run}/{name}", directory / name, MANIFEST)
    return directory / name


def mend(store: Store, path: Path) -> None:
    """Replace the files of the checkpoint at `path` that aren't what its manifest says by those of
    its copy, which has the same manifest. Each is replaced at once, so that a kill does no harm.
    Raises Fault, as `restore` does, (66) where the copy is damaged as well."""
    place = f"{path.parent.name}/{path.name}"
    for name, entry in files.read(path)["files"].items():
        with suppress(Fault):
            files.check_files(path, {name: entry}, True, "", NO_CHECKPOINT)
            continue
        # A name that is swept where a kill leaves it.
        temporary = path.with_name(f".tmp-step-{secrets.token_hex(4)}")
        try:
            _file(store, f"{place}/{name}", temporary, entry)
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            temporary.replace(path / name)
        finally:
            temporary.unlink(missing_ok=True)
        fsync((path / name).parent)
    files.check_folder(path, hashes=False)  # what else is there isn't mended


def local(given: str, only_logs: bool = False) -> str:
    """The folder `given`, or that of what the address `given` names, see `folder_of`: in the user's
    cache, where it stays."""
    if not is_address(given):
        return given
    require_there(split(given)[0])
    return str(folder_of(given, user_cache(), only_logs))


def dataset(address: str, whole: bool = True) -> Path:
    """A folder in the cache with the dataset at `address`, of which `require` approves, fetched
    once for all processes of this machine. Other data under the same address is another folder.

    whole: with all files, rather than the manifest alone. Raises Fault: where there is none, or a
    file is damaged (2), without room or an answer (74), for what is refused for security (77).
    """
    from filelock import FileLock

    place, name = split(address)
    require_there(place)
    store = Store(place)
    content = patiently(store, lambda: store.content(f"{name}/{OF_DATA}"))
    if content is None:
        # Of a bucket that isn't there, only a list says so.
        patiently(store, lambda: store.folders(name))
        raise Fault(
            f"{address} holds no dataset that prepare_data.py wrote, with a {OF_DATA}: prepare it, "
            "or copy another one to a disk."
        )
    key = hashlib.sha256(address.rstrip("/").encode() + content).hexdigest()[:16]
    target = user_cache() / key / name
    # A folder of its own, since the other one holds all files once it is there.
    if not whole and not target.is_dir():
        target = user_cache() / f"{key}-manifest" / name
    target.parent.mkdir(parents=True, exist_ok=True)
    # One process fetches, and the others of this machine wait and find the folder.
    with FileLock(user_cache() / f"{key}.lock"):
        if not target.is_dir():
            for left in target.parent.glob(".tmp-*"):  # of a process that was killed
                remove(left)
            try:
                _folder(
                    store, name, target, OF_DATA, lambda _: whole, content=content, say=say_at_once
                )
            # Of a dataset, that is a mistake in the data.
            except Fault as fault:
                code = BAD_INPUT if fault.code == NO_CHECKPOINT else fault.code
                raise Fault(str(fault), code, fault.retryable) from fault
    return target


def folder_of(
    address: str,
    cache: Path,
    only_logs: bool = False,
    wanted: Callable[[str], bool] = lambda name: True,
    in_run: bool = False,
) -> Path:
    """A local folder with the checkpoint or the run (its newest checkpoint and its logs) at
    `address`, fetched once for all processes of this machine.

    only_logs: of a run. wanted(name): whether a file of the checkpoint is needed. in_run: as of a
    Store. Raises Fault: for a bad address (2), where there is nothing (66), and as `restore` does.
    """
    from filelock import FileLock

    require(address, "The address", is_folder=True)
    place, name = split(address)
    files.check_name(name, Path("address"))
    store = Store(place, in_run)
    content = patiently(store, lambda: store.content(f"{name}/{MANIFEST}"))
    # What is made anew under the same name is another folder, so that nobody's files change: also
    # a run with another newest checkpoint, as after a rewind.
    version = content
    if content is None and not only_logs:
        for newest in checkpoints(store, name)[-1:]:
            place_of = f"{name}/{newest}/{MANIFEST}"
            version = patiently(store, lambda: store.content(place_of))
    key = hashlib.sha256(address.encode() + (version or b"")).hexdigest()[:16]
    target = cache / key / name
    (cache / key).mkdir(parents=True, exist_ok=True)
    with FileLock(cache / f"{key}.lock"):
        for left in (*target.parent.glob(".tmp-*"), *target.glob(".tmp-*")):  # by a kill
            remove(left)
        # A folder gets its name once it is whole.
        if content is not None and not target.is_dir():
            _folder(store, name, target, MANIFEST, wanted, content=content)
        if content is None:
            target.mkdir(exist_ok=True)
            # The run may have gone on since, and `restore` leaves logs that are there as they are.
            for file in LOGS:
                (target / file).unlink(missing_ok=True)
            found = restore(store, name, target, only_logs=only_logs)
            if found is None and not any((target / file).is_file() for file in LOGS):
                raise Fault(f"{address} holds no checkpoint or run.", NO_CHECKPOINT)
    return target


def _folder(
    store: Store,
    place: str,
    target: Path,
    manifest: str,
    wanted: Callable[[str], bool] = lambda name: True,
    before: Callable[[], None] = lambda: None,
    content: Optional[bytes] = None,
    say: Callable[[str], Any] = lambda text: None,
) -> None:
    """Fetch what a manifest names. before: called when all files are there, before the rename.
    content: of the manifest, if it was read before. say: called before the files are fetched.

    Raises Fault (66) for what is missing or damaged, (77), (74).
    """
    # A name that no reader takes for a folder that is whole, whenever a kill comes.
    temporary = target.with_name(f".tmp-{target.name}-{secrets.token_hex(4)}")
    temporary.mkdir(parents=True)
    try:
        entries = _entries(store, place, temporary, manifest, content)
        entries = {name: entry for name, entry in entries.items() if wanted(name)}
        # A manifest from outside may hold negative numbers.
        needed = sum(max(entry["bytes"], 0) for entry in entries.values())
        files.room(temporary, needed, place, "make room, or take another disk")
        if needed:
            say(f"Fetching {store.address}/{place} ({needed / 2**20:,.1f} MiB) to {str(target)!r}.")
        for name, entry in entries.items():
            _file(store, f"{place}/{name}", temporary / name, entry)
        # Each file is on the disk by now. The names in folders must be, too, before the rename.
        for folder in (*filter(Path.is_dir, temporary.rglob("*")), temporary):
            fsync(folder)
        before()
        failpoint("mirror.fetched")
        temporary.rename(target)
        fsync(target.parent)
    except BaseException:
        with suppress(OSError):
            remove(temporary)
        raise


def _entries(
    store: Store, place: str, folder: Path, manifest: str, content: Optional[bytes]
) -> dict[str, files.Entry]:
    """The entries of a manifest, which is put into `folder`. Raises Fault (66, 77)."""
    where = f"{store.address}/{place}"
    damaged = Fault(f"{where} is damaged: {manifest} isn't what was written.", NO_CHECKPOINT)
    if content is None:
        content = patiently(store, lambda: store.content(f"{place}/{manifest}"))
    try:
        document = json.loads(content or b"")
        document.pop("sha256", None)
        # Byte by byte, as `files.read` will do it.
        sealed = content == files.encode(document)
        # Where a dataset's manifest has `files`, these are what it was made of.
        entries = document.get("files" if manifest == MANIFEST else "written")
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise damaged from None
    if not sealed:
        raise damaged
    files.check_entries(entries, Path(place) / manifest, damaged)
    for name in entries:
        if name.lower().endswith(CODE_SUFFIXES):
            raise Fault(
                f"{where} names {shown(name)!r}, which could run code when opened: refused.",
                REFUSED,
            )
        # Its own name would replace it by another content.
        if name.partition("/")[0] in (MANIFEST, manifest):
            raise damaged
    (folder / manifest).write_bytes(content or b"")
    fsync(folder / manifest)
    return entries


def _file(store: Store, place: str, path: Path, entry: files.Entry) -> None:
    """Fetch one object, durably. Raises Fault (66) unless it is what its entry says."""

    def wrong(how: str) -> Fault:
        return Fault(f"{store.address}/{shown(place)} is damaged: {how}.", NO_CHECKPOINT)

    size = patiently(store, lambda: store.size(place))
    if size is None:
        raise wrong("it is missing")
    if size != entry["bytes"]:
        raise wrong(f"it has {size} bytes, not {entry['bytes']}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("xb").close()
    # Names of which one is a folder for the other.
    except (FileExistsError, NotADirectoryError):
        raise wrong("its name is another's folder") from None
    if download(store, place, path, size) != entry["sha256"]:
        raise wrong("its content has changed")


def _logs(store: Store, run: str, directory: Path, replaces: bool = False) -> None:
    """Fetch the logs of a run that aren't in `directory`, or all of them, and what is pinned."""
    directory.mkdir(parents=True, exist_ok=True)
    for name in patiently(store, lambda: pins(store, run)):
        (directory / name).touch()
    for name in LOGS:
        if (directory / name).exists() and not replaces:
            continue
        place = f"{run}/{name}"
        size = patiently(store, lambda: store.size(place))
        if size is None:
            continue
        files.room(directory, size, place, "make room, or take another disk")
        # A name that is swept where a kill leaves it.
        temporary = directory / f".tmp-step-{secrets.token_hex(4)}"
        try:
            download(store, place, temporary, size)
            temporary.rename(directory / name)
        finally:
            temporary.unlink(missing_ok=True)
