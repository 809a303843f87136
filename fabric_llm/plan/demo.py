"""The dataset of `python train.py` without flags, made from the source of the Python standard
library by prepare_data.py."""

import os
import subprocess
import sys
from pathlib import Path

from fabric_llm.base.faults import UNEXPECTED, Fault

SCRIPT = Path(__file__).parents[2] / "prepare_data.py"
VOCABULARY = 8192  # as in configs/demo_llama
EXCLUDED = "*-packages test tests idlelib lib2to3 encodings pydoc_data __pycache__"


def prepare_demo(folder: Path, context_length: int) -> None:
    """Prepare the dataset in `folder`, unless it is there. No network is needed. Raises Fault as
    prepare_data.py ends."""
    # Imported here, since only the demo needs it.
    from filelock import FileLock

    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = folder.with_name(f".{folder.name}.lock")
    with FileLock(lock):  # torchrun starts all ranks at once
        if folder.exists():
            return
        print(
            f"Preparing {folder} from the source of the Python standard library (once, about "
            "a minute).",
            flush=True,
        )
        # The standard library is text that every machine with Python has, without a download.
        words = ["--input", os.path.dirname(os.__file__), "--output", str(folder)]
        words += (
            f"--pattern *.py --exclude {EXCLUDED} --train_tokenizer {VOCABULARY} "
            f"--context_length {context_length} --validation_fraction 0.05"
        ).split()
        done = subprocess.run(
            [sys.executable, str(SCRIPT), *words], stdout=subprocess.PIPE, text=True
        )
        if done.returncode:
            # A negative code is a signal, which no exit code of docs/faults.md stands for.
            code = done.returncode if done.returncode > 0 else UNEXPECTED
            raise Fault("the demo's dataset can't be prepared, see above.", code)
        # Without its advice on what to do next: the run does it now.
        print(done.stdout.partition("\nNext:")[0], flush=True)
