"""What prepare_data.py reads: kinds of files, compressed or not, and records that can't be read."""

import bz2
import csv
import gzip
import io
import json
import lzma
import os
import warnings

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from conftest import prepare
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

import prepare_data
from fabric_llm.prepare import corpus, documents, encoding, inputs
from fabric_llm.prepare.documents import BLANK_LINES, BadRecord, Part, read_part, where
from fabric_llm.prepare.summary import summary
from fabric_llm.prepare.tokenizer import train_byte_level_bpe

TEXTS = [
    "naïve Ünïcödé \U0001f600\r\n\tend", 'quoted "x", and a comma', "x", "two\nlines of text",
    " spaces ",
] * 4


def as_lines(texts):
    return "".join(json.dumps({"id": 1, "text": text}) + "\n" for text in texts).encode()


def as_csv(texts, delimiter=","):
    out = io.StringIO()
    writer = csv.writer(out, delimiter=delimiter)
    writer.writerows([["id", "text"], *(["1", text] for text in texts)])
    return out.getvalue().encode()


def as_parquet(texts):
    out = io.BytesIO()
    pq.write_table(pa.table({"id": range(len(texts)), "text": texts}), out, row_group_size=3)
    return out.getvalue()


MAKE = {
    ".jsonl": as_lines,
    ".ndjson": as_lines,
    ".json": lambda texts: json.dumps([{"text": text} for text in texts], indent=1).encode(),
    ".csv": as_csv,
    ".tsv": lambda texts: as_csv(texts, "\t"),
    ".parquet": as_parquet,
    ".txt": lambda texts: b"\n---\n".join(text.encode() for text in texts),
}
PACK = {
    "": bytes,
    ".gz": gzip.compress,
    # two frames
    ".zst": lambda data: zstandard.compress(data[:50]) + zstandard.compress(data[50:]),
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
}


def documents_in(manifest):
    return sum(split["documents"] for split in manifest["splits"].values())


def kind_of(path):
    return inputs.KINDS[inputs.suffix(str(path))]


def read(path, text_field="text", **more):
    """(texts that are read, (place and message) of the bad records)"""
    part = Part(str(path), kind_of(path), **more)
    texts, bad = [], []
    for record in read_part(part, text_field):
        if isinstance(record, BadRecord):
            said = f"{where(part, record.number)} {record.message}"
            bad.append(said.replace(f"{path.parent}/", ""))
        else:
            texts.append(record[1])
    return texts, bad


def parts_of(path, output):
    """The parts of the pieces that an input is divided into."""
    found = inputs.find_sources([path], pattern=["*"], output=output)
    return [part for piece in corpus.plan(found, None) for part in piece.parts]


def random_texts(count, length):
    """Texts that compression hardly shortens."""
    letters = [np.random.default_rng(n).integers(97, 123, length) for n in range(count)]
    return ["".join(map(chr, some)) for some in letters]


def write(path, data):
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_bytes(data)
    return path


# --------------------------------------------------------------------------- kinds of files


@pytest.mark.parametrize(
    "kind, packed",
    [(kind, packed) for kind in MAKE for packed in PACK if not packed or kind != ".parquet"],
)
def test_every_kind_plain_and_compressed(tmp_path, kind, packed):
    path = write(tmp_path / f"a{kind}{packed}", PACK[packed](MAKE[kind](TEXTS)))
    more = {"separator": inputs.separator("\\n---\\n")} if kind == ".txt" else {}
    assert read(path, **more) == (TEXTS, [])


@pytest.mark.parametrize("packed", PACK)
@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_compression_is_told_by_the_first_bytes_and_not_by_the_name(tmp_path, name, packed):
    assert read(write(tmp_path / name, PACK[packed](as_lines(TEXTS)))) == (TEXTS, [])


@pytest.mark.parametrize(
    "content",
    [
        as_lines(TEXTS),
        b"\n \n" + as_lines(TEXTS),
        b"\xef\xbb\xbf" + MAKE[".json"](TEXTS),
        json.dumps([{"text": text} for text in TEXTS]).encode(),
    ],
    ids=["lines", "blank lines first", "byte order mark", "one line"],
)
def test_what_a_json_file_can_hold(tmp_path, content):
    assert read(write(tmp_path / "a.json", content)) == (TEXTS, [])


# ------------------------------------------------------------------------- text into documents


@pytest.mark.parametrize("block", [1, 7, 2**20])
def test_blank_lines_divide_a_text(tmp_path, monkeypatch, block):
    monkeypatch.setattr(documents, "BLOCK_BYTES", block)
    content = "\ufeffone\nstill one\n\ntwo\r\n\r\nthree\n \t\n\n\n  four é\n".encode()
    texts, bad = read(write(tmp_path / "a.txt", content), separator=BLANK_LINES)
    assert (texts, bad) == (["one\nstill one", "two", "three", "  four é\n"], [])
    assert read(tmp_path / "a.txt") == ([content.decode("utf-8-sig")], [])


