"""The house: imports go one way, and a wheel holds every room."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import toy_run

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "fabric_llm"
SOURCES = [*sorted(PACKAGE.rglob("*.py")), *sorted(ROOT.glob("*.py"))]
FLOORS = (
    {"base"},
    {"data", "processes"},
    {"model"},
    {"training", "checkpoint"},
    {"mirror"},
    {"plan", "prepare"},
    {"run"},
    {"weights", "report"},
    {"verify", "forecast"},
)
# They work on folders: nothing that trains imports them, or starts a script that does, but for the
# demo's preparation.
BESIDE_TRAINING = {"prepare", "weights", "verify", "report", "forecast"}
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}


def imported(path):
    """Dotted names of everything that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_rooms_import_only_from_floors_below():
    found = []
    for path in PACKAGE.rglob("*.py"):
        room = path.relative_to(PACKAGE).parts[0]
        for name in imported(path):
            parts = name.split(".")
            if parts[0].endswith("arguments") or parts[0] in ("train", "prepare_data", "export_hf"):
                found.append(f"{path} imports the script {name}")
            elif parts[0] == "fabric_llm" and room != "__init__.py" and parts[1] != room:
                # a command beside the rooms is above them
                if FLOOR[parts[1]] >= FLOOR.get(room, len(FLOORS)):
                    found.append(f"{path} imports {name}, which isn't below {room}")
    assert found == [], "\n".join(found)


def test_one_module_imports_lightning():
    """Any other import of it would bring the Trainer and torchmetrics, two seconds of each
    start."""
    names = ("lightning", "lightning_fabric", "pytorch_lightning", "torchmetrics")
    found = {path for path in SOURCES for name in imported(path) if name.split(".")[0] in names}
    assert found == {PACKAGE / "base" / "fabric.py"}


def test_no_circle_of_imports_within_a_room():
    """What is imported for annotations alone counts as well."""
    names = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path
        for path in PACKAGE.rglob("*.py")
    }
    needs = {
        name: {
            other
            for given in imported(path)
            for other in names
            if given == other or given.startswith(f"{other}.")
        }
        - {name}
        for name, path in names.items()
    }
    done = set()
    while ready := {
        name for name, others in needs.items() if name not in done and leaves(others, names) <= done
    }:
        done |= ready
    assert done == set(names), f"a circle among {sorted(set(names) - done)}"


def leaves(others, names):
    """Modules, without the packages that they are in."""
    return {name for name in others if names[name].name != "__init__.py"}


def test_every_room_says_what_it_is_and_imports_nothing():
    assert {
        path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"
    } == set(FLOOR)
    for path in PACKAGE.rglob("__init__.py"):
        text = path.read_text()
        assert ast.get_docstring(ast.parse(text)) and "TODO" not in text, path
        # it asks for Python's version
        assert set(imported(path)) <= ({"sys"} if path.parent == PACKAGE else set()), path
        if path.parent != PACKAGE:
            missing = [
                other.stem for other in path.parent.glob("[a-z]*.py") if other.stem not in text
            ]
            assert not missing, f"{path} doesn't name {missing}"


def test_a_wheel_holds_every_room():
    include = re.search(
        r'packages\.find\.include = \["(.*)"\]', (ROOT / "pyproject.toml").read_text()
    )[1]
    from setuptools import find_packages

    assert set(find_packages(str(ROOT), include=[include])) == {
        "fabric_llm",
        *(f"fabric_llm.{room}" for room in FLOOR),
    }


def test_a_wheel_holds_what_is_compiled_and_what_pages_are_made_of():
    [listed] = re.findall(
        r"package-data = { fabric_llm = \[(.*)\] }", (ROOT / "pyproject.toml").read_text()
    )
    held = {path for pattern in re.findall(r'"(.*?)"', listed) for path in PACKAGE.glob(pattern)}
    others = {
        path
        for path in PACKAGE.rglob("*.*")
        if path.is_file() and path.suffix not in (".py", ".pyc")
    }
    assert held == others and {path.suffix for path in others} == {".cpp", ".html", ".md"}


OFF = {
    "data": ("probes",),
    "mirror": ("fetch", "store"),
    "model": ("context_parallel", "float8", "offload", "tiles"),
    "training": ("adamw_triton", "ema"),
}


@pytest.mark.longer
def test_a_feature_that_is_off_is_not_imported(toys, tmp_path):
    """By a run with default flags, in a process of its own."""
    flags = [str(word) for word in (*toy_run(toys, tmp_path), "--max_step", 1)]
    program = f"import sys, train; train.main({flags}); print(*sys.modules, sep='\\n')"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True, text=True
    )
    off = {f"fabric_llm.{room}.{name}" for room, names in OFF.items() for name in names}
    assert "fabric_llm.model.layers" in done.stdout.split()
    assert off & {*done.stdout.split()} == set()
    assert all((ROOT / f"{name.replace('.', '/')}.py").is_file() for name in off)


def test_what_trains_reaches_nothing_that_works_on_folders():
    """Neither by an import, wherever it stands, nor as a process, but for the demo's dataset."""
    paths = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in SOURCES}
    reached, left = set(), {"train"}
    while left:
        name = left.pop()
        reached.add(name)
        named = {*imported(paths[name])}
        named |= {before for one in named for before in [one.rpartition(".")[0]]}
        left |= (named & paths.keys()) - reached
    rooms = {name.split(".")[1] for name in reached if name.startswith("fabric_llm.")}
    assert not rooms & BESIDE_TRAINING
    scripts = re.compile(r'"(\w+\.py)"')
    started = {
        (name, script)
        for name in reached - {"train", "arguments"}
        for node in ast.walk(ast.parse(paths[name].read_text()))
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div)
        for script in scripts.findall(ast.unparse(node).replace("'", '"'))
    }
    assert started == {("fabric_llm.plan.demo", "prepare_data.py")}
