"""The verifier calls a good run good, names whatever is wrong with a bad one, and its drill sees a
difference."""

import json
import math
import os
import pickle
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import flip
from ranks import toy_run, train_ranks
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from fabric_llm.base import files
from fabric_llm.base.describing import describe
from fabric_llm.base.files import MANIFEST
from fabric_llm.checkpoint import keep
from fabric_llm.verify import __main__ as verify_main
from fabric_llm.verify import drill, inspect_run

ROOT = Path(__file__).parent.parent
KINDS = ("full", "sharded")


@pytest.fixture(scope="module")
def runs(toys, tmp_path_factory):
    """Finished runs `full` and `sharded` of two FSDP ranks, checkpoints at 2, 4 and 6, and `other`
    of another seed."""
    output = tmp_path_factory.mktemp("runs")
    flags = "--global_batch_size 4 --save_step_interval 2 --eval_iters 2 --max_step 6 "
    flags += "--strategy fsdp --lr 1e-3"
    flags = (*toy_run(toys, output, model="llama-tied"), *flags.split(), "--run_name")
    for name, seed in (("full", 1), ("sharded", 1), ("other", 2)):
        kind = "full" if name == "full" else "sharded"
        train_ranks(2, *flags, name, "--state_dict_type", kind, "--seed", seed)
    return output


