"""What a configuration may declare: transformers expands some of its numbers into lists, tables and modules as it reads it.

`check_document` looks at the JSON itself, before anything is built from it. What is built then is `limited`.
"""

from __future__ import annotations

import math
import re
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MOST_BYTES = 4 * 2**20  # of a file; configurations have a few thousand, of quantised models some hundred thousand
MOST_ENTRIES = 2**15  # of a list or an object, and of labels, experts and blocks: Switch-C has 2048 experts
MOST_LAYERS = 4096
MOST_EXPERTS = 2**18  # of all layers together: each can be some modules; Kimi-K2 has 23,424
COUNT = re.compile(r"(?:^|_)(layer|expert|label|block)s?$")  # how keys end that say how many there are
LARGEST_NUMBER = 3.5e38  # computing with more, such as the factor of a rotary embedding, overflows
MOST_CPU_SECONDS = 10  # to build the modules without memory, several times what the largest models take
MOST_MEMORY_BYTES = 2 * 2**30


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


@contextmanager
def limited() -> Iterator[None]:
    """In the body, which builds what a configuration declares, little time and memory, for whatever nobody has thought of.

    Raises TooMuch where it takes more, whatever the body has made of being interrupted. Other threads have as little memory: for
    what is read for the first time, before anything runs.
    """
    problems: list[str] = []

    def interrupt(signal_number: int, frame: object) -> None:
        problems[:] = [f"building it takes more than {MOST_CPU_SECONDS} s of processor time"]
        raise TooMuch(problems[0])

    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = [in_use + MOST_MEMORY_BYTES, *(limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY)]
    before = signal.signal(signal.SIGVTALRM, interrupt)
    resource.setrlimit(resource.RLIMIT_AS, (min(most), hard))
    signal.setitimer(signal.ITIMER_VIRTUAL, MOST_CPU_SECONDS, 1)  # again and again, where an exception is swallowed
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and "allocate" not in str(error):  # torch's is a RuntimeError
            raise
        problems.append(f"building it takes more than {MOST_MEMORY_BYTES / 2**30:.1f} GiB of memory")
    except Exception:
        if not problems:
            raise
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGVTALRM, before)
    if problems:
        raise TooMuch(problems[0])
