"""Law 5: every sequence is seen exactly once an epoch, at any number of ranks and workers."""

import datasets
import numpy as np
import pytest

from fabric_llm.data.batches import Batches, Prefetch
from fabric_llm.data.folders import IGNORED

ROWS, EPOCHS = 53, 3


def rows():
    return datasets.Dataset.from_dict({"input_ids": [[i, i, i] for i in range(ROWS)]})


def seen(world_size, micro_batch_size, micro_batches, workers, start=0, end=ROWS * EPOCHS):
    """Row numbers with a target, by step, over all ranks."""
    steps, position = [], start
    sizes = (7, micro_batch_size, micro_batches)
    ranks = [
        Prefetch(Batches(rows(), *sizes, rank, world_size, end=end), workers)
        for rank in range(world_size)
    ]
    while position < end:
        step = []
        for rank in ranks:
            for batch in rank.at(position):
                has_targets = batch["labels"][:, 0] != IGNORED
                step += batch["input_ids"][has_targets, 0].tolist()
        steps.append(step)
        position += world_size * micro_batch_size * micro_batches
    for rank in ranks:
        rank.close()
    return steps


@pytest.mark.parametrize("workers", [0, 1, 2, 5])
@pytest.mark.parametrize(
    ("world_size", "micro_batch_size", "micro_batches"),
    [(1, 12, 1), (2, 3, 2), (3, 2, 2), (4, 3, 1), (6, 1, 2)],
)
def test_each_epoch_is_a_permutation_and_each_step_the_same_set(
    world_size, micro_batch_size, micro_batches, workers
):
    steps = seen(world_size, micro_batch_size, micro_batches, workers)
    # the steps hold the same sequences whatever the ranks: compare with one rank
    assert [sorted(s) for s in steps] == [sorted(s) for s in seen(1, 12, 1, 0)]
    counts = np.bincount([i for step in steps for i in step], minlength=ROWS)
    assert (counts == EPOCHS).all()


def test_order_does_not_depend_on_where_the_run_ends_or_starts_again():
    whole = seen(2, 3, 2, 1)
    assert seen(2, 3, 2, 1, end=60) == whole[:5]
    assert seen(2, 3, 2, 1, start=36) == whole[3:]


def test_the_last_step_of_an_epoch_run_is_a_part_of_a_batch():
    steps = seen(2, 3, 2, 0, end=ROWS)
    assert [len(s) for s in steps] == [12, 12, 12, 12, 5]
    assert sorted(np.concatenate(steps)) == list(range(ROWS)), "each row of the epoch, once"


def test_prefetch_follows_a_run_that_jumps():
    batches = Batches(rows(), 7, 2, 2)
    prefetch = Prefetch(batches, 2)
    for position in (0, 4, 8, 100, 104, 0):
        got, want = prefetch.at(position), batches.at(position)
        assert all((g["input_ids"] == w["input_ids"]).all() for g, w in zip(got, want, strict=True))
    prefetch.close()


def test_attention_mask_and_labels_are_honoured():
    split = datasets.Dataset.from_dict(
        {"input_ids": [[5, 6, 7, 8]], "attention_mask": [[1, 1, 1, 0]], "labels": [[-100, 6, 7, 8]]}
    )
    [batch] = Batches(split, 0, 1, 1).at(0)
    assert batch["labels"].tolist() == [[-100, 6, 7, -100]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0]]
