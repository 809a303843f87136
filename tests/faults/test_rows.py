"""The table of docs/faults.md, row by row, where no other test holds the row."""

import errno
import fcntl
import json
import os
import random
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from conftest import VOCABULARY
from ranks import (
    Job,
    assert_same_tensors,
    elsewhere,
    ended_with,
    lines,
    metrics,
    saved,
    status,
    tensors,
    toy_run,
    train_ranks,
    weights,
)
from servers import wait_for
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

import train
from fabric_llm.base import files
from fabric_llm.base.faults import as_fault
from fabric_llm.checkpoint import keep
from fabric_llm.plan import run_status

pytestmark = pytest.mark.faults

ROOT = Path(__file__).parent.parent.parent
STEPS = 8


def flags(toys, output, *more):
    return (
        *toy_run(toys, output, model="gpt2"),
        *"--lr 1e-2 --strategy fsdp --micro_batch_size 1 --global_batch_size 4".split(),
        *"--save_step_interval 3 --eval_iters 2 --eval_batch_size 2 --hang_timeout 30".split(),
        *("--max_step", STEPS, "--run_name", "run", *more),
    )


def free_port():
    """Below those that the kernel gives to connections: nobody takes it while a process begins that
    will listen to it."""
    while True:
        with socket.socket() as sock, suppress(OSError):
            port = random.randint(20_000, 32_000)
            sock.bind(("", port))
            return port


def wait_until_saved(run, step):
    """And STATUS.json says so: the last thing that a save writes."""
    file = run / "STATUS.json"
    wait_for(lambda: file.exists() and status(run)["last_durable_step"] == step, 120)


def end_after(job, frozen, other):
    """The codes of both ranks: `frozen`, which nobody else can end, is killed once the `other` has
    ended, or won't."""
    try:
        how = os.WEXITED | os.WNOHANG | os.WNOWAIT
        wait_for(lambda: os.waitid(os.P_PID, job.pids[other], how) is not None, 120)
    finally:
        job.kill([frozen])
    return job.wait()


def leftovers(run):
    return [path.name for path in run.iterdir() if path.name.startswith((".tmp", ".trash"))]


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def assert_same_end(run, other):
    assert metrics(run) == metrics(other)
    assert metrics(run, "step") == metrics(other, "step")
    assert_same_tensors(weights(run, STEPS), weights(other, STEPS))


