"""plan.py --sweep: each row is the plan of its devices, messages show where they must, and mistakes
are told in one sentence."""

from pathlib import Path

import pytest
from test_plan import SHORT, assert_mistake, llama, printed, said

from benchmarks import published
from fabric_llm.forecast.accelerators import BEGIN, BETWEEN, INSIDE, latency
from fabric_llm.model.strategy_rules import Placement, Sharding

ROOT = Path(__file__).parent.parent
HOW = ("FULL_SHARD", "HYBRID_SHARD")


def swept(toys, *words):
    """{(devices, sharding): row}"""
    found = said(*llama(toys), *words)
    return {(row["devices"], row["sharding"]): row for row in found["rows"]}, found


@pytest.mark.longer
@pytest.mark.every_eighth(6)
@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
def test_a_row_is_the_plan_of_its_devices(toys, strategy):
    flags = f"--devices 2 --strategy {strategy} --micro_batch_size 4".split()
    flags += ["--gradient_accumulation_steps", 2]
    rows, _ = swept(toys, "--sweep", "devices=2..64", *flags)
    few = [(2, "FULL_SHARD"), (4, "FULL_SHARD"), (4, "HYBRID_SHARD")]
    assert [row for row in rows if row[0] < 8] == few
    for devices, how in [few[0], few[2], (32, "FULL_SHARD"), *((64, how) for how in HOW)]:
        nodes = ("--num_nodes", devices // 2, "--sharding_strategy", how)
        alone, row = said(*llama(toys), *flags, *nodes), rows[devices, how]["prediction"]
        close = 1e-9 if devices <= 32 else 0.01  # so far a step is traced
        assert tensors(row) == pytest.approx(tensors(alone), rel=close)
        for key in ("tokens_a_step", "link_bytes", "network_bytes"):
            assert row[key] == alone[key], key
        for key, seconds in alone["seconds"].items():
            within = close if key in ("launch", "step") else 0  # operations are counted
            assert row["seconds"][key] == pytest.approx(seconds, rel=within), key


def tensors(prediction):
    """Bytes of a device without the context, which is most of a small model's."""
    return prediction["memory"]["peak"] - prediction["memory"]["parts"]["CUDA context (assumed)"]


@pytest.mark.longer
def test_every_device_keeps_its_part_of_the_batch(toys):
    rows, _ = swept(toys, "--sweep", "devices=4..32", "--global_batch_size", 8)
    tokens = {devices: row["prediction"]["tokens_a_step"] for (devices, _), row in rows.items()}
    assert tokens == {devices: 2 * 128 * devices for devices in (4, 8, 16, 32)}


@pytest.mark.longer
def test_where_the_network_is_slow_the_hybrid_is_faster(toys):
    """In float32 a node sends 12 bytes a parameter to shard over all devices, and 8 to sum the
    gradients of a hybrid."""
    flags = ("--precision", "32-true", "--mfu", 1e-7, "--sweep", "devices=8..64")
    fast, _ = swept(toys, *flags)
    assert fast[16, "FULL_SHARD"]["prediction"]["steps"] == 10, "--max_step, on any devices"
    prediction = fast[16, "FULL_SHARD"]["prediction"]
    # Gbit/s: nearly all of computing
    network = 8e-9 * prediction["network_bytes"] / (0.9 * prediction["seconds"]["compute"])
    slow, found = swept(toys, *flags, "--network", network)
    steps = {key: row["prediction"]["seconds"]["step"] for key, row in slow.items()}
    assert steps[16, "FULL_SHARD"] == steps[16, "HYBRID_SHARD"] == steps[8, "FULL_SHARD"]
    assert steps[32, "FULL_SHARD"] > steps[32, "HYBRID_SHARD"] == steps[8, "FULL_SHARD"]
    assert steps[64, "FULL_SHARD"] > steps[64, "HYBRID_SHARD"] > steps[8, "FULL_SHARD"]
    for how, devices in (("FULL_SHARD", 32), ("HYBRID_SHARD", 64)):
        assert found["hidden"][how] == f"messages aren't hidden from {devices} devices on"
    for key, row in slow.items():
        assert row["efficiency"] == pytest.approx(steps[8, "FULL_SHARD"] / steps[key])
        assert row["none_hidden"] <= row["efficiency"] <= 1


def test_the_latency_of_rings_and_trees():
    def of(how, devices, nodes, strategy="fsdp"):
        placement = Placement(strategy, Sharding(sharding_strategy=how), devices, nodes, "cuda")
        return latency(placement, units=5, syncs=1, micro_batches=2)

    inside, tree = BEGIN + 7 * INSIDE, BEGIN + 4 * BETWEEN
    assert of("FULL_SHARD", 1, 1, "single") == 0
    assert of("FULL_SHARD", 8, 1) == pytest.approx(5 * 2 * 3 * inside)
    assert of("FULL_SHARD", 8, 4) == pytest.approx(
        5 * 2 * 3 * (BEGIN + 4 * 7 * INSIDE + 3 * BETWEEN)
    )
    assert of("SHARD_GRAD_OP", 8, 1) == pytest.approx(5 * 2 * 2 * inside)
    assert of("HYBRID_SHARD", 8, 4) == pytest.approx(5 * 2 * (3 * inside + tree))
    assert of("FULL_SHARD", 8, 4, "ddp") == pytest.approx(5 * (tree + 14 * INSIDE))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--sweep devices=8..x", "--sweep 'devices=8..x' must be devices=FIRST..LAST"),
        ("--sweep devices=9..8", "--sweep 'devices=9..8' must be devices=FIRST..LAST"),
        ("--sweep devices=0..8", "--sweep 'devices=0..8' must be devices=FIRST..LAST"),
        ("--sweep nodes=1..8", "--sweep 'nodes=1..8' must be devices=FIRST..LAST"),
        ("--sweep devices=3..64", "--sweep devices=3..64: 12 devices aren't whole nodes of 8"),
        ("--sweep devices=8..64 --num_nodes 2", "--sweep chooses nodes and sharding itself"),
        ("--sweep devices=8..64 --json true --html x.html", "--html draws one plan, and takes no"),
        ("--sweep devices=8..64 --html x.html", "--html draws one plan, and takes no"),
        ("--sweep devices=8..64 --auto true", "--sweep chooses nodes and sharding itself"),
        ("--sweep devices=8..64 --global_batch_size 9", "--global_batch_size 9 doesn't divide by"),
    ],
)
def test_mistakes_are_told_in_one_sentence(toys, capsys, words, sentence):
    assert_mistake(toys, capsys, words, sentence)


