"""Make the objects of a run from its plan: model and optimizer on the devices, data, log,
evaluation."""

import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any, Optional

import torch
from torch import nn
from tqdm import tqdm
from transformers import PreTrainedModel

from fabric_llm.base import ranks, register
from fabric_llm.base.failpoints import failpoint
from fabric_llm.base.faults import UNWRITABLE, Fault
from fabric_llm.base.flag import Flags
from fabric_llm.base.names import counted
from fabric_llm.base.plain_yaml import write_yaml
from fabric_llm.checkpoint import keep, reading, retention, writing
from fabric_llm.checkpoint.keep import METRICS, SAMPLES
from fabric_llm.data.batches import Batches, PinnedCopies, Prefetch
from fabric_llm.data.columns import is_stream
from fabric_llm.data.order import sample
from fabric_llm.data.token_bytes import bytes_of_tokens
from fabric_llm.model import (
    flops,
    freezing,
    language_model,
    layers,
    loading,
    sharded,
    strategy,
    weights,
)
from fabric_llm.plan import run_directory, run_status, same_run
from fabric_llm.plan.checks import profiled_steps
from fabric_llm.plan.plan import DataPlan, Plan
from fabric_llm.plan.start import ThisRank
from fabric_llm.processes.stop import StopSignal
from fabric_llm.run import copies, reference, save
from fabric_llm.run.log import Log
from fabric_llm.run.metrics import MetricsFile
from fabric_llm.run.run import Run, leave, say_what_comes_next
from fabric_llm.run.trackers import Trackers
from fabric_llm.training import adamw
from fabric_llm.training.evaluation import Evaluation, rows_in_words
from fabric_llm.training.guard import Guard


def build(this: ThisRank, flags: Flags, signals: StopSignal) -> Run:
    """Make all parts of a run, and complete the plan of this rank with what is measured on the
    model. All ranks call it. Raises Fault on all ranks if the disk isn't shared or has no room.

    How a part is closed is registered when it is made. A run without a fault closes its parts in
    the opposite order.
    """
    fabric, watch = this.fabric, this.watch
    # Both checks come before the model, which may take minutes to load.
    # With --mirror machines needn't share a disk, see checkpoint/apart.py.
    if flags.save.mirror is None:
        require_shared_directory(this.directory, flags.devices.hang_timeout)
    ranks.from_rank_zero(lambda: require_room(this.plan, flags))
    failpoint("set_up")
    # From here on the plan says which attention and which loss the model takes.
    plan, loaded = measure(this.plan, flags)
    this.plan = plan
    run = Run(fabric, flags, plan, watch)
    run.mirror, run.ranks_apart = this.mirror, this.ranks_apart
    # Registered first, so it is called last: the loss and the checkpoint are final then.
    run.closing.callback(say_what_comes_next, run)
    run.closing.callback(save.wait_for_mirror, run)
    build_model(run, loaded)
    # A branch, or a checkpoint that was moved, has no events of the run's beginning beside it.
    run.first_weights = plan.resumed.get("first_weights", {})
    if not plan.resumed:
        run.first_weights = reference.first_weights(loaded.opened)
    del loaded  # it may hold the weights of the whole model
    # --model_name may hold other weights by the time that the run goes back to its beginning.
    run.began_with = plan.resumed.get("began_with")
    if not plan.resumed and save.goes_back_by_losses(flags):
        run.began_with = sharded.fingerprint(run.model)
    run.guard = Guard(**vars(flags.guard))
    run.forgetting = same_run.forgetting_at_start(plan, flags)
    # build_model has loaded weights and optimizer. This is the rest of the checkpoint.
    if plan.resumed:
        restore(run, plan.resumed)
        watch.mark(run.progress.step, "being built")
        run.losses = plan.resumed.get("eval_losses")
    run.batches = make_batches(run)
    run.closing.callback(run.batches.close)
    # The log counts the tokens that `batches` has handed out, so it comes after them.
    run.log = this.log = open_log(run)
    # What is registered below needs the process group, so it is closed before the run leaves it.
    run.closing.callback(leave, run)
    run.background = None
    if flags.save.async_save:
        patience = strategy.timeout_of_groups(flags.devices.hang_timeout)
        run.background = writing.Background(run.model, patience)
    # A checkpoint that is still being written is finished before the ranks part.
    run.closing.callback(save.publish, run)
    if flags.logging.sample_prompts is not None:
        from fabric_llm.run.samples import Samples

        run.samples = Samples(fabric, plan, flags.logging, run.log, watch.mark)
    if fabric.global_rank == 0:  # looks for all ranks
        signals.watch_for(plan.run_directory, flags.training.max_hours)
    else:
        signals.watch_for(None, None)
    run.requests = signals
    # Registered last and so called first: all is saved by then, and a late signal mustn't cut
    # off what follows.
    run.closing.callback(run.requests.finish)
    # It asks `requests` between batches, so that a request to stop cuts an evaluation off.
    run.evaluation = make_evaluation(run)
    if fabric.global_rank == 0 and run.evaluation.is_on:
        print(f"Evaluations read {rows_in_words(run.evaluation.batches)}.", flush=True)
        if plan.data.probes:
            names = " and ".join(plan.data.probes)
            print(f"{names}: whether the model uses its context (docs/long_context.md).")
    if run.samples is not None and not plan.resumed:  # samples of the model before step 1
        run.samples.take(run.model, run.progress)
    return run


