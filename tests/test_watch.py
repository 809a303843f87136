"""What the heartbeats say, where no process is needed to see it."""

import json
import time
from types import SimpleNamespace

import pytest
import torch
from ranks import run_ranks

from fabric_llm.base.faults import PEER_LOST, SAVE_FAILED, Fault
from fabric_llm.base.ranks import from_first, gather, waiting
from fabric_llm.processes.launch import Children
from fabric_llm.processes.watch import Watch, hanging


@pytest.mark.longer
def test_a_job_that_was_suspended_for_longer_than_the_time_out_goes_on(monkeypatch):
    """And still ends where nothing moves while it isn't suspended."""
    away = [0.0]  # seconds that the clock goes on while no thread does
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + away[0], sleep=time.sleep)
    monkeypatch.setattr("fabric_llm.processes.watch.time", clock)
    ended = []
    watch = Watch(0, 1, ended.append, Children({}), bool)
    watch.begin(20.0)
    try:
        for _ in range(2):
            away[0] += 3600.0
            time.sleep(1.0)
            assert not ended and not watch.ended.is_set()
        deadline = time.monotonic() + 60
        while not ended and time.monotonic() < deadline:
            away[0] += 2.0
            time.sleep(0.3)
        assert "rank 0 hangs: no progress for 20 s" in str(ended[0])
    finally:
        watch.close()


def test_the_rank_that_has_entered_the_fewest_collectives_is_the_one_that_hangs():
    beats = {rank: {"step": 7, "doing": "in the next step", "collectives": 40} for rank in range(4)}
    assert "rank 0 hangs" in str(hanging(beats, 9.0))
    assert "wait for it" not in str(hanging(beats, 9.0))
    beats[2]["collectives"] = 39
    said = hanging(beats, 9.0)
    sentence = (
        "rank 2 hangs: no progress for 9 s after step 7, in the next step; the others wait "
        "for it (--hang_timeout)."
    )
    assert said.code == 71 and str(said) == sentence


def test_ranks_that_have_met_have_entered_as_many_collectives():
    def met():
        before = waiting.collectives
        gather(1)
        from_first(2)
        return waiting.collectives - before

    assert run_ranks(2, met) == [2, 2]


def test_a_fault_that_was_heard_is_known_once_the_store_has_gone():
    """Rank 0 holds the store, and ends with it."""
    store, watch = torch.distributed.HashStore(), Watch(0, 1, print, Children({}), bool)
    told = {"rank": 3, "sentence": "no space left.", "code": SAVE_FAILED, "retryable": True}
    store.set("first", json.dumps(told))
    watch._exchange(store)
    watch.store_is_lost = True
    rank, fault = watch.report(Fault("a connection broke.", PEER_LOST))
    assert (rank, str(fault), fault.code) == (3, "no space left.", SAVE_FAILED)
