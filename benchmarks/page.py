"""A benchmark's page: its options, what was run where, tables, and the numbers as JSON."""

from __future__ import annotations

import argparse
import csv
import datetime
import json
import os
import platform
import shlex
import statistics
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Optional

PACKAGES = (
    *("torch", "lightning", "transformers", "tokenizers", "datasets"),
    *("numpy", "pyarrow", "accelerate"),
)
MIB, GIB = 2**20, 2**30
Row = dict[str, Any]  # what is known and measured of a contender; "error": why nothing was, or None


def positive(text: str) -> int:
    """The type of a flag that is a whole number of at least 1."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: at least 1.")
    return int(text)


def parser(document: Optional[str], rounds: int = 0) -> argparse.ArgumentParser:
    """The options that all benchmarks have, under the first line of the script's docstring.

    rounds: the default of --rounds; 0: the benchmark has no rounds.
    """
    form = argparse.ArgumentDefaultsHelpFormatter
    description = (document or "").splitlines()[0]
    options = argparse.ArgumentParser(description=description, formatter_class=form)
    if rounds:
        options.add_argument("--rounds", type=positive, default=rounds, help="timed turns of each")
    options.add_argument("--markdown", type=Path, help="file to write the page to")
    options.add_argument("--output", type=Path, help="JSON file to write the numbers to")
    return options


def parse(options: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the command's flags, and note what the page says of the start."""
    given = options.parse_args()
    given.load, given.device = os.getloadavg()[0], {}
    return given


def progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def median(row: Row) -> Optional[float]:
    """Seconds of a step."""
    return statistics.median(row["seconds"]) if row["seconds"] and not row["error"] else None


def times_faster(row: Row, other: Row) -> Optional[float]:
    """The median over rounds of how many times faster a row was than another in the same round."""
    if row["error"] or other["error"] or not row["seconds"]:
        return None
    return statistics.median(b / a for a, b in zip(row["seconds"], other["seconds"], strict=True))


def over(row: Row, first: Row) -> Optional[float]:
    """How many times the seconds of the first row a step takes."""
    return None if row["error"] or first["error"] else median(row) / median(first)


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
                row["times"] = times_faster(row, other)
    measured = [row for row in rows if not row["error"]]
    if measured:
        columns = {title: cell for title, cell in columns.items() if any(map(cell, measured))}
    lines = []
    for row in rows:
        cells = [row["error"]] if row["error"] else [cell(row) for cell in columns.values()]
        lines.append([row["name"], *cells])
    return table(["", *columns], lines)


def table(titles: Iterable[str], lines: Iterable[Iterable[Any]], words: int = 1) -> str:
    """Markdown. The first columns are of words, the others of numbers; a short line is filled."""
    titles = list(titles)
    rows = [titles, ["---"] * words + ["--:"] * (len(titles) - words), *lines]
    text = []
    for row in rows:
        cells = [str(cell) for cell in row]
        text.append("| " + " | ".join(cells + [""] * (len(titles) - len(cells))) + " |")
    return "\n".join(text)


def table_under(text: str, heading: str) -> list[dict[str, str]]:
    """The lines of the first table below a heading ("": of the page), by the columns' titles."""
    below = text.partition(f"\n{heading}\n")[2].splitlines()
    first = next(place for place, line in enumerate(below) if line.startswith("|"))
    cells = []
    for line in below[first:]:
        if not line.startswith("|"):
            break
        cells.append([cell.strip() for cell in line.split("|")[1:-1]])
    return [dict(zip(cells[0], row)) for row in cells[2:]]


def lines_of(file: Path) -> list[dict[str, str]]:
    """The lines of a CSV file, by the columns' titles."""
    with file.open(newline="") as lines:
        return list(csv.DictReader(lines))


def about(options: argparse.Namespace) -> dict[str, str]:
    """What was run, when, where and with which versions."""
    command = ["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]
    hardware = options.device.get("name") or f"{cpu_name()}, {os.cpu_count()} cores"
    if hasattr(options, "threads") and not options.device:
        hardware += f", {options.threads} thread{'s' * (options.threads > 1)} a process"
    run = {
        "command": f"`{shlex.join(command)}`",
        "date": str(datetime.date.today()),
        "hardware": hardware,
        "load": f"average {options.load:.1f} before the start, {os.getloadavg()[0]:.1f} at the end",
        "versions": ", ".join([f"Python {platform.python_version()}", *versions()]),
    }
    if getattr(options, "smoke", False):
        run["smoke"] = "toy sizes, these figures mean nothing"
    return run


def versions() -> list[str]:
    """Of the packages that are installed."""
    installed = []
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            installed.append(f"{name} {version(name)}")
    return installed


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else ():
        if line.startswith("model name"):
            return line.split(":")[1].strip()
    return platform.processor()


def keep(
    title: str, notes: Iterable[str], options: argparse.Namespace, body: str, rows: Any
) -> str:
    """The page: a heading, what was run where, and the tables. It and the numbers are in the files
    that were asked for."""
    run = about(options)
    facts = [f"- {name.capitalize()}: {value}" for name, value in run.items()]
    text = "\n".join([f"# {title}", "", *facts, *(f"- {note}" for note in notes), "", body])
    if options.markdown is not None:
        options.markdown.write_text(text + "\n")
    if options.output is not None:
        numbers = json.dumps({"about": run, "rows": rows}, indent=1, default=str)
        options.output.write_text(numbers + "\n")
    return text


def write(*given: Any) -> None:
    """Print the page as well."""
    print(keep(*given))
