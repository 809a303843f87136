"""A branch of a run that only decays, from a checkpoint of a phase of constant rate."""

import re

import pytest
from ranks import Job, metrics, saved, toy_run, train_ranks

from fabric_llm.training.schedule import lr_at
from fabric_llm.verify import __main__ as verify


@pytest.fixture(scope="module")
def trunk(toys, tmp_path_factory):
    """A folder with run directories `wsd` and `infinite`, each with checkpoints of steps 4, 8 and
    12."""
    output = tmp_path_factory.mktemp("trunk")
    for schedule, more in (("wsd", ()), ("infinite", ("--cooldown_steps", 2))):
        how = ("--run_name", schedule, "--lr_schedule", schedule, *more)
        train_ranks(1, *flags(toys, output, *how))
    return output


SIZES = (
    "--lr 1e-2 --min_lr 1e-3 --warmup_steps 2 --max_step 12 --save_step_interval 4 --eval_iters 1 "
    "--global_batch_size 4"
)


def flags(toys, output, *more):
    return (*toy_run(toys, output), *SIZES.split(), *more)


def decaying(step):
    """A decay within four steps from `step` on."""
    decay = f"--lr_schedule wsd --decay_steps 4 --max_step {step + 4} --resume true"
    return (*decay.split(), "--resume_override", "lr,lr_schedule,decay_steps,max_step")


def branch(trunk, schedule, step, *more):
    checkpoint = trunk / schedule / f"step-{step:08d}"
    return (*decaying(step), "--checkpoint", checkpoint, "--output_dir", trunk, *more)


@pytest.mark.longer
def test_a_branch_decays_to_min_lr_and_is_stopped_and_resumed_bit_for_bit(trunk):
    whole, stopped = trunk / "whole", trunk / "stopped"
    for run in (whole, stopped):
        more = ("--run_name", run.name, "--save_step_interval", 1)
        train_ranks(1, *branch(trunk, "wsd", 8, *more))
    rates = {"lr": 1e-2, "min_lr": 1e-3, "warmup_steps": 2, "decay_steps": 4}
    rates |= {"max_step": 12, "lr_schedule": "wsd"}
    expected = [lr_at(step, **rates) for step in range(8, 12)]
    assert metrics(whole, "step")[-1] == 12
    assert metrics(whole, "lr")[8:] == pytest.approx(expected)
    of_trunk = metrics(trunk / "wsd", "loss")[:8]
    assert metrics(whole, "loss")[:8] == of_trunk, "it begins with the log of the run"
    # From its own checkpoint it goes on like any run, without a word about the branch.
    go_on = ("--resume", "true", "--checkpoint", stopped / "step-00000010")
    train_ranks(1, "--output_dir", trunk, "--run_name", "stopped", *go_on)
    for key in ("lr", "loss", "eval"):
        assert metrics(stopped, key) == metrics(whole, key), key
    assert verify.main([str(whole)]) == 0


@pytest.mark.longer
def test_a_restart_of_the_same_command_goes_on(trunk):
    more = ("--run_name", "restarted", "--save_step_interval", 2, "--resume", "auto")
    words = branch(trunk, "wsd", 4, *more)
    assert Job(1, *words, failpoint="between_steps:count=3").wait() == [-9]
    # Nor does it matter that the run was resumed by itself meanwhile.
    itself = [*words[: words.index("--checkpoint")], *words[words.index("--output_dir") :]]
    job = Job(1, *itself, "--save_step_interval", 1, failpoint="between_steps:count=2")
    assert job.wait() == [-9] and saved(trunk / "restarted") == [6, 7]
    job = Job(1, *words)
    assert job.wait() == [0] and "before, and goes on from its newest" in job.output[0]
    assert metrics(trunk / "restarted", "step")[-1] == 8
    train_ranks(1, *branch(trunk, "wsd", 4, "--run_name", "undisturbed"))
    assert metrics(trunk / "restarted", "loss") == metrics(trunk / "undisturbed", "loss")


@pytest.mark.longer
def test_a_branch_of_another_run_s_checkpoint_of_the_same_step_is_refused(toys, trunk):
    """Else it would be taken for a restart, and go on with the branch that is there."""
    more = ("--run_name", "of-wsd", "--save_step_interval", 2, "--resume", "auto")
    train_ranks(1, *branch(trunk, "wsd", 8, *more))
    job = Job(1, *branch(trunk, "infinite", 8, *more))
    assert job.wait() == [2], job.output
    assert "would begin a branch in" in job.output[0] and "of-wsd" in job.output[0]
    job = Job(1, *branch(trunk, "wsd", 8, *more))
    assert job.wait() == [0] and "nothing is left to do" in job.output[0]


@pytest.mark.longer
@pytest.mark.parametrize("decays", [True, False])
def test_a_branch_that_is_stopped_before_its_first_step_is_named_as_it_is(toys, tmp_path, decays):
    """Its checkpoint owes an evaluation, in which the branch is asked to stop as well."""
    sizes = "--lr_schedule constant --eval_iters 10 --eval_batch_size 1 --eval_step_interval 4"
    words = flags(toys, tmp_path, *sizes.split())
    job = Job(1, *words, "--run_name", "trunk", failpoint="evaluate:count=12:do=term")
    assert job.wait() == [75]
    words += decaying(4) if decays else ("--resume", "true")
    words += ("--checkpoint", tmp_path / "trunk" / "step-00000004", "--run_name", "branch")
    job, owing = Job(1, *words, failpoint="evaluate:count=2:do=term"), tmp_path / "branch"
    assert job.wait() == [75]
    assert f"Checkpoint: {owing / 'step-00000004'}\n" in job.output[0]
    assert (owing / "step-00000004" / "MANIFEST.json").is_file()
    [following] = re.findall("Next: the same command with (.*)", job.output[0])
    train_ranks(1, *words, *following.split())
    train_ranks(1, *words, "--run_name", "undisturbed")
    for key in ("step", "loss", "eval_loss"):
        assert metrics(owing, key) == metrics(tmp_path / "undisturbed", key)


@pytest.mark.longer
def test_a_branch_of_an_infinite_schedule_decays_from_its_constant_rate(trunk):
    constant = (1e-2 + 1e-3) / 2
    train_ranks(1, *branch(trunk, "infinite", 8, "--run_name", "from-infinite", "--lr", constant))
    rates = metrics(trunk / "from-infinite", "lr")
    assert rates[7] == pytest.approx(constant) and rates[8] == pytest.approx(constant)
    assert rates[11] == pytest.approx(1e-3 + (constant - 1e-3) * (1 - (3 / 4) ** 0.5))
