"""Prove a run, or rehearse its crash: `python -m fabric_llm.verify checkpoints/RUN`, and the same with `--drill`.

The first reads every byte of a run and says everything that is wrong with it: hashes, names and shapes of weights and
optimizer state, NaN, gaps in metrics.jsonl (fabric_llm/inspect_run.py), and whether plain transformers gives the
logits of training. It changes nothing. What it found is a certificate, `--output certificate.json` the same as JSON.
The second trains a few steps with the user's own flags twice, once undisturbed, once killed with SIGKILL and resumed,
and compares bit for bit (fabric_llm/drill.py).

Exit codes: 0 all good, 2 bad arguments, 66 damaged or different, 77 refused for security.
"""

from __future__ import annotations

import argparse
import json
import platform
import secrets
import shutil
import signal
import sys
import tempfile
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Optional

from fabric_llm.base import files
from fabric_llm.base.faults import BAD_INPUT, DONE, REFUSED, STOPPED, Fault
from fabric_llm.base.names import nearest_of
from fabric_llm.processes.launch import find_launcher

if TYPE_CHECKING:  # without torch, which takes seconds to import, --help and bad arguments are answered at once
    from fabric_llm.verify.inspect_run import Report

DESCRIPTION = """Check everything about a run, checkpoints/RUN, and print a certificate. Or, with --drill, train a few
steps of your own configuration, kill a rank, resume, and compare with an undisturbed run bit for bit."""
CHECKED = (
    "size and sha256 of every file of every checkpoint",
    "steps of directories, MANIFEST.json and progress.json",
    "names and shapes of weights and optimizer state",
    "every tensor finite",
    "metrics.jsonl: each step once, in order, none missing",
    "rows that all ranks have read against those that belong to the run's position",
    "STATUS.json",
)


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise Fault(f"{message}; see --help.")


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line; what follows `--` is `train_flags`. Raises Fault (2)."""
    cut = argv.index("--") if "--" in argv else len(argv)
    parser = Parser(prog="python -m fabric_llm.verify", description=DESCRIPTION, allow_abbrev=False)
    parser.add_argument("run", nargs="?", help="checkpoints/RUN; with --drill: the run whose arguments.yaml is taken")
    parser.add_argument("--output", help="write the certificate there as well, as JSON")
    parser.add_argument("--no_export", action="store_true", help="don't export the newest checkpoint to compare logits")
    group = parser.add_argument_group("drill", "python -m fabric_llm.verify --drill -- FLAGS OF train.py")
    group.add_argument("--drill", action="store_true", help="train twice, once killed and resumed, and compare")
    group.add_argument("--steps", type=int, default=8, help="of each run, at least 3 (default: 8)")
    group.add_argument("--seed", type=int, help="of the rank and step that are killed (default: random, printed)")
    group.add_argument(
        "--launcher", default="", help='such as "torchrun --nproc_per_node 8" (default: train.py itself)'
    )
    group.add_argument("--output_dir", help="where to make the folder of the two runs (default: the temporary one)")
    group.add_argument("--keep", action="store_true", help="don't remove it afterwards")
    given = parser.parse_args(argv[:cut])
    given.train_flags = argv[cut + 1 :]
    if given.train_flags and not given.drill:
        raise Fault("flags of train.py after -- go with --drill.")
    if given.run is None and not given.drill:
        raise Fault("which run? python -m fabric_llm.verify checkpoints/RUN.")
    if given.steps < 3:
        raise Fault(f"--steps must be at least 3, not {given.steps}.")
    if given.output is not None and not Path(given.output).absolute().parent.is_dir():
        raise Fault(f"--output {given.output!r}: there is no such folder.")
    return given


def main(argv: Optional[list[str]] = None) -> int:
    """The command; returns its exit code."""
    try:
        given = parse(sys.argv[1:] if argv is None else argv)
        document = (drilled(given) if given.drill else verified(given)) | versions_and_date()
        show(document)
        if given.output is not None:
            Path(given.output).write_text(json.dumps(document, indent=2) + "\n")
    except Fault as fault:
        return complain(str(fault), fault.code)
    except OSError as error:
        return complain(f"{error.filename or ''}: {error.strerror or error}.".removeprefix(": "), BAD_INPUT)
    wrong = document["differences" if given.drill else "findings"]
    if not wrong:
        return DONE
    return complain(wrong[0] + (f" And {len(wrong) - 1} more." if len(wrong) > 1 else ""), document["code"])


def complain(sentence: str, code: int) -> int:
    """One sentence on stderr."""
    print(f"fabric_llm.verify: error: {sentence}", file=sys.stderr, flush=True)
    return code


def stop(number: int, frame: Any) -> NoReturn:
    """SIGTERM: end like after Ctrl-C, so that nothing is left behind."""
    raise KeyboardInterrupt


def drilled(given: argparse.Namespace) -> dict[str, Any]:
    """The certificate of --drill, but for versions and date."""
    flags = given.train_flags
    if given.run is not None:
        arguments = Path(given.run) / "arguments.yaml"
        if not arguments.is_file():
            raise Fault(f"No run at {given.run!r}: it has no {arguments.name}.{nearest_of(Path(given.run))}")
        flags = ["--config", str(arguments), *flags]
    if given.launcher:
        find_launcher(given.launcher)
    from fabric_llm.verify.drill import drill, workplace

    seed = secrets.randbelow(10**6) if given.seed is None else given.seed
    with workplace(given.output_dir, given.keep) as folder:
        return drill(flags, folder, steps=given.steps, seed=seed, launcher=given.launcher)


def verified(given: argparse.Namespace) -> dict[str, Any]:
    """The certificate of a run, but for versions and date."""
    require_run(Path(given.run))
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    report = verify_run(Path(given.run), exports=not given.no_export)
    return {
        "what": "verification of a run",
        "verdict": {DONE: "whole", REFUSED: "refused"}.get(report.code, "damaged"),
        "checked": [*CHECKED, *(["the newest checkpoint's logits in plain transformers"] if report.export else [])],
        **asdict(report),
    }


def versions_and_date() -> dict[str, Any]:
    """What a certificate was made with, and when."""
    from fabric_llm.checkpoint.writing import versions

    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return {"versions": {**versions(), "python": platform.python_version()}, "date_utc": now}


def show(document: dict[str, Any]) -> None:
    """A certificate, one line an item."""
    print("\nCertificate")
    for key, value in document.items():
        if isinstance(value, dict):
            value = ", ".join(f"{k} {v:,}" if type(v) is int else f"{k} {v}" for k, v in value.items())
        for line in value if isinstance(value, list) else [value]:
            print(f"  {key:<15} {line}")
    sys.stdout.flush()


def require_run(run: Path) -> None:
    """Raises Fault (2) where there is no run."""
    if not run.is_dir():
        raise Fault(f"No run at {str(run)!r}.{nearest_of(run)}")
    if (run / files.MANIFEST).is_file():
        raise Fault(f"{str(run)!r} is a checkpoint; what is verified is its run, {str(run.parent)!r}.")


def verify_run(run: Path, exports: bool) -> Report:
    """Everything there is to check about the run directory `run`. Raises Fault (2) where there is none."""
    from fabric_llm.base import step_names
    from fabric_llm.run import run_directory
    from fabric_llm.verify import inspect_run

    require_run(run)
    report = inspect_run.Report(str(run))
    status = run_directory.read_status(run)  # first: a run that is going on saves more
    documents: dict[int, dict[str, Any]] = {}  # step -> what `verify_checkpoint` returns
    for path in step_names.step_directories(run):
        before, code = len(report.findings), report.code
        document = verify_checkpoint(path, report)
        if not path.exists():  # the run is going on; what was found is that its files went away
            del report.findings[before:]
            report.code = code
            report.note(f"{path.name} was pruned meanwhile.")
        elif document is not None:
            documents[step_names.step_of(path)] = document
    for left in sorted(p.name for p in run.iterdir() if p.name.startswith((".tmp-step-", ".trash-step-", "aside-"))):
        report.note(f"{left} isn't a checkpoint of the run and wasn't looked at.")
    newest = step_names.latest(run)
    durable = 0 if newest is None else step_names.step_of(newest)
    if newest is None:
        report.find(f"{str(run)!r} holds no complete checkpoint (step-N).")
    else:
        hashed = files.sha256(newest / files.MANIFEST)
        report.newest = {"name": newest.name, "step": durable, "manifest_sha256": hashed}
    saved_at_the_end = status.get("step") == status.get("last_durable_step")  # not so after a second signal
    over = status.get("code") in (DONE, STOPPED) and saved_at_the_end
    report.look(inspect_run.check_status, run / run_directory.STATUS, status, durable)
    report.look(inspect_run.check_metrics, run / "metrics.jsonl", over, durable, documents)
    if exports and durable in documents:
        require_room_for_export(newest)
        report.look(check_export, newest)
    elif exports and newest is not None:
        report.note(f"{newest.name} wasn't exported, as something is wrong with it.")
    return report


def verify_checkpoint(path: Path, report: Report) -> Optional[dict[str, Any]]:
    """Its manifest, with "tokens" and "logged" of progress.json; None if anything is wrong with it."""
    from fabric_llm.base import step_names
    from fabric_llm.checkpoint import reading
    from fabric_llm.verify.inspect_run import all_faults, check_finite, check_rows, check_shapes, say

    say(f"{path}: hashing")
    before = len(report.findings)
    try:
        progress = reading.verified(path, hashes=True)
        document = files.read(path)
    except (Fault, OSError) as first:
        for fault in all_faults(path, first):
            report.find(str(fault), fault.code)
        say("  What is in it wasn't looked at.")
        return None
    sizes = [entry["bytes"] for entry in document["files"].values()]
    report.count("checkpoints", 1)
    report.count("files", len(sizes) + 1)
    report.count("bytes", sum(sizes) + (path / files.MANIFEST).stat().st_size)
    say(f"  {len(sizes)} files, {sum(sizes):,} bytes as in {files.MANIFEST}; world size {document.get('world_size')}")
    step = step_names.step_of(path)
    said = {files.MANIFEST: document.get("step"), "trainer/progress.json": progress["progress"]["step"]}
    for name, written in said.items():
        if written != step:
            report.find(f"{str(path / name)!r} is that of step {written}, not of step {step}.")
    report.look(check_shapes, path, progress)
    report.look(check_finite, path)
    report.look(check_rows, path / "trainer" / "progress.json", progress)
    whole = len(report.findings) == before
    return {**document, "tokens": progress["progress"]["tokens"], "logged": progress["logged"]} if whole else None


def require_room_for_export(newest: Path) -> None:
    """Raises Fault (2) where the temporary folder can't take the weights."""
    stored = [*newest.glob("*.safetensors"), *newest.glob("weights/*.safetensors")]
    needed, free = sum(file.stat().st_size for file in stored), shutil.disk_usage(tempfile.gettempdir()).free
    if free < needed * 1.01 + 2**24:
        raise Fault(
            f"The export of {newest} needs {needed / 2**30:,.2f} GiB, but {tempfile.gettempdir()!r} has "
            f"{free / 2**30:,.2f} GiB free: set TMPDIR to a larger disk, or leave it out with --no_export."
        )


def check_export(newest: Path, report: Report) -> str:
    """Export the newest checkpoint to a temporary directory; what plain transformers makes of it is compared there."""
    from fabric_llm.verify.export import VerificationError, export, read_proof
    from fabric_llm.verify.inspect_run import say

    say(f"{newest}: exporting to compare with plain transformers")
    with tempfile.TemporaryDirectory(prefix="fabric_llm-verify-") as folder:
        try:
            proof = export(newest, Path(folder) / "export")
        except VerificationError as error:
            report.find(f"{str(newest)!r}, exported, isn't the model that was trained: {error}")
            return ""
    report.export = asdict(proof)
    return read_proof(proof)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, stop)
    try:
        code = main()
    except KeyboardInterrupt:
        code = complain("interrupted.", 130)
    sys.exit(code)
