"""`python -m fabric_llm.verify checkpoints/RUN` verifies a run, and the same with `--drill`
rehearses its crash.

The first reads every byte of a run, changes nothing, and prints a certificate with all that is
wrong (inspect_run.py). The second trains a few steps with the user's own flags twice, once killed
and resumed, and compares bit for bit (drill.py).

Exit codes: 0 all good, 2 bad arguments, 66 damaged or different, 75 stopped on request, 77 refused
for security.
"""

import argparse
import json
import os
import platform
import secrets
import sys
import tempfile
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Optional

from fabric_llm.base import files, register
from fabric_llm.base.ending import Parser, in_one_sentence
from fabric_llm.base.faults import DONE, NO_CHECKPOINT, REFUSED, Fault, unwritten
from fabric_llm.base.names import at_home, command, listed, no_folder
from fabric_llm.base.program import plain_output
from fabric_llm.checkpoint.keep import versions
from fabric_llm.mirror.address import is_address, split
from fabric_llm.mirror.fetch import checkpoints, local
from fabric_llm.mirror.store import Store
from fabric_llm.plan.run_status import read_status
from fabric_llm.verify.drill import drill

DESCRIPTION = """Check everything about a run, checkpoints/RUN, and print a certificate. Or, with
--drill, train a few steps of your own configuration, but without --forgetting_budget, kill a rank,
resume, and compare with an undisturbed run bit for bit."""


def parse(argv: list[str]) -> argparse.Namespace:
    """`train_flags` is what follows `--`. Raises Fault (2)."""
    # Flags of train.py stand behind --, and argparse mustn't take them for its own.
    cut = argv.index("--") if "--" in argv else len(argv)
    parser = Parser(prog="python -m fabric_llm.verify", description=DESCRIPTION, allow_abbrev=False)
    parser.add_argument(
        "run",
        nargs="?",
        type=at_home,
        help="checkpoints/RUN; with --drill: the run whose arguments.yaml is taken",
    )
    parser.add_argument(
        "--output", type=at_home, help="write the certificate there as well, as JSON"
    )
    parser.add_argument(
        "--no_export",
        action="store_true",
        help="don't export the newest checkpoint to compare logits",
    )
    group = parser.add_argument_group(
        "drill", "python -m fabric_llm.verify --drill -- FLAGS OF train.py"
    )
    group.add_argument(
        "--drill", action="store_true", help="train twice, once killed and resumed, and compare"
    )
    group.add_argument("--steps", type=int, default=8, help="of each run, at least 3 (default: 8)")
    group.add_argument(
        "--seed", type=int, help="of the rank and step that are killed (default: random, printed)"
    )
    group.add_argument(
        "--launcher",
        default="",
        help="such as 'torchrun --nproc_per_node 8' (default: train.py alone)",
    )
    group.add_argument(
        "--output_dir",
        type=at_home,
        help="where to make the folder of the two runs (default: the temporary one)",
    )
    given, unknown = parser.parse_known_args(argv[:cut])
    if unknown and given.drill and cut == len(argv):
        at = argv.index(unknown[0])
        meant = command("python", "-m", "fabric_llm.verify", *argv[:at], "--", *argv[at:])
        raise Fault(f"-- comes before the flags of the run: {meant}")
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    # train.py itself checks its flags, and the drill's first run tells what is wrong with them.
    given.train_flags = argv[cut + 1 :]
    if given.train_flags and not given.drill:
        raise Fault("flags of train.py after -- go with --drill.")
    # A drill needs no run: flags of train.py are enough.
    if given.run is None and not given.drill:
        raise Fault("which run? python -m fabric_llm.verify checkpoints/RUN.")
    # One step to save, one to be killed at behind it, and one that a resume goes on with.
    if given.steps < 3:
        raise Fault(f"--steps must be at least 3, not {given.steps}.")
    # A certificate that can't be written is told before hours of reading.
    if given.output is not None:
        files.require_name(Path(given.output), "--output")
    return given


