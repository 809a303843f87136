"""Turn errors of the Hugging Face hub into sentences that say what to do."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from functools import cache
from pathlib import Path
from threading import Event, Thread
from typing import Optional
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from huggingface_hub import constants, errors, get_token

SECONDS = 2.0
LOG_IN = "log in with `hf auth login`, or set HF_TOKEN"


def answer(name: str, error: BaseException, kind: str = "model") -> Optional[str]:
    """Why the hub doesn't give out the model, tokenizer or dataset `name`, as the end of a sentence.

    error: raised by huggingface_hub, or by a library that calls it. Returns None if it isn't an error of the hub.
    """
    chain: list[BaseException] = []
    link: Optional[BaseException] = error
    while link is not None:
        chain.append(link)
        link = link.__cause__ or link.__context__
    words = " ".join(" ".join(str(link).split()) for link in chain)
    codes = [getattr(getattr(link, "response", None), "status_code", None) for link in chain]
    status = next((code for code in codes if isinstance(code, int)), 0)

    def has(*types: type) -> bool:
        return any(isinstance(link, types) for link in chain)

    page = f"{constants.ENDPOINT}/{'datasets/' if kind == 'dataset' else ''}{name.partition(':')[0]}"
    if has(errors.GatedRepoError) or "is a gated dataset on the Hub" in words:
        use = "use a token of the account that has it: this machine's is another's, or mayn't read gated repositories"
        return f"it is gated on the Hub: ask for access at {page}, then {LOG_IN if get_token() is None else use}"
    if has(errors.DisabledRepoError):
        return f"the Hub has disabled it, see {page}"
    if has(errors.RepositoryNotFoundError) or "doesn't exist on the Hub or cannot be accessed" in words:
        whom = "without a token" if get_token() is None else "the account of this machine's token"
        private = f", or, if it is private, {LOG_IN}" if get_token() is None else ""
        return f"there is no such folder here, and the Hub shows {whom} no {kind} of that name: check the spelling{private}"
    if status == 401:
        return f"the Hub doesn't take the token of this machine (HF_TOKEN, or {constants.HF_TOKEN_PATH}): {LOG_IN} anew"
    if status == 403:
        return f"the Hub forbids it to the token of this machine: give that token the permission to read {page}"
    if status == 429:
        return "the Hub has had too many requests from this address: wait a few minutes, or " + LOG_IN
    if status >= 500:
        return f"the Hub fails ({status}): try again later"
    if any(isinstance(link, errors.EntryNotFoundError) and not isinstance(link, OSError) for link in chain):
        return f"{page} is there, but hasn't the files that a {kind} of transformers needs"
    is_reached, is_offline = reach(), constants.is_offline_mode() or has(errors.OfflineModeIsEnabled)
    if is_reached and not is_offline and not has(errors.LocalEntryNotFoundError, ConnectionError):
        return None
    why = f"the Hub at {constants.ENDPOINT} can't be reached"
    if is_offline and is_reached:
        why = "HF_HUB_OFFLINE is set, so that the Hub isn't asked"
    command = f"hf download {'--repo-type dataset ' if kind == 'dataset' else ''}{name}"
    there = Path(constants.HF_HUB_CACHE)
    return f"{why}, and it isn't in the cache, {there}: where there is a network, `{command}`, or name a folder"


@cache
def reach() -> bool:
    """Whether the Hub can be reached, tried once, for two seconds. If not, all libraries are told to use their caches.

    Otherwise they would retry, with messages, for half a minute and more. True also if the Hub isn't to be asked, and behind a
    proxy.
    """
    address = urlsplit(constants.ENDPOINT)
    host, port = address.hostname or "", address.port or (80 if address.scheme == "http" else 443)
    if constants.is_offline_mode() or address.scheme in getproxies() and not proxy_bypass(host):
        return True
    answered = Event()

    def ask() -> None:
        with suppress(OSError), socket.create_connection((host, port), SECONDS):
            answered.set()

    thread = Thread(target=ask, daemon=True)  # looking up an address has no time-out of its own
    thread.start()
    thread.join(SECONDS)
    if not answered.is_set():
        constants.HF_HUB_OFFLINE = True
    return answered.is_set()


def require_reachable(name: str, kind: str = "model") -> None:
    """Raises ValueError if a name isn't in a cache and the Hub can't be asked, before libraries are imported for seconds."""
    name = name.partition(":")[0]
    prepared = Path(
        os.environ.get("HF_DATASETS_CACHE") or Path(constants.HF_HOME, "datasets"), name.replace("/", "___")
    )
    folder = f"{'datasets' if kind == 'dataset' else 'models'}--{name.replace('/', '--')}"
    if any(Path(constants.HF_HUB_CACHE, folder).glob("snapshots/*")) or kind == "dataset" and prepared.is_dir():
        return
    if not reach() or constants.is_offline_mode():
        raise ValueError(f"No {kind} {name!r}: {answer(name, errors.OfflineModeIsEnabled(), kind)}.")
