"""Law 8: killed at any moment, `latest` is a checkpoint that loads, and nothing beyond the interval
is lost.

Two FSDP ranks, with dropout and stochastic rounding, are killed with SIGKILL at random times and at
every named point; started again with --resume auto, they end with the weights and the log of the
undisturbed run, bit for bit.
"""

import json
import random
import shutil
import time

import pytest
from ranks import Job, assert_same_tensors, metrics, tensors, toy_run

from fabric_llm.base import failpoints, files
from fabric_llm.checkpoint import keep

pytestmark = pytest.mark.faults

STEPS, INTERVAL = 10, 3
RANDOM_KILLS = 60
KINDS = ("full", "sharded")
KEYS = ("step", "loss", "grad_norm", "lr", "tokens", "eval_loss")


def flags(toys, output, kind, *more):
    return (
        *toy_run(toys, output, model="gpt2"),
        *"--strategy fsdp --lr 1e-2 --hang_timeout 20 --resume auto --run_name run".split(),
        *"--micro_batch_size 1 --global_batch_size 4 --eval_iters 2 --eval_batch_size 2".split(),
        *"--eval_step_interval 4 --keep_last 2 --keep_best 0".split(),
        *("--max_step", STEPS, "--save_step_interval", INTERVAL, "--state_dict_type", kind, *more),
    )


def assert_same_run(run, reference):
    for key in KEYS:
        assert metrics(run, key) == metrics(reference, key), key
    assert_same_tensors(*(tensors(one / f"step-{STEPS:08d}") for one in (run, reference)))


def assert_intact(run, lost=INTERVAL):
    """Whatever bears a checkpoint's name is one, and no more than `lost` steps are gone."""
    for path in files.step_directories(run):
        keep.verified(path, hashes=True)
    last = files.latest(run)
    durable = 0 if last is None else files.step_of(last)
    logged = logged_steps(run)
    assert max(logged, default=0) - durable <= lost + 1  # the line of a step comes before its save
    return durable


def is_complete(run):
    """Then a rank may have left in peace, while the other was killed on its way out."""
    last = files.latest(run)
    return last is not None and files.step_of(last) == STEPS


def logged_steps(run):
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.is_file() else []
    whole = [json.loads(line) for line in lines if line.endswith("}")]
    return [line["step"] for line in whole if "loss" in line]


@pytest.fixture(scope="module", params=KINDS)
def reference(request, toys, tmp_path_factory):
    """(kind, folder of the undisturbed run, folder of a run that was killed after step 7)."""
    kind, folder = request.param, tmp_path_factory.mktemp(request.param)
    job = Job(2, *flags(toys, folder / "whole", kind))
    assert job.wait() == [0, 0], job.output
    job = Job(2, *flags(toys, folder / "half", kind), failpoint="between_steps:count=7")
    assert job.wait() == [-9, -9], job.output
    (folder / "half" / "run" / ".tmp-step-00000009-abcd").mkdir()
    return kind, folder / "whole" / "run", folder / "half" / "run"


def test_random_kills(reference, toys, tmp_path):
    kind, whole, _ = reference
    generator = random.Random(kind)
    kills, run, longest = 0, tmp_path / "run", 2.0
    while kills < RANDOM_KILLS // len(KINDS):
        asynchronous = kills % 4 == 3
        job = Job(2, *flags(toys, tmp_path, kind, "--async_save", str(asynchronous).lower()))
        began = time.monotonic()
        time.sleep(generator.uniform(0.0, longest))
        job.kill(generator.choice([[0], [1], *[[0, 1]] * 4]))
        codes = job.wait()
        if codes == [0, 0]:  # it was faster
            longest = time.monotonic() - began
            assert_same_run(run, whole)
            shutil.rmtree(run)
            continue
        assert -9 in codes, job.output
        assert set(codes) <= ({-9, 71, 0} if is_complete(run) else {-9, 71}), job.output
        assert_intact(run, 2 * INTERVAL if asynchronous else INTERVAL)
        kills += 1
    job = Job(2, *flags(toys, tmp_path, kind))
    assert job.wait() == [0, 0], job.output
    assert_same_run(run, whole)


# Where the first time would be in the run that was killed before, or of no interest.
COUNTS = {"fill": 3, "forward": 3, "between_micro_batches": 4, "optimizer_step": 3}
COUNTS |= dict.fromkeys(("between_steps", "evaluate", "save.parts"), 2)


@pytest.mark.parametrize(
    "name", [n for n in failpoints.NAMES if not n.startswith(("prepare.", "mirror."))]
)  # tests/test_endings.py
def test_a_kill_at_every_named_point(reference, toys, tmp_path, name):
    kind, whole, half = reference
    run = tmp_path / "run"
    shutil.copytree(half, run)
    job = Job(2, *flags(toys, tmp_path, kind), failpoint=f"{name}:count={COUNTS.get(name, 1)}")
    codes = job.wait()
    assert -9 in codes and set(codes) <= {-9, 71}, job.output
    durable = assert_intact(run)
    assert durable >= 6
    job = Job(2, *flags(toys, tmp_path, kind))
    assert job.wait() == [0, 0], job.output
    assert_same_run(run, whole)
    assert not [*run.glob(".tmp-*"), *run.glob(".trash-*")], "leftovers are swept"


@pytest.mark.parametrize(
    "name", [n for n in failpoints.NAMES if n.startswith(("save.", "publish."))]
)
def test_a_kill_while_a_save_goes_on_in_the_background(reference, toys, tmp_path, name):
    """The former checkpoint is the latest, until the rename: at most an interval before the save
    and one beside it."""
    kind, whole, half = reference
    if kind == "full" and name not in ("save.rest", "publish.before_rename"):
        pytest.skip("as for sharded checkpoints; the longer proof is benchmarks/kills.py")
    run = tmp_path / "run"
    shutil.copytree(half, run)
    job = Job(2, *flags(toys, tmp_path, kind, "--async_save", "true"), failpoint=name)
    codes = job.wait()
    assert -9 in codes and set(codes) <= {-9, 71}, job.output
    durable = 9 if name in ("publish.renamed", "publish.done") else 6
    assert assert_intact(run, 2 * INTERVAL) == durable
    job = Job(2, *flags(toys, tmp_path, kind, "--async_save", "true"))
    assert job.wait() == [0, 0], job.output
    assert_same_run(run, whole)
