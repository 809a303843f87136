#!/usr/bin/env python
"""Checkpoint -> a verified Hugging Face directory: `python export_hf.py checkpoints/RUN --output hf/mine`."""

from __future__ import annotations

from pathlib import Path
from typing import Optional

from arguments import fail, parse_export
from fabric_llm.faults import BAD_INPUT

VERIFICATION_FAILED = 1  # exit code


def main(argv: Optional[list[str]] = None) -> None:
    arguments = parse_export(argv)
    from huggingface_hub.utils import validate_repo_id

    from fabric_llm.export import VerificationError, export, find, push, read_proof

    try:
        if arguments.push_to_hub is not None:
            validate_repo_id(arguments.push_to_hub)
        source = find(arguments.checkpoint)
        print(f"Exporting {source} to {arguments.output}", flush=True)
        proof = export(
            source,
            Path(arguments.output),
            dtype=arguments.dtype,
            max_shard_size=arguments.max_shard_size,
            overwrite=arguments.overwrite,
        )
    except ValueError as error:
        fail("export_hf.py", str(error), getattr(error, "code", BAD_INPUT))
    except OSError as error:
        fail("export_hf.py", f"{arguments.output!r} can't be written: {error}.")
    except VerificationError as error:
        fail("export_hf.py", f"not exported, verification failed: {error}", VERIFICATION_FAILED)
    print(read_proof(proof))
    if arguments.push_to_hub is not None:
        try:
            address = push(Path(arguments.output), arguments.push_to_hub, arguments.private)
        except Exception as error:  # huggingface_hub's own and those of its HTTP library, which changes with versions
            sentence = " ".join(str(error).split())
            fail(
                "export_hf.py",
                f"{arguments.output} is complete, but pushing it failed (repeat with --overwrite true): {sentence}",
            )
        print(f"Pushed to {address}")
    print(f"Next: AutoModelForCausalLM.from_pretrained({arguments.output!r})", flush=True)


if __name__ == "__main__":
    main()
