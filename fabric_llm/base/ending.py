"""How prepare_data.py and export_hf.py end: whatever happens becomes one sentence and a code of docs/faults.md."""

from __future__ import annotations

import errno
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, Optional

from fabric_llm.base.faults import BAD_INPUT, SAVE_FAILED, STOPPED, UNEXPECTED, UNWRITABLE, Fault, as_fault

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)  # no input's
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Ending:
    """What is said at the end of a program that was asked to stop."""

    def __init__(self, left: str) -> None:
        self.left = left  # what it leaves behind, in words
        self.asked = False

    def stop(self, number: int, frame: Any) -> NoReturn:
        """The signal handler."""
        self.asked = True
        raise KeyboardInterrupt


@contextmanager
def in_one_sentence(program: str) -> Iterator[Ending]:
    """Whatever ends the body is told in one sentence, and SystemExit raised with its code; so are requests to stop."""
    ending = Ending("nothing was written")
    former = {number: signal.signal(number, ending.stop) for number in SIGNALS if not _is_ignored(number)}
    try:
        yield ending
    except SystemExit:
        raise
    except BaseException as error:
        for number in former:
            signal.signal(number, signal.SIG_IGN)  # the end has come
        # An interrupted import or callback may raise anything in the place of what interrupted it.
        fault = Fault(f"stopped on request; {ending.left}.", STOPPED) if ending.asked else _told(error)
        if fault.code == UNEXPECTED:
            traceback.print_exc()
        print(f"{program}: error: {fault}", file=sys.stderr, flush=True)
        raise SystemExit(fault.code) from None
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _is_ignored(number: int) -> bool:
    """As nohup has it, or a shell without job control for what runs in the background."""
    return signal.getsignal(number) == signal.SIG_IGN


def _told(error: BaseException) -> Fault:
    if isinstance(error, ValueError) and not isinstance(error, Fault):
        return Fault(" ".join(str(error).split()), BAD_INPUT)
    if isinstance(error, PermissionError):
        return Fault(f"{str(error.filename)!r} can't be read: {error.strerror}.", BAD_INPUT)
    return as_fault(error)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Requests to stop come too late here: what takes two renames gets both, and then the work is done."""
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
    """What goes wrong with the disk while `output` is made, in `folder`, as a Fault: 74, or 73 where one may not write.

    needs: what it takes, in words, for whoever has to make room.
    """
    free = shutil.disk_usage(folder.parent).free
    try:
        yield
    except Fault:
        raise
    except Exception as error:
        name, full = getattr(error, "filename", None), getattr(error, "errno", None) in FULL
        if name is not None and not full and not Path(str(name)).absolute().is_relative_to(folder.absolute()):
            raise  # an input
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
    """Fault (74) for a full or broken disk, also where a library has wrapped its error; None for anything else."""
    seen: Optional[BaseException] = error
    while seen is not None:
        if (fault := as_fault(seen)).code == SAVE_FAILED:
            return fault
        seen = seen.__cause__ or seen.__context__
    return None
