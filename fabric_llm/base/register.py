"""Your code beside ours: what the module of `--code` registers, which every process loads first.

Each function below registers one thing. The tables are read at the place where the built-in choice
is made, so that a run without `--code` imports and calls nothing of it. docs/make_it_yours.md has
an example of each. Nothing here imports torch.
"""

import hashlib
import importlib.util
import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from importlib.machinery import SourceFileLoader
from itertools import product
from pathlib import Path
from typing import Any, Optional

from fabric_llm.base.faults import REFUSED, UNEXPECTED, Fault, as_fault, one_line
from fabric_llm.base.flag import declared, option, strings_below
from fabric_llm.base.names import nearest_of

__all__ = ["flags", "loss", "metric", "optimizer", "option", "schedule", "source", "tracker"]

MODULE = "fabric_llm_code"  # the name of a file of --code in sys.modules
Table = dict[str, Any]
Register = Callable[[Any], Any]  # a decorator

SCHEDULES: Table = {}  # --lr_schedule NAME -> f(at)
SOURCES: Table = {}  # file that tells the source of a folder -> f(folder, flags)
METRICS: Table = {}  # name in metrics.jsonl -> f(at)
TRACKERS: Table = {}  # --logger NAME -> f(folder, config, entity, project)
FLAGS: Table = {}  # name of a class -> the class, a group of flags
# "loss" -> (f(logits, targets, flags), names of what it adds to the log); "optimizer" ->
# f(groups, names, store, flags).
ONLY: Table = {}
# What is loaded: `code` as it was given, its `file`, `sha256`, and `flags`, which functions get.
LOADED: Table = {}
TABLES = (SCHEDULES, SOURCES, METRICS, TRACKERS, FLAGS, ONLY, LOADED)


def schedule(name: str) -> Register:
    """Register a learning-rate schedule for `--lr_schedule NAME`: f(at) -> x in lr = min_lr + x (lr
    - min_lr).

    at: training.schedule.AfterWarmup.
    """
    return _into(SCHEDULES, name, f"the schedule {name!r}")


def loss(adds: Iterable[str] = ()) -> Register:
    """Register the loss that is trained: f(logits, targets, flags) -> its sum over targets, float32
    scalar.

    adds: names of what it adds to the log. Then f returns a tuple: the loss, and for each name a
    sum over targets, of which the log gets the mean.
    """
    # Without parentheses: @register.loss
    if callable(adds):
        return loss()(adds)

    def register(function: Any) -> Any:
        if len(set(names := tuple(adds))) < len(names):
            raise Fault(f"its loss adds a name twice: {', '.join(names)}.")
        # The names belong to the function, so the table holds both.
        _into(ONLY, "loss", "a loss")((function, names))
        return function

    return register


def optimizer(function: Any) -> Any:
    """Register the optimizer: f(groups, names, store, flags) -> a torch.optim.Optimizer, see
    training/adamw.py."""
    return _into(ONLY, "optimizer", "an optimizer")(function)


def source(file: str) -> Register:
    """Register a data source, of folders that hold `file`: f(folder, flags) -> what
    data/own.py reads."""
    return _into(SOURCES, file, f"the source {file!r}")


def metric(name: str) -> Register:
    """Register a metric of logged steps: f(at) -> a number. All ranks call it.

    at: run.metrics.AfterStep.
    """
    return _into(METRICS, name, f"the metric {name!r}")


def tracker(name: str) -> Register:
    """Register a tracker for `--logger NAME`: f(folder, config, entity, project) -> (log,
    close)."""
    return _into(TRACKERS, name, f"the tracker {name!r}")


def flags(group: type) -> type:
    """Register flags: a class whose fields are declared by `option`, each with its text below it.

    Its docstring is the title of the group in `--help`. The values are in `flags.own`.
    """
    # dataclass() writes a docstring of its own where there is none, so the title is kept.
    title = group.__doc__ or group.__name__
    group = _into(FLAGS, group.__name__, f"the flags {group.__name__!r}")(dataclass(group))
    group.__doc__ = title
    # Each field needs a declaration and a text, without which it can't be parsed or explained.
    for field in fields(group):
        if "flag" not in field.metadata:
            raise Fault(f"{field.name} isn't declared by option(DEFAULT).")
    try:
        declared(group)
    except KeyError as error:
        raise Fault(f"{error.args[0][-1]} has no text, a string below it, for --help.") from None
    return group


