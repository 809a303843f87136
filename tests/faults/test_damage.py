"""A checkpoint that isn't what was written is found before it is used, and the file is named."""

import random
import shutil

import pytest
from conftest import prepare
from ranks import toy_run, train_ranks

from fabric_llm.base.faults import NO_CHECKPOINT, Fault
from fabric_llm.base.files import files_in
from fabric_llm.checkpoint import keep
from fabric_llm.data.dataset import open_dataset

pytestmark = pytest.mark.faults

FLIPS, TRUNCATIONS, DELETIONS = 500, 100, 25  # for each kind of checkpoint


@pytest.fixture(scope="module", params=["full", "sharded"])
def whole(request, toys, tmp_path_factory):
    folder = tmp_path_factory.mktemp("damage")
    flags = "--max_step 1 --strategy fsdp --eval_iters 0 --run_name run".split()
    train_ranks(2, *toy_run(toys, folder), *flags, "--state_dict_type", request.param)
    return folder / "run" / "step-00000001"


@pytest.fixture
def damaged(whole, tmp_path):
    shutil.copytree(whole, tmp_path / whole.name)
    return tmp_path / whole.name


def assert_named(path, name, hashes=True):
    with pytest.raises(Fault) as caught:
        keep.verified(path, hashes)
    assert caught.value.code == NO_CHECKPOINT and name in str(caught.value), str(caught.value)


def test_every_flipped_bit_is_found(damaged):
    generator, names = random.Random(1), sorted(files_in(damaged))
    for index in range(FLIPS):
        name = names[index % len(names)]
        with (damaged / name).open("r+b") as file:
            size = file.seek(0, 2)
            at, bit = generator.randrange(size), 1 << generator.randrange(8)
            file.seek(at)
            [byte] = file.read(1)
            for value in (byte ^ bit, byte):
                file.seek(at)
                file.write(bytes([value]))
                file.flush()
                if value != byte:
                    assert_named(damaged, name)
    keep.verified(damaged, hashes=True)


def test_every_truncated_file_is_found(damaged):
    generator, names = random.Random(2), sorted(files_in(damaged))
    for index in range(TRUNCATIONS):
        file = damaged / names[index % len(names)]
        content = file.read_bytes()
        file.write_bytes(content[: generator.randrange(len(content))])
        for hashes in (True, False):
            assert_named(damaged, names[index % len(names)], hashes)
        file.write_bytes(content)
    keep.verified(damaged, hashes=True)


def test_every_missing_file_is_found(damaged):
    names = sorted(files_in(damaged))
    for index in range(DELETIONS):
        file = damaged / names[index % len(names)]
        content = file.read_bytes()
        file.unlink()
        assert_named(damaged, names[index % len(names)])
        file.write_bytes(content)
    keep.verified(damaged, hashes=True)


def test_a_file_that_nobody_wrote_is_found(damaged):
    name = "shard-00009-model-00001-of-00001.safetensors"
    (damaged / "trainer" / "optimizer" / name).write_bytes(b"more")
    assert_named(damaged, name)


# ------------------------------------------------------------------------------- datasets


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prepared")
    text = "".join(f"{index} is a number and so is {index * index}\n" for index in range(3000))
    for name in ("a.txt", "b.txt", "c.txt", "d.txt"):
        (folder / name).write_text(name + text)
    words = {"train_tokenizer": 300, "context_length": 32, "validation_fraction": 0.3}
    prepare(input=[folder], output=folder / "data", **words)
    return folder / "data"


@pytest.mark.parametrize("how", ["flip", "truncate", "delete"])
def test_a_damaged_dataset_file_is_named(prepared, tmp_path, how):
    generator = random.Random(how)
    folder = tmp_path / "data"
    shutil.copytree(prepared, folder)
    names = sorted(files_in(folder))
    assert any(name.endswith(".arrow") for name in names) and "tokenizer/tokenizer.json" in names
    for name in names * 3:
        content = (folder / name).read_bytes()
        changed = bytearray(content)
        changed[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
        if how == "truncate":
            changed = content[: generator.randrange(len(content))]
        (folder / name).write_bytes(changed)
        # without it, it is a dataset made elsewhere
        if how == "delete" and name != "manifest.json":
            (folder / name).unlink()
        with pytest.raises(ValueError) as caught:
            open_dataset(folder)
        assert name.split("/")[-1] in str(caught.value), (name, str(caught.value))
        if how == "truncate" and name != "manifest.json":
            with pytest.raises(ValueError, match=name.split("/")[-1]):
                open_dataset(folder, verify="size")
        (folder / name).write_bytes(content)
    open_dataset(folder, verify="full")
