"""`python -m fabric_llm.average checkpoints/RUN --last 5 --output hf/mine`: average checkpoints into a verified model.

The parts are runs, checkpoints and Hugging Face directories of one model. docs/averages.md says when an average helps.

Exit codes: 0 done, 1 the verification failed, 2 bad arguments or parts of different models, 66 a damaged checkpoint,
73 and 74 the output can't be written, 75 stopped on request, 76 NaN or infinity in a part, 77 refused for security.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Optional

from fabric_llm.base import files
from fabric_llm.base.command_line import flag, parse
from fabric_llm.base.console import plain_output
from fabric_llm.base.ending import in_one_sentence
from fabric_llm.plan.checks import exported_output
from fabric_llm.verify import average_parts

PROGRAM = "python -m fabric_llm.average"
DESCRIPTION = "Average the weights of checkpoints of one model: python -m fabric_llm.average checkpoints/RUN --last 5 --output hf/mine"


@dataclass
class AverageArguments:
    """Options"""

    parts: list[str] = flag(
        None,
        "what is averaged, also without --parts, before all flags: runs (their latest checkpoint, or --last), checkpoints, "
        "Hugging Face directories",
    )
    output: str = flag(None, "Hugging Face directory to write, such as hf/mine")
    last: Optional[int] = flag(None, "take so many of the newest checkpoints of each run (default: 1)")
    weights: str = flag(
        "equal",
        "equal, which imitates a linear decay of the learning rate over the checkpoints; inverse_sqrt, which imitates a "
        "1-sqrt decay; or a number for each part, which are made to add up to 1",
        takes="equal, inverse_sqrt or a number for each part, comma-separated, such as 0.7,0.3",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = flag(
        "auto", "dtype of the weights; auto: as trained, of parts that differ the wider one"
    )
    max_shard_size: str = flag("5GB", "largest weight file")
    evaluate: bool = flag(
        True,
        "print the validation loss of each part and of the average, on the data and as many batches as the run had",
    )
    overwrite: bool = flag(False, "replace an existing output folder")


def parse_average(argv: list[str]) -> AverageArguments:
    """The arguments in `argv`. Exits with code 2 and one sentence on anything it doesn't know."""
    first_flag = next((index for index, word in enumerate(argv) if word.startswith("-")), len(argv))
    words = [*(["--parts", *argv[:first_flag]] if first_flag else []), *argv[first_flag:]]
    return AverageArguments(**parse(PROGRAM, DESCRIPTION, [AverageArguments], words))


def main(argv: Optional[list[str]] = None) -> None:
    """Run the command."""
    with in_one_sentence(PROGRAM) as ending:
        given = parse_average(sys.argv[1:] if argv is None else argv)
        ending.left = f"nothing was written to {given.output}"
        output = Path(given.output)
        folders = average_parts.named(given.parts, given.last)
        weights = average_parts.weights_of(given.weights, folders)
        average_parts.require_apart(folders, output)
        exported_output(output, given.overwrite)
        files.writable(output)
        # These import torch, for which --help and mistakes don't wait.
        from transformers.utils.logging import disable_progress_bar

        from fabric_llm.verify import average, average_losses

        disable_progress_bar()
        parts = average.open_parts(folders)
        print(f"Averaging {len(parts)} model{'s' * (len(parts) > 1)} into {output}", flush=True)
        for folder, weight in zip(folders, weights):
            print(f"  {weight:.4f}  {folder}", flush=True)
        if len(parts) == 1:
            print("  The average of one model is that model.", flush=True)
        print(average.average(parts, weights, given.weights, output, given.dtype, given.max_shard_size), flush=True)
        ending.left = f"{output} is complete"
        better = average_losses.compare(parts, weights, output) if given.evaluate else None
        if better is not None and better.run:
            print(f"Next: python export_hf.py {better.path} --output {output} --overwrite true", flush=True)
        else:
            best = given.output if better is None else str(better.path)
            print(f"Next: AutoModelForCausalLM.from_pretrained({best!r})", flush=True)


if __name__ == "__main__":
    plain_output()
    main()
