"""Draw flags that say how is trained, interrupt the runs, compare each with a plain trainer.

    python benchmarks/any_flags.py --minutes 120 --seed 1 --output any_flags.json

Law 16 at length: rows, toys and comparisons are those of tests/law_16.py. Each row is
`python train.py` on a toy model, one at a time, on at most two ranks, until the time is over. What
differs is printed at once, with the commands that repeat it with the toys in --folder.
"""

from __future__ import annotations

import random
import shutil
import sys
import tempfile
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
    add("--folder", type=Path, help="for toys and runs (default: a temporary one)")
    add("--root", type=Path, default=ROOT, help="the checkout whose train.py runs")
    options = page.parse(parser)
    folder = options.folder or Path(tempfile.mkdtemp(prefix="any_flags-"))
    folder.mkdir(parents=True, exist_ok=True)
    law_16.write_toys(folder)
    array = law_16.Array(random.Random(options.seed))
    counts: Counter[str] = Counter()
    differing: list[dict[str, Any]] = []
    began = time.monotonic()
    ends, root = began + 60 * options.minutes, options.root.resolve()
    for place, outcome in law_16.rows_until(ends, array, folder, options.seed, root):
        add_up(outcome, counts)
        for sentence in outcome.refused:
            page.progress(f"refused: {sentence}")
        state = ", ".join(f"{number} {name}" for name, number in counts.items())
        page.progress(f"row {place}: {state}; {len(array.covered):,} of {len(array.all):,} pairs")
        if outcome.differences:
            shown = "\n  ".join(outcome.differences[:MAX_SHOWN])
            page.progress(f"DIFFERENT, in {len(outcome.differences)} ways:\n  {shown}")
            page.progress(f"  repeat, in {options.root}:\n{outcome.commands}")
            differing.append({"differences": outcome.differences, "commands": outcome.commands})
        else:
            for run in (folder / "runs").glob(f"seed-{options.seed}-row-{place}*"):
                shutil.rmtree(run) if run.is_dir() else run.unlink()
    write(options, array, counts, differing, (time.monotonic() - began) / 60)
    if options.folder is None and not differing:
        shutil.rmtree(folder)
    return int(bool(differing))


def add_up(outcome: law_16.Outcome, counts: Counter[str]) -> None:
    counts["runs"] += 1
    counts["starts"] += len(outcome.pieces)
    counts["interruptions"] += outcome.interruptions
    counts["refused, and mended"] += len(outcome.refused)
    counts["twins compared bit for bit"] += outcome.has_twin
    counts["runs that differ"] += bool(outcome.differences)


def write(
    options: Any,
    array: law_16.Array,
    counts: Counter[str],
    differing: list[dict[str, Any]],
    minutes: float,
) -> None:
    kinds: dict[str, list[str]] = {}
    for values, one in array.refused.items():
        named = "a whole row"
        if 0 < len(values) < 12:
            named = " ".join(f"--{name} {value}" for name, value in sorted(values, key=str))
        kinds.setdefault(law_16.kind_of(one.sentence), []).append(f"{named} ({len(one.beside)} x)")
    covered, never = array.covered & set(array.all), array.pairs_never()
    lines = [
        ["minutes", f"{minutes:.0f}"],
        *([name, f"{number:,}"] for name, number in counts.items()),
        ["flags that say how, drawn", len(array.factors) - 2],
        ["pairs of values, of toys and flags", f"{len(array.all):,}"],
        ["covered by runs that were not refused", f"{len(covered):,}"],
        ["refused by the program, or without effect on each other", f"{len(never):,}"],
    ]
    refused = [f"- {kind} With `{'`, `'.join(given)}`." for kind, given in sorted(kinds.items())]
    idle = [f"- `--{name}`: {why}." for name, why in law_16.NOT_DRAWN.items()]
    different = []
    for one in differing:
        shown = ", ".join(one["differences"][:3])
        different.append(f"{shown}\n\n```\n{one['commands']}\n```")
    sections = [
        page.table(["", ""], lines),
        *("## Refused", "\n".join(refused or ["Nothing."])),
        *("## Not drawn", "\n".join(idle)),
        *("## What differs", "\n\n".join(different or ["Nothing."])),
    ]
    pairs = [len(covered), len(never), len(array.all)]
    numbers = {"counts": counts, "pairs": pairs, "differing": differing, "refused": kinds}
    title = "Any flags: how never changes what"
    page.write(title, [], options, "\n\n".join(sections), numbers)


if __name__ == "__main__":
    sys.exit(main())
