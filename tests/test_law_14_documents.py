"""Law 14: every document of the inputs is in a split, or counted with a reason.

Trees of files are drawn by seed, and read a second time by what shares nothing with the product:
the standard library, pyarrow for tables, and its own counting.
"""

import bz2
import csv
import gzip
import io
import json
import lzma
import os
import random
import sys
import zlib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from conftest import prepare
from datasets import Dataset, DatasetDict, load_from_disk
from transformers import AutoTokenizer

from fabric_llm.prepare.summary import summary
from fabric_llm.prepare.tokenizer import train_byte_level_bpe

WORDS = ["one", "two", "vier", "fünf", "huit", "十", "十一", "🎉", "\t", "", "tab", '"quoted"']
WORDS += ["comma,", "{json}", "[list]", "\\", "end"]
READ = (".txt", ".md", ".jsonl", ".json", ".csv", ".tsv", ".parquet")
PACK = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}
PACK[".zst"] = zstandard.compress


# ------------------------------------------------------------------------------- drawing


class Draw:
    """A tree of files."""

    def __init__(self, seed: int, root: Path) -> None:
        self.random, self.root, self.count = random.Random(seed), root, 0
        # which come again and again
        self.known = [f"text number {number} of all" for number in range(4)]

    def text(self) -> str:
        kind = self.random.random()
        if kind < 0.25:
            return self.random.choice(self.known)
        if kind < 0.35:
            return self.random.choice(["", " ", "\n\t "])
        self.count += 1
        return f"{self.count} " + " ".join(self.random.choices(WORDS, k=self.random.randrange(12)))

    def record(self) -> bytes:
        """A line of JSON, good or bad."""
        text = json.dumps(self.text(), ensure_ascii=self.random.random() < 0.5)
        kinds = {
            '{"text": %s}' % text: 12,
            '{"n": NaN, "text": %s}' % text: 1,
            '{"n": %s, "text": %s}' % ("7" * 4400, text): 1,
            '{"text": "half \\ud83d\\u0041"}': 1,
            '{"text": "whole \\ud83d\\ude00"}': 1,
            '{"text": "a tab \t in it"}': 1,
            '{"body": %s}' % text: 1,
            '{"text": [1, {"text": 2}]}': 1,
            '{"text": null}': 1,
            "[1, 2]": 1,
        }
        line = self.random.choices([*kinds], [*kinds.values()])[0].encode()
        return line if self.random.random() < 0.95 else b'{"text": "caf\xe9 %d"}' % self.count

    def records(self) -> list[bytes]:
        """At least one of them is good: a file without one is refused."""
        some = [self.record() for _ in range(self.random.randrange(8))]
        return [json.dumps({"text": f"good in {self.random.random()}"}).encode(), *some]

    def content(self, kind: str) -> bytes:
        if kind in (".txt", ".md"):
            return self.text().encode() if self.random.random() < 0.9 else b"caf\xe9"
        if kind == ".jsonl":
            return b"\n".join(self.records()) + self.random.choice([b"", b"\n", b"\n \n"])
        if kind == ".json":
            return b"[\n" + b",\n".join(self.records()) + b"\n]\n"
        texts = [f"row in {self.random.random()}"]
        texts += [self.text() for _ in range(self.random.randrange(8))]
        if kind == ".tsv":  # without quotes, as most are
            lines = [f"{number}\t{' '.join(text.split())}" for number, text in enumerate(texts)]
            for at in self.random.sample(range(len(lines)), min(3, len(lines))):
                lines[at] = self.random.choice([f'{at}\t"begins {at}', f'{at}\tends {at}"'])
            return "\n".join(["id\ttext", *lines]).encode() + b"\n"
        if kind == ".csv":
            out = io.StringIO(newline="")
            csv.writer(out).writerows([("id", "text"), *enumerate(texts)])
            return out.getvalue().encode() + self.random.choice([b"", b"9\n", b"9,too,many\n"])
        out = io.BytesIO()
        column = pa.array([None if text == " " else text for text in texts], pa.string())
        pq.write_table(pa.table({"text": column}), out, row_group_size=3)
        return out.getvalue()

    def packed(self, content: bytes, packed: str, kind: str) -> bytes:
        """In several streams, padded, or with a damaged one, which takes all behind it away."""
        # of a record that is good, which the first stream holds
        end = b",\n" if kind == ".json" else b"\n"
        begin = max(content.find(b"good in"), content.find(b"row in"))
        first = content.find(end, begin) + len(end) if begin >= 0 and end in content[begin:] else 0
        places = range(max(first, 1), len(content) + 1)
        cuts = sorted(self.random.choices(places, k=2)) if first else []
        parts = [content[a:b] for a, b in zip([0, *cuts], [*cuts, len(content)])]
        streams = [PACK[packed](part) for part in parts]
        # Of zstandard, pyarrow gives nothing of the 16 KB before a damage, and a file that small is
        # refused.
        if len(streams) > 1 and packed != ".zst" and self.random.random() < 0.3:
            streams[-1] = b"\x01\x02" + streams[-1][2:]
        padding = b"\0" * self.random.choice([0, 0, 4, 8]) if packed != ".zst" else b""
        return padding.join(streams) + (padding if packed in (".xz", ".gz") else b"")

    def file(self, folder: Path) -> Path:
        kind, packed = self.random.choice(READ), self.random.choice(["", "", *PACK])
        packed = "" if kind == ".parquet" else packed
        hidden = "." if self.random.random() < 0.06 else ""
        name = f"{hidden}{self.random.randrange(10**6)}{kind}{packed}"
        content = self.content(kind)
        (folder / name).write_bytes(self.packed(content, packed, kind) if packed else content)
        return folder / name

    def tree(self) -> None:
        folders = [self.root]
        for number in range(self.random.randrange(1, 5)):
            hidden = "." if self.random.random() < 0.1 else ""
            folders.append(self.random.choice(folders) / f"{hidden}d{number}")
            folders[-1].mkdir()
        (self.root / "first.txt").write_text("the first text")
        (self.root / "second.txt").write_text("the second text")
        count = self.random.randrange(2, 12)
        files = [self.file(self.random.choice(folders)) for _ in range(count)]
        for number in range(self.random.randrange(5)):
            place, kind = self.random.choice(folders) / f"z{number}", self.random.randrange(5)
            if kind == 0:
                # loops among them
                place.symlink_to(self.random.choice(folders), target_is_directory=True)
            elif kind == 1:
                target = self.random.choice(files)
                Path(f"{place}{''.join(target.suffixes)}").symlink_to(target)
            elif kind == 2:
                target = self.random.choice(files)
                os.link(target, f"{place}{''.join(target.suffixes)}")
            elif kind == 3:
                Path(f"{place}.txt").symlink_to("nowhere")
            else:  # what isn't read
                suffix = self.random.choice([".pdf", ".html", "", ".py"])
                Path(f"{place}{suffix}").write_bytes(b"<p>\xff")

    def dataset(self, folder: Path) -> dict[str, list[str]]:
        """A dataset of several splits, the texts of which are returned."""
        others = ["test", "test_sft", "eval", "more", "train_gen"]
        names = ["train", *self.random.sample(others, self.random.randrange(3))]
        splits = {name: [self.text() for _ in range(self.random.randrange(1, 6))] for name in names}
        made = {name: Dataset.from_dict({"text": texts}) for name, texts in splits.items()}
        DatasetDict(made).save_to_disk(folder)
        return splits


