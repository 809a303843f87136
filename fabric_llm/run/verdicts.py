"""What follows if the guard didn't take a step, or warns of it: a line, the end, or a rewind."""

from dataclasses import asdict, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Optional

from fabric_llm.base import files, ranks
from fabric_llm.base.faults import BAD_INPUT, NON_FINITE, Fault, as_mistake
from fabric_llm.base.names import command
from fabric_llm.checkpoint import keep, retention
from fabric_llm.checkpoint.keep import Progress, step_directory
from fabric_llm.checkpoint.reading import is_spoilt
from fabric_llm.model import sharded
from fabric_llm.plan import mirrored, run_status
from fabric_llm.plan.schedule import FINEST
from fabric_llm.run import copies, lines, save
from fabric_llm.run.build import load_again, restore
from fabric_llm.run.metrics import MetricsFile, Record
from fabric_llm.run.run import Run
from fabric_llm.training.forgetting import parse_bounds
from fabric_llm.training.guard import Guard

MAX_LR = 1.0  # of AdamW, however small a model is


def report(run: Run, before: Progress) -> None:
    """Log that the step from `before` was left out or is a spike, and which sequences it read.

    Raises Fault (76) after too many steps that were left out.
    """
    guard = run.guard
    if guard.verdict == "rewind" and run.progress.position == run.schedule.end:
        guard.verdict = "skip"  # there is no data to go on with
    if guard.verdict == "take":
        return
    run.log.verdict(before, guard)
    if guard.verdict == "skip" and guard.gives_up():
        save.publish(run)  # a checkpoint in the background is older than these steps
        where = f", sequences {before.position} to {run.progress.position - 1},"
        many = f"{guard.skipped} steps in a row were left out"
        raise _too_many(run, many, f"{guard.reason}{where}")


def steer(run: Run) -> None:
    """After an evaluation, give the sources of sets that have a budget the share that keeps it, by
    a stage of the mixture that begins here. All ranks call it."""
    forgetting, schedule, there = run.forgetting, run.schedule, run.progress
    # Before step 1 nothing is forgotten, and after the last step nothing is read.
    if forgetting.action != "steer" or there.step == 0 or schedule.is_over(there):
        return
    before = schedule.mixture.shares_at(there.position)
    # As a part of the run: the closer evaluations are, the less a share changes at each.
    interval = run.flags.evaluation.eval_step_interval / schedule.max_step
    shares = forgetting.steered(run.losses, schedule.shares_to_steer(there.position), interval)
    bounds = parse_bounds(run.flags.evaluation.steer_bounds)
    try:
        run.schedule = schedule.steered(shares, bounds, there)
    except ValueError as error:  # such as a source that would have less than a row in 10,000
        run.log.say(f"Warning: --forgetting_action steer: shares stay as they are: {error}")
        return
    run.batches.go_on_with(run.schedule.mixture, run.schedule.end)
    after = run.schedule.mixture.shares_at(there.position)
    run.log.schedule = run.schedule
    if after != before:
        run.log.stage_begins(after)


def steer_once_more(run: Run) -> None:
    """In a resumed run: steer by the losses of an evaluation here that wasn't steered by. All ranks
    call it."""
    resumed = run.plan.resumed
    # Losses of other rows than before step 1 say nothing of what is forgotten.
    known = keep.comparable_losses(resumed) if resumed else None
    if known is None or run.losses is None or not run.forgetting.budgets.keys() <= known.keys():
        return
    # An evaluation that is only in the log came after the checkpoint. By the checkpoint's own the
    # run has steered if it did so then.
    if resumed.get("from_log") or resumed["schedule"].get("forgetting_action") != "steer":
        steer(run)


