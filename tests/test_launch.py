"""Ranks that others start: SLURM's srun, and a batch script that doesn't use it; how ranks start at
once.

torchrun: tests/faults/test_rows.py.
"""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import metrics, refuse_imports, toy_run

from fabric_llm.base import machine
from fabric_llm.processes import launch

TRAIN = Path(__file__).parent.parent / "train.py"
JOB = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_JOB_NAME": "train", "SLURM_NTASKS": "2"}
JOB |= {"SLURM_NODELIST": "localhost", "OMP_NUM_THREADS": "1"}
STEP = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1", "SLURM_NODEID": "0"}
# What no run needs, and takes seconds to import: Fabric asks for torchmetrics, and that for
# matplotlib, where they are there.
NEEDLESS = ("torchmetrics", "matplotlib", "lightning", "pytorch_lightning", "wandb", "tensorboard")


def start(toys, output, *more, **slurm):
    words = [sys.executable, TRAIN, *toy_run(toys, output), "--run_name", "run"]
    words += "--global_batch_size 4 --max_step 3 --log_step_interval 1 --eval_iters 0".split()
    given = {**os.environ, **JOB, "PYTHONPATH": refuse_imports(output, NEEDLESS), **slurm}
    out = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([str(word) for word in [*words, *more]], env=given, **out)


@pytest.mark.longer
@pytest.mark.parametrize("more", [(), ("--resume", "auto")], ids=["start", "resume auto"])
def test_tasks_of_srun_are_the_ranks(toys, tmp_path, more):
    step, tasks = {**STEP, "SLURM_STEP_NODELIST": "localhost"}, []
    for k in "01":
        own = {**step, "SLURM_PROCID": k, "SLURM_LOCALID": k}
        tasks.append(start(toys, tmp_path, "--devices", "auto", *more, **own))
    said = [task.communicate(timeout=120)[0] for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0], said
    assert "fsdp on 2 cpu devices" in said[0] and "Loss" not in said[1]
    assert metrics(tmp_path / "run", "step") == [1, 2, 3]


