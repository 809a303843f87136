"""Addresses of object storage, and how they are opened. obstore is imported only here, in `store`
and when it is needed."""

import os
import re
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Optional
from urllib.parse import quote, unquote, urlsplit

from fabric_llm.base.faults import Fault
from fabric_llm.base.names import shown
from fabric_llm.mirror import credentials

CLOUDS = ("s3", "gs", "az")
SCHEMES = (*CLOUDS, "file")
# A part of a file, of which several are in flight, must go through in this time.
REQUEST_SECONDS, CONNECT_SECONDS = 60, 5
# Of one request: what is longer is for the loops of this package, which can be interrupted.
RETRIES, RETRY_SECONDS = 3, 20


def is_address(text: object) -> bool:
    """Whether `text` names object storage, well or badly, rather than a folder or a web page."""
    return re.match(r"(?!https?:)[a-zA-Z][a-zA-Z0-9+.-]*://", str(text)) is not None


def require(address: str, flag: str, is_folder: bool = False) -> None:
    """Raises Fault (2) unless `address`, which `flag` gives, is one that `open_store` takes.
    is_folder: it must name one in a bucket."""
    known = ", ".join(f"{scheme}://" for scheme in SCHEMES)
    url = urlsplit(address)
    # What may hold a password isn't repeated.
    if "@" in url.netloc or url.query or url.fragment:
        raise Fault(
            f"{flag}: an address holds no password, key or query: the cloud's own chain of "
            "credentials (environment, profile, role of the machine) is asked for them."
        )
    if url.scheme not in SCHEMES or not is_address(address):
        is_path = address.startswith(("/", ".", "~"))
        meant = f" Did you mean file://{quote(os.path.abspath(address))}?" * is_path
        raise Fault(f"{flag} {shown(address)!r} must begin with one of {known}.{meant}")
    if url.scheme == "file" and (url.netloc or len(url.path) < 2):
        raise Fault(f"{flag} {shown(address)!r} must name a folder, such as file:///mnt/mirror.")
    if url.scheme in CLOUDS and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", url.netloc):
        raise Fault(
            f"{flag} {shown(address)!r} must name a bucket, such as {url.scheme}://bucket/prefix."
        )
    if is_folder and url.path in ("", "/"):
        raise Fault(f"{flag} {address!r} must name a folder, such as {address}/data/mine.")
    path = url.path
    if url.scheme == "file":
        path = unquote(path)
    parts = path.strip("/").split("/")
    is_plain = not any(part in (".", "..") for part in parts) and "//" not in path
    # A slash that was encoded would be part of a name.
    is_plain = is_plain and path.count("/") == url.path.count("/")
    if not is_plain or not (address + path).isprintable():
        raise Fault(f"{flag} {shown(address)!r} must be plain: no '.', '..' or empty part in it.")


def split(address: str) -> tuple[str, str]:
    """(the address of what an address lies in, its last name): s3://b/runs/RUN -> s3://b/runs,
    RUN."""
    place, _, name = address.rstrip("/").rpartition("/")
    return place, unquote(name) if local_folder(address) else name


def local_folder(address: str) -> Optional[Path]:
    """Of file://, whose names may be percent-encoded (RFC 8089), None of other addresses: a key is
    what it says."""
    url = urlsplit(address)
    if url.scheme != "file":
        return None
    return Path(unquote(url.path) or "/")  # file:// is what file:///data lies in


def require_there(address: str) -> None:
    """Raises Fault (2) for a folder that doesn't exist: who reads makes none."""
    there = local_folder(address)
    if there is not None and not there.is_dir():
        raise Fault(f"{shown(address)}: there is no such folder.")


def require_obstore(address: str) -> None:
    """Raises Fault (2) where it isn't installed, without the time of an import."""
    if find_spec("obstore") is None:
        raise Fault(
            f"{address.partition('://')[0]}:// needs obstore: pip install obstore (or pip install "
            "-e '.[mirror]')."
        )


def open_store(address: str) -> Any:
    """obstore's store for what `address` names, of which `require` approves; no request is made.

    Credentials are found as the cloud's own tools find them. Raises what `store.errors` names.
    """
    from obstore import store

    if local := local_folder(address):
        local.mkdir(parents=True, exist_ok=True)
        # Folders that are empty go with their last file, as in a bucket.
        return store.LocalStore(local, automatic_cleanup=True)
    options: dict[str, Any] = {
        "client_options": {
            "timeout": timedelta(seconds=REQUEST_SECONDS),
            "connect_timeout": timedelta(seconds=CONNECT_SECONDS),
            "allow_http": credentials.endpoint().startswith("http://"),
        },
        "retry_config": {
            "max_retries": RETRIES,
            "retry_timeout": timedelta(seconds=RETRY_SECONDS),
        },
    }
    # obstore doesn't read the files of profiles, see credentials.py.
    if urlsplit(address).scheme == "s3":
        options["config"] = credentials.of_profile()
    # A key is what it says, and a URL would be decoded.
    return store.from_url(address.rstrip("/").replace("%", "%25"), **options)
