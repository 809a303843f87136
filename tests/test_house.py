"""The house: imports go one way, and a wheel holds every room."""

import ast
import re
import subprocess
import sys

import pytest
from ranks import toy_run
from setuptools import find_packages

from arguments import ROOT

PROJECT = (ROOT / "pyproject.toml").read_text()
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


def dotted(path):
    """The name by which a file is imported."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


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
    names = {dotted(path): path for path in PACKAGE.rglob("*.py")}
    modules = {name for name, path in names.items() if path.name != "__init__.py"}
    needs = {}
    for name, path in names.items():
        given = {*imported(path)}
        given |= {one.rpartition(".")[0] for one in given}  # the module that has a name
        needs[name] = given & modules - {name}
    done = set()
    while ready := {name for name in names if name not in done and needs[name] <= done}:
        done |= ready
    assert done == set(names), f"a circle among {sorted(set(names) - done)}"


def test_every_room_says_what_it_is_and_imports_nothing():
    rooms = {path.name for path in PACKAGE.iterdir() if path.is_dir()}
    assert rooms - {"__pycache__"} == set(FLOOR)
    for path in PACKAGE.rglob("__init__.py"):
        text = path.read_text()
        assert ast.get_docstring(ast.parse(text)) and "TODO" not in text, path
        # it asks for Python's version
        assert set(imported(path)) <= ({"sys"} if path.parent == PACKAGE else set()), path
        if path.parent != PACKAGE:
            modules = [other.stem for other in path.parent.glob("[a-z]*.py")]
            assert all(name in text for name in modules), f"{path} doesn't name all of {modules}"


def test_a_wheel_holds_every_room():
    [include] = re.findall(r'packages\.find\.include = \["(.*)"\]', PROJECT)
    packages = {"fabric_llm", *(f"fabric_llm.{room}" for room in FLOOR)}
    assert set(find_packages(str(ROOT), include=[include])) == packages


def test_a_wheel_holds_what_is_compiled_and_what_pages_are_made_of():
    [listed] = re.findall(r"package-data = { fabric_llm = \[(.*)\] }", PROJECT)
    held = {path for pattern in re.findall(r'"(.*?)"', listed) for path in PACKAGE.glob(pattern)}
    files = {path for path in PACKAGE.rglob("*.*") if path.is_file()}
    assert held == {path for path in files if path.suffix not in (".py", ".pyc")}
    assert {path.suffix for path in held} == {".cpp", ".html", ".md"}


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
    words = [sys.executable, "-c", program]
    done = subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True)
    off = {f"fabric_llm.{room}.{name}" for room, names in OFF.items() for name in names}
    assert "fabric_llm.model.layers" in done.stdout.split()
    assert off & {*done.stdout.split()} == set()
    assert off <= {dotted(path) for path in SOURCES}


def test_what_trains_reaches_nothing_that_works_on_folders():
    """Neither by an import, wherever it stands, nor as a process, but for the demo's dataset."""
    paths = {dotted(path): path for path in SOURCES}
    reached, left = set(), {"train"}
    while left:
        name = left.pop()
        reached.add(name)
        named = {*imported(paths[name])}
        named |= {one.rpartition(".")[0] for one in named}
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