# ------------------------------------------------------------------------- reading it again


@dataclass
class Seen:
    """What is in a tree."""

    texts: list[str] = field(default_factory=list)
    empty: int = 0
    bad: int = 0
    not_read: int = 0
    twice: int = 0
    found: set = field(default_factory=set)  # files and folders

    def add(self, text: str) -> None:
        if text.strip():
            self.texts.append(text)
        else:
            self.empty += 1

    def line_of_json(self, line: bytes) -> None:
        try:
            text = json.loads(line.decode())["text"]
            assert isinstance(text, str) and text.encode() is not None
        except (ValueError, KeyError, TypeError, AssertionError):
            self.bad += 1
        else:
            self.add(text)

    def walk(self, folder: str) -> None:
        self.found.add(os.path.realpath(folder))
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
            place = os.path.realpath(entry.path)
            if os.path.isfile(place):
                place = os.stat(place).st_ino
            kinds = [k for k in READ for end in ("", *PACK) if entry.name.endswith(k + end)]
            kind = kinds[0] if kinds else None
            is_read = entry.is_dir() or (kind is not None and entry.is_file())
            if entry.name.startswith(".") or not is_read:
                self.not_read += 1
            elif place in self.found:
                self.twice += 1
            elif entry.is_dir():
                self.walk(entry.path)
            else:
                self.found.add(place)
                self.file(Path(entry.path), kind)

    def file(self, path: Path, kind: str) -> None:
        data, is_whole = path.read_bytes(), True
        packed = next((end for end in PACK if path.name.endswith(end)), None)
        if packed is not None:
            data, is_whole = unpacked(data, packed)
        self.bad += not is_whole
        if kind in (".txt", ".md"):
            try:
                if is_whole:
                    self.add(data.decode())
            except UnicodeDecodeError:
                self.bad += 1
            return
        if kind == ".parquet":
            for text in pq.read_table(io.BytesIO(data))["text"].to_pylist():
                self.add(text or "")
            return
        if not is_whole:  # what isn't complete is lost with what comes after it
            data, rest = data[: data.rfind(b"\n") + 1], data[data.rfind(b"\n") + 1 :]
            data += rest if kind == ".json" and (rest.endswith(b"},") or rest == b"]") else b""
        if kind in (".jsonl", ".json"):
            lines = [line for line in data.split(b"\n") if line.strip()]
            if kind == ".json":
                if not is_whole and lines and lines[-1] != b"]" and not lines[-1].endswith(b","):
                    lines.pop()  # an element is whole where a comma or the end of the array follows
                lines = [line.removesuffix(b",") for line in lines if line not in (b"[", b"]")]
            for line in lines:
                self.line_of_json(line)
        elif kind == ".tsv":
            for line in data.decode().splitlines()[1:]:
                self.add(line.split("\t")[1])
        else:
            rows = [*csv.reader(io.StringIO(data.decode(), newline=""))][1:]
            if not is_whole and data.count(b'"') % 2:  # the last row's field isn't complete
                rows.pop()
            for row in rows:
                if len(row) == 2:
                    self.add(row[1])
                else:
                    self.bad += 1


