"""How prepare_data.py ends where it can't go on: one sentence, the code of docs/faults.md, and
nothing half-written."""

import os
import resource
import signal
import subprocess
import sys

import pytest
from conftest import ended, parts

import prepare_data
from arguments import ROOT
from fabric_llm.base.failpoints import VARIABLE

WORDS = "the quick brown fox jumps over the lazy dog and runs away".split()


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number in range(40):
        (folder / f"{number}.txt").write_text(" ".join(WORDS[number % 7 :] * 5))
    return folder


@pytest.fixture
def run(corpus, tmp_path, capsys, monkeypatch):
    """Call prepare_data.py, output `out`, stopped or failing at a failpoint; returns (code, lines
    of stderr)."""

    def call(*flags, failpoint=None, output=tmp_path / "out"):
        if failpoint is not None:
            monkeypatch.setattr("fabric_llm.base.failpoints._reached", {})
            monkeypatch.setenv(VARIABLE, failpoint)
        sizes = "--train_tokenizer 300 --context_length 16 --validation_fraction 0.3".split()
        words = ("--input", corpus, "--output", output, *sizes, *flags)
        code = ended(prepare_data.main, *words)
        monkeypatch.delenv(VARIABLE, raising=False)
        error = capsys.readouterr().err
        assert "Traceback" not in error
        return code, [line for line in error.splitlines() if line.startswith("prepare_data.py")]

    return call


def handlers():
    return [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]


@pytest.mark.parametrize("action", ["int", "term"])
@pytest.mark.parametrize(
    ("point", "more", "left"),
    [
        ("prepare.documents:count=7", "", ["corpus"]),
        # Everything is tokenized by then.
        (
            "prepare.rows",
            "; the same command goes on from there",
            [".out.preparing", "corpus"],
        ),
    ],
)
def test_a_stop_leaves_nothing_and_says_so(run, tmp_path, point, more, left, action):
    before = handlers()
    code, said = run(failpoint=f"{point}:do={action}")
    sentence = f"stopped on request; nothing was written to {tmp_path / 'out'}{more}."
    assert (code, said) == (75, [f"prepare_data.py: error: {sentence}"])
    assert parts(tmp_path) == left
    assert handlers() == before


def test_a_stop_while_it_is_published_comes_too_late(run, tmp_path):
    """It would leave neither the old dataset nor the new one where the output should be."""
    assert run()[0] == 0
    before = (tmp_path / "out" / "manifest.json").read_bytes()
    code, said = run("--overwrite", "true", "--seed", 7, failpoint="prepare.publish:do=int")
    assert (code, said) == (0, [])
    assert (tmp_path / "out" / "manifest.json").read_bytes() != before
    assert parts(tmp_path) == ["corpus", "out"]


def test_a_stop_leaves_a_former_dataset_as_it_was(run, tmp_path):
    assert run()[0] == 0
    before = (tmp_path / "out" / "manifest.json").read_bytes()
    assert run("--overwrite", "true", failpoint="prepare.rows:do=int")[0] == 75
    assert (tmp_path / "out" / "manifest.json").read_bytes() == before
    assert parts(tmp_path) == [".out.preparing", "corpus", "out"]
    assert run("--overwrite", "true")[0] == 0 and parts(tmp_path) == ["corpus", "out"]
    assert (tmp_path / "out" / "manifest.json").read_bytes() == before


AT_IMPORT = """
import os, signal, sys
class Ask:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["STOP_AT"]:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Ask())
"""


IMPORTS = [
    (words, module)
    for words, modules in (
        (
            "prepare_data.py --input in --train_tokenizer 300 --output out",
            "prepare_arguments fabric_llm.prepare.checks datasets fabric_llm.prepare.prepare",
        ),
        (
            "export_hf.py in --output out",
            "fabric_llm.weights.checks torch fabric_llm.weights.export",
        ),
    )
    for module in modules.split()
]


@pytest.mark.quick_cases(r"prepare_data.*-(prepare_arguments|datasets)\]|export_hf.*-torch")
@pytest.mark.parametrize(("words", "module"), IMPORTS)
def test_a_stop_during_import(tmp_path, words, module):
    (tmp_path / "sitecustomize.py").write_text(AT_IMPORT)
    (tmp_path / "in").mkdir()
    for name in ("a.txt", "b.txt", "MANIFEST.json"):
        (tmp_path / "in" / name).write_text("{}")
    own = {**os.environ, "PYTHONPATH": str(tmp_path), "STOP_AT": module}
    script, *flags = words.split()
    command, how = [sys.executable, str(ROOT / script), *flags], {"text": True, "timeout": 120}
    done = subprocess.run(command, cwd=tmp_path, env=own, capture_output=True, **how)
    assert done.returncode == 75, done.stderr
    assert done.stderr.startswith(f"{script}: error: stopped on request; nothing was written")
    assert len(done.stderr.splitlines()) == 1 and not (tmp_path / "out").exists()


