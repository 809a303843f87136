"""--forgetting_action steer: a run that changes the shares of its sources at each evaluation, so that
it ends within its budgets. Its mixture stays exact, elastic and verified by row."""

import json
import random
import re
import shutil
from fractions import Fraction

import pytest
from ranks import Job, lines, metrics, train_ranks
from test_forgetting import base, evaluated, language, replayed  # noqa: F401

from fabric_llm.checkpoint.keep import Progress, read_progress
from fabric_llm.data.mixed_rows import places_at
from fabric_llm.data.mixture import Mixture
from fabric_llm.data.mixture_text import DataMix, Source, mix_of, parse
from fabric_llm.data.periods import Stage
from fabric_llm.data.stages import lay_out
from fabric_llm.plan.checks import check_training
from fabric_llm.plan.schedule import FINEST, Schedule, _shares_of_hard_budgets
from fabric_llm.training.forgetting import MARGIN, MAX_CHANGE, Forgetting, parse_bounds
from fabric_llm.verify import __main__ as verify
from parse_arguments import parse_train

BUDGET = 0.3
STEER = ("--forgetting_action", "steer", "--forgetting_budget", f"replay:{BUDGET}")


# ------------------------------------------------------------------------------------ its arithmetic


def test_a_share_moves_by_what_is_left_of_the_budget():
    forgetting = Forgetting({"old": 0.2}, "steer")
    forgetting.accept_evaluation(0, {"old": 2.0, "new": 5.0})
    aim = (1 - MARGIN) * 0.2

    def moved(rise):
        return forgetting.steered({"old": 2.0 + rise, "new": 4.0}, {"old": 0.5, "new": 0.5})["old"]

    assert moved(0.0) == pytest.approx(0.5 - MAX_CHANGE)
    assert moved(-1.0) == pytest.approx(0.5 - MAX_CHANGE), "what was learned gives no more room"
    assert moved(aim) == pytest.approx(0.5)
    assert moved(2 * aim) == moved(9.0) == pytest.approx(0.5 + MAX_CHANGE)
    assert moved(float("nan")) == pytest.approx(0.5 + MAX_CHANGE)
    assert moved(aim / 2) == pytest.approx(0.5 - MAX_CHANGE / 2)
    for evaluations, change in ((10, 0.2), (24, 0.2), (48, 0.1), (240, 0.02)):
        of_one = forgetting.steered({"old": 2.0}, {"old": 0.5}, 1 / evaluations)
        assert of_one["old"] == pytest.approx(0.5 - change), "as much in all, however often"


def test_all_sources_answer_for_a_set_that_is_none():
    forgetting = Forgetting({"old": 0.2, "code": 0.2, "copy": 1.0}, "steer")
    forgetting.accept_evaluation(0, {"old": 2.0, "code": 2.0, "copy": 3.0})
    shares = {"new": 0.5, "old": 0.25, "code": 0.25}
    losses = {"old": 2.0, "code": 9.0, "copy": 3.0 + 1.5 * (1 - MARGIN)}
    steered = forgetting.steered(losses, shares)
    half, whole = MAX_CHANGE / 2, MAX_CHANGE
    assert steered == pytest.approx({"old": 0.25 + half, "code": 0.25 + whole})


