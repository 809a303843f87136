"""`python -m fabric_llm.average checkpoints/RUN --last 5 --output hf/mine`: average checkpoints
into a verified model.

The parts are runs, checkpoints and Hugging Face directories of one model. docs/averages.md says
when an average helps. `python -m fabric_llm.average BASE checkpoints/RUN --forgetting_budget
general:0.05` finds the weights of the two.

Exit codes: 0 done, 1 the verification failed, 2 bad arguments or parts of different models, 66 a
damaged checkpoint, 73 and 74 the output can't be written, 75 stopped on request, 76 NaN or infinity
in a part or only the base model is inside the budgets, 77 refused for security.
"""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Optional

from fabric_llm.base import files, register
from fabric_llm.base.command_line import parse
from fabric_llm.base.ending import in_one_sentence
from fabric_llm.base.faults import Fault
from fabric_llm.base.files import MANIFEST
from fabric_llm.base.flag import option
from fabric_llm.base.names import command, counted, no_folder
from fabric_llm.base.program import plain_output
from fabric_llm.checkpoint import keep
from fabric_llm.mirror.address import is_address
from fabric_llm.mirror.fetch import local
from fabric_llm.report.__main__ import page_module
from fabric_llm.training.forgetting import parse_budgets
from fabric_llm.weights.checks import exported_output

KNEE = "knee"
PROGRAM = "python -m fabric_llm.average"
ABOUT = (
    f"usage: {PROGRAM} checkpoints/RUN --last 5 --output FOLDER\nAverage the weights of "
    "checkpoints of one model."
)


@dataclass
class AverageArguments:
    """Options"""

    # May be given without its flag, before all others.
    parts: list[str] = option(
        None,
        (
            "runs (their latest checkpoint, or --last), checkpoints, Hugging Face directories and "
            "what the hub's cache has"
        ),
        path=True,
    )
    output: Optional[str] = option(
        None,
        "Hugging Face directory to write (default: hf/NAME-average, of the last part)",
        path=True,
        aliases="output_dir",
    )
    last: Optional[int] = option(
        None, "average the N newest checkpoints of each run (default: 1)", above=0
    )
    weights: str = option(
        "equal",
        "equal, which imitates a linear decay of the learning rate, a number for each part, made "
        "to add up to 1, or knee, of a "
        "base model and a run: where it has learned much and forgotten little",
        takes="equal, knee or a number for each part, comma-separated, such as 0.7,0.3",
    )
    forgetting_budget: Optional[str] = option(
        None,
        "of a base model and a run, the weights that learned most while the losses of validation "
        "sets rise by no more than these nats above the base model's",
        takes="name:nats, comma-separated, such as general:0.05,copy:0.2",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto", "auto: the widest of the parts"
    )
    max_shard_size: str = option("5GB", "largest weight file")
    evaluate: bool = option(
        True, "print the validation loss of each part and of the average, as the run was evaluated"
    )
    overwrite: bool = option(False, "replace an existing output folder")


def named(given: Sequence[str], last: Optional[int]) -> list[Path]:
    """The directories that are averaged, in the order given, and those of a run by step. Raises
    ValueError."""
    folders = []
    for name in given:
        path = Path(name)
        # Only the cache: the hub isn't asked for a model that nobody has downloaded.
        if not path.is_dir():
            from huggingface_hub import try_to_load_from_cache

            with suppress(ValueError):  # what can't be a name on the hub
                cached = try_to_load_from_cache(name, "config.json")
                path = Path(cached).parent if isinstance(cached, str) else path
        if not path.is_dir():
            instead = " Nor is it in the hub's cache."
            raise ValueError(no_folder("checkpoint, run or model", path, instead))
        # A checkpoint or a model is a part by itself, and a run stands for its newest checkpoints.
        if (path / MANIFEST).is_file() or (path / "config.json").is_file():
            folders.append(path)
            continue
        there = files.checkpoints(path)
        if not there:
            raise ValueError(
                f"{name!r} is neither a checkpoint nor a run with one, nor a model with a "
                f"config.json.{keep.runs_in(path)}"
            )
        # Fewer than were asked for would pass for an average of all of them.
        if last is not None and last > len(there):
            raise ValueError(f"--last {last}: {name!r} has {counted(len(there), 'checkpoint')}.")
        folders += there[-(last or 1) :]
    return folders


