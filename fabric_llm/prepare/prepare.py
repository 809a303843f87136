"""Raw text -> documents -> tokens -> packed rows -> a folder that `datasets.load_from_disk` opens.

The tokenizer's own convention is kept (a Llama document starts with BOS), and exactly one EOS ends
each document and appears nowhere else but as padding. Where BOS and EOS are the same token, the EOS
of the document before serves as BOS. Text that spells a special token stays text.

Pieces of the inputs are encoded into the work folder (encoding.py), then documents are divided into
splits and packed into rows (rows.py). All are functions of the inputs and flags alone: however
often it was killed, the bytes are the same. What was read is in the splits, or counted with a
reason: `require_all_counted`.

The folder is a `DatasetDict` of `train` and `validation` with one column, `input_ids`: lists of
`context_length` uint16, or int32 where the vocabulary has more than 65,536 tokens, with
`manifest.json` and `tokenizer/` beside them. Tokens that don't fill a last row are dropped and
counted: in each split tokens = rows * context_length + dropped_tokens - padding.
"""

import hashlib
import json
import math
import platform
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Optional

import numpy as np
from tokenizers import Tokenizer
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from fabric_llm.base import files, work_folder
from fabric_llm.base.describing import describe
from fabric_llm.base.ending import on_disk
from fabric_llm.base.faults import BAD_INPUT
from fabric_llm.base.flag import Flags
from fabric_llm.base.machine import cores
from fabric_llm.base.names import comma_separated, command, shown
from fabric_llm.data.token_bytes import bytes_of_tokens
from fabric_llm.mirror.address import is_address
from fabric_llm.prepare import contamination, encoding, inputs
from fabric_llm.prepare.contamination import EvaluationSet
from fabric_llm.prepare.corpus import Piece, plan
from fabric_llm.prepare.documents import DRAWN, Part, texts
from fabric_llm.prepare.encoding import Job, Mark, read_mark, without_panic
from fabric_llm.prepare.rows import Documents, save_rows, split_documents
from fabric_llm.prepare.tokenizer import (
    convention,
    longest_row,
    packing_tokenizer,
    train_byte_level_bpe,
)

MANIFEST_FORMAT = 1
MAX_LISTED_FILES = 10_000
MAX_LISTED_SUFFIXES = 10
# Of text, for a tokenizer: pairs are counted in 32 bits, and those that come more often are lost.
MAX_TRAINED_BYTES = 2**30
PACKED_BYTES = 8  # of text in one of a compressed file, at most of most files
LITTLE_BYTES = 16 * 2**20  # of input, for which no process is started
OF_TEXT = ("records", "bytes", "bytes_of_tokens", "tokens", "unknown")  # in the manifest
# Flags that manifest.json holds as they were given.
KEPT_FLAGS = (
    "context_length",
    "packing",
    "text_field",
    "document_separator",
    "seed",
    "validation_fraction",
    "deduplicate",
    "min_document_tokens",
)
PIECE_FORMAT = 5  # of the files in a work folder


