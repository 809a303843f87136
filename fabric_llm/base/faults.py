"""Exit codes, and `Fault`, the exception that carries one of them and a sentence for the user."""

import errno
import os
import sys
from collections.abc import Sequence
from typing import Optional

DONE = 0
UNEXPECTED = 1  # any other error; its traceback is on stderr
BAD_INPUT = 2  # arguments, config, data, or a mismatch between them, which the user can correct
NO_CHECKPOINT = 66  # there is no complete, undamaged one
PEER_LOST = 71  # another rank has died or hangs
UNWRITABLE = 73  # the output directory can't be written, or another run is using it
SAVE_FAILED = 74
STOPPED = 75  # on request, after saving; after a second signal without saving
NON_FINITE = 76  # NaN or infinity, or too many spikes
REFUSED = 77  # for security
OUT_OF_MEMORY = 79  # of the device
NOT_MIRRORED = 80  # the run is over, but its last checkpoint isn't at --mirror
CODES = {UNEXPECTED, BAD_INPUT, NO_CHECKPOINT, PEER_LOST, UNWRITABLE, SAVE_FAILED}
CODES |= {STOPPED, NON_FINITE, REFUSED, OUT_OF_MEMORY, NOT_MIRRORED}
RETRYABLE = (
    PEER_LOST,
    SAVE_FAILED,
    STOPPED,
    NOT_MIRRORED,
)  # the same command with --resume auto may succeed
MAX_CHARACTERS = 4000  # of a sentence
# Messages of gloo, NCCL and torch.distributed when a peer is lost. Most are those of a plain
# RuntimeError.
_PEER_WORDS = (
    "gloo/transport",
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Socket closed",
    "NCCL error",
    "ncclRemoteError",
    "ncclSystemError",
    "Watchdog caught collective operation timeout",
    "Timed out waiting",
    "wait timeout after",
    "failed to recv, got 0 bytes",
    "recvValue failed",
)
_COMPILERS = ("torch._dynamo", "torch._inductor", "triton")  # modules of errors
# Absolute paths of folders in which this process makes files: what goes wrong with them is no
# mistake in an input.
OUTPUTS: set[str] = set()
_UNUSABLE = (errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR)
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG, errno.ESTALE, errno.EROFS)
# Of libraries such as tokenizers, whose errors have no errno.
_DISK_WORDS = ("No space left on device", "Disk quota exceeded", "File too large")
_MEMORY_WORDS = (
    "can't allocate memory",
    "Cannot allocate memory",
    "out of memory",
    "STATUS_ALLOC_FAILED",
)


class Fault(ValueError):
    """What ends a run: one sentence for the user, an exit code, and whether the same command may
    succeed later. again: flags with which the run starts once more by itself."""

    def __init__(
        self,
        sentence: str,
        code: int = BAD_INPUT,
        retryable: Optional[bool] = None,
        again: Sequence[str] = (),
    ) -> None:
        super().__init__(printable(sentence))
        self.again = list(again)
        self.code = code
        self.retryable = code in RETRYABLE if retryable is None else retryable


def one_line(error: object) -> str:
    """The text of an error without its line breaks."""
    return " ".join(str(error).split())


def printable(text: str) -> str:
    """`text` in one line of bounded length, with control characters, such as those in a file's
    name, made visible."""
    shown = ""
    for character in text[:MAX_CHARACTERS].replace("\n", " "):
        shown += character if character.isprintable() else repr(character)[1:-1]
    return shown + " ..." * (len(text) > MAX_CHARACTERS)


def missing_package(error: ModuleNotFoundError) -> str:
    """A sentence about a package that isn't installed, which mostly means that an environment isn't
    activated."""
    name, here = (error.name or str(error)).partition(".")[0], sys.executable
    return (
        f"the package {name} isn't installed for {here}: activate the environment that has it "
        "(source .venv/bin/activate), or make one, as README.md says under Start."
    )


def as_fault(error: BaseException) -> Fault:
    """`error` as a Fault, with a code that follows from its type and its message."""
    if isinstance(error, Fault):
        return error
    if isinstance(error, ModuleNotFoundError) and not str(error.name).startswith("fabric_llm"):
        return Fault(missing_package(error))
    words = one_line(error)
    # torch's errors are RuntimeErrors, most of them plain ones.
    is_of_library = isinstance(error, RuntimeError)
    if isinstance(error, KeyboardInterrupt):
        return Fault(words or "interrupted.", STOPPED)
    if (
        isinstance(error, MemoryError)
        or is_of_library
        and any(message in words for message in _MEMORY_WORDS)
    ):
        return Fault(words, OUT_OF_MEMORY)
    if isinstance(error, OSError) and error.errno in _DISK_ERRORS:
        return Fault(words, SAVE_FAILED)
    if isinstance(error, OSError) and _is_of_output(error):
        return unwritten(error.filename2 or error.filename, error)  # the second: of a rename
    # What writes has a fault of its own, see `unwritten`.
    if isinstance(error, PermissionError) and error.filename:
        return Fault(f"{str(error.filename)!r} can't be opened: {error.strerror}.")
    # The value of a flag that names a file or a folder.
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return Fault(f"{str(error.filename)[:100]!r}...: {error.strerror}.")
    if "creating shared memory segment" in words:  # NCCL, in a container with docker's 64 MiB
        return Fault(
            f"{words[:300]}: start the container with more shared memory (docker run --shm-size "
            "8g)."
        )
    torch = sys.modules.get("torch")  # if it isn't imported, it hasn't raised this error
    of_group = torch is not None and isinstance(error, torch.distributed.DistError)
    # A compiler has lost a process of its own, not a rank.
    is_of_library = is_of_library and not type(error).__module__.startswith(_COMPILERS)
    if of_group or is_of_library and any(message in words for message in _PEER_WORDS):
        return Fault(words, PEER_LOST)
    if any(word in words for word in _DISK_WORDS):
        return Fault(words, SAVE_FAILED)
    return Fault(f"{type(error).__name__}: {words}", UNEXPECTED)


def _is_of_output(error: OSError) -> bool:
    """Whether a file can't be used in one of OUTPUTS, or one of these isn't there any more."""
    for folder in OUTPUTS:
        if os.path.abspath(error.filename or "").startswith(os.path.join(folder, "")):
            # Without one in a folder that is there, this package has made a mistake.
            return error.errno in _UNUSABLE or not os.path.isdir(folder)
    return False


def unwritten(path: object, error: OSError) -> Fault:
    """The fault of a file that a program makes, and that can't be written: 74, or 73 without
    permission."""
    code = SAVE_FAILED if error.errno in _DISK_ERRORS else UNWRITABLE
    return Fault(f"{str(path)!r} can't be written: {error.strerror}.", code)


def as_mistake(error: BaseException) -> Fault:
    """`error` as a Fault, for code that reads flags, data or a model, in which a ValueError is a
    mistake of the user."""
    if isinstance(error, ValueError) and not isinstance(error, Fault):
        return Fault(str(error))
    return as_fault(error)
