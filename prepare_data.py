#!/usr/bin/env python
"""Raw text -> a packed dataset folder: `python prepare_data.py --input corpus/ --tokenizer NAME --output data/mine`."""

from __future__ import annotations

from pathlib import Path
from typing import Optional

from arguments import fail, parse_prepare
from fabric_llm.faults import BAD_INPUT


def main(argv: Optional[list[str]] = None) -> None:
    arguments = parse_prepare(argv)
    from fabric_llm.prepare import DEFAULT_PATTERNS, prepare, summary

    try:
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
    except ValueError as error:
        fail("prepare_data.py", str(error), getattr(error, "code", BAD_INPUT))
    print(summary(manifest))
    print(f"Next: python train.py --model_name NAME_OR_DIR --train_data_dir {arguments.output}", flush=True)


if __name__ == "__main__":
    main()
