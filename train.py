#!/usr/bin/env python
"""Train a Hugging Face causal language model: `python train.py --help`. `train` is the loop."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from typing import TYPE_CHECKING, Optional

if __name__ == "__main__":
    # A request to stop waits for `StopSignal`: here it would show a traceback of the imports.
    signal.pthread_sigmask(
        signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
    )

from arguments import Arguments
from fabric_llm.base.command_line import is_rank_zero
from fabric_llm.base.program import outlast_readers, plain_output, without_collection
from fabric_llm.plan import checks
from fabric_llm.plan.start import ThisRank, leave_at_once, report_errors, start
from fabric_llm.processes import launch
from fabric_llm.processes.stop import StopSignal
from fabric_llm.training.schedule import arguments_of, lr_at
from parse_arguments import parse_train

# what needs torch is imported when it is used: --help and mistakes are answered at once
if TYPE_CHECKING:
    from fabric_llm.run.run import Run


def main(argv: Optional[list[str]] = None) -> None:
    # Before anything that takes time: from here on a request to stop is heard.
    signals = StopSignal(leave_at_once)
    try:
        with report_errors():
            # Before is_rank_zero() and the checks, which read the ranks that this puts into the
            # environment.
            launch.adopt_launcher()
            arguments = parse_train(argv)
            # A demo that is resumed has its own flags, so nothing was found of this one.
            is_new = arguments.checkpoint.resume is not True
            if arguments.demo and is_new and is_rank_zero():
                # Before the checks, whose sentences may be about flags of the demo.
                print(
                    "No --config, --model_name or --train_data_dir: the demo, configs/demo.yaml.",
                    flush=True,
                )
            checks.check_training(arguments)
            rank = start(arguments)
            # Only a process that was started with these very flags can be started again with others
            # when a fast path fails (run/fallback.py).
            rank.is_program = argv is None and launch.is_own_command()
            with without_collection():
                from fabric_llm.run.supervision import supervise
            supervise(rank, arguments, signals, lambda: train(rank, arguments, signals))
    finally:
        signals.restore()


def train(rank: ThisRank, flags: Arguments, signals: StopSignal) -> bool:
    """The run, from its first step or where it resumes to the last. True if asked to stop before.
    All ranks call it."""
    from fabric_llm.model.language_model import trained_loss
    from fabric_llm.run import build, metrics, save, verdicts
    from fabric_llm.training import step

    run = build.build(rank, flags, signals)
    fabric, watch = rank.fabric, rank.watch
    guard, forgetting, log = run.guard, run.forgetting, run.log
    shape = arguments_of(flags.flat())
    stops = before_first_step(run)

    while not (stops or run.is_over):
        # Where the step begins and ends. Its data, its learning rate and what is due after it
        # follow from these two.
        before, run.progress, run.losses = run.progress, run.schedule.after(run.progress), None
        number = run.progress.step
        logs, evaluates, saves = save.due_after(before, run.progress, run.schedule, flags)
        log.begin(number)
        lr = lr_at(before.step, max_step=run.schedule.max_step, **shape)
        step.set_lr(run.optimizer, lr)
        step.seed_step(flags.training.seed, before.step, fabric.global_rank)

        # The gradient of the mean loss over all target tokens of the global batch, counted before
        # the first forward.
        micro_batches = [fabric.to_device(batch) for batch in save.batches_at(run, before)]
        targets, total = step.count_targets(fabric, micro_batches), 0.0
        how = run.plan.syncs_every_micro_batch, run.plan.model.sums_in_float32
        for batch in step.accumulate(fabric, run.model, micro_batches, *how):
            # Of this micro-batch: the loss, and behind it `other_losses` where there are any.
            losses = run.model(**batch) / targets
            step.backward(fabric, trained_loss(losses, run.plan.model.router_aux_loss_coef))
            total = total + losses.detach()
        del losses  # its graph references the parameters, which a rewind frees
        with log.waits:  # here the host waits for the device, and for the other ranks
            grad_norm = step.clip(fabric, run.model, run.optimizer, flags.training.grad_clip)
            asked = [*run.requests.ask(), save.has_written(run)]
            (loss, *others), (stop, save_now, written) = step.share(fabric, total, asked)

        # From here on all ranks decide alike, by numbers that they share. A NaN must not come into
        # the weights.
        sampled = step.sample_weights(run.model.parameters()) if logs else None
        update = None
        if guard.accept(loss, grad_norm):
            step.take(run.optimizer)
            # An optimizer of --code has its state only after a step. What no checkpoint could hold
            # ends the run now, and not at its first save.
            if before.step == run.plan.start.step:
                save.require_saveable(run)
            update = step.update_size(sampled, run.model) if logs else None
        else:
            step.leave_out(fabric)
        # Also after a step that was left out: the average needs the number of such steps in a row.
        if run.average is not None:
            run.average.update(number, guard.skipped)
        run.optimizer.zero_grad()

        watch.mark(number, "in the next step")
        log.advance(run.progress)
        verdicts.report(run, before)  # ends the run after too many steps that weren't taken
        save.publish(run, written)
        if logs or stop or save_now or guard.verdict == "rewind":
            at = metrics.AfterStep(number, loss, lr, grad_norm, batch, run.model, fabric, flags)
            more = dict(zip(run.model.module.other_losses, others)) | metrics.of_code(at)
            log.step(loss, lr, grad_norm, update, more)
        if evaluates and not stop and guard.verdict != "rewind":
            stop = not evaluate(run)  # a request to stop cuts it off
        # The loss of the step asks for a rewind, or what the evaluation says of forgetting. A
        # request to stop waits: the next step asks again, and saves where the run is then.
        if "rewind" in (guard.verdict, forgetting.verdict):
            verdicts.rewind(run)
            continue
        stops = bool(stop) or verdicts.stops(run)
        if saves or save_now or stops:
            save.save(run, stops=stops)

    verdicts.require_budget(run)
    run.close()
    return not run.is_over


def before_first_step(run: Run) -> bool:
    """The first evaluation, or one that a request to stop has cut off, and what follows from the
    losses that are known then. True if the run stops here. All ranks call it."""
    from fabric_llm.run import save, verdicts

    verdicts.steer_once_more(run)
    evaluates = save.evaluates_first(run.plan, run.flags)
    stops = evaluates and not evaluate(run)
    if run.forgetting.verdict == "rewind":
        if not evaluates:  # by a budget that is new here, of which no evaluation has told
            run.log.say(f"Warning: {run.forgetting.forgotten}")
        verdicts.rewind(run)
    stops = stops or verdicts.stops(run)
    # The stop that had cut off the last evaluation didn't wait for samples.
    if evaluates and run.is_over and run.samples is not None:
        run.samples.take(run.model, run.progress)
    # A run that began at its own checkpoint can resume from that one.
    if stops and not run.plan.has_checkpoint:
        save.save(run, stops=True)
    return stops


def evaluate(run: Run) -> bool:
    """Log the validation losses, and judge what was forgotten. False where a request to stop came
    first. All ranks call it."""
    from fabric_llm.run import verdicts

    with run.log.untimed:
        result = run.evaluation.of(run.model, run.average)
    run.watch.mark(run.progress.step, "in the next step")
    if result is not None and run.evaluation.is_on:
        run.losses = result.losses
        run.forgetting.accept_evaluation(run.progress.step, result.losses)
        run.log.evaluation(result, run.forgetting)
        verdicts.steer(run)
    return result is not None


if __name__ == "__main__":
    code = 0
    outlast_readers()
    plain_output()
    try:
        main()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(bool(stop.code))
        # as Python does, of which os._exit knows nothing
        if stop.code and not isinstance(stop.code, int):
            print(stop.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    # os._exit doesn't flush the streams.
    sys.stdout.flush()
    sys.stderr.flush()
    # everything is closed; destructors of process groups have been seen to hang, see run/run.py
    os._exit(code)
