"""`plan.py --html`: what it draws is what the run then does."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import CONTEXT, ended
from ranks import metrics, run_ranks, toy_run, train_ranks
from test_law_12_mixture import save
from test_plan import said
from test_report import Page, browser, opened

import plan
from plan_arguments import parse_plan

pytest.importorskip("plotly", reason="plotly isn't installed: pip install -e '.[report]'")
ROOT = Path(__file__).parent.parent


def preview(folder, *flags, name="preview.html"):
    """The page, made by a process of its own, as a plan's process group needs."""
    assert run_ranks(1, plan.main, [*map(str, flags), "--html", str(folder / name)]) == [0]
    return Page(folder / name)


@pytest.fixture(scope="module")
def mixed(toys, tmp_path_factory):
    """(the flags of a run of two sources and two stages, its preview, its directory)"""
    folder = tmp_path_factory.mktemp("preview")
    mix = {
        "sources": {
            "new": {"path": str(toys / "data"), "weight": 0.75},
            "old": {"path": str(toys / "many"), "weight": 0.25},
        },
        "stages": [{"from": 0.5, "weights": {"new": 0.25, "old": 0.75}}],
    }
    (folder / "mix.yaml").write_text(json.dumps(mix))
    flags = ["--model_name", toys / "llama", "--data_mix", folder / "mix.yaml"]
    flags += f"--output_dir {folder} --run_name run --global_batch_size 4 --max_step 20".split()
    flags += "--warmup_steps 3 --lr 1e-3 --min_lr 1e-4 --eval_step_interval 6".split()
    flags += "--eval_iters 1 --save_step_interval 8".split()
    before = preview(folder, *flags)
    assert not (folder / "run").exists(), "nothing is made for a run that isn't started"
    train_ranks(1, *flags)
    return flags, before, folder / "run"


def due_by_plan(words):
    """[(step, kind)] of what is due in a run with these flags."""
    from fabric_llm.forecast import page

    own, flags = parse_plan(words)
    return page.course(page.plan_of(own, flags), flags)[1]


@pytest.mark.longer
def test_learning_rate_sources_checkpoints_and_evaluations_are_those_of_the_run(mixed):
    flags, drawn, run = mixed
    [lr] = drawn.lines("lr")
    assert lr["x"] == metrics(run, "step")[1:21] or lr["x"] == list(range(1, 21))
    assert lr["y"] == pytest.approx(metrics(run, "lr"), rel=1e-5)
    read = metrics(run, "sources")
    for line in drawn.lines("sources_epochs"):
        assert line["y"] == pytest.approx([one[line["set"]]["epochs"] for one in read], rel=1e-5)
    shares = {line["set"]: dict(zip(line["x"], line["y"])) for line in drawn.lines("sources_share")}
    assert (shares["new"][1], shares["old"][1]) == (0.75, 0.25)
    assert (shares["new"][11], shares["old"][20]) == (0.25, 0.75)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    due = {"evaluated": [one["step"] for one in lines if "eval_loss" in one]}
    due["saved"] = sorted(int(path.name[5:]) for path in run.glob("step-*"))
    due["stage"] = [10]
    [happens] = run_ranks(1, due_by_plan, [*map(str, flags), "--run_name", "another"])
    for kind, steps in due.items():
        assert [step for step, name in happens if name == kind] == steps
    counts = f"Checkpoints {len(due['saved'])} and {len(due['evaluated'])} evaluations"
    assert counts in drawn.text and [mark["x0"] for mark in drawn.data["marks"]] == due["stage"]
    assert "1,920" in drawn.text, "tokens of the run"


@pytest.mark.longer
def test_a_run_that_goes_on_is_drawn_from_where_it_is(mixed, tmp_path):
    flags, _, run = mixed
    more = "--resume true --resume_override max_step --max_step 25".split()
    drawn = preview(tmp_path, *flags, *more)
    assert drawn.lines("lr")[0]["x"] == [21, 22, 23, 24, 25] and "from 20 to 25" in drawn.text
    assert run.is_dir() and "5 steps of" in drawn.text
    resumed = (*map(str, flags[4:8]), "--resume", "true")
    for change in (("--max_step", 25), ("--tokens", 1e6), ("--seed", 5), ("--precision", "bf16-mixed")):
        assert ended(plan.main, *resumed, *change) == 2
    for max_step, left in ((25, 5), (20, 0)):
        found = said(*flags, *more[:-1], max_step)
        assert (found["done"], found["steps"], found["tokens"]) == (20, max_step, left * found["tokens_a_step"])