def stops(run: Run) -> bool:
    """Whether the run ends here because too much was forgotten.

    A run that steers ends above a hard budget, or where its shares are as large as they may be. The
    latter is judged in the last third of the steps: while the learning rate is still high, losses
    are above those that are kept once it has decayed.
    """
    forgetting, there, schedule = run.forgetting, run.progress, run.schedule
    if forgetting.verdict != "steer":
        return forgetting.verdict == "stop"
    # What was judged before holds no more: a larger share may have been read since.
    if run.losses is None:
        return False
    if not forgetting.hard.isdisjoint(forgetting.over):
        return True
    shares = schedule.shares_at(there.position)  # up to here: what begins now wasn't tried yet
    most = float(parse_bounds(run.flags.evaluation.steer_bounds)[1])
    # Shares are rounded down, by less than 1 / FINEST.
    has_room = sum(shares.get(name, 0.0) for name in forgetting.budgets) <= most - 1 / FINEST
    return not has_room and 3 * there.step > 2 * schedule.max_step


def require_budget(run: Run) -> None:
    """Raises Fault (76) if a run ends with more forgotten than --forgetting_budget, unless that
    only warns, or the run that was asked to stop will steer on."""
    verdict, is_over = run.forgetting.verdict, run.is_over or stops(run)
    if verdict in ("stop", "rewind") or verdict == "steer" and is_over:
        advice = "--forgetting_budget: more replay or a larger budget may help"
        raise _fault_of_all(run, f"{run.forgetting.forgotten} ({advice})", forgot=True)


def rewind(run: Run) -> None:
    """Go back to a checkpoint, and on with the data after the step that was just made.

    If too much was forgotten, go on with more replay. Raises Fault (76) after too many rewinds,
    without a checkpoint, or if a source can't be read more often. All ranks call it.
    """
    with run.log.untimed:
        _rewind(run)


def _rewind(run: Run) -> None:
    # The checkpoint that is being written may be the one to go back to.
    save.publish(run)
    guard, position = run.guard, run.progress.position
    forgot = run.forgetting.verdict == "rewind"
    reason = run.forgetting.forgotten if forgot else guard.reason
    rewinds = guard.rewinds + 1
    if not guard.may_rewind():
        raise _too_many(run, f"this would be rewind number {rewinds}", reason, forgot)

    def choose() -> Any:
        return choose_checkpoint(run, forgot, reason) if run.fabric.global_rank == 0 else None

    # Rank 0 chooses for all: other machines may not see the newest checkpoint yet. It may fetch it.
    mark = partial(run.watch.mark, run.progress.step, "going back")
    last, document = ranks.from_first(ranks.together(choose, mark))

    # Where the run goes on: the step of the checkpoint, at the position of the data here.
    there = replace(Progress(**document["progress"]), position=position)
    record: Record = {"verdict": "rewind", "reason": reason}
    words = f"went back to {last or 'the beginning'}, past position {position}"
    # More replay answers forgetting. After a spike it is enough to pass over the data.
    if forgot:
        try:
            run.schedule = run.schedule.with_more_replay(run.forgetting.over, there)
        except ValueError as error:
            reason = f"{reason} (--forgetting_budget: {error})"
            raise _fault_of_all(run, reason, forgot) from error
        record["shares"] = run.schedule.mixture.shares_at(position)
        words += f"; from here on {lines.shares(record['shares'])}"
    else:
        run.schedule = run.schedule.after_rewind(there)
    # Optimizer, model and guard are those of the checkpoint; the data goes on from here.
    run.batches.go_on_with(run.schedule.mixture, run.schedule.end)
    run.progress, run.losses = there, document.get("eval_losses")
    # Of a source that was added since, they know nothing.
    if run.losses is not None and not run.schedule.shares_at(position).keys() <= run.losses.keys():
        run.losses = None
    address, watch = run.flags.save.mirror, run.watch
    if last is None:
        load_beginning(run)
    else:
        load_again(run, copies.readable(address, run.mirror, run.ranks_apart, watch, last))
    copies.forget(run.ranks_apart, run.plan.run_directory)
    restore(run, document)
    # A rewind undoes neither the count of rewinds nor what the losses before step 1 were.
    guard.rewinds, run.forgetting.over = rewinds, ()

    # Later checkpoints are moved aside last: a run that is killed before that goes back again.
    folder = run.plan.run_directory
    saves = ranks.from_rank_zero(lambda: leaves_none(folder, last, there.step))
    if saves:
        # Before the save, at which a killed run resumes: it doesn't come here again.
        run.log.rewound(there, run.schedule, words, record)
        save.save(run, stops=True)  # or it would be lost if it was killed before its next save
    if run.fabric.global_rank == 0:
        retention.move_aside(folder, there.step)  # later checkpoints are damaged, or have forgotten
        if run.mirror is not None:
            run.mirror.go_back(there.step)
        run_status.write_status(folder, None, "running", there.step, True)
        MetricsFile(folder / keep.SAMPLES, there)  # also where this process takes none
    if not saves:
        run.log.rewound(there, run.schedule, words, record)


