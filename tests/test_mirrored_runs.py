"""Runs with --mirror: they survive the loss of process, machine and disk, and say in one sentence
what is wrong with a mirror.

A machine is lost when the ranks and the mirror's process beside them are killed with SIGKILL and
the run directory is gone.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

pytest.importorskip("obstore")

from conftest import flip
from ranks import (
    Job,
    assert_same_tensors,
    ended_with,
    metrics,
    refuse_imports,
    status,
    tensors,
    toy_run,
    train_ranks,
)
from servers import (
    BUCKET,
    Bucket,
    free_port,
    moto_url,  # noqa: F401
    proxied,
    running,
    seaweed,
    use,
    wait_for,
)
from test_rewinds_undisturbed import spiked
from uploads import mirrored, save

from fabric_llm.base import files
from fabric_llm.base.faults import (
    BAD_INPUT,
    DONE,
    NO_CHECKPOINT,
    NOT_MIRRORED,
    SAVE_FAILED,
    STOPPED,
    UNWRITABLE,
    Fault,
)
from fabric_llm.mirror import client
from fabric_llm.report.reading import read_run
from fabric_llm.run import copies

# In CI the longer suite has the servers.
pytestmark = pytest.mark.longer
ROOT = Path(__file__).parent.parent
STEPS, INTERVAL, RUN = 10, 3, "run"
KEYS = ("step", "loss", "grad_norm", "lr", "tokens", "eval_loss")
LEASE_SECONDS = 6
SECRET = "recognisable-c2VjcmV0"
# A minute is a long time for a test.
QUICK_LEASES = f"""
from fabric_llm.mirror import lease
lease.LEASE_SECONDS, lease.BEAT_SECONDS = {LEASE_SECONDS}.0, {LEASE_SECONDS / 6}
"""


@pytest.fixture(autouse=True)
def quick_leases(tmp_path, monkeypatch):
    """In processes that are started: a lease counts as dead after some seconds."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(QUICK_LEASES)
    monkeypatch.setenv("PYTHONPATH", f"{site}{os.pathsep}{ROOT}")


@pytest.fixture
def place(tmp_path):
    return f"file://{tmp_path}/mirror"


@pytest.fixture
def moto_bucket(moto_url, monkeypatch):  # noqa: F811
    use(moto_url, monkeypatch)
    return Bucket(moto_url).make()


def flags(toys, output, *more, strategy="auto", kind="full", model="gpt2"):
    return (
        *toy_run(toys, output, model=model),
        *("--strategy", strategy, "--state_dict_type", kind, "--run_name", RUN),
        *"--lr 1e-2 --hang_timeout 60 --global_batch_size 4 --eval_iters 2".split(),
        *"--eval_batch_size 2 --eval_step_interval 4".split(),
        *("--max_step", STEPS, "--save_step_interval", INTERVAL, *more),
    )


def ended(job, code=DONE):
    """What the ranks said. All of them must end with `code`."""
    assert job.wait(120) == [code] * len(job.pids), "\n".join(job.output)
    return "\n".join(job.output)


def frozen(job):
    """Wait until rank 0 is, as the failpoint `do=stop` does it."""

    def is_frozen():
        state = Path(f"/proc/{job.pids[0]}/stat").read_text().rpartition(")")[2].split()[0]
        assert state != "Z", job.wait() and job.output
        return state == "T"

    wait_for(is_frozen, 60)


def go_on(job):
    os.kill(job.pids[0], signal.SIGCONT)


