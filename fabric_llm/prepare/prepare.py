"""Raw text -> documents -> tokens -> packed rows -> a folder that `datasets.load_from_disk` opens.

The tokenizer's own convention is kept (a Llama document starts with BOS), and exactly one EOS ends
each document and appears nowhere else but as padding. Where BOS and EOS are the same token, the EOS
of the document before serves as BOS. Text that spells a special token stays text.

Pieces of the inputs are encoded into the work folder (encoding.py), then documents are divided into
splits and packed into rows (rows.py). All are functions of the inputs and options alone: however
often it was killed, the bytes are the same. What was read is in the splits, or counted with a
reason: `require_all_counted`.

The folder is a `DatasetDict` of `train` and `validation` with one column, `input_ids`: lists of
`context_length` uint16, or int32 where the vocabulary has more than 65,536 tokens, with
`manifest.json` and `tokenizer/` beside them. Tokens that don't fill a last row are dropped and
counted: in each split tokens = rows * context_length + dropped_tokens - padding.
"""

import errno
import hashlib
import json
import os
import platform
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Optional

import numpy as np
from tokenizers import Tokenizer
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from fabric_llm.base import files
from fabric_llm.base.ending import on_disk, uninterrupted
from fabric_llm.base.failpoints import failpoint
from fabric_llm.base.faults import BAD_INPUT, SAVE_FAILED, UNWRITABLE, Fault, printable
from fabric_llm.base.names import command, shown
from fabric_llm.base.program import cores
from fabric_llm.data.token_bytes import bytes_are_lost, bytes_of_tokens
from fabric_llm.prepare import encoding, inputs
from fabric_llm.prepare.corpus import Piece, plan
from fabric_llm.prepare.documents import DRAWN, Part, texts
from fabric_llm.prepare.encoding import Job, Mark, read_mark, without_panic
from fabric_llm.prepare.inputs import DEFAULT_PATTERNS
from fabric_llm.prepare.rows import save_rows, split_documents
from fabric_llm.prepare.tokenizer import convention, packing_tokenizer, train_byte_level_bpe

MANIFEST_FORMAT = 1
MAX_LISTED_FILES = 10_000
MAX_LISTED_SUFFIXES = 10
LITTLE_BYTES = 16 * 2**20  # of input, for which no process is started
# Options that manifest.json says as they were given.
OF_TEXT = ("records", "bytes", "bytes_of_tokens", "tokens", "unknown")  # in the manifest
SAID = (
    "context_length",
    "packing",
    "text_field",
    "document_separator",
    "seed",
    "validation_fraction",
    "deduplicate",
    "min_document_tokens",
)
KEY = "key.json"  # what the tokenizer in the work folder was made of
PIECE_FORMAT = 3  # of the files there


@dataclass(frozen=True, kw_only=True)
class Options:
    """The arguments of `prepare`, which are those of `prepare_data.py --help`."""

    inputs: Sequence[str | Path]
    output: str | Path
    tokenizer: str | None = None
    train_tokenizer: int | None = None
    context_length: int
    validation_fraction: float = 0.01
    text_field: str = "text"
    pattern: Sequence[str] = tuple(DEFAULT_PATTERNS)
    exclude: Sequence[str] = ()
    document_separator: str | None = None
    on_error: str = "skip"
    packing: str = "concat"
    deduplicate: str = "none"
    min_document_tokens: int = 0
    seed: int = 1234
    num_workers: int | None = None
    overwrite: bool = False

    @property
    def tokenizer_name(self) -> str:
        return f"trained:{self.train_tokenizer}" if self.tokenizer is None else str(self.tokenizer)

    def command(self) -> str:
        """The command that makes the same dataset."""
        given = {
            name: value
            for name, value in vars(self).items()
            if value != getattr(Options, name, None)
        }
        flags = {
            name: value
            for name, value in given.items()
            if name not in ("inputs", "num_workers", "overwrite")
        }
        return command("python", "prepare_data.py", input=self.inputs, **flags)