@pytest.mark.parametrize("seed", range(8))
def test_a_steered_mixture_is_exact_in_each_of_its_stages(seed):
    """Counted row by row: each source has its share of a stage within one row, and is read in its
    own order over all stages, nothing twice before all of it once."""
    draw = random.Random(seed)
    names = ["new", "old", "code"][: draw.choice([2, 3])]
    rows = tuple(draw.randint(200, 900) for _ in names)
    weights = [draw.randint(1, 9) for _ in names]
    mix = parse(",".join(f"{n}=/d/{n}:{w}" for n, w in zip(names, weights)))
    stages, end, last = lay_out(mix, rows, 8, 300, 1)
    contexts = (32,) * len(names)
    mixture = Mixture(tuple(names), rows, contexts, stages, seed)
    now = Schedule(Progress(), 8, 1, 8, 300, 1, mix, mixture, last, end, {}, True)
    there, steered = Progress(), names[1:]
    low, high = parse_bounds(draw.choice(["0:0.9", "0.05:0.5", "0.1:0.3"]))
    for _ in range(12):
        for _ in range(draw.randint(1, 9)):
            there = now.after(there)
        shares = {name: draw.uniform(-0.3, 1.2) for name in steered}
        now = now.steered(shares, (low, high), there)
        found = now.mixture.shares_at(there.position)
        assert sum(found.get(name, 0) for name in steered) <= high + 1e-9
        if len(steered) * low <= high:
            assert all(found.get(name, 0) >= float(low) - 1 / FINEST for name in steered)
        # What was read so far stays what it was.
        assert now.mixture.read_before(there.position).keys() == set(names)
    total = now.end_of_run()
    begins = [stage.begins for stage in now.mixture.stages] + [total]
    read: dict[int, list[int]] = {source: [] for source in range(len(names))}
    import numpy as np

    sources, numbers = places_at(now.mixture, np.arange(total))
    for stage, first, after in zip(now.mixture.stages, begins, begins[1:]):
        share = [Fraction(weight, sum(stage.weights)) for weight in stage.weights]
        for position in range(first, after):
            counted = np.bincount(sources[first : position + 1], minlength=len(names))
            for source, count in enumerate(counted):
                assert abs(count - share[source] * (position + 1 - first)) < 1
    for source, number in zip(sources, numbers):
        read[int(source)].append(int(number))
    assert all(of_source == [*range(len(of_source))] for of_source in read.values())


