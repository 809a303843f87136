"""What the trainer tells the process of its mirror, while that uploads.

Commands come as lines of JSON on stdin:

    {"upload": "step-00000100"}
    {"remove": ["step-00000050"], "newest": false}  newest: true: also the newest whole one, as
                                                    after going back to an earlier step
    {"end": 600}                                    seconds for what is left; so does the end of the
                                                    file, where the trainer was killed

Reports go as lines of JSON to stdout; the trainer alone writes logs:

    {"ready": true, "checkpoints": [names], "own": true}  own: whether this run directory was
                                                          the last that was mirrored there
    {"refused": sentence, "code": 73}        also where it ends early
    {"mirrored": name, "bytes": n, "seconds": s, "requests": n}  bytes: those that were sent
    {"removed": name}  {"given_up": name}  {"warning": sentence}  {"recovered": true}
    {"warning": sentence, "lost": true}      another run has the prefix: nothing more is uploaded
    {"ended": true, "behind": [names]}       what was to be uploaded, and isn't there
"""

import json
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Optional

from fabric_llm.base.files import STEP_NAME

MOST_WAITING = 2  # checkpoints, the newest ones
GRACE_SECONDS = 2.0  # for a request that is on its way when time is up


class Over(Exception):
    """Time is up."""


class Commands:
    """`listen` takes them in one thread, and `following` hands them out in another."""

    def __init__(self, report: Callable[[dict[str, Any]], None], timeout_seconds: float) -> None:
        """report: called with each report, from several threads. timeout_seconds: for what is left
        once stdin ends without {"end"}."""
        self.report, self.timeout_seconds = report, timeout_seconds
        self.changed = threading.Condition()  # for changes of the three below
        self.queue: deque[tuple[str, Any]] = deque()  # (command, what it names)
        self.current: Optional[str] = None  # the checkpoint that is being uploaded
        self.deadline: Optional[float] = None  # of time.monotonic(), once there is one
        self.has_begun = False  # whether what is asked for can be done by now
        self.stopped = threading.Event()

    def listen(self, lines: Iterable[str]) -> None:
        """Take commands until the lines end."""
        for line in lines:
            try:
                self._take(json.loads(line))
            except (ValueError, TypeError, AttributeError, KeyError) as error:
                self.report({"warning": f"The mirror doesn't understand {line[:100]!r}: {error}."})
        with self.changed:
            if self.deadline is None:
                # A trainer that was killed before it began has left nothing to do.
                is_needed = self.has_begun or self.queue
                self._end(self.timeout_seconds if is_needed else 0.0)

    def following(self) -> Optional[tuple[str, Any]]:
        """The next command and what it names, once there is one; None at the end. Raises Over."""
        with self.changed:
            self.changed.wait_for(lambda: self.queue or self.deadline is not None)
            self.check_time()
            if not self.queue:
                return None
            command, named = self.queue.popleft()
            if command == "upload":
                self.current = named
            return command, named

    def wait_for_end(self) -> None:
        """Wait until there is a deadline."""
        with self.changed:
            self.changed.wait_for(lambda: self.deadline is not None)

    def check_time(self) -> None:
        """Raises Over once time is up."""
        if self.deadline is not None and time.monotonic() > self.deadline:
            raise Over

    def _take(self, command: dict[str, Any]) -> None:
        names = [*command.get("remove", ())]
        if "upload" in command:
            names.append(command["upload"])
        for name in names:
            # Nothing but checkpoints is ever touched.
            if not re.fullmatch(STEP_NAME, name):
                raise ValueError(f"{name!r} is no checkpoint's name")
        with self.changed:
            if "upload" in command:
                self.queue.append(("upload", names[0]))
                # Older ones are given up, so that a server that is slower than the run has the
                # newest.
                for name in self._waiting()[:-MOST_WAITING]:
                    self._forget(name)
            if "remove" in command:
                # What is to be removed needn't be copied before.
                for name in set(names) & set(self._waiting()):
                    self._forget(name)
                self.queue.append(("remove", (names, bool(command.get("newest")))))
            if "end" in command:
                self._end(float(command["end"]))
            self.changed.notify()

    def _waiting(self) -> list[str]:
        return [name for command, name in self.queue if command == "upload"]

    def _forget(self, name: str) -> None:
        self.queue.remove(("upload", name))
        # A former process may have sent some of its files.
        self.queue.append(("clear", name))
        self.report({"given_up": name})

    def _end(self, seconds: float) -> None:
        self.deadline = time.monotonic() + seconds
        self.changed.notify()
        # A request that is on its way can't be interrupted, so this process ends without it.
        timer = threading.Timer(seconds + GRACE_SECONDS, self._exit)
        timer.daemon = True
        timer.start()

    def _exit(self) -> None:
        self.report_end()
        os._exit(0)

    def report_end(self) -> None:
        with self.changed:
            # Told once, although `_exit` calls this from a thread of its own.
            if not self.stopped.is_set():
                self.stopped.set()
                behind = [*[name for name in (self.current,) if name], *self._waiting()]
                self.report({"ended": True, "behind": behind})
