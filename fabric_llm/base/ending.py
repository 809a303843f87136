"""How a program that works on folders ends: with one sentence and an exit code of docs/faults.md.

train.py, which has ranks, ends in run/supervision.py.
"""

import argparse
import atexit
import errno
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, Optional

from fabric_llm.base import faults
from fabric_llm.base.faults import Fault, as_fault, as_mistake
from fabric_llm.base.files import size
from fabric_llm.base.program import no_more_output

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# These are errors of writing, never of an input.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


class Asked(KeyboardInterrupt):
    """A signal has asked to stop.

    Of KeyboardInterrupt itself Python remembers that it has ended an `exec` of a text, such as that
    by which a dataclass is made, and then ends `python -m` by SIGINT, whatever code it is given.
    """


class Parser(argparse.ArgumentParser):
    """Of flags whose mistakes end the program with one sentence. `error` raises Fault."""

    def error(self, message: str) -> NoReturn:
        # argparse itself would print its usage and exit.
        raise Fault(f"{message}; see --help.")


@contextmanager
def uninterrupted(handler: Any = signal.SIG_IGN) -> Iterator[None]:
    """Ignore signals to stop in the body, such as two renames of which both or none must be made.

    handler: called instead, but not for signals that nohup or a shell has set to be ignored.
    """
    # Only the main thread can set handlers.
    is_main = threading.current_thread() is threading.main_thread()
    heeded = [
        number for number in SIGNALS if is_main and signal.getsignal(number) != signal.SIG_IGN
    ]
    former = {number: signal.signal(number, handler) for number in heeded}
    try:
        yield
    finally:
        for number, before in former.items():
            signal.signal(number, before)


@contextmanager
def blocked() -> Iterator[None]:
    """Hear signals to stop after the body. Processes that are started in it never hear them."""
    former = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)


@contextmanager
def in_one_sentence(program: str) -> Iterator[SimpleNamespace]:
    """Print whatever ends the body, also a signal to stop, in one sentence, and raise SystemExit
    with its code.

    That nobody reads stdout any more ends it without a sentence.

    Yields an object. The body sets its `left` to what the program leaves behind if it is stopped,
    in words.
    """
    ending = SimpleNamespace(left="nothing was written", asked=False)

    # The exception ends the body wherever it is, so that its own cleaning up is done.
    def stop(number: int, frame: Any) -> NoReturn:
        ending.asked = True
        raise Asked

    with uninterrupted(stop):
        try:
            yield ending
        # Whoever raised it has printed why.
        except SystemExit:
            raise
        except BaseException as error:
            with uninterrupted():  # the program is ending
                if isinstance(error, BrokenPipeError):
                    no_more_output()
                    raise SystemExit(faults.UNEXPECTED) from None
                # Asked first: an interrupted import or callback may raise another exception than
                # KeyboardInterrupt.
                if ending.asked:
                    fault = Fault(f"stopped on request; {ending.left}.", faults.STOPPED)
                else:
                    fault = as_mistake(error)
                # An error in this package: a report of it needs the traceback.
                if fault.code == faults.UNEXPECTED and not isinstance(error, Fault):
                    traceback.print_exc()
                print(f"{program}: error: {fault}", file=sys.stderr, flush=True)
                raise SystemExit(fault.code) from None
        finally:
            # Python takes a while to end, in which a signal would replace the exit code.
            for number in SIGNALS:
                atexit.register(signal.signal, number, signal.SIG_IGN)


@contextmanager
def on_disk(output: Path, folder: Path, needs: str) -> Iterator[None]:
    """Raise disk errors of the body, which makes `output` in `folder`, as a Fault: 74, or 73
    without permission to write.

    needs: the space that the body needs, in words, for the message.
    """
    # Measured before the body, whose files take space.
    free = shutil.disk_usage(folder.parent).free
    try:
        yield
    except Fault:
        raise
    except Exception as error:
        name, full = getattr(error, "filename", None), getattr(error, "errno", None) in FULL
        if (
            name is not None
            and not full
            and not Path(str(name)).absolute().is_relative_to(folder.absolute())
        ):
            raise  # the error of an input
        if isinstance(error, PermissionError):
            raise Fault(
                f"output {output} cannot be written: {error.strerror}.", faults.UNWRITABLE
            ) from error
        cause: Optional[BaseException] = error  # a library may have wrapped the disk's error
        while cause is not None and as_fault(cause).code != faults.SAVE_FAILED:
            cause = cause.__cause__ or cause.__context__
        if cause is None:
            raise
        raise Fault(
            f"output {output} cannot be written ({str(as_fault(cause))[:200].rstrip('.')}): "
            f"{needs}, and {size(free)} were free there at the start.",
            faults.SAVE_FAILED,
        ) from error
