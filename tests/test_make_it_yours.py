"""docs/make_it_yours.md: every change, applied to a copy of the code, trains, is killed, resumes, verifies and exports."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import VOCABULARY
from safetensors.torch import load_file

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "make_it_yours.md").read_text()
STEPS = 6
MODELS = {"A model class in the style of transformers": "capped_llama", "A plain nn.Module": "mine"}
SECTIONS = re.findall(r"^## (.*)\n((?:(?!^## ).*\n)*)", PAGE, re.M)


@pytest.fixture
def copy(tmp_path):
    """The scripts and the package, to be changed."""
    shutil.copytree(ROOT / "fabric_llm", tmp_path / "code" / "fabric_llm", ignore=shutil.ignore_patterns("__pycache__"))
    for script in ("train.py", "export_hf.py", "arguments.py"):
        shutil.copy(ROOT / script, tmp_path / "code" / script)
    return tmp_path / "code"


def apply(section, code):
    """Replace the functions that the block defines, or add it to the end. Returns how many lines it has."""
    verb, file = re.search(r"(Add to|Replace `\w+` in) `([\w./]+)`", section).groups()
    [block] = re.findall(r"```python\n(.*?)```", section, re.S)
    path = code / file
    text = path.read_text()
    if verb.startswith("Replace"):
        [name] = [node.name for node in ast.parse(block).body]
        [old] = [node for node in ast.parse(text).body if getattr(node, "name", "") == name]
        lines = text.splitlines(keepends=True)
        path.write_text("".join([*lines[: old.lineno - 1], block, *lines[old.end_lineno :]]))
    else:
        path.write_text(f"{text}\n\n{block}")
    return len([line for line in block.splitlines() if line.strip()])


def run(code, folder, *words, **variables):
    environment = {**os.environ, "PYTHONPATH": str(code), **variables}
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=180)


@pytest.mark.parametrize(("title", "section"), SECTIONS, ids=[title for title, _ in SECTIONS])
def test_what_is_changed_trains_is_killed_resumes_verifies_and_exports(toys, tmp_path, copy, title, section):
    assert apply(section, copy) <= 30
    model, data = toys / "llama", toys / "data"
    if title in MODELS:
        model = tmp_path / "model"
        model.mkdir()
        config = json.loads((toys / "llama" / "config.json").read_text()) | {"model_type": MODELS[title]}
        (model / "config.json").write_text(json.dumps(config))
    if title == "A data source":
        data = tmp_path / "bins"
        data.mkdir()
        for name, rows in (("train.bin", 40), ("val.bin", 8)):
            np.random.default_rng(0).integers(0, VOCABULARY, rows * 64).astype(np.uint16).tofile(data / name)
    flags = ["--model_name", model, "--train_data_dir", data, "--output_dir", "runs", "--max_step", STEPS, "--lr", 1e-3]
    flags += ["--save_step_interval", 2, "--log_step_interval", 1, "--global_batch_size", 4, "--eval_iters", 2]
    if found := re.search(r"python train.py (--(?:lr_schedule|logger) \w+)", section):
        flags += found[1].split()

    def train(name, **variables):
        return run(copy, tmp_path, copy / "train.py", *flags, "--run_name", name, "--resume", "auto", **variables)

    whole = train("whole")
    assert whole.returncode == 0, whole.stderr + whole.stdout
    assert train("cut", FABRIC_LLM_FAILPOINT="between_steps:count=5").returncode == -9
    resumed = train("cut")
    assert resumed.returncode == 0 and "resumed from" in resumed.stdout, resumed.stderr + resumed.stdout
    ours, theirs = (
        load_file(tmp_path / "runs" / name / f"step-{STEPS:08d}" / "model.safetensors") for name in ("cut", "whole")
    )
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert any(not torch.equal(theirs[name], value) for name, value in weights_before(model, tmp_path).items())
    lines = [json.loads(line) for line in (tmp_path / "runs" / "whole" / "metrics.jsonl").read_text().splitlines()]
    if title == "A metric":
        assert all("perplexity" in line for line in lines if "loss" in line)
    if title == "A tracker":
        assert len((tmp_path / "runs" / "whole" / "lines.txt").read_text().splitlines()) == len(lines)
    verified = run(copy, tmp_path, "-m", "fabric_llm.verify", "runs/cut")
    assert verified.returncode == 0 and "verdict         whole" in verified.stdout, verified.stderr + verified.stdout
    exported = run(copy, tmp_path, copy / "export_hf.py", "runs/cut", "--output", "hf")
    assert exported.returncode == 0 and "Verified with plain transformers" in exported.stdout, exported.stderr


def weights_before(model, folder):
    """Of the first checkpoint of the run, where the model begins with random weights."""
    file = model / "model.safetensors"
    return load_file(file if file.is_file() else folder / "runs" / "whole" / "step-00000002" / "model.safetensors")
