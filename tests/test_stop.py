"""Asked to stop, by a signal to any rank or by a file, all ranks finish the step, save and end with
75."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from ranks import (
    assert_same_tensors,
    ended_with,
    instead,
    metrics,
    run_ranks,
    saved,
    status,
    toy_run,
    train_ranks,
    weights,
)
from servers import free_port

from fabric_llm.checkpoint import keep
from fabric_llm.processes import stop

STEPS = 8
TRAIN = Path(__file__).parent.parent / "train.py"


def train_and_do(argv, rank, step, action):
    """train.py; before `step` begins, rank `rank` does `action()`. Returns the exit code."""
    import train
    from fabric_llm.run.run import kept_alive
    from fabric_llm.training.step import seed_step

    def acting(seed, done, own_rank):
        if done == step - 1 and own_rank == rank:
            action()
        seed_step(seed, done, own_rank)

    import fabric_llm.training.step

    fabric_llm.training.step.seed_step = acting
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # as without `nohup`, whoever started the tests
    assert kept_alive == []
    try:
        train.main(argv)
    except SystemExit as end:
        return end.code
    return 0


def flags(toys, output, strategy, *more):
    words = [*toy_run(toys, output, model="gpt2"), "--strategy", strategy, "--max_step", STEPS]
    words += "--lr 1e-2 --global_batch_size 4 --micro_batch_size 2".split()
    words += "--eval_iters 0 --log_step_interval 1".split()
    return [str(word) for word in [*words, *more]]


def send(number):
    return lambda: os.kill(os.getpid(), number)


@pytest.mark.quick_cases(r"fsdp2-2-15")
@pytest.mark.every_eighth(7)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize(("strategy", "ranks"), [("auto", 1), ("fsdp", 2), ("fsdp2", 2)])
def test_a_signal_to_one_rank_stops_all_after_a_save_and_nothing_is_lost(
    toys, tmp_path, strategy, ranks, number
):
    argv = flags(toys, tmp_path, strategy, "--devices", ranks)
    train_ranks(ranks, *flags(toys, tmp_path, strategy), "--run_name", "whole")
    codes = run_ranks(ranks, train_and_do, [*argv, "--run_name", "cut"], ranks - 1, 3, send(number))
    assert codes == [75] * ranks
    assert saved(tmp_path / "cut") == [3], "the step of the signal"
    train_ranks(ranks, *argv, "--run_name", "cut", "--resume", "auto")
    assert metrics(tmp_path / "cut") == metrics(tmp_path / "whole")
    assert_same_tensors(weights(tmp_path / "cut", STEPS), weights(tmp_path / "whole", STEPS))


@pytest.mark.parametrize(
    ("ranks", "file", "step", "code", "steps"),
    [(2, "stop", 3, 75, [3]), (1, "stop", STEPS, 0, [STEPS]), (1, "save_now", 3, 0, [3, STEPS])],
    ids=["stop", "too late, and not for the next run", "save"],
)
def test_a_file_asks_for_a_stop_or_a_save_and_goes(toys, tmp_path, ranks, file, step, code, steps):
    strategy, there = "fsdp" if ranks == 2 else "auto", tmp_path / "run" / file
    argv = flags(toys, tmp_path, strategy, "--devices", ranks, "--run_name", "run")
    assert run_ranks(ranks, train_and_do, argv, 0, step, there.touch) == [code] * ranks
    assert saved(tmp_path / "run") == steps and not there.exists()


@pytest.mark.longer
def test_a_last_evaluation_that_was_cut_off_is_made_when_the_run_resumes(toys, tmp_path):
    argv = [*flags(toys, tmp_path, "auto"), *map(str, ("--eval_iters", 2, "--eval_batch_size", 2))]
    train_ranks(1, *argv, "--run_name", "whole")
    cut = [*argv, "--run_name", "cut"]
    assert run_ranks(1, train_and_do, cut, 0, STEPS, send(signal.SIGTERM)) == [75]
    train_ranks(1, *cut, "--resume", "auto")
    assert metrics(tmp_path / "cut", "eval_loss") == metrics(tmp_path / "whole", "eval_loss")
    assert metrics(tmp_path / "cut", "loss") == metrics(tmp_path / "whole", "loss")
    cut_off, whole = (
        keep.read_progress(tmp_path / name / f"step-{STEPS:08d}") for name in ("cut", "whole")
    )
    for key in ("eval_loss", "eval_losses"):
        assert cut_off[key] == whole[key] is not None
    log = (tmp_path / "cut" / "metrics.jsonl").read_text()
    train_ranks(1, *cut, "--resume", "auto")  # nothing is left to do
    assert (tmp_path / "cut" / "metrics.jsonl").read_text() == log


@pytest.mark.longer
@pytest.mark.parametrize(
    ("strategy", "ranks", "signalled"), [("auto", 1, 0), ("fsdp", 2, 1), ("fsdp", 2, 0)]
)
def test_a_second_signal_ends_at_once_without_a_save(toys, tmp_path, strategy, ranks, signalled):
    def signal_one_rank_twice():
        import fabric_llm.processes.watch
        import fabric_llm.run.supervision
        import fabric_llm.training.step

        # Longer than the test may take: no rank waits for another, which waits for it.
        fabric_llm.processes.watch.SECONDS_TO_END = 600.0
        fabric_llm.run.supervision.SECONDS_FOR_OTHERS = 600.0
        seed_step = fabric_llm.training.step.seed_step

        def acting(seed, done, rank):
            if done == 2 and rank == signalled:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(1.1)
                os.kill(os.getpid(), signal.SIGTERM)
            seed_step(seed, done, rank)

        fabric_llm.training.step.seed_step = acting

    words = flags(toys, tmp_path, strategy, "--run_name", "run")
    job = ended_with([75] * ranks, *words, before=signal_one_rank_twice)
    assert "It has no checkpoint." in job.output[0]
    assert ("A second signal ends the run now." in job.output[0]) == (signalled == 0)
    assert not list((tmp_path / "run").glob("step-*"))
    said = status(tmp_path / "run")
    assert said["code"] == 75 and "second signal" in said["reason"]


def test_at_the_end_only_a_second_ctrl_c_is_heard():
    signals = stop.StopSignal()
    try:
        signals.finish()
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt, match="while the run was ending"):
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        signals.restore()


def test_two_signals_that_python_hears_late_are_one():
    """As of torchrun, which sends another one 0.2 s later, in a long call of C."""
    signals = stop.StopSignal()
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, stop.SIGNALS)
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, stop.SIGNALS)  # a second one would raise here
        assert signals.requests == 1
    finally:
        signals.restore()


@pytest.mark.longer
def test_a_signal_that_is_delivered_twice_is_one(toys, tmp_path):
    """By the scheduler, to all processes, and by the launcher that hands it on."""

    def twice():
        import fabric_llm.processes.stop

        # On a busy machine 0.3 seconds may be two.
        fabric_llm.processes.stop.SECONDS_OF_ONE_REQUEST = 4.0
        send = f"kill -TERM {os.getpid()}; sleep 0.3; kill -TERM {os.getpid()}"
        other = subprocess.Popen(["sh", "-c", send])
        while other.poll() is None:
            time.sleep(0.01)
        # in which Python hears of nothing, for longer than the two were apart
        sum(range(60_000_000))

    argv = [*flags(toys, tmp_path, "auto"), "--run_name", "run"]
    assert run_ranks(1, train_and_do, argv, 0, 3, twice) == [75]
    assert (tmp_path / "run" / "step-00000003").is_dir()


def test_a_terminal_that_is_gone_asks_once_and_never_under_nohup(monkeypatch):
    """The shell that it ends tells a run once more."""
    monkeypatch.setattr(stop, "SECONDS_OF_ONE_REQUEST", 0.0)
    monkeypatch.setattr(stop, "SECONDS_PENDING", 0.0)
    former = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        for action, received in ((signal.SIG_IGN, 0), (signal.SIG_DFL, 1)):
            signal.signal(signal.SIGHUP, action)
            signals = stop.StopSignal()
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGHUP)
            signals.restore()
            assert signals.requests == received
            assert signal.getsignal(signal.SIGHUP) == action
    finally:
        signal.signal(signal.SIGHUP, former)


# ----------------------------------------------------------------- before there is anything to save

AT_START = "stopped on request before training began: nothing was lost."
PARSES_SLOWLY = """
import time, train
def parse(argv):
    print("parsing", flush=True)
    time.sleep(600)
