"""A run that goes back, as it forgot or because of a spike, is the same however it was interrupted.

Flags, stops and kills are drawn. Each interrupted run is compared with an undisturbed one: weights
and the state of the optimizer bit for bit, every number of the log but times, and the checkpoints
that are left.
"""

import random
from pathlib import Path

import pytest
from ranks import Job, assert_same_tensors, status, toy_run
from ranks import lines as lines_of
from ranks import tensors as tensors_of
from test_forgetting import base, replayed  # noqa: F401  base is a fixture

from fabric_llm.checkpoint import keep
from fabric_llm.verify import __main__ as verify

STEPS, BATCH = 14, 8
POINTS = [  # where a run is interrupted, with how often it comes there at most
    *(("between_steps", STEPS), ("forward", 2 * STEPS), ("evaluate", 40), ("publish.renamed", 5)),
    *(("prune.renamed", 4), ("resume.moved_aside", 3), ("metrics.replace", 4), ("read_data", 30)),
]
TIMES = {"tokens_per_second", "tokens_per_second_per_device", "model_tflops_per_device"}
TIMES |= {"data_seconds", "wait_seconds", "peak_memory_gib", "time"}


def drawn(seed):
    """(flags, positions whose loss is a spike, failpoints) of a run."""
    draw = random.Random(seed)
    flags = ["--max_step", STEPS, "--save_step_interval", draw.randint(1, 5)]
    flags += ["--eval_step_interval", draw.randint(1, 5), "--forgetting_action", "rewind"]
    flags += ["--forgetting_budget", f"replay:{draw.choice([0.1, 0.25, 0.4])}"]
    flags += ["--keep_last", draw.choice([1, 1, 2, 3]), "--keep_best", draw.randint(0, 1)] * (
        draw.random() < 0.8
    )
    flags += ["--spike_threshold", 8, "--spike_window", draw.randint(3, 10)]
    flags += ["--spike_action", draw.choice(["rewind", "rewind", "skip", "warn"])]
    flags += ["--ema_decay", 0.9, "--ema_every", draw.randint(1, 3)] * (draw.random() < 0.3)
    flags += ["--async_save", "true"] * (draw.random() < 0.3)
    spikes = {BATCH * draw.randint(3, STEPS + 6) for _ in range(draw.randint(0, 2))}
    cuts = []
    for _ in range(draw.randint(1, 3)):
        name, most = draw.choice(POINTS)
        count, is_a_place = draw.randint(1, most), name in ("between_steps", "forward", "evaluate")
        do = draw.choice(["kill", "term"]) if is_a_place else "kill"
        cuts.append(f"{name}:count={count}:do={do}")
    return flags, spikes, cuts


def spiked(positions):
    """The loss of the steps that begin at `positions` is a hundred times too large."""

    def install():
        from fabric_llm.data.batches import Prefetch
        from fabric_llm.training import step

        at, share, now = Prefetch.at, step.share, [0]

        def reading(self, position):
            now[0] = position
            return at(self, position)

        def too_large(fabric, total, asked):
            (loss, *aux), answers = share(fabric, total, asked)
            return [loss * 100 if now[0] in positions else loss, *aux], answers

        Prefetch.at, step.share = reading, too_large

    return install


def lines(run):
    """The log without times."""
    return [
        {key: value for key, value in line.items() if key not in TIMES} for line in lines_of(run)
    ]


def tensors(checkpoint):
    """Those that the next step depends on."""
    found = tensors_of(checkpoint)
    return {place: found[place] for place in found if "probe" not in place[0]}


def checkpoints(run, interval):
    """{name: what matters of its progress.json} of those that weren't asked for."""
    found = {}
    for path in sorted(run.glob("step-*")):
        document = keep.read_progress(path)
        if document["progress"]["step"] % interval == 0:
            names = ("progress", "guard", "eval_loss", "eval_losses", "rows_read", "mixture")
            found[path.name] = {name: document.get(name) for name in names}
    return found


def prove(base, folder, seed, ranks=1):  # noqa: F811
    words, spikes, cuts = drawn(seed)
    strategy = "fsdp2" if ranks > 1 else "auto"
    more = (*words, "--eval_iters", 2, "--strategy", strategy, "--max_skipped_steps", 6)
    ends = []
    for name, failpoints in (("whole", []), ("cut", cuts)):
        flags = (*replayed(base, folder, *more), "--run_name", name, "--resume", "auto")
        codes = [-9]
        for failpoint in [*failpoints, ""]:
            job = Job(ranks, *flags, failpoint=failpoint, before=spiked(spikes))
            codes = job.wait(120)
            assert set(codes) <= {0, 75, 76, 71, -9}, (failpoint, job.output)
            if codes[0] in (0, 76):
                break
            check_status(folder / name)
        ends.append(codes)
    whole, cut = folder / "whole", folder / "cut"
    said = f"seed {seed}: {words}, spikes {spikes}, {cuts}"
    print(said, ends, [line["verdict"] for line in lines(whole) if "verdict" in line])
    assert ends[0] == ends[1] and ends[0][0] in (0, 76), said
    assert lines(cut) == lines(whole), said
    interval = words[words.index("--save_step_interval") + 1]
    assert checkpoints(cut, interval) == checkpoints(whole, interval), said
    ours, theirs = (max(run.glob("step-*")) for run in (cut, whole))
    if ends[0][0] == 0:
        assert ours.name == theirs.name, said
        assert_same_tensors(tensors(ours), tensors(theirs))
        assert verify.main([str(cut), "--no_export"]) == 0, said
    check_status(cut)


def check_status(run: Path):
    """STATUS.json names a checkpoint that is there, unless a rewind was killed as it moved that."""
    said = status(run)
    last = said["last_durable_step"]
    assert last is None or said["code"] is None or (run / f"step-{last:08d}").is_dir(), said


@pytest.mark.longer
def test_a_run_that_goes_back_before_its_checkpoint_is_restarted_by_the_same_command(
    toys, tmp_path
):
    """--checkpoint names one that a user asked for, which the rewind has moved aside."""
    words = ("--global_batch_size", BATCH, "--max_step", STEPS, "--save_step_interval", 4)
    words += ("--eval_iters", 0, "--spike_threshold", 1000, "--spike_window", 4)
    words = (*toy_run(toys, tmp_path), *words, "--spike_action", "rewind", "--run_name")
    for name, failpoints in (("whole", [""]), ("cut", ["between_steps:count=4", ""])):
        run, at_7 = tmp_path / name, spiked({7 * BATCH})
        assert Job(1, *words, name, failpoint="between_steps:count=5:do=term").wait() == [75]
        [asked_for] = run.glob("step-*[!048]")
        back = ("--resume", "auto", "--checkpoint", asked_for)
        codes = [Job(1, *words, name, *back, failpoint=f, before=at_7).wait() for f in failpoints]
        assert codes == [[-9], [0]][-len(failpoints) :]
    assert lines(tmp_path / "cut") == lines(tmp_path / "whole")
    assert "rewind" in [line.get("verdict") for line in lines(tmp_path / "whole")]


@pytest.mark.longer
@pytest.mark.every_eighth(6)
@pytest.mark.parametrize("seed", range(12))
def test_a_run_that_goes_back_is_the_same_however_interrupted(base, tmp_path, seed):  # noqa: F811
    prove(base, tmp_path, seed)


@pytest.mark.longer
@pytest.mark.every_eighth(5)
@pytest.mark.parametrize("seed", range(100, 104))
def test_a_run_that_goes_back_on_two_ranks_as_well(base, tmp_path, seed):  # noqa: F811
    prove(base, tmp_path, seed, ranks=2)
