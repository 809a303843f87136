"""What is due after a step, and saving: within the step or in the background, published once all
ranks have written."""

import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Optional

from fabric_llm.base import files
from fabric_llm.base.command_line import Flags
from fabric_llm.base.ranks import gather
from fabric_llm.checkpoint import keep, writing
from fabric_llm.checkpoint.keep import Progress, step_directory
from fabric_llm.data.order import RowsRead
from fabric_llm.plan import run_directory, same_run
from fabric_llm.plan.plan import Plan
from fabric_llm.plan.schedule import Schedule
from fabric_llm.run.run import Run


def due_after(
    before: Progress, progress: Progress, schedule: Schedule, flags: Flags
) -> tuple[bool, bool, bool]:
    """(logs, evaluates, saves): what is due after the step from `before` to `progress`.

    Each is due at its interval and after the last step, and an evaluation also in the middle and at
    the end of each epoch, and where a rewind may go back to. A step after which the run saves or
    evaluates is logged.
    """

    def at(interval: Optional[int]) -> bool:
        return schedule.is_over(progress) or interval is not None and progress.step % interval == 0

    half_done = schedule.half_epochs(progress.position) > schedule.half_epochs(before.position)
    saves, to_go_back_to = at(flags.save.save_step_interval), goes_back_by_losses(flags)
    evaluates = half_done or at(flags.evaluation.eval_step_interval) or saves and to_go_back_to
    return (
        saves or evaluates or before == schedule.start or at(flags.logging.log_step_interval),
        evaluates,
        saves,
    )


def goes_back_by_losses(flags: Flags) -> bool:
    """Whether the run goes back, once too much is forgotten, to a checkpoint with known losses."""
    evaluation = flags.evaluation
    return evaluation.forgetting_budget is not None and evaluation.forgetting_action == "rewind"


def evaluates_first(plan: Plan, flags: Flags) -> bool:
    """True if an evaluation comes before the first step.

    It does in a new run, and where one is due that a request to stop has cut off.
    """
    if keep.is_evaluated(plan.resumed):
        return False
    start = plan.start
    if start.step == 0:
        return True
    batch = plan.resumed["schedule"]["global_batch_size"]
    before = replace(start, step=start.step - 1, position=max(start.position - batch, 0))
    return due_after(before, start, plan.schedule, flags)[1]


def save(run: Run, *, stops: bool) -> None:
    """Write a checkpoint. Blocks for the last one, and always without --async_save. All ranks call
    it.

    If a request to stop has cut off an evaluation that is due here, the checkpoint has no losses,
    and a resumed run makes it.
    """
    publish(run)
    step, plan, log, losses = run.progress.step, run.plan, run.log, run.losses
    run.requests.answer_save()
    with log.untimed:
        run.watch.mark(step, "saving")
        in_background = run.background is not None and not (run.is_over or stops)
        # the set by whose loss the best checkpoints are kept
        followed = run.flags.save.keep_best_of
        loss = math.nan
        if losses is not None:
            loss = log.overall(losses) if followed is None else losses.get(followed, math.nan)
        # The rows that all ranks have read since `from_position`, which `fabric_llm.verify`
        # compares with the data.
        before = plan.resumed.get(
            "rows_read", {"from_position": plan.start.position, "count": 0, "hash_sum": 0}
        )
        read = sum(gather(run.batches.rows_read), RowsRead(before["count"], before["hash_sum"]))
        pending = writing.begin(
            step_directory(plan.run_directory, step),
            run.fabric,
            run.model.module,
            run.optimizer,
            skeleton=run.skeleton,
            tokenizer=plan.model.tokenizer,
            progress=run.progress,
            facts={
                **same_run.facts(plan, run.schedule, run.flags),
                "guard": run.guard.state(),
                "scaler": run.fabric.strategy.precision.state_dict(),
                "eval_loss": loss if math.isfinite(loss) else None,
                "eval_losses": losses,
                "rows_read": {"from_position": before["from_position"], **asdict(read)},
            },
            origin=origin(plan) if run.fabric.global_rank == 0 else {},
            probe=writing.record_probe(run.model, plan.probe_input(), run.fabric.device),
            state_dict_type=run.flags.fsdp.state_dict_type,
            copy=in_background,
        )
        if copies := pending.copies:
            taken, free = (f"{size / 2**30:.2f} GiB" for size in copies)
            if not pending.is_copied:
                said = f"the copies would take {taken} of a host's memory, of which {free} are free"
                log.line(
                    f"Warning: --async_save: {said}: training waits for the save of step {step}."
                )
            elif not run.background.has_written:
                log.line(
                    f"--async_save: while a checkpoint is written, its copies take {taken} of a "
                    "host's memory."
                )
        if pending.is_copied:
            run.saving = run.background.write(pending)
        else:
            writing.write(pending)
            _publish(run, pending)
        run.watch.mark(step, "in the next step")
    if run.is_over or not stops:  # a stop doesn't wait for samples
        run.samples.take(run.model, run.progress)


def origin(plan: Plan) -> dict[str, Any]:
    """Hashes of what the run is made from, for manifests; those of data are by source in a
    mixture."""

    def sha256(path: Path) -> Optional[str]:
        return files.sha256(path) if path.is_file() else None

    return {
        "arguments_sha256": sha256(plan.run_directory / "arguments.yaml"),
        "tokenizer_sha256": sha256(plan.data.dataset.folder / "tokenizer" / "tokenizer.json"),
        "data": plan.of_each_source(
            lambda one: {"folder": str(one.folder), **one.manifest.get("made_by", {})}
        ),
        "data_sha256": plan.of_each_source(
            lambda dataset: sha256(dataset.folder / "manifest.json")
        ),
        "data_fingerprint": plan.of_each_source(lambda dataset: dataset.fingerprint),
    }


def has_written(run: Run) -> bool:
    """True once this rank's part of a checkpoint is written in the background, and waits to be
    published."""
    return run.saving is not None and run.saving.done()


def publish(run: Run, ranks_that_have_written: Optional[int] = None) -> None:
    """Publish the checkpoint that was written in the background, if there is one and all ranks have
    written it.

    ranks_that_have_written: how many; None: wait for all. All ranks call it.
    """
    if run.saving is not None and ranks_that_have_written in (None, run.fabric.world_size):
        pending, run.saving = run.saving.result(), None
        _publish(run, pending)


def kept(run: Run) -> keep.Kept:
    """The checkpoints that --keep_last leaves."""
    flags, named = run.flags.save, run_directory.given_checkpoint(run.flags)

    def has_room(document: dict[str, Any]) -> bool:
        return run.guard.has_room(document.get("eval_losses"))

    to_go_back_to = has_room if goes_back_by_losses(run.flags) else None
    by_number = flags.keep_last, flags.keep_every, flags.keep_best, flags.keep_best_of
    return keep.Kept(*by_number, flags.save_step_interval, to_go_back_to, named)


def _publish(run: Run, pending: writing.Pending) -> None:
    """Give the written checkpoint its name, once the log of its steps is durable, and prune."""
    writing.commit(pending, before=lambda: run.log.metrics.make_durable())
    if run.fabric.global_rank != 0:
        return
    step, flags, folder = files.step_of(pending.target), run.flags, run.plan.run_directory
    if flags.save.keep_last is not None:
        keep.prune(folder, kept(run))
    run_directory.write_status(folder, None, "running", step, True)
    run_directory.record_event(folder, "saved", step)
    run.log.line(f"step {step}/{run.schedule.max_step}  saved {pending.target}")
    if flags.logging.log_model == "all":
        run.log.trackers.upload(pending.target)
