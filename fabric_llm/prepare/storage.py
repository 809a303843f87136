"""Object storage instead of folders: what prepare_data.py reads from there, and puts there.
Imported when an address is given."""

import hashlib
import json
import secrets
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path, PurePosixPath
from threading import Event, Thread
from typing import Any

from fabric_llm.base import files
from fabric_llm.base.faults import BAD_INPUT, REFUSED, SAVE_FAILED, UNWRITABLE, Fault, one_line
from fabric_llm.mirror.address import require, require_there, split
from fabric_llm.mirror.download import OF_DATA, download, patiently, say_at_once, user_cache
from fabric_llm.mirror.lease import LEASE_SECONDS, Lease, Lost
from fabric_llm.mirror.store import FOLDER, Damaged, Store, errors, probe

AT_ONCE = 4  # objects, of which each may have as many parts in flight
MARK = ".preparing"  # in a dataset that isn't complete: what is beside it may be replaced
OWNER = ".owner"  # in the cache, beside what is sent: whose lease it is


# ------------------------------------------------------------------------------------- inputs


@cache  # a start lists them once, and reads one version
def corpus(address: str) -> str:
    """A folder in the cache with the objects below `address`, under their names there, or the one
    file that it names. Other objects under the same address are another folder.

    Raises Fault: for a bad address or nothing there (2), without room or an answer (74), for names
    that lead out of the folder (77).
    """
    from filelock import FileLock

    require(address, "--input")
    place, name = split(address)
    if place.endswith(":/"):  # all of a bucket
        place, name = address.rstrip("/"), ""
    require_there(place)
    store = Store(place)
    found = _listed(store, name)
    if not found:
        raise Fault(f"--input {address} names no objects: give a file, or what files lie below.")
    made_of = [(one["path"], one["size"], one["e_tag"]) for one in found]
    key = hashlib.sha256(json.dumps([place, made_of]).encode()).hexdigest()[:16]
    target = user_cache() / key / (name or split(address)[1])
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(user_cache() / f"{key}.lock"):
        if not target.exists():
            for left in target.parent.glob(".tmp-*"):  # of a process that was killed
                files.remove(left)
            temporary = target.with_name(f".tmp-{secrets.token_hex(4)}")
            temporary.mkdir()
            try:
                _copy(store, found, temporary, address)
                # Listed once more: objects that were replaced meanwhile may be of two versions.
                now = {one["path"]: one for one in _listed(store, name)}
                if any(now.get(one["path"]) != one for one in found):
                    raise _changed(address)
                # It gets its name once it is whole.
                (temporary / name).rename(target)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
    return str(target)


def _listed(store: Store, name: str) -> list[dict[str, Any]]:
    """The objects below a folder that are files, or the one of this name, sorted. Raises Fault (2,
    74, 77)."""
    from obstore.exceptions import InvalidPathError

    def listed() -> list[dict[str, Any]]:
        try:
            return store.objects(name)
        except InvalidPathError as error:
            which = one_line(str(error).partition("\n")[0])
            raise Fault(f"{store.address}: {which}: refused.", REFUSED) from error

    found = patiently(store, listed)
    # Consoles make empty objects that stand for folders.
    folders = {str(folder) for one in found for folder in PurePosixPath(one["path"]).parents}
    found = [one for one in found if one["size"] or one["path"] not in folders | {"", name}]
    for one in found:
        files.check_name(one["path"], Path(store.address) / "its list")
        if one["path"] in folders:
            raise Fault(f"{store.address}/{one['path']} is an object, and a folder of others.")
    return found or patiently(store, lambda: store.described(name))


def _changed(address: str) -> Fault:
    return Fault(f"{address} has changed while it was fetched: start again.", SAVE_FAILED)


def _copy(store: Store, found: list[dict[str, Any]], folder: Path, address: str) -> None:
    size = sum(one["size"] for one in found)
    files.room(folder, size, address, "make room, or set XDG_CACHE_HOME to another disk")
    mib = f"{size / 2**20:,.1f} MiB"
    say_at_once(f"Fetching {address} ({len(found):,} files, {mib}) to {str(folder.parent)!r}.")

    def bring(one: dict[str, Any]) -> None:
        path = folder / one["path"]
        path.parent.mkdir(parents=True, exist_ok=True)
        download(store, one["path"], path, one["size"])
        if path.stat().st_size != one["size"]:
            raise _changed(address)

    pool = ThreadPoolExecutor(AT_ONCE)
    try:
        for _ in pool.map(bring, found):
            pass
    finally:
        pool.shutdown(cancel_futures=True)


# ------------------------------------------------------------------------------------- output


def place_of(address: str) -> Path:
    """The folder in the cache, always the same one, beside which a dataset for `address` is
    made."""
    key = hashlib.sha256(address.rstrip("/").encode()).hexdigest()[:16]
    return user_cache() / key / split(address)[1]


