"""metrics.jsonl and the trackers: complete, true, and never in the way of a run."""

import csv
import json
import os
import re
import shlex
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from conftest import CONTEXT
from ranks import lines, toy_run, train_ranks
from ranks import metrics as values
from servers import wait_for
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fabric_llm.base import register
from fabric_llm.checkpoint.keep import Progress
from fabric_llm.model.flops import Flops
from fabric_llm.run import trackers
from fabric_llm.run.log import Log
from fabric_llm.run.metrics import MetricsFile
from fabric_llm.run.speed import Speed
from fabric_llm.run.trackers import MANY_LINES, TRACKERS, Trackers, flat

COUNTS = ("step", "position", "tokens")
NUMBERS = """loss lr grad_norm tokens_per_second tokens_per_second_per_device
    model_tflops_per_device data_seconds wait_seconds peak_memory_gib updated_fraction
    update_ratio""".split()  # and mfu, where the device's peak is known
TRAINING = {**dict.fromkeys(COUNTS, int), **dict.fromkeys(NUMBERS, float)}
EVALUATION = {"step": int, "position": int, "eval_loss": float, "eval": dict}
GLOBAL_BATCH = 8
TRAIN = Path(__file__).parent.parent / "train.py"


def flags(toys, output, *more):
    small = "--run_name run --micro_batch_size 4 --eval_iters 2 --eval_batch_size 2".split()
    return (*toy_run(toys, output), *small, "--global_batch_size", GLOBAL_BATCH, *more)


@pytest.fixture(scope="module")
def run(toys, tmp_path_factory):
    """Directory of a run of six steps with two trackers, of which 5 and 6 were done twice: once
    before resuming from step 4."""
    output = tmp_path_factory.mktemp("trackers")
    more = "--save_step_interval 4 --eval_step_interval 3 --max_step 6".split()
    base = flags(toys, output, *more)
    train_ranks(1, *base, "--logger", "csv,tensorboard")
    again = ("--resume", "true", "--checkpoint", output / "run" / "step-00000004")
    train_ranks(1, *base, *again, "--logger", "tensorboard, csv")
    return output / "run"


# ------------------------------------------------------------------------------- metrics.jsonl


def test_every_line_has_its_keys_and_types(run):
    for line in lines(run):
        expected = TRAINING if "loss" in line else EVALUATION
        assert {key: type(value) for key, value in line.items()} == expected
    assert min(values(run, "tokens_per_second")) > 0
    assert all(0.05 < gib < 64 for gib in values(run, "peak_memory_gib"))


def test_one_line_for_each_step_and_evaluation_also_after_resuming(run):
    assert steps_of(run) == [1, 2, 3, 4, 5, 6]
    # Before the run, in the middle of the epoch, at the end.
    assert [line["step"] for line in lines(run, "eval_loss")] == [0, 3, 6]
    assert values(run, "tokens") == [k * GLOBAL_BATCH * CONTEXT for k in range(1, 7)]


def steps_of(run):
    return [line["step"] for line in lines(run, "loss")]


def test_tokens_of_all_ranks_and_of_a_smaller_last_step(toys, tmp_path):
    train_ranks(2, *flags(toys, tmp_path, "--strategy", "ddp", "--number_epochs", 1))
    found = values(tmp_path / "run", "tokens")
    assert found == [CONTEXT * n for n in (8, 16, 24, 32, 40, 44)], "44 rows: the last step has 4"


def test_log_step_interval(toys, tmp_path):
    import train

    base = flags(toys, tmp_path, *"--max_step 5 --devices 1 --log_step_interval 3".split())
    train.main([str(flag) for flag in base])
    assert steps_of(tmp_path / "run") == [1, 3, 5], "and the first and the last"


def test_a_resumed_file_loses_what_is_done_again_and_a_torn_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    whole = '{"step": 0, "eval_loss": 2.0}\n{"step": 1, "loss": 1.5}\n{"step": 2, "loss": 1.25}\n'
    for torn in ("", '{"step": 1, "lo', '{"step": 1', '{"step": 3, "loss": 1.0}\n', "{}\n"):
        path.write_text(whole + torn)
        file = MetricsFile(path, last=Progress(1, 8))
        file.write(Progress(2, 16), {"loss": 1.0})
        found = [(line["step"], line.get("loss")) for line in lines(tmp_path)]
        assert found == [(0, None), (1, 1.5), (2, 1.0)]
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_run_that_starts_again_starts_its_file_again(tmp_path):
    """Killed before its first checkpoint: nothing of the first try stays, the evaluation at step 0
    neither."""
    of_before = '{"step": 0, "eval_loss": 2.0}\n{"step": 1, "loss": 1.5}\n'
    (tmp_path / "metrics.jsonl").write_text(of_before)
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.write(Progress(), {"eval_loss": 2.5})
    # As soon as it is written.
    assert lines(tmp_path) == [{"step": 0, "position": 0, "eval_loss": 2.5}]