def uploader(rank_0):
    """The process that mirrors what the process `rank_0` writes."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            words = (folder / "cmdline").read_bytes()
            if parent == rank_0 and b"fabric_llm.mirror.process" in words:
                return int(folder.name)
    raise AssertionError("no process of --mirror")


def lose_machine(job, run):
    """All processes, with SIGKILL, and the disk."""
    beside = uploader(job.pids[0])
    job.kill(list(range(len(job.pids))))
    os.kill(beside, signal.SIGKILL)
    assert job.wait() == [-9] * len(job.pids), job.output
    shutil.rmtree(run)


def checkpoint(step):
    return f"step-{step:08d}"


def manifest(mirror, step):
    """A path, in a mirror that is a folder."""
    return mirror / RUN / checkpoint(step) / files.MANIFEST


def assert_same_end(run, other, step=STEPS):
    """To the last bit: weights, optimizer, and the log from the first step to the last."""
    for key in KEYS:
        assert metrics(run, key) == metrics(other, key), key
    ours, theirs = tensors(run / checkpoint(step)), tensors(other / checkpoint(step))
    assert any(name.startswith("trainer/optimizer") for name, _ in ours)
    assert_same_tensors(ours, theirs)


def events(run, kind):
    lines = (run / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def same_files(mirror, run, only_there=()):
    """Whether both hold the same checkpoints, with the same bytes, but for some steps of before the
    disk was lost."""
    here = [path.name for path in files.step_directories(run)]
    there = [path.name for path in files.step_directories(mirror)]
    assert here and there == [*map(checkpoint, only_there), *here]
    for name in here:
        inside = files.files_in(run / name)
        assert sorted(inside) == sorted(files.files_in(mirror / name))
        for file in inside:
            path = mirror / name / file
            assert path.read_bytes() == (run / name / file).read_bytes(), path


# --------------------------------------------------------------- the loss of process, machine, disk


def lost(toys, tmp_path, ranks, *words, **options):
    """A run on `ranks` that is lost in step 8, when the checkpoint of step 6 is there. Returns its
    flags, of --output_dir `new`."""
    more = ("--mirror", f"file://{tmp_path}/mirror", "--resume", "auto", *words)
    first = flags(toys, tmp_path / "old", *more, **options)
    job = Job(ranks, *first, failpoint="between_steps:rank=0:count=8:do=stop")
    frozen(job)
    wait_for(manifest(tmp_path / "mirror", 2 * INTERVAL).is_file)
    lose_machine(job, tmp_path / "old")
    return flags(toys, tmp_path / "new", *more, **options)


def test_a_run_outlives_its_machine_and_its_disk(toys, tmp_path, place):
    """Law 2, with the disk gone in between."""
    train_ranks(1, *flags(toys, tmp_path / "whole"))
    again = lost(toys, tmp_path, 1)
    said = ended(Job(1, *again))
    assert f"Fetched {checkpoint(2 * INTERVAL)} from {place}/{RUN}." in said
    assert f" since step {2 * INTERVAL}, validation loss" in said
    assert_same_end(tmp_path / "new" / RUN, tmp_path / "whole" / RUN)
    same_files(tmp_path / "mirror" / RUN, tmp_path / "new" / RUN, [INTERVAL])
    # The logs of the time before are there, too.
    assert [event["step"] for event in events(tmp_path / "new" / RUN, "saved")] == [3, 6, 9, 10]


def test_what_a_rewind_has_undone_outlives_them_too(toys, tmp_path, place):
    """Steps 4 and 5, for the report, which says so on the next machine as on the first."""
    spikes = ("--spike_threshold", 1000, "--spike_window", 3, "--spike_action", "rewind")
    more = (*spikes, "--resume", "auto", "--lr", 1e-4)
    whole = Job(1, *flags(toys, tmp_path / "whole", *more), before=spiked({4 * 4}))
    ended(whole)
    more = (*more, "--mirror", place)
    # Of ten steps that are made by then, two are undone.
    point = "between_steps:count=10:do=stop"
    job = Job(1, *flags(toys, tmp_path / "old", *more), failpoint=point, before=spiked({4 * 4}))
    frozen(job)
    wait_for(manifest(tmp_path / "mirror", 2 * INTERVAL).is_file)
    lose_machine(job, tmp_path / "old")
    ended(Job(1, *flags(toys, tmp_path / "new", *more)))
    assert_same_end(tmp_path / "new" / RUN, tmp_path / "whole" / RUN)
    ours, theirs = (read_run(tmp_path / name / RUN) for name in ("new", "whole"))
    assert [one.number("loss").steps.tolist() for one in theirs.undone] == [[4, 5]]
    assert [one.number("loss").steps.tolist() for one in ours.undone] == [[4, 5]]


@pytest.mark.every_eighth(6)
@pytest.mark.parametrize(
    ("strategy", "kind", "model", "asynchronous"),
    [
        ("fsdp2", "sharded", "gpt2", "false"),
        ("fsdp2", "sharded", "llama-tied", "true"),
        ("fsdp", "full", "gpt2", "false"),
        ("ddp", "sharded", "llama", "false"),
    ],
)
def test_on_two_ranks_too(toys, tmp_path, strategy, kind, model, asynchronous):
    options = {"strategy": strategy, "kind": kind, "model": model}
    more = ("--async_save", asynchronous)
    train_ranks(2, *flags(toys, tmp_path / "whole", *more, **options))
    again = lost(toys, tmp_path, 2, *more, **options)
    ended(Job(2, *again))
    assert_same_end(tmp_path / "new" / RUN, tmp_path / "whole" / RUN)
    same_files(tmp_path / "mirror" / RUN, tmp_path / "new" / RUN, [INTERVAL])


@pytest.mark.every_eighth(7)
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 4)])
def test_it_goes_on_with_another_number_of_ranks(toys, tmp_path, before, after):
    """Law 3, with the disk gone in between."""
    options = {"kind": "sharded", "model": "gpt2-no-dropout"}
    more = ("--precision", "32-true", "--micro_batch_size", 1)

    strategy, other = ("fsdp2" if ranks > 1 else "auto" for ranks in (before, after))
    options["strategy"] = strategy
    train_ranks(before, *flags(toys, tmp_path / "whole", *more, **options))
    again = lost(toys, tmp_path, before, *more, **options)
    ended(Job(after, *again, "--strategy", other))
    run, whole = tmp_path / "new" / RUN, tmp_path / "whole" / RUN
    assert metrics(run, "step") == metrics(whole, "step")
    for key in ("loss", "grad_norm", "eval_loss"):
        assert metrics(run, key) == pytest.approx(metrics(whole, key), rel=2e-6, abs=0), key
    # What was fetched is what was lost: up to there to the last bit.
    for key in ("loss", "grad_norm"):
        assert metrics(run, key)[: 2 * INTERVAL] == metrics(whole, key)[: 2 * INTERVAL], key
    same_files(tmp_path / "mirror" / RUN, run, [INTERVAL])


def test_a_run_that_lost_its_process_alone_goes_on_where_its_disk_is(toys, tmp_path, place):
    """The disk has a newer checkpoint than the mirror. The uploader is killed, too."""
    train_ranks(1, *flags(toys, tmp_path / "whole"))
    again = flags(toys, tmp_path / "out", "--mirror", place, "--resume", "auto")
    job = Job(1, *again, failpoint="between_steps:count=8:do=stop")
    frozen(job)
    wait_for(manifest(tmp_path / "mirror", 2 * INTERVAL).is_file)
    shutil.rmtree(manifest(tmp_path / "mirror", 2 * INTERVAL).parent)
    beside = uploader(job.pids[0])
    job.kill([0])
    os.kill(beside, signal.SIGKILL)
    assert job.wait() == [-9]
    said = ended(Job(1, *again))
    assert "Fetched" not in said
    assert_same_end(tmp_path / "out" / RUN, tmp_path / "whole" / RUN)
    same_files(tmp_path / "mirror" / RUN, tmp_path / "out" / RUN)


def test_killed_alone_its_uploader_finishes_what_waits(toys, tmp_path, place):
    """The process beside it uploads what was published, then lets the next run begin at once."""
    again = flags(toys, tmp_path / "out", "--mirror", place, "--resume", "auto")
    ended_with([-9], *again, failpoint="publish.done:count=2")
    lease = next((tmp_path / "mirror" / ".leases").glob("lease-*.json"))
    wait_for(lambda: json.loads(lease.read_text())["ended"])
    assert manifest(tmp_path / "mirror", INTERVAL).is_file()
    shutil.rmtree(tmp_path / "out")
    ended(Job(1, *again))
    same_files(tmp_path / "mirror" / RUN, tmp_path / "out" / RUN)


@pytest.mark.parametrize("at_the_end", [False, True])
def test_an_uploader_that_is_lost_is_started_again(toys, tmp_path, place, at_the_end):
    """As by the kernel for want of memory: said once, and the run isn't disturbed."""
    train_ranks(1, *flags(toys, tmp_path / "whole"))
    words = flags(toys, tmp_path / "out", "--mirror", place, "--mirror_timeout", 60)
    job = Job(1, *words, failpoint="between_steps:count=5:do=stop")
    frozen(job)
    beside = uploader(job.pids[0])
    if at_the_end:  # when nothing more is said to it
        os.kill(beside, signal.SIGSTOP)
        go_on(job)
        wait_for((tmp_path / "out" / RUN / checkpoint(STEPS)).is_dir, 60)
        time.sleep(1)
    os.kill(beside, signal.SIGKILL)
    go_on(job)
    said = ended(job)
    assert said.count("is started again") == 1
    assert_same_end(tmp_path / "out" / RUN, tmp_path / "whole" / RUN)
    assert manifest(tmp_path / "mirror", STEPS).is_file()
    if not at_the_end:  # else older ones are passed over
        same_files(tmp_path / "mirror" / RUN, tmp_path / "out" / RUN)