def prepare(flags: Flags, input_files: inputs.InputFiles) -> dict:
    """Turn raw text into a packed token dataset at `--output`, and return its manifest.

    flags: those of prepare_data.py. input_files: what `checks.check` has found.

    The output appears only once it is complete, and a dataset that it replaces is removed last.

    Raises ValueError for everything that a user can correct, with a sentence that says how.
    """
    target = inputs.place_of(flags.output)
    pieces = plan(input_files, inputs.separator(flags.document_separator))
    # Every dataset has both splits: train.py evaluates on the second.
    keeps_own = any(part.goes != DRAWN for piece in pieces for part in piece.parts)
    if not flags.validation_fraction and not keeps_own:
        raise ValueError(
            "validation_fraction is 0, and no input has a validation split of its own: take more "
            "than 0"
        )
    # What can't be opened or loaded fails here, before anything is written.
    evaluation = [contamination.read(name) for name in comma_separated(flags.decontaminate)]
    tokenizer = None if flags.tokenizer is None else packing_tokenizer(flags.tokenizer)
    longest = math.inf if tokenizer is None else longest_row(flags.tokenizer, tokenizer)
    if longest < flags.context_length:
        input_files.notes.append(
            f"rows hold {flags.context_length:,} tokens, but {shown(flags.tokenizer)} says that "
            f"its model takes {longest:,} (--context_length)"
        )
    needs = (
        "preparing needs 6 bytes a token, of which 2 stay, or 12 and 4 with a vocabulary over "
        "65,536"
    )
    # Everything is made beside the output, and becomes it by one rename.
    with work_folder.locked(target) as folder, on_disk(target, folder, needs):
        try:
            # Once more: another process may have made it since, and given the lock back.
            inputs.prepared_output(target, flags.overwrite)
            tokenizer = _put_tokenizer(folder, flags, input_files, pieces, tokenizer)
            work = _encode(folder, flags, input_files, pieces, tokenizer, evaluation)
        except BaseException:
            # The next start goes on with the pieces that are done.
            if not has_work(folder):
                work_folder.remove(folder)
            raise
        try:
            manifest = _make_dataset(folder, flags, input_files, work, tokenizer, evaluation)
            require_all_counted(manifest)
            # The manifest is the last file: it has the hashes of all others.
            content = files.encode(manifest)
            files.write_atomically(folder / "dataset" / "manifest.json", content, durable=True)
            publish(folder, target, flags)
        except ValueError as error:
            # All pieces are done. The next start goes on with them after a full disk, which is a
            # Fault of another code, but not after a mistake in the flags or the text.
            if getattr(error, "code", BAD_INPUT) == BAD_INPUT:
                work_folder.remove(folder)
            raise
    # What a reader of the file gets, whose own hash is among the fields.
    return json.loads(content)


def publish(folder: Path, target: Path, flags: Flags) -> None:
    """Rename the complete dataset of the work folder, or send it to the address --output, and
    remove the folder."""
    if is_address(flags.output):
        from fabric_llm.prepare import storage

        storage.send(folder / "dataset", flags.output, flags.overwrite)
        work_folder.remove(folder)
        return
    work_folder.publish(folder / "dataset", target)


def has_work(folder: Path) -> bool:
    """Whether a later start finds something done."""
    return next(folder.glob("piece-*.json"), None) is not None


