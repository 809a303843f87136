"""`python -m fabric_llm.report`: what the page says of runs of every kind, and that it opens in a
browser without a network."""

import errno
import html.parser
import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import CONTEXT
from ranks import run_ranks, toy_run, train_ranks
from test_guard import train_with_faults

from fabric_llm.report import __main__ as command
from fabric_llm.report import figures, page, reading

pytest.importorskip("plotly", reason="plotly isn't installed: pip install -e '.[report]'")
ROOT = Path(__file__).parent.parent
HOSTILE = (
    "</script><script>alert(1)</script><img src=http://127.0.0.1/x "
    "onerror=alert(2)>'\"&\u2028<b>%{x}"
)
LARGEST_BYTES = 8_000_000
REWINDS = """--output_dir {output} --run_name run --devices 1 --global_batch_size 4
--save_step_interval 4 --spike_threshold 6 --spike_action rewind"""


class Page(html.parser.HTMLParser):
    """Tags with their attributes, the text that is seen, and the data of a page."""

    def __init__(self, file):
        super().__init__()
        self.tags, self.words, self.inside = [], [], []
        self.feed(file.read_text())
        self.content = file.read_text()
        said = self.content.split('<script type="application/json" id="page-data">')[1]
        self.data = json.loads(said.split("</script>")[0])

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self.inside.append(tag)

    def handle_endtag(self, tag):
        if tag in self.inside:
            while self.inside.pop() != tag:
                pass

    def handle_data(self, data):
        if not {"script", "style"} & set(self.inside):
            self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())

    def traces(self, name):
        return next(chart["traces"] for chart in self.data["charts"] if chart["name"] == name)

    def lines(self, name):
        return [
            {
                "set": html.unescape(trace["name"]),
                "is_trend": trace.get("hoverinfo") == "skip",
                "dash": trace["line"]["dash"],
                "x": trace["x"],
                "y": trace["y"],
            }
            for trace in self.traces(name)
        ]

    def events(self):
        """The rows of the table of events, each with its step, kind and words."""
        table = re.search(r'aria-label="Events">.*?</table>', self.content, re.S)[0]
        rows = [re.findall(r"<td[^>]*>(.*?)</td>", row, re.S) for row in table.split("<tr>")]
        return [
            {"kind": kind.lower(), "x": int(step.replace(",", "")), "words": html.unescape(words)}
            for *_, step, _, kind, words in filter(None, rows)
        ]

    def names(self):
        return [chart["name"] for chart in self.data["charts"]]


def training(step, **more):
    numbers = {"loss": 9.0 / step, "lr": 1e-3 / step, "grad_norm": 1.0 + step % 3}
    numbers |= {"tokens": 2048 * step, "tokens_per_second": 4000.0, "peak_memory_gib": 0.5}
    numbers |= {"updated_fraction": 1.0}
    return {"step": step, **numbers, "data_seconds": 0.01, "wait_seconds": 0.02, **more}


def made(folder, lines, *, flags=None, status=None, events=(), samples=()):
    """A run directory, written by hand."""
    folder.mkdir(parents=True)
    kept = {"model_name": "m", "train_data_dir": "d", "lr": 1e-3}
    kept |= {"global_batch_size": 8, "context_length": 256}
    (folder / "arguments.yaml").write_text(json.dumps({**kept, **(flags or {})}))
    said = {"code": 0, "reason": "done", "step": lines[-1]["step"] if lines else None}
    said |= {"last_durable_step": None}
    (folder / "STATUS.json").write_text(json.dumps({**said, **(status or {})}))
    for name, many in (("metrics", lines), ("events", events), ("samples", samples)):
        if many:
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in many))
    return folder


def report(*folders, output=None, code=0, more=()):
    output = output or folders[0] / "report.html"
    assert command.main([*map(str, folders), "--output", str(output), *more]) == code
    return Page(output)


def evaluation(step, tokens, loss, **sets):
    return {"step": step, "tokens": tokens, "eval_loss": loss, "eval": sets}


EVALUATIONS = [
    evaluation(
        0, 0, 3.0,
        general={"loss": 2.0},
        code={"loss": 4.0, "bits_per_byte": 1.5},
        copy={"loss": 1.0},
    ),
    evaluation(
        20, 40960, 2.5,
        general={"loss": 2.1, "forgotten": 0.1, "budget": 0.05, "perplexity": 8.2},
        code={"forgotten": -1.1, "loss": 2.9, "bits_per_byte": 1.1},
        copy={"loss": 0.5},
    ),
]


