"""Take away what keeps a run safe, one mechanism after the other: does a test notice?

    python benchmarks/mechanisms.py                # all, about half an hour on two cores
    python benchmarks/mechanisms.py --only hashes  # those whose name holds a word

Each mechanism of docs/faults.md is a named function or constant. Something that lacks the mechanism is put in its place, in
every process that the tests start, right after its module is loaded and before others import it. The tests that hold its row
must then fail: a test that passes without what it is there for is worth nothing. A mechanism whose name doesn't exist any
more is reported as stale: bring its entry below up to date. The source isn't changed.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from operator import attrgetter
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

ROOT = Path(__file__).parent.parent
TAKEN_AWAY = "FABRIC_LLM_TAKEN_AWAY"  # an environment variable: a key
PATCHED = "FABRIC_LLM_PATCHED"  # another: a file, made once done
TIMEOUT_SECONDS = 400  # without its mechanism a test may hang, which is a failure as well
KILLS, ROWS, DAMAGE = "tests/faults/test_kills.py", "tests/faults/test_rows.py", "tests/faults/test_damage.py"
CHECKPOINT, SECURITY, STOP = "tests/test_checkpoint.py", "tests/test_security.py", "tests/test_stop.py"
EVALUATION, WORLD, FALLBACK = "tests/test_evaluation.py", "tests/test_launched_world.py", "tests/test_fallback.py"
BAD_INPUT, NON_FINITE = "tests/test_bad_input.py", "tests/faults/test_non_finite.py"
MIXTURE = "tests/test_law_12_mixture.py"


@dataclass(frozen=True)
class Mechanism:
    """What is replaced, and the tests that must fail then."""

    row: str  # of docs/faults.md
    name: str
    target: str  # "module:name" or "module:Class.name", in fabric_llm
    instead: Callable[[Any], Any]  # from what is there to what takes its place
    tests: str  # of one file
    select: str  # pytest -k

    @property
    def key(self) -> str:
        return f"{self.row}: {self.name}"


# ------------------------------------------------------------------------------- replacements


def gives(value: Any) -> Callable[[Any], Any]:
    """In the place of a function, one that does nothing and returns `value`."""
    return lambda original: lambda *args, **more: value


def is_now(value: Any) -> Callable[[Any], Any]:
    """In the place of a constant, another."""
    return lambda original: value


def with_names(**names: Any) -> Callable[[Any], Any]:
    """In the place of an imported module, one with some other names."""
    return lambda original: SimpleNamespace(**{**vars(original), **names})


def nothing(*args: Any, **more: Any) -> None:
    pass


def without_syncing(original):
    def __init__(self, folder):
        original(self, folder)
        self.syncing.shutdown()
        done = SimpleNamespace(result=nothing)
        self.syncing = SimpleNamespace(submit=lambda *args: done, shutdown=nothing)

    return __init__


def without_trace_of_unreadable(original):
    def check_files(*args):
        try:
            original(*args)
        except ValueError as fault:
            raise fault.__cause__ or fault

    return check_files


def with_actual_sizes(original):
    def check_files(folder, entries, *rest):
        sizes = {name: (folder / name).stat().st_size for name in entries if (folder / name).is_file()}
        original(folder, {name: {**e, "bytes": sizes.get(name, e["bytes"])} for name, e in entries.items()}, *rest)

    return check_files


def those_that_are_there(original):
    def check_files(folder, entries, *rest):
        original(folder, {name: entry for name, entry in entries.items() if (folder / name).is_file()}, *rest)

    return check_files


def only_listed(original):
    def files_in(folder):
        manifest = Path(folder, "MANIFEST.json")
        listed = json.loads(manifest.read_bytes())["files"] if manifest.is_file() else None
        return [name for name in original(folder) if listed is None or name in listed]

    return files_in


def once_still_always_still(original):
    def _is_still(self):
        self.was_still = getattr(self, "was_still", False) or original(self)
        return self.was_still

    return _is_still


def own_problem_alone(original):
    return lambda pending, problems: original(
        pending, [problem if rank == pending.rank else None for rank, problem in enumerate(problems)]
    )


def without_background_problem(original):
    def commit(pending, *args, **more):
        pending.problem = None
        return original(pending, *args, **more)

    return commit


def log_before_commit(original):
    def commit(pending, before=nothing):
        if pending.rank == 0:
            before()
        original(pending)

    return commit


def own_request_alone(original):
    return lambda fabric, total, asked: (original(fabric, total, asked)[0], [int(number) for number in asked])


def without_interrupt(original):
    def _handle(*args):
        with suppress(KeyboardInterrupt):
            original(*args)

    return _handle


def own_fault(original):
    def put_first(self, rank, fault):
        original(self, rank, fault)
        return rank, fault

    return put_first


def forgetful(original):
    def _remember(self, said):
        self.first = None
        original(self, said)

    return _remember


def patient(original):
    def ask(self, question):
        self.patience_seconds = None
        return original(self, question)

    return ask


def with_another_error(original):
    def write_atomically(*args, **more):
        try:
            original(*args, **more)
        except OSError as error:
            raise RuntimeError("not what is caught") from error

    return write_atomically


def newest_by_name_elsewhere(original):
    def chosen(flags, directory):
        from fabric_llm.base import step_names
        from fabric_llm.base.command_line import is_rank_zero
        from fabric_llm.plan import resume

        return resume.choose(flags, directory) if is_rank_zero() else step_names.latest(directory)

    return chosen


def without_counts(original):
    return lambda beats, seconds: original({rank: {**beat, "collectives": 0} for rank, beat in beats.items()}, seconds)


def newest_or_none(original):
    def newest_valid(run_directory, hashes):
        from fabric_llm.base.faults import NO_CHECKPOINT, Fault

        path, problems = original(run_directory, hashes)
        if problems:
            raise Fault(problems[0], NO_CHECKPOINT)
        return path, problems

    return newest_valid


def without_given(original):
    return lambda arguments, directory: original(
        replace(arguments, checkpoint=replace(arguments.checkpoint, checkpoint=None)), directory
    )


def takes_anything(original):
    def _judge(self, loss, grad_norm):
        finite = abs(loss) < float("inf") and abs(grad_norm) < float("inf")
        return original(self, loss, grad_norm) if finite else ("take", "")

    return _judge


def without_try(original):
    def _work(self):
        action = None
        while action is not self._close:
            action = self.waiting.get()
            action()

    return _work


class Anything:
    def __eq__(self, other):
        return True

    def __ne__(self, other):
        return False


FAULTS, FILES = "fabric_llm.base.faults", "fabric_llm.base.files"
WRITING, KEEP, READING = "fabric_llm.checkpoint.writing", "fabric_llm.checkpoint.keep", "fabric_llm.checkpoint.reading"
STOPPING, WATCH, LAUNCH = "fabric_llm.processes.stop", "fabric_llm.processes.watch", "fabric_llm.processes.launch"
BUILD, RESUME, PLAN = "fabric_llm.run.build", "fabric_llm.plan.resume", "fabric_llm.plan.plan"
DIRECTORY, JOINING, ENDING = "fabric_llm.plan.run_directory", "fabric_llm.plan.joining", "fabric_llm.run.ending"
SAME_RUN, DUE, TRACKERS = "fabric_llm.plan.same_run", "fabric_llm.run.due", "fabric_llm.plan.trackers"
STEP, GUARD, EVALUATING = "fabric_llm.training.step", "fabric_llm.training.guard", "fabric_llm.training.evaluation"

MECHANISMS = [
    Mechanism("kill", "log is cut back to the checkpoint", "fabric_llm.run.metrics:_step_of",
              gives(0), KILLS, "named_point and between_steps"),
    Mechanism("kill", "optimizer state is loaded", f"{READING}:load_optimizer",
              gives(None), KILLS, "named_point and between_steps and full"),
    Mechanism("kill", "randomness follows the step", f"{STEP}:seed_step",
              gives(None), KILLS, "named_point and between_steps and full"),
    Mechanism("kill in a save", "written beside its name", f"{WRITING}:from_first",
              lambda original: lambda value: re.sub(r"\.tmp-(step-\d+)-\w+$", r"\1", original(value)),
              KILLS, "named_point and save.parts and sharded"),
    Mechanism("kill in a save", "on the disk before the name", f"{WRITING}:fsync",
              gives(None), CHECKPOINT, "everything_is_on_disk"),
    Mechanism("kill in a save", "files are durable", f"{FILES}:Describing.__init__",
              without_syncing, CHECKPOINT, "everything_is_on_disk"),
    Mechanism("kill in a save", "leftovers are swept", f"{KEEP}:sweep",
              gives([]), KILLS, "named_point and save.parts and full"),
    Mechanism("kill in a prune", "renamed before it is removed", f"{KEEP}:_trash_of",
              lambda original: lambda path: path, CHECKPOINT, "prune_that_is_cut_off"),
    Mechanism("kill in a background save", "a copy is written", f"{WRITING}:begin",
              lambda original: lambda *args, **more: original(*args, **{**more, "copy": False}),
              ROWS, "save_in_the_background_writes"),
    Mechanism("a save raises", "on all ranks", f"{WRITING}:_agree",
              own_problem_alone, ROWS, "save_that_raises"),
    Mechanism("a save raises", "in the background as well", f"{WRITING}:commit",
              without_background_problem, ROWS, "save_that_raises"),
    Mechanism("a save raises", "nothing is left behind", f"{WRITING}:shutil",
              with_names(rmtree=nothing), ROWS, "save_that_raises"),
    Mechanism("signals", "every rank hears of it", f"{STEP}:share",
              own_request_alone, ROWS, "sigterm"),
    Mechanism("signals", "nobody needs to read what is printed", "fabric_llm.base.console:outlast_readers",
              gives(None), ROWS, "ctrl_c"),
    Mechanism("signals", "nobody waits for a reader", "fabric_llm.base.console:Lasting._is_read",
              gives(True), ROWS, "does_not_read"),
    Mechanism("signals", "handled at all", f"{STOPPING}:_under_nohup",
              gives(True), ROWS, "sigterm"),
    Mechanism("signals", "a lost terminal asks once", f"{STOPPING}:StopSignal._handle",
              lambda original: lambda self, number, frame: original(
                  self, signal.SIGTERM if number == signal.SIGHUP else number, frame), STOP, "terminal"),
    Mechanism("signals", "nohup is heeded", f"{STOPPING}:_under_nohup",
              gives(False), STOP, "terminal"),
    Mechanism("signals", "a second one ends at once", f"{STOPPING}:StopSignal._handle",
              without_interrupt, STOP, "second_signal"),
    Mechanism("signals", "one that is delivered twice is one", f"{STOPPING}:SECONDS_OF_ONE_REQUEST",
              is_now(0.0), STOP, "delivered_twice"),
    Mechanism("signals", "a request to stop ends an evaluation", f"{EVALUATING}:Evaluation._until_stopped",
              lambda original: lambda self: self.batches.stream(0), EVALUATION, "heard_inside"),
    Mechanism("signals", "an evaluation that was cut off is made up", f"{DUE}:evaluation_first",
              lambda original: lambda start, resumed: original(start, {}), EVALUATION, "heard_inside"),
    Mechanism("signals", "torchrun doesn't start again what was stopped", f"{LAUNCH}:for_launcher",
              lambda original: lambda code: code, ROWS, "asked_to_stop_is_not"),
    Mechanism("kill in a save", "leftovers go before the disk is asked", f"{DIRECTORY}:sweep",
              gives(None), CHECKPOINT, "killed_save_left"),
    Mechanism("a save raises", "at the log as well", f"{WRITING}:commit",
              log_before_commit, ROWS, "made_durable"),
    Mechanism("damage", "a file that can't be read", f"{FILES}:check_files",
              without_trace_of_unreadable, FALLBACK, "cannot_be_read"),
    Mechanism("damage", "in what a new run starts from", f"{PLAN}:check_start",
              gives(None), FALLBACK, "new_run_from"),
    Mechanism("restart", "a branch goes on where it is", f"{RESUME}:_restarted",
              gives(False), ROWS, "branch"),
    Mechanism("signals", "stop and save_now files", f"{STOPPING}:_take",
              gives(False), STOP, "file"),
    Mechanism("a rank fails", "the first fault is told", f"{WATCH}:Store.put_first",
              own_fault, ROWS, "first_error"),
    Mechanism("a rank fails", "its fault is remembered when the store has gone", f"{WATCH}:Store._remember",
              forgetful, ROWS, "full_disk_at_the_log"),
    Mechanism("a rank fails", "its death is seen by who started it", f"{LAUNCH}:Children.dead",
              gives(None), ROWS, "killed_rank_of_a_plain"),
    Mechanism("a rank fails", "no rank outlives rank 0", "fabric_llm.base.parent:PR_SET_PDEATHSIG",
              is_now(0), ROWS, "frozen_rank_of_a_plain"),
    Mechanism("a rank fails", "a command ends as its first rank", f"{ENDING}:_code_of_others",
              lambda original: lambda first, children: original(first, SimpleNamespace(processes={})),
              ROWS, "ends_as_the_first"),
    Mechanism("a rank fails", "one command for all ranks", f"{JOINING}:_require_one_command",
              gives(None), ROWS, "two_commands"),
    Mechanism("a rank fails", "ranks get their own numbers", f"{LAUNCH}:subprocess",
              lambda original: SimpleNamespace(Popen=lambda command, env: original.Popen(
                  command, env={**env, "RANK": os.environ["RANK"]})), ROWS, "numbered_already"),
    Mechanism("a rank fails", "an end before training is told", f"{DIRECTORY}:leave",
              gives(None), ROWS, "ends_before_training"),
    Mechanism("a rank hangs", "heartbeats are listened to", f"{WATCH}:Watch._hangs",
              gives(None), ROWS, "hangs_or_is_frozen and hang"),
    Mechanism("a rank hangs", "judged by the number of collectives", f"{WATCH}:hanging",
              without_counts, ROWS, "hangs_or_is_frozen and hang"),
    Mechanism("a rank hangs", "work that goes on is no hang", f"{WATCH}:Watch._is_still",
              once_still_always_still, "tests/test_watch.py", "suspended"),
    Mechanism("a rank hangs", "a silent rank is told from a busy one", f"{WATCH}:Watch._silence",
              gives(0.0), ROWS, "hangs_or_is_frozen and stop"),
    Mechanism("a rank hangs", "rank 0, with the store, is watched too", f"{WATCH}:Watch._lost_store",
              gives(None), ROWS, "hears_of_rank_0s_death"),
    Mechanism("a rank hangs", "nobody waits for a frozen store", f"{WATCH}:Store.ask",
              patient, ROWS, "just_before and stop"),
    Mechanism("a rank hangs", "rank 0's own story stays", f"{ENDING}:run_directory",
              with_names(read_status=lambda folder: {}), ROWS, "told_by_rank_0"),
    Mechanism("a rank fails", "no rank waits for a store that has gone", f"{WATCH}:Watch._end",
              lambda original: lambda self: self.ended.set(), ROWS, "while_rank_0_is_frozen"),
    Mechanism("node lost", "ranks are counted anew", "fabric_llm.plan.mistakes:launched_world",
              gives(None), ROWS, "lost_node"),
    Mechanism("ranks", "a flag that isn't the launcher's is refused", f"{LAUNCH}:launched_world",
              lambda original: lambda asked: original({}), WORLD, "world_is_the_launchers"),
    Mechanism("ranks", "what was read is recorded", "fabric_llm.verify.inspect_checkpoint:claimed_rows",
              gives(Anything()), WORLD, "not_read_as_claimed"),
    Mechanism("disk full", "room is asked for", f"{FILES}:room",
              gives(None), ROWS, "no_room"),
    Mechanism("directory", "one disk for all machines", f"{BUILD}:require_shared_directory",
              gives(None), ROWS, "do_not_share"),
    Mechanism("kill in a save", "published with what all have written", f"{WRITING}:_require_seen",
              gives(None), ROWS, "published_only"),
    Mechanism("directory", "one run at a time", f"{DIRECTORY}:fcntl",
              with_names(flock=nothing), ROWS, "two_runs"),
    Mechanism("directory", "a file system without locks is no obstacle", f"{DIRECTORY}:NO_LOCKS",
              is_now(()), ROWS, "without_locks"),
    Mechanism("directory", "an end isn't hidden by a status that can't be written", f"{DIRECTORY}:write_atomically",
              with_another_error, ROWS, "hides_nothing"),
    Mechanism("directory", "tried before the model is built", f"{DIRECTORY}:require_writable",
              gives(None), CHECKPOINT, "cannot_be_made"),
    Mechanism("directory", "a fresh one goes when the plan is wrong", f"{DIRECTORY}:leave",
              lambda original: lambda fault, has_plan=True: original(fault), BAD_INPUT, "another_tokenizer"),
    Mechanism("damage", "hashes", f"{FILES}:check_files",
              lambda original: lambda folder, entries, hashes, *rest: original(folder, entries, False, *rest),
              DAMAGE, "flipped"),
    Mechanism("damage", "sizes", f"{FILES}:check_files",
              with_actual_sizes, DAMAGE, "truncated"),
    Mechanism("damage", "missing files", f"{FILES}:check_files",
              those_that_are_there, DAMAGE, "missing"),
    Mechanism("damage", "files that nobody wrote", f"{FILES}:files_in",
              only_listed, DAMAGE, "nobody_wrote"),
    Mechanism("damage", "falls back to the newest whole one", f"{KEEP}:newest_valid",
              newest_or_none, FALLBACK, "falls_back"),
    Mechanism("damage", "a named one is never replaced", f"{RESUME}:choose",
              without_given, FALLBACK, "never_replaced"),
    Mechanism("another model", "shapes are compared", f"{PLAN}:state_dicts",
              with_names(shapes=lambda skeleton: []), BAD_INPUT, "another_model"),
    Mechanism("another model", "precision, data and seed stay", f"{SAME_RUN}:_differences",
              lambda original: lambda then, now: {} if "precision" in now else original(then, now),
              BAD_INPUT, "run_that_is_there"),
    Mechanism("other ranks", "order doesn't depend on their number", "fabric_llm.data.batches:Batches.indices",
              lambda original: lambda self, positions: original(
                  replace(self, seed=self.seed + self.world_size), positions),
              "tests/faults/test_world_cycle.py", "sharded-fsdp"),
    Mechanism("other schedule", "refused unless named", f"{RESUME}:overrides",
              lambda original: lambda arguments: sys.modules[RESUME].OVERRIDABLE, BAD_INPUT, "run_that_is_there"),
    Mechanism("other schedule", "the new curve is shown", f"{SAME_RUN}:_curves",
              gives([]), ROWS, "extending"),
    Mechanism("rollback", "later checkpoints are moved aside", f"{KEEP}:move_aside",
              gives([]), CHECKPOINT, "rollback"),
    Mechanism("rollback", "isn't made again by a restart", f"{RESUME}:_goes_on_from",
              gives(False), ROWS, "rollback_that_is_restarted"),
    Mechanism("other machines", "take what rank 0 has chosen", f"{JOINING}:_chosen_by_rank_zero",
              newest_by_name_elsewhere, ROWS, "machines_without_torchrun"),
    Mechanism("dataset", "its hashes", "fabric_llm.data.dataset:_check_files",
              lambda original: lambda folder, manifest, verify: "written" in manifest, DAMAGE, "dataset"),
    Mechanism("dataset", "token ids fit the vocabulary", f"{PLAN}:open_checked",
              lambda original: lambda *args: replace(original(*args), max_token_id=0), BAD_INPUT, "test_datasets"),
    Mechanism("mixture", "no source is read more often than it may be", "fabric_llm.plan.stages:_refuse_passed",
              gives(None), MIXTURE, "do_not_go_together"),
    Mechanism("mixture", "all sources have one tokenizer", "fabric_llm.plan.mixing:_require_one_tokenizer",
              gives(None), MIXTURE, "different_tokenizers"),
    Mechanism("mixture", "what was read is recorded", "fabric_llm.verify.inspect_checkpoint:claimed_by",
              gives(Anything()), MIXTURE, "that_were_not_read"),
    Mechanism("dataset", "a batch without targets", f"{STEP}:_at_least_one",
              lambda original: lambda count: count, "tests/test_numerics.py", "without_any_target"),
    Mechanism("not finite", "the step is left out", f"{GUARD}:Guard._judge",
              takes_anything, NON_FINITE, "none_of_them and fsdp2"),
    Mechanism("not finite", "loss and NaN of one rank are everybody's", f"{STEP}:sum_over_ranks",
              lambda original: lambda fabric, tensor: (
                  tensor if tensor.is_floating_point() else original(fabric, tensor)),
              "tests/test_law_1_one_big_batch.py", "fsdp2-2"),
    Mechanism("not finite", "no checkpoint holds one", f"{WRITING}:_is_finite",
              gives(True), NON_FINITE, "checkpoint_of_a_model"),
    Mechanism("not finite", "the limit", f"{GUARD}:Guard.gives_up",
              gives(False), "tests/test_guard.py", "too_many"),
    Mechanism("tracker", "its failures are no failures", f"{TRACKERS}:Tracker._work",
              without_try, "tests/test_metrics.py", "tracker_that_fails"),
    Mechanism("tracker", "it never holds the run up", f"{TRACKERS}:Tracker.log",
              lambda original: lambda self, step, record: self._log(step, dict(record)),
              "tests/test_metrics.py", "tracker_that_is_slow"),
    Mechanism("device memory", "recognised", f"{FAULTS}:_is_out_of_memory",
              gives(False), ROWS, "out_of_memory"),
    Mechanism("security", "files that could run code", f"{FILES}:CODE_SUFFIXES",
              is_now(()), SECURITY, "attack and pickle"),
    Mechanism("security", "names that lead outside", f"{FILES}:check_name",
              gives(None), SECURITY, "attack and (above or absolute or backslashes)"),
    Mechanism("security", "links", f"{DIRECTORY}:no_link",
              lambda original: lambda path: path, SECURITY, "attack and link"),
    Mechanism("clock", "order is by step", "fabric_llm.base.step_names:step_directories",
              lambda original: lambda run: sorted(original(run), key=lambda path: path.stat().st_mtime),
              ROWS, "clocks"),
    Mechanism("retention", "pinned", f"{KEEP}:is_pinned",
              gives(False), ROWS, "retention"),
    Mechanism("retention", "the best", f"{KEEP}:_eval_loss",
              gives(float("inf")), CHECKPOINT, "prune_keeps_the_best"),
    Mechanism("retention", "the one resumed from", f"{KEEP}:prune",
              lambda original: lambda *args: original(*args[:-1], None), ROWS, "retention"),
]  # fmt: skip


# ------------------------------------------------------------------------------- in the processes of the tests


class Finder:
    """Finds one module, once, as Python would, and patches it as soon as it is loaded."""

    def __init__(self, mechanism: Mechanism) -> None:
        self.mechanism = mechanism

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != self.mechanism.target.partition(":")[0]:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            owner, attribute = owner_of(self.mechanism, module)
            setattr(owner, attribute, self.mechanism.instead(getattr(owner, attribute)))
            Path(os.environ[PATCHED]).touch()

        spec.loader.exec_module = exec_module
        return spec


def install() -> None:
    """Called by sitecustomize.py when Python starts."""
    (mechanism,) = (one for one in MECHANISMS if one.key == os.environ[TAKEN_AWAY])
    sys.meta_path.insert(0, Finder(mechanism))


def owner_of(mechanism: Mechanism, module: ModuleType) -> tuple[Any, str]:
    """(what has it, its name there). Raises AttributeError where it isn't there."""
    owners, _, attribute = mechanism.target.partition(":")[2].rpartition(".")
    owner = attrgetter(owners)(module) if owners else module
    getattr(owner, attribute)
    return owner, attribute


