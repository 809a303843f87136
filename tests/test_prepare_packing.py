"""Packing: every token of every document exactly once and in order, whatever the documents."""

import datasets
import numpy as np
import pytest
import torch
from conftest import prepare
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from fabric_llm.data.batches import Batches
from fabric_llm.data.dataset import concatenate, open_dataset
from fabric_llm.plan.data_plan import require_alike
from fabric_llm.prepare import rows as packing
from fabric_llm.prepare.rows import best_fit, pack, repeated
from fabric_llm.prepare.summary import summary

EOS = 0


def packed(documents, context):
    tokens, lengths = np.concatenate(documents).astype(np.uint16), np.array([*map(len, documents)])
    rows = []
    done = pack(tokens, lengths, context, EOS, lambda some: rows.append(some.copy()))
    return np.concatenate(rows), done


lengths = st.lists(st.integers(2, 60), min_size=1, max_size=60)


@settings(max_examples=200, deadline=None)
@given(lengths, st.integers(2, 24), st.integers(1, 20))
def test_best_fit_keeps_every_token_once_and_in_order(lengths, context, window):
    first, documents = 1, []
    for length in lengths:  # every token is another
        documents.append([*range(first, first + length - 1), EOS])
        first += length - 1
    packing.WINDOW_DOCUMENTS = window
    try:
        rows, done = packed(documents, context)
    finally:
        packing.WINDOW_DOCUMENTS = 2**20
    # EOS of a text that fills its rows
    alone = sum(length > context and length % context == 1 for length in lengths)
    assert done["dropped_tokens"] == alone
    assert rows.shape == (done["rows"], context)
    assert done["padding_tokens"] == rows.size - sum(lengths) + alone
    assert done["documents_cut"] == sum(length > context for length in lengths)
    place = {rows[row, at]: (row, at) for row, at in zip(*np.nonzero(rows != EOS))}
    assert len(place) == sum(lengths) - len(lengths) == (rows != EOS).sum()
    assert (rows == EOS).sum() == len(lengths) - alone + done["padding_tokens"]
    # What passes for padding is padding, and whatever isn't is predicted by the token before it,
    # but for the first of a row.
    assert ((rows[:, 1:] == EOS) & (rows[:, :-1] == EOS)).sum() == done["padding_tokens"]
    for document in documents:
        body = document[:-1]
        places = [place[token] for token in body]
        follows = [(row, at + 1) for row, at in places]
        cuts = [n for n in range(1, len(body)) if places[n] != follows[n - 1]]
        assert cuts == list(range(context, len(body), context))  # only whole rows are cut off
        row, at = place[body[-1]]
        end = rows[row, at + 1] if at + 1 < context else EOS
        assert end == EOS


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 16), min_size=1, max_size=80))
def test_best_fit_is_that_of_the_paper(lengths):
    """The same as by trying all rows for each item, the longest first."""
    row, place, count = best_fit(np.array(lengths), 16)
    used = []
    for item in sorted(range(len(lengths)), key=lambda item: -lengths[item]):
        fitting = [room for room in used if room + lengths[item] <= 16]
        if fitting:
            used.remove(max(fitting))
        used.append(max(fitting, default=0) + lengths[item])
    assert count == len(used)
    filled = []
    for r in range(count):
        inside = sorted((place[i], lengths[i]) for i in np.flatnonzero(row == r))
        ends = np.cumsum([length for _, length in inside])
        assert [start for start, _ in inside] == [0, *ends[:-1]]
        filled.append(ends[-1])
    assert sorted(used) == sorted(filled)


def test_usual_lengths_leave_less_than_one_percent():
    some = np.random.default_rng(0).lognormal(6, 1.2, 20_000).astype(int).clip(2)
    rows, done = packed([np.r_[np.ones(n - 1), EOS] for n in some], 512)
    assert done["padding_tokens"] < 0.01 * rows.size