def test_what_was_undone_goes_although_its_uploader_is_lost(tmp_path, place):
    """Else a machine that is lost later would be replaced from it."""
    (run := tmp_path / RUN).mkdir()
    for step in (1, 2):
        save(run, step, random.Random(step))
    mirrored(place, run, checkpoint(1), checkpoint(2))
    mirror = client.Mirror(place, run, 20)
    os.kill((lost := mirror.process).pid, signal.SIGSTOP)
    mirror.go_back(1)
    lost.kill()
    wait_for(lambda: mirror.look() or not manifest(tmp_path / "mirror", 2).exists(), 10)
    with suppress(BrokenPipeError), lost, mirror.process:  # closes the pipes
        mirror.close()
    assert mirror.reports() and mirror.names == {checkpoint(1)}


def test_a_step_that_is_made_anew_waits_for_its_own_copy(tmp_path, place):
    (run := tmp_path / RUN).mkdir()
    save(run, 2, random.Random(2))
    mirror, heard = client.Mirror(place, run, 20), []
    mirror.process.send_signal(signal.SIGSTOP)
    mirror.upload(checkpoint(2))
    mirror.go_back(1)
    shutil.rmtree(run / checkpoint(2))
    save(run, 2, random.Random(3))
    mirror.upload(checkpoint(2))
    mirror.process.send_signal(signal.SIGCONT)
    wait_for(lambda: heard.extend(mirror.reports()) or not mirror.waiting, 20)
    with mirror.process:
        mirror.close()
    there = manifest(tmp_path / "mirror", 2).read_bytes()
    assert there == (run / checkpoint(2) / "MANIFEST.json").read_bytes()
    assert [one for one in heard if "given_up" in one or "mirrored" in one] == heard[-1:]


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(toys, tmp_path):
    train_ranks(1, *flags(toys, tmp_path / "whole"))
    again = lost(toys, tmp_path, 1)
    newest = manifest(tmp_path / "mirror", 2 * INTERVAL).parent
    content = bytearray((newest / "model.safetensors").read_bytes())
    content[len(content) // 2] ^= 1
    (newest / "model.safetensors").write_bytes(content)
    said = ended(Job(1, *again))
    warning = re.search(r"Warning: .*The checkpoint before it is taken\.", said)
    assert warning and newest.name in warning[0], said
    assert f"Fetched {checkpoint(INTERVAL)} from" in said
    assert_same_end(tmp_path / "new" / RUN, tmp_path / "whole" / RUN)
    same_files(tmp_path / "mirror" / RUN, tmp_path / "new" / RUN)


def test_a_damaged_checkpoint_on_the_disk_is_mended_from_its_copy(toys, tmp_path, place):
    """With --checkpoint as well, but not from one that is damaged, too."""
    words = flags(toys, tmp_path / "out", "--mirror", place, "--resume", "auto")
    train_ranks(1, *words)
    last = tmp_path / "out" / RUN / checkpoint(STEPS)
    (last / "config.json").unlink()
    flip(last / "model.safetensors")
    said = ended(Job(1, *words))
    assert said.count("Warning: ") == 1 and f"mended from its copy at {place}/{RUN}." in said
    same_files(tmp_path / "mirror" / RUN, last.parent)
    for harm in (flip, Path.unlink):
        flip(last / "config.json")
        harm(last / "MANIFEST.json")
        said = ended(Job(1, *words))
        assert "MANIFEST.json" in said and "mended" in said and "can't take" not in said, said
        same_files(tmp_path / "mirror" / RUN, last.parent)
    flip(last / "config.json")
    assert "mended" in ended(Job(1, *words, "--checkpoint", last))
    for folder in (last, tmp_path / "mirror" / RUN / last.name):
        flip(folder / "model.safetensors")
    assert f"{checkpoint(3 * INTERVAL)} instead" in ended(Job(1, *words))


def test_what_a_rewind_finds_damaged_on_the_disk_is_mended(toys, tmp_path, place):
    spikes = "--spike_threshold 1000 --spike_window 3 --spike_action rewind --lr 1e-4".split()
    words = flags(toys, tmp_path / "out", "--mirror", place, *spikes)
    job = Job(1, *words, failpoint="between_steps:count=4:do=stop", before=spiked({4 * 4}))
    frozen(job)
    wait_for(manifest(tmp_path / "mirror", INTERVAL).is_file)
    for name in ("model.safetensors", files.MANIFEST):
        flip(tmp_path / "out" / RUN / checkpoint(INTERVAL) / name)
    go_on(job)
    assert f"mended from its copy at {place}/{RUN}." in ended(job)
    same_files(tmp_path / "mirror" / RUN, tmp_path / "out" / RUN)


def test_where_all_are_damaged_it_is_said(toys, tmp_path):
    """Nothing of it is taken for a new run's place."""
    again = lost(toys, tmp_path, 1)
    for path in (tmp_path / "mirror" / RUN).rglob("model.safetensors"):
        path.write_bytes(b"damaged")
    code, said = train(*again)
    assert code == NO_CHECKPOINT, said
    assert checkpoint(INTERVAL) in said and checkpoint(2 * INTERVAL) in said
    assert "Traceback" not in said
    assert manifest(tmp_path / "mirror", INTERVAL).is_file()


# --------------------------------------------------------------------------------- what is refused


def train(*words):
    """(code, what it said) of `train.py`, whose import of torch is an error."""
    path = refuse_imports(Path(os.environ["PYTHONPATH"].split(os.pathsep)[0]), ("torch",))
    with (Path(path.split(os.pathsep)[0]) / "sitecustomize.py").open("a") as file:
        file.write(QUICK_LEASES)
    return run_python("train.py", *words, PYTHONPATH=path)


def run_python(*words, **variables):
    """(code, what it said) of a command."""
    words, given = [sys.executable, *map(str, words)], {"env": {**os.environ, **variables}}
    out = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "timeout": 120}
    done = subprocess.run(words, cwd=ROOT, **given, **out)
    return done.returncode, done.stdout