# ------------------------------------------------------------------------------- the command


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[""], help="mechanisms whose row or name holds one of these")
    parser.add_argument("--markdown", type=Path, default=None, help="Markdown file for the results as a table")
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    from benchmarks import page

    lines = []
    with tempfile.TemporaryDirectory() as name:
        for mechanism in [one for one in MECHANISMS if any(words in one.key for words in options.only)]:
            began = time.monotonic()
            found = verdict(Path(name), mechanism)
            lines.append([mechanism.row, mechanism.name, found, f"`{mechanism.tests} -k '{mechanism.select}'`"])
            print(f"{found:9} {mechanism.key} ({time.monotonic() - began:.0f} s)", flush=True)
    if options.markdown is not None:
        table = page.table(["row", "mechanism taken away", "by the tests", "tests"], lines, words=4)
        options.markdown.write_text(table + "\n")
    noticed = sum(found == "noticed" for _, _, found, _ in lines)
    print(f"Of {len(lines)} mechanisms that were taken away, tests noticed {noticed}.")
    raise SystemExit(noticed < len(lines))


def verdict(folder: Path, mechanism: Mechanism) -> str:
    """noticed: the tests pass with it and fail without it. unnoticed, stale (it isn't there), unused (by these tests), broken."""
    if is_stale(mechanism):
        return "stale"
    if not passes(folder, mechanism.tests, mechanism.select):
        return "broken"
    patched = folder / "patched"
    patched.unlink(missing_ok=True)
    site = folder / "site"
    site.mkdir(exist_ok=True)
    (site / "sitecustomize.py").write_text("from benchmarks.mechanisms import install\n\ninstall()\n")
    variables = {TAKEN_AWAY: mechanism.key, PATCHED: str(patched), "PYTHONPATH": f"{site}{os.pathsep}{ROOT}"}
    if _run(folder, mechanism.tests, mechanism.select, variables):
        return "unnoticed" if patched.exists() else "unused"
    return "noticed" if patched.exists() else "broken"


def is_stale(mechanism: Mechanism) -> bool:
    """Whether what it replaces doesn't exist any more."""
    try:
        owner_of(mechanism, importlib.import_module(mechanism.target.partition(":")[0]))
    except (ModuleNotFoundError, AttributeError):
        return True
    return False


@cache
def passes(folder: Path, tests: str, select: str) -> bool:
    """Whether the tests pass with everything in its place."""
    return _run(folder, tests, select, {"PYTHONPATH": str(ROOT)})


def _run(folder: Path, tests: str, select: str, variables: dict[str, str]) -> bool:
    """Whether tests pass in the time there is; at least one must be selected."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "", "-k", select, tests]
    temporary = folder / "tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1", **variables},
        stdout=(folder / "output").open("w"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        return process.wait(TIMEOUT_SECONDS) == 0
    except subprocess.TimeoutExpired:
        return False
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # whatever it has left behind
        process.wait()


if __name__ == "__main__":
    main()