def test_repeated_documents_are_all_but_the_first():
    generator = np.random.default_rng(1)
    kinds = generator.bytes(16 * 20)
    chosen = generator.integers(0, 20, 100)
    found = repeated(np.frombuffer(kinds, "<u8").reshape(20, 2)[chosen])
    assert found.tolist() == [n in chosen[:at] for at, n in enumerate(chosen)]


# --------------------------------------------------------------------------- the whole way


@pytest.fixture
def corpus(tmp_path):
    generator = np.random.default_rng(2)
    (tmp_path / "in").mkdir()
    for number in range(120):
        words = generator.integers(97, 123, (int(generator.lognormal(2.5, 1)) + 1, 5))
        text = b" ".join(word.tobytes() for word in words.astype(np.uint8))
        (tmp_path / "in" / f"{number:03d}.txt").write_bytes(text)
    return tmp_path / "in"


def made(corpus, output, **changes):
    given = {"train_tokenizer": 300, "context_length": 64, "validation_fraction": 0.1}
    return prepare(input=[corpus], output=output, **{**given, "packing": "best_fit", **changes})


def test_a_dataset_packed_by_best_fit_says_what_it_holds(corpus, tmp_path):
    manifest = made(corpus, tmp_path / "out")
    assert manifest["packing"] == "best_fit" and manifest["packed"] is True
    loaded = datasets.load_from_disk(tmp_path / "out")
    for name, split in manifest["splits"].items():
        rows = np.array(loaded[name]["input_ids"])
        ends = rows == manifest["eos_token_id"]
        padding = ends[:, 1:] & ends[:, :-1]
        assert rows.shape == (split["rows"], 64)
        assert split["tokens"] + split["padding_tokens"] - split["dropped_tokens"] == rows.size
        assert padding.sum() == split["padding_tokens"]
        documents = split["documents"] - split["dropped_tokens"]
        assert ends.sum() == documents + split["padding_tokens"]
        assert split["row_use_percent"] == round(100 * (1 - split["padding_tokens"] / rows.size), 3)
    line = summary(manifest).splitlines()[0]
    assert f"({manifest['splits']['train']['row_use_percent']} % of them text, " in line


@pytest.mark.parametrize("context", [2, 32])
def test_an_end_that_nothing_predicts_is_dropped_and_counted(corpus, tmp_path, context):
    manifest = made(corpus, tmp_path / "out", context_length=context)
    dataset = open_dataset(tmp_path / "out")
    for name, split in manifest["splits"].items():
        rows = getattr(dataset, name)
        labels = rows[np.arange(len(rows))]["labels"]
        assert (labels == -100).sum() == split["padding_tokens"]
        ends = (labels[:, 1:] == manifest["eos_token_id"]).sum()  # each is a target
        assert ends == split["documents"] - split["dropped_tokens"]
        assert (labels[:, 0] != manifest["eos_token_id"]).all()
    assert manifest["splits"]["train"]["dropped_tokens"] > 0
    assert "that fill their rows without EOS)" in summary(manifest).splitlines()[0]


def test_lengths_that_leave_padding_are_said(tmp_path):
    path = tmp_path / "a.txt"
    texts = [f"{number:03d}abcdefghijklmnopqrstuvw" * 2 for number in range(120)]
    path.write_text("\n\n".join(texts))
    manifest = made(path, tmp_path / "out", train_tokenizer=257, context_length=80)
    train = manifest["splits"]["train"]
    assert f"{train['row_use_percent']} % of them text" in summary(manifest)
    assert train["row_use_percent"] < 80 and train["rows"] == train["documents"]


def whole(rows, document_end):
    """All rows as one batch."""
    numbers = np.arange(len(rows))
    [batch] = Batches(rows, 0, len(rows), 1, picked=numbers, document_end=document_end).at(0)
    return batch