@pytest.mark.parametrize("bounds", ["0:0.9", "0.05:0.777", "0:0.51"])
def test_a_share_follows_however_close_evaluations_are(bounds):
    """A quarter of a run with half of the budget used, evaluated 6 to 600 times: shares end where
    the arithmetic without rounding does."""
    forgetting, names = Forgetting({"old": 0.2, "code": 0.2}, "steer"), ("new", "old", "code")
    forgetting.accept_evaluation(0, dict.fromkeys(names, 2.0))
    losses = {"new": 2.0, "old": 2.0 + 0.1 * (1 - MARGIN), "code": 2.0 + 0.4}
    mix, low, high = parse("new=/d/n:30,old=/d/o:40,code=/d/c:1"), *parse_bounds(bounds)
    stages, end, last = lay_out(mix, (10**6,) * 3, 8, 2400, 1)
    mixture = Mixture(names, (10**6,) * 3, (32,) * 3, stages, 1)
    begin = Schedule(Progress(), 8, 1, 8, 2400, 1, mix, mixture, last, end, {}, True)
    for apart in (1, 5, 100):
        now, there = begin, Progress()
        old, code = 40 / 71, 1 / 71
        for _ in range(600 // apart):
            there = Progress(there.step + apart, there.position + 8 * apart)
            shares = forgetting.steered(losses, now.shares_to_steer(there.position), apart / 2400)
            now = now.steered(shares, (low, high), there)
            change = MAX_CHANGE * min(1, apart / 100)
            room = float(high - 2 * low)
            of_old = max(0, min(room, old - change / 2 - float(low)))
            of_code = max(0, min(room, code + change - float(low)))
            scale = min(1, room / (of_old + of_code))
            old, code = float(low) + of_old * scale, float(low) + of_code * scale
        found = now.mixture.shares_at(there.position)
        assert abs(found.get("old", 0) - old) < 1 / FINEST and abs(found["code"] - code) < 1 / FINEST
        assert found.get("old", 0) + found["code"] <= float(high) + 1e-9


@pytest.mark.parametrize("given", ["0.5", "0:1", "-1:0.5", "a:b", "0.1:0.1", "nan:1"])
def test_bounds_are_checked(given):
    with pytest.raises(ValueError, match="--steer_bounds"):
        parse_bounds(given)


# ------------------------------------------------------------------------------------------ its runs


def steered(base, output, *more, steps=60):  # noqa: F811
    return replayed(
        base, output, *STEER, "--max_step", steps, "--eval_step_interval", 3,
        "--save_step_interval", 10, "--lr_schedule", "cosine", *more, share=0.3,
    )  # fmt: skip


@pytest.mark.longer
def test_a_steered_run_ends_within_its_budget_and_its_rows_are_verified(base, tmp_path):  # noqa: F811
    job = Job(1, *steered(base, tmp_path))
    assert job.wait(120) == [0], job.output
    run = tmp_path / "run"
    forgotten = evaluated(run, "replay", "forgotten")
    assert f"Forgotten: replay {forgotten[-1]:+.4f} of {BUDGET:g} nats\n" in job.output[0]
    losses = {name: evaluated(run, name, "loss") for name in ("new", "replay", "copy")}
    ends = [f"{name} {all[0]:.4f} -> {all[-1]:.4f}" for name, all in losses.items()]
    assert f"\nValidation loss: {', '.join(ends)}\n" in job.output[0]
    assert 0.5 * BUDGET < forgotten[-1] <= BUDGET
    shares = [line["shares"].get("replay", 0.0) for line in lines(run, "eval")]
    assert len(set(shares)) > 5, "the share follows the rise"
    assert (run / "events.jsonl").read_text().count('"stage"') > 5
    assert verify.main([str(run)]) == 0


@pytest.mark.longer
@pytest.mark.parametrize(
    "ranks, kills",
    [(2, 6), *(pytest.param(ranks, 20, marks=pytest.mark.slow) for ranks in (1, 2, 4))],
)
def test_a_steered_run_that_is_killed_goes_on_to_the_same_end(base, tmp_path, ranks, kills):  # noqa: F811
    more = ("--micro_batch_size", 8 // ranks)
    if ranks > 1:
        more += ("--strategy", "fsdp2")
    # A job makes 20 steps or so before it is killed, so that the run isn't over before the last.
    words = steered(base, tmp_path / "cut", *more, "--resume", "auto", steps=30 * kills)
    whole = steered(base, tmp_path / "whole", *more, steps=30 * kills)
    train_ranks(ranks, *whole, timeout_seconds=600)
    draw = random.Random(ranks)
    for _ in range(kills):
        name, most = draw.choice([("between_steps", 30), ("evaluate", 20), ("publish.done", 3)])
        point = f"{name}:count={draw.randint(1, most)}:do={draw.choice(['kill', 'term'])}"
        assert any(Job(ranks, *words, failpoint=point).wait(120)), point
    last = Job(ranks, *words)
    assert last.wait(600) == [0] * ranks, last.output
    cut, whole = tmp_path / "cut" / "run", tmp_path / "whole" / "run"
    for key in ("step", "loss", "sources", "eval", "shares"):
        assert metrics(cut, key) == metrics(whole, key), key
    assert verify.main([str(cut)]) == 0


@pytest.mark.longer
@pytest.mark.parametrize("begins", [0.5, 0.4])
def test_an_evaluation_that_was_cut_off_is_steered_by_where_a_stage_begins(base, tmp_path, begins):  # noqa: F811
    """After step 30 of 60 the run is asked to stop, in the middle of its evaluation. It makes that
    when it resumes, is killed, and finds it in the log."""
    language(tmp_path, "new", rows=200)
    # Without the third source, a stage of --data_mix would be the one before it.
    sources = {"new": {"path": str(base / "new"), "weight": 7}}
    sources["replay"] = {"path": str(base / "old"), "weight": 3}
    sources["more"] = {"path": str(tmp_path / "new")}
    mix = tmp_path / "mix.yaml"
    stage = {"from": begins, "weights": {"new": 3, "more": 3, "replay": 4}}
    mix.write_text(json.dumps({"sources": sources, "stages": [stage]}))

    def words(output):
        given = steered(base, output, "--resume", "auto")
        at = given.index("--train_data_dir")
        given[given.index(f"replay:{BUDGET}")] = "replay:0.8"  # within the bounds at step 30
        return [*given[:at], "--data_mix", mix, *given[at + 6 :]]

    code = Job(1, *words(tmp_path / "whole")).wait(120)
    evaluations = lines(tmp_path / "whole" / "run", "eval")
    shares = {line["step"]: line["shares"].get("replay", 0.0) for line in evaluations}
    assert shares[30] != shares[33], "what is steered after step 30 is read from there on"
    cut = words(tmp_path / "cut")
    assert Job(1, *cut, failpoint="between_steps:count=30:do=term").wait(120) == [75]
    at_30 = tmp_path / "cut" / "run" / "step-00000030" / "trainer" / "progress.json"
    assert json.loads(at_30.read_text())["eval_losses"] is None
    assert Job(1, *cut, failpoint="between_steps:count=1:do=kill").wait(120) == [-9]
    assert Job(1, *cut).wait(120) == code
    for key in ("step", "loss", "sources", "eval", "shares"):
        one, two = (metrics(tmp_path / name / "run", key) for name in ("whole", "cut"))
        assert one == two, key


@pytest.mark.longer
def test_a_run_that_has_made_the_model_worse_says_so(base, tmp_path):  # noqa: F811
    for lr in (3e-3, 1):
        output = tmp_path / str(lr)
        job = Job(1, *replayed(base, output, "--max_step", 8, "--lr", lr, share=0.3))
        assert job.wait(120) == [0], job.output
        before, *_, after = metrics(output / "run", "eval_loss")
        said = re.findall("the validation loss is (.*) above", job.output[0])
        assert said == ([f"{after - before:.4f}"] if after > before else []), (before, after)
        assert (after > before) == (lr == 1)


@pytest.mark.longer
def test_sources_answer_for_sets_that_are_none(base, tmp_path):  # noqa: F811
    """The old text under another name, as a set that is evaluated only, steers as it does as a
    source."""
    words = steered(base, tmp_path / "one")
    train_ranks(1, *words)
    words = steered(base, tmp_path / "two", "--eval_data", f"other={base}/old")
    words[words.index(f"replay:{BUDGET}")] = f"replay:9,other:{BUDGET}"
    train_ranks(1, *words)
    one, two = (metrics(tmp_path / name / "run", "shares") for name in ("one", "two"))
    assert one == two


@pytest.mark.longer
def test_a_hard_budget_holds_at_every_evaluation_or_the_run_ends(base, tmp_path):  # noqa: F811
    words, ended = steered(base, tmp_path), []
    for budget in (0.9, 0.1):
        words[words.index("--run_name") + 1] = f"run-{budget}"
        words[words.index("--forgetting_budget") + 1] = f"replay:{budget}:max"
        [code] = Job(1, *words).wait(120)
        run = tmp_path / f"run-{budget}"
        forgotten = evaluated(run, "replay", "forgotten")
        assert metrics(run, "shares")[0]["replay"] == 0.9, "it begins with as much as is allowed"
        assert all(rise <= budget for rise in forgotten[:-1])
        assert (code == 76) == (forgotten[-1] > budget)
        ended.append(code)
    assert ended == [0, 76]


@pytest.mark.longer
def test_a_steered_run_goes_on_with_another_number_of_ranks(base, tmp_path):  # noqa: F811
    train_ranks(1, *steered(base, tmp_path))
    shutil.copytree(tmp_path / "run", tmp_path / "again" / "run")
    at = tmp_path / "again" / "run" / "step-00000030"
    words = steered(base, tmp_path / "again", "--strategy", "fsdp2", "--resume", "true")
    train_ranks(2, *words, "--checkpoint", at)
    one, two = tmp_path / "run", tmp_path / "again" / "run"
    assert metrics(one, "loss") == pytest.approx(metrics(two, "loss"), rel=1e-4)
    segments = [read_progress(run / "step-00000040")["mixture"]["segments"] for run in (one, two)]
    assert segments[0] == segments[1]


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"--forgetting_budget": "old:0"}, "each above 0"),
        ({"--forgetting_budget": "new:1,old:1,code:1"}, "none is left whose share could fall"),
        ({"--forgetting_budget": "old:1e400"}, "takes name:nats"),
        ({"--forgetting_budget": "copy:1"}, "'copy' is no source"),
        ({"--forgetting_budget": "copy:1"}, "One that has a budget, too, answers for 'copy'."),
        ({"--max_step": "null"}, "needs --max_step"),
        ({"--data_mix": "new=d/new:0.5,old=d/old:0.5:2"}, "leave its max_epochs"),
        ({"--steer_bounds": "0.5:0.6", "--forgetting_budget": "old:1,code:1"}, "2 sources"),
        ({"--forgetting_action": "stop", "--forgetting_budget": "old:1:max"}, "`:max` belongs to"),
    ],
)
def test_what_cannot_be_steered_is_refused(changed, sentence):
    given = {
        "--data_mix": "new=d/new:0.5,old=d/old:0.3,code=d/code:0.2", "--model_name": "d/model",
        "--forgetting_action": "steer", "--forgetting_budget": "old:1", "--max_step": "100",
        "--eval_step_interval": "10", **changed,
    }  # fmt: skip
    parsed = parse_train([word for pair in given.items() for word in pair])
    with pytest.raises(ValueError, match=re.escape(sentence)):
        check_training(parsed)