def weights_of(given: str, count: int) -> list[float]:
    """The weight of each of `count` parts, which add up to 1, for what --weights says. Raises
    ValueError."""
    numbers = [1.0] * count
    try:
        if given != "equal":
            numbers = [float(word) for word in given.split(",")]
    except ValueError:
        raise ValueError(
            f"--weights takes equal or a number for each part, such as 0.7,0.3, not {given!r}."
        ) from None
    if len(numbers) != count:
        raise ValueError(f"--weights {given}: {len(numbers)} numbers for {count} parts.")
    total = math.fsum(numbers)
    # NaN fails these comparisons as well.
    if not all(number >= 0 for number in numbers) or not 0 < total < math.inf:
        raise ValueError(f"--weights {given}: weights are 0 or more, finite, and not all 0.")
    # Shares of 1, so that the average of equal models is that model.
    return [number / total for number in numbers]


def require_line(given: AverageArguments, count: int) -> None:
    """Raises ValueError unless evaluations of points between two of `count` parts can find the
    weights."""
    # The sentences name the flag that was given.
    asked = "--weights knee" if given.forgetting_budget is None else "--forgetting_budget"
    if given.forgetting_budget is not None and given.weights != "equal":
        raise ValueError(
            "--forgetting_budget and --weights are both given: a budget finds the weights itself."
        )
    if count != 2:
        raise ValueError(
            f"{asked} takes two parts, a base model and a run that began with it, not {count}."
        )
    if not given.evaluate:
        raise ValueError(
            f"{asked} finds the weights by evaluations, which --evaluate false turns off."
        )


def main(argv: Optional[list[str]] = None) -> None:
    """Run the command. Raises SystemExit where it fails."""
    with in_one_sentence(PROGRAM) as ending:
        given = AverageArguments(**parse(PROGRAM, ABOUT, [AverageArguments], argv, first="parts"))
        if (given.last or 1) > 1 and (there := [part for part in given.parts if is_address(part)]):
            raise ValueError(
                f"--last {given.last} takes runs on a disk: name the checkpoints at an address "
                f"one by one, such as {there[0]}/step-00001000."
            )
        folders = named([local(part) for part in given.parts], given.last)
        # No weights yet where evaluations are to find them, below.
        budgets, weights, more = parse_budgets(given.forgetting_budget), [], {}
        # What an evaluation of points needs is checked before torch is imported.
        if budgets or given.weights == KNEE:
            require_line(given, len(folders))
        else:
            weights = weights_of(given.weights, len(folders))
        # The name of the last part: hf/step-00001000-average of a checkpoint.
        output = Path(given.output or f"hf/{Path(given.parts[-1]).resolve().name}-average")
        ending.left = f"nothing was written to {output}"
        # --overwrite would remove a part once it was read.
        if output.resolve() in [folder.resolve() for folder in folders]:
            raise ValueError(f"--output {str(output)!r} is one of the parts; take another.")
        # A place that can't be written to is told before any weight is read.
        exported_output(output, given.overwrite)
        # transformers must know a model class of a run's own code before it opens the parts. They
        # are of one model, so one code is enough: that of older parts may have changed since.
        for folder in reversed(folders):
            register.load_of_run(folder)
            if register.LOADED:
                break
        # These import torch, for which --help and mistakes don't wait.
        from fabric_llm.weights import average, card, line

        parts = average.open_parts(folders)
        # The parts are verified by now: searching the line reads them many times.
        if not weights:
            weights, more = line.choose(parts, budgets, given.dtype)
        print(f"Averaging {counted(len(parts), 'model')} into {output}", flush=True)
        if len(parts) == 1:
            print("It stays as it is: --last N averages the newest N checkpoints of a run.")
        for folder, weight in zip(folders, weights):
            print(f"  {weight:.4f}  {folder}", flush=True)
        # What average.json says of where the weights come from.
        how = {"weights": given.forgetting_budget or given.weights, **more}
        # Stays None where the average is the best of the models, or nothing was compared.
        better = None
        size = given.max_shard_size
        verified = average.average(parts, weights, how, output, given.dtype, size)
        print(verified, flush=True)
        ending.left = f"{output} is complete"
        # The search has evaluated the points of the line, the chosen one among them.
        if more:
            try:
                # The picture of the line stands beside the note that it is drawn from.
                page_module("fabric_llm.report.line").write(output / average.NOTE)
            # The average is complete without the picture, which needs a package of its own.
            except Fault as fault:
                print(f"Not drawn: {fault}", flush=True)
        elif given.evaluate:
            # Only a warning: which of the models is used is the user's choice.
            better = average.compare(parts, output)
        # Last, since the card holds the losses that `compare` has put into average.json.
        card.write_of_average(output, verified)
        # Whoever copies the last line should get the better model.
        best = output if better is None else better.path
        following = f"AutoModelForCausalLM.from_pretrained({str(best)!r})"
        # A checkpoint may be sharded, and is loaded once it is exported.
        if better is not None and better.progress is not None:
            following = command("python", "export_hf.py", better.path, output="hf/NAME")
        print(f"Next: {following}", flush=True)


if __name__ == "__main__":
    plain_output()
    main()