# ----------------------------------------------------------------------- what is shown of which run


@pytest.mark.longer
def test_a_real_run_that_was_resumed(toys, tmp_path):
    flags = [*toy_run(toys, tmp_path), *"--run_name run --global_batch_size 4".split()]
    flags += "--eval_iters 1 --lr 1e-2 --max_step 4 --save_step_interval 2".split()
    train_ranks(1, *flags)
    run = tmp_path / "run"
    shutil.rmtree(run / "step-00000004")
    train_ranks(1, *flags, "--resume", "true")
    shown = report(run)
    [line] = shown.lines("loss")
    logged = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    training_lines = [one for one in logged if "loss" in one]
    assert line["x"] == [1, 2, 3, 4]
    assert line["y"] == pytest.approx([one["loss"] for one in training_lines], rel=1e-5)
    assert [line["set"] for line in shown.lines("eval_loss")] == ["validation"]
    kinds = [event["kind"] for event in shown.events()]
    assert kinds == ["started", "saved", "resumed", "saved", "done", "saved", "done"]
    assert [mark["x0"] for mark in shown.data["marks"]] == [2], "a line where it was resumed"
    assert "LlamaForCausalLM" in shown.text and "4 of 4" in shown.text


@pytest.mark.longer
def test_a_rewind_stages_and_an_average_are_drawn(toys, tmp_path):
    paths = {"new": toys / "many", "old": toys / "data"}
    sources = {name: {"path": str(path), "weight": 0.5} for name, path in paths.items()}
    stages = [{"from": 0.5, "weights": {"new": 0.25, "old": 0.75}}]
    (tmp_path / "mix.yaml").write_text(json.dumps({"sources": sources, "stages": stages}))
    flags = f"--model_name {toys}/gpt2-no-dropout --data_mix {tmp_path}/mix.yaml".split()
    flags += REWINDS.format(output=tmp_path).split()
    flags += "--micro_batch_size 1 --lr 1e-4 --max_step 16 --eval_step_interval 4".split()
    flags += "--eval_iters 1 --ema_decay 0.9 --log_step_interval 10".split()
    spike = {0: range(4 * 13, 4 * 14)}  # step 14
    assert run_ranks(1, train_with_faults, flags, spike, 100.0) == [0]
    shown = report(tmp_path / "run")
    [kept] = shown.lines("loss")
    assert kept["x"] == [1, 4, 8, 10, 12, 16]
    read = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-2])["sources"]
    assert sum(one["tokens"] for one in read.values()) == 4 * 18 * CONTEXT
    for words in ("step 16 of 16", "with pauses", "Faint lines"):
        assert words in shown.text
    sets = [line["set"] for line in shown.lines("eval_loss")]
    assert sets == ["all sets, weighted", "new", "old", reading.AVERAGE]
    assert re.search(r"best \d\.\d+ at step 1[0-6]; before step 10 it had other shares", shown.text)
    kinds = {event["kind"]: event for event in shown.events()}
    shares = {line["set"]: line["y"] for line in shown.lines("share")}
    assert (shares["new"][0], shares["new"][-1], shares["old"][-1]) == (0.5, 0.25, 0.75)
    assert kinds["stage"]["x"] == 8 and kinds["stage"]["words"] == "from here on new 25 %, old 75 %"
    assert [mark["x0"] for mark in shown.data["marks"]] == [8, 12], "the stage and the rewind"
    row = r"12 20\d\d-\d\d-\d\d \d\d:\d\d:\d\d Rewound [^;]*; at sequence 56; 192 tokens discarded"
    assert re.search(row, shown.text), "with a time"


