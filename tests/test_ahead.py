"""Micro-batches are made ready ahead of the step, down to their copy on the device, and the step's
wait is measured."""

import threading
import time

import pytest
from conftest import same_tensors
from servers import wait_for

from fabric_llm.data.batches import Batches, Prefetch
from fabric_llm.data.dataset import open_dataset

STEP = 4  # sequences


class Copies:
    """As PinnedCopies, to the CPU; says which thread did what."""

    def __init__(self):
        self.made, self.handed_out = [], []

    def __call__(self, micro_batches):
        self.made.append(threading.current_thread().name)
        return [{name: tensor.clone() for name, tensor in batch.items()} for batch in micro_batches]

    def hand_out(self, micro_batches):
        self.handed_out.append((threading.current_thread(), micro_batches))


def assert_same(found, wanted):
    for one, other in zip(found, wanted, strict=True):
        assert same_tensors(one, other)


@pytest.fixture
def batches(toys):
    return Batches(open_dataset(toys / "data").train, 7, 2, 2, document_end=0)


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_copies_are_made_by_the_threads_that_read_ahead(batches, workers):
    copies = Copies()
    prefetch = Prefetch(batches, workers, copies)
    for number, position in enumerate(range(0, 10 * STEP, STEP), 1):
        found = prefetch.at(position)
        assert_same(found, batches.at(position))
        assert copies.handed_out[-1] == (threading.main_thread(), found)
        assert len(copies.handed_out) == number
    prefetch.close()
    ahead = [name for name in copies.made if name.startswith("batches")]
    assert len(ahead) >= (9 if workers else 0)
    assert len(copies.made) - len(ahead) == (1 if workers else 10)
    assert prefetch.rows_read.count == 10 * STEP, "and not what was only made ready"


def test_the_next_step_is_ready_when_it_is_asked_for(batches):
    copies = Copies()
    prefetch = Prefetch(batches, 2, copies)
    prefetch.at(0)
    wait_for(lambda: len(copies.made) >= 3, 60)
    assert len(copies.made) == 3, "of this step, and of two more, before anybody asks"
    assert len(copies.handed_out) == 1
    prefetch.close()


def test_what_fails_in_a_thread_is_raised_in_the_step(batches):
    class Fails(Copies):
        def __call__(self, micro_batches):
            if threading.current_thread() is threading.main_thread():
                return super().__call__(micro_batches)
            raise RuntimeError("no pinned memory")

    prefetch = Prefetch(batches, 1, Fails())
    prefetch.at(0)
    with pytest.raises(RuntimeError, match="no pinned memory"):
        prefetch.at(STEP)
    prefetch.close()


def test_the_wait_for_a_batch_is_measured(batches):
    class Slow(Copies):
        def __call__(self, micro_batches):
            time.sleep(0.1)
            return super().__call__(micro_batches)

    prefetch = Prefetch(batches, 0, Slow())
    for position in (0, STEP):
        prefetch.at(position)
    assert prefetch.seconds_waited >= 0.2
