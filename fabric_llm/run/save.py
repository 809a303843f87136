"""What is due after a step, and saving: within the step or in the background, published once all
ranks have written."""

import math
import shutil
import signal
import sys
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Optional

from fabric_llm.base import files, register
from fabric_llm.base.faults import Fault
from fabric_llm.base.flag import Flags
from fabric_llm.base.ranks import from_rank_zero, gather
from fabric_llm.checkpoint import keep, retention, state_dicts, trainer_state, writing
from fabric_llm.checkpoint.keep import Progress, step_directory
from fabric_llm.data.batches import MicroBatch
from fabric_llm.data.columns import StreamEnd, is_stream
from fabric_llm.data.order import RowsRead
from fabric_llm.plan import mirrored, resumption, run_status, same_run
from fabric_llm.plan.plan import Plan
from fabric_llm.plan.schedule import Schedule
from fabric_llm.processes.stop import SIGNALS
from fabric_llm.run.run import Run
from fabric_llm.training import adamw


def due_after(
    before: Progress, progress: Progress, schedule: Schedule, flags: Flags
) -> tuple[bool, bool, bool]:
    """(logs, evaluates, saves): what is due after the step from `before` to `progress`.

    Each is due at its interval and after the last step; see also `evaluation_is_due`. A step after
    which the run saves or evaluates is logged.
    """
    saves = _is_due(progress, flags.save.save_step_interval, schedule)
    evaluates = evaluation_is_due(progress, progress.position - before.position, schedule, flags)
    logs = _is_due(progress, flags.logging.log_step_interval, schedule)
    # The first step of a process is logged, too, so that its user sees early that it trains.
    return logs or saves or evaluates or before == schedule.start, evaluates, saves


def evaluation_is_due(progress: Progress, sequences: int, schedule: Schedule, flags: Flags) -> bool:
    """Whether an evaluation is due after the step to `progress`, which has read `sequences`.

    It is at its interval, in the middle and at the end of each epoch, after the last step, and
    where a rewind may go back to.
    """
    if _is_due(progress, flags.evaluation.eval_step_interval, schedule):
        return True
    saves = _is_due(progress, flags.save.save_step_interval, schedule)
    # A rewind chooses a checkpoint by its losses, so each that is saved at an interval has them.
    if saves and goes_back_by_losses(flags):
        return True
    # A step seldom ends exactly at a half epoch, so the first one behind it counts.
    before = max(progress.position - sequences, 0)
    return schedule.half_epochs(progress.position) > schedule.half_epochs(before)


def _is_due(progress: Progress, interval: Optional[int], schedule: Schedule) -> bool:
    # The last step is logged, evaluated and saved whatever the intervals are.
    if schedule.is_over(progress):
        return True
    return interval is not None and progress.step % interval == 0


def goes_back_by_losses(flags: Flags) -> bool:
    """Whether the run goes back, once too much is forgotten, to a checkpoint with known losses."""
    evaluation = flags.evaluation
    return evaluation.forgetting_budget is not None and evaluation.forgetting_action == "rewind"


def evaluates_first(plan: Plan, flags: Flags) -> bool:
    """Whether an evaluation comes before the first step: in a new run, and where one is due whose
    losses aren't known, since a request to stop has cut it off."""
    # Losses that are known are those of an evaluation here, of this process or one before.
    if keep.is_evaluated(plan.resumed):
        return False
    # A new run measures the model before it changes it. What is forgotten is judged by that.
    if plan.start.step == 0:
        return True
    # The last step was made with the batch size of the run before, which this run may have changed.
    sequences = plan.resumed["schedule"]["global_batch_size"]
    return evaluation_is_due(plan.start, sequences, plan.schedule, flags)


def batches_at(run: Run, before: Progress) -> list[MicroBatch]:
    """This rank's micro-batches of the step from `before`. Where a stream ends, save the steps up
    to there and raise StreamEnd. All ranks call it."""
    try:
        return run.batches.at(before.position)
    except StreamEnd:
        publish(run)
        run.progress, there = before, step_directory(run.plan.run_directory, before.step)
        # Where the run began there is nothing to lose.
        if before != run.plan.start and not from_rank_zero(there.exists):
            save(run, stops=True)
        raise


