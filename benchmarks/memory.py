"""What a command and all that it has started hold in memory, by the operating system's own figures,
/proc/PID/smaps_rollup."""

import subprocess
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple


class Held(NamedTuple):
    """Bytes at one moment. What processes share counts once (PSS)."""

    anonymous: int  # of all processes, with shared memory: what is there nowhere else
    mapped: int  # pages of files, which the kernel drops where it needs the memory
    pids: list[int]

    @property
    def pss(self) -> int:
        return self.anonymous + self.mapped


def held(pid: int) -> Held:
    """What a process holds now, and all that it has started."""
    tree: list[int] = [pid]
    kib: Counter[str] = Counter()
    for each in tree:  # which grows
        with suppress(OSError):  # of one that has just ended
            for file in Path(f"/proc/{each}/task").glob("*/children"):
                tree += map(int, file.read_text().split())
            for line in Path(f"/proc/{each}/smaps_rollup").read_text().splitlines()[1:]:
                kib[line.split(":")[0]] += int(line.split()[1])
    return Held(1024 * (kib["Pss_Anon"] + kib["Pss_Shmem"]), 1024 * kib["Pss_File"], tree)


def watched(
    words: list[str], every_seconds: float, seen: Callable[[Held], Any], **settings: Any
) -> int:
    """The exit code of a command, whose memory `seen` is told as often as that, or as takes a third
    of a core.

    settings: of subprocess.Popen.
    """
    process = subprocess.Popen(words, stdin=subprocess.DEVNULL, **settings)
    while process.poll() is None:
        began = time.monotonic()
        seen(held(process.pid))
        time.sleep(max(every_seconds, 2 * (time.monotonic() - began)))
    return process.returncode