@pytest.mark.longer
def test_a_run_of_unknown_length_has_no_hours(toys):
    [row] = said(*llama(toys, "--sweep devices=8..8 --price_per_hour 2", SHORT[:2]))["rows"]
    assert [row["prediction"][name] for name in ("steps", "hours", "price")] == [None] * 3


@pytest.mark.longer
def test_the_table_has_hours_and_money_where_they_are_known(toys):
    """docs/planning.md says so of --tokens. They were in the JSON alone, and --price_per_hour
    changed nothing in the table."""
    words = ("--model_name", toys / "llama", *SHORT[:2], "--sweep", "devices=1..2")
    known = (*words, "--tokens", 1e9, "--price_per_hour", 2)
    rows = [row["prediction"] for row in said(*known)["rows"]]
    table = printed(*known)
    head, *lines = table.splitlines()[:3]
    assert head.split()[-2:] == ["hours", "price"]
    of_rows = [[f"{row[name]:,.2f}" for name in ("hours", "price")] for row in rows]
    assert [line.split()[-2:] for line in lines] == of_rows
    table = printed(*words)
    assert table.splitlines()[0].endswith("none hidden")


@pytest.mark.longer
def test_what_does_not_fit_is_said(toys):
    text = printed(*llama(toys, "--sweep devices=8..8 --device_memory 1e-3"))
    assert " %, no " in text.splitlines()[1]


@pytest.mark.longer
def test_what_is_printed(toys):
    text = printed(*llama(toys, "--sweep devices=8..32", SHORT[:2]))
    first, *lines = text.splitlines()
    assert first.split()[:2] == ["devices", "tokens"]
    assert [line.split()[0] for line in lines[:5]] == ["8", "16", "16", "32", "32"]
    assert "\nFULL_SHARD: messages " in text and "\nAssumed\n  Weak scaling" in text
    assert "Next:" not in text


def test_published_runs_are_those_of_the_page():
    """docs/results/sweep.md has the runs that benchmarks/published.py plans."""
    runs = [run for run in published.published() if run.counted == "speed"]
    page = (ROOT / "docs/results/sweep.md").read_text()
    for run in runs:
        for devices, rate in (pair.split(":") for pair in run.published.split()):
            words = run.run, run.source, run.other, devices, f"{int(rate):,}"
            assert f"| {' | '.join(words)} |" in page, run
    assert len({run.source for run in runs}) >= 3 and len(runs) >= 20
    assert all(run.run.partition(",")[0] in published.SHAPES and run.published for run in runs)
