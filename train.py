#!/usr/bin/env python
"""Train a Hugging Face causal language model: `python train.py --help`. `train` is the loop."""

from __future__ import annotations

import os
import sys
import traceback
from typing import TYPE_CHECKING, Optional

from arguments import Arguments, fail, is_rank_zero, parse_train
from fabric_llm.base.console import outlast_readers
from fabric_llm.base.faults import UNEXPECTED, as_fault, code_of, tell_torchrun
from fabric_llm.processes.launch import (
    adopt_slurm,
    die_with_parent,
    find_slurm_host,
    for_launcher,
    forget_other_ranks,
    warning_of_torchrun,
)
from fabric_llm.processes.stop import StopSignal

if TYPE_CHECKING:
    from lightning.fabric import Fabric

    from fabric_llm.processes.watch import Watch
    from fabric_llm.run.plan import Plan


def main(argv: Optional[list[str]] = None) -> None:
    # Broken connections are told in one sentence, not in C++ stacks.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # transformers fetches kernels, which are code, from the hub where the package kernels is installed.
    os.environ.setdefault("USE_HUB_KERNELS", "NO")
    signals = StopSignal()
    die_with_parent()
    adopt_slurm()
    forget_other_ranks()
    if (warning := warning_of_torchrun()) and is_rank_zero():
        print(f"Warning: {warning}", flush=True)
    arguments = parse_train(argv)
    from fabric_llm.run import mistakes

    try:
        mistakes.in_training(arguments)
    except ValueError as error:
        signals.restore()
        fail("train.py", str(error), code_of(error))
    if arguments.demo and is_rank_zero():
        print("No --config, --model_name or --train_data_dir: the demo, configs/demo.yaml.", flush=True)
    find_slurm_host()
    from fabric_llm.run.assemble import assemble
    from fabric_llm.run.supervise import supervise

    try:
        fabric, plan, children = assemble(arguments)
        supervise(fabric, arguments, plan, children, lambda watch: train(fabric, arguments, plan, signals, watch))
    except (Exception, KeyboardInterrupt) as error:  # before there were ranks to tell
        from fabric_llm.run import run_directory

        fault = as_fault(error)
        run_directory.leave(fault)
        if fault.code == UNEXPECTED:
            tell_torchrun(traceback.format_exc())
            raise
        tell_torchrun(str(fault))
        print(f"train.py: {fault}", file=sys.stderr)
        raise SystemExit(for_launcher(fault.code)) from None
    finally:
        signals.restore()


def train(fabric: Fabric, arguments: Arguments, plan: Plan, signals: StopSignal, watch: Watch) -> bool:
    """The run, from its first step or the one it resumes at to the last. True if it was asked to stop before that.

    Every rank calls it.
    """
    from fabric_llm.run.run import Run
    from fabric_llm.training.schedule import lr_at
    from fabric_llm.training.step import seed_step, train_step

    run = Run(fabric, arguments, plan, signals, watch)
    training, evaluation, save = arguments.training, arguments.evaluation, arguments.save
    half_epoch = len(plan.dataset.train) / 2
    progress, last = plan.start, False
    if progress.step == 0 or run.owes_evaluation:
        stopped = not run.evaluate(progress)
        last = stopped and progress.step > 0  # before the first step there is nothing to go on from

    while not last:
        lr = lr_at(
            progress.step,
            max_step=run.plan.max_step,
            lr=training.lr,
            min_lr=training.min_lr,
            warmup_steps=training.warmup_steps,
            decay=training.lr_decay,
            shape=training.lr_schedule,
        )
        before, progress = progress, progress.advance(plan.sequences_at(progress.position), plan.dataset.context_length)
        last = progress.step >= run.plan.max_step or progress.position == plan.end
        half_done = progress.position // half_epoch > before.position // half_epoch
        evaluates = last or half_done or due(progress.step, evaluation.eval_step_interval)
        saves = last or due(progress.step, save.save_step_interval)
        logs = saves or evaluates or before == plan.start or due(progress.step, arguments.logging.log_step_interval)

        seed_step(training.seed, before.step, fabric.global_rank)
        result = train_step(
            fabric,
            run.model,
            run.optimizer,
            run.batches.at(before.position),
            lr=lr,
            grad_clip=training.grad_clip,
            sync_every_micro_batch=run.sync_every_micro_batch,
            sum_in_float32=run.sum_in_float32,
            accept=run.guard.accept,
            ask=run.ask,
            measure=logs,
            router_aux_loss_coef=run.router_aux_loss_coef,
        )
        run.advance(progress)
        run.report_verdict(before, progress, result)
        stop_requested, save_requested = run.agreed(result)
        if run.guard.verdict == "rewind":
            progress, last = run.rewind(progress), stop_requested or progress.position == plan.end
            continue
        if logs or stop_requested or save_requested:
            run.log(progress, lr, result)
        if evaluates and not stop_requested:  # whoever asked may not wait for it
            stop_requested = not run.evaluate(progress)
        last = last or stop_requested
        if saves or last or save_requested:
            run.save(progress, last, evaluates)

    stopped = progress.step < run.plan.max_step and progress.position != plan.end
    run.finish(progress, stopped)
    return stopped


def due(step: int, interval: Optional[int]) -> bool:
    return interval is not None and step % interval == 0


if __name__ == "__main__":
    code = 0
    outlast_readers()
    try:
        main()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 0
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # everything is closed; destructors of process groups have been seen to hang, see run.kept_alive
