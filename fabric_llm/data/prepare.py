"""Raw text -> documents -> tokens -> packed rows -> a folder `datasets.load_from_disk` opens.

`prepare` is the whole act and reads top to bottom as that line does; the functions
below it are its parts, in the order of the data. Everything streams: what sits in
memory is one batch of documents, so a corpus may be larger than the machine's memory.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import platform
import secrets
import shutil
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import tokenizers
import transformers
from tokenizers import Tokenizer
from tqdm import tqdm

from fabric_llm.base import files
from fabric_llm.base.ending import on_disk, uninterrupted
from fabric_llm.base.failpoints import failpoint
from fabric_llm.base.faults import SAVE_FAILED, UNWRITABLE, Fault
from fabric_llm.base.files import describe, files_in
from fabric_llm.base.files import encode as encode_manifest
from fabric_llm.data.documents import Document, find_sources, read_documents
from fabric_llm.data.inputs import DEFAULT_PATTERNS, preparation, prepared_output
from fabric_llm.data.tokenizer import encoder, load_tokenizer, train_byte_level_bpe

MANIFEST_FORMAT = 1
MAX_LISTED_FILES = 10_000
MAX_LISTED_SKIPS = 20
COPY_TOKENS = 16 * 2**20
MAX_SHARD_SIZE = "1GB"


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

    Args:
        inputs: each is a text file (one document), a `.jsonl` file (one document a line),
            a `.parquet` file (one document a row), either of the first two with `.gz`
            added, a folder of such files (read recursively, in sorted order), a folder
            written by `datasets.save_to_disk`, or the name of a dataset on the hub
            (`org/name` or `org/name:config`, streamed). Of the last two all splits are
            joined, in their order, and split anew.
        output: folder to write; appears only once it is complete.
        tokenizer: local folder or hub name, for `AutoTokenizer`; no remote code is run.
        train_tokenizer: instead of `tokenizer`, the vocabulary size of a byte-level BPE
            trained on the same documents. A small corpus may not fill it.
        context_length: tokens in a row.
        validation_fraction: expected fraction of the documents in the validation split;
            where there are two documents or more, each split has at least one.
        text_field: field of a JSON line, or column of a table, that holds the text.
        pattern: file names (case is ignored) that are read inside a folder; a file named
            in `inputs` is always read.
        exclude: names of directories that are not descended into.
        seed: of the split into train and validation.
        overwrite: replace a dataset that stands at `output`, at the very end.
        progress: show a bar where stderr is a terminal.

    The tokenizer's own convention is kept (a Llama document begins with BOS), and exactly
    one EOS ends each document and stands nowhere else. Where BOS and EOS are one token,
    the EOS of the document before serves as BOS. Text that spells a special token stays
    text. Documents without a visible character are skipped and counted, so are those
    that are not valid UTF-8.

    The folder is a `DatasetDict` of `train` and `validation` with one column,
    `input_ids`: int32 lists of `context_length`. `manifest.json` and `tokenizer/` lie
    beside. The tokens that do not fill a last row are dropped and counted:
    tokens = rows * context_length + dropped_tokens in each split.

    Memory is that of one batch, or of one document where that is longer: a document is
    tokenised whole, at some 120 bytes a character, so a file of gigabytes should be divided
    into its documents first. On disk the work needs 8 bytes a token, 4 of which stay.

    Raises:
        ValueError: for everything a user can put right; the sentence says how.
    """
    preparation(inputs, tokenizer, train_tokenizer, context_length, validation_fraction, pattern)
    target = Path(output).resolve()  # a link to a larger disk stays a link
    prepared_output(target, overwrite)
    sources = find_sources(inputs, pattern=pattern, exclude=exclude, output=target)
    if len(sources) == 1 and sources[0].is_one_document:
        raise ValueError(
            f"the only input, {sources[0].name}, is one document, which leaves none for validation: put one"
            f" document on each line of a .jsonl file, or give several files"
        )
    # A tokenizer that cannot be had should be told of before anything is written.
    hf_tokenizer = load_tokenizer(tokenizer) if tokenizer is not None else None

    skipped = {"empty": 0, "not_utf8": 0, "not_utf8_files": []}
    folder = _temporary_folder(target)
    with _temporary(folder), on_disk(target, folder, "preparing needs 8 bytes a token, of which 4 stay"):
        if hf_tokenizer is None:
            texts = (text for _, text in read_documents(sources, text_field) if text)
            bar = tqdm(texts, "training the tokenizer", unit=" documents", disable=None if progress else True)
            hf_tokenizer = train_byte_level_bpe(bar, vocab_size=train_tokenizer)
        hf_tokenizer.save_pretrained(folder / "tokenizer")
        tokenizer_file = folder / "tokenizer" / "tokenizer.json"

        # Encode with the file that was saved, so that its checksum vouches for the rows.
        encode = encoder(Tokenizer.from_file(str(tokenizer_file)), hf_tokenizer)
        encoded = encode(_readable(read_documents(sources, text_field), skipped), skipped)
        bar = tqdm(encoded, "tokenising", unit=" documents", disable=None if progress else True)
        train, validation = _split_documents(bar, folder, seed, validation_fraction)
        if not train.documents + validation.documents:
            raise ValueError(
                f"no document with text in {len(sources)} inputs and files: {skipped['empty']} empty documents and"
                f" {skipped['not_utf8']} that are not valid UTF-8 were skipped"
            )
        if skipped["not_utf8"]:
            warnings.warn(
                f"skipped {skipped['not_utf8']} documents that are not valid UTF-8, the first being"
                f" {skipped['not_utf8_files'][0]}; manifest.json lists up to {MAX_LISTED_SKIPS}",
                stacklevel=2,
            )

        splits = {"train": train, "validation": validation}
        rows = sum(split.tokens // context_length for split in splits.values())
        files.room(folder, 4 * rows * context_length, "The dataset", "make room, or take an --output on another disk")
        failpoint("prepare.rows")
        saved = _save_rows(splits, folder, context_length, progress)
        manifest = {
            "format": MANIFEST_FORMAT,
            "output": str(output),
            "context_length": context_length,
            "packed": True,
            "inputs": [str(name) for name in inputs],
            "files": [{"path": source.name, "bytes": source.bytes} for source in sources[:MAX_LISTED_FILES]],
            "files_total": len(sources),
            "bytes_total": sum(source.bytes or 0 for source in sources),
            "text_field": text_field,
            "tokenizer": str(tokenizer) if tokenizer is not None else f"trained:{train_tokenizer}",
            "tokenizer_sha256": hashlib.sha256(tokenizer_file.read_bytes()).hexdigest(),
            "vocab_size": len(hf_tokenizer),
            "eos_token_id": hf_tokenizer.eos_token_id,
            "bos_token_id": hf_tokenizer.bos_token_id,
            "max_token_id": max(train.max_token_id, validation.max_token_id),
            "seed": seed,
            "validation_fraction": validation_fraction,
            "splits": saved,
            "skipped": skipped,
            "versions": {
                "python": platform.python_version(),
                "pyarrow": pa.__version__,
                "datasets": datasets.__version__,
                "tokenizers": tokenizers.__version__,
                "transformers": transformers.__version__,
            },
        }
        manifest["written"] = describe(folder, files_in(folder))
        content = encode_manifest(manifest)
        (folder / "manifest.json").write_bytes(content)
        with uninterrupted():
            _publish(folder, target)
    return json.loads(content)


def summary(manifest: dict) -> str:
    """A few lines that say what `prepare` made, to print at the end."""
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


def _readable(documents: Iterable[Document], skipped: dict) -> Iterator[tuple[str, str]]:
    """Pass on the documents with text in them; count the others in `skipped`."""
    for where, text in documents:
        if text is None:
            skipped["not_utf8"] += 1
            if len(skipped["not_utf8_files"]) < MAX_LISTED_SKIPS:
                skipped["not_utf8_files"].append(where)
        elif not text.strip():
            skipped["empty"] += 1
        else:
            yield where, text


@dataclass
class _Split:
    """One split while it is written: a flat file of int32 tokens, documents end to end."""

    path: Path
    documents: int = 0
    tokens: int = 0
    max_token_id: int = -1
    # The document nearest to the other split: (distance, first token, tokens).
    nearest: tuple[float, int, int] = field(default=(2.0, 0, 0))

    def add(self, ids: np.ndarray, distance: float) -> None:
        self.nearest = min(self.nearest, (distance, self.tokens, len(ids)))
        self.documents += 1
        self.tokens += len(ids)
        self.max_token_id = max(self.max_token_id, int(ids.max()))


def document_hash(seed: int, index: int) -> float:
    """A number in [0, 1), uniform over documents, that depends on (seed, index) alone."""
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=6).digest()
    return int.from_bytes(digest, "big") / 2**48


