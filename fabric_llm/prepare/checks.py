"""The flags of prepare_data.py against each other and against what they name, without torch or
transformers."""

import os
from contextlib import suppress
from pathlib import Path

from fabric_llm.base import files, work_folder
from fabric_llm.base.flag import Flags
from fabric_llm.base.names import hub_name
from fabric_llm.mirror.address import is_address
from fabric_llm.model.tokenizer_file import check_tokenizer_file
from fabric_llm.prepare.inputs import (
    InputFiles,
    find_sources,
    place_of,
    preparation,
    prepared_output,
    separator,
)


def require_alone(output: Path) -> None:
    """Raises Fault (73) where another process prepares `output`: told at once, and not when all
    inputs are found."""
    # Without this file nobody does; `prepare` itself makes it, and says what stands against that.
    with suppress(OSError):
        descriptor = os.open(work_folder.beside(output) / work_folder.LOCK, os.O_RDWR)
        try:
            work_folder.lock(descriptor, f"output {output}")
        finally:
            os.close(descriptor)


def check(flags: Flags) -> InputFiles:
    """The flags of prepare_data.py, and what they name. Returns what is read for --input. Raises
    ValueError."""
    output = place_of(flags.output)
    # --tasks takes none of the flags that say how text is read.
    if flags.tasks is None:
        preparation(flags)
        separator(flags.document_separator)
    else:
        # A flag that differs from its default was given, and would be ignored without a word.
        known = ("tasks", "tokenizer", "context_length", "output", "overwrite")
        others = [
            name
            for name, value in vars(flags).items()
            if value != getattr(type(flags), name) and name not in known
        ]
        # Tasks have no texts that a tokenizer could be trained on, so it has to be named.
        if others or flags.tokenizer is None or not flags.tasks.strip(", "):
            words = f"not --{others[0]}" if others else "and needs the first"
            raise ValueError(
                f"--tasks takes names, comma-separated, and --tokenizer, --context_length, {words}."
            )
    # A run of hours must not find only at its end that its result has no place.
    if is_address(flags.output):
        from fabric_llm.prepare import storage

        storage.require_free(flags.output, flags.overwrite)
    prepared_output(output, flags.overwrite)
    files.writable(output)
    require_alone(output)
    # A name on the hub is checked by its form alone: the hub is asked later.
    if flags.tokenizer is not None and os.path.isdir(flags.tokenizer):
        folder = Path(flags.tokenizer)
        # People often give a run, or a dataset, for the tokenizer that it holds.
        for inside in (files.latest(folder), folder / "tokenizer"):
            is_there = inside is not None and (inside / "tokenizer.json").is_file()
            if is_there and not (folder / "tokenizer.json").is_file():
                raise ValueError(f"--tokenizer {folder} holds none itself: take {inside}.")
        check_tokenizer_file(folder / "tokenizer.json")
    elif flags.tokenizer is not None:
        hub_name("--tokenizer", flags.tokenizer, "tokenizer")
    # Only lists files and reads first bytes, so that a mistyped --input fails at once. Those at an
    # address are fetched first.
    return find_sources(
        flags.input or [], pattern=flags.pattern, exclude=flags.exclude, output=output
    )
