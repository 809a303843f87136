"""The objects of a run, and what the loop in train.py does with them besides stepping."""

from __future__ import annotations

import gc
import math
import shutil
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Callable, Optional

import torch
from lightning.fabric import Fabric

from arguments import Arguments, write_yaml
from fabric_llm.base import files, step_names
from fabric_llm.base.console import Console
from fabric_llm.base.failpoints import failpoint
from fabric_llm.base.faults import NON_FINITE, UNWRITABLE, Fault
from fabric_llm.base.ranks import gather
from fabric_llm.checkpoint import keep, reading, writing
from fabric_llm.checkpoint.progress import Progress, step_directory
from fabric_llm.data.batches import Batches, MicroBatch, Prefetch
from fabric_llm.data.order import RowsRead
from fabric_llm.model import router, strategy
from fabric_llm.model.loading import DTYPES, build_skeleton, has_weights
from fabric_llm.processes import stop
from fabric_llm.processes.stop import StopSignal
from fabric_llm.processes.watch import Watch
from fabric_llm.run import metrics, resume, run_directory, trackers
from fabric_llm.run.build import probe_input, set_up
from fabric_llm.run.plan import Plan, last_step
from fabric_llm.training import adamw, step
from fabric_llm.training.guard import Guard

FEW_UPDATES, FEW_UPDATES_LOGS = 0.1, 3  # part of the weights, logged steps in a row
MANY_STEPS = 200  # that nobody wants to lose
SECONDS_AFTER_THE_END, SECONDS_AFTER_A_STOP = 660.0, 10.0  # for a tracker; whoever stopped the run may kill it soon
# Models of finished runs. Their last reference takes the process group with it, and gloo's destructor, run while Python
# holds its lock, can wait for ever for a thread that needs the lock to drop a tensor. So they live as long as the process.
kept_alive: list[Any] = []


def resolved(plan: Plan) -> dict[str, Any]:
    """What arguments.yaml holds instead of what was given: the same step on any devices that its batch divides by."""
    return {
        "context_length": plan.dataset.context_length,
        "global_batch_size": plan.global_batch_size,
        "micro_batch_size": plan.micro_batch_size,
        "gradient_accumulation_steps": None,
    }


