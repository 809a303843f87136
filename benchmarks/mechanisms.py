"""Take away what keeps a run safe, one mechanism after the other: does a test notice?

In every process that the tests start, right after a mechanism's module is loaded and before others
import it, something without the mechanism is put in its place. The tests of its row must then fail.
The source isn't changed.
"""

import argparse
import inspect
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from importlib.machinery import SourceFileLoader
from pathlib import Path
from pkgutil import resolve_name
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import ANY

ROOT = Path(__file__).parent.parent
TAKEN_AWAY = "FABRIC_LLM_TAKEN_AWAY"  # an environment variable: a key
PATCHED = "FABRIC_LLM_PATCHED"  # another: a file, made once done
TIMEOUT_SECONDS = 400  # without its mechanism a test may hang, which is a failure as well
KILLS, ROWS, DAMAGE = "faults/test_kills.py", "faults/test_rows.py", "faults/test_damage.py"
WORLD_CYCLE, NON_FINITE = "faults/test_world_cycle.py", "faults/test_non_finite.py"
CHECKPOINT, SECURITY, STOP = "test_checkpoint.py", "test_security.py", "test_stop.py"
WATCH, BAD_INPUT, NUMERICS = "test_watch.py", "test_bad_input.py", "test_numerics.py"
EVALUATION, WORLD, FALLBACK = "test_evaluation.py", "test_launched_world.py", "test_fallback.py"
GUARD, METRICS = "test_guard.py", "test_metrics.py"
LAW_1, LAW_12 = "test_law_1_one_big_batch.py", "test_law_12_mixture.py"


def gives(value: Any) -> Callable[[Any], Any]:
    """In the place of a function, one that does nothing and returns `value`."""
    return lambda original: lambda *args, **more: value


def wrapping(function: Callable[..., Any]) -> Callable[[Any], Any]:
    """In the place of a function, another, whose first argument is the one that was there."""
    return lambda original: lambda *args, **more: function(original, *args, **more)


def is_now(value: Any) -> Callable[[Any], Any]:
    """In the place of a constant, another."""
    return lambda original: value


def with_names(**names: Any) -> Callable[[Any], Any]:
    """In the place of an imported module, one with some other names. Raises AttributeError where it
    has none of them."""

    def instead(original: Any) -> Any:
        for name in names:
            getattr(original, name)
        return SimpleNamespace(**{**vars(original), **names})

    return instead


def after_setting(name: str, value: Any) -> Callable[[Any], Any]:
    """In the place of a method, the same after an attribute of its object was set."""

    def instead(original, self, *args, **more):
        setattr(self, name, value)
        return original(self, *args, **more)

    return wrapping(instead)


def nothing(*args: Any, **more: Any) -> None:
    pass


PATIENT = wrapping(lambda original, self, *seconds: original(self, float("inf")))


@wrapping
def without_trace_of_unreadable(original, *args):
    try:
        original(*args)
    except ValueError as fault:
        raise fault.__cause__ or fault


def there(folder, entries):
    return {name: entry for name, entry in entries.items() if (folder / name).is_file()}


@wrapping
def with_actual_sizes(original, folder, entries, *rest):
    sizes = {name: {"bytes": (folder / name).stat().st_size} for name in there(folder, entries)}
    entries = {name: {**entry, **sizes.get(name, {})} for name, entry in entries.items()}
    original(folder, entries, *rest)


@wrapping
def only_listed(original, folder):
    manifest = Path(folder, "MANIFEST.json")
    listed = json.loads(manifest.read_bytes())["files"] if manifest.is_file() else None
    return [name for name in original(folder) if listed is None or name in listed]


@wrapping
def without_copies(original, *args, copy=False, **more):
    pending = original(*args, **more)
    pending.copies = (0, math.inf) if copy else None  # as if they had been made
    return pending


@wrapping
def log_before_commit(original, pending, before=nothing):
    if pending.rank == 0:
        before()
    original(pending)


@wrapping
def hangup_as_sigterm(original, self, number, frame):
    return original(self, signal.SIGTERM if number == signal.SIGHUP else number, frame)


