"""Raw text to packed rows: what goes in comes out, counted, or an error says why not."""

import gzip
import hashlib
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import datasets
import huggingface_hub
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import prepare
from hypothesis import given, settings
from hypothesis import strategies as st
from test_prepare_reading import documents_in
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast

from fabric_llm.prepare import prepare as prepare_module
from fabric_llm.prepare import rows as rows_module
from fabric_llm.prepare.corpus import is_no_training_text
from fabric_llm.prepare.documents import DRAWN, NOT_UTF8, BadRecord, Part, read_part
from fabric_llm.prepare.summary import summary
from fabric_llm.prepare.tokenizer import (
    END_OF_TEXT,
    convention,
    packing_tokenizer,
    train_byte_level_bpe,
)

STANDARD_LIBRARY = Path(os.__file__).parent
REPOSITORY = Path(__file__).parents[1]
CONTEXT_LENGTH = 16


# --- a corpus and its tokenizers -----------------------------------------------------


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """24 documents: short modules of the standard library, and the awkward ones."""
    found = []
    for path in sorted(STANDARD_LIBRARY.glob("*.py")):
        if 200 < path.stat().st_size < 6000:
            found.append(path.read_bytes().decode("utf-8"))
    awkward = ["naïve Ünïcödé \U0001f600\r\n\tend ", "x", "  leading and trailing  \n\n"]
    return [*found[:20], *awkward, "\x00 control \x7f"]


@pytest.fixture(scope="module")
def bpe(tmp_path_factory, texts) -> str:
    """A byte-level BPE without BOS, like GPT-2's."""
    folder = tmp_path_factory.mktemp("bpe")
    train_byte_level_bpe(texts, vocab_size=600).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def bos_bpe(tmp_path_factory, texts) -> str:
    """A byte-level BPE that puts <s> before each text, like Llama's."""
    backend = train_byte_level_bpe(texts, vocab_size=600).backend_tokenizer
    backend.add_special_tokens(["<s>", "</s>"])
    return save_tokenizer(tmp_path_factory.mktemp("bos_bpe"), backend, template="<s> $A")


def save_tokenizer(
    folder: Path, backend: Tokenizer, template: str | None = None, bos="<s>", eos="</s>"
) -> str:
    if template is not None:
        special = [(token, backend.token_to_id(token)) for token in {bos, eos}]
        backend.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=special
        )
    PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=bos, eos_token=eos).save_pretrained(
        folder
    )
    return str(folder)


def write_texts(folder: Path, texts: list[str]) -> Path:
    folder.mkdir(parents=True)
    for number, text in enumerate(texts):
        (folder / f"{number:03d}.txt").write_bytes(text.encode())
    return folder


def write_lines(path: Path, texts: list[str], field: str = "text") -> Path:
    path.write_text("".join(json.dumps({field: text}) + "\n" for text in texts))
    return path


@pytest.fixture
def make(tmp_path, bpe):
    """prepare(), with what a test does not care about filled in."""

    def make(*inputs, **changes):
        arguments = dict(
            output=tmp_path / "out", context_length=CONTEXT_LENGTH, validation_fraction=0.3
        )
        if "train_tokenizer" not in changes:
            arguments["tokenizer"] = bpe
        return prepare(input=list(inputs), **{**arguments, **changes})

    return make


def text_hash(text: str) -> np.uint64:
    return np.frombuffer(hashlib.blake2b(text.encode(), digest_size=16).digest(), "<u8")[0]


def document_hash(seed: int, text: str) -> float:
    return float(rows_module.document_hashes(seed, np.array([text_hash(text)]))[0])


def seed_where(condition) -> int:
    return next(seed for seed in range(1000) if condition(seed))


def tokens_of(output: Path, split: str) -> list[int]:
    return [token for row in datasets.load_from_disk(output)[split]["input_ids"] for token in row]


def documents_of(output: Path, split: str) -> list[str]:
    """The texts of a split, decoded from its rows; the last may be cut short."""
    tokenizer = AutoTokenizer.from_pretrained(output / "tokenizer")
    found = [[]]
    for token in tokens_of(output, split):
        if token == tokenizer.eos_token_id:
            found.append([])
        else:
            found[-1].append(token)
    return [tokenizer.decode(ids, skip_special_tokens=True) for ids in found]


def of_split(split: str, texts: list[str], seed: int = 1234, fraction: float = 0.3) -> list[str]:
    inside = split == "validation"
    return [text for text in texts if (document_hash(seed, text) < fraction) == inside]


def assert_holds(output: Path, texts: list[str], seed: int = 1234, fraction: float = 0.3) -> None:
    """The splits at `output` hold `texts`, each in its split, in order."""
    for split in ("train", "validation"):
        expected = of_split(split, texts, seed, fraction)
        *whole, cut = documents_of(output, split)
        assert whole == expected[: len(whole)]
        # What is missing is the one unfilled row: less than context_length tokens.
        missing = "".join(expected[len(whole) :])
        assert missing.startswith(cut.rstrip("\ufffd"))
        assert len(whole) >= len(expected) - CONTEXT_LENGTH


# --- the rows ------------------------------------------------------------------------


def assert_rows_of(kind: str, output: Path) -> None:
    loaded = datasets.load_from_disk(output)
    assert isinstance(loaded, datasets.DatasetDict) and set(loaded) == {"train", "validation"}
    row = datasets.List(datasets.Value(kind), length=CONTEXT_LENGTH)
    stored = pa.list_(getattr(pa, kind)(), CONTEXT_LENGTH)
    for split in loaded.values():
        assert split.features == {"input_ids": row}
        assert split.data.schema.field("input_ids").type == stored
        assert len(split[0]["input_ids"]) == CONTEXT_LENGTH


