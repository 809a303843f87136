"""The benchmarks of speed at toy size: they run, and their tables are whole. No test here looks at a clock."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks import gpu, page, scaling, throughput

FOLDER = Path(gpu.__file__).parent


def run(script, tmp_path, *words, code=0):
    """(standard output, what --output holds) of a benchmark at toy size."""
    output = tmp_path / "numbers.json"
    command = [sys.executable, FOLDER / script, "--smoke", "--accelerator", "cpu", "--rounds", "2", "--threads", "1"]
    command += [*words] if "--output" in words else [*words, "--output", output]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=600)
    assert done.returncode == code, done.stderr[-6000:]
    return done.stdout, json.loads(output.read_text()) if output.exists() else None


def header(titles):
    return "| " + " | ".join(titles) + " |"


@pytest.mark.longer
@pytest.mark.parametrize(
    "words", [(), ("--packed", "--only", "fabric_llm", "bare loop", "litgpt")], ids=["plain", "packed"]
)
def test_throughput(tmp_path, words):
    said, document = run("throughput.py", tmp_path, *words)
    assert header(["", *throughput.COLUMNS]) in said
    rows = {row["name"]: row for row in document["rows"]}
    for name in ("fabric_llm", "bare loop"):
        assert rows[name]["tokens_per_second"] > 0 and rows[name]["additional_bytes"] > 0, rows[name]
        assert rows[name]["losses"][0] == pytest.approx(rows["bare loop"]["losses"][0], abs=1e-4)
    for row in rows.values():  # what isn't installed says so
        assert row["error"] is None or "installed" in row["error"] or "packed documents" in row["error"], row


@pytest.mark.longer
def test_loss_head(tmp_path):
    said, document = run("fast_paths.py", tmp_path, "--only", "loss", "--dtypes", "float32,bfloat16")
    assert "| chunked |" in said and "of head's gradient" in said and "64x32x128 in bfloat16" in said
    rows = {(row["name"], row["dtype"]): row for row in document["rows"]}
    for dtype, limit in (("float32", 1e-6), ("bfloat16", 1e-2)):
        for name in ("full", "chunked"):
            errors = [rows[name, dtype][key] for key in ("loss_error", "hidden_error", "head_error")]
            assert max(errors) < limit and rows[name, dtype]["seconds"], rows[name, dtype]
        assert rows["cce", dtype]["error"] == "needs a GPU"


@pytest.mark.longer
def test_attention(tmp_path):
    said, document = run("fast_paths.py", tmp_path, "--only", "attention", "--dtypes", "float32")
    assert "One layer's attention, context 32, float32" in said
    rows = {(row["name"], row["part"]): row for row in document["rows"]}
    assert set(rows) == {(name, part) for name in ("unmasked", "masked", "packed") for part in ("layer", "step")}
    for (name, part), row in rows.items():
        assert row["error"] is None and row["seconds"] and row["additional_bytes"] > 0, row
        assert part == "step" or max(row["output_error"], row["gradient_error"]) < 1e-5, row
    losses = [rows[name, "step"]["losses"][0] for name in ("masked", "packed", "unmasked")]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5) and abs(losses[0] - losses[2]) > 1e-5


@pytest.mark.longer
def test_scaling(tmp_path):
    said, document = run("scaling.py", tmp_path, "--axes", "context", "ranks")
    assert header(["", *scaling.COLUMNS]) in said and header(scaling.EXPONENTS) in said
    assert "Growth isn't what theory says: " in said
    rows = {(row["axis"], row["size"]): row for row in document["rows"]}
    assert set(rows) == {("context", 16), ("context", 32), ("ranks", 1), ("ranks", 2)}
    assert all(row["error"] is None and row["tokens_per_second"] > 0 for row in rows.values())


@pytest.mark.longer
def test_gpu_on_a_cpu(tmp_path):
    said, _ = run("gpu.py", tmp_path, "--output", tmp_path)
    assert header(gpu.TITLES) in said
    assert (tmp_path / "gpu.md").read_text().strip() == said.strip()
    document = json.loads((tmp_path / "gpu.json").read_text())
    *cases, last = document["cases"]
    assert all(case["error"] is None and case["tokens_per_second"] > 0 for case in cases), cases
    assert "needs a GPU" in last["error"]  # the others have run all the same


def test_a_row_that_failed_stays_in_the_table():
    rows = [{"name": name, "dtype": "float32", "error": error, "seconds": []} for name, error in (("litgpt", "why"),)]
    assert "| litgpt | why |" in throughput.table(rows, "float32", 10)
    assert throughput.other_losses(rows) is None


def test_other_losses_are_an_error():
    rows = [{"name": n, "dtype": "float32", "error": None, "losses": [loss]} for n, loss in (("a", 3.0), ("b", 3.1))]
    assert "differ" in throughput.other_losses(rows)


def test_ratios_are_taken_within_rounds():
    slow, fast = ({"error": None, "seconds": seconds} for seconds in ([2.0, 20.0, 2.0], [1.0, 10.0, 1.0]))
    assert page.times_faster(fast, slow) == 2.0 and page.median(slow) == 2.0


def test_growth_is_the_exponent():
    assert scaling.slope([1, 2, 4], [5, 20, 80]) == pytest.approx(2.0)
    point = scaling.Point()
    assert point._replace(layers=8).layer_parameters == 2 * point.layer_parameters
    assert point.operations() < point._replace(context=512).operations() / 2  # attention is quadratic


@pytest.mark.parametrize("name", ["toy"])
def test_parameters_are_counted(name):
    config = LlamaConfig(**gpu.SHAPES[name])
    model = AutoModelForCausalLM.from_config(config)
    assert gpu.parameters(gpu.SHAPES[name]) == sum(parameter.numel() for parameter in model.parameters())


def test_the_shapes_have_the_parameters_of_their_names():
    counts = {name: gpu.parameters(gpu.SHAPES[name]) for name in ("1B", "3B", "8B")}
    assert counts == {"1B": 1_235_814_400, "3B": 3_212_749_824, "8B": 8_030_261_248}  # as their model cards say


def test_a_model_that_can_not_fit_is_a_row(tmp_path):
    options = argparse.Namespace(kind="cuda", device={"name": "NVIDIA A100-SXM4-40GB", "bytes": 40 * 2**30})
    row = gpu.try_case(gpu.Case("8B", 1), "bfloat16", tmp_path, options, 0.0)
    assert row["error"] == "doesn't fit: weights, gradients and moments alone take 60 GiB, and this GPU has 40"
    assert "not run" in gpu.try_case(gpu.Case("1B", 1), "bfloat16", tmp_path, options, 0.0)["error"]
    assert all(
        len(gpu.line_of(gpu.try_case(case, "bfloat16", tmp_path, options, 0.0))) == len(gpu.TITLES)
        for case in gpu.CASES
    )


@pytest.mark.parametrize("script", ["throughput.py", "fast_paths.py", "scaling.py", "gpu.py"])
def test_help_begins_with_a_sentence(script):
    done = subprocess.run([sys.executable, FOLDER / script, "--help"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "--rounds" in done.stdout and "--output" in done.stdout
    assert ". " in done.stdout.replace("\n", " ")


@pytest.mark.longer
def test_loader(tmp_path):
    words = ["--gib", 0.005, "--context_length", 64, "--rounds", 1, "--steps", 5, "--folder", tmp_path]
    done = subprocess.run(
        list(map(str, [sys.executable, FOLDER / "loader.py", *words])), capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-6000:]
    rows = [
        line.split("|")
        for line in done.stdout.splitlines()
        if line.startswith(("| fabric_llm", "| torch", "| the same"))
    ]
    assert len(rows) == 7 and all(float(row[5].replace(",", "")) > 0 for row in rows)
    assert not list(tmp_path.iterdir()), "the datasets are removed"