def require_shared_directory(directory: Path, seconds: float) -> None:
    """Raises Fault (73), before the model is loaded, if a rank doesn't write to the disk that rank
    0 reads."""
    # Rank 0 has written STATUS.json; the other ranks look for the same content.
    written = ranks.from_rank_zero(lambda: run_status.read_status(directory))
    sees = run_status.wait_for_status(directory, written, seconds / 2)
    # All ranks learn of a rank that doesn't see it, so all raise the same fault.
    if blind := [rank for rank, there in enumerate(ranks.gather(sees)) if not there]:
        raise Fault(
            f"rank {blind[0]} doesn't see what rank 0 writes into {str(directory)!r}: "
            "it must be on a disk that all machines share, or --mirror be given.",
            UNWRITABLE,
        )


def require_room(plan: Plan, flags: Flags) -> None:
    """Sweep, and end the run before its model is loaded if the disk has no room for one
    checkpoint. Called on rank 0."""
    # What interrupted saves have left behind takes up room that a checkpoint needs.
    run_directory.sweep(plan.run_directory)
    average = flags.training.ema_device if flags.training.ema_decay is not None else None
    # On the meta device, so counting the bytes of a large model costs no memory.
    needed = adamw.checkpoint_bytes(_skeleton(plan).parameters(), plan.model.bf16_updates, average)
    # What an optimizer of --code keeps isn't known before it is made.
    of_what = "One checkpoint of this run" + " (with AdamW)" * ("optimizer" in register.ONLY)
    writing.require_room(plan.run_directory, needed, of_what)


def measure(plan: Plan, flags: Flags) -> tuple[Plan, reference.Reference]:
    """(the plan with what is measured on the model, what else the reference gives). All ranks call
    it."""
    loaded = reference.load(plan, plan.model.source, flags.training.seed, flags.model)
    chosen = loaded.chosen
    plan = plan.completed(chosen.attention, chosen.loss, chosen.keeps_documents_apart)
    return plan, loaded


def _skeleton(plan: Plan) -> PreTrainedModel:
    """The model of a plan on the meta device, frozen as the plan says."""
    skeleton = loading.build_skeleton(plan.model.config, loading.DTYPES[plan.model.precision])
    # What doesn't train has no state in the optimizer, and so none in a checkpoint.
    freezing.freeze(skeleton, plan.model.frozen)
    return skeleton


