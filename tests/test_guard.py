"""Losing well: NaN and spikes on any rank change nothing, are said, and end a run that doesn't
recover."""

import json
import math
import os
import re
import signal

import pytest
import torch
from conftest import ROWS, flip
from ranks import assert_same_tensors, lines, metrics, run_ranks, saved, status, toy_run
from ranks import weights as weights_of
from test_order import claimed_rows

from fabric_llm.checkpoint import keep, writing
from fabric_llm.data.order import RowsRead
from fabric_llm.training.forgetting import Forgetting
from fabric_llm.training.guard import Guard


def train_with_faults(argv, faults, factor):
    """train.py, with the loss of some training forward passes multiplied by `factor`. Returns the
    exit code.

    faults: {rank: numbers of its forward passes in training, from 0}.
    """
    import train
    from fabric_llm.model.language_model import LanguageModel

    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    forward, calls = LanguageModel.forward, iter(range(10**9))

    def faulty(self, *args, **kwargs):
        loss = forward(self, *args, **kwargs)
        trains = self.training and torch.is_grad_enabled() and kwargs.get("labels") is not None
        if trains and next(calls) in faults.get(rank, ()):
            return loss * factor
        return loss

    LanguageModel.forward = faulty
    try:
        train.main(argv)
    except SystemExit as stop:
        return stop.code
    return 0


def argv_of(toys, folder, ranks, *flags, strategy="auto", model="llama"):
    words = [*toy_run(toys, folder, model=model), "--strategy", strategy, "--devices", ranks]
    words += "--run_name run --log_step_interval 1 --eval_iters 0 --lr 1e-2".split()
    words += "--global_batch_size 4 --micro_batch_size 1".split()
    return [str(word) for word in [*words, *flags]]


def run(toys, folder, ranks, faults, *flags, factor=math.nan, strategy="auto", model="llama"):
    argv = argv_of(toys, folder, ranks, *flags, strategy=strategy, model=model)
    codes = run_ranks(ranks, train_with_faults, argv, faults, factor)
    assert len(set(codes)) == 1, "all ranks end alike"
    return codes[0]


def weights(folder, step):
    return weights_of(folder / "run", step)


@pytest.mark.quick_cases(r"auto-1-nan|fsdp2-2-inf")
@pytest.mark.parametrize("factor", [math.nan, math.inf])
@pytest.mark.parametrize(
    ("strategy", "ranks"), [("auto", 1), ("ddp", 2), ("fsdp", 2), ("fsdp2", 2)]
)
def test_a_bad_micro_batch_on_one_rank_changes_no_parameter_on_any(
    toys, tmp_path, strategy, ranks, factor
):
    last_rank, micro_batches = ranks - 1, 4 // ranks
    faults = {last_rank: [micro_batches + 1]}  # the second step
    flags = ("--max_step", 3, "--save_step_interval", 1, "--weight_decay", 0.5)
    assert run(toys, tmp_path, ranks, faults, *flags, strategy=strategy, factor=factor) == 0
    first, second, third = (weights(tmp_path, step) for step in (1, 2, 3))
    assert_same_tensors(first, second)
    assert not all(torch.equal(second[name], third[name]) for name in second)
    assert all(torch.isfinite(value).all() for value in third.values())
    assert metrics(tmp_path / "run", "verdict") == ["skip"]
    assert metrics(tmp_path / "run", "from_position") == [4], "where its data is"
    assert metrics(tmp_path / "run", "loss")[1] is None


