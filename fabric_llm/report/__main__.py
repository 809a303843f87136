"""`python -m fabric_llm.report checkpoints/RUN [OTHER ...]` writes a page about a run, or about
several beside each other.

Exit codes: 0 written, 2 bad arguments, 73 and 74 the page can't be written, 75 stopped on request.
"""

import importlib
import sys
from pathlib import Path
from typing import Any, Optional

from fabric_llm.base import files
from fabric_llm.base.ending import Parser, in_one_sentence
from fabric_llm.base.faults import DONE, Fault
from fabric_llm.base.names import at_home
from fabric_llm.base.program import plain_output
from fabric_llm.mirror.address import is_address
from fabric_llm.mirror.fetch import local

DESCRIPTION = """Write one HTML file about runs: the figures that decide, curves, events, samples
and flags. It needs no network, and shows a run that is still going as far as it is."""
# Of one run, and of several: the page of one that is there isn't to be lost.
REPORT, COMPARISON = "report.html", "comparison.html"
OF_THE_EXTRA = ("plotly", "pandas", "matplotlib")


def main(argv: Optional[list[str]] = None) -> int:
    """Run the command and return 0. Raises SystemExit where it fails."""
    parser = Parser(prog="python -m fabric_llm.report", description=DESCRIPTION, allow_abbrev=False)
    parser.add_argument(
        "runs",
        nargs="+",
        type=at_home,
        metavar="checkpoints/RUN",
        help="one run, or several to compare",
    )
    parser.add_argument(
        "--output",
        type=at_home,
        help=f"the file to write (default: {REPORT} in the run's directory, or of several runs "
        f"{COMPARISON} in the first one's; of an address in the working directory)",
    )
    # Whatever goes wrong from here on, also wrong arguments, is reported in one sentence.
    with in_one_sentence("fabric_llm.report"):
        given = parser.parse_args(argv)
        # Refused before runs are read, which may take a while.
        if given.output is not None:
            files.require_name(Path(given.output), "--output")
        folder = given.runs[0]
        if is_address(folder):
            folder = "."
        name = COMPARISON if len(given.runs) > 1 else REPORT
        output = Path(given.output or Path(folder) / name)
        # A mistyped run is told as one.
        if output.parent.is_dir():
            files.writable(output)
        # Imported only now, so that --help and wrong arguments don't need plotly.
        page_module().write([local(run, only_logs=True) for run in given.runs], output)
    return DONE


def page_module(name: str = "fabric_llm.report.page") -> Any:
    """A module that needs numpy and plotly: --help and bad flags are answered without. Raises Fault
    (2)."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # The extra brings all of them along. Without any other package, no environment is active.
        if str(error.name).partition(".")[0] not in OF_THE_EXTRA:
            raise
        raise Fault(
            "The report needs plotly: pip install plotly (or pip install -e '.[report]')."
        ) from error


if __name__ == "__main__":
    plain_output()
    sys.exit(main())
