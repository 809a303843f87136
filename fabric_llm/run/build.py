"""Plan -> the objects of a run: model and optimizer on the devices, data, log, and what saves and evaluates."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any, Optional

import torch
from torch import Tensor
from transformers import PreTrainedModel

from fabric_llm.base import ranks
from fabric_llm.base.command_line import Flags
from fabric_llm.base.fabric import Fabric
from fabric_llm.base.failpoints import failpoint
from fabric_llm.base.faults import UNWRITABLE, Fault
from fabric_llm.checkpoint import reading, state_dicts, writing
from fabric_llm.checkpoint.writing import Background
from fabric_llm.data.batches import Batches, PinnedCopies, Prefetch
from fabric_llm.data.token_bytes import bytes_of_tokens
from fabric_llm.model import (
    freezing,
    language_model,
    layers,
    loading,
    strategy,
)
from fabric_llm.plan import run_directory
from fabric_llm.plan.data import document_ends
from fabric_llm.plan.plan import Plan
from fabric_llm.processes.stop import Requests, StopSignal
from fabric_llm.processes.watch import Watch
from fabric_llm.run import reference, save
from fabric_llm.run.run import Run, close_log, leave_ranks, say_what_comes_next
from fabric_llm.run.samples import Samples
from fabric_llm.run.start import open_log
from fabric_llm.training import adamw, ema, optim
from fabric_llm.training.evaluation import Evaluation
from fabric_llm.training.guard import Forgetting, Guard, parse_budgets
from fabric_llm.training.updates import Drift, drift_of_run


def build(fabric: Fabric, flags: Flags, plan: Plan, signals: StopSignal, watch: Watch) -> Run:
    """All parts of a run. All ranks call it. Raises Fault on all of them where the disk isn't shared or has no room.

    What has to be closed is registered as it is made, so that a run that ends well closes it in the opposite order.
    """
    run = Run(fabric, flags, plan, watch, plan.start)
    run.closing.callback(say_what_comes_next, run)
    require_shared_directory(plan.run_directory, flags.devices.hang_timeout)
    require_room(plan, flags.training)
    failpoint("set_up")
    build_model(run, plan.model.source, plan.resume_from)
    run.guard = make_guard(flags)
    if plan.resumed:
        restore(run, plan.resumed)
    run.batches = make_batches(run)
    run.closing.callback(run.batches.close)
    run.log = open_log(run)
    run.closing.callback(close_log, run)
    run.closing.callback(leave_ranks, run)  # before the log, for which other ranks needn't wait
    run.background = Background() if flags.save.async_save else None
    run.closing.callback(save.publish, run)
    run.samples = Samples(fabric, plan, flags.logging, run.log, watch.mark)
    looks = fabric.global_rank == 0  # for all ranks
    run.requests = Requests(signals, plan.run_directory if looks else None, flags.training.max_hours if looks else None)
    run.closing.callback(run.requests.finish)
    run.evaluation = make_evaluation(run)
    if not plan.resumed:  # what the model says before step 1
        run.samples.take(run.model, run.progress)
    return run


def make_guard(flags: Flags) -> Guard:
    """What judges the steps and the evaluations of a run."""
    evaluation, guard = flags.evaluation, flags.guard
    forgetting = Forgetting(parse_budgets(evaluation.forgetting_budget), evaluation.forgetting_action)
    return Guard(
        guard.max_skipped_steps, guard.spike_threshold, guard.spike_window, guard.spike_action, forgetting=forgetting
    )


def make_batches(run: Run) -> Prefetch:
    """The micro-batches of this rank."""
    fabric, plan = run.fabric, run.plan
    batches = Batches(
        plan.data.dataset.train,
        run.flags.training.seed,
        plan.schedule.micro_batch_size,
        plan.schedule.micro_batches,
        rank=fabric.global_rank,
        world_size=fabric.world_size,
        end=plan.schedule.end,
        mixture=plan.data.mixture,
        document_end=plan.data.document_end,
    )
    copies = PinnedCopies(fabric.device) if fabric.device.type == "cuda" else None
    return Prefetch(batches, run.flags.data.num_workers, copies)


def make_evaluation(run: Run) -> Evaluation:
    """What evaluates the model on the validation sets, and on the probe of in-context learning."""
    fabric, flags, plan, watch = run.fabric, run.flags, run.plan, run.watch
    splits = plan.validation_splits()
    special = [] if plan.model.tokenizer is None else plan.model.tokenizer.all_special_ids
    sets = splits | plan.copy_set([plan.data.document_end, *special], flags.training.seed)
    ends = document_ends(sets, plan.data.eval_data, plan.data.document_end)
    place = {"rank": fabric.global_rank, "world_size": fabric.world_size}
    return Evaluation(
        fabric,
        {name: evaluation_batches(split, flags, **place, document_end=ends[name]) for name, split in sets.items()},
        run.requests.is_to_stop,
        lambda: watch.mark(watch.step, "evaluating"),
        token_bytes(plan) if flags.evaluation.eval_iters else None,
        make_drift(run) if run.guard.forgetting.budgets else None,
    )


def make_drift(run: Run) -> Optional[Drift]:
    """The distance from the base of a run, where it is known."""
    sizes = {state_dicts.PREFIX + name: parameter.numel() for name, parameter in run.skeleton.named_parameters()}
    return drift_of_run(run.fabric, run.model, sizes, run.plan.run_directory, run.plan.resume_from)


def token_bytes(plan: Plan) -> Optional[Tensor]:
    """Bytes of text of each token id, int64 [vocabulary]; None without a fast tokenizer."""
    if plan.model.tokenizer is None or not plan.model.tokenizer.is_fast:
        return None
    size = max([plan.model.config.get_text_config().vocab_size, *plan.model.tokenizer.get_vocab().values()]) + 1
    return torch.from_numpy(bytes_of_tokens(plan.model.tokenizer, size))


def evaluation_batches(
    validation: Any, flags: Flags, *, rank: int, world_size: int, document_end: Optional[int]
) -> Batches:
    """The first --eval_iters batches of a validation split, not past its end; as many on each rank."""
    size = flags.evaluation.eval_batch_size
    count = min(flags.evaluation.eval_iters, -(-len(validation) // size))
    return Batches(
        validation,
        flags.training.seed,
        size,
        -(-count // world_size),
        rank=rank,
        world_size=world_size,
        shuffle=False,
        end=min(count * size, len(validation)),
        document_end=document_end,
    )


def restore(run: Run, document: dict[str, Any]) -> None:
    """What a checkpoint's progress.json holds of the run, except for its place."""
    run.guard.restore(document["guard"])
    if document.get("scaler"):
        run.fabric.strategy.precision.load_state_dict(document["scaler"])


