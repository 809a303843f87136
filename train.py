#!/usr/bin/env python
"""Train a Hugging Face causal language model: `python train.py --help`. `train` is the loop."""

from __future__ import annotations

import os
import sys
import traceback
from typing import TYPE_CHECKING, Optional

from arguments import Arguments, parse_train
from fabric_llm.base.command_line import is_rank_zero
from fabric_llm.base.console import outlast_readers, plain_output
from fabric_llm.plan import mistakes
from fabric_llm.plan.starting import leave_at_once, start, told_in_one_sentence, without_collection
from fabric_llm.processes import launch
from fabric_llm.processes.stop import StopSignal
from fabric_llm.run import due
from fabric_llm.training.schedule import lr_at

if TYPE_CHECKING:  # what needs torch is imported when it is used: --help and mistakes are answered at once
    from torch import nn
    from torch.optim import Optimizer

    from fabric_llm.base.fabric import Fabric
    from fabric_llm.checkpoint.progress import Progress
    from fabric_llm.plan.plan import Plan
    from fabric_llm.processes.watch import Watch
    from fabric_llm.run.build import Parts


def main(argv: Optional[list[str]] = None) -> None:
    signals = StopSignal(leave_at_once)
    launch.adopt_launcher()
    arguments = parse_train(argv)
    try:
        with told_in_one_sentence():
            mistakes.in_training(arguments)
            if arguments.demo and is_rank_zero():
                print("No --config, --model_name or --train_data_dir: the demo, configs/demo.yaml.", flush=True)
            launch.find_slurm_host()
            started = start(arguments)
            with without_collection():
                from fabric_llm.plan.joining import join, plan_together
                from fabric_llm.run.ending import supervise
            joined = join(arguments, started, signals)
            supervise(
                joined,
                arguments.devices.hang_timeout,
                lambda watch: train(
                    joined.fabric, arguments, plan_together(joined, arguments, signals), signals, watch
                ),
            )
    finally:
        signals.restore()


def train(fabric: Fabric, arguments: Arguments, plan: Plan, signals: StopSignal, watch: Watch) -> bool:
    """The run, from its first step or where it resumes to the last. True if asked to stop before. All ranks call it."""
    from fabric_llm.model.language_model import trained_loss
    from fabric_llm.run import build, ending, verdicts
    from fabric_llm.training import ema, step, updates

    parts = build.build(fabric, arguments, plan, signals, watch)
    plan, model, optimizer, guard, batches, log, _, saver, requests = parts
    parts = parts._replace(model=None, optimizer=None)  # a rewind makes others: these are held by no other name
    progress, stops = plan.start, False
    if due.evaluation_first(progress, plan.resumed):
        evaluated = evaluate(parts, model, optimizer, progress, watch)
        stops = not evaluated or guard.verdict == "stop"
        if stops and not plan.has_checkpoint:
            saver.save(model, optimizer, progress, batches, guard, evaluated=evaluated, due=due.FIRST, stops=True)

    while not (stops or plan.is_over(progress)):
        before, progress = progress, plan.after(progress)
        now = due.at(before, progress, plan, arguments)
        log.profile.begin(progress.step)
        lr = step.set_lr(optimizer, lr_at(before.step, max_step=plan.max_step, **due.schedule(arguments.training)))
        step.seed_step(arguments.training.seed, before.step, fabric.global_rank)
        micro_batches = [fabric.to_device(batch) for batch in batches.at(before.position)]
        targets, total = step.count_targets(fabric, micro_batches), 0.0
        for batch in step.accumulate(fabric, model, micro_batches, plan.syncs_every_micro_batch, plan.sums_in_float32):
            losses = model(**batch) / targets
            step.backward(fabric, trained_loss(losses, plan.router_aux_loss_coef))
            total = total + losses.detach()
        with log.waits:  # here the host waits for the device, and for the other ranks
            grad_norm = step.clip(fabric, model, optimizer, arguments.training.grad_clip)
            (loss, *aux_loss), (stop, save, written) = step.share(fabric, total, [*requests.ask(), saver.has_written()])
        weights, update = updates.sample_weights(model.parameters()) if now.logs else None, None
        if guard.accept(loss, grad_norm):  # before the update: a NaN must not come into the weights
            optimizer.step()
            ema.update(optimizer, progress.step)
            update = updates.size(weights, model) if now.logs else None
        else:
            step.leave_out(fabric)
        optimizer.zero_grad()

        watch.mark(progress.step, "in the next step")
        log.advance(progress)
        verdicts.report(plan, guard, log, saver, before, progress)
        saver.publish(written)
        if now.logs or stop or save or guard.verdict == "rewind":
            log.step(progress, loss=loss, lr=lr, grad_norm=grad_norm, aux_loss=aux_loss, update=update)
        if guard.verdict != "rewind":
            evaluated = now.evaluates and not stop and evaluate(parts, model, optimizer, progress, watch)
        if guard.verdict == "rewind":  # by the loss of the step, or by what the evaluation says of forgetting
            model = optimizer = losses = None  # their memory first: the loss knows the parameters as well
            plan, model, optimizer, progress = verdicts.rewind(fabric, arguments, plan, guard, batches, saver, progress)
            continue  # also where a stop was asked for: the next step asks again, and saves where the run is then
        stops = stop > 0 or now.evaluates and not evaluated or guard.verdict == "stop"
        if now.saves or stops or save:
            saver.save(model, optimizer, progress, batches, guard, evaluated=evaluated, due=now, stops=stops)

    verdicts.require_budget(arguments, plan, guard, progress)
    stopped = not plan.is_over(progress)
    ending.close(fabric, arguments, plan, progress, stopped, requests, batches, saver, log, watch, (model, optimizer))
    return stopped


def evaluate(parts: Parts, model: nn.Module, optimizer: Optimizer, progress: Progress, watch: Watch) -> bool:
    """Log the validation losses, and judge what was forgotten. False where a request to stop came first. All ranks call it."""
    from fabric_llm.training import ema

    with parts.log.untimed():
        found = parts.evaluation.of(model, ema.average_of(optimizer))
    watch.mark(progress.step, "in the next step")
    if found is not None and parts.evaluation.is_on:
        parts.guard.accept_evaluation(progress.step, found.losses)
        parts.log.evaluation(progress, found, parts.guard.forgetting)
    return found is not None


if __name__ == "__main__":
    code = 0
    outlast_readers()
    plain_output()
    try:
        main()
    except SystemExit as stop:
        code = stop.code or 0
        if not isinstance(code, int):  # as Python does, of which os._exit knows nothing
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # everything is closed; destructors of process groups have been seen to hang, see run/ending.py