def test_a_vocabulary_that_needs_it_gets_4_bytes_a_token(make, tmp_path):
    words = {"<s>": 0, "</s>": 1, "<unk>": 2}
    words |= {f"w{number}": number for number in range(3, 70_000)}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = save_tokenizer(tmp_path / "tokenizer", backend)
    texts = [f"w{number} w69999 w65536" for number in range(65_500, 65_540)]
    folder = write_texts(tmp_path / "in", texts)
    manifest = make(folder, tokenizer=tokenizer)
    assert manifest["dtype"] == "int32" and manifest["max_token_id"] == 69_999
    assert_rows_of("int32", tmp_path / "out")
    assert tokens_of(tmp_path / "out", "train")[1:4] == [69_999, 65_536, 1]


def test_every_token_is_in_a_row_or_counted_as_dropped(make, tmp_path, texts, bpe):
    manifest = make(write_texts(tmp_path / "in", texts))
    assert manifest["dtype"] == "uint16"
    assert_rows_of("uint16", tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(bpe)
    counted, said = 0, summary(manifest)
    for name, split in manifest["splits"].items():
        assert split["tokens"] == split["rows"] * CONTEXT_LENGTH + split["dropped_tokens"]
        assert 0 <= split["dropped_tokens"] < CONTEXT_LENGTH
        assert split["rows"] == len(datasets.load_from_disk(tmp_path / "out")[name])
        counted += split["tokens"]
        assert f"{split['documents']} documents" in said
        assert f"{split['rows']:,} rows of {CONTEXT_LENGTH}" in said
    assert counted == sum(len(tokenizer(text)["input_ids"]) + 1 for text in texts)
    assert documents_in(manifest) == len(texts)
    assert said.endswith(f"written to {tmp_path / 'out'}")
    assert "/tokenizer\n" not in said, "it is where it was given"
    few = 0 < manifest["splits"]["validation"]["documents"] < 10
    assert few == ("raise --validation_fraction" in said)


@pytest.mark.parametrize(
    "template, bos, document",
    [
        ("$A </s>", "<s>", "a {eos}"),  # T5's way: its EOS is not doubled
        ("<s> $A </s>", "<s>", "{bos} a {eos}"),
        ("</s> $A", "</s>", "a {eos}"),  # OPT's way: BOS is EOS, and one of the two stays
    ],
)
def test_no_convention_doubles_the_eos(make, tmp_path, texts, template, bos, document):
    backend = train_byte_level_bpe(texts, vocab_size=300).backend_tokenizer
    backend.add_special_tokens(["<s>", "</s>"])
    a = backend.token_to_id("a")
    tokenizer = save_tokenizer(tmp_path / "tokenizer", backend, template, bos=bos)
    seed = seed_where(lambda seed: document_hash(seed, "0") < 0.3 <= document_hash(seed, "a"))
    folder = write_texts(tmp_path / "in", ["a"] * 8 + ["0"] * 2)
    manifest = make(folder, tokenizer=tokenizer, context_length=2, seed=seed)
    ids = {"a": a, "{bos}": manifest["bos_token_id"], "{eos}": manifest["eos_token_id"]}
    expected = [ids[part] for part in document.split()]
    tokens = tokens_of(tmp_path / "out", "train")
    assert tokens == (expected * 8)[: len(tokens)]


@pytest.mark.parametrize(
    "family", ["gpt2", "gemma3_text", "qwen3", "gpt_neox", "opt", "llama", "mistral", "mt5"]
)
def test_a_folder_of_a_model_alone_has_no_tokenizer(family, tmp_path):
    """transformers makes one of the special tokens for most of them."""
    AutoConfig.for_model(family).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="is a folder without a tokenizer that can be read"):
        packing_tokenizer(str(tmp_path))


@pytest.mark.parametrize("padding", [{}, {"length": 64}, {"pad_to_multiple_of": 8}])
@pytest.mark.parametrize("longest", [None, 1, 2])
def test_padding_and_truncation_of_a_tokenizer_are_no_convention(padding, longest):
    backend = Tokenizer(models.BPE({letter: number for number, letter in enumerate("ACGT")}, []))
    backend.add_special_tokens(["<end>", "<begin>", "<pad>"])
    backend.post_processor = processors.TemplateProcessing(
        single="<begin> $A <end>", special_tokens=[("<begin>", 5), ("<end>", 4)]
    )
    if padding:
        backend.enable_padding(pad_id=6, pad_token="<pad>", **padding)
    if longest:
        backend.enable_truncation(longest + 1)
    before = backend.to_str()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")
    found = convention(backend, tokenizer)
    assert (found["before"], found["after"]) == ([5], [4])
    assert backend.to_str() == before


def test_saved_tokenizer_gives_the_tokens_of_the_rows(make, tmp_path, texts, bos_bpe):
    make(write_texts(tmp_path / "in", texts), tokenizer=bos_bpe)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out" / "tokenizer")
    stream = []
    for text in of_split("train", texts):
        stream += tokenizer(text)["input_ids"] + [tokenizer.eos_token_id]
    assert stream[0] == tokenizer.bos_token_id
    tokens = tokens_of(tmp_path / "out", "train")
    assert tokens == stream[: len(tokens)]


@pytest.mark.parametrize("which", ["bpe", "bos_bpe"])
def test_text_that_spells_a_special_token_stays_text(make, tmp_path, request, which):
    spelled = ["</s> a", f"{END_OF_TEXT}", f"a{END_OF_TEXT}b <s>x</s>", f"end{END_OF_TEXT}"] * 6
    seed = seed_where(lambda seed: len(of_split("validation", spelled[:4], seed)) == 1)
    tokenizer = request.getfixturevalue(which)
    make(write_texts(tmp_path / "in", spelled), tokenizer=tokenizer, context_length=2, seed=seed)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out" / "tokenizer")
    for split in ("train", "validation"):
        expected, tokens = of_split(split, spelled, seed), tokens_of(tmp_path / "out", split)
        body = [token for token in tokens if token not in tokenizer.all_special_ids]
        assert "".join(expected).startswith(tokenizer.decode(body))
        assert len(documents_of(tmp_path / "out", split)) >= len(expected)