def refused(code, *words):
    """The one sentence with which it ends, before torch is imported."""
    found, said = train(*words)
    assert found == code, said
    # For whom it waits is said before, and which value of a flag counts that comes again.
    before = ("--mirror: ", "Warning: --run_name is given 2 times")
    lines = [line for line in said.strip().splitlines() if not line.startswith(before)]
    assert len(lines) == 1 and lines[0].startswith("train.py: "), said
    return lines[0]


def test_a_bad_address_is_refused(toys, tmp_path):
    address = "s3://user:pw@bucket/prefix"
    said = refused(BAD_INPUT, *flags(toys, tmp_path / "out", "--mirror", address))
    assert "holds no password" in said and "--mirror" in said and "pw" not in said
    said = refused(BAD_INPUT, *flags(toys, tmp_path, "--mirror", f"file://{tmp_path}"))
    assert "is --output_dir" in said
    assert not (tmp_path / "out" / RUN / "arguments.yaml").exists()


def test_a_server_that_cannot_be_reached_is_said_at_the_start(toys, tmp_path, monkeypatch):
    use(f"http://127.0.0.1:{free_port()}", monkeypatch)
    words = ("--mirror", f"s3://{BUCKET}/prefix", "--mirror_timeout", 1)
    said = refused(SAVE_FAILED, *flags(toys, tmp_path, *words))
    assert "the server can't be reached" in said


