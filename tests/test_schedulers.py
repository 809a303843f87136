"""configs/kubernetes and configs/skypilot: what their schedulers would read, and what becomes of a
run's exit code there."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from copy import deepcopy
from pathlib import Path

import pytest
import yaml
from ranks import metrics, toy_run

from fabric_llm.base.faults import BAD_INPUT, CODES, RETRYABLE, STOPPED

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "configs" / "torchrun_code.sh"
JOBSET = yaml.safe_load((ROOT / "configs" / "kubernetes" / "jobset.yaml").read_text())
JOB = JOBSET["spec"]["replicatedJobs"][0]["template"]["spec"]
[CONTAINER] = JOB["template"]["spec"]["containers"]
TASK = yaml.safe_load((ROOT / "configs" / "skypilot" / "managed_job.yaml").read_text())


def mistakes(document, schema):
    jsonschema = pytest.importorskip("jsonschema")
    read = json.loads((ROOT / "tests" / "schemas" / schema).read_text())
    return [error.message for error in jsonschema.Draft202012Validator(read).iter_errors(document)]


def test_the_manifest_is_a_jobset():
    assert mistakes(JOBSET, "jobset.json") == []
    wrong = deepcopy(JOBSET)
    job = wrong["spec"]["replicatedJobs"][0]["template"]["spec"]
    job["podFailurePolicy"]["rules"][0]["onExitCodes"]["value"] = [1]
    job["template"]["spec"]["terminationGracePeriodSeconds"] = "5 minutes"
    wrong["spec"]["failurePolicy"]["rules"][0]["action"] = "Fail"
    assert len(mistakes(wrong, "jobset.json")) == 3


def test_the_task_is_one_of_skypilot():
    assert mistakes(TASK, "skypilot_task.json") == []
    assert mistakes(TASK["resources"], "skypilot_resources.json") == []
    assert mistakes({**TASK, "num_node": 2}, "skypilot_task.json") != []
    wrong = {**TASK["resources"], "job_recovery": {"recover_on_exit_codes": [71, 300]}}
    assert mistakes(wrong, "skypilot_resources.json") != []


def test_each_exit_code_is_restarted_or_not_in_both():
    """As a new start may mend it, or not: docs/faults.md."""
    [rule] = JOB["podFailurePolicy"]["rules"]
    assert (rule["action"], rule["onExitCodes"]["operator"]) == ("FailJob", "In")
    assert rule["onExitCodes"]["values"] == sorted(CODES - set(RETRYABLE))
    assert rule["onExitCodes"]["containerName"] == CONTAINER["name"]
    assert TASK["resources"]["job_recovery"] == {"recover_on_exit_codes": list(RETRYABLE)}
    # Any other end of a pod, also that of its machine, ends the job for its back-off, on which
    # JobSet starts all pods anew.
    assert JOB["backoffLimit"] == 0 and JOBSET["spec"]["failurePolicy"]["maxRestarts"] == 100
    [end] = JOBSET["spec"]["failurePolicy"]["rules"]
    assert (end["action"], end["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])


def test_the_pods_find_each_other_and_are_as_many_as_torchrun_waits_for():
    words = dict(word.removeprefix("--").split("=", 1) for word in CONTAINER["args"] if "=" in word)
    assert JOB["parallelism"] == JOB["completions"] == int(words["nnodes"])
    name, job = JOBSET["metadata"]["name"], JOBSET["spec"]["replicatedJobs"][0]["name"]
    # <jobset>-<job>-<job index>-<pod index>.<subdomain>
    assert words["rdzv_endpoint"] == f"{name}-{job}-0-0.{name}:29400"
    assert int(words["nproc_per_node"]) == CONTAINER["resources"]["limits"]["nvidia.com/gpu"]
    assert CONTAINER["args"][2] == f"checkpoints/{words['run_name']}" and words["resume"] == "auto"
    kept = int(re.search(r"SHUTDOWN_TIMEOUT:-(\d+)", SCRIPT.read_text())[1])
    assert kept < JOB["template"]["spec"]["terminationGracePeriodSeconds"]


def status(code, retryable="true"):
    return f'{{"code": {code}, "retryable": {retryable}}}'


@pytest.mark.parametrize(
    ("before", "after", "torchrun", "code"),
    [
        (None, status(75), 1, 75),
        (None, status(76, "false"), 1, 76),
        (status(75), status(71), 1, 71),
        (None, status("null"), 1, 71),
        (None, status(74), 1, 74),
        (None, status(74, "false"), 1, 73),
        (status(75), status(75), 1, 1),
        (None, None, 1, 1),
        (None, status(0, "false"), 0, 0),
    ],
    ids="stopped diverged lost killed save_failed disk_full before_the_run no_run done".split(),
)
def test_the_code_is_that_of_the_run(tmp_path, before, after, torchrun, code):
    """With a torchrun that ends at once; `sleep` doesn't wait."""
    programs, run = tmp_path / "programs", tmp_path / "run"
    for folder in (programs, run):
        folder.mkdir()
    if before:
        (run / "STATUS.json").write_text(before.replace(", ", ",\n"))
    write = f"echo '{after}' > {run}/STATUS.json" if after and after != before else ":"
    for name, text in {"torchrun": f"{write}\nexit {torchrun}", "sleep": "exit 0"}.items():
        (programs / name).write_text(f"#!/bin/bash\n{text}\n")
        (programs / name).chmod(0o755)
    if before == after and before:
        (run / "STATUS.json").write_text(after)
    path = {"PATH": f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}"}
    own, words = {**os.environ, **path}, ["bash", SCRIPT, run]
    done = subprocess.run(words, env=own, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (code, "")


def test_a_stop_before_the_run_is_none_that_ends_a_job(tmp_path):
    """A torchrun that is told to end while it waits for other machines."""
    program = tmp_path / "torchrun"
    words = "import os, time; os.kill(os.getppid(), 15); time.sleep(60)"
    program.write_text(f"#!/bin/sh\nexec {sys.executable} -c '{words}'\n")
    program.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run(["bash", SCRIPT, tmp_path / "run"], env={**os.environ, "PATH": path})
    assert done.returncode == STOPPED and STOPPED in RETRYABLE


def start(toys, folder, *more):
    """The container's command on a machine of two CPUs."""
    changed = {"--nnodes=2": "--nnodes=1", "--nproc_per_node=8": "--nproc_per_node=2"}
    changed |= {CONTAINER["args"][1]: str(SCRIPT), "train.py": str(ROOT / "train.py")}
    left_out = ("--config", "--train_data_dir", "--rdzv")
    words = [changed.get(w, w) for w in CONTAINER["args"] if not w.startswith(left_out)]
    words = [w.replace("s3://bucket/runs", f"file://{folder}/mirror") for w in words]
    toy = (*toy_run(toys, folder / "checkpoints"), "--save_step_interval", 20, "--eval_iters", 0)
    toy = [str(word) for word in (*toy, *more)]
    words = [words[0], *words[1:4], "--standalone", *words[4:], *toy]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    own = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}
    with (folder / "log").open("a") as log:
        return subprocess.Popen(words, cwd=folder, env=own, stdout=log, stderr=log)