@wrapping
def without_minimum(original, fabric, micro_batches):
    from fabric_llm.base.ranks import sum_over_ranks
    from fabric_llm.data.batches import target_count

    return sum_over_ranks(fabric, sum(target_count(batch) for batch in micro_batches))


@wrapping
def without_interrupt(original, *args):
    with suppress(KeyboardInterrupt):
        original(*args)


@wrapping
def own_fault(original, self, fault):
    original(self, fault)
    return self.rank, fault


@wrapping
def with_another_error(original, *args, **more):
    try:
        original(*args, **more)
    except OSError as error:
        raise RuntimeError("not what is caught") from error


def newest_by_name_elsewhere(ranks):
    from fabric_llm.base import files
    from fabric_llm.base.command_line import is_rank_zero
    from fabric_llm.checkpoint.keep import read_progress

    def chosen(value):
        directory = inspect.currentframe().f_back.f_locals["this"].directory
        value, newest = ranks.from_first(value), files.latest(directory)
        return value if is_rank_zero() or newest is None else (newest, read_progress(newest))

    return with_names(from_first=chosen)(ranks)


@wrapping
def lost_with_the_others(original, this, *args, **more):
    from fabric_llm.base.faults import PEER_LOST

    code = original(this, *args, **more)
    return PEER_LOST if this.children.processes else code


@wrapping
def newest_or_none(original, *given):
    from fabric_llm.base.faults import NO_CHECKPOINT, Fault

    path, problems = original(*given)
    if problems:
        raise Fault(problems[0], NO_CHECKPOINT)
    return path, problems


@wrapping
def takes_anything(original, self, loss, grad_norm):
    finite = abs(loss) < float("inf") and abs(grad_norm) < float("inf")
    return original(self, loss, grad_norm) if finite else ("take", "")


@wrapping
def without_try(original, self):
    while (waiting := self.waiting.get()) is not None:
        waiting[1]()


@dataclass(frozen=True)
class Mechanism:
    """What is replaced, and the tests that must fail then."""

    row: str  # of docs/faults.md
    name: str
    target: str  # "module:name" or "module:Class.name", in fabric_llm
    tests: str  # a file, relative to tests/
    select: str  # pytest -k
    instead: Callable[[Any], Any] = gives(None)  # from what is there to what takes its place

    @property
    def key(self) -> str:
        return f"{self.row}: {self.name}"


