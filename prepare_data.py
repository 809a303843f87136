#!/usr/bin/env python
"""Raw text -> a packed dataset folder: `python prepare_data.py --input corpus/ --tokenizer NAME --output data/mine`."""

from __future__ import annotations

from pathlib import Path
from typing import Optional

from fabric_llm.base.ending import in_one_sentence


def main(argv: Optional[list[str]] = None) -> None:
    with in_one_sentence("prepare_data.py") as ending:
        from arguments import parse_prepare

        arguments = parse_prepare(argv)
        from fabric_llm.run import mistakes

        ending.left = f"nothing was written to {arguments.output}"
        mistakes.in_preparation(arguments)
        from fabric_llm.data.inputs import DEFAULT_PATTERNS
        from fabric_llm.data.prepare import prepare, summary

        manifest = prepare(
            inputs=arguments.input,
            output=Path(arguments.output),
            tokenizer=arguments.tokenizer,
            train_tokenizer=arguments.train_tokenizer,
            context_length=arguments.context_length,
            validation_fraction=arguments.validation_fraction,
            text_field=arguments.text_field,
            pattern=arguments.pattern or DEFAULT_PATTERNS,
            exclude=arguments.exclude or [],
            seed=arguments.seed,
            overwrite=arguments.overwrite,
        )
        ending.left = f"{arguments.output} is complete"
        print(summary(manifest))
        print(f"Next: python train.py --model_name NAME_OR_DIR --train_data_dir {arguments.output}", flush=True)


if __name__ == "__main__":
    main()
