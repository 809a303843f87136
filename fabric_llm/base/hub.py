"""Whether the Hugging Face hub can be asked, found out once, before libraries try for half a minute each."""

from __future__ import annotations

import socket
from contextlib import suppress
from functools import cache
from threading import Event, Thread
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from huggingface_hub import constants

SECONDS = 2.0


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
