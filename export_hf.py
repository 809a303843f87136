#!/usr/bin/env python
"""Checkpoint -> a verified Hugging Face directory: `python export_hf.py checkpoints/RUN --output
hf/mine`."""

from pathlib import Path
from typing import Optional

from fabric_llm.base.command_line import fail
from fabric_llm.base.ending import in_one_sentence
from fabric_llm.base.faults import one_line
from fabric_llm.base.program import plain_output
from fabric_llm.checkpoint.keep import checkpoint_at
from fabric_llm.weights import checks


def main(argv: Optional[list[str]] = None) -> None:
    with in_one_sentence("export_hf.py") as ending:
        from arguments import parse_export

        arguments = parse_export(argv)
        output = Path(arguments.output)
        ending.left = f"nothing was written to {output}"
        checks.check(arguments)
        # imports torch, which --help and mistakes don't wait for
        from fabric_llm.weights import (
            card,
            export,
        )

        source, is_there = (
            checkpoint_at(arguments.checkpoint),
            output.exists() and not arguments.overwrite,
        )
        compared = ", which is there: comparing them" * is_there
        print(
            f"Exporting {'the moving average of ' * arguments.ema}{source} to {output}{compared}",
            flush=True,
        )
        how = {name: getattr(arguments, name) for name in ("dtype", "max_shard_size", "ema")}
        how["describe"] = lambda folder, proof: card.write(folder, proof, source, arguments)
        proof = export.export(source, output, **how, is_there=is_there)
        print(export.read_proof(proof))
        if is_there:
            card.rename(output, arguments.push_to_hub)
        if arguments.push_to_hub is not None:
            ending.left = f"{output} is complete, but it isn't pushed (repeat the command)"
            try:
                address = export.push(output, arguments.push_to_hub, arguments.private)
            except (
                Exception
            ) as error:  # huggingface_hub raises its own, and those of its HTTP library
                complete = f"{output} is complete, but pushing it failed (repeat the command)"
                fail(
                    "export_hf.py",
                    f"{complete}: {one_line(error)} {one_line(error.__cause__ or '')}".rstrip(),
                )
            print(f"Pushed to {address}")
        ending.left = f"{output} is complete"
        print(f"Next: AutoModelForCausalLM.from_pretrained({arguments.output!r})", flush=True)


if __name__ == "__main__":
    plain_output()
    main()
