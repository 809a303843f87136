"""Machines without a shared disk, with --mirror: here each rank, or each pair of ranks, has a disk of
its own. A run there ends bit for bit like one of the same ranks on one disk."""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path
from socket import gethostname

import pytest
import torch

pytest.importorskip("obstore")

from ranks import Job, elsewhere, metrics, run_ranks, status, train_ranks
from servers import wait_for
from test_mirrored_runs import (
    INTERVAL,
    RUN,
    STEPS,
    assert_same_end,
    checkpoint,
    ended,
    flags,
    frozen,
    lose_machine,
    manifest,
    quick_leases,  # noqa: F401
)
from test_rewinds_undisturbed import spiked

from fabric_llm.base import files
from fabric_llm.base.faults import DONE, NO_CHECKPOINT, PEER_LOST, SAVE_FAILED, STOPPED
from fabric_llm.checkpoint import apart as apart_ranks
from fabric_llm.checkpoint import keep

pytestmark = pytest.mark.longer


def apart(toys, tmp_path, *more, **options):
    words = ("--mirror", f"file://{tmp_path}/mirror", "--resume", "auto", *more)
    return flags(toys, "out", *words, **options)


def whole_and_apart(toys, tmp_path, *more, **options):
    """The flags of a run whose like has ended in `whole`, on one disk."""
    train_ranks(2, *flags(toys, tmp_path / "whole", *more, **options))
    return apart(toys, tmp_path, *more, **options)


def run_of(tmp_path, machine):
    return tmp_path / str(machine) / "out" / RUN


def names(folder):
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("strategy", "kind", "model", "more"),
    [
        ("fsdp2", "sharded", "gpt2", ()),
        ("fsdp", "full", "gpt2", ("--ema_decay", 0.9, "--async_save", "true")),
        pytest.param("fsdp2", "full", "llama-tied", (), marks=pytest.mark.slow),
        pytest.param(
            "fsdp", "sharded", "llama", ("--precision", "32-true"), marks=pytest.mark.slow
        ),
        pytest.param("ddp", "full", "llama", (), marks=pytest.mark.slow),
    ],
)
def test_a_run_ends_as_on_one_disk(toys, tmp_path, strategy, kind, model, more):
    options = {"strategy": strategy, "kind": kind, "model": model}
    words = whole_and_apart(toys, tmp_path, *more, **options)
    ended(Job(2, *words, before=elsewhere(tmp_path)))
    assert_same_end(run_of(tmp_path, 0), tmp_path / "whole" / RUN)
    for path in files.checkpoints(run_of(tmp_path, 0)):
        keep.verified(path, hashes=True)
    # The other machine has no checkpoint, but knows how the run has ended.
    other = run_of(tmp_path, 1)
    assert names(other) == {"STATUS.json", "events.jsonl"}
    assert status(other)["code"] == DONE


SLOW = [pytest.param(gone, marks=pytest.mark.slow) for gone in ((), (0,))]


@pytest.mark.parametrize("gone", [*SLOW, (1,), (0, 1)])
def test_it_goes_on_after_a_kill_whatever_disk_is_gone(toys, tmp_path, gone):
    words = whole_and_apart(toys, tmp_path, strategy="fsdp2", kind="sharded")
    point = "between_steps:rank=0:count=8:do=stop"
    job = Job(2, *words, failpoint=point, before=elsewhere(tmp_path))
    frozen(job)
    wait_for(manifest(tmp_path / "mirror", 2 * INTERVAL).is_file)
    kept = tmp_path / "kept"
    shutil.copytree(tmp_path / "0", kept)
    lose_machine(job, tmp_path / "0")
    kept.rename(tmp_path / "0")
    for machine in gone:
        shutil.rmtree(tmp_path / str(machine))
    ended(Job(2, *words, before=elsewhere(tmp_path)))
    assert_same_end(run_of(tmp_path, 0), tmp_path / "whole" / RUN)
    assert names(run_of(tmp_path, 1)) == {"STATUS.json", "events.jsonl"}


def test_rank_0_may_be_on_another_machine_next_time(toys, tmp_path):
    words = whole_and_apart(toys, tmp_path, strategy="fsdp2", kind="full")
    stopping = "between_steps:rank=1:count=5:do=term"
    codes = Job(2, *words, failpoint=stopping, before=elsewhere(tmp_path)).wait(120)
    assert codes == [STOPPED, STOPPED]
    for machine in (0, 1):
        assert status(run_of(tmp_path, machine))["code"] == STOPPED
    ended(Job(2, *words, before=elsewhere(tmp_path, moved=1)))
    assert metrics(run_of(tmp_path, 1), "loss") == metrics(tmp_path / "whole" / RUN, "loss")