def test_a_later_stage_with_nothing_but_budgeted_sources_is_refused(tmp_path):
    sources = {name: {"path": f"d/{name}", "weight": 1} for name in ("new", "old")}
    file = tmp_path / "mix.yaml"
    file.write_text(json.dumps({"sources": sources, "stages": [{"from": 0.5, "weights": {"old": 1}}]}))
    words = ["--data_mix", str(file), "--model_name", "d/model", "--forgetting_action", "steer"]
    words += ["--forgetting_budget", "old:1", "--max_step", "100", "--eval_step_interval", "10"]
    with pytest.raises(ValueError, match="all sources of the stage from 0.5 on have a budget"):
        check_training(parse_train(words))


@pytest.mark.parametrize(
    ("budgets", "expected"),
    [
        ("old:1:max", {"old": "4/5"}),
        ("old:1:max,code:1", {"old": "7/10", "code": "1/10"}),
        ("code:1:max,old:1:max", {"old": "2/5", "code": "2/5"}),
        ("old:1,code:1,copy:1:max", {"old": "2/5", "code": "2/5"}),
        ("old:1,code:1", {}),
    ],
)
def test_the_sources_of_hard_budgets_begin_with_what_the_bounds_leave(budgets, expected):
    words = "--data_mix new=d/new:0.6,old=d/old:0.3,code=d/code:0.1 --model_name d/model"
    words += f" --forgetting_action steer --forgetting_budget {budgets} --steer_bounds 0:0.8"
    parsed = parse_train(words.split())
    mix = mix_of(parsed.data.data_mix, None)
    shares = _shares_of_hard_budgets(parsed, mix)
    assert shares == {name: Fraction(share) for name, share in expected.items()}


