#!/usr/bin/env python
"""Train a Hugging Face causal language model: `python train.py --help`. `train` is the loop."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Optional

from arguments import Arguments, fail, is_rank_zero, parse_train

if TYPE_CHECKING:
    from lightning.fabric import Fabric

    from preflight import Plan


def main(argv: Optional[list[str]] = None) -> None:
    arguments = parse_train(argv)
    if arguments.demo and is_rank_zero():
        print("No --config, --model_name or --train_data_dir: the demo, configs/demo.yaml.", flush=True)
    from fabric_llm.strategy import make_fabric
    from preflight import CHOSEN, make_plan

    try:
        plan = make_plan(arguments)
    except ValueError as error:
        fail("train.py", str(error))
    fabric = make_fabric(
        plan.strategy,
        devices=plan.devices,
        num_nodes=plan.num_nodes,
        kind=plan.kind,
        precision=arguments.model.precision,
    )
    if plan.resume_from is not None:
        os.environ[CHOSEN] = str(plan.resume_from)
    fabric.launch()
    os.environ.pop(CHOSEN, None)
    train(fabric, arguments, plan)


def train(fabric: Fabric, arguments: Arguments, plan: Plan) -> None:
    """The run, from its first step or the one it resumes at to the last. Every rank calls it."""
    from fabric_llm.optim import lr_at
    from fabric_llm.step import seed_step, train_step
    from fabric_llm.stop import requests
    from run import Run

    plan = replace(plan, run_directory=fabric.broadcast(plan.run_directory))  # rank 0 looked before it was made
    run = Run(fabric, arguments, plan)
    training, evaluation, save = arguments.training, arguments.evaluation, arguments.save
    half_epoch = len(plan.dataset.train) / 2
    progress = plan.start
    if progress.step == 0:
        run.evaluate(progress)

    last = False
    while not last:
        lr = lr_at(
            progress.step,
            max_step=plan.max_step,
            lr=training.lr,
            min_lr=training.min_lr,
            warmup_steps=training.warmup_steps,
            decay=training.lr_decay,
            shape=training.lr_schedule,
        )
        stop_requested, save_requested = requests(fabric, run.signals, run.directory)
        before, progress = progress, progress.advance(plan.sequences_at(progress.position), plan.dataset.context_length)
        last = stop_requested or progress.step >= plan.max_step or progress.position == plan.end
        half_done = progress.position // half_epoch > before.position // half_epoch
        evaluates = (last and not stop_requested) or half_done or due(progress.step, evaluation.eval_step_interval)
        saves = last or save_requested or due(progress.step, save.save_step_interval)
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
            measure=logs,
        )
        run.advance(progress)
        run.report_verdict(before, progress, result)
        if run.guard.verdict == "rewind":
            progress, last = run.rewind(progress), stop_requested or progress.position == plan.end
            continue
        if logs:
            run.log(progress, lr, result)
        if evaluates:
            run.evaluate(progress)
        if saves:
            run.save(progress)

    run.finish(progress, stopped=progress.step < plan.max_step and progress.position != plan.end)


def due(step: int, interval: Optional[int]) -> bool:
    return interval is not None and step % interval == 0


if __name__ == "__main__":
    code = 0
    try:
        main()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 0
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # everything is closed; destructors of process groups have been seen to hang, see run.kept_alive
