"""fabric_llm.choose: five short branches say with which share of replay to begin, and whether they
know it."""

import json
import math
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import ended
from ranks import train_ranks
from test_forgetting import base, language  # noqa: F401
from test_warnings import warned

from arguments import PlanArguments
from fabric_llm import choose
from fabric_llm.base.flag import declared
from fabric_llm.base.names import by_flag
from fabric_llm.forecast import shares
from fabric_llm.plan.checks import check_training
from parse_arguments import parse_train

# ------------------------------------------------------------------------------------------ the law


def drawn(seed):
    """(c, k, t) of a law, c + k exp(t r)."""
    draw = random.Random(seed)
    return draw.uniform(0.5, 4), draw.choice([-1, 1]) * draw.uniform(0.01, 2), draw.uniform(-7, 7)


@pytest.mark.parametrize("seed", range(20))
def test_data_drawn_from_the_law_give_it_back(seed):
    c, k, t = drawn(seed)
    law = shares.through(*(c + k * math.exp(t * share) for share in (0, 0.5, 1)))
    assert law.t == pytest.approx(t, rel=1e-6)
    for share in np.linspace(0, 1, 23):
        assert law.at(share) == pytest.approx(c + k * math.exp(t * share), rel=1e-9)


def test_without_a_law_there_are_straight_lines():
    law = shares.through(3.0, 2.0, 2.5)
    assert law.t is None and law.at(0.25) == 2.5 and law.at(0.75) == 2.25
    assert shares.through(2.0, 2.0, 2.0).at(0.3) == 2.0
    assert shares.through(3.0, 2.5, 2.0).at(0.25) == pytest.approx(2.75, abs=1e-6)


@pytest.mark.parametrize(
    "learned, more, words",
    [
        (1.5, -0.03, r"0\.0300 nats less of replay\. 1e-05 is the better one: .* --lr 1e-05\."),
        (1.5, 0.03, r"0\.0300 nats more of replay\. 2e-05 is the better one\."),
        (1.5, 0.01, "Neither is clearly better: stay with 2e-05."),
        (0.5, 0, "learns more than any share at 2e-05: they can't be compared."),
        (2.5, 0, "learns less than any share at 2e-05: they can't be compared."),
    ],
)
def test_which_of_two_rates_to_take(learned, more, words):
    laws = {choose.NEW: shares.through(1.0, 1.5, 2.0), choose.REPLAY: shares.through(2, 1.5, 1)}
    whole = SimpleNamespace(budgets={choose.REPLAY: 0.1}, lr=2e-5)
    made = SimpleNamespace(made=[{"lr": 1e-5}], whole=whole)
    losses = {choose.NEW: learned, choose.REPLAY: 1.5 + more}
    assert re.search(words, choose.of_second_rate(made, laws, losses))


@pytest.mark.parametrize("seed", range(20))
def test_the_share_is_the_best_of_those_inside_all_budgets(seed):
    draw = random.Random(seed)
    of_sets = {name: drawn(f"{seed} {name}") for name in ("new", "replay", "code")}

    def loss(name, share):
        c, k, t = of_sets[name]
        return c + k * math.exp(t * share)

    laws = {name: shares.through(*(loss(name, r) for r in (0, 0.5, 1))) for name in of_sets}
    before = {name: draw.uniform(loss(name, 0), loss(name, 1)) for name in of_sets}
    budgets = {"replay": draw.uniform(0.01, 0.5), "code": draw.uniform(0.01, 0.5)}
    found = shares.within(laws, before, budgets, "new", (0.0, 0.9))
    inside = []
    for number in [*range(1, 100), *range(101, 181)]:
        share = number / 200
        if all(loss(name, share) <= before[name] + budgets[name] for name in budgets):
            inside.append((loss("new", share), share))
    assert found == (min(inside)[1] if inside else None)


# ----------------------------------------------------------------------------------------- a branch

RUN = (
    "--model_name m --train_data_dir d --replay old --lr 0.002 --min_lr 0.001 --warmup_steps 100 "
    "--lr_schedule wsd --decay_steps 200 --max_step 1000 --forgetting_budget replay:0.1 --tokens 9"
)


def whole_run(words=RUN):
    whole = choose.whole_of(by_flag(words.split()))
    whole.steps = 1000
    return whole


def advised(words=RUN):
    """The flags of the command that is advised."""
    return parse_train(shlex.split(whole_run(words).advised(0.285))[2:])


