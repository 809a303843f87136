"""A benchmark's page: its options, what was run where, tables, and the numbers as JSON."""

import argparse
import datetime
import json
import os
import platform
import re
import shlex
import statistics
import sys
from collections.abc import Callable, Iterable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Optional

PACKAGES = "torch lightning transformers tokenizers datasets numpy pyarrow accelerate".split()
ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests"))  # of which some is used here as well
MIB, GIB = 2**20, 2**30
Row = dict[str, Any]  # what is known and measured of a contender; "error": why nothing was


def parser(document: Optional[str], rounds: int = 0) -> argparse.ArgumentParser:
    """The options that all benchmarks have, under the first line of the script's docstring.

    rounds: the default of --rounds; 0: the benchmark has no rounds.
    """
    form = argparse.ArgumentDefaultsHelpFormatter
    description = (document or "").splitlines()[0]
    options = argparse.ArgumentParser(description=description, formatter_class=form)
    if rounds:
        options.add_argument("--rounds", type=int, default=rounds, help="timed turns of each")
    options.add_argument("--markdown", type=Path, help="file to write the page to")
    options.add_argument("--output", type=Path, help="JSON file to write the numbers to")
    return options


def parse(options: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the command's flags, and note what the page says of the start."""
    given = options.parse_args()
    given.load, given.device = os.getloadavg()[0], ""
    return given


def progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def median(row: Row) -> Optional[float]:
    """Seconds of a step."""
    return statistics.median(row["seconds"]) if row["seconds"] and "error" not in row else None


def times(row: Row, other: Row) -> Optional[float]:
    """The median over rounds of how many times as long a row took as another in the same round."""
    if "error" in row or "error" in other or not row["seconds"]:
        return None
    return statistics.median(a / b for a, b in zip(row["seconds"], other["seconds"], strict=True))


def step(row: Row) -> str:
    return milliseconds(median(row))


def spread(row: Row) -> str:
    """The quartiles of the seconds of a step, in milliseconds."""
    if len(row["seconds"]) < 2:
        return ""
    low, _, high = statistics.quantiles(row["seconds"], n=4, method="inclusive")
    return f"{milliseconds(low)}-{milliseconds(high)}"


def milliseconds(seconds: float) -> str:
    """With three digits and more."""
    return f"{1000 * seconds:.{2 if seconds < 0.01 else 1 if seconds < 0.1 else 0}f}"


def number(key: str, form: str = ".2f", of: float = 1) -> Callable[[Row], str]:
    """Cells of what a row has under a key, in units of `of`; empty where nothing was measured."""
    return lambda row: "" if row.get(key) is None else format(row[key] / of, form)


def mebibytes(key: str) -> Callable[[Row], str]:
    return number(key, ".1f", MIB)


def compare(
    rows: list[Row], columns: dict[str, Callable[[Row], str]], beside: Optional[str] = None
) -> str:
    """A table with a line for each row, without columns in which no row has anything.

    A row gets "times": how many times as fast it is as the row `beside`.
    """
    for row in rows:
        for other in rows:
            if other["name"] == beside:
                row["times"] = times(other, row)
    measured = [row for row in rows if "error" not in row]
    titles = [title for title, cell in columns.items() if any(map(cell, measured))] or [*columns]
    lines = []
    for row in rows:
        cells = [columns[title](row) for title in titles] if "error" not in row else [row["error"]]
        lines.append([row["name"], *cells])
    return table(["", *titles], lines)


def table(titles: Iterable[str], lines: Iterable[Iterable[Any]], words: int = 1) -> str:
    """Markdown. The first columns are of words, the others of numbers; a short line is filled."""
    titles = list(titles)
    text = []
    for row in [titles, ["---"] * words + ["--:"] * (len(titles) - words), *lines]:
        cells = [str(cell) for cell in row]
        text.append("| " + " | ".join(cells + [""] * (len(titles) - len(cells))) + " |")
    return "\n".join(text)


def about(options: argparse.Namespace) -> dict[str, str]:
    """What was run, when, where and with which versions."""
    command = ["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]
    hardware = options.device or f"{cpu_name()}, {os.cpu_count()} cores"
    if hasattr(options, "threads") and not options.device:
        hardware += f", {options.threads} thread{'s' * (options.threads > 1)} a process"
    versions = [f"{name} {version(name)}" for name in PACKAGES if find_spec(name)]
    return {
        "command": f"`{shlex.join(command)}`",
        "date": str(datetime.date.today()),
        "hardware": hardware,
        "load": f"average {options.load:.1f} before the start, {os.getloadavg()[0]:.1f} at the end",
        "versions": ", ".join([f"Python {platform.python_version()}", *versions]),
    }


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    found = re.search("model name.*: (.*)", info.read_text()) if info.exists() else None
    return found[1] if found else platform.processor()


def keep(
    title: str, notes: list[str], options: argparse.Namespace, pieces: list[str], rows: Any
) -> str:
    """The page: a heading, what was run where, and its pieces, such as tables. It and the numbers
    are in the files that were asked for."""
    run = about(options)
    facts = [f"- {name.capitalize()}: {value}" for name, value in run.items()]
    facts += [f"- {note}" for note in notes]
    text = "\n\n".join([f"# {title}", "\n".join(facts), *pieces])
    if options.markdown is not None:
        options.markdown.write_text(text + "\n")
    if options.output is not None:
        numbers = json.dumps({"about": run, "rows": rows}, indent=1, default=str)
        options.output.write_text(numbers + "\n")
    return text


def write(*given: Any) -> None:
    """Print the page as well."""
    print(keep(*given))
