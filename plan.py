#!/usr/bin/env python
"""Will it fit, how long, how much: `python plan.py FLAGS OF train.py`. Needs no GPU, no weights and
no dataset."""

import json
import sys
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Optional

from arguments import PlanArguments
from fabric_llm.base import files, names
from fabric_llm.base.ending import in_one_sentence
from fabric_llm.base.faults import Fault
from fabric_llm.base.plain_yaml import read_yaml
from fabric_llm.base.program import plain_output, without_collection
from fabric_llm.report.__main__ import page_module
from plan_arguments import parse_plan

# Flags that train.py doesn't have.
OWN = [field.name for field in fields(PlanArguments)]
MANY_DEVICES = 1024  # half a minute


def main(argv: Optional[list[str]] = None) -> int:
    """Print the plan and return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    with in_one_sentence("plan.py"):
        own, flags = parse_plan(words)
        # After the flags are parsed, so that --help and mistakes don't wait for torch.
        with without_collection():
            from fabric_llm.forecast import changes, sweep  # import torch
            from fabric_llm.forecast.reads import require_trainable

        # As it was given: sentences and the last line name the model, not the folder of its sizes.
        name = flags.model.model_name
        # The sizes of a preset's model lie in this repository, so no network is needed.
        if (sizes := sizes_of_preset(words)) is not None:
            flags = changes.changed(flags, {"model_name": str(sizes)})
        plan = None
        if own.html is not None:
            # Refused before the prediction, which takes seconds.
            files.require_name(Path(own.html), "--html")
            page = page_module("fabric_llm.forecast.page")
            if own.json or own.sweep is not None:
                raise Fault("--html draws one plan, and takes no --json or --sweep.")
            # With a dataset, the page draws the steps of the run that train.py would make.
            if (plan := page.plan_of(own, flags)) is not None:
                flags = changes.changed(flags, given_by_data(plan))
        # A table of many plans takes the place of a single one.
        if own.sweep is not None:
            rows = sweep.sweep(own, flags)
            show_sweep(own, rows, sweep.hidden(rows), sweep.assumptions(own, rows))
            return 0
        # What the flags alone give; --auto may replace it.
        prediction = predicted(own, flags)
        require_trainable(own, flags, prediction.steps, name)
        chosen: list[str] = []
        if own.auto and (found := changes.fastest(own, flags, progress)) is not None:
            change, prediction = found
            flags, chosen = changes.changed(flags, change), changes.words_of(change)
        # Each change is added to those before it.
        tried = []
        if prediction.verdict != "fits":
            tried = changes.until_it_fits(own, flags, prediction)
        if own.json:
            document = numbers(prediction)
            if chosen:
                document["chosen"] = " ".join(chosen)
            document["changes"] = [
                {"change": " ".join(words), **numbers(one)} for words, one in tried
            ]
            print(json.dumps(document, indent=2))
            return 0
        show(prediction, own)
        if own.html is not None:
            page.write(Path(own.html), flags, plan, prediction)
        if own.auto and not chosen:
            print("\n--auto: nothing takes less than 80 % of the device.")
        show_changes(tried, prediction.unit)
        # The command at the end has all the changes, so that it can be copied.
        words += chosen
        for change_words, prediction in tried:
            words += change_words
        if prediction.left == 0:
            print(
                f"\nThe run is finished, at step {prediction.done:,}: to train it further, give "
                "--resume_override max_step with a larger --max_step."
            )
        # No command is printed, since it would run out of memory.
        elif prediction.fits:
            print("", *following(own, words, flags, name, prediction), sep="\n")
        else:
            print(
                "\nIt doesn't fit with any of them: take a smaller model or --context_length, or "
                "more nodes."
            )
    return 0


def given_by_data(plan: Any) -> dict[str, int]:
    """The flags that follow from the dataset of a Plan: its steps, and the length of its rows."""
    now = {"max_step": plan.schedule.max_step}
    # Rows of several lengths are refused beside a length of all.
    if len(plan.data.contexts) == 1:
        [now["context_length"]] = plan.data.contexts
    return now


def predicted(own: PlanArguments, flags: Any) -> Any:
    """What the flags alone give, after a line about what takes minutes to compute."""
    from fabric_llm.forecast import changes
    from fabric_llm.forecast.accelerators import devices_of_node

    world = devices_of_node(flags) * flags.devices.num_nodes
    if world > MANY_DEVICES:
        # stdout may be read as JSON.
        print(
            f"A step on {world:,} devices takes minutes to trace; --sweep devices=8..{world}, "
            "without --num_nodes, computes it from one on fewer.",
            file=sys.stderr,
            flush=True,
        )
    return changes.predict(own, flags)


def sizes_of_preset(words: list[str]) -> Optional[Path]:
    """The folder in configs/models with the config.json of a preset that is given alone; else
    None."""
    given = names.by_flag(words)
    if "config" not in given or "model_name" in given:
        return None
    # configs/qwen3_8b.yaml and configs/qwen3_8b-many_languages.yaml have the sizes of their model
    # in configs/models/qwen3-8b.
    preset = Path(names.at_home(given["config"][-1]))
    model = preset.stem.partition("-")[0]
    folder = preset.parent / "models" / model.replace("_", "-")
    return folder if (folder / "config.json").is_file() else None


def progress(change: dict[str, Any], prediction: Any) -> None:
    """Print what --auto has tried."""
    # On stderr, since stdout may be read as JSON.
    named = ", ".join(f"{name} {value}" for name, value in change.items())
    print(
        f"{named}: {100 * prediction.used:.0f} %, {prediction.seconds.step:.3g} s a step",
        file=sys.stderr,
        flush=True,
    )


def numbers(prediction: Any) -> dict[str, Any]:
    """What --json prints of a prediction."""
    # Properties aren't fields, so asdict() leaves them out.
    document = {
        **asdict(prediction),
        "used": prediction.used,
        "fits": prediction.fits,
    }
    document["memory"]["peak"] = prediction.memory.peak
    document["seconds"]["step"] = prediction.seconds.step
    return document


def show(prediction: Any, own: PlanArguments) -> None:
    """Print a prediction."""
    memory, (unit, size) = prediction.memory, prediction.unit
    print(f"{prediction.model}, {prediction.parameters / 1e6:,.1f} M parameters; {prediction.on}\n")
    counted = ""
    if prediction.seconds.is_host:
        counted = " (of tensors; the steps of a run on CPUs show that of its whole process)"
    print(f"Memory of a device at its peak, {unit}{counted}")

    def row(name: str, held: float, more: str = "") -> None:
        print(f"  {name:<51}{held / size:10,.2f}{more}")

    # Parts below a thousandth of the peak would only make the table longer.
    large = {name: part for name, part in memory.parts.items() if part >= memory.peak / 1000}
    large["the rest"] = memory.peak - sum(large.values())
    for name, part in large.items():
        row(name, part)
    row(f"peak, in {memory.moment}", memory.peak)
    # None where it isn't known what a device holds.
    if prediction.device_bytes:
        used = f"   {100 * prediction.used:.0f} %"
        row(f"of the device: {prediction.verdict}", prediction.device_bytes, used)
    print(f"\nMemory of a node's host, {unit}")
    for name, part in prediction.host_bytes.items():
        row(name, part)
    disk, kept = prediction.checkpoint_bytes / size, prediction.kept_checkpoints
    # How many of them is unknown for a run of unknown length that keeps all.
    held = "all kept" if kept is None else f"at most {kept} kept: {disk * kept:,.1f} {unit}"
    print(f"\nDisk: {disk:,.2f} {unit} a checkpoint, {held}")
    # The speed is the least certain number, so its source is told.
    seconds, source = prediction.seconds, "assumed, see --mfu and --like"
    if seconds.is_host:
        source = "a guess, for idle cores of this machine: --like RUN knows better"
    if own.like is not None:
        source = f"as {own.like} since its last start"
    elif own.mfu:
        source = "given"
    work = f"steps of {prediction.up_to}{prediction.tokens_a_step:,} tokens"
    if prediction.steps is not None:
        left = f"{prediction.left:,}"
        if prediction.done:
            left += f" of {prediction.steps:,}"
        work = f"{left} {work}, {prediction.tokens:,} tokens"
    print(f"Work: {work}; {prediction.flops_a_step:.3g} operations a step")
    if prediction.assumed:
        print(f"      assumed: {prediction.assumed}")
    print(
        f"Time: {prediction.up_to}{seconds.step:,.3g} s a step, at "
        f"{100 * prediction.mfu:.0f} % of the peak ({source})"
    )
    if prediction.link_bytes or prediction.network_bytes:
        hidden = "not hidden"
        if seconds.hidden and seconds.messages <= seconds.busy:
            hidden = "hidden behind it"
        print(
            f"      computing {seconds.compute:.3g} s, messages {seconds.messages:.3g} s, "
            f"{hidden}: {prediction.link_bytes / 1e9:,.1f} GB a device, "
            f"{prediction.network_bytes / 1e9:,.1f} GB a node over the network"
        )
    # A step of small operations waits for the host, not for the device. A CPU is both.
    if seconds.launch > (0 if seconds.is_host else seconds.compute):
        why = f"longer than it computes ({seconds.compute:.3g} s)"
        if seconds.is_host:
            why = f"and then computing {seconds.compute:.3g} s"
        print(f"      telling the device what to do {seconds.launch:.3g} s, {why}")
    if seconds.exchange:
        print(
            f"      exchanging heads among ranks that share rows {seconds.exchange:.3g} s, not "
            "hidden"
        )
    rate = prediction.tokens_a_step / seconds.step
    money = "" if prediction.price is None else f"; {prediction.price:,.2f} for them"
    print(f"      {rate:,.0f} tokens/s, {lasting(prediction.hours)}{money}")


def lasting(hours: Optional[float]) -> str:
    if hours is None:
        return "for --tokens or --max_step steps"
    if hours >= 1:
        return f"{hours:,.2f} hours"
    return f"{60 * hours:,.1f} minutes" if 60 * hours >= 1 else f"{3600 * hours:.2g} seconds"


def show_sweep(own: Any, rows: list[Any], hidden: dict[str, str], assumed: list[str]) -> None:
    """Print plans on more and more devices."""
    if own.json:
        # A prediction can't be written as JSON, so its numbers take its place.
        documents = [{**row._asdict(), "prediction": numbers(row.prediction)} for row in rows]
        print(json.dumps({"rows": documents, "hidden": hidden, "assumptions": assumed}, indent=2))
        return
    unit = rows[0].prediction.unit
    lines = [[*rows[0].cells(unit)], *([*row.cells(unit).values()] for row in rows)]
    # Each column is as wide as its longest cell.
    widths = [max(map(len, column)) for column in zip(*lines)]
    for line in lines:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths)))
    print("", *(f"{how}: {words}" for how, words in hidden.items()), sep="\n")
    print("\nAssumed", *assumed, sep="\n  ")


def show_changes(tried: list[tuple[list[str], Any]], unit: tuple[str, int]) -> None:
    """Print what to change, where it doesn't fit. unit: that of the plan above."""
    if not tried:
        return
    until = "; none takes less than 80 % of the device"
    if tried[-1][1].verdict == "fits":
        until = ", until it takes less than 80 % of the device"
    print(f"\nWhat to change, the cheapest first, one after the other{until}:")
    for change, one in tried:
        print(
            f"  {' '.join(change):<90}{one.memory.peak / unit[1]:8.2f} {unit[0]}  "
            f"{100 * one.used:3.0f} %  {one.seconds.step:8.3g} s a step"
        )


