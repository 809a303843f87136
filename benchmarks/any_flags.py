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
from typing import Any, Optional

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import conftest  # noqa: E402, F401  what the tests set in the environment
import law_16  # noqa: E402

from benchmarks import page  # noqa: E402

MAX_SHOWN = 8  # differences of a row


def main(argv: Optional[list[str]] = None) -> int:
    parser = page.parser(__doc__)
    parser.add_argument("--minutes", type=float, default=120, help="no row begins after these")
    parser.add_argument(
        "--seed", type=int, default=1, help="of rows, interruptions and toys' flags"
    )
    parser.add_argument("--folder", type=Path, help="for toys and runs (default: a temporary one)")
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout whose train.py runs")
    options = page.parse(parser, argv)
    folder = options.folder or Path(tempfile.mkdtemp(prefix="any_flags-"))
    folder.mkdir(parents=True, exist_ok=True)
    law_16.write_toys(folder)
    array = law_16.Array(random.Random(options.seed))
    counts: Counter[str] = Counter()
    differing: list[dict[str, Any]] = []
    began = time.monotonic()
    rows = law_16.rows_until(
        began + 60 * options.minutes, array, folder, options.seed, options.root.resolve()
    )
    for number, outcome in rows:
        took(outcome, counts)
        for sentence in outcome.refused:
            page.progress(f"refused: {sentence}")
        state = ", ".join(f"{count} {name}" for name, count in counts.items())
        page.progress(f"row {number}: {state}; {len(array.covered):,} of {len(array.all):,} pairs")
        if outcome.differences:
            shown = outcome.differences[:MAX_SHOWN]
            page.progress(
                f"DIFFERENT, in {len(outcome.differences)} ways:\n  " + "\n  ".join(shown)
            )
            page.progress(f"  repeat, in {options.root}:\n{outcome.commands}")
            differing.append({"differences": outcome.differences, "commands": outcome.commands})
        else:
            for run in (folder / "runs").glob(f"seed-{options.seed}-row-{number}*"):
                shutil.rmtree(run) if run.is_dir() else run.unlink()
    write(options, array, counts, differing, (time.monotonic() - began) / 60)
    if options.folder is None and not differing:
        shutil.rmtree(folder)
    return int(bool(differing))


def took(outcome: law_16.Outcome, counts: Counter[str]) -> None:
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
        named = " ".join(
            f"--{name} {value}" for name, value in sorted(values, key=str) if len(values) < 12
        )
        kinds.setdefault(law_16.kind_of(one.sentence), []).append(
            f"{named or 'a whole row'} ({len(one.beside)} x)"
        )
    covered, never = array.covered & set(array.all), array.pairs_never()
    table = page.table(
        ["", ""],
        [
            ["minutes", f"{minutes:.0f}"],
            *([name, f"{count:,}"] for name, count in counts.items()),
            ["flags that say how, drawn", len(array.factors) - 2],
            ["pairs of values, of toys and flags", f"{len(array.all):,}"],
            ["covered by runs that were not refused", f"{len(covered):,}"],
            ["refused by the program, or without effect on each other", f"{len(never):,}"],
        ],
    )
    refused = [f"- {kind} With `{'`, `'.join(given)}`." for kind, given in sorted(kinds.items())]
    idle = [f"- `--{name}`: {why}." for name, why in law_16.NOT_DRAWN.items()]
    found = [
        f"{', '.join(one['differences'][:3])}\n\n```\n{one['commands']}\n```" for one in differing
    ]
    body = "\n\n".join(
        [
            *(table, "## Refused\n\n" + "\n".join(refused or ["Nothing."])),
            *(
                "## Not drawn\n\n" + "\n".join(idle),
                "## What differs\n\n" + "\n\n".join(found or ["Nothing."]),
            ),
        ]
    )
    rows = {
        "counts": counts,
        "pairs": [len(covered), len(never), len(array.all)],
        "differing": differing,
    }
    rows |= {"refused": kinds}
    page.write("any_flags.py", "Any flags: how never changes what", [], options, body, rows)


if __name__ == "__main__":
    sys.exit(main())
