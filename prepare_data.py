#!/usr/bin/env python
"""Raw text -> a packed dataset folder: `python prepare_data.py --input corpus/ --tokenizer NAME
--output data/mine`."""

from pathlib import Path
from typing import Optional

from fabric_llm.base.ending import in_one_sentence
from fabric_llm.base.names import command
from fabric_llm.base.program import plain_output


def main(argv: Optional[list[str]] = None) -> None:
    with in_one_sentence("prepare_data.py") as ending:
        # Imported one after the other, so that --help and a mistake don't wait for torch.
        from prepare_arguments import parse_prepare

        arguments = parse_prepare(argv)
        from fabric_llm.prepare import checks

        ending.left = f"nothing was written to {arguments.output}"
        input_files = checks.check(arguments)
        # Tasks are made in one go, without a work folder.
        if arguments.tasks is not None:
            from fabric_llm.prepare.tasks import prepare_tasks

            made = prepare_tasks(arguments)
            following = command("python", "train.py", "...", eval_data=f"tasks={arguments.output}")
            print(f"{made}\nNext: {following}", flush=True)
            return
        from fabric_llm.base import work_folder
        from fabric_llm.prepare import prepare
        from fabric_llm.prepare.inputs import place_of
        from fabric_llm.prepare.summary import summary

        try:
            manifest = prepare.prepare(arguments, input_files)
        except BaseException:
            # Only complete pieces are taken up by the next start.
            if prepare.has_work(work_folder.beside(place_of(arguments.output))):
                ending.left += "; the same command goes on from there"
            raise
        print(summary(manifest), flush=True)
        # Whatever comes from here on, such as a closed pipe, must not read as a failure.
        ending.left = f"{arguments.output} is complete"
        # A tokenizer mostly comes with its model.
        model = arguments.tokenizer
        if model is None or Path(model).exists() and not (Path(model) / "config.json").is_file():
            model = "NAME_OR_DIR"
        following = command("python", "train.py", model_name=model, train_data_dir=arguments.output)
        print(f"Next: {following}", flush=True)
        if arguments.train_tokenizer is not None:
            # Below "Next:", since the demo, which has a model, shows nothing from there on.
            print(
                "NAME_OR_DIR may be a folder with a config.json, such as configs/demo_llama, whose "
                f"vocab_size is at least {manifest['vocab_size']}: a model with random weights."
            )


if __name__ == "__main__":
    plain_output()
    main()