def test_spelling_that_the_model_itself_takes_for_eos_is_an_error(make, tmp_path):
    # A WordLevel (or Unigram) vocabulary finds </s> in text without any special handling.
    words = {"<unk>": 0, "</s>": 1, "<s>": 2, "a": 3}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = save_tokenizer(tmp_path / "tokenizer", backend)
    folder = write_texts(tmp_path / "in", ["a a", "a </s> a"])
    said = r"001\.txt holds text that this tokenizer turns into .* </s>: take it out"
    with pytest.raises(ValueError, match=said):
        make(folder, tokenizer=tokenizer, context_length=2, on_error="stop")
    write_texts(tmp_path / "more", ["a a", "a a a a"])
    manifest = make(folder, tmp_path / "more", tokenizer=tokenizer, context_length=2)
    assert manifest["skipped"]["bad"] == 1
    assert "001.txt holds text" in manifest["skipped"]["bad_records"][0]
    assert documents_in(manifest) == 3


def test_dropout_truncation_and_padding_of_a_tokenizer_are_not_obeyed(make, tmp_path, texts, bpe):
    folder = write_texts(tmp_path / "in", texts)
    backend = Tokenizer.from_file(f"{bpe}/tokenizer.json")
    backend.model.dropout = 0.5
    backend.enable_truncation(5)
    backend.enable_padding(length=7)
    tokenizer = save_tokenizer(tmp_path / "changed", backend, bos=END_OF_TEXT, eos=END_OF_TEXT)
    changed = make(folder, output=tmp_path / "a", tokenizer=tokenizer)
    assert changed["splits"] == make(folder, output=tmp_path / "b")["splits"]


def test_nothing_is_printed_where_stderr_is_no_terminal(make, tmp_path, texts, capfd):
    make(write_texts(tmp_path / "in", [text * 20 for text in texts]))
    assert capfd.readouterr() == ("", "")


# --- the splits ----------------------------------------------------------------------


def test_of_much_text_a_tokenizer_is_trained_on_a_part(make, tmp_path, texts, monkeypatch):
    """The library counts pairs in 32 bits: one that comes more often than 2**31 times is lost."""
    folder, trained = write_texts(tmp_path / "in", texts), []
    size = sum(file.stat().st_size for file in folder.iterdir())
    monkeypatch.setattr(prepare_module, "MAX_TRAINED_BYTES", size // 3 + 1)
    train = prepare_module.train_byte_level_bpe

    def recorded(some, **more):
        trained.extend(some)
        return train(trained, **more)

    monkeypatch.setattr(prepare_module, "train_byte_level_bpe", recorded)
    manifest = make(folder, train_tokenizer=400)
    assert trained == texts[::3] and "one text of 3" in manifest["notes"][0]
    assert "one text of 3" in summary(manifest)
    assert_holds(tmp_path / "out", texts)


def test_split_does_not_depend_on_the_batches(make, tmp_path, texts, monkeypatch):
    folder = write_texts(tmp_path / "in", texts)
    whole = make(folder, output=tmp_path / "a")
    monkeypatch.setattr("fabric_llm.prepare.encoding.BATCH_DOCUMENTS", 3)
    monkeypatch.setattr("fabric_llm.prepare.encoding.BATCH_CHARACTERS", 500)
    monkeypatch.setattr("fabric_llm.prepare.rows.COPY_TOKENS", 7)
    assert make(folder, output=tmp_path / "b")["splits"] == whole["splits"]


@pytest.mark.quick_cases(r"concat")
@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_a_huge_document_stays_in_train(make, tmp_path, texts, packing):
    some = [f"{at} {text * (400 if at == 30 else 1)}" for at, text in enumerate(texts * 9)]
    seed = seed_where(lambda seed: document_hash(seed, some[30]) < 0.01)
    path = write_lines(tmp_path / "a.jsonl", some)
    manifest = make(path, seed=seed, validation_fraction=0.05, packing=packing)
    tokens = {name: split["tokens"] for name, split in manifest["splits"].items()}
    assert 0 < tokens["validation"] <= 0.1 * sum(tokens.values())
    assert documents_in(manifest) == len(texts) * 9


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.one_of(st.integers(2, 50), st.integers(2, 10**6)), min_size=2, max_size=60),
    st.floats(1e-6, 0.9),
    st.integers(0, 99),
)
def test_validation_never_has_much_more_than_its_fraction(lengths, fraction, seed):
    goes, repeated = np.full(len(lengths), DRAWN), np.zeros(len(lengths), bool)
    texts = np.array([text_hash(str(index)) for index in range(len(lengths))])
    inside = rows_module.drawn(np.array(lengths), texts, goes, repeated, seed, fraction)
    drawn = rows_module.document_hashes(seed, texts) < fraction
    assert 0 < inside.sum() < len(lengths)
    assert (inside & ~drawn).sum() <= 1  # the one that moves where a split would be empty
    most = max(2 * fraction, min(2 / len(lengths), 0.5))
    assert np.array(lengths)[inside].sum() <= most * sum(lengths)


def test_validation_fraction_is_kept_on_the_average():
    share = np.mean([document_hash(1234, str(index)) < 0.05 for index in range(20_000)])
    assert share == pytest.approx(0.05, abs=0.005)  # three standard deviations


# --- inputs --------------------------------------------------------------------------


