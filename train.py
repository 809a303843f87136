#!/usr/bin/env python
"""Train a Hugging Face causal language model: `python train.py --help`. `train` is the loop."""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from arguments import Arguments, fail, is_rank_zero, parse_train, write_yaml

if TYPE_CHECKING:
    from lightning.fabric import Fabric

    from preflight import Plan

NON_FINITE = 76  # exit code


def main(argv: Optional[list[str]] = None) -> None:
    arguments = parse_train(argv)
    if arguments.demo and is_rank_zero():
        print("No --config, --model_name or --train_data_dir: the demo, configs/demo.yaml.", flush=True)
    from fabric_llm.strategy import make_fabric
    from preflight import make_plan

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
    fabric.launch()
    train(fabric, arguments, plan)


def train(fabric: Fabric, arguments: Arguments, plan: Plan) -> None:
    """The run, from its first step or the one it resumes at to the last. Every rank calls it."""
    from fabric_llm.optim import lr_at
    from fabric_llm.step import seed_step, train_step

    run = Run(fabric, arguments, plan)
    training, evaluation, save = arguments.training, arguments.evaluation, arguments.save
    half_epoch = len(plan.dataset.train) / 2
    progress = plan.start
    if progress.step == 0:
        run.evaluate(progress)

    while progress.step < plan.max_step:
        lr = lr_at(
            progress.step,
            max_step=plan.max_step,
            lr=training.lr,
            min_lr=training.min_lr,
            warmup_steps=training.warmup_steps,
            decay=training.lr_decay,
            shape=training.lr_schedule,
        )
        seed_step(training.seed, progress.step, fabric.global_rank)
        result = train_step(
            fabric,
            run.model,
            run.optimizer,
            run.batches.at(progress.position),
            lr=lr,
            grad_clip=training.grad_clip,
            sync_every_micro_batch=run.sync_every_micro_batch,
        )
        before = progress
        progress = progress.advance(plan.sequences_at(progress.position), plan.dataset.context_length)

        last = progress.step == plan.max_step
        half_done = progress.position // half_epoch > before.position // half_epoch
        evaluates = last or half_done or due(progress.step, evaluation.eval_step_interval)
        saves = last or due(progress.step, save.save_step_interval)
        run.advance(progress)
        if saves or evaluates or before.step == plan.start.step or due(progress.step, arguments.logging.log_step_interval):
            run.log(progress, lr, result)
        if evaluates:
            run.evaluate(progress)
        if saves:
            run.save(progress)

    run.finish(progress)


def due(step: int, interval: Optional[int]) -> bool:
    return interval is not None and step % interval == 0