train.parse_train = parse
train.main([])
"""
HANGS_AT_TORCH = """
import os, sys, time
class Hang:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            open({folder!r} + f"/{{os.getpid()}}", "w").close()
            time.sleep(600)
sys.meta_path.insert(0, Hang())
"""


def started(words, folder, stderr=subprocess.PIPE, **variables):
    words, given = [sys.executable, *words], {"env": {**os.environ, **variables}, "cwd": folder}
    out = {"stdout": subprocess.PIPE, "stderr": stderr, "text": True, "start_new_session": True}
    return subprocess.Popen(words, **given, **out)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_is_heard_while_flags_are_parsed(tmp_path, number):
    run = started(["-c", PARSES_SLOWLY], tmp_path, subprocess.STDOUT, PYTHONPATH=str(TRAIN.parent))
    try:
        assert run.stdout.readline() == "parsing\n"
        run.send_signal(number)
        said = run.communicate(timeout=30)[0]
    finally:
        run.kill()
    assert run.returncode == 75 and said == f"train.py: error: {AT_START}\n"


@pytest.mark.longer
@pytest.mark.parametrize("to_all", [False, True], ids=["SIGTERM to rank 0", "Ctrl-C"])
def test_a_stop_while_the_ranks_start_ends_them_all(toys, tmp_path, to_all):
    """They hang where they import torch, which takes minutes where many ranks share few cores."""
    (tmp_path / "site").mkdir()
    (tmp_path / "pids").mkdir()
    hangs = HANGS_AT_TORCH.format(folder=str(tmp_path / "pids"))
    (tmp_path / "site" / "sitecustomize.py").write_text(hangs)
    path = os.pathsep.join([str(tmp_path / "site"), os.environ.get("PYTHONPATH", "")])
    more = "--devices 4 --accelerator cpu --micro_batch_size 1 --run_name run".split()
    words = instead(flags(toys, tmp_path, "fsdp"), more)
    run = started([str(TRAIN), *words], tmp_path, PYTHONPATH=path)
    try:
        until = time.monotonic() + 60
        while len(pids := os.listdir(tmp_path / "pids")) < 4 and time.monotonic() < until:
            time.sleep(0.05)
        assert len(pids) == 4
        os.killpg(run.pid, signal.SIGINT) if to_all else os.kill(run.pid, signal.SIGTERM)
        said = run.communicate(timeout=30)[1]
    finally:
        run.kill()
    assert run.returncode == 75 and said == f"train.py: error: {AT_START}\n"
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    status_ = status(tmp_path / "run")
    assert status_["code"] == 75 and status_["retryable"] and status_["reason"] == AT_START


@pytest.mark.longer
def test_a_stop_is_heard_while_a_rank_waits_for_the_others(toys, tmp_path):
    """In C++, where Python's handlers aren't called: the other rank never comes."""
    port = free_port()
    world = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    words = flags(toys, tmp_path, "fsdp", "--run_name", "run")
    run = started([str(TRAIN), *words], tmp_path, **world)
    try:
        assert any("Initializing distributed" in line for line in run.stderr)
        time.sleep(2)
        run.terminate()
        said = run.communicate(timeout=30)[1]
    finally:
        run.kill()
    assert run.returncode == 75 and said.endswith(f"train.py: error: {AT_START}\n"), said
    assert status(tmp_path / "run")["code"] == 75


def save_comes_first(argv, run_directory):
    import train

    evaluate = train.evaluate

    def after_the_save(run):
        step = run.progress.step
        assert step in (0, 2) or (run_directory / f"step-{step:08d}").is_dir()
        return evaluate(run)

    train.evaluate = after_the_save
    return train_and_do(argv, 0, 4, send(signal.SIGTERM))


@pytest.mark.longer
def test_whoever_asked_to_stop_does_not_wait_for_an_evaluation(toys, tmp_path):
    more = ("--eval_iters", 2, "--eval_batch_size", 2, "--eval_step_interval", 2)
    argv = [*flags(toys, tmp_path, "auto"), *map(str, more)]
    train_ranks(1, *argv, "--run_name", "whole")
    cut = [*argv, "--run_name", "cut"]
    assert run_ranks(1, save_comes_first, cut, tmp_path / "cut") == [75]
    train_ranks(1, *cut, "--resume", "true")
    for key in ("loss", "eval_loss"):
        assert metrics(tmp_path / "cut", key) == metrics(tmp_path / "whole", key)


@pytest.mark.longer
def test_a_run_stops_by_itself_after_max_hours_and_goes_on_for_as_long(toys, tmp_path):
    """By rank 0's clock, on all ranks; its arguments.yaml keeps the limit, which each start has
    anew."""
    argv = flags(toys, tmp_path, "fsdp", "--devices", 2)
    train_ranks(2, *argv, "--run_name", "whole")
    cut = [*argv, "--run_name", "cut", "--max_hours", "1"]
    assert run_ranks(2, train_and_do, cut, 0, 3, an_hour_later) == [75, 75]
    said = status(tmp_path / "cut")
    assert said["code"] == 75 and said["retryable"] and said["step"] == 3
    again = ["--output_dir", str(tmp_path), *"--devices 2 --run_name cut --resume auto".split()]
    assert run_ranks(2, train_and_do, again, 0, 6, an_hour_later) == [75, 75]
    assert saved(tmp_path / "cut") == [3, 6]
    # Rank 1's clock is its own affair.
    assert run_ranks(2, train_and_do, again, 1, 7, an_hour_later) == [0, 0]
    assert metrics(tmp_path / "cut") == metrics(tmp_path / "whole")


def an_hour_later():
    """By the clock that stop.py goes by: the watch would take the hour for silence."""
    stop.time = SimpleNamespace(monotonic=lambda: time.monotonic() + 3600, sleep=time.sleep)


@pytest.mark.longer
def test_a_run_of_a_few_seconds_stops_by_itself(toys, tmp_path):
    """A real process and the real clock: it has to evaluate and make a step, however late it is."""
    more = "--max_step 99999999999999999999 --run_name run --max_hours 1e-6 --eval_iters 4".split()
    words = [str(TRAIN), *flags(toys, tmp_path, "auto", *more)]
    with started(words, tmp_path, OMP_NUM_THREADS="1") as run:
        out, errors = run.communicate()
    assert run.returncode == 75, errors
    assert "Stopped after --max_hours 1e-06." in out and "--resume true --run_name run" in out
    assert (tmp_path / "run" / "step-00000001").is_dir()
