"""Plan -> the objects of a run: model and optimizer on the devices, data, log, and what saves and evaluates."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fabric_llm.base import ranks
from fabric_llm.base.command_line import Flags
from fabric_llm.base.fabric import Fabric
from fabric_llm.base.failpoints import failpoint
from fabric_llm.base.faults import UNWRITABLE, Fault
from fabric_llm.checkpoint import reading, state_dicts, writing
from fabric_llm.data.batches import Batches, PinnedCopies, Prefetch
from fabric_llm.data.token_bytes import bytes_of_tokens
from fabric_llm.model import (
    freezing,
    language_model,
    layers,
    loading,
    strategy,
)
from fabric_llm.model.materialize import Materializer
from fabric_llm.plan import measuring, run_directory
from fabric_llm.plan.plan import Plan
from fabric_llm.processes.stop import Requests, StopSignal
from fabric_llm.processes.watch import Watch
from fabric_llm.run import reference
from fabric_llm.run.log import Log, open_log
from fabric_llm.run.saver import Saver
from fabric_llm.training import adamw, ema, optim
from fabric_llm.training.drift import Drift, drift_of_run
from fabric_llm.training.evaluation import Evaluation
from fabric_llm.training.forgetting import Forgetting, parse_budgets
from fabric_llm.training.guard import Guard


class Parts(NamedTuple):
    """The objects of a run, in the order in which they are made."""

    plan: Plan  # with document_end None where the model turns out not to keep documents apart
    model: nn.Module  # wrapped
    optimizer: torch.optim.Optimizer
    guard: Guard
    batches: Prefetch
    log: Log
    evaluation: Evaluation
    saver: Saver
    requests: Requests


def build(fabric: Fabric, flags: Flags, plan: Plan, signals: StopSignal, watch: Watch) -> Parts:
    """All parts of a run. All ranks call it. Raises Fault on all of them where the disk isn't shared or has no room."""
    require_shared_directory(plan.run_directory, flags.devices.hang_timeout)
    require_room(plan, flags)
    failpoint("set_up")
    plan, model, optimizer, template = build_model(fabric, flags, plan, plan.source, plan.resume_from)
    guard = make_guard(flags)
    if plan.resumed:
        restore(fabric, guard, plan.resumed)
    common = {"rank": fabric.global_rank, "world_size": fabric.world_size, "document_end": plan.document_end}
    sizes = plan.micro_batch_size, plan.micro_batches
    reads = {"end": plan.end, "mixture": plan.mixture}
    training = Batches(plan.dataset.train, flags.training.seed, *sizes, **reads, **common)
    copies = PinnedCopies(fabric.device) if fabric.device.type == "cuda" else None
    batches = Prefetch(training, flags.data.num_workers, copies)
    looks = fabric.global_rank == 0  # for all ranks
    max_hours = flags.training.max_hours
    requests = Requests(signals, plan.run_directory if looks else None, max_hours if looks else None)
    log = open_log(fabric, flags, plan, template, batches)
    evaluation = Evaluation(
        fabric,
        evaluated_sets(flags, plan, common),
        requests.is_to_stop,
        lambda: watch.mark(watch.step, "evaluating"),
        token_bytes(plan) if flags.evaluation.eval_iters else None,
        make_drift(fabric, plan, model, template) if guard.forgetting.budgets else None,
    )
    saver = Saver(fabric, flags, plan, log, template, watch.mark)
    if not plan.resumed:  # what the model says before step 1
        saver.samples.take(model, plan.start)
    return Parts(plan, model, optimizer, guard, batches, log, evaluation, saver, requests)


def make_guard(flags: Flags) -> Guard:
    """What judges the steps and the evaluations of a run."""
    evaluation, guard = flags.evaluation, flags.guard
    forgetting = Forgetting(parse_budgets(evaluation.forgetting_budget), evaluation.forgetting_action)
    return Guard(
        guard.max_skipped_steps, guard.spike_threshold, guard.spike_window, guard.spike_action, forgetting=forgetting
    )


def make_drift(fabric: Fabric, plan: Plan, model: nn.Module, template: PreTrainedModel) -> Optional[Drift]:
    """The distance from the base of a run, where it is known."""
    sizes = {state_dicts.PREFIX + name: parameter.numel() for name, parameter in template.named_parameters()}
    return drift_of_run(fabric, model, sizes, plan.run_directory, plan.resume_from)


