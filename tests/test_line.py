"""fabric_llm.average along the line from a base model to a run: inside a budget, or at the knee, it
learned most."""

import json
import re
import shlex
import shutil
import sys

import numpy as np
import pytest
import torch
from conftest import ended
from ranks import Job, metrics, train_ranks
from safetensors.torch import save_file
from test_average import expected, parts, stored
from test_forgetting import language, replayed

import fabric_llm.report
from fabric_llm.average import main
from fabric_llm.report.line import FILE
from fabric_llm.training.forgetting import Forgetting
from fabric_llm.weights import average
from fabric_llm.weights.line import MAX_POINTS, goal_of, search, worth_of

SIZES = "--eval_batch_size 4 --eval_step_interval 8 --precision 32-true".split()
SIZES += ["--micro_batch_size", 8]


@pytest.fixture(scope="module")
def work(toys, tmp_path_factory):
    """Datasets old and new, a model `base` that knows the old one, and a run on the new one that
    forgot more than it may."""
    folder = tmp_path_factory.mktemp("line")
    for name in ("old", "new"):
        language(folder, name)
    data = ("--train_data_dir", folder / "old", "--model_name", toys / "llama")
    words = "--global_batch_size 16 --micro_batch_size 16 --lr 1e-2 --precision 32-true "
    words += "--max_step 200 --eval_iters 2 --run_name first"
    train_ranks(1, *data, *words.split(), "--output_dir", folder)
    shutil.move(folder / "first" / "step-00000200", folder / "base")
    words = "--forgetting_budget replay:0.15,copy:9 --forgetting_action stop --max_step 12".split()
    words += [*SIZES, "--lr", 1e-2, "--eval_step_interval", 12]
    job = Job(1, *replayed(folder, folder, *words))
    assert job.wait() == [76], job.output
    return folder


def call(capsys, *flags):
    """(exit code, stdout, last line of stderr)"""
    code, captured = ended(main, *flags), capsys.readouterr()
    return code, captured.out, captured.err.strip().rpartition("\n")[2]


def evaluated_alone(work, model, folder):
    """{set: loss} of a model as train.py evaluates it before step 1."""
    run = replayed(work, folder, "--max_step", 1, "--forgetting_budget", "replay:9", *SIZES)
    run = [model if word == work / "base" else word for word in run]
    train_ranks(1, *run, "--run_name", "alone")
    return {name: one["loss"] for name, one in metrics(folder / "alone", "eval")[0].items()}


# ------------------------------------------------------------------------------- the command