def test_json_lines(make, tmp_path, texts):
    path = write_lines(tmp_path / "a.jsonl", texts, field="body")
    (tmp_path / "out").mkdir()  # an empty folder is used
    path.write_text(path.read_text() + "\n  \n")  # blank lines are no documents
    assert make(path, text_field="body")["skipped"]["empty"] == 0
    assert_holds(tmp_path / "out", texts)


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())]
)
def test_parquet(make, tmp_path, texts, kind):
    column = pa.array([*texts, None, ""]).cast(kind)
    table = pa.table({"n": range(len(column)), "text": column})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=5)
    manifest = make(tmp_path / "a.parquet")
    assert_holds(tmp_path / "out", texts)
    assert manifest["skipped"]["empty"] == 2


def test_dataset_folder(make, tmp_path, texts):
    columns = {"n": range(len(texts) + 1), "text": [*texts, None]}
    datasets.Dataset.from_dict(columns).save_to_disk(tmp_path / "in")
    assert make(tmp_path / "in")["skipped"]["empty"] == 1
    assert_holds(tmp_path / "out", texts)


def save_splits(folder: Path, **parts: list[str]) -> Path:
    parts = {name: datasets.Dataset.from_dict({"text": part}) for name, part in parts.items()}
    datasets.DatasetDict(parts).save_to_disk(folder)
    return folder


@pytest.mark.parametrize("name", ["validation", "valid", "dev"])
@pytest.mark.parametrize("fraction", [0.3, 0])
def test_a_dataset_keeps_its_own_validation_split_and_its_test_split_is_left_out(
    make, tmp_path, texts, name, fraction
):
    splits = {"train": texts[:10], "test": texts[10:14], name: texts[14:]}
    folder = save_splits(tmp_path / "in", **splits)
    manifest = make(folder, validation_fraction=fraction, context_length=2)
    assert "".join(documents_of(tmp_path / "out", "train")) == "".join(texts[:10])
    assert "".join(documents_of(tmp_path / "out", "validation")) == "".join(texts[14:])
    said = summary(manifest)
    assert f"{folder} [{name}] is kept for validation" in said
    assert f"{folder} [test] is left out" in said


def test_splits_that_are_not_meant_for_training_are_left_out_and_said(make, tmp_path, texts):
    names = ["test", "test_sft", "eval", "devtest", "validation_matched", "Test-2"]
    for name in names:
        splits = {"train_sft": texts[:12], "train_gen": texts[12:20], name: ["left out"] * 3}
        folder = save_splits(tmp_path / name, **splits)
        manifest = make(folder, context_length=2, output=tmp_path / f"out-{name}")
        assert_holds(tmp_path / f"out-{name}", texts[:20])
        assert manifest["skipped"]["splits"] == {f"{folder} [{name}]": 3}
        assert f"{folder} [{name}] is left out: 3 rows" in summary(manifest)
    names = ["train", "train_sft", "en", "tested_code", "evaluator", "developers", "rows"]
    assert not any(map(is_no_training_text, names))


@pytest.mark.parametrize("split", ["test", "validation"])
def test_a_dataset_without_a_split_to_train_on_says_how_to_take_it(make, tmp_path, texts, split):
    folder = save_splits(tmp_path / "in", **{split: texts})
    said = rf"in has no split to train on, only '{split}': if .* name the folder of this split alone"
    with pytest.raises(ValueError, match=said):
        make(folder)
    make(folder / split)
    assert_holds(tmp_path / "out", texts)


def test_a_dataset_below_an_input_is_named(make, tmp_path, texts):
    """Its JSON files aren't text, and its rows would be lost."""
    save_splits(tmp_path / "in" / "of mine", train=texts)
    (tmp_path / "in" / "a.txt").write_text("\n\n".join(texts))
    with pytest.raises(ValueError, match="of mine is a dataset: .* with --exclude 'of mine'$"):
        make(tmp_path / "in")
    make(tmp_path / "in", exclude=["of mine"])


def both_splits(output: Path) -> list[set[str]]:
    return [{*documents_of(output, name)} - {""} for name in ("train", "validation")]


def test_copies_go_where_a_text_is_kept_and_what_a_dataset_has_in_both_is_said(
    make, tmp_path, texts
):
    with_own = save_splits(tmp_path / "a", train=texts[:8], validation=texts[6:12])
    others = [f"document number {number} of a corpus" for number in range(60)]
    folder = write_texts(tmp_path / "b", [*texts[8:12], *texts[:6], *others])
    manifest = make(with_own, folder, context_length=2)
    assert manifest["splits"]["validation"]["documents"] >= 6 + 4
    train, validation = both_splits(tmp_path / "out")
    assert train & validation == {*texts[6:8]}
    assert {*texts[6:12]} <= validation and {*texts[:8]} <= train
    assert "2 documents of validation are in a split that is trained on, too" in summary(manifest)


def test_few_texts_of_many_copies_make_two_splits(make, tmp_path):
    some = [f"document {number} " * (20 + number) for number in range(7)]
    for count in (7, 2):
        path = write_lines(tmp_path / f"{count}.jsonl", some[:count] * 50)
        manifest = make(path, output=tmp_path / f"out-{count}", validation_fraction=0.01)
        documents = [split["documents"] for split in manifest["splits"].values()]
        assert documents == [50 * (count - 1), 50]


def test_one_more_file_draws_no_other_document_anew(make, tmp_path):
    some = [f"document number {number} of a corpus" for number in range(300)]
    path = write_lines(tmp_path / "b.jsonl", some)
    more = write_lines(tmp_path / "a.jsonl", [f"and {number} more of it" for number in range(7)])
    make(path, context_length=2)
    make(more, path, context_length=2, output=tmp_path / "with-more")
    for name in ("train", "validation"):
        before, after = (documents_of(tmp_path / folder, name) for folder in ("out", "with-more"))
        assert [text for text in after if "document" in text] == [text for text in before if text]