MECHANISMS = [Mechanism(*entry) for entry in [
    ("kill", "log is cut back to the checkpoint", "run.metrics:is_before", KILLS,
     "named_point and between_steps", gives(True)),
    ("kill", "optimizer state is loaded", "checkpoint.reading:load_optimizer",
     KILLS, "named_point and between_steps and full"),
    ("kill", "randomness follows the step", "training.step:seed_step", KILLS,
     "named_point and between_steps and full"),
    ("kill in a save", "written beside its name", "checkpoint.writing:from_first",
     KILLS, "named_point and save.parts and sharded",
     wrapping(lambda original, value: re.sub(r"\.tmp-(step-\d+)-\w+$", r"\1", original(value)))),
    ("kill in a save", "on the disk before the name", "checkpoint.writing:fsync", CHECKPOINT,
     "everything_is_on_disk"),
    ("kill in a save", "files are durable", "base.files:fsync", CHECKPOINT,
     "everything_is_on_disk"),
    ("kill in a save", "leftovers are swept", "checkpoint.retention:sweep", KILLS,
     "named_point and save.parts and full", gives([])),
    ("kill in a save", "leftovers go before the disk is asked", "plan.run_directory:sweep",
     CHECKPOINT, "killed_save_left"),
    ("kill in a save", "published with what all have written", "checkpoint.writing:_require_seen",
     ROWS, "published_only"),
    ("kill in a prune", "renamed before it is removed", "checkpoint.retention:_discard", CHECKPOINT,
     "prune_that_is_cut_off", wrapping(lambda original, path, renamed=False: original(path))),
    ("kill in a background save", "a copy is written", "checkpoint.writing:begin",
     ROWS, "save_in_the_background_writes", without_copies),
    ("a save raises", "on all ranks", "checkpoint.writing:_agree", ROWS, "save_that_raises",
     wrapping(lambda agree, pending, problems: agree(pending, [
         problem if rank == pending.rank else None for rank, problem in enumerate(problems)]))),
    ("a save raises", "in the background as well", "checkpoint.writing:commit", ROWS,
     "save_that_raises", after_setting("problem", None)),
    ("a save raises", "nothing is left behind", "checkpoint.writing:shutil", ROWS,
     "save_that_raises", with_names(rmtree=nothing)),
    ("a save raises", "at the log as well", "checkpoint.writing:commit", ROWS, "made_durable",
     log_before_commit),
    ("signals", "every rank hears of it", "training.step:share", ROWS, "sigterm",
     wrapping(lambda share, *args: (share(*args)[0], [int(number) for number in args[-1]]))),
    ("signals", "nobody needs to read what is printed", "base.program:outlast_readers", ROWS,
     "ctrl_c"),
    ("signals", "nobody waits for a reader", "base.program:SECONDS_FOR_A_READER", ROWS,
     "does_not_read", is_now(3600.0)),
    ("signals", "handled at all", "processes.stop:_under_nohup", ROWS, "sigterm", gives(True)),
    ("signals", "a lost terminal asks once", "processes.stop:StopSignal._handle", STOP, "terminal",
     hangup_as_sigterm),
    ("signals", "nohup is heeded", "processes.stop:_under_nohup", STOP, "terminal", gives(False)),
    ("signals", "a second one ends at once", "processes.stop:StopSignal._handle", STOP,
     "second_signal", without_interrupt),
    ("signals", "one that is delivered twice is one", "processes.stop:StopSignal._handle", STOP,
     "delivered_twice", after_setting("until", 0.0)),
    ("signals", "a request to stop ends an evaluation",
     "training.evaluation:Evaluation._until_stopped", EVALUATION, "heard_inside",
     is_now(lambda self, batches, is_first: batches.stream(0))),
    ("signals", "an evaluation that was cut off is made up", "run.save:evaluates_first", EVALUATION,
     "heard_inside",
     wrapping(lambda first, plan, flags: plan.start.step == 0 and first(plan, flags))),
    ("signals", "torchrun doesn't start again what was stopped", "processes.launch:for_launcher",
     ROWS, "asked_to_stop_is_not", is_now(lambda code: code)),
    ("signals", "stop and save_now files", "processes.stop:STOP_FILE", STOP, "file", is_now("no")),
    ("damage", "a file that can't be read", "base.files:check_files", FALLBACK, "cannot_be_read",
     without_trace_of_unreadable),
    ("damage", "in what a new run starts from", "run.supervision:require_whole", FALLBACK,
     "new_run_from"),
    ("damage", "hashes", "base.files:check_files", DAMAGE, "flipped",
     wrapping(lambda check, folder, entries, hashes, *rest: check(folder, entries, False, *rest))),
    ("damage", "sizes", "base.files:check_files", DAMAGE, "truncated", with_actual_sizes),
    ("damage", "missing files", "base.files:check_files", DAMAGE, "missing",
     wrapping(lambda check, at, entries, *rest: check(at, there(at, entries), *rest))),
    ("damage", "files that nobody wrote", "base.files:files_in", DAMAGE, "nobody_wrote",
     only_listed),
    ("damage", "falls back to the newest whole one", "checkpoint.keep:newest_valid", FALLBACK,
     "falls_back", newest_or_none),
    ("damage", "a named one is never replaced", "plan.resumption:choose", FALLBACK,
     "never_replaced", wrapping(lambda choose, flags, *rest: choose(replace(
         flags, checkpoint=replace(flags.checkpoint, checkpoint=None)), *rest))),
    ("restart", "a branch goes on where it is", "plan.resumption:is_restarted", ROWS, "branch",
     gives(False)),
    ("a rank fails", "the first fault is told", "processes.watch:Watch.put_first", ROWS,
     "first_error", own_fault),
    ("a rank fails", "its fault is remembered when the store has gone",
     "processes.watch:Watch.refresh", WATCH, "known_once_the_store_has_gone",
     after_setting("first", None)),
    ("a rank fails", "its death is seen by who started it", "processes.launch:Children.dead",
     ROWS, "killed_rank_of_a_plain"),
    ("a rank fails", "no rank outlives rank 0", "base.machine:PR_SET_PDEATHSIG", ROWS,
     "frozen_rank_of_a_plain", is_now(0)),
    ("a rank fails", "a command ends as its first rank", "run.supervision:_end", ROWS,
     "ends_as_the_first", lost_with_the_others),
    ("a rank fails", "one command for all ranks", "run.supervision:ranks", ROWS, "two_commands",
     with_names(gather=lambda value: [value])),
    ("a rank fails", "ranks get their own numbers", "processes.launch:subprocess", ROWS,
     "numbered_already", with_names(Popen=lambda command, env: subprocess.Popen(
         command, env={**env, **{name: os.environ[name] for name in ("RANK", "LOCAL_RANK")}}))),
    ("a rank fails", "an end before training is told", "plan.run_directory:leave", ROWS,
     "ends_before_training"),
    ("a rank fails", "no rank waits for a store that has gone", "processes.watch:Watch.refresh",
     ROWS, "while_rank_0_is_frozen", PATIENT),
    ("a rank hangs", "heartbeats are listened to", "processes.watch:hanging", ROWS,
     "hangs_or_is_frozen and hang"),
    ("a rank hangs", "judged by the number of collectives", "processes.watch:hanging",
     ROWS, "hangs_or_is_frozen and hang", wrapping(lambda original, beats, seconds: original(
         {rank: {**beat, "collectives": 0} for rank, beat in beats.items()}, seconds))),
    ("a rank hangs", "work that goes on is no hang", "processes.watch:MAX_SECONDS_BETWEEN_LOOKS",
     WATCH, "suspended", is_now(float("inf"))),
    ("a rank hangs", "a silent rank is told from a busy one", "processes.watch:Watch._silence",
     ROWS, "hangs_or_is_frozen and stop", gives(0.0)),
    ("a rank hangs", "rank 0, with the store, is watched too", "processes.watch:Watch._silent",
     ROWS, "hears_of_rank_0s_death"),
    ("a rank hangs", "nobody waits for a frozen store", "processes.watch:Watch.refresh", ROWS,
     "while_rank_0_is_frozen", PATIENT),
    ("a rank hangs", "rank 0's own story stays", "run.supervision:run_status", ROWS,
     "told_by_rank_0", with_names(read_status=lambda folder: {})),
    ("node lost", "ranks are counted anew", "processes.launch:launched_world", ROWS, "lost_node"),
    ("ranks", "a flag that isn't the launcher's is refused", "processes.launch:launched_world",
     WORLD, "world_is_the_launchers", wrapping(lambda original, asked: original({}))),
    ("ranks", "what was read is recorded", "verify.inspect_run:claimed_by", WORLD,
     "not_read_as_claimed", gives(ANY)),
    ("disk full", "room is asked for", "base.files:room", ROWS, "no_room"),
    ("directory", "one disk for all machines", "run.build:require_shared_directory", ROWS,
     "do_not_share"),
    ("directory", "one run at a time", "plan.run_directory:fcntl", ROWS, "two_runs",
     with_names(flock=nothing)),
    ("directory", "a file system without locks is no obstacle", "plan.run_directory:NO_LOCKS", ROWS,
     "without_locks", is_now(())),
    ("directory", "an end isn't hidden by a status that can't be written",
     "plan.run_status:write_atomically", ROWS, "hides_nothing", with_another_error),
    ("directory", "tried before the model is built", "plan.run_directory:require_writable",
     CHECKPOINT, "cannot_be_made"),
    ("directory", "a fresh one goes when the plan is wrong", "plan.run_directory:_has_content",
     BAD_INPUT, "another_tokenizer", is_now(lambda folder: True)),
    ("another model", "shapes are compared", "plan.model_plan:state_dicts", BAD_INPUT,
     "another_model", with_names(saved_shapes=lambda skeleton: [])),
    ("another model", "precision, data and seed stay", "plan.same_run:_differences", BAD_INPUT,
     "run_that_is_there",
     wrapping(lambda original, then, now: {} if "precision" in now else original(then, now))),
    ("other ranks", "order doesn't depend on their number", "data.batches:Batches.indices",
     WORLD_CYCLE, "sharded-fsdp",
     wrapping(lambda read, self, at: read(replace(self, mixture=self.mixture and replace(
         self.mixture, seed=self.mixture.seed + self.world_size)), at))),
    ("other schedule", "refused unless named", "plan.checks:overrides", BAD_INPUT,
     "run_that_is_there", wrapping(lambda original, flags: list(flags.declared()))),
    ("other schedule", "the new curve is shown", "plan.same_run:_curves", ROWS, "extending",
     gives([])),
    ("rollback", "later checkpoints are moved aside", "checkpoint.retention:move_aside", CHECKPOINT,
     "rollback", gives([])),
    ("rollback", "isn't made again by a restart", "plan.resumption:_goes_on_from", ROWS,
     "rollback_that_is_restarted", gives(False)),
    ("other machines", "take what rank 0 has chosen", "run.supervision:ranks",
     ROWS, "machines_without_torchrun", newest_by_name_elsewhere),
    ("dataset", "its hashes", "base.files:check_files", DAMAGE, "dataset",
     is_now(lambda *args: None)),
    ("dataset", "token ids fit the vocabulary", "plan.model_plan:require_rows_for", BAD_INPUT,
     "test_datasets"),
    ("dataset", "a batch without targets", "training.step:count_targets", NUMERICS,
     "without_any_target", without_minimum),
    ("mixture", "no source is read more often than it may be", "data.stages:_first_passed",
     LAW_12, "do_not_go_together"),
    ("mixture", "all sources have one tokenizer", "plan.data_plan:_require_one_tokenizer", LAW_12,
     "different_tokenizers"),
    ("mixture", "what was read is recorded", "verify.inspect_run:claimed_by", LAW_12,
     "that_were_not_read", gives(ANY)),
    ("not finite", "the step is left out", "training.guard:Guard._judge", NON_FINITE,
     "none_of_them and fsdp2", takes_anything),
    ("not finite", "loss and NaN of one rank are everybody's", "training.step:sum_over_ranks",
     LAW_1, "fsdp2-2",
     wrapping(lambda add, fabric, one: one if one.is_floating_point() else add(fabric, one))),
    ("not finite", "no checkpoint holds one", "checkpoint.writing:is_finite", NON_FINITE,
     "checkpoint_of_a_model", gives(True)),
    ("not finite", "the limit", "training.guard:Guard.gives_up", GUARD, "too_many", gives(False)),
    ("tracker", "its failures are no failures", "run.trackers:Trackers._work", METRICS,
     "tracker_that_fails", without_try),
    ("tracker", "it never holds the run up", "run.trackers:Trackers.log", METRICS,
     "tracker_that_is_slow",
     is_now(lambda self, step, record: [log(step, record) for log, _ in self.opened.values()])),
    ("device memory", "recognised", "base.faults:_MEMORY_WORDS", ROWS, "out_of_memory", is_now(())),
    ("security", "files that could run code", "base.files:CODE_SUFFIXES", SECURITY,
     "attack and pickle", is_now(())),
    ("security", "names that lead outside", "base.files:check_name",
     SECURITY, "attack and (above or absolute or backslashes)"),
    ("security", "links", "plan.run_directory:no_link", SECURITY, "attack and link",
     is_now(lambda path: path)),
    ("clock", "order is by step", "base.files:step_directories", ROWS, "clocks",
     wrapping(lambda original, run: sorted(original(run), key=lambda path: path.stat().st_mtime))),
    ("retention", "pinned", "checkpoint.retention:is_pinned", ROWS, "retention", gives(False)),
    ("retention", "the best", "checkpoint.retention:_eval_loss", CHECKPOINT, "prune_keeps_the_best",
     gives(float("inf"))),
    ("retention", "the one resumed from", "checkpoint.retention:prune", ROWS, "retention",
     wrapping(lambda original, run, kept: original(run, replace(kept, named=None)))),
]]  # fmt: skip


