"""The command line of plan.py: its own flags, and those of train.py. Nothing here imports torch."""

import re
from dataclasses import fields

from arguments import Arguments, PlanArguments
from fabric_llm.base.flag import declared
from parse_arguments import parse_run

# In GiB, of --device_memory.
UNITS = {
    "mib": 2**-10,
    "gib": 1.0,
    "tib": 2.0**10,
    "mb": 1e6 / 2**30,
    "gb": 1e9 / 2**30,
    "tb": 1e12 / 2**30,
}
PLAN = """usage: python plan.py --devices 4 --model_name MODEL --train_data_dir FOLDER
What train.py would need with these flags: memory, time, disk and money."""


def parse_plan(argv: list[str]) -> tuple[PlanArguments, Arguments]:
    """Arguments of plan.py: its own, and those of train.py. Exits with code 2 and one sentence as
    that does."""
    # The parser takes neither a flag without its value nor a number with a unit.
    argv = _in_gib(_with_true(argv))
    arguments, flat = parse_run("plan.py", PLAN, [PlanArguments], argv)
    return PlanArguments(**{f.name: flat[f.name] for f in fields(PlanArguments)}), arguments


def _with_true(argv: list[str]) -> list[str]:
    """With `true` behind a flag of plan.py that is true or false and given alone, such as
    --json."""
    alone = {f"--{name}" for name, one in declared(PlanArguments).items() if one.kinds == [bool]}
    found = []
    # Only before another flag or at the end: a word behind it is its value.
    for word, after in zip(argv, [*argv[1:], "--"]):
        found += [word, "true"] if word in alone and after.startswith("--") else [word]
    return found


def _in_gib(argv: list[str]) -> list[str]:
    """With the number of GiB for a --device_memory that has a unit."""
    # One text, so that both `--device_memory=80GiB` and the two words match one pattern.
    text, pattern = "\n".join(argv), r"^(--device_memory[=\n])(\d+\.?\d*|\.\d+) ?([GMT]i?B)$"

    def number(given: re.Match[str]) -> str:
        return f"{given[1]}{float(given[2]) * UNITS[given[3].lower()]:.6g}"

    if not argv:
        return []
    return re.sub(pattern, number, text, flags=re.M | re.I).split("\n")
