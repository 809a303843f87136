"""One run on one prefix. `.leases/lease-000001.json` and so on: the highest number is the owner's.

Its owner writes it again every BEAT_SECONDS. Another takes over by creating the next number, which
only one can do: at once if the owner has said that it ended, or is the same run directory, whose
lock says that the former process is gone; otherwise once the object hasn't changed for
LEASE_SECONDS. If it changes, the other is refused, unless the owner says that it only finishes:
then it is waited for. Time is measured by the watcher's own monotonic clock: clocks of two machines
are never compared.
"""

import json
import os
import socket
import time
from contextlib import suppress
from datetime import datetime, timezone
from threading import Event
from typing import Any, Callable

from fabric_llm.base.failpoints import failpoint
from fabric_llm.base.faults import UNWRITABLE, Fault
from fabric_llm.base.names import shown
from fabric_llm.mirror.store import FOLDER, Store, errors

BEAT_SECONDS, LEASE_SECONDS = 15.0, 60.0
LOOKS = 30  # at the lease of an owner that may be gone, within LEASE_SECONDS
MOST_BYTES = 10_000


class Lost(Exception):
    """Another process has taken over the prefix."""


class Lease:
    """Methods raise what the store raises, and change nothing then that a second call wouldn't
    mend."""

    def __init__(
        self,
        store: Store,
        owner: str,
        seconds: float = LEASE_SECONDS,
        finishes: Callable[[], bool] = lambda: False,
    ) -> None:
        """owner: an id of the run directory. seconds: see LEASE_SECONDS. finishes(): whether it
        ends by itself, so that the next owner waits."""
        self.store, self.owner, self.seconds, self.finishes = store, owner, seconds, finishes
        self.number, self.beats, self.ended = 0, 0, False

    def acquire(
        self,
        sleep: Callable[[float], Any] = time.sleep,
        say: Callable[[str], Any] = print,
        before: Callable[[], Any] = lambda: None,
    ) -> None:
        """Become the owner. Waits where the former one may be gone, with `sleep`, and says so.

        before: called where somebody else had it, before it is taken. Raises Fault (73) where the
        former owner is alive.
        """
        while True:
            number, content = self._newest()
            was_own = number == 0 or _decoded(content).get("owner") == self.owner
            if number and not self._is_free(content):
                say(
                    f"{self.store.address} was used by {_who(content)}: it is watched for "
                    f"{self.seconds:g} s, and waited for if it only finishes."
                )
                self._watch(number, content, sleep)
            if not was_own:
                before()
            self.number = number + 1
            if self.store.create(_name(self.number), self._document()):
                break
            # Another one was faster: it is the owner to be watched now.
        failpoint("mirror.lease")
        self._remove_older()

    def keep(self, stopped: Event) -> None:
        """Beat until `stopped`, in a thread of its own. Raises Lost."""
        # Shorter leases, as in tests, have as many beats.
        seconds = BEAT_SECONDS * self.seconds / LEASE_SECONDS
        while not stopped.wait(seconds) and not self.ended:
            try:
                self.beat()
            except errors():
                self.store.reopen()  # the error itself is heard of where something is sent

    def beat(self) -> None:
        """Say that the owner is alive. Raises Lost."""
        self.check()
        self.beats += 1
        self.store.put(_name(self.number), self._document())

    def check(self) -> None:
        """Raises Lost if there is a higher number, or this one isn't the own one any more: whoever
        had it meanwhile may have left nothing, so that numbers begin anew."""
        number, content = self._newest(self.number)
        is_own = _decoded(content).get("owner") == self.owner
        if number == self.number and is_own:
            return
        who = _who(content) if content else "another process, which has ended,"
        raise Lost(f"{who} has taken over {self.store.address}")

    def end(self) -> None:
        """Let the next owner begin at once. Raises Lost."""
        self.ended = True
        self.beat()
        self._remove_older()

    def remove(self) -> None:
        """As `end`, and nothing is left. Raises Lost."""
        self.ended = True
        self.check()
        self.store.remove([_name(self.number)])

    def _document(self) -> bytes:
        return json.dumps(
            {
                "owner": self.owner,
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "beats": self.beats,
                "ended": self.ended,
                "finishes": self.finishes(),
                # For people: no code compares it.
                "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            }
        ).encode()

    def _newest(self, number: int = 0) -> tuple[int, bytes]:
        """(the highest number from `number` on, what it says), b"" where there is none."""
        content = b""
        for name in self.store.below(FOLDER):
            digits = name.removeprefix(f"{FOLDER}/lease-").removesuffix(".json")
            if digits.isdecimal():
                number = max(number, int(digits))
        # A listing may lag, and an owner may have removed the number meanwhile.
        if number:
            content = self.store.content(_name(number), MOST_BYTES) or b""
        while following := self.store.content(_name(number + 1), MOST_BYTES):
            number, content = number + 1, following
        return number, content

    def _is_free(self, content: bytes) -> bool:
        said = _decoded(content)
        return said.get("ended") is True or said.get("owner") == self.owner

    def _watch(self, number: int, content: bytes, sleep: Callable[[float], Any]) -> None:
        """Returns once the owner has ended, or hasn't been heard of for long. Raises Fault (73)."""
        began = time.monotonic()
        while time.monotonic() - began < self.seconds:
            sleep(self.seconds / LOOKS)
            newest, now = self._newest()
            if newest == number and now == content:
                continue
            if newest == 0 or newest == number and self._is_free(now):
                return
            # Such as what copies for a run that was killed.
            if newest == number and _decoded(now).get("finishes") is True:
                content, began = now, time.monotonic()
                continue
            raise Fault(
                f"{self.store.address} is in use: {_who(now)} wrote there at "
                f"{shown(_decoded(now).get('time'))}. Wait for it, or take another prefix.",
                UNWRITABLE,
            )

    def _remove_older(self) -> None:
        self.store.remove([name for name in self.store.below(FOLDER) if name < _name(self.number)])


def _name(number: int) -> str:
    return f"{FOLDER}/lease-{number:06d}.json"


def _decoded(content: bytes) -> dict[str, Any]:
    # A foreign object there says nothing, and is waited for like an owner that is silent.
    with suppress(ValueError, RecursionError):
        said = json.loads(content)
        if isinstance(said, dict):
            return said
    return {}


def _who(content: bytes) -> str:
    said = _decoded(content)
    return f"process {shown(said.get('pid'))} on {shown(said.get('host'))}"