@pytest.mark.longer
def test_the_command_that_a_forgetting_run_names_next_finds_the_best_point_inside(
    work, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    reason = json.loads((work / "run" / "STATUS.json").read_text())["reason"]
    said = re.search(r"Next: `(python -m fabric_llm\.average .*)` merges it with its base", reason)
    command = shlex.split(said[1])
    assert command[3:5] == [str(work / "base"), str(work / "run")]
    assert command[5:] == ["--forgetting_budget", "replay:0.15,copy:9"]
    code, out, error = call(capsys, *command[3:])
    assert code == 0, error
    output = tmp_path / "hf" / "run-average"
    note = json.loads((output / "average.json").read_text())
    curve = {point["weight_of_run"]: point["eval_loss"] for point in note["line"]}
    assert list(curve) == sorted(curve) and len(curve) <= MAX_POINTS
    assert f"Chosen of {len(curve)} points" in out and out.count("forgotten: replay") >= 1
    # The ends are those of the run, the probe included.
    for share, index in ((0.0, 0), (1.0, -1)):
        of_run = {name: one["loss"] for name, one in metrics(work / "run", "eval")[index].items()}
        assert curve[share] == pytest.approx(of_run, abs=1e-5)
    card = (output / "README.md").read_text()
    for end, folder in ((0.0, work / "base"), (1.0, work / "run" / "step-00000012")):
        cells = " | ".join(f"{loss:.4f}" for loss in curve[end].values())
        assert re.search(rf"^\| `{folder}` \| [01]\.\d+ \| {re.escape(cells)} \|$", card, re.M)
    assert "replay 0.15 nats, copy 9 nats" in card and " (1), in float32, evaluated" in out
    before, share = curve[0.0], note["parts"][1]["weight"]
    # The weights are the average in float64, rounded once.
    folders = [work / "base", work / "run" / "step-00000012"]
    wanted, written = expected(folders, [1 - share, share], torch.float64), stored(output)
    rounded = {"rtol": 2**-24 * 1.001, "atol": 1e-12}
    for name, tensor in wanted.items():
        torch.testing.assert_close(written[name].double(), tensor, **rounded, msg=name)
    # Evaluated by train.py, it is inside the budget and has learned, and no point of a fine grid is
    # better.
    found = evaluated_alone(work, output, tmp_path)
    assert found == pytest.approx(note["eval_loss"], abs=1e-5)
    assert found["replay"] - before["replay"] <= 0.15 and found["new"] < before["new"] - 0.1
    both = average.open_parts(folders)
    run, config = average.as_in_run(both), both[0].config
    for tenth in range(11):
        there = average.average_of(both, [1 - tenth / 10, tenth / 10], "float32")
        losses = average.losses_of(run, config, there, torch.float32)
        if losses["replay"] - before["replay"] <= 0.15:
            assert losses["new"] >= found["new"] - 0.02 * (before["new"] - found["new"]), tenth
    page = (output / FILE).read_text()
    data = re.search(r'<script type="application/json" id="page-data">(.*?)</script>', page)[1]
    [chart] = json.loads(data)["charts"]
    assert {trace["name"] for trace in chart["traces"]} == {"new", "replay", "copy"}
    assert len(chart["traces"][0]["x"]) > 3
    assert [shape["y0"] for shape in chart["layout"]["shapes"]] == [0, 0.15, 9]
    assert f"{share:.3f}" in page


@pytest.mark.longer
def test_the_knee_lies_between_and_is_evaluated(work, tmp_path, capsys):
    flags = (work / "base", work / "run", "--weights", "knee", "--output", tmp_path / "hf")
    code, out, error = call(capsys, *flags)
    assert code == 0, error
    note = json.loads((tmp_path / "hf" / "average.json").read_text())
    assert 0 < note["parts"][1]["weight"] < 1 and note["weights"] == "knee"
    assert note["forgetting_budget"] == {}
    ends = [note["line"][index]["eval_loss"] for index in (0, -1)]
    learned, forgotten = (
        (note["eval_loss"][name] - ends[0][name]) / (ends[1][name] - ends[0][name])
        for name in ("new", "replay")
    )
    assert learned > forgotten + 0.05


@pytest.mark.longer
def test_a_run_inside_its_budget_is_taken_and_said_to_be_no_worse(work, tmp_path, capsys):
    """Each probe may have a budget, also one that the run didn't evaluate."""
    budget = ("--forgetting_budget", "retrieval:9,replay:9")
    flags = (work / "base", work / "run", *budget, "--output", tmp_path / "hf")
    code, out, error = call(capsys, *flags)
    assert code == 0 and "This is the run itself" in out, error
    run = stored(work / "run" / "step-00000012")
    assert all(torch.equal(tensor, run[name]) for name, tensor in stored(tmp_path / "hf").items())
    assert "retrieval" in json.loads((tmp_path / "hf" / "average.json").read_text())["eval_loss"]


@pytest.mark.longer
def test_without_plotly_there_is_the_table_and_a_sentence(work, tmp_path, capsys, monkeypatch):
    for name in ("line", "page", "figures"):  # imported before, they would be found
        monkeypatch.delitem(sys.modules, f"fabric_llm.report.{name}", raising=False)
        monkeypatch.delattr(fabric_llm.report, name, raising=False)
    monkeypatch.setitem(sys.modules, "plotly", None)
    budget = ("--forgetting_budget", "replay:9")
    flags = (work / "base", work / "run", *budget, "--output", tmp_path / "hf")
    code, out, _ = call(capsys, *flags)
    assert code == 0 and "Not drawn: The report needs plotly" in out and "  1.000  new" in out
    assert FILE not in parts(tmp_path / "hf")


# ------------------------------------------------------------------------------- mistakes


@pytest.mark.longer
@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        ("BASE RUN BUDGET general", 2, "--forgetting_budget takes name:nats"),
        ("BASE RUN BUDGET repaly:0.1", 2, "set is named 'repaly'. Did you mean 'replay'?"),
        ("BASE RUN BUDGET x:0.1", 2, "There are 'new', 'replay', 'copy', 'retrieval'."),
        ("BASE RUN BUDGET new:1,replay:1", 2, "the training data have one ('new', 'replay')"),
        ("BASE RUN BUDGET replay:1 --weights knee", 2, "are both given"),
        ("BASE RUN BUDGET replay:1 --evaluate false", 2, "which --evaluate false turns off"),
        ("BASE BUDGET replay:1", 2, "--forgetting_budget takes two parts, a base model and a run"),
        ("BASE BASE RUN --weights knee", 2, "--weights knee takes two parts, a base model and"),
        ("RUN BARE --weights knee", 2, "evaluated as the run was: none of the parts is a checkpoint"),
        ("TIED RUN BUDGET replay:1", 2, "are different models"),
        ("BASE LOST BUDGET replay:1", 2, "has no arguments.yaml, which would say on which data"),
        ("BASE OLDER BUDGET replay:1", 2, "evaluated as the run was: "),
        ("RUN EARLY BUDGET replay:0.01", 76, "is inside the budget but the base model"),
        ("BAD RUN BUDGET replay:1", 76, "bad' holds NaN or infinity in model.norm.weight"),
    ],
)
def test_each_mistake_is_one_sentence(work, toys, tmp_path, capsys, flags, code, words):
    for name in ("lost", "older", "bad"):
        shutil.copytree(work / ("base" if name == "bad" else "run"), tmp_path / name)
    (tmp_path / "lost" / "arguments.yaml").unlink()
    (tmp_path / "older" / "arguments.yaml").write_text("eval_iters: 2\n")
    tensors = stored(work / "base")
    tensors["model.norm.weight"][3] = torch.nan
    for file in ("MANIFEST.json", "trainer"):
        path = tmp_path / "bad" / file
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    save_file(tensors, tmp_path / "bad" / "model.safetensors", metadata={"format": "pt"})
    named = {"BASE": work / "base", "RUN": work / "run", "BUDGET": "--forgetting_budget"}
    named |= {"BARE": toys / "llama", "TIED": toys / "llama-tied"}
    named |= {name.upper(): tmp_path / name for name in ("lost", "older", "bad")}
    named["EARLY"] = work / "run" / "step-00000004"
    flags = [named.get(word, word) for word in flags.split()]
    found = call(capsys, *flags, "--output", tmp_path / "hf")
    assert (found[0], words in found[2]) == (code, True), found
    assert not (tmp_path / "hf").exists() and parts(tmp_path) == ["bad", "lost", "older"]


