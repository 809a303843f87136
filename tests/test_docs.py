"""What the documentation names is there: files, functions, links, and the scripts of its commands."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *(ROOT / f / "README.md" for f in ("data", "checkpoints")),
]
FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)
NAMED = re.compile(r"`([\w./-]+\.py)(?:: ([\w.]+?)(?:\(\))?)?`")  # `data/rows.py` or `data/rows.py: save_rows`
CALLED = re.compile(r"`([\w.]+)\(\)`")


def prose(page):
    return FENCED.sub("", page.read_text())


def found(name):
    """The file that a page names, from the root or from the package."""
    return next((path for path in (ROOT / name, ROOT / "fabric_llm" / name) if path.is_file()), None)


@cache
def defined(path):
    """Names at the top of a module, and `Class.method`."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
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
            if files and not any(f".{name}".endswith(f".{function}") for path in files for name in defined(path)):
                wrong.append(f"{function}()")
    for block in (text for language, text in FENCED.findall(page.read_text()) if language == "bash"):
        scripts = re.findall(r"(?:python |^\s*)([\w/]+\.py)\b", block, re.M)
        wrong += [f"the command {script}" for script in scripts if not (ROOT / script).is_file()]
    links = [link.split("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)) if "://" not in link]
    wrong += [f"the link {link}" for link in links if link and not (page.parent / link).exists()]
    assert not wrong, f"{page.relative_to(ROOT)} names what isn't there: {', '.join(wrong)}"


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().split()) < 900


def test_the_index_lists_every_page():
    index = (ROOT / "docs" / "README.md").read_text()
    assert [str(page) for page in PAGES if page.is_relative_to(ROOT / "docs") and page.name not in index] == []