def test_a_stop_of_all_processes_that_tokenize(corpus, tmp_path):
    """As by a closed terminal, while one of them is still at its imports."""
    whole_group = AT_IMPORT.replace("kill(os.getpid(), signal.SIGINT", "killpg(0, signal.SIGHUP")
    of_worker = whole_group.replace("if name", "if '--multiprocessing-fork' in sys.orig_argv and name")
    (tmp_path / "sitecustomize.py").write_text(of_worker)
    own = {**os.environ, "PYTHONPATH": str(tmp_path), "STOP_AT": "tokenizers"}
    words = f"{ROOT}/prepare_data.py --input {corpus} --train_tokenizer 300 --num_workers 2 --output"
    command, how = [sys.executable, *words.split(), "out"], {"text": True, "start_new_session": True}
    how["preexec_fn"] = lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also under nohup
    done = subprocess.run(command, cwd=tmp_path, env=own, capture_output=True, timeout=120, **how)
    said = "prepare_data.py: error: stopped on request; nothing was written to out.\n"
    assert (done.returncode, done.stderr) == (75, said)


STOPPED = "stopped: error: stopped on request; nothing was written.\n"


@pytest.mark.parametrize(
    ("body", "at_end", "ends"),
    [
        # As a dataclass is made, of which torch has hundreds. Python would end `python -m` with 130.
        ("exec('import os; os.kill(os.getpid(), 2); [*range(10)]')", "0", (75, STOPPED)),
        # As the modules are taken down.
        ("pass", "os.kill(os.getpid(), 15)", (0, "")),
    ],
)
def test_a_stop_at_odd_times(tmp_path, body, at_end, ends):
    (tmp_path / "stopped.py").write_text(
        "import os, sys\nfrom fabric_llm.base.ending import in_one_sentence\n"
        f"class Last:\n    def __del__(self, os=os):\n        {at_end}\n"
        f"last = Last()\nwith in_one_sentence('stopped'):\n    {body}\n"
    )
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}"}
    command = [sys.executable, "-m", "stopped"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == ends


@pytest.mark.parametrize(("rank", "module"), [(0, "arguments"), (1, "site"), (1, "fabric_llm.base.names")])
def test_a_stop_of_a_run_that_has_just_begun(tmp_path, toys, rank, module):
    """Of all its processes, as by Ctrl-C, while one of them is still at its first imports."""
    at_import = AT_IMPORT.replace("os.kill(os.getpid(),", "os.killpg(0,").replace(
        "if name", f"if os.environ.get('RANK', '0') == '{rank}' and name"
    )
    # The module `site` is imported before any file of ours.
    here = f"if os.environ.get('RANK') == '{rank}' and os.environ['STOP_AT'] == 'site':\n"
    at_import += f"{here}    os.killpg(0, signal.SIGINT)\n"
    (tmp_path / "sitecustomize.py").write_text(at_import)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "STOP_AT": module}
    flags = ["--model_name", toys / "llama", "--train_data_dir", toys / "data", "--devices", 2]
    done = subprocess.run(
        [sys.executable, *map(str, [ROOT / "train.py", *flags])],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        start_new_session=True,
    )
    said = "train.py: error: stopped on request before training began: nothing was lost.\n"
    assert (done.returncode, done.stderr) == (75, said)


# ------------------------------------------------------------------------------- the disk


@pytest.mark.parametrize("point", ["prepare.documents:count=7", "prepare.rows", "prepare.publish"])
def test_a_full_disk_is_one_sentence(run, tmp_path, point):
    code, [said] = run(failpoint=f"{point}:do=enospc")
    full = f"output {tmp_path / 'out'} cannot be written ([Errno 28] No space left on device"
    assert code == 74 and full in said
    assert "preparing needs 6 bytes a token, of which 2 stay, or 12 and 4 " in said
    assert said.endswith("iB were free there at the start.")
    # What is tokenized stays, for a start that finds more room.
    kept = [] if "documents" in point else [".out.preparing"]
    assert parts(tmp_path) == [*kept, "corpus"]
    assert run()[0] == 0 and parts(tmp_path) == ["corpus", "out"]


def test_room_is_asked_for(run, tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda folder: type("Usage", (), {"free": 2**20}))
    code, [said] = run()
    assert code == 74 and "The dataset needs 16.0 MiB, of which 16.0 MiB are a margin, but " in said
    assert "has 1.0 MiB free: make room, or take an" in said
    assert parts(tmp_path) == [".out.preparing", "corpus"]


def test_files_that_may_not_grow(run, tmp_path):
    """As under a quota: a real error of the kernel, in the tokenizer's own code or in ours."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
    try:
        code, [said] = run()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert code == 74 and "File too large" in said and parts(tmp_path) == ["corpus"]


def test_an_output_that_cannot_be_made(run, tmp_path):
    (tmp_path / "file").write_text("x")
    code, [said] = run(output=tmp_path / "file" / "out")
    assert code == 73 and "file/out cannot be written: Not a directory." in said


def test_an_input_that_cannot_be_read(run, corpus, monkeypatch):
    def refused(path, *more):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr("fabric_llm.prepare.documents.opened", refused)  # root may read everything
    sentence = f"{str(corpus / '0.txt')!r} can't be opened: Permission denied."
    assert run() == (2, [f"prepare_data.py: error: {sentence}"])
