"""`python -m fabric_llm.extend_vocab MODEL --input CORPUS --tokens N --output hf/extended`: new
words for a model.

Learns up to N tokens from a corpus, adds them to the model's tokenizer and to its embeddings, and
writes a Hugging Face directory that prepare_data.py and train.py take, with proof that what the
model knew is as it was. docs/new_words.md has the commands in their order.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from fabric_llm.base.command_line import parse
from fabric_llm.base.ending import in_one_sentence
from fabric_llm.base.flag import declared, option
from fabric_llm.base.names import command
from fabric_llm.base.program import plain_output
from fabric_llm.model.folders import check_model_folder
from fabric_llm.prepare import inputs
from fabric_llm.prepare.inputs import DEFAULT_PATTERNS
from fabric_llm.weights.checks import exported_output

PROGRAM = "python -m fabric_llm.extend_vocab"
ABOUT = (
    f"usage: {PROGRAM} MODEL --input CORPUS --tokens N --output FOLDER\nAdd tokens, learned "
    "from a corpus."
)


ROW = 4096  # tokens of a row that the next command prepares, if the model takes as many


@dataclass
class ExtendArguments:
    """Options"""

    model_name: str = option(
        None, "hub name or directory of a causal LM; may be given without its flag", path=True
    )
    input: list[str] = option(None, "the corpus: what prepare_data.py --input takes", path=True)
    tokens: int = option(None, "tokens to add at most: fewer if no more come twice", above=0)
    output: str = option(
        None,
        "Hugging Face directory to write, such as hf/extended",
        path=True,
        aliases="output_dir",
    )
    text_field: str = option(
        "text", "field of .jsonl, .json, .csv, .parquet and datasets that holds the text"
    )
    document_separator: Optional[str] = option(
        None, "string between the documents of a text file, as in prepare_data.py"
    )
    pattern: Optional[list[str]] = option(
        None, "file name patterns to take from folders, such as '*.py'"
    )
    exclude: Optional[list[str]] = option(
        None, "names of folders and files to leave out, or patterns, such as '*.md'"
    )
    overwrite: bool = option(False, "replace an existing output folder")


def main(argv: Optional[list[str]] = None) -> None:
    """Run the command. Raises SystemExit with an exit code of docs/faults.md where it fails."""
    with in_one_sentence(PROGRAM) as ending:
        # All that can be wrong with the flags is told before torch is imported.
        given = ExtendArguments(
            **parse(PROGRAM, ABOUT, [ExtendArguments], argv, first="model_name")
        )
        ending.left = f"nothing was written to {given.output}"
        output = Path(given.output)
        # Files that could run code, or aren't a model's, are refused before anything is read.
        check_model_folder(given.model_name)
        # A mistake in any flag is told before the corpus is read.
        separator = inputs.separator(given.document_separator)
        # A place that can't be written to is told before the corpus is read.
        exported_output(output, given.overwrite)
        # The files are listed, but none is read yet.
        corpus_files = inputs.find_sources(
            given.input,
            pattern=given.pattern or DEFAULT_PATTERNS,
            exclude=given.exclude or [],
            output=output.resolve(),
        )
        # These import torch, for which --help and mistakes don't wait.
        from fabric_llm.model.loading import load_config
        from fabric_llm.prepare import corpus
        from fabric_llm.weights.extend import extend

        # In memory: learning counts pairs over and over, and needs a sample and no more.
        texts = corpus.read(corpus_files, given.text_field, separator)
        print(corpus.summary(texts), flush=True)
        print("\n".join(extend(given.model_name, texts, output, given.tokens)))
        ending.left = f"{given.output} is complete"
        # The next commands, in full: the same corpus by the new tokenizer, then training.
        of_corpus = {}
        for name in ("input", "pattern", "exclude", "text_field", "document_separator"):
            if (value := getattr(given, name)) != declared(ExtendArguments)[name].default:
                of_corpus[name] = value
        # The new rows alone are trained first: all else is as it was.
        data, embeddings = "data/extended", {"train_only": "embeddings"}
        config = load_config(given.output).get_text_config()
        of_corpus["context_length"] = min(
            ROW, getattr(config, "max_position_embeddings", None) or ROW
        )
        preparing = command(
            "python", "prepare_data.py", **of_corpus, tokenizer=given.output, output=data
        )
        training = command(
            "python", "train.py", model_name=given.output, train_data_dir=data, **embeddings
        )
        print(f"Next: {preparing}\nthen: {training}", flush=True)


if __name__ == "__main__":
    plain_output()
    main()
