"""Raw text -> documents -> tokens -> packed rows -> a folder that `datasets.load_from_disk` opens.

`prepare` is the whole act; the functions below it are its parts, in the order of the data.

The tokenizer's own convention is kept (a Llama document starts with BOS), and exactly one EOS ends each document and
appears nowhere else but as padding. Where BOS and EOS are the same token, the EOS of the document before serves as BOS.
Text that spells a special token stays text. Documents without a visible character, and records that can't be read, are
left out and counted.

There are two phases. Processes, or machines, encode pieces of the inputs (encoding.py) into the work folder beside the
output, with marks of what is done: a later start with the same inputs goes on from them. Then one pass over the pieces
divides documents into splits and packs them into rows (rows.py). The plan of the pieces and all that follows are functions
of the inputs and options alone: however often it was killed and whoever made the pieces, the bytes are the same.

The folder is a `DatasetDict` of `train` and `validation` with one column, `input_ids`: lists of `context_length` uint16,
or int32 where the vocabulary has more than 65,536 tokens, with `manifest.json` and `tokenizer/` beside them. Tokens that
don't fill a last row are dropped and counted: in each split tokens = rows * context_length + dropped_tokens - padding.

Everything streams: memory holds a batch of sections in each process, at about 120 bytes a character.
"""

from __future__ import annotations

import json
import platform
import shutil
import sys
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Optional

from tokenizers import Tokenizer
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from fabric_llm.base import files
from fabric_llm.base.ending import on_disk
from fabric_llm.base.faults import printable
from fabric_llm.base.machine import cores
from fabric_llm.base.names import shown
from fabric_llm.prepare import inputs as checks
from fabric_llm.prepare import workers
from fabric_llm.prepare.documents import Part, texts
from fabric_llm.prepare.encoding import MAX_NAMED, Generated, Job, Mark, counted, read_mark
from fabric_llm.prepare.formats import DEFAULT_PATTERNS, PACKAGES
from fabric_llm.prepare.pieces import Piece, fingerprint, plan
from fabric_llm.prepare.rows import ONE_DOCUMENT, save_rows
from fabric_llm.prepare.splits import Draw, repeated, split_documents
from fabric_llm.prepare.tokenizer import convention, packing_tokenizer, train_byte_level_bpe
from fabric_llm.prepare.work_folder import begin, new_folder, publish, work_folder

MANIFEST_FORMAT = 1
MAX_LISTED_FILES = 10_000
MAX_LISTED_SUFFIXES = 100
MUCH_PADDING_PERCENT = 1.0
MANY_ROWS = 50  # among fewer, the last one says little of the documents


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
    seed: int = 1234
    num_workers: int | None = None
    shard: str | None = None
    engine: str = "local"
    overwrite: bool = False
    progress: bool = True  # show a bar where stderr is a terminal


