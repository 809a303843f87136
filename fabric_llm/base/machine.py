"""What this process may use of its machine: CPU cores and memory, as its affinity and its control groups leave them."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Optional


def cores(root: Path = Path("/")) -> int:
    """CPU cores that this process may use. root: of the file system, in tests."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for group in _control_groups("cpu", root):
        quota = _words(group / "cpu.max") or _words(group / "cpu.cfs_quota_us") + _words(group / "cpu.cfs_period_us")
        if len(quota) == 2 and quota[0].isdigit():  # microseconds of every so many; without a limit "max", or -1
            count = min(count, math.ceil(int(quota[0]) / int(quota[1])))
    return max(count, 1)


def free_memory_bytes(root: Path = Path("/")) -> Optional[int]:
    """Memory that this process and those that it starts may still take, files in memory left out; None where unknown."""
    words = _words(root / "proc/meminfo")
    free = [int(words[words.index("MemAvailable:") + 1]) * 2**10] if "MemAvailable:" in words else []
    for group in _control_groups("memory", root):
        most, used = (
            _words(group / new) or _words(group / old)
            for new, old in (("memory.max", "memory.limit_in_bytes"), ("memory.current", "memory.usage_in_bytes"))
        )
        if most and used and most[0].isdigit():
            stat = _words(group / "memory.stat")
            kinds = [f"{total}{kind}_file" for total in ("total_", "") for kind in ("active", "inactive")]
            files = [int(stat[stat.index(kind) + 1]) for kind in kinds if kind in stat][:2]
            free.append(int(most[0]) - int(used[0]) + sum(files))
    return max(min(free), 0) if free else None


def _control_groups(controller: str, root: Path) -> Iterator[Path]:
    """The folders of this process's control groups, of version 1 and 2, and of those around them, as far as it sees them."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, name = line.split(":", 2)
        if controllers == "" or controller in controllers.split(","):
            top = root / "sys/fs/cgroup" / (controller if controllers else "")
            inside = Path(os.path.normpath(top / name.lstrip("/")))
            yield from (folder for folder in (inside, *inside.parents) if folder.is_relative_to(top))


def _words(file: Path) -> list[str]:
    return _text(file).split()


def _text(file: Path) -> str:
    """Of a file of the kernel; nothing where there is none."""
    try:
        return file.read_text()
    except OSError:
        return ""
