"""1 -> 2 -> 4 -> 2 -> 1 ranks: the state is equal bit for bit after each load, and each step sees
the same sequences."""

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import ROWS
from ranks import Job, assert_same_tensors, toy_run
from safetensors.torch import load_file
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)

from fabric_llm.checkpoint import keep, reading, state_dicts
from fabric_llm.model.tensor_files import Tensors

pytestmark = pytest.mark.faults

WORLDS = (1, 2, 4, 2, 1)
EPOCHS, GLOBAL_BATCH = 3, 4
STEPS_EACH = 7  # a stop in the middle of epochs: 44 sequences, 11 steps


def flags(toys, output, kind, strategy, *more):
    return (
        *toy_run(toys, output, model="gpt2"),
        *"--lr 1e-2 --precision bf16-true --run_name run --micro_batch_size 1".split(),
        *("--strategy", strategy, "--state_dict_type", kind, "--eval_iters", 0, "--resume", "auto"),
        *("--global_batch_size", GLOBAL_BATCH, "--number_epochs", EPOCHS, *more),
    )


def watch(folder):
    """Writes the rows that each step sees, and the whole state right after it was loaded, as a
    checkpoint's tensors."""

    def install():
        import fabric_llm.data.batches
        import fabric_llm.training.step

        micro_batch, load = fabric_llm.data.batches.Batches._micro_batch, reading.load_optimizer

        def logged(self, positions, rows):
            if self.picked is None:  # an evaluation picks its rows
                with (folder / f"rows-{self.rank}").open("a") as file:
                    for position, row in zip(positions.flatten().tolist(), rows.flatten().tolist()):
                        if self.end is None or position < self.end:
                            file.write(f"{position} {row}\n")
            return micro_batch(self, positions, rows)

        def loaded(path, model, optimizer, *more):
            load(path, model, optimizer, *more)
            weights = get_model_state_dict(model)
            weights.pop(state_dicts.PREFIX + "lm_head.weight")  # the embedding again
            options = StateDictOptions(flatten_optimizer_state_dict=True)
            # by torch alone
            state = get_optimizer_state_dict(model, optimizer.optimizer, options=options)
            state = {key: value for key, value in state.items() if key.startswith("state.")}
            for name, tensors in (("optimizer", state), ("weights", weights)):
                target = folder / f"loaded-{path.name}" / name
                target.mkdir(parents=True, exist_ok=True)
                writer = HuggingFaceStorageWriter(path=str(target), save_distributed=True)
                dcp.save(tensors, storage_writer=writer)

        fabric_llm.data.batches.Batches._micro_batch, reading.load_optimizer = logged, loaded

    return install


def whole_state(path):
    """Every tensor of a checkpoint, put together from its parts."""
    optimizer = dict(reading.optimizer_state(path))
    if (path / "weights").is_dir():
        return optimizer, dict(Tensors((path / "weights").glob("*.safetensors")))
    whole = load_file(path / "model.safetensors")
    return optimizer, {state_dicts.PREFIX + name: tensor for name, tensor in whole.items()}


@pytest.mark.parametrize(("kind", "strategy"), [("sharded", "fsdp"), ("full", "fsdp2")])
def test_the_state_survives_every_number_of_ranks(toys, tmp_path, kind, strategy):
    steps = EPOCHS * ROWS // GLOBAL_BATCH
    assert steps == 33
    for index, world in enumerate(WORLDS):
        last = index == len(WORLDS) - 1
        before_last = STEPS_EACH - 1  # after it: heard of in the next step
        stop = "" if last else f"between_steps:rank={world - 1}:count={before_last}:do=term"
        of_world = strategy if world > 1 else "auto"
        words = flags(toys, tmp_path, kind, of_world, "--num_workers", 0)
        job = Job(world, *words, failpoint=stop, before=watch(tmp_path))
        assert job.wait(120) == [0 if last else 75] * world, job.output
        if index:
            before = tmp_path / "run" / f"step-{index * STEPS_EACH:08d}"
            saved_optimizer, saved_weights = whole_state(before)
            loaded = tmp_path / f"loaded-{before.name}"
            optimizer, weights = (
                dict(Tensors((loaded / name).glob("*.safetensors")))
                for name in ("optimizer", "weights")
            )
            assert_same_tensors(saved_optimizer, optimizer)
            assert len(weights) > 20
            assert all(torch.equal(saved_weights[name], weights[name]) for name in weights)
    progress = keep.read_progress(tmp_path / "run" / f"step-{steps:08d}")
    assert progress["progress"]["position"] == EPOCHS * ROWS
    seen = [line for path in tmp_path.glob("rows-*") for line in path.read_text().splitlines()]
    seen = sorted(tuple(map(int, line.split())) for line in seen)
    # Every position once, over all ranks and runs.
    assert [position for position, _ in seen] == list(range(EPOCHS * ROWS))
    rows = [row for _, row in seen]
    for epoch in range(EPOCHS):
        assert sorted(rows[epoch * ROWS : (epoch + 1) * ROWS]) == list(range(ROWS)), epoch
    assert rows == expected_rows(toys)


def expected_rows(toys):
    """What an undisturbed run on one rank sees."""
    from fabric_llm.data.batches import Batches
    from fabric_llm.data.dataset import open_dataset

    batches = Batches(open_dataset(toys / "data").train, 1234, 1, GLOBAL_BATCH)
    return batches.indices(np.arange(EPOCHS * ROWS)).tolist()