class Run:
    """The objects of a run, and what the loop does with them besides stepping."""

    def __init__(self, fabric: Fabric, arguments: Arguments, plan: Plan, signals: StopSignal, watch: Watch) -> None:
        self.fabric, self.arguments, self.plan = fabric, arguments, plan
        self.signals, self.watch = signals, watch
        self.directory = plan.run_directory
        self.rank_zero = fabric.global_rank == 0
        self.require_shared_directory()
        self.require_room()
        failpoint("set_up")
        self.model, self.optimizer, self.template, document_end = set_up(
            fabric, arguments, plan, plan.source, plan.resume_from
        )
        self.plan = plan = replace(plan, document_end=document_end)
        training = arguments.training
        self.router_aux_loss_coef = router.coefficient(self.template, training.router_aux_loss_coef)
        self.sum_in_float32 = training.accumulation_dtype == "float32"
        self.sync_every_micro_batch = strategy.syncs_every_micro_batch(
            plan.strategy, self.sum_in_float32 and arguments.model.precision == "bf16-true"
        )
        shared = {
            "rank": fabric.global_rank,
            "world_size": fabric.world_size,
            "document_end": plan.document_end,
        }
        self.batches = Prefetch(
            Batches(
                plan.dataset.train, training.seed, plan.micro_batch_size, plan.micro_batches, end=plan.end, **shared
            ),
            arguments.data.num_workers,
        )
        evaluation, validation = arguments.evaluation, plan.dataset.validation
        eval_iters = min(evaluation.eval_iters, -(-len(validation) // evaluation.eval_batch_size))  # not past its end
        self.evaluation_batches = Batches(
            validation,
            arguments.training.seed,
            evaluation.eval_batch_size,
            -(-eval_iters // fabric.world_size),  # the same number on every rank
            shuffle=False,
            end=min(eval_iters * evaluation.eval_batch_size, len(validation)),
            **shared,
        )
        guard = arguments.guard
        self.guard = Guard(guard.max_skipped_steps, guard.spike_threshold, guard.spike_window, guard.spike_action)
        self.owes_evaluation = False  # that of the step it resumes at
        self.rows_read_before = {"from_position": plan.start.position, "count": 0, "hash_sum": 0}
        if plan.resume_from is not None:
            document = reading.verified(plan.resume_from)
            self.restore(document)
            self.owes_evaluation = document.get("owes_evaluation", False)
            self.rows_read_before = document.get("rows_read", self.rows_read_before)  # older checkpoints don't say
        self.background = writing.Background() if arguments.save.async_save else None
        self.writing: Optional[Future[writing.Pending]] = None  # a checkpoint, in the background
        self.few_updates = 0  # logged steps in a row
        self.first_loss = self.last_loss = self.last_eval_loss = math.nan
        self.evaluated_step = -1
        if self.rank_zero:
            self.open_logs()
        self.throughput = metrics.Throughput(plan.start.tokens)

    def open_logs(self) -> None:
        arguments, plan = self.arguments, self.plan
        self.directory.mkdir(parents=True, exist_ok=True)
        if plan.resume_from is not None:
            for line in resume.announcement(plan, arguments, reading.verified(plan.resume_from)):
                print(line)
        for name in keep.move_aside(self.directory, plan.start.step):
            print(f"Kept as {name}: this run writes that step anew.")
        if plan.resume_from is not None and plan.resume_from.parent.resolve() != self.directory.resolve():
            before = plan.resume_from.parent / "metrics.jsonl"
            if before.is_file():
                shutil.copyfile(before, self.directory / "metrics.jsonl")
        write_yaml(arguments, self.directory / "arguments.yaml", **resolved(plan))
        self.metrics = metrics.MetricsFile(
            self.directory / "metrics.jsonl", plan.start.step, self.guard.rewinds, self.owes_evaluation
        )
        run_directory.write_status(self.directory, None, "running", plan.start.step, True)
        logging = arguments.logging
        self.tracker = trackers.open_tracker(
            logging.logger, self.directory, arguments.flat(), logging.entity, logging.project
        )
        start = f"weights of {plan.source}" if has_weights(plan.source) else f"random weights, {plan.source}"
        start = f"resumed from {plan.resume_from}" if plan.resume_from else start
        parameters = sum(p.numel() for p in self.template.parameters())
        attention = plan.config._attn_implementation
        attention = "" if attention == "sdpa" else f"{attention} attention, "
        print(
            f"{type(self.template).__name__}, {parameters / 1e6:,.1f} M parameters, {arguments.model.precision}, {attention}{start}; "
            f"{plan.strategy} on {plan.world_size} {plan.kind} device{'s' * (plan.world_size > 1)}; "
            f"{plan.global_batch_size} sequences of {plan.dataset.context_length} tokens a step, "
            f"{plan.max_step} steps; {self.directory}",
            flush=True,
        )
        if arguments.save.save_step_interval is None and plan.max_step - plan.start.step >= MANY_STEPS:
            print(
                "Warning: no --save_step_interval: the only checkpoint comes at the end, a crash loses all before it."
            )
        if said := router.warning(self.template):
            print(said, flush=True)
        if self.router_aux_loss_coef:
            print(f"Trained as well: the routers' auxiliary loss x {self.router_aux_loss_coef}, logged as aux_loss.")
        self.console = Console(plan.max_step, plan.start.step)

    def advance(self, progress: Progress) -> None:
        """Count a finished step."""
        self.watch.mark(progress.step, "in the next step")
        failpoint("between_steps")
        self.throughput.tokens = progress.tokens
        if self.rank_zero:
            self.console.advance()

    def log(self, progress: Progress, lr: float, result: step.StepResult) -> None:
        """One line of numbers."""
        self.first_loss = result.loss if math.isnan(self.first_loss) else self.first_loss
        self.last_loss = result.loss
        if not self.rank_zero:
            return
        rate = self.throughput.lap()
        record = {
            "loss": result.loss,
            "lr": lr,
            "grad_norm": result.grad_norm,
            "tokens": progress.tokens,
            "tokens_per_second": rate,
            "peak_memory_gib": metrics.peak_memory_gib(self.fabric.device),
        }
        updated = ""
        if result.aux_loss is not None:
            record["aux_loss"] = result.aux_loss
            updated = f"aux loss {result.aux_loss:.4f}  "
        if result.update is not None:
            record["updated_fraction"], record["update_ratio"] = result.update
            updated += f"{result.update.fraction:.1%} of weights changed  "
            self.warn_of_few_updates(result.update.fraction)
        self.write(progress.step, record)
        left = self.throughput.seconds_left(progress.step - self.plan.start.step, self.plan.max_step - progress.step)
        self.console.line(
            f"step {progress.step}/{self.plan.max_step}  loss {result.loss:.4f}  lr {lr:.2e}  "
            f"grad norm {result.grad_norm:.3f}  {updated}{rate:,.0f} tokens/s  {record['peak_memory_gib']:.2f} GiB  "
            f"{metrics.duration(left)} left"
        )

    def write(self, step: int, record: dict[str, Any]) -> None:
        """To metrics.jsonl and, but for verdicts, which are words, to the tracker."""
        self.metrics.write(step, record)
        if "verdict" not in record:
            self.tracker.log(step, record)

    def warn_of_few_updates(self, fraction: float) -> None:
        """Once, where the number stays low that says whether training in bfloat16 does anything."""
        self.few_updates = self.few_updates + 1 if fraction < FEW_UPDATES else 0
        if self.few_updates == FEW_UPDATES_LOGS:
            nearest = self.arguments.model.bf16_updates == "nearest"
            advice = (
                "the rest was too small for bfloat16 and is lost: take --bf16_updates stochastic"
                if nearest
                else "on average nothing is lost, but if the loss stalls, try a larger --lr"
            )
            self.console.line(
                f"Warning: only {fraction:.1%} of the weights change in a step; {advice} (docs/numerics.md)."
            )

    def report_verdict(self, before: Progress, progress: Progress, result: step.StepResult) -> None:
        """Say which step was skipped or looked odd and where its data is; stop once there were too many."""
        guard = self.guard
        if guard.verdict == "take":
            return
        where = f"sequences {before.position} to {progress.position - 1}"
        if self.rank_zero:
            self.write(progress.step, {"verdict": guard.verdict, "position": before.position, "reason": guard.reason})
            self.console.line(f"step {progress.step}/{self.plan.max_step}  {guard.verdict}: {guard.reason}; {where}")
        if guard.gives_up():
            self.commit()  # what the background has written is good
            many = f"{guard.skipped} steps in a row were left out"
            if guard.verdict == "rewind":
                many = f"the run would go back for the {guard.rewinds + 1}. time"
            raise Fault(
                f"{many} (--max_skipped_steps {guard.max_skipped_steps}), the last because of {guard.reason}, {where}; "
                f"the last checkpoint is {step_names.latest(self.directory) or 'none'}.",
                NON_FINITE,
            )

    def rewind(self, progress: Progress) -> Progress:
        """Go back to the last checkpoint, but on with the data after `progress`. Returns where the run is then."""
        self.commit()
        last, document = self.choose_to_rewind_to(progress)
        back = Progress(**document["progress"])
        rewinds = self.guard.rewinds + 1
        self.evaluated_step = -1
        self.model = self.optimizer = None  # their memory first: they are full of cycles
        gc.collect()
        if self.fabric.device.type == "cuda":
            torch.cuda.empty_cache()
        self.model, self.optimizer, *_ = set_up(self.fabric, self.arguments, self.plan, str(last), last)
        self.restore({**document, "guard": {**document["guard"], "rewinds": rewinds}})
        self.throughput.tokens = self.throughput.last_tokens = back.tokens
        if self.rank_zero:
            self.metrics = metrics.MetricsFile(self.directory / "metrics.jsonl", back.step)  # each step once
            keep.move_aside(self.directory, back.step)  # those that are damaged
            reason = {"verdict": "rewind", "position": progress.position, "reason": self.guard.reason}
            self.metrics.write(back.step, reason)
            self.console.line(
                f"step {back.step}/{self.plan.max_step}  went back to {last}, past position {progress.position}"
            )
        back = replace(back, position=progress.position)
        if self.plan.end is not None:  # there are fewer steps to the end of the data than there were
            self.plan = replace(self.plan, max_step=last_step(back, self.plan.end, self.plan.global_batch_size))
        return back

    def choose_to_rewind_to(self, progress: Progress) -> tuple[Path, dict[str, Any]]:
        """(the newest whole checkpoint, its progress.json), as rank 0 finds it."""

        def look() -> tuple[Path, dict[str, Any]]:
            hashes = self.arguments.checkpoint.verify_checkpoints == "full"
            last, problems = keep.newest_valid(self.directory, hashes)
            for problem in problems:
                self.console.line(f"Warning: {problem}")
            if last is None and self.plan.resume_from is not None:  # a branch that hasn't saved yet
                last = self.plan.resume_from
                reading.verified(last, hashes)
            if last is None:
                sentence = f"{self.guard.reason} at step {progress.step}, and no checkpoint to go back to."
                raise Fault(sentence, NON_FINITE)
            return last, reading.verified(last)

        return self.from_rank_zero(look)

    def restore(self, document: dict[str, Any]) -> None:
        """What a checkpoint's progress.json holds of the run besides its place."""
        self.guard.restore(document["guard"])
        if document.get("scaler"):
            self.fabric.strategy.precision.load_state_dict(document["scaler"])

    def evaluate(self, progress: Progress) -> bool:
        """Validation loss, the same at any number of devices. False where a request to stop came before its end."""
        self.throughput.pause()
        self.evaluation_cut_off = False
        loss = step.evaluate(self.fabric, self.model, self.until_stopped(self.evaluation_batches.stream(0), progress))
        self.throughput.resume()
        self.watch.mark(progress.step, "in the next step")
        if self.evaluation_cut_off:
            return False
        self.evaluated_step = progress.step
        if self.arguments.evaluation.eval_iters > 0:
            self.last_eval_loss = loss
            if self.rank_zero:
                self.write(progress.step, {"eval_loss": loss})
                self.console.line(f"step {progress.step}/{self.plan.max_step}  validation loss {loss:.4f}")
        return True

    def until_stopped(self, batches: Iterator[MicroBatch], progress: Progress) -> Iterator[MicroBatch]:
        """`batches`, each of which is progress to the watch; after the first, up to a request to stop to any rank."""
        for number, batch in enumerate(batches):
            if number > 0 and step.any_rank(self.fabric, stop.is_to_stop(self.signals, *self.files_and_clock())):
                self.evaluation_cut_off = True
                return
            self.watch.mark(progress.step, "evaluating")
            yield batch

    def ask(self) -> tuple[bool, bool, bool]:
        """Of all ranks, with a step's numbers: to stop, to save, and to publish, once its part of a checkpoint is written."""
        written = self.writing is not None and self.writing.done()
        return *stop.asked_for(self.signals, *self.files_and_clock()), written

    def files_and_clock(self) -> tuple[Optional[Path], Optional[float]]:
        """Besides signals, what may ask to stop: (run directory, --max_hours), rank 0's for all."""
        return (self.directory, self.arguments.training.max_hours) if self.rank_zero else (None, None)

    def agreed(self, result: step.StepResult) -> tuple[bool, bool]:
        """(stop, save) if any rank asked for it; publishes a checkpoint that all ranks have written meanwhile."""
        stop_askers, save_askers, writers = result.asked
        if writers == self.fabric.world_size:
            self.commit()
        return stop_askers > 0, save_askers > 0

    def require_shared_directory(self) -> None:
        """End the run before its model is loaded where a rank would write to another disk than rank 0 reads from."""
        written = self.from_rank_zero(lambda: run_directory.read_status(self.directory))
        sees = run_directory.wait_for_status(self.directory, written, self.arguments.devices.hang_timeout / 2)
        if blind := [rank for rank, there in enumerate(gather(sees)) if not there]:
            raise Fault(
                f"rank {blind[0]} doesn't see what rank 0 writes into {str(self.directory)!r}: "
                "it must be on a disk that all machines share.",
                UNWRITABLE,
            )

    def require_room(self) -> None:
        """Sweep, and end the run before its model is loaded where not even one checkpoint would fit on the disk."""

        def look() -> None:
            run_directory.sweep(self.directory)
            parameters = build_skeleton(self.plan.config, DTYPES[self.arguments.model.precision]).parameters()
            needed = adamw.checkpoint_bytes(parameters, self.arguments.model.bf16_updates)
            writing.require_room(self.directory, needed, "One checkpoint of this run")

        self.from_rank_zero(look)

    def from_rank_zero(self, action: Callable[[], Any]) -> Any:
        """What `action()` returns on rank 0, on all ranks; or its Fault, raised on all of them."""
        value, problem = None, None
        if self.rank_zero:
            try:
                value = action()
            except Fault as fault:
                problem = fault
        value, problem = self.fabric.broadcast((value, problem))
        if problem is not None:
            raise problem
        return value

    def save(self, progress: Progress, last: bool, evaluates: bool) -> None:
        """Write a checkpoint, the last one and without --async_save to its end, and remove what isn't kept.

        evaluates: an evaluation belongs to this step; where it was cut off, a resumed run makes it up.
        """
        self.commit()
        self.throughput.pause()
        self.watch.mark(progress.step, "saving")
        evaluated = self.evaluated_step == progress.step and math.isfinite(self.last_eval_loss)
        pending = writing.begin(
            step_directory(self.directory, progress.step),
            self.fabric,
            self.model.module,
            self.optimizer,
            template=self.template,
            tokenizer=self.plan.tokenizer,
            progress=progress,
            facts={
                **resume.facts(self.plan, self.arguments),
                "guard": self.guard.state(),
                "scaler": self.fabric.strategy.precision.state_dict(),
                "eval_loss": self.last_eval_loss if evaluated else None,
                "owes_evaluation": evaluates and self.evaluated_step != progress.step,
                "rows_read": self.rows_read(),
            },
            origin=self.origin(),
            probe=writing.record_probe(self.model, probe_input(self.plan), self.fabric.device),
            state_dict_type=self.arguments.fsdp.state_dict_type,
            copy=self.background is not None and not last,
        )
        if self.background is not None and not last:
            self.writing = self.background.write(pending)
        else:
            writing.write(pending)
            self.publish(pending)
        self.watch.mark(progress.step, "in the next step")
        self.throughput.resume()

    def rows_read(self) -> dict[str, int]:
        """Which rows all ranks together have read for steps since `from_position`, for `fabric_llm.verify`."""
        before = self.rows_read_before
        read = sum(gather(self.batches.rows_read), RowsRead(before["count"], before["hash_sum"]))
        return {"from_position": before["from_position"], **asdict(read)}

    def commit(self) -> None:
        """Publish the checkpoint that was written in the background, if there is one. All ranks call it."""
        if self.writing is not None:
            pending, self.writing = self.writing.result(), None
            self.publish(pending)

    def publish(self, pending: writing.Pending) -> None:
        """The written checkpoint gets its name, and those that aren't kept go."""
        writing.commit(pending, before=self.make_log_durable)
        step, save = step_names.step_of(pending.target), self.arguments.save
        if self.rank_zero:
            if save.keep_last is not None:
                keep.prune(self.directory, save.keep_last, save.keep_every, save.keep_best, self.plan.resume_from)
            run_directory.write_status(self.directory, None, "running", step, True)
            self.console.line(f"step {step}/{self.plan.max_step}  saved {pending.target}")

    def make_log_durable(self) -> None:
        """On rank 0, before a checkpoint is published: the lines of its steps are there as well."""
        self.metrics.make_durable()

    def origin(self) -> dict[str, Any]:
        """Hashes of what the run was made from, for manifests."""
        data = Path(self.plan.dataset.folder)
        sources = {
            "arguments": self.directory / "arguments.yaml",
            "data": data / "manifest.json",
            "tokenizer": data / "tokenizer" / "tokenizer.json",
        }
        hashes = {f"{name}_sha256": files.sha256(path) if path.is_file() else None for name, path in sources.items()}
        return {**hashes, "data_fingerprint": self.plan.dataset.fingerprint} if self.rank_zero else {}

    def finish(self, progress: Progress, stopped: bool) -> None:
        """Close everything, and tell the user what there is and what comes next."""
        failpoint("finish")
        self.signals.everything_is_saved()
        stop.asked_for(self.signals, self.directory if self.rank_zero else None)  # not for the next run
        self.commit()
        self.batches.close()
        if torch.distributed.is_initialized():
            self.fabric.barrier()
        self.watch.close()
        if torch.distributed.is_initialized():
            kept_alive.append((self.model, self.optimizer, self.background))
            torch.distributed.destroy_process_group()
        if self.rank_zero:
            last = step_directory(self.directory, progress.step)
            if not stopped and self.arguments.logging.log_model and self.arguments.logging.logger == "wandb":
                trackers.upload_to_wandb(last)
            self.console.close()
            self.tracker.close(SECONDS_AFTER_A_STOP if stopped else SECONDS_AFTER_THE_END)
            self.stopped(last) if stopped else self.done(last)

    def stopped(self, last: Path) -> None:
        """What a run says that was asked to stop."""
        hours = self.arguments.training.max_hours
        why = f"after --max_hours {hours:g}" if stop.is_over(self.signals, hours) else "on request"
        print(f"\nStopped {why}. Checkpoint: {last}")
        print(f"Next: the same command with --resume true --run_name {self.directory.name}", flush=True)

    def done(self, last: Path) -> None:
        """What a finished run says."""
        evaluated = "" if math.isnan(self.last_eval_loss) else f", validation loss {self.last_eval_loss:.4f}"
        print(f"\nLoss {self.first_loss:.4f} -> {self.last_loss:.4f}{evaluated}")
        print(f"Checkpoint: {last}")
        wants_sample = self.arguments.logging.sample_tokens and self.arguments.fsdp.state_dict_type == "full"
        if wants_sample and self.plan.tokenizer is not None:
            from fabric_llm.model.generate import generate

            prompt = self.plan.tokenizer.decode(probe_input(self.plan)[0, :16])
            try:
                print(f"Sample:\n{generate(str(last), prompt, self.arguments.logging.sample_tokens)}\n")
            except Exception as error:  # the run is done, and saved
                print(f"Warning: no sample could be generated: {type(error).__name__}: {error}")
        print(f"Next: python export_hf.py {self.directory} --output hf/{self.directory.name}", flush=True)
