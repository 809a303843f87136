"""How a run begins for the user: its directory is made ready, and what it does is said."""

from __future__ import annotations

import shutil
from typing import Any

import torch
from transformers import PreTrainedModel

from fabric_llm.base.command_line import write_yaml
from fabric_llm.checkpoint import keep
from fabric_llm.model import router
from fabric_llm.model.flops import of_model
from fabric_llm.model.freezing import tied_both_ways
from fabric_llm.model.loading import has_weights
from fabric_llm.plan import run_directory
from fabric_llm.plan.checks import profiled_steps
from fabric_llm.plan.plan import Plan
from fabric_llm.run import trackers
from fabric_llm.run.log import Log
from fabric_llm.run.metrics import MetricsFile
from fabric_llm.run.run import Run

MANY_STEPS = 200  # steps that nobody wants to lose


def open_log(run: Run) -> Log:
    """The log of a run. Rank 0 makes the run directory ready and says what the run does."""
    flags, plan, skeleton = run.flags, run.plan, run.skeleton
    flops = of_model(skeleton)
    if run.fabric.global_rank != 0:
        return Log(plan, run.fabric.device, flops, run.batches)
    folder = plan.run_directory
    folder.mkdir(parents=True, exist_ok=True)
    for line in plan.changes:
        print(line)
    for name in keep.move_aside(folder, plan.start.step):
        print(f"Kept as {name}: this run writes that step anew.")
    branches = plan.resume_from is not None and not plan.has_checkpoint
    if branches:
        before = plan.resume_from.parent / "metrics.jsonl"
        if before.is_file():
            shutil.copyfile(before, folder / "metrics.jsonl")
    write_yaml({**flags.kept(), **plan.resolved()}, folder / "arguments.yaml")
    metrics = MetricsFile(
        folder / "metrics.jsonl",
        plan.start.step or None,
        rewinds=plan.resumed.get("guard", {}).get("rewinds", 0),
        evaluates_again=plan.resumed.get("owes_evaluation", False),
        keeps_discarded=not branches,  # what its copy holds beyond its checkpoint isn't the branch's to discard
    )
    run_directory.write_status(folder, None, "running", plan.start.step, True)
    begins = "started" if plan.resume_from is None else "resumed"
    run_directory.record_event(folder, begins, plan.start.step, **beginning(plan, skeleton))
    logging = flags.logging
    of_wandb = logging.entity, logging.project
    tracked = [trackers.open_tracker(name, folder, flags.flat(), *of_wandb) for name in trackers.named(logging.logger)]
    introduce(run)
    return Log(plan, run.fabric.device, flops, run.batches, metrics, tracked, profiled_steps(logging.profile))


def beginning(plan: Plan, skeleton: PreTrainedModel) -> dict[str, Any]:
    """What events.jsonl keeps of a start: what is trained, from which weights, and where. skeleton: the unwrapped model."""
    return {
        "model": type(skeleton).__name__,
        "parameters": sum(p.numel() for p in skeleton.parameters()),
        "from": str(plan.resume_from or plan.model.source),
        "random": plan.resume_from is None and not has_weights(plan.model.source),
        "strategy": plan.placement.strategy,
        "devices": plan.placement.world_size,
        "kind": plan.placement.kind,
        "nodes": plan.placement.num_nodes,
        "max_step": plan.schedule.max_step,
        "torch": torch.__version__,
    }


def introduce(run: Run) -> None:
    """Print what the run does, and what a user may not have meant."""
    flags, plan, skeleton = run.flags, run.plan, run.skeleton
    start = (
        f"weights of {plan.model.source}" if has_weights(plan.model.source) else f"random weights, {plan.model.source}"
    )
    start = f"resumed from {plan.resume_from}" if plan.resume_from else start
    parameters, trained = (sum(p.numel() for p in skeleton.parameters() if p.requires_grad >= only) for only in (0, 1))
    of_which = f", {trained:,} of which are trained" if trained < parameters else ""
    attention, loss = plan.model.config._attn_implementation, plan.model.loss
    paths = [f"{attention} attention"] * (attention != "sdpa") + [f"{loss} loss"] * (loss != "full")
    paths += ["compiled layers"] * plan.model.compiles
    paths += [f"activations recomputed ({plan.model.activation_checkpointing})"] * (
        plan.model.activation_checkpointing != "none"
    )
    print(
        f"{type(skeleton).__name__}, {parameters / 1e6:,.1f} M parameters{of_which}, {', '.join([plan.model.precision, *paths, start])}; "
        f"{plan.placement.strategy} on {plan.placement.world_size} {plan.placement.kind} device{'s' * (plan.placement.world_size > 1)}; "
        f"{plan.schedule.global_batch_size} sequences of {' or '.join(map(str, plan.contexts))} tokens a step, "
        f"{plan.schedule.max_step} steps; {plan.run_directory}",
        flush=True,
    )
    read = [] if plan.data.mixture is None else [plan.mixture_in_words()]
    for line in (*tied_both_ways(skeleton, flags.training.freeze, flags.training.train_only), *read):
        print(line, flush=True)
    if plan.resume_from is None and len(plan.data.sources) < 2 and has_weights(plan.model.source):
        print(
            "Without replay a trained model forgets what the new text doesn't hold: --replay FOLDER reads some of what it knows "
            "along, and --eval_data measures it (docs/forgetting.md).",
            flush=True,
        )
    if flags.save.save_step_interval is None and plan.schedule.max_step - plan.start.step >= MANY_STEPS:
        print("Warning: no --save_step_interval: the only checkpoint comes at the end, a crash loses all before it.")
    if said := router.warning(skeleton):
        print(said, flush=True)
    if plan.model.router_aux_loss_coef:
        print(f"Trained as well: the routers' auxiliary loss x {plan.model.router_aux_loss_coef}, logged as aux_loss.")