def _sample(texts: Iterator[str], input_files: inputs.InputFiles) -> Iterator[str]:
    """The texts, or of more than MAX_TRAINED_BYTES every second, third, and so on; of a stream, the
    first."""
    size, is_stream = 0, False
    for source in input_files.sources:
        # How long a compressed text is isn't known before it is read.
        is_packed = source.name.lower().endswith(inputs.PACKED) or source.kind == "parquet"
        size += (source.bytes or 0) * (PACKED_BYTES if is_packed else 1)
        is_stream = is_stream or source.bytes is None
    every = -(-size // MAX_TRAINED_BYTES) or 1
    if every > 1:
        input_files.notes.append(f"the tokenizer is trained on one text of {every}")
    taken = 0
    for text in islice(texts, 0, None, every):
        yield text
        taken += len(text)
        if is_stream and taken > MAX_TRAINED_BYTES:
            return


def _put_tokenizer(
    folder: Path,
    flags: Flags,
    input_files: inputs.InputFiles,
    pieces: Sequence[Piece],
    tokenizer: Optional[PreTrainedTokenizerBase],
) -> PreTrainedTokenizerBase:
    """Put the tokenizer, or else a trained one, into the work folder. One that was trained on the
    same texts before stays there."""
    saved, filling, key = folder / "tokenizer", folder / "tokenizer-incomplete", None
    if tokenizer is None:
        by_name = input_files.by_name()
        # A trained tokenizer is a function of the texts, so it is trained anew for others.
        texts_of = [piece.name(by_name, flags.text_field) for piece in pieces]
        key = [PIECE_FORMAT, flags.train_tokenizer, texts_of]
    former = None
    with suppress(OSError, ValueError):
        former = json.loads((folder / work_folder.KEY).read_bytes())
    if tokenizer is None and former == key:
        tokenizer = packing_tokenizer(str(saved))
    else:
        work_folder.remove_key(folder)
        if tokenizer is None:
            parts = [part for piece in pieces for part in piece.parts]
            documents = tqdm(
                _sample(texts(parts, flags.text_field), input_files),
                "training the tokenizer",
                unit=" documents",
                disable=None,
            )
            tokenizer = train_byte_level_bpe(documents, vocab_size=flags.train_tokenizer)
        for folder_of_before in (filling, saved):  # its settings may have changed
            shutil.rmtree(folder_of_before, ignore_errors=True)
        # A kill leaves no tokenizer under this name, or a whole one.
        tokenizer.save_pretrained(filling)
        filling.rename(saved)
        files.write_atomically(folder / work_folder.KEY, json.dumps(key), durable=True)
    # The tokens of a corpus are pairs that come more than once in it.
    if flags.tokenizer is None and len(tokenizer) < flags.train_tokenizer:
        input_files.notes.append(
            f"the tokenizer has {len(tokenizer):,} tokens, not {flags.train_tokenizer:,}: this "
            "text is too small for more"
        )
    # Those who encode count by this table how much of the text their tokens stand for.
    with without_panic():
        counts = bytes_of_tokens(tokenizer, max(tokenizer.get_vocab().values()) + 1)
    np.save(folder / encoding.TOKEN_BYTES, counts)
    return tokenizer


def _tokenizer_name(flags: Flags) -> str:
    if flags.tokenizer is None:
        return f"trained:{flags.train_tokenizer}"
    return str(flags.tokenizer)


def _sha256(backend: Tokenizer) -> str:
    return hashlib.sha256(backend.to_str().encode()).hexdigest()


class Work(NamedTuple):
    """Encoded pieces."""

    pieces: dict[str, Piece]  # by the names of their files in the work folder
    marks: list[Mark]
    dtype: str  # of token ids

    def total(self, name: str) -> int:
        """The sum of a field of all marks."""
        return sum(getattr(mark, name) for mark in self.marks)

    def contaminated(self) -> Iterator[tuple[Part, int, int, str]]:
        """What `contamination.listing` takes."""
        for piece, mark in zip(self.pieces.values(), self.marks):
            for part, number, of, words in mark.contaminated:
                yield piece.parts[part], number, of, words


def _encode(
    folder: Path,
    flags: Flags,
    input_files: inputs.InputFiles,
    pieces: Sequence[Piece],
    tokenizer: PreTrainedTokenizerBase,
    evaluation: Sequence[EvaluationSet],
) -> Work:
    """Encode the pieces that aren't done yet."""
    # The convention is asked of the file that every process loads.
    backend = Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json"))
    stops = flags.on_error == "stop"
    apart = [one.save(folder) for one in evaluation]
    job = Job(str(folder), flags.text_field, stops, apart, **convention(backend, tokenizer))
    # The place of the folder and what is done about errors change no token.
    of_all = job._replace(folder="", stop_on_error=False)
    made_with = [PIECE_FORMAT, metadata.version("tokenizers"), of_all, _sha256(backend)]
    of_sources = input_files.by_name()
    # Pieces of a former start with other names were made of other texts, or in another way.
    by_name = {f"piece-{piece.name(of_sources, made_with)}": piece for piece in pieces}
    left = {name: piece for name, piece in by_name.items() if read_mark(folder / name) is None}
    _tell_of_former_work(folder, by_name, left)
    total = sum(piece.bytes for piece in by_name.values())
    left_bytes = sum(piece.bytes for piece in left.values())
    # The bar begins with what former starts have done.
    with tqdm(
        desc="tokenizing",
        total=total,
        initial=total - left_bytes,
        unit="B",
        unit_scale=True,
        disable=None,
    ) as bar:
        # To start processes would take longer than to encode so little here.
        if left_bytes <= LITTLE_BYTES and flags.num_workers is None:
            for name, piece in left.items():
                encoding.encode_piece(piece, name, job)
                bar.update(piece.bytes)
        elif left:
            encoding.encode_locally(left, job, flags.num_workers or cores(), bar.update)
    # Every piece has a mark now, and marks are in the order of the inputs.
    return Work(by_name, [read_mark(folder / name) for name in by_name], job.dtype)


def _tell_of_former_work(
    folder: Path, pieces: Mapping[str, Piece], left: Mapping[str, Piece]
) -> None:
    """Remove the pieces of a former start that aren't used, and say on stderr what is."""
    # Unused pieces would take room on the disk until the preparation is complete.
    others = [path for path in folder.glob("piece-*") if path.stem not in pieces]
    # A piece without a mark was no work yet.
    if len(left) == len(pieces) and any(path.suffix == ".json" for path in others):
        message = "The work of a former preparation with other inputs or flags was thrown away."
        print(message, file=sys.stderr)
    for path in others:
        path.unlink()
    done = len(pieces) - len(left)
    # Whoever repeats the command should see that its work isn't lost.
    if left and done:
        print(f"Going on: {done} of {len(pieces)} pieces are done.", file=sys.stderr)


def _make_dataset(
    folder: Path,
    flags: Flags,
    input_files: inputs.InputFiles,
    work: Work,
    tokenizer: PreTrainedTokenizerBase,
    evaluation: Sequence[EvaluationSet],
) -> dict[str, Any]:
    """Make the dataset in the work folder, but for its manifest, which is returned.

    Raises ValueError where there is no document with text or too little.
    """
    sentences = encoding.bad_records(work.pieces.values(), work.marks)
    empty, bad = work.total("empty"), work.total("bad")
    left_out = f"{empty} empty documents and {bad} that can't be read were skipped"
    if bad:
        left_out += f": {sentences[0]}"
    # Without a document nothing can be divided into splits.
    if not work.total("documents"):
        raise ValueError(f"no document with text in --input: {left_out}")
    if bad and flags.on_error == "stop":  # in pieces that a former start made with `skip`
        raise ValueError(sentences[0])
    # A former start may have been killed while it wrote rows.
    made = folder / "dataset"
    shutil.rmtree(made, ignore_errors=True)
    # Told now, since rows may take an hour to write.
    _require_room(folder, flags, work)
    # Rows of best_fit are filled up, so that validation needs no text to fill one.
    fits_best, shortest = flags.packing == "best_fit", flags.min_document_tokens
    documents = split_documents(
        [folder / name for name in work.pieces],
        flags.seed,
        flags.validation_fraction,
        flags.deduplicate == "exact",
        shortest,
        row=0 if fits_best else flags.context_length,
    )
    counted = _left_out(documents, evaluation, input_files)
    short, contaminated = counted["skipped"]["short"], counted["contaminated"]["documents"]
    # Only a dataset's own splits can share texts: what is drawn never does.
    if documents.in_both:
        input_files.notes.append(
            f"{documents.in_both:,} documents of validation are in a split that is trained on, too"
        )
    if short:
        left_out += f", and {short} with fewer than {shortest} tokens left out"
    if contaminated:
        left_out += f", and {contaminated} that share {contamination.SHARE}"
    eos, length = tokenizer.eos_token_id, flags.context_length
    try:
        splits, largest = save_rows(documents, work.dtype, made, length, flags.packing, eos)
    except ValueError as error:
        # Too little text may be a matter of what was left out.
        if bad or short or contaminated:
            raise ValueError(f"{error}; {left_out}") from error
        raise
    # The dataset carries its tokenizer: train.py compares it with that of the model.
    shutil.copytree(folder / "tokenizer", made / "tokenizer")
    if evaluation:
        lines = contamination.listing(work.contaminated(), evaluation, input_files.given)
        with open(made / contamination.LISTED, "wb") as file:
            file.writelines(lines)
    return {
        **_origin(flags, input_files),
        "tokenizer_sha256": files.sha256(made / "tokenizer" / "tokenizer.json"),
        "vocab_size": len(tokenizer),
        "eos_token_id": eos,
        "bos_token_id": tokenizer.bos_token_id,
        "dtype": work.dtype,
        "max_token_id": largest,
        "splits": splits,
        # For bits per byte, and for what `summary` warns of.
        "text": {name: work.total(name) for name in OF_TEXT},
        **counted,
        "skipped": {**counted["skipped"], "empty": empty, "bad": bad, "bad_records": sentences},
        "written": describe(made, files.files_in(made)),
    }


def _left_out(
    documents: Documents, evaluation: Sequence[EvaluationSet], input_files: inputs.InputFiles
) -> dict[str, Any]:
    """The fields of the manifest for documents that are in no split, and for files that aren't
    read."""
    counts = {}
    for name, mine in documents.left_out.items():
        counts[name] = {"documents": int(mine.sum()), "tokens": int(documents.lengths[mine].sum())}
    return {
        "duplicates": counts["repeated"],
        "contaminated": {**counts["contaminated"], "sets": [one.about for one in evaluation]},
        "skipped": {
            "short": counts["short"]["documents"],
            "files_by_suffix": _most_common(input_files.not_read),
            "files_twice": input_files.twice,
            "splits": input_files.splits_left_out,
        },
    }


def _require_room(folder: Path, flags: Flags, work: Work) -> None:
    """Raises Fault (74) unless the disk has room for what is made of the pieces."""
    # The tokens of the splits, their packed rows, and the dataset.
    copies = 3 if flags.packing == "best_fit" else 2
    needed = work.total("tokens") * np.dtype(work.dtype).itemsize * copies
    files.room(folder, needed, "The dataset", "make room, or take an --output on another disk")


def _origin(flags: Flags, input_files: inputs.InputFiles) -> dict[str, Any]:
    """The fields of the manifest for flags, inputs and versions."""
    packages = ["pyarrow", "datasets", "tokenizers", "transformers"]  # that the rows depend on
    return {
        "format": MANIFEST_FORMAT,
        "output": str(flags.output),
        "packed": True,
        **{name: getattr(flags, name) for name in KEPT_FLAGS},
        "inputs": [str(name) for name in flags.input],
        "made_by": {
            "command": _command(flags),
            # The card of an exported model names them.
            "from_hub": [one.name for one in input_files.sources if one.kind == "hub"],
        },
        "files": [
            {"path": input_files.given(source.name), "bytes": source.bytes}
            # Not all: a corpus may have millions, and train.py reads this at each start.
            for source in input_files.sources[:MAX_LISTED_FILES]
        ],
        "files_total": len(input_files.sources),
        "bytes_total": sum(source.bytes or 0 for source in input_files.sources),
        "notes": input_files.notes[:MAX_LISTED_FILES],
        "tokenizer": _tokenizer_name(flags),
        "versions": {
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in packages},
        },
    }


