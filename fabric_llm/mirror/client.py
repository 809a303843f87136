"""The mirror as rank 0 sees it: a process beside it that copies checkpoints, and what that has
reported."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import Any, Optional

from fabric_llm.base.faults import SAVE_FAILED, Fault
from fabric_llm.base.files import step_of

# A file in a run directory that may hold less than the mirror does, since another one was the last
# to be mirrored there.
LEFT = ".mirror-left"
SECONDS_TO_START_AGAIN = 30.0
SECONDS_TO_END = 10.0  # for removals and logs
SECONDS_TO_LOOK = 0.05  # whether the process has ended
Report = dict[str, Any]  # a line of the process, see commands.py


class Mirror:
    """A process that copies the checkpoints of a run to object storage, one after the other.

    It has a session of its own, so that a signal to this one doesn't end it, and it goes on for
    `seconds` after this process has died. names: of the checkpoints that are whole there.
    """

    def __init__(self, address: str, directory: Path, seconds: float) -> None:
        """Waits until the process has the lease of the run. Raises Fault where the address can't
        be used (2), can't be reached in `seconds` (74), or another run uses it (73)."""
        self.address, self.directory, self.seconds = address, directory, seconds
        self.names: set[str] = set()
        self.documents: dict[str, Any] = {}  # progress.json of those that may not be here, by name
        self.leaving: set[str] = set()  # those that were asked to be removed
        self.undone: set[str] = set()  # those of `go_back`, until they are
        self.waiting: list[str] = []  # handed over, and neither there nor given up
        self.is_own = True  # whether this run directory was the last to be mirrored there
        self.deadline: Optional[float] = None  # of time.monotonic(), once the run is over
        self.queue: SimpleQueue[Report] = SimpleQueue()
        self.unsent: list[dict[str, Any]] = []  # commands
        # `_start_again` sends commands from a thread of its own: whoever sends holds the lock.
        self.lock, self.is_lost = Lock(), False
        self.next_look = 0.0  # of time.monotonic(), see `look`
        self._start()

    def _start(self) -> None:
        # The package lies in the checkout, which may not be the working directory.
        root = str(Path(__file__).parents[2])
        path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "fabric_llm.mirror.process", self.address),
                *(str(self.directory), "--timeout", str(self.seconds)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,
            text=True,
        )
        assert self.process.stdout is not None
        first: Report = {}
        for line in self.process.stdout:
            first = json.loads(line)
            if not first.keys().isdisjoint(("ready", "refused")):
                break
            # Such as that it waits for the uploader of a former process.
            if "warning" in first:
                print(f"--mirror: {first['warning']}", flush=True)
        if "ready" not in first:
            with self.process:
                self.process.kill()
            sentence = first.get("refused", "the process of --mirror ended before it had begun.")
            if sentence.startswith(self.address):
                sentence = f"--mirror {sentence}"
            raise Fault(sentence, first.get("code", SAVE_FAILED))
        self.names.update(first["checkpoints"])
        self.is_own = first["own"]
        # A thread takes the reports, so that the process never waits for a pipe that is full.
        self.listener = Thread(target=self._listen, args=[self.process.stdout], daemon=True)
        self.listener.start()

    def _listen(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.queue.put(json.loads(line))

    def upload(self, name: str) -> None:
        """Copy the published checkpoint `name` of the run directory, once those before it are
        there."""
        self.waiting.append(name)
        self._say({"upload": name})

    def remove(self, names: Iterable[str]) -> None:
        """Remove checkpoints there, their manifests first. The newest one stays, until there is a
        newer one and it is asked for again."""
        names = sorted(self.names.intersection(names) - self.leaving)
        self.leaving.update(names)
        if names:
            self._say({"remove": names})

    def go_back(self, step: int) -> None:
        """Remove the copies of later steps, which the run will write anew."""
        # One that is on its way may be there before the process reads this.
        handed_over = self.names.union(self.waiting)
        later = sorted(name for name in handed_over if step_of(Path(name)) > step)
        self.waiting = [name for name in self.waiting if step_of(Path(name)) <= step]
        self.names.difference_update(later)
        self.undone.update(later)
        for name in later:
            self.documents.pop(name, None)
        if later:
            self._say({"remove": later, "newest": True})

    def _say(self, command: dict[str, Any]) -> None:
        with self.lock:
            self.unsent.append(command)
            if not self.is_lost:
                self._send()

    def _send(self) -> None:
        assert self.process.stdin is not None
        try:
            while self.unsent:
                self.process.stdin.write(json.dumps(self.unsent[0]) + "\n")
                self.process.stdin.flush()
                self.unsent.pop(0)
        except BrokenPipeError:
            # Whatever has ended the process, such as the kernel for want of memory.
            self.is_lost = True
            self.queue.put({"warning": "the process of --mirror was lost, and is started again."})
            Thread(target=self._start_again, daemon=True).start()

    def _start_again(self) -> None:
        """No step waits for it. The new process finds what is there, and gets what waits once
        more."""
        while True:
            try:
                self._start()
                break
            except Fault:  # such as a server that is away as well
                time.sleep(SECONDS_TO_START_AGAIN)
        with self.lock:
            asked = [command.get("upload") for command in self.unsent]
            # Uploads that the lost process was told of are older than what is unsent.
            lost: list[dict[str, Any]] = [
                {"upload": name} for name in self.waiting if name not in asked
            ]
            # What was undone goes first: the run may have made a step of the same name anew.
            if self.undone:
                lost.insert(0, {"remove": sorted(self.undone), "newest": True})
            self.unsent, self.is_lost = [*lost, *self.unsent], False
            self._send()

    def look(self) -> None:
        """Start the process again if it was lost while nothing was said to it."""
        now = time.monotonic()
        if self.process.poll() is not None and not self.is_lost and now > self.next_look:
            self.next_look = now + SECONDS_TO_START_AGAIN
            self._say({})

    def reports(self) -> list[Report]:
        """What the process has reported since this was last called."""
        reports: list[Report] = []
        while True:
            try:
                report = self.queue.get_nowait()
            except Empty:
                return reports
            name = report.get("mirrored") or report.get("given_up")
            # It is of what was undone: of one of the same name that waits, the process says nothing
            # before it has removed that.
            if name in self.undone:
                continue
            if "mirrored" in report:
                self.names.add(report["mirrored"])
                # What was asked for and refused, because it was the newest, may be asked for again.
                self.leaving.clear()
            elif "removed" in report:
                self.names.discard(report["removed"])
                self.undone.discard(report["removed"])
                self.documents.pop(report["removed"], None)
            elif "lost" in report:
                self.end_soon()  # what waits won't be there, however long the run waits
            if name in self.waiting:
                self.waiting.remove(name)
            reports.append(report)

    def may_go(self, name: str) -> bool:
        """Whether a local checkpoint has a copy, or will get none."""
        return name not in self.waiting

    def seconds_left(self) -> float:
        """Until `seconds` have passed since this was first called."""
        if self.deadline is None:
            self.deadline = time.monotonic() + self.seconds
        return max(0.0, self.deadline - time.monotonic())

    def end_soon(self, *_: Any) -> None:
        """Wait no longer for what isn't there yet. A handler of signals."""
        self.deadline = time.monotonic()

    def close(self) -> None:
        """Let the process finish what it was told, for as long as there is time, and end."""
        told, latest = None, 0.0
        while self.process.poll() is None:
            seconds = self.seconds_left() + SECONDS_TO_END
            # `end_soon` may be called meanwhile.
            if self.deadline != told:
                told, latest = self.deadline, time.monotonic() + seconds + SECONDS_TO_END
                self._say({"end": seconds})
            if time.monotonic() > latest:
                self.process.kill()
            time.sleep(SECONDS_TO_LOOK)
        # The last reports may still be on their way.
        self.listener.join(SECONDS_TO_END)