@pytest.mark.parametrize(
    "given, escaped", [("\\n---\\n", "\n---\n"), ("<doc>", "<doc>"), ("a.c\\t\\\\", "a.c\t\\")]
)
@pytest.mark.parametrize("block", [3, 2**20])
def test_a_separator_is_taken_literally_but_for_escapes(
    tmp_path, monkeypatch, given, escaped, block
):
    monkeypatch.setattr(documents, "BLOCK_BYTES", block)
    path = write(tmp_path / "a.txt", escaped.join(["one", "axc", "é\n\nthree"]).encode())
    assert read(path, separator=inputs.separator(given)) == (["one", "axc", "é\n\nthree"], [])


@pytest.mark.parametrize("long", [b"", b"x " * 500])
def test_a_bad_document_of_a_text_is_named_by_its_place(tmp_path, monkeypatch, long):
    monkeypatch.setattr(documents, "BLOCK_BYTES", 64)
    monkeypatch.setattr(documents, "LONGEST_SEPARATOR", 10)
    path = write(tmp_path / "a.txt", b"one\n\ncaf" + long + b"\xe9\n\ntwo")
    said = f"a.txt byte 5 {documents.NOT_UTF8}"
    assert read(path, separator=BLANK_LINES) == (["one", "two"], [said])


def test_long_documents_are_encoded_in_sections_that_end_with_lines(tmp_path, monkeypatch):
    long = "".join(f"line {number} é\n" for number in range(100)) + "x" * 120
    tokenizer = train_byte_level_bpe([long, "short", "end"], vocab_size=300)
    whole = tokenizer(long)["input_ids"]
    monkeypatch.setattr(documents, "SECTION_CHARACTERS", 50)
    monkeypatch.setattr(documents, "BLOCK_BYTES", 64)
    monkeypatch.setattr(documents, "LONGEST_SEPARATOR", 10)
    path = write(tmp_path / "a.txt", f"short\n\n{long}\n\nend".encode())
    assert read(path, separator=BLANK_LINES) == (["short", long, "end"], [])
    sections = list(documents.sections(long))
    assert max(map(len, sections)) <= 50 and len(sections) > 20 and "".join(sections) == long
    assert sum(section.endswith("\n") for section in sections) > len(sections) - 8
    of_lines = write(tmp_path / "a.jsonl", as_lines(["short", long, "end"]))
    for source, separator in ((path, BLANK_LINES), (of_lines, None)):
        part = Part(str(source), kind_of(source), separator=separator)
        assert list(documents.texts([part], "text")) == ["short", *sections, "end"]
    [encoded] = encoding._encoded([long], tokenizer.backend_tokenizer)
    of_lines = len(tokenizer(long.rstrip("x"))["input_ids"])
    assert encoded.tolist()[:of_lines] == whole[:of_lines] and tokenizer.decode(encoded) == long
    assert len(encoded) < len(whole) + len(sections)


@pytest.mark.parametrize("kind", ["metaspace", "prepended", "stripped", "bytes"])
@pytest.mark.parametrize(
    "line", ["a line of words\n", "words without an end ", "  two  spaces \n\n"]
)
def test_sections_have_the_tokens_of_the_whole(monkeypatch, kind, line):
    """Also where a tokenizer puts a space before a text, or takes one away, and where a section
    ends in a word."""
    text = "".join(line.replace("e", "e" * (1 + number % 3)) for number in range(60))
    backend = Tokenizer(models.BPE())
    if kind == "metaspace":
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    elif kind == "bytes":
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    else:
        first = [normalizers.Strip()] if kind == "stripped" else []
        backend.normalizer = normalizers.Sequence(
            [*first, normalizers.Prepend("_"), normalizers.Replace(" ", "_")]
        )
        backend.pre_tokenizer = pre_tokenizers.Split("_", "merged_with_next")
    trainer = trainers.BpeTrainer(
        vocab_size=90, show_progress=False, initial_alphabet=sorted({*text, "_", "\u2581"})
    )
    backend.train_from_iterator([text[:300]], trainer)
    whole = backend.encode(text, add_special_tokens=False).ids
    monkeypatch.setattr(documents, "SECTION_CHARACTERS", 150)
    assert len(list(documents.sections(text))) > 4
    assert encoding._encoded([text], backend)[0].tolist() == whole


@pytest.mark.parametrize("encoding_of_file", ["utf-16-le", "utf-16-be", "utf-32-le"])
def test_other_encodings_without_a_mark_are_bad_also_in_ascii(tmp_path, encoding_of_file):
    path = write(tmp_path / "a.txt", "plain words\nof ASCII".encode(encoding_of_file))
    texts, bad = read(path)
    assert not texts and len(bad) == 1 and "convert it" in bad[0]
    nul = "one \0 NUL in a text"
    assert read(write(tmp_path / "b.txt", nul.encode())) == ([nul], [])


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("given", ["\\n---\\n", "\n---\n", "---\\n", "\\n\\n\\n"])
def test_a_separator_holds_whatever_ends_the_lines(tmp_path, given, end):
    between = given.replace("\\n", "\n").replace("\n", end)
    text = between.join(["one", "two", f"three{end}lines", "four"])
    path = write(tmp_path / "a.txt", text.encode())
    found, bad = read(path, separator=inputs.separator(given))
    texts = [text.replace("\r", "") for text in found]
    assert (texts, bad) == (["one", "two", "three\nlines", "four"], [])