def _into(table: Table, name: str, words: str) -> Register:
    # Otherwise the name is the function that the decorator stands above, which nothing would call.
    if not isinstance(name, str):
        raise Fault(f'its decorator takes a name, such as @register.metric("mine"), not {name!r}.')

    def register(entry: Any) -> Any:
        # The second one would replace the first without a word.
        if name in table:
            raise Fault(f"it registers {words} twice.")
        table[name] = entry
        return entry

    return register


def load(code: Optional[str], runs: Collection[Path] = (), expected: Optional[str] = None) -> None:
    """Load the module `code`, a file or an importable name, in place of what was loaded. None: load
    nothing. Raises Fault.

    runs: the folders of the run that names it, if the user doesn't. What lies there came with the
    run, and is never run. expected: its `fact` in that run; other code isn't run.
    """
    if code is None:
        if LOADED:
            _forget()
        return
    try:
        spec = _spec(code, runs)
        file = Path(spec.origin)
        content = file.read_bytes()
    except OSError as error:
        raise Fault(f"--code {code!r} can't be read: {error.strerror}.") from None
    loaded = {"file": str(file), "sha256": _sha256(file, content)}
    if expected not in (None, _fact(loaded["sha256"])):
        raise Fault(
            f"{code!r} isn't the code that the run had ({expected}): put that back in its place.",
            REFUSED,
        )
    # A file is found again from any folder.
    loaded["code"] = str(file) if spec.name == MODULE else code
    if loaded.items() <= LOADED.items():
        return  # a module can't register its model classes in transformers twice
    _forget()
    # A list, since the loop deletes from the table.
    for name in list(sys.modules):
        if name.startswith(f"{spec.name}."):
            del sys.modules[name]  # a module of a package, which registers again
    module = importlib.util.module_from_spec(spec)
    # where dataclasses, pickle and transformers look for it
    sys.modules[spec.name] = module
    try:
        # the bytes that were hashed, and not what Python may have compiled before
        exec(compile(content, str(file), "exec"), vars(module))
    except (Exception, SystemExit) as error:
        _forget()
        del sys.modules[spec.name]
        raise Fault(f"--code {code!r}, {_words(error, str(file))}") from error
    LOADED.update(loaded)


def load_of_run(checkpoint: Path) -> None:
    """Load the code of the run that wrote a checkpoint, if it had any. Raises Fault.

    For commands that open its model, or its data.
    """
    try:
        document = json.loads((checkpoint / "trainer" / "progress.json").read_bytes())
        # Checkpoints of runs without --code have None here.
        code, expected = document.get("code"), document["schedule"].get("code")
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return  # whoever reads the checkpoint says what is wrong with it
    if isinstance(code, str):
        load(code, folders_of_run(checkpoint), str(expected))


def folders_of_run(inside: Path) -> set[Path]:
    """The folders, with links followed, that a file or folder of a run is in."""
    return {inside.resolve().parent, inside.parent.resolve()}


def in_words() -> str:
    """What the module has registered, for the first lines of a run."""
    words = [f"the {name}" for name in ONLY]
    kinds = "schedule source metric tracker flags".split()
    for kind, table in zip(kinds, (SCHEDULES, SOURCES, METRICS, TRACKERS, FLAGS)):
        words += [f"the {kind} {name}" for name in table]
    return f"--code {LOADED['code']} registers {', '.join(words) or 'nothing here'}."


def added_by_loss() -> tuple[str, ...]:
    """Names of what the registered loss adds to the log."""
    return ONLY["loss"][1] if "loss" in ONLY else ()


def fact() -> Optional[str]:
    """What a checkpoint says of the code of its run, and a resumed run must have in common with it;
    None without code."""
    return _fact(LOADED["sha256"]) if LOADED else None


