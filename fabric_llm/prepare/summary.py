"""What prepare_data.py tells of a dataset once it is made, from its manifest."""

from collections.abc import Iterator
from typing import Any

from fabric_llm.base.faults import printable
from fabric_llm.base.names import counted, shown
from fabric_llm.data.token_bytes import bytes_are_lost
from fabric_llm.prepare import contamination, encoding

FEW_DOCUMENTS = 10  # of the validation split; fewer are warned of


def summary(manifest: dict) -> str:
    """Describe in a few lines what `prepare` made."""
    skipped = manifest["skipped"]
    lines = [
        (name, _of_split(split, manifest["context_length"]))
        for name, split in manifest["splits"].items()
    ]
    if skipped["empty"] or skipped["bad"]:
        empty = counted(skipped["empty"], "empty document")
        lines.append(("skipped", f"{empty}, {counted(skipped['bad'], 'bad record')}"))
        lines += [("", sentence) for sentence in skipped["bad_records"]]
    if skipped["short"]:
        documents = counted(skipped["short"], "document")
        count = f"{documents} of fewer than {manifest['min_document_tokens']} tokens"
        lines.append(("too short", count))
    # Also where nothing was repeated, since it was asked for.
    if manifest["deduplicate"] != "none":
        lines.append(("repeated", f"{_documents_of(**manifest['duplicates'])}, dropped"))
    lines += _of_evaluation(**manifest["contaminated"])
    if suffixes := skipped["files_by_suffix"]:
        lines.append(("not read", _of_suffixes(suffixes)))
    # A link is no mistake, but a user may wonder where a file went.
    if skipped["files_twice"]:
        count = f"{skipped['files_twice']:,} links or names lead to what is read already"
        lines.append(("once", count))
    lines += [("note", note) for note in manifest["notes"][: encoding.MAX_NAMED]]
    text = manifest["text"]
    # Such a dataset is complete, but a part of its text is lost.
    if text["unknown"]:
        percent = 100 * text["unknown"] / text["tokens"]
        lost = (
            f"{text['unknown']:,} tokens ({percent:.2g} %) are <unk>: what they stood for is lost; "
            "take another tokenizer, or python -m fabric_llm.extend_vocab"
        )
        lines.append(("warning", lost))
    if bytes_are_lost(manifest):
        percent = 100 * text["bytes_of_tokens"] / text["bytes"]
        lost = (
            f"tokens stand for {percent:.3g} % of the bytes of the text, so evaluations give no "
            "bits per byte"
        )
        lines.append(("warning", lost))
    if (count := manifest["splits"]["validation"]["documents"]) < FEW_DOCUMENTS:
        few = (
            f"{counted(count, 'document')} for validation, whose loss says little about others: "
            f"raise --validation_fraction ({manifest['validation_fraction']:g})"
        )
        lines.append(("warning", few))
    tokenizer = f"{manifest['tokenizer']}, {manifest['vocab_size']:,} tokens"
    # Other datasets for the same model take it from there.
    if manifest["tokenizer"].startswith("trained:"):
        tokenizer += f", in {manifest['output']}/tokenizer"
    lines.append(("tokenizer", tokenizer))
    lines.append(("written to", manifest["output"]))
    # Names of files may have characters that a terminal would obey.
    return "\n".join(f"{about:<10} {printable(line)}" for about, line in lines)


def _of_split(split: dict[str, Any], context_length: int) -> str:
    rows = (
        f"{split['documents']:>12,} documents {split['tokens']:>15,} tokens "
        f"{split['rows']:>12,} rows of {context_length}"
    )
    dropped = split["dropped_tokens"]
    # Rows of --packing concat have no padding.
    if "padding_tokens" not in split:
        return f"{rows} ({counted(dropped, 'token')} of the last, unfilled row dropped)"
    cut = counted(split["documents_cut"], "document")
    packed = f"{split['row_use_percent']} % of them text, {cut} cut"
    # No row has room for the EOS of a document whose text fills its rows.
    if dropped:
        packed += f", {dropped:,} that fill their rows without EOS"
    return f"{rows} ({packed})"


def _documents_of(documents: int, tokens: int) -> str:
    return f"{counted(documents, 'document')}, {counted(tokens, 'token')}"


def _of_evaluation(
    documents: int, tokens: int, sets: list[dict[str, Any]]
) -> Iterator[tuple[str, str]]:
    """What was left out for evaluation sets, and what can't be found of them."""
    if sets:
        said = f"{_documents_of(documents, tokens)}, share {contamination.SHARE}"
        yield "left out", f"{said}: {contamination.LISTED} names them"
    for one in sets:
        said = f"{one['documents']:,} of them with {shown(one['path'])}"
        if one["short"]:
            said += (
                f"; of its {one['texts']:,} {one['are']} {one['short']:,} have fewer than "
                f"{contamination.GRAM} words and can't be found"
            )
        yield "", said


def _of_suffixes(suffixes: dict[str, int]) -> str:
    """Which files of folders weren't read, and what to do about it."""
    named = ", ".join(f"{count:,} {shown(name, 30)}" for name, count in suffixes.items())
    return f"{named}; choose files with --pattern, or name what is meant with --input"