def test_what_a_dataset_without_validation_gives_is_drawn_beside_one_that_has_it(
    make, tmp_path, texts
):
    def drawn_with(seed):
        return of_split("validation", texts[9:], seed)

    most = 0.3 * len("".join(texts[9:]))
    seed = seed_where(lambda seed: 0 < len("".join(drawn_with(seed))) < most)
    with_own = save_splits(tmp_path / "a", train=texts[:6], validation=texts[6:9])
    manifest = make(with_own, write_texts(tmp_path / "b", texts[9:]), context_length=2, seed=seed)
    assert manifest["splits"]["validation"]["documents"] == 3 + len(drawn_with(seed))


@pytest.mark.parametrize("columns_known", [True, False])
def test_streamed_rows(texts, columns_known, monkeypatch):
    # What `load_dataset(name, streaming=True)` returns; some streams do not say their columns.
    if columns_known:
        columns = {"text": texts, "n": range(len(texts))}
        rows = datasets.Dataset.from_dict(columns).to_iterable_dataset()
    else:
        rows = datasets.IterableDataset.from_generator(lambda: ({"text": text} for text in texts))
        assert rows.column_names is None
    monkeypatch.setattr(
        "fabric_llm.prepare.documents.load_splits", lambda kind, name, revision: {"train": rows}
    )
    part = Part("org/name", "hub", split="train")
    assert list(read_part(part, "text")) == [(n, text) for n, text in enumerate(texts)]
    if columns_known:
        said = r'^org/name \[train\].* has no field "body" \(fields: text'
        with pytest.raises(ValueError, match=said):
            list(read_part(part, "body"))
    else:
        for record in read_part(part, "body"):
            assert isinstance(record, BadRecord)
            assert 'has no field "body" (fields: text)' in record.message


def test_several_inputs_are_read_in_the_order_given(make, tmp_path, texts):
    last = write_lines(tmp_path / "a.jsonl", texts[12:])
    first = write_texts(tmp_path / "z", texts[:12])
    manifest = make(first, str(last))
    assert manifest["inputs"] == [str(first), str(last)]
    assert_holds(tmp_path / "out", texts)


def test_pattern_and_exclude_choose_the_files_of_a_folder(make, tmp_path):
    names = "z/y.py b.py a.py tests/c.py k/x.py deep/tests/d.py deep/e.py c/q.py notes.txt"
    for name in names.split():
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_text(f"# {name}\n" * 20)
    manifest = make(tmp_path / "in", pattern=["*.py"], exclude=["tests", "a.py,b.py"], seed=1)
    assert "--exclude a.py,b.py: nothing in the folders has this name" in summary(manifest)
    read = [str(Path(file["path"]).relative_to(tmp_path / "in")) for file in manifest["files"]]
    assert read == ["a.py", "b.py", "c/q.py", "deep/e.py", "k/x.py", "z/y.py"]


def test_file_named_outright_is_read_whatever_its_name(make, tmp_path):
    for name in ("a.py", "b"):
        (tmp_path / name).write_text(f"print('hello {name}')\n" * 10)
    assert make(tmp_path / "a.py", tmp_path / "b")["files_total"] == 2


def test_output_inside_an_input_folder_is_not_read(make, tmp_path, texts):
    folder = write_texts(tmp_path / "in", texts)
    first = make(folder, output=folder / "out", pattern=["*.txt", "*.json"])
    second = make(folder, output=folder / "out", pattern=["*.txt", "*.json"], overwrite=True)
    assert second == first


def test_hidden_files_and_folders_are_read_only_where_they_are_named(make, tmp_path, texts):
    folder = write_texts(tmp_path / "in", texts)
    for name in (".git/a.txt", "deep/.ipynb_checkpoints/b.txt", ".c.txt", "deep/d.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(texts[0].encode())
    manifest = make(folder)
    assert manifest["files_total"] == len(texts) + 1
    assert manifest["skipped"]["files_by_suffix"] == {"hidden folders": 2, "hidden files": 1}
    said = "2 hidden folders, 1 hidden files; choose files with --pattern, or name what is meant with --input"
    assert said in summary(manifest)
    manifest = make(folder, output=tmp_path / "b", pattern=["*.txt", ".*.txt"])
    assert manifest["files_total"] == len(texts) + 2
    assert manifest["skipped"]["files_by_suffix"] == {"hidden folders": 2}
    manifest = make(folder, folder / ".git", folder / ".c.txt", output=tmp_path / "c")
    assert manifest["files_total"] == len(texts) + 3
    assert manifest["skipped"]["files_by_suffix"] == {"hidden folders": 1}
    said = r"no file in .*deep/ matches b\.txt: choose others with --pattern"
    with pytest.raises(ValueError, match=said):
        make(f"{folder}/deep/", output=tmp_path / "d", exclude=["deep"], pattern=["b.txt"])
    (folder / "deep/.ipynb_checkpoints").rename(tmp_path / "elsewhere")
    (folder / ".c.txt").unlink()
    manifest = make(folder, folder / ".git", output=tmp_path / "c2")
    assert manifest["skipped"]["files_by_suffix"] == {}
    (tmp_path / "in2").mkdir()
    (folder / ".git").rename(tmp_path / "in2" / ".git")
    with pytest.raises(ValueError, match="its hidden folders were left out: name .* --input"):
        make(tmp_path / "in2", output=tmp_path / "e")


def test_links_to_folders_are_followed_and_what_is_reached_twice_is_read_once(
    make, tmp_path, texts
):
    folder = write_texts(tmp_path / "in", texts[:8])
    write_texts(tmp_path / "elsewhere", texts[8:16])
    write_texts(tmp_path / "more", texts[16:])
    (folder / "a").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    (folder / "b").symlink_to(tmp_path / "elsewhere", target_is_directory=True)  # again
    # what it lies in: `elsewhere` and itself again, and `more`
    (folder / "c").symlink_to(tmp_path, target_is_directory=True)
    (folder / "d.txt").symlink_to("000.txt")
    os.link(folder / "001.txt", folder / "e.txt")
    manifest = make(folder, exclude=["out"])
    assert documents_in(manifest) == len(texts) == manifest["files_total"]
    assert manifest["skipped"]["files_twice"] == 5 == 2 + 1 + 2
    assert "5 links or names lead to what is read already" in summary(manifest)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "x.txt").symlink_to(folder / "003.txt")
    manifest = make(folder, tmp_path / "other", exclude=["c"], output=tmp_path / "two")
    assert manifest["files_total"] == 16 and manifest["skipped"]["files_twice"] == 1 + 2 + 1


