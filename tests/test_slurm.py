"""configs/slurm on a real SLURM of three hosts: jobs that reach their limit or lose a host go on,
others don't."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import hosts
import pytest
from ranks import metrics, status, toy_run

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
STEPS = 160
SECONDS = 600  # of a busy machine, for what takes a minute on one that isn't
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "scontrol", "scancel", "srun")
CONFIGURATION = """
ClusterName=tests
SlurmctldHost=control
SlurmUser=root
AuthType=auth/none
AuthInfo=cred_expire=5
CredType=cred/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
GresTypes=gpu
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdParameters=config_overrides
SlurmdTimeout=20
ReturnToService=2
SchedulerParameters=bf_interval=5
NodeName=n[1-2] CPUs=64 RealMemory=1000 Gres=gpu:8
PartitionName=tests Nodes=ALL Default=YES MaxTime=INFINITE
"""


class Slurm:
    """A cluster of two nodes, n1 and n2, and a host that controls them."""

    def __init__(self, network, folder):
        self.network, self.folder = network, folder
        (folder / "state").mkdir(parents=True)
        (folder / "slurm.conf").write_text(CONFIGURATION.format(folder=folder))
        for gpu in range(8):
            (folder / f"gpu{gpu}").touch()
        devices = f"AutoDetect=off\nNodeName=n[1-2] Name=gpu File={folder}/gpu[0-7]\n"
        (folder / "gres.conf").write_text(devices)
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("SLURM")},
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin",
            "OMP_NUM_THREADS": "1",
        }
        self.daemons = {}
        self.start("control", "slurmctld", "-D")
        for node in ("n1", "n2"):
            self.start(node, "slurmd", "-D", "-N", node)

    def start(self, host, *words):
        (self.folder / f"spool-{host}").mkdir(exist_ok=True)
        with (self.folder / f"{host}.out").open("a") as log:
            self.daemons[host] = subprocess.Popen(
                [*self.network.on(host), *words], env=self.environment, stdout=log, stderr=log
            )

    def run(self, *words, check=True):
        """What the command says on the control host."""
        words = [*self.network.on("control"), *words]
        out = {"capture_output": True, "text": True, "timeout": 60}
        done = subprocess.run(words, env=self.environment, **out)
        assert done.returncode == 0 or not check, done.stderr
        return done.stdout

    def job(self, number):
        """What SLURM knows of the job: JobState, Restarts, ExitCode, ..."""
        return dict(re.findall(r"(\w+)=(\S*)", self.run("scontrol", "show", "job", number)))

    def wait_until(self, true):
        deadline = time.monotonic() + SECONDS
        while not true():
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.3)

    def wait_for(self, number, *states):
        self.wait_until(lambda: self.job(number)["JobState"] in states)
        return self.job(number)

    def said(self):
        """The end of all logs, for whoever reads why a test failed."""
        said = self.run("scontrol", "show", "job", check=False)
        for path in sorted(self.folder.parent.rglob("*")):
            if path.suffix in (".log", ".out"):
                said += f"\n--- {path.name}\n{path.read_text(errors='replace')[-3000:]}"
        return said


@pytest.fixture
def slurm(tmp_path):
    """A private SLURM, whose hosts end with the test; skipped where its programs aren't
    installed."""
    path = f"{os.environ['PATH']}:/usr/sbin"
    if absent := [program for program in PROGRAMS if shutil.which(program, path=path) is None]:
        pytest.skip(f"SLURM's {', '.join(absent)} not installed (Debian: slurm-wlm)")
    if reason := hosts.missing():
        pytest.skip(reason)
    with hosts.Network("control", "n1", "n2", folder=tmp_path) as network:
        slurm = Slurm(network, tmp_path / "slurm")
        nodes = ("sinfo", "-h", "-o", "%T %D")
        slurm.wait_until(lambda: slurm.run(*nodes, check=False).split() == ["idle", "2"])
        yield slurm
    for daemon in slurm.daemons.values():
        daemon.wait()


def submit(slurm, toys, name, *options, flags=()):
    """`sbatch` configs/slurm/NAME, edited as a user edits it, with two CPUs for the GPUs. Returns
    the job's number."""
    script = (ROOT / "configs" / "slurm" / name).read_text()
    assert "python train.py --devices" in script
    of_the_script = "--config configs/llama3_8b.yaml --train_data_dir data/mine"
    assert of_the_script in script
    model, _, data = toy_run(toys, "")[1:4]
    words = ["--model_name", model, "--train_data_dir", data, "--max_step", STEPS]
    words += "--save_step_interval 20 --eval_iters 0 --log_step_interval 1".split()
    words += "--hang_timeout 60 --precision 32-true --global_batch_size 4".split()
    words += flags
    script = script.replace(of_the_script, " ".join(map(str, words)))
    script = script.replace("train.py --devices 4", "train.py --devices 2")
    file = slurm.network.folder / name
    file.write_text(script.replace("python train.py", f"python {ROOT / 'train.py'}"))
    if name == "several_nodes.sbatch":
        options = ("--ntasks-per-node=1", *options)
    return slurm.run("sbatch", "--parsable", *options, str(file)).strip()