def build_model(run: Run, loaded: reference.Reference) -> None:
    """Make `run.skeleton`, `run.model` with the weights of its plan's source, and `run.optimizer`,
    with the state of a resumed run's checkpoint. All ranks call it."""
    fabric, plan = run.fabric, run.plan
    # A second skeleton beside the model: it keeps the whole shapes after the model is sharded.
    run.skeleton = _skeleton(plan)
    loading.set_generation_config(run.skeleton, plan.model.source)
    recomputed = plan.model.activation_checkpointing
    chunked = plan.model.loss == "chunked"
    has_router_loss = plan.model.router_aux_loss_coef > 0
    model = language_model.LanguageModel(
        _skeleton(plan),
        with_router_loss=has_router_loss,
        chunked=chunked,
        adds=register.added_by_loss(),
    )
    if "loss" in register.ONLY:
        language_model.require_sum(plan.model.config.get_text_config().vocab_size)
    model.idle = loaded.chosen.idle
    # Buffers that no file holds, such as the frequencies of RoPE, are computed on the CPU.
    weights.compute_buffers(model.causal_lm)
    # A feature that is off isn't imported.
    if plan.placement.context_parallel > 1:
        from fabric_llm.model.context_parallel import context_group

        model.context_group = context_group(plan.placement.context_parallel)
    if plan.model.float8 != "none":
        from fabric_llm.model.float8 import float8_products

        float8_products(
            model.causal_lm, plan.model.float8, is_emulated=plan.placement.kind == "cpu"
        )
    if tiled := loaded.chosen.tiled:
        from fabric_llm.model.tiles import tile

        tile(model.causal_lm, tiled)
        model.tiled = {model.causal_lm.get_submodule(name) for name in tiled}
    layers.checkpoint_activations(model.causal_lm, recomputed, plan.model.compiles)
    if plan.model.compiles:
        layers.compile_layers(model, recomputed)
        # a CPU gains from it only at large vocabularies
        if plan.placement.kind == "cuda" and chunked:
            layers.compile_loss(model)

    # The strategy calls it once the parameters have their place on this rank.
    def fill(model: nn.Module) -> None:
        sharded.fill(model, run.skeleton, loaded.opened)

    placement = plan.placement
    run.model = strategy.wrap(
        fabric, placement.strategy, model, fill, plan.model.precision, placement.sharding
    )
    # The optimizer takes the parameters that the strategy has made, not the skeleton's.
    # The plan's source is the checkpoint where this rank reads it: here, or in a copy of it.
    make_optimizer(run, None if plan.resume_from is None else Path(plan.model.source))
    # Weights and optimizer are read by now, and copies take the room of a checkpoint.
    copies.forget(run.ranks_apart, plan.run_directory)
    # Last: it compares the model that will train, in the form that the strategy gave it.
    if run.flags.model.verify_start:
        reference.verify_start(fabric, plan, run.model, loaded.expected)


def load_again(run: Run, checkpoint: Optional[Path]) -> None:
    """Load a checkpoint, or the start of the run if it is None, into the model that is there and
    into a new optimizer.

    All ranks call it.
    """
    run.optimizer = None  # frees its memory before the new one is made
    # A unit that is still whole would keep its old weights, or hide its sharded parameters.
    sharded.reshard(run.model)
    run.model.zero_grad()
    opened: list[weights.Source] = []  # on rank 0
    source, seed = str(checkpoint or run.flags.model.model_name), run.flags.training.seed
    config, dtype = run.plan.model.config, loading.DTYPES[run.plan.model.precision]
    # Rank 0 alone reads the files. `opened` stays empty on the other ranks.
    ranks.from_rank_zero(lambda: opened.append(loading.open_weights(source, config, dtype, seed)))
    sharded.fill(run.model, run.skeleton, *opened)
    make_optimizer(run, checkpoint)


def make_optimizer(run: Run, checkpoint: Optional[Path]) -> None:
    """Make `run.optimizer`, with the state in a checkpoint, unless that is None. All ranks call
    it."""
    plan, training = run.plan, run.flags.training
    # By the skeleton: a sharded parameter may have another number of dimensions.
    decayed = adamw.decayed_names(language_model.LanguageModel(run.skeleton))
    optimizer = adamw.make_optimizer(run.model, decayed, training, plan.model.bf16_updates)
    # An attribute of the optimizer, so that checkpoints save and load it like the moments.
    if training.ema_decay is not None:
        from fabric_llm.training.ema import Average

        optimizer.average = Average(
            optimizer,
            decay=training.ema_decay,
            device=training.ema_device,
            every=training.ema_every,
            seed=training.seed,
        )
    run.optimizer = run.fabric.setup_optimizers(optimizer)
    if checkpoint is not None:
        # A parameter that was frozen has no state in the checkpoint, and begins with new moments.
        thawed = freezing.thawed(
            run.skeleton, keep.read_progress(checkpoint)["schedule"], plan.model.frozen
        )
        # The whole state may take longer than --hang_timeout to read, unlike one tensor.
        mark = partial(run.watch.mark, run.watch.step, run.watch.doing)
        reading.load_optimizer(
            checkpoint, run.model.module, run.optimizer, run.skeleton, thawed, mark
        )


def restore(run: Run, document: Any) -> None:
    """Restore guard and scaler from a checkpoint's progress.json."""
    run.guard.restore(document["guard"])
    # Only 16-mixed has a scale of the loss.
    if document.get("scaler"):
        run.fabric.strategy.precision.load_state_dict(document["scaler"])