def replacement(mechanism: Mechanism) -> tuple[Any, str, Any]:
    """(what has it, its name there, what takes its place). Raises AttributeError or ImportError
    where it isn't there any more."""
    module, _, name = mechanism.target.partition(":")
    owners, _, attribute = name.rpartition(".")
    owner = resolve_name(f"fabric_llm.{module}:{owners}")
    return owner, attribute, mechanism.instead(getattr(owner, attribute))


def install() -> None:
    """Called by sitecustomize.py when Python starts: patch a module as soon as it is loaded."""
    (mechanism,) = (one for one in MECHANISMS if one.key == os.environ[TAKEN_AWAY])
    load = SourceFileLoader.exec_module

    def exec_module(self: SourceFileLoader, module: ModuleType) -> None:
        load(self, module)
        if module.__name__ == f"fabric_llm.{mechanism.target.partition(':')[0]}":
            setattr(*replacement(mechanism))
            Path(os.environ[PATCHED]).touch()

    SourceFileLoader.exec_module = exec_module


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[""], help="with one of these in the name")
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    results = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        os.environ |= {"TMPDIR": name, "OMP_NUM_THREADS": "1"}
        for one in MECHANISMS:
            if any(words in one.key for words in options.only):
                began = time.monotonic()
                results.append(verdict(Path(name), one))
                print(f"{results[-1]:9} {one.key} ({time.monotonic() - began:.0f} s)", flush=True)
    noticed = results.count("noticed")
    print(f"Of {len(results)} mechanisms that were taken away, tests noticed {noticed}.")
    raise SystemExit(noticed < len(results))