def save(run: Run, *, stops: bool) -> None:
    """Write a checkpoint. Blocks for the last one, and always without --async_save. All ranks call
    it."""
    # One checkpoint at a time: the one before, if it is still being written, is published first.
    publish(run)
    step, plan = run.progress.step, run.plan
    # Again, since what an optimizer keeps may change after its first step.
    require_saveable(run)
    # This save answers all requests so far. A later one gets a save of its own.
    run.requests.answer_save()
    # Before the save, since a run that is killed in between doesn't come here again.
    if run.samples is not None and (run.is_over or not stops):  # a stop doesn't wait for samples
        run.samples.take(run.model, run.progress)
    # A slow disk takes minutes, in which who asked would see nothing. After a rewind to the
    # beginning the run saves so, too, and goes on.
    if stops:
        run.log.line(f"step {step}/{run.schedule.max_step}  saving, before anything else")
    with run.log.untimed:
        # A save may take longer than a step, so the watch is told what goes on here.
        mark = partial(run.watch.mark, step, "saving")
        mark()
        # Rank 0 alone writes the manifest, and hashing takes time.
        made_from = origin(plan) if run.fabric.global_rank == 0 else {}
        pending = writing.begin(
            step_directory(plan.run_directory, step),
            run.fabric,
            run.model.module,
            run.optimizer,
            skeleton=run.skeleton,
            tokenizer=plan.model.tokenizer,
            progress=run.progress,
            facts=facts(run),
            origin=made_from,
            probe=writing.record_probe(run.model, plan.data.probe_input(), run.fabric.device),
            state_dict_type=run.flags.fsdp.state_dict_type,
            # The last save has no training beside it, so it needs no copies.
            copy=run.background is not None and not (run.is_over or stops),
            ranks_apart=run.ranks_apart,
        )
        # From copies the files are written while training goes on, and published after a later
        # step.
        _report_copies(run, pending)
        if pending.is_copied:
            run.saving = run.background.write(pending)
        else:
            # To write all files may take longer than --hang_timeout, unlike one of them.
            writing.write(pending, mark=mark)
            _publish(run, pending)
        run.watch.mark(step, "in the next step")


def facts(run: Run) -> dict[str, Any]:
    """What progress.json says besides the progress: what a resumed run goes on from, and what it
    must have in common with this one. All ranks call it.

    If a request to stop has cut off an evaluation that is due here, the checkpoint has no losses,
    and a resumed run makes the evaluation.
    """
    plan, losses = run.plan, run.losses
    # The best checkpoints are kept by the loss of one set, or of the training data.
    loss, followed = math.nan, run.flags.save.keep_best_of
    if losses is not None:
        loss = run.log.overall(losses) if followed is None else losses.get(followed, math.nan)
    # `fabric_llm.verify` compares the rows that all ranks have read with the data.
    before = {"from_position": plan.start.position, "count": 0, "hash_sum": 0}
    # A resumed run adds to the record of the processes before it.
    before = plan.resumed.get("rows_read", before)
    read = RowsRead(before["count"], before["hash_sum"])
    for of_rank in gather(run.batches.rows_read):
        read += of_rank
    # Rows of a stream don't follow from a position, so the stream's state is saved.
    rows: Any = plan.data.dataset.train
    stream = {}
    if is_stream(rows):
        stream["stream"] = rows.state_at(run.progress.position)
    return {
        **same_run.facts(plan, run.schedule, run.flags),
        **stream,
        **({} if run.began_with is None else {"began_with": run.began_with}),
        "first_weights": run.first_weights,
        # The losses before step 1 can't be measured again.
        "guard": {**run.guard.state(), "before": run.forgetting.before},
        "scaler": run.fabric.strategy.precision.state_dict(),
        # JSON has no NaN.
        "eval_loss": loss if math.isfinite(loss) else None,
        "eval_losses": losses,
        "rows_read": {"from_position": before["from_position"], **asdict(read)},
    }


def origin(plan: Plan) -> dict[str, Any]:
    """Hashes of what the run is made from, for manifests; those of data are by source in a
    mixture."""

    def sha256(path: Path) -> Optional[str]:
        return files.sha256(path) if path.is_file() else None

    return {
        "arguments_sha256": sha256(plan.run_directory / "arguments.yaml"),
        "tokenizer_sha256": sha256(plan.data.dataset.folder / "tokenizer" / "tokenizer.json"),
        "data": plan.of_each_source(
            lambda one: {"folder": one.given, **one.manifest.get("made_by", {})}
        ),
        "data_sha256": plan.of_each_source(
            lambda dataset: sha256(dataset.folder / "manifest.json")
        ),
        "data_fingerprint": plan.of_each_source(lambda dataset: dataset.fingerprint),
    }


def _report_copies(run: Run, pending: writing.Pending) -> None:
    """Print, for the first save in the background, what its copies take of a host's memory, and for
    each that has no room for them that training waits."""
    if pending.copies is None:
        return
    taken, free = map(files.size, pending.copies)
    if not pending.is_copied:
        run.log.line(
            f"Warning: --async_save: the copies would take {taken} of a host's memory, of which "
            f"{free} are free: training waits for the save of step {run.progress.step}."
        )
    elif not run.background.has_written:
        run.log.line(
            f"--async_save: while a checkpoint is written, its copies take {taken} of a host's "
            "memory."
        )


def has_written(run: Run) -> bool:
    """True once this rank's part of a checkpoint is written in the background, and waits to be
    published."""
    return run.saving is not None and run.saving.done()