@pytest.mark.longer
def test_one_dataset_by_epochs(toys, tmp_path):
    flags = "--number_epochs 2 --global_batch_size 8 --eval_iters 0".split()
    drawn = preview(tmp_path, *toy_run(toys, tmp_path), *flags)
    assert drawn.names() == ["lr", "memory"] and drawn.lines("lr")[0]["x"][-1] == 11
    assert "Checkpoints 1 and 0 evaluations" in drawn.text


@pytest.mark.longer
def test_stages_of_two_row_lengths(toys, tmp_path):
    """They were refused, as if --context_length had been given."""
    save(tmp_path / "long", 40, context=2 * CONTEXT)
    sources = {
        "short": {"path": str(toys / "data"), "weight": 1},
        "long": {"path": str(tmp_path / "long")},
    }
    stages = [{"from": 0.5, "weights": {"long": 1}}]
    (tmp_path / "mix.yaml").write_text(json.dumps({"sources": sources, "stages": stages}))
    drawn = preview(
        tmp_path, "--model_name", toys / "llama", "--data_mix", tmp_path / "mix.yaml",
        "--global_batch_size", 4, "--max_step", 8, "--eval_iters", 0,
    )  # fmt: skip
    assert f"4 sequences of {CONTEXT} or {2 * CONTEXT} a step" in drawn.text


@pytest.mark.longer
def test_doubts_are_shown(toys, tmp_path):
    drawn = preview(tmp_path, *toy_run(toys, tmp_path), "--max_step", 400, "--lr", 0.5)
    assert "--lr 0.5" in drawn.text


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (["--lrr", 1], 2, "Did you mean --lr?"),
        (["--train_data_dir", "nowhere"], 2, "nowhere"),
        (["--html", "no/where.html"], 2, "in a folder that is there"),
        (["--html"], 2, "nothing is given"),
        (["--json", "true"], 2, "takes no --json or --sweep"),
        (["--tokens", "1e6"], 2, "takes no --tokens"),
        (["--resume", "true", "--run_name", "none"], 66, "no complete checkpoint"),
        (["--global_batch_size", 45], 2, "has 44"),
    ],
)
def test_mistakes_are_those_of_train(toys, tmp_path, capsys, flags, code, words):
    given = ("--html", tmp_path / "x.html", *toy_run(toys, tmp_path), *flags)
    assert ended(plan.main, *given) == code
    lines = capsys.readouterr().err.splitlines()
    said = [line for line in lines if "is given 2 times: " not in line]
    assert len(said) == 1 and words in said[0]


@pytest.mark.longer
def test_without_data_the_page_has_the_memory(toys, tmp_path):
    flags = "--context_length 128 --max_step 9 --device_memory 2 --auto true".split()
    drawn = preview(tmp_path, "--model_name", toys / "llama", *flags)
    [memory] = [chart for chart in drawn.data["charts"] if chart["name"] == "memory"]
    assert f"{sum(trace['x'][0] for trace in memory['traces']):,.2f} MiB" in drawn.text
    lines = [shape["x0"] / 1024 for shape in memory["layout"]["shapes"]]
    assert lines == pytest.approx([1.6, 1.9, 2.0]) and "GiB" not in drawn.text
    assert "optimizer state" in drawn.text and "Curves" not in drawn.text


@pytest.mark.longer
def test_from_any_folder(toys, tmp_path):
    words = [sys.executable, ROOT / "plan.py", *toy_run(toys, tmp_path)]
    words += ["--max_step", 3, "--html", "preview.html"]
    done = subprocess.run([*map(str, words)], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == "" and "Written: preview.html" in done.stdout
    assert (tmp_path / "preview.html").is_file()


@pytest.mark.longer
@pytest.mark.skipif(browser() is None, reason="no chromium or chrome is installed")
def test_it_opens_in_a_browser(mixed, tmp_path):
    console, seen = opened(mixed[2].parent / "preview.html", tmp_path, width=500)
    assert console == [] and seen["problems"] == [] and seen["asked"] == [] and not seen["wide"]
    assert seen["before"] == 5, "the learning rate, two shares, two epochs"
