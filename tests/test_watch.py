"""What the heartbeats say, where no process is needed to see it."""

import threading
import time

from fabric_llm import step
from fabric_llm.watch import Watch


def test_a_rank_that_reads_numbers_from_a_gpu_waits_for_the_others():
    """There collectives return at once; the host waits where the step reads their result, and nowhere in torch."""
    seen = []
    watch = Watch(0, 1, 60.0, on_fault=lambda fault: None)
    try:
        thread = threading.Timer(0.2, lambda: seen.append(watch._waits()))
        thread.start()
        code = compile("def train_step():\n    sleep(0.6)", step.__file__, "exec")
        names = {"sleep": time.sleep}
        exec(code, names)
        names["train_step"]()
        thread.join()
        thread = threading.Timer(0.2, lambda: seen.append(watch._waits()))
        thread.start()
        time.sleep(0.6)
        thread.join()
    finally:
        watch.close()
    assert seen == ["train_step", None]