def make_batches(run: Run) -> Prefetch:
    """What gives this rank its micro-batches."""
    fabric, data, schedule = run.fabric, run.plan.data, run.schedule
    threads = run.flags.data.num_workers
    rows: Any = data.dataset.train
    if is_stream(rows):
        threads = min(threads, 1)  # several would read back and forth
        if run.plan.resumed:
            rows.restore(run.plan.start.position, run.plan.resumed["stream"])
    batches = Batches(
        rows,
        run.flags.training.seed,
        schedule.micro_batch_size,
        schedule.micro_batches,
        end=schedule.end,
        mixture=schedule.mixture,
        document_end=data.document_end,
        **run.plan.placement.rows_of(fabric.global_rank),
    )
    # A copy from pinned memory runs while the device computes.
    pinned = PinnedCopies(fabric.device) if fabric.device.type == "cuda" else None
    return Prefetch(batches, threads, pinned)


def make_evaluation(run: Run) -> Evaluation:
    """What evaluates the model on the validation sets and the probes."""
    fabric, flags, plan, watch = run.fabric, run.flags, run.plan, run.watch
    tokenizer, token_bytes = plan.model.tokenizer, None
    place = plan.placement.rows_of(fabric.global_rank)
    batches = evaluated_sets(plan.data, tokenizer, flags, **place)
    if flags.evaluation.eval_iters and tokenizer is not None and tokenizer.is_fast:
        # A model may have more tokens than its tokenizer, or fewer.
        of_model = plan.model.config.get_text_config().vocab_size
        largest = max([of_model, *tokenizer.get_vocab().values()])
        token_bytes = torch.from_numpy(bytes_of_tokens(tokenizer, largest + 1))

    # The watch allows --hang_timeout for each batch, and not for the whole evaluation.
    def working() -> None:
        watch.mark(watch.step, "evaluating")

    return Evaluation(
        fabric, batches, run.requests.is_to_stop, working, token_bytes, plan.data.in_bytes()
    )