@pytest.mark.parametrize("block", [16, 64, 2**20])
def test_a_document_of_a_text_that_is_too_long_to_be_held(tmp_path, monkeypatch, block):
    monkeypatch.setattr(documents, "BLOCK_BYTES", block)
    monkeypatch.setattr(documents, "LONGEST_SEPARATOR", 10)
    monkeypatch.setattr(documents, "RECORD_BYTES", 2**10)
    said = "is longer than 0 MiB: divide it with --document_separator"
    content = [b"one", b"x" * 3000, b"two", b"y" * 1024, b"z" * 1025]
    path = write(tmp_path / "a.txt", b"\n\n".join(content))
    texts, bad = read(path, separator=BLANK_LINES)
    assert texts == ["one", "two", "y" * 1024]
    assert bad == [f"a.txt byte 5 {said}", f"a.txt byte 4038 {said}"]
    assert read(path) == ([], [f"a.txt {said}"])


@pytest.mark.parametrize("kind", [".jsonl", ".txt"])
def test_ranges_of_a_file_give_the_documents_of_the_whole(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(corpus, "SMALL_PIECE_BYTES", 100)
    monkeypatch.setattr(documents, "BLOCK_BYTES", 16)
    content = "".join(f"{'w' * (number % 40)}.\n{number}\n\n\n" for number in range(100)).encode()
    texts = [f"{'w' * (number % 40)}.\n{number}" for number in range(100)]
    path = write(tmp_path / f"a{kind}", content if kind == ".txt" else as_lines(texts))
    parts = parts_of(path, tmp_path / "out")
    assert len(parts) > 10 and parts[0].start == 0 and parts[-1].end == path.stat().st_size
    assert [part.end for part in parts[:-1]] == [part.start for part in parts[1:]]
    assert [text for part in parts for _, text in read_part(part, "text") if text] == texts


def test_bad_lines_of_a_range_have_the_numbers_of_the_whole_file(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "SMALL_PIECE_BYTES", 100)
    lines = [json.dumps({"text": f"text {number}"}) for number in range(60)]
    lines[41] = '{"text": '
    path = write(tmp_path / "a.jsonl", "\n".join(lines).encode())
    parts = parts_of(path, tmp_path / "out")
    bad = [(part, r) for part in parts for r in read_part(part, "text") if isinstance(r, BadRecord)]
    [(part, record)] = bad
    assert part.start > 0 and where(part, record.number) == f"{path}:42"


def test_many_small_files_are_one_piece(tmp_path):
    for number in range(50):
        (tmp_path / f"{number:02d}.txt").write_text("x" * number)
    found = inputs.find_sources([tmp_path], pattern=["*.txt"], output=tmp_path / "out")
    [piece] = corpus.plan(found, None)
    assert len(piece.parts) == 50 and piece.bytes == sum(range(50))


def test_row_groups_of_a_large_table_are_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "SMALL_PIECE_BYTES", 2000)
    texts = random_texts(100, 90)
    path = write(tmp_path / "a.parquet", as_parquet(texts))
    parts = parts_of(path, tmp_path / "out")
    assert len(parts) > 3
    assert [text for part in parts for _, text in read_part(part, "text")] == texts
    assert next(read_part(parts[1], "text"))[0] == parts[1].start * 3  # rows keep their numbers


# ----------------------------------------------------------------------------- bad records


def test_bad_lines_are_named_and_the_others_read(tmp_path):
    lines = [b'{"text": "a"}', b'{"text": ', b'{"text": "caf\xe9"}', b'{"body": "b"}']
    lines += [b'{"text": null}', b"[1]", b'{"text": "z"}']
    texts, bad = read(write(tmp_path / "a.jsonl", b"\n".join(lines)))
    assert texts == ["a", "z"]
    assert bad[0].startswith("a.jsonl:2 is not valid JSON: ")
    assert bad[1:] == [
        f"a.jsonl:3 {documents.NOT_UTF8}",
        'a.jsonl:4 has no field "text" (fields: body): name the one with the text by '
        "--text_field; of several, write a column that joins them first",
        'a.jsonl:5 holds NoneType, not a string, in its field "text"',
        "a.jsonl:6 is not a JSON object but list",
    ]


def test_a_line_that_is_too_long_to_be_held(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "RECORD_BYTES", 2**20)
    path = write(tmp_path / "a.jsonl", as_lines(["a", "x" * 3 * 2**20, "z"]))
    assert read(path) == (["a", "z"], ["a.jsonl:2 is longer than 1 MiB"])


def test_bad_rows_of_csv(tmp_path):
    content = b'id,text\n1,a\n2\n3,"b"c\n4,caf\xe9\n5,"two\nlines"\n6,z,more\n7,z\n'
    texts, bad = read(write(tmp_path / "a.csv", content))
    assert texts == ["a", "two\nlines", "z"]
    assert [line.split(" ", 1)[0] for line in bad] == ["a.csv:3", "a.csv:4", "a.csv:5", "a.csv:8"]
    # A quotation mark that nothing ends takes one line.
    texts, bad = read(write(tmp_path / "b.csv", b'id,text\n1,a\n2,"b\n3,c\n4,d\n'))
    assert texts == ["a", "c", "d"] and [line.split(" ")[0] for line in bad] == ["b.csv:3"]


