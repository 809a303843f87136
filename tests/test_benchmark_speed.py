"""The benchmarks of speed at toy size: they run, and their tables are whole. No test here looks at
a clock."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks import gpu, page, steps, throughput

FOLDER = Path(gpu.__file__).parent


def run(script, tmp_path, *words, code=0):
    """(standard output, what --output holds) of a benchmark at toy size."""
    output = tmp_path / "numbers.json"
    command = [
        sys.executable,
        FOLDER / script,
        *words,
        "--smoke",
        "--accelerator",
        "cpu",
        "--rounds",
        "2",
    ]
    command += ["--threads", "1", "--output", output]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=600)
    assert done.returncode == code, done.stderr[-6000:]
    return done.stdout, json.loads(output.read_text()) if output.exists() else None


def header(titles):
    return "| " + " | ".join(titles) + " |"


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [(), ("--packed", "--only", "fabric_llm", "bare loop")], ids=["plain", "packed"]
)
def test_throughput(tmp_path, words):
    said, document = run("throughput.py", tmp_path, *words)
    assert header(["", *throughput.COLUMNS]) in said
    rows = {row["name"]: row for row in document["rows"]}
    for name in ("fabric_llm", "bare loop"):
        assert rows[name]["tokens_per_second"] > 0 and rows[name]["additional_bytes"] > 0, rows[
            name
        ]
        assert rows[name]["losses"][0] == pytest.approx(rows["bare loop"]["losses"][0], abs=1e-4)
    for row in rows.values():  # what isn't installed says so
        assert row["error"] is None or "installed" in row["error"], row


@pytest.mark.slow
def test_loss_head(tmp_path):
    said, document = run("fast_paths.py", tmp_path, "--dtypes", "float32", "bfloat16")
    assert "| chunked |" in said and "64x32x128 in bfloat16" in said
    rows = {(row["name"], row["dtype"]): row for row in document["rows"]}
    for dtype, limit in (("float32", 1e-5), ("bfloat16", 1e-2)):
        full, chunked = (rows[name, dtype] for name in ("full", "chunked"))
        assert full["seconds"] and chunked["losses"][0] == pytest.approx(
            full["losses"][0], rel=limit
        )


@pytest.mark.slow
def test_attention(tmp_path):
    said, document = run("steps.py", tmp_path, "attention")
    assert "Context 32, float32" in said and "times as fast as masked" in said
    rows = {row["name"]: row for row in document["rows"]}
    assert set(rows) == set(steps.ATTENTION)
    assert all(
        row["error"] is None and row["seconds"] and row["additional_bytes"] > 0
        for row in rows.values()
    )
    losses = [rows[name]["losses"][0] for name in ("masked", "packed", "unmasked")]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5) and abs(losses[0] - losses[2]) > 1e-5


@pytest.mark.slow
def test_scaling(tmp_path):
    said, document = run("steps.py", tmp_path, "scaling", "--only", "context", "ranks")
    assert header(steps.EXPONENTS) in said and "Growth isn't what theory says: " in said
    rows = {row["name"]: row for row in document["rows"]}
    assert set(rows) == {"context 16", "context 32", "ranks 1", "ranks 2"}
    for row in rows.values():
        assert row["error"] is None and row["tokens_per_second"] > 0
        assert row["additional_bytes"] == pytest.approx(row["additional_bytes_in_theory"], rel=0.25)


@pytest.mark.longer
def test_gpu_on_a_cpu(tmp_path):
    said, document = run("gpu.py", tmp_path, "--markdown", tmp_path / "gpu.md")
    assert (tmp_path / "gpu.md").read_text().strip() == said.strip()
    *cases, last = document["rows"]
    assert all(case["error"] is None and case["tokens_per_second"] > 0 for case in cases), cases
    assert all(f"| {case['name']} |" in said for case in cases)
    assert "needs a GPU" in last["error"]  # the others have run all the same


@pytest.mark.slow
def test_all_that_a_gpu_has_to_show_is_rehearsed(tmp_path):
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    command = ["bash", "benchmarks/on_a_gpu.sh", "--rehearse", tmp_path, "60"]
    done = subprocess.run(
        command, cwd=FOLDER.parent, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0 and "Failed" not in done.stdout, done.stdout
    parts = (
        "tests speed throughput optimizer data profile speed_more context loss_head attention "
        "float8"
    ).split()
    assert {path.stem for path in tmp_path.glob("*.done")} == set(parts)
    for name in ("speed", "throughput", "optimizer", "context", "loss_head", "attention"):
        assert "|" in (tmp_path / f"{name}.md").read_text()


def test_a_row_that_failed_stays_in_the_table():
    rows = [
        {"name": name, "dtype": "float32", "error": error, "seconds": []}
        for name, error in (("litgpt", "why"),)
    ]
    assert "| litgpt | why |" in throughput.table(rows, "float32", 10)
    assert throughput.other_losses(rows) is None


def test_other_losses_are_an_error():
    rows = [
        {"name": n, "dtype": "float32", "error": None, "losses": [loss]}
        for n, loss in (("a", 3.0), ("b", 3.1))
    ]
    assert "differ" in throughput.other_losses(rows)


def test_ratios_are_taken_within_rounds():
    slow, fast = (
        {"error": None, "seconds": seconds} for seconds in ([2.0, 20.0, 2.0], [1.0, 10.0, 1.0])
    )
    assert page.times_faster(fast, slow) == 2.0 and page.median(slow) == 2.0


def test_growth_is_the_exponent():
    assert steps.slope([1, 2, 4], [5, 20, 80]) == pytest.approx(2.0)


def test_the_shapes_have_the_parameters_of_their_names():
    counts = {}
    for name in ("1B", "3B", "8B"):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(LlamaConfig(**gpu.SHAPES[name]))
        counts[name] = sum(parameter.numel() for parameter in model.parameters())
    assert counts == {
        "1B": 1_235_814_400,
        "3B": 3_212_749_824,
        "8B": 8_030_261_248,
    }  # as their model cards say


def test_what_is_not_run_is_a_row(tmp_path):
    rows = [
        gpu.try_case(case, "bfloat16", tmp_path, argparse.Namespace(), 0.0) for case in gpu.CASES
    ]
    said = page.compare(rows, gpu.COLUMNS)
    assert all(f"| {case} | not run: the minutes are over |" in said for case in gpu.CASES)


@pytest.mark.parametrize("script", ["throughput.py", "fast_paths.py", "steps.py", "gpu.py"])
def test_help_begins_with_a_sentence(script):
    done = subprocess.run(
        [sys.executable, FOLDER / script, "--help"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and "--rounds" in done.stdout and "--output" in done.stdout
    assert ". " in done.stdout.replace("\n", " ")
