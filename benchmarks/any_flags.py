"""Draw flags that say how is trained, interrupt the runs, compare each with a plain trainer.

    python benchmarks/any_flags.py --minutes 120 --seed 1 --folder /tmp/any_flags

Law 16 at length: rows, toys and comparisons are those of tests/law_16.py. Each row is
`python train.py` on a toy model, one at a time, on at most two ranks, until the time is over. What
differs is printed at once, with the commands that repeat it with the toys in --folder.
"""

import random
import shutil
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import conftest  # noqa: E402, F401  what the tests set in the environment
import law_16  # noqa: E402

from benchmarks import page  # noqa: E402

MAX_SHOWN = 8  # differences of a row


def main() -> int:
    parser = page.parser(__doc__)
    add = parser.add_argument
    add("--minutes", type=float, default=120, help="no row begins after these")
    add("--seed", type=int, default=1, help="of rows, interruptions and toys' flags")
    add("--folder", type=Path, required=True, help="for toys and runs")
    options = page.parse(parser)
    folder = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    law_16.write_toys(folder)
    array = law_16.Array(random.Random(options.seed))
    counts: Counter[str] = Counter()
    differing: list[dict[str, Any]] = []
    began = time.monotonic()
    ends = began + 60 * options.minutes
    for place, outcome in law_16.rows_until(ends, array, folder, options.seed):
        counts["rows"] += 1
        counts["interruptions"] += outcome.interruptions
        counts["compared bit for bit"] += outcome.has_twin
        counts["refused"] += len(outcome.refused)
        counts["rows that differ"] += bool(outcome.differences)
        page.progress("\n".join([f"row {place}: {dict(counts)}", *outcome.refused]))
        if outcome.differences:
            shown = "\n  ".join(outcome.differences[:MAX_SHOWN])
            page.progress(f"DIFFERENT:\n  {shown}\n  repeat:\n{outcome.commands}")
            differing.append({"differences": outcome.differences, "commands": outcome.commands})
        else:
            for run in (folder / "runs").glob(f"seed-{options.seed}-row-{place}*"):
                shutil.rmtree(run) if run.is_dir() else run.unlink()
    covered = f"{len(array.covered & set(array.all)):,} of {len(array.all):,}"
    minutes = f"{(time.monotonic() - began) / 60:.0f}"
    cells = [options.seed, minutes, *counts.values(), covered]
    table = page.table(["seed", "minutes", *counts, "pairs of values covered"], [cells], words=0)
    page.write("Any flags: how never changes what", [], options, [table], differing)
    return int(bool(differing))


if __name__ == "__main__":
    sys.exit(main())
