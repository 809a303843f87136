"""docs/make_it_yours.md: every change, applied to a copy of the code, trains, is killed, resumes,
verifies and exports."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
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
    shutil.copytree(
        ROOT / "fabric_llm",
        tmp_path / "code" / "fabric_llm",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    for script in ("train.py", "export_hf.py", "arguments.py"):
        shutil.copy(ROOT / script, tmp_path / "code" / script)
    return tmp_path / "code"


def apply(section, code):
    """Put each block in place of a function, at the end of a class, or at the end of a file.
    Returns how many lines they have."""
    blocks = re.findall(
        r"(Add to|Replace) (?:`(\w+)` in )?`([\w./]+)`.*?```python\n(.*?)```", section, re.S
    )
    assert len(blocks) == section.count("```python")
    for verb, name, file, block in blocks:
        path = code / file
        lines = path.read_text().splitlines(keepends=True)
        if name:
            [old] = [
                node for node in ast.parse("".join(lines)).body if getattr(node, "name", "") == name
            ]
            if verb == "Replace":
                lines[old.lineno - 1 : old.end_lineno] = [block]
            else:
                lines.insert(old.end_lineno, textwrap.indent(block, "    "))
            path.write_text("".join(lines))
        else:
            path.write_text(f"{''.join(lines)}\n\n{block}")
    return len([line for *_, block in blocks for line in block.splitlines() if line.strip()])


def run(code, folder, *words, **variables):
    environment = {**os.environ, "PYTHONPATH": str(code), **variables}
    command = [sys.executable, *map(str, words)]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=180
    )


@pytest.mark.longer
@pytest.mark.every_eighth(1)
@pytest.mark.parametrize(("title", "section"), SECTIONS, ids=[title for title, _ in SECTIONS])
def test_what_is_changed_trains_is_killed_resumes_verifies_and_exports(
    toys, tmp_path, copy, title, section
):
    assert apply(section, copy) <= 30
    model, data = toys / "llama", toys / "data"
    if title in MODELS:
        model = tmp_path / "model"
        model.mkdir()
        config = json.loads((toys / "llama" / "config.json").read_text()) | {
            "model_type": MODELS[title]
        }
        (model / "config.json").write_text(json.dumps(config))
    if title == "A data source":
        data = tmp_path / "bins"
        data.mkdir()
        for name, rows in (("train.bin", 40), ("val.bin", 8)):
            np.random.default_rng(0).integers(0, VOCABULARY, rows * 64).astype(np.uint16).tofile(
                data / name
            )
    flags = [
        "--model_name",
        model,
        "--train_data_dir",
        data,
        "--output_dir",
        "runs",
        "--max_step",
        STEPS,
        "--lr",
        1e-3,
    ]
    flags += [
        "--save_step_interval",
        2,
        "--log_step_interval",
        1,
        "--global_batch_size",
        4,
        "--eval_iters",
        2,
    ]
    if found := re.search(
        r"python train.py .*?(--(?:lr_schedule|logger|lion_beta) [\w.]+)", section
    ):
        flags += found[1].split()

    def train(name, **variables):
        return run(
            copy,
            tmp_path,
            copy / "train.py",
            *flags,
            "--run_name",
            name,
            "--resume",
            "auto",
            **variables,
        )

    whole = train("whole")
    assert whole.returncode == 0, whole.stderr + whole.stdout
    assert train("cut", FABRIC_LLM_FAILPOINT="between_steps:count=5").returncode == -9
    resumed = train("cut")
    assert resumed.returncode == 0 and "resumed from" in resumed.stdout, (
        resumed.stderr + resumed.stdout
    )
    ours, theirs = (
        load_file(tmp_path / "runs" / name / f"step-{STEPS:08d}" / "model.safetensors")
        for name in ("cut", "whole")
    )
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert any(
        not torch.equal(theirs[name], value)
        for name, value in weights_before(model, tmp_path).items()
    )
    lines = [
        json.loads(line)
        for line in (tmp_path / "runs" / "whole" / "metrics.jsonl").read_text().splitlines()
    ]
    if title == "A metric":
        assert all("perplexity" in line for line in lines if "loss" in line)
    if title == "A tracker":
        assert len((tmp_path / "runs" / "whole" / "lines.txt").read_text().splitlines()) == len(
            lines
        )
    verified = run(copy, tmp_path, "-m", "fabric_llm.verify", "runs/cut")
    assert verified.returncode == 0 and "verdict         whole" in verified.stdout, (
        verified.stderr + verified.stdout
    )
    exported = run(copy, tmp_path, copy / "export_hf.py", "runs/cut", "--output", "hf")
    assert exported.returncode == 0 and "Verified with plain transformers" in exported.stdout, (
        exported.stderr
    )


@pytest.mark.longer
def test_a_flag_that_is_added_belongs_to_the_run(toys, tmp_path, copy):
    """Nothing but its declaration says so: a resume with another value would go on with other
    losses."""
    flags = [
        "--model_name",
        toys / "llama",
        "--train_data_dir",
        toys / "data",
        "--output_dir",
        "runs",
        "--eval_iters",
        0,
    ]

    def train(*more, name="run"):
        done = run(
            copy,
            tmp_path,
            copy / "train.py",
            *flags,
            "--save_step_interval",
            2,
            "--run_name",
            name,
            *more,
        )
        return done.returncode, done.stdout + done.stderr

    code, said = train("--max_step", 4, name="before")
    assert code == 0, said
    before = {path: path.read_bytes() for path in copy.rglob("*.py")}
    apply(dict(SECTIONS)["A flag"], copy)
    changed = {
        str(path.relative_to(copy)) for path, text in before.items() if path.read_bytes() != text
    }
    assert changed == {"arguments.py", "fabric_llm/training/adamw.py"}, (
        "the flag, and the code that reads it"
    )
    back = ("--resume", "true", "--checkpoint", "runs/before/step-00000002", "--max_step", 4)
    code, said = train(*back, "--lion_beta", 0.5, name="before")
    assert code == 2 and "was written with lion_beta 0.99, not 0.5." in said, (
        "by a run without the flag"
    )
    code, said = train("--lion_beta", 1)
    assert code == 2 and "--lion_beta must be less than 1, not 1.0." in said
    code, said = train("--lion_bta", 0.5)
    assert code == 2 and "Did you mean --lion_beta?" in said
    code, said = train("--lion_beta", 0.9, "--max_step", 4)
    assert code == 0, said
    back = ("--resume", "true", "--checkpoint", "runs/run/step-00000002", "--max_step", 4)
    code, said = train(*back, "--lion_beta", 0.5)
    assert (
        code == 2
        and "was written with lion_beta 0.9, not 0.5." in said
        and "--resume_override lion_beta." in said
    )
    code, said = train(*back, "--lion_beta", 0.5, "--resume_override", "lion_beta")
    assert code == 0 and "lion_beta: 0.5 from here on, 0.9 before." in said, said


def weights_before(model, folder):
    """Of the first checkpoint of the run, where the model begins with random weights."""
    file = model / "model.safetensors"
    return load_file(
        file
        if file.is_file()
        else folder / "runs" / "whole" / "step-00000002" / "model.safetensors"
    )
