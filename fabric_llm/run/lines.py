"""The lines that a run prints about its steps and evaluations, made of the same numbers that
metrics.jsonl gets."""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Optional

from fabric_llm.base import register

# A warning comes when a step changes less than this fraction of the weights, so many logged steps
# in a row.
FEW_UPDATES, FEW_UPDATES_LOGS = 0.1, 3


def of_step(record: dict[str, Any], world_size: int, seconds_left: float) -> str:
    """The line of a step. record: its numbers. seconds_left: until the end of the run."""
    words = [
        f"loss {record['loss']:.4f}",
        f"lr {record['lr']:.2e}",
        f"grad norm {record['grad_norm']:.3f}",
    ]
    # Only some runs have these: those with experts, and those with a loss or metrics of --code.
    for name in ("aux_loss", *register.added_by_loss(), *register.METRICS):
        if name in record:
            words.append(f"{name.replace('_', ' ')} {record[name]:.4f}")
    if "updated_fraction" in record:
        words.append(f"{record['updated_fraction']:.1%} of weights changed")
    # Of several devices also the speed of one, which other runs can be compared with.
    speed, details = f"{record['tokens_per_second']:,.0f} tokens/s", []
    if world_size > 1:
        details.append(f"{record['tokens_per_second_per_device']:,.0f} a device")
    if record.get("mfu", 0.0) >= 0.001:  # the MFU of a toy model means nothing
        details.append(f"MFU {record['mfu']:.1%}")
    if details:
        speed += f" ({', '.join(details)})"
    words += [speed, f"{record['peak_memory_gib']:.2f} GiB"]
    words.append(f"{timedelta(seconds=int(min(seconds_left, 1e13)))} left")
    # Only a mixture of named sources has them.
    sources = []
    for name, read in record.get("sources", {}).items():
        sources.append(f"{name} {read['epochs']:.2f} epochs ({read['tokens']:,} tokens)")
    if sources:
        words.append(", ".join(sources))
    return "  ".join(words)


def of_evaluation(record: dict[str, Any]) -> str:
    """The line of an evaluation. record: its numbers."""
    sets = []
    for name, numbers in record["eval"].items():
        words = []
        # The line begins with the loss of the only set, which needs no name.
        if len(record["eval"]) > 1:
            words += [name, f"{numbers['loss']:.4f}"]
        if "bits_per_byte" in numbers:
            words.append(f"{numbers['bits_per_byte']:.3f} bits/byte")
        if "accuracy" in numbers:
            words.append(f"{numbers['accuracy']:.0%} right")
        # The loss is of some rows of the set only.
        if "rows" in numbers:
            words.append(f"on {numbers['rows']:,} of {numbers['of_rows']:,} rows")
        # A loss that wasn't measured before step 1 has no rise to judge.
        if "budget" in numbers and "forgotten" in numbers:
            words.append(f"{numbers['forgotten']:+.4f} of {numbers['budget']:g}")
        if words:
            sets.append(" ".join(words))
    line = f"validation loss {record['eval_loss']:.4f}"
    if sets:
        line += f" ({', '.join(sets)})"
    if "eval_loss_ema" in record:
        line += f"  of the moving average {record['eval_loss_ema']:.4f}"
    return line


def shares(of_sources: Mapping[str, float]) -> str:
    """The shares of a mixture's sources."""
    return ", ".join(f"{name} {100 * share:.4g} %" for name, share in of_sources.items())


class FewUpdates:
    """Warns, once in a row of logged steps, if training in bfloat16 has hardly any effect."""

    # The fraction of updates too small for bfloat16 that the optimizer keeps, see
    # `adamw.kept_updates`.
    kept: Optional[float] = None
    in_a_row = 0
    highest_lr = 0.0

    def warning(self, updated_fraction: float, lr: float) -> Optional[str]:
        """The warning that is due after a step that changed this fraction of the weights."""
        self.in_a_row += 1
        self.highest_lr = max(self.highest_lr, lr)
        # At the end of a decay, few updates are what the schedule is for.
        if updated_fraction >= FEW_UPDATES or lr < self.highest_lr / 2:
            self.in_a_row = 0
        # Equal, and not at least, so that one row of logged steps gives one warning.
        if self.in_a_row != FEW_UPDATES_LOGS:
            return None
        # By stochastic rounding a small update changes few weights, each by more.
        advice = "on average nothing is lost, but if the loss stalls, try a larger --lr"
        # An optimizer of --code may work with its own model only, which leaves it unmeasured.
        if self.kept is None:
            advice = "how much of smaller updates this optimizer loses can't be measured"
        elif self.kept < 0.9:
            advice = (
                "the rest was too small for bfloat16, and this optimizer keeps "
                f"{self.kept:.0%} of such updates: take --bf16_updates stochastic, "
                "and `store` in an optimizer of your own"
            )
        few = f"Warning: only {updated_fraction:.1%} of the weights change in a step"
        return f"{few}; {advice} (docs/numerics.md)."