@pytest.fixture(scope="module")
def whole(toys, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    ended_with([0, 0], *flags(toys, folder))
    said = {"code": 0, "reason": "done", "step": STEPS, "last_durable_step": STEPS}
    said |= {"retryable": False, "pid": 0, "host": ""}
    assert status(folder / "run") | {"pid": 0, "host": ""} == said
    return folder / "run"


def assert_goes_on_like(toys, output, whole, *more):
    ended_with([0, 0], *flags(toys, output, "--resume", "auto", *more))
    assert_same_end(output / "run", whole)


# ------------------------------------------------------------------------------- a save fails


@pytest.mark.parametrize("asynchronous", [False, True], ids=["in the step", "in the background"])
@pytest.mark.parametrize(
    "point", ["save.rest:rank=0", "save.rest:rank=1", "save.hash:rank=1", "publish.manifest"]
)
def test_a_save_that_raises_on_one_rank_ends_all_and_leaves_nothing_behind(
    toys, tmp_path, whole, point, asynchronous
):
    more = ("--async_save", str(asynchronous).lower())
    job = Job(2, *flags(toys, tmp_path, *more), failpoint=f"{point}:count=2:do=enospc")
    assert job.wait() == [74, 74], job.output
    assert "No space left on device" in job.output[0] and "Traceback" not in job.output[0]
    assert saved(tmp_path / "run") == [3] and leftovers(tmp_path / "run") == []
    said = status(tmp_path / "run")
    assert (said["code"], said["last_durable_step"], said["retryable"]) == (74, 3, True)
    assert "No space left" in said["reason"]
    if point == "save.rest:rank=1":
        assert_goes_on_like(toys, tmp_path, whole, *more)


@pytest.mark.parametrize("kind", ["full", "sharded"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_write_that_the_kernel_refuses(toys, tmp_path, rank, kind):
    """A file size limit is the kernel's own EFBIG in the middle of a write, like a full disk or a
    quota."""

    def limited():
        if os.environ.get("RANK") == str(rank):
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    more = ("--state_dict_type", kind)
    job = ended_with([74, 74], *flags(toys, tmp_path, *more), before=limited)
    assert "File too large" in job.output[0] or "os error 27" in job.output[0], job.output[0]
    assert saved(tmp_path / "run") == [] and leftovers(tmp_path / "run") == []


def test_no_room_is_found_before_the_model_is_loaded_and_before_each_save(toys, tmp_path):
    usage = shutil.disk_usage

    def with_free(room):
        return lambda: setattr(shutil, "disk_usage", lambda _: usage("/")._replace(free=room()))

    job = ended_with([74, 74], *flags(toys, tmp_path), before=with_free(lambda: 1000))
    assert "needs 16." in job.output[0] and "has 0.0 MiB free" in job.output[0]
    log = tmp_path / "run" / "metrics.jsonl"
    assert not log.exists() or metrics(tmp_path / "run") == []
    assert status(tmp_path / "run")["retryable"] is False
    for_one = with_free(lambda: 1000 if saved(tmp_path / "run") else 10**9)
    job = ended_with([74, 74], *flags(toys, tmp_path), before=for_one)
    assert "Checkpoint step-00000006 needs" in job.output[0] and saved(tmp_path / "run") == [3]


@pytest.mark.parametrize(
    ("strategy", "kind"), [("fsdp", "full"), ("fsdp2", "sharded"), ("ddp", "full")]
)
def test_a_save_in_the_background_writes_what_was_there_when_it_began(
    toys, tmp_path, strategy, kind
):
    """Though training goes on meanwhile: here for several steps."""
    more = ("--strategy", strategy, "--state_dict_type", kind)
    ended_with([0, 0], *flags(toys, tmp_path / "whole", *more))
    whole = tmp_path / "whole" / "run"

    def slow():
        from fabric_llm.checkpoint import writing

        write = writing.write
        writing.write = lambda *given, **more: (time.sleep(0.5), write(*given, **more))[1]

    ended_with([0, 0], *flags(toys, tmp_path, *more, "--async_save", "true"), before=slow)
    assert len(saved(whole)) == 3
    for path in whole.glob("step-*"):
        theirs = {place: one for place, one in tensors(path).items() if "probe" not in place[0]}
        ours = tensors(tmp_path / "run" / path.name)
        assert_same_tensors({place: ours[place] for place in theirs}, theirs)


# ------------------------------------------------------------------------------- signals


@pytest.mark.parametrize(
    ("point", "stops_at"),
    [("assembled", 0), ("set_up", 0), ("forward:count=5", 3), ("optimizer_step:count=3", 4)]
    + [("evaluate", 1), ("save.rest", 4)],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_sigterm_to_one_rank_wherever_it_is(toys, tmp_path, whole, point, stops_at, rank):
    ended_with([75, 75], *flags(toys, tmp_path), failpoint=f"{point}:rank={rank}:do=term")
    assert max(saved(tmp_path / "run"), default=0) <= stops_at
    said = status(tmp_path / "run")
    assert said["code"] == 75 and said["retryable"]
    assert (said["step"] or 0) == (said["last_durable_step"] or 0)
    if rank == 1:
        assert_goes_on_like(toys, tmp_path, whole)


UNITS = 5  # of the weights of the toy GPT-2: both embeddings, two layers, the last norm
SPIKES = "--spike_threshold 6 --spike_action rewind --lr 1e-4 --save_step_interval 12".split()


@pytest.fixture(scope="module")
def to_be_loaded(toys, tmp_path_factory):
    """When weights are loaded -> (flags, what each rank does before, where the run stands, how it
    ends undisturbed)."""
    folder = tmp_path_factory.mktemp("load")

    def with_a_spike():
        """The loss of the second step is 100 times too large: the run goes back."""
        from fabric_llm.model.language_model import LanguageModel

        forward, calls = LanguageModel.forward, iter(range(10**9))

        def faulty(self, *args, **kwargs):
            loss = forward(self, *args, **kwargs)
            trains = self.training and torch.is_grad_enabled() and kwargs.get("labels") is not None
            return loss * 100.0 if trains and next(calls) in (2, 3) else loss

        LanguageModel.forward = faulty

    def ended(name, *more, begins=None, before=lambda: None):
        if begins is not None:
            shutil.copytree(begins, folder / name)
        ended_with([0, 0], *flags(toys, folder / name, *more), before=before)
        return folder / name

    resumed = ("--resume", "auto", "--resume_override", "max_step")
    more = (*resumed, "--max_step", 6)
    half, twelve = ended("half", "--max_step", 3), ended("twelve", *SPIKES, "--max_step", 12)
    rewinds = (*SPIKES, *resumed, "--max_step", 16)
    rewound = ended("rewound", *rewinds, begins=twelve, before=with_a_spike)
    return {
        "start": (("--resume", "auto"), lambda: None, None, ended("start")),
        "resume": (more, lambda: None, half, ended("resumed", *more, begins=half)),
        "rewind": (rewinds, with_a_spike, twelve, rewound),
    }


@pytest.mark.parametrize(("do", "rank"), [("kill", 0), ("kill", 1), ("term", 1)])
@pytest.mark.parametrize("during", ["start", "resume", "rewind"])
def test_a_rank_that_ends_while_weights_are_loaded(toys, tmp_path, to_be_loaded, during, do, rank):
    """No other rank is left, nor a file that wasn't there, and the next start goes on to the same
    bits."""
    more, before, begins, undisturbed = to_be_loaded[during]
    if begins is not None:
        shutil.copytree(begins, tmp_path, dirs_exist_ok=True)
    there = {path: path.read_bytes() for path in tmp_path.glob("run/step-*/**/*") if path.is_file()}
    point = f"fill:rank={rank}:count={UNITS + 3 if during == 'rewind' else 3}:do={do}"
    job = Job(2, *flags(toys, tmp_path, *more), failpoint=point, before=before)
    codes = job.wait()
    assert codes == ([75, 75] if do == "term" else [-9, 71] if rank == 0 else [71, -9]), job.output
    assert all(path.read_bytes() == content for path, content in there.items())
    assert leftovers(tmp_path / "run") == []
    if do == "kill":
        assert {path for path in tmp_path.glob("run/step-*/**/*") if path.is_file()} == there.keys()
    job = Job(2, *flags(toys, tmp_path, *more), before=(lambda: None) if do == "term" else before)
    assert job.wait() == [0, 0], job.output
    assert metrics(tmp_path / "run") == metrics(undisturbed / "run")
    last = files.step_of(files.latest(undisturbed / "run"))
    assert_same_tensors(weights(tmp_path / "run", last), weights(undisturbed / "run", last))


def test_ctrl_c_that_ends_the_reader_of_the_output_as_well(toys, tmp_path, whole):
    """`train.py 2>&1 | tee log`: the terminal sends it to all of them, and what a run prints then
    has nowhere to go."""
    words = command(toys, tmp_path, "--max_step", 5000, "--save_step_interval", 5000)
    # its ranks are a group, as in a terminal
    run = begun(words, tmp_path, text=True, start_new_session=True)
    try:
        assert any(line.startswith("step 2/") for line in run.stdout)
        run.stdout.close()
        time.sleep(0.2)
        os.killpg(run.pid, signal.SIGINT)
        assert run.wait(120) == 75
    finally:
        with suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)
    said = status(tmp_path / "run")
    assert said["code"] == 75
    assert said["step"] == said["last_durable_step"] == saved(tmp_path / "run")[-1] >= 2
    assert metrics(tmp_path / "run", "step")[-1] == said["step"]
    assert_all_end(tmp_path)


def test_a_reader_that_does_not_read_holds_nobody_up(toys, tmp_path):
    """`train.py 2>&1 | tee log` after Ctrl-S: the pipe is full, and stays so."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with suppress(BlockingIOError):
        while os.write(writing, b"x" * 4096):
            pass
    os.set_blocking(writing, True)
    run = begun(command(toys, tmp_path), tmp_path, stdout=writing)
    try:
        assert run.wait(180) == 0
    finally:
        run.kill()
        run.wait()
        os.close(reading)
        os.close(writing)
    assert status(tmp_path / "run")["code"] == 0 and saved(tmp_path / "run")[-1] == STEPS
    assert_all_end(tmp_path)


# ------------------------------------------------------------------------------- a rank fails


def test_the_first_error_is_what_the_user_reads(toys, tmp_path):
    job = ended_with([71, 1], *flags(toys, tmp_path), failpoint="forward:rank=1:count=3:do=raise")
    assert "train.py: error: rank 1: RuntimeError: failpoint forward" in job.output[0]
    assert "RuntimeError: failpoint forward" in job.output[1] and "gloo" not in job.output[0]
    said = status(tmp_path / "run")
    assert said["code"] == 1 and "rank 1" in said["reason"] and not said["retryable"]


def test_out_of_memory(toys, tmp_path):
    job = ended_with([71, 79], *flags(toys, tmp_path), failpoint="forward:rank=1:count=3:do=oom")
    for said in (job.output[1], status(tmp_path / "run")["reason"]):
        for words in ("out of memory", "peak", "--micro_batch_size", "rank 1"):
            assert words in said
    assert status(tmp_path / "run")["code"] == 79 and not status(tmp_path / "run")["retryable"]


def test_a_command_that_started_its_ranks_ends_as_the_first_of_them(toys, tmp_path):
    """Or a restart loop would start again what can't work."""
    point = "forward:rank=1:count=3:do=oom"
    done = ran(command(toys, tmp_path), tmp_path, FABRIC_LLM_FAILPOINT=point)
    assert done.returncode == 79 == status(tmp_path / "run")["code"], done.stderr


def test_a_container_without_shared_memory_is_told_so():
    said = "NCCL error: ... Error while creating shared memory segment /dev/shm/x, No space left"
    fault = as_fault(torch.distributed.DistBackendError(said))
    assert fault.code == 2 and "--shm-size" in str(fault) and not fault.retryable


def test_ranks_that_are_numbered_already_by_who_started_the_first(toys, tmp_path):
    """As by a training operator for one replica."""
    given = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    done = ran(command(toys, tmp_path), tmp_path, **given, MASTER_PORT=str(free_port()))
    assert done.returncode == 0, done.stderr
    assert "fsdp on 2 cpu devices" in done.stdout


def test_ranks_of_two_commands_do_not_train_together(toys, tmp_path):
    """As two jobs would that meet at one address."""

    def other_command():
        if os.environ["RANK"] == "1":
            parse = train.parse_train
            train.parse_train = lambda argv: parse([*argv, "--lr", "1.0"])

    job = ended_with([2, 2], *flags(toys, tmp_path), before=other_command)
    sentence = "rank 1 was started with --lr 1.0, rank 0 with --lr 0.01: start all with one command"
    assert sentence in job.output[0]


@pytest.mark.parametrize("what", ["model", "data", "validation"])
def test_machines_with_other_files_at_the_same_paths_are_told(toys, tmp_path, what):
    """Such as a corpus that was prepared again on one machine alone."""
    for rank in ("0", "1"):
        shutil.copytree(toys / "gpt2", tmp_path / rank / "gpt2")
        shutil.copytree(toys / "data", tmp_path / rank / "data")
    other = tmp_path / "1"
    if what == "model":
        config = json.loads((other / "gpt2" / "config.json").read_text())
        (other / "gpt2" / "config.json").write_text(json.dumps({**config, "attn_pdrop": 0.9}))
    else:
        split = "train" if what == "data" else "validation"
        shutil.rmtree(other / "data" / split)
        shutil.copytree(toys / "many" / split, other / "data" / split)

    job = ended_with([2, 2], *flags(Path(), tmp_path), before=elsewhere(tmp_path))
    path = {"model": "the model's config.json", "data": "'data'", "validation": "validation sets"}
    assert f"{path[what]}: rank 1 reads another version at this path than rank 0" in job.output[0]


def test_machines_with_another_tokenizer_are_told(toys, tmp_path):
    """Such as a model's folder that was copied without it. The bytes of rank 1's rows wouldn't
    count in bits per byte, and probes would have other rows there."""
    for rank in ("0", "1"):
        shutil.copytree(toys / "gpt2", tmp_path / rank / "gpt2")
        shutil.copytree(toys / "data", tmp_path / rank / "data")
    words = {f"word{number}": number for number in range(VOCABULARY)}
    whole_words = Tokenizer(models.WordLevel(words, unk_token="word0"))
    PreTrainedTokenizerFast(tokenizer_object=whole_words).save_pretrained(tmp_path / "0" / "gpt2")

    def change():
        os.chdir(tmp_path / os.environ["RANK"])

    job = Job(2, *flags(Path(), tmp_path), before=change)
    assert job.wait() == [2, 2], job.output
    assert "the tokenizer: rank 1 reads another version at this path" in job.output[0]


def test_machines_with_another_checkpoint_to_branch_from_are_told(toys, tmp_path):
    """Rank 1 would go on with its part of the optimizer's state of another run."""
    for rank, decay in (("0", 0.1), ("1", 0.2)):
        (tmp_path / rank).mkdir()
        train_ranks(1, *flags(toys, tmp_path / rank / "old", "--weight_decay", decay))

    def change():
        os.chdir(tmp_path / os.environ["RANK"])

    branch = ("--resume", "true", "--checkpoint", "old/run/step-00000003", "--weight_decay", 0.1)
    job = Job(2, *flags(toys, tmp_path), *branch, before=change)
    assert job.wait() == [2, 2], job.output
    assert "step-00000003': rank 1 reads another version at this path" in job.output[0]


def test_hashing_a_large_start_may_take_longer_than_a_hang(toys, tmp_path, whole):
    def slow():
        sha256 = files.sha256

        def slowly(path):
            if path == whole / f"step-{STEPS:08}" / "model.safetensors":
                time.sleep(12)
            return sha256(path)

        files.sha256 = slowly

    begin = ("--hang_timeout", 5, "--model_name", whole / f"step-{STEPS:08}")
    ended_with([0, 0], *flags(toys, tmp_path), *begin, before=slow)


def test_a_checkpoint_may_take_longer_than_a_hang_to_write_and_to_read(toys, tmp_path):
    """Rank 0 writes most of its files, and rank 1 reads slowly: the other one waits."""

    def slow():
        from fabric_llm.model.tensor_files import Tensors

        sha256, elements, one_by_one = files.sha256, Tensors.elements, threading.Lock()

        def slowly(path):
            if ".tmp-step-" in str(path) and os.environ["RANK"] == "0":
                with one_by_one:
                    time.sleep(2)
            return sha256(path)

        def slow_elements(self, *given):
            time.sleep(0.3 * int(os.environ["RANK"]))
            return elements(self, *given)

        files.sha256, Tensors.elements = slowly, slow_elements

    more = ("--hang_timeout", 4, "--save_step_interval", 100)
    for steps, before in ((2, {}), (3, {"before": slow})):
        more = (*more, "--max_step", steps, "--resume", "auto", "--resume_override", "max_step")
        began = time.monotonic()
        ended_with([0, 0], *flags(toys, tmp_path), *more, **before)
    assert time.monotonic() - began > 20 and saved(tmp_path / "run")[-1] == 3


def test_machines_that_do_not_share_the_output_directory(toys, tmp_path):
    job = ended_with([73, 73], *flags(toys, "out", "--hang_timeout", 6), before=elsewhere(tmp_path))
    sentence = "rank 1 doesn't see what rank 0 writes into 'out/run': it must be on a disk that "
    sentence += "all machines share, or --mirror be given."
    assert sentence in job.output[0]
    assert status(tmp_path / "0" / "out" / "run")["reason"] == sentence


def test_hashing_a_large_checkpoint_may_take_longer_than_a_hang(toys, tmp_path, whole):
    """The other ranks wait for rank 0, and would be told to hang."""
    shutil.copytree(whole, tmp_path / "run")

    def slow():
        newest_valid = keep.newest_valid

        def slowly(*given):
            time.sleep(12)
            return newest_valid(*given)

        keep.newest_valid = slowly

    again = ("--hang_timeout", 5, "--resume", "true", "--resume_override", "max_step")
    ended_with([0, 0], *flags(toys, tmp_path, *again), "--max_step", STEPS + 1, before=slow)


def test_a_checkpoint_is_published_only_with_what_all_ranks_have_written(toys, tmp_path):
    """As when a machine's network disk is unmounted during the run."""
    change = elsewhere(tmp_path)

    def believe():
        change()
        run_status.wait_for_status = lambda *given: True

    ended_with([74, 74], *flags(toys, "out"), before=believe)
    run = tmp_path / "0" / "out" / "run"
    assert saved(run) == [] and leftovers(run) == []
    sentence = "as rank 1 has written it; 'out/run' must be on a disk that all machines share."
    assert sentence in status(run)["reason"] and not status(run)["retryable"]


@contextmanager
def side_by_side(toys, tmp_path, point, *more):
    """Two runs in folders `0` and `1`: rank 0 of the first comes to the failpoint, and rank 1 of
    the second. Most of the time all wait."""
    jobs = [
        Job(2, *flags(toys, tmp_path / str(rank), *more), failpoint=point.format(rank=rank))
        for rank in (0, 1)
    ]
    try:
        yield jobs
    finally:
        for job in jobs:
            with suppress(ChildProcessError):  # they are gone
                job.kill([0, 1])


@pytest.mark.parametrize("action", ["hang", "stop"])
def test_a_rank_that_hangs_or_is_frozen_is_named(toys, tmp_path, action):
    more = "--hang_timeout 10 --num_workers 0 --save_step_interval 100".split()
    point = f"read_data:rank={{rank}}:count=9:do={action}"
    with side_by_side(toys, tmp_path, point, *more) as jobs:
        for rank, job in enumerate(jobs):
            codes = end_after(job, frozen=rank, other=1 - rank) if action == "stop" else job.wait()
            assert codes[1 - rank] == 71, job.output
            assert codes[rank] == (71 if action == "hang" else -9), job.output
            said = status(tmp_path / str(rank) / "run")
            assert f"rank {rank}" in said["reason"], said
            assert "after step" in said["reason"] or rank == 0, said
            if action == "hang":
                assert "no progress for 10 s" in said["reason"]
                assert "time.sleep" in job.output[rank], "where it was"
            else:
                assert "lost or frozen" in said["reason"]
            assert said["code"] == 71 and said["retryable"]


@pytest.mark.parametrize("action", ["kill", "stop"])
def test_rank_0_is_lost_just_before_another_connects_to_the_store_that_it_holds(
    toys, tmp_path, action
):
    """The harness's store would try to connect for five minutes, and for ever to a frozen one."""

    def late():
        from fabric_llm.processes.watch import Watch

        connect = Watch._connect
        Watch._connect = lambda self: (time.sleep(int(os.environ["RANK"])), connect(self))[1]

    point = f"assembled:rank=0:do={action}"
    job = Job(2, *flags(toys, tmp_path, "--hang_timeout", 6), failpoint=point, before=late)
    codes = end_after(job, frozen=0, other=1) if action == "stop" else job.wait()
    assert codes == [-9, 71], job.output
    assert "train.py: rank 1" in job.output[1] and "Traceback" not in job.output[1]
    assert status(tmp_path / "run")["code"] == 71 and status(tmp_path / "run")["retryable"]


def test_why_a_run_ended_is_told_by_rank_0_if_it_could(toys, tmp_path):
    """A rank that was too slow to hear it sees a store that has gone."""

    def deaf():
        from fabric_llm.processes import watch
        from fabric_llm.processes.watch import Watch

        if os.environ["RANK"] == "0":
            Watch.wait_for = lambda self, ranks, seconds: False
        else:
            Watch.first = property(lambda self: None, lambda self, first: None)
            watch.hanging = lambda beats, seconds: None

    more = "--hang_timeout 6 --num_workers 0 --save_step_interval 100".split()
    point = "read_data:rank=0:count=9:do=hang"
    job = ended_with([71, 71], *flags(toys, tmp_path, *more), failpoint=point, before=deaf)
    assert "rank 0 (process" in job.output[1] and "lost or frozen" in job.output[1]
    assert "rank 0 hangs: no progress for 6 s" in status(tmp_path / "run")["reason"]


def test_a_rank_that_no_connection_tells_hears_of_rank_0s_death(toys, tmp_path):
    """As one that is stuck in NCCL: here it sleeps."""
    more = ("--hang_timeout", 600, "--num_workers", 0)
    job = Job(2, *flags(toys, tmp_path, *more), failpoint="read_data:rank=1:count=9:do=hang")
    wait_until_saved(tmp_path / "run", 3)
    time.sleep(1)
    job.kill([0])
    assert job.wait() == [-9, 71], job.output
    assert "rank 0 (process" in job.output[1] and "lost or frozen" in job.output[1]
    assert status(tmp_path / "run")["code"] == 71


def test_a_rank_that_fails_while_rank_0_is_frozen_still_ends_and_says_why(toys, tmp_path):
    """Its watching thread waits for the store by then."""

    def fail_later():
        from fabric_llm.base import failpoints

        if os.environ["RANK"] == "1":
            os.environ[failpoints.VARIABLE] = "read_data:count=9:do=raise"
            do = failpoints._do
            failpoints._do = lambda action, name: (time.sleep(3), do(action, name))

    more = ("--hang_timeout", 600, "--num_workers", 0)
    point = "read_data:count=9:do=stop"
    job = Job(2, *flags(toys, tmp_path, *more), failpoint=point, before=fail_later)
    assert end_after(job, frozen=0, other=1) == [-9, 1], job.output
    assert "RuntimeError: failpoint read_data" in job.output[1]
    assert status(tmp_path / "run")["code"] == 1
    assert "failpoint read_data" in status(tmp_path / "run")["reason"]


# ------------------------------------------------------------------------------- real processes


def command(toys, output, *more):
    words = flags(toys, output, *more)
    return [str(ROOT / "train.py"), *map(str, words), "--devices", "2", "--log_step_interval", "1"]


def environment(**more):
    return {**os.environ, "OMP_NUM_THREADS": "1", **more}


PYTHON = (sys.executable,)
OUT = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}


def begun(words, folder, program=PYTHON, variables={}, **options):
    """`python WORDS`, a process."""
    given = {**OUT, "env": environment(**variables), "cwd": folder, **options}
    return subprocess.Popen([*program, *words], **given)


def ran(words, folder, program=PYTHON, seconds=120, **variables):
    """`python WORDS`, a process that has ended."""
    given = {"env": environment(**variables), "cwd": folder, "timeout": seconds}
    return subprocess.run([*program, *words], capture_output=True, text=True, **given)


def processes_of(output):
    """Processes that still have the output folder on their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if str(output).encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


def kill_all_of(output):
    for left in processes_of(output):
        with suppress(ProcessLookupError):
            os.kill(left, signal.SIGKILL)


def assert_all_end(output):
    """No orphan: the kernel needs a moment to take a process away."""
    deadline = time.monotonic() + 10
    while (left := processes_of(output)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []


@pytest.mark.parametrize("rank", [0, 1])
def test_a_plain_command_that_ends_while_weights_are_loaded_leaves_no_process_and_no_file(
    toys, tmp_path, whole, rank
):
    (tmp_path / "temporary").mkdir()
    given = {"FABRIC_LLM_FAILPOINT": f"fill:rank={rank}:count=3"}
    given["TMPDIR"] = str(tmp_path / "temporary")
    done = ran(command(toys, tmp_path), tmp_path, **given)
    assert done.returncode == (71 if rank == 1 else -9), done.stderr
    assert_all_end(tmp_path)
    assert list((tmp_path / "temporary").iterdir()) == []
    assert saved(tmp_path / "run") == leftovers(tmp_path / "run") == []
    assert_goes_on_like(toys, tmp_path, whole)


def test_a_killed_rank_of_a_plain_command_leaves_no_orphan_and_the_run_goes_on(
    toys, tmp_path, whole
):
    """Rank 0 of one command and rank 1 of another, side by side: starting is what takes time."""

    def killed(rank):
        point = f"between_steps:rank={rank}:count=5"
        return ran(command(toys, tmp_path / str(rank)), tmp_path, FABRIC_LLM_FAILPOINT=point)

    with ThreadPoolExecutor(2) as pool:
        ended = list(pool.map(killed, (0, 1)))
    for rank, done in enumerate(ended):
        output = tmp_path / str(rank)
        assert done.returncode == (71 if rank == 1 else -9), done.stderr
        assert_all_end(output)
        said = status(output / "run")
        assert said["retryable"] and said["last_durable_step"] == 3
        if rank == 1:
            assert re.search("rank 1 was killed by SIGKILL after step [45],", done.stderr)
            assert said["code"] == 71
        assert_goes_on_like(toys, output, whole)


def test_a_frozen_rank_of_a_plain_command_leaves_no_orphan(toys, tmp_path):
    """Rank 0 is ended by the rank that it started, which doesn't outlive it. Two commands, that
    wait most of the time."""
    outputs = first, second = tmp_path / "0", tmp_path / "1"
    said = tmp_path / "said"  # no pipe: an orphan would hold it open

    def started(rank):
        words = command(toys, outputs[rank], "--hang_timeout", 20)
        point = f"between_steps:rank={rank}:count=4:do=stop"
        given = {"variables": {"FABRIC_LLM_FAILPOINT": point}, "stdout": subprocess.DEVNULL}
        with (said if rank == 0 else Path(os.devnull)).open("w") as errors:
            return begun(words, tmp_path, **given, stderr=errors)

    frozen, killed = started(0), started(1)
    try:
        wait_for(lambda: (second / "run" / "step-00000003").exists(), 120)
        time.sleep(1)
        assert len(processes_of(second)) == 2
        killed.kill()
        killed.wait()
        assert_all_end(second)
        assert frozen.wait(120) == -9, said.read_text()
        assert re.search("rank 0.*is lost or frozen", said.read_text()), said.read_text()
        assert_all_end(first)
        assert status(first / "run")["code"] == 71
        assert status(first / "run")["last_durable_step"] == 3
    finally:
        kill_all_of(first)
        kill_all_of(second)
        frozen.wait()
        killed.wait()


def test_a_rank_that_ends_before_training_is_named(toys, tmp_path):
    """As one whose machine is out of memory, or that Ctrl-C reaches first: here as soon as its
    Python begins."""
    ends = [("os._exit(9)", "ended with code 9", 71), ("os._exit(77)", "ended with code 77", 77)]
    # A rank begins with the signals to stop blocked.
    kill = "signal.pthread_sigmask(signal.SIG_UNBLOCK, [2]); os.kill(os.getpid(), 2)"
    ends.append((kill, "was killed by SIGINT", 75))
    with ThreadPoolExecutor(2) as pool:  # each takes its time to start
        list(pool.map(lambda end: assert_its_end_is_named(toys, tmp_path, *end), ends))


# benchmarks/mechanisms.py comes by a sitecustomize.py as well, of which Python runs only the first
# that it finds.
TAKE_AWAY = """
if "FABRIC_LLM_TAKEN_AWAY" in os.environ:
    from benchmarks.mechanisms import install
    install()
"""


def beginning_with(program, tmp_path):
    """A PYTHONPATH with which each Python runs the program first."""
    (tmp_path / "site").mkdir(parents=True)
    (tmp_path / "site" / "sitecustomize.py").write_text(program + TAKE_AWAY)
    return os.pathsep.join([str(tmp_path / "site"), os.environ.get("PYTHONPATH", "")])


def assert_its_end_is_named(toys, tmp_path, how, ended, code):
    tmp_path /= str(code)
    program = "import os, signal\nsignal.signal(signal.SIGINT, signal.SIG_DFL)\n"
    program += f"if os.environ.get('LOCAL_RANK') == '1': {how}\n"
    path = beginning_with(program, tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "STATUS.json").write_text('{"code": 75, "reason": "of the run before"}')
    done = ran(command(toys, tmp_path), tmp_path, PYTHONPATH=path)
    assert done.returncode == code, done.stderr
    assert f"rank 1 {ended} before training began" in done.stderr
    said = status(tmp_path / "run")
    assert said["code"] == code and said["reason"] == f"rank 1 {ended} before training began."
    assert said["retryable"] == (code in (71, 75))
    assert_all_end(tmp_path)


# ------------------------------------------------------------------------------ a rank doesn't come


def run_in(tmp_path, words, **more):
    """(code, what it said) of a command; never waits for an orphan's pipe."""
    tmp_path.mkdir(parents=True, exist_ok=True)
    words, given = [sys.executable, *words], {"env": environment(**more), "cwd": tmp_path}
    with (tmp_path / "log").open("w") as log:
        done = subprocess.run(words, stdout=log, stderr=log, timeout=300, **given)
    return done.returncode, (tmp_path / "log").read_text()


def by_hand(rank, port):
    """The environment of one of two ranks that somebody started, without anyone who looks after
    them."""
    given = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    return {**given, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def assert_says(run, *words, code=71):
    said = status(run)
    assert said["code"] == code and said["retryable"] == (code == 71), said
    assert all(word in said["reason"] for word in words), said


def frozen_before_import(toys, tmp_path):
    """As one whose machine swaps, or waits for a disk that has gone."""
    stop = "import os\nif os.environ.get('LOCAL_RANK') == '1': os.kill(os.getpid(), 19)\n"
    path = beginning_with(stop, tmp_path)
    code, said = run_in(tmp_path, command(toys, tmp_path, "--join_timeout", 5), PYTHONPATH=path)
    assert code == 71, said
    assert "train.py: error: rank 1 hasn't joined: nothing was heard of it" in said, said
    assert_says(tmp_path / "run", "rank 1 hasn't joined", "for 5 s (--join_timeout)")


WAIT_FOR_FROZEN_PARENT = """
import os, time
while os.environ.get("LOCAL_RANK") == "1" and open(f"/proc/{os.getppid()}/stat").read().rpartition(")")[2].split()[0] != "T":
    time.sleep(0.1)
"""


def rank_0_frozen_before_the_others_come(toys, tmp_path):
    """It holds what the others would tell; the rank that it has started ends it, and with it
    itself."""
    given = {"PYTHONPATH": beginning_with(WAIT_FOR_FROZEN_PARENT, tmp_path)}
    given["FABRIC_LLM_FAILPOINT"] = "joining:rank=0:do=stop"
    code, said = run_in(tmp_path, command(toys, tmp_path, "--join_timeout", 5), **given)
    assert code == -9 and "rank 1: rank 0 hasn't joined: nobody answers at 127.0.0.1:" in said, said
    assert_says(tmp_path / "run", "rank 0 hasn't joined", "for 5 s (--join_timeout)")


def never_started(toys, tmp_path, rank):
    """By hand or by srun: nobody looks after the others."""
    port = free_port()
    words = command(toys, tmp_path, "--join_timeout", 5)
    code, said = run_in(tmp_path, words, **by_hand(1 - rank, port))
    heard = f"rank {rank} hasn't joined: n"
    heard += "othing was heard of it" if rank == 1 else f"obody answers at 127.0.0.1:{port}"
    assert code == 71 and heard in said, said
    assert_says(tmp_path / "run", heard, "for 5 s (--join_timeout)")


def test_a_rank_that_does_not_come_is_named(toys, tmp_path):
    """Side by side: they wait most of the time."""
    cases = [(frozen_before_import,), (rank_0_frozen_before_the_others_come,)]
    cases += [(never_started, 0), (never_started, 1)]

    def happens(number):
        case, *more = cases[number]
        case(toys, tmp_path / str(number), *more)

    try:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(happens, range(4)))
        assert_all_end(tmp_path)
    finally:
        kill_all_of(tmp_path)


@pytest.mark.parametrize("point", ["joining", "joined"])
def test_a_rank_that_is_frozen_while_it_joins_is_named(toys, tmp_path, point):
    stops = point + ":rank={rank}:do=stop"
    with side_by_side(toys, tmp_path, stops, "--join_timeout", 10) as jobs:
        for rank, job in enumerate(jobs):
            codes = end_after(job, frozen=rank, other=1 - rank)
            assert codes[1 - rank] == 71 and codes[rank] == -9, job.output
            sentence = "is lost or frozen: silent for 10 s (--join_timeout), before training began."
            assert_says(tmp_path / str(rank) / "run", f"rank {rank} (process", sentence)
            assert f"rank {rank} (process" in job.output[1 - rank]
            assert "Traceback" not in job.output[1 - rank]


TORCHRUN = str(Path(sys.executable).parent / "torchrun")
TWO_RANKS = [TORCHRUN, *"--standalone --nproc_per_node 2 --max_restarts 2".split()]


def test_a_killed_rank_under_torchrun_is_started_again(toys, tmp_path, whole):
    """Each attempt counts steps anew: the second, from step 3, never comes to its fifth before the
    end at 8... + 1."""
    words, given = command(toys, tmp_path, "--resume", "auto"), {"program": TWO_RANKS}
    given["FABRIC_LLM_FAILPOINT"] = "between_steps:rank=1:count=6"
    given["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    done = ran(words, tmp_path, seconds=180, **given)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "resumed from" in done.stdout
    assert_same_end(tmp_path / "run", whole)
    assert_all_end(tmp_path)


def test_a_run_that_was_asked_to_stop_is_not_started_again_by_torchrun(toys, tmp_path):
    """Which takes any exit code but 0 for a failure; STATUS.json says what it was."""
    words = command(toys, tmp_path, "--resume", "auto", "--max_step", 10_000)
    running = begun(words, tmp_path, program=TWO_RANKS, text=True)
    try:
        log = tmp_path / "run" / "metrics.jsonl"
        wait_for(lambda: log.is_file() and len(metrics(tmp_path / "run", "step")) > 2, 120)
        (tmp_path / "run" / "stop").touch()
        said = running.communicate(timeout=120)[0]
    finally:
        running.terminate()  # torchrun hands it on
    assert running.returncode == 0 and said.count("Stopped on request") == 1, said[-3000:]
    assert status(tmp_path / "run")["code"] == 75


def test_a_log_that_cannot_be_made_durable_ends_all_ranks_and_leaves_nothing_behind(toys, tmp_path):
    def full_disk():
        from fabric_llm.run.metrics import MetricsFile

        def refused(self):
            raise OSError(errno.ENOSPC, "No space left on device")

        MetricsFile.make_durable = refused

    ended_with([74, 74], *flags(toys, tmp_path), before=full_disk)
    assert leftovers(tmp_path / "run") == [] and saved(tmp_path / "run") == []


@pytest.mark.slow
def test_a_lost_node_under_torchrun(toys, tmp_path, whole):
    """Two agents of one rank each; one is killed with its rank, and the other goes on alone."""
    torchrun = [TORCHRUN, *"--nnodes 1:2 --nproc_per_node 1 --max_restarts 3".split()]
    torchrun += ["--rdzv_backend", "c10d", "--rdzv_endpoint", f"localhost:{free_port()}"]
    torchrun += ["--rdzv_conf", "last_call_timeout=8,join_timeout=60"]
    more = "--resume auto --max_step 300 --save_step_interval 20".split()
    words = command(toys, tmp_path, *more)
    words[words.index("--devices") + 1] = "auto"
    words[words.index("--strategy") + 1] = "auto"
    env = environment(TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    logs = [(tmp_path / f"log-{k}").open("w") for k in range(2)]
    agents = []
    for log in logs:
        out = {"stdout": log, "stderr": log, "start_new_session": True}
        agents.append(subprocess.Popen([*torchrun, *words], env=env, **out))
        time.sleep(1)
    wait_for((tmp_path / "run" / "step-00000040").exists, 120)
    children = Path(f"/proc/{agents[1].pid}/task/{agents[1].pid}/children").read_text().split()
    # torchrun gives its ranks sessions of their own
    for pid in (agents[1].pid, *map(int, children)):
        os.kill(pid, signal.SIGKILL)
    assert agents[0].wait(120) == 0, (tmp_path / "log-0").read_text()[-3000:]
    said = (tmp_path / "log-0").read_text()
    for found in ("fsdp on 2 cpu devices", "single on 1 cpu device", "resumed from"):
        assert found in said
    steps = [line["step"] for line in lines(tmp_path / "run", "loss")]
    assert steps == list(range(1, 301)), "each step once"
    for log in logs:
        log.close()
    agents[1].wait()


def test_machines_without_torchrun_take_the_checkpoint_that_rank_0_takes(toys, tmp_path, whole):
    """Two of them, each started by hand with MASTER_ADDR; the newest checkpoint is damaged, which
    only hashes tell."""
    shutil.copytree(whole, tmp_path / "run")
    newest = tmp_path / "run" / f"step-{STEPS:08d}" / "model.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1] + b"x")
    words = command(toys, tmp_path, "--resume", "true", "--num_nodes", 2)
    words[words.index("--devices") + 1] = "1"
    given = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    nodes = [
        begun(words, tmp_path, variables={**given, "NODE_RANK": rank}, text=True) for rank in "01"
    ]
    said = [node.communicate(timeout=120)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], said
    assert "has changed. Resuming from" in said[0] and "fsdp on 2 cpu devices" in said[0]
    assert_same_end(tmp_path / "run", whole)


def test_a_full_disk_at_the_log(toys, tmp_path):
    def full():
        from fabric_llm.run.metrics import MetricsFile

        write = MetricsFile.write

        def failing(self, progress, record):
            if progress.step == 5:
                raise OSError(28, os.strerror(28), str(self.path))
            write(self, progress, record)

        MetricsFile.write = failing

    job = ended_with([74, 71], *flags(toys, tmp_path), before=full)
    assert "No space left on device" in job.output[0] and "Traceback" not in job.output[0]
    assert "lost" not in job.output[1]
    assert status(tmp_path / "run")["code"] == 74 and status(tmp_path / "run")["retryable"]


# ------------------------------------------------------------------------------- the directory


def test_two_runs_in_one_directory(toys, tmp_path):
    hangs = "between_steps:rank=0:count=4:do=hang"
    first = Job(2, *flags(toys, tmp_path, "--hang_timeout", 600), failpoint=hangs)
    wait_until_saved(tmp_path / "run", 3)
    time.sleep(1)  # nothing is written after that
    before = contents(tmp_path / "run")
    for more in ((), ("--resume", "auto"), ("--resume", "true")):
        second = ended_with([73 if more else 2], *flags(toys, tmp_path, *more))
        assert not more or "Another run (process" in second.output[0]
    assert before == contents(tmp_path / "run")
    first.kill([0, 1])
    first.wait()
    third = Job(2, *flags(toys, tmp_path, "--resume", "auto"))
    assert third.wait() == [0, 0], "a lock goes with the process that held it"


def without_locks(number):
    def flock(descriptor, how):
        raise OSError(number, os.strerror(number))

    return lambda: setattr(fcntl, "flock", flock)


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_a_file_system_without_locks_is_a_warning(toys, tmp_path, number):
    """And nothing stays behind that would keep the next start out, on whatever machine."""
    point, without = "between_steps:count=4", without_locks(number)
    ended_with([-9], *flags(toys, tmp_path), failpoint=point, before=without)
    job = ended_with([0], *flags(toys, tmp_path, "--resume", "auto"), before=without)
    assert job.output[0].count("has no locks; nothing keeps a second run out of it.") == 1


def test_a_status_that_cannot_be_written_hides_nothing(tmp_path, capsys):
    (tmp_path / "run").write_text("a file where the run's folder was")
    run_status.write_status(tmp_path / "run", 74, "no space left", 3, True)
    assert "Warning: STATUS.json couldn't be written" in capsys.readouterr().out


def test_a_status_has_room_on_a_full_disk(tmp_path):
    mounting = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)]
    if os.geteuid() or subprocess.run(mounting, capture_output=True).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        run_status.write_status(tmp_path, None, "running", 100_000_000, True)
        with pytest.raises(OSError), (tmp_path / "large").open("wb") as file:
            file.write(bytes(2**20))
        run_status.write_status(tmp_path, 74, "\u2026" * 4000, 3, False)
        assert status(tmp_path)["code"] == 74 and not status(tmp_path)["retryable"]
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_an_output_that_cannot_be_written(toys, tmp_path, whole):
    (tmp_path / "run").write_text("a file")
    ended_with([73], *flags(toys, tmp_path))
    # A folder that another user has closed. Root sees into it, unless that right is taken away.
    closed, rights = tmp_path / "closed", "-dac_override,-dac_read_search"
    closed.mkdir(0)
    user = ["setpriv", "--bounding-set", rights, "--inh-caps", rights] * (os.geteuid() == 0)
    for program, *words in (
        ("train.py", *flags(toys, closed)), ("export_hf.py", whole, "--output", closed / "x" / "y"),
        ("plan.py", "--html", closed / "x.html", *flags(toys, tmp_path)),
    ):
        command = [*user, sys.executable, ROOT / program, *words]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
        assert (done.returncode, len(done.stderr.splitlines())) == (73, 1), done.stderr


# ------------------------------------------------------------------------------- changes on purpose


def test_extending_shortening_and_rolling_back_say_the_new_schedule(toys, tmp_path, whole):
    shutil.copytree(whole, tmp_path / "run")
    on_purpose = ("--resume", "true", "--resume_override")
    longer = ended_with([0, 0], *flags(toys, tmp_path, *on_purpose, "max_step"), "--max_step", 12)
    rates = metrics(tmp_path / "run", "lr")
    assert "Extended: 12 steps instead of 8." in longer.output[0]
    last_rate = f"The learning rate of step 8, the last one, was {rates[7]:.3e}."
    assert last_rate in longer.output[0] and "lr before" not in longer.output[0]
    assert len(rates) == 12 and all(rate > 0 for rate in rates[8:])
    assert rates[:8] == metrics(whole, "lr")
    third = tmp_path / "run" / "step-00000003"
    back = (*on_purpose, "max_step,lr", "--checkpoint", third, "--lr", 2e-2)
    rolled = ended_with([0, 0], *flags(toys, tmp_path, *back), "--max_step", 6)
    said = rolled.output[0]
    assert "Back from step-00000012 to step-00000003" in said
    assert "Shortened: 6 steps instead of 8." in said
    assert "lr: 0.02 from here on, 0.01 before." in said
    assert saved(tmp_path / "run") == [3, 6]
    assert len(list((tmp_path / "run").glob("aside-step-*"))) == 4
    assert metrics(tmp_path / "run", "step")[-1] == 6
    # However the newest is spelled, nothing is behind it.
    newest = tmp_path / "run" / ".." / "run" / "step-00000006"
    more = (*on_purpose, "max_step", "--checkpoint", newest, "--lr", 2e-2)
    on = ended_with([0, 0], *flags(toys, tmp_path, *more), "--max_step", 7)
    assert "Extended: 7 steps" in on.output[0] and "aside" not in on.output[0]


def test_a_branch_leaves_its_run_as_it_is(toys, tmp_path, whole):
    shutil.copytree(whole, tmp_path / "run")
    before = contents(tmp_path / "run")
    third = tmp_path / "run" / "step-00000003"
    branch = ("--resume", "true", "--checkpoint", third, "--run_name", "branch")
    job = Job(2, *flags(toys, tmp_path, *branch, "--lr", 5e-3, "--resume_override", "lr"))
    assert job.wait() == [0, 0], job.output
    assert f"A branch of {tmp_path}/run/step-00000003" in job.output[0]
    assert "lr before" in job.output[0]
    assert before == contents(tmp_path / "run")
    ours, theirs = metrics(tmp_path / "branch"), metrics(whole)
    assert ours[:4] == theirs[:4] and ours[4:] != theirs[4:] and len(ours) == len(theirs)
    job = Job(2, *flags(toys, tmp_path, *branch, "--lr", 5e-3, "--resume_override", "lr"))
    assert job.wait() == [2, 2] and "would begin a branch in" in job.output[0]
    shutil.rmtree(tmp_path / "branch")
    ended_with([-9, -9], *flags(toys, tmp_path, *branch), failpoint="between_steps:count=4")
    shutil.rmtree(tmp_path / "run" / "step-00000003")  # pruned meanwhile
    restart = lambda: os.environ.update(TORCHELASTIC_RESTART_COUNT="1")  # noqa: E731
    job = Job(2, *flags(toys, tmp_path, *branch), before=restart)
    assert job.wait() == [0, 0], "torchrun gives the same command line again"
    assert metrics(tmp_path / "branch") == theirs
    elsewhere = (*branch, "--checkpoint", whole / "step-00000006")
    job = Job(2, *flags(toys, tmp_path, *elsewhere), before=restart)
    assert job.wait() == [2, 2], "that is another branch"
    assert "would begin a branch in" in job.output[0]


def test_a_rollback_that_is_restarted_isnt_made_again(toys, tmp_path, whole):
    """As a restart loop or torchrun does, with the same command line."""
    shutil.copytree(whole, tmp_path / "run")
    back = ("--resume", "auto", "--checkpoint", tmp_path / "run" / "step-00000003")
    ended_with([-9, -9], *flags(toys, tmp_path, *back), failpoint="between_steps:count=4")
    assert saved(tmp_path / "run") == [3, 6]
    assert len(list((tmp_path / "run").glob("aside-step-*"))) == 2
    job = ended_with([0, 0], *flags(toys, tmp_path, *back))
    assert job.output[0].split("resumed from ")[1].split(";")[0].endswith("step-00000006")
    assert metrics(tmp_path / "run") == metrics(whole)
    assert len(list((tmp_path / "run").glob("aside-step-*"))) == 2
    ended = status(tmp_path / "run")
    job = Job(2, *flags(toys, tmp_path, *back))
    assert job.wait() == [0, 0] and "nothing is left to do" in job.output[0]
    assert status(tmp_path / "run") == ended
    on_purpose = (*back, "--resume", "true")
    job = Job(2, *flags(toys, tmp_path, *on_purpose))
    assert job.wait() == [0, 0] and "Back from step-00000008 to step-00000003" in job.output[0]


def test_retention(toys, tmp_path):
    more = "--save_step_interval 1 --keep_last 2 --keep_every 4 --keep_best 1".split()
    more += ["--eval_step_interval", 1]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "step-00000001.pinned").touch()
    ended_with([0], *flags(toys, tmp_path, *more))
    losses = metrics(tmp_path / "run", "eval_loss")[1:]
    best = losses.index(min(losses)) + 1
    assert saved(tmp_path / "run") == sorted({1, 4, 7, 8, best})
    from_4 = ("--resume", "true", "--checkpoint", tmp_path / "run" / "step-00000004")
    ended_with([0], *flags(toys, tmp_path, *more, *from_4, "--keep_every", 100))
    assert 4 in saved(tmp_path / "run"), "the one that it was resumed from"


def test_what_a_kill_in_the_last_prune_leaves_is_swept_though_nothing_is_left_to_do(toys, tmp_path):
    more = ("--save_step_interval", STEPS // 2, "--keep_last", 1, "--eval_iters", 0)
    ended_with([-9, 71], *flags(toys, tmp_path, *more), failpoint="prune.renamed:rank=0")
    [left] = leftovers(tmp_path / "run")
    assert left.startswith(f".trash-step-{STEPS // 2:08}-") and saved(tmp_path / "run") == [STEPS]
    (tmp_path / "run" / ".tmp-step-00000003-01234567").mkdir()
    job = Job(2, *flags(toys, tmp_path, *more, "--resume", "auto"))
    assert job.wait() == [0, 0] and "nothing is left to do" in job.output[0], job.output
    assert leftovers(tmp_path / "run") == [] and saved(tmp_path / "run") == [STEPS]
    assert f"Removed {left}, left by a save that was cut off." in job.output[0]


# ------------------------------------------------------------------------------- clocks


def test_clocks_that_jump_change_nothing(toys, tmp_path, whole):
    def jumping():
        now, calls = time.time, iter(range(10**9))
        time.time = lambda: now() + (-1) ** next(calls) * 86_400

    ended_with([-9, -9], *flags(toys, tmp_path), failpoint="between_steps:count=7", before=jumping)
    for age, path in enumerate(files.step_directories(tmp_path / "run")):
        os.utime(path, (10**9 - age, 10**9 - age))  # the newest looks oldest
    job = ended_with([0, 0], *flags(toys, tmp_path, "--resume", "auto"), before=jumping)
    assert job.output[0].split("resumed from ")[1].split(";")[0].endswith("step-00000006")
    assert_same_tensors(weights(tmp_path / "run", STEPS), weights(whole, STEPS))