def test_a_new_run_takes_no_name_that_the_mirror_has(toys, tmp_path, place):
    words = flags(toys, tmp_path / "out", "--mirror", place)
    train_ranks(1, *words)
    shutil.rmtree(tmp_path / "out")
    before = sorted(files.files_in(tmp_path / "mirror" / RUN))
    said = refused(BAD_INPUT, *words)
    assert f"{place}/{RUN} holds checkpoints up to {checkpoint(STEPS)}" in said
    assert "--resume true" in said and "--run_name" in said
    assert sorted(files.files_in(tmp_path / "mirror" / RUN)) == before


def test_resume_true_takes_a_checkpoint_that_is_there(toys, tmp_path):
    again = lost(toys, tmp_path, 1)
    assert "Fetched" in ended(Job(1, *again, "--resume", "true"))


def test_an_earlier_checkpoint_is_fetched_when_it_is_named(toys, tmp_path, place):
    train_ranks(1, *flags(toys, tmp_path / "whole"))
    words, folder = lost(toys, tmp_path, 1), tmp_path / "new" / RUN
    ended(Job(1, *words))
    given = folder / checkpoint(INTERVAL)
    said = ended(Job(1, *words, "--resume", "true", "--checkpoint", given))
    assert f"Fetched {given.name} from" in said, said
    assert_same_end(folder, tmp_path / "whole" / RUN)
    absent = folder / "step-00000099"
    job = Job(1, *words, "--resume", "true", "--checkpoint", absent)
    assert job.wait() == [66] and f"{str(absent)!r} isn't a checkpoint" in job.output[0], job.output