# ------------------------------------------------------------------------------- trackers


@pytest.mark.parametrize("logger", ["csv", "tensorboard"])
def test_each_of_two_trackers_has_what_metrics_jsonl_has(run, logger):
    folder, records = run, [(line["step"], flat(line)) for line in lines(run)]
    expected = {(step, k): v for step, line in records for k, v in line.items() if k != "step"}
    found = read_csv(folder) if logger == "csv" else read_tensorboard(folder)
    assert found.keys() == expected.keys()
    assert found == pytest.approx(expected, rel=1e-6)


def read_csv(folder):
    with (folder / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    cells = [(int(row.pop("step")), row.items()) for row in rows]
    return {(step, key): float(value) for step, row in cells for key, value in row if value}


def read_tensorboard(folder):
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    keys = events.Tags()["scalars"]
    return {(event.step, key): event.value for key in keys for event in events.Scalars(key)}


def test_tensorboard_hides_a_run_that_was_killed_before_its_first_checkpoint(tmp_path):
    """The next start empties metrics.jsonl. The curves of the killed run stayed in TensorBoard,
    before those of another one in the same directory."""
    for losses in ([3.0, 2.0, 1.0], [9.0, 8.0]):
        log, close = TRACKERS["tensorboard"](tmp_path, {}, None, None)[:2]
        for step, loss in enumerate(losses):
            log(step, {"loss": loss})
        close()
        time.sleep(1.1)  # the names of event files, by which they are ordered, have seconds
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    found = [(event.step, event.value) for event in events.Scalars("loss")]
    assert found == [(0, 9.0), (1, 8.0)]


def test_a_number_that_comes_later_is_a_column_of_the_table(tmp_path):
    """As in Lightning's CSVLogger; also where a resumed run takes over the lines so far."""
    verdict = {"step": 2, "verdict": "skip", "reason": "a spike"}
    first = [{"step": 0, "eval_loss": 2.0}, {"step": 1, "loss": 1.5}, verdict]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in first))
    log, close, _ = trackers._csv(tmp_path)
    log(2, {"loss": 1.25, "yours": 7})
    log(3, {"loss": 1.0, "eval/a,b/loss": 1.75})
    found = {(0, "eval_loss"): 2.0, (1, "loss"): 1.5, (2, "loss"): 1.25, (2, "yours"): 7}
    found |= {(3, "loss"): 1.0, (3, "eval/a,b/loss"): 1.75}
    assert read_csv(tmp_path) == found, "before it is closed"
    close()


def test_a_rewind_cuts_every_log_by_step_and_position(tmp_path):
    """A rewind from step 3 to step 1: its lines are gone, and those of an earlier rewind to there
    stay."""
    log = MetricsFile(tmp_path / "metrics.jsonl")
    trackers = Trackers("csv,tensorboard", tmp_path, {}, None, None)

    def write(step, position, **record):
        log.write(Progress(step, position), record)
        if "verdict" not in record:
            trackers.log(step, {"position": position, **record})

    write(1, 8, loss=1.0)
    write(1, 16, verdict="rewind")
    write(2, 24, loss=2.0)
    write(3, 32, loss=3.0)
    log.cut(Progress(1, 32))
    trackers.cut(Progress(1, 32))
    write(1, 32, verdict="rewind")
    write(2, 40, loss=4.0)
    trackers.close(30)
    there = [(line["step"], line["position"]) for line in lines(tmp_path)]
    assert there == [(1, 8), (1, 16), (1, 32), (2, 40)]
    left = {(1, "position"): 8, (1, "loss"): 1.0, (2, "position"): 40, (2, "loss"): 4.0}
    assert read_csv(tmp_path) == left and read_tensorboard(tmp_path) == left
    log.cut(Progress(1, 16))  # resumed from a checkpoint of before the second rewind
    assert [(line["step"], line["position"]) for line in lines(tmp_path)] == [(1, 8), (1, 16)]


