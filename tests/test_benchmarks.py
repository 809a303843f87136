"""Each benchmark starts, and what a GPU has to show is rehearsed on a CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "benchmarks"
SCRIPTS = [path.name for path in sorted(FOLDER.glob("*.py")) if "__main__" in path.read_text()]


@pytest.mark.quick_cases(r"gpu|throughput")
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_benchmark_starts(script):
    done = subprocess.run(
        [sys.executable, FOLDER / script, "--help"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and done.stdout.startswith("usage: "), done.stderr


@pytest.mark.longer
def test_gpu_on_a_cpu(tmp_path):
    words = "--smoke --accelerator cpu --rounds 2 --threads 1".split()
    command = [sys.executable, FOLDER / "gpu.py", *words, "--markdown", tmp_path / "gpu.md"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-6000:]
    assert (tmp_path / "gpu.md").read_text().strip() == done.stdout.strip()


@pytest.mark.slow
def test_all_that_a_gpu_has_to_show_is_rehearsed(tmp_path):
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "benchmarks/on_a_gpu.sh", "--rehearse", tmp_path, "60"],
        cwd=FOLDER.parent,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "Failed" not in done.stdout, done.stdout
    parts = "tests speed throughput optimizer data profile speed_more context loss_head attention"
    assert {path.stem for path in tmp_path.glob("*.done")} == {*parts.split(), "float8"}
    for name in ("speed", "throughput", "optimizer", "context", "loss_head", "attention"):
        assert "|" in (tmp_path / f"{name}.md").read_text()
