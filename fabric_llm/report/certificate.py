"""The certificate of a run for the report: what is checked at once, the last whole one that was written, or a new one."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Optional

from fabric_llm.base import files, step_names
from fabric_llm.base.faults import DONE, STOPPED, Fault
from fabric_llm.base.files import write_atomically
from fabric_llm.checkpoint.progress import read_progress
from fabric_llm.data.mixture import mixture_of
from fabric_llm.report.reading import Run, as_written
from fabric_llm.verify import __main__ as verify
from fabric_llm.verify import inspect_log
from fabric_llm.verify.report import Report

CERTIFICATE = "certificate.json"
LARGEST_LOG_BYTES = 100 * 2**20  # that is checked at once: a few seconds
CHECKED = (
    "STATUS.json against the checkpoints that are there",
    "metrics.jsonl: each step once, in order, none missing, all losses finite",
    "names and sizes of all files of all checkpoints (not their hashes)",
)


def quick(run: Run) -> dict[str, Any]:
    """What is checked in a moment, without torch and without reading weights, in the form of a certificate."""
    report, documents, checked = Report(str(run.folder)), {}, list(CHECKED)
    log = run.folder / "metrics.jsonl"
    with contextlib.redirect_stdout(io.StringIO()):  # findings are printed as they are found
        for path in step_names.checkpoints(run.folder):
            report.look(_check_sizes, path, documents)
        durable = run.checkpoints[-1] if run.checkpoints else 0
        saved_at_the_end = run.status.get("step") == run.status.get("last_durable_step")
        over = run.status.get("code") in (DONE, STOPPED) and saved_at_the_end
        if not run.checkpoints:
            report.note("there is no complete checkpoint.")
        report.look(inspect_log.check_status, run.folder / "STATUS.json", run.status, durable)
        if not log.is_file():
            report.note("there is no metrics.jsonl.")
        elif log.stat().st_size > LARGEST_LOG_BYTES:
            checked.pop(1)
            report.note("metrics.jsonl is too large to be checked in a moment: --verify true checks it.")
        else:
            report.look(inspect_log.check_metrics, log, over, durable, documents)
    return {**vars(report), "verdict": "whole" if report.code == DONE else "damaged", "checked": checked}


def _check_sizes(path: Path, documents: dict[int, dict[str, Any]], report: Report) -> str:
    """Names and sizes of a checkpoint's files. Adds what check_metrics needs of it to `documents`."""
    manifest, progress = files.check_folder(path, hashes=False), read_progress(path)
    position, tokens = progress["progress"]["position"], progress["progress"]["tokens"]
    read = mixture_of(progress).read_before(position) if "mixture" in progress else None
    documents[step_names.step_of(path)] = {"tokens": tokens, "sources": read, "logged": progress["logged"]}
    report.count("checkpoints", 1)
    report.count("files", len(manifest["files"]) + 1)
    report.count("bytes", sum(entry["bytes"] for entry in manifest["files"].values()))
    return path.name


def whole(run: Run) -> dict[str, Any]:
    """Verify the run as `python -m fabric_llm.verify` does, hashes and export included, and keep the certificate with it."""
    document = verify.verified(SimpleNamespace(run=str(run.folder), no_export=False)) | verify.versions_and_date()
    try:
        write_atomically(run.folder / CERTIFICATE, json.dumps(document, indent=2) + "\n")
    except OSError as error:
        raise Fault(f"{str(run.folder / CERTIFICATE)!r} can't be written: {error.strerror}.") from error
    return {**document, "is_of_newest": True}


def last_whole(run: Run) -> Optional[dict[str, Any]]:
    """The certificate in the run directory, with `is_of_newest`: whether the newest checkpoint is the one that it speaks of."""
    try:
        document = as_written(json.loads((run.folder / CERTIFICATE).read_text(errors="replace")))
    except (OSError, ValueError, RecursionError):
        return None
    if document.get("verdict") is None:
        return None
    newest, hashed = step_names.latest(run.folder), (document.get("newest") or {}).get("manifest_sha256")
    return {**document, "is_of_newest": newest is not None and files.sha256(newest / files.MANIFEST) == hashed}