def prepare(**arguments: Any) -> dict:
    """Turn raw text into a packed token dataset at `output`, and return its manifest. The arguments
    are those of `Options`.

    `output` appears only once it is complete, and a dataset that it replaces is removed last.

    Raises ValueError for everything that a user can correct, with a sentence that says how.
    """
    options = Options(**arguments)
    inputs.preparation(options, options.inputs)
    target = Path(options.output).resolve()  # a link to a larger disk stays a link
    inputs.prepared_output(target, options.overwrite)
    found = inputs.find_sources(
        options.inputs, pattern=options.pattern, exclude=options.exclude, output=target
    )
    pieces = plan(found, inputs.separator(options.document_separator))
    parts = [part for piece in pieces for part in piece.parts]
    if not options.validation_fraction and all(part.goes == DRAWN for part in parts):
        raise ValueError(
            "validation_fraction is 0, and no input has a validation split of its own: take more "
            "than 0"
        )
    # Here, so that it fails before anything is written.
    tokenizer = None if options.tokenizer is None else packing_tokenizer(options.tokenizer)
    sources = {source.name: source for source in found.sources}
    key = {"format": PIECE_FORMAT, "tokenizer": options.tokenizer_name}
    if tokenizer is None:
        key["texts"] = [piece.name(sources, options.text_field) for piece in pieces]
    needs = (
        "preparing needs 6 bytes a token, of which 2 stay, or 12 and 4 with a vocabulary over "
        "65,536"
    )
    is_encoded = False
    with work_folder(target) as folder, on_disk(target, folder, needs):
        try:
            tokenizer = _begin(folder, options, key, tokenizer, parts)
            backend = Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json"))
            job = Job(
                str(folder),
                options.text_field,
                options.on_error == "stop",
                **convention(backend, tokenizer),
            )
            made_with = [
                PIECE_FORMAT,
                metadata.version("tokenizers"),
                job._replace(folder="", stop_on_error=False),
            ]
            made_with.append(hashlib.sha256(backend.to_str().encode()).hexdigest())
            by_name = {f"piece-{piece.name(sources, made_with)}": piece for piece in pieces}
            marks = _encode(by_name, job, options)
            is_encoded = True
            manifest = _make_dataset(folder, options, found, by_name, marks, job.dtype, tokenizer)
            require_all_counted(manifest)
            content = files.encode(manifest)
            (folder / "dataset" / "manifest.json").write_bytes(content)
            with uninterrupted():
                if target.exists():
                    target.rename(folder / "old")
                failpoint("prepare.publish")
                (folder / "dataset").rename(target)
                files.fsync(target.parent)
                remove(folder)
        except BaseException as error:
            # A later start goes on with the pieces, unless all are encoded and the mistake is in
            # what comes after.
            is_mistake = (
                isinstance(error, ValueError) and getattr(error, "code", BAD_INPUT) == BAD_INPUT
            )
            if not has_work(folder) or is_mistake and is_encoded:
                remove(folder)
            raise
    return json.loads(content)


@contextmanager
def work_folder(output: Path) -> Iterator[Path]:
    """Make and lock the folder beside `output` in which it is made.

    Raises Fault (73) where it can't be made, or another process works in it.
    """
    folder = inputs.work_folder_of(output)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        code = SAVE_FAILED if error.errno in (errno.ENOSPC, errno.EDQUOT) else UNWRITABLE
        raise Fault(f"output {output} cannot be written: {error.strerror}.", code) from error
    try:
        encoding.lock(
            descriptor, f"output {output} is being prepared by another process, in {folder}"
        )
        if (folder / "old").exists() and not output.exists():  # killed between the two renames
            (folder / "old").rename(output)
        yield folder
    finally:
        os.close(descriptor)


def has_work(folder: Path) -> bool:
    """Whether a later start finds something done."""
    return next(folder.glob("piece-*.json"), None) is not None


