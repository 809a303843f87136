"""A benchmark's page: the options that all have, what was run where, tables, and the numbers as
JSON."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shlex
import statistics
import sys
from collections.abc import Callable, Iterable
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, Optional

PACKAGES = (
    "torch",
    "lightning",
    "transformers",
    "tokenizers",
    "datasets",
    "numpy",
    "pyarrow",
    "accelerate",
    "litgpt",
)
MIB = 2**20
Row = dict[str, Any]  # what is known and measured of a contender; "error": why nothing was, or None


def parser(document: Optional[str], rounds: int = 7) -> argparse.ArgumentParser:
    """The options that all benchmarks have, under the first line of the script's docstring."""
    form = argparse.ArgumentDefaultsHelpFormatter
    options = argparse.ArgumentParser(
        description=(document or "").splitlines()[0], formatter_class=form
    )
    options.add_argument("--rounds", type=int, default=rounds, help="timed turns of each contender")
    options.add_argument("--markdown", type=Path, help="file to write the page to")
    options.add_argument("--output", type=Path, help="JSON file to write the numbers to")
    return options


def parse(options: argparse.ArgumentParser, argv: Optional[list[str]]) -> argparse.Namespace:
    """Parse `argv`, and note what the page says of the start."""
    given = options.parse_args(argv)
    if given.rounds < 1:
        options.error(f"--rounds {given.rounds}: at least 1.")
    given.argv = list(sys.argv[1:] if argv is None else argv)
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
    """A table with a line for each row, which gets "times": how many times as fast it is as the row
    `beside`.

    A column in which no row has anything is left out.
    """
    for row in rows:
        for other in rows:
            if other["name"] == beside:
                row["times"] = times_faster(row, other)
    measured = [row for row in rows if not row["error"]]
    columns = {
        title: cell for title, cell in columns.items() if not measured or any(map(cell, measured))
    }
    cells = (
        [row["error"]] if row["error"] else [cell(row) for cell in columns.values()] for row in rows
    )
    return table(["", *columns], ([row["name"], *line] for row, line in zip(rows, cells)))


def table(titles: Iterable[str], lines: Iterable[Iterable[Any]], words: int = 1) -> str:
    """Markdown. The first columns are of words, the others of numbers. A short line is filled
    up."""
    titles = list(titles)
    ruler = ["---"] * words + ["--:"] * (len(titles) - words)
    rows = [titles, ruler, *([str(cell) for cell in line] for line in lines)]
    return "\n".join(
        "| " + " | ".join(cells + [""] * (len(titles) - len(cells))) + " |" for cells in rows
    )


def flags(rows: list[Row]) -> str:
    """The last section of a page on what others have published: how each of their runs was
    planned."""
    lines = sorted({(row["run"], row["source"], f"`{row['flags']}`") for row in rows})
    shape = "a folder of that shape's `config.json`"
    return (
        "## Flags of plan.py\n\nBesides `--model_name` with "
        f"{shape}.\n\n{table(['run', 'source', 'flags'], lines, words=3)}"
    )


def about(script: str, options: argparse.Namespace) -> dict[str, str]:
    """What was run, when, where and with which versions."""
    threads = getattr(options, "threads", None)
    of_process = (
        f", {threads} thread{'s' * (threads > 1)} a process" if isinstance(threads, int) else ""
    )
    return {
        "command": f"`{shlex.join(['python', f'benchmarks/{script}', *map(str, options.argv)])}`",
        "date": str(datetime.date.today()),
        "hardware": options.device.get("name")
        or f"{cpu_name()}, {os.cpu_count()} cores{of_process}",
        "load": f"average {options.load:.1f} before the start, {os.getloadavg()[0]:.1f} at the end",
        "versions": ", ".join([f"Python {platform.python_version()}", *versions()]),
        **(
            {"smoke": "toy sizes, these figures mean nothing"}
            if getattr(options, "smoke", False)
            else {}
        ),
    }


def versions() -> list[str]:
    """Of the packages that are installed."""
    found = {name: next(iter(distributions(name=name)), None) for name in PACKAGES}
    return [f"{name} {one.version}" for name, one in found.items() if one is not None]


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next(
        (line.split(":")[1].strip() for line in lines if line.startswith("model name")),
        platform.processor(),
    )


def keep(
    script: str, title: str, notes: Iterable[str], options: argparse.Namespace, body: str, rows: Any
) -> str:
    """The page: a heading, what was run where, and the tables. It and the numbers are in the files
    that were asked for."""
    run = about(script, options)
    facts = [f"{name[0].upper()}{name[1:]}: {value}" for name, value in run.items()]
    text = "\n".join([f"# {title}", "", *(f"- {line}" for line in [*facts, *notes]), "", body])
    if options.markdown is not None:
        options.markdown.write_text(text + "\n")
    if options.output is not None:
        options.output.write_text(
            json.dumps({"about": run, "rows": rows}, indent=1, default=str) + "\n"
        )
    return text


def write(*given: Any) -> None:
    """Print the page as well."""
    print(keep(*given))