def require_shared_directory(directory: Path, seconds: float) -> None:
    """End the run before its model is loaded where a rank would write to another disk than rank 0 reads from."""
    written = ranks.from_rank_zero(lambda: run_directory.read_status(directory))
    sees = run_directory.wait_for_status(directory, written, seconds / 2)
    if blind := [rank for rank, there in enumerate(ranks.gather(sees)) if not there]:
        raise Fault(
            f"rank {blind[0]} doesn't see what rank 0 writes into {str(directory)!r}: "
            "it must be on a disk that all machines share.",
            UNWRITABLE,
        )


def require_room(plan: Plan, training: Flags) -> None:
    """Sweep, and end the run before its model is loaded where not even one checkpoint would fit on the disk."""

    def look() -> None:
        run_directory.sweep(plan.run_directory)
        average = None if training.ema_decay is None else training.ema_device
        needed = adamw.checkpoint_bytes(_skeleton(plan).parameters(), plan.model.bf16_updates, average)
        writing.require_room(plan.run_directory, needed, "One checkpoint of this run")

    ranks.from_rank_zero(look)


def _skeleton(plan: Plan) -> PreTrainedModel:
    """The model of a plan on the meta device, frozen as the plan says."""
    skeleton = loading.build_skeleton(plan.model.config, loading.DTYPES[plan.model.precision])
    freezing.freeze(skeleton, plan.model.frozen)
    return skeleton


def build_model(run: Run, source: str, resume_from: Optional[Path]) -> None:
    """Make `run.model`, with the weights of `source`, `run.optimizer` and `run.skeleton`. All ranks call it.

    resume_from: checkpoint whose optimizer state to load. The plan's document_end is None afterwards where the model turns
    out not to keep documents apart and needn't.
    """
    fabric, plan, training = run.fabric, run.plan, run.flags.training
    run.skeleton = _skeleton(plan)
    loading.set_generation_config(run.skeleton, source)
    loaded, chosen = reference.load(plan, source, training.seed, run.flags.model)
    config = deepcopy(plan.model.config)
    config._attn_implementation = chosen.attention
    run.plan = plan = replace(
        plan,
        model=replace(plan.model, config=config, loss=chosen.loss),
        data=replace(plan.data, document_end=chosen.document_end),
    )
    model = language_model.LanguageModel(
        _skeleton(plan),
        with_router_loss=plan.model.router_aux_loss_coef > 0,
        chunked=plan.model.loss == "chunked",
    )
    layers.checkpoint_activations(model.causal_lm, plan.model.activation_checkpointing)
    if plan.model.compiles:
        layers.compile_layers(model)
        # A CPU gains from it only at large vocabularies.
        if plan.placement.kind == "cuda" and plan.model.loss == "chunked":
            layers.compile_loss(model)
    decayed = optim.decayed_names(model)
    materializer = loading.Materializer(model, loaded.model, fabric.device)
    run.model = strategy.wrap(
        fabric, plan.placement.strategy, model, materializer, plan.model.precision, plan.placement.sharding
    )
    loaded, materializer = loaded._replace(model=None), None  # its memory, before gradients need some
    optimizer = optim.make_optimizer(run.model, decayed, training, plan.model.bf16_updates)
    ema.begin(optimizer, training.ema_decay, training.ema_device, training.ema_every, training.seed)
    run.optimizer = fabric.setup_optimizers(optimizer)
    if resume_from is not None:
        thawed = freezing.thawed(run.skeleton, plan.resumed.get("schedule", {}), plan.model.frozen)
        reading.load_optimizer(resume_from, run.model.module, run.optimizer, thawed)
    if run.flags.model.verify_start:
        reference.verify_start(fabric, plan, run.model, loaded)
