"""How programs end: with one sentence and an exit code of docs/faults.md, and not later than the process they belong to.

train.py, which has ranks, ends by run/supervision.py.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, Optional

from fabric_llm.base.faults import BAD_INPUT, SAVE_FAILED, STOPPED, UNEXPECTED, UNWRITABLE, Fault, as_fault, as_mistake

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)  # never the error of an input
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PR_SET_PDEATHSIG = 1  # prctl(2)


def die_with(parent: int) -> None:
    """The kernel kills this process when `parent`, which has started it, ends, however that ends. Linux only."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the kernel knew
        os._exit(1)


class Ending:
    """What a program says when it ends because it was asked to stop."""

    def __init__(self, left: str) -> None:
        self.left = left  # what it leaves behind, in words
        self.asked = False

    def stop(self, number: int, frame: Any) -> NoReturn:
        """The signal handler."""
        self.asked = True
        raise KeyboardInterrupt


@contextmanager
def in_one_sentence(program: str) -> Iterator[Ending]:
    """Print whatever ends the body, a request to stop included, as one sentence, and raise SystemExit with its code."""
    ending = Ending("nothing was written")
    # nohup, or a shell without job control for a background process, has set some to be ignored.
    heeded = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    former = {number: signal.signal(number, ending.stop) for number in heeded}
    try:
        yield ending
    except SystemExit:
        raise
    except BaseException as error:
        for number in heeded:
            signal.signal(number, signal.SIG_IGN)  # the program ends already
        # An interrupted import or callback may raise another exception than KeyboardInterrupt.
        if ending.asked:
            fault = Fault(f"stopped on request; {ending.left}.", STOPPED)
        elif isinstance(error, PermissionError):
            fault = Fault(f"{str(error.filename)!r} can't be read: {error.strerror}.", BAD_INPUT)
        else:
            fault = as_mistake(error)
        if fault.code == UNEXPECTED and not isinstance(error, Fault):
            traceback.print_exc()
        print(f"{program}: error: {fault}", file=sys.stderr, flush=True)
        raise SystemExit(fault.code) from None
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ignore requests to stop in the body, such as two renames of which both or none must be made."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    former = {number: signal.signal(number, signal.SIG_IGN) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


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
            raise Fault(f"output {output} cannot be written: {error.strerror}.", UNWRITABLE) from error
        if (fault := _of_disk(error)) is None:
            raise
        raise Fault(
            f"output {output} cannot be written ({str(fault)[:200].rstrip('.')}): {needs}, and {free / 2**30:,.2f} GiB "
            "were free there at the start.",
            SAVE_FAILED,
        ) from error


def _of_disk(error: BaseException) -> Optional[Fault]:
    """Fault (74) for a full or broken disk, also if a library has wrapped the error; None for any other error."""
    seen: Optional[BaseException] = error
    while seen is not None:
        if (fault := as_fault(seen)).code == SAVE_FAILED:
            return fault
        seen = seen.__cause__ or seen.__context__
    return None