def load_beginning(run: Run) -> None:
    """Load --model_name once more. Raises Fault (2) unless its weights are those before step 1. All
    ranks call it."""
    try:
        load_again(run, None)
        is_there = run.began_with in (None, sharded.fingerprint(run.model))
    except ValueError as error:
        # A folder that is gone is a mistake; a lost rank isn't.
        if as_mistake(error).code != BAD_INPUT:
            raise
        is_there = False
    if not is_there:
        raise Fault(
            f"--model_name {run.flags.model.model_name} doesn't hold the weights with which this "
            "run began, to which it would go back: put them there again, or leave out "
            "--forgetting_action rewind by --resume_override forgetting_action."
        )


def leaves_none(folder: Path, last: Optional[Path], step: int) -> bool:
    """Whether a run that went back to `step` has no checkpoint in its `folder` to go on from.

    A branch that hasn't saved yet needs none: the same command begins it again.
    """
    # `last` is then the checkpoint at which the branch began.
    begins_again = last is not None and files.latest(folder) is None
    return not step_directory(folder, step).exists() and not begins_again


def choose_checkpoint(run: Run, forgot: bool, reason: str) -> tuple[Optional[Path], dict[str, Any]]:
    """(the checkpoint to go back to, its progress.json). Called on rank 0.

    That is the newest whole one that was due and `suits`, or else the one at which a branch began.
    A run that forgot may also go back to its beginning: (None, what its progress.json would be).
    For one that didn't, any checkpoint is better than none.
    """
    plan, step = run.plan, run.progress.step
    interval = run.flags.save.save_step_interval
    hashes = run.flags.checkpoint.verify_checkpoints == "full"

    def was_due(document: dict[str, Any]) -> bool:
        is_due = retention.is_due(document["progress"]["step"], interval)
        return suits(run, forgot, document) and is_due

    # A checkpoint that was due is there in every process that comes here, stopped before or not.
    mend = partial(mirrored.mend, run.mirror)
    last, problems = keep.newest_valid(plan.run_directory, hashes, mend, was_due)
    for problem in problems:
        run.log.line(f"Warning: {problem}")
    if run.mirror is not None:
        last = mirrored.newest(run.mirror, plan.run_directory, was_due, last)
    began = plan.branch_point
    if last is None and began is not None and began.is_dir():
        # A branch that hasn't saved yet goes back to where it began, if not too much was forgotten.
        # A damaged one is passed over, as those of the run itself are.
        try:
            document = keep.verified(began, hashes)
        except Fault as problem:
            run.log.line(f"Warning: {problem}")
        else:
            last = began if suits(run, forgot, document) else None
    # Spikes can be met with one that a user asked for, rather than with none.
    if last is None and not forgot:
        last, _ = keep.newest_valid(plan.run_directory, hashes)
    if last is not None:
        # Its hashes are compared already where --verify_checkpoints asks for it.
        return last, keep.verified(last)
    if forgot and began is not None:
        had_none = f"{began}, where this branch began, is gone or had no room left"
        raise _fault(run, f"{reason}, and {had_none}", forgot)
    if not forgot:
        often = f"--save_step_interval {max(1, step // 4)}"
        raise Fault(
            f"{reason} at step {step}, and no checkpoint to go back to. Start again: the same "
            f"command with {often}",
            NON_FINITE,
        )
    # The beginning: no steps, a guard without history, and the losses before step 1.
    begin = {"progress": asdict(Progress()), "guard": Guard().state()}
    return None, {**begin, "eval_losses": run.forgetting.before}


