"""benchmarks/steps.py at toy size: what it counts is what the strategies promise. No test here
looks at a clock."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import one_step, page, steps

pytestmark = pytest.mark.slow

SCRIPT = Path(steps.__file__)
SHARDED = ("fsdp, no wrapping", "fsdp, by layer", "fsdp2, by layer")
WHOLE = ("ddp", "fsdp, by layer, NO_SHARD")


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, dict]]:
    """(standard output, numbers of each row) of a run on two ranks, losses of two steps and
    memory."""
    folder = tmp_path_factory.mktemp("sharding")
    size = ("--smoke", "--warm_up", "2", "--rounds", "1", "--accelerator", "cpu")
    files = ("--output", folder / "rows.json", "--markdown", folder / "table.md")
    command = [sys.executable, SCRIPT, "sharding", *size, *files, "--only", *WHOLE, *SHARDED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-6000:]
    assert (folder / "table.md").read_text() == done.stdout
    return done.stdout, {
        row["name"]: row for row in json.loads((folder / "rows.json").read_text())["rows"]
    }


@pytest.mark.parametrize("key", ["parameter_bytes", "optimizer_bytes"])
def test_sharded_rows_hold_half_and_whole_rows_hold_all(result, key):
    _, rows = result
    for name in SHARDED:
        assert rows[name][key] == pytest.approx(rows["ddp"][key] / 2, rel=0.02), name
    for name in WHOLE:
        assert rows[name][key] == pytest.approx(rows["ddp"][key], rel=0.001), name


def test_ddp_holds_the_parameters_of_the_model_and_two_moments(result):
    ddp = result[1]["ddp"]
    hidden, inner, layers, vocabulary = 64, 192, 2, 128
    parameters = (
        2 * vocabulary * hidden
        + layers * (4 * hidden**2 + 3 * hidden * inner + 2 * hidden)
        + hidden
    )
    assert ddp["parameter_bytes"] == 4 * parameters
    assert ddp["optimizer_bytes"] == pytest.approx(
        2 * 4 * parameters, rel=0.001
    )  # and a step count per parameter


def test_losses_agree_and_fall(result):
    _, rows = result
    for row in rows.values():
        assert row["losses"] == pytest.approx(rows["ddp"]["losses"], abs=1e-4)
        assert row["losses"][1] < row["losses"][0]


def test_the_table_has_a_line_for_each_row(result):
    text, rows = result
    for name, row in rows.items():
        [line] = [line for line in text.splitlines() if line.startswith(f"| {name} |")]
        assert f"| {row['parameter_bytes'] / 2**20:.1f} |" in line
        assert f"| {row['losses'][-1]:.6f} |" in line


@pytest.mark.parametrize("other", [2.0002, math.nan])
def test_another_loss_is_an_error(other):
    rows = [
        {"name": name, "error": None, "losses": losses}
        for name, losses in (("a", [3.0, 2.0]), ("b", [3.0, other]))
    ]
    assert steps.problem_of(rows[:1]) is None
    assert "b: losses" in steps.problem_of(rows)
    assert steps.problem_of(rows[::-1]) is not None


def test_a_failed_row_is_an_error_and_stays_in_the_table():
    rows = [{"name": "a", "error": "why", "seconds": []}]
    assert steps.problem_of(rows) == "failed: a (why)."
    assert "| a | why |" in page.compare(rows, steps.COLUMNS)


def test_a_storage_counts_once_and_whole():
    whole = torch.zeros(10)
    assert (
        one_step.storage_bytes(
            [whole[:3], whole[5:], torch.zeros(0), torch.zeros(2, dtype=torch.float64)]
        )
        == 40 + 16
    )
