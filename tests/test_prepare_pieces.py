"""However often prepare_data.py is killed, and whoever makes the pieces: the same bytes."""

import gzip
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import datasets
import numpy as np
import pytest
from conftest import prepare
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from fabric_llm.base import work_folder
from fabric_llm.base.failpoints import VARIABLE
from fabric_llm.prepare import checks
from fabric_llm.prepare import prepare as prepare_module
from fabric_llm.prepare.tokenizer import train_byte_level_bpe
from prepare_arguments import parse_prepare

ROOT = Path(__file__).parents[1]
# Imports take many times as long as what is tested: this process has made them, and starts a fresh
# copy of itself for each line of its input, {"arguments", "environment", "errors"}. It prints the
# copy's number, and then its exit code.
SERVER = """
import json, os, sys, warnings
from fabric_llm.base.ending import in_one_sentence
from fabric_llm.prepare import checks, corpus, encoding, prepare
from prepare_arguments import PrepareArguments
corpus.SMALL_PIECE_BYTES = 4000
encoding.BATCH_CHARACTERS = 400
warnings.simplefilter("ignore")
for line in sys.stdin:
    given = json.loads(line)
    if not (child := os.fork()):
        os.dup2(os.open(given["errors"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), 2)
        os.environ.update(given["environment"])
        try:
            with in_one_sentence("prepare_data.py"):
                arguments = PrepareArguments(**given["arguments"])
                prepare.prepare(arguments, checks.check(arguments))
        except SystemExit as end:
            os._exit(end.code)
        os._exit(0)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@dataclass
class Done:
    returncode: int
    stderr: str


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A tokenizer, and text of about 60 KB in several kinds of files."""
    folder = tmp_path_factory.mktemp("corpus")
    generator = random.Random(0)
    words = [Path(os.__file__).read_text()[at : at + 6] for at in range(0, 6000, 6)]
    texts = [" ".join(generator.choices(words, k=generator.randrange(1, 60))) for _ in range(300)]
    train_byte_level_bpe(texts, vocab_size=400).save_pretrained(folder / "tokenizer")
    (folder / "in").mkdir()
    lines = [json.dumps({"text": text}) + "\n" for text in texts]
    lines[17] = "broken\n"
    (folder / "in" / "a.jsonl").write_text("".join(lines[:200]))
    (folder / "in" / "b.jsonl.gz").write_bytes(gzip.compress("".join(lines[200:280]).encode()))
    (folder / "in" / "c.txt").write_text("\n\n".join(texts[280:]) + "\n\n" + "a long line\n" * 400)
    for number, text in enumerate(texts[:30]):
        (folder / "in" / f"d{number}.txt").write_text(text)
    return folder


