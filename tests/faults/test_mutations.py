"""The resume test sees what it should: each item of saved state, dropped on purpose, makes the
resumed run another one."""

import math

import pytest
import torch
from ranks import Job, ended_with, metrics, toy_run, weights

pytestmark = pytest.mark.faults

STEPS, HALF = 18, 12
NAN_STEPS = (11, 12, 13)  # of which the first two are before the checkpoint


def flags(toys, output, *more):
    return (
        *toy_run(toys, output, model="gpt2"),
        *"--lr 1e-2 --strategy fsdp --micro_batch_size 1 --global_batch_size 4".split(),
        *"--eval_iters 0 --warmup_steps 4 --spike_window 20".split(),
        *("--max_step", STEPS, "--save_step_interval", HALF, *more),
    )


def inject(factors):
    """The loss of the forward passes of a step (by number, from 1) is multiplied; a resumed run
    counts on."""

    def install():
        import fabric_llm.training.step
        from fabric_llm.model.language_model import LanguageModel

        forward, seed_step = LanguageModel.forward, fabric_llm.training.step.seed_step
        now = [0]

        def seeded(seed, step, rank):
            now[0] = step + 1
            seed_step(seed, step, rank)

        def faulty(self, *args, **kwargs):
            loss = forward(self, *args, **kwargs)
            trains = self.training and torch.is_grad_enabled()
            return loss * factors.get(now[0], 1.0) if trains else loss

        fabric_llm.training.step.seed_step, LanguageModel.forward = seeded, faulty

    return install


def drop_parameters():
    from fabric_llm.run import reference

    load = reference.load
    reference.load = lambda plan, _, seed, flags: load(plan, flags.model_name, seed, flags)


def drop_optimizer():
    from fabric_llm.checkpoint import reading

    reading.load_optimizer = lambda *args: None


def drop_optimizer_item(item):
    def drop():
        from fabric_llm.checkpoint import reading

        load = reading.load_optimizer

        def without(path, model, optimizer, *more):
            load(path, model, optimizer, *more)
            for state in getattr(optimizer, "optimizer", optimizer).state.values():
                state[item].zero_()

        reading.load_optimizer = without

    return drop


def drop_from_progress(item):
    def drop():
        from fabric_llm.checkpoint import keep

        check = keep.verified

        def without(path, hashes=False):
            document = check(path, hashes)
            return {**document, "progress": {**document["progress"], item: 0}}

        keep.verified = without

    return drop


def drop_randomness():
    import fabric_llm.training.step

    seed_step, first = fabric_llm.training.step.seed_step, []

    def from_the_start(seed, step, rank):
        first.append(step)
        seed_step(seed, step - first[0], rank)

    fabric_llm.training.step.seed_step = from_the_start


def drop_schedule():
    import train

    lr_at, first = train.lr_at, []

    def from_the_start(step, **schedule):
        first.append(step)
        return lr_at(step - first[0], **schedule)

    train.lr_at = from_the_start


def drop_guard_item(item, empty):
    def drop():
        from fabric_llm.training.guard import Guard

        restore = Guard.restore
        Guard.restore = lambda self, state: restore(self, {**state, item: empty})

    return drop


def nothing():
    pass


@pytest.fixture(scope="module")
def whole(toys, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    ended_with([0, 0], *flags(toys, folder, "--run_name", "whole"))
    return folder / "whole"


def is_same(toys, whole, tmp_path, drop):
    """Whether a branch from the half of `whole`, with something dropped while it is loaded, ends
    like `whole`."""
    more = ("--resume", "true", "--checkpoint", whole / f"step-{HALF:08d}", "--run_name", "branch")
    job = Job(2, *flags(toys, tmp_path, *more), before=drop)
    if job.wait() != [0, 0]:
        return False
    run = tmp_path / "branch"
    ours, theirs = weights(run, STEPS), weights(whole, STEPS)
    same = all(torch.equal(ours[name], theirs[name]) for name in theirs)
    keys = ("step", "loss", "lr", "tokens")
    return same and all(metrics(run, key) == metrics(whole, key) for key in keys)


def test_with_everything_restored_it_is_the_same_run(toys, whole, tmp_path):
    assert is_same(toys, whole, tmp_path, nothing)


DROPS = {
    "parameters": drop_parameters,
    "optimizer": drop_optimizer,
    **{item: drop_optimizer_item(item) for item in ("exp_avg", "exp_avg_sq", "step")},
    **{f"run's {item}": drop_from_progress(item) for item in ("position", "step", "tokens")},
    "randomness": drop_randomness,
    "schedule": drop_schedule,
}


@pytest.mark.parametrize("item", DROPS)
def test_without_it_the_resumed_run_is_another(toys, whole, tmp_path, item):
    assert not is_same(toys, whole, tmp_path, DROPS[item])


@pytest.mark.parametrize(
    "drop", [nothing, drop_guard_item("skipped", 0)], ids=["restored", "skip list"]
)
def test_skips_before_the_checkpoint_count_after_it(toys, tmp_path, drop):
    """Two NaN steps before the checkpoint and one after it are three in a row: 76."""
    first = flags(toys, tmp_path, "--run_name", "run", "--max_skipped_steps", 2)
    two, killed = inject(dict.fromkeys(NAN_STEPS[:2], math.nan)), f"between_steps:count={HALF + 1}"
    ended_with([-9, -9], *first, failpoint=killed, before=two)

    def before():
        drop()
        inject(dict.fromkeys(NAN_STEPS, math.nan))()

    codes = Job(2, *first, "--resume", "auto", before=before).wait()
    assert codes == ([76, 76] if drop is nothing else [0, 0])


@pytest.mark.parametrize(
    "drop", [nothing, drop_guard_item("losses", [])], ids=["restored", "losses"]
)
def test_a_spike_after_the_checkpoint_is_measured_by_losses_before_it(toys, tmp_path, drop):
    first = flags(toys, tmp_path, *"--run_name run --spike_threshold 6 --spike_action skip".split())
    ended_with([-9, -9], *first, failpoint=f"between_steps:count={HALF + 1}")

    def before():
        drop()
        inject({HALF + 2: 100.0})()

    ended_with([0, 0], *first, "--resume", "auto", before=before)
    assert metrics(tmp_path / "run", "verdict") == (["skip"] if drop is nothing else [])
