"""Where a run begins, and what it reads from there on, as far as flags, datasets and a checkpoint
say."""

import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any, Optional

from fabric_llm.base import register
from fabric_llm.base.flag import Flags
from fabric_llm.checkpoint import keep
from fabric_llm.data import mixture_text
from fabric_llm.data.mixture import mixture_of
from fabric_llm.data.periods import ENDLESS, Stage
from fabric_llm.data.sources import open_source, source_of
from fabric_llm.data.stages import Cursor, last_step, lay_out
from fabric_llm.forecast.accelerators import devices_of_node
from fabric_llm.model import loading
from fabric_llm.plan import checks, fetched, resumption, run_directory, same_run
from fabric_llm.plan.data_plan import plan_data
from fabric_llm.plan.model_plan import require_rows_for, tokenizer_of
from fabric_llm.plan.schedule import plan_schedule
from fabric_llm.plan.start import batch_sizes

ROW = 2048  # tokens: prepare_data.py's --context_length, where nothing is said
# Of a dataset: training rows and tokens in each, None where it doesn't say so.
Size = Optional[tuple[int, int]]


def beginning(flags: Flags) -> Cursor:
    """Where a run begins, which is a checkpoint if it is resumed. Raises Fault as train.py would
    where there is none."""
    if not flags.checkpoint.resume:
        return Cursor()
    folder = run_directory.directory(flags)
    checkpoint = resumption.given_checkpoint(flags) or keep.newest_valid(folder, False)[0]
    if checkpoint is None:
        return Cursor()
    with same_run.written_by_a_run(checkpoint):
        document = keep.read_progress(checkpoint)
        _require_same(flags, checkpoint, document["fixed"], False)
        _require_same(flags, checkpoint, document["schedule"], True)
        progress = keep.Progress(**document["progress"])
        return Cursor(progress.step, progress.position, mixture_of(document).stages)


def _require_same(flags: Flags, checkpoint: Path, then: dict[str, Any], may_change: bool) -> None:
    """Raises ValueError, as train.py would, for a value on the command line that the run of the
    checkpoint hasn't. then: its flags. may_change: by --resume_override."""
    flat, differing = flags.flat(), {}
    for name in sorted(flags.on_command_line & then.keys() - {*same_run.overrides(flags)}):
        # Texts that may change mean the same in several forms, and None is what a run left open.
        kinds = (int, float) if may_change else (type(then[name]),)
        if isinstance(flat[name], kinds) and flat[name] != then[name]:
            differing[name] = then[name], flat[name]
    same_run.refuse(checkpoint, differing, may_change)


def with_mirror(flags: Flags, here: Cursor, assumed: str) -> str:
    """What was assumed, and that a run begins anew whose checkpoints may lie on a mirror."""
    words = "the whole run, as none of its checkpoints is on this machine"
    is_elsewhere = flags.checkpoint.resume and flags.save.mirror and not here.step
    return "; ".join(filter(None, [assumed, words * bool(is_elsewhere)]))


def sizes(flags: Flags) -> list[Size]:
    """The size of each dataset that the flags name."""
    if not flags.data.data_mix and flags.data.train_data_dir is None:
        return []
    datasets: list[Size] = []
    for given in checks.trained_on(flags):
        # A source of --code has to be opened. Others say their size in their manifest.
        folder = fetched.folder(given, whole=False)
        if source_of(folder) in register.SOURCES:
            opened = open_source(folder, "size", flags)
            datasets.append((len(opened.train), opened.context_length))
        else:
            datasets.append(declared_rows(folder))
    return datasets