# --- documents that are left out -----------------------------------------------------


def test_documents_that_are_not_accounted_for_end_the_preparation(
    make, tmp_path, texts, monkeypatch
):
    def forgetful(*given, row):
        found = rows_module.split_documents(*given, row)
        found.splits["train"][np.flatnonzero(found.splits["train"])[:2]] = False
        return found

    monkeypatch.setattr("fabric_llm.prepare.prepare.split_documents", forgetful)
    said = f"{len(texts)} documents were read, and {len(texts) - 2} are accounted for: {{'train': "
    with pytest.raises(AssertionError, match=said):
        make(write_texts(tmp_path / "in", texts))
    assert not (tmp_path / "out").exists()


def test_more_suffixes_than_are_named_are_counted_together(make, tmp_path, texts):
    folder = write_texts(tmp_path / "in", texts)
    for number in range(15):
        (folder / f"a.{'x' * (number + 1)}").write_bytes(b"")
    suffixes = make(folder)["skipped"]["files_by_suffix"]
    assert sum(suffixes.values()) == 15 and suffixes["of other suffixes"] == 5


def test_empty_documents_are_skipped_and_counted(make, tmp_path, texts):
    manifest = make(write_texts(tmp_path / "in", ["", *texts[:12], " \n\t", *texts[12:]]))
    assert manifest["skipped"]["empty"] == 2 and manifest["skipped"]["bad"] == 0
    assert_holds(tmp_path / "out", texts)


def test_files_that_are_not_utf8_are_skipped_and_listed(make, tmp_path, texts):
    folder = write_texts(tmp_path / "in", texts)
    for number in range(25):
        (folder / f"0000-{number:02d}.txt").write_bytes("café".encode("latin-1"))
    manifest = make(folder)
    assert manifest["skipped"]["bad"] == 25
    bad = [f"{folder}/0000-{number:02d}.txt {NOT_UTF8}" for number in range(20)]
    assert manifest["skipped"]["bad_records"] == bad
    assert "25 bad records" in summary(manifest) and "0000-19.txt" in summary(manifest)
    assert_holds(tmp_path / "out", texts)


def test_a_row_of_parquet_that_is_not_utf8_is_skipped(make, tmp_path, texts):
    # pyarrow writes, and reads, text that is not UTF-8 without a word
    data = pa.array([text.encode() for text in texts] + [b"caf\xe9"])
    column = pa.Array.from_buffers(pa.string(), len(data), data.buffers())
    pq.write_table(pa.table({"text": column}), tmp_path / "b.parquet")
    [bad] = make(tmp_path / "b.parquet")["skipped"]["bad_records"]
    assert bad.startswith(f"{tmp_path}/b.parquet row {len(texts)} is not valid UTF-8")
    assert_holds(tmp_path / "out", texts)


# --- tokenizer -----------------------------------------------------------------------


def test_trained_tokenizer_returns_any_text():
    tokenizer = train_byte_level_bpe(["only ascii here"], vocab_size=300)
    text = "".join(map(chr, [*range(0xD800), *range(0xE000, 0x11000), 0x1F600, 0x10FFFF]))
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_trained_tokenizer_has_one_special_token_and_opens_again(make, tmp_path, texts):
    manifest = make(write_texts(tmp_path / "in", texts), train_tokenizer=500)
    assert f"500 tokens, in {tmp_path / 'out'}/tokenizer\n" in summary(manifest)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out" / "tokenizer")
    assert tokenizer.eos_token == tokenizer.bos_token == tokenizer.pad_token == END_OF_TEXT
    assert tokenizer.all_special_ids == [0]
    assert manifest["tokenizer"] == "trained:500"
    assert manifest["vocab_size"] == len(tokenizer) == 500 and manifest["notes"] == []
    assert manifest["eos_token_id"] == manifest["bos_token_id"] == 0
    assert_holds(tmp_path / "out", texts)


def test_a_text_that_is_too_small_for_a_tokenizer_is_told(make, tmp_path, texts):
    manifest = make(write_texts(tmp_path / "in", texts[:40]), train_tokenizer=50_000)
    count = manifest["vocab_size"]
    assert manifest["notes"] == [
        f"the tokenizer has {count:,} tokens, not 50,000: this text is too small for more"
    ]


def test_rows_that_are_longer_than_the_model_are_told(make, tmp_path, texts):
    """Its config.json says so where the tokenizer beside it doesn't."""
    files = write_texts(tmp_path / "in", texts)
    make(files, train_tokenizer=300)
    model = tmp_path / "out" / "tokenizer"
    notes = []
    for longest in (None, 16):
        if longest is not None:
            config = {"model_type": "gpt2", "n_positions": longest}
            (model / "config.json").write_text(json.dumps(config))
        made = make(files, tokenizer=str(model), context_length=32, output=str(tmp_path / "next"),
                    overwrite=True)
        notes.append(made["notes"])
    assert notes == [
        [], [f"rows hold 32 tokens, but {model} says that its model takes 16 (--context_length)"]
    ]