@pytest.mark.parametrize("apart", [True, False])
def test_padding_is_no_target_and_belongs_to_the_document_before(corpus, tmp_path, apart):
    eos = made(corpus, tmp_path / "out")["eos_token_id"]
    dataset = open_dataset(tmp_path / "out")
    batch = whole(dataset.train, eos if apart else None)
    ids, labels = batch["input_ids"], batch["labels"]
    padding = torch.zeros_like(ids, dtype=torch.bool)
    padding[:, 1:] = (ids[:, 1:] == eos) & (ids[:, :-1] == eos)
    assert padding.any() and (labels[padding] == -100).all()
    begins = torch.zeros_like(padding)
    begins[:, 1:] = (ids[:, :-1] == eos) & (ids[:, 1:] != eos)
    rest = ~padding & ~begins if apart else ~padding
    assert torch.equal(labels[rest], ids[rest]) and ids.dtype == labels.dtype == torch.int64
    if apart:
        assert ((batch["position_ids"] == 0) == (begins | (torch.arange(64) == 0))).all()
        assert len(batch["document_ends"]) == int(begins.sum()) + len(ids) + 1
    assert set(dataset.train[[0, 1]]) == {"input_ids", "labels"} and len(dataset.fingerprint) == 64


def test_both_packings_go_together_in_a_mixture(corpus, tmp_path):
    made(corpus, tmp_path / "padded")
    given = {"train_tokenizer": None, "tokenizer": tmp_path / "padded" / "tokenizer"}
    made(corpus, tmp_path / "plain", packing="concat", **given)
    padded, plain = (open_dataset(tmp_path / name) for name in ("padded", "plain"))
    require_alike(padded, plain, "--data_mix", masks_documents=True)
    for sources in ((padded, plain), (plain, padded)):
        eos = padded.manifest["eos_token_id"]
        batch, first = whole(concatenate(sources).train, eos), 0
        for source in sources:
            one = whole(source.train, eos)
            for name in ("input_ids", "labels", "position_ids"):
                assert torch.equal(batch[name][first : first + len(source.train)], one[name]), name
            first += len(source.train)
        assert first == len(batch["input_ids"])


@pytest.fixture
def repeating(corpus):
    """The corpus, with three of its 120 texts once more."""
    for number in (3, 5, 7):
        (corpus / f"again-{number}.txt").write_bytes((corpus / f"{number:03d}.txt").read_bytes())
    return corpus


def total(manifest, name):
    return sum(split[name] for split in manifest["splits"].values())


def test_repeated_documents_are_dropped_and_counted(repeating, tmp_path):
    plain = made(repeating, tmp_path / "a", packing="concat")
    once = made(repeating, tmp_path / "b", packing="concat", deduplicate="exact")
    assert once["duplicates"]["documents"] == 3 and plain["duplicates"]["documents"] == 0
    assert (total(plain, "documents"), total(once, "documents")) == (123, 120)
    assert total(plain, "tokens") - total(once, "tokens") == once["duplicates"]["tokens"] > 0
    assert "repeated   3 documents, " in summary(once)


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_short_documents_are_left_out_and_counted(repeating, tmp_path, packing):
    whole = made(repeating, tmp_path / "a", packing=packing)
    tokenizer = Tokenizer.from_file(str(tmp_path / "a" / "tokenizer" / "tokenizer.json"))
    texts = [path.read_text() for path in repeating.iterdir()]
    sizes = np.array([len(tokenizer.encode(text).ids) + 1 for text in texts])
    assert sizes.sum() == total(whole, "tokens")
    shortest = int(np.median(sizes))
    given = {"packing": packing, "min_document_tokens": shortest}
    long = made(repeating, tmp_path / "b", **given)
    assert total(long, "documents") == (sizes >= shortest).sum()
    assert total(long, "tokens") == sizes[sizes >= shortest].sum()
    short = long["skipped"]["short"]
    assert short == 123 - total(long, "documents")
    assert long["duplicates"] == {"documents": 0, "tokens": 0}
    assert f"too short  {short} documents of fewer than {shortest} tokens" in summary(long)
    once = made(repeating, tmp_path / "c", deduplicate="exact", **given)
    left_out = once["skipped"]["short"] + once["duplicates"]["documents"]
    assert total(once, "documents") + left_out == 123
    with pytest.raises(ValueError, match="123 with fewer than 1000000 tokens left out"):
        made(repeating, tmp_path / "d", packing=packing, min_document_tokens=10**6)
