"""`python -m fabric_llm.report checkpoints/RUN [OTHER ...]` writes a page about a run, or about several beside each other.

Exit codes: 0 written, 2 bad arguments, 66 or 77 written, and --verify true has found damage.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import NoReturn, Optional

from fabric_llm.base.console import plain_output
from fabric_llm.base.faults import BAD_INPUT, DONE, Fault

# What needs numpy, plotly or torch is imported in the functions below: --help and bad arguments are answered at once.

DESCRIPTION = """Write one HTML file about runs: the figures that decide, curves, events, samples, the certificate and the
flags. It needs no network, and shows a run that is still going as far as it is."""
REPORT = "report.html"


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise Fault(f"{message}; see --help.")


def parse(argv: list[str]) -> argparse.Namespace:
    """Parse the command line. Raises Fault (2)."""
    parser = Parser(prog="python -m fabric_llm.report", description=DESCRIPTION, allow_abbrev=False)
    parser.add_argument("runs", nargs="+", metavar="checkpoints/RUN", help="one run, or several to compare")
    parser.add_argument("--output", help=f"the file to write (default: {REPORT} in the first run's directory)")
    parser.add_argument(
        "--verify",
        choices=("auto", "true"),
        default="auto",
        help="auto: check logs and sizes of files, a moment, and show the last certificate.json of the run directory; true: "
        "verify the runs as python -m fabric_llm.verify does, with hashes and export, and write their certificate.json",
    )
    given = parser.parse_args(argv)
    given.output = Path(given.runs[0]) / REPORT if given.output is None else Path(given.output)
    return given


def main(argv: Optional[list[str]] = None) -> int:
    """Run the command and return its exit code."""
    try:
        given = parse(sys.argv[1:] if argv is None else argv)
        code = write(given.runs, given.output, given.verify == "true")
    except Fault as fault:
        print(f"fabric_llm.report: error: {fault}", file=sys.stderr, flush=True)
        return fault.code
    return code


def write(folders: Sequence[str], output: Path, verifies: bool = False) -> int:
    """Write the report of the runs in `folders`. Returns the worst code of the certificates. Raises Fault (2)."""
    from fabric_llm.report import certificate, figures, page, reading, sections, timeline

    for folder in folders:
        reading.require_run(Path(folder))
    require_output(output)
    page.plotly_source()  # before anything slow
    unique = list(dict.fromkeys(Path(folder).resolve() for folder in folders))
    runs = [reading.read_run(folder) for folder in _as_given(unique, folders)]
    _tell_apart(runs)
    whole = [certificate.whole(run) if verifies else certificate.last_whole(run) for run in runs]
    certificates = [(certificate.quick(run), one) for run, one in zip(runs, whole)]
    for run, found in zip(runs, certificates):
        if any(one is not None and one["verdict"] != "whole" for one in found):
            run.wrong.append("The certificate below says what is damaged.")
    events = [timeline.timeline(run) for run in runs]
    found = figures.figures(runs)
    for figure in found:
        for line in figure.lines:
            line.set = sections.set_name(line.set)
    data = {
        "runs": [run.name for run in runs],
        "axes": {"x": "Step", "t": "Tokens"},
        "kinds": timeline.KINDS,
        "charts": figures.as_data(runs, found),
        "events": [one for i, run in enumerate(runs) for one in timeline.as_data(i, run, events[i])],
    }
    made = f"Made by fabric_llm.report on {datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC from {', '.join(map(str, folders))}."
    title = f"{', '.join(run.name for run in runs[:3])}{' ...' if len(runs) > 3 else ''} · training report"
    save(page.document(title, sections.body(runs, found, events, certificates, made), data), output)
    return max((one.get("code", DONE) for one in whole if one is not None), default=DONE) if verifies else DONE


def _as_given(unique: Sequence[Path], folders: Sequence[str]) -> list[Path]:
    """The folders as they were written, each once."""
    given = {Path(folder).resolve(): Path(folder) for folder in reversed(folders)}
    return [given[path] for path in unique]


def _tell_apart(runs: Sequence["reading.Run"]) -> None:  # noqa: F821
    """Runs of one name bear that of the folder above as well."""
    names = [run.name for run in runs]
    for run in runs:
        if names.count(run.name) > 1:
            run.name = f"{run.folder.resolve().parent.name}/{run.name}"
    names = [run.name for run in runs]
    for number, run in enumerate(runs, 1):
        if names.count(run.name) > 1:
            run.name = f"{run.name} ({number})"


def require_output(output: Path) -> None:
    """Raises Fault (2) where `output` can't be a file."""
    if output.is_dir():
        raise Fault(f"--output {str(output)!r} is a folder: name a file, such as {str(output / REPORT)!r}.")
    if not output.absolute().parent.is_dir():
        raise Fault(f"{str(output.parent)!r}: there is no such folder.")


def save(content: str, output: Path) -> None:
    """Write the page as a whole, and say so. Raises Fault (2) where it can't be written."""
    from fabric_llm.base.files import write_atomically

    try:
        write_atomically(output, content)
    except OSError as error:
        raise Fault(f"{str(output)!r} can't be written: {error.strerror}.", BAD_INPUT) from error
    print(f"Written: {output}, {len(content.encode()) / 1e6:.1f} MB", flush=True)


if __name__ == "__main__":
    plain_output()
    sys.exit(main())
