#!/usr/bin/env python
"""Checkpoint -> a verified Hugging Face directory: `python export_hf.py checkpoints/RUN --output
hf/mine`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Optional

from fabric_llm.base import register
from fabric_llm.base.command_line import fail, parse
from fabric_llm.base.ending import in_one_sentence
from fabric_llm.base.faults import BAD_INPUT, SAVE_FAILED, one_line
from fabric_llm.base.flag import option
from fabric_llm.base.names import reach_hub
from fabric_llm.base.program import plain_output
from fabric_llm.mirror.fetch import local

PROGRAM = "export_hf.py"
ABOUT = """usage: python export_hf.py checkpoints/RUN --output FOLDER
Checkpoint -> a Hugging Face model."""


@dataclass
class ExportArguments:
    """Options"""

    # A default of None makes a flag required, unless its type takes None.
    checkpoint: str = option(None, path=True)
    """checkpoints/RUN/step-N, or checkpoints/RUN for its latest"""
    output: str = option(None, path=True, aliases="output_dir")
    """Hugging Face directory to write, such as hf/mine"""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option("auto")
    """dtype of the weights; auto: as trained"""
    ema: bool = option(False)
    """export the moving average of the weights that --ema_decay has kept, instead of the weights"""
    max_shard_size: str = option("5GB")
    """largest weight file"""
    push_to_hub: Optional[str] = option(None, aliases="hub_model_id push_to_hub_model_id")
    """upload to this repository, org/name, once it is verified"""
    private: bool = option(True, aliases="hub_private_repo")
    """make the repository private, where it is new"""
    overwrite: bool = option(False)
    """replace an existing output folder"""


def parse_export(argv: Optional[list[str]] = None) -> ExportArguments:
    """Arguments of export_hf.py. Exits with code 2 and one sentence on anything it doesn't know."""
    return ExportArguments(**parse(PROGRAM, ABOUT, [ExportArguments], argv, first="checkpoint"))


def main(argv: Optional[list[str]] = None) -> None:
    with in_one_sentence(PROGRAM) as ending:
        arguments = parse_export(argv)
        output = Path(arguments.output)
        # What is said if the command ends before the next assignment to `left`.
        ending.left = f"nothing was written to {output}"
        from fabric_llm.weights import checks

        typed, arguments.checkpoint = arguments.checkpoint, local(arguments.checkpoint)
        source = checks.check(arguments)
        # The card names an address, not the cache of this machine.
        arguments.checkpoint = typed
        # transformers must know a model class of the run's own code before it opens the checkpoint.
        register.load_of_run(source)
        # These import torch, which --help and mistakes don't wait for.
        from fabric_llm.weights import card, export

        # An export that was made before is pushed again once it is proven anew.
        is_there = output.exists() and not arguments.overwrite
        # Which weights and which folder, before minutes of silence.
        what = f"the moving average of {source}" if arguments.ema else str(source)
        where = f"{output}, which is there: comparing them" if is_there else str(output)
        print(f"Exporting {what} to {where}", flush=True)
        proof = export.export(
            source,
            output,
            dtype=arguments.dtype,
            max_shard_size=arguments.max_shard_size,
            ema=arguments.ema,
            is_there=is_there,
            describe=lambda folder, proof: card.write(folder, proof, source, arguments),
        )
        print(export.read_proof(proof))
        # The card was written for another name than the repository's.
        if is_there:
            card.rename(output, arguments.push_to_hub)
        if arguments.push_to_hub is not None:
            # The export stays whatever becomes of the upload.
            ending.left = f"{output} is complete, but it isn't pushed (repeat the command)"
            push(output, arguments)
        ending.left = f"{output} is complete"
        # As given, not as resolved: what is printed should work where the user stands.
        print(f"Next: AutoModelForCausalLM.from_pretrained({arguments.output!r})", flush=True)


def push(output: Path, arguments: ExportArguments) -> None:
    """Upload the folder, and print its address. Exits with code 2 and one sentence where that
    fails, or with 74 where the hub can't be reached."""
    import huggingface_hub  # for which --help and mistakes don't wait

    # The token is that of `hf auth login` or of the environment.
    api, name = huggingface_hub.HfApi(), arguments.push_to_hub
    try:
        # A repository that is there keeps its visibility: `private` is only for a new one.
        api.create_repo(name, private=arguments.private, exist_ok=True)
        address = api.upload_folder(
            folder_path=output, repo_id=name, commit_message="Upload by fabric_llm"
        )
    # huggingface_hub raises its own exceptions, and those of its HTTP library.
    except Exception as error:
        causes = [one_line(error), one_line(error.__cause__ or "")]
        # Its libraries often repeat the words of the system.
        why = " ".join(dict.fromkeys(filter(None, causes)))
        complete = f"{output} is complete, but pushing it failed (repeat the command)"
        answer = getattr(error, "response", None)
        # The name or the token is wrong, unless the hub is down or can't be reached.
        is_down = answer is not None and answer.status_code >= 500
        if answer is None and not reach_hub():
            is_down, why = True, f"the Hugging Face hub can't be reached from here: {why}"
        fail(PROGRAM, f"{complete}: {why}", SAVE_FAILED if is_down else BAD_INPUT)
    print(f"Pushed to {address}")


if __name__ == "__main__":
    plain_output()
    main()
