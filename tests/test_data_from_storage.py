"""Datasets and corpora at addresses of object storage: what comes of them is what comes of folders.

What is stored is read and changed with boto3, or as files where the address is file://.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import yaml

pytest.importorskip("obstore")

from ranks import Job, refuse_imports, toy_run
from servers import BUCKET, Bucket, free_port, keys, moto_url, proxied, use  # noqa: F401
from test_mirrored_runs import assert_same_end, ended
from test_tasks import write_task

import train
from fabric_llm.base import files
from fabric_llm.base.describing import describe
from fabric_llm.base.faults import BAD_INPUT, DONE, REFUSED, SAVE_FAILED, UNWRITABLE, Fault
from fabric_llm.mirror import download
from fabric_llm.mirror.lease import Lease
from fabric_llm.mirror.store import Store
from fabric_llm.plan import fetched
from fabric_llm.prepare import storage

ROOT = Path(__file__).parent.parent
STEPS, INTERVAL, RUN = 8, 3, "run"
IMPATIENT = "from fabric_llm.mirror import download\ndownload.PATIENCE_SECONDS = 0.0\n"
PREPARE = ("--context_length", 16, "--validation_fraction", 0.2, "--train_tokenizer", 300)
ROWS = "train/data-00000-of-00001.arrow"


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hf"))
    monkeypatch.setattr(download, "PATIENCE_SECONDS", 0.0)
    fetched._fetched.clear()
    storage.corpus.cache_clear()


@pytest.fixture
def bucket(moto_url, monkeypatch, request):  # noqa: F811
    """Empty."""
    use(moto_url, monkeypatch)
    made = Bucket(moto_url).make()
    for name in made.names():
        made.remove(name)
    return made


def sealed(folder, target):
    """A copy of a dataset with a manifest, as prepare_data.py writes it."""
    shutil.copytree(folder, target)
    manifest = {"files": [{"path": "a.txt", "bytes": 1}]}  # what it was made of
    manifest["written"] = describe(target, files.files_in(target))
    (target / "manifest.json").write_bytes(files.encode(manifest))
    return target


def put(bucket, folder, prefix):
    """Returns the address."""
    for name in files.files_in(folder):
        bucket.put(f"{prefix}/{name}", (folder / name).read_bytes())
    return f"s3://{bucket.name}/{prefix}"


@pytest.fixture
def mine(toys, tmp_path):
    return sealed(toys / "data", tmp_path / "data" / "mine")


def flags(toys, tmp_path, output, *more):
    words = toy_run(toys, tmp_path / output, model="gpt2")
    return (
        *(*words[:2], *words[4:], "--max_step", STEPS, "--save_step_interval", INTERVAL),
        *"--lr 1e-2 --hang_timeout 60 --global_batch_size 4 --eval_iters 2".split(),
        *("--eval_batch_size", 2, "--eval_step_interval", 4, "--run_name", RUN, *more),
    )


def refused(capsys, code, *words):
    """What train.py says in this process, in one sentence, before it does anything."""
    with pytest.raises(SystemExit) as stop:
        train.main([str(word) for word in words])
    said = capsys.readouterr().err.strip()
    assert stop.value.code == code, said
    assert len(said.splitlines()) == 1 and said.startswith("train.py: error: "), said
    return said


# ------------------------------------------------------------------------------------- train.py


@pytest.mark.longer
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_on_an_address_is_the_run_on_the_folder(toys, tmp_path, bucket, mine, ranks):
    address = put(bucket, mine, "data/mine")
    ended(Job(ranks, *flags(toys, tmp_path, "here", "--train_data_dir", mine)))
    with proxied(os.environ["AWS_ENDPOINT_URL"]) as proxy:
        os.environ["AWS_ENDPOINT_URL"] = proxy.url  # of bucket's monkeypatch
        said = ended(Job(ranks, *flags(toys, tmp_path, "there", "--train_data_dir", address)))
    assert said.count("Fetching ") == 1
    # Once for all ranks of the machine; the manifest also tells which data is there.
    for name in files.files_in(mine):
        count = proxy.requests.count(("GET", f"/{BUCKET}/data/mine/{name}"))
        assert count == (ranks if name == "manifest.json" else 1), (name, count)
    run = tmp_path / "there" / RUN
    assert_same_end(run, tmp_path / "here" / RUN, STEPS)
    assert yaml.safe_load((run / "arguments.yaml").read_text())["train_data_dir"] == address
    for path in files.checkpoints(run):
        assert files.read(path)["data"] == {"folder": address}
        assert str(tmp_path / "cache") not in (path / files.MANIFEST).read_text()


@pytest.mark.longer
@pytest.mark.parametrize("kind", ["mixture of both, and a set", "replay"])
def test_more_datasets_at_addresses(toys, tmp_path, bucket, mine, kind):
    many = sealed(toys / "many", tmp_path / "data" / "many")
    places = [put(bucket, folder, f"data/{folder.name}") for folder in (mine, many)]
    for output, (one, two) in {"here": (mine, many), "there": places}.items():
        words = ("--train_data_dir", mine, "--replay", two)
        if kind != "replay":
            words = ("--data_mix", f"new={one}:0.75,old={many}:0.25", "--eval_data", f"more={two}")
        ended(Job(1, *flags(toys, tmp_path, output, *words)))
    assert_same_end(tmp_path / "there" / RUN, tmp_path / "here" / RUN, STEPS)
    made_of = files.read(files.latest(tmp_path / "there" / RUN))["data"]
    if kind != "replay":
        assert made_of == {"new": {"folder": places[0]}, "old": {"folder": str(many)}}


@pytest.mark.longer
def test_it_resumes_on_another_machine(toys, tmp_path, bucket, mine):
    """With nothing in the cache, another one, and the address in arguments.yaml alone."""
    address = put(bucket, mine, "data/mine")
    ended(Job(1, *flags(toys, tmp_path, "here", "--train_data_dir", mine)))
    words = flags(toys, tmp_path, "there", "--train_data_dir", address)
    Job(1, *words, failpoint="between_steps:count=5").wait(120)
    os.environ["XDG_CACHE_HOME"] = str(tmp_path / "another")  # of own_cache's monkeypatch
    where = ("--output_dir", tmp_path / "there", "--run_name", RUN)
    said = ended(Job(1, *where, "--resume", "true"))
    assert f"Fetching {address} " in said and str(tmp_path / "another") in said
    assert_same_end(tmp_path / "there" / RUN, tmp_path / "here" / RUN, STEPS)


@pytest.mark.longer
def test_other_data_under_the_same_address_is_refused(toys, tmp_path, bucket, mine):
    address = put(bucket, mine, "data/mine")
    words = flags(toys, tmp_path, "there", "--train_data_dir", address)
    Job(1, *words, failpoint="between_steps:count=5").wait(120)
    other = toys / "data"
    # The same names and sizes, with the rows of training the other way round.
    import datasets

    changed = datasets.load_from_disk(str(other))
    changed["train"] = changed["train"].select(range(len(changed["train"]) - 1, -1, -1))
    changed.save_to_disk(str(tmp_path / "changed"))
    assert files.sha256(tmp_path / "changed" / ROWS) != files.sha256(other / ROWS)
    put(bucket, sealed(tmp_path / "changed", tmp_path / "data" / "changed"), "data/mine")
    said = ended(Job(1, *words, "--resume", "true"), BAD_INPUT)
    assert "train_fingerprint" in said and f"{address!r} holds other rows than then" in said
    # The data of before is still in the cache, in a folder of its own.
    assert len(list((tmp_path / "cache" / "fabric_llm").glob("*/mine"))) == 2


@pytest.mark.longer
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda content: content[:-9] + bytes([content[-9] ^ 1]) + content[-8:], "has changed"),
        (lambda content: content[:-1], "bytes, not"),
        (None, "it is missing"),
    ],
)
def test_a_damaged_object_is_refused_by_name(toys, tmp_path, bucket, mine, change, words, capsys):
    address, name = put(bucket, mine, "data/mine"), f"data/mine/{ROWS}"
    content = bucket.content(name)
    bucket.remove(name)
    if change is not None:
        bucket.put(name, change(content))
    command = flags(toys, tmp_path, "out", "--train_data_dir", address)
    said = refused(capsys, BAD_INPUT, *command)
    assert f"{address}/{ROWS} is damaged" in said and words in said
    # Nothing is left that a next start would take, and it takes what is mended.
    assert not list((tmp_path / "cache" / "fabric_llm").glob("*/*"))
    bucket.put(name, content)
    assert files.sha256(fetched.folder(address) / ROWS) == files.sha256(mine / ROWS)


@pytest.mark.longer
def test_a_damaged_manifest_and_names_that_lead_out(toys, tmp_path, bucket, mine, capsys):
    address = put(bucket, mine, "data/mine")
    words = flags(toys, tmp_path, "out", "--train_data_dir", address)
    document = json.loads((mine / "manifest.json").read_text())
    del document["sha256"]
    bucket.put("data/mine/manifest.json", files.encode(document)[:-3])
    assert "manifest.json isn't what was written" in refused(capsys, BAD_INPUT, *words)
    for name in ("../../evil", "/tmp/evil", "code.py"):
        document["written"][name] = {"bytes": 2, "sha256": "0"}
        bucket.put("data/mine/manifest.json", files.encode(document))
        assert "refused" in refused(capsys, REFUSED, *words)
        del document["written"][name]


@pytest.mark.longer
def test_mistakes_at_a_server(toys, tmp_path, bucket, mine, capsys, monkeypatch):
    def said(code, address):
        return refused(capsys, code, *flags(toys, tmp_path, "o", "--train_data_dir", address))

    address = put(bucket, mine, "data/mine")
    assert f"s3://{BUCKET}/nothing holds no dataset" in said(BAD_INPUT, f"s3://{BUCKET}/nothing")
    # What save_to_disk alone has made has no hashes.
    plain = put(bucket, toys / "data", "data/plain")
    assert "prepare it, or copy another one to a disk" in said(BAD_INPUT, plain)
    with monkeypatch.context() as patch:
        patch.setattr(files, "ROOM_BYTES", 2**60)
        assert "make room" in said(SAVE_FAILED, address)
    # The machine's own role is asked, and there is none.
    for name in ("AWS_PROFILE", *keys("").keys() - {"AWS_REGION"}):
        monkeypatch.delenv(name, raising=False)
    assert "no credentials" in said(BAD_INPUT, address)
    use(f"http://127.0.0.1:{free_port()}", monkeypatch)
    assert "can't be reached" in said(SAVE_FAILED, address)


WRONG = {
    "ftp://bucket/data": "must begin with one of",
    "s3://key:secret@bucket/data": "an address holds no password",
    "s3://bucket": "must name a folder, such as s3://bucket/data/mine",
    "s3://bucket/a/../b": "must be plain",
}


@pytest.mark.parametrize("address", WRONG)
@pytest.mark.parametrize("flag", ["train_data_dir", "data_mix", "replay", "eval_data"])
def test_wrong_addresses(toys, tmp_path, mine, flag, address, capsys):
    given = {"data_mix": f"a={address}:1", "eval_data": f"a={address}"}.get(flag, address)
    words = [f"--{flag}", given]
    if flag in ("replay", "eval_data"):
        words += ["--train_data_dir", mine]
    said = refused(capsys, BAD_INPUT, *flags(toys, tmp_path, "out", *words))
    assert WRONG[address] in said and "secret" not in said


def test_mistakes_are_told_before_torch_and_obstore(toys, tmp_path):
    site = refuse_imports(tmp_path, ("torch", "obstore"))
    words = flags(toys, tmp_path, "out", "--train_data_dir", "ftp://bucket/data")
    done = subprocess.run(
        [sys.executable, "train.py", *map(str, words)], cwd=ROOT, text=True, capture_output=True,
        env={**os.environ, "PYTHONPATH": site},
    )  # fmt: skip
    assert done.returncode == BAD_INPUT and "must begin with" in done.stderr, done.stderr


def test_what_a_kill_left_goes_and_one_process_reads_one_version(tmp_path, mine):
    address = f"file://{mine}"
    first = fetched.folder(address)
    left = first.parent / ".tmp-mine-0000"
    left.mkdir()
    shutil.rmtree(first)
    fetched._fetched.clear()
    assert fetched.folder(address) == first and not left.exists()
    assert [*first.parent.iterdir()] == [first]
    # Other data is there now, which a new process sees.
    document = json.loads((mine / "manifest.json").read_text())
    document.pop("sha256")
    (mine / "manifest.json").write_bytes(files.encode({**document, "seed": 2}))
    assert fetched.folder(address) == first
    fetched._fetched.clear()
    assert fetched.folder(address) != first


def test_a_cache_that_can_not_be_written(toys, tmp_path, mine, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    words = flags(toys, tmp_path, "out", "--train_data_dir", f"file://{mine}")
    assert "set XDG_CACHE_HOME to another" in refused(capsys, UNWRITABLE, *words)


def test_plan_needs_only_the_manifest(tmp_path, mine):
    folder = fetched.folder(f"file://{mine}", whole=False)
    assert files.files_in(folder) == ["manifest.json"]
    assert fetched.versions() == {}
    assert sorted(files.files_in(fetched.folder(f"file://{mine}"))) == sorted(files.files_in(mine))


# --------------------------------------------------------------------------------- prepare_data.py


def prepare(*words, code=DONE, **environment):
    """What prepare_data.py says."""
    done = subprocess.run(
        [sys.executable, "prepare_data.py", *map(str, words)], cwd=ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={**os.environ, **environment},
    )  # fmt: skip
    assert done.returncode == code, done.stdout
    return done.stdout


@pytest.fixture(scope="session")
def texts(tmp_path_factory):
    """A folder with `corpus`."""
    folder = tmp_path_factory.mktemp("texts") / "corpus"
    (folder / "sub").mkdir(parents=True)
    for number in range(12):
        text = " ".join(f"word{number * place % 37}" for place in range(200))
        (folder / ("sub" if number % 2 else ".") / f"{number}.txt").write_text(text)
    lines = [json.dumps({"text": f"line {number} of some text"}) for number in range(20)]
    (folder / "lines.jsonl").write_text("\n".join(lines))
    return folder.parent


@pytest.fixture(scope="session")
def prepared(texts):
    """What is made of the corpus."""
    prepare("--input", texts / "corpus", "--output", texts / "prepared", *PREPARE)
    return texts / "prepared"


@pytest.fixture
def corpus(tmp_path, texts):
    """A copy, to be changed."""
    return shutil.copytree(texts / "corpus", tmp_path / "texts" / "corpus")


def contents(bucket, prefix):
    names = bucket.names(f"{prefix}/")
    return {name.removeprefix(f"{prefix}/"): bucket.content(name) for name in names}


def assert_same_dataset(made, folder):
    """All bytes, but for what manifests say of where it was."""
    here = {name: (folder / name).read_bytes() for name in files.files_in(folder)}
    assert made.keys() == here.keys()
    ours, theirs = (json.loads(each.pop("manifest.json")) for each in (made, here))
    assert made == here
    for name in ("inputs", "output", "made_by", "files", "sha256"):
        del ours[name], theirs[name]
    assert ours == theirs


@pytest.mark.longer
def test_from_and_to_addresses_is_as_from_and_to_folders(tmp_path, bucket, corpus):
    put(bucket, corpus, "corpus")
    bucket.put("corpus/", b"")  # of a console
    bucket.put("corpus/sub/", b"")
    bucket.put("corpora/other.txt", b"of another folder")
    more = tmp_path / "more.txt"
    more.write_text("here " * 300)
    source, target = f"s3://{BUCKET}/corpus/", f"s3://{BUCKET}/data/mine"
    prepare("--input", corpus, more, "--output", tmp_path / "here", *PREPARE)
    said = prepare("--input", source, more, "--output", target, *PREPARE)
    assert f"--train_data_dir {target}" in said
    assert_same_dataset(contents(bucket, "data/mine"), tmp_path / "here")
    document = json.loads(bucket.content("data/mine/manifest.json"))
    assert document["inputs"] == [source, str(more)] and document["output"] == target
    assert document["files"][0]["path"] == f"{source}0.txt"
    assert str(tmp_path / "cache") not in json.dumps(document)
    # A second one from there copies nothing.
    with proxied(os.environ["AWS_ENDPOINT_URL"]) as proxy:
        words = ("--input", source, more, "--output", tmp_path / "again", *PREPARE)
        prepare(*words, AWS_ENDPOINT_URL=proxy.url)
    assert all("list-type" in path for _, path in proxy.requests), proxy.requests
    # And what it made is read back as train.py reads it.
    assert files.files_in(fetched.folder(target))


@pytest.mark.longer
def test_one_file_and_all_of_a_bucket(bucket, texts):
    corpus = texts / "corpus"
    address = put(bucket, corpus, "corpus")
    one = Path(storage.corpus(f"{address}/lines.jsonl"))
    assert one.name == "lines.jsonl"
    assert one.read_bytes() == (corpus / "lines.jsonl").read_bytes()
    for given in (f"s3://{BUCKET}/", f"s3://{BUCKET}"):
        every = Path(storage.corpus(given))
        assert {*files.files_in(every)} == {f"corpus/{name}" for name in files.files_in(corpus)}


@pytest.mark.longer
def test_objects_that_change_are_another_copy(tmp_path, bucket, corpus):
    address = put(bucket, corpus, "corpus")
    first = Path(storage.corpus(address))
    bucket.put("corpus/0.txt", b"x" * (corpus / "0.txt").stat().st_size)  # of the same size
    bucket.put("corpus/new.txt", b"new")
    assert storage.corpus(address) == str(first)  # in the same process
    storage.corpus.cache_clear()
    second = Path(storage.corpus(address))
    assert second != first and (second / "new.txt").read_bytes() == b"new"
    assert not (first / "new.txt").exists()
    assert (second / "0.txt").read_bytes() != (first / "0.txt").read_bytes()


@pytest.mark.longer
@pytest.mark.parametrize("name", ["corpus/../../evil.txt", "corpus/a//b.txt", "corpus/a\\b.txt"])
def test_names_that_lead_out_are_refused(tmp_path, bucket, corpus, name):
    address = put(bucket, corpus, "corpus")
    bucket.put(name, b"text")
    said = prepare("--input", address, "--output", tmp_path / "out", *PREPARE, code=REFUSED)
    assert "refused" in said and not (tmp_path / "out").exists()


@pytest.mark.longer
def test_an_object_that_is_a_folder_as_well(tmp_path, bucket):
    bucket.put("corpus/a", b"text")
    bucket.put("corpus/a/b.txt", b"text")
    with pytest.raises(Fault, match="is an object, and a folder of others"):
        storage.corpus(f"s3://{BUCKET}/corpus")


def test_what_changes_while_it_is_copied_is_refused(corpus, monkeypatch):
    address, copy = f"file://{corpus}", storage._copy

    def changing(*words):
        copy(*words)
        (corpus / "lines.jsonl").write_text("other")

    monkeypatch.setattr(storage, "_copy", changing)
    with pytest.raises(Fault, match="has changed while it was fetched"):
        storage.corpus(address)
    # What comes meanwhile isn't in this copy, and spoils nothing.
    monkeypatch.setattr(storage, "_copy", lambda *words: [copy(*words), (corpus / "n").touch()])
    assert (Path(storage.corpus(address)) / "lines.jsonl").read_text() == "other"


@pytest.mark.longer
def test_what_is_there_is_refused_before_any_work(tmp_path, bucket, corpus, mine, prepared):
    words = ("--input", corpus, *PREPARE)
    target = put(bucket, mine, "data/mine")
    before = contents(bucket, "data/mine")
    site = refuse_imports(tmp_path, ("torch", "transformers", "datasets"))
    said = prepare(*words, "--output", target, code=BAD_INPUT, PYTHONPATH=site)
    assert "exists: pass --overwrite true" in said
    assert contents(bucket, "data/mine") == before
    # Another dataset takes its place, with nothing of the one before.
    bucket.put("data/mine/stray", b"stray")
    prepare(*words, "--output", target, "--overwrite", "true")
    assert_same_dataset(contents(bucket, "data/mine"), prepared)
    # Neither a run nor a corpus is replaced, whatever the flag says.
    put(bucket, corpus, "corpus")
    for more in ((), ("--overwrite", "true")):
        said = prepare(*words, "--output", f"s3://{BUCKET}/corpus", *more, code=BAD_INPUT)
        assert "no prepared dataset: name another" in said
    assert bucket.names("corpus/") == {f"corpus/{name}" for name in files.files_in(corpus)}


@pytest.mark.longer
@pytest.mark.parametrize("count", [1, 7])
def test_a_kill_leaves_no_dataset_and_the_next_start_replaces_it(
    tmp_path, bucket, texts, prepared, count
):
    corpus = texts / "corpus"
    target = f"s3://{BUCKET}/data/mine"
    words = ("--input", corpus, "--output", target, *PREPARE)
    prepare(*words, code=-9, FABRIC_LLM_FAILPOINT=f"mirror.part:count={count}")
    left = bucket.names("data/mine/")
    assert "data/mine/.preparing" in left and "data/mine/manifest.json" not in left
    with pytest.raises(Fault, match="holds no dataset"):
        fetched.folder(target)
    bucket.put("data/mine/train/data-00000-of-00009.arrow", b"of other flags")
    prepare(*words)
    assert_same_dataset(contents(bucket, "data/mine"), prepared)
    assert not [*(tmp_path / "cache").rglob("*.preparing")]


@pytest.mark.longer
def test_a_server_that_is_lost_meanwhile_costs_no_work(tmp_path, bucket, texts, prepared):
    target, corpus = f"s3://{BUCKET}/data/mine", texts / "corpus"
    words = ("--input", corpus, "--output", target, *PREPARE)
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(IMPATIENT)
    with proxied(os.environ["AWS_ENDPOINT_URL"]) as proxy:

        def answer(method, path, count):
            denied = method == "PUT" and path.endswith(".arrow")
            return (403, "<Error><Code>ExpiredToken</Code></Error>") if denied else None

        proxy.answer = answer
        given = {"AWS_ENDPOINT_URL": proxy.url, "PYTHONPATH": f"{site}{os.pathsep}{ROOT}"}
        said = prepare(*words, code=SAVE_FAILED, **given)
    assert "the credentials aren't accepted" in said
    assert "The same command goes on from there" in said
    assert "data/mine/manifest.json" not in bucket.names()
    assert [*(tmp_path / "cache").rglob("piece-*")]
    prepare(*words)
    assert_same_dataset(contents(bucket, "data/mine"), prepared)


def test_of_two_writers_one_waits_or_is_refused(tmp_path, mine, monkeypatch):
    place, over = f"file://{tmp_path}/out/mine", threading.Event()
    monkeypatch.setattr(storage, "LEASE_SECONDS", 1.0)
    other = Lease(Store(place), "another", 1.0)
    other.acquire()
    beats = threading.Thread(target=other.keep, args=[over])
    beats.start()
    with pytest.raises(Fault, match="is in use: process") as raised:
        storage.send(mine, place, False)
    over.set()
    beats.join()
    assert raised.value.code == UNWRITABLE and not (tmp_path / "out/mine/manifest.json").exists()
    # The other one was killed.
    storage.send(mine, place, False)
    assert sorted(files.files_in(tmp_path / "out/mine")) == sorted(files.files_in(mine))


@pytest.mark.parametrize("follows", [False, True])
def test_a_writer_that_wakes_destroys_nothing(tmp_path, mine, monkeypatch, follows):
    """It was suspended while another one took over and ended, of whose lease nothing is left, or
    while a third one has begun, whose lease has its own number."""
    out, bring, began = tmp_path / "out" / "mine", storage._bring, []
    place = f"file://{out}"

    def suspended(store, name, *words):
        bring(store, name, *words)
        if began:
            return
        second, third = (Lease(Store(place), owner, 0.2) for owner in ("second", "third"))
        began.append(second)
        second.acquire()
        assert second.number == 2
        for path in files.files_in(out):
            if not path.startswith(".leases"):
                (out / path).unlink()
        (out / "manifest.json").write_text("of the second")
        second.remove()
        if follows:
            third.acquire()
            assert third.number == 1
            began.append(third)

    monkeypatch.setattr(storage, "_bring", suspended)
    with pytest.raises(Fault, match=f"has taken over {place}") as raised:
        storage.send(mine, place, True)
    assert raised.value.code == UNWRITABLE
    left = [name for name in files.files_in(out) if not name.startswith(".leases")]
    assert left == ["manifest.json"] and (out / left[0]).read_text() == "of the second"
    if follows:
        began[1].check()


def test_another_dataset_below_is_left_alone(tmp_path, mine):
    """Also below what a start that was killed has left, and whatever the flag says."""
    for beside in (None, ".preparing", "manifest.json"):
        out = tmp_path / f"out-{beside}"
        shutil.copytree(mine, out / "below" / "nested")
        if beside:
            (out / beside).write_bytes(b"")
            (out / "dataset_dict.json").write_bytes(b"")
        before = {name: (out / name).read_bytes() for name in files.files_in(out)}
        for overwrite in (False, True):
            with pytest.raises(Fault, match="name another") as raised:
                storage.require_free(f"file://{out}", overwrite)
            assert raised.value.code == BAD_INPUT
            with pytest.raises(Fault, match="name another. The same command goes on"):
                storage.send(mine, f"file://{out}", overwrite)
        assert {name: (out / name).read_bytes() for name in files.files_in(out)} == before


def test_what_is_no_dataset_is_refused_without_a_list_of_it(tmp_path, monkeypatch):
    (tmp_path / "corpus" / "deep" / "a").mkdir(parents=True)
    (tmp_path / "corpus" / "deep" / "a" / "text").write_text("text")
    listed, objects = [], Store.objects
    listing = lambda own, name: listed.append(name) or objects(own, name)
    monkeypatch.setattr(Store, "objects", listing)
    with pytest.raises(Fault, match="holds 'deep', no prepared dataset"):
        storage.require_free(f"file://{tmp_path}/corpus", True)
    assert listed == [".leases"]


@pytest.mark.parametrize("flag", ["input", "output"])
@pytest.mark.parametrize("address", [*WRONG][:2])
def test_wrong_addresses_to_prepare(tmp_path, corpus, flag, address):
    words = {"input": corpus, "output": tmp_path / "out"} | {flag: address}
    given = [word for name, value in words.items() for word in (f"--{name}", value)]
    said = prepare(*given, *PREPARE, code=BAD_INPUT)
    assert WRONG[address] in said and "secret" not in said.splitlines()[0]


@pytest.mark.longer
def test_mistakes_of_prepare_at_a_server(tmp_path, bucket, corpus):
    local = ("--output", tmp_path / "out", *PREPARE)
    said = prepare("--input", f"s3://{BUCKET}/nothing/", *local, code=BAD_INPUT)
    assert "names no objects" in said
    words = ("--input", corpus, *PREPARE)
    said = prepare(*words, "--output", "s3://nobucket/x", code=BAD_INPUT)
    assert "no such bucket" in said


@pytest.mark.longer
def test_tasks_to_an_address(tmp_path, bucket, prepared):
    pytest.importorskip("lm_eval", reason="lm_eval isn't installed: pip install -e '.[tasks]'")
    path = write_task(tmp_path / "yaml", "first")
    target = f"s3://{BUCKET}/data/tasks"
    words = ("--tasks", path, "--tokenizer", prepared / "tokenizer", "--context_length", 64)
    for name in (tmp_path / "here", target):
        prepare(*words, "--output", name)
    made = contents(bucket, "data/tasks")
    assert made == {name: (tmp_path / "here" / name).read_bytes() for name in made}
    said = prepare(*words, "--output", target, code=BAD_INPUT)
    assert "exists: pass --overwrite true" in said
    prepare(*words, "--output", target, "--overwrite", "true")
    assert contents(bucket, "data/tasks") == made