def suits(run: Run, forgot: bool, document: dict[str, Any]) -> bool:
    """Whether a run may go back to the checkpoint of a progress.json."""
    return not forgot or save.has_room(run, document)


def _too_many(run: Run, many: str, reason: str, forgot: bool = False) -> Fault:
    """Fault (76): steps were left out, or the run went back, too often, the last time for
    `reason`."""
    most = f"--max_skipped_steps {run.guard.max_skipped_steps}"
    return _fault_of_all(run, f"{many} ({most}), the last because of {reason}", forgot)


def _fault_of_all(run: Run, reason: str, forgot: bool) -> Fault:
    """`_fault` as rank 0 says it, which sees the checkpoints. All ranks call it."""
    return ranks.from_rank_zero(lambda: _fault(run, reason, forgot))


def _fault(run: Run, reason: str, forgot: bool) -> Fault:
    """Fault (76) with the next command, at half the rate, or the default one.

    That goes on from the newest checkpoint that `suits` and isn't spoilt, or starts again. A run
    that forgot can also be merged with its base model.
    """
    # A rate that is too high is the likeliest reason, so the advice is half of it. One that no
    # model is trained with was mistyped, such as 2e5 for 2e-5: half of it would be no better.
    folder, rate = run.plan.run_directory, run.flags.training.lr
    half = {"lr": f"{rate / 2 if rate <= MAX_LR else run.flags.declared()['lr'].default:g}"}

    def is_good(document: dict[str, Any]) -> bool:
        path = step_directory(folder, document["progress"]["step"])
        return suits(run, forgot, document) and not is_spoilt(path)

    # Without hashes, which would take long, and the next command compares them.
    last, _ = keep.newest_valid(folder, False, suits=is_good)
    number = next(at for at in count(2) if not folder.with_name(f"{folder.name}-{at}").exists())
    again: dict[str, Any] = {**half, "run_name": f"{folder.name}-{number}"}
    following = f"Start again: the same command with {command(**again)}"
    # The same command would resume the other run.
    if run.flags.checkpoint.resume:
        again = {"config": folder / "arguments.yaml", "resume": "false", **again}
        following = f"Start again: {command('python', 'train.py', **again)}"
    if last is not None:
        more = command(resume="true", checkpoint=last, **half, resume_override="lr")
        following = f"Go on more gently: the same command with {more}"
    latest = files.latest(folder)
    merge = ""
    # At step 0 the model is still its base model.
    has_learned = latest is not None and latest != step_directory(folder, 0)
    # With changed rotary positions the base is another model, which can't be merged with this one.
    # Nor is there anything to learn for an average where each source has a budget.
    learns = not run.plan.data.sources.keys() <= run.forgetting.budgets.keys()
    if forgot and has_learned and learns and run.flags.model.rope is None:
        base, budget = run.flags.model.model_name, run.flags.evaluation.forgetting_budget
        merging = command(
            "python", "-m", "fabric_llm.average", base, folder, forgetting_budget=budget
        )
        merge = f"Next: `{merging}` merges it with its base model inside the budget. Or: "
    at = f"at step {run.progress.step}; the last checkpoint is {latest or 'none'}"
    return Fault(f"{reason} {at}. {merge}{following}", NON_FINITE)
