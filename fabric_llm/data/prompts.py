"""--sample_prompts: a file of prompts, one a line, or JSON lines with "prompt". Nothing here imports torch."""

from __future__ import annotations

import json
from pathlib import Path

MOST_PROMPTS = 64
LARGEST_BYTES = 2**20


def read(path: str) -> list[str]:
    """The prompts of a file, without empty lines. Raises ValueError in one sentence where it isn't a file of prompts."""
    where = f"--sample_prompts {path!r}"
    file = Path(path)
    if file.exists() and not file.is_file():  # a pipe would block
        raise ValueError(f"{where} isn't a file.")
    try:
        if file.stat().st_size > LARGEST_BYTES:
            raise ValueError(f"{where} is larger than 1 MiB: it holds prompts, one a line, at most {MOST_PROMPTS}.")
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} isn't UTF-8 text.") from error
    except OSError as error:
        raise ValueError(f"{where} can't be read: {error.strerror}.") from error
    lines = [(number, line.rstrip("\r")) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    is_json = bool(lines) and (file.suffix == ".jsonl" or all(line.lstrip().startswith('{"') for _, line in lines))
    prompts = [_prompt_of(line, f"{where} line {number}") if is_json else line for number, line in lines]
    if not prompts:
        raise ValueError(f"{where} holds no prompt.")
    if len(prompts) > MOST_PROMPTS:
        raise ValueError(f"{where} holds {len(prompts)} prompts, more than {MOST_PROMPTS}.")
    return list(dict.fromkeys(prompts))


def _prompt_of(line: str, where: str) -> str:
    try:
        record = json.loads(line)
        prompt = record["prompt"] if isinstance(record, dict) else None
    except (ValueError, KeyError, RecursionError):
        prompt = None
    if not isinstance(prompt, str) or not prompt:
        raise ValueError(f'{where} isn\'t a JSON object with "prompt", a text.')
    return prompt
