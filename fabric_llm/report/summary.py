"""What a run is in a few words and numbers: the headline figures, what was trained on what, and how runs differ."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any, Optional

import numpy as np

from fabric_llm.data import blend
from fabric_llm.report.figures import extremes
from fabric_llm.report.reading import MEAN, ONE_SET, Run, Series
from fabric_llm.report.timeline import devices
from fabric_llm.verify.inspect_log import is_finite

NONE = "\N{EN DASH}"
MOST_CHARACTERS = 500  # of a flag's value
COMPARED = ("Run", "Validation loss", "Best", "Tokens", "Step", "Tokens/s", "Time in training", "How it ended")
NOT_COMPARED = ("run_name", "output_dir")  # flags


def number(value: Optional[float], digits: int = 4) -> str:
    """2.31, 1,234, 3.1e-05; NONE where there is none."""
    if value is None or not is_finite(value):
        return NONE
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.{digits}f}" if abs(value) >= 0.01 else f"{value:.2e}"


def large(value: float) -> str:
    """1,234 or 1.23 M"""
    if not is_finite(value):
        return NONE
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if abs(value) >= size:
            return f"{value / size:,.2f} {letter}"
    return f"{int(value):,}"


def duration(seconds: float) -> str:
    """3725 -> 1 h 2 min"""
    if not seconds < math.inf:
        return NONE
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def headline(run: Run) -> list[tuple[str, str, str]]:
    """(label, figure, what is said below it) of the five figures that decide."""
    loss = validation_loss(run)
    last, best = (NONE, "no validation") if loss is None else (_last(loss), f"best {best_of(run, loss)}")
    tokens, rates = run.numbers.get("tokens"), run.numbers.get("tokens_per_second")
    read = 0 if tokens is None else int(tokens.values[-1])
    rate = None if rates is None else float(np.nanmedian(rates.values))
    seconds, clock = run.training_seconds(), wall_clock(run)
    planned = planned_steps(run)
    steps = f"step {run.last_step:,}" + (f" of {planned:,}" if planned else "")
    if run.discarded:
        steps += f"; {large(run.discarded_tokens())} more discarded"
        clock += f"; {duration(sum(part.training_seconds() for part in run.discarded))} more discarded"
    more = [f"{devices(run.begun)}" if devices(run.begun) else "median of logged lines"]
    return [
        ("Validation loss", last, best),
        ("Tokens", large(read) if read else NONE, steps),
        ("Tokens per second", number(rate, 0) if rate else NONE, more[0]),
        ("Time in training", duration(seconds) if seconds > 0 else NONE, clock),
        ("How it ended", run.ending()[1], " ".join(filter(None, [run.told(), last_save(run)]))),
    ]


def best_of(run: Run, loss: Series) -> str:
    """The best validation loss and its step; of a mean, since the shares of its sets last changed: others are other means."""
    since = run.shares[-1][0] if len(run.shares) > 1 and loss is run.sets.get(MEAN, {}).get("loss") else 0
    found = extremes(Series(*(part[loss.steps >= since] for part in loss)))
    if found is None:
        return NONE
    words = f"; before step {since:,} it had other shares" if since else ""
    return f"{number(found['lowest'][1])} at step {found['lowest'][0]:,}{words}"


def last_save(run: Run) -> str:
    """The newest checkpoint, in words."""
    return f"Newest checkpoint: step {run.checkpoints[-1]:,}." if run.checkpoints else "No checkpoint."


def validation_loss(run: Run) -> Optional[Series]:
    """The validation loss that stands for a run: of its only set, or of all together."""
    named = run.sets.get(MEAN) or run.sets.get(ONE_SET) or next(iter(run.sets.values()), None)
    return None if named is None else named["loss"]


def planned_steps(run: Run) -> Optional[int]:
    """The last step that was planned, as far as it is known."""
    for value in (run.begun.get("max_step"), run.progress.get("end_step"), run.flags.get("max_step")):
        if type(value) is int:
            return value
    return None


def wall_clock(run: Run) -> str:
    """From the first event to the last, in words."""
    times = [time for event in run.events if (time := _time(event.get("time")))]
    if len(times) < 2:
        return "without evaluations and saves"
    return f"{duration((times[-1] - times[0]).total_seconds())} from start to end, with pauses"


def _time(said: Any) -> Optional[datetime]:
    try:
        time = datetime.fromisoformat(said)
    except (TypeError, ValueError):
        return None
    return time if time.tzinfo else time.replace(tzinfo=timezone.utc)


# ------------------------------------------------------------------------------- what was trained on what


def facts(run: Run) -> list[tuple[str, str]]:
    """(what, in words) about model, devices, data, batch and schedule; what isn't known is left out."""
    flags, begun = run.flags, run.begun
    said = [
        ("Model", _model(run)),
        ("Weights from", _weights_from(run)),
        ("Precision", _precision(flags)),
        ("Devices", _devices(run)),
        ("Data", str(flags.get("train_data_dir") or "") if not flags.get("data_mix") else "a mixture, see below"),
        ("Read", _read(run)),
        ("Batch", _batch(run)),
        ("Learning rate", _learning_rate(flags)),
        ("Seed", str(flags.get("seed", ""))),
        ("PyTorch", str(begun.get("torch", ""))),
        ("Directory", str(run.folder)),
    ]
    return [(name, words) for name, words in said if words]


def _model(run: Run) -> str:
    parameters = run.begun.get("parameters")
    words = [str(run.begun.get("model") or run.flags.get("model_name") or "")]
    words += [f"{large(parameters)} parameters"] if type(parameters) is int else []
    return ", ".join(word for word in words if word)