@pytest.mark.longer
def test_tokenizer_training_is_deterministic_over_processes(tmp_path):
    code = """
import sys; from pathlib import Path
from fabric_llm.prepare.tokenizer import train_byte_level_bpe
texts = [Path(path).read_text() for path in sys.argv[2:]]
train_byte_level_bpe(texts, vocab_size=1500).save_pretrained(sys.argv[1])
"""
    names = ("ast.py", "typing.py", "argparse.py", "inspect.py")
    paths = [str(STANDARD_LIBRARY / name) for name in names]
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "RAYON_NUM_THREADS": seed}
        command = [sys.executable, "-c", code, str(tmp_path / seed), *paths]
        subprocess.run(command, check=True, cwd=REPOSITORY, env=environment)
    one, two = ((tmp_path / seed / "tokenizer.json").read_bytes() for seed in ("1", "2"))
    assert one == two


# --- manifest and summary ------------------------------------------------------------


def test_manifest_says_what_was_done(make, tmp_path, texts, bpe):
    folder = write_texts(tmp_path / "in", texts)
    manifest = make(folder, seed=7)
    assert json.loads((tmp_path / "out" / "manifest.json").read_text()) == manifest
    assert manifest["format"] == 1 and manifest["packed"] is True
    assert manifest["context_length"] == CONTEXT_LENGTH and manifest["seed"] == 7
    assert manifest["validation_fraction"] == 0.3 and manifest["text_field"] == "text"
    assert manifest["tokenizer"] == bpe and len(manifest["tokenizer_sha256"]) == 64
    assert manifest["files_total"] == len(texts) == len(manifest["files"])
    assert manifest["bytes_total"] == sum(len(text.encode()) for text in texts)
    seen = {split: tokens_of(tmp_path / "out", split) for split in ("train", "validation")}
    for split, tokens in seen.items():
        digest = hashlib.sha256(np.array(tokens, dtype=manifest["dtype"]).tobytes()).hexdigest()
        assert manifest["splits"][split]["sha256"] == digest
    assert max(seen["train"] + seen["validation"]) <= manifest["max_token_id"]
    assert manifest["max_token_id"] < manifest["vocab_size"]


def test_list_of_files_is_capped_but_their_number_is_not(make, tmp_path, texts, monkeypatch):
    monkeypatch.setattr("fabric_llm.prepare.prepare.MAX_LISTED_FILES", 3)
    manifest = make(write_texts(tmp_path / "in", texts))
    assert len(manifest["files"]) == 3 and manifest["files_total"] == len(texts)


# --- all or nothing ------------------------------------------------------------------


def test_failed_overwrite_keeps_the_old_dataset(make, tmp_path, texts):
    folder = write_texts(tmp_path / "in", texts)
    make(folder)
    with pytest.raises(ValueError, match="do not fill one row"):
        make(folder, context_length=10**6, overwrite=True)
    assert_holds(tmp_path / "out", texts)
    assert sorted(os.listdir(tmp_path)) == ["in", "out"]


def test_overwrite_replaces_a_dataset_also_behind_a_link(make, tmp_path, texts):
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "disk" / "mine")
    folder = write_texts(tmp_path / "in", texts)
    make(folder)
    make(folder, seed=2, overwrite=True)
    assert (tmp_path / "out").is_symlink() and os.listdir(tmp_path / "disk") == ["mine"]
    assert_holds(tmp_path / "out", texts, seed=2)


# --- errors --------------------------------------------------------------------------


