"""What each program of this package does around its work: it prints, uses what it may of the machine, and ends.

It ends with one sentence and an exit code of docs/faults.md, and not later than the process that it belongs to. train.py,
which has ranks, ends by run/supervision.py.
"""

from __future__ import annotations

import ctypes
import errno
import math
import os
import select
import shutil
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, Optional

from fabric_llm.base import faults
from fabric_llm.base.faults import Fault, as_fault, as_mistake, one_line

SECONDS_FOR_A_READER = 5.0
SAFE_CHARACTERS = 1000  # a pipe that is writable has room for 4096 bytes
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)  # never the error of an input
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PR_SET_PDEATHSIG = 1  # prctl(2)


class Lasting:
    """A stream whose reader may be gone (Ctrl-C ends `tee` too) or may not read (Ctrl-S), or whose disk may be full.

    Output is then lost. Nothing is raised, and only the first write that nobody reads waits, for at most five seconds.
    """

    def __init__(self, stream: Any) -> None:
        self.stream, self.patience_seconds = stream, SECONDS_FOR_A_READER

    def write(self, text: str) -> int:
        for start in range(0, len(text), SAFE_CHARACTERS):
            self._if_read(self.stream.write, text[start : start + SAFE_CHARACTERS])
            if len(text) > SAFE_CHARACTERS:
                self.flush()
        return len(text)

    def flush(self) -> None:
        self._if_read(self.stream.flush)

    def _if_read(self, action: Callable[..., Any], *args: str) -> None:
        with suppress(OSError, ValueError):  # closed, or the disk is full
            is_read = bool(select.select([], [self.stream], [], self.patience_seconds)[1])
            self.patience_seconds = SECONDS_FOR_A_READER if is_read else 0.0
            if is_read:
                action(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def outlast_readers() -> None:
    """Wrap stdout and stderr of this process in `Lasting`."""
    for name in ("stdout", "stderr"):
        if (stream := getattr(sys, name)) is not None:
            stream.reconfigure(line_buffering=True)  # so that little is lost when nobody reads
            setattr(sys, name, Lasting(stream))


def plain_output() -> None:
    """What programs call first: warnings are a sentence without file and source, and only a terminal gets libraries' bars."""
    # Lightning replaces formatwarning when it is imported, so that this one is taken.
    warnings.showwarning = lambda message, *_, **__: print(f"Warning: {one_line(message)}", file=sys.stderr, flush=True)
    if sys.stderr is None or not sys.stderr.isatty():
        for library in ("TQDM_DISABLE", "HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS"):
            os.environ.setdefault(library, "1")  # read when they are imported


class Console:
    """A progress bar where stderr is a terminal, and lines that are printed above it."""

    def __init__(self, total_steps: int, done_steps: int) -> None:
        from tqdm import tqdm

        is_off = not sys.stderr.isatty()
        self.bar = tqdm(total=total_steps, initial=done_steps, unit="step", disable=is_off, leave=False)
        self.advance, self.close = self.bar.update, self.bar.close

    def line(self, text: str) -> None:
        """Print one line."""
        print(text, flush=True) if self.bar.disable else self.bar.write(text)


def cores(root: Path = Path("/")) -> int:
    """CPU cores that this process may use, as its affinity and its control groups leave them. root: in tests."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for group in _control_groups(root):
        quota, period, *_ = *_words(group / "cpu.max"), "max", "max"  # microseconds, of every so many
        if quota.isdigit():
            count = min(count, math.ceil(int(quota) / int(period)))
    return max(count, 1)


def free_memory_bytes(root: Path = Path("/")) -> Optional[int]:
    """Memory that this process and those that it starts may still take, files in memory left out; None where unknown."""
    words = _words(root / "proc/meminfo")
    free = [int(words[words.index("MemAvailable:") + 1]) * 2**10] if "MemAvailable:" in words else []
    for group in _control_groups(root):
        most, used, stat = (_words(group / f"memory.{name}") for name in ("max", "current", "stat"))
        if most and used and most[0].isdigit():
            files = [int(stat[stat.index(kind) + 1]) for kind in ("active_file", "inactive_file") if kind in stat]
            free.append(int(most[0]) - int(used[0]) + sum(files))
    return max(min(free), 0) if free else None


def _control_groups(root: Path) -> list[Path]:
    """The folders of this process's control group, of version 2, and of those around it, as far as it sees them."""
    names = [word[3:].lstrip("/") for word in _words(root / "proc/self/cgroup") if word.startswith("0::")]
    top = root / "sys/fs/cgroup"
    inside = [Path(os.path.normpath(top / name)) for name in names]
    return [folder for one in inside for folder in (one, *one.parents) if folder.is_relative_to(top)]


def _words(file: Path) -> list[str]:
    """Of a file of the kernel; none where it isn't there."""
    try:
        return file.read_text().split()
    except OSError:
        return []


def die_with(parent: int) -> None:
    """The kernel kills this process when `parent`, which has started it, ends, however that ends. Linux only."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended before the kernel knew
            os._exit(1)


@contextmanager
def uninterrupted(handler: Any = signal.SIG_IGN) -> Iterator[None]:
    """Ignore requests to stop in the body, such as two renames of which both or none must be made.

    handler: what takes them instead, but for those that nohup or a shell has set to be ignored.
    """
    is_main = threading.current_thread() is threading.main_thread()  # only there handlers can be set
    heeded = [number for number in SIGNALS if is_main and signal.getsignal(number) != signal.SIG_IGN]
    former = {number: signal.signal(number, handler) for number in heeded}
    try:
        yield
    finally:
        for number, before in former.items():
            signal.signal(number, before)


@contextmanager
def in_one_sentence(program: str) -> Iterator[SimpleNamespace]:
    """Print whatever ends the body, a request to stop included, as one sentence, and raise SystemExit with its code.

    Gives the body an object whose `left` says in words what the program leaves behind where it is asked to stop.
    """
    ending = SimpleNamespace(left="nothing was written", asked=False)

    def stop(number: int, frame: Any) -> NoReturn:
        ending.asked = True
        raise KeyboardInterrupt

    with uninterrupted(stop):
        try:
            yield ending
        except SystemExit:
            raise
        except BaseException as error:
            with uninterrupted():  # the program ends already
                # An interrupted import or callback may raise another exception than KeyboardInterrupt.
                if ending.asked:
                    fault = Fault(f"stopped on request; {ending.left}.", faults.STOPPED)
                elif isinstance(error, PermissionError):
                    fault = Fault(f"{str(error.filename)!r} can't be read: {error.strerror}.")
                else:
                    fault = as_mistake(error)
                if fault.code == faults.UNEXPECTED and not isinstance(error, Fault):
                    traceback.print_exc()
                print(f"{program}: error: {fault}", file=sys.stderr, flush=True)
                raise SystemExit(fault.code) from None


@contextmanager
def on_disk(output: Path, folder: Path, needs: str) -> Iterator[None]:
    """Raise disk errors of the body, which makes `output` in `folder`, as a Fault: 74, or 73 without permission to write.

    needs: what the body needs, in words, so that the message says how much room to make.
    """
    free = shutil.disk_usage(folder.parent).free
    try:
        yield
    except Fault:
        raise
    except Exception as error:
        name, full = getattr(error, "filename", None), getattr(error, "errno", None) in FULL
        if name is not None and not full and not Path(str(name)).absolute().is_relative_to(folder.absolute()):
            raise  # the error of an input
        if isinstance(error, PermissionError):
            raise Fault(f"output {output} cannot be written: {error.strerror}.", faults.UNWRITABLE) from error
        cause: Optional[BaseException] = error  # a library may have wrapped the error of the disk
        while cause is not None and as_fault(cause).code != faults.SAVE_FAILED:
            cause = cause.__cause__ or cause.__context__
        if cause is None:
            raise
        raise Fault(
            f"output {output} cannot be written ({str(as_fault(cause))[:200].rstrip('.')}): {needs}, and "
            f"{free / 2**30:,.2f} GiB were free there at the start.",
            faults.SAVE_FAILED,
        ) from error