# ------------------------------------------------------------------------------- the search


def along(learned, forgotten, budgets):
    """What `search` finds on curves, (share, points), and what each share is worth."""
    guard = Forgetting(budgets=budgets)

    def losses(share):
        return {"new": 4 - learned(share), "old": 3 + forgotten(share)}

    def evaluate(share):
        guard.accept_evaluation(int(share > 0), losses(share))
        return losses(share)

    points = search(evaluate, guard, ["new"])
    goal = goal_of(guard, points[1.0], ["new"])
    worth = [worth_of(losses(share / 1000), guard, goal) for share in range(1001)]
    return next(iter(points)), points, np.array(worth)


CURVES = {
    "parabola": lambda a: a * a,
    "with a slope": lambda a: 0.3 * a + a * a,
    "with a dip": lambda a: a * a - 0.1 * a,
    "steep": lambda a: (np.exp(6 * a) - 1) / 400,
    "a step": lambda a: 1 / (1 + np.exp(-9 * (a - 0.5))) - 1 / (1 + np.exp(4.5)),
}


@pytest.mark.parametrize("forgotten", CURVES)
@pytest.mark.parametrize("part", [0.03, 0.2, 0.7])
def test_a_few_evaluations_come_near_the_best_inside_a_budget(forgotten, part):
    for learned in (
        lambda a: 2 * a - a * a,
        lambda a: a,
        lambda a: 2.4 * a - 2 * a * a,
        CURVES["a step"],
    ):
        budget = part * CURVES[forgotten](1.0)
        share, points, worth = along(learned, CURVES[forgotten], {"old": budget})
        assert len(points) <= MAX_POINTS and CURVES[forgotten](share) <= budget
        assert learned(share) >= 0.96 * worth.max()


@pytest.mark.parametrize("forgotten", CURVES)
def test_the_knee_is_farthest_from_the_chord(forgotten):
    share, points, worth = along(lambda a: 2 * a - a * a, CURVES[forgotten], {})
    assert len(points) <= MAX_POINTS and worth[round(1000 * share)] >= 0.98 * worth.max()


def test_nothing_learned_is_the_base_itself():
    assert along(lambda a: -a, CURVES["parabola"], {"old": 9})[0] == 0
    steep = along(lambda a: a, lambda a: 5 * a**0.1, {"old": 0.01})
    assert steep[0] == 0, "no point is inside"