def require_free(address: str, overwrite: bool) -> None:
    """Raises Fault: where a dataset or anything else is at `address`, for a bad address, bucket or
    key (2); where it can't be reached (74)."""
    require(address, "--output", is_folder=True)
    store = Store(address.rstrip("/"))
    patiently(store, lambda: probe(store))
    # What is below isn't listed before it is known to be a dataset.
    names = patiently(store, lambda: store.files("") + store.folders(""))
    there = [name for name in names if name != FOLDER]
    is_left = MARK in there and OF_DATA not in there
    if there and not is_left and not {OF_DATA, "dataset_dict.json"} <= {*there}:
        raise Fault(f"output {address} holds {there[0]!r}, no prepared dataset: name another.")
    # Other datasets may lie below what a start that was killed has left.
    for name in patiently(store, lambda: store.below("")):
        if name.endswith(f"/{OF_DATA}"):
            raise Fault(f"output {address} holds {name!r}, of another dataset: name another.")
    if there and not is_left and not overwrite:
        raise Fault(
            f"output {address} exists: pass --overwrite true to replace it, or name another."
        )


def send(folder: Path, address: str, overwrite: bool) -> None:
    """Put the dataset in `folder` at `address`. Its manifest is removed first and put last, when
    all else was read back: what a kill leaves is no dataset, and the next start replaces it.

    Raises Fault (74), or (73) where somebody else writes there, who has a lease as runs have.
    """
    place, owner = address.rstrip("/"), folder.parent / OWNER
    if not owner.is_file():
        files.write_atomically(owner, secrets.token_hex(16))
    # A store of its own, since it is used by another thread.
    lease = Lease(Store(place), owner.read_text(), LEASE_SECONDS)
    try:
        with _held(lease):
            require_free(address, overwrite)  # it may be hours since the start
            _send(folder, Store(place), lease)
    except Lost as lost:
        raise Fault(f"{lost}.", UNWRITABLE) from lost
    # After a mistake (2), what was made would be thrown away.
    except Fault as fault:
        code = SAVE_FAILED if fault.code == BAD_INPUT else fault.code
        raise Fault(f"{fault} The same command goes on from there.", code) from fault


@contextmanager
def _held(lease: Lease) -> Iterator[None]:
    """Acquire a lease, keep it, and leave nothing of it. Raises Fault (73, 74, 2)."""
    over = Event()

    def keep() -> None:
        with suppress(Lost):  # which is seen where something is sent
            lease.keep(over)

    patiently(lease.store, lambda: lease.acquire(say=say_at_once))
    beats = Thread(target=keep, daemon=True)
    beats.start()
    try:
        yield
    finally:
        over.set()
        beats.join()
        # Where that fails, the next one waits a minute.
        with suppress(Lost, *errors()):
            lease.remove()


def _send(folder: Path, store: Store, lease: Lease) -> None:
    again, own = partial(patiently, store), (folder / OF_DATA).read_bytes()
    entries = json.loads(own)["written"]
    size = sum(entry["bytes"] for entry in entries.values())
    say_at_once(f"Sending {size / 2**20:,.1f} MiB to {store.address}.")
    again(lease.check)
    # Before the manifest goes: without either, `require_free` would refuse what a kill leaves.
    again(lambda: store.put(MARK, b""))
    again(lambda: store.remove([OF_DATA]))
    for name, entry in entries.items():
        again(lease.check)
        _bring(store, name, folder / name, entry)
    again(lease.check)
    known, leases = {*entries, MARK}, f"{FOLDER}/"
    # What only a former dataset had goes, too, but no lease: this process holds one.
    strays = [name for name in again(lambda: store.below("")) if name not in known]
    again(lambda: store.remove([name for name in strays if not name.startswith(leases)]))
    again(lease.check)
    # Created, not replaced: whoever took over a lost lease may have written one meanwhile.
    if not again(lambda: store.create(OF_DATA, own)):
        raise Lost(f"another process has written {store.address}")
    again(lambda: store.remove([MARK]))


def _bring(store: Store, name: str, path: Path, entry: files.Entry) -> None:
    """Have one file there, as it should be."""
    again = partial(patiently, store)

    def is_there() -> bool:
        size = again(lambda: store.size(name))
        if size != entry["bytes"]:
            return False
        return store.read(name, size, again, lambda piece: None) == entry["sha256"]

    if is_there():  # since a former start
        return
    try:
        sent = again(lambda: store.send(name, path, lambda: None, entry["bytes"]))
    except Damaged as error:
        raise Fault(f"{error}.", SAVE_FAILED) from error
    if sent != entry["sha256"] or not is_there():
        raise Fault(f"{store.address}/{name} isn't what was sent.", SAVE_FAILED)
