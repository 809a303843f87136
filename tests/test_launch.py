"""Ranks that others start: SLURM's srun, and a batch script that doesn't use it; how ranks start at once.

torchrun: tests/faults/test_rows.py.
"""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import metrics, refuse_imports, toy_run

from fabric_llm.processes.launch import adopt_slurm

TRAIN = Path(__file__).parent.parent / "train.py"
JOB = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NAME": "train", "SLURM_NTASKS": "2", "SLURM_NODELIST": "localhost"}


# What no run needs, and takes seconds to import: Fabric asks for torchmetrics, and that for matplotlib, where they are there.
NEEDLESS = ("torchmetrics", "matplotlib", "lightning", "pytorch_lightning", "wandb", "tensorboard")


def start(toys, output, *more, **slurm):
    words = [*toy_run(toys, output), "--run_name", "run"]
    words += ["--global_batch_size", 4, "--max_step", 3, "--log_step_interval", 1, "--eval_iters", 0, *more]
    return subprocess.Popen(
        [sys.executable, str(TRAIN), *map(str, words)],
        env={**os.environ, **JOB, "PYTHONPATH": refuse_imports(output, NEEDLESS), "OMP_NUM_THREADS": "1", **slurm},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.parametrize("more", [(), ("--resume", "auto")], ids=["start", "resume auto"])
def test_tasks_of_srun_are_the_ranks(toys, tmp_path, more):
    step = {
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NODEID": "0",
    }
    tasks = [
        start(toys, tmp_path, "--devices", "auto", *more, **step, SLURM_PROCID=str(k), SLURM_LOCALID=str(k))
        for k in range(2)
    ]
    said = [task.communicate(timeout=120)[0] for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0], said
    assert "fsdp on 2 cpu devices" in said[0] and "Loss" not in said[1]
    assert metrics(tmp_path / "run", "step") == [1, 2, 3]


def test_a_batch_script_without_srun_starts_its_own_ranks(toys, tmp_path):
    """The job's variables are there, one of them says that this is task 0 of 2."""
    task = start(toys, tmp_path, "--devices", "2", SLURM_PROCID="0", SLURM_LOCALID="0", SLURM_NODEID="0")
    said = task.communicate(timeout=120)[0]
    assert task.returncode == 0 and "fsdp on 2 cpu devices" in said, said


def test_a_port_that_is_in_use_is_named(toys, tmp_path):
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = str(other.getsockname()[1])
        task = start(toys, tmp_path, "--devices", "2", MASTER_PORT=port, SLURM_PROCID="0")
        said = task.communicate(timeout=120)[0]
    assert task.returncode == 71 and f"port {port}, where the ranks meet, is in use" in said, said
    assert "Traceback" not in said


def test_two_steps_of_a_job_meet_in_two_places(monkeypatch):
    """Side by side on one machine, as a sweep is packed."""
    ports = set()
    for job, step in ((1234, 0), (1234, 1), (1235, 0)):
        given = {
            "SLURM_JOB_ID": str(job),
            "SLURM_STEP_ID": str(step),
            "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_LOCALID": "0",
        }
        monkeypatch.setattr(os, "environ", {**given})
        adopt_slurm()
        ports.add(os.environ["MASTER_PORT"])
    assert len(ports) == 3 and all(15_000 <= int(port) < 25_000 for port in ports)


def test_a_torchrun_that_could_not_start_ranks_again_is_warned_of(toys, tmp_path):
    """These variables are what torchrun tells its ranks, and no warning comes with the other one: tests/test_hosts.py."""
    task = start(toys, tmp_path, "--lr", -1, TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_MAX_RESTARTS="3")
    said = task.communicate(timeout=120)[0]
    warned = "Warning: torchrun can't start lost ranks again reliably: export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
    assert said.count(warned) == 1 and task.returncode == 2, said


def test_the_other_ranks_start_before_torch_is_imported(toys, tmp_path):
    """They import it side by side. By then the run directory is locked."""
    run = start(toys, tmp_path, "--devices", "2", PYTHONPATH=refuse_imports(tmp_path, ("torch",)))
    said = run.communicate(timeout=60)[0]
    assert "AssertionError: rank 0 of 2 imports torch" in said, said
    assert (tmp_path / "run" / ".lock").is_file()
