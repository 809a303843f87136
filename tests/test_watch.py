"""What the heartbeats say, where no process is needed to see it."""

import time

from fabric_llm.processes.watch import Watch


def test_a_job_that_was_suspended_for_longer_than_the_time_out_goes_on():
    """It looks still when the watch wakes up, and isn't a moment later."""

    class Suspended(Watch):
        looked = 0

        def _is_still(self):
            self.looked += 1
            return self.looked == 1

    ended = []
    watch = Suspended(0, 1, 5.0, on_fault=ended.append)
    try:
        deadline = time.monotonic() + 60
        while watch.looked < 4 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert watch.looked >= 4 and not ended and not watch.ended.is_set()
    finally:
        watch.close()