@pytest.mark.quick_cases(r"hand")
@pytest.mark.parametrize("by", ["hand", "srun"])
def test_a_port_that_is_in_use_is_named_and_no_lost_peer(toys, tmp_path, by):
    """Which a loop would start again for ever. By hand it is told before a rank is started."""
    given = {"MASTER_ADDR": "127.0.0.1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    if by == "srun":
        given, words = {**given, **STEP}, ("--devices", "auto")
    else:
        given |= {"NODE_RANK": "0", "PYTHONPATH": refuse_imports(tmp_path, ("torch",))}
        words = ("--num_nodes", "2")
    with socket.create_server(("", 0)) as other:
        port = str(other.getsockname()[1])
        task = start(toys, tmp_path, *words, **given, MASTER_PORT=port)
        said = task.communicate(timeout=120)[0]
    assert task.returncode == 2 and "Traceback" not in said, said
    sentence = f"train.py: error: port {port}, where the ranks meet, is in use, or not allowed, on "
    assert f"{sentence}rank 0's machine: start all" in said, said


@pytest.mark.longer
def test_a_batch_script_without_srun_starts_its_own_ranks_that_meet_at_a_port_of_their_own(
    toys, tmp_path
):
    """The job's variables are there, one of them says that this is task 0 of 2. Whatever others say
    of a port, nobody takes it from them while they import torch."""
    with socket.create_server(("", 0)) as other:
        given = {"MASTER_ADDR": "192.0.2.1", "MASTER_PORT": str(other.getsockname()[1])}
        given |= {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
        task = start(toys, tmp_path, "--devices", "2", **given)
        said = task.communicate(timeout=120)[0]
    assert task.returncode == 0 and "fsdp on 2 cpu devices" in said, said
    assert metrics(tmp_path / "run", "step") == [1, 2, 3], said
    # A machine says once that it waits for the others, without Lightning's banner.
    assert said.count("Initializing distributed") == 1 and "distributed_backend" not in said


def test_nobody_takes_the_port_while_the_ranks_start(monkeypatch):
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(subprocess, "Popen", lambda *command, **options: None)
    children = launch.start_ranks(2, 1)
    with pytest.raises(OSError, match="in use"):
        socket.create_server(("127.0.0.1", int(os.environ["MASTER_PORT"])))
    children.door.close()


def test_two_steps_of_a_job_meet_in_two_places(monkeypatch):
    """Side by side on one machine, as a sweep is packed."""
    ports = set()
    for job, step in ((1234, 0), (1234, 1), (1235, 0)):
        given = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0"}
        given |= {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}
        monkeypatch.setattr(os, "environ", given)
        launch.adopt_launcher()
        ports.add(os.environ["MASTER_PORT"])
    assert len(ports) == 3 and all(15_000 <= int(port) < 25_000 for port in ports)


def test_a_torchrun_that_could_not_start_ranks_again_is_warned_of(toys, tmp_path):
    """These variables are what torchrun tells its ranks, and no warning comes with the other one:
    tests/test_hosts.py."""
    told = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_MAX_RESTARTS": "3"}
    task = start(toys, tmp_path, "--lr", -1, **told)
    said = task.communicate(timeout=120)[0]
    warned = "Warning: torchrun can't start lost ranks again reliably: export "
    warned += "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
    assert said.count(warned) == 1 and task.returncode == 2, said


def test_the_other_ranks_start_before_torch_is_imported(toys, tmp_path):
    """They import it side by side. By then the run directory is locked."""
    run = start(toys, tmp_path, "--devices", "2", PYTHONPATH=refuse_imports(tmp_path, ("torch",)))
    said = run.communicate(timeout=60)[0]
    assert "AssertionError: rank 0 of 2 imports torch" in said, said
    assert (tmp_path / "run" / ".lock").is_file()


# ----------------------------------------------------------------------------- what the machine has


MACHINE = {"proc/meminfo": "MemTotal: 9 kB\nMemAvailable:    8388608 kB\n"}
VERSION_2 = {  # of control groups
    "proc/self/cgroup": "0::/pod/me\n",
    "sys/fs/cgroup/cpu.max": "max 100000\n",
    "sys/fs/cgroup/pod/cpu.max": "50000 100000\n",
    "sys/fs/cgroup/pod/me/memory.max": "max\n",
    "sys/fs/cgroup/pod/me/memory.current": "400\n",
    "sys/fs/cgroup/pod/memory.max": "1000\n",
    "sys/fs/cgroup/pod/memory.current": "600\n",
    "sys/fs/cgroup/pod/memory.stat": "anon 300\nfile 300\ninactive_file 100\nactive_file 150\n",
}


def test_control_groups_limit_cores_and_memory(tmp_path):
    all_cores, limits = len(os.sched_getaffinity(0)), {**MACHINE, **VERSION_2}
    for root, files, cores, free in (("a", MACHINE, all_cores, 2**33), ("b", limits, 1, 650)):
        for name, text in files.items():
            (tmp_path / root / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / root / name).write_text(text)
        assert machine.cores(tmp_path / root) == cores
        assert machine.free_memory_bytes(tmp_path / root) == free
    assert machine.free_memory_bytes(tmp_path / "elsewhere") is None


@pytest.mark.parametrize(
    ("words", "name", "value", "sentence"),
    [
        ("", "MASTER_PORT", "", "a number from 0 to 65535, not '': start"),
        ("", "LOCAL_RANK", "2", "a number from 0 to 1, not '2': start"),
        ("--num_nodes 2", "NODE_RANK", "2", "a number from 0 to 1, not '2'."),
        ("--num_nodes 2", "MASTER_PORT", "x", "a number from 1 to 65535"),
        ("--devices 1", "SLURM_STEP_NUM_TASKS", "abc", "a number"),
        ("--devices 1", "TORCHELASTIC_RESTART_COUNT", "x", ""),
    ],
)
def test_numbers_of_ranks_in_the_environment_are_checked_before_torch_is_imported(
    toys, tmp_path, words, name, value, sentence
):
    there = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "NODE_RANK": "0"}
    if not words:  # by hand
        there |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    there |= {name: value, "PYTHONPATH": refuse_imports(tmp_path, ("torch",))}
    task = start(toys, tmp_path, *words.split(), **there)
    said = task.communicate(timeout=60)[0]
    assert task.returncode == 2, said
    begins = f"train.py: error: {name} in the environment must be {sentence}"
    assert said.startswith(begins), said
    assert said.count("\n") == 1, said