def prepare(generated: Optional[Generated] = None, **arguments: Any) -> dict:
    """Turn raw text into a packed token dataset at `output`, and return its manifest. The arguments are those of `Options`.

    generated: documents in place of those of `inputs`.

    `output` appears only once it is complete, and a dataset that it replaces is removed last. With `shard`, only that
    shard's pieces are encoded, and what is left is returned: {"shard", "pieces", "left"}.

    Raises ValueError for everything that a user can correct, with a sentence that says how.
    """
    options = Options(**arguments)
    checks.preparation(
        options.inputs if generated is None else [generated.settings["model"]],
        options.tokenizer,
        options.train_tokenizer,
        options.context_length,
        options.validation_fraction,
        options.pattern,
        options.num_workers,
    )
    target = Path(options.output).resolve()  # a link to a larger disk stays a link
    checks.prepared_output(target, options.overwrite)
    shard = checks.shard(options.shard)
    if generated is None:
        found = checks.find_sources(options.inputs, pattern=options.pattern, exclude=options.exclude, output=target)
        pieces = plan(found, checks.separator(options.document_separator))
        key = fingerprint(found, pieces)
    else:
        found, pieces = checks.Found(), [Piece(0, generated.tokens, [])]  # whose size is in tokens
        key = json.dumps(generated.settings, sort_keys=True)
    parts = [part for piece in pieces for part in piece.parts]
    if len(parts) == 1 and parts[0].is_one_document:
        raise ValueError(ONE_DOCUMENT)
    if not options.validation_fraction and not found.own_validation:
        raise ValueError("validation_fraction is 0, and no input has a validation split of its own: take more than 0")
    # Here, so that it fails before anything is written.
    given = None if options.tokenizer is None else packing_tokenizer(options.tokenizer)
    needs = "preparing needs 6 bytes a token, of which 2 stay, or 12 and 4 with a vocabulary over 65,536"

    def is_encoded(folder: Path) -> bool:
        """Whether what is left is quick to make again."""
        return generated is None and all(read_mark(folder, piece.number).done for piece in pieces)

    with work_folder(target, shard is not None, is_encoded) as folder:
        with on_disk(target, folder, needs):
            tokenizer = _begin(folder, options, key, given, parts)
            backend = Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json"))
            stops, hashes = options.on_error == "stop", options.deduplicate == "exact"
            job = Job(str(folder), convention(backend, tokenizer), options.text_field, stops, hashes, threads=1)
            marks = _encode(pieces, job, shard, options, generated)
            if shard is not None:
                left = sum(not mark.done for mark in marks)
                return {"shard": options.shard, "pieces": len(marks[shard[0] :: shard[1]]), "left": left}
            skipped = _left_out(found, pieces, marks, options.on_error)
            rows = _rows(folder, marks, options, job.convention.dtype, tokenizer)
            manifest = _manifest(options, found, tokenizer, rows, skipped, folder / "dataset")
            manifest |= {} if generated is None else {"self_replay": generated.settings}
            content = files.encode(manifest)
            (folder / "dataset" / "manifest.json").write_bytes(content)
            publish(folder, folder / "dataset", target)
    return json.loads(content)


def _begin(
    folder: Path,
    options: Options,
    inputs: str,
    tokenizer: Optional[PreTrainedTokenizerBase],
    parts: Sequence[Part],
) -> PreTrainedTokenizerBase:
    """Put the tokenizer into the work folder, which is emptied if it was begun with other inputs or options."""
    key = {
        "inputs": inputs,
        "tokenizer": _name_of_tokenizer(options),
        "text_field": options.text_field,
        "deduplicate": options.deduplicate,
    }
    if tokenizer is not None:
        with tempfile.TemporaryDirectory(dir=folder) as probe:
            tokenizer.save_pretrained(probe)
            key["tokenizer_sha256"] = files.sha256(Path(probe, "tokenizer.json"))
    if begin(folder, key, options.shard is not None):
        print("The work of a former preparation with other inputs or flags was thrown away.", file=sys.stderr)
    if (folder / "tokenizer").is_dir():
        return tokenizer or packing_tokenizer(str(folder / "tokenizer"))
    if tokenizer is None:
        some = texts(parts, options.text_field)
        bar = tqdm(some, "training the tokenizer", unit=" documents", disable=None if options.progress else True)
        tokenizer = train_byte_level_bpe(bar, vocab_size=options.train_tokenizer)
    with new_folder(folder / "tokenizer") as filling:
        tokenizer.save_pretrained(filling)
    return tokenizer


def _name_of_tokenizer(options: Options) -> str:
    return f"trained:{options.train_tokenizer}" if options.tokenizer is None else str(options.tokenizer)


def _encode(
    pieces: list[Piece],
    job: Job,
    shard: Optional[tuple[int, int]],
    options: Options,
    generated: Optional[Generated],
) -> list[Mark]:
    """Encode the pieces, or those of the shard, that aren't done. Returns the marks of all."""
    folder = Path(job.folder)
    chosen = [piece for piece in pieces if shard is None or piece.number % shard[1] == shard[0]]
    left = [piece for piece in chosen if not read_mark(folder, piece.number).done]
    if 0 < len(left) < len(chosen):
        print(f"Going on: {len(chosen) - len(left)} of {len(chosen)} pieces are done.", file=sys.stderr)
    total, left_bytes = (sum(piece.bytes for piece in some) for some in (chosen, left))
    with tqdm(
        desc="tokenizing" if generated is None else "sampling",
        total=total,
        initial=total - left_bytes,
        unit="B" if generated is None else " tokens",
        unit_scale=True,
        disable=None if options.progress else True,
    ) as bar:
        if generated is not None:
            for piece in left:
                generated.make(piece, job, bar.update)
        elif options.engine == "ray":
            workers.encode_on_ray(left, job, bar.update)
        elif left_bytes <= workers.LITTLE_BYTES and options.num_workers is None:
            workers.encode_here(left, job, bar.update)
        else:
            workers.encode_locally(left, job, options.num_workers or cores(), bar.update)
    return [read_mark(folder, piece.number) for piece in pieces]


