"""Each benchmark starts, and what a GPU has to show is rehearsed on a CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "benchmarks"
SCRIPTS = [path.name for path in sorted(FOLDER.glob("*.py")) if "__main__" in path.read_text()]


@pytest.mark.quick_cases(r"gpu|throughput")
@pytest.mark.every_eighth(4)
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_benchmark_starts(script):
    if script == "kills.py":  # it imports tests that have a server
        pytest.importorskip("obstore")
    done = subprocess.run(
        [sys.executable, FOLDER / script, "--help"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and done.stdout.startswith("usage: "), done.stderr


def rehearsed(script, folder, *options):
    """Parts that a script for rented machines has done at toy size."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", f"benchmarks/{script}", "--rehearse", *options, folder, "60"],
        cwd=FOLDER.parent,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "Failed" not in done.stdout, done.stdout
    return {path.stem for path in folder.glob("*.done")}


@pytest.mark.slow
def test_all_that_a_gpu_has_to_show_is_rehearsed(tmp_path):
    pages = {"speed", "throughput", "optimizer", "speed_more", "context", "loss_head", "attention"}
    tests = {"families", "kernels", "kills_16", "kills_bf16", "kills_32"}
    assert rehearsed("on_a_gpu.sh", tmp_path) == {*pages, *tests, "data", "float8"}
    for name in pages:
        assert "|" in (tmp_path / f"{name}.md").read_text()


@pytest.mark.slow
def test_all_that_several_gpus_have_to_show_is_rehearsed(tmp_path):
    runs = {"fsdp", "fsdp2", "ddp", "sharded", "hybrid_fsdp", "hybrid_fsdp2"}
    runs |= {"context", "cpu_offload", "offload", "fewer_fsdp", "fewer_fsdp2"}
    others = {"data", "one", "drill_fsdp", "drill_fsdp2", "from_all_fsdp", "from_all_fsdp2"}
    others |= {"export_fsdp", "export_fsdp2"}
    done = rehearsed("on_gpus.sh", tmp_path, "2")
    assert done == {*others, *runs, *(f"{name}-same" for name in runs)}