def declared_rows(folder: Path) -> Size:
    """As a manifest of prepare_data.py says, unchecked; None without a manifest."""
    try:
        manifest = json.loads((folder / "manifest.json").read_bytes())
        numbers = manifest["splits"]["train"]["rows"], manifest["context_length"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    # Rows that aren't packed may be shorter than the context.
    are_counts = all(type(number) is int for number in numbers)
    if not manifest.get("packed") or not are_counts:
        return None
    return numbers


def context_length(flags: Flags, datasets: Sequence[Size], text_config: Any) -> tuple[int, str]:
    """(tokens of a row, "" or in words what was assumed of them)."""
    if flags.data.context_length:
        return flags.data.context_length, ""
    if contexts := [one[1] for one in datasets if one is not None]:
        return max(contexts), ""
    # Neither flags nor data say it, so it is assumed, and said so.
    most = getattr(text_config, "max_position_embeddings", None) or ROW
    if most < ROW:
        return most, f"rows of {most:,} tokens, the model's positions (--context_length)"
    return ROW, f"rows of {ROW:,} tokens, as prepare_data.py makes them (--context_length)"


def rows_read(
    own: Flags, flags: Flags, datasets: Sequence[Size], context: int, batch: int, here: Cursor
) -> tuple[Optional[int], dict[int, int]]:
    """(the last step, {tokens of a row: how many of such rows are read from `here` on}), (None, {})
    where neither flags nor datasets say how many. batch: sequences of a step."""
    steps, epochs = flags.training.max_step, flags.training.number_epochs
    mix = mixture_text.mix_of(flags.data.data_mix, flags.data.train_data_dir)
    known = [one for one in datasets if one is not None]
    # One dataset of unknown size leaves the whole unknown.
    is_known = bool(datasets) and len(known) == len(datasets)
    rows, contexts = tuple(one[0] for one in known), tuple(one[1] for one in known)
    # A length that was given is that of all rows.
    if not is_known or flags.data.context_length:
        contexts = (context,) * len(mix.stages[0].weights)
    if own.tokens is not None:
        if here.step:
            raise ValueError(
                "--tokens says how long a new run is: a resumed one takes --max_step, with "
                "--resume_override max_step."
            )
        if "max_step" in flags.on_command_line:
            raise ValueError("--tokens and --max_step are both given: each is the run's length.")
        # Of a step in the middle: each stage has a part of all steps.
        begins, tokens = [*(stage.begins for stage in mix.stages), 1], 0
        for stage, start, end in zip(mix.stages, begins, begins[1:]):
            tokens += batch * _length(stage, contexts) * (end - start)
        steps = ceil(own.tokens / tokens)
    if steps is None and (not is_known or rows[0] == ENDLESS):
        return None, {}
    # Laid out over the run by positions, as far as its datasets are known.
    stages: tuple[Stage, ...] = (mix.stages[0]._replace(begins=0),)
    if is_known and flags.data.data_mix:
        # What is read too often is refused where a run would be.
        stages, end, last = lay_out(mix, rows, batch, steps, epochs, here, shortens=True)
    elif steps is None:
        end = rows[0] * epochs
        last = last_step(here.step, here.position, end, batch)
    if steps is not None:
        end, last = here.position + (steps - here.step) * batch, steps
    read: dict[int, int] = defaultdict(int)
    for stage, after in zip(stages, [*(one.begins for one in stages[1:]), end]):
        read[_length(stage, contexts)] += max(after - max(stage.begins, here.position), 0)
    return last, dict(read)


def _length(stage: Stage, contexts: Sequence[int]) -> int:
    """Tokens of the rows that a stage reads, which all have one length."""
    return next(length for length, weight in zip(contexts, stage.weights) if weight)


def require_trainable(own: Flags, flags: Flags, steps: Optional[int], source: str) -> None:
    """Raises ValueError and Fault as train.py would for a new run, where the flags name its data
    and that is here. steps: those of --tokens. source: how sentences name the model."""
    has_data = flags.data.train_data_dir or flags.data.data_mix
    # The demo makes its data, and a resumed run is compared with its checkpoint.
    if not has_data or flags.demo or flags.checkpoint.resume:
        return
    if own.tokens is not None:
        flags = replace(flags, training=replace(flags.training, max_step=steps))
    checks.check_flags(flags)
    evaluated = map(Path, checks.evaluated_on(flags))
    # A plan needs no dataset, so one that isn't here is no mistake.
    is_here = all(source_of(Path(given)) for given in checks.trained_on(flags))
    if is_here and all(folder.is_dir() for folder in evaluated):
        batches = batch_sizes(flags, devices_of_node(flags), flags.devices.num_nodes)
        # stdout may be read as JSON, and a warning isn't part of it.
        with redirect_stdout(sys.stderr):
            data, mix = plan_data(flags, {})
            plan_schedule(flags, batches, data.sources, mix, {})
            config = loading.load_config(flags.model.model_name)
            require_rows_for(config.get_text_config(), data.opened, source)
            tokenizer = loading.tokenizer_beside(flags.model.model_name)
            tokenizer_of(data.opened, tokenizer, config, source)
