"""When a run saves: one checkpoint at a time, in the step or in the background, published once all ranks have written it."""

from __future__ import annotations

import math
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from typing import Any, Callable, Optional

import torch
from torch import nn
from transformers import PreTrainedModel

from fabric_llm.base import files, step_names
from fabric_llm.base.command_line import Flags
from fabric_llm.base.fabric import Fabric
from fabric_llm.base.ranks import gather
from fabric_llm.checkpoint import keep, writing
from fabric_llm.checkpoint.progress import Progress, step_directory
from fabric_llm.data.batches import Prefetch
from fabric_llm.data.order import RowsRead
from fabric_llm.plan import run_directory, same_run
from fabric_llm.plan.plan import Plan
from fabric_llm.run.due import Due
from fabric_llm.run.log import Log
from fabric_llm.run.samples import Samples
from fabric_llm.training.guard import Guard


class Saver:
    """Writes the checkpoints of a run and removes those that aren't kept. All ranks call its methods."""

    def __init__(
        self,
        fabric: Fabric,
        flags: Flags,
        plan: Plan,
        log: Log,
        template: PreTrainedModel,
        mark: Callable[[int, str], None],
    ) -> None:
        """mark(step, doing): says that this rank works."""
        self.fabric, self.flags, self.plan, self.log, self.template = fabric, flags, plan, log, template
        self.mark = mark
        self.samples = Samples(fabric, flags, plan, log, mark)
        none_read = {"from_position": plan.start.position, "count": 0, "hash_sum": 0}
        self.rows_read_before = plan.resumed.get("rows_read", none_read)  # older checkpoints don't say
        self.background = writing.Background() if flags.save.async_save else None
        self.writing: Optional[Future[writing.Pending]] = None

    def save(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        progress: Progress,
        batches: Prefetch,
        guard: Guard,
        *,
        evaluated: bool,
        due: Due,
        stops: bool,
    ) -> None:
        """Write a checkpoint. Blocks for the last one, and always without --async_save.

        evaluated: the evaluation of this step was made. One that is due and wasn't is made by a resumed run.
        """
        self.publish()
        with self.log.untimed():
            self.mark(progress.step, "saving")
            in_background = self.background is not None and not (due.is_last or stops)
            pending = writing.begin(
                step_directory(self.plan.run_directory, progress.step),
                self.fabric,
                model.module,
                optimizer,
                template=self.template,
                tokenizer=self.plan.tokenizer,
                progress=progress,
                facts={
                    **same_run.facts(self.plan, self.flags),
                    "guard": guard.state(),
                    "scaler": self.fabric.strategy.precision.state_dict(),
                    "eval_loss": self._followed_loss() if evaluated else None,
                    "eval_losses": self.log.eval_losses if evaluated else None,
                    "owes_evaluation": due.evaluates and not evaluated,
                    "rows_read": self._rows_read(batches),
                },
                origin=self._origin(),
                probe=writing.record_probe(model, self.plan.probe_input(), self.fabric.device),
                state_dict_type=self.flags.fsdp.state_dict_type,
                copy=in_background,
            )
            if in_background:
                self.writing = self.background.write(pending)
            else:
                writing.write(pending)
                self._publish(pending)
            self.mark(progress.step, "in the next step")
        if due.is_last or not stops:  # who asks a run to stop doesn't wait for samples
            self.samples.take(model, progress)

    def _followed_loss(self) -> Optional[float]:
        """The loss that the best checkpoints are kept by."""
        followed = self.flags.save.keep_best_of
        loss = self.log.eval_loss if followed is None else self.log.eval_losses.get(followed, math.nan)
        return loss if math.isfinite(loss) else None

    def has_written(self) -> bool:
        """True once this rank's part of a checkpoint is written in the background; it waits to be published."""
        return self.writing is not None and self.writing.done()

    def publish(self, ranks_that_have_written: Optional[int] = None) -> None:
        """Publish the checkpoint that was written in the background, if there is one, and if all ranks have written it.

        None: wait until they have.
        """
        if self.writing is not None and ranks_that_have_written in (None, self.fabric.world_size):
            pending, self.writing = self.writing.result(), None
            self._publish(pending)

    def _publish(self, pending: writing.Pending) -> None:
        """Give the written checkpoint its name, after the log of its steps is durable, and prune."""
        writing.commit(pending, before=self._make_log_durable)
        if self.fabric.global_rank == 0:
            step, save, folder = step_names.step_of(pending.target), self.flags.save, self.plan.run_directory
            if save.keep_last is not None:
                keep.prune(folder, save.keep_last, save.keep_every, save.keep_best, self.plan.resume_from)
            run_directory.write_status(folder, None, "running", step, True)
            self.log.saved(step, pending.target)
            if self.flags.logging.log_model == "all":
                self.log.upload(pending.target)

    def _make_log_durable(self) -> None:
        self.log.metrics.make_durable()

    def _rows_read(self, batches: Prefetch) -> dict[str, int]:
        """Which rows all ranks together have read for steps since `from_position`; `fabric_llm.verify` compares them."""
        before = self.rows_read_before
        read = sum(gather(batches.rows_read), RowsRead(before["count"], before["hash_sum"]))
        return {"from_position": before["from_position"], **asdict(read)}

    def _origin(self) -> dict[str, Any]:
        """Hashes of what the run is made from, for manifests."""
        if self.fabric.global_rank != 0:
            return {}
        plan, data = self.plan, Path(self.plan.dataset.folder)
        made_from = {
            "arguments": plan.run_directory / "arguments.yaml",
            "data": data / "manifest.json",
            "tokenizer": data / "tokenizer" / "tokenizer.json",
        }
        hashes = {f"{name}_sha256": _sha256(path) for name, path in made_from.items()}
        if plan.mixture is None:
            return {**hashes, "data_fingerprint": plan.dataset.fingerprint}
        hashes["data_sha256"] = {
            name: _sha256(source.folder / "manifest.json") for name, source in plan.sources.items()
        }
        return {**hashes, "data_fingerprint": {name: source.fingerprint for name, source in plan.sources.items()}}


def _sha256(path: Path) -> Optional[str]:
    return files.sha256(path) if path.is_file() else None