@pytest.mark.parametrize(
    ("head", "said"),
    [
        (b"id,body\n", r'no field "text" \(fields: id, body\)'),
        (b"", r'no field "text" \(fields: 1, a\)'),
        (b"text,text\n", '2 columns named "text": give each its own name'),
    ],
)
def test_csv_without_the_column(tmp_path, head, said):
    with pytest.raises(ValueError, match=rf"a\.csv has {said}"):
        read(write(tmp_path / "a.csv", head + b"1,a\n"))


@pytest.mark.parametrize("packed", [".gz", ".zst", ".bz2", ".xz"])
def test_of_a_truncated_archive_what_comes_before_its_end_is_read(tmp_path, packed):
    texts = random_texts(300, 3000)
    in_blocks = {".zst": zstandard.compress, ".bz2": lambda data: bz2.compress(data, 1)}
    data = in_blocks.get(packed, PACK[packed])(as_lines(texts))
    found, bad = read(write(tmp_path / f"a.jsonl{packed}", data[: len(data) * 3 // 4]))
    assert found == texts[: len(found)] and 0 < len(found) < 300
    assert len(bad) == 1 and f"a.jsonl{packed} is not a complete " in bad[0]


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
@pytest.mark.parametrize("packed", [".bz2", ".xz", ".gz"])
@pytest.mark.parametrize("between", [b"", b"\0" * 4, b"\0" * 12345 + b"\0" * 3])
def test_all_streams_of_an_archive_are_read(tmp_path, packed, name, between):
    """As `xz -dc`, `bzip2 -dc` and `gzip -dc` give them, with padding."""
    texts = [f"text {number}" for number in range(300)]
    data = as_lines(texts) if name == "a.jsonl" else "\n\n".join(texts).encode()
    third = len(data) // 3 + 1
    streams = [PACK[packed](data[at : at + third]) for at in range(0, len(data), third)]
    path = write(tmp_path / f"{name}{packed}", between.join([*streams, b""]))
    assert len(streams) == 3 and read(path, separator=BLANK_LINES) == (texts, [])


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.txt"])
@pytest.mark.parametrize("packed", [".bz2", ".xz", ".gz"])
@pytest.mark.parametrize("second", ["damaged", "other", "cut off"])
def test_what_comes_behind_a_damaged_stream_is_said_to_be_missing(tmp_path, packed, second, name):
    texts = [f"text {number}" for number in range(30)]
    separator = BLANK_LINES if name == "a.txt" else None
    data = "\n\n".join(texts).encode() if name == "a.txt" else MAKE[name[1:]](texts)
    half = data.index(b"text 15") + 9
    rest = PACK[packed](data[half:])
    seconds = {"damaged": b"\x01" + rest[1:], "other": b"no archive", "cut off": rest[:2]}
    path = write(tmp_path / f"{name}{packed}", PACK[packed](data[:half]) + seconds[second])
    found, bad = read(path, separator=separator)
    assert found == texts[: len(found)] and len(found) in (15, 16)
    assert len(bad) == 1 and f"{name}{packed} is not a complete " in bad[0]


@pytest.mark.parametrize("first", ["bzip2", "zstandard"])
def test_archives_that_begin_with_an_empty_stream(tmp_path, first):
    skipped = b"\x50\x2a\x4d\x18\x04\0\0\0abcd"  # a frame of pzstd
    data = {
        "bzip2": bz2.compress(b"") + bz2.compress(as_lines(TEXTS)),
        "zstandard": skipped + zstandard.compress(as_lines(TEXTS)),
    }
    assert read(write(tmp_path / "a.jsonl", data[first])) == (TEXTS, [])


RECORDS = [
    b'{"text": "plain"}',
    b'{"n": 1.5e3, "text": "numbers", "m": [1, -2, {"k": 3}]}',
    b'{"text": "half a pair \\ud83d\\u0041"}',
    b'{"text": "a pair \\ud83d\\ude00, \\u00e9 \\" ] } , \\\\"}',
    b'{"n": NaN, "m": -Infinity, "text": "no numbers"}',
    b'{"n": ' + b"7" * 4300 + b', "text": "4,300 digits"}',
    b'{"n": -' + b"7" * 50_000 + b', "text": "50,000 digits"}',
    b'{"text": ' + b"7" * 5000 + b"}",
    b'{"text": "caf\xe9"}',
    b'{"body": "caf\xe9", "text": "the other is bad"}',
    b'{"text": "a tab \t in it"}',
    '{"text": "日本語 é 🎉 \u2028"}'.encode(),
    b'{"text": "first", "text": "last"}',
    b'{"text": ""}',
    b'["no object"]',
    b"17",
    b'{"text": "the last"}',
]


@pytest.mark.parametrize("block", [1, 7, 100, 2**20])
@pytest.mark.parametrize(
    "around", [(b"[", b",", b"]"), (b"\xef\xbb\xbf \n[ ", b"\n\t,\r\n ", b" \n]\n ")]
)
def test_an_array_gives_the_documents_of_its_lines(tmp_path, monkeypatch, block, around):
    monkeypatch.setattr(documents, "BLOCK_BYTES", block)
    texts, bad = read(write(tmp_path / "a.jsonl", b"\n".join(RECORDS)))
    begin, between, end = around
    found, found_bad = read(write(tmp_path / "a.json", begin + between.join(RECORDS) + end))
    assert found == texts and len(texts) == 10 and "4,300 digits" in texts and "the last" in texts
    places = [int(line.split(":")[1].split(" ")[0]) for line in bad]
    reasons = [line.split(" ", 1)[1].split(":")[0] for line in bad]
    for line, place, reason in zip(found_bad, places, reasons, strict=True):
        assert line.split(":")[0] == f"a.json record {place} {reason}"


@pytest.mark.parametrize("behind", [b"x", b"{}", b'[{"text": "more"}]', b"\0"])
def test_what_stands_behind_an_array_is_said(tmp_path, behind):
    path = write(tmp_path / "a.json", MAKE[".json"](TEXTS) + b"\n" * 3 + behind)
    texts, [bad] = read(path)
    place = f"a.json record {len(TEXTS) + 1}"
    assert bad.startswith(f"{place} comes after the end of an array, and is not read")
    assert texts == TEXTS


ARRAY = json.dumps([{"text": f"text {n}"} for n in range(5)]).encode()


@pytest.mark.parametrize(
    "content, texts",
    [
        *((content, 0) for content in (b"[", b"[ ", b"[1,,2]")),
        (b'[{"text": "text 0"} {"text": "b"}]', 0),
        *((b'[{"text": "text 0"}' + end, 1) for end in (b",", b",]")),
        *((ARRAY[:cut], texts) for cut, texts in ((40, 2), (50, 2), (60, 3))),
    ],
)
def test_an_array_that_breaks_off_is_bad(tmp_path, content, texts):
    found, bad = read(write(tmp_path / "a.json", content))
    assert "is not valid JSON" in bad[-1] and bad[-1].endswith("what comes after it is not read")
    assert found == [f"text {n}" for n in range(texts)]


def test_an_array_is_read_in_bounded_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "BLOCK_BYTES", 1000)
    monkeypatch.setattr(documents, "RECORD_BYTES", 5000)
    sizes, match = [], documents._element
    monkeypatch.setattr(
        documents, "_element", lambda buffer, at: sizes.append(len(buffer)) or match(buffer, at)
    )
    texts = [f"{number} " + "x" * (number % 3000) for number in range(3000)]
    assert read(write(tmp_path / "a.json", MAKE[".json"](texts))) == (texts, [])
    assert max(sizes) < 12_000
    path = write(tmp_path / "b.json", MAKE[".json"](["a", "x" * 100_000, "z"]))
    texts, [bad] = read(path)
    assert texts == ["a"] and bad.endswith("what comes after it is not read")
    assert max(sizes) < 12_000


def test_rows_of_tsv_with_a_single_quote_stay_rows(tmp_path):
    texts = ['"hello', "plain", 'bye"', '"quoted"', "plain", '"the last', "plain"]
    lines = ["id\ttext", *(f"{number}\t{text}" for number, text in enumerate(texts))]
    expected = [text.replace('"quoted"', "quoted") for text in texts]
    for end in ("\n", "\r\n"):
        assert read(write(tmp_path / "a.tsv", (end.join(lines) + end).encode())) == (expected, [])
    of_programs = [f'{number}\tso\tit\n\tis, {number} and\n\n"so" on' for number in range(9)]
    assert read(write(tmp_path / "b.tsv", as_csv(of_programs, "\t"))) == (of_programs, [])


@pytest.mark.parametrize(
    "rows",
    [
        b'1,"he said \\"hi\\" to\nher, and left"\n2,plain\n',  # a fragment with two fields
        b'1,"first \\"\nsecond line, with comma\n"\n2,plain\n',  # and no invalid row before it
        b'1,"he said \\"hi\\" once"\n2,plain\n',
    ],
)
def test_a_csv_that_escapes_quotation_marks_by_a_backslash_is_refused(tmp_path, rows):
    """pandas takes fragments of its rows for rows, without a word."""
    said = r"a\.csv:\d is not a valid row: .* line 2 has a quotation"
    with pytest.raises(ValueError, match=said):
        read(write(tmp_path / "a.csv", b"id,text\n" + rows))


def test_a_backslash_before_a_quotation_mark_may_be_text(tmp_path):
    texts = ["C:\\dir\\", 'a \\"o" of TeX, and\n\\"u', "\\"]
    assert read(write(tmp_path / "a.csv", as_csv(texts))) == (texts, [])
    bad = as_csv(['\\"o and "u"']) + b'2,"b"c\n3,d\n'
    assert read(write(tmp_path / "b.csv", bad))[0] == ['\\"o and "u"', "d"]


@pytest.mark.parametrize("order", [1, -1])
def test_a_tsv_whose_quotation_marks_mean_two_things_is_refused(tmp_path, order):
    """Such as one with quoted fields of several lines, of which one has a tab in each line."""
    rows = ['1\t"first\nsecond\tline"\n', "2\tplain\n", '3\t"two\nlines"\n'][::order]
    said = r"a\.tsv: a quoted field in line \d has several lines, and those of one in line \d are"
    with pytest.raises(ValueError, match=said):
        read(write(tmp_path / "a.tsv", ("id\ttext\n" + "".join(rows)).encode()))


def test_a_damaged_row_group_takes_no_other_with_it(tmp_path):
    texts = random_texts(12, 900)
    table, out = pa.table({"text": texts}), io.BytesIO()
    pq.write_table(table, out, row_group_size=3, use_dictionary=False)
    place = pq.ParquetFile(out).metadata.row_group(1).column(0).data_page_offset
    data = bytearray(out.getvalue())
    data[place : place + 20] = b"\xff" * 20
    found, bad = read(write(tmp_path / "a.parquet", bytes(data)))
    assert found == texts[:3] + texts[6:]
    said = [f"a.parquet row {row} can't be read" for row in (3, 4, 5)]
    assert [line.split(":")[0] for line in bad] == said


# ------------------------------------------------------------------------------- the whole


@pytest.fixture
def make(tmp_path):
    def make(*paths, **changes):
        given = dict(train_tokenizer=300, context_length=8, validation_fraction=0.3)
        return prepare(input=list(paths), **{**given, "output": tmp_path / "o", **changes})

    return make


def test_a_folder_of_every_kind(tmp_path, make):
    folder = tmp_path / "in"
    for number, (kind, content) in enumerate(MAKE.items()):
        write(folder / f"{number}{kind}", content(TEXTS))
        if kind != ".parquet":
            write(folder / "below" / f"{number}{kind}.ZST", PACK[".zst"](content(TEXTS)))
    for name in ("a.pdf", "b.pdf", "c.png", "LICENSE"):
        write(folder / name, b"\xff")
    write(folder / "A.MD", b"text")
    manifest = make(folder)
    kinds = len(MAKE) - 2
    assert documents_in(manifest) == (2 * kinds + 1) * len(TEXTS) + 3
    assert manifest["skipped"]["files_by_suffix"] == {".pdf": 2, ".png": 1, "without a suffix": 1}
    said = "not read   2 .pdf, 1 without a suffix, 1 .png; choose files with --pattern"
    assert said in summary(manifest)


BOOK = "\n\n".join(f"paragraph {n} of a book" for n in range(20)).encode()


def test_a_single_text_file_is_split_at_blank_lines_and_the_summary_says_so(tmp_path, make):
    path = write(tmp_path / "a.txt", BOOK)
    manifest = make(path)
    assert documents_in(manifest) == 20
    said = f"note       {path} is split at blank lines; choose with --document_separator"
    assert said in summary(manifest)


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_a_large_text_without_a_blank_line_is_not_said_to_be_split(
    tmp_path, make, monkeypatch, name
):
    monkeypatch.setattr(corpus, "LONG_TEXT_BYTES", 100)
    content = b"one line and\nthe next\n" * 1000
    path = write(tmp_path / name, gzip.compress(content) if name.endswith("gz") else content)
    manifest = make(path, write(tmp_path / "b.jsonl", as_lines(TEXTS)))
    assert manifest["notes"] == [] and "split at blank lines" not in summary(manifest)


def test_large_texts_among_several_are_split_and_small_ones_not(tmp_path, make, monkeypatch):
    monkeypatch.setattr(corpus, "LONG_TEXT_BYTES", 300)
    large = write(tmp_path / "a.txt", BOOK)
    small = write(tmp_path / "b.txt", b"one\n\nand the same")
    manifest = make(large, small)
    assert documents_in(manifest) == 21
    assert [note.split(" ")[0] for note in manifest["notes"]] == [str(large)]
    manifest = make(large, small, output=tmp_path / "p", document_separator="\\n\\n")
    assert documents_in(manifest) == 22
    manifest = make(large, small, output=tmp_path / "q", document_separator="none")
    assert documents_in(manifest) == 2


def test_a_glob_that_the_shell_has_not_expanded(tmp_path, make):
    for name in ("b.jsonl", "a.jsonl", "c.json"):
        write(tmp_path / name, as_lines(TEXTS))
    manifest = make(f"{tmp_path}/*.jsonl")
    assert [os.path.basename(file["path"]) for file in manifest["files"]] == ["a.jsonl", "b.jsonl"]


NO_TEXT = "input .*{} is neither text in UTF-8 nor of a kind that is read"
NO_FIELDS = r"none of 2 records of .*bad\.jsonl can be read, such as .*bad\.jsonl:1 has no field"
CHAT, APPLY = b'{"%s": [{"role": "user", "content": "a"}]}', r"apply_chat_template\("
REFUSED = [  # a file that comes with a good one, other arguments, and what is said
    *(
        (name, b"PK\x03\x04\xff\xfe", {}, NO_TEXT.format(name))
        for name in ("a.zip", "a.tar.gz", "a.unknown")
    ),
    *(
        (name, b"<p>text", {}, f"{name} holds web pages: extract their text first, into .jsonl or")
        for name in ("a.html", "a.wet.gz")
    ),
    ("bad.jsonl", b'{"body": "a"}\n{"body": "b"}\n', {}, NO_FIELDS),
    ("bad.json", b'\n{\r\n  "text": "a"\n}\n{\n}', {}, "1 is a JSON object of several lines: .*jq"),
    *(
        ("chats.jsonl", CHAT % name, {}, f'has no field "text", but a chat in "{said}": .*{APPLY}')
        for name, said in ((b"messages", "messages"), (b"conversations", "conversations"))
    ),
    ("bad.csv", b"id\ttext\n1\ta\n", {}, r"seem to be separated by '\\t', where \.csv has commas"),
    ("bad.jsonl", b'{"text": "caf\xe9"}\n', {}, r"UTF-.* by iconv -f LATIN1"),
    *(
        (name, text.encode(code), more, f"{name} is {code}, not UTF-8: .* -f {code} -t")
        for name, text, more in (
            ("bad.jsonl", '{"text": "中文 café"}\n{"text": "中"}\n', {}),
            ("bad.csv", "text,id\n中文 café,1\n", {}),
            ("bad.json", '[{"text": "a"}]', {}),
            ("bad.md", "One text.\n\nAnother.", {"document_separator": "\n\n"}),
        )
        for code in ("UTF-16", "UTF-16LE", "UTF-16BE", "UTF-32", "UTF-32LE", "UTF-32BE")
    ),
    *(
        ("a.txt", b"x", {"document_separator": given}, "must have 1 to 1000 bytes of UTF-8, or")
        for given in ("", "x" * 1001, "\udce9")
    ),
]


@pytest.mark.parametrize("name, content, changes, message", REFUSED)
def test_what_cannot_be_read_is_refused(tmp_path, make, name, content, changes, message):
    good = write(tmp_path / "good.jsonl", as_lines(TEXTS))
    with pytest.raises(ValueError, match=message):
        make(good, write(tmp_path / name, content), **changes)


def test_all_files_of_a_piece_that_cannot_be_read_are_named_at_once(tmp_path, make):
    write(tmp_path / "in" / "good.jsonl", as_lines(TEXTS))
    for name in ("a.json", "b.json", "other/b.json", "c.jsonl"):
        write(tmp_path / "in" / name, b'{"body": "a"}\n')
    with pytest.raises(ValueError, match=r"nor any of 3 more files, .*--exclude (\w\.jsonl? ?){3}$"):
        make(tmp_path / "in")
    make(tmp_path / "in", exclude=["a.json", "b.json", "c.jsonl"])


def test_a_range_of_which_every_record_is_bad_is_an_error_where_it_has_many(
    tmp_path, make, monkeypatch
):
    monkeypatch.setattr(corpus, "SMALL_PIECE_BYTES", 100)
    good = write(tmp_path / "good.jsonl", as_lines(TEXTS))
    lines = as_lines(TEXTS).replace(b'"text"', b'"body"')
    mixed = write(tmp_path / "mixed.jsonl", lines + as_lines(TEXTS[:1]))
    assert make(good, mixed)["skipped"]["bad"] == 20
    monkeypatch.setattr(encoding, "MANY_RECORDS", 2)
    said = r"none of \d+ records of .*bad\.jsonl can be read, such as .*bad\.jsonl:1 has no field"
    with pytest.raises(ValueError, match=said):
        make(good, write(tmp_path / "bad.jsonl", lines), output=tmp_path / "p")


def test_web_pages_of_a_folder_are_counted_also_compressed(tmp_path, make):
    for name in ("a.html", "b.HTML.gz", "c.wet"):
        write(tmp_path / "in" / name, b"<p>text")
    with pytest.raises(ValueError, match="a.html holds web pages: extract their text first"):
        make(tmp_path / "in", pattern=["*.html"])
    write(tmp_path / "in" / "d.jsonl", GOOD)
    assert "2 .html, 1 .wet; choose files with --pattern" in summary(make(tmp_path / "in"))


def test_long_lines_in_a_row_are_skipped_and_counted(tmp_path, make, monkeypatch):
    monkeypatch.setattr(corpus, "SMALL_PIECE_BYTES", 500)
    monkeypatch.setattr(documents, "RECORD_BYTES", 1000)
    long = b'{"text": "' + b"long " * 300 + b'"}\n'
    path = write(tmp_path / "a.jsonl", as_lines(TEXTS) + 5 * long + as_lines(TEXTS))
    manifest = make(path)
    assert manifest["skipped"]["bad"] == 5
    assert "is longer than" in manifest["skipped"]["bad_records"][0]
    assert documents_in(manifest) == 2 * len(TEXTS)


def test_bad_records_are_counted_and_named(tmp_path, make):
    lines = b'{"text": \n{"text": 5}\n{"body": ""}\n' + as_lines(TEXTS)
    path = write(tmp_path / "a.jsonl", lines)
    manifest = make(path)
    assert manifest["skipped"]["bad"] == 3
    assert "0 empty documents, 3 bad records" in summary(manifest)
    places = [line.split(" ")[0] for line in manifest["skipped"]["bad_records"]]
    assert places == [f"{path}:{n}" for n in (1, 2, 3)]
    assert f"           {path}:2 holds int" in summary(manifest)
    with pytest.raises(ValueError, match=r"a\.jsonl:1 is not valid JSON"):
        make(path, output=tmp_path / "p", on_error="stop")


def test_what_is_no_file_is_named_as_what_it_is(tmp_path, make):
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "link.txt").symlink_to("gone.txt")
    (tmp_path / "link").symlink_to("pipe.txt")
    for path in (tmp_path / "pipe.txt", tmp_path / "link.txt", tmp_path / "link", "/dev/zero"):
        said = f"input {path} is a pipe, a socket, a device or a dead link: name a file"
        with pytest.raises(ValueError, match=said):
            make(path)
    write(tmp_path / "a.jsonl", GOOD)
    assert make(tmp_path)["skipped"]["files_by_suffix"] == {
        "pipe, socket, device or dead link": 2,
        "without a suffix": 1,
    }


def test_a_mistyped_input_is_answered_without_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "corpus" / "part1.jsonl", GOOD)
    for given, said in (
        ("corpsu", r"is neither .*\. Did you mean 'corpus'\?"),
        ("corpsu/", r"is neither .*\. Did you mean 'corpus'\?"),
        ("corpus/part.jsonl", r"is neither .*\. Did you mean 'corpus/part1.jsonl'\?"),
        ("corpus/books", "is neither a file or folder here nor"),
    ):
        with pytest.raises(ValueError, match=f"input {given} {said}"):
            parts_of(given, tmp_path / "o")
    for name in ("wikitext", "org/name"):  # which only the hub can say
        inputs.find_sources([name], pattern=["*"], output=tmp_path / "o")


