"""What train.py --mirror starts beside itself: `python -m fabric_llm.mirror.process ADDRESS RUN`.
It takes commands on stdin, see commands.py.

Exit codes: 0 ended, or as reported with {"refused"}; 2 bad arguments.
"""

import json
import os
import signal
import sys
import threading
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any, Optional

from fabric_llm.base.ending import Parser, in_one_sentence
from fabric_llm.base.faults import DONE, UNEXPECTED, as_fault
from fabric_llm.base.program import plain_output
from fabric_llm.mirror import address
from fabric_llm.mirror.lease import LEASE_SECONDS

DESCRIPTION = (
    """Upload checkpoints of a run as commands on stdin say. train.py --mirror starts it."""
)
TIMEOUT_SECONDS = 600.0


def main(argv: Optional[list[str]] = None, lease_seconds: float = LEASE_SECONDS) -> int:
    """Run the process and return its exit code. Raises SystemExit for bad arguments.

    lease_seconds: for tests.
    """
    parser = Parser(
        prog="python -m fabric_llm.mirror.process", description=DESCRIPTION, allow_abbrev=False
    )
    parser.add_argument("address", help="such as s3://bucket/prefix")
    parser.add_argument("directory", type=Path, metavar="checkpoints/RUN")
    parser.add_argument(
        "--timeout",
        type=float,
        default=TIMEOUT_SECONDS,
        help="seconds for what is left if stdin ends early (default: %(default)g)",
    )
    with in_one_sentence("fabric_llm.mirror"):
        given = parser.parse_args(argv)
        address.require(given.address, "The address")
        # Imported only now, so that --help needs neither obstore nor filelock.
        from fabric_llm.mirror.commands import Commands
        from fabric_llm.mirror.upload import Uploader
    # Signals to the trainer's group are the trainer's, which then says when to end.
    with suppress(PermissionError):  # it leads its own session already
        os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    try:
        commands = Commands(report, given.timeout)
        uploader = Uploader(given.address, given.directory, commands, lease_seconds)
        threading.Thread(target=commands.listen, args=(sys.stdin,), daemon=True).start()
        uploader.run()
    except Exception as error:
        fault = as_fault(error)
        if fault.code == UNEXPECTED:  # an error in this package: a report of it needs the traceback
            traceback.print_exc()
        report({"refused": str(fault), "code": fault.code})
        return fault.code
    return DONE


_lock = threading.Lock()


def report(line: dict[str, Any]) -> None:
    """Write a report as one line. Nobody reads it once the trainer was killed."""
    with _lock, suppress(BrokenPipeError):
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    plain_output()
    code = main()
    # Neither a thread that waits for stdin nor a stdout that nobody reads is waited for.
    with suppress(OSError):
        sys.stdout.flush()
    os._exit(code)