@pytest.fixture
def no_hub(monkeypatch):
    """As with HF_HUB_OFFLINE=1, which both libraries read when they are imported."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


@pytest.fixture(scope="module")
def mistaken(tmp_path_factory, bpe):
    """A folder of inputs, each of which has something wrong, but for `in`."""
    folder = tmp_path_factory.mktemp("mistaken")
    write_texts(folder / "in", ["one text", "two texts", "three of them"] * 4)
    write_texts(folder / "blank", ["", " "])
    for name, columns in (("body", {"body": ["a"], "id": [1]}), ("numbers", {"text": [1, 2]})):
        pq.write_table(pa.table(columns), folder / f"{name}.parquet")
        datasets.Dataset.from_dict(columns).save_to_disk(folder / name)
    datasets.Dataset.from_dict({"text": ["a"]}).save_to_disk(folder / "no_info")
    datasets.Dataset.from_dict({"input_ids": [[1, 2]]}).save_to_disk(folder / "prepared")
    (folder / "no_info" / "dataset_info.json").unlink()
    (folder / "none.parquet").write_bytes(b"no table")
    backend = Tokenizer.from_file(f"{bpe}/tokenizer.json")
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(folder / "no_eos")
    for name in ("cut.jsonl.gz", "cut.txt.gz"):
        data = gzip.compress(random.Random(0).randbytes(1000).hex().encode())
        (folder / name).write_bytes(data[:500])
    return folder


NO_TOKENIZER = r"^tokenizer \S+ is neither a folder here nor one [^\n]*$"
NO_TEXT = "no document with text in --input: 2 empty documents and 0 that"
NOT_ON_THE_HUB = "^input {} is neither a file or folder here nor a dataset .*: .*Hub"
NO_PATH = "^input {} is neither a file or folder here nor .* from the hub$"  # nobody asks the hub
# --input, other arguments, and what is said
MISTAKES = [
    (
        "in", {"train_tokenizer": 300, "tokenizer": "x"},
        "give --tokenizer, that of your model, or --train_tokenizer, one of them",
    ),
    ("body.parquet", {}, r'body.parquet has no field "text" \(fields: body, id\): .* --text_f'),
    ("body", {}, r'body \[rows\] has no field "text" \(fields: body, id\)'),
    ("prepared", {}, r"prepared \[rows\] holds tokens, not text: .* for --train_data_dir"),
    ("numbers.parquet", {}, r'numbers\.parquet holds int64, not strings, in its column "text"'),
    ("numbers", {}, r'numbers \[rows\] row 0 holds int, not a string, in its column "text"'),
    ("cut.jsonl.gz in", {"on_error": "stop"}, "cut.jsonl.gz is not a complete gzip file: "),
    ("cut.txt.gz in", {"on_error": "stop"}, "cut.txt.gz is not a complete gzip file: "),
    ("no_info", {}, "no_info is not a complete dataset folder: "),
    ("none.parquet", {}, r"none\.parquet is not a parquet file: "),
    ("in", {"pattern": ["*.py"]}, r"no file in in matches \*\.py: choose others with --pattern"),
    ("in", {"pattern": ["body.parquet"]}, "in the place of a pattern without quotes: --pattern '\\*.parquet'"),
    ("in in/000.txt", {}, "000.txt comes in twice, by the inputs in and in/000.txt: name it once"),
    ("blank", {}, NO_TEXT),
    ("blank", {"train_tokenizer": 300}, NO_TEXT),
    ("in", {"output": "in/000.txt", "overwrite": True}, "000.txt is a file: name a folder"),
    ("in", {"output": "body"}, "body is a folder with other files than a prepared dataset"),
    ("in", {"output": "/"}, "is a mount point, which cannot be replaced: name a folder inside it"),
    ("in", {"output": "blank", "overwrite": True}, "blank is a folder with other files than a prepared dataset"),
    *((name, {}, NOT_ON_THE_HUB.format(name)) for name in ("no/corpus", "corpus", "org/a:config")),
    *(
        (name, {}, NO_PATH.format(name))
        for name in "./corpus /data/corpus a/b/c corpus/ ../x book.txt data/a.jsonl".split()
    ),
    ("in", {"tokenizer": "no-such/tokenizer"}, NO_TOKENIZER),
    ("in", {"tokenizer": "no_eos"}, "tokenizer no_eos has no EOS token to end documents with: set"),
    ("in", {"tokenizer": "in"}, "^tokenizer in is a folder without a tokenizer that can be read: put "),
    ("in", {"validation_fraction": 0}, "validation_fraction is 0, and no input has a validation"),
]


@pytest.mark.parametrize("given, changes, message", MISTAKES)
def test_a_mistake_is_named_and_leaves_nothing(
    make, mistaken, tmp_path, no_hub, monkeypatch, given, changes, message
):
    monkeypatch.chdir(mistaken)
    before = sorted(mistaken.rglob("*"))
    with pytest.raises(ValueError, match=message):
        make(*given.split(), **changes)
    assert sorted(mistaken.rglob("*")) == before and os.listdir(tmp_path) == []


def test_single_text_file_without_a_blank_line_cannot_be_split(make, tmp_path):
    (tmp_path / "a.txt").write_text("".join(f"one long {number} book " for number in range(1000)))
    said = r"of 1 document, .* at least two documents.* --document_separator '..' makes one of each line"
    with pytest.raises(ValueError, match=said):
        make(tmp_path / "a.txt")
    assert os.listdir(tmp_path) == ["a.txt"]
    manifest = make(tmp_path / "a.txt", document_separator="book ")
    assert documents_in(manifest) == 1000


@pytest.mark.parametrize(
    "lengths, fraction, split, advice",
    [
        ([300, 1], 1e-9, "validation", "a larger --validation_fraction"),  # more would be over half
        ([300] * 20 + [1], 1 - 1e-9, "train", "a smaller --validation_fraction"),
    ],
)
def test_split_that_fills_no_row(make, tmp_path, lengths, fraction, split, advice):
    texts = [(chr(97 + number) * length) for number, length in enumerate(lengths)]
    path = write_lines(tmp_path / "a.jsonl", texts)

    def moves(seed):
        """The text that is nearest to the fraction, and moves into the empty split."""
        return min(texts, key=lambda text: abs(document_hash(seed, text) - fraction))

    seed = seed_where(lambda seed: len(moves(seed)) == 1)
    with pytest.raises(ValueError) as raised:
        make(path, seed=seed, validation_fraction=fraction)
    assert str(raised.value).startswith(
        f"the {split} split has 2 tokens in 1 of {len(lengths)} documents, which do not fill one "
        f"row of context_length {CONTEXT_LENGTH}: choose a smaller --context_length or {advice}, "
        "or give more text"
    )
    assert os.listdir(tmp_path) == ["a.jsonl"]


def test_single_document_cannot_be_split(make, tmp_path):
    path = write_lines(tmp_path / "a.jsonl", ["a" * 1000])
    seed = seed_where(lambda seed: document_hash(seed, "a" * 1000) >= 0.3)
    said = r"of 1 document, which do not fill .* --document_separator '\\n' makes one of each line"
    for packing in ("concat", "best_fit"):
        with pytest.raises(ValueError, match=said):
            make(path, seed=seed, packing=packing)


def test_validation_fills_a_row_where_there_is_text_for_it():
    """Of a few short texts one alone wouldn't: the next ones move as well, but not half of all."""
    lengths = np.full(40, 14)
    texts = np.arange(40, dtype=np.uint64) * np.uint64(2**40 + 7)
    drawn_anew, kept = np.full(40, rows_module.DRAWN), np.zeros(40, bool)
    for row, documents in ((0, 1), (14, 1), (16, 2), (100, 8), (10_000, 20)):
        inside = rows_module.drawn(lengths, texts, drawn_anew, kept, 1, 1e-9, row)
        assert inside.sum() == documents, row
    kept_apart = np.where(np.arange(40) < 1, rows_module.TO_VALIDATION, rows_module.DRAWN)
    assert rows_module.drawn(lengths, texts, kept_apart, kept, 1, 1e-9, 100).sum() == 1