def prune(run: Run) -> None:
    """Remove the checkpoints that --keep_last doesn't leave. Called on rank 0.

    With --mirror a checkpoint stays until it has a copy there, unless room on the disk is short.
    The copies of the same checkpoints are removed as well.
    """
    folder, mirror = run.plan.run_directory, run.mirror
    if mirror is None:
        retention.prune(folder, kept(run))
        return
    # Counted together with those that are at the mirror alone, so that both places keep the
    # same ones.
    leaving = retention.not_kept(folder, kept(run), mirror.documents)
    mirror.remove(path.name for path in leaving)
    newest = files.latest(folder)
    needed = sum(entry["bytes"] for entry in files.read(newest)["files"].values())
    for path in leaving:
        # Another one like the newest must find room.
        is_short = shutil.disk_usage(folder).free < 2 * needed
        if path.exists() and not mirror.may_go(path.name) and is_short:
            run.log.line(f"Warning: --mirror: {path.name} goes without a copy: room is short.")
        if path.exists() and (is_short or mirror.may_go(path.name)):
            # The mirror keeps its newest one for now, so it is asked again.
            if path.name in mirror.names:
                mirror.documents[path.name] = keep.progress_or_nothing(path)
            retention.discard([path])


def hear_mirror(run: Run) -> None:
    """Tell what the process of --mirror has reported, on rank 0."""
    if run.mirror is None:
        return
    for report in run.mirror.reports():
        mirrored.tell(report, run.plan.run_directory, run.progress.step, run.log.line)


def wait_for_mirror(run: Run) -> None:
    """After the last step, wait until the last checkpoint is at --mirror, for --mirror_timeout, and
    leave what --keep_last leaves. A signal ends the wait. Called on all ranks."""
    mirror = run.mirror
    if mirror is None:
        return
    if mirror.waiting and (seconds := mirror.seconds_left()):
        print(
            f"Waiting until {mirror.waiting[-1]} is at {mirror.address}, at most {seconds:.0f} s."
        )
        sys.stdout.flush()
    # Since StopSignal.finish signals are ignored, and a second Ctrl-C would raise here. Then the
    # mirror's process has a few seconds, not the rest of the time (Mirror.close).
    for number in SIGNALS:
        signal.signal(number, mirror.end_soon)
    while mirror.waiting and mirror.seconds_left():
        mirror.look()
        hear_mirror(run)
        time.sleep(0.1)
    hear_mirror(run)
    if run.flags.save.keep_last is not None:
        prune(run)


def require_saveable(run: Run) -> None:
    """Raises Fault where checkpoints couldn't hold the state of an optimizer of --code. All ranks
    call it."""
    if "optimizer" not in register.ONLY:
        return
    adamw.require_tensors(run.optimizer)
    states = getattr(run.optimizer, "optimizer", run.optimizer).state.values()
    if any(trainer_state.EMA in state for state in states):
        raise Fault(
            f"the optimizer calls its state {trainer_state.EMA!r}, which is the average of "
            "--ema_decay in checkpoints: take another name."
        )
    try:
        state_dicts.optimizer_held(run.model.module, run.skeleton, run.optimizer)
    except ValueError as error:
        raise Fault(str(error)) from None


def publish(run: Run, ranks_that_have_written: Optional[int] = None) -> None:
    """Publish the checkpoint that was written in the background, if there is one and all ranks have
    written it.

    ranks_that_have_written: how many; None: wait for all. All ranks call it.
    """
    hear_mirror(run)
    # All ranks know the same number, so all publish after the same step.
    if run.saving is not None and ranks_that_have_written in (None, run.fabric.world_size):
        pending, run.saving = run.saving.result(), None
        _publish(run, pending)


def has_room(run: Run, document: dict[str, Any]) -> bool:
    """Whether at most half of each budget was used at the checkpoint of a progress.json."""
    return run.forgetting.has_room(keep.comparable_losses(document))


def kept(run: Run) -> retention.Kept:
    """The checkpoints that --keep_last leaves."""
    flags, to_go_back_to = run.flags.save, None
    # Otherwise no rewind depends on losses.
    if goes_back_by_losses(run.flags):
        to_go_back_to = partial(has_room, run)
    return retention.Kept(
        last=flags.keep_last,
        every=flags.keep_every,
        best=flags.keep_best,
        best_of=flags.keep_best_of,
        interval=flags.save_step_interval,
        to_go_back_to=to_go_back_to,
        named=resumption.given_checkpoint(run.flags),
    )


def _publish(run: Run, pending: writing.Pending) -> None:
    """Give the written checkpoint its name, once the log of its steps is durable, and prune."""
    # A lambda, because ranks other than 0 have no metrics.
    writing.commit(pending, before=lambda: run.log.metrics.make_durable())
    if run.fabric.global_rank != 0:
        return
    step, position = pending.progress.step, pending.progress.position
    flags, folder = run.flags, run.plan.run_directory
    # Before the upload, which takes the logs with it: another machine may go on from there.
    run_status.write_status(folder, None, "running", step, True)
    run_status.record_event(folder, "saved", step, position=position)
    if run.mirror is not None:
        run.mirror.upload(pending.target.name)
    # Only now, when the new checkpoint has its name, may older ones go. Without --keep_last all
    # checkpoints stay.
    if flags.save.keep_last is not None:
        prune(run)
    run.log.line(f"step {step}/{run.schedule.max_step}  saved {pending.target}")
    if flags.logging.log_model == "all":
        run.log.trackers.upload(pending.target)
