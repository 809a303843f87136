"""metrics.jsonl, which rank 0 writes, and the metrics of --code that it holds."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Optional

from fabric_llm.base import register
from fabric_llm.base.failpoints import failpoint
from fabric_llm.base.files import fsync, json_lines, write_atomically
from fabric_llm.checkpoint.keep import Progress, is_before

Record = dict[str, Any]
# What a line may hold, and behind that what the report calls figures of its own: a metric of --code
# needs another name.
STEP_NUMBERS = frozenset(
    "step position loss lr grad_norm tokens tokens_per_second tokens_per_second_per_device "
    "model_tflops_per_device mfu data_seconds wait_seconds peak_memory_gib aux_loss "
    "updated_fraction update_ratio sources verdict eval eval_loss eval_loss_ema shares "
    "eval_forgotten eval_budget share undone copy tasks by_position retrieval forgetting".split()
)


class AfterStep(NamedTuple):
    """What a metric of --code gets, on each rank, after a step that is logged."""

    step: int  # that is done
    loss: float  # of the global batch, nats per target
    lr: float
    grad_norm: float  # before clipping
    batch: Mapping[str, Any]  # this rank's last micro-batch, int64 tensors [rows, context]
    model: Any  # the wrapped model, after the update, without gradients
    fabric: Any  # its all_reduce is how ranks combine their numbers
    flags: Any


def of_code(at: AfterStep) -> dict[str, float]:
    """The metrics that --code registers, after a step. All ranks call it, since those that use the
    model need all ranks."""
    numbers: dict[str, float] = {}
    if not register.METRICS:
        return numbers
    # Not at the top, because arguments.py imports this file, and --help is to come at once.
    import torch

    from fabric_llm.model.sharded import reshard

    modes = [(module, module.training) for module in at.model.modules()]
    for name, metric in register.METRICS.items():
        with register.of_user(f"metric {name!r}"), torch.no_grad():
            numbers[name] = float(metric(at))
    # A metric may have called the model, which leaves its outermost unit whole.
    reshard(at.model)
    # Or it has called eval(), and the next steps would have no dropout.
    for module, mode in modes:
        module.training = mode
    return numbers


class MetricsFile:
    """metrics.jsonl: one JSON object a line, each with `step` and `position`.

    The position counts the sequences that were read by then. Open only while a line is written.
    """

    def __init__(
        self, path: Path, last: Optional[Progress] = None, evaluates: bool = False
    ) -> None:
        """last: where the run resumes, None for one that begins: see `cut`."""
        self.path = path
        self.cut(last, evaluates=evaluates)

    def cut(
        self, last: Optional[Progress], undone: Optional[Path] = None, evaluates: bool = False
    ) -> None:
        """Remove the lines of steps that a run at `last` makes again, or all lines if it is None.
        Lines that aren't whole are removed, too.

        undone: a file to which they are added, behind a line that counts them. evaluates: the run
        evaluates at `last`, where the log may have an evaluation of other rows.
        """
        if not self.path.exists():
            return
        kept, removed = [], []
        for line, record in json_lines(self.path):
            # A line that was cut off is {} here, so it is removed.
            lines = removed
            if last is not None and is_before(record, last):
                is_again = evaluates and "eval_loss" in record and record["step"] == last.step
                lines = removed if is_again else kept
            lines.append(f"{line.rstrip()}\n")
        # Before the log is cut: a kill in between leaves lines twice, and loses none.
        if removed and undone is not None:
            title = {"step": last.step, "position": last.position, "undone": len(removed)}
            with undone.open("a") as file:
                file.writelines([json.dumps(title) + "\n", *removed])
        failpoint("metrics.replace")
        write_atomically(self.path, "".join(kept), durable=True)

    def write(self, progress: Progress, record: Record) -> None:
        """Append a line about a run that is at `progress`."""
        place = {"step": progress.step, "position": progress.position}
        # Opened for each line, since `cut` puts another file in its place.
        with self.path.open("a") as file:
            file.write(json.dumps({**place, **_finite(record)}) + "\n")

    def make_durable(self) -> None:
        """Flush the file to the disk, before a checkpoint says that these steps are done."""
        self.path.touch()  # before step 1 there may be no file
        fsync(self.path)


def _finite(value: Any) -> Any:
    """JSON has no NaN."""
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
