"""One rank's fault is raised on all ranks, with its sentence and code, and none is left waiting."""

import threading
import time

import pytest
import torch
from ranks import run_ranks

from fabric_llm.base.faults import BAD_INPUT, DONE, SAVE_FAILED, UNEXPECTED, Fault
from fabric_llm.base.ranks import first_fault, from_rank_zero


def rank():
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def told(function, *args):
    """(sentence, code, retryable, cause) of the Fault that a call raises, or what it returns."""
    try:
        return function(*args)
    except Fault as fault:
        return str(fault), fault.code, fault.retryable, repr(fault.__cause__)


def faults_of(ranks):
    fault = Fault(f"rank {rank()}", SAVE_FAILED, retryable=False)
    return told(first_fault, fault if rank() in ranks else None)


@pytest.mark.parametrize("world_size", [1, 3])
def test_first_fault(world_size):
    assert run_ranks(world_size, faults_of, []) == [None] * world_size
    first = world_size // 2
    expected = (f"rank {first}", SAVE_FAILED, False, "None")
    assert run_ranks(world_size, faults_of, range(first, world_size)) == [expected] * world_size


def act(error):
    def action():
        assert rank() == 0
        if error is not None:
            raise error
        return {"value": [1]}

    return told(from_rank_zero, action)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    ("error", "sentence", "code"),
    [
        (None, None, DONE),
        (Fault("full.", SAVE_FAILED), "full.", SAVE_FAILED),
        (ValueError("a  7"), "a  7", BAD_INPUT),
        (OSError(28, "No space left on device"), "[Errno 28] No space left on device", SAVE_FAILED),
        (KeyError("x"), "KeyError: 'x'", UNEXPECTED),
    ],
)
def test_from_rank_zero(world_size, error, sentence, code):
    found = run_ranks(world_size, act, error)
    if error is None:
        assert found == [{"value": [1]}] * world_size
        return
    causes = ["None"] * world_size
    if not isinstance(error, Fault):
        causes[0] = repr(error)
    assert found == [(sentence, code, code == SAVE_FAILED, cause) for cause in causes]


def waits(slow, error):
    """What `together` makes of a rank that takes a while, and whether this rank was marked
    meanwhile."""
    from fabric_llm.base import ranks

    ranks.SECONDS_TO_WAIT, marks = 0.05, []

    def action():
        if rank() == slow:
            time.sleep(0.5)
            if error is not None:
                raise error
        return rank()

    return told(ranks.together, action, lambda: marks.append(1)), len(marks) >= 3


@pytest.mark.parametrize("world_size", [1, 3])
def test_ranks_wait_together_for_one_that_takes_long(world_size):
    slow = world_size - 1
    assert run_ranks(world_size, waits, slow, None) == [(k, True) for k in range(world_size)]
    found = run_ranks(world_size, waits, slow, ValueError("a  7"))
    assert {fault[:3] for fault, _ in found} == {("a  7", BAD_INPUT, False)}
    assert found[slow][0][3] == "ValueError('a  7')" and all(marked for _, marked in found)


def fails_first(failing):
    """(what `together` makes of a rank that fails, whether the others' actions had ended by
    then)."""
    from fabric_llm.base import ranks

    ranks.SECONDS_TO_WAIT, over, release = 0.05, [], threading.Event()

    def action():
        if rank() == failing:
            raise ValueError("a  7")
        release.wait(20)
        over.append(1)

    found = told(ranks.together, action, lambda: None)
    ended = list(over)
    release.set()
    return found[:3], ended


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_fails_is_heard_of_while_others_are_at_work(failing):
    """As one without credentials, while another one fetches a large checkpoint."""
    assert run_ranks(2, fails_first, failing) == [(("a  7", BAD_INPUT, False), [])] * 2
