"""At real size, half a GiB of float32 weights, each command holds what the design says it needs,
and little more.

Measured is anonymous memory, summed over the processes of a command: what a file backs, as
safetensors are mapped, isn't counted. A command that passes its bound is killed at once. Rows go on
from each other's runs: one that is asked for runs those it needs.
"""

import os
import shlex
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from benchmarks import memory

pytestmark = pytest.mark.size
ROOT = Path(__file__).parent.parent
GIB = 2**30
SIZES = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 5}
SIZES |= {"num_attention_heads": 16, "vocab_size": 32768, "max_position_embeddings": 64}
MODEL = LlamaConfig(**SIZES, tie_word_embeddings=False, bos_token_id=0, eos_token_id=0)
W = 4 * 131_345_408  # bytes of its weights
E = 4 * 32768 * 1024 / W  # the embeddings, its largest tensor, as a part of them
U = 2 * E  # the outermost unit, embeddings and head, which FSDP gathers as one
# Of one process: weights, gradients, two moments, and a second micro-batch's gradient before it is
# added.
STEP = 4 + E
# Of each process, on top of what the table says: one tensor in another form, activations, smaller
# things.
SLACK = E * W
TRAIN = (
    "train.py --model_name model --train_data_dir data --output_dir runs --precision 32-true "
    "--global_batch_size 2 --eval_iters 2 --eval_batch_size 1 --eval_step_interval 1"
)
RESUME = "--resume true --resume_override max_step"
ONE = "start_evaluate_sample_and_save_in_background_on_one"  # rows that others need
TWO = "start_and_save_shards_in_background_with_fsdp2"
RESUMED = "resume_from_shards_and_save_full_with_fsdp"


class Row(NamedTuple):
    """A command, and what it holds besides what its processes import: multiples of the weights, in
    all processes together."""

    command: str
    processes: int
    holds: float  # W
    needs: tuple[str, ...] = ()  # rows that come before it
    code: int = 0


ROWS = {
    ONE: Row(
        f"{TRAIN} --run_name one --max_step 2 --save_step_interval 1 --async_save true "
        "--sample_prompts prompts.txt --sample_tokens 2",
        *(1, STEP + 3),  # and copies of all but the gradients
    ),
    TWO: Row(
        f"{TRAIN} --devices 2 --strategy fsdp2 --run_name two --max_step 2 --save_step_interval 1 "
        "--async_save true --state_dict_type sharded",
        # Each rank gathers the outermost unit: weights, gradient, one of them on its way.
        *(2, 4 + 3 + 2 * 3 * U),
    ),
    RESUMED: Row(
        f"{TRAIN} --devices 2 --strategy fsdp --run_name two --max_step 3 {RESUME}",
        # FSDP1 loads moments in three forms (those that are there, as read, flat), and the
        # outermost unit's whole on each rank.
        *(2, 1 + 3 * 2 + 2 * U, (TWO,)),
    ),
    "resume_from_one_on_two_with_ddp": Row(
        f"{TRAIN} --devices 2 --strategy ddp --run_name one --max_step 3 {RESUME}",
        # DDP's gradients are in buckets; beside them each rank makes those of embeddings and head
        # before they get there. In the save both write their parts at once, and safetensors.save
        # makes two copies of a file, of which four hold the moments.
        *(2, 2 * (4 + max(2 * E, 2 * 2 / 4)), (ONE,)),
    ),
    "resume_from_two_on_one": Row(
        f"{TRAIN} --run_name two --max_step 4 {RESUME}", 1, STEP, (RESUMED,)
    ),
    "rewind_twice": Row(
        f"{TRAIN} --run_name rewinds --max_step 6 --save_step_interval 1 --keep_last 1 --lr 0.3 "
        "--spike_threshold 1 --spike_window 2 --spike_action rewind --max_skipped_steps 2",
        *(1, STEP, (), 76),
    ),
    # Of files, from files: nothing is held.
    "export_full": Row("export_hf.py runs/one --output hf/one", 1, 0, (ONE,)),
    # a unit, put together
    "export_shards": Row("export_hf.py runs/two/step-00000002 --output hf/two", 1, E, (TWO,)),
    "average": Row(
        "-m fabric_llm.average runs/two --last 2 --output hf/average",
        # A unit of a part, its sum in float64, and that rounded.
        *(1, 4 * E, ("resume_from_two_on_one",)),
    ),
    "verify": Row("-m fabric_llm.verify runs/two", 1, 2 * E, ("resume_from_two_on_one",)),
    "extend_vocab": Row(
        "-m fabric_llm.extend_vocab model --input new --tokens 50 --output hf/extended", 1, E
    ),
}


