"""A fast path that fails on one of two ranks before the first step is done: all start again without
it, and train what they would have trained without it from the start."""

import json
import socket
import subprocess
import sys
from contextlib import suppress
from types import SimpleNamespace

import pytest
from ranks import metrics
from torch._inductor.exc import CppCompileError

from arguments import ROOT
from fabric_llm.base.faults import UNEXPECTED, Fault, as_fault
from fabric_llm.run.fallback import without_fast_path

# What breaks on rank 1, as on a machine where it doesn't work. Rank 0 and the reference are whole.
BREAK = """
import os
from contextlib import suppress

def fails(*args, **more):
    raise RuntimeError("it doesn't work on this machine")

if os.environ.get("RANK") == "1":
    {}
"""
DEFAULT = ""  # the path is chosen by default
PATHS = {  # the flags of the path, what breaks, and the flag of the run that goes on
    "packed": (
        DEFAULT,
        "from fabric_llm.model import packed_attention; packed_attention._one_by_one = fails",
        "--attention sdpa",
    ),
    "chunked": (
        DEFAULT,
        "from fabric_llm.model import chunked_loss; chunked_loss.Head.__call__ = fails",
        "--loss full",
    ),
    "compiled": (
        "--compile true",
        "os.environ['CXX'] = '/bin/false'; os.environ['TORCHINDUCTOR_CACHE_DIR'] = {folder!r}",
        "--compile false",
    ),
    "offload": (
        "--activation_checkpointing offload",
        "from fabric_llm.model import offload; offload.Inputs.put = fails",
        "--activation_checkpointing full",
    ),
    "float8": (
        "--float8 tensorwise",
        "import torchao.float8.float8_linear as f8; f8.hp_tensor_to_float8_dynamic = fails",
        "--float8 none",
    ),
}
LONGER, SLOW = pytest.mark.longer, pytest.mark.slow


def run(places, folder, path, *more, launcher=()):
    """(exit code, what was said) of two ranks on which `path` fails."""
    flags, broken, _ = PATHS[path]
    code = folder / "broken.py"
    code.write_text(BREAK.format(broken.format(folder=str(folder / "inductor"))))
    done = train(places, folder, *flags.split(), "--code", code, *more, launcher=launcher)
    return done.returncode, done.stdout + done.stderr


SIZES = (
    "--run_name run --devices 2 --accelerator cpu --global_batch_size 4 --max_step 3 --lr 1e-3 "
    "--eval_iters 1 --log_step_interval 1 --strategy fsdp2"
)


@pytest.fixture
def places(toys, packed_data):
    return ("--model_name", toys / "llama", "--train_data_dir", packed_data)


def train(places, folder, *more, launcher=()):
    words = ("train.py", *places, "--output_dir", folder, *SIZES.split(), *more)
    command = [sys.executable, *map(str, (*launcher, *words))]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=LONGER if path == "packed" else SLOW) for path in PATHS],
)
def test_the_run_goes_on_without_it_on_all_ranks(places, tmp_path, path):
    code, said = run(places, tmp_path, path)
    flag = PATHS[path][2]
    assert code == 0, said
    [warning] = [line for line in said.splitlines() if "starts again" in line]
    assert "failed on rank 1 before the first step was done" in warning and flag in warning
    # The check before step 1 has no recomputation, so that inputs of layers fail in that step.
    assert said.count("Start verified") == 1 + (path == "offload")
    events = list(map(json.loads, (tmp_path / "run/events.jsonl").read_text().splitlines()))
    [fell_back] = [event for event in events if event["event"] == "fell_back"]
    assert " ".join(fell_back["flags"]) == flag
    # The same as without the path from the start.
    assert train(places, tmp_path / "plain", *flag.split()).returncode == 0
    assert metrics(tmp_path / "run") == metrics(tmp_path / "plain" / "run")


@LONGER
def test_under_torchrun_as_well(places, tmp_path):
    held = None
    while held is None:  # the next port is in use, where the ranks might meet again
        with socket.create_server(("", 0)) as free, suppress(OSError):
            held = socket.create_server(("", (port := free.getsockname()[1]) + 1))
    launcher = f"-m torch.distributed.run --nproc_per_node 2 --master_port {port}".split()
    with held:
        code, said = run(places, tmp_path, "packed", launcher=launcher)
    assert code == 0, said
    assert said.count("starts again") == 1 and len(metrics(tmp_path / "run")) == 3


@SLOW
def test_strict_ends_the_run(places, tmp_path):
    code, said = run(places, tmp_path, "packed", "--fast_paths", "strict")
    assert code == 1 and "it doesn't work on this machine" in said and "again" not in said


def raised_in(*files, message="it fails", cause=None, kind=RuntimeError):
    """An error that has come through these files, the outermost first."""
    code = "raise kind(message, *more) from cause"
    more = ("disk full",) if kind is OSError else ()
    names = {"cause": cause, "kind": kind, "message": message, "more": more}
    for file in reversed(files):
        names = {"inner": compile(code, file, "exec"), "names": names}
        code = "exec(inner, names)"
    try:
        exec(code, names)
    except (RuntimeError, OSError, ValueError) as error:
        return error