def verdict(folder: Path, mechanism: Mechanism) -> str:
    """noticed (the tests fail without it), unnoticed, stale (it isn't there), or broken (the tests
    fail anyway, or don't use it)."""
    if is_stale(mechanism):
        return "stale"
    if not passes(mechanism.tests, mechanism.select):
        return "broken"
    patched = folder / "patched"
    patched.unlink(missing_ok=True)
    hook = "from benchmarks.mechanisms import install\n\ninstall()\n"
    (folder / "sitecustomize.py").write_text(hook)
    variables = {TAKEN_AWAY: mechanism.key, PATCHED: str(patched)}
    path = f"{folder}{os.pathsep}{ROOT}"
    passed = _run(mechanism.tests, mechanism.select, PYTHONPATH=path, **variables)
    if not patched.exists():
        return "broken"
    return "unnoticed" if passed else "noticed"


def is_stale(mechanism: Mechanism) -> bool:
    """Whether what it replaces doesn't exist any more."""
    try:
        replacement(mechanism)
    except (ImportError, AttributeError):
        return True
    return False


@cache
def passes(tests: str, select: str) -> bool:
    """Whether the tests pass with everything in its place."""
    return _run(tests, select, PYTHONPATH=str(ROOT))


def _run(tests: str, select: str, **variables: str) -> bool:
    """Whether tests pass in the time there is; at least one must be selected."""
    options = ["-q", "-x", "-p", "no:cacheprovider", "-m", "", "-k", select, f"tests/{tests}"]
    how = {"cwd": ROOT, "env": {**os.environ, **variables}, "start_new_session": True}
    how |= {"stdout": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
    with subprocess.Popen([sys.executable, "-m", "pytest", *options], **how) as process:
        try:
            return process.wait(TIMEOUT_SECONDS) == 0
        except subprocess.TimeoutExpired:
            return False
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # whatever it has left behind


if __name__ == "__main__":
    main()