def _command(flags: Flags) -> str:
    """The command that makes the same dataset."""
    given = {}
    for name, value in vars(flags).items():
        # Workers and overwriting don't change the dataset.
        if value != getattr(type(flags), name) and name not in ("num_workers", "overwrite"):
            given[name] = value
    return command("python", "prepare_data.py", **given)


def _most_common(counts: Counter) -> dict[str, int]:
    """The MAX_LISTED_SUFFIXES largest of `counts`, and the sum of the others."""
    # The files of a folder may have any number of suffixes.
    named = dict(counts.most_common(MAX_LISTED_SUFFIXES))
    if others := counts.total() - sum(named.values()):
        named["of other suffixes"] = others
    return named


def require_all_counted(manifest: dict[str, Any]) -> None:
    """Raises AssertionError, with the numbers, unless what was read is in the splits or counted."""
    skipped, splits = manifest["skipped"], manifest["splits"]
    # Each document that was read is in a split, or left out for one reason.
    counted = {name: split["documents"] for name, split in splits.items()}
    counted["repeated"] = manifest["duplicates"]["documents"]
    counted["contaminated"] = manifest["contaminated"]["documents"]
    for name in ("short", "empty", "bad"):
        counted[name] = skipped[name]
    if sum(counted.values()) != (records := manifest["text"]["records"]):
        raise AssertionError(
            f"{records:,} documents were read, and {sum(counted.values()):,} are accounted for: "
            f"{counted}"
        )
    # Each token is in a row or dropped. Padding is in rows, but is no token of a document.
    for name, split in splits.items():
        in_rows = split["rows"] * manifest["context_length"]
        in_rows += split["dropped_tokens"] - split.get("padding_tokens", 0)
        if split["tokens"] != in_rows:
            raise AssertionError(
                f"{name} has {split['tokens']:,} tokens, and its rows {in_rows:,}: {split}"
            )