def run_of(slurm):
    return slurm.network.folder / "checkpoints" / "mine"


def wait_until_saved(slurm, step):
    slurm.wait_until((run_of(slurm) / f"step-{step:08d}").is_dir)


def log_of(slurm, number):
    return (slurm.network.folder / f"mine-{number}.log").read_text()


def assert_done(slurm, number, restarts):
    job = slurm.wait_for(number, "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")
    assert (job["JobState"], job["ExitCode"]) == ("COMPLETED", "0:0"), slurm.said()
    assert int(job["Restarts"]) >= restarts, "it went on as the same job"
    assert status(run_of(slurm))["reason"] == "done"
    assert metrics(run_of(slurm), "step") == list(range(1, STEPS + 1)), "each step once"
    said = log_of(slurm, number)  # one of all starts
    assert said.count("resumed from") >= restarts and "2 cpu devices" in said


@pytest.mark.parametrize("name", ["one_node.sbatch", "several_nodes.sbatch"])
def test_a_job_that_is_told_of_its_limit_saves_and_goes_on(slurm, toys, name):
    number = submit(slurm, toys, name)
    wait_until_saved(slurm, 20)
    slurm.run("scancel", "--signal=USR1", "--batch", number)
    slurm.wait_until(lambda: slurm.job(number)["Restarts"] == "1")
    assert "Stopped on request" in log_of(slurm, number)
    assert_done(slurm, number, 1)


def test_a_job_whose_rank_is_killed_goes_on(slurm, toys):
    number = submit(slurm, toys, "one_node.sbatch")
    wait_until_saved(slurm, 20)
    [rank_1] = processes_with("LOCAL_RANK=1", f"SLURM_CONF={slurm.environment['SLURM_CONF']}")
    os.kill(rank_1, signal.SIGKILL)
    slurm.wait_until(lambda: slurm.job(number)["Restarts"] == "1")
    assert "rank 1 was killed by SIGKILL" in log_of(slurm, number)
    assert_done(slurm, number, 1)


def processes_with(*variables):
    """Those whose environment holds all `variables`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if set(variables) <= set(path.read_text(errors="replace").split("\0")):
                found.append(int(path.parent.name))
    return found


def test_a_job_that_loses_a_host_goes_on(slurm, toys):
    number = submit(slurm, toys, "several_nodes.sbatch")
    wait_until_saved(slurm, 20)
    slurm.network.lose("n2", silently=True)
    slurm.daemons["n2"].wait()
    slurm.network.plug_in("n2")
    slurm.start("n2", "slurmd", "-D", "-N", "n2")
    assert_done(slurm, number, 1)


def test_a_job_goes_on_after_its_time_limit_and_ends_when_it_is_cancelled(slurm, toys):
    """SLURM looks at limits twice a minute, so this takes three."""
    options = ("--time=3", "--signal=B:USR1@60")
    endless = ("--max_step", 1_000_000, "--keep_last", 2)
    number = submit(slurm, toys, "several_nodes.sbatch", *options, flags=endless)
    slurm.wait_until(lambda: slurm.job(number)["Restarts"] == "1")
    assert log_of(slurm, number).count("Stopped on request") == 1
    slurm.wait_until(lambda: re.search(r"resumed from(.*\n)*step \d", log_of(slurm, number)))
    slurm.run("scancel", number)
    slurm.wait_for(number, "CANCELLED")
    slurm.wait_until(lambda: status(run_of(slurm))["code"] == 75)
    slurm.wait_until(lambda: "idle 2" in slurm.run("sinfo", "-h", "-o", "%T %D"))
    time.sleep(10)  # longer than SLURM waits before it starts a job again, see cred_expire
    job = slurm.job(number)
    assert (job["JobState"], job["Restarts"]) == ("CANCELLED", "1"), slurm.said()
    assert log_of(slurm, number).count("Stopped on request") == 2, "the save is waited for"


def assert_failed(slurm, number, code):
    job = slurm.wait_for(number, "COMPLETED", "FAILED")
    assert (job["JobState"], job["ExitCode"], job["Restarts"]) == ("FAILED", code, "0")


@pytest.mark.parametrize("name", ["one_node.sbatch", "several_nodes.sbatch"])
def test_what_would_end_in_the_same_way_is_not_started_again(slurm, toys, name):
    number = submit(slurm, toys, name)
    wait_until_saved(slurm, 20)
    (run_of(slurm) / "stop").touch()
    assert_failed(slurm, number, "75:0")  # somebody wants it stopped
    number = submit(slurm, toys, name, flags=("--lr", -1))
    assert_failed(slurm, number, "2:0")
    number = submit(slurm, toys, name)
    assert_done(slurm, number, 0)