def following(
    own: PlanArguments, words: list[str], flags: Any, name: str, prediction: Any
) -> list[str]:
    """What to do next: train.py with these flags, below warnings of what that would train. name: of
    the model."""
    from fabric_llm.mirror.address import is_address
    from fabric_llm.model.loading import has_weights
    from fabric_llm.plan.checks import trained_on
    from fabric_llm.plan.warnings import beyond_positions, long_warmup, without_weights

    # Each flag as it was given last.
    given, left = names.by_flag(words), [*OWN]
    warnings, training = [*long_warmup(flags.training, prediction.steps)], flags.training
    if flags.model.rope is None:
        warnings += beyond_positions(prediction.row_tokens, prediction.positions)
    # A preset is planned without its data. What was typed may be mistyped.
    if flags.on_command_line & {"train_data_dir", "data_mix", "replay"}:
        absent = [Path(one) for one in trained_on(flags) if not is_address(one)]
        absent = [path for path in absent if not path.exists()]
        warnings += [f"{names.no_folder('dataset', path)} It isn't counted." for path in absent]
    if own.tokens is not None:  # train.py takes steps
        given["max_step"] = [str(prediction.steps)]
        if training.max_step is not None:
            warnings.append(f"--tokens counts, not the max_step {training.max_step} of a file.")
    # The folder has the sizes of a model that the preset names.
    if "config" in given and "model_name" in given and not has_weights(name):
        of_preset = read_yaml(Path(names.at_home(given["config"][-1]))).get("model_name")
        if of_preset is not None:
            name = of_preset
            left.append("model_name")
    # The demo's model has none on purpose, and a run that exists has its own.
    if not flags.demo and not flags.checkpoint.resume and not has_weights(name):
        warnings.append(without_weights(name))
    # A resumed run has its data from its arguments.yaml, unless --model_name is given.
    if not flags.data.train_data_dir and not flags.data.data_mix:
        given["train_data_dir"] = ["data/NAME"]
    for flag in left:
        given.pop(flag, None)
    start, where, devices = ["python"], "", flags.devices
    if devices.num_nodes > 1:
        start, where = ["torchrun", "--nnodes", str(devices.num_nodes)], ", on each machine"
        start += ["--nproc_per_node", str(devices.devices), "--rdzv_backend", "c10d"]
        start += ["--rdzv_endpoint", "HOST:29400"]
    command = names.command(*start, "train.py", **given)
    return [*(f"Warning: {one}" for one in warnings), f"Next{where}: {command}"]


if __name__ == "__main__":
    plain_output()
    sys.exit(main())