def test_a_tracker_that_fails_warns_once_and_lets_the_run_go_on(tmp_path):
    trackers = Trackers("csv,tensorboard", tmp_path, {}, None, None)
    trackers.opened["csv"][1]()  # its file is closed, as if the disk had gone
    failed = "--logger csv failed, the run .* go on.*closed file"
    with pytest.warns(UserWarning, match=failed) as caught:
        trackers.log(1, {"loss": 1.0})
        trackers.log(2, {"loss": 2.0})
        trackers.close(30)
        trackers.close(30)
    assert len(caught) == 1 and not trackers.thread.is_alive()
    assert read_tensorboard(tmp_path) == {(1, "loss"): 1.0, (2, "loss"): 2.0}, "another one goes on"


def logged(kind, folder):
    """A number goes to a tracker, which warns once; then it ends."""
    with pytest.warns(UserWarning) as caught:
        trackers = Trackers(kind, folder, {}, None, None)
        trackers.log(1, {"loss": 1.0})
        trackers.close(60)
    assert len(caught) == 1
    return str(caught[0].message), trackers


@pytest.mark.parametrize("made", [None, print, (print,), (1, 2)])
def test_a_tracker_that_is_not_two_functions_warns(monkeypatch, tmp_path, made):
    monkeypatch.setitem(register.TRACKERS, "mine", lambda *_: made)
    assert "failed, the run and" in (said := logged("mine", tmp_path)[0]) and "(log, close)" in said


def tracking(monkeypatch, folder, log):
    """As `--logger wandb` would, with another function that takes the numbers."""
    monkeypatch.setitem(TRACKERS, "wandb", lambda *_: (log, lambda: None))
    return Trackers("wandb", folder, {}, None, None)


def test_a_tracker_that_is_slow_holds_nobody_up(monkeypatch, tmp_path):
    """As one whose server takes the connection and doesn't answer."""
    answers, had = threading.Event(), []

    def log(step, record):
        assert threading.current_thread() is not threading.main_thread()
        had.append(answers.wait(60) and step)

    tracker = tracking(monkeypatch, tmp_path, log)
    for step in range(MANY_LINES):
        tracker.log(step, {"loss": 1.0})
    with pytest.warns(UserWarning, match="--logger falls behind; the run goes on") as caught:
        for step in range(MANY_LINES, 2 * MANY_LINES):
            tracker.log(step, {"loss": 1.0})
    assert len(caught) == 1 and had == []
    with pytest.warns(UserWarning, match="hadn't taken everything when the run ended") as caught:
        tracker.close(0.1)
    assert len(caught) == 1
    answers.set()
    tracker.thread.join(30)
    assert had == list(range(2 * MANY_LINES))


def test_an_upload_that_fails_is_one_warning_and_the_numbers_go_on(monkeypatch, tmp_path):
    pytest.importorskip("wandb")
    had = []
    tracker = tracking(monkeypatch, tmp_path, lambda step, record: had.append(step))
    failed = "--log_model failed, the run .* go on: .*step-1'"
    with pytest.warns(UserWarning, match=failed) as caught:
        for step in (1, 2, 3):
            tracker.log(step, {"loss": 1.0})
            tracker.upload(tmp_path / f"step-{step}")  # which isn't there
        tracker.close(30)
    assert len(caught) == 1 and had == [1, 2, 3]


# ------------------------------------------------------------------------------- Weights & Biases


@mock.patch.dict(os.environ)  # `_wandb` sets variables
def test_the_start_waits_20_seconds_for_wandb_unless_told_otherwise(monkeypatch, tmp_path):
    wandb = pytest.importorskip("wandb")
    waited = []

    def no_answer(**given):
        waited.append(wandb.setup().settings.init_timeout)  # what wandb.init would wait, seconds
        raise wandb.errors.CommError("no answer")

    monkeypatch.setattr(wandb, "init", no_answer)
    monkeypatch.setattr(wandb, "login", lambda prompt, verify: True)
    for told in ({}, {"WANDB_INIT_TIMEOUT": "33"}):
        for name in [name for name in os.environ if name.startswith("WANDB")]:
            del os.environ[name]
        os.environ.update(told)
        with pytest.warns(UserWarning, match="logs offline"), pytest.raises(wandb.errors.CommError):
            trackers._wandb(tmp_path, {}, None, None)
        wandb.teardown()
    assert waited == [20, 20, 33, 33]  # online, offline


