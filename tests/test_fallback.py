"""A damaged checkpoint is found before it is used: --resume true goes on from the newest whole one,
and says so."""

import errno
import shutil
from pathlib import Path

import pytest
from conftest import flip, step, truncate
from ranks import Job, metrics, toy_run, train_ranks


@pytest.fixture(scope="module")
def finished(toys, tmp_path_factory):
    """(flags, folder) of a run of two FSDP ranks with checkpoints at 2, 4 and 6."""
    output = tmp_path_factory.mktemp("finished")
    sizes = "--run_name run --global_batch_size 4 --save_step_interval 2 --eval_iters 0"
    flags = (*toy_run(toys, output), *sizes.split())
    train_ranks(2, *flags, "--strategy", "fsdp", "--max_step", 6)
    return flags, output / "run"


@pytest.fixture
def run(finished, tmp_path):
    """A copy of it, to damage."""
    flags, folder = finished
    shutil.copytree(folder, tmp_path / "run")
    return (*flags, "--output_dir", tmp_path), tmp_path / "run"


MORE = "--max_step 7 --resume_override max_step --resume true".split()


def ended(*words, ranks=1, before=lambda: None):
    """(exit code of all ranks, what rank 0 said)"""
    job = Job(ranks, *words, before=before)
    [code] = {*job.wait()}
    return code, job.output[0]


@pytest.mark.longer
@pytest.mark.every_eighth(1)
@pytest.mark.parametrize(
    ("damage", "pattern"),
    [
        (flip, "model.safetensors"),
        (flip, "trainer/optimizer/shard-00002*"),
        (flip, "trainer/progress.json"),
        (flip, "config.json"),
        (flip, "MANIFEST.json"),
        (truncate, "trainer/optimizer/shard-00001*"),
        (truncate, "MANIFEST.json"),
        (Path.unlink, "model.safetensors"),
        (Path.unlink, "MANIFEST.json"),
    ],
)
def test_resume_falls_back_to_the_newest_whole_checkpoint(run, damage, pattern):
    flags, folder = run
    [file] = step(folder, 6).glob(pattern)
    damage(file)
    code, said = ended(*flags, *MORE, "--strategy", "fsdp", ranks=2)
    assert code == 0 and "resumed from" in said and "step-00000004" in said
    # there another file's entry may be what has changed, or it is no checkpoint
    if pattern != "MANIFEST.json":
        assert "is damaged" in said and file.name in said
    assert metrics(folder, "step")[-3:] == [5, 6, 7]
    assert step(folder, 7).is_dir()


@pytest.mark.longer
def test_a_named_checkpoint_is_never_replaced_by_another(run):
    flags, folder = run
    flip(step(folder, 6) / "model.safetensors")
    code, said = ended(*flags, *MORE, "--checkpoint", step(folder, 6))
    assert code == 66 and "the content of model.safetensors has changed" in said


@pytest.mark.longer
def test_a_file_that_cannot_be_read_is_damaged(run):
    flags, folder = run
    file = step(folder, 6) / "model.safetensors"

    def bad_sector():
        from fabric_llm.base import files

        sha256 = files.sha256

        def read(path):
            if path == file:
                raise OSError(errno.EIO, "Input/output error")
            return sha256(path)

        files.sha256 = read

    code, said = ended(*flags, *MORE, before=bad_sector)
    assert code == 0 and "model.safetensors can't be read (Input/output error)" in said
    assert f"resumed from {step(folder, 4)}" in said


def test_a_model_card_in_a_checkpoint_is_no_damage_to_a_new_run(run):
    flags, folder = run
    (step(folder, 6) / "README.md").write_text("A card.")
    base = folder.parent / "base"
    base.symlink_to(step(folder, 6))
    code, said = ended(*flags, "--model_name", base, "--run_name", "new", "--max_step", 1)
    assert code == 0 and f"weights of {base}" in said


@pytest.mark.parametrize(
    ("damage", "pattern", "words"),
    [
        (flip, "model.safetensors", "the content of model.safetensors has changed"),
        (Path.unlink, "model.safetensors", "model.safetensors is missing"),
        (Path.unlink, "MANIFEST.json", "it has no MANIFEST.json"),
    ],
)
def test_a_new_run_from_a_damaged_checkpoint_does_not_begin(run, damage, pattern, words):
    """Least of all from random weights, where there are none."""
    flags, folder = run
    damage(step(folder, 6) / pattern)
    base = ("--model_name", step(folder, 6))
    code, said = ended(*flags, *base, "--run_name", "new", "--max_step", 1)
    assert code == 66 and words in said


def test_a_run_goes_on_when_what_it_began_with_is_gone(toys, run, tmp_path):
    flags, folder = run
    shutil.copytree(toys / "llama", tmp_path / "model")
    argv = (*flags, "--model_name", tmp_path / "model", "--run_name", "new", "--max_step")
    train_ranks(1, *argv, 3)
    shutil.rmtree(tmp_path / "model")
    train_ranks(1, *argv, 4, "--resume", "true", "--resume_override", "max_step")
    assert metrics(tmp_path / "new", "step")[-1] == 4


def test_a_resumed_run_says_that_it_does_not_take_another_model(toys, run):
    flags, folder = run
    other = shutil.copytree(toys / "llama", folder.parent / "other")
    code, said = ended(*flags, *MORE, "--model_name", other)
    assert code == 0 and f"The run began with --model_name {toys / 'llama'}" in said


def test_no_whole_checkpoint_at_all(run):
    flags, folder = run
    for number in (2, 4, 6):
        truncate(step(folder, number) / "model.safetensors")
    code, said = ended(*flags, *MORE)
    assert code == 66 and "No checkpoint" in said and "step-00000002" in said


def test_sizes_alone_do_not_see_a_flipped_bit(run):
    """What the cheaper setting gives up."""
    flags, folder = run
    flip(step(folder, 6) / "trainer" / "probe.safetensors")
    code, said = ended(*flags, *MORE, "--verify_checkpoints", "size")
    said = "".join(line for line in said.splitlines() if "is given 2 times" not in line)
    assert code == 0 and "step-00000006" in said and "Warning" not in said