def test_four_ranks_on_two_machines_then_two_on_one(toys, tmp_path):
    options = {"strategy": "fsdp2", "kind": "sharded", "model": "gpt2-no-dropout"}
    more = ("--precision", "32-true", "--micro_batch_size", 1)
    words = apart(toys, tmp_path, *more, **options)
    point = "between_steps:rank=2:count=5:do=kill"
    job = Job(4, *words, failpoint=point, before=elsewhere(tmp_path, 2))
    codes = job.wait(120)
    assert codes[0] == codes[1] == PEER_LOST, job.output
    wait_for(manifest(tmp_path / "mirror", INTERVAL).is_file)
    shutil.rmtree(tmp_path / "0")
    ended(Job(2, *words, before=elsewhere(tmp_path, 2, moved=1)))
    assert status(run_of(tmp_path, 1))["code"] == DONE
    assert metrics(run_of(tmp_path, 1), "step")[-1] == STEPS


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_rank_that_is_killed_in_a_save(toys, tmp_path, rank):
    words = whole_and_apart(toys, tmp_path, strategy="fsdp2", kind="sharded")
    point = f"save.parts:rank={rank}:count=3:do=kill"
    job = Job(2, *words, failpoint=point, before=elsewhere(tmp_path))
    codes = job.wait(120)
    assert codes[rank] == -9 and codes[1 - rank] == PEER_LOST, job.output
    assert status(run_of(tmp_path, 1 - rank))["code"] == PEER_LOST
    ended(Job(2, *words, before=elsewhere(tmp_path)))
    assert_same_end(run_of(tmp_path, 0), tmp_path / "whole" / RUN)


def test_rank_0_joins_before_it_fetches(toys, tmp_path):
    """What takes longer than --join_timeout is no absence, and no hang."""
    moves = elsewhere(tmp_path)

    def slow():
        from fabric_llm.mirror.store import Store
        from fabric_llm.plan import mirrored

        moves()
        apart_ranks.SECONDS_TO_SEE = 0.5
        opened = mirrored.open_mirror
        mirrored.open_mirror = lambda *given: [time.sleep(6), opened(*given)][1]
        # The other machine, too, before it sees the mirror.
        below = Store.below
        if os.environ["RANK"] == "1":
            Store.below = lambda *given: [time.sleep(6), below(*given)][1]

    job = Job(2, *apart(toys, tmp_path, "--join_timeout", 4), before=slow)
    assert job.wait(120) == [DONE, DONE], job.output


def test_a_rank_that_is_lost_while_rank_0_fetches(toys, tmp_path):
    """Before another machine has a run directory, it says how it ended there, for its scheduler."""
    moves = elsewhere(tmp_path)

    def lost():
        from fabric_llm.plan import mirrored

        moves()
        mirrored.open_mirror = lambda *given: os.kill(os.getpid(), signal.SIGKILL)

    job = Job(2, *apart(toys, tmp_path), before=lost)
    assert job.wait(120) == [-9, PEER_LOST], job.output
    assert status(run_of(tmp_path, 1))["code"] == PEER_LOST
    assert status(run_of(tmp_path, 1))["retryable"] is True


def test_a_mistake_leaves_no_directory_on_any_machine(toys, tmp_path):
    words = apart(toys, tmp_path, "--resume", "true")
    job = Job(2, *words, before=elsewhere(tmp_path))
    assert job.wait(120) == [NO_CHECKPOINT, NO_CHECKPOINT], job.output
    assert not run_of(tmp_path, 0).exists()


class Lost(torch.Tensor):
    def cpu(self):
        raise RuntimeError("no memory for a copy")


def parts_of_which_one_fails(kind):
    """On rank 0 what was received, on rank 1 the error."""
    rank = torch.distributed.get_rank()
    there = apart_ranks.Apart((1,), rank, torch.distributed.group.WORLD)
    layout = {name: torch.full([3], float(place)) for place, name in enumerate("abc")}
    layout["b"] = layout["b"].as_subclass(Lost)
    if rank == 0:
        received = apart_ranks.receive(there, 1)
        return [(file.name, name, tensor.tolist()) for file, name, tensor in received]
    # None can't be iterated.
    files = None if kind == "announced" else [apart_ranks.File("one", layout, {})]
    with pytest.raises((RuntimeError, TypeError)) as raised:
        apart_ranks.send(there, lambda: files)
    return str(raised.value)


