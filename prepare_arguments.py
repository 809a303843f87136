"""The flags of prepare_data.py, declared as those of arguments.py are.

They have a file of their own, so that preparing text reaches nothing of what trains.
"""

from dataclasses import dataclass
from typing import Literal, Optional

from fabric_llm.base.command_line import parse
from fabric_llm.base.flag import option

ABOUT = """usage: python prepare_data.py --input TEXTS --tokenizer MODEL --output FOLDER
Raw text -> a packed dataset."""


@dataclass
class PrepareArguments:
    """Options"""

    input: Optional[list[str]] = option(None, path=True)
    """files or folders of .txt, .md, .rst, .jsonl, .json, .csv, .tsv, .parquet, also with .gz,
    .zst, .bz2, .xz; dataset folders; names of datasets on the hub; addresses of object storage,
    such as s3://bucket/corpus/ (docs/mirror.md)"""
    # A default of None makes a flag required, unless its type takes None.
    output: str = option(None, path=True, aliases="output_dir")
    """dataset folder to write, such as data/mine or s3://bucket/data/mine"""
    tasks: Optional[str] = option(
        None,
        path=True,
        takes="names or YAML files of tasks, comma-separated, such as hellaswag,arc_easy",
    )
    """instead of --input: tasks of lm-evaluation-harness, or files or folders of your own in its
    YAML, comma-separated, as a validation set for --eval_data (docs/forgetting.md)"""
    tokenizer: Optional[str] = option(
        None, path=True, aliases="tokenizer_name tokenizer_path tokenizer_name_or_path"
    )
    """hub name or local directory of the tokenizer (that of your model)"""
    # All 256 bytes, and the token that ends a text.
    train_tokenizer: Optional[int] = option(None, at_least=257)
    """train a byte-level BPE tokenizer of this many tokens instead: every byte, the end of a text,
    and more"""
    context_length: int = option(
        2048, at_least=2, aliases="block_size cutoff_len max_seq_len seq_len sequence_len"
    )
    """tokens per sequence"""
    validation_fraction: float = option(
        0.01,
        at_least=0,
        below=1,
        aliases="val_set_size val_split_fraction validation_split_percentage",
    )
    """fraction of the documents that goes to validation, with at most about twice that fraction of
    the tokens; none of a dataset with a validation split of its own"""
    text_field: str = option("text", aliases="text_column dataset_text_field text_key")
    """field of .jsonl, .json, .csv, .parquet and datasets that holds the text"""
    document_separator: Optional[str] = option(None)
    r"""string between the documents of a text file, such as '\n---\n'; none: each file is one
    document (default: blank lines in a single text file and in those over 16 MiB, else none)"""
    packing: Literal["concat", "best_fit"] = option(
        "concat", aliases="sample_packing pack_sequences packed"
    )
    """concat: documents are cut where a row ends; best_fit: only those longer than a row, with
    padding"""
    deduplicate: Literal["none", "exact"] = option("none")
    """exact: drop documents whose text has come before"""
    decontaminate: Optional[str] = option(
        None, path=True, takes="dataset folders, comma-separated, such as data/tasks,data/mine"
    )
    """leave out, count and list documents that share 13 words in a row with the validation split of
    one of these folders, as prepare_data.py writes them, comma-separated (docs/data.md)"""
    min_document_tokens: int = option(0, at_least=0)
    """leave out documents of fewer tokens, such as for rows that are to hold long ones; they are
    counted"""
    on_error: Literal["skip", "stop"] = option("skip")
    """bad records (broken JSON, not UTF-8, no field): skip and count, or stop"""
    pattern: Optional[list[str]] = option(None)
    """file name patterns to take from folders, such as '*.py'"""
    exclude: Optional[list[str]] = option(None)
    """names of folders and files to leave out, or patterns, such as '*.md'"""
    seed: int = option(1234)
    """of the split"""
    num_workers: Optional[int] = option(None, above=0)
    """processes that tokenize (default: one a core)"""
    overwrite: bool = option(False)
    """replace an existing output folder"""


def parse_prepare(argv: Optional[list[str]] = None) -> PrepareArguments:
    """Arguments of prepare_data.py. Exits with code 2 and one sentence on anything unknown."""
    return PrepareArguments(**parse("prepare_data.py", ABOUT, [PrepareArguments], argv))