def unpacked(data: bytes, packed: str) -> tuple[bytes, bool]:
    """(what its whole streams hold, whether there is nothing else)"""
    whole = b""
    while data := data.lstrip(b"\0"):
        try:
            if packed == ".gz":
                stream = zlib.decompressobj(31)
            else:
                new = {".bz2": bz2.BZ2Decompressor, ".xz": lzma.LZMADecompressor}
                stream = new.get(packed, lambda: zstandard.ZstdDecompressor().decompressobj())()
            whole += stream.decompress(data)
            data = stream.unused_data
        except Exception:
            return whole, False
        if not stream.eof:
            return whole, False
    return whole, True


# ----------------------------------------------------------------------------------- the law


@pytest.fixture(scope="module", autouse=True)
def all_digits():
    """Of integers, for this file's own reading."""
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    yield
    sys.set_int_max_str_digits(before)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_byte_level_bpe([" ".join(WORDS)] * 3, vocab_size=300).save_pretrained(folder)
    return str(folder)


def texts_of(output: Path, split: str, tokenizer: str) -> Counter:
    """The documents that the rows hold.

    Rows of 2 tokens drop at most the last one, which ends a document.
    """
    encoder = AutoTokenizer.from_pretrained(tokenizer)
    found, ids = Counter(), []
    tokens = [token for row in load_from_disk(output)[split]["input_ids"] for token in row]
    for token in [*tokens, *([] if tokens[-1] == encoder.eos_token_id else [encoder.eos_token_id])]:
        if token == encoder.eos_token_id:
            found[encoder.decode(ids)] += 1
            ids = []
        else:
            ids.append(token)
    return found


def hold_to_the_law(seed: int, folder: Path, tokenizer: str) -> None:
    (folder / "in").mkdir()
    draw = Draw(seed, folder / "in")
    draw.tree()
    seen = Seen()
    seen.walk(str(folder / "in"))
    inputs, left_out = [folder / "in"], {}
    if draw.random.random() < 0.3:
        inputs.append(folder / "dataset")
        for name, texts in draw.dataset(folder / "dataset").items():
            if name in ("test", "test_sft", "eval"):
                left_out[f"{folder}/dataset [{name}]"] = len(texts)
                continue
            for text in texts:
                seen.add(text)
    deduplicate = draw.random.choice(["none", "exact"])
    manifest = prepare(
        input=inputs, output=folder / "out", tokenizer=tokenizer, context_length=2,
        validation_fraction=0.3, deduplicate=deduplicate,
    )
    splits, skipped = manifest["splits"], manifest["skipped"]
    where = f"seed {seed}: {summary(manifest)}"
    kept = Counter(seen.texts) if deduplicate == "none" else Counter({*seen.texts})
    in_rows = {name: texts_of(folder / "out", name, tokenizer) for name in splits}
    assert in_rows["train"] + in_rows["validation"] == kept, where
    assert not in_rows["train"].keys() & in_rows["validation"].keys(), f"in both splits, {where}"
    counts = {name: texts.total() for name, texts in in_rows.items()}
    assert {name: split["documents"] for name, split in splits.items()} == counts
    assert manifest["duplicates"]["documents"] == len(seen.texts) - kept.total(), where
    assert (skipped["empty"], skipped["bad"]) == (seen.empty, seen.bad), where
    assert sum(skipped["files_by_suffix"].values()) == seen.not_read, where
    assert (skipped["files_twice"], skipped["splits"]) == (seen.twice, left_out), where
    assert manifest["text"]["records"] == len(seen.texts) + seen.empty + seen.bad
    size = sum(len(text.encode()) for text in seen.texts)
    assert manifest["text"]["bytes"] == manifest["text"]["bytes_of_tokens"] == size


@pytest.mark.every_eighth(1)
@pytest.mark.quick_cases(r"\[0\]")
@pytest.mark.parametrize("first", range(0, 500, 25))
def test_documents_are_those_of_the_splits_and_those_counted(first, tmp_path, tokenizer):
    for seed in range(first, first + 25):
        (tmp_path / str(seed)).mkdir()
        hold_to_the_law(seed, tmp_path / str(seed), tokenizer)