def test_evaluations_with_sets_budgets_and_a_copy_probe(tmp_path):
    lines = [EVALUATIONS[0], *(training(step) for step in range(1, 21)), EVALUATIONS[1]]
    shown = report(made(tmp_path / "run", lines))
    losses = {one["set"]: one["y"] for one in shown.lines("eval_loss")}
    assert list(losses) == ["all sets, weighted", "code", "general"]
    assert list(losses.values()) == [[3.0, 2.5], [4.0, 2.9], [2.0, 2.1]]
    forgetting = {one["set"]: one["y"] for one in shown.lines("forgetting")}
    assert forgetting == {"general": [0.1], "budget of general": [0.05]}, "only code has no budget"
    [copy] = shown.lines("copy")
    assert copy["y"] == [1.0, 0.5] and shown.lines("eval_bits_per_byte")[0]["y"] == [1.5, 1.1]
    assert ("span", {"class": "stopped"}) in shown.tags
    assert ("dd", {"class": "figure long"}) in shown.tags
    assert "general is 0.1000 nats above" in shown.text
    drawn = [one for name in ("eval_loss", "forgetting", "copy") for one in shown.lines(name)]
    dashes = {(one["set"], one["dash"]) for one in drawn}
    assert len({name for name, _ in dashes}) == len(dashes) == 5, "one dash of a set, everywhere"


def test_a_probe_of_retrieval_is_drawn_by_the_length_of_the_text(tmp_path):
    said = {"loss": 4.0, "accuracy": 0.6, "accuracy_of_64": 0.75, "accuracy_of_2048": 0.5}
    said |= {"accuracy_of_64_at_10": 0.1}
    first, last = (evaluation(n, n, 3.0, validation={"loss": 3.0}, retrieval=said) for n in (0, 1))
    shown = report(made(tmp_path / "run", [first, training(1), last]))
    found = {one["set"]: one["y"] for one in shown.lines("retrieval")}
    assert found.pop("retrieval from 64 tokens") == [0.75] * 2
    assert found == {"retrieval from 2,048 tokens": [0.5] * 2}
    assert [one["set"] for one in shown.lines("copy")] == ["retrieval"], "its loss"


def test_the_last_evaluation_says_whether_a_budget_is_exceeded(tmp_path):
    """The report took the last line that had a budget, which a resumed run may have left out, and
    took a loss that is NaN for one inside of it."""
    first, second = json.loads(json.dumps(EVALUATIONS))
    lines = [first, *(training(step) for step in range(1, 21)), second]
    later = {"step": 21, "eval_loss": 2.4, "eval": {"general": {"loss": 2.1}}}
    without = report(made(tmp_path / "without", [*lines, training(21), later]))
    assert ("span", {"class": "good"}) in without.tags and "nats above" not in without.text
    numbers = {"loss": None, "forgotten": None, "budget": 0.05}
    later["eval"] = {"general": numbers}
    nan = report(made(tmp_path / "nan", [*lines, training(21), later]))
    assert "general is nan nats above" in nan.text
    # The same of the rows that it read: a line without them is of all.
    lines[0]["eval"]["general"] |= {"rows": 3, "of_rows": 9}
    run = made(tmp_path / "all", [*lines, training(21), later])
    assert reading.parts_read(reading.read_run(run)) == []


def test_a_mixture_without_budgets_shows_what_is_forgotten_of_each_source(tmp_path):
    read = {"new": {"tokens": 1536, "epochs": 0.5}, "old": {"tokens": 512, "epochs": 0.01}}
    base = {"new": {"loss": 6.0, "forgotten": 0.0}, "old": {"loss": 4.0, "forgotten": 0.0}}
    lines = [{"step": 0, "eval_loss": 5.0, "eval": base}]
    lines += [training(1, sources=read), training(2, sources=read)]
    then = {"new": {"loss": 4.5, "forgotten": -1.5}, "old": {"loss": 4.1, "forgotten": 0.1}}
    lines += [{"step": 2, "eval_loss": 4.0, "eval": then}]
    flags = {"train_data_dir": None, "data_mix": "new=data/new:0.75:4,old=data/old:0.25"}
    shown = report(made(tmp_path / "run", lines, flags=flags))
    forgetting = {one["set"]: one["y"] for one in shown.lines("forgetting")}
    assert forgetting == {"new": [0, -1.5], "old": [0, pytest.approx(0.1)]}
    assert [one["set"] for one in shown.lines("sources_epochs")] == ["new", "old"]
    assert "trained on new, old" in shown.text and "data/new:0.75:4" in shown.text