def test_a_later_stage_of_longer_rows_keeps_its_shares():
    """Its sources can't be tried before it begins."""
    names, contexts, rows = ("new", "old", "new8k", "old8k"), (64, 64, 512, 512), (4000,) * 4
    sources = tuple(Source(name, f"/d/{name}") for name in names)
    long = Stage(Fraction(4, 5), (0, 0, 7, 3))
    mix = DataMix(sources, (Stage(Fraction(0), (7, 3, 0, 0)), long))
    stages, end, last = lay_out(mix, rows, 8, 100, 1)
    mixture = Mixture(names, rows, contexts, stages, 1)
    now = Schedule(Progress(), 8, 1, 8, 100, 1, mix, mixture, last, end, {}, True)
    forgetting = Forgetting({"old": 0.2, "old8k": 0.2}, "steer")
    forgetting.accept_evaluation(0, {"old": 2.0, "old8k": 2.0})
    there = Progress()
    for _ in range(20):
        there = now.after(there)
    shares = forgetting.steered({"old": 2.0, "old8k": 2.1}, now.shares_to_steer(there.position))
    now = now.steered(shares, parse_bounds("0:0.9"), there)
    assert shares.keys() == {"old"}
    assert now.mixture.stages[-1].weights == (0, 0, 7, 3)


@pytest.mark.longer
def test_a_request_to_stop_above_the_budget_is_a_stop(base, tmp_path):  # noqa: F811
    words = steered(base, tmp_path, "--forgetting_budget", "replay:0.001")
    stopped = Job(1, *words, failpoint="between_steps:count=8:do=term")
    assert stopped.wait(120) == [75], stopped.output
    assert evaluated(tmp_path / "run", "replay", "forgotten")[-1] > 0.001
    (tmp_path / "run-2").mkdir()
    assert Job(1, *words, "--resume", "true").wait(120) == [76]
    status = json.loads((tmp_path / "run" / "STATUS.json").read_text())
    assert status["step"] == status["last_durable_step"] > 0
    again = re.search("Start again: python (train.py .*)", status["reason"])[1].split()
    assert "run-3" in again and not parse_train(again[1:]).checkpoint.resume, "by itself"


@pytest.mark.longer
def test_without_room_it_ends_in_the_last_third(base, tmp_path):  # noqa: F811
    more = ("--steer_bounds", "0:0.1", "--lr", 1e-2, "--lr_schedule", "constant")
    [code] = Job(1, *steered(base, tmp_path, *more)).wait(120)
    assert code == 76
    *_, last = lines(tmp_path / "run", "eval")
    assert 40 < last["step"] == metrics(tmp_path / "run", "step")[-1] < 60
    assert last["shares"]["replay"] == 0.1, "the largest share was tried"
