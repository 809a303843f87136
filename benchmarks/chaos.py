"""Kill training at random, again and again: is the latest checkpoint ever unreadable, is anything
ever lost?

    python benchmarks/chaos.py --kills 500 --output chaos.json

After each kill everything that bears a checkpoint's name is read and hashed, and the steps that are
gone are counted. Runs and checks are those of tests/faults/test_kills.py.
"""

from __future__ import annotations

import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import conftest  # noqa: E402, F401  what the tests set in the environment
from faults import test_kills as tests  # noqa: E402
from ranks import Job  # noqa: E402

from benchmarks import inputs, page  # noqa: E402
from fabric_llm.base.faults import Fault  # noqa: E402

tests.STEPS = 15  # longer runs than theirs
KINDS = [  # strategy, --state_dict_type, --async_save
    ("fsdp", "full", "false"),
    ("fsdp", "sharded", "false"),
    ("fsdp2", "full", "false"),
    ("fsdp2", "sharded", "true"),
    ("fsdp", "full", "true"),
]
COUNTS = {  # docs/results/chaos.md says what they are
    "kills": "kills",
    "runs": "runs ended",
    "unreadable": "unreadable",
    "lost": "most steps lost",
    "different": "runs that differ",
    "orphans": "orphans",
    "leftovers": "leftovers swept",
}
TITLES = ["strategy", "checkpoint", "async", *COUNTS.values()]


def main() -> int:
    parser = page.parser(__doc__)
    add = parser.add_argument
    add("--kills", type=int, default=500, help="of all kinds of runs together")
    add("--seed", type=int, default=0, help="of the moments")
    options = page.parse(parser)
    kills = -(-options.kills // len(KINDS))
    counted, lines = [], []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        inputs.write_toy(folder)
        for number, kind in enumerate(KINDS):
            generator = random.Random(options.seed + number)
            counts = chaos(folder, kind, kills, generator)
            counted.append(counts)
            lines.append([*kind, *(counts[key] for key in COUNTS)])
    notes = [f"{tests.STEPS} steps, a checkpoint every {tests.INTERVAL}"]
    table = page.table(TITLES, lines, words=3)
    page.write("Chaos: random kills", notes, options, table, list(zip(KINDS, counted)))
    faults = ("unreadable", "different", "orphans")
    return int(any(counts[fault] for counts in counted for fault in faults))


def chaos(
    folder: Path, kind: tuple[str, str, str], kills: int, generator: random.Random
) -> Counter[str]:
    """Run after run until there were so many kills."""
    counts, began, output = Counter(), time.monotonic(), folder / "-".join(kind)
    job = train(output / "undisturbed", kind)
    assert job.wait() == [0, 0], job.output
    longest = time.monotonic() - began
    while counts["kills"] < kills:
        run = output / f"run-{counts['runs']}"
        while not attempt(train(run, kind), run, counts, generator, 1.1 * longest):
            if counts["kills"] % 20 == 0:
                progress = f"{counts['kills']} kills, {counts['runs']} runs ended"
                page.progress(f"{output.name}: {progress}")
        counts["runs"] += 1
        try:
            tests.assert_same_run(run, output / "undisturbed")
        except AssertionError as error:
            page.progress(f"DIFFERENT: {error}")
            counts["different"] += 1
        shutil.rmtree(run)
    return counts


def train(run: Path, kind: tuple[str, str, str]) -> Job:
    strategy, state_dict_type, async_save = kind
    more = ["--strategy", strategy, "--async_save", async_save]
    more += ["--run_name", run.name, "--hang_timeout", 60]
    return Job(2, *tests.flags(run.parents[1], run.parent, state_dict_type, *more))


def attempt(
    job: Job, run: Path, counts: Counter[str], generator: random.Random, latest: float
) -> bool:
    """One start of `run`, and a kill within `latest` seconds. True if it came to its end, False if
    it was killed, which is counted."""
    time.sleep(generator.uniform(0.0, latest))
    victims = generator.choice([[0], [1], [0, 1], [0, 1]])
    job.kill(victims)
    try:
        ended = job.wait(90)
    except AssertionError as error:
        page.progress(f"ORPHAN after {victims} of {run.name} were killed: {error}")
        counts["orphans"] += 1
        ended = []
    if ended == [0, 0]:
        return True
    counts["kills"] += 1
    counts.update(str(code) for code in ended if code != -9)
    leftovers = [*run.glob(".tmp-*"), *run.glob(".trash-*")]
    counts["leftovers"] += bool(leftovers)
    try:
        durable = tests.assert_intact(run, tests.STEPS)
        counts["lost"] = max(counts["lost"], max(tests.logged_steps(run), default=0) - durable)
    except Fault as fault:
        page.progress(f"UNREADABLE: {fault}")
        counts["unreadable"] += 1
    return False


if __name__ == "__main__":
    sys.exit(main())
