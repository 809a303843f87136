"""Law 12: a mixture is exact: after any prefix each source has its share, nothing twice before all
of it once, at any ranks."""

import json
import random
import re
import shutil
from dataclasses import replace
from fractions import Fraction

import datasets
import numpy as np
import pytest
import torch
import yaml
from conftest import CONTEXT, VOCABULARY
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from ranks import metrics, planned, train_ranks
from safetensors.torch import load_file
from test_verify import edit_json, reseal

from fabric_llm.checkpoint.keep import Progress
from fabric_llm.data.batches import Batches, Prefetch
from fabric_llm.data.columns import Rows
from fabric_llm.data.dataset import open_dataset
from fabric_llm.data.mixed_rows import mixed_rows_at, places_at
from fabric_llm.data.mixture import Mixture, mixture_of
from fabric_llm.data.mixture_text import DataMix, Source, mix_of, parse, with_replay
from fabric_llm.data.order import RowsRead, claimed_by, rows_at
from fabric_llm.data.periods import Stage, period_of, position_of, read_before
from fabric_llm.data.stages import Cursor, lay_out
from fabric_llm.plan.schedule import Schedule
from fabric_llm.verify import __main__ as verify

# The same examples in each run: a property that is found to be wrong stays wrong.
same = settings(max_examples=40, derandomize=True, deadline=None, database=None)
weights = st.lists(st.integers(0, 60), min_size=1, max_size=6).filter(any).map(tuple)


def weights_of(count):
    """Weights of so many sources, not all zero."""
    return st.lists(st.integers(0, 9), min_size=count, max_size=count).filter(any).map(tuple)


@st.composite
def mixtures(draw):
    """A mixture of up to four sources of a few rows, in up to four stages."""
    count = draw(st.integers(1, 4))
    lengths = draw(st.lists(st.integers(1, 60), max_size=3))
    begins = np.cumsum([0, *lengths]).tolist()
    laid_out = tuple(Stage(begin, draw(weights_of(count))) for begin in begins)
    rows = tuple(draw(st.lists(st.integers(3, 30), min_size=count, max_size=count)))
    names = tuple("abcd"[:count])
    return Mixture(names, rows, (CONTEXT,) * count, laid_out, draw(st.integers(0, 99)))


# ------------------------------------------------------------------------------- from numbers alone


@same
@given(weights)
def test_after_any_prefix_each_source_is_less_than_one_row_from_its_share(given_weights):
    period = sum(given_weights)
    taken = np.cumsum(np.eye(len(given_weights), dtype=int)[list(period_of(given_weights))], axis=0)
    ideal = np.outer(np.arange(1, period + 1), given_weights)
    assert (np.abs(taken * period - ideal) < period).all()
    assert tuple(taken[-1]) == given_weights


def test_after_any_prefix_with_ten_thousand_slots():
    test = test_after_any_prefix_each_source_is_less_than_one_row_from_its_share
    for given_weights in ((7499, 2500, 1), (3333, 3333, 3334), (9999, 1), (1,) * 50):
        test.hypothesis.inner_test(given_weights)


@same
@given(mixtures())
def test_the_closed_form_is_what_one_counts_position_by_position(mixture):
    sources, numbers = places_at(mixture, np.arange(300))
    counts, index = [0] * len(mixture.names), 0
    for position in range(300):
        assert read_before(mixture.stages, position) == tuple(counts)
        while index + 1 < len(mixture.stages) and mixture.stages[index + 1].begins <= position:
            index += 1
        stage = mixture.stages[index]
        source = period_of(stage.weights)[(position - stage.begins) % sum(stage.weights)]
        assert (sources[position], numbers[position]) == (source, counts[source])
        assert position_of(mixture.stages, source, counts[source]) == position
        counts[source] += 1


@settings(same, max_examples=25)
@given(mixtures(), st.integers(1, 120))
def test_each_row_of_a_source_is_read_once_an_epoch_over_all_segments(mixture, end):
    rows = mixed_rows_at(mixture, np.arange(end))
    backwards = mixed_rows_at(mixture, np.arange(end).reshape(1, -1)[:, ::-1])[0]
    assert (backwards == rows[::-1]).all(), "whatever else is asked for"
    for base, count in zip(np.cumsum([0, *mixture.rows]), mixture.rows):
        mine = rows[(base <= rows) & (rows < base + count)] - base
        for epoch in range(0, len(mine), count):
            part = mine[epoch : epoch + count]
            assert len(set(part)) == len(part)
            assert len(part) < count or set(part) == set(range(count))