def run(command: str, folder: Path, bound: float = 2 * GIB) -> tuple[int, int, str]:
    """(most bytes held at once, exit code, output) of `python COMMAND`, killed as soon as it holds
    more than `bound`."""
    words = [str(ROOT / word) if word.endswith(".py") else word for word in shlex.split(command)]
    # malloc returns freed blocks that are larger. By itself it keeps those up to 32 MiB.
    settings = {"MALLOC_MMAP_THRESHOLD_": str(2**17)}
    settings |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    most = 0

    def see(now: memory.Held) -> None:
        nonlocal most
        most = max(most, now.anonymous)
        for pid in now.pids if now.anonymous > bound else ():
            os.kill(pid, signal.SIGKILL)

    with (folder / "output.txt").open("w+") as output:
        streams = {"stdout": output, "stderr": subprocess.STDOUT}
        environment = {**os.environ, **settings}
        code = memory.watched(
            [sys.executable, *words], 0.03, see, cwd=folder, env=environment, **streams
        )
        output.seek(0)
        return most, code, output.read()


class Rows:
    """The rows that have run, in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.results = folder, {}
        (folder / "corpus").mkdir()
        (folder / "new").mkdir()
        for name in ("argparse", "ast", "base64", "bisect", "calendar", "cmd"):
            source = Path(os.__file__).with_name(f"{name}.py").read_text()
            (folder / "corpus" / f"{name}.txt").write_text(source)
        (folder / "new" / "text.txt").write_text(
            "Grundstücksverkehr und Straßenbahnhaltestelle\n" * 200
        )
        (folder / "prompts.txt").write_text("def f\n")
        _, code, said = run(
            (
                "prepare_data.py --input corpus --train_tokenizer 600 --context_length 16 --output "
                "data"
            ),
            folder,
        )
        assert code == 0, said
        AutoModelForCausalLM.from_config(MODEL).save_pretrained(folder / "model")
        AutoTokenizer.from_pretrained(folder / "data" / "tokenizer").save_pretrained(
            folder / "model"
        )
        self.imported, code, said = run(
            "-c 'from fabric_llm.run import supervision, verdicts'", folder
        )
        assert code == 0, said

    def bound(self, row: Row) -> float:
        """Bytes."""
        return row.processes * (self.imported + SLACK) + row.holds * W

    def result(self, name: str) -> tuple[int, int, str]:
        """What `run` returns of a row, which is run once."""
        if name not in self.results:
            for other in ROWS[name].needs:
                assert self.result(other)[1] == ROWS[other].code, f"{name} needs {other}"
            self.results[name] = run(ROWS[name].command, self.folder, self.bound(ROWS[name]))
        return self.results[name]


@pytest.fixture(scope="module")
def rows():
    # of 15 GB: not one of the last three that pytest keeps
    with tempfile.TemporaryDirectory() as folder:
        yield Rows(Path(folder))


# Each of these takes a minute or more, and holds what others hold as well.
LONG = ("verify", "rewind_twice", "average")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in LONG)) for name in ROWS]
)
def test_a_command_holds_what_it_needs(rows, name):
    row, (most, code, said) = ROWS[name], rows.result(name)
    over = (most - row.processes * rows.imported) / W
    figures = f"{most / GIB:.2f} GiB of {rows.bound(row) / GIB:.2f}, {over:.2f} W besides imports"
    print(figures)
    assert most <= rows.bound(row), f"killed at {figures}"
    assert code == row.code, said[-3000:]