def _fact(sha256: str) -> str:
    return f"sha256 {sha256[:16]}"


@contextmanager
def of_user(what: str) -> Iterator[None]:
    """Around a call of what is registered: an error in it is a mistake, told with its line. Raises
    Fault."""
    try:
        yield
    except Exception as error:
        # A full device or a lost rank isn't a mistake in the user's code.
        if isinstance(error, Fault) or as_fault(error).code != UNEXPECTED:
            raise
        where = f"--code {LOADED['code']!r}, {what}, {_words(error, LOADED['file'])}"
        raise Fault(where) from error


def _forget() -> None:
    # The tables are emptied, not replaced, since other modules have imported them.
    for table in TABLES:
        table.clear()
    declared.cache_clear()
    strings_below.cache_clear()


def _spec(code: str, runs: Collection[Path]) -> Any:
    """Where the module `code` is, for importlib. Raises Fault."""
    # Anything that may be a path is taken for one; only a plain dotted name is a module.
    is_file = code.endswith(".py") or os.sep in code or Path(code).is_file()
    if not is_file and not re.fullmatch(r"\w+(\.\w+)*", code):
        raise Fault(f"--code takes a Python file or the name of a module, not {code!r}.")
    places = [Path(code)]
    if not is_file:
        # of the outermost package, which is found without running anything
        try:
            outermost = importlib.util.find_spec(code.partition(".")[0])
        except ValueError:  # such as for __main__
            outermost = None
        if outermost is None:
            raise Fault(f"--code {code!r} is neither a file nor a module that Python finds.")
        places = list(map(Path, outermost.submodule_search_locations or [outermost.origin]))
    # Refused: code below the run's folder, and a package that is this folder or holds it.
    for run, place in product(runs, [place.resolve() for place in places]):
        if run in place.parents or place in (run, *run.parents):
            raise Fault(
                f"{str(run)!r} names its code {code!r}, which may have come with it and isn't "
                "run: name it yourself by --code, or keep it elsewhere.",
                REFUSED,
            )
    if is_file:
        if not Path(code).is_file():
            if Path(code).is_dir():
                raise Fault(f"--code {code!r} is a folder.")
            meant = nearest_of(Path(code), files=True) or " If it has moved, give its new place."
            where = "" if Path(code).is_absolute() else f" (from {os.getcwd()!r})"
            raise Fault(f"--code {code!r} isn't a file{where}.{meant}")
        # A loader, because importlib has none for other suffixes than .py.
        loader = SourceFileLoader(MODULE, os.path.abspath(code))
        return importlib.util.spec_from_file_location(MODULE, loader.path, loader=loader)
    try:
        spec = importlib.util.find_spec(code)
    except (Exception, SystemExit) as error:  # of the packages around it, which are run
        raise Fault(f"--code {code!r}: {type(error).__name__}: {one_line(error)}") from error
    if spec is None or not str(spec.origin).endswith(".py"):
        raise Fault(f"--code {code!r} isn't a module with a Python file.")
    return spec


def _sha256(file: Path, content: bytes) -> str:
    """Hash of a module, or of all modules of a package."""
    hashed = hashlib.sha256(content)
    # A package may keep its code in other modules, which its `__init__` imports.
    if file.name == "__init__.py":
        for other in sorted(file.parent.rglob("*.py")):
            hashed.update(other.read_bytes())
    return hashed.hexdigest()


def _words(error: BaseException, file: str) -> str:
    """What went wrong in the module, with its line."""
    frames = traceback.extract_tb(error.__traceback__)
    # The last frame in the module itself: an error may come from a library that it calls.
    lines = [frame.lineno for frame in frames if frame.filename == file]
    line = error.lineno if isinstance(error, SyntaxError) else (lines or [None])[-1]
    words = one_line(error).rstrip(".")
    if not isinstance(error, Fault):
        words = f"{type(error).__name__}: {words}"
    return f"line {line}: {words}." if line else f"{words}."
