"""Who started the ranks says how many there are; what a run claims to have read is what its ranks
have read."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import test_verify
from conftest import ROWS
from ranks import Job, ended_with, metrics, toy_run, train_ranks
from servers import free_port
from test_order import claimed_rows

from fabric_llm.data import dataset
from fabric_llm.data.batches import Batches, Prefetch
from fabric_llm.data.order import RowsRead
from fabric_llm.processes.launch import launched_world

TRAIN = Path(__file__).parent.parent / "train.py"
TORCHRUN = Path(sys.executable).parent / "torchrun"


def flags(toys, output, *more):
    words = [*toy_run(toys, output), *"--run_name run --global_batch_size 4 --lr 1e-2".split()]
    words += "--number_epochs 1 --eval_iters 0 --log_step_interval 1".split()
    return [str(word) for word in [*words, *more]]


def started(program, words, tmp_path, **variables):
    """train.py, which has ended."""
    words = [str(word) for word in [*program, TRAIN, *words]]
    given = {"env": {**os.environ, "OMP_NUM_THREADS": "1", **variables}, "cwd": tmp_path}
    return subprocess.run(words, capture_output=True, text=True, timeout=240, **given)


def torchrun(ranks, words, tmp_path, **variables):
    program = [TORCHRUN, "--standalone", "--nproc_per_node", ranks]
    return started(program, words, tmp_path, **variables)


def verified(run, capsys):
    """(exit code, what was said) of `python -m fabric_llm.verify RUN`."""
    code, *said = test_verify.verified(capsys, run, "--no_export")
    return code, "".join(said)


@pytest.mark.faults
def test_torchrun_and_a_devices_flag_that_disagree(toys, tmp_path):
    """2 ranks with `--devices 4` trained on half of the rows, and with 1 they were two runs in one
    directory. torchrun ends all ranks as soon as one has left: rank 0, which says it, is late."""
    late = "import os, time\nif os.environ.get('LOCAL_RANK') == '0':\n    time.sleep(3)\n"
    (tmp_path / "sitecustomize.py").write_text(late)
    words = flags(toys, tmp_path, "--devices", 1)
    done = torchrun(2, words, tmp_path, PYTHONPATH=str(tmp_path))
    said = "--devices 1, but the launcher has started 2 processes, 2 of them on this machine: "
    assert done.returncode == 1, done.stderr
    assert done.stderr.count(f"train.py: error: {said}") == 1, done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.faults
def test_two_agents_of_torchrun_without_num_nodes(toys, tmp_path, capsys):
    """757 of 772 rows were read twice."""
    program = [TORCHRUN, *"--nnodes 2 --nproc_per_node 2 --rdzv_backend c10d".split()]
    program += ["--rdzv_endpoint", f"localhost:{free_port()}"]
    words = flags(toys, tmp_path, "--devices", 2)
    with ThreadPoolExecutor(2) as pool:
        agents = [pool.submit(started, program, words, tmp_path) for _ in range(2)]
    ended = [agent.result() for agent in agents]
    assert [agent.returncode for agent in ended] == [0, 0], ended
    assert any("fsdp on 4 cpu devices" in agent.stdout for agent in ended), ended
    assert verified(tmp_path / "run", capsys)[0] == 0


@pytest.mark.faults
def test_arguments_yaml_yields_to_torchrun(toys, tmp_path, capsys):
    """Begun with `--devices 4`, gone on with as `torchrun --nproc_per_node 2`: half of the rows
    weren't read."""
    train_ranks(4, *flags(toys, tmp_path, "--max_step", 4))
    again = "--resume true --run_name run --max_step 9 --resume_override max_step".split()
    done = torchrun(2, [*again, "--output_dir", tmp_path], tmp_path)
    assert done.returncode == 0 and "fsdp on 2 cpu devices" in done.stdout, done.stderr
    assert metrics(tmp_path / "run", "step") == list(range(1, 10))
    assert verified(tmp_path / "run", capsys)[0] == 0


@pytest.fixture
def launched(monkeypatch):
    """`launch.launched_world` among other environment variables than our own."""

    def call(asked, **variables):
        monkeypatch.setattr(os, "environ", {key: str(value) for key, value in variables.items()})
        return launched_world(asked)

    return call