def remove(folder: Path) -> None:
    """Remove a work folder, its key first: after a kill in the middle, the next start doesn't take
    what is left for its own."""
    with suppress(OSError):
        (folder / KEY).unlink(missing_ok=True)
        files.fsync(folder)
    shutil.rmtree(folder, ignore_errors=True)


def _begin(
    folder: Path,
    options: Options,
    key: dict[str, Any],
    tokenizer: Optional[PreTrainedTokenizerBase],
    parts: Sequence[Part],
) -> PreTrainedTokenizerBase:
    """Put the tokenizer into the work folder. A trained one stays where the `key` is the same."""
    if tokenizer is not None:
        key["tokenizer_sha256"] = hashlib.sha256(
            tokenizer.backend_tokenizer.to_str().encode()
        ).hexdigest()
    former = {}
    with suppress(OSError, ValueError):
        former = json.loads((folder / KEY).read_bytes())
    saved, filling = folder / "tokenizer", folder / "tokenizer-incomplete"
    if former != key:
        (folder / KEY).unlink(missing_ok=True)  # first, see `remove`
        files.fsync(folder)
        for path in folder.iterdir():
            # Pieces say in their names what they were made of, unless the folder was being removed.
            if path.name != "lock" and not (
                former.get("format") == PIECE_FORMAT and path.name.startswith("piece-")
            ):
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        files.write_atomically(folder / KEY, json.dumps(key), durable=True)
    if tokenizer is not None or not saved.is_dir():
        if tokenizer is None:
            some = tqdm(
                texts(parts, options.text_field),
                "training the tokenizer",
                unit=" documents",
                disable=None,
            )
            tokenizer = train_byte_level_bpe(some, vocab_size=options.train_tokenizer)
        for folder_of_before in (filling, saved):  # its settings may have changed
            shutil.rmtree(folder_of_before, ignore_errors=True)
        tokenizer.save_pretrained(filling)
        filling.rename(saved)
    tokenizer = tokenizer or packing_tokenizer(str(saved))
    with without_panic():
        counts = bytes_of_tokens(tokenizer, max(tokenizer.get_vocab().values()) + 1)
    np.save(folder / encoding.TOKEN_BYTES, counts)
    return tokenizer


def _encode(pieces: dict[str, Piece], job: Job, options: Options) -> list[Optional[Mark]]:
    """Encode the pieces, by name, that aren't done. Returns the marks of all."""
    folder = Path(job.folder)
    left = {name: piece for name, piece in pieces.items() if read_mark(folder / name) is None}
    others = [path for path in folder.glob("piece-*") if path.stem not in pieces]
    if len(left) == len(pieces) and any(path.suffix == ".json" for path in others):
        print(
            "The work of a former preparation with other inputs or flags was thrown away.",
            file=sys.stderr,
        )
    for path in others:
        path.unlink()
    if 0 < len(left) < len(pieces):
        print(
            f"Going on: {len(pieces) - len(left)} of {len(pieces)} pieces are done.",
            file=sys.stderr,
        )
    total, left_bytes = (sum(piece.bytes for piece in some.values()) for some in (pieces, left))
    done = total - left_bytes
    with tqdm(
        desc="tokenizing", total=total, initial=done, unit="B", unit_scale=True, disable=None
    ) as bar:
        if left_bytes <= LITTLE_BYTES and options.num_workers is None:
            for name, piece in left.items():
                encoding.encode_piece(piece, name, job)
                bar.update(piece.bytes)
        elif left:
            encoding.encode_locally(left, job, options.num_workers or cores(), bar.update)
    return [read_mark(folder / name) for name in pieces]


