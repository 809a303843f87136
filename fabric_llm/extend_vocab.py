"""`python -m fabric_llm.extend_vocab MODEL --input CORPUS --tokens N --output hf/extended`: new words for a model.

Learns up to N tokens from a corpus, adds them to the model's tokenizer and to its embeddings, and writes a Hugging Face directory
that prepare_data.py and train.py take, with proof that what the model knew is as it was. docs/new_words.md has the commands in
their order.
"""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from fabric_llm.base import files
from fabric_llm.base.command_line import flag, parse
from fabric_llm.base.console import plain_output
from fabric_llm.base.ending import in_one_sentence
from fabric_llm.model.folders import check_model_folder
from fabric_llm.plan.checks import exported_output
from fabric_llm.prepare import inputs
from fabric_llm.prepare.formats import DEFAULT_PATTERNS

PROGRAM = "python -m fabric_llm.extend_vocab"


@dataclass
class ExtendArguments:
    """Options"""

    model_name: str = flag(
        None, "hub name or local directory of a causal LM and its tokenizer; may be given without its flag"
    )
    input: list[str] = flag(None, "the corpus: what prepare_data.py --input takes")
    tokens: int = flag(None, "tokens to add at most: fewer if no more come twice")
    output: str = flag(None, "Hugging Face directory to write, such as hf/extended")
    text_field: str = flag("text", "field of .jsonl, .json, .csv, .parquet and datasets that holds the text")
    document_separator: Optional[str] = flag(None, "string between the documents of a text file, as in prepare_data.py")
    pattern: Optional[list[str]] = flag(None, "file name patterns to take from folders, such as '*.py'")
    exclude: Optional[list[str]] = flag(None, "names of folders to leave out")
    max_shard_size: str = flag("5GB", "largest weight file")
    seed: int = flag(1234, "of the noise that tells new tokens of the same parts apart")
    overwrite: bool = flag(False, "replace an existing output folder")


def parse_extend(argv: Optional[list[str]] = None) -> ExtendArguments:
    """Arguments of the command. Exits with code 2 and one sentence on anything it doesn't know."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv and not argv[0].startswith("-"):  # the model may be given by position
        argv = ["--model_name", *argv]
    description = (
        f"Add tokens, learned from a corpus, to a model: {PROGRAM} MODEL --input CORPUS --tokens N --output hf/extended"
    )
    return ExtendArguments(**parse(PROGRAM, description, [ExtendArguments], argv))


def check(given: ExtendArguments, pattern: list[str]) -> None:
    """What can be said without torch. Raises ValueError."""
    if given.tokens < 1:
        raise ValueError(f"--tokens must be at least 1, not {given.tokens}.")
    check_model_folder(given.model_name)
    inputs.separator(given.document_separator)
    output = Path(given.output)
    exported_output(output, given.overwrite)
    files.writable(output)
    inputs.find_sources(given.input, pattern=pattern, exclude=given.exclude or [], output=output.resolve())


def corpus_flags(given: ExtendArguments) -> str:
    """The flags that prepare_data.py takes for the same corpus."""
    words = ["--input", *given.input]
    for name in ("pattern", "exclude"):
        words += [f"--{name}", *getattr(given, name)] if getattr(given, name) else []
    words += [] if given.text_field == "text" else ["--text_field", given.text_field]
    return shlex.join(words + (["--document_separator", given.document_separator] if given.document_separator else []))


def main(argv: Optional[list[str]] = None) -> None:
    """Run the command. Raises SystemExit with an exit code of docs/faults.md where it fails."""
    with in_one_sentence(PROGRAM) as ending:
        given = parse_extend(argv)
        ending.left = f"nothing was written to {given.output}"
        pattern = given.pattern or DEFAULT_PATTERNS
        check(given, pattern)
        # These import torch, for which --help and mistakes don't wait.
        from transformers.utils.logging import disable_progress_bar

        from fabric_llm.prepare import corpus
        from fabric_llm.verify.extend import extend

        disable_progress_bar()
        output = Path(given.output)
        texts = corpus.read(
            given.input,
            pattern=pattern,
            exclude=given.exclude or [],
            text_field=given.text_field,
            document_separator=given.document_separator,
            output=output,
        )
        print(corpus.summary(texts), flush=True)
        lines = extend(
            given.model_name,
            texts,
            output,
            tokens=given.tokens,
            max_shard_size=given.max_shard_size,
            seed=given.seed,
        )
        print("\n".join(lines))
        ending.left = f"{given.output} is complete"
        print(
            f"Next: python prepare_data.py {corpus_flags(given)} --tokenizer {given.output} --output data/extended\n"
            f"then: python train.py --model_name {given.output} --train_data_dir data/extended --train_only embeddings",
            flush=True,
        )


if __name__ == "__main__":
    plain_output()
    main()
