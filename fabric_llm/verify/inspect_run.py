"""Inspect a whole run: its checkpoints, its logs, and the export of its newest checkpoint. Nothing is changed."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fabric_llm.base import files, step_names
from fabric_llm.base.faults import DONE, STOPPED, Fault
from fabric_llm.plan import run_directory
from fabric_llm.verify.export import VerificationError, export, read_proof
from fabric_llm.verify.inspect_checkpoint import verify_checkpoint
from fabric_llm.verify.inspect_log import check_metrics, check_status
from fabric_llm.verify.report import Report, say


def verify_run(run: Path, exports: bool) -> Report:
    """Inspect the run directory `run`. exports: also export the newest checkpoint, to compare logits."""
    report = Report(str(run))
    status = run_directory.read_status(run)  # first, because a run that is still going saves more
    documents: dict[int, dict[str, Any]] = {}  # step -> what `verify_checkpoint` returns
    for path in step_names.step_directories(run):
        before, code = len(report.findings), report.code
        document = verify_checkpoint(path, report)
        if not path.exists():  # pruned by a run that is still going, so that its files seemed to be missing
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
    saved_at_the_end = status.get("step") == status.get("last_durable_step")  # which a second signal prevents
    over = status.get("code") in (DONE, STOPPED) and saved_at_the_end
    report.look(check_status, run / run_directory.STATUS, status, durable)
    report.look(check_metrics, run / "metrics.jsonl", over, durable, documents)
    if exports and durable in documents:
        require_room_for_export(newest)
        report.look(check_export, newest)
    elif exports and newest is not None:
        report.note(f"{newest.name} wasn't exported, as something is wrong with it.")
    return report


def require_room_for_export(newest: Path) -> None:
    """Raises Fault (2) if the temporary folder has no room for the weights."""
    stored = [*newest.glob("*.safetensors"), *newest.glob("weights/*.safetensors")]
    needed, free = sum(file.stat().st_size for file in stored), shutil.disk_usage(tempfile.gettempdir()).free
    if free < needed * 1.01 + 2**24:
        raise Fault(
            f"The export of {newest} needs {needed / 2**30:,.2f} GiB, but {tempfile.gettempdir()!r} has "
            f"{free / 2**30:,.2f} GiB free: set TMPDIR to a larger disk, or leave it out with --no_export."
        )


def check_export(newest: Path, report: Report) -> str:
    """Export the newest checkpoint to a temporary directory, which compares it with plain transformers."""
    say(f"{newest}: exporting to compare with plain transformers")
    with tempfile.TemporaryDirectory(prefix="fabric_llm-verify-") as folder:
        try:
            proof = export(newest, Path(folder) / "export")
        except VerificationError as error:
            report.find(f"{str(newest)!r}, exported, isn't the model that was trained: {error}")
            return ""
    report.export = asdict(proof)
    return read_proof(proof)