@pytest.mark.parametrize("share", [0.0, 0.285, 1.0])
def test_a_branch_is_the_run_in_small(tmp_path, share):
    words = whole_run().branch("one", tmp_path, share, 0.001, 50)
    flags = parse_train(words[2:])
    training = flags.training
    assert (training.max_step, training.warmup_steps, training.decay_steps) == (50, 5, 10)
    assert (training.lr, training.min_lr) == (0.001, 0.0005)
    mix = json.loads(flags.data.data_mix)["sources"].values()
    of_sources = [(source["path"], float(source["weight"])) for source in mix]
    assert of_sources == [("d", pytest.approx(1 - share)), ("old", share)]
    assert flags.checkpoint.resume == "auto" and flags.evaluation.forgetting_action == "warn"


def test_the_command_that_is_advised_steers():
    flags = advised()
    assert flags.evaluation.forgetting_action == "steer"
    assert flags.evaluation.eval_step_interval == 50 and flags.training.max_step == 1000
    assert "replay: {path: old, weight: '0.285'}" in flags.data.data_mix


def test_replay_without_a_budget_is_not_steered():
    flags = advised(RUN.replace("replay:0.1", "copy:0.2"))
    assert flags.evaluation.forgetting_action == "warn"
    assert "weight: '0.285'" in flags.data.data_mix


def test_the_flags_of_plan_alone_are_known():
    assert {*choose.PLAN, *choose.PRINTS} == declared(PlanArguments).keys()


def test_a_share_of_less_than_a_row_is_not_called_checked(tmp_path, capsys, monkeypatch):
    made = choose.Branches(whole_run(f"{RUN} --steer_bounds 0.01:0.9"), tmp_path, 20)
    made.whole.sequences, made.before = 4, {"new": 2.0, "replay": 1.0}

    def make(of, share, lr):
        made.made.append({"of": of, "share": share, "lr": lr, "losses": {"new": 1 + share}})
        made.made[-1]["losses"]["replay"] = 1.05 - 0.1 * share
        return made.made[-1]["losses"]

    monkeypatch.setattr(made, "make", make)
    choose.chosen(made, 0.001)
    assert "Begin with a share of 0.01, " in (out := capsys.readouterr().out)
    assert "though its branch was too short to read a row of 'replay'" in out


def test_branches_are_forecast_where_they_run(toys, monkeypatch):
    monkeypatch.setattr(choose, "may_have_gpu", lambda: False)
    given = {"--model_name": toys / "llama", "--train_data_dir": toys / "data", "--max_step": "100"}
    words = [str(word) for word in flags_of(given)]
    assert choose.planned(by_flag(words))["on"].endswith("CPU")


# ----------------------------------------------------------------------------------------- mistakes


def call(capsys, *words):
    """(exit code, stdout, stderr)"""
    return (ended(choose.main, *words), *capsys.readouterr())


def assert_one_sentence(words, said):
    """What `call` has given is this mistake, in one line."""
    code, out, error = said
    assert (code, out) == (2, "") and words in error and len(error.splitlines()) == 1, error


def flags_of(values):
    """The flags that have a value, each before it."""
    return [word for name, value in values.items() if value for word in (name, value)]


GOOD = {
    "--train_data_dir": "d", "--replay": "old", "--lr": "0.001", "--max_step": "1000",
    "--forgetting_budget": "replay:0.1",
}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"--replay": None}, "give both"),
        ({"--train_data_dir": None}, "give both"),
        ({"--forgetting_budget": None}, "give one, such as replay:0.05, and none of 0"),
        ({"--forgetting_budget": "replay:0"}, "none of 0"),
        ({"--forgetting_budget": "repaly:1"}, "no validation set is named 'repaly'. Did you mean"),
        ({"--forgetting_budget": "replay"}, "--forgetting_budget takes name:nats"),
        ({"--lr": None}, "give --lr"),
        ({"--lr": "null"}, "give --lr"),
        ({"--part": "2"}, "--part must be less than 1"),
        ({"--config": "/none/mine.yaml"}, "--config '/none/mine.yaml' can't be read: No such file"),
        ({"--forgetting_budget": "replay:0.1:max"}, "`:max` a run begins with the most replay"),
        ({"--checkpoint": "runs/a"}, "branches begin with --model_name"),
        (
            {"--forgetting_budget": "copy:0.1", "--forgetting_action": "steer"},
            "steering needs a budget for 'replay', and none for 'new'",
        ),
    ],
)
def test_each_mistake_is_one_sentence_before_anything_runs(changed, words, tmp_path, capsys):
    flags = {**GOOD, "--branches": tmp_path / "here", **changed}
    assert_one_sentence(words, call(capsys, *flags_of(flags)))
    assert not (tmp_path / "here").exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[a]", "holds no flags"),
        ("forgetting_budget: 5", "--forgetting_budget takes name:nats"),
        ("eval_data: [a=b]", "--eval_data"),
        ("steer_bounds: 0.5", "--steer_bounds takes"),
    ],
)
def test_a_file_of_other_types_is_one_sentence(text, words, tmp_path, capsys):
    (tmp_path / "run.yaml").write_text(text)
    flags = {**GOOD, "--config": tmp_path / "run.yaml"}
    if text.startswith("forg"):
        del flags["--forgetting_budget"]
    assert_one_sentence(words, call(capsys, *flags_of(flags)))


