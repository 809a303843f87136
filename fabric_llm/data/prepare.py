"""Raw text -> documents -> tokens -> packed rows -> a folder that `datasets.load_from_disk` opens.

`prepare` is the whole act; the functions below it are its parts, in the order of the data.

The tokenizer's own convention is kept (a Llama document starts with BOS), and exactly one EOS ends each document and
appears nowhere else. Where BOS and EOS are the same token, the EOS of the document before serves as BOS. Text that spells
a special token stays text. Documents without a visible character, and those that aren't valid UTF-8, are skipped and
counted.

The folder is a `DatasetDict` of `train` and `validation` with one column, `input_ids`: int32 lists of `context_length`,
with `manifest.json` and `tokenizer/` beside them. Tokens that don't fill a last row are dropped and counted: in each split
tokens = rows * context_length + dropped_tokens.

Everything streams: memory holds one batch of documents, or one document where that is longer, at about 120 bytes a
character. On disk the work needs 8 bytes a token, 4 of which stay.
"""

from __future__ import annotations

import contextlib
import errno
import json
import platform
import secrets
import shutil
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import tokenizers
import transformers
from tokenizers import Tokenizer
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from fabric_llm.base import files
from fabric_llm.base.ending import on_disk, uninterrupted
from fabric_llm.base.failpoints import failpoint
from fabric_llm.base.faults import SAVE_FAILED, UNWRITABLE, Fault
from fabric_llm.data.documents import Document, Source, find_sources, read_documents
from fabric_llm.data.inputs import DEFAULT_PATTERNS, preparation, prepared_output
from fabric_llm.data.rows import Split, save_rows, split_documents
from fabric_llm.data.tokenizer import encoder, packing_tokenizer, train_byte_level_bpe

MANIFEST_FORMAT = 1
MAX_LISTED_FILES = 10_000
MAX_LISTED_SKIPS = 20


def prepare(
    *,
    inputs: Sequence[str | Path],
    output: str | Path,
    tokenizer: str | None = None,
    train_tokenizer: int | None = None,
    context_length: int,
    validation_fraction: float = 0.01,
    text_field: str = "text",
    pattern: Sequence[str] = DEFAULT_PATTERNS,
    exclude: Sequence[str] = (),
    seed: int = 1234,
    overwrite: bool = False,
    progress: bool = True,
) -> dict:
    """Turn raw text into a packed token dataset at `output`, and return its manifest.

    The arguments are those of `prepare_data.py --help`; progress: show a bar where stderr is a terminal. `output`
    appears only once it is complete, and a dataset that it replaces is removed last.

    Raises ValueError for everything that a user can correct, with a sentence that says how.
    """
    preparation(inputs, tokenizer, train_tokenizer, context_length, validation_fraction, pattern)
    target = Path(output).resolve()  # a link to a larger disk stays a link
    prepared_output(target, overwrite)
    sources = find_sources(inputs, pattern=pattern, exclude=exclude, output=target)
    hf_tokenizer = packing_tokenizer(tokenizer) if tokenizer is not None else None  # fails before anything is written
    needs = "preparing needs 8 bytes a token, of which 4 stay"
    with _temporary_folder(target) as folder, on_disk(target, folder, needs):
        if hf_tokenizer is None:
            texts = (text for _, text in read_documents(sources, text_field) if text)
            bar = _bar(texts, "training the tokenizer", progress)
            hf_tokenizer = train_byte_level_bpe(bar, vocab_size=train_tokenizer)
        hf_tokenizer.save_pretrained(folder / "tokenizer")
        splits, skipped = _tokenize(sources, text_field, hf_tokenizer, folder, seed, validation_fraction, progress)
        saved = save_rows(splits, folder, context_length, progress)
        manifest = {
            "format": MANIFEST_FORMAT,
            "output": str(output),
            "context_length": context_length,
            "packed": True,
            "inputs": [str(name) for name in inputs],
            **_facts_of_sources(sources),
            "text_field": text_field,
            "tokenizer": str(tokenizer) if tokenizer is not None else f"trained:{train_tokenizer}",
            **_facts_of_tokenizer(hf_tokenizer, folder),
            "max_token_id": max(split.max_token_id for split in splits.values()),
            "seed": seed,
            "validation_fraction": validation_fraction,
            "splits": saved,
            "skipped": skipped,
            "versions": _versions(),
        }
        manifest["written"] = files.describe(folder, files.files_in(folder))
        content = files.encode(manifest)
        (folder / "manifest.json").write_bytes(content)
        with uninterrupted():
            _publish(folder, target)
    return json.loads(content)


def _bar(items: Iterable[Any], what: str, progress: bool) -> Iterable[Any]:
    return tqdm(items, what, unit=" documents", disable=None if progress else True)