@pytest.mark.longer
@mock.patch.dict(os.environ)
def test_wandb_takes_the_steps_of_a_run_that_went_back_and_says_how_they_are_sent(tmp_path, capsys):
    pytest.importorskip("wandb")
    os.environ["WANDB_MODE"] = "offline"
    folder = tmp_path / "two words"
    folder.mkdir()
    log, close = trackers._wandb(folder, {}, None, None)
    losses = {"1111.25": 1, "2222.25": 2, "3333.25": 3, "4444.25": 2, "5555.25": 3}
    for loss, step in losses.items():
        log(step, {"loss": float(loss)})
    close()
    said = re.search("logged offline: (.*) sends it", capsys.readouterr().out)[1]
    program, action, place = shlex.split(said)
    [written] = Path(place).glob("*.wandb")
    assert (program, action) == ("wandb", "sync") and folder in written.parents

    def missing():
        return [loss for loss in losses if loss.encode() not in written.read_bytes()]

    wait_for(lambda: not missing(), 60)  # another process writes, which a busy machine delays


@pytest.fixture(scope="module")
def wandb_runs(toys, tmp_path_factory):
    """{case: (finished process, run directory)} of `train.py --logger wandb` in a bare
    environment."""
    away = {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_INIT_TIMEOUT": "2"}
    all_of_it = "--logger csv,wandb --log_model all --save_step_interval 1".split()
    cases = {
        "no key": ({}, all_of_it, {"preexec_fn": lambda: os.close(0)}),
        "no server": (
            {"WANDB_API_KEY": "a" * 40, **away}, ["--logger", "wandb"],
            {"stdin": subprocess.DEVNULL},
        ),
    }  # fmt: skip
    bare = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    started = {}
    for case, (variables, more, stdin) in cases.items():
        output = tmp_path_factory.mktemp("wandb")
        (output / "home").mkdir()
        more = (*"--max_step 2 --log_step_interval 1 --devices 1".split(), *more)
        words = [sys.executable, str(TRAIN), *map(str, flags(toys, output, *more))]
        given = {"env": {**bare, **variables, "HOME": str(output / "home")}, "cwd": output}
        out = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started[case] = output / "run", subprocess.Popen(words, **given, **out, **stdin)
    finished = {}
    for case, (folder, process) in started.items():
        process.out, process.err = process.communicate(timeout=300)
        finished[case] = process, folder
    return finished


@pytest.mark.longer
@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("no key", ["there is no API key", "WANDB_API_KEY", "wandb login"]),
        ("no server", ["there is no connection"]),
    ],
)
def test_wandb_without_key_or_server_logs_offline_with_one_warning(wandb_runs, case, words):
    process, folder = wandb_runs[case]
    assert process.returncode == 0, process.err
    warnings = [line for line in process.err.splitlines() if "Warning" in line or "WARNING" in line]
    assert len(warnings) == 1 and all(word in warnings[0] for word in words), process.err
    assert f"logs offline into {folder / 'wandb'}" in warnings[0]
    assert steps_of(folder) == [1, 2]
    [written] = (folder / "wandb").glob("offline-run-*/*.wandb")
    end = "\n".join(process.out.splitlines()[-5:])
    assert f"wandb sync {written.parent}" in end, process.out
    assert (folder / "step-00000002" / "MANIFEST.json").is_file()


@pytest.mark.longer
def test_each_checkpoint_goes_to_wandb_beside_another_tracker(wandb_runs):
    _, folder = wandb_runs["no key"]
    [written] = folder.glob("wandb/offline-run-*/*.wandb")
    for name in ("step-00000001", "step-00000002"):
        assert name.encode() in written.read_bytes(), "an alias of a version"
    assert {step for step, key in read_csv(folder) if key == "loss"} == {1, 2}


# ------------------------------------------------------------------------------------------- MLflow


@mock.patch.dict(os.environ)
def test_without_mlflow_one_warning_says_how_it_is_installed(monkeypatch, tmp_path):
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    said, _ = logged("mlflow", tmp_path)
    assert re.search(r"--logger mlflow failed, .*'\.\[mlflow\]'", said)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.longer
@mock.patch.dict(os.environ, MLFLOW_TRACKING_URI="http://127.0.0.1:9")
@mock.patch.dict(os.environ, MLFLOW_HTTP_REQUEST_MAX_RETRIES="0")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what MLflow imports
def test_a_server_of_mlflow_that_is_away_is_one_warning(tmp_path):
    pytest.importorskip("mlflow", exc_type=ImportError)
    said, trackers = logged("mlflow", tmp_path)
    assert re.search("--logger mlflow failed, the run .* go on", said)
    assert not trackers.thread.is_alive()


