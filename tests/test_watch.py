"""What the heartbeats say, where no process is needed to see it."""

import time

from ranks import run_ranks

from fabric_llm.base.ranks import from_first, gather, waiting
from fabric_llm.processes.watch import Watch, hanging


def test_a_job_that_was_suspended_for_longer_than_the_time_out_goes_on():
    """It looks still when the watch wakes up, and isn't a moment later."""

    class Suspended(Watch):
        looked = 0

        def _is_still(self):
            self.looked += 1
            return self.looked == 1

    ended = []
    watch = Suspended(0, 1, on_fault=ended.append)
    watch.begin(5.0)
    try:
        deadline = time.monotonic() + 60
        while watch.looked < 4 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert watch.looked >= 4 and not ended and not watch.ended.is_set()
    finally:
        watch.close()


def test_the_rank_that_has_entered_the_fewest_collectives_is_the_one_that_hangs():
    beats = {rank: {"step": 7, "doing": "in the next step", "collectives": 40} for rank in range(4)}
    assert "rank 0 hangs" in str(hanging(beats, 9.0)) and "wait for it" not in str(hanging(beats, 9.0))
    beats[2]["collectives"] = 39
    said = hanging(beats, 9.0)
    sentence = (
        "rank 2 hangs: no progress for 9 s after step 7, in the next step; the others wait for it (--hang_timeout)."
    )
    assert said.code == 71 and str(said) == sentence


def test_ranks_that_have_met_have_entered_as_many_collectives():
    def met():
        before = waiting.collectives
        gather(1)
        from_first(2)
        return waiting.collectives - before, waiting.inside

    assert run_ranks(2, met) == [(2, None)] * 2
