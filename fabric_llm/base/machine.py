"""What the machine has for this process, and what the system is asked to do with it."""

import ctypes
import math
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Optional

PR_SET_PDEATHSIG = 1  # prctl(2)
M_MMAP_THRESHOLD = -3  # mallopt(3)
KEPT_BLOCK = 2**19  # bytes


def cores(root: Path = Path("/")) -> int:
    """CPU cores that this process may use by its affinity and control groups. root: for tests."""
    count = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        count = len(os.sched_getaffinity(0))
    for group in _control_groups(root):
        # The file holds the quota and the period, in microseconds.
        quota, period, *_ = (*_words(group / "cpu.max"), "max", "max")
        if quota.isdigit():
            count = min(count, math.ceil(int(quota) / int(period)))
    return max(count, 1)


def free_memory_bytes(root: Path = Path("/")) -> Optional[int]:
    """Memory that this process and its children may still take; None if unknown. Cached files count
    as free."""
    words = _words(root / "proc/meminfo")
    free = []
    if "MemAvailable:" in words:
        free.append(int(words[words.index("MemAvailable:") + 1]) * 2**10)
    for group in _control_groups(root):
        most, used, stat = (_words(group / f"memory.{name}") for name in ("max", "current", "stat"))
        # `max` isn't a number: then the group has no limit.
        if most and used and most[0].isdigit():
            files = [
                int(stat[stat.index(kind) + 1])
                for kind in ("active_file", "inactive_file")
                if kind in stat
            ]
            # The kernel counts cached files as used, but drops them when memory is needed.
            free.append(int(most[0]) - int(used[0]) + sum(files))
    return max(min(free), 0) if free else None


def _control_groups(root: Path) -> list[Path]:
    """The folders of this process's control group (version 2) and of its parents, as far as they
    can be seen."""
    # The line of version 2 begins with `0::`; those of version 1 are left out.
    names = [
        word[3:].lstrip("/") for word in _words(root / "proc/self/cgroup") if word.startswith("0::")
    ]
    top = root / "sys/fs/cgroup"
    inside = [Path(os.path.normpath(top / name)) for name in names]
    # A limit of any parent holds for this process as well.
    return [
        folder for one in inside for folder in (one, *one.parents) if folder.is_relative_to(top)
    ]


def _words(file: Path) -> list[str]:
    """The words in a file of the kernel; [] if there is no such file."""
    try:
        return file.read_text().split()
    except OSError:
        return []


def shows_gpus(root: Path = Path("/")) -> bool:
    """Whether NVIDIA's driver shows GPUs here that the environment doesn't hide."""
    hides = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return not hides and any((root / "dev").glob("nvidia[0-9]*"))


def return_freed_memory() -> None:
    """Have malloc return blocks of more than `KEPT_BLOCK` bytes to the system once they are freed.
    For glibc alone.

    By itself it keeps those of up to 32 MiB once one of them was freed, between which a rank that
    gathers and frees layers leaves holes. What the environment says (`MALLOC_MMAP_THRESHOLD_`)
    stays.
    """
    if sys.platform.startswith("linux") and "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        with suppress(AttributeError):  # another C library
            ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, KEPT_BLOCK)


def die_with(parent: int) -> None:
    """Have the kernel kill this process when `parent`, which started it, ends for any reason. Linux
    only."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it has ended already
            os._exit(1)