@pytest.mark.longer
def test_a_pod_that_is_preempted_saves_and_the_next_one_goes_on(toys, tmp_path):
    """On an empty disk, since that of a pod goes with it."""
    pytest.importorskip("obstore")
    run, endless = tmp_path / "checkpoints" / "mine", ("--max_step", 100_000, "--keep_last", 2)
    pod, log = start(toys, tmp_path, *endless), tmp_path / "log"
    deadline = time.monotonic() + 120
    while not (run / "step-00000020").is_dir():
        assert time.monotonic() < deadline and pod.poll() is None, log.read_text()[-3000:]
        time.sleep(0.2)
    pod.send_signal(signal.SIGTERM)
    assert pod.wait(60) == 75, log.read_text()[-3000:]
    saved = max(int(path.name[5:]) for path in run.glob("step-*"))
    assert metrics(run, "step")[-1] == saved
    assert json.loads((run / "STATUS.json").read_text())["code"] == 75
    shutil.rmtree(tmp_path / "checkpoints")
    more = ("--max_step", saved + 5, "--keep_last", 2, "--resume_override", "max_step")
    assert start(toys, tmp_path, *more).wait(120) == 0, log.read_text()[-3000:]
    assert metrics(run, "step")[-1] == saved + 5 and "resumed from" in log.read_text()


@pytest.mark.longer
def test_a_mistake_is_not_restarted(toys, tmp_path):
    code = start(toys, tmp_path, "--max_step", 5, "--lr", -1).wait(120)
    assert code == 1 and "--lr must be positive" in (tmp_path / "log").read_text()
    assert {code, BAD_INPUT} <= set(JOB["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"])