def test_verdicts_kills_stops_and_other_devices_are_events(tmp_path):
    begins = {"devices": 2, "kind": "cuda", "strategy": "fsdp", "nodes": 1, "from": "m"}
    larger = {"event": "resumed", **begins, "devices": 8, "nodes": 2}
    happened = [
        {"event": "started", "step": 0, "time": "2026-01-01T00:00:00+00:00", **begins},
        *({"event": "saved", "step": step, "position": 300 * step} for step in (2, 4, 6)),
        {**larger, "step": 6, "time": "2026-01-02T00:00:00+00:00"},
        {"event": "ended", "step": 8, "position": 2400, "code": 75, "reason": "stopped on request"},
        {**larger, "step": None},
        {"event": "ended", "step": 9, "code": 76, "reason": "loss nan"},
        {"event": "new", "step": 3},
        {"event": 3},
    ]
    lines = [training(step) for step in range(1, 10)]
    lines[4]["loss"] = None
    lines += [{"step": 5, "verdict": "skip", "reason": "loss nan", "position": 1234}]
    lines += [
        {"step": 7, "verdict": "forgetting", "reason": "general", "position": 2100},
        {"step": 8, "verdict": "other", "reason": "?", "position": 2400},
    ]
    run = made(tmp_path / "run", lines, events=happened, status={"code": 76, "reason": "loss nan"})
    read = reading.read_run(run)
    found = reading.timeline(read)
    expected = "started 0, saved 2, saved 4, skipped 5, saved 6, killed 6, resumed 6, "
    expected += "forgetting 7, stopped 8, resumed 8, spike 8, failed 9"
    assert ", ".join(f"{one.kind} {one.step}" for one in found) == expected
    shown = report(run)
    assert "8 cuda devices of 2 machines; fsdp; from m" in shown.text
    assert "at sequence 1,234" in shown.text
    assert "How it ended Failed Loss nan (exit code 76) No checkpoint." in shown.text
    assert shown.lines("loss")[0]["y"][4] is None, "a step that was skipped is a gap"


def test_the_speed_is_that_of_the_devices_which_are_named(tmp_path):
    lines = [training(step, tokens_per_second=4000.0 + 5000 * (step > 6)) for step in range(1, 10)]
    for step, speed in ((6, "9,000"), (9, "4,000"), (None, "4,000")):
        event = {"event": "resumed", "step": step, "devices": 8, "kind": "cuda"}
        run = made(tmp_path / f"run-{step}", lines, events=[event])
        assert f"Tokens per second {speed} 8 cuda" in report(run).text


@pytest.fixture
def going(tmp_path):
    """A run of two steps that isn't over."""
    status = {"code": None, "reason": "running"}
    return made(tmp_path / "run", [training(1), training(2)], status=status)


