"""Documents that share 13 words in a row with an evaluation set are left out, counted and listed,
and nothing else changes."""

import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import unicodedata
from collections import Counter
from pathlib import Path

import datasets
import numpy as np
import pytest
import test_tasks
from conftest import prepare
from test_prepare_pieces import assert_same

import prepare_data
from fabric_llm.base import files
from fabric_llm.base.describing import describe
from fabric_llm.base.failpoints import VARIABLE
from fabric_llm.prepare import contamination, corpus
from fabric_llm.prepare.encoding import DOCUMENT
from fabric_llm.prepare.rows import split_documents
from fabric_llm.prepare.summary import summary
from fabric_llm.prepare.tokenizer import train_byte_level_bpe

LATIN = "the river Café NAÏVE don't x86 größe हिन्दी नमस्ते Ελλάδα мир 3.14 snake_case الكتاب"
WORDS = LATIN.split() + [f"w{number}" for number in range(300)]
SIGNS = [" ", " ", " ", ", ", "\n", ".\n\n", " — ", "; ", " (", ")\t", "... ", "/"]
CHARACTERS = "東京大学研究ひらがなカタカナ水火木金土日月人口手足目耳ไทยกขคงจฉชซ"
SPACELESS = ("CJK UNIFIED", "HIRAGANA", "KATAKANA", "THAI", "LAO ", "KHMER", "MYANMAR")


def words_of(text):
    """The words of a text, one character after the other."""
    found, word = [], ""
    for character in unicodedata.normalize("NFKC", text).lower() + " ":
        kind = unicodedata.category(character)[0]
        alone = unicodedata.name(character, "").startswith(SPACELESS)
        if kind in "LNM" and not alone:
            word += character
            continue
        found += [word] if word else []
        found += [character] if alone and kind in "LNM" else []
        word = ""
    return found


def grams_of(text):
    """Its 13-grams, in order."""
    words = words_of(text)
    return {" ".join(words[at : at + 13]): at for at in range(len(words) - 12)}.keys()


def written(words, draw):
    """Words as a text, in any case, with any white space and punctuation between them."""
    text = ""
    for word in words:
        change = draw.choice([str, str, str.upper, str.title])
        text += change(word) + draw.choice(SIGNS)
    return text


def some_text(draw, most):
    if draw.random() < 0.15:
        return "".join(draw.choices(CHARACTERS + "。、 ", k=draw.randint(1, most)))
    return written(draw.choices(WORDS, k=draw.randint(1, most)), draw)


def overlapping(draw, text):
    """A document with 12, 13 or 20 words of `text`, at its beginning, in it, or at its end."""
    words = words_of(text)
    size = draw.choice([12, 13, 20])
    at = draw.randint(0, max(0, len(words) - size))
    taken = words[at : at + size]
    before, after = (draw.choices(WORDS, k=draw.choice([0, 3, 40])) for _ in range(2))
    return written([*before, *taken, *after], draw)


def made_set(folder, texts, **changes):
    """A dataset whose validation split are these texts, for the most part."""
    validation = datasets.Dataset.from_dict({"text": texts})
    train = datasets.Dataset.from_dict({"text": ["other words, all of them", *WORDS]})
    source = folder.with_name(f"{folder.name}-text")
    datasets.DatasetDict({"train": train, "validation": validation}).save_to_disk(source)
    given = {"packing": "concat", "context_length": 16, "validation_fraction": 0, **changes}
    prepare(input=[source], output=folder, train_tokenizer=400, **given)
    return folder


def write_corpus(folder, texts):
    """One half of the texts in lines of JSON, of which some are empty, and each other in a file."""
    folder.mkdir()
    places, lines = [], []
    for text in texts[::2]:
        if len(lines) % 5 == 3:
            lines.append("")
        lines.append(json.dumps({"text": text}))
        places.append((str(folder / "a.jsonl"), len(lines)))
    (folder / "a.jsonl").write_text("\n".join(lines) + "\n")
    for number, text in enumerate(texts[1::2]):
        # As bytes: Python would change the ends of lines.
        (folder / f"b{number:04d}.txt").write_bytes(text.encode())
        places.append((str(folder / f"b{number:04d}.txt"), 0))
    return dict(zip(places, [*texts[::2], *texts[1::2]]))


def arguments(folder, output, **changes):
    given = {"context_length": 32, "validation_fraction": 0.1, "document_separator": "none"}
    given["tokenizer"] = folder / "one" / "tokenizer"
    return {"input": [folder / "in"], "output": output, **given, **changes}