def test_a_refused_run_leaves_the_mirror_to_the_next(toys, tmp_path, place):
    """Nothing of it holds the lease: the next one begins at once."""
    words = flags(toys, tmp_path / "out", "--mirror", place)
    assert "no complete checkpoint" in refused(NO_CHECKPOINT, *words, "--resume", "true")
    assert not (tmp_path / "out" / RUN).exists()
    lease = max((tmp_path / "mirror" / ".leases").glob("lease-*.json"))
    wait_for(lambda: json.loads(lease.read_text())["ended"], LEASE_SECONDS)
    ended(Job(1, *words))


@pytest.mark.parametrize(
    ("ranks", "mistake"), [(1, ("--seed", 9)), (2, ("--train_data_dir", "file:///tmp/none"))]
)
def test_a_mistake_on_an_empty_disk_is_in_its_status(toys, tmp_path, ranks, mistake):
    """The status that came with the checkpoint says that the run is at work: a scheduler would
    start it again for ever. One without the mistake goes on at once."""
    again, new = lost(toys, tmp_path, ranks), tmp_path / "new" / RUN
    ended(Job(ranks, *again, *mistake), BAD_INPUT)
    assert status(new)["code"] == BAD_INPUT and (new / ".mirror-owner").is_file()
    assert status(new)["retryable"] is False
    ended(Job(ranks, *again))
    assert status(new)["code"] == DONE


@pytest.mark.parametrize("name", [RUN, "another"])
def test_two_runs_on_one_prefix(toys, tmp_path, place, name):
    words = flags(toys, tmp_path / "one", "--mirror", place)
    job = Job(1, *words, failpoint="between_steps:count=2:do=stop")
    frozen(job)
    other = flags(toys, tmp_path / "two", "--mirror", place, "--run_name", name)
    said = refused(UNWRITABLE, *other)
    assert f"{place} is in use" in said
    assert not files.step_directories(tmp_path / "two" / name)
    go_on(job)
    ended(job)
    same_files(tmp_path / "mirror" / RUN, tmp_path / "one" / RUN)


def test_a_run_that_has_lost_its_prefix_does_not_wait_for_it(toys, tmp_path, place):
    """With a --mirror_timeout of ten minutes."""
    words = flags(toys, tmp_path / "out", "--mirror", place)
    job = Job(1, *words, failpoint="between_steps:count=2:do=stop")
    frozen(job)
    (tmp_path / "mirror" / ".leases" / "lease-000009.json").write_text("{}")
    go_on(job)
    assert "nothing more is uploaded" in ended(job, NOT_MIRRORED)


def test_ranks_do_not_wait_for_a_copy_at_a_prefix_that_is_lost(tmp_path, place):
    (run := tmp_path / RUN).mkdir()
    save(run, 2, random.Random(2))
    mirror, began = client.Mirror(place, run, 600), time.monotonic()
    (tmp_path / "mirror" / ".leases" / "lease-000009.json").write_text("{}")
    with pytest.raises(Fault, match="step-00000002 isn't at .* would read it"), mirror.process:
        try:
            copies._wait_for(mirror, run / checkpoint(2))
        finally:
            mirror.close()
    assert time.monotonic() - began < 60


# ---------------------------------------------------------------------------- a server in trouble


@pytest.fixture
def seaweed_server(tmp_path, monkeypatch):
    """(server, bucket), to be stopped and started again with all that is stored."""
    folder = tmp_path / "seaweed"
    folder.mkdir()
    with running(seaweed(folder)) as server:
        use(server.url, monkeypatch)
        yield server, Bucket(server.url).make()


def without_server(toys, tmp_path, server, *more):
    """A run whose server goes in step 5."""
    words = flags(toys, tmp_path / "out", "--mirror", f"s3://{BUCKET}/runs", *more)
    job = Job(1, *words, failpoint="between_steps:count=5:do=stop")
    frozen(job)
    server.kill()
    return job


def manifests(bucket):
    """The steps whose checkpoints are whole there."""
    found = (re.search(rf"/step-(\d+)/{files.MANIFEST}$", name) for name in bucket.names())
    return sorted(int(name[1]) for name in found if name)


def read_when_back(bucket):
    def read():
        with suppress(bucket.client.exceptions.ClientError):
            return manifests(bucket) or True

    return wait_for(read, 60)


