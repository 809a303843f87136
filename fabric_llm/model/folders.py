"""What a model's folder may hold, and what its JSON may declare. Nothing here imports torch.

transformers expands some numbers of a configuration into lists, tables and modules as it reads it:
`read_json` bounds them in the document itself, and what is built from it is `limited`.
"""

import json
import math
import os
import re
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fabric_llm.base import files
from fabric_llm.base.faults import REFUSED, Fault
from fabric_llm.base.files import check_name, weight_map
from fabric_llm.base.names import command, hub_name

WEIGHT_FILES = ("model.safetensors", files.WEIGHT_INDEX)
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
# What may stand beside a configuration that random weights are drawn for: anything else may be
# weights.
NO_WEIGHTS = re.compile(
    r".*\.(json|jsonl|ya?ml|toml|txt|md|rst|html|csv|tsv|jinja|py|ipynb|sh|log|lock|metadata|tag"
    r"|png|jpe?g|gif|svg|pdf|arrow|parquet|model|spm|vocab|bpe|merges|tiktoken|sha256)"
    r"|(licen[cs]e|notice|readme|copying|authors|makefile|dockerfile|\.git\w*|\.ds_store)[^.]*",
    re.IGNORECASE,
)

# Of a JSON file. A configuration has a few thousand, a quantised model's some hundred thousand.
MAX_BYTES = 4 * 2**20
MAX_LAYERS = 4096
# Entries of a list or an object, and labels, experts or blocks. Switch-C has 2048 experts.
MAX_ENTRIES = 2**15
MAX_EXPERTS = 2**18  # of all layers together: each can be some modules; Kimi-K2 has 23,424
# Ends of names whose values say how many of something there are, such as num_hidden_layers.
COUNTS = re.compile(r"(?:^|[_.])((layer|expert|label|block|attention_type)s?)$")
LARGEST_NUMBER = 3.5e38  # computing with more, such as the factor of a rotary embedding, overflows
# To build the modules without memory: several times what the largest models take.
MAX_CPU_SECONDS = 10
MAX_MEMORY_BYTES = 2 * 2**30


class TooMuch(ValueError):
    """A model's files declare too much of something. The message says of what, and the bound."""


def check_model_folder(name: str) -> None:
    """A model's folder, or what may be a name on the hub. Raises ValueError, Fault (77) for
    code."""
    folder = Path(name)
    if not folder.is_dir():
        return hub_name("--model_name", name)
    # An adapter names a base model, which transformers would fetch by means of peft.
    if (folder / "adapter_config.json").is_file():
        raise ValueError(f"{name!r} holds an adapter: merge it into its model first.")
    if not (folder / "config.json").is_file():
        # People often give the directory of a run instead of one of its checkpoints.
        newest, held = files.latest(folder), sorted(path.name for path in folder.iterdir())[:3]
        instead = f"It holds {', '.join(held) or 'nothing'}: take a model in Hugging Face's format"
        if newest is not None:
            instead = f"It is a run: take its newest checkpoint, {command(model_name=newest)}"
        raise ValueError(f"{name!r} isn't a model directory: it has no config.json. {instead}.")
    # Downloads that went wrong leave small text files under the names of weights and tokenizers.
    for path in (*folder.glob("*.json"), *folder.glob("*.safetensors"), *folder.glob("*.model")):
        if (instead := files.instead_of_content(path)) is not None:
            raise ValueError(f"{str(path)!r} is {instead}.")
    # Before transformers reads it and builds what it declares.
    try:
        read_json(folder / "config.json")
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"The configuration of {name!r} can't be read: {error}.") from error
    # Pickles beside safetensors are never opened, so they may stay.
    pickled = sorted(path.name for path in folder.iterdir() if path.name.endswith(PICKLES))
    if pickled and not any((folder / name).is_file() for name in WEIGHT_FILES):
        raise Fault(
            f"{str(folder / pickled[0])!r} is a pickle, which can run code when opened, and there "
            "are no safetensors beside it: refused.",
            REFUSED,
        )
    # A model without weights starts from random ones, which mustn't happen only because its weights
    # have another format.
    if not any(folder.glob("*.safetensors*")) and not (folder / files.MANIFEST).is_file():
        _require_none_that_may_be_weights(folder)
    # An index names the files to open: none of them may be a pickle, or lie outside of the folder.
    for index in folder.glob("*.index.json"):
        for file in sorted(set(weight_map(index).values())):
            # `weight_map` has refused names that lead outside. The index of pickles beside
            # safetensors is never opened, so it may name what it likes.
            if index.name in WEIGHT_FILES:
                weights_name(file, index)