def _left_out(found: checks.Found, pieces: list[Piece], marks: list[Mark], on_error: str) -> dict[str, Any]:
    """What was left out, of which a warning tells. Raises ValueError where there is no document with text."""
    skipped = counted(marks, pieces)
    bad = sum(skipped["bad"].values())
    if not any(mark.documents for mark in marks):
        raise ValueError(
            f"no document with text in {len(found.sources)} inputs and files: {skipped['empty']} empty documents and"
            f" {bad} that can't be read were skipped{': ' + skipped['bad_records'][0] if bad else ''}"
        )
    if bad and on_error == "stop":  # in pieces that a former start made with `skip`
        raise ValueError(skipped["bad_records"][0])
    if bad:
        warnings.warn(
            f"skipped {_records(skipped['bad'])}, the first: {skipped['bad_records'][0]};"
            f" manifest.json names up to {MAX_NAMED}",
            stacklevel=3,
        )
    return {
        **skipped,
        "files_by_suffix": dict(sorted(found.not_read.most_common(MAX_LISTED_SUFFIXES))),
        "hidden": len(found.hidden),
        "hidden_first": found.hidden[:MAX_NAMED],
        "splits": found.left_out,
    }


def _records(bad: dict[str, int]) -> str:
    """bad: records that can't be read, by kind."""
    total = sum(bad.values())
    return f"{total:,} bad record{'s' * (total != 1)} ({', '.join(f'{count:,} {kind}' for kind, count in bad.items())})"


def _rows(
    folder: Path, marks: list[Mark], options: Options, dtype: str, tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any]:
    """Make the dataset, but for its manifest, in the work folder. Returns what the manifest says of rows."""
    made = folder / "dataset"
    shutil.rmtree(made, ignore_errors=True)
    tokens = sum(mark.tokens for mark in marks)
    # The tokens of the splits, their packed rows, and the dataset.
    room = tokens * (2 if dtype == "uint16" else 4) * (3 if options.packing == "best_fit" else 2)
    files.room(folder, room, "The dataset", "make room, or take an --output on another disk")
    same = None
    if options.deduplicate == "exact":
        hashes = [folder / f"{number:06d}.hashes" for number in range(len(marks))]
        same = repeated(hashes, sum(mark.documents for mark in marks), folder)
    draw = Draw(folder, len(marks), options.seed, options.validation_fraction, same)
    splits, apart = split_documents(draw, folder, dtype)
    saved = save_rows(splits, made, options.context_length, options.packing, tokenizer.eos_token_id, options.progress)
    shutil.copytree(folder / "tokenizer", made / "tokenizer")
    return {
        "dtype": dtype,
        "max_token_id": max(split.max_token_id for split in splits.values()),
        "splits": saved,
        **apart,
        "characters": sum(mark.characters for mark in marks),
        "documents_in_sections": sum(mark.long for mark in marks),
    }


def _manifest(
    options: Options,
    found: checks.Found,
    tokenizer: PreTrainedTokenizerBase,
    rows: dict[str, Any],
    skipped: dict[str, Any],
    made: Path,
) -> dict[str, Any]:
    sources = found.sources
    packages = ["pyarrow", "datasets", "tokenizers", "transformers"]  # that the rows depend on
    packages += sorted({PACKAGES[source.kind] for source in sources if source.kind in PACKAGES})
    return {
        "format": MANIFEST_FORMAT,
        "output": str(options.output),
        "context_length": options.context_length,
        "packed": True,
        "packing": options.packing,
        "inputs": [str(name) for name in options.inputs],
        "files": [{"path": source.name, "bytes": source.bytes} for source in sources[:MAX_LISTED_FILES]],
        "files_total": len(sources),
        "bytes_total": sum(source.bytes or 0 for source in sources),
        "own_validation": found.own_validation,
        "split_at_blank_lines": found.split_texts[:MAX_LISTED_FILES],
        "without_blank_lines": found.whole_texts[:MAX_LISTED_FILES],
        "text_field": options.text_field,
        "document_separator": options.document_separator,
        "tokenizer": _name_of_tokenizer(options),
        "tokenizer_sha256": files.sha256(made / "tokenizer" / "tokenizer.json"),
        "vocab_size": len(tokenizer),
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "seed": options.seed,
        "validation_fraction": options.validation_fraction,
        "deduplicate": options.deduplicate,
        **rows,
        "skipped": skipped,
        "versions": {"python": platform.python_version(), **{name: metadata.version(name) for name in packages}},
        "written": files.describe(made, files.files_in(made)),
    }