@pytest.mark.longer
@pytest.mark.parametrize(("strategy", "ranks"), [("auto", 1), ("fsdp", 2)])
def test_too_many_in_a_row_end_the_run_and_leave_the_last_good_checkpoint(
    toys, tmp_path, strategy, ranks
):
    faults = {0: range(8 // ranks, 400)}  # from the third step on
    flags = ("--max_step", 50, "--save_step_interval", 2, "--max_skipped_steps", 3)
    assert run(toys, tmp_path, ranks, faults, *flags, strategy=strategy) == 76
    assert metrics(tmp_path / "run", "verdict") == ["skip"] * 4
    assert saved(tmp_path / "run") == [2, 4], "a skipped step's weights are those before it"
    assert all(torch.isfinite(value).all() for value in weights(tmp_path, 4).values())
    following = named(tmp_path)
    assert f"--checkpoint {tmp_path / 'run' / 'step-00000004'} --lr 0.005" in " ".join(following)
    assert run(toys, tmp_path, ranks, {}, *flags, *following, "--save_step_interval", 50) == 0
    assert weights(tmp_path, 50)


def named(folder):
    """The flags of the command that STATUS.json names, as mending what ended the run."""
    reason = status(folder / "run")["reason"]
    return re.search(r": the same command with (.*)$", reason)[1].split()


SPIKE = ("--max_step", 16, "--save_step_interval", 4, "--spike_threshold", 6, "--lr", 1e-4)
SPIKE_AT = {0: range(4 * 12, 4 * 13)}  # the loss of step 13 is 100 times too large
SPIKE_AT_14 = {0: range(4 * 13, 4 * 14)}
REWIND = (*SPIKE, "--spike_action", "rewind")


@pytest.mark.longer
@pytest.mark.parametrize(("action", "changes"), [("warn", True), ("skip", False)])
def test_a_spike_is_warned_of_or_skipped(toys, tmp_path, action, changes):
    flags = (*SPIKE, "--save_step_interval", 1, "--spike_action", action)
    assert run(toys, tmp_path, 1, SPIKE_AT, *flags, factor=100.0, model="gpt2-no-dropout") == 0
    assert metrics(tmp_path / "run", "verdict") == [action]
    before, after = weights(tmp_path, 12), weights(tmp_path, 13)
    assert any(not torch.equal(before[name], after[name]) for name in before) == changes


def assert_each_step_once(folder):
    assert [line["step"] for line in lines(folder, "loss")] == list(range(1, 17))


@pytest.mark.quick_cases(r"fsdp-2")
@pytest.mark.parametrize(
    ("strategy", "ranks", "kind"),
    [("auto", 1, "full"), ("fsdp", 2, "sharded"), ("fsdp2", 2, "full")],
)
def test_a_spike_rewinds_to_the_last_checkpoint_and_past_its_data(
    toys, tmp_path, strategy, ranks, kind
):
    faults = {0: range(4 // ranks * 13, 4 // ranks * 14)}  # step 14
    flags = (*REWIND, "--state_dict_type", kind)
    assert run(toys, tmp_path, ranks, faults, *flags, factor=100.0, strategy=strategy) == 0
    assert metrics(tmp_path / "run", "verdict") == ["rewind"]
    at = [line["position"] for line in lines(tmp_path / "run", "verdict")]
    assert at == [14 * 4], "on with the data after it"
    assert_each_step_once(tmp_path / "run")
    progress = keep.read_progress(tmp_path / "run/step-00000016")
    assert progress["progress"]["position"] == (14 + 4) * 4
    read, once = progress["rows_read"], claimed_rows(ROWS, 1234, 0, (14 + 4) * 4)
    assert RowsRead(read["count"], read["hash_sum"]) == once, "undone or not"
    assert progress["guard"]["rewinds"] == 1


# Resumed at step 12, with the spike in step 14.
FROM_12 = "--spike_threshold 6 --lr 1e-4 --spike_action rewind --save_step_interval 12".split()
TO_20 = (*FROM_12, *"--resume true --resume_override max_step --max_step 20".split())
SPIKE_FROM_12 = {0: range(4 * 1, 4 * 2)}


@pytest.mark.longer
def test_what_a_rewind_takes_to_load_is_no_training(toys, tmp_path):
    argv = argv_of(toys, tmp_path, 1, *SPIKE, "--spike_action", "rewind")
    assert run_ranks(1, with_slow_rewinds, argv, SPIKE_AT) == [0]
    assert metrics(tmp_path / "run", "verdict") == ["rewind"]
    rates = metrics(tmp_path / "run", "tokens_per_second")[1:]
    assert min(rates) > max(rates) / 20, rates  # a step takes milliseconds


def with_slow_rewinds(argv, faults):
    import time

    from fabric_llm.run import verdicts

    load_again = verdicts.load_again

    def slow(*args):
        time.sleep(5)
        return load_again(*args)

    verdicts.load_again = slow
    return train_with_faults(argv, faults, 100.0)


@pytest.mark.longer
@pytest.mark.parametrize("branch", [False, True])
def test_a_rewind_that_was_cut_off_is_made_again_and_told_once(toys, tmp_path, branch):
    """A branch that hasn't saved yet goes back to where it began."""
    assert run(toys, tmp_path, 1, {}, *FROM_12, "--max_step", 12) == 0
    more, spike = TO_20, SPIKE_FROM_12
    if branch:
        more += ("--checkpoint", tmp_path / "run" / "step-00000012", "--run_name", "branch")
    argv = argv_of(toys, tmp_path, 1, *more)
    assert run_ranks(1, doing, interrupt, 3, argv, spike) == [75]
    folder = tmp_path / ("branch" if branch else "run")
    assert metrics(folder, "verdict") == ["rewind"]
    assert metrics(folder, "step")[-1] == 13, "once more"
    assert run(toys, tmp_path, 1, spike, *more, factor=100.0) == 0
    assert metrics(folder, "verdict") == ["rewind"] and metrics(folder, "step")[-1] == 20
    assert [line["position"] for line in lines(folder, "verdict")] == [14 * 4]


@pytest.mark.longer
@pytest.mark.parametrize("branch", [False, True])
def test_a_stop_in_the_step_of_a_rewind_reads_no_row_twice(toys, tmp_path, branch):
    assert run(toys, tmp_path, 1, {}, *FROM_12, "--max_step", 12) == 0
    at = ("--checkpoint", tmp_path / "run" / "step-00000012")
    whole = (*TO_20, *at, "--run_name", "whole")
    assert run(toys, tmp_path, 1, SPIKE_FROM_12, *whole, factor=100.0) == 0
    more, name = (*TO_20, *at, "--run_name", "branch"), "branch"
    if not branch:
        more, name = TO_20, "run"
    argv = argv_of(toys, tmp_path, 1, *more)
    assert run_ranks(1, doing, stop, 1, argv, SPIKE_FROM_12) == [75]
    said = status(tmp_path / name)
    assert said["last_durable_step"] == said["step"] == 13
    assert run(toys, tmp_path, 1, {}, *TO_20, "--run_name", name) == 0
    for key in ("step", "loss", "tokens", "position"):
        assert metrics(tmp_path / name, key) == metrics(tmp_path / "whole", key), key
    assert_same_tensors(weights_of(tmp_path / name, 20), weights_of(tmp_path / "whole", 20))


def interrupt():
    raise KeyboardInterrupt


def stop():
    os.kill(os.getpid(), signal.SIGTERM)


def doing(action, steps, argv, faults):
    """train_with_faults, with an action after so many steps, before the next one asks whether it
    has to stop or to save."""
    from fabric_llm.training import step

    clip, calls = step.clip, iter(range(10**9))

    def acting(*args):
        if next(calls) == steps:
            action()
        return clip(*args)

    step.clip = acting
    return train_with_faults(argv, faults, 100.0)


@pytest.mark.longer
def test_a_run_of_epochs_that_went_back_resumes_on_the_same_schedule(toys, tmp_path):
    """It has fewer steps left than were planned, since some data is passed over; the curve of the
    rest says so too."""
    flags = "--number_epochs 2 --save_step_interval 4 --spike_threshold 6".split()
    flags += "--spike_action rewind --lr 1e-4".split()
    # Step 14 of 22: back to 12.
    assert run(toys, tmp_path, 1, SPIKE_AT_14, *flags, factor=100.0) == 0
    assert metrics(tmp_path / "run", "verdict") == ["rewind"]
    steps = metrics(tmp_path / "run", "step")
    assert max(steps) == 20
    branch = ("--resume", "true", "--checkpoint", tmp_path / "run" / "step-00000016")
    assert run(toys, tmp_path, 1, {}, *flags, *branch, "--run_name", "branch") == 0
    for key in ("step", "loss", "lr"):
        assert metrics(tmp_path / "branch", key) == metrics(tmp_path / "run", key)
    assert_same_tensors(weights_of(tmp_path / "branch", 20), weights(tmp_path, 20))


@pytest.mark.longer
@pytest.mark.parametrize(("strategy", "ranks"), [("auto", 1), ("fsdp", 2)])
def test_a_rewind_passes_over_a_damaged_checkpoint(toys, tmp_path, strategy, ranks, monkeypatch):
    """The one of step 12 is damaged as soon as it is there: back to step 8, and 12 is written
    anew."""
    publish = writing.publish

    def damaging(temporary, target, document):
        publish(temporary, target, document)
        if target.name == "step-00000012" and not list(target.parent.glob("aside-*")):
            flip(target / "model.safetensors")

    monkeypatch.setattr(writing, "publish", damaging)
    faults = {0: range(4 // ranks * 13, 4 // ranks * 14)}  # step 14
    assert run(toys, tmp_path, ranks, faults, *REWIND, factor=100.0, strategy=strategy) == 0
    assert_each_step_once(tmp_path / "run")
    assert [line["step"] for line in lines(tmp_path / "run", "verdict")] == [8]
    assert len(list((tmp_path / "run").glob("aside-step-00000012-*"))) == 1
    keep.verified(tmp_path / "run" / "step-00000016", hashes=True)


def test_a_spike_with_the_last_data_is_left_out(toys, tmp_path):
    """There is nothing to go on with: the steps since the last checkpoint would be lost for
    nothing."""
    more = "--number_epochs 1 --save_step_interval 4 --spike_threshold 6".split()
    more += "--spike_window 8 --lr 1e-4 --spike_action rewind".split()
    assert run(toys, tmp_path, 1, {0: range(4 * 10, 4 * 11)}, *more, factor=100.0) == 0
    assert metrics(tmp_path / "run", "verdict") == ["skip"]
    assert metrics(tmp_path / "run", "step")[-1] == 11
    before, after = weights(tmp_path, 8), weights(tmp_path, 11)
    assert any(not torch.equal(before[name], after[name]) for name in before)


@pytest.mark.longer
def test_a_request_to_save_in_the_step_of_a_rewind_is_kept_for_the_next(toys, tmp_path):
    argv = argv_of(toys, tmp_path, 1, *REWIND)
    save_now = (tmp_path / "run" / "save_now").touch
    assert run_ranks(1, doing, save_now, 13, argv, SPIKE_AT_14) == [0]
    assert metrics(tmp_path / "run", "verdict") == ["rewind"]
    assert saved(tmp_path / "run") == [4, 8, 12, 13, 16]


@pytest.mark.longer
def test_a_rewind_goes_where_a_run_that_was_not_stopped_would(toys, tmp_path):
    """Not to the checkpoint of step 13, which only a stop has made."""
    more = (*REWIND, "--keep_last", 2, "--keep_best", 0)
    assert run(toys, tmp_path, 1, SPIKE_AT_14, *more, "--run_name", "whole", factor=100.0) == 0
    argv = argv_of(toys, tmp_path, 1, *more)
    assert run_ranks(1, doing, stop, 12, argv, {}) == [75]
    assert run(toys, tmp_path, 1, {0: range(4)}, *more, "--resume", "auto", factor=100.0) == 0
    for key in ("step", "loss", "position", "verdict"):
        assert metrics(tmp_path / "run", key) == metrics(tmp_path / "whole", key), key
    assert saved(tmp_path / "whole") == saved(tmp_path / "run") == [12, 16]
    assert not list((tmp_path / "run").glob("aside-*")), "they count as well, and go first"


def test_after_a_rate_that_spoils_the_weights_no_spoilt_checkpoint_is_named(toys, tmp_path):
    more = "--max_step 20 --save_step_interval 1 --max_skipped_steps 3 --lr 1e3".split()
    assert run(toys, tmp_path, 1, {}, *more, "--precision", "32-true") == 76
    reason = status(tmp_path / "run")["reason"]
    assert "Start again" in reason and "--checkpoint" not in reason and weights(tmp_path, 4)
    assert "--lr 2e-05" in reason, "half of a rate that no model is trained with is no advice"


def test_a_save_before_any_step_was_taken_changes_nothing(toys, tmp_path):
    """Optimizers make their state in a first step: here it is there before."""
    faults = {0: range(4)}  # the first step is left out
    flags = ("--max_step", 3, "--precision", "32-true")
    for name, more in (("run", ("--save_step_interval", 1)), ("once", ())):
        assert run(toys, tmp_path, 1, faults, *flags, *more, "--run_name", name) == 0
    assert_same_tensors(weights(tmp_path, 3), weights_of(tmp_path / "once", 3))


@pytest.mark.longer
def test_a_rewind_without_a_checkpoint_ends_the_run(toys, tmp_path):
    flags = "--max_step 16 --spike_threshold 6 --spike_action rewind --lr 1e-4".split()
    assert run(toys, tmp_path, 1, SPIKE_AT, *flags, factor=100.0) == 76
    assert run(toys, tmp_path, 1, SPIKE_AT, *flags, *named(tmp_path), factor=100.0) == 0
    assert metrics(tmp_path / "run", "verdict") == ["rewind"]


@pytest.mark.longer
def test_a_run_that_went_back_too_often_says_how_to_go_on(toys, tmp_path):
    flags = (*REWIND, "--max_skipped_steps", 0)
    assert run(toys, tmp_path, 1, SPIKE_AT, *flags, factor=100.0) == 76
    assert run(toys, tmp_path, 1, {}, *flags, *named(tmp_path)) == 0 and weights(tmp_path, 16)


def test_what_was_of_other_rows_before_is_not_compared():
    forgetting = Forgetting(before={"old": 2.0, "new": 3.0}, changed=frozenset({"new"}))
    assert forgetting.rises({"old": 2.5, "new": 2.5}) == {"old": 0.5}


def test_what_is_a_spike():
    guard = Guard(spike_threshold=3.0, spike_window=20, spike_action="skip")
    losses = [2.0, 2.1, 1.9, 2.05, 1.95] * 4
    assert all(guard.accept(loss, 1.0) for loss in losses)
    assert guard.accept(2.2, 1.0) and guard.verdict == "take"
    assert not guard.accept(3.0, 1.0) and guard.verdict == "skip"
    assert "deviations above" in guard.reason
    assert guard.losses[-1] == 2.2, "a skipped loss is no part of the window"
    assert guard.accept(0.5, 1.0), "a fall is none"
    equal = Guard(spike_threshold=3.0, spike_action="skip")
    assert all(equal.accept(loss, 1.0) for loss in (*[2.0] * 20, 2.001)), "equal ones don't tell"
    few = Guard(spike_threshold=3.0)
    assert all(few.accept(loss, 1.0) for loss in (2.0, 2.0, 50.0)), "too few losses to tell"


@pytest.mark.parametrize(("rewinds", "may"), [(0, True), (1, False)])
def test_so_many_rewinds_are_made_and_no_more(rewinds, may):
    guard = Guard(max_skipped_steps=1, spike_threshold=3.0, spike_action="rewind")
    guard.restore({"losses": [2.0, 2.1] * 10, "skipped": 0, "rewinds": rewinds, "before": {}})
    assert not guard.accept(9.0, 1.0) and guard.verdict == "rewind" and guard.may_rewind() is may
    assert not guard.accept(math.nan, 1.0) and guard.gives_up() is (guard.skipped > 1), (
        "which is no rewind"
    )


def test_only_finite_steps_are_taken_and_the_state_survives_json():
    guard = Guard(max_skipped_steps=1, spike_threshold=3.0)
    assert guard.accept(2.0, 1.0)
    assert not guard.accept(2.0, math.inf) and not guard.gives_up()
    assert not guard.accept(math.nan, 1.0) and guard.gives_up()
    again = Guard(max_skipped_steps=1, spike_threshold=3.0)
    again.restore(json.loads(json.dumps(guard.state())))
    assert again.state() == guard.state() and again.gives_up()
    assert again.accept(1.0, 1.0) and not again.gives_up()


def tensors_alive():
    import gc

    return [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor)]


def bytes_of(tensors):
    storages = [one.untyped_storage() for one in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def train_and_count(argv, faults):
    """[(models, optimizers, bytes of tensors alive)] of a run with spikes, whenever a rewind begins
    to load and has loaded."""
    import gc
    import weakref

    from fabric_llm.model import sharded
    from fabric_llm.run import build
    from fabric_llm.run.log import Log

    fill, make_optimizer, rewound = sharded.fill, build.make_optimizer, Log.rewound
    made, seen = [], []

    def counting(model, *given):
        if made:
            count()
        fill(model, *given)

    def remembering(run, *given):
        make_optimizer(run, *given)
        model, optimizer = weakref.ref(run.model.module), weakref.ref(run.optimizer.optimizer)
        made.append((model, optimizer, tuple(map(id, run.model.parameters()))))

    def alive():
        return [one for one in tensors_alive() if not hasattr(one, "to_local")]

    # what this process was forked with; held, so that nothing else gets their addresses
    of_other_tests = alive()
    others = set(map(id, of_other_tests))

    def count():
        tensors = [one for one in alive() if id(one) not in others]
        models = {id(model()) for model, _, _ in made if model() is not None}
        optimizers = [optimizer for _, optimizer, _ in made if optimizer() is not None]
        seen.append((len(models), len(optimizers), bytes_of(tensors)))

    def counting_afterwards(*given):
        gc.collect()
        count()
        return rewound(*given)

    sharded.fill, build.make_optimizer, Log.rewound = counting, remembering, counting_afterwards
    assert train_with_faults(argv, faults, 100.0) == 0
    assert len({parameters for *_, parameters in made}) == 1, "those that were there"
    return seen


@pytest.mark.longer
@pytest.mark.parametrize(
    ("strategy", "ranks"), [("auto", 1), ("ddp", 2), ("fsdp", 2), ("fsdp2", 2)]
)
def test_a_rewind_loads_into_the_model_that_is_there(toys, tmp_path, strategy, ranks):
    of_step = 4 // ranks
    faults = {0: [*range(of_step * 13, of_step * 14), *range(of_step * 15, of_step * 16)]}
    more = "--async_save true --ema_decay 0.9 --eval_iters 2".split()
    argv = argv_of(toys, tmp_path, ranks, *REWIND, *more, strategy=strategy)
    for rank, seen in enumerate(run_ranks(ranks, train_and_count, argv, faults)):
        assert [counts[:2] for counts in seen] == [(1, 0), (1, 1)] * 2, f"rank {rank}"
        sizes = [size for *_, size in seen]
        # Nothing else of them stays.
        assert sizes[2] <= sizes[0] * 1.1 and sizes[3] <= sizes[1] * 1.1
        assert sizes[0] < sizes[1], "no optimizer while the weights are loaded"


def resume_and_count(argv, changes):
    """[(older parameters alive, bytes of tensors)] of a run and one that resumes it in the same
    process, as weights are loaded."""
    import gc
    import weakref

    from fabric_llm.model import sharded

    fill, older, seen = sharded.fill, [], []

    def counting(model, *given):
        gc.collect()
        left = sum(parameter() is not None for parameter in older)
        seen.append((left, bytes_of(tensors_alive())))
        fill(model, *given)
        older.extend(map(weakref.ref, model.parameters()))

    sharded.fill = counting
    assert [train_with_faults(words, {}, 1.0) for words in (argv, [*argv, *changes])] == [0, 0]
    return seen


@pytest.mark.longer
def test_a_resume_in_the_same_process_leaves_no_second_model(toys, tmp_path):
    more = "--max_step 4 --async_save true --ema_decay 0.9 --eval_iters 2".split()
    argv = argv_of(toys, tmp_path, 1, *more)
    changes = ["--resume", "true", "--max_step", "8", "--resume_override", "max_step"]
    [[(_, before), (alive, again)]] = run_ranks(1, resume_and_count, argv, changes)
    assert alive == 0, "parameters of the first run"
    assert again <= before * 1.1, "nothing else of it stays"