def test_the_world_is_the_launchers(launched):
    two_by_two = {"LOCAL_RANK": 1, "RANK": 3, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 2}
    assert launched({}) is None
    for asked in ({}, {"devices": 2, "num_nodes": 2}, {"devices": "auto"}):
        assert launched(asked, **two_by_two) == (2, 2)
    # By which Fabric numbers ranks that torchrun hasn't started.
    assert os.environ["NODE_RANK"] == "1"
    one, number = {"LOCAL_RANK": 0, "WORLD_SIZE": 1}, "in the environment must be a number from"
    mpirun = {"OMPI_COMM_WORLD_SIZE": 2, "OMPI_COMM_WORLD_RANK": 1}
    for asked, variables, words in (
        ({"devices": 4}, two_by_two, ["--devices 4", "4 processes, 2 of them on this machine"]),
        ({}, {**two_by_two, "LOCAL_RANK": 0}, ["RANK 3 is process 1 of its machine, not 0"]),
        ({"num_nodes": 1}, two_by_two, ["--num_nodes 1", "4 processes, 2 of them on this machine"]),
        ({}, {**two_by_two, "WORLD_SIZE": 3}, ["3 processes, 2 of them on this machine"]),
        ({}, {**one, "RANK": 0}, [f"LOCAL_WORLD_SIZE {number} 1", "not ''", "torchrun"]),
        ({}, {**two_by_two, "WORLD_SIZE": "four"}, [f"WORLD_SIZE {number} 1", "'four'"]),
        ({}, {**two_by_two, "LOCAL_WORLD_SIZE": 0}, [f"LOCAL_WORLD_SIZE {number} 1"]),
        ({}, {**two_by_two, "RANK": 4}, [f"RANK {number} 0 to 3, not '4'"]),
        ({}, {**two_by_two, "LOCAL_RANK": "x"}, [f"LOCAL_RANK {number} 0 to 1, not 'x'"]),
        ({}, mpirun, ["mpirun has started 2", "torchrun or srun"]),
    ):
        with pytest.raises(ValueError) as refused:
            launched(asked, **variables)
        assert all(word in str(refused.value) for word in words), refused.value


@pytest.mark.faults
def test_another_ranks_variables_keep_nobody_out_of_the_lock(toys, tmp_path):
    """RANK=1 in the environment, as in a pod: this process isn't rank 1 of anything, and takes the
    lock."""
    words = flags(toys, tmp_path, "--devices", 1)
    given = {**os.environ, "OMP_NUM_THREADS": "1", "FABRIC_LLM_FAILPOINT": "set_up:do=hang"}
    out = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    holds = subprocess.Popen([sys.executable, str(TRAIN), *words], env=given, **out)
    try:
        while not (tmp_path / "run" / "STATUS.json").exists():
            assert holds.poll() is None
        pod = {"RANK": "1", "WORLD_SIZE": "2", "NODE_RANK": "1"}
        done = started([sys.executable], words, tmp_path, **pod)
    finally:
        holds.kill()
        holds.wait()
    assert done.returncode == 73 and "Another run" in done.stderr, done.stderr


# ------------------------------------------------------------------------------- what was read


def wrong_reader(how):
    def change():
        if how == "half of the ranks":  # as if there were twice as many
            read = Batches.read
            Batches.read = lambda self, position: read(replace(self, world_size=4), position)
        elif os.environ["RANK"] == "1":  # as if it were rank 0
            read = Batches.read
            Batches.read = lambda self, position: read(replace(self, rank=0), position)

    return change


@pytest.mark.longer
@pytest.mark.parametrize("how", ["half of the ranks", "twice the same"])
def test_verify_finds_a_run_whose_rows_were_not_read_as_claimed(toys, tmp_path, capsys, how):
    ended_with([0, 0], *flags(toys, tmp_path, "--save_step_interval", 6), before=wrong_reader(how))
    code, said = verified(tmp_path / "run", capsys)
    assert code == 66, said
    assert "claims 24 sequences at positions 0 to 23, but other rows were read" in said, said


@pytest.mark.longer
def test_rows_of_a_run_that_was_killed_resumed_branched_and_stopped_are_as_claimed(
    toys, tmp_path, capsys
):
    words = flags(toys, tmp_path, "--number_epochs", 2, "--save_step_interval", 3)
    Job(2, *words, failpoint="between_steps:count=8").wait()
    ended_with([0], *words, "--resume", "auto", "--micro_batch_size", 4, "--num_workers", 0)
    branch = [*words, "--resume", "true", "--checkpoint", str(tmp_path / "run" / "step-00000012")]
    branch[branch.index("--run_name") + 1] = "branch"
    assert Job(1, *branch).wait() == [0]
    for name in ("run", "branch"):
        code, said = verified(tmp_path / name, capsys)
        assert code == 0, said
        assert f"{2 * ROWS} sequences at positions 0 to {2 * ROWS - 1} were each read" in said, said


def test_the_record_knows_no_order_and_counts_only_what_was_handed_out(toys):
    rows = dataset.open_dataset(toys / "data").train
    read = RowsRead()
    for rank, ahead in ((0, 3), (1, 0)):
        reader = Prefetch(Batches(rows, 1, 3, 2, rank, 2, end=40), ahead)
        for position in (0, 12, 24, 36):  # the last one holds 4 sequences
            reader.at(position)
        reader.close()
        read += reader.rows_read
    assert read == claimed_rows(ROWS, 1, 0, 40) != claimed_rows(ROWS, 2, 0, 40)