NASTY = "\x1b[2J\x1b]0;owned\x07\nprepare_data.py: error: forged\r\u202e"
LONG = "k" * 10_000_000
GOOD = as_lines(TEXTS)
HOSTILE = {
    "key": lambda folder: write(folder / "a.jsonl", GOOD + json.dumps({NASTY: 1}).encode()),
    "long keys": lambda folder: write(
        folder / "a.jsonl", GOOD + 2 * (json.dumps({LONG: 1}).encode() + b"\n")
    ),
    "many keys": lambda folder: write(
        folder / "a.jsonl", GOOD + json.dumps(dict.fromkeys(map(str, range(99_999)))).encode()
    ),
    "broken": lambda folder: write(folder / "a.json", b'[{"text": "one"}, \x1b[31m' + b"x" * 10**6),
    "file": lambda folder: write(folder / f"{NASTY.replace('/', '')}.jsonl", GOOD + b"{bad\n"),
    "file not in UTF-8": lambda folder: write(folder / "a\udcff\x1b[31m.jsonl", GOOD + b"{bad\n"),
    "suffix": lambda folder: (
        write(folder / "a.jsonl", GOOD) and write(folder / "b.\x1b[31m\nforged", b"")
    ),
    "large text": lambda folder: write(folder / "\x1b[31m\nforged.txt", b"one\n\ntwo\n\n" * 20),
    "csv": lambda folder: write(folder / "a.csv", f'"{NASTY}",{LONG}\n1,2\n'.encode()),
    "csv without an end": lambda folder: write(folder / "a.csv", b'"a\x1b[31m"b,c\n1,2\n'),
}