@settings(same, max_examples=10)
@given(st.data())
def test_weights_changed_on_purpose_change_only_what_comes_after(data):
    test = test_each_row_of_a_source_is_read_once_an_epoch_over_all_segments
    count = data.draw(st.integers(1, 4))
    rows = data.draw(st.lists(st.integers(3, 30), min_size=count, max_size=count))
    here, step, batch, before = Cursor(), 0, data.draw(st.integers(1, 8)), None
    for _ in range(3):
        begins = Fraction(0), Fraction(1, 2)
        stages = tuple(Stage(begin, data.draw(weights_of(count))) for begin in begins)
        mix = DataMix(tuple(Source(name, name) for name in "abcd"[:count]), stages)
        laid_out = lay_out(mix, rows, batch, step + 10, 1, here)[0]
        mixture = Mixture(mix.names, tuple(rows), (CONTEXT,) * count, laid_out, 1)
        if before is not None:
            behind = np.arange(here.position)
            assert (mixed_rows_at(mixture, behind) == mixed_rows_at(before, behind)).all()
        taken = data.draw(st.integers(1, 9))
        step, before = step + taken, mixture
        here = Cursor(step, here.position + taken * batch, laid_out)
        test.hypothesis.inner_test(mixture, here.position)


@same
@given(st.data())
def test_no_source_is_read_more_often_than_it_may_be(data):
    count = data.draw(st.integers(1, 4))
    rows = data.draw(st.lists(st.integers(5, 60), min_size=count, max_size=count))
    may = st.none() | st.integers(1, 4).map(Fraction)
    caps = data.draw(st.lists(may, min_size=count, max_size=count))
    parts = range(data.draw(st.integers(1, 3)))
    stages = tuple(Stage(Fraction(part, 4), data.draw(weights_of(count))) for part in parts)
    mix = DataMix(tuple(Source(name, name, cap) for name, cap in zip("abcd", caps)), stages)
    batch, epochs = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 3))
    most = [int(n * (cap or epochs)) for n, cap in zip(rows, caps)]
    try:
        laid_out, end, max_step = lay_out(mix, rows, batch, None, epochs)
    except ValueError as error:
        assert "A step takes" in str(error) or "has no step" in str(error)
        assume(False)
    assert all(had <= may for had, may in zip(read_before(laid_out, end), most))
    assert -(-end // batch) == max_step
    uncapped = DataMix(tuple(Source(n, n) for n in mix.names), stages)
    with_more = lay_out(uncapped, rows, batch, max_step + 1, 1)[0]
    over = read_before(with_more, (max_step + 1) * batch)
    assert any(had > may for had, may in zip(over, most)), "one more step would have been too many"


def schedule_of(given, contexts=(64, 64, 64), max_step=1000, batch=4):
    mix, rows = parse(given), (10**6,) * len(contexts)
    stages, end, last = lay_out(mix, rows, batch, max_step, 1)
    mixture = Mixture(mix.names, rows, contexts, stages, 0)
    return Schedule(Progress(), 1, batch, batch, max_step, 1, mix, mixture, last, end)


LAST_TENTH = (
    "{sources: {a: {path: a, weight: 1}, b: {path: b}, c: {path: c}}, stages: [{from: "
    "0.9, weights: {b: 3, c: 1}}]}"
)


def test_after_rewinds_stages_begin_at_their_steps():
    schedule, progress = schedule_of(LAST_TENTH), Progress()
    for step in (400, 600, 920):  # each goes back by 99 steps, past the data of these
        position = progress.position + 4 * (step - progress.step)
        progress = Progress(step - 99, position)
        schedule = schedule.after_rewind(progress)
    assert progress.step == 821 and schedule.max_step == 1000
    for step, names in ((850, {"a"}), (899, {"a"}), (900, {"b", "c"}), (999, {"b", "c"})):
        shares = schedule.mixture.shares_at(progress.position + 4 * (step - progress.step))
        assert {name for name, share in shares.items() if share} == names, step


def test_a_stage_of_other_rows_reads_none_of_what_is_replayed_more():
    schedule = schedule_of(LAST_TENTH.replace("{path: b}", "{path: b, weight: 3}"))
    assert schedule.with_more_replay(["a"], Progress(10, 40)).mixture.stages[-1].weights[0] > 0
    longer = LAST_TENTH.replace("weights: {b: 3, c: 1}", "weights: {c: 1}")
    longer = longer.replace("{path: b}", "{path: b, weight: 3}")
    schedule = schedule_of(longer, contexts=(64, 64, 256))
    schedule = schedule.with_more_replay(["a"], Progress(10, 40))
    assert [stage.weights for stage in schedule.mixture.stages[-2:]] == [(1, 1, 0), (0, 0, 1)]


def test_sources_that_are_replayed_more_have_a_half_together():
    schedule = schedule_of("new=n:0.5,a=a:0.25,b=b:0.25")
    schedule = schedule.with_more_replay(["a"], Progress(10, 40))
    assert schedule.mixture.shares_at(40)["a"] == 0.5
    sentence = "'b' is 0.1667, 'a' is 0.5 already, and more than 0.5 isn't tried"
    with pytest.raises(ValueError, match=sentence):
        schedule.with_more_replay(["b"], Progress(20, 84))


def test_the_share_of_replay_of_a_resumed_run_is_given_as_at_its_beginning():
    begun = with_replay("d/new", None, "d/old", 0.2)
    assert parse(begun).stages[0].weights == (4, 1)
    assert parse(with_replay(None, begun, None, 0.4)).stages[0].weights == (3, 2)
    assert parse(with_replay(None, begun, "moved", 0.4)).sources[1].path == "moved"


def test_a_source_that_the_stage_does_not_read_is_not_replayed_more():
    schedule = schedule_of(LAST_TENTH.replace("{path: b}", "{path: b, weight: 3}"))
    with pytest.raises(ValueError, match="the stage that is running reads none of 'c'"):
        schedule.with_more_replay(["c"], Progress(10, 40))


@pytest.mark.parametrize("seed", range(6))
def test_the_number_of_steps_that_is_advised_is_the_largest_that_fits(seed):
    draw = random.Random(seed)
    weights = [[draw.randint(1, 9) for _ in "ab"] for _ in range(3)]
    sources = Source("a", "a"), Source("b", "b", Fraction(draw.randint(1, 8), 4))
    shares = sorted(Fraction(draw.randint(1, 99), 100) for _ in range(2))
    mix = DataMix(sources, tuple(map(Stage, (Fraction(0), *shares), map(tuple, weights))))
    fits = []
    for steps in range(1, 1000):
        try:
            lay_out(mix, (10**6, 500), 4, steps, 1)
            fits.append(steps)
        except ValueError as error:
            last = re.search(r"at most --max_step (\d+)|has no step", str(error))[1]
    assert len(fits) < 999 and int(last) == fits[-1]


@pytest.mark.parametrize(
    ("mix", "weights"),
    [
        ("a=x:0.75,b=y:0.2,c=z:0.05", (15, 4, 1)),
        ("a=x:0.1,b=y:0.2", (1, 2)),
        ("a=x:1,b=y:2", (1, 2)),
        ("a=x:1/3,b=y:2/3", (1, 2)),
        ("a=x:0.333333,b=y:0.333333,c=z:0.333334", (3333, 3333, 3334)),
        ("a=x:0.3333333333333333,b=y:.5,c=z:1.", (1818, 2727, 5455)),
    ],
)
def test_a_share_is_the_decimal_that_is_written(mix, weights):
    assert parse(mix).stages[0].weights == weights


MIXTURE = Mixture(("new", "old"), (5, 7), (8, 8), (Stage(0, (3, 1)), Stage(8, (1, 1))), 1234)
PATTERNS = [(0, 0, 0, 1), (*(0, 0, 0, 1) * 4, 0, 0, 0, 2)]
ROWS_OF_MIXTURE = [3, 2, 1, 5, 4, 0, 3, 8, 0, 10, 1, 6, 4, 9, 2, 11]


def test_the_order_is_fixed_for_ever():
    """No release of any library may change the data of a run that is under way."""
    assert [period_of(w) for w in ((3, 1), (15, 4, 1))] == PATTERNS
    assert mixed_rows_at(MIXTURE, np.arange(16)).tolist() == ROWS_OF_MIXTURE


def test_what_progress_json_holds_is_the_mixture():
    rows, contexts = {"new": 5, "old": 7}, {"new": 8, "old": 8}
    document = {
        "fixed": {"train_rows": rows, "context_length": contexts, "seed": 1234},
        "mixture": {"sources": MIXTURE.names, "segments": MIXTURE.as_json()},
    }
    assert mixture_of(json.loads(json.dumps(document))) == MIXTURE
    for wrong in ({}, {"mixture": None}, {"fixed": {}}):
        with pytest.raises(ValueError, match="its mixture can't be read"):
            mixture_of({**document, **wrong} if wrong else {})


def test_one_dataset_is_a_mixture_that_reads_it_in_the_order_of_its_seed():
    """Also of checkpoints that name no mixture. Logs name no source then."""
    mixture = mixture_of({"fixed": {"train_rows": 44, "context_length": 8, "seed": 1234}})
    positions = np.arange(150).reshape(3, 50)
    assert (mixed_rows_at(mixture, positions) == rows_at(positions, 44, 1234)).all()
    assert mixture.read_before(150) == {} and mixture.shares_at(149) == {"validation": 1.0}
    assert mixture.context_at(149) == 8


@pytest.mark.parametrize("max_step", [None, 5, 100])
@pytest.mark.parametrize("batch", [1, 8, 44])
def test_a_run_over_one_dataset_ends_after_its_steps_or_epochs(max_step, batch):
    mix = mix_of(None, "data")
    stages, end, last = lay_out(mix, (44,), batch, max_step, 3)
    assert stages == (Stage(0, (1,)),)
    assert (end, last) == ((3 * 44, -(-3 * 44 // batch)) if max_step is None else (None, max_step))
    mixture = mixture_of({"fixed": {"train_rows": 44, "context_length": 8, "seed": 1}})
    sizes = (1, batch, batch, max_step, 3)
    schedule = Schedule(Progress(), *sizes, mix, mixture, last, end)
    assert schedule.half_epochs(66) == 3 and schedule.end_of_run() == (end or last * batch)
    # A rewind skips the data of two steps: without --max_step, so many steps fewer are left.
    after = schedule.after_rewind(Progress(1, 3 * batch))
    assert after.mixture == mixture and after.end == end
    assert after.max_step == (max_step or max(last - 2, 1))


def test_half_epochs_after_a_rewind_are_those_of_a_run_that_resumes_there():
    """They are of the source of which most is read, here by what the rewind has skipped."""
    stages = Stage(Fraction(0), (3, 2)), Stage(Fraction(1, 2), (17, 33))
    mix, rows = DataMix((Source("a", "a"), Source("b", "b")), stages), (60, 60)
    laid_out, end, last = lay_out(mix, rows, 8, 14, 1)
    mixture = Mixture(mix.names, rows, (24, 24), laid_out, 1234)
    schedule = Schedule(Progress(), 4, 2, 8, 14, 1, mix, mixture, last, end)
    there = Progress(4, 48)  # from step 6
    after = schedule.after_rewind(there)
    resumed = Schedule(there, 4, 2, 8, 14, 1, mix, after.mixture, after.max_step, after.end)
    assert after.end_of_run() == resumed.end_of_run() == 48 + 10 * 8
    positions = range(48, 129, 8)
    assert [*map(after.half_epochs, positions)] == [*map(resumed.half_epochs, positions)]
    steered = replace(schedule, steers=True).steered({"b": 0.5}, (Fraction(0), Fraction(1)), there)
    assert steered.end_of_run() == 128


# ------------------------------------------------------------------------------- rows of files


def save(folder, rows, context=CONTEXT, seed=0, value_type="int32", shards=1, **more):
    """A dataset with rows of one length, as prepare_data.py writes them; the first token of a row
    is its number."""

    def split(count):
        tokens = np.random.default_rng(seed).integers(0, VOCABULARY, (count, context))
        tokens[:, 1::2] = (tokens[:, ::2] * (seed + 2) + 3) % VOCABULARY
        tokens[:, 0] = np.arange(count) % VOCABULARY
        features = {"input_ids": datasets.List(datasets.Value(value_type), length=context)}
        features = datasets.Features(features)
        return datasets.Dataset.from_dict({"input_ids": list(tokens)}, features=features)

    both = datasets.DatasetDict({"train": split(rows), "validation": split(9)})
    both.save_to_disk(str(folder), num_shards={"train": shards, "validation": 1})
    if more:
        (folder / "manifest.json").write_text(json.dumps(more))
    return folder


@pytest.mark.parametrize("value_type", ["int32", "uint16", "int64"])
def test_rows_are_read_from_the_memory_map_as_datasets_reads_them(tmp_path, value_type):
    folder = save(tmp_path / "data", 2500, value_type=value_type, shards=3)
    opened = open_dataset(folder)
    assert isinstance(opened.train, Rows) and len(opened.train.chunks) >= 3
    assert len(opened.train) == 2500
    assert not any(chunk["input_ids"].flags.owndata for chunk in opened.train.chunks), "no copy"
    other = datasets.load_from_disk(str(folder))["train"].with_format("numpy")
    for numbers in (np.array([2499, 0, 1000, 1000, 999]), [3], slice(2495, None)):
        found = opened.train[numbers]["input_ids"]
        assert found.dtype == np.int64 and (found == other[numbers]["input_ids"]).all()
    assert (opened.train[7]["input_ids"] == other[7]["input_ids"]).all()
    for outside in (2500, -1, [0, 2500]):
        with pytest.raises(IndexError):
            opened.train[outside]


def test_lists_without_a_fixed_length_are_views_and_masks_of_bits_are_copied(toys, tmp_path):
    ragged = open_dataset(toys / "ragged").train
    assert isinstance(ragged, Rows) and sorted(ragged[0]) == ["input_ids", "labels"]
    masked = {"input_ids": [[1, 2, 3]] * 4, "attention_mask": [[True, True, False]] * 4}
    masked = datasets.Dataset.from_dict(masked)
    both = datasets.DatasetDict({"train": masked, "validation": masked})
    both.save_to_disk(str(tmp_path / "masked"))
    masks = open_dataset(tmp_path / "masked").train
    assert Batches(masks, 1, 2, 1).at(0)[0]["attention_mask"].tolist() == [[1, 1, 0]] * 2


@pytest.mark.parametrize("workers", [0, 3])
@pytest.mark.parametrize(("ranks", "micro_batch_size"), [(1, 4), (2, 2), (4, 1)])
def test_any_ranks_and_workers_read_the_same_rows(ranks, micro_batch_size, workers):
    laid_out = (Stage(0, (3, 1)), Stage(40, (1, 1)))
    mixture = Mixture(("a", "b"), (20, 30), (3, 3), laid_out, 5)
    rows = datasets.Dataset.from_dict({"input_ids": [[i, i, i] for i in range(50)]})
    readers = [
        Prefetch(Batches(rows, 5, micro_batch_size, 2, r, ranks, mixture=mixture), workers)
        for r in range(ranks)
    ]
    for position in range(0, 96, 8):
        seen = [
            int(row[0])
            for reader in readers
            for batch in reader.at(position)
            for row in batch["input_ids"]
        ]
        assert sorted(seen) == sorted(mixed_rows_at(mixture, np.arange(position, position + 8)))
    for reader in readers:
        reader.close()
    read = sum((reader.rows_read for reader in readers), RowsRead())
    assert read == claimed_by(lambda positions: mixed_rows_at(mixture, positions), 0, 96)


# ------------------------------------------------------------------------------- runs

STEPS, BATCH = 12, 8


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Folders `new`, `old` and, with rows twice as long, `long`."""
    folder = tmp_path_factory.mktemp("sources")
    save(folder / "new", 31, seed=1)
    save(folder / "old", 70, seed=2)
    save(folder / "long", 40, context=2 * CONTEXT, seed=3)
    return folder


def staged(sources):
    """A mixture of two sources, and of a third, with longer rows, for the last third of the run."""
    return {
        "sources": {
            "new": {"path": str(sources / "new"), "weight": 0.75},
            "old": {"path": str(sources / "old"), "weight": 0.25},
            "long": {"path": str(sources / "long"), "max_epochs": 2},
        },
        "stages": [{"from": 0.6, "weights": {"long": 1}}],
    }

def flags(toys, output, mix, *more):
    words = f"--precision 32-true --global_batch_size {BATCH} --max_step {STEPS} --lr 1e-3 "
    words += "--save_step_interval 4 --eval_iters 4 --eval_batch_size 2"
    folders = ("--model_name", toys / "llama", "--data_mix", mix, "--output_dir", output)
    return (*folders, *words.split(), *more)


def document_of(run, step):
    return json.loads((run / f"step-{step:08d}" / "trainer" / "progress.json").read_text())


@pytest.fixture(scope="module")
def whole(toys, sources, tmp_path_factory):
    """A run, undisturbed, of two ranks with FSDP, two workers. Its mixture is in mix.yaml beside
    it."""
    output = tmp_path_factory.mktemp("mixture")
    (output / "mix.yaml").write_text(yaml.safe_dump(staged(sources), sort_keys=False))
    run = flags(toys, output, output / "mix.yaml", "--strategy", "fsdp", "--num_workers", 2)
    train_ranks(2, *run, "--run_name", "whole")
    return output / "whole"


@pytest.mark.longer
def test_it_is_evaluated_in_the_middle_and_at_the_end_of_each_epoch_of_its_largest_source(whole):
    lines = map(json.loads, (whole / "metrics.jsonl").read_text().splitlines())
    # 6 rows a step of the 31 of `new`, for 7 steps; all sources together have 141, half of which
    # are 9 steps
    assert [line["step"] for line in lines if "eval_loss" in line] == [0, 3, 6, STEPS]


@pytest.mark.longer
def test_the_log_counts_tokens_and_epochs_of_each_source(whole):
    sources = metrics(whole, "sources")
    assert len(sources) == STEPS
    # 7 of 12 steps at 3 to 1, then longer rows of a third source
    assert sources[6] == {
        "new": {"tokens": 42 * CONTEXT, "epochs": 42 / 31},
        "old": {"tokens": 14 * CONTEXT, "epochs": 14 / 70},
        "long": {"tokens": 0, "epochs": 0.0},
    }
    assert sources[-1]["long"] == {"tokens": 40 * 2 * CONTEXT, "epochs": 1.0}
    tokens = metrics(whole, "tokens")
    assert tokens == [sum(one["tokens"] for one in each.values()) for each in sources]


@pytest.mark.longer
def test_each_validation_split_is_evaluated_and_the_loss_is_that_of_the_shares(whole):
    evaluated, together = (metrics(whole, key) for key in ("eval", "eval_loss"))
    losses = [{name: one["loss"] for name, one in sets.items()} for sets in evaluated]
    assert all(sorted(one) == ["long", "new", "old"] for one in losses)
    of_shares = 0.75 * losses[0]["new"] + 0.25 * losses[0]["old"]
    assert together[0] == pytest.approx(of_shares, rel=1e-12)
    assert together[-1] == losses[-1]["long"]


def test_the_data_of_a_run_is_in_its_manifest(whole, sources):
    manifest = json.loads((whole / f"step-{STEPS:08d}" / "MANIFEST.json").read_text())
    assert manifest["data_fingerprint"] == {
        n: open_dataset(sources / n).fingerprint for n in ("new", "old", "long")
    }


@pytest.mark.longer
def test_a_run_resumed_twice_is_the_undisturbed_run_bit_for_bit(toys, whole, tmp_path):
    resume = ("--strategy", "fsdp", "--run_name", "run", "--resume", "true")
    run = flags(toys, tmp_path, whole.parent / "mix.yaml", *resume)
    train_ranks(2, *run, "--checkpoint", whole / "step-00000004", "--num_workers", 0)
    train_ranks(2, *run, "--checkpoint", tmp_path / "run" / "step-00000008", "--num_workers", 3)
    for key in ("step", "loss", "grad_norm", "tokens", "sources", "eval_loss", "eval"):
        assert metrics(tmp_path / "run", key) == metrics(whole, key), key
    ours, theirs = (
        load_file(folder / f"step-{STEPS:08d}" / "model.safetensors")
        for folder in (tmp_path / "run", whole)
    )
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert verify.main([str(tmp_path / "run"), "--no_export"]) == 0


@pytest.mark.longer
def test_two_ranks_then_one_then_four_read_the_same_rows(toys, whole, tmp_path, capsys):
    resume = ("--run_name", "run", "--resume", "true", "--checkpoint")
    run = flags(toys, tmp_path, whole.parent / "mix.yaml", *resume)
    one, four = "--num_workers 2 --micro_batch_size 4", "--num_workers 1 --strategy fsdp2"
    train_ranks(1, *run, whole / "step-00000004", *one.split())
    train_ranks(4, *run, tmp_path / "run" / "step-00000008", *four.split())
    ours, theirs = (document_of(folder, STEPS) for folder in (tmp_path / "run", whole))
    assert ours["rows_read"] == theirs["rows_read"] and ours["rows_read"]["count"] == STEPS * BATCH
    assert ours["mixture"] == theirs["mixture"] and ours["progress"] == theirs["progress"]
    for key in ("loss", "eval_loss"):
        assert metrics(tmp_path / "run", key) == pytest.approx(metrics(whole, key), rel=2e-6)
    assert metrics(tmp_path / "run", "sources") == metrics(whole, "sources")
    assert verify.main([str(tmp_path / "run"), "--no_export"]) == 0
    assert "96 sequences at positions 0 to 95 were each read" in capsys.readouterr().out


def test_rows_that_were_not_read_are_found(whole, tmp_path, capsys):
    """A row of another source in place of the right one; and a log that counts them otherwise."""
    run = shutil.copytree(whole, tmp_path / "whole")
    last = run / f"step-{STEPS:08d}"
    read = document_of(run, STEPS)["rows_read"]
    read["hash_sum"] += 1
    edit_json(last / "trainer" / "progress.json", rows_read=read)
    reseal(last)
    log = run / "metrics.jsonl"
    log.write_text(log.read_text().replace('"epochs": 0.2}', '"epochs": 0.3}'))
    with pytest.raises(SystemExit, match="66"):
        verify.main([str(run), "--no_export"])
    said = capsys.readouterr().out
    assert "claims 96 sequences at positions 0 to 95, but other rows were read" in said
    assert " sources at step 8, its checkpoint" in said


@pytest.mark.longer
def test_arguments_yaml_repeats_the_run_whatever_became_of_the_mixture_s_file(whole, tmp_path):
    kept = whole / "arguments.yaml"
    said = yaml.safe_load(kept.read_text())
    assert parse(said["data_mix"]).names == ("new", "old", "long")
    assert said["context_length"] is None
    again = ("--run_name", "again", "--output_dir", tmp_path, "--devices", 2)
    _, plan = planned(["--config", kept, *again])
    segments = document_of(whole, STEPS)["mixture"]["segments"]
    assert plan.schedule.mixture.as_json() == segments


@pytest.fixture(scope="module")
def short(toys, sources, tmp_path_factory):
    """(the mixture, the output folder with the run `run`): two sources at 3 to 1 on one rank."""
    output = tmp_path_factory.mktemp("short")
    mix = f"new={sources / 'new'}:0.75,old={sources / 'old'}:0.25"
    train_ranks(1, *flags(toys, output, mix, "--run_name", "run", "--eval_iters", 0))
    return mix, output


def refused(argv):
    with pytest.raises(ValueError) as error:
        planned([*argv, "--devices", 1])
    return str(error.value)


@pytest.mark.longer
def test_weights_change_on_purpose_and_only_from_there_on(toys, sources, short, tmp_path, capfd):
    mix, output = short
    words = ("--run_name", "branch", "--resume", "true", "--eval_iters", 0, "--checkpoint")
    branch = flags(toys, tmp_path, mix, *words)
    resumed = (*branch, output / "run" / "step-00000004")
    changed = mix.replace("0.75", "0.5") + f",more={sources / 'long'}:0"
    said = refused([*resumed, "--data_mix", changed])
    written = "was written with data_mix new 0.75, old 0.25"
    assert f"{written}, not new 0.6666666667, old 0.3333333333." in said
    assert said.endswith("To change that on purpose: --resume_override data_mix.")
    train_ranks(1, *resumed, "--data_mix", changed, "--resume_override", "data_mix")
    before, after = document_of(output / "run", STEPS), document_of(tmp_path / "branch", STEPS)
    assert [one["begins"] for one in after["mixture"]["segments"]] == [0, 4 * BATCH]
    assert after["mixture"]["segments"][1]["weights"] == {"new": 2, "old": 1, "more": 0}
    ours, theirs = mixture_of(after), mixture_of(before)
    behind, rest = np.arange(4 * BATCH), np.arange(STEPS * BATCH)
    assert (mixed_rows_at(ours, behind) == mixed_rows_at(theirs, behind)).all()
    counts = np.bincount(mixed_rows_at(ours, rest), minlength=101)
    # of new: 24 rows of 32, then 43 of 64
    assert counts[:31].sum() == 24 + 43 and set(counts[:31]) == {2, 3}
    assert counts[31:].sum() == 8 + 21 and set(counts[31:]) == {0, 1}
    assert metrics(tmp_path / "branch")[:4] == metrics(output / "run")[:4]
    assert metrics(tmp_path / "branch")[5:] != metrics(output / "run")[5:]
    assert verify.main([str(tmp_path / "branch"), "--no_export"]) == 0
    # and goes on from there, with no word of it
    again = (*branch, tmp_path / "branch" / "step-00000008", "--data_mix", changed)
    _, plan = planned([*again, "--devices", 1])
    assert plan.schedule.mixture.as_json() == after["mixture"]["segments"]


def test_given_shares_replace_those_that_a_rewind_had_chosen(toys, sources, short, tmp_path):
    mix, output = short
    run = shutil.copytree(output / "run", tmp_path / "run")
    last = run / f"step-{STEPS:08d}"
    mixture = {**document_of(run, STEPS)["mixture"], "raised": {"old": "1/2"}}
    edit_json(last / "trainer" / "progress.json", mixture=mixture)
    reseal(last)
    words = ("--run_name", "run", "--resume", "true", "--eval_iters", 0, "--max_step", 20)
    words = (*words, "--devices", 1, "--resume_override", "max_step,data_mix")
    for asked, weights in ((mix, (1, 1)), (mix.replace("0.75,", "0.85,"), (17, 5))):
        _, plan = planned([*flags(toys, tmp_path, asked, *words)])
        assert plan.schedule.mixture.stages[-1].weights == weights
    # A source of weight 0 is no change, and wasn't read.
    words = ("--checkpoint", output / "run" / "step-00000004", "--resume", "true", "--devices", 1)
    more = f"{mix},more={sources / 'long'}:0"
    _, plan = planned([*flags(toys, output, more, *words, "--eval_iters", 0)])
    assert {len(stage.weights) for stage in plan.schedule.mixture.stages} == {3}


@pytest.mark.longer
def test_a_run_that_is_extended_keeps_its_pattern(toys, short, tmp_path):
    mix, output = short
    words = flags(toys, output, mix, "--run_name", "run", "--resume", "true", "--eval_iters", 0)
    _, plan = planned([*words, "--max_step", 20, "--resume_override", "max_step", "--devices", 1])
    segments = document_of(output / "run", STEPS)["mixture"]["segments"]
    assert plan.schedule.mixture.as_json() == segments and plan.schedule.max_step == 20


def test_what_a_resumed_run_may_not_change(toys, sources, short):
    mix, output = short
    run = flags(toys, output, mix, "--run_name", "run", "--resume", "true", "--max_step", 20)
    override = ("--resume_override", "max_step,data_mix")
    only_new = f"new={sources / 'new'}:1"
    assert "leaves out source 'old'" in refused([*run, *override, "--data_mix", only_new])
    swapped = f"new={sources / 'old'}:0.75,old={sources / 'new'}:0.25"
    said = refused([*run, *override, "--data_mix", swapped])
    assert "train_rows of new 31, not 70" in said and "train_rows of old 70, not 31" in said
    one = [word for word in run if word not in ("--data_mix", mix)]
    said = refused([*one, *override, "--train_data_dir", sources / "new"])
    assert "was written with data --data_mix, not --train_data_dir" in said


@pytest.mark.longer
def test_a_mixture_ends_before_a_source_is_read_too_often(toys, sources, tmp_path):
    mix = f"new={sources / 'new'}:0.75:2,old={sources / 'old'}:0.25"
    words = flags(toys, tmp_path, mix, "--eval_iters", 0)
    run = [word for word in words if word not in ("--max_step", str(STEPS))]
    train_ranks(1, *run, "--run_name", "run")
    last = metrics(tmp_path / "run", "sources")[-1]
    assert last["new"]["epochs"] == 2.0 and last["old"]["epochs"] < 1
    # 82 sequences: ten steps of eight, and two more
    assert (tmp_path / "run" / "step-00000011").is_dir()
    again = ("--run_name", "run", "--resume", "true", "--devices", 1)
    _, plan = planned([*run, *again, "--checkpoint", tmp_path / "run" / "step-00000008"])
    assert (plan.schedule.end, plan.schedule.max_step, plan.start.position) == (82, 11, 64)
    with pytest.raises(ValueError, match="is where this run ends"):
        planned([*run, *again])


# ------------------------------------------------------------------------------- what is refused


def test_mixtures_that_do_not_go_together_are_refused(toys, sources, tmp_path):
    new, old = sources / "new", sources / "old"

    def said(mix, *more):
        return refused(flags(toys, tmp_path, mix, *more))

    twice = f"new={new}:0.75:2,old={old}:0.25"
    assert (
        "would be read 2.32 times in 12 steps (72 of 31 rows), more than its max_epochs, 2: take "
        "at most --max_step 10"
    ) in said(twice)
    longer = f"new={new}:1,long={sources / 'long'}:1"
    tokens = "must hold equally many tokens, which are 24 in source 'new' and 48 in source 'long'"
    assert tokens in said(longer)
    even = f"new={new}:1,old={old}:1"
    assert "--context_length 99: the rows of" in said(even, "--context_length", 99)
    ragged = f"new={new}:1,ragged={toys / 'ragged'}:1"
    columns = "different columns: input_ids, and input_ids, labels; run prepare_data.py for both"
    assert columns in said(ragged)
    late = {**staged(sources), "stages": [{"from": 0.99, "weights": {"new": 1}}]}
    late["sources"]["long"]["weight"] = 0
    no_step = "the stage from 0.99 on has no step: it begins after step 12 of 12"
    assert no_step in said(json.dumps(late))


def test_sources_of_different_tokenizers_are_refused(toys, sources, tmp_path):
    manifest = {"packed": True, "context_length": CONTEXT, "max_token_id": VOCABULARY - 1}
    manifest |= {"eos_token_id": 0, "tokenizer_sha256": "a"}
    save(tmp_path / "one", 20, **manifest)
    save(tmp_path / "two", 20, **{**manifest, "tokenizer_sha256": "b"})
    save(tmp_path / "end", 20, **{**manifest, "eos_token_id": 5})

    def said(other, *more):
        return refused(flags(toys, tmp_path, f"one={tmp_path / 'one'}:1,other={other}:1", *more))

    tokenizers = "different tokenizers; run prepare_data.py for both with one --tokenizer."
    assert tokenizers in said(tmp_path / "two")
    assert "end documents with different tokens, 0 and 5 " in said(tmp_path / "end")
    masked = said(sources / "new", "--document_masking", "true")
    assert "end documents with different tokens, 0 and None (None: not packed" in masked