# ----------------------------------------------------------------------------- summary


def summary(manifest: dict) -> str:
    """Describe in a few lines what `prepare` made, or what a shard has left."""
    if "shard" in manifest:
        done = f"shard {manifest['shard']} is done"
        if left := manifest["left"]:
            done += f": {manifest['pieces']} pieces; {left} pieces of other shards are left"
            return f"{done}\nThe same command without --shard does what is left."
        return f"{done}: {manifest['pieces']} pieces, and so are all other shards\nThe same command without --shard writes the dataset."
    lines = [_split_line(name, split, manifest["context_length"]) for name, split in manifest["splits"].items()]
    if (sampled := manifest.get("self_replay")) is not None:
        lines.append(f"sampled    {sampled['tokens']:,} tokens or more of {sampled['model']}, seed {sampled['seed']}")
    lines += map(printable, _reading_lines(manifest))
    lines.append(f"tokenizer  {manifest['tokenizer']}, {manifest['vocab_size']:,} tokens")
    lines.append(f"written to {manifest['output']}")
    return "\n".join(lines)


def _split_line(name: str, split: dict, context_length: int) -> str:
    line = f"{name:<10} {split['documents']:>12,} documents {split['tokens']:>15,} tokens {split['rows']:>12,} rows of"
    line += f" {context_length}"
    if "padding_tokens" not in split:
        return f"{line} ({split['dropped_tokens']} tokens of the last, unfilled row dropped)"
    alone = f", {split['dropped_tokens']:,} of them without their end" if split["dropped_tokens"] else ""
    line += f" ({split['row_use_percent']} % of them text, {split['documents_cut']:,} documents cut{alone})"
    if 100 - split["row_use_percent"] > MUCH_PADDING_PERCENT and split["rows"] >= MANY_ROWS:
        line += (
            "\n           these documents leave much padding: few fit beside each other; --packing concat leaves none, and a"
            " larger --context_length less"
        )
    return line


def _some(names: Sequence[str], total: int) -> str:
    return ", ".join(map(shown, names[:3])) + (f" and {total - 3:,} more" if total > 3 else "")


def _reading_lines(manifest: dict) -> list[str]:
    skipped, lines = manifest["skipped"], []
    if skipped["empty"] or skipped["bad"]:
        bad = f", {_records(skipped['bad'])}" if skipped["bad"] else ""
        lines.append(f"skipped    {skipped['empty']:,} empty documents{bad}")
        lines += [f"           {name}" for name in skipped["bad_records"]]
    if manifest["deduplicate"] != "none":
        dropped = manifest["duplicates"]
        lines.append(f"repeated   {dropped['documents']:,} documents, {dropped['tokens']:,} tokens, dropped")
    if skipped["files_by_suffix"]:
        most = sorted(skipped["files_by_suffix"].items(), key=lambda item: -item[1])[:10]
        lines.append(
            f"not read   {', '.join(f'{count:,} {shown(name, 30)}' for name, count in most)}; choose with --pattern"
        )
    if skipped["hidden"]:
        first = _some(skipped["hidden_first"], skipped["hidden"])
        lines.append(f"hidden     {first}: left out; name what is meant with --input")
    if names := manifest["split_at_blank_lines"]:
        lines.append(f"documents  {_some(names, len(names))}: split at blank lines; choose with --document_separator")
    if names := manifest["without_blank_lines"]:
        said = "one document each, without a blank line"
        lines.append(f"documents  {_some(names, len(names))}: {said}; choose with --document_separator")
    held = manifest["held_back"]
    if held["documents"]:
        lines.append(
            f"validation {held['documents']:,} documents, {held['tokens']:,} tokens, drawn for it stay in train: with them it"
            " would hold more than twice --validation_fraction of the tokens"
        )
    if manifest["own_validation"]:
        lines.append(f"validation {', '.join(manifest['own_validation'])}: kept, and none drawn from these datasets")
    if skipped["splits"]:
        lines.append(f"left out   {', '.join(skipped['splits'])}")
    return lines
