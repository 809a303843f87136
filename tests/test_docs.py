"""What the documentation names is there: files, functions, links, and the scripts of its
commands."""

import ast
import re
import shlex
from functools import cache
from pathlib import Path

import pytest

from export_hf import parse_export
from fabric_llm.training.forgetting import parse_budgets
from parse_arguments import parse_train
from plan_arguments import parse_plan
from prepare_arguments import parse_prepare

ROOT = Path(__file__).parent.parent
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *(ROOT / f / "README.md" for f in ("data", "checkpoints")),
]
BASH = re.compile(r"^```bash\n(.*?)^```", re.M | re.S)
FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)
# `prepare/rows.py` or `prepare/rows.py: save_rows`
NAMED = re.compile(r"`([\w./-]+\.py)(?:: ([\w.]+?)(?:\(\))?)?`")
CALLED = re.compile(r"`([\w.]+)\(\)`")


def prose(page):
    return FENCED.sub("", page.read_text())


def found(name):
    """The file that a page names, from the root or from the package."""
    paths = (ROOT / name, ROOT / "fabric_llm" / name)
    return next((path for path in paths if path.is_file()), None)


@cache
def defined(path):
    """Names at the top of a module, and `Class.method`."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = [inner for inner in node.body if isinstance(inner, ast.FunctionDef)]
            names |= {f"{node.name}.{method.name}" for method in methods}
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            for target in getattr(node, "targets", None) or [node.target]:
                names |= {one.id for one in ast.walk(target) if isinstance(one, ast.Name)}
    return names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_is_there(page):
    wrong = []
    for paragraph in re.split(r"\n\s*\n", prose(page)):
        files = []
        for name, function in NAMED.findall(paragraph):
            path = found(name)
            files += [path] if path else []
            if path is None or function and function not in defined(path):
                wrong.append(f"{name}: {function}" if function else name)
        for function in CALLED.findall(paragraph):
            names = [f".{name}" for path in files for name in defined(path)]
            if files and not any(name.endswith(f".{function}") for name in names):
                wrong.append(f"{function}()")
    for block in BASH.findall(page.read_text()):
        scripts = re.findall(r"(?:python |^\s*)([\w/]+\.py)\b", block, re.M)
        wrong += [f"the command {script}" for script in scripts if not (ROOT / script).is_file()]
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)) if "://" not in link]
    links = [link.split("#")[0] for link in links]
    wrong += [f"the link {link}" for link in links if link and not (page.parent / link).exists()]
    assert not wrong, f"{page.relative_to(ROOT)} names what isn't there: {', '.join(wrong)}"


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().split()) < 900


def test_the_index_lists_every_page():
    index = (ROOT / "docs" / "README.md").read_text()
    pages = [page.relative_to(ROOT / "docs") for page in (ROOT / "docs").rglob("*.md")]
    pages.remove(Path("README.md"))
    assert [page for page in pages if f"]({page})" not in index] == []


def commands_of(page):
    return "".join(BASH.findall(page.read_text())).replace("\\\n", " ").splitlines()


def started_runs():
    """The flags of the runs of trained weights that the README and the recipe start, and of the
    preset, by place."""
    runs = {}
    for page in (ROOT / "README.md", ROOT / "docs" / "continued_pretraining.md"):
        for line in commands_of(page):
            if re.match(r"python train.py .*--model_name (BASE|meta-llama)", line):
                runs[page.name] = parse_train(shlex.split(line)[2:])
    preset = f"--config {ROOT}/configs/llama3_8b.yaml --devices 4 --train_data_dir d --replay old"
    return {**runs, "preset": parse_train(preset.split())}


def test_the_pages_start_runs_as_the_recipe_says():
    runs = started_runs()
    assert set(runs) == {"README.md", "continued_pretraining.md", "preset"}
    for place, flags in runs.items():
        training = flags.training
        assert training.lr == 2e-5 and training.warmup_steps >= 100, place
        assert training.global_batch_size * (flags.data.context_length or 4096) >= 2**18, place
        assert flags.save.save_step_interval and flags.save.keep_last, place
        assert "replay" in flags.data.data_mix, place
    budget = parse_budgets(runs["continued_pretraining.md"].evaluation.forgetting_budget)
    assert budget == {"replay": 0.25}, "the one that the page's experiment kept"


def test_the_commands_of_the_llama_page_have_such_flags(monkeypatch):
    monkeypatch.chdir(ROOT)
    blocks = "\n".join(commands_of(ROOT / "docs" / "llama3_8b.md"))
    parsers = {"plan": parse_plan, "prepare_data": parse_prepare}
    parsers |= {"train": parse_train, "export_hf": parse_export}
    commands = re.findall(r"python (\w+)\.py (.*?)(?:; do)?$", blocks, re.M)
    assert {script for script, _ in commands} == set(parsers)
    for script, flags in commands:
        parsers[script](shlex.split(flags))


def test_a_page_says_how_to_get_a_gated_model():
    page = (ROOT / "docs" / "runs.md").read_text()
    for words in ("gated", "licence", "hf auth login", "HF_TOKEN", "HF_HUB_OFFLINE"):
        assert words in page
    assert "docs/runs.md#models-from-the-hub" in (ROOT / "README.md").read_text()