class Run:
    """The objects of a run, and what the loop does with them besides stepping."""

    def __init__(self, fabric: Fabric, arguments: Arguments, plan: Plan) -> None:
        from fabric_llm import strategy
        from fabric_llm.data import Batches, Prefetch
        from fabric_llm.metrics import Throughput

        self.fabric, self.arguments, self.plan = fabric, arguments, plan
        self.directory = Path(fabric.broadcast(str(plan.run_directory)))
        self.rank_zero = fabric.global_rank == 0
        self.model, self.optimizer, self.template = set_up(fabric, arguments, plan)
        self.sync_every_micro_batch = strategy.syncs_every_micro_batch(plan.strategy)
        ranks = {"rank": fabric.global_rank, "world_size": fabric.world_size}
        self.batches = Prefetch(
            Batches(
                plan.dataset.train,
                arguments.training.seed,
                plan.micro_batch_size,
                plan.micro_batches,
                end=plan.end,
                **ranks,
            ),
            arguments.data.num_workers,
        )
        evaluation = arguments.evaluation
        self.evaluation_batches = Batches(
            plan.dataset.validation,
            arguments.training.seed,
            evaluation.eval_batch_size,
            -(-evaluation.eval_iters // fabric.world_size),  # the same number on every rank
            shuffle=False,
            end=min(evaluation.eval_iters * evaluation.eval_batch_size, len(plan.dataset.validation)),
            **ranks,
        )
        self.first_loss = self.last_loss = self.last_eval_loss = math.nan
        if self.rank_zero:
            self.open_logs()
        self.throughput = Throughput(plan.start.tokens)

    def open_logs(self) -> None:
        from fabric_llm import checkpoint, metrics

        arguments, plan = self.arguments, self.plan
        self.directory.mkdir(parents=True, exist_ok=True)
        for name in checkpoint.sweep(self.directory):
            print(f"Removed {name}, left by a save that was cut off.")
        for name in checkpoint.move_aside(self.directory, plan.start.step):
            print(f"Kept as {name}: this run writes that step anew.")
        resolved = {"context_length": plan.dataset.context_length, "global_batch_size": plan.global_batch_size}
        if arguments.training.micro_batch_size is not None:
            resolved["gradient_accumulation_steps"] = None  # follows, on any number of devices
        write_yaml(arguments, self.directory / "arguments.yaml", **resolved)
        self.metrics = metrics.MetricsFile(self.directory / "metrics.jsonl", plan.start.step)
        logging = arguments.logging
        self.track, self.close_tracker = metrics.open_tracker(
            logging.logger, self.directory, arguments.flat(), logging.entity, logging.project
        )
        start = f"resumed from {plan.resume_from}" if plan.resume_from else f"weights of {plan.source}"
        parameters = sum(p.numel() for p in self.template.parameters())
        print(
            f"{type(self.template).__name__}, {parameters / 1e6:,.1f} M parameters, {arguments.model.precision}, {start}; "
            f"{plan.strategy} on {plan.world_size} {plan.kind} device{'s' * (plan.world_size > 1)}; "
            f"{plan.global_batch_size} sequences of {plan.dataset.context_length} tokens a step, "
            f"{plan.max_step} steps; {self.directory}",
            flush=True,
        )
        self.console = metrics.Console(plan.max_step, plan.start.step)

    def advance(self, progress: Any) -> None:
        """Count a finished step."""
        self.throughput.tokens = progress.tokens
        if self.rank_zero:
            self.console.advance()

    def log(self, progress: Any, lr: float, result: Any) -> None:
        """Read the step's numbers off the device, the one place that waits for it; stop if they aren't finite."""
        from fabric_llm.metrics import duration, peak_memory_gib

        loss = self.fabric.all_reduce(result.loss, reduce_op="sum").item()
        grad_norm = result.grad_norm.item()
        if not (math.isfinite(loss) and math.isfinite(grad_norm) or self.skips_overflows()):
            fail(
                "train.py",
                f"loss {loss} and gradient norm {grad_norm} at step {progress.step}: training stopped before saving them.",
                NON_FINITE,
            )
        self.first_loss = loss if math.isnan(self.first_loss) else self.first_loss
        self.last_loss = loss
        if not self.rank_zero:
            return
        rate = self.throughput.lap()
        record = {
            "loss": loss,
            "lr": lr,
            "grad_norm": grad_norm,
            "tokens": progress.tokens,
            "tokens_per_second": rate,
            "peak_memory_gib": peak_memory_gib(self.fabric.device),
        }
        self.metrics.write(progress.step, record)
        self.track(progress.step, record)
        left = self.throughput.seconds_left(progress.step - self.plan.start.step, self.plan.max_step - progress.step)
        self.console.line(
            f"step {progress.step}/{self.plan.max_step}  loss {loss:.4f}  lr {lr:.2e}  grad norm {grad_norm:.3f}  "
            f"{rate:,.0f} tokens/s  {record['peak_memory_gib']:.2f} GiB  {duration(left)} left"
        )

    def skips_overflows(self) -> bool:
        """True where a gradient scaler deals with infinite gradients by itself (float16)."""
        return self.arguments.model.precision == "16-mixed"

    def evaluate(self, progress: Any) -> None:
        """Validation loss, the same at any number of devices."""
        from fabric_llm.step import evaluate

        if self.arguments.evaluation.eval_iters == 0:
            return
        self.throughput.pause()
        self.last_eval_loss = evaluate(self.fabric, self.model, self.evaluation_batches.stream(0))
        self.throughput.resume()
        if self.rank_zero:
            record = {"eval_loss": self.last_eval_loss}
            self.metrics.write(progress.step, record)
            self.track(progress.step, record)
            self.console.line(f"step {progress.step}/{self.plan.max_step}  validation loss {self.last_eval_loss:.4f}")

    def save(self, progress: Any) -> None:
        """Write a checkpoint and remove the oldest."""
        from fabric_llm import checkpoint

        self.throughput.pause()
        target = checkpoint.step_directory(self.directory, progress.step)
        checkpoint.save(
            target,
            self.fabric,
            self.model.module,
            self.optimizer,
            template=self.template,
            tokenizer=self.plan.tokenizer,
            progress=progress,
            facts=self.plan.facts(self.arguments),
            probe=checkpoint.record_probe(self.model, self.probe_input(), self.fabric.device),
            state_dict_type=self.arguments.fsdp.state_dict_type,
        )
        if self.rank_zero:
            if self.arguments.save.keep_last is not None:
                checkpoint.prune(self.directory, self.arguments.save.keep_last)
            self.console.line(f"step {progress.step}/{self.plan.max_step}  saved {target}")
        self.throughput.resume()

    def probe_input(self) -> Any:
        """The first tokens of the validation split, int64 [1, up to 128]."""
        import torch

        return torch.tensor(self.plan.dataset.validation[0]["input_ids"])[None, :128]

    def finish(self, progress: Any) -> None:
        """Close everything, and tell the user what there is and what comes next."""
        import torch

        self.batches.close()
        if torch.distributed.is_initialized():
            self.fabric.barrier()
            torch.distributed.destroy_process_group()
        if not self.rank_zero:
            return
        from fabric_llm import checkpoint, metrics

        last = checkpoint.step_directory(self.directory, progress.step)
        if self.arguments.logging.log_model and self.arguments.logging.logger == "wandb":
            metrics.upload_to_wandb(last)
        self.console.close()
        self.metrics.close()
        self.close_tracker()
        print(f"\nLoss {self.first_loss:.4f} -> {self.last_loss:.4f}, validation loss {self.last_eval_loss:.4f}")
        print(f"Checkpoint: {last}")
        if self.arguments.logging.sample_tokens and self.arguments.fsdp.state_dict_type == "full":
            from fabric_llm.generate import generate

            prompt = self.plan.tokenizer.decode(self.probe_input()[0, :16])
            print(f"Sample:\n{generate(str(last), prompt, self.arguments.logging.sample_tokens)}\n")
        print(f"Next: python export_hf.py {self.directory} --output hf/{self.directory.name}", flush=True)


def set_up(fabric: Fabric, arguments: Arguments, plan: Plan) -> tuple[Any, Any, Any]:
    """(wrapped model, optimizer, unwrapped model without memory), with the weights and state to start from."""
    from fabric_llm import checkpoint, model, optim, strategy

    dtype = model.DTYPES[arguments.model.precision]
    reference, problem = None, None
    if fabric.global_rank == 0:
        try:
            reference = model.load_reference(
                plan.source, plan.config, dtype, arguments.training.seed, checkpoint.sharded_weights(Path(plan.source))
            )
        except ValueError as error:
            problem = str(error)
    problem = fabric.broadcast(problem)
    if problem is not None:
        fail("train.py", problem)
    model.disable_progress_bar()  # from here on there is our own
    template = model.build_skeleton(plan.config, dtype)
    template.generation_config = model.load_generation_config(plan.source) or template.generation_config
    skeleton = model.LanguageModel(model.build_skeleton(plan.config, dtype))
    if arguments.fsdp.activation_checkpointing:
        model.checkpoint_activations(skeleton.causal_lm)
    decayed = optim.decayed_names(skeleton)
    materializer = model.Materializer(skeleton, reference, fabric.device)
    wrapped = strategy.wrap(fabric, plan.strategy, skeleton, materializer, arguments.model.precision, plan.sharding)
    named = ((strategy.original_name(name), parameter) for name, parameter in wrapped.module.named_parameters())
    training = arguments.training
    groups = optim.parameter_groups(named, decayed, training.weight_decay)
    optimizer = optim.adamw(groups, lr=training.lr, beta1=training.beta1, beta2=training.beta2)
    optimizer = fabric.setup_optimizers(optimizer)
    if plan.resume_from is not None:
        checkpoint.load_optimizer(plan.resume_from, wrapped.module, optimizer)
    return wrapped, optimizer, template


if __name__ == "__main__":
    main()