@pytest.mark.slow
def test_a_server_that_goes_does_not_stop_the_run(toys, tmp_path, seaweed_server):
    """One warning; code 80 within --mirror_timeout; with the server back the same command copies
    what is missing."""
    server, bucket = seaweed_server
    train_ranks(1, *flags(toys, tmp_path / "whole"))
    words = flags(toys, tmp_path / "out", "--mirror", f"s3://{BUCKET}/runs")
    words += ("--mirror_timeout", 5, "--resume", "auto")
    run = tmp_path / "out" / RUN
    job = Job(1, *words, failpoint="between_steps:count=5:do=stop")
    frozen(job)
    wait_for(lambda: manifests(bucket) == [INTERVAL])
    server.kill()
    went_on = time.monotonic()
    go_on(job)
    said = ended(job, NOT_MIRRORED)
    assert time.monotonic() - went_on < 5 + 15
    assert len(events(run, "mirror_fails")) == 1
    assert said.count("It is tried again") == 1
    assert metrics(run, "step") == metrics(tmp_path / "whole" / RUN, "step")
    assert_same_end(run, tmp_path / "whole" / RUN)
    ending = status(run)
    assert ending["code"] == NOT_MIRRORED and ending["retryable"] is True
    assert checkpoint(STEPS) in ending["reason"] and f"s3://{BUCKET}/runs" in ending["reason"]
    server.start()
    assert read_when_back(bucket) in ([INTERVAL], True)
    said = ended(Job(1, *words))
    assert status(run)["code"] == DONE
    assert STEPS in manifests(bucket)
    shutil.rmtree(tmp_path / "out")
    ended(Job(1, *words))
    assert_same_end(run, tmp_path / "whole" / RUN)


@pytest.mark.slow
def test_a_server_that_comes_back_gets_all(toys, tmp_path, seaweed_server):
    server, bucket = seaweed_server
    run = tmp_path / "out" / RUN
    job = without_server(toys, tmp_path, server, "--mirror_timeout", 90)
    go_on(job)
    wait_for(lambda: (run / checkpoint(STEPS)).is_dir() and events(run, "mirror_fails"), 60)
    server.start()
    said = ended(job)
    assert said.count("It is tried again") == 1
    assert len(events(run, "mirror_recovers")) == 1
    assert manifests(bucket)[-2:] == [3 * INTERVAL, STEPS]


@pytest.mark.slow
def test_an_uploader_that_is_lost_while_the_server_is_gone(toys, tmp_path, seaweed_server):
    """Both at once: the run still goes on."""
    job = without_server(toys, tmp_path, seaweed_server[0], "--mirror_timeout", 5)
    os.kill(uploader(job.pids[0]), signal.SIGKILL)
    go_on(job)
    ended(job, NOT_MIRRORED)
    assert metrics(tmp_path / "out" / RUN, "step")[-1] == STEPS


@pytest.mark.every_eighth(7)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_wait_for_a_server(toys, tmp_path, seaweed_server, number):
    """The checkpoint is here, and whoever stops the run has to leave the machine."""
    job = without_server(toys, tmp_path, seaweed_server[0], "--mirror_timeout", 40)
    go_on(job)
    wait_for(lambda: events(tmp_path / "out" / RUN, "ended"), 60)
    time.sleep(2)
    began = time.monotonic()
    os.kill(job.pids[0], number)
    assert job.wait(60)[0] in (STOPPED, NOT_MIRRORED), job.output
    assert time.monotonic() - began < 15
    assert status(tmp_path / "out" / RUN)["retryable"] is True


class Watcher:
    """Looks at a run directory all the time. gone: checkpoints that went there."""

    def __init__(self, run, is_allowed):
        self.run, self.is_allowed = run, is_allowed
        self.gone, self.wrong, self.over = [], [], threading.Event()
        self.thread = threading.Thread(target=self.watch, daemon=True)
        self.thread.start()

    def watch(self):
        known = set()
        while not self.over.wait(0.005):
            here = {path.name for path in files.step_directories(self.run)}
            for name in known - here:
                self.gone.append(name)
                if not self.is_allowed(name):
                    self.wrong.append(name)
            known = here

    def end(self):
        self.over.set()
        self.thread.join()