@pytest.fixture
def run(runs, tmp_path, monkeypatch):
    """A copy of the run `sharded`, to damage; temporary files land beside it."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(runs / "sharded", "run")
    return Path("run")


def verified(capsys, *argv):
    """(exit code, stdout, stderr) of the verifier."""
    try:
        code = verify_main.main([str(word) for word in argv])
    except SystemExit as ended:
        code = ended.code
    return code, *capsys.readouterr()


def reseal(folder):
    """Make the manifest of a checkpoint that was tampered with agree with its files."""
    document = json.loads((folder / MANIFEST).read_text())
    del document["sha256"]
    document["files"] = describe(folder, set(files.files_in(folder)) - {MANIFEST})
    (folder / MANIFEST).write_bytes(files.encode(document))


def edit_lines(file, change):
    lines = file.read_text().splitlines(keepends=True)
    change(lines)
    file.write_text("".join(lines))


def edit_json(file, **values):
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


# ------------------------------------------------------------------------------- a run


def test_rows_that_are_too_many_to_compare_are_not_called_read_by_one_rank(
    runs, monkeypatch, capsys
):
    _, out, _ = verified(capsys, runs / "full", "--no_export")
    assert out.count("were each read by one rank") == 3
    monkeypatch.setattr(inspect_run, "MAX_ROWS", 1)
    code, out, error = verified(capsys, runs / "full", "--no_export")
    assert (code, error, out.count("Note: ")) == (0, "", 3)
    assert "read by one rank" not in out and "plain transformers" not in out


@pytest.mark.longer
@pytest.mark.parametrize("kind", KINDS)
def test_a_healthy_run_passes_and_gets_a_certificate(runs, tmp_path, monkeypatch, capsys, kind):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    run, before = runs / kind, describe(runs / kind, files.files_in(runs / kind))
    code, out, error = verified(capsys, run, "--output", tmp_path / "certificate.json")
    assert (code, error) == (0, "")
    said = ("step-00000002", "step-00000006", "code 0, done", "Verified with plain", "Certificate")
    assert all(words in out for words in said)
    document = json.loads((tmp_path / "certificate.json").read_text())
    assert document["verdict"] == "whole" and document["findings"] == document["notes"] == []
    manifest = files.sha256(run / "step-00000006" / MANIFEST)
    newest = {"name": "step-00000006", "step": 6, "manifest_sha256": manifest}
    assert document["newest"] == newest
    counts, paths = document["counts"], [p for p in run.glob("step-*/**/*") if p.is_file()]
    assert counts["checkpoints"] == 3 and counts["files"] == len(paths)
    assert counts["bytes"] == sum(p.stat().st_size for p in paths)
    assert counts["tensors"] == sum(len(load_file(p)) for p in paths if p.suffix == ".safetensors")
    assert counts["parameters"] == document["export"]["parameters"]
    assert counts["training_lines"] == 6
    assert os.listdir(tmp_path) == ["certificate.json"], "nothing is left"
    assert describe(run, files.files_in(run)) == before, "nothing is changed"


PART = "step-00000004/trainer/optimizer/shard-00002-model-00001-of-00001.safetensors"


def test_every_damaged_file_is_named(run, capsys):
    flip(run / PART)
    (run / "step-00000004" / "config.json").unlink()
    (run / "step-00000006" / "more.txt").write_text("x")
    (run / "step-00000006" / ".DS_Store").write_text("no damage")
    code, out, error = verified(capsys, run)
    wrong = [line for line in out.splitlines() if "WRONG" in line]
    assert code == 66 and len(wrong) == 3
    assert error.endswith("And 2 more.\n") and len(error.splitlines()) == 1
    assert "step-00000004" in wrong[0] and "config.json is missing" in wrong[0]
    assert PART.removeprefix("step-00000004/") in wrong[1] and "has changed" in wrong[1]
    assert "step-00000006" in wrong[2] and "more.txt isn't listed" in wrong[2]


NORM, MATRIX = "causal_lm.model.norm.weight", "causal_lm.model.layers.0.mlp.up_proj.weight"


def weights_of(folder, name):
    """The file with the largest part of a weight."""

    def size(file):
        with safe_open(file, framework="pt") as opened:
            return math.prod(opened.get_slice(name).get_shape()) if name in opened.keys() else 0

    return max(folder.glob("weights/shard-*.safetensors"), key=size)


def rewrite(file, change):
    """`change` the tensors of a file as somebody would who can compute hashes as well."""
    with safe_open(file, framework="pt") as opened:
        header = opened.metadata()
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, header)


@pytest.mark.parametrize(
    ("name", "change", "word"),
    [
        (NORM, lambda tensors: tensors[NORM][3].fill_(torch.nan), "NaN"),
        (MATRIX, lambda tensors: tensors.update({MATRIX: tensors[MATRIX][:-1]}), "up_proj.weight"),
    ],
)
def test_what_a_matching_manifest_hides_in_sharded_weights(run, capsys, name, change, word):
    folder = run / "step-00000004"
    rewrite(weights_of(folder, name), change)
    reseal(folder)
    code, out, error = verified(capsys, run)
    assert code == 66 and word in error and "step-00000004" in error and "weights" in error


def test_a_rank_whose_part_is_missing_under_a_matching_manifest(run, capsys):
    (run / PART).unlink()
    reseal(run / "step-00000004")
    code, _, error = verified(capsys, run, "--no_export")
    assert code == 66 and "trainer/optimizer" in error and "step-00000004" in error


PLAIN_NORM, PLAIN_MATRIX = (name.removeprefix("causal_lm.") for name in (NORM, MATRIX))


def transpose(tensors):
    tensors[PLAIN_MATRIX] = tensors[PLAIN_MATRIX].T.contiguous()


@pytest.mark.quick_cases(r"lose")
@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda tensors: tensors[PLAIN_NORM][3].fill_(torch.inf), "infinity"),
        (transpose, "mlp.up_proj.weight"),
        (lambda tensors: tensors.pop(PLAIN_NORM), "model.norm.weight"),
    ],
    ids=["infinity", "transpose", "lose"],
)
def test_what_a_matching_manifest_hides_in_full_weights(runs, tmp_path, capsys, change, word):
    run = shutil.copytree(runs / "full", tmp_path / "run")
    file = run / "step-00000006" / "model.safetensors"
    rewrite(file, change)
    reseal(file.parent)
    code, out, error = verified(capsys, run)
    assert code == 66 and word in error and str(file.parent) in error and "wasn't exported" in out


def test_a_checkpoint_under_another_step(run, capsys):
    shutil.rmtree(run / "step-00000006")
    shutil.copytree(run / "step-00000004", run / "step-00000006")
    code, out, error = verified(capsys, run)
    assert code == 66 and "step-00000006/MANIFEST.json" in error
    assert "step 4, not of step 6" in error
    assert "progress.json' is that of step 4, not of step 6" in out


def test_a_checkpoint_that_is_pruned_meanwhile_is_no_failure(run, capsys, monkeypatch):
    def prune(path, hashes=False):
        if path.name == "step-00000002":
            shutil.rmtree(path)
        return check(path, hashes)

    check = keep.verified
    monkeypatch.setattr(keep, "verified", prune)
    code, out, error = verified(capsys, run, "--no_export")
    assert (code, error) == (0, "") and "step-00000002 was pruned meanwhile" in out


@pytest.mark.parametrize("status", [{"code": 75, "step": 7}, {"code": 0, "step": None}])
def test_steps_that_nobody_saved_are_no_damage(run, capsys, status):
    """Ended by a second signal; or extended and killed, and then the first command in a restart
    loop."""
    edit_json(run / "STATUS.json", **status)
    line = json.loads((run / "metrics.jsonl").read_text().splitlines()[-2])
    line |= {"step": 7, "tokens": line["tokens"] // line["step"] * 7}
    edit_lines(run / "metrics.jsonl", lambda lines: lines.append(json.dumps(line) + "\n"))
    code, out, error = verified(capsys, run, "--no_export")
    assert (code, error) == (0, "") and "a resumed run writes them anew" in out


@pytest.mark.parametrize("content", ["{", "[]", '{"code": 0}', '{"last_durable_step": "x"}'])
def test_a_status_that_is_none(run, capsys, content):
    (run / "STATUS.json").write_text(content)
    code, _, error = verified(capsys, run, "--no_export")
    assert code == 66 and "STATUS.json" in error and len(error.splitlines()) == 1


def test_the_newest_checkpoint_is_gone(run, capsys):
    shutil.rmtree(run / "step-00000006")
    code, out, error = verified(capsys, run, "--no_export")
    assert code == 66 and "STATUS.json" in error and "step 6" in error
    assert "lines of steps 5 to 6, after the last checkpoint" in out


def replace(number, **values):
    """A change of a line of metrics.jsonl."""

    def change(lines):
        lines[number] = json.dumps({**json.loads(lines[number]), **values}) + "\n"

    return change


def swap(lines):
    lines[3], lines[4] = lines[4], lines[3]


def cut(lines):
    lines[-1] = lines[-1][:9]


@pytest.mark.longer
@pytest.mark.parametrize(
    ("change", "words"),
    [  # lines: evaluation of step 0, steps 1 to 6, evaluation of step 6
        (lambda lines: lines.insert(3, lines[3]), "line 5 repeats step 3 of line 4"),
        (lambda lines: lines.append(lines[-1]), "more than one evaluation of step 6"),
        (lambda lines: lines.pop(3), "no line of step 3"),
        (lambda lines: lines.insert(3, "{\n"), "line 4 isn't a JSON object"),
        (swap, "goes back from step 4 to step 3"),
        (replace(4, tokens=5), "line 5 has 5 tokens"),
        (replace(4, tokens=385), "385 tokens at step 4, its checkpoint 384"),
        (replace(4, tokens="many"), "line 5 isn't a JSON object"),
        (replace(3, loss=None), "no finite loss in line 4"),
        (
            lambda lines: lines.append('{"step": 6, "eval_loss": 1' + "0" * 400 + "}\n"),
            "no finite eval_loss in line 9",
        ),
        (cut, "line 8 isn't a JSON object"),
        (lambda lines: lines.append('{"step": 7, "eval_loss": 4.0}\n'), "lines of steps 7 to 7"),
        (replace(-1, eval_loss=4.0), "says 4.0 as the eval_loss, the checkpoint of step 6"),
        (
            replace(-1, eval={"validation": {"loss": 4.0}}),
            "says 4.0 as the loss of validation, the checkpoint of step 6",
        ),
    ],
)
def test_metrics_that_are_not_one_whole_curve(run, capsys, change, words):
    edit_lines(run / "metrics.jsonl", change)
    code, out, error = verified(capsys, run, "--no_export")
    assert code == 66 and "metrics.jsonl" in error and words in out


def test_a_killed_run_is_good_and_a_skipped_step_has_no_loss(run, capsys):
    edit_json(run / "STATUS.json", code=None, reason="running")

    def killed(lines):
        replace(3, loss=None)(lines)
        lines.insert(3, '{"step": 3, "verdict": "skip", "position": 8, "reason": "loss nan"}\n')
        seventh = {**json.loads(lines[-2]), "step": 7, "tokens": 7 * 96}
        lines += [json.dumps(seventh) + "\n", '{"step": 8, "lo']

    edit_lines(run / "metrics.jsonl", killed)
    code, out, error = verified(capsys, run, "--no_export")
    assert (code, error) == (0, "")
    for words in ("still running, or killed", "lines of steps 7 to 7", "cut off by a kill"):
        assert words in out


def test_lines_are_asked_for_as_each_part_of_the_run_logged(run, capsys):
    """A run that logged each second step, and each since it was resumed at step 4."""
    for step, every, after in ((2, 2, 0), (4, 2, 0), (6, 1, 4)):
        folder = run / f"step-0000000{step}"
        logged = {"every": every, "after": after}
        edit_json(folder / "trainer" / "progress.json", logged=logged)
        reseal(folder)
    edit_lines(run / "metrics.jsonl", lambda lines: lines.pop(3))
    assert verified(capsys, run, "--no_export")[0] == 0
    edit_lines(run / "metrics.jsonl", lambda lines: lines.pop(4))
    code, _, error = verified(capsys, run, "--no_export")
    assert code == 66 and "no line of step 5." in error
    # the first step of a process is logged whatever the interval is
    edit_lines(run / "metrics.jsonl", lambda lines: lines.pop(1))
    code, _, error = verified(capsys, run, "--no_export")
    assert code == 66 and "no line of step 1, 5." in error


def change_logits(tensors):
    tensors["logits"] += torch.randn_like(tensors["logits"])


@pytest.mark.quick_cases(r"change_logits")
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (change_logits, "isn't the model that was trained"),
        (lambda tensors: tensors.pop("positions"), "positions"),
    ],
)
def test_logits_that_are_not_those_of_training(run, capsys, change, words):
    rewrite(run / "step-00000006" / "trainer" / "probe.safetensors", change)
    reseal(run / "step-00000006")
    code, _, error = verified(capsys, run)
    assert code == 66 and "step-00000006" in error and words in error


def test_no_room_for_the_export(run, capsys, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda folder: type("Usage", (), {"free": 2**20}))
    code, _, error = verified(capsys, run)
    assert code == 2 and "--no_export" in error and len(error.splitlines()) == 1


def test_what_could_run_code_is_refused(run, capsys):
    (run / "step-00000002" / "a.txt").write_text("x")
    (run / "step-00000002" / "weights.bin").write_bytes(pickle.dumps(1))
    flip(run / PART)
    code, out, _ = verified(capsys, run, "--no_export")
    assert code == 77 and "weights.bin" in out and PART.removeprefix("step-00000004/") in out


def test_no_run_no_checkpoint_and_bad_arguments(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    code, _, error = verified(capsys, tmp_path / "empty")
    assert code == 66 and "holds no complete checkpoint" in error
    (tmp_path / "empty" / "arguments.yaml").write_text("lr: 1\n")
    code, said, error = verified(capsys, tmp_path / "empty")
    assert code == 66 and "has no checkpoint yet, so there is nothing to verify" in error
    assert "WRONG" not in said and "damaged" not in said
    (tmp_path / "empty" / "STATUS.json").write_text('{"last_durable_step": 4}')
    code, said, error = verified(capsys, tmp_path / "empty")
    assert code == 66 and "damaged" in said
    code, _, error = verified(capsys, "--drill", "--steps", 4, "--config", "mine.yaml")
    meant = "python -m fabric_llm.verify --drill --steps 4 -- --config mine.yaml"
    assert code == 2 and error.endswith(f"-- comes before the flags of the run: {meant}\n")
    bad = [[tmp_path, "--", "--devices", 2], ["--drill", "--steps", 2]]
    for argv in ([], [tmp_path / "no"], ["--bogus"], *bad):
        code, _, error = verified(capsys, *argv)
        assert code == 2 and error.startswith("fabric_llm.verify: error: ")
        assert len(error.splitlines()) == 1


@pytest.mark.parametrize(("name", "flag"), [("verify", "--drill"), ("report", "--output")])
def test_help_imports_no_torch(name, flag):
    words = [sys.executable, "-X", "importtime", "-m", f"fabric_llm.{name}", "--help"]
    said = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert said.returncode == 0 and flag in said.stdout
    imported = {line.split("|")[-1].strip() for line in said.stderr.splitlines()}
    assert not {"torch", "plotly", "numpy"} & imported


# ------------------------------------------------------------------------------- the drill


def drilled(folder, *argv):
    """`python -m fabric_llm.verify --drill ARGV` as a user starts it, in `folder`, temporary files
    in `folder`/tmp."""
    (folder / "tmp").mkdir(exist_ok=True)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder / "tmp")}
    words = [sys.executable, "-m", "fabric_llm.verify", "--drill", *map(str, argv)]
    how = {"capture_output": True, "text": True, "timeout": 300}
    done = subprocess.run(words, cwd=folder, env=environment, **how)
    assert os.listdir(folder / "tmp") == [], "nothing is left"
    return done


def test_where_a_drill_cannot_be_is_told_in_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    done = drilled(tmp_path, "--output_dir", tmp_path / "file" / "x", "--", "--model_name", "x")
    assert done.returncode == 73 and "Traceback" not in done.stderr, done.stderr
    done = drilled(tmp_path, "--output_dir", tmp_path / "new" / "x", "--", "--model_name", "x")
    assert done.returncode == 2 and os.listdir(tmp_path / "new" / "x") == []


@pytest.mark.longer
def test_a_killed_run_goes_on_to_the_same_bits(toys, tmp_path):
    flags = "--devices 2 --strategy fsdp --global_batch_size 4 --eval_iters 1 --max_step 99 "
    flags += "--resume true --keep_last 1 --keep_every 9 --warmup_steps 9 --lr_schedule wsd "
    flags += "--decay_steps 9 --logger wandb --project x --profile 20:22 --steer_bounds 0.1:0.5 "
    flags += "--keep_best_of new "
    # Four steps can't be steered, and say nothing of a budget.
    flags += "--forgetting_action steer --forgetting_budget replay:1e-9:max --eval_step_interval 9"
    data = ("--model_name", toys / "llama-tied", "--train_data_dir", toys / "data")
    data += ("--replay", toys / "many")
    own = ("--steps", 4, "--seed", 1, "--output", "certificate.json")
    done = drilled(tmp_path, *own, "--", *data, *flags.split())
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads((tmp_path / "certificate.json").read_text())
    assert document["verdict"] == "identical" and document["world_size"] == 2
    assert document["resumed_from"]
    assert "--forgetting_budget null" in document["drill_flags"]
    assert document["compared"]["lines"] == 6 and document["compared"]["files"] == 4
    for words in ("SIGKILL on rank", "step 4/4  saved", "resuming from step-", "identical"):
        assert words in done.stdout
    assert done.stderr == ""
    assert re.findall("Warning: (?!only .* of the weights).*", done.stdout) == []


@pytest.mark.longer
def test_a_drill_of_a_run_that_cannot_start(runs, tmp_path):
    done = drilled(tmp_path, runs / "full", "--", "--micro_batchsize", 3)
    assert done.returncode == 2 and "unknown flag --micro_batchsize" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_other_bits_are_a_difference(runs, tmp_path):
    same = shutil.copytree(runs / "sharded", tmp_path / "same")
    counts, differences = drill.compare(runs / "sharded", same)
    assert differences == [] and counts["files"] == 5 and counts["lines"] == 8
    assert counts["bytes"] > 50_000
    last = runs / "other" / "step-00000006"
    file = weights_of(last, NORM).relative_to(last)
    _, differences = drill.compare(runs / "sharded", runs / "other")
    said = "\n".join(differences)
    assert f"{file} of step-00000006 isn't the same" in said and "metrics.jsonl differs" in said
    edit_lines(same / "metrics.jsonl", lambda lines: lines.pop())
    _, differences = drill.compare(runs / "sharded", same)
    assert len(differences) == 1 and differences[0].endswith(" and null.")
    # one bit of one tensor: the sign of a zero
    file = weights_of(same / "step-00000006", NORM)
    for zero in (0.0, -0.0):
        rewrite(file, lambda tensors: tensors[NORM].fill_(zero))
        shutil.copytree(same, tmp_path / str(zero))
    _, differences = drill.compare(tmp_path / "0.0", tmp_path / "-0.0")
    assert len(differences) == 1 and file.name in differences[0]


def test_a_drill_that_ends_in_other_bits_fails(runs, tmp_path, monkeypatch, capsys):
    """The resumed run is replaced by one of another seed."""

    def train(command, environment, log, patient):
        name = command[command.index("--run_name") + 1]
        killed = "FABRIC_LLM_FAILPOINT" in environment
        if not killed:
            source = "sharded" if name == "undisturbed" else "other"
            shutil.copytree(runs / source, log.parent / name)
        return (71 if killed else 0), ""

    monkeypatch.setattr(drill, "run_training", train)
    words = ("--drill", "--steps", 6, "--output_dir", tmp_path, "--", "--devices", 2)
    code, out, error = verified(capsys, *words)
    assert code == 66 and "isn't the same" in error and "verdict         different" in out
    assert os.listdir(tmp_path) == []


def test_the_log_to_look_at_is_named_as_a_shell_takes_it(tmp_path, capsys):
    log = tmp_path / "my choice" / "one's.log"
    log.parent.mkdir()
    drill.run_training([sys.executable, "-c", ""], {}, log, patient=True)
    assert shlex.split(capsys.readouterr().out) == ["tail", "-f", str(log)]


def test_the_steps_of_a_run_are_shown_as_they_come(tmp_path, capsys, monkeypatch):
    """The run ends only once its first step was shown; the second one is cut in its middle."""
    seen, said = tmp_path / "seen", ""
    program = (
        "import os, sys, time\n"
        "def say(text): print(text, end='', flush=True)\n"
        "say('step 1/2  loss\\nwords\\nstep 2')\n"
        f"while not os.path.exists({str(seen)!r}): time.sleep(0.01)\n"
        "say('/2  größer\\nstep 3')\n"
    )
    show = drill.show

    def look(log, shown):
        nonlocal said
        shown = show(log, shown)
        said += capsys.readouterr().out
        if "step 1/2" in said:
            seen.touch()
        return shown

    monkeypatch.setattr(drill, "show", look)
    code, last = drill.run_training([sys.executable, "-c", program], {}, tmp_path / "log", False)
    said += capsys.readouterr().out
    lines = [line for line in said.splitlines() if "tail" not in line]
    assert lines == ["  step 1/2  loss", "  step 2/2  größer"] and code == 0
    assert last == "step 1/2  loss words step 2/2  größer step 3"
