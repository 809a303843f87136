"""What a command and all that it has started hold in memory, by the operating system's own figures,
/proc/PID/smaps_rollup.

`Counted`: what the tensors of a step hold, by another count than the plan's.
"""

from __future__ import annotations

import subprocess
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


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
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has just ended
            continue
        children.setdefault(parent, []).append(int(folder.name))
    tree, anonymous, mapped = [pid], 0, 0
    for each in tree:  # which grows
        tree += children.get(each, [])
        try:
            lines = Path(f"/proc/{each}/smaps_rollup").read_text().splitlines()[1:]
        except OSError:  # or a process that has ended and wasn't waited for
            continue
        found = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
        if found:
            anonymous += found["Pss_Anon"] + found["Pss_Shmem"]
            mapped += found["Pss_File"]
    return Held(anonymous, mapped, tree)


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


class Counted(TorchDispatchMode):
    """Bytes of the storages that are alive, each once, and the most that they were."""

    def __init__(self, tensors):
        super().__init__()
        self.sizes, self.peak = {}, 0
        self.count(tensors)

    def count(self, tensors):
        for tensor in tensors:
            storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
            if storage._cdata not in self.sizes:
                weakref.finalize(storage, self.sizes.pop, storage._cdata, None)
            self.sizes[storage._cdata] = weakref.ref(storage)
        found = (reference() for reference in list(self.sizes.values()))  # other threads free, too
        alive = sum(storage.nbytes() for storage in found if storage is not None)
        self.peak = max(self.peak, alive)

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        self.count(one for one in tree_leaves(result) if isinstance(one, torch.Tensor))
        return result