def test_a_rank_that_can_not_send_its_parts_keeps_nobody_waiting():
    received, sent = run_ranks(2, parts_of_which_one_fails, "sent")
    assert (received, sent) == ([("one", "a", [0.0] * 3)], "no memory for a copy")
    received, sent = run_ranks(2, parts_of_which_one_fails, "announced")
    assert received == [] and "not iterable" in sent


def test_a_disk_of_rank_0_that_is_full_ends_all(toys, tmp_path):
    words = apart(toys, tmp_path, strategy="fsdp2", kind="sharded")
    point = "save.parts:rank=0:count=3:do=enospc"
    job = Job(2, *words, failpoint=point, before=elsewhere(tmp_path))
    assert job.wait(120) == [SAVE_FAILED, SAVE_FAILED], job.output
    assert status(run_of(tmp_path, 0))["code"] == SAVE_FAILED
    assert status(run_of(tmp_path, 1))["code"] == SAVE_FAILED
    assert not list(Path(tmp_path / "1").rglob("*.safetensors"))


def test_what_the_run_has_gone_back_from_stays_so_on_another_disk(toys, tmp_path):
    """Machine 1 holds later steps, which were given up while machine 0 was rank 0's."""
    words = apart(toys, tmp_path)
    ended(Job(1, *words, before=elsewhere(tmp_path)))
    shutil.copytree(tmp_path / "0", tmp_path / "1")
    (run_of(tmp_path, 1) / ".mirror-owner").unlink()
    back = ("--resume", "true", "--checkpoint", f"out/{RUN}/{checkpoint(2 * INTERVAL)}")
    stopping = "between_steps:count=2:do=term"
    job = Job(1, *words, *back, failpoint=stopping, before=elsewhere(tmp_path))
    assert job.wait(120) == [STOPPED], job.output
    [last] = [path.name for path in files.checkpoints(run_of(tmp_path, 0))][-1:]
    assert last in (checkpoint(7), checkpoint(8))
    said = ended(Job(1, *words, before=elsewhere(tmp_path, moved=1)))
    assert f"Fetched {last} from" in said and f"Moved to aside-{checkpoint(9)}" in said
    norms = metrics(run_of(tmp_path, 1), "grad_norm")
    assert len(norms) == STEPS
    there = [path.name for path in files.checkpoints(tmp_path / "mirror" / RUN)]
    assert last in there and there[-1] == checkpoint(STEPS)


def test_a_machine_that_does_not_see_the_mirror_is_told_at_the_start(toys, tmp_path):
    """As where the address is a folder that only rank 0's machine has."""
    moves = elsewhere(tmp_path)

    def blind():
        from fabric_llm.mirror import store

        moves()
        opened, other = store.open_store, f"file://{os.getcwd()}/another"
        if os.environ["RANK"] == "1":
            store.open_store = lambda address: opened(other)

    job = Job(2, *apart(toys, tmp_path), before=blind)
    assert job.wait(120) == [2, 2], job.output
    assert f"on {gethostname()}: file://{tmp_path}/mirror isn't what rank 0 sees" in job.output[0]
    assert status(run_of(tmp_path, 1))["code"] == 2


@pytest.mark.parametrize("asynchronous", ["true", pytest.param("false", marks=pytest.mark.slow)])
def test_a_rewind_reads_a_copy(toys, tmp_path, asynchronous):
    options = {"strategy": "fsdp2", "kind": "sharded"}
    more = ("--spike_action", "rewind", "--spike_threshold", 8, "--spike_window", 3)
    more += ("--async_save", asynchronous)
    spike, moves = spiked({4 * 7}), elsewhere(tmp_path)

    def both():
        spike()
        moves()

    ended(Job(2, *flags(toys, tmp_path / "whole", *more, **options), before=spike))
    ended(Job(2, *apart(toys, tmp_path, *more, **options), before=both))
    assert "rewind" in metrics(run_of(tmp_path, 0), "verdict")
    assert_same_end(run_of(tmp_path, 0), tmp_path / "whole" / RUN)
