"""What the heartbeats say, where no process is needed to see it."""

import threading
import time

from fabric_llm.processes.watch import Watch
from fabric_llm.training import step


def test_a_rank_that_reads_numbers_from_a_gpu_waits_for_the_others():
    """There collectives return at once; the host waits where the step reads their result, and nowhere in torch."""
    watch = Watch(0, 1, 60.0, on_fault=lambda fault: None)
    held = threading.Lock()
    names = {"held": held}
    exec(compile("def train_step():\n    held.acquire()", step.__file__, "exec"), names)

    def seen_while(main_thread_is_in):
        seen = []

        def look():
            deadline = time.monotonic() + 5
            while not any(seen) and time.monotonic() < deadline:
                seen.append(watch._waits())
                time.sleep(0.1)
            held.release()

        held.acquire()
        thread = threading.Thread(target=look)
        thread.start()
        main_thread_is_in()
        held.release()
        thread.join()
        return set(seen)

    try:
        assert "train_step" in seen_while(names["train_step"])
        assert seen_while(held.acquire) == {None}
    finally:
        watch.close()


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