def split_of(output):
    """{split: its documents}, of a dataset in which no token is dropped."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(output / "tokenizer" / "tokenizer.json"))
    manifest = json.loads((output / "manifest.json").read_text())
    found = {}
    for name, rows in datasets.load_from_disk(output).items():
        tokens = np.array(rows["input_ids"]).ravel()
        ends = np.flatnonzero(tokens == manifest["eos_token_id"]) + 1
        texts = [tokenizer.decode(ids) for ids in np.split(tokens, ends)]
        found[name] = Counter(filter(None, texts))
    return found


@pytest.fixture(scope="module")
def small_pieces():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "SMALL_PIECE_BYTES", 12000)
        yield


@pytest.fixture(scope="module")
def drawn(tmp_path_factory, small_pieces):
    """A corpus in `in` of which some documents overlap with the evaluation sets `one` and `two`."""
    draw, folder = random.Random(7), tmp_path_factory.mktemp("drawn")
    sets = {name: [some_text(draw, 40) for _ in range(30)] for name in ("one", "two")}
    # The last tokens of rows are dropped, and with them the end of the last text.
    made_set(folder / "one", [*sets["one"], "a text that nothing shares " * 3])
    made_set(folder / "two", sets["two"], packing="best_fit", context_length=1024)
    texts = []
    for _ in range(160):
        text = some_text(draw, 60)
        if draw.random() < 0.4:
            text = overlapping(draw, draw.choice(sets[draw.choice(["one", "two"])]))
        texts.append(text)
    return folder, sets, write_corpus(folder / "in", texts)


@pytest.fixture(scope="module")
def clean(drawn):
    folder, _, _ = drawn
    both = f"{folder / 'one'},{folder / 'two'}"
    manifest = prepare(**arguments(folder, folder / "clean", decontaminate=both))
    return folder, folder / "clean", both, manifest


# --- the law ---------------------------------------------------------------------------


def listed_in(output):
    lines = (output / "contaminated.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_what_shares_13_words_is_left_out_listed_and_counted(drawn, clean):
    _, sets, texts = drawn
    folder, output, _, manifest = clean
    known, expected = {}, set()
    for name, of_set in sets.items():
        path = str(folder / name)
        known[path] = set().union(*map(grams_of, of_set))
        shared = [place for place, text in texts.items() if grams_of(text) & known[path]]
        expected |= {(*place, path) for place in shared}
    lines = listed_in(output)
    listed = {(line["file"], line["number"], line["set"]) for line in lines}
    assert listed == expected and len(lines) == len(expected) > 30
    for line in lines:
        text = texts[line["file"], line["number"]]
        both = [gram for gram in grams_of(text) if gram in known[line["set"]]]
        assert line["words"] == both[0]
    left_out = {(file, number) for file, number, _ in expected}
    assert manifest["contaminated"]["documents"] == len(left_out)
    for one in manifest["contaminated"]["sets"]:
        of_set = sets[Path(one["path"]).name]
        assert one["documents"] == sum(path == one["path"] for *_, path in expected)
        short = sum(0 < len(words_of(text)) < 13 for text in of_set)
        assert one["short"] == short > 0 and one["texts"] >= len(of_set) - 1
        sealed = json.loads(Path(one["path"], "manifest.json").read_text())
        assert one["sha256"] == sealed["sha256"]
    said = summary(manifest)
    assert f"left out   {len(left_out)} documents, " in said
    assert re.search(r"of its \d+ documents \d+ have fewer than 13 words and can't be found", said)
    assert "contaminated.jsonl" in manifest["written"]


def test_the_others_come_into_the_split_where_they_were(drawn, clean, tmp_path):
    _, _, texts = drawn
    folder, output, both, _ = clean
    given = {"packing": "best_fit", "context_length": 4096}
    prepare(**arguments(folder, tmp_path / "all", **given))
    prepare(**arguments(folder, tmp_path / "clean", decontaminate=both, **given))
    places = {(one["file"], one["number"]) for one in listed_in(output)}
    gone = Counter(texts[place] for place in places)
    everything, kept = split_of(tmp_path / "all"), split_of(tmp_path / "clean")
    for name in ("train", "validation"):
        rest = {text: count for text, count in everything[name].items() if text not in gone}
        assert kept[name] == rest
    assert sum(gone.values()) + sum(map(Counter.total, kept.values())) == len(texts)


@pytest.mark.parametrize(
    ("packing", "expected"),
    [
        ("concat", [[5, 6, 7, 8, 9, 0], [3, 0], [4, 2]]),
        ("best_fit", [[5, 6, 7, 8], [9, 0], [3, 0], [4, 2]]),
    ],
)
def test_packed_rows_are_taken_apart_where_documents_end(packing, expected):
    rows = [{"input_ids": np.array(ids)} for ids in ([5, 6, 7, 8], [9, 0, 3, 0], [4, 2])]
    found = contamination._documents(rows, packing, 0)
    assert [ids.tolist() for ids in found if len(ids)] == expected


def test_a_document_that_best_fit_cuts_counts_once(tmp_path):
    texts, given = ["one word, and others " * 30, "short"], {"context_length": 64}
    folder = made_set(tmp_path / "set", texts, packing="best_fit", **given)
    about = contamination.read(str(folder)).about
    assert (about["texts"], about["are"], about["short"]) == (2, "documents", 1)


@pytest.mark.parametrize("seed", range(20))
def test_words_are_the_same_however_a_text_is_taken_apart(monkeypatch, seed):
    draw = random.Random(seed)
    text = "".join(some_text(draw, 30) for _ in range(5))
    monkeypatch.setattr(contamination, "WORDS_AT_ONCE", draw.choice([1, 5, 13, 2**16]))
    found = {}
    for words, hashes in contamination.grams(text):
        for at, number in enumerate(hashes.tolist()):
            found.setdefault(" ".join(words[at : at + 13]), set()).add(number)
    assert found.keys() == grams_of(text)
    numbers = [number for each in found.values() for number in each]
    assert len(numbers) == len(set(numbers)) == len(found)


def test_text_in_other_forms_is_the_same_text():
    decomposed = unicodedata.normalize("NFD", LATIN)
    for other in (decomposed, LATIN.upper().replace("SS", "ß"), LATIN.replace(" ", "\r\n\u3000")):
        [(words, _)] = contamination.grams(other)
        assert words == words_of(LATIN)


UNSPACED = ["我们在北京大学研究语言模型的遗忘", "ภาษาไทยไม่มีช่องว่าง", "吾輩は猫である名前はまだ無い"]


def test_without_spaces_13_characters_are_enough(tmp_path):
    made_set(tmp_path / "set", [*UNSPACED, "an end " * 20])
    known = [contamination.read(str(tmp_path / "set")).hashes]
    for text in UNSPACED:
        assert contamination.shared(f"x{text[:13]}y", known)
        assert contamination.shared(f"{text[1:7]}，\n{text[7:14]}", known)
        assert not contamination.shared(text[:12], known)
        assert not contamination.shared(f"{text[:6]}x{text[6:13]}", known)


def test_a_set_that_is_read_in_many_parts_is_the_same(tmp_path, monkeypatch):
    draw = random.Random(3)
    made_set(tmp_path / "set", [written(draw.choices(WORDS, k=40), draw) for _ in range(50)])
    whole = contamination.read(str(tmp_path / "set"))
    monkeypatch.setattr(contamination, "TEXTS_AT_ONCE", 3)
    parts = contamination.read(str(tmp_path / "set"))
    assert len(whole.hashes) > 1000 and (parts.hashes == whole.hashes).all()
    assert parts.about == whole.about


# --- equal bytes -----------------------------------------------------------------------


@pytest.mark.longer
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_any_number_of_processes_makes_the_same_bytes(clean, tmp_path, workers):
    folder, output, both, _ = clean
    given = arguments(folder, tmp_path / "out", decontaminate=both, num_workers=workers)
    prepare(**given)
    assert_same(tmp_path / "out", output)


def killed(place, **given):
    """Prepare in a process that is killed there."""

    def run():
        os.environ[VARIABLE] = place
        prepare(**given)

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL


def test_a_killed_preparation_goes_on_in_two_processes(clean, tmp_path, capfd):
    folder, output, both, _ = clean
    killed("prepare.mark:count=3", **arguments(folder, tmp_path / "out", decontaminate=both))
    prepare(**arguments(folder, tmp_path / "out", decontaminate=both, num_workers=2))
    assert "Going on: 2 of " in capfd.readouterr().err
    assert_same(tmp_path / "out", output)


@pytest.mark.longer
def test_work_for_other_sets_is_not_taken_up(clean, tmp_path):
    folder, output, both, _ = clean
    one = str(folder / "one")
    killed("prepare.rows", **arguments(folder, tmp_path / "out", decontaminate=one))
    prepare(**arguments(folder, tmp_path / "out", decontaminate=both))
    assert_same(tmp_path / "out", output)
    killed("prepare.rows", **arguments(folder, tmp_path / "plain", decontaminate=both))
    plain = prepare(**arguments(folder, tmp_path / "plain"))
    assert plain["contaminated"] == {"documents": 0, "tokens": 0, "sets": []}
    assert not (tmp_path / "plain" / "contaminated.jsonl").exists()


# --- how it meets other reasons and splits ---------------------------------------------


@pytest.mark.longer
def test_each_document_is_left_out_for_one_reason(drawn, clean, tmp_path):
    _, _, texts = drawn
    folder, _, both, before = clean
    shutil.copytree(folder / "in", tmp_path / "in" / "first")
    shutil.copytree(folder / "in", tmp_path / "in" / "again")
    given = arguments(folder, tmp_path / "out", decontaminate=both, min_document_tokens=60)
    manifest = prepare(**given | {"input": [tmp_path / "in"], "deduplicate": "exact"})
    assert manifest["contaminated"]["documents"] == 2 * before["contaminated"]["documents"]
    assert manifest["skipped"]["short"] > 0 and manifest["duplicates"]["documents"] > 0
    # `prepare` compares the sum of all counts with what was read.
    assert manifest["text"]["records"] == 2 * len(texts)


def split_with(folder, lengths, contaminated):
    """`split_documents` of one piece with documents of these lengths."""
    documents = np.zeros(len(lengths), DOCUMENT)
    documents["tokens"], documents["goes"] = lengths, 4 * contaminated
    documents["hash"][:, 0] = np.arange(len(lengths)) + 1
    documents.tofile(folder / "piece.documents")
    return split_documents([folder / "piece"], 0, 0.1, False)


def test_splits_are_drawn_as_if_nothing_were_contaminated(tmp_path):
    generator = np.random.default_rng(0)
    for _ in range(30):
        # A few long documents, with which validation would hold too much.
        lengths = generator.pareto(1, 100).astype(int) * 100 + 100
        without = split_with(tmp_path, lengths, np.zeros(100, bool))
        contaminated = generator.random(100) < 0.3
        found = split_with(tmp_path, lengths, contaminated)
        for name in ("train", "validation"):
            assert (found.splits[name] == without.splits[name] & ~contaminated).all()
        assert (found.left_out["contaminated"] == contaminated).all()


def test_where_nothing_of_a_split_is_left_all_are_drawn_anew(tmp_path):
    lengths = np.full(10, 100)
    gone = split_with(tmp_path, lengths, np.zeros(10, bool)).splits["validation"]
    again = split_with(tmp_path, lengths, gone).splits
    assert again["validation"].any() and not (again["validation"] & gone).any()


# --- tasks -----------------------------------------------------------------------------

QUESTION = "Which of the rivers that run through the old town carries most water in spring? "


def task_folder(folder, requests):
    """Tasks as prepare_data.py writes them: (context, answer), with padding behind."""
    tokenizer = train_byte_level_bpe([QUESTION] * 3, vocab_size=300)
    rows = []
    for context, answer in requests:
        ids = [tokenizer(text)["input_ids"] for text in (context, answer)]
        length = sum(map(len, ids))
        padding = [tokenizer.eos_token_id] * (200 - length)
        labels = [-100] * len(ids[0]) + ids[1] + [-100] * len(padding)
        rows.append({"input_ids": ids[0] + ids[1] + padding, "labels": labels})
    split = datasets.Dataset.from_list(rows)
    datasets.DatasetDict({"validation": split}).save_to_disk(folder)
    tokenizer.save_pretrained(folder / "tokenizer")
    written = describe(folder, files.files_in(folder))
    (folder / "manifest.json").write_bytes(files.encode({"tasks": {}, "written": written}))
    return folder


def test_a_request_of_a_task_is_its_context_and_its_answer(tmp_path):
    answers = ["the northern one", "none of them at all"]
    folder = task_folder(tmp_path / "tasks", [*((QUESTION, one) for one in answers), ("A", "b")])
    evaluation = contamination.read(str(folder))
    one = evaluation.about
    assert (one["texts"], one["short"]) == (3, 1)
    last = " ".join(words_of(QUESTION)[-10:])
    for answer in answers:
        assert contamination.shared(f"and {last}: {answer.upper()}", [evaluation.hashes])
    assert not contamination.shared(f"{last} the southern one or so", [evaluation.hashes])
    # Requests stand side by side in no document.
    beginning = " ".join(words_of(QUESTION)[:10])
    assert not contamination.shared(f"{answers[0]} {beginning}", [evaluation.hashes])


@pytest.mark.longer
def test_tasks_of_lm_eval_are_kept_apart(tmp_path):
    pytest.importorskip("lm_eval")
    test_tasks.write_task(tmp_path / "yaml", "first")
    questions = (tmp_path / "yaml" / "first.jsonl").read_text().splitlines()
    texts = []
    for number, line in enumerate(questions):
        one = json.loads(line)
        texts.append(f"{one['question']}\n{one['choices'][number % 3].upper()}!")
        texts.append(f"nothing of the kind, {number} times")
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    train_byte_level_bpe(texts, vocab_size=300).save_pretrained(tmp_path / "tokenizer")
    flags = ["--tokenizer", str(tmp_path / "tokenizer")]
    tasks, output = str(tmp_path / "tasks"), str(tmp_path / "out")
    prepare_data.main(["--tasks", str(tmp_path / "yaml"), *flags, "--output", tasks])
    words = ["--input", str(tmp_path / "in.jsonl"), *flags, "--context_length", "16"]
    prepare_data.main([*words, "--decontaminate", tasks, "--output", output])
    expected = [number for number, text in enumerate(texts, 1) if len(words_of(text)) >= 13]
    numbers = [one["number"] for one in listed_in(tmp_path / "out")]
    assert numbers == expected and len(expected) > 3


# --- mistakes --------------------------------------------------------------------------


def refused(capsys, folder, *words):
    given = ("--input", folder / "in", "--tokenizer", folder / "one" / "tokenizer")
    return test_tasks.refused(capsys, *given, *words)


def test_a_set_that_is_none_is_refused_in_one_sentence(clean, tmp_path, capsys):
    folder, output, _, _ = clean
    out = ("--output", tmp_path / "out", "--decontaminate")
    for name in (tmp_path / "none", folder / "in", folder / "one-text"):
        said = refused(capsys, folder, *out, name)
        assert f"{name}: this isn't a dataset of prepare_data.py" in said
    without = tmp_path / "without"
    shutil.copytree(folder / "one", without)
    (without / "dataset_dict.json").write_text('{"splits": ["train"]}')
    said = refused(capsys, folder, *out, f"{folder / 'two'},{without}")
    assert f"{without}: this has no split 'validation'" in said
    (without / "dataset_dict.json").write_text("{")
    assert "can't be read as a list of splits" in refused(capsys, folder, *out, without)
    itself = ("--output", output, "--overwrite", "true", "--decontaminate", output)
    assert "--decontaminate names the output" in refused(capsys, folder, *itself)
    for words, message in (("", "mine, and nothing is given"), (" , ", "names no dataset")):
        assert message in refused(capsys, folder, *out, words)
    address = "s3://bucket/tasks"
    assert f"{address}: it takes folders, no addresses" in refused(capsys, folder, *out, address)
    shutil.copytree(folder / "one", tmp_path / "pieces")
    file = tmp_path / "pieces" / "tokenizer" / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "decoder": None}))
    assert "has no decoder" in refused(capsys, folder, *out, tmp_path / "pieces")
    with_tasks = ("--tasks", "x", "--tokenizer", "y", *out, folder / "one")
    assert "not --decontaminate" in test_tasks.refused(capsys, *with_tasks)
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".*"))


def test_a_file_name_may_hold_any_bytes_and_a_text_may_be_one_word(drawn, tmp_path):
    folder, sets, _ = drawn
    names = [os.fsdecode(b"\xff0.txt"), "genome.txt"]
    texts = [max(sets["two"], key=len), "acgt" * 50_000]
    for name, text in zip(names, texts):
        (tmp_path / "in").mkdir(exist_ok=True)
        (tmp_path / "in" / name).write_text("\n---\n".join([text, *written(WORDS, random)]))
    given = arguments(folder, tmp_path / "out", decontaminate=str(folder / "two"))
    given |= {"input": [tmp_path / "in"], "document_separator": "\\n---\\n"}
    prepare(**given)
    [one] = listed_in(tmp_path / "out")
    assert one["file"].endswith("\udcff0.txt")


def test_where_nothing_is_left_it_says_why(drawn, tmp_path):
    folder, sets, _ = drawn
    text = max(sets["two"], key=len)
    (tmp_path / "in.txt").write_text("\n---\n".join([text] * 5))
    given = arguments(folder, tmp_path / "out", decontaminate=str(folder / "two"))
    given |= {"input": [tmp_path / "in.txt"], "document_separator": "\\n---\\n"}
    with pytest.raises(ValueError, match="5 that share 13 words in a row with an evaluation set"):
        prepare(**given)