def evaluated_sets(flags: Flags, plan: Plan, common: dict[str, Any]) -> dict[str, Batches]:
    """The validation sets, and the probe of in-context learning. common: arguments of `evaluation_batches`."""
    splits = plan.validation_splits()
    special = [] if plan.tokenizer is None else plan.tokenizer.all_special_ids
    sets = splits | measuring.copy_set(flags, splits, [plan.document_end, *special])
    ends = measuring.document_ends(sets, plan.eval_data, plan.document_end)
    return {
        name: evaluation_batches(split, flags, **{**common, "document_end": ends[name]}) for name, split in sets.items()
    }


def token_bytes(plan: Plan) -> Optional[Tensor]:
    """Bytes of text of each token id, int64 [vocabulary]; None without a fast tokenizer."""
    if plan.tokenizer is None or not plan.tokenizer.is_fast:
        return None
    size = max([plan.config.get_text_config().vocab_size, *plan.tokenizer.get_vocab().values()]) + 1
    return torch.from_numpy(bytes_of_tokens(plan.tokenizer, size))


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
        end=measuring.evaluated_rows(validation, flags),
        document_end=document_end,
    )


def restore(fabric: Fabric, guard: Guard, document: dict[str, Any]) -> None:
    """What a checkpoint's progress.json holds of the run, except for its place."""
    guard.restore(document["guard"])
    if document.get("scaler"):
        fabric.strategy.precision.load_state_dict(document["scaler"])


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


def require_room(plan: Plan, flags: Flags) -> None:
    """Sweep, and end the run before its model is loaded where not even one checkpoint would fit on the disk."""

    def look() -> None:
        run_directory.sweep(plan.run_directory)
        average = None if flags.training.ema_decay is None else flags.training.ema_device
        needed = adamw.checkpoint_bytes(_skeleton(plan).parameters(), plan.bf16_updates, average)
        writing.require_room(plan.run_directory, needed, "One checkpoint of this run")

    ranks.from_rank_zero(look)


def _skeleton(plan: Plan) -> PreTrainedModel:
    """The model of a plan on the meta device, frozen as the plan says."""
    skeleton = loading.build_skeleton(plan.config, loading.DTYPES[plan.precision])
    freezing.freeze(skeleton, plan.frozen)
    return skeleton


def build_model(
    fabric: Fabric, flags: Flags, plan: Plan, source: str, resume_from: Optional[Path]
) -> tuple[Plan, nn.Module, torch.optim.Optimizer, PreTrainedModel]:
    """(plan, wrapped model, optimizer, unwrapped model without memory), with the weights of `source`.

    resume_from: checkpoint whose optimizer state to load. The plan's document_end is None afterwards where the model turns
    out not to keep documents apart and needn't.
    """
    training, template = flags.training, _skeleton(plan)
    loading.set_generation_config(template, source)
    loaded, chosen = reference.load(plan, source, training.seed, flags.model)
    plan = replace(plan, loss=chosen.loss, document_end=chosen.document_end)
    plan.config._attn_implementation = chosen.attention
    skeleton = language_model.LanguageModel(
        _skeleton(plan),
        with_router_loss=plan.router_aux_loss_coef > 0,
        chunked=plan.loss == "chunked",
    )
    layers.checkpoint_activations(skeleton.causal_lm, plan.activation_checkpointing)
    if plan.compiles:
        layers.compile_layers(skeleton)
        if plan.kind == "cuda" and plan.loss == "chunked":  # a CPU gains from it only at large vocabularies
            layers.compile_loss(skeleton)
    decayed = optim.decayed_names(skeleton)
    materializer = Materializer(skeleton, loaded.model, fabric.device)
    wrapped = strategy.wrap(fabric, plan.strategy, skeleton, materializer, plan.precision, plan.sharding)
    loaded, materializer = loaded._replace(model=None), None  # its memory, before gradients need some
    optimizer = optim.make_optimizer(
        wrapped,
        decayed,
        lr=training.lr,
        betas=(training.beta1, training.beta2),
        weight_decay=training.weight_decay,
        updates=plan.bf16_updates,
        seed=training.seed,
    )
    ema.begin(optimizer, training.ema_decay, training.ema_device, training.ema_every, training.seed)
    optimizer = fabric.setup_optimizers(optimizer)
    if resume_from is not None:
        thawed = freezing.thawed(template, plan.resumed.get("schedule", {}), plan.frozen)
        reading.load_optimizer(resume_from, wrapped.module, optimizer, thawed)
    if flags.model.verify_start:
        reference.verify_start(fabric, plan, wrapped, loaded)
    return plan, wrapped, optimizer, template