def _make_dataset(
    folder: Path,
    options: Options,
    found: inputs.InputFiles,
    pieces: dict[str, Piece],
    marks: list[Mark],
    dtype: str,
    tokenizer: PreTrainedTokenizerBase,
) -> dict[str, Any]:
    """Make the dataset in the work folder, but for its manifest, which is returned.

    Raises ValueError for a file of which every record is bad, and where there is no document with
    text or too little.
    """
    sentences = encoding.bad_records(pieces.values(), marks)
    total = {
        name: sum(getattr(mark, name) for mark in marks) for name in vars(Mark()) if name != "named"
    }
    empty, bad = total["empty"], total["bad"]
    left_out = (
        f"{empty} empty documents and {bad} that can't be read were "
        f"skipped{': ' + sentences[0] if bad else ''}"
    )
    if not total["documents"]:
        count = len(found.sources)
        raise ValueError(f"no document with text in {count} inputs and files: {left_out}")
    if bad and options.on_error == "stop":  # in pieces that a former start made with `skip`
        raise ValueError(sentences[0])
    made = folder / "dataset"
    shutil.rmtree(made, ignore_errors=True)
    # The tokens of the splits, their packed rows, and the dataset.
    copies = 3 if options.packing == "best_fit" else 2
    room = total["tokens"] * (2 if dtype == "uint16" else 4) * copies
    files.room(folder, room, "The dataset", "make room, or take an --output on another disk")
    shortest = options.min_document_tokens
    documents = split_documents(
        [folder / name for name in pieces],
        options.seed,
        options.validation_fraction,
        options.deduplicate == "exact",
        shortest,
        row=0 if options.packing == "best_fit" else options.context_length,
    )
    lengths = documents.lengths[documents.lengths < shortest]
    again = documents.lengths[documents.repeated & (documents.lengths >= shortest)]
    if documents.in_both:
        found.notes.append(
            f"{documents.in_both:,} documents of validation are in a split that is trained on, too"
        )
    if len(lengths):
        left_out += f", and {len(lengths)} with fewer than {shortest} tokens left out"
    eos, length = tokenizer.eos_token_id, options.context_length
    try:
        saved, largest = save_rows(documents, dtype, made, length, options.packing, eos)
    except ValueError as error:
        raise ValueError(f"{error}; {left_out}" if bad or len(lengths) else str(error)) from error
    shutil.copytree(folder / "tokenizer", made / "tokenizer")
    return {
        **_origin(options, found),
        "tokenizer_sha256": files.sha256(made / "tokenizer" / "tokenizer.json"),
        "vocab_size": len(tokenizer),
        "eos_token_id": eos,
        "bos_token_id": tokenizer.bos_token_id,
        "dtype": dtype,
        "max_token_id": largest,
        "splits": saved,
        "text": {name: total[name] for name in OF_TEXT},
        "duplicates": {"documents": len(again), "tokens": int(again.sum())},
        "skipped": {
            "empty": empty,
            "short": len(lengths),
            "bad": bad,
            "bad_records": sentences,
            "files_by_suffix": _most_common(found.not_read),
            "files_twice": found.twice,
            "splits": found.splits_left_out,
        },
        "written": files.describe(made, files.files_in(made)),
    }


def _origin(options: Options, found: inputs.InputFiles) -> dict[str, Any]:
    """What the manifest says of flags, inputs and versions."""
    sources = found.sources
    packages = ["pyarrow", "datasets", "tokenizers", "transformers"]  # that the rows depend on
    return {
        "format": MANIFEST_FORMAT,
        "output": str(options.output),
        "packed": True,
        **{name: getattr(options, name) for name in SAID},
        "inputs": [str(name) for name in options.inputs],
        "made_by": {
            "command": options.command(),
            "from_hub": [one.name for one in sources if one.kind == "hub"],
        },
        "files": [
            {"path": source.name, "bytes": source.bytes} for source in sources[:MAX_LISTED_FILES]
        ],
        "files_total": len(sources),
        "bytes_total": sum(source.bytes or 0 for source in sources),
        "notes": found.notes[:MAX_LISTED_FILES],
        "tokenizer": options.tokenizer_name,
        "versions": {
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in packages},
        },
    }


def _most_common(counts: Counter) -> dict[str, int]:
    """The MAX_LISTED_SUFFIXES largest of `counts`, and the sum of the others."""
    named = dict(counts.most_common(MAX_LISTED_SUFFIXES))
    others = counts.total() - sum(named.values())
    return named | ({"of other suffixes": others} if others else {})