@pytest.mark.longer
def test_a_resumed_run_goes_on_in_the_same_run_of_mlflow(toys, tmp_path):
    pytest.importorskip("mlflow", exc_type=ImportError)
    more = "--save_step_interval 2 --log_step_interval 1 --logger mlflow,csv --devices 1".split()
    base = [*map(str, flags(toys, tmp_path, *more)), "--resume_override", "max_step"]
    for more in ("--max_step 2", "--max_step 4 --resume true"):
        words = [sys.executable, str(TRAIN), *base, *more.split()]
        out = {"capture_output": True, "text": True, "timeout": 300}
        done = subprocess.run(words, cwd=tmp_path, **out)
        assert done.returncode == 0, done.stderr
        assert "arning" not in done.stderr and "mlflow" not in done.stderr
    folder = tmp_path / "run"
    assert list(tmp_path.glob("ml*")) == [], "nothing in the working directory"
    with sqlite3.connect(folder / "mlflow.db") as database:
        [(run, name, status)] = database.execute("select run_uuid, name, status from runs")
        rows = database.execute("select step, key, value from metrics where is_nan = 0")
        found = {(step, key): value for step, key, value in rows}
        [(steps,)] = database.execute("select value from params where key = 'max_step'")
    assert (name, status, steps) == ("run", "FINISHED", "2")
    assert found == pytest.approx(read_csv(folder))


# --------------------------------------------------------------------------- clock, memory, console


BATCHES = SimpleNamespace(seconds_waited=0.0, tokens_at=np.zeros(1))


def test_speed_leaves_out_what_is_no_training():
    speed = Speed(Flops(1.0, {}), torch.device("cpu"), 1, BATCHES)
    time.sleep(0.05)
    with speed.other:
        time.sleep(0.3)
    time.sleep(0.05)
    speed.tokens, speed.steps = 1000, 2
    assert 1000 / 0.25 < speed.lap()["tokens_per_second"] < 1000 / 0.1
    time.sleep(0.1)
    speed.tokens = 1500
    assert 500 / 0.25 < speed.lap()["tokens_per_second"] < 500 / 0.1, "since the last lap only"
    # A run that spends most of its time in evaluations said that a third of the time was left.
    assert speed.seconds_left(4) == pytest.approx(2 * (speed.seconds + 0.3), rel=0.1)


def log_from(start, folder):
    """The log of a run that goes on from `start`."""
    placement, schedule = SimpleNamespace(world_size=1), SimpleNamespace(max_step=9)
    parts = {"placement": placement, "schedule": schedule, "data": SimpleNamespace(mixture=None)}
    plan = SimpleNamespace(start=start, run_directory=folder, **parts)
    return Log(plan, torch.device("cpu"), Flops(1.0, {}), BATCHES)


def test_speed_begins_with_the_first_step(tmp_path):
    """What a run does between its log and its first step, such as to open trackers, made the first
    logged speed twice too low on a toy, and the time that is left too long."""
    log = log_from(Progress(), tmp_path)
    with log.untimed:
        time.sleep(0.1)
    time.sleep(0.3)
    for step in (1, 2):
        log.begin(step)
        time.sleep(0.1)
        log.advance(Progress(step=step, tokens=100 * step))
    assert 200 / 0.3 < log.speed.lap()["tokens_per_second"] < 200 / 0.2
    assert log.speed.seconds_left(2) == pytest.approx(0.2, rel=0.3)


def test_speed_of_a_resumed_run_counts_its_own_tokens(tmp_path):
    log = log_from(Progress(step=5, tokens=10**9), tmp_path)
    time.sleep(0.1)
    log.advance(Progress(step=6, tokens=10**9 + 100))
    assert 100 / 0.3 < log.speed.lap()["tokens_per_second"] < 100 / 0.1


def test_speed_of_a_run_that_went_back_counts_no_token_twice(tmp_path):
    log = log_from(Progress(), tmp_path)
    log.advance(Progress(step=1, tokens=1000))
    log.speed.lap()
    log.rewound(Progress(step=1, tokens=400), log.plan, "", {})
    time.sleep(0.1)
    log.advance(Progress(step=2, tokens=500))
    assert 100 / 0.3 < log.speed.lap()["tokens_per_second"] < 100 / 0.1


LIBRARIES = """
from fabric_llm.base.program import plain_output
plain_output()
import sys, warnings
import lightning.fabric, datasets, transformers  # Lightning has a format of its own for warnings
from huggingface_hub.utils import tqdm
warnings.warn("a library's\\nsentence")
list(tqdm(range(3)))
datasets.Dataset.from_dict({"a": [1, 2, 3]}).map(lambda row: row)
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
model.save_pretrained(sys.argv[2])
"""


@pytest.mark.longer
def test_a_log_file_gets_no_bars_of_libraries_and_plain_warnings(toys, tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(TRAIN.parent)}
    words = [sys.executable, "-c", LIBRARIES, toys / "llama", tmp_path / "model"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "Warning: a library's sentence\n")