def test_the_part_that_is_advised_is_taken():
    for steps in (101, 103, 953, 9500, 10**6, *random.Random(0).sample(range(102, 9999), 50)):
        part = float(re.fullmatch("take --part (.*) or more", choose.longer(steps))[1])
        own = choose.parse("choose", "", [choose.ChooseArguments], ["--part", str(part)])
        assert round(own["part"] * steps / choose.BRANCHES) >= choose.MIN_STEPS
    assert choose.longer(100) == "5 branches need a run of more than 100 steps"


@pytest.mark.parametrize(
    "more",
    [
        "--save_step_interval 20 --async_save true",
        "--save_step_interval 500 --warmup_steps 999 --number_epochs 3",
        "--logger wandb --entity e --project p --mirror s3://b/p --mirror_timeout 5",
        "--profile 1:2 --keep_every 10 --eval_step_interval 100",
        "",
    ],
)
@pytest.mark.parametrize("steps", [20, 300])
def test_a_branch_warns_of_nothing_that_is_meant_for_the_run(more, steps, tmp_path):
    whole = whole_run(f"{RUN} {more}")
    flags = parse_train(whole.branch("b", tmp_path, 0.5, 0.001, steps)[2:])
    assert warned(flags, max_step=steps) == []


def test_phases_fit_into_a_branch():
    whole = whole_run(f"{RUN} --lr_schedule wsd --warmup_steps 300 --decay_steps 700")
    flags = parse_train(whole.branch("b", Path("branches"), 0.5, 0.001, 25)[2:])
    assert flags.training.warmup_steps + flags.training.decay_steps <= 25


def test_a_loss_may_be_no_number(tmp_path):
    (tmp_path / "STATUS.json").write_text(json.dumps({"code": 0, "state": "done", "step": 1}))
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "eval": {"new": {"loss": null}}}\n')
    [losses, _] = choose.measured(tmp_path)
    assert math.isnan(losses["new"])


def test_a_word_without_a_flag_is_refused(capsys):
    words = "choose: error: unexpected 'model': every flag is written --name value."
    assert_one_sentence(words, call(capsys, "model", "--lr", 1))


@pytest.mark.longer
@pytest.mark.parametrize(
    ("more", "words"),
    [
        (
            ("--max_step", 100),
            "each of 5 branches 0 steps, and fewer than 20 say nothing: 5 branches need a run of more "
            "than 100 steps.",
        ),
        (("--max_stpe", 100), "unknown flag --max_stpe. Did you mean --max_step?"),
        (("--lr", "fast"), "--lr takes a number, not 'fast'"),
        (("--second_lr", "0.001"), "--second_lr 0.001 is --lr"),
    ],
)
def test_what_plan_py_refuses_is_said_in_its_words(more, words, toys, tmp_path, capsys):
    flags = {**GOOD, "--model_name": toys / "llama", "--accelerator": "cpu"}
    flags |= {"--branches": tmp_path / "here"}
    assert_one_sentence(words, call(capsys, *flags_of(flags), *more))
    assert not (tmp_path / "here").exists()


# ------------------------------------------------------------------------------------ real branches

OWN = declared(choose.ChooseArguments)


def of_run(folder, model, branches, *more):
    words = "--max_step 400 --part 0.25 --precision 32-true --accelerator cpu --devices 1"
    data = ("--train_data_dir", folder / "new", "--replay", folder / "old", "--eval_batch_size", 8)
    words = ("--model_name", model, *data, *words.split(), "--branches", branches, *more)
    return [str(word) for word in words]