def test_a_run_that_is_going_or_was_killed_in_a_line(going):
    with (going / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')
    shown = report(going)
    for words in ("Running, or killed", "cut off", "no validation"):
        assert words in shown.text
    assert shown.lines("loss")[0]["x"] == [1, 2]


def test_lines_of_a_log_that_are_none(going):
    file = going / "metrics.jsonl"
    before = '{}\n[]\n{"step": "x"}\n\n{"step": 4, "tokens": 1.5}\n' + "[" * 3000 + "\n"
    behind = '{"step": 9, "loss": "x", "eval": 3, "sources": [], "lr": true}\n'
    file.write_text(before + file.read_text() + behind)
    shown = report(going)
    assert "line 1 can't be read." in shown.text
    assert shown.lines("loss")[0]["y"] == [9.0, 4.5]


def test_a_run_without_files_of_use(going):
    for name in ("metrics.jsonl", "STATUS.json"):
        (going / name).unlink()
    (going / "arguments.yaml").write_text("a: [")
    assert "no line to draw" in report(going).text


def test_a_run_with_a_validation_before_its_first_step_and_not_a_number(going):
    lines = '{"step": 0, "eval_loss": null}\n{"step": 0, "eval_loss": 3.5}\n'
    (going / "metrics.jsonl").write_text(lines)
    assert report(going).lines("eval_loss")[0]["y"] == [None, 3.5]


def test_text_from_runs_is_text(tmp_path):
    said = {"how": "greedy", "tokens": 1, "step": 1, "prompt": HOSTILE, "text": HOSTILE}
    lines = [training(1, **{HOSTILE: 1.0}, sources={HOSTILE: {"tokens": 1, "epochs": 1}})]
    lines += [{"step": 1, "eval_loss": 1.0, "eval": {HOSTILE: {"loss": 1.0}, "b": {"loss": 2.0}}}]
    lines += [{"step": 1, "verdict": "warn", "reason": HOSTILE}]
    happened = [{"event": "started", "step": 0, "devices": 1}]
    happened[0] |= dict.fromkeys(("model", "from", "kind"), HOSTILE)
    flags = {"model_name": HOSTILE, "data_mix": HOSTILE, HOSTILE: HOSTILE}
    status = {"code": 1, "reason": HOSTILE}
    runs = [
        made(tmp_path / name, lines, flags=flags, status=status, events=happened, samples=[said])
        for name in ("a", "<img src=x>")
    ]
    for shown in (report(runs[0]), report(*runs)):
        tags = [tag for tag, _ in shown.tags]
        assert tags.count("script") == 3 and not {"img", "b", "iframe"} & set(tags)
        names = [name for _, attributes in shown.tags for name in attributes]
        assert not [name for name in names if name.startswith("on")]
        assert HOSTILE.split("\u2028")[0] in shown.text
        assert any(one["set"].endswith(HOSTILE) for one in shown.lines("eval_loss"))


@pytest.mark.parametrize("others", [(), ("other",)])
def test_the_best_loss_is_of_the_rows_of_the_last_one(tmp_path, others):
    """A run that was resumed with another --eval_iters, and one that then read all rows."""
    for end, words in ((3, "best 4 at step 2; before"), (4, "best 4.5000 at step 4; before")):
        lines = []
        for step, loss in list(enumerate((2.0, 1.9, 4.0, 4.2, 4.5)))[: end + 1]:
            part = {} if step == 4 else {"rows": 9 if step < 2 else 3, "of_rows": 99}
            sets = dict.fromkeys(("validation", *others), {"loss": loss, **part})
            lines.append({"step": step, "tokens": 9 * step, "eval_loss": loss, "eval": sets})
        run = reading.read_run(made(tmp_path / str(end), lines))
        said = page.last_and_best(run, next(iter(run.numbers["eval_loss"].values())))[1]
        assert said.startswith(words) and "it was of other rows" in said, said


def test_runs_beside_each_other(tmp_path):
    lines = [training(step) for step in range(1, 5)]
    flags = {"lr": 1e-3, "compile": "auto"}
    others = {"lr": 2e-3, "compile": "auto", "new_flag": None}
    one = made(tmp_path / "x" / "same", [EVALUATIONS[0], *lines], flags=flags)
    other = made(tmp_path / "y" / "same", lines, flags=others)
    shown = report(one, other, one, output=tmp_path / "both.html")
    assert [line["set"] for line in shown.lines("loss")] == ["x/same", "y/same"], "each once"
    assert shown.lines("loss")[0]["x"] == [2048, 4096, 6144, 8192], "tokens, as steps may differ"
    differing = shown.text.split("Flags Flag x/same y/same")[1]
    assert "same Validation loss 3 best 3 at step 0 Tokens 8,192 step 4" in shown.text
    assert "same Validation loss \N{EN DASH} no validation Tokens 8,192 step 4" in shown.text
    assert differing.startswith(" lr 0.001 0.002 new_flag \N{EN DASH} null All flags")
    assert not (one / "report.html").exists()
    third = made(tmp_path / "z", lines, flags=flags)
    copy = shutil.copytree(third, tmp_path / "z2")
    assert "All flags are equal" in report(third, copy, output=tmp_path / "e.html").text


def test_samples_are_shown_by_steps_and_the_later_ones_of_a_step(tmp_path):
    common = {"tokens": 4, "how": "greedy"}
    many = [
        {"step": step, "prompt": prompt, "text": f"{prompt} at {step}{nth}", **common}
        for step, nth in ((0, ""), (2, " old"), (2, ""))
        for prompt in ("one", "two")
    ]
    text = report(made(tmp_path / "run", [training(2)], samples=[*many, {"step": 3}])).text
    shown = "step 0 one one at 0 step 0 two two at 0 step 2 one one at 2 step 2 two two at 2 [^s]"
    assert re.search(shown, text)


# ------------------------------------------------------------------------------- large logs


def test_what_is_thinned_out_keeps_its_ends_extremes_and_gaps():
    steps = np.arange(1, 500_001)
    values = np.sin(steps / 1e4)
    values[123_456], values[400_001], values[77] = 50.0, -50.0, math.nan
    thin = figures.thinned(reading.Series(steps, values))
    assert len(thin.steps) <= figures.MAX_POINTS and (np.diff(thin.steps) > 0).all()
    assert thin.steps[0] == 1 and thin.steps[-1] == 500_000
    assert np.nanmax(thin.values) == 50.0 and np.nanmin(thin.values) == -50.0 and 78 in thin.steps
    short = reading.Series(steps[:5], values[:5])
    assert figures.thinned(short) is short
    gaps = reading.Series(steps[:9000], np.full(9000, math.nan))
    assert len(figures.thinned(gaps).steps) <= figures.MAX_POINTS


def test_a_trend_is_an_exponential_mean():
    series = reading.Series(np.arange(200), np.r_[np.nan, np.ones(99), np.zeros(100)])
    means = figures.trend(series).values
    assert math.isnan(means[0]) and means[1:100] == pytest.approx(1)
    assert means[101] == pytest.approx(0.5, abs=0.01)


@pytest.mark.longer
def test_a_page_of_half_a_million_lines_stays_small(tmp_path):
    def lines():
        for step in range(1, 500_001):
            spike = 99.0 if step == 314_159 else 0.0
            yield json.dumps(training(step, loss=3 + math.sin(step) + spike)) + "\n"

    run = made(tmp_path / "run", [training(1)])
    with (run / "metrics.jsonl").open("w") as file:
        file.writelines(lines())
    shown = report(run)
    assert (run / "report.html").stat().st_size < LARGEST_BYTES
    raw, trend = shown.lines("loss")
    assert not raw["is_trend"] and max(raw["y"]) > 90 and 314_159 in raw["x"]
    assert len(raw["x"]) <= figures.MAX_POINTS
    assert max(trend["y"]) < 10 and trend["x"][-1] == 500_000


@pytest.mark.longer
def test_many_runs_stay_small(tmp_path):
    lines = [training(step) for step in range(1, 1500)]
    runs = [made(tmp_path / f"run-{number}", lines) for number in range(12)]
    report(*runs)
    assert (runs[0] / "report.html").stat().st_size < LARGEST_BYTES


# ------------------------------------------------------------------------------- mistakes


def test_a_comparison_leaves_the_page_of_its_first_run(tmp_path, capsys):
    one, other = (made(tmp_path / name, [training(1)]) for name in ("one", "other"))
    (one / "report.html").write_text("mine")
    assert command.main([str(one), str(other)]) == 0
    assert f"Written: {one / 'comparison.html'}" in capsys.readouterr().out
    assert (one / "report.html").read_text() == "mine"


@pytest.mark.parametrize(
    ("output", "error", "code"), [("a.html", errno.ENOSPC, 74), ("/proc/a.html", None, 73)]
)
def test_a_page_that_cannot_be_written(tmp_path, capsys, monkeypatch, output, error, code):
    run = made(tmp_path / "run", [training(1)])

    def fails(*_):
        raise OSError(error, os.strerror(error))

    if error is not None:
        monkeypatch.setattr("fabric_llm.report.page.write_atomically", fails)
    with pytest.raises(SystemExit) as exit:
        command.main([str(run), "--output", str(tmp_path / output)])
    said = capsys.readouterr().err
    assert exit.value.code == code and "written: " in said and len(said.splitlines()) == 1


def test_mistakes_are_one_sentence(tmp_path, capsys):
    run = made(tmp_path / "run", [training(1)])
    (run / "step-00000001" / "trainer").mkdir(parents=True)
    many = tmp_path / "other runs"
    for number in range(12):
        made(many / f"run {number}", [training(1)])
    for argv, words in (
        ([], "the following arguments are required"),
        ([tmp_path / "rum"], "Did you mean"),
        ([tmp_path], "It holds the runs run."),
        ([many], "run 1, run 10, run 11, run 2, run 3, run 4, run 5, run 6, run 7 and 2 more."),
        ([many / "run"], "No run"),
        ([tmp_path / "other"], f"Did you mean '{tmp_path}/other runs'?"),
        ([run / "step-00000001"], "is a checkpoint; its run is"),
        ([run, "--output", tmp_path], "must name a file"),
        ([run, "--output", tmp_path / "no" / "x.html"], "in a folder that is there"),
        ([run, "--bogus"], "--bogus"),
    ):
        with pytest.raises(SystemExit, match="2"):
            command.main([str(word) for word in argv])
        said = capsys.readouterr().err
        assert said.startswith("fabric_llm.report: error: ") and words in said
        assert len(said.splitlines()) == 1
    code = (
        "import sys; sys.modules['plotly'] = None; from fabric_llm.report.__main__ import "
        f"main; sys.exit(main([{str(run)!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "needs plotly: pip install plotly" in done.stderr
    assert not (run / "report.html").exists()


def test_data_cannot_end_its_element():
    to_json = page.environment().from_string("{{ data | tojson }}")
    said = to_json.render(data=[HOSTILE])
    assert json.loads(said) == [HOSTILE]
    assert not set("<>&") & set(said)
    with pytest.raises(ValueError):
        to_json.render(data=[math.nan])


# ------------------------------------------------------------------------------- in a browser

PROBE = """<script>
window.problems = [];
addEventListener("error", (event) => problems.push(event.message || "a resource: " + event.target.outerHTML), true);
addEventListener("securitypolicyviolation", (event) => problems.push("the network: " + event.blockedURI));
</script>"""
SEEN = """<script>
const traces = () => document.querySelectorAll(".plot .scatterlayer .trace").length;
const seen = { before: traces() };
seen.axis = document.querySelector(".xtitle").textContent;
seen.cut = [...document.querySelectorAll(".headline")].some((one) => one.scrollWidth > one.clientWidth);
seen.ticks = document.querySelectorAll("#chart-grad_norm .ytick").length;
seen.labels = [...document.querySelectorAll("#chart-forgetting .legendtext")].map((one) => one.textContent);
const wide = document.documentElement.scrollWidth > innerWidth;
const asked = performance.getEntriesByType("resource").map((one) => one.name).filter((name) => !/^(data|blob):/.test(name));
const shown = JSON.stringify({ ...seen, problems, asked, wide });
document.body.innerHTML = "";
document.body.setAttribute("data-seen", shown);
</script>"""


def browser():
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    return next(filter(None, map(shutil.which, names)), None)


def opened(file, tmp_path, width=1280):
    """What a page does in a real browser: its console's errors, and what PROBE and SEEN have
    seen."""
    content = file.read_text()
    policy = r'<meta http-equiv="Content-Security-Policy"[^>]*>'
    content = re.sub(policy, r"\g<0>" + PROBE.replace("\\", r"\\"), content, count=1)
    copy = tmp_path / f"{file.stem}-{width}.html"
    copy.write_text(content.replace("</body>", SEEN + "</body>"))
    flags = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking "
    flags += f"--enable-logging=stderr --window-size={width},900 --dump-dom"
    words = [browser(), *flags.split(), f"--user-data-dir={tmp_path / 'profile'}", copy.as_uri()]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    found = re.search(r'data-seen="([^"]*)"', done.stdout)
    assert found, f"the page wasn't drawn: {done.stderr[-2000:]}"
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return console, json.loads(html.unescape(found[1]))


@pytest.mark.longer
@pytest.mark.skipif(browser() is None, reason="no chromium or chrome is installed")
def test_it_opens_in_a_browser_without_errors_and_without_the_network(tmp_path):
    said = {"how": "greedy", "tokens": 1, "step": 1, "prompt": HOSTILE, "text": HOSTILE}
    steps = [training(step, **{HOSTILE: 1.0}) for step in range(1, 300)]
    lines = [EVALUATIONS[0], *steps, EVALUATIONS[1]]
    lines += [{"step": 7, "verdict": "skip", "reason": HOSTILE}]
    given = {"samples": [said], "flags": {"x": HOSTILE}}
    runs = [made(tmp_path / name, lines, **given) for name in ("a", "b")]
    shown = report(*runs)
    console, seen = opened(runs[0] / "report.html", tmp_path)
    assert console == [] and seen["problems"] == [] and seen["asked"] == [] and not seen["wide"]
    assert seen["before"] == sum(len(chart["traces"]) for chart in shown.data["charts"])
    assert seen["axis"] == "Tokens"


@pytest.mark.skipif(browser() is None, reason="no chromium or chrome is installed")
@pytest.mark.longer
@pytest.mark.parametrize("width", [500, 1400])  # a window can't be narrower
def test_nothing_is_cut_off_and_axes_and_budgets_have_labels(tmp_path, width):
    steps = [training(step, grad_norm=1.2 + step % 3 / 10) for step in range(1, 21)]
    lines = [EVALUATIONS[0], *steps, EVALUATIONS[1]]
    status = {"code": 76, "reason": "a long sentence about a run that has ended badly; " * 3}
    names = [f"a-run-with-a-name-{name}" for name in "abc"]
    runs = [made(tmp_path / name, lines, status=status) for name in names]
    for compared in (runs[:1], runs):
        report(*compared)
        _, seen = opened(runs[0] / "report.html", tmp_path, width)
        assert not seen["wide"] and not seen["cut"] and seen["ticks"] > 1
        assert any(label.endswith("budget of general") for label in seen["labels"])


# --------------------------------------------------------------- what was undone, constants, titles


def test_steps_that_a_rewind_has_undone_are_drawn_apart(toys, tmp_path):
    flags = f"--model_name {toys}/gpt2-no-dropout --train_data_dir {toys}/data".split()
    flags += REWINDS.format(output=tmp_path).split()
    flags += "--micro_batch_size 4 --eval_iters 0 --max_step 12 --log_step_interval 1".split()
    flags += ["--lr_decay", "false"]
    # step 11 goes back to 8
    assert run_ranks(1, train_with_faults, flags, {0: [10]}, 100.0) == [0]
    shown = report(tmp_path / "run")
    [kept] = shown.lines("loss")
    assert kept["x"] == list(range(1, 13))
    [loss] = [chart for chart in shown.data["charts"] if chart["name"] == "loss"]
    [undone] = loss["undone"]
    assert undone["x"] == [9, 10, 11] and undone["y"][-1] > 5 * max(kept["y"])
    assert undone["line"]["dash"] == "dot" and not undone["showlegend"]
    known = {figure.name for figure in figures.FIGURES}
    assert set(shown.names()) <= known, "a title of its own for each number that a run logs"


def test_a_rewind_comes_after_what_it_has_undone(tmp_path):
    begins = {"event": "started", "step": 0, "position": 0}
    saves = [{"event": "saved", "step": step, "position": 8 * step} for step in (4, 8)]
    again = {"event": "saved", "step": 8, "position": 96}
    events = [begins, *saves, again, {"event": "ended", "step": 8, "code": 0, "reason": "done"}]
    rewind = {"step": 4, "position": 64, "verdict": "rewind", "reason": "a spike"}
    run = made(tmp_path / "run", [training(1), rewind], events=events)
    found = ", ".join(f"{one.kind} {one.step}" for one in reading.timeline(reading.read_run(run)))
    assert found == "started 0, saved 4, saved 8, rewound 4, saved 8, done 8"


def test_what_was_undone_at_several_times_is_several_lines(tmp_path):
    run = made(tmp_path / "run", [training(step) for step in range(1, 9)])
    times = [{"step": 2, "undone": 2}, training(3), training(4)]
    times += [{"step": 6, "undone": 1}, training(7)]
    text = "".join(json.dumps(line) + "\n" for line in times) + '{"step": 7, "lo'
    (run / "metrics.undone.jsonl").write_text(text)
    [loss] = [chart for chart in report(run).data["charts"] if chart["name"] == "loss"]
    assert [trace["x"] for trace in loss["undone"]] == [[3, 4], [7]]


def test_a_constant_is_drawn_at_its_value(tmp_path):
    """Of equal numbers plotly makes an axis from one less to one more, on which a rate of 2e-5
    looks like 0."""
    shown = report(made(tmp_path / "run", [{**training(step), "lr": 2e-5} for step in range(1, 9)]))
    axes = {chart["name"]: chart["layout"]["yaxis"] for chart in shown.data["charts"]}
    assert axes["lr"] == {"rangemode": "tozero"} and "rangemode" not in axes["loss"]


def test_how_it_ended_has_the_whole_width(tmp_path):
    content = report(made(tmp_path / "run", [training(1)])).content
    assert content.count('<div class="wide"><dt>How it ended</dt>') == 1
    assert re.search(r"\.headline > \.wide { flex-basis: 100%; }", content)
