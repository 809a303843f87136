"""The dataset of `python train.py` without flags, made from the source of the Python standard library. No network is needed."""

import os
from pathlib import Path

DEMO_VOCABULARY = 8192  # as in configs/demo_llama
DEMO_EXCLUDED = "site-packages dist-packages test tests idlelib lib2to3 encodings pydoc_data __pycache__".split()


def prepare_demo(folder: Path, context_length: int) -> None:
    """Tokenize and pack the source of the Python standard library into `folder`, unless it is there already."""
    from filelock import FileLock

    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_suffix(".lock")):  # torchrun starts all ranks at once
        if folder.exists():
            return
        from fabric_llm.prepare.prepare import prepare, summary

        print(f"Preparing {folder} from the source of the Python standard library (once, about half a minute).")
        manifest = prepare(
            inputs=[os.path.dirname(os.__file__)],
            output=folder,
            train_tokenizer=DEMO_VOCABULARY,
            context_length=context_length,
            validation_fraction=0.05,
            pattern=["*.py"],
            exclude=DEMO_EXCLUDED,
        )
        print(summary(manifest), flush=True)
