"""`python -m fabric_llm.report checkpoints/RUN [OTHER ...]` writes a page about a run, or about several beside each other.

Exit codes: 0 written, 2 bad arguments.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any, Optional

from fabric_llm.base.faults import DONE, Fault
from fabric_llm.base.program import plain_output
from fabric_llm.verify.__main__ import Parser

DESCRIPTION = """Write one HTML file about runs: the figures that decide, curves, events, samples and flags. It needs no
network, and shows a run that is still going as far as it is."""
REPORT = "report.html"


def main(argv: Optional[list[str]] = None) -> int:
    """Run the command and return its exit code."""
    parser = Parser(prog="python -m fabric_llm.report", description=DESCRIPTION, allow_abbrev=False)
    parser.add_argument("runs", nargs="+", metavar="checkpoints/RUN", help="one run, or several to compare")
    parser.add_argument("--output", help=f"the file to write (default: {REPORT} in the first run's directory)")
    try:
        given = parser.parse_args(argv)
        if given.output is not None:
            require_output(Path(given.output))
        output = Path(given.output or Path(given.runs[0]) / REPORT)
        page_module().write(given.runs, output)
    except (Fault, OSError) as error:
        fault = error if isinstance(error, Fault) else Fault(f"{str(error.filename)!r}: {error.strerror}.")
        print(f"fabric_llm.report: error: {fault}", file=sys.stderr, flush=True)
        return fault.code
    return DONE


def page_module(name: str = "page") -> Any:
    """A module that needs numpy and plotly: --help and bad flags are answered without. Raises Fault (2)."""
    try:
        return importlib.import_module(f"fabric_llm.report.{name}")
    except ImportError as error:
        raise Fault("The report needs plotly: pip install plotly (or pip install -e '.[report]').") from error


def require_output(output: Path, flag: str = "--output") -> None:
    """Raises Fault (2) where `output` can't be a file."""
    if output.is_dir() or not output.absolute().parent.is_dir():
        raise Fault(f"{flag} {str(output)!r} must name a file, such as {REPORT}, in a folder that is there.")


if __name__ == "__main__":
    plain_output()
    sys.exit(main())
