"""Take away what keeps a run safe, one mechanism after the other: does a test notice?

    python benchmarks/mechanisms.py                # all, about half an hour on two cores
    python benchmarks/mechanisms.py --only hashes  # those whose name holds a word

Each mechanism of docs/faults.md is removed from a copy of the source by replacing a few words; then the tests that hold
its row must fail. A test that passes without what it is there for is worth nothing. A mechanism whose words have changed is
reported as stale: bring its entry below up to date.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
COPIED = shutil.ignore_patterns(".git", "checkpoints", "data", "wandb", "__pycache__", ".*_cache", "*.egg-info")
TIMEOUT_SECONDS = 400  # without its mechanism a test may hang: that is a failure as well
KILLS, ROWS, DAMAGE = "tests/faults/test_kills.py", "tests/faults/test_rows.py", "tests/faults/test_damage.py"
CHECKPOINT, SECURITY, STOP = "tests/test_checkpoint.py", "tests/test_security.py", "tests/test_stop.py"
EVALUATION, WORLD = "tests/test_evaluation.py", "tests/test_launched_world.py"


@dataclass(frozen=True)
class Mechanism:
    """What is removed, and the tests that must fail then."""

    row: str  # of docs/faults.md
    name: str
    file: str
    old: str  # stands exactly once in the file
    new: str
    tests: str  # of one file
    select: str  # pytest -k


MECHANISMS = [
    Mechanism("kill", "log is cut back to the checkpoint", "fabric_llm/metrics.py",
              "_step_of(line) <= resumed_step]", "_step_of(line) < float('inf')]", KILLS, "named_point and between_steps"),
    Mechanism("kill", "optimizer state is loaded", "set_up.py",
              "if resume_from is not None:", "if False:", KILLS, "named_point and between_steps and full"),
    Mechanism("kill", "randomness follows the step", "fabric_llm/step.py",
              "random_key(seed, step, rank)", "random_key(seed, torch.initial_seed() % 2**31, rank)", KILLS, "named_point and between_steps and full"),
    Mechanism("kill in a save", "written beside its name", "fabric_llm/checkpoint.py",
              'target.with_name(f".tmp-{target.name}-{secrets.token_hex(4)}")', "target", KILLS, "named_point and save.parts and sharded"),
    Mechanism("kill in a save", "on the disk before the name", "fabric_llm/checkpoint.py",
              "        fsync(path)\n", "        pass\n", CHECKPOINT, "everything_is_on_disk"),
    Mechanism("kill in a save", "files are durable", "fabric_llm/manifest.py",
              "            self.written.append(self.syncing.submit(fsync, self.folder / name))\n", "", CHECKPOINT, "everything_is_on_disk"),
    Mechanism("kill in a save", "leftovers are swept", "fabric_llm/retention.py",
              "    for path in leftovers:\n", "    for path in []:\n", KILLS, "named_point and save.parts and full"),
    Mechanism("kill in a prune", "renamed before it is removed", "fabric_llm/retention.py",
              "        path.rename(trash)\n", "        trash = path\n", CHECKPOINT, "prune_that_is_cut_off"),
    Mechanism("kill in a background save", "a copy is written", "run.py",
              "copy=self.background is not None and not last", "copy=False", ROWS, "save_in_the_background_writes"),
    Mechanism("a save raises", "on all ranks", "fabric_llm/checkpoint.py",
              "    rank, problem = found\n", "    rank, problem = found\n    if rank != pending.rank:\n        return\n", ROWS, "save_that_raises"),
    Mechanism("a save raises", "in the background as well", "fabric_llm/checkpoint.py",
              "    _agree(pending, [problem for _, problem in answers])\n", "", ROWS, "save_that_raises"),
    Mechanism("a save raises", "nothing is left behind", "fabric_llm/checkpoint.py",
              "        shutil.rmtree(pending.temporary, ignore_errors=True)\n", "        pass\n", ROWS, "save_that_raises"),
    Mechanism("signals", "every rank hears of it", "run.py",
              "stop_askers, save_askers, writers = result.asked", "stop_askers, save_askers, writers = self.ask()", ROWS, "sigterm"),
    Mechanism("signals", "nobody needs to read what is printed", "train.py",
              "    outlast_readers()\n", "", ROWS, "ctrl_c"),
    Mechanism("signals", "nobody waits for a reader", "fabric_llm/console.py",
              "is_read = bool(select.select([], [self.stream], [], self.patience_seconds)[1])", "is_read = True", ROWS, "does_not_read"),
    Mechanism("signals", "handled at all", "fabric_llm/stop.py",
              "for number in SIGNALS if not _under_nohup(number)}", "for number in ()}", ROWS, "sigterm"),
    Mechanism("signals", "a lost terminal asks once", "fabric_llm/stop.py",
              "if again or ", "if ", STOP, "terminal"),
    Mechanism("signals", "nohup is heeded", "fabric_llm/stop.py",
              "return number == signal.SIGHUP and", "return False and", STOP, "terminal"),
    Mechanism("signals", "a second one ends at once", "fabric_llm/stop.py",
              "            raise KeyboardInterrupt", "            KeyboardInterrupt", STOP, "second_signal"),
    Mechanism("signals", "one that is delivered twice is one", "fabric_llm/stop.py",
              "if again or time.monotonic() < self.until:", "if again:", STOP, "delivered_twice"),
    Mechanism("signals", "a request to stop ends an evaluation", "run.py",
              "                self.evaluation_cut_off = True\n                return\n", "                pass\n", EVALUATION, "heard_inside"),
    Mechanism("signals", "an evaluation that was cut off is made up", "train.py",
              "progress.step == 0 or run.owes_evaluation", "progress.step == 0", EVALUATION, "heard_inside"),
    Mechanism("signals", "torchrun doesn't start again what was stopped", "fabric_llm/launch.py",
              "DONE if code == STOPPED and count < most else code", "code", ROWS, "asked_to_stop_is_not"),
    Mechanism("kill in a save", "leftovers go before the disk is asked", "run.py",
              "            run_directory.sweep(self.directory)\n", "", CHECKPOINT, "killed_save_left"),
    Mechanism("a save raises", "at the log as well", "run.py",
              "checkpoint.commit(pending, before=self.make_log_durable)", "self.rank_zero and self.make_log_durable(); checkpoint.commit(pending)", ROWS, "made_durable"),
    Mechanism("damage", "a file that can't be read", "fabric_llm/manifest.py",
              "        except OSError as error:  # a bad", "        except ZeroDivisionError as error:  # a bad", "tests/test_fallback.py", "cannot_be_read"),
    Mechanism("damage", "in what a new run starts from", "preflight.py",
              "        check_start(arguments, Path(source))\n", "        pass\n", "tests/test_fallback.py", "new_run_from"),
    Mechanism("restart", "a branch goes on where it is", "resume.py",
              "goes_on = given is not None and _restarted(arguments) and", "goes_on = False and", ROWS, "branch"),
    Mechanism("signals", "stop and save_now files", "fabric_llm/stop.py",
              "there = file.is_file()", "there = False", STOP, "file"),
    Mechanism("a rank fails", "the first fault is told", "fabric_llm/watch.py",
              "        return self.known or (self.rank, fault)\n", "        return self.rank, fault\n", ROWS, "first_error"),
    Mechanism("a rank fails", "its fault is remembered when the store has gone", "fabric_llm/watch.py",
              "        if said is not None:\n            there", "        self.known = None\n        if said is not None:\n            there", ROWS, "full_disk_at_the_log"),
    Mechanism("a rank fails", "its death is seen by who started it", "fabric_llm/launch.py",
              "if code := process.poll():", "if code := 0:", ROWS, "killed_rank_of_a_plain"),
    Mechanism("a rank fails", "no rank outlives rank 0", "fabric_llm/launch.py",
              "    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)\n", "", ROWS, "frozen_rank_of_a_plain"),
    Mechanism("a rank fails", "a command ends as its first rank", "supervise.py",
              "first.code == STOPPED or children.processes", "first.code == STOPPED", ROWS, "ends_as_the_first"),
    Mechanism("a rank fails", "one command for all ranks", "assemble.py",
              "            if own[name] != value:\n", "            if False:\n", ROWS, "two_commands"),
    Mechanism("a rank fails", "ranks get their own numbers", "fabric_llm/launch.py",
              '"RANK": str(rank), PARENT', 'PARENT', ROWS, "numbered_already"),
    Mechanism("a rank fails", "an end before training is told", "assemble.py",
              "                run_directory.leave(fault)\n", "", ROWS, "ends_before_training"),
    Mechanism("a rank hangs", "heartbeats are listened to", "fabric_llm/watch.py",
              "self._lost_store() or self._hangs()", "self._lost_store()", ROWS, "hangs_or_is_frozen and hang"),
    Mechanism("a rank hangs", "work that goes on is no hang", "fabric_llm/watch.py",
              "            if not self._is_still():  # a job that was suspended goes on\n", "            if False:\n", "tests/test_watch.py", "suspended"),
    Mechanism("a rank hangs", "a silent rank is told from a busy one", "fabric_llm/watch.py",
              "silent = [rank for rank in others if rank not in self.heard or self._silence(rank) > self.patience]", "silent = []", ROWS, "hangs_or_is_frozen and stop"),
    Mechanism("a rank hangs", "rank 0, with the store, is watched too", "fabric_llm/watch.py",
              "self._lost_child() or self._lost_store() or", "self._lost_child() or", ROWS, "hears_of_rank_0s_death"),
    Mechanism("a rank hangs", "nobody waits for a frozen store", "fabric_llm/watch.py",
              ".result(self.patience_seconds)", ".result()", ROWS, "just_before and stop"),
    Mechanism("a rank hangs", "rank 0's own story stays", "supervise.py",
              '        if run_directory.read_status(directory).get("code") is None:\n', "        if True:\n", ROWS, "told_by_rank_0"),
    Mechanism("a rank fails", "no rank waits for a store that has gone", "fabric_llm/watch.py",
              "self.store.patience_seconds = SECONDS_TO_ANSWER", "pass", ROWS, "while_rank_0_is_frozen"),
    Mechanism("node lost", "ranks are counted anew", "mistakes.py",
              "    return launched or asked", "    return asked", ROWS, "lost_node"),
    Mechanism("ranks", "a flag that isn't the launcher's is refused", "fabric_llm/launch.py",
              'if asked.get(name, "auto") not in ("auto", there):', "if False:", WORLD, "world_is_the_launchers"),
    Mechanism("ranks", "what was read is recorded", "fabric_llm/inspect_run.py",
              "    elif read != claimed_rows(", "    elif False and read != claimed_rows(", WORLD, "not_read_as_claimed"),
    Mechanism("disk full", "room is asked for", "fabric_llm/check.py",
              "    if free < needed:\n", "    if False:\n", ROWS, "no_room"),
    Mechanism("directory", "one disk for all machines", "run.py",
              "        self.require_shared_directory()\n", "", ROWS, "do_not_share"),
    Mechanism("kill in a save", "published with what all have written", "fabric_llm/checkpoint.py",
              '        if size != entry["bytes"]:\n', "        if False:\n", ROWS, "published_only"),
    Mechanism("directory", "one run at a time", "fabric_llm/run_directory.py",
              "        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)\n", "", ROWS, "two_runs"),
    Mechanism("directory", "a file system without locks is no obstacle", "fabric_llm/run_directory.py",
              "NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)", "NO_LOCKS = ()", ROWS, "without_locks"),
    Mechanism("directory", "an end isn't hidden by a status that can't be written", "fabric_llm/run_directory.py",
              "        with suppress(OSError):\n", "        if True:\n", ROWS, "hides_nothing"),
    Mechanism("directory", "tried before the model is built", "fabric_llm/run_directory.py",
              "        with tempfile.TemporaryFile(dir=folder if folder.exists() else folder.parent):\n            pass\n", "        pass\n", CHECKPOINT, "cannot_be_made"),
    Mechanism("damage", "hashes", "fabric_llm/manifest.py",
              '            if found != entry["sha256"]:\n', "            if False:\n", DAMAGE, "flipped"),
    Mechanism("damage", "sizes", "fabric_llm/manifest.py",
              '        if file.stat().st_size != entry["bytes"]:\n', "        if False:\n", DAMAGE, "truncated"),
    Mechanism("damage", "missing files", "fabric_llm/manifest.py",
              "        if not file.is_file():\n            raise Fault(f\"{wrong}: {name} is missing.\", code)\n", "        if not file.is_file():\n            continue\n", DAMAGE, "missing"),
    Mechanism("damage", "files that nobody wrote", "fabric_llm/manifest.py",
              "        if name not in listed:\n", "        if False:\n", DAMAGE, "nobody_wrote"),
    Mechanism("damage", "falls back to the newest whole one", "fabric_llm/retention.py",
              "            problems.append(str(fault))\n", "            raise\n", "tests/test_fallback.py", "falls_back"),
    Mechanism("damage", "a named one is never replaced", "resume.py",
              "        checkpoint.verified(given, hashes)\n        return given\n", "        pass\n", "tests/test_fallback.py", "never_replaced"),
    Mechanism("another model", "shapes are compared", "preflight.py",
              "        if differing:\n            words = (", "        if False:\n            words = (", "tests/test_bad_input.py", "another_model"),
    Mechanism("another model", "precision, data and seed stay", "resume.py",
              "    if fixed:\n", "    if False:\n", "tests/test_bad_input.py", "run_that_is_there"),
    Mechanism("other ranks", "order doesn't depend on their number", "fabric_llm/data.py",
              "_order(len(self.rows), self.seed, int(e))", "_order(len(self.rows), self.seed + self.world_size, int(e))", "tests/faults/test_world_cycle.py", "sharded-fsdp"),
    Mechanism("other schedule", "refused unless named", "resume.py",
              "    if silent := {name: values for name, values in schedule.items() if name not in allowed}:\n", "    if silent := {}:\n", "tests/test_bad_input.py", "run_that_is_there"),
    Mechanism("other schedule", "the new curve is shown", "resume.py",
              '        lines += _curves(plan, {**document["schedule"], "max_step": document["end_step"]}, now["schedule"])\n', "        pass\n", ROWS, "extending"),
    Mechanism("rollback", "later checkpoints are moved aside", "fabric_llm/retention.py",
              "        if step_of(path) > after_step:\n", "        if False:\n", CHECKPOINT, "rollback"),
    Mechanism("rollback", "isn't made again by a restart", "resume.py",
              "for path in reversed(retention.checkpoints(directory)):\n        with suppress", "for path in ():\n        with suppress", ROWS, "rollback_that_is_restarted"),
    Mechanism("other machines", "take what rank 0 has chosen", "assemble.py",
              "(started_by_other() or starts and place.num_nodes > 1)", "started_by_other()", ROWS, "machines_without_torchrun"),
    Mechanism("dataset", "its hashes", "fabric_llm/data.py",
              "        files.check_files(folder", "        0 and files.check_files(folder", DAMAGE, "dataset"),
    Mechanism("dataset", "token ids fit the vocabulary", "preflight.py",
              "    if dataset.max_token_id >= text_config.vocab_size:\n", "    if False:\n", "tests/test_bad_input.py", "test_datasets"),
    Mechanism("dataset", "a batch without targets", "fabric_llm/step.py",
              "    targets = targets.clamp(min=1)", "    targets = targets * 1", "tests/test_numerics.py", "without_any_target"),
    Mechanism("not finite", "the step is left out", "fabric_llm/guard.py",
              "        if not (math.isfinite(loss) and math.isfinite(grad_norm)):\n", "        if False:\n", "tests/faults/test_non_finite.py", "none_of_them and fsdp2"),
    Mechanism("not finite", "loss and NaN of one rank are everybody's", "fabric_llm/step.py",
              "    loss, *asked = sum_over_ranks(fabric, torch.cat([total.flatten(), requests])).tolist()\n", "    loss, *asked = torch.cat([total.flatten(), requests]).tolist()\n", "tests/test_law_1_one_big_batch.py", "fsdp2-2"),
    Mechanism("not finite", "no checkpoint holds one", "fabric_llm/checkpoint.py",
              "    if found := [name for name in gather(bad) if name is not None]:\n", "    if found := []:\n", "tests/faults/test_non_finite.py", "checkpoint_of_a_model"),
    Mechanism("not finite", "the limit", "fabric_llm/guard.py",
              "return self.skipped > self.max_skipped_steps", "return False", "tests/test_guard.py", "too_many"),
    Mechanism("tracker", "its failures are no failures", "fabric_llm/trackers.py",
              "                self.failure = error\n", "                raise error\n", "tests/test_metrics.py", "tracker_that_fails"),
    Mechanism("tracker", "it never holds the run up", "fabric_llm/trackers.py",
              "self.waiting.put(partial(self._log, step, dict(record)))", "self._log(step, dict(record))", "tests/test_metrics.py", "tracker_that_is_slow"),
    Mechanism("device memory", "recognised", "fabric_llm/faults.py",
              "    return isinstance(error, RuntimeError) and any(word in words for word in _MEMORY_WORDS)", "    return False", ROWS, "out_of_memory"),
    Mechanism("security", "files that could run code", "fabric_llm/manifest.py",
              "        if name.lower().endswith(CODE_SUFFIXES):\n", "        if False:\n", SECURITY, "attack and pickle"),
    Mechanism("security", "names that lead outside", "fabric_llm/manifest.py",
              '    if plain.is_absolute() or ".." in plain.parts', "    if False and plain.is_absolute() or False and '..' in plain.parts", SECURITY, "attack and (above or absolute or backslashes)"),
    Mechanism("security", "links", "fabric_llm/run_directory.py",
              "    if path.is_symlink():\n", "    if False:\n", SECURITY, "attack and link"),
    Mechanism("clock", "order is by step", "fabric_llm/retention.py",
              "return sorted(found, key=step_of)", "return sorted(found, key=lambda path: path.stat().st_mtime)", ROWS, "clocks"),
    Mechanism("retention", "pinned", "fabric_llm/retention.py",
              "every or pinned or", "every or", ROWS, "retention"),
    Mechanism("retention", "the best", "fabric_llm/retention.py",
              " or step_of(path) in best", "", CHECKPOINT, "prune_keeps_the_best"),
    Mechanism("retention", "the one resumed from", "fabric_llm/retention.py",
              " or path.resolve() == resumed_from", "", ROWS, "retention"),
]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[""], help="mechanisms whose row or name holds one of these")
    parser.add_argument("--output", type=Path, default=None, help="JSON file for the results")
    parser.add_argument("--markdown", type=Path, default=None, help="Markdown file for the results as a table")
    options = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name) / "fabric_llm"
        shutil.copytree(ROOT, copy, ignore=COPIED)
        for mechanism in MECHANISMS:
            if any(words in f"{mechanism.row}: {mechanism.name}" for words in options.only):
                began = time.monotonic()
                found = verdict(copy, mechanism)
                result = {"row": mechanism.row, "mechanism": mechanism.name, "verdict": found}
                results.append({**result, "tests": f"{mechanism.tests} -k '{mechanism.select}'"})
                print(f"{found:9} {mechanism.row}: {mechanism.name} ({time.monotonic() - began:.0f} s)", flush=True)
    if options.output is not None:
        options.output.write_text(json.dumps(results, indent=2) + "\n")
    if options.markdown is not None:
        rows = ["| {row} | {mechanism} | {verdict} | `{tests}` |".format(**result) for result in results]
        head = ["| row | mechanism taken away | by the tests | tests |", "|---|---|---|---|"]
        options.markdown.write_text("\n".join([*head, *rows]) + "\n")
    noticed = sum(result["verdict"] == "noticed" for result in results)
    print(f"Of {len(results)} mechanisms that were taken away, tests noticed {noticed}.")
    raise SystemExit(noticed < len(results))


def verdict(copy: Path, mechanism: Mechanism) -> str:
    """noticed: the tests pass with it and fail without it. unnoticed, stale (its words aren't there), or broken."""
    file = copy / mechanism.file
    source = file.read_text()
    if source.count(mechanism.old) != 1:
        return "stale"
    if not passes(copy, mechanism.tests, mechanism.select):
        return "broken"
    file.write_text(source.replace(mechanism.old, mechanism.new))
    still = _run(copy, mechanism.tests, mechanism.select)
    file.write_text(source)
    return "unnoticed" if still else "noticed"


@cache
def passes(copy: Path, tests: str, select: str) -> bool:
    """Whether the tests pass with everything in its place."""
    return _run(copy, tests, select)


def _run(folder: Path, tests: str, select: str) -> bool:
    """Whether tests pass in `folder`, in the time there is; at least one must be selected."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "", "-k", select, tests]
    temporary = folder.parent / "tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    process = subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
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