def main(argv: Optional[list[str]] = None) -> int:
    """Run the command and return 0. Raises SystemExit where it fails, or anything is damaged or
    different."""
    with in_one_sentence("fabric_llm.verify"):
        given = parse(sys.argv[1:] if argv is None else argv)
        named, given.run = given.run, given.run and local(given.run)
        # The certificate: what is printed is the same as what is written, but for `code`.
        document = drilled(given) if given.drill else verified(given)
        # A folder of a cache says nothing elsewhere.
        if "run" in document:
            document["run"] = named
            if is_address(named):
                place, name = split(named)
                if others := checkpoints(Store(place), name)[:-1]:
                    document["notes"].append(f"{listed(others)} at {named} wasn't verified.")
        # Which programs found this, and when.
        document["versions"] = {**versions(), "python": platform.python_version()}
        document["date_utc"] = datetime.now(timezone.utc).isoformat(timespec="seconds")
        print("\nCertificate")
        for key, value in document.items():
            # It is the exit code of this command, and would be taken for the run's.
            if key == "code":
                continue
            # A list, such as of findings, has a line for each.
            lines = value if isinstance(value, list) else [value]
            # Counts and versions take one line. Commas make large numbers readable.
            if isinstance(value, dict):
                pairs = []
                for name, entry in value.items():
                    pairs.append(f"{name} {entry:,}" if type(entry) is int else f"{name} {entry}")
                lines = [", ".join(pairs)]
            for line in lines:
                print(f"  {key:<15} {line}", flush=True)
        if given.output is not None:
            # Written before the error is raised: a bad certificate is the one that is looked at.
            try:
                files.write_atomically(Path(given.output), json.dumps(document, indent=2) + "\n")
            except OSError as error:
                raise unwritten(given.output, error) from error
        # The exit code is that of the worst finding, and the sentence that of the first.
        if document["code"] != DONE:
            problems = document["differences" if given.drill else "findings"]
            sentence = problems[0]
            if len(problems) > 1:
                sentence += f" And {len(problems) - 1} more."
            raise Fault(sentence, document["code"])
    return DONE


def drilled(given: argparse.Namespace) -> dict[str, Any]:
    """The certificate of a drill, without versions and date."""
    flags = given.train_flags
    if given.run is not None:
        arguments = Path(given.run) / "arguments.yaml"
        # The flags of a run are in the file that it wrote at its start.
        if not arguments.parent.is_dir():
            raise Fault(no_folder("run", arguments.parent))
        if not arguments.is_file():
            raise Fault(f"{given.run!r} isn't a run: it has no {arguments.name}.")
        # Flags behind it win over those of the run.
        flags = ["--config", str(arguments), *flags]
    # Printed and in the certificate, so that the same drill can be repeated.
    seed = secrets.randbelow(10**6) if given.seed is None else given.seed
    if given.output_dir is not None:
        files.writable(Path(given.output_dir) / "drill")
        Path(given.output_dir).mkdir(parents=True, exist_ok=True)
    where = {"prefix": "fabric_llm-drill-", "dir": given.output_dir, "ignore_cleanup_errors": True}
    with tempfile.TemporaryDirectory(**where) as folder:
        return drill(
            flags, Path(folder).resolve(), steps=given.steps, seed=seed, launcher=given.launcher
        )


def verified(given: argparse.Namespace) -> dict[str, Any]:
    """Make the certificate of a run, without versions and date."""
    run = Path(given.run)
    if not run.is_dir():
        raise Fault(no_folder("run", run))
    # The logs that a checkpoint is compared with are in its run.
    if (run / files.MANIFEST).is_file():
        raise Fault(
            f"{str(run)!r} is a checkpoint; what is verified is its run, {str(run.parent)!r}."
        )
    # transformers must know a model class of the run's own code before it opens a checkpoint.
    if (newest := files.latest(run)) is not None:
        register.load_of_run(newest)
    # A run without a checkpoint has written its flags, see plan/run_directory.py.
    elif not (run / "arguments.yaml").is_file() and (held := listed(sorted(os.listdir(run)))):
        raise Fault(
            f"{str(run)!r} isn't a run: it has no arguments.yaml and no checkpoint. It holds "
            f"{held}."
        )
    else:
        require_saved(run)
    from transformers.utils.logging import set_verbosity_error

    # imports torch, for which --help and bad arguments don't wait
    from fabric_llm.verify.inspect_run import (
        verify_run,
    )

    # Warnings of transformers would stand between the findings.
    set_verbosity_error()
    report = verify_run(run, exports=not given.no_export)
    return {
        "what": "verification of a run",
        "verdict": {DONE: "whole", REFUSED: "refused"}.get(report.code, "damaged"),
        **asdict(report),
    }


def require_saved(run: Path) -> None:
    """Raises Fault (66) for a run that hasn't saved anything yet, in which nothing is damaged."""
    saved = read_status(run).get("last_durable_step")
    # A save that failed, a rewind, or a checkpoint without its manifest is looked into.
    if saved or files.step_directories(run) or any(run.glob("aside-step-*")):
        return
    if (run / "arguments.yaml").is_file():
        raise Fault(
            f"{str(run)!r} has no checkpoint yet, so there is nothing to verify: a run saves at "
            "its end, when it is asked to stop, and every --save_step_interval steps.",
            NO_CHECKPOINT,
        )


if __name__ == "__main__":
    plain_output()
    sys.exit(main())