@pytest.fixture(scope="module")
def start(corpus):
    """start(output, failpoint, **changes): begins a preparation; returns (its process, what waits
    for its end)."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    server = subprocess.Popen([sys.executable, "-c", SERVER], env=environment, **pipes)

    def start(output, failpoint=None, **changes):
        errors = output.parent / "errors"
        errors.touch()  # a child that is killed at once hasn't opened it
        given = {"arguments": {**arguments(corpus, output), **changes}, "errors": str(errors)}
        given["environment"] = {VARIABLE: failpoint} if failpoint else {}
        print(json.dumps(given), file=server.stdin, flush=True)
        child = int(server.stdout.readline())

        def wait():
            code = int(server.stdout.readline())
            stderr = errors.read_text()
            errors.unlink()
            return Done(code, stderr)

        return child, wait

    yield start
    server.stdin.close()
    assert server.wait() == 0
    server.stdout.close()


@pytest.fixture(scope="module")
def call(start):
    return lambda *words, **changes: start(*words, **changes)[1]()


@pytest.fixture
def kill(call):
    """kill(output, failpoint, **changes): a preparation that is killed there."""

    def kill(output, failpoint, **changes):
        done = call(output, f"{failpoint}:do=kill", **changes)
        assert done.returncode == -signal.SIGKILL, (failpoint, done.stderr)

    return kill


@pytest.fixture(scope="module")
def undisturbed(call, tmp_path_factory):
    """A preparation that nobody disturbed, by one process."""
    folder = tmp_path_factory.mktemp("undisturbed")
    done = call(folder / "out")
    assert done.returncode == 0, done.stderr
    return folder / "out"


def arguments(corpus, output):
    given = {"input": [str(corpus / "in")], "output": str(output)}
    given |= {"tokenizer": str(corpus / "tokenizer"), "context_length": 32}
    return given | dict(validation_fraction=0.1, document_separator="\\n\\n", deduplicate="exact")


def assert_same(one, other):
    """Two datasets have the same files. A manifest names its folder, and has a hash of itself."""
    contents = []
    for output in (one, other):
        files = [path for path in output.rglob("*") if path.is_file()]
        content = {str(path.relative_to(output)): path.read_bytes() for path in files}
        own = {"output": "", "made_by": {}, "sha256": ""}
        content["manifest.json"] = json.loads(content["manifest.json"]) | own
        contents.append(content)
    assert contents[0] == contents[1] and len(contents[0]) > 8


@pytest.mark.longer
def test_kills_at_named_places_change_nothing(call, kill, undisturbed, tmp_path):
    points = "prepare.documents:count=150 prepare.mark prepare.marked:count=3 prepare.mark:count=4"
    for point in [*points.split(), "prepare.rows"]:
        kill(tmp_path / "out", point)
        assert not (tmp_path / "out").exists()
    done = call(tmp_path / "out", num_workers=2)
    assert done.returncode == 0 and "Going on: " not in done.stderr  # all pieces were done
    assert_same(tmp_path / "out", undisturbed)
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.longer
def test_processes_change_nothing_and_one_that_dies_is_named(call, undisturbed, tmp_path):
    done = call(tmp_path / "out", "prepare.marked:count=2:do=kill", num_workers=2)
    assert done.returncode == 71 and "a process that tokenizes was killed" in done.stderr
    assert "the same command goes on" in done.stderr
    done = call(tmp_path / "out", num_workers=2)
    assert done.returncode == 0, done.stderr
    assert "Going on: " in done.stderr
    assert_same(tmp_path / "out", undisturbed)


@pytest.mark.longer
def test_a_full_disk_in_a_process_is_one_sentence(call, tmp_path):
    done = call(tmp_path / "out", "prepare.mark:count=2:do=enospc", num_workers=2)
    assert done.returncode == 74 and "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr


def test_another_preparation_is_told_before_the_inputs_are_found(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(checks, "find_sources", None)
    flags = ["--input", corpus, "--tokenizer", tmp_path, "--output", tmp_path / "out"]
    said = "out is being made by another process: wait for it"
    with work_folder.locked(tmp_path / "out"), pytest.raises(ValueError, match=said) as raised:
        checks.check(parse_prepare([str(word) for word in flags]))
    assert raised.value.code == 73 and os.listdir(tmp_path) == [".out.preparing"]


def test_what_another_process_has_finished_meanwhile_stays(corpus, tmp_path, monkeypatch):
    """Without --overwrite: it was there when this one got the lock."""
    given = arguments(corpus, tmp_path / "out")
    plan = prepare_module.plan

    def meanwhile(*of):
        monkeypatch.setattr(prepare_module, "plan", plan)
        prepare(**given)
        return plan(*of)

    monkeypatch.setattr(prepare_module, "plan", meanwhile)
    with pytest.raises(ValueError, match="exists and is not empty: pass --overwrite true"):
        prepare(**given)
    assert os.listdir(tmp_path) == ["out"]


def test_a_work_folder_that_is_removed_while_it_is_locked_is_made_anew(tmp_path, monkeypatch):
    """By a process that was ready just then: the lock would be that of a file without a name."""
    folder, lock, removed = work_folder.beside(tmp_path / "out"), work_folder.lock, []

    def after_removal(*given):
        if not removed:
            removed.append(shutil.rmtree(folder))
        lock(*given)

    monkeypatch.setattr(work_folder, "lock", after_removal)
    with work_folder.locked(tmp_path / "out") as made:
        assert removed and (made / "lock").is_file()
        with pytest.raises(ValueError, match="is being made by another process"):
            with work_folder.locked(tmp_path / "out"):
                pass


def test_the_lock_of_a_work_folder_is_removed_last(tmp_path, monkeypatch):
    with work_folder.locked(tmp_path / "out") as made:
        (made / "piece").mkdir()
        in_it = lambda path: (made / "lock").stat() and path.rmdir()  # noqa: E731
        monkeypatch.setattr(work_folder.shutil, "rmtree", in_it)
        work_folder.remove(made)
    assert os.listdir(tmp_path) == []


def test_work_with_another_tokenizer_is_thrown_away(call, kill, undisturbed, tmp_path):
    kill(tmp_path / "out", "prepare.rows", tokenizer=None, train_tokenizer=300)
    done = call(tmp_path / "out")
    assert done.returncode == 0, done.stderr
    said = "The work of a former preparation with other inputs or flags was thrown away."
    assert said in done.stderr
    assert_same(tmp_path / "out", undisturbed)


def test_pieces_of_other_flags_are_kept_where_these_do_not_matter(
    call, kill, undisturbed, tmp_path
):
    """A separator divides texts: pieces of JSON lines are the same."""
    kill(tmp_path / "out", "prepare.rows", document_separator="none")
    done = call(tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert re.search(r"Going on: ([1-9]\d*) of (?!\1 )\d+ pieces are done", done.stderr)
    assert_same(tmp_path / "out", undisturbed)


def test_a_bad_file_that_is_taken_away_takes_no_finished_piece_with_it(
    call, corpus, undisturbed, tmp_path
):
    shutil.copytree(corpus / "in", tmp_path / "in")
    (tmp_path / "in" / "e.jsonl").write_text('{"body": "a"}\n')
    failed = call(tmp_path / "out", input=[str(tmp_path / "in")])
    assert failed.returncode == 2 and "none of 1 records of" in failed.stderr
    assert "the same command" not in failed.stderr
    finished = len(list((tmp_path / ".out.preparing").rglob("piece-*.json")))
    (tmp_path / "in" / "e.jsonl").unlink()
    done = call(tmp_path / "out", input=[str(tmp_path / "in")])
    found = re.search(r"Going on: (\d+) of (\d+) pieces are done", done.stderr)
    assert done.returncode == 0 and int(found[1]) == finished > 3, done.stderr


@pytest.mark.parametrize("stays", ["eos", "tokenizer"])
def test_another_end_of_texts_is_another_dataset(call, kill, corpus, tmp_path, stays):
    """Killed, eos_token corrected, and started again: one token ends all documents."""
    shutil.copytree(corpus / "tokenizer", tmp_path / "tokenizer")
    backend = Tokenizer.from_file(str(tmp_path / "tokenizer" / "tokenizer.json"))
    backend.add_special_tokens(["</s>"])
    wrong, right = (
        PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos)
        for eos in ("</s>", "<|endoftext|>")
    )
    wrong.save_pretrained(tmp_path / "tokenizer")
    given = dict(tokenizer=str(tmp_path / "tokenizer"), context_length=2)
    kill(tmp_path / "out", "prepare.marked:count=3", **given)
    if stays == "tokenizer":
        right.save_pretrained(tmp_path / "tokenizer")
    done = call(tmp_path / "out", **given)
    assert done.returncode == 0 and ("Going on" in done.stderr) == (stays == "eos"), done.stderr
    rows = datasets.load_from_disk(tmp_path / "out")
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    for name, split in manifest["splits"].items():
        ends = np.array(rows[name]["input_ids"]) == manifest["eos_token_id"]
        assert ends.sum() + split["dropped_tokens"] >= split["documents"]


def test_work_that_was_half_removed_is_not_used(call, kill, undisturbed, tmp_path):
    kill(tmp_path / "out", "prepare.rows")
    work = tmp_path / ".out.preparing"
    with pytest.MonkeyPatch.context() as patch:  # killed after it has begun to remove
        marked = max(path.with_suffix("") for path in work.glob("piece-*.json"))
        patch.setattr(Path, "iterdir", lambda at: marked.with_suffix(".tokens").unlink() or [])
        work_folder.remove(work)
    assert marked.with_suffix(".json").is_file()
    assert call(tmp_path / "out").returncode == 0
    assert_same(tmp_path / "out", undisturbed)


def test_another_packing_keeps_what_is_tokenized(kill, tmp_path):
    def times():
        pieces = (tmp_path / ".out.preparing").glob("piece-*.json")
        return {path.name: path.stat().st_mtime_ns for path in pieces}

    kill(tmp_path / "out", "prepare.rows", context_length=16)
    before = times()
    assert len(before) > 5
    kill(tmp_path / "out", "prepare.publish", packing="best_fit")
    assert times() == before


def test_a_kill_after_the_new_dataset_is_in_its_place_changes_nothing(kill, call, tmp_path):
    """What it replaced is then still in the work folder, where the next start puts the new one."""
    assert call(tmp_path / "out").returncode == 0
    kill(tmp_path / "out", "prepare.publish", overwrite=True)
    assert not (tmp_path / "out").exists()
    (tmp_path / ".out.preparing" / "dataset").rename(tmp_path / "out")
    again = call(tmp_path / "out", overwrite=True)
    assert again.returncode == 0, again.stderr
    assert not (tmp_path / ".out.preparing").exists()


@pytest.mark.slow
def test_a_hundred_kills_at_random_times_change_nothing(start, undisturbed, tmp_path):
    generator, kills, ended, longest = random.Random(1), 0, False, 0.0
    while kills < 100 or not ended:  # the last is left alone
        began = time.monotonic()
        child, wait = start(tmp_path / "out", num_workers=2, overwrite=True)
        if longest and kills < 100:
            time.sleep(generator.uniform(0, 1.1) * longest)
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        done = wait()
        ended = done.returncode == 0
        if done.returncode == -signal.SIGKILL:
            kills += 1
            continue
        assert done.returncode == 0, done.stderr
        longest = longest or time.monotonic() - began
        assert_same(tmp_path / "out", undisturbed)
    assert os.listdir(tmp_path) == ["out"]
