"""The order of the rows: a permutation that is computed place by place."""

import json
import tracemalloc

import numpy as np
import pytest
from ranks import toy_run, train_ranks
from test_verify import edit_json, reseal

from fabric_llm.data import order
from fabric_llm.data.order import claimed_by, permuted, rows_at
from fabric_llm.verify import __main__ as verify

SIZES = [2**k + d for k in (3, 6, 8, 9, 12, 15) for d in (-1, 0, 1)]
SIZES += [1, 2, 3, 4, 5, 44, 100, 1000]
BILLION = 10**9


def claimed_rows(row_count, seed, first, end):
    """What all ranks together have read of a dataset of `row_count` rows."""
    return claimed_by(lambda positions: rows_at(positions, row_count, seed), first, end)


@pytest.mark.parametrize("rows", SIZES)
def test_every_row_has_one_place(rows):
    for seed, epoch in ((0, 0), (1234, 7)):
        assert sorted(permuted(np.arange(rows), rows, seed, epoch)) == list(range(rows))


def test_a_place_does_not_depend_on_the_others():
    whole, places = permuted(np.arange(100), 100, 5, 1), np.array([[99, 0, 3], [3, 50, 7]])
    assert (permuted(places, 100, 5, 1) == whole[places]).all()
    assert permuted(places[:, :0], 100, 5, 1).shape == (2, 0)


def test_the_order_is_fixed_for_ever():
    """No release of any library may change the data of a run that is under way."""
    first = [permuted(np.arange(10), 10, seed=1234, epoch=epoch).tolist() for epoch in (0, 1)]
    assert first == [[2, 4, 8, 5, 7, 0, 3, 1, 9, 6], [6, 0, 7, 4, 5, 3, 1, 9, 2, 8]]
    far = permuted(np.array([0, 1, 2, BILLION - 1]), BILLION, seed=1234, epoch=0)
    assert far.tolist() == [111656419, 254237115, 792113187, 250832018]


def test_positions_go_through_one_epoch_after_the_other():
    rows = rows_at(np.arange(30).reshape(3, 10), 10, 1234)
    epochs = [permuted(np.arange(10), 10, 1234, epoch).tolist() for epoch in range(3)]
    assert rows.tolist() == epochs


def test_seeds_and_epochs_have_orders_of_their_own():
    each = [(seed, epoch) for seed in range(20) for epoch in range(20)]
    assert len({tuple(permuted(np.arange(44), 44, *one)) for one in each}) == 400


def chi_square(counts):
    """How far counts are from even, in standard deviations of what chance gives."""
    expected, freedom = counts.mean(), len(counts) - 1
    return (((counts - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom)


@pytest.mark.longer
@pytest.mark.parametrize("rows", [4, 44, 64, 1000])
def test_rows_are_spread_as_by_chance(rows):
    """Over seeds: the row at the first place, and the distance from it to the row at the next
    one."""
    orders = np.stack([permuted(np.arange(min(rows, 64)), rows, seed, 3) for seed in range(600)])
    assert abs(chi_square(np.bincount(orders[:, 0], minlength=rows))) < 5
    distances = (orders[:, 1] - orders[:, 0]) % rows
    assert distances.min() > 0 and abs(chi_square(np.bincount(distances, minlength=rows)[1:])) < 5
    stays = (orders == np.arange(orders.shape[1])).sum(axis=1) * rows / orders.shape[1]
    assert 0.8 < stays.mean() < 1.2, "a random order leaves one row in its place"


def test_neighbours_are_not_neighbours():
    rows = permuted(np.arange(100_000), 100_000, 1, 0)
    assert np.mean(np.abs(np.diff(rows)) == 1) < 1e-4
    assert abs(np.corrcoef(rows[:-1], rows[1:])[0, 1]) < 0.02
    assert abs(np.corrcoef(rows, np.arange(100_000))[0, 1]) < 0.02


def test_a_billion_rows_need_no_table():
    """Sorting took 8 GB a rank."""
    tracemalloc.start()
    try:
        rows = rows_at(np.arange(3 * BILLION - 4, 3 * BILLION + 4), BILLION, 1234)
        claimed_rows(BILLION, 1234, BILLION - 5, BILLION + 5)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(set(rows)) == 8 and rows.min() >= 0 and rows.max() < BILLION
    assert peak < 2**20, peak


def test_the_record_of_any_rows_adds_up(monkeypatch):
    whole = claimed_rows(44, 1, 0, 150)
    monkeypatch.setattr(order, "POSITIONS_AT_ONCE", 7)
    assert whole == claimed_rows(44, 1, 0, 150)
    assert whole == claimed_rows(44, 1, 0, 43) + claimed_rows(44, 1, 43, 150)
    assert whole.count == 150 and claimed_rows(44, 1, 5, 5).count == 0


# ------------------------------------------------------------------------------- checkpoints


@pytest.mark.quick_cases(r"None")
@pytest.mark.parametrize("name", ["of-2031", ["feistel"], None])
def test_an_order_that_nobody_knows_is_refused_and_found(toys, tmp_path, capsys, name):
    words = "--global_batch_size 8 --micro_batch_size 8 --save_step_interval 3 --eval_iters 0"
    flags = (*toy_run(toys, tmp_path), "--run_name", "run", *words.split())
    train_ranks(1, *flags, "--max_step", 9)
    last = tmp_path / "run" / "step-00000009"
    fixed = json.loads((last / "trainer" / "progress.json").read_text())["fixed"]
    assert fixed["row_order"] == "feistel"
    edit_json(last / "trainer" / "progress.json", fixed={**fixed, "row_order": name})
    reseal(last)
    longer = "--resume true --resume_override max_step --max_step 12".split()
    with pytest.raises(AssertionError, match=r"SystemExit: 2"):
        train_ranks(1, *flags, *longer)
    with pytest.raises(SystemExit, match="66"):
        verify.main([str(tmp_path / "run"), "--no_export"])
    said = f"rows are read in the order {name!r}; this version knows feistel"
    assert said in capsys.readouterr().err