def _split_documents(
    encoded: Iterable[np.ndarray], folder: Path, seed: int, validation_fraction: float
) -> tuple[_Split, _Split]:
    """Write each document to the flat file of its split: whole, in the order they come."""
    train, validation = _Split(folder / "train.int32"), _Split(folder / "validation.int32")
    with open(train.path, "wb") as train_file, open(validation.path, "wb") as validation_file:
        for index, ids in enumerate(encoded):
            number = document_hash(seed, index)
            split, file = (validation, validation_file) if number < validation_fraction else (train, train_file)
            failpoint("prepare.documents")
            file.write(ids.data)
            split.add(ids, abs(number - validation_fraction))
    # Few documents can all fall to one side: then the nearest to the other goes there.
    if train.documents + validation.documents >= 2:
        if not validation.documents:
            _move_nearest(train, validation)
        elif not train.documents:
            _move_nearest(validation, train)
    return train, validation


def _move_nearest(source: _Split, destination: _Split) -> None:
    _, start, count = source.nearest
    tokens = np.memmap(source.path, dtype=np.int32, mode="r+")
    moved = np.array(tokens[start : start + count])
    moved.tofile(destination.path)
    destination.add(moved, 0.0)
    for position in range(start, len(tokens) - count, COPY_TOKENS):
        chunk = np.array(tokens[position + count : position + count + COPY_TOKENS])
        tokens[position : position + len(chunk)] = chunk
    source.documents -= 1
    source.tokens -= count  # what the file still holds beyond is not read again


