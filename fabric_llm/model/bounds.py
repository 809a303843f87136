"""What a configuration may declare: transformers expands some of its numbers into lists, tables and modules as it reads it.

`check` looks at the JSON itself, before anything is built from it. `try_out` builds it in a child process with little time
and memory first, for whatever nobody has thought of.
"""

from __future__ import annotations

import faulthandler
import math
import os
import re
import resource
import signal
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable, NoReturn

from fabric_llm.base.ending import die_with

MOST_BYTES = 4 * 2**20  # of a file; configurations have a few thousand, of quantised models some hundred thousand
MOST_ENTRIES = 2**15  # of a list or an object, and of labels, experts and blocks: Switch-C has 2048 experts
MOST_LAYERS = 4096
MOST_EXPERTS = 2**18  # of all layers together: each can be some modules; Kimi-K2 has 23,424
COUNT = re.compile(r"(?:^|_)(layer|expert|label|block)s?$")  # how keys end that say how many there are
LARGEST_NUMBER = 3.5e38  # computing with more, such as the factor of a rotary embedding, overflows
MOST_CPU_SECONDS = 10  # to build the modules without memory, several times what the largest models take
MOST_SECONDS = 120  # on a machine that is busy; whoever hasn't used its processor time by then isn't refused
MOST_MEMORY_BYTES = 2 * 2**30
TOO_MUCH_MEMORY = 3  # exit code of the child process


class TooMuch(ValueError):
    """What a configuration declares too much of, and the bound."""


def check_file(path: Path) -> None:
    """Raises TooMuch for a file that is larger than any configuration, with the bound."""
    if (size := path.stat().st_size) > MOST_BYTES:
        raise TooMuch(f"{path.name} has {size / 2**20:.1f} MiB; at most {MOST_BYTES // 2**20} MiB are read")


def check_document(document: Any) -> None:
    """Raises TooMuch for what a configuration's JSON declares too many of, before anyone expands it; with the bound."""
    for path, value in _values(document, ()):
        where = ".".join(filter(None, path))
        if isinstance(value, (list, dict)) and len(value) > MOST_ENTRIES:
            raise TooMuch(f"it declares {len(value)} entries ({where}); at most {MOST_ENTRIES} are read")
        if isinstance(value, (int, float)) and LARGEST_NUMBER < abs(value) < math.inf:
            raise TooMuch(f"it holds a number that float32 can't ({where}: {str(value)[:20]})")
        word = COUNT.search(path[-1]) if path else None
        if word is not None and isinstance(value, int):
            _require(value, f"{word[1]}s", where, MOST_LAYERS if word[1] == "layer" else MOST_ENTRIES)
        if path and path[-1] == "attention_types":  # of GPT-Neo
            _require(_repeated(value), "layers", where, MOST_LAYERS)
    for path, value in _values(document, ()):
        if isinstance(value, dict):
            layers, experts = (_largest(value, kind) for kind in ("layer", "expert"))
            _require(layers * experts, "experts", f"{experts} in each of {layers} layers", MOST_EXPERTS)


def check_tokenizer(document: dict[str, Any]) -> None:
    """The same for tokenizer_config.json, whose vocabulary may well be longer."""
    for name in ("extra_ids", "offset"):  # of T5 and Pegasus: tokens that are made, and not listed
        if isinstance(count := document.get(name), int):
            _require(count, "tokens", name, MOST_ENTRIES)


def _require(count: int, what: str, where: str, most: int) -> None:
    if count > most:
        raise TooMuch(f"it declares {count} {what} ({where}); at most {most} are read")


def _values(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """(the keys that lead there, value) of everything in objects and lists."""
    yield path, value
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _values(part, (*path, str(key)))
    elif isinstance(value, list):
        for part in value:
            if isinstance(part, (list, dict)):
                yield from _values(part, (*path, ""))


def _repeated(value: Any) -> int:
    """[[["global", "local"], 12]] -> 24"""
    total = 0
    for item in value if isinstance(value, list) else ():
        if isinstance(item, list) and len(item) == 2 and isinstance(item[0], list) and isinstance(item[1], int):
            total += len(item[0]) * max(0, item[1])
    return total


def _largest(part: dict[str, Any], kind: str) -> int:
    """The largest number of such things that an object declares."""
    words = ((COUNT.search(key), value) for key, value in part.items() if isinstance(value, int))
    return max((value for word, value in words if word is not None and word[1] == kind), default=0)


def try_out(build: Callable[[], Any]) -> None:
    """Call `build` in a child process first. Raises TooMuch where that takes too much time or memory, or crashes.

    What it returns or raises otherwise is nobody's business: whoever called this calls it again. A child is forked, not
    started: importing transformers takes longer than most builds. Threads of this process don't exist in it.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12, of threads
        pid = os.fork()
    if pid == 0:
        _in_child(build)
    deadline = time.monotonic() + MOST_SECONDS
    wait = 0.001
    while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return
        time.sleep(wait)
        wait = min(2 * wait, 0.05)
    code = os.waitstatus_to_exitcode(ended[1])
    if code in (-signal.SIGXCPU, -signal.SIGKILL):
        raise TooMuch(f"building it takes more than {MOST_CPU_SECONDS} s of processor time")
    if code == TOO_MUCH_MEMORY:
        raise TooMuch(f"building it takes more than {MOST_MEMORY_BYTES / 2**30:.1f} GiB of memory")
    if code < 0:
        raise TooMuch(f"building it ends with {signal.Signals(-code).name}")


def _in_child(build: Callable[[], Any]) -> NoReturn:
    code = 0
    try:
        _limit()
        build()
    except MemoryError:
        code = TOO_MUCH_MEMORY
    except BaseException as error:
        code = TOO_MUCH_MEMORY if "allocate" in str(error) else 0  # torch's is a RuntimeError
    finally:
        os._exit(code)


def _limit() -> None:
    """Of this child process: silence, little time and memory, no core file, no life without its parent."""
    import torch  # here, since a configuration's JSON is looked at before torch is imported

    faulthandler.disable()
    die_with(os.getppid())
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    for kind, most in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_CPU, MOST_CPU_SECONDS),
        (resource.RLIMIT_AS, in_use + MOST_MEMORY_BYTES),
    ):
        hard = resource.getrlimit(kind)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))
    torch.set_num_threads(1)  # there is no thread pool in a forked process