@pytest.mark.quick_cases(r"skip-(?!long|many)")
@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("on_error", ["skip", "stop"])
def test_what_others_wrote_reaches_nobody_raw(tmp_path, capfd, kind, on_error):
    """Neither the terminal nor the manifest: names of files, keys and columns are escaped and
    cut."""
    (tmp_path / "in").mkdir()
    HOSTILE[kind](tmp_path / "in")
    words = f"--input {tmp_path}/in --output {tmp_path}/out "
    words += "--train_tokenizer 258 --context_length 8 --validation_fraction 0.3 --on_error "
    code = 0
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            prepare_data.main([*words.split(), on_error])
        except SystemExit as ended:
            code = ended.code
    out, err = capfd.readouterr()
    said = out + err + "".join(str(warning.message) for warning in warned)
    lines = [line for line in said.split("\n") if line]
    assert all(line.isprintable() for line in lines) and len(said) < 12_000
    assert not any(line.startswith(("forged", "prepare_data.py: error: forged")) for line in lines)
    if code:
        assert code == 2 and len(err.split("\n")) == 2
    else:
        assert (tmp_path / "out" / "manifest.json").stat().st_size < 20_000


@pytest.mark.parametrize(
    ("names", "noted"),
    [
        ("data/train-00-of-01.jsonl data/test-00-of-01.jsonl data/validation-00-of-01.jsonl", 2),
        ("train/a.jsonl test/a.jsonl", 1),
        ("training.jsonl test.jsonl", 0),
        ("train.md test.md", 0),  # text, of which a name says nothing
        ("test.jsonl more.jsonl", 0),
    ],
)
def test_files_that_are_named_as_splits_are_noted(tmp_path, names, noted):
    folder = tmp_path / "downloaded"
    for name in names.split():
        write(folder / name, as_lines([name]))
    patterns = inputs.DEFAULT_PATTERNS
    found = inputs.find_sources([folder], pattern=patterns, output=tmp_path / "out")
    corpus.plan(found, None)
    notes = [note for note in found.notes if "named as a split to measure with" in note]
    assert len(notes) == bool(noted) and (noted < 2 or " and 1 more is named" in notes[0])
