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
FAULTS = ("unreadable", "different", "orphans")


def main() -> int:
    parser = page.parser(__doc__)
    add = parser.add_argument
    add("--kills", type=int, default=500, help="of all kinds of runs together")
    add("--seed", type=int, default=0, help="of the moments")
    options = page.parse(parser)
    kills = -(-options.kills // len(KINDS))
    counted = {}
    with tempfile.TemporaryDirectory() as name:
        inputs.write_toy(Path(name))
        for number, kind in enumerate(KINDS):
            generator = random.Random(options.seed + number)
            counted[kind] = chaos(Path(name), kind, kills, generator)
    lines = [[*kind, *(counts[key] for key in COUNTS)] for kind, counts in counted.items()]
    notes = [f"{tests.STEPS} steps, a checkpoint every {tests.INTERVAL}"]
    table = page.table(TITLES, lines, words=3)
    page.write("Chaos: random kills", notes, options, [table], [*counted.items()])
    return int(any(counts[fault] for counts in counted.values() for fault in FAULTS))


def chaos(
    folder: Path, kind: tuple[str, str, str], kills: int, generator: random.Random
) -> Counter[str]:
    """Run after run until there were so many kills, and the last run has come to its end."""
    counts, output, began = Counter(), folder / "-".join(kind), time.monotonic()

    def found(fault: str, what: object) -> None:
        counts[fault] += 1
        page.progress(f"{fault}: {what}")

    job = train(output / "undisturbed", kind)
    assert job.wait() == [0, 0], job.output
    longest, run = 1.1 * (time.monotonic() - began), output / "run"
    while counts["kills"] < kills or run.exists():
        job = train(run, kind)
        time.sleep(generator.uniform(0.0, longest))
        victims = generator.choice([[0], [1], [0, 1], [0, 1]])
        job.kill(victims)
        try:
            codes = job.wait(90)
        except AssertionError as error:
            found("orphans", f"after {victims} were killed: {error}")
            codes = []
        if codes == [0, 0]:
            counts["runs"] += 1
            try:
                tests.assert_same_run(run, output / "undisturbed")
            except AssertionError as error:
                found("different", error)
            shutil.rmtree(run)
            page.progress(f"{output.name}: {dict(counts)}")
            continue
        counts["kills"] += 1
        counts["leftovers"] += any([*run.glob(".tmp-*"), *run.glob(".trash-*")])
        try:
            durable = tests.assert_intact(run, tests.STEPS)
            counts["lost"] = max(counts["lost"], max(tests.logged_steps(run), default=0) - durable)
        except Fault as fault:
            found("unreadable", fault)
    return counts


def train(run: Path, kind: tuple[str, str, str]) -> Job:
    strategy, state_dict_type, async_save = kind
    more = f"--strategy {strategy} --async_save {async_save} --hang_timeout 60 --run_name"
    toys, output = run.parents[1], run.parent
    return Job(2, *tests.flags(toys, output, state_dict_type, *more.split(), run.name))


if __name__ == "__main__":
    sys.exit(main())
