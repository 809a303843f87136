"""benchmarks/bf16_updates.py at toy size: every row is there, and what it counts is so. No test
here looks at a clock."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import bf16_updates

pytestmark = pytest.mark.slow

SCRIPT = Path(bf16_updates.__file__)
BYTES = {  # a parameter: weights, optimizer state
    "fp32": (4, 8), "master": (2, 12), "stochastic": (2, 4), "nearest": (2, 4),
}  # fmt: skip


@pytest.fixture(scope="module")
def result(toys, tmp_path_factory):
    """(standard output, numbers of each row) of the main benchmark."""
    folder = tmp_path_factory.mktemp("bf16_updates")
    size = (
        "--steps",
        "40",
        "--lr",
        "1e-4",
        "--global_batch_size",
        "16",
        "--eval_iters",
        "8",
        "--accelerator",
        "cpu",
    )
    files = (
        "--output",
        folder / "rows.json",
        "--markdown",
        folder / "page.md",
        "--output_dir",
        folder / "runs",
    )
    command = [sys.executable, SCRIPT, toys / "llama-tied", toys / "many", *size, *files]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-6000:]
    assert (folder / "page.md").read_text() == done.stdout
    return done.stdout, {
        row["name"]: row for row in json.loads((folder / "rows.json").read_text())["rows"]
    }


def test_the_table_has_every_row(result):
    text, rows = result
    assert list(rows) == list(bf16_updates.ROWS)
    for name, row in rows.items():
        [line] = [line for line in text.splitlines() if line.startswith(f"| {name} |")]
        assert f"| {row['before']:.4f} | {row['after']:.4f} |" in line
        assert row["eval_steps"][0] == 0 and row["eval_steps"][-1] == 40
        assert len(row["seconds"]) > 3


def test_stochastic_and_master_are_closer_to_fp32_than_nearest(result):
    _, rows = result
    gap = {name: abs(row["minus_fp32"]) for name, row in rows.items()}
    for name in ("stochastic", "master"):
        assert gap[name] < gap["nearest"] / 2, gap


def test_float32_changes_all_weights_and_nearest_the_fewest(result):
    _, rows = result
    assert rows["fp32"]["updated_fraction"] > 0.99
    for name in ("stochastic", "master"):
        assert rows["nearest"]["updated_fraction"] < rows[name]["updated_fraction"] < 0.9


@pytest.mark.parametrize(("name", "expected"), BYTES.items())
def test_bytes_are_those_of_the_tensors(result, name, expected):
    row = result[1][name]
    steps_bytes = 4 * 22 / row["parameters"]  # a count for each tensor
    assert row["weight_bytes"] == expected[0]
    assert row["optimizer_bytes"] == pytest.approx(expected[1] + steps_bytes, abs=steps_bytes)