def _require_none_that_may_be_weights(folder: Path) -> None:
    """Raises ValueError, Fault (77) for a pickle, where a folder without safetensors has weights in
    another form, or a part of them.
    """
    for place, folders, names in os.walk(folder):
        # os.walk goes on with what is left in this list. Sorted, so that each machine names the
        # same file.
        folders[:] = sorted(set(folders) - {".git"})
        links = [name for name in folders if Path(place, name).is_symlink()]  # aren't followed
        for name in sorted([*names, *links]):
            # An index is JSON as well, but it belongs to weights, which are missing then.
            is_index = name.endswith(".index.json")
            if NO_WEIGHTS.fullmatch(name) and name not in links and not is_index:
                continue
            inside = str(Path(place, name).relative_to(folder))
            message = f"{str(folder)!r} has no model.safetensors, and {inside!r}"
            if name.endswith(PICKLES):
                sentence = f"{message} is a pickle, which can run code when opened: refused."
                raise Fault(sentence, REFUSED)
            raise ValueError(
                f"{message} may be weights, or a part of them: convert them, or download the model "
                "as safetensors. A run that is to begin with random weights takes a folder with "
                "config.json and a tokenizer alone."
            )


def weights_name(name: Any, where: Path) -> None:
    """Raises Fault (77) unless `name`, read from the file `where`, is a safetensors file, or their
    index, beside it."""
    check_name(str(name), where)
    if not str(name).endswith((".safetensors", ".safetensors.index.json")):
        raise Fault(
            f"{str(where)!r} names the weights {name!r}, which aren't safetensors: refused.",
            REFUSED,
        )


def read_json(path: Path) -> Any:
    """The JSON of a model's file. Raises TooMuch where it declares more than anybody could want to
    read, ValueError."""
    if (size := path.stat().st_size) > MAX_BYTES:
        raise TooMuch(
            f"{path.name} has {size / 2**20:.1f} MiB; at most {MAX_BYTES // 2**20} MiB are read"
        )
    try:
        document = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path.name} isn't JSON: {error}") from error
    # A stack instead of recursion, which a deeply nested document would exhaust.
    left, both = [("", document)], []
    while left:
        where, value = left.pop()
        if isinstance(value, (list, dict)):
            if len(value) > MAX_ENTRIES:
                raise TooMuch(
                    f"it declares {len(value)} entries ({where}); at most {MAX_ENTRIES} are read"
                )
            # A number in a list goes by the name of the list.
            if isinstance(value, list):
                left += [(where, part) for part in value]
            else:
                for key, part in value.items():
                    left.append((".".join(filter(None, (where, key))), part))
                # Experts and layers of one object are multiplied below, once all are known.
                largest = {"layer": 0, "expert": 0}
                for key, number in value.items():
                    if isinstance(number, int) and (counted := COUNTS.search(key)):
                        largest[counted[2]] = max(largest.get(counted[2], 0), number)
                both.append(largest)
        elif isinstance(value, (int, float)):
            # Infinity itself is allowed: Mamba 2 has it as a limit.
            if LARGEST_NUMBER < abs(value) < math.inf:
                raise TooMuch(f"it holds a number that float32 can't ({where}: {str(value)[:20]})")
            counted, most = COUNTS.search(where), MAX_ENTRIES
            if counted and counted[2] == "layer":
                most = MAX_LAYERS
            if counted and value > most:
                raise TooMuch(
                    f"it declares {value} {counted[1]} ({where}); at most {most} are read"
                )
    for largest in both:
        if (count := largest["expert"] * largest["layer"]) > MAX_EXPERTS:
            where = f"{largest['expert']} in each of {largest['layer']} layers"
            raise TooMuch(f"it declares {count} experts ({where}); at most {MAX_EXPERTS} are read")
    return document


@contextmanager
def limited() -> Iterator[None]:
    """Limit the time and memory of the body, which builds what a model's files declare: there may
    be numbers that `read_json` doesn't know.

    Raises TooMuch where the body takes more, even if it catches the exception that interrupts it.
    The limits hold for the whole process, so it is used before other work begins.
    """
    problems: list[str] = []

    def interrupt(signal_number: int, frame: object) -> None:
        problems[:] = [f"building it takes more than {MAX_CPU_SECONDS} s of processor time"]
        raise TooMuch(problems[0])

    # RLIMIT_AS bounds the address space, of which much is taken before the body begins.
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = [
        in_use + MAX_MEMORY_BYTES,
        *(limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY),
    ]
    before = signal.signal(signal.SIGVTALRM, interrupt)
    resource.setrlimit(resource.RLIMIT_AS, (min(most), hard))
    # The timer counts this process's own computing, not the time that it waits for a disk. Its
    # signal comes every second from then on, in case the body swallows the first exception.
    signal.setitimer(signal.ITIMER_VIRTUAL, MAX_CPU_SECONDS, 1)
    try:
        yield
    except Exception as error:
        # torch reports a lack of memory as a RuntimeError.
        if (
            isinstance(error, MemoryError)
            or isinstance(error, RuntimeError)
            and "allocate" in str(error)
        ):
            problems.append(
                f"building it takes more than {MAX_MEMORY_BYTES / 2**30:.1f} GiB of memory"
            )
        if not problems:
            raise
    finally:
        # The timer first: without its handler the signal would end the process.
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGVTALRM, before)
    # The body may have swallowed the exception and gone on with something unfinished.
    if problems:
        raise TooMuch(problems[0])