def _save_rows(splits: dict[str, _Split], folder: Path, context_length: int, progress: bool) -> dict[str, dict]:
    """Write the splits' whole rows as a DatasetDict into `folder`; the manifest's `splits`.

    Raises:
        ValueError: a split that does not fill a row.
    """
    for name, split in splits.items():
        if split.tokens < context_length:
            larger = "a larger --validation_fraction" if name == "validation" else "a smaller --validation_fraction"
            raise ValueError(
                f"the {name} split has {split.tokens} tokens in {split.documents} of"
                f" {sum(one.documents for one in splits.values())} documents, which do not fill one row of"
                f" context_length {context_length}: choose a smaller --context_length or {larger},"
                f" or give more text (a plain-text file is one document, and documents are never divided)"
            )
    described, prepared = {}, {}
    for name, split in splits.items():
        rows = split.tokens // context_length
        tokens = np.memmap(split.path, dtype=np.int32, mode="r", shape=rows * context_length)
        digest = hashlib.sha256()
        for position in range(0, len(tokens), COPY_TOKENS):
            digest.update(tokens[position : position + COPY_TOKENS].data)
        described[name] = {
            "documents": split.documents,
            "tokens": split.tokens,
            "rows": rows,
            "dropped_tokens": split.tokens - rows * context_length,
            "sha256": digest.hexdigest(),
        }
        prepared[name] = _fixed_size_dataset(tokens, context_length, name, fingerprint=digest.hexdigest()[:16])

    with _datasets_bars(shown=progress and sys.stderr.isatty()):
        datasets.DatasetDict(prepared).save_to_disk(folder, max_shard_size=MAX_SHARD_SIZE)
    for split in splits.values():
        split.path.unlink()
    return described


def _fixed_size_dataset(tokens: np.ndarray, context_length: int, name: str, fingerprint: str) -> datasets.Dataset:
    features = datasets.Features({"input_ids": datasets.List(datasets.Value("int32"), length=context_length)})
    # The memory map itself becomes the column: nothing is copied, nothing is in memory yet.
    flat = pa.Array.from_buffers(pa.int32(), len(tokens), [None, pa.py_buffer(tokens)])
    column = pa.FixedSizeListArray.from_arrays(flat, context_length)
    # Without a fingerprint of its own `datasets` would pickle the whole table to get one.
    return datasets.Dataset(
        pa.table({"input_ids": column}),
        info=datasets.DatasetInfo(features=features),
        split=datasets.NamedSplit(name),
        fingerprint=fingerprint,
    )


@contextlib.contextmanager
def _datasets_bars(shown: bool) -> Iterator[None]:
    """Keep `datasets` from drawing bars where none are wanted; its switch is global."""
    switch = not shown and not datasets.utils.are_progress_bars_disabled()
    if switch:
        datasets.utils.disable_progress_bars()
    try:
        yield
    finally:
        if switch:
            datasets.utils.enable_progress_bars()


def _temporary_folder(output: Path) -> Path:
    """Make a folder beside `output` (a rename must not cross file systems); sweep old ones.

    A preparation of the same `output` that still runs elsewhere loses its folder and
    fails; it cannot mix its data with ours, since each folder has a name of its own.
    """
    prefix = f".{output.name}.preparing-"
    folder = output.parent / f"{prefix}{secrets.token_hex(4)}"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir()
    except OSError as error:
        code = SAVE_FAILED if error.errno in (errno.ENOSPC, errno.EDQUOT) else UNWRITABLE
        raise Fault(f"output {output} cannot be written: {error.strerror}.", code) from error
    for other in folder.parent.iterdir():
        if other.name.startswith(prefix) and other != folder:
            other.unlink() if other.is_symlink() else shutil.rmtree(other)
    return folder


@contextlib.contextmanager
def _temporary(folder: Path) -> Iterator[None]:
    """The folder is gone at the end, however that comes, unless it was renamed."""
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _publish(folder: Path, output: Path) -> None:
    """Rename `folder` to `output`; what stood there goes last."""
    old = folder.with_name(folder.name + "-old")
    if output.exists():
        output.rename(old)
    failpoint("prepare.publish")
    folder.rename(output)
    if old.exists():
        shutil.rmtree(old)
