"""When a run saves: one checkpoint at a time, in the step or in the background, published once all ranks have written it."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any, Optional

from fabric_llm.base import files, step_names
from fabric_llm.base.ranks import gather
from fabric_llm.checkpoint import keep, writing
from fabric_llm.checkpoint.progress import step_directory
from fabric_llm.data.order import RowsRead
from fabric_llm.plan import run_directory, same_run
from fabric_llm.plan.plan import Plan
from fabric_llm.run.due import Due
from fabric_llm.run.run import Run


def save(run: Run, *, evaluated: bool, due: Due, stops: bool) -> None:
    """Write a checkpoint. Blocks for the last one, and always without --async_save. All ranks call it.

    evaluated: the evaluation of this step was made. One that is due and wasn't is made by a resumed run.
    """
    publish(run)
    step = run.progress.step
    with run.log.untimed:
        run.watch.mark(step, "saving")
        in_background = run.background is not None and not (due.is_last or stops)
        pending = writing.begin(
            step_directory(run.plan.run_directory, step),
            run.fabric,
            run.model.module,
            run.optimizer,
            skeleton=run.skeleton,
            tokenizer=run.plan.model.tokenizer,
            progress=run.progress,
            facts={
                **same_run.facts(run.plan, run.flags),
                "guard": run.guard.state(),
                "scaler": run.fabric.strategy.precision.state_dict(),
                "eval_loss": followed_loss(run) if evaluated else None,
                "eval_losses": run.log.eval_losses if evaluated else None,
                "owes_evaluation": due.evaluates and not evaluated,
                "rows_read": rows_read(run),
            },
            origin=origin(run.plan) if run.fabric.global_rank == 0 else {},
            probe=writing.record_probe(run.model, run.plan.probe_input(), run.fabric.device),
            state_dict_type=run.flags.fsdp.state_dict_type,
            copy=in_background,
        )
        if in_background:
            run.saving = run.background.write(pending)
        else:
            writing.write(pending)
            _publish(run, pending)
        run.watch.mark(step, "in the next step")
    if due.is_last or not stops:  # who asks a run to stop doesn't wait for samples
        run.samples.take(run.model, run.progress)


def has_written(run: Run) -> bool:
    """True once this rank's part of a checkpoint is written in the background; it waits to be published."""
    return run.saving is not None and run.saving.done()


def publish(run: Run, ranks_that_have_written: Optional[int] = None) -> None:
    """Publish the checkpoint that was written in the background, if there is one, and if all ranks have written it.

    None: wait until they have. All ranks call it.
    """
    if run.saving is not None and ranks_that_have_written in (None, run.fabric.world_size):
        pending, run.saving = run.saving.result(), None
        _publish(run, pending)


def _publish(run: Run, pending: writing.Pending) -> None:
    """Give the written checkpoint its name, after the log of its steps is durable, and prune."""
    writing.commit(pending, before=lambda: run.log.metrics.make_durable())
    if run.fabric.global_rank == 0:
        step, flags, folder = step_names.step_of(pending.target), run.flags, run.plan.run_directory
        if flags.save.keep_last is not None:
            keep.prune(folder, flags.save.keep_last, flags.save.keep_every, flags.save.keep_best, run.plan.resume_from)
        run_directory.write_status(folder, None, "running", step, True)
        run.log.saved(step, pending.target)
        if flags.logging.log_model == "all":
            run.log.upload(pending.target)


def rows_read(run: Run) -> dict[str, int]:
    """Which rows all ranks together have read for steps since `from_position`; `fabric_llm.verify` compares them."""
    none_read = {"from_position": run.plan.start.position, "count": 0, "hash_sum": 0}
    before = run.plan.resumed.get("rows_read", none_read)
    read = sum(gather(run.batches.rows_read), RowsRead(before["count"], before["hash_sum"]))
    return {"from_position": before["from_position"], **asdict(read)}


def followed_loss(run: Run) -> Optional[float]:
    """The loss that the best checkpoints are kept by."""
    followed = run.flags.save.keep_best_of
    loss = run.log.eval_loss if followed is None else run.log.eval_losses.get(followed, math.nan)
    return loss if math.isfinite(loss) else None


def origin(plan: Plan) -> dict[str, Any]:
    """Hashes of what the run is made from, for manifests."""
    data = Path(plan.data.dataset.folder)
    made_from = {
        "arguments": plan.run_directory / "arguments.yaml",
        "data": data / "manifest.json",
        "tokenizer": data / "tokenizer" / "tokenizer.json",
    }
    hashes = {f"{name}_sha256": _sha256(path) for name, path in made_from.items()}
    if plan.data.mixture is None:
        return {**hashes, "data_fingerprint": plan.data.dataset.fingerprint}
    hashes["data_sha256"] = {
        name: _sha256(source.folder / "manifest.json") for name, source in plan.data.sources.items()
    }
    return {**hashes, "data_fingerprint": {name: source.fingerprint for name, source in plan.data.sources.items()}}


def _sha256(path: Path) -> Optional[str]:
    return files.sha256(path) if path.is_file() else None
