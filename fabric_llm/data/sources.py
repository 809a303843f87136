"""Where rows of tokens come from: dataset folders, what is said of them before they are opened, and
other files of flags.

A kind of folder is that of `datasets`, or one that --code registers. Nothing here imports torch,
datasets or numpy.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from fabric_llm.base import register
from fabric_llm.base.names import NAME, at_home, comma_separated, command, listed, no_folder
from fabric_llm.data.periods import PROBES

if TYPE_CHECKING:  # importing `datasets` takes seconds, and mistakes are told before that
    from fabric_llm.data.dataset import TokenDataset


MAX_PROMPTS, LARGEST_PROMPTS = 64, 2**20  # of --sample_prompts: number, bytes
MAKE_IT = "make it with prepare_data.py"


# The file that tells the built-in source of a folder: `datasets.load_from_disk` opens it, such as
# prepare_data.py writes it.
SOURCES = ("dataset_dict.json",)


def source_of(folder: Path) -> str:
    """The file that tells the source of `folder`, "" if there is none."""
    known = (*SOURCES, *register.SOURCES)
    return next((name for name in known if (folder / name).is_file()), "")


def open_source(folder: Path, verify: str = "auto", flags: Any = None) -> TokenDataset:
    """Open and check the dataset in `folder`. Raises ValueError as its source does.

    flags: what sources that --code registers may read.
    """
    name = source_of(folder)
    if name in register.SOURCES:
        # Imported here, because it imports `datasets`, which takes seconds.
        from fabric_llm.data.own import open_own

        return open_own(folder, register.SOURCES[name], flags)
    from fabric_llm.data.dataset import open_dataset

    # A folder without such a file is given to the built-in source, whose error says what to do.
    check_dataset_folder(folder)
    return open_dataset(folder, verify)


def check_dataset_folder(name: str | Path, tokenizer: str = "NAME_OR_DIR") -> None:
    """Raises ValueError unless the names of its files, and of its columns, are those of a dataset
    of tokens.

    tokenizer: that of the model, for the command that makes one.
    """
    folder = Path(name)
    # A model with random weights may have no tokenizer yet.
    if Path(tokenizer).is_dir() and not any(Path(tokenizer).glob("tokenizer*")):
        tokenizer = "NAME_OR_DIR"
    words = {"input": folder, "tokenizer": tokenizer, "output": f"{folder}-tokens"}
    # A dataset of text has the right files, so its columns are looked at first.
    for info in (folder / "dataset_info.json", *sorted(folder.glob("*/dataset_info.json"))):
        try:
            columns = json.loads(info.read_bytes())["features"]
            texts = [
                str(name)
                for name, feature in columns.items()
                if str(feature.get("dtype")).endswith("string")
            ]
        # Whoever opens the dataset says what is wrong with such a file.
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue
        if texts and "input_ids" not in columns:
            # prepare_data.py reads the column `text` unless another one is named.
            if "text" not in texts:
                words["text_field"] = texts[0]
            raise ValueError(
                f"{str(folder)!r} holds text, not tokens: {MAKE_IT} {command(**words)}."
            )
    if folder.is_file():
        words["output"] = f"{folder.with_suffix('')}-tokens"
        raise ValueError(
            f"{str(folder)!r} is a file. If it holds text, {MAKE_IT} {command(**words)}."
        )
    if not folder.is_dir():
        # The work folder of a preparation that is going on, or was stopped or killed.
        if folder.with_name(f".{folder.name}.preparing").is_dir():
            raise ValueError(
                f"No dataset at {str(folder)!r} yet: its preparation isn't finished. Wait for it, "
                "or repeat the same prepare_data.py command, which goes on from where it was."
            )
        if "," in str(folder):
            raise ValueError(
                f"No dataset at {str(folder)!r}. Several are a mixture, such as --data_mix "
                "'first=data/a:0.8,second=data/b:0.2'."
            )
        made = command("prepare_data.py", output=folder)
        raise ValueError(no_folder("dataset", folder, f" Make one with {made} --input ..."))
    if not source_of(folder):
        message = f"{str(folder)!r} isn't a dataset folder: it has no dataset_dict.json."
        if (folder.parent / "dataset_dict.json").is_file():
            raise ValueError(f"{message} Did you mean {str(folder.parent)!r}?")
        if datasets := sorted(file.parent.name for file in folder.glob("*/dataset_dict.json")):
            raise ValueError(f"{message} It holds {listed(datasets)}.")
        if (folder / "config.json").is_file():
            raise ValueError(f"{message} It is a model's, for --model_name.")
        raise ValueError(f"{message} If it holds text, {MAKE_IT} {command(**words)}.")


def parse_eval_data(given: Optional[str]) -> dict[str, str]:
    """{name of the set: dataset folder} of --eval_data: validation sets besides those of the
    training data. Raises ValueError."""
    folders: dict[str, str] = {}
    for part in comma_separated(given):
        name, _, folder = (word.strip() for word in part.partition("="))
        if not folder or not re.fullmatch(NAME, name):
            raise ValueError(
                "--eval_data takes name=folder, comma-separated, such as general=data/x, not "
                f"{part!r}."
            )
        # Logs have one entry for each name, of a validation set or a probe.
        if name in (*PROBES, *folders):
            why = "is the name of a probe" if name in PROBES else "is there twice"
            raise ValueError(f"--eval_data: {name!r} {why}; each set needs a name of its own.")
        folders[name] = at_home(folder)
    if given is not None and not folders:
        raise ValueError("--eval_data is empty; it takes name=folder, such as general=data/x.")
    return folders


def parse_probes(given: Optional[str]) -> tuple[str, ...]:
    """The names in --probes. Raises ValueError."""
    # Each name once, in the order that was given.
    names = tuple(dict.fromkeys(comma_separated(given)))
    if unknown := [name for name in names if name not in PROBES]:
        raise ValueError(
            f"--probes takes {' or '.join(PROBES)}, comma-separated, not {unknown[0]!r}."
        )
    return names


def read_prompts(path: str) -> list[str]:
    """The prompts of --sample_prompts, one a line or JSON lines with "prompt", without empty lines.
    Raises ValueError."""
    where, file = f"--sample_prompts {path!r}", Path(path)
    if file.exists() and not file.is_file():  # a pipe would block
        raise ValueError(f"{where} isn't a file.")
    try:
        # A large file is refused before it is read into memory.
        if file.stat().st_size > LARGEST_PROMPTS:
            raise ValueError(
                f"{where} is larger than 1 MiB: it holds prompts, one a line, at most "
                f"{MAX_PROMPTS}."
            )
        # utf-8-sig, because some editors put a byte-order mark before the text.
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} isn't UTF-8 text.") from error
    except OSError as error:
        raise ValueError(f"{where} can't be read: {error.strerror}.") from error
    # Not splitlines, because a prompt may hold other separators, such as U+2028.
    lines = [
        (number, line.rstrip("\r"))
        for number, line in enumerate(text.split("\n"), 1)
        if line.strip()
    ]
    is_json = file.suffix == ".jsonl" or all(line.lstrip().startswith('{"') for _, line in lines)
    prompts: dict[str, None] = {}  # each once, in order
    for number, line in lines:
        prompt = line
        if is_json:
            with suppress(ValueError, KeyError, TypeError, RecursionError):
                prompt = json.loads(line)["prompt"]
            # It is still the whole line if that isn't an object with a prompt.
            if not isinstance(prompt, str) or prompt in ("", line):
                raise ValueError(
                    f'{where} line {number} isn\'t a JSON object with "prompt", a text.'
                )
        prompts[prompt] = None
    if not 1 <= len(prompts) <= MAX_PROMPTS:
        raise ValueError(f"{where} holds {len(prompts)} prompts; it takes 1 to {MAX_PROMPTS}.")
    return list(prompts)