def _tokenize(
    sources: Sequence[Source],
    text_field: str,
    hf_tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    seed: int,
    validation_fraction: float,
    progress: bool,
) -> tuple[dict[str, Split], dict[str, Any]]:
    """(the splits, flat in `folder`, and what was skipped). Raises ValueError where there is no document with text."""
    # The saved file encodes, so that the checksum of that file in the manifest vouches for the rows.
    encode = encoder(Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json")), hf_tokenizer)
    skipped: dict[str, Any] = {"empty": 0, "not_utf8": 0, "not_utf8_files": []}
    encoded = encode(_readable(read_documents(sources, text_field), skipped), skipped)
    splits = split_documents(_bar(encoded, "tokenising", progress), folder, seed, validation_fraction)
    if not any(split.documents for split in splits.values()):
        raise ValueError(
            f"no document with text in {len(sources)} inputs and files: {skipped['empty']} empty documents and"
            f" {skipped['not_utf8']} that are not valid UTF-8 were skipped"
        )
    if skipped["not_utf8"]:
        warnings.warn(
            f"skipped {skipped['not_utf8']} documents that are not valid UTF-8, the first being"
            f" {skipped['not_utf8_files'][0]}; manifest.json lists up to {MAX_LISTED_SKIPS}",
            stacklevel=3,
        )
    return splits, skipped


def _readable(documents: Iterable[Document], skipped: dict) -> Iterator[tuple[str, str]]:
    """The documents that hold text; the others are counted in `skipped`."""
    for where, text in documents:
        if text is None:
            skipped["not_utf8"] += 1
            if len(skipped["not_utf8_files"]) < MAX_LISTED_SKIPS:
                skipped["not_utf8_files"].append(where)
        elif not text.strip():
            skipped["empty"] += 1
        else:
            yield where, text


def _facts_of_sources(sources: Sequence[Source]) -> dict[str, Any]:
    return {
        "files": [{"path": source.name, "bytes": source.bytes} for source in sources[:MAX_LISTED_FILES]],
        "files_total": len(sources),
        "bytes_total": sum(source.bytes or 0 for source in sources),
    }


def _facts_of_tokenizer(hf_tokenizer: PreTrainedTokenizerBase, folder: Path) -> dict[str, Any]:
    return {
        "tokenizer_sha256": files.sha256(folder / "tokenizer" / "tokenizer.json"),
        "vocab_size": len(hf_tokenizer),
        "eos_token_id": hf_tokenizer.eos_token_id,
        "bos_token_id": hf_tokenizer.bos_token_id,
    }


def _versions() -> dict[str, str]:
    modules = {"pyarrow": pa, "datasets": datasets, "tokenizers": tokenizers, "transformers": transformers}
    return {"python": platform.python_version(), **{name: module.__version__ for name, module in modules.items()}}


@contextlib.contextmanager
def _temporary_folder(output: Path) -> Iterator[Path]:
    """A folder beside `output`, on the same file system; removed at the end unless it was renamed. Removes older ones.

    A preparation of the same `output` that still runs elsewhere loses its folder and fails. It can't mix its data with
    that of this one, since each folder has a name of its own.
    """
    prefix = f".{output.name}.preparing-"
    folder = output.parent / f"{prefix}{secrets.token_hex(4)}"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir()
    except OSError as error:
        code = SAVE_FAILED if error.errno in (errno.ENOSPC, errno.EDQUOT) else UNWRITABLE
        raise Fault(f"output {output} cannot be written: {error.strerror}.", code) from error
    try:
        for other in folder.parent.iterdir():
            if other.name.startswith(prefix) and other != folder:
                other.unlink() if other.is_symlink() else shutil.rmtree(other)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _publish(folder: Path, output: Path) -> None:
    """Rename `folder` to `output`. What stood there is removed last."""
    old = folder.with_name(folder.name + "-old")
    if output.exists():
        output.rename(old)
    failpoint("prepare.publish")
    folder.rename(output)
    if old.exists():
        shutil.rmtree(old)


def summary(manifest: dict) -> str:
    """Describe in a few lines what `prepare` made."""
    lines = [
        f"{name:<10} {split['documents']:>12,} documents {split['tokens']:>15,} tokens"
        f" {split['rows']:>12,} rows of {manifest['context_length']}"
        f" ({split['dropped_tokens']} tokens of the last, unfilled row dropped)"
        for name, split in manifest["splits"].items()
    ]
    skipped = manifest["skipped"]
    if skipped["empty"] or skipped["not_utf8"]:
        lines.append(f"skipped    {skipped['empty']:,} empty documents, {skipped['not_utf8']:,} not valid UTF-8")
        lines += [f"           not UTF-8: {name}" for name in skipped["not_utf8_files"]]
    lines.append(f"tokenizer  {manifest['tokenizer']}, {manifest['vocab_size']:,} tokens")
    lines.append(f"written to {manifest['output']}")
    return "\n".join(lines)
