#!/usr/bin/env python
"""Checkpoint -> a verified Hugging Face directory: `python export_hf.py checkpoints/RUN --output hf/mine`."""

from __future__ import annotations

from pathlib import Path
from typing import Optional

from fabric_llm.base.console import plain_output
from fabric_llm.base.ending import in_one_sentence

VERIFICATION_FAILED = 1  # exit code


def main(argv: Optional[list[str]] = None) -> None:
    with in_one_sentence("export_hf.py") as ending:
        from arguments import parse_export
        from fabric_llm.base.command_line import fail

        arguments = parse_export(argv)
        from fabric_llm.plan import checks

        ending.left = f"nothing was written to {arguments.output}"
        checks.check_export(arguments)
        from fabric_llm.checkpoint.keep import checkpoint_at as find
        from fabric_llm.verify.export import VerificationError, export, push, read_proof

        source = find(arguments.checkpoint)
        what = f"the moving average of {source}" if arguments.ema else source
        print(f"Exporting {what} to {arguments.output}", flush=True)
        try:
            proof = export(
                source,
                Path(arguments.output),
                dtype=arguments.dtype,
                max_shard_size=arguments.max_shard_size,
                overwrite=arguments.overwrite,
                ema=arguments.ema,
            )
        except VerificationError as error:
            fail("export_hf.py", f"not exported, verification failed: {error}", VERIFICATION_FAILED)
        print(read_proof(proof))
        if arguments.push_to_hub is not None:
            ending.left = f"{arguments.output} is complete, but it isn't pushed (repeat with --overwrite true)"
            try:
                address = push(Path(arguments.output), arguments.push_to_hub, arguments.private)
            except Exception as error:  # huggingface_hub raises its own, and those of its HTTP library
                said = " ".join(str(error).split())
                complete = f"{arguments.output} is complete, but pushing it failed (repeat with --overwrite true)"
                fail("export_hf.py", f"{complete}: {said}")
            print(f"Pushed to {address}")
        ending.left = f"{arguments.output} is complete"
        print(f"Next: AutoModelForCausalLM.from_pretrained({arguments.output!r})", flush=True)


if __name__ == "__main__":
    plain_output()
    main()