def evaluated_sets(
    data: DataPlan, tokenizer: Optional[Any], flags: Flags, world_size: int = 1, **place: Any
) -> dict[str, Batches]:
    """{validation set, or probe: its batches}, as many on each rank. world_size, place: see
    Placement.rows_of."""
    special = [] if tokenizer is None else tokenizer.all_special_ids
    sets = data.validation_splits()
    sets |= data.probe_rows([data.document_end, *special], flags.training.seed)
    # --eval_data may be of other datasets, whose documents end with other tokens.
    ends = dict.fromkeys(sets, data.document_end) | data.ends_of_eval_data()
    size, batches = flags.evaluation.eval_batch_size, {}
    for name, split in sets.items():
        # As many rows on any number of devices, so that losses can be compared between them.
        rows = sample(split, size * flags.evaluation.eval_iters)
        # The last batch may be filled up: rows from `end` on have no targets.
        # No seed orders these rows, since they are picked.
        batches[name] = Batches(
            split,
            0,
            size,
            -(-len(rows) // (size * world_size)),
            world_size=world_size,
            picked=rows,
            end=len(rows),
            document_end=ends[name],
            **place,
        )
    return batches


def open_log(run: Run) -> Log:
    """The log of a run. Rank 0 also prepares the run directory and prints what the run does, and
    what is planned."""
    flags, plan, skeleton, logging = run.flags, run.plan, run.skeleton, run.flags.logging
    log = Log(plan, run.fabric.device, flops.of_model(skeleton), run.batches)
    folder = plan.run_directory
    # The log warns if training has hardly any effect, and says what the optimizer keeps.
    if plan.model.precision == "bf16-true":
        log.few_updates.kept = adamw.kept_updates(flags.training, plan.model.bf16_updates)
    # The rest writes files and prints, once for all ranks.
    if run.fabric.global_rank != 0:
        return log
    folder.mkdir(parents=True, exist_ok=True)
    for line in plan.changes:
        print(line)
    # Otherwise a later resume would take a checkpoint of the steps that are made again.
    for name in retention.move_aside(folder, plan.start.step):
        print(f"Moved to {name}: this run writes that step anew.")
    if run.mirror is not None:
        run.mirror.go_back(plan.start.step)
    # A branch begins with the lines of the run that it leaves, up to its first step.
    branches = plan.resume_from is not None and not plan.has_checkpoint
    for name in (METRICS, SAMPLES):
        if branches and (before := plan.resume_from.parent / name).is_file():
            shutil.copyfile(before, folder / name)
    write_yaml({**flags.kept(), **plan.resolved()}, folder / "arguments.yaml")
    # Lines of steps that this run makes again are removed here.
    evaluates = not keep.is_evaluated(plan.resumed)
    log.metrics = MetricsFile(folder / METRICS, plan.begins_at, evaluates)
    MetricsFile(folder / SAMPLES, plan.begins_at)  # also where this process takes none
    run_status.write_status(folder, None, "running", plan.start.step, True)
    parameters, place = sum(p.numel() for p in skeleton.parameters()), plan.placement
    is_random = plan.resume_from is None and not loading.has_weights(plan.model.source)
    # For events.jsonl, the history of the run.
    facts = {
        "position": plan.start.position,
        "model": type(skeleton).__name__,
        "parameters": parameters,
        "max_step": plan.schedule.max_step,
        "from": str(plan.resume_from or plan.model.source),
        "random": is_random,
        "changes": plan.changes,
        "torch": torch.__version__,
        "strategy": place.strategy,
        "devices": place.world_size,
        "kind": place.kind,
        "nodes": place.num_nodes,
    }
    begins = "started" if plan.resume_from is None else "resumed"
    run_status.record_event(folder, begins, plan.start.step, **facts)
    log.trackers = Trackers(logging.logger, folder, flags.flat(), logging.entity, logging.project)
    introduce(run, parameters, is_random)
    # The bar begins at the step where the run resumes.
    steps = {"total": plan.schedule.max_step, "initial": plan.start.step, "unit": "step"}
    log.console = tqdm(**steps, disable=not sys.stderr.isatty(), leave=False)
    if logging.profile is not None:
        from fabric_llm.run.profile import Profile

        first, last = profiled_steps(logging.profile)
        log.profile = Profile(first, last, folder / "profile", run.fabric.device)
    return log


def introduce(run: Run, parameters: int, is_random: bool) -> None:
    """Print what the run does, and advice on it."""
    flags, plan, skeleton = run.flags, run.plan, run.skeleton
    trained = sum(p.numel() for p in skeleton.parameters() if p.requires_grad)
    model = f"{type(skeleton).__name__}, {parameters / 1e6:,.1f} M parameters"
    model += f", {trained:,} of which are trained" if trained < parameters else ""
    attention, loss = plan.model.config._attn_implementation, plan.model.loss
    recomputed, place = plan.model.activation_checkpointing, plan.placement
    # Only what isn't the default is named, so a usual run has a short line.
    paths = [f"{attention} attention"] * (attention != "sdpa") + [f"{loss} loss"] * (loss != "full")
    paths += ["compiled layers"] * plan.model.compiles
    paths += [f"products in 8 bits ({plan.model.float8})"] * (plan.model.float8 != "none")
    paths += ["MLPs in tiles"] * plan.model.tiled_mlp
    paths += [f"activations recomputed ({recomputed})"] * (recomputed != "none")
    batch, steps = plan.schedule.global_batch_size, plan.schedule.max_step
    start = f"{'random weights,' if is_random else 'weights of'} {plan.model.source}"
    start = f"resumed from {plan.resume_from}" if plan.resume_from else start
    print(
        f"{', '.join([model, plan.model.precision, *paths, start])}; {place.strategy} on "
        f"{counted(place.world_size, f'{place.kind} device')}; {counted(batch, 'sequence')} of "
        f"{' or '.join(map(str, plan.data.contexts))} tokens a step, {counted(steps, 'step')}; "
        f"{plan.run_directory}"
    )
    if register.LOADED:
        print(register.in_words())
    if plan.model.rope:
        print(plan.model.rope)
    for line in freezing.tied_both_ways(skeleton, flags.training.freeze, flags.training.train_only):
        print(line)
    if idle := sorted(run.model.module.idle):
        count = sum(skeleton.get_parameter(name).numel() for name in idle)
        print(
            f"The loss of a text depends on none of {count:,} weights, such as {idle[0]}: as long "
            "as that is so, they stay as they are. --freeze with their names saves their memory."
        )
    if plan.schedule.mixture.is_named:
        print(plan.schedule.in_words())
    # For a new run that trains a model further. A mixture may replay old text already.
    if plan.resume_from is None and not is_random and len(plan.data.sources) < 2:
        print(
            "Without replay a trained model forgets what the new text doesn't hold: --replay "
            "FOLDER reads some of what it knows "
            "along, and --eval_data measures it (docs/forgetting.md)."
        )
    if warning := language_model.router_warning(skeleton):
        print(warning)
    if plan.model.router_aux_loss_coef:
        print(
            f"Trained as well: the routers' auxiliary loss x {plan.model.router_aux_loss_coef}, "
            "logged as aux_loss."
        )