def _weights_from(run: Run) -> str:
    first = next((event for event in run.events if event["event"] == "started"), run.begun)
    name = str(run.flags.get("model_name") or "")
    return f"none: random, {name}" if first.get("random") else name


def _precision(flags: dict[str, Any]) -> str:
    precision = str(flags.get("precision", ""))
    return f"{precision}, {flags.get('bf16_updates')} updates" if precision == "bf16-true" else precision


def _devices(run: Run) -> str:
    if on := devices(run.begun):
        return f"{on}, {run.begun.get('strategy')}"
    asked = [f"{name} {run.flags[name]}" for name in ("devices", "num_nodes", "strategy") if name in run.flags]
    return f"as asked for: {', '.join(asked)}" if asked else ""


def _read(run: Run) -> str:
    if run.sources:
        return ""
    rows, position = run.progress.get("fixed", {}), run.progress.get("progress", {})
    rows = rows.get("train_rows") if isinstance(rows, dict) else None
    position = position.get("position") if isinstance(position, dict) else None
    if type(rows) is not int or type(position) is not int or rows < 1:
        return ""
    return f"{position / rows:.2f} epochs: {position:,} sequences, of {rows:,} in the dataset"


def _batch(run: Run) -> str:
    flags = run.flags
    sequences, context, micro = (flags.get(n) for n in ("global_batch_size", "context_length", "micro_batch_size"))
    if type(sequences) is not int:
        return ""
    tokens = f" of {context:,} tokens: {sequences * context:,} tokens a step" if type(context) is int else ""
    return f"{sequences:,} sequences{tokens}" + (f"; {micro:,} in a forward pass" if type(micro) is int else "")


def _learning_rate(flags: dict[str, Any]) -> str:
    if flags.get("lr") is None:
        return ""
    falls = flags.get("lr_decay", True) and flags.get("lr_schedule") != "constant"
    decays = f", {flags.get('lr_schedule')} to {short(flags.get('min_lr') or 0)}" if falls else ""
    warmup = f", warm-up of {short(flags['warmup_steps'])} steps" if flags.get("warmup_steps") else ""
    return f"{short(flags['lr'])}{decays or ', constant'}{warmup}; weight decay {short(flags.get('weight_decay'))}"


def short(value: Any) -> str:
    """A number without digits that say nothing."""
    return f"{value:g}" if type(value) in (int, float) and abs(value) < 1e15 else shown(value)


def sources(run: Run) -> list[tuple[str, ...]]:
    """(name, share, tokens, epochs, sequences, folder) of each source of a mixture."""
    paths, most = {}, {}
    try:
        said = blend.parse(run.flags["data_mix"]) if run.flags.get("data_mix") else None
        paths = {source.name: source.path for source in said.sources} if said else {}
        most = {source.name: float(source.max_epochs) for source in said.sources if source.max_epochs} if said else {}
    except (ValueError, TypeError, AttributeError):
        pass
    shares, fixed = _shares(run), run.progress.get("fixed")
    rows = fixed.get("train_rows") if isinstance(fixed, dict) else None
    found = []
    for name in dict.fromkeys([*run.sources, *paths]):
        read = {key: float(series.values[-1]) for key, series in run.sources.get(name, {}).items()}
        limit = f" of at most {most[name]:g}" if name in most else ""
        count = rows.get(name) if isinstance(rows, dict) else None
        found.append(
            (
                name,
                f"{100 * shares[name]:.3g} %" if name in shares else NONE,
                large(read["tokens"]) if "tokens" in read else NONE,
                f"{read['epochs']:.2f}{limit}" if "epochs" in read else NONE,
                number(count) if type(count) is int else NONE,
                str(paths.get(name, NONE)),
            )
        )
    return found


def _shares(run: Run) -> dict[str, float]:
    """The part of the run's sequences that each source has in the stage of the newest checkpoint."""
    try:
        position = run.progress["progress"]["position"]
        segments = [s for s in run.progress["mixture"]["segments"] if s["begins"] < max(position, 1)]
        weights = segments[-1]["weights"]
        return {name: weight / sum(weights.values()) for name, weight in weights.items()}
    except (KeyError, TypeError, IndexError, ZeroDivisionError, AttributeError):
        return {}


# ------------------------------------------------------------------------------- runs beside each other


def differing_flags(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """(flag, its value in each run) of flags that aren't the same in all."""
    names = dict.fromkeys(name for run in runs for name in run.flags)
    found = []
    for name in names:
        values = [shown(run.flags[name]) if name in run.flags else NONE for run in runs]
        if name not in NOT_COMPARED and len(set(values)) > 1:
            found.append((str(name), values))
    return found


def shown(value: Any) -> str:
    """A flag's value as a YAML file and the command line have it."""
    words = {True: "true", False: "false", None: "null"}.get(value) if isinstance(value, (bool, type(None))) else None
    words = str(value) if words is None else words
    return words[:MOST_CHARACTERS] + "..." * (len(words) > MOST_CHARACTERS)


def losses(runs: Sequence[Run]) -> tuple[list[str], list[list[tuple[str, str]]]]:
    """(sets, for each run: its last training loss, and of each set the last and the best validation loss)."""
    names = list(dict.fromkeys(name for run in runs for name in sorted(run.sets) if name != MEAN))
    table = []
    for run in runs:
        row = [(_last(run.numbers.get("loss")), "")]
        for name in names:
            series = run.sets.get(name, {}).get("loss")
            row.append((NONE, "") if series is None else (_last(series), f"best {best_of(run, series)}"))
        table.append(row)
    return names, table


def _last(series: Optional[Series]) -> str:
    found = None if series is None else extremes(series)
    return NONE if found is None else number(found["last"][1])