# The loss of the step that begins at position 12 is a spike, and the one at 20 can't be computed.
BREAK_AFTER_A_REWIND = """
from fabric_llm.data.batches import Prefetch
from fabric_llm.model.chunked_loss import Head
from fabric_llm.training import step

at, share, call, position = Prefetch.at, step.share, Head.__call__, [0]

def reading(self, now):
    position[0] = now
    return at(self, now)

def too_large(*args):
    (loss, *more), answers = share(*args)
    return [loss * 1e4 if position[0] == 12 else loss, *more], answers

def fails(self, *args, **more):
    if position[0] == 20:
        raise RuntimeError("it comes after a rewind")
    return call(self, *args, **more)

Prefetch.at, step.share, Head.__call__ = reading, too_large, fails
"""


@LONGER
def test_after_a_step_that_a_rewind_has_undone_the_run_ends(places, tmp_path):
    """It goes back behind the step at which its process began."""
    (tmp_path / "broken.py").write_text(BREAK_AFTER_A_REWIND)
    words = "--devices 1 --strategy auto --save_step_interval 2 --eval_iters 0 --loss chunked "
    words += "--spike_threshold 1000 --spike_window 2 --spike_action rewind"
    assert train(places, tmp_path, *words.split()).returncode == 0
    more = ("--code", tmp_path / "broken.py", "--max_step", 8, "--resume", "true")
    more += ("--resume_override", "max_step,code")
    done = train(places, tmp_path, *words.split(), *more)
    assert done.returncode == 1, done.stderr
    assert metrics(tmp_path / "run", "verdict") == ["rewind"]
    assert "starts again" not in done.stderr and "it comes after a rewind" in done.stderr


def flags_again(error, taken, rank=3):
    """(the flags of the run that goes on, what is said)"""
    model = {**taken}
    placement = SimpleNamespace(context_parallel=model.pop("sharing", 1))
    plan = SimpleNamespace(model=SimpleNamespace(**model), placement=placement)
    fault = without_fast_path(error, as_fault(error), plan, rank)
    return " ".join(fault.again) or None, str(fault)


def test_errors_that_go_round_in_a_circle_are_followed_once():
    error = RuntimeError("round")
    error.__cause__ = error
    assert flags_again(error, EVERY)[0] is None


def test_no_path_is_turned_off_twice(monkeypatch):
    monkeypatch.setenv("FABRIC_LLM_AGAIN", " --compile false")
    assert flags_again(raised_in(INDUCTOR), EVERY)[0] is None


def test_a_compiler_that_lost_a_process_of_its_own_has_lost_no_rank():
    error = CppCompileError(["c++"], "Broken pipe")
    assert as_fault(error).code == UNEXPECTED and as_fault(RuntimeError("Broken pipe")).code == 71


EVERY = {
    "float8": "rowwise", "activation_checkpointing": "offload", "loss": "chunked", "compiles": True,
    "config": SimpleNamespace(_attn_implementation="packed"),
}  # fmt: skip
PACKED = {"float8": "none", "activation_checkpointing": "none", "loss": "full", "compiles": False}
PACKED["config"] = EVERY["config"]
INDUCTOR = "/v/site-packages/torch/_inductor/graph.py"
TORCHAO = "/v/site-packages/torchao/float8/float8_linear.py"
VARLEN = "/v/site-packages/torch/nn/attention/varlen.py"
ADAMW = "/w/fabric_llm/training/adamw_triton.py"
OFFLOAD, MODEL = "/w/fabric_llm/model/offload.py", "/s/transformers/models/llama/modeling_llama.py"


@pytest.mark.parametrize(
    ("error", "taken", "flag"),
    [
        (raised_in(OFFLOAD, MODEL, INDUCTOR), EVERY, "--compile false"),
        (raised_in(INDUCTOR, TORCHAO, MODEL), EVERY, "--float8 none"),
        (raised_in(OFFLOAD, MODEL), EVERY, "--activation_checkpointing full"),
        (raised_in(MODEL, cause=raised_in(INDUCTOR)), EVERY, "--compile false"),
        (raised_in(INDUCTOR), {**EVERY, "compiles": False}, None),
        (raised_in(MODEL), EVERY, None),
        (raised_in(MODEL, message="CUDA error: an illegal access"), EVERY, "--float8 none"),
        (raised_in(INDUCTOR, message="CUDA out of memory"), EVERY, None),
        (raised_in(INDUCTOR, message="Connection closed by peer"), EVERY, None),
        (raised_in(VARLEN), PACKED, "--attention sdpa"),
        (raised_in(VARLEN), {**PACKED, "sharing": 2}, None),
        (raised_in(ADAMW, "/v/site-packages/triton/compiler.py"), EVERY, None),
        (raised_in("/home/me/triton/fabric_llm/training/step.py"), EVERY, None),
        (raised_in(INDUCTOR, kind=OSError, message=28), EVERY, "--compile false"),
        (raised_in(INDUCTOR, kind=Fault), EVERY, None),
    ],
)
def test_whose_error_it_is(error, taken, flag):
    again, said = flags_again(error, taken)
    assert again == flag
    assert flag is None or "failed on rank 3" in said and flag in said
