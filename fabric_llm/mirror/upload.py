"""Upload the checkpoints of a run beside its trainer, in a process of its own, so that no step
waits for a slow server."""

import errno
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Optional, TypeVar

from filelock import FileLock, Timeout

from fabric_llm.base import files
from fabric_llm.base.failpoints import failpoint
from fabric_llm.base.faults import Fault, one_line
from fabric_llm.base.files import MANIFEST, write_atomically
from fabric_llm.mirror import leftovers
from fabric_llm.mirror.address import local_folder
from fabric_llm.mirror.client import LEFT
from fabric_llm.mirror.commands import Commands, Over
from fabric_llm.mirror.download import patiently
from fabric_llm.mirror.fetch import LOGS, is_whole, pins, steps
from fabric_llm.mirror.lease import Lease, Lost
from fabric_llm.mirror.store import FOLDER, Damaged, Store, errors, pauses, probe, reason

LOCK, OWNER = ".mirror.lock", ".mirror-owner"  # in the run directory
LOCK_SECONDS = 0.5  # between looks at a lock
T = TypeVar("T")


class GivenUp(Exception):
    """A checkpoint won't be uploaded: it is gone here, or damaged. Its text says why, if that is
    news."""


class Uploader:
    """Obeys commands, in the thread that calls `run`."""

    def __init__(
        self,
        address: str,
        directory: Path,
        commands: Commands,
        lease_seconds: float,
    ) -> None:
        """Raises Fault (2) without obstore."""
        self.store, self.directory, self.run_name = Store(address), directory, directory.name
        self.commands, self.report = commands, commands.report
        self.lease: Lease  # once `run` has begun
        self.lease_seconds = lease_seconds
        self.lost: Optional[str] = None  # by whom the prefix was taken over, in words
        self.in_trouble = False

    # ---------------------------------------------------------------------------- from the start

    def run(self) -> None:
        """Obey until the end. Raises Fault, before anything was changed, where it is refused."""
        with suppress(Over):
            place = local_folder(self.store.address)
            parent = place and place.parent
            # A mistyped address of a folder is made without an error, so that is said.
            is_new = parent is not None and not parent.exists()
            self._at_start(self.store, lambda: probe(self.store))
            if is_new:
                self._say(f"The folder {str(parent)!r} wasn't there and was made.")
            lock = self._lock()
            self._own()
            self._ready()
            with suppress(Lost):
                while self._obey_next():
                    pass
                # Logs go on after the last checkpoint.
                self._logs()
                self._again(self.lease.end)
            # Whoever has lost the prefix waits to be told to end.
            self.commands.wait_for_end()
            lock.release()
        self.commands.report_end()

    def _lock(self) -> FileLock:
        """Wait for the uploader of the run's former process, which finishes what it had to do."""
        lock = FileLock(self.directory / LOCK)
        waits = False
        while True:
            try:
                # In short waits, between which it is looked whether time is up.
                return lock.acquire(timeout=LOCK_SECONDS).lock
            except Timeout:
                self.commands.check_time()
            if not waits:
                waits = True
                self._say("The uploader of this run's former process is still at work.")

    def _own(self) -> None:
        path = self.directory / OWNER
        if not path.is_file():
            write_atomically(path, secrets.token_hex(16), durable=True)
        # A copy of the directory is another one.
        owner = f"{path.read_text()}-{path.stat().st_ino}"
        # A store of its own, since it is used by another thread.
        self.lease = Lease(
            Store(self.store.address),
            owner,
            self.lease_seconds,
            finishes=lambda: self.commands.deadline is not None,
        )
        # What is here may be of before, which a second start must know as well (plan/mirrored.py).
        left, of_run = self.directory / LEFT, f"{FOLDER}/owner-{self.run_name}"

        def note() -> None:
            # Runs of other names may have had the lease meanwhile.
            if self.store.content(of_run) != owner.encode():
                left.touch()

        self._at_start(
            self.lease.store,
            lambda: self.lease.acquire(self._sleep, self._say, before=note),
        )
        self._at_start(self.store, lambda: self.store.put(of_run, owner.encode()))
        threading.Thread(target=self._beat, daemon=True).start()

    def _say(self, sentence: str) -> None:
        self.report({"warning": sentence})

    def _beat(self) -> None:
        try:
            self.lease.keep(self.commands.stopped)
        except Lost as lost:
            self.lost = str(lost)

    def _ready(self) -> None:
        names = self._at_start(self.store, self._sweep)
        own = not (self.directory / LEFT).exists()
        self.commands.has_begun = True
        self.report({"ready": True, "checkpoints": names, "own": own})

    def _sweep(self) -> list[str]:
        """Remove what a kill has left of this run. Returns the checkpoints that are whole."""
        # Where it can't be done it costs money, but no checkpoint.
        with suppress(OSError, ValueError):
            leftovers.remove(self.store.address, self.run_name)
        names = []
        for name in steps(self.store, self.run_name):
            if is_whole(self.store, self.run_name, name):
                names.append(name)
            # What is here will be uploaded, and its files there needn't be sent again.
            elif not self._is_here(name):
                self._discard(name)
        return names

    # ------------------------------------------------------------------------------- obeying

    def _obey_next(self) -> bool:
        """Obey one command. Returns whether there may be another one."""
        following = self.commands.following()
        self._check()
        if following is None:
            return False
        command, named = following
        if command == "remove":
            self._remove(*named)
            return True
        # Of a checkpoint that was given up while it waited, see `Commands`.
        if command == "clear":
            self._again(lambda: self._discard(named, unless_whole=True))
            return True
        try:
            self._upload(named)
        except GivenUp as why:
            if str(why):
                self._say(f"{why}.")
            # Without a manifest what was sent is no checkpoint, but it would stay.
            self._again(lambda: self._discard(named, unless_whole=True))
            self.report({"given_up": named})
        self.commands.current = None
        return True

    def _upload(self, name: str) -> None:
        began, requests = time.monotonic(), self.store.requests
        # Kept, since a rewind may put another checkpoint of this name here while it is sent.
        document = self._document(name)
        entries, own = document["files"], files.encode(document)
        place, sent = self._place(name), 0
        # Anew where somebody has put another manifest meanwhile, see `_publish`.
        while not self._again(lambda: self._is_whole(name, own)):
            for file, entry in entries.items():
                sent += self._bring(name, file, entry)
                failpoint("mirror.file")
            # Files that another checkpoint of this name had, and this one hasn't.
            self._again(lambda: self._remove_strays(place, entries))
            # Before the manifest: whoever finds the checkpoint goes on with its logs.
            self._logs()
            failpoint("mirror.before_manifest")
            self._again(lambda: self._publish(name, own))
        failpoint("mirror.after_manifest")
        self.report(
            {
                "mirrored": name,
                "bytes": sent,
                "seconds": round(time.monotonic() - began, 3),
                "requests": self.store.requests - requests,
            }
        )

    def _document(self, name: str) -> dict[str, Any]:
        """The manifest of the checkpoint here. Raises GivenUp."""
        try:
            return files.read(self.directory / name)
        except (Fault, OSError) as error:
            raise self._gone(name, one_line(error).rstrip(".")) from error

    def _gone(self, name: str, why: str) -> GivenUp:
        """The trainer has removed the checkpoint, or else `why`."""
        if self._is_here(name):
            return GivenUp(f"The mirror can't take {name}: {why}")
        return GivenUp()

    def _is_whole(self, name: str, own: bytes) -> bool:
        """Whether the checkpoint with the manifest `own` is there. Another one of its name is
        removed."""
        there = self.store.content(f"{self._place(name)}/{MANIFEST}")
        if there is not None and there != own:
            # Its files are replaced where they differ.
            self._require_lease()
            self.store.remove([f"{self._place(name)}/{MANIFEST}"])
        return there == own

    def _bring(self, name: str, file: str, entry: files.Entry) -> int:
        """Have one file there, as it should be. Returns the bytes that were sent."""
        path, place = self.directory / name / file, f"{self._place(name)}/{file}"
        if self._is_there(place, entry):
            return 0
        self._again(lambda: self._send(name, place, path, entry))
        return entry["bytes"]

    def _is_here(self, name: str) -> bool:
        return (self.directory / name / MANIFEST).is_file()

    def _is_there(self, place: str, entry: files.Entry) -> bool:
        """As it is stored. A process before this one may have sent it."""
        size = self._again(lambda: self.store.size(place))
        if size != entry["bytes"]:
            return False
        sha256 = self.store.read(place, size, self._again, lambda piece: self._check())
        return sha256 == entry["sha256"]

    def _send(self, name: str, place: str, path: Path, entry: files.Entry) -> None:
        self._require_lease()
        try:
            sent = self.store.send(place, path, self._check, entry["bytes"])
        except Damaged as error:
            raise self._gone(name, str(error)) from error
        # Else it would be sent for ever.
        if sent != entry["sha256"]:
            raise self._gone(name, f"{path.name} has changed since it was saved")
        if not self._is_there(place, entry):
            raise OSError(errno.EIO, f"what it has stored of {path.name} isn't what was sent")

    def _publish(self, name: str, own: bytes) -> None:
        """Put the manifest. Where somebody else has put another one, `_is_whole` will see it.
        Raises GivenUp where the checkpoint that was sent isn't here any more."""
        if files.encode(self._document(name)) != own:
            raise GivenUp
        self._require_lease()
        self.store.create(f"{self._place(name)}/{MANIFEST}", own)

    def _remove_strays(self, place: str, entries: dict[str, files.Entry]) -> None:
        known = {f"{place}/{file}" for file in entries}
        self.store.remove([found for found in self.store.below(place) if found not in known])

    def _logs(self) -> None:
        """Copy the logs as they are now, as a file may grow meanwhile, and which checkpoints are
        pinned."""
        # Those of a restore that was cut off are older than what is there.
        if (self.directory / LEFT).exists():
            return
        self._again(self._require_lease)  # or they would replace those of the next owner
        self._again(self._pins)
        for name in LOGS:
            path = self.directory / name
            # A log that can't be read now follows with the next checkpoint.
            with suppress(Damaged, FileNotFoundError):
                size = path.stat().st_size
                place = f"{self.run_name}/{name}"
                self._again(lambda: self.store.send(place, path, self._check, size))

    def _pins(self) -> None:
        here = {path.name for path in self.directory.glob("step-*.pinned")}
        # Those that aren't here stay: another disk may have held them.
        for name in here - pins(self.store, self.run_name):
            self.store.put(self._place(name), b"")

    def _remove(self, names: list[str], newest: bool) -> None:
        for name in names:
            if self._again(lambda: self._may_remove(name, newest)):
                self._again(lambda: self._discard(name))
                self.report({"removed": name})

    def _may_remove(self, name: str, newest: bool) -> bool:
        # From the newest whole one a lost machine is replaced.
        for other in reversed(steps(self.store, self.run_name)):
            if is_whole(self.store, self.run_name, other):
                return newest or other != name
        return True

    def _discard(self, name: str, unless_whole: bool = False) -> None:
        if unless_whole and is_whole(self.store, self.run_name, name):
            return
        self._require_lease()
        self.store.remove_folder(self._place(name))

    def _place(self, name: str) -> str:
        return f"{self.run_name}/{name}"

    # ------------------------------------------------------------------------- what may go wrong

    def _at_start(self, store: Store, action: Callable[[], T]) -> T:
        """As `_again`, but not for ever, since the trainer waits to begin. Raises Fault (74, 2)
        when its time is up."""
        seconds = self.commands.timeout_seconds
        done = patiently(store, action, seconds, self._trouble, self._sleep)
        self._recovered()
        return done

    def _again(self, action: Callable[[], T]) -> T:
        """What `action` returns, tried until it succeeds. Raises Over, Lost, GivenUp."""
        for pause in pauses():
            self._check()
            try:
                done = action()
            except errors() as error:
                self._trouble(reason(error))
            else:
                self._recovered()
                return done
            self._sleep(pause)
            # Of both: credentials that have expired may be new ones now.
            self.store.reopen()
            self.lease.store.reopen()
        raise AssertionError

    def _trouble(self, why: str) -> None:
        """Said once, until it works again."""
        if not self.in_trouble:
            self.in_trouble = True
            self._say(f"The mirror {self.store.address}: {why}. It is tried again.")

    def _recovered(self) -> None:
        if self.in_trouble:
            self.in_trouble = False
            self.report({"recovered": True})

    def _check(self) -> None:
        """Raises Over once time is up, Lost once another run has the prefix."""
        self.commands.check_time()
        if self.lost is not None:
            # Said once, since `run` catches it once.
            self.report({"warning": f"{self.lost}: nothing more is uploaded.", "lost": True})
            raise Lost(self.lost)

    def _require_lease(self) -> None:
        try:
            self.lease.check()
        except Lost as lost:
            self.lost = str(lost)
        self._check()

    def _sleep(self, seconds: float) -> None:
        """Shorter where time is up, or the prefix is lost."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self._check()
            time.sleep(min(0.1, seconds))
