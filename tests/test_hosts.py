"""Several hosts under torchrun, as the documentation starts them: one is lost, comes back, and the
run ends done."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import hosts
import pytest
from ranks import metrics, toy_run

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
STEPS = 160
SECONDS = 600  # of a busy machine, for what takes a minute on one that isn't


def torchrun_on_two_nodes(loop):
    """The code block of docs/clusters.md that starts torchrun on two nodes, in a loop or without
    one."""
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "docs" / "clusters.md").read_text(), re.S)
    blocks = [block for block in blocks if "--nnodes 2" in block]
    [found] = [block for block in blocks if ("for attempt" in block) == loop]
    return found


@pytest.fixture
def network(tmp_path):
    if reason := hosts.missing():
        pytest.skip(reason)
    with hosts.Network("alpha", "beta", folder=tmp_path) as network:
        yield network


class Cluster:
    """Two hosts that were given the same commands."""

    def __init__(self, network, script, logs):
        self.network, self.script, self.logs = network, script, logs
        self.started = {}

    def start(self, name):
        bin = Path(sys.executable).parent
        own = {"PATH": f"{bin}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
        with (self.logs / f"{name}.log").open("a") as log:
            words = [*self.network.on(name), "bash", "-c", self.script]
            how = {"env": {**os.environ, **own}, "stdout": log, "stderr": log}
            self.started[name] = subprocess.Popen(words, **how)

    def said(self):
        """The end of both logs, for whoever reads why a test failed."""
        logs = {name: (self.logs / f"{name}.log").read_text() for name in self.started}
        return "\n".join(f"--- {name}\n{log[-4000:]}" for name, log in logs.items())

    def alive(self):
        return [one for one in self.started.values() if one.poll() is None]

    def wait_until(self, true):
        deadline = time.monotonic() + SECONDS
        while not true():
            assert self.alive() and time.monotonic() < deadline, self.said()
            time.sleep(0.1)

    def codes(self):
        self.wait_until(lambda: not self.alive())
        return [process.returncode for process in self.started.values()]


def as_typed(block, toys, folder):
    """The commands of a page with one CPU for eight GPUs, and a toy model."""
    assert "HOST:29400" in block and "--nproc_per_node 8" in block and " ..." in block
    block = block.replace("HOST:", "alpha:").replace("--nproc_per_node 8", "--nproc_per_node 1")
    sizes = f"--global_batch_size 4 --max_step {STEPS} --save_step_interval 20 --eval_iters 0"
    flags = (*toy_run(toys, folder / "checkpoints"), sizes, "--log_step_interval", 1)
    words = " ".join(map(str, ("", *flags, "--hang_timeout", 60)))
    return block.replace("train.py", str(ROOT / "train.py")).replace(" ...", words)


@pytest.mark.parametrize(
    ("loop", "lost", "silently"),
    [(False, "beta", False), (False, "beta", True), (True, "alpha", True)],
    ids=["killed", "without power", "the host that all meet at"],
)
def test_a_host_that_is_lost_and_comes_back(network, toys, tmp_path, loop, lost, silently):
    cluster = Cluster(network, as_typed(torchrun_on_two_nodes(loop), toys, tmp_path), tmp_path)
    run = tmp_path / "checkpoints" / "mine"
    for name in ("alpha", "beta"):
        cluster.start(name)
    cluster.wait_until((run / "step-00000040").is_dir)
    network.lose(lost, silently)
    cluster.started.pop(lost).wait()
    network.plug_in(lost)
    cluster.start(lost)
    assert cluster.codes() == [0, 0], cluster.said()
    said = "".join((tmp_path / f"{name}.log").read_text() for name in cluster.started)
    assert "resumed from" in said and "Warning: torchrun" not in said
    assert json.loads((run / "STATUS.json").read_text())["reason"] == "done"
    assert metrics(run, "step") == list(range(1, STEPS + 1)), "each step once"


def test_torchrun_says_whether_it_shares_its_store(tmp_path):
    (tmp_path / "script.py").write_text(
        "from fabric_llm.processes.launch import adopt_launcher; adopt_launcher()"
    )
    torchrun = [str(Path(sys.executable).parent / "torchrun"), "--standalone"]
    command = [*torchrun, "--max_restarts", "3", str(tmp_path / "script.py")]
    for more, warned in (({}, True), ({"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}, False)):
        own = {**os.environ, **more, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, env=own, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert ("on every machine" in done.stdout) == warned, done.stdout