@pytest.mark.parametrize("slow_seconds", [0.0, 0.05])
def test_nothing_goes_here_before_it_is_there(toys, tmp_path, moto_bucket, slow_seconds, moto_url):  # noqa: F811
    """With --keep_last 1, and in the end both hold the same."""
    prefix = f"runs-{slow_seconds}"
    with proxied(moto_url) as proxy:
        proxy.slow_seconds = slow_seconds
        os.environ["AWS_ENDPOINT_URL"] = proxy.url  # of moto_bucket's monkeypatch
        run = tmp_path / "out" / RUN

        def was_there(name):
            object_ = f"{prefix}/{RUN}/{name}/{files.MANIFEST}"
            if object_ in moto_bucket.names(object_):
                return True
            # Or it was there, and has been removed, or the log says that it was given up.
            path = f"/{BUCKET}/{object_}"
            if {("DELETE", path), ("PUT", path)} <= set(proxy.requests):
                return True
            return any(e["report"]["given_up"] == name for e in events(run, "not_mirrored"))

        words = flags(toys, tmp_path / "out", "--mirror", f"s3://{BUCKET}/{prefix}")
        words += ("--keep_last", 1, "--save_step_interval", 1, "--keep_best", 0)
        watcher = Watcher(run, was_there)
        ended(Job(1, *words))
        watcher.end()
    assert watcher.wrong == [] and len(watcher.gone) >= 3
    here = [path.name for path in files.step_directories(run)]
    assert here == [checkpoint(STEPS)]
    start = f"{prefix}/{RUN}/step-"
    there = {name.split("/")[2] for name in moto_bucket.names(start)}
    assert sorted(there) == here
    for name in moto_bucket.names(start):
        assert moto_bucket.content(name) == (run / name.split("/", 2)[2]).read_bytes(), name


def test_no_credentials_are_written(toys, tmp_path, moto_bucket, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", SECRET.upper())
    monkeypatch.setenv("AWS_SESSION_TOKEN", f"token-{SECRET}")
    words = flags(toys, tmp_path / "out", "--mirror", f"s3://{BUCKET}/no-credentials")
    said = ended(Job(1, *words))
    contents = {str(path): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    contents["the log"] = said.encode()
    there = moto_bucket.names("no-credentials/")
    assert f"no-credentials/{RUN}/STATUS.json" in there
    contents |= {name: moto_bucket.content(name) for name in there}
    for name, content in contents.items():
        assert SECRET.lower().encode() not in content.lower(), name


# ------------------------------------------------------------------------------ commands elsewhere


@pytest.fixture
def of_a_run(toys, tmp_path, place, monkeypatch):
    """(address of a run, whose directory is gone, and of its last checkpoint)."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    ended(Job(1, *flags(toys, tmp_path / "out", "--mirror", place, model="llama")))
    (tmp_path / "out").rename(tmp_path / "kept")
    return f"{place}/{RUN}", f"{place}/{RUN}/{checkpoint(STEPS)}"


def command(*words):
    code, said = run_python(*words)
    assert code == 0, said
    return said


def test_an_export_takes_the_address(of_a_run, tmp_path):
    for number, address in enumerate(of_a_run):
        command("export_hf.py", address, "--output", tmp_path / f"hf-{number}")
    first, second = (tensors(tmp_path / f"hf-{number}") for number in range(2))
    assert_same_tensors(first, second)
    kept = tensors(tmp_path / "kept" / RUN / checkpoint(STEPS))
    assert first.keys() == {place for place in kept if not place[0].startswith("trainer/")}


def test_verify_and_a_report_take_the_address(of_a_run, tmp_path):
    said = command("-m", "fabric_llm.verify", of_a_run[0])
    assert f"run             {of_a_run[0]}\n" in said and f"at {of_a_run[0]} wasn't verified" in said
    command("-m", "fabric_llm.report", of_a_run[0], "--output", tmp_path / "report.html")
    assert RUN in (tmp_path / "report.html").read_text()


@pytest.mark.slow
def test_an_average_takes_addresses(of_a_run, tmp_path):
    places = [f"{of_a_run[0]}/{checkpoint(step)}" for step in (2 * INTERVAL, STEPS)]
    command("-m", "fabric_llm.average", *places, "--output", tmp_path / "average")
    local = [tmp_path / "kept" / RUN / place.rpartition("/")[2] for place in places]
    command("-m", "fabric_llm.average", *local, "--output", tmp_path / "beside")
    assert_same_tensors(tensors(tmp_path / "average"), tensors(tmp_path / "beside"))


def test_a_signal_at_the_end_waits_no_longer_for_a_process_that_hangs(tmp_path, monkeypatch):
    monkeypatch.setattr(client, "SECONDS_TO_END", 0.5)
    mirror = client.Mirror((tmp_path / "mirror").as_uri(), tmp_path / "run", 600)
    os.kill(mirror.process.pid, signal.SIGSTOP)
    began = time.monotonic()
    timer = threading.Timer(0.5, mirror.end_soon)
    timer.start()
    with mirror.process:  # closes the pipes
        mirror.close()
    assert time.monotonic() - began < 30 and mirror.process.returncode == -signal.SIGKILL
    timer.join()