@pytest.mark.longer
def test_it_goes_on_where_it_was_killed_and_ends_the_same(base, tmp_path, capsys):  # noqa: F811
    def words(branches):
        sizes = "--lr 0.003 --global_batch_size 8 --micro_batch_size 8 --warmup_steps 40"
        more = "--save_step_interval 5 --price_per_hour 1e6 --run_name mine"
        budget = ("--forgetting_budget", "replay:0.3")
        return of_run(base, base / "base", branches, *sizes.split(), *more.split(), *budget)

    cut, undisturbed = tmp_path / "cut", tmp_path / "undisturbed"
    job = subprocess.Popen(
        [sys.executable, "-m", "fabric_llm.choose", *words(cut)], cwd=choose.drill.TRAIN.parent,
        start_new_session=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    first, second = cut / "share-0-lr-0.003", cut / "share-0.5-lr-0.003"
    deadline = time.monotonic() + 120
    while not (second / "step-00000005").exists() and time.monotonic() < deadline:
        time.sleep(0.001)
    os.kill(job.pid, signal.SIGKILL)
    assert job.wait() == -signal.SIGKILL
    done = (first / "metrics.jsonl").stat().st_mtime_ns
    assert json.loads((second / "STATUS.json").read_text())["code"] is None, "killed in its middle"

    code, out, error = call(capsys, *words(cut))
    assert code == 0, error
    assert out.startswith("5 branches of 20 steps, 25.0 % of the run: ") and " for them" in out
    assert "Branch share-0-lr" not in out and "Branch share-0.5-lr-0.003\n" in out
    assert (first / "metrics.jsonl").stat().st_mtime_ns == done
    assert '"resumed"' in (second / "events.jsonl").read_text(), "from its last checkpoint"
    assert (cut / "choose.png").read_bytes().startswith(b"\x89PNG")

    # Undisturbed runs of the same flags have the same losses, to the last bit.
    choice, given = json.loads((cut / "choose.json").read_text()), by_flag(words(cut))
    whole = choose.whole_of({name: given[name] for name in given if name not in OWN})
    whole.steps = 400
    for one in choice["branches"]:
        name = f"share-{one['share']:g}-lr-{one['lr']:g}"
        train_ranks(1, *whole.branch(name, undisturbed, one["share"], one["lr"], 20)[2:])
        assert choose.measured(undisturbed / name) == (choice["before"], one["losses"])
    # What is printed is what the branches have logged.
    check = choice["branches"][-1]
    assert check["of"] == "check" and check["share"] == choice["share"]
    error = check["losses"]["replay"] - choice["predicted"]["replay"]
    assert f"{error:+.4f}" in out.split("its error")[1].splitlines()[0]
    assert abs(error) <= 0.06 and "no promise for 400" in out
    is_above = check["losses"]["replay"] - choice["before"]["replay"] > 0.3
    assert ("though its branch came to replay +" in out) == is_above
    rise = choice["predicted"]["replay"] - choice["before"]["replay"]
    assert 0.28 < rise <= 0.3, "what the budget allows is used"
    # The command is a run that train.py begins.
    advised = parse_train(shlex.split(out.split("Next: ")[1])[2:])
    check_training(advised)
    assert advised.evaluation.forgetting_action == "steer"

    # Another run's branches aren't taken for its own.
    choose.Branches(whole, undisturbed, 20)
    whole.values["weight_decay"] = "0"
    with pytest.raises(ValueError, match="has branches of a run with other flags"):
        choose.Branches(whole, undisturbed, 20)


def far_too_fast(folder, toys, budget):
    """The flags of a model that has learned nothing, batches of one row, and a rate that is far too
    high."""
    for name in ("old", "new"):
        language(folder, name)
    noisy = "--lr 3e-2 --global_batch_size 1 --micro_batch_size 1 --warmup_steps 40"
    more = (*noisy.split(), "--forgetting_budget", budget)
    return of_run(folder, toys / "llama", folder / "branches", *more)


@pytest.mark.slow
def test_it_doesnt_know_where_the_branches_are_noise(toys, tmp_path, capsys):
    code, out, error = call(capsys, *far_too_fast(tmp_path, toys, "replay:0.1"))
    choice = json.loads((tmp_path / "branches" / "choose.json").read_text())
    assert code == 1 and "it doesn't know: at a share of" in error and "Next:" not in out, out
    assert len(error.splitlines()) == 1
    of_check = choice["branches"][-1]["losses"]["replay"]
    assert abs(of_check - choice["predicted"]["replay"]) > 0.02


@pytest.mark.slow
def test_no_share_keeps_a_budget_that_all_branches_exceed(toys, tmp_path, capsys):
    code, out, error = call(capsys, *far_too_fast(tmp_path, toys, "replay:0.001"))
    assert code == 76 and "no share keeps the budgets even for 20 steps" in error, out
    assert (tmp_path / "branches" / "choose.png").is_file() and "the law" not in out