def require_all_counted(manifest: dict[str, Any]) -> None:
    """Raises AssertionError, with the numbers, unless what was read is in the splits or counted."""
    skipped, splits = manifest["skipped"], manifest["splits"]
    counted = {name: split["documents"] for name, split in splits.items()}
    counted |= {"repeated": manifest["duplicates"]["documents"]} | {
        name: skipped[name] for name in ("short", "empty", "bad")
    }
    if sum(counted.values()) != (records := manifest["text"]["records"]):
        raise AssertionError(
            f"{records:,} documents were read, and {sum(counted.values()):,} are accounted for: "
            f"{counted}"
        )
    for name, split in splits.items():
        in_rows = (
            split["rows"] * manifest["context_length"]
            + split["dropped_tokens"]
            - split.get("padding_tokens", 0)
        )
        if split["tokens"] != in_rows:
            raise AssertionError(
                f"{name} has {split['tokens']:,} tokens, and its rows {in_rows:,}: {split}"
            )


def summary(manifest: dict) -> str:
    """Describe in a few lines what `prepare` made."""
    context_length, skipped, lines = manifest["context_length"], manifest["skipped"], []
    for name, split in manifest["splits"].items():
        rows = (
            f"{split['documents']:>12,} documents {split['tokens']:>15,} tokens "
            f"{split['rows']:>12,} rows of {context_length}"
        )
        said = f"{split['dropped_tokens']} tokens of the last, unfilled row dropped"
        if "padding_tokens" in split:
            alone = (
                f", {split['dropped_tokens']:,} of them without their end"
                if split["dropped_tokens"]
                else ""
            )
            said = (
                f"{split['row_use_percent']} % of them text, {split['documents_cut']:,} "
                f"documents cut{alone}"
            )
        lines.append((name, f"{rows} ({said})"))
    if skipped["empty"] or skipped["bad"]:
        lines.append(
            ("skipped", f"{skipped['empty']:,} empty documents, {skipped['bad']:,} bad records")
        )
        lines += [("", sentence) for sentence in skipped["bad_records"]]
    if skipped["short"]:
        lines.append(
            (
                "too short",
                (
                    f"{skipped['short']:,} documents of fewer than "
                    f"{manifest['min_document_tokens']} tokens"
                ),
            )
        )
    if manifest["deduplicate"] != "none":
        said = "{documents:,} documents, {tokens:,} tokens, dropped".format(
            **manifest["duplicates"]
        )
        lines.append(("repeated", said))
    if suffixes := skipped["files_by_suffix"]:
        named = ", ".join(f"{count:,} {shown(name, 30)}" for name, count in suffixes.items())
        advice = "choose with --pattern, or name what is meant with --input"
        if web := [name for name in suffixes if name in inputs.WEB]:
            advice += f"; the text of {' and '.join(web)} has to be extracted first"
        lines.append(("not read", f"{named}; {advice}"))
    if skipped["files_twice"]:
        lines.append(
            (
                "once",
                f"{skipped['files_twice']:,} links or names lead to what is read already",
            )
        )
    lines += [("note", note) for note in manifest["notes"][: encoding.MAX_NAMED]]
    text = manifest["text"]
    if text["unknown"]:
        part = 100 * text["unknown"] / text["tokens"]
        said = f"{text['unknown']:,} tokens ({part:.2g} %) are <unk>: what they stood for is lost"
        lines.append(
            ("warning", f"{said}; take another tokenizer, or python -m fabric_llm.extend_vocab")
        )
    if bytes_are_lost(manifest):
        part = 100 * text["bytes_of_tokens"] / text["bytes"]
        said = f"tokens stand for {part:.3g} % of the bytes of the text"
        said += ", so evaluations give no bits per byte"
        lines.append(("warning", said))
    lines.append(("tokenizer", f"{manifest['tokenizer']}, {manifest['vocab_size']:,} tokens"))
    lines.append(("written to", manifest["output"]))
    return "\n".join(f"{about:<10} {printable(said)}" for about, said in lines)
